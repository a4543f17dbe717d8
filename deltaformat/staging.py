"""Stage a version against tensors at hand: fetch, decode, verify, keep what changes (DF-RD-02, DF-RD-03)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes, block_range
from deltaformat.columns import ranges
from deltaformat.context import Context
from deltaformat.digests import digest_blocks
from deltaformat.metrics import FollowMetrics, Meter
from deltaformat.patches import BlockChange, ChangeSet, TensorChange, compare_block, element_bytes
from deltaformat.records import Commit
from deltaformat.tensors import TensorSpec
from deltaformat.versionmap import VersionMap

__all__ = [
    "Allocate",
    "Choice",
    "Select",
    "Target",
    "blocks_held",
    "count_elements",
    "everything",
    "manifest_bytes",
    "measure",
    "specs_of",
    "stage_changes",
]

Select = Collection[str] | Callable[[str], bool]
"""Names of tensors, or what tells by a name whether it is wanted."""

Integers = npt.NDArray[np.int64]

CHECKING_THREADS = 4


class Content(Protocol):
    """Tensors at hand."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """What they are."""

    def content(self, name: str) -> Bytes:
        """A tensor's canonical bytes."""


Allocate = Callable[[list[TensorSpec]], dict[str, Bytes]]
"""Makes writable memory for the canonical bytes of tensors."""


class Choice:
    """Which tensors are followed.

    Args:
        select: Their names, or what tells; None: all.
    """

    def __init__(self, select: Select | None) -> None:
        self._select = select if select is None or callable(select) else frozenset(select)

    def rows(self, version: VersionMap) -> Integers:
        """The tensors' numbers in a map.

        Raises:
            MissingError: It lacks one that was named.
        """
        if self._select is None:
            return np.arange(len(version.names))
        if callable(self._select):
            return np.flatnonzero([bool(self._select(name)) for name in version.names])
        return np.array(sorted(version.row(name) for name in self._select), np.int64)

    def of(self, version: VersionMap) -> VersionMap:
        """The map of these tensors; the same map where that is all."""
        return version if self._select is None else version.take(self.rows(version))

    def blocks(self, version: VersionMap) -> Integers:
        """Their blocks' numbers in the whole map."""
        rows = self.rows(version)
        return ranges(version.block_start[rows], np.diff(version.block_start)[rows])


def specs_of(version: VersionMap) -> dict[str, TensorSpec]:
    """Name, dtype and shape of each tensor, by name."""
    return dict(
        zip(version.names, map(TensorSpec, version.names, version.dtypes, version.shapes), strict=True)
    )


def stage_changes(
    context: Context,
    version: VersionMap,
    held: Content,
    allocate: Allocate,
    *,
    meter: Meter,
    progress: Callable[[int], object] = lambda _: None,
    max_bytes: int | None = None,
) -> ChangeSet:
    """Find what turns the tensors at hand into `version`'s; they are only read.

    Memory: what changes, the tensors that are new, and the store's memory budget in flight. Nothing is made
    per unchanged block.

    Args:
        context: The store.
        version: The map to go to, composed for what is at hand (see `catchup`).
        held: The tensors at hand.
        allocate: Makes room for those that are new or have another form.
        meter: Counts phases.
        progress: Called with decoded bytes, block by block.
        max_bytes: The most bytes of changes to gather, new tensors aside.

    Raises:
        OverflowError: There are more than `max_bytes`.
        MissingError, CorruptError, MalformedError, LimitError, StoreError: a block cannot be rebuilt.
    """
    block_bytes = context.descriptor.block_bytes
    specs = specs_of(version)
    new = [spec for spec in specs.values() if held.specs.get(spec.name) != spec]
    buffers = allocate(new)
    changes = {spec.name: TensorChange(*spec, content=buffers[spec.name]) for spec in new}
    rows = np.array([version.row(spec.name) for spec in new], np.int64)
    inside = ranges(version.block_start[rows], np.diff(version.block_start)[rows])
    kept = inside[version.fresh[inside] == 0]

    def locate(block: int) -> tuple[str, int, int]:
        """A block's tensor, and where it starts and ends there."""
        row = int(np.searchsorted(version.block_start, block, "right")) - 1
        start, end = block_range(block - int(version.block_start[row]), version.nbytes(row), block_bytes)
        return version.names[row], start, end

    def base(block: int) -> Bytes:
        name, start, end = locate(block)
        return held.content(name)[start:end]

    def place(block: int) -> Bytes | None:
        name, start, end = locate(block)
        buffer = buffers.get(name)
        return None if buffer is None else buffer[start:end]

    def take(block: int, data: Bytes) -> tuple[str, BlockChange | None, int]:
        name, start, end = locate(block)
        if name in buffers:
            return name, None, data.size
        return name, compare_block(data, held.content(name)[start:end], start, specs[name].dtype), data.size

    gathered = 0
    for name, change, size in context.rebuilder.changes(version, base, take, place, kept=kept, meter=meter):
        if change is not None:
            gathered += change.nbytes
            if max_bytes is not None and gathered > max_bytes:
                raise OverflowError
            changes.setdefault(name, TensorChange(*specs[name])).blocks.append(change)
        progress(size)
    removed = tuple(name for name in held.specs if name not in specs)
    return ChangeSet(changes, removed)


