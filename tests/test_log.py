"""Reading the log over a storage: few requests, and right whatever the hint says and whatever is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logmaker import LogMaker
from logtools import branched, memory, new_log, set_hint, stored
from wrappers import Counting, Flaky

from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.history import EMPTY, Void
from deltaformat.ijson import seal
from deltaformat.keys import TAIL_HINT, record_key
from deltaformat.records import Claim, Commit, Fork, Head, Record, Retire, Tag, encode_record, parse_record
from deltaformat.storage import Storage

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
    for hint, most in ((10_000, 18), (9_998, 22), (9_990, 25)):
        set_hint(long_store, hint)
        counting = Counting(long_store)
        log = new_log(counting)
        commit = log.find_step(log.tail().heads["main"], step)
        assert (commit.seq, commit.step) == (step, step)
        assert counting.count() <= most
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
    """A follower pays one request where nothing is new, two for one record, few where it is far behind."""
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
    history.live.clear()  # a caller may do with it what it likes
    assert log.history().live == long_maker.history.live


# -- finding ------------------------------------------------------------------------------------------------


@pytest.fixture
def maker() -> LogMaker:
    return branched()


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


@pytest.mark.parametrize("newest", [b"", b"{}", b'{"kind":"merge"}'])
def test_by_seq_whatever_the_newest_record_holds(maker: LogMaker, newest: bytes) -> None:
    """DF-RD-04."""
    storage = stored(maker)
    storage.put(record_key(len(maker.datas) - 1), newest)
    log = new_log(storage)
    assert [log.judged(seq).step for seq in (1, 3, 8)] == [10, 30, 21]
    with pytest.raises(MalformedError):
        log.tail()


def test_void_records_that_are_no_commits(maker: LogMaker) -> None:
    """DF-RD-04: by seq they are missing versions, as valid ones are."""
    tag = maker.draft(Tag, name="new", target=1)
    void = maker.add_void(replace(tag, target=0))
    with pytest.raises(MissingError, match="is a tag, not a commit") as missing:
        new_log(stored(maker)).judged(void.seq)
    assert missing.value.code is ErrorCode.VERSION_MISSING


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
    assert pairs == {
        (seq, head)
        for seq in (1, 2, 3, 5, 8)
        for head in (1, 2, 3, 5, 8)
        if maker.history.in_lineage(seq, head)
    }


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
    assert counting.count() < 30


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
    storage = stored(maker)
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
            **common,
            heads=heads | {"main": Head(4, 20, 3, 13)},
            branch="main",
            epoch=3,
            host="",
            pid=0,
            resume_from=4,
        ),
        "fork": Fork(**common, heads=heads | {"c": Head(4, 20, 0, None)}, branch="c", source=4, step=20),
        "tag": Tag(**common, heads=heads, name="x", target=4),
        "retire": Retire(**common, heads=heads, commits=(4,)),
    }
    maker.add_void(records[kind])
    assert new_log(stored(maker)).tail() == maker.state == replace(before, seq=13, hash=maker.state.hash)


def test_named_commits_are_judged(maker: LogMaker) -> None:
    """DF-LOG-06: a newest record that names a void commit is void, though its heads are right."""
    maker.void_commit()
    maker.commit()
    before = maker.state
    common = {"prev": before.hash, "nonce": "0" * 32, "time": "", "last_tag": 11, "last_retire": 12}
    heads = {**before.heads, "c": Head(13, 26, 0, None)}
    maker.add_void(Fork(seq=15, **common, heads=heads, branch="c", source=13, step=26))  # type: ignore[arg-type]
    assert new_log(stored(maker)).tail() == maker.state
    assert maker.state.heads == before.heads


@pytest.mark.parametrize("target", [1, 2, 3, 5, 8])
def test_lineages_are_looked_at(maker: LogMaker, target: int) -> None:
    """DF-LOG-06: a newest claim that goes back to a commit of no lineage of its branch is void."""
    before = maker.state
    step = maker.history.commits[target].step
    common = {"prev": before.hash, "nonce": "0" * 32, "time": "", "last_tag": 11, "last_retire": 12}
    heads = {**before.heads, "main": Head(target, step, 3, 13)}
    claim = Claim(seq=13, **common, heads=heads, branch="main", epoch=3, host="", pid=0, resume_from=target)  # type: ignore[arg-type]
    maker.add(claim)
    log = new_log(stored(maker))
    assert log.tail() == maker.state
    assert log.tail().heads == (heads if target in (1, 2, 5) else before.heads)
    assert isinstance(log._reader.judge(13), Void) == (target in (3, 8))


@pytest.mark.parametrize("head", [4, 13, 14, 15, 99])
def test_a_head_that_is_none(maker: LogMaker, head: int) -> None:
    """DF-LOG-06, DF-SEC-01: heads in a void record lead the judgement of the next one nowhere."""
    heads = {**maker.state.heads, "main": Head(head, 25, 2, 4)}
    maker.add_void(replace(maker.draft(Tag, name="x", target=1), heads=heads))
    maker.claim(resume_from=2)
    storage = stored(maker)
    assert new_log(storage).tail() == maker.state
    maker.datas.pop()
    commit = replace(_commit_upon(maker, head), prev=maker.history.void[13].state.hash)
    storage.put(record_key(14), encode_record(commit))
    assert new_log(storage).tail().heads != commit.heads


def _commit_upon(maker: LogMaker, head: int) -> Commit:
    record = parse_record(maker.datas[5], seq=5)
    assert isinstance(record, Commit)
    heads = {**record.heads, "main": Head(14, 26, 2, 4)}
    return replace(record, seq=14, parent=head, step=26, heads=heads, last_tag=13, last_retire=12)


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
    for bad in (
        b"",
        b"{}",
        maker.datas[11],
        maker.datas[12].replace(b"retire", b"retard"),
        seal({"requires": ["new"]}),
    ):
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


@pytest.mark.parametrize(
    "ancestors",
    [((2, 5, 25),), ((2, 12, 20),), ((3, 5, 20),), ((2, 4, 20),), ((1, 2, 19), (0, 1, 10)), ((0, 2, 20),)],
)
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


def test_a_record_is_kept_once(long_store: Storage) -> None:
    """Threads that fetch the same record at once do not count it twice."""
    reader = new_log(long_store)._reader
    data = long_store.get(record_key(3))
    reader.remember(3, data)
    reader.remember(3, data)
    assert reader._kept_bytes == len(data)
