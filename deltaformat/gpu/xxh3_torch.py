"""XXH3 128-bit (seed 0, default secret) of many blocks at once, in torch operations.

The algorithm is that of the xxHash specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md); names
follow it. Sums over the stripes of a round are free of order, so they are made for all rounds of a slab in a
few operations; only the scramble between rounds is serial, over one word per lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deltaformat.gpu.engines import load_torch
from deltaformat.gpu.words import LOW_32, high_product, read_word, shift_right, signed, table

__all__ = [
    "INITIAL",
    "LONGER_THAN",
    "PRIME32_1",
    "PRIME32_2",
    "PRIME64_1",
    "PRIME64_2",
    "PRIME64_3",
    "PRIME64_4",
    "ROUND_BYTES",
    "SECRET",
    "avalanche",
    "canonical",
    "fold_product",
    "hash_equal",
    "hash_ragged",
    "secret_words",
]

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
PRIME64_3, PRIME64_4, PRIME64_5 = 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1 = 0x165667919E3779F9
INITIAL = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)

LONGER_THAN = 240
"""Blocks up to this length are hashed another way (`xxh3_short`)."""
ROUND_BYTES = 1024
_STRIPES = 16


def secret_words(start: int, count: int) -> list[int]:
    """Words of the secret from byte `start` on."""
    return [int(word) for word in np.frombuffer(SECRET, "<u8", count, start)]


def avalanche(words: Any) -> Any:
    """XXH3's avalanche."""
    words = words ^ shift_right(words, 37)
    words = words * PRIME_MX1
    return words ^ shift_right(words, 32)


def fold_product(left: Any, right: Any) -> Any:
    """The two halves of a 128-bit product, XORed."""
    return (left * right) ^ high_product(left, right)


def canonical(low: Any, high: Any) -> Any:
    """Digests in canonical, big-endian order: shape (n, 16), uint8."""
    torch = load_torch()
    words = torch.stack([high, low], 1).contiguous()
    return words.view(torch.uint8).view(-1, 2, 8).flip(2).reshape(-1, 16)


def hash_equal(blocks: Any) -> Any:
    """Hash blocks of one length, a power of two from 256 bytes on.

    Temporary memory: about four times that of `blocks`.

    Args:
        blocks: uint8, shape (n, length), 8-byte aligned.

    Returns:
        shape (n, 16), uint8, on the same device.
    """
    torch = load_torch()
    count, length = blocks.shape
    stripes = min(_STRIPES, length // 64)
    words = blocks.view(torch.int64).view(count, -1, stripes, 8)

    def drop(products: Any, data: Any) -> None:
        # Its last stripe is mixed in at the end, with another part of the secret.
        products[:, -1, -1] = 0
        data[:, -1, -1] = 0

    accumulators = _accumulate(words, drop, full_rounds=(length - 1) // ROUND_BYTES)
    last = words[:, -1, -1]
    return _finish(accumulators, last, torch.full((count,), length, device=blocks.device))


def hash_ragged(rows: Any, lengths: Any) -> Any:
    """Hash blocks of any lengths above 240 bytes.

    Temporary memory: about five times that of `rows`.

    Args:
        rows: uint8, shape (n, width), each block filled up with zeros; width a multiple of 1,024.
        lengths: int64, shape (n,), on the same device.

    Returns:
        shape (n, 16), uint8, on the same device.
    """
    torch = load_torch()
    words = rows.view(torch.int64).view(len(rows), -1, _STRIPES, 8)
    stripe = torch.arange(words.shape[1] * _STRIPES, device=rows.device).view(1, -1, _STRIPES, 1)
    outside = stripe >= ((lengths - 1) // 64).view(-1, 1, 1, 1)

    def drop(products: Any, data: Any) -> None:
        products.masked_fill_(outside, 0)
        data.masked_fill_(outside, 0)

    accumulators = _accumulate(words, drop, full_rounds=(lengths - 1) // ROUND_BYTES)
    last = torch.stack([read_word(rows, lengths - 64 + 8 * lane, 8) for lane in range(8)], 1)
    return _finish(accumulators, last, lengths)


def _accumulate(words: Any, drop: Callable[[Any, Any], None], *, full_rounds: Any) -> Any:
    """Run all rounds over `words` of shape (n, rounds, stripes, 8); give accumulators of shape (n, 8)."""
    torch = load_torch()
    device = words.device
    stripes = words.shape[2]
    tile = [secret_words(8 * stripe, 8) for stripe in range(stripes)]
    keyed = words ^ table(tile, device)
    products = keyed & LOW_32
    products *= shift_right(keyed, 32)
    data = words.clone()
    drop(products, data)
    sums = products.sum(2)
    sums += data.sum(2).view(*sums.shape[:2], 4, 2).flip(3).reshape(sums.shape)
    scramble = table(secret_words(len(SECRET) - 64, 8), device)
    accumulators = table(INITIAL, device).expand(len(words), 8)
    for number in range(sums.shape[1]):
        accumulators = accumulators + sums[:, number]
        if isinstance(full_rounds, int):
            if number < full_rounds:
                accumulators = _scramble(accumulators, scramble)
        else:
            again = (number < full_rounds)[:, None]
            accumulators = torch.where(again, _scramble(accumulators, scramble), accumulators)
    return accumulators


def _scramble(accumulators: Any, key: Any) -> Any:
    return (accumulators ^ shift_right(accumulators, 47) ^ key) * PRIME32_1


def _finish(accumulators: Any, last: Any, lengths: Any) -> Any:
    """Mix in the last stripe and merge."""
    keyed = last ^ table(secret_words(len(SECRET) - 64 - 7, 8), last.device)
    accumulators = accumulators + (keyed & LOW_32) * shift_right(keyed, 32)
    accumulators = accumulators + last.view(-1, 4, 2).flip(2).reshape(-1, 8)
    low = _merge(accumulators, secret_words(11, 8), lengths * signed(PRIME64_1))
    high = _merge(accumulators, secret_words(len(SECRET) - 64 - 11, 8), ~(lengths * signed(PRIME64_2)))
    return canonical(low, high)


def _merge(accumulators: Any, key: Sequence[int], start: Any) -> Any:
    keyed = accumulators ^ table(key, accumulators.device)
    return avalanche(start + fold_product(keyed[:, 0::2], keyed[:, 1::2]).sum(1))
