"""No difference at all: the whole state, as safetensors and as torch.save write it."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import safetensors.numpy

from deltaformat.bench.codecs import Bits, Payload
from peers.tensorwise import Tensorwise

__all__ = ["Safetensors", "TorchSave"]

FILE = "model"


class Safetensors(Tensorwise):
    """A whole safetensors file."""

    name = "whole safetensors"
    note = "every tensor, in memory"

    def encode(self, old: Bits, new: Bits) -> dict[str, bytes]:
        """The file."""
        return {FILE: safetensors.numpy.save(dict(new))}

    def apply(self, payload: Payload, target: Bits) -> None:
        """Copy every tensor."""
        _copy(self.map, safetensors.numpy.load(cast("bytes", payload[FILE])), target)


class TorchSave(Tensorwise):
    """A whole torch.save file."""

    name = "torch.save"
    note = "every tensor, in memory; loaded with mmap=False"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._torch: Any = importlib.import_module("torch")

    def encode(self, old: Bits, new: Bits) -> dict[str, memoryview]:
        """The file."""
        file = io.BytesIO()
        self._torch.save({name: self._torch.from_numpy(array) for name, array in new.items()}, file)
        return {FILE: file.getbuffer()}

    def apply(self, payload: Payload, target: Bits) -> None:
        """Copy every tensor."""
        tensors = self._torch.load(io.BytesIO(cast("bytes", payload[FILE])), weights_only=True)
        _copy(self.map, {name: tensor.numpy() for name, tensor in tensors.items()}, target)


def _copy(
    run: Callable[[Callable[[str], None], list[str]], Any], tensors: dict[str, Any], target: Bits
) -> None:
    def one(name: str) -> None:
        np.copyto(target[name], tensors[name])

    run(one, list(tensors))
