"""XXH3 128-bit in one ragged launch: a warp per block, a round of 1 KiB a tile (names as in `xxh3_torch`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

from deltaformat.gpu.engines import load_torch
from deltaformat.gpu.words import table
from deltaformat.gpu.xxh3_torch import INITIAL, PRIME32_1, PRIME64_1, PRIME64_2, SECRET, secret_words

__all__ = ["constants", "hash_blocks", "xxh3_kernel"]

_ALL_ONES = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_LOW_32 = tl.constexpr(0xFFFFFFFF)
_PRIME32_1 = tl.constexpr(PRIME32_1)
_PRIME64_1 = tl.constexpr(PRIME64_1)
_PRIME64_2 = tl.constexpr(PRIME64_2)
_PRIME_MX1 = tl.constexpr(0x165667919E3779F9)
# Where each part lies in `constants`, in words.
_SCRAMBLE = tl.constexpr(16)  # within the secret: 24 words
_LAST = tl.constexpr(24)
_MERGE_LOW = tl.constexpr(32)
_MERGE_HIGH = tl.constexpr(40)
_INITIAL = tl.constexpr(48)


@cache
def constants(device: Any) -> Any:
    """The secret at the offsets at which the kernel reads it, and the accumulators' start; 56 words."""
    size = len(SECRET)
    parts = [(0, 24), (size - 64 - 7, 8), (11, 8), (size - 64 - 11, 8)]
    return table([*[word for part in parts for word in secret_words(*part)], *INITIAL], device)


@triton.jit
def _fold(left, right):
    return (left * right) ^ tl.umulhi(left, right)


@triton.jit
def _swap_neighbours(lanes, stripes: tl.constexpr):
    """Exchange lanes 0 and 1, 2 and 3, ...; a thread holds both of a pair, so that this moves nothing."""
    first, second = tl.split(tl.reshape(lanes, [stripes, 4, 2]))
    return tl.reshape(tl.join(second, first), [stripes, 8])


@triton.jit
def _contribution(data, keys):
    """What stripes add to the accumulators, before it is summed; both of shape (16, 8)."""
    keyed = data ^ keys
    return (keyed & _LOW_32) * (keyed >> 32) + _swap_neighbours(data, 16)


@triton.jit
def _sums(data, keys):
    return tl.sum(_contribution(data, keys), axis=0)


@triton.jit
def _scramble(accumulators, key):
    return (accumulators ^ (accumulators >> 47) ^ key) * _PRIME32_1


@triton.jit
def _merge(accumulators, keys, start):
    first, second = tl.split(tl.reshape(accumulators ^ keys, [4, 2]))
    value = start + tl.sum(_fold(first, second), axis=0)
    value = (value ^ (value >> 37)) * _PRIME_MX1
    return value ^ (value >> 32)


@triton.jit
def xxh3_kernel(addresses, lengths, constants, digests):
    """Hash block number `program_id`: `lengths` bytes, above 240, at `addresses`, a multiple of 16."""
    block = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + block)
    words = tl.multiple_of(tl.load(addresses + block).to(tl.pointer_type(tl.uint64)), 16)
    secret = constants.to(tl.pointer_type(tl.uint64))
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    tile = stripe[:, None] * 8 + lane[None, :]
    keys = tl.load(secret + stripe[:, None] + lane[None, :])
    scramble = tl.load(secret + _SCRAMBLE + lane)
    accumulators = tl.load(secret + _INITIAL + lane)

    # Four rounds' loads are under way before the first is summed; only the scramble is serial.
    rounds = (length - 1) // 1024
    while rounds >= 4:
        first, second = tl.load(words + tile), tl.load(words + (tile + 128))
        third, fourth = tl.load(words + (tile + 256)), tl.load(words + (tile + 384))
        accumulators = _scramble(accumulators + _sums(first, keys), scramble)
        accumulators = _scramble(accumulators + _sums(second, keys), scramble)
        accumulators = _scramble(accumulators + _sums(third, keys), scramble)
        accumulators = _scramble(accumulators + _sums(fourth, keys), scramble)
        words += 512
        rounds -= 4
    while rounds > 0:
        accumulators = _scramble(accumulators + _sums(tl.load(words + tile), keys), scramble)
        words += 128
        rounds -= 1

    # The last round is never full: it has up to 15 stripes, each wholly inside the block.
    stripes = ((length - 1) % 1024) // 64
    inside = (stripe < stripes)[:, None] & (lane >= 0)[None, :]
    data = tl.load(words + tile, mask=inside, other=0)
    accumulators += tl.sum(tl.where(inside, _contribution(data, keys), 0), axis=0)

    # The last stripe ends where the block ends: at any address.
    end = tl.load(addresses + block).to(tl.pointer_type(tl.uint8)) + (length - 64)
    shift = (lane * 8).to(tl.uint64)[None, :]
    last = tl.sum(tl.load(end + lane[:, None] * 8 + lane[None, :]).to(tl.uint64) << shift, axis=1)
    other = tl.load(end + (lane ^ 1)[:, None] * 8 + lane[None, :]).to(tl.uint64)
    keyed = last ^ tl.load(secret + _LAST + lane)
    accumulators += (keyed & _LOW_32) * (keyed >> 32) + tl.sum(other << shift, axis=1)

    size = length.to(tl.uint64)
    low = _merge(accumulators, tl.load(secret + _MERGE_LOW + lane), size * _PRIME64_1)
    high = _merge(accumulators, tl.load(secret + _MERGE_HIGH + lane), (size * _PRIME64_2) ^ _ALL_ONES)
    octet = (56 - tl.arange(0, 8) * 8).to(tl.uint64)
    out = digests + block * 16 + tl.arange(0, 8)
    tl.store(out, (high >> octet).to(tl.uint8))
    tl.store(out + 8, (low >> octet).to(tl.uint8))


def hash_blocks(addresses: Any, lengths: Any) -> Any:
    """Hash blocks where they are, in one launch.

    Args:
        addresses: Of each, a multiple of 16: int64, on the device where they are.
        lengths: Bytes of each, above 240: int64, there too.

    Returns:
        shape (n, 16), uint8, on the device.
    """
    torch = load_torch()
    digests = torch.empty((len(addresses), 16), dtype=torch.uint8, device=addresses.device)
    if len(addresses):
        xxh3_kernel[(len(addresses),)](addresses, lengths, constants(addresses.device), digests, num_warps=1)
    return digests
