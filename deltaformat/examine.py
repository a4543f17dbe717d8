"""What a place can do for a store: each operation of SPEC 5 is tried, and timed."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from deltaformat.blocks import byte_view
from deltaformat.errors import CorruptError, DeltaFormatError, ErrorCode, LimitError, MissingError, StoreError
from deltaformat.keys import DESCRIPTOR, probe_key
from deltaformat.records import MAX_DESCRIPTOR_BYTES, parse_descriptor
from deltaformat.storage import Storage, probe

__all__ = ["Check", "Examination", "examine"]

RANGED_BYTES = 256 << 10
LARGE_BYTES = 8 << 20
ROUND_TRIPS = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: What.
        ok: Whether it does what it must.
        detail: What was found, or the error.
        needed_for: `reading`, `writing` or `collecting`.
    """

    name: str
    ok: bool
    detail: str
    needed_for: str


@dataclass(slots=True)
class Examination:
    """What was found, in order.

    Attributes:
        checks: Everything that was tried.
        single_writer: Whether it can be written, if only by one writer.
        ranges_tried: Whether there was an object to read ranges of.
    """

    checks: list[Check] = field(default_factory=list)
    single_writer: bool = False
    ranges_tried: bool = True

    def can(self, what: str) -> bool:
        """Whether all checks passed that are needed for `reading`, `writing` or `collecting`."""
        return all(check.ok for check in self.checks if check.needed_for == what)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.can("reading"):
            return "no store can be read here"
        if not self.can("writing"):
            if self.single_writer:
                return "read by anyone; written by a single writer only (single_writer=True)"
            tried = "" if self.ranges_tried else "; whether ranges are read could not be tried"
            return f"read, not written{tried}"
        if not self.can("collecting"):
            return "read and written, by several at once; not collected"
        return "read, written by several at once, and collected"


def examine(storage: Storage) -> Examination:
    """Try every operation that a store needs, on probe objects, which are deleted if that is allowed.

    Never raises what the storage raises: that is what is reported.
    """
    found = Examination()

    def check(name: str, needed_for: str, run: Callable[[], str]) -> bool:
        try:
            detail = run()
        except DeltaFormatError as error:
            found.checks.append(Check(name, False, f"{error.message} [{error.code.value}]", needed_for))
            return False
        found.checks.append(Check(name, True, detail, needed_for))
        return True

    if not check("read a missing key", "reading", lambda: _missing(storage)):
        return found
    check("descriptor", "reading", lambda: _descriptor(storage))
    written = check("put and read back", "writing", lambda: _put(storage))
    if written:
        check("ranges", "reading", lambda: _ranges(storage))
        check("create-if-absent", "writing", lambda: _create(storage))
        check("list", "collecting", lambda: _list(storage))
        check("delete", "collecting", lambda: _delete(storage))
    else:
        found.ranges_tried = _has_store(storage)
        check("ranges", "reading", lambda: _ranges_of_descriptor(storage, there=found.ranges_tried))
    found.single_writer = written
    return found


def _missing(storage: Storage) -> str:
    times = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        try:
            storage.get(_fresh_key(), limit=1)
        except MissingError:
            times.append(time.perf_counter() - started)
            continue
        except LimitError:
            pass
        raise StoreError(ErrorCode.CREATE_UNSAFE, "a key that nobody made is there", where="hints/")
    return f"a round trip takes {statistics.median(times) * 1e3:.1f} ms"


def _descriptor(storage: Storage) -> str:
    try:
        descriptor = parse_descriptor(storage.get(DESCRIPTOR, limit=MAX_DESCRIPTOR_BYTES))
    except MissingError:
        return "there is no store here yet"
    return f"a store is here: {descriptor.digest}, blocks of {descriptor.block_bytes} bytes"


def _put(storage: Storage) -> str:
    with _probed(storage) as key:
        data = secrets.token_bytes(1 << 20) * (LARGE_BYTES >> 20)
        started = time.perf_counter()
        storage.put(key, data)
        uploaded = time.perf_counter()
        if storage.get(key, limit=LARGE_BYTES) != data:
            raise CorruptError(ErrorCode.HASH_MISMATCH, "other bytes came back than were put", where=key)
        read = time.perf_counter()
    up, down = LARGE_BYTES / (uploaded - started), LARGE_BYTES / (read - uploaded)
    return f"{up / 1e6:.0f} MB/s up, {down / 1e6:.0f} MB/s down (one object of {LARGE_BYTES >> 20} MiB)"


def _ranges(storage: Storage) -> str:
    with _probed(storage) as key:
        data = secrets.token_bytes(RANGED_BYTES)
        storage.put(key, data)
        ranges = [(start, 100) for start in range(0, RANGED_BYTES - 100, 17 << 10)]
        started = time.perf_counter()
        pieces = storage.get_ranges(key, ranges)
        seconds = time.perf_counter() - started
        for (start, length), piece in zip(ranges, pieces, strict=True):
            if bytes(byte_view(piece)) != data[start : start + length]:
                raise CorruptError(ErrorCode.HASH_MISMATCH, "a range has other bytes", where=key)
    return f"{len(ranges)} ranges of one object in {seconds * 1e3:.1f} ms"


def _has_store(storage: Storage) -> bool:
    try:
        storage.get(DESCRIPTOR, limit=MAX_DESCRIPTOR_BYTES)
    except DeltaFormatError:
        return False
    return True


def _ranges_of_descriptor(storage: Storage, *, there: bool) -> str:
    """Where nothing can be put the descriptor must do: web servers differ in whether they serve ranges."""
    if not there:
        return "not tried: no store is here, and nothing can be put"
    data = storage.get(DESCRIPTOR, limit=MAX_DESCRIPTOR_BYTES)
    ranges = [(1, 7), (len(data) // 2, 5), (len(data) - 3, 3)]
    for (start, length), piece in zip(ranges, storage.get_ranges(DESCRIPTOR, ranges), strict=True):
        if bytes(byte_view(piece)) != data[start : start + length]:
            raise CorruptError(ErrorCode.HASH_MISMATCH, "a range has other bytes", where=DESCRIPTOR)
    return f"{len(ranges)} ranges of the descriptor"


def _create(storage: Storage) -> str:
    started = time.perf_counter()
    probe(storage)
    return f"a second create is refused; the probe took {(time.perf_counter() - started) * 1e3:.1f} ms"


def _list(storage: Storage) -> str:
    with _probed(storage) as key:
        storage.put(key, b"{}")
        if key not in {info.key for info in storage.list("hints/")}:
            raise StoreError(ErrorCode.STORE_FAILED, "an object just put is not listed", where=key)
        skew = storage.head(key).modified - datetime.now(UTC)
    return f"what was just put is listed; its clock and ours differ by {abs(skew.total_seconds()):.1f} s"


def _delete(storage: Storage) -> str:
    key = _fresh_key()
    storage.put(key, b"{}")
    storage.delete([key, _fresh_key()])
    try:
        storage.head(key)
    except MissingError:
        return "deleted objects are gone; deleting what is not there is no error"
    raise StoreError(ErrorCode.STORE_FAILED, "a deleted object is still there", where=key)


def _fresh_key() -> str:
    return probe_key(secrets.token_hex(16))


@contextmanager
def _probed(storage: Storage) -> Iterator[str]:
    """A probe key, whose object is deleted afterwards."""
    key = _fresh_key()
    try:
        yield key
    finally:
        with suppress(DeltaFormatError):
            storage.delete([key])
