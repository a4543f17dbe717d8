"""What command lines are made of: types of arguments, shared options, and how a command is declared."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import NoReturn

from deltaformat.blocks import check_block_bytes
from deltaformat.cli.output import Console, plain
from deltaformat.errors import MalformedError

__all__ = [
    "CommandError",
    "Commands",
    "Parser",
    "Run",
    "UsageError",
    "add_allow_external",
    "add_branch",
    "add_step",
    "block_size",
    "byte_size",
    "hours",
    "natural",
    "positive",
]

Run = Callable[[argparse.Namespace, Console], int]

MAX_INTEGER = 2**53 - 1
_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("", 1000), ("B", 1000), ("I", 1024), ("IB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([A-Za-z]{0,3})", re.ASCII)


class UsageError(Exception):
    """A command line that cannot be meant; the message says what can."""


class CommandError(Exception):
    """A command failed for a reason outside SPEC 17.

    Args:
        code: What happened, for programs.
        message: What happened, for people: one sentence.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions: one line, printed by one place."""

    def error(self, message: str) -> NoReturn:
        """Raise the error that argparse would print with the whole usage."""
        raise UsageError(f"{plain(message)}; see {self.prog} --help")


class Commands:
    """Declares commands.

    Args:
        parser: The program's parser.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._subparsers = parser.add_subparsers(
            metavar="COMMAND", required=True, parser_class=Parser, title="commands"
        )

    def add(
        self, name: str, run: Run, *, help: str, example: str, json_file: bool = False
    ) -> argparse.ArgumentParser:
        """Declare a command; its arguments are added to what is returned.

        Args:
            name: As it is typed.
            run: What it does.
            help: One line.
            example: One line of a shell, shown with its help.
            json_file: Whether `--json` may name a file for the document, beside the text on stdout.
        """
        parser: argparse.ArgumentParser = self._subparsers.add_parser(
            name,
            description=f"{help[:1].upper()}{help[1:]}.",
            epilog=f"example: {example}",
            help=help,
            allow_abbrev=False,
        )
        text = "print one JSON document, errors included"
        if json_file:
            text += "; with FILE, write it there and print tables"
            parser.add_argument("--json", nargs="?", const=True, default=False, metavar="FILE", help=text)
        else:
            parser.add_argument("--json", action="store_true", help=text)
        parser.set_defaults(run=run, command=name)
        return parser


def add_branch(parser: argparse.ArgumentParser, *, default: str | None = "main") -> None:
    """Add `--branch`."""
    shown = f"default: {default}" if default else "default: all"
    parser.add_argument("--branch", default=default, metavar="B", help=f"the branch ({shown})")


def add_step(parser: argparse.ArgumentParser, *, help: str = "the training step") -> None:
    """Add `--step`, which must be given."""
    parser.add_argument("--step", type=natural, required=True, metavar="N", help=help)


def add_allow_external(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-external`."""
    parser.add_argument(
        "--allow-external",
        action="append",
        default=[],
        metavar="PREFIX",
        help="also read bytes that the store refers to below this URL; may be repeated",
    )


def natural(text: str) -> int:
    """An integer from 0 to 2^53 - 1."""
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_INTEGER):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer from 0 to 2^53 - 1")
    return int(text)


def positive(text: str) -> int:
    """An integer from 1 to 2^53 - 1."""
    if not natural(text):
        raise argparse.ArgumentTypeError("it must be at least 1")
    return natural(text)


def byte_size(text: str) -> int:
    """A number of bytes of at least 1, with or without a unit: 5GB, 64MiB, 1048576."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit <= MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size such as 5GB, 64MiB or 1048576")
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def block_size(text: str) -> int:
    """A block size that a store can have."""
    size = byte_size(text)
    try:
        check_block_bytes(size)
    except MalformedError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    return size


def hours(text: str) -> float:
    """A number of hours, not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 24 * 365 * 100:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of hours, such as 24")
    return value
