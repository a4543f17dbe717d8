"""Stores taken apart, changed at random in one place, and put together with every hash above it made anew."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa
import zstandard

from vectors.arrowfile import Column, arrow_file
from vectors.primitives import block_digest, dump, frame, leaf, root, seal, sha256

__all__ = ["Decode", "can_be_mutated", "mutate"]

Objects = dict[str, bytes]
Decode = Callable[[int, bytes, bytes], bytes | None]
"""Decodes a payload onto a base (zeros where none is needed): encoding, payload, base."""

_KINDS = {
    "name": "utf8",
    "dtype": "utf8",
    "shape": "list:int64",
    "digest": "",
    "fresh": "list:uint8",
    "depth": "list:uint8",
    "pack": "list:uint32",
    "gap": "list:int64",
    "length": "list:uint32",
    "encoding": "list:uint8",
}
_RANGES = {"int64": (-(2**63), 2**63 - 1), "uint8": (0, 255), "uint32": (0, 2**32 - 1)}
_DTYPES = ("U8", "BF16", "F32", "F4", "F6_E2M3", "C64", "I64", "F9", "")
_NUMBERS = (0, 1, -1, 2, 255, 256, 2**31, 2**32, 2**53 - 1, 2**53, 2**63, 1.5)


@dataclass(slots=True)
class _Part:
    """A manifest part taken apart."""

    columns: dict[str, list[Any]]
    meta: dict[str, Any]
    content: Callable[[bytes], bytes] = lambda data: data
    packed: Callable[[bytes], bytes] = lambda data: data
    text: Callable[[bytes], bytes] = lambda data: data


class _Model:
    """A store taken apart."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = {k: v for k, v in objects.items() if k.split("/")[0] not in ("log", "manifests")}
        self.descriptor = _unsealed(self.objects.pop("deltaformat.json"))
        self.records: list[Any] = [
            _unsealed(objects[key]) for key in sorted(k for k in objects if k.startswith("log/"))
        ]
        self.parts = {key: _part(objects[key]) for key in objects if key.startswith("manifests/")}
        self.texts: dict[int, Callable[[bytes], bytes]] = {}
        self.descriptor_text: Callable[[bytes], bytes] = lambda data: data
        self.keep: set[str] = set()

    def build(self) -> Objects:
        """Put it together; what `keep` names is not made anew."""
        out = {key: data for key, data in self.objects.items() if not key.startswith("packs/0")}
        moved: dict[str, str] = {}
        for key, data in self.objects.items():
            if key.startswith("packs/0"):
                moved[key] = f"{key.rpartition('/')[0]}/{sha256(data)}.safetensors"
                out[moved[key]] = data
        sizes = {new: len(out[new]) for new in moved.values()}
        parts: dict[str, dict[str, Any]] = {}
        for key, part in self.parts.items():
            if "packs" not in self.keep:
                _rename(part.meta.get("packs"), moved, sizes)
            content = part.content(self._arrow(part))
            data = part.packed(frame(content))
            new = f"{key.rpartition('/')[0]}/{sha256(data)}.arrow.zst"
            out[new] = data
            parts[key] = {"key": new, "size": len(data), "content_size": len(content)}
        out["deltaformat.json"] = seal(self.descriptor_text(dump(self.descriptor)))
        prev = None
        for seq, record in enumerate(self.records):
            if isinstance(record, dict):
                self._renew(record, parts, moved, sizes)
                if "prev" not in self.keep:
                    record["prev"] = prev
                data = dump(record)
            else:
                data = record
            data = seal(self.texts[seq](data) if seq in self.texts else data)
            out[f"log/{seq:020}.json"] = data
            prev = sha256(data)
        return out

    def _arrow(self, part: _Part) -> bytes:
        kinds = dict(_KINDS)
        width = next((len(d) for row in part.columns["digest"] for d in row), 16)
        kinds["digest"] = f"list:fixed:{width}"
        columns = [Column(name, kind, part.columns[name]) for name, kind in kinds.items()]
        return arrow_file(columns, [(b"deltaformat", part.text(dump(part.meta)))])

    def _renew(
        self,
        record: dict[str, Any],
        parts: Mapping[str, Mapping[str, Any]],
        moved: Mapping[str, str],
        sizes: Mapping[str, int],
    ) -> None:
        if record.get("kind") != "commit":
            return
        if "root" not in self.keep:
            # Names and shapes that no root can be of are refused before it is looked at.
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
                record["root"] = self._root([self.parts[entry["key"]] for entry in record["manifests"]])
        if "manifests" not in self.keep and isinstance(record.get("manifests"), list):
            for entry in record["manifests"]:
                if isinstance(entry, dict):
                    entry.update(parts.get(str(entry.get("key")), {}))
        for name in ("objects_added", "objects_dropped"):
            if name not in self.keep:
                _rename(record.get(name), moved, sizes)

    def _root(self, parts: list[_Part]) -> str:
        digest, block_bytes = self.descriptor["digest"], self.descriptor["block_bytes"]
        leaves = {}
        for part in parts:
            c = part.columns
            for name, dtype, shape, digests in zip(
                c["name"], c["dtype"], c["shape"], c["digest"], strict=True
            ):
                leaves[name] = leaf(name, dtype, shape, digests)
        return root(digest, block_bytes, leaves)

    # -- what is changed -------------------------------------------------------------------------------------

    def change_record(self, rng: Random) -> str:
        """A member of a record, or its text."""
        seq = rng.randrange(max(0, len(self.records) - 2), len(self.records))
        if rng.random() < 0.3:
            self.texts[seq] = _text(rng)
            return f"the text of record {seq}"
        path = _change(rng, self.records[seq])
        self.keep.add(path.split(".")[0])
        return f"record {seq}: {path}"

    def append_record(self, rng: Random) -> str:
        """A record more: one that there is, somewhat changed."""
        seq = rng.randrange(len(self.records))
        record = copy.deepcopy(self.records[seq])
        record["seq"] = len(self.records)
        newest = self.records[-1]
        for name in ("heads", "last_tag", "last_retire"):
            record[name] = copy.deepcopy(newest[name])
        if newest["kind"] in ("tag", "retire"):
            record[f"last_{newest['kind']}"] = len(self.records) - 1
        branch = record.get("branch")
        if record["kind"] in ("claim", "commit") and rng.random() < 0.7:
            head = record["heads"].setdefault(branch, {"seq": None, "step": None, "epoch": 0, "claim": None})
            if record["kind"] == "claim":
                record["epoch"] = head["epoch"] + 1
                head.update(epoch=head["epoch"] + 1, claim=record["seq"])
            else:
                head.update(seq=record["seq"], step=record["step"])
        words = ""
        if rng.random() < 0.5:
            words = f", but for {_change(rng, record)}"
        self.records.append(record)
        return f"record {seq} once more{words}"

    def drop_record(self, rng: Random) -> str:
        """A record less."""
        del self.records[-1]
        return "the newest record is left out"

    def change_descriptor(self, rng: Random) -> str:
        """A member of the descriptor, or its text."""
        if rng.random() < 0.4:
            self.descriptor_text = _text(rng)
            return "the text of the descriptor"
        return f"descriptor: {_change(rng, self.descriptor)}"

    def change_metadata(self, rng: Random) -> str:
        """A member of a manifest's metadata, or its text."""
        part = self._any_part(rng)
        if rng.random() < 0.3:
            part.text = _text(rng)
            return "the text of a manifest's metadata"
        path = _change(rng, part.meta)
        self.keep.add(path.split(".")[0])
        return f"metadata: {path}"

    def change_column(self, rng: Random) -> str:
        """A value of a column."""
        part = self._any_part(rng)
        name = rng.choice(list(_KINDS))
        rows = part.columns[name]
        if not rows:
            return "nothing: no rows"
        number = rng.randrange(len(rows))
        if name in ("name", "dtype"):
            others = (
                (*_DTYPES, *part.columns["dtype"]) if name == "dtype" else ("", "x", *part.columns["name"])
            )
            rows[number] = rng.choice(others)
        else:
            rows[number] = self._list(rng, name, list(rows[number]))
        return f"column {name}, row {number}"

    def _list(self, rng: Random, name: str, row: list[Any]) -> list[Any]:
        choice = rng.random()
        if not row or choice < 0.1:
            return row + row[:1]
        at = rng.randrange(len(row))
        if choice < 0.2:
            return row[:at] + row[at + 1 :]
        if choice < 0.3 and len(row) > 1:
            other = rng.randrange(len(row))
            row[at], row[other] = row[other], row[at]
        elif name == "digest":
            row[at] = _bits(rng, row[at])
        else:
            low, high = _RANGES[_KINDS[name].rpartition(":")[2]]
            value = rng.choice(
                (row[at] + 1, row[at] - 1, 0, 1, 255, low, high, row[at] ^ 1 << rng.randrange(8))
            )
            row[at] = min(max(value, low), high)
        return row

    def change_content(self, rng: Random) -> str:
        """Bytes of an Arrow file, inside a sound frame."""
        self._any_part(rng).content = _bytes(rng)
        return "bytes of an Arrow file"

    def change_frame(self, rng: Random) -> str:
        """Bytes of a manifest's frame."""
        self._any_part(rng).packed = _bytes(rng)
        return "bytes of a manifest's frame"

    def _any_part(self, rng: Random) -> _Part:
        return self.parts[rng.choice(sorted(self.parts))]

    def change_payload(self, rng: Random, decode: Decode) -> str:
        """Bytes of a piece; digests are made anew where it still decodes."""
        part = self._any_part(rng)
        found = list(_pieces(part))
        found = [piece for piece in found if piece.key in self.objects]
        if not found:
            return "nothing: no pieces"
        piece = rng.choice(found)
        data = bytearray(self.objects[piece.key])
        old = bytes(data[piece.offset : piece.offset + piece.length])
        new = old
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            new = _bits(rng, new) if rng.random() < 0.6 else _byte(rng, new)
        data[piece.offset : piece.offset + piece.length] = new
        self.objects[piece.key] = bytes(data)
        if rng.random() < 0.9:
            self._redigest(decode)
        return f"payload of piece {piece.number} of row {piece.row}, encoding {piece.encoding}"

    def _redigest(self, decode: Decode) -> None:
        """Give every block that decodes the digest of what it now is."""
        for part in self.parts.values():
            blocks: dict[tuple[int, int], bytes | None] = {}
            for piece in _pieces(part):
                place = piece.row, piece.block
                base = blocks.get(place, bytes(self._block_size(part, *place)))
                data = self.objects.get(piece.key)
                if base is None or data is None:
                    blocks[place] = None
                    continue
                payload = data[piece.offset : piece.offset + piece.length]
                blocks[place] = decode(piece.encoding, payload, base)
            for (row, block), content in blocks.items():
                if content is not None:
                    part.columns["digest"][row][block] = block_digest(self.descriptor["digest"], content)

    def _block_size(self, part: _Part, row: int, block: int) -> int:
        from vectors.primitives import DTYPES

        count = 1
        for dim in part.columns["shape"][row]:
            count *= dim
        size = count * DTYPES[part.columns["dtype"][row]][0] // 8
        block_bytes = int(self.descriptor["block_bytes"])
        return max(0, min(size - block * block_bytes, block_bytes))


