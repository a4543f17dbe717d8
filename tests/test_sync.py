"""Checkpoint directories kept at a version: whole at every moment, healed after a kill at any, and the
command."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cliruns import runner
from followworkers import BLOCK, make_store, trained
from safetensors.numpy import load_file
from tinystore import DictStorage, content
from watching import Faulty, Recorder, failure

import deltaformat as df
from deltaformat import sync
from deltaformat.checkpoint import open_checkpoint
from deltaformat.errors import (
    ConflictError,
    CorruptError,
    ErrorCode,
    MalformedError,
    MissingError,
    StoreError,
    UnsafeError,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX locks and links")
SHARD = 100_000
STEPS = 9


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("sync") / "store"
    make_store(path, STEPS)
    return path


@pytest.fixture(params=[False, True], ids=["slots", "in place"])
def in_place(request):
    return request.param


def load(directory):
    """What any tool reads from a checkpoint directory, by its index."""
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    placed = json.loads(index.read_text())["weight_map"]
    found = {}
    for file in sorted(set(placed.values())):
        tensors = load_file(directory / file)
        assert {name for name, where in placed.items() if where == file} == set(tensors)
        found |= tensors
    return found


def check(directory, step):
    """The directory is that step, whole, with its sidecar file, and nothing that was left behind."""
    assert content(load(directory)) == content(trained(step))
    assert json.loads((directory / "config.json").read_text()) == {"step": step}
    names = {path.name for path in directory.iterdir()}
    assert not {name for name in names if "partial" in name or "dirty" in name or "changes" in name}
    state = json.loads((directory / ".deltaformat.json").read_text())
    assert state["step"] == step
    assert state["version"] == f"{state['seq']}:{state['root']}"
    assert len(open_checkpoint(directory.resolve())) == len(trained(step))


def test_to_and_fro(made, tmp_path, in_place):
    """Forth by what changed, each slot from the version it has; anywhere else by reading anew."""
    watched = Recorder(df.storage.open_storage(made))
    store = df.open(watched)
    out = tmp_path / "out"
    with store.sync(out, in_place=in_place, max_shard_bytes=SHARD) as kept:
        assert kept.version is None
        before = {}
        for step in (0, 1, 2, 5, 8, 8, 3, 4, None, None):
            watched.clear()
            report = kept.update(step)
            fetched = sum(call.nbytes for call in watched.of("get_ranges"))
            at = STEPS - 1 if step is None else step
            check(out, at)
            assert kept.version.startswith(f"{store.version(step=at).seq}:df1:")
            if report is None:
                assert fetched == 0
                continue
            assert (report.step, report.tensors) == (at, 13)
            assert Path(report.path).resolve() == out.resolve()
            assert report.fetched_bytes == fetched
            assert out.is_symlink() != in_place
            previous = before.get(report.path)
            if previous is not None and previous <= at:
                assert report.patched
                assert 0 < report.written_bytes < 0.15 * report.nbytes
            elif step == 1 and not in_place:
                assert report.patched  # the second slot is copied from the first
            elif previous is not None:
                assert not report.patched
            before[report.path] = at
    with pytest.raises(MalformedError, match="closed"):
        kept.update()
    with store.sync(out, in_place=in_place) as again:  # finds it as it was, and nothing to do
        watched.clear()
        assert again.update() is None
        assert not watched.of("get_ranges")
        check(out, STEPS - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["out"] if in_place else [".out.deltaformat", "out"]
    )


def test_who_loads_finds_whole_versions(made, tmp_path):
    """A server that opens the link finds one version, whole; what it has mapped stays until the version after
    next."""
    store = df.open(made)
    out, seen, wrong, over = tmp_path / "out", [], [], threading.Event()

    def serve():
        while not over.is_set():
            directory = out.resolve()
            found = load(directory)
            step = int(found["step"])
            same_slot = json.loads((directory / ".deltaformat.json").read_text())["step"] == step
            if out.resolve() == directory and same_slot and content(found) != content(trained(step)):
                wrong.append(step)
            seen.append(step)

    with store.sync(out, max_shard_bytes=SHARD) as kept:
        kept.update(0)
        server = threading.Thread(target=serve)
        server.start()
        for number in range(12):
            mapped = open_checkpoint(out.resolve())
            at = int(mapped["step"].data.view(np.int64)[0])
            kept.update((number * 2 + 1) % STEPS)
            assert content({"w": mapped["layers.3.weight"].data}) == content(
                {"w": trained(at)["layers.3.weight"].reshape(-1).view(np.uint8)}
            )
        over.set()
        server.join()
    assert len(seen) > 3
    assert wrong == []


def test_sets_that_change(tmp_path, in_place):
    """Tensors and sidecar files come, go and change their form; a directory takes a file's place."""
    states = [
        {"a": np.arange(3000, dtype=np.uint16), "b": np.ones((5, 7), np.float32)},
        {"a": np.arange(3000, dtype=np.uint16).reshape(30, 100), "c": np.zeros(4, np.int64)},
        {"a": np.arange(3000, dtype=np.uint16).reshape(30, 100), "c": np.ones(4, np.int64)},
        {"c": np.ones(4, np.int64), "empty": np.zeros((0, 3), np.float16)},
    ]
    files = [
        {"config.json": b"{}", "notes": b"x", "deep/er/a.txt": b"1"},
        {"config.json": b"{}", "notes/a.txt": b"y"},
        {"config.json": b'{"x": 1}', "notes": b"z", "b.txt": b""},
        {},
    ]
    store = df.create(DictStorage(), block_bytes=256)
    with store.writer() as writer, store.sync(tmp_path / "out", in_place=in_place) as kept:
        for step, (state, sidecars) in enumerate(zip(states, files, strict=True)):
            writer.commit(step=step, tensors=state, files=sidecars, allow_set_change=True)
            report = kept.update()
            assert content(load(tmp_path / "out")) == content(state)
            found = {
                str(path.relative_to(tmp_path / "out")): path.read_bytes()
                for path in (tmp_path / "out").rglob("*")
                if path.is_file() and not path.name.startswith((".deltaformat", "model"))
            }
            assert found == sidecars
            assert report.patched == (step == 2 and in_place)
        for step in (1, 0, 3, 2):
            kept.update(step)
            assert content(load(tmp_path / "out")) == content(states[step])


