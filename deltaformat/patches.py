"""What turns one version's tensors into another's: absolute values at positions, in checkpoint coordinates.

Values are absolute, so that a change may be applied twice; positions count the elements of a tensor in C
order. A dtype whose elements do not fill whole bytes is counted, and given, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import changed_positions

__all__ = [
    "BlockChange",
    "ChangeSet",
    "Elements",
    "Patch",
    "TensorChange",
    "as_elements",
    "compare_block",
    "element_bytes",
    "merge_changes",
    "patches_of",
    "write_block",
]

Elements = npt.NDArray[np.unsignedinteger[Any]]
Integers = npt.NDArray[np.int64]

INDEX_BYTES = 8


class Patch(NamedTuple):
    """Changed elements of one tensor, or some of them.

    Attributes:
        name: The tensor's name.
        shape: Its logical shape.
        dtype: Its dtype's name (SPEC 8.1).
        indices: int64, shape (n,): positions in the flat tensor (C order), rising. Bytes are counted where
            elements do not fill them (F4, F6).
        values: The new elements, shape (n,), in the tensor's dtype; uint8 where bytes are counted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    indices: Any
    values: Any


@dataclass(frozen=True, slots=True, eq=False)
class BlockChange:
    """Changed elements of one block, or of a run of bytes that is new altogether.

    Attributes:
        start: Its first element in the tensor.
        count: Its elements.
        positions: Those that change, counted from `start`, rising; None: all.
        values: Their new bits.
        old: Their bits before; None where nobody needs to know: where all change, or there were none.
    """

    start: int
    count: int
    positions: npt.NDArray[np.uint32] | None
    values: Elements
    old: Elements | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (self.positions, self.values, self.old)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(slots=True, eq=False)
class TensorChange:
    """What becomes of one tensor.

    Attributes:
        name: Its name.
        dtype: Its new dtype's name.
        shape: Its new shape.
        blocks: Its changed blocks, by rising start.
        content: All its canonical bytes, where it is new or has another dtype, shape or size; then `blocks`
            is empty.
        under: What lies beneath the changes, where all of it is wanted: all its canonical bytes, as they were
            before the changes or after them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: list[BlockChange] = field(default_factory=list)
    content: Bytes | None = None
    under: Bytes | None = None

    @property
    def changed(self) -> int:
        """Elements that change."""
        data = self.under if self.content is None else self.content
        if data is not None:
            return data.size // element_bytes(self.dtype)
        return sum(block.values.size for block in self.blocks)

    def runs(self) -> Iterator[BlockChange]:
        """All changes as blocks, also of a tensor that is new or wanted whole; each element once."""
        data = self.under if self.content is None else self.content
        if data is None:
            yield from self.blocks
            return
        elements = as_elements(data, self.dtype)
        done = 0
        for block in self.blocks if self.content is None else ():
            if block.start > done:
                yield BlockChange(done, block.start - done, None, elements[done : block.start])
            done = block.start + block.count
            yield _over(elements[block.start : done], block)
        if done < elements.size:
            yield BlockChange(done, elements.size - done, None, elements[done:])


@dataclass(slots=True, eq=False)
class ChangeSet:
    """What turns one version's tensors into another's.

    Attributes:
        tensors: The tensors that change, by name.
        removed: Names that the new version lacks.
    """

    tensors: dict[str, TensorChange] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    @property
    def changed(self) -> int:
        """Elements that change."""
        return sum(tensor.changed for tensor in self.tensors.values())

    @property
    def layout_changes(self) -> bool:
        """Whether tensors come, go, or change dtype, shape or size."""
        return bool(self.removed) or any(tensor.content is not None for tensor in self.tensors.values())


def element_bytes(dtype: str) -> int:
    """Bytes of an element, as positions count them; 1 where elements do not fill bytes."""
    bits = get_dtype(dtype).bits
    return 1 if bits % 8 else bits // 8


def as_elements(data: Bytes, dtype: str) -> Elements:
    """Canonical bytes as unsigned integers, a view."""
    return data.view(f"<u{element_bytes(dtype)}")


def compare_block(new: Bytes, old: Bytes, start: int, dtype: str) -> BlockChange | None:
    """Find what changes in a block, in the smallest form; None if no bit does.

    Args:
        new: Its new bytes.
        old: Its bytes, of the same length.
        start: Its first byte in the tensor.
        dtype: The tensor's dtype.
    """
    width = element_bytes(dtype)
    after, before = as_elements(new, dtype), as_elements(old, dtype)
    positions = np.asarray(changed_positions(new, old, width), np.uint32)
    if not positions.size:
        return None
    if positions.size * (4 + 2 * width) >= new.size:
        return BlockChange(start // width, after.size, None, after.copy())
    return BlockChange(start // width, after.size, positions, after[positions], before[positions])


def _over(elements: Elements, change: BlockChange) -> BlockChange:
    """All elements of a block, changed."""
    if change.positions is None:
        return change
    values = elements.copy()
    values[change.positions] = change.values
    return BlockChange(change.start, change.count, None, values)


def merge_changes(sets: Sequence[ChangeSet]) -> ChangeSet:
    """Unite change sets of versions that follow each other; each element is in the result once."""
    if len(sets) == 1:
        return sets[0]
    merged: dict[str, TensorChange] = {}
    removed: dict[str, None] = {}
    for changes in sets:
        for name in changes.removed:
            merged.pop(name, None)
            removed[name] = None
        for name, change in changes.tensors.items():
            removed.pop(name, None)
            before = merged.get(name)
            if before is None or change.content is not None:
                merged[name] = replace(change, blocks=list(change.blocks))
            elif before.content is not None:
                content = before.content.copy()
                for block in change.blocks:
                    write_block(content, change.dtype, block)
                merged[name] = replace(before, content=content)
            else:
                blocks = {block.start: block for block in before.blocks}
                for block in change.blocks:
                    earlier = blocks.get(block.start)
                    blocks[block.start] = block if earlier is None else _merge_blocks(earlier, block)
                merged[name] = replace(before, blocks=[blocks[start] for start in sorted(blocks)])
    return ChangeSet(merged, tuple(removed))


def _merge_blocks(earlier: BlockChange, later: BlockChange) -> BlockChange:
    """One block's changes, then others of the same block."""
    if later.positions is None:
        return replace(later, old=None)
    if earlier.positions is None:
        return _over(earlier.values, later)
    mask = np.zeros(later.count, np.bool_)
    values, old = (np.empty(later.count, later.values.dtype) for _ in range(2))
    for change in (later, earlier):  # what was there before both is what the earlier one says
        assert change.positions is not None
        mask[change.positions] = True
        if change.old is not None:
            old[change.positions] = change.old
    for change in (earlier, later):
        values[change.positions] = change.values
    positions = np.flatnonzero(mask).astype(np.uint32)
    known = earlier.old is not None and later.old is not None
    return BlockChange(
        later.start, later.count, positions, values[positions], old[positions] if known else None
    )


