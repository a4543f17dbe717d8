"""What to fetch for a set of blocks: batches of coalesced ranges with their memory cost (SPEC 13, step 5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deltaformat.columns import prefix_sums, ranges
from deltaformat.encodings import Encoding
from deltaformat.errors import ErrorCode, LimitError
from deltaformat.packs import PackRef
from deltaformat.versionmap import NOT_FRESH, VersionMap

__all__ = ["Batch", "Plan", "plan_blocks", "plan_fresh", "plan_keyframes"]

Integers = npt.NDArray[np.int64]

MAX_GAP = 64 << 10
"""Bytes between two pieces that are fetched along, since another request would take longer."""
MAX_REQUEST = 16 << 20
"""Bytes at which a range is cut, so that several come at a time."""

# Offsets of all packs on one axis, far enough apart that no range reaches from one pack into the next: packs
# have at most 2^40 bytes, and a version at most 2^20 of them.
_PACK_SPACING = np.int64(1) << 42


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks that are fetched and decoded together.

    Arrays `request_*` have one entry per range to read; `piece_*` one per piece to decode, block after block
    in order of application. Piece i is `piece_length[i]` bytes at `piece_at[i]` of what request
    `piece_request[i]` gave.

    Attributes:
        blocks: The blocks, counted over the whole map.
        lengths: Their decoded bytes.
        based: Whether a block's pieces apply to the parent's block instead of to nothing.
        piece_start: Index of each block's first piece; one more entry than blocks.
        encoding: Each piece's encoding code.
        piece_request: The request that brings it; -1: none, it can be read to where its block goes.
        piece_at: Where it begins in that request's bytes.
        piece_length: Its bytes.
        request_pack: Each request's pack, as an index into the map's pack table.
        request_start: Where it begins in that pack.
        request_length: Its bytes.
        fetched: Bytes of all requests.
        decoded: Bytes of all blocks.
    """

    blocks: Integers
    lengths: Integers
    based: npt.NDArray[np.bool_]
    piece_start: Integers
    encoding: npt.NDArray[np.uint8]
    piece_request: npt.NDArray[np.intp]
    piece_at: Integers
    piece_length: Integers
    request_pack: Integers
    request_start: Integers
    request_length: Integers
    fetched: int
    decoded: int

    @property
    def cost(self) -> int:
        """Bytes of memory that this batch takes: what is fetched and what is decoded."""
        return self.fetched + self.decoded

    def requests(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Per pack, its index and the (offset, length) ranges to read, in the order of requests."""
        count = len(self.request_pack)
        bounds = [0, *(np.flatnonzero(np.diff(self.request_pack)) + 1).tolist(), count] if count else []
        starts, lengths = self.request_start.tolist(), self.request_length.tolist()
        for first, last in pairwise(bounds):
            yield (
                int(self.request_pack[first]),
                list(zip(starts[first:last], lengths[first:last], strict=True)),
            )


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Batches of a set of blocks, in the order given; made one at a time, so that a plan stays small.

    Attributes:
        blocks: The blocks, without those that need nothing done.
        skipped: Blocks that were left out because they are the parent's.
        decoded: Bytes of all blocks of the plan.
        payload: Bytes of all pieces of the plan, each counted once per block that uses it.
    """

    blocks: Integers
    skipped: Integers
    decoded: int
    payload: int
    _map: VersionMap = field(repr=False)
    _lengths: Integers = field(repr=False)
    _first: Integers = field(repr=False)  # per block its first piece to decode
    _counts: Integers = field(repr=False)  # and how many
    _based: npt.NDArray[np.bool_] = field(repr=False)
    _bounds: Integers = field(repr=False)  # where batches begin among the blocks, and the end
    _budget: int = field(repr=False)
    _max_gap: int = field(repr=False)
    _max_request: int = field(repr=False)

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[Batch]:
        """Make the batches."""
        return (self.batch(number) for number in range(len(self)))

    def batch(self, number: int, *, direct: int | None = None) -> Batch:
        """Make one batch.

        Args:
            number: Which one.
            direct: Request no raw first pieces of so many bytes or more, unless they are in external objects;
                None: request all pieces.
        """
        part = slice(int(self._bounds[number]), int(self._bounds[number + 1]))
        counts, lengths = self._counts[part], self._lengths[part]
        pieces = ranges(self._first[part], counts)
        pack, offset, length = self._map.pack[pieces], self._map.offset[pieces], self._map.length[pieces]
        encoding, decoded = self._map.encoding[pieces], int(lengths.sum())
        wanted = np.ones(len(pieces), np.bool_)
        if direct is not None:
            first = prefix_sums(counts)[:-1]
            raw = (encoding[first] == Encoding.RAW) & ~self._based[part]
            whole = (length[first] == lengths) & (lengths >= direct)  # another length is told by who decodes
            inside = [isinstance(self._map.packs[index], PackRef) for index in pack[first].tolist()]
            wanted[first] = ~(raw & whole & np.array(inside, np.bool_))
        order, request, starts, ends = _coalesce(
            (pack * _PACK_SPACING + offset)[wanted],
            length[wanted],
            max_gap=self._max_gap,
            max_request=self._max_request,
            spare=self._budget - decoded,
        )
        piece_request = np.full(len(pieces), -1, np.intp)
        piece_request[np.flatnonzero(wanted)[order]] = request
        request_pack = starts // _PACK_SPACING
        request_start = starts % _PACK_SPACING
        return Batch(
            blocks=self.blocks[part],
            lengths=lengths,
            based=self._based[part],
            piece_start=prefix_sums(counts),
            encoding=encoding,
            piece_request=piece_request,
            piece_at=offset - np.append(request_start, 0)[piece_request],
            piece_length=length,
            request_pack=request_pack,
            request_start=request_start,
            request_length=ends - starts,
            fetched=int((ends - starts).sum()),
            decoded=decoded,
        )


def plan_blocks(
    version: VersionMap,
    blocks: npt.NDArray[np.integer],
    *,
    block_bytes: int,
    budget: int,
    max_gap: int = MAX_GAP,
    max_request: int = MAX_REQUEST,
    max_block: int | None = None,
) -> Plan:
    """Plan to rebuild blocks from nothing: all pieces of their chains.

    Args:
        version: The map.
        blocks: Blocks, counted over the whole map; each is rebuilt as often as it is given.
        block_bytes: The store's block size.
        budget: Memory of a batch, in bytes fetched and decoded. A block that needs more makes a batch of its
            own.
        max_gap: Bytes between two pieces up to which one request brings both.
        max_request: Bytes at which a request is cut; its last piece may reach beyond.
        max_block: Refuse a block that alone needs more memory than this.

    Raises:
        LimitError: A block needs more than `max_block`.
    """
    wanted = np.asarray(blocks, np.int64)
    return _plan(
        version,
        wanted,
        wanted[:0],
        version.piece_start[wanted],
        version.depth[wanted].astype(np.int64),
        np.zeros(len(wanted), np.bool_),
        block_bytes,
        budget,
        max_gap,
        max_request,
        max_block,
    )


def plan_keyframes(
    version: VersionMap,
    blocks: npt.NDArray[np.integer],
    *,
    block_bytes: int,
    budget: int,
    max_block: int | None = None,
) -> Plan:
    """Plan to read the first piece of each block's chain, and no other.

    Args:
        version: The map.
        blocks: Blocks, counted over the whole map.
        block_bytes: The store's block size.
        budget: As for `plan_blocks`.
        max_block: As for `plan_blocks`.

    Raises:
        LimitError: A block needs more than `max_block`.
    """
    wanted = np.asarray(blocks, np.int64)
    return _plan(
        version,
        wanted,
        wanted[:0],
        version.piece_start[wanted],
        np.ones(len(wanted), np.int64),
        np.zeros(len(wanted), np.bool_),
        block_bytes,
        budget,
        MAX_GAP,
        MAX_REQUEST,
        max_block,
    )


def plan_fresh(
    version: VersionMap,
    blocks: npt.NDArray[np.integer] | None = None,
    *,
    block_bytes: int,
    budget: int,
    max_gap: int = MAX_GAP,
    max_request: int = MAX_REQUEST,
    max_block: int | None = None,
) -> Plan:
    """Plan to turn the parent's blocks into this version's by their fresh pieces (SPEC 11.2, DF-RD-02).

    Blocks that are the parent's are skipped; those whose `fresh` is 255 are read from their first piece.

    Args:
        version: The map.
        blocks: Blocks, counted over the whole map; None: all.
        block_bytes: The store's block size.
        budget: Memory of a batch, in bytes fetched and decoded (the parent's bytes are not counted).
        max_gap: As for `plan_blocks`.
        max_request: As for `plan_blocks`.
        max_block: As for `plan_blocks`.

    Raises:
        LimitError: A block needs more than `max_block`.
    """
    wanted = np.arange(version.block_count) if blocks is None else np.asarray(blocks, np.int64)
    fresh = version.fresh[wanted]
    changed = wanted[fresh != 0]
    fresh = fresh[fresh != 0]
    based = fresh != NOT_FRESH
    first = np.where(based, version.piece_start[changed + 1] - fresh, version.piece_start[changed])
    skipped = wanted[version.fresh[wanted] == 0]
    counts = version.piece_start[changed + 1] - first
    return _plan(
        version, changed, skipped, first, counts, based, block_bytes, budget, max_gap, max_request, max_block
    )


def _plan(
    version: VersionMap,
    blocks: Integers,
    skipped: Integers,
    first: Integers,
    counts: Integers,
    based: npt.NDArray[np.bool_],
    block_bytes: int,
    budget: int,
    max_gap: int,
    max_request: int,
    max_block: int | None,
) -> Plan:
    lengths = version.block_lengths(blocks, block_bytes)
    bounds = prefix_sums(counts)
    payload = np.diff(prefix_sums(version.length[ranges(first, counts)])[bounds])
    costs = lengths + payload
    if max_block is not None and costs.max(initial=0) > max_block:
        block = int(blocks[np.argmax(costs)])
        row = int(version.block_rows(np.array([block]))[0])
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED,
            f"block {block - version.block_start[row]} needs {costs.max()} bytes of {max_block}",
            where=version.names[row][:200],
        )
    return Plan(
        blocks=blocks,
        skipped=skipped,
        decoded=int(lengths.sum()),
        payload=int(payload.sum()),
        _map=version,
        _lengths=lengths,
        _first=first,
        _counts=counts,
        _based=based,
        _bounds=_fill(costs, budget),
        _budget=budget,
        _max_gap=max_gap,
        _max_request=max_request,
    )


