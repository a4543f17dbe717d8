"""Manifest parts: what is written comes back; whatever else is in one is refused, before it can do harm."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from mapmaker import (
    BLOCK,
    DIGEST,
    EXTERNAL,
    D,
    arrow_file,
    columns,
    decode,
    decode_file,
    file_ref,
    frame,
    metadata,
    pack_key,
    refused,
    same_map,
    small_map,
)

from deltaformat import arrow, manifest
from deltaformat.errors import DeltaFormatError, ErrorCode, LimitError, MalformedError
from deltaformat.manifest import encode_part
from deltaformat.packs import ExternalRef, PackRef

U8, U32, I64 = (pa.list_(kind()) for kind in (pa.uint8, pa.uint32, pa.int64))


# -- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", [None, 0, 3])
def test_a_map_comes_back(parent):
    """DF-MAN-03, DF-MAN-04: offsets, counts, odd names, empty and rank 0 tensors, externals and
    files survive.
    """
    version = small_map(parent=parent is not None, files=[file_ref(), file_ref("a/b.txt", 1)])
    data, content_size = encode_part(version, parent=parent, digest=DIGEST, block_bytes=BLOCK)
    found = decode(data, content_size, parent=parent)
    same_map(version, found)
    assert found.files == version.files
    assert set(found.packs) == {PackRef(pack_key(0), 1 << 20), EXTERNAL, PackRef(pack_key(1), 1 << 20)}
    assert repr(found) == f"<VersionMap tensors=4 blocks=11 pieces={len(found.pack)}>"


def test_rows_can_be_written_apart():
    """A part holds some tensors, and names only the packs that these use (SPEC 11)."""
    version = small_map(files=[file_ref()])
    data, content_size = encode_part(version.take([2, 1]), parent=3, digest=DIGEST, block_bytes=BLOCK)
    found = decode(data, content_size)
    assert found.names == ("scalar", "")
    assert found.files == ()
    assert len(found.packs) == len(set(found.pack.tolist()))
    same_map(version.take([2, 1]).compact(), found)


def test_a_map_without_tensors_comes_back():
    """An empty set of tensors is a set."""
    version = small_map().take([])
    data, content_size = encode_part(version, parent=None, digest=DIGEST, block_bytes=BLOCK)
    found = decode(data, content_size, parent=None)
    assert (found.names, found.packs, found.digest.shape) == ((), (), (0, D))
    only_empty = small_map().take([1])
    data, content_size = encode_part(only_empty, parent=None, digest=DIGEST, block_bytes=BLOCK)
    assert decode(data, content_size, parent=None).shapes == ((0, 4),)


def test_a_foreign_file_is_read():
    """DF-PCK-04, DF-MAN-03: gaps count from the end of the piece before in the same pack, over rows."""
    found = decode_file(arrow_file())
    assert found.offset.tolist() == [100, 356, 50, 456, 80]
    assert found.block_start.tolist() == [0, 3, 4]
    assert found.piece_start.tolist() == [0, 1, 3, 4, 5]


def test_order_unknown_columns_and_names_of_children_are_free():
    """DF-MAN-01, DF-JSN-02: any order, unknown columns of any type, nullability, child names,
    unknown members.
    """
    expected = decode_file(arrow_file())
    arrays = dict(reversed(columns().items()))
    odd = pa.list_(pa.field("element", pa.uint8(), nullable=False))
    arrays["fresh"] = pa.array([[0, 1, 255], [0]], odd)
    extra = [
        (pa.field("notes", pa.struct([("x", pa.string())])), pa.array([{"x": "y"}, None])),
        (
            pa.field("more", pa.large_list(pa.float16())),
            pa.array([[np.float16(1)], None], pa.large_list(pa.float16())),
        ),
    ]
    found = decode_file(arrow_file(arrays, metadata(unknown=[1.5, {"x": None}]), extra=extra))
    same_map(expected, found)


def test_lists_may_begin_anywhere_in_their_child():
    """An Arrow list's first offset need not be 0."""
    arrays = columns()
    values = pa.array([9, None, 0, 1, 255, 0, 77], pa.uint8())
    arrays["fresh"] = pa.ListArray.from_arrays(pa.array([2, 5, 6], pa.int32()), values)
    assert decode_file(arrow_file(arrays)).fresh.tolist() == [0, 1, 255, 0]


