"""Arrow IPC files by hand: a flatbuffers writer of a few lines, and the messages of one record batch.

Written from the Arrow columnar format (format/Schema.fbs, Message.fbs and File.fbs of Apache Arrow), so that
bytes depend on no library and every field can be made wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["Column", "arrow_file", "columns_of"]

_V5 = 4
_INT, _UTF8, _LIST, _FIXED, _LARGE_LIST, _LARGE_UTF8 = 2, 5, 12, 15, 21, 20
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3


# -- flatbuffers ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Scalar:
    layout: str
    value: int


@dataclass(slots=True)
class _Table:
    slots: dict[int, object]


@dataclass(slots=True)
class _Structs:
    """A vector of structs; they are multiples of 8 bytes."""

    items: list[bytes]


def _flatbuffer(root: _Table) -> bytes:
    """Serialise a tree: every table after its vtable, what it points to behind it."""
    out = bytearray(8)

    def align(multiple: int, ahead: int = 0) -> None:
        out.extend(bytes(-(len(out) + ahead) % multiple))

    def place(node: object) -> int:
        if isinstance(node, bytes):
            align(4)
            start = len(out)
            out.extend(struct.pack("<I", len(node)) + node + b"\0")
            return start
        if isinstance(node, list):
            align(4)
            start = len(out)
            out.extend(struct.pack("<I", len(node)) + bytes(4 * len(node)))
            for number, child in enumerate(node):
                at = start + 4 + 4 * number
                struct.pack_into("<I", out, at, place(child) - at)
            return start
        if isinstance(node, _Structs):
            align(8, ahead=4)
            start = len(out)
            out.extend(struct.pack("<I", len(node.items)) + b"".join(node.items))
            return start
        assert isinstance(node, _Table)
        count = max(node.slots, default=-1) + 1
        sizes = {
            slot: struct.calcsize(v.layout) if isinstance(v, _Scalar) else 4 for slot, v in node.slots.items()
        }
        offsets, end = {}, 4
        for slot in sorted(sizes, key=lambda slot: -sizes[slot]):
            end += -end % sizes[slot]
            offsets[slot] = end
            end += sizes[slot]
        vtable_bytes = 4 + 2 * count
        align(8, ahead=vtable_bytes)
        vtable = len(out)
        out.extend(struct.pack("<HH", vtable_bytes, end))
        out.extend(b"".join(struct.pack("<H", offsets.get(slot, 0)) for slot in range(count)))
        start = len(out)
        out.extend(bytes(end))
        struct.pack_into("<i", out, start, start - vtable)
        for slot, value in node.slots.items():
            if isinstance(value, _Scalar):
                struct.pack_into("<" + value.layout, out, start + offsets[slot], value.value)
        for slot, value in node.slots.items():
            if not isinstance(value, _Scalar):
                at = start + offsets[slot]
                struct.pack_into("<I", out, at, place(value) - at)
        return start

    struct.pack_into("<I", out, 0, place(root))
    align(8)
    return bytes(out)


# -- columns -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Column:
    """A column: `utf8`, or a list of `int64`, `uint8`, ..., `fixed:N`; `large:` before either."""

    name: str
    kind: str
    rows: list[Any]
    child: str = "item"
    nullable: bool = True
    validity: bytes | None = None
    dictionary: bool = False
    metadata: dict[bytes, bytes] = field(default_factory=dict)
    child_metadata: dict[bytes, bytes] = field(default_factory=dict)

    def with_rows(self, rows: Sequence[Any]) -> Column:
        """The same column with other rows."""
        return replace(self, rows=list(rows))


def columns_of(columns: Sequence[Column]) -> dict[str, Column]:
    """By name."""
    return {column.name: column for column in columns}


def _layout(kind: str) -> str:
    signed = kind.startswith("int")
    letter = {"8": "b", "16": "h", "32": "i", "64": "q"}[kind.removeprefix("u").removeprefix("int")]
    return letter if signed else letter.upper()


def _type(kind: str) -> tuple[int, _Table]:
    if kind == "utf8":
        return _UTF8, _Table({})
    if kind == "large:utf8":
        return _LARGE_UTF8, _Table({})
    if kind.startswith("fixed:"):
        return _FIXED, _Table({0: _Scalar("i", int(kind[6:]))})
    width = int(kind.removeprefix("u").removeprefix("int"))
    return _INT, _Table({0: _Scalar("i", width), 1: _Scalar("B", int(kind.startswith("int")))})


def _is_list(column: Column) -> bool:
    return column.kind.startswith("list:") or column.kind.startswith("large:list:")


def _key_values(entries: Sequence[tuple[bytes, bytes]]) -> list[_Table]:
    return [_Table({0: key, 1: value}) for key, value in entries]


def _field(column: Column) -> _Table:
    children: list[_Table] = []
    if _is_list(column):
        code = _LARGE_LIST if column.kind.startswith("large:") else _LIST
        type_: _Table = _Table({})
        child_code, child_type = _type(column.kind.split(":", 1 + (code == _LARGE_LIST))[-1])
        child: dict[int, object] = {
            0: column.child.encode(),
            1: _Scalar("B", 1),
            2: _Scalar("B", child_code),
            3: child_type,
        }
        if column.child_metadata:
            child[6] = _key_values(list(column.child_metadata.items()))
        children = [_Table(child)]
    else:
        code, type_ = _type(column.kind)
    slots: dict[int, object] = {
        0: column.name.encode(),
        1: _Scalar("B", int(column.nullable)),
        2: _Scalar("B", code),
        3: type_,
    }
    if children:
        slots[5] = children
    if column.dictionary:
        slots[4] = _Table({0: _Scalar("q", 0), 1: _Table({0: _Scalar("i", 32), 1: _Scalar("B", 1)})})
    if column.metadata:
        slots[6] = _key_values(list(column.metadata.items()))
    return _Table(slots)


def _arrays(column: Column) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Its nodes (length, nulls) and buffers."""
    rows = column.rows
    validity = column.validity or b""
    nulls = (
        0
        if column.validity is None
        else sum(1 for i in range(len(rows)) if not validity[i // 8] >> i % 8 & 1)
    )
    offset = "<q" if column.kind.startswith("large:") else "<i"
    if not _is_list(column):
        if column.kind.endswith("utf8"):
            texts = [row if isinstance(row, bytes) else str(row).encode() for row in rows]
            return [(len(rows), nulls)], [validity, _offsets(texts, offset), b"".join(texts)]
        return [(len(rows), nulls)], [validity, _values(rows, column.kind)]
    lists = [list(row) for row in rows]
    values = [value for row in lists for value in row]
    kind = column.kind.split(":", 1 + column.kind.startswith("large:"))[-1]
    nodes = [(len(rows), nulls), (len(values), 0)]
    return nodes, [validity, _offsets(lists, offset), b"", _values(values, kind)]


def _values(values: Sequence[object], kind: str) -> bytes:
    if kind.startswith("fixed:"):
        return b"".join(values)  # type: ignore[arg-type]
    return struct.pack(f"<{len(values)}{_layout(kind)}", *values)


def _offsets(items: Sequence[Sequence[object]], layout: str) -> bytes:
    ends = [0]
    for item in items:
        ends.append(ends[-1] + len(item))
    return b"".join(struct.pack(layout, end) for end in ends)


# -- the file ------------------------------------------------------------------------------------------------


def _message(kind: int, header: _Table, body: bytes, version: int, custom: list[_Table]) -> bytes:
    slots: dict[int, object] = {
        0: _Scalar("h", version),
        1: _Scalar("B", kind),
        2: header,
        3: _Scalar("q", len(body)),
    }
    if custom:
        slots[4] = custom
    return _flatbuffer(_Table(slots))


def _enclosed(message: bytes) -> bytes:
    return b"\xff\xff\xff\xff" + struct.pack("<i", len(message)) + message


def arrow_file(
    columns: Sequence[Column],
    metadata: Sequence[tuple[bytes, bytes]],
    *,
    version: int = _V5,
    footer_version: int | None = None,
    big_endian: bool = False,
    batches: int = 1,
    compression: bool = False,
    dictionary_blocks: bool = False,
    message_metadata: bool = False,
    footer_metadata: bool = False,
    overlap: bool = False,
    empty_at: int | None = None,
    align: int = 8,
    rows: int | None = None,
    first_columns: Sequence[Column] | None = None,
    first_metadata: Sequence[tuple[bytes, bytes]] | None = None,
) -> bytes:
    """A file of one record batch; the options make it what SPEC 11.1 refuses (and `align` what it does not).

    Args:
        columns: In their order.
        metadata: The schema's custom metadata.
        version: Metadata version less one: 4 is V5.
        footer_version: The footer's, if another.
        big_endian: Say so in the schema.
        batches: How often the batch stands in the file.
        compression: State compressed buffers; none of them is.
        dictionary_blocks: List a dictionary in the footer.
        message_metadata: Give the batch's message custom metadata.
        footer_metadata: Give the footer custom metadata.
        overlap: Let the last buffer lie where another one begins with the same bytes.
        empty_at: Where buffers without bytes are said to begin; by default behind the one before.
        align: Multiple at which buffers begin.
        rows: The number of rows that the batch states.
        first_columns: Those of the schema in the file's first message, if others than the footer's.
        first_metadata: That schema's custom metadata, if another than the footer's.
    """

    def schema_of(fields: Sequence[Column], entries: Sequence[tuple[bytes, bytes]]) -> _Table:
        slots: dict[int, object] = {
            0: _Scalar("h", int(big_endian)),
            1: [_field(column) for column in fields],
            2: _key_values(entries),
        }
        return _Table(slots)

    schema = schema_of(columns, metadata)
    first = schema_of(
        columns if first_columns is None else first_columns,
        metadata if first_metadata is None else first_metadata,
    )
    nodes: list[bytes] = []
    parts: list[bytes] = []
    for column in columns:
        column_nodes, column_parts = _arrays(column)
        nodes += [struct.pack("<qq", *node) for node in column_nodes]
        parts += column_parts
    buffers, body = [], b""
    for part in parts:
        buffers.append((len(body) if part or empty_at is None else empty_at, len(part)))
        body += part + bytes(-len(part) % align)
    if overlap:
        # The same bytes at another's place: nothing but the place is wrong.
        other = next(i for i, part in enumerate(parts[:-1]) if len(part) > 0 and part.startswith(parts[-1]))
        buffers[-1] = (buffers[other][0], buffers[-1][1])
    count = len(columns[0].rows) if rows is None else rows
    slots: dict[int, object] = {
        0: _Scalar("q", count),
        1: _Structs(nodes),
        2: _Structs([struct.pack("<qq", *buffer) for buffer in buffers]),
    }
    if compression:
        slots[3] = _Table({0: _Scalar("b", 1), 1: _Scalar("b", 0)})
    custom = _key_values([(b"key", b"value")])
    batch = _message(_RECORD_BATCH, _Table(slots), body, version, custom if message_metadata else [])
    out = b"ARROW1\0\0" + _enclosed(_message(_SCHEMA, first, b"", version, []))
    blocks = []
    for _ in range(batches):
        blocks.append(struct.pack("<qiiq", len(out), len(batch) + 8, 0, len(body)))
        out += _enclosed(batch) + body
    out += b"\xff\xff\xff\xff" + bytes(4)
    footer_slots: dict[int, object] = {
        0: _Scalar("h", version if footer_version is None else footer_version),
        1: schema,
        2: _Structs(blocks[:1] if dictionary_blocks else []),
        3: _Structs(blocks),
    }
    if footer_metadata:
        footer_slots[4] = custom
    footer = _flatbuffer(_Table(footer_slots))
    return out + footer + struct.pack("<i", len(footer)) + b"ARROW1"
