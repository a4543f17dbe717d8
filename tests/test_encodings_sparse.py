"""`sparse` against bytes written by hand and against the reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import reference_codec as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaformat.blocks import Bytes
from deltaformat.encodings import changed_positions, decode_piece, encode_sparse, parse_sparse
from deltaformat.errors import DeltaFormatError, ErrorCode, MalformedError, UnsupportedError

pytestmark = pytest.mark.usefixtures("engine")

WIDTHS = [1, 2, 4, 8]


def array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def decode(payload: bytes, base: bytes) -> bytes:
    out = array(base).copy()
    decode_piece(3, payload, out)
    return out.tobytes()


# Each part of a payload on its own, so that a test can replace one.
PLAIN = {
    # w = 2, n = 8, all zero; element 1 becomes 1, element 6 becomes -3.
    "header": "01",
    "thresholds": "",
    "counts": "02",
    "ks": "01",
    "quotients": "00 0002",  # gaps 1 and 6 - 1 - 1 = 4; k = 1
    "escapes": "",
    "lows": "00 01",  # 1 and 0
    "signs": "00 02",
    "plane 0": "00 0002",  # |d| - 1
    "plane 1": "01 00",
}
PLAIN_BASE, PLAIN_NEW = "0000" * 8, "0000 0100 0000 0000 0000 0000 fdff 0000"

STRATA = {
    # w = 1, n = 8, threshold 5. Magnitudes 10 01 05 40 02 7f 03 10: elements 1, 4 and 6 are in S_1, and
    # element 2, whose magnitude is the threshold, is not. Elements 2 (rank 1 in stratum 0), 7 (rank 4) and 6
    # (rank 2 in stratum 1) change: by +1, -16 and -4.
    "header": "04",
    "thresholds": "05",
    "counts": "02 01",
    "ks": "00 01",
    "quotients": "00 010201",  # gaps 1 and 4 - 1 - 1 = 2; gap 2 with k = 1
    "escapes": "",
    "lows": "00 00",
    "signs": "00 06",
    "plane 0": "00 000f03",
}
STRATA_BASE, STRATA_NEW = "1081054002 7f 03 90", "1081064002 7f ff 80"


def build(parts: dict[str, str], **changes: str) -> bytes:
    return bytes.fromhex(
        "".join((parts | {name.replace("_", " "): text for name, text in changes.items()}).values())
    )


VECTORS = {
    "plain": (build(PLAIN), PLAIN_BASE, PLAIN_NEW),
    "strata": (build(STRATA), STRATA_BASE, STRATA_NEW),
    "an empty outer stratum": (
        # Only element 1 of those within the threshold changes, by -1: c_0 = 0 has no k.
        bytes.fromhex("04 05 00 01 00 0000 0001 0000"),
        STRATA_BASE,
        "1080054002 7f 03 90",
    ),
    "an empty inner stratum": (
        # Only element 7 changes, by -16.
        bytes.fromhex("04 05 01 00 00 0004 0001 000f"),
        STRATA_BASE,
        "1081054002 7f 03 80",
    ),
    "an escape": (
        # w = 1, n = 300; the last element changes by 127: gap 299 with k = 0.
        bytes.fromhex("00 01 00 00ff 00 2b010000 0000 007e"),
        "00" * 300,
        "00" * 299 + "7f",
    ),
    "quotient 254": (bytes.fromhex("00 01 00 00fe 0000 0000"), 300 * "00", "00" * 254 + "01" + 45 * "00"),
    "the most negative difference": (bytes.fromhex("00 01 00 0000 0001 007f"), "05", "85"),
    "k = 26": (bytes.fromhex("00 01 1a 0000 00 02000000 0000 0000"), "000000", "000001"),
    "all elements": (bytes.fromhex("00 03 00 0100 0000 0100"), "01ff80", "020081"),
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    """SPEC 9.3"""
    payload, base, new = VECTORS[name][0], *map(bytes.fromhex, VECTORS[name][1:])
    assert reference.decode_sparse(payload, base) == new
    assert decode(payload, base) == new
    width = [1, 2, 4, 8][payload[0] & 3]
    thresholds = list(payload[1:2]) if payload[0] >> 2 else []
    ours = encode_sparse(array(new), array(base), width, thresholds=thresholds)
    assert reference.decode_sparse(ours, base) == new


def refused(payload: bytes, base: str, why: str, error: type[DeltaFormatError] = MalformedError) -> None:
    """Both decoders refuse, ours for this reason, and the block is as it was (DF-ENC-17)."""
    block = array(bytes.fromhex(base)).copy()
    with pytest.raises(error, match=why):
        decode_piece(3, payload, block)
    assert block.tobytes() == bytes.fromhex(base)
    with pytest.raises(reference.RejectedError) as caught:
        reference.decode_sparse(payload, bytes.fromhex(base))
    assert caught.value.error_class == error.error_class


def test_reserved_bits() -> None:
    """DF-ENC-06"""
    for header in ("41", "81", "c1"):
        refused(build(PLAIN, header=header), PLAIN_BASE, "reserved", UnsupportedError)


def test_width_must_divide_the_length() -> None:
    """DF-ENC-07"""
    refused(build(PLAIN), PLAIN_BASE + "00", "do not fill")
    refused(build(PLAIN, header="03"), "00" * 12, "do not fill")


def test_thresholds_must_fall() -> None:
    """DF-ENC-10"""
    refused(build(STRATA, thresholds="00"), STRATA_BASE, "thresholds")
    refused(build(STRATA, thresholds="80"), STRATA_BASE, "thresholds")
    refused(build(STRATA, thresholds="ff"), STRATA_BASE, "thresholds")
    for thresholds in ("0505", "0506", "0500", "8005"):
        refused(
            build(STRATA, header="08", thresholds=thresholds, counts="02 01 00"), STRATA_BASE, "thresholds"
        )
    # The limits themselves: all magnitudes below 127, then those below 1, of which there are none.
    payload = bytes.fromhex("08 7f01 00 01 00 00 0000 0000 0000")
    assert decode(payload, bytes.fromhex(STRATA_BASE)) == bytes.fromhex("1181054002 7f 03 90")


def test_count_of_changes() -> None:
    """DF-ENC-11"""
    refused(bytes.fromhex("00 00"), "000000", "changes in a block")
    refused(bytes.fromhex("04 05 00 00"), "000000", "changes in a block")
    refused(bytes.fromhex("00 04 00 0100 0000 0100"), "000000", "changes in a block")
    refused(bytes.fromhex("00 ffffffff0f 00 0100 0100 0100"), "000000", "changes in a block")
    refused(bytes.fromhex("04 05 02 02 00 00 0100 0000 0100"), "000000", "changes in a block")


def test_k_is_bounded() -> None:
    """DF-ENC-12"""
    for k in ("1b", "40", "ff"):
        refused(build(PLAIN, ks=k), PLAIN_BASE, "k is")
    refused(build(STRATA, ks="00 1b"), STRATA_BASE, "k is")


def test_escapes_are_needed() -> None:
    """DF-ENC-13"""
    base = "00" * 300
    refused(bytes.fromhex("00 01 00 00ff 00 fe000000 0000 007e"), base, "fits a byte")
    refused(bytes.fromhex("00 01 00 00ff 00 00000000 0000 007e"), base, "fits a byte")
    refused(bytes.fromhex("00 02 00 00ff00 00 fe000000 0000 000000"), base, "fits a byte")
    assert decode(bytes.fromhex("00 01 00 00ff 00 ff000000 0000 007e"), bytes(300)).index(0x7F) == 255


def test_padding_is_zero() -> None:
    """DF-ENC-14"""
    for lows in ("05", "81", "41"):
        refused(build(PLAIN, lows="00" + lows), PLAIN_BASE, "padding")
    for signs in ("06", "82"):
        refused(build(PLAIN, signs="00" + signs), PLAIN_BASE, "padding")
    refused(build(STRATA, lows="00 02"), STRATA_BASE, "padding")
    refused(build(STRATA, signs="00 0e"), STRATA_BASE, "padding")


def test_ranks_lie_in_their_stratum() -> None:
    """DF-ENC-15"""
    refused(build(PLAIN, quotients="00 0003"), PLAIN_BASE, "population")  # position 8 of 8
    refused(build(PLAIN, quotients="00 0400"), PLAIN_BASE, "population")
    refused(build(STRATA, quotients="00 010301"), STRATA_BASE, "population")  # rank 5 of 5
    refused(build(STRATA, quotients="00 010202"), STRATA_BASE, "population")  # rank 3 of 3
    refused(build(STRATA, thresholds="01"), STRATA_BASE, "population")  # nothing is below 1
    # Sums that would wrap in 64 bits: 2^32 - 1 with k = 26 is just below 2^58, 64 times.
    many = "00 40 1a 01ff" + "00" + "ffffffff" * 64 + "01ff" + "0100" + "0100"
    refused(bytes.fromhex(many), "00" * 100, "population")


def test_differences_lie_in_the_signed_range() -> None:
    """DF-ENC-16"""
    refused(bytes.fromhex("00 01 00 0000 0000 007f"), "05", "signed range")  # +128
    refused(bytes.fromhex("00 01 00 0000 0001 0080"), "05", "signed range")  # -129
    refused(bytes.fromhex("00 01 00 0000 0000 00ff"), "05", "signed range")
    for width in WIDTHS:
        most = 2 ** (8 * width - 1) - 1
        head = bytes([[1, 2, 4, 8].index(width), 1, 0, 0, 0, 0])
        for sign, magnitude in (
            (0, most),
            (1, most + 1),
            (0, 2 ** (8 * width) - 1),
            (1, 2 ** (8 * width) - 1),
        ):
            planes = b"".join(b"\x00" + bytes([byte]) for byte in magnitude.to_bytes(width, "little"))
            refused(head + bytes([sign]) + planes, "00" * width, "signed range")
        for sign, magnitude, element in ((0, most - 1, most), (1, most, most + 1)):
            planes = b"".join(b"\x00" + bytes([byte]) for byte in magnitude.to_bytes(width, "little"))
            assert decode(head + bytes([sign]) + planes, bytes(width)) == element.to_bytes(width, "little")


def test_every_byte_is_needed() -> None:
    """DF-ENC-05"""
    for parts, base in ((PLAIN, PLAIN_BASE), (STRATA, STRATA_BASE)):
        payload = build(parts)
        for end in range(len(payload)):
            refused(payload[:end], base, "early|left over")
        refused(payload + b"\x00", base, "early|left over")


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, bytes, int, list[int]]:
    """Draw a block, its base, a width and thresholds that often meet the magnitudes."""
    width = draw(st.sampled_from(WIDTHS))
    n = draw(st.integers(1, 80) | st.sampled_from([63, 64, 65, 127, 128, 129, 600]))
    most = 2 ** (8 * width - 1) - 1
    special = [0, 1, 2, most - 1, most, most + 1, most + 2, 2 * most + 1]
    value = draw(st.sampled_from([st.integers(0, 3), st.sampled_from(special), st.integers(0, 2 * most + 1)]))
    base = draw(st.lists(value, min_size=n, max_size=n))
    kind = draw(st.sampled_from(["one", "few", "half", "all", "burst"]))
    if kind == "all":
        places = list(range(n))
    elif kind == "burst":
        start = draw(st.integers(0, n - 1))
        places = sorted({*range(start, min(n, start + 20)), n - 1})
    else:
        size = {"one": 1, "few": max(1, n // 10), "half": max(1, n // 2)}[kind]
        places = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=size)))
    step = st.sampled_from([1, 2 * most + 1, most, most + 1, most + 2]) | st.integers(1, 2 * most + 1)
    new = list(base)
    for place in places:
        new[place] = (new[place] + draw(step)) % (2 * most + 2)
    magnitudes = sorted({x & most for x in base} | {(x & most) + 1 for x in base} | {1, most})
    usable = [magnitude for magnitude in magnitudes if 1 <= magnitude <= most]
    thresholds = draw(st.lists(st.sampled_from(usable), unique=True, max_size=min(15, len(usable))))
    thresholds.sort(reverse=True)
    return reference.block_of(new, width), reference.block_of(base, width), width, thresholds


@given(cases())
def test_our_payloads_are_read_by_the_reference(case: tuple[bytes, bytes, int, list[int]]) -> None:
    new, base, width, thresholds = case
    payload = encode_sparse(array(new), array(base), width, thresholds=thresholds)
    assert payload[0] == [1, 2, 4, 8].index(width) + 4 * len(thresholds)
    assert reference.decode_sparse(payload, base) == new
    assert decode(payload, base) == new


K_CHOICES: dict[str, Callable[[list[int]], int]] = {
    "0": lambda gaps: 0,
    "fit": lambda gaps: min(26, (sum(gaps) // len(gaps)).bit_length()),
    "few": lambda gaps: 3,
    "odd": lambda gaps: 9,
    "most": lambda gaps: 26,
    "mixed": lambda gaps: len(gaps) % 27,
}


@given(
    cases(), st.sampled_from(sorted(K_CHOICES)), st.sampled_from(["stored", "constant", "zstd", "smallest"])
)
def test_we_read_the_references_payloads(
    case: tuple[bytes, bytes, int, list[int]], choice: str, form: str
) -> None:
    new, base, width, thresholds = case
    payload = reference.encode_sparse(new, base, width, thresholds, K_CHOICES[choice], form)
    assert reference.decode_sparse(payload, base) == new
    assert decode(payload, base) == new


@pytest.mark.parametrize("k", range(27))
def test_every_k(k: int) -> None:
    """DF-ENC-12: all of them, with more than one group of eight gaps."""
    rng = np.random.default_rng(k)
    base = rng.integers(0, 256, 4000, np.uint8)
    new = base.copy()
    new[rng.choice(4000, 101, replace=False)] += np.uint8(3)
    payload = reference.encode_sparse(new.tobytes(), base.tobytes(), 1, [64], lambda gaps: k)
    assert decode(payload, base.tobytes()) == new.tobytes()


def spread(n: int, changes: int, seed: int = 0) -> tuple[Bytes, Bytes]:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 2**16, n, np.uint16)
    new = base.copy()
    new[rng.choice(n, changes, replace=False)] += np.uint16(1)
    return new.view(np.uint8), base.view(np.uint8)


@pytest.mark.parametrize(("n", "changes"), [(1 << 19, 1), (1 << 19, 20), (1 << 19, 300), (1 << 15, 9000)])
def test_gaps_of_all_sizes_round_trip(n: int, changes: int) -> None:
    """Long gaps take k above 8, where eight no longer fit a word."""
    new, base = spread(n, changes)
    for thresholds in ([], [20000, 5000, 5]):
        payload = encode_sparse(new, base, 2, thresholds=thresholds)
        assert decode(payload, base.tobytes()) == new.tobytes()
        assert len(payload) < 5 * changes + 60


def test_bursts_choose_k_by_their_median() -> None:
    """Changes that lie close together in a few rows cost little, though the mean gap is long."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**16, 1 << 19, np.uint16)
    new = base.copy()
    for row in rng.choice(1024, 10, replace=False):
        new[512 * row + rng.choice(512, 40, replace=False)] += np.uint16(1)
    payload = encode_sparse(new.view(np.uint8), base.view(np.uint8), 2)
    assert decode(payload, base.tobytes()) == new.tobytes()
    assert len(payload) < 1.1 * 400
    # One far gap among many short ones is an escape, not a large k for all.
    new = base.copy()
    new[:300:3] += np.uint16(1)
    new[-1] += np.uint16(1)
    payload = encode_sparse(new.view(np.uint8), base.view(np.uint8), 2)
    assert decode(payload, base.tobytes()) == new.tobytes()
    assert len(payload) < 60


