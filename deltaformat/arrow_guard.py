"""What must be known of an Arrow file before a library may read it (DF-MAN-01, DF-LIM-02).

An Arrow reader trusts lengths that a hostile file states. It decompresses a buffer of a few bytes to the size
that the buffer itself declares; and since flatbuffers are graphs, a schema of a few kilobytes can name one
field, or one long string, a million times. So this module walks the few tables that say so first: the footer
with its schema, and the message of the one record batch. It reads nothing else, follows every offset inside
the bounds of its table, and counts what it visits. Buffers that overlap would be one buffer under several
names, another way to make much of little. Compression is refused for both ways in which files have announced
it: the message's own member, and (before version 5 of the metadata, which is refused as a whole) an entry of
its custom metadata.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from deltaformat.errors import ErrorCode, LimitError, MalformedError

__all__ = ["check_arrow_file"]

_MAGIC = b"ARROW1"
_V5 = 4
_RECORD_BATCH = 3
_TIMESTAMP, _UNION = 10, 14
_MAX_TABLES = 4_096
_MAX_BUFFERS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Table:
    """A flatbuffer table: reads its members by slot number, none beyond `data`."""

    data: memoryview
    position: int
    where: str

    def number(self, slot: int, layout: str) -> int:
        """A scalar member; 0 where it is absent."""
        at = self._at(slot)
        return self._read(layout, at) if at else 0

    def table(self, slot: int) -> _Table | None:
        """A member that is a table."""
        at = self._at(slot)
        return self._follow(at) if at else None

    def tables(self, slot: int) -> list[_Table]:
        """A member that is a vector of tables."""
        start, count = self.vector(slot)
        if start + 4 * count > len(self.data):
            raise _invalid("an offset leads out of its table", self.where)
        if count > _MAX_TABLES:
            raise LimitError(
                ErrorCode.LIMIT_EXCEEDED, "the Arrow schema is too large (DF-MAN-01)", where=self.where
            )
        return [self._follow(start + 4 * index) for index in range(count)]

    def string(self, slot: int) -> bytes:
        """A member that is a string."""
        start, count = self.vector(slot)
        return bytes(self.data[start : start + self.length(slot)]) if count else b""

    def length(self, slot: int) -> int:
        """The length of a member that is a string, which lies in its table."""
        start, count = self.vector(slot)
        if start + count > len(self.data):
            raise _invalid("an offset leads out of its table", self.where)
        return count

    def vector(self, slot: int) -> tuple[int, int]:
        """Where a vector's elements begin, and how many it states; (0, 0) where it is absent."""
        at = self._at(slot)
        if not at:
            return 0, 0
        start = at + self._read("<I", at)
        return start + 4, self._read("<I", start)

    def block(self, start: int) -> tuple[int, int, int]:
        """A `Block` struct: offset, bytes of metadata, bytes of body."""
        return self._read("<q", start), self._read("<i", start + 8), self._read("<q", start + 16)

    def buffer(self, start: int) -> tuple[int, int]:
        """Where a `Buffer` struct says that its bytes begin and end, in the body."""
        offset, length = self._read("<q", start), self._read("<q", start + 8)
        if offset < 0 or length < 0:
            raise _invalid("a buffer has a negative offset or length", self.where)
        return offset, offset + length

    def _at(self, slot: int) -> int:
        vtable = self.position - self._read("<i", self.position)
        if 4 + 2 * slot >= self._read("<H", vtable):
            return 0
        relative = self._read("<H", vtable + 4 + 2 * slot)
        return self.position + relative if relative else 0

    def _follow(self, at: int) -> _Table:
        return _Table(self.data, at + self._read("<I", at), self.where)

    def _read(self, layout: str, at: int) -> int:
        if not 0 <= at <= len(self.data) - struct.calcsize(layout):
            raise _invalid("an offset leads out of its table", self.where)
        value: int = struct.unpack_from(layout, self.data, at)[0]
        return value


def check_arrow_file(data: memoryview, *, where: str = "") -> dict[bytes, bytes]:
    """Check that a file has one uncompressed record batch, no dictionaries, and a schema of bounded size.

    Args:
        data: The whole file.
        where: What an error should name.

    Returns:
        The schema's custom metadata.

    Raises:
        MalformedError: It is not such a file (manifest-invalid).
        LimitError: Its schema has thousands of fields.
    """
    footer, footer_start = _footer(data, where)
    if footer.number(0, "<h") != _V5:
        raise _invalid("its Arrow metadata is not of version 5", where)
    if footer.vector(2)[1]:
        raise _invalid("it has dictionaries (DF-MAN-01)", where)
    start, batches = footer.vector(3)
    if batches != 1:
        raise _invalid(f"it has {batches} record batches instead of one (DF-MAN-01)", where)
    if footer.vector(4)[1]:
        raise _invalid("its footer has custom metadata (DF-MAN-01)", where)
    schema = footer.table(1)
    if schema is None:
        raise _invalid("it has no schema", where)
    metadata = _check_schema(schema, where)
    offset, metadata_bytes, body_bytes = footer.block(start)
    if (
        offset < 8
        or metadata_bytes < 8
        or body_bytes < 0
        or offset + metadata_bytes + body_bytes > footer_start
    ):
        raise _invalid("its record batch does not lie before its footer", where)
    _check_message(data[offset : offset + metadata_bytes], body_bytes, where)
    return metadata


