"""Appending to the log: one record each, whatever goes wrong on the way; and the tail hint."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from logmaker import LogMaker
from logtools import Clock, branched, claim_members, commit_members, memory, new_log, records_in, stored
from wrappers import OPERATIONS, Counting, Flaky, Killed, LostReply, StopAt, Wrapper

from deltaformat.errors import (
    CommitUnknown,
    ConflictError,
    ErrorCode,
    InconsistentError,
    MalformedError,
    MissingError,
    StoreError,
)
from deltaformat.history import State
from deltaformat.keys import TAIL_HINT, record_key
from deltaformat.localstorage import LocalStorage
from deltaformat.records import Claim, Commit, Drop, Fork, Head, Record, Retire, Tag
from deltaformat.storage import NotStoredError, Storage


@pytest.fixture
def maker() -> LogMaker:
    return branched()


def test_append(tmp_path: Path) -> None:
    """Section 12.5: every kind, each linked to the one before; the other log sees the same."""
    for storage in (memory(), LocalStorage(str(tmp_path))):
        log = new_log(storage)
        claim = log.append(Claim, claim_members()).record
        assert (claim.seq, claim.heads) == (0, {"main": Head(None, None, 1, 0)})
        first = log.append(Commit, commit_members(log, 0, step=5)).record
        appended = log.append(Commit, commit_members(log, 0, step=6, metadata={"loss": 0.5}))
        assert appended.nbytes == len(storage.get(record_key(2)))
        log.append(Fork, lambda state: {"branch": "b", "source": 1, "step": 5})
        log.append(Tag, lambda state: {"name": "best", "target": 1})
        log.append(Claim, claim_members(resume_from=first.seq))
        log.append(Commit, commit_members(log, 5, step=7))
        log.append(Retire, lambda state: {"commits": (2,)})
        log.append(Tag, lambda state: {"name": "best", "target": None})
        log.append(Drop, lambda state: {"branch": "b"})
        assert [record.kind for record in records_in(storage)] == [
            "claim", "commit", "commit", "fork", "tag", "claim", "commit", "retire", "tag", "drop",
        ]  # fmt: skip
        other = new_log(storage)
        assert log.tail() == other.tail() == other.history().state
        assert not other.history().void
        assert len({record.nonce for record in records_in(storage)}) == 10
        assert log.retired() == {2}
        assert log.tags() == {}


def test_appending_is_cheap() -> None:
    """One create, whatever came before: a writer has looked already, and a collision tells what it missed."""
    storage = memory()
    counting = Counting(storage)
    log = new_log(counting)
    log.append(Claim, claim_members())
    for step in range(50):
        log.append(Commit, commit_members(log, 0, step=step))
        if step == 25:
            log.history()
    counting.reset()
    log.append(Commit, commit_members(log, 0, step=100))
    assert counting.by_operation() == {"create": 1}
    assert not new_log(storage).history().void


@pytest.mark.parametrize(
    ("kind", "members", "code"),
    [
        (Claim, {"branch": "main", "epoch": 5, "host": "", "pid": 0}, ErrorCode.BRANCH_HELD),
        (Claim, {"branch": "main", "epoch": 3, "host": "", "pid": 0, "resume_from": 3}, ErrorCode.NOT_LIVE),
        (Claim, {"branch": "main", "epoch": 3, "host": "", "pid": 0, "resume_from": 8}, ErrorCode.NOT_LIVE),
        (Fork, {"branch": "b", "source": 1, "step": 10}, ErrorCode.ALREADY_EXISTS),
        (Fork, {"branch": "c", "source": 3, "step": 30}, ErrorCode.NOT_LIVE),
        (Fork, {"branch": "c", "source": 1, "step": 11}, ErrorCode.NOT_LIVE),
        (Fork, {"branch": "c", "source": 13, "step": 30}, ErrorCode.NOT_LIVE),
        (Tag, {"name": "old", "target": 2}, ErrorCode.ALREADY_EXISTS),
        (Tag, {"name": "good", "target": None}, ErrorCode.TAG_MISSING),
        (Tag, {"name": "x", "target": 3}, ErrorCode.NOT_LIVE),
        (Tag, {"name": "x", "target": 13}, ErrorCode.NOT_LIVE),
        (Drop, {"branch": "c"}, ErrorCode.BRANCH_MISSING),
        (Retire, {"commits": (1,)}, ErrorCode.NOT_LIVE),
        (Retire, {"commits": (2, 5)}, ErrorCode.NOT_LIVE),
    ],
)
def test_appending_what_would_be_void(
    maker: LogMaker, kind: type[Record], members: dict[str, Any], code: ErrorCode
) -> None:
    """DF-LOG-05, DF-LOG-12, DF-CMT-04, DF-CMT-05: refused with an error that says why; nothing is written."""
    maker.void_commit()  # 13: what is void is no target either
    storage = stored(maker)
    log = new_log(storage)
    with pytest.raises((ConflictError, InconsistentError, MissingError)) as caught:
        log.append(kind, lambda state: members)
    assert caught.value.code is code
    assert len(records_in(storage)) == 14


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"claim": 0}, ErrorCode.BRANCH_HELD),
        ({"parent": 2}, ErrorCode.PARENT_MOVED),
        ({"step": 25}, ErrorCode.STEP_NOT_ABOVE_HEAD),
        ({"depth": 9}, ErrorCode.RECORD_VOID),
        ({"ancestors": ()}, ErrorCode.RECORD_VOID),
    ],
)
def test_appending_commits_that_would_be_void(
    maker: LogMaker, changes: dict[str, Any], code: ErrorCode
) -> None:
    """DF-CMT-04, DF-CMT-05, DF-LOG-08."""
    storage = stored(maker)
    log = new_log(storage)
    with pytest.raises((ConflictError, InconsistentError)) as caught:
        log.append(Commit, lambda state: commit_members(log, 4)(state) | changes)
    assert caught.value.code is code
    assert len(records_in(storage)) == 13


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (Claim, {"branch": "a b", "epoch": 1, "host": "", "pid": 0}),
        (Claim, {"branch": "a", "epoch": 1, "host": "\ud800", "pid": 0}),
        (Claim, {"branch": "a", "epoch": 1, "host": "", "pid": 1 << 60}),
        (Tag, {"name": "", "target": 1}),
        (Fork, {"branch": "c", "source": 1, "step": 10.0}),
    ],
)
def test_appending_what_readers_refuse(maker: LogMaker, kind: type[Record], members: dict[str, Any]) -> None:
    """DF-JSN-01, DF-LOG-01: a malformed record never gets into the log, where it would stop every reader."""
    storage = stored(maker)
    with pytest.raises(MalformedError):
        new_log(storage).append(kind, lambda state: members)
    assert len(records_in(storage)) == 13


def test_a_collision() -> None:
    """DF-CMT-02, DF-LOG-05: another record has the place: it is taken in, and the own one is made anew."""
    storage = memory()
    log, other = new_log(storage), new_log(storage)
    log.append(Claim, claim_members())
    states: list[State] = []

    def members(state: State) -> dict[str, Any]:
        states.append(state)
        if len(states) < 4:
            other.append(Claim, claim_members(f"b{len(states)}"))
        return commit_members(log, 0, step=1)(state)

    appended = log.append(Commit, members)
    assert [state.seq for state in states] == [0, 1, 2, 3]
    assert appended.record.seq == 4
    assert set(appended.record.heads) == {"main", "b1", "b2", "b3"}
    assert log.tail() == other.tail() == other.history().state
    assert not other.history().void


def test_fencing() -> None:
    """DF-CMT-04: a writer whose branch was claimed by another stops."""
    storage = memory()
    log, other = new_log(storage), new_log(storage)
    log.append(Claim, claim_members())
    log.append(Commit, commit_members(log, 0, step=1))

    def members(state: State) -> dict[str, Any]:
        if state.heads["main"].epoch == 1:
            other.append(Claim, claim_members())
        return commit_members(log, 0, step=2)(state)

    with pytest.raises(ConflictError) as caught:
        log.append(Commit, members)
    assert caught.value.code is ErrorCode.BRANCH_HELD
    assert "claim 2" in caught.value.message
    other.append(Commit, commit_members(other, 2, step=2))
    assert [record.kind for record in records_in(storage)] == ["claim", "commit", "claim", "commit"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_lost_replies(exists: bool, times: int) -> None:
    """DF-CMT-02, DF-CMT-03: the record is there and is the writer's own: success, once."""
    storage = memory()
    log = new_log(LostReply(storage, times=times, exists=exists))
    log.append(Claim, claim_members())
    for step in (1, 2):
        log.append(Commit, commit_members(log, 0, step=step))
    assert [record.kind for record in records_in(storage)] == ["claim", "commit", "commit"]
    assert log.tail() == new_log(storage).history().state


