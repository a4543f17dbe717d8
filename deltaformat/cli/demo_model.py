"""A small language model and its training, in NumPy: what the demo commits.

A word's neighbours to the left predict it: embedding, one hidden layer, softmax. Masters, gradients and AdamW
are in fp32, as in larger trainings; what is published is their cast to bf16, rounded to nearest even.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["Corpus", "Model", "read_corpus", "train"]

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

WORDS = 3072
CONTEXT = 8
WIDTH = 64
HIDDEN = 768
BATCH = 128


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers of words, shape (tokens,)."""

    tokens: Integers


def read_corpus() -> Corpus:
    """Read the text of Python's own help; where that is missing, the sources of the standard library."""
    words = re.findall(r"\w+|[^\w\s]|\n", _text().lower())
    ranked = [word for word, _ in Counter(words).most_common(WORDS - 1)]
    numbers = {word: number for number, word in enumerate(ranked, start=1)}  # 0: any other word
    return Corpus(np.fromiter((numbers.get(word, 0) for word in words), np.int64, len(words)))


def _text() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        import argparse

        library = Path(argparse.__file__).parent
        sources = sorted(library.glob("*.py"), key=lambda path: path.name)
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources[:100])
    return "\n".join(topics[topic] for topic in sorted(topics))


class Model:
    """The model with its optimizer's state.

    Attributes:
        masters: Name -> fp32 weights.
    """

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)

        def normal(*shape: int, scale: float) -> Floats:
            return (draw.standard_normal(shape) * scale).astype(np.float32)

        wide = CONTEXT * WIDTH
        self.masters: dict[str, Floats] = {
            "embedding.weight": normal(WORDS, WIDTH, scale=0.1),
            "hidden.weight": normal(wide, HIDDEN, scale=wide**-0.5),
            "hidden.bias": np.zeros(HIDDEN, np.float32),
            "output.weight": normal(HIDDEN, WORDS, scale=HIDDEN**-0.5),
            "output.bias": np.zeros(WORDS, np.float32),
        }
        self._mean = {name: np.zeros_like(weights) for name, weights in self.masters.items()}
        self._square = {name: np.zeros_like(weights) for name, weights in self.masters.items()}
        self._steps = 0

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """The weights as they are published: bf16, in memory of their own."""
        return {name: weights.astype(ml_dtypes.bfloat16) for name, weights in self.masters.items()}

    def step(self, contexts: Integers, targets: Integers, lr: float) -> float:
        """Train on one batch.

        Args:
            contexts: Words before each target, shape (batch, CONTEXT).
            targets: The words to be predicted, shape (batch,).
            lr: Learning rate.

        Returns:
            The mean cross entropy before the step.
        """
        masters, count = self.masters, len(targets)
        rows = np.arange(count)
        embedded = masters["embedding.weight"][contexts].reshape(count, -1)
        hidden = np.maximum(embedded @ masters["hidden.weight"] + masters["hidden.bias"], 0)
        scores = hidden @ masters["output.weight"] + masters["output.bias"]
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        loss = -float(np.log(np.maximum(scores[rows, targets], 1e-30)).mean())

        scores[rows, targets] -= 1
        scores /= np.float32(count)
        inner = (scores @ masters["output.weight"].T) * (hidden > 0)
        outer = (inner @ masters["hidden.weight"].T).reshape(-1, WIDTH)
        embedding = np.zeros_like(masters["embedding.weight"])
        np.add.at(embedding, contexts.reshape(-1), outer)
        self._update(
            {
                "embedding.weight": embedding,
                "hidden.weight": embedded.T @ inner,
                "hidden.bias": inner.sum(axis=0),
                "output.weight": hidden.T @ scores,
                "output.bias": scores.sum(axis=0),
            },
            lr,
        )
        return loss

    def _update(self, gradients: dict[str, Floats], lr: float, decay: float = 0.01) -> None:
        """AdamW, with the usual betas."""
        self._steps += 1
        fast, slow = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        for name, gradient in gradients.items():
            mean, square, weights = self._mean[name], self._square[name], self.masters[name]
            mean += np.float32(0.1) * (gradient - mean)
            square += np.float32(0.001) * (gradient * gradient - square)
            change = mean / (np.sqrt(square / np.float32(slow)) + np.float32(1e-8))
            if weights.ndim > 1:
                change += np.float32(decay * fast) * weights
            weights -= np.float32(lr / fast) * change


def train(
    model: Model, corpus: Corpus, *, steps: int, lr: float, seed: int, warmup: int = 1
) -> Iterator[float]:
    """Train, and give each step's loss.

    Args:
        model: It is changed in place.
        corpus: The text.
        steps: How many steps.
        lr: Learning rate, reached in a straight line over `warmup` steps.
        seed: Chooses the batches.
        warmup: Steps of rising rate.
    """
    draw = np.random.default_rng(seed)
    before = np.arange(-CONTEXT, 0)
    for number in range(steps):
        places = draw.integers(CONTEXT, len(corpus.tokens), BATCH)
        contexts, targets = corpus.tokens[places[:, None] + before], corpus.tokens[places]
        yield model.step(contexts, targets, lr * min(1.0, (number + 1) / warmup))
