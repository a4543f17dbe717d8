"""Packs: encoded blocks in safetensors files, and a strict reader of safetensors headers (SPEC 10).

Readers of a store never look at a pack's header (DF-PCK-03): manifests hold byte ranges. The parser is for
`import`, whose files come from anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

import numpy as np
import numpy.typing as npt

from deltaformat.blocks import MAX_NAME_BYTES, Buffer, byte_view
from deltaformat.dtypes import get_dtype, tensor_nbytes
from deltaformat.errors import ErrorCode, LimitError, MalformedError

__all__ = [
    "MAX_HEADER_BYTES",
    "MAX_OBJECT_BYTES",
    "PAYLOAD",
    "ExternalRef",
    "FileRef",
    "Pack",
    "PackBuilder",
    "PackEntry",
    "PackRef",
    "SafetensorsEntry",
    "SafetensorsHeader",
    "parse_safetensors",
    "safetensors_data_start",
    "safetensors_header",
]


PAYLOAD = "deltaformat.payload"
METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors libraries accept too."""
MAX_OBJECT_BYTES = 1 << 40
"""Packs and external objects above this are refused (DF-LIM-01)."""

_ENTRY_OVERHEAD = len(':{"dtype":"","shape":[],"data_offsets":[,]},') + 2 * len(str(MAX_OBJECT_BYTES))
_FIXED_OVERHEAD = (
    8 + len('{"__metadata__":{"format":"pt","nonce":""},}') + len(PAYLOAD) + 4 + _ENTRY_OVERHEAD + 8
)


@dataclass(frozen=True, slots=True)
class PackRef:
    """A pack of this store, as a pack table names it."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class ExternalRef:
    """An immutable object outside the store, as a pack table names it (SPEC 10.2)."""

    url: str
    size: int
    sha256: str


PackEntry = PackRef | ExternalRef


@dataclass(frozen=True, slots=True)
class FileRef:
    """A sidecar file: its path in the version, and the object that holds it."""

    path: str
    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A finished pack, as views of the buffers it was built from.

    Attributes:
        chunks: The file's bytes, in order.
        size: Their number.
        offsets: Where each slot lies in the file, shape (slots,).
    """

    chunks: tuple[memoryview, ...]
    size: int
    offsets: npt.NDArray[np.int64]

    def sha256(self) -> str:
        """hex(SHA-256) of the file. Its header comes first and is known last: nothing is hashed before."""
        digest = hashlib.sha256()
        for chunk in self.chunks:
            digest.update(chunk)
        return digest.hexdigest()


class PackBuilder:
    """Collects payloads and whole tensors into one safetensors file (DF-PCK-01, DF-PCK-02).

    Nothing is copied: buffers must stay as they are until the pack has been written. Each is known by its
    slot, a number from 0, since its offset is not known before `finish`.
    """

    def __init__(self, nonce: str = "") -> None:
        self._nonce = nonce
        self._payload: list[tuple[int, memoryview]] = []
        self._tensors: dict[str, tuple[int, int, str, tuple[int, ...], memoryview]] = {}
        self._slots = 0
        self._data_bytes = 0
        self._header_bytes = _FIXED_OVERHEAD + len(nonce)

    @property
    def size(self) -> int:
        """Bytes of the file so far: an upper bound, a few dozen bytes above what `finish` gives."""
        return self._header_bytes + self._data_bytes

    @property
    def header_full(self) -> bool:
        """Whether another tensor's name might make the header longer than safetensors libraries accept."""
        return self._header_bytes + 6 * MAX_NAME_BYTES + 1024 > MAX_HEADER_BYTES

    def add(self, payload: Buffer) -> int:
        """Add one piece's payload and return its slot."""
        view = byte_view(payload)
        if not view.nbytes:
            raise MalformedError(ErrorCode.INPUT_INVALID, "a piece has at least one byte (DF-PCK-04)")
        return self._add_payload(view)

    def add_tensor(self, name: str, dtype: str, shape: Sequence[int], data: Buffer) -> int:
        """Add a whole tensor's canonical bytes under its own name, and return its slot.

        A name that such a file gives another meaning, or that it has already, goes into the payload.

        Args:
            name: The tensor's name.
            dtype: Its dtype name.
            shape: Its logical shape.
            data: Its canonical bytes; a tensor without bytes has no blocks and needs no pack.

        Raises:
            MalformedError: `data` does not have the bytes that dtype and shape say, or none.
        """
        view = byte_view(data)
        known = get_dtype(dtype, where=name)
        if not view.nbytes or view.nbytes != tensor_nbytes(known, shape, where=name):
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                f"{view.nbytes} bytes are not a {dtype} tensor of shape {list(shape)}",
                where=name,
            )
        if name in (PAYLOAD, METADATA) or name in self._tensors or self.header_full:
            return self._add_payload(view)
        slot = self._next(view)
        self._tensors[name] = (slot, known.bits, dtype, tuple(shape), view)
        digits = sum(len(str(dim)) + 1 for dim in shape)
        self._header_bytes += len(_json_string(name)) + len(dtype) + digits + _ENTRY_OVERHEAD
        return slot

    def finish(self) -> Pack:
        """Lay the file out: tensors by falling element size, so that each is aligned, then the payload."""
        tensors = sorted(self._tensors.items(), key=lambda item: -item[1][1])
        entries = [(name, dtype, shape, view.nbytes) for name, (_, _, dtype, shape, view) in tensors]
        payload_bytes = sum(view.nbytes for _, view in self._payload)
        if self._payload:
            entries.append((PAYLOAD, "U8", (payload_bytes,), payload_bytes))
        metadata = {"format": "pt"} if tensors else {}
        if self._nonce:
            metadata["nonce"] = self._nonce
        header = safetensors_header(entries, metadata)
        chunks = [memoryview(header)]
        offsets = np.zeros(self._slots, np.int64)
        position = len(header)
        for slot, view in [*((entry[0], entry[4]) for _, entry in tensors), *self._payload]:
            offsets[slot] = position
            position += view.nbytes
            chunks.append(view)
        return Pack(tuple(chunks), position, offsets)

    def _add_payload(self, view: memoryview) -> int:
        slot = self._next(view)
        self._payload.append((slot, view))
        return slot

    def _next(self, view: memoryview) -> int:
        slot = self._slots
        self._slots += 1
        self._data_bytes += view.nbytes
        return slot


