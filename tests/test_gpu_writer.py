"""A writer that hashes and compares tensors where they are stores the same bytes as one on the host.

The CPU plays the device: the policy names an engine, so that torch tensors of the host go through the same
code. What crosses is counted where all copies are made.
"""

import ast
import itertools
import secrets
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from writertools import make, memory

import deltaformat as df
from deltaformat import inputs
from deltaformat.errors import CorruptError, InconsistentError, MalformedError, StoreError, UnsupportedError
from deltaformat.gpu import survey
from deltaformat.gpu.transfer import PinnedMemory, traffic
from deltaformat.torch import Live

KEPT = [False, True]
BF16, F32, F8, I64 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64


def weights(seed, count=5):
    """Tensors of several dtypes and layouts, made of random bits."""
    generator = torch.Generator().manual_seed(seed)

    def bits(dtype, *shape):
        size = int(np.prod(shape)) * dtype.itemsize
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).reshape(shape)

    found = {f"w{n}": bits(BF16, 24, 20 + n) for n in range(count)}
    found |= {
        "f32": bits(F32, 301), "f8": bits(F8, 30, 33), "i64": bits(I64, 40),
        "transposed": bits(BF16, 20, 30).T,
        "strided": bits(BF16, 1000)[::2], "none": bits(BF16, 0, 3), "scalar": bits(F32, 1)[0],
        "tied": found["w0"],
    }  # fmt: skip
    return found


def step(tensors, seed, changes=4, dense=()):
    """The tensors after a step: a few elements of each differ, of those in `dense` nearly all."""
    rng = np.random.default_rng(seed)
    after = {}
    for name, tensor in tensors.items():
        new = tensor.clone(memory_format=torch.preserve_format)
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.dtype.itemsize]
        flat = new.contiguous().view(kind).reshape(-1).clone()
        if name in dense:
            flat += 1
        elif flat.numel() and name not in ("tied", "i64"):
            flat[torch.from_numpy(rng.integers(0, flat.numel(), changes))] += 1
        after[name] = flat.view(new.dtype).reshape(new.shape)
        if not new.is_contiguous() and new.dim() == 2:
            after[name] = after[name].T.contiguous().T
    if "tied" in after:
        after["tied"] = after["w0"]
    return after


def contiguous(state):
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


def history(steps=6):
    states = [weights(1)]
    for number in range(1, steps):
        states.append(step(states[-1], number, dense=("w3",) if number == 2 else ()))
    return states


@pytest.fixture
def same_nonces(monkeypatch):
    """Packs carry a random entry; with the same ones for both writers equal packs have equal names."""
    counters = {}

    def restart():
        counters["next"] = itertools.count()

    restart()
    monkeypatch.setattr(secrets, "token_hex", lambda size: f"{next(counters['next']):0{2 * size}x}")
    return restart


def write(states, policy, *, given=lambda state: state, storage=None, **options):
    store = make(storage)
    with store.writer(policy=policy) as writer:
        infos = [
            writer.commit(step=n, tensors=given(state), allow_set_change=True, **options)
            for n, state in enumerate(states)
        ]
    return store, [info.result() if options.get("block") is False else info for info in infos]


def same_store(one, other, steps):
    """Both stores hold the same versions as the same pieces of the same packs."""
    for number in range(steps):
        a, b = one.version(step=number), other.version(step=number)
        assert a.root == b.root
        assert a.map.names == b.map.names
        for column in ("dtypes", "shapes", "packs"):
            assert getattr(a.map, column) == getattr(b.map, column), column
        for column in ("digest", "fresh", "depth", "pack", "offset", "length", "encoding"):
            assert np.array_equal(getattr(a.map, column), getattr(b.map, column)), column


def reads_back(store, states):
    for number, state in enumerate(states):
        with store.version(step=number, framework="pt") as version:
            found = version.state_dict()
            assert found.keys() == state.keys()
            for name, tensor in state.items():
                assert found[name].dtype == tensor.dtype
                assert found[name].shape == tensor.shape
                assert torch.equal(
                    found[name].contiguous().reshape(-1).view(torch.uint8),
                    tensor.contiguous().reshape(-1).view(torch.uint8),
                )


