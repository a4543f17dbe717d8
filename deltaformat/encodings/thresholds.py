"""Which thresholds pay: where the chance of change differs between magnitudes (SPEC 9.3, writers only)."""

from __future__ import annotations

import numpy as np

from deltaformat.blocks import Bytes
from deltaformat.encodings.strata import Positions, magnitude_mask

__all__ = ["choose_thresholds"]

_CLASSES = 4
"""Strata at most: in NumPy each threshold costs a pass over the base, and later ones gain little."""

_LEAST_CHANGES = 256
"""Fewer changes than this cannot pay for more than one stratum's header."""

_LEAST_RATIO = 1.5
"""Two neighbours whose rates of change differ by less than this are one stratum."""

_SAMPLE = 1 << 12


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
    elements = base.view(f"<u{width}")
    mask = elements.dtype.type(magnitude_mask(width))
    changed = np.sort(elements[positions] & mask)
    sample = np.sort(elements[:: max(1, elements.size // _SAMPLE)] & mask)

    chosen: list[int] = []
    upper_changed, upper_sample = changed.size, sample.size
    for quantile in range(_CLASSES - 1, 0, -1):
        threshold = changed[changed.size * quantile // _CLASSES]
        below_changed = int(np.searchsorted(changed, threshold))
        below_sample = int(np.searchsorted(sample, threshold))
        # One more in each sample: a rate is never divided by zero.
        inner = below_changed / (below_sample + 1)
        outer = (upper_changed - below_changed) / (upper_sample - below_sample + 1)
        if outer and inner > _LEAST_RATIO * outer:
            chosen.append(int(threshold))
            upper_changed, upper_sample = below_changed, below_sample
    return tuple(chosen)
