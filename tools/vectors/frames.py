"""Frames that a zstd encoder made, kept, so that no release of it changes a case (frames.json, by content).

Everywhere else frames are put together by hand (`primitives.frame`); these have compressed blocks.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import zstandard

from vectors.primitives import sha256

__all__ = ["compressed", "save"]

PATH = Path(__file__).with_name("frames.json")
_kept: dict[str, str] = json.loads(PATH.read_text()) if PATH.exists() else {}
_used: dict[str, str] = {}


def compressed(content: bytes, level: int = 3, *, checksum: bool = False) -> bytes:
    """A frame of `content`: the one that is kept, or else a new one, which `save` keeps."""
    name = f"{sha256(content)}:{level}:{int(checksum)}"
    if name not in _kept:
        compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
        _kept[name] = base64.b64encode(compressor.compress(content)).decode()
    _used[name] = _kept[name]
    data = base64.b64decode(_kept[name])
    assert zstandard.ZstdDecompressor().decompress(data) == content
    return data


def save() -> None:
    """Keep the frames that were used."""
    PATH.write_text(json.dumps(_used, indent=1, sort_keys=True) + "\n")
