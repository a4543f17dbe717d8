"""What everything is made of: integers, zstd frames, sealed JSON, safetensors, digests, roots.

Frames are put together by hand, of raw and run-length blocks, so that no library's version changes a byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import blake3
import xxhash

__all__ = [
    "DTYPES",
    "MAGIC",
    "block_digest",
    "blocks_of",
    "dump",
    "frame",
    "leaf",
    "root",
    "safetensors",
    "seal",
    "sha256",
    "varint",
]

# SPEC 8.1: name -> (bits, width).
DTYPES: Mapping[str, tuple[int, int]] = {
    "BOOL": (8, 1),
    "F4": (4, 1),
    "F6_E2M3": (6, 1),
    "F6_E3M2": (6, 1),
    "U8": (8, 1),
    "I8": (8, 1),
    "F8_E5M2": (8, 1),
    "F8_E4M3": (8, 1),
    "F8_E8M0": (8, 1),
    "F8_E4M3FNUZ": (8, 1),
    "F8_E5M2FNUZ": (8, 1),
    "I16": (16, 2),
    "U16": (16, 2),
    "F16": (16, 2),
    "BF16": (16, 2),
    "I32": (32, 4),
    "U32": (32, 4),
    "F32": (32, 4),
    "C64": (64, 4),
    "F64": (64, 8),
    "I64": (64, 8),
    "U64": (64, 8),
}

MAGIC = bytes.fromhex("28b52ffd")
_MAX_ZSTD_BLOCK = 128 << 10


def sha256(data: bytes) -> str:
    """hex(SHA-256)."""
    return hashlib.sha256(data).hexdigest()


def varint(value: int) -> bytes:
    """The shortest LEB128 form."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def frame(
    content: bytes,
    *,
    size: int | None = None,
    size_bytes: int | None = None,
    window: int | None = None,
    checksum: bytes | None = None,
    dictionary: bytes = b"",
    blocks: bytes | None = None,
    reserved: int = 0,
) -> bytes:
    """A zstd frame (RFC 8878) of uncompressed and run-length blocks.

    Args:
        content: What it holds.
        size: The content size that it states; by default the true one.
        size_bytes: Bytes of that field, 0 for a frame that states none; by default as few as possible.
        window: The window descriptor's byte; None makes a single-segment frame.
        checksum: Four bytes behind the blocks.
        dictionary: The dictionary id's bytes: 0, 1, 2 or 4.
        blocks: Other blocks than those of `content`.
        reserved: Bits to be set in the frame header's descriptor.
    """
    size = len(content) if size is None else size
    if size_bytes is None:
        size_bytes = 1 if size < 256 and window is None else 2 if 256 <= size < 65_792 else 4
    flag = {0: 0, 1: 0, 2: 1, 4: 2, 8: 3}[size_bytes]
    descriptor = flag << 6 | (window is None) << 5 | (checksum is not None) << 2 | reserved
    descriptor |= {0: 0, 1: 1, 2: 2, 4: 3}[len(dictionary)]
    out = MAGIC + bytes([descriptor])
    if window is not None:
        out += bytes([window])
    out += dictionary
    if size_bytes:
        out += (size - 256 if size_bytes == 2 else size).to_bytes(size_bytes, "little")
    if blocks is None:
        blocks = _zstd_blocks(content)
    return out + blocks + (checksum or b"")


def _zstd_blocks(content: bytes) -> bytes:
    if not content:
        return bytes([1, 0, 0])
    out = b""
    # A block is at most as long as the window, which is the content in a frame of a single segment.
    for start in range(0, len(content), _MAX_ZSTD_BLOCK):
        part = content[start : start + _MAX_ZSTD_BLOCK]
        run = len(part) > 4 and part == part[:1] * len(part)
        last = start + len(part) == len(content)
        out += (len(part) << 3 | run << 1 | last).to_bytes(3, "little") + (part[:1] if run else part)
    return out


def dump(value: object) -> bytes:
    """JSON as short as it gets."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def seal(members: Mapping[str, object] | bytes) -> bytes:
    """A descriptor or record, with `check` at its end (DF-JSN-03). Bytes are the object without it."""
    body = (members if isinstance(members, bytes) else dump(dict(members))).removesuffix(b"}")
    return body + b',"check":"' + sha256(body).encode() + b'"}'


def safetensors(tensors: Sequence[tuple[str, str, Sequence[int], bytes]], **metadata: str) -> bytes:
    """A safetensors file of (name, dtype, shape, data)."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, dtype, shape, data in tensors:
        offsets = [start, start + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        start += len(data)
    text = dump(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors)


def block_digest(digest: str, data: bytes) -> bytes:
    """A block's digest (SPEC 7)."""
    return xxhash.xxh3_128_digest(data) if digest == "xxh3-128" else blake3.blake3(data).digest()


def blocks_of(data: bytes, block_bytes: int) -> list[bytes]:
    """The blocks of a tensor's canonical bytes (DF-BLK-02)."""
    return [data[start : start + block_bytes] for start in range(0, len(data), block_bytes)]


def leaf(name: str, dtype: str, shape: Sequence[int], digests: Sequence[bytes]) -> bytes:
    """A tensor's leaf (SPEC 7.1)."""
    text = name.encode()
    out = b"deltaformat/1 tensor\0" + len(text).to_bytes(4, "little") + text
    out += bytes([len(dtype)]) + dtype.encode() + bytes([len(shape)])
    out += b"".join(dim.to_bytes(8, "little") for dim in shape)
    return hashlib.sha256(out + len(digests).to_bytes(8, "little") + b"".join(digests)).digest()


def root(digest: str, block_bytes: int, leaves: Mapping[str, bytes]) -> str:
    """A version's root in its printed form, of the leaves by tensor name (SPEC 7.1)."""
    out = b"deltaformat/1 root\0" + bytes([len(digest)]) + digest.encode()
    out += block_bytes.to_bytes(8, "little") + len(leaves).to_bytes(8, "little")
    out += b"".join(leaves[name] for name in sorted(leaves, key=str.encode))
    return f"df1:{digest}:{block_bytes}:{sha256(out)}"