def test_damage_is_mended(made, tmp_path, in_place):
    """What is there is verified when a process takes it over; a block that is damaged is fetched again."""
    watched = Recorder(df.storage.open_storage(made))
    store = df.open(watched)
    out = tmp_path / "out"
    with store.sync(out, in_place=in_place, max_shard_bytes=SHARD) as kept:
        kept.update(4)
        if not in_place:
            kept.update(5)
            kept.update(4)
    for newer in (False, True):
        shard = sorted(out.glob("model-*.safetensors"))[1]
        data = bytearray(shard.read_bytes())
        data[-70] ^= 1
        shard.write_bytes(data)
        with store.sync(out, in_place=in_place) as kept:
            watched.clear()
            report = kept.update(6 if newer else 4)
            assert report.step == 4 + 2 * newer
            check(out, report.step)
            if in_place:  # a slot that is in use is not touched: the other one is brought there
                assert sum(call.nbytes for call in watched.of("get_ranges")) < 0.2 * report.nbytes
    for name in ("model-00001-of-00004.safetensors", "model.safetensors.index.json", "config.json"):
        (out / name).unlink()
        with store.sync(out, in_place=in_place, max_shard_bytes=SHARD) as kept:
            kept.update(7)
            kept.update(8)
        check(out, 8)
    (out / ".deltaformat.json").write_text("{")
    with store.sync(out, in_place=in_place) as kept, pytest.raises(CorruptError, match="delete"):
        kept.update()


