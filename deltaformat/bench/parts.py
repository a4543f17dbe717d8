"""The parts of a commit and of a read, each alone and on one thread, by the functions that both are made of."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltaformat.bench.codecs import Blocks, Mode, bits, serving
from deltaformat.bench.coding import dtype_names, timed
from deltaformat.bench.inputs import Input
from deltaformat.bench.stores import scratch
from deltaformat.blocks import DEFAULT_BLOCK_BYTES, Bytes, block_count, block_range
from deltaformat.digests import get_digest
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import (
    Encoding,
    changed_positions,
    decode_piece,
    encode_block,
    encode_planes,
    parse_sparse,
)
from deltaformat.encodings.planes import decode_planes
from deltaformat.encodings.streams import fitting_width
from deltaformat.keys import pack_key
from deltaformat.localstorage import LocalStorage
from deltaformat.packs import PackBuilder

__all__ = ["measure_parts", "measure_planes"]


def measure_parts(
    given: Input, mode: Mode, *, rounds: int, report: Callable[[str], None]
) -> dict[str, float]:
    """Seconds of each part of a step; medians of `rounds` runs over one step.

    `diff`: compare all blocks. `digest`: hash those that changed. `encode`: code them. `pack`: lay the pack out.
    `hash`: its SHA-256. `write`: write and sync it. `fetch`: read every piece from it. `decode`: from a piece to
    positions and differences. `apply`: change the block. `verify`: hash all blocks. (For pieces that are not
    `sparse`, `decode` is all.)
    """
    state = given.make(0)
    old, new = bits(state), bits(given.make(1))
    dtypes = {name: get_dtype(dtype) for name, dtype in dtype_names(state).items()}
    digest = get_digest("xxh3-128")
    blocks = [
        (_cut(old[name], index), _cut(array, index), dtypes[name])
        for name, array in new.items()
        for index in range(block_count(array.nbytes, DEFAULT_BLOCK_BYTES))
    ]
    seconds: dict[str, list[float]] = {}

    def measure(name: str, function: Callable[[], object]) -> None:
        seconds.setdefault(name, []).append(timed(function)[0])

    with serving(mode), scratch() as directory:
        for number in range(rounds):
            report(f"{given.title}: parts, {mode.name}, round {number + 1} of {rounds}")
            places = []
            measure("diff", lambda: places.extend(
                changed_positions(after, before, fitting_width(after.size, dtype.width)) for before, after, dtype in blocks
            ))  # fmt: skip
            work = [(*block, where) for block, where in zip(blocks, places, strict=True) if where.size]
            measure("digest", lambda: [digest(after) for _, after, _, _ in work])
            coded: list[tuple[Encoding, bytes]] = []
            measure("encode", lambda: coded.extend(
                encode_block(after, before, dtype, positions=where, strata=mode.strata)
                for before, after, dtype, where in work
            ))  # fmt: skip
            builder = PackBuilder(nonce=f"{number:016x}")
            for _, payload in coded:
                builder.add(payload)
            packs = []
            measure("pack", lambda: packs.append(builder.finish()))
            names: list[str] = []
            measure("hash", lambda: names.append(packs[0].sha256()))
            key = pack_key(0, names[0])
            storage = LocalStorage(str(directory), create=True)
            measure("write", lambda: storage.put(key, packs[0].chunks))
            ranges = list(zip(packs[0].offsets.tolist(), [len(p) for _, p in coded], strict=True))
            fetched = []
            measure("fetch", lambda: fetched.extend(storage.get_ranges(key, ranges)))
            outs = [before.copy() for before, _, _, _ in work]
            changes = []
            sparse = [encoding is Encoding.SPARSE for encoding, _ in coded]

            def decode() -> None:
                for (encoding, _), piece, out, is_sparse in zip(coded, fetched, outs, sparse, strict=True):
                    if is_sparse:
                        changes.append((parse_sparse(piece, out), out))
                    else:
                        decode_piece(encoding, piece, out)

            measure("decode", decode)
            measure("apply", lambda: [change.apply(out) for change, out in changes])
            assert all(np.array_equal(out, after) for out, (_, after, _, _) in zip(outs, work, strict=True))
            measure("verify", lambda: [digest(after) for _, after, _ in blocks])
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_planes(given: Input, *, megabytes: int, rounds: int) -> dict[str, float]:
    """Full blocks in `planes`: their ratio to raw, and GB/s of canonical bytes to encode and to decode them."""
    blocks: list[tuple[Bytes, int]] = []
    state = given.make(0)
    for name, array in bits(state).items():
        width = get_dtype(dtype_names({name: state[name]})[name]).width
        count = block_count(array.nbytes, DEFAULT_BLOCK_BYTES)
        blocks += [(_cut(array, index), width) for index in range(count)]
    blocks = blocks[: max(1, megabytes * 10**6 // DEFAULT_BLOCK_BYTES)]
    raw = sum(block.size for block, _ in blocks)
    outs = [np.empty_like(block) for block, _ in blocks]
    encode, decode, coded = [], [], []
    for _ in range(rounds):
        taken, coded = timed(lambda: [encode_planes(block, width) for block, width in blocks])
        encode.append(taken)
        taken, _ = timed(lambda: [decode_planes(piece, out) for piece, out in zip(coded, outs, strict=True)])
        decode.append(taken)
    assert all(np.array_equal(out, block) for out, (block, _) in zip(outs, blocks, strict=True))
    return {
        "ratio": sum(map(len, coded)) / raw,
        "encode GB/s": raw / statistics.median(encode) / 1e9,
        "decode GB/s": raw / statistics.median(decode) / 1e9,
    }


def _cut(array: np.ndarray, index: int) -> Bytes:
    data = array.reshape(-1).view(np.uint8)
    start, end = block_range(index, data.size, DEFAULT_BLOCK_BYTES)
    block: Bytes = data[start:end]
    return block
