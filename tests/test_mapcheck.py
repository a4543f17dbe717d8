"""Rules on maps that need a store, or a parent, to be broken."""

from dataclasses import replace

import numpy as np
import pytest
import zstandard
from mapmaker import BLOCK, DIGEST, pack_key, small_map

import deltaformat as df
from deltaformat.dtypes import get_dtype, tensor_nbytes
from deltaformat.errors import ErrorCode, MalformedError
from deltaformat.keys import record_key
from deltaformat.manifest import decode_part, encode_part
from deltaformat.mapcheck import PIECE_SLACK, check_map, check_packs
from deltaformat.packs import PackRef
from deltaformat.versionmap import NOT_FRESH, VersionMapBuilder


def one_block_map(length, *, encoding=1, packs=1):
    builder = VersionMapBuilder(
        digest_bytes=16, packs=[PackRef(pack_key(number), 1 << 20) for number in range(packs)]
    )
    builder.add_tensor(
        "w",
        "U8",
        (BLOCK,),
        digests=np.zeros((1, 16), np.uint8),
        fresh=np.array([NOT_FRESH], np.uint8),
        depth=np.array([1], np.uint8),
        pack=np.array([packs - 1]),
        offset=np.array([0]),
        length=np.array([length]),
        encoding=np.array([encoding]),
    )
    return builder.finish()


def test_a_piece_stays_in_proportion_to_its_block():
    """DF-PCK-04: a small block cannot make a reader fetch gigabytes."""
    limit = 2 * BLOCK + PIECE_SLACK
    check_map(one_block_map(limit), digest_bytes=16, block_bytes=BLOCK, has_parent=False)
    with pytest.raises(MalformedError) as caught:
        check_map(one_block_map(limit + 1), digest_bytes=16, block_bytes=BLOCK, has_parent=False)
    assert caught.value.code is ErrorCode.MANIFEST_INVALID


def test_the_pack_table_names_an_object_once():
    """DF-MAN-11: otherwise the piece before in the same pack would be ambiguous."""
    first, second = PackRef(pack_key(0), 9), PackRef(pack_key(1), 9)
    assert check_packs([first, second]).tolist() == [9, 9]
    with pytest.raises(MalformedError, match="twice in the pack table"):
        check_packs([first, second, PackRef(pack_key(0), 8)])


def test_a_manifest_frame_has_a_bounded_window():
    """DF-MAN-02."""
    frame, content_size = encode_part(small_map(parent=False), parent=None, digest=DIGEST, block_bytes=BLOCK)
    content = zstandard.ZstdDecompressor().decompress(frame)
    # A frame by hand: content size in 4 bytes, a window descriptor, one raw block.
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content

    def by_hand(window_log):
        head = (
            b"\x28\xb5\x2f\xfd" + bytes([0x80, (window_log - 10) << 3]) + len(content).to_bytes(4, "little")
        )
        return head + block

    facts = {
        "content_size": content_size,
        "where": "part",
        "digest": DIGEST,
        "block_bytes": BLOCK,
        "parent": None,
    }
    assert decode_part(by_hand(27), **facts).names
    with pytest.raises(MalformedError, match="window"):
        decode_part(by_hand(28), **facts)


@pytest.mark.parametrize("shape", [(1 << 40, 0, 1 << 40), (0, 1 << 60)])
def test_no_array_could_have_such_axes(shape):
    """DF-MAN-06: a dimension of 0 counts as 1."""
    with pytest.raises(MalformedError):
        tensor_nbytes(get_dtype("U8"), shape)
    assert tensor_nbytes(get_dtype("U8"), (1 << 40, 0)) == 0


