"""From any version to any other: which pieces turn the blocks of one into those of the other (SPEC 11.2).

`fresh` relates a version to its parent. Along a lineage these relations compose: `compose` gives a map of the
target as if its parent were a version further back, with every block's pieces since then. So a follower that
skipped versions fetches what each of them changed, and no byte by which a chain's beginning was replaced,
unless reading a block from its first piece takes fewer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deltaformat.columns import prefix_sums, ranges
from deltaformat.mapcheck import check_fresh
from deltaformat.packs import PackEntry
from deltaformat.versionmap import NOT_FRESH, VersionMap

__all__ = ["MAX_FRESH", "compose", "counterparts", "unread", "untouched"]

MAX_FRESH = NOT_FRESH - 1
"""Pieces that a composed block may have on top of its base: what the column holds."""

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Hop:
    """What one version adds: the target's blocks, and for each its first fresh piece and their number."""

    version: VersionMap
    blocks: Integers
    first: Integers
    counts: Integers


def compose(
    target: VersionMap, path: Sequence[VersionMap], base: VersionMap, usable: Mask, *, block_bytes: int
) -> VersionMap:
    """Make the map of `target` as if its parent were `base`.

    Args:
        target: The map to go to, or some of its tensors.
        path: The maps from the child of `base` on, each the parent of the next; the last is the whole
            target's.
        base: The map at hand.
        usable: Per block of `base`, whether its content is at hand and right.
        block_bytes: The store's block size.

    Returns:
        A map with the tensors and digests of `target`. A block's `fresh` is 0 where it is that of `base`,
        counts its trailing pieces that apply to that, or is `NOT_FRESH`: then its chain is the target's.

    Raises:
        MalformedError: `fresh` of one of `path` does not fit its parent (DF-MAN-08).
    """
    versions = [base, *path]
    for parent, child in pairwise(versions):
        check_fresh(child, parent, block_bytes)
    pending: Integers = np.arange(target.block_count)
    at = pending if target is versions[-1] else counterparts(pending, target, versions[-1])
    hops = []
    for parent, child in reversed(list(pairwise(versions))):
        fresh = child.fresh[at].astype(np.int64)
        kept = fresh != NOT_FRESH
        pending, at, fresh = pending[kept], at[kept], fresh[kept]
        some = fresh > 0
        hops.append(_Hop(child, pending[some], child.piece_start[at[some] + 1] - fresh[some], fresh[some]))
        at = counterparts(at, child, parent)
    based = np.zeros(target.block_count, np.bool_)
    based[pending[usable[at]]] = True
    based = _cheaper(target, hops, based)
    return _assemble(target, hops[::-1], based)


def unread(target: VersionMap) -> VersionMap:
    """Make the map of `target` for a reader who has nothing: every block is read from its first piece."""
    return replace(target, fresh=np.full(target.block_count, NOT_FRESH, np.uint8))


def untouched(
    start: VersionMap, path: Sequence[VersionMap], *, block_bytes: int
) -> tuple[Integers, Integers]:
    """Find the blocks of `start` that have the same content in the last of `path`, its descendants in order.

    Returns:
        These blocks, and their numbers in the last map.

    Raises:
        MalformedError: As for `compose`.
    """
    origin: Integers = np.arange(start.block_count)
    at = origin
    for parent, child in pairwise([start, *path]):
        check_fresh(child, parent, block_bytes)
        kept = np.flatnonzero(child.fresh == 0)
        reached = np.full(parent.block_count, -1, np.int64)
        reached[counterparts(kept, child, parent)] = kept
        at = reached[at]
        origin, at = origin[at >= 0], at[at >= 0]
    return origin, at


def counterparts(blocks: Integers, of: VersionMap, among: VersionMap) -> Integers:
    """Blocks of one map in the numbering of another, by tensor name and block index; -1 where it has none."""
    rows = of.block_rows(blocks)
    if of.names == among.names:
        theirs = rows
    else:
        found = np.fromiter((among.index.get(name, -1) for name in of.names), np.int64, len(of.names))
        theirs = found[rows]
    index = blocks - of.block_start[rows]
    there = (theirs >= 0) & (index < np.diff(among.block_start, append=0)[theirs])
    return np.where(there, among.block_start[theirs] + index, -1)


def _cheaper(target: VersionMap, hops: Sequence[_Hop], based: Mask) -> Mask:
    """Leave out blocks that take fewer bytes from their first piece on, or have too many pieces."""
    nbytes = np.zeros(len(based), np.int64)
    counts = np.zeros(len(based), np.int64)
    for hop in hops:
        pieces = prefix_sums(hop.version.length[ranges(hop.first, hop.counts)])
        nbytes[hop.blocks] += np.diff(pieces[prefix_sums(hop.counts)])
        counts[hop.blocks] += hop.counts
    cold = np.diff(prefix_sums(target.length)[target.piece_start])
    return based & (nbytes <= cold) & (counts <= MAX_FRESH)


def _assemble(target: VersionMap, hops: Sequence[_Hop], based: Mask) -> VersionMap:
    """Join the pieces of all hops, in order, block by block; blocks that are not based have the target's."""
    cold = np.flatnonzero(~based)
    parts = [_Hop(target, cold, target.piece_start[cold], target.depth[cold].astype(np.int64))]
    for hop in hops:
        kept = based[hop.blocks]
        parts.append(_Hop(hop.version, hop.blocks[kept], hop.first[kept], hop.counts[kept]))
    packs: dict[PackEntry, int] = {}
    blocks, pack, offset, length, encoding = [], [], [], [], []
    for part in parts:
        pieces = ranges(part.first, part.counts)
        renumber = np.fromiter(
            (packs.setdefault(entry, len(packs)) for entry in part.version.packs),
            np.int32,
            len(part.version.packs),
        )
        blocks.append(np.repeat(part.blocks, part.counts))
        pack.append(renumber[part.version.pack[pieces]] if len(pieces) else np.empty(0, np.int32))
        offset.append(part.version.offset[pieces])
        length.append(part.version.length[pieces])
        encoding.append(part.version.encoding[pieces])
    owner = np.concatenate(blocks)
    order = np.argsort(owner, kind="stable")
    depth = np.bincount(owner, minlength=target.block_count)
    return replace(
        target,
        fresh=np.where(based, depth, NOT_FRESH).astype(np.uint8),
        depth=depth.astype(np.uint8),
        piece_start=prefix_sums(depth),
        pack=np.concatenate(pack)[order],
        offset=np.concatenate(offset)[order],
        length=np.concatenate(length)[order],
        encoding=np.concatenate(encoding)[order],
        packs=tuple(packs),
    )
