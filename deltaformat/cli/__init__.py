"""The command line (`deltaformat`): parse, run one command, report.

Exit codes: 0 done, 1 a finding or an error, 2 wrong usage; 130 interrupted, 141 nobody reads stdout. An error
is one line on stderr, never a traceback, and with `--json` also one JSON document on stdout.
`DELTAFORMAT_DEBUG=1` in the environment shows the traceback of an error, for a report.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from deltaformat.cli.options import CommandError, UsageError
from deltaformat.cli.output import Console, plain
from deltaformat.cli.parser import parse
from deltaformat.errors import DeltaFormatError

__all__ = ["main"]

FAILED = 1
USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

# The library's messages say what to do in Python; here it is done otherwise.
_ADVICE = (
    ("open it, or pass exist_ok=True", "name another place"),
    ("make one with `create`", "make one with `deltaformat init`"),
    ("pass allow_set_change=True", "pass --allow-set-change"),
    ("open a writer with resume_from", "pass --resume-from"),
    ("open the writer with single_writer=True", "pass --single-writer"),
    ("see tags()", "`deltaformat log` shows tags"),
    ("allow its prefix", "pass --allow-external with its prefix"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console(json="--json" in arguments)
    try:
        with contextlib.suppress(ValueError, io.UnsupportedOperation):
            # A terminal that cannot show a character gets its escape, not an error.
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(errors="backslashreplace")
        try:
            options = parse(arguments)
            code = int(options.run(options, console)) if options is not None else 0
            console.flush()
            return code
        except BrokenPipeError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get("DELTAFORMAT_DEBUG"):
                traceback.print_exc()
            return _report(error, console)
    except BrokenPipeError:  # the reader of our output has left
        return PIPE_CLOSED
    except KeyboardInterrupt:  # for the second time: while the first was being reported
        return INTERRUPTED
    except OSError:  # stdout is full or gone: there is no place to say more
        return FAILED
    finally:
        console.close()


def _report(error: BaseException, console: Console) -> int:
    """Say what went wrong, on one line and, where asked for, in JSON."""
    kind, code, message, where, exit_code = _describe(error)
    console.failure(f"{where}: {message}" if where else message, code)
    if console.json:
        console.document({"error": {"class": kind, "code": code, "message": message, "where": where}})
        console.flush()
    return exit_code


def _describe(error: BaseException) -> tuple[str, str, str, str, int]:
    """Class, code, message, place and exit code. Classes beyond SPEC 17: USAGE and SYSTEM."""
    if isinstance(error, UsageError):
        return "USAGE", "usage", str(error), "", USAGE
    if isinstance(error, DeltaFormatError):
        message = error.message
        for python, shell in _ADVICE:
            message = message.replace(python, shell)
        return error.code.error_class, error.code.value, message, error.where, FAILED
    if isinstance(error, CommandError):
        return "SYSTEM", error.code, str(error), "", FAILED
    if isinstance(error, KeyboardInterrupt):
        return "SYSTEM", "interrupted", "interrupted", "", INTERRUPTED
    if isinstance(error, MemoryError):
        return (
            "SYSTEM",
            "out-of-memory",
            "out of memory",
            "",
            FAILED,
        )
    if isinstance(error, OSError):
        place = error.filename if isinstance(error.filename, str) else ""
        return "SYSTEM", "os-error", error.strerror or str(error) or type(error).__name__, place, FAILED
    detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = f"a fault of this program, please report it ({plain(detail)}); DELTAFORMAT_DEBUG=1 shows where"
    return "SYSTEM", "internal", message, "", FAILED
