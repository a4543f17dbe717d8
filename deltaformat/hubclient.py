"""Reads files of the Hugging Face Hub by ranges, through huggingface_hub's session, and tells its failures.

The token that its users expect (HF_TOKEN, or what `hf auth login` stored) goes to the Hub and nowhere else:
what the Hub redirects to carries its own signature.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar
from urllib.parse import urljoin, urlsplit

from deltaformat.blocks import Buffer
from deltaformat.errors import CorruptError, DeltaFormatError, ErrorCode, StoreError, UnsupportedError
from deltaformat.redaction import redact
from deltaformat.retrying import RETRY_SECONDS, TRIES_AGAIN, Pauses, Retry, may_pass
from deltaformat.storage import Ranges, check_length, check_size, missing

__all__ = ["HubClient", "asked_to_wait"]

T = TypeVar("T")

CONCURRENT_RANGES: Final = 8
LOCATED_SECONDS: Final = 300.0  # far less than a signed URL lives
REDIRECTS: Final = 5
READ_BYTES: Final = 1 << 20

_REDIRECTS = (301, 302, 303, 307, 308)
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{8,}")
_XET_STATUS = re.compile(r"status client error \((40[134]) ")
_RESET = re.compile(r"r=0\b.*\bt=([0-9]{1,6})")


class _PassingError(Exception):
    """A reply that may be better next time; after so many seconds, if the server has said so."""

    def __init__(self, said: str, after: float = 0.0) -> None:
        super().__init__(said)
        self.after = after


class HubClient:
    """The Hub, for reading. May be used from several threads.

    Args:
        endpoint: Where the Hub is; by default where huggingface_hub finds it (HF_ENDPOINT).
        token: An access token; by default the one that huggingface_hub finds.
        retry: How long a request that fails is tried again.
        timeout: Seconds that a connection may stay silent.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        retry: Retry | None = None,
        timeout: float = 30.0,
    ) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError:
            raise UnsupportedError(
                ErrorCode.NOT_SUPPORTED,
                "hf:// needs huggingface_hub: pip install 'deltaformat[hf]'",
                where="hf://",
            ) from None
        self.api = HfApi(endpoint=endpoint, token=token, library_name="deltaformat")
        self._token = token
        self._retry = retry or Retry(seconds=RETRY_SECONDS, again=TRIES_AGAIN)
        self._timeout = timeout
        self._located: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r})"

    @property
    def endpoint(self) -> str:
        """Where the Hub is."""
        return redact(self.api.endpoint)

    def get(self, path: str, *, where: str, limit: int | None = None) -> bytes:
        """Return a whole file.

        Args:
            path: Its place at the endpoint, such as `/buckets/namespace/name/resolve/file`, quoted.
            where: What errors should name.
            limit: Bytes at most.

        Raises:
            MissingError: There is no such file (object-missing).
            LimitError: It has more than `limit` bytes.
            StoreError: The Hub failed, or denied access.
        """
        return self.pursue(where, lambda: self._fetch(path, None, where, limit))

    def ranges(self, path: str, ranges: Ranges, *, where: str) -> list[Buffer]:
        """Return byte ranges of a file, several at a time.

        Raises:
            CorruptError: A range is shorter than asked (size-mismatch).
            MissingError, StoreError: as `get`.
        """

        def read(wanted: tuple[int, int]) -> Buffer:
            data = self.pursue(where, lambda: self._fetch(path, wanted, where, None))
            check_length(where, *wanted, len(data))
            return data

        if len(ranges) < 2:
            return [read(wanted) for wanted in ranges]
        first = read(ranges[0])  # finds out where the file lies
        with ThreadPoolExecutor(min(CONCURRENT_RANGES, len(ranges) - 1)) as pool:
            return [first, *pool.map(read, ranges[1:])]

    def pursue(self, where: str, run: Callable[[], T]) -> T:
        """Do it, again and again while it fails in a way that may pass; Retry-After is honoured.

        Raises:
            DeltaFormatError: What it failed with in the end.
        """
        pauses = Pauses(self._retry)
        while True:
            try:
                return run()
            except DeltaFormatError:
                raise
            except _PassingError as error:
                if not pauses.wait(error.after):
                    raise _failed(str(error), where) from None
            except Exception as error:
                reply = getattr(error, "response", None)
                failures = getattr(error, "failures", None)
                if failures:  # the Hub took the request, and could not do all of it
                    raise _failed(str(failures[0].get("error", failures[0])), where) from None
                if reply is None:
                    refused = _XET_STATUS.search(str(error))
                    if refused:  # by what hf_xet asked the Hub for
                        raise _refusal(int(refused[1]), "RepoNotFound", where) from None
                    if not _of_the_network(error) or not pauses.wait():
                        raise _failed(f"{type(error).__name__}: {error}", where) from None
                elif not may_pass(reply.status_code) or not pauses.wait(asked_to_wait(reply.headers)):
                    raise _told(reply, where) from None

    def _fetch(self, path: str, wanted: tuple[int, int] | None, where: str, limit: int | None) -> bytes:
        home = f"{self.api.endpoint}{path}"
        target = home
        if wanted is not None:  # ranges of one object: asking the Hub for each would use up its rate limit
            with self._lock:
                located, known_until = self._located.get(home, (home, 0.0))
            if time.monotonic() < known_until:
                target = located
        for _ in range(REDIRECTS):
            redirected, data = self._request(target, home, wanted, where, limit)
            if data is not None:
                if target != home and wanted is not None:
                    self._remember(home, target)
                return data
            target = redirected
        raise _failed("it redirects without end", where)

    def _request(
        self, target: str, home: str, wanted: tuple[int, int] | None, where: str, limit: int | None
    ) -> tuple[str, bytes | None]:
        """Ask once: the content, or where to ask next."""
        from huggingface_hub.utils import build_hf_headers, get_session

        headers = {"accept-encoding": "identity"}  # or a range would be of other bytes
        if _origin(target) == _origin(self.api.endpoint):
            headers |= build_hf_headers(token=self._token, library_name="deltaformat")
        if wanted is not None:
            headers["range"] = f"bytes={wanted[0]}-{wanted[0] + wanted[1] - 1}"
        with get_session().stream(
            "GET", target, headers=headers, timeout=self._timeout, follow_redirects=False
        ) as reply:
            status = reply.status_code
            if status in _REDIRECTS and reply.headers.get("location"):
                location = urljoin(target, reply.headers["location"])
                if urlsplit(location).scheme not in {"https", urlsplit(self.api.endpoint).scheme}:
                    raise _failed("it redirects to an insecure place", where)
                return location, None
            if target != home and status in (401, 403, 404, 410):  # its signature has run out
                with self._lock:
                    self._located.pop(home, None)
                raise _PassingError(f"status {status} of where it lies")
            if status not in (200, 206):
                if may_pass(status):
                    raise _PassingError(f"status {status}", asked_to_wait(reply.headers))
                raise _told(reply, where)
            if wanted is not None and status == 200 and wanted[0] > 0:
                raise _PassingError("it ignores ranges")
            return target, _body(reply, wanted, where, limit)

    def _remember(self, home: str, target: str) -> None:
        with self._lock:
            if len(self._located) > 1000:
                self._located.clear()
            self._located[home] = target, time.monotonic() + LOCATED_SECONDS


