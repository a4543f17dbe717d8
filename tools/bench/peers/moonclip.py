"""moonclip (PyPI): checkpoints in a directory, per tensor XOR against the last full one, zstd, in Rust.

Taken as installed, with synchronous saves and its own defaults otherwise, zstd level 3 among them. It writes
and syncs files and checks digests, which the other peers do not, and takes as many threads as it likes. Sizes
are what a save adds to its directory, padding to pages included.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deltaformat.bench.codecs import Bits, Payload
from deltaformat.blocks import Bytes

__all__ = ["Moonclip"]

SIZE = "snapshot"
_DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}


class Moonclip:
    """moonclip's manager."""

    name = "moonclip"
    note = "as installed: files, synced, all threads; sizes on disk"

    def __init__(self, threads: int) -> None:
        self._module: Any = importlib.import_module("moonclip")
        self._directory: Path | None = None
        self._manager: Any = None
        self._step = 0
        self._before = 0

    def prepare(self, old: Bits) -> None:
        """Begin a directory, with the old state as its full snapshot."""
        self.close()
        self._directory = Path(tempfile.mkdtemp(prefix="deltaformat-bench-moonclip-"))
        with _silence():
            self._manager = self._module.MoonclipManager(storage_root=str(self._directory), async_save=False)
        self._save(old)
        self._before = _disk_usage(self._directory)

    def encode(self, old: Bits, new: Bits) -> Payload:
        """Save a delta; its size on disk is given as that many bytes of nothing."""
        assert self._directory is not None
        self._save(new)
        return _Saved(self._directory, self._before)

    def apply(self, payload: Payload, target: Bits) -> None:
        """Load the newest snapshot."""
        with _silence():
            _, tensors = self._manager.load_latest()
        for name, data in tensors.items():
            array = target[name]
            np.copyto(array, np.frombuffer(data, array.dtype).reshape(array.shape))

    def close(self) -> None:
        """Remove the directory."""
        if self._directory is not None:
            self._manager = None
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _save(self, state: Bits) -> None:
        tensors = {
            name: (list(array.shape), _DTYPES[array.dtype.itemsize], array.tobytes())
            for name, array in state.items()
        }
        with _silence():
            self._manager.save_tensors(self._step, tensors)
        self._step += 1


class _Saved(Mapping[str, Bytes]):
    """What a save has added to a directory, counted when it is asked for: counting is no part of saving."""

    def __init__(self, directory: Path, before: int) -> None:
        self._directory, self._before = directory, before

    def __getitem__(self, key: str) -> Bytes:
        if key != SIZE:
            raise KeyError(key)
        return np.zeros(max(0, _disk_usage(self._directory) - self._before), np.uint8)

    def __iter__(self) -> Iterator[str]:
        return iter([SIZE])

    def __len__(self) -> int:
        return 1


def _disk_usage(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@contextlib.contextmanager
def _silence() -> Any:
    """It reports to the process's standard streams, past Python."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for number, stream in enumerate(kept, start=1):
            os.dup2(stream, number)
            os.close(stream)
        os.close(nowhere)
