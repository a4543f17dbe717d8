"""Adapters that are wrong in one way each fail, with the reason named."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from suitetools import CONFORMANCE, outcomes, suite

from deltaformat.cli import main

BROKEN = Path(__file__).parent / "broken_adapter.py"


def broken(kind: str) -> list[str]:
    return [sys.executable, str(BROKEN), kind]


def reasons(kind: str, *filters: str, timeout: float = 30) -> Counter[str]:
    found = outcomes(broken(kind), list(filters), timeout=timeout)
    return Counter(outcome.reason for outcome in found.values() if outcome.status == "failed")


# kind -> cases, and the reasons for which they fail
WRONG = {
    "accepts_everything": ("invalid/sparse/k-27", "accepted"),
    "rejects_everything": ("valid/worked-store", "rejected"),
    "ignores_digests": ("invalid/digests/bit-flip-in-pack", "accepted"),
    "reads_eagerly": ("valid/lazy/open-without-blocks", "rejected"),
    "follows_by_reading": ("valid/rebase/follower-needs-no-squashed-piece", "rejected"),
    "loses_what_it_held": ("invalid/follow/wrong-difference", "wrong-value"),
    "trusts_heads": ("valid/void/commit-below-head", "wrong-value"),
    "crashes": ("valid/chains/raw", "crash"),
    "says_nothing_useful": ("valid/chains/raw", "malformed-reply"),
    "answers_another_request": ("valid/chains/raw", "malformed-reply"),
    "invents_classes": ("invalid/sparse/k-27", "malformed-reply"),
    "skips": ("valid/chains/raw", "skip"),
    "changes_the_store": ("valid/chains/raw", "store-changed"),
    "sorts_as_utf_16": ("valid/names/utf-16-order", "wrong-value"),
    "writes_beside_keys": ("write/metadata", "bad-store"),
    "writes_a_record_of_no_kind": ("write/metadata", "bad-store"),
    "writes_packs_of_anything": ("write/metadata", "bad-store"),
    "writes_a_hint_of_anything": ("write/metadata", "bad-store"),
    "refuses_nothing": ("write/names-change", "rejected"),
    "loses_a_tensor": ("write/commits", "judged-wrong-value"),
}


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_a_wrong_adapter_fails(kind: str) -> None:
    case, reason = WRONG[kind]
    outcome = outcomes(broken(kind), [f"={case}"])[case]
    assert (outcome.status, outcome.reason) == ("failed", reason), outcome.message
    assert outcome.message


def test_a_reader_that_accepts_everything_fails_every_invalid_case() -> None:
    found = outcomes(broken("accepts_everything"), ["invalid/sparse/", "invalid/json/", "invalid/keys/"])
    assert len(found) > 80
    assert {outcome.reason for outcome in found.values()} == {"accepted"}


def test_a_reader_that_rejects_everything_fails_every_valid_case() -> None:
    found = outcomes(broken("rejects_everything"), ["valid/sparse/", "valid/descriptor/", "valid/hint/"])
    assert len(found) > 40
    assert {outcome.reason for outcome in found.values()} == {"rejected"}


def test_the_cause_of_a_crash_is_shown() -> None:
    outcome = outcomes(broken("crashes"), ["=valid/chains/raw"])["valid/chains/raw"]
    assert "exit code 3" in outcome.message
    assert outcome.message.endswith("stderr: a bug")


def test_the_runner_goes_on_after_a_crash() -> None:
    found = outcomes(broken("crashes"), ["=valid/chains/raw", "=valid/chains/mixed"])
    assert [outcome.reason for outcome in found.values()] == ["crash"] * len(found)
    assert len(found) == 2


def test_an_adapter_that_hangs_is_ended_and_soon_given_up() -> None:
    start = time.monotonic()
    found = outcomes(broken("hangs"), ["valid/sparse/"], timeout=0.2)
    assert time.monotonic() - start < 30
    count = Counter(outcome.reason for outcome in found.values())
    assert count == {"timeout": suite.MAX_LOST, "not-run": len(found) - suite.MAX_LOST}
    assert {outcome.status for outcome in found.values()} == {"failed"}


def test_an_adapter_that_does_not_read_is_ended_too() -> None:
    """Its request is larger than a pipe holds, so that it cannot even be sent."""
    (case,) = suite.chosen(suite.load_cases(CONFORMANCE / "cases"), ["=write/bad-tensors"])
    assert len(json.dumps(case.members["args"])) > 1 << 16
    start = time.monotonic()
    outcome = outcomes(broken("reads_nothing_more"), [f"={case.id}"], timeout=0.5)[case.id]
    assert (outcome.status, outcome.reason) == ("failed", "timeout"), outcome.message
    assert time.monotonic() - start < 30


def test_codes_are_a_warning_unless_strict() -> None:
    (lenient,) = outcomes(broken("gives_no_codes"), ["=invalid/sparse/k-27"]).values()
    (strict,) = outcomes(broken("gives_no_codes"), ["=invalid/sparse/k-27"], strict=True).values()
    assert (lenient.status, strict.status, strict.reason) == ("warning", "failed", "other-code")


def test_what_is_not_claimed_is_left_out_unless_asked_for() -> None:
    filters = ["=valid/slices/rows", "=valid/chains/raw"]
    found = outcomes(broken("claims_too_little"), filters)
    assert {o.case.id: o.status for o in found.values()} == {
        "valid/slices/rows": "left-out",
        "valid/chains/raw": "passed",
    }
    asked = outcomes(broken("claims_too_little"), filters, profiles=["reader-full"])
    assert {o.case.id: o.status for o in asked.values()} == {"valid/slices/rows": "passed"}


def test_a_claim_says_how_many_cases_were_left_out() -> None:
    cases = suite.chosen(
        suite.load_cases(CONFORMANCE / "cases"), ["=valid/external/file", "=valid/slices/rows"]
    )
    adapter = suite.Adapter(broken("knows_no_feature"))
    try:
        report = suite.run(cases, adapter, version="1")
        part = suite.run(cases, adapter, version="1", whole=False)
    finally:
        adapter.close()
    assert report.claims() == ["deltaformat 1.0 reader-full, suite 1, 1/1, 1 left out"]
    assert report.as_json()["claims"] == report.claims()
    assert part.claims() == []
    assert len(part.outcomes) == len(report.outcomes)


def test_the_first_failing_line_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    adapter = f"{sys.executable} {BROKEN} accepts_everything"
    code = main(
        [
            "conformance",
            "run",
            "--adapter",
            adapter,
            "--filter",
            "invalid/sparse/k-27",
            "--junit",
            str(report),
        ]
    )
    assert code == 1
    lines = capsys.readouterr().out.splitlines()
    wanted = "FAIL invalid/sparse/k-27: accepted: must be refused as MALFORMED payload-invalid; was accepted"
    assert lines[0] == wanted
    assert "DF-ENC-12" in lines[2]
    assert "valid/sparse/strata but for one fault: a k of 27" in lines[3]
    assert "--filter '=invalid/sparse/k-27'" in lines[4]
    assert lines[-1] == "no claim: --filter chose some of the cases"
    (failure,) = ElementTree.parse(report).getroot().iter("failure")
    assert failure.get("type") == "accepted"
    assert "DF-ENC-12" in (failure.text or "")


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """Also not those that an adapter has started."""
    pids = tmp_path / "pids"
    script = tmp_path / "adapter.sh"
    script.write_text(f'sleep 600 & echo $$ $! > "{pids}"; exec "{sys.executable}" "{BROKEN}" hangs\n')
    outcomes(["sh", str(script)], ["=valid/chains/raw"], timeout=5)
    for pid in pids.read_text().split():
        deadline = time.monotonic() + 5
        while _runs(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _runs(int(pid))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_files_outside_are_taken_away() -> None:
    case = "valid/external/file"
    members = next(c.members for c in suite.load_cases(CONFORMANCE / "cases") if c.id == case)
    (path,) = members["place"]
    found = outcomes(broken("claims_too_little"), [f"={case}"], profiles=["reader-full"])
    assert found[case].status == "passed"
    with suite._alone():  # another run on this machine may be at the same place
        assert not Path(path).parent.exists()


def test_places_are_taken_by_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another user's run has left in the system's directory of temporary files does not end a run."""
    monkeypatch.setattr(suite.tempfile, "tempdir", str(tmp_path))
    with suite._alone():
        (lock,) = tmp_path.iterdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with suite._alone():
        (other,) = set(tmp_path.iterdir()) - {lock}
    assert str(12345) in other.name