def _json_string(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


def safetensors_header(
    entries: Sequence[tuple[str, str, Sequence[int], int]], metadata: dict[str, str] | None = None
) -> bytes:
    """Make the head of a safetensors file, padded so that the data begins at a multiple of 8.

    Args:
        entries: Name, dtype name, shape and bytes of each tensor, in the order of their data.
        metadata: The file's `__metadata__`.
    """
    header: dict[str, object] = {METADATA: metadata} if metadata else {}
    position = 0
    for name, dtype, shape, nbytes in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor of a safetensors file; `start` and `end` count from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a safetensors header says: tensors in the order of their data, metadata, where data begins."""

    tensors: dict[str, SafetensorsEntry]
    metadata: dict[str, str]
    data_start: int


def safetensors_data_start(prefix: Buffer, size: int, *, where: str = "") -> int:
    """Read from a file's first 8 bytes where its data begins, before its header is fetched (DF-LIM-02).

    Args:
        prefix: At least the first 8 bytes, if the file has as many.
        size: Size of the whole file.
        where: What an error should name.

    Raises:
        MalformedError: The file is too short for what it declares (pack-invalid).
        LimitError: The header is longer than safetensors libraries accept.
    """
    view = byte_view(prefix)
    if size < 8 or view.nbytes < 8:
        _invalid("it is too short to be a safetensors file", where)
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED,
            f"a header of {length} bytes exceeds {MAX_HEADER_BYTES}; it may not be safetensors",
            where=where,
        )
    if 8 + length > size:
        _invalid(f"a header of {length} bytes does not fit into {size} bytes; the file may be cut", where)
    return 8 + length


def parse_safetensors(head: Buffer, size: int, *, where: str = "") -> SafetensorsHeader:
    """Parse a safetensors header: names once, sizes right, no gap and no overlap (DF-PCK-01).

    Args:
        head: The file's first bytes, at least up to where its data begins; a map of the whole file will do.
        size: Size of the whole file.
        where: What an error should name.

    Raises:
        MalformedError: It is not a valid header (pack-invalid).
        LimitError: It is longer than safetensors libraries accept.
        UnsupportedError: A tensor has a dtype outside SPEC 8.1.
    """
    data_start = safetensors_data_start(head, size, where=where)
    view = byte_view(head)
    if view.nbytes < data_start:
        _invalid(f"only {view.nbytes} of {data_start} header bytes are there", where)
    header = _load(bytes(view[8:data_start]), where)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _invalid("__metadata__ is not a map of strings", where)
    tensors = {name: _entry(name, entry, data_start, where) for name, entry in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    position = data_start
    for name, entry in ordered.items():
        if entry.start != position:
            _invalid(
                f"tensor {name[:80]!a} begins at {entry.start}, the one before it ends at {position}",
                where,
            )
        position = entry.end
    if position != size:
        _invalid(f"its tensors end at {position}, the file at {size}", where)
    return SafetensorsHeader(ordered, metadata, data_start)


def _load(text: bytes, where: str) -> dict[str, Any]:
    """JSON without duplicate names, fractions or lone surrogates; too deep nesting overflows harmlessly."""
    if not text.startswith(b"{"):
        _invalid("its header does not begin with {", where)
    try:
        header = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_float=_no_number, parse_constant=_no_number
        )
        json.dumps(list(header), ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        _invalid(f"its header is not valid JSON ({str(error)[:100]})", where)
    assert isinstance(header, dict)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not an integer")


def _entry(name: str, entry: object, data_start: int, where: str) -> SafetensorsEntry:
    if not isinstance(entry, dict):
        _invalid(f"tensor {name[:80]!a} is not described by an object", where)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        _invalid(f"tensor {name[:80]!a} lacks a dtype, shape or data_offsets of the right types", where)
    start, end = offsets
    try:
        nbytes = tensor_nbytes(get_dtype(dtype, where=where), shape)
    except MalformedError as error:
        _invalid(f"tensor {name[:80]!a}: {error.message}", where)
    if end - start != nbytes:
        _invalid(
            f"tensor {name[:80]!a} has {end - start} bytes where {dtype} {shape[:32]} takes {nbytes}", where
        )
    return SafetensorsEntry(dtype, tuple(shape), data_start + start, data_start + end)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _invalid(message: str, where: str) -> NoReturn:
    raise MalformedError(ErrorCode.PACK_INVALID, message, where=where)
