"""Tensors and blocks on their way through a stage, whether they come from the host or from a device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltaformat.baseline import Baseline, Held
from deltaformat.blocks import Buffer, Bytes, block_lengths, block_range
from deltaformat.dtypes import Dtype, get_dtype
from deltaformat.encodings import Encoding
from deltaformat.encodings.strata import Positions
from deltaformat.gpu.survey import CHANGES, CONTENT, NOTHING, DeviceTensor, Wanted
from deltaformat.pieces import Pieces
from deltaformat.tensors import HostTensor
from deltaformat.versionmap import VersionMap

__all__ = ["Look", "StagedTensor", "open_tensor", "want"]


@dataclass(slots=True)
class Look:
    """One block on its way: what was seen, then what is to be stored.

    Attributes:
        index: Block index in its tensor.
        digest: Of the new content; None means that the block is the parent's.
        own: Encoding and payload of the block's own piece, once encoded.
        changed: Element width, and positions where the content differs from what was held, if that is known.
        held: Whether it is held now.
        rebase: Whether the chain's prefix is due to be replaced.
        prefix: Encoding and payload that replace it, once encoded.
    """

    index: int
    digest: bytes | None = None
    own: tuple[Encoding, Buffer] | None = None
    changed: tuple[int, Positions] | None = None
    held: bool = False
    rebase: bool = False
    prefix: tuple[Encoding, bytes] | None = None


@dataclass(slots=True)
class StagedTensor:
    """One tensor on its way through the stage.

    Blocks [0, comparable) have a counterpart of the same length in the parent.
    """

    name: str
    dtype: Dtype
    source: HostTensor | DeviceTensor
    held: Held
    old: Held | None
    parent_start: int
    lengths: npt.NDArray[np.int64]
    comparable: int
    block_bytes: int
    chains: list[Pieces | None] = field(default_factory=list)  # None: the parent's
    fresh: list[int] = field(default_factory=list)
    raw: list[int] = field(
        default_factory=list
    )  # blocks whose raw piece waits: they may all make one whole tensor

    def block(self, index: int) -> Bytes:
        """The new bytes of a block; from a device they must have been received."""
        if isinstance(self.source, DeviceTensor):
            return self.source.block(index)
        start, end = block_range(index, self.source.nbytes, self.block_bytes)
        return self.source.data[start:end]


def _counterpart(
    parent: VersionMap | None, name: str, lengths: npt.NDArray[np.int64], block_bytes: int
) -> tuple[int, int]:
    """A tensor's first block in the parent, and how many of its blocks have one of the same length there."""
    row = parent.index.get(name) if parent is not None else None
    if parent is None or row is None:
        return 0, 0
    theirs = block_lengths(parent.nbytes(row), block_bytes)
    comparable = min(len(lengths), len(theirs))
    if comparable and lengths[comparable - 1] != theirs[comparable - 1]:
        comparable -= 1  # only a last block is short
    return int(parent.block_start[row]), comparable


def open_tensor(
    name: str,
    source: HostTensor | DeviceTensor,
    *,
    parent: VersionMap | None,
    baseline: Baseline,
    block_bytes: int,
) -> StagedTensor:
    """Make room for a tensor, and find its counterpart in the parent."""
    pinned = isinstance(source, DeviceTensor) and source.pinned
    held, old = baseline.prepare(name, source.nbytes, pinned=pinned)
    lengths = block_lengths(source.nbytes, block_bytes)
    start, comparable = _counterpart(parent, name, lengths, block_bytes)
    return StagedTensor(
        name, get_dtype(source.dtype), source, held, old, start, lengths, comparable, block_bytes
    )


def want(
    source: DeviceTensor, digests: Bytes, *, parent: VersionMap | None, baseline: Baseline, block_bytes: int
) -> Wanted:
    """Tell what a stage needs of a tensor whose blocks have `digests`.

    Of a block that is held as it is in the parent, changes are enough, or nothing if it is unchanged;
    equality of digests tells that, since it is the same tensor and block index (DF-DIG-02).
    """
    lengths = block_lengths(source.nbytes, block_bytes)
    start, comparable = _counterpart(parent, source.name, lengths, block_bytes)
    blocks = np.full(len(lengths), CONTENT, np.uint8)
    expected = digests[:0] if parent is None else parent.digest[start : start + comparable]
    old = baseline.get(source.name)
    if old is not None:
        held = old.matching(expected, lengths[:comparable])
        same = (digests[: len(held)] == expected[: len(held)]).all(axis=1)
        blocks[: len(held)] = np.where(held, np.where(same, NOTHING, CHANGES), CONTENT)
    return Wanted(blocks, old.data if old is not None else None, expected)
