"""Locks between processes that end with the process that holds them (POSIX `flock`).

A lock belongs to the open file, which a child by `fork` shares, and would keep when its parent has ended (a
data loader's worker, say). So a child closes these files as it begins; that ends no lock of its parent.
"""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_lock", "try_lock", "unlock"]

_files: weakref.WeakSet[BinaryIO] = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_files):
        file.close()
    _files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def open_lock(path: Path) -> BinaryIO:
    """Open a file that is locked; made if it is not there. When it is closed, its lock ends.

    In a child by `fork` it is closed.
    """
    file = path.open("ab")
    _files.add(file)
    return file


def try_lock(file: BinaryIO, *, shared: bool = False) -> bool:
    """Lock it if nobody else has; the lock ends with the process."""
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def unlock(file: BinaryIO) -> None:
    """End a lock; one whose file is closed has ended."""
    import fcntl

    if not file.closed:
        fcntl.flock(file, fcntl.LOCK_UN)
