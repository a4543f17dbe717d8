"""slime's two encodings of a step, per tensor, zstd level 1; SkyRL has the first one too.

Layout: THUDM/slime, `slime/utils/disk_delta.py` and `update_weight_from_disk_delta.py` at 06236d0: tensors as
bytes; `xor`: new XOR old; `overwrite`: how many bytes differ (u32), where (u32 each), the new bytes. Tensors
without a change are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltaformat.bench.codecs import Bits, Payload
from peers.tensorwise import Tensorwise

__all__ = ["Overwrite", "Xor"]


_HEAD = 64 << 10
"""`any` looks at all it is given; most tensors that change do so in their first bytes."""


class Xor(Tensorwise):
    """XOR + zstd-1."""

    name = "XOR + zstd-1"
    note = "slime, SkyRL: per tensor"

    def encode(self, old: Bits, new: Bits) -> dict[str, bytes]:
        """One frame per tensor that changed."""

        def one(name: str) -> bytes | None:
            array = new[name]
            difference = self.buffer(array.nbytes)
            np.bitwise_xor(array.reshape(-1), old[name].reshape(-1), out=difference.view(array.dtype))
            changed = difference[:_HEAD].any() or difference[_HEAD:].any()
            return self.compress(difference) if changed else None

        names = list(new)
        frames = zip(names, self.map(one, names), strict=True)
        return {name: frame for name, frame in frames if frame is not None}

    def apply(self, payload: Payload, target: Bits) -> None:
        """XOR every tensor in place."""

        def one(item: tuple[Any, Any]) -> None:
            array = target[item[0]].reshape(-1)
            np.bitwise_xor(array, self.decompress(item[1]).view(array.dtype), out=array)

        self.map(one, list(payload.items()))


class Overwrite(Tensorwise):
    """Positions and new bytes, absolute, + zstd-1."""

    name = "overwrite + zstd-1"
    note = "slime: positions (u32) and values of changed bytes, per tensor"

    def encode(self, old: Bits, new: Bits) -> dict[str, bytes]:
        """One frame per tensor that changed."""

        def one(name: str) -> bytes | None:
            before, after = (state[name].reshape(-1).view(np.uint8) for state in (old, new))
            positions = self.differ(before, after)
            if not positions.size:
                return None
            content = self.buffer(4 + 5 * positions.size)
            content[:4].view("<u4")[0] = positions.size
            content[4 : 4 + 4 * positions.size].view("<u4")[:] = positions
            np.take(after, positions, out=content[4 + 4 * positions.size :])
            return self.compress(content)

        names = list(new)
        frames = zip(names, self.map(one, names), strict=True)
        return {name: frame for name, frame in frames if frame is not None}

    def apply(self, payload: Payload, target: Bits) -> None:
        """Write the new bytes in place."""

        def one(item: tuple[Any, Any]) -> None:
            content = self.decompress(item[1])
            count = int(content[:4].view("<u4")[0])
            positions = content[4 : 4 + 4 * count].view("<u4")
            target[item[0]].reshape(-1).view(np.uint8)[positions] = content[4 + 4 * count :]

        self.map(one, list(payload.items()))
