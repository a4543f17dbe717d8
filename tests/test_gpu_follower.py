"""A follower changes live tensors where they are, and checks them there (DF-RD-02, DF-RD-03, DF-DIG-01).

The CPU plays the device: `device` names an engine, so that torch tensors of the host go the same way. What
crosses is counted where all copies are made.
"""

import numpy as np
import pytest
import torch
from bitstates import BITS, UNFRAMED, flip, random_bits
from test_gpu_live import bits, same
from test_gpu_writer import contiguous, history, step, weights
from writertools import make

import deltaformat as df
from deltaformat import deviceapply, inplace
from deltaformat.errors import CorruptError, ErrorCode, LimitError, MalformedError
from deltaformat.gpu import BlockDiff
from deltaformat.gpu.transfer import traffic
from deltaformat.inplace import shared_memory


def commit(states, **options):
    store = make(**options)
    with store.writer(policy=df.Policy(max_chain=3)) as writer:
        for number, state in enumerate(states):
            writer.commit(step=number, tensors=state)
    return store


@pytest.fixture(scope="module", params=["xxh3-128", "blake3-256"])
def run(request):
    states = [contiguous(state) for state in history(6)]  # step 2 replaces whole blocks
    return commit(states, digest=request.param), states


def take(follower, live, number):
    """Stage, apply and commit a step; what crossed while it was applied."""
    staged = follower.stage(step=number)
    before = traffic.snapshot()
    staged.apply_to(live)
    crossed = traffic.snapshot() - before
    staged.commit()
    return crossed


def at_step(store, states, number, **options):
    """A follower that holds a step, and live tensors that are it."""
    follower = store.follower(**{"device": "torch", **options})
    live = contiguous(states[number])
    take(follower, live, number)
    return follower, live


def changed_bytes(before, after):
    """What positions and values of the differences take."""
    return sum(
        (4 + dtype.itemsize) * int((bits(old).view(kind) != bits(new).view(kind)).sum())
        for old, new, dtype, kind in (
            (before[name], new, new.dtype, {1: torch.uint8, 2: torch.int16, 4: torch.int32}[new.itemsize])
            for name, new in after.items()
        )
    )


# -- the same as from the host -------------------------------------------------------------------------------


def test_every_step_is_as_from_the_host(run):
    """All dtypes, replaced blocks, empty and 0-d tensors; and layouts that only the host can write."""
    store, states = run
    live = contiguous(states[0])
    live["transposed"] = torch.zeros_like(states[0]["transposed"].T.contiguous()).T
    live["strided"] = torch.zeros(1000, dtype=torch.bfloat16)[::2]
    other = contiguous(states[0])
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    with store.follower(device="torch") as here, store.follower(device="off") as host:
        for number in (0, 1, 2, 3, 5, 4, 0):  # 3 to 5 skips one; then back
            crossed = take(here, live, number)
            assert crossed["down", "digests"] > 0 == crossed["down", "weights"]
            assert not take(host, other, number)
            assert same(live, states[number])
            assert same(other, states[number])
    assert addresses == {name: tensor.data_ptr() for name, tensor in live.items()}


@pytest.mark.parametrize("dtype", sorted(set(BITS) - set(UNFRAMED)))
def test_every_dtype(dtype):
    """DF-DTY-03: differences are those of the bits, whatever they mean."""
    rng = np.random.default_rng(7)
    states = [random_bits(rng, dtype, (6, 80))]
    for _ in range(3):
        states.append(flip(rng, states[-1], 5))
    store = commit([{"t": state.given} for state in states])
    live = {"t": states[3].torch()}
    with store.follower(device="torch") as follower:
        for number in (0, 1, 3):  # 3 skips one
            crossed = take(follower, live, number)
            assert crossed["up", "changes" if number else "weights"]
            assert crossed["down", "digests"]
            assert states[number].same_bits(live["t"])


def test_with_triton():
    pytest.importorskip("triton")
    first = {name: t.contiguous() for name, t in weights(4, count=1).items() if name in ("w0", "f8", "i64")}
    states = [first, step(first, 1), step(first, 2, dense=("f8",))]
    follower, live = at_step(commit(states), states, 0, device="triton")
    for number in (1, 2):
        take(follower, live, number)
        assert same(live, states[number])


