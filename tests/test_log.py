"""The log over a storage: few requests, right whatever the hint says, one record per append whatever goes wrong."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logmaker import LogMaker, manifest, root, sha
from wrappers import OPERATIONS, Counting, Flaky, Killed, LostReply, StopAt, Wrapper

from deltaformat.errors import (
    CommitUnknown,
    ConflictError,
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.history import EMPTY, State, ancestors_for
from deltaformat.ijson import seal
from deltaformat.keys import TAIL_HINT, record_key
from deltaformat.localstorage import LocalStorage
from deltaformat.log import Log, Retry
from deltaformat.records import Claim, Commit, Drop, Fork, Head, Record, Retire, Tag, encode_record, parse_record
from deltaformat.storage import NotStoredError, ObstoreStorage, Storage

_numbers = itertools.count()


def memory() -> Storage:
    from obstore.store import MemoryStore

    return ObstoreStorage(MemoryStore(), f"memory://log-{next(_numbers)}")


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def retry(self, **changes: Any) -> Retry:
        return Retry(**{"sleep": self.sleep, "clock": self, "jitter": lambda: 1.0, **changes})


def new_log(storage: Storage, clock: Clock | None = None, **changes: Any) -> Log:
    clock = clock or Clock()
    return Log(storage, retry=clock.retry(**changes), clock=clock)


def stored(maker: LogMaker) -> Storage:
    storage = memory()
    maker.store(storage)
    return storage


def set_hint(storage: Storage, data: bytes | int) -> None:
    storage.put(TAIL_HINT, data if isinstance(data, bytes) else b'{"seq":%d}' % data)


def claim_members(branch: str = "main", **changes: Any) -> Callable[[State], dict[str, Any]]:
    def members(state: State) -> dict[str, Any]:
        head = state.heads.get(branch)
        epoch = 1 if head is None else head.epoch + 1
        return {"branch": branch, "epoch": epoch, "host": "host", "pid": 7} | changes

    return members


def commit_members(
    log: Log, claim: int, branch: str = "main", step: int | None = None, **changes: Any
) -> Callable[[State], dict[str, Any]]:
    def members(state: State) -> dict[str, Any]:
        head = state.heads[branch]
        parent = None if head.seq is None else log.judged(head.seq)
        return {
            "branch": branch, "claim": claim, "step": (head.step or 0) + 1 if step is None else step,
            "parent": head.seq, "depth": 0 if parent is None else parent.depth + 1,
            "ancestors": () if parent is None else ancestors_for(parent), "root": root(step),
            "manifests": (manifest(claim, step),),
        } | changes  # fmt: skip

    return members


def records_in(storage: Storage) -> list[Record]:
    found = []
    for seq in itertools.count():
        try:
            found.append(parse_record(storage.get(record_key(seq)), seq=seq))
        except MissingError:
            return found
    raise AssertionError


# -- a long log, made once ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_maker() -> LogMaker:
    """A claim and 10,000 commits: commit of seq n has step n."""
    maker = LogMaker()
    maker.claim()
    for step in range(1, 10_001):
        maker.commit(step=step)
    return maker


@pytest.fixture(scope="module")
def long_store(long_maker: LogMaker) -> Storage:
    return stored(long_maker)


@pytest.mark.parametrize("step", [1, 2, 4097, 5000, 8191, 9999, 10_000])
def test_few_requests_with_a_good_hint(long_store: Storage, step: int) -> None:
    """DF-LOG-08, DF-LOG-09: step 1 of 10,000 by a cold log; no listing (DF-STO-03)."""
    set_hint(long_store, 9_990)
    counting = Counting(long_store)
    log = new_log(counting)
    commit = log.find_step(log.tail().heads["main"], step)
    assert (commit.seq, commit.step) == (step, step)
    assert counting.count() < 25
    assert set(counting.by_operation()) == {"get"}


@pytest.mark.parametrize(
    "hint",
    [
        None, 0, 1, 5_000, 9_998, 10_000, 10_001, 10_002, 2**53 - 1, b"", b"{", b"[]", b"{}", b'{"seq":"1"}',
        b'{"seq":-1}', b'{"seq":1.0}', b'{"seq":true}', b'{"seq":null}', b'{"seq":9007199254740992}',
        b'{"seq":1,"seq":2}', b"\xff", b"x" * 70_000, b'{"seq":3,"more":[1]}',
    ],
    ids=lambda hint: str(hint)[:25],
)  # fmt: skip
def test_any_hint(long_store: Storage, long_maker: LogMaker, hint: bytes | int | None) -> None:
    """DF-LOG-09: missing, stale, false or malformed, the newest record is found; in few requests."""
    if hint is None:
        long_store.delete([TAIL_HINT])
    else:
        set_hint(long_store, hint)
    counting = Counting(long_store)
    log = new_log(counting)
    assert log.tail() == long_maker.state
    assert counting.count() < 30
    counting.reset()
    assert log.tail() == long_maker.state
    assert counting.keys() == [record_key(10_001)]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 21, 22, 23, 85, 86, 300])
def test_the_newest_of_any_length(long_maker: LogMaker, length: int) -> None:
    """Section 12.4, from every hint, and incrementally from every earlier length."""
    storage = memory()
    for seq in range(length):
        storage.put(record_key(seq), long_maker.datas[seq])
    for hint in (None, *range(0, length + 2, max(1, length // 7))):
        if hint is not None:
            set_hint(storage, hint)
        assert new_log(storage).tail().seq == length - 1
    if length == 0:
        assert new_log(storage).tail() == EMPTY
    for known in range(0, length, max(1, length // 5)):
        growing = memory()
        for seq in range(known):
            growing.put(record_key(seq), long_maker.datas[seq])
        log = new_log(growing)
        assert log.tail().seq == known - 1
        for seq in range(known, length):
            growing.put(record_key(seq), long_maker.datas[seq])
        assert log.tail() == new_log(storage).tail()


def test_following_is_cheap(long_maker: LogMaker) -> None:
    """A follower pays one request where nothing is new, two where one record is; few where it is far behind."""
    storage = memory()
    for seq in range(100):
        storage.put(record_key(seq), long_maker.datas[seq])
    counting = Counting(storage)
    log = new_log(counting)
    log.tail()
    for seq in range(100, 110):
        counting.reset()
        assert log.tail().seq == seq - 1
        assert counting.count() == 1
        storage.put(record_key(seq), long_maker.datas[seq])
        counting.reset()
        assert log.tail().seq == seq
        assert counting.keys() == [record_key(seq), record_key(seq + 1)]
    for seq in range(110, 10_001):
        storage.put(record_key(seq), long_maker.datas[seq])
    counting.reset()
    assert log.tail() == long_maker.state
    assert counting.count() < 50


def test_history_of_a_long_log(long_store: Storage, long_maker: LogMaker) -> None:
    """DF-LOG-06: the fold reads every record once; later only what is new."""
    counting = Counting(long_store)
    log = new_log(counting)
    history = log.history()
    assert history.state == long_maker.state
    assert history.live == long_maker.history.live
    assert not history.void
    assert counting.count(prefix="log/") < 10_050
    counting.reset()
    log.history()
    log.tail()
    assert counting.count() == 2


# -- finding ------------------------------------------------------------------------------------------------


@pytest.fixture
def maker() -> LogMaker:
    """0 claim, 1-3 commits 10 20 30, 4 rewind to 20, 5 commit 25, 6 fork b of 20, 7 claim b, 8 commit 21, 9-11 tags, 12 retire."""
    maker = LogMaker()
    maker.claim()
    for step in (10, 20, 30):
        maker.commit(step=step)
    maker.claim(resume_from=2)
    maker.commit(step=25)
    maker.fork("b", 2)
    maker.claim("b")
    maker.commit("b", step=21)
    maker.tag("good", 5)
    maker.tag("old", 1)
    maker.tag("good", None)
    maker.retire(3)
    return maker


def test_find_step(maker: LogMaker) -> None:
    """DF-LOG-07: in the branch's own lineage only; superseded commits by seq only."""
    log = new_log(stored(maker))
    heads = log.tail().heads
    assert [log.find_step(heads["main"], step).seq for step in (10, 20, 25)] == [1, 2, 5]
    assert [log.find_step(heads["b"], step).seq for step in (10, 20, 21)] == [1, 2, 8]
    for branch, step in (("main", 30), ("main", 21), ("b", 25), ("b", 30), ("main", 9), ("main", 26)):
        with pytest.raises(MissingError) as caught:
            log.find_step(heads[branch], step)
        assert caught.value.code is ErrorCode.VERSION_MISSING
    with pytest.raises(MissingError):
        log.find_step(Head(None, None, 1, 0), 0)
    assert log.judged(3).step == 30


