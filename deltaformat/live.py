"""A server's weights, brought from version to version where they are (SPEC 9.3, 13).

The host keeps a mirror, since positions are coded by the magnitudes of old elements. It decodes and verifies
what was fetched there, hands positions and differences to the device, and has the result hashed there: what
is served is checked in the memory that it is served from.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from deltaformat.blocks import Bytes, block_range
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import Changes, changed_positions
from deltaformat.encodings.streams import fitting_width
from deltaformat.errors import ErrorCode, InconsistentError
from deltaformat.gpu.applying import in_place
from deltaformat.gpu.diffing import WINDOW_BYTES, BlockDiff, cut_windows
from deltaformat.gpu.engines import Engine, load_torch, on_device
from deltaformat.gpu.hashing import digests_of
from deltaformat.gpu.table import BlockTable
from deltaformat.gpu.transfer import Download
from deltaformat.inplace import BlockUpdate, shared_memory, span_of
from deltaformat.statedigests import TensorDigests, check_described, check_state
from deltaformat.torchtensors import bytes_in_place, describe, is_torch
from deltaformat.versionmap import VersionMap

if TYPE_CHECKING:
    from deltaformat.reader import Version

__all__ = ["Live", "can_follow_in_place", "followed_copies"]


class Live:
    """A server's tensors, changed in place from one version to the next.

    Between the start and the end of `advance` the tensors are in neither version, so nothing may use them
    then. After an error they are as they were before (DF-RD-03). Not safe for concurrent use by threads.

    Memory: a copy of the state on the host, the changes of one step on the host and on the device.

    Args:
        version: What the tensors are; they are verified first.
        tensors: The whole state: contiguous torch tensors on one device; two may be the same memory, but not
            overlap otherwise.
        engine: What works on the device: `auto`, `torch` or `triton`.

    Raises:
        InconsistentError: `tensors` have other names, dtypes or shapes.
        CorruptError: They are not that version.
        MalformedError: One cannot be changed in place.
    """

    def __init__(self, version: Version, tensors: Mapping[str, Any], *, engine: Engine = "auto") -> None:
        self._engine: Engine = engine
        self._names = list(version.map.names)
        self._tensors = dict(tensors)
        described = {name: describe(tensor) for name, tensor in tensors.items() if is_torch(tensor)}
        if described.keys() != tensors.keys() or len({t.device for t in tensors.values()}) > 1:
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE, "the state must be torch tensors on one device", where="state"
            )
        unknown = np.empty((0, 0), np.uint8)
        check_described(
            {name: TensorDigests(*what, unknown) for name, what in described.items()}, version.map
        )
        views = in_place([tensors[name] for name in self._names], self._names)
        self._tied = _tied(self._names, views)
        block_bytes = version.block_bytes
        self._table = BlockTable.of(views, block_bytes)
        self._version = version
        self.verify()
        self._mirror = dict(zip(self._names, _to_host(views), strict=True))

    @property
    def version(self) -> Version:
        """What the tensors are."""
        return self._version

    @property
    def root(self) -> str:
        """The root of what they are, as it was verified last."""
        return self._version.root

    def verify(self) -> str:
        """Hash the tensors where they are and compare them with the version; only digests cross.

        Under `xxh3-128` this rules out accidents; only under `blake3-256` is it evidence of content.

        Returns:
            The root.

        Raises:
            CorruptError: A block differs.
        """
        self._check(self._version)
        return self._version.root

    def advance(self, version: Version) -> str:
        """Bring the tensors to another version, in place; from its parent only what is fresh is fetched.

        Args:
            version: The next one, or any other of the same names, dtypes and shapes.

        Returns:
            Its root, which is that of the tensors as they are now on the device.

        Raises:
            InconsistentError: Its tensors are not alike.
            CorruptError: What was fetched, or the tensors, are not what they must be.
            MissingError, MalformedError, StoreError: It cannot be read.
        """
        ours = _described(self._version.map)
        if _described(version.map) != ours or version.block_bytes != self._version.block_bytes:
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE,
                f"step {version.step} has other names, dtypes or shapes than what is live; read it with"
                " state_dict() and begin anew",
                where=f"commit {version.seq}",
            )
        changes = self._changes(version)
        if self._names:
            self._apply(version, changes)
        for change in changes:
            block = self._held(change.tensor, change.block)
            if change.changes is not None:
                change.changes.apply(block)
            elif change.content is not None:
                block[:] = change.content
        self._version = version
        return version.root

    # -- one step --------------------------------------------------------------------------------------------

    def _changes(self, version: Version) -> list[BlockDiff]:
        """Fetch, decode and verify aside, and compare with the mirror, which stays as it is."""
        place_of = {name: number for number, name in enumerate(self._names)}
        starts, fresh, names = version.map.block_start, version.map.fresh, version.map.names
        parents = version.parent is not None and version.parent == self._version.seq
        aside: dict[int, Bytes] = {}
        found: list[BlockDiff] = []
        lock = threading.Lock()

        def where(block: int) -> tuple[int, int]:
            row = int(np.searchsorted(starts, block, "right")) - 1
            return place_of[names[row]], block - int(starts[row])

        def place(block: int) -> Bytes:
            held = self._held(*where(block))
            if parents and fresh[block] == 0:
                return held
            return aside.setdefault(block, held.copy())

        def done(block: int) -> None:
            number, index = where(block)
            change = self._compare(number, index, aside.pop(block))
            if change is not None:
                with lock:
                    found.append(change)

        version.rebuild_from(self._version, place, done)
        return sorted(found, key=lambda change: (change.tensor, change.block))

    def _compare(self, number: int, index: int, new: Bytes) -> BlockDiff | None:
        old = self._held(number, index)
        dtype = self._version.map.dtypes[self._version.map.index[self._names[number]]]
        width = fitting_width(new.size, get_dtype(dtype).width)
        positions = changed_positions(new, old, width)
        if not positions.size:
            return None
        if positions.size * (4 + width) > new.size:
            return BlockDiff(number, index, None, new)
        elements, before = new.view(f"<u{width}"), old.view(f"<u{width}")
        return BlockDiff(
            number, index, Changes(width, positions, elements[positions] - before[positions]), None
        )

    def _apply(self, version: Version, changes: list[BlockDiff]) -> None:
        changes = [change for change in changes if change.tensor not in self._tied]
        whole = version.map
        expected = np.concatenate([whole.digest[whole.blocks(whole.row(name))] for name in self._names])
        BlockUpdate(self._table, self._names, changes, engine=self._engine).apply(
            np.arange(len(self._table)),
            expected,
            version.digest,
            problem=f"the live tensors do not become step {version.step}: they were changed by something else"
            " since they were verified, or the device is at fault; they are left as they were",
        )

    def _held(self, number: int, index: int) -> Bytes:
        data = self._mirror[self._names[number]]
        start, end = block_range(index, data.size, self._table.block_bytes)
        return data[start:end]

    def _check(self, version: Version) -> None:
        if not self._names:
            return
        algorithm = version.digest
        (digests,) = Download([digests_of(self._table, algorithm, engine=self._engine)], "digests").take()
        state = {
            name: TensorDigests(
                *describe(self._tensors[name]),
                digests[self._table.first[number] : self._table.first[number + 1]],
            )
            for number, name in enumerate(self._names)
        }
        check_state(state, version.map)


def _to_host(views: list[Any]) -> list[Bytes]:
    """Tensors' bytes in memory of their own, copied in windows of bounded memory."""
    copies = [np.empty(view.numel(), np.uint8) for view in views]
    parts = [
        (number, start, min(start + WINDOW_BYTES, view.numel()))
        for number, view in enumerate(views)
        for start in range(0, view.numel(), WINDOW_BYTES)
    ]
    sizes = np.array([stop - start for _, start, stop in parts], np.int64)
    for window in cut_windows(np.arange(len(parts)), sizes, WINDOW_BYTES):
        chosen = [parts[part] for part in window]
        arrived = Download([views[number][start:stop] for number, start, stop in chosen], "weights").take()
        for (number, start, stop), content in zip(chosen, arrived, strict=True):
            copies[number][start:stop] = content
    return copies


