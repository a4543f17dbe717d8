"""Keep a local checkpoint directory at a version, so that any inference server can load it from disk.

Two ways. With two slots `DIR` is a symbolic link to one of two directories in `.DIR.deltaformat`; the other
one is brought to the next version, then the link is switched, all at once: who loads `DIR` finds a whole
version, and who has the old one mapped, or still loads it, keeps it until the version after the next, which
`hold` puts off. In place there is one
directory, for models too large for two copies: while it is written it has the file `.deltaformat.dirty`, and
a server must not load it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from deltaformat.blocks import Bytes
from deltaformat.changefile import sync_directory
from deltaformat.context import Context, load_map
from deltaformat.errors import ConflictError, ErrorCode, MalformedError, MissingError, StoreError
from deltaformat.lineage import Held, catch_up, check_choice, find_commit
from deltaformat.locks import open_lock, try_lock
from deltaformat.metrics import Meter
from deltaformat.records import Commit
from deltaformat.slots import PREFIX, Slot
from deltaformat.staging import blocks_held, specs_of, stage_changes
from deltaformat.storage import least_poll
from deltaformat.tensors import TensorSpec
from deltaformat.versionmap import NOT_FRESH, VersionMap

__all__ = ["CheckpointSync", "SyncReport"]

SLOTS = ("a", "b")


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What was done to bring a checkpoint directory to a version.

    Attributes:
        version: `seq:root` of the version.
        seq: Its seq.
        step: Its step.
        root: Its root.
        path: The directory that holds it.
        previous_seq: Seq of the version that directory held before; None where it held none.
        patched: Whether only what changed was written; otherwise every block that was not there yet.
        tensors: How many tensors it has.
        nbytes: Their bytes.
        written_bytes: Bytes written to tensors.
        fetched_bytes: Bytes of pieces read from the store.
        seconds: Wall time.
    """

    version: str
    seq: int
    step: int
    root: str
    path: str
    previous_seq: int | None
    patched: bool
    tensors: int
    nbytes: int
    written_bytes: int
    fetched_bytes: int
    seconds: float


