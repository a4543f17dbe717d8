"""The command `conformance`: the suite's own runner, found beside the package or in it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from deltaformat.cli.options import CommandError, Commands
from deltaformat.cli.output import Console

__all__ = ["load_runner", "register", "suite_directory"]

# In a checkout it is beside the package; a wheel has a copy inside, which setup.py puts there.
_PLACES = (
    Path(__file__).resolve().parent.parent.parent / "conformance",
    Path(__file__).resolve().parent.parent / "_conformance",
)


def suite_directory() -> Path:
    """Where the suite is.

    Raises:
        CommandError: this installation has none.
    """
    for place in _PLACES:
        if (place / "VERSION").is_file() and (place / "run.py").is_file():
            return place
    raise CommandError(
        "suite-missing",
        "this installation has no conformance suite; take the directory conformance/ from the sources and run"
        " `python conformance/run.py`",
    )


def register(commands: Commands) -> None:
    """Declare `conformance`."""
    parser = commands.add(
        "conformance",
        _conformance,
        help="run the conformance suite against this or another implementation",
        example="deltaformat conformance run --adapter 'node my-adapter.js' --junit report.xml",
    )
    parser.add_argument("action", choices=["run"], help="what to do")
    # The runner has its own grammar and its own words: it also runs alone, as conformance/run.py.
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of the runner; `deltaformat conformance run --help` shows them",
    )


def _conformance(options: argparse.Namespace, console: Console) -> int:
    directory = suite_directory()
    arguments = [*(["--json"] if options.json else []), *options.arguments]
    adapter = [sys.executable, str(directory / "adapters" / "deltaformat_reference.py")]
    code: int = load_runner().main(arguments, prog="deltaformat conformance run", default=adapter)
    return code


def load_runner() -> ModuleType:
    """The suite's runner, conformance/run.py, as a module.

    Raises:
        CommandError: this installation has no suite.
    """
    name = "deltaformat_conformance_run"
    spec = importlib.util.spec_from_file_location(name, suite_directory() / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
