"""What changed between two versions, found and compacted on the device (SPEC 9.3's differences).

Elements are compared as integers. First the changes of every block are counted; once the host knows the
numbers, they are collected, in windows of bounded memory, and cross while the host works on the window
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes
from deltaformat.columns import prefix_sums
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import Changes
from deltaformat.errors import ErrorCode, MalformedError
from deltaformat.gpu.engines import Engine, choose_engine, current, load_torch, load_triton, signed_integer
from deltaformat.gpu.table import BlockTable, Integers, flat_views
from deltaformat.gpu.transfer import Download, upload_table
from deltaformat.torchtensors import describe

__all__ = [
    "BlockDiff",
    "Counts",
    "Pairs",
    "Window",
    "byte_runs",
    "count_changes",
    "cut_windows",
    "diff",
    "is_dense",
    "select_pairs",
]

WINDOW_BYTES = 256 << 20
"""Bytes of blocks whose changes are collected at a time."""
SLAB_BYTES = 32 << 20
"""Bytes that the torch engine compares at a time."""


class BlockDiff(NamedTuple):
    """One block that differs.

    Attributes:
        tensor: Number of its tensor.
        block: Its index there.
        changes: Positions and wrapping differences; None where they would take more than the block itself.
        content: The new block's bytes in that case, otherwise None.
    """

    tensor: int
    block: int
    changes: Changes | None
    content: Bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Two versions of the same tensors, or runs of their blocks, on one device.

    Attributes:
        new, old: Their blocks; views of the same sizes.
        widths: Each tensor's element width in bytes, which divides its size.
    """

    new: BlockTable
    old: BlockTable
    widths: npt.NDArray[np.int64]

    @property
    def elements(self) -> Integers:
        """Elements of each block."""
        return self.new.length // self.widths[self.new.tensor]

    def groups(self) -> Iterator[tuple[int, Integers]]:
        """Element widths, and the blocks of each."""
        of_block = self.widths[self.new.tensor]
        for width in np.unique(of_block).tolist():
            yield width, np.flatnonzero(of_block == width)


def is_dense(counts: Integers, lengths: Integers, widths: Integers) -> npt.NDArray[np.bool_]:
    """Tell for which blocks positions and differences would take more bytes than the block."""
    dense: npt.NDArray[np.bool_] = counts * (widths + 4) > lengths
    return dense


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """How many elements differ, on the device.

    Attributes:
        blocks: In each block, int64, shape (blocks,).
        tiles: In each tile of each block, which Triton's kernels need again; None with the torch engine.
    """

    blocks: Any
    tiles: Any


def count_changes(pairs: Pairs, *, engine: Engine = "auto") -> Counts:
    """Count the elements of each block that differ."""
    torch = load_torch()
    device = pairs.new.device
    chosen = choose_engine(engine, device)
    with current(device):
        if chosen == "torch":
            counts = torch.zeros(len(pairs.new), dtype=torch.int64, device=device)
            _count_with_torch(pairs, counts)
            return Counts(counts, None)
        kernels = load_triton("diff_triton")
        most = max(1, -(-int(pairs.elements.max(initial=0)) // kernels.TILE))
        tiles = torch.empty((len(pairs.new), most), dtype=torch.int32, device=device)
        for width, blocks in pairs.groups():
            if len(blocks) == len(tiles):
                kernels.count(*_tables(pairs, blocks), tiles, width=width)
            else:
                found = torch.empty((len(blocks), most), dtype=torch.int32, device=device)
                kernels.count(*_tables(pairs, blocks), found, width=width)
                tiles[upload_table(blocks, device)] = found
        return Counts(tiles.sum(1), tiles)


def _tables(pairs: Pairs, blocks: Integers) -> tuple[Any, Any, Any]:
    device = pairs.new.device
    return (
        upload_table(pairs.new.addresses[blocks], device),
        upload_table(pairs.old.addresses[blocks], device),
        upload_table(pairs.elements[blocks], device),
    )


def _slabs(pairs: Pairs) -> Iterator[tuple[int, int, Any, Any]]:
    """Runs of blocks: the first block, bytes of a whole block in elements, and both contents as integers."""
    size = pairs.new.block_bytes
    step = max(1, SLAB_BYTES // size) * size
    for number, (new, old) in enumerate(zip(pairs.new.views, pairs.old.views, strict=True)):
        width = int(pairs.widths[number])
        whole = new.numel() // size * size
        bounds = [*range(0, whole, step), whole, *([new.numel()] if new.numel() > whole else [])]
        for start, stop in pairwise(bounds):
            first = int(pairs.new.first[number]) + start // size
            kind = signed_integer(width)
            yield first, size // width, new[start:stop].view(kind), old[start:stop].view(kind)


def _count_with_torch(pairs: Pairs, counts: Any) -> None:
    for first, elements, new, old in _slabs(pairs):
        differs = (new != old).view(-1, min(elements, len(new)))
        counts[first : first + len(differs)] = differs.sum(1)


def cut_windows(blocks: Integers, lengths: Integers, window_bytes: int) -> list[Integers]:
    """Divide blocks into runs of at most `window_bytes` (or one block)."""
    ends = np.cumsum(lengths[blocks])
    windows, start = [], 0
    while start < len(blocks):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + window_bytes, "right")))
        windows.append(blocks[start:stop])
        start = stop
    return windows


