"""64-bit unsigned arithmetic in torch, whose unsigned dtypes lack most operations: int64 wraps alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltaformat.gpu.engines import load_torch

__all__ = [
    "LOW_32",
    "byte_swap",
    "high_product",
    "read_word",
    "shift_right",
    "signed",
    "table",
]

LOW_32 = 0xFFFFFFFF


def signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    value &= 2**64 - 1
    return value - 2**64 if value >> 63 else value


def table(values: Any, device: Any) -> Any:
    """Unsigned 64-bit numbers as an int64 tensor."""
    array = np.asarray(values, np.uint64).view(np.int64)
    return load_torch().from_numpy(array.copy()).to(device)


def shift_right(words: Any, count: int) -> Any:
    """Shift unsigned words right."""
    return (words >> count) & (2 ** (64 - count) - 1)


def high_product(left: Any, right: Any) -> Any:
    """The upper 64 bits of unsigned 128-bit products; the lower are `left * right`."""
    a, b = left & LOW_32, shift_right(left, 32)
    c, d = right & LOW_32, shift_right(right, 32)
    low, middle, other = a * c, a * d, b * c
    carry = shift_right(low, 32) + (middle & LOW_32) + (other & LOW_32)
    return b * d + shift_right(middle, 32) + shift_right(other, 32) + shift_right(carry, 32)


def byte_swap(words: Any, width: int) -> Any:
    """Reverse the `width` bytes of each word."""
    swapped = (words & 0xFF) << 8 * (width - 1)
    for place in range(1, width):
        swapped = swapped | (shift_right(words, 8 * place) & 0xFF) << 8 * (width - 1 - place)
    return swapped


def read_word(rows: Any, start: Any, width: int) -> Any:
    """Read a little-endian word of `width` bytes from each row of a uint8 matrix, at its own offset.

    Args:
        rows: shape (n, bytes).
        start: shape (n,), int64; or one offset for all.
        width: At most 8.
    """
    torch = load_torch()
    places = torch.arange(width, device=rows.device)
    if isinstance(start, int):
        found = rows[:, start : start + width]
    else:
        found = rows.gather(1, start[:, None] + places)
    return (found.to(torch.int64) << (8 * places)).sum(1)