def test_judged(maker: LogMaker) -> None:
    """DF-LOG-04: by seq only what is a valid commit."""
    maker.void_commit()
    log = new_log(stored(maker))
    assert [log.judged(seq).step for seq in (1, 2, 3, 5, 8)] == [10, 20, 30, 25, 21]
    with pytest.raises(InconsistentError, match="is void: branch 'main' is held by claim 4") as void:
        log.judged(13)
    assert void.value.code is ErrorCode.RECORD_VOID
    for seq in (0, 4, 6, 12, 14, -1):
        with pytest.raises(MissingError) as missing:
            log.judged(seq)
        assert missing.value.code is ErrorCode.VERSION_MISSING
    with pytest.raises(MissingError):
        log.record(14)
    assert log.record(13).seq == 13


def test_tags_and_retired(maker: LogMaker) -> None:
    """Section 13: along `last_tag` and `last_retire`."""
    log = new_log(stored(maker))
    assert log.tags() == {"old": 1} == maker.history.tags
    assert log.retired() == {3} == set(maker.history.retired)
    maker.tag("new", 2)
    assert new_log(stored(maker)).tags() == {"old": 1, "new": 2}
    empty = new_log(memory())
    assert (empty.tags(), empty.retired()) == ({}, set())


def test_in_lineage(maker: LogMaker) -> None:
    log = new_log(stored(maker))
    pairs = {(seq, head) for seq in (1, 2, 3, 5, 8) for head in (1, 2, 3, 5, 8) if log.in_lineage(seq, head)}
    assert pairs == {(seq, head) for seq in (1, 2, 3, 5, 8) for head in (1, 2, 3, 5, 8) if maker.history.in_lineage(seq, head)}


