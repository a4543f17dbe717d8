"""One step in memory: bytes, and seconds to encode and to apply, of every coder in turn on the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from deltaformat.bench.bounds import Bounds, measure_bounds
from deltaformat.bench.codecs import (
    Absent,
    Bits,
    Blocks,
    Codec,
    Mode,
    bits,
    changes,
    dtype_names,
    same_bits,
    size_of,
)
from deltaformat.bench.inputs import Input

__all__ = ["CodecRow", "Coding", "LossyError", "measure_coding", "timed"]

T = TypeVar("T")


class LossyError(Exception):
    """A coder, or a read, gave other bits than were put in: its figures would be worth nothing."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """What a coder took; medians over rounds.

    Attributes:
        name: The coder.
        ours: Whether it is ours.
        threads: Its threads.
        note: Whose layout it is.
        nbytes: Bytes of a step.
        per_change: The same over changed weights.
        encode_s: Seconds to encode.
        apply_s: Seconds to decode and apply, in place.
        absent: Why it was not measured; then the rest is None.
    """

    name: str
    ours: bool
    threads: int
    note: str
    nbytes: float | None = None
    per_change: float | None = None
    encode_s: float | None = None
    apply_s: float | None = None
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class Coding:
    """One input, coded by all.

    Attributes:
        key, title: The input's.
        tensors, nbytes, weights: Of a state.
        changed: Weights whose bits change in a step, median.
        rounds: Steps measured.
        rows: What each coder took.
        bounds: Bytes a changed weight, by model; empty where they say nothing.
    """

    key: str
    title: str
    tensors: int
    nbytes: int
    weights: int
    changed: float
    rounds: int
    rows: list[CodecRow]
    bounds: dict[str, float]

    @property
    def density(self) -> float:
        """The share of weights that change."""
        return self.changed / self.weights if self.weights else 0.0


@dataclass(slots=True)
class _Seat:
    """A coder and what was measured of it so far."""

    codec: Codec
    ours: bool
    threads: int
    nbytes: list[int] = field(default_factory=list)
    per_change: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Seconds that a call took, and what it gave."""
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def measure_coding(
    given: Input,
    *,
    modes: Sequence[Mode],
    peers: Sequence[tuple[int, Codec | Absent]],
    rounds: int,
    report: Callable[[str], None],
) -> Coding:
    """Encode and apply `rounds` steps by every coder, in turn.

    Args:
        given: The input.
        modes: Configurations of ours.
        peers: Threads, and a coder that works with them.
        rounds: Steps to measure, at most those that the input has; one more is run before, to warm up.
        report: Told what is being done.

    Raises:
        LossyError: A coder is not lossless.
    """
    rounds = min(rounds, given.steps)
    old_state = given.make(0)
    old, dtypes = bits(old_state), dtype_names(old_state)
    new = old
    seats = [_Seat(Blocks(mode, old_state), True, mode.threads) for mode in modes]
    seats += [_Seat(codec, False, threads) for threads, codec in peers if not isinstance(codec, Absent)]
    target: Bits = {name: np.empty_like(array) for name, array in old.items()}
    changed: list[int] = []
    found: list[Bounds] = []
    shape = (len(old), sum(a.nbytes for a in old.values()), sum(a.size for a in old.values()))
    del old_state
    try:
        for number in range(rounds):
            old = new  # the one before is let go of, before there is another
            new = bits(given.make(number + 1))
            changed.append(changes(old, new))
            if given.bounded and not number:
                found.append(measure_bounds(old, new, dtypes))
            # The first step is coded twice: what libraries set up, and pages of buffers, are not the coder's.
            for counted in (True,) if number else (False, True):
                report(f"{given.title}: in memory, step {number + 1} of {rounds}")
                for seat in seats:
                    _measure(seat, old, new, target, changed[-1], counted=counted)
    finally:
        for seat in seats:
            seat.codec.close()
    rows = [_row(seat) for seat in seats]
    rows += [CodecRow(c.name, False, n, "", absent=c.reason) for n, c in peers if isinstance(c, Absent)]
    return Coding(
        key=given.key,
        title=given.title,
        tensors=shape[0],
        nbytes=shape[1],
        weights=shape[2],
        changed=statistics.median(changed),
        rounds=rounds,
        rows=rows,
        bounds=found[0].per_change() if found else {},
    )


def _measure(seat: _Seat, old: Bits, new: Bits, target: Bits, changed: int, *, counted: bool) -> None:
    codec = seat.codec
    codec.prepare(old)
    encode_s, payload = timed(lambda: codec.encode(old, new))
    for name, array in old.items():
        np.copyto(target[name], array)
    apply_s, _ = timed(lambda: codec.apply(payload, target))
    if not same_bits(target, new):
        raise LossyError(f"{codec.name} is not lossless")
    if counted:
        seat.nbytes.append(size_of(payload))
        seat.per_change.append(seat.nbytes[-1] / max(1, changed))
        seat.encode.append(encode_s)
        seat.apply.append(apply_s)


def _row(seat: _Seat) -> CodecRow:
    return CodecRow(
        name=seat.codec.name,
        ours=seat.ours,
        threads=seat.threads,
        note=seat.codec.note,
        nbytes=statistics.median(seat.nbytes),
        per_change=statistics.median(seat.per_change),
        encode_s=statistics.median(seat.encode),
        apply_s=statistics.median(seat.apply),
    )
