"""Creates a record, and finds out whether it was created (SPEC 12.5)."""

from __future__ import annotations

from deltaformat.errors import CommitUnknown, ErrorCode, MissingError, StoreError
from deltaformat.keys import record_key
from deltaformat.records import MAX_RECORD_BYTES, Record, parse_record
from deltaformat.retrying import Pauses, Retry
from deltaformat.storage import NotStoredError, Storage

__all__ = ["create_record"]


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
        NotStoredError: Nothing was stored: the first try was refused.
        CommitUnknown: The outcome could not be learned.
    """
    key = record_key(record.seq)
    pauses = Pauses(retry)
    unsure = False
    while True:
        try:
            if storage.create(key, data):
                return None
            found = storage.get(key, limit=MAX_RECORD_BYTES)
            # A lost reply is not a conflict: it may be this record.
            own = found == data or parse_record(found, seq=record.seq).nonce == record.nonce
            return None if own else found
        except (StoreError, MissingError) as error:
            if isinstance(error, NotStoredError) and not unsure:
                raise
            unsure = True  # from now on a refusal says nothing of the try before it, which may still arrive
            if not pauses.wait():
                raise CommitUnknown(
                    ErrorCode.COMMIT_UNKNOWN,
                    f"it is not known whether this was written ({error.message}); a new writer finds out",
                    where=key,
                ) from error
