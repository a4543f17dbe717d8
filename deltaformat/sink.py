"""Where a writer's pieces go: packs that fill up and are uploaded in the background, in bounded memory.

A piece's final offset is known only when its pack is finished, and a pack's key only when it is hashed. Until
`close`, a piece is named by (pack id, slot); `close` waits until every pack is durable and gives the table
that turns those into offsets.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Buffer, byte_view
from deltaformat.keys import pack_key
from deltaformat.packs import Pack, PackBuilder, PackRef
from deltaformat.storage import Storage

__all__ = ["PackSink", "Place"]

UPLOADS = 2  # packs being hashed and written at a time
PACKS_IN_MEMORY = 3  # that fill or are on their way


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece will lie: the sink's pack number (from 0) and the slot in that pack."""

    pack: int
    slot: int


class PackSink:
    """Collects pieces into packs of about `limit` bytes and uploads each as it fills.

    Memory: at most `PACKS_IN_MEMORY` packs, those that fill included. Buffers given to it must stay unchanged
    until `close` returns.

    Args:
        storage: Where packs go.
        claim: seq of the writer's claim.
        limit: Bytes at which a pack is closed.
        uploaded: Called, in the caller's thread, with the bytes of each pack that is durable.
    """

    def __init__(self, storage: Storage, *, claim: int, limit: int, uploaded: Callable[[int], None]) -> None:
        self._storage = storage
        self._claim = claim
        self._limit = limit
        self._uploaded = uploaded
        self._pool = ThreadPoolExecutor(UPLOADS, thread_name_prefix="deltaformat-upload")
        self._room = threading.Semaphore(PACKS_IN_MEMORY)
        self._open: dict[str, tuple[int, PackBuilder]] = {}  # by kind: re-base pieces have packs of their own
        self._pending: deque[tuple[int, Future[PackRef]]] = deque()
        self._refs: dict[int, PackRef] = {}
        self._offsets: dict[int, npt.NDArray[np.int64]] = {}
        self._count = 0

    def add(self, payload: Buffer, *, kind: str = "step") -> Place:
        """Add one payload."""
        pack, builder = self._builder(kind, byte_view(payload).nbytes)
        return Place(pack, builder.add(payload))

    def add_tensor(self, name: str, dtype: str, shape: Sequence[int], data: Buffer) -> Place:
        """Add a whole raw tensor (DF-PCK-02)."""
        pack, builder = self._builder("step", byte_view(data).nbytes)
        return Place(pack, builder.add_tensor(name, dtype, shape, data))

    def fits_whole(self, nbytes: int) -> bool:
        """Whether a tensor of `nbytes` can lie in one pack."""
        return nbytes <= self._limit

    def close(self) -> tuple[list[PackRef], list[npt.NDArray[np.int64]]]:
        """Finish and upload what is left.

        Returns:
            Per pack, in order of its number: its reference, and the offset of each slot.

        Raises:
            StoreError: an upload failed; nothing refers to the packs that did succeed.
        """
        try:
            for kind in list(self._open):
                self._seal(kind)
            self._settle(wait=True)
            return [self._refs[i] for i in range(self._count)], [self._offsets[i] for i in range(self._count)]
        finally:
            self.abort()

    def abort(self) -> None:
        """Stop; packs that are not yet uploaded are dropped."""
        self._open.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _builder(self, kind: str, nbytes: int) -> tuple[int, PackBuilder]:
        if kind in self._open and self._open[kind][1].size + nbytes > self._limit:
            self._seal(kind)
        if kind not in self._open:
            self._room.acquire()
            # DF-WR-03: an equal pack of before may be about to be collected.
            self._open[kind] = (self._count, PackBuilder(nonce=secrets.token_hex(8)))
            self._count += 1
        return self._open[kind]

    def _seal(self, kind: str) -> None:
        number, builder = self._open.pop(kind)
        pack = builder.finish()
        self._offsets[number] = np.asarray(pack.offsets, np.int64)
        future = self._pool.submit(self._upload, pack)
        future.add_done_callback(lambda _: self._room.release())
        self._pending.append((number, future))
        self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
        """Take in the uploads that are done; one that failed stops the stage now, not at its end."""
        while self._pending and (wait or self._pending[0][1].done()):
            number, future = self._pending.popleft()
            self._refs[number] = future.result()
            self._uploaded(self._refs[number].size)

    def _upload(self, pack: Pack) -> PackRef:
        ref = PackRef(pack_key(self._claim, pack.sha256()), pack.size)
        self._storage.put(ref.key, pack.chunks)
        return ref
