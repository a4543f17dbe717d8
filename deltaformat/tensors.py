"""Tensors of NumPy and torch to canonical bytes and back, bit for bit (SPEC 8).

Everything goes through integer views: no float is compared, cast or computed with (DF-DTY-03). torch is
imported only when a torch tensor is asked for; one that is passed in has imported it already.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from deltaformat.blocks import name_bytes
from deltaformat.dtypes import DTYPES, get_dtype, tensor_nbytes
from deltaformat.errors import DeltaFormatError, ErrorCode, MalformedError, UnsupportedError
from deltaformat.torchtensors import from_torch, is_torch, to_torch, type_name

__all__ = [
    "Framework",
    "HostTensor",
    "TensorBytes",
    "TensorSpec",
    "check_name",
    "from_host",
    "numpy_dtype_name",
    "snapshot",
    "to_host",
]

Framework = Literal["np", "pt"]
ByteArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]

_SHOWN_NAME = 100

_NUMPY: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I16": np.dtype("i2"),
    "U16": np.dtype("u2"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("i4"),
    "U32": np.dtype("u4"),
    "F32": np.dtype("f4"),
    "C64": np.dtype("c8"),
    "F64": np.dtype("f8"),
    "I64": np.dtype("i8"),
    "U64": np.dtype("u8"),
}
# `long` and `long long` are two NumPy types of one size, so plain numbers are told by kind and size.
_PLAIN = {(d.kind, d.itemsize): name for name, d in _NUMPY.items() if d.isbuiltin == 1}
_EXTENDED = {d.type: name for name, d in _NUMPY.items() if d.isbuiltin != 1}

_NO_NUMPY_DTYPE = {
    "O": "it holds Python objects; make a numeric array of it",
    "U": "text is no tensor; store it as a sidecar file, or encode it to uint8",
    "S": "text is no tensor; store it as a sidecar file, or pass array.view(numpy.uint8)",
    "T": "text is no tensor; store it as a sidecar file, or encode it to uint8",
    "M": "pass array.view(numpy.int64)",
    "m": "pass array.view(numpy.int64)",
    "V": "store each field as a tensor of its own, or pass array.view(numpy.uint8)",
    "f": "no dtype of the format is that wide; convert it to float64 where the loss of bits is acceptable",
    "c": "no dtype of the format is that wide; store its real and imaginary parts as two tensors",
}


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """A tensor's dtype, logical shape and canonical bytes (DF-BLK-01) in host memory.

    Attributes:
        dtype: A dtype name of SPEC 8.1.
        shape: The logical shape.
        data: The bytes, one-dimensional and contiguous; often a view of memory that belongs to someone else.
    """

    dtype: str
    shape: tuple[int, ...]
    data: ByteArray

    def __post_init__(self) -> None:
        expected = tensor_nbytes(get_dtype(self.dtype), self.shape)
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise MalformedError(
                ErrorCode.INPUT_INVALID, "data must be a contiguous one-dimensional uint8 array"
            )
        if self.data.size != expected:
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                f"{self.dtype} of shape {list(self.shape)} has {expected} bytes, not {self.data.size}",
            )

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.data.size


class TensorSpec(NamedTuple):
    """What is known of a tensor without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TensorBytes:
    """A tensor given by its canonical bytes, for dtypes that no framework here has.

    Attributes:
        dtype: A dtype name of SPEC 8.1.
        shape: The logical shape, in elements (also where several elements share a byte).
        data: The bytes, as a safetensors file would hold them: any contiguous buffer.
    """

    dtype: str
    shape: Sequence[int]
    data: bytes | bytearray | memoryview | np.ndarray[Any, Any]


def check_name(name: object) -> str:
    """Return `name` if it can name a tensor (DF-BLK-03), as it is.

    Raises:
        MalformedError: It is not a string, not encodable in UTF-8, or too long.
    """
    if not isinstance(name, str):
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"a tensor's name must be a string, not {type(name).__name__}",
            where=_where(name),
        )
    name_bytes(name)
    return name


