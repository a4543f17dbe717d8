"""Packs are ordinary safetensors files, whatever names they hold; and no header fools the parser."""

import hashlib
import json
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from deltaformat import packs
from deltaformat.errors import DeltaFormatError, ErrorCode, LimitError, MalformedError, UnsupportedError
from deltaformat.packs import PAYLOAD, PackBuilder, parse_safetensors, safetensors_data_start


def written(builder):
    """The pack's file, checked against what `finish` says."""
    pack = builder.finish()
    data = b"".join(pack.chunks)
    assert len(data) == pack.size <= builder.size
    assert pack.sha256() == hashlib.sha256(data).hexdigest()
    return data, pack.offsets.tolist()


def piece(data, offset, content):
    return data[offset : offset + len(content)] == bytes(content)


def test_a_pack_of_payloads_has_one_tensor():
    """DF-PCK-01, DF-PCK-02: everything but whole raw tensors lies in `deltaformat.payload`."""
    builder = PackBuilder()
    payloads = [b"abc", bytearray(b"d" * 1000), memoryview(b"e"), np.arange(7, dtype=np.uint8)]
    assert [builder.add(payload) for payload in payloads] == [0, 1, 2, 3]
    data, offsets = written(builder)
    tensors = dict(safetensors.deserialize(data))
    assert list(tensors) == [PAYLOAD]
    assert tensors[PAYLOAD]["dtype"] == "U8"
    assert bytes(tensors[PAYLOAD]["data"]) == b"".join(map(bytes, payloads))
    assert all(piece(data, offset, payload) for offset, payload in zip(offsets, payloads, strict=True))


def test_whole_tensors_come_first_aligned_under_their_names():
    """DF-PCK-02: by falling element size, so that each is aligned; names that mean something else
    go into the payload.
    """
    builder = PackBuilder()
    cases = [
        ("bytes", "U8", (3,), 3),
        ("half", "BF16", (5, 1), 10),
        ("payload", None, None, 77),
        ("double", "F64", (2,), 16),
        ("scalar", "F32", (), 4),
        ("four", "F4", (2, 3), 3),
        ("complex", "C64", (1,), 8),
        (PAYLOAD, "F32", (1,), 4),
        ("__metadata__", "F32", (1,), 4),
        ("half", "BF16", (1,), 2),
    ]
    rng = np.random.default_rng(0)
    contents = [rng.integers(0, 256, size, dtype=np.uint8) for *_, size in cases]
    for (name, dtype, shape, _), content in zip(cases, contents, strict=True):
        if dtype is None:
            builder.add(content)
        else:
            builder.add_tensor(name, dtype, shape, content)
    data, offsets = written(builder)
    assert all(piece(data, offset, content) for offset, content in zip(offsets, contents, strict=True))
    header = parse_safetensors(data, len(data))
    assert list(header.tensors) == ["double", "complex", "scalar", "half", "bytes", "four", PAYLOAD]
    assert header.tensors[PAYLOAD].end == len(data)
    assert header.metadata == {"format": "pt"}
    for name, entry in header.tensors.items():
        width = {"F64": 8, "C64": 8, "F32": 4, "BF16": 2}.get(entry.dtype, 1)
        assert entry.start % width == 0, name
    tensors = dict(safetensors.deserialize(data))
    assert set(tensors) == set(header.tensors)
    assert tensors["scalar"]["shape"] == []


