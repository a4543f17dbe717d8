"""Replacing the beginnings of chains: when it is due, and by what (SPEC 11.2, 14).

A chain grows by a piece with every step that changes its block, and whoever reads the block from nothing
decodes all of it. So the writer replaces its prefix now and then by one piece that holds all changes since
the keyframe, or by a new keyframe, and puts the step's own piece on top as ever: followers never notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import Bytes
from deltaformat.dtypes import Dtype
from deltaformat.encodings import Encoding, encode_block

__all__ = ["Replacement", "rebase_due", "replace_prefix"]

_SURELY_PAYS = 8
"""A squash of so small a part of the block is not compared with a new keyframe."""

_HARDLY_MORE = 1.1

_HEAVY = 2
"""Differences that take so many times the block together: each has saved a keyframe, all cost more."""


def rebase_due(chain: npt.NDArray[np.int64], own: int, *, block: int, turn: int, max_chain: int) -> bool:
    """Tell whether a chain's prefix is to be replaced before a piece is put on top.

    It is when the chain is full, when its differences together weigh twice the block, or when it is this
    chain's turn. Turns come once in as many steps as a chain takes to fill, so that the work is spread evenly
    over blocks and steps.

    Args:
        chain: Bytes of the chain's pieces, shape (depth,).
        own: Bytes of the piece on top, which needs a base.
        block: The block's length in bytes.
        turn: A number that differs by one from block to block, and from step to step.
        max_chain: The policy's bound.
    """
    if len(chain) >= max_chain:
        return True
    if len(chain) >= 3 and turn % max(1, max_chain - 2) == 0:  # squashing a single difference gains nothing
        return True
    return len(chain) >= 2 and int(chain[1:].sum()) + own > _HEAVY * block


@dataclass(frozen=True, slots=True)
class Replacement:
    """What becomes of a chain: `prefix` goes under the block's own piece, or `alone` is all of it."""

    prefix: tuple[Encoding, bytes] | None = None
    alone: tuple[Encoding, bytes] | None = None


def replace_prefix(
    new: Bytes,
    parent: Bytes,
    keyframe: Bytes,
    dtype: Dtype,
    *,
    own: int,
    max_chain: int,
    encode: Callable[[Bytes, Bytes], tuple[Encoding, bytes]],
) -> Replacement:
    """Encode what replaces a chain's prefix.

    Args:
        new: The block that is committed.
        parent: The block as the chain gives it.
        keyframe: The block as its first piece gives it.
        dtype: The tensor's dtype.
        own: Bytes of the piece that turns the parent's block into the new one.
        max_chain: The policy's bound.
        encode: Encodes a block (its first argument) on top of another.

    Returns:
        All changes since the keyframe in one piece. Where that takes half of a block alone or more, or the
        bound has no room: the new block alone, if followers fetch hardly more for it; else the parent's.
    """
    changes = encode(parent, keyframe) if max_chain > 2 else None
    if changes is not None and changes[0].needs_base and _SURELY_PAYS * len(changes[1]) < parent.size:
        return Replacement(prefix=changes)
    alone = encode_block(new, None, dtype)
    if changes is not None and changes[0].needs_base and 2 * len(changes[1]) < len(alone[1]):
        return Replacement(prefix=changes)
    if len(alone[1]) <= _HARDLY_MORE * own:
        return Replacement(alone=alone)
    return Replacement(prefix=encode_block(parent, None, dtype))
