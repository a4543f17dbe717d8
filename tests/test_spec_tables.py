"""The tables of members in SPEC.md are those of fields.py."""

import re
from pathlib import Path

import pytest

from deltaformat.fields import KINDS, TABLES

SPEC = (Path(__file__).parent.parent / "SPEC.md").read_text(encoding="utf-8")


def table(name: str) -> dict[str, str]:
    """Members and types between `<!-- fields:NAME -->` and `<!-- end -->`."""
    blocks = re.findall(rf"<!-- fields:{name} -->\n(.*?)\n<!-- end -->", SPEC, re.DOTALL)
    assert len(blocks) == 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in blocks[0].splitlines()]
    assert rows[0][1] == "type"
    assert set(rows[1]) == {"---"}
    return {row[0].strip("`"): row[1] for row in rows[2:]}


@pytest.mark.parametrize("name", TABLES)
def test_members_and_types(name: str) -> None:
    assert list(TABLES[name].items()) == list(table(name).items())


def test_every_table_is_compared() -> None:
    assert set(re.findall(r"<!-- fields:(.*?) -->", SPEC)) == set(TABLES)


def test_the_kinds_are_all_there() -> None:
    """SPEC 12.1 names the kinds in the row `kind`, SPEC 12.2 has one row for each."""
    row = re.search(r"^\| `kind` \| string \| (.*) \|$", SPEC, re.MULTILINE)
    assert row is not None
    assert re.findall(r"`(\w+)`", row[1]) == list(KINDS)
    effects = SPEC[SPEC.index("| kind | preconditions | effect |") :]
    assert re.findall(r"^\| `(\w+)` \|", effects, re.MULTILINE)[: len(KINDS)] == list(KINDS)
