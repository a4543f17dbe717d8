"""Names, and how a tensor's canonical bytes are cut into blocks (SPEC 8.2)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from deltaformat.errors import ErrorCode, MalformedError

__all__ = [
    "DEFAULT_BLOCK_BYTES",
    "MAX_BLOCK_BYTES",
    "MAX_NAME_BYTES",
    "MIN_BLOCK_BYTES",
    "Buffer",
    "Bytes",
    "block_count",
    "block_lengths",
    "block_range",
    "byte_view",
    "check_block_bytes",
    "name_bytes",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A block, or a run of blocks: contiguous and one-dimensional."""

Buffer: TypeAlias = bytes | bytearray | memoryview | Bytes
"""Bytes that are only read."""


def byte_view(data: Buffer) -> memoryview:
    """The bytes of any contiguous buffer, flat and without a copy."""
    return memoryview(data).cast("B")  # type: ignore[arg-type]  # arrays are buffers, before Python 3.12 unnamed


DEFAULT_BLOCK_BYTES = 1 << 20
MIN_BLOCK_BYTES = 1 << 8
MAX_BLOCK_BYTES = 1 << 26
MAX_NAME_BYTES = (1 << 16) - 1


def check_block_bytes(block_bytes: int, *, where: str = "") -> None:
    """Refuse a block size that is not a power of two from 256 bytes to 64 MiB (DF-DSC-01).

    Args:
        block_bytes: The block size.
        where: What an error should name.

    Raises:
        MalformedError: It is not one.
    """
    if not isinstance(block_bytes, int) or isinstance(block_bytes, bool):
        raise MalformedError(
            ErrorCode.VALUE_INVALID, f"block_bytes is an integer, not {block_bytes!r}", where=where
        )
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes & (block_bytes - 1):
        raise MalformedError(
            ErrorCode.VALUE_INVALID,
            f"block_bytes is {block_bytes}; use a power of two from {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES}",
            where=where,
        )


def block_count(nbytes: int, block_bytes: int) -> int:
    """Count the blocks of a tensor of `nbytes` bytes; without bytes it has none (DF-BLK-02)."""
    return -(-nbytes // block_bytes)


def block_range(index: int, nbytes: int, block_bytes: int) -> tuple[int, int]:
    """Return where block `index` starts and ends in its tensor; the last may be short (DF-BLK-02)."""
    start = index * block_bytes
    if index < 0 or start >= nbytes:
        raise IndexError(f"block {index} of a tensor with {block_count(nbytes, block_bytes)} blocks")
    return start, min(start + block_bytes, nbytes)


def block_lengths(nbytes: int, block_bytes: int) -> npt.NDArray[np.int64]:
    """Return the bytes of each block of a tensor of `nbytes` bytes (DF-BLK-02)."""
    lengths = np.full(block_count(nbytes, block_bytes), block_bytes, np.int64)
    if lengths.size:
        lengths[-1] = nbytes - (lengths.size - 1) * block_bytes
    return lengths


def name_bytes(name: str, *, where: str = "") -> bytes:
    """Encode a tensor's name; names are compared as these bytes and never normalised (DF-BLK-03).

    Args:
        name: Any string that UTF-8 can hold in 65,535 bytes; it may be empty.
        where: What an error should name.

    Raises:
        MalformedError: The name has surrogates or is too long.
    """
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        raise MalformedError(
            ErrorCode.VALUE_INVALID, f"the tensor name {name[:80]!a} has a lone surrogate", where=where
        ) from None
    if len(encoded) > MAX_NAME_BYTES:
        raise MalformedError(
            ErrorCode.VALUE_INVALID,
            f"the tensor name {name[:80]!r}... has {len(encoded)} bytes, more than {MAX_NAME_BYTES}",
            where=where,
        )
    return encoded
