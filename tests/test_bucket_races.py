"""Several processes on one real S3 server, in peace and through a proxy where everything goes wrong: nothing
that was acknowledged is lost, nothing is there twice, nobody is told of a conflict that there was not.
"""

import json
import multiprocessing
import secrets
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import groupby, pairwise

import pytest
from bucketworkers import SEEDS, follow_until, race
from faultproxy import FaultProxy, Faults
from radosgw import signed_request
from tinystore import BLOCK, content, truth

import deltaformat as df
from deltaformat.keys import record_key
from deltaformat.storage import open_storage

WRITERS = ("left", "middle", "right")
FOLLOWED = (("main", False), ("left", True), ("left", True))
"""Who follows: which branch, and whether through a mirror that is shared."""


@contextmanager
def processes(count):
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(count, mp_context=context) as pool:
        yield pool, manager


def run_race(url, options, commits, mirror):
    """Three writers and three followers; what each of them reports."""
    count = len(WRITERS) + len(FOLLOWED)
    with processes(count) as (pool, manager):
        barrier, done = manager.Barrier(count), manager.Event()
        last = {branch: manager.Value("q", -1) for branch, _ in FOLLOWED}
        writing = {name: pool.submit(race, url, options, name, commits, barrier) for name in WRITERS}
        following = [
            pool.submit(
                follow_until,
                url,
                options,
                branch,
                f"file:{mirror}" if shared else None,
                last[branch],
                done,
                barrier,
            )
            for branch, shared in FOLLOWED
        ]
        written = {name: future.result(timeout=240) for name, future in writing.items()}
        for branch in last:
            steps = [step for reports in written.values() for _, at, step in reports[0] if at == branch]
            last[branch].value = max(steps)
        done.set()
        return written, [future.result(timeout=60) for future in following]


def records_of(storage):
    """All records, contiguous from 0: read one by one, to where there is none."""
    found = []
    while True:
        try:
            found.append(json.loads(storage.get(record_key(len(found)))))
        except df.errors.MissingError:
            break
    assert [record["seq"] for record in found] == list(range(len(found)))
    assert len(list(storage.list("log/"))) == len(found)
    return found


def check_race(url, options, written, followed, commits):
    """Acknowledged is logged, once; what is logged and was not acknowledged was told to be unknown."""
    storage = open_storage(url, options=options)
    history = records_of(storage)
    logged = {
        record["seq"]: (record["branch"], record["step"], record["metadata"]["of"])
        for record in history
        if record["kind"] == "commit"
    }
    acknowledged = {
        seq: (branch, step, name) for name, report in written.items() for seq, branch, step in report[0]
    }
    assert len(acknowledged) == 3 * commits
    assert acknowledged.items() <= logged.items()
    unknown = {(branch, step, name) for name, report in written.items() for branch, step in report[1]}
    assert {logged[seq] for seq in logged.keys() - acknowledged.keys()} <= unknown
    store = df.open(url, storage_options=options)
    assert store.verify(all=True).findings == []
    for branch in SEEDS:
        steps = [step for at, step, _ in logged.values() if at == branch]
        assert steps == list(range(len(steps)))  # none lost, none doubled
        for step in {0, steps[-1], steps[len(steps) // 2]}:
            with store.version(step=step, branch=branch) as version:
                assert content(version.state_dict()) == truth(step, SEEDS[branch])
    for (branch, _), seen in zip(FOLLOWED, followed, strict=True):
        assert all(a < b for a, b in pairwise(seen))
        assert seen[-1] == max(step for at, step, _ in logged.values() if at == branch)
    order = [name for _, (_, _, name) in sorted(logged.items())]
    assert len(list(groupby(order))) > commits // 4  # they did run side by side
    return history


@pytest.mark.slow
def test_three_writers_and_three_followers(s3_server, tmp_path):
    """DF-STO-02, DF-CMT-02, DF-CMT-04, DF-RD-02: 300 commits by three processes; three more follow them."""
    url, options = f"s3://tests/{secrets.token_hex(6)}", s3_server.options()
    df.create(url, block_bytes=BLOCK, storage_options=options)
    written, followed = run_race(url, options, 100, tmp_path / "mirror")
    check_race(url, options, written, followed, 100)
    assert [report[1] for report in written.values()] == [[], [], []]  # and nothing was unclear
    assert sum(report[2] for report in written.values()) > 3
    assert min(map(len, followed)) > 10


@pytest.mark.slow
def test_the_same_where_everything_goes_wrong(s3_server, tmp_path):
    """DF-CMT-02, DF-CMT-03, DF-STO-04: requests, replies and bodies are lost, delayed and doubled."""
    url = f"s3://tests/{secrets.token_hex(6)}"
    df.create(url, block_bytes=BLOCK, storage_options=s3_server.options())
    with FaultProxy(
        s3_server.endpoint,
        Faults.all(),
        seed=11,
        whole=lambda path: signed_request(s3_server, "GET", path)[1],
    ) as proxy:
        options = {**s3_server.options(), "endpoint": proxy.endpoint, "timeout": "0.4", "retry_seconds": "10"}
        written, followed = run_race(url, options, 100, tmp_path / "mirror")
        counts = proxy.counts
    check_race(url, s3_server.options(), written, followed, 100)
    for fault in ("lost_request", "lost_reply", "delay", "unavailable", "too_many", "truncated", "late"):
        assert counts[fault] > 10, (fault, counts)
    assert counts["no_range"] > 3
