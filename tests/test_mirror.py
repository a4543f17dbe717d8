"""Mirrors that several processes share: whole versions only, whoever ends when; healed by the next."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from followworkers import follow_until, make_store, trained
from tinystore import BLOCK, DictStorage, content, truth, weights

import deltaformat as df
from deltaformat import mirror, sharedmirror
from deltaformat.changefile import read_changes, write_changes
from deltaformat.errors import (
    ConflictError,
    CorruptError,
    ErrorCode,
    InconsistentError,
    MalformedError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.patches import BlockChange, ChangeSet, TensorChange
from deltaformat.tensors import TensorSpec

pytestmark = pytest.mark.skipif(os.name == "nt", reason="shared mirrors need POSIX file locks")
POLICY = df.Policy(max_chain=3)


def arrays(seed=0):
    return {name: np.array(tensor) for name, tensor in weights(0, seed).items()}


def take(follower, live, **options):
    staged = follower.stage(**options)
    staged.apply_to(live)
    staged.commit()
    return staged


@pytest.fixture(params=["file", "shm"])
def place(request, tmp_path):
    if request.param == "file":
        yield f"file:{tmp_path / 'mirror'}"
        return
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield f"shm:{name}"
    shutil.rmtree(f"/dev/shm/deltaformat-{name}", ignore_errors=True)


def directory_of(place):
    return mirror.parse_mirror(place)[0]


def committed(store, steps):
    with store.writer(policy=POLICY) as writer:
        return [writer.commit(step=step, tensors=weights(step)) for step in steps]


def test_one_leads_and_others_get_what_changed(place):
    """Only the leader reads the store's packs; each process gets what changed since it looked."""
    from watching import Recorder

    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    watched = [Recorder(storage) for _ in range(3)]
    followers = [df.open(w).follower(mirror=place, framework="np") for w in watched]
    lives = [arrays(seed) for seed in range(3)]
    committed(store, [0])
    with store.follower(branch="none", mirror=place) as other, pytest.raises(MissingError):
        other.stage()  # it leads while it is open, and has nothing
    for step in range(8):
        if step:
            committed(store, [step])
        for number, (follower, live) in enumerate(zip(followers, lives, strict=True)):
            if number == 2 and step % 3:
                continue  # is behind at times
            staged = take(follower, live)
            assert staged.whole == (step == 0)
            assert content(live) == truth(step) == content(follower.state_dict())
            assert follower.stage() is None
    assert [follower.status().leading for follower in followers] == [True, False, False]
    assert watched[0].of("get_ranges")
    assert not watched[1].of("get_ranges") + watched[2].of("get_ranges")
    with pytest.raises(MissingError, match="leads"):
        followers[1].stage(step=3)
    assert followers[0].stage(step=3).step == 3
    followers[0].close()
    take(followers[2], lives[2], step=3)  # has the lead now
    assert followers[2].status().leading
    assert content(lives[2]) == truth(3)
    take(followers[1], lives[1])
    assert content(lives[1]) == truth(3)
    for follower in followers[1:]:
        follower.close()


def test_a_restart_finds_what_it_left(place):
    """From a mirror that is there: everything comes, and only what is newer is fetched; verified, not
    believed."""
    from watching import Recorder

    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    committed(store, range(3))
    with store.follower(mirror=place, framework="np") as follower:
        take(follower, arrays())
    for step in (2, 5):
        committed(store, range(3, step + 1))
        watched = Recorder(storage)
        with df.open(watched).follower(mirror=place, framework="np") as follower:
            live = arrays(7)
            staged = take(follower, live)
            assert (staged.step, staged.whole) == (step, True)
            assert content(live) == truth(step)
            assert follower.status().mirror_seq == staged.seq
            nbytes = sum(call.nbytes for call in watched.of("get_ranges"))
            assert nbytes == 0 if step == 2 else 0 < nbytes < 3 * 700
    names = {path.name.partition("-")[0] for path in directory_of(place).iterdir()}
    assert names == {"lock", "reading", "state.json", "data", "layout", "changes"}


