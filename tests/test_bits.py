"""Weights come back bit for bit: every dtype, layout and change, however they are read (DF-BLK-01, DF-
DTY-03).
"""

import itertools
import random

import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash
from bitstates import (
    BITS,
    LAYOUTS,
    NUMPY,
    TORCH,
    UNFRAMED,
    Bits,
    check,
    check_all,
    flip,
    random_bits,
    spec_root,
)
from watching import Recorder

import deltaformat as df
from deltaformat import Policy
from deltaformat.errors import CorruptError, UnsupportedError
from deltaformat.keys import parse_key
from deltaformat.storage import open_storage

BLOCK = 256
DIGESTS = ("xxh3-128", "blake3-256")
names = itertools.count()


def memory():
    return f"memory://bits-{next(names)}"


def history(seed=0):
    """States of eight steps, in which tensors of every dtype change in every way."""
    rng = np.random.default_rng(seed)
    state = {f"w.{dtype}": random_bits(rng, dtype, (6, 4, 10)) for dtype in NUMPY}
    state |= {f"scalar.{dtype}": random_bits(rng, dtype, () if dtype != "F4" else (2,)) for dtype in NUMPY}
    state |= {f"short.{dtype}": random_bits(rng, dtype, (3, 2)) for dtype in NUMPY}
    state |= {"no rows": Bits("BF16", (0, 4), b""), "no columns": Bits("F32", (4, 0), b"")}
    state["long"] = random_bits(rng, "BF16", (70, 32))
    state["tied"] = state["long"]
    state["experts.0"], state["experts.1"] = (random_bits(rng, "F16", (40, 20)) for _ in range(2))
    state["rows"] = random_bits(rng, "F32", (37, 11))
    yield dict(state)

    state = {name: flip(rng, tensor) for name, tensor in state.items()}  # few changes; tied ones part
    yield dict(state)
    yield dict(state)  # none

    renamed = random_bits(rng, "I64", (50,))
    state |= {"appears": renamed, "w.F32": Bits("I32", (10, 24), state["w.F32"].raw)}  # re-typed and reshaped
    state["w.F64"] = Bits("C64", (240,), state["w.F64"].raw)
    state["long"] = Bits("U8", (64, 70), state["long"].raw)
    del state["short.F16"], state["tied"]
    yield dict(state)

    state["appeared"] = state.pop("appears")  # renamed
    state["experts.0"], state["experts.1"] = state["experts.1"], state["experts.0"]
    state["rows"] = Bits("F32", (40, 11), state["rows"].raw + rng.bytes(3 * 44))
    state["no rows"] = random_bits(rng, "BF16", (5, 4))
    yield dict(state)

    state["rows"] = Bits("F32", (9, 11), state["rows"].raw[: 9 * 44])
    state["no columns"] = Bits("F32", (0, 0, 7), b"")
    state = {name: flip(rng, tensor, 200) for name, tensor in state.items()}  # many changes
    yield dict(state)

    state = {name: random_bits(rng, tensor.dtype, tensor.shape) for name, tensor in state.items()}
    yield dict(state)


STATES = list(itertools.islice(history(), 7))
STATES.append(STATES[0])


def given(state, number, framework):
    """The state as a framework's tensors, each in another layout."""
    layouts = itertools.cycle(LAYOUTS[number % len(LAYOUTS) :] + LAYOUTS[: number % len(LAYOUTS)])
    make = {
        "np": lambda tensor: tensor.numpy(next(layouts)),
        "pt": lambda tensor: tensor.torch(next(layouts)),
        "bytes": lambda tensor: tensor.given,
    }[framework]
    return {name: make(tensor) for name, tensor in state.items()}


def commit_all(store, states=STATES, framework="np", policy=None):
    with store.writer(policy=policy) as writer:
        return [
            writer.commit(step=step, tensors=given(state, step, framework), allow_set_change=True)
            for step, state in enumerate(states)
        ]


@pytest.fixture(scope="module", params=DIGESTS)
def stored(request):
    """A store that holds STATES, and what its commits returned."""
    url = memory()
    return url, commit_all(df.create(url, block_bytes=BLOCK, digest=request.param))


# -- every step, read in every way --------------------------------------------------------------------------


