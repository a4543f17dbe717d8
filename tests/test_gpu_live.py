"""A server's weights, changed in place and hashed where they are (DF-RD-02, DF-RD-03, DF-DIG-01)."""

import numpy as np
import pytest
import torch
from test_gpu_writer import contiguous, history, step, weights
from writertools import make

import deltaformat as df
from deltaformat import inplace
from deltaformat import live as live_module
from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    StoreError,
)
from deltaformat.gpu import BlockDiff
from deltaformat.gpu.transfer import traffic
from deltaformat.torch import Live, root


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(tensors, state):
    return tensors.keys() == state.keys() and all(
        tensors[name].dtype == state[name].dtype and torch.equal(bits(tensors[name]), bits(state[name]))
        for name in state
    )


@pytest.fixture(scope="module", params=["xxh3-128", "blake3-256"])
def run(request):
    states = [contiguous(state) for state in history(6)]
    store = make(digest=request.param)
    with store.writer(policy=df.Policy(max_chain=3)) as writer:
        for number, state in enumerate(states):
            writer.commit(step=number, tensors=state)
    return store, states


def test_step_by_step(run):
    store, states = run
    tensors = contiguous(states[0])
    live = Live(store.version(step=0), tensors, engine="torch")
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for number in range(1, 6):
        version = store.version(step=number)
        assert live.advance(version) == version.root == live.root == live.verify()
        assert live.version is version
        assert same(tensors, states[number])
        assert root(tensors, block_bytes=256, digest=version.digest, engine="torch") == version.root
    assert addresses == {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_there_and_back(run):
    """Any version can follow any other; from one that is not its parent it is read as a whole."""
    store, states = run
    tensors = contiguous(states[4])
    live = Live(store.version(step=4), tensors, engine="torch")
    for number in (1, 1, 5, 0, 1):
        live.advance(store.version(step=number))
        assert same(tensors, states[number])


def test_with_triton():
    pytest.importorskip("triton")
    first = {name: t.contiguous() for name, t in weights(4, count=1).items() if name in ("w0", "f8", "i64")}
    states = [first, step(first, 1), step(first, 2, dense=("f8",))]
    store = make()
    with store.writer() as writer:
        for number, state in enumerate(states):
            writer.commit(step=number, tensors=state)
    tensors = contiguous(states[0])
    live = Live(store.version(step=0), tensors, engine="triton")
    for number in (1, 2):
        live.advance(store.version(step=number))
        assert same(tensors, states[number])


def test_only_changes_cross():
    states = [{f"w{n}": weights(n)["w0"] for n in range(10)}]
    states.append(step(states[0], 1))
    store = make()
    with store.writer() as writer:
        for number, state in enumerate(states):
            writer.commit(step=number, tensors=state)
    tensors = contiguous(states[0])
    live = Live(store.version(step=0), tensors, engine="torch")
    before = traffic.snapshot()
    live.advance(store.version(step=1))
    crossed = traffic.snapshot() - before
    pairs = zip(states[0].values(), states[1].values(), strict=True)
    changed = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in pairs)
    digests = 16 * store.version(step=1).map.block_count
    assert crossed == {("up", "changes"): 6 * changed, ("down", "digests"): digests, ("host", "waits"): 1}


def test_what_begins_crosses_in_windows(run, monkeypatch):
    """All weights cross once, many tensors at a time, and none takes more memory than a window."""
    store, states = run
    tensors = contiguous(states[0])
    size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    for window, most in ((1 << 20, 1), (700, 24)):
        monkeypatch.setattr(live_module, "WINDOW_BYTES", window)
        before = traffic.snapshot()
        live = Live(store.version(step=0), tensors, engine="torch")
        crossed = traffic.snapshot() - before
        assert crossed["down", "weights"] == size
        assert crossed["host", "waits"] <= 1 + most
    live.advance(store.version(step=1))
    assert same(tensors, states[1])


def test_tied_tensors(run):
    """Two names of one memory are changed once."""
    store, states = run
    tensors = contiguous(states[0])
    tensors["tied"] = tensors["w0"].view(states[0]["tied"].shape)
    live = Live(store.version(step=0), tensors, engine="torch")
    for number in (1, 2):
        live.advance(store.version(step=number))
        assert same(tensors, states[number])


# -- faults -------------------------------------------------------------------------------------------------


def test_what_was_changed_by_others_is_found(run):
    """The state is left as it was before, change and all; mended, it goes on."""
    store, states = run
    for number in (1, 2):  # step 2 replaces whole blocks, too
        tensors = contiguous(states[number - 1])
        live = Live(store.version(step=number - 1), tensors, engine="torch")
        bits(tensors["w1"])[700] ^= 4
        before = contiguous(tensors)
        with pytest.raises(CorruptError, match=r"w1.*block 2.*left as they were"):
            live.advance(store.version(step=number))
        assert same(tensors, before)
        with pytest.raises(CorruptError, match="w1"):
            live.verify()
        bits(tensors["w1"])[700] ^= 4
        live.advance(store.version(step=number))
        assert same(tensors, states[number])


def test_a_fetch_that_fails_changes_nothing(run, monkeypatch):
    store, states = run
    tensors = contiguous(states[0])
    live = Live(store.version(step=0), tensors, engine="torch")
    version = store.version(step=1)
    with monkeypatch.context() as patch:

        def fail(*_):
            raise StoreError(df.errors.ErrorCode.STORE_FAILED, "no", where="here")

        patch.setattr(version._context.sources, "ranges", fail)
        with pytest.raises(StoreError):
            live.advance(version)
    assert same(tensors, states[0])
    live.advance(version)
    assert same(tensors, states[1])


