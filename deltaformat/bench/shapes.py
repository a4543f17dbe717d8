"""What manifests and the log cost alone: names and shapes of large models, many tensors, many commits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

import deltaformat as df
from deltaformat.bench.coding import timed
from deltaformat.bench.stores import in_memory
from deltaformat.blocks import block_lengths
from deltaformat.columns import prefix_sums
from deltaformat.encodings import Encoding
from deltaformat.manifest import decode_part, divide, encode_part
from deltaformat.packs import PackRef
from deltaformat.versionmap import VersionMap, merge

__all__ = ["SHAPES", "ManifestCost", "Shape", "measure_log", "measure_manifest", "measure_many"]

Integers = npt.NDArray[np.int64]
Named = Iterator[tuple[str, tuple[int, ...]]]

PACK_BYTES = 64 << 20
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's names and shapes.

    Attributes:
        name: For the table.
        tensors: Gives them.
        block_bytes: The block size that is recommended for it.
        sparse: Whether its steps are as sparse as those of large mixture-of-experts models.
    """

    name: str
    tensors: Callable[[], Named]
    block_bytes: int
    sparse: bool


def _dense_7b() -> Named:
    """28 layers of 3,584, grouped attention, untied vocabulary of 152,064: 7.6 billion weights."""
    width, inner, keys, words = 3584, 18944, 512, 152064
    yield "model.embed_tokens.weight", (words, width)
    for layer in range(28):
        name = f"model.layers.{layer}"
        for part, rows in (("q", width), ("k", keys), ("v", keys)):
            yield f"{name}.self_attn.{part}_proj.weight", (rows, width)
            yield f"{name}.self_attn.{part}_proj.bias", (rows,)
        yield f"{name}.self_attn.o_proj.weight", (width, width)
        for part, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            yield f"{name}.mlp.{part}_proj.weight", shape
        yield f"{name}.input_layernorm.weight", (width,)
        yield f"{name}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (words, width)


def _experts_1t() -> Named:
    """61 layers of 7,168, 60 of them with 384 experts of 2,048: 1.03 trillion weights in 70,000 tensors."""
    width, inner, words = 7168, 2048, 163840
    yield "model.embed_tokens.weight", (words, width)
    for layer in range(61):
        name = f"model.layers.{layer}"
        for part, shape in (
            ("q_a_proj", (1536, width)), ("q_b_proj", (12288, 1536)), ("kv_a_proj_with_mqa", (576, width)),
            ("kv_b_proj", (16384, 512)), ("o_proj", (width, 8192)),
        ):  # fmt: skip
            yield f"{name}.self_attn.{part}.weight", shape
        yield f"{name}.input_layernorm.weight", (width,)
        yield f"{name}.post_attention_layernorm.weight", (width,)
        units = [f"experts.{expert}" for expert in range(384)] if layer else ["dense"]
        for unit in units:
            wide = inner if layer else 9 * inner
            for part, shape in (("gate", (wide, width)), ("up", (wide, width)), ("down", (width, wide))):
                yield f"{name}.mlp.{unit}.{part}_proj.weight", shape
    yield "lm_head.weight", (words, width)


SHAPES = (Shape("7B", _dense_7b, 1 << 20, sparse=False), Shape("1T", _experts_1t, 4 << 20, sparse=True))


@dataclass(frozen=True, slots=True)
class ManifestCost:
    """What the manifest of a version costs.

    Attributes:
        shape: The model.
        tensors, blocks, pieces, nbytes: Of the version.
        chain: Pieces of every block: all chains are full.
        delta_bytes: Pieces of one step.
        manifest_bytes: Of all parts, compressed.
        parts: How many.
        encode_s, decode_s, root_s: Seconds to write them, to parse and check them, and to compute the root.
    """

    shape: str
    tensors: int
    blocks: int
    pieces: int
    nbytes: int
    chain: int
    delta_bytes: int
    manifest_bytes: int
    parts: int
    encode_s: float
    decode_s: float
    root_s: float

    @property
    def ratio(self) -> float:
        """The manifest over the step's delta."""
        return self.manifest_bytes / self.delta_bytes


def measure_manifest(shape: Shape, lengths: Sequence[int], *, chain: int) -> ManifestCost:
    """Make the map of a version of bf16 weights whose chains all have `chain` pieces, and its manifest.

    Args:
        shape: The model.
        lengths: Bytes of pieces of 1 MiB blocks as they were measured; drawn from at random.
        chain: Pieces of a block.
    """
    version, delta = _full_map(shape, np.asarray(lengths, np.int64), chain)

    def encode() -> list[tuple[bytes, int]]:
        return [
            encode_part(part, parent=1, digest="xxh3-128", block_bytes=shape.block_bytes)
            for part in divide(version)
        ]

    def decode() -> VersionMap:
        return merge([
            decode_part(
                data, content_size=size, where=shape.name, digest="xxh3-128",
                block_bytes=shape.block_bytes, parent=1,
            )
            for data, size in parts
        ])  # fmt: skip

    encode_s, parts = timed(encode)
    decode_s, decoded = timed(decode)
    root_s, root = timed(lambda: decoded.root("xxh3-128", shape.block_bytes))
    assert root == version.root("xxh3-128", shape.block_bytes)
    return ManifestCost(
        shape=shape.name,
        tensors=len(version.names),
        blocks=version.block_count,
        pieces=len(version.pack),
        nbytes=int(version.tensor_bytes.sum()),
        chain=chain,
        delta_bytes=delta,
        manifest_bytes=sum(len(data) for data, _ in parts),
        parts=len(parts),
        encode_s=encode_s,
        decode_s=decode_s,
        root_s=root_s,
    )


