"""Buckets of the Hugging Face Hub, `hf://buckets/NAMESPACE/NAME[/PREFIX]`, through huggingface_hub."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import quote

from deltaformat.blocks import byte_view
from deltaformat.errors import ErrorCode, MalformedError, MissingError, StoreError
from deltaformat.external import HUB_NAME
from deltaformat.hubclient import HubClient
from deltaformat.keys import parse_key
from deltaformat.retrying import RETRY_SECONDS, TRIES_AGAIN, Retry, seconds_option
from deltaformat.storage import (
    Buffers,
    Data,
    ObjectInfo,
    Ranges,
    Storage,
    check_prefix,
    check_range,
    chunks_of,
    missing,
)

__all__ = ["HubBucketStorage", "open_hub_bucket"]

T = TypeVar("T")

_BUCKET = re.compile(rf"hf://buckets/({HUB_NAME})/({HUB_NAME})(?:/([A-Za-z0-9._/=+,@ -]{{1,500}}))?/?")
_DELETE_AT_ONCE: Final = 500
_bars_lock = threading.Lock()


def open_hub_bucket(url: str, options: Mapping[str, str]) -> Storage:
    """Open a store's place in a bucket of the Hub.

    Args:
        url: `hf://buckets/NAMESPACE/NAME[/PREFIX]`.
        options: `endpoint`, `token` (by default as huggingface_hub finds them), `timeout`, `retry_seconds`.

    Raises:
        MalformedError: A URL or an option that cannot be meant.
        UnsupportedError: huggingface_hub is not installed.
    """
    match = _BUCKET.fullmatch(url)
    prefix = (match[3] or "").rstrip("/") if match else ""
    if match is None or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise MalformedError(
            ErrorCode.INPUT_INVALID, "a URL here is hf://buckets/NAMESPACE/NAME/PREFIX", where="url"
        )
    unknown = sorted(options.keys() - {"endpoint", "token", "timeout", "retry_seconds"})
    if unknown:
        raise MalformedError(
            ErrorCode.INPUT_INVALID, f"no option {unknown[0]!r} for hf://", where="storage_options"
        )
    timeout = seconds_option(options, "timeout", 30.0)
    retry = Retry(seconds=seconds_option(options, "retry_seconds", RETRY_SECONDS), again=TRIES_AGAIN)
    client = HubClient(
        endpoint=options.get("endpoint"), token=options.get("token"), timeout=timeout, retry=retry
    )
    return HubBucketStorage(client, f"{match[1]}/{match[2]}", prefix)


class HubBucketStorage:
    """A bucket of the Hub.

    It has no *create*: this one looks, puts, and looks again, which is no protection against a second writer.
    So the probe refuses it (DF-STO-02), and a writer must be the single one. (The Hub's S3 gateway has
    *create*: several writers go through it, with an `s3://` URL.)

    An object goes up in one piece: a pack takes its size twice in memory while it does.

    Attributes:
        exclusive_create: False; see `Storage`.
        least_poll_seconds: What the Hub's rate limits leave to several followers.

    Args:
        client: The Hub.
        bucket: `namespace/name`.
        prefix: Where in it, without "/" at its end; "" for all of it.
    """

    exclusive_create = False
    least_poll_seconds = 2.0

    def __init__(self, client: HubClient, bucket: str, prefix: str) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._url = f"hf://buckets/{bucket}" + (f"/{prefix}" if prefix else "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self._url

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Return a whole object."""
        return self._client.get(self._resolve(key), where=key, limit=limit)

    def get_ranges(self, key: str, ranges: Ranges) -> Buffers:
        """Return byte ranges of one object."""
        path = self._resolve(key)
        for start, length in ranges:
            check_range(key, start, length)
        return self._client.ranges(path, ranges, where=key)

    def put(self, key: str, data: Data) -> None:
        """Store an object, whether or not there is one."""
        path = self._path(key)
        content = b"".join(byte_view(chunk) for chunk in chunks_of(data))
        self._do(key, lambda api: api.batch_bucket_files(self._bucket, add=[(content, path)]))

    def create(self, key: str, data: Data) -> bool:
        """Store an object if there is none; see the class for what that is worth."""
        try:
            self.head(key)
        except MissingError:
            self.put(key, data)
            return self.get(key) == b"".join(byte_view(chunk) for chunk in chunks_of(data))
        return False

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size and time."""
        path = self._path(key)
        found = self._do(key, lambda api: tuple(api.get_bucket_paths_info(self._bucket, [path])))
        for entry in found:
            if entry.path == path:
                return self._info(entry)
        raise missing(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Iterate over the objects below `prefix`."""
        wanted = self._prefix + check_prefix(prefix)

        def read(api: Any) -> tuple[Any, ...]:
            return tuple(api.list_bucket_tree(self._bucket, prefix=wanted or None, recursive=True))

        try:
            found = self._do(prefix or self._url, read)
        except MissingError:
            try:
                self._do(self._url, lambda api: api.bucket_info(self._bucket))
            except MissingError:
                raise StoreError(ErrorCode.STORE_FAILED, "there is no such bucket", where=self._url) from None
            return  # there is nothing below it
        for entry in found:
            if entry.type == "file" and entry.path.startswith(wanted):
                yield self._info(entry)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are ignored."""
        paths = [self._path(key) for key in keys]
        for start in range(0, len(paths), _DELETE_AT_ONCE):
            some = paths[start : start + _DELETE_AT_ONCE]
            there = self._there(some)  # the Hub refuses to delete what is not
            if there:
                self._do(keys[start], partial(self._delete, paths=there))

    def _delete(self, api: Any, paths: Sequence[str]) -> None:
        try:
            api.batch_bucket_files(self._bucket, delete=[*paths])
        except Exception:
            if self._there(paths):  # or somebody else was faster
                raise

    def _there(self, paths: Sequence[str]) -> Sequence[str]:
        found = self._do(
            self._url, lambda api: {entry.path for entry in api.get_bucket_paths_info(self._bucket, [*paths])}
        )
        return [path for path in paths if path in found]

    def _do(self, where: str, call: Callable[[Any], T]) -> T:
        def run() -> T:
            with _no_bars():
                return call(self._client.api)

        return self._client.pursue(where, run)

    def _path(self, key: str) -> str:
        parse_key(key)
        return self._prefix + key

    def _resolve(self, key: str) -> str:
        return f"/buckets/{self._bucket}/resolve/{quote(self._path(key), safe='')}"

    def _info(self, entry: Any) -> ObjectInfo:
        modified = entry.uploaded_at or entry.mtime  # the first is the Hub's own clock
        key = entry.path[len(self._prefix) :]
        if modified is None:
            raise StoreError(ErrorCode.STORE_FAILED, "the Hub gives no time for it", where=key)
        return ObjectInfo(key, entry.size, modified)


@contextmanager
def _no_bars() -> Iterator[None]:
    """No progress bars of the Hub's client: a store's own reports say how far it is."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:  # the user has decided
        yield
        return
    with _bars_lock:
        shown = not are_progress_bars_disabled()
        if shown:
            disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            with _bars_lock:
                enable_progress_bars()
