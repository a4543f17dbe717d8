"""One mirror per host for several processes: a directory of mapped files, on disk or in /dev/shm.

One process leads: it holds the lock of the file `lock` as long as it lives, and alone writes. Others map the
files read-only; when the leader has ended, however it did, the next that looks takes the lead.

| file | content |
|---|---|
| `lock`, `reading` | nothing: what is locked |
| `state.json` | generation, version, layout; while an update is being written also `next`: what it leads to |
| `layout-N.json` | the tensors, and where each lies, since generation N |
| `data-N` | canonical bytes of the tensors that came or changed their form with generation N |
| `changes-N` | what generation N changed in place (see `changefile`); old and large ones are deleted |

An update is written so: (1) new tensors into `data-N`, the layout into `layout-N.json`, the changes, as
absolute values, into `changes-N`; (2) with `reading` locked against all readers, `state.json` says `next`;
(3) the changes are written in place; (4) `state.json` says the new generation. Small files take their names
when they are whole. A leader that dies before (2) has changed nothing; one that dies later has left all that
its successor needs to complete the update, by writing the changes again. Whoever reads content in place holds
a shared lock of `reading`, and so sees one whole version; whoever follows needs but the `changes-N`, which
never change.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from deltaformat.blocks import Bytes
from deltaformat.changefile import read_changes, replace_file, write_changes
from deltaformat.errors import (
    ConflictError,
    CorruptError,
    ErrorCode,
    StoreError,
)
from deltaformat.locks import open_lock, try_lock, unlock
from deltaformat.mirror import MirrorState, Place, read_layout, spec_bytes, write_changes_into, write_layout
from deltaformat.patches import ChangeSet, write_block
from deltaformat.tensors import TensorSpec

__all__ = ["KEPT_CHANGES", "SharedMirror"]

FORMAT = "deltaformat-mirror/1"
KEPT_CHANGES = 8
"""Updates that a reader may be behind before it must read all tensors anew."""
KEPT_SHARE = 4
KEPT_BYTES = 16 << 20
"""The files of changes have a quarter of the tensors' bytes, or so many, if that is more."""
READERS_TIMEOUT_S = 60.0
POLL_S = 0.005
_ALIGNMENT = 64


