"""The checker of SPEC.md finds each kind of mistake in a small specification, and none in a sound one."""

import pytest

from check_spec import check, code_tables, main, parse, read_sources

SPEC = """\
# A format

## 1. Conventions

The key words MUST and MAY are to be read as in BCP 14. An id looks like **DF-AAA-01**; tests cite it.

- **DF-AAA-01** A thing MUST be
  36. A number at the beginning of a line (section 2.1) changes nothing.
- **DF-AAA-02** Another MAY be.

## 2. More

1. First. 2. Second.
2. Third **DF-BBB-01** MUST come last.

### 2.1 Table

<!-- things -->
| thing | count | why |
|---|---|---|
| `a` | 1 | because |
| `b` | 2 | |
<!-- end -->

| not | compared |
|---|---|
| see | DF-AAA-02 |

## 3. Remarks (non-normative)

It MUST be said, without an id, as in sections 1 and 2.1 (2.1).

### 3.1 Part of the remarks

This too MUST.

## 4. Rules again

- **DF-AAA-03** It MUST. *(Non-normative: it MUST, since (so it
  is) it MUST.)* Text.

*(Non-normative)* A paragraph that MUST.

```
code MUST be left alone (9.9)
```
"""
SOURCES = {
    "tests/test_a.py": '"""DF-AAA-01, DF-AAA-02."""\n# DF-BBB-01: SPEC 2.1',
    "tests/test_b.py": "# (DF-AAA-03)",
    "deltaformat/a.py": "# DF-AAA-01 (SPEC 1)",
}
TABLES = {"things": [("a", "1"), ("b", "2")]}


def findings(*changes, sources=None, tables=TABLES, waivers=None):
    text = SPEC
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return check(text, {**SOURCES, **(sources or {})}, tables, waivers or {})


def only(found, *parts):
    """The single finding, which is one line and has all these parts."""
    assert len(found) == 1, found
    assert "\n" not in found[0]
    for part in parts:
        assert part in found[0]


def test_a_sound_specification():
    assert findings() == []


def line_of(text):
    """Where `text` is in the sound specification."""
    return f"SPEC.md:{SPEC[: SPEC.index(text)].count(chr(10)) + 1}"


@pytest.mark.parametrize("keyword", ["MUST", "MUST NOT", "SHOULD", "MAY", "SHALL", "REQUIRED"])
def test_a_keyword_without_an_id(keyword):
    first = keyword.split()[0]
    only(findings(("1. First.", f"1. First {keyword}.")), line_of("1. First"), first, "1. First")
    only(findings(("| `b` | 2 | |", f"| `b` | 2 | {keyword} |")), line_of("| `b`"), first)
    only(findings(("1. First.", f"Text that\ngoes on {keyword}\nto its end.\n")), line_of("1. First"), first)


def test_a_keyword_before_the_id():
    found = findings(("2. Third **DF-BBB-01**", "2. Third MUST NOT. **DF-BBB-01**"))
    only(found, line_of("2. Third"), "before any id")


def test_a_word_that_holds_a_keyword_is_none():
    assert findings(("1. First.", "1. First MAYBE `MUSTER` must may.")) == []


def test_an_id_in_a_remark():
    change = ("It MUST be said", "**DF-AAA-04** It MUST be said")
    found = findings(change, sources={"tests/c.py": "DF-AAA-04"})
    only(found, line_of("It MUST be said"), "DF-AAA-04", "non-normative")


def test_a_remark_ends_with_its_section():
    found = findings(("## 4. Rules again\n", "## 4. Rules again\nIt MUST.\n"))
    only(found, "before any id: It MUST.")


def test_an_id_twice():
    twice = ("- **DF-AAA-02**", "- **DF-AAA-01**"), ("**DF-AAA-03**", "**DF-AAA-02**")
    found = findings(*twice, sources={"tests/test_b.py": ""})
    only(found, line_of("- **DF-AAA-02**"), "DF-AAA-01", "line 7")


@pytest.mark.parametrize(
    ("id_", "problem"), [("DF-BBB-02", "DF-BBB-01 is missing"), ("DF-BBB-001", "two digits")]
)
def test_numbers(id_, problem):
    sources = {"tests/test_a.py": f"DF-AAA-01 DF-AAA-02 {id_}"}
    only(findings(("**DF-BBB-01**", f"**{id_}**"), sources=sources), problem)