def test_fresh_needs_a_counterpart_in_the_parent(monkeypatch):
    """DF-MAN-08: `follow` and `verify` refuse a map that relates a block to one the parent does not have."""
    store = df.create("memory://mapcheck-fresh", block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors={"a": np.arange(100)})
        writer.commit(step=1, tensors={"a": np.arange(100), "b": np.arange(9)}, allow_set_change=True)
    before, after = store.version(step=0), store.version(step=1)
    after.map = replace(after.map, fresh=np.zeros_like(after.map.fresh))
    with pytest.raises(MalformedError, match="DF-MAN-08"):
        after.follow(before, before.state_dict())

    from deltaformat import verify

    original = verify.load_map

    def tampered(context, commit):
        version = original(context, commit)
        return replace(version, fresh=np.zeros_like(version.fresh)) if commit.step == 1 else version

    monkeypatch.setattr(verify, "load_map", tampered)
    findings = store.verify(all=True).findings
    assert [finding.code for finding in findings] == ["manifest-invalid"]


def test_records_say_what_manifests_use(monkeypatch):
    """DF-CMT-08: a collector believes `objects_added`; `verify` finds a record that leaves a pack out."""
    from deltaformat import writer as writing

    store = df.create("memory://mapcheck-objects", block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors={"a": np.arange(100)}, files={"f": b"x"})
        writer.commit(step=1, tensors={"a": np.arange(1, 101)})
        assert store.verify(all=True).findings == []
        original = writing.object_changes
        monkeypatch.setattr(writing, "object_changes", lambda new, old: ([], original(new, old)[1]))
        writer.commit(step=2, tensors={"a": np.arange(2, 102)})
    assert [finding.code for finding in store.verify().findings] == ["parts-disagree"]
    assert [finding.code for finding in store.verify(all=True).findings] == ["parts-disagree"]
    assert store.verify(step=1).findings == []


def test_unchanged_blocks_have_the_parents_digests(monkeypatch):
    """DF-MAN-08: `fresh` 0 with another digest is a contradiction."""
    from deltaformat import verify

    store = df.create("memory://mapcheck-digests", block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors={"a": np.arange(100)})
        writer.commit(step=1, tensors={"a": np.arange(1, 101)})
    original = verify.load_map

    def tampered(context, commit):
        version = original(context, commit)
        return replace(version, fresh=np.zeros_like(version.fresh)) if commit.step == 1 else version

    monkeypatch.setattr(verify, "load_map", tampered)
    assert [finding.code for finding in store.verify(step=1).findings] == ["manifest-invalid"]


def test_a_large_map_is_written_in_several_parts(monkeypatch):
    """DF-LIM-01, DF-MAN-05: no part above what every reader accepts; files stand in one of them."""
    from deltaformat import writer as writing
    from deltaformat.manifest import divide

    monkeypatch.setattr(writing, "divide", lambda version: divide(version, 1000))
    store = df.create("memory://mapcheck-parts", block_bytes=BLOCK)
    states = [{f"layer.{i}": np.full(40, i * 7 + step) for i in range(30)} for step in range(3)]
    with store.writer() as writer:
        for step, state in enumerate(states):
            writer.commit(step=step, tensors=state, files={"f": b"x"})
    record = store.log(limit=1)[0]
    assert 3 < len(record.manifests) <= 30
    previous = store.version(step=1)
    version = store.version(step=2)
    assert version.read_file("f") == b"x"
    followed = version.follow(previous, previous.state_dict())
    for name, expected in states[2].items():
        assert version.get_tensor(name).tobytes() == expected.tobytes() == followed[name].tobytes()
    assert store.verify(all=True).findings == []
    assert divide(version.map) == [version.map]


def test_verify_goes_on_behind_a_damaged_record():
    """What lies before a record that cannot be read is still checked."""
    store = df.create("memory://mapcheck-damaged", block_bytes=BLOCK)
    with store.writer() as writer:
        for step in range(4):
            writer.commit(step=step, tensors={"a": np.arange(100) + step})
    storage = store._context.storage
    record = storage.get(record_key(3))
    storage.put(record_key(3), record.replace(b"commit", b"tommic"))
    report = df.open(storage).verify(all=True)
    assert [finding.code for finding in report.findings] == ["hash-mismatch"]
    assert (report.records, report.versions) == (3, 2)
    assert df.open(storage).verify(step=3).versions == 0
