"""The map of a version in memory: columns over tensors, blocks and pieces, as NumPy arrays (SPEC 11.1).

No Python object is made per block or per piece. Arrays may be views of a manifest's bytes, so they are
read-only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain as chained

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import name_bytes
from deltaformat.columns import prefix_sums, ranges, tensor_sizes
from deltaformat.digests import tensor_leaf, version_root
from deltaformat.errors import (
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    MissingError,
    UnsafeError,
)
from deltaformat.packs import FileRef, PackEntry, PackRef

__all__ = [
    "MAX_DEPTH",
    "MAX_PACKS",
    "MAX_PARTS",
    "MAX_TENSORS",
    "NOT_FRESH",
    "VersionMap",
    "VersionMapBuilder",
    "merge",
    "object_changes",
]

NOT_FRESH = 255
"""The value of `fresh` for a block that is read from its chain's first piece (SPEC 11.2)."""
MAX_DEPTH = 64
MAX_PACKS = 1 << 20
MAX_PARTS = 4_096
MAX_TENSORS = 1 << 24

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class VersionMap:
    """Every tensor, block and piece of a version, or of a part of one.

    Attributes:
        names: Each tensor's name.
        dtypes: Its dtype name.
        shapes: Its logical shape.
        block_start: Index of its first block; one more entry than tensors, the last is the number of blocks.
        digest: Each block's digest, shape (blocks, digest size).
        fresh: How many trailing pieces turn the parent's block into this one, or `NOT_FRESH`.
        depth: Its number of pieces.
        piece_start: Index of its first piece; one more entry than blocks.
        pack: Each piece's pack, as an index into `packs`.
        offset: Where it begins in that pack.
        length: Its bytes.
        encoding: Its encoding code.
        packs: The pack table.
        files: Sidecar files.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    block_start: Integers
    digest: Bytes
    fresh: Bytes
    depth: Bytes
    piece_start: Integers
    pack: npt.NDArray[np.int32]
    offset: Integers
    length: Integers
    encoding: Bytes
    packs: tuple[PackEntry, ...]
    files: tuple[FileRef, ...] = ()

    def __repr__(self) -> str:
        return f"<VersionMap tensors={len(self.names)} blocks={len(self.depth)} pieces={len(self.pack)}>"

    @cached_property
    def index(self) -> dict[str, int]:
        """Each name's row."""
        return {name: row for row, name in enumerate(self.names)}

    @cached_property
    def tensor_bytes(self) -> Integers:
        """Each tensor's canonical bytes."""
        ranks = np.fromiter(map(len, self.shapes), np.int64, len(self.shapes))
        try:
            dims = np.fromiter(chained.from_iterable(self.shapes), np.int64, int(ranks.sum()))
        except OverflowError:
            raise _invalid("a dimension exceeds 2^63 - 1 (DF-MAN-06)", "") from None
        return tensor_sizes(self.dtypes, ranks, dims)

    @property
    def block_count(self) -> int:
        """Number of blocks of all tensors."""
        return len(self.depth)

    def row(self, name: str) -> int:
        """Find a tensor.

        Raises:
            MissingError: There is none of that name (tensor-missing).
        """
        found = self.index.get(name)
        if found is None:
            raise MissingError(
                ErrorCode.TENSOR_MISSING, f"no tensor {name[:200]!a} in this version", where=name[:200]
            )
        return found

    def nbytes(self, row: int) -> int:
        """Canonical bytes of one tensor."""
        return int(self.tensor_bytes[row])

    def blocks(self, row: int) -> slice:
        """Where one tensor's blocks lie among all."""
        return slice(int(self.block_start[row]), int(self.block_start[row + 1]))

    def block_rows(self, blocks: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
        """The tensor (row) of each of `blocks`, which count over all tensors."""
        return np.searchsorted(self.block_start, blocks, "right") - 1

    def block_lengths(self, blocks: npt.NDArray[np.integer], block_bytes: int) -> Integers:
        """Decoded bytes of each of `blocks`; a tensor's last may be short (DF-BLK-02)."""
        rows = self.block_rows(blocks)
        left: Integers = self.tensor_bytes[rows] - (blocks - self.block_start[rows]) * block_bytes
        return np.minimum(left, block_bytes)

    def chain_identity(self, block: int) -> bytes:
        """Name a block's stored form: SHA-256 over its digest and where each of its pieces lies."""
        pieces = slice(int(self.piece_start[block]), int(self.piece_start[block + 1]))
        packs = [self.packs[pack] for pack in self.pack[pieces]]
        identity = hashlib.sha256(self.digest[block].tobytes())
        for column in (self.offset[pieces], self.length[pieces], self.encoding[pieces]):
            identity.update(column.tobytes())
        identity.update(
            "|".join(pack.key if isinstance(pack, PackRef) else pack.sha256 for pack in packs).encode()
        )
        return identity.digest()

    def root(self, digest: str, block_bytes: int) -> str:
        """Compute the version's root, in printed form (DF-DIG-03)."""
        bounds = self.block_start.tolist()
        leaves = (
            (name_bytes(name), tensor_leaf(name, dtype, shape, self.digest[start:end]))
            for name, dtype, shape, start, end in zip(
                self.names, self.dtypes, self.shapes, bounds, bounds[1:], strict=False
            )
        )
        return version_root(digest, block_bytes, leaves)

    def take(self, rows: Sequence[int] | Integers) -> VersionMap:
        """The map of some tensors, with the same pack table and no files."""
        wanted = np.asarray(rows, np.int64)
        block_counts = self.block_start[wanted + 1] - self.block_start[wanted]
        blocks = ranges(self.block_start[wanted], block_counts)
        depth = self.depth[blocks]
        pieces = ranges(self.piece_start[blocks], depth.astype(np.int64))
        return VersionMap(
            names=tuple(self.names[row] for row in wanted),
            dtypes=tuple(self.dtypes[row] for row in wanted),
            shapes=tuple(self.shapes[row] for row in wanted),
            block_start=prefix_sums(block_counts),
            digest=self.digest[blocks],
            fresh=self.fresh[blocks],
            depth=depth,
            piece_start=prefix_sums(depth),
            pack=self.pack[pieces],
            offset=self.offset[pieces],
            length=self.length[pieces],
            encoding=self.encoding[pieces],
            packs=self.packs,
        )

    def compact(self) -> VersionMap:
        """The same map with just the packs that pieces name, each once, in order of first use."""
        seen: dict[PackEntry, int] = {}  # packs with the same bytes have the same key
        same = np.array([seen.setdefault(entry, at) for at, entry in enumerate(self.packs)], np.int32)
        used, first, inverse = np.unique(same[self.pack], return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        packs = tuple(self.packs[index] for index in used[order])
        return replace(self, pack=rank[inverse], packs=packs)

    def objects(self) -> dict[str, int]:
        """Key and size of every pack and file inside the store that this version uses."""
        entries = (self.packs[index] for index in np.unique(self.pack))
        sizes = {entry.key: entry.size for entry in entries if isinstance(entry, PackRef)}
        return sizes | {file.key: file.size for file in self.files}


def object_changes(
    version: VersionMap, parent: VersionMap | None
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Key and size of the objects that `version` uses and its parent does not, and the other way round."""
    new = version.objects()
    old = parent.objects() if parent is not None else {}
    return sorted(new.items() - old.items()), sorted(old.items() - new.items())


class VersionMapBuilder:
    """Builds a map tensor by tensor.

    Args:
        digest_bytes: Size of a digest.
        packs: The pack table that pieces index; what no piece names is left out at the end.
    """

    def __init__(self, *, digest_bytes: int, packs: Sequence[PackEntry]) -> None:
        self._packs = tuple(packs)
        self._parts = [
            VersionMap(
                names=(),
                dtypes=(),
                shapes=(),
                block_start=np.zeros(1, np.int64),
                digest=np.empty((0, digest_bytes), np.uint8),
                fresh=np.empty(0, np.uint8),
                depth=np.empty(0, np.uint8),
                piece_start=np.zeros(1, np.int64),
                pack=np.empty(0, np.int32),
                offset=np.empty(0, np.int64),
                length=np.empty(0, np.int64),
                encoding=np.empty(0, np.uint8),
                packs=self._packs,
            )
        ]

    def add_tensor(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        digests: Bytes,
        fresh: Bytes,
        depth: Bytes,
        pack: npt.NDArray[np.integer],
        offset: npt.NDArray[np.integer],
        length: npt.NDArray[np.integer],
        encoding: npt.NDArray[np.integer],
    ) -> None:
        """Add one tensor: arrays over its blocks, then arrays over the pieces of all its blocks in order.

        Names, sizes and counts are checked when the map is encoded.
        """
        self._parts.append(
            VersionMap(
                names=(name,),
                dtypes=(dtype,),
                shapes=(tuple(shape),),
                block_start=np.array([0, len(depth)], np.int64),
                digest=digests.reshape(len(depth), self._parts[0].digest.shape[1]),
                fresh=fresh,
                depth=depth,
                piece_start=_NO_STARTS,
                pack=np.asarray(pack, np.int32),
                offset=np.asarray(offset, np.int64),
                length=np.asarray(length, np.int64),
                encoding=np.asarray(encoding, np.uint8),
                packs=self._packs,
            )
        )

    def add_rows(
        self,
        source: VersionMap,
        rows: Sequence[int] | Integers,
        *,
        fresh: int | None = 0,
        first_pack: int = 0,
    ) -> None:
        """Add tensors of another map as they are, all at once: those that did not change.

        Args:
            source: The map that has them, usually the parent's.
            rows: Which.
            fresh: Their blocks' new `fresh`; None keeps what `source` says.
            first_pack: Where `source.packs` begins in the builder's pack table.
        """
        taken = source.take(rows)
        self._parts.append(
            replace(
                taken,
                fresh=taken.fresh if fresh is None else np.full(len(taken.fresh), fresh, np.uint8),
                pack=taken.pack + np.int32(first_pack),
            )
        )

    def finish(self) -> VersionMap:
        """Join what was added.

        Raises:
            InconsistentError: A name was added twice.
        """
        return _concatenate(self._parts, self._packs, ()).compact()


_NO_STARTS = np.empty(0, np.int64)


def merge(parts: Sequence[VersionMap], *, where: str = "") -> VersionMap:
    """Unite the parts of a version; their pack tables become one.

    Raises:
        InconsistentError: There is no part; a name occurs in two (DF-MAN-05); two give one object different
            sizes.
        UnsafeError: A sidecar path occurs in two (DF-MAN-10).
        LimitError: There are more parts, tensors or packs than SPEC 16 allows.
    """
    if not parts:
        raise InconsistentError(
            ErrorCode.PARTS_DISAGREE, "a version has at least one manifest part", where=where
        )
    if len(parts) > MAX_PARTS:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED, f"{len(parts)} manifest parts exceed {MAX_PARTS}", where=where
        )
    if sum(len(part.names) for part in parts) > MAX_TENSORS:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED, f"the parts have more than {MAX_TENSORS} tensors", where=where
        )
    if len(parts) == 1:
        return parts[0]
    table: dict[str, tuple[int, PackEntry]] = {}
    renumbered = []
    for part in parts:
        renumber = np.empty(len(part.packs), np.int32)
        for old, entry in enumerate(part.packs):
            name = entry.key if isinstance(entry, PackRef) else entry.url
            new, known = table.setdefault(name, (len(table), entry))
            if known != entry:
                raise InconsistentError(
                    ErrorCode.PARTS_DISAGREE,
                    f"two parts give {name[:200]!a} another size or hash",
                    where=where,
                )
            renumber[old] = new
        renumbered.append(replace(part, pack=renumber[part.pack]))
    if len(table) > MAX_PACKS:
        raise LimitError(ErrorCode.LIMIT_EXCEEDED, f"the parts name more than {MAX_PACKS} packs", where=where)
    files = tuple(chained.from_iterable(part.files for part in parts))
    if len({file.path for file in files}) != len(files):
        raise UnsafeError(
            ErrorCode.PATH_UNSAFE, "two parts have a sidecar file of the same path", where=where
        )
    return _concatenate(renumbered, tuple(entry for _, entry in table.values()), files, where=where)


def _concatenate(
    parts: Sequence[VersionMap], packs: tuple[PackEntry, ...], files: tuple[FileRef, ...], *, where: str = ""
) -> VersionMap:
    names = tuple(chained.from_iterable(part.names for part in parts))
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InconsistentError(
            ErrorCode.PARTS_DISAGREE,
            f"tensor {twice[:200]!a} occurs twice; give each name once (DF-MAN-05)",
            where=where,
        )
    depth = np.concatenate([part.depth for part in parts])
    return VersionMap(
        names=names,
        dtypes=tuple(chained.from_iterable(part.dtypes for part in parts)),
        shapes=tuple(chained.from_iterable(part.shapes for part in parts)),
        block_start=prefix_sums(np.concatenate([np.diff(part.block_start) for part in parts])),
        digest=np.concatenate([part.digest for part in parts]),
        fresh=np.concatenate([part.fresh for part in parts]),
        depth=depth,
        piece_start=prefix_sums(depth),
        pack=np.concatenate([part.pack for part in parts]),
        offset=np.concatenate([part.offset for part in parts]),
        length=np.concatenate([part.length for part in parts]),
        encoding=np.concatenate([part.encoding for part in parts]),
        packs=packs,
        files=files,
    )


def _invalid(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.MANIFEST_INVALID, message, where=where)
