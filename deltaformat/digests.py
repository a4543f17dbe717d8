"""Block digests and the root of a version (SPEC 7)."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import xxhash

from deltaformat.blocks import Buffer, Bytes, check_block_bytes, name_bytes
from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError

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

_ROOT = re.compile(r"df1:([a-z0-9-]{1,255}):([1-9][0-9]{0,18}):([0-9a-f]{64})", re.ASCII)


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
    function: Callable[[Buffer], bytes] = field(repr=False, compare=False)

    def __call__(self, data: Buffer) -> bytes:
        """Return the digest of `data`."""
        return self.function(data)


def get_digest(name: str, *, where: str = "") -> DigestAlgorithm:
    """Look a digest up by its name.

    Args:
        name: `xxh3-128` or `blake3-256`.
        where: What an error should name.

    Raises:
        UnsupportedError: The name is unknown, or its library is not installed.
    """
    if name == "xxh3-128":
        # The library gives the canonical, big-endian order. From its release 4 it lets go of the GIL, so that
        # threads can share the work.
        function = cast("Callable[[Buffer], bytes]", xxhash.xxh3_128_digest)
    elif name == "blake3-256":
        function = _blake3(where)
    else:
        raise _unknown(name, where)
    return DigestAlgorithm(name, DIGEST_SIZES[name], function)


def _unknown(name: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        ErrorCode.DIGEST_UNKNOWN, f"digest {name!r} is not one of {', '.join(DIGEST_SIZES)}", where=where
    )


def _blake3(where: str) -> Callable[[Buffer], bytes]:
    try:
        from blake3 import blake3
    except ImportError:
        raise UnsupportedError(
            ErrorCode.DIGEST_UNKNOWN,
            "digest 'blake3-256' needs a library: pip install deltaformat[blake3]",
            where=where,
        ) from None
    return lambda data: blake3(cast("bytes", data)).digest()


def digest_blocks(data: Bytes, block_bytes: int, algorithm: DigestAlgorithm) -> Bytes:
    """Digest every block of a tensor.

    Args:
        data: The tensor's canonical bytes, contiguous.
        block_bytes: The block size.
        algorithm: The digest.

    Returns:
        One row of `algorithm.size` bytes per block.
    """
    view = data.data
    starts = range(0, data.size, block_bytes)
    digests = b"".join([algorithm(view[start : start + block_bytes]) for start in starts])
    return np.frombuffer(digests, np.uint8).reshape(-1, algorithm.size)


@dataclass(frozen=True, slots=True)
class Root:
    """A version's root; `str` gives the printed form.

    Attributes:
        digest: Name of the block digest.
        block_bytes: The block size.
        hex: SHA-256 over the leaves, 64 lowercase hex digits.
    """

    digest: str
    block_bytes: int
    hex: str

    def __str__(self) -> str:
        """Return `df1:<digest name>:<block_bytes>:<hex>`."""
        return f"df1:{self.digest}:{self.block_bytes}:{self.hex}"


def tensor_leaf(name: str, dtype: str, shape: Sequence[int], digests: Bytes) -> bytes:
    """Hash what identifies one tensor: its name, dtype, shape and block digests (DF-DIG-03).

    Args:
        name: The tensor's name.
        dtype: Its dtype's name.
        shape: Its logical shape.
        digests: One row per block.
    """
    encoded_name = name_bytes(name)
    encoded_dtype = dtype.encode("ascii")
    head = struct.pack(
        f"<20sxI{len(encoded_name)}sB{len(encoded_dtype)}sB{len(shape)}QQ",
        b"deltaformat/1 tensor",
        len(encoded_name),
        encoded_name,
        len(encoded_dtype),
        encoded_dtype,
        len(shape),
        *shape,
        len(digests),
    )
    leaf = hashlib.sha256(head)
    leaf.update(np.ascontiguousarray(digests).data)
    return leaf.digest()


def version_root(digest_name: str, block_bytes: int, leaves: Iterable[tuple[bytes, bytes]]) -> str:
    """Compute a version's root (DF-DIG-03).

    Args:
        digest_name: Name of the block digest.
        block_bytes: The block size.
        leaves: Each tensor's name in UTF-8 and its leaf, in any order.

    Returns:
        The printed form.
    """
    ordered = sorted(leaves)
    name = digest_name.encode("ascii")
    root = hashlib.sha256(
        struct.pack(
            f"<18sxB{len(name)}sQQ", b"deltaformat/1 root", len(name), name, block_bytes, len(ordered)
        )
    )
    root.update(b"".join([leaf for _, leaf in ordered]))
    return str(Root(digest_name, block_bytes, root.hexdigest()))


def parse_root(text: str, *, where: str = "") -> Root:
    """Read a root in its printed form.

    Args:
        text: `df1:<digest name>:<block_bytes>:<hex>`.
        where: What an error should name.

    Raises:
        MalformedError: It has another form or an impossible block size.
        UnsupportedError: Its digest is unknown.
    """
    match = _ROOT.fullmatch(text)
    if match is None:
        raise MalformedError(
            ErrorCode.VALUE_INVALID,
            f"{text[:200]!r} is not a root; one looks like df1:xxh3-128:1048576:<64 hex digits>",
            where=where,
        )
    digest, block_bytes, digits = match.groups()
    if digest not in DIGEST_SIZES:
        raise _unknown(digest, where)
    check_block_bytes(int(block_bytes), where=where)
    return Root(digest, int(block_bytes), digits)
