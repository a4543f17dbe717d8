"""Published models of the Hub: as external bases that are read by ranges, and as checkpoints to import."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hubserver import TOKEN, HubServer
from writertools import bf16

import deltaformat as df
from deltaformat.checkpoint import open_checkpoint
from deltaformat.errors import ErrorCode, MissingError, StoreError, UnsupportedError
from deltaformat.keys import external_key
from deltaformat.storage import open_storage

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

REVISION = "0123456789abcdef0123456789abcdef01234567"
MODEL = f"hf://org/model@{REVISION}"
BLOCK = 256


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {"a": rng.integers(0, 1 << 16, (40, 20), np.uint16), "b": rng.random(300, np.float32)}


@pytest.fixture
def checkpoint(tmp_path, tensors, hub):
    """A checkpoint's directory, published on the Hub."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    safetensors.save_file({"a": tensors["a"]}, directory / "model-00001-of-00002.safetensors")
    safetensors.save_file({"b": tensors["b"]}, directory / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (directory / "config.json").write_text("{}")
    for file in directory.iterdir():
        hub.publish("org/model", REVISION, file.name, file.read_bytes())
    return directory


def import_external(storage, checkpoint, step=0):
    store = df.create(storage, block_bytes=BLOCK)
    with store.writer() as writer:
        part = writer.stage_external(step=step, checkpoint=open_checkpoint(checkpoint), base_url=MODEL)
        writer.commit(step=step, parts=[part])
    return store


def same(found, expected):
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


def test_a_base_on_the_hub_is_fetched_by_ranges(hub, checkpoint, tensors, tmp_path):
    """SPEC 10.2: nothing of the base is uploaded, and a slice of it is read by its ranges alone."""
    store = import_external(tmp_path / "store", checkpoint)
    assert [info.key for info in open_storage(tmp_path / "store").list("packs/")] == []
    same(df.open(tmp_path / "store").version().state_dict(), tensors)
    changed = {**tensors, "a": tensors["a"].copy()}
    changed["a"][3, 5:9] += 1
    with store.writer() as writer:
        writer.commit(step=1, tensors=changed)
    for reopened in (df.open(tmp_path / "store"), df.open(tmp_path / "store", cache=tmp_path / "cache")):
        same(reopened.version(step=1).state_dict(), changed)
        same(reopened.version(step=0).state_dict(), tensors)
    del hub.state.requests[:]
    hub.state.counts.clear()
    with df.open(tmp_path / "store").version(step=1) as version:
        assert np.array_equal(version.get_slice("a")[20:22], changed["a"][20:22])
    assert hub.state.counts["resolve"] == 1
    assert {path.rpartition("/")[2] for _, path, _ in hub.state.requests} == {
        "model-00001-of-00002.safetensors"
    }
    assert store.verify(all=True).findings == []


def test_a_base_that_vanished_is_mended_by_one_upload(hub, checkpoint, tensors, tmp_path):
    """DF-EXT-03: `packs/external/<sha256>` serves where the Hub does not, or gives other bytes."""
    import_external(tmp_path / "store", checkpoint)
    storage = open_storage(tmp_path / "store")
    key = "org/model/resolve/" + REVISION + "/model-00001-of-00002.safetensors"
    content = hub.state.models.pop(key)

    def read():
        return df.open(tmp_path / "store").version().state_dict()

    with pytest.raises(MissingError, match="model-00001") as caught:
        read()
    assert caught.value.code is ErrorCode.OBJECT_MISSING
    storage.put(external_key(hashlib.sha256(content).hexdigest()), content)
    same(read(), tensors)
    hub.state.models[key] = content[:-100] + bytes(100)  # what the Hub has is not what was published
    same(read(), tensors)
    assert df.open(tmp_path / "store").verify(all=True).findings == []


def test_a_gated_base(hub, checkpoint, tensors, tmp_path, monkeypatch):
    """DF-EXT-02: the token that the Hub's tools use goes to the Hub alone, and the store's goes nowhere."""
    hub.state.private |= set(hub.state.models)
    with pytest.raises(StoreError, match="access denied"):
        import_external(tmp_path / "refused", checkpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    import_external(tmp_path / "store", checkpoint)
    del hub.state.requests[:]
    same(df.open(tmp_path / "store").version().state_dict(), tensors)
    tokens = {(path.startswith("/model/"), token) for _, path, token in hub.state.requests}
    assert tokens == {(False, f"Bearer {TOKEN}"), (True, None)}


def test_a_base_that_nobody_can_read_is_refused(hub, checkpoint, tmp_path, monkeypatch):
    """A version must not be committed that cannot be read: a file is gone, is short, has no client."""
    first = next(key for key in hub.state.models if "00001" in key)
    content = hub.state.models[first]
    hub.state.models[first] = content[:-1]
    with pytest.raises(df.errors.CorruptError):
        import_external(tmp_path / "short", checkpoint)
    del hub.state.models[first]
    with pytest.raises(MissingError):
        import_external(tmp_path / "gone", checkpoint)
    hub.state.models.clear()
    with pytest.raises(StoreError, match="no such bucket, repository"):
        import_external(tmp_path / "nothing", checkpoint)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match=r"deltaformat\[hf\]"):
        import_external(tmp_path / "without", checkpoint)


def run_cli(hub, tmp_path, *arguments):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "deltaformat", *arguments],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("external", [False, True])
def test_import_from_the_hub(hub, checkpoint, tensors, tmp_path, external):
    """`import` takes a model by its URL; with --external the store refers to it at its commit."""
    place = str(tmp_path / "store")
    source = "hf://org/model" if external else MODEL
    more = ["--external"] if external else []
    done = run_cli(hub, tmp_path, "import", place, source, "--step", "0", "--init", *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"fetched {MODEL}" in done.stdout
    with df.open(place).version() as version:
        same(version.state_dict(), tensors)
        assert version.read_file("config.json") == b"{}"
    stored = [info.key for info in open_storage(place).list("packs/")]
    assert bool(stored) is not external


def test_an_import_takes_what_the_index_names(hub, checkpoint, tensors, tmp_path):
    """No weights twice; code and tokenizers come along; what is left out is said."""
    for name, content in (
        ("consolidated.safetensors", b"another layout"), ("original/model.safetensors", b"as well"),
        ("modeling.py", b"pass"), ("qwen.tiktoken", b"IQ== 0"), ("model.gguf", b"yet another"),
    ):  # fmt: skip
        hub.publish("org/model", REVISION, name, content)
    done = run_cli(hub, tmp_path, "import", str(tmp_path / "store"), MODEL, "--step", "0", "--init")
    assert (done.returncode, done.stderr) == (0, "")
    assert "not fetched: consolidated.safetensors, model.gguf, original/model.safetensors" in done.stdout
    with df.open(tmp_path / "store").version() as version:
        same(version.state_dict(), tensors)
        assert version.read_file("modeling.py") == b"pass"
        assert version.read_file("qwen.tiktoken") == b"IQ== 0"
    asked = [path for _, path, _ in hub.state.requests]
    assert not any("consolidated" in path or "gguf" in path for path in asked)


def test_import_of_what_is_not_there(hub, checkpoint, tmp_path):
    """One line each, and no store is left behind."""
    for source, words in (
        ("hf://org/other", "no such bucket, repository"),
        ("hf://org/model@" + "1" * 40, "revision"),
        ("hf://org/model/x y", "a model's URL is"),
        ("hf://buckets/me/b", "a model's URL is"),
    ):
        done = run_cli(hub, tmp_path, "import", str(tmp_path / "s"), source, "--step", "0", "--init")
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_bf16_comes_as_it_is(hub, tmp_path):
    """The file's own bytes, whatever the dtype."""
    from safetensors.torch import save_file

    torch = pytest.importorskip("torch")
    words = bf16(np.random.default_rng(1), 30, 10).view(np.int16)
    directory = tmp_path / "one"
    directory.mkdir()
    save_file({"w": torch.from_numpy(words).view(torch.bfloat16)}, directory / "model.safetensors")
    hub.publish("org/model", REVISION, "model.safetensors", (directory / "model.safetensors").read_bytes())
    import_external(tmp_path / "store", directory)
    with df.open(tmp_path / "store").version() as version:
        assert version.get_tensor("w").tobytes() == words.tobytes()
