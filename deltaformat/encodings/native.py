"""The kernels in C, where they were built and the CPU has them; without them NumPy does the same, slower.

`deltaformat/_native.c` has the loops of this package. What it gives is bit for bit what the array code gives,
which is the reference: whatever differs is a fault of the kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from deltaformat.blocks import Buffer, Bytes
from deltaformat.encodings.strata import Elements, Positions
from deltaformat.encodings.streams import malformed

__all__ = ["Found", "Kernels", "decode", "diff", "encode", "engine", "kernels", "load", "why_not"]

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

    def encode(
        self, new: Bytes, base: Bytes, width: int, places: Positions | None, thresholds: bytes | None, /
    ) -> tuple[bytes, bytes, bytes, bytes, list[bytes]]:
        """Find places where they are None; choose thresholds where these are; make counts, ks and streams."""

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
        apply: bool,
        /,
    ) -> int:
        """Undo `encode`; apply the differences, if asked to; give the rule that is broken, or 0."""

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


@dataclass(frozen=True, slots=True)
class Found:
    """The parts of a payload, and what it was made for.

    Attributes:
        positions: The positions that differ, rising.
        thresholds: Those used, falling, as a payload has them.
        parts: What `split_changes` returns; no streams where nothing differs.
    """

    positions: Positions
    thresholds: bytes
    parts: tuple[list[int], bytes, list[bytes]]


def encode(
    kernels: Kernels,
    new: Bytes,
    base: Bytes,
    width: int,
    positions: Positions | None,
    thresholds: Sequence[int] | None,
) -> Found:
    """Do what `changed_positions`, `choose_thresholds` (of floats) and `split_changes` do, in one call.

    Each call may wait for the GIL for as long as its work takes, where other threads want it.

    Args:
        kernels: Those to use.
        new: The block.
        base: What readers will have.
        width: Element width in bytes.
        positions: What `changed_positions` returned, not empty; None to find them.
        thresholds: Valid thresholds; None to choose them.
    """
    places = None if positions is None else np.ascontiguousarray(positions, np.uint32)
    given = None if thresholds is None else np.array(thresholds, f"<u{width}").tobytes()
    found, used, counts, ks, streams = kernels.encode(new, base, width, places, given)
    at = np.frombuffer(found, np.uint32) if positions is None else positions
    return Found(at, used, (np.frombuffer(counts, "<u8").tolist(), ks, streams))


def decode(
    kernels: Kernels,
    base: Bytes,
    width: int,
    thresholds: Sequence[int],
    counts: Sequence[int],
    ks: Sequence[int],
    streams: Sequence[Bytes],
    *,
    apply: bool = False,
) -> tuple[Positions, Elements]:
    """Do what `join_changes` does, and `Changes.apply` to the base, if `apply`."""
    total = streams[0].size
    places: Positions = np.empty(total, np.uint32)
    differences: Elements = np.empty(total, f"<u{width}")
    given = np.array(thresholds, differences.dtype).tobytes()
    sizes, content = np.array(counts, "<u8").tobytes(), b"".join([stream.data for stream in streams])
    rule = kernels.decode(base, width, given, sizes, bytes(ks), content, places, differences, apply)
    if rule:
        raise malformed(_BROKEN[rule])
    return places, differences
