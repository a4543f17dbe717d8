"""What is kept and what goes: a writer that collects as it goes; a collector that does not believe records
alone; staged parts whose packs have gone.
"""

import os
import time
import warnings
from datetime import timedelta

import pytest
from tinystore import BLOCK, DictStorage, content, truth, weights
from watching import Recorder

import deltaformat as df
from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    InconsistentError,
    MalformedError,
    MissingError,
)
from deltaformat.keys import probe_key
from deltaformat.localstorage import LocalStorage

NOW = timedelta(0)
POLICY = df.Policy(max_chain=3)


def made(storage=None):
    return df.create(storage or DictStorage(), block_bytes=BLOCK)


def steps_left(store):
    """Steps of main that can be read, bit for bit."""
    found = []
    for step in range(100):
        try:
            with store.version(step=step) as version:
                assert content(version.state_dict()) == truth(step)
            found.append(step)
        except MissingError:
            continue
    return found


# -- a writer that collects ----------------------------------------------------------------------------------


def test_a_writer_keeps_what_it_was_told_to(tmp_path):
    """Section 12.6: the newest, every so manieth, and tagged ones stay; the rest goes while it writes."""
    storage = DictStorage()
    store = made(storage)
    keep = df.Retention(keep_last=2, keep_every=10, grace=NOW, interval=5)
    with store.writer(policy=POLICY, retention=keep) as writer:
        for step in range(30):
            writer.commit(step=step, tensors=weights(step))
            if step == 13:
                store.tag("best", step=13)
            storage.advance(seconds=1)
    assert steps_left(store) == [0, 10, 13, 20, 28, 29]
    assert store.verify(all=True).findings == []
    with pytest.raises(MissingError) as caught:
        store.version(step=25)
    assert caught.value.code is ErrorCode.VERSION_RETIRED


def test_a_grace_is_kept(tmp_path):
    """DF-GC-02: retired at once, deleted after the grace."""
    storage = DictStorage()
    store = made(storage)
    keep = df.Retention(keep_last=1, interval=3)
    with store.writer(policy=POLICY, retention=keep) as writer:
        for step in range(6):
            writer.commit(step=step, tensors=weights(step))
        assert steps_left(store) == [0, 1, 2, 3, 4, 5]  # a day has not passed
        storage.advance(hours=25)
        for step in range(6, 9):
            writer.commit(step=step, tensors=weights(step))
    assert steps_left(store) == [5, 6, 7, 8]


class Counting(Recorder):
    """Knows how many manifests were being read at once, at most."""

    def __init__(self, inner):
        super().__init__(inner)
        self.reading = self.most = 0

    def before(self, operation, key, argument=None):
        super().before(operation, key, argument)
        if operation == "get" and key.startswith("manifests/"):
            with self._lock:
                self.reading += 1
                self.most = max(self.most, self.reading)
            time.sleep(0.01)

    def after(self, operation, key, result=None):
        if operation == "get" and key.startswith("manifests/"):
            with self._lock:
                self.reading -= 1


def test_manifests_are_read_once_and_several_at_a_time():
    """DF-GC-07 costs a commit no more than what came since the last collection; and it has its own timing."""
    storage = DictStorage()
    df.create(storage, block_bytes=BLOCK)
    watched = Counting(storage)
    keep = df.Retention(keep_last=8, keep_every=4, grace=NOW, interval=10)
    with df.open(watched).writer(retention=keep) as writer:
        for step in range(40):
            watched.clear()
            info = writer.commit(step=step, tensors=weights(step))
            storage.advance(hours=1)
            read = len(watched.of("get", "manifests/"))
            if step % 10 == 9:  # of the versions that are kept those that came since the last time
                assert read == {9: 9, 19: 8, 29: 9, 39: 8}[step]
                assert info.timings["collect"] > 0.01
            else:
                assert read == 0
        assert 2 <= watched.most <= 4
    assert steps_left(df.open(storage)) == [*range(0, 32, 4), *range(32, 40)]


def test_a_single_writer_sweeps_up(tmp_path):
    """What killed processes left in a directory goes, also below the wrapper of a single writer."""
    storage = LocalStorage(str(tmp_path))
    store = df.create(storage, block_bytes=BLOCK)
    leftover = tmp_path / "deltaformat.json#12345"
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))
    keep = df.Retention(keep_last=1, grace=NOW, interval=1)
    with store.writer(retention=keep, single_writer=True) as writer:
        writer.commit(step=0, tensors=weights(0))
    assert not leftover.exists()


