"""The descriptor: what a store is, written once (SPEC 6.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deltaformat import fields
from deltaformat.blocks import check_block_bytes
from deltaformat.digests import DIGEST_SIZES
from deltaformat.errors import ErrorCode, UnsupportedError
from deltaformat.ijson import open_sealed, seal
from deltaformat.keys import DESCRIPTOR

__all__ = [
    "FORMAT",
    "LOG_GRAMMAR",
    "MAX_DESCRIPTOR_BYTES",
    "Descriptor",
    "encode_descriptor",
    "parse_descriptor",
]

FORMAT: Final = "deltaformat/1"
LOG_GRAMMAR: Final = "log/{seq:020}.json"
MAX_DESCRIPTOR_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """A store's descriptor (SPEC 6.2).

    Attributes:
        uuid: The store's identity, 32 hex digits.
        digest: The digest's name.
        block_bytes: The block size.
        time: When it was made; informative.
        requires: Features a reader must know.
        extra: Members that this version does not know; written again as they were (DF-VER-02).
    """

    uuid: str
    digest: str
    block_bytes: int
    time: str
    requires: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)


def parse_descriptor(data: bytes) -> Descriptor:
    """Parse and check the descriptor (SPEC 6.2).

    Raises:
        LimitError, MalformedError, CorruptError: It is not a descriptor, or not whole (DF-JSN-01, DF-JSN-03).
        UnsupportedError: A format, feature, log grammar or digest that this version does not know (DF-DSC-02,
            DF-VER-01).
    """
    where = DESCRIPTOR
    members = open_sealed(data, where=where, limit=MAX_DESCRIPTOR_BYTES)
    # What a newer format may change comes first, so that its stores are told apart from broken ones.
    fields.split_members(members, {"format": fields.DESCRIPTOR["format"]}, where=where)
    if members["format"] != FORMAT:
        raise _unsupported(f"its format is {members['format'][:80]!r}, this version reads {FORMAT!r}", where)
    fields.split_members(members, {"requires": fields.DESCRIPTOR["requires"]}, where=where)
    requires = fields.check_requires(members["requires"], where=where)
    known, extra = fields.split_members(members, fields.DESCRIPTOR, where=where)
    if known["log"] != LOG_GRAMMAR:
        raise _unsupported(
            f"its log grammar is {known['log'][:80]!r}, this version reads {LOG_GRAMMAR!r}", where
        )
    if known["digest"] not in DIGEST_SIZES:
        raise UnsupportedError(
            ErrorCode.DIGEST_UNKNOWN,
            f"its digest is {known['digest'][:80]!r}, this version knows {', '.join(DIGEST_SIZES)}",
            where=where,
        )
    check_block_bytes(known["block_bytes"], where=where)
    fields.check_text(fields.HEX_32, known["uuid"], "uuid", where)
    return Descriptor(
        uuid=known["uuid"],
        digest=known["digest"],
        block_bytes=known["block_bytes"],
        time=known["time"],
        requires=requires,
        extra=extra,
    )


def encode_descriptor(descriptor: Descriptor) -> bytes:
    """Write a descriptor."""
    return seal(
        {
            "format": FORMAT,
            "uuid": descriptor.uuid,
            "digest": descriptor.digest,
            "block_bytes": descriptor.block_bytes,
            "log": LOG_GRAMMAR,
            "requires": list(descriptor.requires),
            "time": descriptor.time,
            **descriptor.extra,
        }
    )


def _unsupported(message: str, where: str) -> UnsupportedError:
    return UnsupportedError(ErrorCode.FORMAT_UNKNOWN, message, where=where)
