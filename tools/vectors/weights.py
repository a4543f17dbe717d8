"""Contents that cases share, and stores of a few steps over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vectors.content import NOT_FRESH, Tensor, Version
from vectors.payloads import RAW, elements
from vectors.payloads import pack as packed
from vectors.store import Hook, Store

__all__ = ["DTYPE_OF", "Members", "change", "noise", "put", "steps", "two", "without"]

DTYPE_OF: Mapping[int, str] = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


Members = dict[str, Any]


def put(**members: Any) -> Callable[[Members], Members]:
    """A hook that sets members of an object."""
    return lambda made: made | members


def without(name: str) -> Callable[[Members], Members]:
    """A hook that takes a member away."""
    return lambda made: {key: value for key, value in made.items() if key != name}


def noise(count: int, seed: int = 1) -> bytes:
    """Bytes that look random and never change: a linear congruential generator."""
    out, state = bytearray(), seed * 2_654_435_761 % 2**32
    for _ in range(count):
        state = (1_664_525 * state + 1_013_904_223) % 2**32
        out.append(state >> 24)
    return bytes(out)


def change(data: bytes, width: int, differences: Mapping[int, int]) -> bytes:
    """The bytes with differences added to some elements, modulo their width."""
    values = elements(data, width)
    for position, d in differences.items():
        values[position] += d
    return packed(values, width)


def steps(
    pieces: Sequence[tuple[int, bytes, bytes]],
    *,
    dtype: str = "U8",
    shape: Sequence[int] | None = None,
    hooks: Mapping[str, Hook] | None = None,
    block_bytes: int = 256,
) -> Store:
    """One tensor `w` of one block: a step per (encoding, payload, content), each on top of those before."""
    store = Store(hooks=hooks, block_bytes=block_bytes)
    store.claim()
    version = Version()
    width = len(pieces[0][2]) // (1 if shape is None else max(1, _product(shape)))
    for number, (encoding, payload, content) in enumerate(pieces):
        piece = store.pack().put(payload, encoding)
        if number == 0:
            own = shape if shape is not None else [len(content) // width]
            version.tensors["w"] = Tensor(dtype, own, content, [[piece]], [NOT_FRESH])
        else:
            version = version.next()
            version.apply("w", 0, piece, content, block_bytes)
        store.commit(version)
    return store


def _product(shape: Sequence[int]) -> int:
    out = 1
    for dim in shape:
        out *= dim
    return out


def two(
    old: bytes, new: bytes, encoding: int, payload: object, *, width: int, block_bytes: int = 256
) -> Store:
    """One step of one tensor, whose chain is raw and then `payload`."""
    assert isinstance(payload, bytes) or hasattr(payload, "__bytes__")
    store = Store(block_bytes=block_bytes)
    store.claim()
    pack = store.pack()
    chain = [pack.put(old, RAW), pack.put(bytes(payload), encoding)]
    version = Version({"w": Tensor(DTYPE_OF[width], [len(old) // width], new, [chain], [NOT_FRESH])})
    store.commit(version)
    return store