def test_records_and_entries(maker: LogMaker) -> None:
    """DF-LOG-04: void records are told only to those who ask for all."""
    maker.void_commit()
    storage = stored(maker)
    log = new_log(storage)
    assert [record.seq for record in log.records()] == list(range(12, -1, -1))
    assert [record.seq for record in log.records(newest_first=False)] == list(range(13))
    assert [record.seq for record in log.records(limit=3)] == [12, 11, 10]
    assert [record.seq for record in log.records(branch="b")] == [8, 7, 6]
    assert [record.seq for record in log.records(branch="main", limit=2, newest_first=False)] == [0, 1]
    assert list(log.records(limit=0)) == []
    entries = {entry.record.seq: entry.void for entry in log.entries()}
    assert [seq for seq, void in entries.items() if void] == [13]
    assert list(new_log(memory()).records()) == []
    counting = Counting(storage)
    next(new_log(counting).records())
    assert counting.count() < 25


# -- void records and wrong ones ----------------------------------------------------------------------------


def test_a_void_newest_record(maker: LogMaker) -> None:
    """DF-LOG-04, DF-LOG-06: ignored, also where it is the newest; the state is that of the whole log."""
    before = maker.state
    maker.void_commit()
    storage = stored(maker)
    log = new_log(storage)
    assert log.tail() == maker.state
    assert log.tail() == replace(before, seq=13, hash=maker.state.hash)
    # And it is gone over by what follows, for the old reader and for a new one.
    maker.commit("b")
    maker.store(storage, start=14)
    assert log.tail() == maker.state == new_log(storage).tail()
    assert log.tail().heads["b"].seq == 14


