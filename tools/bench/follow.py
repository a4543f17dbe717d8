"""From bytes that changed in a trainer's process to bytes that are verified and live in a follower's.

    python tools/bench/follow.py [STORE] [--mb 1024] [--steps 5] [--density 0.007] [--mirror shm:bench]
    [--json]

Two processes. The trainer changes a share of its weights and commits; the follower watches the store, stages
(fetches, decodes, verifies), applies to live weights, and commits to its mirror. Times are medians over the
steps, from just before the trainer's commit, by one clock: to the end of the commit, until the follower has
verified, and until its live weights are the new ones. At the end these are compared with the trainer's by
their root.

Beside it, step by step, on a quarter of the same bytes: a whole safetensors file, saved, synced and loaded;
and XOR + zstd-1 per tensor, written, synced, read and decoded, each in one process and without waiting for
each other.

STORE is a path or URL where a new store is made; by default a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import zstandard
from safetensors.numpy import load_file, save_file

import deltaformat as df
from deltaformat.blocks import name_bytes
from deltaformat.digests import digest_blocks, get_digest, tensor_leaf, version_root
from deltaformat.tensors import to_host

POLL_S = 0.002

Bits = npt.NDArray[np.uint16]


class Flips:
    """A bf16 state of which a share of the weights changes by one unit in the last place at every step.

    Without masters, so that it takes no more memory than the state. How likely a weight changes doubles with
    each step down in its exponent, as it does in training.

    Args:
        nbytes: Bytes of the state.
        tensor_bytes: Bytes of each tensor.
        density: The share that changes at a step.
        seed: Of everything random.
    """

    def __init__(self, nbytes: int, *, tensor_bytes: int, density: float, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        count = max(1, nbytes // tensor_bytes)
        self._bits: list[Bits] = []
        for _ in range(count):
            values = self._random.standard_normal(tensor_bytes // 2, np.float32) * np.float32(0.02)
            self._bits.append(values.astype(ml_dtypes.bfloat16).view(np.uint16))
        exponents = np.bincount((self._bits[0] >> 7) & 0xFF, minlength=256) / self._bits[0].size
        falling = 2.0 ** -np.arange(256.0)
        low, high = 0.0, 2.0**200
        for _ in range(400):
            middle = (low + high) / 2
            reached = float((np.minimum(0.5, middle * falling) * exponents).sum())
            low, high = (middle, high) if reached < density else (low, middle)
        self._likely = np.minimum(0.5, low * falling).astype(np.float32)

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """The state as it is, without a copy: name -> bf16 array."""
        return {
            f"layers.{number}.weight": bits.view(ml_dtypes.bfloat16).reshape(-1, 1024)
            for number, bits in enumerate(self._bits)
        }

    def step(self) -> int:
        """Change weights, in place; how many."""
        changed = 0
        for bits in self._bits:
            chosen = np.flatnonzero(
                self._random.random(bits.size, np.float32) < self._likely[(bits >> 7) & 0xFF]
            )
            bits[chosen] += self._random.choice(np.array([1, 0xFFFF], np.uint16), chosen.size)
            changed += chosen.size
        return changed


def follow(url: str, mirror: str | None, last: int, pipe: Connection) -> None:
    """Follow, and tell for each step when it was verified, when it was live, and what it took."""
    store = df.open(url)
    live: dict[str, Any] = {}
    with store.follower(mirror=mirror, framework="np") as follower:
        pipe.send("ready")
        for staged in follower.watch(poll=POLL_S):
            verified = time.monotonic()
            if staged.whole:
                live = {name: np.empty(spec.shape, ml_dtypes.bfloat16) for name, spec in staged.specs.items()}
            staged.apply_to(live)
            applied = time.monotonic()
            staged.commit()
            metrics = staged.metrics
            phases = {
                phase: (getattr(metrics, phase).seconds, getattr(metrics, phase).nbytes)
                for phase in ("find", "fetch", "decode", "verify", "apply")
            }
            done = time.monotonic()
            root = root_of(live, store) if staged.step == last else ""
            pipe.send((staged.step, verified, applied, done, phases, metrics.density, root))
            if staged.step == last:
                return


def root_of(state: dict[str, Any], store: df.Store) -> str:
    """The root that these tensors' bytes give."""
    algorithm = get_digest(store.digest)
    leaves = []
    for name, tensor in state.items():
        host = to_host(name, tensor)
        digests = digest_blocks(host.data, store.block_bytes, algorithm)
        leaves.append((name_bytes(name), tensor_leaf(name, host.dtype, host.shape, digests)))
    return version_root(store.digest, store.block_bytes, leaves)


