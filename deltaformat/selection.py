"""Slices of a tensor: which blocks hold them, and how to cut them out (SPEC 13, step 5).

Basic NumPy indexing, with NumPy's meaning: integers, slices of any step, `...` and `None`, on any axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaformat.dtypes import Dtype, tensor_nbytes
from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError

__all__ = ["Selection", "select"]

_MAX_NDIM = 64  # NumPy's own
_INTEGERS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class _Axis:
    """What is taken of one axis: `count` elements from `start`, `step` apart; not `kept` if by an integer."""

    size: int
    start: int
    step: int
    count: int
    kept: bool

    @property
    def low(self) -> int:
        return min(self.start, self.start + self.step * (self.count - 1))

    @property
    def high(self) -> int:
        return max(self.start, self.start + self.step * (self.count - 1))

    @property
    def whole(self) -> bool:
        return self.count == self.size and self.step == 1


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A selection of a tensor's elements.

    To read it: make a buffer for the canonical bytes [start, stop), put every block of `blocks` where it
        overlaps that range, and call `take`.
    Bytes of the range that lie in no such block are never looked at.

    Attributes:
        shape: Shape of the result.
        blocks: The tensor's blocks that hold a selected element, rising; no others (DF-RD-01).
        start: First byte of the range.
        stop: Its end.
    """

    shape: tuple[int, ...]
    blocks: npt.NDArray[np.int64]
    start: int
    stop: int
    _view: tuple[int, ...]
    _index: tuple[slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the range that a buffer for `take` covers."""
        return self.stop - self.start

    def take(self, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Cut the selection's canonical bytes out of the range's.

        Args:
            buffer: The range's bytes, shape (nbytes,), contiguous.

        Returns:
            The canonical bytes of the result; a view of `buffer` where they are one run.
        """
        items: npt.NDArray[Any] = buffer.reshape(self._view)
        if (
            self._view[-1] in _INTEGERS
        ):  # NumPy moves whole integers several times as fast as rows of 2 to 8 bytes
            items = items.view(_INTEGERS[self._view[-1]])
        return np.ascontiguousarray(items[self._index]).reshape(-1).view(np.uint8)


def select(
    shape: Sequence[int], dtype: Dtype, key: object, *, block_bytes: int, where: str = ""
) -> Selection:
    """Work out a selection.

    Args:
        shape: The tensor's shape.
        dtype: Its dtype.
        key: What was given between the brackets.
        block_bytes: The store's block size.
        where: What an error should name: the tensor.

    Raises:
        MalformedError: The key is out of range, has too many indices or means nothing (input-invalid).
        UnsupportedError: It needs advanced indexing, or parts of bytes of a sub-byte dtype (not-supported).
    """
    axes, result = _normalise(tuple(shape), key, where)
    if 0 in result:
        nothing = np.empty(0, np.int64)
        return Selection(result, nothing, 0, 0, (0, 1), (slice(None),))
    # Axes that are taken whole, from the last one on, are one run of bytes: `unit`.
    last = len(axes)
    while last and axes[last - 1].whole:
        last -= 1
    bits = math.prod(axis.size for axis in axes[last:]) * dtype.bits
    if bits % 8:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            f"this slice of a {dtype.name} tensor is not made of whole bytes; read whole rows, or the tensor",
            where=where,
        )
    tensor_nbytes(dtype, shape, where=where)
    unit = bits // 8
    strides = [unit] * last
    for axis in range(last - 2, -1, -1):
        strides[axis] = strides[axis + 1] * axes[axis + 1].size
    # Leading axes of which one element is taken fix where the range lies; it spans what the next one needs.
    lead = 0
    while lead < last and axes[lead].count == 1:
        lead += 1
    start = sum(axes[axis].low * strides[axis] for axis in range(min(lead + 1, last)))
    view: tuple[int, ...]
    index: tuple[slice, ...]
    if lead == last:
        view, index, nbytes = (1, unit), (slice(None),), unit
    else:
        span = axes[lead].high - axes[lead].low + 1
        view = (span, *(axis.size for axis in axes[lead + 1 : last]), unit)
        index = (_slice(axes[lead], axes[lead].low), *(_slice(axis, 0) for axis in axes[lead + 1 : last]))
        nbytes = span * strides[lead]
    blocks = _blocks(axes[:last], strides, unit, block_bytes)
    return Selection(result, blocks, start, start + nbytes, view, index)


