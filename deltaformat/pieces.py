"""Chains while they are staged: a piece's pack may not be finished yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes
from deltaformat.columns import prefix_sums
from deltaformat.packs import PackRef
from deltaformat.versionmap import VersionMap, VersionMapBuilder

__all__ = [
    "ENCODING",
    "LENGTH",
    "NO_PIECES",
    "OFFSET",
    "PACK",
    "SLOT",
    "Pieces",
    "StagedRow",
    "build_map",
    "pieces_of",
]

Pieces = npt.NDArray[np.int64]
"""A chain while it is staged, shape (pieces, 5): pack id, offset, length, encoding, and the slot in a pack
that is not finished (the offset then counts from there), or -1."""
PACK, OFFSET, LENGTH, ENCODING, SLOT = range(5)
NO_PIECES: Pieces = np.empty((0, 5), np.int64)


def pieces_of(version: VersionMap, block: int) -> Pieces:
    """The chain of block `block` (counted over all tensors) of `version`, shape (depth, 5)."""
    start, end = version.piece_start[block], version.piece_start[block + 1]
    chain = np.empty((end - start, 5), np.int64)
    chain[:, PACK] = version.pack[start:end]
    chain[:, OFFSET] = version.offset[start:end]
    chain[:, LENGTH] = version.length[start:end]
    chain[:, ENCODING] = version.encoding[start:end]
    chain[:, SLOT] = -1
    return chain


@dataclass(frozen=True, slots=True)
class StagedRow:
    """A staged tensor as columns: all that its row of the map needs, and none of the caller's memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digests: Bytes
    fresh: Bytes
    depth: Bytes
    pack: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.uint32]
    encoding: Bytes
    slot: npt.NDArray[np.int32]

    @classmethod
    def of_chains(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        digests: Bytes,
        fresh: Sequence[int],
        chains: Sequence[Pieces],
    ) -> StagedRow:
        """Make a row of its blocks' digests, `fresh` and chains."""
        pieces = np.concatenate([NO_PIECES, *chains])
        return cls(
            name,
            dtype,
            shape,
            digests=digests,
            fresh=np.array(fresh, np.uint8),
            depth=np.fromiter(map(len, chains), np.uint8, len(chains)),
            pack=pieces[:, PACK].astype(np.int32),
            offset=pieces[:, OFFSET].copy(),
            length=pieces[:, LENGTH].astype(np.uint32),
            encoding=pieces[:, ENCODING].astype(np.uint8),
            slot=pieces[:, SLOT].astype(np.int32),
        )

    def chain(self, index: int) -> Pieces:
        """The chain of block `index`."""
        start = int(self.depth[:index].sum(dtype=np.int64))
        part = slice(start, start + int(self.depth[index]))
        columns = (
            self.pack[part],
            self.offset[part],
            self.length[part],
            self.encoding[part],
            self.slot[part],
        )
        return np.stack([column.astype(np.int64) for column in columns], axis=1)


def build_map(
    parent: VersionMap | None,
    rows: Mapping[str, StagedRow | None],
    packs: Sequence[PackRef],
    offsets: Sequence[npt.NDArray[np.int64]],
    *,
    digest_bytes: int,
) -> VersionMap:
    """Make the map of what was staged, once its packs are durable.

    Args:
        parent: The parent version's map, or None.
        rows: Name -> row; None: the parent's.
        packs: The new packs.
        offsets: Where each slot of each of them begins.
        digest_bytes: Size of a digest.
    """
    old = parent.packs if parent is not None else ()
    builder = VersionMapBuilder(digest_bytes=digest_bytes, packs=[*old, *packs])
    if parent is not None:
        builder.add_rows(parent, [parent.index[name] for name, row in rows.items() if row is None])
    starts = prefix_sums(np.fromiter(map(len, offsets), np.int64, len(offsets)))
    table = np.concatenate([np.empty(0, np.int64), *offsets])  # of all slots of all packs
    for row in rows.values():
        if row is None:
            continue
        new = row.slot >= 0
        row.offset[new] += table[starts[row.pack[new] - len(old)] + row.slot[new]]
        builder.add_tensor(
            row.name,
            row.dtype,
            row.shape,
            digests=row.digests,
            fresh=row.fresh,
            depth=row.depth,
            pack=row.pack,
            offset=row.offset,
            length=row.length,
            encoding=row.encoding,
        )
    return builder.finish()