def _body(reply: Any, wanted: tuple[int, int] | None, where: str, limit: int | None) -> bytes:
    """A reply's body, of which no more is read than was asked for."""
    stated = reply.headers.get("content-length", "")
    expected = int(stated) if stated.isdigit() else None
    if wanted is None and expected is not None:
        check_size(where, expected, limit)
    most = wanted[1] if wanted is not None else limit
    data = bytearray()
    for chunk in reply.iter_bytes(READ_BYTES):
        data += chunk
        if most is not None and len(data) > most:
            if wanted is None:
                check_size(where, len(data), limit)
            if reply.status_code == 206:
                raise CorruptError(ErrorCode.SIZE_MISMATCH, "more came than was asked for", where=where)
            return bytes(data[:most])  # a range from 0 on, of which all was given
    if expected is not None and len(data) != expected:
        raise _PassingError("its body was cut off")
    return bytes(data)


def _told(reply: Any, where: str) -> DeltaFormatError:
    """A refusal of the Hub's as our error."""
    return _refusal(reply.status_code, reply.headers.get("x-error-code") or "", where)


def _refusal(status: int, code: str, where: str) -> DeltaFormatError:
    if status == 416:
        return CorruptError(ErrorCode.SIZE_MISMATCH, "is shorter than it must be", where=where)
    if status == 404 and code in ("RepoNotFound", "RevisionNotFound"):
        # DF-STO-04: no absence of a file; and private ones are told as missing.
        return StoreError(
            ErrorCode.STORE_FAILED,
            "the Hub has no such bucket, repository or revision, or your token may not see it",
            where=where,
            passing=False,
        )
    if status == 404:
        return missing(where)
    if status in (401, 403):
        return StoreError(
            ErrorCode.STORE_FAILED,
            f"access denied (status {status}); log in with `hf auth login`, or set HF_TOKEN",
            where=where,
            passing=False,
        )
    return _failed(f"status {status} {code}".strip(), where)


def _failed(said: str, where: str) -> StoreError:
    line = said.strip().splitlines()[0] if said.strip() else "no reason given"
    line = _TOKEN.sub("hf_…", redact(line))[:300]
    return StoreError(ErrorCode.STORE_FAILED, f"the Hub failed: {line}", where=where)


def _of_the_network(error: Exception) -> bool:
    """Whether an error is of the way, not of the request; hf_xet has only general ones."""
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & {"TransportError", "RuntimeError", "ConnectionError", "TimeoutError"})


def asked_to_wait(headers: Mapping[str, str]) -> float:
    """The seconds that a reply asks to wait: by Retry-After, or by the Hub's rate limit headers."""
    after = headers.get("retry-after") or ""
    if after.isdigit():
        return float(after)
    with suppress(ValueError, TypeError):  # a date: by the clock of the server, if it tells that
        now = headers.get("date")
        since = parsedate_to_datetime(now) if now else datetime.now(UTC)
        return max(0.0, (parsedate_to_datetime(after) - since).total_seconds())
    reset = _RESET.search(headers.get("ratelimit") or "")
    return float(reset[1]) if reset else 0.0


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
