#!/usr/bin/env python3
"""Checks SPEC.md against itself, the tests and the code; one line per finding, exit code 1 if there is any.

What it checks: every sentence that binds carries an id; ids are unique and have no gaps; every id is cited by
a test, and every id that is cited anywhere exists; the tables of errors, dtypes and encodings are the code's;
references to sections lead somewhere.

    python tools/check_spec.py [SPEC.md]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Ids that no test under tests/ can hold -> why. A waiver that is not needed is a finding too.
WAIVERS: Mapping[str, str] = {}

_SOURCE_DIRECTORIES = ("conformance", "deltaformat", "tests", "tools")
_SOURCE_SUFFIXES = frozenset((".c", ".json", ".md", ".py", ".sh", ".toml", ".txt"))
# It is about made-up specifications, with made-up ids.
_NOT_A_SOURCE = "tests/test_check_spec.py"

_ID = re.compile(r"\bDF-[A-Z]+-[0-9]+\b")
# Followed by its sentence; in any other place an id in bold is an example.
_DEFINITION = re.compile(r"\*\*(DF-[A-Z]+-[0-9]+)\*\*(?=\s)")
_KEYWORD = re.compile(r"\b(?:MUST|SHOULD|MAY|SHALL|REQUIRED|RECOMMENDED|OPTIONAL)\b")
# The sentence that says what the key words mean.
_KEYWORDS_DEFINED = "BCP 14"
_HEADING = re.compile(r"#+ (?:Appendix )?([0-9]+(?:\.[0-9]+)*|[A-Z])\.? ")
_NUMBER = r"[0-9]+(?:\.[0-9]+)*"
_REFERENCE = re.compile(rf"\b[Ss]ections? ({_NUMBER}(?:(?:, | to | and ){_NUMBER})*)|\(([0-9]+\.[0-9]+)\)")
_SOURCE_REFERENCE = re.compile(rf"\bSPEC ({_NUMBER})")
_BULLET = re.compile(r"\s*[-*] ")
_NUMBERED = re.compile(r"\s*([0-9]+)\. ")
_NOTE = re.compile(r"\*\(Non-normative.*?\)\*", re.DOTALL)

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A paragraph, list item or table row: what an id stands for."""

    line: int
    text: str
    normative: bool


@dataclass(frozen=True, slots=True)
class Spec:
    """What was found in a specification's text."""

    units: tuple[Unit, ...]
    sections: tuple[tuple[int, str], ...]
    tables: Mapping[str, tuple[Row, ...]]
    findings: tuple[str, ...]


def parse(text: str) -> Spec:
    """Split a specification into what is checked."""
    units: list[Unit] = []
    sections: list[tuple[int, str]] = []
    tables: dict[str, tuple[Row, ...]] = {}
    findings: list[str] = []
    pending: list[str] = []
    start = 0
    normative, quiet_level = True, 0
    marker, rows, fenced = "", list[Row](), False

    def flush() -> None:
        if pending:
            body = " ".join(line.strip() for line in pending)
            binding = normative and not body.startswith("*(Non-normative)*")
            units.append(Unit(start, _NOTE.sub("", body), binding))
            pending.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            flush()
            fenced = not fenced
        elif fenced:
            continue
        elif line.startswith("#"):
            flush()
            level = len(line) - len(line.lstrip("#"))
            if normative or level <= quiet_level:
                normative, quiet_level = "non-normative" not in line.lower(), level
            if heading := _HEADING.match(line):
                sections.append((number, heading[1]))
        elif line.startswith("<!--"):
            flush()
            name = line.strip().removeprefix("<!--").removesuffix("-->").strip()
            if name == "end":
                if not marker:
                    findings.append(f"{number}: `end` without a table")
                tables[marker] = tuple(rows)
                marker = ""
            elif marker:
                findings.append(f"{number}: {name} begins before {marker} ends")
            else:
                marker, rows = name, []
        elif line.startswith("|"):
            flush()
            cells = tuple(cell.strip().strip("`") for cell in line.strip().strip("|").split("|"))
            if marker and not set(line) <= set("|-: "):
                rows.append(cells)
            start = number
            pending.append(line)
            flush()
        elif not line.strip():
            flush()
        else:
            # As in Markdown, a line in the middle of a sentence may begin with a number.
            numbered = _NUMBERED.match(line)
            if numbered and pending and numbered[1] != "1" and not _NUMBERED.match(pending[0]):
                numbered = None
            if numbered or _BULLET.match(line):
                flush()
            if not pending:
                start = number
            pending.append(line)
    flush()
    if marker:
        findings.append(f"{number}: {marker} has no end")
    return Spec(tuple(units), tuple(sections), tables, tuple(findings))


def check(
    text: str,
    sources: Mapping[str, str],
    tables: Mapping[str, Sequence[Row]],
    waivers: Mapping[str, str] = WAIVERS,
) -> list[str]:
    """Return all findings, each `place: what is wrong`.

    Args:
        text: The specification.
        sources: Path from the repository's root -> text of every file that may cite it.
        tables: What the code says: marker in the text -> rows, without the heading.
        waivers: Ids that need no test, and why.
    """
    spec = parse(text)
    defined = [(unit.line, id_) for unit in spec.units for id_ in _DEFINITION.findall(unit.text)]
    findings = list(spec.findings)
    findings += _check_keywords(spec)
    findings += _check_numbers(defined)
    findings += _check_sections(spec)
    findings += _check_tables(spec, tables)
    findings = [f"SPEC.md:{finding}" for finding in findings]
    findings += _check_citations(spec, {id_ for _, id_ in defined}, sources, waivers)
    findings += _check_source_references({section for _, section in spec.sections}, sources)
    return findings