class CheckpointSync:
    """Keeps a checkpoint directory at a version.

    Made by `Store.sync`; use it as a context manager, or call `close`.

    One process at a time keeps a directory; it may be killed at any moment: the next one goes on. Not safe
    for concurrent use by threads.

    Memory: what changes, at most the store's memory budget (where more changes every block that differs is
    read in its place), and that budget again in flight.
    """

    def __init__(
        self,
        context: Context,
        directory: Path,
        *,
        branch: str,
        in_place: bool,
        max_shard_bytes: int,
        hold: float,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self._context = context
        self._branch = branch
        self._in_place = in_place
        self._max_shard_bytes = max_shard_bytes
        if not 0 <= hold < float("inf"):
            raise MalformedError(
                ErrorCode.INPUT_INVALID, f"it must be seconds, 0 or more, not {hold}", where="hold"
            )
        self._rest = hold
        self._progress = progress or (lambda done, total: None)
        self._target = Path(os.path.abspath(directory))
        self._home = self._target.parent / f".{self._target.name}{PREFIX}"
        place = self._target if in_place else self._home
        with ExitStack() as opened:
            try:
                self._check_target()
                place.mkdir(parents=True, exist_ok=True)
                self._lock = opened.enter_context(open_lock(place / f"{PREFIX}.lock"))
                locked = try_lock(self._lock)
            except OSError as error:
                raise _failed(self._target, error, "keep") from error
            if locked:
                opened.pop_all()
        if not locked:
            raise ConflictError(
                ErrorCode.ALREADY_EXISTS,
                "another process keeps this directory; end it first",
                where=str(directory),
            )
        paths = [self._target] if in_place else [self._home / name for name in SLOTS]
        self._slots = [Slot(path, context) for path in paths]
        self._held: dict[Path, Held] = {}

    def __enter__(self) -> CheckpointSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files and the lock."""
        for slot in self._slots:
            slot.close()
        self._lock.close()

    @property
    def version(self) -> str | None:
        """`seq:root` of the version that the directory holds, as far as is known; None without one."""
        slot = self._current()
        return None if slot is None or slot.state is None else slot.state.version

    @property
    def least_poll(self) -> float:
        """Seconds to wait between two looks for the newest version, at least: some stores limit requests."""
        return least_poll(self._context.storage)

    def update(self, step: int | None = None, seq: int | None = None) -> SyncReport | None:
        """Bring the directory to a version.

        Args:
            step: A step in the branch's lineage; also one to go back to.
            seq: A commit's number in the log. By default the newest of the branch, if its seq is above that
                of the version that is there.

        Returns:
            What was done; None where it is there already, or where the newest has to wait (see `hold` of
            `Store.sync`).

        Raises:
            As for `Follower.stage`; and StoreError where the file system fails. The version that was there
            stays, or, in place, the directory stays marked as dirty; the next attempt goes on.
        """
        if self._lock.closed:
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                "is closed, or was made before this process was forked; make a new one",
                where=str(self._target),
            )
        step, seq = check_choice(step, seq)
        try:
            return self._update(step, seq)
        except OSError as error:
            raise _failed(self._target, error) from error

    def _update(self, step: int | None, seq: int | None) -> SyncReport | None:
        started = time.perf_counter()
        current = self._current()
        here = None if current is None else self._hold(current)
        above = None if here is None else here.commit.seq
        commit = find_commit(self._context, self._branch, step=step, seq=seq, above=above)
        if here is not None and (commit is None or commit.seq == here.commit.seq):
            if here.usable.all():
                return None
            commit = here.commit  # a part of it is damaged
        slot = next((slot for slot in self._slots if slot is not current), self._slots[0])
        if commit is None or (step is None and seq is None and self._resting(slot)):
            return None
        version = load_map(self._context, commit)
        if current not in (None, slot) and here is not None and self._hold(slot) is None:
            assert current is not None
            if here.usable.all() and current.specs == specs_of(version):
                current.copy_to(slot)  # the first time: from the disk, not from the store
        report = self._bring(slot, commit, version, started)
        if not self._in_place:
            self._switch(slot)
        return report

    def _bring(self, slot: Slot, commit: Commit, version: VersionMap, started: float) -> SyncReport:
        """Bring a slot to a version: by what changes, or by every block that it lacks."""
        held = self._hold(slot)
        meter = Meter()
        written = None
        if held is not None and slot.specs == specs_of(version):
            planned = catch_up(self._context, held, commit, version, version)
            # Where most is read anew the changes would be as large as the checkpoint.
            if 2 * int((planned.fresh == NOT_FRESH).sum()) <= version.block_count:
                with suppress(OverflowError):  # more than may be in memory: then in their places
                    changes = stage_changes(
                        self._context,
                        planned,
                        slot,
                        _nothing,
                        meter=meter,
                        progress=self._counting(planned),
                        max_bytes=self._context.rebuilder.memory_budget,
                    )
                    self._held.pop(slot.path, None)
                    written = slot.patch(changes, commit, version)
        patched = written is not None
        if written is None:
            self._held.pop(slot.path, None)
            written = slot.fill(
                commit,
                version,
                max_shard_bytes=self._max_shard_bytes,
                meter=meter,
                done=self._progress,
            )
        self._held[slot.path] = Held(commit, version, np.ones(version.block_count, np.bool_))
        return SyncReport(
            version=f"{commit.seq}:{commit.root}",
            seq=commit.seq,
            step=commit.step,
            root=commit.root,
            path=str(slot.path),
            previous_seq=None if held is None else held.commit.seq,
            patched=patched,
            tensors=len(version.names),
            nbytes=int(version.tensor_bytes.sum()),
            written_bytes=written,
            fetched_bytes=meter.phase("fetch").nbytes,
            seconds=time.perf_counter() - started,
        )

    def _hold(self, slot: Slot) -> Held | None:
        """Which version a slot has, and which of its blocks are right; looked at once, and healed then."""
        if slot.path not in self._held:
            slot.load()
            if slot.state is None:
                return None
            try:
                commit = self._context.log.judged(slot.state.seq)
                version = load_map(self._context, commit)
            except MissingError:  # collected: nothing says what its bytes are
                return None
            self._held[slot.path] = Held(commit, version, blocks_held(self._context, version, slot))
        return self._held[slot.path]

    def _counting(self, planned: VersionMap) -> Callable[[int], object]:
        """A progress callback that adds up blocks."""
        changed = np.flatnonzero(planned.fresh)
        total = int(planned.block_lengths(changed, self._context.descriptor.block_bytes).sum())
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            self._progress(done, total)

        return count

    # -- the directory ---------------------------------------------------------------------------------------

    def _check_target(self) -> None:
        """Refuse what is something else.

        Raises:
            ConflictError: The directory exists, and is not one that is kept this way.
        """
        target, problem = self._target, ""
        if not target.name:
            problem = "it is the root of the file system; give a directory in it"
        elif target.is_symlink():
            ours = target.parent / target.readlink()
            if self._in_place:
                problem = "it is a link; it is kept in two slots, so leave --in-place out, or give another"
            elif ours.parent != self._home:
                problem = "it is a link to somewhere else; give another"
        elif target.exists():
            names = {path.name for path in target.iterdir()} if target.is_dir() else {""}
            if self._in_place:
                if names and not any(name.startswith(PREFIX) for name in names):
                    problem = "it exists and is not kept by sync; give a new one"
            elif any(name.startswith(PREFIX) for name in names):
                problem = "it is kept in place; use --in-place, or give another"
            elif names:
                problem = "it exists and is not an empty directory; give a new one"
        if problem:
            raise ConflictError(ErrorCode.ALREADY_EXISTS, problem, where=str(target))

    def _current(self) -> Slot | None:
        """The slot that users see."""
        if self._in_place:
            return self._slots[0]
        if not self._target.is_symlink():
            return None
        name = self._target.readlink().name
        return next((slot for slot in self._slots if slot.path.name == name), None)

    def _resting(self, slot: Slot) -> bool:
        """Whether a slot was what users see until so lately that it may still be loaded."""
        if self._in_place or not self._rest or not slot.clean or not self._target.is_symlink():
            return False
        return 0 <= time.time() - self._target.lstat().st_mtime < self._rest  # when the link was made

    def _switch(self, slot: Slot) -> None:
        """Let the link lead to a slot, all at once."""
        target = self._target
        link = self._home / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(slot.path.relative_to(target.parent))
        if target.is_dir() and not target.is_symlink():
            target.rmdir()  # empty: nobody has lost anything
        link.replace(target)
        sync_directory(target.parent)


def _nothing(specs: list[TensorSpec]) -> dict[str, Bytes]:
    """There are no new tensors: the forms are the same."""
    assert not specs
    return {}


def _failed(target: Path, error: OSError, what: str = "write") -> StoreError:
    reason = error.strerror or error
    if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        reason = f"{reason} (its file system may have no file locks; give a directory on another)"
    passing = error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSYS, errno.ENAMETOOLONG)
    message = f"cannot {what} the checkpoint: {reason}"
    return StoreError(ErrorCode.STORE_FAILED, message, where=str(target), passing=passing)
