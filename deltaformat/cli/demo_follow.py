"""The demo's second process: reads every version as it appears, and says which root its bytes have."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import deltaformat as df
from deltaformat.blocks import name_bytes
from deltaformat.cli.options import CommandError, Parser, natural, positive
from deltaformat.cli.output import Console
from deltaformat.digests import digest_blocks, get_digest, tensor_leaf, version_root
from deltaformat.tensors import to_host

__all__ = ["COMMAND", "Follower", "Seen", "parse"]

COMMAND = "_follow"
POLL_S = 0.01
IDLE_S = 600
"""How long the follower waits for the next step before it gives up; its parent's end it notices at once."""
_END_S = 5.0
# The package is found where this process found it, and nothing else in the current directory is.
_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from deltaformat.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the follower read of a step.

    Attributes:
        root: Computed from the bytes that it read.
        verified_at: When it was done, seconds since the epoch.
        read_seconds: How long it read and verified.
    """

    root: str
    verified_at: float
    read_seconds: float


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of the second process.

    Raises:
        UsageError: It is not one.
    """
    parser = Parser(prog=f"deltaformat {COMMAND}", add_help=False, allow_abbrev=False)
    parser.set_defaults(run=_follow)
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--branch", default="main")
    parser.add_argument("--last", type=natural, required=True, help="the step after which it ends")
    parser.add_argument("--idle", type=positive, default=IDLE_S, help="seconds it waits for a step")
    parser.add_argument("--tied", action="store_true", help="end when stdin is closed")
    return parser.parse_args(arguments)


def _follow(options: argparse.Namespace, console: Console) -> int:
    store = df.open(options.store)
    left = threading.Event()
    if options.tied:
        threading.Thread(target=_wait_for_end, args=(left,), daemon=True).start()
    previous: df.Version | None = None
    state: dict[str, Any] = {}
    following = 0
    deadline = time.monotonic() + options.idle
    while following <= options.last:
        head = store.branches().get(options.branch)
        if head is None or head.step is None or head.step < following:
            if left.wait(POLL_S):
                raise CommandError("left-alone", "the process that was to be followed has ended")
            if time.monotonic() > deadline:
                raise CommandError("timeout", f"step {following} did not come within {options.idle} s")
            continue
        started = time.perf_counter()
        version = store.version(following, branch=options.branch)
        state = version.follow(previous, state) if previous is not None else version.state_dict()
        root = root_of(state, store)
        seen = {
            "step": following,
            "root": root,
            "time": time.time(),
            "seconds": time.perf_counter() - started,
        }
        print(json.dumps(seen), flush=True)
        if previous is not None:
            previous.close()
        previous, following = version, following + 1
        deadline = time.monotonic() + options.idle
    if previous is not None:
        previous.close()
    return 0


def root_of(state: dict[str, Any], store: df.Store) -> str:
    """Compute the root of tensors from their bytes, without a look at any manifest."""
    algorithm = get_digest(store.digest)
    leaves = []
    for name, tensor in state.items():
        host = to_host(name, tensor)
        digests = digest_blocks(host.data, store.block_bytes, algorithm)
        leaves.append((name_bytes(name), tensor_leaf(name, host.dtype, host.shape, digests)))
    return version_root(store.digest, store.block_bytes, leaves)


def _wait_for_end(left: threading.Event) -> None:
    """Set `left` when stdin is closed: when the parent has ended, whichever way."""
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    left.set()


class Follower:
    """Runs the follower and collects what it says; as a context manager it ends the process in any case."""

    def __init__(self, url: str, *, branch: str, last: int) -> None:
        self._last = last
        self._changed = threading.Condition()
        self._seen: dict[int, Seen] = {}
        self._done = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended
        root = str(Path(df.__file__).parent.parent)
        arguments = [COMMAND, url, "--branch", branch, "--last", str(last), "--tied"]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, root, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
        )
        self._reader = threading.Thread(target=self._read, name="demo-follower", daemon=True)
        self._reader.start()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def seen(self) -> dict[int, Seen]:
        """What the follower has read so far, by step."""
        with self._changed:
            return dict(self._seen)

    def wait(self, seconds: float) -> None:
        """Wait until the follower has read the last step.

        Raises:
            CommandError: It ended before, or the time is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._last in self._seen, seconds)
            complete = len(self._seen) == self._last + 1
            ended = self._done
        if not complete:
            reason = f"ended early{self._complaint()}" if ended else f"was not done after {seconds:g} s"
            raise CommandError("follower-failed", f"the following process {reason}")

    def finish(self, seconds: float) -> None:
        """Wait until the process has ended by itself.

        Raises:
            CommandError: It failed, or the time is over.
        """
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise CommandError(
                "follower-failed", f"the following process did not end within {seconds:g} s"
            ) from None
        if code:
            raise CommandError("follower-failed", f"the following process failed{self._complaint()}")

    def close(self) -> None:
        """End the process, if it has not ended, and let go of it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(_END_S)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                said = json.loads(line)
                with self._changed:
                    self._seen[int(said["step"])] = Seen(
                        str(said["root"]), float(said["time"]), float(said["seconds"])
                    )
                    self._changed.notify_all()
        except (ValueError, KeyError, TypeError, OSError):
            pass  # what it said cannot be used, so a step is missing and `wait` tells
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _complaint(self) -> str:
        """The last line it wrote on stderr."""
        self._errors.seek(0)
        lines = self._errors.read(65_536).decode("utf-8", "replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "")
        return f": {said.removeprefix('error: ')}" if said else ""