class Window:
    """A window's changes, on their way to the host.

    Args:
        pairs: Blocks of it, and no others.
        counts: Changes of each, on the host.
        tiles: Those of their tiles, as `count_changes` gave them for these blocks.
        engine: What collects them.
    """

    def __init__(self, pairs: Pairs, counts: Integers, tiles: Any, *, engine: Engine) -> None:
        torch = load_torch()
        device = pairs.new.device
        chosen = choose_engine(engine, device)
        self._pairs, self._counts = pairs, counts
        of_block = pairs.widths[pairs.new.tensor]
        self._dense = is_dense(counts, pairs.new.length, of_block)
        self._groups = [
            (width, blocks[~self._dense[blocks] & (counts[blocks] > 0)]) for width, blocks in pairs.groups()
        ]
        found: list[Any] = []
        with current(device):
            for width, blocks in self._groups:
                total = int(counts[blocks].sum())
                if chosen == "torch":
                    found.extend(_compact_with_torch(pairs, width, blocks, counts, total))
                else:
                    rows = tiles[upload_table(blocks, device)]
                    kernels = load_triton("diff_triton")
                    tables = _tables(pairs, blocks)
                    found.extend(kernels.compact(*tables, rows, width=width, total=total))
            self._changes = Download(found, "changes")
            dense = np.flatnonzero(self._dense).tolist()
            contents = [torch.cat([pairs.new.block(block) for block in dense])] if dense else []
            self._contents = Download(contents, "weights")

    def take(self) -> Iterator[tuple[int, Changes | None, Bytes | None]]:
        """Wait for it; then give each block that differs, with its changes or its content."""
        arrays = self._changes.take()
        found: dict[int, tuple[Changes | None, Bytes | None]] = {}
        for number, (width, blocks) in enumerate(self._groups):
            positions = arrays[2 * number].view(np.uint32)
            differences = arrays[2 * number + 1].view(f"<u{width}")
            starts = prefix_sums(self._counts[blocks]).tolist()
            for block, (start, stop) in zip(blocks.tolist(), pairwise(starts), strict=True):
                found[block] = Changes(width, positions[start:stop], differences[start:stop]), None
        dense = np.flatnonzero(self._dense)
        if dense.size:
            (contents,) = self._contents.take()
            starts = prefix_sums(self._pairs.new.length[dense]).tolist()
            for block, (start, stop) in zip(dense.tolist(), pairwise(starts), strict=True):
                found[block] = None, contents[start:stop]
        for block in sorted(found):
            yield block, *found[block]


