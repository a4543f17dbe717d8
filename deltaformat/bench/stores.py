"""Whole commits and reads in a synced directory, each beside XOR + zstd-1 of the same bytes in memory.

A commit is all of it: compare, hash, encode, write and sync packs, manifest and record. A read is all of it:
open the store, fetch, decode, apply, check every digest.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import deltaformat as df
from deltaformat.bench.codecs import Codec, Mode, State, bits, changes, same_bits, serving
from deltaformat.bench.coding import LossyError, timed
from deltaformat.bench.inputs import Input
from deltaformat.objectstorage import ObstoreStorage
from deltaformat.storage import Storage

__all__ = ["StoreRow", "in_memory", "measure_stores", "scratch"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreRow:
    """What a store took in one configuration; medians over steps.

    Attributes:
        mode: The configuration.
        threads: Its threads; a writer has two more that hash and write packs.
        rounds: Steps measured.
        changed: Weights that change in a step.
        per_change: Bytes of all objects of a commit, a changed weight.
        payload_per_change: Of pieces alone.
        bytes: Bytes of a commit by kind of object.
        full_ratio: Bytes of the first commit over raw bytes.
        seconds: `first commit`, `commit` and its parts by CommitInfo, `follow` (a step from the one before at
            hand), `cold read` (the newest version from nothing; its chains have a piece per step), `open`,
            `one row` (of a tensor, from nothing, without the opening).
        peer_encode_s, peer_apply_s: XOR + zstd-1 of the same steps, on as many threads; None without peers.
    """

    mode: str
    threads: int
    rounds: int
    changed: float
    per_change: float
    payload_per_change: float
    bytes: dict[str, float]
    full_ratio: float
    seconds: dict[str, float]
    peer_encode_s: float | None
    peer_apply_s: float | None


@dataclass(slots=True)
class _Clock:
    """Seconds by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, function: Callable[[], T]) -> T:
        taken, result = timed(function)
        self.seconds.setdefault(name, []).append(taken)
        return result

    def median(self, name: str) -> float | None:
        return statistics.median(self.seconds[name]) if name in self.seconds else None


def in_memory() -> Storage:
    """A place in memory that is gone when nobody holds it; `memory://` stays as long as the process."""
    from obstore.store import MemoryStore

    return ObstoreStorage(MemoryStore(), "memory://bench")


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory that is removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="deltaformat-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class _Seat:
    """A configuration with its store, and what was measured of it so far.

    Args:
        mode: Ours.
        peer: XOR + zstd-1 on as many threads.
        place: Where its store goes.
        state: The first version.
    """

    def __init__(self, mode: Mode, peer: Codec | None, place: Path, state: State) -> None:
        self.mode = mode
        self.clock = _Clock()
        self.infos: list[df.CommitInfo] = []
        self._peer = peer
        self._place = place
        self._writer = df.create(place).writer(policy=df.Policy(strata=mode.strata, threads=mode.threads))
        with serving(mode):
            self.first = self.clock.time("first commit", lambda: self._writer.commit(step=0, tensors=state))

    def turn(self, step: int, old: State, new: State) -> None:
        """Let the peer encode and apply a step; then commit, follow, read and slice it."""
        if self._peer is not None:
            _peer_turn(self.clock, self._peer, old, new)
        with serving(self.mode):
            commit = partial(self._writer.commit, step=step, tensors=new)
            self.infos.append(self.clock.time("commit", commit))
            _read_turn(self.clock, self._place, self.mode, old, new, step)

    def close(self) -> None:
        """Let go of the branch."""
        self._writer.close()

    def row(self, changed: list[int]) -> StoreRow:
        """Sum up; `changed` are the weights that changed at each step."""
        medians = {name: statistics.median(values) for name, values in self.clock.seconds.items()}
        parts = {
            f"commit: {part}": statistics.median(info.timings[part] for info in self.infos)
            for part in ("encode", "stage", "manifest", "record")
        }
        kinds = ("payload_bytes", "pack_bytes", "manifest_bytes", "record_bytes", "rebase_bytes")
        each = [(info, max(1, count)) for info, count in zip(self.infos, changed, strict=True)]
        return StoreRow(
            mode=self.mode.name,
            threads=self.mode.threads,
            rounds=len(changed),
            changed=statistics.median(changed),
            per_change=statistics.median(info.bytes_written / count for info, count in each),
            payload_per_change=statistics.median(info.payload_bytes / count for info, count in each),
            bytes={kind: statistics.median(getattr(info, kind) for info in self.infos) for kind in kinds},
            full_ratio=self.first.bytes_written / self.first.nbytes,
            seconds={name: value for name, value in medians.items() if not name.startswith("peer")} | parts,
            peer_encode_s=self.clock.median("peer encode"),
            peer_apply_s=self.clock.median("peer apply"),
        )


def measure_stores(
    given: Input,
    modes: Sequence[tuple[Mode, Codec | None]],
    *,
    rounds: int,
    report: Callable[[str], None],
) -> list[StoreRow]:
    """Commit step 0, then `rounds` steps; follow, read and slice each. Modes take turns at every step.

    Args:
        given: The input.
        modes: Each with XOR + zstd-1 on as many threads, or None. Each takes memory for a state.
        rounds: Steps, at most those that the input has.
        report: Told what is being done.

    Raises:
        LossyError: Something came back with other bits.
    """
    changed: list[int] = []
    new = given.make(0)
    with scratch() as directory, ExitStack() as open_seats:
        seats = []
        for number, (mode, peer) in enumerate(modes):
            seats.append(_Seat(mode, peer, directory / str(number), new))
            open_seats.callback(seats[-1].close)
        for step in range(1, min(rounds, given.steps) + 1):
            names = ", ".join(seat.mode.label for seat in seats)
            report(f"{given.title}: store, {names}, step {step} of {rounds}")
            old = new  # the one before is let go of, before there is another
            new = given.make(step)
            changed.append(changes(bits(old), bits(new)))
            for seat in seats if step % 2 else reversed(seats):
                seat.turn(step, old, new)
        return [seat.row(changed) for seat in seats]


def _peer_turn(clock: _Clock, peer: Codec, old: State, new: State) -> None:
    before, after = bits(old), bits(new)
    frames = clock.time("peer encode", lambda: peer.encode(before, after))
    target = {name: array.copy() for name, array in before.items()}
    clock.time("peer apply", lambda: peer.apply(frames, target))
    if not same_bits(target, after):
        raise LossyError(f"{peer.name} is not lossless")


def _read_turn(clock: _Clock, place: Path, mode: Mode, old: State, new: State, step: int) -> None:
    with df.open(place, threads=mode.threads).version(step=step - 1) as previous:
        store = df.open(place, threads=mode.threads)  # a follower has the step before, and polls for the next

        def follow() -> State:
            with store.version(step=step) as version:
                return version.follow(previous, old)

        _check(clock.time("follow", follow), new)

    def cold() -> State:
        with df.open(place, threads=mode.threads).version() as version:
            return version.state_dict()

    _check(clock.time("cold read", cold), new)
    version = clock.time("open", lambda: df.open(place, threads=mode.threads).version())
    name = max(new, key=lambda name: new[name].nbytes)
    row = new[name].shape[0] * 2 // 3 if new[name].ndim else 0
    part = version.get_slice(name)
    got = clock.time("one row", lambda: part[row : row + 1])
    _check({name: got}, {name: new[name][row : row + 1]})


def _check(got: State, expected: State) -> None:
    if not same_bits(bits(got), bits(expected)):
        raise LossyError("what was read is not what was committed")
