"""Garbage collection: retire versions, then delete what nothing live uses (SPEC 12.6)."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from deltaformat.context import Context, load_map
from deltaformat.errors import ErrorCode, InconsistentError, MalformedError, MissingError
from deltaformat.history import History, State
from deltaformat.keys import KeyKind, parse_key, probe_key, record_key
from deltaformat.liveness import object_uses
from deltaformat.records import Retire
from deltaformat.stager import Progress
from deltaformat.storage import ObjectInfo, removes_leftovers

__all__ = ["GcReport", "Retention", "check_retention", "collect"]

PREFIXES = ("manifests/", "packs/", "files/", "hints/")
DELETE_AT_ONCE = 500
CONCURRENT_MANIFESTS = 4  # each with its map in memory
PROBE_AGE = timedelta(hours=1)  # far longer than any probe takes
LEFTOVER_AGE = timedelta(days=1)  # since its last change; far longer than a write rests


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions a writer keeps; it collects the others as it goes (SPEC 12.6). Tagged ones stay, too.

    Attributes:
        keep_last: The newest so many of every branch.
        keep_every: Those whose step this divides; None keeps none for that.
        grace: How long readers have, after a version was retired, before its bytes are deleted.
        interval: Collect after every so many commits of the writer.
    """

    keep_last: int
    keep_every: int | None = None
    grace: timedelta = timedelta(hours=24)
    interval: int = 100

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before anything is written.

        Raises:
            MalformedError: input-invalid.
        """
        check_retention(self.keep_last, self.keep_every, self.grace)
        if self.interval < 1:
            raise MalformedError(ErrorCode.INPUT_INVALID, "interval is at least 1", where="retention")


def check_retention(keep_last: int, keep_every: int | None, grace: timedelta) -> None:
    """Refuse numbers that would keep nothing.

    Raises:
        MalformedError: keep_last below 1, keep_every below 1, a negative grace.
    """
    if keep_last < 1 or (keep_every is not None and keep_every < 1) or grace < timedelta(0):
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            "keep_last and keep_every are at least 1, grace is not negative",
            where="gc",
        )


@dataclass(slots=True)
class GcReport:
    """What a collection did, or would do.

    Attributes:
        dry_run: Nothing was written or deleted; times were judged by this machine's clock.
        kept: Steps that stay, per branch.
        retired: Commits retired by this run: (branch, step, seq).
        deleted: Objects deleted: (key, bytes).
        waiting: Objects of retired commits whose grace has not passed: (key, bytes).
        live_bytes: Bytes of manifests, packs and files that stay in use.
    """

    dry_run: bool
    kept: dict[str, list[int]] = field(default_factory=dict)
    retired: list[tuple[str, int, int]] = field(default_factory=list)
    deleted: list[tuple[str, int]] = field(default_factory=list)
    waiting: list[tuple[str, int]] = field(default_factory=list)
    live_bytes: int = 0

    @property
    def deleted_bytes(self) -> int:
        """Bytes of what was (or would be) deleted."""
        return sum(size for _, size in self.deleted)


def collect(
    context: Context,
    *,
    keep_last: int,
    keep_every: int | None,
    grace: timedelta,
    dry_run: bool,
    checked: dict[int, frozenset[str]] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> GcReport:
    """Retire the versions that are not to be kept, then delete what nothing uses.

    Kept are the newest `keep_last` of every branch, those whose step `keep_every` divides, and tagged ones.

    Objects of retired commits go once `grace` has passed since their `retire` record, by the store's own
    times; so a second run does it where the first only retires. Objects that no commit names go at once if
    their claim is fenced.

    `checked` has the keys that versions name, by seq, of those whose manifests an earlier call has read: they
    never change, and are not read again; this call adds and removes some.

    Raises:
        MalformedError: keep_last below 1, keep_every below 1, a negative grace.
        InconsistentError: the log calls an object unused which a version that is kept names (parts-disagree);
            nothing was deleted. Other errors of a manifest that is kept and damaged: as well.
        StoreError: the store failed; what was retired stays retired, and another run goes on.
    """
    check_retention(keep_last, keep_every, grace)
    history = context.log.history()
    kept = _kept(history, keep_last, keep_every)
    doomed = sorted(history.live - kept)
    report = GcReport(dry_run)
    for branch, head in history.state.heads.items():
        if head.seq is not None:
            report.kept[branch] = [commit.step for commit in history.lineage(head.seq) if commit.seq in kept]
    report.retired = [(history.commits[seq].branch, history.commits[seq].step, seq) for seq in doomed]
    if doomed and dry_run:
        history.live.difference_update(doomed)  # as if: under the number that the record would have
        history.retired.update(dict.fromkeys(doomed, history.state.seq + 1))
    elif doomed:
        _retire(context, doomed)
        history = context.log.history()  # not older than the record (DF-GC-01)
    names = checked if checked is not None else {}
    _sweep(context, history, grace, report, names, progress or (lambda _: None))
    return report


def _kept(history: History, keep_last: int, keep_every: int | None) -> set[int]:
    kept = set(history.tags.values())
    for head in history.state.heads.values():
        if head.seq is None:
            continue
        for position, commit in enumerate(history.lineage(head.seq)):
            if position < keep_last or (keep_every is not None and commit.step % keep_every == 0):
                kept.add(commit.seq)
    return kept & history.live


def _retire(context: Context, doomed: list[int]) -> None:
    def members(state: State) -> dict[str, object]:
        heads = {head.seq for head in state.heads.values()}
        if heads & set(doomed):
            raise InconsistentError(
                ErrorCode.NOT_LIVE, "a version to be retired became a branch's head; run gc again", where="gc"
            )
        return {"commits": tuple(doomed)}

    context.log.append(Retire, members)


def _sweep(
    context: Context,
    history: History,
    grace: timedelta,
    report: GcReport,
    checked: dict[int, frozenset[str]],
    progress: Callable[[Progress], None],
) -> None:
    uses = object_uses(history)
    listed = list(_listed(context))
    now = None
    if report.dry_run:  # which makes no object to read the clock of; and deletes nothing, so ours will do
        now = max((datetime.now(UTC), *(info.modified for info in listed)))
    times = _Times(context, history, now=now)
    doomed = []
    for info in listed:
        key = parse_key(info.key)
        use = uses.get(info.key)
        if use is not None and use.live:
            report.live_bytes += info.size
        elif use is not None:
            since = times.retired_at(use.retired_by)
            due = since is not None and times.now - since > grace  # DF-GC-02
            # DF-GC-06: a file's key repeats where its content returns, and a commit may be about to name it.
            if due and (key.kind is not KeyKind.FILE or history.is_fenced(key.claim or 0)):
                doomed.append(info)
            else:
                report.waiting.append((info.key, info.size))
        elif key.kind is KeyKind.PROBE:
            if times.now - info.modified > PROBE_AGE:
                doomed.append(info)
        elif key.claim is not None and history.is_fenced(key.claim):  # DF-GC-03
            doomed.append(info)
    if doomed:
        _check_unused(context, history, {info.key for info in doomed}, checked, progress)
    report.deleted = [(info.key, info.size) for info in doomed]
    if report.dry_run:
        return
    for start in range(0, len(doomed), DELETE_AT_ONCE):
        context.storage.delete([info.key for info in doomed[start : start + DELETE_AT_ONCE]])
        progress(Progress("delete", min(start + DELETE_AT_ONCE, len(doomed)), len(doomed)))
    sweeper = removes_leftovers(context.storage)
    if sweeper is not None:
        sweeper.remove_leftovers(older_than=LEFTOVER_AGE.total_seconds())


def _check_unused(
    context: Context,
    history: History,
    doomed: set[str],
    checked: dict[int, frozenset[str]],
    progress: Callable[[Progress], None],
) -> None:
    """Refuse to delete what a version that is kept names, whatever the records say of it (DF-GC-07).

    Records say what commits add and drop, and a writer may have said it wrongly; a manifest is what readers
    go by.
    """
    kept = sorted(history.live | {head.seq for head in history.state.heads.values() if head.seq is not None})
    for gone in checked.keys() - history.live:
        del checked[gone]

    def names(seq: int) -> frozenset[str] | None:
        if seq in checked:
            return checked[seq]
        commit = history.commits[seq]
        try:
            named = load_map(context, commit).objects().keys() | {ref.key for ref in commit.manifests}
        except MissingError:
            if seq in history.live:
                raise
            return None  # a head that was collected already: nothing can be read through it
        return frozenset(map(sys.intern, named))  # versions share most of their objects

    with ThreadPoolExecutor(CONCURRENT_MANIFESTS) as pool:
        try:
            for number, (seq, named) in enumerate(zip(kept, pool.map(names, kept), strict=True), start=1):
                if named is not None and seq in history.live:
                    checked[seq] = named
                if named and not doomed.isdisjoint(named):
                    commit = history.commits[seq]
                    raise InconsistentError(
                        ErrorCode.PARTS_DISAGREE,
                        f"the log calls it unused, but step {commit.step} of branch {commit.branch!r} (commit"
                        f" {seq}), which is kept, names it; nothing was deleted: run verify",
                        where=min(named & doomed),
                    )
                progress(Progress("check", number, len(kept)))
        finally:
            pool.shutdown(cancel_futures=True)


def _listed(context: Context) -> Iterator[ObjectInfo]:
    for prefix in PREFIXES:
        for info in context.storage.list(prefix):
            try:
                kind = parse_key(info.key).kind
            except MalformedError:
                continue  # not this format's: left alone
            if kind not in (KeyKind.TAIL_HINT, KeyKind.EXTERNAL):  # DF-GC-04
                yield info


class _Times:
    """The store's own times (DF-GC-02), each asked for when it is first needed.

    Most `retire` records are of objects that have long gone, and nobody asks for theirs.
    """

    def __init__(self, context: Context, history: History, *, now: datetime | None) -> None:
        self._storage = context.storage
        self._newest = history.state.seq
        self._now = now
        self._retired: dict[int, datetime] = {}

    @property
    def now(self) -> datetime:
        """The store's clock: read off an object made now, unless a time was given that stands for it."""
        if self._now is None:
            key = probe_key(secrets.token_hex(16))
            self._storage.create(key, b"{}")
            try:
                self._now = self._storage.head(key).modified
            finally:
                self._storage.delete([key])
        return self._now

    def retired_at(self, seq: int | None) -> datetime | None:
        """When a `retire` record was made; None for one that a dry run only imagines."""
        if seq is None or seq > self._newest:
            return None
        if seq not in self._retired:
            self._retired[seq] = self._storage.head(record_key(seq)).modified
        return self._retired[seq]
