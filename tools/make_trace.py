"""Makes a store of a real training trace: fine-tunes MiniLM and commits its bf16 weights after every step.

    python tools/make_trace.py --store run/ --steps 24

Step 0 is the checkpoint as it was, so the store ends with one version more than `--steps`. Each line says
what a step cost. At the end the store is opened anew, and every version is read and compared with the SHA-256
of each tensor's bytes, taken before it was committed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import deltaformat as df
from deltaformat.errors import DeltaFormatError
from trainer import Trainer, count_changes

BRANCH = "main"


@dataclass(frozen=True, slots=True)
class Step:
    """What a step changed and what its commit cost. Step 0 has no loss and changes nothing."""

    step: int
    root: str
    loss: float | None
    weights: int
    changed: int
    checkpoint_bytes: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a tensor must be when it is read back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str


Fingerprints = Mapping[str, Fingerprint]


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Takes a tensor's dtype, its shape and the SHA-256 of its bytes."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Fingerprint(tensor.dtype, tuple(tensor.shape), hashlib.sha256(data.data).hexdigest())


def make(
    store: df.Store, trainer: Trainer, steps: int, report: Callable[[Step], None]
) -> tuple[list[Step], list[Fingerprints]]:
    """Commits the state that the trainer stands at and `steps` further ones, reporting each as it is done."""
    files = {"config.json": trainer.checkpoint.config, "tokenizer.json": trainer.checkpoint.tokenizer}
    done: list[Step] = []
    kept: list[Fingerprints] = []
    old: dict[str, Tensor] | None = None
    with store.writer(branch=BRANCH) as writer:
        for number, state in trainer.iterate(steps):
            changed, weights = count_changes(state if old is None else old, state)
            kept.append({name: fingerprint(tensor) for name, tensor in state.items()})
            start = time.perf_counter()
            info = writer.commit(step=number, tensors=state, files=files)
            seconds = time.perf_counter() - start
            size = sum(tensor.nbytes for tensor in state.values())
            done.append(
                Step(number, info.root, trainer.loss, weights, changed, size, info.bytes_written, seconds)
            )
            report(done[-1])
            old = state
    return done, kept


def find_differences(store: df.Store, done: Sequence[Step], kept: Sequence[Fingerprints]) -> list[str]:
    """Reads every step and says, a line each, what is not as it was committed."""
    differences = []
    for committed, tensors in zip(done, kept, strict=True):
        where = f"step {committed.step}"
        with store.version(step=committed.step, branch=BRANCH, framework="pt") as version:
            if version.root != committed.root:
                differences.append(f"{where}: root {version.root}, committed as {committed.root}")
            names = set(version.keys())
            if names != set(tensors):
                differences.append(f"{where}: other names: {sorted(names ^ set(tensors))}")
            for name in sorted(names & set(tensors)):
                read = fingerprint(version.get_tensor(name))
                if read != tensors[name]:
                    differences.append(f"{where}: {name} is {read}, was {tensors[name]}")
    return differences


WIDTHS = (4, 7, 18, 13, 10, 13, 8)
HEADINGS = ("step", "loss", "changed weights", "bytes written", "a change", "a checkpoint", "commit")


def line(cells: Sequence[str]) -> str:
    """Aligns the cells of a line of the table."""
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def describe(step: Step) -> str:
    """Formats a step as a line of the table."""
    loss = "" if step.loss is None else f"{step.loss:.4f}"
    changed = f"{step.changed:,} ({step.changed / step.weights:.3%})" if step.changed else ""
    each = f"{step.bytes_written / step.changed:.3f} B" if step.changed else ""
    ratio = f"1/{step.checkpoint_bytes / step.bytes_written:.1f}"
    return line(
        [str(step.step), loss, changed, f"{step.bytes_written:,}", each, ratio, f"{step.seconds:.2f} s"]
    )


def summarise(done: Sequence[Step], read_seconds: float) -> str:
    """Says what the whole trace cost and that it was read back."""
    whole = sum(step.checkpoint_bytes for step in done)
    written = sum(step.bytes_written for step in done)
    versions, ratio, speed = len(done), whole / written, whole / read_seconds / 1e6
    return (
        f"{versions} versions: {written:,} bytes written, {whole:,} as whole checkpoints (1/{ratio:.1f})\n"
        f"reopened: all {versions} versions read back bit for bit ({speed:,.0f} MB/s)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the trace; returns 0, 1 for a failure or a wrong bit, 2 for a store that has steps already."""
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM and commit every step to a store.")
    parser.add_argument("--store", required=True, help="directory or URL; made if it is not there")
    parser.add_argument("--steps", type=int, default=24, help="training steps after step 0 (default: 24)")
    parser.add_argument("--lr", type=float, default=3e-6, help="learning rate (default: 3e-6)")
    parser.add_argument("--seed", type=int, default=0, help="chooses batches and dropout (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(argv)
    if options.steps < 0:
        parser.error("--steps cannot be negative")

    try:
        store = df.create(options.store, exist_ok=True)
        if BRANCH in store.branches():
            print(
                f"error: {options.store}: branch {BRANCH} already has steps; name another store",
                file=sys.stderr,
            )
            return 2
        if not options.json:
            print(line(HEADINGS))
        done, kept = make(
            store,
            Trainer(lr=options.lr, seed=options.seed),
            options.steps,
            lambda step: None if options.json else print(describe(step), flush=True),
        )
        start = time.perf_counter()
        differences = find_differences(df.open(options.store), done, kept)
        seconds = time.perf_counter() - start
    except (DeltaFormatError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    for difference in differences:
        print(f"error: {difference}", file=sys.stderr)
    if options.json:
        steps = [asdict(step) for step in done]
        print(json.dumps({"store": options.store, "verified": not differences, "steps": steps}, indent=2))
    elif not differences:
        print(summarise(done, seconds))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