def test_processes_that_share_a_mirror(run, tmp_path):
    """Also one that does not lead, and gets from the leader what changed."""
    store, states = run
    mirror = f"file:{tmp_path / 'mirror'}"
    with (
        store.follower(device="torch", mirror=mirror) as lead,
        store.follower(mirror=mirror, device="torch") as other,
    ):
        lives = contiguous(states[5]), contiguous(states[5])
        for number in (0, 1, 2):
            take(lead, lives[0], number)
            assert take(other, lives[1], number)["down", "digests"]
            assert same(lives[0], states[number])
            assert same(lives[1], states[number])


def test_load_into(run):
    store, states = run
    follower, _ = at_step(store, states, 3)
    live = contiguous(states[0])
    before = traffic.snapshot()
    follower.load_into(live)
    crossed = traffic.snapshot() - before
    assert same(live, states[3])
    assert crossed["up", "weights"] == sum(bits(tensor).numel() for tensor in live.values())
    assert crossed["host", "waits"] == 1


def test_selected_tensors(run):
    store, states = run
    follower, live = at_step(store, states, 0, select=["w1", "f8"])
    for number in (1, 2):
        crossed = take(follower, live, number)
        assert crossed["down", "digests"]
        for name, tensor in live.items():
            assert torch.equal(bits(tensor), bits(states[number if name in ("w1", "f8") else 0][name]))


# -- what crosses --------------------------------------------------------------------------------------------


def test_only_changes_and_digests_cross():
    """One wait a version; digests of changed blocks alone."""
    states = [{f"w{n}": weights(n)["w0"].clone() for n in range(10)}]
    states.append(step(states[0], 1))
    states.append({**states[1], "w4": step(states[1], 2)["w4"]})
    store = commit(states)
    follower, live = at_step(store, states, 0)
    for number in (1, 2):
        crossed = take(follower, live, number)
        blocks = sum(
            bool(
                (bits(new)[start : start + 256] != bits(states[number - 1][name])[start : start + 256]).any()
            )
            for name, new in states[number].items()
            for start in range(0, 960, 256)
        )
        changes = changed_bytes(states[number - 1], states[number])
        assert crossed == {("up", "changes"): changes, ("down", "digests"): 16 * blocks, ("host", "waits"): 1}
        assert same(live, states[number])


def test_auto_leaves_the_hosts_tensors_to_the_host(run):
    store, states = run
    follower, live = at_step(store, states, 0, device="auto")
    assert not take(follower, live, 1)
    assert same(live, states[1])


# -- shared memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 20), (480,)])
def test_tied_storages(run, shape):
    """Two names of one memory, in one form or two: a difference is added once."""
    store, states = run
    follower, live = at_step(store, states, 0)
    tied = [{**state, "tied": state["tied"].view(shape)} for state in states]
    store = commit(tied)
    live["tied"] = live["w0"].view(shape)
    follower = store.follower(device="torch")
    for number in (0, 1, 2, 5):
        take(follower, live, number)
        assert same(live, tied[number])


def test_storages_that_overlap():
    """Views into one another get their bits, whatever reaches into whatever."""
    rng = np.random.default_rng(3)
    after = torch.from_numpy(rng.integers(0, 1 << 15, 3000, np.int16))
    before = after.clone()
    before[rng.integers(0, 3000, 60)] += 1

    def views(base):
        return {
            "all": base[:2048], "part": base[1024:2000].view(61, 16),
            "turned": base[1024:2048].view(32, 32).T, "alone": base[2056:],
        }  # fmt: skip

    states = [{name: tensor.clone() for name, tensor in views(base).items()} for base in (before, after)]
    store = commit(states)
    follower = store.follower(device="torch")
    base = before.clone()
    for number in (0, 1):
        crossed = take(follower, views(base), number)
        assert crossed["down", "digests"]  # of the one that is alone
        assert same(views(base), states[number])


