"""What a commit gives back: at once, or later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

__all__ = ["CommitFuture", "CommitInfo"]


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """What a commit did.

    Attributes:
        seq: Number of its record.
        step: The training step.
        branch: The branch.
        root: The version's root (SPEC 7.1).
        created: False where the same step and root had been committed before: nothing was added.
        tensors, blocks, changed_blocks: Counts over the version.
        nbytes: Canonical bytes of all tensors.
        payload_bytes: Encoded bytes of this step's own pieces: what a follower fetches.
        rebase_bytes: Encoded bytes that replaced prefixes of full chains.
        packs: Number of packs written.
        pack_bytes, manifest_bytes, record_bytes, file_bytes: Bytes of objects written, by kind.
        bytes_written: Their sum.
        read_bytes: Decoded bytes that were read back from the store.
        timings: Seconds of wall time by phase: `stage` (of which `encode`), `files`, `manifest`, `record`,
            `collect` (what a retention deletes, before the call returns), `total`.
    """

    seq: int
    step: int
    branch: str
    root: str
    created: bool
    tensors: int
    blocks: int
    changed_blocks: int
    nbytes: int
    payload_bytes: int
    rebase_bytes: int
    packs: int
    pack_bytes: int
    manifest_bytes: int
    record_bytes: int
    file_bytes: int
    read_bytes: int
    timings: Mapping[str, float]

    @property
    def bytes_written(self) -> int:
        """Bytes of all objects that the commit wrote."""
        return self.pack_bytes + self.manifest_bytes + self.record_bytes + self.file_bytes


class CommitFuture(Future[CommitInfo]):
    """What `commit(block=False)` gives. An error that was taken from it is not raised again by the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = False

    def result(self, timeout: float | None = None) -> CommitInfo:
        """As `Future.result`."""
        try:
            return super().result(timeout)
        finally:
            self.taken = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `Future.exception`."""
        error = super().exception(timeout)
        self.taken = True
        return error

    def fulfil(self, commit: Callable[[], CommitInfo]) -> None:
        """Run `commit` and hold what comes of it."""
        self.set_running_or_notify_cancel()
        try:
            self.set_result(commit())
        except BaseException as error:
            self.set_exception(error)
