"""Changes applied in place on the device, for servers whose weights are there (SPEC 9.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from deltaformat.blocks import Bytes
from deltaformat.columns import prefix_sums
from deltaformat.encodings import Changes
from deltaformat.errors import ErrorCode, MalformedError
from deltaformat.gpu.diffing import BlockDiff
from deltaformat.gpu.engines import Engine, choose_engine, current, load_torch, load_triton
from deltaformat.gpu.table import ALIGNMENT, BlockTable, Integers
from deltaformat.gpu.transfer import upload, upload_table
from deltaformat.torchtensors import bytes_in_place

__all__ = ["apply", "apply_to", "in_place"]


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
        view = bytes_in_place(tensor)[2]
        own = not view.numel() or view.data_ptr() == tensor.data_ptr()
        if not own or view.data_ptr() % ALIGNMENT or tensor.is_neg() or tensor.is_conj():
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                "not contiguous, or not at a multiple of 16 bytes in memory, so it cannot be changed in"
                " place; pass tensor.contiguous().clone() and use that",
                where=f"tensor {names[number]!r}" if names is not None else f"tensor {number}",
            )
        views.append(view)
    return views


def apply_to(
    table: BlockTable, changes: Sequence[BlockDiff], *, undo: bool = False, engine: Engine = "auto"
) -> None:
    """Apply changes to the blocks of a table; what cannot be undone is left as it is with `undo`."""
    chosen = choose_engine(engine, table.device)
    sparse: dict[int, list[tuple[int, Changes]]] = {}
    with current(table.device):
        for change in changes:
            block = int(table.first[change.tensor]) + change.block
            if change.changes is not None:
                sparse.setdefault(change.changes.width, []).append((block, change.changes))
            elif change.content is not None and not undo:
                _replace(table, block, change.content)
        for width, members in sparse.items():
            blocks = np.array([block for block, _ in members], np.int64)
            counts = np.array([len(found.positions) for _, found in members], np.int64)
            positions = np.concatenate([np.asarray(found.positions, np.uint32) for _, found in members])
            differences = np.concatenate([found.differences for _, found in members]).view(f"<i{width}")
            places = upload(positions.view(np.int32), table.device, "changes")
            added = upload(differences, table.device, "changes")
            if chosen == "triton":
                load_triton("diff_triton").apply(
                    upload_table(table.addresses[blocks], table.device),
                    upload_table(prefix_sums(counts), table.device),
                    places, added, most=int(counts.max()), undo=undo,
                )  # fmt: skip
            else:
                _apply_with_torch(table, blocks, counts, places, -added if undo else added)


def _replace(table: BlockTable, block: int, content: Bytes) -> None:
    upload(content, table.block(block), "weights")


def _apply_with_torch(table: BlockTable, blocks: Integers, counts: Integers, places: Any, added: Any) -> None:
    torch = load_torch()
    for block, (start, stop) in zip(blocks.tolist(), pairwise(prefix_sums(counts).tolist()), strict=True):
        elements = table.block(block).view(added.dtype)
        where = places[start:stop].to(torch.int64)
        elements[where] = elements[where] + added[start:stop]
