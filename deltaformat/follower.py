"""Follow a branch: fetch what changed, verify it aside, hand it to live weights, take it (SPEC 13)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from deltaformat import polling
from deltaformat.context import Context, load_map
from deltaformat.deviceapply import LiveUpdate, OnDevice
from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    InconsistentError,
    MalformedError,
    MissingError,
    StoreError,
)
from deltaformat.gpu.engines import DeviceChoice, check_device_choice
from deltaformat.lineage import Held, catch_up, check_choice, find_commit
from deltaformat.metrics import FollowMetrics, FollowStatus, Meter
from deltaformat.mirror import Mirror, MirrorState, PrivateMirror, parse_mirror
from deltaformat.patches import ChangeSet, merge_changes
from deltaformat.sharedmirror import SharedMirror
from deltaformat.staged import Staged
from deltaformat.staging import (
    Choice,
    Select,
    Target,
    blocks_held,
    count_elements,
    everything,
    manifest_bytes,
    measure,
    specs_of,
    stage_changes,
)
from deltaformat.storage import least_poll
from deltaformat.tensors import Framework, HostTensor, TensorSpec, check_framework, from_host

__all__ = ["Follower"]

POLL_S = 0.2


class Follower:
    """Follows a branch of a store. Made by `Store.follower`; use it as a context manager, or call `close`.

        for staged in follower.watch():
            staged.apply_to(model.state_dict())
            staged.commit()

    The first version comes whole, later ones as what changed. Versions are taken in the order of their seq:
    the newest first, others are skipped. After a rewind the follower stays where it is until a newer version
    is committed.

    The old values that pieces apply to are in a mirror. A private one is in this process's memory. One that
    is shared (`shm:`, `file:`) serves all processes of a host that open it under the same name: the first
    leads: it alone reads weights from the store and writes the mirror; the others get what changed from it,
    and read records and the manifest. When the leader ends, another takes over, and completes what it left
    half done. A leader that lives and does not go on holds up the others; one that reads in place without end
    holds up the leader, whose `commit` fails after 60 s and may be tried again. A mirror that is there is
    checked against its version's digests, and what is damaged is read anew.

    Memory: a private mirror has the tensors' bytes; a staged version what changes, and tensors that are new.
    Not safe for concurrent use by threads.
    """

    def __init__(
        self,
        context: Context,
        *,
        branch: str,
        mirror: str | None,
        select: Select | None,
        framework: Framework,
        device: DeviceChoice,
        metrics: Callable[[FollowMetrics], object] | None,
    ) -> None:
        check_framework(framework)
        check_device_choice(device, where="follower")
        self._context = context
        self._branch = branch
        self._choice = Choice(select)
        self._framework = framework
        self._device: DeviceChoice = device
        self._report = metrics or (lambda _: None)
        self._mirror: Mirror = PrivateMirror()
        if mirror is not None:
            directory, durable = parse_mirror(mirror)
            self._mirror = SharedMirror(directory, durable=durable, uuid=context.descriptor.uuid)
        self._held: Held | None = None
        self._position: Target | None = None
        self._staged: Staged | None = None
        self._target: Target | None = None
        self._closed = False
        self._failures = 0
        self._error: str | None = None

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        at = None if self._position is None else self._position.commit.seq
        return f"<Follower {self._context.storage.url} branch={self._branch!r} at={at}>"

    def close(self) -> None:
        """Let go of the mirror; a shared one stays for others. What was staged is rolled back."""
        self._retire()
        self._mirror.close()
        self._closed = True

    def status(self) -> FollowStatus:
        """What it holds; nothing is read from the store."""
        at = None if self._position is None else self._position.commit
        state = self._mirror.state
        return FollowStatus(
            branch=self._branch,
            leading=self._mirror.leading,
            version=None if at is None else f"{at.seq}:{at.root}",
            seq=None if at is None else at.seq,
            step=None if at is None else at.step,
            mirror_seq=None if state is None else state.seq,
            mirror_bytes=self._mirror.nbytes,
            failures=self._failures,
            error=self._error,
        )

    # -- following -------------------------------------------------------------------------------------------

    def stage(
        self, step: int | None = None, seq: int | None = None, timeout: float | None = None
    ) -> Staged | None:
        """Find a version, fetch what changed, decode and verify it aside.

        What is live, and the mirror, stay as they are.

        Args:
            step: A step in the branch's lineage; also one to go back to.
            seq: A commit's number in the log, of any branch. By default the newest of the branch, if its seq
                is above that of the version held.
            timeout: Seconds to wait for a version that is not there yet. By default it is not waited for.

        Returns:
            The version; None where there is nothing new.

        Raises:
            MalformedError: Both step and seq, or what is none.
            MissingError: No such branch, step or seq; or an object is gone.
            CorruptError, MalformedError, InconsistentError, LimitError, UnsupportedError: What is there is
                not a version this reader can trust.
            StoreError: The store, or the mirror, failed. In every case what was held stays current, and the
                next attempt may succeed.
        """
        self._check_open()
        step, seq = check_choice(step, seq)
        self._retire()
        deadline = time.monotonic() + (0.0 if timeout is None else timeout)
        try:
            while True:
                try:
                    staged = self._attempt(step, seq)
                    missing = None
                except MissingError as error:
                    if error.code not in (ErrorCode.VERSION_MISSING, ErrorCode.BRANCH_MISSING):
                        raise
                    staged, missing = None, error
                left = deadline - time.monotonic()
                if staged is None and left > 0:
                    time.sleep(min(max(POLL_S, least_poll(self._context.storage)), left))
                    continue
                if missing is not None:
                    raise missing
                self._failures, self._error = 0, None
                return staged
        except BaseException as error:
            self._failures += 1
            self._error = str(error) or type(error).__name__
            raise

    def watch(
        self,
        *,
        poll: float = POLL_S,
        stop: Callable[[], bool] = lambda: False,
        on_error: Callable[[StoreError, float], object] | None = None,
    ) -> Iterator[Staged]:
        """Stage every newer version as it comes; those that come in the meantime are skipped.

        Each must be committed, or it is rolled back when the next is asked for. A store that fails is asked
        again after a while, longer each time, up to 30 s. A branch that is not there yet is waited for.

        Args:
            poll: Seconds between two looks; a store that limits requests is asked less often.
            stop: Asked between looks, and twice a second in longer waits; ends the iteration.
            on_error: Told of failures that may pass, and of the wait; by default one RuntimeWarning tells.

        Raises:
            As for `stage`, but of StoreError only those that do not pass (see `StoreError.passing`); iterate
            anew to go on.
        """
        poll = max(poll, least_poll(self._context.storage))
        return polling.watch(self.stage, poll=poll, stop=stop, on_error=on_error)

    def _attempt(self, step: int | None, seq: int | None) -> Staged | None:
        mirror = self._mirror
        mirror.refresh()
        if not mirror.leading:
            state = mirror.state
            if (step is None or (state and state.step == step)) and (
                seq is None or (state and state.seq == seq)
            ):
                return self._from_mirror()
            raise MissingError(
                ErrorCode.VERSION_MISSING,
                "the process that leads this mirror has not taken that version; use a mirror of your own",
                where=f"branch {self._branch}",
            )
        meter, started = Meter(), time.perf_counter()
        self._hold(meter)
        above = None if mirror.state is None else mirror.state.seq
        if self._held is None and not self._has_taken(mirror.state):
            above = None  # what was collected can be given to nobody: the branch's head is what there is
        commit = find_commit(self._context, self._branch, step=step, seq=seq, above=above)
        if commit is None:
            if self._held is None or self._whole(self._held):
                return self._from_mirror()
            commit = self._held.commit  # a part of the mirror is missing or damaged
        whole = load_map(self._context, commit)
        chosen = self._choice.of(whole)
        planned = catch_up(self._context, self._held, commit, whole, chosen)
        meter.add("find", time.perf_counter() - started, manifest_bytes(commit))
        changes = stage_changes(self._context, planned, mirror, mirror.allocate, meter=meter)
        generation = 1 if mirror.state is None else mirror.state.generation + 1
        target = Target(generation, commit, whole, specs_of(chosen), changes, count_elements(chosen))
        return self._offer(target, meter, contextlib.ExitStack())

    def _hold(self, meter: Meter) -> None:
        """Know the version in the mirror, and which of its blocks are right, before anything rests on it."""
        state = self._mirror.state
        if state is None or (self._held is not None and self._held.commit.seq == state.seq):
            return
        self._held = None
        with contextlib.suppress(MissingError):  # collected: then nothing says what the mirror's bytes are
            commit = self._context.log.judged(state.seq)
            whole = load_map(self._context, commit)
            started = time.perf_counter()
            self._held = Held(commit, whole, blocks_held(self._context, whole, self._mirror))
            meter.add("verify", time.perf_counter() - started, self._mirror.nbytes)

    def _whole(self, held: Held) -> bool:
        """Whether the mirror has all tensors that are wanted of its version, undamaged."""
        target = self._choice.of(held.version)
        return bool(held.usable[self._choice.blocks(held.version)].all()) and len(target.names) == len(
            self._mirror.specs
        )

    def _has_taken(self, state: MirrorState | None) -> bool:
        """Whether this process has taken what the mirror holds."""
        position = self._position
        return position is not None and state is not None and position.generation == state.generation

    def _from_mirror(self) -> Staged | None:
        """The version in the mirror, for a process that has not taken it yet."""
        state = self._mirror.state
        if state is None or self._has_taken(state):
            return None
        meter = Meter()
        with contextlib.ExitStack() as reading:
            reading.enter_context(self._mirror.reading())
            state = self._mirror.state
            if state is None:
                return None
            started = time.perf_counter()
            commit = self._context.log.judged(state.seq)
            whole = load_map(self._context, commit)
            meter.add("find", time.perf_counter() - started, manifest_bytes(commit))
            chosen = self._choice.of(whole)
            specs = specs_of(chosen)
            for name, spec in specs.items():
                if self._mirror.specs.get(name) != spec:
                    raise MissingError(
                        ErrorCode.TENSOR_MISSING,
                        "the process that leads this mirror does not follow it; select the same in both",
                        where=f"tensor {name[:100]!a}",
                    )
            target = Target(state.generation, commit, whole, specs, None, count_elements(chosen))
            return self._offer(target, meter, reading.pop_all())

    def _offer(self, target: Target, meter: Meter, reading: contextlib.ExitStack) -> Staged:
        """Make what the user gets: what changed since what this process took, or everything."""
        before = self._position
        own = target.changes or ChangeSet()
        try:
            since = None if before is None else self._mirror.changes_since(before.generation)
            if since is None or before is None:
                before = None
                if not self._knows(target):
                    self._check_mirror(target, meter)
                changes = everything(target.specs, self._mirror, own)
            else:
                merged = merge_changes([*since, own])
                kept = {name: change for name, change in merged.tensors.items() if name in target.specs}
                changes = ChangeSet(kept, merged.removed)
                reading.close()  # files of changes do not change any more
            staged = Staged(
                commit=target.commit,
                previous_seq=None if before is None else before.commit.seq,
                specs=target.specs,
                files=target.whole.files,
                changes=changes,
                metrics=measure(target, before, changes, meter),
                framework=self._framework,
                on_device=self._on_device(target),
                first=self._position is None,
                lasting=before is not None or self._mirror.leading,
                release=reading.close,
                finish=self._finish,
                report=self._report,
            )
        except BaseException:
            reading.close()
            raise
        self._staged, self._target = staged, target
        return staged

    def _on_device(self, target: Target) -> OnDevice:
        context = self._context
        return OnDevice(self._device, target.whole, context.descriptor.block_bytes, context.algorithm.name)

    def _knows(self, target: Target) -> bool:
        """Whether this process verified the mirror's content, and nobody else can have changed it since."""
        if target.changes is not None:  # staged against it
            return True
        held = self._held
        return self._mirror.leading and held is not None and held.commit.seq == target.commit.seq

    def _check_mirror(self, target: Target, meter: Meter) -> None:
        """Check what another process wrote, before it is given to anybody (DF-RD-02)."""
        started = time.perf_counter()
        usable = blocks_held(self._context, target.whole, self._mirror)
        meter.add("verify", time.perf_counter() - started, self._mirror.nbytes)
        rows = [target.whole.row(name) for name in target.specs]
        for row in rows:
            if not usable[target.whole.blocks(row)].all():
                raise CorruptError(
                    ErrorCode.DIGEST_MISMATCH,
                    "the mirror is damaged; end its processes and delete it, it is made anew",
                    where=f"tensor {target.whole.names[row][:100]!a}",
                )

    def _finish(self, staged: Staged, commit: bool) -> None:
        """Take a staged version, or let go of it."""
        target = self._target
        if staged is not self._staged or target is None:
            return
        if commit:
            self._check_open()
            if target.changes is not None:
                version = target.commit
                self._mirror.commit(target.changes, seq=version.seq, step=version.step, root=version.root)
                usable = np.zeros(target.whole.block_count, np.bool_)
                usable[self._choice.blocks(target.whole)] = True
                self._held = Held(version, target.whole, usable)
            self._position = target.taken()
        self._target = None

    def _retire(self) -> None:
        """The staged version, if there is one, is over."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged._retire()
        self._target = None

    # -- reading ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copy all tensors of the version that this process took last, verified.

        Raises:
            MissingError: It took none yet (version-missing).
            CorruptError: The mirror was damaged.
            InconsistentError: The mirror has gone on; stage and commit first.
        """
        with self._current() as (target, specs):
            meter = Meter()
            self._check_mirror(target, meter)
            return {
                name: from_host(
                    HostTensor(spec.dtype, spec.shape, self._mirror.content(name).copy()), self._framework
                )
                for name, spec in specs.items()
            }

    def load_into(self, state: Mapping[str, Any]) -> None:
        """Write all tensors of the version that this process took last into live ones, verified.

        Args:
            state: As for `Staged.apply_to`. Everything is checked before the first tensor is written.

        Raises:
            As for `state_dict` and `Staged.apply_to`.
        """
        with self._current() as (target, specs):
            self._check_mirror(target, Meter())
            changes = everything(specs, self._mirror, ChangeSet())
            LiveUpdate(
                state,
                specs,
                list(changes.tensors.values()),
                label="",
                keep=False,
                on_device=self._on_device(target),
            ).write()

    @contextlib.contextmanager
    def _current(self) -> Iterator[tuple[Target, dict[str, TensorSpec]]]:
        self._check_open()
        at = self._position
        if at is None:
            raise MissingError(
                ErrorCode.VERSION_MISSING, "no version was taken yet; stage and commit one", where=repr(self)
            )
        with self._mirror.reading():
            state = self._mirror.state
            if state is None or state.generation != at.generation:
                raise InconsistentError(
                    ErrorCode.PARTS_DISAGREE,
                    "another process has taken a newer version into the mirror; stage and commit it first",
                    where=repr(self),
                )
            yield at, dict(at.specs)

    def _check_open(self) -> None:
        if self._closed or self._mirror.closed:
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                "is closed, or was made before this process was forked; make a new one",
                where=repr(self),
            )
