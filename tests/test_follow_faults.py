"""Followers and synced directories after the rarer accidents: collected versions, full disks, forks, slow
readers."""

import json
import os
import time
from contextlib import contextmanager
from datetime import timedelta
from operator import methodcaller

import numpy as np
import pytest
from tinystore import BLOCK, DictStorage, content, truth, weights
from watching import Faulty, Recorder

import deltaformat as df
from deltaformat import polling, sharedmirror, slots
from deltaformat.errors import ConflictError, ErrorCode, MalformedError, StoreError

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX locks")


def arrays(seed=0):
    return {name: np.array(tensor) for name, tensor in weights(0, seed).items()}


def take(follower, live, **options):
    staged = follower.stage(**options)
    staged.apply_to(live)
    staged.commit()
    return staged


def committed(store, steps, **options):
    with store.writer(**options) as writer:
        return [writer.commit(step=step, tensors=weights(step)) for step in steps]


def collect(storage, store):
    for _ in range(2):
        storage.advance(hours=1)
        store.gc(keep_last=1, grace=timedelta(0), dry_run=False)


@pytest.mark.parametrize("restarted", [True, False])
def test_a_version_that_was_rewound_and_collected(tmp_path, restarted):
    """A new process goes to the branch's head, though its seq is lower: nothing else is there. One that has
    that version live stays where it is."""
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    committed(store, range(4))
    mirror = f"file:{tmp_path / 'm'}"
    live = arrays()
    follower = store.follower(mirror=mirror, framework="np")
    assert take(follower, live).step == 3
    with store.writer(resume_from=1):
        pass
    collect(storage, store)
    if restarted:
        follower.close()
        follower, live = store.follower(mirror=mirror, framework="np"), arrays(3)
        assert take(follower, live).step == 1
        assert content(live) == truth(1)
    assert follower.stage() is None
    committed(store, [2])
    assert take(follower, live).step == 2
    assert content(live) == truth(2)
    follower.close()


@pytest.mark.parametrize("healed", ["the same process", "the next process"])
def test_a_disk_that_stays_full(tmp_path, monkeypatch, healed):
    """The update's last record and the one that would undo it fail: the changes stay, so that whoever comes
    completes it."""
    store = df.create(DictStorage(), block_bytes=BLOCK)
    committed(store, [0])
    follower = store.follower(mirror=f"file:{tmp_path / 'm'}", framework="np")
    live = arrays()
    take(follower, live)
    committed(store, [1])
    real, count = sharedmirror.replace_file, 0

    def fail(path, parts, **options):
        nonlocal count
        count += path.name == "state.json"
        if count >= 2:
            raise OSError(28, os.strerror(28))
        real(path, parts, **options)

    monkeypatch.setattr(sharedmirror, "replace_file", fail)
    staged = follower.stage()
    staged.apply_to(live)
    with pytest.raises(StoreError):
        staged.commit()
    assert count >= 3
    monkeypatch.setattr(sharedmirror, "replace_file", real)
    if healed == "the same process":
        staged.commit()
    else:
        staged.rollback()
        assert content(live) == truth(0)
        follower.close()
        follower = store.follower(mirror=f"file:{tmp_path / 'm'}", framework="np")
        take(follower, live)
    assert content(live) == content(follower.state_dict()) == truth(1)
    assert follower.stage() is None
    committed(store, [2])
    take(follower, live)
    assert content(live) == content(follower.state_dict()) == truth(2)
    follower.close()


def test_an_update_whose_changes_are_gone(tmp_path):
    """What the mirror's bytes are is told by their digests: those that are right are kept, nothing is given
    that is not."""
    watched = Recorder(DictStorage())
    store = df.create(watched, block_bytes=BLOCK)
    committed(store, [0])
    mirror = tmp_path / "m"
    with store.follower(mirror=f"file:{mirror}", framework="np") as follower:
        take(follower, arrays())
    state = json.loads((mirror / "state.json").read_bytes())
    following = {"state": state["current"] | {"generation": 2, "seq": 9}, "layout": state["layout"]}
    (mirror / "state.json").write_text(json.dumps(state | {"next": following}))
    committed(store, [1])
    watched.clear()
    with store.follower(mirror=f"file:{mirror}", framework="np") as follower:
        live = arrays(3)
        assert take(follower, live).step == 1
        assert content(live) == content(follower.state_dict()) == truth(1)
    fetched = sum(call.nbytes for call in watched.of("get_ranges"))
    assert fetched < 0.5 * sum(len(data) for _, _, data in truth(1).values())


