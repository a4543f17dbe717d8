"""The map in memory: built, cut, joined and checked."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapmaker import BLOCK, DIGEST, EXTERNAL, D, add, file_ref, pack_key, same_map, small_map

from deltaformat import versionmap
from deltaformat.blocks import block_count
from deltaformat.columns import prefix_sums, ranges, tensor_sizes
from deltaformat.digests import tensor_leaf, version_root
from deltaformat.dtypes import DTYPES, get_dtype, tensor_nbytes
from deltaformat.errors import (
    DeltaFormatError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    MissingError,
    UnsafeError,
    UnsupportedError,
)
from deltaformat.mapcheck import check_fresh, check_map, check_packs, gaps_of, offsets_of
from deltaformat.packs import ExternalRef, PackRef
from deltaformat.versionmap import NOT_FRESH, VersionMapBuilder, merge, object_changes


def check(version, **changes):
    check_map(version, **({"digest_bytes": D, "block_bytes": BLOCK, "has_parent": True} | changes))


# -- columns ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=8))
def test_ranges_are_concatenated(pairs):
    """As a loop would."""
    starts, counts = np.array(pairs, np.int64).reshape(-1, 2).T
    assert ranges(starts, counts).tolist() == [i for s, n in pairs for i in range(s, s + n)]
    assert prefix_sums(counts).tolist() == [0, *np.cumsum(counts).tolist()]


DIMS = st.one_of(
    st.integers(0, 9), st.integers(-2, 1 << 62), st.sampled_from([1 << 32, 1 << 52, 1 << 53, (1 << 63) - 1])
)


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(DIMS, max_size=5)), max_size=6))
def test_sizes_of_many_tensors_are_those_of_each(tensors):
    """DF-MAN-06, DF-DTY-02: no product wraps around unseen."""
    tensors = [(dtype, [min(dim, (1 << 63) - 1) for dim in shape]) for dtype, shape in tensors]
    ranks = np.array([len(shape) for _, shape in tensors], np.int64)
    dims = np.array([dim for _, shape in tensors for dim in shape], np.int64)
    dtypes = [dtype for dtype, _ in tensors]
    try:
        expected = [tensor_nbytes(get_dtype(dtype), shape) for dtype, shape in tensors]
    except MalformedError:
        with pytest.raises(MalformedError):
            tensor_sizes(dtypes, ranks, dims)
    else:
        assert tensor_sizes(dtypes, ranks, dims).tolist() == expected


def test_the_largest_tensor():
    """DF-MAN-06: 2^53 - 1 bytes, and not one more."""
    one, ranks = np.array([(1 << 53) - 1], np.int64), np.array([1])
    assert tensor_sizes(["U8"], ranks, one).tolist() == [(1 << 53) - 1]
    with pytest.raises(MalformedError):
        tensor_sizes(["U8"], ranks, one + 1)


# -- building --------------------------------------------------------------------------------------


def test_a_map_says_where_everything_is():
    """DF-BLK-02: rows, blocks and their lengths; the last block of a tensor may be short."""
    version = small_map()
    assert version.index == {"a/../\0é": 0, "": 1, "scalar": 2, "w": 3}
    assert version.row("w") == 3
    assert [version.nbytes(row) for row in range(4)] == [300, 0, 8, 2048]
    assert version.block_count == 11
    assert version.blocks(0) == slice(0, 2)
    assert version.blocks(1) == slice(2, 2)
    assert version.block_rows(np.arange(11)).tolist() == [0, 0, 2, *[3] * 8]
    assert version.block_lengths(np.arange(11), BLOCK).tolist() == [256, 44, 8, *[256] * 8]
    with pytest.raises(MissingError) as caught:
        version.row("x")
    assert caught.value.code is ErrorCode.TENSOR_MISSING


def test_unused_packs_are_dropped():
    """A builder's table may hold the parent's packs; only those in use stay, in order of use."""
    version = small_map()
    assert len(version.packs) == 3
    used = version.pack.tolist()
    assert sorted(set(used), key=used.index) == [0, 1, 2]


def test_packs_of_the_same_bytes_become_one():
    """DF-KEY-02: they have the same key, and an object has one entry in the table."""
    version = small_map()
    doubled = replace(
        version, packs=(*version.packs, version.packs[0]), pack=np.where(version.pack == 0, 3, version.pack)
    )
    half = doubled.pack.copy()
    half[::2] = version.pack[::2]
    same_map(version, replace(doubled, pack=half).compact())


def test_rows_of_the_parent_are_taken_over():
    """Unchanged tensors cost no work per tensor or block; their `fresh` becomes 0."""
    parent = small_map()
    rng = np.random.default_rng(9)
    new = PackRef(pack_key(9), 1 << 20)
    builder = VersionMapBuilder(digest_bytes=D, packs=[new, *parent.packs])
    add(builder, rng, "new", "U8", (700,), 3, packs=1)
    builder.add_rows(parent, [3, 0], first_pack=1)
    builder.add_rows(parent, np.array([2]), fresh=None, first_pack=1)
    version = builder.finish()
    assert version.names == ("new", "w", "a/../\0é", "scalar")
    check(version)
    same = version.take([1, 2])
    expected = parent.take([3, 0])
    same_map(replace(expected, fresh=np.zeros(10, np.uint8)).compact(), same.compact())
    same_map(parent.take([2]).compact(), version.take([3]).compact())


def test_the_root_is_that_of_the_definition():
    """DF-DIG-03: from names, dtypes, shapes and digests, in the order of UTF-8 names, and from
    nothing else.
    """
    version = small_map()
    leaves = [
        (name.encode(), tensor_leaf(name, dtype, shape, version.digest[version.blocks(row)]))
        for row, (name, dtype, shape) in enumerate(
            zip(version.names, version.dtypes, version.shapes, strict=True)
        )
    ]
    root = version.root(DIGEST, BLOCK)
    assert root == version_root(DIGEST, BLOCK, leaves)
    assert root == version.take([3, 1, 2, 0]).root(DIGEST, BLOCK)
    assert root != version.take([0, 1, 2]).root(DIGEST, BLOCK)


def test_objects_are_those_in_use():
    """What a commit adds and drops: packs and files inside the store; externals are not collected."""
    old, new = small_map(files=[file_ref()]), small_map(files=[file_ref("x", 1)])
    assert old.objects() == {pack_key(0): 1 << 20, pack_key(1): 1 << 20, file_ref().key: 12}
    added, dropped = object_changes(new, old)
    assert (added, dropped) == ([(file_ref("x", 1).key, 12)], [(file_ref().key, 12)])
    assert object_changes(old, None) == (sorted(old.objects().items()), [])
    assert object_changes(old, old) == ([], [])


# -- joining ---------------------------------------------------------------------------------------


def test_parts_are_joined():
    """DF-MAN-05: disjoint parts make a version; their pack tables become one."""
    version = small_map(files=[file_ref()])
    parts = [
        replace(version.take([2, 0]).compact(), files=version.files),
        version.take([3]).compact(),
        version.take([1]),
    ]
    joined = merge(parts)
    same_map(replace(version.take([2, 0, 3, 1]), files=version.files).compact(), joined.compact())
    assert joined.root(DIGEST, BLOCK) == version.root(DIGEST, BLOCK)
    assert merge([version]) is version
    check(joined)


def test_parts_that_disagree_are_refused(monkeypatch):
    """DF-MAN-05, DF-MAN-10, DF-LIM-01: a name, a path or a pack that two parts tell differently; too many."""
    version = small_map(files=[file_ref()])
    left, right = version.take([0]), version.take([3])
    smaller = tuple(replace(entry, size=entry.size - 1) for entry in right.packs)
    for parts, kind in (
        ([left, left], InconsistentError),
        ([], InconsistentError),
        ([left, replace(right, packs=smaller)], InconsistentError),
        ([replace(left, files=version.files), replace(right, files=version.files)], UnsafeError),
        ([left] * 4_097, LimitError),
    ):
        with pytest.raises(kind):
            merge(parts)
    monkeypatch.setattr(versionmap, "MAX_PACKS", 2)
    with pytest.raises(LimitError, match="packs"):
        merge([left, right])
    monkeypatch.setattr(versionmap, "MAX_TENSORS", 1)
    with pytest.raises(LimitError, match="tensors"):
        merge([left, right])


def test_many_parts_are_joined():
    """DF-LIM-01: 4,096 parts are accepted."""
    one = small_map().take([2]).compact()
    parts = [replace(one, names=(f"t{number}",)) for number in range(4_096)]
    assert len(merge(parts).names) == 4_096


# -- gaps ------------------------------------------------------------------------------------------


@given(st.data())
def test_gaps_and_offsets_are_inverse(data):
    """DF-MAN-03: also where content is shared and gaps point back."""
    sizes = np.array(data.draw(st.lists(st.integers(10, 1 << 40), min_size=1, max_size=3)), np.int64)
    pieces = data.draw(
        st.lists(st.tuples(st.integers(0, len(sizes) - 1), st.floats(0, 1), st.integers(1, 10)), max_size=20)
    )
    pack = np.array([p for p, _, _ in pieces], np.uint32)
    length = np.array([n for _, _, n in pieces], np.int64)
    offset = np.array([int((sizes[p] - n) * f) for p, f, n in pieces], np.int64)
    gap = gaps_of(pack, offset, length)
    ends = [0] * len(sizes)
    for p, o, n, g in zip(pack.tolist(), offset.tolist(), length.tolist(), gap.tolist(), strict=True):
        assert g == o - ends[p]
        ends[p] = o + n
    assert offsets_of(pack, gap, length, sizes).tolist() == offset.tolist()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-20, 20),
            st.integers(0, 9),
        ),
        max_size=9,
    )
)
def test_hostile_gaps_are_found(pieces):
    """DF-MAN-03, DF-PCK-04: a sum that leaves its pack is found, also where it comes back or wraps around."""
    sizes = [20, 20, 1 << 40]
    ends = [0] * 3
    offsets = []
    for pack, gap, length in pieces:
        offsets.append(ends[pack] + gap)
        ends[pack] = offsets[-1] + length
        if not (length and offsets[-1] >= 0 and ends[pack] <= sizes[pack]):
            offsets = None
            break
    arrays = [np.array([p[i] for p in pieces], np.int64) for i in range(3)]
    arguments = arrays[0].astype(np.uint32), arrays[1], arrays[2], np.array(sizes, np.int64)
    if offsets is None:
        with pytest.raises(MalformedError):
            offsets_of(*arguments)
    else:
        assert offsets_of(*arguments).tolist() == offsets


def test_more_packs_than_16_bits_count():
    """Packs are grouped by a fast sort for few, by a general one for many."""
    count = 70_000
    pack = np.arange(count, dtype=np.uint32)[::-1].copy()
    pack = np.concatenate([pack, pack])
    length = np.ones(2 * count, np.int64)
    gap = gaps_of(pack, np.concatenate([np.zeros(count, np.int64), np.full(count, 3)]), length)
    assert set(gap.tolist()) == {0, 2}
    assert set(offsets_of(pack, gap, length, np.full(count, 9)).tolist()) == {0, 3}


# -- rules -----------------------------------------------------------------------------------------


def changed(version, name, position, value):
    column = getattr(version, name).copy()
    column[position] = value
    return replace(version, **{name: column})


BROKEN = {
    "DF-BLK-03": lambda v: replace(v, names=("\ud800", *v.names[1:])),
    "DF-MAN-05": lambda v: replace(v, names=("w", *v.names[1:])),
    "DF-MAN-10": lambda v: replace(v, files=(file_ref(), file_ref())),
    "DF-BLK-02": lambda v: replace(v, shapes=((10, 200), *v.shapes[1:])),
    "DF-MAN-06": lambda v: replace(v, shapes=((1 << 70,), *v.shapes[1:])),
    "DF-DTY-01": lambda v: replace(v, dtypes=("F13", *v.dtypes[1:])),
    "DF-MAN-04 depth": lambda v: changed(v, "depth", 3, 65),
    "DF-MAN-04 digests": lambda v: replace(v, digest=v.digest[:, :8]),
    "DF-MAN-04 fresh": lambda v: replace(v, fresh=v.fresh[:-1]),
    "DF-MAN-04 pieces": lambda v: replace(v, encoding=v.encoding[:-1]),
    "DF-MAN-07": lambda v: changed(v, "fresh", 3, 64),
    "pack index": lambda v: changed(v, "pack", 3, 3),
    "pack index below 0": lambda v: changed(v, "pack", 3, -1),
    "DF-PCK-04 empty": lambda v: changed(v, "length", 3, 0),
    "DF-PCK-04 above u32": lambda v: changed(v, "length", 3, 1 << 32),
    "DF-PCK-04 before": lambda v: changed(v, "offset", 3, -1),
    "DF-PCK-04 after": lambda v: changed(v, "offset", 3, 1 << 39),
    "DF-ENC-03": lambda v: changed(v, "encoding", 0, 9),
    "DF-ENC-02": lambda v: changed(v, "encoding", 0, 3),
    "DF-ENC-04": lambda v: changed(changed(v, "encoding", 0, 0), "length", 0, 255),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_map_that_breaks_a_rule_is_refused(case):
    """The same rules for what is written as for what is read; ids as in the case's name."""
    version = small_map()
    check(version)
    with pytest.raises(DeltaFormatError) as caught:
        check(BROKEN[case](version))
    expected = {
        "DF-MAN-05": InconsistentError,
        "DF-MAN-10": UnsafeError,
        "DF-ENC-03": UnsupportedError,
        "DF-DTY-01": UnsupportedError,
    }
    assert type(caught.value) is expected.get(case, MalformedError)


