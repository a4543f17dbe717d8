"""Chains while they are staged: a piece's pack may not be finished yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes
from deltaformat.versionmap import VersionMap

__all__ = ["ENCODING", "LENGTH", "NO_PIECES", "OFFSET", "PACK", "SLOT", "Pieces", "StagedRow", "pieces_of"]

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
