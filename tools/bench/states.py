"""States to measure on: weights that change between steps as bf16 weights under AdamW do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["Bits", "Drift"]

Bits = npt.NDArray[np.uint16]


class Drift:
    """A bf16 state whose fp32 masters take small steps, as under AdamW.

    Masters are normal with a deviation of 0.02. An update is normal with a deviation of `lr` / 18: where
    gradients are mostly noise, AdamW's normalised update is far below 1. A weight's bf16 bits change where
    its master crosses a rounding boundary: at lr 3e-6 that is 0.7 % of all, mostly small ones, by one unit in
    the last place, as in the real trace of tools/make_trace.py.

    Args:
        nbytes: Bytes of the state in bf16.
        tensor_bytes: Bytes of each tensor.
        lr: Size of an update.
        seed: Of everything random.
    """

    def __init__(self, nbytes: int, *, tensor_bytes: int, lr: float = 3e-6, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._deviation = np.float32(lr / 18)
        count = max(1, nbytes // tensor_bytes)
        self._masters = [
            self._random.standard_normal(tensor_bytes // 2, np.float32) * np.float32(0.02)
            for _ in range(count)
        ]

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """The state as it is: name -> bf16 array."""
        return {
            f"layers.{number}.weight": master.astype(ml_dtypes.bfloat16).reshape(-1, 1024)
            for number, master in enumerate(self._masters)
        }

    def step(self) -> None:
        """Let every master take one step."""
        for master in self._masters:
            update = self._random.standard_normal(master.size, np.float32)
            update *= self._deviation
            master += update
