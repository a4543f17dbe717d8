"""torch tensors as plain bits and back; torch is imported only when a tensor is to be made.

What is passed in here has imported torch already.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any

import numpy as np

from deltaformat.errors import ErrorCode, UnsupportedError

__all__ = [
    "bytes_in_place",
    "describe",
    "form_of",
    "from_torch",
    "is_torch",
    "to_torch",
    "type_name",
    "writable_bits",
]

_TORCH: dict[str, str] = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
# Those that the oldest torch supported lacks.
_TORCH_SINCE = {"F8_E8M0": "2.7", "F4": "2.8"}


def is_torch(tensor: object) -> bool:
    """Whether it is a torch tensor; if torch is not loaded it cannot be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def type_name(value: object) -> str:
    """A type as messages name it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def to_torch(name: str, shape: tuple[int, ...], data: np.ndarray[Any, Any], device: Any) -> Any:
    """Make a tensor of bytes in this machine's order; it shares memory where it can.

    Args:
        name: The dtype's name in the format.
        shape: The logical shape.
        data: The bytes, one-dimensional.
        device: Where it is to be.

    Raises:
        UnsupportedError: There is no torch, or it lacks the dtype, or cannot have it in this shape.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            f"torch tensors need torch, which cannot be imported ({error}); pip install deltaformat[torch]",
        ) from error
    attribute = _TORCH.get(name)
    if attribute is None:
        raise UnsupportedError(ErrorCode.DTYPE_UNKNOWN, f"torch has no dtype for {name}; use get_bytes")
    dtype = getattr(torch, attribute, None)
    if dtype is None:
        raise UnsupportedError(
            ErrorCode.DTYPE_UNKNOWN,
            f"torch {torch.__version__} has no {attribute} for {name}; it came with torch "
            f"{_TORCH_SINCE.get(name, 'after 2.6')}",
        )
    if name == "F4":
        if not shape or shape[-1] % 2:
            raise UnsupportedError(
                ErrorCode.NOT_SUPPORTED,
                f"torch pairs F4 along the last axis, which shape {list(shape)} does not allow; "
                'use framework="np" or get_bytes',
            )
        shape = (*shape[:-1], shape[-1] // 2)
    if not data.size:
        return torch.empty(shape, dtype=dtype, device=device)
    # torch has no read-only tensors, and its kernels may rely on alignment, which mapped files do not give.
    if not data.flags.writeable or data.ctypes.data % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).to(device).view(dtype).reshape(shape)


@cache
def _torch_names() -> dict[Any, str]:
    torch = importlib.import_module("torch")
    return {
        getattr(torch, attribute): name for name, attribute in _TORCH.items() if hasattr(torch, attribute)
    }


def from_torch(tensor: Any) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any], int]:
    """Take a tensor's bits to the host, from whatever device and in whatever layout it is.

    Returns:
        The dtype's name in the format, the logical shape, the elements in C order as integers in this
        machine's byte order, and the bytes of one component (a C64 has two).

    Raises:
        UnsupportedError: A dtype outside SPEC 8.1, or a kind of tensor that is not plain memory.
    """
    name, shape, bits, flips = _as_integers(tensor)
    array = bits.cpu().contiguous().numpy()
    component = bits.dtype.itemsize // 2 if name == "C64" else bits.dtype.itemsize
    if any(flips):
        array = _flip_signs(array, component, flips)
    return name, shape, array, component


def bytes_in_place(tensor: Any) -> tuple[str, tuple[int, ...], Any]:
    """Take a tensor's canonical bytes where they are, on a little-endian device (SPEC 8.2).

    Returns:
        The dtype's name in the format, the logical shape, and a one-dimensional uint8 tensor on the same
        device: a view of the tensor's memory where that is contiguous, otherwise a copy.

    Raises:
        UnsupportedError: As for `from_torch`.
    """
    torch = sys.modules["torch"]
    name, shape, bits, flips = _as_integers(tensor)
    bits = bits.contiguous()
    if any(flips):
        if name == "C64":
            mask = flips[0] * (1 << 31) - flips[1] * (1 << 63)
        else:
            mask = -1 << 8 * bits.dtype.itemsize - 1 if bits.dtype != torch.uint8 else 0x80
        bits = bits ^ mask
    return name, shape, bits.reshape(-1).view(torch.uint8)


