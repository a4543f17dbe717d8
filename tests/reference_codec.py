"""SPEC 9 once more, in loops over Python integers: what the array code is compared with.

It shares nothing with `deltaformat.encodings` but zstandard's decompressor, and it is written from SPEC.md's
sentences. Blocks are `bytes`. `RejectedError` carries the error class of SPEC 17.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import zstandard

Form = str  # of a stream: "stored", "constant" (where it is), "zstd", "smallest"


class RejectedError(Exception):
    """The payload breaks a rule."""

    def __init__(self, error_class: str) -> None:
        super().__init__(error_class)
        self.error_class = error_class


def malformed_unless(rule: bool) -> None:
    if not rule:
        raise RejectedError("MALFORMED")


def elements_of(block: bytes, width: int) -> list[int]:
    return [int.from_bytes(block[i : i + width], "little") for i in range(0, len(block), width)]


def block_of(elements: Sequence[int], width: int) -> bytes:
    return b"".join(element.to_bytes(width, "little") for element in elements)


# Writing


def varint(value: int) -> bytes:
    out = []
    while True:
        value, low = value >> 7, value & 127
        if not value:
            return bytes([*out, low])
        out.append(low | 128)


def stream(content: bytes, form: Form = "smallest") -> bytes:
    if not content:
        return b""
    frame = zstandard.ZstdCompressor(level=3).compress(content)
    forms = {"stored": b"\x00" + content, "zstd": varint(len(frame)) + frame}
    if content == content[:1] * len(content):
        forms["constant"] = b"\x01" + content[:1]
    if form == "smallest":
        return min(forms.values(), key=len)
    return forms.get(form, forms["stored"])


def encode_planes(block: bytes, width: int, form: Form = "smallest") -> bytes:
    out = bytes([[1, 2, 4, 8].index(width)])
    for plane in range(width):
        out += stream(block[plane::width], form)
    return out


def encode_planes_delta(new: bytes, base: bytes, width: int, form: Form = "smallest") -> bytes:
    size = 2 ** (8 * width)
    pairs = zip(elements_of(new, width), elements_of(base, width), strict=True)
    return encode_planes(block_of([(y - x) % size for y, x in pairs], width), width, form)


def bits_to_bytes(bits: Sequence[int]) -> bytes:
    out = bytearray((len(bits) + 7) // 8)
    for j, bit in enumerate(bits):
        out[j // 8] |= bit << (j % 8)
    return bytes(out)


def encode_sparse(
    new: bytes,
    base: bytes,
    width: int,
    thresholds: Sequence[int] = (),
    choose_k: Callable[[list[int]], int] = lambda gaps: 0,
    form: Form = "smallest",
) -> bytes:
    xs, ys = elements_of(base, width), elements_of(new, width)
    most = 2 ** (8 * width - 1) - 1
    strata: list[list[int]] = [[] for _ in range(len(thresholds) + 1)]
    for position, x in enumerate(xs):
        strata[sum((x & most) < threshold for threshold in thresholds)].append(position)

    counts, ks, quotients, escapes, lows, signs, magnitudes = [], [], [], b"", b"", [], []
    for positions in strata:
        ranks = [rank for rank, position in enumerate(positions) if xs[position] != ys[position]]
        counts.append(len(ranks))
        if not ranks:
            continue
        gaps = [rank - previous - 1 for previous, rank in zip([-1, *ranks], ranks, strict=False)]
        k = choose_k(gaps)
        ks.append(k)
        for gap in gaps:
            quotients.append(min(gap >> k, 255))
            if gap >> k >= 255:
                escapes += struct.pack("<I", gap >> k)
        lows += bits_to_bytes([gap >> bit & 1 for gap in gaps for bit in range(k)])
        for rank in ranks:
            d = (ys[positions[rank]] - xs[positions[rank]]) % 2 ** (8 * width)
            if d > most:
                d -= 2 ** (8 * width)
            signs.append(int(d < 0))
            magnitudes.append(abs(d) - 1)

    out = bytes([[1, 2, 4, 8].index(width) + 4 * len(thresholds)])
    out += block_of(thresholds, width) + b"".join(map(varint, counts)) + bytes(ks)
    out += stream(bytes(quotients), form) + stream(escapes, form) + stream(lows, form)
    out += stream(bits_to_bytes(signs), form)
    planes = block_of(magnitudes, width)
    for plane in range(width):
        out += stream(planes[plane::width], form)
    return out


# Reading


class Payload:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        malformed_unless(size <= len(self.data))
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def varint(self) -> int:
        digits = [self.take(1)[0]]
        while digits[-1] & 128:
            malformed_unless(len(digits) < 5)
            digits.append(self.take(1)[0])
        malformed_unless(len(digits) == 1 or digits[-1] != 0)
        value = sum((digit & 127) << 7 * i for i, digit in enumerate(digits))
        malformed_unless(value < 2**32)
        return value

    def stream(self, expected: int) -> bytes:
        if expected == 0:
            return b""
        header = self.varint()
        if header == 0:
            return self.take(expected)
        if header == 1:
            return self.take(1) * expected
        return unzstd(self.take(header), expected)

    def width(self, header: int, size: int) -> int:
        width = [1, 2, 4, 8][header % 4]
        malformed_unless(size % width == 0)
        return width

    def finish(self) -> None:
        malformed_unless(self.data == b"")


def unzstd(frame: bytes, expected: int) -> bytes:
    """RFC 8878, 3.1.1: the header is read here, the blocks by the library."""
    malformed_unless(len(frame) >= 5 and frame[:4] == bytes.fromhex("28b52ffd"))
    descriptor, rest = frame[4], Payload(frame[5:])
    malformed_unless(not descriptor & 0x08)  # reserved
    single_segment = descriptor >> 5 & 1
    window = None
    if not single_segment:
        byte = rest.take(1)[0]
        window = (1 << 10 + (byte >> 3)) // 8 * (8 + (byte & 7))
    dictionary = int.from_bytes(rest.take([0, 1, 2, 4][descriptor & 3]), "little")
    content_bytes = [1 if single_segment else 0, 2, 4, 8][descriptor >> 6]
    malformed_unless(content_bytes > 0)
    content_size = int.from_bytes(rest.take(content_bytes), "little") + (256 if content_bytes == 2 else 0)
    malformed_unless(content_size == expected and dictionary == 0)
    malformed_unless((window or content_size) <= 128 * 2**20)
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        content = decompressor.decompress(frame)
    except zstandard.ZstdError:
        raise RejectedError("CORRUPT") from None
    if not decompressor.eof:
        raise RejectedError("CORRUPT")
    malformed_unless(decompressor.unused_data == b"")
    return content


def decode_planes(payload: bytes, size: int) -> bytes:
    reader = Payload(payload)
    header = reader.take(1)[0]
    if header > 3:
        raise RejectedError("UNSUPPORTED")
    width = reader.width(header, size)
    planes = [reader.stream(size // width) for _ in range(width)]
    reader.finish()
    return bytes(planes[i % width][i // width] for i in range(size))


def decode_planes_delta(payload: bytes, base: bytes) -> bytes:
    difference = decode_planes(payload, len(base))
    width = [1, 2, 4, 8][payload[0]]
    pairs = zip(elements_of(base, width), elements_of(difference, width), strict=True)
    return block_of([(x + d) % 2 ** (8 * width) for x, d in pairs], width)


def decode_sparse(payload: bytes, base: bytes) -> bytes:
    reader = Payload(payload)
    header = reader.take(1)[0]
    if header > 63:
        raise RejectedError("UNSUPPORTED")
    width = reader.width(header, len(base))
    xs = elements_of(base, width)
    most = 2 ** (8 * width - 1) - 1
    thresholds = [int.from_bytes(reader.take(width), "little") for _ in range(header >> 2)]
    for i, threshold in enumerate(thresholds):
        malformed_unless(1 <= threshold <= (thresholds[i - 1] - 1 if i else most))
    strata: list[list[int]] = [[] for _ in range(len(thresholds) + 1)]
    for position, x in enumerate(xs):
        strata[sum((x & most) < threshold for threshold in thresholds)].append(position)

    counts = [reader.varint() for _ in strata]
    total = sum(counts)
    malformed_unless(1 <= total <= len(xs))
    ks = [reader.take(1)[0] if count else 0 for count in counts]
    malformed_unless(max(ks) <= 26)
    quotients = list(reader.stream(total))
    escapes = Payload(reader.stream(4 * quotients.count(255)))
    lows = Payload(reader.stream(sum(-(-count * k // 8) for count, k in zip(counts, ks, strict=True))))
    sign_bytes = reader.stream(-(-total // 8))
    planes = [reader.stream(total) for _ in range(width)]
    reader.finish()

    signs = [sign_bytes[j // 8] >> j % 8 & 1 for j in range(8 * len(sign_bytes))]
    malformed_unless(not any(signs[total:]))
    changes = []
    for positions, count, k in zip(strata, counts, ks, strict=True):
        low_bytes = lows.take(-(-count * k // 8))
        bits = [low_bytes[j // 8] >> j % 8 & 1 for j in range(8 * len(low_bytes))]
        malformed_unless(not any(bits[count * k :]))
        rank = -1
        for j in range(count):
            quotient = quotients.pop(0)
            if quotient == 255:
                (quotient,) = struct.unpack("<I", escapes.take(4))
                malformed_unless(quotient >= 255)
            rank += 1 + (quotient << k) + sum(bits[j * k + bit] << bit for bit in range(k))
            malformed_unless(rank < len(positions))
            changes.append(positions[rank])
    ys = list(xs)
    for j, position in enumerate(changes):
        magnitude = sum(planes[plane][j] << 8 * plane for plane in range(width))
        malformed_unless(magnitude <= (most if signs[j] else most - 1))
        ys[position] += -(magnitude + 1) if signs[j] else magnitude + 1
    return block_of([y % 2 ** (8 * width) for y in ys], width)


def decode(encoding: int, payload: bytes, base: bytes) -> bytes:
    """Decode a piece; `base` gives the length where the encoding needs no base."""
    if encoding == 0:
        malformed_unless(len(payload) == len(base))
        return payload
    if encoding == 1:
        return decode_planes(payload, len(base))
    if encoding == 2:
        return decode_planes_delta(payload, base)
    return decode_sparse(payload, base)
