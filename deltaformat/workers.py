"""Threads that share the work on a list with their caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

__all__ = ["Workers"]

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """Up to `threads` threads, of which the caller's is one.

    A task per item would cost about as much as a small block's work, under the GIL: here each thread takes
    item after item. Use it as a context manager, or call `close`.

    Args:
        threads: How many items are worked on at a time.
        name: What the threads' names begin with.
    """

    def __init__(self, threads: int, *, name: str) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix=name) if threads > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Call `function` for every item; results are in the order of the items.

        After an error no further item is begun; it is raised when no thread is at work any more.
        """
        if self._pool is None or len(items) < 2:
            return [function(item) for item in items]
        left = deque(range(len(items)))
        results: dict[int, R] = {}

        def work() -> None:
            try:
                while True:
                    try:
                        number = left.popleft()
                    except IndexError:
                        return
                    results[number] = function(items[number])
            except BaseException:
                left.clear()
                raise

        others = [self._pool.submit(work) for _ in range(min(self._threads, len(items)) - 1)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()
        return [results[number] for number in range(len(items))]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
