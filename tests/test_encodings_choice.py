"""The writer's choice of an encoding: by measured size, never worse than 1.02 of the best (SPEC 9, 14)."""

import ml_dtypes
import numpy as np
import pytest

from deltaformat.dtypes import get_dtype
from deltaformat.encodings import (
    Encoding,
    changed_positions,
    choose_thresholds,
    decode_piece,
    encode_block,
    encode_planes,
    encode_planes_delta,
    encode_sparse,
)

N = 1 << 14
SLACK = 32  # a frame or two, in blocks that compress to nearly nothing


def floats(rng, dtype, scale):
    """Weights before and after a step that moves each by about `scale` times the weights' deviation."""
    old = rng.standard_normal(N)
    return old.astype(dtype), (old + scale * rng.standard_normal(N)).astype(dtype)


def mixed(rng, dtype, rate):
    """Random integers of which some become others."""
    info = np.iinfo(dtype)
    old, other = rng.integers(info.min, info.max, (2, N), dtype, endpoint=True)
    return old, np.where(rng.random(N) < rate, other, old)


def counters(rng, dtype, rate):
    old = rng.integers(0, 100, N).astype(dtype)
    return old, old + rng.poisson(rate, N).astype(dtype)


def zeroed(rng, dtype, rate):
    """A few elements were not zero, and all are afterwards."""
    old = np.where(rng.random(N) < rate, rng.integers(1, 100, N), 0).astype(dtype)
    return old, np.zeros(N, dtype)


def periodic(rng, dtype, rate):
    old = rng.integers(0, 100, N).astype(dtype)
    return old, old + np.resize(np.arange(64) * (rng.random(64) < rate) * 3, N).astype(dtype)


FLOATS = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
INTEGERS = {"U8": np.uint8, "I16": np.int16, "I32": np.int32, "U64": np.uint64}
CASES = [
    *[(floats, name, FLOATS[name], scale) for name in FLOATS for scale in (1e-5, 1e-3, 0.03, 0.1, 1.0)],
    *[
        (kind, name, INTEGERS[name], rate)
        for kind in (mixed, counters, zeroed, periodic)
        for name in INTEGERS
        for rate in (0.01, 0.05, 0.12, 0.2, 0.6, 1.0)
    ],
]


@pytest.mark.parametrize(("kind", "dtype", "array_type", "amount"), CASES)
@pytest.mark.parametrize("strata", [True, False])
def test_never_much_worse_than_the_best(kind, dtype, array_type, amount, strata):
    described = get_dtype(dtype)
    old, new = (array.view(np.uint8) for array in kind(np.random.default_rng(1), array_type, amount))
    encoding, payload = encode_block(new, old, described, strata=strata)
    positions = changed_positions(new, old, described.width)
    sizes = [
        new.size,
        len(encode_planes(new, described.width)),
        len(encode_planes_delta(new, old, described.width)),
    ]
    if positions.size:
        sizes.append(len(encode_sparse(new, old, described.width, positions)))
        if strata:
            thresholds = choose_thresholds(old, positions, described.width, described.kind)
            sizes.append(len(encode_sparse(new, old, described.width, positions, thresholds)))
    assert len(payload) <= 1.02 * min(sizes) + SLACK
    out = old.copy()
    decode_piece(encoding, payload, out)
    assert np.array_equal(out, new)


@pytest.mark.parametrize(
    ("kind", "dtype", "array_type", "amount", "expected"),
    [
        (floats, "BF16", ml_dtypes.bfloat16, 1e-4, Encoding.SPARSE),
        (floats, "F32", np.float32, 1e-3, Encoding.SPARSE),  # every element changes: gaps cost nothing
        (counters, "U64", np.uint64, 3.0, Encoding.PLANES_DELTA),
        (floats, "BF16", ml_dtypes.bfloat16, 10.0, Encoding.PLANES),
        (mixed, "U8", np.uint8, 1.0, Encoding.RAW),
        (zeroed, "I32", np.int32, 0.05, Encoding.PLANES),
    ],
)
def test_each_encoding_has_its_place(kind, dtype, array_type, amount, expected):
    """Among them `planes-delta`: on dense changes of integers it is a tenth smaller than any other."""
    old, new = (array.view(np.uint8) for array in kind(np.random.default_rng(2), array_type, amount))
    encoding, payload = encode_block(new, old, get_dtype(dtype))
    assert encoding is expected
    if expected is Encoding.PLANES_DELTA:
        width = get_dtype(dtype).width
        assert 1.1 * len(payload) < len(encode_sparse(new, old, width))
        assert 2 * len(payload) < len(encode_planes(new, width))
