"""How long something that may yet succeed is tried again: backoff with jitter, bounded in time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Pauses", "Retry"]


@dataclass(frozen=True, slots=True)
class Retry:
    """How long the outcome of a request is pursued (for a commit's *create*: DF-CMT-03).

    Attributes:
        seconds: Give up after this time.
        first: The first pause; each later one is twice as long.
        longest: The longest pause.
        sleep: What pauses.
        clock: What measures time.
        jitter: A number from 0 to 1, by which pauses are spread so that clients do not march in step.
    """

    seconds: float = 60.0
    first: float = 0.1
    longest: float = 5.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random


class Pauses:
    """The pauses between the tries of one request; the time runs from when this is made."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._give_up = retry.clock() + retry.seconds
        self._pause = retry.first

    def wait(self, at_least: float = 0.0) -> bool:
        """Pause, unless the time would be up after it.

        Args:
            at_least: Seconds that the server asked for (Retry-After).

        Returns:
            Whether to try again.
        """
        longest = max(self._pause, at_least)
        if self._retry.clock() + longest > self._give_up:
            return False
        self._retry.sleep(max(self._pause * (0.5 + 0.5 * self._retry.jitter()), at_least))
        self._pause = min(2 * self._pause, self._retry.longest)
        return True