def _described(version: VersionMap) -> dict[str, tuple[str, tuple[int, ...]]]:
    rows = zip(version.dtypes, version.shapes, strict=True)
    return dict(zip(version.names, rows, strict=True))


def _tied(names: list[str], views: list[Any]) -> set[int]:
    """Tensors that are the same memory as another one: what changes that changes them.

    Raises:
        InconsistentError: Two overlap otherwise.
    """
    tied = set()
    for one, other, same in shared_memory([span_of(view) for view in views]):
        if same:
            tied.add(other)
        else:
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE,
                f"tensors {names[one][:200]!a} and {names[other][:200]!a} share a part of their memory, so"
                " they cannot be changed in place; clone one of them",
                where="state",
            )
    return tied


def can_follow_in_place(
    version: Version, previous: Version, tensors: Mapping[str, Any], device: str, engine: Engine
) -> bool:
    """Whether a version can be made of copies of its parent's tensors on the device where they are.

    That is so where all are there, have what the version has, and nothing else is asked for.
    """
    if not tensors or _described(version.map) != _described(previous.map):
        return False
    if tensors.keys() != version.map.index.keys() or not all(map(is_torch, tensors.values())):
        return False
    target = load_torch().empty(0, device=device).device
    if any(tensor.device != target for tensor in tensors.values()):
        return False
    return engine != "auto" or all(map(on_device, tensors.values()))


def followed_copies(
    version: Version, previous: Version, tensors: Mapping[str, Any], *, engine: Engine
) -> dict[str, Any]:
    """What `Version.follow` gives, where `can_follow_in_place`."""
    copies = {}
    for name in version.map.names:
        tensor, bits = tensors[name], bytes_in_place(tensors[name])[2].clone()
        copies[name] = bits.view(tensor.dtype).reshape(tensor.shape) if bits.numel() else tensor.clone()
    Live(previous, copies, engine=engine).advance(version)
    return copies