def test_the_same_bytes_are_retried() -> None:
    """DF-CMT-03: same key, same bytes, pauses that grow; until it is known."""
    sent: list[tuple[str, bytes]] = []

    class Failing(Wrapper):
        def create(self, key: str, data: Any) -> bool:
            sent.append((key, bytes(data)))
            if len(sent) <= 7:
                raise StoreError(ErrorCode.STORE_FAILED, "503", where=key)
            return self.inner.create(key, data)

    clock = Clock()
    log = new_log(Failing(memory()), clock)
    assert log.append(Claim, claim_members()).record.seq == 0
    assert len(sent) == 8
    assert len(set(sent)) == 1
    assert clock.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0])


def test_a_refusal_after_a_try_of_unknown_outcome() -> None:
    """DF-CMT-03: what is refused now (credentials ran out, say) may be in the log by the try before."""
    tries: list[str] = []

    class Expired(Wrapper):
        def create(self, key: str, data: Any) -> bool:
            tries.append(key)
            if len(tries) == 1:
                raise StoreError(ErrorCode.STORE_FAILED, "timed out", where=key)
            raise NotStoredError(ErrorCode.STORE_FAILED, "access denied", where=key)

    log = new_log(Expired(memory()))
    with pytest.raises(CommitUnknown, match="access denied"):
        log.append(Claim, claim_members())
    assert len(tries) > 5
    with pytest.raises(NotStoredError):  # but a first try that is refused is just that
        log.append(Claim, claim_members())


