"""The fold of the log against a second, naive one; ancestors against their definition."""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logmaker import TIME, LogMaker, manifest, nonce, pack, root, sha
from logtools import memory, new_log

from deltaformat.errors import (
    ConflictError,
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    InconsistentError,
    MissingError,
)
from deltaformat.history import History, State, Void, ancestors_for, draft, transition
from deltaformat.judge import _commits_named, propose, toward_depth, toward_step, trust
from deltaformat.keys import claim_of
from deltaformat.recordreader import RecordReader
from deltaformat.records import (
    Claim,
    Commit,
    Drop,
    Fork,
    Head,
    Record,
    Retire,
    Tag,
    encode_record,
    parse_record,
    record_hash,
)

# -- ancestors ----------------------------------------------------------------------------------------------


def line(length: int, *, stride: int = 1) -> list[Commit]:
    """A lineage of that many commits; steps are 10, 10 + stride, ..."""
    maker = LogMaker()
    maker.claim()
    return [maker.commit(step=10 + stride * i) for i in range(length)]


COMMITS = line(1100, stride=3)


@pytest.mark.parametrize("depth", range(201))
def test_ancestors_by_definition(depth: int) -> None:
    """DF-LOG-08: the depths are, for some i, the greatest multiple of 2^i below d; nearest first."""
    multiples = {max(m for m in range(0, depth, 2**i)) for i in range(10)} if depth else set()
    by_definition = tuple((m, COMMITS[m].seq, COMMITS[m].step) for m in sorted(multiples, reverse=True))
    assert COMMITS[depth].ancestors == by_definition
    if depth:
        assert ancestors_for(COMMITS[depth - 1]) == by_definition


def test_ancestors_as_in_the_text() -> None:
    """Section 12.3's examples."""
    assert [entry[0] for entry in COMMITS[6].ancestors] == [5, 4, 0]
    assert [entry[0] for entry in COMMITS[8].ancestors] == [7, 6, 4, 0]
    assert COMMITS[0].ancestors == ()


def hops(start: Commit, toward: Callable[[Commit], Any]) -> tuple[Commit, int]:
    by_seq = {commit.seq: commit for commit in COMMITS}
    commit, count = start, 0
    while (entry := toward(commit)) is not None:
        commit = by_seq[entry[1]]
        count += 1
    return commit, count


def by_step(start: Commit, step: int) -> tuple[Commit, int]:
    return hops(start, lambda at: toward_step(at, step) if at.step > step else None)


def by_depth(start: Commit, depth: int) -> tuple[Commit, int]:
    return hops(start, lambda at: toward_depth(at, depth) if at.depth > depth else None)


@pytest.mark.parametrize("depth", [*range(130), 255, 256, 257, 1023, 1024, 1099])
def test_a_step_is_found_in_few_records(depth: int) -> None:
    """DF-LOG-08: at most 1 + log2(d) records beside the head's; by step and by depth alike."""
    start = COMMITS[depth]
    most = 1 + math.log2(depth) if depth else 0
    for target in COMMITS[: depth + 1]:
        for found, count in (by_step(start, target.step), by_depth(start, target.depth)):
            assert found is target
            assert count <= most
    for step in (9, 11, start.step - 1, start.step + 1):  # between two, below all, above the head
        assert by_step(start, step)[0].step != step


# -- a second fold, from the text of section 12.2 -----------------------------------------------------------