def test_the_schema_is_that_of_the_specification():
    """The table between the marks in SPEC.md and the code name the same columns and types."""
    text = (Path(__file__).parents[1] / "SPEC.md").read_text()
    table = re.search(r"<!-- schema -->\n(.*?)<!-- end -->", text, re.DOTALL)[1]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE))
    assert rows == dict(arrow.SCHEMA)


def test_pyarrow_is_loaded_only_when_needed():
    """Importing the package's modules stays quick."""
    code = "import sys, deltaformat.manifest; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_the_written_file_is_plain_arrow():
    """DF-MAN-01: another reader finds one batch, nothing nullable, no dictionary."""
    version = small_map()
    data, content_size = encode_part(version, parent=3, digest=DIGEST, block_bytes=BLOCK)
    content = manifest.zstandard.ZstdDecompressor().decompress(data)
    assert len(content) == content_size
    reader = pa.ipc.open_file(content)
    assert reader.num_record_batches == 1
    assert not any(field.nullable for field in reader.schema)
    assert reader.get_batch(0).column("name").to_pylist() == list(version.names)


# -- what a writer refuses -------------------------------------------------------------------------


def test_a_writer_makes_no_part_that_readers_refuse(monkeypatch):
    """DF-MAN-07, DF-LIM-01: what breaks a rule, or is too large, is not written."""
    version = small_map(parent=True)
    with pytest.raises(MalformedError, match="DF-MAN-07"):
        encode_part(version, parent=None, digest=DIGEST, block_bytes=BLOCK)
    with pytest.raises(MalformedError, match="DF-BLK-02"):
        encode_part(version, parent=3, digest=DIGEST, block_bytes=2 * BLOCK)
    content_size = encode_part(version, parent=3, digest=DIGEST, block_bytes=BLOCK)[1]
    monkeypatch.setattr(manifest, "MAX_CONTENT_BYTES", content_size - 1)
    with pytest.raises(LimitError, match="bytes exceeds"):
        encode_part(version, parent=3, digest=DIGEST, block_bytes=BLOCK)
    monkeypatch.setattr(manifest, "MAX_CONTENT_BYTES", 100)
    with pytest.raises(LimitError, match="pieces exceeds"):
        encode_part(version, parent=3, digest=DIGEST, block_bytes=BLOCK)


# -- the frame -------------------------------------------------------------------------------------


def test_the_frame_is_checked_before_it_is_decompressed():
    """DF-MAN-02, DF-LIM-02: one frame that states the record's size, and nothing after it."""
    content = arrow_file()
    size = len(content)
    good = frame(content)

    def fails(data, code, content_size=size, **changes):
        with pytest.raises(DeltaFormatError) as caught:
            decode(data, content_size, **changes)
        assert caught.value.code is ErrorCode(code), caught.value

    decode(good, size)
    fails(good, "manifest-invalid", size + 1)
    fails(good, "manifest-invalid", size - 1)
    fails(good, "limit-exceeded", max_content=size - 1)
    fails(good, "limit-exceeded", (1 << 30) + 1)
    decode(good, size, max_content=size)
    fails(frame(content, write_content_size=False), "manifest-invalid")
    fails(good + b"\0", "manifest-invalid")
    fails(good + good, "manifest-invalid")
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"skip"
    fails(skippable + good, "manifest-invalid")
    fails(good + skippable, "manifest-invalid")
    fails(content, "manifest-invalid")
    fails(b"", "manifest-invalid")
    fails(frame(b""), "manifest-invalid", 0)
    fails(good[:-1], "frame-corrupt")
    fails(good[:20], "frame-corrupt")
    checked = bytearray(frame(content, write_checksum=True))
    decode(bytes(checked), size)
    checked[-1] ^= 1
    fails(bytes(checked), "frame-corrupt")
    dictionary = manifest.zstandard.ZstdCompressionDict(content * 4)
    fails(
        frame(content, dict_data=dictionary), "manifest-invalid" if dictionary.dict_id() else "frame-corrupt"
    )
    trained = manifest.zstandard.train_dictionary(
        2048, [bytes([i]) * 50 + content[i : i + 200] for i in range(99)]
    )
    fails(frame(content, dict_data=trained), "manifest-invalid")


