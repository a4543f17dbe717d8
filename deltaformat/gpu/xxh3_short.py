"""XXH3 128-bit of blocks of up to 240 bytes, many at once, in torch operations: the ends of tensors.

Names and steps follow the xxHash specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltaformat.gpu.engines import load_torch
from deltaformat.gpu.words import byte_swap, high_product, read_word, shift_right, signed
from deltaformat.gpu.xxh3_torch import (
    LONGER_THAN,
    PRIME32_2,
    PRIME64_1,
    PRIME64_2,
    PRIME64_3,
    PRIME64_4,
    avalanche,
    canonical,
    fold_product,
    secret_words,
)

__all__ = ["ROW_BYTES", "hash_short"]

ROW_BYTES = 256
"""Width of the rows that `hash_short` takes."""
_PRIME_MX2 = 0x9FB21C651E98DF25

Pair = tuple[Any, Any]
"""The lower and the upper 64 bits of 128-bit values."""


def hash_short(rows: Any, lengths: Any) -> Any:
    """Hash blocks of 0 to 240 bytes.

    Args:
        rows: uint8, shape (n, 256), each block filled up with zeros.
        lengths: int64, shape (n,), on the same device.

    Returns:
        shape (n, 16), uint8, on the same device. Every row is hashed in every way and the right one taken:
        that needs no look at the lengths from the host.
    """
    torch = load_torch()
    low = high = torch.zeros_like(lengths)
    classes: list[tuple[int, Callable[[Any, Any], Pair]]] = [
        (0, _empty), (3, _to_3), (8, _to_8), (16, _to_16), (128, _to_128), (LONGER_THAN, _to_240),
    ]  # fmt: skip
    above = -1
    for most, function in classes:
        inside = (lengths > above) & (lengths <= most)
        found_low, found_high = function(rows, lengths)
        low, high = torch.where(inside, found_low, low), torch.where(inside, found_high, high)
        above = most
    return canonical(low, high)


def _flip(start: int) -> int:
    first, second = secret_words(start, 2)
    return signed(first ^ second)


def _flip_32(start: int) -> int:
    (word,) = secret_words(start, 1)
    return (word & 0xFFFFFFFF) ^ (word >> 32)


def _avalanche_64(words: Any) -> Any:
    """XXH64's avalanche."""
    words = (words ^ shift_right(words, 33)) * signed(PRIME64_2)
    words = (words ^ shift_right(words, 29)) * PRIME64_3
    return words ^ shift_right(words, 32)


def _empty(_rows: Any, lengths: Any) -> Pair:
    zero = lengths * 0
    return _avalanche_64(zero ^ _flip(64)), _avalanche_64(zero ^ _flip(80))


def _to_3(rows: Any, lengths: Any) -> Pair:
    def at(place: Any) -> Any:
        return read_word(rows, place.clamp(0, 255), 1)

    combined = at(lengths * 0) << 16 | at(lengths >> 1) << 24 | at(lengths - 1) | (lengths & 0xFF) << 8
    swapped = byte_swap(combined, 4)
    rotated = (swapped << 13 | swapped >> 19) & 0xFFFFFFFF
    return _avalanche_64(combined ^ _flip_32(0)), _avalanche_64(rotated ^ _flip_32(8))


def _to_8(rows: Any, lengths: Any) -> Pair:
    word = read_word(rows, 0, 4) + (read_word(rows, (lengths - 4).clamp(0, 248), 4) << 32)
    keyed, factor = word ^ _flip(16), (lengths << 2) + signed(PRIME64_1)
    low, high = keyed * factor, high_product(keyed, factor)
    high = high + (low << 1)
    low = low ^ shift_right(high, 3)
    low = (low ^ shift_right(low, 35)) * signed(_PRIME_MX2)
    return low ^ shift_right(low, 28), avalanche(high)


def _to_16(rows: Any, lengths: Any) -> Pair:
    first, last = read_word(rows, 0, 8), read_word(rows, (lengths - 8).clamp(0, 248), 8)
    prime = first * 0 + signed(PRIME64_1)
    keyed = first ^ last ^ _flip(32)
    low, high = keyed * prime + ((lengths - 1) << 54), high_product(keyed, prime)
    last = last ^ _flip(48)
    high = high + last + (last & 0xFFFFFFFF) * (PRIME32_2 - 1)
    low = low ^ byte_swap(high, 8)
    other = first * 0 + signed(PRIME64_2)
    return avalanche(low * other), avalanche(high_product(low, other) + high * other)


def _to_128(rows: Any, lengths: Any) -> Pair:
    state = lengths * signed(PRIME64_1), lengths * 0
    for start, above in ((48, 96), (32, 64), (16, 32), (0, 16)):
        second = (lengths - 16 - start).clamp(0, 240)
        state = _where(lengths > above, _mix_32(state, rows, start, second, 2 * start), state)
    return _end(state, lengths)


def _to_240(rows: Any, lengths: Any) -> Pair:
    state = lengths * signed(PRIME64_1), lengths * 0
    for start in range(0, 128, 32):
        state = _mix_32(state, rows, start, start + 16, start)
    state = avalanche(state[0]), avalanche(state[1])
    for start in range(128, 224, 32):
        mixed = _mix_32(state, rows, start, start + 16, start - 128 + 3)
        state = _where(lengths >= start + 32, mixed, state)
    ends = (lengths - 16).clamp(0, 240), (lengths - 32).clamp(0, 240)
    return _end(_mix_32(state, rows, *ends, 136 - 17 - 16), lengths)


def _where(condition: Any, one: Pair, other: Pair) -> Pair:
    torch = load_torch()
    return torch.where(condition, one[0], other[0]), torch.where(condition, one[1], other[1])


def _mix_32(state: Pair, rows: Any, first: Any, second: Any, secret: int) -> Pair:
    """Mix 16 bytes at `first` and 16 at `second` into both halves."""
    low, high = state
    a, b = read_word(rows, first, 8), read_word(rows, first + 8, 8)
    c, d = read_word(rows, second, 8), read_word(rows, second + 8, 8)
    keys = [signed(word) for word in secret_words(secret, 4)]
    low = (low + fold_product(a ^ keys[0], b ^ keys[1])) ^ (c + d)
    high = (high + fold_product(c ^ keys[2], d ^ keys[3])) ^ (a + b)
    return low, high


def _end(state: Pair, lengths: Any) -> Pair:
    low, high = state
    upper = low * signed(PRIME64_1) + high * signed(PRIME64_4) + lengths * signed(PRIME64_2)
    return avalanche(low + high), -avalanche(upper)
