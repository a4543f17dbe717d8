"""Fetch, decode and verify blocks: the one way by which stored bytes become content (SPEC 13, step 5).

Nothing leaves here that does not have its digest (DF-DIG-01).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from deltaformat.blockcache import BlockCache
from deltaformat.blocks import Buffer, Bytes
from deltaformat.digests import DigestAlgorithm
from deltaformat.encodings import decode_piece
from deltaformat.errors import CorruptError, DeltaFormatError, ErrorCode, LimitError
from deltaformat.fetched import Fetched, Work
from deltaformat.metrics import Meter
from deltaformat.packs import PackRef
from deltaformat.plan import Batch, Plan, plan_blocks, plan_fresh, plan_keyframes
from deltaformat.sources import Sources
from deltaformat.versionmap import VersionMap
from deltaformat.workers import Workers

__all__ = ["Rebuilder", "Rebuilt", "allocate"]

CONCURRENT_PACKS = 8
BLOCKS_OF_A_CHAIN = 66  # a block's pieces and content may take that many blocks' memory, or the budget
BATCH_BYTES = 64 << 20  # enough for a fast link; larger ones only take memory that is not in any cache

DIRECT_BYTES = 64 << 10  # less is read faster together with what lies beside it

T = TypeVar("T")

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A verified block, and what its chain's first piece alone gives, on which the others build."""

    block: int
    data: Bytes
    keyframe: Bytes


def allocate(nbytes: int, *, where: str) -> Bytes:
    """Memory for a result of `nbytes`; pages that are never written take none.

    Raises:
        LimitError: there is not so much.
    """
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError) as error:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED,
            f"no memory for {nbytes} bytes; read a slice, or fewer tensors at a time",
            where=where,
        ) from error