def test_torch_loads_a_pack_of_raw_tensors():
    """DF-PCK-02: a raw keyframe is an ordinary checkpoint file."""
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load
    builder = PackBuilder()
    builder.add(b"odd")
    source = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "c": torch.tensor(2.5, dtype=torch.float64),
    }
    for name, tensor in source.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        dtype = {"a": "U8", "b": "BF16", "c": "F64"}[name]
        builder.add_tensor(name, dtype, tuple(tensor.shape), raw)
    loaded = load(written(builder)[0])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in source.items())
    assert bytes(loaded[PAYLOAD].tolist()) == b"odd"


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    st.dictionaries(NAMES, st.integers(1, 9), max_size=8),
    st.lists(st.binary(min_size=1, max_size=9), max_size=4),
)
def test_any_names_make_a_valid_file(tensors, payloads):
    """DF-PCK-01: names are any text; the independent library agrees on every one."""
    builder = PackBuilder()
    for name, size in tensors.items():
        builder.add_tensor(name, "I8", (size,), bytes(size))
    for payload in payloads:
        builder.add(payload)
    data, _ = written(builder)
    assert int.from_bytes(data[:8], "little") % 8 == 0
    theirs = {name: (info["shape"], len(info["data"])) for name, info in safetensors.deserialize(data)}
    ours = {
        name: (list(e.shape), e.end - e.start)
        for name, e in parse_safetensors(data, len(data)).tensors.items()
    }
    assert ours == theirs
    assert set(tensors) - {"__metadata__", PAYLOAD} <= set(ours)


def test_nothing_is_copied():
    """A pack of 64 MiB must not become two: its chunks are the caller's own memory."""
    big = np.zeros(1 << 20, np.uint8)
    builder = PackBuilder()
    builder.add(big)
    chunk = builder.finish().chunks[1]
    big[5] = 9
    assert chunk[5] == 9


def test_what_a_pack_does_not_take():
    """DF-PCK-04, DF-BLK-02, DF-DTY-01: no empty piece, no tensor without bytes or of another size."""
    builder = PackBuilder()
    for call in (
        lambda: builder.add(b""),
        lambda: builder.add_tensor("x", "F32", (0,), b""),
        lambda: builder.add_tensor("x", "F32", (2,), b"1234"),
    ):
        with pytest.raises(MalformedError) as caught:
            call()
        assert caught.value.code is ErrorCode.INPUT_INVALID
    with pytest.raises(UnsupportedError):
        builder.add_tensor("x", "F31", (1,), b"1234")
    assert builder.finish().offsets.size == 0


def test_a_full_header_sends_tensors_to_the_payload(monkeypatch):
    """Libraries refuse headers above 100 MB: a pack never has one."""
    monkeypatch.setattr(packs, "MAX_HEADER_BYTES", 6 * 65_535 + 2_000)
    builder = PackBuilder()
    for number in range(40):
        builder.add_tensor(f"tensor {number}", "U8", (1,), b"x")
    assert builder.header_full
    data, offsets = written(builder)
    names = list(parse_safetensors(data, len(data)).tensors)
    assert PAYLOAD in names
    assert 2 < len(names) < 40
    assert len(set(offsets)) == 40