def test_every_step_in_any_order(stored):
    """DF-BLK-01, DF-DTY-03, DF-DIG-04: bytes, dtypes, shapes and roots, by a store opened anew."""
    url, infos = stored
    store = df.open(url)
    for step in random.Random(5).sample(range(len(STATES)), len(STATES)):
        with store.version(step=step) as version:
            check(version, STATES[step])
            check_all(version.state_dict(), STATES[step])
            assert version.root == infos[step].root == spec_root(STATES[step], BLOCK, store.digest)


def test_every_step_as_torch_tensors(stored):
    url, _ = stored
    for step, state in enumerate(STATES):
        with df.open(url).version(step=step, framework="pt") as version:
            check_all(version.state_dict(), state)
            name = next(iter(state))
            assert state[name].same_bits(version.get_tensor(name))


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_every_step_followed(stored, framework):
    """DF-RD-02, DF-MAN-07, DF-MAN-08: from step to step by fresh pieces, without touching what was held."""
    store = df.open(stored[0])
    previous = store.version(step=0, framework=framework)
    tensors = previous.state_dict()
    for step in range(1, len(STATES)):
        version = store.version(step=step, framework=framework)
        followed = version.follow(previous, tensors)
        check_all(followed, STATES[step])
        check_all(tensors, STATES[step - 1])  # DF-RD-03
        previous, tensors = version, followed


@pytest.mark.parametrize(("before", "step"), [(0, 2), (1, 4), (4, 1), (2, 2), (3, 0)])
def test_following_from_elsewhere_reads_anew(stored, before, step):
    store = df.open(stored[0])
    previous = store.version(step=before)
    check_all(store.version(step=step).follow(previous, previous.state_dict()), STATES[step])


def test_following_from_other_weights_is_refused(stored):
    """DF-DIG-01: what is not what the manifest says is never returned, also where nothing was fetched."""
    store = df.open(stored[0])
    previous, version = store.version(step=1), store.version(step=2)
    tensors = previous.state_dict()
    tensors["long"] = tensors["long"].copy()
    tensors["long"].view(np.uint16)[3, 3] ^= 1
    with pytest.raises(CorruptError, match="digest"):
        version.follow(previous, tensors)
    del tensors["long"]
    with pytest.raises(df.errors.InconsistentError, match="lacks"):
        version.follow(previous, tensors)


def random_key(choose, shape):
    """A basic index that fits `shape`."""
    key = []
    for size in shape[: choose.randint(0, len(shape))]:
        kind = choose.random()
        if kind < 0.3 and size:
            key.append(choose.randint(-size, size - 1))
        elif kind < 0.4:
            key.append(slice(None))
        else:
            bounds = [choose.choice([None, *range(-size - 2, size + 3)]) for _ in range(2)]
            key.append(slice(*bounds, choose.choice([None, 1, 1, 2, 3, -1, -2])))
    if choose.random() < 0.3:
        key.insert(choose.randint(0, len(key)), None)
    if choose.random() < 0.3:
        key.append(Ellipsis)
    return key[0] if len(key) == 1 and choose.random() < 0.5 else tuple(key)


@pytest.mark.parametrize("step", [1, 3, 5, 6])
def test_slices_are_numpys(stored, step):
    """DF-RD-01, DF-BLK-02: any basic index gives what NumPy gives on the whole tensor's elements."""
    choose = random.Random(step)
    version = df.open(stored[0]).version(step=step)
    refused = 0
    for name, tensor in STATES[step].items():
        if tensor.dtype == "F4":
            whole = tensor.numpy()
            read, expected = version.get_slice(name), whole.view(np.uint8)
        else:
            read, expected = version.get_slice(name), np.frombuffer(tensor.raw, f"V{BITS[tensor.dtype] // 8}")
        expected = expected.reshape(tensor.shape)
        assert (read.get_shape(), read.get_dtype()) == (list(tensor.shape), tensor.dtype)
        for _ in range(6):
            key = random_key(choose, tensor.shape)
            try:
                found = read[key]
            except UnsupportedError:
                assert tensor.dtype == "F4"
                refused += 1
                continue
            wanted = np.asarray(expected[key])
            assert found.shape == wanted.shape, (name, key)
            assert found.dtype == np.dtype(NUMPY[tensor.dtype])
            assert np.ascontiguousarray(found).tobytes() == wanted.tobytes(), (name, key)
    assert refused < 20