def run(url: str, mb: int, steps: int, density: float, mirror: str | None) -> dict[str, Any]:
    """Train and be followed."""
    flips = Flips(mb << 20, tensor_bytes=min(32, mb) << 20, density=density)
    peers = Peers(flips)
    store = df.create(url)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=follow, args=(url, mirror, steps, theirs), daemon=True)
    process.start()
    seconds: dict[str, list[float]] = {}
    fetched: list[int] = []
    changed: list[int] = []
    phases: dict[str, list[float]] = {}
    try:
        assert ours.recv() == "ready"
        with store.writer() as writer:
            for step in range(steps + 1):
                peers.before()
                count = flips.step() if step else 0
                started = time.monotonic()
                info = writer.commit(step=step, tensors=flips.state())
                committed = time.monotonic()
                got, verified, applied, done, took, found, root = ours.recv()
                assert got == step
                if not step:
                    continue  # the first one is whole
                peers.after()
                changed.append(count)
                assert round(found * (mb << 19)) == count
                fetched.append(took["fetch"][1])
                for name, at in (
                    ("committed", committed),
                    ("verified", verified),
                    ("live", applied),
                    ("all", done),
                ):
                    seconds.setdefault(name, []).append(at - started)
                for name, (busy, _) in took.items():
                    phases.setdefault(name, []).append(busy)
        if root != info.root:
            raise SystemExit("error: the follower's weights are not the trainer's")
    finally:
        process.join(30)
        process.kill()
        peers.close()
    return {
        "mb": mb,
        "steps": steps,
        "density": statistics.median(changed) / (mb << 19),
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "busy seconds": {name: statistics.median(values) for name, values in phases.items()},
        "fetched bytes": statistics.median(fetched),
        "bytes a change": statistics.median(b / c for b, c in zip(fetched, changed, strict=True)),
        "peers": {name: statistics.median(values) for name, values in peers.seconds.items()},
        "live / peer": {
            name: statistics.median(a / b for a, b in zip(seconds["live"], values, strict=True))
            for name, values in peers.seconds.items()
        },
    }


class Peers:
    """What others do, on a quarter of the same bytes, step by step beside ours: seconds for all of them."""

    def __init__(self, flips: Flips) -> None:
        state = flips.state()
        self._some = dict(list(state.items())[: max(1, len(state) // 4)])
        self._scale = len(state) / len(self._some)
        self._directory = Path(tempfile.mkdtemp(prefix="deltaformat-bench-"))
        self._old: dict[str, Any] = {}
        self.seconds: dict[str, list[float]] = {}

    def before(self) -> None:
        """Keep the weights before a step."""
        self._old = {name: array.copy() for name, array in self._some.items()}

    def after(self) -> None:
        """Measure the step."""
        for name, function in (
            ("whole file", lambda: _whole(self._directory, self._some)),
            ("XOR + zstd-1", lambda: _xor(self._directory, self._old, self._some)),
        ):
            self.seconds.setdefault(name, []).append(self._scale * _timed(function))

    def close(self) -> None:
        """Delete what was written."""
        shutil.rmtree(self._directory)


def _timed(function: Callable[[], object]) -> float:
    started = time.monotonic()
    function()
    return time.monotonic() - started


def _whole(directory: Path, state: dict[str, Any]) -> None:
    path = directory / "model.safetensors"
    save_file({name: array.view(np.uint16) for name, array in state.items()}, path)
    _sync(path)
    load_file(path)


def _xor(directory: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    path, sizes = directory / "difference", []
    with path.open("wb") as file:
        for name, array in new.items():
            difference = np.bitwise_xor(array.view(np.uint16), old[name].view(np.uint16))
            sizes.append(file.write(compressor.compress(difference.data)))
        file.flush()
        os.fsync(file.fileno())
    data, at = path.read_bytes(), 0
    for size, base in zip(sizes, old.values(), strict=True):
        difference = np.frombuffer(decompressor.decompress(data[at : at + size]), np.uint16)
        np.bitwise_xor(difference.reshape(base.shape), base.view(np.uint16))
        at += size


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description="From a trainer's changed bytes to a follower's live ones.")
    parser.add_argument("store", nargs="?", help="where to make a store (default: a temporary directory)")
    parser.add_argument("--mb", type=int, default=1024, help="size of the bf16 state in MiB (default: 1024)")
    parser.add_argument("--steps", type=int, default=5, help="steps to measure (default: 5)")
    parser.add_argument("--density", type=float, default=0.007, help="share that changes (default: 0.007)")
    parser.add_argument("--mirror", help="the follower's mirror (default: its own memory)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    directory = Path(tempfile.mkdtemp(prefix="deltaformat-bench-"))
    try:
        result = run(
            options.store or str(directory / "store"),
            options.mb,
            options.steps,
            options.density,
            options.mirror,
        )
    finally:
        shutil.rmtree(directory)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{options.mb} MiB of bf16, {result['density']:.2%} changed a step; medians of {options.steps}")
    for name, value in result["seconds"].items():
        print(f"  until {name:12} {value:8.3f} s")
    for name, value in result["busy seconds"].items():
        print(f"    {name:10} {value:8.3f} s busy")
    for name, value in result["peers"].items():
        print(f"  {name:18} {value:8.3f} s   live / this {result['live / peer'][name]:.2f}")
    print(f"  fetched {result['fetched bytes'] / 1e6:.1f} MB, {result['bytes a change']:.3f} bytes a change")
    return 0


if __name__ == "__main__":
    sys.exit(main())