def _compact_with_torch(
    pairs: Pairs, width: int, blocks: Integers, counts: Integers, total: int
) -> tuple[Any, Any]:
    """Do what `diff_triton.compact` does; without a wait, since the host knows how many there are."""
    torch = load_torch()
    device = pairs.new.device
    # What does not differ is written to one place more, at the end; so is what a block has beyond its count,
    # should it have changed since.
    positions = torch.zeros(total + 1, dtype=torch.int32, device=device)
    differences = torch.zeros(total + 1, dtype=signed_integer(width), device=device)
    allotted = np.zeros(len(pairs.new), np.int64)
    allotted[blocks] = counts[blocks]
    starts = prefix_sums(allotted)
    for first, elements, new, old in _slabs(pairs):
        if int(pairs.widths[pairs.new.tensor[first]]) != width:
            continue
        chosen = slice(first, first + -(-len(new) // elements))
        if not allotted[chosen].any():
            continue
        new, old = (content.view(-1, min(elements, len(content))) for content in (new, old))
        differs = new != old
        rank = differs.cumsum(1) - 1
        differs &= rank < upload_table(allotted[chosen, None], device)
        place = torch.where(differs, upload_table(starts[chosen, None], device) + rank, total)
        positions[place] = torch.arange(new.shape[1], dtype=torch.int32, device=device)
        differences[place] = new - old
    return positions[:total], differences[:total]


def byte_runs(table: BlockTable, blocks: Integers) -> list[tuple[int, int, int]]:
    """Rising blocks as runs of consecutive ones: the number of each one's tensor, and its bytes there."""
    tensors = table.tensor[blocks]
    breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(tensors) != 0)) + 1
    firsts = blocks[np.concatenate([np.zeros(min(1, len(blocks)), np.int64), breaks])]
    lasts = blocks[np.concatenate([breaks, np.full(min(1, len(blocks)), len(blocks))]) - 1]
    ends = table.start[lasts] + table.length[lasts]
    return list(zip(table.tensor[firsts].tolist(), table.start[firsts].tolist(), ends.tolist(), strict=True))


def select_pairs(pairs: Pairs, blocks: Integers) -> Pairs:
    """Some blocks of a pair of versions, rising, as a pair of their own."""
    runs = byte_runs(pairs.new, blocks)
    new, old = (
        BlockTable.of([table.views[number][start:stop] for number, start, stop in runs], table.block_bytes)
        for table in (pairs.new, pairs.old)
    )
    return Pairs(new, old, pairs.widths[[number for number, _, _ in runs]])


def diff(
    new: Any | Sequence[Any],
    old: Any | Sequence[Any],
    *,
    block_bytes: int,
    engine: Engine = "auto",
    window_bytes: int = WINDOW_BYTES,
) -> Iterator[BlockDiff]:
    """Find what changed between two versions of tensors on one device, block by block.

    Only counts, positions and differences cross to the host, and a block's bytes where those would take more.
    The host waits once for the counts, then once or twice a window; while it works on what one window gave,
    the next is collected and copied. Temporary memory on the device: of the changes of two windows; with
    Triton 3 bytes per KiB of bf16, with torch up to 1 GiB besides; and copies as for `hash_blocks`.

    Args:
        new: A tensor or several, of any dtype of SPEC 8.1.
        old: As many, of the same dtypes and shapes, on the same device.
        block_bytes: The block size.
        engine: `auto`, `torch` or `triton`.
        window_bytes: Bytes of blocks whose changes are collected at a time.

    Yields:
        The blocks that differ, by tensor and block.

    Raises:
        MalformedError: The two are not alike.
        UnsupportedError: As for `hash_blocks`.
    """
    torch = load_torch()
    news = [new] if isinstance(new, torch.Tensor) else list(new)
    olds = [old] if isinstance(old, torch.Tensor) else list(old)
    described = [describe(tensor) for tensor in news]
    if described != [describe(tensor) for tensor in olds] or len({t.device for t in [*news, *olds]}) > 1:
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            "new and old tensors differ in number, dtype, shape or device; only like is compared with like",
            where="diff",
        )
    if not news:
        return
    widths = np.array([get_dtype(dtype).width for dtype, _ in described], np.int64)
    pairs = Pairs(
        BlockTable.of(flat_views(news), block_bytes), BlockTable.of(flat_views(olds), block_bytes), widths
    )
    counted = count_changes(pairs, engine=engine)
    (counts,) = Download([counted.blocks], "counts").take()
    changed = np.flatnonzero(counts)
    table, previous = pairs.new, None
    for blocks in [*cut_windows(changed, table.length, window_bytes), None]:
        window = None
        if blocks is not None:
            tiles = None if counted.tiles is None else counted.tiles[upload_table(blocks, table.device)]
            window = blocks, Window(select_pairs(pairs, blocks), counts[blocks], tiles, engine=engine)
        if previous is not None:
            for place, changes, content in previous[1].take():
                block = int(previous[0][place])
                number = int(table.tensor[block])
                yield BlockDiff(number, block - int(table.first[number]), changes, content)
        previous = window
