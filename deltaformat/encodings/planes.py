"""`planes` and `planes-delta`: byte j of every element in stream j (SPEC 9.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltaformat.blocks import Buffer, Bytes
from deltaformat.encodings.strata import Elements
from deltaformat.encodings.streams import WIDTHS, Cursor, fitting_width, read_width, write_stream

__all__ = [
    "decode_planes",
    "decode_planes_delta",
    "encode_planes",
    "encode_planes_delta",
    "join_planes",
    "split_planes",
]


def encode_planes(new: Bytes, width: int) -> bytes:
    """Encode a block on its own.

    Args:
        new: The block.
        width: Element width in bytes; 1 is used where it does not divide the length.
    """
    return _encode(new.view(f"<u{fitting_width(new.size, width)}"))


def encode_planes_delta(new: Bytes, base: Bytes, width: int) -> bytes:
    """Encode a block as its wrapping difference to another of the same length.

    Args:
        new: The block.
        base: The block that readers will have.
        width: Element width in bytes; 1 is used where it does not divide the length.
    """
    elements = new.view(f"<u{fitting_width(new.size, width)}")
    return _encode(elements - base.view(elements.dtype))


def decode_planes(payload: Buffer, out: Bytes) -> None:
    """Decode a `planes` payload over `out`, whose length is the block's."""
    _decode(payload, out)


def decode_planes_delta(payload: Buffer, out: Bytes) -> None:
    """Decode a `planes-delta` payload onto `out`, which holds the base."""
    difference = _decode(payload, np.empty_like(out))
    elements = out.view(difference.dtype)
    np.add(elements, difference, out=elements)


def split_planes(elements: Elements) -> list[bytes]:
    """Return byte j of every element, for each j, the least significant first."""
    # Shift and truncate: NumPy does both faster than it copies with a stride.
    shifted = (elements >> elements.dtype.type(8 * j) if j else elements for j in range(elements.itemsize))
    return [plane.astype(np.uint8).tobytes() for plane in shifted]


def join_planes(planes: Sequence[Bytes], elements: Elements) -> None:
    """Undo `split_planes`, into `elements`."""
    elements[:] = planes[-1]
    for plane in reversed(planes[:-1]):
        np.left_shift(elements, 8, out=elements)
        np.bitwise_or(elements, plane, out=elements)


def _encode(elements: Elements) -> bytes:
    header = bytes((WIDTHS.index(elements.itemsize),))
    return b"".join([header, *[write_stream(plane) for plane in split_planes(elements)]])


def _decode(payload: Buffer, out: Bytes) -> Elements:
    """Decode into `out` and return it as elements; the base, if any, is the caller's affair."""
    cursor = Cursor(payload)
    width = read_width(cursor.byte(), 2, out.size)
    planes = [cursor.stream(out.size // width) for _ in range(width)]
    cursor.finish()
    elements: Elements = out.view(f"<u{width}")
    join_planes(planes, elements)
    return elements