@pytest.mark.parametrize("path", ["tests/test_b.py", "tests/deep/test_b.py"])
def test_an_id_that_no_test_cites(path):
    without = {"tests/test_b.py": ""}
    only(findings(sources=without), "DF-AAA-03 is cited by no test")
    for other in ("conformance/cases/a.json", "deltaformat/b.py", "tests/notes.md"):
        only(findings(sources={**without, other: "DF-AAA-03"}), "DF-AAA-03 is cited by no test")
    assert findings(sources={**without, path: "DF-AAA-03"}) == []


def test_waivers():
    assert findings(sources={"tests/test_b.py": ""}, waivers={"DF-AAA-03": "cannot be tested"}) == []
    only(findings(waivers={"DF-AAA-03": "cannot be tested"}), "DF-AAA-03 is not needed")
    only(findings(waivers={"DF-AAA-04": "?"}), "DF-AAA-04 is waived")


@pytest.mark.parametrize(
    "path", ["deltaformat/b.py", "tests/test_c.py", "tools/d.py", "conformance/case.json"]
)
def test_an_id_that_does_not_exist(path):
    only(findings(sources={path: "x\nDF-AAA-04"}), f"{path}:2", "DF-AAA-04")


def test_an_id_that_the_specification_itself_only_cites():
    only(findings(("see | DF-AAA-02", "see | DF-AAA-07")), line_of("| see"), "DF-AAA-07")


@pytest.mark.parametrize(
    ("new", "section"),
    [
        ("section 5", "5"),
        ("Section 2.2", "2.2"),
        ("(2.2)", "2.2"),
        ("sections 2 to 7", "7"),
        ("sections 2, 8 and 4", "8"),
        ("section\n  9, too", "9"),
    ],
)
def test_a_section_that_does_not_exist(new, section):
    only(findings(("1. First.", f"1. First, {new}.")), line_of("1. First"), f"no section {section}")


def test_a_section_twice():
    only(findings(("## 4. Rules again", "## 2. Rules again")), line_of("## 4."), "section 2", "line 11")


def test_a_section_that_code_cites():
    only(findings(sources={"deltaformat/b.py": "\n\n# as SPEC 7.3 says"}), "deltaformat/b.py:3", "7.3")


def test_tables():
    only(
        findings(("| `b` | 2 |", "| `b` | 3 |"), tables={"things": [("a", "1")]}), "b | 3", "not in the code"
    )
    only(findings(tables={"things": [*TABLES["things"], ("c", "3")]}), "c | 3", "not here")
    only(findings(("| `b` | 2 | |", "| `b` | 2 | |\n| `a` | 1 | |")), "a | 1", "twice")
    only(findings(tables={"things": TABLES["things"][::-1]}), "another order")
    only(findings(tables={**TABLES, "others": [("a",)]}), "<!-- others -->")
    assert len(findings(("| `b` | 2 |", "| `b` | 3 |"))) == 2


def test_markers():
    found = findings(("<!-- end -->", ""))
    assert len(found) == 2
    assert "things has no end" in found[0]
    assert "no table" in found[1]
    only(findings(("| not | compared |", "<!-- end -->\n| not | compared |")), "without a table")
    found = findings(("<!-- end -->", "<!-- others -->\n<!-- end -->"))
    only(found, "others begins before things ends")


def test_appendices_are_sections_by_letter():
    spec = parse("## Appendix A. A worked store (non-normative)\n\n## Appendix B. Changes\n\nIt MUST.\n")
    assert spec.sections == ((1, "A"), (3, "B"))
    assert [unit.normative for unit in spec.units] == [True]


def test_the_tables_of_the_code():
    """DF-ERR-01, DF-DTY-01, DF-ENC-03: what the checker compares with SPEC.md."""
    tables = code_tables()
    assert ("MALFORMED", "json-invalid") in tables["errors"]
    assert ("BF16", "16", "2", "float") in tables["dtypes"]
    assert tables["encodings"][2] == ("2", "planes-delta", "needed")


def test_sources(tmp_path):
    kept = ["tests/a.py", "tests/deep/b.py", "tools/c.sh"]
    for path in (*kept, "tests/test_check_spec.py", "conformance/x.bin", "docs/d.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"\xffDF")
    assert list(read_sources(tmp_path)) == kept


def test_exit_codes(tmp_path, capsys, monkeypatch):
    path = tmp_path / "SPEC.md"
    path.write_text(SPEC)
    monkeypatch.setattr("check_spec.read_sources", lambda root: SOURCES)
    monkeypatch.setattr("check_spec.code_tables", lambda: TABLES)
    assert main([str(path)]) == 0
    assert (
        capsys.readouterr().out
        == "SPEC.md: 4 requirements, each with an id and a test; 3 files cite what exists\n"
    )
    path.write_text(SPEC.replace("1. First.", "1. First MUST."))
    assert main([str(path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
