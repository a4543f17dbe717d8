"""Several at once: writers of one branch, writers of two, ranks of one step, readers, tags, forks and a
collector.
"""

import multiprocessing
import os
import re
import socket
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise

import pytest
from tinystore import BLOCK, DictStorage, content, records, truth, weights
from watching import Recorder
from workers import POLICY, compete, stage_share, write_branch

import deltaformat as df
from deltaformat.errors import ConflictError, ErrorCode, InconsistentError, MissingError
from deltaformat.localstorage import LocalStorage

NOW = timedelta(0)


@contextmanager
def processes(count):
    """A pool of new processes, and a barrier that all of them can be handed."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(count, mp_context=context) as pool:
        yield pool, manager.Barrier(count)


def log_of(directory):
    """All records, contiguous from 0."""
    storage = LocalStorage(str(directory))
    found = records(DictStorage({info.key: storage.get(info.key) for info in storage.list("log/")}))
    assert [record["seq"] for record in found] == list(range(len(found)))
    return found


def commits_of(history, branch):
    return [record for record in history if record["kind"] == "commit" and record["branch"] == branch]


def test_two_writers_of_one_branch(tmp_path):
    """DF-CMT-02, DF-CMT-04, DF-LOG-05: 200 commits by two processes: none lost, none doubled; the fenced one
    is told by whom.
    """
    df.create(tmp_path, block_bytes=BLOCK)
    with processes(2) as (pool, barrier):
        running = [pool.submit(compete, tmp_path, name, 100, barrier) for name in "ab"]
        results = {name: future.result(timeout=120) for name, future in zip("ab", running, strict=True)}
    history = log_of(tmp_path)
    commits = commits_of(history, "main")
    assert [commit["step"] for commit in commits] == list(range(200))
    for name, (acknowledged, _) in results.items():
        own = [commit for commit in commits if commit["metadata"]["of"] == name]
        assert [(commit["seq"], commit["step"]) for commit in own] == acknowledged
        assert [commit["metadata"]["n"] for commit in own] == list(range(100))
    pids = {
        name: {r["pid"] for r in history if r["kind"] == "claim" and r["seq"] in claims_of(commits, name)}
        for name in "ab"
    }
    conflicts = 0
    for name, other in ("ab", "ba"):
        for held, message in results[name][1]:
            assert held
            assert socket.gethostname() in message
            assert {int(pid) for pid in re.findall(r"pid ([0-9]+), since", message)} == pids[other]
            conflicts += 1
    assert conflicts >= 2
    store = df.open(tmp_path)
    for step in (0, 57, 123, 199):
        assert content(store.version(step=step).state_dict()) == truth(step)
    report = store.verify()
    assert (report.findings, report.records) == ([], len(history))
    with (
        store.writer()
    ):  # all claims before are fenced: only what a fenced commit left is swept, and nothing else
        store.gc(keep_last=1000, grace=NOW, dry_run=False)
    assert [content(store.version(step=step).state_dict()) == truth(step) for step in range(0, 200, 9)] == [
        True
    ] * 23


def claims_of(commits, name):
    return {commit["claim"] for commit in commits if commit["metadata"]["of"] == name}


def test_two_branches_at_once(tmp_path):
    """DF-CMT-02: commits of two processes to two branches collide at the log's end and are all there, each
    once.
    """
    store = df.create(tmp_path, block_bytes=BLOCK)
    with processes(2) as (pool, barrier):
        running = {name: pool.submit(write_branch, tmp_path, name, 60, barrier) for name in ("left", "right")}
        acknowledged = {name: future.result(timeout=120) for name, future in running.items()}
    history = log_of(tmp_path)
    for branch, seqs in acknowledged.items():
        assert [commit["seq"] for commit in commits_of(history, branch)] == seqs
        seed = sum(branch.encode())
        for step in (0, 31, 59):
            assert content(store.version(step=step, branch=branch).state_dict()) == truth(step, seed)
    order = [record["branch"] for record in history if record["kind"] == "commit"]
    assert sum(a != b for a, b in pairwise(order)) > 10  # they did run side by side
    assert store.verify(branch="left").findings == []


def test_parts_of_two_processes(tmp_path):
    """DF-CMT-06, DF-MAN-05: two processes stage parts of each step, this one commits them."""
    store = df.create(tmp_path, block_bytes=BLOCK)
    early, info = None, None
    with processes(2) as (pool, _), store.writer(policy=POLICY) as writer:
        for step in range(4):
            ticket = str(writer.ticket)
            early = df.Part.from_bytes(stage_share(tmp_path, ticket, 4, 0, 1))
            staged = [pool.submit(stage_share, tmp_path, ticket, step, number, 2) for number in range(2)]
            parts = [df.Part.from_bytes(future.result(timeout=60)) for future in staged]
            assert {part.parent for part in parts} == {None if info is None else info.seq}
            info = writer.commit(step=step, parts=parts)
            assert content(df.open(tmp_path).version().state_dict()) == truth(step)
        with pytest.raises(ConflictError) as caught:  # it was staged against step 2
            writer.commit(step=4, parts=[early])
        assert caught.value.code is ErrorCode.PARENT_MOVED
        with pytest.raises(InconsistentError) as caught:  # one of two ranks is missing
            writer.commit(step=4, parts=[df.Part.from_bytes(stage_share(tmp_path, ticket, 4, 0, 2))])
        assert caught.value.code is ErrorCode.SET_CHANGED
    with store.writer():
        with pytest.raises(ConflictError) as caught:
            stage_share(tmp_path, ticket, 4, 0, 2)
        assert caught.value.code is ErrorCode.BRANCH_HELD
        assert f"pid {os.getpid()}, since" in str(caught.value)
    assert store.verify(all=True).findings == []


def test_readers_while_a_writer_commits(tmp_path):
    """DF-RD-03: threads that share a store, and others with their own, read whole steps while a writer goes
    on.
    """
    shared = df.create(tmp_path, block_bytes=BLOCK)
    stop, seen, early = threading.Event(), [], set()

    def read(store):
        newest, state = None, None
        while not stop.is_set() or newest is None:
            try:
                version = store.version()
            except MissingError as error:
                early.add(error.code)
                continue
            assert newest is None or version.seq >= newest.seq  # time does not go back
            state = version.state_dict() if newest is None else version.follow(newest, state)
            assert content(state) == truth(version.step)
            old = version.step // 2
            assert content({"w": store.version(step=old).get_tensor("w")})["w"] == truth(old)["w"]
            seen.append(version.step)
            newest = version
        return newest.step

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(read, store) for store in (shared, shared, df.open(tmp_path))]
        try:
            with df.open(tmp_path).writer(policy=POLICY) as writer:
                for step in range(30):
                    writer.commit(step=step, tensors=weights(step), block=step % 3 == 0)
        finally:
            stop.set()
        assert max(future.result(timeout=60) for future in running) > 5
    assert len(set(seen)) > 5
    assert early <= {ErrorCode.VERSION_MISSING, ErrorCode.BRANCH_MISSING}


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "own stores"])
def test_forks_and_tags_race_commits(tmp_path, shared):
    """DF-LOG-05, DF-CMT-02: whatever takes the place of a record, it is made anew and is there once."""
    first = df.create(tmp_path, block_bytes=BLOCK)
    with first.writer(policy=POLICY) as writer:
        writer.commit(step=0, tensors=weights(0))
    start = threading.Barrier(3)

    def store():
        return first if shared else df.open(tmp_path)

    def commit(of):
        with of.writer(policy=POLICY) as writer:
            start.wait()
            return [writer.commit(step=step, tensors=weights(step)).seq for step in range(1, 16)]

    def fork(of):
        start.wait()
        for number in range(12):
            of.fork(f"branch-{number}", step=0)
        with pytest.raises(ConflictError):
            of.fork("branch-3", step=0)
        of.drop("branch-4")

    def tag(of):
        start.wait()
        for number in range(12):
            of.tag(f"tag-{number}", step=0)
        of.delete_tag("tag-5")

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(do, store()) for do in (commit, fork, tag)]
        seqs, *_ = [future.result(timeout=60) for future in running]
    history = log_of(tmp_path)
    assert [record["seq"] for record in commits_of(history, "main")][1:] == seqs
    found = df.open(tmp_path)
    assert set(found.branches()) == {"main", *(f"branch-{n}" for n in range(12) if n != 4)}
    assert set(found.tags()) == {f"tag-{n}" for n in range(12) if n != 5}
    assert (found.branches(), found.tags()) == (first.branches(), first.tags())
    assert len(history) == 1 + 1 + 1 + 15 + 12 + 1 + 12 + 1
    assert found.verify(all=True).findings == []


def test_collection_races_a_writer_and_readers(tmp_path):
    """DF-GC-01, DF-GC-03, DF-GC-05: with no grace at all a reader gets the step or is told that it was
    collected; the newest stays.
    """
    store = df.create(tmp_path, block_bytes=BLOCK)
    stop, outcomes = threading.Event(), set()

    def read():
        own = df.open(tmp_path)
        while not stop.is_set():
            head = own.branches()["main"]
            for step in {head.step, max(0, head.step - 3), head.step // 2}:
                try:
                    with own.version(step=step) as version:
                        names = version.keys()
                        for name in names:  # in the middle of a version
                            time.sleep(0.001)
                            tensor = version.get_tensor(name)
                            assert content({name: tensor})[name] == truth(step)[name]
                    outcomes.add("read")
                except MissingError as error:
                    outcomes.add(error.code.value)

    def clean():
        own = df.open(tmp_path)
        while not stop.is_set():
            own.gc(keep_last=2, grace=NOW, dry_run=False)

    with store.writer(policy=POLICY) as writer, ThreadPoolExecutor(2) as pool:
        writer.commit(step=0, tensors=weights(0))
        running = [pool.submit(read), pool.submit(clean)]
        try:
            for step in range(1, 40):
                writer.commit(step=step, tensors=weights(step), files={"n.txt": b"%d" % step})
        finally:
            stop.set()
        for future in running:
            future.result(timeout=60)
    assert outcomes == {"read", "version-retired"}
    assert content(df.open(tmp_path).version().state_dict()) == truth(39)
    assert store.verify(all=True).findings == []
    log_of(tmp_path)


def test_what_is_staged_is_not_collected():
    """DF-GC-03: objects of a commit in the making belong to a claim that stands; they wait for its record
    however long it takes.
    """
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    with store.writer(policy=POLICY) as writer:
        writer.commit(step=0, tensors=weights(0))
        part = writer.stage(step=1, tensors=weights(1))
        before = set(storage.objects)
        storage.advance(days=400)
        assert store.gc(keep_last=1, grace=NOW, dry_run=False).deleted == []
        assert set(storage.objects) == before
        writer.commit(step=1, parts=[part])
    assert content(store.version().state_dict()) == truth(1)
    assert store.verify(all=True).findings == []


def test_collection_spares_what_a_writer_has_just_written_again():
    """DF-GC-02: an object long retired that a writer under the same claim has written anew is about to be
    named anew.

    A sidecar file goes back to what it was; the collector runs between the file and the record.
    """
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    recorder = Recorder(storage)
    with df.open(recorder).writer(policy=POLICY) as writer:
        for step, config in enumerate([b"old", b"new", b"new"]):
            writer.commit(step=step, tensors=weights(step), files={"config.json": config})
        store.gc(keep_last=1, dry_run=False)
        storage.advance(days=30)

        def collect_before_the_record(operation, key, _):
            if operation == "create" and key.startswith("log/"):
                recorder.before = lambda *_: None
                reports.append(store.gc(keep_last=1, dry_run=False))

        reports = []
        recorder.before = collect_before_the_record
        writer.commit(step=3, tensors=weights(3), files={"config.json": b"old"})
    assert len(reports[0].deleted) == 2  # the manifests of steps 0 and 1, but not the file
    assert store.version().read_file("config.json") == b"old"
    assert store.verify(all=True).findings == []


def test_packs_of_the_same_bytes_are_written_again():
    """DF-GC-02: the same for packs: weights that go to and fro give the same bytes, and so the same key."""
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    recorder = Recorder(storage)
    raw = df.Policy(keyframe="raw", max_chain=2)
    with df.open(recorder).writer(policy=raw) as writer:
        for step, seed in enumerate([0, 1, 2]):
            writer.commit(step=step, tensors={"noise": weights(0, seed)["noise"]})
        store.gc(keep_last=1, dry_run=False)
        storage.advance(days=30)

        def collect_before_the_record(operation, key, _):
            if operation == "create" and key.startswith("log/"):
                recorder.before = lambda *_: None
                reports.append(store.gc(keep_last=1, dry_run=False))

        reports = []
        recorder.before = collect_before_the_record
        writer.commit(step=3, tensors={"noise": weights(0, 0)["noise"]})
    assert len(reports) == 1
    assert content(store.version().state_dict())["noise"] == truth(0, 0)["noise"]
    assert store.verify(all=True).findings == []