def test_a_device_that_adds_wrongly(run, monkeypatch):
    store, states = run
    tensors = contiguous(states[0])
    live = Live(store.version(step=0), tensors, engine="torch")
    uploaded = inplace.Uploaded

    def wrong(table, changes, **options):
        first = changes[0] if changes else None
        if first is not None and first.changes is not None:
            shifted = type(first.changes)(
                first.changes.width, first.changes.positions, first.changes.differences + 1
            )
            changes = [BlockDiff(first.tensor, first.block, shifted, None), *changes[1:]]
        return uploaded(table, changes, **options)

    with monkeypatch.context() as patch:
        patch.setattr(inplace, "Uploaded", wrong)
        with pytest.raises(CorruptError, match="left as they were"):
            live.advance(store.version(step=1))
    assert same(tensors, states[0])
    live.advance(store.version(step=1))
    assert same(tensors, states[1])


@pytest.mark.parametrize("engine", ["torch", "triton"])
@pytest.mark.parametrize("error", [LimitError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["hash", "launch"])
def test_a_step_that_is_broken_off(moment, error, engine, monkeypatch):
    """DF-RD-03: whatever ends it, the tensors are as they were, and the next attempt works.

    It ends while it hashes, or when the second launch is made that adds differences.
    """
    if engine == "triton":
        pytest.importorskip("triton")
    first = {
        name: t.contiguous() for name, t in weights(4, count=2).items() if name in ("w0", "w1", "f8", "f32")
    }
    states = [first, step(first, 1, dense=("w1",))]
    store = make()
    with store.writer() as writer:
        for number, state in enumerate(states):
            writer.commit(step=number, tensors=state)
    tensors = contiguous(states[0])
    live = Live(store.version(step=0), tensors, engine=engine)
    failure = error() if error is KeyboardInterrupt else error(ErrorCode.LIMIT_EXCEEDED, "no", where="cuda:0")
    reached = []

    def fail(*_, **__):
        reached.append(moment)
        raise failure

    add, groups = inplace.Uploaded._add, []

    def adding(self, group, **options):
        groups.append(group)
        if len(groups) != 2:
            return add(self, group, **options)
        return fail()

    with monkeypatch.context() as patch:
        if moment == "hash":
            patch.setattr(inplace, "digests_of", fail)
        else:
            patch.setattr(inplace.Uploaded, "_add", adding)
        with pytest.raises(error):
            live.advance(store.version(step=1))
    assert reached == [moment]
    assert same(tensors, states[0])
    assert live.version.step == 0
    live.advance(store.version(step=1))
    assert same(tensors, states[1])


def test_refusals(run):
    store, states = run
    version, tensors = store.version(step=0), contiguous(states[0])
    with pytest.raises(CorruptError, match="not this version"):
        Live(store.version(step=1), tensors, engine="torch")
    with pytest.raises(InconsistentError, match="lacks 'w0'"):
        Live(version, {k: v for k, v in tensors.items() if k != "w0"})
    with pytest.raises(InconsistentError, match="torch tensors on one device"):
        Live(version, tensors | {"w0": np.zeros(3)})
    with pytest.raises(InconsistentError, match=r"w0.*F16"):
        Live(version, tensors | {"w0": tensors["w0"].view(torch.float16)})
    with pytest.raises(MalformedError, match=r"'transposed'.*changed in place"):
        Live(version, tensors | {"transposed": states[0]["transposed"].T.contiguous().T})
    fused = torch.cat([bits(tensors["w0"]), bits(tensors["w1"])]).view(torch.bfloat16)
    shared = {"w0": fused[:480].view(24, 20), "w1": fused[240 : 240 + 504].view(24, 21)}
    with pytest.raises(InconsistentError, match="'w0' and 'w1' share"):
        Live(version, tensors | shared)


def test_another_set_is_refused():
    states = [weights(1, count=1), {"w0": weights(1)["w0"]}]
    states = [contiguous(state) for state in states]
    store = make()
    with store.writer() as writer:
        for number, state in enumerate(states):
            writer.commit(step=number, tensors=state, allow_set_change=True)
    live = Live(store.version(step=0), contiguous(states[0]))
    with pytest.raises(InconsistentError, match="other names, dtypes or shapes"):
        live.advance(store.version(step=1))


def test_an_empty_state():
    store = make()
    with store.writer() as writer:
        writer.commit(step=0, tensors={})
        writer.commit(step=1, tensors={})
    live = Live(store.version(step=0), {})
    assert live.advance(store.version(step=1)) == store.version(step=1).root


# -- follow -------------------------------------------------------------------------------------------------


def test_follow_takes_the_same_way(run):
    """`Version.follow` leaves what it was given as it is, and gives what it gives on the host."""
    store, states = run
    for number in range(1, 6):
        before = {n: t.T.contiguous().T if t.dim() == 2 else t for n, t in states[number - 1].items()}
        kept = contiguous(before)
        version = store.version(step=number, framework="pt")
        found = version.follow(store.version(step=number - 1), before, engine="torch")
        assert same(found, states[number])
        assert same(before, kept)
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in states[number].items()}
    with pytest.raises(CorruptError):
        version.follow(store.version(step=4), states[3], engine="torch")
