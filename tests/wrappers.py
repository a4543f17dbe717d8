"""Storages around a storage: they count, fail, lose replies, or stop for good, as a test wants."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from deltaformat.errors import ErrorCode, StoreError
from deltaformat.storage import ObjectInfo, Storage, chunks_of

T = TypeVar("T")

MUTATING = frozenset({"put", "create", "delete"})
OPERATIONS = frozenset({"get", "get_ranges", "head", "list"}) | MUTATING


class Killed(BaseException):
    """What a process that was killed would have seen: nothing of the package catches it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call: its operation, its key (a prefix for list, the first key for delete), the bytes it moved."""

    operation: str
    key: str
    nbytes: int


class Wrapper:
    """Passes everything on; subclasses override `around`."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.lock = threading.Lock()

    def around(self, operation: str, key: str, run: Callable[[], T]) -> T:
        return run()

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self.around("get", key, lambda: self.inner.get(key, limit=limit))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Any:
        return self.around("get_ranges", key, lambda: self.inner.get_ranges(key, ranges))

    def put(self, key: str, data: Any) -> None:
        self.around("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: Any) -> bool:
        return self.around("create", key, lambda: self.inner.create(key, data))

    def head(self, key: str) -> ObjectInfo:
        return self.around("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self.around("list", prefix, lambda: list(self.inner.list(prefix))))

    def delete(self, keys: Sequence[str]) -> None:
        self.around("delete", keys[0] if keys else "", lambda: self.inner.delete(keys))


class Counting(Wrapper):
    """Counts requests and the bytes they move. A request that fails counts, too."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.requests: list[Request] = []

    def reset(self) -> None:
        self.requests.clear()

    def count(self, *operations: str, prefix: str = "") -> int:
        """How many requests there were: of these operations, or of all, below `prefix`."""
        return sum(1 for _ in self._chosen(operations, prefix))

    def nbytes(self, *operations: str, prefix: str = "") -> int:
        """How many bytes they moved."""
        return sum(request.nbytes for request in self._chosen(operations, prefix))

    def by_operation(self) -> Counter[str]:
        return Counter(request.operation for request in self.requests)

    def keys(self, *operations: str) -> list[str]:
        """The keys in the order of the requests."""
        return [request.key for request in self._chosen(operations, "")]

    def _chosen(self, operations: tuple[str, ...], prefix: str) -> Iterator[Request]:
        for request in self.requests:
            if request.key.startswith(prefix) and (not operations or request.operation in operations):
                yield request

    def _note(self, operation: str, key: str, nbytes: int) -> None:
        with self.lock:
            self.requests.append(Request(operation, key, nbytes))

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        data = b""
        try:
            data = self.inner.get(key, limit=limit)
            return data
        finally:
            self._note("get", key, len(data))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Any:
        self._note("get_ranges", key, sum(length for _, length in ranges))
        return self.inner.get_ranges(key, ranges)

    def put(self, key: str, data: Any) -> None:
        self._note("put", key, sum(memoryview(chunk).nbytes for chunk in chunks_of(data)))
        self.inner.put(key, data)

    def create(self, key: str, data: Any) -> bool:
        self._note("create", key, sum(memoryview(chunk).nbytes for chunk in chunks_of(data)))
        return self.inner.create(key, data)

    def around(self, operation: str, key: str, run: Callable[[], T]) -> T:
        self._note(operation, key, 0)
        return run()


class StopAt(Wrapper):
    """Operation number `n` (from 1) raises `Killed`, and so does every later one of any kind.

    Args:
        inner: The storage.
        n: Which one; None never stops, and `seen` tells how many there were.
        executed: Whether operation `n` was executed before.
        operations: The operations that count.
    """

    def __init__(
        self,
        inner: Storage,
        n: int | None,
        *,
        executed: bool = False,
        operations: frozenset[str] = MUTATING,
    ) -> None:
        super().__init__(inner)
        self.n = n
        self.executed = executed
        self.operations = operations
        self.seen = 0
        self.stopped = False

    def around(self, operation: str, key: str, run: Callable[[], T]) -> T:
        with self.lock:
            if self.stopped:
                raise Killed
            if operation in self.operations:
                self.seen += 1
                self.stopped = self.seen == self.n
            stopping = self.stopped
        if not stopping:
            return run()
        if self.executed:
            run()
        raise Killed


class LostReply(Wrapper):
    """The first `times` creates of a key that `choose` picks are executed, but their reply is lost.

    Args:
        inner: The storage.
        times: How many.
        choose: Which keys.
        exists: Tell that the key exists, as a client does that has repeated the request; do not raise.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        times: int = 1,
        choose: Callable[[str], bool] = lambda key: key.startswith("log/"),
        exists: bool = False,
    ) -> None:
        super().__init__(inner)
        self.times = times
        self.choose = choose
        self.exists = exists

    def create(self, key: str, data: Any) -> bool:
        created = self.inner.create(key, data)
        with self.lock:
            lose = self.times > 0 and self.choose(key)
            self.times -= lose
        if not lose:
            return created
        if self.exists:
            return False
        raise StoreError(ErrorCode.STORE_FAILED, "the reply was lost", where=key)


class Flaky(Wrapper):
    """Operations fail before they are executed, with StoreError.

    Args:
        inner: The storage.
        fail: Is asked with operation, key, number of operations before; or how likely a failure is.
        seed: For the likelihood.
    """

    def __init__(
        self, inner: Storage, fail: Callable[[str, str, int], bool] | float, *, seed: int = 0
    ) -> None:
        super().__init__(inner)
        generator = random.Random(seed)
        self.fail = fail if callable(fail) else lambda operation, key, before: generator.random() < fail
        self.seen = 0
        self.failed = 0

    def around(self, operation: str, key: str, run: Callable[[], T]) -> T:
        with self.lock:
            fails = self.fail(operation, key, self.seen)
            self.seen += 1
            self.failed += fails
        if fails:
            raise StoreError(ErrorCode.STORE_FAILED, "the store is out of order", where=key)
        return run()
