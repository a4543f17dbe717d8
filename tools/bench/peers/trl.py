"""TRL's delta weight sync: changed elements in a safetensors file, with indices or with gaps.

Layout: huggingface.co/blog/delta-weight-sync (`NAME.indices` int32 and `NAME.values`), and the later draft,
huggingface/trl pull request 5937, whose compact form has gaps of 16 bits. How that one treats a gap that
needs more is open: here elements that did not change are sent along so that no gap is longer.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from deltaformat.bench.codecs import Bits, Payload
from peers.tensorwise import Array, Tensorwise

__all__ = ["Gaps", "Indices"]

FILE = "delta.safetensors"
MAX_GAP = (1 << 16) - 1

Positions = npt.NDArray[np.integer[Any]]


class _Sparse(Tensorwise):
    """Pairs of arrays per tensor, in one file."""

    suffix: str

    def encode(self, old: Bits, new: Bits) -> dict[str, bytes]:
        """One file with the elements of all tensors that changed."""

        def one(name: str) -> tuple[npt.NDArray[Any], Array]:
            flat = new[name].reshape(-1)
            where, positions = self.pack(self.differ(old[name], new[name]))
            return where, flat[positions]

        names = list(new)
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, (where, values) in zip(names, self.map(one, names), strict=True):
            if values.size:
                tensors[f"{name}.{self.suffix}"], tensors[f"{name}.values"] = where, values
        return {FILE: safetensors.numpy.save(tensors)} if tensors else {}

    def apply(self, payload: Payload, target: Bits) -> None:
        """Write the new elements in place."""
        if FILE not in payload:
            return
        tensors = safetensors.numpy.load(cast("bytes", payload[FILE]))
        names = [key.removesuffix(".values") for key in tensors if key.endswith(".values")]

        def one(name: str) -> None:
            positions = self.unpack(tensors[f"{name}.{self.suffix}"])
            target[name].reshape(-1)[positions] = tensors[f"{name}.values"]

        self.map(one, names)

    def pack(self, positions: Positions) -> tuple[npt.NDArray[Any], Positions]:
        """What is stored for these positions, and which elements are sent."""
        raise NotImplementedError

    def unpack(self, stored: npt.NDArray[Any]) -> Positions:
        """Undo `pack`: the positions of the elements that were sent."""
        raise NotImplementedError


class Indices(_Sparse):
    """int32 index + value."""

    name = "sparse safetensors (int32)"
    note = "TRL, as published"
    suffix = "indices"

    def pack(self, positions: Positions) -> tuple[npt.NDArray[Any], Positions]:
        """Indices as they are."""
        return positions.astype(np.int32), positions

    def unpack(self, stored: npt.NDArray[Any]) -> Positions:
        """They are the positions."""
        return stored


class Gaps(_Sparse):
    """uint16 gap + value."""

    name = "uint16 gaps + value"
    note = "TRL, later draft; wide gaps are bridged with unchanged elements"
    suffix = "gaps"

    def pack(self, positions: Positions) -> tuple[npt.NDArray[Any], Positions]:
        """Elements between two that are sent, at most 65,535."""
        gaps = np.diff(positions, prepend=-1) - 1
        wide = np.flatnonzero(gaps > MAX_GAP)
        if wide.size:
            bridges = [positions]
            for index in wide.tolist():
                stop = int(positions[index])
                bridges.append(np.arange(stop - int(gaps[index]) + MAX_GAP, stop, MAX_GAP + 1))
            positions = np.sort(np.concatenate(bridges))
            gaps = np.diff(positions, prepend=-1) - 1
        return gaps.astype(np.uint16), positions

    def unpack(self, stored: npt.NDArray[Any]) -> Positions:
        """Sum the gaps up."""
        steps = stored.astype(np.int64)
        steps += 1
        np.cumsum(steps, out=steps)
        steps -= 1
        return steps
