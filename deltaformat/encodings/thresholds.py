"""Which thresholds pay: where the chance of change differs between magnitudes (SPEC 9.3, writers only).

Magnitudes fall into classes by their upper bits, which for most floats are the exponent. Strata are runs of
classes: from one of all, the cut that saves most is made, again and again, until none saves enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes
from deltaformat.columns import prefix_sums
from deltaformat.encodings import native
from deltaformat.encodings.estimates import SCALE, scaled_log2s
from deltaformat.encodings.strata import Positions, magnitude_mask

__all__ = ["FLOAT", "choose_thresholds", "cut_classes"]

FLOAT = "float"
"""The kind of dtypes in which the magnitude tells how likely a change is."""

_MOST = 15
_MOST_IN_NUMPY = 3
"""In NumPy each threshold costs a pass over the base, and later ones gain little."""

_LEAST_CHANGES = 32
"""Fewer changes than this are not worth a look."""

_LEAST_DENSITY_IN_NUMPY = 2048
"""Nor, in NumPy, fewer than one in so many elements: the passes cost the same and gain less."""

_LEAST_GAIN = 256
"""A threshold must save one bit in so many changes, besides what it costs itself: it takes time to read."""

_SAMPLE = 1 << 13


def choose_thresholds(base: Bytes, positions: Positions, width: int, kind: str) -> tuple[int, ...]:
    """Choose thresholds for `encode_sparse`: those that `encode_block` uses, by the kernels or here.

    Args:
        base: The base block.
        positions: The positions that change, not empty.
        width: Element width in bytes.
        kind: The dtype's kind; only floats get any.

    Returns:
        Magnitudes, strictly falling; none where they would not pay.
    """
    if kind != FLOAT or positions.size < _LEAST_CHANGES:
        return ()
    if native.kernels is None and positions.size * _LEAST_DENSITY_IN_NUMPY < base.size // width:
        return ()
    # The threshold itself, its count and its k; then some, since the estimate is one.
    least = SCALE * (8 * (width + 4) + positions.size // _LEAST_GAIN)
    most = _MOST_IN_NUMPY if native.kernels is None else _MOST
    return tuple(reversed(cut_classes(base, positions, width, most, least)))


@dataclass(slots=True)
class _Segment:
    """A stratum: a run of classes, where best to cut it, and what that saves."""

    first: int
    last: int
    cut: int = 0
    gain: int = 0  # below 1: nothing


def cut_classes(base: Bytes, positions: Positions, width: int, most: int, least: int) -> list[int]:
    """Give up to `most` thresholds, rising, each of which saves more than `least`: the kernel's reference."""
    shift = 8 * width - 9 if width > 1 else 0
    elements = base.view(f"<u{width}")
    stride = elements.size // _SAMPLE | 1  # odd, so that it meets every column of a matrix
    mask = elements.dtype.type(magnitude_mask(width))
    changed_in, seen_in = (
        np.bincount(((sample & mask) >> elements.dtype.type(shift)).astype(np.uint8), minlength=256)
        for sample in (elements.take(positions, mode="clip"), elements[::stride])
    )
    keys = np.flatnonzero(changed_in + seen_in)
    # How many of each are in the classes before.
    changed, seen = (prefix_sums(count[keys]) for count in (changed_in, seen_in))
    costs = _costs(changed, seen * stride)

    def segment(first: int, last: int) -> _Segment:
        if last - first < 2:
            return _Segment(first, last)
        gains = costs[first, last] - costs[first, first + 1 : last] - costs[first + 1 : last, last]
        best = int(gains.argmax())
        return _Segment(first, last, first + 1 + best, int(gains[best]))

    segments = [segment(0, len(keys))]
    while len(segments) <= most:
        best = max(range(len(segments)), key=lambda index: segments[index].gain)
        if segments[best].gain <= least:
            break
        old = segments[best]
        make = segment if len(segments) < most else _Segment  # the last ones are not cut again
        segments[best : best + 1] = [make(old.first, old.cut), make(old.cut, old.last)]
    return [int(keys[segment.first]) << shift for segment in segments[1:]]


def _costs(changed: npt.NDArray[np.int64], seen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What the positions of a stratum cost: c log(n / c) + (n - c) log(n / (n - c)), nearly.

    Args:
        changed: Changes in the classes before each, and in all.
        seen: Elements in them.

    Returns:
        The costs of classes i to j - 1 at [i, j].
    """
    c = changed - changed[:, None]
    n = np.maximum(c, seen - seen[:, None])
    some = c > 0
    c, n = np.where(some, c, 1), np.where(some, n, 1)
    log_n, log_c = scaled_log2s(np.stack([n, c]))
    costs = c * (log_n - log_c) + 1477 * c * (2 * n - c) // (2 * n)
    return np.where(some, costs, 0)