def test_a_frame_that_claims_much_takes_no_memory():
    """DF-LIM-02: a few bytes that state a gigabyte are refused by that statement."""
    huge = struct.pack("<IBQ", 0xFD2FB528, 0b1110_0000, 1 << 40) + b"\x01\0\0"
    with pytest.raises(MalformedError, match="content_size"):
        decode(huge, 1000)
    with pytest.raises(LimitError):
        decode(huge, 1 << 40)


# -- the Arrow file --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", arrow.SCHEMA)
def test_every_column_must_be_there_once_with_its_type(name):
    """DF-MAN-01: missing, doubled, or of another type, large lists and dictionaries included."""
    array = columns()[name]
    refused(arrow_file(columns(**{name: ...})), "manifest-invalid", match="missing or doubled")
    doubled = [(pa.field(name, array.type), array)]
    refused(arrow_file(extra=doubled), "manifest-invalid", match="missing or doubled")
    for other in (
        (pa.large_utf8(), pa.binary(), pa.null())
        if name in ("name", "dtype")
        else (pa.list_(pa.int16()), pa.int64())
    ):
        wrong = pa.nulls(2, other)
        refused(arrow_file(columns(**{name: wrong})), "manifest-invalid", match="instead of")
    if pa.types.is_list(array.type):
        large = array.cast(pa.large_list(array.type.value_type))
        refused(arrow_file(columns(**{name: large})), "manifest-invalid", match="instead of")
    else:
        refused(
            arrow_file(columns(**{name: array.dictionary_encode()})), "manifest-invalid", match="dictionar"
        )


@pytest.mark.parametrize("name", arrow.SCHEMA)
def test_nulls_are_refused(name):
    """DF-MAN-01: no nulls, neither among the rows nor in the lists."""
    array = columns()[name]
    nulls = pa.array([None, *array.to_pylist()[1:]], array.type)
    refused(arrow_file(columns(**{name: nulls})), "manifest-invalid", match="nulls")
    if pa.types.is_list(array.type):
        lists = array.to_pylist()
        lists[0][0] = None
        refused(
            arrow_file(columns(**{name: pa.array(lists, array.type)})), "manifest-invalid", match="nulls in"
        )


def test_digests_of_another_size_are_refused():
    """DF-MAN-01: D is the digest's."""
    array = pa.array([[b"0" * 32] * 3, [b"0" * 32]], pa.list_(pa.binary(32)))
    refused(arrow_file(columns(digest=array)), "manifest-invalid", match="instead of")
    with_32 = arrow_file(columns(digest=array), metadata(digest="blake3-256"))
    assert decode_file(with_32, digest="blake3-256").digest.shape == (4, 32)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"compression": "lz4"},
        {"batches": 0},
        {"batches": 2},
        {"version": pa.ipc.MetadataVersion.V4},
        {"entry": b"other"},
    ],
    ids=str,
)
def test_other_forms_of_arrow_files_are_refused(options):
    """DF-MAN-01: one batch, uncompressed, of version 5, with the metadata entry."""
    refused(arrow_file(**options), "manifest-invalid")


def test_an_unknown_column_with_a_dictionary_is_refused():
    """DF-MAN-01: no dictionaries, anywhere."""
    array = pa.array(["x", "y"]).dictionary_encode()
    refused(arrow_file(extra=[(pa.field("more", array.type), array)]), "manifest-invalid", match="dictionar")


