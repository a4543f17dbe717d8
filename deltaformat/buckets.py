"""Opens `s3://`, `gs://`, `az://` and `http(s)://` through obstore: grammar, credentials, time limits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from deltaformat.awsprofiles import profile_options
from deltaformat.errors import ErrorCode, MalformedError, StoreError
from deltaformat.objectstorage import ObstoreStorage
from deltaformat.readonly import ReadOnlyStorage
from deltaformat.retrying import RETRY_SECONDS, TRIES_AGAIN, Retry, seconds_option
from deltaformat.storage import Storage

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["SCHEMES", "open_bucket"]

SCHEMES: Final = ("s3", "gs", "az", "http", "https")

SMALL_SECONDS: Final = 30.0
LARGE_SECONDS: Final = 600.0  # 64 MiB at 1 Mbit/s
STALL_SECONDS: Final = 30.0
CLIENT_RETRIES: Final = 2  # of parts and bodies, where one who begins anew moves much; all others wait here

_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
_PREFIX = re.compile(r"[^\x00-\x1f\x7f\\?#%*\"<>|^`{}\[\]~]*")
_OWN_OPTIONS: Final = ("timeout", "retry_seconds")
# obstore has several names for one option: with a cloud's prefix, and others.
_OPTION_PREFIXES: Final = {"s3": ("aws_",), "gs": ("google_",), "az": ("azure_storage_", "azure_")}
_ALIASES: Final = {
    "s3": {
        "endpoint_url": "endpoint", "endpoint_url_s3": "endpoint", "default_region": "region",
        "token": "session_token", "bucket_name": "bucket",
    },
    "gs": {"service_account_path": "service_account"},
    "az": {
        "access_key": "account_key", "master_key": "account_key", "sas_token": "sas_key",
        "bearer_token": "token", "object_store_use_emulator": "use_emulator",
    },
}  # fmt: skip


def open_bucket(scheme: str, url: str, options: Mapping[str, str]) -> Storage:
    """Open a store's place in a bucket, or read-only on a web server.

    Args:
        scheme: One of `SCHEMES`.
        url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `https://host/path`.
        options: The client's options by their names in obstore (such as `endpoint`, `region`), which come
            before the environment; beside them `timeout`, the seconds that a small request may take (large
            ones may take 20 times as long), and `retry_seconds`, how long one that fails is tried again
            (twice at least, however long a try takes).

    Raises:
        MalformedError: A URL or an option that cannot be meant.
        StoreError: Credentials that are named and cannot be had.
    """
    timeout = seconds_option(options, "timeout", SMALL_SECONDS)
    retry = Retry(seconds=seconds_option(options, "retry_seconds", RETRY_SECONDS), again=TRIES_AGAIN)
    rest = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    if scheme in ("http", "https"):
        make, place = _web(url, rest)
    else:
        make, place = _cloud(scheme, url, rest)

    def client(seconds: float, stall: float | None = None, *, tries_again: int) -> ObjectStore:
        config: ClientConfig = {
            "timeout": timedelta(seconds=seconds),
            "connect_timeout": timedelta(seconds=min(seconds, 10.0)),
        }
        if stall is not None:  # it counts the time of an upload, too, so writes go without
            config["read_timeout"] = timedelta(seconds=stall)
        retries: RetryConfig = {
            "max_retries": tries_again,
            "retry_timeout": timedelta(seconds=seconds + retry.seconds),
            "backoff": {  # it makes no difference between what is busy and what was cut off
                "init_backoff": timedelta(seconds=min(retry.busy, retry.seconds / 4)),
                "max_backoff": timedelta(seconds=max(retry.busy, retry.longest)),
                "base": 2,
            },
        }
        try:
            return make(client_options=config, retry_config=retries)
        except Exception as error:
            # What an option is worth may be a secret: its name must do.
            said = type(error).__name__
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                f"the client refuses this URL, an option or a setting in the environment ({said})",
                where=place,
            ) from None

    longer = timeout * LARGE_SECONDS / SMALL_SECONDS
    storage = ObstoreStorage(
        client(timeout, tries_again=0),
        place,
        reads=client(longer, timeout * STALL_SECONDS / SMALL_SECONDS, tries_again=CLIENT_RETRIES),
        writes=client(longer, tries_again=CLIENT_RETRIES),
        retry=retry,
    )
    return ReadOnlyStorage(storage, "a web server") if scheme in ("http", "https") else storage


Maker = Callable[..., "ObjectStore"]


def _cloud(scheme: str, url: str, options: Mapping[str, str]) -> tuple[Maker, str]:
    """How to make the client of a bucket, and the URL to show."""
    from obstore.store import AzureStore, GCSStore, S3Store

    what = "container" if scheme == "az" else "bucket"
    bucket, _, prefix = url.partition("://")[2].partition("/")
    prefix = prefix.rstrip("/")
    segments = prefix.split("/") if prefix else []
    if _BUCKET.fullmatch(bucket) is None or _PREFIX.fullmatch(prefix) is None or len(prefix) > 700:
        raise _not_a_url(f"{scheme}://{what}/prefix; credentials go into the environment, not into it")
    if any(segment in ("", ".", "..") for segment in segments):
        raise _not_a_url(f"{scheme}://{what}/prefix, whose prefix has no segment that is empty, '.' or '..'")
    place = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
    values = _named_once(scheme, options)
    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    provider = None
    if scheme == "s3":
        found = profile_options(values, os.environ)
        values, provider = {**found.config, **values}, found.provider
        values.setdefault("region", _region())
    if scheme == "az" and not _names_account(values):
        raise StoreError(
            ErrorCode.STORE_FAILED,
            "whose container? set AZURE_STORAGE_ACCOUNT_NAME, or account_name among the options",
            where=place,
        )
    endpoint = str(values.get("base_url" if scheme == "gs" else "endpoint") or _endpoint(scheme))

    def make(*, client_options: ClientConfig, retry_config: RetryConfig) -> ObjectStore:
        if endpoint.lower().startswith("http://"):
            client_options["allow_http"] = True  # whoever names such an endpoint means it
        more = {} if provider is None else {"credential_provider": provider}
        store: ObjectStore = kinds[scheme](
            bucket,
            prefix=prefix or None,
            config=values or None,
            client_options=client_options,
            retry_config=retry_config,
            **more,
        )
        return store

    return make, place


def _named_once(scheme: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The options of a bucket's client, each under one name, whichever of obstore's names it was given by.

    Raises:
        MalformedError: One is given by two names.
    """
    values: dict[str, Any] = {}
    for given, value in options.items():
        name = str(given).lower()
        for prefix in _OPTION_PREFIXES[scheme]:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        name = _ALIASES[scheme].get(name, name)
        if name in values:
            raise MalformedError(
                ErrorCode.INPUT_INVALID, f"{given!a} gives {name} a second time", where="storage_options"
            )
        values[name] = value
    return values