def test_what_is_something_else_is_refused(made, tmp_path):
    store = df.open(made)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "model.safetensors").write_bytes(b"mine")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("used")
    for name in ("used", "file", "link"):
        for in_place in (False, True):
            with pytest.raises((ConflictError, StoreError)):
                store.sync(tmp_path / name, in_place=in_place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "used"]
    assert (tmp_path / "used" / "model.safetensors").read_bytes() == b"mine"
    with pytest.raises(ConflictError, match="root"):
        store.sync("/")
    (tmp_path / "empty").mkdir()
    with store.sync(tmp_path / "empty") as kept:
        kept.update(0)
        check(tmp_path / "empty", 0)
        with pytest.raises(ConflictError, match="another process"):
            store.sync(tmp_path / "empty")
    with pytest.raises(ConflictError, match="two slots"):
        store.sync(tmp_path / "empty", in_place=True)
    with store.sync(tmp_path / "one", in_place=True) as kept:
        kept.update(0)
        with pytest.raises(ConflictError, match="another process"):
            store.sync(tmp_path / "one", in_place=True)
    with pytest.raises(ConflictError, match="in place"):
        store.sync(tmp_path / "one")
    other = df.create(DictStorage())
    with other.writer() as writer:
        writer.commit(step=0, tensors={"t": np.zeros(3)})
    for name, in_place in (("empty", False), ("one", True)):
        with (
            other.sync(tmp_path / name, in_place=in_place) as kept,
            pytest.raises(ConflictError, match="another store"),
        ):
            kept.update()
        check(tmp_path / name, 0)


def test_sidecar_paths_of_its_own_are_refused(tmp_path, in_place):
    """DF-MAN-10: nothing is written where a version would overwrite what is kept here."""
    store = df.create(DictStorage())
    with store.writer() as writer:
        writer.commit(step=0, tensors={"t": np.zeros(3)}, files={".deltaformat.json": b"{}"})
    with store.sync(tmp_path / "out", in_place=in_place) as kept, pytest.raises(UnsafeError):
        kept.update()
    assert not (tmp_path / "out" / ".deltaformat.json").exists()


def test_a_store_that_fails(made, tmp_path, in_place):
    """At any operation: with slots the version that was there stays; in place it is marked; the next attempt
    goes on."""
    faulty = Faulty(df.storage.open_storage(made))
    store = df.open(faulty)
    out = tmp_path / "out"
    failed = 0
    with store.sync(out, in_place=in_place, max_shard_bytes=SHARD) as kept:
        kept.update(0)
        at = 0
        for step in (1, 4, 2):
            for nth in range(100):
                left = [nth]

                def fault(operation, key, left=left):
                    left[0] -= 1
                    return failure(key) if left[0] < 0 else None

                faulty.fault = fault
                try:
                    kept.update(step)
                except StoreError:
                    failed += 1
                    if not (out / ".deltaformat.dirty").exists():
                        check(out, at)
                    assert in_place or not (out / ".deltaformat.dirty").exists()
                    continue
                finally:
                    faulty.fault = faulty.none
                break
            check(out, step)
            at = step
    assert failed > 5


@pytest.mark.parametrize("failing", ["replace", "fsync", "posix_fallocate"])
def test_a_disk_that_fails(made, tmp_path, monkeypatch, in_place, failing):
    """Any call of the file system: StoreError, and the next attempt goes on."""
    store, out = df.open(made), tmp_path / "out"
    holder = Path if failing == "replace" else os
    real, count, broken, failures = getattr(holder, failing), 0, 0, 0

    def fail(*arguments):
        nonlocal count
        count += 1
        if count == broken:
            raise OSError(28, os.strerror(28))
        return real(*arguments)

    with store.sync(out, in_place=in_place, max_shard_bytes=SHARD) as kept:
        for step in (0, 1, 3, 2):
            monkeypatch.setattr(holder, failing, fail)
            for broken in range(1, 60):  # noqa: B007 - `fail` looks at it
                count = 0
                try:
                    kept.update(step)
                    break
                except StoreError:
                    failures += 1
            monkeypatch.setattr(holder, failing, real)
            check(out, step)
    assert failures >= 3


