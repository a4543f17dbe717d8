"""What a follower patches: the canonical bytes of the tensors that it follows, in memory of its own.

`sharedmirror` has the one that several processes of a host use together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltaformat.blocks import Bytes
from deltaformat.changefile import replace_file
from deltaformat.dtypes import get_dtype, tensor_nbytes
from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError
from deltaformat.patches import ChangeSet, Elements, TensorChange, as_elements, write_block
from deltaformat.rebuild import allocate
from deltaformat.tensors import TensorSpec

__all__ = [
    "Mirror",
    "MirrorState",
    "Place",
    "PrivateMirror",
    "parse_mirror",
    "read_layout",
    "spec_bytes",
    "write_changes_into",
    "write_layout",
]

_SHM = Path("/dev/shm")
_SHM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def parse_mirror(text: str) -> tuple[Path, bool]:
    """Read `file:PATH` or `shm:NAME`: the directory, and whether it must outlast a power cut.

    Raises:
        MalformedError: It is neither.
        UnsupportedError: There is no shared memory, or no file locking, on this system.
    """
    kind, _, name = text.partition(":")
    if kind == "file" and name:
        path, durable = Path(name).absolute(), True
    elif kind == "shm" and _SHM_NAME.fullmatch(name):
        path, durable = _SHM / f"deltaformat-{name}", False
        if not _SHM.is_dir():
            raise UnsupportedError(
                ErrorCode.NOT_SUPPORTED, f"there is no {_SHM} here; use file:PATH", where=text
            )
    else:
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"{text!r} is no mirror; give None, 'file:PATH' or 'shm:NAME'",
            where="mirror",
        )
    if os.name == "nt":
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED, "shared mirrors need POSIX file locks; use None", where="mirror"
        )
    return path, durable


@dataclass(frozen=True, slots=True)
class MirrorState:
    """Which version a mirror holds.

    Attributes:
        generation: Rises by one with every commit to the mirror.
        seq: The version's seq.
        step: Its step.
        root: Its root.
    """

    generation: int
    seq: int
    step: int
    root: str


class Mirror(Protocol):
    """Tensors of one version, replaced by another version's all at once."""

    @property
    def state(self) -> MirrorState | None:
        """What it holds; None before the first version."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Its tensors."""

    @property
    def leading(self) -> bool:
        """Whether this process may commit to it."""

    @property
    def closed(self) -> bool:
        """Whether it cannot be used any more; in a child by `fork` a shared one cannot."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""

    def content(self, name: str) -> Bytes:
        """A tensor's canonical bytes, a read-only view."""

    def allocate(self, specs: list[TensorSpec]) -> dict[str, Bytes]:
        """Make room for tensors of the next version."""

    def commit(self, changes: ChangeSet, *, seq: int, step: int, root: str) -> None:
        """Go to the next version; after a failure it holds what it held before."""

    def refresh(self, *, lead: bool = True) -> None:
        """Look again at what it holds; take the lead, if `lead` and nobody has it."""

    def changes_since(self, generation: int) -> list[ChangeSet] | None:
        """What was committed after a generation, in order; None where that is not known any more."""

    def reading(self) -> AbstractContextManager[None]:
        """A context manager in which the content stays as it is."""

    def close(self) -> None:
        """Let go of it."""


class PrivateMirror:
    """Tensors in this process's memory.

    Memory: their bytes. Not safe for concurrent use by threads.
    """

    leading = True
    closed = False

    def __init__(self) -> None:
        self.state: MirrorState | None = None
        self.specs: dict[str, TensorSpec] = {}
        self._data: dict[str, Bytes] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(data.size for data in self._data.values())

    def content(self, name: str) -> Bytes:
        """A tensor's canonical bytes, a read-only view."""
        view = self._data[name].view()
        view.flags.writeable = False
        return view

    def allocate(self, specs: list[TensorSpec]) -> dict[str, Bytes]:
        """Make room for tensors of the next version."""
        return {spec.name: allocate(spec_bytes(spec), where=spec.name) for spec in specs}

    def commit(self, changes: ChangeSet, *, seq: int, step: int, root: str) -> None:
        """Go to the next version; after a failure it holds what it held before."""
        data, specs = dict(self._data), dict(self.specs)
        for name in changes.removed:
            del data[name], specs[name]
        for name, change in changes.tensors.items():
            specs[name] = TensorSpec(name, change.dtype, change.shape)
            if change.content is not None:
                data[name] = change.content
        generation = 1 if self.state is None else self.state.generation + 1
        state = MirrorState(generation, seq, step, root)
        with write_changes_into(self._data, changes):
            self._data, self.specs, self.state = data, specs, state

    def refresh(self, *, lead: bool = True) -> None:
        """Nobody else changes it."""

    def changes_since(self, generation: int) -> list[ChangeSet] | None:
        """Nothing is kept, and nobody is behind."""
        current = 0 if self.state is None else self.state.generation
        return [] if generation == current else None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nobody else changes it."""
        yield

    def close(self) -> None:
        """Free the memory."""
        self.state, self.specs, self._data = None, {}, {}


@contextmanager
def write_changes_into(data: Mapping[str, Bytes], changes: ChangeSet) -> Iterator[None]:
    """Write a change set into tensors; where that fails, or the body, put back what was there."""
    done: list[tuple[TensorChange, int, Elements]] = []
    try:
        for name, change in changes.tensors.items():
            for number, block in enumerate(change.blocks):
                old = block.old
                if old is None:
                    part = as_elements(data[name], change.dtype)[block.start : block.start + block.count]
                    old = part.copy() if block.positions is None else part[block.positions]
                done.append((change, number, old))
                write_block(data[name], change.dtype, block)
        yield
    except BaseException:
        for change, number, old in reversed(done):
            write_block(data[change.name], change.dtype, change.blocks[number], back=old)
        raise


def spec_bytes(spec: TensorSpec) -> int:
    """A tensor's canonical bytes."""
    return tensor_nbytes(get_dtype(spec.dtype), spec.shape)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a mirror of files: number of the file, first byte."""

    spec: TensorSpec
    file: int
    offset: int


def write_layout(path: Path, places: Mapping[str, Place], *, durable: bool) -> None:
    """Write where each tensor lies, whole or not at all."""
    rows = [[*place.spec, place.file, place.offset] for place in places.values()]
    replace_file(path, [json.dumps(rows).encode()], durable=durable)


def read_layout(path: Path) -> dict[str, Place]:
    """Read what `write_layout` wrote.

    Raises:
        FileNotFoundError: It is not there.
    """
    return {
        name: Place(TensorSpec(name, dtype, tuple(shape)), file, offset)
        for name, dtype, shape, file, offset in json.loads(path.read_bytes())
    }
