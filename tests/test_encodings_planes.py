"""`planes` and `planes-delta` against bytes written by hand and against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference_codec as reference
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.blocks import Bytes
from deltaformat.encodings import decode_piece, encode_planes, encode_planes_delta
from deltaformat.encodings.planes import join_planes, split_planes
from deltaformat.errors import MalformedError, UnsupportedError

WIDTHS = [1, 2, 4, 8]


def array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def decode(encoding: int, payload: bytes, base: bytes) -> bytes:
    out = array(base).copy()
    decode_piece(encoding, payload, out)
    return out.tobytes()


VECTORS = {
    # encoding, payload, base, block
    "w 1": (1, "00 00 010203", "000000", "010203"),
    "w 2": (1, "01 00 010203 00 040506", "000000000000", "010402050306"),
    "w 2, one plane constant": (1, "01 00 010203 01 ff", "000000000000", "01ff02ff03ff"),
    "w 4": (1, "02 01 11 01 22 01 33 01 44", "0000000000000000", "1122334411223344"),
    "w 8": (1, "03 0001 0002 0003 0004 0005 0006 0007 0008", "00" * 8, "0102030405060708"),
    "delta, w 1, wraps": (2, "00 00 01ff80", "ff0080", "00ff00"),
    # 0x00ff + 0x0001 = 0x0100, 0x0000 + 0xffff = 0xffff, 0x8000 + 0x8000 = 0x0000
    "delta, w 2, carries": (2, "01 00 01ff00 00 00ff80", "ff0000000080", "0001ffff0000"),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    """SPEC 9.2"""
    encoding, *texts = VECTORS[name]
    payload, base, block = map(bytes.fromhex, texts)
    assert decode(encoding, payload, base) == block
    assert reference.decode(encoding, payload, base) == block
    width = [1, 2, 4, 8][payload[0]]
    encoded = (
        encode_planes_delta(array(block), array(base), width)
        if encoding == 2
        else encode_planes(array(block), width)
    )
    # A plane of equal bytes is shorter as a constant; everything else is written as here.
    assert len(encoded) <= len(payload)
    if name in ("w 1", "w 2", "w 2, one plane constant", "w 4", "delta, w 1, wraps", "delta, w 2, carries"):
        assert encoded == payload


@st.composite
def blocks(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    width = draw(st.sampled_from(WIDTHS))
    n = draw(st.integers(1, 60))
    alphabet = draw(st.sampled_from([[0], [0, 1], [0, 127, 128, 255], list(range(256))]))
    block = st.lists(st.sampled_from(alphabet), min_size=n * width, max_size=n * width).map(bytes)
    return draw(block), draw(block), width


@given(blocks(), st.sampled_from(["stored", "constant", "zstd", "smallest"]))
def test_agreement_with_the_reference(case: tuple[bytes, bytes, int], form: str) -> None:
    new, base, width = case
    ours = encode_planes(array(new), width)
    assert reference.decode_planes(ours, len(new)) == new
    assert decode(1, reference.encode_planes(new, width, form), base) == new
    ours = encode_planes_delta(array(new), array(base), width)
    assert reference.decode_planes_delta(ours, base) == new
    assert decode(2, reference.encode_planes_delta(new, base, width, form), base) == new


@given(st.binary(min_size=1, max_size=40), st.sampled_from(WIDTHS))
def test_odd_lengths_fall_back_to_bytes(block: bytes, width: int) -> None:
    """DF-ENC-07"""
    payload = encode_planes(array(block), width)
    assert payload[0] == ([1, 2, 4, 8].index(width) if len(block) % width == 0 else 0)
    assert decode(1, payload, bytes(len(block))) == block
    payload = encode_planes_delta(array(block), array(block[::-1]), width)
    assert decode(2, payload, block[::-1]) == block


@pytest.mark.parametrize("encoding", [1, 2])
def test_rules(encoding: int) -> None:
    for header in range(4, 256):
        with pytest.raises(UnsupportedError):  # DF-ENC-06
            decode(encoding, bytes([header]) + bytes.fromhex("00 010203"), bytes(3))
    with pytest.raises(MalformedError, match="do not fill"):  # DF-ENC-07
        decode(encoding, bytes.fromhex("01 00 01 00 01"), bytes(3))
    for payload in ("", "00", "00 00 0102", "00 00 01020304", "01 00 01", "00 00 010203 00"):
        with pytest.raises(MalformedError):  # DF-ENC-05
            decode(encoding, bytes.fromhex(payload), bytes(3))


@pytest.mark.parametrize("width", WIDTHS)
def test_planes_split_and_join(width: int) -> None:
    elements = np.random.default_rng(0).integers(0, 256, 100 * width, np.uint8).view(f"<u{width}")
    planes = split_planes(elements)
    assert planes == [elements.view(np.uint8)[j::width].tobytes() for j in range(width)]
    joined = np.empty_like(elements)
    join_planes([array(plane) for plane in planes], joined)
    assert np.array_equal(joined, elements)


def test_realistic_block_shrinks() -> None:
    """bf16 weights: the exponents' entropy is about 2.7 bits, the rest is noise."""
    weights = np.random.default_rng(0).normal(0, 0.02, 1 << 19).astype(np.float32)
    block = (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    assert len(encode_planes(block, 2)) < 0.68 * block.size
