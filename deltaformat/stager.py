"""Stages tensors under a claim: what a writer does before it commits, and all that other ranks of it do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deltaformat.adopt import adopt, external_urls
from deltaformat.baseline import Baseline
from deltaformat.checkpoint import Checkpoint
from deltaformat.context import Context, load_map
from deltaformat.errors import ConflictError, ErrorCode
from deltaformat.fields import check_step
from deltaformat.gpu.survey import DeviceBaseline, DeviceTensor
from deltaformat.inputs import Inputs, Tensors, total_bytes
from deltaformat.manifest import encode_part
from deltaformat.part import Part, Ticket
from deltaformat.policy import Policy, StageCounts
from deltaformat.records import Claim, Commit, Head
from deltaformat.sink import PackSink
from deltaformat.stage import Stage
from deltaformat.tensors import HostTensor
from deltaformat.versionmap import VersionMap

__all__ = ["Progress", "Staged", "Stager", "held_error"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a progress callback is given.

    Attributes:
        phase: `stage` (canonical bytes compared and encoded), `upload` (bytes of packs written).
        done: Bytes so far in this phase of this commit.
        total: Bytes in all, where known.
    """

    phase: str
    done: int
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged map with what it took: durable packs, not yet named by any record."""

    version: VersionMap
    counts: StageCounts
    pack_bytes: int
    packs: int
    seconds: float


class Stager:
    """Stages parts of a branch's next version, under a claim that this or another process holds.

    Memory: one host copy of the tensors it stages (the baseline), and a bounded amount in flight. Not safe
    for concurrent use by threads.
    """

    def __init__(
        self,
        context: Context,
        ticket: Ticket,
        *,
        policy: Policy,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._context = context
        self._ticket = ticket
        self._policy = policy
        self._report = progress or (lambda _: None)
        self._baseline = Baseline(
            block_bytes=context.descriptor.block_bytes, digest_bytes=context.algorithm.size
        )
        self._device_baseline = DeviceBaseline(
            context.algorithm.name,
            context.descriptor.block_bytes,
            engine="auto" if policy.device == "off" else policy.device,
            kept=policy.device_baseline,
        )
        self._inputs = Inputs(policy, self._device_baseline)
        self._parent: Commit | None = None
        self._parent_map: VersionMap | None = None

    @property
    def ticket(self) -> Ticket:
        """What another process needs to stage under this claim (`Store.stager`)."""
        return self._ticket

    @property
    def branch(self) -> str:
        """The branch it writes."""
        return self._ticket.branch

    def stage(self, *, step: int, tensors: Tensors) -> Part:
        """Encode tensors and make their packs durable, for a later `Writer.commit(parts=[...])`.

        Args:
            step: The step the part is for.
            tensors: A mapping, or a stream of (name, tensor) pairs that is consumed one tensor at a time:
                torch tensors or NumPy arrays of any layout and device, or `TensorBytes`.

        Raises:
            ConflictError: another writer has claimed the branch.
            UnsupportedError, MalformedError: a tensor or name that cannot be stored.
            StoreError: the store failed.
        """
        step = check_step(step)
        self._ready()
        self._follow()
        return self._part(step, self._stage(self._inputs.take(tensors), total=total_bytes(tensors)))

    def stage_external(self, *, step: int, checkpoint: Checkpoint, base_url: str | None = None) -> Part:
        """Refer to a checkpoint's files instead of copying them (SPEC 10.2).

        For `Writer.commit(parts=[...])`.

        Args:
            step: The step the part is for.
            checkpoint: From `deltaformat.checkpoint.open_checkpoint`; its files must never change.
            base_url: Where readers find its directory, such as `hf://namespace/repository@<40 hex digits>`.
                None: where it is, as `file:` URLs.

        Raises:
            UnsafeError: this store was not opened to read such URLs (`allow_external`), so nobody could read
                the version here.
            UnsupportedError, MissingError, CorruptError, StoreError: a file cannot be read from there, and
                the store has no copy of it.
            ConflictError: another writer has claimed the branch.
        """
        step = check_step(step)
        self._ready()
        self._follow()
        started = time.perf_counter()
        for url in external_urls(checkpoint, base_url).values():
            self._context.sources.check_allowed(url)
        version = adopt(
            checkpoint,
            base_url=base_url,
            algorithm=self._context.algorithm,
            block_bytes=self._context.descriptor.block_bytes,
        )
        for ref in version.packs:
            self._context.sources.check_readable(ref)
        return self._part(step, Staged(version, StageCounts(), 0, 0, time.perf_counter() - started))

    def _part(self, step: int, staged: Staged) -> Part:
        parent = self._parent.seq if self._parent is not None else None
        manifest, content_size = encode_part(
            staged.version,
            parent=parent,
            digest=self._context.descriptor.digest,
            block_bytes=self._context.descriptor.block_bytes,
        )
        return Part(
            store=self._ticket.uuid,
            step=step,
            claim=self._ticket.claim,
            parent=parent,
            manifest=manifest,
            content_size=content_size,
            packs=staged.packs,
            pack_bytes=staged.pack_bytes,
            payload_bytes=staged.counts.payload_bytes,
            rebase_bytes=staged.counts.rebase_bytes,
        )

    def _ready(self) -> None:
        """Make sure that nothing else of this object is at work."""

    # -- for the writer --------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Make the branch's head the parent, if the claim still stands."""
        head = self._context.log.tail().heads.get(self._ticket.branch)
        if head is None or head.claim != self._ticket.claim:
            raise held_error(self._context, self._ticket.branch, head)
        if head.seq is None:
            self._parent, self._parent_map = None, None
        elif self._parent is None or self._parent.seq != head.seq:
            parent = self._context.log.judged(head.seq)
            self._parent_map = load_map(self._context, parent)
            self._parent = parent

    def _stage(
        self, tensors: Iterator[tuple[str, HostTensor | DeviceTensor]], *, total: int | None
    ) -> Staged:
        started = time.perf_counter()
        done = uploaded = packs = 0

        def encoded(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self._report(Progress("stage", done, total))

        def written(nbytes: int) -> None:
            nonlocal uploaded, packs
            uploaded += nbytes
            packs += 1
            self._report(Progress("upload", uploaded))

        sink = PackSink(
            self._context.storage, claim=self._ticket.claim, limit=self._policy.pack_bytes, uploaded=written
        )
        stage = Stage(
            parent=self._parent_map,
            baseline=self._baseline,
            sink=sink,
            rebuilder=self._context.rebuilder,
            algorithm=self._context.algorithm,
            block_bytes=self._context.descriptor.block_bytes,
            depth=self._parent.depth + 1 if self._parent is not None else 0,
            policy=self._policy,
            progress=encoded,
        )
        try:
            for name, source in tensors:
                stage.add(name, source)
            version = stage.finish()
        except BaseException:
            stage.abort()
            raise
        return Staged(version, stage.counts, uploaded, packs, time.perf_counter() - started)


def held_error(context: Context, branch: str, head: Head | None) -> ConflictError:
    """The error of a writer whose claim is not the branch's newest (DF-CMT-04); it names the holder."""
    if head is None:
        message = "the branch was dropped; fork it anew, or claim it with store.writer"
    else:
        claim = context.log.record(head.claim) if head.claim is not None else None
        holder = (
            f"host {claim.host}, pid {claim.pid}, since {claim.time}"
            if isinstance(claim, Claim)
            else "another writer"
        )
        message = (
            f"held by {holder} (claim {head.claim}, epoch {head.epoch});"
            f" this writer (pid {os.getpid()}) is fenced:"
            " open a new one with store.writer if the holder is gone"
        )
    return ConflictError(ErrorCode.BRANCH_HELD, message, where=f"branch {branch}")
