"""Small maps, and manifest parts written with pyarrow alone, so that a test can break one rule at a time."""

import json

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from deltaformat.encodings import Encoding
from deltaformat.errors import DeltaFormatError, ErrorCode
from deltaformat.manifest import decode_part
from deltaformat.packs import ExternalRef, FileRef, PackRef
from deltaformat.versionmap import VersionMap, VersionMapBuilder

BLOCK = 256
DIGEST = "xxh3-128"
D = 16


def pack_key(number=0):
    return f"packs/{7:020}/{number:064x}.safetensors"


def file_ref(path="config.json", number=0):
    return FileRef(path, f"files/{7:020}/{number:064x}", 12)


EXTERNAL = ExternalRef("hf://org/model@" + "a" * 40 + "/model.safetensors", 1 << 33, "b" * 64)


def add(builder, rng, name, dtype, shape, blocks, *, packs=2, parent=True, max_depth=4, size=1 << 20):
    depth = rng.integers(1, max_depth + 1, blocks).astype(np.uint8)
    pieces = int(depth.sum())
    first = np.zeros(pieces, bool)
    first[np.cumsum(depth) - depth] = True
    fresh = (
        np.where(rng.random(blocks) < 0.5, rng.integers(0, depth), 255) if parent else np.full(blocks, 255)
    )
    builder.add_tensor(
        name,
        dtype,
        shape,
        digests=rng.integers(0, 256, (blocks, D), dtype=np.uint8),
        fresh=fresh.astype(np.uint8),
        depth=depth,
        pack=rng.integers(0, packs, pieces),
        offset=rng.integers(0, size - 300, pieces),
        length=rng.integers(1, 300, pieces),
        encoding=np.where(
            first, Encoding.PLANES, rng.choice([Encoding.SPARSE, Encoding.PLANES_DELTA], pieces)
        ),
    )


def small_map(seed=0, *, parent=True, files=()):
    """Four tensors: two blocks with a short last one, none, one of rank 0, eight."""
    rng = np.random.default_rng(seed)
    packs = [PackRef(pack_key(0), 1 << 20), EXTERNAL, PackRef(pack_key(1), 1 << 20), PackRef(pack_key(2), 9)]
    builder = VersionMapBuilder(digest_bytes=D, packs=packs)
    add(builder, rng, "a/../\0é", "BF16", (10, 15), 2, packs=3, parent=parent)
    add(builder, rng, "", "F32", (0, 4), 0, packs=3, parent=parent)
    add(builder, rng, "scalar", "F64", (), 1, packs=3, parent=parent)
    add(builder, rng, "w", "F4", (64, 64), 8, packs=3, parent=parent)
    version = builder.finish()
    return VersionMap(**{**vars_of(version), "files": tuple(files)})


def vars_of(version):
    return {name: getattr(version, name) for name in VersionMap.__dataclass_fields__}


def same_map(left, right):
    for name in VersionMap.__dataclass_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b, name


def metadata(**changes):
    members = {
        "format": "deltaformat-manifest/1",
        "digest": DIGEST,
        "block_bytes": BLOCK,
        "parent": 3,
        "packs": [{"key": pack_key(0), "size": 1000}, {"key": pack_key(1), "size": 1000}],
        "files": [],
        "requires": [],
    }
    members.update(changes)
    return {name: value for name, value in members.items() if value is not ...}


def columns(**changes):
    """Two tensors: 600 bytes in 3 blocks (chains of 1, 2 and 1 pieces), and 4 bytes in one."""
    lists = {
        "name": pa.array(["w", "b"], pa.utf8()),
        "dtype": pa.array(["BF16", "F32"], pa.utf8()),
        "shape": pa.array([[30, 10], [1]], pa.list_(pa.int64())),
        "digest": pa.array([[b"0" * D, b"1" * D, b"2" * D], [b"3" * D]], pa.list_(pa.binary(D))),
        "fresh": pa.array([[0, 1, 255], [0]], pa.list_(pa.uint8())),
        "depth": pa.array([[1, 2, 1], [1]], pa.list_(pa.uint8())),
        "pack": pa.array([[0, 0, 1, 0], [1]], pa.list_(pa.uint32())),
        "gap": pa.array([[100, 0, 50, 10], [0]], pa.list_(pa.int64())),
        "length": pa.array([[256, 90, 30, 88], [4]], pa.list_(pa.uint32())),
        "encoding": pa.array([[0, 1, 3, 0], [0]], pa.list_(pa.uint8())),
    }
    lists.update(changes)
    return {name: value for name, value in lists.items() if value is not ...}


def arrow_file(
    arrays=None, members=None, *, compression=None, batches=1, extra=(), version=None, entry=b"deltaformat"
):
    arrays = columns() if arrays is None else arrays
    text = (
        members
        if isinstance(members, bytes)
        else json.dumps(metadata() if members is None else members).encode()
    )
    fields = [pa.field(name, array.type) for name, array in arrays.items()] + [f for f, _ in extra]
    schema = pa.schema(fields, metadata={entry: text})
    batch = pa.RecordBatch.from_arrays([*arrays.values(), *(a for _, a in extra)], schema=schema)
    sink = pa.BufferOutputStream()
    options = {"compression": compression}
    if version is not None:
        options["metadata_version"] = version
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def frame(content, **options):
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


def decode(data, content_size, **changes):
    facts = {"where": "part", "digest": DIGEST, "block_bytes": BLOCK, "parent": 3} | changes
    return decode_part(data, content_size=content_size, **facts)


def decode_file(content, **changes):
    return decode(frame(content), len(content), **changes)


def refused(content, code, *, match=None, **changes):
    with pytest.raises(DeltaFormatError, match=match) as caught:
        decode_file(content, **changes)
    assert caught.value.code is ErrorCode(code), caught.value
    assert caught.value.where == "part"
