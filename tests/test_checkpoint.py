"""Checkpoints: what is imported and what is refused, and an export that is whole or absent."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

from deltaformat.checkpoint import open_checkpoint
from deltaformat.dtypes import DTYPES
from deltaformat.errors import (
    ConflictError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    MissingError,
    UnsafeError,
    UnsupportedError,
)
from deltaformat.export import write_checkpoint
from deltaformat.paths import check_sidecar_path
from deltaformat.tensors import TensorBytes, TensorSpec, from_host, to_host

INDEX = "model.safetensors.index.json"


def arrays(count=4, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"layer.{i}": rng.integers(0, 1 << 16, (i + 1, 3), np.uint16).view(ml_dtypes.bfloat16)
        for i in range(count)
    }


def save(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({n: from_host(to_host(n, t), "pt").clone() for n, t in tensors.items()}, path)
    return path


def save_sharded(directory, shards, files=None):
    """Shards by file name, an index over them, sidecars."""
    for file, tensors in shards.items():
        save(directory / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 1.5e3}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    for path, content in (files or {}).items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory


def two_shards(directory, **more):
    tensors = arrays()
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[2:]},
    }
    return save_sharded(directory, shards, **more), tensors


def content(checkpoint):
    return {name: (host.dtype, host.shape, host.data.tobytes()) for name, host in checkpoint.items()}


def expected(tensors):
    return content({name: to_host(name, tensor) for name, tensor in tensors.items()})


def exported(directory, tensors, files=None, **options):
    hosts = {name: to_host(name, tensor) for name, tensor in tensors.items()}
    specs = [TensorSpec(name, host.dtype, host.shape) for name, host in hosts.items()]
    readers = {path: lambda data=data: data for path, data in (files or {}).items()}
    return write_checkpoint(directory, specs, hosts.items(), readers, **options)


# Reading


def test_a_single_file(tmp_path):
    tensors = {**arrays(), "scalar": np.float32(1.5), "empty": np.zeros((0, 4), np.int8), "": np.ones(2)}
    path = save(tmp_path / "any name.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(path)
    assert content(checkpoint) == expected(tensors)
    assert sorted(checkpoint.keys()) == sorted(tensors)
    assert len(checkpoint) == len(tensors)
    assert checkpoint.sidecars() == {}
    assert checkpoint.files == (path,)
    assert [spec.name for spec in checkpoint.specs()] == list(checkpoint)
    for name in tensors:
        at = checkpoint.location(name)
        with at.file.open("rb") as file:
            file.seek(at.offset)
            assert file.read(at.nbytes) == checkpoint[name].data.tobytes()
    with pytest.raises(MissingError) as caught:
        checkpoint["other"]
    assert caught.value.code is ErrorCode.TENSOR_MISSING


def test_tensors_are_views_of_the_map_and_outlive_it(tmp_path):
    path = save(tmp_path / "model.safetensors", {"w": np.arange(100, dtype=np.int32)})
    host = open_checkpoint(path)["w"]
    assert not host.data.flags.owndata
    assert not host.data.flags.writeable
    assert from_host(host).tolist() == list(range(100))


def test_every_dtype_of_a_file(tmp_path):
    """DF-DTY-01, DF-BLK-01: sub-byte dtypes too, as the file holds them."""
    tensors = {
        name: TensorBytes(name, (2, 8), np.random.default_rng(1).bytes(2 * dtype.bits))
        for name, dtype in DTYPES.items()
    }
    exported(tmp_path / "out", tensors)
    assert content(open_checkpoint(tmp_path / "out")) == expected(tensors)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as witness:
        assert all(witness.get_slice(name).get_dtype() == name for name in DTYPES)
        assert list(witness.get_slice("F6_E2M3").get_shape()) == [2, 8]


def test_a_directory_with_one_file_and_sidecars(tmp_path):
    tensors = arrays()
    save(tmp_path / "model.safetensors", tensors)
    kept = ["config.json", "tokenizer.json", "1_Pooling/config.json", "a/b/c d.txt", "vocab.txt", "model.py"]
    for path in kept:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    for path in [".gitattributes", ".cache/huggingface/x.json", "1_Pooling/.hidden"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    reported = [
        "pytorch_model.bin",
        "onnx/model.onnx",
        "optimizer.PT",
        "tf_model.h5",
        "pytorch_model.bin.index.json",
        "adapter.safetensors",
        "onnx/other.safetensors",
    ]
    for path in reported:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    checkpoint = open_checkpoint(tmp_path)
    assert content(checkpoint) == expected(tensors)
    assert {path: file.read_text() for path, file in checkpoint.sidecars().items()} == {p: p for p in kept}
    for path in reported:
        assert [note for note in checkpoint.notes if path in note], path
    assert len(checkpoint.notes) == len(reported)


def test_an_index_is_followed(tmp_path):
    directory, tensors = two_shards(tmp_path, files={"config.json": b"{}"})
    save(directory / "model-00003-of-00003.safetensors", {"stray": np.zeros(3)})
    save(directory / "consolidated.safetensors", {"other": np.zeros(3)})
    for checkpoint in (open_checkpoint(directory), open_checkpoint(str(directory / INDEX))):
        assert content(checkpoint) == expected(tensors)
        assert list(checkpoint.sidecars()) == ["config.json"]
        assert [note.split()[0] for note in checkpoint.notes] == [
            "'consolidated.safetensors'",
            "'model-00003-of-00003.safetensors'",
        ]


def test_names_decide_only_where_nothing_says_more(tmp_path):
    """A directory that holds one safetensors file, or one index, of whatever name is no riddle."""
    tensors = arrays()
    save(tmp_path / "one" / "adapter_model.safetensors", tensors)
    assert content(open_checkpoint(tmp_path / "one")) == expected(tensors)
    save(tmp_path / "one" / "second.safetensors", tensors)
    with pytest.raises(InconsistentError, match=r"'adapter_model\.safetensors', 'second\.safetensors'"):
        open_checkpoint(tmp_path / "one")
    save(tmp_path / "one" / "model.safetensors", {"w": np.zeros(1)})
    assert list(open_checkpoint(tmp_path / "one")) == ["w"]

    directory, tensors = two_shards(tmp_path / "two")
    (directory / INDEX).rename(directory / "unet.safetensors.index.json")
    assert content(open_checkpoint(directory)) == expected(tensors)
    (directory / "vae.safetensors.index.json").write_text("{}")
    with pytest.raises(InconsistentError, match="several"):
        open_checkpoint(directory)


def test_two_claims_to_be_the_weights(tmp_path):
    directory, _ = two_shards(tmp_path)
    save(directory / "model.safetensors", {"w": np.zeros(3)})
    with pytest.raises(
        InconsistentError, match=r"'model\.safetensors', 'model\.safetensors\.index\.json'"
    ) as caught:
        open_checkpoint(directory)
    assert caught.value.code is ErrorCode.PARTS_DISAGREE
    assert len(open_checkpoint(directory / "model.safetensors")) == 1
    assert len(open_checkpoint(directory / INDEX)) == 4


def test_an_index_may_name_the_single_file(tmp_path):
    tensors = arrays()
    directory = save_sharded(tmp_path, {"model.safetensors": tensors})
    assert content(open_checkpoint(directory)) == expected(tensors)


def test_what_an_index_names_and_is_not_there(tmp_path):
    directory, _ = two_shards(tmp_path)
    shard = directory / "model-00002-of-00002.safetensors"
    save(shard, {"layer.2": np.zeros(1)})
    with pytest.raises(MissingError, match=r"'layer\.3'") as caught:
        open_checkpoint(directory)
    assert caught.value.code is ErrorCode.TENSOR_MISSING
    shard.unlink()
    with pytest.raises(MissingError) as caught:
        open_checkpoint(directory)
    assert caught.value.code is ErrorCode.FILE_MISSING
    assert shard.name in str(caught.value)


def test_a_tensor_in_two_shards(tmp_path):
    directory, tensors = two_shards(tmp_path)
    shard = directory / "model-00002-of-00002.safetensors"
    save(shard, {name: tensors[name] for name in ("layer.0", "layer.2", "layer.3")})
    with pytest.raises(InconsistentError, match=r"'layer\.0'.*model-00001-of-00002"):
        open_checkpoint(directory)


def test_a_tensor_that_the_index_does_not_name(tmp_path):
    directory, tensors = two_shards(tmp_path)
    save(directory / "model-00002-of-00002.safetensors", {**tensors, "extra": np.zeros(1)})
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(InconsistentError, match=r"'extra'.*index"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/secret.safetensors", "a/../../x.safetensors", "", "C:x"]
)
def test_an_index_that_leads_out(tmp_path, shard):
    """DF-SEC-01: nothing outside the directory that the user named is read."""
    save(tmp_path / "secret.safetensors", {"w": np.zeros(1)})
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(UnsafeError) as caught:
        open_checkpoint(directory)
    assert caught.value.code is ErrorCode.PATH_UNSAFE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"w": 1}}',
        '{"weight_map": {"w": "a", "w": "b"}}',
    ],
)
def test_a_broken_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(MalformedError) as caught:
        open_checkpoint(tmp_path)
    assert INDEX in caught.value.where


def test_an_index_that_is_too_large(tmp_path):
    """DF-LIM-02: its size is checked before it is read."""
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LimitError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 8, 30, -1])
def test_a_file_that_is_cut(tmp_path, cut):
    path = save(tmp_path / "model.safetensors", arrays())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(MalformedError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code is ErrorCode.PACK_INVALID


def test_a_dtype_that_the_format_lacks(tmp_path):
    """DF-DTY-01."""
    header = json.dumps({"w": {"dtype": "F128", "shape": [1], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(UnsupportedError, match="F128"):
        open_checkpoint(tmp_path)


def test_a_name_that_cannot_be_one(tmp_path):
    """DF-BLK-03."""
    name = "x" * 65_536
    header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    with pytest.raises(MalformedError):
        open_checkpoint(tmp_path)


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(MissingError) as caught:
        open_checkpoint(tmp_path / "nothing")
    assert caught.value.code is ErrorCode.FILE_MISSING
    (tmp_path / "README.md").write_text("")
    with pytest.raises(MissingError, match=r"no model\.safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(MalformedError):
        open_checkpoint(tmp_path / "README.md")


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_links_that_leave_the_directory(tmp_path):
    """DF-SEC-01: a checkpoint from elsewhere cannot pull a private file into a store."""
    (tmp_path / "secret.json").write_text("secret")
    directory = tmp_path / "checkpoint"
    save(directory / "model.safetensors", arrays())
    link(directory / "config.json", "../secret.json")
    with pytest.raises(UnsafeError, match="leaves the directory"):
        open_checkpoint(directory)
    checkpoint = open_checkpoint(directory, follow_links=True)
    assert checkpoint.sidecars()["config.json"].read_text() == "secret"
    (directory / "config.json").unlink()

    link(directory / "nested" / "config.json", tmp_path / "secret.json")
    with pytest.raises(UnsafeError):
        open_checkpoint(directory)
    (directory / "nested" / "config.json").unlink()

    (directory / ".git").mkdir()
    (directory / ".git" / "config").write_text("token")
    link(directory / "config.json", ".git/config")
    with pytest.raises(UnsafeError):
        open_checkpoint(directory)


def test_weights_that_are_links(tmp_path):
    """DF-SEC-01."""
    save(tmp_path / "elsewhere" / "private.safetensors", arrays())
    directory = tmp_path / "checkpoint"
    link(directory / "model.safetensors", "../elsewhere/private.safetensors")
    with pytest.raises(UnsafeError):
        open_checkpoint(directory)
    assert len(open_checkpoint(directory, follow_links=True)) == 4
    assert len(open_checkpoint(directory / "model.safetensors")) == 4


def test_links_within_and_to_directories(tmp_path):
    save(tmp_path / "weights" / "real.safetensors", arrays())
    link(tmp_path / "model.safetensors", "weights/real.safetensors")
    link(tmp_path / "config.json", "other.json")
    (tmp_path / "other.json").write_text("{}")
    link(tmp_path / "up", "..")
    link(tmp_path / "loop", ".")
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint) == 4
    assert sorted(checkpoint.sidecars()) == ["config.json", "other.json"]
    assert [note.split()[0] for note in checkpoint.notes] == ["'loop'", "'up'", "'weights/real.safetensors'"]


def test_links_that_lead_nowhere(tmp_path):
    save(tmp_path / "model.safetensors", arrays())
    link(tmp_path / "config.json", "gone.json")
    with pytest.raises(MissingError):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    link(tmp_path / "config.json", "config.json")
    with pytest.raises(MalformedError):
        open_checkpoint(tmp_path)


def cache_snapshot(cache):
    """The layout of the Hugging Face cache: snapshots are links into blobs."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    tensors = arrays()
    blobs = repository / "blobs"
    save(blobs / "aaaa", tensors)
    (blobs / "bbbb").write_text("{}")
    link(snapshot / "model.safetensors", "../../blobs/aaaa")
    link(snapshot / "config.json", "../../blobs/bbbb")
    link(snapshot / "1_Pooling" / "config.json", "../../../blobs/bbbb")
    return snapshot, tensors


