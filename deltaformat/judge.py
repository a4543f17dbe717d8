"""What a record means in the state before it: preconditions, effects, void records (SPEC 12.2, 12.3). No I/O.

The state may come from the record before alone (`trust`, DF-LOG-06) or from all records (`History`). Beside
the state only the commits that a record names decide whether it is valid (`Knowledge`). To find what a writer
must not write although it is valid (DF-LOG-12) takes more (`WriterKnowledge`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Protocol, TypeVar

from deltaformat.errors import (
    ConflictError,
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    InconsistentError,
    MissingError,
)
from deltaformat.keys import claim_of, record_key
from deltaformat.records import (
    Ancestor,
    Claim,
    Commit,
    Drop,
    Fork,
    Head,
    ManifestRef,
    ObjectRef,
    Record,
    Retire,
    Tag,
)

__all__ = [
    "EMPTY",
    "Knowledge",
    "State",
    "Void",
    "WriterKnowledge",
    "ancestors_for",
    "draft",
    "propose",
    "toward_depth",
    "toward_step",
    "transition",
    "trust",
]

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class State:
    """The log up to a record.

    Attributes:
        seq: Number of that record, valid or void; -1 where there is none.
        hash: hex(SHA-256) of its bytes.
        heads: The branches after it.
        last_tag: seq of the newest valid `tag` record up to it.
        last_retire: seq of the newest valid `retire` record up to it.
    """

    seq: int = -1
    hash: str | None = None
    heads: Mapping[str, Head] = field(default_factory=dict)
    last_tag: int | None = None
    last_retire: int | None = None


EMPTY: Final = State()
"""The state before record 0."""


@dataclass(frozen=True, slots=True)
class Void:
    """A record that changes nothing, and why (DF-LOG-04).

    Attributes:
        code: Which error a writer of such a record gets.
        reason: One sentence.
        state: The state after it: the one before, but for `seq` and `hash`.
    """

    code: ErrorCode
    reason: str
    state: State

    def error(self, *, where: str = "") -> DeltaFormatError:
        """The error for a writer that would have written it."""
        return _error(self.code, self.reason, where)


class Knowledge(Protocol):
    """The commits that a record names, as far as the records before it tell."""

    def commit(self, seq: int) -> Commit | None:
        """The commit of that number, which is valid if the state is right: a branch's head."""
        ...

    def judged(self, seq: int) -> Commit | None:
        """The valid commit of that number."""
        ...

    def in_lineage(self, seq: int, head: int) -> bool:
        """Whether the valid commit `seq` is the branch's head `head` or an ancestor of it."""
        ...


class WriterKnowledge(Knowledge, Protocol):
    """What else a writer must look up before it writes (DF-LOG-12)."""

    def is_retired(self, seq: int) -> bool:
        """Whether that commit is not live any more."""
        ...

    def has_tag(self, name: str) -> bool:
        """Whether a tag of that name exists."""
        ...

    def is_tagged(self, seq: int) -> bool:
        """Whether a tag names that commit."""
        ...


class _VoidError(Exception):
    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def trust(record: Record, record_hash: str) -> State:
    """The state after a record that is taken to be valid (DF-LOG-06)."""
    return State(
        seq=record.seq,
        hash=record_hash,
        heads=record.heads,
        last_tag=record.seq if isinstance(record, Tag) else record.last_tag,
        last_retire=record.seq if isinstance(record, Retire) else record.last_retire,
    )


def transition(state: State, record: Record, record_hash: str, known: Knowledge) -> State | Void:
    """Judge the record that follows `state` (SPEC 12.2).

    Args:
        state: The state before it.
        record: The record.
        record_hash: hex(SHA-256) of its bytes.
        known: Where the commits that it names are looked up.

    Returns:
        The state after it, or why it is void.

    Raises:
        InconsistentError: It is not the next record.
        CorruptError: Its `prev` is not the hash of the record before it (DF-LOG-02).
    """
    if record.seq != state.seq + 1:
        raise InconsistentError(
            ErrorCode.RECORD_MISPLACED, f"does not follow record {state.seq}", where=record_key(record.seq)
        )
    if record.prev != state.hash:
        raise CorruptError(
            ErrorCode.CHAIN_BROKEN,
            f"`prev` is not the hash of record {state.seq}: one of the two has been replaced",
            where=record_key(record.seq),
        )
    try:
        heads = _EFFECTS[type(record)](state, record, known)
        if record.heads != heads:
            raise _VoidError(ErrorCode.RECORD_VOID, "`heads` is not what it makes of the heads before it")
        if record.last_tag != state.last_tag or record.last_retire != state.last_retire:
            raise _VoidError(ErrorCode.RECORD_VOID, "`last_tag` or `last_retire` is not the newest one's seq")
    except _VoidError as error:
        return Void(error.code, error.reason, replace(state, seq=record.seq, hash=record_hash))
    return trust(record, record_hash)