def test_slices_as_torch_tensors(stored):
    version = df.open(stored[0]).version(step=1, framework="pt")
    for dtype in ("BF16", "F8_E5M2", "U32", "C64"):
        rows = Bits(dtype, (2, 4, 10), STATES[1][f"w.{dtype}"].raw[2 * 5 * BITS[dtype] : 4 * 5 * BITS[dtype]])
        assert rows.same_bits(version.get_slice(f"w.{dtype}")[2:4])


def test_dtypes_without_a_framework(stored):
    """DF-DTY-02: F6 and odd F4 come and go as bytes; an array of them is refused with the dtype's name."""
    rng = np.random.default_rng(3)
    states = []
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        state = {dtype: random_bits(rng, dtype, (16, 30)) for dtype in UNFRAMED}
        state |= {f"{dtype} 0-d of rank 5": random_bits(rng, dtype, (1, 2, 1, 2, 1)) for dtype in UNFRAMED}
        state["odd"] = random_bits(rng, "F4", (2, 3))
        for step in range(3):
            writer.commit(step=step, tensors=given(state, step, "bytes"))
            states.append(state)
            state = {name: flip(rng, tensor) for name, tensor in state.items()}
    for step, expected in enumerate(states):
        version = df.open(store.url).version(step=step)
        check(version, expected)
        for dtype in UNFRAMED:
            with pytest.raises(UnsupportedError, match=dtype):
                version.get_tensor(dtype)
    with pytest.raises(UnsupportedError):
        store.version(framework="pt").get_tensor("odd")  # torch pairs along the last axis


def test_names_are_data():
    """DF-BLK-03, DF-KEY-03: any name, in packs of raw tensors and of payloads, and none of them in a key."""
    rng = np.random.default_rng(4)
    state = {
        name: random_bits(rng, "BF16", (20, 10))
        for name in (
            "", "/", "..", "../../etc/passwd", "a\0b", "\n", '"', "\\", "é", "e\u0301", "a" * 4000,
            "__metadata__", "deltaformat.payload", "A", "a", " a", "log/1", "\u202e", "\x7f", "\U0001f600",
        )
    }  # fmt: skip
    for policy in (Policy(keyframe="raw"), Policy()):
        url = memory()
        store = df.create(url, block_bytes=BLOCK)
        with store.writer(policy=policy) as writer:
            writer.commit(step=0, tensors=given(state, 0, "np"))
            changed = {name: flip(rng, tensor) for name, tensor in state.items()}
            writer.commit(step=1, tensors=given(changed, 0, "np"))
        check(df.open(url).version(step=0), state)
        check(df.open(url).version(step=1), changed)
        assert store.verify(all=True).findings == []
        for info in open_storage(url).list(""):
            parse_key(info.key)


def test_an_empty_state_is_a_version():
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        first = writer.commit(step=0, tensors={})
        writer.commit(step=1, tensors={"a": np.ones(3)}, allow_set_change=True)
        last = writer.commit(step=2, tensors={}, allow_set_change=True)
    assert first.root == last.root == spec_root({}, BLOCK)
    assert store.version(step=2).state_dict() == {} == store.version(step=0).state_dict()
    assert list(store.version(step=1).state_dict()) == ["a"]


# -- the same weights, the same root ------------------------------------------------------------------------


