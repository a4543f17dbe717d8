"""Locks between processes that end with the process that holds them (POSIX `flock`)."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_lock", "try_lock", "unlock"]


def open_lock(path: Path) -> BinaryIO:
    """Open a file that is locked; made if it is not there. When it is closed, its lock ends."""
    return path.open("ab")


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