def _check_keywords(spec: Spec) -> Iterator[str]:
    for unit in spec.units:
        keyword, definition = _KEYWORD.search(unit.text), _DEFINITION.search(unit.text)
        if definition and not unit.normative:
            yield f"{unit.line}: {definition[1]} is in a non-normative part"
        if not keyword or not unit.normative or _KEYWORDS_DEFINED in unit.text:
            continue
        if not definition or definition.start() > keyword.start():
            yield f"{unit.line}: {keyword[0]} before any id: {unit.text[:60]}..."


def _check_numbers(defined: Sequence[tuple[int, str]]) -> Iterator[str]:
    seen: dict[str, int] = {}
    groups: dict[str, set[int]] = {}
    for line, id_ in defined:
        if id_ in seen:
            yield f"{line}: {id_} is defined at line {seen[id_]} too"
        seen.setdefault(id_, line)
        _, group, digits = id_.split("-")
        groups.setdefault(group, set()).add(int(digits))
        if len(digits) != 2:
            yield f"{line}: {id_} does not have two digits"
    for group, numbers in sorted(groups.items()):
        for number in sorted(set(range(1, max(numbers) + 1)) - numbers):
            yield f"1: DF-{group}-{number:02} is missing: the group goes to {max(numbers):02}"


def _check_sections(spec: Spec) -> Iterator[str]:
    known: dict[str, int] = {}
    for line, section in spec.sections:
        if section in known:
            yield f"{line}: section {section} is at line {known[section]} too"
        known.setdefault(section, line)
    for unit in spec.units:
        for reference in _REFERENCE.finditer(unit.text):
            for section in re.findall(_NUMBER, reference[0]):
                if section not in known:
                    yield f"{unit.line}: there is no section {section}"


def _check_tables(spec: Spec, tables: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    for marker, expected in tables.items():
        if marker not in spec.tables:
            yield f"1: there is no table between <!-- {marker} --> and <!-- end -->"
            continue
        rows = [row[: len(expected[0])] for row in spec.tables[marker][1:]]
        for row in dict.fromkeys((*rows, *expected)):
            shown = f"1: {marker}: {' | '.join(row)}"
            if row not in rows:
                yield f"{shown}: in the code and not here"
            elif row not in expected:
                yield f"{shown}: here and not in the code"
            elif rows.count(row) > 1:
                yield f"{shown}: twice"
        if sorted(rows) == sorted(expected) and rows != list(expected):
            yield f"1: {marker}: the code has the rows in another order"


def _check_citations(
    spec: Spec, defined: set[str], sources: Mapping[str, str], waivers: Mapping[str, str]
) -> Iterator[str]:
    tested: set[str] = set()
    for unit in spec.units:
        for cited in _ID.findall(unit.text):
            if cited not in defined:
                yield f"SPEC.md:{unit.line}: {cited} is cited and not defined"
    for path, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            for cited in _ID.findall(line):
                if cited not in defined:
                    yield f"{path}:{number}: {cited} is cited and SPEC.md does not define it"
                elif path.startswith("tests/") and path.endswith(".py"):
                    tested.add(cited)
    for id_ in sorted(defined - tested - waivers.keys()):
        yield f"SPEC.md: {id_} is cited by no test"
    for id_ in sorted(waivers.keys() & tested):
        yield f"tools/check_spec.py: the waiver of {id_} is not needed any more"
    for id_ in sorted(waivers.keys() - defined):
        yield f"tools/check_spec.py: {id_} is waived and SPEC.md does not define it"


def _check_source_references(sections: set[str], sources: Mapping[str, str]) -> Iterator[str]:
    for path, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            for reference in _SOURCE_REFERENCE.finditer(line):
                if reference[1] not in sections:
                    yield f"{path}:{number}: SPEC.md has no section {reference[1]}"


def code_tables() -> dict[str, list[Row]]:
    """The tables of SPEC.md as the code has them."""
    from deltaformat.dtypes import DTYPES
    from deltaformat.encodings import Encoding
    from deltaformat.errors import ErrorCode

    return {
        "errors": [(code.error_class, code.value) for code in ErrorCode],
        "dtypes": [(d.name, str(d.bits), str(d.width), d.kind) for d in DTYPES.values()],
        "encodings": [
            (str(e.value), e.name.lower().replace("_", "-"), "needed" if e.needs_base else "none")
            for e in Encoding
        ],
    }


def read_sources(root: Path) -> dict[str, str]:
    """All text files that may cite the specification."""
    sources: dict[str, str] = {}
    for directory in _SOURCE_DIRECTORIES:
        for path in sorted((root / directory).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in _SOURCE_SUFFIXES and path.is_file() and name != _NOT_A_SOURCE:
                sources[name] = path.read_text(encoding="utf-8", errors="replace")
    return sources


def main(arguments: Sequence[str]) -> int:
    """Check a specification, by default the repository's; print the findings; return the exit code."""
    path = Path(arguments[0]) if arguments else ROOT / "SPEC.md"
    text = path.read_text(encoding="utf-8")
    sources = read_sources(ROOT)
    findings = check(text, sources, code_tables())
    for finding in findings:
        print(finding)
    if findings:
        return 1
    count = len(set(_DEFINITION.findall(text)))
    print(f"SPEC.md: {count} requirements, each with an id and a test; {len(sources)} files cite what exists")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
