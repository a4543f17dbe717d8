"""The log's records: parsed strictly, written sealed (SPEC 12.1). The descriptor is at home here, too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

from deltaformat import fields
from deltaformat.descriptor import (
    MAX_DESCRIPTOR_BYTES,
    Descriptor,
    encode_descriptor,
    parse_descriptor,
)
from deltaformat.digests import parse_root
from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    UnsupportedError,
)
from deltaformat.ijson import open_sealed, seal
from deltaformat.keys import KeyKind, parse_key, record_key

__all__ = [
    "MAX_BRANCHES",
    "MAX_DESCRIPTOR_BYTES",
    "MAX_MANIFESTS",
    "MAX_RECORD_BYTES",
    "Ancestor",
    "Claim",
    "Commit",
    "Descriptor",
    "Drop",
    "Fork",
    "Head",
    "ManifestRef",
    "ObjectRef",
    "Record",
    "Retire",
    "Tag",
    "check_name",
    "encode_descriptor",
    "encode_record",
    "parse_descriptor",
    "parse_record",
    "record_hash",
]

# DF-LIM-01: the second column of SPEC 16.
MAX_RECORD_BYTES: Final = 16 << 20
MAX_MANIFESTS: Final = 4096
MAX_MANIFEST_CONTENT: Final = 1 << 30
MAX_OBJECT_BYTES: Final = 1 << 40
MAX_BRANCHES: Final = 10_000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")

Ancestor = tuple[int, int, int]
"""Depth, seq and step of an ancestor."""

Extra = Mapping[str, Any]


def _extra() -> Extra:
    return {}


@dataclass(frozen=True, slots=True)
class Head:
    """The state of a branch.

    Attributes:
        seq: Its newest commit; None before the first.
        step: That commit's step.
        epoch: Number of claims so far.
        claim: seq of the newest claim; None if there was none.
        extra: Unknown members; no part of equality, since they are not part of the state.
    """

    seq: int | None
    step: int | None
    epoch: int
    claim: int | None
    extra: Extra = field(default_factory=_extra, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A pack or sidecar file: its key and size."""

    key: str
    size: int
    extra: Extra = field(default_factory=_extra, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest part: its key, its size as stored, and its size decompressed."""

    key: str
    size: int
    content_size: int
    extra: Extra = field(default_factory=_extra, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What all records have (SPEC 12.1). `kind` is the class's.

    Attributes:
        seq: Its number.
        prev: hex(SHA-256) of the record before it; None for seq 0.
        nonce: 32 random hex digits, by which a writer knows its own record.
        time: When it was written; informative.
        heads: The branches after it.
        last_tag: seq of the newest valid `tag` record before it.
        last_retire: seq of the newest valid `retire` record before it.
        requires: Features a reader must know.
        extra: Members that this version does not know; written again as they were (DF-VER-02).
    """

    kind: ClassVar[str]

    seq: int
    prev: str | None
    nonce: str
    time: str
    heads: Mapping[str, Head]
    last_tag: int | None
    last_retire: int | None
    requires: tuple[str, ...] = ()
    extra: Extra = field(default_factory=_extra, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Record):
    """A writer takes a branch; `host` and `pid` are for messages."""

    kind: ClassVar[str] = "claim"

    branch: str
    epoch: int
    host: str
    pid: int
    resume_from: int | None = None
    single_writer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Record):
    """A version of a branch."""

    kind: ClassVar[str] = "commit"

    branch: str
    claim: int
    step: int
    parent: int | None
    depth: int
    ancestors: tuple[Ancestor, ...]
    root: str
    manifests: tuple[ManifestRef, ...]
    objects_added: tuple[ObjectRef, ...] = ()
    objects_dropped: tuple[ObjectRef, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=_extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Record):
    """A new branch whose head is a commit of another."""

    kind: ClassVar[str] = "fork"

    branch: str
    source: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag(Record):
    """A name for a commit; without a target the name is removed."""

    kind: ClassVar[str] = "tag"

    name: str
    target: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Record):
    """A branch ends."""

    kind: ClassVar[str] = "drop"

    branch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire(Record):
    """Commits whose objects may be deleted."""

    kind: ClassVar[str] = "retire"

    commits: tuple[int, ...]


RECORD_TYPES: Final[Mapping[str, type[Record]]] = {
    kind.kind: kind for kind in (Claim, Commit, Fork, Tag, Drop, Retire)
}


