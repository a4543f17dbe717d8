"""Strata: positions counted among the elements of one magnitude class (SPEC 9.3).

Thresholds cut a block's positions into strata by the magnitude of the *old* elements. In each stratum a
position has a rank: how many of the stratum's positions lie below it. With one bit per element, a rank is a
population count, and the position of a rank is a select; no list of elements is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Elements", "Positions", "Ranks", "Strata", "magnitude_mask"]

Elements: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Positions: TypeAlias = npt.NDArray[np.integer[Any]]
"""Positions of elements in a block: as int64 from NumPy, as uint32 from the kernels."""
Ranks: TypeAlias = npt.NDArray[np.int64]
"""Ranks or positions, in the arithmetic of arrays."""
Words: TypeAlias = npt.NDArray[np.uint64]

_ONES = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)


def magnitude_mask(width: int) -> int:
    """Return M: all bits of an element but the sign."""
    return (1 << (8 * width - 1)) - 1


def _select_table() -> npt.NDArray[np.uint8]:
    """Make the table whose entry 8 b + r is the position of set bit r of byte b."""
    table = np.zeros((256, 8), np.uint8)
    for byte in range(256):
        bits = [bit for bit in range(8) if byte >> bit & 1]
        table[byte, : len(bits)] = bits
    return table.reshape(-1)


_SELECT = _select_table()


class Strata:
    """The strata of one block.

    Args:
        elements: The base's elements, as integers.
        thresholds: Magnitudes, falling; at least one.

    Attributes:
        populations: Number of positions in each stratum, outermost first.
    """

    __slots__ = ("_keys", "_limits", "_ranks", "_words", "populations")

    def __init__(self, elements: Elements, thresholds: Sequence[int]) -> None:
        self._keys, self._limits = _keys(elements, thresholds)
        size = -(-elements.size // 64)
        inside = np.zeros((len(thresholds) + 2, size), np.uint64)  # the bitmaps of S_0, S_1, ..., and none
        inside[0] = ~np.uint64(0)
        inside[0, -1] >>= np.uint64(-elements.size % 64)
        for bitmap, limit in zip(inside[1:].view(np.uint8), self._limits, strict=False):
            packed = np.packbits(self._keys < limit, bitorder="little")
            bitmap[: packed.size] = packed
        self._words: Words = inside[:-1] ^ inside[1:]  # each is a part of the one before
        # Row i, entry j: the positions of stratum i in the words before j; the last one is all of them.
        self._ranks = np.zeros((len(thresholds) + 1, size + 1), np.int64)
        np.cumsum(np.bitwise_count(self._words), axis=1, out=self._ranks[:, 1:])
        self.populations: list[int] = self._ranks[:, -1].tolist()

    def rank(self, positions: Ranks) -> tuple[list[int], Ranks, Ranks]:
        """Divide rising positions among the strata.

        Returns:
            How many lie in each stratum, outermost first; the positions in that order; and their ranks.
        """
        keys = self._keys.take(positions, mode="clip")
        stratum = np.zeros(positions.size, np.uint8)
        for limit in self._limits:
            stratum += keys < limit
        order = np.argsort(stratum, kind="stable")
        stratum, positions = stratum.take(order), positions.take(order)
        counts: list[int] = np.bincount(stratum, minlength=len(self.populations)).tolist()
        word = stratum * np.int64(self._words.shape[1]) + (positions >> 6)  # in all rows, one after the other
        below = (np.uint64(1) << (positions & 63).view(np.uint64)) - np.uint64(1)
        ranks: Ranks = self._ranks.reshape(-1).take(word + stratum, mode="clip")  # its rows have one more
        ranks += np.bitwise_count(self._words.reshape(-1).take(word, mode="clip") & below)
        return counts, positions, ranks

    def select(self, ranks: Sequence[Ranks]) -> Ranks:
        """Return the positions of ranks, given for each stratum and below its population."""
        places, words, rests = [], [], []
        for group, counts, bitmap in zip(ranks, self._ranks, self._words, strict=True):
            place = np.searchsorted(counts, group, side="right") - 1
            places.append(place)
            words.append(bitmap.take(place))
            rests.append(group - counts.take(place))
        bits = _select_in_word(np.concatenate(words), np.concatenate(rests).view(np.uint64))
        positions: Ranks = (np.concatenate(places) << 6) + bits
        return positions


def _keys(elements: Elements, thresholds: Sequence[int]) -> tuple[Elements, list[Any]]:
    """Give what orders elements as their magnitudes do among the thresholds, and the limits in their place.

    Where the thresholds have no lower bits, the 8 upper bits are enough, and bytes are compared faster.
    """
    width, kind = elements.itemsize, elements.dtype.type
    shift = 8 * width - 9
    if width == 1 or any(threshold & ((1 << shift) - 1) for threshold in thresholds):
        return elements & kind(magnitude_mask(width)), [kind(threshold) for threshold in thresholds]
    keys = (elements >> kind(shift)).astype(np.uint8)  # the sign is cut off
    return keys, [np.uint8(threshold >> shift) for threshold in thresholds]


def _select_in_word(words: Words, ranks: Words) -> Ranks:
    """Return, for each word, the position of its set bit number `rank`, which it has."""
    # Byte j of `sums` has the set bits of bytes 0 to j. Where that is at most the rank, the bit lies above.
    octets = words.view(np.uint8)
    sums = np.bitwise_count(octets).view("<u8") * _ONES
    passed = np.bitwise_count(((ranks * _ONES | _HIGHS) - sums) & _HIGHS).astype(np.int64)
    before = (sums << np.uint64(8)) >> (passed << 3).view(np.uint64) & np.uint64(0xFF)
    octet = octets[np.arange(0, octets.size, 8) + passed].astype(np.int64)
    bits: Ranks = (passed << 3) + _SELECT[(octet << 3) + (ranks - before).view(np.int64)]
    return bits
