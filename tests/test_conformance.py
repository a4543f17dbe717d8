"""The conformance suite: its cases are well-formed and as generated, and the reference passes all of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from suitetools import CONFORMANCE, REFERENCE, suite

import check_vectors
import gen_vectors
from deltaformat.cli import main
from deltaformat.errors import ErrorCode

ROOT = CONFORMANCE.parent
CASES = suite.load_cases(CONFORMANCE / "cases")


def test_cases_are_as_generated() -> None:
    """The committed bytes are the authority; what makes them still makes them, from SPEC.md alone."""
    assert gen_vectors.differences(gen_vectors.build()) == []


def test_nothing_of_the_library_makes_cases() -> None:
    makers = [ROOT / "tools" / "gen_vectors.py", *(ROOT / "tools" / "vectors").glob("*.py")]
    assert len(makers) > 5
    for path in makers:
        assert "import deltaformat" not in path.read_text(), path
        assert "from deltaformat" not in path.read_text(), path


def test_every_requirement_has_a_case() -> None:
    assert check_vectors.check(CONFORMANCE, (ROOT / "SPEC.md").read_text()) == []


def test_there_are_enough_cases() -> None:
    assert len(CASES) > 850
    assert sum("derived_from" in case.members for case in CASES) > 480
    assert {case.members["profile"] for case in CASES} == {"reader-core", "reader-full", "writer"}


def test_the_runner_knows_the_classes_of_spec() -> None:
    """DF-ERR-01."""
    assert {code.error_class for code in ErrorCode} | {"NOT-REFUSED"} == suite.CLASSES


@pytest.mark.slow
def test_the_reference_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All profiles, by the command line, with codes; and the reports say the same."""
    report = tmp_path / "report.xml"
    code = main(["conformance", "run", "--json", "--strict", "--junit", str(report)])
    document = json.loads(capsys.readouterr().out)
    bad = [(case["id"], case["message"]) for case in document["cases"] if case["status"] != "passed"]
    assert bad == []
    assert code == 0
    assert len(document["cases"]) == len(CASES)
    assert [claim.split()[2] for claim in document["claims"]] == ["reader-core,", "reader-full,", "writer,"]
    root = ElementTree.parse(report).getroot()
    assert sum(int(one.get("tests", "")) for one in root) == len(CASES)
    assert sum(int(one.get("failures", "")) for one in root) == 0
    assert len(root.findall("testsuite/testcase")) == len(CASES)


def test_the_reference_passes_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC 9 by NumPy alone, and by one thread."""
    monkeypatch.setenv("DELTAFORMAT_NATIVE", "0")
    monkeypatch.setenv("DELTAFORMAT_ADAPTER_THREADS", "1")
    chosen = suite.chosen(CASES, ["sparse/", "planes/", "streams/", "chains/", "rebase/"])
    assert len(chosen) > 100
    adapter = suite.Adapter(REFERENCE)
    try:
        found = suite.run(chosen, adapter, version="x")
    finally:
        adapter.close()
    assert [(o.case.id, o.message) for o in found.outcomes if o.status != "passed"] == []


def test_the_runner_needs_nothing_of_ours(tmp_path: Path) -> None:
    """conformance/ alone, with a Python that has no packages."""
    alone = tmp_path / "conformance"
    alone.mkdir()
    for name in ("run.py", "VERSION"):
        shutil.copy(CONFORMANCE / name, alone)
    shutil.copytree(CONFORMANCE / "cases" / "valid" / "chains", alone / "cases" / "valid" / "chains")
    python = [sys.executable, "-I", "-S", str(alone / "run.py")]
    listed = subprocess.run([*python, "--list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) > 3
    for adapter in ("false", "/nowhere/adapter"):
        ran = subprocess.run([*python, "--adapter", adapter], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "must answer `hello`, see PROTOCOL.md" in ran.stderr
    assert subprocess.run([*python, "--filter", "nothing"], capture_output=True, check=False).returncode == 2


def test_an_archive_of_cases_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wheel holds instead of the directory."""
    shutil.copytree(CONFORMANCE / "cases" / "valid" / "chains", tmp_path / "cases" / "valid" / "chains")
    names = [case.id for case in suite.load_cases(tmp_path / "cases")]
    shutil.make_archive(str(tmp_path / "cases"), "xztar", tmp_path, "cases")
    shutil.rmtree(tmp_path / "cases")
    with suite.found_cases(tmp_path / "cases") as directory:
        assert [case.id for case in suite.load_cases(directory)] == names
        assert os.fspath(directory) != os.fspath(tmp_path / "cases")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "run", "--list", "--filter", "=valid/worked-store"]) == 0
    assert capsys.readouterr().out.startswith("valid/worked-store: ")
    assert main(["conformance", "run", "--filter", "no such case"]) == 2
    assert main(["conformance"]) == 2
    assert main(["conformance", "run", "--profile", "reader-none"]) == 2
    capsys.readouterr()


