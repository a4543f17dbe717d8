"""Choosing an encoding, choosing thresholds, and the codes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import reference_codec as reference
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.blocks import Bytes
from deltaformat.dtypes import DTYPES, get_dtype
from deltaformat.encodings import (
    Encoding,
    changed_positions,
    choose_thresholds,
    decode_piece,
    encode_block,
    encode_sparse,
    native,
)
from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError

pytestmark = pytest.mark.usefixtures("engine")

SPEC = Path(__file__).parent.parent / "SPEC.md"
BF16 = get_dtype("BF16")


def decode(encoding: int, payload: bytes, base: Bytes | None, size: int) -> Bytes:
    out = np.full(size, 0xA5, np.uint8) if base is None else base.copy()
    decode_piece(encoding, payload, out)
    return out


def step(n: int = 1 << 17, scale: float = 1.6e-7, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Return bf16 weights after and before an update of fp32 masters."""
    rng = np.random.default_rng(seed)
    master = rng.normal(0, 0.02, n).astype(np.float32)
    update = (scale * rng.normal(0, 1, n)).astype(np.float32)
    before, after = (
        (w.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for w in (master, master + update)
    )
    return after, before


def test_codes_are_those_of_the_specification() -> None:
    """SPEC 9, and DF-ENC-02: which of them need a base."""
    table = SPEC.read_text("utf-8").split("<!-- encodings -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| (\d+) \| `([\w-]+)` \| (none|needed) \|", table, re.MULTILINE)
    assert rows == [
        (str(int(e)), e.name.lower().replace("_", "-"), "needed" if e.needs_base else "none")
        for e in Encoding
    ]


@pytest.mark.parametrize("code", [-1, 4, 255])
def test_unknown_code(code: int) -> None:
    """DF-ENC-03"""
    with pytest.raises(UnsupportedError) as caught:
        decode_piece(code, b"\x00" * 4, np.zeros(4, np.uint8))
    assert caught.value.code is ErrorCode.ENCODING_UNKNOWN


def test_raw() -> None:
    """DF-ENC-04"""
    assert decode(0, b"\x01\x02\x03", None, 3).tolist() == [1, 2, 3]
    for payload in (b"", b"\x01\x02", b"\x01\x02\x03\x04"):
        with pytest.raises(MalformedError) as caught:
            decode(0, payload, None, 3)
        assert caught.value.code is ErrorCode.PAYLOAD_INVALID


def test_a_step_is_sparse() -> None:
    after, before = step()
    changed = changed_positions(after, before, 2).size
    encoding, plain = encode_block(after, before, BF16, strata=False)
    assert encoding is Encoding.SPARSE
    assert len(plain) < 1.5 * changed
    positions = changed_positions(after, before, 2)
    assert encode_block(after, before, BF16, positions=positions, strata=False) == (encoding, plain)
    encoding, strata = encode_block(after, before, BF16, strata=True)
    assert encoding is Encoding.SPARSE
    assert len(strata) < 0.85 * len(plain)
    # By default strata where they cost little time.
    by_default = encode_block(after, before, BF16)[1]
    assert by_default == (plain if native.kernels is None else strata)
    for payload in (plain, strata):
        assert np.array_equal(decode(3, payload, before, after.size), after)


def test_strata_never_cost_anything() -> None:
    for seed in range(40):
        after, before = step(1 << 12, 1e-6, seed)
        plain, strata = (encode_block(after, before, BF16, strata=strata)[1] for strata in (False, True))
        assert len(strata) <= len(plain)
        assert np.array_equal(decode(3, strata, before, after.size), after)


def test_a_block_alone_is_planes() -> None:
    after, _ = step()
    encoding, payload = encode_block(after, None, BF16)
    assert encoding is Encoding.PLANES
    assert len(payload) < 0.69 * after.size
    assert np.array_equal(decode(1, payload, None, after.size), after)


def test_noise_is_raw() -> None:
    rng = np.random.default_rng(0)
    noise, base = rng.integers(0, 256, (2, 4096), np.uint8)
    for given_base in (None, base):
        encoding, payload = encode_block(noise, given_base, BF16)
        assert encoding is Encoding.RAW
        assert payload == noise.tobytes()


def test_an_equal_block_is_a_difference_of_nothing() -> None:
    after, _ = step(1000)
    encoding, payload = encode_block(after, after.copy(), BF16)
    assert encoding is Encoding.PLANES_DELTA
    assert payload == bytes.fromhex("01 0100 0100")
    assert np.array_equal(decode(encoding, payload, after, after.size), after)


def test_all_the_same_difference() -> None:
    base = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    encoding, payload = encode_block(base + np.uint8(1), base, get_dtype("U8"))
    assert encoding is Encoding.PLANES_DELTA
    assert payload == bytes.fromhex("00 0101")


def test_a_block_unlike_its_base_stands_alone() -> None:
    after, _ = step(4096)
    base = np.random.default_rng(1).integers(0, 256, after.size, np.uint8)
    assert encode_block(after, base, BF16)[0] is Encoding.PLANES
    assert encode_block(np.zeros_like(base), base, BF16)[0] is Encoding.PLANES


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes | None]:
    size = draw(st.integers(1, 300))
    alphabet = draw(st.sampled_from([[0], [0, 1], list(range(256))]))
    block = st.lists(st.sampled_from(alphabet), min_size=size, max_size=size).map(bytes)
    new = draw(block)
    kind = draw(st.sampled_from(["none", "equal", "near", "other"]))
    if kind == "none":
        return new, None
    if kind == "other":
        return new, draw(block)
    base = bytearray(new)
    for place in draw(st.sets(st.integers(0, size - 1), max_size=size // 20)) if kind == "near" else ():
        base[place] ^= draw(st.integers(1, 255))
    return new, bytes(base)


@given(pairs(), st.sampled_from(sorted(DTYPES)), st.booleans())
def test_any_block_of_any_dtype(pair: tuple[bytes, bytes | None], name: str, strata: bool) -> None:
    """Never larger than raw; DF-ENC-07: any length; DF-DTY-03: bits come back as they were."""
    new, base = (None if data is None else np.frombuffer(data, np.uint8) for data in pair)
    assert new is not None
    encoding, payload = encode_block(new, base, get_dtype(name), strata=strata)
    assert len(payload) <= new.size
    assert base is not None or not encoding.needs_base
    assert decode(encoding, payload, base, new.size).tobytes() == new.tobytes()
    zeros = bytes(new.size)
    assert reference.decode(encoding, payload, zeros if base is None else base.tobytes()) == new.tobytes()


def test_thresholds_follow_the_rate_of_change() -> None:
    after, before = step()
    positions = changed_positions(after, before, 2)
    thresholds = choose_thresholds(before, positions, 2, "float")
    assert 1 <= len(thresholds) <= 15
    assert thresholds[0] <= 0x7FFF
    assert list(thresholds) == sorted(set(thresholds), reverse=True)
    assert thresholds[-1] >= 1
    # They make the payload smaller, which is all that they are for.
    gain = len(encode_sparse(after, before, 2)) / len(encode_sparse(after, before, 2, positions, thresholds))
    assert gain > 1.2


def test_no_thresholds_where_they_cannot_pay() -> None:
    after, before = step()
    positions = changed_positions(after, before, 2)
    for kind in ("integer", "bool", "complex"):
        assert choose_thresholds(before, positions, 2, kind) == ()
    assert choose_thresholds(before, positions[:20], 2, "float") == ()
    # Changes that do not depend on the magnitude.
    anywhere = np.arange(0, before.size // 2, 50)
    assert choose_thresholds(before, anywhere, 2, "float") == ()
    # Every element has the same magnitude: zero, then another.
    for value in (0, 0x3C00):
        flat = np.full(10_000, value, np.uint16).view(np.uint8)
        assert choose_thresholds(flat, np.arange(0, 10_000, 10), 2, "float") == ()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]), st.integers(1, 300))
def test_thresholds_are_valid(seed: int, width: int, values: int) -> None:
    """DF-ENC-10: whatever the magnitudes, also with few and with extreme ones."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 256, values * width, np.uint8).view(f"<u{width}")
    base = np.ascontiguousarray(rng.choice(kinds, 4000)).view(np.uint8)
    positions = np.flatnonzero(rng.random(4000) < rng.random(4000) ** 3)
    thresholds = choose_thresholds(base, positions, width, "float")
    new = base.copy()
    new.view(f"<u{width}")[positions] += np.array(1, f"<u{width}")
    payload = encode_sparse(new, base, width, thresholds=thresholds)
    assert np.array_equal(decode(3, payload, base, base.size), new)
