"""Creates a record, and finds out whether it was created (SPEC 12.5)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from deltaformat.errors import CommitUnknown, ErrorCode, MissingError, StoreError
from deltaformat.keys import record_key
from deltaformat.records import MAX_RECORD_BYTES, Record, parse_record
from deltaformat.storage import NotStoredError, Storage

__all__ = ["Retry", "create_record"]


@dataclass(frozen=True, slots=True)
class Retry:
    """How long the outcome of a *create* is pursued (DF-CMT-03).

    Attributes:
        seconds: Give up after this time.
        first: The first pause; each later one is twice as long.
        longest: The longest pause.
        sleep: What pauses.
        clock: What measures time.
        jitter: A number from 0 to 1, by which pauses are spread so that writers do not march in step.
    """

    seconds: float = 60.0
    first: float = 0.1
    longest: float = 5.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random


def create_record(storage: Storage, record: Record, data: bytes, retry: Retry) -> bytes | None:
    """Create a record; that is the commit. Pursued with the same bytes until that is known (DF-CMT-03).

    Args:
        storage: Where to.
        record: The record.
        data: Its bytes.
        retry: For how long.

    Returns:
        None: it is in the log. Otherwise the bytes of the record that has its place (DF-CMT-02).

    Raises:
        NotStoredError: Nothing was stored.
        CommitUnknown: The outcome could not be learned.
    """
    key = record_key(record.seq)
    give_up = retry.clock() + retry.seconds
    pause = retry.first
    while True:
        try:
            if storage.create(key, data):
                return None
            found = storage.get(key, limit=MAX_RECORD_BYTES)
            # A lost reply is not a conflict: it may be this record.
            own = found == data or parse_record(found, seq=record.seq).nonce == record.nonce
            return None if own else found
        except NotStoredError:
            raise
        except (StoreError, MissingError) as error:
            if retry.clock() + pause > give_up:
                raise CommitUnknown(
                    ErrorCode.COMMIT_UNKNOWN,
                    f"it is not known whether this was written ({error.message}); a new writer finds out",
                    where=key,
                ) from error
        retry.sleep(pause * (0.5 + 0.5 * retry.jitter()))
        pause = min(2 * pause, retry.longest)