# -- the same bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("window", [300, 1 << 20])
def test_the_same_packs(kept, window, same_nonces, monkeypatch):
    monkeypatch.setattr(survey, "WINDOW_BYTES", window)
    states = history()
    expected, _ = write(states, df.Policy(device="off", max_chain=4))
    same_nonces()
    found, _ = write(states, df.Policy(device="torch", device_baseline=kept, max_chain=4))
    same_store(found, expected, len(states))
    reads_back(found, states)


@pytest.mark.parametrize("kept", KEPT)
def test_the_same_packs_with_blake3(kept, same_nonces):
    states = [weights(3, count=1)]
    states.append(step(states[0], 3))
    stores = []
    for policy in (df.Policy(device="off"), df.Policy(device="torch", device_baseline=kept)):
        same_nonces()
        stores.append(make(digest="blake3-256"))
        with stores[-1].writer(policy=policy) as writer:
            for number, state in enumerate(states):
                writer.commit(step=number, tensors=state)
    same_store(*stores, len(states))


@pytest.mark.parametrize("kept", KEPT)
def test_the_same_packs_with_triton(kept, same_nonces):
    pytest.importorskip("triton")
    states = [{name: t for name, t in weights(2, count=1).items() if name in ("w0", "f8", "strided", "none")}]
    states += [step(states[0], 1), step(step(states[0], 1), 2)]
    expected, _ = write(states, df.Policy(device="off"))
    same_nonces()
    found, _ = write(states, df.Policy(device="triton", device_baseline=kept))
    same_store(found, expected, len(states))


@pytest.mark.parametrize("kept", KEPT)
def test_sets_sizes_and_dtypes_that_change(kept, same_nonces):
    """Tensors come, go, grow, and change their dtype over the same bytes; a step changes nothing."""
    first = {"a": weights(1)["w0"], "b": weights(2)["w1"], "c": weights(3)["w2"]}
    states = [
        first,
        {"a": first["a"].view(torch.float16), "b": torch.cat([first["b"].reshape(-1), first["b"][0]])},
        {"c": first["c"], "a": first["a"], "b": first["b"]},
        {"c": first["c"], "a": first["a"], "b": first["b"]},
        step({"c": first["c"], "a": first["a"], "b": first["b"].reshape(-1)[:30]}, 7),
    ]
    expected, _ = write(states, df.Policy(device="off"))
    same_nonces()
    found, _ = write(states, df.Policy(device="torch", device_baseline=kept))
    same_store(found, expected, len(states))
    reads_back(found, states)


@pytest.mark.parametrize("kept", KEPT)
def test_streams_and_mixed_mappings(kept, same_nonces):
    """A stream that reuses one buffer; and tensors of the host among those of the device."""
    states = [{name: t for name, t in state.items() if t.dtype == BF16 and t.numel()} for state in history(3)]
    buffer = torch.empty(2000, dtype=BF16)

    def streamed(state):
        for name, tensor in state.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.view(torch.int16).copy_(tensor.contiguous().view(torch.int16))
            yield name, view

    def mixed(state):
        return {
            name: tensor if number % 2 else tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
            for number, (name, tensor) in enumerate(state.items())
        }

    for given in (streamed, mixed):
        same_nonces()
        expected, _ = write(states, df.Policy(device="off"), given=given)
        same_nonces()
        found, _ = write(states, df.Policy(device="torch", device_baseline=kept), given=given)
        same_store(found, expected, len(states))


@pytest.mark.parametrize("kept", KEPT)
def test_copies_are_taken(kept):
    """With `block=False` the trainer changes its weights as soon as the call returns."""
    states = history(4)
    live = {name: tensor.clone() for name, tensor in states[0].items()}
    store = make()
    with store.writer(policy=df.Policy(device="torch", device_baseline=kept)) as writer:
        for number, state in enumerate(states):
            for name, tensor in state.items():
                live[name].copy_(tensor)
            future = writer.commit(step=number, tensors=live, block=False)
            for tensor in live.values():
                tensor.zero_()
        future.result()
    reads_back(store, states)