def propose(kind: type[R], state: State, known: Knowledge, *, nonce: str, time: str, **members: Any) -> R:
    """Make the valid record that follows `state`, whether or not a writer may write it.

    Args:
        kind: The record's class.
        state: The state before it.
        known: Where the commits that it names are looked up.
        nonce: 32 random hex digits.
        time: RFC 3339 UTC.
        **members: What this kind of record has.

    Raises:
        ConflictError, InconsistentError, MissingError: It would be void.
    """
    record = kind(
        seq=state.seq + 1,
        prev=state.hash,
        nonce=nonce,
        time=time,
        heads={},
        last_tag=state.last_tag,
        last_retire=state.last_retire,
        **members,
    )
    try:
        return replace(record, heads=_EFFECTS[kind](state, record, known))
    except _VoidError as error:
        raise _error(error.code, error.reason, "log") from None


def draft(kind: type[R], state: State, known: WriterKnowledge, *, nonce: str, time: str, **members: Any) -> R:
    """Make the record that follows `state` and that a writer may write (DF-LOG-05): see `propose`.

    Raises:
        ConflictError, InconsistentError, MissingError: It would be void, or it is valid but a writer must not
            write it (DF-LOG-12).
    """
    record = propose(kind, state, known, nonce=nonce, time=time, **members)
    forbidden = _why_forbidden(record, known)
    if forbidden is not None:
        raise _error(*forbidden, "log")
    return record


def ancestors_for(parent: Commit) -> tuple[Ancestor, ...]:
    """The `ancestors` of a commit whose parent is `parent` (DF-LOG-08).

    They are the parent, then those of the parent's whose depth is a multiple of a higher power of two than
    that of every entry before; depth 0 is a multiple of all.
    """
    taken: list[Ancestor] = []
    power: float = -1
    for entry in ((parent.depth, parent.seq, parent.step), *parent.ancestors):
        of_entry = _power_of_two(entry[0])
        if of_entry > power:
            taken.append(entry)
            power = of_entry
    return tuple(taken)


def toward_step(commit: Commit, step: int) -> Ancestor | None:
    """The farthest listed ancestor whose step is not below `step`: where a search by step goes next."""
    return next((entry for entry in reversed(commit.ancestors) if entry[2] >= step), None)


def toward_depth(commit: Commit, depth: int) -> Ancestor | None:
    """The farthest listed ancestor whose depth is not below `depth`."""
    return next((entry for entry in reversed(commit.ancestors) if entry[0] >= depth), None)


def _power_of_two(depth: int) -> float:
    return (depth & -depth).bit_length() - 1 if depth else float("inf")


def _error(code: ErrorCode, reason: str, where: str) -> DeltaFormatError:
    for kind in (ConflictError, InconsistentError, MissingError):
        if kind.error_class == code.error_class:
            return kind(code, reason, where=where)
    raise AssertionError(code)  # pragma: no cover - every code used here has one of these classes


# -- preconditions and effects: the table of SPEC 12.2 -------------------------------------------------------


def _existing(state: State, branch: str) -> Head:
    head = state.heads.get(branch)
    if head is None:
        raise _VoidError(ErrorCode.BRANCH_MISSING, f"there is no branch {branch!r}")
    return head


def _named(seq: int, record: Record, known: Knowledge) -> Commit:
    commit = known.judged(seq) if seq < record.seq else None
    if commit is None:
        raise _VoidError(ErrorCode.NOT_LIVE, f"record {seq} is not a valid commit")
    return commit


def _after_claim(state: State, record: Claim, known: Knowledge) -> dict[str, Head]:
    head = state.heads.get(record.branch)
    epoch = 1 if head is None else head.epoch + 1
    if record.epoch != epoch:
        raise _VoidError(
            ErrorCode.BRANCH_HELD, f"claims epoch {record.epoch} of {record.branch!r}, whose next is {epoch}"
        )
    seq, step = (None, None) if head is None else (head.seq, head.step)
    if record.resume_from is not None:
        if seq is None:
            raise _VoidError(ErrorCode.NOT_LIVE, f"branch {record.branch!r} has no commit to resume from")
        commit = _named(record.resume_from, record, known)
        if not known.in_lineage(commit.seq, seq):
            raise _VoidError(
                ErrorCode.NOT_LIVE, f"commit {commit.seq} is not in the lineage of {record.branch!r}"
            )
        seq, step = commit.seq, commit.step
    return {**state.heads, record.branch: Head(seq, step, epoch, record.seq)}


