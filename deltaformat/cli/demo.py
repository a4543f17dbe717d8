"""The command `demo`: a training that commits its steps, and a second process that follows them."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import deltaformat as df
from deltaformat.cli.demo_follow import Follower, Seen
from deltaformat.cli.demo_model import Model, read_corpus, train
from deltaformat.cli.options import Commands, positive
from deltaformat.cli.output import Console, human, percent, plain

__all__ = ["register"]

BRANCH = "main"
PRETRAINING_STEPS = 40
PRETRAINING_RATE = 1e-3
RATE = 1e-6
SEED = 0
LAST_WAIT_S = 60.0
"""How long the follower may take for what is left when the training is done."""

_HEADINGS = ("step", "loss", "changed", "written", "checkpoint", "ratio", "commit", "lag", "follower's root")
_WIDTHS = (4, 7, 8, 8, 10, 7, 9, 9, 0)

State = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Step:
    """One committed step.

    Attributes:
        step: Its number; 0 is the model before it is fine-tuned.
        loss: Of the batch it was trained on; None for step 0.
        root: What the trainer committed.
        weights: Number of weights.
        changed: Weights whose bits differ from the step before.
        bytes_written: What the commit cost.
        checkpoint_bytes: What the weights take as a whole checkpoint.
        commit_seconds: How long the commit took.
        committed_at: When it was done, seconds since the epoch.
    """

    step: int
    loss: float | None
    root: str
    weights: int
    changed: int
    bytes_written: int
    checkpoint_bytes: int
    commit_seconds: float
    committed_at: float


def register(commands: Commands) -> None:
    """Declare `demo`."""
    parser = commands.add(
        "demo",
        _demo,
        help="train a small model, commit every step, follow it from a second process, and compare",
        example="deltaformat demo --steps 12",
    )
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="default: 12")
    parser.add_argument("--store", metavar="DIR", help="where; it is kept (default: a temporary directory)")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")


def _demo(options: argparse.Namespace, console: Console) -> int:
    with _place(options, console) as url:
        store = df.create(url)
        with Follower(store.url, branch=BRANCH, last=options.steps) as follower:
            steps, seen = _run(store, follower, options.steps, console)
            follower.finish(LAST_WAIT_S)
    wrong = [step.step for step in steps if seen[step.step].root != step.root]
    for number in wrong:
        console.say(
            f"step {number}: the trainer's root is {steps[number].root}, the follower's {seen[number].root}"
        )
    document = _document(store.url, steps, seen)
    console.say(["", _summary(document)])
    console.document(document)
    if wrong:
        console.failure(
            f"the roots of {len(wrong)} of {len(steps)} versions differ: a fault, please report it",
            "roots-differ",
        )
    return 1 if wrong else 0


@contextlib.contextmanager
def _place(options: argparse.Namespace, console: Console) -> Iterator[str]:
    """A directory for the store; a temporary one is removed, whatever happens."""
    if options.store is not None:
        yield options.store
        return
    directory = tempfile.mkdtemp(prefix="deltaformat-demo-")
    try:
        yield str(Path(directory) / "store")
        if options.keep:
            console.say(["", f"the store is kept at {plain(directory)}/store"])
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)


def _run(
    store: df.Store, follower: Follower, count: int, console: Console
) -> tuple[list[Step], dict[int, Seen]]:
    """Train and commit; print each step's line as soon as both processes are done with it."""
    model, corpus = Model(SEED), read_corpus()
    weights = sum(master.size for master in model.masters.values())
    console.say(f"a language model of {weights / 1e6:.1f} million weights learns from Python's own help ...")
    losses = list(train(model, corpus, steps=PRETRAINING_STEPS, lr=PRETRAINING_RATE, seed=SEED, warmup=10))
    console.say(
        [
            f"... loss {losses[0]:.2f} to {losses[-1]:.2f}; now {count} fine-tuning steps at lr {RATE:g}, "
            "each committed in bf16 and followed by another process",
            "",
            _line(_HEADINGS),
        ]
    )
    steps: list[Step] = []
    printed = 0
    with store.writer(BRANCH) as writer:
        old = model.state()
        steps.append(_commit(writer, 0, None, old, old))
        for number, loss in enumerate(train(model, corpus, steps=count, lr=RATE, seed=SEED + 1), start=1):
            new = model.state()
            steps.append(_commit(writer, number, loss, old, new))
            old = new
            printed = _print_ready(steps, printed, follower.seen(), console)
    follower.wait(LAST_WAIT_S)
    seen = follower.seen()
    _print_ready(steps, printed, seen, console)
    return steps, seen


def _commit(writer: df.Writer, number: int, loss: float | None, old: State, new: State) -> Step:
    changed = sum(
        int(np.count_nonzero(old[name].view(np.uint16) != new[name].view(np.uint16))) for name in new
    )
    started = time.perf_counter()
    info = writer.commit(step=number, tensors=new, metadata={} if loss is None else {"loss": loss})
    return Step(
        step=number,
        loss=loss,
        root=info.root,
        weights=sum(tensor.size for tensor in new.values()),
        changed=changed,
        bytes_written=info.bytes_written,
        checkpoint_bytes=info.nbytes,
        commit_seconds=time.perf_counter() - started,
        committed_at=time.time(),
    )


def _print_ready(steps: list[Step], printed: int, seen: dict[int, Seen], console: Console) -> int:
    while printed < len(steps) and printed in seen:
        console.say(_line(_cells(steps[printed], seen[printed])))
        printed += 1
    console.flush()
    return printed


def _cells(step: Step, seen: Seen) -> tuple[str, ...]:
    return (
        str(step.step),
        "" if step.loss is None else f"{step.loss:.3f}",
        percent(step.changed, step.weights) if step.step else "",
        human(step.bytes_written),
        human(step.checkpoint_bytes),
        f"1/{step.checkpoint_bytes / step.bytes_written:.1f}",
        f"{step.commit_seconds * 1e3:.0f} ms",
        f"{_lag(step, seen) * 1e3:.0f} ms",
        ("= " if seen.root == step.root else "DIFFERS ") + seen.root.rpartition(":")[2][:16],
    )


def _lag(step: Step, seen: Seen) -> float:
    """Seconds from the end of a commit until the follower had verified it; the follower may be the first."""
    return max(0.0, seen.verified_at - step.committed_at)


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def _document(url: str, steps: list[Step], seen: dict[int, Seen]) -> dict[str, Any]:
    return {
        "store": url,
        "verified": all(seen[step.step].root == step.root for step in steps),
        "bytes_written": sum(step.bytes_written for step in steps),
        "checkpoint_bytes": sum(step.checkpoint_bytes for step in steps),
        "steps": [
            {key: value for key, value in asdict(step).items() if key != "committed_at"}
            | {
                "follower_root": seen[step.step].root,
                "lag_seconds": _lag(step, seen[step.step]),
                "read_seconds": seen[step.step].read_seconds,
            }
            for step in steps
        ],
    }


def _summary(document: dict[str, Any]) -> str:
    steps = document["steps"]
    later = steps[1:]
    mean = sum(step["bytes_written"] for step in later) / len(later)
    ratio = sum(step["checkpoint_bytes"] for step in later) / sum(step["bytes_written"] for step in later)
    roots = "the same in both processes" if document["verified"] else "NOT the same in both processes"
    return (
        f"{len(steps)} versions, whose roots are {roots}: {human(document['bytes_written'])} written, "
        f"{human(document['checkpoint_bytes'])} as whole checkpoints; "
        f"a step costs {human(mean)}, 1/{ratio:.0f} of a checkpoint"
    )
