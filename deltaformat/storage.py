"""Where objects live: the operations of SPEC 5 behind one small protocol, and how a URL is opened."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeAlias, cast, runtime_checkable
from urllib.parse import unquote, urlsplit

from deltaformat.blocks import Buffer, Bytes
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
from deltaformat.keys import probe_key

__all__ = [
    "Buffers",
    "Data",
    "NotStoredError",
    "ObjectInfo",
    "Ranges",
    "ReadsInto",
    "RemovesLeftovers",
    "Storage",
    "chunks_of",
    "least_poll",
    "open_storage",
    "probe",
    "reads_into",
    "removes_leftovers",
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

    A storage whose *create* is more than one operation of the store (look, then put) says so by an attribute
    `exclusive_create` that is False: no probe from outside could find that out. One that limits how often it
    may be asked says by `least_poll_seconds` how long followers wait between two looks at least.
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


def least_poll(storage: Storage) -> float:
    """Seconds between two looks at what is new, at least (see `Storage`)."""
    return float(getattr(storage, "least_poll_seconds", 0.0))


@runtime_checkable
class RemovesLeftovers(Protocol):
    """What a storage may have besides: sweeping up what writes left behind whose process was killed."""

    def remove_leftovers(self, *, older_than: float) -> int:
        """Delete what was last changed more than `older_than` seconds ago and was to become an object.

        Returns:
            How many were deleted.
        """
        ...


def reads_into(storage: Storage) -> ReadsInto | None:
    """The storage, or the one that it wraps, if it reads to where bytes are wanted."""
    return next((layer for layer in _layers(storage) if isinstance(layer, ReadsInto)), None)


def removes_leftovers(storage: Storage) -> RemovesLeftovers | None:
    """The storage, or the one that it wraps, if it can sweep up."""
    return next((layer for layer in _layers(storage) if isinstance(layer, RemovesLeftovers)), None)


def _layers(storage: Storage) -> Iterator[Storage]:
    """A storage and what it wraps, by the attribute `wrapped` of those that add nothing to reading."""
    layer: Storage | None = storage
    while layer is not None:
        yield layer
        layer = getattr(layer, "wrapped", None)


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


# -- opening -------------------------------------------------------------------------------------------------

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._/-]{1,200}")

_memory: dict[str, Storage] = {}
_memory_lock = threading.Lock()


def open_storage(
    url: str | os.PathLike[str] | Storage,
    *,
    create: bool = False,
    options: Mapping[str, str] | None = None,
) -> Storage:
    """Open a store's place.

    Args:
        url: A path, `file:///path`, `memory://name` (one store of that name per process), `s3://`, `gs://`,
            `az://`, `hf://buckets/` (each with a bucket and a prefix), `http(s)://` (read-only), or a
            `Storage`, which is returned as it is.
        create: Make the directory where there is none. Buckets are not made.
        options: Of the client, where there is one (see `deltaformat.buckets.open_bucket`).

    Raises:
        MissingError: There is no such directory (store-missing).
        UnsupportedError: A scheme that this version does not open.
        MalformedError: A URL that cannot be meant, or options for what has none.
        StoreError: The directory cannot be made or read, or credentials are named that cannot be had.
    """
    if options is not None and not isinstance(options, Mapping):
        raise MalformedError(ErrorCode.INPUT_INVALID, "a mapping of names to values", where="storage_options")
    match = _SCHEME.match(url) if isinstance(url, str) else None
    scheme = match[1].lower() if match is not None else ""
    if scheme in ("s3", "gs", "az", "http", "https"):
        from deltaformat.buckets import open_bucket

        return open_bucket(scheme, str(url), options or {})
    if scheme == "hf":
        from deltaformat.hubstorage import open_hub_bucket

        return open_hub_bucket(str(url), options or {})
    if options:
        raise MalformedError(ErrorCode.INPUT_INVALID, "only buckets have options", where="storage_options")
    return _open_here(url, scheme, create=create)


def _open_here(url: str | os.PathLike[str] | Storage, scheme: str, *, create: bool) -> Storage:
    """Open what needs no client: directories, memory, what the caller made."""
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
    if not scheme:
        return LocalStorage(url, create=create)
    if scheme == "memory":
        return _open_memory(url[len("memory://") :])
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
        f"cannot open {scheme}:// URLs; use a path, file://, memory://, s3://, gs://, az://, https:// or"
        " hf://buckets/",
        where="url",
    )


def _open_memory(name: str) -> Storage:
    from obstore.store import MemoryStore

    from deltaformat.objectstorage import ObstoreStorage

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
    if not getattr(storage, "exclusive_create", True):
        raise _unsafe("this kind of store has no *create*: two writers could both win", storage.url)
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
        with suppress(DeltaFormatError):
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
        " use another store, or, as its single writer, open the writer with single_writer=True",
        where=key,
    )