def to_host(name: str, tensor: object) -> HostTensor:
    """Take a tensor's bits, from wherever it is.

    The result shares memory with `tensor` where that is contiguous, little-endian and on the host; its data
    is read-only. `snapshot` makes it independent.

    Args:
        name: The tensor's name: checked, and named in errors.
        tensor: A NumPy array or scalar, a torch tensor on any device, a `TensorBytes` or a `HostTensor`.

    Raises:
        UnsupportedError: A dtype outside SPEC 8.1, or a kind of tensor that is not plain bytes in memory.
        MalformedError: Not a tensor, a name that cannot be one, or bytes that do not fit dtype and shape.
    """
    check_name(name)
    try:
        if isinstance(tensor, HostTensor):
            return tensor
        if isinstance(tensor, TensorBytes):
            return _from_bytes(tensor)
        if isinstance(tensor, np.ndarray | np.generic):
            return _from_numpy(tensor)
        if is_torch(tensor):
            dtype, shape, bits, component = from_torch(tensor)
            return HostTensor(dtype, shape, _little_endian(bits, component, sys.byteorder == "big"))
    except DeltaFormatError as error:
        raise type(error)(error.code, error.message, where=_where(name)) from error.__cause__
    raise MalformedError(
        ErrorCode.INPUT_INVALID,
        f"{type_name(tensor)} is no tensor; pass a NumPy array, a torch tensor or TensorBytes",
        where=_where(name),
    )


def snapshot(host: HostTensor) -> HostTensor:
    """Return the same tensor in memory of its own, which nobody else writes."""
    return HostTensor(host.dtype, host.shape, host.data.copy())


def from_host(host: HostTensor, framework: Framework = "np", device: Any = "cpu") -> Any:
    """Return a framework's tensor with the same bits.

    It shares memory with `host` where it can: on the host, and for torch if the data is writable and aligned.
    NumPy gets `F4` one element a byte, torch two (so its last dimension is half as long).

    Args:
        host: The tensor.
        framework: "np" or "pt".
        device: Where to put a torch tensor; NumPy has only "cpu".

    Raises:
        UnsupportedError: The framework is unknown or not installed, or lacks the dtype.
    """
    if framework == "np":
        if str(device) != "cpu":
            raise UnsupportedError(
                ErrorCode.NOT_SUPPORTED, f'NumPy arrays are on the host, not on {device}; use framework="pt"'
            )
        return _to_numpy(host)
    if framework == "pt":
        return to_torch(host.dtype, host.shape, _native(host.data, host.dtype), device)
    raise UnsupportedError(ErrorCode.NOT_SUPPORTED, f'unknown framework {framework!r}; use "np" or "pt"')


def check_framework(framework: object) -> None:
    """Refuse what `from_host` does not know.

    Raises:
        UnsupportedError: not-supported.
    """
    if framework not in ("np", "pt"):
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED, f'unknown framework {framework!r}; use "np" or "pt"', where="framework"
        )


def _where(name: object) -> str:
    shown = repr(name)
    return f"tensor {shown if len(shown) <= _SHOWN_NAME else shown[:_SHOWN_NAME] + '...'}"


def _read_only(data: ByteArray) -> ByteArray:
    view = data.view()
    view.flags.writeable = False
    return view


def _little_endian(bits: np.ndarray[Any, Any], component: int, big: bool) -> ByteArray:
    """Lay elements out in C order, their components (a C64 has two) least significant byte first."""
    data = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    if big and component > 1:
        data = data.view(f">u{component}").astype(f"<u{component}").view(np.uint8)
    return _read_only(data)