def _names_account(values: Mapping[str, object]) -> bool:
    names = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR")
    given = any("account_name" in name or "emulator" in name for name in values)
    return given or any(os.environ.get(name) for name in names)


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _endpoint(scheme: str) -> str:
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }
    return next((os.environ[name] for name in names.get(scheme, ()) if os.environ.get(name)), "")


def _web(url: str, options: Mapping[str, str]) -> tuple[Maker, str]:
    """How to make the client of a web server, and the URL to show."""
    from obstore.store import HTTPStore

    if options:
        raise MalformedError(
            ErrorCode.INPUT_INVALID, f"no option {min(options)!r} for web servers", where="storage_options"
        )
    try:
        parts = urlsplit(url)
        secret = parts.username is not None or parts.password is not None
        valid = bool(parts.hostname) and not (parts.query or parts.fragment or secret) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise _not_a_url("https://host/path, without user, query or fragment")
    place = url.rstrip("/")

    def make(*, client_options: ClientConfig, retry_config: RetryConfig) -> ObjectStore:
        client_options["allow_http"] = parts.scheme.lower() == "http"
        return HTTPStore(place, client_options=client_options, retry_config=retry_config)

    return make, place


def _not_a_url(grammar: str) -> MalformedError:
    # The URL itself may hold credentials (DF-SEC-02).
    return MalformedError(ErrorCode.INPUT_INVALID, f"a URL here is {grammar}", where="url")
