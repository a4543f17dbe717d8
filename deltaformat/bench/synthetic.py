"""A state that changes as a trained net's bf16 weights do, for where no trace of a training is at hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deltaformat.bench.codecs import State

__all__ = ["SyntheticTraining"]

Floats = npt.NDArray[np.float32]

LAYERS = 6
WORDS_PER_WIDTH = 80
WEIGHT_DEVIATION = 0.02
NOISE = 18.0
"""AdamW's normalised update is 1 where a gradient never changes; where it is mostly noise it is far less."""


class SyntheticTraining:
    """A transformer's tensors, as fp32 masters that take AdamW-like steps and are published in bf16.

    Masters of a row are normal, around 0, with a deviation that is the row's own (log-normal, median 0.02);
    norms are around 1. An update is normal with a deviation of `lr` / 18 and leans on the one before
    (0.9), as a running mean of gradients does. A weight's bf16 bits change where its master crosses a
    rounding boundary: so the chance doubles with each step down in the exponent, most changes are by one
    unit in the last place, and at lr 3e-6 about 0.8 % of all weights change, at 1e-6 about 0.3 %, near
    what the real trace of tools/make_trace.py has. Everything is independent, so no coder can gain by
    looking at neighbours.

    Args:
        weights: How many there are, about.
        lr: Size of an update.
        seed: Of everything random.
    """

    def __init__(self, weights: int, *, lr: float, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._deviation = np.float32(lr / NOISE)
        self._masters: dict[str, Floats] = {}
        self._updates: dict[str, Floats] = {}
        width = max(16, round(math.sqrt(weights / (WORDS_PER_WIDTH + 12 * LAYERS)) / 16) * 16)
        for name, shape in _shapes(width).items():
            normal = self._random.standard_normal(shape, np.float32)
            if len(shape) == 2:
                scales = self._random.lognormal(0.0, 0.5, (shape[0], 1)) * WEIGHT_DEVIATION
                self._masters[name] = normal * scales.astype(np.float32)
            else:
                self._masters[name] = 1 + normal * np.float32(WEIGHT_DEVIATION)
            self._updates[name] = self._random.standard_normal(shape, np.float32)

    def state(self) -> State:
        """The weights as they are: name -> bf16 array of its own."""
        return {name: master.astype(ml_dtypes.bfloat16) for name, master in self._masters.items()}

    def step(self) -> None:
        """Let every master take one step."""
        for name, master in self._masters.items():
            update = self._updates[name]
            update *= np.float32(0.9)
            update += self._random.standard_normal(master.shape, np.float32) * np.float32(math.sqrt(1 - 0.81))
            master += update * self._deviation


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS_PER_WIDTH * width, width)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part in "qkvo":
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (width, width)
        shapes[f"{name}.mlp.up_proj.weight"] = (4 * width, width)
        shapes[f"{name}.mlp.down_proj.weight"] = (width, 4 * width)
        shapes[f"{name}.input_layernorm.weight"] = (width,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (width,)
    return shapes