def test_an_error_names_tensor_and_block():
    """The first thing a user sees tells where to look."""
    with pytest.raises(MalformedError, match=r"block 2 of tensor 'w': .*DF-MAN-07"):
        check(changed(small_map(), "fresh", 5, 100))


def test_a_pack_table_names_an_object_once():
    """DF-MAN-03: otherwise "the piece before it in the same pack" would mean two things."""
    ref = PackRef(pack_key(), 5)
    assert check_packs([ref, EXTERNAL]).tolist() == [5, 1 << 33]
    with pytest.raises(MalformedError):
        check_packs([ref, replace(ref, size=6)])
    with pytest.raises(MalformedError):
        check_packs([EXTERNAL, replace(EXTERNAL, sha256="c" * 64)])
    with pytest.raises(LimitError):
        check_packs([ExternalRef("x", (1 << 40) + 1, "c" * 64)])


def test_fresh_blocks_have_a_counterpart():
    """DF-MAN-08: in the parent there is that name, with a block of that index and length; dtype and
    shape may differ.
    """
    version = small_map()
    full = replace(version, fresh=np.zeros(11, np.uint8))
    check_fresh(full, version, BLOCK)
    other_types = replace(version, dtypes=("U8", *version.dtypes[1:]), shapes=((300,), *version.shapes[1:]))
    check_fresh(full, other_types, BLOCK)
    check_fresh(replace(version, fresh=np.full(11, NOT_FRESH, np.uint8)), version.take([]), BLOCK)
    longer = VersionMapBuilder(digest_bytes=D, packs=version.packs)
    add(longer, np.random.default_rng(0), "a/../\0é", "U8", (257,), 2)
    longer.add_rows(version, [1, 2, 3])
    for parent, match in (
        (version.take([0, 1, 2]), "block 0 of tensor 'w'"),
        (longer.finish(), "block 1 of tensor 'a/../\\\\x00"),
        (replace(version, names=("x", *version.names[1:])), "block 0 of tensor 'a/"),
    ):
        with pytest.raises(MalformedError, match=match):
            check_fresh(full, parent, BLOCK)
    shorter = VersionMapBuilder(digest_bytes=D, packs=version.packs)
    add(shorter, np.random.default_rng(0), "w", "U8", (5 * 256,), 5)
    shorter.add_rows(version, [0, 1, 2])
    fewer = shorter.finish()
    with pytest.raises(MalformedError, match="block 0 of tensor 'w'"):
        check_fresh(full, fewer, BLOCK)  # 0 says "identical", and the digest is another
    with pytest.raises(MalformedError, match="block 5 of tensor 'w'"):
        check_fresh(replace(full, fresh=np.ones(11, np.uint8)), fewer, BLOCK)


def test_a_builder_takes_any_integers():
    """Offsets and codes come from lists, sums and sorts."""
    builder = VersionMapBuilder(digest_bytes=D, packs=[PackRef(pack_key(), 300)])
    builder.add_tensor(
        "x",
        "U8",
        [300],
        digests=np.zeros((2, D), np.uint8),
        fresh=np.full(2, 255, np.uint8),
        depth=np.ones(2, np.uint8),
        pack=np.zeros(2, np.uint32),
        offset=np.array([0, 256]),
        length=np.array([256, 44], np.uint16),
        encoding=np.zeros(2, np.int64),
    )
    version = builder.finish()
    check(version, has_parent=False)
    assert version.shapes == ((300,),)
    assert block_count(300, BLOCK) == version.block_count
    builder.add_rows(version, [0])
    with pytest.raises(InconsistentError, match="'x' occurs twice"):
        builder.finish()
