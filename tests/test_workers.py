"""Threads that share a list with their caller."""

import threading
import time

import pytest

from deltaformat.workers import Workers


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("items", [0, 1, 2, 100])
def test_results_are_in_order(threads, items):
    with Workers(threads, name="test") as workers:
        for _ in range(3):
            assert workers.map(lambda item: -item, range(items)) == [-item for item in range(items)]


def test_the_caller_is_one_of_them():
    barrier = threading.Barrier(2, timeout=20)

    def meet(_):
        barrier.wait()
        return threading.current_thread().name

    with Workers(2, name="test") as workers:
        names = set(workers.map(meet, range(2)))
    assert len(names) == 2
    assert threading.current_thread().name in names


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_after_an_error_nothing_is_begun_and_nothing_is_at_work(threads):
    begun, ended = [], []

    def work(item):
        begun.append(item)
        try:
            if item == 5:
                raise KeyError(item)
            time.sleep(0.001)
            return item
        finally:
            ended.append(item)

    with Workers(threads, name="test") as workers:
        with pytest.raises(KeyError, match="5"):
            workers.map(work, range(1000))
        assert sorted(begun) == sorted(ended)
        assert len(begun) <= 5 + threads
        count = len(begun)
        time.sleep(0.01)
        assert len(begun) == count
        assert workers.map(abs, [-1, -2, -3]) == [1, 2, 3]


def test_whoever_fails_the_caller_is_told():
    """In the caller's own thread, and in another."""
    for failing_is_caller in (True, False):
        barrier = threading.Barrier(2, timeout=20)

        def work(_, barrier=barrier, failing=failing_is_caller):
            barrier.wait()
            if (threading.current_thread() is threading.main_thread()) is failing:
                raise ValueError("mine")

        with Workers(2, name="test") as workers, pytest.raises(ValueError, match="mine"):
            workers.map(work, range(2))
