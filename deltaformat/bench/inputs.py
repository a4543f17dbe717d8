"""The inputs: a trace's steps, and the same bits in the shapes, dtypes and densities of other jobs.

A trace is a few successive states, real ones from a store of tools/make_trace.py or synthetic ones. All other
inputs come from it:

- `llm`: its bf16 values concatenated and tiled into tensors of 32 MiB. The concatenation is cut into rows of
  1,024 weights. Copy number c of it begins 1,009 c rows further on and wraps around; within it every run of
  512 rows (1 MiB) is shuffled, and so are, alike in all its rows, the groups of 8 bytes of a row: what a net
  would be whose neurons had been numbered otherwise. So a copy has the same weights with the same changes at
  about the same places, but no string of values, gaps or zeros that zstd could find again, and no block that
  deduplication could. (Whole rows at other offsets would not do: of a step coded as gaps and values, what
  repeats lies within zstd-1's window.)
- `fp8`: each of those rows in float8_e4m3fn with a scale of its own (f32, maximum / 448), tiled alike.
- `moment`: f32 in which every element changes, as an optimizer's running mean: m <- 0.9 m + 0.1 g.
- `sparse`: `llm` with changes thinned, at random, to 0.03 % of all weights, as large mixture-of-experts
  models show; what is not taken over stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

import deltaformat as df
from deltaformat.bench.codecs import State, bits, changes
from deltaformat.bench.synthetic import SyntheticTraining

__all__ = ["Input", "Trace", "derive", "read_traces", "synthetic_trace", "tile", "trace_input"]

ROW = 1024
SHIFT = 1009
RUN = 512
TENSOR_BYTES = 32 << 20
SPARSE_DENSITY = 0.0003

Rows = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Trace:
    """Successive states of one training.

    Attributes:
        label: For titles.
        key: For JSON.
        states: At least two, with the same names and shapes.
        real: Whether it was a training.
    """

    label: str
    key: str
    states: Sequence[State]
    real: bool


@dataclass(frozen=True, slots=True)
class Input:
    """What is measured: successive states, made when they are asked for.

    Attributes:
        key: For JSON: the kind, and the trace's key.
        title: For tables.
        steps: Steps there are; `make(0)` to `make(steps)` are states.
        make: Makes a state, in memory of its own.
        bounded: Whether entropy bounds say anything: where every element changes by another amount they
        do not.
    """

    key: str
    title: str
    steps: int
    make: Callable[[int], State]
    bounded: bool = True


def read_traces(place: str, steps: int) -> list[Trace]:
    """Read the newest `steps` + 1 states of a store, or of each store in a directory.

    Of several, the one that changes most in its last step comes first.

    Raises:
        DeltaFormatError: It cannot be read.
        ValueError: A store has fewer versions, or there is no store.
    """
    path = Path(place)
    stores = [place]
    if "://" not in place and path.is_dir() and not (path / "deltaformat.json").exists():
        stores = [str(found.parent) for found in sorted(path.glob("*/deltaformat.json"))]
        if not stores:
            raise ValueError(f"{place}: no store, and no directory of stores")
    traces = [_read_trace(store, steps) for store in stores]
    return sorted(traces, key=lambda trace: -changes(bits(trace.states[-2]), bits(trace.states[-1])))


def _read_trace(place: str, steps: int) -> Trace:
    store = df.open(place)
    with store.version() as newest:
        state, branch, seq = newest.state_dict(), newest.branch, newest.parent
    states = [state]
    while len(states) <= steps and seq is not None:
        with store.version(seq=seq) as version:
            states.append(version.state_dict())
            seq = version.parent
    if len(states) <= steps:
        raise ValueError(f"{place}: {len(states)} versions of {branch}; {steps + 1} are needed")
    name = Path(place.rstrip("/")).name
    return Trace(f"trace {name}", name, states[::-1], real=True)


def synthetic_trace(weights: int, steps: int, *, lr: float) -> Trace:
    """Make a synthetic trace of `steps` + 1 states."""
    training = SyntheticTraining(weights, lr=lr)
    states = [training.state()]
    for _ in range(steps):
        training.step()
        states.append(training.state())
    return Trace(f"synthetic, lr {lr:g}", f"lr-{lr:g}", states, real=False)


def tile(rows: Rows, count: int) -> Rows:
    """Take `count` rows: copy after copy of all, each shifted and shuffled in its own way (see above).

    Args:
        rows: Shape (rows, elements); what is shuffled in a row are groups of 8 bytes, if it has such.
        count: How many rows to make. The same rows and counts give the same shuffle, whatever the content.
    """
    runs = -(-count // RUN)
    if len(rows) // runs > RUN:  # fewer than there are: runs from everywhere, since tensors differ
        starts = np.arange(runs)[:, None] * (len(rows) // runs)
        rows = rows[(starts + np.arange(RUN)).reshape(-1)]
    lanes = rows.view(np.uint64) if rows.shape[1] * rows.itemsize % 8 == 0 else rows.view(f"u{rows.itemsize}")
    tiled = np.empty((count, lanes.shape[1]), lanes.dtype)
    for copy, start in enumerate(range(0, count, len(rows))):
        draw = np.random.default_rng(copy)
        order = (np.arange(len(rows)) + copy * SHIFT) % len(rows)
        for run in range(0, len(rows), RUN):
            draw.shuffle(order[run : run + RUN])
        column = draw.permutation(lanes.shape[1]) if lanes.dtype == np.uint64 else np.arange(lanes.shape[1])
        for run in range(start, min(start + len(rows), count), RUN):
            stop = min(run + RUN, start + len(rows), count)
            np.take(
                lanes[order[run - start : stop - start]], column, axis=1, out=tiled[run:stop], mode="clip"
            )
    return tiled.view(rows.dtype)


def trace_input(trace: Trace) -> Input:
    """The trace as it is: many tensors, most of them small."""

    def make(step: int) -> State:
        return {name: array.copy() for name, array in trace.states[step].items()}

    return Input(f"trace/{trace.key}", f"{trace.label}, as it is", len(trace.states) - 1, make)


def derive(trace: Trace, megabytes: int) -> dict[str, Input]:
    """The inputs that are made from a trace, by kind.

    Args:
        trace: The trace.
        megabytes: Size of `llm` and `sparse` (10^6 bytes); `fp8` has half of it, `moment` an eighth.
    """
    steps, nbytes = len(trace.states) - 1, megabytes * 10**6
    dense = [_concatenate(state, list(trace.states[0])) for state in trace.states]
    sparse = _thin(dense)
    moments = _moments(dense[0][: max(1, len(dense[0]) // 4)], steps)
    cast = [_to_fp8(rows) for rows in dense]

    def wide(states: list[Rows], size: int) -> Callable[[int], State]:
        return lambda step: _cut(tile(states[step], max(1, size // (ROW * states[step].dtype.itemsize))))

    def fp8(step: int) -> State:
        weights, scales = cast[step]
        count = max(1, nbytes // (2 * ROW))
        return _cut(tile(weights, count)) | _cut(tile(scales, count), "weight_scale", ROW)

    def given(kind: str, title: str, make: Callable[[int], State], *, bounded: bool = True) -> Input:
        return Input(f"{kind}/{trace.key}", f"{trace.label}, {title}", steps, make, bounded)

    return {
        "llm": given("llm", "tiled into tensors of 32 MiB", wide(dense, nbytes)),
        "fp8": given("fp8", "tiled, fp8 (e4m3, a scale per row)", fp8),
        "moment": given("moment", "f32, every element changed", wide(moments, nbytes // 8), bounded=False),
        "sparse": given("sparse", f"tiled, thinned to {SPARSE_DENSITY:.2%}", wide(sparse, nbytes)),
    }


def _concatenate(state: State, names: Sequence[str]) -> Rows:
    """All bf16 values as rows; what does not fill the last row is left out.

    In the order of `names`: two versions of a store may have theirs in another one.
    """
    arrays = [state[name] for name in names]
    parts = [array.reshape(-1) for array in arrays if array.dtype == ml_dtypes.bfloat16]
    flat = np.concatenate(parts)
    return flat[: flat.size // ROW * ROW].reshape(-1, ROW)


def _thin(states: list[Rows]) -> list[Rows]:
    """Take over just so many changes of each step that `SPARSE_DENSITY` of all weights change."""
    draw = np.random.default_rng(1)
    thinned = [states[0]]
    for before, after in pairwise(states):
        places = np.flatnonzero(before.view(np.uint16) != after.view(np.uint16))
        wanted = min(places.size, round(SPARSE_DENSITY * before.size))
        kept = draw.choice(places, wanted, replace=False)
        state = thinned[-1].copy()
        # The change itself, so that what was left out before does not come along.
        moved = after.view(np.uint16).reshape(-1)[kept] - before.view(np.uint16).reshape(-1)[kept]
        state.view(np.uint16).reshape(-1)[kept] += moved
        thinned.append(state)
    return thinned


def _moments(rows: Rows, steps: int) -> list[Rows]:
    """A running mean of noisy gradients; the bits of every element change at every step."""
    draw = np.random.default_rng(2)
    scale = np.abs(rows.astype(np.float32)) * np.float32(1e-3)
    moment = draw.standard_normal(rows.shape, np.float32) * scale
    states = [moment]
    for _ in range(steps):
        gradient = draw.standard_normal(rows.shape, np.float32) * scale
        new = np.float32(0.9) * states[-1] + np.float32(0.1) * gradient
        same = new.view(np.uint32) == states[-1].view(np.uint32)
        new.view(np.uint32)[same] ^= np.uint32(1)
        states.append(new)
    return list(states)


def _to_fp8(rows: Rows) -> tuple[Rows, Rows]:
    """Rows in e4m3, and their scales of shape (rows, 1)."""
    values = rows.astype(np.float32)
    scales = np.maximum(np.abs(values).max(axis=1, keepdims=True), np.float32(1e-12)) / np.float32(448)
    return (values / scales).astype(ml_dtypes.float8_e4m3fn), scales


def _cut(rows: Rows, suffix: str = "weight", row_bytes: int | None = None) -> State:
    """Cut rows into tensors of 32 MiB, and what is left; `row_bytes` where others set the pace."""
    per_tensor = TENSOR_BYTES // (row_bytes or rows.nbytes // len(rows))
    return {
        f"model.layers.{number}.{suffix}": rows[start : start + per_tensor]
        for number, start in enumerate(range(0, len(rows), per_tensor))
    }
