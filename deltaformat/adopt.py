"""A checkpoint that stays where it is: a version's map whose pieces are ranges of its files (SPEC 10.2)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from deltaformat.blocks import block_lengths
from deltaformat.checkpoint import Checkpoint
from deltaformat.digests import DigestAlgorithm, digest_blocks
from deltaformat.encodings import Encoding
from deltaformat.packs import ExternalRef
from deltaformat.versionmap import NOT_FRESH, VersionMap, VersionMapBuilder

__all__ = ["adopt", "external_urls"]


def external_urls(checkpoint: Checkpoint, base_url: str | None) -> dict[Path, str]:
    """The URL by which each weight file is named: its own, or its place below `base_url`."""
    if base_url is None:
        return {file: file.resolve().as_uri() for file in checkpoint.files}
    base = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return {file: f"{base_url.rstrip('/')}/{file.relative_to(base).as_posix()}" for file in checkpoint.files}


def adopt(
    checkpoint: Checkpoint, *, base_url: str | None, algorithm: DigestAlgorithm, block_bytes: int
) -> VersionMap:
    """Hash a checkpoint's files and blocks, and map every block to a raw range of its file.

    Args:
        checkpoint: Its files must never change.
        base_url: Where others find its directory; None: where it is, as `file:` URLs.
        algorithm: The store's digest.
        block_bytes: Its block size.
    """
    urls = external_urls(checkpoint, base_url)
    packs = {file: number for number, file in enumerate(urls)}
    builder = VersionMapBuilder(
        digest_bytes=algorithm.size,
        packs=[ExternalRef(url, file.stat().st_size, _sha256(file)) for file, url in urls.items()],
    )
    for name, host in checkpoint.items():
        location = checkpoint.location(name)
        lengths = block_lengths(host.data.size, block_bytes)
        count = len(lengths)
        builder.add_tensor(
            name,
            host.dtype,
            host.shape,
            digests=digest_blocks(host.data, block_bytes, algorithm),
            fresh=np.full(count, NOT_FRESH, np.uint8),
            depth=np.ones(count, np.uint8),
            pack=np.full(count, packs[location.file], np.int32),
            offset=location.offset + np.arange(count, dtype=np.int64) * block_bytes,
            length=lengths,
            encoding=np.full(count, Encoding.RAW, np.uint8),
        )
    return builder.finish()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
