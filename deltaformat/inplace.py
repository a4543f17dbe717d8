"""Blocks of live tensors changed where they are, checked there, and put back if they differ (DF-RD-03)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np

from deltaformat.blocks import Bytes
from deltaformat.errors import CorruptError, ErrorCode
from deltaformat.gpu.applying import Uploaded
from deltaformat.gpu.diffing import BlockDiff, byte_runs
from deltaformat.gpu.engines import Engine, current
from deltaformat.gpu.hashing import digests_of
from deltaformat.gpu.table import BlockTable, Integers
from deltaformat.gpu.transfer import Download

__all__ = ["BlockUpdate", "shared_memory", "span_of"]


Span = tuple[int, int]


def span_of(tensor: Any) -> Span:
    """The first byte in memory of a torch tensor of any layout, and the one behind its last."""
    begin = int(tensor.data_ptr())
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * int(tensor.element_size())


def shared_memory(spans: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """Find spans of one device's memory that overlap.

    Returns:
        Numbers of two of them, and whether they are the same, for each span into which one reaches that
        begins before it or with it; every span that overlaps with any is told.
    """
    ordered = sorted((begin, -end, number) for number, (begin, end) in enumerate(spans) if begin < end)
    farthest: tuple[int, int, int] | None = None
    for begin, negative, number in ordered:
        end = -negative
        if farthest is not None and begin < farthest[1]:
            yield farthest[2], number, farthest[:2] == (begin, end)
        if farthest is None or end > farthest[1]:
            farthest = begin, end, number


class BlockUpdate:
    """Changes to tensors on one device: applied and checked there, and taken back.

    Args:
        table: The tensors; no two share memory that both are changed in.
        names: Their names, for errors.
        changes: Each block at most once.
        engine: What works there.

    Memory: on the device, the changes, and what was there before of blocks that are replaced, until this
    object goes.
    """

    def __init__(
        self, table: BlockTable, names: Sequence[str], changes: Sequence[BlockDiff], *, engine: Engine
    ) -> None:
        self._table = table
        self._names = names
        self._changes = list(changes)
        self._engine: Engine = engine
        self._kept: list[tuple[Any, Any]] = []
        self._uploaded: Uploaded | None = None

    def apply(self, blocks: Integers, expected: Bytes, algorithm: str, *, problem: str) -> None:
        """Apply the changes; then `blocks`, among them all that change, must have the digests `expected`.

        Blocks that had those before already, as where the same was applied earlier, stay as they were. The
        host waits for the device once, and twice more only where a block differs.

        Args:
            blocks: Numbers of blocks in the table, rising.
            expected: Their digests, one row each.
            algorithm: The digest.
            problem: What the error says.

        Raises:
            CorruptError: A block differs (digest-mismatch). All are as they were.
            LimitError: The device's memory does not suffice; nothing was changed.
        """
        try:
            self._apply()
            bad = self._differing(blocks, expected, algorithm)
            if not bad.size:
                return
            self.undo()
            still = self._differing(bad, expected[np.searchsorted(blocks, bad)], algorithm)
            if still.size:
                self._changes = []
                raise self._mismatch(int(still[0]), problem)
            wanted = ~np.isin(self._numbers(self._changes), bad)
            self._changes = list(compress(self._changes, wanted.tolist()))
            self._apply()
            bad = self._differing(blocks, expected, algorithm)
            if bad.size:
                raise self._mismatch(int(bad[0]), problem)
        except BaseException:
            self.undo()
            self._changes = []
            raise

    def undo(self) -> None:
        """Put back what was there before `apply`."""
        kept, self._kept = self._kept, []
        if self._uploaded is not None:
            self._uploaded.undo()  # with what is on the device already, so that it needs no memory
            self._uploaded = None
        for view, before in kept:
            view.copy_(before)

    def _apply(self) -> None:
        replaced = [change for change in self._changes if change.changes is None]
        with current(self._table.device):
            views = [self._table.block(int(block)) for block in self._numbers(replaced)]
            kept = [(view, view.clone()) for view in views]
        uploaded = Uploaded(self._table, self._changes, engine=self._engine)
        self._kept, self._uploaded = kept, uploaded
        uploaded.apply()

    def _numbers(self, changes: Sequence[BlockDiff]) -> Integers:
        """Their blocks' numbers in the table."""
        tensors = np.array([change.tensor for change in changes], np.int64)
        blocks: Integers = self._table.first[tensors] + np.array(
            [change.block for change in changes], np.int64
        )
        return blocks

    def _differing(self, blocks: Integers, expected: Bytes, algorithm: str) -> Integers:
        """Those of the blocks that have other digests; only digests cross, and the host waits once."""
        if not blocks.size:
            return blocks
        chosen = self._table
        if blocks.size < len(chosen):
            runs = byte_runs(chosen, blocks)
            views = [chosen.views[number][start:stop] for number, start, stop in runs]
            chosen = BlockTable.of(views, chosen.block_bytes)
        (found,) = Download([digests_of(chosen, algorithm, engine=self._engine)], "digests").take()
        differing: Integers = blocks[(found != expected).any(axis=1)]
        return differing

    def _mismatch(self, block: int, problem: str) -> CorruptError:
        number = int(self._table.tensor[block])
        index = block - int(self._table.first[number])
        return CorruptError(
            ErrorCode.DIGEST_MISMATCH,
            problem,
            where=f"tensor {self._names[number][:200]!a}, block {index}",
        )
