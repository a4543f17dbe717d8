"""Live tensors that changes are written into: NumPy arrays, torch tensors on any device, in any layout.

Everything goes through integer views in the memory of the tensor that was given. Every destination is checked
before the first is written, and what was overwritten is kept, so that it can be put back.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltaformat.dtypes import get_dtype, tensor_nbytes
from deltaformat.errors import (
    DeltaFormatError,
    ErrorCode,
    InconsistentError,
    MalformedError,
    UnsupportedError,
)
from deltaformat.patches import BlockChange, TensorChange, element_bytes
from deltaformat.tensors import TensorBytes, TensorSpec, check_name, numpy_dtype_name
from deltaformat.torchtensors import form_of, is_torch, type_name, writable_bits

__all__ = ["Application", "Destination", "Work", "open_destination", "open_work"]

Elements = npt.NDArray[Any]
Places = npt.NDArray[np.integer[Any]] | None


class Destination(Protocol):
    """The memory of one live tensor, as elements (see `patches`) in C order."""

    @property
    def address(self) -> int:
        """Where its memory begins."""

    @property
    def place(self) -> tuple[object, ...]:
        """What two names that share all their elements have in common."""

    def read(self, start: int, count: int, positions: Places) -> Elements:
        """The bits of the `count` elements from `start` on, or of those of them at `positions`."""

    def write(self, start: int, count: int, positions: Places, values: Elements) -> None:
        """Write their bits."""


def open_destination(spec: TensorSpec, tensor: object) -> Destination:
    """Take a live tensor's memory, to be written.

    Args:
        spec: What it must be.
        tensor: A NumPy array, a torch tensor, or a `TensorBytes` whose data can be written.

    Raises:
        InconsistentError: Another dtype or shape (parts-disagree).
        UnsupportedError: Memory that cannot be written element by element.
        MalformedError: No tensor, or one that is read-only.
    """
    try:
        if is_torch(tensor):
            dtype, shape, bits = writable_bits(tensor)
            _check_form(spec, dtype, shape)
            _check_overlap(bits.shape, bits.stride())
            if bits.device.type == "cpu":
                return _Array(bits.numpy().view(f"u{bits.element_size()}"))
            return TorchDestination(bits)
        if isinstance(tensor, np.ndarray):
            return _open_array(spec, tensor)
        if isinstance(tensor, TensorBytes):
            _check_form(spec, tensor.dtype, tuple(tensor.shape))
            data = np.frombuffer(tensor.data, np.uint8)
            if data.size != tensor_nbytes(get_dtype(spec.dtype), spec.shape):
                raise InconsistentError(ErrorCode.PARTS_DISAGREE, f"has {data.size} bytes of data")
            _check_writable(data)
            return _Array(data.view(f"<u{element_bytes(spec.dtype)}"))
    except DeltaFormatError as error:
        raise type(error)(error.code, error.message, where=f"tensor {spec.name[:100]!a}") from error.__cause__
    raise MalformedError(
        ErrorCode.INPUT_INVALID,
        f"{type_name(tensor)} cannot be written; pass a NumPy array or a torch tensor",
        where=f"tensor {spec.name[:100]!a}",
    )


def _open_array(spec: TensorSpec, array: npt.NDArray[Any]) -> Destination:
    name = numpy_dtype_name(array.dtype)
    _check_form(spec, str(array.dtype) if name is None else name, array.shape)
    _check_writable(array)
    _check_overlap(array.shape, array.strides)
    if name == "F4":
        return _Nibbles(array.view(np.uint8))
    foreign = array.dtype.byteorder == ">" or (array.dtype.byteorder != "<" and sys.byteorder == "big")
    if name == "C64" and foreign:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED, "a big-endian complex array; pass a little-endian one"
        )
    order = array.dtype.byteorder if array.dtype.byteorder in "<>" else "="
    return _Array(array.view(f"{order}u{array.dtype.itemsize}"))


def _check_form(spec: TensorSpec, dtype: str, shape: tuple[int, ...]) -> None:
    if (dtype, tuple(shape)) != (spec.dtype, tuple(spec.shape)):
        raise InconsistentError(
            ErrorCode.PARTS_DISAGREE,
            f"is {dtype} {list(shape)} in the given state, {spec.dtype} {list(spec.shape)} in the version",
        )


def _check_writable(array: npt.NDArray[Any]) -> None:
    if not array.flags.writeable:
        raise MalformedError(
            ErrorCode.INPUT_INVALID, "its memory is read-only; pass an array that can be written"
        )


def _check_overlap(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Refuse a layout in which two elements share memory, as in expanded tensors and sliding windows."""
    if 0 in shape:
        return
    reach = 0
    for stride, size in sorted(
        (abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride <= reach:
            problem = "several of its elements share memory (is it expanded?); pass what it is a view of"
            raise UnsupportedError(ErrorCode.NOT_SUPPORTED, problem)
        reach += stride * (size - 1)


class _Array:
    """Elements in host memory, in whatever layout and byte order."""

    def __init__(self, bits: Elements) -> None:
        self._bits = bits
        self._flat: Elements | None = bits.reshape(-1) if bits.flags.c_contiguous else None

    @property
    def address(self) -> int:
        """Where its memory begins."""
        return _address(self._bits)

    @property
    def place(self) -> tuple[object, ...]:
        """Address, strides, shape and order."""
        return "cpu", self.address, self._bits.strides, self._bits.shape, self._bits.dtype.str

    def read(self, start: int, count: int, positions: Places) -> Elements:
        """Copy elements."""
        if self._flat is None:
            found: Elements = self._bits[self._index(start, count, positions)]
            return found
        part = self._flat[start : start + count]
        return part.copy() if positions is None else part[positions]

    def write(self, start: int, count: int, positions: Places, values: Elements) -> None:
        """Write elements."""
        if self._flat is None:
            self._bits[self._index(start, count, positions)] = values
        else:
            part = self._flat[start : start + count]
            part[slice(None) if positions is None else positions] = values

    def _index(self, start: int, count: int, positions: Places) -> tuple[npt.NDArray[np.intp], ...]:
        return np.unravel_index(flat_indices(start, count, positions), self._bits.shape)


class _Nibbles:
    """F4 in NumPy, one element a byte; seen in pairs, as they are stored."""

    def __init__(self, codes: npt.NDArray[np.uint8]) -> None:
        self._codes = _Array(codes)

    @property
    def address(self) -> int:
        """Where its memory begins."""
        return self._codes.address

    @property
    def place(self) -> tuple[object, ...]:
        """As its array's."""
        return ("nibbles", *self._codes.place)

    def read(self, start: int, count: int, positions: Places) -> Elements:
        """Pack pairs."""
        low = 2 * flat_indices(start, count, positions)
        if not low.size:
            return np.empty(0, np.uint8)
        every = int(low.max()) + 2
        packed: Elements = self._codes.read(0, every, low) & 15 | self._codes.read(0, every, low + 1) << 4
        return packed

    def write(self, start: int, count: int, positions: Places, values: Elements) -> None:
        """Unpack pairs."""
        low = 2 * flat_indices(start, count, positions)
        if low.size:
            every = int(low.max()) + 2
            self._codes.write(0, every, low, values & 15)
            self._codes.write(0, every, low + 1, values >> 4)


class TorchDestination:
    """Elements in the memory of any torch device: written there by index, so that only changes travel.

    Args:
        bits: A tensor of integers that shares memory with the live one.
    """

    def __init__(self, bits: Any) -> None:
        self._torch = sys.modules["torch"]
        self._bits = bits
        self._flat = bits.view(-1) if bits.is_contiguous() else None

    @property
    def address(self) -> int:
        """Where its memory begins."""
        return int(self._bits.data_ptr())

    @property
    def place(self) -> tuple[object, ...]:
        """Device, address and strides."""
        bits = self._bits
        return str(bits.device), self.address, tuple(bits.stride()), tuple(bits.shape), str(bits.dtype)

    def read(self, start: int, count: int, positions: Places) -> Elements:
        """Copy elements to the host."""
        target, index = self._index(start, count, positions)
        found = target[index].cpu().numpy()
        return np.asarray(found.view(f"u{found.itemsize}"))

    def write(self, start: int, count: int, positions: Places, values: Elements) -> None:
        """Copy values to the device and put them in their places."""
        host = np.ascontiguousarray(values)
        signed = (
            host
            if host.itemsize == 1
            else host.astype(f"u{host.itemsize}", copy=False).view(f"i{host.itemsize}")
        )
        target, index = self._index(start, count, positions)
        target[index] = self._torch.from_numpy(signed.copy()).to(self._bits.device)

    def _index(self, start: int, count: int, positions: Places) -> tuple[Any, Any]:
        """What to index, and by what."""
        if self._flat is not None and positions is None:
            return self._flat, slice(start, start + count)
        flat = self._torch.from_numpy(flat_indices(start, count, positions)).to(self._bits.device)
        if self._flat is not None:
            return self._flat, flat
        return self._bits, tuple(self._torch.unravel_index(flat, tuple(self._bits.shape)))


def flat_indices(start: int, count: int, positions: Places) -> npt.NDArray[np.int64]:
    """Positions in the flat tensor."""
    if positions is None:
        return np.arange(start, start + count, dtype=np.int64)
    return positions.astype(np.int64) + start


Work = tuple[Destination, TensorChange]
"""What to write, and where."""


def open_work(
    state: Mapping[str, Any], specs: Mapping[str, TensorSpec], changes: Sequence[TensorChange]
) -> list[Work]:
    """Open live tensors to be written, each memory once.

    Args:
        state: The live tensors by name.
        specs: What those must be that the version has.
        changes: What to write.

    Raises:
        InconsistentError: A name is missing or has another form; or two names share memory but not their new
            content.
        UnsupportedError, MalformedError: As for `open_destination`.
    """
    missing = [name for name in specs if name not in state]
    if missing:
        raise InconsistentError(
            ErrorCode.PARTS_DISAGREE,
            f"the given state lacks {len(missing)} tensors of the version; nothing was written",
            where=f"tensor {check_name(missing[0])[:100]!a}",
        )
    opened = _open_changed(state, specs, {change.name for change in changes if change.changed})
    return [(destination, change) for _, destination, change in _once(opened, changes)]


class Application:
    """Changes written to live tensors: all of them, or none; and back again.

    Args:
        work: What to write and where, as `open_work` gives it.
        label: Names the version that `state` must be, for errors.
        keep: Whether `state` must hold what the changes were made against, and is to get it back after a
            failure; that takes as much memory as the changes.

    Raises:
        InconsistentError: A changed element has neither its old bits nor its new ones. Nothing has been
            written.
    """

    def __init__(self, work: Sequence[Work], *, label: str, keep: bool) -> None:
        self._work = work
        self._before: list[tuple[Places, Elements]] | None = [] if keep else None
        self.nbytes = 0
        for destination, change in work:
            for run in change.runs():
                self.nbytes += run.values.nbytes
                if self._before is None:
                    continue
                found = destination.read(run.start, run.count, run.positions)
                if run.old is not None and not bool(((found == run.old) | (found == run.values)).all()):
                    raise InconsistentError(
                        ErrorCode.PARTS_DISAGREE,
                        f"the given state is not {label}: load it whole with `load_into`, then follow",
                        where=f"tensor {change.name[:100]!a}",
                    )
                self._before.append(_what_differs(found, run))

    def write(self) -> None:
        """Write all changes; after a failure what was there before is put back."""
        done = 0
        try:
            for destination, change in self._work:
                for run in change.runs():
                    done += 1
                    destination.write(run.start, run.count, run.positions, run.values)
        except BaseException:
            self._restore(done)
            raise

    def undo(self) -> None:
        """Put back what was there before `write`."""
        if self._before is not None:
            self._restore(len(self._before))

    def _restore(self, count: int) -> None:
        if self._before is None:
            return
        runs = ((destination, run) for destination, change in self._work for run in change.runs())
        for (destination, run), (positions, before) in zip(runs, self._before[:count], strict=False):
            destination.write(run.start, run.count, positions, before)


def _open_changed(
    state: Mapping[str, Any], specs: Mapping[str, TensorSpec], changed: Collection[str]
) -> dict[str, Destination]:
    """Open what changes, and what may share its memory; of the others only the form is looked at."""
    opened = {name: open_destination(spec, state[name]) for name, spec in specs.items() if name in changed}
    addresses = {destination.address for destination in opened.values()}
    for name, spec in specs.items():
        if name not in changed:
            form = _form(state[name])
            if form is None or form[:2] != spec[1:] or form[2] in addresses:
                opened[name] = open_destination(spec, state[name])
    return opened


def _form(tensor: Any) -> tuple[str | None, tuple[int, ...], int] | None:
    if is_torch(tensor):
        return form_of(tensor)
    if isinstance(tensor, np.ndarray):
        return numpy_dtype_name(tensor.dtype), tensor.shape, _address(tensor)
    return None


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _once(
    opened: Mapping[str, Destination], changes: Sequence[TensorChange]
) -> Iterator[tuple[str, Destination, TensorChange]]:
    """Every destination once: of several names that share their memory the first."""
    changed = {change.name: change for change in changes}
    places: dict[tuple[object, ...], str] = {}
    for name, destination in opened.items():
        first = places.setdefault(destination.place, name)
        change, other = changed.get(name), changed.get(first)
        if first == name or not _nonempty(change, other):
            if change is not None:
                yield name, destination, change
        elif change is None or other is None or not _same(change, other):
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE,
                f"shares its memory with {first[:100]!a}, whose content differs in the version; untie them",
                where=f"tensor {name[:100]!a}",
            )


def _nonempty(*changes: TensorChange | None) -> bool:
    return any(change is not None and change.changed for change in changes)


def _same(a: TensorChange, b: TensorChange) -> bool:
    """Whether two tensors get the same bits in the same places."""
    one, other = list(a.runs()), list(b.runs())
    return len(one) == len(other) and all(
        (x.start, x.count) == (y.start, y.count)
        and (x.positions is None) == (y.positions is None)
        and (x.positions is None or y.positions is None or np.array_equal(x.positions, y.positions))
        and np.array_equal(x.values, y.values)
        for x, y in zip(one, other, strict=True)
    )


def _what_differs(found: Elements, run: BlockChange) -> tuple[Places, Elements]:
    """What must be kept of elements that are about to be written: those that will not be the same."""
    if run.positions is not None:
        return run.positions, found
    different = np.flatnonzero(found != run.values)
    if different.size * (different.itemsize + found.itemsize) >= found.nbytes:
        return None, found
    return different, found[different]
