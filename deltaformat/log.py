"""A store's log: its state, judged; its versions, found; its next record, appended (SPEC 12)."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from deltaformat import ijson
from deltaformat.errors import (
    CommitUnknown,
    DeltaFormatError,
    ErrorCode,
    InconsistentError,
    MalformedError,
    MissingError,
    StoreError,
)
from deltaformat.history import History
from deltaformat.judge import (
    EMPTY,
    State,
    Void,
    WriterKnowledge,
    draft,
    toward_step,
    transition,
    trust,
)
from deltaformat.keys import TAIL_HINT, record_key
from deltaformat.recordcreate import create_record
from deltaformat.recordreader import Neighbours, RecordReader
from deltaformat.records import (
    Claim,
    Commit,
    Head,
    Record,
    Retire,
    Tag,
    encode_record,
    parse_record,
    record_hash,
)
from deltaformat.retrying import Retry
from deltaformat.storage import NotStoredError, Storage

__all__ = ["Appended", "Log", "LogEntry", "Retry", "new_nonce", "utc_now"]

R = TypeVar("R", bound=Record)

CONCURRENT_GETS: Final = 16
# How many new records are followed one by one before the newest is searched for.
FOLLOW_ONE_BY_ONE: Final = 16
HINT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A record, and why it is void, if it is."""

    record: Record
    void: str | None


@dataclass(frozen=True, slots=True)
class Appended(Generic[R]):
    """A record that is in the log, and its size."""

    record: R
    nbytes: int


def new_nonce() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)


