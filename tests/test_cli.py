"""The command line: what every command prints, its JSON, its exit codes, and that errors are one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import deltaformat as df
from deltaformat.cli import main, output, parser, reading, stores
from deltaformat.cli.compare import count_differences
from deltaformat.cli.options import UsageError, block_size, byte_size, hours, natural, positive
from deltaformat.cli.output import Column, escape, human, percent, plain, table
from deltaformat.dtypes import DTYPES
from deltaformat.errors import ErrorCode

HOSTILE = "a\x1b[31m\n\u202eb\\"
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return check(Ran(code, captured.out, captured.err))

    return run


def check(ran: Ran) -> Ran:
    """What holds for every run: an error is one line on stderr, and nothing printed steers a terminal."""
    assert "Traceback" not in ran.out + ran.err
    assert "[internal]" not in ran.err
    if ran.err:
        assert ran.code != 0
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1
        assert ran.err.endswith("\n")
    for line in (ran.out + ran.err).split("\n"):
        assert line.isprintable(), line
    return ran


def state(seed: int, changes: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    wide = draw.standard_normal((64, 40)).astype(np.float32).astype(BF16)
    bits = wide.view(np.uint16)
    bits[np.arange(changes), 3] ^= 1
    return {
        HOSTILE: np.arange(6, dtype=np.int32).reshape(2, 3),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float64(1.5),
        "wide": wide,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with steps 0, 1 and 2 of `main`, whose weights differ in 0, 5 and 9 places from step 0."""
    path = tmp_path_factory.mktemp("cli") / "store"
    store = df.create(path, block_bytes=256)
    with store.writer() as writer:
        for step, changes in enumerate((0, 5, 9)):
            writer.commit(
                step=step,
                tensors=state(1, changes),
                files={"config.json": b"{}"},
                metadata={"loss": 0.5, "s": step},
            )
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


# -- every command -------------------------------------------------------------------------------------------


def test_init_makes_a_store(run: Run, tmp_path: Path) -> None:
    ran = run("init", tmp_path / "new", "--block-bytes", "4KiB", "--digest", "blake3-256")
    assert ran.code == 0
    assert "made an empty store" in ran.out
    store = df.open(tmp_path / "new")
    assert (store.block_bytes, store.digest) == (4096, "blake3-256")
    again = run("init", tmp_path / "new", "--json")
    assert again.code == 1
    assert again.json["error"]["code"] == "already-exists"
    made = run("init", tmp_path / "other", "--json")
    assert made.json == {
        "store": made.json["store"],
        "uuid": df.open(tmp_path / "other").uuid,
        "digest": "xxh3-128",
        "block_bytes": 1 << 20,
    }


def test_import_takes_a_file_and_a_directory(run: Run, tmp_path: Path) -> None:
    tensors = {name: np.asarray(tensor) for name, tensor in state(2).items()}
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"a": 1}')
    (directory / "old.bin").write_bytes(b"x")

    missing = run("import", tmp_path / "store", directory, "--step", 3)
    assert (missing.code, missing.out) == (1, "")
    assert "deltaformat init" in missing.err or "no such directory" in missing.err
    first = run("import", tmp_path / "store", directory, "--step", 3, "--init")
    assert first.code == 0, first.err
    assert "note: 'old.bin' is not imported" in first.out
    assert "step 3 of main: 4 tensors" in first.out

    tensors["wide"] = tensors["wide"].copy()
    tensors["wide"].view(np.uint16)[0, 0] ^= 1
    save_file(tensors, tmp_path / "single.safetensors")
    second = run("import", tmp_path / "store", tmp_path / "single.safetensors", "--step", 4, "--json")
    assert second.json | {"store": "", "root": "", "timings": {}, "seq": 0, "bytes_written": 0} == {
        "store": "",
        "branch": "main",
        "step": 4,
        "seq": 0,
        "root": "",
        "created": True,
        "tensors": 4,
        "changed_blocks": 1,
        "blocks": 3,
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
        "bytes_written": 0,
        "files": [],
        "notes": [],
        "timings": {},
    }
    again = run("import", tmp_path / "store", tmp_path / "single.safetensors", "--step", 4)
    assert "has these weights already" in again.out
    with df.open(tmp_path / "store").version() as version:
        assert version.read_file("config.json") == b'{"a": 1}'  # a file leaves the sidecar files as they were
        assert version.get_bytes(HOSTILE).data.tobytes() == tensors[HOSTILE].tobytes()