def _footer(data: memoryview, where: str) -> tuple[_Table, int]:
    if len(data) < 24 or bytes(data[:6]) != _MAGIC or bytes(data[-6:]) != _MAGIC:
        raise _invalid("it is not an Arrow file, or was cut", where)
    length = int.from_bytes(data[-10:-6], "little", signed=True)
    start = len(data) - 10 - length
    if length < 4 or start < 8:
        raise _invalid("its footer does not fit into it", where)
    return _root(data[start : start + length], where), start


def _root(data: memoryview, where: str) -> _Table:
    return _Table(data, _Table(data, 0, where)._read("<I", 0), where)


def _check_schema(schema: _Table, where: str) -> dict[bytes, bytes]:
    """Count all fields and entries of custom metadata; a graph counts as the tree it unfolds to."""
    if schema.number(0, "<h"):
        raise _invalid("it is big-endian", where)
    pending = schema.tables(1)
    entries = schema.tables(2)
    visited = strings = 0
    while pending:
        field = pending.pop()
        if field.table(4) is not None:
            raise _invalid("a field is dictionary-encoded (DF-MAN-01)", where)
        if field.vector(6)[1]:
            # A library looks at it for extension types, and runs code that any package may have registered.
            raise _invalid("a field has custom metadata (DF-MAN-01)", where)
        pending += field.tables(5)
        strings += field.length(0) + _type_bytes(field)
        visited += 1
        if visited + len(pending) > _MAX_TABLES or strings > len(schema.data):
            raise LimitError(
                ErrorCode.LIMIT_EXCEEDED, "the Arrow schema is too large (DF-MAN-01)", where=where
            )
    if sum(entry.length(slot) for entry in entries for slot in (0, 1)) > len(schema.data):
        raise LimitError(ErrorCode.LIMIT_EXCEEDED, "the Arrow schema is too large (DF-MAN-01)", where=where)
    metadata = {entry.string(0): entry.string(1) for entry in entries}
    if len(metadata) != len(entries):
        raise _invalid("an entry of its custom metadata occurs twice", where)
    return metadata


def _type_bytes(field: _Table) -> int:
    """Bytes that a field's type has beside scalars: a time zone, or a union's codes."""
    kind = field.table(3)
    if kind is None:
        return 0
    layout = {_TIMESTAMP: 1, _UNION: 4}.get(field.number(2, "<B"), 0)
    return kind.vector(1)[1] * layout if layout else 0


def _check_message(data: memoryview, body_bytes: int, where: str) -> None:
    if bytes(data[:4]) != b"\xff\xff\xff\xff":
        raise _invalid("its record batch has no continuation marker", where)
    length = int.from_bytes(data[4:8], "little", signed=True)
    if not 4 <= length <= len(data) - 8:
        raise _invalid("the message of its record batch does not fit", where)
    message = _root(data[8 : 8 + length], where)
    if message.number(0, "<h") != _V5 or message.number(1, "<B") != _RECORD_BATCH:
        raise _invalid("its record batch is not one of version 5", where)
    if message.vector(4)[1]:
        raise _invalid("its message has custom metadata (DF-MAN-01)", where)
    batch = message.table(2)
    if batch is None:
        raise _invalid("its record batch is empty", where)
    if batch.table(3) is not None:
        raise _invalid("its buffers are compressed (DF-MAN-01)", where)
    start, count = batch.vector(2)
    if start + 16 * count > len(data):
        raise _invalid("an offset leads out of its table", where)
    if count > _MAX_BUFFERS:
        raise LimitError(ErrorCode.LIMIT_EXCEEDED, f"it has {count} buffers", where=where)
    before = 0
    for begin, end in sorted(batch.buffer(start + 16 * number) for number in range(count)):
        if end > body_bytes:
            raise _invalid("a buffer leads out of the body", where)
        if begin == end:
            continue  # it overlaps with none, wherever it is
        if begin < before:
            raise _invalid("its buffers overlap", where)
        before = end


def _invalid(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.MANIFEST_INVALID, message, where=where)
