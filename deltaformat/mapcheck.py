"""The rules that a map's rows keep, checked for all at once, by writers and readers alike (SPEC 8 to 11)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import name_bytes
from deltaformat.encodings import Encoding
from deltaformat.errors import (
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    UnsafeError,
    UnsupportedError,
)
from deltaformat.packs import MAX_OBJECT_BYTES, PackEntry, PackRef
from deltaformat.versionmap import MAX_DEPTH, NOT_FRESH, VersionMap

__all__ = ["check_fresh", "check_map", "check_packs", "gaps_of", "offsets_of"]

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

PIECE_SLACK = 4_096
"""A piece has at most twice its block's bytes and so many more: what a block's payloads can make a reader
fetch stays in proportion."""

_NEEDS_BASE = np.array([code.needs_base for code in sorted(Encoding)], np.bool_)


def check_packs(packs: Sequence[PackEntry], *, where: str = "") -> Integers:
    """Check a pack table and return the packs' sizes.

    Raises:
        MalformedError: An object has two entries, so that "the piece before it in the same pack" would be
            ambiguous.
        LimitError: A pack is larger than any reader must accept.
    """
    names = {entry.key if isinstance(entry, PackRef) else entry.url for entry in packs}
    if len(names) != len(packs):
        raise _invalid("an object occurs twice in the pack table", where)
    sizes = np.fromiter((entry.size for entry in packs), np.int64, len(packs))
    if sizes.max(initial=0) > MAX_OBJECT_BYTES:
        raise LimitError(ErrorCode.LIMIT_EXCEEDED, f"a pack exceeds {MAX_OBJECT_BYTES} bytes", where=where)
    return sizes


def offsets_of(
    pack: npt.NDArray[np.unsignedinteger],
    gap: Integers,
    length: Integers,
    sizes: Integers,
    *,
    where: str = "",
) -> Integers:
    """Turn gaps into offsets: running sums within each pack (DF-MAN-03).

    A hostile gap may make a sum wrap around. That is harmless: up to the first piece that leaves its pack
    every sum is exact and small, that piece itself is found (a pack has at most 2^40 bytes), and then nothing
    of the result is used.

    Raises:
        MalformedError: A pack index is outside the table, or a piece is empty or not within its pack
            (DF-PCK-04).
    """
    if pack.max(initial=0) >= max(len(sizes), 1) or (len(pack) and not len(sizes)):
        raise _invalid("a piece names a pack that the table does not have", where)
    limit = sizes[pack]
    if (length < 1).any() or (np.abs(gap.astype(np.float64)) > limit).any():
        raise _invalid("a piece is empty or not within its pack (DF-PCK-04, DF-MAN-03)", where)
    order, starts = _by_pack(pack)
    sums = np.cumsum((gap + length)[order].view(np.uint64))
    before = np.zeros(len(starts), np.uint64)
    before[1:] = sums[starts[1:] - 1]
    counts = np.diff(np.append(starts, len(pack)))
    offset = np.empty(len(pack), np.int64)
    offset[order] = (sums - np.repeat(before, counts)).view(np.int64)
    offset -= length
    if ((offset < 0) | (offset > limit - length)).any():
        raise _invalid("a piece does not lie within its pack (DF-PCK-04, DF-MAN-03)", where)
    return offset


def gaps_of(pack: npt.NDArray[np.integer], offset: Integers, length: Integers) -> Integers:
    """Turn offsets into gaps: the inverse of `offsets_of`."""
    order, starts = _by_pack(pack)
    ends = (offset + length)[order]
    before = np.empty_like(ends)
    before[1:] = ends[:-1]
    before[starts] = 0
    gap = np.empty_like(ends)
    gap[order] = offset[order] - before
    return gap


def _by_pack(pack: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Pieces grouped by pack, in their order within each; and where the groups begin."""
    # NumPy sorts 16-bit integers by radix, several times as fast.
    key = pack.astype(np.uint16) if pack.max(initial=0) < 1 << 16 else pack
    order = np.argsort(key, kind="stable")
    grouped = key[order]
    starts = (
        np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1])) if len(pack) else np.empty(0, np.intp)
    )
    return order, starts


