"""Look at a store again and again: less often while it fails, not at all where that cannot help."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from deltaformat.errors import ErrorCode, MissingError, StoreError

__all__ = ["watch"]

RETRY_S = 30.0
"""The longest wait between two looks while the store fails."""
SLICE_S = 0.5
"""A longer wait is cut into such parts, to be ended early."""

T = TypeVar("T")


def watch(
    look: Callable[[], T | None],
    *,
    poll: float,
    stop: Callable[[], bool] = lambda: False,
    on_error: Callable[[StoreError, float], object] | None = None,
) -> Iterator[T]:
    """Give what `look` finds, as it comes. A branch that is not there yet is waited for.

    Args:
        look: Finds something new, or None.
        poll: Seconds between two looks that find nothing.
        stop: Asked between looks, and twice a second while waiting; ends the iteration.
        on_error: Told of every failure that may pass, and how many seconds are waited then; by default the
            first since a look that succeeded gives a RuntimeWarning.

    Raises:
        StoreError: One that does not pass.
        DeltaFormatError: Any other error of `look`.
    """
    wait, failing = poll, False
    while not stop():
        found = None
        try:
            found = look()
            wait, failing = poll, False
        except StoreError as error:
            if not error.passing:
                raise
            wait = min(2 * wait, max(RETRY_S, poll))
            if on_error is not None:
                on_error(error, wait)
            elif not failing:
                warnings.warn(f"{error}; trying again", RuntimeWarning, stacklevel=2)
            failing = True
        except MissingError as error:
            if error.code is not ErrorCode.BRANCH_MISSING:
                raise
        if found is not None:
            yield found
        else:  # all that failed at the same moment shall not come back at the same moment
            pause(wait * (0.5 + 0.5 * random.random()) if failing else wait, stop)


def pause(seconds: float, stop: Callable[[], bool]) -> None:
    """Sleep, unless `stop` says so in the meantime."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > SLICE_S:
        time.sleep(SLICE_S)
        if stop():
            return
    time.sleep(max(0.0, left))