def test_compressed_buffers_never_reach_pyarrow(monkeypatch):
    """DF-LIM-02: a buffer states its own decompressed size; the guard refuses the file before that
    is believed.
    """
    monkeypatch.setattr(manifest, "read_arrow", None)
    refused(arrow_file(compression="zstd"), "manifest-invalid", match="compressed")


def test_invalid_utf8_is_refused():
    """DF-BLK-03: names and dtypes are valid UTF-8, without surrogates."""
    for bad in (b"\xff", b"\xed\xa0\x80", b"\xc0\x80"):
        offsets = pa.py_buffer(np.array([0, len(bad), len(bad) + 1], np.int32))
        array = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(bad + b"b"))
        refused(arrow_file(columns(name=array)), "manifest-invalid")


def test_offsets_of_lists_are_checked():
    """DF-MAN-01: offsets that fall or leave their child are found before they are followed."""
    content = arrow_file()
    good = struct.pack("<iii", 0, 3, 4)
    assert content.count(good) == 3  # of digest, fresh and depth
    for wrong in ((0, 5, 4), (0, 3, 90), (0, -3, 4), (-1, 3, 4), (0, 1 << 30, 4)):
        for number in range(3):
            pieces = content.split(good)
            damaged = (
                good.join(pieces[: number + 1])
                + struct.pack("<iii", *wrong)
                + good.join(pieces[number + 1 :])
            )
            refused(damaged, "manifest-invalid", match="valid Arrow")


# -- rows ------------------------------------------------------------------------------------------


def lists(kind, *rows):
    return pa.array(rows, kind)


