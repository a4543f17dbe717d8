"""The keys of a store's objects (SPEC 6): made and parsed here and nowhere else."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from deltaformat.errors import CorruptError, ErrorCode, MalformedError

__all__ = [
    "DESCRIPTOR",
    "TAIL_HINT",
    "KeyKind",
    "ParsedKey",
    "check_object",
    "claim_of",
    "external_key",
    "file_key",
    "manifest_key",
    "pack_key",
    "parse_key",
    "probe_key",
    "record_key",
]

DESCRIPTOR: Final = "deltaformat.json"
TAIL_HINT: Final = "hints/tail.json"


class KeyKind(Enum):
    """What lies under a key."""

    DESCRIPTOR = "descriptor"
    RECORD = "record"
    MANIFEST = "manifest"
    PACK = "pack"
    EXTERNAL = "external"
    FILE = "file"
    TAIL_HINT = "tail hint"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A key and its parts.

    Attributes:
        key: The key itself.
        kind: What lies there.
        seq: A record's number.
        claim: The seq of the claim under which the object was written.
        sha256: The hash of the object's bytes, 64 hex digits.
    """

    key: str
    kind: KeyKind
    seq: int | None = None
    claim: int | None = None
    sha256: str | None = None


# DF-KEY-01: the grammar in full. No name given by a user is part of a key (DF-KEY-03).
_GRAMMAR: Final = {
    KeyKind.DESCRIPTOR: re.compile(r"deltaformat\.json"),
    KeyKind.RECORD: re.compile(r"log/(?P<seq>[0-9]{20})\.json"),
    KeyKind.MANIFEST: re.compile(r"manifests/(?P<claim>[0-9]{20})/(?P<sha256>[0-9a-f]{64})\.arrow\.zst"),
    KeyKind.PACK: re.compile(r"packs/(?P<claim>[0-9]{20})/(?P<sha256>[0-9a-f]{64})\.safetensors"),
    KeyKind.EXTERNAL: re.compile(r"packs/external/(?P<sha256>[0-9a-f]{64})"),
    KeyKind.FILE: re.compile(r"files/(?P<claim>[0-9]{20})/(?P<sha256>[0-9a-f]{64})"),
    KeyKind.TAIL_HINT: re.compile(r"hints/tail\.json"),
    KeyKind.PROBE: re.compile(r"hints/probe-[0-9a-f]{32}"),
}


def parse_key(key: str, *, where: str = "") -> ParsedKey:
    """Parse a key.

    Raises:
        MalformedError: It does not match the grammar in full (DF-KEY-01).
    """
    for kind, pattern in _GRAMMAR.items():
        match = pattern.fullmatch(key)
        if match is not None:
            parts = match.groupdict()
            seq, claim = parts.get("seq"), parts.get("claim")
            return ParsedKey(
                key=key,
                kind=kind,
                seq=None if seq is None else int(seq),
                claim=None if claim is None else int(claim),
                sha256=parts.get("sha256"),
            )
    raise MalformedError(ErrorCode.VALUE_INVALID, f"{key[:160]!r} is not a key of a store", where=where)


def claim_of(key: str) -> int | None:
    """The claim that a key carries, if its kind has one."""
    return parse_key(key).claim


def record_key(seq: int) -> str:
    """The key of record number `seq`."""
    return f"log/{_number(seq)}.json"


def manifest_key(claim: int, sha256: str) -> str:
    """The key of a manifest part."""
    return f"manifests/{_number(claim)}/{_hash(sha256)}.arrow.zst"


def pack_key(claim: int, sha256: str) -> str:
    """The key of a pack."""
    return f"packs/{_number(claim)}/{_hash(sha256)}.safetensors"


def file_key(claim: int, sha256: str) -> str:
    """The key of a sidecar file."""
    return f"files/{_number(claim)}/{_hash(sha256)}"


def external_key(sha256: str) -> str:
    """The key of the store's own copy of an external object."""
    return f"packs/external/{_hash(sha256)}"


def probe_key(digits: str) -> str:
    """The key of a probe object; `digits` are 32 random hex digits."""
    return parse_key(f"hints/probe-{digits}").key


def check_object(key: str, data: bytes, *, size: int) -> None:
    """Check bytes that were fetched whole from a key that carries their hash (DF-KEY-02).

    Args:
        key: A key with a SHA-256.
        data: What was fetched.
        size: The size that a record or manifest states.

    Raises:
        MalformedError: The key carries no hash.
        CorruptError: The size differs (checked first), or the hash does.
    """
    expected = parse_key(key).sha256
    if expected is None:
        raise MalformedError(ErrorCode.VALUE_INVALID, "is a key without a hash", where=key)
    if len(data) != size:
        raise CorruptError(ErrorCode.SIZE_MISMATCH, f"has {len(data)} bytes instead of {size}", where=key)
    if hashlib.sha256(data).hexdigest() != expected:
        raise CorruptError(ErrorCode.HASH_MISMATCH, "its bytes do not have the hash in its key", where=key)


def _number(value: int) -> str:
    if not 0 <= value < 10**20:
        raise MalformedError(ErrorCode.VALUE_INVALID, f"{value} cannot be the number in a key")
    return f"{value:020}"


def _hash(sha256: str) -> str:
    if re.fullmatch(r"[0-9a-f]{64}", sha256) is None:
        raise MalformedError(ErrorCode.VALUE_INVALID, f"{sha256[:80]!r} is not a SHA-256 in hex")
    return sha256
