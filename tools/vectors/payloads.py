"""Payloads of SPEC 9, from elements, with every field open to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vectors.primitives import frame, varint

__all__ = [
    "PLANES",
    "PLANES_DELTA",
    "RAW",
    "SPARSE",
    "Sparse",
    "elements",
    "pack",
    "planes",
    "sparse",
    "stream",
]

RAW, PLANES, PLANES_DELTA, SPARSE = range(4)
_LOG2 = {1: 0, 2: 1, 4: 2, 8: 3}

Form = str | Callable[[bytes], bytes]
"""How a stream is written: `stored`, `constant`, `frame`, or a function that makes all of it."""


def elements(data: bytes, width: int) -> list[int]:
    """Little-endian integers."""
    return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def pack(values: Sequence[int], width: int) -> bytes:
    """Little-endian integers as bytes, modulo their width."""
    return b"".join((value % 256**width).to_bytes(width, "little") for value in values)


def stream(content: bytes, form: Form = "stored") -> bytes:
    """A stream (SPEC 9.1); nothing where it is absent."""
    if callable(form):
        return form(content)
    if not content:
        return b""
    if form == "constant":
        assert content == content[:1] * len(content)
        return b"\x01" + content[:1]
    if form == "frame":
        data = frame(content)
        return varint(len(data)) + data
    return b"\x00" + content


def planes(new: bytes, width: int, *, base: bytes | None = None, forms: Sequence[Form] = ()) -> bytes:
    """A `planes` payload, or `planes-delta` with a base (SPEC 9.2)."""
    if base is not None:
        pairs = zip(elements(new, width), elements(base, width), strict=True)
        new = pack([y - x for y, x in pairs], width)
    out = bytes([_LOG2[width]])
    for plane in range(width):
        out += stream(new[plane::width], forms[plane] if plane < len(forms) else "stored")
    return out


@dataclass(slots=True)
class Sparse:
    """The fields of a `sparse` payload (SPEC 9.3), in their order; `bytes()` puts them together."""

    header: int
    width: int
    thresholds: list[int]
    counts: list[int]
    ks: list[int]
    quotients: bytes
    escapes: bytes
    lows: bytes
    signs: bytes
    magnitudes: list[bytes]
    forms: dict[str, Form] = field(default_factory=dict)
    tail: bytes = b""
    count_bytes: bytes | None = None

    def __bytes__(self) -> bytes:
        """The payload."""
        out = bytes([self.header]) + pack(self.thresholds, self.width)
        out += b"".join(map(varint, self.counts)) if self.count_bytes is None else self.count_bytes
        out += bytes(self.ks)
        for name in ("quotients", "escapes", "lows", "signs"):
            out += stream(getattr(self, name), self.forms.get(name, "stored"))
        for number, plane in enumerate(self.magnitudes):
            out += stream(plane, self.forms.get(f"plane{number}", "stored"))
        return out + self.tail


def _bits(bits: Sequence[int]) -> bytes:
    out = bytearray((len(bits) + 7) // 8)
    for number, bit in enumerate(bits):
        out[number // 8] |= bit << number % 8
    return bytes(out)


def sparse(
    base: bytes, new: bytes, width: int, thresholds: Sequence[int] = (), ks: int | Mapping[int, int] = 0
) -> Sparse:
    """The fields that turn `base` into `new`; `ks` is one k, or one per stratum."""
    xs, ys = elements(base, width), elements(new, width)
    most = 2 ** (8 * width - 1) - 1
    strata: list[list[int]] = [[] for _ in range(len(thresholds) + 1)]
    for position, x in enumerate(xs):
        strata[sum((x & most) < threshold for threshold in thresholds)].append(position)
    out = Sparse(_LOG2[width] | len(thresholds) << 2, width, list(thresholds), [], [], b"", b"", b"", b"", [])
    signs: list[int] = []
    magnitudes: list[int] = []
    for number, positions in enumerate(strata):
        ranks = [rank for rank, p in enumerate(positions) if xs[p] != ys[p]]
        out.counts.append(len(ranks))
        if not ranks:
            continue
        k = ks if isinstance(ks, int) else ks.get(number, 0)
        out.ks.append(k)
        lows: list[int] = []
        before = -1
        for rank in ranks:
            gap, before = rank - before - 1, rank
            out.quotients += bytes([min(gap >> k, 255)])
            if gap >> k >= 255:
                out.escapes += (gap >> k).to_bytes(4, "little")
            lows += [gap >> bit & 1 for bit in range(k)]
            p = positions[rank]
            d = (ys[p] - xs[p]) % 256**width
            if d > most:
                d -= 256**width
            signs.append(int(d < 0))
            magnitudes.append(abs(d) - 1)
        out.lows += _bits(lows)
    out.signs = _bits(signs)
    content = pack(magnitudes, width)
    out.magnitudes = [content[plane::width] for plane in range(width)]
    return out
