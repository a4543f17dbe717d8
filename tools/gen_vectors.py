#!/usr/bin/env python3
"""Makes the conformance cases, or compares the committed ones with what it would make.

    python tools/gen_vectors.py            compare; exit code 1 and a line per difference if there is any
    python tools/gen_vectors.py --write    replace conformance/cases

Everything is built from SPEC.md byte by byte by the modules in tools/vectors; expected values come from the
bytes that cases are made of. The committed files are the authority.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

from vectors import (
    cases_arrow,
    cases_by_seq,
    cases_content,
    cases_external,
    cases_follow,
    cases_json,
    cases_limits,
    cases_log,
    cases_manifest,
    cases_names,
    cases_paths,
    cases_payloads,
    cases_reading,
    cases_records,
    cases_sparse,
    cases_urls,
    cases_void,
    cases_write,
    frames,
)
from vectors.suite import Suite

__all__ = ["build", "differences"]

CASES = Path(__file__).resolve().parent.parent / "conformance" / "cases"
AREAS = (
    cases_payloads,
    cases_sparse,
    cases_content,
    cases_names,
    cases_manifest,
    cases_arrow,
    cases_paths,
    cases_log,
    cases_void,
    cases_by_seq,
    cases_records,
    cases_json,
    cases_limits,
    cases_reading,
    cases_follow,
    cases_external,
    cases_urls,
    cases_write,
)


def build() -> Suite:
    """All cases."""
    suite = Suite()
    for area in AREAS:
        area.add(suite)
    return suite


def differences(suite: Suite, directory: Path = CASES) -> list[str]:
    """What differs between a suite and a directory: a line per file. Gzipped files are compared unpacked."""
    made = suite.files()
    found = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    lines = [f"missing: {name}" for name in sorted(made.keys() - found.keys())]
    lines += [f"not made any more: {name}" for name in sorted(found.keys() - made.keys())]
    for name in sorted(made.keys() & found.keys()):
        pair = made[name], found[name]
        if name.endswith(".gz"):
            pair = gzip.decompress(pair[0]), gzip.decompress(pair[1])
        if pair[0] != pair[1]:
            lines.append(f"differs: {name}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description="Makes the conformance cases.")
    parser.add_argument("--write", action="store_true", help="replace conformance/cases")
    options = parser.parse_args(argv)
    suite = build()
    if options.write:
        suite.write(CASES)
        frames.save()
    lines = differences(suite)
    size = sum(map(len, suite.files().values()))
    print("\n".join(lines) or f"{len(suite.cases)} cases in {size} bytes, as committed")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
