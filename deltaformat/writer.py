"""Commits versions to a branch: claim, stage, make durable, record (SPEC 12.5 and 14)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, overload

from deltaformat import ijson
from deltaformat.commitinfo import CommitFuture, CommitInfo
from deltaformat.context import Context
from deltaformat.errors import CommitUnknown, ConflictError, ErrorCode, InconsistentError, MalformedError
from deltaformat.fields import check_step
from deltaformat.gpu.survey import DeviceTensor
from deltaformat.history import State, ancestors_for
from deltaformat.inputs import Tensors, total_bytes
from deltaformat.keys import manifest_key
from deltaformat.manifest import decode_part, divide, encode_part
from deltaformat.part import Part, Ticket, check_staged, unite
from deltaformat.policy import Policy, StageCounts
from deltaformat.records import Commit, ManifestRef, ObjectRef
from deltaformat.sidecars import Files, UploadedFiles, check_sources, upload_files
from deltaformat.stager import (
    Progress,
    Staged,
    Stager,
    held_error,
)
from deltaformat.tensors import HostTensor
from deltaformat.versionmap import VersionMap, object_changes

__all__ = ["Writer"]

MAX_METADATA_BYTES = 1 << 20


class Writer(Stager):
    """Holds a branch and commits versions to it.

    Made by `Store.writer`; use it as a context manager, or call `close`.

    One commit is in flight at a time. Memory: one host copy of the state (the baseline), one more while a
    `block=False` commit is in flight, and a bounded amount besides. With `Policy(device_baseline=True)` the
    copies of tensors on a device are on that device, and the baseline is there as well. Not safe for
    concurrent use by threads.
    """

    def __init__(
        self,
        context: Context,
        ticket: Ticket,
        *,
        policy: Policy,
        progress: Callable[[Progress], None] | None,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(context, ticket, policy=policy, progress=progress)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="deltaformat-commit")
        self._in_flight: CommitFuture | None = None
        self._unknown: CommitUnknown | None = None
        self._closed = False
        self._committed = committed  # called after each commit that was made

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # otherwise the error that ends the block is the one to tell

    def close(self) -> None:
        """Wait for a commit in flight and let go; the claim stands until another writer takes the branch.

        Raises:
            Whatever a `block=False` commit failed with, if no other call has raised it.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._settle_in_flight()
        finally:
            self._background.shutdown()
            self._context.log.write_hint(force=True)

    @overload
    def commit(
        self, *, step: int, tensors: Tensors | None = ..., parts: Iterable[Part] | None = ...,
        files: Files | None = ..., metadata: Mapping[str, Any] | None = ..., allow_set_change: bool = ...,
        block: Literal[True] = ...,
    ) -> CommitInfo: ...  # fmt: skip
    @overload
    def commit(
        self, *, step: int, tensors: Tensors | None = ..., parts: Iterable[Part] | None = ...,
        files: Files | None = ..., metadata: Mapping[str, Any] | None = ..., allow_set_change: bool = ...,
        block: Literal[False],
    ) -> Future[CommitInfo]: ...  # fmt: skip

    def commit(
        self,
        *,
        step: int,
        tensors: Tensors | None = None,
        parts: Iterable[Part] | None = None,
        files: Files | None = None,
        metadata: Mapping[str, Any] | None = None,
        allow_set_change: bool = False,
        block: bool = True,
    ) -> CommitInfo | Future[CommitInfo]:
        """Commit a version: all tensors of `tensors`, or of `parts`, or of both.

        Args:
            step: The training step; above the branch's head (see `resume_from` of `Store.writer` to go back).
                Committing the head's own step and weights again returns the existing commit, with its own
                files and metadata.
            tensors: As for `stage`. They must not change before this returns: another thread that writes to
                them meanwhile makes a version that no reader can verify.
            parts: What `stage` gave, here or in other processes, against the branch's head.
            files: Sidecar files: path in the version -> local path or bytes. None keeps the parent's.
            metadata: Anything JSON can hold, at most 1 MiB.
            allow_set_change: Whether names may differ from the parent's. Otherwise that is an error, so that
                a stream cut short does not delete tensors (DF-CMT-07).
            block: False returns a future at once, after all tensors were copied. A commit that is in flight
                is waited for first; if it failed and nobody has taken its error yet, that is raised here and
                this commit is not made.

        Raises:
            ConflictError: another writer holds the branch, or its head is not what a part was staged against.
            InconsistentError: the step would not rise, names changed, or parts contradict each other.
            MissingError, CorruptError: a staged part's pack is not in the store as it was staged.
            MalformedError, UnsupportedError, UnsafeError: an argument that cannot be stored.
            StoreError: the store failed; nothing was committed. `CommitUnknown`: it may have been; this
                writer writes no more.
        """
        step = check_step(step)
        self._ready()
        if tensors is None and parts is None:
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                "give tensors or parts; an empty version is tensors={}",
                where="commit",
            )
        if files is not None:
            check_sources(files)
        request = _Request(
            step=step,
            parts=_parts(parts),
            files=files,
            metadata=check_metadata(metadata),
            allow_set_change=allow_set_change,
            total=total_bytes(tensors) if tensors is not None else 0,
        )
        given = tensors if tensors is not None else {}
        if block:
            return self._commit(request, self._inputs.take(given))
        copies = self._inputs.copies(given)
        future = CommitFuture()
        self._background.submit(future.fulfil, lambda: self._commit(request, copies))
        self._in_flight = future
        return future

    # -- the commit ------------------------------------------------------------------------------------------

    def _ready(self) -> None:
        """Wait for a `block=False` commit in flight, and raise its error here."""
        if self._closed:
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                "this writer is closed; open another with store.writer",
                where=f"branch {self.branch}",
            )
        self._settle_in_flight()

    def _settle_in_flight(self) -> None:
        if self._in_flight is not None:
            future = self._in_flight
            wait([future])  # interrupted here, the commit is still in flight, and still waited for
            self._in_flight = None
            if not future.taken:
                future.result()

    def _commit(
        self, request: _Request, tensors: Iterator[tuple[str, HostTensor | DeviceTensor]]
    ) -> CommitInfo:
        if self._unknown is not None:
            raise self._unknown
        started = time.perf_counter()
        self._follow()
        self._check_step_rises(request.step)
        staged = self._stage(tensors, total=request.total)
        version = self._unite(request.step, staged, request.parts)
        if not request.allow_set_change:
            self._check_names(version)
        if request.parts:
            check_staged(self._context.storage, version, staged.version, self._parent_map)
        root = version.root(self._context.descriptor.digest, self._context.descriptor.block_bytes)
        if self._parent is not None and request.step == self._parent.step:
            return self._again(root, staged, started)
        files_started = time.perf_counter()
        files = self._upload_files(request.files)
        version = replace(version, files=files.refs)
        manifest_started = time.perf_counter()
        manifests = self._put_manifests(version)
        record_started = time.perf_counter()
        commit, record_bytes = self._record(request, version, root, manifests)
        self._parent, self._parent_map = commit, version
        self._baseline.retain(version.index.keys())
        self._device_baseline.retain(version.index.keys())
        collect_started = time.perf_counter()
        self._committed()
        ended = time.perf_counter()
        timings = {
            "stage": staged.seconds,
            "encode": staged.counts.encode_seconds,
            "files": manifest_started - files_started,
            "manifest": record_started - manifest_started,
            "record": collect_started - record_started,
            "collect": ended - collect_started,
            "total": ended - started,
        }
        return self._info(
            commit, staged, timings, version=version, created=True, parts=request.parts,
            manifest_bytes=sum(ref.size for ref in manifests), record_bytes=record_bytes,
            file_bytes=files.nbytes,
        )  # fmt: skip

    def _check_step_rises(self, step: int) -> None:
        """Tell before any work what DF-CMT-05 refuses after it."""
        if self._parent is not None and step < self._parent.step:
            raise InconsistentError(
                ErrorCode.STEP_NOT_ABOVE_HEAD,
                f"step {step} is below the head's, {self._parent.step}; to go back, open a writer with"
                " resume_from",
                where=f"branch {self.branch}",
            )

    def _unite(self, step: int, staged: Staged, parts: tuple[Part, ...]) -> VersionMap:
        parent = self._parent.seq if self._parent is not None else None
        maps = [staged.version]
        for part in parts:
            if part.store != self._ticket.uuid or part.step != step:
                raise InconsistentError(
                    ErrorCode.PARTS_DISAGREE,
                    f"staged for step {part.step} of store {part.store}, "
                    f"not for step {step} of {self._ticket.uuid}",
                    where=f"part of step {part.step}",
                )
            if part.claim != self._ticket.claim or part.parent != parent:
                raise ConflictError(
                    ErrorCode.PARENT_MOVED,
                    f"staged under claim {part.claim} against commit {part.parent},"
                    f" now claim {self._ticket.claim} and commit {parent}; stage it again",
                    where=f"part of step {part.step}",
                )
            maps.append(
                decode_part(
                    part.manifest,
                    content_size=part.content_size,
                    where=f"part of step {part.step}",
                    digest=self._context.descriptor.digest,
                    block_bytes=self._context.descriptor.block_bytes,
                    parent=parent,
                )
            )
        return unite(maps)

    def _check_names(self, version: VersionMap) -> None:
        if self._parent_map is None:
            return
        gone = self._parent_map.index.keys() - version.index.keys()
        new = version.index.keys() - self._parent_map.index.keys()
        if gone or new:
            changes = [
                f"{len(names)} {what} ({min(names)!a}...)"
                for what, names in (("gone", gone), ("new", new))
                if names
            ]
            raise InconsistentError(
                ErrorCode.SET_CHANGED,
                f"tensor names differ from the parent's: {', '.join(changes)};"
                " pass allow_set_change=True if that is meant",
                where=f"branch {self.branch}",
            )

    def _again(self, root: str, staged: Staged, started: float) -> CommitInfo:
        assert self._parent is not None
        if root != self._parent.root:
            raise InconsistentError(
                ErrorCode.STEP_NOT_ABOVE_HEAD,
                f"step {self._parent.step} is committed with other weights ({self._parent.root});"
                " a step cannot be replaced",
                where=f"branch {self.branch}",
            )
        timings = {
            "stage": staged.seconds,
            "encode": staged.counts.encode_seconds,
            "total": time.perf_counter() - started,
        }
        return self._info(self._parent, staged, timings, version=staged.version, created=False, parts=())

    def _upload_files(self, files: Files | None) -> UploadedFiles:
        parent = self._parent_map.files if self._parent_map is not None else ()
        if files is None:
            return UploadedFiles(parent, 0, 0)
        return upload_files(self._context.storage, files, claim=self._ticket.claim, parent=parent)

    def _put_manifests(self, version: VersionMap) -> tuple[ManifestRef, ...]:
        refs = []
        for part in divide(version):
            data, content_size = encode_part(
                part,
                parent=self._parent.seq if self._parent is not None else None,
                digest=self._context.descriptor.digest,
                block_bytes=self._context.descriptor.block_bytes,
            )
            key = manifest_key(self._ticket.claim, hashlib.sha256(data).hexdigest())
            self._context.storage.put(key, data)
            refs.append(ManifestRef(key, len(data), content_size))
        return tuple(refs)

    def _record(
        self, request: _Request, version: VersionMap, root: str, manifests: tuple[ManifestRef, ...]
    ) -> tuple[Commit, int]:
        parent = self._parent
        added, dropped = object_changes(version, self._parent_map)

        def members(state: State) -> dict[str, Any]:
            head = state.heads.get(self.branch)
            if head is None or head.claim != self._ticket.claim:
                raise held_error(self._context, self.branch, head)
            return {
                "branch": self.branch,
                "claim": self._ticket.claim,
                "step": request.step,
                "parent": parent.seq if parent is not None else None,
                "depth": parent.depth + 1 if parent is not None else 0,
                "ancestors": ancestors_for(parent) if parent is not None else (),
                "root": root,
                "manifests": manifests,
                "objects_added": tuple(ObjectRef(key, size) for key, size in added),
                "objects_dropped": tuple(ObjectRef(key, size) for key, size in dropped),
                "metadata": request.metadata,
            }

        try:
            appended = self._context.log.append(Commit, members)
        except CommitUnknown as error:
            self._unknown = error
            raise
        self._context.log.write_hint()
        return appended.record, appended.nbytes

    def _info(
        self,
        commit: Commit,
        staged: Staged,
        timings: Mapping[str, float],
        *,
        version: VersionMap,
        created: bool,
        parts: tuple[Part, ...],
        manifest_bytes: int = 0,
        record_bytes: int = 0,
        file_bytes: int = 0,
    ) -> CommitInfo:
        counts: StageCounts = staged.counts
        return CommitInfo(
            seq=commit.seq,
            step=commit.step,
            branch=commit.branch,
            root=commit.root,
            created=created,
            tensors=len(version.names),
            blocks=version.block_count,
            changed_blocks=int((version.fresh != 0).sum()) if created else 0,
            nbytes=int(version.tensor_bytes.sum()),
            payload_bytes=counts.payload_bytes + sum(part.payload_bytes for part in parts),
            rebase_bytes=counts.rebase_bytes + sum(part.rebase_bytes for part in parts),
            packs=staged.packs + sum(part.packs for part in parts),
            pack_bytes=staged.pack_bytes + sum(part.pack_bytes for part in parts),
            manifest_bytes=manifest_bytes,
            record_bytes=record_bytes,
            file_bytes=file_bytes,
            read_bytes=counts.read_bytes,
            timings=timings,
        )


@dataclass(frozen=True, slots=True)
class _Request:
    step: int
    parts: tuple[Part, ...]
    files: Files | None
    metadata: Mapping[str, Any]
    allow_set_change: bool
    total: int | None


def _parts(parts: Iterable[Part] | None) -> tuple[Part, ...]:
    given = tuple(parts or ())
    for part in given:
        if not isinstance(part, Part):
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                f"{type(part).__name__} is no Part; pass what `stage` gave",
                where="parts",
            )
    return given


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a record will hold of a user's metadata: a copy.

    Raises:
        MalformedError: it would not come back as it is, or is too large.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise MalformedError(
            ErrorCode.INPUT_INVALID, f"a mapping is wanted, not {type(metadata).__name__}", where="metadata"
        )
    members = dict(metadata)
    ijson.check_user_value(members, where="metadata")
    data = ijson.dump(members)
    if len(data) > MAX_METADATA_BYTES:
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"{len(data)} bytes exceed {MAX_METADATA_BYTES}; put large things into a sidecar file",
            where="metadata",
        )
    copied: dict[str, Any] = json.loads(data)
    return copied