def check_map(
    version: VersionMap, *, digest_bytes: int, block_bytes: int, has_parent: bool, where: str = ""
) -> None:
    """Check every rule on a map's rows that can be checked without its parent.

    Args:
        version: The map; the lengths of its arrays agree.
        digest_bytes: Size of the store's digests.
        block_bytes: The store's block size.
        has_parent: Whether its version has a parent.
        where: What an error should name.

    Raises:
        MalformedError: Names (DF-BLK-03), sizes (DF-MAN-06, DF-DTY-02), block counts (DF-BLK-02), `depth`
            (DF-MAN-04), `fresh` (DF-MAN-07), chains (DF-ENC-02), raw lengths (DF-ENC-04) or ranges
            (DF-PCK-04) are wrong.
        InconsistentError: A name occurs twice (DF-MAN-05).
        UnsupportedError: An encoding (DF-ENC-03) or dtype (DF-DTY-01) is unknown.
        UnsafeError: A sidecar path occurs twice (DF-MAN-10).
    """
    for name in version.names:
        name_bytes(name, where=where)
    if len(version.index) != len(version.names):
        raise InconsistentError(
            ErrorCode.PARTS_DISAGREE, "a tensor's name occurs twice (DF-MAN-05)", where=where
        )
    if len({file.path for file in version.files}) != len(version.files):
        raise UnsafeError(ErrorCode.PATH_UNSAFE, "a sidecar path occurs twice (DF-MAN-10)", where=where)
    if version.digest.shape != (len(version.depth), digest_bytes) or len(version.fresh) != len(version.depth):
        raise _invalid("digests, `fresh` and `depth` are not one per block (DF-MAN-04)", where)
    counts = -(-version.tensor_bytes // block_bytes)
    if not np.array_equal(counts, np.diff(version.block_start)):
        raise _invalid("a tensor does not have the blocks that its size asks for (DF-BLK-02)", where)
    depth, fresh = version.depth, version.fresh
    _refuse(
        version, (depth < 1) | (depth > MAX_DEPTH), f"`depth` is not from 1 to {MAX_DEPTH} (DF-MAN-04)", where
    )
    never = fresh != NOT_FRESH
    _refuse(version, never & (fresh >= depth), "`fresh` is neither below `depth` nor 255 (DF-MAN-07)", where)
    if not has_parent:
        _refuse(version, never, "`fresh` is not 255 without a parent (DF-MAN-07)", where)
    _check_pieces(version, block_bytes, where)


def _check_pieces(version: VersionMap, block_bytes: int, where: str) -> None:
    encoding, length, offset = version.encoding, version.length, version.offset
    sizes = check_packs(version.packs, where=where)
    if not len(version.depth) == len(version.piece_start) - 1 or len(encoding) != version.piece_start[-1]:
        raise _invalid("the pieces are not as many as `depth` says (DF-MAN-04)", where)
    if not len(encoding):
        return
    if version.pack.min() < 0 or version.pack.max() >= len(sizes):
        raise _invalid("a piece names a pack that the table does not have", where)
    if ((length < 1) | (length > 0xFFFF_FFFF) | (offset < 0) | (offset > sizes[version.pack] - length)).any():
        raise _invalid("a piece is empty or not within its pack (DF-PCK-04)", where)
    if encoding.max() >= len(_NEEDS_BASE):
        raise UnsupportedError(
            ErrorCode.ENCODING_UNKNOWN,
            f"encoding {encoding.max()} is unknown; a newer reader may know it",
            where=where,
        )
    first = version.piece_start[:-1]
    alone = ~_NEEDS_BASE[encoding]
    begins = np.zeros(len(encoding), np.bool_)
    begins[first] = True
    wrong = alone != begins
    if wrong.any():
        block = int(np.searchsorted(version.piece_start, np.argmax(wrong), "right")) - 1
        mask = np.zeros(len(version.depth), np.bool_)
        mask[block] = True
        _refuse(
            version,
            mask,
            "its chain does not begin, and only begin, with a piece that needs no base (DF-ENC-02)",
            where,
        )
    lengths = version.block_lengths(np.arange(len(first)), block_bytes)
    longest = np.maximum.reduceat(length, first)
    _refuse(
        version,
        longest > 2 * lengths + PIECE_SLACK,
        "a piece is longer than any encoding of it (DF-PCK-04)",
        where,
    )
    _refuse(
        version,
        (encoding[first] == Encoding.RAW) & (length[first] != lengths),
        "its raw piece does not have the block's length (DF-ENC-04)",
        where,
    )


def check_fresh(version: VersionMap, parent: VersionMap, block_bytes: int, *, where: str = "") -> None:
    """Check that every block whose `fresh` relates it to the parent has its counterpart there (DF-MAN-08).

    Raises:
        MalformedError: One has none of the same length.
    """
    blocks = np.flatnonzero(version.fresh != NOT_FRESH)
    rows = version.block_rows(blocks)
    theirs = np.fromiter((parent.index.get(name, -1) for name in version.names), np.int64, len(version.names))
    index = blocks - version.block_start[rows]
    parent_counts = np.diff(parent.block_start)
    known = theirs[rows] >= 0
    known[known] = index[known] < parent_counts[theirs[rows][known]]
    ours = version.block_lengths(blocks[known], block_bytes)
    counterpart = parent.block_start[theirs[rows][known]] + index[known]
    same = ours == parent.block_lengths(counterpart, block_bytes)
    unchanged = version.fresh[blocks[known]] == 0
    same &= ~unchanged | (version.digest[blocks[known]] == parent.digest[counterpart]).all(axis=1)
    known[known] = same
    missing = np.zeros(len(version.fresh), np.bool_)
    missing[blocks] = ~known
    _refuse(version, missing, "`fresh` does not fit what the parent has (DF-MAN-08)", where)


def _refuse(version: VersionMap, wrong: Mask, message: str, where: str) -> None:
    """Refuse a map in which `wrong` holds for a block; name the first."""
    if not wrong.any():
        return
    block = int(np.argmax(wrong))
    row = int(version.block_rows(np.array([block]))[0])
    name = version.names[row]
    code = ErrorCode.PAYLOAD_INVALID if "DF-ENC" in message else ErrorCode.MANIFEST_INVALID
    raise MalformedError(
        code, f"block {block - version.block_start[row]} of tensor {name[:80]!a}: {message}", where=where
    )


def _invalid(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.MANIFEST_INVALID, message, where=where)
