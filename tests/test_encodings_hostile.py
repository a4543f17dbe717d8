"""Payloads that were damaged or made up: nothing but `DeltaFormatError` comes out, and SPEC decides when."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import reference_codec as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaformat.encodings import decode_piece, encode_planes, encode_planes_delta, encode_sparse
from deltaformat.encodings.streams import write_varint
from deltaformat.errors import DeltaFormatError, MalformedError

pytestmark = pytest.mark.usefixtures("engine")


def agree(encoding: int, payload: bytes, base: bytes, *, one_fault: bool = True) -> bool:
    """Decode twice; tell whether both accepted, and fail where they differ.

    A payload with several faults may be refused for any of them.
    """
    out = np.frombuffer(base, np.uint8).copy()
    ours: str | bytes
    theirs: str | bytes
    try:
        decode_piece(encoding, payload, out)
        ours = out.tobytes()
    except DeltaFormatError as error:
        ours = error.error_class
        assert encoding != 3 or out.tobytes() == base  # DF-ENC-17
    try:
        theirs = reference.decode(encoding, payload, base)
    except reference.RejectedError as error:
        theirs = error.error_class
    refused = isinstance(ours, str) and isinstance(theirs, str)
    assert ours == theirs or (refused and not one_fault), payload.hex()
    return isinstance(ours, bytes)


def samples() -> dict[str, tuple[int, bytes, bytes]]:
    """Return payloads that hold every form of stream: encoding, payload, base."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**16, 400, np.uint16)
    base[::3] &= np.uint16(0x80FF)
    new = base.copy()
    new[rng.choice(400, 60, replace=False)] += np.uint16(1)
    new[rng.choice(400, 8, replace=False)] -= np.uint16(300)
    smooth = (rng.normal(0, 6, 300)).astype(np.int8).view(np.uint8)
    new8, base8 = new.view(np.uint8), base.view(np.uint8)
    return {
        "planes": (1, encode_planes(smooth, 2), bytes(300)),
        "planes-delta": (2, encode_planes_delta(new8, base8, 4), base8.tobytes()),
        "sparse": (3, encode_sparse(new8, base8, 2), base8.tobytes()),
        "sparse, strata": (3, encode_sparse(new8, base8, 2, thresholds=[0x7000, 0x100]), base8.tobytes()),
        "sparse, w 8": (3, encode_sparse(new8, base8, 8), base8.tobytes()),
        "sparse, zstd": (
            3,
            reference.encode_sparse(bytes(new8), bytes(base8), 2, form="zstd"),
            base8.tobytes(),
        ),
    }


SAMPLES = samples()


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_valid(name: str) -> None:
    assert agree(*SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_truncation_at_every_byte(name: str) -> None:
    """DF-ENC-05: nothing shorter is accepted, and nothing longer."""
    encoding, payload, base = SAMPLES[name]
    for end in range(len(payload)):
        assert not agree(encoding, payload[:end], base)
    for extra in (b"\x00", b"\xff", payload):
        assert not agree(encoding, payload + extra, base)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_bit_flipped(name: str) -> None:
    encoding, payload, base = SAMPLES[name]
    accepted = 0
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        accepted += agree(encoding, bytes(flipped), base)
    assert accepted < 8 * len(payload)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_byte_replaced_removed_or_doubled(name: str) -> None:
    encoding, payload, base = SAMPLES[name]
    for place in range(len(payload)):
        for middle in (b"", b"\x00", b"\x7f", b"\x80", b"\xff", payload[place : place + 1] * 2):
            agree(encoding, payload[:place] + middle + payload[place + 1 :], base, one_fault=False)


@pytest.mark.parametrize("name", SAMPLES)
def test_other_bases(name: str) -> None:
    """A payload that is applied to a block that it was not made for."""
    _, payload, base = SAMPLES[name]
    for encoding in range(4):
        for other in (bytes(len(base)), base[::-1], base[:-1], base[:16], base + base, b"\x01"):
            agree(encoding, payload, other, one_fault=False)


@settings(max_examples=300)
@given(st.integers(0, 3), st.binary(max_size=40), st.binary(min_size=1, max_size=24))
def test_made_up_payloads(encoding: int, payload: bytes, base: bytes) -> None:
    agree(encoding, payload, base, one_fault=False)


@st.composite
def plausible(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw a `sparse` payload whose parts are of the right size and have any content."""
    width, thresholds = draw(st.sampled_from([1, 2])), draw(st.integers(0, 2))
    n = draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(0, 3), min_size=thresholds + 1, max_size=thresholds + 1))
    ks = [draw(st.integers(0, 4)) for count in counts if count]
    total, used = sum(counts), [count for count in counts if count]
    quotients = draw(
        st.lists(st.sampled_from([0, 0, 0, 1, 2, 255]), min_size=total, max_size=total).map(bytes)
    )
    sizes = [
        4 * quotients.count(255),
        sum(-(-count * k // 8) for count, k in zip(used, ks, strict=True)),
        -(-total // 8),
        *[total] * width,
    ]
    streams = [quotients, *[draw(st.binary(min_size=size, max_size=size)) for size in sizes]]
    limits = sorted(
        draw(st.lists(st.integers(0, 2 ** (8 * width) - 1), min_size=thresholds, max_size=thresholds))
    )
    header = bytes([width - 1 + 4 * thresholds]) + reference.block_of(limits[::-1], width)
    body = b"".join(map(write_varint, counts)) + bytes(ks) + b"".join(map(reference.stream, streams))
    return header + body, draw(st.binary(min_size=n * width, max_size=n * width))


@settings(max_examples=300)
@given(plausible())
def test_plausible_payloads(case: tuple[bytes, bytes]) -> None:
    payload, base = case
    agree(3, payload, base, one_fault=False)


def test_memory_follows_the_block_not_the_claims() -> None:
    """Counts and sizes in a payload of a few bytes buy no memory (DF-LIM-02)."""
    base = np.zeros(256, np.uint8)
    huge = write_varint(2**32 - 1)
    payloads = [
        (1, b"\x00" + huge + b"\x28\xb5\x2f\xfd"),
        (1, bytes.fromhex("00 0e 28b52ffd e0 0000000001000000 030000")),
        (3, b"\x00" + huge + b"\x00\x01\x00\x01\x00\x01\x00\x01\x00"),
        (3, b"\x00\x80\x02\x1a\x01\xff\x01\xff\x01\xff\x01\xff\x01\xff"),
        (3, b"\x3c" + bytes(range(15, 0, -1)) + huge * 16),
    ]
    tracemalloc.start()
    try:
        for encoding, payload in payloads:
            with pytest.raises(MalformedError):
                decode_piece(encoding, payload, base)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
