"""Commits that fail, or run in the background, or beside a collector: nothing moves that should not (DF-
WR-01).
"""

import itertools
import threading
from contextlib import closing

import pytest
from tinystore import DictStorage
from watching import Faulty, Recorder, failure, not_stored
from writertools import check_follow, kinds, make, memory, reads, state, trained

import deltaformat as df
from deltaformat import Policy
from deltaformat.errors import (
    CommitUnknown,
    ErrorCode,
    MalformedError,
    StoreError,
)
from deltaformat.retrying import Retry

# -- in the background ---------------------------------------------------------------------------------------


def test_background_commits_in_order():
    """One is in flight at a time; close, stage and commit wait for it."""
    gate, entered = threading.Event(), threading.Event()

    def hold(operation, key):
        if operation == "put" and key.startswith("packs/"):
            entered.set()
            assert gate.wait(60)

    faulty = Faulty(memory())
    store, states = make(faulty), [state(21)]
    for step in range(3):
        states.append(trained(states[-1], step))
    writer = store.writer()
    faulty.fault = hold
    first = writer.commit(step=0, tensors=states[0], block=False)
    assert entered.wait(60)
    assert not first.done()
    assert store.branches()["main"].seq is None
    gate.set()
    part = writer.stage(step=1, tensors=states[1])  # waits, and is staged against step 0
    assert first.done()
    assert part.parent == first.result().seq
    second = writer.commit(step=1, parts=[part], block=False)
    third = writer.commit(step=2, tensors=states[2], block=False)
    assert second.done()
    writer.close()
    assert third.done()
    for step, expected in enumerate(states[:3]):
        reads(store.version(step=step), expected)
    for call in (
        lambda: writer.commit(step=3, tensors=states[3]),
        lambda: writer.commit(step=3, tensors=states[3], block=False),
        lambda: writer.stage(step=3, tensors=states[3]),
    ):
        with pytest.raises(MalformedError, match="closed"):
            call()
    writer.close()


def test_a_failed_background_commit_fails_the_next_call_once():
    """What was queued behind it is not made; then the writer works, and nothing of the failed step is
    taken for stored.
    """
    faulty = Faulty(memory())
    store, first = make(faulty), state(22)
    second, third = trained(first, 1), trained(first, 2)
    with store.writer() as writer:
        writer.commit(step=0, tensors=first)
        faulty.fault = lambda operation, key: failure(key) if key.startswith("manifests/") else None
        future = writer.commit(step=1, tensors=second, block=False)
        with pytest.raises(StoreError):
            writer.commit(step=2, tensors=third)
        with pytest.raises(StoreError):
            future.result()
        faulty.fault = faulty.none
        info = writer.commit(step=2, tensors=third)
        assert info.created
        reads(store.version(), third)
        assert [record.step for record in store.log() if record.kind == "commit"] == [2, 0]
        check_follow(store, 0, 2, third)

        faulty.fault = lambda operation, key: failure(key) if key.startswith("packs/") else None
        writer.commit(step=3, tensors=first, block=False)
        with pytest.raises(StoreError):
            writer.close()
        writer.close()


def test_leaving_the_block_tells_what_failed():
    faulty = Faulty(memory())
    store = make(faulty)
    with pytest.raises(StoreError), store.writer() as writer:  # noqa: PT012 - the block's end raises
        faulty.fault = lambda operation, key: failure(key) if key.startswith("packs/") else None
        writer.commit(step=0, tensors=state(0), block=False)
    faulty.fault = faulty.none
    with pytest.raises(ZeroDivisionError), store.writer() as writer:  # noqa: PT012 - its own error is told
        faulty.fault = lambda operation, key: failure(key) if key.startswith("packs/") else None
        writer.commit(step=0, tensors=state(0), block=False)
        raise ZeroDivisionError


# -- failures ------------------------------------------------------------------------------------------------


PHASES = ["get_ranges packs/", "put packs/", "put files/", "put manifests/", "create log/", "get log/"]


@pytest.mark.parametrize(
    ("phase", "late"), [*((phase, False) for phase in PHASES), *((phase, True) for phase in PHASES[:-1])]
)
def test_a_failed_commit_moves_nothing(phase, late):
    """DF-WR-01: whatever fails, the next commit is encoded against the head as it is, bit for bit."""
    operation, prefix = phase.split()
    faulty = Faulty(memory(), late=late)
    store, states = make(faulty), [state(23)]
    for step in range(9):
        states.append(trained(states[-1], step))
    hits = 0

    def fault(called, key):
        nonlocal hits
        if called == operation and key.startswith(prefix):
            hits += 1
            return not_stored(key)
        return None

    max_chain = (
        2 if operation == "get_ranges" else 8
    )  # every commit reads, or only one after a failed one does
    with store.writer(policy=Policy(max_chain=max_chain)) as writer:
        seen = []
        for step, tensors in enumerate(states):
            if step % 3 == 2:
                faulty.fault = fault
                wrong = trained(states[0], 50 + step, changes=40)
                with pytest.raises(StoreError):
                    writer.commit(step=step, tensors=wrong, files={"f": str(step).encode()})
                faulty.fault = faulty.none
                if late and operation == "create":
                    return  # it was stored in truth: only `not_stored` would be false here
            writer.commit(step=step, tensors=tensors, files={"f": b"x" * step})
            seen.append(step)
    assert hits >= 3
    for step in seen:
        reads(df.open(faulty).version(step=step), states[step])
        if step:
            check_follow(store, step - 1, step, states[step])
    assert store.verify(all=True).findings == []


