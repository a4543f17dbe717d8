"""Entropy bounds: what no coder of a model can go below, computed on the data that is measured.

Models of where changes are, in each run of 1 MiB of a tensor: every element changes by the same chance,
or by a chance that depends on the exponent of its old value. And of what changes are (new - old, as
integers): drawn from one distribution, or from one per exponent; over all tensors. Chances and
distributions are the observed ones, and telling them costs nothing, so that no coder of the same model
can reach its bound. One that knows more can.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.bench.codecs import Bits

__all__ = [
    "EXPONENT_SHIFTS",
    "REGION_BYTES",
    "Bounds",
    "binary_entropy_bits",
    "entropy_bits",
    "measure_bounds",
]

EXPONENT_SHIFTS = {"BF16": 7, "F16": 10, "F32": 23, "F8_E4M3": 3, "F8_E5M2": 2}
"""Bits below the exponent, by dtype."""
REGION_BYTES = 1 << 20
"""Chances are those of a run of so many bytes of a tensor: coders adapt to where they are."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Entropies of one step, in bits for all changes together.

    Attributes:
        changed: Elements that changed.
        positions: Of positions, each of a run as likely as any other.
        positions_by_exponent: Of positions, given the old values' exponents.
        values: Of the differences.
        values_by_exponent: Of the differences, given the exponents.
    """

    changed: int
    positions: float
    positions_by_exponent: float
    values: float
    values_by_exponent: float

    def per_change(self) -> dict[str, float]:
        """Bytes a changed weight, by model."""
        sums = {
            "positions independent + values": self.positions + self.values,
            "positions given exponents + values": self.positions_by_exponent + self.values,
            "positions and values given exponents": self.positions_by_exponent + self.values_by_exponent,
        }
        return {name: bits / 8 / self.changed if self.changed else 0.0 for name, bits in sums.items()}


def entropy_bits(counts: Iterable[int] | npt.NDArray[np.integer]) -> float:
    """Bits of all symbols together, each by its share: sum of c log2(total / c)."""
    observed = np.asarray(list(counts) if not isinstance(counts, np.ndarray) else counts, np.float64)
    observed = observed[observed > 0]
    return float((observed * np.log2(observed.sum() / observed)).sum()) if observed.size else 0.0


def binary_entropy_bits(changed: npt.NDArray[np.integer], seen: npt.NDArray[np.integer]) -> float:
    """Bits to say which elements change, over classes: `changed` of the `seen` of each."""
    return sum(entropy_bits([c, n - c]) for c, n in zip(changed.tolist(), seen.tolist(), strict=True))


def measure_bounds(old: Bits, new: Bits, dtypes: dict[str, str]) -> Bounds:
    """Compute the bounds of one step.

    Args:
        old: The state before.
        new: The state after, the same names and shapes.
        dtypes: Each tensor's dtype name; where it is no float, all elements are of one class.
    """
    positions = by_exponent = 0.0
    values: list[npt.NDArray[np.int64]] = []  # difference and exponent of every change
    for name, tensor in new.items():
        shift = EXPONENT_SHIFTS.get(dtypes[name])
        run = REGION_BYTES // tensor.itemsize
        for start in range(0, tensor.size, run):
            before, after = (array.reshape(-1)[start : start + run] for array in (old[name], tensor))
            places = np.flatnonzero(before != after)
            seen, classes = _exponents(before, shift), _exponents(before[places], shift)
            changed = np.bincount(classes, minlength=256)
            positions += entropy_bits([places.size, before.size - places.size])
            by_exponent += binary_entropy_bits(changed, np.bincount(seen, minlength=256))
            moved = (after[places] - before[places]).astype(np.int64)
            values.append(np.stack([moved, classes.astype(np.int64)]))
    found = np.concatenate(values, axis=1) if values else np.empty((2, 0), np.int64)
    given = sum(_entropy_of(found[0, found[1] == exponent]) for exponent in np.unique(found[1]))
    return Bounds(found.shape[1], positions, by_exponent, _entropy_of(found[0]), given)


def _entropy_of(symbols: npt.NDArray[np.int64]) -> float:
    return entropy_bits(np.unique(symbols, return_counts=True)[1])


def _exponents(elements: npt.NDArray[np.unsignedinteger], shift: int | None) -> npt.NDArray[np.uint8]:
    """Each element's exponent; 0 where there is none."""
    if shift is None:
        return np.zeros(elements.size, np.uint8)
    kind = elements.dtype.type
    mask = kind((1 << (8 * elements.itemsize - 1 - shift)) - 1)
    exponents: npt.NDArray[np.uint8] = ((elements >> kind(shift)) & mask).astype(np.uint8)
    return exponents
