"""A follower: what it fetches, what it hands out, what it writes into live weights, and what failures
leave."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from bitstates import BITS, UNFRAMED, Bits, check_all, flip, random_bits
from tinystore import BLOCK, DictStorage, content, truth, weights
from watching import Faulty, Recorder, failure

import deltaformat as df
from deltaformat import Policy, destinations, mirror
from deltaformat.destinations import TorchDestination
from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    InconsistentError,
    MalformedError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.patches import BlockChange, ChangeSet, TensorChange, merge_changes, patches_of

REBASING = Policy(max_chain=3)


def arrays(tensors):
    """Live weights: arrays of their own."""
    return {name: np.array(tensor) for name, tensor in tensors.items()}


def committed(store, steps, **options):
    with store.writer(policy=options.pop("policy", None), **options) as writer:
        return [writer.commit(step=step, tensors=weights(step)) for step in steps]


def new_store(storage=None, **options):
    return df.create(DictStorage() if storage is None else storage, block_bytes=BLOCK, **options)


def take(follower, live, **options):
    """Stage, apply and commit; the version that was taken."""
    staged = follower.stage(**options)
    staged.apply_to(live)
    staged.commit()
    return staged


def rebase_packs(store, seqs):
    """Packs that hold nothing but replaced beginnings of chains."""
    found = set()
    for seq in seqs:
        version = store.version(seq=seq).map
        last = np.zeros(len(version.pack), bool)
        fresh = version.fresh.astype(int)
        for block, end in enumerate(version.piece_start[1:]):
            count = int(version.depth[block]) if fresh[block] == 255 else fresh[block]
            last[end - count : end] = True
        added = {ref.key for ref in store.version(seq=seq).commit.objects_added}
        here = {version.packs[pack].key for pack in version.pack[~last]} & added
        found |= here
    return found


# -- following -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_chain", [2, 3, 16])
def test_every_version_is_a_cold_read_of_its_fresh_pieces(max_chain):
    """DF-RD-02, DF-MAN-08: bit for bit, and no byte beyond what each step wrote for its changes."""
    watched = Recorder(DictStorage())
    store = new_store(watched)
    follower, live = df.open(watched).follower(framework="np"), arrays(weights(0))
    rebased = set()
    with store.writer(policy=Policy(max_chain=max_chain)) as writer:
        for step in range(3 * max_chain):
            info = writer.commit(step=step, tensors=weights(step))
            rebased |= rebase_packs(store, [info.seq])
            watched.clear()
            staged = take(follower, live)
            assert (staged.step, staged.seq, staged.root) == (step, info.seq, info.root)
            assert staged.version == f"{info.seq}:{info.root}"
            assert content(live) == truth(step) == content(follower.state_dict())
            calls = watched.of("get_ranges")
            assert not {call.key for call in calls} & rebased
            if step:
                assert sum(call.nbytes for call in calls) == info.payload_bytes
    assert rebased
    assert follower.stage() is None


@pytest.mark.parametrize("skipped", [4, 7, 12])
def test_skipped_versions_cost_what_they_changed(skipped):
    """DF-RD-02: fresh pieces of every version between, none of what re-bases wrote; or a chain from its start
    where that is less.
    """
    watched = Recorder(DictStorage())
    store = new_store(watched)
    follower, live = df.open(watched).follower(framework="np", select=["w"]), arrays(weights(0))
    infos = committed(store, [0])
    take(follower, live)
    infos += committed(store, range(1, skipped + 1), policy=REBASING)
    assert sum(info.rebase_bytes for info in infos) > 0
    maps = [store.version(seq=info.seq).map for info in infos]
    expected, rebased = 0, rebase_packs(store, [info.seq for info in infos])
    chains = set()
    for block in range(*maps[-1].blocks(maps[-1].row("w")).indices(1 << 30)[:2]):
        walked = 0
        for version in maps[1:]:
            end = int(version.piece_start[block + 1])
            walked += int(version.length[end - int(version.fresh[block]) : end].sum())
        start, end = maps[-1].piece_start[block : block + 2]
        cold = int(maps[-1].length[start:end].sum())
        expected += min(walked, cold)
        if cold < walked:
            chains |= {maps[-1].packs[pack].key for pack in maps[-1].pack[start:end]}
    watched.clear()
    staged = take(follower, live)
    assert (staged.step, staged.metrics.lag_steps) == (skipped, skipped)
    assert live["w"].tobytes() == weights(skipped)["w"].tobytes()
    calls = watched.of("get_ranges")
    fetched = sum(call.nbytes for call in calls)
    assert expected <= fetched == staged.metrics.fetch.nbytes
    assert fetched <= 2 * expected  # bytes between two pieces of a small pack come along
    assert {call.key for call in calls} & rebased <= chains


def test_nothing_new_and_waiting():
    """A stage looks once, or waits for as long as it is told."""
    store = new_store()
    follower = store.follower(framework="np")
    with pytest.raises(MissingError) as caught:
        follower.stage()
    assert caught.value.code is ErrorCode.BRANCH_MISSING
    store.writer().close()
    assert follower.stage() is None  # a branch without commits
    timer = threading.Timer(0.3, lambda: committed(store, [0]))
    timer.start()
    staged = follower.stage(timeout=20)
    timer.join()
    assert staged.step == 0
    staged.commit()
    started = time.monotonic()
    assert follower.stage(timeout=0.3) is None
    assert time.monotonic() - started >= 0.3
    for wanted in ({"step": 5}, {"seq": 77}):
        with pytest.raises(MissingError) as caught:
            follower.stage(**wanted)
        assert caught.value.code is ErrorCode.VERSION_MISSING
    assert follower.status().failures == 2
    assert "77" in follower.status().error
    assert follower.status().seq == staged.seq


def test_rewinds_and_forks():
    """DF-LOG-07: a follower goes by seq: it stays where a rewind leaves it, then takes what comes after."""
    storage = DictStorage()
    store = new_store(storage)
    committed(store, range(6), policy=REBASING)
    follower, live = store.follower(framework="np"), arrays(weights(0))
    take(follower, live)
    with store.writer(resume_from=2, policy=REBASING) as writer:
        assert follower.stage() is None
        assert content(live) == truth(5)
        for step in (3, 4):
            writer.commit(step=step, tensors=weights(step, seed=9))
    assert take(follower, live).step == 4
    assert content(live) == truth(4, 9) == content(follower.state_dict())
    store.fork("exp", step=3)
    with store.writer("exp", policy=REBASING) as writer:
        info = writer.commit(step=7, tensors=weights(7, seed=4))
    assert follower.stage() is None  # of another branch
    assert take(follower, live, seq=info.seq).step == 7
    assert content(live) == truth(7, 4)
    assert take(follower, live, step=1).step == 1  # back, as asked
    assert content(live) == truth(1)
    assert take(follower, live).step == 4  # and to the newest
    assert content(live) == truth(4, 9)


def test_an_ancestor_keeps_what_did_not_change():
    """DF-DIG-02: blocks that did not change on either side of a fork are kept, and known by `fresh` alone."""
    watched = Recorder(DictStorage())
    store = new_store(watched)
    committed(store, range(4), policy=Policy(keyframe="raw"))
    follower, live = df.open(watched).follower(framework="np"), arrays(weights(0))
    take(follower, live)
    watched.clear()
    take(follower, live, step=1)
    assert content(live) == truth(1)
    whole = sum(array.nbytes for array in weights(1).values())
    frozen = weights(1)["frozen"].nbytes
    assert sum(call.nbytes for call in watched.of("get_ranges")) <= whole - frozen + 400  # 400: its deltas


def test_versions_between_that_were_collected():
    """DF-GC-05: what lies between may be gone: everything is read anew."""
    from datetime import timedelta

    storage = DictStorage()
    store = new_store(storage)
    committed(store, [0])
    follower, live = df.open(storage).follower(framework="np"), arrays(weights(0))
    take(follower, live)
    committed(store, range(1, 6), policy=REBASING)
    storage.advance(hours=1)
    store.gc(keep_last=1, grace=timedelta(0), dry_run=False)
    storage.advance(hours=1)
    store.gc(keep_last=1, grace=timedelta(0), dry_run=False)
    with pytest.raises(MissingError):
        store.version(step=3)
    assert take(follower, live).step == 5
    assert content(live) == truth(5)


def test_a_walk_has_its_bound(monkeypatch):
    """Beyond a number of versions, everything is read anew."""
    monkeypatch.setattr("deltaformat.lineage.MAX_HOPS", 3)
    store = new_store()
    committed(store, [0])
    follower, live = store.follower(framework="np"), arrays(weights(0))
    take(follower, live)
    committed(store, range(1, 9))
    staged = take(follower, live)
    assert staged.metrics.decode.nbytes == sum(array.nbytes for array in weights(8).values())
    assert content(live) == truth(8)


def test_sets_and_forms_that_change():
    """Tensors that come, go, and change dtype or shape: each version has exactly its own."""
    rng = np.random.default_rng(3)
    first = {
        "a": random_bits(rng, "BF16", (30, 20)),
        "b": random_bits(rng, "F32", (90,)),
        "c": random_bits(rng, "U8", (300,)),
    }
    second = {
        "a": Bits("F16", (30, 20), first["a"].raw),  # the same bytes in another dtype
        "b": Bits("F32", (9, 10), flip(rng, first["b"]).raw),
        "d": random_bits(rng, "I64", (3,)),
        "empty": random_bits(rng, "BF16", (0, 4)),
    }
    third = {"a": flip(rng, second["a"]), "d": second["d"], "c": first["c"]}
    store = new_store()
    follower = store.follower(framework="np")
    with store.writer(policy=REBASING) as writer:
        for step, state in enumerate((first, second, third)):
            tensors = {name: tensor.given for name, tensor in state.items()}
            writer.commit(step=step, tensors=tensors, allow_set_change=True)
            staged = follower.stage()
            before = (first, second, third)[step - 1] if step else {}
            assert set(staged.removed) == set(before) - set(state)
            assert set(staged.specs) == set(state)
            live = {name: random_bits(rng, t.dtype, t.shape).numpy() for name, t in state.items()}
            for name, tensor in before.items():
                if name in state and (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape):
                    live[name] = tensor.numpy()
            staged.apply_to(live)
            staged.commit()
            check_all(live, state)
            check_all(follower.state_dict(), state)


def test_selected_tensors():
    """Others are neither held nor fetched."""
    watched = Recorder(DictStorage())
    store = new_store(watched)
    committed(store, range(3), policy=Policy(pack_bytes=1))
    names = {"noise", "drift/é"}
    for select in (list(names), lambda name: name in names):
        watched.clear()
        follower = df.open(watched).follower(framework="np", select=select)
        follower.stage(step=1).commit()
        assert set(follower.state_dict()) == names
        assert follower.status().mirror_bytes == sum(weights(1)[name].nbytes for name in names)
        first = sum(call.nbytes for call in watched.of("get_ranges"))
        assert first < follower.status().mirror_bytes * 1.5 + 200
        live = {name: np.array(weights(1)[name]) for name in names}
        take(follower, live)
        assert content(live) == {name: truth(2)[name] for name in names}
    with pytest.raises(MissingError) as caught:
        store.follower(select=["w", "nothing"]).stage()
    assert caught.value.code is ErrorCode.TENSOR_MISSING


# -- patches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize("max_bytes", [1, 64, 1000, 1 << 20])
def test_patches_are_absolute_values_at_positions(framework, max_bytes):
    """Applied to the old tensors they give the new ones; each element comes once, and fits the bound."""
    store = new_store()
    committed(store, range(4), policy=REBASING)
    follower = store.follower(framework=framework)
    before = {name: np.zeros_like(t) for name, t in weights(0).items()}
    for step in (0, 1, 3):
        staged = follower.stage(step=step)
        seen = {}
        for name, shape, dtype, indices, values in staged.patches(max_bytes=max_bytes):
            tensor = before[name] = np.array(before[name])
            assert (shape, dtype) == (tensor.shape, staged.specs[name].dtype)
            if framework == "pt":
                assert (indices.dtype, values.device.type) == (torch.int64, "cpu")
                kind = {2: torch.int16}.get(values.element_size())
                values = values.view(kind).numpy().view(tensor.dtype) if kind else values.numpy()
                indices = indices.numpy()
            assert values.dtype == tensor.dtype
            assert len(indices) == len(values) >= 1
            assert len(indices) * (8 + values.itemsize) <= max(max_bytes, 8 + values.itemsize)
            assert indices[0] > seen.get(name, -1)
            assert (np.diff(indices) > 0).all()
            seen[name] = indices[-1]
            tensor.reshape(-1)[indices] = values
        assert content(before) == truth(step)
        assert sorted(seen) == sorted(name for name in staged.changed)
        if step:
            assert "frozen" not in seen
            density = staged.metrics.density
            assert 0 < density < 0.5
        staged.commit()
    with pytest.raises(MalformedError):
        next(follower.stage(step=0).patches(max_bytes=0))


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_every_dtype(dtype):
    """DF-DTY-03: bits of any dtype arrive, in NumPy, in torch, and as bytes where neither has it."""
    rng = np.random.default_rng(5)
    states = [random_bits(rng, dtype, (6, 80))]
    for _ in range(3):
        states.append(flip(rng, states[-1], 5))
    store = new_store()
    with store.writer(policy=REBASING) as writer:
        for step, state in enumerate(states):
            writer.commit(step=step, tensors={"t": state.given})
    for framework in ("np", "pt"):
        follower = store.follower(framework=framework)
        raw = bytearray(len(states[0].raw))
        live = {"t": df.TensorBytes(dtype, (6, 80), raw)}
        if dtype not in UNFRAMED:
            given = states[1].numpy() if framework == "np" else states[1].torch()
            live = {"t": given}
        for step in (0, 1, 3):
            staged = follower.stage(step=step)
            patched = np.frombuffer(states[max(0, step - 1)].raw, np.uint8).copy()
            if step == 3:
                patched[:] = np.frombuffer(states[1].raw, np.uint8)
            for patch in staged.patches(max_bytes=100):
                width = max(1, BITS[dtype] // 8) if BITS[dtype] % 8 == 0 else 1
                values = patch.values
                if framework == "pt":
                    values = values.view(torch.uint8).numpy()
                rows = patched.reshape(-1, width)
                indices = np.asarray(patch.indices)
                rows[indices] = np.ascontiguousarray(values).view(np.uint8).reshape(-1, width)
            assert patched.tobytes() == states[step].raw
            staged.apply_to(live)
            staged.commit()
            if dtype in UNFRAMED:
                assert bytes(raw) == states[step].raw
            else:
                assert states[step].same_bits(live["t"])


def test_merged_changes():
    """Changes of versions that follow each other are one change: the last value, the first old one, each
    once."""
    rng = np.random.default_rng(8)
    for _ in range(60):
        states = [rng.integers(0, 4, 40).astype("<u2")]
        sets = []
        for _ in range(int(rng.integers(1, 5))):
            after = states[-1].copy()
            where = np.sort(rng.choice(20, int(rng.integers(1, 6)), replace=False)).astype(np.uint32)
            after[20 + where] = rng.integers(0, 4, where.size)
            change = BlockChange(20, 20, where, after[20 + where], states[-1][20 + where])
            if rng.random() < 0.2:
                change = BlockChange(20, 20, None, after[20:].copy())
            sets.append(ChangeSet({"t": TensorChange("t", "U16", (40,), [change])}))
            states.append(after)
        merged = merge_changes(sets)
        (tensor,) = merged.tensors.values()
        result = states[0].copy()
        ((_, indices, values),) = patches_of([tensor], 1 << 20)
        assert (np.diff(indices) > 0).all()
        result[indices] = values
        assert (result == states[-1]).all()
        (block,) = tensor.blocks
        if block.old is not None:
            assert (block.old == states[0][20:][block.positions]).all()


def test_merged_changes_of_sets():
    """A tensor that goes, or comes whole, is what the last change says."""
    data = np.arange(12, dtype="<u2")
    patch = BlockChange(0, 12, np.array([3], np.uint32), np.array([99], "<u2"), np.array([3], "<u2"))
    change = ChangeSet({"t": TensorChange("t", "U16", (12,), [patch])})
    whole = ChangeSet({"t": TensorChange("t", "U16", (12,), content=data.view(np.uint8))})
    gone = ChangeSet(removed=("t",))
    assert merge_changes([change, gone]).removed == ("t",)
    assert merge_changes([change, gone]).tensors == {}
    assert merge_changes([gone, whole]).removed == ()
    assert merge_changes([change, whole]).tensors["t"].content.tobytes() == data.tobytes()
    found = merge_changes([whole, change]).tensors["t"].content.view("<u2")
    assert found.tolist() == [0, 1, 2, 99, *range(4, 12)]
    assert data[3] == 3  # what was given stays as it is
    ((_, indices, values),) = patches_of(list(merge_changes([whole, change]).tensors.values()), 1 << 20)
    assert (indices.tolist(), values[3]) == (list(range(12)), 99)


# -- live weights --------------------------------------------------------------------------------------------


def two_steps(tensors, after):
    store = new_store()
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
        writer.commit(step=1, tensors=after)
    follower = store.follower()
    follower.stage(step=0).commit()
    return follower


def model_pair():
    """A torch state and the next, with a tied pair."""
    generator = torch.Generator().manual_seed(2)
    first = {
        "embed": torch.randn(40, 16, generator=generator).bfloat16(),
        "head.bias": torch.randn(50, generator=generator),
        "w": torch.randn(24, 20, generator=generator).half(),
    }
    first["head.weight"] = first["embed"]
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["embed"].view(torch.int16)[5, 3] += 1
    second["head.weight"] = second["embed"]
    second["w"].view(torch.int16)[::5, 7] ^= 3
    return first, second


def bits(tensors):
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


class Tied(torch.nn.Module):
    def __init__(self, state):
        super().__init__()
        self.embed = torch.nn.Embedding(40, 16, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(16, 40, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.w = torch.nn.Parameter(torch.zeros(24, 20, dtype=torch.float16))


def test_tied_storages_are_written_once(monkeypatch):
    first, second = ({k: t for k, t in state.items() if k != "head.bias"} for state in model_pair())
    names = {"embed": "embed.weight", "head.weight": "head.weight", "w": "w"}
    first, second = ({names[k]: t for k, t in state.items()} for state in (first, second))
    store = new_store()
    with store.writer() as writer:
        writer.commit(step=0, tensors=first)
        writer.commit(step=1, tensors=second)
    follower, module = store.follower(), Tied(first)
    written = []
    real = destinations._Array.write
    monkeypatch.setattr(
        destinations._Array, "write", lambda self, *a: (written.append(self.place), real(self, *a))
    )
    take(follower, module.state_dict(), step=0)
    assert bits(module.state_dict()) == bits(first)
    assert len(written) == 2
    written.clear()
    take(follower, module.state_dict())
    assert bits(module.state_dict()) == bits(second)
    assert len(set(written)) == 2
    assert module.head.weight is module.embed.weight  # tied as before


def test_tied_names_that_differ_are_refused():
    first, second = model_pair()
    second["head.weight"] = first["head.weight"]
    follower = two_steps(first, second)
    live = {name: tensor.clone() for name, tensor in first.items()}
    live["head.weight"] = live["embed"]
    before = bits(live)
    with pytest.raises(InconsistentError, match="shares its memory"):
        follower.stage().apply_to(live)
    assert bits(live) == before


WRONG = {
    "dtype": lambda t: t.float(),
    "shape": lambda t: t[:-1],
    "rank": lambda t: t[None],
    "expanded": lambda t: t[:1].expand(24, 20),
    "windows": lambda t: t.reshape(-1).as_strided((24, 20), (1, 1)),
    "read-only array": lambda t: read_only(t.numpy().copy()),
    "list": lambda t: t.tolist(),
    "none": lambda t: None,
    "negated": lambda t: torch._neg_view(t),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "bytes": lambda t: df.TensorBytes("F16", (24, 20), bytes(960)),
}


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("wrong", [*WRONG, "missing", "another version"])
def test_an_apply_that_fails_changes_nothing(wrong):
    """Every name or none: one destination that cannot be written, and nothing is."""
    first, second = model_pair()
    follower = two_steps(first, second)
    live = {name: tensor.clone() for name, tensor in reversed(first.items())}
    right = live["w"]
    if wrong == "missing":
        del live["w"]
    elif wrong == "another version":
        live["w"].view(torch.int16)[5, 7] ^= 255
    else:
        live["w"] = WRONG[wrong](live["w"])
    before = {n: t.clone() for n, t in live.items() if n != "w"}
    staged = follower.stage()
    with pytest.raises((InconsistentError, MalformedError, UnsupportedError)) as caught:
        staged.apply_to(live)
    assert "'w'" in str(caught.value)
    assert bits({n: t for n, t in live.items() if n != "w"}) == bits(before)
    live["w"] = right.copy_(first["w"])
    staged.apply_to(live)  # the next attempt
    staged.apply_to(live)  # twice does no harm
    staged.commit()
    assert bits(live) == bits(second)


def test_a_write_that_fails_is_undone(monkeypatch):
    """In the middle of writing: what was written is put back."""
    first, second = model_pair()
    follower = two_steps(first, second)
    live = {name: tensor.clone() for name, tensor in first.items()}
    live["head.weight"] = live["embed"]
    staged = follower.stage()
    real, left = destinations._Array.write, [1]

    def write(self, *arguments):
        real(self, *arguments)
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("on purpose")

    monkeypatch.setattr(destinations._Array, "write", write)
    with pytest.raises(RuntimeError, match="on purpose"):
        staged.apply_to(live)
    assert bits(live) == bits(first)
    staged.apply_to(live)
    assert bits(live) == bits(second)
    staged.rollback()
    assert bits(live) == bits(first)
    take(follower, live)
    assert bits(live) == bits(second)


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: torch.zeros(48, 40, dtype=t.dtype)[1::2, 3:23].copy_(t),
    "permuted array": lambda t: np.asfortranarray(t.numpy()),
    "reversed array": lambda t: np.ascontiguousarray(t.numpy()[::-1])[::-1],
    "big-endian array": lambda t: t.numpy().astype(">f2"),
    "parameter": lambda t: torch.nn.Parameter(t.clone()),
    "inference": lambda t: inference_clone(t),
}


def inference_clone(tensor):
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_destinations_of_any_layout(layout):
    """Not contiguous, of another byte order, a parameter: the bits arrive where they belong."""
    first, second = model_pair()
    follower = two_steps(first, second)
    live = {name: tensor.clone() for name, tensor in first.items()}
    live["w"] = LAYOUTS[layout](live["w"])
    take(follower, live)
    found = live["w"]
    if isinstance(found, np.ndarray):
        found = torch.from_numpy(np.ascontiguousarray(found).astype("<f2"))
    assert bits(live | {"w": found}) == bits(second)
    follower.load_into(live)


@pytest.mark.parametrize("layout", ["plain", "fortran", "strided"])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8", "C64", "F8_E4M3", "F64", "U16", "I8"])
def test_destinations_on_devices(dtype, layout):
    """The way that torch tensors off the host take, tried on the host: by index, in integers."""
    rng = np.random.default_rng(4)
    old = random_bits(rng, dtype, (12, 10))
    live = old.torch(layout)
    new = flip(rng, old, 6)
    width = BITS[dtype] // 8
    before, after = (np.frombuffer(b.raw, f"<u{width}") for b in (old, new))
    _, _, memory = destinations.writable_bits(live)
    destination = TorchDestination(memory)
    where = np.flatnonzero(before != after).astype(np.uint32)
    where = where[where >= 30] - 30
    assert (destination.read(30, 60, where[where < 60]) == before[30:90][where[where < 60]]).all()
    assert (destination.read(30, 60, None) == before[30:90]).all()
    destination.write(0, 30, None, after[:30])
    destination.write(30, 90, where, after[30:][where])
    assert new.same_bits(live)
    assert destination.place == TorchDestination(memory).place


def test_bfloat16_arrays_and_scalars():
    """NumPy: extended dtypes, 0-d arrays; a scalar cannot be written."""
    follower = new_store()
    committed(follower, range(2))
    follower = follower.follower(framework="np")
    live = arrays(weights(0))
    assert live["w"].dtype == ml_dtypes.bfloat16
    take(follower, live)
    assert content(live) == truth(1)
    live["step"] = np.float32(0)
    with pytest.raises(MalformedError, match="cannot be written"):
        follower.load_into(live)


def test_load_into():
    """The version that was taken, whole, for weights that come later; the mirror is verified again."""
    store = new_store()
    committed(store, range(3))
    follower = store.follower(framework="np")
    for empty in (follower.state_dict, lambda: follower.load_into({})):
        with pytest.raises(MissingError):
            empty()
    follower.stage(step=1).commit()
    live = arrays(weights(0, seed=5))
    follower.load_into(live)
    assert content(live) == truth(1)
    follower._mirror._data["w"][7] ^= 1
    with pytest.raises(CorruptError):
        follower.load_into(live)
    with pytest.raises(CorruptError):
        follower.state_dict()
    assert content(live) == truth(1)


# -- failures ------------------------------------------------------------------------------------------------


def test_every_operation_of_the_store_may_fail():
    """DF-RD-03: the old version stays current; the next attempt in the same process succeeds."""
    storage = DictStorage()
    faulty = Faulty(storage)
    store = new_store(storage)
    committed(store, range(2))
    follower, live = df.open(faulty).follower(framework="np"), arrays(weights(0))
    take(follower, live)
    step, failed = 1, 0
    for _ in range(3):
        committed(store, range(step + 1, step + 4), policy=REBASING)
        step += 3
        for nth in range(100):
            left = [nth]

            def fault(operation, key, left=left):
                left[0] -= 1
                return failure(key) if left[0] < 0 else None

            faulty.fault = fault
            try:
                staged = follower.stage()
            except StoreError:
                failed += 1
                assert content(follower.state_dict()) == content(live) == truth(step - 3)
                assert follower.status().failures == nth + 1
                continue
            finally:
                faulty.fault = faulty.none
            break
        assert staged.step == step
        staged.apply_to(live)
        staged.commit()
        assert follower.status().failures == 0
        assert content(live) == content(follower.state_dict()) == truth(step)
    assert failed > 9


def test_what_is_damaged_is_refused():
    """DF-DIG-01: no byte that does not verify reaches the mirror or live weights."""
    storage = DictStorage()
    store = new_store(storage)
    committed(store, [0])
    follower, live = df.open(storage).follower(framework="np"), arrays(weights(0))
    take(follower, live)
    committed(store, [1])
    version = store.version()
    (pack,) = {ref.key for ref in version.commit.objects_added if ref.key.startswith("packs/")}
    data = storage.objects[pack]
    for at in range(len(data) - 60, len(data)):
        storage.objects[pack] = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        with pytest.raises((CorruptError, MalformedError, UnsupportedError)):
            follower.stage()
    assert content(follower.state_dict()) == content(live) == truth(0)
    storage.objects[pack] = data
    take(follower, live)
    assert content(live) == truth(1)


def test_rollback_puts_back_what_was_applied():
    store = new_store()
    committed(store, range(3))
    follower, live, other = store.follower(framework="np"), arrays(weights(0)), arrays(weights(0))
    take(follower, live, step=0)
    staged = follower.stage(step=1)
    staged.apply_to(live)
    staged.apply_to(other)
    assert content(live) == content(other) == truth(1)
    later = follower.stage()  # rolls it back
    assert content(live) == content(other) == truth(0)
    for over in (staged.commit, lambda: staged.apply_to(live), lambda: next(staged.patches())):
        with pytest.raises(InconsistentError, match="over"):
            over()
    later.apply_to(live)
    later.commit()
    with pytest.raises(InconsistentError, match="committed"):
        later.rollback()
    later.apply_to(other)  # of the latest, after its commit, too
    assert content(live) == content(other) == truth(2)
    with follower.stage(step=1) as again:
        again.apply_to(live)
    assert content(live) == truth(2)
    with pytest.raises(MalformedError), follower.stage(step=1) as again:
        next(again.apply_to(live) or again.patches(max_bytes=0))
    assert content(live) == truth(2)


def test_a_commit_that_fails_is_undone(monkeypatch):
    """The mirror holds one version, whole: the old one, until the commit has succeeded."""
    store = new_store()
    committed(store, range(3))
    follower, live = store.follower(framework="np"), arrays(weights(0))
    take(follower, live, step=0)
    real, calls = mirror.write_block, [0]
    for nth in range(1, 50):
        calls[0] = 0

        def write(*arguments, nth=nth, **options):
            calls[0] += 1
            real(*arguments, **options)
            if calls[0] == nth:
                raise KeyboardInterrupt

        staged = follower.stage()
        monkeypatch.setattr(mirror, "write_block", write)
        try:
            staged.commit()
        except KeyboardInterrupt:
            monkeypatch.undo()
            assert content(follower.state_dict()) == truth(0)
            assert follower.status().step == 0
            if nth % 2:
                staged.commit()  # the same again
                take(follower, live, step=0)
        else:
            break
        finally:
            monkeypatch.undo()
    assert nth > 3
    assert content(follower.state_dict()) == truth(2)


def test_watch():
    """Newest first, what comes in between is skipped; a store that fails is asked again."""
    storage = DictStorage()
    faulty = Faulty(storage)
    store = new_store(storage)
    reader = df.open(faulty)
    follower, live, seen = reader.follower(framework="np"), arrays(weights(0)), []
    looks, failures = [0], []

    def told(error, wait):
        assert error.passing
        failures.append(wait)

    def stop():
        looks[0] += 1
        if looks[0] == 3:
            committed(store, range(3))
        if looks[0] == 5:
            left = [2]

            def fault(operation, key):
                left[0] -= 1
                return failure(key) if left[0] >= 0 else None

            faulty.fault = fault
            committed(store, [3])
        return looks[0] > 12

    for staged in follower.watch(poll=0.001, stop=stop, on_error=told):
        staged.apply_to(live)
        assert content(live) == truth(staged.step)
        seen.append(staged.step)
        if staged.step == 3 and seen.count(3) == 1:
            continue  # neither committed nor rolled back: it comes again, from the version before
        staged.commit()
    assert seen == [2, 3, 3]
    assert looks[0] == 13
    assert failures == [0.002, 0.004]


def test_metrics_and_status():
    told = []
    store = new_store()
    infos = committed(store, range(4))
    follower = store.follower(framework="np", metrics=told.append)
    live = arrays(weights(0))
    take(follower, live, step=1)
    take(follower, live)
    first, second = told
    elements = sum(np.asarray(t).size for t in weights(0).values())
    assert (first.previous_seq, first.lag_steps, first.density) == (None, 0, 1.0)
    assert (second.previous_seq, second.seq, second.step, second.lag_steps) == (
        infos[1].seq,
        infos[3].seq,
        3,
        2,
    )
    assert second.version == f"{infos[3].seq}:{infos[3].root}"
    changed = sum(
        int(
            (
                np.asarray(a).reshape(-1).view(f"u{a.itemsize}")
                != np.asarray(b).reshape(-1).view(f"u{b.itemsize}")
            ).sum()
        )
        for a, b in zip(weights(1).values(), weights(3).values(), strict=True)
        if np.asarray(a).size
    )
    assert (second.changed, second.elements) == (changed, elements)
    for metrics in told:
        for phase in (metrics.find, metrics.fetch, metrics.decode, metrics.verify, metrics.apply):
            assert phase.nbytes > 0
            assert phase.seconds > 0
        assert 0 <= metrics.lag_seconds < 600
        assert metrics.decode.nbytes == metrics.verify.nbytes
    status = follower.status()
    assert (status.seq, status.step, status.mirror_seq, status.leading) == (
        infos[3].seq,
        3,
        infos[3].seq,
        True,
    )
    assert (status.failures, status.error, status.branch) == (0, None, "main")
    assert status.mirror_bytes == sum(np.asarray(t).nbytes for t in weights(0).values())
    follower.close()
    for use in (follower.stage, follower.state_dict, lambda: next(follower.watch())):
        with pytest.raises(MalformedError, match="closed"):
            use()