def test_import_refuses_what_a_commit_refuses(run: Run, store: Path, tmp_path: Path) -> None:
    save_file({"other": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    changed = run("import", store, tmp_path / "other.safetensors", "--step", 3)
    assert (changed.code, "--allow-set-change" in changed.err) == (1, True)
    allowed = run("import", store, tmp_path / "other.safetensors", "--step", 3, "--allow-set-change")
    assert allowed.code == 0
    below = run("import", store, tmp_path / "other.safetensors", "--step", 2, "--json")
    assert (below.code, below.json["error"]["code"]) == (1, "step-not-above-head")
    assert "--resume-from" in below.json["error"]["message"]
    back = run(
        "import", store, tmp_path / "other.safetensors", "--step", 2, "--resume-from", 1, "--allow-set-change"
    )
    assert back.code == 0
    log = run("log", store)
    assert "back to commit 2" in log.out
    assert [record.step for record in df.open(store).log("main", 1)] == [2]


def test_import_can_leave_the_bytes_where_they_are(run: Run, tmp_path: Path) -> None:
    base, url = tmp_path / "base", (tmp_path / "base").as_uri()
    base.mkdir()
    tensors = {"a": np.arange(5000, dtype=np.float32), "b": np.ones((3, 3), np.int16)}
    save_file(tensors, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    arguments = ["import", tmp_path / "store", base, "--step", 0, "--init", "--external"]
    refused = run(*arguments)
    assert (refused.code, "external-refused" in refused.err) == (1, True)
    done = run(*arguments, "--allow-external", url, "--json")
    assert done.code == 0, done.err
    assert done.json["bytes_written"] < 4000

    assert "external-refused" in run("verify", tmp_path / "store").out
    closed = run("export", tmp_path / "store", "--step", 0, "--output", tmp_path / "no")
    assert "pass --allow-external with its prefix" in closed.err
    (pack,) = run("show", tmp_path / "store", "--json").json["packs"]
    assert pack["url"] == f"{url}/model.safetensors"
    assert f"{url}/model.safetensors" in run("show", tmp_path / "store").out
    opened = ("--allow-external", url)
    assert run("verify", tmp_path / "store", *opened).code == 0
    assert run("export", tmp_path / "store", "--step", 0, "--output", tmp_path / "out", *opened).code == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(exported[name], tensor) for name, tensor in tensors.items())

    hub = "hf://someone/model@" + "0" * 40
    named = run(
        "import", tmp_path / "other", base, "--step", 0, "--init", "--external", "--external-url", hub
    )
    assert named.code == 0, named.err
    assert run("show", tmp_path / "other", "--json").json["packs"][0]["url"] == f"{hub}/model.safetensors"
    assert run("import", tmp_path / "other", base, "--step", 1, "--external-url", hub).code == 2


def test_log_lists_newest_first(run: Run, store: Path) -> None:
    run("fork", store, "side", "--step", 1)
    run("tag", store, "best", "--step", 2)
    text = run("log", store).out.splitlines()
    assert text[0].split() == ["seq", "kind", "branch", "step", "time", "added"]
    assert [line.split()[:2] for line in text[1:]] == [
        ["5", "tag"],
        ["4", "fork"],
        ["3", "commit"],
        ["2", "commit"],
        ["1", "commit"],
        ["0", "claim"],
    ]
    assert "head of main; tag best" in text[3]
    document = run("log", store, "--json").json
    assert set(document) == {"store", "heads", "tags", "records", "more"}
    assert document["heads"]["side"] == {"seq": 2, "step": 1, "epoch": 0, "claim": None}
    assert document["tags"] == {"best": 3}
    tag, fork, commit, *_, claim = document["records"]
    assert set(tag) == {"seq", "kind", "time", "name", "target"}
    assert set(fork) == {"seq", "kind", "time", "branch", "source", "step"}
    assert set(claim) == {
        "seq",
        "kind",
        "time",
        "branch",
        "epoch",
        "host",
        "pid",
        "resume_from",
        "single_writer",
    }
    assert set(commit) == {
        *(
            "seq",
            "kind",
            "time",
            "branch",
            "step",
            "claim",
            "parent",
            "depth",
            "root",
            "bytes_added",
            "metadata",
        )
    }
    assert commit["metadata"] == {"loss": 0.5, "s": 2}
    assert commit["bytes_added"] > 0


def test_log_is_cut_at_twenty(run: Run, store: Path) -> None:
    for number in range(20):
        df.open(store).tag(f"t{number}", step=0)
    ran = run("log", store)
    assert len(ran.out.splitlines()) == 22
    assert "--all" in ran.out.splitlines()[-1]
    assert len(run("log", store, "--all").out.splitlines()) == 25
    assert len(run("log", store, "--limit", 3, "--json").json["records"]) == 3
    assert {record["kind"] for record in run("log", store, "--branch", "main", "--json").json["records"]} == {
        "claim",
        "commit",
    }


def test_log_tells_every_kind_of_record(run: Run, store: Path) -> None:
    opened = df.open(store)
    opened.fork("side", step=1)
    opened.drop("side")
    opened.tag("t", step=0)
    opened.delete_tag("t")
    opened.writer("solo", single_writer=True).close()
    run("gc", store, "--keep-last", 1, "--yes")
    text = run("log", store).out
    for note in ("from commit 2", "branch ends", "tag t removed", "tag t: commit 1", "single writer"):
        assert note in text
    assert "2 versions retired" in text
    kinds = {record["kind"]: record for record in run("log", store, "--json").json["records"]}
    assert kinds["drop"].keys() == {"seq", "kind", "time", "branch"}
    assert kinds["retire"].keys() == {"seq", "kind", "time", "commits"}
    assert kinds["retire"]["commits"] == [1, 2]


def test_log_of_an_empty_store(run: Run, tmp_path: Path) -> None:
    run("init", tmp_path / "new")
    assert run("log", tmp_path / "new").out == "no records\n"
    assert run("log", tmp_path / "new", "--json").json["records"] == []


def test_show_says_where_the_bytes_are(run: Run, store: Path) -> None:
    document = run("show", store, "--step", 2, "--json").json
    assert set(document) == {
        *("store", "step", "seq", "branch", "time", "parent", "root", "metadata", "nbytes", "stored_bytes"),
        *("manifest_bytes", "blocks", "pieces", "chain", "encodings", "packs", "files", "tensors"),
    }
    with df.open(store).version(2) as version:
        assert document["root"] == version.root
        assert [entry["name"] for entry in document["tensors"]] == version.keys()
        assert document["pieces"] == len(version.map.length)
    tensors = {entry["name"]: entry for entry in document["tensors"]}
    assert set(tensors["wide"]) == {"name", "dtype", "shape", "nbytes", "stored_bytes", "blocks", "chain"}
    assert tensors["wide"]["nbytes"] == 64 * 40 * 2
    assert tensors["wide"]["blocks"] == 20
    assert tensors["wide"]["chain"]["max"] > tensors["wide"]["chain"]["min"] == 1
    assert tensors["empty"] | {"chain": None} == {
        "name": "empty", "dtype": "F32", "shape": [0, 4],
        "nbytes": 0, "stored_bytes": 0, "blocks": 0, "chain": None,
    }  # fmt: skip
    assert sum(entry["stored_bytes"] for entry in document["encodings"]) == document["stored_bytes"]
    assert sum(entry["used_bytes"] for entry in document["packs"]) == document["stored_bytes"]
    assert sum(entry["pieces"] for entry in document["packs"]) <= document["pieces"]
    assert "sparse" in {entry["encoding"] for entry in document["encodings"]}
    assert document["files"] == [{"path": "config.json", "size": 2}]

    text = run("show", store).out
    assert escape(HOSTILE) in text
    assert "config.json" in text
    assert '"loss": 0.5' in text
    assert f"root      {document['root']}" in text


def test_show_finds_by_tag_and_seq(run: Run, store: Path) -> None:
    run("tag", store, "first", "--step", 0)
    assert run("show", store, "--tag", "first", "--json").json["step"] == 0
    assert run("show", store, "--seq", 2, "--json").json["step"] == 1
    assert run("show", store, "--json").json["step"] == 2
    assert run("show", store, "--seq", 0).code == 1
    assert run("show", store, "--seq", 1, "--tag", "first").code == 2


def test_show_of_a_version_without_tensors(run: Run, tmp_path: Path) -> None:
    with df.create(tmp_path / "s").writer() as writer:
        writer.commit(step=0, tensors={})
    assert run("show", tmp_path / "s").code == 0
    assert run("show", tmp_path / "s", "--json").json["chain"] == {"min": 0, "mean": 0.0, "max": 0}
    assert run("diff", tmp_path / "s", 0, 0).code == 0
    assert run("export", tmp_path / "s", "--step", 0, "--output", tmp_path / "out").code == 0
    assert run("verify", tmp_path / "s").code == 0


@pytest.mark.parametrize(("a", "b", "changed"), [(0, 1, 5), (1, 0, 5), (0, 2, 9), (1, 2, 4), (2, 2, 0)])
def test_diff_counts_bits(run: Run, store: Path, a: int, b: int, changed: int) -> None:
    """DF-DIG-02: also between versions that are no parent and child, by bytes."""
    document = run("diff", store, a, b, "--json").json
    assert set(document) == {"store", "branch", "a", "b", "summary", "tensors"}
    assert document["summary"] == {
        "elements": 64 * 40 + 7,
        "changed": changed,
        "density": changed / (64 * 40 + 7),
        "tensors": 4,
        "same": 3 if changed else 4,
        "changed_tensors": 1 if changed else 0,
        "replaced": 0,
        "added": 0,
        "removed": 0,
    }
    wide = document["tensors"][-1]
    assert wide == {
        "name": "wide", "status": "changed" if changed else "same", "dtype": "BF16", "elements": 2560,
        "nbytes": 5120, "changed": changed, "density": changed / 2560,
    }  # fmt: skip
    text = run("diff", store, a, b).out
    assert f"{changed} of 2,567 weights differ" in text
    assert ("wide" in text) == bool(changed)


def test_diff_of_other_sets_and_bits(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = np.array([np.nan, 0.0, 1.0], np.float32)
    minus = nan * np.array([1, -1, 1], np.float32)
    long = np.zeros((100, 10), np.float32)
    longer = long.copy()
    longer[99, 9] = 1
    first = {"gone": nan, "nan": nan, "shape": nan, "long": long}
    second = {"new": nan, "nan": minus, "shape": nan.reshape(1, 3), "long": longer}
    with df.create(tmp_path / "s", block_bytes=256).writer() as writer:
        writer.commit(step=0, tensors=first)
        writer.commit(step=1, tensors=second, allow_set_change=True)
        writer.commit(step=2, tensors=second, metadata={"nothing": "new"})
    monkeypatch.setattr(reading, "BATCH_BYTES", 400)
    for b in (1, 2):
        document = run("diff", tmp_path / "s", 0, b, "--json").json
        assert {entry["name"]: (entry["status"], entry["changed"]) for entry in document["tensors"]} == {
            "gone": ("removed", 3),
            "long": ("changed", 1),
            "nan": ("changed", 1),
            "new": ("added", 3),
            "shape": ("replaced", 3),
        }
    assert "; 1 replaced; 1 added; 1 removed" in run("diff", tmp_path / "s", 0, 1).out


def test_diff_across_a_fork_skips_shared_pieces(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    df.open(store).fork("side", step=1)
    with df.open(store).writer("side") as writer:
        writer.commit(step=7, tensors=state(1, 6))
    read: list[str] = []
    read_many = reading.read_many
    monkeypatch.setattr(
        reading, "read_many", lambda version, names: read.extend(names) or read_many(version, names)
    )
    assert run("diff", store, 0, 7, "--branch", "side", "--json").json["summary"]["changed"] == 6
    assert set(read) == {"wide"}


@given(data=st.data(), name=st.sampled_from(sorted(DTYPES)))
def test_differences_are_counted_per_element(data: st.DataObject, name: str) -> None:
    """For dtypes of any width: as many as a walk over the bits of each element finds."""
    bits = DTYPES[name].bits
    count = 8 * data.draw(st.integers(1, 6))
    first = np.frombuffer(
        data.draw(st.binary(min_size=count * bits // 8, max_size=count * bits // 8)), np.uint8
    )
    second = first.copy()
    for place in data.draw(st.lists(st.integers(0, first.size * 8 - 1), max_size=9)):
        second[place // 8] ^= 1 << place % 8
    one, other = (int.from_bytes(side.tobytes(), "little") for side in (first, second))
    expected = sum(((one ^ other) >> index * bits) & ((1 << bits) - 1) != 0 for index in range(count))
    assert count_differences(first, second, bits) == expected


def test_export_can_be_imported_again(run: Run, store: Path, tmp_path: Path) -> None:
    exported = run(
        "export", store, "--step", 1, "--output", tmp_path / "out", "--max-shard-size", "4kB", "--json"
    )
    assert exported.code == 0, exported.err
    assert set(exported.json) == {
        *("store", "branch", "step", "seq", "root", "output", "files", "tensors", "nbytes")
    }
    assert {"config.json", "model.safetensors.index.json"} < set(exported.json["files"])
    shards = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    loaded = {name: tensor for shard in shards for name, tensor in shard.items()}
    expected = state(1, 5)
    assert {name: tensor.tobytes() for name, tensor in loaded.items()} == {
        name: tensor.tobytes() for name, tensor in expected.items()
    }
    imported = run("import", tmp_path / "copy", tmp_path / "out", "--step", 1, "--init", "--json")
    assert imported.json["files"] == ["config.json"]
    with df.open(tmp_path / "copy").version() as copy, df.open(store).version(1) as version:
        for name in version.keys():  # noqa: SIM118 - a Version is no mapping
            assert copy.get_bytes(name).data.tobytes() == version.get_bytes(name).data.tobytes()
    taken = run("export", store, "--step", 1, "--output", tmp_path / "out")
    assert (taken.code, taken.out) == (1, "")


def test_verify_finds_what_is_damaged(run: Run, store: Path) -> None:
    fine = run("verify", store, "--all", "--json")
    assert (fine.code, fine.json["ok"], fine.json["findings"]) == (0, True, [])
    assert set(fine.json) == {"store", "ok", "findings", "checked"}
    assert fine.json["checked"]["versions"] == 3
    assert run("verify", store).out.startswith("no finding; checked ")

    with df.open(store).version(0) as version:
        pack = store / version.map.packs[0].key
    data = bytearray(pack.read_bytes())
    data[-10] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    for options in (["--all"], ["--step", 0], []):
        ran = run("verify", store, *options)
        assert (ran.code, ran.err) == (1, "")
        assert "[hash-mismatch]" in ran.out
    document = run("verify", store, "--all", "--json")
    assert (document.code, document.json["ok"]) == (1, False)
    assert {frozenset(finding) for finding in document.json["findings"]} == {
        frozenset({"where", "code", "message"})
    }


def test_fork_and_tag(run: Run, store: Path) -> None:
    assert run("fork", store, "side", "--step", 1, "--json").json | {"store": ""} == {
        "store": "", "branch": "side", "source": "main", "step": 1, "seq": 2,
    }  # fmt: skip
    assert (
        "branch other starts at step 1 of side"
        in run("fork", store, "other", "--step", 1, "--branch", "side").out
    )
    assert run("tag", store, "best", "--step", 2, "--json").json | {"store": ""} == {
        "store": "", "tag": "best", "seq": 3, "deleted": False,
    }  # fmt: skip
    assert run("tag", store, "best", "--step", 1).code == 1
    assert run("tag", store, "best", "--delete", "--json").json | {"store": ""} == {
        "store": "", "tag": "best", "seq": None, "deleted": True,
    }  # fmt: skip
    assert run("tag", store, "best", "--delete").code == 1
    assert run("tag", store, "bad name", "--step", 1).code == 1
    assert run("fork", store, "side", "--step", 1).code == 1
    assert df.open(store).tags() == {}


def test_long_lists_are_cut(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_LISTED", 1)
    monkeypatch.setattr(stores, "MAX_FINDINGS", 1)
    assert "... and 1 more" in run("gc", store, "--keep-last", 1).out
    for pack in (store / "packs").rglob("*.safetensors"):
        pack.unlink()
    ran = run("verify", store, "--all")
    assert ran.code == 1
    assert " more; --json lists all" in ran.out


def test_gc_is_a_dry_run_unless_told(run: Run, store: Path) -> None:
    before = sorted(path for path in store.rglob("*") if path.is_file())
    dry = run("gc", store, "--keep-last", 1)
    assert dry.code == 0
    assert "would retire 2 versions" in dry.out
    assert "--yes" in dry.out
    document = run("gc", store, "--keep-last", 1, "--keep-every", 2, "--json").json
    assert set(document) == {
        *(
            "store",
            "dry_run",
            "kept",
            "retired",
            "deleted",
            "deleted_bytes",
            "waiting",
            "waiting_bytes",
            "live_bytes",
        )
    }
    assert document["dry_run"] is True
    assert document["retired"] == [{"branch": "main", "step": 1, "seq": 2}]
    assert sorted(path for path in store.rglob("*") if path.is_file()) == before

    done = run("gc", store, "--keep-last", 1, "--yes")
    assert "retired 2 versions" in done.out
    waiting = run("gc", store, "--keep-last", 1, "--yes", "--json").json
    assert (waiting["dry_run"], waiting["deleted"], waiting["waiting_bytes"] > 0) == (False, [], True)
    assert "2 versions retired" in run("log", store).out
    assert run("verify", store, "--all").code == 0


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["log", "{none}"], "store-missing"),
        (["show", "{none}"], "store-missing"),
        (["verify", "{none}"], "store-missing"),
        (["gc", "{none}", "--keep-last", "1"], "store-missing"),
        (["diff", "{none}", "0", "1"], "store-missing"),
        (["export", "{none}", "--step", "0", "--output", "{none}x"], "store-missing"),
        (["fork", "{none}", "b", "--step", "0"], "store-missing"),
        (["tag", "{none}", "t", "--step", "0"], "store-missing"),
        (["show", "{store}", "--step", "9"], "version-missing"),
        (["show", "{store}", "--branch", "b"], "branch-missing"),
        (["show", "{store}", "--tag", "t"], "tag-missing"),
        (["show", "{store}", "--seq", "99"], "version-missing"),
        (["diff", "{store}", "0", "9"], "version-missing"),
        (["export", "{store}", "--step", "9", "--output", "{none}"], "version-missing"),
        (["verify", "{store}", "--step", "9"], "version-missing"),
        (["verify", "{store}", "--branch", "b"], "branch-missing"),
        (["fork", "{store}", "b", "--step", "9"], "version-missing"),
        (["fork", "{store}", "b", "--step", "1", "--branch", "b"], "branch-missing"),
        (["fork", "{store}", "\x1b[2J", "--step", "1"], "value-invalid"),
        (["log", "{store}", "--branch", "\x1b[2J"], "branch-missing"),
        (["import", "{store}", "{none}", "--step", "3"], "file-missing"),
        (["init", "s3://bucket/store"], "not-supported"),
    ],
)
def test_an_error_is_one_line_and_a_document(
    run: Run, store: Path, tmp_path: Path, arguments: list[str], code: str
) -> None:
    filled = [argument.format(store=store, none=tmp_path / "none") for argument in arguments]
    ran = run(*filled)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.endswith(f"[{code}]\n")
    document = run(*filled, "--json")
    assert document.code == 1
    assert set(document.json) == {"error"}
    assert set(document.json["error"]) == {"class", "code", "message", "where"}
    assert document.json["error"]["code"] == code
    assert document.json["error"]["class"] == ErrorCode(code).error_class


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nonsense"],
        ["nonsense"],
        ["show"],
        ["init", "x", "--block-bytes", "1000"],
        ["init", "x", "--block-bytes", "many"],
        ["init", "x", "--digest", "md5"],
        ["import", "x", "y"],
        ["import", "x", "y", "--step", "-1"],
        ["import", "x", "y", "--step", "9007199254740992"],
        ["import", "x", "y", "--step", "\u0663"],
        ["show", "x", "--step", "1", "--seq", "1"],
        ["diff", "x", "1"],
        ["export", "x", "--step", "1"],
        ["export", "x", "--step", "1", "--output", "y", "--max-shard-size", "0"],
        ["log", "x", "--limit", "0"],
        ["log", "x", "--all", "--limit", "3"],
        ["verify", "x", "--all", "--step", "1"],
        ["tag", "x", "t"],
        ["tag", "x", "t", "--step", "1", "--delete"],
        ["gc", "x"],
        ["gc", "x", "--keep-last", "0"],
        ["gc", "x", "--keep-last", "1", "--grace", "nan"],
        ["gc", "x", "--keep-last", "1", "--grace", "-1"],
        ["demo", "--steps", "0"],
        ["show", "x", "--st", "1"],
        ["show", "x", "\x1b[2J"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "--help" in ran.err
    document = run(*arguments, "--json")
    assert document.code == 2
    assert document.json["error"]["class"] == "USAGE"


@pytest.mark.parametrize(
    ("error", "exit_code", "kind", "code"),
    [
        (KeyboardInterrupt(), 130, "SYSTEM", "interrupted"),
        (MemoryError(), 1, "SYSTEM", "out-of-memory"),
        (OSError(28, "No space left on device", "/some\nwhere"), 1, "SYSTEM", "os-error"),
        (OSError("odd"), 1, "SYSTEM", "os-error"),
        (RecursionError("deep"), 1, "SYSTEM", "internal"),
        (ValueError("a\nb\x1b[2J" + "x" * 5000), 1, "SYSTEM", "internal"),
    ],
)
def test_whatever_is_raised_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    exit_code: int,
    kind: str,
    code: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(df, "open", fail)
    assert main(["log", "store"]) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.endswith(f"[{code}]\n")
    assert captured.err[:-1].isprintable()
    assert len(captured.err) < 2100
    assert main(["log", "store", "--json"]) == exit_code
    document = json.loads(capsys.readouterr().out)["error"]
    assert (document["class"], document["code"]) == (kind, code)


def test_a_traceback_is_shown_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DELTAFORMAT_DEBUG", "1")
    assert main(["log", str(tmp_path)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_progress_bars_are_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(output, "_is_terminal", lambda: True)
    for arguments in (
        ["export", store, "--step", 0, "--output", tmp_path / "out"],
        ["import", store, tmp_path / "out", "--step", 3],
        ["verify", store, "--all"],
        ["diff", store, 0, 2],
    ):
        assert main([str(argument) for argument in arguments]) == 0
        captured = capsys.readouterr()
        assert "\r" in captured.err
        assert captured.err.endswith("\r")  # the bar is taken away
        assert "\r" not in captured.out
    broken = main(["import", str(store), str(tmp_path / "none"), "--step", "9"])
    assert (broken, capsys.readouterr().err.count("\n")) == (1, 1)


# -- help ----------------------------------------------------------------------------------------------------

COMMANDS = ("demo", "init", "import", "log", "show", "diff", "export", "verify", "fork", "tag", "gc")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    example = " ".join(ran.out.rpartition("example: ")[2].split())
    words = shlex.split(example)
    assert words[:2] == ["deltaformat", command]
    parsed = parser.parse(words[1:])
    assert parsed is not None
    assert parsed.command == command
    assert "--json" in ran.out


def test_help_and_version(run: Run) -> None:
    ran = run("--help")
    assert ran.code == 0
    for command in COMMANDS:
        assert f"\n    {command} " in ran.out
    assert "_follow" not in ran.out
    assert run("--version").out == f"deltaformat {df.__version__}\n"


# -- hostile input -------------------------------------------------------------------------------------------


def _garbage() -> st.SearchStrategy[bytes]:
    length = st.integers(0, 300).map(lambda number: number.to_bytes(8, "little"))
    header = st.sampled_from(
        [
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            b'{"a":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,4]}}',
            b'{"a":{"dtype":"NO","shape":[1],"data_offsets":[0,4]}}',
            b'{"weight_map":{"a":"../../etc/passwd"}}',
            b"[" * 200,
            b'{"a":1,"a":2}',
        ]
    )
    return st.one_of(
        st.binary(max_size=200),
        header,
        st.tuples(length, st.binary(max_size=80)).map(b"".join),
        st.tuples(header, st.binary(max_size=12)).map(
            lambda pair: len(pair[0]).to_bytes(8, "little") + b"".join(pair)
        ),
    )


NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "model-00001-of-00002.safetensors",
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(st.sampled_from(NAMES), _garbage()), single=_garbage())
def test_garbage_to_import_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], files: dict[str, bytes], single: bytes
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "checkpoint"
        directory.mkdir()
        for path, data in files.items():
            (directory / path).write_bytes(data)
        (Path(name) / "single.safetensors").write_bytes(single)
        for source in (directory, Path(name) / "single.safetensors"):
            code = main(["import", f"{name}/store", str(source), "--step", "0", "--init", "--json"])
            captured = capsys.readouterr()
            check(Ran(code, captured.out, captured.err))
            assert code in (0, 1)
            assert ("error" in json.loads(captured.out)) == bool(code)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_broken_store_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], made: Path, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = Path(shutil.copytree(made, Path(name) / "store"))
        objects = sorted(path for path in store.rglob("*") if path.is_file())
        for path in data.draw(st.lists(st.sampled_from(objects), min_size=1, max_size=3, unique=True)):
            content = bytearray(path.read_bytes())
            path.chmod(0o644)
            kind = data.draw(st.sampled_from(["garbage", "cut", "flip", "gone"]))
            if kind == "gone":
                path.unlink()
            elif kind == "garbage":
                path.write_bytes(data.draw(_garbage()))
            elif kind == "cut":
                path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
            else:
                content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
                path.write_bytes(content)
        for arguments in (
            ["log", store, "--json"],
            ["show", store],
            ["diff", store, 0, 2],
            ["verify", store, "--all"],
            ["export", store, "--step", 1, "--output", f"{name}/out"],
            ["gc", store, "--keep-last", 1],
            ["tag", store, "t", "--step", 1],
            ["fork", store, "b", "--step", 0, "--json"],
        ):
            code = main([str(argument) for argument in arguments])
            captured = capsys.readouterr()
            assert check(Ran(code, captured.out, captured.err)).code in (0, 1)


# -- real processes ------------------------------------------------------------------------------------------


def _start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "deltaformat", *map(str, arguments)], **options)


def test_the_program_runs(store: Path) -> None:
    with _start("log", store, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert len(json.loads(out)["records"]) == 4


def test_a_closed_pipe_is_no_error(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with _start("log", store, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(store: Path) -> None:
    with (
        open("/dev/full", "wb") as full,
        _start("log", store, stdout=full, stderr=subprocess.PIPE) as process,
    ):
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith(b"error: ")
    assert err.count(b"\n") == 1


def test_an_ascii_terminal_gets_escapes(tmp_path: Path) -> None:
    with df.create(tmp_path / "s").writer() as writer:
        writer.commit(step=0, tensors={"größe": np.zeros(1, np.float32)})
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    with _start(
        "show", tmp_path / "s", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert rb"gr\xf6\xdfe" in out


# -- text ----------------------------------------------------------------------------------------------------


@given(st.text())
def test_escaped_names_are_printable_and_short(name: str) -> None:
    shown = escape(name)
    assert shown
    assert shown.isprintable()
    assert len(shown) <= output.MAX_NAME
    assert plain(name).isprintable()


def test_escape_tells_names_apart() -> None:
    assert escape("layer.0/weight") == "layer.0/weight"
    assert escape("a\nb") == "a\\nb"
    assert escape("a\\nb") == "a\\\\nb"
    assert escape("\u202e") == "\\u202e"
    assert escape("") == '""'
    assert escape("x" * 4000).count("x") == 96


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_600, "1.00 MB"), (5_000_000_000, "5.00 GB"), (2**53 - 1, "9.01 PB"), (10**21, "1000 EB"),
    ],
)  # fmt: skip
def test_human_sizes(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


def test_percentages() -> None:
    assert [percent(1, 0), percent(0, 9), percent(1, 10**9), percent(1, 200), percent(9, 10)] == [
        *("-", "0.000 %", "<0.001 %", "0.500 %", "90.0 %")
    ]


def test_tables_are_aligned() -> None:
    assert table([Column("name", left=True), Column("size")], [["a", "10"], ["long name", "9"]]) == [
        "name       size",
        "a            10",
        "long name     9",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("5GB", 5 * 10**9), ("1.5k", 1500), ("64MiB", 64 << 20), ("2 kib", 2048), ("1t", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@given(st.text(max_size=12))
def test_arguments_are_numbers_or_refused(text: str) -> None:
    for kind in (natural, positive, byte_size, block_size, hours):
        with contextlib.suppress(argparse.ArgumentTypeError):
            assert kind(text) >= 0


def test_usage_errors_name_the_help() -> None:
    with pytest.raises(UsageError, match="deltaformat gc --help"):
        parser.parse(["gc"])


@pytest.fixture(autouse=True)
def no_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTAFORMAT_DEBUG", raising=False)