def _full_map(shape: Shape, lengths: Integers, chain: int) -> tuple[VersionMap, int]:
    """The map, and the bytes of its newest step's pieces."""
    draw = np.random.default_rng(0)
    tensors = list(shape.tensors())
    sizes = [2 * int(np.prod(dims)) for _, dims in tensors]
    per_tensor = [block_lengths(size, shape.block_bytes) for size in sizes]
    raw = np.concatenate(per_tensor)
    table = np.empty((len(raw), chain, 3), np.int64)  # pack, offset and length of every piece
    packs: list[PackRef] = []
    for level in range(chain):
        # A block's share of a piece of 1 MiB, as short as the block is.
        drawn = raw if level == 0 else np.maximum(draw.choice(lengths, len(raw)) * raw >> 20, 16)
        starts = prefix_sums(drawn)[:-1]
        number = starts // PACK_BYTES
        first = starts[np.searchsorted(number, number)]
        table[:, level] = np.stack([number + len(packs), starts - first + 128, drawn], axis=1)
        ends = np.maximum.reduceat(starts - first + 128 + drawn, np.flatnonzero(np.diff(number, prepend=-1)))
        packs += [PackRef(f"packs/{1:020}/{draw.bytes(32).hex()}.safetensors", int(end)) for end in ends]
    depth = np.full(len(raw), chain, np.uint8)
    encoding = np.full((len(raw), chain), Encoding.SPARSE, np.uint8)
    encoding[:, 0] = Encoding.RAW
    version = VersionMap(
        names=tuple(name for name, _ in tensors),
        dtypes=("BF16",) * len(tensors),
        shapes=tuple(dims for _, dims in tensors),
        block_start=prefix_sums(np.array([len(blocks) for blocks in per_tensor])),
        digest=np.frombuffer(draw.bytes(len(raw) * DIGEST_BYTES), np.uint8).reshape(-1, DIGEST_BYTES),
        fresh=np.ones(len(raw), np.uint8),
        depth=depth,
        piece_start=prefix_sums(depth),
        pack=table[:, :, 0].reshape(-1).astype(np.int32),
        offset=table[:, :, 1].reshape(-1),
        length=table[:, :, 2].reshape(-1),
        encoding=encoding.reshape(-1),
        packs=tuple(packs),
    )
    return version, int(table[:, -1, 2].sum())


def measure_many(count: int, *, rounds: int = 3) -> dict[str, float]:
    """Seconds to commit and open `count` tensors of 64 elements, of which one in a hundred changes.

    In memory; linear growth shows as a constant time per thousand tensors.
    """
    place = in_memory()
    values = np.random.default_rng(0).integers(0, 1 << 16, (count, 64), np.uint16)
    state = {f"model.layers.{number}.adapter.weight": row for number, row in enumerate(values)}
    names = list(state)
    commits, opens = [], []
    with df.create(place).writer() as writer:
        first, _ = timed(lambda: writer.commit(step=0, tensors=state))
        for step in range(1, rounds + 1):
            for name in names[step::100]:
                state[name] = state[name] ^ np.uint16(1)
            commits.append(timed(partial(writer.commit, step=step, tensors=state))[0])
            opens.append(timed(lambda: df.open(place).version().get_tensor(names[0]))[0])
    median = statistics.median
    return {"tensors": count, "first commit": first, "next commit": median(commits), "open": median(opens)}


def measure_log(commits: int) -> dict[str, float]:
    """What a log of so many commits costs: a record's bytes, a commit of next to nothing, finding a step."""
    place = in_memory()
    state = {"x": np.zeros(64, np.uint16)}
    seconds, sizes = [], []
    with df.create(place).writer() as writer:
        for step in range(commits):
            state["x"] = state["x"] + np.uint16(1)
            taken, info = timed(partial(writer.commit, step=step, tensors=state))
            seconds.append(taken)
            sizes.append(info.record_bytes)
    newest = [timed(lambda: df.open(place).version())[0] for _ in range(5)]
    oldest = [timed(lambda: df.open(place).version(step=1))[0] for _ in range(5)]
    return {
        "commits": commits,
        "record bytes": statistics.median(sizes[-10:]),
        "commit": statistics.median(seconds),
        "open newest": statistics.median(newest),
        "open step 1": statistics.median(oldest),
    }
