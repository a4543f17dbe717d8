"""What a commit holds: packs, pieces, tensors, versions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vectors.payloads import RAW
from vectors.primitives import blocks_of, safetensors, sha256

__all__ = [
    "NOT_FRESH",
    "PAYLOAD",
    "Chain",
    "External",
    "Members",
    "Pack",
    "Piece",
    "Tensor",
    "Version",
    "claim_text",
]


NOT_FRESH = 255


PAYLOAD = "deltaformat.payload"


Members = dict[str, Any]


def claim_text(claim: int) -> str:
    """How a claim stands in keys."""
    return f"{claim:020}"


class External:
    """An object outside the store."""

    def __init__(self, url: str, data: bytes) -> None:
        self.url, self.data = url, data

    @property
    def entry(self) -> Members:
        """Its entry in a pack table."""
        return {"url": self.url, "size": len(self.data), "sha256": sha256(self.data)}

    def piece(self, offset: int, length: int, encoding: int = RAW) -> Piece:
        """A range of it."""
        return Piece(self, offset, length, encoding)


class Pack:
    """A pack under construction; its pieces know their offsets once it is finished."""

    def __init__(self, claim: int = 0, nonce: str | None = None) -> None:
        self.claim, self.nonce = claim, nonce
        self._tensors: list[tuple[str, str, Sequence[int], bytes]] = []
        self._payload = b""
        self._data: bytes | None = None

    def put(self, payload: bytes, encoding: int, *, length: int | None = None) -> Piece:
        """Add a payload; `length` is what the manifest says, if another."""
        piece = Piece(self, -len(self._payload) - 1, len(payload) if length is None else length, encoding)
        self._payload += payload
        return piece

    def tensor(
        self, name: str, dtype: str, shape: Sequence[int], data: bytes, block_bytes: int
    ) -> list[Piece]:
        """Add a whole tensor, raw: a piece per block."""
        start = sum(len(entry[3]) for entry in self._tensors)
        self._tensors.append((name, dtype, shape, data))
        pieces = []
        for block in blocks_of(data, block_bytes):
            pieces.append(Piece(self, start, len(block), RAW))
            start += len(block)
        return pieces

    @property
    def data(self) -> bytes:
        """The object's bytes; asking for them finishes the pack."""
        if self._data is None:
            tensors = list(self._tensors)
            if self._payload or not tensors:
                tensors.append((PAYLOAD, "U8", [len(self._payload)], self._payload))
            nonce = {} if self.nonce is None else {"nonce": self.nonce}
            self._data = safetensors(tensors, **nonce)
        return self._data

    @property
    def key(self) -> str:
        """Its key."""
        return f"packs/{claim_text(self.claim)}/{sha256(self.data)}.safetensors"

    @property
    def entry(self) -> Members:
        """Its entry in a pack table."""
        return {"key": self.key, "size": len(self.data)}

    def offset(self, start: int) -> int:
        """Where a piece lies in the object: a payload's `start` is negative."""
        data_start = 8 + int.from_bytes(self.data[:8], "little")
        if start >= 0:
            return data_start + start
        return data_start + sum(len(entry[3]) for entry in self._tensors) - start - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a pack, and its encoding."""

    pack: Pack | External
    start: int
    length: int
    encoding: int

    @property
    def offset(self) -> int:
        """Counted from the start of the object."""
        return self.start if isinstance(self.pack, External) else self.pack.offset(self.start)


Chain = list[Piece]


@dataclass(slots=True)
class Tensor:
    """A tensor of a version: its content, and per block its chain and `fresh`."""

    dtype: str
    shape: Sequence[int]
    data: bytes
    chains: list[Chain]
    fresh: list[int]


@dataclass(slots=True)
class Version:
    """The content of a commit."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def next(self) -> Version:
        """The same content once more, as a child has it: nothing is fresh."""
        tensors = {
            name: Tensor(t.dtype, t.shape, t.data, copy.copy(t.chains), [0] * len(t.chains))
            for name, t in self.tensors.items()
        }
        return Version(tensors, dict(self.files))

    def apply(self, name: str, block: int, piece: Piece, content: bytes, block_bytes: int = 256) -> None:
        """Put a piece on a block's chain; `content` is what the block then holds."""
        tensor = self.tensors[name]
        tensor.chains[block] = [*tensor.chains[block], piece]
        tensor.fresh[block] = NOT_FRESH if tensor.fresh[block] == NOT_FRESH else tensor.fresh[block] + 1
        self._put(tensor, block, content, block_bytes)

    def replace(
        self,
        name: str,
        block: int,
        chain: Chain,
        content: bytes,
        fresh: int = NOT_FRESH,
        block_bytes: int = 256,
    ) -> None:
        """Give a block another chain."""
        tensor = self.tensors[name]
        tensor.chains[block], tensor.fresh[block] = chain, fresh
        self._put(tensor, block, content, block_bytes)

    @staticmethod
    def _put(tensor: Tensor, block: int, content: bytes, block_bytes: int) -> None:
        start = block * block_bytes
        end = min(start + block_bytes, len(tensor.data))
        assert len(content) == end - start
        tensor.data = tensor.data[:start] + content + tensor.data[end:]

    def uses(self) -> dict[str, int]:
        """Keys of packs and files that it uses, with their sizes."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chain in tensor.chains:
                for piece in chain:
                    if isinstance(piece.pack, Pack):
                        found[piece.pack.key] = len(piece.pack.data)
        for claim, data in self.files.values():
            found[f"files/{claim_text(claim)}/{sha256(data)}"] = len(data)
        return dict(sorted(found.items()))