@dataclass
class Naive:
    """Everything is a plain set or dict; lineages are walked parent by parent."""

    branches: dict[str, list[Any]] = field(default_factory=dict)  # seq, step, epoch, claim
    commits: dict[int, Commit] = field(default_factory=dict)
    retired: set[int] = field(default_factory=set)
    tags: dict[str, int] = field(default_factory=dict)
    last_tag: int | None = None
    last_retire: int | None = None

    def lineage(self, seq: int | None) -> list[int]:
        found = []
        while seq is not None:
            found.append(seq)
            seq = self.commits[seq].parent
        return found

    def apply(self, record: Record) -> bool:
        """Whether it is valid; then it has changed this."""
        after = {name: list(branch) for name, branch in self.branches.items()}
        if not self.meets(record, after):
            return False
        stated = {name: [h.seq, h.step, h.epoch, h.claim] for name, h in record.heads.items()}
        if (stated, record.last_tag, record.last_retire) != (after, self.last_tag, self.last_retire):
            return False
        self.branches = after
        if isinstance(record, Commit):
            self.commits[record.seq] = record
        if isinstance(record, Retire):
            self.retired |= set(record.commits)
            self.last_retire = record.seq
        if isinstance(record, Tag):
            if record.target is None:
                self.tags.pop(record.name, None)
            else:
                self.tags[record.name] = record.target
            self.last_tag = record.seq
        return True

    def meets(self, record: Record, after: dict[str, list[Any]]) -> bool:
        match record:
            case Claim(branch=name, resume_from=target):
                old = after.get(name, [None, None, 0, None])
                after[name] = [old[0], old[1], old[2] + 1, record.seq]
                if target is not None:
                    if target not in self.lineage(old[0]):
                        return False
                    after[name][:2] = target, self.commits[target].step
                return record.epoch == old[2] + 1
            case Commit(branch=name):
                if name not in after:
                    return False
                head, step, _, claim = after[name]
                line = self.lineage(head)
                depth = len(line)
                at = {depth - 1 - i: seq for i, seq in enumerate(line)}
                depths = (
                    sorted({max(range(0, depth, 2**i)) for i in range(20)}, reverse=True) if depth else []
                )
                after[name][:2] = record.seq, record.step
                return (
                    claim == record.claim
                    and record.parent == head
                    and (step is None or record.step > step)
                    and record.depth == depth
                    and list(record.ancestors) == [(d, at[d], self.commits[at[d]].step) for d in depths]
                    and all(claim_of(ref.key) == claim for ref in record.manifests + record.objects_added)
                )
            case Fork(branch=name, source=source, step=step):
                fine = name not in after and source in self.commits and self.commits[source].step == step
                after[name] = [source, step, 0, None]
                return fine
            case Tag(target=target):
                return target is None or target in self.commits
            case Drop(branch=name):
                return after.pop(name, None) is not None
            case Retire(commits=seqs):
                free = self.commits.keys() - {branch[0] for branch in after.values()}
                return bool(seqs) and list(seqs) == sorted(set(seqs)) and set(seqs) <= free
        raise AssertionError(record)

    def forbids(self, record: Record) -> bool:
        """Whether a writer must not make this valid record."""
        match record:
            case Claim(resume_from=target):
                return target in self.retired
            case Fork(source=source):
                return source in self.retired
            case Tag(name=name, target=target):
                return target in self.retired or (name in self.tags) == (target is not None)
            case Retire(commits=seqs):
                return not {*self.retired, *self.tags.values()}.isdisjoint(seqs)
        return False


BRANCHES = ["main", "a", "b"]
TAGS = ["t", "u"]


class Gullible:
    """What a hostile writer makes of the log: every commit is good, and an ancestor of every other."""

    def __init__(self, maker: LogMaker) -> None:
        self.maker = maker

    def commit(self, seq: int) -> Commit | None:
        record = parse_record(self.maker.datas[seq], seq=seq) if 0 <= seq < len(self.maker.datas) else None
        return record if isinstance(record, Commit) else None

    judged = commit

    def in_lineage(self, seq: int, head: int) -> bool:
        return True


