"""`sparse`: differences at positions, both against a base (SPEC 9.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from deltaformat.blocks import Buffer, Bytes
from deltaformat.encodings import native
from deltaformat.encodings.estimates import SCALE, scaled_log2, scaled_log2s
from deltaformat.encodings.planes import join_planes, split_planes
from deltaformat.encodings.strata import Elements, Positions, Ranks, Strata, magnitude_mask
from deltaformat.encodings.streams import (
    WIDTHS,
    Cursor,
    fitting_width,
    malformed,
    read_width,
    write_stream,
    write_varint,
)
from deltaformat.encodings.thresholds import FLOAT, choose_thresholds
from deltaformat.errors import ErrorCode, MalformedError

__all__ = [
    "MAX_K",
    "MAX_THRESHOLDS",
    "Changes",
    "apply_sparse",
    "changed_positions",
    "copy_changed",
    "encode_changes",
    "encode_sparse",
    "join_changes",
    "parse_sparse",
    "split_changes",
]

_Parts: TypeAlias = tuple[list[int], list[int], list[int], list[Bytes]]
"""Thresholds, counts, ks and streams."""

MAX_THRESHOLDS = 15
MAX_K = 26
_ESCAPE = 255
_LEAST_TARGET, _MOST_TARGET = SCALE * 3 // 2, SCALE * 3
"""Logarithms of the mean quotient between which it may lie, where gaps allow it."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a payload does to a block, all of it checked.

    Attributes:
        width: Element width in bytes.
        positions: Element positions, each once, stratum by stratum and rising within each.
        differences: What to add to the elements there, modulo 2^(8 width).
    """

    width: int
    positions: Positions
    differences: Elements

    def apply(self, block: Bytes) -> None:
        """Turn the base into the new block, in place."""
        if native.kernels is not None:
            return self._apply(native.kernels, block, undo=False)
        np.add.at(block.view(self.differences.dtype), self.positions, self.differences)

    def undo(self, block: Bytes) -> None:
        """Turn the new block back into the base, in place."""
        if native.kernels is not None:
            return self._apply(native.kernels, block, undo=True)
        np.subtract.at(block.view(self.differences.dtype), self.positions, self.differences)

    def _apply(self, kernels: native.Kernels, block: Bytes, *, undo: bool) -> None:
        places = np.ascontiguousarray(self.positions, np.uint32)
        kernels.apply(block, self.width, places, self.differences, undo)


def changed_positions(new: Bytes, base: Bytes, width: int) -> Positions:
    """Return the positions of the elements whose bits differ, rising (DF-DTY-03).

    Args:
        new: A block.
        base: Another of the same length.
        width: Element width in bytes; 1 is used where it does not divide the length.
    """
    width = fitting_width(new.size, width)
    if native.kernels is not None:
        return native.diff(native.kernels, new, base, width)
    elements = new.view(f"<u{width}")
    differs = elements != base.view(elements.dtype)
    # Few differ: look for eights of them first.
    whole = differs.size // 8 * 8
    words = differs[:whole].view(np.uint64)
    eights = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words.take(eights).view(np.bool_))
    positions: Positions = (eights.take(inside >> 3) << 3) + (inside & 7)
    rest = np.flatnonzero(differs[whole:])
    return np.concatenate([positions, rest + whole]) if rest.size else positions


def copy_changed(new: Bytes, block: Bytes, width: int, positions: Positions) -> None:
    """Turn `block` into `new`, from which it differs at `positions` only.

    Args:
        new: A block.
        block: Another of the same length; it is changed.
        width: Element width in bytes; it divides the length.
        positions: What `changed_positions` returned for these.
    """
    if native.kernels is None:  # to copy all is faster than to pick
        block[:] = new
    else:
        native.kernels.copy(block, new, width, np.ascontiguousarray(positions, np.uint32))


def encode_sparse(
    new: Bytes,
    base: Bytes,
    width: int,
    positions: Positions | None = None,
    thresholds: Sequence[int] = (),
) -> bytes:
    """Encode a block as its differences to a base of the same length.

    Args:
        new: The block.
        base: The block that readers will have.
        width: Element width in bytes; 1 is used where it does not divide the length.
        positions: What `changed_positions` returned for these, where that is known.
        thresholds: Up to 15 falling magnitudes of old elements; none means plain positions.

    Raises:
        MalformedError: Nothing differs, or the thresholds break DF-ENC-10.
    """
    width = fitting_width(new.size, width)
    if positions is None:
        positions = changed_positions(new, base, width)
    if not positions.size:
        raise MalformedError(ErrorCode.INPUT_INVALID, "a sparse payload needs at least one difference")
    if len(thresholds) > MAX_THRESHOLDS or not _thresholds_valid(thresholds, width):
        raise MalformedError(ErrorCode.INPUT_INVALID, f"thresholds {list(thresholds)} are not usable")
    if native.kernels is not None:
        return _payload(width, native.encode(native.kernels, new, base, width, positions, thresholds))
    given = b"".join([threshold.to_bytes(width, "little") for threshold in thresholds])
    parts = split_changes(new, base, width, positions, thresholds)
    return _payload(width, native.Found(positions, given, parts))


def encode_changes(
    new: Bytes, base: Bytes, width: int, kind: str, *, positions: Positions | None = None, strata: bool = True
) -> tuple[Positions, int, bytes]:
    """Find what differs, choose thresholds, and encode: in one pass where the kernels serve.

    Args:
        new: The block.
        base: The block that readers will have, of the same length.
        width: Element width in bytes, which divides the length.
        kind: The dtype's kind.
        positions: What `changed_positions` returned for these, where that is known.
        strata: Whether there may be thresholds.

    Returns:
        The positions that differ; the number of thresholds; and the payload, empty where nothing differs.
    """
    strata = strata and kind == FLOAT
    if native.kernels is not None and (positions is None or positions.size):
        found = native.encode(native.kernels, new, base, width, positions, None if strata else ())
        payload = _payload(width, found) if found.positions.size else b""
        return found.positions, len(found.thresholds) // width, payload
    if positions is None:
        positions = changed_positions(new, base, width)
    if not positions.size:
        return positions, 0, b""
    thresholds = choose_thresholds(base, positions, width, kind) if strata else ()
    return positions, len(thresholds), encode_sparse(new, base, width, positions, thresholds)


def _payload(width: int, found: native.Found) -> bytes:
    counts, ks, streams = found.parts
    return b"".join(
        [
            bytes((WIDTHS.index(width) | len(found.thresholds) // width << 2,)),
            found.thresholds,
            *[write_varint(count) for count in counts],
            ks,
            *[write_stream(stream) for stream in streams],
        ]
    )


def parse_sparse(payload: Buffer, base: Bytes) -> Changes:
    """Read a payload and compute all its changes, without changing `base` (DF-ENC-17).

    Args:
        payload: The piece.
        base: The block that it applies to.

    Raises:
        MalformedError: A rule of SPEC 9 is broken.
        UnsupportedError: A reserved bit is set.
        CorruptError: A zstd frame does not decompress.
    """
    width, parts = _read(payload, base)
    if native.kernels is not None:
        return Changes(width, *native.decode(native.kernels, base, width, *parts))
    return Changes(width, *join_changes(base, width, *parts))


def apply_sparse(payload: Buffer, block: Bytes) -> None:
    """Do what `parse_sparse` does, and apply the changes to `block`: in one pass where the kernels serve."""
    if native.kernels is None:
        return parse_sparse(payload, block).apply(block)
    width, parts = _read(payload, block)
    native.decode(native.kernels, block, width, *parts, apply=True)


def _read(payload: Buffer, base: Bytes) -> tuple[int, _Parts]:
    """Read a payload's width and parts as far as it can be without the values of `base`."""
    cursor = Cursor(payload)
    header = cursor.byte()
    width = read_width(header, 6, base.size)
    thresholds = [int.from_bytes(cursor.take(width), "little") for _ in range(header >> 2)]
    if not _thresholds_valid(thresholds, width):
        raise malformed("thresholds do not fall strictly within the magnitudes")  # DF-ENC-10
    counts = [cursor.varint() for _ in range(len(thresholds) + 1)]
    total = sum(counts)
    if not 1 <= total <= base.size // width:
        raise malformed(f"{total} changes in a block of {base.size // width} elements")  # DF-ENC-11
    ks = [cursor.byte() if count else 0 for count in counts]
    if max(ks) > MAX_K:
        raise malformed(f"k is {max(ks)}; at most {MAX_K} is allowed")  # DF-ENC-12

    quotients = cursor.stream(total)
    escapes = cursor.stream(4 * quotients.tobytes().count(_ESCAPE))
    lows = cursor.stream(sum((count * k + 7) // 8 for count, k in zip(counts, ks, strict=True)))
    signs = cursor.stream((total + 7) // 8)
    streams = [quotients, escapes, lows, signs, *[cursor.stream(total) for _ in range(width)]]
    cursor.finish()
    return width, (thresholds, counts, ks, streams)


def split_changes(
    new: Bytes, base: Bytes, width: int, positions: Positions, thresholds: Sequence[int]
) -> tuple[list[int], bytes, list[bytes]]:
    """Make the parts of a payload in arrays: this is the reference of the kernels.

    Returns:
        Changes in each stratum; the k of each that has some; and the streams in their order: quotients,
        escapes, low bits, signs, and planes of magnitudes.
    """
    elements = base.view(f"<u{width}")
    places = positions.astype(np.int64, copy=False)
    if thresholds:
        counts, places, gaps = Strata(elements, thresholds).rank(places)
    else:
        counts, gaps = [places.size], places.copy()
    # Ranks turn into gaps; each stratum's first rank is its first gap.
    starts = list(accumulate(counts, initial=0))
    firsts = [start for start, count in zip(starts, counts, strict=False) if count]
    first_ranks = gaps[firsts]
    gaps[1:] -= gaps[:-1] + 1
    gaps[firsts] = first_ranks
    groups = [gaps[start : start + count] for start, count in zip(starts, counts, strict=False) if count]
    ks = _choose_ks(groups)
    lows = [_pack_low_bits(group, k) for group, k in zip(groups, ks, strict=True)]
    for group, k in zip(groups, ks, strict=True):
        group >>= k
    escaped = gaps[gaps >= _ESCAPE]

    # All are inside; "clip" spares a buffer and another look at each.
    difference = new.view(elements.dtype).take(places, mode="clip") - elements.take(places, mode="clip")
    sign = difference >> elements.dtype.type(8 * width - 1)
    magnitude = (difference ^ -sign) - (sign ^ elements.dtype.type(1))  # ~d is |d| - 1 where d is negative
    return (
        counts,
        bytes(ks),
        [
            (np.minimum(gaps, _ESCAPE) if escaped.size else gaps).astype(np.uint8).tobytes(),
            escaped.astype("<u4").tobytes(),
            b"".join(lows),
            np.packbits(sign, bitorder="little").tobytes(),
            *split_planes(magnitude),
        ],
    )


def join_changes(
    base: Bytes,
    width: int,
    thresholds: Sequence[int],
    counts: Sequence[int],
    ks: Sequence[int],
    streams: Sequence[Bytes],
) -> tuple[Positions, Elements]:
    """Undo `split_changes` in arrays, with all checks: this is the reference of the kernels.

    Args:
        base: The base block.
        width: Element width in bytes.
        thresholds: Valid thresholds.
        counts: Changes in each stratum, at most as many as elements in all.
        ks: One for each stratum, also for those without changes.
        streams: Quotients, escapes, low bits, signs and planes, of the lengths that follow from the counts.

    Returns:
        Positions, and the differences there, stratum by stratum.

    Raises:
        MalformedError: A rule of SPEC 9.3 is broken.
    """
    quotients, escapes, lows, signs, *planes = streams
    elements = base.view(f"<u{width}")
    gaps = quotients.astype(np.int64)
    if escapes.size:
        gaps[quotients == _ESCAPE] = escapes.view("<u4")
        if int(escapes.view("<u4").min()) < _ESCAPE:
            raise malformed("an escape holds a quotient that fits a byte")  # DF-ENC-13
    strata = Strata(elements, thresholds) if thresholds else None
    populations = strata.populations if strata else [elements.size]
    groups = np.split(gaps, list(accumulate(counts[:-1])))
    first_low = 0
    for group, k, population in zip(groups, ks, populations, strict=True):
        if group.size:
            if k:
                low_size = (group.size * k + 7) // 8
                group <<= k
                group |= _unpack_low_bits(lows[first_low : first_low + low_size], group.size, k)
                first_low += low_size
            _sum_gaps(group, population)
    positions = strata.select(groups) if strata else gaps
    return positions, _differences(planes, signs, gaps.size)


def _thresholds_valid(thresholds: Sequence[int], width: int) -> bool:
    """Tell whether thresholds fall strictly from at most M to at least 1 (DF-ENC-10)."""
    bounds = [magnitude_mask(width) + 1, *thresholds, 0]
    return all(upper > lower for upper, lower in pairwise(bounds))


def _choose_ks(gaps: Sequence[Ranks]) -> list[int]:
    """Choose the number of low bits for the gaps of each stratum.

    Rice's quotients are unary, and his k is the logarithm of the mean. These are entropy coded, so that they
    may carry more bits, and together: they cost least where all strata's are alike, thus like those of the
    densest one, which has no low bits to give away.
    """
    sums = [int(group.sum()) for group in gaps]
    total = sum(group.size for group in gaps)
    means = [_log_of(2 * gap + group.size, 2 * group.size) for gap, group in zip(sums, gaps, strict=True)]
    densest = min(mean for mean, group in zip(means, gaps, strict=True) if 16 * group.size >= total)
    target = min(max(densest, _LEAST_TARGET), _MOST_TARGET)
    return [_choose_k(group, mean, target) for group, mean in zip(gaps, means, strict=True)]


def _choose_k(gaps: Ranks, mean: int, target: int) -> int:
    """Choose k such that gaps of this mean get quotients of the target (both logarithms).

    Where changes come in bursts the mean says little: the median is tried, too.
    """
    sample = np.sort(gaps[:: max(1, gaps.size // 16)])
    median = _log_of(3 * int(sample[sample.size // 2]) + 1, 2)
    ks = [max(0, (typical - target + SCALE // 2) // SCALE) for typical in (mean, median)]
    return ks[0] if abs(ks[0] - ks[1]) < 2 else min(ks, key=lambda k: _estimate(gaps, k))


def _log_of(numerator: int, denominator: int) -> int:
    return scaled_log2(numerator) - scaled_log2(denominator)


def _estimate(gaps: Ranks, k: int) -> int:
    """Estimate what gaps cost: k bits each, the entropy of the quotients, and the escapes."""
    counts = np.bincount(np.minimum(gaps >> k, _ESCAPE), minlength=_ESCAPE + 1)
    some = counts[counts > 0]
    entropy = gaps.size * scaled_log2(gaps.size) - int(some @ scaled_log2s(some))
    return SCALE * (gaps.size * k + 32 * int(counts[_ESCAPE])) + entropy


def _pack_low_bits(gaps: Ranks, k: int) -> bytes:
    """Pack the k low bits of every gap, the least significant bit first."""
    if k == 0:
        return b""
    size = (gaps.size * k + 7) // 8
    if k > 8:
        low = gaps.astype("<u4").view(np.uint8).reshape(-1, 4)
        bits = np.unpackbits(low, axis=1, count=k, bitorder="little")
        return np.packbits(bits, bitorder="little").tobytes()
    # Eight gaps make k whole bytes, and these fit a word.
    octets = np.zeros((-(-gaps.size // 8), 8), np.int64)
    np.bitwise_and(gaps, (1 << k) - 1, out=octets.reshape(-1)[: gaps.size])
    words = octets.view(np.uint64) @ (np.uint64(1) << np.arange(0, 8 * k, k, dtype=np.uint64))
    return words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :k].tobytes()[:size]


def _unpack_low_bits(packed: Bytes, count: int, k: int) -> Ranks:
    """Undo `_pack_low_bits`, refusing padding that is not zero (DF-ENC-14)."""
    padding = -count * k % 8
    if padding and int(packed[-1]) >> (8 - padding):
        raise malformed("padding after low bits is not zero")
    octets = -(-count // 8)
    data = np.zeros(octets * k + 8, np.uint8)
    data[: packed.size] = packed
    gaps = np.empty((octets, 8), np.int64)
    # Every k bytes hold eight values. A word that starts at one of them holds all eight, or two at least.
    at_once = 8 if k <= 8 else 2
    for first in range(0, 8, at_once):
        start, shift = divmod(first * k, 8)
        words = np.ndarray((octets, 1), "<u8", data, offset=start, strides=(k, 8))
        shifts = np.arange(shift, shift + at_once * k, k, dtype=np.uint64)
        gaps[:, first : first + at_once] = (words >> shifts) & np.uint64((1 << k) - 1)
    return gaps.reshape(-1)[:count]


def _sum_gaps(gaps: Ranks, population: int) -> None:
    """Turn gaps into ranks, in place, refusing one that its stratum does not have (DF-ENC-15)."""
    # Each gap is checked first: then no sum can overflow.
    if int(gaps.max()) < population:
        gaps[1:] += 1
        np.cumsum(gaps, out=gaps)
        if int(gaps[-1]) < population:
            return
    raise malformed(f"a rank is not below its stratum's population of {population}")


def _differences(planes: list[Bytes], signs: Bytes, total: int) -> Elements:
    """Assemble differences from their magnitudes and signs (DF-ENC-14, DF-ENC-16)."""
    if total % 8 and int(signs[-1]) >> (total % 8):
        raise malformed("padding after signs is not zero")
    width = len(planes)
    magnitude: Elements = np.empty(total, f"<u{width}")  # |d| - 1
    join_planes(planes, magnitude)
    negative = np.unpackbits(signs, count=total, bitorder="little").astype(magnitude.dtype)
    positive = negative ^ magnitude.dtype.type(1)
    most, largest = magnitude_mask(width), int(magnitude.max())
    if largest > most or (largest == most and int((magnitude + positive).max()) > most):
        raise malformed("a difference is outside the signed range")  # DF-ENC-16
    differences: Elements = (magnitude ^ -negative) + positive  # ~(|d| - 1) is -|d|
    return differences
