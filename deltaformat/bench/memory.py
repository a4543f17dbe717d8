"""How much memory a writer, a cold reader and a follower take, measured in a process of its own.

    python -m deltaformat.bench.memory MEGABYTES STEPS

prints JSON. Peaks are of resident memory above what the process had before, with the given state in it; on
systems other than Linux there is no figure.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import deltaformat as df
from deltaformat.bench.codecs import bits
from deltaformat.bench.stores import scratch
from deltaformat.bench.synthetic import SyntheticTraining

__all__ = ["measure_memory"]

_STATUS = Path("/proc/self/status")
_PEAK = Path("/proc/self/clear_refs")
GROWN_FROM = 5
"""Steps after which a writer should grow no more."""


def measure_memory(megabytes: int, steps: int) -> dict[str, float] | None:
    """Run this module as a program; None where the system does not tell.

    Args:
        megabytes: Size of the state, in 10^6 bytes.
        steps: Steps over which growth is looked at.

    Returns:
        `state`: bytes of it. `writer`, `cold read`, `follow`: peaks in bytes, the results of reads included.
        `growth`: bytes that a writer of a small state grew by, from the fifth step on.
    """
    if not _STATUS.exists() or not _PEAK.exists():
        return None
    command = [sys.executable, "-m", "deltaformat.bench.memory", str(megabytes), str(steps)]
    # What is freed goes back at once; otherwise glibc keeps it, and a peak would hide in it.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _status(key: str) -> int:
    return int(_STATUS.read_text().split(f"{key}:")[1].split()[0]) * 1024


def _peak_of(function: Callable[[], object]) -> int:
    gc.collect()
    _PEAK.write_text("5")  # the peak begins anew (proc(5))
    before = _status("VmRSS")
    kept = function()
    peak = _status("VmHWM") - before
    del kept
    return peak


def _main(megabytes: int, steps: int) -> dict[str, float]:
    with scratch() as directory:
        growth = _growth(directory / "small", steps)
        training = SyntheticTraining(megabytes * 10**6 // 2, lr=3e-6)
        old = training.state()
        training.step()
        new = training.state()
        del training
        place = directory / "store"
        found = {"state": float(sum(array.nbytes for array in old.values())), "growth": float(growth)}
        df.create(place)

        def commits() -> None:
            with df.open(place).writer() as writer:
                writer.commit(step=0, tensors=old)
                writer.commit(step=1, tensors=new)

        found["writer"] = _peak_of(commits)
        found["cold read"] = _peak_of(lambda: df.open(place).version().state_dict())
        store = df.open(place)
        previous = store.version(step=0)
        found["follow"] = _peak_of(lambda: store.version(step=1).follow(previous, old))
        return found


def _growth(place: Path, steps: int) -> int:
    """Commit a state of 4 MB again and again; what memory grew by at most after the fifth step."""
    draw = np.random.default_rng(0)
    state = {f"w{number}": draw.integers(0, 1 << 16, 500_000, np.uint16) for number in range(4)}
    sizes = []
    with df.create(place, block_bytes=1 << 16).writer() as writer:
        for step in range(GROWN_FROM + steps + 1):
            for tensor in bits(state).values():  # the same memory
                tensor[draw.integers(0, tensor.size, 2_000)] += np.uint16(1)
            writer.commit(step=step, tensors=state)
            gc.collect()
            sizes.append(_status("VmRSS"))
    return max(sizes[GROWN_FROM:]) - sizes[GROWN_FROM]


if __name__ == "__main__":
    print(json.dumps(_main(int(sys.argv[1]), int(sys.argv[2]))))