@dataclass(frozen=True, slots=True)
class _Piece:
    row: int
    block: int
    number: int
    key: str
    offset: int
    length: int
    encoding: int


def _pieces(part: _Part) -> list[_Piece]:
    found = []
    ends: dict[int, int] = {}
    c = part.columns
    for row in range(len(c["name"])):
        number = 0
        for block, depth in enumerate(c["depth"][row]):
            for _ in range(depth):
                pack, length = c["pack"][row][number], c["length"][row][number]
                offset = ends.get(pack, 0) + c["gap"][row][number]
                ends[pack] = offset + length
                key = part.meta["packs"][pack].get("key", "")
                found.append(_Piece(row, block, number, key, offset, length, c["encoding"][row][number]))
                number += 1
    return found


def _unsealed(data: bytes) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(data)
    del members["check"]
    return members


def _part(data: bytes) -> _Part:
    content = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
    columns = {name: table.column(name).to_pylist() for name in _KINDS}
    return _Part(columns, json.loads(table.schema.metadata[b"deltaformat"]))


def _rename(entries: Any, moved: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and str(entry.get("key")) in moved:
            entry["key"] = moved[str(entry["key"])]
            entry["size"] = sizes[entry["key"]]


# -- changes of bytes and of JSON ----------------------------------------------------------------------------


def _bits(rng: Random, data: bytes) -> bytes:
    if not data:
        return data
    out = bytearray(data)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _byte(rng: Random, data: bytes) -> bytes:
    if not data:
        return data
    out = bytearray(data)
    out[rng.randrange(len(out))] = rng.choice((0, 1, 2, 127, 128, 254, 255, rng.randrange(256)))
    return bytes(out)


def _any_bytes(rng: Random, data: bytes) -> bytes:
    """Flip, set, cut, insert, double or clear."""
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice((1, 1, 2, 4, 8, 16, 64)))
    return rng.choice(
        (
            _bits(rng, data),
            _bits(rng, data),
            _byte(rng, data),
            data[:start],
            data[:start] + data[stop:],
            data[:stop] + data[start:],
            data[:start] + rng.randbytes(stop - start) + data[start:],
            data[:start] + bytes(stop - start) + data[stop:],
            data + rng.randbytes(1),
        )
    )


