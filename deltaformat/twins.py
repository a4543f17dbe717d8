"""Content that is already stored elsewhere: tied, renamed or moved blocks take the chain that exists.

A digest finds a candidate; only equal bytes confirm it (DF-DIG-02).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.baseline import Baseline
from deltaformat.rebuild import Rebuilder
from deltaformat.versionmap import NOT_FRESH, VersionMap

__all__ = ["ENCODING", "LENGTH", "OFFSET", "PACK", "SLOT", "Pieces", "Twins", "pieces_of"]

Bytes = npt.NDArray[np.uint8]

Pieces = npt.NDArray[np.int64]
"""A chain while it is staged, shape (pieces, 5): pack id, offset, length, encoding, and the slot in a pack
that is not finished (the offset then counts from there), or -1."""
PACK, OFFSET, LENGTH, ENCODING, SLOT = range(5)


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
class _Staged:
    name: str
    index: int
    chain: Pieces
    fresh: int
    before: Pieces


class Twins:
    """Finds blocks with the same content in the parent version and among those staged so far.

    Attributes:
        read_bytes: Decoded bytes that were read back to confirm a candidate.
    """

    def __init__(self, parent: VersionMap | None, baseline: Baseline, rebuilder: Rebuilder) -> None:
        self._parent = parent
        self._baseline = baseline
        self._rebuilder = rebuilder
        self.read_bytes = 0
        self._staged: dict[bytes, _Staged] = {}
        self._sorted: tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]] | None = None

    def remember(
        self, digest: bytes, name: str, index: int, *, chain: Pieces, fresh: int, before: Pieces
    ) -> None:
        """Note a staged block, whose bytes the baseline now holds.

        `before` is its chain in the parent (or empty).
        """
        self._staged.setdefault(digest, _Staged(name, index, chain, fresh, before))

    def staged(self, digest: bytes, content: Bytes, before: Pieces) -> tuple[Pieces, int] | None:
        """The chain and `fresh` that a block with `content` shares with one already staged.

        `fresh` carries over only if both came from the same chain, that is, from the same parent content
        (DF-MAN-07).
        """
        found = self._staged.get(digest)
        if found is None:
            return None
        held = self._baseline.get(found.name)
        wanted = np.frombuffer(digest, np.uint8)
        if held is None or not held.matches(found.index, wanted, content.size):
            return None
        if not np.array_equal(held.block(found.index), content):
            return None
        return found.chain, found.fresh if np.array_equal(before, found.before) else NOT_FRESH

    def in_parent(self, digest: bytes, content: Bytes) -> tuple[Pieces, int] | None:
        """The chain of a block anywhere in the parent that has `content`."""
        if self._parent is None:
            return None
        keys, order = self._index()
        key = np.frombuffer(digest[:8], np.uint64)[0]
        wanted = np.frombuffer(digest, np.uint8)
        for block in order[np.searchsorted(keys, key, "left") : np.searchsorted(keys, key, "right")]:
            if np.array_equal(self._parent.digest[block], wanted) and self._parent_has(
                int(block), content, wanted
            ):
                return pieces_of(self._parent, int(block)), NOT_FRESH
        return None

    def _index(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
        """The parent's digests by their first 8 bytes, sorted; made only when the first block asks."""
        if self._sorted is None:
            assert self._parent is not None
            keys = np.ascontiguousarray(self._parent.digest[:, :8]).view(np.uint64).reshape(-1)
            order = np.argsort(keys, kind="stable")
            self._sorted = keys[order], order
        return self._sorted

    def _parent_has(self, block: int, content: Bytes, digest: Bytes) -> bool:
        assert self._parent is not None
        row = int(np.searchsorted(self._parent.block_start, block, "right")) - 1
        index = block - int(self._parent.block_start[row])
        held = self._baseline.get(self._parent.names[row])
        if held is not None and held.matches(index, digest, content.size):
            return np.array_equal(held.block(index), content)
        (rebuilt,) = self._rebuilder.blocks(self._parent, np.array([block], np.int64))
        self.read_bytes += rebuilt.data.size
        return np.array_equal(rebuilt.data, content)
