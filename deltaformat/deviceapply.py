"""A version's changes written to live tensors wherever they are: on a device, and checked there (DF-RD-03).

Tensors that are contiguous memory of a device get positions and differences, all in one go, and their changed
blocks are hashed there. Everything else is written element by element from the host (see `destinations`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltaformat.blocks import Bytes
from deltaformat.destinations import Application, Work, open_work
from deltaformat.encodings import Changes
from deltaformat.gpu.applying import own_bytes
from deltaformat.gpu.diffing import BlockDiff
from deltaformat.gpu.engines import DeviceChoice, Engine, choose_engine, current, stays_on_device
from deltaformat.gpu.table import BlockTable, Integers
from deltaformat.gpu.transfer import upload
from deltaformat.inplace import BlockUpdate, shared_memory, span_of
from deltaformat.patches import BlockChange, TensorChange, element_bytes
from deltaformat.tensors import TensorSpec
from deltaformat.torchtensors import is_torch
from deltaformat.versionmap import VersionMap

__all__ = ["LiveUpdate", "OnDevice"]


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """How live tensors on a device are changed.

    Attributes:
        choice: What works there; see `Policy.device`.
        version: What the tensors become.
        block_bytes: The store's block size.
        algorithm: Its digest.
    """

    choice: DeviceChoice
    version: VersionMap
    block_bytes: int
    algorithm: str


class LiveUpdate:
    """Changes written to live tensors: all of them, or none; and back again.

    Memory: as `Application` for what is written from the host; on a device the changes while they are
    applied, and what was there before of blocks that are replaced.

    Args:
        state: The live tensors by name.
        specs: What those must be that the version has.
        changes: What to write.
        label: Names the version that `state` must be, for errors.
        keep: Whether `state` must hold what the changes were made against, and is to get it back after a
            failure.
        on_device: How tensors on a device are changed.

    Raises:
        InconsistentError, UnsupportedError, MalformedError: As for `open_work` and `Application`, or an
            engine that cannot serve. Nothing has been written.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
        changes: Sequence[TensorChange],
        *,
        label: str,
        keep: bool,
        on_device: OnDevice,
    ) -> None:
        rest, members = _divide(state, open_work(state, specs, changes), keep, on_device.choice)
        self._parts = [_DevicePart(found, label=label, keep=keep, how=on_device) for found in members]
        self._host = Application(rest, label=label, keep=keep)
        self.nbytes = self._host.nbytes + sum(part.nbytes for part in self._parts)

    def write(self) -> None:
        """Write all changes; after a failure what was there before is put back.

        Raises:
            CorruptError: On a device a changed block is not the version's afterwards: it was not what the
                changes were made against.
            LimitError: The device has not enough memory.
        """
        self._host.write()
        done = []
        try:
            for part in self._parts:
                part.write()
                done.append(part)
        except BaseException:
            for part in reversed(done):
                part.undo()
            self._host.undo()
            raise

    def undo(self) -> None:
        """Put back what was there before `write`."""
        for part in reversed(self._parts):
            part.undo()
        self._host.undo()


Member = tuple[TensorChange, Any]
"""What changes in a tensor, and the tensor's own bytes on its device."""


def _divide(
    state: Mapping[str, Any], work: Sequence[Work], keep: bool, choice: DeviceChoice
) -> tuple[list[Work], list[list[Member]]]:
    """Divide into what is written from the host, and what is changed on each device."""
    here = [change.name for _, change in work if stays_on_device(state[change.name], choice)]
    engaged = {name for name in here if state[name].numel()}
    by_device: dict[Any, list[str]] = defaultdict(list)
    for _, change in work:
        # Also those that cannot be changed by the block may reach into one that can.
        if is_torch(state[change.name]):
            by_device[state[change.name].device].append(change.name)
    for names in by_device.values():
        for one, other, _ in shared_memory([span_of(state[name]) for name in names]):
            engaged -= {names[one], names[other]}  # a difference is added once
    rest: list[Work] = []
    members: dict[Any, list[Member]] = defaultdict(list)
    for destination, change in work:
        view = None
        if change.name in engaged and _by_blocks(change, keep):
            view = own_bytes(state[change.name])
        if view is None:
            rest.append((destination, change))
        else:
            members[view.device].append((change, view))
    return rest, list(members.values())


def _by_blocks(change: TensorChange, keep: bool) -> bool:
    """Whether a change can be made, and taken back, on the device alone."""
    if change.content is not None or change.under is not None:
        return not keep  # what was there before is kept on the host, where there is room for it
    return all(block.positions is None or block.old is not None for block in change.blocks)


class _DevicePart:
    """What changes on one device."""

    def __init__(self, members: Sequence[Member], *, label: str, keep: bool, how: OnDevice) -> None:
        self._engine: Engine = "auto" if how.choice == "off" else how.choice
        self._table = BlockTable.of([view for _, view in members], how.block_bytes)
        choose_engine(self._engine, self._table.device)
        self._algorithm = how.algorithm
        self._names = [change.name for change, _ in members]
        self._problem = (
            f"the given state is not {label}: load it whole with `load_into`, then follow; it is as it was"
            if keep
            else "the device does not hold what was written to it; load it anew"
        )
        self._whole: list[tuple[int, TensorChange]] = []
        diffs: list[BlockDiff] = []
        for number, (change, _) in enumerate(members):
            if change.content is not None or change.under is not None:
                self._whole.append((number, change))
            else:
                diffs += [
                    _block_diff(number, change.dtype, block, how.block_bytes) for block in change.blocks
                ]
        self.nbytes = sum(change.changed * element_bytes(change.dtype) for change, _ in members)
        self._blocks, self._expected = self._digests(diffs, how.version)
        self._update = BlockUpdate(self._table, self._names, diffs, engine=self._engine)

    def _digests(self, diffs: Sequence[BlockDiff], version: VersionMap) -> tuple[Integers, Bytes]:
        """The blocks that change, as numbers in the table, and their digests in the version."""
        wanted = np.zeros(len(self._table), np.bool_)
        first = self._table.first
        tensors = np.array([diff.tensor for diff in diffs], np.int64)
        wanted[first[tensors] + np.array([diff.block for diff in diffs], np.int64)] = True
        for number, _ in self._whole:
            wanted[first[number] : first[number + 1]] = True
        blocks = np.flatnonzero(wanted)
        starts = np.array([version.blocks(version.row(name)).start for name in self._names], np.int64)
        tensor = self._table.tensor[blocks]
        return blocks, version.digest[starts[tensor] + blocks - first[tensor]]

    def write(self) -> None:
        """Change it and check it; after an error it is as before, if that is kept."""
        with current(self._table.device):
            for number, change in self._whole:
                width = element_bytes(change.dtype)
                for run in change.runs():
                    place = self._table.views[number][run.start * width : (run.start + run.count) * width]
                    upload(np.ascontiguousarray(run.values).view(np.uint8), place, "weights")
        self._update.apply(self._blocks, self._expected, self._algorithm, problem=self._problem)

    def undo(self) -> None:
        """Put back what was there before."""
        self._update.undo()


def _block_diff(number: int, dtype: str, change: BlockChange, block_bytes: int) -> BlockDiff:
    width = element_bytes(dtype)
    block = change.start * width // block_bytes
    if change.positions is None or change.old is None:
        return BlockDiff(number, block, None, np.ascontiguousarray(change.values).view(np.uint8))
    return BlockDiff(number, block, Changes(width, change.positions, change.values - change.old), None)
