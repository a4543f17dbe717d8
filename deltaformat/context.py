"""What every reader and writer of one store shares, and how a commit's map is loaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from deltaformat.digests import DigestAlgorithm
from deltaformat.errors import ErrorCode, InconsistentError, LimitError, MissingError
from deltaformat.log import Log
from deltaformat.manifest import decode_part
from deltaformat.rebuild import Rebuilder
from deltaformat.records import Commit, Descriptor, ManifestRef
from deltaformat.sources import Sources, fetch_whole
from deltaformat.storage import Storage
from deltaformat.versionmap import VersionMap, merge

__all__ = ["Context", "explain_missing", "load_map"]

CONCURRENT_PARTS = 2  # each may take several times its size while it is parsed
MAX_MANIFESTS_CONTENT = 4 << 30
"""Manifest parts of a version, decompressed, in all (DF-LIM-01)."""


@dataclass(frozen=True, slots=True)
class Context:
    """An open store's parts: its storage, descriptor, log, digest, and the way to its blocks."""

    storage: Storage
    descriptor: Descriptor
    log: Log
    algorithm: DigestAlgorithm
    sources: Sources
    rebuilder: Rebuilder

    def through(self, storage: Storage) -> Context:
        """The same store, written through another storage."""
        return replace(self, storage=storage, log=Log(storage))


def load_map(context: Context, commit: Commit) -> VersionMap:
    """Fetch, verify and parse the manifests of `commit` (SPEC 13, step 4).

    Raises:
        MissingError: a part is not there: object-missing, or version-retired where a collector has taken it
            (DF-GC-05).
        CorruptError, MalformedError, InconsistentError, LimitError: a part is not what the record says, or
            its root is not (DF-DIG-04).
    """

    def fetch(ref: ManifestRef) -> VersionMap:
        return decode_part(
            fetch_whole(context.storage, ref.key, ref.size),
            content_size=ref.content_size,
            where=ref.key,
            digest=context.descriptor.digest,
            block_bytes=context.descriptor.block_bytes,
            parent=commit.parent,
        )

    total = sum(ref.content_size for ref in commit.manifests)
    if total > MAX_MANIFESTS_CONTENT:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED,
            f"manifests of {total} bytes exceed {MAX_MANIFESTS_CONTENT}",
            where=f"commit {commit.seq}",
        )
    try:
        if len(commit.manifests) == 1:
            parts = [fetch(commit.manifests[0])]
        else:
            with ThreadPoolExecutor(CONCURRENT_PARTS) as pool:
                parts = list(pool.map(fetch, commit.manifests))
    except MissingError as error:
        raise explain_missing(context, commit, error) from error
    version = merge(parts)
    root = version.root(context.descriptor.digest, context.descriptor.block_bytes)
    if root != commit.root:
        raise InconsistentError(
            ErrorCode.ROOT_MISMATCH,
            f"the manifest gives root {root}, the record says {commit.root}; do not use this version",
            where=f"commit {commit.seq}",
        )
    return version


def explain_missing(context: Context, commit: Commit, error: MissingError) -> MissingError:
    """What to tell about an object of `commit` that is not there: collected, or lost."""
    if error.code is ErrorCode.OBJECT_MISSING and commit.seq in context.log.retired():
        return MissingError(
            ErrorCode.VERSION_RETIRED,
            f"step {commit.step} of branch {commit.branch!r} was collected; read a newer or a tagged version",
            where=f"commit {commit.seq}",
        )
    return error
