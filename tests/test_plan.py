"""Plans fetch every piece once, coalesced, and tell what they cost."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapmaker import BLOCK, D, add, pack_key, small_map

from deltaformat.encodings import Encoding
from deltaformat.errors import ErrorCode, LimitError
from deltaformat.packs import ExternalRef, PackRef
from deltaformat.plan import plan_blocks, plan_fresh
from deltaformat.versionmap import NOT_FRESH, VersionMapBuilder

HUGE = 1 << 60


def random_map(seed, *, blocks=40, packs=3, max_depth=6, size=1 << 14):
    rng = np.random.default_rng(seed)
    builder = VersionMapBuilder(digest_bytes=D, packs=[PackRef(pack_key(i), size) for i in range(packs)])
    add(builder, rng, "a", "U8", (blocks * BLOCK - 100,), blocks, packs=packs, max_depth=max_depth, size=size)
    add(builder, rng, "b", "U8", (100,), 1, packs=packs, max_depth=max_depth, size=size)
    return builder.finish()


def check_batch(version, batch, *, budget, max_gap, max_request, pieces_of):
    """Every piece lies in its request; requests do not touch what nobody needs beyond the gaps."""
    assert batch.lengths.tolist() == version.block_lengths(batch.blocks, BLOCK).tolist()
    assert batch.decoded == batch.lengths.sum()
    assert batch.fetched == batch.request_length.sum()
    assert batch.cost == batch.decoded + batch.fetched
    wanted = [pieces_of(block) for block in batch.blocks.tolist()]
    assert np.diff(batch.piece_start).tolist() == [len(pieces) for pieces in wanted]
    flat = [piece for pieces in wanted for piece in pieces]
    at = batch.request_start[batch.piece_request] + batch.piece_at
    assert batch.request_pack[batch.piece_request].tolist() == version.pack[flat].tolist()
    assert at.tolist() == version.offset[flat].tolist()
    assert batch.piece_length.tolist() == version.length[flat].tolist()
    assert batch.encoding.tolist() == version.encoding[flat].tolist()
    assert (batch.piece_at >= 0).all()
    assert (batch.piece_at + batch.piece_length <= batch.request_length[batch.piece_request]).all()
    listed = [(pack, *item) for pack, items in batch.requests() for item in items]
    starts, lengths = batch.request_start.tolist(), batch.request_length.tolist()
    assert listed == list(zip(batch.request_pack.tolist(), starts, lengths, strict=True))
    assert [pack for pack, _ in batch.requests()] == sorted(set(version.pack[flat].tolist()))
    if flat:
        assert batch.request_length.max() < max_request + batch.piece_length.max() + max_gap
    if len(batch.blocks) > 1:
        assert batch.decoded + batch.piece_length.sum() <= budget
        assert batch.cost <= budget + sum_of_cuts(batch, max_request)


def sum_of_cuts(batch, max_request):
    """Bytes that two requests may both have, where a request is cut inside overlapping pieces."""
    return 0 if max_request >= HUGE else batch.fetched


@given(
    st.integers(0, 9),
    st.lists(st.integers(0, 40), max_size=60),
    st.sampled_from([0, 1, 600, 3000, HUGE]),
    st.sampled_from([0, 1, 100, 5000, HUGE]),
    st.sampled_from([1, 50, 1000, HUGE]),
)
def test_plans_bring_all_pieces(seed, blocks, budget, max_gap, max_request):
    """In the order given, under the budget, with what each piece needs to be found."""
    version = random_map(seed)
    plan = plan_blocks(
        version,
        np.array(blocks, np.int64),
        block_bytes=BLOCK,
        budget=budget,
        max_gap=max_gap,
        max_request=max_request,
    )
    batches = list(plan)
    assert len(plan) == len(batches)
    assert [block for batch in batches for block in batch.blocks.tolist()] == blocks
    assert plan.decoded == sum(batch.decoded for batch in batches)
    assert plan.payload == sum(int(batch.piece_length.sum()) for batch in batches)
    assert not plan.skipped.size
    for batch in batches:
        assert batch.blocks.size
        assert not batch.based.any()
        check_batch(
            version,
            batch,
            budget=budget,
            max_gap=max_gap,
            max_request=max_request,
            pieces_of=lambda b: list(range(version.piece_start[b], version.piece_start[b + 1])),
        )


@given(st.integers(0, 9), st.sampled_from([0, 3000, HUGE]))
def test_followers_fetch_fresh_pieces_only(seed, budget):
    """DF-RD-02: unchanged blocks are skipped, blocks that are not fresh are read whole, others by
    their last pieces.
    """
    version = random_map(seed)

    def pieces_of(block):
        end, fresh = int(version.piece_start[block + 1]), int(version.fresh[block])
        count = int(version.depth[block]) if fresh == NOT_FRESH else fresh
        return list(range(end - count, end))

    plan = plan_fresh(version, block_bytes=BLOCK, budget=budget)
    assert plan.skipped.tolist() == np.flatnonzero(version.fresh == 0).tolist()
    assert plan.blocks.tolist() == np.flatnonzero(version.fresh != 0).tolist()
    for batch in plan:
        assert batch.based.tolist() == (version.fresh[batch.blocks] != NOT_FRESH).tolist()
        first = batch.encoding[batch.piece_start[:-1]]
        assert ((first >= Encoding.PLANES_DELTA) == batch.based).all()
        check_batch(version, batch, budget=budget, max_gap=64 << 10, max_request=HUGE, pieces_of=pieces_of)
    some = plan_fresh(version, np.array([5, 2, 9]), block_bytes=BLOCK, budget=HUGE)
    assert sorted([*some.blocks.tolist(), *some.skipped.tolist()]) == [2, 5, 9]


def map_of(pieces, *, packs=2):
    """One block per piece: (pack, offset, length)."""
    builder = VersionMapBuilder(digest_bytes=D, packs=[PackRef(pack_key(i), 1 << 30) for i in range(packs)])
    count = len(pieces)
    columns = dict(zip(("pack", "offset", "length"), np.array(pieces).T, strict=True))
    builder.add_tensor(
        "w",
        "U8",
        (count * BLOCK,),
        digests=np.zeros((count, D), np.uint8),
        fresh=np.full(count, NOT_FRESH, np.uint8),
        depth=np.ones(count, np.uint8),
        encoding=np.full(count, Encoding.PLANES),
        **columns,
    )
    return builder.finish()


def requests(version, **options):
    plan = plan_blocks(
        version,
        np.arange(version.block_count),
        **({"block_bytes": BLOCK, "budget": HUGE, "max_gap": 10} | options),
    )
    return [[(pack, *item) for pack, items in batch.requests() for item in items] for batch in plan]


def test_ranges_are_united_across_gaps():
    """Up to `max_gap`, in any order of pieces, and never from one pack into the next."""
    version = map_of([(0, 130, 20), (0, 100, 20), (0, 161, 5), (1, 166, 5), (0, 500, 1)])
    assert requests(version) == [[(0, 100, 50), (0, 161, 5), (0, 500, 1), (1, 166, 5)]]
    assert requests(version, max_gap=11) == [[(0, 100, 66), (0, 500, 1), (1, 166, 5)]]
    assert requests(version, max_gap=HUGE) == [[(0, 100, 401), (1, 166, 5)]]
    assert requests(version, max_gap=0) == [
        [(0, 100, 20), (0, 130, 20), (0, 161, 5), (0, 500, 1), (1, 166, 5)]
    ]


def test_shared_and_overlapping_pieces_are_fetched_once():
    """Tied tensors name the same bytes."""
    version = map_of([(0, 100, 50), (0, 100, 50), (0, 120, 10), (0, 140, 20)])
    assert requests(version) == [[(0, 100, 60)]]
    (batch,) = plan_blocks(version, np.arange(4), block_bytes=BLOCK, budget=HUGE)
    assert batch.fetched == 60
    assert batch.piece_at.tolist() == [0, 0, 20, 40]


def test_long_ranges_are_cut_between_pieces():
    """Several requests at a time are faster than one."""
    version = map_of([(0, 100 + 10 * i, 10) for i in range(10)])
    assert requests(version, max_request=40) == [[(0, 100, 40), (0, 140, 40), (0, 180, 20)]]
    version = map_of([(0, 100, 1000), (0, 1100, 10)])
    assert requests(version, max_request=40) == [[(0, 100, 1000), (0, 1100, 10)]]


def test_the_budget_bounds_batches_and_gaps():
    """A batch costs at most the budget; the widest gaps are given up first; a block too large is alone."""
    version = map_of([(0, 0, 100), (0, 105, 100), (0, 213, 100), (0, 1000, 5000)])
    full = 3 * BLOCK + 300
    assert requests(version, budget=full + 13) == [[(0, 0, 313)], [(0, 1000, 5000)]]
    assert requests(version, budget=full + 12) == [[(0, 0, 205), (0, 213, 100)], [(0, 1000, 5000)]]
    assert requests(version, budget=full) == [[(0, 0, 100), (0, 105, 100), (0, 213, 100)], [(0, 1000, 5000)]]
    assert requests(version, budget=full - 1) == [[(0, 0, 205)], [(0, 213, 100)], [(0, 1000, 5000)]]
    assert [batch.cost for batch in plan_blocks(version, np.arange(4), block_bytes=BLOCK, budget=0)][
        -1
    ] == BLOCK + 5000


def test_a_block_that_needs_too_much_is_refused():
    """DF-LIM-02, DF-SEC-01: a manifest cannot make a reader take more memory than its user allows."""
    version = map_of([(0, 0, 100), (0, 0, 5000)])
    blocks = np.arange(2)
    plan_blocks(version, blocks, block_bytes=BLOCK, budget=0, max_block=BLOCK + 5000)
    for call in (plan_blocks, plan_fresh):
        with pytest.raises(LimitError, match="block 1") as caught:
            call(version, blocks, block_bytes=BLOCK, budget=0, max_block=BLOCK + 4999)
        assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
        assert caught.value.where == "w"


def test_pieces_far_apart_in_many_packs():
    """DF-LIM-01: packs of 1 TiB, and the last of a million packs."""
    version = map_of([(0, 5, 10), (1, 7, 10)])
    far = replace(
        version,
        pack=np.array([0, (1 << 20) - 1], np.int32),
        offset=np.array([(1 << 40) - 10, (1 << 40) - 10]),
        packs=(),
    )
    assert requests(far, max_gap=HUGE) == [[(0, (1 << 40) - 10, 10), ((1 << 20) - 1, (1 << 40) - 10, 10)]]


def test_nothing_to_do():
    """No blocks, no batches."""
    version = small_map()
    for plan in (
        plan_blocks(version, np.empty(0, np.int64), block_bytes=BLOCK, budget=HUGE),
        plan_fresh(replace(version, fresh=np.zeros(11, np.uint8)), block_bytes=BLOCK, budget=HUGE),
    ):
        assert (len(plan), list(plan), plan.decoded, plan.payload) == (0, [], 0, 0)


def test_a_version_of_many_blocks_is_planned_at_once():
    """20,000 blocks in chains of 16 pieces: nothing is done per block."""
    count, depth = 20_000, 16
    builder = VersionMapBuilder(digest_bytes=D, packs=[PackRef(pack_key(i), 1 << 40) for i in range(depth)])
    blocks = np.repeat(np.arange(count), depth)
    builder.add_tensor(
        "w",
        "U8",
        (count * BLOCK,),
        digests=np.zeros((count, D), np.uint8),
        fresh=np.ones(count, np.uint8),
        depth=np.full(count, depth, np.uint8),
        pack=np.tile(np.arange(depth), count),
        offset=blocks * 100,
        length=np.full(count * depth, 100),
        encoding=np.tile([1] + [3] * (depth - 1), count),
    )
    version = builder.finish()
    started = time.process_time()
    batches = list(plan_blocks(version, np.arange(count), block_bytes=BLOCK, budget=256 << 10))
    fresh = list(plan_fresh(version, block_bytes=BLOCK, budget=64 << 20))
    assert time.process_time() - started < 5  # takes 0.1 s
    assert sum(batch.fetched for batch in batches) == count * depth * 100
    assert [list(batch.requests()) for batch in fresh] == [[(15, [(0, count * 100)])]]


def test_raw_blocks_of_the_store_can_be_left_out():
    """A storage that reads to where bytes go gets them one by one; what is small, encoded, outside the store,
    of another length than its block, or on top of the parent's block is requested.
    """
    builder = VersionMapBuilder(
        digest_bytes=D,
        packs=[PackRef(pack_key(0), 1 << 30), ExternalRef("hf://a/b@" + "0" * 40 + "/c", 1 << 30, "0" * 64)],
    )
    raw, sparse = Encoding.RAW, Encoding.SPARSE
    chains = [
        [(0, 1000, BLOCK, raw)],
        [(0, 5000, BLOCK, raw), (0, 10, 7, sparse), (0, 17, 7, sparse)],
        [(1, 0, BLOCK, raw)],
        [(0, 9000, BLOCK - 1, raw)],
        [(0, 30, BLOCK, Encoding.PLANES)],
        [(0, 20000, 100, raw)],
    ]
    pieces = np.array([piece for chain in chains for piece in chain])
    builder.add_tensor(
        "w",
        "U8",
        (5 * BLOCK + 100,),
        digests=np.zeros((6, D), np.uint8),
        fresh=np.array([255, 1, 255, 255, 255, 255], np.uint8),
        depth=np.array([len(chain) for chain in chains], np.uint8),
        **dict(zip(("pack", "offset", "length", "encoding"), pieces.T, strict=True)),
    )
    version = builder.finish()
    plan = plan_blocks(version, np.arange(6), block_bytes=BLOCK, budget=HUGE, max_gap=0)
    batch, whole = plan.batch(0, direct=BLOCK), plan.batch(0)
    left_out = (batch.piece_request < 0).tolist()
    assert left_out == [True, True, False, False, False, False, False, False]
    listed = [(pack, *item) for pack, items in batch.requests() for item in items]
    assert listed == [(0, 10, 14), (0, 30, BLOCK), (0, 9000, BLOCK - 1), (0, 20000, 100), (1, 0, BLOCK)]
    assert (whole.piece_request >= 0).all()
    assert whole.fetched == batch.fetched + 2 * BLOCK
    for piece in np.flatnonzero(batch.piece_request >= 0).tolist():
        request = batch.piece_request[piece]
        assert batch.request_start[request] + batch.piece_at[piece] == version.offset[piece]
    (all_out,) = [plan_blocks(version, np.arange(1), block_bytes=BLOCK, budget=HUGE).batch(0, direct=1)]
    assert list(all_out.requests()) == []
    assert all_out.fetched == 0
    fresh = plan_fresh(version, block_bytes=BLOCK, budget=HUGE).batch(0, direct=BLOCK)
    assert (fresh.piece_request < 0).tolist() == [True, False, False, False, False, False]