@contextmanager
def forked(run):
    """A child by `fork`, as a data loader's workers are, that does `run` and then lives until the end."""
    told, tell = os.pipe()
    wait, over = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(tell, run().encode() or b"-")
            os.close(over)
            os.read(wait, 1)
        finally:
            os._exit(0)
    os.close(tell)
    os.close(wait)
    try:
        yield os.read(told, 1000).decode()
    finally:
        os.close(over)
        os.close(told)
        os.waitpid(pid, 0)


def refusal(call):
    """What a call says that is to fail."""

    def run():
        try:
            call()
        except MalformedError as error:
            return str(error)
        return "it did it"

    return run


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_of_the_leader_does_not_keep_the_lead(tmp_path):
    store = df.create(tmp_path / "store", block_bytes=BLOCK)
    committed(store, [0, 1])
    mirror = f"file:{tmp_path / 'm'}"
    leader = store.follower(mirror=mirror, framework="np")
    take(leader, arrays(), step=0)
    staged = leader.stage()
    with forked(refusal(leader.stage)) as stage, forked(refusal(staged.commit)) as commit:
        assert "fork" in stage
        assert "fork" in commit
        with store.follower(mirror=mirror, framework="np") as second:
            take(second, arrays())
            assert not second.status().leading  # the children took nothing from the leader
            leader.close()
            take(second, arrays(), step=1)
            assert second.status().leading


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_does_not_keep_a_synced_directory(tmp_path):
    store = df.create(tmp_path / "store", block_bytes=BLOCK)
    committed(store, [0])
    kept = store.sync(tmp_path / "out")
    with forked(refusal(kept.update)) as said:
        assert "fork" in said
        with pytest.raises(ConflictError):
            store.sync(tmp_path / "out")
        kept.close()
        with store.sync(tmp_path / "out") as again:
            assert again.update().step == 0


class Killed(BaseException):
    """Nothing of the package catches it."""


@pytest.fixture(params=[False, True], ids=["slots", "in place"])
def in_place(request):
    return request.param


@pytest.mark.parametrize("lost", ["the version", "its sidecar file, too"])
def test_a_patch_that_was_cut_short_and_collected(tmp_path, monkeypatch, in_place, lost):
    """It is completed by what lies beside it; without that, what differs from the next version is fetched."""
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    out, options = tmp_path / "out", {"in_place": in_place}

    def commit(step):
        with store.writer() as writer:
            writer.commit(step=step, tensors=weights(step), files={"config.json": b"%d" % step})

    commit(0)
    with store.sync(out, **options) as kept:
        kept.update()
        commit(1)
        monkeypatch.setattr(slots.Slot, "_write_sidecars", kill)
        with pytest.raises(Killed):
            kept.update()
        monkeypatch.undo()
    place = out if in_place else tmp_path / ".out.deltaformat" / "b"
    assert (place / ".deltaformat.dirty").exists()
    aside = list(place.glob(".deltaformat.file-*"))
    assert [path.read_bytes() for path in aside] == [b"1"]
    if lost != "the version":
        aside[0].unlink()
    commit(2)
    collect(storage, store)
    with store.sync(out, **options) as kept:
        assert kept.update().step == 2
        assert (out / "config.json").read_bytes() == b"2"
        assert content(load_checkpoint(out)) == truth(2)
        assert sorted(path.name for path in out.iterdir() if "deltaformat." in path.name) == [
            ".deltaformat.json",
            *([".deltaformat.lock"] if in_place else []),
        ]
        assert kept.update() is None


def kill(*arguments):
    raise Killed


