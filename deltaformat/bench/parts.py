"""The parts of a commit and a read, each alone and on one thread, by the functions that both are made of."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from deltaformat.bench.codecs import Mode, bits, cut, dtype_names, serving
from deltaformat.bench.coding import LossyError, timed
from deltaformat.bench.inputs import Input
from deltaformat.bench.stores import scratch
from deltaformat.blocks import DEFAULT_BLOCK_BYTES, Bytes, block_count
from deltaformat.digests import get_digest
from deltaformat.dtypes import Dtype, get_dtype
from deltaformat.encodings import (
    Changes,
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

T = TypeVar("T")


Coded = tuple[Encoding, bytes]
Block = tuple[Bytes, Bytes, Dtype]
"""Old and new bytes of a block, and its tensor's dtype."""


class _Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, function: Callable[[], T]) -> T:
        taken, result = timed(function)
        self.seconds.setdefault(name, []).append(taken)
        return result


def measure_parts(
    given: Input, mode: Mode, *, rounds: int, report: Callable[[str], None]
) -> dict[str, float]:
    """Seconds of each part of a step; medians of `rounds` runs over one step.

    `diff`: compare all blocks. `digest`: hash those that changed. `encode`: code them. `pack`: lay the pack
    out. `hash`: its SHA-256. `write`: write and sync it. `fetch`: read every piece from it. `decode`: from a
    piece to positions and differences. `apply`: change the block. `verify`: hash all blocks. (For pieces that
    are not `sparse`, `decode` is all.)

    Raises:
        LossyError: A block does not come back.
    """
    state = given.make(0)
    old, new = bits(state), bits(given.make(1))
    dtypes = {name: get_dtype(dtype) for name, dtype in dtype_names(state).items()}
    blocks: list[Block] = [
        (cut(old, (name, index)), cut(new, (name, index)), dtypes[name])
        for name, array in new.items()
        for index in range(block_count(array.nbytes, DEFAULT_BLOCK_BYTES))
    ]
    clock = _Clock()
    with serving(mode), scratch() as directory:
        storage = LocalStorage(str(directory), create=True)
        for number in range(rounds):
            report(f"{given.title}: parts, {mode.name}, round {number + 1} of {rounds}")
            _turn(clock, blocks, mode, storage, nonce=f"{number:016x}")
    return {name: statistics.median(values) for name, values in clock.seconds.items()}


def _turn(clock: _Clock, blocks: list[Block], mode: Mode, storage: LocalStorage, *, nonce: str) -> None:
    digest = get_digest("xxh3-128")
    places = clock.time(
        "diff",
        lambda: [
            changed_positions(after, before, fitting_width(after.size, dtype.width))
            for before, after, dtype in blocks
        ],
    )
    work = [(*block, where) for block, where in zip(blocks, places, strict=True) if where.size]
    clock.time("digest", lambda: [digest(after) for _, after, _, _ in work])
    coded: list[Coded] = clock.time(
        "encode",
        lambda: [
            encode_block(after, before, dtype, positions=where, strata=mode.strata)
            for before, after, dtype, where in work
        ],
    )
    builder = PackBuilder(nonce=nonce)
    for _, payload in coded:
        builder.add(payload)
    pack = clock.time("pack", builder.finish)
    key = pack_key(0, clock.time("hash", pack.sha256))
    clock.time("write", lambda: storage.put(key, pack.chunks))
    ranges = list(zip(pack.offsets.tolist(), [len(payload) for _, payload in coded], strict=True))
    pieces = clock.time("fetch", lambda: storage.get_ranges(key, ranges))
    outs = [before.copy() for before, _, _, _ in work]

    def decode() -> list[tuple[Changes, Bytes]]:
        changes = []
        for (encoding, _), piece, out in zip(coded, pieces, outs, strict=True):
            if encoding is Encoding.SPARSE:
                changes.append((parse_sparse(piece, out), out))
            else:
                decode_piece(encoding, piece, out)
        return changes

    changes = clock.time("decode", decode)

    def apply() -> None:
        for change, out in changes:
            change.apply(out)

    clock.time("apply", apply)
    if not all(np.array_equal(out, after) for out, (_, after, _, _) in zip(outs, work, strict=True)):
        raise LossyError("a block does not come back")
    clock.time("verify", lambda: [digest(after) for _, after, _ in blocks])


def measure_planes(given: Input, *, megabytes: int, rounds: int) -> dict[str, float]:
    """Full blocks in `planes`: their ratio to raw, and GB/s of canonical bytes to encode and to decode them.

    Raises:
        LossyError: A block does not come back.
    """
    state = given.make(0)
    names, old = dtype_names(state), bits(state)
    blocks = [
        (cut(old, (name, index)), get_dtype(names[name]).width)
        for name, array in old.items()
        for index in range(block_count(array.nbytes, DEFAULT_BLOCK_BYTES))
    ][: max(1, megabytes * 10**6 // DEFAULT_BLOCK_BYTES)]
    raw = sum(block.size for block, _ in blocks)
    outs = [np.empty_like(block) for block, _ in blocks]
    clock = _Clock()
    coded: list[bytes] = []

    def decode() -> None:
        for piece, out in zip(coded, outs, strict=True):
            decode_planes(piece, out)

    for _ in range(rounds):
        coded = clock.time("encode", lambda: [encode_planes(block, width) for block, width in blocks])
        clock.time("decode", decode)
    if not all(np.array_equal(out, block) for out, (block, _) in zip(outs, blocks, strict=True)):
        raise LossyError("a block does not come back")
    speeds = {f"{name} GB/s": raw / statistics.median(s) / 1e9 for name, s in clock.seconds.items()}
    return {"ratio": sum(map(len, coded)) / raw} | speeds
