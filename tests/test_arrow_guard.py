"""The guard in front of the Arrow reader: graphs that unfold, numbers that lie, tables that are not there."""

import struct

import pyarrow as pa
import pytest
from mapmaker import arrow_file, decode_file, refused

from deltaformat import arrow_guard
from deltaformat.errors import MalformedError


def graft(content, addition, *, slot):
    """Append bytes to the footer of an Arrow file and make a member of its schema point to their start."""
    length = int.from_bytes(content[-10:-6], "little")
    footer = bytearray(content[-10 - length : -10])

    def u(layout, at):
        return struct.unpack_from(layout, footer, at)[0]

    def member(table, number):
        vtable = table - u("<i", table)
        return table + u("<H", vtable + 4 + 2 * number)

    root = u("<I", 0)
    at = member(root, 1)
    schema = at + u("<I", at)
    footer += bytes(-len(footer) % 8)
    target = member(schema, slot)
    struct.pack_into("<I", footer, target, len(footer) - target)
    footer += addition
    return content[: -10 - length] + footer + struct.pack("<i", len(footer)) + b"ARROW1"


def vector_of_one_table(count, table):
    """A vector whose `count` elements are all the same table, which follows it."""
    return (
        struct.pack("<I", count) + b"".join(struct.pack("<I", 4 * (count - i)) for i in range(count)) + table
    )


def table_with(slots, tail=b""):
    """A table whose members (slot: bytes after its start) are offsets; its vtable follows."""
    size = 4 + 4 * len(slots)
    vtable = struct.pack("<HH", 4 + 2 * (max(slots, default=-1) + 1), size)
    places = {slot: 4 + 4 * number for number, slot in enumerate(slots)}
    vtable += b"".join(struct.pack("<H", places.get(slot, 0)) for slot in range(max(slots, default=-1) + 1))
    vtable += bytes(-len(vtable) % 4)
    body = b""
    for number, (_, target) in enumerate(slots.items()):
        body += struct.pack("<I", size + len(vtable) + target - (4 + 4 * number))
    return struct.pack("<i", -size) + body + vtable + tail


def test_a_schema_that_unfolds_is_refused():
    """DF-LIM-02: flatbuffers are graphs; a few kilobytes can name one field, or one string, a
    million times.
    """
    content = arrow_file()
    empty = table_with({})
    many = graft(content, vector_of_one_table(4_097, empty), slot=1)
    refused(many, "limit-exceeded", match="schema")
    nest = vector_of_one_table(1_000, table_with({5: 0}, vector_of_one_table(1_000, empty)))
    refused(graft(content, nest, slot=1), "limit-exceeded", match="schema")
    text = struct.pack("<I", 20_000) + bytes(20_000)
    entry = table_with({0: 0, 1: 0}, text)
    refused(graft(content, vector_of_one_table(2, entry), slot=2), "limit-exceeded", match="schema")
    twice = vector_of_one_table(2, table_with({0: 0, 1: 0}, struct.pack("<I", 1) + b"x\0\0\0"))
    refused(graft(content, twice, slot=2), "manifest-invalid", match="twice")
    fields = vector_of_one_table(3, table_with({0: 0}, text))
    refused(graft(content, fields, slot=1), "limit-exceeded", match="schema")
    fields = vector_of_one_table(3, table_with({6: 0}, vector_of_one_table(1, entry)))
    refused(graft(content, fields, slot=1), "manifest-invalid", match="custom metadata")
    coded = vector_of_one_table(1, table_with({4: 0}, table_with({})))
    refused(graft(content, coded, slot=1), "manifest-invalid", match="dictionar")
    cut = vector_of_one_table(1, table_with({0: 0, 1: 0}, struct.pack("<I", 100)))
    refused(graft(content, cut, slot=2), "manifest-invalid", match="out of its table")


def test_the_guard_reads_footers_that_lack_members():
    """DF-LIM-02: whatever is absent counts as zero, and is refused as such."""

    def file_of(footer, message=b""):
        body = b"ARROW1\0\0" + message
        return body + footer + struct.pack("<i", len(footer)) + b"ARROW1"

    def table(slots):
        """A table of scalars, after the root offset: slot -> (layout, value)."""
        body = b""
        places = {}
        for slot, packed in slots.items():
            body += bytes(-len(body) % len(packed[:8]) if len(packed) <= 8 else 0)
            places[slot] = 4 + len(body)
            body += packed
        count = max(slots, default=-1) + 1
        vtable = struct.pack("<HH", 4 + 2 * count, 4 + len(body))
        vtable += b"".join(struct.pack("<H", places.get(slot, 0)) for slot in range(count))
        vtable += bytes(-len(vtable) % 4)
        return struct.pack("<I", 4 + len(vtable)) + vtable + struct.pack("<i", len(vtable)) + body

    version = struct.pack("<h", 4)
    refused(file_of(b""), "manifest-invalid", match="cut|footer")
    refused(file_of(table({})), "manifest-invalid", match="version 5")
    refused(file_of(table({0: version})), "manifest-invalid", match="0 record batches")
    # A footer whose vector of one batch lies inside itself, without schema.
    batches = struct.pack("<II", 4, 1) + struct.pack("<qiiq", 8, 8, 0, 0)
    refused(file_of(table({0: version + b"\0\0", 3: batches})), "manifest-invalid", match="no schema")
    schema = arrow_file()
    length = int.from_bytes(schema[-10:-6], "little")
    footer = schema[-10 - length : -10]
    for message in (b"", bytes(8), b"\xff\xff\xff\xff" + struct.pack("<i", 1 << 20)):
        refused(file_of(footer, message), "manifest-invalid")
    refused(file_of(bytes(8)), "manifest-invalid")
    refused(b"ARROW1" + bytes(12) + struct.pack("<i", 99) + b"ARROW1" * 2, "manifest-invalid", match="footer")
    refused(b"ARROW1\0\0" * 4, "manifest-invalid", match="not an Arrow file")


