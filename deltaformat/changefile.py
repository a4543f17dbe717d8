"""A change set as a file: what a mirror's other processes read, and from which a crashed update is completed.

The file is private to one host: no part of the format. It holds, after a JSON header, columns over blocks,
then all positions, new and old elements; and at its end the XXH3-128 of everything before. Values are
absolute, so that to write them again does no harm. Tensors that are new as a whole are named only: their
bytes lie elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from deltaformat.durable import sync_directory, sync_file
from deltaformat.errors import CorruptError, ErrorCode
from deltaformat.patches import BlockChange, ChangeSet, TensorChange, element_bytes
from deltaformat.tensors import TensorSpec

__all__ = ["read_changes", "replace_file", "sync_directory", "write_changes"]

_MAGIC = b"dfchange"
_COLUMNS = {"row": "<u4", "start": "<u8", "count": "<u8", "values": "<u4", "dense": "u1", "known": "u1"}
_CHECK_BYTES = 16


def write_changes(
    path: Path, changes: ChangeSet, rows: Mapping[str, int], header: Mapping[str, Any], *, durable: bool
) -> None:
    """Write a change set under its final name, whole or not at all.

    Args:
        path: Where.
        changes: What.
        rows: The number by which a reader knows each tensor.
        header: JSON members for the reader.
        durable: Whether it must outlast a power cut.
    """
    blocks = [(rows[name], block) for name, change in changes.tensors.items() for block in change.blocks]
    columns = {
        "row": [row for row, _ in blocks],
        "start": [block.start for _, block in blocks],
        "count": [block.count for _, block in blocks],
        "values": [block.values.size for _, block in blocks],
        "dense": [block.positions is None for _, block in blocks],
        "known": [block.old is not None for _, block in blocks],
    }
    members = dict(header) | {
        "blocks": len(blocks),
        "whole": [rows[name] for name, change in changes.tensors.items() if change.content is not None],
        "removed": list(changes.removed),
    }
    text = json.dumps(members).encode()
    parts: list[Any] = [_MAGIC, len(text).to_bytes(8, "little"), text]
    parts += [np.array(columns[name], dtype).tobytes() for name, dtype in _COLUMNS.items()]
    for _, block in blocks:
        for array in (block.positions, block.values, block.old):
            if array is not None:
                parts.append(np.ascontiguousarray(array).view(np.uint8).data)
    check = xxhash.xxh3_128()
    for part in parts:
        check.update(part)
    replace_file(path, [*parts, check.digest()], durable=durable)


def read_changes(
    path: Path, specs: Sequence[TensorSpec] | Mapping[int, TensorSpec]
) -> tuple[dict[str, Any], ChangeSet]:
    """Read a change set; tensors that are new as a whole are left out and named in the header's `whole`.

    Args:
        path: Where.
        specs: The tensors by their numbers.

    Raises:
        CorruptError: It is damaged.
        FileNotFoundError: It is not there.
    """
    data = np.fromfile(path, np.uint8)
    if (
        data.size < 16 + _CHECK_BYTES
        or xxhash.xxh3_128(data[:-_CHECK_BYTES].data).digest() != data[-_CHECK_BYTES:].tobytes()
    ):
        raise CorruptError(ErrorCode.HASH_MISMATCH, "a file of changes is damaged", where=str(path))
    taken = 16 + int.from_bytes(data[8:16].tobytes(), "little")
    header = json.loads(data[16:taken].tobytes())

    def take(dtype: str, count: int) -> Any:
        nonlocal taken
        size = np.dtype(dtype).itemsize * count
        # Copied where it is not aligned.
        array = np.frombuffer(data[taken : taken + size].tobytes(), dtype)
        taken += size
        return array

    columns = {name: take(dtype, header["blocks"]).tolist() for name, dtype in _COLUMNS.items()}
    changes = ChangeSet(removed=tuple(header["removed"]))
    for row, start, count, values, dense, known in zip(*columns.values(), strict=True):
        spec = specs[row]
        kind = f"<u{element_bytes(spec.dtype)}"
        block = BlockChange(
            start,
            count,
            None if dense else take("<u4", values),
            take(kind, values),
            take(kind, values) if known else None,
        )
        changes.tensors.setdefault(spec.name, TensorChange(*spec)).blocks.append(block)
    return header, changes


def replace_file(
    path: Path, parts: Sequence[bytes | memoryview], *, durable: bool, temporary: Path | None = None
) -> None:
    """Write a file under another name, then give it its own.

    Args:
        path: Its name.
        parts: Its bytes.
        durable: Whether it must outlast a power cut.
        temporary: The other name; by default one beside it.
    """
    temporary = temporary or path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            if durable:
                file.flush()
                sync_file(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)
