"""Changes applied in place on the device, for servers whose weights are there (SPEC 9.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from deltaformat.columns import prefix_sums
from deltaformat.encodings import Changes
from deltaformat.errors import ErrorCode, MalformedError
from deltaformat.gpu.diffing import BlockDiff
from deltaformat.gpu.engines import Engine, choose_engine, current, load_torch, load_triton
from deltaformat.gpu.table import ALIGNMENT, BlockTable, Integers
from deltaformat.gpu.transfer import upload, upload_table
from deltaformat.torchtensors import bytes_in_place, describe

__all__ = ["Uploaded", "apply", "apply_to", "in_place", "own_bytes"]


def apply(
    tensors: Any | Sequence[Any],
    changes: Sequence[BlockDiff],
    *,
    block_bytes: int,
    undo: bool = False,
    engine: Engine = "auto",
) -> None:
    """Apply what `diff` gave, or what a follower decoded, to tensors in place.

    One launch per element width with Triton. Temporary memory on the device: the changes.

    Args:
        tensors: A contiguous torch tensor or several, that begin at a multiple of 16 bytes, as torch's own
            allocations do; all on one device.
        changes: Each block at most once; those with content replace it.
        block_bytes: The block size that their places refer to.
        undo: Subtract the differences instead; content cannot be undone.
        engine: `auto`, `torch` or `triton`.

    Raises:
        MalformedError: A tensor cannot be changed in place; nothing was changed.
        UnsupportedError: As for `hash_blocks`.
    """
    torch = load_torch()
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if given and changes:
        apply_to(BlockTable.of(in_place(given), block_bytes), changes, undo=undo, engine=engine)


def in_place(tensors: Sequence[Any], names: Sequence[str] | None = None) -> list[Any]:
    """Flat views of tensors' own memory.

    Raises:
        MalformedError: One has none that is contiguous and begins at a multiple of 16 bytes.
    """
    views = []
    for number, tensor in enumerate(tensors):
        view = own_bytes(tensor)
        if view is None:
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                "not contiguous, or not at a multiple of 16 bytes in memory, so it cannot be changed in"
                " place; pass tensor.contiguous().clone() and use that",
                where=f"tensor {names[number]!r}" if names is not None else f"tensor {number}",
            )
        views.append(view)
    return views


def own_bytes(tensor: Any) -> Any | None:
    """A flat view of a tensor's own memory, uint8; None where that cannot be changed in place."""
    describe(tensor)  # says of what is no plain tensor what is wrong
    if tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
        return None
    view = bytes_in_place(tensor)[2]
    return None if view.numel() and view.data_ptr() % ALIGNMENT else view


def apply_to(
    table: BlockTable, changes: Sequence[BlockDiff], *, undo: bool = False, engine: Engine = "auto"
) -> None:
    """Apply changes to the blocks of a table; what cannot be undone is left as it is with `undo`.

    All that crosses, and all memory for it, comes first: if that fails, nothing was changed.
    """
    Uploaded(table, changes, engine=engine).apply(undo=undo)


class Uploaded:
    """Changes of a table's blocks that have crossed, with all memory that it takes to apply and undo them.

    Args:
        table: The blocks.
        changes: Each block at most once; those with content replace it.
        engine: `auto`, `torch` or `triton`.

    Raises:
        LimitError: The device has no room for them; nothing was changed.
    """

    def __init__(self, table: BlockTable, changes: Sequence[BlockDiff], *, engine: Engine = "auto") -> None:
        self._table = table
        self._engine = choose_engine(engine, table.device)
        self._contents: list[tuple[int, Any]] = []
        self._added = 0
        sparse: dict[int, list[tuple[int, Changes]]] = {}
        with current(table.device):
            for change in changes:
                block = int(table.first[change.tensor]) + change.block
                if change.changes is not None:
                    sparse.setdefault(change.changes.width, []).append((block, change.changes))
                elif change.content is not None:
                    self._contents.append((block, upload(change.content, table.device, "weights")))
            self._groups = [_Group.of(table, width, members) for width, members in sparse.items()]

    def apply(self, *, undo: bool = False) -> None:
        """Apply them; or with `undo` take differences back, and leave contents as they are."""
        with current(self._table.device):
            if not undo:
                for block, content in self._contents:
                    self._table.block(block).copy_(content)
            for group in self._groups:
                self._add(group, undo=undo)
                self._added += 1

    def undo(self) -> None:
        """Take back the differences that `apply` added, also if it did not come to its end."""
        with current(self._table.device):
            while self._added:
                self._added -= 1
                self._add(self._groups[self._added], undo=True)

    def _add(self, group: _Group, *, undo: bool) -> None:
        if self._engine == "torch":
            _add_with_torch(self._table, group, undo=undo)
        else:
            load_triton("diff_triton").apply(
                group.addresses, group.starts, group.places, group.added,
                most=int(group.counts.max()), undo=undo,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Changes of one element width: of which blocks, and on the device where and what."""

    blocks: Integers
    counts: Integers
    addresses: Any
    starts: Any
    places: Any
    added: Any

    @classmethod
    def of(cls, table: BlockTable, width: int, members: Sequence[tuple[int, Changes]]) -> _Group:
        blocks = np.array([block for block, _ in members], np.int64)
        counts = np.array([len(found.positions) for _, found in members], np.int64)
        positions = np.concatenate([np.asarray(found.positions, np.uint32) for _, found in members])
        differences = np.concatenate([found.differences for _, found in members]).view(f"<i{width}")
        return cls(
            blocks,
            counts,
            upload_table(table.addresses[blocks], table.device),
            upload_table(prefix_sums(counts), table.device),
            upload(positions.view(np.int32), table.device, "changes"),
            upload(differences, table.device, "changes"),
        )


def _add_with_torch(table: BlockTable, group: _Group, *, undo: bool) -> None:
    bounds = pairwise(prefix_sums(group.counts).tolist())
    for block, (start, stop) in zip(group.blocks.tolist(), bounds, strict=True):
        elements = table.block(block).view(group.added.dtype)
        # In place, without memory for what it reads: an element is named once, so their order is nothing.
        elements.index_add_(0, group.places[start:stop], group.added[start:stop], alpha=-1 if undo else 1)
