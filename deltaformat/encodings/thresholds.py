"""Which thresholds pay: where the chance of change differs between magnitudes (SPEC 9.3, writers only).

Magnitudes fall into classes by their upper bits, which for most floats are the exponent. Strata are runs of
classes: from one of all, the cut that saves most is made, again and again, until none saves enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from deltaformat.blocks import Bytes
from deltaformat.encodings import native
from deltaformat.encodings.estimates import SCALE, scaled_log2
from deltaformat.encodings.strata import Positions, magnitude_mask

__all__ = ["choose_thresholds", "cut_classes"]

_MOST = 15
_MOST_IN_NUMPY = 3
"""In NumPy each threshold costs a pass over the base, and later ones gain little."""

_LEAST_CHANGES = 32
"""Fewer changes than this are not worth a look."""

_LEAST_GAIN = 256
"""A threshold must save one bit in so many changes, besides what it costs itself: it takes time to read."""

_SAMPLE = 1 << 13


def choose_thresholds(base: Bytes, positions: Positions, width: int, kind: str) -> tuple[int, ...]:
    """Choose thresholds for `encode_sparse`.

    Args:
        base: The base block.
        positions: The positions that change, not empty.
        width: Element width in bytes.
        kind: The dtype's kind; only in floats does the magnitude tell how likely a change is.

    Returns:
        Magnitudes, strictly falling; none where they would not pay.
    """
    if kind != "float" or positions.size < _LEAST_CHANGES:
        return ()
    # The threshold itself, its count and its k; then some, since the estimate is one.
    least = SCALE * (8 * (width + 4) + positions.size // _LEAST_GAIN)
    if native.kernels is not None:
        places = np.ascontiguousarray(positions, np.uint32)
        rising = native.kernels.choose(base, width, places, _MOST, least)
    else:
        rising = cut_classes(base, positions, width, _MOST_IN_NUMPY, least)
    return tuple(reversed(rising))


@dataclass(slots=True)
class _Segment:
    """A stratum: a run of classes, where best to cut it, and what that saves."""

    first: int
    last: int
    cut: int = 0
    gain: int = 0


def cut_classes(base: Bytes, positions: Positions, width: int, most: int, least: int) -> list[int]:
    """Give up to `most` thresholds, rising, each of which saves more than `least`: the kernel's reference."""
    shift = 8 * width - 9 if width > 1 else 0
    elements = base.view(f"<u{width}")
    stride = elements.size // _SAMPLE | 1  # odd, so that it meets every column of a matrix
    mask = elements.dtype.type(magnitude_mask(width))
    changed_in, seen_in = (
        np.bincount(((sample & mask) >> elements.dtype.type(shift)).astype(np.uint8), minlength=256)
        for sample in (elements[positions], elements[::stride])
    )
    keys = np.flatnonzero(changed_in + seen_in)
    # How many of each are in the classes before.
    changed = [0, *accumulate(changed_in[keys].tolist())]
    seen = [0, *accumulate(seen_in[keys].tolist())]

    def cost(first: int, last: int) -> int:
        """What the positions of a stratum cost: c log(n / c) + (n - c) log(n / (n - c)), nearly."""
        c = changed[last] - changed[first]
        n = max(c, (seen[last] - seen[first]) * stride)
        return c * (scaled_log2(n) - scaled_log2(c)) + 1477 * c * (2 * n - c) // (2 * n) if c else 0

    def segment(first: int, last: int) -> _Segment:
        found = _Segment(first, last)
        whole = cost(first, last)
        for cut in range(first + 1, last):
            gain = whole - cost(first, cut) - cost(cut, last)
            if gain > found.gain:
                found.cut, found.gain = cut, gain
        return found

    segments = [segment(0, len(keys))]
    while len(segments) <= most:
        best = max(range(len(segments)), key=lambda index: segments[index].gain)
        if segments[best].gain <= least:
            break
        old = segments[best]
        segments[best : best + 1] = [segment(old.first, old.cut), segment(old.cut, old.last)]
    return [int(keys[segment.first]) << shift for segment in segments[1:]]
