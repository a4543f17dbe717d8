"""Tensors on a device as one ragged table of blocks: what every launch is made over.

All arithmetic on places is in NumPy's int64 here, or in 64 bits on the device: tensors may have more than
2^31 elements. Within a block 32 bits do, since a block has at most 64 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import check_block_bytes
from deltaformat.columns import prefix_sums, ranges
from deltaformat.errors import ErrorCode, MalformedError
from deltaformat.gpu.engines import load_torch
from deltaformat.torchtensors import bytes_in_place, is_torch, type_name

__all__ = ["ALIGNMENT", "BlockTable", "Integers", "batches", "block_places", "flat_views"]

ALIGNMENT = 16
"""Kernels load 16 bytes at a time."""
COPIED_BYTES = 1 << 30
"""Most bytes of copies that one batch makes of tensors that are not contiguous or not aligned, unless a
single one has more."""

Integers = npt.NDArray[np.int64]


def block_places(sizes: Sequence[int], block_bytes: int) -> tuple[Integers, Integers, Integers, Integers]:
    """Cut runs of bytes into blocks (DF-BLK-02), all at once.

    Returns:
        For each block the number of its run, where it starts in the run, and its length; and the number of
        the first block of each run, with the number of all at the end.
    """
    nbytes = np.asarray(sizes, np.int64)
    counts = -(-nbytes // block_bytes)
    run = np.repeat(np.arange(len(nbytes), dtype=np.int64), counts)
    start = ranges(np.zeros(len(nbytes), np.int64), counts) * block_bytes
    return run, start, np.minimum(block_bytes, nbytes[run] - start), prefix_sums(counts)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Blocks of tensors on one device.

    Attributes:
        views: Each tensor's canonical bytes: uint8, one-dimensional, contiguous, at a multiple of 16.
        block_bytes: The block size.
        tensor, start, length: Each block's tensor, first byte in it, and bytes.
        first: Each tensor's first block; one more entry than tensors.
    """

    views: list[Any]
    block_bytes: int
    tensor: Integers
    start: Integers
    length: Integers
    first: Integers

    @classmethod
    def of(cls, views: Sequence[Any], block_bytes: int) -> BlockTable:
        """Make a table of flat views, as `flat_views` gives them."""
        check_block_bytes(block_bytes, where="block_bytes")
        return cls(list(views), block_bytes, *block_places([view.numel() for view in views], block_bytes))

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def device(self) -> Any:
        """Where they are."""
        return self.views[0].device

    @property
    def addresses(self) -> Integers:
        """Where each block begins in the device's memory."""
        bases = np.fromiter((view.data_ptr() for view in self.views), np.int64, len(self.views))
        return bases[self.tensor] + self.start

    def block(self, index: int) -> Any:
        """A block's bytes, as a view."""
        start, length = int(self.start[index]), int(self.length[index])
        return self.views[int(self.tensor[index])][start : start + length]


def flat_views(tensors: Iterable[Any]) -> list[Any]:
    """Each tensor's canonical bytes on its device, at a multiple of 16.

    A tensor that is contiguous and aligned is not copied.
    """
    return [_aligned(bytes_in_place(tensor)[2]) for tensor in tensors]


def _aligned(view: Any) -> Any:
    return view.clone() if view.numel() and view.data_ptr() % ALIGNMENT else view


def _needs_copy(tensor: Any) -> bool:
    flagged = tensor.is_conj() or tensor.is_neg()
    return flagged or not tensor.is_contiguous() or bool(tensor.data_ptr() % ALIGNMENT)


def batches(tensors: Sequence[Any]) -> list[list[int]]:
    """Divide tensors by device, and so that the copies of those that need one take bounded memory.

    Raises:
        MalformedError: One is not a torch tensor.
    """
    found: list[list[int]] = []
    open_batches: dict[Any, tuple[list[int], int]] = {}
    for number, tensor in enumerate(tensors):
        if not is_torch(tensor):
            raise MalformedError(
                ErrorCode.INPUT_INVALID, f"{type_name(tensor)} is no torch tensor", where=f"tensor {number}"
            )
        extra = tensor.numel() * tensor.element_size() if _plain(tensor) and _needs_copy(tensor) else 0
        batch, copied = open_batches.get(tensor.device, ([], 0))
        if not batch or (extra and copied + extra > COPIED_BYTES):
            batch, copied = [], 0
            found.append(batch)
        batch.append(number)
        open_batches[tensor.device] = batch, copied + extra
    return found


def _plain(tensor: Any) -> bool:
    """Whether its layout can be asked about; what is wrong with others is told when they are viewed."""
    torch = load_torch()
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and tensor.layout == torch.strided
    )
