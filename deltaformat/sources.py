"""Where a pack's bytes come from: the store, or an immutable object outside it (SPEC 10.2)."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from urllib.parse import quote, urlsplit
from urllib.request import url2pathname

from deltaformat.blocks import Buffer, Bytes, byte_view
from deltaformat.errors import (
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    LimitError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.external import check_external_url, parse_hub_url
from deltaformat.hubclient import HubClient
from deltaformat.keys import check_object, external_key, parse_key
from deltaformat.localstorage import open_regular
from deltaformat.packs import ExternalRef, PackEntry, PackRef
from deltaformat.storage import Storage, reads_into

__all__ = ["Sources", "fetch_whole", "sha256_of"]

READ_BYTES = 8 << 20


def fetch_whole(storage: Storage, key: str, size: int) -> bytes:
    """Read an object whose key carries its hash, and never more than its stated size (DF-KEY-02, DF-LIM-02).

    Raises:
        CorruptError: it has another size or hash.
        MissingError, StoreError: as `Storage.get`.
    """
    try:
        data = storage.get(key, limit=size)
    except LimitError:
        raise CorruptError(ErrorCode.SIZE_MISMATCH, f"has more than {size} bytes", where=key) from None
    check_object(key, data, size=size)
    return data


class Sources:
    """Reads byte ranges of packs.

    Args:
        storage: The store.
        allow_external: URL prefixes that its user allows beside what SPEC 10.2 does (DF-EXT-01).
    """

    def __init__(self, storage: Storage, *, allow_external: Sequence[str] = ()) -> None:
        self._storage = storage
        self._direct = reads_into(storage)
        self._allowed = tuple(allow_external)
        self._hub: HubClient | None = None
        self._hub_lock = threading.Lock()

    def ranges(self, ref: PackEntry, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read ranges, each (offset, length) in bytes, of one pack.

        Raises:
            MissingError: the object is not there.
            UnsafeError: an external URL that is not allowed and has no copy in the store.
            StoreError: the storage failed.
        """
        if isinstance(ref, PackRef):
            return self._storage.get_ranges(ref.key, ranges)
        try:
            self.check_allowed(ref.url)
            return self._read_external(ref, ranges)
        except DeltaFormatError as error:
            # DF-EXT-03: one upload mends a base that is gone; without it the first error is what the user
            # must know.
            try:
                return self._storage.get_ranges(external_key(ref.sha256), ranges)
            except MissingError:
                raise error from None

    def into(self, ref: PackRef, start: int, out: Bytes) -> None:
        """Fill `out` with a pack's bytes from `start` on, if `direct`; errors as of `ranges`."""
        assert self._direct is not None
        self._direct.read_into(ref.key, start, out)

    @property
    def direct(self) -> bool:
        """Whether the storage can read to where bytes are wanted."""
        return self._direct is not None

    def _read_external(self, ref: ExternalRef, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read an allowed URL.

        It goes through no client of the store's, so none of its credentials go with it (DF-EXT-02). To the
        Hub goes the token that its own tools use.
        """
        found = parse_hub_url(ref.url)
        if found is None:
            return _read_file(ref, ranges)
        with self._hub_lock:
            if self._hub is None:
                self._hub = HubClient()
            hub = self._hub
        path = f"/{found.repository}/resolve/{found.revision}/{quote(found.path)}"
        return hub.ranges(path, ranges, where=ref.url)

    def copied(self, ref: ExternalRef, wanted: tuple[int, int]) -> Buffer | None:
        """Read a range of the store's copy of an external object; None where there is none (DF-EXT-03)."""
        try:
            return self._storage.get_ranges(external_key(ref.sha256), [wanted])[0]
        except MissingError:
            return None

    def check_allowed(self, url: str) -> None:
        """Refuse the URL of an external object that `ranges` would not read from there.

        Raises:
            UnsafeError: external-refused (DF-EXT-01).
        """
        check_external_url(url, self._allowed, where=url)

    def check_readable(self, ref: PackEntry) -> None:
        """Refuse an external object that this version could not read: neither from its URL nor from a copy.

        Raises:
            UnsafeError: external-refused (DF-EXT-01).
            UnsupportedError: a kind of URL that is not fetched, and no copy in the store.
            MissingError, CorruptError, StoreError: it is not there, too short, or not to be had.
        """
        if isinstance(ref, ExternalRef):
            self.check_allowed(ref.url)
            self.ranges(ref, [(ref.size - 1, 1)])

    def check_whole(self, ref: PackEntry) -> None:
        """Read a whole pack and check its size and SHA-256 (DF-KEY-02).

        Raises:
            CorruptError: size-mismatch, or hash-mismatch.
            Otherwise as `ranges`.
        """
        where, expected = ref.url if isinstance(ref, ExternalRef) else ref.key, sha256_of(ref)
        if isinstance(ref, PackRef) and (size := self._storage.head(ref.key).size) != ref.size:
            raise CorruptError(
                ErrorCode.SIZE_MISMATCH, f"has {size} bytes instead of {ref.size}", where=where
            )
        digest = hashlib.sha256()
        for start in range(0, ref.size, READ_BYTES):
            (data,) = self.ranges(ref, [(start, min(READ_BYTES, ref.size - start))])
            digest.update(byte_view(data))
        if digest.hexdigest() != expected and not (isinstance(ref, ExternalRef) and self._copy_is_good(ref)):
            raise CorruptError(ErrorCode.HASH_MISMATCH, "its bytes do not have their SHA-256", where=where)

    def _copy_is_good(self, ref: ExternalRef) -> bool:
        """Whether the store has a copy of an external object that verifies (DF-EXT-03)."""
        digest = hashlib.sha256()
        for start in range(0, ref.size, READ_BYTES):
            data = self.copied(ref, (start, min(READ_BYTES, ref.size - start)))
            if data is None:
                return False
            digest.update(byte_view(data))
        return digest.hexdigest() == ref.sha256


def sha256_of(ref: PackEntry) -> str | None:
    """hex(SHA-256) that a pack table entry states."""
    return ref.sha256 if isinstance(ref, ExternalRef) else parse_key(ref.key).sha256


def _unfetched(ref: ExternalRef) -> UnsupportedError:
    return UnsupportedError(
        ErrorCode.NOT_SUPPORTED,
        f"such URLs are not fetched; put a copy of the object at {external_key(ref.sha256)} in the store",
        where=ref.url,
    )


def _read_file(ref: ExternalRef, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
    """Read an external object of this machine."""
    parts = urlsplit(ref.url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise _unfetched(ref)
    try:
        with open(url2pathname(parts.path), "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size != ref.size:
                raise CorruptError(
                    ErrorCode.SIZE_MISMATCH,
                    f"has {size} bytes instead of {ref.size}; it was replaced",
                    where=ref.url,
                )
            found: list[Buffer] = []
            for offset, length in ranges:
                file.seek(offset)
                data = file.read(length)
                if len(data) != length:
                    raise CorruptError(ErrorCode.SIZE_MISMATCH, "shrank while it was read", where=ref.url)
                found.append(data)
            return found
    except FileNotFoundError as error:
        raise MissingError(ErrorCode.OBJECT_MISSING, "the external file is gone", where=ref.url) from error
    except OSError as error:
        raise StoreError(
            ErrorCode.STORE_FAILED, f"cannot be read ({error.strerror})", where=ref.url
        ) from error
