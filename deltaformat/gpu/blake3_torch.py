"""BLAKE3 (unkeyed, 256 bits) of many blocks at once, in torch operations: what Triton's kernels must equal.

The algorithm is that of the BLAKE3 paper (github.com/BLAKE3-team/BLAKE3-specs). A chunk of 1,024 bytes is 16
serial compressions; chunks are independent, and a block's chaining values are joined in pairs, level by
level, an odd one carried up, which is the paper's tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltaformat.columns import prefix_sums, ranges
from deltaformat.gpu.engines import load_torch

__all__ = [
    "CHUNK_BYTES",
    "CHUNK_END",
    "CHUNK_START",
    "IV",
    "PARENT",
    "PERMUTATION",
    "ROOT",
    "chunk_values",
    "hash_equal",
    "hash_ragged",
    "levels",
]

CHUNK_BYTES = 1024
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_ROUNDS = 7

Integers = npt.NDArray[np.int64]


def hash_equal(blocks: Any) -> Any:
    """Hash blocks of one length, a power of two from 256 bytes on.

    Temporary memory: about that of `blocks`, and more for many blocks of less than 1 KiB.

    Args:
        blocks: uint8, shape (n, length), 4-byte aligned.

    Returns:
        shape (n, 32), uint8, on the same device.
    """
    torch = load_torch()
    count, length = blocks.shape
    chunk = min(length, CHUNK_BYTES)
    chunks = length // chunk
    words = blocks.view(torch.int32).view(count * chunks, chunk // 4)
    lengths = torch.full((len(words),), chunk, device=blocks.device)
    counters = torch.arange(chunks, device=blocks.device).repeat(count)
    values = chunk_values(words, lengths, counters, single=torch.full_like(lengths, chunks == 1))
    while chunks > 1:
        chunks //= 2
        values = _parents(values.reshape(-1, 16), ROOT if chunks == 1 else 0)
    return values.contiguous().view(torch.uint8)


def hash_ragged(rows: Any, lengths: Any, host_lengths: Integers) -> Any:
    """Hash blocks of any lengths.

    Args:
        rows: uint8, shape (n, width), each block filled up with zeros; width a multiple of 1,024.
        lengths: int64, shape (n,), on the same device.
        host_lengths: The same on the host: the shapes of the trees follow from them.

    Returns:
        shape (n, 32), uint8, on the same device.
    """
    torch = load_torch()
    device = rows.device
    words = rows.view(torch.int32).view(len(rows), -1, CHUNK_BYTES // 4)
    counts = np.maximum(1, -(-host_lengths // CHUNK_BYTES))
    row = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device)
    counters = torch.from_numpy(ranges(np.zeros(len(counts), np.int64), counts)).to(device)
    chunk_lengths = (lengths[row] - counters * CHUNK_BYTES).clamp(0, CHUNK_BYTES)
    single = torch.from_numpy((counts == 1).astype(np.int64)).to(device)[row]
    values = chunk_values(words[row, counters], chunk_lengths, counters, single=single)
    for pairs, odd, order, root in levels(counts):
        left = torch.from_numpy(pairs).to(device)
        joined = _parents(
            torch.cat([values[left], values[left + 1]], 1), torch.from_numpy(root).to(device) * ROOT
        )
        carried = values[torch.from_numpy(odd).to(device)]
        values = torch.cat([joined, carried])[torch.from_numpy(order).to(device)]
    return values.contiguous().view(torch.uint8)


def levels(counts: Integers) -> list[tuple[Integers, Integers, Integers, Integers]]:
    """Plan the trees of blocks with `counts` chunks, level by level.

    Returns:
        Per level, as indices into the level below: the left one of each pair; the odd ones, carried up; the
        order in which pairs and then odd ones make the next level; and for each pair 1 where it is a root.
    """
    planned = []
    while (counts > 1).any():
        starts = prefix_sums(counts)[:-1]
        pairs = counts // 2
        odd = counts % 2 == 1
        following = pairs + odd
        place = np.empty(int(following.sum()), np.int64)
        firsts = prefix_sums(following)[:-1]
        place[ranges(firsts, pairs)] = np.arange(int(pairs.sum()))
        place[(firsts + pairs)[odd]] = int(pairs.sum()) + np.arange(int(odd.sum()))
        lefts = 2 * ranges(np.zeros(len(counts), np.int64), pairs) + np.repeat(starts, pairs)
        root = np.repeat((counts == 2).astype(np.int64), pairs)
        planned.append((lefts, (starts + counts - 1)[odd], place, root))
        counts = following
    return planned


def chunk_values(words: Any, lengths: Any, counters: Any, *, single: Any) -> Any:
    """Compress chunks.

    Args:
        words: int32, shape (n, words), filled up with zeros; up to 256 words.
        lengths: Bytes of each chunk, int64.
        counters: Its place in its block, int64.
        single: Not 0 where a chunk is the whole block.

    Returns:
        Chaining values, int32, shape (n, 8).
    """
    torch = load_torch()
    device = words.device
    value = _constants(IV, device).expand(8, len(words))
    last = ((lengths - 1).clamp(min=0)) // 64
    for step in range(-(-words.shape[1] // 16)):
        message = words[:, 16 * step : 16 * step + 16].T
        size = (lengths - 64 * step).clamp(0, 64)
        ends = last == step
        flags = torch.where(ends, CHUNK_END + ROOT * (single != 0), 0) + (CHUNK_START if step == 0 else 0)
        compressed = _compress(value, message, counters, size, flags)
        value = torch.where(last >= step, compressed, value)
    return value.T


def _parents(children: Any, root: Any) -> Any:
    """Join pairs of chaining values, shape (n, 16)."""
    torch = load_torch()
    zero = torch.zeros(len(children), dtype=torch.int64, device=children.device)
    start = _constants(IV, children.device).expand(8, len(children))
    return _compress(start, children.T, zero, zero + 64, zero + PARENT + root).T


def _constants(values: tuple[int, ...], device: Any) -> Any:
    torch = load_torch()
    array = np.array(values, np.uint32).view(np.int32)
    return torch.from_numpy(array).to(device)[:, None]


def _compress(value: Any, message: Any, counters: Any, size: Any, flags: Any) -> Any:
    """The compression function over columns: `value` has shape (8, n), `message` (16, n); all int32."""
    torch = load_torch()
    a, b, c = value[:4], value[4:], _constants(IV[:4], value.device).expand(4, value.shape[1])
    low = (counters << 32 >> 32).to(torch.int32)
    d = torch.stack([low, (counters >> 32).to(torch.int32), size.to(torch.int32), flags.to(torch.int32)])
    order = list(range(16))
    for number in range(_ROUNDS):
        m = message[order] if number else message
        a, b, c, d = _mix(a, b, c, d, m[0:8:2], m[1:8:2])
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        a, b, c, d = _mix(a, b, c, d, m[8:16:2], m[9:16:2])
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
        order = [order[place] for place in PERMUTATION]
    return torch.cat([a ^ c, b ^ d])


def _mix(a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> tuple[Any, Any, Any, Any]:
    a = a + b + x
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b + y
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _rotate(words: Any, count: int) -> Any:
    return (words >> count) & (2 ** (32 - count) - 1) | words << (32 - count)
