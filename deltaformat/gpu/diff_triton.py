"""Compare blocks, compact what changed, and apply it, in launches over all blocks of one element width.

A program has a tile of one block. Its place is computed in 64 bits; within a block 32 do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from deltaformat.gpu.engines import load_torch, signed_integer

__all__ = [
    "CHANGES",
    "TILE",
    "WARPS",
    "apply",
    "apply_kernel",
    "compact",
    "compact_kernel",
    "count",
    "count_kernel",
]

TILE = 2048
"""Elements of a program that compares; more would take so many registers that few programs run at a time."""
CHANGES = 2048
"""Changes of a program that applies."""
WARPS = 8
"""Of a program that compacts or applies."""


@triton.jit
def _addresses(table, block, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(table + block).to(tl.pointer_type(TYPE)), 16)


@triton.jit(do_not_specialize=["tiles"])
def count_kernel(news, olds, elements, counts, tiles, TYPE: tl.constexpr, TILE: tl.constexpr):
    """Count what differs in tile `program_id(1)` of block `program_id(0)`: contents at `news`, `olds`.

    `counts` has `tiles` entries for each block.
    """
    block = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    new, old = _addresses(news, block, TYPE), _addresses(olds, block, TYPE)
    left = tl.load(elements + block).to(tl.int32) - tile * TILE
    place = tl.arange(0, TILE)
    found = 0
    if left >= TILE:  # without a mask, so that loads stay 16 bytes wide
        differs = tl.load(new + (tile * TILE + place)) != tl.load(old + (tile * TILE + place))
        found = tl.sum(differs.to(tl.int32), axis=0)
    elif left > 0:
        inside = place < left
        x = tl.load(new + (tile * TILE + place), mask=inside, other=0)
        y = tl.load(old + (tile * TILE + place), mask=inside, other=0)
        found = tl.sum((x != y).to(tl.int32), axis=0)
    tl.store(counts + block * tiles + tile, found)


@triton.jit
def _compact(x, y, first, count, place, positions, differences):
    """Write what differs, from `first` on; never more than was counted, whatever has changed since."""
    differs = (x != y).to(tl.int32)
    rank = tl.cumsum(differs, axis=0) - differs
    chosen = (differs != 0) & (rank < count)
    tl.store(positions + first + rank, place, mask=chosen)
    tl.store(differences + first + rank, x - y, mask=chosen)


@triton.jit(do_not_specialize=["tiles"])
def compact_kernel(
    news, olds, elements, counts, ends, positions, differences, tiles, TYPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write positions in the block and wrapping differences; tile by tile they end at `ends`."""
    block = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    count = tl.load(counts + block * tiles + tile)
    if count > 0:
        new, old = _addresses(news, block, TYPE), _addresses(olds, block, TYPE)
        size = tl.load(elements + block).to(tl.int32)
        first = tl.load(ends + block * tiles + tile) - count
        place = tile * TILE + tl.arange(0, TILE)
        if (tile + 1) * TILE <= size:
            _compact(tl.load(new + place), tl.load(old + place), first, count, place, positions, differences)
        else:
            x = tl.load(new + place, mask=place < size, other=0)
            y = tl.load(old + place, mask=place < size, other=0)
            _compact(x, y, first, count, place, positions, differences)


@triton.jit
def apply_kernel(
    addresses, starts, positions, differences, TYPE: tl.constexpr, UNDO: tl.constexpr, CHANGES: tl.constexpr
):  # fmt: skip
    """Add a block's differences, [starts[block], starts[block + 1]), to its elements, or subtract them."""
    block = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts + block), tl.load(starts + block + 1)
    change = start + tl.program_id(1).to(tl.int64) * CHANGES + tl.arange(0, CHANGES)
    inside = change < end
    place = tl.load(positions + change, mask=inside, other=0).to(tl.int64)
    element = _addresses(addresses, block, TYPE) + place
    difference = tl.load(differences + change, mask=inside, other=0)
    value = tl.load(element, mask=inside, other=0)
    tl.store(element, value - difference if UNDO else value + difference, mask=inside)


_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
# Differences wrap around by design, so nothing looks for overflow, also where TRITON_DEBUG asks for it.
_OPTIONS = {"sanitize_overflow": False}


def count(news: Any, olds: Any, elements: Any, counts: Any, *, width: int) -> None:
    """Count the elements that differ in each tile of each block.

    Args:
        news: Where each block's new content is, a multiple of 16: int64, on the device.
        olds: Where its old content is, likewise.
        elements: Of each block, int64.
        counts: Takes them: int32, shape (blocks, tiles), with tiles for the largest block.
        width: Bytes of an element.
    """
    if len(news):
        tiles = counts.shape[1]
        count_kernel[(len(news), tiles)](
            news, olds, elements, counts, tiles, TYPE=_TYPES[width], TILE=TILE, **_OPTIONS
        )


def compact(news: Any, olds: Any, elements: Any, counts: Any, *, width: int, total: int) -> tuple[Any, Any]:
    """Collect what differs, block by block; arguments as for `count`.

    Args:
        news: As for `count`.
        olds: As for `count`.
        elements: As for `count`.
        counts: What `count` gave for these blocks.
        width: Bytes of an element.
        total: How many elements differ in all.

    Returns:
        Positions, int32, and differences as signed integers of `width` bytes, both of shape (total,). Where
        fewer differ than were counted, since the tensor was changed meanwhile, the others are zeros.
    """
    torch = load_torch()
    positions = torch.zeros(total, dtype=torch.int32, device=news.device)
    differences = torch.zeros(total, dtype=signed_integer(width), device=news.device)
    if len(news):
        ends = counts.view(-1).cumsum(0, dtype=torch.int64)
        tiles = counts.shape[1]
        compact_kernel[(len(news), tiles)](
            news, olds, elements, counts, ends, positions, differences, tiles,
            TYPE=_TYPES[width], TILE=TILE, num_warps=WARPS, **_OPTIONS,
        )  # fmt: skip
    return positions, differences


def apply(addresses: Any, starts: Any, positions: Any, differences: Any, *, most: int, undo: bool) -> None:
    """Apply changes in place.

    Args:
        addresses: Where each block is, a multiple of 16: int64, on the device.
        starts: Where each block's changes begin, and at last where all end, int64.
        positions: In the block, int32; none twice in a block.
        differences: As signed integers of the elements' width.
        most: Changes of the block that has most.
        undo: Subtract instead.
    """
    if len(addresses) and most:
        width = differences.element_size()
        apply_kernel[(len(addresses), -(-most // CHANGES))](
            addresses, starts, positions, differences,
            TYPE=_TYPES[width], UNDO=undo, CHANGES=CHANGES, num_warps=WARPS, **_OPTIONS,
        )  # fmt: skip