@pytest.mark.parametrize("digest", DIGESTS)
def test_same_weights_same_root(digest):
    """DF-DIG-03: whatever the framework, the order, the history, the policy and the way they were
    committed.
    """
    state = STATES[5]
    root = spec_root(state, BLOCK, digest)

    def create():
        return df.create(memory(), block_bytes=BLOCK, digest=digest)

    for framework in ("np", "pt", "bytes"):
        with create().writer() as writer:
            assert writer.commit(step=7, tensors=given(state, 3, framework)).root == root
    with create().writer(policy=Policy(keyframe="raw", strata=True, threads=1)) as writer:
        backwards = reversed(list(given(state, 0, "np").items()))
        assert writer.commit(step=0, tensors=backwards).root == root
    with create().writer() as writer:  # another history
        writer.commit(step=3, tensors=given(STATES[6], 0, "np"))
        writer.commit(step=4, tensors=given(STATES[0], 0, "pt"), allow_set_change=True)
        assert writer.commit(step=9, tensors=given(state, 0, "np"), allow_set_change=True).root == root
    store = create()
    with store.writer() as writer:  # parts, and what remains
        items = list(given(state, 0, "np").items())
        parts = [writer.stage(step=0, tensors=dict(items[start:40:2])) for start in (1, 0)]
        assert writer.commit(step=0, parts=parts, tensors=items[40:]).root == root
        check(store.version(), state)
    with store.writer() as writer:
        writer.commit(step=1, tensors=given(STATES[2], 0, "np"), allow_set_change=True)
        writer.commit(step=2, tensors=given(STATES[6], 0, "np"), allow_set_change=True)
    with store.writer(resume_from=1) as writer:
        assert writer.commit(step=2, tensors=given(state, 0, "np"), allow_set_change=True).root == root
    check(df.open(store.url).version(step=2), state)


def test_other_weights_other_root():
    """DF-DIG-03: name, dtype, shape and every bit count; nothing else does."""
    rng = np.random.default_rng(6)
    tensor = random_bits(rng, "F32", (8, 10))
    variants = [
        {"a": tensor},
        {"b": tensor},
        {"a": Bits("I32", (8, 10), tensor.raw)},
        {"a": Bits("F32", (10, 8), tensor.raw)},
        {"a": Bits("F32", (80,), tensor.raw)},
        {"a": flip(rng, tensor, 1)},
        {"a": tensor, "b": tensor},
        {"a": tensor, "b": Bits("F32", (0,), b"")},
        {},
    ]
    roots = set()
    for state in variants:
        with df.create(memory(), block_bytes=BLOCK).writer() as writer:
            roots.add(writer.commit(step=0, tensors=given(state, 0, "np"), metadata={"run": len(roots)}).root)
    assert roots == {spec_root(state, BLOCK) for state in variants}
    assert len(roots) == len(variants)


# -- changes are seen by bits -------------------------------------------------------------------------------

FLOATS = [name for name in NUMPY if name.startswith(("F", "BF", "C"))]
WORDS = {
    "F16": (0x3C00, 0x7E00, 0x7C01),
    "BF16": (0x3F80, 0x7FC0, 0x7F81),
    "F32": (0x3F800000, 0x7FC00000, 0x7F800001),
}
WORDS["F64"] = (0x3FF0 << 48, 0x7FF8 << 48, (0x7FF0 << 48) + 1)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
def test_changes_are_found_by_bits(dtype):
    """DF-DTY-03: -0.0 is not 0.0, a NaN is its bits, a sign is a change; nothing is compared by value."""
    one, quiet, signalling = WORDS[dtype]
    size = BITS[dtype] // 8
    sign = 1 << (BITS[dtype] - 1)
    changes = [
        (0, sign),  # 0.0 -> -0.0
        (sign, 0),
        (one, one | sign),  # 1.0 -> -1.0: only the high byte
        (one, one + 1),  # far below any tolerance
        (quiet, quiet + 1),  # another payload
        (quiet, quiet | sign),
        (signalling, quiet),
        (quiet, signalling),
    ]
    rng = np.random.default_rng(7)
    words = np.frombuffer(rng.bytes(600 * size), f"<u{size}").copy()
    words[:300] = quiet  # unchanged NaNs around
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        for number, (before, after) in enumerate(changes):
            words[[17, 590]] = before
            writer.commit(step=3 * number, tensors={"w": words.view(NUMPY[dtype]).copy()})
            words[[17, 590]] = after
            info = writer.commit(step=3 * number + 1, tensors={"w": words.view(NUMPY[dtype])})
            assert info.changed_blocks == 2
            assert store.version().get_bytes("w").data.tobytes() == words.tobytes()
            again = writer.commit(step=3 * number + 2, tensors={"w": words.view(NUMPY[dtype]).copy()})
            assert (again.changed_blocks, again.payload_bytes, again.packs) == (0, 0, 0)  # NaNs cost nothing
            assert again.root == info.root


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_unchanged_bits_cost_nothing(framework):
    """DF-DTY-03: random bits of every dtype, NaNs among them, given again in another layout."""
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors=given(STATES[0], 0, framework))
        info = writer.commit(step=1, tensors=given(STATES[0], 1, framework))
    assert (info.changed_blocks, info.payload_bytes, info.packs, info.read_bytes) == (0, 0, 0, 0)
    assert not store.version().map.fresh.any()
    check(store.version(), STATES[0])


