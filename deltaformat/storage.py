"""Where objects live: the operations of SPEC 5 behind one small protocol, and how a URL is opened."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast, runtime_checkable
from urllib.parse import unquote, urlsplit

from deltaformat.blocks import Buffer, Bytes, byte_view
from deltaformat.errors import (
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    LimitError,
    MalformedError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.keys import parse_key, probe_key

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = [
    "Buffers",
    "Data",
    "NotStoredError",
    "ObjectInfo",
    "ObstoreStorage",
    "Ranges",
    "ReadsInto",
    "Storage",
    "chunks_of",
    "open_storage",
    "probe",
    "redact",
]

Data: TypeAlias = Buffer | Sequence[Buffer]
"""An object's bytes: one buffer, or a list or tuple of buffers that follow each other."""

Buffers: TypeAlias = list[Buffer]

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""(start, length) each, length at least 1."""


class NotStoredError(StoreError):
    """A write failed, and it is certain that nothing was stored."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object; `modified` is by the store's own clock."""

    key: str
    size: int
    modified: datetime


@runtime_checkable
class Storage(Protocol):
    """What deltaformat needs of a store (SPEC 5). All methods may be called from several threads at once.

    Every method raises `MalformedError` for a key outside the grammar of SPEC 6, and `StoreError`
    (store-failed) where the store fails; no message holds credentials (DF-SEC-02). Only absence is told as
    absence (DF-STO-04).
    """

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        ...

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Return a whole object.

        Raises:
            MissingError: There is none (object-missing).
            LimitError: It has more than `limit` bytes; they are not read.
        """
        ...

    def get_ranges(self, key: str, ranges: Ranges) -> Buffers:
        """Return byte ranges of one object.

        Raises:
            MissingError: There is no such object (object-missing).
            CorruptError: A range is shorter than asked (size-mismatch).
        """
        ...

    def put(self, key: str, data: Data) -> None:
        """Store an object, durably, whether or not there is one."""
        ...

    def create(self, key: str, data: Data) -> bool:
        """Store an object, durably, if there is none; return False, and change nothing, where there is one.

        Raises:
            NotStoredError: It failed, and nothing was stored.
            StoreError: It failed, and the outcome is unknown.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return size and time; `MissingError` where there is no object."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Iterate over the objects below `prefix`: "" or a key's beginning up to a "/"; in any order."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are ignored."""
        ...


@runtime_checkable
class ReadsInto(Protocol):
    """What a storage may have besides: reading a range to where it is wanted, without another copy of it."""

    def read_into(self, key: str, start: int, out: Bytes) -> None:
        """Fill `out` with an object's bytes from `start` on; errors as of `get_ranges`."""
        ...


def chunks_of(data: Data) -> Sequence[Buffer]:
    """The buffers that make up an object."""
    return data if isinstance(data, list | tuple) else [cast("Buffer", data)]


def check_range(key: str, start: int, length: int) -> None:
    """Refuse a range that cannot be meant: stores differ in what they make of it."""
    if start < 0 or length < 1:
        raise MalformedError(ErrorCode.INPUT_INVALID, f"no range: start {start}, length {length}", where=key)


def check_length(key: str, start: int, length: int, found: int) -> None:
    """Refuse a range that came back shorter or longer than asked."""
    if found != length:
        raise CorruptError(
            ErrorCode.SIZE_MISMATCH,
            f"gave {found} of {length} bytes at {start}: it is shorter than it must be",
            where=key,
        )


def check_prefix(prefix: str) -> str:
    """Refuse a listing that is not of a directory: "log/1" would find 1, 10 and 100."""
    if prefix and re.fullmatch(r"([a-z0-9-]+/)+", prefix) is None:
        raise MalformedError(ErrorCode.INPUT_INVALID, f"a listing's prefix ends with '/', not {prefix!r}")
    return prefix


def check_size(key: str, size: int, limit: int | None) -> None:
    """Refuse to read an object larger than `limit` (DF-LIM-02)."""
    if limit is not None and size > limit:
        raise LimitError(ErrorCode.LIMIT_EXCEEDED, f"has {size} bytes, at most {limit} are read", where=key)


