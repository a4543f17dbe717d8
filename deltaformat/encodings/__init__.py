"""Payloads: how the bytes of one block are stored in a piece (SPEC 9).

Everything here is pure and takes blocks as contiguous one-dimensional arrays of `uint8`.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from deltaformat.blocks import Buffer, Bytes
from deltaformat.dtypes import Dtype
from deltaformat.encodings import native
from deltaformat.encodings.planes import (
    decode_planes,
    decode_planes_delta,
    encode_planes,
    encode_planes_delta,
)
from deltaformat.encodings.sparse import (
    Changes,
    apply_sparse,
    changed_positions,
    copy_changed,
    encode_changes,
    encode_sparse,
    parse_sparse,
)
from deltaformat.encodings.strata import Positions
from deltaformat.encodings.streams import fitting_width, malformed
from deltaformat.encodings.thresholds import choose_thresholds
from deltaformat.errors import ErrorCode, UnsupportedError

__all__ = [
    "Changes",
    "Encoding",
    "changed_positions",
    "choose_thresholds",
    "compare_and_encode",
    "copy_changed",
    "decode_piece",
    "encode_block",
    "encode_planes",
    "encode_planes_delta",
    "encode_sparse",
    "parse_sparse",
]


class Encoding(IntEnum):
    """Codes of SPEC 9."""

    RAW = 0
    PLANES = 1
    PLANES_DELTA = 2
    SPARSE = 3

    @property
    def needs_base(self) -> bool:
        """Whether a payload applies to the result of the pieces before it (DF-ENC-02)."""
        return self >= Encoding.PLANES_DELTA


_SURELY_SPARSE = 8
"""Where one element in so many differs, or fewer, nothing else comes near `sparse`."""

_AS_SMALL = 1.02

_SAMPLE = 128
"""Elements that are looked at."""

_FEW_CHANGES = 1024
"""Of so few, the estimate that thresholds pay may be wrong: they are coded without, too."""


def encode_block(
    new: Bytes,
    base: Bytes | None,
    dtype: Dtype,
    *,
    positions: Positions | None = None,
    strata: bool | None = None,
) -> tuple[Encoding, bytes]:
    """Encode a block in the smallest way, by measured size; never larger than the block itself.

    One that stands alone is preferred where it is as small to 1 part in 50: it ends the chain, and is less
    work to read.

    Args:
        new: The block.
        base: What readers will have, of the same length; None where the payload must stand alone.
        dtype: The tensor's dtype.
        positions: What `changed_positions` returned for these and the dtype's width, where that is known.
        strata: Whether to code positions by magnitude class: smaller, and slower in NumPy. None does so where
            the kernels serve.
    """
    width = fitting_width(new.size, dtype.width)
    if base is None:
        return _smallest(new, [(Encoding.PLANES, encode_planes(new, width))])
    positions, thresholds, payload = encode_changes(
        new, base, width, dtype.kind, positions=positions, strata=_with_strata(strata)
    )
    return _encode(new, base, width, positions, thresholds, payload)


def compare_and_encode(
    new: Bytes, base: Bytes, dtype: Dtype, *, strata: bool | None = None
) -> tuple[Positions, tuple[Encoding, bytes] | None]:
    """Do what `changed_positions` does and, where something differs, `encode_block`: cheaper than both.

    Args:
        new: The block.
        base: What readers will have, of the same length.
        dtype: The tensor's dtype; where its width does not divide the length, positions are of bytes.
        strata: As for `encode_block`.

    Returns:
        The positions of elements that differ, rising; and the encoding and payload, where there are some.
    """
    width = fitting_width(new.size, dtype.width)
    positions, thresholds, payload = encode_changes(new, base, width, dtype.kind, strata=_with_strata(strata))
    return positions, _encode(new, base, width, positions, thresholds, payload) if positions.size else None


def _with_strata(strata: bool | None) -> bool:
    return native.kernels is not None if strata is None else strata


def _encode(
    new: Bytes, base: Bytes, width: int, positions: Positions, thresholds: int, sparse: bytes
) -> tuple[Encoding, bytes]:
    """Encode a block of which `encode_changes` gave the last three, in the smallest way."""
    candidates: list[tuple[Encoding, bytes]] = []
    dense = positions.size * _SURELY_SPARSE > new.size // width or _looks_constant(new, width)
    if positions.size:
        candidates.append((Encoding.SPARSE, sparse))
        if thresholds and positions.size < _FEW_CHANGES:
            candidates.append((Encoding.SPARSE, encode_sparse(new, base, width, positions)))
    if dense or not positions.size:
        candidates.append((Encoding.PLANES_DELTA, encode_planes_delta(new, base, width)))
    if dense:
        candidates.append((Encoding.PLANES, encode_planes(new, width)))
    return _smallest(new, candidates)


def _smallest(new: Bytes, candidates: list[tuple[Encoding, bytes]]) -> tuple[Encoding, bytes]:
    least = min(len(payload) for _, payload in candidates)
    if _AS_SMALL * least >= new.size:
        return Encoding.RAW, new.tobytes()
    encoding, payload = min(candidates, key=lambda candidate: (candidate[0].needs_base, len(candidate[1])))
    if encoding.needs_base or len(payload) > _AS_SMALL * least:
        encoding, payload = min(candidates, key=lambda candidate: len(candidate[1]))
    return encoding, payload


def _looks_constant(block: Bytes, width: int) -> bool:
    """Whether a sample of elements is all alike: then the block may compress to less than any difference."""
    elements = block.view(f"<u{width}")
    return bool((elements[:: elements.size // _SAMPLE + 1] == elements[0]).all())


def decode_piece(encoding: int, payload: Buffer, out: Bytes) -> None:
    """Decode a piece into `out`, in place.

    Args:
        encoding: The code of the manifest.
        payload: All bytes of the piece.
        out: The block: it holds the base where the encoding needs one. After an error its contents mean
            nothing, except that `sparse` checks everything before it changes a byte (DF-ENC-17).

    Raises:
        UnsupportedError: The code is unknown (DF-ENC-03) or a reserved bit is set.
        MalformedError: The payload breaks SPEC 9.
        CorruptError: A zstd frame does not decompress.
    """
    if encoding == Encoding.SPARSE:
        apply_sparse(payload, out)
    elif encoding == Encoding.PLANES_DELTA:
        decode_planes_delta(payload, out)
    elif encoding == Encoding.PLANES:
        decode_planes(payload, out)
    elif encoding == Encoding.RAW:
        content = np.frombuffer(payload, np.uint8)
        if content.size != out.size:  # DF-ENC-04
            raise malformed(f"a raw payload of {content.size} bytes for a block of {out.size}")
        out[:] = content
    else:
        raise UnsupportedError(
            ErrorCode.ENCODING_UNKNOWN, f"encoding {encoding} is unknown; a newer reader may know it"
        )