def test_positions_may_be_given() -> None:
    new, base = spread(1000, 50)
    positions = changed_positions(new, base, 2)
    assert positions.tolist() == [
        i for i in range(1000) if new[2 * i] != base[2 * i] or new[2 * i + 1] != base[2 * i + 1]
    ]
    assert encode_sparse(new, base, 2, positions) == encode_sparse(new, base, 2)


def test_bits_are_compared_not_values() -> None:
    """DF-DTY-03"""
    zeros = np.array([0.0, -0.0], np.float32)
    assert changed_positions(zeros[:1].view(np.uint8), zeros[1:].view(np.uint8), 4).tolist() == [0]
    nan = np.array([np.nan], np.float32)
    assert changed_positions(nan.view(np.uint8), nan.copy().view(np.uint8), 4).tolist() == []
    # Only the sign, in the high byte.
    one = np.array([1.0, -1.0], np.float64).view(np.uint8)
    payload = encode_sparse(one[8:], one[:8], 8)
    assert decode(payload, one[:8].tobytes()) == one[8:].tobytes()


def test_odd_lengths_fall_back_to_bytes() -> None:
    """DF-ENC-07"""
    base = np.arange(9, dtype=np.uint8)
    new = base.copy()
    new[7] = 0
    assert changed_positions(new, base, 2).tolist() == [7]
    payload = encode_sparse(new, base, 2)
    assert payload[0] == 0
    assert decode(payload, base.tobytes()) == new.tobytes()