class Steps:
    """Draws the next record: the valid one of some kind, often with one thing changed."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.maker = LogMaker()

    def pick(self, values: Any) -> Any:
        return self.data.draw(st.sampled_from(list(values)))

    def seq(self) -> int:
        """Some number: mostly a commit's."""
        commits = list(self.maker.history.commits)
        return self.pick([*commits, *commits, *range(len(self.maker.datas) + 2)])

    def members(self, kind: type[Record]) -> dict[str, Any]:
        heads = self.maker.state.heads
        branch = self.pick(BRANCHES)
        head = heads.get(branch, Head(None, None, 0, None))
        if kind is Claim:
            resume = self.pick([None, None, None, self.seq(), head.seq])
            return {"branch": branch, "epoch": head.epoch + 1, "host": "h", "pid": 1, "resume_from": resume}
        if kind is Commit:
            parent = self.maker.history.commit(-1 if head.seq is None else head.seq)
            claim = head.claim or 0
            return {
                "branch": branch, "claim": claim, "step": (head.step or 0) + self.pick([0, 1, 1, 1, 5]),
                "parent": head.seq, "depth": 0 if parent is None else parent.depth + 1,
                "ancestors": () if parent is None else ancestors_for(parent),
                "root": root(1), "manifests": (manifest(claim, len(self.maker.datas)),),
            }  # fmt: skip
        if kind is Fork:
            source = self.seq()
            commit = self.maker.history.commit(source)
            return {"branch": branch, "source": source, "step": commit.step if commit else 3}
        if kind is Tag:
            return {"name": self.pick(TAGS), "target": self.pick([None, self.seq(), self.seq()])}
        if kind is Drop:
            return {"branch": branch}
        return {"commits": tuple(sorted({self.seq() for _ in range(self.pick([1, 1, 2, 3]))}))}

    def next(self) -> Record:
        kind = self.pick([Claim, Claim, Commit, Commit, Commit, Commit, Fork, Tag, Drop, Retire])
        members = self.members(kind)
        state = self.maker.state
        record: Record | None = None
        for known in (self.maker.history, Gullible(self.maker)):
            with suppress(DeltaFormatError):
                record = propose(kind, state, known, nonce=nonce(state.seq), time=TIME, **members)
                break
        if record is None:
            record = kind(
                seq=state.seq + 1, prev=state.hash, nonce=nonce(state.seq), time=TIME, heads=state.heads,
                last_tag=state.last_tag, last_retire=state.last_retire, **members,
            )  # fmt: skip
        if self.pick([False, False, False, True]):
            record = self.spoil(record)
        return record

    def spoil(self, record: Record) -> Record:
        changes: dict[str, Any] = {
            "last_tag": self.pick([None, 0, 1, record.last_tag]),
            "last_retire": self.pick([None, 0, 1, record.last_retire]),
            "heads": {**record.heads, self.pick(BRANCHES): Head(self.seq(), 3, 1, 0)},
        }
        if isinstance(record, Commit):
            changes |= {
                "claim": record.claim + 1, "parent": self.seq(), "depth": record.depth + 1, "step": 0,
                "ancestors": record.ancestors[1:], "manifests": (manifest(record.claim + 1, 1),),
                "objects_added": (pack(record.claim + 1, 1),),
            }  # fmt: skip
        if isinstance(record, Claim):
            changes |= {"epoch": record.epoch + 1}
        if isinstance(record, Fork):
            changes |= {"step": record.step + 1}
        if isinstance(record, Retire):
            changes |= {"commits": self.pick([(), record.commits[::-1], record.commits * 2])}
        name = self.pick(sorted(changes))
        return replace(record, **{name: changes[name]})


def again(record: Record, history: History) -> Record:
    """What an honest writer makes of the same members."""
    common = {field.name for field in fields(Record)}
    own = {field.name: getattr(record, field.name) for field in fields(record) if field.name not in common}
    return draft(type(record), history.state, history, nonce=record.nonce, time=TIME, **own)


@given(st.data())
def test_valid_and_void_as_in_the_table(data: st.DataObject) -> None:
    """Section 12.2, DF-LOG-04, DF-LOG-12: two folds agree on every record, and void ones change nothing."""
    steps, naive = Steps(data), Naive()
    history = steps.maker.history
    for _ in range(data.draw(st.integers(1, 40))):
        record = steps.next()
        before = history.copy()
        forbidden = naive.forbids(record)
        steps.maker.add(record)
        valid = naive.apply(record)
        if valid:
            with pytest.raises(DeltaFormatError) if forbidden else nullcontext():
                assert again(record, before).heads == record.heads
        assert (record.seq not in history.void) == valid, record
        assert history.state.seq == record.seq
        assert history.state.hash == record_hash(encode_record(record))
        heads = {name: [h.seq, h.step, h.epoch, h.claim] for name, h in history.state.heads.items()}
        assert heads == naive.branches
        assert history.tags == naive.tags
        assert history.commits == naive.commits
        assert history.live == naive.commits.keys() - naive.retired
        assert history.retired.keys() == naive.retired
        assert (history.state.last_tag, history.state.last_retire) == (naive.last_tag, naive.last_retire)
        if not valid:
            assert (before.commits, before.live, before.tags) == (history.commits, history.live, history.tags)
            assert before.state.heads == history.state.heads
            assert history.void[record.seq].reason
            assert isinstance(history.void[record.seq].error(where="x"), DeltaFormatError)
    for seq in history.commits:
        walked = naive.lineage(seq)
        assert [commit.seq for commit in history.lineage(seq)] == walked
        for other in range(-1, record.seq + 2):
            assert history.in_lineage(other, seq) == (other in walked)
        by_step = {history.commits[other].step: other for other in walked}
        for step in range(-1, max(by_step) + 2):
            found = history.find_step(seq, step)
            assert (None if found is None else found.seq) == by_step.get(step)
        assert history.is_tagged(seq) == (seq in naive.tags.values())
    for claim in range(-1, record.seq + 2):
        made = claim in history.claims
        held = any(branch[3] == claim for branch in naive.branches.values())
        assert history.is_fenced(claim) == (made and not held)