ROWS = {
    "dtype unknown (DF-DTY-01)": ("dtype", pa.array(["BF17", "F32"]), "dtype-unknown"),
    "bits not whole bytes (DF-DTY-02)": ("dtype", pa.array(["BF16", "F4"]), "manifest-invalid"),
    "negative dimension (DF-MAN-06)": ("shape", lists(I64, [-30, -10], [1]), "manifest-invalid"),
    "rank 33 (DF-MAN-06)": ("shape", lists(I64, [30, 10] + [1] * 31, [1]), "manifest-invalid"),
    "more than 2^53 bytes (DF-MAN-06)": ("shape", lists(I64, [1 << 31, 1 << 31], [1]), "manifest-invalid"),
    "a product that wraps around (DF-MAN-06)": (
        "shape",
        lists(I64, [1 << 32, 1 << 32], [1]),
        "manifest-invalid",
    ),
    "another block count (DF-BLK-02)": ("shape", lists(I64, [30, 20], [1]), "manifest-invalid"),
    "a digest too many (DF-MAN-04)": (
        "digest",
        lists(pa.list_(pa.binary(D)), [b"0" * D] * 4, [b"0" * D]),
        "manifest-invalid",
    ),
    "a fresh too few (DF-MAN-04)": ("fresh", lists(U8, [0, 1], [0]), "manifest-invalid"),
    "depths in the wrong row (DF-MAN-04)": ("depth", lists(U8, [1, 2], [1, 1]), "manifest-invalid"),
    "a piece too few (DF-MAN-04)": ("pack", lists(U32, [0, 0, 1], [1]), "manifest-invalid"),
    "a piece in the wrong row (DF-MAN-04)": ("gap", lists(I64, [100, 0, 50], [10, 0]), "manifest-invalid"),
    "depth 0 (DF-MAN-04)": ("depth", lists(U8, [1, 3, 0], [1]), "manifest-invalid"),
    "fresh as large as depth (DF-MAN-07)": ("fresh", lists(U8, [0, 2, 255], [0]), "manifest-invalid"),
    "fresh 254 (DF-MAN-07)": ("fresh", lists(U8, [0, 254, 255], [0]), "manifest-invalid"),
    "a pack outside the table": ("pack", lists(U32, [0, 0, 2, 0], [1]), "manifest-invalid"),
    "a pack far outside": ("pack", lists(U32, [0, 0, 0xFFFF_FFFF, 0], [1]), "manifest-invalid"),
    "an empty piece (DF-PCK-04)": ("length", lists(U32, [256, 0, 30, 88], [4]), "manifest-invalid"),
    "a piece beyond its pack (DF-PCK-04)": (
        "length",
        lists(U32, [256, 900, 30, 88], [4]),
        "manifest-invalid",
    ),
    "a piece before its pack (DF-MAN-03)": ("gap", lists(I64, [100, -357, 50, 10], [0]), "manifest-invalid"),
    "a gap of -2^63 (DF-MAN-03)": ("gap", lists(I64, [-(1 << 63), 0, 50, 10], [0]), "manifest-invalid"),
    "gaps that wrap around (DF-MAN-03)": (
        "gap",
        lists(I64, [(1 << 63) - 1, (1 << 63) - 1, 50, 10], [0]),
        "manifest-invalid",
    ),
    "unknown encoding (DF-ENC-03)": ("encoding", lists(U8, [0, 1, 4, 0], [0]), "encoding-unknown"),
    "first piece with a base (DF-ENC-02)": ("encoding", lists(U8, [0, 2, 3, 0], [0]), "payload-invalid"),
    "second piece without (DF-ENC-02)": ("encoding", lists(U8, [0, 1, 1, 0], [0]), "payload-invalid"),
    "raw of another length (DF-ENC-04)": ("length", lists(U32, [255, 90, 30, 88], [4]), "payload-invalid"),
    "raw of a last block of another length (DF-ENC-04)": (
        "length",
        lists(U32, [256, 90, 30, 87], [4]),
        "payload-invalid",
    ),
    "a name twice (DF-MAN-05)": ("name", pa.array(["w", "w"]), "parts-disagree"),
    "a name of 65,536 bytes (DF-BLK-03)": ("name", pa.array(["w" * 65_536, "b"]), "value-invalid"),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_broken_row_is_refused(case):
    """Each rule on rows by one fault in a part that is good otherwise; ids as in the case's name."""
    column, array, code = ROWS[case]
    refused(arrow_file(columns(**{column: array})), code)


def test_numbers_at_their_limits_are_accepted():
    """DF-BLK-03, DF-LIM-01: the longest name, rank 32, a piece up to its pack's end, an empty
    tensor of huge axes.
    """
    arrays = columns(
        name=pa.array(["w" * 65_535, ""]),
        shape=pa.array([[30, 10] + [1] * 30, [1]], I64),
        gap=pa.array([[454, 0, 50, 112], [0]], I64),
    )
    found = decode_file(arrow_file(arrays))
    assert int(found.offset[3] + found.length[3]) == 1000
    empty = {name: array.slice(0, 1) for name, array in columns().items()}
    empty |= {
        name: pa.array([[]], array.type) for name, array in empty.items() if pa.types.is_list(array.type)
    }
    empty["shape"] = pa.array([[1 << 40, 0]], I64)
    assert decode_file(arrow_file(empty)).nbytes(0) == 0
    empty["shape"] = pa.array([[1 << 40, 0, 1 << 40]], I64)  # DF-MAN-06: which no array could have
    with pytest.raises(MalformedError):
        decode_file(arrow_file(empty))


def test_chains_of_64_pieces_are_accepted_and_no_longer_ones():
    """DF-MAN-04, DF-LIM-01, DF-WR-02: a chain has at most 64 pieces."""

    def chain(depth):
        arrays = {name: array.slice(1, 1) for name, array in columns().items()}
        arrays["depth"] = lists(U8, [depth])
        arrays["pack"] = lists(U32, [0] * depth)
        arrays["gap"] = lists(I64, [0] * depth)
        arrays["length"] = lists(U32, [4] + [1] * (depth - 1))
        arrays["encoding"] = lists(U8, [0] + [3] * (depth - 1))
        return arrow_file(arrays)

    assert decode_file(chain(64)).depth.tolist() == [64]
    refused(chain(65), "manifest-invalid", match="DF-MAN-04")


def test_without_a_parent_nothing_is_fresh():
    """DF-MAN-07: every value is 255."""
    members = metadata(parent=None)
    refused(arrow_file(members=members), "manifest-invalid", match="DF-MAN-07", parent=None)
    arrays = columns(fresh=pa.array([[255] * 3, [255]], U8))
    assert set(decode_file(arrow_file(arrays, members), parent=None).fresh.tolist()) == {255}


# -- metadata --------------------------------------------------------------------------------------


KEY = pack_key(5)
FILE = {"path": "a.json", "key": file_ref().key, "size": 1}
MEMBERS = {
    "not JSON (DF-JSN-01)": (b"{", "json-invalid"),
    "a member twice (DF-JSN-01)": (b'{"format":"deltaformat-manifest/1","format":"x"}', "json-invalid"),
    "a member missing (DF-JSN-01)": (metadata(files=...), "json-invalid"),
    "a member of another type (DF-JSN-01)": (metadata(packs={}), "json-invalid"),
    "another format (DF-DSC-02)": (metadata(format="deltaformat-manifest/2", packs=...), "format-unknown"),
    "an unknown feature (DF-VER-01)": (metadata(requires=["chains-of-trees"]), "feature-unknown"),
    "no feature name (DF-VER-01)": (metadata(requires=["X"]), "feature-unknown"),
    "another digest (DF-MAN-09)": (metadata(digest="blake3-256"), "parts-disagree"),
    "another block size (DF-MAN-09)": (metadata(block_bytes=512), "parts-disagree"),
    "another parent (DF-MAN-09)": (metadata(parent=4), "parts-disagree"),
    "no parent (DF-MAN-09)": (metadata(parent=None), "parts-disagree"),
    "a pack without size": (metadata(packs=[{"key": KEY}]), "json-invalid"),
    "a pack of negative size": (metadata(packs=[{"key": KEY, "size": -1}]), "value-invalid"),
    "a pack of huge size (DF-LIM-01)": (
        metadata(packs=[{"key": KEY, "size": (1 << 40) + 1}]),
        "limit-exceeded",
    ),
    "a key outside the grammar (DF-KEY-01)": (
        metadata(packs=[{"key": KEY + "x", "size": 1}]),
        "value-invalid",
    ),
    "a key that leaves the store (DF-KEY-01)": (
        metadata(packs=[{"key": "packs/../x", "size": 1}]),
        "value-invalid",
    ),
    "a record as a pack (DF-KEY-01)": (
        metadata(packs=[{"key": f"log/{1:020}.json", "size": 1}]),
        "value-invalid",
    ),
    "a key that is a number": (metadata(packs=[{"key": 1, "size": 1}]), "json-invalid"),
    "a pack with key and url": (metadata(packs=[{"key": KEY, "url": "x", "size": 1}]), "value-invalid"),
    "a url without hash": (metadata(packs=[{"url": EXTERNAL.url, "size": 1}]), "json-invalid"),
    "a url with half a hash": (
        metadata(packs=[{"url": EXTERNAL.url, "size": 1, "sha256": "ab"}]),
        "value-invalid",
    ),
    "a url with a hash in capitals": (
        metadata(packs=[{"url": "x:y", "size": 1, "sha256": "A" * 64}]),
        "value-invalid",
    ),
    "a pack twice": (metadata(packs=[{"key": KEY, "size": 1}] * 2), "manifest-invalid"),
    "a file without key": (metadata(files=[{"path": "x", "size": 1}]), "json-invalid"),
    "a file of another kind of key": (metadata(files=[FILE | {"key": KEY}]), "value-invalid"),
    "a path that climbs (DF-MAN-10)": (metadata(files=[FILE | {"path": "../x"}]), "path-unsafe"),
    "an absolute path (DF-MAN-10)": (metadata(files=[FILE | {"path": "/etc/passwd"}]), "path-unsafe"),
    "a path with a drive (DF-MAN-10)": (metadata(files=[FILE | {"path": "c:x"}]), "path-unsafe"),
    "a path twice (DF-MAN-10)": (metadata(files=[FILE, FILE]), "path-unsafe"),
}


@pytest.mark.parametrize("case", MEMBERS)
def test_broken_metadata_is_refused(case):
    """Each rule on the metadata by one fault; ids as in the case's name."""
    members, code = MEMBERS[case]
    refused(arrow_file(members=members), code)


def test_an_external_of_any_url_is_only_refused_when_it_is_read():
    """DF-EXT-03: a refused URL may have a copy in the store, so that a manifest which names it opens."""
    entry = {"url": "https://example.com/x", "size": 1000, "sha256": "c" * 64}
    packs = [entry, metadata()["packs"][1]]
    found = decode_file(arrow_file(members=metadata(packs=packs)))
    assert found.packs[0] == ExternalRef(**entry)


def test_no_pack_for_pieces():
    """A pack index needs a table, also an empty one."""
    refused(arrow_file(members=metadata(packs=[])), "manifest-invalid", match="table")


def test_numbers_above_the_limits_are_refused(monkeypatch):
    """DF-LIM-01: packs of a part, tensors of a version."""
    monkeypatch.setattr(manifest, "MAX_PACKS", 1)
    refused(arrow_file(), "limit-exceeded", match="packs")
    monkeypatch.setattr(manifest, "MAX_PACKS", 2)
    monkeypatch.setattr(manifest, "_MAX_OBJECTS", 20)
    decode_file(arrow_file())
    refused(arrow_file(members=metadata(more=[[]] * 20)), "limit-exceeded", match="objects")
    monkeypatch.setattr(manifest, "MAX_TENSORS", 1)
    refused(arrow_file(), "limit-exceeded", match="tensors")
    monkeypatch.setattr(manifest, "MAX_METADATA_BYTES", 300)
    refused(arrow_file(), "limit-exceeded")


# -- anything else ---------------------------------------------------------------------------------


def outcome(data, content_size, check=True):
    """A map that is good in itself, or one of our errors."""
    try:
        found = decode(data, content_size)
    except DeltaFormatError:
        return None
    if not check:
        return found
    again, size = encode_part(found, parent=3, digest=DIGEST, block_bytes=BLOCK)
    same_map(found.compact(), decode(again, size))
    return found


def test_every_byte_of_the_arrow_file_changed():
    """DF-MAN-01, DF-LIM-02: no flip crashes, hangs or lets a map through that breaks a rule."""
    content = arrow_file()
    accepted = 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF if position % 3 else 1 << position % 8
        found = outcome(frame(bytes(damaged)), len(content), check=not accepted % 8)
        accepted += found is not None
    assert accepted  # padding, digests, the leading schema: so the loop does reach the end of the parser


def test_every_cut_of_the_arrow_file():
    """A truncated file is refused, wherever it ends."""
    content = arrow_file()
    for end in range(1, len(content), 3):
        assert outcome(frame(content[:end]), end) is None


def test_every_byte_of_the_frame_changed_or_cut():
    """DF-MAN-02: the same for the compressed bytes (whose SHA-256 is checked before, in a store)."""
    content = arrow_file()
    data = frame(content)
    for position in range(len(data)):
        for change in (0xFF, 1 << position % 8):
            damaged = bytearray(data)
            damaged[position] ^= change
            outcome(bytes(damaged), len(content))
        assert outcome(data[:position], len(content)) is None


# -- size and speed --------------------------------------------------------------------------------


def test_a_hundred_thousand_tensors():
    """Time and size grow with the number of tensors, and nothing is done per block."""
    import time

    count = 100_000
    version = small_map().take([2])
    big = version.take(np.zeros(count, np.int64))
    big = type(big)(
        **{
            **{name: getattr(big, name) for name in type(big).__dataclass_fields__},
            "names": tuple(f"layers.{i}.weight" for i in range(count)),
        }
    )
    started = time.process_time()
    data, content_size = encode_part(big, parent=3, digest=DIGEST, block_bytes=BLOCK)
    found = decode(data, content_size)
    assert time.process_time() - started < 10  # takes 0.3 s; a quadratic scan takes hours
    assert found.index["layers.99999.weight"] == 99_999
