"""The one way by which tensors' contents cross between a device and the host, and how much did.

Nothing else of this package copies weights, digests or changes in either direction, so that what crosses can
be counted; tests hold the counts against what is promised.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes
from deltaformat.gpu.engines import load_torch

__all__ = ["Cargo", "Download", "PinnedMemory", "Traffic", "traffic", "upload", "upload_table"]

Cargo = Literal["digests", "counts", "changes", "weights"]
"""What crosses: digests, numbers of changes, positions and differences, or bytes of weights."""


class Traffic:
    """Bytes that crossed since the program began, by direction and cargo. Safe for concurrent use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._waits = 0

    def add(self, direction: Literal["down", "up"], cargo: Cargo, nbytes: int) -> None:
        """Count a copy."""
        with self._lock:
            self._bytes[direction, cargo] += nbytes

    def wait(self) -> None:
        """Count a wait of the host for a device."""
        with self._lock:
            self._waits += 1

    def snapshot(self) -> Counter[tuple[str, str]]:
        """What was counted so far: (`down` to the host or `up` to a device, cargo) -> bytes.

        ("host", "waits") is how often the host waited for a device.
        """
        with self._lock:
            counted = self._bytes.copy()
            counted["host", "waits"] = self._waits
            return counted


traffic = Traffic()


class PinnedMemory:
    """Page-locked host memory, so that copies to a device run beside other work.

    torch rounds each allocation up to a power of two, so many are cut out of one slab; a slab is given back
    when nothing uses a part of it any more.

    Args:
        allocate: What makes a slab of so many bytes.
        slab_bytes: A power of two; what is larger than half of it is allocated by itself.
    """

    def __init__(
        self, allocate: Callable[[int], Bytes] | None = None, *, slab_bytes: int = 512 << 20
    ) -> None:
        self._allocate = allocate if allocate is not None else _pinned
        self._slab_bytes = slab_bytes
        self._slab: Bytes = np.empty(0, np.uint8)
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        """Memory of `nbytes`, at a multiple of 64 in its slab."""
        if nbytes > self._slab_bytes // 2:
            return self._allocate(nbytes)
        if self._used + nbytes > self._slab.size:
            self._slab, self._used = self._allocate(self._slab_bytes), 0
        start = self._used
        self._used = -(-(start + nbytes) // 64) * 64
        return self._slab[start : start + nbytes]


def _pinned(nbytes: int) -> Bytes:
    torch = load_torch()
    found: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return found


def upload(array: npt.NDArray[Any], to: Any, cargo: Cargo) -> Any:
    """Copy an array to a device, or over a tensor there, without waiting for it.

    The array must stay as it is until it has arrived: that is so once a later `Download` was taken.
    """
    torch = load_torch()
    traffic.add("up", cargo, array.nbytes)
    if isinstance(to, torch.Tensor):
        return to.copy_(_from_numpy(array), non_blocking=True)
    return _from_numpy(array).to(to, non_blocking=True)


def _from_numpy(array: npt.NDArray[Any]) -> Any:
    # torch has no read-only tensors; this one is only read.
    if not array.flags.writeable:
        array = np.frombuffer(bytearray(array.data), array.dtype)
    return load_torch().from_numpy(array)


def upload_table(array: npt.NDArray[Any], device: Any) -> Any:
    """Copy a table of addresses, places or lengths, which say nothing of the weights, to a device.

    From page-locked memory, so that the host does not wait for what the device is doing.
    """
    table = load_torch().from_numpy(np.array(array, np.int64))
    if table.numel() and load_torch().device(device).type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


class Download:
    """A copy to the host that is under way; work on the device that comes later is not waited for.

    Args:
        tensors: Contiguous, all on one device.
        cargo: What they are.
    """

    def __init__(self, tensors: list[Any], cargo: Cargo) -> None:
        self._hosts: list[Any] = []
        self._event: Any = None
        torch = load_torch()
        for tensor in tensors:
            traffic.add("down", cargo, tensor.numel() * tensor.element_size())
            if tensor.device.type == "cuda":
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                self._event = torch.cuda.Event() if self._event is None else self._event
                self._event.record(torch.cuda.current_stream(tensor.device))
            else:
                host = tensor.detach().clone() if tensor.device.type == "cpu" else tensor.cpu()
            self._hosts.append(host)

    def take(self) -> list[npt.NDArray[Any]]:
        """Wait for it."""
        traffic.wait()
        if self._event is not None:
            self._event.synchronize()
        return [host.numpy() for host in self._hosts]
