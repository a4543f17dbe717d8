"""A writer that dies: at every storage operation in turn, by kill -9 at any moment, with the power. Nothing
that was acknowledged is lost.
"""

import errno
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from tinystore import BLOCK, DictStorage, content, named_objects, records, truth, weights

import deltaformat as df
from deltaformat.errors import ErrorCode, MissingError, StoreError
from deltaformat.keys import parse_key, record_key
from deltaformat.localstorage import LocalStorage
from deltaformat.storage import open_storage

REBASING = df.Policy(max_chain=3, pack_bytes=1200)
NOW = timedelta(0)


class Killed(BaseException):
    """The process is gone: no handler of errors may take it for one."""


class StopAt:
    """Kills its user at operation number `n` (from 1), before or after that is carried out; nothing works
    from then on.

    A deletion of many objects is as many operations.
    """

    def __init__(self, inner, n, *, executed):
        self.inner, self.n, self.executed = inner, n, executed
        self.count = 0
        self.url = inner.url
        self._lock = threading.Lock()

    def _do(self, operation, *arguments, **options):
        with self._lock:
            self.count += 1
            number = self.count
        if number > self.n or (number == self.n and not self.executed):
            raise Killed
        result = getattr(self.inner, operation)(*arguments, **options)
        if number == self.n:
            raise Killed
        return result

    def get(self, key, *, limit=None):
        return self._do("get", key, limit=limit)

    def get_ranges(self, key, ranges):
        return self._do("get_ranges", key, ranges)

    def put(self, key, data):
        self._do("put", key, data)

    def create(self, key, data):
        return self._do("create", key, data)

    def head(self, key):
        return self._do("head", key)

    def list(self, prefix):
        return self._do("list", prefix)

    def delete(self, keys):
        for key in keys:
            self._do("delete", [key])


# -- what is done until it is cut short ----------------------------------------------------------------------


class Acknowledged:
    """What a scenario was told had succeeded; `tried` also has what it asked for last."""

    def __init__(self):
        self.commits = {}  # seq -> (step, seed)
        self.tried = set()  # (step, seed)
        self.events = 0

    def commit(self, writer, step, seed=0, **options):
        self.tried.add((step, seed))
        if "parts" not in options:
            options["tensors"] = weights(step, seed)
        info = writer.commit(step=step, **options)
        info = info if isinstance(info, df.CommitInfo) else info.result()
        self.commits[info.seq] = (step, seed)


def three_steps():
    """A store with steps 0, 1 and 2 on main, whose writer has gone."""
    storage, done = DictStorage(), Acknowledged()
    with df.create(storage, block_bytes=BLOCK).writer(policy=REBASING) as writer:
        for step in range(3):
            done.commit(writer, step, files={"config.json": b"{}", "n.txt": b"%d" % step})
    return storage, done


def empty_store():
    storage = DictStorage()
    df.create(storage, block_bytes=BLOCK)
    return storage, Acknowledged()


def first_commit(store, done):
    with store.writer(policy=REBASING) as writer:
        done.commit(writer, 0, files={"config.json": b"{}", "vocab.txt": b"a\nb"})


def later_commits(store, done):
    with store.writer(policy=REBASING) as writer:
        for step in (3, 4):
            done.commit(writer, step, files={"n.txt": b"%d" % step}, block=step != 4)


def commit_of_parts(store, done):
    with store.writer(policy=REBASING) as writer:
        stagers = [store.stager(str(writer.ticket), policy=REBASING) for _ in range(2)]
        names = sorted(weights(3))
        for step in (3,):
            tensors = weights(step)
            parts = [
                s.stage(step=step, tensors={n: tensors[n] for n in names[i::2]})
                for i, s in enumerate(stagers)
            ]
            done.commit(writer, step, parts=[df.Part.from_bytes(part.to_bytes()) for part in parts])


def rewind(store, done):
    with store.writer(resume_from=1, policy=REBASING) as writer:
        done.commit(writer, 2, seed=7)
        done.commit(writer, 3, seed=7)


