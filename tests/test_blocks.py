"""Block arithmetic and names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.blocks import (
    DEFAULT_BLOCK_BYTES,
    block_count,
    block_lengths,
    block_range,
    byte_view,
    check_block_bytes,
    name_bytes,
)
from deltaformat.errors import ErrorCode, MalformedError


def test_block_sizes() -> None:
    """DF-DSC-01"""
    allowed = [2**exponent for exponent in range(8, 27)]
    for block_bytes in allowed:
        check_block_bytes(block_bytes)
    assert DEFAULT_BLOCK_BYTES == 1048576
    neighbours = [size + step for size in allowed for step in (-1, 1)]
    for block_bytes in (-256, 0, 1, 2, 128, 2**27, 2**60, *neighbours):
        with pytest.raises(MalformedError, match="power of two") as caught:
            check_block_bytes(block_bytes, where="deltaformat.json")
        assert caught.value.code is ErrorCode.VALUE_INVALID
        assert caught.value.where == "deltaformat.json"


@given(st.integers(0, 5000), st.sampled_from([256, 512, 1024]))
def test_blocks_cover_a_tensor(nbytes: int, block_bytes: int) -> None:
    """DF-BLK-02"""
    ranges = [block_range(i, nbytes, block_bytes) for i in range(block_count(nbytes, block_bytes))]
    assert [byte for start, stop in ranges for byte in range(start, stop)] == list(range(nbytes))
    assert all(stop - start == block_bytes for start, stop in ranges[:-1])
    assert block_lengths(nbytes, block_bytes).tolist() == [stop - start for start, stop in ranges]
    for index in (-1, len(ranges)):
        with pytest.raises(IndexError):
            block_range(index, nbytes, block_bytes)


def test_byte_views() -> None:
    words = np.arange(3, dtype=np.uint16)
    for data in (words.tobytes(), bytearray(words.tobytes()), memoryview(words), words.view(np.uint8)):
        view = byte_view(data)
        assert (view.format, view.nbytes, view.tobytes()) == ("B", 6, words.tobytes())
    assert byte_view(b"").nbytes == byte_view(np.empty(0, np.uint8)).nbytes == 0


def test_names() -> None:
    """DF-BLK-03"""
    assert name_bytes("") == b""
    assert name_bytes("../a\0b") == b"../a\0b"
    assert name_bytes("e\u0301") != name_bytes("\u00e9")  # never normalised
    assert name_bytes("\U0001f600") == b"\xf0\x9f\x98\x80"
    assert len(name_bytes("\u00e9" * 32767 + "x")) == 65535
    for name in ("\u00e9" * 32768, "\ud800", "a\udcffb"):
        with pytest.raises(MalformedError) as caught:
            name_bytes(name, where="here")
        assert caught.value.code is ErrorCode.VALUE_INVALID
        str(caught.value).encode()  # an error's text can be printed