def _bytes(rng: Random) -> Callable[[bytes], bytes]:
    seed = rng.random()
    return lambda data: _any_bytes(Random(seed), data)


def _text(rng: Random) -> Callable[[bytes], bytes]:
    """Changes the text of a JSON object before it is sealed."""
    seed = rng.random()

    def change(data: bytes) -> bytes:
        inner = Random(seed)
        if inner.random() < 0.4:
            return _any_bytes(inner, data)
        at = inner.randrange(1, len(data))
        token = inner.choice(
            (
                b" ",
                b"\n",
                b",",
                b'"',
                b"{",
                b"}",
                b"[",
                b"]",
                b":",
                b"0",
                b"-",
                b".",
                b"e5",
                b"null",
                b"\\u0000",
                b"\\ud800",
                b"\xff",
                b"\xc3",
                b"\xe2\x80\xa8",
                b'"a":1,',
                b"1",
                b"true",
            )
        )
        return data[:at] + token + data[at:]

    return change


def _paths(value: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((key,))
        found += [(key, *path) for path in _paths(inner)]
    return found


def _change(rng: Random, members: dict[str, Any]) -> str:
    """Change one member, wherever it is; return its path."""
    path = rng.choice(_paths(members))
    inner: Any = members
    for key in path[:-1]:
        inner = inner[key]
    key = path[-1]
    choice = rng.random()
    if choice < 0.15:
        del inner[key]
    elif choice < 0.25 and isinstance(inner, dict):
        inner[str(key) + "x"] = inner.pop(key)
    elif choice < 0.3 and isinstance(inner, list):
        inner.append(copy.deepcopy(inner[key]))
    else:
        inner[key] = _other(rng, inner[key])
    return ".".join(map(str, path))


def _other(rng: Random, value: Any) -> Any:
    if rng.random() < 0.2:
        return rng.choice((None, True, False, 0, "", [], {}, "x", [1], {"a": 1}))
    if isinstance(value, bool) or value is None:
        return rng.choice((0, 1, None, True, False))
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, *_NUMBERS))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        letter = rng.choice("0af/.-_ AZ\n\x00\u00e9")
        return rng.choice(
            (value[:at] + letter + value[at:], value[:at] + value[at + 1 :], value + "/..", value.upper())
        )
    if isinstance(value, list):
        return rng.choice((value * 2, value[:-1], value[::-1], [*value, None]))
    return rng.choice(({}, {**value, "": 1}))


