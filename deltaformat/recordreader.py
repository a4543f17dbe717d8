"""Fetches and keeps records, judges single ones, finds the newest, walks lineages (SPEC 12.2 to 12.4)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from deltaformat import ijson
from deltaformat.errors import (
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    MissingError,
    StoreError,
)
from deltaformat.fields import is_natural
from deltaformat.judge import EMPTY, Knowledge, State, Void, toward_depth, transition, trust
from deltaformat.keys import TAIL_HINT, record_key
from deltaformat.records import MAX_RECORD_BYTES, Ancestor, Commit, Record, parse_record, record_hash
from deltaformat.storage import Storage

__all__ = ["Neighbours", "RecordReader"]

R = TypeVar("R", bound=Record)

CACHED_BYTES: Final = 32 << 20
MAX_HINT_BYTES: Final = 64 << 10


@dataclass(slots=True)
class _Fetched:
    """A record as fetched; its bytes go once it is parsed."""

    size: int
    hash: str
    data: bytes | None
    record: Record | None = None


class RecordReader:
    """Reads single records of a store's log. Records never change, so those used last are kept.

    May be used from several threads.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Fetched] = OrderedDict()
        self._kept_bytes = 0

    def exists(self, seq: int) -> bool:
        """Whether there is a record of that number. It is fetched, not parsed."""
        return self._fetch(seq) is not None

    def find(self, seq: int) -> tuple[Record, str] | None:
        """Record number `seq` and its hash, or None where there is none."""
        fetched = self._fetch(seq)
        if fetched is None:
            return None
        data, record = fetched.data, fetched.record
        if record is None:
            assert data is not None
            record = fetched.record = parse_record(data, seq=seq)
            fetched.data = None
        return record, fetched.hash

    def get(self, seq: int) -> tuple[Record, str]:
        """Record number `seq`, which is not above the newest, and its hash.

        Raises:
            MissingError: It is not there (object-missing).
        """
        found = self.find(seq)
        if found is None:
            raise MissingError(
                ErrorCode.OBJECT_MISSING, "is not in the store, but later records are", where=record_key(seq)
            )
        return found

    def remember(self, seq: int, data: bytes) -> None:
        """Take in a record that was fetched or written elsewhere."""
        self._keep(seq, data)

    def _fetch(self, seq: int) -> _Fetched | None:
        with self._lock:
            if seq in self._kept:
                self._kept.move_to_end(seq)
                return self._kept[seq]
        try:
            data = self._storage.get(record_key(seq), limit=MAX_RECORD_BYTES)
        except MissingError:  # and nothing else is absence (DF-STO-04)
            return None
        parse_record(data, seq=seq)  # a bad answer is not kept: the next one may be good
        return self._keep(seq, data)

    def _keep(self, seq: int, data: bytes) -> _Fetched:
        fetched = _Fetched(len(data), record_hash(data), data)
        with self._lock:
            if seq not in self._kept:
                self._kept[seq] = fetched
                self._kept_bytes += fetched.size
            while self._kept_bytes > CACHED_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].size
        return fetched

    # -- the newest record -----------------------------------------------------------------------------------

    def hint(self) -> int:
        """The number of a record that exists, or -1.

        Whatever is wrong with the hint, it is as if there were none (DF-LOG-09).
        """
        try:
            data = self._storage.get(TAIL_HINT, limit=MAX_HINT_BYTES)
            seq = ijson.parse_object(data, where=TAIL_HINT, limit=MAX_HINT_BYTES).get("seq")
        except (LimitError, MalformedError, MissingError, StoreError):
            return -1
        return seq if isinstance(seq, int) and is_natural(seq) and self.exists(seq) else -1

    def newest(self, known: int) -> int:
        """The newest record's number, given one that exists, or -1 (SPEC 12.4).

        By steps of 1, 1, 2, 4, 8, 16, 64, 256, ..., then bisection: two requests where one record is new, two
        dozen where nothing is known of 10,000.
        """
        step, longer = 1, 1
        while self.exists(known + step):
            known += step
            step, longer = longer, (2 if longer < 16 else 4) * longer
        absent = known + step
        while absent - known > 1:
            middle = (known + absent) // 2
            if self.exists(middle):
                known = middle
            else:
                absent = middle
        return known

    # -- judging ---------------------------------------------------------------------------------------------

    def judge(self, seq: int) -> State | Void:
        """Judge record `seq` from the one before it and the commits that it names (DF-LOG-06).

        What is valid here is valid in the whole log, unless it or a commit that it names is void there and
        so is the record before that one. What is void here, only the whole log tells.
        """
        before = EMPTY if seq == 0 else trust(*self.get(seq - 1))
        return transition(before, *self.get(seq), Neighbours(self, seq))

    # -- along the links -------------------------------------------------------------------------------------

    def in_lineage(self, commit: Commit, head: int) -> bool:
        """Whether a valid commit is commit `head` or an ancestor of it.

        Raises:
            InconsistentError: A commit's `ancestors` are not as they must be (DF-LOG-08).
        """
        depth = commit.depth
        found = self.walk(head, lambda at: toward_depth(at, depth) if at.depth > depth else None)
        return found.seq == commit.seq

    def walk(self, seq: int, toward: Callable[[Commit], Ancestor | None]) -> Commit:
        """Go from commit `seq` to an ancestor, as `toward` tells, until it tells none.

        Raises:
            InconsistentError: A commit's `ancestors` are not as they must be (DF-LOG-08).
        """
        commit = self._commit(seq)
        while (entry := toward(commit)) is not None:
            depth, seq, step = entry
            if seq >= commit.seq or depth >= commit.depth:  # or a hostile record could lead in circles
                raise _wrong_ancestors(commit.seq)
            commit = self._commit(seq)
            if (commit.depth, commit.step) != (depth, step):
                raise _wrong_ancestors(seq)
        return commit

    def _commit(self, seq: int) -> Commit:
        record, _ = self.get(seq)
        if not isinstance(record, Commit):
            raise _wrong_ancestors(seq)
        return record

    def chain(self, kind: type[R], seq: int | None, link: str) -> Iterator[R]:
        """The records of one kind from `seq` back along `link`, newest first.

        Raises:
            InconsistentError: The chain leads to a record of another kind, or not backwards.
        """
        while seq is not None:
            record, _ = self.get(seq)
            earlier = getattr(record, link)
            if not isinstance(record, kind) or (earlier is not None and earlier >= seq):
                raise InconsistentError(
                    ErrorCode.RECORD_VOID, f"is not what `{link}` must name", where=record_key(seq)
                )
            yield record
            seq = earlier