def test_unusable_arguments() -> None:
    new, base = spread(1000, 50)
    with pytest.raises(MalformedError) as caught:
        encode_sparse(base, base, 2)
    assert caught.value.code is ErrorCode.INPUT_INVALID
    for thresholds in ([0], [5, 5], [5, 6], [0x8000], list(range(16, 0, -1))):
        with pytest.raises(MalformedError) as caught:
            encode_sparse(new, base, 2, thresholds=thresholds)
        assert caught.value.code is ErrorCode.INPUT_INVALID
    assert encode_sparse(new, base, 2, thresholds=range(15, 0, -1))[0] == 1 + 4 * 15


def test_changes_can_be_undone() -> None:
    new, base = spread(5000, 700)
    payload = encode_sparse(new, base, 2, thresholds=[20000, 300])
    block = base.copy()
    changes = parse_sparse(payload, block)
    assert np.array_equal(block, base)  # DF-ENC-17
    assert changes.width == 2
    assert changes.differences.dtype == np.uint16
    assert sorted(changes.positions.tolist()) == changed_positions(new, base, 2).tolist()
    changes.apply(block)
    assert np.array_equal(block, new)
    changes.undo(block)
    assert np.array_equal(block, base)


def test_blocks_need_no_alignment() -> None:
    new, base = spread(1000, 50)
    shifted = np.zeros(2001, np.uint8)
    shifted[1:] = base
    payload = encode_sparse(new, shifted[1:], 2, thresholds=[1000])
    decode_piece(3, payload, shifted[1:])
    assert np.array_equal(shifted[1:], new)


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1))
def test_optimizer_steps_are_small(seed: int) -> None:
    """bf16 weights of which 0.7 % change by one step of their last bit, mostly."""
    rng = np.random.default_rng(seed)
    master = rng.normal(0, 0.02, 1 << 19).astype(np.float32)
    update = (1.6e-7 * rng.normal(0, 1, 1 << 19)).astype(np.float32)
    base, new = (
        (w.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for w in (master, master + update)
    )
    changed = changed_positions(new, base, 2).size
    assert 0.005 < changed / (1 << 19) < 0.01
    payload = encode_sparse(new, base, 2)
    assert len(payload) < 1.5 * changed
    assert decode(payload, base.tobytes()) == new.tobytes()
