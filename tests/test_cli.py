"""Commands that make, move and tend: init, import, export, log, verify, fork, tag, gc; and their help."""

from __future__ import annotations

import shlex
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cliruns import HOSTILE, Run, make_store, runner, state
from safetensors.numpy import load_file, save_file

import deltaformat as df
from deltaformat import sources
from deltaformat.cli import parser, stores
from deltaformat.hubclient import HubClient
from deltaformat.retrying import Retry


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("DELTAFORMAT_DEBUG", raising=False)
    return runner(capsys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("cli") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


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


def test_import_can_leave_the_bytes_where_they_are(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, url = tmp_path / "base", (tmp_path / "base").as_uri()
    base.mkdir()
    tensors = {"a": np.arange(5000, dtype=np.float32), "b": np.ones((3, 3), np.int16)}
    save_file(tensors, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    arguments = ["import", tmp_path / "store", base, "--step", 0, "--init", "--external"]
    done = run(*arguments, "--json")
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
    arguments = [
        "import",
        tmp_path / "other",
        base,
        "--step",
        0,
        "--init",
        "--external",
        "--external-url",
        hub,
    ]
    unreachable = partial(HubClient, endpoint="http://127.0.0.1:9", retry=Retry(seconds=0))
    monkeypatch.setattr(sources, "HubClient", unreachable)
    unread = run(*arguments)
    assert (unread.code, "the Hub failed" in unread.err) == (1, True)
    copy = tmp_path / "other" / "packs" / "external" / pack["sha256"]
    copy.parent.mkdir(parents=True)
    copy.write_bytes((base / "model.safetensors").read_bytes())
    assert run(*arguments).code == 0
    assert run("show", tmp_path / "other", "--json").json["packs"][0]["url"] == f"{hub}/model.safetensors"
    assert run("verify", tmp_path / "other").code == 0
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


COMMANDS = ("demo", "init", "import", "log", "show", "diff", "export", "verify", "fork", "tag", "gc")
COMMANDS += ("doctor", "bench")


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


def test_an_import_that_cannot_be_does_not_take_the_branch(run: Run, tmp_path: Path) -> None:
    """A mistyped step, or other tensors, must not fence a trainer that is at work."""
    save_file({"a": np.arange(9.0)}, tmp_path / "a.safetensors")
    save_file({"b": np.arange(9.0)}, tmp_path / "b.safetensors")
    store = df.create(tmp_path / "live")
    with store.writer() as writer:
        writer.commit(step=10, tensors={"a": np.arange(9.0)})
        below = run("import", tmp_path / "live", tmp_path / "a.safetensors", "--step", 3)
        assert (below.code, "step-not-above-head" in below.err) == (1, True)
        other = run("import", tmp_path / "live", tmp_path / "b.safetensors", "--step", 11)
        assert (other.code, "set-changed" in other.err) == (1, True)
        writer.commit(step=11, tensors={"a": np.arange(9.0) + 1})