def _after_commit(state: State, record: Commit, known: Knowledge) -> dict[str, Head]:
    head = _existing(state, record.branch)
    if head.claim != record.claim:
        raise _VoidError(
            ErrorCode.BRANCH_HELD,
            f"branch {record.branch!r} is held by claim {head.claim}, not {record.claim}",
        )
    if record.parent != head.seq:
        raise _VoidError(
            ErrorCode.PARENT_MOVED, f"the head of {record.branch!r} is {head.seq}, not {record.parent}"
        )
    if head.step is not None and record.step <= head.step:
        raise _VoidError(
            ErrorCode.STEP_NOT_ABOVE_HEAD,
            f"step {record.step} is not above the head's, {head.step}; to go back, claim with resume_from",
        )
    if record.parent is None:
        right = record.depth == 0 and not record.ancestors
    else:
        parent = known.commit(record.parent)
        right = (
            parent is not None
            and record.depth == parent.depth + 1
            and record.ancestors == ancestors_for(parent)  # DF-LOG-08
        )
    if not right:
        raise _VoidError(ErrorCode.RECORD_VOID, "`depth` or `ancestors` are not what follows from its parent")
    refs: tuple[ManifestRef | ObjectRef, ...] = (*record.manifests, *record.objects_added)
    for ref in refs:
        if claim_of(ref.key) != record.claim:
            raise _VoidError(ErrorCode.RECORD_VOID, f"{ref.key} does not carry its claim")
    return {**state.heads, record.branch: replace(head, seq=record.seq, step=record.step)}


def _after_fork(state: State, record: Fork, known: Knowledge) -> dict[str, Head]:
    if record.branch in state.heads:
        raise _VoidError(ErrorCode.ALREADY_EXISTS, f"there is a branch {record.branch!r} already")
    commit = _named(record.source, record, known)
    if commit.step != record.step:
        raise _VoidError(
            ErrorCode.NOT_LIVE, f"commit {record.source} is of step {commit.step}, not {record.step}"
        )
    return {**state.heads, record.branch: Head(record.source, record.step, 0, None)}


def _after_tag(state: State, record: Tag, known: Knowledge) -> dict[str, Head]:
    if record.target is not None:
        _named(record.target, record, known)
    return {**state.heads}


def _after_drop(state: State, record: Drop, known: Knowledge) -> dict[str, Head]:
    _existing(state, record.branch)
    return {branch: head for branch, head in state.heads.items() if branch != record.branch}


def _after_retire(state: State, record: Retire, known: Knowledge) -> dict[str, Head]:
    commits = record.commits
    if not commits or any(first >= second for first, second in pairwise(commits)):
        raise _VoidError(ErrorCode.NOT_LIVE, "`commits` is empty or does not rise")
    heads = {head.seq: branch for branch, head in state.heads.items()}
    for seq in commits:
        if seq in heads:
            raise _VoidError(ErrorCode.NOT_LIVE, f"commit {seq} is the head of {heads[seq]!r}")
        _named(seq, record, known)
    return {**state.heads}


_EFFECTS: Final[Mapping[type[Record], Callable[[State, Any, Knowledge], dict[str, Head]]]] = {
    Claim: _after_claim,
    Commit: _after_commit,
    Fork: _after_fork,
    Tag: _after_tag,
    Drop: _after_drop,
    Retire: _after_retire,
}


# -- what a writer must not write: DF-LOG-12 -----------------------------------------------------------------


def _why_forbidden(record: Record, known: WriterKnowledge) -> tuple[ErrorCode, str] | None:
    if isinstance(record, Tag):
        exists = known.has_tag(record.name)
        if record.target is None and not exists:
            return ErrorCode.TAG_MISSING, f"there is no tag {record.name!r}"
        if record.target is not None and exists:
            return ErrorCode.ALREADY_EXISTS, f"there is a tag {record.name!r} already; remove it first"
    for seq in _commits_named(record):
        if known.is_retired(seq):
            return ErrorCode.NOT_LIVE, f"commit {seq} is not live any more"
        if isinstance(record, Retire) and known.is_tagged(seq):
            return ErrorCode.NOT_LIVE, f"commit {seq} is tagged"
    return None


def _commits_named(record: Record) -> tuple[int, ...]:
    if isinstance(record, Retire):
        return record.commits
    if isinstance(record, Fork):
        return (record.source,)
    seq = (
        record.resume_from
        if isinstance(record, Claim)
        else record.target
        if isinstance(record, Tag)
        else None
    )
    return () if seq is None else (seq,)