def test_selections(place):
    """A mirror has what its leader selects; others may follow a part of that, and no more."""
    store = df.create(DictStorage(), block_bytes=BLOCK)
    committed(store, [0])
    names = ["w", "noise", "step"]
    with (
        store.follower(mirror=place, framework="np", select=names) as leader,
        store.follower(mirror=place, framework="np", select=["w"]) as part,
        store.follower(mirror=place, framework="np") as more,
    ):
        lives = [{name: np.array(t) for name, t in weights(5).items() if name in n} for n in (names, "w")]
        for step in range(3):
            if step:
                committed(store, [step])
            for follower, live in zip((leader, part), lives, strict=True):
                take(follower, live)
                assert content(live) == {name: truth(step)[name] for name in live}
            with pytest.raises(MissingError, match="does not follow"):
                more.stage()
    with store.follower(mirror=place, framework="np") as more:  # leads now: what is not there yet is fetched
        live = arrays(3)
        take(more, live)
        assert content(live) == truth(2)


def test_damage_is_found_and_mended(place):
    """DF-RD-02: blocks of the mirror that do not have their digests are read anew, by whoever leads next."""
    store = df.create(DictStorage(), block_bytes=BLOCK)
    committed(store, range(3))
    with store.follower(mirror=place, framework="np") as follower:
        take(follower, arrays())
        with store.follower(mirror=place, framework="np") as reader:
            (data,) = directory_of(place).glob("data-*")
            raw = bytearray(data.read_bytes())
            for at in (10, 700, 1500):
                raw[at] ^= 1
            with data.open("r+b") as file:
                file.write(raw)
            with pytest.raises(CorruptError, match="damaged"):
                reader.stage()
            with pytest.raises(CorruptError, match="damaged"):
                follower.state_dict()
    for newer in (False, True):
        if newer:
            committed(store, [3])
        with data.open("r+b") as file:
            file.write(raw)
        with store.follower(mirror=place, framework="np") as follower:
            live = arrays(3)
            assert take(follower, live).step == 2 + newer
            assert content(live) == truth(2 + newer) == content(follower.state_dict())
            assert follower.stage() is None
            raw = bytearray(data.read_bytes())
            raw[300] ^= 4


def test_a_mirror_of_a_version_that_was_collected(place):
    """DF-GC-05: nothing says what its bytes are: all is read anew."""
    from datetime import timedelta

    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    committed(store, [0])
    with store.follower(mirror=place, framework="np") as follower:
        take(follower, arrays())
    committed(store, range(1, 5))
    for _ in range(2):
        storage.advance(hours=1)
        store.gc(keep_last=1, grace=timedelta(0), dry_run=False)
    with store.follower(mirror=place, framework="np") as follower:
        live = arrays(3)
        assert take(follower, live).step == 4
        assert content(live) == truth(4)


def test_what_is_no_mirror_is_refused(tmp_path, monkeypatch):
    store = df.create(DictStorage(), block_bytes=BLOCK)
    committed(store, [0])
    for text in ("mirror", "file:", "shm:", "shm:a/b", "shm:../x", "http://x", "shm:" + "x" * 200):
        with pytest.raises(MalformedError) as caught:
            store.follower(mirror=text)
        assert caught.value.code is ErrorCode.INPUT_INVALID
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("x")
    with pytest.raises(ConflictError, match="no mirror"):
        store.follower(mirror=f"file:{tmp_path / 'used'}")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        store.follower(mirror=f"file:{tmp_path / 'file'}")
    with store.follower(mirror=f"file:{tmp_path / 'm'}", framework="np") as follower:
        take(follower, arrays())
    other = df.create(DictStorage(), block_bytes=BLOCK)
    committed(other, [0])
    with (
        other.follower(mirror=f"file:{tmp_path / 'm'}") as follower,
        pytest.raises(ConflictError, match="another store"),
    ):
        follower.stage()
    for state in (b"{", b"[]", b'{"format": "x"}'):
        (tmp_path / "m" / "state.json").write_bytes(state)
        with (
            store.follower(mirror=f"file:{tmp_path / 'm'}") as follower,
            pytest.raises(CorruptError, match="delete"),
        ):
            follower.stage()
    monkeypatch.setattr(mirror, "_SHM", tmp_path / "none")
    with pytest.raises(UnsupportedError):
        store.follower(mirror="shm:x")