def blocks_held(context: Context, version: VersionMap, held: Content) -> npt.NDArray[np.bool_]:
    """Tell which blocks of a version are at hand, by their digests (DF-RD-02)."""
    usable = np.zeros(version.block_count, np.bool_)

    def check(name: str) -> None:
        blocks = version.blocks(version.row(name))
        found = digest_blocks(held.content(name), context.descriptor.block_bytes, context.algorithm)
        usable[blocks] = (found == version.digest[blocks]).all(axis=1)

    specs = specs_of(version)
    with ThreadPoolExecutor(CHECKING_THREADS) as pool:
        for _ in pool.map(check, [name for name, spec in held.specs.items() if specs.get(name) == spec]):
            pass
    return usable


def everything(specs: Mapping[str, TensorSpec], held: Content, changes: ChangeSet) -> ChangeSet:
    """All tensors as a whole: what is at hand, and over it what changes."""
    found = {}
    for name, spec in specs.items():
        change = changes.tensors.get(name)
        if change is not None and change.content is not None:
            found[name] = change
        else:
            blocks = [] if change is None else change.blocks
            found[name] = TensorChange(*spec, blocks=blocks, under=held.content(name))
    return ChangeSet(found)


def count_elements(version: VersionMap) -> int:
    """Elements of all tensors, as `patches` counts them."""
    widths = {dtype: element_bytes(dtype) for dtype in set(version.dtypes)}
    each = np.fromiter((widths[dtype] for dtype in version.dtypes), np.int64, len(version.dtypes))
    return int((version.tensor_bytes // each).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A version to go to, or that was gone to.

    Attributes:
        generation: The mirror's, when it holds that version.
        commit: Its record.
        whole: Its map.
        specs: The tensors that are followed.
        changes: What the mirror must be told; None where it holds that version already.
        elements: Elements of those tensors.
    """

    generation: int
    commit: Commit
    whole: VersionMap
    specs: Mapping[str, TensorSpec]
    changes: ChangeSet | None
    elements: int

    def taken(self) -> Target:
        """The same, when the changes are done."""
        return replace(self, changes=None)


def manifest_bytes(commit: Commit) -> int:
    """Bytes of a version's manifests, as stored."""
    return sum(ref.size for ref in commit.manifests)


def measure(target: Target, before: Target | None, changes: ChangeSet, meter: Meter) -> FollowMetrics:
    """Say what it took to stage a version.

    Args:
        target: The version.
        before: What this process had taken; None where everything came.
        changes: What came.
        meter: The phases.
    """
    commit = target.commit
    return FollowMetrics(
        version=f"{commit.seq}:{commit.root}",
        seq=commit.seq,
        step=commit.step,
        previous_seq=None if before is None else before.commit.seq,
        lag_steps=0 if before is None else max(0, commit.step - before.commit.step),
        lag_seconds=_age(commit.time),
        find=meter.phase("find"),
        fetch=meter.phase("fetch"),
        decode=meter.phase("decode"),
        verify=meter.phase("verify"),
        apply=meter.phase("apply"),
        changed=changes.changed,
        elements=target.elements,
    )


def _age(written: str) -> float:
    """Seconds since a record was written, by its writer's clock, which says nothing for sure."""
    try:
        at = datetime.fromisoformat(written)
        return max(0.0, time.time() - at.timestamp())
    except (ValueError, OverflowError, OSError):
        return 0.0
