"""Lazy access to one version: only its manifest is read until a tensor or a slice is asked for (SPEC 13)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import block_range
from deltaformat.context import Context, explain_missing
from deltaformat.dtypes import get_dtype
from deltaformat.errors import ErrorCode, InconsistentError, MissingError
from deltaformat.gpu.engines import Engine
from deltaformat.live import can_follow_in_place, followed_copies
from deltaformat.mapcheck import check_fresh
from deltaformat.packs import FileRef
from deltaformat.rebuild import allocate
from deltaformat.records import Commit
from deltaformat.selection import Selection, select
from deltaformat.sources import fetch_whole
from deltaformat.statedigests import check_state, digest_state
from deltaformat.tensors import Framework, HostTensor, TensorBytes, from_host, to_host
from deltaformat.versionmap import VersionMap

__all__ = ["TensorInfo", "TensorSlice", "Version"]

Bytes = npt.NDArray[np.uint8]

COLD_BYTES = 256 << 20
"""Bytes that are rebuilt at a time where a state is brought to another version from nothing."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the manifest says of one tensor.

    Dtype name, logical shape, canonical bytes and number of blocks.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: int


class Version:
    """One version of the weights.

    Use it as a context manager, or call `close`. Safe for concurrent use by threads. Every block is checked
    against its digest before any of its bytes is returned (DF-DIG-01).

    Memory: the result, and at most the store's memory budget in flight.

    Attributes:
        map: The version's map, for tools that look at blocks and pieces.
        commit: Its record.
    """

    def __init__(
        self, context: Context, commit: Commit, version: VersionMap, *, framework: Framework, device: str
    ) -> None:
        self._context = context
        self._framework = framework
        self._device = device
        self._block_bytes = context.descriptor.block_bytes
        self.map = version
        self.commit = commit

    def __enter__(self) -> Version:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the map; tensors that were returned stay valid."""

    def __repr__(self) -> str:
        return f"<Version step={self.step} branch={self.branch!r} seq={self.seq} root={self.root}>"

    @property
    def root(self) -> str:
        """The printed root (SPEC 7.1), recomputed from the manifest when the version was opened."""
        return self.commit.root

    @property
    def step(self) -> int:
        """The training step."""
        return self.commit.step

    @property
    def seq(self) -> int:
        """The number of its record in the log.

        Rises with every commit of the store, also where steps go back.
        """
        return self.commit.seq

    @property
    def digest(self) -> str:
        """Name of the digest that blocks have in its store."""
        return self._context.descriptor.digest

    @property
    def block_bytes(self) -> int:
        """The block size of its store."""
        return self._block_bytes

    @property
    def parent(self) -> int | None:
        """Seq of the version it was encoded against."""
        return self.commit.parent

    @property
    def branch(self) -> str:
        """The branch it was committed to."""
        return self.commit.branch

    @property
    def metadata(self) -> dict[str, Any]:
        """What the committer gave as `metadata`."""
        return dict(self.commit.metadata)

    def keys(self) -> list[str]:
        """Names of all tensors, in manifest order."""
        return list(self.map.names)

    def __len__(self) -> int:
        return len(self.map.names)

    def __contains__(self, name: object) -> bool:
        return name in self.map.index

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it.

        Raises:
            MissingError: tensor-missing.
        """
        row = self._row(name)
        blocks = int(self.map.block_start[row + 1] - self.map.block_start[row])
        return TensorInfo(self.map.dtypes[row], self.map.shapes[row], self.map.nbytes(row), blocks)

    def get_bytes(self, name: str) -> TensorBytes:
        """Read a tensor as its canonical bytes: any dtype, also those a framework lacks.

        Raises:
            MissingError: tensor-missing, or an object is gone.
            CorruptError: what was read is not what was committed.
            StoreError: the storage failed.
        """
        return self.get_many([name])[name]

    def get_many(self, names: Iterable[str]) -> dict[str, TensorBytes]:
        """Read several tensors at once.

        Far fewer requests than one by one where they are small; otherwise as `get_bytes`.
        """
        read = self._read([self._row(name) for name in names])
        return {name: TensorBytes(host.dtype, host.shape, host.data) for name, host in read.items()}

    def get_tensor(self, name: str) -> Any:
        """Read a tensor in the framework asked for.

        Errors as for `get_bytes`, and UnsupportedError for a dtype it lacks.
        """
        return self._framed(self._read([self._row(name)])[name])

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed.

        `version.get_slice(name)[0:16]` reads only the blocks that hold these rows (DF-RD-01).
        """
        return TensorSlice(self, name)

    def state_dict(self) -> dict[str, Any]:
        """Read all tensors; errors as for `get_tensor`."""
        return {name: self._framed(host) for name, host in self._read(range(len(self.map.names))).items()}

    def follow(
        self, previous: Version, tensors: Mapping[str, Any], *, engine: Engine = "auto"
    ) -> dict[str, Any]:
        """Rebuild this version from its parent's tensors, fetching only what is fresh (DF-RD-02).

        Tensors on the device that results go to are copied there, and only changes cross to it; whoever goes
        from step to step keeps a `deltaformat.torch.Live`, which needs no copy and changes them in place.

        Args:
            previous: The version that `tensors` are. If it is not this one's parent, everything is read anew.
            tensors: Its whole state; left unchanged (DF-RD-03).
            engine: What works on devices: `auto`, `torch` or `triton`; the latter two on the CPU as well.

        Raises:
            InconsistentError: `tensors` lack a name of that version.
            CorruptError: A block is not what it must be: `tensors` are not that version's, or as for
                `get_tensor`.
        """
        if self.parent is None or previous.seq != self.parent:
            return self.state_dict()
        if self._framework == "pt" and can_follow_in_place(self, previous, tensors, self._device, engine):
            return followed_copies(self, previous, tensors, engine=engine)
        check_fresh(self.map, previous.map, self._block_bytes, where=f"commit {self.seq}")
        buffers = self._allocate(range(len(self.map.names)))
        for name, data in buffers.items():
            row = previous.map.index.get(name)
            if row is None:
                continue
            if name not in tensors:
                raise InconsistentError(
                    ErrorCode.PARTS_DISAGREE, "the given state lacks this tensor", where=name
                )
            old = to_host(name, tensors[name]).data
            both = min(old.size, data.size)
            data[:both] = old[:both]
        with self._explained():
            self._context.rebuilder.follow(self.map, self._place(buffers))
        return {name: self._framed(self._host(name, data)) for name, data in buffers.items()}

    def rebuild_from(
        self, previous: Version, place: Callable[[int], Bytes], done: Callable[[int], None]
    ) -> None:
        """Rebuild blocks of this version where `place` says, for those who hold `previous` and apply changes.

        From its parent only what is fresh is fetched (DF-RD-02); from any other version all blocks are, since
        equal digests say nothing there (DF-DIG-02).

        Args:
            previous: What is held.
            place: Given a block, counted over the whole map, a writable array that holds the block of
                `previous`, if that has one of the same length. Of blocks that are not fresh it is only read.
            done: Called, in any thread, with each block that was rebuilt, once it is verified.

        Raises:
            CorruptError: what is held is not `previous`, or as for `get_tensor`.
        """
        with self._explained():
            if self.parent is not None and previous.seq == self.parent:
                check_fresh(self.map, previous.map, self._block_bytes, where=f"commit {self.seq}")
                self._context.rebuilder.follow(self.map, place, done)
                return
            step = max(1, COLD_BYTES // self._block_bytes)
            for start in range(0, self.map.block_count, step):
                blocks = np.arange(start, min(start + step, self.map.block_count))
                self._context.rebuilder.into(self.map, blocks, place)
                for block in blocks.tolist():
                    done(block)

    def verify(self, tensors: Mapping[str, Any], *, engine: Engine = "auto") -> str:
        """Check that tensors are exactly this version: names, dtypes, shapes, every block's digest (SPEC 7).

        Tensors on a device are hashed there; only digests cross to the host. Under `xxh3-128` this rules out
        accidents; only under `blake3-256` is it evidence of content.

        Args:
            tensors: A whole state, of any framework and device.
            engine: What hashes on devices: `auto`, `torch` or `triton`.

        Returns:
            The root, which is that of `tensors` as well.

        Raises:
            InconsistentError: Names, a dtype or a shape differ.
            CorruptError: A block differs; the error names the first.
            UnsupportedError, MalformedError: A tensor that no version can have.
        """
        digest = self._context.descriptor.digest
        state = digest_state(tensors, block_bytes=self._block_bytes, digest=digest, engine=engine)
        check_state(state, self.map)
        return self.root

    def files(self) -> dict[str, FileRef]:
        """Sidecar files by path, with their sizes."""
        return {ref.path: ref for ref in self.map.files}

    def read_file(self, path: str) -> bytes:
        """Read a sidecar file, verified against its SHA-256.

        Raises:
            MissingError: file-missing.
            CorruptError: it is not what was committed.
        """
        ref = self.files().get(path)
        if ref is None:
            raise MissingError(
                ErrorCode.FILE_MISSING, "no such file in this version; see files()", where=path
            )
        with self._explained():
            return fetch_whole(self._context.storage, ref.key, ref.size)

    # -- reading ---------------------------------------------------------------------------------------------

    def _row(self, name: str) -> int:
        return self.map.row(name)

    def _read(self, rows: Sequence[int]) -> dict[str, HostTensor]:
        buffers = self._allocate(rows)
        wanted = [np.arange(self.map.block_start[row], self.map.block_start[row + 1]) for row in rows]
        blocks = np.concatenate(wanted) if wanted else np.empty(0, np.int64)
        with self._explained():
            self._context.rebuilder.into(self.map, blocks, self._place(buffers))
        return {name: self._host(name, data) for name, data in buffers.items()}

    def _read_slice(self, name: str, selection: Selection) -> Bytes:
        """The canonical bytes of a selection.

        Blocks that reach beyond its range are rebuilt aside, the others in their place.
        """
        row = self._row(name)
        buffer = allocate(selection.nbytes, where=name)
        first, size = int(self.map.block_start[row]), self.map.nbytes(row)

        def place(block: int) -> Bytes:
            start, end = block_range(block - first, size, self._block_bytes)
            if selection.start <= start and end <= selection.stop:
                return buffer[start - selection.start : end - selection.start]
            return edges.setdefault(block, np.empty(end - start, np.uint8))

        edges: dict[int, Bytes] = {}
        with self._explained():
            self._context.rebuilder.into(self.map, selection.blocks + first, place)
        for block, content in edges.items():
            start = (block - first) * self._block_bytes
            low, high = max(start, selection.start), min(start + content.size, selection.stop)
            buffer[low - selection.start : high - selection.start] = content[low - start : high - start]
        return selection.take(buffer)

    def _allocate(self, rows: Sequence[int]) -> dict[str, Bytes]:
        return {
            self.map.names[row]: allocate(self.map.nbytes(row), where=self.map.names[row]) for row in rows
        }

    def _place(self, buffers: Mapping[str, Bytes]) -> Callable[[int], Bytes]:
        starts = self.map.block_start

        def place(block: int) -> Bytes:
            row = int(np.searchsorted(starts, block, "right")) - 1
            data = buffers[self.map.names[row]]
            start, end = block_range(block - int(starts[row]), data.size, self._block_bytes)
            return data[start:end]

        return place

    def _host(self, name: str, data: Bytes) -> HostTensor:
        row = self._row(name)
        return HostTensor(self.map.dtypes[row], self.map.shapes[row], data)

    def _framed(self, host: HostTensor) -> Any:
        return from_host(host, self._framework, self._device)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Tell a collected version from a damaged store (DF-GC-05)."""
        try:
            yield
        except MissingError as error:
            raise explain_missing(self._context, self.commit, error) from error


class TensorSlice:
    """A tensor of a version, read as it is indexed; basic NumPy indexing on any axis.

    Follows safetensors' `get_slice`.
    """

    def __init__(self, version: Version, name: str) -> None:
        self._version = version
        self._name = name
        self._info = version.info(name)

    def get_shape(self) -> list[int]:
        """The logical shape."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype's name."""
        return self._info.dtype

    def __getitem__(self, key: object) -> Any:
        """Read a selection: only the blocks that hold a part of it are fetched.

        Raises:
            MalformedError: an index that is out of range or means nothing.
            UnsupportedError: advanced indexing, or parts of bytes of a sub-byte dtype.
            MissingError, CorruptError, StoreError: as for `Version.get_tensor`.
        """
        dtype = get_dtype(self._info.dtype)
        selection = select(
            self._info.shape, dtype, key, block_bytes=self._version._block_bytes, where=self._name
        )
        data = self._version._read_slice(self._name, selection)
        return self._version._framed(HostTensor(dtype.name, selection.shape, data))