def test_void_records_while_following(maker: LogMaker) -> None:
    """DF-LOG-06: a follower that meets one reads the whole log once, and follows on."""
    storage = stored(maker)
    counting = Counting(storage)
    log = new_log(counting)
    log.tail()
    maker.void_commit()
    maker.void_commit("b")
    maker.commit()
    maker.store(storage, start=13)
    assert log.tail() == maker.state
    counting.reset()
    maker.commit()
    maker.store(storage, start=16)
    assert log.tail() == maker.state
    assert counting.count() == 2
    assert [entry.record.seq for entry in log.entries() if entry.void] == [14, 13]


@given(st.data())
def test_single_void_records_anywhere(data: st.DataObject) -> None:
    """DF-LOG-06: with voids that are no neighbours, every prefix has the state of its fold, cold and warm."""
    maker = LogMaker()
    maker.claim()
    storage = memory()
    warm = new_log(storage)
    void_before = False
    for _ in range(data.draw(st.integers(1, 12))):
        start = len(maker.datas)
        action = data.draw(st.sampled_from(["commit", "claim", "tag", "void"]))
        if action == "void" and not void_before:
            maker.void_commit()
        elif action == "claim":
            maker.claim(data.draw(st.sampled_from(["main", "b"])))
        elif action == "tag" and maker.history.live:
            maker.tag(f"t{start}", min(maker.history.live))
        else:
            maker.commit()
        void_before = start in maker.history.void
        maker.store(storage, start=start)
        assert new_log(storage).tail() == maker.state
        if data.draw(st.booleans()):
            assert warm.tail() == maker.state
    for seq, data_of in enumerate(maker.datas):
        record = parse_record(data_of, seq=seq)
        if isinstance(record, Commit):
            log = new_log(storage)
            if seq in maker.history.void:
                with pytest.raises(InconsistentError):
                    log.judged(seq)
            else:
                assert log.judged(seq) == record


def test_ancestors_are_looked_at(maker: LogMaker) -> None:
    """DF-LOG-06, DF-LOG-08: a newest commit with wrong ancestors is void though its heads are right."""
    before = maker.state
    record = maker.draft_commit()
    maker.add_void(replace(record, ancestors=record.ancestors[:1]))
    assert new_log(stored(maker)).tail().heads == before.heads


@pytest.mark.parametrize("kind", ["claim", "fork", "tag", "retire"])
def test_named_commits_are_looked_at(maker: LogMaker, kind: str) -> None:
    """DF-LOG-06: a newest record that names what is no commit is void."""
    before = maker.state
    heads = dict(before.heads)
    common: dict[str, Any] = {
        "seq": 13, "prev": before.hash, "nonce": "0" * 32, "time": "", "last_tag": before.last_tag,
        "last_retire": before.last_retire,
    }  # fmt: skip
    records: dict[str, Record] = {
        "claim": Claim(
            **common, heads=heads | {"main": Head(4, 20, 3, 13)}, branch="main", epoch=3, host="", pid=0, resume_from=4
        ),
        "fork": Fork(**common, heads=heads | {"c": Head(4, 20, 0, None)}, branch="c", source=4, step=20),
        "tag": Tag(**common, heads=heads, name="x", target=4),
        "retire": Retire(**common, heads=heads, commits=(4,)),
    }
    maker.add_void(records[kind])
    assert new_log(stored(maker)).tail() == maker.state == replace(before, seq=13, hash=maker.state.hash)


def broken_chain(maker: LogMaker, seq: int) -> Storage:
    """Record `seq` is replaced by one with the same meaning."""
    storage = stored(maker)
    record = parse_record(maker.datas[seq], seq=seq)
    storage.put(record_key(seq), encode_record(replace(record, time="another")))
    return storage