@pytest.mark.parametrize("folded", [False, True])
def test_what_another_thread_read_meanwhile(folded: bool) -> None:
    """A state that has gone past the own record before its *create* returned does not go back."""
    storage = memory()
    other = new_log(storage)

    class Slow(Wrapper):
        def create(self, key: str, data: Any) -> bool:
            created = self.inner.create(key, data)
            if key == record_key(1):
                other.append(Claim, claim_members("b"))
                log.tail()
            return created

    log = new_log(Slow(storage))
    log.append(Claim, claim_members())
    if folded:
        log.history()
    log.append(Commit, commit_members(log, 0, step=1))
    assert log.write_hint(2)
    assert log.tail() == other.tail() == new_log(storage).history().state


def test_a_reply_lost_to_a_collision() -> None:
    """DF-CMT-02, DF-CMT-03: unknown, then known to be another's: the next place is tried."""
    storage = memory()
    other = new_log(storage)

    class Race(Wrapper):
        def create(self, key: str, data: Any) -> bool:
            if key == record_key(1) and not raced:
                raced.append(key)
                other.append(Claim, claim_members("b"))
                raise StoreError(ErrorCode.STORE_FAILED, "timed out", where=key)
            return self.inner.create(key, data)

    raced: list[str] = []
    log = new_log(Race(storage))
    log.append(Claim, claim_members())
    assert log.append(Commit, commit_members(log, 0, step=1)).record.seq == 2
    assert not new_log(storage).history().void


@pytest.mark.parametrize("stored_after_all", [False, True])
def test_an_unknown_outcome(stored_after_all: bool) -> None:
    """DF-CMT-03: after giving up this writer writes no more; a new claim is a new writer, and finds out."""
    storage = memory()

    class Dead(Wrapper):
        dead = False

        def create(self, key: str, data: Any) -> bool:
            if not self.dead:
                return self.inner.create(key, data)
            if stored_after_all:
                self.inner.create(key, data)
            raise StoreError(ErrorCode.STORE_FAILED, "504", where=key)

    dead = Dead(storage)
    clock = Clock()
    log = new_log(dead, clock, seconds=20.0, jitter=lambda: 0.0)
    log.append(Claim, claim_members())
    dead.dead = True
    with pytest.raises(CommitUnknown, match="504") as caught:
        log.append(Commit, commit_members(log, 0, step=1))
    assert caught.value.code is ErrorCode.COMMIT_UNKNOWN
    assert caught.value.where == record_key(1)
    assert 10 < clock.now <= 20
    dead.dead = False
    attempts = Counting(storage)
    dead.inner = attempts
    for step in (1, 2):
        with pytest.raises(CommitUnknown):
            log.append(Commit, commit_members(log, 0, step=step))
    assert attempts.count("create") == 0
    claim = log.append(Claim, claim_members()).record
    assert claim.heads["main"].seq == (1 if stored_after_all else None)
    commit = log.append(Commit, commit_members(log, claim.seq, step=2)).record
    with pytest.raises(CommitUnknown):
        log.append(Commit, commit_members(log, 0, step=3))
    assert commit.depth == int(stored_after_all)
    assert not new_log(storage).history().void


