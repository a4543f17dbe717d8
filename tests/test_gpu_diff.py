"""Changes found, compacted and applied on a device: both engines against NumPy and the CPU's codec."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.encodings import Changes, changed_positions
from deltaformat.errors import MalformedError
from deltaformat.gpu import BlockDiff, apply, diff, diffing
from deltaformat.gpu.table import BlockTable
from deltaformat.gpu.transfer import traffic

DTYPES = {
    1: torch.float8_e4m3fn,
    2: torch.bfloat16,
    4: torch.float32,
    8: torch.float64,
}
BLOCK = 256


@pytest.fixture(params=["torch", "triton"])
def engine(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def tensor_of(raw, width):
    """An aligned tensor of that width with these bytes."""
    tensor = torch.zeros(len(raw), dtype=torch.uint8)
    tensor.copy_(torch.from_numpy(np.asarray(raw, np.uint8)))
    return tensor.view(DTYPES[width])


def raw_of(tensor):
    return tensor.view(torch.uint8).numpy().copy()


def version_pair(seed, elements, width, changes):
    """Bytes of two versions: `changes` elements differ at most, by anything."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, elements * width, np.uint8)
    new = old.copy()
    if elements:
        places = rng.integers(0, elements, changes)
        new.view(f"<u{width}")[places] += rng.integers(1, 255, changes).astype(f"<u{width}")
    return new, old


