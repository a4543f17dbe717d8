"""Block digests of tensors where they are: nothing but digests crosses to the host (SPEC 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deltaformat.blocks import Bytes, check_block_bytes
from deltaformat.digests import DIGEST_SIZES, get_digest
from deltaformat.gpu import blake3_torch, xxh3_torch
from deltaformat.gpu.engines import Engine, choose_engine, current, load_torch, load_triton
from deltaformat.gpu.table import BlockTable, Integers, batches, flat_views
from deltaformat.gpu.transfer import Download, upload_table
from deltaformat.gpu.xxh3_short import ROW_BYTES, hash_short

__all__ = ["digests_of", "hash_blocks"]

SLAB_BYTES = 64 << 20
"""Bytes that the torch engine hashes at a time; it takes about five times as much besides."""
_LEAST_ROW = 1024


def hash_blocks(
    tensors: Any | Sequence[Any],
    *,
    block_bytes: int,
    algorithm: str = "xxh3-128",
    engine: Engine = "auto",
) -> Bytes:
    """Digest every block of tensors on their device (SPEC 7, 8.2), bit-identical to what the CPU computes.

    All tensors of a device are hashed together, and the host waits once. Temporary memory on the device: 32
    bytes a block with Triton (BLAKE3: 5 % of the tensors' bytes), 320 MiB with torch; and a copy of each
    tensor that is not contiguous or does not begin at a multiple of 16 bytes, of at most 1 GiB together
    unless one has more.

    Args:
        tensors: A torch tensor or several, of any dtype of SPEC 8.1, layout and device, also the host's.
        block_bytes: The block size, a power of two from 256 bytes to 64 MiB.
        algorithm: `xxh3-128` or `blake3-256`.
        engine: `auto`, `torch` or `triton` (see `deltaformat.gpu.engines.choose_engine`).

    Returns:
        Digests of all blocks of all tensors in order, on the host: shape (n_blocks, digest_bytes), uint8.

    Raises:
        UnsupportedError: A tensor that cannot be stored, an unknown digest, or an engine that is not
            installed or cannot work there.
        MalformedError: What was given is no torch tensor, or `block_bytes` no block size.
    """
    torch = load_torch()
    check_block_bytes(block_bytes, where="block_bytes")
    if algorithm not in DIGEST_SIZES:
        get_digest(algorithm)  # says what is wrong
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    nothing = np.empty((0, DIGEST_SIZES[algorithm]), np.uint8)
    found = [nothing] * len(given)
    for batch in batches(given):
        with current(given[batch[0]].device):
            table = BlockTable.of(flat_views(given[number] for number in batch), block_bytes)
            digests = digests_of(table, algorithm, engine=engine)
            (rows,) = Download([digests], "digests").take()
        for place, number in enumerate(batch):
            found[number] = rows[table.first[place] : table.first[place + 1]]
    return np.concatenate([nothing, *found])


def digests_of(table: BlockTable, algorithm: str, *, engine: Engine = "auto") -> Any:
    """Digest the blocks of a table; the digests stay on the device: shape (blocks, digest_bytes), uint8."""
    torch = load_torch()
    chosen = choose_engine(engine, table.device)
    digests = torch.empty((len(table), DIGEST_SIZES[algorithm]), dtype=torch.uint8, device=table.device)
    if not len(table):
        return digests
    with current(table.device):
        if chosen == "torch":
            _hash_with_torch(table, algorithm, digests)
        elif algorithm == "xxh3-128":
            _xxh3_with_triton(table, digests)
        else:
            _blake3_with_triton(table, digests)
    return digests


def _xxh3_with_triton(table: BlockTable, digests: Any) -> None:
    kernels = load_triton("xxh3_triton")
    long = table.length > xxh3_torch.LONGER_THAN
    chosen = slice(None) if long.all() else upload_table(np.flatnonzero(long), table.device)
    addresses = upload_table(table.addresses[long], table.device)
    digests[chosen] = kernels.hash_blocks(addresses, upload_table(table.length[long], table.device))
    _hash_ends(table, np.flatnonzero(~long), "xxh3-128", digests)


def _blake3_with_triton(table: BlockTable, digests: Any) -> None:
    kernels = load_triton("blake3_triton")
    addresses, lengths = table.addresses, table.length
    full = lengths == table.block_bytes
    found = kernels.hash_equal(upload_table(addresses[full], table.device), table.block_bytes)
    digests[upload_table(np.flatnonzero(full), table.device)] = found
    short = np.flatnonzero(~full)
    if short.size:
        chunk = blake3_torch.CHUNK_BYTES
        broken = short[lengths[short] % chunk != 0]
        last = lengths[broken] - lengths[broken] % chunk
        ends = _rows(table, broken, last, lengths[broken] - last, chunk)
        found = kernels.hash_ragged(upload_table(addresses[short], table.device), ends, lengths[short])
        digests[upload_table(short, table.device)] = found


def _hash_with_torch(table: BlockTable, algorithm: str, digests: Any) -> None:
    size = table.block_bytes
    slab = max(1, SLAB_BYTES // size)
    hash_equal = xxh3_torch.hash_equal if algorithm == "xxh3-128" else blake3_torch.hash_equal
    for number, view in enumerate(table.views):
        first, whole = int(table.first[number]), view.numel() // size
        for start in range(0, whole, slab):
            stop = min(start + slab, whole)
            blocks = view[start * size : stop * size].view(-1, size)
            digests[first + start : first + stop] = hash_equal(blocks)
    _hash_ends(table, np.flatnonzero(table.length < size), algorithm, digests)


def _hash_ends(table: BlockTable, blocks: Integers, algorithm: str, digests: Any) -> None:
    """Hash short blocks as rows filled up with zeros, those of similar lengths together."""
    lengths = table.length[blocks]
    least = ROW_BYTES if algorithm == "xxh3-128" else _LEAST_ROW
    widths = np.maximum(least, 1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    if algorithm == "xxh3-128":
        widths[lengths > xxh3_torch.LONGER_THAN] = np.maximum(
            _LEAST_ROW, widths[lengths > xxh3_torch.LONGER_THAN]
        )
    for width in np.unique(widths).tolist():
        group = np.flatnonzero(widths == width)
        for at in range(0, len(group), max(1, SLAB_BYTES // width)):
            part = group[at : at + max(1, SLAB_BYTES // width)]
            chosen, sizes = blocks[part], lengths[part]
            rows = _rows(table, chosen, np.zeros(len(part), np.int64), sizes, width)
            device_sizes = upload_table(sizes, table.device)
            if algorithm == "blake3-256":
                found = blake3_torch.hash_ragged(rows, device_sizes, sizes)
            elif width == ROW_BYTES:
                found = hash_short(rows, device_sizes)
            else:
                found = xxh3_torch.hash_ragged(rows, device_sizes)
            digests[upload_table(chosen, table.device)] = found


def _rows(table: BlockTable, blocks: Integers, starts: Integers, sizes: Integers, width: int) -> Any:
    """Parts of blocks, from byte `starts` on, as rows of `width` bytes filled up with zeros."""
    torch = load_torch()
    parts = [
        table.block(block)[start : start + size]
        for block, start, size in zip(blocks.tolist(), starts.tolist(), sizes.tolist(), strict=True)
    ]
    if not parts:
        return torch.empty((0, width), dtype=torch.uint8, device=table.device)
    # One copy by one operation: indices would take sixteen times the rows' memory.
    zeros = torch.zeros(width, dtype=torch.uint8, device=table.device)
    filled = [piece for part in parts for piece in (part, zeros[part.numel() :])]
    return torch.cat(filled).view(-1, width)