def test_versions_that_were_collected(tmp_path, in_place):
    """DF-GC-05: the version that a directory has may be gone: what differs is read anew."""
    from datetime import timedelta

    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors=trained(0), files={"config.json": b'{"step": 0}'})
        with store.sync(tmp_path / "out", in_place=in_place) as kept:
            kept.update()
        writer.commit(step=1, tensors=trained(1), files={"config.json": b'{"step": 1}'})
    for _ in range(2):
        storage.advance(hours=1)
        store.gc(keep_last=1, grace=timedelta(0), dry_run=False)
    with store.sync(tmp_path / "out", in_place=in_place) as kept:
        kept.update()
    check(tmp_path / "out", 1)


# -- kill -9 -------------------------------------------------------------------------------------------------

SYNC = """
import os, random, signal, sys
sys.path[:0] = {paths!r}
import numpy as np, pyarrow
import deltaformat as df
from deltaformat import changefile, slots
left = [{die}]
def counted(real):
    def call(*arguments, **options):
        result = real(*arguments, **options)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call
slots.write_block = counted(slots.write_block)
for name in ("replace", "unlink", "symlink_to", "mkdir"):
    setattr(slots.Path, name, counted(getattr(slots.Path, name)))
kept = df.open({store!r}).sync({out!r}, in_place={in_place}, max_shard_bytes={shard})
rng = random.Random({seed})
print("ready", flush=True)
while True:
    report = kept.update(rng.randrange({steps}))
    print(report.step if report else "", flush=True)
"""


@pytest.mark.slow
def test_kill_9(made, tmp_path, in_place):
    """Killed at any moment: with slots what is there is whole, in place it is whole or marked; the next
    process heals it, and ends at any version, bit for bit.
    """
    rng = random.Random(8 + in_place)
    store, out = df.open(made), tmp_path / "out"
    paths = [str(Path(__file__).parent), str(Path(df.__file__).parent.parent)]
    dirty = 0
    for number in range(20):
        die = rng.randint(1, 200) if number % 2 else 0  # by itself, at the n-th write, or by time
        text = SYNC.format(
            paths=paths,
            store=str(made),
            out=str(out),
            in_place=in_place,
            shard=SHARD,
            die=die,
            seed=number,
            steps=STEPS,
        )
        with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
            try:
                process.stdout.readline()
                if not die:
                    for _ in range(rng.randint(0, 4)):
                        process.stdout.readline()
                    time.sleep(rng.random() * 0.03)
                    process.send_signal(signal.SIGKILL)
                process.wait(60)
            finally:
                process.kill()
        marked = (out / ".deltaformat.dirty").exists()
        dirty += marked
        if (out / ".deltaformat.json").exists() and not marked:
            state = json.loads((out / ".deltaformat.json").read_text())
            assert content(load(out)) == content(trained(state["step"]))
        else:
            assert in_place or not out.exists()
        step = rng.randrange(STEPS)
        with store.sync(out, in_place=in_place, max_shard_bytes=SHARD) as kept:
            kept.update(step)
            check(out, step)
            if number % 3 == 0:
                kept.update()
                check(out, STEPS - 1)
    assert dirty >= 4 if in_place else dirty == 0
    names = {path.name for path in (out if in_place else tmp_path / ".out.deltaformat").iterdir()}
    assert not {name for name in names if "partial" in name}


def test_a_first_sync_goes_on_where_it_was_cut_short(made, tmp_path, in_place):
    """What had arrived before is not fetched again."""
    watched = Recorder(df.storage.open_storage(made))
    left = [40]

    def fault(operation, key):
        left[0] -= operation == "get_ranges"
        return failure(key) if left[0] < 0 else None

    faulty = Faulty(watched, fault)
    with df.open(faulty, memory_budget=1).sync(
        tmp_path / "out", in_place=in_place, max_shard_bytes=SHARD
    ) as kept:
        with pytest.raises(StoreError):
            kept.update(0)
        watched.clear()
        faulty.fault = faulty.none
        report = kept.update(0)
    check(tmp_path / "out", 0)
    fetched = sum(call.nbytes for call in watched.of("get_ranges"))
    assert report.fetched_bytes == fetched < 0.75 * report.nbytes


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.delenv("DELTAFORMAT_DEBUG", raising=False)
    return runner(capsys)


