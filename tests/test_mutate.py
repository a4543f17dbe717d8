"""tools/mutate.py: mutants are what they claim to be, and two readers that differ are found out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest
import zstandard
from suitetools import CONFORMANCE, REFERENCE, suite

import mutate
from deltaformat.cli.conformance import load_runner
from vectors.mutations import mutate as change
from vectors.primitives import sha256

BROKEN = f"{sys.executable} {Path(__file__).parent / 'broken_adapter.py'}"


def objects_of(case: str) -> dict[str, bytes]:
    return mutate.objects_of(CONFORMANCE / "cases" / case / "store")


def test_two_configurations_agree(capsys: pytest.CaptureFixture[str]) -> None:
    code = mutate.main(["--count", "60", "--seed", "11"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "60 stores of" in out
    assert "; 0 disagreements, 0 times another class" in out


@pytest.mark.parametrize(
    ("kind", "filters", "count"),
    [
        ("ignores_digests", ["chains/"], "120"),
        ("accepts_everything", ["chains/"], "12"),
        ("rejects_everything", ["chains/"], "12"),
    ],
)
def test_a_reader_that_differs_is_found_out(
    kind: str, filters: list[str], count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [item for text in filters for item in ("--filter", text)]
    adapters = ["--adapter", f"{REFERENCE[0]} {REFERENCE[1]}", "--adapter", f"{BROKEN} {kind}"]
    assert mutate.main([*arguments, *adapters, "--count", count]) == 1
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("DISAGREE"))
    again = line.partition("; again: ")[2].split()
    assert mutate.main([*again, *adapters]) == 1
    assert line in capsys.readouterr().out


def test_a_crash_is_a_disagreement(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = ["--adapter", f"{BROKEN} crashes"] * 2
    assert mutate.main([*adapters, "--count", "1"]) == 1
    assert "crash: the adapter ended (exit code 3)" in capsys.readouterr().out


def test_most_mutants_have_their_hashes_in_order() -> None:
    """Otherwise nothing but hash-mismatch would be tried."""
    objects = objects_of("valid/chains/mixed")
    sound = changed = 0
    for number in range(200):
        mutant, _ = change(objects, Random(number), mutate.decode)
        changed += mutant != objects
        log = sorted(key for key in mutant if key.startswith("log/"))
        sound += all(_sealed(mutant[key]) for key in ["deltaformat.json", *log] if key in mutant)
    assert changed > 180
    assert sound > 160


def _sealed(data: bytes) -> bool:
    return len(data) > 76 and data[-66:-2] == sha256(data[:-76]).encode()


def test_a_mutant_is_made_again_from_its_seed(tmp_path: Path) -> None:
    objects = objects_of("valid/sparse/strata")
    first = [change(objects, Random(f"3:{number}"), mutate.decode) for number in range(20)]
    assert first == [change(objects, Random(f"3:{number}"), mutate.decode) for number in range(20)]
    assert len({json.dumps(sorted(map(sha256, mutant.values()))) for mutant, _ in first}) > 15


def test_changed_payloads_are_read_with_new_digests() -> None:
    """Some mutants of payloads are stores that must be read: bytes are compared, not only refusals."""
    cases = suite.chosen(suite.load_cases(CONFORMANCE / "cases"), ["=valid/sparse/strata"])
    adapter = load_runner().Adapter(REFERENCE)
    try:
        found = []
        for number in range(80):
            words, _, (outcome,) = mutate.try_one(cases[0], Random(number), [adapter], None)
            if words.startswith("payload"):
                found.append((outcome[0], outcome[1].get("root")))
    finally:
        adapter.close()
    roots = {root for result, root in found if result == "ok"}
    assert len(roots) > 2, found
    assert any(result == "error" for result, _ in found)


OK = ("ok", {"root": "x"})


def refused(error_class: str, code: str) -> mutate.Outcome:
    return "error", {"class": error_class, "code": code, "held": None}


def test_what_spec_leaves_to_a_reader_is_no_disagreement() -> None:
    """DF-ENC-09, DF-MAN-01, DF-LOG-06; and nothing beside these is free."""
    payload, record = "payload of piece 0 of row 0, encoding 1", "record 4: last_tag"
    frame = refused("CORRUPT", "frame-corrupt")
    void = refused("INCONSISTENT", "record-void")
    for words, outcome in ((payload, frame), (record, void), ("bytes of a manifest's frame", frame)):
        assert mutate.verdict(words, {}, [outcome, OK]) == "free"
        assert mutate.verdict(words, {}, [OK, outcome]) == "free"
    for words, outcome in (
        (payload, refused("CORRUPT", "digest-mismatch")),
        (payload, refused("MALFORMED", "payload-invalid")),
        ("column digest, row 0", frame),
        (record, refused("MALFORMED", "value-invalid")),
        ("record 4: step", void),
    ):
        assert mutate.verdict(words, {}, [outcome, OK]) == "disagree"
    assert mutate.verdict(payload, {}, [OK, ("ok", {"root": "y"})]) == "disagree"


def test_only_files_that_break_arrows_own_rules_may_be_read_or_refused() -> None:
    """DF-MAN-01: other faults of a manifest have one answer."""
    words, outcome = "bytes of an Arrow file", refused("MALFORMED", "manifest-invalid")
    objects = objects_of("valid/chains/mixed")
    assert mutate.verdict(words, objects, [outcome, OK]) == "disagree"
    key = next(key for key in objects if key.startswith("manifests/"))
    content = zstandard.ZstdDecompressor().decompress(objects[key])
    end = len(content) - 10 - int.from_bytes(content[-10:-6], "little")  # of the footer its root's offset
    broken = content[:end] + b"\xff\xff\xff\x7f" + content[end + 4 :]
    objects[key] = zstandard.compress(broken)
    assert mutate.verdict(words, objects, [outcome, OK]) == "free"
    assert mutate.verdict("column gap, row 0", objects, [outcome, OK]) == "disagree"


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate.main(["--filter", "no such case"]) == 2
    with pytest.raises(SystemExit):
        mutate.main(["--adapter", "one"])
    capsys.readouterr()
