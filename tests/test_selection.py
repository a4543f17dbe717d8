"""Slices mean what they mean in NumPy, and touch the blocks that hold them and no others (DF-RD-01)."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltaformat.dtypes import get_dtype
from deltaformat.errors import DeltaFormatError, ErrorCode, MalformedError, UnsupportedError
from deltaformat.selection import select

POISON = 0xEE


def read(array, dtype, selection, block_bytes):
    """Do as a reader does, with a buffer in which only the blocks of the selection are there."""
    content = np.frombuffer(array.tobytes(), np.uint8)
    buffer = np.full(selection.nbytes, POISON, np.uint8)
    for block in selection.blocks.tolist():
        low = max(block * block_bytes, selection.start)
        high = min((block + 1) * block_bytes, selection.stop)
        assert low < high
        buffer[low - selection.start : high - selection.start] = content[low:high]
    return selection.take(buffer)


def check(array, name, key, block_bytes=256):
    """Compare with NumPy: shape, bytes, blocks."""
    dtype = get_dtype(name)
    size = dtype.bits // 8
    selection = select(array.shape, dtype, key, block_bytes=block_bytes)
    expected = array[key]
    assert selection.shape == expected.shape
    assert read(array, dtype, selection, block_bytes).tobytes() == expected.tobytes()
    positions = np.arange(math.prod(array.shape)).reshape(array.shape)[key].reshape(-1) * size
    blocks = np.union1d(positions // block_bytes, (positions + size - 1) // block_bytes)
    np.testing.assert_array_equal(selection.blocks, blocks)
    return selection


def distinct(shape, kind=np.uint16):
    count = math.prod(shape)
    return (np.arange(count) * 40_503 % 65_521).astype(kind).reshape(shape)


SLICES = st.builds(
    slice, *[st.none() | st.integers(-12, 12)] * 2, st.none() | st.integers(-4, 4).filter(bool)
)
ITEMS = st.one_of(SLICES, st.integers(-9, 8), st.none(), st.just(...), st.integers(0, 3).map(np.int64))


@st.composite
def cases(draw):
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    key = draw(ITEMS | st.lists(ITEMS, max_size=6).map(tuple))
    return shape, key


@given(
    cases(), st.sampled_from([(np.uint8, "U8"), (np.uint16, "BF16"), (np.uint32, "F32"), (np.uint64, "C64")])
)
@example(((3, 4), (..., ...)), (np.uint8, "U8"))
@example(((), None), (np.uint16, "BF16"))
@example(((), ()), (np.uint64, "C64"))
@example(((), ...), (np.uint64, "F64"))
def test_any_basic_index_means_what_numpy_says(case, kind):
    """Shape, bytes and exactly the blocks; or an error where NumPy has one."""
    shape, key = case
    array = distinct(shape, kind[0])
    try:
        array[key]
    except IndexError:
        with pytest.raises(MalformedError) as caught:
            select(shape, get_dtype(kind[1]), key, block_bytes=256, where="w")
        assert caught.value.code is ErrorCode.INPUT_INVALID
        assert caught.value.where == "w"
    else:
        check(array, kind[1], key)


@given(
    st.tuples(*[st.integers(1, 40)] * 3),
    st.tuples(
        *[
            st.builds(
                slice, *[st.none() | st.integers(-40, 40)] * 2, st.none() | st.integers(-20, 20).filter(bool)
            )
        ]
        * 3
    ),
)
def test_slices_of_larger_tensors(shape, key):
    """Many blocks: dense axes, sparse axes, and both."""
    check(distinct(shape), "BF16", key)


@pytest.mark.parametrize(
    "key",
    [
        np.s_[5],
        np.s_[-1],
        np.s_[5:9],
        np.s_[::2],
        np.s_[::-1],
        np.s_[:, 7],
        np.s_[:, 100:120],
        np.s_[:, ::50],
        np.s_[::31, 3:5],
        np.s_[10:20, -1:-50:-7],
        np.s_[7, 3],
        np.s_[None, 7, ..., None, 3],
        np.s_[40:2],
        np.s_[0:1],
    ],
    ids=str,
)
def test_slices_of_a_matrix_whose_rows_are_longer_than_blocks(key):
    """DF-RD-01: rows of 700 bytes over blocks of 256: a column is in a third of them."""
    selection = check(distinct((60, 350)), "BF16", key)
    assert selection.nbytes <= 60 * 700


def test_columns_leave_blocks_out():
    """A column of rows longer than blocks needs one block of each row."""
    selection = check(distinct((60, 512)), "BF16", np.s_[:, 3])
    assert selection.blocks.tolist() == list(range(0, 240, 4))


def test_the_buffer_spans_what_the_first_axis_needs():
    """Memory follows the selection, not the tensor; where it is one run of bytes nothing is copied."""
    array = distinct((50, 4, 100))
    selection = check(array, "BF16", np.s_[3, 1:3])
    assert (selection.start, selection.stop) == (3 * 800 + 200, 3 * 800 + 600)
    selection = check(array, "BF16", np.s_[-10:])
    assert selection.nbytes == 10 * 800
    buffer = np.zeros(selection.nbytes, np.uint8)
    assert np.shares_memory(selection.take(buffer), buffer)
    selection = check(array, "BF16", np.s_[40:30:-5, ::2])
    assert (selection.start, selection.nbytes) == (35 * 800, 6 * 800)
    assert check(array, "BF16", np.s_[5:5]).nbytes == 0


def test_time_and_memory_are_the_blocks_not_the_elements():
    """DF-LIM-02: a slice of a tensor of 2^51 bytes is worked out at once."""
    dtype = get_dtype("BF16")
    tracemalloc.start()
    for key, count in (
        (np.s_[:, ::3], 1 << 17),
        (np.s_[:1, 1::2], 1),
        (np.s_[::1024, :], 1 << 7),
        (np.s_[5:6, 8:-8, None], 1),
        (np.s_[::-1, 1], 1 << 17),
    ):
        selection = select((1 << 17, 1 << 19), dtype, key, block_bytes=1 << 20)
        assert len(selection.blocks) == count
    wide = select((1 << 20, 1 << 30), dtype, np.s_[::4096, :: 1 << 22], block_bytes=1 << 20)
    assert len(wide.blocks) == 256 * 256
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


class Seven:
    def __repr__(self):
        return "Seven"

    def __index__(self):
        return 7


class Advanced:
    def __repr__(self):
        return "Advanced"

    def __array__(self):
        return np.zeros(3)


@pytest.mark.parametrize(
    "key", [Seven(), np.uint8(7), np.array(7), slice(np.int32(1), Seven(), np.int64(2))], ids=str
)
def test_what_acts_as_an_integer_is_one(key):
    """As in NumPy, `__index__` decides."""
    check(distinct((20, 3)), "BF16", key)


@pytest.mark.parametrize(
    "key",
    [
        [1, 2],
        ([0, 1], 0),
        True,
        np.True_,
        np.array([1, 2]),
        np.array([1]),
        np.array(True),
        Advanced(),
        ((1, 2),),
        (0, []),
    ],
    ids=str,
)
def test_advanced_indexing_is_refused_as_such(key):
    """A request outside what is offered: UNSUPPORTED, not a wrong answer."""
    with pytest.raises(UnsupportedError) as caught:
        select((20, 3), get_dtype("BF16"), key, block_bytes=256, where="w")
    assert caught.value.code is ErrorCode.NOT_SUPPORTED


def test_torch_scalars_and_tensors():
    """A tensor of one number is an integer, one with axes is advanced."""
    torch = pytest.importorskip("torch")
    dtype = get_dtype("BF16")
    assert select((20, 3), dtype, torch.tensor(7), block_bytes=256).shape == (3,)
    for key in (torch.tensor([7]), torch.tensor([1, 2]), torch.tensor(True)):
        with pytest.raises(UnsupportedError):
            select((20, 3), dtype, key, block_bytes=256)


@pytest.mark.parametrize(
    "key",
    [
        20,
        -21,
        (0, 3),
        (0, 0, 0),
        (..., ...),
        (0, ..., 0, 0),
        1.0,
        "a",
        (0, "a"),
        slice(None, None, 0),
        slice(1.5),
        slice("a", 2),
    ],
    ids=str,
)
def test_a_key_that_means_nothing_is_refused(key):
    """Out of range, too many, or no index at all: input-invalid."""
    with pytest.raises(MalformedError) as caught:
        select((20, 3), get_dtype("BF16"), key, block_bytes=256)
    assert caught.value.code is ErrorCode.INPUT_INVALID


def test_a_result_has_at_most_64_dimensions():
    """NumPy's own limit."""
    array = distinct((3,))
    check(array, "BF16", (None,) * 63)
    with pytest.raises(MalformedError, match="64"):
        select((3,), get_dtype("BF16"), (None,) * 64, block_bytes=256)