def _fill(costs: Integers, budget: int) -> Integers:
    """Cut a sequence into runs that cost at most `budget` each, or are one item; one step per run."""
    sums = np.cumsum(costs)
    bounds = [0]
    spent = 0
    while bounds[-1] < len(costs):
        end = max(int(np.searchsorted(sums, spent + budget, "right")), bounds[-1] + 1)
        bounds.append(end)
        spent = int(sums[end - 1])
    return np.array(bounds, np.int64)


def _coalesce(
    start: Integers, length: Integers, *, max_gap: int, max_request: int, spare: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Integers, Integers]:
    """Unite pieces into requests.

    Args:
        start: Where pieces begin, on the axis of all packs.
        length: Their bytes.
        max_gap: Bytes between two pieces to fetch along.
        max_request: Bytes at which to cut.
        spare: Bytes that all requests together may have; what is left after the pieces may go into gaps, the
            narrowest first.

    Returns:
        The order of the pieces by start; in that order the request of each; where requests start and end.
    """
    order = np.argsort(start, kind="stable")
    if not len(order):
        return order, order, start, start
    start, length = start[order], length[order]
    reached = np.maximum.accumulate(start + length)
    gap = start[1:] - reached[:-1]
    joined = gap <= min(max_gap, int(_PACK_SPACING) // 4)
    bridged = np.flatnonzero(joined & (gap > 0))
    spare -= int(length.sum())
    if gap[bridged].sum() > spare:
        bridged = bridged[np.argsort(gap[bridged], kind="stable")]
        joined[bridged[np.cumsum(gap[bridged]) > spare]] = False
    begins = np.append(True, ~joined)
    run = np.cumsum(begins) - 1
    # Inside a run, cut where pieces begin beyond each multiple of max_request.
    section = (start - start[begins][run]) // max_request
    begins[1:] |= section[1:] != section[:-1]
    request = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    return order, request, start[first], np.maximum.reduceat(start + length, first)
