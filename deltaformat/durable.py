"""Makes files and directories outlast a power cut."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

__all__ = ["sync_directory", "sync_file"]


def sync_file(descriptor: int) -> None:
    """Bring a file's bytes to the medium; what a buffered file holds must have been flushed before."""
    if sys.platform == "darwin":  # pragma: no cover - another system
        import fcntl

        with suppress(OSError):  # fsync there does not reach the medium; not every file system knows this
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Bring a directory's entries to the medium."""
    if sys.platform == "win32":  # pragma: no cover - another system
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)
