"""The command that keeps a local checkpoint directory at a version: sync."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict

import deltaformat as df
from deltaformat.cli.options import (
    Commands,
    UsageError,
    add_allow_external,
    add_branch,
    byte_size,
    natural,
)
from deltaformat.cli.output import Console, human, plain
from deltaformat.errors import ErrorCode, MissingError, StoreError
from deltaformat.export import MAX_SHARD_BYTES
from deltaformat.polling import watch
from deltaformat.stager import Progress

__all__ = ["register"]


def register(commands: Commands) -> None:
    """Declare `sync`."""
    parser = commands.add(
        "sync",
        _sync,
        help="keep a local Hugging Face directory at a version, writing only what changed",
        example="deltaformat sync run/ /models/current --watch",
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="what a server loads: a link to one of two directories, switched when the other is complete",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="follow the branch, until interrupted")
    how.add_argument("--once", action="store_true", help="one version, then end (default)")
    parser.add_argument("--step", type=natural, metavar="N", help="the step (default: the branch's newest)")
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="keep one copy, DIR itself; while it is written it has the file .deltaformat.dirty",
    )
    parser.add_argument(
        "--poll",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="with --watch: how often to look for a new version (default: 1)",
    )
    parser.add_argument(
        "--hold",
        type=_seconds_or_none,
        default=60.0,
        metavar="SECONDS",
        help="with --watch: how long a server may take to load DIR; the directory that the link has left is"
        " not written for so long, and versions in between are skipped (default: 60)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=byte_size,
        default=MAX_SHARD_BYTES,
        metavar="SIZE",
        help="begin a new file rather than go beyond (default: 5GB)",
    )
    add_branch(parser)
    add_allow_external(parser)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds, such as 1")
    return value


def _seconds_or_none(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _sync(options: argparse.Namespace, console: Console) -> int:
    if options.watch and options.step is not None:
        raise UsageError("--step goes with --once, not with --watch; see deltaformat sync --help")
    store = df.open(options.store, allow_external=tuple(options.allow_external))
    bars = _Bars(console)
    with store.sync(
        options.directory,
        branch=options.branch,
        in_place=options.in_place,
        max_shard_bytes=options.max_shard_size,
        hold=options.hold if options.watch else 0.0,
        progress=bars.update,
    ) as kept:
        if options.watch:
            _watch(kept, options, console, bars)
        else:
            report = bars.around(lambda: kept.update(options.step))
            if report is None:
                version = kept.version
                if version is None:
                    raise MissingError(
                        ErrorCode.VERSION_MISSING,
                        "nothing has been committed yet",
                        where=f"branch {options.branch}",
                    )
                console.say(f"{plain(str(options.directory))} is at {version} already")
                console.record({"store": store.url, "updated": False, "version": version})
            else:
                _tell(report, store, options, console)
    return 0


def _watch(kept: df.CheckpointSync, options: argparse.Namespace, console: Console, bars: _Bars) -> None:
    """Take every newer version as it comes; what fails for a while is told, and tried again."""
    store = df.open(options.store, allow_external=tuple(options.allow_external))

    def failed(error: StoreError, wait: float) -> None:
        console.failure(f"{error.where}: {error.message}; trying again in {wait:.0f} s", error.code.value)

    poll = max(options.poll, kept.least_poll)
    for report in watch(lambda: bars.around(kept.update), poll=poll, on_error=failed):
        _tell(report, store, options, console)


def _tell(report: df.SyncReport, store: df.Store, options: argparse.Namespace, console: Console) -> None:
    how = "patched" if report.patched else "written"
    console.say(
        f"step {report.step} of {options.branch} at {plain(report.path)}: {how}, "
        f"{human(report.written_bytes)} of {human(report.nbytes)} in {report.seconds:.2f} s, "
        f"{human(report.fetched_bytes)} fetched"
    )
    console.record({"store": store.url, "updated": True} | asdict(report))


class _Bars:
    """A progress bar for each update, gone when it is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._show: Callable[[Progress], None] | None = None

    def update(self, done: int, total: int) -> None:
        """Show how far an update is."""
        if self._show is not None:
            self._show(Progress("sync", done, total))

    def around(self, update: Callable[[], df.SyncReport | None]) -> df.SyncReport | None:
        """Run an update under a bar."""
        with self._console.bars() as self._show:
            return update()