def load_checkpoint(directory):
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def test_watching_tells_what_fails(monkeypatch):
    """What does not pass is raised; of what may pass the first is told by a warning, the next after one that
    did not fail."""
    storage = DictStorage()
    committed(df.create(storage, block_bytes=BLOCK), [0])
    faulty = Faulty(storage)
    follower = df.open(faulty).follower(framework="np")
    answers = [True, True, None, True, True, False]

    def pause(seconds, stop):
        passing = answers.pop(0)
        faulty.fault = lambda operation, key: passing if passing is None else failed(passing)

    def failed(passing):
        return StoreError(ErrorCode.STORE_FAILED, "access denied", passing=passing)

    monkeypatch.setattr(polling, "pause", pause)
    take_all = follower.watch()
    next(take_all).commit()
    with pytest.warns(RuntimeWarning, match="denied") as told, pytest.raises(StoreError) as caught:
        next(take_all)
    assert not answers
    assert not caught.value.passing
    assert len(told) == 2
    follower.close()


def test_watching_ends_early(monkeypatch):
    """`stop` is asked in a long wait, too."""
    waits = []
    monkeypatch.setattr(polling.time, "sleep", waits.append)
    answers = [False, False, False, True, True]
    assert list(polling.watch(lambda: None, poll=1000, stop=lambda: answers.pop(0))) == []
    assert waits == [polling.SLICE_S] * 3
    assert not answers


def test_a_directory_that_may_still_be_loaded_is_not_written(tmp_path):
    """For `hold` seconds after the link left it; then the newest comes. What is asked for need not wait."""
    store = df.create(DictStorage(), block_bytes=BLOCK)
    out = tmp_path / "out"
    committed(store, [0])
    with pytest.raises(MalformedError, match="seconds"):
        store.sync(out, hold=-1.0)
    with store.sync(out, hold=1000.0) as kept:
        assert kept.update().step == 0
        first = out.resolve()
        committed(store, [1])
        assert kept.update().step == 1  # nobody loads the other one
        committed(store, [2])
        before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in first.iterdir()}
        assert kept.update() is None
        committed(store, [3])
        assert kept.update() is None
        assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in first.iterdir()}
        assert content(load_checkpoint(out)) == truth(1)
        then = time.time() - 1001
        os.utime(out, (then, then), follow_symlinks=False)
        assert kept.update().step == 3
        assert out.resolve() == first
        assert kept.update(2).step == 2


@pytest.mark.parametrize(
    "asked",
    [{"step": 1, "seq": 1}, {"step": -1}, {"seq": "1"}, {"step": 1.0}, {"seq": True}, {"step": 1 << 53}],
)
def test_what_no_version_can_be_is_refused(tmp_path, asked):
    """Before what was staged is given up."""
    store = df.create(DictStorage(), block_bytes=BLOCK)
    committed(store, [0, 1])
    with store.follower(framework="np") as follower:
        staged = follower.stage(step=0)
        with pytest.raises(MalformedError):
            follower.stage(**asked)
        staged.commit()
    with store.sync(tmp_path / "out") as kept, pytest.raises(MalformedError):
        kept.update(**asked)


def test_large_changes_are_not_kept(tmp_path, monkeypatch):
    """A mirror's files of changes have a share of the tensors' bytes; who needs one that is gone reads in
    place."""
    monkeypatch.setattr(sharedmirror, "KEPT_BYTES", 6000)
    store = df.create(DictStorage(), block_bytes=BLOCK)
    mirror = tmp_path / "m"
    with (
        store.follower(mirror=f"file:{mirror}", framework="np") as leader,
        store.follower(mirror=f"file:{mirror}", framework="np") as near,
        store.follower(mirror=f"file:{mirror}", framework="np") as far,
    ):
        lives = [arrays(seed) for seed in range(3)]
        committed(store, [0])
        for follower, live in zip((leader, near, far), lives, strict=True):
            take(follower, live)
        sizes = []
        for step in range(1, 6):
            committed(store, [step])
            take(leader, lives[0])
            assert not take(near, lives[1]).whole
            assert content(lives[1]) == truth(step)
            kept = {path.name: path.stat().st_size for path in mirror.glob("changes-*")}
            assert f"changes-{step + 1}" in kept
            assert sum(kept.values()) <= 6000
            sizes.append(len(kept))
        assert max(sizes) < 5, sizes
        assert take(far, lives[2]).whole
        assert content(lives[2]) == truth(5)


