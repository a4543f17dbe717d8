"""The suite's runner as a module, and adapters to run it with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from deltaformat.cli.conformance import load_runner, suite_directory

CONFORMANCE: Path = suite_directory()
REFERENCE = [sys.executable, str(CONFORMANCE / "adapters" / "deltaformat_reference.py")]
suite: Any = load_runner()


def outcomes(
    command: list[str], filters: list[str], *, timeout: float = 30, **options: Any
) -> dict[str, Any]:
    """Run an adapter on some cases: what each came to, by id."""
    cases = suite.chosen(suite.load_cases(CONFORMANCE / "cases"), filters)
    assert cases
    adapter = suite.Adapter(command, timeout=timeout)
    try:
        report = suite.run(cases, adapter, version="x", **options)
    finally:
        adapter.close()
    return {outcome.case.id: outcome for outcome in report.outcomes}
