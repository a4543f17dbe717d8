"""The demo: a training and a second process that follows it, and what happens when either fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import deltaformat as df
from deltaformat.cli import demo, demo_follow, demo_model, main
from deltaformat.cli.demo_follow import Follower, Seen
from deltaformat.cli.demo_model import Corpus, Model, read_corpus, train
from deltaformat.cli.options import CommandError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model that trains in no time, and a place of its own for temporary directories."""
    monkeypatch.setattr(demo_model, "WORDS", 256)
    monkeypatch.setattr(demo_model, "HIDDEN", 16)
    monkeypatch.setattr(demo_model, "BATCH", 16)
    monkeypatch.setattr(demo, "PRETRAINING_STEPS", 3)
    monkeypatch.setattr(demo_model, "_text", lambda: "the cat sat on the mat . " * 500)
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_the_roots_of_both_processes_agree(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "3", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert set(document) == {"store", "verified", "bytes_written", "checkpoint_bytes", "steps"}
    assert document["verified"] is True
    assert [step["step"] for step in document["steps"]] == [0, 1, 2, 3]
    for step in document["steps"]:
        assert set(step) == {
            *("step", "loss", "root", "weights", "changed", "bytes_written", "checkpoint_bytes"),
            *("commit_seconds", "follower_root", "lag_seconds", "read_seconds"),
        }
        assert step["root"] == step["follower_root"]
    assert len({step["root"] for step in document["steps"]}) == 4
    assert list(small.iterdir()) == []


def test_the_table_and_the_store_that_is_kept(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--steps", "2", "--store", str(tmp_path / "store")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:7]] == ["step", "0", "1", "2"]
    assert "3 versions, whose roots are the same in both processes" in lines[-1]
    store = df.open(tmp_path / "store")
    with store.version(2) as version:
        assert "loss" in version.metadata
        assert f"= {version.root.rpartition(':')[2][:16]}" in lines[6]
    assert store.verify(all=True).findings == []
    assert main(["demo", "--steps", "2", "--store", str(tmp_path / "store")]) == 1
    assert capsys.readouterr().err.endswith("[already-exists]\n")
    assert list(small.iterdir()) == []


def test_a_temporary_store_can_be_kept(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1", "--keep"]) == 0
    (kept,) = small.iterdir()
    assert f"the store is kept at {kept / 'store'}" in capsys.readouterr().out
    assert df.open(kept / "store").branches()["main"].step == 1


def test_other_roots_are_told(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Follower.seen

    def lie(self: Follower) -> dict[int, Seen]:
        return {
            step: Seen("df1:xxh3-128:1048576:" + "0" * 64, seen.verified_at, seen.read_seconds)
            if step == 1
            else seen
            for step, seen in honest(self).items()
        }

    monkeypatch.setattr(Follower, "seen", lie)
    assert main(["demo", "--steps", "2"]) == 1
    captured = capsys.readouterr()
    assert "DIFFERS 0000000000000000" in captured.out
    assert "step 1: the trainer's root is " in captured.out
    assert "NOT the same" in captured.out
    assert captured.err == (
        "error: the roots of 1 of 3 versions differ: a fault, please report it [roots-differ]\n"
    )
    assert main(["demo", "--steps", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verified"] is False
    assert list(small.iterdir()) == []


TWO_LINES = "".join(
    f"""print('{{"step": {step}, "root": "r", "time": 1, "seconds": 1}}', flush=True);""" for step in (0, 1)
).removesuffix(";")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('error: it fell over')", "ended early: it fell over"),
        ("pass", "ended early"),
        ("print('nonsense')", "ended early"),
        ("import time; time.sleep(60)", "was not done after 0.5 s"),
        (
            f"{TWO_LINES}; import time; time.sleep(60)",
            "did not end within 0.5 s",
        ),
        (
            f"{TWO_LINES}; import sys; sys.exit('')",
            "failed",
        ),
    ],
)
def test_a_follower_that_fails_is_one_line(
    small: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    reason: str,
) -> None:
    monkeypatch.setattr(demo_follow, "_BOOT", program)
    monkeypatch.setattr(demo, "LAST_WAIT_S", 0.5 if "sleep" in program else 30)
    before = psutil.Process().children()  # of other tests, such as multiprocessing's tracker of resources
    assert main(["demo", "--steps", "1"]) == 1
    err = capsys.readouterr().err
    assert err == f"error: the following process {reason} [follower-failed]\n"
    assert psutil.Process().children() == before
    assert list(small.iterdir()) == []


SMALL_DEMO = """
import sys
from deltaformat.cli import demo, demo_model, main
demo.PRETRAINING_STEPS, demo_model.HIDDEN, demo_model.BATCH = 1, 16, 16
sys.exit(main(["demo", "--steps", "100000"]))
"""


def test_an_interrupt_ends_both_processes(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", SMALL_DEMO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(240, process.kill)
        watchdog.start()
        while "= " not in process.stdout.readline():
            assert process.poll() is None
        children = psutil.Process(process.pid).children()
        assert len(children) == 1
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        watchdog.cancel()
    assert (process.returncode, err) == (130, "error: interrupted [interrupted]\n")
    assert not children[0].is_running()
    assert list(tmp_path.iterdir()) == []


def test_a_follower_ends_with_its_parent(tmp_path: Path) -> None:
    df.create(tmp_path / "store")
    follower = Follower(str(tmp_path / "store"), branch="main", last=5)
    try:
        time.sleep(0.5)
        assert follower._process.stdin is not None
        follower._process.stdin.close()
        with pytest.raises(CommandError, match="has ended"):
            follower.finish(30)
    finally:
        follower.close()


def test_following_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roots = []
    weights = np.zeros(3000, np.float32)
    with df.create(tmp_path / "store", block_bytes=256, digest="blake3-256").writer("b") as writer:
        for step in range(4):
            weights[step] += 1
            roots.append(writer.commit(step=step, tensors={"w": weights, "new": np.zeros(step)}).root)
    assert main(["_follow", str(tmp_path / "store"), "--branch", "b", "--last", "3"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["step"], line["root"]) for line in said] == list(enumerate(roots))
    assert main(["_follow", str(tmp_path / "store"), "--branch", "b", "--last", "4", "--idle", "1"]) == 1
    assert capsys.readouterr().err == "error: step 4 did not come within 1 s [timeout]\n"
    assert main(["_follow", str(tmp_path / "store")]) == 2


# -- the model -----------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "WORDS", 20)
    monkeypatch.setattr(demo_model, "HIDDEN", 8)
    model = Model(0)
    model.masters = {name: weights.astype(np.float64) for name, weights in model.masters.items()}  # type: ignore[misc]
    draw = np.random.default_rng(0)
    contexts, targets = draw.integers(0, 20, (16, demo_model.CONTEXT)), draw.integers(0, 20, 16)
    found: dict[str, Any] = {}
    monkeypatch.setattr(model, "_update", lambda gradients, lr: found.update(gradients))
    model.step(contexts, targets, 0.0)
    gradients = {name: gradient.reshape(-1).copy() for name, gradient in found.items()}
    for name, weights in model.masters.items():
        flat = weights.reshape(-1)
        for place in draw.choice(flat.size, min(flat.size, 10), replace=False):
            before = flat[place]
            flat[place] = before + 1e-5
            above = model.step(contexts, targets, 0.0)
            flat[place] = before - 1e-5
            below = model.step(contexts, targets, 0.0)
            flat[place] = before
            assert gradients[name][place] == pytest.approx((above - below) / 2e-5, rel=1e-5, abs=1e-8)


def test_training_learns_and_is_repeatable(small: Path) -> None:
    runs = []
    for _ in range(2):
        model = Model(1)
        losses = list(train(model, read_corpus(), steps=60, lr=3e-3, seed=2, warmup=5))
        assert losses[-1] < losses[0] / 2
        runs.append((losses, {name: tensor.tobytes() for name, tensor in model.state().items()}))
    assert runs[0] == runs[1]


def test_the_text_is_there_without_pydoc(monkeypatch: pytest.MonkeyPatch) -> None:
    with_help = read_corpus()
    assert len(with_help.tokens) > 20_000
    assert with_help.tokens.max() == demo_model.WORDS - 1
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    from_sources = read_corpus()
    assert isinstance(from_sources, Corpus)
    assert len(from_sources.tokens) > 20_000
    assert from_sources.tokens.max() == demo_model.WORDS - 1


@pytest.mark.slow
def test_the_whole_demo_takes_under_a_minute() -> None:
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "deltaformat", "demo", "--json"], capture_output=True, timeout=400, check=True
    )
    after = os.times()  # processor time: the machine may have other work
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 60
    document = json.loads(done.stdout)
    assert done.stderr == b""
    assert document["verified"]
    steps = document["steps"]
    assert len(steps) == 13
    for step in steps[1:]:
        assert 0.002 < step["changed"] / step["weights"] < 0.02
        assert step["bytes_written"] < step["checkpoint_bytes"] / 50