def missing(key: str) -> MissingError:
    """The error for an object that is not there."""
    return MissingError(ErrorCode.OBJECT_MISSING, "is not in the store", where=key)


_USERINFO = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"\?[^\s\"')>]+")


def redact(text: str) -> str:
    """The first line of an error's text, without user information and queries of URLs (DF-SEC-02)."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return _QUERY.sub("?…", _USERINFO.sub("", line))[:500]


_SINGLE_PUT_BYTES: Final = 256 << 20


class ObstoreStorage:
    """A store behind obstore: memory, and any other of its stores.

    obstore's runtime has threads, which a forked child does not have: start processes that use it by "spawn"
    or "forkserver", not by "fork". (`LocalStorage` has none, and may be used in a forked child.)

    Args:
        store: One of obstore's stores.
        url: Where it is, without credentials.
    """

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self._url

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Return a whole object."""
        import obstore

        parse_key(key)
        try:
            result = obstore.get(self._store, key)
            check_size(key, result.meta["size"], limit)
            return bytes(result.bytes())
        except DeltaFormatError:
            raise
        except Exception as error:
            raise _obstore_error(error, key) from None

    def get_ranges(self, key: str, ranges: Ranges) -> Buffers:
        """Return byte ranges of one object."""
        import obstore

        parse_key(key)
        for start, length in ranges:
            check_range(key, start, length)
        if not ranges:
            return []
        try:
            found = obstore.get_ranges(
                self._store,
                key,
                starts=[start for start, _ in ranges],
                lengths=[length for _, length in ranges],
                coalesce=0,  # the plan has coalesced already; the default would read gaps of up to 1 MiB
            )
        except Exception as error:
            raise _range_error(error, key) from None
        for (start, length), buffer in zip(ranges, found, strict=True):
            check_length(key, start, length, len(buffer))
        return [memoryview(buffer) for buffer in found]

    def put(self, key: str, data: Data) -> None:
        """Store an object, whether or not there is one."""
        self._put(key, data, create=False)

    def create(self, key: str, data: Data) -> bool:
        """Store an object if there is none."""
        return self._put(key, data, create=True)

    def _put(self, key: str, data: Data, *, create: bool) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        parse_key(key)
        chunks = [byte_view(chunk) for chunk in chunks_of(data)]
        # One request where it can be: an upload in parts that is cut off leaves parts behind that cost money.
        parts = not create and sum(chunk.nbytes for chunk in chunks) > _SINGLE_PUT_BYTES
        try:
            obstore.put(
                self._store,
                key,
                iter(chunks),
                mode="create" if create else "overwrite",
                use_multipart=parts,
                chunk_size=16 << 20,
            )
        except Exception as error:
            if create and isinstance(error, AlreadyExistsError):
                return False
            raise _obstore_error(error, key) from None
        return True

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size and time."""
        import obstore

        parse_key(key)
        try:
            return _info(obstore.head(self._store, key))
        except Exception as error:
            raise _obstore_error(error, key) from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Iterate over the objects below `prefix`."""
        import obstore

        check_prefix(prefix)
        try:
            for batch in obstore.list(self._store, prefix or None):
                yield from map(_info, batch)
        except Exception as error:
            raise _obstore_error(error, prefix) from None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are ignored."""
        import obstore

        for key in keys:
            parse_key(key)
        try:
            obstore.delete(self._store, list(keys))
        except FileNotFoundError:
            # Some stores stop at the first that is missing: go one by one.
            if len(keys) > 1:
                for key in keys:
                    self.delete([key])
        except Exception as error:
            raise _obstore_error(error, keys[0]) from None


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"])


def _obstore_error(error: Exception, key: str) -> DeltaFormatError:
    if isinstance(error, FileNotFoundError):
        return missing(key)
    return StoreError(ErrorCode.STORE_FAILED, f"the store failed: {redact(str(error))}", where=key)


def _range_error(error: Exception, key: str) -> DeltaFormatError:
    """Stores differ in how they say that a range reaches beyond the end."""
    text = redact(str(error))
    if type(error).__name__ == "GenericError" and "range" in text.lower():
        return CorruptError(ErrorCode.SIZE_MISMATCH, f"is shorter than it must be ({text})", where=key)
    return _obstore_error(error, key)


# -- opening -------------------------------------------------------------------------------------------------

SCHEMES: Final = ("file://", "memory://")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._/-]{1,200}")

_memory: dict[str, Storage] = {}
_memory_lock = threading.Lock()


def open_storage(url: str | os.PathLike[str] | Storage, *, create: bool = False) -> Storage:
    """Open a store's place.

    Args:
        url: A path, `file:///path`, `memory://name` (one store of that name per process), or a `Storage`,
            which is returned as it is.
        create: Make the directory where there is none.

    Raises:
        MissingError: There is no such directory (store-missing).
        UnsupportedError: A scheme that this version does not open.
        MalformedError: A URL that cannot be meant.
        StoreError: The directory cannot be made or read.
    """
    from deltaformat.localstorage import LocalStorage

    if isinstance(url, os.PathLike):
        return LocalStorage(os.fspath(url), create=create)
    if not isinstance(url, str):
        if not isinstance(url, Storage):
            raise MalformedError(
                ErrorCode.INPUT_INVALID, f"a path or URL is wanted, not {type(url).__name__}", where="url"
            )
        return url
    if not url:
        raise MalformedError(ErrorCode.INPUT_INVALID, "an empty path; the directory itself is .", where="url")
    match = _SCHEME.match(url)
    if match is None:
        return LocalStorage(url, create=create)
    scheme, rest = match[1].lower(), url[match.end() :]
    if scheme == "memory":
        return _open_memory(rest)
    if scheme == "file":
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise MalformedError(ErrorCode.INPUT_INVALID, f"not a URL ({error})", where="url") from None
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
            raise MalformedError(ErrorCode.INPUT_INVALID, "a file URL is file:///absolute/path", where="url")
        return LocalStorage(unquote(parts.path), create=create)
    # The rest of the URL may hold credentials: name the scheme only (DF-SEC-02).
    raise UnsupportedError(
        ErrorCode.NOT_SUPPORTED,
        f"cannot open {scheme}:// URLs; use a path, {' or '.join(SCHEMES)}",
        where="url",
    )


def _open_memory(name: str) -> Storage:
    from obstore.store import MemoryStore

    if _MEMORY_NAME.fullmatch(name) is None:
        raise MalformedError(ErrorCode.INPUT_INVALID, "a memory URL is memory://name", where="url")
    with _memory_lock:
        if name not in _memory:
            _memory[name] = ObstoreStorage(MemoryStore(), f"memory://{name}")
        return _memory[name]


def probe(storage: Storage) -> None:
    """Find out whether *create* can be trusted (DF-STO-02). The probe's object is deleted, if it may be.

    Raises:
        StoreError: It cannot (create-unsafe), or the store failed (store-failed).
    """
    key = probe_key(secrets.token_hex(16))
    first, second = secrets.token_bytes(16), secrets.token_bytes(16)
    try:
        if _find(storage, key) is not None:
            raise _unsafe("a fresh key is not missing", key)
        created = storage.create(key, first)
        found = _find(storage, key)
        # A client that repeats a request whose reply was lost is told that its own object exists: what counts
        # is what is there.
        if found != first:
            what = "cannot be read (a cached miss?)" if found is None else "has other bytes"
            raise _unsafe(f"an object just {'created' if created else 'refused'} {what}", key)
        if storage.create(key, second):
            raise _unsafe("an object that exists was created again", key)
        if _find(storage, key) != first:
            raise _unsafe("an object was changed although its creation was refused", key)
    finally:
        with suppress(StoreError, MissingError):
            storage.delete([key])


def _find(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.get(key, limit=1 << 10)
    except MissingError:
        return None
    except LimitError:
        return b""


def _unsafe(what: str, key: str) -> StoreError:
    return StoreError(
        ErrorCode.CREATE_UNSAFE,
        f"create-if-absent cannot be trusted here: {what};"
        " use another store, or open this one as its single writer",
        where=key,
    )
