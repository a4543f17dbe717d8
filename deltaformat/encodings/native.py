"""The kernels in C, where they were built and the CPU has them; without them NumPy does the same, slower.

`deltaformat/_native.c` has the loops of this package. What it gives is bit for bit what the array code gives,
which is the reference: whatever differs is a fault of the kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from deltaformat.blocks import Buffer, Bytes
from deltaformat.encodings.strata import Elements, Positions
from deltaformat.encodings.streams import malformed

__all__ = ["Kernels", "decode", "diff", "encode", "engine", "kernels", "load", "why_not"]

_ROOM = 32
"""Room for one change in so many elements at first; where more are counted, they get as much as they need."""

_BROKEN = (
    "",
    "an escape holds a quotient that fits a byte",  # DF-ENC-13
    "padding after low bits is not zero",  # DF-ENC-14
    "a rank is not below its stratum's population",  # DF-ENC-15
    "padding after signs is not zero",  # DF-ENC-14
    "a difference is outside the signed range",  # DF-ENC-16
)


class Kernels(Protocol):
    """What the module in C has; its docstrings say more. Arrays are passed as buffers."""

    def diff(self, new: Bytes, base: Bytes, width: int, places: Positions, /) -> int:
        """Put the positions that differ into `places` while it has room; give their number."""

    def choose(self, base: Bytes, width: int, places: Positions, most: int, least: int, /) -> bytes:
        """Choose thresholds, rising; as u64."""

    def encode(
        self, new: Bytes, base: Bytes, width: int, places: Positions, thresholds: bytes, /
    ) -> tuple[bytes, bytes, list[bytes]]:
        """Make counts (u64), ks and streams."""

    def decode(
        self,
        base: Bytes,
        width: int,
        thresholds: bytes,
        counts: bytes,
        ks: bytes,
        content: Buffer,
        places: Positions,
        differences: Elements,
        /,
    ) -> int:
        """Undo `encode`; give the rule that is broken, or 0."""

    def apply(
        self, block: Bytes, width: int, places: Positions, differences: Elements, undo: bool, /
    ) -> None:
        """Add the differences, or subtract them."""

    def copy(self, block: Bytes, new: Bytes, width: int, places: Positions, /) -> None:
        """Copy elements at places from one block to another."""

    def levels(self) -> list[str]:
        """The instruction sets that can be used here, the fastest first."""

    def level(self, name: str = ..., /) -> str:
        """The instruction set in use, after it was set to `name`, if that is given."""


def load() -> tuple[Kernels | None, str]:
    """Load the kernels; without them, say why."""
    try:
        return cast(Kernels, importlib.import_module("deltaformat._native")), ""
    except ImportError as error:
        return None, str(error)


kernels, why_not = load()


def engine() -> str:
    """Name what serves: `numpy`, or `native` and the instruction set."""
    return "numpy" if kernels is None else f"native, {kernels.level()}"


def diff(kernels: Kernels, new: Bytes, base: Bytes, width: int) -> Positions:
    """Do what `changed_positions` does."""
    places = np.empty(new.size // (width * _ROOM) + 64, np.uint32)
    count = kernels.diff(new, base, width, places)
    if count > places.size:
        places = np.empty(count, np.uint32)
        kernels.diff(new, base, width, places)
    return places[:count]


def encode(
    kernels: Kernels, new: Bytes, base: Bytes, width: int, positions: Positions, thresholds: Sequence[int]
) -> tuple[list[int], bytes, list[bytes]]:
    """Do what `split_changes` does."""
    places = np.ascontiguousarray(positions, np.uint32)
    given = np.array(thresholds, f"<u{width}").tobytes()
    counts, ks, streams = kernels.encode(new, base, width, places, given)
    return np.frombuffer(counts, "<u8").tolist(), ks, streams


def decode(
    kernels: Kernels,
    base: Bytes,
    width: int,
    thresholds: Sequence[int],
    counts: Sequence[int],
    ks: Sequence[int],
    streams: Sequence[Bytes],
) -> tuple[Positions, Elements]:
    """Do what `join_changes` does."""
    total = streams[0].size
    places: Positions = np.empty(total, np.uint32)
    differences: Elements = np.empty(total, f"<u{width}")
    given = np.array(thresholds, differences.dtype).tobytes()
    sizes, content = np.array(counts, "<u8").tobytes(), b"".join([stream.data for stream in streams])
    rule = kernels.decode(base, width, given, sizes, bytes(ks), content, places, differences)
    if rule:
        raise malformed(_BROKEN[rule])
    return places, differences