def expected(news, olds, widths, block_bytes):
    """(tensor, block) -> positions and differences, by NumPy's integers."""
    found = {}
    for number, (new, old, width) in enumerate(zip(news, olds, widths, strict=True)):
        for start in range(0, new.size, block_bytes):
            x, y = (array[start : start + block_bytes].view(f"<u{width}") for array in (new, old))
            places = np.flatnonzero(x != y)
            if places.size:
                found[number, start // block_bytes] = places, (x - y)[places]
    return found


def check(found, news, olds, widths, block_bytes=BLOCK):
    wanted = expected(news, olds, widths, block_bytes)
    assert [(change.tensor, change.block) for change in found] == sorted(wanted)
    for change in found:
        places, differences = wanted[change.tensor, change.block]
        width = widths[change.tensor]
        start = change.block * block_bytes
        content = news[change.tensor][start : start + block_bytes]
        if len(places) * (4 + width) > content.size:
            assert change.changes is None
            assert np.array_equal(change.content, content)
        else:
            assert change.content is None
            assert change.changes.width == width
            assert np.array_equal(change.changes.positions, places)
            assert np.array_equal(change.changes.differences, differences)


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 600), st.integers(0, 40)), max_size=5
    ),
    block_bytes=st.sampled_from([256, 1024]),
    window=st.sampled_from([1, 1000, 1 << 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_ragged_sets(shapes, block_bytes, window, seed):
    """What is found is what NumPy finds; applied to the old version it gives the new one; undone, the old."""
    widths = [width for width, _, _ in shapes]
    pairs = [version_pair([seed, n], size, width, k) for n, (width, size, k) in enumerate(shapes)]
    news, olds = [new for new, _ in pairs], [old for _, old in pairs]
    new = [tensor_of(raw, width) for raw, width in zip(news, widths, strict=True)]
    old = [tensor_of(raw, width) for raw, width in zip(olds, widths, strict=True)]
    found = list(diff(new, old, block_bytes=block_bytes, engine="torch", window_bytes=window))
    check(found, news, olds, widths, block_bytes)
    apply(old, found, block_bytes=block_bytes, engine="torch")
    assert all(np.array_equal(raw_of(a), b) for a, b in zip(old, news, strict=True))
    sparse = [change for change in found if change.changes is not None]
    apply(new, sparse, block_bytes=block_bytes, engine="torch", undo=True)
    dense = {(change.tensor, change.block) for change in found} - {(c.tensor, c.block) for c in sparse}
    for number, block in dense:
        olds[number][block * block_bytes :][:block_bytes] = news[number][block * block_bytes :][:block_bytes]
    assert all(np.array_equal(raw_of(a), b) for a, b in zip(new, olds, strict=True))


@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("block_bytes", [256, 65536])
def test_tiles(engine, width, block_bytes):
    """Blocks of several tiles and of less than one; sparse, dense and without a change."""
    # Few blocks: each program of a tile takes the interpreter milliseconds.
    tile = 2048 if block_bytes > 4096 else block_bytes // width
    sizes = [block_bytes // width, 2 * block_bytes // width + 5, 7, 0, tile + 1]
    pairs = [version_pair(n, size, width, size // 90 + 1) for n, size in enumerate(sizes)]
    pairs.append((pairs[0][1], pairs[0][1]))
    news, olds = [new for new, _ in pairs], [old for _, old in pairs]
    new, old = ([tensor_of(raw, width) for raw in raws] for raws in (news, olds))
    found = list(diff(new, old, block_bytes=block_bytes, engine=engine))
    check(found, news, olds, [width] * len(pairs), block_bytes)
    apply(old, found, block_bytes=block_bytes, engine=engine)
    assert all(np.array_equal(raw_of(a), b) for a, b in zip(old, news, strict=True))


def test_mixed_widths(engine):
    sizes = {1: 900, 2: 300, 4: 700, 8: 33}
    pairs = [version_pair(width, size, width, 9) for width, size in sizes.items()]
    news, olds = [new for new, _ in pairs], [old for _, old in pairs]
    new, old = (
        [tensor_of(raw, width) for raw, width in zip(raws, sizes, strict=True)] for raws in (news, olds)
    )
    found = list(diff(new, old, block_bytes=BLOCK, engine=engine, window_bytes=700))
    check(found, news, olds, list(sizes))
    apply(old, found, block_bytes=BLOCK, engine=engine)
    apply(old, [c for c in found if c.changes], block_bytes=BLOCK, engine=engine, undo=True)
    apply(old, [c for c in found if c.changes], block_bytes=BLOCK, engine=engine)
    assert all(np.array_equal(raw_of(a), b) for a, b in zip(old, news, strict=True))


def test_bits_not_values(engine):
    """-0.0 for 0.0 is a change, a NaN that stays is none, and the least integer wraps around."""
    old = torch.tensor([0.0, float("nan"), 1.0, -1.0, float("inf")] * 8)
    new = old.clone()
    new[0], new[2] = -0.0, -1.0
    (change,) = diff(new, old, block_bytes=BLOCK, engine=engine)
    assert change.changes.positions.tolist() == [0, 2]
    assert change.changes.differences.tolist() == [0x80000000, 0x80000000]


def test_the_codec_takes_it():
    """What a device finds is what the CPU's codec finds for the same block, down to the types it can use."""
    new, old = version_pair(5, 4096, 2, 50)
    (found,) = diff(tensor_of(new, 2), tensor_of(old, 2), block_bytes=8192)
    assert np.array_equal(found.changes.positions, changed_positions(new, old, 2))
    block = old.copy()
    found.changes.apply(block)
    assert np.array_equal(block, new)
    found.changes.undo(block)
    assert np.array_equal(block, old)


def test_what_crosses():
    """Counts, positions and differences, and of a dense block its bytes; one wait, then one a window."""
    new, old = version_pair(7, 40_000, 2, 300)
    new[: 2 * BLOCK] ^= 0xFF
    before = traffic.snapshot()
    found = list(diff(tensor_of(new, 2), tensor_of(old, 2), block_bytes=BLOCK))
    crossed = traffic.snapshot() - before
    sparse = sum(len(change.changes.positions) for change in found if change.changes is not None)
    assert crossed["down", "weights"] == 2 * BLOCK
    assert crossed["down", "changes"] == sparse * 6
    assert crossed["down", "counts"] == 8 * -(-new.size // BLOCK)
    assert crossed["host", "waits"] <= 3
    assert set(crossed) == {
        ("down", "weights"), ("down", "changes"), ("down", "counts"), ("host", "waits")
    }  # fmt: skip


def test_more_than_2_to_31_elements(engine):
    """Blocks beyond element 2^31 of one tensor: pages that were never written take no memory."""
    size = (1 << 31) + (1 << 20) + 300
    new, old = (torch.from_numpy(np.zeros(size + 16, np.uint8)) for _ in range(2))
    new, old = (tensor[-tensor.data_ptr() % 16 :][:size] for tensor in (new, old))
    block = 1 << 16
    places = [(1 << 31) - 1, (1 << 31) + 7, size - 1]
    new[places] = 200
    tables = [BlockTable.of([tensor], block) for tensor in (new, old)]
    pairs = diffing.select_pairs(
        diffing.Pairs(*tables, np.ones(1, np.int64)), np.array([0, 32767, 32768, len(tables[0]) - 1])
    )
    assert [view.numel() for view in pairs.new.views] == [block, 2 * block, 300]
    counted = diffing.count_changes(pairs, engine=engine)
    assert counted.blocks.tolist() == [0, 1, 1, 1]
    window = diffing.Window(pairs, counted.blocks.numpy(), counted.tiles, engine=engine)
    found = [(place, changes.positions.tolist()) for place, changes, _ in window.take()]
    assert found == [(1, [block - 1]), (2, [7]), (3, [299])]
    change = Changes(1, np.array([7], np.uint32), np.array([3], np.uint8))
    apply(new, [BlockDiff(0, 32768, change, None)], block_bytes=block, engine=engine)
    assert int(new[(1 << 31) + 7]) == 203


@pytest.mark.parametrize("size", [2048, 1000])
def test_a_tensor_that_changes_while_it_is_compared(size):
    """Triton's kernel never writes more than was counted, and what it does not write is zero."""
    pytest.importorskip("triton")
    from deltaformat.gpu import diff_triton

    old = tensor_of(np.zeros(2 * size, np.uint8), 2).view(torch.int16)
    new = old.clone()
    new[[3, 500]] = 1
    news, olds = (torch.tensor([tensor.data_ptr()]) for tensor in (new, old))
    elements, counts = torch.tensor([size]), torch.empty((1, 1), dtype=torch.int32)
    diff_triton.count(news, olds, elements, counts, width=2)
    assert counts.tolist() == [[2]]
    new[10:40] = 7
    positions = torch.full((64,), -9, dtype=torch.int32)
    differences = torch.full((64,), -9, dtype=torch.int16)
    diff_triton.compact_kernel[(1, 1)](
        news, olds, elements, counts, counts.view(-1).cumsum(0), positions, differences, 1,
        TYPE=diff_triton._TYPES[2], TILE=diff_triton.TILE, num_warps=diff_triton.WARPS,
    )  # fmt: skip
    assert positions[:2].tolist() == [3, 10]
    assert (positions[2:] == -9).all()
    assert (differences[2:] == -9).all()
    new.zero_()
    new[7] = 5
    positions, differences = diff_triton.compact(news, olds, elements, counts, width=2, total=2)
    assert positions.tolist() == [7, 0]
    assert differences.tolist() == [5, 0]


def test_windows():
    lengths = np.array([10, 10, 30, 5, 5, 5], np.int64)
    windows = diffing.cut_windows(np.array([0, 1, 2, 4, 5]), lengths, 20)
    assert [window.tolist() for window in windows] == [[0, 1], [2], [4, 5]]
    assert diffing.cut_windows(np.empty(0, np.int64), lengths, 20) == []


def test_refusals():
    zeros = torch.zeros(100, dtype=torch.bfloat16)
    for other in (torch.zeros(100, dtype=torch.float16), torch.zeros(10, 10, dtype=torch.bfloat16)):
        with pytest.raises(MalformedError, match="only like is compared with like"):
            list(diff(zeros, other, block_bytes=BLOCK))
    with pytest.raises(MalformedError, match="only like"):
        list(diff([zeros], [], block_bytes=BLOCK))
    change = BlockDiff(0, 0, Changes(2, np.array([1], np.uint32), np.array([1], np.uint16)), None)
    fused = torch.zeros(300, dtype=torch.bfloat16)
    for tensor in (fused[1:200], torch.zeros(20, 20, dtype=torch.bfloat16).T):
        with pytest.raises(MalformedError, match=r"tensor 0.*changed in place|changed in place"):
            apply(tensor, [change], block_bytes=BLOCK)
    assert not fused.view(torch.int16).any()
    assert list(diff([], [], block_bytes=BLOCK)) == []
    apply([], [], block_bytes=BLOCK)
