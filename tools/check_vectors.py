#!/usr/bin/env python3
"""Checks conformance/ against SPEC.md and its protocol; one line per finding, exit code 1 if there is one.

Every normative id of SPEC.md has a case, or a waiver with a reason in conformance/waivers.json; every case is
well-formed, and what it refers to is there.

    python tools/check_vectors.py [CONFORMANCE]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from check_spec import parse

__all__ = ["check"]

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 5_000_000
LEVELS = ("must", "should")
PROFILES = ("reader-core", "reader-full", "writer")
OPERATIONS = ("read", "open", "slice", "follow", "state", "write")
_ID = re.compile(r"\*\*(DF-[A-Z]+-[0-9]+)\*\*(?=\s)")
_MEMBERS = {
    "id": str,
    "title": str,
    "level": str,
    "profile": str,
    "spec": str,
    "features": list,
    "requirements": list,
    "op": str,
    "args": dict,
    "flags": list,
}
_OPTIONAL = {
    "derived_from": str,
    "mutation": str,
    "store": str,
    "gzip": list,
    "place": dict,
    "judge": list,
}


def check(directory: Path, spec: str) -> list[str]:
    """Return all findings, each `place: what is wrong`."""
    parsed = parse(spec)
    defined = {id_ for unit in parsed.units for id_ in _ID.findall(unit.text)}
    errors = {(row[0], row[1]) for row in parsed.tables["errors"][1:]}
    cases = directory / "cases"
    read = {
        path.parent.relative_to(cases).as_posix(): json.loads(path.read_bytes())
        for path in sorted(cases.rglob("case.json"))
    }
    findings = [] if read else ["cases: there are none"]
    for name, members in read.items():
        findings += [f"{name}: {text}" for text in _check_case(cases / name, name, members, read)]
        unknown = sorted(set(members.get("requirements", [])) - defined)
        findings += [f"{name}: {id_} is no id of SPEC.md" for id_ in unknown]
        findings += [f"{name}: {text}" for text in _check_expect(cases / name, members, errors)]
    waivers = json.loads((directory / "waivers.json").read_bytes())
    findings += _check_coverage(defined, read, waivers)
    size = sum(path.stat().st_size for path in cases.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        findings.append(f"cases: {size} bytes are more than {MAX_BYTES}")
    return findings


def _check_case(
    place: Path, name: str, members: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for member, kind in _MEMBERS.items():
        if not isinstance(members.get(member), kind):
            yield f"`{member}` is missing or no {kind.__name__}"
            return
    for member in members.keys() - _MEMBERS.keys():
        if member not in _OPTIONAL or not isinstance(members[member], _OPTIONAL[member]):
            yield f"`{member}` is not known, or of another type"
    if members["id"] != name:
        yield f"its id is {members['id']}"
    for member, allowed in (("level", LEVELS), ("profile", PROFILES), ("op", OPERATIONS)):
        if members[member] not in allowed:
            yield f"`{member}` is {members[member]!r}"
    tree = name.partition("/")[0]
    if tree not in ("valid", "invalid", "write"):
        yield "it is in none of valid/, invalid/ and write/"
    if (members["op"] == "write") != (tree == "write") or (members["op"] == "write") != ("judge" in members):
        yield "`write` cases, and no others, are in write/ and have `judge`"
    if not members["requirements"]:
        yield "it guards no requirement"
    if (tree == "invalid") != ("derived_from" in members) or ("derived_from" in members) != (
        "mutation" in members
    ):
        yield "invalid cases, and no others, have `derived_from` and `mutation`"
    if "derived_from" in members and not members["derived_from"].startswith("valid/"):
        yield f"it is derived from {members['derived_from']}, which is not in valid/"
    for member in ("derived_from", "store"):
        if member in members and members[member] not in cases:
            yield f"`{member}` names {members[member]}, which is not there"
    if "store" in members and ((place / "store").exists() or "store" in cases.get(str(members["store"]), {})):
        yield "`store` names another case's store, and it has one of its own or that one has none"
    packed = {f"store/{key}.gz" for key in members.get("gzip", ())}
    there = {path.relative_to(place).as_posix() for path in place.rglob("*.gz")}
    if packed != there:
        yield f"gzipped files and `gzip` differ: {sorted(packed ^ there)}"
    outside = {path.relative_to(place).as_posix() for path in place.glob("external/*")}
    if outside != set(members.get("place", {}).values()):
        yield "files in external/ and `place` differ"


def _check_expect(place: Path, members: Mapping[str, Any], errors: set[tuple[str, str]]) -> Iterator[str]:
    expect = json.loads((place / "expect.json").read_bytes())
    if list(expect) not in (["ok"], ["error"]):
        yield "expect.json does not have exactly one of `ok` and `error`"
        return
    if "derived_from" in members and "ok" in expect:
        yield "it is invalid and expects `ok`"
    if "error" in expect:
        pair = expect["error"].get("class"), expect["error"].get("code")
        if pair not in errors:
            yield f"SPEC 17 has no {pair[0]} {pair[1]}"
    elif not expect["ok"]:
        yield "`ok` has no members: it would pass whatever is read"


def _check_coverage(
    defined: set[str], cases: Mapping[str, Mapping[str, Any]], waivers: Mapping[str, str]
) -> Iterator[str]:
    guarded = {id_ for members in cases.values() for id_ in members.get("requirements", ())}
    for id_ in sorted(defined - guarded - waivers.keys()):
        yield f"SPEC.md: {id_} has no case; add one, or a waiver with a reason"
    for id_ in sorted(waivers.keys() & guarded):
        yield f"waivers.json: {id_} has a case"
    for id_ in sorted(waivers.keys() - defined):
        yield f"waivers.json: {id_} is no id of SPEC.md"
    for id_, reason in waivers.items():
        if len(reason) < 20:
            yield f"waivers.json: {id_} has no reason"


def main(arguments: Sequence[str]) -> int:
    """Check a directory, by default the repository's; print the findings; return the exit code."""
    directory = Path(arguments[0]) if arguments else ROOT / "conformance"
    spec = (ROOT / "SPEC.md").read_text(encoding="utf-8")
    findings = check(directory, spec)
    print("\n".join(findings) or f"{directory}: every requirement has a case or a waiver")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