def test_a_broken_chain(maker: LogMaker) -> None:
    """DF-LOG-02: noticed at the tail, on following, on judging and in the fold."""
    storage = broken_chain(maker, 11)
    calls: list[Callable[[], object]] = [
        new_log(storage).tail,
        new_log(storage).history,
        lambda: list(new_log(storage).entries()),
    ]
    for call in calls:
        with pytest.raises(CorruptError) as caught:
            call()
        assert caught.value.code is ErrorCode.CHAIN_BROKEN
        assert caught.value.where == record_key(12)
    far = new_log(broken_chain(maker, 1))
    assert far.tail() == maker.state
    with pytest.raises(CorruptError):
        far.judged(2)
    with pytest.raises(CorruptError):
        far.history()
    assert far.tail() == maker.state


def test_a_failing_tail_leaves_what_was_known(maker: LogMaker) -> None:
    """DF-RD-03: an error in a new record, or a failing store, changes nothing; mended, all goes on."""
    storage = memory()
    for seq in range(12):
        storage.put(record_key(seq), maker.datas[seq])
    failing = Flaky(storage, 0.0)
    log = new_log(failing)
    state = log.tail()
    for bad in (b"", b"{}", maker.datas[11], maker.datas[12].replace(b"retire", b"retard"), seal({"requires": ["new"]})):
        storage.put(record_key(12), bad)
        with pytest.raises((MalformedError, CorruptError, InconsistentError, UnsupportedError)):
            log.tail()
        assert log._state == state
        storage.delete([record_key(12)])
        log = new_log(failing)
        assert log.tail() == state
    failing.fail = lambda *args: True
    with pytest.raises(StoreError):
        log.tail()
    failing.fail = lambda *args: False
    storage.put(record_key(12), maker.datas[12])
    assert log.tail() == maker.state


def test_a_failure_is_no_absence(maker: LogMaker) -> None:
    """DF-STO-04: whichever request fails, the tail is found or the failure told; never an older tail."""
    storage = stored(maker)
    counting = Counting(storage)
    new_log(counting).tail()
    for number in range(counting.count()):
        log = new_log(Flaky(storage, lambda operation, key, before, number=number: before == number))
        try:
            state = log.tail()
        except StoreError:
            continue
        assert state == maker.state
        assert number == 0  # the hint's failure: as if there were none


def test_a_lost_record(maker: LogMaker) -> None:
    """Records are never deleted; where one is gone, that is told."""
    storage = stored(maker)
    set_hint(storage, 12)
    storage.delete([record_key(11)])
    with pytest.raises(MissingError) as caught:
        new_log(storage).tail()
    assert caught.value.code is ErrorCode.OBJECT_MISSING
    assert caught.value.where == record_key(11)


def hostile(maker: LogMaker, record: Record) -> Log:
    """A log whose newest record is `record`, and whose reader trusts it."""
    storage = stored(maker)
    storage.put(record_key(record.seq), encode_record(record))
    return new_log(storage)


@pytest.mark.parametrize("ancestors", [((2, 12, 20),), ((3, 5, 20),), ((2, 4, 20),), ((1, 2, 19), (0, 1, 10)), ((0, 2, 20),)])
def test_walks_that_lead_astray(maker: LogMaker, ancestors: tuple[tuple[int, int, int], ...]) -> None:
    """DF-SEC-01: a hostile list of ancestors ends in an error, not in circles."""
    record = parse_record(maker.datas[5], seq=5)
    assert isinstance(record, Commit)
    storage = stored(maker)
    storage.put(record_key(5), encode_record(replace(record, ancestors=ancestors)))
    log = new_log(storage)
    with pytest.raises(InconsistentError) as caught:
        log.find_step(Head(5, 25, 2, 4), 15)
    assert caught.value.code is ErrorCode.RECORD_VOID
    with pytest.raises(InconsistentError):
        log.find_step(Head(4, 25, 2, 4), 15)


