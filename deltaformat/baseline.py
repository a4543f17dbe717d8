"""What a writer holds in memory of the content it last saw: one host copy, known by digest.

The bytes held here need not be the parent version's: a commit may have failed after they were replaced. So
nothing is concluded from their presence. A block counts as the parent's only where its digest here equals the
parent manifest's digest of the same tensor and block index (DF-DIG-02, DF-WR-01); any other is read from the
store when it is needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import block_count, block_lengths, block_range
from deltaformat.encodings import copy_changed
from deltaformat.encodings.strata import Positions
from deltaformat.gpu.transfer import PinnedMemory

__all__ = ["Baseline", "Held"]

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Held:
    """One tensor's bytes, shape (nbytes,), and what is known of each block.

    `digests` has shape (blocks, digest size); `valid` says for which blocks bytes and digest agree.
    `keyframes` are the digests of what the first pieces of the blocks' chains give alone, all zero where that
    is not known: with it a chain's beginning can be read and verified without the pieces after it.
    """

    data: Bytes
    digests: Bytes
    valid: npt.NDArray[np.bool_]
    keyframes: Bytes
    block_bytes: int

    def block(self, index: int) -> Bytes:
        """The bytes of block `index`, as a view."""
        start, end = block_range(index, self.data.size, self.block_bytes)
        return self.data[start:end]

    def matches(self, index: int, digest: Bytes, length: int) -> bool:
        """Whether block `index` is held, has `length` bytes and has `digest`."""
        return (
            index < len(self.valid)
            and bool(self.valid[index])
            and self.block(index).size == length
            and bool(np.array_equal(self.digests[index], digest))
        )

    def matching(self, digests: Bytes, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """What `matches` tells, of the first blocks at once; no more of them than are held."""
        both = min(len(digests), len(self.valid))
        held = block_lengths(self.data.size, self.block_bytes)[:both]
        same = (self.digests[:both] == digests[:both]).all(axis=1)
        found: npt.NDArray[np.bool_] = self.valid[:both] & same & (held == lengths[:both])
        return found

    def keyframe(self, index: int) -> Bytes | None:
        """The digest of what the chain's first piece of block `index` gives, if it is known."""
        digest: Bytes | None = self.keyframes[index] if index < len(self.keyframes) else None
        return digest if digest is not None and digest.any() else None

    def know_keyframe(self, index: int, digest: bytes | None) -> None:
        """Note the digest of what the chain's first piece of block `index` gives; None: it is not known."""
        self.keyframes[index] = 0 if digest is None else np.frombuffer(digest, np.uint8)

    def replace(
        self, index: int, content: Bytes, digest: bytes, *, changed: tuple[int, Positions] | None = None
    ) -> None:
        """Hold `content` as block `index` from now on.

        Args:
            index: The block.
            content: Its new bytes.
            digest: Their digest.
            changed: An element width and the positions where it differs from what is held, if that is known.
        """
        # An interruption between these lines leaves a block that is read anew, not a false one.
        self.valid[index] = False
        if changed is None:
            self.block(index)[:] = content
        else:
            copy_changed(content, self.block(index), *changed)
        self.digests[index] = np.frombuffer(digest, np.uint8)
        self.valid[index] = True


class Baseline:
    """The held tensors of one writer, by name."""

    def __init__(self, *, block_bytes: int, digest_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._digest_bytes = digest_bytes
        self._held: dict[str, Held] = {}
        self._pinned = PinnedMemory()

    def get(self, name: str) -> Held | None:
        """What is held of the tensor `name`."""
        return self._held.get(name)

    def prepare(self, name: str, nbytes: int, *, pinned: bool = False) -> tuple[Held, Held | None]:
        """Make room for `name` with `nbytes` bytes; `pinned`: in page-locked memory, which devices can read.

        Returns:
            The place for the new content, and what was held before. They are the same object while the size
            stays, so that a block's old bytes must be used before the block is replaced.
        """
        old = self._held.get(name)
        if old is not None and old.data.size == nbytes:
            return old, old
        count = block_count(nbytes, self._block_bytes)
        new = Held(
            self._pinned.take(nbytes) if pinned else np.empty(nbytes, np.uint8),
            np.zeros((count, self._digest_bytes), np.uint8),
            np.zeros(count, np.bool_),
            np.zeros((count, self._digest_bytes), np.uint8),
            self._block_bytes,
        )
        self._held[name] = new
        return new, old

    def retain(self, names: Collection[str]) -> None:
        """Forget every tensor that is not among `names`."""
        for name in self._held.keys() - set(names):
            del self._held[name]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor content held."""
        return sum(held.data.size for held in self._held.values())