def test_the_command(run, made, tmp_path, in_place):
    flags = ["--in-place"] if in_place else []
    out = tmp_path / "out"
    first = run("sync", made, out, "--once", "--step", 3, "--max-shard-size", "100kB", *flags)
    assert first.code == 0, first.err
    assert "step 3 of main" in first.out
    check(out, 3)
    second = run("sync", made, out, "--json", *flags)
    assert second.json["step"] == STEPS - 1
    assert second.json["updated"] is True
    assert second.json["version"] == f"{second.json['seq']}:{second.json['root']}"
    check(out, STEPS - 1)
    third = run("sync", made, out, "--json", *flags)
    assert third.json == {"store": second.json["store"], "updated": False, "version": second.json["version"]}
    assert "already" in run("sync", made, out, *flags).out
    missing = run("sync", made, out, "--step", 99, *flags)
    assert (missing.code, missing.out) == (1, "")
    usage = run("sync", made, out, "--watch", "--step", 1)
    assert usage.code == 2
    assert run("sync", made, out, "--watch", "--poll", "x").code == 2
    other = run("sync", made, made, "--json")
    assert (other.code, other.json["error"]["code"]) == (1, "already-exists")
    nothing = run("sync", made, tmp_path / "none", "--branch", "nope")
    assert nothing.code == 1
    assert "no branch" in nothing.err
    empty = tmp_path / "empty"
    df.create(empty).writer().close()
    assert "nothing has been committed yet" in run("sync", empty, tmp_path / "x").err


def test_the_command_watches(tmp_path):
    """`--watch --json`: a line for every version that was taken; a store that fails for a while is told."""
    path, out = tmp_path / "store", tmp_path / "out"
    store = make_store(path, 1)
    command = [
        sys.executable,
        "-m",
        "deltaformat",
        "sync",
        str(path),
        str(out),
        "--watch",
        "--poll",
        "0.02",
        "--hold",
        "0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = [json.loads(process.stdout.readline())]
            with store.writer() as writer:
                for step in range(1, 4):
                    writer.commit(
                        step=step, tensors=trained(step), files={"config.json": b'{"step": %d}' % step}
                    )
                    while not lines or lines[-1]["step"] < step:
                        lines.append(json.loads(process.stdout.readline()))
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert process.stderr.read() == "error: interrupted [interrupted]\n"
        finally:
            process.kill()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["patched"] for line in lines] == [False, True, True, True]
    check(out, 3)


def test_watching_goes_on_after_failures(made, tmp_path, monkeypatch, capsys):
    """The store fails, the branch is not there yet: it is tried again, later each time."""
    from deltaformat import polling
    from deltaformat.cli import main

    waits, attempts = [], []

    def update(self, step=None):
        attempts.append(step)
        if len(attempts) in (2, 3):
            raise failure("log/x")
        if len(attempts) == 4:
            raise MissingError(ErrorCode.BRANCH_MISSING, "no branch", where="log")
        if len(attempts) > 5:
            raise KeyboardInterrupt
        return None

    monkeypatch.setattr(sync.CheckpointSync, "update", update)
    monkeypatch.setattr(polling, "pause", lambda seconds, stop: waits.append(seconds))
    monkeypatch.setattr(polling.random, "random", lambda: 1.0)
    assert main(["sync", str(made), str(tmp_path / "out"), "--watch", "--poll", "0.5"]) == 130
    assert waits == [0.5, 1.0, 2.0, 2.0, 0.5]
    assert capsys.readouterr().err.count("trying again") == 2
