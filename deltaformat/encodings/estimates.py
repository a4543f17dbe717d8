"""Estimates of sizes, in integers: whatever computes them, on whatever machine, chooses alike."""

from __future__ import annotations

import math

__all__ = ["SCALE", "scaled_log2"]

SCALE = 1024
"""Estimates are bits times this."""

_TABLE = [int(SCALE * math.log2(1 + mantissa / 256)) for mantissa in range(256)]


def scaled_log2(number: int) -> int:
    """SCALE times the logarithm of a positive number, to 8 bits of its mantissa."""
    exponent = number.bit_length() - 1
    return SCALE * exponent + _TABLE[number << 8 >> exponent & 255]