class Neighbours(Knowledge):
    """The commits that a record names, each judged from its own neighbour (DF-LOG-06).

    To judge a commit takes its parent's content alone, so nothing is judged at one more remove.
    """

    def __init__(self, reader: RecordReader, before: int) -> None:
        self._reader = reader
        self._before = before

    def commit(self, seq: int) -> Commit | None:
        """The commit of that number; valid if the state is right and it is a branch's head."""
        record = self._reader.get(seq)[0] if seq < self._before else None
        return record if isinstance(record, Commit) else None

    def judged(self, seq: int) -> Commit | None:
        """The commit of that number, if it is valid."""
        commit = self.commit(seq)
        return commit if commit is not None and isinstance(self._reader.judge(seq), State) else None

    def in_lineage(self, seq: int, head: int) -> bool:
        """Whether commit `seq` is `head` or an ancestor of it.

        Not so where `head` leads astray: the record that made it a head is void.
        """
        commit = self.commit(seq)
        if commit is None or head >= self._before:
            return False
        try:
            return self._reader.in_lineage(commit, head)
        except InconsistentError:
            return False


def _wrong_ancestors(seq: int) -> InconsistentError:
    return InconsistentError(
        ErrorCode.RECORD_VOID,
        "its ancestors, or those of a descendant, are not as they must be",
        where=record_key(seq),
    )