class Rebuilder:
    """Rebuilds blocks of one store.

    Args:
        sources: Where packs are read.
        algorithm: The store's digest.
        block_bytes: Its block size.
        memory_budget: Bytes in flight: two batches, one being fetched while the other is decoded.
        threads: Blocks decoded at a time.
        cache: A local cache of decoded blocks.
    """

    def __init__(
        self,
        sources: Sources,
        algorithm: DigestAlgorithm,
        block_bytes: int,
        *,
        memory_budget: int,
        threads: int,
        cache: BlockCache | None,
    ) -> None:
        self._sources = sources
        self._digest = algorithm
        self._block_bytes = block_bytes
        self.memory_budget = memory_budget
        self._budget = max(1, min(memory_budget // 2, BATCH_BYTES))
        self._max_block = max(memory_budget, BLOCKS_OF_A_CHAIN * block_bytes)
        self._threads = max(1, threads)
        self._direct = DIRECT_BYTES if sources.direct else None
        self._cache = cache

    def blocks(self, version: VersionMap, blocks: Integers) -> Iterator[Rebuilt]:
        """Rebuild blocks in the order given, each with what its keyframe holds: for writers and checkers.

        Raises:
            MissingError, CorruptError, MalformedError, StoreError: a block cannot be rebuilt.
        """
        lengths = dict(
            zip(blocks.tolist(), version.block_lengths(blocks, self._block_bytes).tolist(), strict=True)
        )

        def rebuild(work: Work) -> Rebuilt:
            data = np.empty(lengths[work.block], np.uint8)
            keyframe = self._decode(version, work, data, keep_keyframe=True)
            return Rebuilt(work.block, data, data if keyframe is None else keyframe)

        yield from self._run(version, self._plan(version, blocks), rebuild)

    def keyframes(self, version: VersionMap, digests: Mapping[int, Bytes]) -> Iterator[tuple[int, Bytes]]:
        """Give what the first pieces of chains give alone, for writers that know its digest.

        Args:
            version: The map.
            digests: Block, counted over the whole map -> digest of the result.

        Raises:
            CorruptError: a result does not have its digest.
            MissingError, MalformedError, StoreError: a piece cannot be read.
        """
        blocks = np.fromiter(digests, np.int64, len(digests))
        lengths = dict(
            zip(blocks.tolist(), version.block_lengths(blocks, self._block_bytes).tolist(), strict=True)
        )
        plan = plan_keyframes(
            version, blocks, block_bytes=self._block_bytes, budget=self._budget, max_block=self._max_block
        )

        def rebuild(work: Work) -> tuple[int, Bytes]:
            data = np.empty(lengths[work.block], np.uint8)
            self._decode(version, work, data, digest=digests[work.block])
            return work.block, data

        yield from self._run(version, plan, rebuild)

    def into(
        self,
        version: VersionMap,
        blocks: Integers,
        place: Callable[[int], Bytes],
        done: Callable[[int], None] = lambda _: None,
        *,
        meter: Meter | None = None,
    ) -> None:
        """Rebuild blocks where `place` says: a writable array of each block's length.

        After an error its contents mean nothing.

        Args:
            version: The map.
            blocks: Blocks, counted over the whole map.
            place: Where a block goes.
            done: Called with decoded bytes, block by block.
            meter: Counts phases, as for `changes`.

        Raises:
            MissingError, CorruptError, MalformedError, StoreError: a block cannot be rebuilt.
        """
        if self._cache is not None:
            blocks = self._from_cache(version, blocks, place, done)

        def rebuild(work: Work) -> int:
            out = place(work.block)
            self._decode(version, work, out)
            if self._cache is not None:
                digest, chain = version.digest[work.block].tobytes(), version.chain_identity(work.block)
                self._cache.put(digest, out.data, chain=chain)
            return out.size

        for size in self._run(version, self._plan(version, blocks), rebuild, meter):
            done(size)

    def follow(
        self,
        version: VersionMap,
        place: Callable[[int], Bytes],
        done: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Turn the parent's blocks into this version's, in place, fetching only fresh pieces (DF-RD-02).

        Every block is verified.

        Args:
            version: The map.
            place: A writable array that holds the parent's block, where the parent has one of that length.
            done: Called, in any thread, with each block that was fresh, once it is verified.

        Raises:
            CorruptError: a block does not have its digest: the given content was not the parent's, or what
                was fetched is corrupt.
            MissingError, MalformedError, StoreError: a block cannot be rebuilt.
        """
        plan = plan_fresh(
            version, block_bytes=self._block_bytes, budget=self._budget, max_block=self._max_block
        )
        with Workers(self._threads, name="deltaformat-check") as workers:
            workers.map(
                lambda block: self._check(version, block, place(block), version.digest[block]),
                plan.skipped.tolist(),
            )

        def rebuild(work: Work) -> None:
            self._decode(version, work, place(work.block))
            done(work.block)

        for _ in self._run(version, plan, rebuild):
            pass

    def changes(
        self,
        version: VersionMap,
        base: Callable[[int], Bytes],
        take: Callable[[int, Bytes], T],
        place: Callable[[int], Bytes | None],
        *,
        kept: Integers,
        meter: Meter,
    ) -> Iterator[T]:
        """Rebuild the blocks that differ from the parent's aside, leaving those as they are (DF-RD-03).

        Fetches only fresh pieces.

        Args:
            version: The map; the parent may be any version that it was composed for.
            base: The parent's block, where `fresh` is not `NOT_FRESH`.
            take: Gets each block and its verified content, in the threads that decode; its results come in
                order.
            place: Where to rebuild a block; None where memory that is good until `take` returns will do.
            kept: Blocks whose `fresh` is 0 and that are wanted nonetheless: they are copied and verified.
            meter: Counts `fetch`, `decode` and `verify`.

        Raises:
            As for `follow`.
        """
        plan = plan_fresh(
            version, block_bytes=self._block_bytes, budget=self._budget, max_block=self._max_block
        )

        scratch = threading.local()  # pages that are new each time cost as much as decoding

        def rebuild(work: Work) -> T:
            out = place(work.block)
            if out is None:
                if not hasattr(scratch, "block"):
                    scratch.block = np.empty(self._block_bytes, np.uint8)
                out = scratch.block[: int(work.batch.lengths[work.index])]
            if work.batch.based[work.index]:
                out[:] = base(work.block)
            self._decode(version, work, out)
            return take(work.block, out)

        for block in kept.tolist():
            old = base(block)
            out = place(block)
            if out is None:
                out = np.empty(old.size, np.uint8)
            out[:] = old
            self._check(version, block, out, version.digest[block], meter)
            yield take(block, out)
        yield from self._run(version, plan, rebuild, meter)

    # -- batches ---------------------------------------------------------------------------------------------

    def _plan(self, version: VersionMap, blocks: Integers) -> Plan:
        return plan_blocks(
            version, blocks, block_bytes=self._block_bytes, budget=self._budget, max_block=self._max_block
        )

    def _run(
        self,
        version: VersionMap,
        plan: Plan,
        rebuild: Callable[[Work], T],
        meter: Meter | None = None,
    ) -> Iterator[T]:
        """Fetch batch after batch, one ahead, and rebuild the blocks of each in threads.

        Results come in order.
        """
        if len(plan.blocks) == 1:  # as for most small tensors: threads would cost more than they give
            batch = plan.batch(0, direct=self._direct)
            yield from map(rebuild, self._fetch(version, batch, meter).works())
            return
        with (
            Workers(self._threads, name="deltaformat-decode") as workers,
            ThreadPoolExecutor(1, thread_name_prefix="deltaformat-fetch") as fetcher,
        ):
            ahead: Future[Fetched] | None = None
            for number in range(len(plan) + 1):
                ready = ahead
                following = plan.batch(number, direct=self._direct) if number < len(plan) else None
                ahead = None if following is None else fetcher.submit(self._fetch, version, following, meter)
                if ready is not None:
                    yield from workers.map(rebuild, ready.result().works())

    def _fetch(self, version: VersionMap, batch: Batch, meter: Meter | None) -> Fetched:
        requests = list(batch.requests())
        started = time.perf_counter()

        def read(request: tuple[int, list[tuple[int, int]]]) -> list[Buffer]:
            pack, ranges = request
            return self._sources.ranges(version.packs[pack], ranges)

        if len(requests) < 2:
            results = list(map(read, requests))
        else:
            with ThreadPoolExecutor(CONCURRENT_PACKS) as pool:
                results = list(pool.map(read, requests))
        if meter is not None:
            meter.add("fetch", time.perf_counter() - started, batch.fetched)
        buffers = [np.frombuffer(buffer, np.uint8) for result in results for buffer in result]
        return Fetched(batch, buffers, meter)

    # -- one block -------------------------------------------------------------------------------------------

    def _decode(
        self,
        version: VersionMap,
        work: Work,
        out: Bytes,
        *,
        keep_keyframe: bool = False,
        digest: Bytes | None = None,
    ) -> Bytes | None:
        """Apply a block's pieces to `out` and check the result: the manifest's digest, unless one is given.

        Gives the state after the first piece where that is not the last.
        """
        payloads = work.payloads()
        expected = version.digest[work.block] if digest is None else digest
        # A piece on top of the parent's block changes it where it is; the piece's copy needs it as it was.
        based = work.batch.based[work.index] and work.external(version.packs)
        base = out.copy() if based else None
        try:
            return self._apply(version, work, payloads, out, expected, keep_keyframe)
        except DeltaFormatError as error:
            mended = self._from_copies(version, work, payloads)
            if mended is None:
                raise
            if base is not None:
                out[:] = base
            try:
                return self._apply(version, work, mended, out, expected, keep_keyframe)
            except DeltaFormatError:
                raise error from None

    def _apply(
        self,
        version: VersionMap,
        work: Work,
        payloads: list[Bytes],
        out: Bytes,
        expected: Bytes,
        keep_keyframe: bool,
    ) -> Bytes | None:
        keyframe = None
        started = time.perf_counter()
        if work.direct:
            piece = version.piece_start[work.block]
            ref = version.packs[version.pack[piece]]
            assert isinstance(ref, PackRef)
            self._sources.into(ref, int(version.offset[piece]), out)
            if work.meter is not None:
                work.meter.add("fetch", time.perf_counter() - started, out.size)
            started = time.perf_counter()
            if keep_keyframe and payloads:
                keyframe = out.copy()
        try:
            for number, (piece, payload) in enumerate(zip(work.pieces, payloads, strict=True)):
                decode_piece(int(work.batch.encoding[piece]), payload, out)
                if keep_keyframe and number == 0 and len(payloads) > 1 and not work.direct:
                    keyframe = out.copy()
        except DeltaFormatError as error:
            raise type(error)(error.code, error.message, where=_where(version, work.block)) from error
        if work.meter is not None:
            work.meter.add("decode", time.perf_counter() - started, out.size)
        self._check(version, work.block, out, expected, work.meter)
        return keyframe

    def _from_copies(self, version: VersionMap, work: Work, payloads: list[Bytes]) -> list[Bytes] | None:
        """The payloads, those of external objects from copies in the store; None without (DF-EXT-03)."""
        mended = list(payloads)
        for number, ref, wanted in work.external(version.packs):
            copy = self._sources.copied(ref, wanted)
            if copy is None:
                return None
            mended[number] = np.frombuffer(copy, np.uint8)
        return mended if any(a is not b for a, b in zip(mended, payloads, strict=True)) else None

    def _check(
        self,
        version: VersionMap,
        block: int,
        content: Bytes,
        expected: Bytes,
        meter: Meter | None = None,
    ) -> None:
        started = time.perf_counter()
        right = self._digest(content) == expected.tobytes()
        if meter is not None:
            meter.add("verify", time.perf_counter() - started, content.size)
        if not right:
            raise CorruptError(
                ErrorCode.DIGEST_MISMATCH,
                "the rebuilt block does not have its digest; `verify` tells which objects are damaged",
                where=_where(version, block),
            )

    def _from_cache(
        self,
        version: VersionMap,
        blocks: Integers,
        place: Callable[[int], Bytes],
        done: Callable[[int], None],
    ) -> Integers:
        assert self._cache is not None
        missing = []
        for block in blocks.tolist():
            out = place(block)
            digest, chain = version.digest[block].tobytes(), version.chain_identity(block)
            cached = self._cache.get(digest, out.size, chain=chain)
            if cached is None:
                missing.append(block)
            else:
                out[:] = np.frombuffer(cached, np.uint8)
                done(out.size)
        return np.array(missing, np.int64)


def _where(version: VersionMap, block: int) -> str:
    row = int(version.block_rows(np.array([block]))[0])
    return f"tensor {version.names[row][:200]!a}, block {block - int(version.block_start[row])}"
