"""Make a store, or open one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from deltaformat.blockcache import BlockCache
from deltaformat.blocks import DEFAULT_BLOCK_BYTES, check_block_bytes
from deltaformat.context import Context
from deltaformat.digests import get_digest
from deltaformat.errors import ConflictError, ErrorCode, LimitError, MissingError
from deltaformat.keys import DESCRIPTOR, record_key
from deltaformat.log import Log
from deltaformat.rebuild import Rebuilder
from deltaformat.records import (
    MAX_DESCRIPTOR_BYTES,
    MAX_RECORD_BYTES,
    Descriptor,
    encode_descriptor,
    parse_descriptor,
)
from deltaformat.sources import Sources
from deltaformat.storage import Storage, open_storage
from deltaformat.store import Store

__all__ = ["create", "open"]

MEMORY_BUDGET = 256 << 20


def create(
    url: str | os.PathLike[str] | Storage,
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    digest: str = "xxh3-128",
    exist_ok: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> Store:
    """Make a new, empty store.

    Args:
        url: A path, `file:///path`, `memory://name`, `s3://bucket/prefix`, `gs://bucket/prefix`,
            `az://container/prefix`, `hf://buckets/namespace/name/prefix`, or a `Storage`.
        block_bytes: Block size in bytes, a power of two from 256 to 64 MiB; 4 MiB is recommended above 200
            billion parameters.
        digest: `xxh3-128`, or `blake3-256` where writers are not trusted or a root must be evidence (SPEC 7).
        exist_ok: Open the store that is there instead of failing; its block size and digest stand.
        storage_options: For buckets: options of the client, which come before the environment (see `open`).

    Raises:
        ConflictError: there is a store already (already-exists).
        MalformedError, UnsupportedError: a block size or digest that cannot be.
        StoreError: the storage failed.
    """
    check_block_bytes(block_bytes, where="block_bytes")
    get_digest(digest)
    storage = open_storage(url, create=True, options=storage_options)
    descriptor = Descriptor(uuid=secrets.token_hex(16), digest=digest, block_bytes=block_bytes, time=_now())
    # Looked for first: where the server ignores the condition, *create* would replace the one that is there.
    if not _has_descriptor(storage) and storage.create(DESCRIPTOR, encode_descriptor(descriptor)):
        return open(storage)
    opened = open(storage)
    if not exist_ok and opened.uuid != descriptor.uuid:  # its own, where the reply to the first try was lost
        raise ConflictError(
            ErrorCode.ALREADY_EXISTS,
            "there is a store already; open it, or pass exist_ok=True",
            where=storage.url,
        )
    return opened


def open(
    url: str | os.PathLike[str] | Storage,
    *,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int = 10 << 30,
    memory_budget: int = MEMORY_BUDGET,
    threads: int = 2,
    allow_external: Sequence[str] = (),
    storage_options: Mapping[str, str] | None = None,
) -> Store:
    """Open a store.

    Args:
        url: As for `create`; `https://host/path` can be read, too.
        cache: A local directory that keeps decoded blocks, each verified again when it is used; one that only
            you can write to, since `xxh3-128` does not stop who can choose the bytes.
        cache_bytes: Bytes the cache may take.
        memory_budget: Bytes that reading may have in flight, beside its result.
        threads: Blocks decoded at a time.
        allow_external: Prefixes of URLs that may be read beside Hugging Face files at a commit (SPEC 10.2),
            such as `file:///data/base/`.
        storage_options: For buckets: options of the client by their names in obstore, such as `endpoint` and
            `region`, which come before the environment; `timeout`, the seconds that a small request may take
            (30), and `retry_seconds`, how long a request that fails is tried again (30; and twice at least,
            however long a try takes). Credentials are best left to the environment, or the profile or token
            that the bucket's own tools use.

    Raises:
        MissingError: there is no store (store-missing).
        MalformedError, CorruptError, UnsupportedError: its descriptor is not one this version reads.
        StoreError: the storage failed.
    """
    storage = open_storage(url, options=storage_options)
    try:
        data = storage.get(DESCRIPTOR, limit=MAX_DESCRIPTOR_BYTES)
    except MissingError:
        raise MissingError(
            ErrorCode.STORE_MISSING,
            f"no store here ({DESCRIPTOR} is missing); make one with `create`",
            where=storage.url,
        ) from None
    descriptor = parse_descriptor(data)
    algorithm = get_digest(descriptor.digest, where=storage.url)
    sources = Sources(storage, allow_external=allow_external)
    blocks = None
    if cache is not None:
        blocks = BlockCache(cache, cache_bytes, store_uuid=descriptor.uuid, digest=algorithm)
    rebuilder = Rebuilder(
        sources, algorithm, descriptor.block_bytes, memory_budget=memory_budget, threads=threads, cache=blocks
    )
    return Store(Context(storage, descriptor, Log(storage), algorithm, sources, rebuilder))


def _has_descriptor(storage: Storage) -> bool:
    """Whether there is a descriptor.

    Raises:
        ConflictError: It was lost: a new one would give the records that are there another meaning.
    """
    try:
        storage.get(DESCRIPTOR, limit=MAX_DESCRIPTOR_BYTES)
    except MissingError:
        try:
            storage.get(record_key(0), limit=MAX_RECORD_BYTES)
        except MissingError:
            return False
        raise ConflictError(
            ErrorCode.ALREADY_EXISTS,
            f"a store's records are here, but {DESCRIPTOR} is lost; restore it, or use another place",
            where=storage.url,
        ) from None
    except LimitError:
        pass  # told when it is opened
    return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
