"""Manifest parts as bytes: one Arrow file in one zstd frame (SPEC 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from deltaformat import ijson
from deltaformat.arrow import Lists, check_metadata, read_arrow, write_arrow
from deltaformat.columns import prefix_sums, tensor_sizes
from deltaformat.digests import DIGEST_SIZES
from deltaformat.encodings.streams import MAX_WINDOW
from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    UnsupportedError,
)
from deltaformat.fields import MANIFEST, check_natural, check_requires, is_natural, split_members
from deltaformat.keys import KeyKind, parse_key
from deltaformat.mapcheck import check_map, check_packs, gaps_of, offsets_of
from deltaformat.packs import MAX_OBJECT_BYTES, ExternalRef, FileRef, PackEntry, PackRef
from deltaformat.paths import check_sidecar_path
from deltaformat.versionmap import MAX_PACKS, MAX_TENSORS, VersionMap

__all__ = ["FORMAT", "MAX_CONTENT_BYTES", "decode_part", "divide", "encode_part"]

FORMAT = "deltaformat-manifest/1"
MAX_CONTENT_BYTES = 1 << 30
"""Decompressed bytes of a part above which it is refused (DF-LIM-01)."""

# The pack table stands at both ends of an Arrow file: a window that spans it finds the second copy. With it,
# level 5 is 5 % smaller than level 3 and as fast; higher levels gain nothing.
_ZSTD = zstandard.ZstdCompressionParameters.from_level(5, window_log=26)
MAX_METADATA_BYTES = 1 << 27
"""Enough for a million packs. As JSON in memory it may take ten times as much (DF-LIM-02)."""

_MAX_OBJECTS = 1 << 22
_PER_BLOCK = ("digest", "fresh", "depth")
_PER_PIECE = ("pack", "gap", "length", "encoding")
_BYTES_PER_PIECE = 4 + 8 + 4 + 1
_BYTES_PER_ROW = 100  # dtype, shape, and the places of ten columns' lists
PART_BYTES = 128 << 20
"""Decompressed bytes at which a writer begins another part: every reader accepts twice that (DF-LIM-01)."""


def divide(version: VersionMap, content_bytes: int = PART_BYTES) -> list[VersionMap]:
    """Divide a map into parts of about `content_bytes` decompressed; the first has the sidecar files.

    A tensor is never divided, so that a part holds at least one.
    """
    blocks = np.diff(version.block_start)
    pieces = np.diff(version.piece_start[version.block_start])
    names = np.fromiter((len(name) for name in version.names), np.int64, len(version.names))
    costs = names + blocks * (version.digest.shape[1] + 2) + pieces * _BYTES_PER_PIECE + _BYTES_PER_ROW
    part = np.cumsum(costs) // content_bytes
    cuts = np.split(np.arange(len(names)), np.flatnonzero(np.diff(part)) + 1)
    if len(cuts) == 1:
        return [version]
    first, *others = (version.take(rows) for rows in cuts)
    return [replace(first, files=version.files), *others]


def encode_part(
    version: VersionMap,
    *,
    parent: int | None,
    digest: str,
    block_bytes: int,
    requires: Sequence[str] = (),
) -> tuple[bytes, int]:
    """Write a map as a manifest part; packs that no piece names are left out.

    Args:
        version: The map, of a version or of a part of it.
        parent: seq of the parent commit.
        digest: Name of the store's digest.
        block_bytes: The store's block size.
        requires: Features that a reader must know.

    Returns:
        The object's bytes, and its `content_size`.

    Raises:
        MalformedError: The map breaks a rule of SPEC 11.
        LimitError: The part would be larger than readers accept; divide the tensors over several.
    """
    version = version.compact()
    check_map(
        version, digest_bytes=DIGEST_SIZES[digest], block_bytes=block_bytes, has_parent=parent is not None
    )
    blocks, pieces = len(version.depth), len(version.pack)
    if blocks * (DIGEST_SIZES[digest] + 2) + pieces * _BYTES_PER_PIECE > MAX_CONTENT_BYTES:
        raise _too_large(f"{pieces} pieces")
    ranks = np.fromiter(map(len, version.shapes), np.int64, len(version.shapes))
    dims = np.fromiter((dim for shape in version.shapes for dim in shape), np.int64, int(ranks.sum()))
    per_block = np.diff(version.block_start)
    per_piece = np.diff(version.piece_start[version.block_start])
    lists = {
        "shape": Lists(ranks, dims),
        "digest": Lists(per_block, version.digest),
        "fresh": Lists(per_block, version.fresh),
        "depth": Lists(per_block, version.depth),
        "pack": Lists(per_piece, version.pack.astype(np.uint32)),
        "gap": Lists(per_piece, gaps_of(version.pack, version.offset, version.length)),
        "length": Lists(per_piece, version.length.astype(np.uint32)),
        "encoding": Lists(per_piece, version.encoding),
    }
    metadata = {
        "format": FORMAT,
        "digest": digest,
        "block_bytes": block_bytes,
        "parent": parent,
        "packs": [_pack_members(entry) for entry in version.packs],
        "files": [{"path": file.path, "key": file.key, "size": file.size} for file in version.files],
        "requires": list(requires),
    }
    content = write_arrow({"name": version.names, "dtype": version.dtypes}, lists, ijson.dump(metadata))
    if content.nbytes > MAX_CONTENT_BYTES:
        raise _too_large(f"{content.nbytes} bytes")
    return zstandard.ZstdCompressor(compression_params=_ZSTD).compress(content), content.nbytes


def decode_part(
    data: bytes,
    *,
    content_size: int,
    where: str,
    digest: str,
    block_bytes: int,
    parent: int | None,
    max_content: int = MAX_CONTENT_BYTES,
) -> VersionMap:
    """Parse and check a manifest part whose size and SHA-256 have been checked.

    Memory: at most about ten times `content_size`, which the record states; nothing in the part raises it.

    Args:
        data: The object's bytes.
        content_size: Decompressed bytes, as the commit record states.
        where: The object's key.
        digest: Name of the store's digest.
        block_bytes: The store's block size.
        parent: seq of the commit's parent.
        max_content: The largest `content_size` to accept.

    Raises:
        MalformedError: It breaks SPEC 11, or a rule that its rows must keep.
        CorruptError: Its frame does not decompress.
        InconsistentError: It is of another store or parent (DF-MAN-09), or has a name twice (DF-MAN-05).
        UnsupportedError: It needs a feature, format, dtype or encoding that is not known.
        UnsafeError: A sidecar path could leave its directory (DF-MAN-10).
        LimitError: It is larger than SPEC 16 or `max_content` allows.
    """
    content = _decompress(data, content_size, max_content, where)
    members = _metadata(check_metadata(content, where=where), digest, block_bytes, parent, where)
    packs = tuple(
        _pack_entry(entry, where) for entry in _at_most(members["packs"], MAX_PACKS, "packs", where)
    )
    sizes = check_packs(packs, where=where)
    files = _files(members["files"], where)
    text, lists = read_arrow(content, digest_bytes=DIGEST_SIZES[digest], max_rows=MAX_TENSORS, where=where)
    names, dtypes = text["name"], text["dtype"]
    shape = lists["shape"]
    nbytes = tensor_sizes(dtypes, shape.counts, shape.values, where=where)
    block_counts = -(-nbytes // block_bytes)
    for column in _PER_BLOCK:  # DF-BLK-02, DF-MAN-04
        _same_counts(lists[column].counts, block_counts, column, names, where)
    block_start = prefix_sums(block_counts)
    depth = lists["depth"].values
    piece_start = prefix_sums(depth)
    for column in _PER_PIECE:
        _same_counts(lists[column].counts, np.diff(piece_start[block_start]), column, names, where)
    length = lists["length"].values.astype(np.int64)
    version = VersionMap(
        names=tuple(names),
        dtypes=tuple(dtypes),
        shapes=_shapes(shape),
        block_start=block_start,
        digest=lists["digest"].values,
        fresh=lists["fresh"].values,
        depth=depth,
        piece_start=piece_start,
        pack=lists["pack"].values.astype(np.int32),
        offset=offsets_of(lists["pack"].values, lists["gap"].values, length, sizes, where=where),
        length=length,
        encoding=lists["encoding"].values,
        packs=packs,
        files=files,
    )
    check_map(
        version,
        digest_bytes=DIGEST_SIZES[digest],
        block_bytes=block_bytes,
        has_parent=parent is not None,
        where=where,
    )
    return version


def _decompress(data: bytes, content_size: int, max_content: int, where: str) -> bytes:
    """DF-MAN-02, DF-LIM-02: the frame's own words are compared with the record's before memory is taken."""
    if content_size > max_content:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED,
            f"a manifest part of {content_size} bytes exceeds {max_content}",
            where=where,
        )
    try:
        frame = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError:
        raise _invalid("it is not a zstd frame", where) from None
    if data[:4] != b"\x28\xb5\x2f\xfd" or frame.dict_id:
        raise _invalid("its zstd frame is skippable or needs a dictionary (DF-MAN-02)", where)
    if frame.content_size != content_size:  # an unstated size is a very large one here
        raise _invalid("its zstd frame does not state the record's content_size (DF-MAN-02)", where)
    if frame.window_size > MAX_WINDOW:
        raise _invalid(f"its zstd frame needs a window of {frame.window_size} bytes (DF-MAN-02)", where)
    if content_size == 0:
        raise _invalid("it is empty", where)
    decompressor = zstandard.ZstdDecompressor()
    try:
        return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError:
        pass
    try:
        decompressor.decompress(data, allow_extra_data=True)
    except zstandard.ZstdError as error:
        raise CorruptError(
            ErrorCode.FRAME_CORRUPT, f"its zstd frame does not decompress ({error})", where=where
        ) from None
    raise _invalid("bytes follow its zstd frame (DF-MAN-02)", where)


def _metadata(value: bytes, digest: str, block_bytes: int, parent: int | None, where: str) -> dict[str, Any]:
    """SPEC 11.3; features are looked at first, since they may change what the rest means."""
    parsed = ijson.parse_object(value, where=where, limit=MAX_METADATA_BYTES, max_containers=_MAX_OBJECTS)
    if isinstance(parsed.get("format"), str) and parsed["format"] != FORMAT:
        raise UnsupportedError(
            ErrorCode.FORMAT_UNKNOWN,
            f"manifest format {parsed['format'][:80]!a} is not {FORMAT}",
            where=where,
        )
    members, _ = split_members(parsed, MANIFEST, where=where)
    check_requires(members["requires"], where=where)
    for name in ("block_bytes", "parent"):
        if members[name] is not None:
            check_natural(members[name], name, where)
    for name, expected in (("digest", digest), ("block_bytes", block_bytes), ("parent", parent)):
        if members[name] != expected:  # DF-MAN-09
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE,
                f"its {name} is {str(members[name])[:80]!a} instead of {expected!a} (DF-MAN-09)",
                where=where,
            )
    return members


def _pack_members(entry: PackEntry) -> dict[str, object]:
    if isinstance(entry, PackRef):
        return {"key": entry.key, "size": entry.size}
    return {"url": entry.url, "size": entry.size, "sha256": entry.sha256}


def _pack_entry(members: dict[str, Any], where: str) -> PackEntry:
    size = _size(members, where)
    if "key" in members and "url" in members:
        raise _value("a pack has both key and url", where)
    if "url" in members:
        url, sha256 = _text(members, "url", where), _text(members, "sha256", where)
        if not _is_sha256(sha256):
            raise _value("an external object's sha256 is not 64 lowercase hex digits", where)
        return ExternalRef(url, size, sha256)
    key = _text(members, "key", where)
    if parse_key(key, where=where).kind is not KeyKind.PACK:  # DF-KEY-01
        raise _value("a pack's key is not one of a pack", where)
    return PackRef(key, size)


def _text(members: dict[str, Any], name: str, where: str) -> str:
    value = members.get(name)
    if not isinstance(value, str):
        raise MalformedError(ErrorCode.JSON_INVALID, f"a pack or file has no string `{name}`", where=where)
    return value


def _size(members: dict[str, Any], where: str) -> int:
    size = members.get("size")
    if type(size) is not int:
        raise MalformedError(ErrorCode.JSON_INVALID, "a pack or file has no integer `size`", where=where)
    if not is_natural(size):
        raise _value(f"a size of {size} cannot be", where)
    return size


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _files(entries: list[dict[str, Any]], where: str) -> tuple[FileRef, ...]:
    files = []
    for members in entries:
        path, key = _text(members, "path", where), _text(members, "key", where)
        size = _size(members, where)
        if size > MAX_OBJECT_BYTES:
            raise LimitError(
                ErrorCode.LIMIT_EXCEEDED, f"a sidecar file exceeds {MAX_OBJECT_BYTES} bytes", where=where
            )
        check_sidecar_path(path, where=where)
        if parse_key(key, where=where).kind is not KeyKind.FILE:
            raise _value("a file's key is not one of a file", where)
        files.append(FileRef(path, key, size))
    return tuple(files)


def _shapes(shape: Lists) -> tuple[tuple[int, ...], ...]:
    dims = shape.values.tolist()
    starts = prefix_sums(shape.counts).tolist()
    return tuple(tuple(dims[start:end]) for start, end in pairwise(starts))


def _same_counts(
    found: npt.NDArray[np.int64], expected: npt.NDArray[np.int64], column: str, names: list[str], where: str
) -> None:
    if not np.array_equal(found, expected):
        row = int(np.argmax(found != expected))
        raise _invalid(
            f"tensor {names[row][:80]!a}: {found[row]} of `{column}`, not {expected[row]} (DF-MAN-04)",
            where,
        )


def _at_most(items: list[Any], limit: int, what: str, where: str) -> list[Any]:
    if len(items) > limit:
        raise LimitError(ErrorCode.LIMIT_EXCEEDED, f"{len(items)} {what} exceed {limit}", where=where)
    return items


def _too_large(what: str) -> LimitError:
    return LimitError(
        ErrorCode.LIMIT_EXCEEDED,
        f"a manifest part of {what} exceeds {MAX_CONTENT_BYTES} bytes; commit the tensors in several parts",
    )


def _value(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.VALUE_INVALID, message, where=where)


def _invalid(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.MANIFEST_INVALID, message, where=where)
