"""What is measured: coders of one step in memory, ours and others', behind one interface."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import DEFAULT_BLOCK_BYTES, Buffer, Bytes, block_count, block_range, byte_view
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import compare_and_encode, decode_piece, native
from deltaformat.tensors import to_host

__all__ = [
    "MODES",
    "ON_ONE_THREAD",
    "Absent",
    "Bits",
    "Blocks",
    "Codec",
    "Mode",
    "Payload",
    "State",
    "bits",
    "changes",
    "cut",
    "dtype_names",
    "find_peers",
    "load_peers",
    "same_bits",
    "serving",
    "size_of",
]

State = dict[str, npt.NDArray[np.generic]]
"""Tensors by name."""

Bits = dict[str, npt.NDArray[np.unsignedinteger[Any]]]
"""The same as unsigned integers of each element's width, in the tensors' shapes."""

Payload = Mapping[Any, Buffer]
"""What a coder would send: bytes by the name of a tensor or object. Only the bytes are counted."""

T = TypeVar("T")
R = TypeVar("R")


class Codec(Protocol):
    """Turns a step into bytes, and those and the old state into the new one; bit for bit.

    Attributes:
        name: For the table.
        note: Whose layout it is, and what was decided where that leaves room.
    """

    name: str
    note: str

    def prepare(self, old: Bits) -> None:
        """Take what it keeps between steps; not measured."""

    def encode(self, old: Bits, new: Bits) -> Payload:
        """Encode the step from `old` to `new`."""

    def apply(self, payload: Payload, target: Bits) -> None:
        """Turn `target`, which holds the old state, into the new one, in place."""

    def close(self) -> None:
        """Let go of files and threads."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A coder that cannot be measured here, and why."""

    name: str
    reason: str


def bits(state: Mapping[str, npt.NDArray[np.generic]]) -> Bits:
    """View tensors as unsigned integers: floats are never compared."""
    return {name: array.view(f"u{array.dtype.itemsize}") for name, array in state.items()}


def changes(old: Bits, new: Bits) -> int:
    """Count the elements whose bits differ."""
    return sum(int(np.count_nonzero(array != old[name])) for name, array in new.items())


def same_bits(first: Bits, second: Bits) -> bool:
    """Tell whether two states have the same names, shapes and bits."""
    return first.keys() == second.keys() and all(np.array_equal(first[n], second[n]) for n in first)


def dtype_names(state: State) -> dict[str, str]:
    """Each tensor's dtype name, as in SPEC 8.1."""
    return {name: to_host(name, array.reshape(-1)[:0]).dtype for name, array in state.items()}


def size_of(payload: Payload) -> int:
    """Count the bytes of a payload."""
    return sum(byte_view(data).nbytes for data in payload.values())


@dataclass(frozen=True, slots=True)
class Mode:
    """A configuration of ours.

    Attributes:
        name: For the table, without the number of threads.
        kernels: Whether the kernels in C serve.
        strata: Whether positions are coded by magnitude class.
        threads: Blocks encoded or decoded at a time.
    """

    name: str
    kernels: bool
    strata: bool
    threads: int

    @property
    def label(self) -> str:
        """Name and threads."""
        return f"{self.name}, {self.threads} thread{'s' if self.threads > 1 else ''}"


_KINDS = (
    ("C, strata", True, True),
    ("C, no strata", True, False),
    ("NumPy, strata", False, True),
    ("NumPy, no strata", False, False),
)
MODES = tuple(Mode(name, kernels, strata, threads) for threads in (1, 2) for name, kernels, strata in _KINDS)
"""The configurations; the first is the default one on one thread, the second what `Policy.lightest` does."""
ON_ONE_THREAD = MODES[: len(_KINDS)]


@contextmanager
def serving(mode: Mode) -> Iterator[None]:
    """Let the mode's engine serve all of this process meanwhile."""
    before = native.kernels
    native.kernels = before if mode.kernels else None
    try:
        yield
    finally:
        native.kernels = before


class Blocks:
    """Our coder in memory, block by block as a writer does it, without digests and without I/O.

    Args:
        mode: How.
        state: Any state of the series, for the dtypes: strata are for floats only.
    """

    note = "the pieces of SPEC 9 alone; packs, manifest, log and digests are in the whole commit"

    def __init__(self, mode: Mode, state: State) -> None:
        self.name = f"deltaformat ({mode.name})"
        self._mode = mode
        self._dtypes = {name: get_dtype(dtype) for name, dtype in dtype_names(state).items()}
        self._pool = ThreadPoolExecutor(mode.threads) if mode.threads > 1 else None

    def prepare(self, old: Bits) -> None:
        """Nothing is kept."""

    def encode(self, old: Bits, new: Bits) -> dict[tuple[str, int], Buffer]:
        """Encode every block that changed; the key is (tensor, block), a byte before each piece its code."""

        def one(at: tuple[str, int]) -> Buffer | None:
            block, base, dtype = cut(new, at), cut(old, at), self._dtypes[at[0]]
            encoded = compare_and_encode(block, base, dtype, strata=self._mode.strata)[1]
            return None if encoded is None else bytes((encoded[0],)) + encoded[1]

        with serving(self._mode):
            places = list(_places(new))
            made = self._map(one, places)
        return {at: payload for at, payload in zip(places, made, strict=True) if payload is not None}

    def apply(self, payload: Payload, target: Bits) -> None:
        """Apply pieces in place."""

        def one(item: tuple[Any, Buffer]) -> None:
            view = byte_view(item[1])
            decode_piece(view[0], view[1:], cut(target, item[0]))

        with serving(self._mode):
            self._map(one, list(payload.items()))

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _map(self, function: Callable[[T], R], items: list[T]) -> list[R]:
        return (
            [function(item) for item in items]
            if self._pool is None
            else list(self._pool.map(function, items))
        )


def _places(state: Bits) -> Iterator[tuple[str, int]]:
    for name, array in state.items():
        for index in range(block_count(array.nbytes, DEFAULT_BLOCK_BYTES)):
            yield name, index


def cut(state: Bits, at: tuple[str, int]) -> Bytes:
    """A block: `at` is its tensor's name and its number there."""
    data = state[at[0]].reshape(-1).view(np.uint8)
    start, end = block_range(at[1], data.size, DEFAULT_BLOCK_BYTES)
    return data[start:end]


def find_peers() -> Path | None:
    """Find `tools/bench/peers` beside the package: in the repository it is, in an installed package not."""
    place = Path(__file__).resolve().parents[2] / "tools" / "bench" / "peers"
    return place if (place / "__init__.py").is_file() else None


def load_peers(path: Path, threads: int) -> list[Codec | Absent]:
    """Load the peers: a package with a function `peers(threads)`.

    Raises:
        ImportError: It is not such a package.
    """
    parent = str(path.resolve().parent)
    sys.path.insert(0, parent)
    try:
        module = importlib.import_module(path.name)
    finally:
        sys.path.remove(parent)
    if not hasattr(module, "peers"):
        raise ImportError(f"{path} has no function peers(threads)")
    found: list[Codec | Absent] = module.peers(threads)
    return found
