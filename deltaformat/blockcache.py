"""A local cache of decoded blocks, shared by processes, that is never trusted and never in the way.

A block is found by the store's identity, the digest's name and the digest. A hit is hashed again before it
is used, so a wrong or cut entry is a miss, and so are errors of the disk. It is a directory of files and no
more: libraries for such caches add an index in SQLite, which can be wrong and which processes wait for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from deltaformat.errors import ErrorCode, MalformedError, UnsafeError
from deltaformat.localstorage import open_regular

__all__ = ["BlockCache"]

_ROOT = "deltaformat-blocks-1"
_ENTRY = re.compile(r"[0-9a-f]{32}/[a-z0-9-]+/[0-9a-f]{2}/(?:[0-9a-f]{2})+")
_TEMPORARY = re.compile(r"[0-9a-f]{32}/[a-z0-9-]+/[0-9a-f]{2}/\.[0-9a-f]{32}\.tmp")
_STALE_SECONDS = 3_600
# Eviction frees one part in so many beyond need, so that not every block walks the directory; and a process
# counts again what others have added each time it has added as much.
_SLACK = 16


class Digest(Protocol):
    """What the cache needs of a digest algorithm."""

    @property
    def name(self) -> str:
        """Its name in the format."""

    def __call__(self, data: bytes, /) -> bytes:
        """Hash `data`."""


class BlockCache:
    """Decoded blocks of one store in a directory that several stores and processes may share.

    Args:
        directory: Where; it is made at need. Only files of the cache's own naming are ever deleted there, and
            only its user may write in it: `xxh3-128` is no defence against who can choose content.
        max_bytes: Bound on the sum of all entries' sizes, of all stores. Several processes that write at the
            same time may go past it, each by a sixteenth.
        store_uuid: The store's identity, from its descriptor.
        digest: The store's digest algorithm.
        clock: Seconds since the epoch, as the files' times are.

    Raises:
        UnsafeError: Others could write in the cache (path-unsafe).
        MalformedError: An argument that cannot be meant (input-invalid).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int,
        *,
        store_uuid: str,
        digest: Digest,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < 0:
            raise MalformedError(
                ErrorCode.INPUT_INVALID, "max_bytes must not be negative", where="block cache"
            )
        if not re.fullmatch(r"[0-9a-f]{32}", store_uuid):
            raise MalformedError(
                ErrorCode.INPUT_INVALID, f"{store_uuid!r} is not a store's uuid", where="block cache"
            )
        self._root = Path(directory) / _ROOT
        _check_private(self._root)
        self._base = self._root / store_uuid / digest.name
        self._digest = digest
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        # What there is for all this process knows; None: not counted yet.
        self._bytes: int | None = None
        self._since_count = 0

    def get(self, digest: bytes, length: int, *, chain: bytes = b"") -> bytes | None:
        """Return the block with this digest and length if the cache has it whole and right (DF-DIG-01).

        Args:
            digest: The block's digest.
            length: Its bytes.
            chain: What it was rebuilt from: part of the entry's name, since an equal digest alone does not
                make blocks equal (DF-DIG-02).
        """
        path = self._path(digest, chain)
        try:
            with open(path, "rb", opener=open_regular) as file:
                data = file.read(length + 1)
        except OSError:
            return None
        if len(data) == length and self._digest(data) == digest:
            with contextlib.suppress(OSError):
                os.utime(path, (self._clock(),) * 2)
            return data
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def put(self, digest: bytes, data: bytes | bytearray | memoryview, *, chain: bytes = b"") -> None:
        """Keep a block whose digest the caller has checked; the least recently used make room for it."""
        size = memoryview(data).nbytes
        if size > self._max_bytes:
            return
        path = self._path(digest, chain)
        temporary = path.with_name(f".{secrets.token_hex(16)}.tmp")
        try:
            if path.exists():
                return
            self._make_room(size)
            self._root.parent.mkdir(parents=True, exist_ok=True)
            self._root.mkdir(mode=0o700, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                os.utime(temporary, (self._clock(),) * 2)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError:
            return

    def _path(self, digest: bytes, chain: bytes) -> Path:
        name = digest.hex() if not chain else hashlib.sha256(digest + chain).hexdigest()
        return self._base / name[:2] / name

    def _make_room(self, size: int) -> None:
        """Count `size` in, and evict until the bound holds with it."""
        with self._lock:
            step = self._max_bytes // _SLACK
            if self._bytes is None or self._bytes + size > self._max_bytes or self._since_count > step:
                self._bytes = self._evict(self._max_bytes - size)
                self._since_count = 0
            self._bytes += size
            self._since_count += size

    def _evict(self, allowed: int) -> int:
        """Walk all entries; if they exceed `allowed`, delete the oldest and some more. Return the rest."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total <= allowed:
            return total
        target = max(0, allowed - self._max_bytes // _SLACK)
        for _, size, path in entries:
            if total <= target:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """(last use, size, path) of every entry; forgotten temporary files are deleted on the way."""
        for directory, _, names in os.walk(self._root):
            relative = os.path.relpath(directory, self._root).replace(os.sep, "/")
            for name in names:
                path = os.path.join(directory, name)
                try:
                    info = os.lstat(path)
                    if _ENTRY.fullmatch(f"{relative}/{name}"):
                        yield info.st_mtime, info.st_size, path
                    elif (
                        _TEMPORARY.fullmatch(f"{relative}/{name}")
                        and info.st_mtime < self._clock() - _STALE_SECONDS
                    ):
                        os.unlink(path)
                except OSError:
                    continue


def _check_private(root: Path) -> None:
    """Refuse a cache that somebody else has made, or may write in."""
    try:
        info = os.lstat(root)
    except OSError:
        return  # not made yet, or of no use
    except ValueError as error:
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"it cannot be a cache's directory ({error})",
            where=f"cache {str(root)!r}",
        ) from None
    if os.name != "posix":
        return
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise UnsafeError(
            ErrorCode.PATH_UNSAFE,
            "others could write there; give a cache of your own, or take their rights away (chmod -R go-w)",
            where=f"cache {str(root)!r}",
        )