def write_block(data: Bytes, dtype: str, change: BlockChange, *, back: Elements | None = None) -> None:
    """Write a block's new bits into its tensor's canonical bytes; or `back`, what was there before."""
    part = as_elements(data, dtype)[change.start : change.start + change.count]
    values = change.values if back is None else back
    if change.positions is None:
        part[:] = values
    else:
        part[change.positions] = values


def patches_of(
    changes: Sequence[TensorChange], max_bytes: int
) -> Iterator[tuple[TensorChange, Integers, Elements]]:
    """Give changes as (tensor, indices, values), at most `max_bytes` of indices and values at a time.

    Small changes of a tensor's neighbouring blocks come together.
    """
    for tensor in changes:
        width = element_bytes(tensor.dtype)
        most = max(1, max_bytes // (INDEX_BYTES + width))
        indices: list[Integers] = []
        values: list[Elements] = []
        room = most
        for run in tensor.runs():
            for first in range(0, run.values.size, most):
                # What does not fit goes in two; a run that fits into one batch is never longer than it.
                part = slice(first, min(first + most, run.values.size))
                where = _indices(run, part)
                taken = 0
                while taken < where.size:
                    n = min(room, where.size - taken)
                    indices.append(where[taken : taken + n])
                    values.append(run.values[part][taken : taken + n])
                    taken += n
                    room -= n
                    if not room:
                        yield tensor, np.concatenate(indices), np.concatenate(values)
                        indices, values, room = [], [], most
        if indices:
            yield tensor, np.concatenate(indices), np.concatenate(values)


def _indices(run: BlockChange, part: slice) -> Integers:
    if run.positions is None:
        return np.arange(run.start + part.start, run.start + part.stop, dtype=np.int64)
    return run.positions[part].astype(np.int64) + run.start
