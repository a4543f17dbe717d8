"""Checks everything a store says against everything it holds (SPEC 7 to 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from deltaformat.context import Context, load_map
from deltaformat.errors import (
    DeltaFormatError,
    ErrorCode,
    InconsistentError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.history import History
from deltaformat.keys import record_key
from deltaformat.mapcheck import check_fresh
from deltaformat.packs import FileRef, PackEntry, PackRef
from deltaformat.records import Commit
from deltaformat.sources import fetch_whole
from deltaformat.stager import Progress
from deltaformat.versionmap import VersionMap

__all__ = ["Finding", "VerifyReport", "verify"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: where, which code of SPEC 17, and a sentence."""

    where: str
    code: str
    message: str


@dataclass(slots=True)
class VerifyReport:
    """What was checked and what was found; fine if there are no findings.

    Attributes:
        findings: What is wrong.
        records, versions, tensors, blocks, packs: How many were checked; a block or pack that several
            versions share counts once.
        nbytes: Decoded bytes that were checked against digests.
    """

    findings: list[Finding] = field(default_factory=list)
    records: int = 0
    versions: int = 0
    tensors: int = 0
    blocks: int = 0
    packs: int = 0
    nbytes: int = 0


def verify(
    context: Context,
    choose: Callable[[History], Iterable[Commit]],
    *,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Check the whole log, then the versions that `choose` names.

    Manifests, roots, whole packs, sidecars, every block.

    Args:
        context: The store.
        choose: Picks the commits to check from the folded log.
        progress: Called with decoded bytes done.

    Raises:
        StoreError: the storage failed, which says nothing about the store's content.
        MissingError: `choose` found no such version.
    """
    check = _Check(context, progress or (lambda _: None))
    history = check.log()
    if history is None:
        return check.report
    damaged = bool(check.report.findings)
    try:
        commits = list(choose(history))
    except MissingError:
        if damaged:  # it may lie beyond what can be judged
            return check.report
        raise
    for commit in commits:
        check.version(commit)
    return check.report


class _Check:
    def __init__(self, context: Context, progress: Callable[[Progress], None]) -> None:
        self._context = context
        self._progress = progress
        self._packs: set[str] = set()
        self._files: set[str] = set()
        self._blocks: set[bytes] = set()
        self._done = 0
        self._history = History()
        self._previous: tuple[int, VersionMap] | None = None
        self._fold: tuple[int, dict[str, int]] = -1, {}  # objects in use at a commit, as records say
        self.report = VerifyReport()

    def log(self) -> History | None:
        """Fold the log, or what comes before a record that cannot be taken in; None if no version does."""
        try:
            history = self._history = self._context.log.history()
        except StoreError:
            raise
        except DeltaFormatError as error:
            self._found("log", error)
            history = self._history = self._context.log.prefix()
            if not history.commits:
                return None
        self.report.records = history.state.seq + 1
        for seq, void in history.void.items():
            self.report.findings.append(
                Finding(record_key(seq), "record-void", f"this record is void and ignored: {void.reason}")
            )
        self._check_end(history.state.seq + 1)
        return history

    def _check_end(self, end: int) -> None:
        """Look for records beyond a gap at `end`, which a reader takes for the end of the log."""
        storage = self._context.storage
        try:
            if not any(info.key > record_key(end) for info in storage.list("log/")):
                return
        except (StoreError, UnsupportedError):
            return  # whoever reads need not be allowed to list (DF-STO-03)
        try:
            storage.get(record_key(end))  # it may have been written since the log was read
        except MissingError as error:
            self._found(
                "log",
                MissingError(error.code, "is not in the store, but later records are", where=error.where),
            )

    def version(self, commit: Commit) -> None:
        """Check one version."""
        where = f"step {commit.step} (commit {commit.seq})"
        self.report.versions += 1
        try:
            version = load_map(self._context, commit)
        except StoreError:
            raise
        except DeltaFormatError as error:
            self._found(where, error)
            return
        self.report.tensors += len(version.names)
        self._guard(where, partial(self._check_fresh, commit, version))
        self._guard(where, partial(self._check_objects, commit, version))
        self._previous = commit.seq, version
        for ref in version.packs:
            self._guard(where, partial(self._pack, ref))
        for file in version.files:
            if file.key not in self._files:
                self._files.add(file.key)
                self._guard(f"{where}, file {file.path}", partial(self._file, file))
        self._check_blocks(version, where)

    def _check_fresh(self, commit: Commit, version: VersionMap) -> None:
        """DF-MAN-08, where the parent's map can be had."""
        if self._previous is not None and self._previous[0] == commit.parent:
            parent = self._previous[1]
        elif commit.parent in self._history.live:
            parent = load_map(self._context, self._history.commits[commit.parent])
        else:
            return
        check_fresh(version, parent, self._context.descriptor.block_bytes)

    def _check_objects(self, commit: Commit, version: VersionMap) -> None:
        """DF-CMT-08: a collector believes the record, so the record must say what the manifest uses."""
        lineage = [commit]
        for ancestor in islice(self._history.lineage(commit.seq), 1, None):
            if ancestor.seq == self._fold[0]:
                break
            lineage.append(ancestor)
        else:
            self._fold = -1, {}
        used = dict(self._fold[1])
        for step in reversed(lineage):
            for ref in step.objects_dropped:
                used.pop(ref.key, None)
            used.update((ref.key, ref.size) for ref in step.objects_added)
        self._fold = commit.seq, used
        if used != version.objects():
            differing = min(used.items() ^ version.objects().items())[0]
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE,
                f"its lineage's records and its manifest disagree about {differing}; do not collect garbage",
                where=record_key(commit.seq),
            )

    def _check_blocks(self, version: VersionMap, where: str) -> None:
        wanted = [block for block in range(version.block_count) if self._is_new(version, block)]
        lengths = version.block_lengths(np.array(wanted, np.int64), self._context.descriptor.block_bytes)
        for row, blocks in _by_tensor(version, np.array(wanted, np.int64)):
            self._guard(f"{where}, tensor {version.names[row]!a}", partial(self._rebuild, version, blocks))
        self.report.blocks += len(wanted)
        self.report.nbytes += int(lengths.sum())

    def _is_new(self, version: VersionMap, block: int) -> bool:
        """Whether this chain was not checked before: versions share most of what they do not change."""
        identity = version.chain_identity(block)
        known = identity in self._blocks
        self._blocks.add(identity)
        return not known

    def _rebuild(self, version: VersionMap, blocks: npt.NDArray[np.int64]) -> None:
        for rebuilt in self._context.rebuilder.blocks(version, blocks):
            self._done += rebuilt.data.size
            self._progress(Progress("verify", self._done))

    def _pack(self, ref: PackEntry) -> None:
        name = _name(ref)
        if name in self._packs:
            return
        self._packs.add(name)
        self._context.sources.check_whole(ref)
        self.report.packs += 1

    def _file(self, ref: FileRef) -> None:
        fetch_whole(self._context.storage, ref.key, ref.size)

    def _guard(self, where: str, check: Callable[[], None]) -> None:
        try:
            check()
        except StoreError:
            raise
        except DeltaFormatError as error:
            self._found(where, error)

    def _found(self, where: str, error: DeltaFormatError) -> None:
        place = f"{where}: {error.where}" if error.where else where
        self.report.findings.append(Finding(place, error.code.value, error.message))


def _name(ref: PackEntry) -> str:
    return ref.key if isinstance(ref, PackRef) else f"{ref.url} {ref.sha256}"


def _by_tensor(
    version: VersionMap, blocks: npt.NDArray[np.int64]
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    rows = version.block_rows(blocks)
    for part in np.split(blocks, np.flatnonzero(np.diff(rows)) + 1):
        if part.size:
            yield int(version.block_rows(part[:1])[0]), part
