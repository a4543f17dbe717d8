"""Dtypes against SPEC's table, and the sizes of tensors."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from deltaformat.dtypes import DTYPES, get_dtype, tensor_nbytes
from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError

SPEC = Path(__file__).parent.parent / "SPEC.md"

NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}


def test_table_is_that_of_the_specification() -> None:
    """The rows of SPEC 8.1 are the rows of the module, in the same order."""
    table = SPEC.read_text("utf-8").split("<!-- dtypes -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d) \| (\w+) \|$", table, re.MULTILINE)
    assert len(rows) == 22
    assert rows == [(d.name, str(d.bits), str(d.width), d.kind) for d in DTYPES.values()]


def test_bits_are_numpys() -> None:
    for name, dtype in NUMPY.items():
        assert get_dtype(name).bits == 8 * np.dtype(dtype).itemsize
    assert set(DTYPES) - set(NUMPY) == {"F4", "F6_E2M3", "F6_E3M2"}


@pytest.mark.parametrize("name", ["F128", "bf16", "BF16 ", ""])
def test_unknown_dtype(name: str) -> None:
    """DF-DTY-01"""
    with pytest.raises(UnsupportedError) as caught:
        get_dtype(name, where="tensor 'w'")
    assert caught.value.code is ErrorCode.DTYPE_UNKNOWN
    assert caught.value.where == "tensor 'w'"


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [
        ("F32", (), 4),
        ("BF16", (0, 4), 0),
        ("BF16", (4, 0), 0),
        ("BF16", (3, 5), 30),
        ("F4", (2, 8), 8),
        ("F6_E2M3", (4,), 3),
        ("C64", (2,), 16),
        ("U8", (1,) * 32, 1),
        ("U8", (2**53 - 1,), 2**53 - 1),
        ("F4", (2**54 - 2,), 2**53 - 1),
    ],
)
def test_tensor_nbytes(name: str, shape: tuple[int, ...], nbytes: int) -> None:
    """DF-DTY-02, DF-BLK-03 (rank 0 has one element), DF-MAN-06 (its limits are allowed)."""
    assert tensor_nbytes(get_dtype(name), shape) == nbytes


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("F4", (3,)),
        ("F4", ()),
        ("F6_E3M2", (2,)),
        ("U8", (-1,)),
        ("U8", (-1, -1)),
        ("U8", (1,) * 33),
        ("U8", (2**53,)),
        ("U64", (2**40, 2**40, 2**40)),
    ],
)
def test_impossible_shapes(name: str, shape: tuple[int, ...]) -> None:
    """DF-DTY-02, DF-MAN-06"""
    with pytest.raises(MalformedError) as caught:
        tensor_nbytes(get_dtype(name), shape, where="here")
    assert caught.value.code is ErrorCode.VALUE_INVALID
    assert caught.value.where == "here"