@given(st.data())
def test_neighbours_tell_what_the_whole_log_tells(data: st.DataObject) -> None:
    """DF-LOG-06, DF-LOG-12: unless two records next to each other are void, readers of single records agree
    with the fold, whatever writers wrote.
    """
    steps, storage = Steps(data), memory()
    maker, history = steps.maker, steps.maker.history
    warm, states = new_log(storage), list[State]()
    void_neighbours = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 30))):
        record = steps.next()
        if history.state.seq in history.void and not void_neighbours:
            after = history.copy()
            if isinstance(after.apply(record, sha(0)), Void):
                record = propose(Drop if "main" in after.state.heads else Claim, history.state, history, **{
                    "nonce": nonce(record.seq), "time": TIME, "branch": "main",
                } | ({} if "main" in after.state.heads else {"epoch": 1, "host": "", "pid": 0}))  # fmt: skip
        maker.add(record)
        states.append(maker.state)
        maker.store(storage, start=record.seq)
        cold = new_log(storage)
        cold.tail()
        if void_neighbours:
            continue  # no answer is right, but there is one
        assert cold.tail() == maker.state
        assert cold.tags() == history.tags
        assert cold.retired() == set(history.retired)
        if data.draw(st.booleans()):
            assert warm.tail() == maker.state
    for seq in range(len(states)):
        local = RecordReader(storage).judge(seq)
        named = _commits_named(parse_record(maker.datas[seq], seq=seq))
        doubtful = any(number - 1 in history.void for number in (seq, *named))
        if isinstance(local, Void):
            assert seq in history.void or doubtful
        elif not void_neighbours:
            assert local == states[seq]
            assert seq not in history.void


# -- single rules -------------------------------------------------------------------------------------------


@pytest.fixture
def maker() -> LogMaker:
    """0 claim, 1-3 commits of steps 10, 20, 30, 4 tag of step 10."""
    maker = LogMaker()
    maker.claim()
    for step in (10, 20, 30):
        maker.commit(step=step)
    maker.tag("first", 1)
    return maker


def void(maker: LogMaker, kind: type[Record], **members: Any) -> tuple[ErrorCode, str]:
    """Why such a record is void; a writer gets the same as an error (DF-LOG-05)."""
    with pytest.raises((ConflictError, InconsistentError, MissingError)) as caught:
        maker.draft(kind, **members)
    state = maker.state
    record = kind(
        seq=state.seq + 1, prev=state.hash, nonce=nonce(0), time=TIME, heads=state.heads,
        last_tag=state.last_tag, last_retire=state.last_retire, **members,
    )  # fmt: skip
    result = transition(state, record, sha(0), maker.history)
    assert isinstance(result, Void)
    assert (result.code, result.reason) == (caught.value.code, caught.value.message)
    assert result.state == replace(state, seq=record.seq, hash=sha(0))
    return result.code, result.reason


def commit_members(maker: LogMaker, **changes: Any) -> dict[str, Any]:
    record = maker.draft_commit()
    names = ("branch", "claim", "step", "parent", "depth", "ancestors", "root", "manifests", "objects_added")
    return {name: getattr(record, name) for name in names} | changes