def test_shared_memory():
    """Every span that overlaps with another is told."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        begins = rng.integers(0, 60, 6)
        spans = [(int(b), int(b + n)) for b, n in zip(begins, rng.integers(0, 25, 6), strict=True)]
        told = {number for one, other, _ in shared_memory(spans) for number in (one, other)}
        assert told == {
            n
            for n, (begin, end) in enumerate(spans)
            if any(m != n and max(begin, b) < min(end, e) for m, (b, e) in enumerate(spans))
        }
        assert all((spans[a] == spans[b]) == alike for a, b, alike in shared_memory(spans))


# -- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_another_state_is_found_and_left(run, number):
    """Step 2 replaces whole blocks, too. Mended, the same version can be applied."""
    store, states = run
    follower, live = at_step(store, states, number - 1)
    live["transposed"] = live["transposed"].T.contiguous().T  # this one is written from the host
    staged = follower.stage(step=number)
    changed = bits(states[number]["w1"]) != bits(states[number - 1]["w1"])
    block = int(changed.nonzero()[0]) // 256
    position = 256 * block + int((~changed[256 * block :]).nonzero()[0])
    bits(live["w1"])[position] ^= 4
    before = contiguous(live)
    with pytest.raises(CorruptError, match=r"is not version .*load_into") as caught:
        staged.apply_to(live)
    assert caught.value.code is ErrorCode.DIGEST_MISMATCH
    assert caught.value.where == f"tensor 'w1', block {block}"
    assert same(live, before)
    bits(live["w1"])[position] ^= 4
    staged.apply_to(live)
    staged.commit()
    assert same(live, states[number])


def test_applied_twice_or_in_part(run):
    """What is the new version already, block by block, stays; a rollback puts back what each one found."""
    store, states = run
    follower, live = at_step(store, states, 1)
    for name in ("w1", "w3"):
        live[name].copy_(states[2][name])
    before = contiguous(live)
    staged = follower.stage(step=2)
    staged.apply_to(live)
    assert same(live, states[2])
    staged.apply_to(live)
    assert same(live, states[2])
    staged.rollback()
    assert same(live, before)
    staged = follower.stage(step=2)
    staged.apply_to(live)
    staged.commit()
    staged.apply_to(live)
    other = contiguous(states[1])
    staged.apply_to(other)
    assert same(live, states[2])
    assert same(other, states[2])


def test_a_device_that_adds_wrongly(run, monkeypatch):
    store, states = run
    follower, live = at_step(store, states, 0)
    uploaded = inplace.Uploaded

    def wrong(table, changes, **options):
        shifted = []
        for number, block, found, content in changes:
            if found is not None:
                found = type(found)(
                    found.width, found.positions, found.differences + found.differences.dtype.type(1)
                )
            shifted.append(BlockDiff(number, block, found, content))
        return uploaded(table, shifted, **options)

    staged = follower.stage(step=1)
    with monkeypatch.context() as patch:
        patch.setattr(inplace, "Uploaded", wrong)
        with pytest.raises(CorruptError, match="is not version"):
            staged.apply_to(live)
    assert same(live, states[0])
    staged.apply_to(live)
    assert same(live, states[1])


def test_a_first_version_that_does_not_arrive(run, monkeypatch):
    """There is nothing to put back, but it is told."""
    store, states = run
    live = contiguous(states[1])
    upload = deviceapply.upload

    def wrong(array, to, cargo):
        upload(np.zeros_like(array), to, cargo)

    with store.follower(device="torch") as follower:
        staged = follower.stage(step=0)
        with monkeypatch.context() as patch:
            patch.setattr(deviceapply, "upload", wrong)
            with pytest.raises(CorruptError, match="does not hold what was written"):
                staged.apply_to(live)
        staged.apply_to(live)
        assert same(live, states[0])


def test_memory_that_runs_out_on_the_device(run, monkeypatch):
    """What was written from the host is put back, too."""
    store, states = run
    follower, live = at_step(store, states, 0)
    live["strided"] = torch.stack([live["strided"]] * 2, 1)[:, 0]
    assert not live["strided"].is_contiguous()
    staged = follower.stage(step=1)

    def fail(*_, **__):
        raise LimitError(ErrorCode.LIMIT_EXCEEDED, "no memory", where="cpu")

    with monkeypatch.context() as patch:
        patch.setattr(inplace, "Uploaded", fail)
        with pytest.raises(LimitError):
            staged.apply_to(live)
    assert same(live, states[0])
    staged.apply_to(live)
    assert same(live, states[1])


def test_refusals(run):
    store, _ = run
    with pytest.raises(MalformedError, match="'auto', 'off', 'torch' or 'triton', not 'gpu'"):
        store.follower(device="gpu")