def test_copies_become_what_is_kept(monkeypatch):
    """`block=False` with a baseline on the device copies a tensor once."""
    states, copies = history(3), []
    copy_in_place = inputs._copy_in_place

    def copying(tensor):
        made = copy_in_place(tensor)
        copies.append(made[0])
        return made

    monkeypatch.setattr(inputs, "_copy_in_place", copying)
    store = make()
    with store.writer(policy=df.Policy(device="torch", device_baseline=True)) as writer:
        for number, state in enumerate(states):
            writer.commit(step=number, tensors=state, block=False).result()
            made = {copy.data_ptr() for copy in copies}
            held = writer._device_baseline._held
            plain = [name for name, tensor in state.items() if tensor.is_contiguous() and tensor.numel()]
            assert len(plain) > 5
            assert {name for name in plain if held[name].data.data_ptr() not in made} == set()
    reads_back(store, states)


def test_each_device_has_its_event(monkeypatch):
    """What was copied on one device is waited for by that device's event, not by the last of all."""
    tensors = {"a": torch.zeros(300), "b": torch.zeros(300, device="meta"), "c": torch.zeros(300)}
    waits = {}

    class Noted:
        def __init__(self, _, pairs, *, own, ready):
            assert own
            waits.update(dict.fromkeys([name for name, _ in pairs], ready))
            self.members = [tensor for _, tensor in pairs]

    monkeypatch.setattr(inputs, "_copy_in_place", lambda tensor: (tensor, f"event of {tensor.device}"))
    monkeypatch.setattr(inputs, "Survey", Noted)
    monkeypatch.setattr(inputs, "describe", lambda tensor: None)
    taken = inputs.Inputs(df.Policy(device="torch", device_baseline=True), None).copies(tensors)
    assert [name for name, _ in taken] == list(tensors)
    assert waits == {"a": "event of cpu", "b": "event of meta", "c": "event of cpu"}


def test_a_writer_that_begins_anew():
    """It holds nothing, so contents cross once; from then on changes do."""
    states = history(5)
    storage = memory()
    for kept in KEPT:
        store = make(storage, exist_ok=True)
        policy = df.Policy(device="torch", device_baseline=kept)
        first = len(store.log()) and store.version().step + 1
        with store.writer(policy=policy) as writer:
            for number in range(first, first + 2):
                writer.commit(step=number, tensors=states[number])
    reads_back(store, states[:4])


# -- what crosses -------------------------------------------------------------------------------------------


def crossed_by(writer, number, state, **options):
    before = traffic.snapshot()
    writer.commit(step=number, tensors=state, **options)
    return traffic.snapshot() - before


@pytest.mark.parametrize("kept", KEPT)
def test_only_changes_cross(kept):
    states = [{f"w{n}": t for n, t in enumerate(weights(n)["w0"] for n in range(12))}]
    states += [step(states[0], 1), step(step(states[0], 1), 2)]
    size = sum(tensor.numel() for tensor in states[0].values()) * 2
    blocks = 12 * 4
    with make().writer(policy=df.Policy(device="torch", device_baseline=kept)) as writer:
        assert crossed_by(writer, 0, states[0])["down", "weights"] == size
        for number in (1, 2):
            crossed = crossed_by(writer, number, states[number])
            pairs = zip(states[number].values(), states[number - 1].values(), strict=True)
            changed = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in pairs)
            assert crossed["down", "weights"] == 0
            assert crossed["down", "changes"] == 6 * changed
            assert crossed["down", "digests"] == 16 * blocks
            assert crossed["down", "counts"] <= 8 * blocks
            assert (crossed["up", "weights"] > 0) == (not kept)
        crossed = crossed_by(writer, 3, states[2])
        assert set(crossed) <= {("down", "digests"), ("down", "counts"), ("host", "waits")}


@pytest.mark.parametrize("kept", KEPT)
def test_waits_do_not_grow_with_tensors(kept):
    waits = []
    for count in (3, 30):
        states = [{f"w{n}": weights(n)["w1"] for n in range(count)}]
        states.append(step(states[0], 1))
        with make().writer(policy=df.Policy(device="torch", device_baseline=kept)) as writer:
            crossed_by(writer, 0, states[0])
            waits.append(crossed_by(writer, 1, states[1])["host", "waits"])
    assert waits[0] == waits[1] <= 5


