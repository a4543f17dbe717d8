"""A storage that can only be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from deltaformat.blocks import Buffer
from deltaformat.errors import ErrorCode, UnsupportedError
from deltaformat.storage import Data, ObjectInfo, Ranges, Storage

__all__ = ["ReadOnlyStorage"]


class ReadOnlyStorage:
    """Reads by the storage and refuses all else; readers need no more (DF-STO-03).

    Args:
        storage: The storage.
        what: What it is, for the error.
    """

    def __init__(self, storage: Storage, what: str) -> None:
        self._storage = storage
        self._what = what

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._storage.url!r})"

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self._storage.url

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """As the storage does."""
        return self._storage.get(key, limit=limit)

    def get_ranges(self, key: str, ranges: Ranges) -> list[Buffer]:
        """As the storage does."""
        return self._storage.get_ranges(key, ranges)

    def head(self, key: str) -> ObjectInfo:
        """As the storage does."""
        return self._storage.head(key)

    def put(self, key: str, data: Data) -> NoReturn:
        """Refuse it."""
        self._refuse(key)

    def create(self, key: str, data: Data) -> NoReturn:
        """Refuse it."""
        self._refuse(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Refuse it."""
        self._refuse(prefix or self.url)

    def delete(self, keys: Sequence[str]) -> None:
        """Refuse it."""
        for key in keys:
            self._refuse(key)

    def _refuse(self, key: str) -> NoReturn:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            f"{self._what} is read-only here; write through the bucket's own URL",
            where=key,
        )
