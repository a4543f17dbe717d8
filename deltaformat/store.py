"""A store: the way in for people who write and read versioned weights by step."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from deltaformat.collect import GcReport, Retention, collect
from deltaformat.context import Context, load_map
from deltaformat.errors import DeltaFormatError, ErrorCode, MalformedError, MissingError
from deltaformat.export import MAX_SHARD_BYTES
from deltaformat.fields import check_step
from deltaformat.follower import Follower
from deltaformat.gpu.engines import DeviceChoice
from deltaformat.history import History, State
from deltaformat.metrics import FollowMetrics
from deltaformat.part import Ticket
from deltaformat.policy import Policy
from deltaformat.reader import Version
from deltaformat.records import Claim, Commit, Drop, Fork, Head, Record, Tag, check_name
from deltaformat.singlewriter import SingleWriterStorage
from deltaformat.stager import Progress, Stager
from deltaformat.staging import Select
from deltaformat.storage import probe
from deltaformat.sync import CheckpointSync
from deltaformat.tensors import Framework, check_framework
from deltaformat.verify import VerifyReport, verify
from deltaformat.writer import Writer

__all__ = ["Store"]


class Store:
    """An open store. Made by `create` and `open`; safe for concurrent use by threads."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __repr__(self) -> str:
        return f"<Store {self.url} digest={self.digest} block_bytes={self.block_bytes}>"

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self._context.storage.url

    @property
    def uuid(self) -> str:
        """Its identity: 32 hex digits."""
        return self._context.descriptor.uuid

    @property
    def digest(self) -> str:
        """The name of its block digest."""
        return self._context.descriptor.digest

    @property
    def block_bytes(self) -> int:
        """Its block size in bytes."""
        return self._context.descriptor.block_bytes

    # -- writing ---------------------------------------------------------------------------------------------

    def writer(
        self,
        branch: str = "main",
        *,
        resume_from: int | None = None,
        single_writer: bool = False,
        policy: Policy | None = None,
        retention: Retention | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Writer:
        """Take a branch and write to it. Every earlier writer of the branch is fenced: its next commit fails.

        Args:
            branch: Its name; a branch that does not exist begins empty.
            resume_from: A step to go back to: it becomes the head again, later ones stay readable by seq.
                None goes on from the head.
            single_writer: Write although the storage cannot create-if-absent; nobody else may write then.
            policy: How to store.
            retention: Which versions to keep: the others are collected by the way, in the time of every so
                manieth commit. None collects nothing. What stops a collection is a `RuntimeWarning`; the
                commit stands.
            progress: Called while tensors are staged and packs uploaded.

        Raises:
            StoreError: the storage failed, or cannot be trusted with commits (create-unsafe).
            MissingError: `resume_from` is no step of the branch, or was collected.
        """
        check_name(branch)
        resume_from = None if resume_from is None else check_step(resume_from)
        context = self._context
        if single_writer:
            context = context.through(SingleWriterStorage(context.storage))
        else:
            probe(context.storage)

        def members(state: State) -> dict[str, Any]:
            head = state.heads.get(branch)
            target = None if resume_from is None else self._live_step(branch, head, resume_from)
            return {
                "branch": branch,
                "epoch": 1 if head is None else head.epoch + 1,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "resume_from": None if target is None else target.seq,
                "single_writer": single_writer,
            }

        claim = context.log.append(Claim, members).record
        ticket = Ticket(self.uuid, branch, claim.seq)
        collecting = _Collecting(context, retention) if retention is not None else lambda: None
        return Writer(context, ticket, policy=policy or Policy(), progress=progress, committed=collecting)

    def stager(
        self,
        ticket: Ticket | str,
        *,
        policy: Policy | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Stager:
        """Stage parts under another process's claim: `ticket` is its `writer.ticket`, or that as text.

        Raises:
            MalformedError: not a ticket, or one of another store.
        """
        ticket = Ticket.parse(ticket) if isinstance(ticket, str) else ticket
        if ticket.uuid != self.uuid:
            raise MalformedError(ErrorCode.INPUT_INVALID, "this ticket is of another store", where=self.url)
        return Stager(self._context, ticket, policy=policy or Policy(), progress=progress)

    def fork(self, new: str, *, branch: str = "main", step: int) -> None:
        """Make the branch `new`, whose head is `step` of `branch`. Nothing is copied.

        Raises:
            ConflictError: `new` exists.
            MissingError: no such branch or step, or it was collected.
        """
        check_name(new)
        step = check_step(step)

        def members(state: State) -> dict[str, Any]:
            source = self._live_step(branch, self._head(state, branch), step)
            return {"branch": new, "source": source.seq, "step": source.step}

        self._context.log.append(Fork, members)

    def tag(self, name: str, *, branch: str = "main", step: int) -> None:
        """Name `step` of `branch` for good: it is not collected while the tag exists.

        Raises:
            ConflictError: the tag exists.
            MissingError: no such branch or step, or it was collected.
        """
        check_name(name, what="tag")
        step = check_step(step)

        def members(state: State) -> dict[str, Any]:
            return {"name": name, "target": self._live_step(branch, self._head(state, branch), step).seq}

        self._context.log.append(Tag, members)

    def delete_tag(self, name: str) -> None:
        """Remove a tag.

        Raises:
            MissingError: there is none of that name.
        """
        self._context.log.append(Tag, lambda state: {"name": check_name(name, what="tag"), "target": None})

    def drop(self, branch: str) -> None:
        """End a branch. Its commits stay readable by seq until they are collected.

        Raises:
            MissingError: there is no such branch.
        """
        self._context.log.append(Drop, lambda state: {"branch": check_name(branch)})

    # -- reading ---------------------------------------------------------------------------------------------

    def version(
        self,
        step: int | None = None,
        *,
        branch: str = "main",
        tag: str | None = None,
        seq: int | None = None,
        framework: Framework = "np",
        device: str = "cpu",
    ) -> Version:
        """Open a version: by step of a branch, by tag, or by seq; by none of these, the newest of the branch.

        Reads only its manifest.

        Args:
            step: A step in the branch's lineage.
            branch: The branch.
            tag: A tag's name.
            seq: A commit's number in the log, also of one that a rewind superseded.
            framework: "np" (bfloat16 and fp8 through ml_dtypes) or "pt".
            device: Where torch tensors go.

        Raises:
            MissingError: no such branch, step, tag or commit, or it was collected.
            CorruptError, MalformedError, InconsistentError, LimitError, UnsupportedError: what is there is
                not a version this reader can trust.
        """
        if sum(choice is not None for choice in (step, tag, seq)) > 1:
            raise MalformedError(ErrorCode.INPUT_INVALID, "give one of step, tag and seq", where="version")
        check_framework(framework)
        log = self._context.log
        if seq is not None:
            commit = log.judged(check_step(seq))
        elif tag is not None:
            commit = self._tagged(tag)
        else:
            wanted = None if step is None else check_step(step)
            commit = self._by_step(branch, self._head(log.tail(), branch), wanted)
        return Version(
            self._context, commit, load_map(self._context, commit), framework=framework, device=device
        )

    def follower(
        self,
        branch: str = "main",
        *,
        mirror: str | None = None,
        select: Select | None = None,
        framework: Framework = "pt",
        device: DeviceChoice = "auto",
        metrics: Callable[[FollowMetrics], object] | None = None,
    ) -> Follower:
        """Follow a branch: stage each newer version aside, apply what changed to live weights, commit.

        Args:
            branch: The branch.
            mirror: Where the canonical tensors are kept: None, in this process's memory; `shm:NAME`, in
                shared memory, or `file:PATH`, in a directory of mapped files, for all processes of this host.
            select: Names of the tensors to follow, or a function that tells by a name; None: all.
            framework: What patches are given as: "pt" or "np".
            device: What changes and then hashes live torch tensors where they are, as in `Policy`; `off`
                writes them from the host.
            metrics: Called with what it took, whenever a version has been committed.

        Raises:
            MalformedError, UnsupportedError: a mirror, framework or device that cannot be.
            ConflictError: a mirror of another store.
            StoreError: the mirror cannot be made.
        """
        return Follower(
            self._context, branch=check_name(branch), mirror=mirror, select=select, framework=framework,
            device=device, metrics=metrics,
        )  # fmt: skip

    def sync(
        self,
        directory: str | os.PathLike[str],
        *,
        branch: str = "main",
        in_place: bool = False,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        hold: float = 0.0,
        progress: Callable[[int, int], object] | None = None,
    ) -> CheckpointSync:
        """Keep a local checkpoint directory, in the layout of Hugging Face, at versions of a branch.

        Args:
            directory: Where. It becomes a symbolic link to one of two directories, of which the other one is
                written; or with `in_place`, for models too large for two copies, a directory that is marked
                while it is written.
            branch: The branch.
            in_place: Whether to keep one copy.
            max_shard_bytes: Size at which a new weight file is begun.
            hold: Seconds for which a directory is not written after the link has left it: servers may still
                load it. The newest version waits so long; one asked for by step or seq does not.
            progress: Called with bytes done, and their total.

        Raises:
            ConflictError: something else is there, or another process keeps it.
            StoreError: it cannot be made.
        """
        return CheckpointSync(
            self._context,
            Path(directory),
            branch=check_name(branch),
            in_place=in_place,
            max_shard_bytes=max_shard_bytes,
            hold=hold,
            progress=progress,
        )

    def log(self, branch: str | None = None, limit: int | None = None) -> list[Record]:
        """Records, newest first; of `branch`, or all. Void ones are left out; `verify` reports them.

        Raises:
            MissingError: no record is of such a branch.
        """
        records = list(self._context.log.records(branch=branch, limit=limit))
        if branch is not None and not records:
            self._head(self._context.log.tail(), branch)
        return records

    def branches(self) -> dict[str, Head]:
        """Live branches and their heads."""
        return dict(self._context.log.tail().heads)

    def tags(self) -> dict[str, int]:
        """Tags, and the seq of the commit that each names."""
        return self._context.log.tags()

    # -- upkeep ----------------------------------------------------------------------------------------------

    def gc(
        self,
        *,
        keep_last: int,
        keep_every: int | None = None,
        grace: timedelta = timedelta(hours=24),
        dry_run: bool = True,
        progress: Callable[[Progress], None] | None = None,
    ) -> GcReport:
        """Collect garbage (SPEC 12.6); a dry run by default.

        Keep the newest `keep_last` versions of every branch, those whose step `keep_every` divides, and
        tagged ones; retire the others, and delete what nothing uses once `grace` has passed.
        """
        return collect(
            self._context,
            keep_last=keep_last,
            keep_every=keep_every,
            grace=grace,
            dry_run=dry_run,
            progress=progress,
        )

    def verify(
        self,
        step: int | None = None,
        *,
        branch: str = "main",
        all: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> VerifyReport:
        """Check the whole log, and every byte of one version or of all live ones.

        Args:
            step: A step; the newest by default.
            branch: Its branch.
            all: Check every live version.
            progress: Called with the bytes that were checked.

        Raises:
            MissingError: no such branch or step.
            StoreError: the storage failed.
        """

        def choose(history: History) -> Iterable[Commit]:
            if all:
                return [history.commits[seq] for seq in sorted(history.live)]
            if step is None and not history.commits:
                return []  # nothing has been committed yet
            head = history.state.heads.get(branch)
            if head is None:
                raise _no_branch(branch, history.state)
            wanted = head.step if step is None else step
            found = None if head.seq is None or wanted is None else history.find_step(head.seq, wanted)
            if found is None:
                what = "nothing has been committed yet" if wanted is None else f"there is no step {wanted}"
                raise MissingError(ErrorCode.VERSION_MISSING, what, where=f"branch {branch}")
            return [found]

        return verify(self._context, choose, progress=progress)

    # -- finding commits -------------------------------------------------------------------------------------

    def _head(self, state: State, branch: str) -> Head:
        head = state.heads.get(branch)
        if head is None:
            raise _no_branch(branch, state)
        return head

    def _by_step(self, branch: str, head: Head, step: int | None) -> Commit:
        if head.seq is None:
            raise MissingError(
                ErrorCode.VERSION_MISSING, "nothing has been committed yet", where=f"branch {branch}"
            )
        return self._context.log.judged(head.seq) if step is None else self._context.log.find_step(head, step)

    def _live_step(self, branch: str, head: Head | None, step: int) -> Commit:
        if head is None:
            raise _no_branch(branch, self._context.log.tail())
        commit = self._by_step(branch, head, step)
        if commit.seq in self._context.log.retired():
            raise MissingError(
                ErrorCode.VERSION_RETIRED,
                f"step {step} of branch {branch!r} was collected",
                where=f"commit {commit.seq}",
            )
        return commit

    def _tagged(self, tag: str) -> Commit:
        seq = self._context.log.tags().get(tag)
        if seq is None:
            raise MissingError(ErrorCode.TAG_MISSING, f"no tag {tag!r}; see tags()", where=self.url)
        return self._context.log.judged(seq)


class _Collecting:
    """Collects after every so many calls."""

    def __init__(self, context: Context, retention: Retention) -> None:
        self._context = context
        self._retention = retention
        self._count = 0
        self._checked: dict[int, frozenset[str]] = {}

    def __call__(self) -> None:
        self._count += 1
        if self._count % self._retention.interval:
            return
        keep = self._retention
        try:
            collect(
                self._context,
                keep_last=keep.keep_last,
                keep_every=keep.keep_every,
                grace=keep.grace,
                dry_run=False,
                checked=self._checked,
            )
        except DeltaFormatError as error:
            warnings.warn(f"nothing was collected this time: {error}", RuntimeWarning, stacklevel=3)


def _no_branch(branch: str, state: State) -> MissingError:
    known = ", ".join(sorted(state.heads)[:10]) or "none yet"
    return MissingError(ErrorCode.BRANCH_MISSING, f"no branch {branch!r}; there are: {known}", where="log")