def test_one_change_costs_one_block():
    """DF-BLK-02, DF-MAN-07: the block that changed is fresh, its neighbours are not."""
    words = np.random.default_rng(8).integers(0, 1 << 16, (40, 128), np.uint16)
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors={"w": words.view(ml_dtypes.bfloat16)})
        words = words.copy()
        words[23, 5] += 1
        info = writer.commit(step=1, tensors={"w": words.view(ml_dtypes.bfloat16)})
    assert (info.changed_blocks, info.blocks) == (1, 40)
    assert info.payload_bytes < 20
    assert store.version().map.fresh.tolist() == [0] * 23 + [1] + [0] * 16
    assert store.version().get_bytes("w").data.tobytes() == words.tobytes()


# -- content that is stored already -------------------------------------------------------------------------


def pieces(version, name):
    rows = version.map.blocks(version.map.row(name))
    found = slice(int(version.map.piece_start[rows.start]), int(version.map.piece_start[rows.stop]))
    columns = (version.map.pack, version.map.offset, version.map.length, version.map.encoding)
    return [column[found].tolist() for column in columns]


def fresh(version, name):
    return version.map.fresh[version.map.blocks(version.map.row(name))].tolist()


@pytest.mark.parametrize("keyframe", ["planes", "raw"])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_tied_tensors_are_stored_once(keyframe, framework):
    """DF-DIG-02: two names of one storage share their pieces, at first and when both change; each is
    readable.
    """
    rng = np.random.default_rng(9)
    tensor, other = random_bits(rng, "BF16", (32, 40)), random_bits(rng, "BF16", (32, 40))
    states = [{"embed": tensor, "head": tensor, "w": other}]
    changed = flip(rng, tensor)
    states.append({"embed": changed, "head": changed, "w": other})
    states.append({"embed": changed, "head": flip(rng, changed), "w": other})  # untied
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer(policy=Policy(keyframe=keyframe)) as writer:
        infos = []
        for step, state in enumerate(states):
            tensors = given(state, 0, framework)
            if step < 2:
                tensors["head"] = tensors["embed"]  # one storage
            infos.append(writer.commit(step=step, tensors=tensors))
    assert infos[0].payload_bytes <= 2 * len(tensor.raw)
    assert infos[1].payload_bytes < 3 * 20
    for step, state in enumerate(states):
        check(store.version(step=step), state)
    for step in (0, 1):
        version = store.version(step=step)
        assert pieces(version, "embed") == pieces(version, "head")
    assert sorted(set(fresh(store.version(step=1), "head"))) == [0, 1]
    version = store.version(step=0)
    for step in (1, 2):
        tensors = store.version(step=step).follow(version, version.state_dict())
        check_all(tensors, states[step])
        version = store.version(step=step)


@pytest.mark.parametrize("reopened", [False, True])
def test_equal_digests_are_no_equal_content(reopened, monkeypatch):
    """DF-DIG-02: under a digest that sees the first 8 bytes only, blocks that differ behind them stay
    apart.
    """
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: (bytes(memoryview(data)[:8]) * 2).ljust(16))
    rng = np.random.default_rng(20)
    start = rng.bytes(8)
    states = [{name: Bits("U8", (256,), start + rng.bytes(248)) for name in "ab"}]
    states.append(states[0] | {name: Bits("U8", (256,), start + rng.bytes(248)) for name in "cd"})
    store = df.create(memory(), block_bytes=BLOCK)
    writer = store.writer()
    for step, state in enumerate(states):
        if reopened:
            writer.close()
            writer = store.writer()
        writer.commit(step=step, tensors=given(state, 0, "np"), allow_set_change=True)
    writer.close()
    for step, state in enumerate(states):
        check(store.version(step=step), state)