@pytest.mark.parametrize(
    ("kind", "members", "code"),
    [
        (Claim, {"branch": "main", "epoch": 1, "host": "", "pid": 0}, ErrorCode.BRANCH_HELD),
        (Claim, {"branch": "new", "epoch": 2, "host": "", "pid": 0}, ErrorCode.BRANCH_HELD),
        (Claim, {"branch": "new", "epoch": 1, "host": "", "pid": 0, "resume_from": 1}, ErrorCode.NOT_LIVE),
        (Claim, {"branch": "main", "epoch": 2, "host": "", "pid": 0, "resume_from": 0}, ErrorCode.NOT_LIVE),
        (Claim, {"branch": "main", "epoch": 2, "host": "", "pid": 0, "resume_from": 9}, ErrorCode.NOT_LIVE),
        (Fork, {"branch": "main", "source": 1, "step": 10}, ErrorCode.ALREADY_EXISTS),
        (Fork, {"branch": "new", "source": 4, "step": 10}, ErrorCode.NOT_LIVE),
        (Fork, {"branch": "new", "source": 1, "step": 11}, ErrorCode.NOT_LIVE),
        (Tag, {"name": "second", "target": 0}, ErrorCode.NOT_LIVE),
        (Tag, {"name": "second", "target": 5}, ErrorCode.NOT_LIVE),
        (Drop, {"branch": "new"}, ErrorCode.BRANCH_MISSING),
        (Retire, {"commits": ()}, ErrorCode.NOT_LIVE),
        (Retire, {"commits": (2, 2)}, ErrorCode.NOT_LIVE),
        (Retire, {"commits": (2, 3)}, ErrorCode.NOT_LIVE),
        (Retire, {"commits": (0, 2)}, ErrorCode.NOT_LIVE),
    ],
)
def test_preconditions(maker: LogMaker, kind: type[Record], members: dict[str, Any], code: ErrorCode) -> None:
    """Section 12.2: each precondition by itself."""
    assert void(maker, kind, **members)[0] is code


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"branch": "new"}, ErrorCode.BRANCH_MISSING),
        ({"claim": 4}, ErrorCode.BRANCH_HELD),
        ({"parent": 2}, ErrorCode.PARENT_MOVED),
        ({"parent": None}, ErrorCode.PARENT_MOVED),
        ({"step": 30}, ErrorCode.STEP_NOT_ABOVE_HEAD),
        ({"step": 10}, ErrorCode.STEP_NOT_ABOVE_HEAD),
        ({"depth": 2}, ErrorCode.RECORD_VOID),
        ({"ancestors": ()}, ErrorCode.RECORD_VOID),
        ({"ancestors": ((2, 3, 30), (1, 2, 20), (0, 1, 10))}, ErrorCode.RECORD_VOID),
        ({"manifests": (manifest(4, 0),)}, ErrorCode.RECORD_VOID),
        ({"objects_added": (pack(0, 0), pack(4, 0))}, ErrorCode.RECORD_VOID),
    ],
)
def test_preconditions_of_commits(maker: LogMaker, changes: dict[str, Any], code: ErrorCode) -> None:
    """Section 12.2, DF-CMT-04, DF-CMT-05, DF-LOG-08."""
    assert void(maker, Commit, **commit_members(maker, **changes))[0] is code


def test_a_first_commit_has_no_ancestors(maker: LogMaker) -> None:
    """DF-LOG-08: depth 0 lists none."""
    claim = maker.claim("new").seq
    members: dict[str, Any] = {
        "branch": "new", "claim": claim, "step": 0, "parent": None, "root": root(0),
        "manifests": (manifest(claim, 0),),
    }  # fmt: skip
    for depth, ancestors in ((1, ()), (0, ((0, 1, 10),))):
        assert void(maker, Commit, depth=depth, ancestors=ancestors, **members)[0] is ErrorCode.RECORD_VOID
    maker.add(maker.draft(Commit, depth=0, ancestors=(), **members))
    assert not maker.history.void


def test_rewind(maker: LogMaker) -> None:
    """DF-LOG-07: what a rewind supersedes stays live, is in no head's lineage, and no target of a rewind."""
    maker.claim(resume_from=2)
    assert maker.state.heads["main"] == Head(2, 20, 2, 5)
    commit = maker.commit(step=25)
    history = maker.history
    assert [c.step for c in history.lineage(commit.seq)] == [25, 20, 10]
    assert history.is_live(3)
    assert history.find_step(commit.seq, 30) is None
    assert not history.in_lineage(3, commit.seq)
    assert not history.in_lineage(0, commit.seq)
    assert void(maker, Claim, branch="main", epoch=3, host="", pid=0, resume_from=3)[0] is ErrorCode.NOT_LIVE
    maker.claim(resume_from=commit.seq)
    maker.claim()
    assert maker.state.heads["main"] == Head(commit.seq, 25, 4, 8)
    assert history.is_fenced(0)
    assert not history.is_fenced(8)