class SharedMirror:
    """A mirror in a directory (see above). Not safe for concurrent use by threads.

    Args:
        directory: Where; made if it is not there.
        durable: Whether it must outlast a power cut.
        uuid: The store's identity: a mirror is of one store.

    Raises:
        ConflictError: It is a mirror of another store, or the directory holds something else.
        StoreError: It cannot be made or read.
    """

    def __init__(self, directory: Path, *, durable: bool, uuid: str) -> None:
        self._directory = directory
        self._durable = durable
        self._uuid = uuid
        self._layout: int | None = None
        self._places: dict[str, Place] = {}
        self._files: dict[int, Bytes] = {}
        self._allocated: dict[str, Place] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.state: MirrorState | None = None
        self.leading = False
        self._pending: dict[str, Any] | None = None
        self._unsettled = False
        with self._failing("make"):
            directory.mkdir(parents=True, exist_ok=True)
            self._check_place()
            self._lock = open_lock(directory / "lock")
            self._reading = open_lock(directory / "reading")

    @property
    def closed(self) -> bool:
        """Whether it cannot be used any more, as in a child by `fork`."""
        return self._lock.closed

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(map(spec_bytes, self.specs.values()))

    def content(self, name: str) -> Bytes:
        """A tensor's canonical bytes, a read-only view."""
        view = self._view(self._places[name]).view()
        view.flags.writeable = False
        return view

    def allocate(self, specs: list[TensorSpec]) -> dict[str, Bytes]:
        """Make room for tensors of the next version, in a file of its own."""
        number = 1 if self.state is None else self.state.generation + 1
        with self._failing("write"):
            self._settle()
        self._forget(number)
        self._allocated = {}
        offset = 0
        for spec in specs:
            self._allocated[spec.name] = Place(spec, number, offset)
            offset += -(-spec_bytes(spec) // _ALIGNMENT) * _ALIGNMENT
        if specs:
            path = self._directory / f"data-{number}"
            with self._failing("write"):
                path.unlink(missing_ok=True)
                with path.open("xb") as file:
                    if hasattr(os, "posix_fallocate"):  # a full disk is told here, and not by a signal later
                        os.posix_fallocate(file.fileno(), 0, max(offset, 1))
                    else:
                        file.truncate(max(offset, 1))
        return {name: self._view(place) for name, place in self._allocated.items()}

    def commit(self, changes: ChangeSet, *, seq: int, step: int, root: str) -> None:
        """Go to the next version; after a failure it holds what it held before.

        Raises:
            StoreError: A reader does not end, or the file system failed.
        """
        generation = 1 if self.state is None else self.state.generation + 1
        places = {name: place for name, place in self._places.items() if name not in changes.removed}
        for name, change in changes.tensors.items():
            if change.content is not None:
                places[name] = self._allocated[name]
        layout = generation if self._layout is None or changes.layout_changes else self._layout
        state = MirrorState(generation, seq, step, root)
        try:
            with self._failing("write"):
                self._settle()
                if layout == generation:
                    write_layout(self._path("layout", layout), places, durable=self._durable)
                    if generation in self._files and self._durable:
                        self._flush(generation)
                rows = {name: row for row, name in enumerate(places)}
                header = {"generation": generation, "layout": layout}
                write_changes(self._path("changes", generation), changes, rows, header, durable=self._durable)
            with self._exclusive(), self._failing("write"):
                views = {
                    name: self._view(self._places[name]) for name in changes.tensors if name in self._places
                }
                self._unsettled = True
                try:
                    self._write_state(self.state, layout=self._layout, following=(state, layout))
                    with write_changes_into(views, changes):
                        self._flush_touched(changes)
                        self._write_state(state, layout=layout)
                except BaseException:
                    with suppress(OSError):
                        self._settle()
                    raise
                self._unsettled = False
        except BaseException:
            if not self._unsettled:  # otherwise it may be that a successor has to complete it
                self._path("changes", generation).unlink(missing_ok=True)
            raise
        self.state, self._layout, self._places = state, layout, places
        self.specs = {name: place.spec for name, place in places.items()}
        self._allocated = {}
        self._tidy()

    def refresh(self, *, lead: bool = True) -> None:
        """Look again at what it holds; where nobody leads, take the lead, and complete what its leader left.

        Raises:
            ConflictError: It is a mirror of another store.
            CorruptError: It is damaged; it may be deleted.
        """
        if self.leading:
            return
        with self._failing("read"):
            if lead and try_lock(self._lock):
                self.leading = True
                self._files.clear()  # they were mapped to be read only
                try:
                    self._load()
                    self._complete()
                    self._tidy()
                except BaseException:
                    self.leading = False
                    self._files.clear()
                    unlock(self._lock)
                    raise
            else:
                self._load()

    def changes_since(self, generation: int) -> list[ChangeSet] | None:
        """What was committed after a generation, in order; None where that is not known any more."""
        if (
            self.state is None
            or self._layout is None
            or not self._layout <= generation <= self.state.generation
        ):
            return None  # what comes with a layout lies where it may have changed since
        specs = [place.spec for place in self._places.values()]
        numbers = range(generation + 1, self.state.generation + 1)
        try:
            return [read_changes(self._path("changes", number), specs)[1] for number in numbers]
        except FileNotFoundError:
            return None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the content as it is while the body runs; the leader waits.

        Raises:
            StoreError: No reader gets its turn, or an update was left half done and nobody completes it.
        """
        if self.leading:
            yield
            return
        deadline = time.monotonic() + READERS_TIMEOUT_S
        while True:
            if try_lock(self._reading, shared=True):
                self.refresh()
                if self.leading or self._pending is None:
                    break
                unlock(self._reading)  # its leader ended while it wrote: somebody is about to complete it
            if time.monotonic() > deadline:
                raise StoreError(
                    ErrorCode.STORE_FAILED,
                    "the mirror is being written without end",
                    where=str(self._directory),
                )
            time.sleep(POLL_S)
        try:
            yield
        finally:
            unlock(self._reading)

    def close(self) -> None:
        """Let go of it; it stays for other processes, and the next run."""
        self._lock.close()
        self._reading.close()
        self.leading = False
        self._files.clear()

    # -- files -----------------------------------------------------------------------------------------------

    def _path(self, kind: str, number: int) -> Path:
        return self._directory / (f"layout-{number}.json" if kind == "layout" else f"{kind}-{number}")

    def _check_place(self) -> None:
        """Refuse a directory that is used for something else."""
        names = {entry.name for entry in self._directory.iterdir()}
        if names and not names & {"lock", "state.json"}:
            raise ConflictError(
                ErrorCode.ALREADY_EXISTS,
                "it is no mirror and not empty; give another",
                where=str(self._directory),
            )

    def _load(self) -> None:
        """Read what the state says, and the layout if that has changed."""
        for _ in range(100):  # a layout may be replaced between the two
            try:
                members = json.loads((self._directory / "state.json").read_bytes())
            except FileNotFoundError:
                self.state = None
                return
            except ValueError:
                members = None
            if not isinstance(members, dict) or members.get("format") != FORMAT:
                raise self._damaged(f"its state is not of {FORMAT}")
            if members["uuid"] != self._uuid:
                raise ConflictError(
                    ErrorCode.ALREADY_EXISTS,
                    "it is a mirror of another store; give another",
                    where=str(self._directory),
                )
            try:
                if members["layout"] != self._layout and members["layout"] is not None:
                    self._places = read_layout(self._path("layout", members["layout"]))
            except FileNotFoundError:
                continue
            self._layout, self._pending = members["layout"], members["next"]
            self.specs = {name: place.spec for name, place in self._places.items()}
            self.state = None if members["current"] is None else MirrorState(**members["current"])
            used = {place.file for place in self._places.values()}
            self._files = {number: data for number, data in self._files.items() if number in used}
            return
        raise self._damaged("its layout is missing")

    def _complete(self) -> None:
        """Write the changes again that a leader had begun to write when it ended."""
        pending = self._pending
        if pending is None:
            return
        state, layout = MirrorState(**pending["state"]), pending["layout"]
        try:
            places = self._places if layout == self._layout else read_layout(self._path("layout", layout))
            _, changes = read_changes(
                self._path("changes", state.generation), [place.spec for place in places.values()]
            )
        except (FileNotFoundError, CorruptError, LookupError):
            self._renumber(state.generation)
            return
        with self._exclusive():
            for name, change in changes.tensors.items():
                for block in change.blocks:
                    write_block(self._view(places[name]), change.dtype, block)
            self._places = places
            self._flush_touched(changes)
            self._write_state(state, layout=layout)
        self.state, self._layout, self._pending = state, layout, None
        self.specs = {name: place.spec for name, place in places.items()}

    def _renumber(self, generation: int) -> None:
        """Give up an update that cannot be completed.

        The mirror may hold a part of it: digests tell which blocks are right. The new generation, which has
        no changes, lets nobody go on from the one before: what the next update changes is not all that
        differs from that.
        """
        self._path("changes", generation).unlink(missing_ok=True)
        if self.state is not None:
            self.state = replace(self.state, generation=generation)
        self._write_state(self.state, layout=self._layout)
        self._pending = None

    def _settle(self) -> None:
        """After an update that failed: say that nothing is under way, if that could not be said then."""
        if self._unsettled:
            self._write_state(self.state, layout=self._layout)
            self._unsettled = False

    def _write_state(
        self,
        state: MirrorState | None,
        *,
        layout: int | None,
        following: tuple[MirrorState, int] | None = None,
    ) -> None:
        members = {
            "format": FORMAT,
            "uuid": self._uuid,
            "current": None if state is None else asdict(state),
            "layout": layout,
            "next": None if following is None else {"state": asdict(following[0]), "layout": following[1]},
        }
        replace_file(self._directory / "state.json", [json.dumps(members).encode()], durable=self._durable)

    def _view(self, place: Place) -> Bytes:
        size = spec_bytes(place.spec)
        if not size:
            return np.empty(0, np.uint8)
        if place.file not in self._files:
            path = self._path("data", place.file)
            self._files[place.file] = np.memmap(path, np.uint8, "r+" if self.leading else "r")
        return np.asarray(self._files[place.file])[place.offset : place.offset + size]

    def _flush(self, number: int) -> None:
        data = self._files.get(number)
        if isinstance(data, np.memmap):
            data.flush()

    def _flush_touched(self, changes: ChangeSet) -> None:
        if self._durable:
            for number in {self._places[name].file for name in changes.tensors if name in self._places}:
                self._flush(number)

    def _forget(self, number: int) -> None:
        self._files.pop(number, None)

    def _tidy(self) -> None:
        """Delete what no state needs any more, also what others left behind when they ended."""
        current = 0 if self.state is None else self.state.generation
        used = {f"data-{place.file}" for place in self._places.values()}
        used |= {f"layout-{self._layout}.json", "state.json", "lock", "reading"}
        used |= {f"changes-{number}" for number in self._kept_changes(current)}
        with suppress(OSError):  # what cannot be deleted now is deleted another time
            for path in self._directory.iterdir():
                if path.name not in used and re.fullmatch(r"(data|layout|changes|state)[-.].*", path.name):
                    path.unlink(missing_ok=True)
        files = {place.file for place in self._places.values()}
        self._files = {number: data for number, data in self._files.items() if number in files}

    def _kept_changes(self, current: int) -> Iterator[int]:
        """Which files of changes are kept, newest first."""
        left = max(self.nbytes // KEPT_SHARE, KEPT_BYTES)
        for number in range(current, max(0, current - KEPT_CHANGES), -1):
            with suppress(OSError):
                left -= self._path("changes", number).stat().st_size
            if left < 0:
                return
            yield number

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Wait until no reader reads in place, and keep new ones out."""
        deadline = time.monotonic() + READERS_TIMEOUT_S
        while not try_lock(self._reading):
            if time.monotonic() > deadline:
                raise StoreError(
                    ErrorCode.STORE_FAILED,
                    f"has been read for {READERS_TIMEOUT_S:g} s; its reader must commit or roll back",
                    where=str(self._directory),
                )
            time.sleep(POLL_S)
        try:
            yield
        finally:
            unlock(self._reading)

    @contextmanager
    def _failing(self, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                ErrorCode.STORE_FAILED,
                f"cannot {operation} the mirror: {error.strerror or error}",
                where=str(self._directory),
            ) from error

    def _damaged(self, problem: str) -> CorruptError:
        return CorruptError(
            ErrorCode.HASH_MISMATCH,
            f"{problem}; delete the mirror, it is made anew",
            where=str(self._directory),
        )