@pytest.mark.parametrize(("name", "row"), [("F4", 6), ("F6_E2M3", 4), ("F6_E3M2", 8)])
def test_whole_rows_of_dtypes_below_a_byte(name, row):
    """DF-DTY-02: rows that are whole bytes can be selected; parts of bytes cannot."""
    dtype = get_dtype(name)
    row_bytes = row * dtype.bits // 8
    array = distinct((200, 3, row_bytes), np.uint8)
    for key in (
        5,
        np.s_[7:150:9],
        np.s_[::-1],
        np.s_[3, 1],
        np.s_[:, 2],
        ...,
        np.s_[4, ..., None],
        np.s_[0:0],
        np.s_[5, 1:2, :],
    ):
        selection = select((200, 3, row), dtype, key, block_bytes=256)
        expected = array[key]
        assert math.prod(selection.shape) * dtype.bits // 8 == expected.nbytes
        assert read(array, dtype, selection, 256).tobytes() == expected.tobytes()
    for key in (np.s_[..., 0], np.s_[..., ::2], np.s_[..., ::-1], np.s_[0, 0, 1:]):
        with pytest.raises(UnsupportedError, match="whole bytes"):
            select((200, 3, row), dtype, key, block_bytes=256)
    with pytest.raises(UnsupportedError, match="whole bytes"):
        select((4, 3), get_dtype("F4"), 0, block_bytes=256)
    assert select((4, 3), get_dtype("F4"), ..., block_bytes=256).nbytes == 6


def test_axes_of_one_element_do_not_hinder():
    """An integer on an axis of one element takes it whole."""
    assert select((4, 4, 1), get_dtype("F4"), np.s_[1, :, 0], block_bytes=256).nbytes == 2
    check(distinct((4, 100, 1)), "BF16", np.s_[1:3, :, 0])
    check(distinct((1, 100, 1)), "BF16", np.s_[::-1, 5:9, ::-1])


def test_errors_are_all_ours():
    """Nothing but DeltaFormatError leaves, whatever is given."""
    for key in ({}, object(), b"x", {1}, slice({}, []), ((),), 1 << 100, -(1 << 100)):
        with pytest.raises(DeltaFormatError):
            select((20, 3), get_dtype("BF16"), key, block_bytes=256)
    check(distinct((20, 3)), "BF16", slice(-(1 << 100), 1 << 100, 1 << 90))
