"""Object stores, and memory, through obstore; what they fail with, as our errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from deltaformat.blocks import byte_view
from deltaformat.errors import CorruptError, DeltaFormatError, ErrorCode, StoreError
from deltaformat.keys import parse_key
from deltaformat.redaction import redact
from deltaformat.retrying import Pauses, Retry, may_pass
from deltaformat.storage import (
    Buffers,
    Data,
    NotStoredError,
    ObjectInfo,
    Ranges,
    check_length,
    check_prefix,
    check_range,
    check_size,
    chunks_of,
    missing,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["ObstoreStorage"]

T = TypeVar("T")

_SMALL_BYTES: Final = 1 << 20
_SINGLE_PUT_BYTES: Final = 256 << 20
_SHOWN: Final = 300

_STATUS = re.compile(r"status code: ([0-9]{3})")
_RETRIED = re.compile(r", after [1-9][0-9]* retries")
# How clients tell that a range lies beyond the end, where no status does.
_BEYOND = re.compile(r"invalid range|range was invalid|object was only", re.IGNORECASE)
# With 409 S3 tells of a race that has no winner yet; Azure, that the object exists.
_RACING = re.compile(r"ConditionalRequestConflict|OperationAborted")
# Where the body of a reply begins that an error's text holds; what of it may be shown.
_BODY = re.compile(r"(?<=status code: )[0-9]{3}[^:<\n]*|(?=<)")
_SHOWN_TAGS: Final = (
    re.compile(r"<Code>([A-Za-z0-9._-]{1,100})</Code>"),
    re.compile(r"<Message>([^<>\n]{1,200})"),
)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist")
_CREDENTIALS: Final = {  # by how the client calls itself in its errors
    "Generic S3 error": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; AWS_SKIP_SIGNATURE=true"
    " reads what is public",
    "Generic GCS error": "GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "Generic MicrosoftAzure error": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or"
    " AZURE_USE_AZURE_CLI=true after `az login`",
}
_BUSY = {429, 503}


class ObstoreStorage:
    """A store behind obstore: memory, and any other of its stores.

    What may pass (timeouts, dropped connections, 429, 5xx) is tried again until `retry` gives up; writes too,
    since a key's bytes never change, and the hint may be any. obstore may repeat some itself, goes on then
    with a body that was cut off, and does not tell when a server asked to be left alone (Retry-After): after
    429 and 503 the pause is `retry.busy` at least.

    obstore's runtime has threads, which a forked child does not have: start processes that use it by "spawn"
    or "forkserver", not by "fork". (`LocalStorage` has none, and may be used in a forked child.)

    Args:
        store: One of obstore's stores: for small objects, whose requests should fail soon.
        url: Where it is, without credentials.
        reads: The same, for large reads.
        writes: The same, for large writes.
        retry: How long a request is pursued.
    """

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        *,
        reads: ObjectStore | None = None,
        writes: ObjectStore | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._small = store
        self._reads = reads or store
        self._writes = writes or store
        self._url = url
        self._retry = retry or Retry(seconds=0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self._url

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Return a whole object."""
        import obstore

        parse_key(key)
        store = self._small if limit is not None and limit <= _SMALL_BYTES else self._reads

        def run() -> bytes:
            result = obstore.get(store, key)
            size = result.meta["size"]
            check_size(key, size, limit)
            data = bytes(result.bytes())
            check_length(key, 0, size, len(data))
            return data

        return self._pursue(key, run)

    def get_ranges(self, key: str, ranges: Ranges) -> Buffers:
        """Return byte ranges of one object."""
        import obstore

        parse_key(key)
        for start, length in ranges:
            check_range(key, start, length)
        if not ranges:
            return []
        total = sum(length for _, length in ranges)
        found = self._pursue(
            key,
            lambda: obstore.get_ranges(
                self._small if total <= _SMALL_BYTES else self._reads,
                key,
                starts=[start for start, _ in ranges],
                lengths=[length for _, length in ranges],
                coalesce=0,  # the plan has coalesced already; the default would read gaps of up to 1 MiB
            ),
        )
        for (start, length), buffer in zip(ranges, found, strict=True):
            check_length(key, start, length, len(buffer))
        return [memoryview(buffer) for buffer in found]

    def put(self, key: str, data: Data) -> None:
        """Store an object, whether or not there is one."""
        self._put(key, data, create=False)

    def create(self, key: str, data: Data) -> bool:
        """Store an object if there is none."""
        return self._put(key, data, create=True)

    def _put(self, key: str, data: Data, *, create: bool) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        parse_key(key)
        chunks = [byte_view(chunk) for chunk in chunks_of(data)]
        nbytes = sum(chunk.nbytes for chunk in chunks)

        def run() -> bool:
            try:
                obstore.put(
                    self._small if nbytes <= _SMALL_BYTES else self._writes,
                    key,
                    iter(chunks),
                    mode="create" if create else "overwrite",
                    # One request where it can be: an upload in parts that is cut off leaves parts behind that
                    # cost money.
                    use_multipart=not create and nbytes > _SINGLE_PUT_BYTES,
                    chunk_size=16 << 20,
                )
            except AlreadyExistsError as error:
                if create and not _RACING.search(str(error)):
                    return False
                raise
            return True

        return self._pursue(key, run, writing=True)

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size and time."""
        import obstore

        parse_key(key)
        return self._pursue(key, lambda: _info(obstore.head(self._small, key)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Iterate over the objects below `prefix`."""
        import obstore

        check_prefix(prefix)
        pauses, last = Pauses(self._retry), None
        while True:
            try:
                for batch in obstore.list(self._small, prefix or None, offset=last):
                    for meta in batch:
                        yield _info(meta)
                        last = meta["path"]
                    pauses = Pauses(self._retry)
                return
            except Exception as error:
                # Object stores list in order, so the listing goes on where it broke off. (Memory, which does
                # not, does not fail in ways that pass.)
                if not _may_pass(error) or not pauses.wait(self._least_pause(error)):
                    raise _told(error, prefix or self._url) from None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are ignored."""
        import obstore

        for key in keys:
            parse_key(key)
        if not keys:
            return

        def run() -> None:
            try:
                obstore.delete(self._small, list(keys))
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                # Some stores stop at the first that is missing: go one by one.
                if len(keys) > 1:
                    for key in keys:
                        self.delete([key])

        self._pursue(keys[0], run)

    def _least_pause(self, error: Exception) -> float:
        return min(self._retry.busy, self._retry.seconds / 4) if _status(error) in _BUSY else 0.0

    def _pursue(self, key: str, run: Callable[[], T], *, writing: bool = False) -> T:
        """Do it, again and again while it fails in a way that may pass."""
        pauses = Pauses(self._retry)
        unsure = False
        while True:
            try:
                return run()
            except DeltaFormatError:
                raise
            except Exception as error:
                told = _told(error, key)
                passing = type(told) is StoreError and _may_pass(error)
                if not passing or not pauses.wait(self._least_pause(error)):
                    refused = writing and not (passing or unsure or _RETRIED.search(str(error)))
                    if refused and _status(error) is not None and type(told) is StoreError:
                        # DF-CMT-03: the first answer was a refusal, so there is nothing to be unsure of.
                        raise NotStoredError(told.code, told.message, where=told.where) from None
                    raise told from None
                unsure = True


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"])


def _status(error: Exception) -> int | None:
    """The HTTP status in an error's text, if it tells of one."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    kind, status = type(error).__name__, _status(error)
    if kind == "AlreadyExistsError":
        return _RACING.search(str(error)) is not None
    if kind != "GenericError" or _no_credentials(error):
        return False
    return status is None or may_pass(status)