class Hidden(TorchDispatchMode):
    """Notes operations for whose result the host must wait for a device."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "equal",
        "is_nonzero",
    )

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        masked = name.strip("_").startswith("index") and name not in ("index_select", "index_add_")
        given = [index for index in args[1] if index is not None] if masked else []
        if name in self.WAITING or any(index.dtype in (torch.bool, torch.uint8) for index in given):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("digest", ["xxh3-128", "blake3-256"])
def test_no_operation_waits(kept, digest):
    """Masks and scalars that the host looks at would each wait for the device; only downloads may."""
    states = [contiguous(state) for state in history(3)]
    store = make(digest=digest)
    with store.writer(policy=df.Policy(device="torch", device_baseline=kept)) as writer:
        with Hidden() as mode:
            for number, state in enumerate(states):
                writer.commit(step=number, tensors=state)
        assert mode.seen == []
    tensors = contiguous(states[1])
    with Hidden() as mode:
        Live(store.version(step=1), tensors, engine="torch").advance(store.version(step=2))
    assert mode.seen == []
    with Hidden() as mode:
        assert torch.zeros(3)[torch.zeros(3) == 0].numel() == 3
    assert mode.seen


def test_downloads_are_in_one_place():
    """Elsewhere nothing in the package copies a tensor's content to the host behind the counter's back."""
    for path in Path(survey.__file__).parent.glob("*.py"):
        used = {
            node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
        }
        assert path.name == "transfer.py" or not used & {"cpu", "numpy", "item", "untyped_storage"}, path.name


def test_page_locked_memory_comes_in_slabs():
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    memory = PinnedMemory(allocate, slab_bytes=1024)
    parts = [memory.take(size) for size in (100, 60, 0, 600, 512, 300, 1)]
    assert asked == [1024, 600, 1024]
    assert [part.size for part in parts] == [100, 60, 0, 600, 512, 300, 1]
    for number, part in enumerate(parts, 1):
        part[:] = number
    assert all((part == number).all() for number, part in enumerate(parts, 1))


def test_nothing_stays_on_the_device_without_being_asked_for():
    state = weights(1)
    for kept, expected in ((False, 0), (True, sum(t.numel() * t.dtype.itemsize for t in state.values()))):
        with make().writer(policy=df.Policy(device="torch", device_baseline=kept)) as writer:
            writer.commit(step=0, tensors=state)
            assert writer._device_baseline.nbytes == expected
            writer.commit(step=1, tensors={"w0": state["w0"]}, allow_set_change=True)
            assert writer._device_baseline.nbytes == (kept and state["w0"].numel() * 2)


# -- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("which", ["changes", "content"])
def test_what_arrives_is_checked(kept, which, monkeypatch):
    """A device that gives wrong positions or bytes makes an error, and the next commit is right."""
    states = history(3)
    store = make()
    with store.writer(policy=df.Policy(device="torch", device_baseline=kept)) as writer:
        writer.commit(step=0, tensors=states[0])
        take = survey._Crossing.take

        def wrong(self):
            for block, (changes, content) in take(self):
                if changes is not None and which == "changes":
                    changes.differences[-1] += 1
                elif content is not None and which == "content":
                    content = content.copy()
                    content[3] ^= 1
                yield block, (changes, content)

        monkeypatch.setattr(survey._Crossing, "take", wrong)
        broken = states[1] if which == "changes" else states[1] | {"new": states[0]["w0"]}
        with pytest.raises(CorruptError, match="does not have the digest that was computed there"):
            writer.commit(step=1, tensors=broken, allow_set_change=True)
        monkeypatch.undo()
        for number in (1, 2):
            writer.commit(step=number, tensors=states[number])
    reads_back(store, states)


@pytest.mark.parametrize("engine", ["torch", "triton"])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("change", ["back", "fewer", "more", "elsewhere", "unseen"])
def test_a_tensor_that_changes_while_it_is_compared(change, kept, engine, monkeypatch):
    """DF-WR-01: others write between hashing, counting and collecting; only what was hashed is stored.

    `back`: nothing differs any more when it is counted; `fewer`, `more`: than were counted are there to
    collect; `elsewhere`: more in the block before a short one; `unseen`: what was counted too much is gone.
    """
    if engine == "triton":
        pytest.importorskip("triton")
    tensor = torch.zeros(1000, dtype=BF16)  # blocks of 128 elements; the last has 104
    words = tensor.view(torch.int16)
    store = make()
    count_changes, window = survey.count_changes, survey.Window

    def counting(*args, **options):
        if change == "back":
            words[5] = 0
        if change == "unseen":
            words[3] = 1
        return count_changes(*args, **options)

    def collecting(*args, **options):
        if change == "fewer":
            words[6] = 0
        if change == "more":
            words[20:60] = 3
        if change == "elsewhere":
            words[860:890] = 3
        if change == "unseen":
            words[3] = 0
        return window(*args, **options)

    with store.writer(policy=df.Policy(device=engine, device_baseline=kept)) as writer:
        writer.commit(step=0, tensors={"w": tensor})
        words[[5, 6, 850, 990]] = 1
        with monkeypatch.context() as patch:
            patch.setattr(survey, "count_changes", counting)
            patch.setattr(survey, "Window", collecting)
            if change == "back":
                words[6] = 0
            hashed = tensor.clone()
            if change in ("more", "elsewhere"):
                writer.commit(step=1, tensors={"w": tensor})
                reads_back(store, [{"w": torch.zeros_like(tensor)}, {"w": hashed}])
            else:
                with pytest.raises(CorruptError, match="changed while it was committed"):
                    writer.commit(step=1, tensors={"w": tensor})
        if kept and change in ("more", "elsewhere"):  # what was kept on the device is not what was hashed
            with pytest.raises(CorruptError, match="changed while it was committed"):
                writer.commit(step=2, tensors={"w": tensor})
        writer.commit(step=2, tensors={"w": tensor})
    with store.version(step=2, framework="pt") as version:
        assert torch.equal(version.state_dict()["w"].view(torch.int16), words)


@pytest.mark.parametrize("kept", KEPT)
def test_after_a_failed_commit(kept, monkeypatch):
    """What is held may be the failed commit's: it counts only as far as its digests are the parent's."""
    states = history(4)
    store = make()
    with store.writer(policy=df.Policy(device="torch", device_baseline=kept)) as writer:
        writer.commit(step=0, tensors=states[0])
        with pytest.raises(InconsistentError):
            writer.commit(step=1, tensors={k: v for k, v in states[3].items() if k != "w1"})
        writer.commit(step=1, tensors=states[1])
        with monkeypatch.context() as patch:

            def fail(*_):
                raise StoreError(df.errors.ErrorCode.STORE_FAILED, "no", where="here")

            patch.setattr(type(writer), "_put_manifests", fail)
            with pytest.raises(StoreError):
                writer.commit(step=2, tensors=states[3])
        for number in (2, 3):
            writer.commit(step=number, tensors=states[number])
    reads_back(store, states)


def test_refusals():
    with make().writer(policy=df.Policy(device="torch")) as writer:
        with pytest.raises(UnsupportedError, match=r"'bad'.*meta"):
            writer.commit(step=0, tensors={"w": torch.zeros(3), "bad": torch.empty(3, device="meta")})
        with pytest.raises(MalformedError, match="name"):
            writer.commit(step=0, tensors={3: torch.zeros(3)})
        with pytest.raises(InconsistentError, match="given twice"):
            writer.commit(step=0, tensors=[("w", torch.zeros(3)), ("w", torch.zeros(3))])
        with pytest.raises(MalformedError, match="state_dict"):
            writer.commit(step=0, tensors=[torch.zeros(3)])
    with pytest.raises(MalformedError, match="'auto', 'off', 'torch' or 'triton'"):
        df.Policy(device="cuda")


def test_tensors_of_the_host_stay_on_it():
    """By default nothing is different for tensors that are not on a device."""
    before = traffic.snapshot()
    with make().writer() as writer:
        writer.commit(step=0, tensors=weights(1))
    assert traffic.snapshot() == before


def test_ranks_stage_parts():
    states = history(3)
    store = make()
    policy = df.Policy(device="torch", device_baseline=True)
    with store.writer(policy=policy) as writer:
        stagers = [store.stager(str(writer.ticket), policy=policy) for _ in range(2)]
        for number, state in enumerate(states):
            halves = [dict(list(state.items())[rank::2]) for rank in range(2)]
            parts = [s.stage(step=number, tensors=half) for s, half in zip(stagers, halves, strict=True)]
            writer.commit(step=number, parts=parts)
    reads_back(store, states)
