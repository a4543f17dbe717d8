"""What is for torch: roots of states where they are, and servers' weights that are changed in place.

from deltaformat.torch import Live, root

root(model.state_dict())
live = Live(store.version(step=0), model.state_dict())
live.advance(store.version(step=1))  # the tensors are step 1 now: hashed where they are
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltaformat.blocks import DEFAULT_BLOCK_BYTES, check_block_bytes
from deltaformat.gpu.engines import Engine
from deltaformat.live import Live
from deltaformat.statedigests import digest_state, root_of

__all__ = ["Live", "root"]


def root(
    state_dict: Mapping[str, Any],
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    digest: str = "xxh3-128",
    engine: Engine = "auto",
) -> str:
    """Compute the root of a state (SPEC 7.1): what a version that holds it has, in whatever store.

    Tensors on a device are hashed there, and only digests cross to the host. Under `xxh3-128` equal roots
    rule out accidents; only a `blake3-256` root is evidence of content.

    Args:
        state_dict: Name to tensor, of any device.
        block_bytes: The store's block size.
        digest: The store's digest: `xxh3-128` or `blake3-256`.
        engine: What hashes on devices: `auto`, `torch` or `triton`.

    Returns:
        The printed form, `df1:<digest>:<block_bytes>:<hex>`.

    Raises:
        UnsupportedError, MalformedError: A tensor or name that no version can have, or arguments that cannot
            be meant.
    """
    check_block_bytes(block_bytes, where="block_bytes")
    state = digest_state(state_dict, block_bytes=block_bytes, digest=digest, engine=engine)
    return root_of(state, block_bytes=block_bytes, digest=digest)
