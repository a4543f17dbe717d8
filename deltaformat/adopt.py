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

__all__ = ["adopt", "external_url"]


def external_url(file: Path, base: Path, base_url: str | None) -> str:
    """The URL by which a weight file is named: its own, or its place below `base_url`."""
    if base_url is None:
        return file.resolve().as_uri()
    return f"{base_url.rstrip('/')}/{file.relative_to(base).as_posix()}"


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
    base = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    packs = {file: number for number, file in enumerate(checkpoint.files)}
    builder = VersionMapBuilder(
        digest_bytes=algorithm.size,
        packs=[
            ExternalRef(external_url(file, base, base_url), file.stat().st_size, _sha256(file))
            for file in packs
        ],
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
