"""BLAKE3 in a launch over all chunks and one per level of the trees: a thread per chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from deltaformat.columns import ranges
from deltaformat.gpu.blake3_torch import CHUNK_BYTES, CHUNK_END, CHUNK_START, IV, PARENT, ROOT, levels
from deltaformat.gpu.engines import load_torch
from deltaformat.gpu.transfer import upload_table

__all__ = ["chunk_kernel", "hash_equal", "hash_ragged", "parent_kernel"]

Integers = npt.NDArray[np.int64]

THREADS = 128
"""Chunks, or pairs, of one program."""
_IV0, _IV1, _IV2, _IV3, _IV4, _IV5, _IV6, _IV7 = (tl.constexpr(word) for word in IV)
_START, _END = tl.constexpr(CHUNK_START), tl.constexpr(CHUNK_END)
_PARENT, _ROOT = tl.constexpr(PARENT), tl.constexpr(ROOT)
_CHUNK_BYTES = tl.constexpr(CHUNK_BYTES)


@triton.jit
def _mix(a, b, c, d, x, y):
    a = a + b + x
    d ^= a
    d = (d >> 16) | (d << 16)
    c += d
    b ^= c
    b = (b >> 12) | (b << 20)
    a = a + b + y
    d ^= a
    d = (d >> 8) | (d << 24)
    c += d
    b ^= c
    b = (b >> 7) | (b << 25)
    return a, b, c, d


@triton.jit
def _load_4(pointers, threads: tl.constexpr):
    """Four consecutive words of each thread, in one load of 16 bytes."""
    words = tl.load(pointers[:, None] + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(words, [threads, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _compress(
    h0, h1, h2, h3, h4, h5, h6, h7, pointers, v12, v13, v14, v15, threads: tl.constexpr
):  # fmt: skip
    m0, m1, m2, m3 = _load_4(pointers, threads)
    m4, m5, m6, m7 = _load_4(pointers + 4, threads)
    m8, m9, m10, m11 = _load_4(pointers + 8, threads)
    m12, m13, m14, m15 = _load_4(pointers + 12, threads)
    zero = v12 & 0
    v8, v9, v10, v11 = zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    for _ in tl.static_range(7):
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m0, m1)
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m2, m3)
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m4, m5)
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m6, m7)
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m8, m9)
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m10, m11)
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m12, m13)
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m14, m15)
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8,
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _start(zero):
    return (
        zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3, zero + _IV4, zero + _IV5, zero + _IV6, zero + _IV7
    )  # fmt: skip


@triton.jit
def _store(out, h0, h1, h2, h3, h4, h5, h6, h7, inside):
    tl.store(out, h0, mask=inside)
    tl.store(out + 1, h1, mask=inside)
    tl.store(out + 2, h2, mask=inside)
    tl.store(out + 3, h3, mask=inside)
    tl.store(out + 4, h4, mask=inside)
    tl.store(out + 5, h5, mask=inside)
    tl.store(out + 6, h6, mask=inside)
    tl.store(out + 7, h7, mask=inside)


# Where a number is 1, Triton would put a constant in its place, which cannot do all that a number can.
@triton.jit(do_not_specialize=["count", "chunks"])
def chunk_kernel(
    addresses, lengths, counters, alone, values, count, chunks,
    STEPS: tl.constexpr, EQUAL: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Compress chunks into chaining values; all reads are of whole chunks, at multiples of 16.

    With EQUAL, `addresses` are those of blocks of `chunks` chunks of 64 STEPS bytes, and `lengths`,
    `counters` and `alone` are not looked at. Otherwise all four are per chunk.
    """
    index = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    inside = index < count
    index = tl.minimum(index, count - 1)
    if EQUAL:
        counter = (index % chunks).to(tl.uint32)
        address = tl.load(addresses + index // chunks) + counter.to(tl.int64) * _CHUNK_BYTES
        single = (chunks == 1).to(tl.uint32) * _ROOT
    else:
        address = tl.load(addresses + index)
        counter = tl.load(counters + index).to(tl.uint32)
        length = tl.load(lengths + index)
        single = tl.load(alone + index).to(tl.uint32) * _ROOT
    pointers = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    zero = counter & 0
    h0, h1, h2, h3, h4, h5, h6, h7 = _start(zero)
    for step in range(STEPS):
        size = zero + 64
        flags = zero + tl.where(step == 0, _START, 0).to(tl.uint32)
        if EQUAL:
            flags |= tl.where(step == STEPS - 1, _END, 0).to(tl.uint32)
            flags |= tl.where(step == STEPS - 1, single, 0).to(tl.uint32)
            h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
                h0, h1, h2, h3, h4, h5, h6, h7, pointers, counter, zero, size, flags, THREADS
            )
        else:
            left = length - step * 64
            size = tl.minimum(tl.maximum(left, 0), 64).to(tl.uint32)
            ends = (left <= 64) & ((left > 0) | (step == 0))
            flags |= tl.where(ends, single | _END, 0).to(tl.uint32)
            g0, g1, g2, g3, g4, g5, g6, g7 = _compress(
                h0, h1, h2, h3, h4, h5, h6, h7, pointers, counter, zero, size, flags, THREADS
            )
            taken = (left > 0) | (step == 0)
            h0, h1, h2, h3 = (
                tl.where(taken, g0, h0), tl.where(taken, g1, h1),
                tl.where(taken, g2, h2), tl.where(taken, g3, h3),
            )  # fmt: skip
            h4, h5, h6, h7 = (
                tl.where(taken, g4, h4), tl.where(taken, g5, h5),
                tl.where(taken, g6, h6), tl.where(taken, g7, h7),
            )  # fmt: skip
        pointers += 16
    out = values.to(tl.pointer_type(tl.uint32)) + index * 8
    _store(out, h0, h1, h2, h3, h4, h5, h6, h7, inside)