def _from_bytes(tensor: TensorBytes) -> HostTensor:
    try:
        shape = tuple(operator.index(dim) for dim in tensor.shape)
    except TypeError:
        raise MalformedError(ErrorCode.INPUT_INVALID, f"{tensor.shape!r} is no shape") from None
    try:
        if isinstance(tensor.data, np.ndarray):
            if not tensor.data.flags.c_contiguous:
                raise BufferError("not contiguous")
            data = tensor.data.reshape(-1).view(np.uint8)
        else:
            data = np.frombuffer(memoryview(tensor.data).cast("B"), np.uint8)
    except (BufferError, TypeError, ValueError) as error:
        raise MalformedError(
            ErrorCode.INPUT_INVALID, f"data must be a contiguous buffer of bytes: {error}"
        ) from None
    return HostTensor(get_dtype(tensor.dtype).name, shape, _read_only(data))


def _from_numpy(tensor: np.ndarray[Any, Any] | np.generic) -> HostTensor:
    if isinstance(tensor, np.ma.MaskedArray):
        raise UnsupportedError(ErrorCode.NOT_SUPPORTED, "a masked array; pass its .data, or .filled(value)")
    array = np.asarray(tensor)
    dtype = array.dtype
    name = numpy_dtype_name(dtype)
    if name is None:
        raise _no_numpy_dtype(dtype)
    shape = tuple(int(dim) for dim in array.shape)
    if name == "F4":
        return HostTensor(name, shape, _pack_nibbles(array.view(np.uint8), shape))
    big = dtype.byteorder == ">" or (dtype.byteorder != "<" and sys.byteorder == "big")
    component = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return HostTensor(name, shape, _little_endian(array.view(f"=u{dtype.itemsize}"), component, big))


def numpy_dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The name of a NumPy dtype in the format, whatever its byte order; None if it has none."""
    return _EXTENDED.get(dtype.type) if dtype.isbuiltin == 2 else _PLAIN.get((dtype.kind, dtype.itemsize))


def _no_numpy_dtype(dtype: np.dtype[Any]) -> UnsupportedError:
    if dtype.type in (ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn):
        advice = "how its elements share bytes is the file's to say; pass TensorBytes with the packed bytes"
    elif dtype.isbuiltin == 2:
        advice = "safetensors has no such dtype; pass array.view(numpy.uint8)"
    else:
        advice = _NO_NUMPY_DTYPE.get(dtype.kind, "convert it to one of SPEC 8.1")
    return UnsupportedError(ErrorCode.DTYPE_UNKNOWN, f"NumPy dtype {dtype} cannot be stored: {advice}")


def _pack_nibbles(codes: np.ndarray[Any, np.dtype[np.uint8]], shape: tuple[int, ...]) -> ByteArray:
    """Pack 4-bit codes two a byte, the first in the low half; what else an unpacked byte has is ignored."""
    flat = np.ascontiguousarray(codes).reshape(-1)
    if flat.size % 2:
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"F4 of shape {list(shape)} does not fill whole bytes; pad it to an even number of elements",
        )
    packed = np.left_shift(flat[1::2], 4, dtype=np.uint8)
    packed |= flat[0::2] & 0x0F
    return packed


def _unpack_nibbles(data: ByteArray) -> ByteArray:
    codes = np.empty(data.size * 2, np.uint8)
    codes[0::2] = data & 0x0F
    codes[1::2] = data >> 4
    return codes


def _native(data: ByteArray, name: str) -> ByteArray:
    """From little-endian to this machine's order."""
    component = 4 if name == "C64" else DTYPES[name].bits // 8
    if sys.byteorder == "big" and component > 1:
        return data.view(f"<u{component}").astype(f"=u{component}").view(np.uint8)
    return data


def _to_numpy(host: HostTensor) -> np.ndarray[Any, Any]:
    dtype = _NUMPY.get(host.dtype)
    if dtype is None:
        raise UnsupportedError(ErrorCode.DTYPE_UNKNOWN, f"NumPy has no dtype for {host.dtype}; use get_bytes")
    data = _unpack_nibbles(host.data) if host.dtype == "F4" else _native(host.data, host.dtype)
    return data.view(dtype).reshape(host.shape)