def test_chains_that_lead_astray(maker: LogMaker) -> None:
    """DF-SEC-01: so do hostile `last_tag` links."""
    storage = stored(maker)
    for link in (10, 11, 2):
        record = parse_record(maker.datas[10], seq=10)
        storage.put(record_key(10), encode_record(replace(record, last_tag=link)))
        with pytest.raises(InconsistentError):
            new_log(storage).tags()


def test_huge_records_are_not_read(maker: LogMaker) -> None:
    """DF-LIM-01, DF-LIM-02."""
    storage = stored(maker)
    storage.put(record_key(13), b"x" * (16 << 20) + b"x")
    with pytest.raises(LimitError):
        new_log(storage).tail()


# -- appending ----------------------------------------------------------------------------------------------


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
    """One look for what is new and one create, whatever came before."""
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
    assert counting.by_operation() == {"get": 1, "create": 1}
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
    """DF-LOG-05, DF-CMT-04, DF-CMT-05: refused with an error that says why, and nothing is written."""
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
def test_appending_commits_that_would_be_void(maker: LogMaker, changes: dict[str, Any], code: ErrorCode) -> None:
    """DF-CMT-04, DF-CMT-05, DF-LOG-08."""
    storage = stored(maker)
    log = new_log(storage)
    with pytest.raises((ConflictError, InconsistentError)) as caught:
        log.append(Commit, commit_members(log, 4, **changes))
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
    """Where it is certain that nothing was stored (a full disk), the error is told, and the writer may go on."""
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
    """DF-CMT-02, DF-CMT-03: writers of several branches race, with and without lost replies; each commit once."""
    inner = LocalStorage(str(tmp_path)) if place == "local" else memory()

    def write(branch: str) -> list[int]:
        storage: Storage = LostReply(inner, times=3, exists=branch < "b2") if place == "flaky" else inner
        log = new_log(storage)
        claim = log.append(Claim, claim_members(branch)).record.seq
        return [log.append(Commit, commit_members(log, claim, branch, step=step)).record.seq for step in range(8)]

    with ThreadPoolExecutor(4) as pool:
        seqs = list(pool.map(write, [f"b{i}" for i in range(4)]))
    assert sorted(itertools.chain(*seqs, [r.seq for r in records_in(inner) if r.kind == "claim"])) == list(range(36))
    history = new_log(inner).history()
    assert not history.void
    assert {name: head.step for name, head in history.state.heads.items()} == dict.fromkeys(("b0", "b1", "b2", "b3"), 7)
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


# -- the cache of records -----------------------------------------------------------------------------------


def test_kept_records_are_bounded(monkeypatch: pytest.MonkeyPatch, long_store: Storage) -> None:
    """DF-SEC-01: memory for records is bounded, whatever their number and size."""
    monkeypatch.setattr("deltaformat.recordreader.CACHED_BYTES", 50_000)
    counting = Counting(long_store)
    log = new_log(counting)
    for seq in range(200):
        log.record(seq)
    reader = log._reader
    assert 0 < reader._kept_bytes <= 50_000
    assert reader._kept_bytes == sum(fetched.size for fetched in reader._kept.values())
    counting.reset()
    log.record(199)
    assert counting.count() == 0
    log.record(0)
    assert counting.count() == 1


def test_a_record_that_is_refused_is_refused_again(maker: LogMaker) -> None:
    """An error is not kept, nor turned into another: what is wrong stays wrong, what is mended is read."""
    storage = stored(maker)
    storage.put(record_key(13), b"{}")
    log = new_log(storage)
    for _ in range(2):
        with pytest.raises(MalformedError):
            log.record(13)


def test_times_and_nonces() -> None:
    from deltaformat.log import new_nonce, utc_now

    assert len({new_nonce() for _ in range(100)}) == 100
    assert len(new_nonce()) == 32
    assert utc_now().endswith("Z")
    assert "T" in utc_now()


def _unused() -> Iterator[DeltaFormatError]:
    yield from ()


assert sha