def utc_now() -> str:
    """The time as RFC 3339 UTC, for the informative member `time`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Log:
    """A store's log. May be used from several threads; needs no *list* (DF-STO-03).

    Args:
        storage: Where it is.
        retry: How long the outcome of a commit is pursued.
        clock: Monotonic seconds, for the rate of hints.
    """

    def __init__(
        self, storage: Storage, *, retry: Retry | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage = storage
        self._retry = retry or Retry()
        self._clock = clock
        self._reader = RecordReader(storage)
        self._lock = threading.RLock()
        self._state: State | None = None
        self._history: History | None = None
        self._writing = threading.Lock()
        self._barred: set[int | None] = set()
        self._hint_lock = threading.Lock()
        self._hinted_at: float | None = None
        self._hinted = -1

    # -- reading ---------------------------------------------------------------------------------------------

    def tail(self) -> State:
        """The state after the newest record.

        Called again it goes on from where it was: one request where nothing is new. What fails leaves the
        state known before as it was.

        Raises:
            DeltaFormatError: A record is not what it must be, or the store failed.
        """
        with self._lock:
            if self._history is not None:
                self._state = self._catch_up(self._history)
            elif self._state is None:
                self._state = self._judge_newest(self._reader.newest(self._reader.hint()))
            else:
                self._state = self._follow(self._state)
            return self._state

    def record(self, seq: int) -> Record:
        """Record number `seq`, valid or void; its neighbours are not looked at.

        Raises:
            MissingError: There is none (version-missing).
        """
        found = self._reader.find(seq) if seq >= 0 else None
        if found is None:
            raise MissingError(ErrorCode.VERSION_MISSING, f"there is no record {seq}", where="log")
        return found[0]

    def judged(self, seq: int) -> Commit:
        """The valid commit of that number.

        Raises:
            MissingError: There is no such record, or it is no commit (version-missing).
            InconsistentError: It is void (record-void, DF-LOG-04).
        """
        record = self.record(seq)
        if not isinstance(record, Commit):  # DF-RD-04: void or not
            raise MissingError(
                ErrorCode.VERSION_MISSING, f"is a {record.kind}, not a commit", where=record_key(seq)
            )
        reason = self._why_void(record)
        if reason is not None:
            raise InconsistentError(ErrorCode.RECORD_VOID, f"is void: {reason}", where=record_key(seq))
        return record

    def find_step(self, head: Head, step: int) -> Commit:
        """The commit of `step` in a branch's lineage, without reading those between (DF-LOG-07, DF-LOG-08).

        Raises:
            MissingError: The lineage has no such step (version-missing).
        """
        if head.seq is not None:
            commit = self._reader.walk(head.seq, lambda at: toward_step(at, step) if at.step > step else None)
            if commit.step == step:
                return commit
        raise MissingError(ErrorCode.VERSION_MISSING, f"there is no step {step} in this lineage", where="log")

    def in_lineage(self, seq: int, head: int) -> bool:
        """Whether commit `seq` is commit `head` or an ancestor of it."""
        return self._reader.in_lineage(self.judged(seq), head)

    def tags(self) -> dict[str, int]:
        """The tags and the commits they name, from the newest tag record back along `last_tag`."""
        newest: dict[str, int | None] = {}
        for record in self._reader.chain(Tag, self.tail().last_tag, "last_tag"):
            newest.setdefault(record.name, record.target)
        return {name: target for name, target in newest.items() if target is not None}

    def retired(self) -> set[int]:
        """The commits that were retired, from the newest retire record back along `last_retire`."""
        records = self._reader.chain(Retire, self.tail().last_retire, "last_retire")
        return {seq for record in records for seq in record.commits}

    def history(self) -> History:
        """The fold of all records: every one is read, several at a time. Later calls read what is new.

        Returns:
            A copy, which is the caller's.
        """
        with self._lock:
            return self._fold().copy()

    def prefix(self) -> History:
        """The fold of the records before the first that cannot be taken in, for checking a damaged log.

        Raises:
            StoreError: The store failed.
        """
        history = History()
        try:
            while True:
                history.apply(*self._reader.get(history.state.seq + 1))
        except StoreError:
            raise
        except DeltaFormatError:
            return history

    def records(
        self, *, newest_first: bool = True, limit: int | None = None, branch: str | None = None
    ) -> Iterator[Record]:
        """Iterate over the valid records.

        Args:
            newest_first: The order.
            limit: How many at most.
            branch: Only those of that branch.
        """
        for entry in self.entries(newest_first=newest_first, branch=branch):
            if limit is not None and limit <= 0:
                return
            if entry.void is None:
                limit = None if limit is None else limit - 1
                yield entry.record

    def entries(self, *, newest_first: bool = True, branch: str | None = None) -> Iterator[LogEntry]:
        """Iterate over all records, each with why it is void, if it is."""
        newest = self.tail().seq
        seqs = range(newest, -1, -1) if newest_first else range(newest + 1)
        start, window = 0, 4
        with ThreadPoolExecutor(CONCURRENT_GETS) as pool:
            while start < len(seqs):
                for record, _ in pool.map(self._reader.get, seqs[start : start + window]):
                    if branch is None or getattr(record, "branch", None) == branch:
                        yield LogEntry(record, self._why_void(record))
                start += window
                window = min(2 * window, 4 * CONCURRENT_GETS)

    # -- writing ---------------------------------------------------------------------------------------------

    def append(self, kind: type[R], members: Callable[[State], Mapping[str, Any]]) -> Appended[R]:
        """Append a record (SPEC 12.5): the *create* that makes it visible is the commit.

        Args:
            kind: The record's class.
            members: Gets the newest state and returns what this kind has beside the common members. It is
                called again each time that another record has taken the place (DF-LOG-05, DF-CMT-02); what it
                raises ends the attempt.

        Raises:
            CommitUnknown: The outcome could not be learned. From then on this writer is refused: commits
                under the same claim, or records of the other kinds. A new claim is a new writer (DF-CMT-03).
            ConflictError, InconsistentError, MissingError: The record would be void, or is one that a writer
                must not write (DF-LOG-12).
            LimitError: It would be larger than readers accept.
            StoreError: The store failed and nothing was written.
        """
        with self._writing:
            first = True
            while True:
                state, known = self._before_append(kind, first)
                first = False
                own = members(state)
                self._check_barred(kind, own)
                record = draft(kind, state, known, nonce=new_nonce(), time=utc_now(), **own)
                data = encode_record(record)
                parse_record(data, seq=record.seq)  # what readers would refuse must not get into the log
                if self._create(record, data):
                    self._reader.remember(record.seq, data)
                    self._advance(record, record_hash(data))
                    return Appended(record, len(data))

    def write_hint(self, seq: int | None = None, *, force: bool = False) -> bool:
        """Write the tail hint, at most once a second (DF-LOG-10).

        Args:
            seq: The record to name; by default the newest known.
            force: Now; for the last time, on closing.

        Returns:
            Whether it was written. A store that fails is no error: the hint is only a hint.
        """
        with self._lock:
            known = -1 if self._state is None else self._state.seq
        seq = known if seq is None else seq
        if seq > known:
            raise MalformedError(
                ErrorCode.INPUT_INVALID, f"record {seq} is not known to exist", where=TAIL_HINT
            )
        with self._hint_lock:
            now = self._clock()
            soon = self._hinted_at is not None and now - self._hinted_at < HINT_SECONDS
            if seq <= self._hinted or (soon and not force):
                return False
            self._hinted_at = now
            try:
                self._storage.put(TAIL_HINT, ijson.dump({"seq": seq}))
            except StoreError:
                return False
            self._hinted = seq
            return True

    # -- judging ---------------------------------------------------------------------------------------------

    def _follow(self, state: State) -> State:
        """Take in the records after a known state."""
        for _ in range(FOLLOW_ONE_BY_ONE):
            found = self._reader.find(state.seq + 1)
            if found is None:
                return state
            result = transition(state, *found, Neighbours(self._reader, state.seq + 1))
            if isinstance(
                result, Void
            ):  # it, or what the state rests on: only the whole log tells (DF-LOG-06)
                return self._fold().state
            state = result
        return self._judge_newest(self._reader.newest(state.seq))

    def _judge_newest(self, newest: int) -> State:
        """The state after record `newest`: judged from its neighbour, or else from all (DF-LOG-06)."""
        if newest < 0:
            return EMPTY
        result = self._reader.judge(newest)
        return self._fold().state if isinstance(result, Void) else result

    def _why_void(self, record: Record) -> str | None:
        with self._lock:
            if self._history is None or record.seq > self._history.state.seq:
                heads = {} if self._state is None else self._state.heads
                known = any(head.seq == record.seq for head in heads.values())  # a head is valid
                if known or isinstance(self._reader.judge(record.seq), State):
                    return None
                self._fold()
            assert self._history is not None
            void = self._history.void.get(record.seq)
            return None if void is None else void.reason

    def _fold(self) -> History:
        history = self._history or History()
        self._catch_up(history)
        self._history = history
        return history

    def _catch_up(self, history: History) -> State:
        """Apply the records that `history` has not seen, fetching several at a time."""
        known = max(history.state.seq, -1 if self._state is None else self._state.seq)
        newest = self._reader.newest(self._reader.hint() if known < 0 else known)
        if newest > history.state.seq:
            with ThreadPoolExecutor(CONCURRENT_GETS) as pool:
                for start in range(history.state.seq + 1, newest + 1, 32 * CONCURRENT_GETS):
                    part = range(start, min(start + 32 * CONCURRENT_GETS, newest + 1))
                    for record, digest in pool.map(self._reader.get, part):
                        history.apply(record, digest)
        return history.state

    # -- the commit ------------------------------------------------------------------------------------------

    def _before_append(self, kind: type[Record], first: bool) -> tuple[State, WriterKnowledge]:
        if kind is not Retire:
            # A writer has looked before it staged; where that is stale, *create* collides. Not looking again
            # spares every commit a round trip.
            state = self._state if kind is Commit and first else None
            return state or self.tail(), _AllOfLog(self)
        history = (
            self.history()
        )  # many commits are asked for: by single look-ups that would take quadratic time
        return history.state, history

    def _check_barred(self, kind: type[Record], own: Mapping[str, Any]) -> None:
        writer = own["claim"] if kind is Commit else None
        if kind is not Claim and writer in self._barred:
            raise CommitUnknown(
                ErrorCode.COMMIT_UNKNOWN,
                "the outcome of an earlier record is unknown, so this writer writes no more; open a new one",
                where="log",
            )

    def _create(self, record: Record, data: bytes) -> bool:
        """Create a record; False where another one has its place."""
        try:
            other = create_record(self._storage, record, data, self._retry)
        except NotStoredError:
            raise
        except BaseException:
            # Also where the program is interrupted: what was sent may have arrived.
            # The writer is the holder of the claim, or who else uses this log.
            self._barred.add(record.claim if isinstance(record, Commit) else None)
            raise
        if other is not None:
            self._reader.remember(record.seq, other)
        return other is None

    def _advance(self, record: Record, digest: str) -> None:
        """Take an own record into what is known, unless another thread has read it already."""
        with self._lock:
            if self._state is not None and self._state.seq == record.seq - 1:
                self._state = trust(record, digest)
            if self._history is not None and self._history.state.seq == record.seq - 1:
                self._history.apply(record, digest)


class _AllOfLog(WriterKnowledge):
    """What a writer looks up before it writes a record other than `retire` (DF-LOG-05, DF-LOG-12)."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def commit(self, seq: int) -> Commit | None:
        """The valid commit of that number."""
        return self.judged(seq)

    def judged(self, seq: int) -> Commit | None:
        """The valid commit of that number."""
        try:
            return self._log.judged(seq)
        except (MissingError, InconsistentError):
            return None

    def in_lineage(self, seq: int, head: int) -> bool:
        """Whether commit `seq` is `head` or an ancestor of it."""
        return self._log.in_lineage(seq, head)

    def is_retired(self, seq: int) -> bool:
        """Whether that commit is not live any more."""
        return seq in self._log.retired()

    def has_tag(self, name: str) -> bool:
        """Whether a tag of that name exists."""
        return name in self._log.tags()

    def is_tagged(self, seq: int) -> bool:
        """Whether a tag names that commit."""
        return seq in self._log.tags().values()
