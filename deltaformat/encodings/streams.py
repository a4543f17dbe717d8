"""Varints and streams: the parts that payloads are made of (SPEC 2 and 9.1).

A payload is read through a `Cursor`, which never takes memory for a number it has only been told: a stream's
length follows from counts that were checked against the block, and a zstd frame must state that same length
before it is decompressed.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard

from deltaformat.blocks import Buffer, Bytes, byte_view
from deltaformat.errors import CorruptError, ErrorCode, MalformedError, UnsupportedError

__all__ = [
    "WIDTHS",
    "Cursor",
    "fitting_width",
    "malformed",
    "read_width",
    "write_stream",
    "write_varint",
]

WIDTHS = (1, 2, 4, 8)
"""Element widths in bytes; a payload states the index."""

MAX_WINDOW = 1 << 27
_MAGIC = b"\x28\xb5\x2f\xfd"
_STORED, _CONSTANT = 0, 1

_LEAST_COMPRESSED = 18
"""No frame of fewer bytes that are not all alike is smaller than they are: besides 9 bytes of headers and
the stream's own, it needs one sequence (a count, modes, 3 of bits) and two literals with their header."""


class _Zstd(threading.local):
    """One compressor and decompressor per thread: making them costs more than a small stream."""

    def __init__(self) -> None:
        # In these skewed alphabets most matches are chance, and cost more than the literals that they
        # replace. The smallest table and long matches find runs and repeated rows, and little else: on
        # exponents that is three times as fast as plain level 1, and 7 % smaller.
        level = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
        self.compressor = zstandard.ZstdCompressor(compression_params=level)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)


_zstd = _Zstd()


def malformed(message: str) -> MalformedError:
    """Make the error for a payload that breaks SPEC 9."""
    return MalformedError(ErrorCode.PAYLOAD_INVALID, message)


def fitting_width(size: int, width: int) -> int:
    """Return `width`, or 1 where that does not divide the block's length.

    A payload states its own width, and DF-ENC-07 wants whole elements.
    """
    return width if size % width == 0 else 1


def read_width(header: int, used_bits: int, size: int) -> int:
    """Read the width from a payload's first byte.

    Args:
        header: The byte.
        used_bits: How many of its low bits have a meaning; the others are reserved (DF-ENC-06).
        size: The block's length, which the width must divide (DF-ENC-07).
    """
    if header >> used_bits:
        raise UnsupportedError(
            ErrorCode.ENCODING_UNKNOWN, "a reserved bit of a payload is set; a newer reader may know it"
        )
    width = WIDTHS[header & 3]
    if size % width:
        raise malformed(f"elements of {width} bytes do not fill a block of {size}")
    return width


def write_varint(value: int) -> bytes:
    """Encode a number below 2^32 in the shortest way (DF-ENC-01)."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def write_stream(content: bytes) -> bytes:
    """Encode a stream in the smallest of its forms; an empty one is absent (DF-ENC-08)."""
    if not content:
        return b""
    if content == content[:1] * len(content):
        return bytes((_CONSTANT,)) + content[:1]
    if len(content) < _LEAST_COMPRESSED:
        return bytes((_STORED,)) + content
    frame = _zstd.compressor.compress(content)
    header = write_varint(len(frame))
    if len(header) + len(frame) <= len(content):
        return header + frame
    return bytes((_STORED,)) + content


class Cursor:
    """A payload and how far it has been read.

    Args:
        payload: All bytes of the piece.
    """

    __slots__ = ("_data", "_position")

    def __init__(self, payload: Buffer) -> None:
        self._data = byte_view(payload)
        self._position = 0

    def take(self, size: int) -> memoryview:
        """Read `size` bytes, without copying them."""
        start, end = self._position, self._position + size
        if end > len(self._data):
            raise malformed(f"the payload ends {end - len(self._data)} bytes early")  # DF-ENC-05
        self._position = end
        return self._data[start:end]

    def byte(self) -> int:
        """Read a u8."""
        return self.take(1)[0]

    def varint(self) -> int:
        """Read a varint, refusing one that is too long or too large (DF-ENC-01)."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if (byte == 0 and shift) or value >> 32:
                    break
                return value
        raise malformed("a varint is not the shortest form of a number below 2^32")

    def stream(self, expected: int) -> Bytes:
        """Read a stream of `expected` bytes; the result may be read-only (SPEC 9.1)."""
        if expected == 0:  # DF-ENC-08
            return np.empty(0, np.uint8)
        header = self.varint()
        if header == _STORED:
            return np.frombuffer(self.take(expected), np.uint8)
        if header == _CONSTANT:
            return np.frombuffer(bytes((self.byte(),)) * expected, np.uint8)  # np.full releases the GIL
        return np.frombuffer(_decompress(self.take(header), expected), np.uint8)

    def finish(self) -> None:
        """Refuse bytes that are left over (DF-ENC-05)."""
        left = len(self._data) - self._position
        if left:
            raise malformed(f"{left} bytes are left over after the payload")


def _decompress(frame: memoryview, expected: int) -> bytes:
    """Decompress one zstd frame after its header has been checked (DF-ENC-09)."""
    if frame[:4] != _MAGIC:  # this refuses skippable frames, too
        raise malformed("a stream does not start with a zstd frame")
    try:
        header = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise malformed(f"a zstd frame's header is not valid: {error}") from None
    if header.content_size != expected:  # an unstated size reads as 2^64 - 1
        raise malformed(f"a zstd frame does not state the {expected} bytes that its stream has")
    if header.dict_id:
        raise malformed("a zstd frame uses a dictionary")
    if header.window_size > MAX_WINDOW:
        raise malformed(f"a zstd frame needs a window of {header.window_size} bytes, above {MAX_WINDOW}")
    decompressor = _zstd.decompressor
    try:
        return decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        try:
            decompressor.decompress(frame, allow_extra_data=True)
        except zstandard.ZstdError:
            message = f"a zstd frame does not decompress: {error}"
            raise CorruptError(ErrorCode.FRAME_CORRUPT, message) from None
        raise malformed("a zstd frame is followed by other bytes in its stream") from None
