"""Errors of the command line: a line, an exit code, a JSON document; for garbage too, and in processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cliruns import Ran, Run, check, make_store, runner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deltaformat as df
from deltaformat.cli import main, output
from deltaformat.errors import ErrorCode


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
        (["init", "ftp://host/store"], "not-supported"),
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