def test_a_sync_of_large_changes_stays_within_its_memory(tmp_path, in_place):
    """What does not fit is written to its place, block by block."""
    storage = DictStorage()
    committed(df.create(storage, block_bytes=BLOCK), [0, 1, 2])
    store = df.open(storage, memory_budget=100)
    with store.sync(tmp_path / "out", in_place=in_place) as kept:
        kept.update(0)
        kept.update(1)
        report = kept.update(2)
    assert not report.patched
    assert 0 < report.written_bytes < report.nbytes
    assert content(load_checkpoint(tmp_path / "out")) == truth(2)


def test_a_first_sync_does_not_read_what_it_laid_out(tmp_path, monkeypatch, in_place):
    """It knows that there is nothing yet; a second look at what is there goes over the digests."""
    looks = []

    def look(context, version, held):
        looks.append(version)
        return blocks_held(context, version, held)

    blocks_held = slots.blocks_held
    monkeypatch.setattr(slots, "blocks_held", look)
    store = df.create(DictStorage(), block_bytes=BLOCK)
    committed(store, [0, 1])
    with store.sync(tmp_path / "out", in_place=in_place) as kept:
        kept.update(1)
        assert not looks
        kept.update(0)
        assert content(load_checkpoint(tmp_path / "out")) == truth(0)
        kept.update(1)
        kept.update(0)
    assert looks
    assert content(load_checkpoint(tmp_path / "out")) == truth(0)


@pytest.mark.parametrize("failing", ["flock", "iterdir"])
def test_a_file_system_without_locks(tmp_path, monkeypatch, in_place, failing):
    """What the system says, and what to do; no traceback, and no file stays open."""
    import errno
    import fcntl
    from pathlib import Path

    def fail(*arguments):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if failing == "iterdir":
        (tmp_path / "out").mkdir()
        monkeypatch.setattr(Path, "iterdir", fail)
    else:
        monkeypatch.setattr(fcntl, "flock", fail)
    store = df.create(DictStorage(), block_bytes=BLOCK)
    with pytest.raises(StoreError, match=r"not implemented.*no file locks") as caught:
        store.sync(tmp_path / "out", in_place=in_place)
    assert not caught.value.passing
    monkeypatch.undo()
    store.sync(tmp_path / "out", in_place=in_place).close()


@pytest.mark.parametrize("fits", [True, False])
def test_maps_between_have_a_bound(fits):
    """Beyond the memory budget every block is read anew; the bits are the same."""
    watched = Recorder(DictStorage())
    infos = committed(df.create(watched, block_bytes=BLOCK), range(6))
    keys = {ref.key: ref for ref in infos_manifests(watched, infos)}
    between = sum(ref.content_size for ref in list(keys.values())[1:5])
    store = df.open(watched, memory_budget=between - (not fits))
    with store.follower(framework="np") as follower:
        live = arrays()
        take(follower, live, step=0)
        watched.clear()
        assert not take(follower, live).whole
        assert content(live) == content(follower.state_dict()) == truth(5)
    read = {call.key for call in watched.of("get", "manifests/")}
    assert read == (set(keys) - {next(iter(keys))} if fits else {list(keys)[-1]})


def infos_manifests(storage, infos):
    store = df.open(storage)
    return [ref for info in infos for ref in store.version(seq=info.seq).commit.manifests]


def test_a_store_says_how_often_it_is_asked(monkeypatch, tmp_path):
    """Followers and sync wait as long as it says, where they would wait less."""
    from deltaformat.cli import main

    waits = []

    def pause(seconds, stop):
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(polling, "pause", pause)
    storage = DictStorage()
    storage.least_poll_seconds = 2.0
    store = df.create(storage, block_bytes=BLOCK)
    committed(store, [0])
    with store.follower(framework="np") as follower:
        for poll in (0.1, 5.0):
            waits.clear()
            with pytest.raises(KeyboardInterrupt):
                list(map(methodcaller("commit"), follower.watch(poll=poll)))
            assert waits == [max(poll, 2.0)] * 3
    monkeypatch.setattr(df, "open", lambda *arguments, **options: store)
    waits.clear()
    assert main(["sync", "x", str(tmp_path / "out"), "--watch", "--poll", "0.1"]) == 130
    assert waits == [2.0] * 3
