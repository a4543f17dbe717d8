"""Compares two versions bit for bit, in bounded memory, reading only what may differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import deltaformat as df
from deltaformat import batches
from deltaformat.dtypes import get_dtype

__all__ = ["TensorChange", "compare", "count_differences"]

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How a tensor differs.

    Attributes:
        name: Its name.
        status: `same`, `changed`, `replaced` (another dtype or shape), `added` or `removed`.
        dtype: Its dtype in B, or in A if it was removed.
        elements: Number of its weights.
        nbytes: Their bytes.
        changed: Weights whose bits differ; all where there is nothing to compare them with.
        density: `changed` over `elements`.
    """

    name: str
    status: str
    dtype: str
    elements: int
    nbytes: int
    changed: int
    density: float


def compare(
    old: df.Version, new: df.Version, *, block_bytes: int, report: Callable[[int], object]
) -> list[TensorChange]:
    """Compare all tensors of two versions of one store; in the order of their names.

    Args:
        old: Version A.
        new: Version B.
        block_bytes: The store's block size.
        report: Called with the bytes of B that are done, now and then.
    """
    changes: dict[str, TensorChange] = {}
    unread: list[str] = []
    done = 0

    def settle(change: TensorChange) -> None:
        nonlocal done
        changes[change.name] = change
        done += change.nbytes if change.name in new else 0

    for name in sorted({*old.keys(), *new.keys()}, key=str.encode):
        info = new.info(name) if name in new else old.info(name)
        if name not in old or name not in new:
            settle(_change(name, "added" if name in new else "removed", info, math.prod(info.shape)))
            continue
        before = old.info(name)
        if (before.dtype, before.shape) != (info.dtype, info.shape):
            settle(_change(name, "replaced", info, math.prod(info.shape)))
            continue
        suspect = ~_known_equal(old, new, name)
        if not suspect.any():
            settle(_change(name, "same", info, 0))
        elif info.nbytes > batches.BATCH_BYTES and info.shape and not get_dtype(info.dtype).bits % 8:
            settle(_counted(name, info, _count_in_rows(old, new, name, suspect, block_bytes)))
            report(done)
        else:
            unread.append(name)
    for batch in batches.batches(new, unread):
        first, second = batches.read_many(old, batch), batches.read_many(new, batch)
        for name in batch:
            info = new.info(name)
            bits = get_dtype(info.dtype).bits
            settle(_counted(name, info, count_differences(first[name].data, second[name].data, bits)))
        report(done)
    return [changes[name] for name in sorted(changes, key=str.encode)]


def _counted(name: str, info: df.TensorInfo, changed: int) -> TensorChange:
    return _change(name, "changed" if changed else "same", info, changed)


def _change(name: str, status: str, info: df.TensorInfo, changed: int) -> TensorChange:
    elements = math.prod(info.shape)
    density = changed / elements if elements else 0.0
    return TensorChange(name, status, info.dtype, elements, info.nbytes, changed, density)


def count_differences(first: Bytes, second: Bytes, bits: int) -> int:
    """Count the elements of `bits` bits whose bits differ between two equally long runs of bytes."""
    if bits % 8:  # elements share bytes
        different: Bytes = np.unpackbits(first ^ second, bitorder="little")
        return int(different.reshape(-1, bits).any(axis=1).sum())
    unsigned = np.dtype(f"u{bits // 8}")
    return int(np.count_nonzero(first.view(unsigned) != second.view(unsigned)))


def _known_equal(old: df.Version, new: df.Version, name: str) -> Flags:
    """Which blocks are equal without a look at their bytes.

    Equal digests tell that only between a version and its parent (DF-DIG-02). The same pieces of the same
    packs, which never change, tell it for any two versions.
    """
    before, after = old.map.blocks(old.map.index[name]), new.map.blocks(new.map.index[name])
    if new.parent == old.seq or old.parent == new.seq or new.seq == old.seq:
        same: Flags = (old.map.digest[before] == new.map.digest[after]).all(axis=1)
        return same
    equal: Flags = old.map.depth[before] == new.map.depth[after]
    for block in np.flatnonzero(equal).tolist():
        equal[block] = _chain(old, before.start + block) == _chain(new, after.start + block)
    return equal


def _chain(version: df.Version, block: int) -> list[tuple[object, ...]]:
    layout = version.map
    pieces = slice(int(layout.piece_start[block]), int(layout.piece_start[block + 1]))
    return [
        (layout.packs[pack], offset, length, encoding)
        for pack, offset, length, encoding in zip(
            layout.pack[pieces].tolist(),
            layout.offset[pieces].tolist(),
            layout.length[pieces].tolist(),
            layout.encoding[pieces].tolist(),
            strict=True,
        )
    ]


def _count_in_rows(old: df.Version, new: df.Version, name: str, suspect: Flags, block_bytes: int) -> int:
    """Count differences a bounded run of rows at a time, without rows that are known to be equal."""
    info = new.info(name)
    bits, rows = get_dtype(info.dtype).bits, info.shape[0]
    row_bytes = info.nbytes // rows
    step = max(1, batches.BATCH_BYTES // row_bytes)
    first, second = old.get_slice(name), new.get_slice(name)
    changed = 0
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if suspect[start * row_bytes // block_bytes : -(-stop * row_bytes // block_bytes)].any():
            changed += count_differences(_raw(first[start:stop]), _raw(second[start:stop]), bits)
    return changed


def _raw(tensor: object) -> Bytes:
    return np.ascontiguousarray(np.asarray(tensor)).reshape(-1).view(np.uint8)
