"""Content that is already stored elsewhere: tied, renamed or moved blocks take the chain that exists.

A digest finds a candidate; only equal bytes confirm it (DF-DIG-02).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltaformat.baseline import Baseline
from deltaformat.pieces import Pieces, pieces_of
from deltaformat.rebuild import Rebuilder
from deltaformat.versionmap import NOT_FRESH, VersionMap

__all__ = ["Twins"]

Bytes = npt.NDArray[np.uint8]


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
        self._staged: dict[bytes, tuple[str, int]] = {}
        self._sorted: tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]] | None = None

    def remember(self, digest: bytes, name: str, index: int) -> None:
        """Note a staged block, whose bytes the baseline now holds."""
        self._staged.setdefault(digest, (name, index))

    def staged(self, digest: bytes, content: Bytes) -> tuple[str, int] | None:
        """Name and block index of a block with `content` that was staged before."""
        found = self._staged.get(digest)
        if found is None:
            return None
        name, index = found
        held = self._baseline.get(name)
        if held is None or not held.matches(index, np.frombuffer(digest, np.uint8), content.size):
            return None
        return found if np.array_equal(held.block(index), content) else None

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
