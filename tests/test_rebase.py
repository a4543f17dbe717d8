"""Replacing the beginnings of chains: when, by what, and how little is read for it (SPEC 11.2, 14)."""

import ml_dtypes
import numpy as np
import pytest
from watching import Recorder
from writertools import bf16, make, memory, raw, reads, trained

import deltaformat as df
from deltaformat import Policy
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import Encoding, decode_piece, encode_block
from deltaformat.rebase import rebase_due, replace_prefix

BF16 = get_dtype("BF16")


def due(depth, turn=1, own=10, max_chain=16, block=1000, each=10):
    chain = np.array([block, *[each] * (depth - 1)], np.int64)
    return rebase_due(chain, own, block=block, turn=turn, max_chain=max_chain)


def test_a_full_chain_is_due():
    """DF-WR-02: whatever the turn."""
    assert due(16)
    assert due(40)
    assert not due(15)
    assert due(2, max_chain=2)
    assert not due(1, max_chain=2)


def test_a_turn_comes_once_in_a_chain():
    assert [turn for turn in range(42) if due(5, turn=turn)] == [0, 14, 28]
    assert not due(2, turn=0)  # a single difference stays
    assert due(3, turn=0)


def test_differences_that_outweigh_the_block_are_due():
    assert due(2, each=1600, own=401)
    assert not due(2, each=1600, own=400)
    assert not due(1, own=2000)  # there is no prefix to replace but the keyframe itself


@pytest.mark.parametrize("max_chain", [4, 8, 16, 64])
def test_rebases_are_spread_evenly(max_chain):
    """Where every block changes in every step, as many are due in each, after the first round."""
    blocks, steps = 96, 6 * max_chain
    depth, counts = np.ones(blocks, int), []
    for step in range(1, steps):
        rebased = [block for block in range(blocks) if due(depth[block], block + step, max_chain=max_chain)]
        depth[rebased] = 2
        depth += 1
        assert depth.max() <= max_chain
        counts.append(len(rebased))
    settled = counts[2 * max_chain :]
    period = max_chain - 2
    assert max(settled) - min(settled) <= 1
    assert blocks // period <= max(settled) <= -(-blocks // period)


def encode(new, base):
    return encode_block(new, base, BF16)


