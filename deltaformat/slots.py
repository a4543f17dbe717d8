"""A checkpoint directory that is kept at a version: patched in place, and healed after it was cut short.

Beside the checkpoint's own files it has:

| file | content |
|---|---|
| `.deltaformat.json` | the version that the files are, and which sidecar files are its own |
| `.deltaformat.dirty` | there while the files are being written: which version they are to become |
| `.deltaformat.changes` | while a patch is written: what it writes, as absolute values (see `changefile`) |
| `.deltaformat.file-*` | while a patch is written: sidecar files that it brings, by their SHA-256 |

A patch is written so: (1) the changes and the new sidecar files, aside; (2) the marker; (3) the tensors, in
place, and the sidecar files; (4) the state; (5) the marker goes. Until (2) the directory is what it was. From
then on whoever opens it writes the changes again, which does no harm and needs no store: the version may have
been collected since. Where too much changes for that (a
new layout, another lineage) there is a marker without changes: then the files are filled in, and after an
interruption only those blocks are fetched that do not have their digests yet.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltaformat.blocks import Bytes, block_range
from deltaformat.changefile import read_changes, replace_file, sync_directory, write_changes
from deltaformat.checkpoint import Checkpoint, open_checkpoint
from deltaformat.context import Context
from deltaformat.errors import (
    ConflictError,
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    MissingError,
    UnsafeError,
)
from deltaformat.export import check_files, is_weights, lay_out_checkpoint
from deltaformat.metrics import Meter
from deltaformat.packs import FileRef
from deltaformat.patches import ChangeSet, write_block
from deltaformat.records import Commit
from deltaformat.sources import fetch_whole
from deltaformat.staging import blocks_held, specs_of
from deltaformat.tensors import TensorSpec
from deltaformat.versionmap import VersionMap

__all__ = ["PREFIX", "Slot", "SlotState"]

PREFIX = ".deltaformat"
STATE = f"{PREFIX}.json"
MARKER = f"{PREFIX}.dirty"
CHANGES = f"{PREFIX}.changes"
ASIDE = f"{PREFIX}.file-"
FORMAT = "deltaformat-checkpoint/1"


@dataclass(frozen=True, slots=True)
class SlotState:
    """Which version a directory is.

    Attributes:
        seq: The version's seq.
        step: Its step.
        root: Its root.
        files: Paths of its sidecar files.
    """

    seq: int
    step: int
    root: str
    files: tuple[str, ...]

    @classmethod
    def of(cls, version: Commit | Mapping[str, Any], files: Iterable[str]) -> SlotState:
        """That of a commit, or of the members of a file here."""
        if isinstance(version, Commit):
            return cls(version.seq, version.step, version.root, tuple(files))
        return cls(version["seq"], version["step"], version["root"], tuple(files))

    @property
    def version(self) -> str:
        """`seq:root`."""
        return f"{self.seq}:{self.root}"


class Slot:
    """One directory. Not safe for concurrent use, not even by several processes: its user holds a lock.

    Args:
        path: The directory; it need not be there yet.
        context: The store.
    """

    def __init__(self, path: Path, context: Context) -> None:
        self.path = path
        self._context = context
        self._checkpoint: Checkpoint | None = None
        self._maps: dict[Path, Bytes] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.state: SlotState | None = None

    def content(self, name: str) -> Bytes:
        """A tensor's canonical bytes, a view."""
        assert self._checkpoint is not None
        place = self._checkpoint.location(name)
        if not place.nbytes:
            return np.empty(0, np.uint8)
        if place.file not in self._maps:
            self._maps[place.file] = np.memmap(place.file, np.uint8, "r+")
        return np.asarray(self._maps[place.file])[place.offset : place.offset + place.nbytes]

    @property
    def clean(self) -> bool:
        """Whether the files are a version, and not between two."""
        return (self.path / STATE).exists() and not (self.path / MARKER).exists()

    def load(self) -> None:
        """Look at what is there; a patch that was cut short is completed.

        `state` is None afterwards where the files are no version, or none that is known.

        Raises:
            ConflictError: They are of another store.
            CorruptError, StoreError: A sidecar file of the version cannot be fetched.
        """
        self._forget()
        for path in self.path.glob(f"{PREFIX}*.partial"):
            path.unlink()
        members = self._read(STATE)
        if members is not None:
            self._check_store(members)
            self.state = SlotState.of(members, members["files"])
        self._open()
        marker = self._read(MARKER)
        if marker is None:
            self._drop_aside()
            return
        self._check_store(marker)
        state, self.state = self.state, None
        try:
            header, changes = read_changes(self.path / CHANGES, list(self.specs.values()))
        except (FileNotFoundError, CorruptError, LookupError):
            return
        if header["seq"] == marker["seq"] and state is not None:
            paths = [file["path"] for file in marker["files"]]
            with suppress(MissingError):  # collected, with a sidecar file: then it is no version
                self._write(changes, SlotState.of(marker, paths), marker["files"], state.files)

    def patch(self, changes: ChangeSet, commit: Commit, version: VersionMap) -> int:
        """Go to a version with the same tensors by what changes.

        Returns:
            Bytes written to tensors.

        Raises:
            OSError: The file system failed: the directory stays dirty, and is healed when it is loaded.
        """
        assert self.state is not None
        files = self._files_of(version)
        rows = {name: row for row, name in enumerate(self.specs)}
        try:
            for ref in version.files:
                if not _is_file(self.path / ref.path, _sha256(ref)):
                    self._put(self._aside(ref), fetch_whole(self._context.storage, ref.key, ref.size))
            write_changes(self.path / CHANGES, changes, rows, {"seq": commit.seq}, durable=True)
        except BaseException:
            self._drop_aside()
            raise
        self._mark(commit, files)
        state = SlotState.of(commit, [ref.path for ref in version.files])
        return self._write(changes, state, files, self.state.files)

    def fill(
        self,
        commit: Commit,
        version: VersionMap,
        *,
        max_shard_bytes: int,
        meter: Meter,
        done: Callable[[int, int], object] = lambda so_far, total: None,
    ) -> int:
        """Go to a version by reading every block that is not there yet, in its place.

        Returns:
            Bytes written to tensors.

        Raises:
            As for reading a version; the directory stays dirty, and the next attempt goes on.
        """
        files = self._files_of(version)
        wanted = specs_of(version)
        before = self._own_files()
        self.path.mkdir(parents=True, exist_ok=True)
        self._mark(commit, files, before=before)
        (self.path / CHANGES).unlink(missing_ok=True)
        (self.path / STATE).unlink(missing_ok=True)
        self.state = None
        new = self.specs != wanted or self._checkpoint is None
        if new:
            self.clear_weights()
            lay_out_checkpoint(self.path, list(wanted.values()), max_shard_bytes=max_shard_bytes)
            sync_directory(self.path)
            self._open()
        if new:  # holes: all is wanted, and not worth a look
            missing = np.arange(version.block_count)
        else:
            missing = np.flatnonzero(~blocks_held(self._context, version, self))
        total = int(version.block_lengths(missing, self._context.descriptor.block_bytes).sum())
        so_far = 0

        def report(size: int) -> None:
            nonlocal so_far
            so_far += size
            done(so_far, total)

        self._context.rebuilder.into(version, missing, self._place(version), report, meter=meter)
        state = SlotState.of(commit, [ref.path for ref in version.files])
        self._write(ChangeSet(), state, files, before)
        return total

    def copy_to(self, other: Slot) -> None:
        """Give another slot this one's weights, and its version; its sidecar files come with the next one."""
        assert self.state is not None
        other.path.mkdir(parents=True, exist_ok=True)
        own = list(other._own_files())
        members = self._members(self.state.seq, self.state.step, self.state.root, own)
        marker = members | {"files": [], "before": own}
        replace_file(other.path / MARKER, [json.dumps(marker).encode()], durable=True)
        for name in (STATE, CHANGES):
            (other.path / name).unlink(missing_ok=True)
        other.clear_weights()
        for path in sorted(path for path in self.path.iterdir() if is_weights(path.name)):
            copied = other.path / path.name
            shutil.copyfile(path, copied)
            with copied.open("rb+") as file:
                os.fsync(file.fileno())
        replace_file(other.path / STATE, [json.dumps(members).encode()], durable=True)
        (other.path / MARKER).unlink()
        sync_directory(other.path)

    def clear_weights(self) -> None:
        """Delete the weight files."""
        self._forget()
        for path in list(self.path.iterdir()):
            if is_weights(path.name):
                path.unlink()

    def close(self) -> None:
        """Let go of the files."""
        self._forget()

    # -- writing ---------------------------------------------------------------------------------------------

    def _mark(self, commit: Commit, files: list[dict[str, Any]], before: tuple[str, ...] = ()) -> None:
        members = self._members(commit.seq, commit.step, commit.root, files) | {"before": list(before)}
        replace_file(self.path / MARKER, [json.dumps(members).encode()], durable=True)

    def _write(
        self, changes: ChangeSet, state: SlotState, files: list[dict[str, Any]], before: tuple[str, ...]
    ) -> int:
        """Steps 3 to 5: also from the start again, after an interruption."""
        written = 0
        for name, change in changes.tensors.items():
            data = self.content(name)
            for block in change.blocks:
                write_block(data, change.dtype, block)
                written += block.values.nbytes
        for data in self._maps.values():
            if isinstance(data, np.memmap):
                data.flush()
        self._write_sidecars([FileRef(**members) for members in files], before)
        members = self._members(state.seq, state.step, state.root, list(state.files))
        replace_file(self.path / STATE, [json.dumps(members).encode()], durable=True)
        (self.path / MARKER).unlink()
        self._drop_aside()
        sync_directory(self.path)
        self.state = state
        return written

    def _write_sidecars(self, refs: list[FileRef], before: tuple[str, ...]) -> None:
        wanted = {ref.path for ref in refs}
        for name in set(before) - wanted:
            path = self.path / name
            if path.is_file():
                path.unlink()
            for parent in list(path.parents)[: name.count("/")]:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()
        for ref in refs:
            path, aside = self.path / ref.path, self._aside(ref)
            if _is_file(path, _sha256(ref)):
                continue
            if _is_file(aside, _sha256(ref)):
                content = aside.read_bytes()
            else:
                content = fetch_whole(self._context.storage, ref.key, ref.size)
            self._make_way(ref.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._put(path, content)

    def _put(self, path: Path, content: bytes) -> None:
        replace_file(path, [content], durable=True, temporary=self.path / f"{PREFIX}.partial")

    def _aside(self, ref: FileRef) -> Path:
        return self.path / f"{ASIDE}{_sha256(ref)}"

    def _drop_aside(self) -> None:
        """Delete what a patch needs until it is done."""
        for path in [self.path / CHANGES, *self.path.glob(f"{ASIDE}*")]:
            path.unlink(missing_ok=True)

    def _make_way(self, name: str) -> None:
        """Where the version before had a file in the place of a directory, or the other way round."""
        path = self.path / name
        for parent in list(path.parents)[: name.count("/")]:
            if parent.is_file():
                parent.unlink()
        if path.is_dir():
            shutil.rmtree(path)

    def _files_of(self, version: VersionMap) -> list[dict[str, Any]]:
        """The version's sidecar files, refused before anything is written where they cannot lie here."""
        check_files(ref.path for ref in version.files)
        for ref in version.files:
            if ref.path.startswith(PREFIX):
                raise UnsafeError(
                    ErrorCode.PATH_UNSAFE,
                    f"sidecar path {ref.path[:100]!a} would take the place of what `sync` keeps here",
                )
        return [{"path": ref.path, "key": ref.key, "size": ref.size} for ref in version.files]

    def _own_files(self) -> tuple[str, ...]:
        """Paths of sidecar files that are here, or may be, for the version that is here or was begun."""
        state, marker = self._read(STATE) or {}, self._read(MARKER) or {}
        begun = [file["path"] if isinstance(file, dict) else file for file in marker.get("files", ())]
        return tuple(dict.fromkeys([*state.get("files", ()), *marker.get("before", ()), *begun]))

    def _place(self, version: VersionMap) -> Callable[[int], Bytes]:
        block_bytes = self._context.descriptor.block_bytes

        def place(block: int) -> Bytes:
            row = int(np.searchsorted(version.block_start, block, "right")) - 1
            start, end = block_range(block - int(version.block_start[row]), version.nbytes(row), block_bytes)
            return self.content(version.names[row])[start:end]

        return place

    # -- files -----------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._checkpoint, self.specs, self._maps, self.state = None, {}, {}, None

    def _open(self) -> None:
        """Open the weights, if there are any that can be opened."""
        try:
            self._checkpoint = open_checkpoint(self.path) if self.path.is_dir() else None
        except (DeltaFormatError, OSError):
            self._checkpoint = None  # files of which some are missing: they are made anew
        self.specs = (
            {} if self._checkpoint is None else {spec.name: spec for spec in self._checkpoint.specs()}
        )

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            members = json.loads((self.path / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            members = None
        if not isinstance(members, dict) or members.get("format") != FORMAT:
            raise CorruptError(
                ErrorCode.HASH_MISMATCH,
                "cannot be read; delete the directory, it is made anew",
                where=str(self.path / name),
            )
        return members

    def _members(self, seq: int, step: int, root: str, files: list[Any]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "uuid": self._context.descriptor.uuid,
            "version": f"{seq}:{root}",
            "seq": seq,
            "step": step,
            "root": root,
            "files": files,
        }

    def _check_store(self, members: Mapping[str, Any]) -> None:
        if members["uuid"] != self._context.descriptor.uuid:
            raise ConflictError(
                ErrorCode.ALREADY_EXISTS,
                "it is kept at versions of another store; give another",
                where=str(self.path),
            )


def _sha256(ref: FileRef) -> str:
    return ref.key.rpartition("/")[2]


def _is_file(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256
