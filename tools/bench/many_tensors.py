"""How commit and open grow with the number of tensors: small ones, as adapters and optimizer scalars are.

    python tools/bench/many_tensors.py [--counts 10000 30000 100000] [--json]

Each count gets a store of its own in memory: a first commit, a commit in which one tensor in a hundred
changed, and an open with one tensor read. Linear growth shows as a constant time per thousand tensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

import deltaformat as df

ELEMENTS = 64


def measure(count: int, rounds: int) -> dict[str, float]:
    """Seconds of each operation on `count` tensors; medians of `rounds`."""
    url = f"memory://many-{count}"
    values = np.random.default_rng(0).integers(0, 1 << 16, (count, ELEMENTS), np.uint16)
    state = {f"model.layers.{number}.adapter.weight": row for number, row in enumerate(values)}
    names = list(state)
    seconds: dict[str, list[float]] = {"next commit": [], "open": []}
    with df.create(url).writer() as writer:
        started = time.perf_counter()
        writer.commit(step=0, tensors=state)
        first = time.perf_counter() - started
        for step in range(1, rounds + 1):
            for name in names[step::100]:
                state[name] = state[name] ^ 1
            started = time.perf_counter()
            writer.commit(step=step, tensors=state)
            seconds["next commit"].append(time.perf_counter() - started)
            started = time.perf_counter()
            with df.open(url).version() as version:
                read = version.get_tensor(names[step])
            seconds["open"].append(time.perf_counter() - started)
            assert read.tobytes() == state[names[step]].tobytes()
    return {"first commit": first, **{name: statistics.median(values) for name, values in seconds.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Commit and open many small tensors.")
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    results = {count: measure(count, options.rounds) for count in options.counts}
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    print(f"{'tensors':>9}" + "".join(f"{name:>26}" for name in next(iter(results.values()))))
    for count, seconds in results.items():
        cells = (f"{value:.2f} s ({value / count * 1e6:.0f} ms a 1000)" for value in seconds.values())
        print(f"{count:>9,}" + "".join(f"{cell:>26}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