def test_tensors_that_become_tied():
    """DF-MAN-07: one chain, but `fresh` counts from each one's own parent, which was not the same."""
    rng = np.random.default_rng(19)
    a, b = random_bits(rng, "BF16", (16, 16)), random_bits(rng, "BF16", (16, 16))
    c = flip(rng, a, 10)
    states = [{"a": a, "b": b, "c": c}, {"a": c, "b": c, "c": c}, {"a": c, "b": flip(rng, c, 2), "c": c}]
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        for step, state in enumerate(states):
            writer.commit(step=step, tensors=given(state, 0, "np"))
    previous = store.version(step=0)
    for step in (1, 2):
        version = store.version(step=step)
        check(version, states[step])
        check_all(version.follow(previous, previous.state_dict()), states[step])
        previous = version
    tied = store.version(step=1)
    assert pieces(tied, "a") == pieces(tied, "b")
    assert [set(fresh(tied, name)) for name in "abc"] == [{1}, {255}, {0}]


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("keyframe", ["planes", "raw"])
def test_moved_content_is_not_stored_again(keyframe, reopened):
    """DF-DIG-02: renamed tensors and swapped experts take the chains that exist; followers get the right
    bits.
    """
    rng = np.random.default_rng(10)
    before = {f"experts.{i}.w": random_bits(rng, "BF16", (32, 40)) for i in range(6)}
    before["name"] = random_bits(rng, "F32", (11, 64))
    edited = {name: flip(rng, tensor) for name, tensor in before.items()}  # so that chains have two pieces
    after = {f"experts.{i}.w": edited[f"experts.{(i + 1) % 6}.w"] for i in range(6)}
    after["renamed"] = edited["name"]
    store = df.create(memory(), block_bytes=BLOCK)
    writer = store.writer(policy=Policy(keyframe=keyframe))
    writer.commit(step=0, tensors=given(before, 0, "np"))
    writer.commit(step=1, tensors=given(edited, 0, "np"))
    if reopened:
        writer.close()
        writer = df.open(store.url).writer(policy=Policy(keyframe=keyframe))
    info = writer.commit(step=2, tensors=given(after, 0, "np"), allow_set_change=True)
    writer.close()
    assert (info.payload_bytes, info.packs) == (0, 0)
    # Equal digests are confirmed by bytes. They are read where the writer does not hold them (any more).
    assert (info.read_bytes > 6 * 2560) == reopened
    previous, version = store.version(step=1), store.version(step=2)
    check(version, after)
    check_all(version.follow(previous, previous.state_dict()), after)
    assert pieces(version, "renamed") == pieces(previous, "name")
    assert set(fresh(version, "renamed")) == {255}


@pytest.mark.parametrize("keyframe", ["planes", "raw"])
def test_blocks_that_move_inside_a_tensor(keyframe):
    """DF-DIG-02: rolled forwards and backwards; what a block was is compared before another one takes its
    place.
    """
    rng = np.random.default_rng(18)
    first = random_bits(rng, "U8", (10, BLOCK))
    rows = [first.raw[at : at + BLOCK] for at in range(0, 10 * BLOCK, BLOCK)]
    orders = [rows, rows[1:] + rows[:1], rows[7:] + rows[:7], rows[::-1], rows[:5] * 2, rows[5:] + rows[:5]]
    states = [{"w": Bits("U8", (10, BLOCK), b"".join(order))} for order in orders]
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer(policy=Policy(keyframe=keyframe)) as writer:
        payloads = [
            writer.commit(step=step, tensors=given(state, 0, "np")).payload_bytes
            for step, state in enumerate(states)
        ]
    assert payloads[1:5] == [0, 0, 0, 0]
    assert payloads[5] == 5 * BLOCK  # gone from the parent: stored again
    version = store.version(step=0)
    for step, state in enumerate(states):
        following = store.version(step=step)
        check(following, state)
        check_all(following.follow(version, version.state_dict()), state)
        version = following


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_of_several_slabs(threads, monkeypatch):
    """A tensor goes through the writer in slabs; what it gives does not depend on where they are cut."""
    monkeypatch.setattr("deltaformat.stage.SLAB_BYTES", 3 * BLOCK)
    store = df.create(memory(), block_bytes=BLOCK)
    infos = commit_all(store, policy=Policy(max_chain=3, threads=threads))
    for step, state in enumerate(STATES):
        check(store.version(step=step), state)
        assert infos[step].root == spec_root(state, BLOCK)
    assert store.verify(all=True).findings == []


