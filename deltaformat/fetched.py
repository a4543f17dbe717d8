"""A batch of blocks whose pieces have been fetched, and each block's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltaformat.blocks import Bytes
from deltaformat.metrics import Meter
from deltaformat.packs import ExternalRef, PackEntry
from deltaformat.plan import Batch

__all__ = ["Fetched", "Work"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A batch and what its requests brought."""

    batch: Batch
    buffers: list[Bytes]
    meter: Meter | None

    def works(self) -> list[Work]:
        """Its blocks, each to be decoded."""
        count = len(self.batch.blocks)
        return [Work(self.batch, index, self.buffers, self.meter) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Work:
    """Block number `index` of a batch whose requests were answered with `fetched`."""

    batch: Batch
    index: int
    fetched: list[Bytes]
    meter: Meter | None

    @property
    def block(self) -> int:
        """The block, counted over the whole map."""
        return int(self.batch.blocks[self.index])

    @property
    def direct(self) -> bool:
        """Whether the first piece was not fetched: it is the block itself, to be read into its place."""
        return bool(self.batch.piece_request[self.batch.piece_start[self.index]] < 0)

    @property
    def pieces(self) -> range:
        """The pieces that were fetched, counted over the batch."""
        starts = self.batch.piece_start
        return range(int(starts[self.index]) + self.direct, int(starts[self.index + 1]))

    def payloads(self) -> list[Bytes]:
        """Their bytes, in order of application."""
        batch, found = self.batch, []
        for piece in self.pieces:
            start, length = int(batch.piece_at[piece]), int(batch.piece_length[piece])
            found.append(self.fetched[batch.piece_request[piece]][start : start + length])
        return found

    def external(self, packs: Sequence[PackEntry]) -> list[tuple[int, ExternalRef, tuple[int, int]]]:
        """Of the payloads those of external objects: which one, the object, and (start, length) there."""
        batch, found = self.batch, []
        for number, piece in enumerate(self.pieces):
            request = batch.piece_request[piece]
            ref = packs[batch.request_pack[request]]
            if isinstance(ref, ExternalRef):
                start = int(batch.request_start[request] + batch.piece_at[piece])
                found.append((number, ref, (start, int(batch.piece_length[piece]))))
        return found
