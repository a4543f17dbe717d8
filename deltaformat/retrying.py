"""How long something that may yet succeed is tried again: backoff with jitter, bounded in time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from deltaformat.errors import ErrorCode, MalformedError

__all__ = ["RETRY_SECONDS", "TRIES_AGAIN", "Pauses", "Retry", "may_pass", "seconds_option"]

RETRY_SECONDS: Final = 30.0  # of a request to a bucket
TRIES_AGAIN: Final = 2  # of such a request, however long each takes

_MAY_PASS: Final = frozenset({408, 409, 425, 429})  # and all from 500 on


def may_pass(status: int) -> bool:
    """Whether a request that was answered with this HTTP status may succeed later."""
    return status >= 500 or status in _MAY_PASS


@dataclass(frozen=True, slots=True)
class Retry:
    """How long the outcome of a request is pursued (for a commit's *create*: DF-CMT-03).

    Attributes:
        seconds: Give up after this time, counted from the first try.
        again: Tries after the first that are made however long each takes; else a large upload that breaks
            off after `seconds` would not be tried again.
        first: The first pause; each later one is twice as long.
        longest: The longest pause.
        busy: The least pause after a server said that it has too much to do, and not when to come again.
        sleep: What pauses.
        clock: What measures time.
        jitter: A number from 0 to 1, by which pauses are spread so that clients do not march in step.
    """

    seconds: float = 60.0
    again: int = 0
    first: float = 0.1
    longest: float = 5.0
    busy: float = 1.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random


class Pauses:
    """The pauses between the tries of one request; the time runs from when this is made."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._give_up = retry.clock() + retry.seconds
        self._pause = retry.first
        self._again = retry.again

    def wait(self, at_least: float = 0.0) -> bool:
        """Pause, unless the time would be up after it (and no try is left that is made all the same).

        Args:
            at_least: Seconds that the server asked for (Retry-After).

        Returns:
            Whether to try again.
        """
        longest = max(self._pause, at_least)
        late = self._retry.clock() + longest > self._give_up
        if late and (self._again < 1 or longest > self._retry.seconds):
            return False
        self._again -= 1
        self._retry.sleep(max(self._pause * (0.5 + 0.5 * self._retry.jitter()), at_least))
        self._pause = min(2 * self._pause, self._retry.longest)
        return True


def seconds_option(options: Mapping[str, object], name: str, default: float) -> float:
    """A time in seconds among the options of a bucket.

    Raises:
        MalformedError: It is no number, or not one from above 0 to a day (input-invalid).
    """
    if name not in options:
        return default
    try:
        seconds = float(str(options[name]))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 86_400:
        raise MalformedError(
            ErrorCode.INPUT_INVALID, f"{name} is a number of seconds above 0", where="storage_options"
        )
    return seconds
