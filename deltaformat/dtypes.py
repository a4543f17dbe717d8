"""Dtypes and the size of a tensor (SPEC 8.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError

__all__ = ["DTYPES", "MAX_RANK", "MAX_TENSOR_BYTES", "Dtype", "get_dtype", "tensor_nbytes"]

MAX_RANK = 32
MAX_TENSOR_BYTES = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Dtype:
    """One row of the table of dtypes.

    Attributes:
        name: The name, as in safetensors.
        bits: Bits of one element; not always whole bytes.
        width: Bytes of the integers that `planes` and `sparse` see in its bytes.
        kind: `bool`, `integer`, `float` or `complex`.
    """

    name: str
    bits: int
    width: int
    kind: str


DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            Dtype("BOOL", 8, 1, "bool"),
            Dtype("F4", 4, 1, "float"),
            Dtype("F6_E2M3", 6, 1, "float"),
            Dtype("F6_E3M2", 6, 1, "float"),
            Dtype("U8", 8, 1, "integer"),
            Dtype("I8", 8, 1, "integer"),
            Dtype("F8_E5M2", 8, 1, "float"),
            Dtype("F8_E4M3", 8, 1, "float"),
            Dtype("F8_E8M0", 8, 1, "float"),
            Dtype("F8_E4M3FNUZ", 8, 1, "float"),
            Dtype("F8_E5M2FNUZ", 8, 1, "float"),
            Dtype("I16", 16, 2, "integer"),
            Dtype("U16", 16, 2, "integer"),
            Dtype("F16", 16, 2, "float"),
            Dtype("BF16", 16, 2, "float"),
            Dtype("I32", 32, 4, "integer"),
            Dtype("U32", 32, 4, "integer"),
            Dtype("F32", 32, 4, "float"),
            Dtype("C64", 64, 4, "complex"),
            Dtype("F64", 64, 8, "float"),
            Dtype("I64", 64, 8, "integer"),
            Dtype("U64", 64, 8, "integer"),
        )
    }
)


def get_dtype(name: str, *, where: str = "") -> Dtype:
    """Look a dtype up by its name.

    Args:
        name: A dtype name of SPEC 8.1.
        where: What an error should name: the tensor, for instance.

    Raises:
        UnsupportedError: The table has no such dtype (DF-DTY-01).
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise UnsupportedError(
            ErrorCode.DTYPE_UNKNOWN,
            f"dtype {name!r} is not one of {', '.join(DTYPES)}",
            where=where,
        )
    return dtype


def tensor_nbytes(dtype: Dtype, shape: Sequence[int], *, where: str = "") -> int:
    """Count the canonical bytes of a tensor; a rank 0 tensor has one element.

    Args:
        dtype: The tensor's dtype.
        shape: Its logical shape.
        where: What an error should name.

    Raises:
        MalformedError: The shape breaks DF-MAN-06, or the bits are not whole bytes (DF-DTY-02).
    """
    if len(shape) > MAX_RANK:
        raise _invalid(f"rank {len(shape)} is above {MAX_RANK}", where)
    if min(shape, default=0) < 0:
        raise _invalid(f"shape {list(shape)} has a negative dimension", where)
    bits = math.prod(shape) * dtype.bits
    if bits % 8:
        raise _invalid(f"a {dtype.name} tensor of shape {list(shape)} does not fill whole bytes", where)
    if math.prod(max(dim, 1) for dim in shape) * dtype.bits // 8 > MAX_TENSOR_BYTES:
        raise _invalid(f"a {dtype.name} tensor of shape {list(shape)} exceeds 2^53 - 1 bytes", where)
    return bits // 8


def _invalid(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.VALUE_INVALID, message, where=where)
