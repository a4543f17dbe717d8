"""Requests, bytes and times of commits, follows and cold starts on a real S3 server.

    python tools/bench/buckets.py [--megabytes 64] [--steps 12] [--json]

Starts Ceph's radosgw on loopback (`apt-get install radosgw ceph-mon ceph-osd`), or uses `--store s3://...`
with the credentials of the environment, which then gives times but counts nothing. Requests and bytes are
counted by a proxy in between; times are taken without it, and given beside those of the peer in the same run:
the whole checkpoint as one object, put and got. Medians over the steps. A commit reads packs only where it
replaces the beginnings of chains.
"""

from __future__ import annotations

import argparse
import importlib
import json
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deltaformat as df
from deltaformat.bench.codecs import State
from deltaformat.bench.synthetic import SyntheticTraining
from deltaformat.keys import pack_key
from deltaformat.storage import open_storage

Options = Mapping[str, str] | None
Row = dict[str, Any]


def helper(name: str) -> Any:
    """A module of tests/."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    return importlib.import_module(name)


@contextmanager
def server() -> Iterator[Any]:
    """A real S3 server with the bucket `bench`."""
    radosgw = helper("radosgw")
    reason = radosgw.why_not()
    if reason is not None:
        sys.exit(f"the S3 server cannot be started: {reason}")
    root = Path(tempfile.mkdtemp(prefix="dfb-"))
    started = radosgw.start(root / "rgw")
    try:
        radosgw.make_bucket(started, "bench")
        yield started
    finally:
        radosgw.stop(root / "rgw")


def counted(passed: list[Any]) -> Row:
    """What a proxy has seen, added up."""
    return {
        "requests": len(passed),
        "packs": sum(p.method == "PUT" and "/packs/" in p.path for p in passed),
        "pack reads": sum(p.method == "GET" and "/packs/" in p.path for p in passed),
        "sent": sum(p.sent for p in passed),
        "received": sum(p.received for p in passed),
    }


def count(url: str, options: Mapping[str, str], proxy: Any, states: list[State]) -> dict[str, Row]:
    """Requests and bytes of each kind of work, medians over the steps."""
    store = df.create(url, storage_options=options)
    follower = df.open(url, storage_options=options)
    commits: list[Row] = []
    follows: list[Row] = []
    previous, held = None, {}
    with store.writer() as writer:
        for step, state in enumerate(states):
            proxy.passed()
            writer.commit(step=step, tensors=state)
            commits.append(counted(proxy.passed()))
            version = follower.version()
            held = version.state_dict() if previous is None else version.follow(previous, held)
            follows.append(counted(proxy.passed()))
            previous = version
    proxy.passed()
    df.open(url, storage_options=options).version().state_dict()
    rows = {"first commit": commits[0], "commit": median(commits[1:]), "follow": median(follows[1:])}
    return rows | {"cold start": counted(proxy.passed())}


def median(rows: list[Row]) -> Row:
    """The median of every member."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def clock(url: str, options: Options, states: list[State]) -> dict[str, float]:
    """Seconds of each kind of work, medians over the steps."""
    store = df.create(url, storage_options=options)
    peer = open_storage(f"{url}-peer", options=options)
    times: dict[str, list[float]] = {name: [] for name in ("commit", "visible", "followed", "put", "get")}
    seen: dict[int, float] = {}
    followed: dict[int, float] = {}
    stop = threading.Event()

    def follow() -> None:
        reader, previous, held = df.open(url, storage_options=options), None, {}
        while not stop.is_set():
            head = reader.branches().get("main")
            if head is None or head.step is None or head.step in seen:
                time.sleep(0.002)
                continue
            seen[head.step] = time.perf_counter()
            version = reader.version()
            held = version.state_dict() if previous is None else version.follow(previous, held)
            previous = version
            followed[head.step] = time.perf_counter()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        with store.writer() as writer:
            for step, state in enumerate(states):
                started = time.perf_counter()
                writer.commit(step=step, tensors=state)
                done = time.perf_counter()
                while step not in followed:
                    time.sleep(0.001)
                if step:
                    times["commit"].append(done - started)
                    times["visible"].append(max(0.0, seen[step] - done))
                    times["followed"].append(followed[step] - started)
    finally:
        stop.set()
        thread.join()
    whole = b"".join(array.tobytes() for array in states[-1].values())
    for number in range(3):
        key = pack_key(number, "0" * 64)
        times["put"].append(seconds(lambda key=key: peer.put(key, whole)))  # type: ignore[misc]
        times["get"].append(seconds(lambda key=key: peer.get(key)))  # type: ignore[misc]
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians["cold start"] = seconds(lambda: df.open(url, storage_options=options).version().state_dict())
    return medians


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--store", help="measure times there, and count nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    training = SyntheticTraining((options.megabytes << 20) // 2, lr=3e-6)
    states: list[State] = [training.state()]
    for _ in range(options.steps):
        training.step()
        states.append(training.state())
    rows: dict[str, Row] = {}
    if options.store:
        times = clock(f"{options.store}/{secrets.token_hex(4)}", None, states)
    else:
        with server() as started:
            url = f"s3://bench/{secrets.token_hex(4)}"
            with helper("faultproxy").FaultProxy(started.endpoint) as proxy:
                rows = count(f"{url}-counted", started.options(endpoint=proxy.endpoint), proxy, states)
            times = clock(url, started.options(), states)
    if options.json:
        print(json.dumps({"megabytes": options.megabytes, "counts": rows, "seconds": times}, indent=2))
        return
    for name, row in rows.items():
        shown = ", ".join(f"{value:,.0f} {what}" for what, value in row.items())
        print(f"{name:14} {shown}")
    for name, value in times.items():
        print(f"{name:14} {value * 1e3:9.1f} ms")
    print(f"commit / put of the whole      {times['commit'] / times['put']:6.2f}")
    print(f"cold start / get of the whole  {times['cold start'] / times['get']:6.2f}")


if __name__ == "__main__":
    main()