def _no_credentials(error: Exception) -> bool:
    # Where none are configured the client asks the metadata service of a cloud's machine.
    return "169.254.169.254" in str(error) or "metadata.google.internal" in str(error)


def _told(error: Exception, key: str) -> DeltaFormatError:
    """An error of obstore's as ours; no words of it that could hold credentials (DF-SEC-02)."""
    text = str(error)
    kind, status = type(error).__name__, _status(error)
    said = _first_line(text)
    if _NO_BUCKET.search(text):
        # DF-STO-04: that is told with 404, too, and is not the absence of an object.
        return StoreError(
            ErrorCode.STORE_FAILED, "there is no such bucket or container", where=key, passing=False
        )
    if isinstance(error, FileNotFoundError):
        return missing(key)
    if kind == "GenericError" and (status == 416 or (status is None and _BEYOND.search(said))):
        return CorruptError(ErrorCode.SIZE_MISMATCH, f"is shorter than it must be ({said})", where=key)
    if _no_credentials(error):
        how = next(
            (advice for name, advice in _CREDENTIALS.items() if name in said), "see the client's manual"
        )
        return StoreError(
            ErrorCode.STORE_FAILED, f"no credentials were found; set {how}", where=key, passing=False
        )
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        advice = (
            "access denied; check the credentials and what they allow (readers: get objects, and list the"
            f" bucket, or a missing key is told as forbidden; writers: also put) ({said})"
        )
        return StoreError(ErrorCode.STORE_FAILED, advice, where=key, passing=False)
    return StoreError(ErrorCode.STORE_FAILED, f"the store failed: {said}", where=key)


def _first_line(text: str) -> str:
    """The first line of an error's text, without what may be secret.

    Of a reply's body the code and the message at most: what else is in it (tokens, key ids, what was signed)
    may be credentials.
    """
    body = _BODY.search(text)
    said = text[: body.end()].strip() if body else text.strip()
    line = said.splitlines()[0] if said else "no reason given"
    if body:
        shown = [match[1] for tag in _SHOWN_TAGS if (match := tag.search(text, body.end()))]
        line = ": ".join([line.rstrip(": "), *shown])
    return redact(line)[:_SHOWN]
