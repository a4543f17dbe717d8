"""A staged part of a version: what one process has made durable for a commit that another may make."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from deltaformat import ijson
from deltaformat.errors import CorruptError, ErrorCode, InconsistentError, MalformedError, MissingError
from deltaformat.storage import Storage
from deltaformat.versionmap import VersionMap, merge

__all__ = ["Part", "Ticket", "check_staged", "unite"]

CONCURRENT_HEADS = 16

_MAGIC = b"deltaformat-part/1\n"
_HEADER_LIMIT = 1 << 16
_NUMBERS = ("step", "claim", "content_size", "packs", "pack_bytes", "payload_bytes", "rebase_bytes")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What another process needs to stage parts under a writer's claim. It holds no credentials.

    Attributes:
        uuid: The store's.
        branch: The claimed branch.
        claim: seq of the claim record.
    """

    uuid: str
    branch: str
    claim: int

    def __str__(self) -> str:
        """A short text, for an environment variable or a message."""
        return f"{self.uuid}:{self.claim}:{self.branch}"

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """The inverse of `str`.

        Raises:
            MalformedError: input-invalid.
        """
        uuid, _, rest = text.partition(":")
        claim, _, branch = rest.partition(":")
        if not (uuid and branch and claim.isascii() and claim.isdigit() and len(claim) <= 16):
            raise MalformedError(
                ErrorCode.INPUT_INVALID, "not a writer's ticket; pass str(writer.ticket)", where="ticket"
            )
        return cls(uuid, branch, int(claim))


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one step whose packs are durable, staged against `parent`.

    Nothing is visible until `Writer.commit(parts=[...])`.

    Picklable; `to_bytes` and `from_bytes` serve any other channel.

    Attributes:
        store: The store's uuid.
        step: The step it was staged for.
        claim: seq of the claim it was staged under.
        parent: seq of the commit it was encoded against, or None.
        manifest: The rows, as a manifest part (SPEC 11).
        content_size: Decompressed bytes of `manifest`.
        packs, pack_bytes, payload_bytes, rebase_bytes: What was written for it, as in `CommitInfo`.
    """

    store: str
    step: int
    claim: int
    parent: int | None
    manifest: bytes
    content_size: int
    packs: int
    pack_bytes: int
    payload_bytes: int
    rebase_bytes: int

    def to_bytes(self) -> bytes:
        """Serialise."""
        header = {
            "store": self.store,
            "parent": self.parent,
            "sha256": hashlib.sha256(self.manifest).hexdigest(),
            **{name: getattr(self, name) for name in _NUMBERS},
        }
        return _MAGIC + ijson.seal(header) + b"\n" + self.manifest

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """The inverse of `to_bytes`. What the manifest says is checked when the part is committed.

        Raises:
            MalformedError, CorruptError: these are not a part's bytes.
        """
        header, newline, manifest = data[len(_MAGIC) :].partition(b"\n")
        if not data.startswith(_MAGIC) or not newline:
            raise MalformedError(
                ErrorCode.INPUT_INVALID, "not a staged part; pass what Part.to_bytes gave", where="part"
            )
        fields = ijson.open_sealed(header, where="part", limit=_HEADER_LIMIT)
        numbers = {name: fields.get(name) for name in _NUMBERS}
        store, parent = fields.get("store"), fields.get("parent")
        if (
            not all(isinstance(value, int) for value in numbers.values())
            or not isinstance(parent, int | None)
            or not isinstance(store, str)
        ):
            raise MalformedError(
                ErrorCode.INPUT_INVALID, "a part's header lacks a member; stage it again", where="part"
            )
        if hashlib.sha256(manifest).hexdigest() != fields.get("sha256"):
            raise CorruptError(
                ErrorCode.HASH_MISMATCH, "was cut or changed on its way; stage it again", where="part"
            )
        return cls(store=store, parent=parent, manifest=manifest, **numbers)  # type: ignore[arg-type]  # checked


def unite(maps: Sequence[VersionMap]) -> VersionMap:
    """Make one version's map of what several stages gave.

    A tensor that several staged (each rank has it) is taken once, if all agree on it.

    Raises:
        InconsistentError: two give one name different content (parts-disagree).
    """
    first: dict[str, tuple[VersionMap, int]] = {}
    kept = []
    for version in maps:
        rows = []
        for row, name in enumerate(version.names):
            other, other_row = first.setdefault(name, (version, row))
            if other is version:
                rows.append(row)
            elif not _same_tensor(version, row, other, other_row):
                raise InconsistentError(
                    ErrorCode.PARTS_DISAGREE,
                    "two parts give this tensor different content; stage it once",
                    where=name,
                )
        kept.append(version if len(rows) == len(version.names) else version.take(rows))
    return merge(kept).compact()


def _same_tensor(a: VersionMap, row_a: int, b: VersionMap, row_b: int) -> bool:
    """Digests may decide here: same name, same block index, same step (DF-DIG-02)."""
    return (
        a.dtypes[row_a] == b.dtypes[row_b]
        and a.shapes[row_a] == b.shapes[row_b]
        and np.array_equal(a.digest[a.blocks(row_a)], b.digest[b.blocks(row_b)])
    )


def check_staged(storage: Storage, version: VersionMap, *known: VersionMap | None) -> None:
    """Refuse a version whose packs, other than those of the maps `known`, are not in the store as stated.

    A part may come from a process whose upload was not durable after all, or long ago (DF-CMT-09).

    Raises:
        MissingError: a pack is not there (object-missing).
        CorruptError: a pack has another size (size-mismatch).
        StoreError: the store failed.
    """
    sure: dict[str, int] = {}
    for held in known:
        sure |= held.objects() if held is not None else {}

    def check(pack: tuple[str, int]) -> None:
        key, size = pack
        try:
            found = storage.head(key).size
        except MissingError:
            raise MissingError(
                ErrorCode.OBJECT_MISSING,
                "a staged pack is not in the store; stage it again",
                where=key,
            ) from None
        if found != size:
            raise CorruptError(
                ErrorCode.SIZE_MISMATCH, f"has {found} bytes instead of {size}; stage it again", where=key
            )

    unsure = sorted(version.objects().items() - sure.items())
    with ThreadPoolExecutor(CONCURRENT_HEADS) as pool:
        for _ in pool.map(check, unsure):
            pass