def _needed(objects: Mapping[str, bytes]) -> list[str]:
    """Keys whose faults every reader sees, or none: of the records only the newest two (SPEC 13)."""
    log = sorted(key for key in objects if key.startswith("log/"))
    return sorted(set(objects) - set(log[:-2]))


def can_be_mutated(objects: Mapping[str, bytes]) -> bool:
    """Whether a store can be taken apart: valid ones may hold objects that nobody needs and are no JSON."""
    try:
        _Model(objects)
    except (ValueError, KeyError, TypeError, pa.ArrowException, OSError, zstandard.ZstdError):
        return False
    return True


def mutate(objects: Mapping[str, bytes], rng: Random, decode: Decode) -> tuple[Objects, str]:
    """Change a valid store in one place.

    Args:
        objects: Its objects.
        rng: Decides everything.
        decode: For payloads that are changed and still decode.

    Returns:
        The objects, and what was changed in words.
    """
    if rng.random() < 0.1:
        out = dict(objects)
        key = rng.choice(_needed(out))
        hole = key.startswith("log/") and key != max(out, key=lambda k: (k.startswith("log/"), k))
        if rng.random() < 0.1 and not hole:
            del out[key]
            return out, f"{key} is missing"
        out[key] = _any_bytes(rng, out[key])
        return out, f"bytes of {key}, no hash made anew"
    model = _Model(objects)
    changes: list[tuple[int, Callable[[], str]]] = [
        (3, lambda: model.change_record(rng)),
        (2, lambda: model.append_record(rng)),
        (1, lambda: model.change_descriptor(rng)),
    ]
    if len(model.records) > 1:
        changes.append((1, lambda: model.drop_record(rng)))
    if model.parts:
        changes += [
            (2, lambda: model.change_metadata(rng)),
            (3, lambda: model.change_column(rng)),
            (3, lambda: model.change_content(rng)),
            (1, lambda: model.change_frame(rng)),
            (6, lambda: model.change_payload(rng, decode)),
        ]
    weights = [weight for weight, _ in changes]
    words = rng.choices([change for _, change in changes], weights)[0]()
    return model.build(), words