def test_retyped_and_reshaped_tensors_reuse_their_pieces():
    """DF-MAN-08, DF-ENC-07: the same bytes under another dtype or shape are the parent's blocks, and
    change as such.
    """
    rng = np.random.default_rng(11)
    first = random_bits(rng, "F32", (40, 20))
    forms = [
        ("I32", (40, 20)),
        ("BF16", (80, 20)),
        ("U8", (3200,)),
        ("F64", (4, 100)),
        ("C64", (400,)),
        ("F4", (6400,)),
    ]
    states = [{"w": first}]
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors=given(states[0], 0, "np"))
        for number, (dtype, shape) in enumerate(forms):
            state = {"w": Bits(dtype, shape, states[-1]["w"].raw)}
            info = writer.commit(step=2 * number + 1, tensors=given(state, 0, "np"))
            assert (info.payload_bytes, info.changed_blocks) == (0, 0)
            version = store.version()
            assert set(fresh(version, "w")) == {0}
            assert info.root == spec_root(state, BLOCK)
            states += [state, {"w": flip(rng, state["w"], 2)}]
            info = writer.commit(step=2 * number + 2, tensors=given(states[-1], 0, "np"))
            assert info.payload_bytes < 2 * 25
    for step, state in enumerate(states):
        check(store.version(step=step), state)


def test_appended_rows_leave_the_others_alone():
    """DF-BLK-02, DF-MAN-08: full blocks stay the parent's; only the short last one and new ones are
    stored.
    """
    rng = np.random.default_rng(12)
    rows = [random_bits(rng, "BF16", (37, 20))]  # 1480 bytes: five blocks and a short one
    rows.append(Bits("BF16", (50, 20), rows[0].raw + rng.bytes(13 * 40)))
    rows.append(Bits("BF16", (20, 20), rows[1].raw[: 20 * 40]))
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        for step, tensor in enumerate(rows):
            writer.commit(step=step, tensors={"w": tensor.numpy()})
    assert fresh(store.version(step=1), "w") == [0] * 5 + [255] * 3
    assert fresh(store.version(step=2), "w") == [0] * 3 + [255]
    for step, tensor in enumerate(rows):
        check(store.version(step=step), {"w": tensor})


def test_a_block_that_returns_to_an_older_version():
    """A chain goes back and forth: every state is rebuilt from pieces, never from a value that was
    remembered.
    """
    rng = np.random.default_rng(13)
    a = random_bits(rng, "BF16", (16, 16))
    b = flip(rng, a, 5)
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer(policy=Policy(max_chain=5)) as writer:
        for step in range(12):
            writer.commit(step=step, tensors={"w": (a, b)[step % 2].numpy()})
    for step in range(12):
        check(store.version(step=step), {"w": (a, b)[step % 2]})


# -- memory that changes hands ------------------------------------------------------------------------------


@pytest.mark.parametrize("keyframe", ["planes", "raw"])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_tensors_mutated_after_a_background_commit(keyframe, framework):
    """`block=False` has copied all that it needs when it returns."""
    rng = np.random.default_rng(14)
    states = []
    store = df.create(memory(), block_bytes=BLOCK)
    tensors = {f"w{i}": random_bits(rng, "F32", (64, 32)).numpy() for i in range(8)}
    if framework == "pt":
        tensors = {name: torch.from_numpy(array) for name, array in tensors.items()}
    with store.writer(policy=Policy(keyframe=keyframe)) as writer:
        futures = []
        for step in range(6):
            states.append(
                {name: Bits("F32", (64, 32), bytes(np.asarray(t).data)) for name, t in tensors.items()}
            )
            futures.append(writer.commit(step=step, tensors=tensors, block=False))
            for tensor in tensors.values():
                integers = tensor.view(torch.int32) if framework == "pt" else tensor.view(np.int32)
                integers[step :: 1 + step * 7] += 1 + step
        assert [future.result().step for future in futures] == list(range(6))
    for step, state in enumerate(states):
        check(store.version(step=step), state)


