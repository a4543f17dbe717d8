"""The peers: how others encode a step, each written anew from its published layout.

All work on the bits in memory, keep their buffers from step to step, and take `zstandard` for zstd. None has
checks, files or a network, but moonclip, which is taken as it is installed.
"""

from __future__ import annotations

from collections.abc import Callable

from deltaformat.bench.codecs import Absent, Codec
from peers.grail import Grail
from peers.moonclip import Moonclip
from peers.slime import Overwrite, Xor
from peers.trl import Gaps, Indices
from peers.whole import Safetensors, TorchSave

__all__ = ["FACTORIES", "peers"]

FACTORIES: dict[str, Callable[[int], Codec]] = {
    Xor.name: Xor,
    Overwrite.name: Overwrite,
    Grail.name: Grail,
    Indices.name: Indices,
    Gaps.name: Gaps,
    Safetensors.name: Safetensors,
    TorchSave.name: TorchSave,
    Moonclip.name: Moonclip,
}
"""By name; each takes the number of threads. The first is the one that ratios are given against."""


def peers(threads: int) -> list[Codec | Absent]:
    """Make all peers; one that lacks its library says so."""
    made: list[Codec | Absent] = []
    for name, factory in FACTORIES.items():
        try:
            made.append(factory(threads))
        except ImportError as error:
            made.append(Absent(name, f"not installed ({error})"))
    return made
