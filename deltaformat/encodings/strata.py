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
        thresholds: Magnitudes, falling.

    Attributes:
        populations: Number of positions in each stratum, outermost first.
    """

    __slots__ = ("_magnitudes", "_ranks", "_thresholds", "_words", "populations")

    def __init__(self, elements: Elements, thresholds: Sequence[int]) -> None:
        kind = elements.dtype.type
        self._thresholds = [kind(threshold) for threshold in thresholds]
        self._magnitudes = elements & kind(magnitude_mask(elements.itemsize))
        inside = _all_set(elements.size)  # S_0
        self._words: list[Words] = []
        for threshold in self._thresholds:
            inner = _bitmap(self._magnitudes < threshold)
            self._words.append(inside & ~inner)
            inside = inner
        self._words.append(inside)
        # Entry j counts the stratum's positions in the words before j, and the last one all of them.
        self._ranks: list[Ranks] = []
        for words in self._words:
            ranks = np.zeros(words.size + 1, np.int64)
            np.cumsum(np.bitwise_count(words), out=ranks[1:])
            self._ranks.append(ranks)
        self.populations = [int(ranks[-1]) for ranks in self._ranks]

    def split(self, positions: Ranks) -> list[Ranks]:
        """Divide rising positions among the strata, outermost first."""
        magnitudes = self._magnitudes[positions]
        stratum = np.zeros(positions.size, np.uint8)
        for threshold in self._thresholds:
            stratum += magnitudes < threshold
        return [positions[stratum == index] for index in range(len(self._words))]

    def rank(self, index: int, positions: Ranks) -> Ranks:
        """Return the ranks of positions that lie in stratum `index`."""
        word = positions >> 6
        below = (np.uint64(1) << (positions & 63).view(np.uint64)) - np.uint64(1)
        ranks: Ranks = self._ranks[index][word] + np.bitwise_count(self._words[index][word] & below)
        return ranks

    def select(self, ranks: Sequence[Ranks]) -> Ranks:
        """Return the positions of ranks, given for each stratum and below its population."""
        places, words, rests = [], [], []
        for group, counts, bitmap in zip(ranks, self._ranks, self._words, strict=True):
            place = np.searchsorted(counts, group, side="right") - 1
            places.append(place)
            words.append(bitmap[place])
            rests.append(group - counts[place])
        bits = _select_in_word(np.concatenate(words), np.concatenate(rests).view(np.uint64))
        positions: Ranks = (np.concatenate(places) << 6) + bits
        return positions


def _all_set(size: int) -> Words:
    words = np.full(-(-size // 64), -1, np.int64).view(np.uint64)
    words[-1] >>= np.uint64(-size % 64)
    return words


def _bitmap(members: npt.NDArray[np.bool_]) -> Words:
    packed = np.packbits(members, bitorder="little")
    packed.resize(-(-packed.size // 8) * 8, refcheck=False)
    words: Words = packed.view("<u8")
    return words


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