def test_readers_and_the_leader_wait_for_each_other(tmp_path, monkeypatch):
    """While a process reads in place, the leader's commit waits; and it gives up with the old version
    current."""
    monkeypatch.setattr(sharedmirror, "READERS_TIMEOUT_S", 0.1)
    store = df.create(DictStorage(), block_bytes=BLOCK)
    committed(store, [0])
    place = f"file:{tmp_path / 'm'}"
    leader, reader = (store.follower(mirror=place, framework="np") for _ in range(2))
    live = arrays()
    take(leader, live)
    whole = reader.stage()
    assert whole.whole
    committed(store, [1])
    staged = leader.stage()
    with pytest.raises(StoreError, match="has been read"):
        staged.commit()
    assert leader.status().mirror_seq == whole.seq
    other = arrays(4)
    whole.apply_to(other)
    assert content(other) == truth(0)
    whole.commit()
    with pytest.raises(InconsistentError, match="over"):
        whole.apply_to(other)  # its content may go on
    staged.commit()
    assert content(leader.state_dict()) == truth(1)
    take(reader, other)
    assert content(other) == truth(1)
    leader.close()
    reader.close()


@pytest.mark.parametrize("failing", ["replace", "fsync", "posix_fallocate"])
def test_a_file_system_that_fails(tmp_path, monkeypatch, failing):
    """At any of its calls: the old version stays, whole, and the next attempt succeeds."""
    store = df.create(DictStorage(), block_bytes=BLOCK)
    committed(store, [0])
    follower = store.follower(mirror=f"file:{tmp_path / 'm'}", framework="np")
    live = arrays()
    take(follower, live)
    holder = Path if failing == "replace" else os
    real, count, broken, failures = getattr(holder, failing), 0, 0, 0

    def fail(*arguments):
        nonlocal count
        count += 1
        if count == broken:
            raise OSError(28, os.strerror(28))
        return real(*arguments)

    with store.writer(policy=POLICY) as writer:
        for step in range(1, 9):
            extra = {f"x{step}": np.arange(step, dtype=np.uint8)} if step % 2 else {}
            writer.commit(step=step, tensors=weights(step) | extra, allow_set_change=True)
            monkeypatch.setattr(holder, failing, fail)
            for broken in range(1, 30):  # noqa: B007 - `fail` looks at it
                count = 0
                try:
                    with follower.stage() as staged:
                        staged.apply_to(live | extra)
                        staged.commit()
                except StoreError:
                    failures += 1
                    monkeypatch.setattr(holder, failing, real)
                    assert follower.status().step == step - 1
                    assert content(follower.state_dict()).items() >= truth(step - 1).items()
                    assert content(live) == truth(step - 1)
                    monkeypatch.setattr(holder, failing, fail)
                else:
                    break
            monkeypatch.setattr(holder, failing, real)
            found = content(follower.state_dict())
            assert found == truth(step) | content(extra)
            assert content(live) == truth(step)
    assert failures >= 4
    follower.close()


def test_files_of_changes(tmp_path):
    """What is written is read; a flipped byte anywhere is told."""
    specs = [("t", "BF16", (40,)), ("u", "F4", (80,))]
    blocks = [
        BlockChange(4, 16, np.array([1, 3], np.uint32), np.array([7, 8], "<u2"), np.array([5, 6], "<u2")),
        BlockChange(20, 20, None, np.arange(20, dtype="<u2")),
    ]
    u = BlockChange(0, 40, np.array([39], np.uint32), np.array([255], np.uint8), np.array([1], np.uint8))
    changes = ChangeSet(
        {"t": TensorChange(*specs[0], blocks), "u": TensorChange(*specs[1], [u])}, removed=("gone",)
    )
    path = tmp_path / "changes"
    specs = [TensorSpec(*spec) for spec in specs]
    write_changes(path, changes, {"t": 0, "u": 1}, {"n": 3}, durable=True)
    header, found = read_changes(path, specs)
    assert (header["n"], found.removed) == (3, ("gone",))
    for name, change in changes.tensors.items():
        for one, other in zip(change.blocks, found.tensors[name].blocks, strict=True):
            for field in ("start", "count", "positions", "values", "old"):
                a, b = getattr(one, field), getattr(other, field)
                assert (a is None) == (b is None)
                assert a is None or np.array_equal(a, b)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptError):
            read_changes(path, specs)
    for size in (0, 8, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptError):
            read_changes(path, specs)


