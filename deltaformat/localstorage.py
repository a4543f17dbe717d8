"""A store in a directory.

Durable before visible (DF-CMT-01): a file is synced, then linked or renamed, then its directory synced.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO

import numpy as np

from deltaformat.blocks import Bytes, byte_view
from deltaformat.durable import sync_directory, sync_file
from deltaformat.errors import (
    DeltaFormatError,
    ErrorCode,
    MalformedError,
    MissingError,
    StoreError,
    UnsafeError,
)
from deltaformat.keys import parse_key
from deltaformat.storage import (
    Buffers,
    Data,
    NotStoredError,
    ObjectInfo,
    Ranges,
    check_length,
    check_prefix,
    check_range,
    check_size,
    chunks_of,
    missing,
)

__all__ = ["LocalStorage", "open_regular"]

# Other tools on object_store hide names of this form too.
_TEMPORARY = re.compile(r"(.*)#[0-9]+")
_NOW = "now"  # what `_now` calls its file; no key

# Errors that say that no link was made; after others (EIO, say, on a network's file system) there may be one.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT, *_NO_LINKS}


class LocalStorage:
    """A store in a directory of a local (or mounted) file system.

    It has no threads and no state but a list of directories known to be durable: it may be used after a fork.

    Args:
        path: The directory.
        create: Make it where there is none.

    Raises:
        MissingError: There is no such directory (store-missing).
        StoreError: It cannot be made, or is no directory.
    """

    def __init__(self, path: str, *, create: bool = False) -> None:
        if "\0" in path or any("\ud800" <= character <= "\udfff" for character in path):
            raise MalformedError(ErrorCode.INPUT_INVALID, f"{path[:100]!a} is no path", where="url")
        self._root = os.path.abspath(path)
        self._durable: set[str] = set()
        self._lock = threading.Lock()
        if os.path.isdir(self._root):
            return
        if not create:
            if os.path.lexists(self._root):
                raise StoreError(ErrorCode.STORE_FAILED, "is not a directory", where=self._root)
            raise MissingError(ErrorCode.STORE_MISSING, "there is no such directory", where=self._root)
        made = self._root
        missing_parents = []
        while not os.path.isdir(made):
            missing_parents.append(made)
            made = os.path.dirname(made)
        try:
            os.makedirs(self._root, exist_ok=True)
            for directory in missing_parents:
                sync_directory(os.path.dirname(directory))
        except OSError as error:
            raise StoreError(
                ErrorCode.STORE_FAILED, f"cannot make the directory: {error.strerror}", where=self._root
            ) from None

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    @property
    def url(self) -> str:
        """The directory's absolute path."""
        return self._root

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Return a whole object."""
        with self._reading(key) as file:
            size = os.fstat(file.fileno()).st_size
            check_size(key, size, limit)
            data = _read(file, size)
            check_length(key, 0, size, len(data))
            return data

    def get_ranges(self, key: str, ranges: Ranges) -> Buffers:
        """Return byte ranges of one object."""
        found: Buffers = []
        with self._reading(key) as file:
            size = os.fstat(file.fileno()).st_size
            for start, length in ranges:
                check_range(key, start, length)
                # DF-LIM-02: before it takes memory.
                check_length(key, start, length, min(length, max(0, size - start)))
                data = np.empty(length, np.uint8)  # large ones get huge pages, unlike bytes: 3 times as fast
                check_length(key, start, length, _read_into(file, data, start))
                found.append(data)
        return found

    def read_into(self, key: str, start: int, out: Bytes) -> None:
        """Fill `out` with an object's bytes from `start` on."""
        check_range(key, start, out.size)
        with self._reading(key) as file:
            check_length(key, start, out.size, _read_into(file, out, start))

    def put(self, key: str, data: Data) -> None:
        """Store an object, whether or not there is one."""
        path = self._path(key)
        with self._temporary(key, path, data) as temporary, _failing(key, "replace"):
            os.replace(temporary, path)
            sync_directory(os.path.dirname(path))

    def create(self, key: str, data: Data) -> bool:
        """Store an object if there is none."""
        path = self._path(key)
        with self._temporary(key, path, data) as temporary, _failing(key, "create"):
            try:
                os.link(temporary, path)
                created = True
            except FileExistsError:
                created = False
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                hint = "; the file system must have hard links" if error.errno in _NO_LINKS else ""
                raise NotStoredError(
                    ErrorCode.STORE_FAILED, f"cannot create it: {error.strerror}{hint}", where=key
                ) from None
            # Also where it exists: what a caller goes on to build on must be as durable as its own.
            sync_directory(os.path.dirname(path))
        return created

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size and time."""
        try:
            status = os.stat(self._path(key))
        except OSError as error:
            raise self._read_error(key, error) from None
        return _info(key, status)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Iterate over the objects below `prefix`."""
        directory = check_prefix(prefix).rstrip("/")
        try:
            entries = sorted(os.scandir(os.path.join(self._root, directory)), key=lambda entry: entry.name)
        except FileNotFoundError:
            self._check_root(prefix)
            return
        except OSError as error:
            raise _error(prefix or self._root, "list", error) from None
        for entry in entries:
            key = f"{directory}/{entry.name}" if directory else entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from self._list_below(key)
                elif not _TEMPORARY.fullmatch(entry.name):
                    yield _info(key, entry.stat())
            except FileNotFoundError:
                continue  # deleted since
            except OSError as error:
                raise _error(key, "list", error) from None

    def _list_below(self, key: str) -> Iterator[ObjectInfo]:
        try:
            prefix = check_prefix(f"{key}/")
        except DeltaFormatError:
            return  # no object of a store lies there
        yield from self.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are ignored."""
        paths = [self._path(key) for key in keys]
        for key, path in zip(keys, paths, strict=True):
            self._check_inside(key, path)
            try:
                os.unlink(path)
            except FileNotFoundError:
                self._check_root(key)
            except OSError as error:
                raise _error(key, "delete", error) from None

    def remove_leftovers(self, *, older_than: float) -> int:
        """Delete the temporary files that killed processes left behind, and no file of anything else.

        Args:
            older_than: Seconds since their last change; no write takes longer.

        Returns:
            How many were deleted.
        """
        count = 0
        with _failing(self._root, "delete leftovers"):
            for directory, _, names in os.walk(self._root):
                for name in names:
                    path = os.path.join(directory, name)
                    if not self._is_leftover(path):
                        continue
                    with suppress(FileNotFoundError):
                        # Compare with a file made now: the times are the file system's own.
                        if self._now() - os.stat(path).st_mtime > older_than:
                            os.unlink(path)
                            count += 1
        return count

    def _is_leftover(self, path: str) -> bool:
        """Whether a file is one that was to become an object."""
        match = _TEMPORARY.fullmatch(os.path.relpath(path, self._root).replace(os.sep, "/"))
        if match is None:
            return False
        try:
            return match[1] == _NOW or bool(parse_key(match[1]))
        except MalformedError:
            return False

    def _now(self) -> float:
        path = os.path.join(self._root, f"{_NOW}#{secrets.randbits(63)}")
        with open(path, "xb") as file:
            os.unlink(path)
            return os.fstat(file.fileno()).st_mtime

    def _path(self, key: str) -> str:
        parse_key(key)  # DF-KEY-01: no key of the grammar leaves the directory
        return os.path.join(self._root, *key.split("/"))

    @contextmanager
    def _reading(self, key: str) -> Iterator[FileIO]:
        try:
            with open(self._path(key), "rb", buffering=0, opener=open_regular) as file:
                yield file
        except OSError as error:
            raise self._read_error(key, error) from None

    @contextmanager
    def _temporary(self, key: str, path: str, data: Data) -> Iterator[str]:
        """A synced file beside `path` with `data` in it; gone afterwards, whatever happens."""
        temporary = f"{path}#{secrets.randbits(63)}"
        self._check_inside(key, path)
        try:
            try:
                self._make_durable(os.path.dirname(path))
                with open(temporary, "xb") as file:
                    for chunk in chunks_of(data):
                        file.write(byte_view(chunk))
                    file.flush()
                    sync_file(file.fileno())
            except OSError as error:
                raise NotStoredError(
                    ErrorCode.STORE_FAILED, f"cannot write it: {error.strerror or error}", where=key
                ) from None
            yield temporary
        finally:
            with suppress(OSError):
                os.unlink(temporary)

    def _check_inside(self, key: str, path: str) -> None:
        """Refuse to write or delete through a link in a directory's place: it leads elsewhere (DF-STO-05).

        Raises:
            UnsafeError: path-unsafe.
        """
        directory = os.path.dirname(path)
        while len(directory) > len(self._root):
            if os.path.islink(directory):
                raise UnsafeError(
                    ErrorCode.PATH_UNSAFE,
                    f"{directory} is a symbolic link, and nothing is written or deleted through one; move the"
                    " whole store, or mount what it leads to",
                    where=key,
                )
            directory = os.path.dirname(directory)

    def _make_durable(self, directory: str) -> None:
        """Make a directory of the store, and every one above it, durable: once per process."""
        if directory == self._root or directory in self._durable:
            return
        parent = os.path.dirname(directory)
        self._make_durable(parent)
        with suppress(FileExistsError):
            os.mkdir(directory)
        sync_directory(parent)  # also where it existed: who made it may not have come this far
        with self._lock:
            self._durable.add(directory)

    def _read_error(self, key: str, error: OSError) -> DeltaFormatError:
        if isinstance(error, FileNotFoundError):
            self._check_root(key)
            return missing(key)
        return _error(key, "read", error)

    def _check_root(self, where: str) -> None:
        """Tell a store that has gone (unmounted, say) from an object that is not there (DF-STO-04)."""
        if not os.path.isdir(self._root):
            raise StoreError(ErrorCode.STORE_FAILED, f"the directory {self._root} is gone", where=where)


def open_regular(path: str, flags: int) -> int:
    """Open a regular file, for `open(opener=...)`: a pipe in its place would be waited for without end."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def _read(file: FileIO, length: int) -> bytes:
    """Up to `length` bytes; one read gives at most 2 GiB."""
    data = file.read(length)
    if len(data) == length:
        return data
    parts = [data]
    while parts[-1] and (length := length - len(parts[-1])):
        parts.append(file.read(length))
    return b"".join(parts)


def _read_into(file: FileIO, data: Bytes, start: int) -> int:
    """Fill `data` from position `start` on; returns how far the file went."""
    filled = 0
    file.seek(start)
    while filled < data.size and (count := file.readinto(data[filled:].data)):
        filled += count
    return filled


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


def _error(where: str, operation: str, error: OSError) -> StoreError:
    return StoreError(
        ErrorCode.STORE_FAILED, f"cannot {operation} it: {error.strerror or error}", where=where
    )


@contextmanager
def _failing(key: str, operation: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _error(key, operation, error) from None
