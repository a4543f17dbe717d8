"""Arithmetic on columns: many tensors, blocks or pieces at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltaformat.dtypes import MAX_RANK, MAX_TENSOR_BYTES, get_dtype
from deltaformat.errors import ErrorCode, MalformedError

__all__ = ["prefix_sums", "ranges", "tensor_sizes"]

Integers = npt.NDArray[np.int64]


def ranges(starts: Integers, counts: Integers) -> Integers:
    """Concatenate the ranges [start, start + count), all at once."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Integers = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return numbers


def prefix_sums(counts: npt.NDArray[np.integer]) -> Integers:
    """Return 0 and the running sums: where each group begins, and at last where all end."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def tensor_sizes(dtypes: Sequence[str], ranks: Integers, dims: Integers, *, where: str = "") -> Integers:
    """Count the canonical bytes of many tensors at once, as `dtypes.tensor_nbytes` does for one.

    Args:
        dtypes: Each tensor's dtype name.
        ranks: Its rank.
        dims: All dimensions, tensor after tensor.
        where: What an error should name.

    Raises:
        UnsupportedError: A dtype is not in SPEC 8.1 (DF-DTY-01).
        MalformedError: A shape breaks DF-MAN-06, or does not fill whole bytes (DF-DTY-02).
    """
    known = {name: get_dtype(name, where=where).bits for name in set(dtypes)}
    bits = np.fromiter((known[name] for name in dtypes), np.int64, len(dtypes))
    if ranks.max(initial=0) > MAX_RANK or dims.min(initial=0) < 0:
        raise _invalid("a shape has a rank above 32 or a negative dimension (DF-MAN-06)", where)
    starts = prefix_sums(ranks)[:-1]
    axes = ranks > 0
    elements = np.ones(len(dtypes), np.int64)
    magnitude = np.zeros(len(dtypes), np.float64)
    empty = np.zeros(len(dtypes), np.bool_)
    if axes.any():
        # Products of hostile dimensions wrap around, harmlessly: a float sum of logarithms tells first
        # whether the true product fits.
        with np.errstate(divide="ignore"):
            logarithms = np.log2(np.maximum(dims, 1).astype(np.float64))
        empty[axes] = np.minimum.reduceat(dims, starts[axes]) == 0
        magnitude[axes] = np.add.reduceat(logarithms, starts[axes])
        elements[axes] = np.multiply.reduceat(dims, starts[axes])
    elements[empty] = 0
    if (magnitude > 55).any():
        raise _invalid("a tensor exceeds 2^53 - 1 bytes (DF-MAN-06)", where)
    total_bits = elements * bits
    if (total_bits % 8).any():
        raise _invalid("a tensor does not fill whole bytes (DF-DTY-02)", where)
    sizes = total_bits // 8
    if sizes.max(initial=0) > MAX_TENSOR_BYTES:
        raise _invalid("a tensor exceeds 2^53 - 1 bytes (DF-MAN-06)", where)
    return sizes


def _invalid(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.MANIFEST_INVALID, message, where=where)
