"""A storage whose *create* cannot be trusted, for its single writer (DF-STO-02)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deltaformat.blocks import Buffer
from deltaformat.errors import MissingError
from deltaformat.storage import Data, ObjectInfo, Ranges, Storage

__all__ = ["SingleWriterStorage"]


class SingleWriterStorage:
    """Looks before it creates.

    Attributes:
        exclusive_create: False; see `Storage`.
        wrapped: The storage.

    That is no protection against a second writer: the user has promised that there is none.

    Args:
        storage: The storage; all else is passed on to it.
    """

    exclusive_create = False

    def __init__(self, storage: Storage) -> None:
        self.wrapped = storage

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self.wrapped.url

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """As the storage does."""
        return self.wrapped.get(key, limit=limit)

    def get_ranges(self, key: str, ranges: Ranges) -> list[Buffer]:
        """As the storage does."""
        return self.wrapped.get_ranges(key, ranges)

    def put(self, key: str, data: Data) -> None:
        """As the storage does."""
        self.wrapped.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        """Put the object if it is not there."""
        try:
            self.wrapped.head(key)
        except MissingError:
            self.wrapped.put(key, data)
            return True
        return False

    def head(self, key: str) -> ObjectInfo:
        """As the storage does."""
        return self.wrapped.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As the storage does."""
        return self.wrapped.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """As the storage does."""
        self.wrapped.delete(keys)