def test_an_unknown_outcome_of_other_kinds() -> None:
    """DF-CMT-03: records without a claim are this log's own; they stop, commits go on."""
    storage = memory()
    flaky = Flaky(storage, 0.0)
    log = new_log(flaky)
    log.append(Claim, claim_members())
    commit = log.append(Commit, commit_members(log, 0, step=1)).record
    flaky.fail = lambda operation, key, before: operation == "create"
    with pytest.raises(CommitUnknown):
        log.append(Tag, lambda state: {"name": "x", "target": commit.seq})
    flaky.fail = lambda operation, key, before: False
    for kind, members in ((Tag, {"name": "x", "target": commit.seq}), (Drop, {"branch": "main"})):
        with pytest.raises(CommitUnknown, match="unknown"):
            log.append(kind, lambda state, members=members: members)
    log.append(Commit, commit_members(log, 0, step=2))
    new_log(storage).append(Tag, lambda state: {"name": "x", "target": commit.seq})


def test_the_reading_back_fails() -> None:
    """DF-CMT-02, DF-STO-04: while the record in place cannot be read the outcome is unknown."""
    storage = memory()

    class Unreadable(LostReply):
        failures = 3

        def get(self, key: str, *, limit: int | None = None) -> bytes:
            if self.times == 0 and self.failures:
                self.failures -= 1
                raise StoreError(ErrorCode.STORE_FAILED, "500", where=key)
            return self.inner.get(key, limit=limit)

    log = new_log(Unreadable(storage, exists=True))
    assert log.append(Claim, claim_members()).record.seq == 0
    assert len(records_in(storage)) == 1


def test_nothing_in_the_place() -> None:
    """DF-CMT-03: a store that tells of a record and then does not have it is asked again."""
    storage = memory()

    class Forgetful(Wrapper):
        failures = 2

        def create(self, key: str, data: Any) -> bool:
            self.failures -= 1
            return self.failures < 0 and self.inner.create(key, data)

    assert new_log(Forgetful(storage)).append(Claim, claim_members()).record.seq == 0
    assert len(records_in(storage)) == 1


def test_rubbish_in_the_place() -> None:
    """DF-CMT-03: what is in the place cannot be told to be another's record: this writer stops."""
    storage = memory()

    class Rubbish(Wrapper):
        def create(self, key: str, data: Any) -> bool:
            self.inner.put(key, b"rubbish")
            return False

    log = new_log(Rubbish(storage))
    with pytest.raises(MalformedError):
        log.append(Claim, claim_members())