def record_hash(data: bytes) -> str:
    """The hash that the next record's `prev` holds."""
    return hashlib.sha256(data).hexdigest()


def check_name(name: str, *, what: str = "branch", where: str = "") -> str:
    """Return a branch's or tag's name if it is one.

    Raises:
        MalformedError: It is not (DF-LOG-01).
    """
    if _NAME.fullmatch(name) is None:
        raise MalformedError(
            ErrorCode.VALUE_INVALID,
            f"{name[:160]!r} is no {what} name: 1 to 128 of A-Z a-z 0-9 . _ / -, the first a letter or digit",
            where=where,
        )
    return name


def parse_record(data: bytes, *, seq: int) -> Record:
    """Parse and check the record at the key of number `seq`; whether it is valid, its predecessors tell.

    Raises:
        LimitError, MalformedError, CorruptError: It is not a record, or not whole (DF-JSN-01, DF-JSN-03).
        UnsupportedError: A feature or kind that this version does not know (DF-VER-01, DF-LOG-03).
        InconsistentError: It is another record (DF-LOG-02).
    """
    where = record_key(seq)
    members = open_sealed(data, where=where, limit=MAX_RECORD_BYTES)
    fields.split_members(members, {"requires": fields.RECORD["requires"]}, where=where)
    requires = fields.check_requires(members["requires"], where=where)
    fields.split_members(members, {"kind": fields.RECORD["kind"]}, where=where)
    kind = RECORD_TYPES.get(members["kind"])
    if kind is None:
        raise UnsupportedError(
            ErrorCode.FORMAT_UNKNOWN,
            f"is a record of the kind {members['kind'][:80]!r}; a newer deltaformat may read it",
            where=where,
        )
    known, extra = fields.split_members(members, fields.RECORD, fields.KINDS[kind.kind], where=where)
    fields.check_natural(known["seq"], "seq", where)
    if known["seq"] != seq:
        raise InconsistentError(
            ErrorCode.RECORD_MISPLACED, f"holds record number {known['seq']}, not its own", where=where
        )
    if (known["prev"] is None) != (seq == 0):
        raise CorruptError(
            ErrorCode.CHAIN_BROKEN, "`prev` must be null in record 0 and nowhere else", where=where
        )
    if known["prev"] is not None:
        fields.check_text(fields.HEX_64, known["prev"], "prev", where)
    fields.check_text(fields.HEX_32, known["nonce"], "nonce", where)
    for name in ("last_tag", "last_retire"):
        fields.check_natural(known[name], name, where)
    known.update(heads=_parse_heads(known["heads"], where), requires=requires, extra=extra)
    _PARSERS[kind](known, where)
    del known["kind"], known["check"]
    return kind(**known)


def encode_record(record: Record) -> bytes:
    """Write a record.

    Raises:
        LimitError: More branches or bytes than a reader accepts (DF-LIM-01).
        MalformedError: A value that I-JSON cannot hold.
    """
    where = record_key(record.seq)
    members: dict[str, Any] = {
        "kind": record.kind,
        "seq": record.seq,
        "prev": record.prev,
        "nonce": record.nonce,
        "time": record.time,
        "heads": {
            branch: {
                "seq": head.seq,
                "step": head.step,
                "epoch": head.epoch,
                "claim": head.claim,
                **head.extra,
            }
            for branch, head in record.heads.items()
        },
        "last_tag": record.last_tag,
        "last_retire": record.last_retire,
        "requires": list(record.requires),
    }
    for name in fields.KINDS[record.kind]:
        members[name] = _to_json(getattr(record, name))
    data = seal(members | dict(record.extra))
    if len(record.heads) > MAX_BRANCHES or len(data) > MAX_RECORD_BYTES:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED,
            f"{len(record.heads)} branches and {len(data)} bytes are more than a record may have"
            f" ({MAX_BRANCHES} and {MAX_RECORD_BYTES}); drop branches, or write larger packs",
            where=where,
        )
    return data


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, ObjectRef):
        return {"key": value.key, "size": value.size, **value.extra}
    if isinstance(value, ManifestRef):
        return {"key": value.key, "size": value.size, "content_size": value.content_size, **value.extra}
    return value