def branches_and_tags(store, done):
    store.fork("exp", step=1)
    done.events += 1
    store.tag("best", step=1)
    done.events += 1
    with store.writer("exp", policy=REBASING) as writer:
        done.commit(writer, 2, seed=7)
    store.delete_tag("best")
    done.events += 1
    store.drop("exp")
    done.events += 1


AFTER_EVENTS = [  # of branches_and_tags: branches and tags after so many
    ({"main"}, set()),
    ({"main", "exp"}, set()),
    ({"main", "exp"}, {"best"}),
    ({"main", "exp"}, set()),
    ({"main"}, set()),
]


def collection(store, done):
    store.gc(keep_last=1, grace=NOW, dry_run=False)


SCENARIOS = {
    "first commit": (empty_store, first_commit),
    "later commits": (three_steps, later_commits),
    "parts": (three_steps, commit_of_parts),
    "rewind": (three_steps, rewind),
    "branches and tags": (three_steps, branches_and_tags),
    "collection": (three_steps, collection),
}


@pytest.mark.parametrize("executed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_operation(scenario, executed):
    """DF-CMT-01, DF-WR-01, DF-GC-01, DF-GC-03: every acknowledged step reads, all is in order, the next
    writer goes on.
    """
    prepare, act = SCENARIOS[scenario]
    prepared, before = prepare()
    swept = 0
    for n in range(1, 1000):
        storage, done = prepared.copy(), Acknowledged()
        done.commits, done.tried = dict(before.commits), set(before.tried)
        killer = StopAt(storage, n, executed=executed)
        try:
            act(df.open(killer), done)
        except Killed:
            swept += check_after_crash(storage, done, scenario)
        else:
            assert killer.count < n
            break
    assert n > 8  # there was something to kill
    if scenario != "branches and tags":  # what lies under a claim of another branch stays
        assert swept > 3  # and something was left behind
    check_after_crash(storage, done, scenario)


def check_after_crash(storage, done, scenario):
    """What the dead writer left: everything reads, its leftovers stay, the next writer goes on, then they are
    swept.
    """
    check_readable(storage, done)
    if scenario == "branches and tags":
        store = df.open(storage)
        found = set(store.branches()), set(store.tags())
        assert found in AFTER_EVENTS[done.events : done.events + 2]
    check_collected(storage.copy(), done)
    go_on(storage, done)
    swept = check_collected(storage, done)
    check_readable(storage, done)
    assert df.open(storage).verify(all=True).findings == []
    return swept


def check_readable(storage, done):
    """Every acknowledged step, and every branch's newest one, reads bit for bit from a fresh store."""
    store = df.open(storage)
    retired = {seq for record in records(storage) if record["kind"] == "retire" for seq in record["commits"]}
    for seq, (step, seed) in done.commits.items():
        if seq not in retired:
            with store.version(seq=seq) as version:
                assert (version.step, content(version.state_dict())) == (step, truth(step, seed))
    for branch, head in store.branches().items():
        if head.seq is not None and head.seq not in done.commits:  # it succeeded and was not acknowledged
            with store.version(branch=branch) as version:
                assert content(version.state_dict()) in [
                    truth(*tried) for tried in done.tried if tried[0] == head.step
                ]


def go_on(storage, done):
    """The next writer takes main and commits."""
    store = df.open(storage)
    with store.writer(policy=REBASING) as writer:
        head = store.branches()["main"].step
        done.commit(writer, 0 if head is None else head + 1, seed=3)
    assert store.branches()["main"].seq == max(done.commits)


def check_collected(storage, done):
    """A collection deletes exactly: what only retired commits use, and what no commit names under a fenced
    claim (DF-GC-03).
    """
    storage.advance(minutes=1)
    before = set(storage.objects)
    store = df.open(storage)
    history = records(storage)
    commits = {record["seq"]: record for record in history if record["kind"] == "commit"}
    retired = {seq for record in history if record["kind"] == "retire" for seq in record["commits"]}
    claims = {record["seq"]: record["branch"] for record in history if record["kind"] == "claim"}
    heads = history[-1]["heads"] if history else {}
    standing = {seq for seq, branch in claims.items() if branch in heads and heads[branch]["claim"] == seq}
    held = set(store.tags().values())  # and all that is in the lineage of a head
    for head in heads.values():
        seq = head["seq"]
        while seq is not None:
            held.add(seq)
            seq = commits[seq]["parent"]
    held -= retired
    live = set()
    for seq in held:
        with store.version(seq=seq) as version:
            live |= {ref["key"] for ref in commits[seq]["manifests"]} | set(version.map.objects())
    named = named_objects(storage)
    doomed = {
        key
        for key in before
        if (claim := parse_key(key).claim) is not None
        and key not in live
        and (claim not in standing or (key in named and not key.startswith("files/")))  # DF-GC-06
    }
    report = store.gc(keep_last=1000, grace=NOW, dry_run=False)
    assert before - set(storage.objects) == doomed == {key for key, _ in report.deleted}
    assert {seq for _, _, seq in report.retired} == commits.keys() - held - retired
    return len(doomed)


@pytest.mark.parametrize("executed", [False, True], ids=["before", "after"])
def test_killed_while_a_store_is_made(executed):
    """DF-DSC-03: there is a store or there is none, and it can be made again."""
    for n in range(1, 100):
        storage = DictStorage()
        try:
            df.create(StopAt(storage, n, executed=executed), block_bytes=BLOCK)
        except Killed:
            if not storage.objects:
                with pytest.raises(MissingError, match="store-missing"):
                    df.open(storage)
            store = df.create(storage, block_bytes=BLOCK, exist_ok=True)
            with store.writer() as writer:
                writer.commit(step=0, tensors=weights(0))
            assert content(df.open(storage).version().state_dict()) == truth(0)
        else:
            assert n > 1
            return


# -- the power fails -----------------------------------------------------------------------------------------


class Disk:
    """What would be left of a directory if the power failed: entries of synced directories, with their synced
    bytes.

    Linux tells, through /proc, which file a descriptor is of.
    """

    def __init__(self, root, patch):
        self.root = root
        self.entries = {}  # a directory's inode -> name -> inode
        self.bytes = {}  # a file's inode -> bytes
        self.watch = lambda: None  # called after every sync
        self.linked = []  # (key, the tree as it was)
        for name in ("fsync", "link", "replace", "unlink"):
            patch.setattr(os, name, self._spy(getattr(os, name), getattr(self, f"_{name}")))

    def _spy(self, real, spy):
        return lambda *arguments: spy(real, *arguments)

    def _fsync(self, real, descriptor):
        real(descriptor)
        status = os.fstat(descriptor)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            self.entries[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(descriptor)}
        else:
            self.bytes[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        self.watch()

    def _link(self, real, source, target):
        self.linked.append((os.path.relpath(target, self.root), self.tree(), Path(source).read_bytes()))
        real(source, target)

    def _replace(self, real, source, target):
        old = os.stat(target).st_ino if os.path.exists(target) else None
        real(source, target)
        self.bytes.pop(old, None)

    def _unlink(self, real, path):
        status = os.stat(path)
        real(path)
        if status.st_nlink == 1:
            self.bytes.pop(status.st_ino, None)

    def tree(self):
        """key -> bytes; a name whose bytes were not synced is an empty file."""
        return dict(self._below(os.stat(self.root).st_ino, ""))

    def _below(self, inode, prefix):
        for name, child in self.entries.get(inode, {}).items():
            if child in self.entries or os.path.isdir(os.path.join(self.root, prefix + name)):
                yield from self._below(child, f"{prefix}{name}/")
            elif "#" not in name:
                yield prefix + name, self.bytes.get(child, b"")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_power_cut_after_every_sync(tmp_path, monkeypatch):
    """DF-CMT-01: whatever was not synced may vanish: no acknowledged step does, and no record outlives what
    it names.
    """
    disk, done = Disk(tmp_path / "store", monkeypatch), Acknowledged()
    monkeypatch.setattr(df.stager.PackSink, "_upload", locked(df.stager.PackSink._upload))

    def check():
        left = DictStorage(disk.tree())
        if done.commits or "deltaformat.json" in left.objects:
            check_readable(left, done)
            assert df.open(left).verify(all=True).findings == []

    store = df.create(disk.root, block_bytes=BLOCK)
    disk.watch = check
    with store.writer(policy=REBASING) as writer:
        for step in range(4):
            done.commit(writer, step, files={"n.txt": b"%d" % step})
            check()
    done.commit(store.writer(policy=REBASING), 4)
    check()
    disk.watch = lambda: None
    named = 0
    for key, durable, data in disk.linked:
        if key.startswith("log/"):
            *earlier, last = records(DictStorage({**durable, key: data}))
            assert [record["seq"] for record in earlier] == list(range(last["seq"]))
            for name in named_objects(DictStorage({**durable, key: data})):
                assert durable[name] == (disk.root / name).read_bytes()
                named += 1
    assert named > 15


def locked(method, lock=threading.RLock()):  # noqa: B008 - one lock for all calls is meant
    def call(*arguments):
        with lock:
            return method(*arguments)

    return call


@pytest.mark.parametrize("operation", ["create", "put"])
def test_order_of_syscalls(tmp_path, monkeypatch, operation):
    """DF-CMT-01: a file is synced, then named, then its directory is synced; new directories are synced into
    their parents.
    """
    calls = []

    def spy(name):
        real = getattr(os, name)

        def call(*arguments):
            shown = [
                re.sub("#[0-9]+", "#", os.path.relpath(a, tmp_path)) for a in arguments if isinstance(a, str)
            ]
            if name == "fsync":
                shown = [
                    re.sub(
                        "#[0-9]+",
                        "#",
                        os.path.relpath(os.readlink(f"/proc/self/fd/{arguments[0]}"), tmp_path),
                    )
                ]
            calls.append(" ".join([name, *shown]))
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "link", "replace", "mkdir"):
        spy(name)
    key = record_key(7)
    getattr(LocalStorage(str(tmp_path)), operation)(key, b"data")
    naming = "link" if operation == "create" else "replace"
    assert calls == ["mkdir log", "fsync .", f"fsync {key}#", f"{naming} {key}# {key}", "fsync log"]
    calls.clear()
    assert (
        LocalStorage(str(tmp_path)).create(key, b"other") is False
    )  # what a loser goes on to read is durable too
    assert calls == ["mkdir log", "fsync .", f"fsync {key}#", f"link {key}# {key}", "fsync log"]


@pytest.mark.parametrize("failing", ["fsync", "link", "replace", "mkdir"])
def test_syscalls_that_fail(tmp_path, monkeypatch, failing):
    """DF-WR-01: a full or broken disk fails the commit with StoreError at any of its calls; then all goes on
    as before.
    """
    store, done = df.create(tmp_path, block_bytes=BLOCK), Acknowledged()
    real, count, broken = getattr(os, failing), 0, 0

    def fail(*arguments):
        nonlocal count
        count += 1
        if count == broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with store.writer(policy=REBASING) as writer:
        done.commit(writer, 0)
        monkeypatch.setattr(os, failing, fail)
        codes = []
        for step in range(1, 40):
            count, broken = 0, step
            try:
                done.commit(writer, step, files={"n.txt": b"%d" % step})
            except StoreError as error:
                codes.append(error.code)
            if count < broken:
                break
    assert set(codes) <= {ErrorCode.STORE_FAILED}
    assert codes or failing == "mkdir"
    monkeypatch.undo()
    check_readable_directory(tmp_path, done)


def in_memory(path):
    storage = LocalStorage(str(path))
    return DictStorage({info.key: storage.get(info.key) for info in storage.list("")})


def check_readable_directory(path, done):
    check_readable(in_memory(path), done)
    assert df.open(path).verify(all=True).findings == []


# -- kill -9 -------------------------------------------------------------------------------------------------

WRITER = """
import os, sys
sys.path[:0] = {paths!r}
import obstore, pyarrow  # what the first commit would import
import deltaformat as df
from tinystore import weights
weights(400)

def write():
    store = df.open({place!r}, storage_options={options!r})
    with store.writer(policy=df.Policy(max_chain=3, pack_bytes=1200)) as writer:
        head = store.branches()["main"].step
        step = 0 if head is None else head + 1
        while True:
            info = writer.commit(step=step, tensors=weights(step), files={{"n.txt": b"%d" % step}})
            print(info.seq, step, flush=True)
            step += 1

for _ in sys.stdin:  # a line for each writer that is wanted; none has used a thread before it is forked
    pid = os.fork()
    if pid == 0:
        print("writer", os.getpid(), flush=True)
        try:
            write()
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


@pytest.mark.parametrize(("place", "rounds"), [("local", 40), ("s3", 12)])
def test_kill_9(place, rounds, tmp_path, request):
    """DF-CMT-01, DF-CMT-02: a process killed at any moment loses nothing acknowledged; the next one goes on;
    leftovers do no harm.
    """
    rng = random.Random(5)
    options, url = None, str(tmp_path / "store")
    if place == "s3":
        options = request.getfixturevalue("s3_server").options()
        url = f"s3://tests/{secrets.token_hex(6)}"
    df.create(url, block_bytes=BLOCK, storage_options=options)
    done = Acknowledged()
    paths = [str(Path(__file__).parent), str(Path(df.__file__).parent.parent)]
    script = WRITER.format(paths=paths, place=url, options=options)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for _ in range(rounds):
            process.stdin.write("write\n")
            process.stdin.flush()
            pid = int(process.stdout.readline().split()[1])
            lines = [process.stdout.readline() for _ in range(rng.randint(0, 4))]
            time.sleep(rng.random() * (0.03 if place == "local" else 0.08))
            os.kill(pid, signal.SIGKILL)
            while not lines or not lines[-1].endswith("gone\n"):
                lines.append(process.stdout.readline())
            for line in lines[:-1]:
                seq, step = map(int, line.split())
                done.commits[seq] = (step, 0)
            store = df.open(url, storage_options=options)
            head = store.branches().get("main")
            if head is not None and head.seq is not None:
                assert head.seq >= max(done.commits, default=0)
                assert content(store.version().state_dict()) == truth(head.step)
                done.commits[head.seq] = (head.step, 0)
        process.stdin.close()
    assert len(done.commits) > rounds
    check_leftovers(open_storage(url, options=options), done, head.step + 1)


def check_leftovers(storage, done, step):
    """What dead writers left goes with the next collection; what was acknowledged stays."""
    local = isinstance(storage, LocalStorage)
    if local:  # what one of them may have left, too
        recent, old = (Path(storage.url) / "log" / f"{3:020}.json#{number}" for number in (1, 2))
        recent.write_bytes(b"{")
        old.write_bytes(b"{")
        os.utime(old, (time.time() - 200_000,) * 2)
    store = df.open(storage)
    with store.writer() as writer:
        done.commit(writer, step)
        report = store.gc(keep_last=10_000, grace=NOW, dry_run=False)
    assert report.retired == []
    if local:
        assert (recent.exists(), old.exists()) == (True, False)
    left = DictStorage({info.key: storage.get(info.key) for info in storage.list("")})
    claimed = {key for key in left.objects if parse_key(key).claim is not None}
    assert claimed == named_objects(left)  # nothing is left that no commit names
    steps = [record["step"] for record in records(left) if record["kind"] == "commit"]
    assert steps == list(range(len(steps)))  # none lost, none doubled
    check_readable(left, done)
    assert df.open(left).verify(all=True).findings == []
