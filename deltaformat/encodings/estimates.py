"""Estimates of sizes, in integers: whatever computes them, on whatever machine, chooses alike."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["SCALE", "scaled_log2", "scaled_log2s"]

SCALE = 1024
"""Estimates are bits times this."""

_TABLE = [int(SCALE * math.log2(1 + mantissa / 256)) for mantissa in range(256)]
_TABLES = np.array(_TABLE, np.int64)


def scaled_log2(number: int) -> int:
    """SCALE times the logarithm of a positive number, to 8 bits of its mantissa."""
    exponent = number.bit_length() - 1
    return SCALE * exponent + _TABLE[number << 8 >> exponent & 255]


def scaled_log2s(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What `scaled_log2` gives for each of an array; they are below 2^53."""
    exponents = np.frexp(numbers)[1].astype(np.int64) - 1
    logarithms: npt.NDArray[np.int64] = SCALE * exponents + _TABLES[numbers << 8 >> exponents & 255]
    return logarithms