@triton.jit(do_not_specialize=["count", "root"])
def parent_kernel(
    children, lefts, roots, values, count, root, INDEXED: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Join pairs of chaining values.

    With INDEXED a pair begins at child `lefts`, and `roots` tells whether it is a root; otherwise pairs lie
    one after the other, and `root` is 1 where all of them are roots.
    """
    index = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    inside = index < count
    index = tl.minimum(index, count - 1)
    if INDEXED:
        left = tl.load(lefts + index)
        flags = tl.load(roots + index).to(tl.uint32) * _ROOT + _PARENT
    else:
        left = index * 2
        flags = (index & 0).to(tl.uint32) + root * _ROOT + _PARENT
    zero = flags & 0
    h0, h1, h2, h3, h4, h5, h6, h7 = _start(zero)
    pointers = tl.multiple_of(children.to(tl.pointer_type(tl.uint32)), 16) + left * 8
    h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
        h0, h1, h2, h3, h4, h5, h6, h7, pointers, zero, zero, zero + 64, flags, THREADS
    )
    out = values.to(tl.pointer_type(tl.uint32)) + index * 8
    _store(out, h0, h1, h2, h3, h4, h5, h6, h7, inside)


# What BLAKE3 adds wraps around by design, so nothing looks for overflow, also where TRITON_DEBUG asks for it.
_OPTIONS = {"num_warps": THREADS // 32, "sanitize_overflow": False}


def hash_equal(addresses: Any, length: int) -> Any:
    """Hash blocks of one length where they are.

    Temporary memory: 3/64 of the blocks' bytes (1/8 and more of blocks below 1 KiB).

    Args:
        addresses: Of each, a multiple of 16: int64, on the device where they are.
        length: Bytes of each, a power of two from 256 on.

    Returns:
        shape (n, 32), uint8, on the device.
    """
    torch = load_torch()
    chunk = min(length, CHUNK_BYTES)
    chunks = length // chunk
    total = len(addresses) * chunks
    values = torch.empty((total, 8), dtype=torch.int32, device=addresses.device)
    if total:
        chunk_kernel[(-(-total // THREADS),)](
            addresses, addresses, addresses, addresses, values, total, chunks,
            STEPS=chunk // 64, EQUAL=True, THREADS=THREADS, **_OPTIONS,
        )  # fmt: skip
    while chunks > 1:
        chunks, total = chunks // 2, total // 2
        above = torch.empty((total, 8), dtype=torch.int32, device=addresses.device)
        if total:
            parent_kernel[(-(-total // THREADS),)](
                values, values, values, above, total, int(chunks == 1),
                INDEXED=False, THREADS=THREADS, **_OPTIONS,
            )  # fmt: skip
        values = above
    return values.view(torch.uint8)


def hash_ragged(addresses: Any, ends: Any, lengths: Integers) -> Any:
    """Hash blocks of any lengths; whole chunks are read where they are.

    Args:
        addresses: Of each block, a multiple of 16: int64, on the device where they are.
        ends: The last chunk of each block that is not whole (or is empty), filled up with zeros: uint8, shape
            (such blocks, 1024), 16-byte aligned.
        lengths: Bytes of each block, on the host.

    Returns:
        shape (n, 32), uint8, on the device.
    """
    torch = load_torch()
    device = addresses.device
    counts = np.maximum(1, -(-lengths // CHUNK_BYTES))
    block = np.repeat(np.arange(len(counts)), counts)
    counters = ranges(np.zeros(len(counts), np.int64), counts)
    sizes = np.clip(lengths[block] - counters * CHUNK_BYTES, 0, CHUNK_BYTES)

    def upload(array: npt.NDArray[Any]) -> Any:
        return upload_table(array, device)

    place = upload(counters)
    where = addresses[upload(block)] + place * CHUNK_BYTES
    whole = sizes == CHUNK_BYTES
    if len(ends):
        rows = ends.data_ptr() + CHUNK_BYTES * (np.cumsum(~whole) - 1)
        where = torch.where(upload(whole) != 0, where, upload(rows))
    total = len(block)
    values = torch.empty((total, 8), dtype=torch.int32, device=device)
    if total:
        chunk_kernel[(-(-total // THREADS),)](
            where, upload(sizes), place, upload((counts == 1)[block]), values, total, 1,
            STEPS=CHUNK_BYTES // 64, EQUAL=False, THREADS=THREADS, **_OPTIONS,
        )  # fmt: skip
    for lefts, odd, order, roots in levels(counts):
        joined = torch.empty((len(lefts), 8), dtype=torch.int32, device=device)
        parent_kernel[(-(-len(lefts) // THREADS),)](
            values, upload(lefts), upload(roots), joined, len(lefts), 0,
            INDEXED=True, THREADS=THREADS, **_OPTIONS,
        )  # fmt: skip
        values = torch.cat([joined, values[upload(odd)]])[upload(order)]
    return values.view(torch.uint8)