def states(rng, chance):
    old = bf16(rng, 64, 64).view(np.uint8).reshape(-1)
    new = old.copy()
    places = rng.random(new.size // 2) < chance
    new.view(np.uint16)[places] ^= rng.integers(1, 1 << 16, int(places.sum()), np.uint16)
    return old, new


@pytest.mark.parametrize(
    ("chance", "max_chain", "based"),
    [(0.001, 16, True), (0.01, 3, True), (0.01, 2, False), (0.7, 16, False), (1.0, 64, False)],
)
def test_what_replaces_a_prefix(chance, max_chain, based):
    keyframe, parent = states(np.random.default_rng(3), chance)
    made = replace_prefix(parent, parent, keyframe, BF16, own=10, max_chain=max_chain, encode=encode)
    assert made.alone is None  # a follower would fetch much more
    encoding, payload = made.prefix
    assert encoding.needs_base == based
    out = keyframe.copy() if based else np.empty_like(keyframe)
    decode_piece(encoding, payload, out)
    assert np.array_equal(out, parent)


@pytest.mark.parametrize(("own", "alone"), [(8192, True), (7500, True), (7000, False)])
def test_a_block_that_changes_in_full_takes_the_place_of_its_chain(own, alone):
    """A new keyframe under its own piece would be uploaded beside it, for nothing."""
    keyframe, parent = states(np.random.default_rng(3), 1.0)
    _, new = states(np.random.default_rng(4), 1.0)
    made = replace_prefix(new, parent, keyframe, BF16, own=own, max_chain=16, encode=encode)
    out = np.empty_like(new)
    if alone:
        assert made.prefix is None
        decode_piece(*made.alone, out)
        assert np.array_equal(out, new)
    else:
        assert made.alone is None
        decode_piece(*made.prefix, out)
        assert np.array_equal(out, parent)


def committed(store, policy, steps, rng):
    state = {"a": bf16(rng, 64, 40), "b": bf16(rng, 30, 10)}
    infos, versions = [], []
    with store.writer(policy=policy) as writer:
        for step in range(steps):
            infos.append(writer.commit(step=step, tensors=state))
            versions.append(raw(state))
            state = trained(state, step, changes=3)
    return infos, versions


@pytest.mark.parametrize("keyframe", ["raw", "planes"])
def test_a_rebase_reads_first_pieces_only(keyframe):
    """A writer knows the digests of its keyframes: later pieces are not read for a squash."""
    watched = Recorder(memory())
    store = make(watched)
    watched.clear()
    infos, versions = committed(store, Policy(max_chain=8, keyframe=keyframe), 30, np.random.default_rng(5))
    rebased = [info for info in infos if info.rebase_bytes]
    assert len(rebased) > 10
    fetched = watched.of("get_ranges")
    first = store.version(step=0).map
    keys = {ref.key for ref in first.packs}
    assert fetched
    assert {call.key for call in fetched} <= keys  # no squash outgrew its keyframe
    for step in range(30):
        assert raw(store.version(step=step).state_dict()) == versions[step]


def test_what_is_not_known_is_read_with_its_whole_chain():
    """A wrong idea of a keyframe costs a read, and never a false byte (DF-WR-01)."""
    store = make()
    rng = np.random.default_rng(6)
    state, rebased = {"a": bf16(rng, 64, 40)}, 0
    with store.writer(policy=Policy(max_chain=4)) as writer:
        for step in range(12):
            held = writer._baseline.get("a")
            if held is not None and step % 3 == 0:
                held.keyframes[:] = 7
            elif held is not None and step % 3 == 1:
                held.keyframes[:] = 0
            rebased += writer.commit(step=step, tensors=state).rebase_bytes
            reads(store.version(), state)
            state = trained(state, step, changes=3)
    assert rebased


def test_a_new_writer_learns_what_it_reads():
    """After a restart nothing is held: chains are read whole once, and re-bases go on."""
    store = make()
    rng = np.random.default_rng(7)
    state = {"a": bf16(rng, 64, 40)}
    for start in range(0, 24, 6):
        with store.writer(policy=Policy(max_chain=5)) as writer:
            for step in range(start, start + 6):
                writer.commit(step=step, tensors=state)
                version = store.version()
                assert version.map.depth.max() <= 5
                reads(version, state)
                state = trained(state, step, changes=3)


def test_modes_are_what_they_say():
    """The smallest mode writes least, the lightest codes plain positions; both give the same bits."""
    rng, written, depths, roots = np.random.default_rng(9), {}, {}, set()
    tensors = [{"w": (rng.standard_normal((64, 1024)) * 0.02).astype(np.float32)}]
    for _ in range(40):
        moved = tensors[-1]["w"] + rng.standard_normal((64, 1024)).astype(np.float32) * np.float32(1e-6)
        tensors.append({"w": moved})
    for name, policy in {
        "smallest": Policy.smallest(threads=1),
        "default": Policy(),
        "lightest": Policy.lightest(pack_bytes=1 << 20),
    }.items():
        store = df.create(memory(), block_bytes=1 << 16)
        with store.writer(policy=policy) as writer:
            infos = [
                writer.commit(step=step, tensors={"w": state["w"].astype(ml_dtypes.bfloat16)})
                for step, state in enumerate(tensors)
            ]
        written[name] = sum(info.bytes_written for info in infos)
        depths[name] = [int(store.version(step=step).map.depth.max()) for step in range(len(tensors))]
        roots.add(tuple(info.root for info in infos))
    assert written["smallest"] < written["default"] < written["lightest"]
    assert max(depths["lightest"]) <= 16 < max(depths["smallest"]) <= 32
    assert len(roots) == 1


def test_dense_changes_do_not_pile_up():
    """Optimizer state changes in full: a chain of such differences would cost more than the block."""
    store, rng = df.create(memory(), block_bytes=4096), np.random.default_rng(8)
    moments = np.abs(rng.standard_normal((64, 40))).astype(np.float32)
    seen: set[int] = set()
    written = 0
    with store.writer() as writer:
        for step in range(12):
            info = writer.commit(step=step, tensors={"exp_avg_sq": moments})
            version = store.version()
            chains = np.add.reduceat(version.map.length, version.map.piece_start[:-1])
            assert (chains <= 3 * 4096).all()
            written += info.payload_bytes + info.rebase_bytes
            reads(version, {"exp_avg_sq": moments})
            moments *= np.float32(0.999)
            moments += rng.random((64, 40), np.float32) * np.float32(0.001)
            seen |= set(version.map.encoding.tolist())
    assert {Encoding.SPARSE, Encoding.PLANES} <= seen
    assert written < 12 * moments.nbytes  # less than all of it every time