def test_a_lock_that_cannot_be_had_leaves_a_case_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = suite.chosen(suite.load_cases(CONFORMANCE / "cases"), ["=valid/external/file"])
    with monkeypatch.context() as patch:
        patch.setattr(suite.tempfile, "tempdir", str(tmp_path))
        with suite._alone():
            (lock,) = tmp_path.iterdir()
    lock.unlink()
    lock.mkdir()
    monkeypatch.setattr(suite.tempfile, "gettempdir", lambda: str(tmp_path))
    adapter = suite.Adapter(broken("right"))
    try:
        outcome = suite.run_case(case, adapter)
    finally:
        adapter.close()
    assert (outcome.status, outcome.reason) == ("left-out", "place")
    assert str(lock) in outcome.message


def test_a_place_that_is_taken_leaves_a_case_out(tmp_path: Path) -> None:
    (case,) = suite.chosen(suite.load_cases(CONFORMANCE / "cases"), ["=valid/external/file"])
    (tmp_path / "taken").write_bytes(b"a file of somebody's")
    members = {**case.members, "place": {str(tmp_path / "taken" / "x"): "external/0"}}
    adapter = suite.Adapter(broken("right"))
    try:
        outcome = suite.run_case(suite.Case(case.directory, members, case.expect, case.store), adapter)
    finally:
        adapter.close()
    assert (outcome.status, outcome.reason) == ("left-out", "place")
    assert "taken" in outcome.message
    assert (tmp_path / "taken").read_bytes() == b"a file of somebody's"
