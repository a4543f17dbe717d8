"""The kernels against their reference: the same bytes, results and refusals, on every level."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cliruns import runner
from engines import KERNELS, LEVELS, served_by
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.blocks import Bytes
from deltaformat.cli import doctor
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import (
    Encoding,
    changed_positions,
    choose_thresholds,
    compare_and_encode,
    copy_changed,
    decode_piece,
    encode_block,
    encode_sparse,
    native,
    parse_sparse,
)
from deltaformat.encodings.estimates import SCALE, scaled_log2
from deltaformat.encodings.sparse import encode_changes, join_changes, split_changes
from deltaformat.encodings.strata import Positions
from deltaformat.errors import DeltaFormatError

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(KERNELS is None, reason="the kernels were not built, or are switched off")


def kernels() -> native.Kernels:
    assert KERNELS is not None
    return KERNELS


def step(seed: int, width: int, n: int, rate: float, spread: int = 1) -> tuple[Bytes, Bytes]:
    """A block and its base: many magnitudes, all rates of change, small and large differences."""
    rng = np.random.default_rng(seed)
    base = np.zeros(n, f"<u{width}")
    magnitudes = rng.integers(0, 2 ** (8 * width - 1), n, np.uint64) >> rng.integers(0, 8 * width, n).astype(
        np.uint64
    )
    base[:] = magnitudes | rng.integers(0, 2, n).astype(np.uint64) << np.uint64(8 * width - 1)
    new = base.copy()
    places = np.flatnonzero(rng.random(n) < rate)
    differences = (
        rng.integers(-spread, spread + 1, places.size) if spread else rng.integers(0, 256, places.size)
    )
    new[places] += differences.astype(np.int64).astype(f"<u{width}")
    return new.view(np.uint8), base.view(np.uint8)


SIZES = st.sampled_from([1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000, 5000])


@st.composite
def changes(draw: st.DrawFn) -> tuple[Bytes, Bytes, int, list[int]]:
    width = draw(st.sampled_from([1, 2, 4, 8]))
    new, base = step(
        draw(st.integers(0, 2**32 - 1)),
        width,
        draw(SIZES),
        draw(st.sampled_from([0.0, 0.003, 0.03, 0.5, 1.0])),
        draw(st.sampled_from([0, 1, 100])),
    )
    most = 2 ** (8 * width - 1) - 1
    shift = max(0, 8 * width - 9)  # thresholds that are exponents have a faster way
    value = st.integers(1, most) | st.integers(1, most >> shift).map(lambda key: key << shift)
    aligned = st.integers(1, most >> shift).map(lambda key: key << shift)
    thresholds = draw(st.lists(draw(st.sampled_from([value, aligned])), max_size=15, unique=True))
    return new, base, width, sorted(thresholds, reverse=True)


@given(changes())
def test_everything_is_as_the_reference_has_it(case: tuple[Bytes, Bytes, int, list[int]]) -> None:
    new, base, width, thresholds = case
    with served_by("numpy"):
        positions = changed_positions(new, base, width)
        parts = split_changes(new, base, width, positions, thresholds) if positions.size else None
    for level in LEVELS:
        with served_by(level):
            found = changed_positions(new, base, width)
            assert found.dtype == np.uint32
            assert np.array_equal(found, positions)
            if parts is None:
                continue
            given = np.array(thresholds, f"<u{width}").tobytes()
            for places in (None, found):
                made = native.encode(kernels(), new, base, width, places, thresholds)
                assert (made.thresholds, made.parts) == (given, parts)
                assert np.array_equal(made.positions, positions)
            check_choice(new, base, width, positions)
            counts, given_ks, streams = parts
            each_k = iter(given_ks)
            ks = [next(each_k) if count else 0 for count in counts]
            arrays = [np.frombuffer(stream, np.uint8) for stream in streams]
            want = join_changes(base, width, thresholds, counts, ks, arrays)
            block = base.copy()
            got = native.decode(kernels(), block, width, thresholds, counts, ks, arrays)
            assert np.array_equal(block, base)
            assert np.array_equal(want[0], got[0])
            assert np.array_equal(want[1], got[1])
            assert want[1].dtype == got[1].dtype
            native.decode(kernels(), block, width, thresholds, counts, ks, arrays, apply=True)
            assert np.array_equal(block, new)
            payload = encode_sparse(new, base, width, thresholds=thresholds)
            block = base.copy()
            decoded = parse_sparse(payload, block)
            decoded.apply(block)
            assert np.array_equal(block, new)
            decoded.undo(block)
            assert np.array_equal(block, base)
            copy_changed(new, block, width, found)
            assert np.array_equal(block, new)


def check_choice(new: Bytes, base: Bytes, width: int, positions: Positions) -> None:
    """What the kernels choose is what the array code chooses, and everything in one call what three give."""
    thresholds = choose_thresholds(base, positions, width, "float")
    made = native.encode(kernels(), new, base, width, None, None)
    assert np.frombuffer(made.thresholds, f"<u{width}").tolist() == list(thresholds)
    payload = encode_sparse(new, base, width, positions, thresholds)
    for places in (None, positions):
        found, count, encoded = encode_changes(new, base, width, "float", positions=places)
        assert np.array_equal(found, positions)
        assert (count, encoded) == (len(thresholds), payload)
    assert encode_changes(new, base, width, "uint")[1:] == (0, encode_sparse(new, base, width, positions))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("level", LEVELS)
def test_what_pays_is_chosen_alike(level: str, width: int) -> None:
    """Changes that shun some magnitudes: there the thresholds are many."""
    new, base = step(width, width, 60_000, 0.0)
    elements = base.view(f"<u{width}")
    likely = (elements & elements.dtype.type(2 ** (8 * width - 1) - 1)) < 2 ** (5 * width)
    rng = np.random.default_rng(width)
    for changes in (5, 31, 32, 1000, 10_000):
        new[:] = base
        places = rng.choice(np.flatnonzero(likely), min(changes, int(likely.sum())), replace=False)
        new.view(elements.dtype)[places] += elements.dtype.type(1)
        with served_by(level):
            check_choice(new, base, width, np.sort(places))
            chosen = native.encode(kernels(), new, base, width, None, None).thresholds
        assert bool(chosen) == (changes >= 1000), changes


@pytest.mark.parametrize("engine", ["numpy", *LEVELS])
def test_where_nothing_differs_nothing_is_encoded(engine: str) -> None:
    new, base = step(3, 2, 1000, 0.0)
    with served_by(engine):
        for positions in (None, np.empty(0, np.uint32)):
            found, thresholds, payload = encode_changes(new, base, 2, "float", positions=positions)
            assert (found.size, thresholds, payload) == (0, 0, b"")
        assert compare_and_encode(new, base, get_dtype("BF16"))[1] is None
        new[9] ^= 1
        found, encoded = compare_and_encode(new, base, get_dtype("BF16"))
        assert found.tolist() == [4]
        assert encoded == encode_block(new, base, get_dtype("BF16"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_large_step_gives_the_same_payload(level: str) -> None:
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, (1 << 18) + 77).astype(np.float32)
    update = (1.6e-7 * rng.normal(0, 1, master.size)).astype(np.float32)
    base, new = (
        (w.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for w in (master, master + update)
    )
    with served_by(level):
        positions = changed_positions(new, base, 2)
        thresholds = choose_thresholds(base, positions, 2, "float")
        payload = encode_sparse(new, base, 2, positions, thresholds)
        found = parse_sparse(payload, base)
    assert 4 <= len(thresholds) <= 15
    assert len(payload) < 1.1 * positions.size
    with served_by("numpy"):
        assert encode_sparse(new, base, 2, positions, thresholds) == payload
        expected = parse_sparse(payload, base)
    assert np.array_equal(found.positions, expected.positions)
    assert np.array_equal(found.differences, expected.differences)


def outcome(payload: bytes, base: Bytes) -> Any:
    block = base.copy()
    try:
        found = parse_sparse(payload, block)
    except DeltaFormatError as error:
        with pytest.raises(type(error)):
            decode_piece(Encoding.SPARSE, payload, block)
        assert np.array_equal(block, base)  # DF-ENC-17
        return error.error_class
    applied = block.copy()
    found.apply(applied)
    decode_piece(Encoding.SPARSE, payload, block)
    assert np.array_equal(block, applied)
    return found.positions.tolist(), found.differences.tolist()


@given(changes(), st.integers(0, 2**32 - 1))
def test_damaged_payloads_are_refused_alike(case: tuple[Bytes, Bytes, int, list[int]], seed: int) -> None:
    new, base, width, thresholds = case
    if np.array_equal(new, base):
        return
    payload = encode_sparse(new, base, width, thresholds=thresholds)
    draw = random.Random(seed)
    other = np.random.default_rng(seed).permutation(base.view(f"<u{width}")).view(np.uint8)
    for _ in range(20):
        damaged = bytearray(payload)
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            at = (
                draw.randrange(len(damaged)) if draw.random() < 0.5 else draw.randrange(min(40, len(damaged)))
            )
            damaged[at] = draw.choice([damaged[at] ^ 1 << draw.randrange(8), draw.randrange(256)])
        against = draw.choice([base, base, other, base[: base.size // 2 // width * width]])
        with served_by("numpy"):
            expected = outcome(bytes(damaged), against)
        for level in LEVELS:
            with served_by(level):
                assert outcome(bytes(damaged), against) == expected, (level, damaged.hex())


def test_what_does_not_fit_is_refused() -> None:
    """A kernel never trusts what it is called with."""
    k = kernels()
    eight = np.arange(8, dtype=np.uint8)
    u32: Any = lambda *values: np.array(values, np.uint32)  # noqa: E731
    parts = k.encode(eight, eight + np.uint8(1), 1, u32(1, 5), b"\x05")
    assert parts[2] == np.array([1, 1], "<u8").tobytes()
    assert parts[:2] == (b"", b"\x05")
    streams = parts[4]
    content = b"".join(streams)
    room, differences = np.empty(2, np.uint32), np.empty(2, np.uint8)
    counts = np.array([1, 1], "<u8").tobytes()
    assert k.decode(eight, 1, b"\x05", counts, b"\0\0", content, room, differences, False) == 0
    calls: list[tuple[Any, ...]] = [
        (k.diff, eight, eight[:7], 1, u32(0)),
        (k.diff, eight, eight, 3, u32(0)),
        (k.diff, eight[:7], eight[:7], 2, u32(0)),
        (k.diff, eight, eight, 0, u32(0)),
        (k.diff, eight, eight, 1, np.empty(9, np.uint8)[1:]),
        (k.encode, eight, eight[:7], 1, u32(1), b""),
        (k.encode, eight, eight[:7], 1, None, None),
        (k.encode, eight, eight, 3, None, None),
        (k.encode, eight, eight, 3, u32(1), b""),
        (k.encode, eight, eight, 1, u32(), b""),
        (k.encode, eight, eight, 1, u32(*range(9)), b""),
        (k.encode, eight, eight, 1, u32(8), b""),
        (k.encode, eight, eight, 1, u32(2, 2), b""),
        (k.encode, eight, eight, 1, u32(3, 2), b""),
        (k.encode, eight, eight, 1, eight[:3], b""),
        (k.encode, eight, eight, 1, u32(1), bytes(range(16, 0, -1))),
        (k.encode, eight, eight, 1, u32(1), b"\x00"),
        (k.encode, eight, eight, 1, u32(1), b"\x80"),
        (k.encode, eight, eight, 1, u32(1), b"\x05\x05"),
        (k.encode, eight, eight, 2, u32(1), b"\x05"),
        (k.apply, eight.copy(), 1, u32(8), eight[:1], False),
        (k.apply, eight.copy(), 1, u32(1), eight[:2], False),
        (k.apply, eight.copy(), 3, u32(1), eight[:1], False),
        (k.copy, eight.copy(), eight, 1, u32(8)),
        (k.copy, eight.copy(), eight[:7], 1, u32(1)),
        (k.copy, eight.copy(), eight, 3, u32(1)),
        (k.level, "sse9"),
    ]
    good = [eight, 1, b"\x05", counts, b"\0\0", content, room, differences, True]
    for index, bad in (
        (1, 3),
        (2, b"\x05\x04"),
        (3, counts[:8]),
        (3, np.array([2**63, 2**63 + 2], "<u8").tobytes()),
        (3, np.array([8, 1], "<u8").tobytes()),
        (3, np.array([0, 0], "<u8").tobytes()),
        (3, np.array([2, 1], "<u8").tobytes()),
        (4, b"\0"),
        (4, b"\0\x1b"),
        (4, b"\0\x01"),
        (5, b""),
        (5, content[:1]),
        (5, content[:-1]),
        (5, content + b"\0"),
        (5, b"\xff" + content[1:]),  # an escape is missing
        (6, room[:1]),
        (6, np.empty(9, np.uint8)[1:]),
        (7, differences[:1]),
    ):
        calls.append((k.decode, *good[:index], bad, *good[index + 1 :]))
    for function, *arguments in calls:
        with pytest.raises(ValueError, match=r"\w"):
            function(*arguments)
    for function, arguments in (
        (k.decode, [*good[:5], 7, *good[6:]]),
        (k.decode, [*good[:5], [7] * 5, *good[6:]]),
        (k.diff, [eight, eight, 1, bytes(8)]),
        (k.encode, [eight]),
        (k.encode, [eight, eight, 1, 7, None]),
        (k.decode, [bytes(8), *good[1:]]),  # it cannot be changed
        (k.decode, [7, *good[1:]]),
        (k.apply, [bytes(8), 1, u32(1), eight[:1], False]),
        (k.level, [7]),
    ):
        with pytest.raises((TypeError, BufferError)):
            function(*arguments)


def test_places_that_do_not_fit_are_counted() -> None:
    """Dense changes need a second look."""
    new, base = step(1, 2, 5000, 1.0)
    with served_by(LEVELS[0]):
        dense = changed_positions(new, base, 2)
    with served_by("numpy"):
        assert np.array_equal(dense, changed_positions(new, base, 2))
    assert dense.size > 5000 // 2


def test_threads_do_not_disturb_each_other() -> None:
    pairs = [step(seed, 2, 100_000, 0.02) for seed in range(8)]
    alone = [encode_sparse(new, base, 2, thresholds=[20000, 300]) for new, base in pairs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert alone == list(
                pool.map(lambda pair: encode_sparse(*pair, 2, thresholds=[20000, 300]), pairs)
            )


def test_logarithms() -> None:
    assert [scaled_log2(2**e) for e in range(32)] == [SCALE * e for e in range(32)]
    for number in (3, 255, 256, 257, 1000, 2**27 - 1):
        assert abs(scaled_log2(number) - SCALE * np.log2(number)) < 8


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltaformat._native", None)
    found, why = native.load()
    assert found is None
    assert "deltaformat._native" in why
    monkeypatch.setattr(native, "kernels", None)
    assert native.engine() == "numpy"


@pytest.mark.parametrize(
    ("value", "engine"),
    [
        (None, LEVELS[:1]),
        ("", LEVELS[:1]),
        ("1", LEVELS[:1]),
        ("portable", ["portable"]),
        ("0", []),
        ("x", []),
    ],
)
def test_the_environment_decides(value: str | None, engine: list[str]) -> None:
    code = "from deltaformat.encodings import native; print(native.engine() + '|' + native.why_not)"
    environment = {name: text for name, text in os.environ.items() if name != "DELTAFORMAT_NATIVE"}
    if value is not None:
        environment["DELTAFORMAT_NATIVE"] = value
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    name, _, why = ran.stdout.strip().partition("|")
    assert name == (f"native, {engine[0]}" if engine else "numpy")
    assert bool(why) == (not engine)


@pytest.mark.parametrize("engine", ["numpy", *LEVELS])
def test_doctor(engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner(capsys)
    if engine == "numpy":
        monkeypatch.setattr(native, "why_not", "switched \x1b[31m off")
    with served_by(engine):
        document = run("doctor", "--json").json
        text = run("doctor").out
    assert document["engine"] == ("numpy" if engine == "numpy" else "native")
    assert document["level"] == (None if engine == "numpy" else engine)
    assert document["levels"] == ([] if engine == "numpy" else LEVELS)
    assert document["why_not_native"] == ("switched \x1b[31m off" if engine == "numpy" else None)
    assert document["libraries"]["numpy"] == np.__version__
    assert ("switched" in text) == (engine == "numpy")
    assert engine.replace("numpy", "NumPy") in text
    monkeypatch.setattr(doctor, "OPTIONAL", ("no-such-distribution",))
    assert run("doctor", "--json").json["libraries"]["no-such-distribution"] is None
    assert "not installed" in run("doctor").out


def test_without_a_compiler_the_build_succeeds(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    ran = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path],
        cwd=ROOT,
        env={**os.environ, "CC": str(tmp_path / "no-compiler")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert not list(tmp_path.rglob("*.so"))