# -- judging ------------------------------------------------------------------------------------------------

OK = {"ok": {"seq": 1, "tensors": [{"name": "w", "sha256": "ab"}]}}
ERROR = {"error": {"class": "CORRUPT", "code": "digest-mismatch"}}


@pytest.mark.parametrize(
    ("expect", "reply", "status", "reason"),
    [
        (OK, {"result": "ok", "seq": 1, "tensors": [{"name": "w", "sha256": "ab", "more": 1}]}, "passed", ""),
        (OK, {"result": "ok", "seq": 1, "tensors": [{"name": "w", "sha256": "ac"}]}, "failed", "wrong-value"),
        (OK, {"result": "ok", "seq": 1, "tensors": []}, "failed", "wrong-value"),
        (OK, {"result": "ok", "seq": 1, "tensors": OK["ok"]["tensors"] * 2}, "failed", "wrong-value"),
        (OK, {"result": "ok", "seq": 1}, "failed", "wrong-value"),
        (OK, {"result": "ok", "seq": True, "tensors": OK["ok"]["tensors"]}, "failed", "wrong-value"),
        (OK, {"result": "ok", "seq": 1.0, "tensors": OK["ok"]["tensors"]}, "failed", "wrong-value"),
        (OK, {"result": "error", "class": "CORRUPT", "code": None}, "failed", "rejected"),
        (OK, {"result": "skip", "reason": "no"}, "failed", "skip"),
        (ERROR, {"result": "error", "class": "CORRUPT", "code": "digest-mismatch"}, "passed", ""),
        (ERROR, {"result": "error", "class": "CORRUPT", "code": "hash-mismatch"}, "warning", "other-code"),
        (ERROR, {"result": "error", "class": "CORRUPT", "code": None}, "warning", "other-code"),
        (ERROR, {"result": "error", "class": "MALFORMED", "code": None}, "failed", "wrong-class"),
        (ERROR, {"result": "ok"}, "failed", "accepted"),
        (ERROR, {"result": "skip", "reason": "no"}, "failed", "skip"),
    ],
)
def test_a_reply_is_judged(
    expect: dict[str, object], reply: dict[str, object], status: str, reason: str
) -> None:
    assert suite.compare(expect, reply)[:2] == (status, reason)


def test_another_code_fails_when_strict() -> None:
    reply = {"result": "error", "class": "CORRUPT", "code": "hash-mismatch"}
    assert suite.compare(ERROR, reply, strict=True)[:2] == ("failed", "other-code")


def test_what_was_held_must_be_as_before() -> None:
    """DF-RD-03."""
    held = [{"name": "w", "sha256": "ab"}]
    expect = {"error": {"class": "CORRUPT", "code": "digest-mismatch", "held": held}}
    reply = {"result": "error", "class": "CORRUPT", "code": "digest-mismatch", "held": held}
    assert suite.compare(expect, reply)[0] == "passed"
    for wrong in ({**reply, "held": [{"name": "w", "sha256": "ac"}]}, {**reply, "held": []}, ERROR["error"]):
        assert suite.compare(expect, {"result": "error", **wrong})[:2] == ("failed", "wrong-value")


def test_the_reference_claims_what_is_installed() -> None:
    """Without the library of blake3-256 the profiles that need it are not claimed."""
    code = (
        "import importlib.util as util, runpy, sys; find = util.find_spec;"
        "util.find_spec = lambda name, *rest: None if name == 'blake3' else find(name, *rest);"
        f"sys.argv = [{REFERENCE[-1]!r}]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    request = json.dumps({"id": 0, "op": "hello", "protocol": 1}) + "\n"
    for command, profiles in (
        ([sys.executable, "-c", code], ["reader-core"]),
        (REFERENCE, ["reader-core", "reader-full", "writer"]),
    ):
        answered = subprocess.run(
            command, input=request, capture_output=True, text=True, check=True, timeout=60
        )
        assert json.loads(answered.stdout)["profiles"] == profiles