def test_a_dry_run_writes_nothing(tmp_path):
    """Who may only read can see what a collection would do; a probe's leftover needs the time, too."""
    storage = LocalStorage(str(tmp_path))
    store = df.create(storage, block_bytes=BLOCK)
    with store.writer() as writer:
        for step in range(4):
            writer.commit(step=step, tensors=weights(step))
    store.gc(keep_last=1, dry_run=False)
    storage.put(probe_key("ab" * 16), b"{}")
    watched = Recorder(storage)
    report = df.open(watched).gc(keep_last=1, dry_run=True)
    assert {call.operation for call in watched.calls} <= {"get", "get_ranges", "head", "list"}
    assert report.waiting
    assert report.deleted == []
    due = df.open(watched).gc(keep_last=1, grace=NOW, dry_run=True)
    assert due.deleted == store.gc(keep_last=1, grace=NOW, dry_run=False).deleted
    assert due.deleted


def test_a_collection_that_fails_costs_no_commit():
    """The commit stands; that nothing was collected is a warning."""

    class Unlistable(DictStorage):
        def list(self, prefix):
            raise df.errors.StoreError(ErrorCode.STORE_FAILED, "listing is forbidden", where=prefix)

    store = made(Unlistable())
    with store.writer(retention=df.Retention(keep_last=1, grace=NOW, interval=2)) as writer:
        writer.commit(step=0, tensors=weights(0))
        with pytest.warns(RuntimeWarning, match="listing is forbidden"):
            info = writer.commit(step=1, tensors=weights(1))
        assert info.created
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.commit(step=2, tensors=weights(2))
    assert content(store.version().state_dict()) == truth(2)


def test_the_background_collects_too():
    """block=False: a collection goes on beside the trainer."""
    storage = DictStorage()
    store = made(storage)
    with store.writer(policy=POLICY, retention=df.Retention(keep_last=1, grace=NOW, interval=1)) as writer:
        for step in range(8):
            writer.commit(step=step, tensors=weights(step), block=False)
            storage.advance(seconds=1)
    assert steps_left(store) == [7]


@pytest.mark.parametrize(
    "wrong", [{"keep_last": 0}, {"keep_every": 0}, {"grace": -NOW - timedelta(1)}, {"interval": 0}]
)
def test_what_cannot_be_meant(wrong):
    with pytest.raises(MalformedError):
        df.Retention(**{"keep_last": 1, **wrong})


# -- a collector and its sources -----------------------------------------------------------------------------


def test_what_a_kept_manifest_names_is_not_deleted(monkeypatch):
    """DF-GC-07, DF-CMT-08: a writer that told a lie about what it dropped costs nobody a byte."""
    storage = DictStorage()
    store = made(storage)
    true_changes = df.writer.object_changes
    with store.writer(policy=df.Policy(max_chain=64)) as writer:
        for step in range(3):
            writer.commit(step=step, tensors=weights(step))

        def lying(version, parent):
            added, dropped = true_changes(version, parent)
            used = sorted(version.objects().items() & parent.objects().items())
            return added, sorted({*dropped, *used})

        monkeypatch.setattr(df.writer, "object_changes", lying)
        writer.commit(step=3, tensors=weights(3))
    before = dict(storage.objects)
    storage.advance(days=2)
    for dry_run in (False, True, False):
        with pytest.raises(InconsistentError, match="nothing was deleted") as caught:
            store.gc(keep_last=1, grace=NOW, dry_run=dry_run)
        assert caught.value.code is ErrorCode.PARTS_DISAGREE
        assert caught.value.where.startswith("packs/")
        storage.advance(days=2)
    assert all(storage.objects[key] == data for key, data in before.items())
    assert content(store.version(step=3).state_dict()) == truth(3)


def test_a_damaged_manifest_stops_a_collection():
    """DF-GC-07: a version that is kept and cannot be understood may use anything."""
    storage = DictStorage()
    store = made(storage)
    with store.writer(policy=POLICY) as writer:
        for step in range(4):
            writer.commit(step=step, tensors=weights(step))
    newest = store.log(limit=1)[0].manifests[0].key
    storage.objects[newest] = storage.objects[newest][:-1]
    before = set(storage.objects)
    storage.advance(days=2)
    with pytest.raises(CorruptError, match=newest.rpartition("/")[2]):
        df.open(storage).gc(keep_last=1, grace=NOW, dry_run=False)
    assert before <= set(storage.objects)


# -- staged parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_staged_pack_must_be_there(damage):
    """DF-CMT-09, DF-CMT-01: no record names a pack that is not in the store; the part can be staged again."""
    storage = DictStorage()
    store = made(storage)
    with store.writer() as writer:
        part = store.stager(writer.ticket).stage(step=0, tensors=weights(0))
        (pack,) = [key for key in storage.objects if key.startswith("packs/")]
        if damage == "gone":
            del storage.objects[pack]
        else:
            storage.objects[pack] = storage.objects[pack][:-1]
        with pytest.raises((MissingError, CorruptError), match="stage it again"):
            writer.commit(step=0, parts=[part])
        assert [record.kind for record in store.log()] == ["claim"]
        part = store.stager(writer.ticket).stage(step=0, tensors=weights(0))
        writer.commit(step=0, parts=[part])
    assert content(store.version().state_dict()) == truth(0)
