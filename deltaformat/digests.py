"""Block digests and the root of a version (SPEC 7)."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from .blocks import check_block_bytes, name_bytes
from .errors import ErrorCode, MalformedError, UnsupportedError

__all__ = [
    "DIGEST_SIZES",
    "DigestAlgorithm",
    "Root",
    "digest_blocks",
    "get_digest",
    "parse_root",
    "tensor_leaf",
    "version_root",
]

DIGEST_SIZES = {"xxh3-128": 16, "blake3-256": 32}

_ROOT = re.compile(r"df1:([a-z0-9-]+):([1-9][0-9]*):([0-9a-f]{64})", re.ASCII)

type_Bytes = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DigestAlgorithm:
    """A digest of SPEC 7: call it with a block's decoded bytes.

    Attributes:
        name: Its name in the descriptor and in roots.
        size: Bytes of a digest.
        function: What computes it.
    """

    name: str
    size: int
    function: Callable[[type_Bytes], bytes] = field(repr=False, compare=False)

    def __call__(self, data: type_Bytes) -> bytes:
        """Return the digest of `data`."""
        return self.function(data)