def test_retired_commits(maker: LogMaker) -> None:
    """Section 12.2: still in the lineage."""
    maker.retire(2)
    assert maker.history.retired == {2: 5}
    found = maker.history.find_step(3, 20)
    assert found is not None
    assert found.seq == 2
    maker.tag("first", None)
    maker.retire(1)
    assert maker.history.live == {3}
    assert maker.state.last_retire == 7
    assert maker.state.last_tag == 6


@pytest.mark.parametrize(
    ("kind", "members", "code"),
    [
        (Tag, {"name": "first", "target": 2}, ErrorCode.ALREADY_EXISTS),
        (Tag, {"name": "x", "target": None}, ErrorCode.TAG_MISSING),
        (Tag, {"name": "x", "target": 2}, ErrorCode.NOT_LIVE),
        (Fork, {"branch": "x", "source": 2, "step": 20}, ErrorCode.NOT_LIVE),
        (Retire, {"commits": (2,)}, ErrorCode.NOT_LIVE),
        (Retire, {"commits": (1,)}, ErrorCode.NOT_LIVE),
        (Claim, {"branch": "main", "epoch": 2, "host": "", "pid": 0, "resume_from": 2}, ErrorCode.NOT_LIVE),
    ],
)
def test_what_a_writer_must_not_write(
    maker: LogMaker, kind: type[Record], members: dict[str, Any], code: ErrorCode
) -> None:
    """DF-LOG-12: it is told why; and the record would be valid, with the effect that the text gives."""
    maker.retire(2)
    with pytest.raises(DeltaFormatError) as caught:
        maker.draft(kind, **members)
    assert caught.value.code is code
    maker.add_careless(kind, **members)
    history = maker.history
    assert set(history.retired) == ({1, 2} if members.get("commits") == (1,) else {2})
    assert history.live == {1, 2, 3} - set(history.retired)
    assert history.retired[2] == (6 if members.get("commits") == (2,) else 5)
    assert history.tags == {"first": 1} | ({members["name"]: 2} if members.get("target") else {})
    assert history.is_tagged(1) == (1 in history.tags.values())
    maker.tag("last", 3)
    maker.commit("main") if kind is not Claim else maker.commit("main", step=21)
    assert not history.void


def test_a_dropped_branch_may_begin_anew(maker: LogMaker) -> None:
    """Section 12.2: its commits stay live; a claim of that name begins at epoch 1 without a head."""
    maker.drop("main")
    assert maker.state.heads == {}
    assert maker.history.live == {1, 2, 3}
    assert maker.history.is_fenced(0)
    claim = maker.claim()
    assert maker.state.heads["main"] == Head(None, None, 1, claim.seq)
    assert maker.history.is_fenced(0)
    maker.fork("old", 3)
    assert maker.state.heads["old"] == Head(3, 30, 0, None)
    assert void(maker, Commit, **commit_members(maker, branch="old"))[0] is ErrorCode.BRANCH_HELD


def test_records_must_be_linked(maker: LogMaker) -> None:
    """DF-LOG-02: a `prev` that is not the hash of the record before is corruption, no void record."""
    record = replace(maker.draft_commit(), prev=sha("other"))
    with pytest.raises(CorruptError) as caught:
        maker.history.apply(record, sha(0))
    assert caught.value.code is ErrorCode.CHAIN_BROKEN
    with pytest.raises(InconsistentError) as misplaced:
        maker.history.apply(replace(maker.draft_commit(), seq=9), sha(0))
    assert misplaced.value.code is ErrorCode.RECORD_MISPLACED


def test_unknown_members_of_heads_do_not_matter(maker: LogMaker) -> None:
    """DF-JSN-02: a head with an unknown member is the same head."""
    record = maker.draft_commit()
    heads = {name: replace(head, extra={"colour": "red"}) for name, head in record.heads.items()}
    maker.add(replace(record, heads=heads))
    assert not maker.history.void


def test_trust_takes_in_tags_and_retirements(maker: LogMaker) -> None:
    """DF-LOG-06: the state after a trusted record counts that record."""
    record = maker.draft(Tag, name="x", target=2)
    assert trust(record, sha(0)).last_tag == 5
    retire = maker.draft(Retire, commits=(2,))
    assert trust(retire, sha(0)).last_retire == 5
    assert trust(retire, sha(0)).last_tag == 4