@pytest.mark.parametrize(("keyframe", "pack_bytes"), [("planes", 4096), ("raw", 4096), ("raw", 500)])
@pytest.mark.parametrize("block", [True, False])
def test_a_stream_that_reuses_its_buffer(keyframe, pack_bytes, block):
    """One tensor is in memory at a time: what was yielded may be overwritten as soon as the next is asked
    for.
    """
    rng = np.random.default_rng(15)
    states = [{f"w{i}": random_bits(rng, "F16", (40, 20)) for i in range(12)}]
    for _ in range(2):
        states.append({name: flip(rng, tensor) for name, tensor in states[-1].items()})
    states.append({name: random_bits(rng, "F16", (40, 20)) for name in states[-1]})

    def stream(state):
        buffer = np.empty((40, 20), np.float16)
        for name, tensor in state.items():
            buffer.view(np.uint16)[:] = tensor.numpy().view(np.uint16)
            yield name, buffer
        buffer.view(np.uint16)[:] = 0xFFFF

    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer(policy=Policy(keyframe=keyframe, pack_bytes=pack_bytes)) as writer:
        for step, state in enumerate(states):
            writer.commit(step=step, tensors=stream(state), block=block)
    for step, state in enumerate(states):
        check(store.version(step=step), state)


def test_what_is_returned_is_the_callers():
    """Writing to a returned tensor changes neither what is read later nor what the writer compares with."""
    rng = np.random.default_rng(16)
    tensor = random_bits(rng, "F32", (30, 30))
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        array = tensor.numpy()
        writer.commit(step=0, tensors={"w": array})
        array[:] = 0
        version = store.version()
        version.get_tensor("w")[:] = 1
        version.get_slice("w")[3:5][:] = 1
        version.state_dict()["w"][:] = 1
        check(version, {"w": tensor})
        info = writer.commit(step=1, tensors={"w": tensor.numpy()})
        assert info.changed_blocks == 0


@pytest.mark.parametrize("dtype", list(TORCH))
def test_frameworks_read_each_others_weights(dtype):
    rng = np.random.default_rng(17)
    state = {"w": random_bits(rng, dtype, (6, 4, 10)), "empty": Bits(dtype, (4, 0), b"")}
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors=given(state, 1, "pt"))
        writer.commit(step=1, tensors=given(state, 2, "np"))
        state2 = {name: flip(rng, tensor) for name, tensor in state.items()}
        writer.commit(step=2, tensors=given(state2, 3, "pt"))
    for framework in ("np", "pt"):
        check_all(store.version(step=1, framework=framework).state_dict(), state)
        check_all(store.version(step=2, framework=framework).state_dict(), state2)


def test_torch_views_of_every_kind():
    """DF-BLK-01: transposed, expanded, conjugated and negated views, parameters and 0-d tensors, by their
    elements.
    """
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6) - 7.5
    numbers = torch.complex(base, -base)
    tensors = {
        "transposed": base.T,
        "expanded": base[:, :1].expand(4, 5),
        "offset": base.reshape(-1)[5:9],
        "conjugated": numbers.conj(),
        "imaginary of conjugated": numbers.conj().imag,
        "0-d": base[2, 3],
        "parameter": torch.nn.Parameter(base),
        "flipped": base.flip(0),
    }
    store = df.create(memory(), block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
    version = store.version(framework="pt")
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        found = version.get_tensor(name)
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
        assert found.numpy().tobytes() == plain.numpy().tobytes(), name


def test_a_long_read_has_few_requests():
    """SPEC 13, step 5: pieces that lie together are fetched together."""
    watched = Recorder(open_storage(memory(), create=True))
    store = df.create(watched, block_bytes=BLOCK)
    commit_all(store, STATES[:2])
    watched.clear()
    with df.open(watched).version() as version:
        assert watched.of("get_ranges") == []  # DF-RD-01
        version.state_dict()
    assert len(watched.of("get_ranges")) <= 3