# -- the parser ------------------------------------------------------------------------------------


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN = {
    "shorter than 8 bytes": b"1234567",
    "a header beyond the file": struct.pack("<Q", 100) + b"{}",
    "no object": file_of(b"[]"),
    "spaces first": file_of(b' {"a":1}'),
    "cut JSON": file_of(b'{"a":'),
    "a byte that is not UTF-8": file_of(b'{"\xff":1}'),
    "a lone surrogate": file_of({"\ud800": entry()}, b"1234"),
    "a name twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"1234"),
    "a member twice": file_of(b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "NaN": file_of(b'{"a":NaN}'),
    "a fraction": file_of(b'{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}', b"1234"),
    "100,000 brackets": file_of(b'{"a":' + b"[" * 100_000),
    "a number of 5,000 digits": file_of(b'{"a":' + b"9" * 5_000 + b"}"),
    "no tensor but a number": file_of({"a": 1}),
    "no dtype": file_of({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "a shape of text": file_of({"a": entry(shape=["4"])}, b"1234"),
    "a shape of booleans": file_of({"a": entry(shape=[True], offsets=[0, 1])}, b"1"),
    "a negative dimension": file_of({"a": entry(shape=[-4])}, b"1234"),
    "a dimension of 2^64": file_of({"a": entry(shape=[1 << 64])}, b"1234"),
    "33 dimensions": file_of({"a": entry(shape=[1] * 32 + [4])}, b"1234"),
    "one offset": file_of({"a": entry(offsets=[0])}, b"1234"),
    "three offsets": file_of({"a": entry(offsets=[0, 2, 4])}, b"1234"),
    "offsets that fall": file_of({"a": entry(offsets=[4, 0])}, b"1234"),
    "a size that is not the shape's": file_of({"a": entry(shape=[3])}, b"1234"),
    "half a byte": file_of({"a": entry("F4", [3], [0, 1])}, b"1"),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}}),
    "metadata of text": file_of({"__metadata__": "a"}),
    "a gap before": file_of({"a": entry(offsets=[1, 5])}, b"12345"),
    "a gap between": file_of({"a": entry(), "b": entry(offsets=[5, 9])}, b"123456789"),
    "an overlap": file_of({"a": entry(), "b": entry(offsets=[3, 7])}, b"1234567"),
    "the same bytes twice": file_of({"a": entry(), "b": entry()}, b"1234"),
    "bytes after": file_of({"a": entry()}, b"12345"),
    "bytes missing": file_of({"a": entry()}, b"123"),
    "data without tensors": file_of({}, b"1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused(case):
    """DF-PCK-01: each fault by itself."""
    data = BROKEN[case]
    with pytest.raises(MalformedError) as caught:
        parse_safetensors(data, len(data), where="file")
    assert caught.value.code is ErrorCode.PACK_INVALID
    assert caught.value.where == "file"


def test_what_else_is_refused():
    """DF-LIM-02, DF-DTY-01: a huge length before anything is read, an unknown dtype, a head that is
    not all there.
    """
    with pytest.raises(LimitError):
        safetensors_data_start(struct.pack("<Q", 1 << 60), 1 << 62)
    with pytest.raises(LimitError):
        safetensors_data_start(b"<!DOCTYPE html>", 1 << 62)
    with pytest.raises(UnsupportedError):
        parse_safetensors(file_of({"a": entry("U4")}, b"1234"), 100 + 4)
    with pytest.raises(MalformedError, match="header bytes are there"):
        parse_safetensors(file_of({"a": entry()})[:-1], 100)


def test_what_is_accepted():
    """Any order, padding, unknown members, tensors without bytes, a head without its data, no
    tensors at all.
    """
    header = {
        "late": entry(offsets=[4, 8]) | {"unknown": [{}]},
        "empty": entry("F32", [0, 3], [8, 8]),
        "none": entry("F32", [0], [0, 0]),
        "early": entry(),
        "__metadata__": {"a": "b"},
    }
    data = file_of(json.dumps(header).encode() + b"   \n", bytes(8))
    assert safetensors_data_start(data[:8], len(data)) == len(data) - 8
    parsed = parse_safetensors(data[:-8], len(data))
    assert list(parsed.tensors) == ["none", "early", "late", "empty"]
    assert parsed.tensors["late"].start == len(data) - 4
    assert parsed.metadata == {"a": "b"}
    assert set(dict(safetensors.deserialize(data))) == set(parsed.tensors)
    assert parse_safetensors(file_of({}), 10).tensors == {}


def test_every_byte_of_a_header_changed_or_cut():
    """Whatever the damage, the parser answers with an error of ours, or with tensors that tile the file."""
    data = file_of({"a": entry(), "b": entry("F16", [2, 1], [4, 8])}, b"12345678")
    for position in range(len(data) - 8):
        for change in (0xFF, 0x01, 0x10):
            damaged = bytearray(data)
            damaged[position] ^= change
            try:
                parsed = parse_safetensors(damaged, len(data))
            except DeltaFormatError:
                continue
            assert sum(e.end - e.start for e in parsed.tensors.values()) == len(data) - parsed.data_start
        with pytest.raises(DeltaFormatError):
            parse_safetensors(data[:position], position)