def _parse_heads(heads: Mapping[str, Any], where: str) -> dict[str, Head]:
    if len(heads) > MAX_BRANCHES:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED,
            f"has {len(heads)} branches, at most {MAX_BRANCHES} are read",
            where=where,
        )
    parsed: dict[str, Head] = {}
    for branch, members in heads.items():
        check_name(branch, where=where)
        place = f"{where}, head of {branch}"
        if not isinstance(members, dict):
            raise MalformedError(ErrorCode.JSON_INVALID, "must be an object", where=place)
        known, extra = fields.split_members(members, fields.HEAD, where=place)
        for name, value in known.items():
            fields.check_natural(value, name, place)
        parsed[branch] = Head(**known, extra=extra)
    return parsed


def _parse_claim(known: dict[str, Any], where: str) -> None:
    check_name(known["branch"], where=where)
    for name in ("epoch", "resume_from"):
        fields.check_natural(known[name], name, where)


def _parse_commit(known: dict[str, Any], where: str) -> None:
    check_name(known["branch"], where=where)
    for name in ("claim", "step", "parent", "depth"):
        fields.check_natural(known[name], name, where)
    for entry in known["ancestors"]:
        if len(entry) != 3 or not all(map(fields.is_natural, entry)):
            raise MalformedError(
                ErrorCode.VALUE_INVALID, "an entry of `ancestors` is not [depth, seq, step]", where=where
            )
    known["ancestors"] = tuple((depth, seq, step) for depth, seq, step in known["ancestors"])
    parse_root(known["root"], where=where)
    if not known["manifests"]:
        raise MalformedError(ErrorCode.VALUE_INVALID, "`manifests` is empty", where=where)
    if len(known["manifests"]) > MAX_MANIFESTS:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED,
            f"has {len(known['manifests'])} manifests, at most {MAX_MANIFESTS} are read",
            where=where,
        )
    known["manifests"] = _parse_refs(ManifestRef, known["manifests"], (KeyKind.MANIFEST,), "manifests", where)
    if len({ref.key for ref in known["manifests"]}) != len(known["manifests"]):
        raise MalformedError(ErrorCode.VALUE_INVALID, "`manifests` names a part twice", where=where)
    for name in ("objects_added", "objects_dropped"):
        known[name] = _parse_refs(ObjectRef, known[name], (KeyKind.PACK, KeyKind.FILE), name, where)


def _parse_fork(known: dict[str, Any], where: str) -> None:
    check_name(known["branch"], where=where)
    for name in ("source", "step"):
        fields.check_natural(known[name], name, where)


def _parse_tag(known: dict[str, Any], where: str) -> None:
    check_name(known["name"], what="tag", where=where)
    fields.check_natural(known["target"], "target", where)


def _parse_drop(known: dict[str, Any], where: str) -> None:
    check_name(known["branch"], where=where)


def _parse_retire(known: dict[str, Any], where: str) -> None:
    for seq in known["commits"]:
        fields.check_natural(seq, "commits", where)
    known["commits"] = tuple(known["commits"])


_PARSERS: Final = {
    Claim: _parse_claim,
    Commit: _parse_commit,
    Fork: _parse_fork,
    Tag: _parse_tag,
    Drop: _parse_drop,
    Retire: _parse_retire,
}

_OBJECT: Final[fields.Fields] = {"key": "string", "size": "integer"}
_MANIFEST: Final[fields.Fields] = {**_OBJECT, "content_size": "integer"}

Ref = TypeVar("Ref", ObjectRef, ManifestRef)


def _parse_refs(
    kind: type[Ref], entries: Iterable[Mapping[str, Any]], allowed: Sequence[KeyKind], name: str, where: str
) -> tuple[Ref, ...]:
    table = _MANIFEST if kind is ManifestRef else _OBJECT
    place = f"{where}, {name}"
    refs: list[Ref] = []
    for entry in entries:
        known, extra = fields.split_members(entry, table, where=place)
        if parse_key(known["key"], where=place).kind not in allowed:  # DF-KEY-01
            raise MalformedError(
                ErrorCode.VALUE_INVALID, f"{known['key']!r} is a key of another kind of object", where=place
            )
        for member in table:
            if member != "key":
                fields.check_natural(known[member], member, place)
        if known["size"] > MAX_OBJECT_BYTES or known.get("content_size", 0) > MAX_MANIFEST_CONTENT:
            raise LimitError(
                ErrorCode.LIMIT_EXCEEDED, f"{known['key']} is stated larger than is read", where=place
            )
        refs.append(kind(**known, extra=extra))
    return tuple(refs)