def test_a_snapshot_of_the_hugging_face_cache(tmp_path):
    snapshot, tensors = cache_snapshot(tmp_path)
    link(tmp_path / "shortcut", snapshot)
    for directory in (snapshot, tmp_path / "shortcut"):
        checkpoint = open_checkpoint(directory)
        assert content(checkpoint) == expected(tensors)
        assert sorted(checkpoint.sidecars()) == ["1_Pooling/config.json", "config.json"]


def test_a_snapshot_that_leaves_its_repository(tmp_path):
    """DF-SEC-01."""
    (tmp_path / "secret").write_text("secret")
    snapshot, _ = cache_snapshot(tmp_path)
    link(snapshot / "tokenizer.json", tmp_path / "secret")
    with pytest.raises(UnsafeError):
        open_checkpoint(snapshot)
    (snapshot / "tokenizer.json").unlink()
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "private")
    link(blobs, tmp_path / "private")
    with pytest.raises(UnsafeError):
        open_checkpoint(snapshot)


def test_what_the_system_refuses_to_read(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    path = save(tmp_path / "model.safetensors", arrays())
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(MalformedError, match="Permission denied"):
        open_checkpoint(path)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(MalformedError, match="Permission denied"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_are_not_opened(tmp_path):
    save(tmp_path / "model.safetensors", arrays())
    os.mkfifo(tmp_path / "config.json")
    assert "no regular file" in open_checkpoint(tmp_path).notes[0]
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(MalformedError, match="no regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["a:b", "a\\b", "a\nb", b"\xff"])
def test_files_whose_names_cannot_travel(tmp_path, name):
    """DF-MAN-10: refused at import, not at every reader."""
    save(tmp_path / "model.safetensors", arrays())
    path = os.path.join(os.fsencode(tmp_path), name if isinstance(name, bytes) else name.encode())
    try:
        with open(path, "wb"):
            pass
    except OSError:
        pytest.skip("this file system does not have the name either")
    with pytest.raises(UnsafeError):
        open_checkpoint(tmp_path)


def test_directories_that_are_no_checkpoint(tmp_path):
    """DF-SEC-01: no walk without end."""
    save(tmp_path / "model.safetensors", arrays())
    deep = tmp_path
    for _ in range(18):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(LimitError, match="nothing but a checkpoint"):
        open_checkpoint(tmp_path)


# Writing


def test_one_shard(tmp_path):
    tensors = {**arrays(), "f64": np.arange(3.0), "u8": np.arange(5, dtype=np.uint8), "0-d": np.float32(-0.0)}
    files = {"config.json": b"{}", "1_Pooling/config.json": b"pooling"}
    written = exported(tmp_path / "new" / "out", tensors, files)
    assert written == ("1_Pooling/config.json", "config.json", "model.safetensors")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        f"new/out/{path}" for path in written
    ]
    assert (tmp_path / "new" / "out" / "1_Pooling" / "config.json").read_bytes() == b"pooling"
    loaded = safetensors.torch.load_file(tmp_path / "new" / "out" / "model.safetensors")
    assert expected(loaded) == expected(tensors)
    with safetensors.safe_open(tmp_path / "new" / "out" / "model.safetensors", "pt") as witness:
        assert witness.metadata() == {"format": "pt"}
    checkpoint = open_checkpoint(tmp_path / "new" / "out")
    assert content(checkpoint) == expected(tensors)
    for name in tensors:
        width = DTYPES[checkpoint[name].dtype].bits // 8
        assert checkpoint.location(name).offset % width == 0, "readers of mapped files want alignment"


@pytest.mark.parametrize("order", [1, -1])
def test_shards_and_their_index(tmp_path, order):
    tensors = {name: np.full(100, i, np.int8) for i, name in enumerate("abcdefg")}
    hosts = {name: to_host(name, tensor) for name, tensor in tensors.items()}
    specs = [TensorSpec(name, host.dtype, host.shape) for name, host in hosts.items()]
    done = []
    written = write_checkpoint(
        tmp_path / "out",
        specs,
        list(hosts.items())[::order],
        max_shard_bytes=250,
        progress=lambda *args: done.append(args),
    )
    shards = [f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert written == (*shards, INDEX)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 700}
    assert index["weight_map"] == {name: shards[i // 2] for i, name in enumerate("abcdefg")}
    loaded = {}
    for shard in shards:
        loaded |= safetensors.numpy.load_file(tmp_path / "out" / shard)
    assert expected(loaded) == expected(tensors) == content(open_checkpoint(tmp_path / "out"))
    assert done == [(100 * i, 700) for i in range(1, 8)]


def test_a_tensor_larger_than_a_shard(tmp_path):
    tensors = {"a": np.zeros(10, np.int8), "b": np.ones(100, np.int8), "c": np.zeros(10, np.int8)}
    written = exported(tmp_path / "out", tensors, max_shard_bytes=50)
    assert len(written) == 4
    assert content(open_checkpoint(tmp_path / "out")) == expected(tensors)


def test_no_tensors(tmp_path):
    assert exported(tmp_path / "out", {}) == ("model.safetensors",)
    assert len(open_checkpoint(tmp_path / "out")) == 0
    assert safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors") == {}


HOSTILE = [
    "",
    "/",
    "..",
    "../../etc/passwd",
    "a\0b",
    "\n",
    '"',
    "\\",
    "\u00e9",
    "e\u0301",
    "x" * 4_000,
    "\U0001f600",
    "con",
]


def test_hostile_names(tmp_path):
    """DF-KEY-03, DF-BLK-03: names are data; none becomes a path."""
    tensors = {name: np.array([i], np.int16) for i, name in enumerate(HOSTILE)}
    exported(tmp_path / "out", tensors, max_shard_bytes=8)
    assert expected(tensors) == content(open_checkpoint(tmp_path / "out"))
    loaded = {}
    for shard in (tmp_path / "out").glob("*.safetensors"):
        loaded |= safetensors.numpy.load_file(shard)
    assert expected(loaded) == expected(tensors)
    assert all(path.parent == tmp_path / "out" for path in tmp_path.rglob("*") if path.is_file())


def test_the_name_that_safetensors_cannot_hold(tmp_path):
    with pytest.raises(UnsupportedError, match="__metadata__"):
        exported(tmp_path / "out", {"a": np.zeros(1), "__metadata__": np.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_headers_stay_within_what_loaders_accept(tmp_path, monkeypatch):
    monkeypatch.setattr("deltaformat.export._MAX_HEADER_BYTES", 10_000)
    tensors = {f"{'n' * 3_000}{i}": np.zeros(1, np.int8) for i in range(5)}
    assert len(exported(tmp_path / "out", tensors)) == 4
    assert content(open_checkpoint(tmp_path / "out")) == expected(tensors)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "MODEL.safetensors", "model-00001-of-00002.safetensors", INDEX]
)
def test_sidecars_cannot_take_the_place_of_weights(tmp_path, name):
    for path in (name, f"{name}/x"):
        with pytest.raises(UnsafeError, match="weights"):
            exported(tmp_path / "out", arrays(), {path: b""})
    assert list(tmp_path.iterdir()) == []
    exported(tmp_path / "out", arrays(), {f"sub/{name}": b"one level down it is a file like any other"})


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", ".", "a//b", "a\0", "a:b", "x" * 1_025, "a\\b"])
def test_sidecar_paths_are_checked_before_anything_is_written(tmp_path, path):
    """DF-MAN-10, DF-SEC-01."""
    with pytest.raises(UnsafeError) as caught:
        exported(tmp_path / "out", arrays(), {"config.json": b"", path: b""})
    assert caught.value.code is ErrorCode.PATH_UNSAFE
    assert list(tmp_path.iterdir()) == []


def test_sidecars_that_cannot_be_there_together(tmp_path):
    with pytest.raises(UnsafeError, match="needs a directory"):
        exported(tmp_path / "out", arrays(), {"a/b": b"", "a": b""})
    with pytest.raises(UnsafeError, match="cannot be a file here"):
        exported(tmp_path / "out", arrays(), {"x" * 300: b""})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_a_bad_path(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        exported(tmp_path / "out", arrays(), {"config.json": b""})
    monkeypatch.undo()
    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        exported(tmp_path / "out", arrays())
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_may_be_there(tmp_path):
    (tmp_path / "out").mkdir()
    link(tmp_path / "link", "out")
    exported(tmp_path / "link", arrays())
    assert content(open_checkpoint(tmp_path / "out")) == expected(arrays())


def test_anything_else_may_not(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(ConflictError) as caught:
            exported(tmp_path / name, arrays())
        assert caught.value.code is ErrorCode.ALREADY_EXISTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_directory_that_fills_meanwhile(tmp_path):
    def config():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("")
        return b""

    with pytest.raises(ConflictError):
        write_checkpoint(tmp_path / "out", [], [], {"config.json": config})
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["out", "out/theirs"]


def test_a_mount_point_is_refused(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(MalformedError, match="mount point"):
        exported(tmp_path / "out", arrays())


def stream(name, *hosts):
    yield name, hosts[0]
    yield from ((name, host) for host in hosts[1:])


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ([], MissingError),
        ([("w", np.zeros(2)), ("w", np.zeros(2))], InconsistentError),
        ([("w", np.zeros(2)), ("v", np.zeros(2))], InconsistentError),
        ([("w", np.zeros(3))], InconsistentError),
        ([("w", np.zeros(2, np.int64))], InconsistentError),
        ([("w", np.zeros((2, 1)))], InconsistentError),
    ],
)
def test_a_stream_that_is_not_what_was_announced(tmp_path, tensors, error):
    hosts = ((name, to_host(name, tensor)) for name, tensor in tensors)
    with pytest.raises(error):
        write_checkpoint(tmp_path / "out", [TensorSpec("w", "F64", (2,))], hosts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_nothing_is_left_after_a_failure(tmp_path, error):
    def tensors():
        yield "a", to_host("a", np.zeros(2))
        raise error

    specs = [TensorSpec("a", "F64", (2,)), TensorSpec("b", "F64", (2,))]
    with pytest.raises(type(error)):
        write_checkpoint(tmp_path / "out", specs, tensors(), {"config.json": lambda: b"{}"})
    assert list(tmp_path.iterdir()) == []


def test_arguments(tmp_path):
    with pytest.raises(MalformedError):
        exported(tmp_path / "out", arrays(), max_shard_bytes=0)
    with pytest.raises(MalformedError, match="twice"):
        write_checkpoint(tmp_path / "out", [TensorSpec("w", "F64", (2,))] * 2, [])
    with pytest.raises(UnsupportedError):
        write_checkpoint(tmp_path / "out", [TensorSpec("w", "F128", (2,))], [])


def test_one_tensor_in_memory_at_a_time(tmp_path):
    """A stream's tensors are let go as they are written."""
    alive = []

    class Counted(np.ndarray):
        def __del__(self):
            alive.remove(self.number)

    def tensors():
        for i in range(5):
            array = np.zeros(10, np.uint8).view(Counted)
            array.number = i
            alive.append(i)
            host = to_host(f"t{i}", array)
            del array
            yield f"t{i}", host
            assert len(alive) <= 2
            del host

    write_checkpoint(tmp_path / "out", [TensorSpec(f"t{i}", "U8", (10,)) for i in range(5)], tensors())


def test_reading_and_writing_import_no_torch(tmp_path):
    save(tmp_path / "in" / "model.safetensors", arrays())
    program = (
        "import sys; from deltaformat.checkpoint import *; from deltaformat.export import *;"
        "c = open_checkpoint(sys.argv[1]);"
        "write_checkpoint(sys.argv[2], c.specs(), c.items()); sys.exit('torch' in sys.modules)"
    )
    arguments = [str(tmp_path / "in"), str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)
    assert content(open_checkpoint(tmp_path / "out")) == content(open_checkpoint(tmp_path / "in"))


# Paths


@pytest.mark.parametrize(
    "path", ["a", "a/b", "a b", "...", "..a", ".hidden", "\u00e9", "x" * 1_024, "a/b/c/d.json", "~", "-rf"]
)
def test_sidecar_paths_that_are_fine(path):
    """DF-MAN-10."""
    assert check_sidecar_path(path) is path


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b"),
        *("a\0", "a\n", "a\x7f", "a\x85", "a\\b", "c:", "a:b"),
        *("x" * 1_025, "\u00e9" * 513, "\ud800"),
    ],
)
def test_sidecar_paths_that_are_not(path):
    """DF-MAN-10."""
    with pytest.raises(UnsafeError) as caught:
        check_sidecar_path(path, where="manifest")
    assert caught.value.code is ErrorCode.PATH_UNSAFE
    assert str(caught.value).startswith("manifest: ")
    assert len(str(caught.value)) < 300