def describe(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype's name in the format and the logical shape; errors as for `from_torch`."""
    torch = sys.modules["torch"]
    _check_plain(torch, tensor)
    name = _torch_names().get(tensor.dtype)
    if name is None:
        raise UnsupportedError(
            ErrorCode.DTYPE_UNKNOWN, f"{tensor.dtype} cannot be stored: convert it to a dtype of SPEC 8.1"
        )
    shape = tuple(int(dim) for dim in tensor.shape)
    if name == "F4":
        if not shape:
            raise UnsupportedError(
                ErrorCode.NOT_SUPPORTED, "a 0-d pair of F4 has no logical shape; reshape it to (1,)"
            )
        shape = (*shape[:-1], shape[-1] * 2)
    return name, shape


def form_of(tensor: Any) -> tuple[str, tuple[int, ...], int] | None:
    """Name of the dtype in the format, shape and address of a plain tensor; None of any other."""
    torch = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    name = _torch_names().get(tensor.dtype)
    if name is None or name == "F4" or tensor.is_meta:
        return None
    return name, tuple(tensor.shape), tensor.data_ptr()


def writable_bits(tensor: Any) -> tuple[str, tuple[int, ...], Any]:
    """Take a tensor's memory, to be written: what `from_torch` reads, on its device and in its layout.

    Returns:
        The dtype's name in the format, the logical shape, and a tensor of signed integers (`uint8` for one
        byte) that shares memory with it.

    Raises:
        UnsupportedError: As for `from_torch`; or memory that cannot be written element by element.
    """
    name, shape, bits, flips = _as_integers(tensor)
    if any(flips):
        problem = (
            "a conjugated or negated view cannot be written in bits; pass the tensor that it is a view of"
        )
    elif any(step == 0 and size > 1 for step, size in zip(bits.stride(), bits.shape, strict=True)):
        problem = "an expanded tensor has several elements in one place; pass the tensor that was expanded"
    else:
        return name, shape, bits
    raise UnsupportedError(ErrorCode.NOT_SUPPORTED, problem)


def _as_integers(tensor: Any) -> tuple[str, tuple[int, ...], Any, tuple[bool, ...]]:
    """The dtype's name, the logical shape, the elements as integers in the tensor's own layout.

    And which components' signs are to be flipped: a conjugated or negated view is plain memory and a flag.
    """
    torch = sys.modules["torch"]
    name, shape = describe(tensor)
    tensor = tensor.detach()
    conjugated = tensor.is_conj()
    tensor = tensor.conj() if conjugated else tensor
    negated = tensor.is_neg()
    tensor = torch._neg_view(tensor) if negated else tensor
    flips = (negated, conjugated != negated) if name == "C64" else (negated,)
    width = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[tensor.dtype.itemsize]
    return name, shape, tensor.view(getattr(torch, width)), flips


def _flip_signs(bits: np.ndarray[Any, Any], component: int, flips: tuple[bool, ...]) -> np.ndarray[Any, Any]:
    """Flip the sign bits of those components of every element that `flips` says: what negating them does."""
    unsigned = np.dtype(f"u{component}")
    mask = np.array([flip << (8 * component - 1) for flip in flips], unsigned)
    components: np.ndarray[Any, Any] = np.ascontiguousarray(bits).reshape(-1).view(unsigned)
    flipped: np.ndarray[Any, Any] = np.bitwise_xor(components.reshape(-1, len(flips)), mask)
    return flipped


def _check_plain(torch: Any, tensor: Any) -> None:
    """Refuse tensors that are not plain elements in memory, each with what to do instead."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        if type(tensor).__name__ == "DTensor":
            problem = "a DTensor is spread over ranks; pass tensor.full_tensor()"
        elif tensor.is_nested:
            problem = "a nested tensor has no one shape; store tensor.values() and tensor.offsets()"
        else:
            problem = f"{type_name(tensor)} is not plain memory; convert it to a torch.Tensor first"
    elif torch.nn.parameter.is_lazy(tensor):
        problem = "a lazy parameter has no elements yet; run the module once first"
    elif tensor.is_nested:
        problem = "a nested tensor has no one shape; store each of tensor.unbind()"
    elif tensor.is_quantized:
        problem = "a quantised tensor is codes and scales; store tensor.int_repr() and the scales as tensors"
    elif tensor.is_meta:
        problem = "a meta tensor has no elements; load the weights first"
    elif tensor.layout == torch.strided and _lacks_storage(tensor):
        problem = "its storage was freed or resized away (FSDP does so); gather the parameter first"
    elif tensor.layout != torch.strided:
        problem = f"layout {tensor.layout} is not dense; pass its indices and values, or tensor.to_dense()"
    else:
        return
    raise UnsupportedError(ErrorCode.NOT_SUPPORTED, problem)


def _lacks_storage(tensor: Any) -> bool:
    """Whether a view reaches beyond the memory it is of: reading it would read somebody else's."""
    if not tensor.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    reach = (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
    return bool(reach > tensor.untyped_storage().nbytes())