def test_known_failures_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is certain that nothing was stored (a full disk) that is told, and the writer may go on."""
    import os

    clock = Clock()
    log = new_log(LocalStorage(str(tmp_path)), clock)
    log.append(Claim, claim_members())

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotStoredError, match="No space left"):
        log.append(Commit, commit_members(log, 0, step=1))
    assert clock.pauses == []
    monkeypatch.undo()
    assert log.append(Commit, commit_members(log, 0, step=1)).record.seq == 1


@pytest.mark.parametrize("executed", [False, True])
def test_killed_at_every_operation(executed: bool) -> None:
    """DF-CMT-03: wherever a writer is stopped, the next one finds a whole log and goes on."""

    def work(storage: Storage) -> None:
        log = new_log(storage)
        claim = log.append(Claim, claim_members()).record.seq
        for _ in range(3):
            log.append(Commit, commit_members(log, claim))
            log.write_hint(force=True)

    total = StopAt(memory(), None, operations=OPERATIONS)
    work(total)
    for number in range(1, total.seen + 1):
        storage = memory()
        with pytest.raises(Killed):
            work(StopAt(storage, number, executed=executed, operations=OPERATIONS))
        before = len(records_in(storage))
        work(storage)
        assert len(records_in(storage)) == before + 4
        history = new_log(storage).history()
        assert not history.void
        assert history.state == new_log(storage).tail()


def test_interrupted_while_creating() -> None:
    """DF-CMT-03: an interrupt leaves the outcome unknown, too."""
    storage = memory()
    log = new_log(storage)
    log.append(Claim, claim_members())
    log._storage = StopAt(storage, 1, executed=True)
    with pytest.raises(Killed):
        log.append(Commit, commit_members(log, 0, step=1))
    log._storage = storage
    with pytest.raises(CommitUnknown):
        log.append(Commit, commit_members(log, 0, step=2))


def test_an_error_of_the_caller_ends_the_attempt() -> None:
    storage = memory()
    log = new_log(storage)

    def members(state: State) -> dict[str, Any]:
        raise ConflictError(ErrorCode.BRANCH_HELD, "by host x")

    with pytest.raises(ConflictError, match="by host x"):
        log.append(Claim, members)
    assert log.append(Claim, claim_members()).record.seq == 0


@pytest.mark.parametrize("place", ["memory", "local", "flaky"])
def test_many_writers_at_once(place: str, tmp_path: Path) -> None:
    """DF-CMT-02, DF-CMT-03: writers of several branches race, also with lost replies; each commit once."""
    inner = LocalStorage(str(tmp_path)) if place == "local" else memory()

    def write(branch: str) -> list[int]:
        storage: Storage = LostReply(inner, times=3, exists=branch < "b2") if place == "flaky" else inner
        log = new_log(storage)
        claim = log.append(Claim, claim_members(branch)).record.seq
        return [
            log.append(Commit, commit_members(log, claim, branch, step=step)).record.seq for step in range(8)
        ]

    with ThreadPoolExecutor(4) as pool:
        seqs = list(pool.map(write, [f"b{i}" for i in range(4)]))
    assert sorted(itertools.chain(*seqs, [r.seq for r in records_in(inner) if r.kind == "claim"])) == list(
        range(36)
    )
    history = new_log(inner).history()
    assert not history.void
    assert {name: head.step for name, head in history.state.heads.items()} == dict.fromkeys(
        ("b0", "b1", "b2", "b3"), 7
    )
    assert new_log(inner).tail() == history.state


def test_one_log_in_many_threads() -> None:
    """One log may be read and written by several threads."""
    storage = memory()
    log = new_log(storage)
    log.append(Claim, claim_members())
    done = threading.Event()
    seen: list[list[int]] = []

    def read() -> None:
        mine: list[int] = []
        while not done.is_set():
            mine.append(log.tail().seq)
            if len(mine) % 7 == 0:
                log.history()
            log.judged(log.append(Commit, commit_members(log, 0)).record.seq) if len(mine) < 3 else None
        seen.append(mine)

    def write(number: int) -> None:
        for _ in range(10):
            log.append(Commit, commit_members(log, 0))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    done.set()
    for reader in readers:
        reader.join()
    assert all(mine == sorted(mine) for mine in seen)
    assert log.tail() == new_log(storage).history().state
    assert log.tail().seq >= 30


# -- hints --------------------------------------------------------------------------------------------------


def hint_in(storage: Storage) -> int | None:
    try:
        value = json.loads(storage.get(TAIL_HINT))["seq"]
    except MissingError:
        return None
    assert isinstance(value, int)
    return value


def test_hints() -> None:
    """DF-LOG-10: at most once a second, but for the last one; never before the record exists."""
    storage = memory()
    clock = Clock()
    log = new_log(storage, clock)
    assert log.write_hint() is False
    assert hint_in(storage) is None
    log.append(Claim, claim_members())
    assert log.write_hint() is True
    assert hint_in(storage) == 0
    log.append(Commit, commit_members(log, 0, step=1))
    for passed in (0.0, 0.5, 0.4):
        clock.now += passed
        assert log.write_hint() is False
    assert hint_in(storage) == 0
    clock.now += 0.2
    assert log.write_hint() is True
    assert hint_in(storage) == 1
    log.append(Commit, commit_members(log, 0, step=2))
    assert log.write_hint(2) is False
    assert log.write_hint(2, force=True) is True
    assert log.write_hint(force=True) is False  # it is there already
    assert hint_in(storage) == 2
    with pytest.raises(MalformedError):
        log.write_hint(3)


def test_hints_may_fail() -> None:
    """DF-LOG-10: a commit does not fail with its hint; the next try waits its second."""
    storage = memory()
    clock = Clock()
    log = new_log(Flaky(storage, lambda operation, key, before: operation == "put"), clock)
    log.append(Claim, claim_members())
    assert log.write_hint() is False
    assert log.write_hint(force=True) is False
    counting = Counting(storage)
    log._storage = counting
    assert log.write_hint() is False
    clock.now += 1
    assert log.write_hint() is True
    assert counting.count("put") == 1


def test_times_and_nonces() -> None:
    from deltaformat.log import new_nonce, utc_now

    assert len({new_nonce() for _ in range(100)}) == 100
    assert len(new_nonce()) == 32
    assert utc_now().endswith("Z")
    assert "T" in utc_now()
