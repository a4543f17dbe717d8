"""The command line's grammar: the commands of all groups in one parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import deltaformat as df
from deltaformat.cli import (
    bench,
    conformance,
    demo,
    demo_follow,
    difference,
    doctor,
    history,
    show,
    stores,
    sync,
    transfer,
)
from deltaformat.cli.options import Commands, Parser, UsageError

__all__ = ["parse"]

DESCRIPTION = "Versioned model weights: commit every training step, read any of them back bit for bit."
EPILOG = (
    "STORE is a directory or a URL. Exit codes: 0 done, 1 a finding or an error, 2 wrong usage. "
    "`deltaformat COMMAND --help` shows an example of each command."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace | None:
    """Parse a command line; None if all it asked for, help or the version, has been printed.

    Raises:
        UsageError: It is not a command line of this program.
    """
    if arguments[:1] == [demo_follow.COMMAND]:  # known to the demo only
        return demo_follow.parse(arguments[1:])
    parser = Parser(prog="deltaformat", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"deltaformat {df.__version__}")
    commands = Commands(parser)
    demo.register(commands)
    stores.register_init(commands)
    transfer.register_import(commands)
    history.register(commands)
    show.register(commands)
    difference.register(commands)
    transfer.register_export(commands)
    sync.register(commands)
    stores.register(commands)
    doctor.register(commands)
    bench.register(commands)
    conformance.register(commands)
    try:
        return parser.parse_args(arguments)
    except SystemExit as request:
        if request.code:
            raise UsageError("this command line cannot be read; see deltaformat --help") from None
        return None
