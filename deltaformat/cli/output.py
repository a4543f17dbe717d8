"""What commands print: text, one JSON document, progress bars; nothing that could steer a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Bars", "Column", "Console", "escape", "human", "percent", "plain", "table"]

MAX_NAME = 100
"""Characters of a name that are printed; JSON has all of them."""
MAX_MESSAGE = 2_000
COUNTED_PHASES = frozenset({"check", "delete"})
"""Phases whose progress counts things; that of the others counts bytes."""


class Progress(Protocol):
    """What a progress callback is given."""

    @property
    def phase(self) -> str:
        """What is being done."""

    @property
    def done(self) -> int:
        """How much of it is done."""

    @property
    def total(self) -> int | None:
        """How much there is, where known."""


def plain(text: str) -> str:
    """Escape what is not printable: controls, bidirectional marks, surrogates. The text stays on its line."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def escape(name: str) -> str:
    """Print a name that came from anywhere: unambiguous, on one line, at most `MAX_NAME` characters of it."""
    shown = plain(name.replace("\\", "\\\\"))
    if not shown:
        return '""'
    if len(shown) > MAX_NAME:
        half = (MAX_NAME - 3) // 2
        return f"{shown[:half]}...{shown[-half:]}"
    return shown


def human(nbytes: float) -> str:
    """Print a number of bytes in decimal units, with three digits."""
    value = float(nbytes)
    if abs(value) < 1000:
        return f"{value:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB", "EB"):
        value /= 1000
        if abs(value) < 999.5 or unit == "EB":
            break
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def percent(part: int, whole: int) -> str:
    """Print a share with three significant digits; no share of nothing."""
    if not whole:
        return "-"
    share = 100 * part / whole
    if part and share < 0.001:
        return "<0.001 %"
    digits = 3 if share < 1 else 2 if share < 10 else 1
    return f"{share:.{digits}f} %"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading, and whether it is aligned to the left."""

    heading: str
    left: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the rows under the columns' headings."""
    widths = [
        max([len(column.heading), *(len(row[index]) for row in rows)]) for index, column in enumerate(columns)
    ]
    lines = []
    for row in ([column.heading for column in columns], *rows):
        cells = [
            cell.ljust(width) if column.left else cell.rjust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


class Console:
    """Where a command reports to.

    Attributes:
        json: Whether one JSON document is wanted in place of text.
    """

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self._bars: list[Bars] = []
        self._broken = False

    def say(self, lines: str | Iterable[str]) -> None:
        """Print lines of text; nothing where JSON is wanted. They must be escaped already."""
        if not self.json:
            for line in (lines,) if isinstance(lines, str) else lines:
                self._write(line + "\n")

    def document(self, value: Mapping[str, Any]) -> None:
        """Print the JSON document; nothing where text is wanted. It is ASCII throughout."""
        if self.json:
            self._write(json.dumps(value, indent=2, allow_nan=False) + "\n")

    def record(self, value: Mapping[str, Any]) -> None:
        """Print one of many JSON documents, on a line of its own, at once; nothing where text is wanted."""
        if self.json:
            self._write(json.dumps(value, allow_nan=False) + "\n")
        self.flush()

    def failure(self, message: str, code: str = "") -> None:
        """Print the one line of an error on stderr."""
        self.clear_bars()
        text = plain(" ".join(message.splitlines()) if "\n" in message else message)
        if len(text) > MAX_MESSAGE:
            text = text[: MAX_MESSAGE - 3] + "..."
        with contextlib.suppress(OSError, ValueError):  # nobody is left to tell
            print(f"error: {text}" + (f" [{code}]" if code else ""), file=sys.stderr, flush=True)

    def bars(self) -> Bars:
        """Progress bars for one long call, as a context manager and a progress callback."""
        bars = Bars(enabled=_is_terminal())
        self._bars.append(bars)
        return bars

    def clear_bars(self) -> None:
        """Take every bar off the terminal."""
        while self._bars:
            self._bars.pop().close()

    def flush(self) -> None:
        """Hand everything over, so that a failure to do so is met here and not when the interpreter ends."""
        with self._watched():
            sys.stdout.flush()

    def close(self) -> None:
        """Clear the bars; after a failed write, keep the interpreter's last flush from failing again."""
        self.clear_bars()
        if self._broken:
            with contextlib.suppress(OSError, ValueError, AttributeError, io.UnsupportedOperation):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)

    def _write(self, text: str) -> None:
        with self._watched():
            sys.stdout.write(text)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._broken = True
            raise


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


class Bars:
    """One progress bar per phase on stderr, gone when it is done; silent where stderr is not a terminal."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> Callable[[Progress], None]:
        return self.update

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, progress: Progress) -> None:
        """Show how far a phase is; from any thread."""
        if not self._enabled:
            return
        from tqdm import tqdm

        with self._lock:
            bar = self._bars.get(progress.phase)
            if bar is None:
                in_bytes = progress.phase not in COUNTED_PHASES
                bar = self._bars[progress.phase] = tqdm(
                    desc=plain(progress.phase),
                    total=progress.total,
                    unit="B" if in_bytes else "",
                    unit_scale=in_bytes,
                    leave=False,
                    file=sys.stderr,
                    dynamic_ncols=True,
                )
            if progress.total is not None and bar.total != progress.total:
                bar.total = progress.total
            bar.update(progress.done - bar.n)

    def close(self) -> None:
        """Take the bars off the terminal."""
        with self._lock:
            for bar in reversed(self._bars.values()):
                bar.close()
            self._bars.clear()
            self._enabled = False
