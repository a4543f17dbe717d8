"""A writer's tensors on a device: hashed and compared there, so that only what changed crosses to the host.

A survey takes some tensors of one device. It hashes all their blocks, and counts what differs from the
version before where that is kept on the device; the host waits once for both. Then, in windows of bounded
memory, positions and differences are collected on the device and cross, one window ahead of the host, which
makes each new block from the old one that it holds. The host needs the old block anyway: positions are coded
by the magnitudes of old elements (SPEC 9.3). So the device needs the version before for the comparison only;
where it is kept on the host alone, its blocks that changed cross to the device for that, a window at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes
from deltaformat.digests import DIGEST_SIZES
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import Changes
from deltaformat.encodings.strata import Positions
from deltaformat.errors import CorruptError, ErrorCode
from deltaformat.gpu.diffing import (
    WINDOW_BYTES,
    Counts,
    Pairs,
    Window,
    byte_runs,
    count_changes,
    cut_windows,
)
from deltaformat.gpu.engines import Engine, current, load_torch
from deltaformat.gpu.hashing import digests_of
from deltaformat.gpu.table import ALIGNMENT, BlockTable, Integers, flat_views
from deltaformat.gpu.transfer import Download, upload, upload_table
from deltaformat.torchtensors import describe

__all__ = ["CHANGES", "CONTENT", "NOTHING", "DeviceBaseline", "DeviceTensor", "Survey", "Wanted"]

NOTHING, CHANGES, CONTENT = 0, 1, 2
"""What the host wants of a block."""


class Wanted(NamedTuple):
    """What the host wants of a tensor.

    Attributes:
        blocks: NOTHING, CHANGES or CONTENT of each block.
        base: The tensor's old bytes, which the host holds; those of blocks with CHANGES are right.
        expected: The digest of each old block, as far as there are any; for those with CHANGES.
    """

    blocks: npt.NDArray[np.uint8]
    base: Bytes | None
    expected: Bytes


@dataclass(slots=True)
class _Kept:
    """A tensor of the version before, on the device, and the digests of its blocks."""

    data: Any
    digests: Bytes


class DeviceBaseline:
    """What a writer keeps on devices: the version before, if it is to be kept there.

    As with `Baseline`, nothing is concluded from its presence: a block counts only where its digest here is
    the parent's.

    Args:
        algorithm: Name of the store's digest.
        block_bytes: The store's block size.
        engine: What computes on devices.
        kept: Whether the version before is kept on the device; otherwise it crosses from the host.
    """

    def __init__(self, algorithm: str, block_bytes: int, *, engine: Engine, kept: bool) -> None:
        self.algorithm = algorithm
        self.block_bytes = block_bytes
        self.engine: Engine = engine
        self.kept = kept
        self._held: dict[str, _Kept] = {}

    def get(self, name: str, view: Any) -> _Kept | None:
        """The tensor of that name, if it is as long as `view` and where that is."""
        held = self._held.get(name)
        same = held is not None and held.data.device == view.device and held.data.numel() == view.numel()
        return held if same else None

    def keep(self, name: str, view: Any, digests: Bytes, *, own: bool) -> None:
        """Keep a tensor's content from now on; with `own` the memory of `view` is nobody else's."""
        held = self.get(name, view)
        if held is not None and np.array_equal(held.digests, digests):
            return
        if held is None or own:
            self._held[name] = _Kept(view if own else view.clone(), digests)
        else:
            held.data.copy_(view)
            held.digests = digests

    def retain(self, names: Collection[str]) -> None:
        """Forget every tensor that is not among `names`."""
        for name in self._held.keys() - set(names):
            del self._held[name]

    def forget(self) -> None:
        """Forget all: something here was not what its digest says."""
        self._held.clear()

    @property
    def nbytes(self) -> int:
        """Bytes kept on devices."""
        return sum(int(kept.data.numel()) for kept in self._held.values())


class Survey:
    """Tensors of one device on their way to the host.

    Args:
        baseline: The writer's.
        tensors: Name and tensor of each.
        own: Whether nobody else has their memory, so that it can be kept.
        ready: An event after which their content stands, if it was made on another stream.
    """

    def __init__(
        self,
        baseline: DeviceBaseline,
        tensors: Sequence[tuple[str, Any]],
        *,
        own: bool = False,
        ready: Any = None,
    ) -> None:
        self._baseline = baseline
        self._given = list(tensors)
        self._own = own
        self._ready = ready
        self._table: BlockTable | None = None
        self._wanted: list[Wanted] = []
        self._arrived: dict[int, tuple[Changes | None, Bytes | None]] = {}
        self._windows: Iterator[_Crossing] = iter(())
        self._pending: _Crossing | None = None
        self.digests: Bytes = np.empty((0, DIGEST_SIZES[baseline.algorithm]), np.uint8)
        self.members = [
            DeviceTensor(self, number, name, *describe(tensor), tensor.numel() * tensor.element_size())
            for number, (name, tensor) in enumerate(self._given)
        ]

    @property
    def pinned(self) -> bool:
        """Whether old content crosses to a device that reads page-locked memory by itself."""
        return not self._baseline.kept and self._given[0][1].device.type == "cuda"

    def run(self, want: Callable[[DeviceTensor, Bytes], Wanted]) -> None:
        """Hash and count, once; then begin to collect what the host wants.

        Args:
            want: Given a tensor and its blocks' digests, tells what is wanted of it.
        """
        if self._table is not None:
            return
        device = self._given[0][1].device
        with current(device):
            if self._ready is not None:
                stream = load_torch().cuda.current_stream(device)
                stream.wait_event(self._ready)
                for _, tensor in self._given:
                    tensor.record_stream(stream)  # its memory is not used anew before this stream is done
            self._table = table = BlockTable.of(
                flat_views(tensor for _, tensor in self._given), self._baseline.block_bytes
            )
            digests = Download(
                [digests_of(table, self._baseline.algorithm, engine=self._baseline.engine)], "digests"
            )
            counted, rows, counts = self._count(table)
            (self.digests,) = digests.take()
            counts = (
                counts if counted is None else _spread(Download([counted.blocks], "counts"), rows, counts)
            )
            self._wanted = [
                want(member, self.digests[table.first[number] : table.first[number + 1]])
                for number, member in enumerate(self.members)
            ]
            modes = np.concatenate([wanted.blocks for wanted in self._wanted])
            comparable = self._comparable(table) if self._baseline.kept else None
            if comparable is not None:
                modes = np.where((modes == CHANGES) & ~comparable, CONTENT, modes)
            windows = cut_windows(np.flatnonzero(modes), table.length, WINDOW_BYTES)
            self._windows = self._cross(table, windows, modes, counted, rows, counts)
            self._pending = next(self._windows, None)

    def take(self, number: int, blocks: range) -> dict[int, tuple[Changes | None, Bytes | None]]:
        """Wait for what is wanted of some blocks of a tensor: changes or content, by block index.

        Raises:
            CorruptError: A block that differs by its digest had nothing that differs.
        """
        assert self._table is not None
        first = int(self._table.first[number])
        wanted = [index for index in blocks if self._wanted[number].blocks[index] != NOTHING]
        while missing := [index for index in wanted if first + index not in self._arrived]:
            pending = self._pending
            if pending is None:
                raise self.fail(self.members[number].name, missing[0])
            with current(self._table.device):
                self._pending = next(self._windows, None)
            self._arrived.update(pending.take())
        return {index: self._arrived.pop(first + index) for index in wanted}

    def fail(self, name: str, block: int) -> CorruptError:
        """The error of a block that is not what the device said; what is kept there is trusted no more."""
        self._baseline.forget()
        return CorruptError(
            ErrorCode.DIGEST_MISMATCH,
            "what came from the device does not have the digest that was computed there: the tensor was"
            " changed while it was committed, or the device or its driver is at fault; nothing was committed."
            ' Policy(device="off") copies weights to the host and computes there',
            where=f"tensor {name[:200]!a}, block {block}",
        )

    # -- counting --------------------------------------------------------------------------------------------

    def _count(self, table: BlockTable) -> tuple[Counts | None, Integers, Integers]:
        """Count changes against what is kept on the device.

        Gives the counts there, the row that each block has among them or -1, and room for the counts.
        """
        rows = np.full(len(table), -1, np.int64)
        counts = np.zeros(len(table), np.int64)
        news, olds, widths = [], [], []
        done = 0
        for number, view in enumerate(table.views):
            held = self._baseline.get(self._given[number][0], view) if self._baseline.kept else None
            if held is None or not view.numel():
                continue
            news.append(view)
            olds.append(held.data)
            widths.append(get_dtype(self.members[number].dtype).width)
            first, last = int(table.first[number]), int(table.first[number + 1])
            rows[first:last] = np.arange(done, done + last - first)
            done += last - first
        if not news:
            return None, rows, counts
        size = self._baseline.block_bytes
        pairs = Pairs(BlockTable.of(news, size), BlockTable.of(olds, size), np.array(widths, np.int64))
        return count_changes(pairs, engine=self._baseline.engine), rows, counts

    def _comparable(self, table: BlockTable) -> npt.NDArray[np.bool_]:
        """For which blocks the old content is on the device."""
        found = np.zeros(len(table), np.bool_)
        for number, view in enumerate(table.views):
            held = self._baseline.get(self._given[number][0], view)
            if held is not None:
                expected = self._wanted[number].expected
                both = min(len(expected), len(held.digests))
                first = int(table.first[number])
                found[first : first + both] = (held.digests[:both] == expected[:both]).all(axis=1)
        return found

    # -- crossing --------------------------------------------------------------------------------------------

    def _cross(
        self,
        table: BlockTable,
        windows: Sequence[Integers],
        modes: npt.NDArray[Any],
        counted: Counts | None,
        rows: Integers,
        counts: Integers,
    ) -> Iterator[_Crossing]:
        """Start window after window; when the last has been started, keep the new content on the device."""
        for blocks in windows:
            content, changed = blocks[modes[blocks] == CONTENT], blocks[modes[blocks] == CHANGES]
            window = None
            if changed.size:
                pairs = self._pairs(table, changed)
                if counted is not None:
                    tiles = counted.tiles
                    if tiles is not None:
                        tiles = tiles[upload_table(rows[changed], table.device)]
                    found = counts[changed]
                else:
                    here = count_changes(pairs, engine=self._baseline.engine)
                    (found,), tiles = Download([here.blocks], "counts").take(), here.tiles
                window = Window(pairs, found, tiles, engine=self._baseline.engine)
            yield _Crossing(table, content, changed, window)
        if self._baseline.kept:
            for number, (name, tensor) in enumerate(self._given):
                view = table.views[number]
                digests = self.digests[table.first[number] : table.first[number + 1]]
                own = self._own or (bool(view.numel()) and view.data_ptr() != tensor.data_ptr())
                self._baseline.keep(name, view, digests, own=own)

    def _pairs(self, table: BlockTable, blocks: Integers) -> Pairs:
        """The new content of blocks, and the old, which crosses from the host where it is not kept here."""
        runs = byte_runs(table, blocks)
        news = [table.views[number][start:stop] for number, start, stop in runs]
        if self._baseline.kept:
            olds = []
            for number, start, stop in runs:
                held = self._baseline.get(self._given[number][0], table.views[number])
                assert held is not None
                olds.append(held.data[start:stop])
        else:
            olds = self._uploaded(table, runs)
        widths = [get_dtype(self.members[number].dtype).width for number, _, _ in runs]
        size = table.block_bytes
        return Pairs(BlockTable.of(news, size), BlockTable.of(olds, size), np.array(widths, np.int64))

    def _uploaded(self, table: BlockTable, runs: Sequence[tuple[int, int, int]]) -> list[Any]:
        torch = load_torch()
        padded = [-(-(stop - start) // ALIGNMENT) * ALIGNMENT for _, start, stop in runs]
        room = torch.empty(sum(padded) + ALIGNMENT, dtype=torch.uint8, device=table.device)
        at, views = -room.data_ptr() % ALIGNMENT, []
        for (number, start, stop), size in zip(runs, padded, strict=True):
            base = self._wanted[number].base
            assert base is not None
            view = room[at : at + stop - start]
            upload(base[start:stop], view, "weights")
            views.append(view)
            at += size
        return views


def _in_order(changes: Changes) -> bool:
    """Whether positions rise and all differ, which is not so where less differed than had been counted."""
    positions = changes.positions
    return bool((positions[1:] > positions[:-1]).all() and changes.differences.all())


def _spread(download: Download, rows: Integers, counts: Integers) -> Integers:
    """Put counts of some blocks in their places among all."""
    (found,) = download.take()
    counts[rows >= 0] = found[rows[rows >= 0]]
    return counts


class _Crossing:
    """A window of blocks on its way: contents, and changes."""

    def __init__(
        self, table: BlockTable, content: Integers, changed: Integers, window: Window | None
    ) -> None:
        torch = load_torch()
        self._content, self._changed, self._window = content, changed, window
        self._lengths = table.length[content].tolist()
        views = [table.views[number][start:stop] for number, start, stop in byte_runs(table, content)]
        joined = [torch.cat(views) if len(views) > 1 else views[0]] if views else []
        self._download = Download(joined, "weights")

    def take(self) -> Iterator[tuple[int, tuple[Changes | None, Bytes | None]]]:
        """Wait for it."""
        if self._content.size:
            (joined,) = self._download.take()
            at = 0
            for block, length in zip(self._content.tolist(), self._lengths, strict=True):
                yield block, (None, joined[at : at + length])
                at += length
        if self._window is not None:
            for place, changes, content in self._window.take():
                yield int(self._changed[place]), (changes, content)


@dataclass(slots=True, eq=False)
class DeviceTensor:
    """A tensor on a device as a stage takes it, in the place of a `HostTensor`.

    Attributes:
        survey: What brings it, with others.
        number: Its number there.
        name: Its name.
        dtype: A dtype name of SPEC 8.1.
        shape: The logical shape.
        nbytes: Its canonical bytes.
    """

    survey: Survey
    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    _first: int = 0
    _arrived: dict[int, tuple[Changes | None, Bytes | None]] = field(default_factory=dict)
    _blocks: dict[int, Bytes] = field(default_factory=dict)

    @property
    def pinned(self) -> bool:
        """Whether the host's copy should be page-locked: it crosses to the device, and faster so."""
        return self.survey.pinned

    def prepare(self, blocks: range) -> None:
        """Wait for what is wanted of a slab of blocks; the slab before is forgotten."""
        self._arrived = self.survey.take(self.number, blocks)
        self._blocks = {}

    def digest(self, index: int) -> bytes:
        """A block's digest, as the device computed it."""
        assert self.survey._table is not None
        row: Bytes = self.survey.digests[int(self.survey._table.first[self.number]) + index]
        return row.tobytes()

    def receive(
        self, index: int, base: Bytes | None, algorithm: Callable[[Bytes], bytes]
    ) -> tuple[int, Positions] | None:
        """Make a block of the slab from what arrived, and check that it is what the device has.

        Args:
            index: Its index.
            base: The old block, if the host holds it.
            algorithm: The store's digest on the host.

        Returns:
            Element width, and the positions that changed, where they are known.

        Raises:
            CorruptError: It does not have the device's digest, or it changed while it was compared.
        """
        if index not in self._arrived:  # unchanged, and the host has it
            if base is not None:
                self._blocks[index] = base
            return None
        changes, content = self._arrived[index]
        if content is None:
            assert base is not None
            assert changes is not None
            content = base.copy()
            changes.apply(content)
        if algorithm(content) != self.digest(index) or not (changes is None or _in_order(changes)):
            raise self.survey.fail(self.name, index)
        self._blocks[index] = content
        return (changes.width, changes.positions) if changes is not None else None

    def block(self, index: int) -> Bytes:
        """The bytes of a block of the slab, once it was received."""
        return self._blocks[index]