def _slice(axis: _Axis, low: int) -> slice:
    begin = axis.start - low
    end = begin + axis.step * axis.count
    return slice(begin, None if end < 0 else end, axis.step)


def _blocks(
    axes: Sequence[_Axis], strides: Sequence[int], unit: int, block_bytes: int
) -> npt.NDArray[np.int64]:
    """Find the blocks that hold a selected byte, in time and memory of their number, not of the elements'.

    From the last axis on, `extent` is a span of which every block is hit. Repeated at a stride that leaves no
    gap as long as a block, such spans make a longer one. Otherwise each span begins a gap of at least a block
    after the one before, so that spans are at most as many as blocks.
    """
    extent = unit
    starts = np.zeros(1, np.int64)
    dense = True
    for axis, stride in zip(reversed(axes), reversed(strides), strict=True):
        low, step = axis.low * stride, abs(axis.step) * stride
        if axis.count == 1:
            starts = starts + low
        elif dense and step - extent < block_bytes:
            starts = starts + low
            extent += step * (axis.count - 1)
        else:
            dense = False
            offsets = np.arange(axis.count, dtype=np.int64) * step + low
            starts = (offsets[:, np.newaxis] + starts).reshape(-1)
    first = starts // block_bytes
    counts = (starts + extent - 1) // block_bytes - first + 1
    ends = np.cumsum(counts)
    blocks: npt.NDArray[np.int64] = np.arange(ends[-1], dtype=np.int64) + np.repeat(
        first - (ends - counts), counts
    )
    fresh = np.ones(len(blocks), np.bool_)
    np.not_equal(blocks[1:], blocks[:-1], out=fresh[1:])
    found: npt.NDArray[np.int64] = blocks[fresh]
    return found


def _normalise(shape: tuple[int, ...], key: object, where: str) -> tuple[list[_Axis], tuple[int, ...]]:
    """Read a key: what is taken of every axis, and the shape of the result."""
    items = list(key) if isinstance(key, tuple) else [key]
    used = sum(item is not None and item is not ... for item in items)
    if sum(item is ... for item in items) > 1:
        raise _input("a key can have one `...`", where)
    if used > len(shape):
        raise _input(f"{used} indices for a tensor of shape {list(shape)}", where)
    if not any(item is ... for item in items):
        items.append(...)
    at = next(number for number, item in enumerate(items) if item is ...)
    items[at : at + 1] = [slice(None)] * (len(shape) - used)
    axes: list[_Axis] = []
    result: list[int] = []
    for item in items:
        if item is None:
            result.append(1)
            continue
        axis = _axis(item, shape[len(axes)], len(axes), where)
        axes.append(axis)
        if axis.kept:
            result.append(axis.count)
    if len(result) > _MAX_NDIM:
        raise _input(f"the result would have {len(result)} dimensions, more than {_MAX_NDIM}", where)
    return axes, tuple(result)


def _axis(item: object, size: int, axis: int, where: str) -> _Axis:
    if isinstance(item, slice):
        try:
            start, stop, step = item.indices(size)
        except (TypeError, ValueError) as error:
            raise _input(f"axis {axis}: {error}", where) from None
        count = len(range(start, stop, step))
        return _Axis(size, start, step if count > 1 else 1, count, kept=True)
    advanced = isinstance(item, bool | np.bool_ | list | tuple) or getattr(item, "ndim", 0) != 0
    advanced = advanced or "bool" in str(getattr(item, "dtype", ""))
    try:
        index = operator.index(item)  # type: ignore[arg-type]  # what is no integer is told apart below
    except TypeError:
        advanced = advanced or hasattr(item, "ndim") or hasattr(item, "__array__")
        index = 0
        if not advanced:
            raise _input(
                f"axis {axis}: {type(item).__name__} is no index; use integers and slices", where
            ) from None
    if advanced:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            f"axis {axis}: no indexing by {type(item).__name__}; use integers, slices, `...` and None",
            where=where,
        )
    if not -size <= index < size:
        raise _input(f"axis {axis}: index {index} is out of range for {size} elements", where)
    return _Axis(size, index % size, 1, 1, kept=False)


def _input(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.INPUT_INVALID, message, where=where)
