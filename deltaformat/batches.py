"""Reads tensors in batches: many small tensors cost one request, and no batch more memory than it says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from deltaformat.reader import Version
from deltaformat.tensors import HostTensor, to_host

__all__ = ["BATCH_BYTES", "batches", "read_many"]

BATCH_BYTES = 32 << 20
"""How much is read at a time, unless a single tensor is larger."""


def batches(version: Version, names: Iterable[str]) -> Iterator[list[str]]:
    """Divide names into runs of at most `BATCH_BYTES` bytes; a tensor above it has a run of its own."""
    batch: list[str] = []
    size = 0
    for name in names:
        nbytes = version.map.nbytes(version.map.row(name))
        if batch and size + nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch


def read_many(version: Version, names: Sequence[str]) -> dict[str, HostTensor]:
    """Read tensors at once, verified."""
    return {name: to_host(name, tensor) for name, tensor in version.get_many(names).items()}
