"""What peers share that encode tensor by tensor: threads over tensors, and buffers that stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from deltaformat.bench.codecs import Bits

__all__ = ["Array", "Bytes", "Tensorwise"]

Array = npt.NDArray[np.unsignedinteger[Any]]
Bytes = npt.NDArray[np.uint8]

T = TypeVar("T")
R = TypeVar("R")


class Tensorwise:
    """Threads and, in each, a compressor of level 1, a decompressor and a buffer that grows.

    Args:
        threads: Tensors at a time.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._own = threading.local()

    def prepare(self, old: Bits) -> None:
        """Nothing is kept but buffers."""

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Call `function` on every item."""
        return (
            [function(item) for item in items]
            if self._pool is None
            else list(self._pool.map(function, items))
        )

    def buffer(self, nbytes: int, kind: str = "work") -> Bytes:
        """This thread's buffer of that kind: its first `nbytes` bytes."""
        held: Bytes | None = getattr(self._own, kind, None)
        if held is None or held.size < nbytes:
            held = np.empty(nbytes, np.uint8)
            setattr(self._own, kind, held)
        return held[:nbytes]

    def compress(self, data: Bytes) -> bytes:
        """Make one zstd frame of level 1."""
        if not hasattr(self._own, "compressor"):
            self._own.compressor = zstandard.ZstdCompressor(level=1)
        frame: bytes = self._own.compressor.compress(data.data)
        return frame

    def decompress(self, frame: Any) -> Bytes:
        """Undo `compress`, into this thread's buffer."""
        if not hasattr(self._own, "decompressor"):
            self._own.decompressor = zstandard.ZstdDecompressor()
        content = self.buffer(zstandard.frame_content_size(frame), "content")
        with self._own.decompressor.stream_reader(frame) as reader:
            filled = 0
            while filled < content.size:
                filled += reader.readinto(content[filled:].data)
        return content

    def differ(self, old: Array, new: Array) -> npt.NDArray[np.intp]:
        """Positions, rising, of elements whose bits differ."""
        mask = self.buffer(new.size, "mask").view(np.bool_)
        np.not_equal(new.reshape(-1), old.reshape(-1), out=mask)
        return np.flatnonzero(mask)
