"""A whole commit and a whole verified read, against XOR + zstd-1 of the same bytes in memory.

    python tools/bench/commit_and_read.py [--megabytes 512] [--rounds 5] [--json]

Everything is measured on the same bytes in one run, and given as medians. A commit is all of it: compare,
hash, encode, write and sync packs, manifest and
record in a local directory. A read is all of it: open the store, fetch, decode, apply, check every digest, of
the step after the keyframe (`read`) and of the newest, whose chains are as long as there were rounds (`read
newest`); `follow` reads it with the step before at hand. The peer is what several trainers do: XOR with the
old weights, zstd level 1, per tensor; and back; without I/O and without checks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from states import Drift

import deltaformat as df

State = dict[str, npt.NDArray[np.generic]]
T = TypeVar("T")


def peer_encode(old: State, new: State) -> list[bytes]:
    """XOR + zstd-1 per tensor."""
    compressor = zstandard.ZstdCompressor(level=1)
    return [compressor.compress(np.bitwise_xor(bits(new[name]), bits(old[name])).data) for name in new]


def peer_decode(old: State, frames: Sequence[bytes]) -> State:
    """The inverse, into new arrays."""
    decompressor = zstandard.ZstdDecompressor()
    decoded: State = {}
    for (name, base), frame in zip(old.items(), frames, strict=True):
        difference = np.frombuffer(decompressor.decompress(frame), np.uint16).reshape(base.shape)
        decoded[name] = np.bitwise_xor(difference, bits(base)).view(base.dtype)
    return decoded


def bits(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint16]:
    """An array's bits; floats are never compared."""
    return array.view(np.uint16)


def check(got: State, expected: State) -> None:
    """Stop if two states do not have the same bits: a figure of a wrong result is worth nothing."""
    if got.keys() != expected.keys() or not all(np.array_equal(bits(got[n]), bits(expected[n])) for n in got):
        raise SystemExit("error: what was read is not what was written")


def run(megabytes: int, rounds: int, policy: df.Policy, directory: Path) -> dict[str, Any]:
    """Commit `rounds` steps, then read the first one as often, each beside the peer."""
    drift = Drift(megabytes << 20, tensor_bytes=min(32, megabytes) << 20)
    path = directory / "store"
    seconds: dict[str, list[float]] = {}

    def measure(name: str, function: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = function()
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    zero = old = drift.state()
    one: State = {}
    frames_one: list[bytes] = []
    costs = []
    with df.create(path).writer(policy=policy) as writer:
        first = measure("first commit", lambda: writer.commit(step=0, tensors=zero))
        for step in range(1, rounds + 1):
            drift.step()
            new = drift.state()
            frames = measure("peer encode", partial(peer_encode, old, new))
            info = measure("commit", partial(writer.commit, step=step, tensors=new))
            changed = sum(int(np.count_nonzero(bits(new[name]) != bits(old[name]))) for name in new)
            costs.append((changed, info.bytes_written, sum(map(len, frames))))
            if step == 1:
                one, frames_one = new, frames
            old = new
    for _ in range(rounds):
        decoded = measure("peer decode", lambda: peer_decode(zero, frames_one))
        check(decoded, one)
        del decoded
        read = measure("read", lambda: df.open(path).version(step=1).state_dict())
        check(read, one)
        del read
        before, version = df.open(path).version(step=0), df.open(path).version(step=1)
        followed = measure("follow", partial(version.follow, before, zero))
        check(followed, one)
        del followed
        measure("read newest", lambda: df.open(path).version().state_dict())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    nbytes = sum(array.nbytes for array in zero.values())
    return {
        "megabytes": megabytes,
        "rounds": rounds,
        "keyframe": policy.keyframe,
        "density": statistics.median(changed for changed, _, _ in costs) / (nbytes // 2),
        "first commit ratio": first.bytes_written / nbytes,
        "seconds": median,
        "GB/s": {name: nbytes / value / 1e9 for name, value in median.items()},
        "ratios": {
            f"{ours} / {peer}": median[ours] / median[peer]
            for ours, peer in (
                ("commit", "peer encode"),
                ("read", "peer encode"),
                ("read", "peer decode"),
                ("follow", "peer decode"),
            )
        },
        "bytes a change": statistics.median(written / changed for changed, written, _ in costs),
        "peer bytes a change": statistics.median(peer / changed for changed, _, peer in costs),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Commit and read against XOR + zstd-1 of the same bytes.")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the bf16 state (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="steps to measure (default: 5)")
    parser.add_argument("--keyframe", choices=("planes", "raw"), default=df.Policy().keyframe)
    parser.add_argument("--threads", type=int, default=df.Policy().threads)
    strata = argparse.BooleanOptionalAction
    parser.add_argument("--strata", action=strata, help="code positions by magnitude class (or the default)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    policy = df.Policy(keyframe=options.keyframe, strata=options.strata, threads=options.threads)
    directory = Path(tempfile.mkdtemp(prefix="deltaformat-bench-"))
    try:
        result = run(options.megabytes, options.rounds, policy, directory)
    finally:
        shutil.rmtree(directory)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{options.megabytes} MB of bf16, {result['density']:.2%} changed a step; medians of {options.rounds}"
    )
    for name, value in result["seconds"].items():
        print(f"  {name:24} {value:8.3f} s   {result['GB/s'][name]:6.2f} GB/s")
    for name, value in result["ratios"].items():
        print(f"  {name:24} {value:8.2f}")
    print(
        f"  bytes a change           {result['bytes a change']:8.3f}"
        f"     peer {result['peer bytes a change']:.3f}"
    )
    print(f"  first commit             {result['first commit ratio']:8.3f} of raw")
    return 0


if __name__ == "__main__":
    sys.exit(main())
