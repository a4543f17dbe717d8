"""A version that a follower has fetched, decoded and verified, and that waits to be taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from deltaformat.deviceapply import LiveUpdate, OnDevice
from deltaformat.errors import ErrorCode, InconsistentError, MalformedError
from deltaformat.metrics import FollowMetrics, FollowPhase, Meter
from deltaformat.packs import FileRef
from deltaformat.patches import ChangeSet, Elements, Patch, TensorChange, element_bytes, patches_of
from deltaformat.records import Commit
from deltaformat.tensors import Framework, HostTensor, TensorSpec, from_host

__all__ = ["PATCH_BYTES", "Staged"]

PATCH_BYTES = 64 << 20


class Staged:
    """A version of which everything that changes is at hand, verified; nothing has been written yet.

    Made by `Follower.stage`. Apply it to the live weights, then commit it; or roll back, which also puts back
    what `apply_to` has written. As a context manager it rolls back unless it was committed. The next `stage`
    of the follower rolls it back, too. Not safe for concurrent use by threads.

    Attributes:
        seq: The version's number in the log.
        step: Its step.
        root: Its root.
        previous_seq: The version that this process has followed so far; None where it gets all tensors.
        specs: Name, dtype and shape of every tensor of the version that is followed, by name.
        removed: Names that the version lacks and the previous one had.
        files: Sidecar files of the version by path.
    """

    def __init__(
        self,
        *,
        commit: Commit,
        previous_seq: int | None,
        specs: Mapping[str, TensorSpec],
        files: Sequence[FileRef],
        changes: ChangeSet,
        metrics: FollowMetrics,
        framework: Framework,
        on_device: OnDevice,
        first: bool,
        lasting: bool,
        release: Callable[[], object],
        finish: Callable[[Staged, bool], None],
        report: Callable[[FollowMetrics], object],
    ) -> None:
        self.seq = commit.seq
        self.step = commit.step
        self.root = commit.root
        self.previous_seq = previous_seq
        self.specs = dict(specs)
        self.removed = changes.removed
        self.files = {file.path: file for file in files}
        self._changes = changes
        self._metrics = metrics
        self._framework = framework
        self._on_device = on_device
        self._first = first
        self._lasting = lasting
        self._release = release
        self._finish = finish
        self._report = report
        self._meter = Meter()
        self._applied: list[LiveUpdate] = []
        self._state: Literal["open", "committed", "over"] = "open"

    def __repr__(self) -> str:
        return f"<Staged {self.version} step={self.step} from={self.previous_seq} {self._state}>"

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state == "open":
            self.rollback()

    @property
    def version(self) -> str:
        """`seq:root`, which names a version for engines: it rises with every commit of the store."""
        return f"{self.seq}:{self.root}"

    @property
    def whole(self) -> bool:
        """Whether all tensors come whole: this process has taken no version yet, or is too far behind."""
        return self.previous_seq is None

    @property
    def changed(self) -> list[str]:
        """Names of the tensors of which something changes."""
        return [name for name, change in self._changes.tensors.items() if change.changed]

    @property
    def metrics(self) -> FollowMetrics:
        """What it took so far."""
        applied = self._meter.phase("apply")
        before = self._metrics.apply
        return replace(
            self._metrics,
            apply=FollowPhase(before.seconds + applied.seconds, before.nbytes + applied.nbytes),
        )

    def patches(self, *, max_bytes: int = PATCH_BYTES) -> Iterator[Patch]:
        """Give what changes as absolute values in checkpoint coordinates.

        For an engine's sparse update: live weights may be sliced, fused or quantised. Tensors that are new
        come whole. Each element comes once.

        Args:
            max_bytes: The most bytes of indices and values in one patch; at least one element comes.

        Raises:
            InconsistentError: It was rolled back, or is not the follower's latest.
            UnsupportedError: A dtype that the framework lacks.
        """
        if max_bytes < 1:
            raise MalformedError(
                ErrorCode.INPUT_INVALID, f"it must be at least 1, not {max_bytes}", where="max_bytes"
            )
        self._check_usable()
        for change, indices, values in patches_of(list(self._changes.tensors.values()), max_bytes):
            self._check_usable()
            given = from_host(HostTensor("I64", indices.shape, indices.view("u1")), self._framework)
            yield Patch(change.name, change.shape, change.dtype, given, self._values(change, values))

    def apply_to(self, state: Mapping[str, Any]) -> None:
        """Write what changes into live tensors, in place: every name, or none.

        Args:
            state: All tensors of the version by name (a module's `state_dict()`, or NumPy arrays), of its
                dtypes and shapes, on any device and in any layout. What the version lacks is left alone. They
                must be what this follower staged before, unless `whole`: elements that have neither their
                bits before nor those after are told; where tensors are changed on their device, changed
                blocks that do not become the version's. Names that share their memory are written once.

        Raises:
            CorruptError: On a device a block is not the version's afterwards: `state` is not the version
                before. It names tensor and block, and what was there is put back.
            LimitError: The device has not enough memory.
            InconsistentError: A name is missing or has another dtype or shape; tied names differ in the
                version; or `state` is not the version before.
            MalformedError, UnsupportedError: A destination that cannot be written. Nothing has been written;
                after a failure in writing, what was there is put back, unless it is the first version of this
                process.
        """
        self._check_usable()
        started = time.perf_counter()
        update = LiveUpdate(
            state,
            self.specs,
            list(self._changes.tensors.values()),
            label=f"version {self.previous_seq}",
            keep=not self._first,
            on_device=self._on_device,
        )
        update.write()
        self._applied.append(update)
        self._meter.add("apply", time.perf_counter() - started, update.nbytes)

    def commit(self) -> None:
        """Take the version: the mirror goes to it, and the next `stage` starts from it.

        A failure leaves the mirror at the version before; it may be tried again.

        Raises:
            InconsistentError: It was rolled back, or is not the follower's latest.
            StoreError: The mirror cannot be written.
        """
        self._check_usable()
        if self._state == "committed":
            return
        started = time.perf_counter()
        self._finish(self, True)
        self._state = "committed"
        self._applied.clear()
        if not self._lasting:  # its content lies where the leader may go on now
            self._state, self._changes = "over", ChangeSet()
        self._release()
        self._meter.add("apply", time.perf_counter() - started, 0)
        self._report(self.metrics)

    def rollback(self) -> None:
        """Let go of the version; state dicts that it was applied to get back what they had.

        Raises:
            InconsistentError: It was committed.
        """
        if self._state == "committed":
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE,
                "it was committed; stage an earlier version to go back",
                where=self.version,
            )
        if self._state == "over":
            return
        self._state = "over"
        try:
            while self._applied:
                self._applied.pop().undo()
        finally:
            self._finish(self, False)
            self._end()

    def _retire(self) -> None:
        """The follower goes on: what was committed cannot be read any more."""
        if self._state == "open":
            self.rollback()
        self._end()

    def _end(self) -> None:
        self._state = "over"
        self._changes = ChangeSet()
        self._applied.clear()
        self._release()

    def _values(self, change: TensorChange, values: Elements) -> Any:
        dtype = change.dtype if element_bytes(change.dtype) > 1 or change.dtype in _WHOLE_BYTES else "U8"
        return from_host(HostTensor(dtype, values.shape, values.view("u1")), self._framework)

    def _check_usable(self) -> None:
        if self._state == "over":
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE,
                "this staged version is over (rolled back, or staged anew); use the latest",
                where=self.version,
            )


_WHOLE_BYTES: Sequence[str] = (
    "BOOL",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
)