# -- other processes -----------------------------------------------------------------------------------------

FOLLOWER = """
import os, signal, sys
sys.path[:0] = {paths!r}
import numpy as np, pyarrow
import deltaformat as df
from followworkers import live_for
from deltaformat import mirror
real, left = mirror.write_block, [{die}]
def write(*arguments, **options):
    real(*arguments, **options)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
mirror.write_block = write
follower = df.open({store!r}).follower(mirror={mirror!r}, framework="np")
live = live_for()
print("ready", flush=True)
for step in range({first}, 10_000):
    staged = follower.stage(step={first} + (step - {first}) % 7)
    staged.apply_to(live)
    staged.commit()
    print(step, flush=True)
"""


def script(text, **values):
    paths = [str(Path(__file__).parent), str(Path(df.__file__).parent.parent)]
    return text.format(paths=paths, **values)


@contextmanager
def started(text):
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_kill_9(tmp_path):
    """A follower killed at any moment leaves a mirror that the next one heals: bit for bit, and in the same
    process that looks on as well.
    """
    rng = random.Random(6)
    store = make_store(tmp_path / "store", 9)
    mirror = f"file:{tmp_path / 'mirror'}"
    states = []
    for number in range(20):
        die = rng.randint(1, 300) if number % 2 else 0  # by itself while it writes in place, or by time
        text = script(FOLLOWER, store=str(tmp_path / "store"), mirror=mirror, first=number % 3, die=die)
        with started(text) as process, store.follower(mirror=mirror, framework="np") as early:
            early.status()  # looks on while the other leads, and takes over
            if not die:
                for _ in range(rng.randint(0, 6)):
                    process.stdout.readline()
                time.sleep(rng.random() * 0.012)
                process.send_signal(signal.SIGKILL)
            process.wait(60)
            state = tmp_path / "mirror" / "state.json"
            states.append(state.exists() and '"next": {' in state.read_text())
            late = store.follower(mirror=mirror, framework="np")
            with late, early if number % 3 == 0 else late as follower:
                live = trained(0)
                staged = follower.stage()
                if staged is not None:
                    staged.apply_to(live)
                    staged.commit()
                    assert content(live) == content(trained(staged.step))
                step = rng.randrange(9)
                take(follower, live, step=step)
                assert content(live) == content(trained(step)) == content(follower.state_dict())
                if number % 4 == 0:
                    take(follower, live, step=0)
    assert sum(states) >= 8  # were killed in the middle of an update
    names = sorted(path.name for path in (tmp_path / "mirror").iterdir())
    assert not [name for name in names if "partial" in name]
    assert len(names) < 16


@pytest.mark.slow
def test_several_processes_see_whole_versions_only(tmp_path):
    """A leader goes to and fro while others follow and read in place; each version's root is what its bytes
    give."""
    store = make_store(tmp_path / "store", 12)
    mirror = f"file:{tmp_path / 'mirror'}"
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool, store.follower(mirror=mirror, framework="np") as leader:
        leader.stage(step=0).commit()
        readers = [
            pool.apply_async(follow_until, (str(tmp_path / "store"), mirror, whole))
            for whole in (False, True)
        ]
        rng = random.Random(1)
        deadline = time.monotonic() + 60
        commits = 0
        while not all(reader.ready() for reader in readers):
            assert time.monotonic() < deadline
            staged = leader.stage(step=rng.randrange(11))
            staged.commit()
            commits += 1
            if commits > 60:  # the last step ends the readers
                leader.stage(step=11).commit()
                time.sleep(0.05)
            time.sleep(0.002)
        for reader in readers:
            seen, wrong = reader.get()
            assert wrong == 0
            assert len(seen) > 3