def message_of(content):
    footer, _ = arrow_guard._footer(memoryview(content), "")
    at, _ = footer.vector(3)
    offset, metadata_bytes, _ = footer.block(at)
    return offset, metadata_bytes


def test_the_message_of_the_batch_is_checked():
    """DF-MAN-01: continuation marker, length, version, kind, content."""
    content = arrow_file()
    offset, length = message_of(content)

    def changed(at, data):
        damaged = bytearray(content)
        damaged[offset + at : offset + at + len(data)] = data
        return bytes(damaged)

    refused(changed(0, b"\0\0\0\0"), "manifest-invalid", match="continuation")
    refused(changed(4, struct.pack("<i", length)), "manifest-invalid", match="does not fit")
    refused(changed(4, struct.pack("<i", -4)), "manifest-invalid", match="does not fit")
    root = offset + 8 + struct.unpack_from("<I", content, offset + 8)[0]
    vtable = root - struct.unpack_from("<i", content, root)[0]
    header = struct.unpack_from("<H", content, vtable + 8)[0]
    assert header
    refused(changed(vtable + 8 - offset, b"\0\0"), "manifest-invalid", match="empty")


def test_buffers_share_no_bytes(monkeypatch):
    """DF-LIM-02: a body of one buffer under many names would multiply what a reader takes."""
    content = arrow_file()
    offset, length = message_of(content)
    batch = arrow_guard._root(memoryview(content)[offset + 8 : offset + length], "").table(2)
    start, count = batch.vector(2)
    place = offset + 8 + start
    body = len(content)
    last = place + 16 * (count - 1)
    (inside,) = struct.unpack_from("<q", content, last - 32)
    for at, value, match in (
        (last + 8, body, "leads out"),
        (last + 8, -1, "negative"),
        (last + 8, 1 << 62, "leads out"),
        (last, -8, "negative"),
        (last, inside, "overlap"),
    ):
        damaged = bytearray(content)
        struct.pack_into("<q", damaged, at, value)
        refused(bytes(damaged), "manifest-invalid", match=match)
    monkeypatch.setattr(arrow_guard, "_MAX_BUFFERS", count - 1)
    refused(content, "limit-exceeded", match="buffers")


def test_big_endian_files_are_refused():
    """SPEC 2: all integers are little-endian."""
    content = bytearray(arrow_file())
    footer, start = arrow_guard._footer(memoryview(content), "")
    schema = footer.table(1)
    place = schema._at(0)
    if not place:  # pyarrow leaves the default out: make the member alias another that is not 0
        vtable = schema.position - struct.unpack_from("<i", schema.data, schema.position)[0]
        struct.pack_into(
            "<H", content, start + vtable + 4, struct.unpack_from("<H", schema.data, vtable + 6)[0]
        )
    else:
        struct.pack_into("<h", content, start + place, 1)
    refused(bytes(content), "manifest-invalid", match="big-endian")


def test_the_batch_must_lie_before_the_footer():
    """DF-LIM-02: a block's numbers are compared with the file."""
    content = arrow_file()
    footer, start = arrow_guard._footer(memoryview(content), "")
    at, _ = footer.vector(3)
    for layout, where, value in (
        ("<q", 0, 0),
        ("<q", 0, 1 << 40),
        ("<i", 8, 0),
        ("<q", 16, -1),
        ("<q", 16, 1 << 62),
    ):
        damaged = bytearray(content)
        struct.pack_into(layout, damaged, start + at + where, value)
        refused(bytes(damaged), "manifest-invalid", match="before its footer")


def test_nothing_beside_the_schema_has_custom_metadata():
    """DF-MAN-01: a library looks extension types up among what any package has registered, and runs it."""
    named = pa.field("x", pa.int64(), metadata={"ARROW:extension:name": "somebody.tensor"})
    refused(arrow_file(extra=[(named, pa.array([0, 0]))]), "manifest-invalid", match="custom metadata")

    batch = pa.RecordBatch.from_pydict({"x": [1]})
    for where in ("footer", "message"):
        sink = pa.BufferOutputStream()
        extra = {"a": "b" * 100}
        with pa.ipc.new_file(sink, batch.schema, metadata=extra if where == "footer" else None) as writer:
            writer.write_batch(batch, custom_metadata=extra if where == "message" else None)
        with pytest.raises(MalformedError, match=f"its {where} has custom metadata"):
            arrow_guard.check_arrow_file(memoryview(sink.getvalue()))


def test_what_types_carry_is_counted():
    """DF-LIM-02: a time zone is a string of any length, and many fields may name one type."""
    zone = pa.timestamp("s", tz="Z" * 1000)
    content = arrow_file(extra=[(pa.field("t", zone), pa.array([0, 0], zone))])
    decode_file(content)
    footer, _ = arrow_guard._footer(memoryview(content), "")
    fields = footer.table(1).tables(1)
    assert [arrow_guard._type_bytes(field) for field in fields] == [0] * (len(fields) - 1) + [1000]
    union = pa.field("u", pa.dense_union([pa.field("a", pa.int8())], [5]))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([union])):
        pass
    footer, _ = arrow_guard._footer(memoryview(sink.getvalue()), "")
    assert [arrow_guard._type_bytes(field) for field in footer.table(1).tables(1)] == [4]