def test_every_operation_fails_once():
    """DF-WR-01: the n-th storage operation of a commit fails, for every n; then the same writer commits
    other weights.
    """
    faulty = Faulty(memory())
    store = make(faulty)
    expected = {}
    with store.writer(policy=Policy(max_chain=3, pack_bytes=1000)) as writer:
        tensors = state(24, 2)
        writer.commit(step=0, tensors=tensors)
        expected[0] = tensors
        step = 1
        for nth in range(100):
            calls = itertools.count()
            faulty.fault = lambda operation, key: (
                not_stored(key)
                if not key.startswith("hints/") and next(calls) == nth  # noqa: B023 - set anew each round
                else None
            )
            wrong = trained(tensors, 1000 + nth, changes=20)
            try:
                writer.commit(step=step, tensors=wrong, files={"f": str(nth).encode()})
                tensors = expected[step] = wrong
                break
            except StoreError:
                pass
            faulty.fault = faulty.none
            tensors = trained(tensors, nth)
            writer.commit(step=step + 1, tensors=tensors)
            expected[step + 1] = tensors
            step += 2
        else:
            pytest.fail("no commit passed")
        assert nth > 4
    faulty.fault = faulty.none
    for step, tensors in expected.items():
        reads(store.version(step=step), tensors)
    assert store.verify(all=True).findings == []


def test_a_lost_reply_is_not_a_conflict():
    """DF-CMT-02: the record is there and has the writer's nonce, so the commit succeeded, once."""
    lost = {"left": 1}

    def lose(operation, key):
        if operation == "create" and key.startswith("log/") and lost["left"]:
            lost["left"] -= 1
            return failure(key)
        return None

    faulty = Faulty(memory(), late=True)
    store, first = make(faulty), state(25)
    store._context.log._retry = Retry(sleep=lambda seconds: None)
    with store.writer() as writer:
        faulty.fault = lose
        writer.commit(step=0, tensors=first)
        lost["left"] = 3
        writer.commit(step=1, tensors=trained(first))
    assert lost["left"] == 0 or kinds(store) == ["commit", "commit", "claim"]
    assert [record.step for record in store.log() if record.kind == "commit"] == [1, 0]
    reads(store.version(), trained(first))


@pytest.mark.parametrize("arrived", [False, True])
def test_an_unknown_outcome_ends_the_writer(arrived):
    """DF-CMT-03: it gives up with commit-unknown and writes no more; a new writer finds out and goes on."""
    faulty = Faulty(memory(), late=arrived)
    store, first = make(faulty), state(26)
    second, third = trained(first, 1), trained(first, 2)
    store._context.log._retry = Retry(seconds=0)
    with closing(store.writer()) as writer:
        writer.commit(step=0, tensors=first)
        faulty.fault = lambda operation, key: (
            failure(key) if key.startswith("log/") and operation != "head" else None
        )
        faulty.fault = lambda operation, key: (
            failure(key) if (operation, key[:4]) == ("create", "log/") else None
        )
        with pytest.raises(CommitUnknown) as caught:
            writer.commit(step=1, tensors=second)
        assert caught.value.code is ErrorCode.COMMIT_UNKNOWN
        faulty.fault = faulty.none
        for _ in range(2):
            with pytest.raises(CommitUnknown):
                writer.commit(step=2, tensors=third)
    with df.open(faulty).writer() as writer:
        assert store.branches()["main"].step == int(arrived)
        writer.commit(step=2, tensors=third)
    reads(store.version(), third)
    if arrived:
        reads(store.version(step=1), second)
        check_follow(store, 1, 2, third)
    else:
        check_follow(store, 0, 2, third)
    assert store.verify(all=True).findings == []


# -- beside a collector --------------------------------------------------------------------------------------


class Racing(Recorder):
    """Calls `act` once, when a collector has listed and judged, and is about to delete."""

    act = None

    def before(self, operation, key, argument=None):
        if operation == "delete" and not key.startswith("hints/") and self.act is not None:
            act, self.act = self.act, None
            act()


@pytest.mark.parametrize("what", ["files", "packs"])
def test_content_that_returns_while_its_old_object_is_collected(what):
    """DF-GC-02, DF-GC-06, DF-WR-03, DF-CMT-01: a collection races a commit whose content was there before."""
    racing = Racing(DictStorage())
    store, contents = make(racing), [state(38), state(39)]

    def commit(step, which):
        tensors = contents[0 if what == "files" else which]
        writer.commit(
            step=step, tensors=tensors, files={"f": b"ab"[which : which + 1]} if what == "files" else None
        )

    with store.writer() as writer:
        for step, which in enumerate((0, 1, 1, 1)):
            commit(step, which)
        df.open(racing).gc(keep_last=1, dry_run=False)
        racing.inner.advance(hours=30)
        racing.act = lambda: commit(4, 0)
        df.open(racing).gc(keep_last=1, dry_run=False)
        assert racing.act is None
    version = df.open(racing).version(step=4)
    reads(version, contents[0])
    assert version.files().keys() == set() or version.read_file("f") == b"a"
