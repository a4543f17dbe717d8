#!/usr/bin/env python3
"""Runs the conformance cases against an implementation. Needs Python 3.11 or newer, and nothing else.

    python run.py --adapter 'node my-adapter.js'

PROTOCOL.md says what an adapter is. Exit codes: 0 all passed, 1 something failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Adapter", "Case", "Outcome", "Report", "load_cases", "main", "run"]

HERE = Path(__file__).resolve().parent
PROTOCOL = 1
PROFILES = ("reader-core", "reader-full", "writer")
CLASSES = frozenset(
    [
        "MALFORMED",
        "UNSUPPORTED",
        "CORRUPT",
        "MISSING",
        "INCONSISTENT",
        "LIMIT",
        "UNSAFE",
        "CONFLICT",
        "STORE",
        "NOT-REFUSED",
    ]
)
MAX_REPLY = 64 << 20
START_SECONDS = 60.0
"""For `hello`, at least: an interpreter may have much to load."""
MAX_LOST = 5
"""Time-outs after which the rest is not tried: an adapter that hangs would take hours."""

Members = Mapping[str, Any]


# -- the adapter ---------------------------------------------------------------------------------------------


class AdapterError(Exception):
    """An adapter that did not answer as it should: `kind` is crash, timeout or malformed-reply."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Adapter:
    """An adapter's process; it starts when it is first asked, and again after a failure."""

    def __init__(self, command: Sequence[str], *, timeout: float = 30) -> None:
        self.command, self.timeout = list(command), timeout
        self.hello: Members = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._number = 0

    def ask(self, op: str, **members: Any) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            AdapterError: there is no reply, or it is not one of PROTOCOL.md's.
        """
        self.start()
        return self._exchange({"op": op, **members}, self.timeout)

    def start(self) -> None:
        """Start the process and greet it, unless it runs.

        Raises:
            AdapterError: it does not say `hello` as PROTOCOL.md asks.
        """
        if self._process is None:
            self._start()

    def close(self) -> None:
        """End the process, by kindness first."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            self._kill()
        self._stderr.close()

    def _start(self) -> None:
        self._stderr.seek(0)
        self._stderr.truncate()
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise AdapterError("crash", f"the adapter cannot be started: {error}") from error
        self._lines = queue.Queue()
        self._listener = threading.Thread(target=self._listen, args=(self._process, self._lines), daemon=True)
        self._listener.start()
        hello = self._exchange({"op": "hello", "protocol": PROTOCOL}, max(self.timeout, START_SECONDS))
        if hello["result"] != "ok" or not isinstance(hello.get("implementation"), str):
            raise self._lost("malformed-reply", f"the reply to hello is {_short(hello)}")
        for name in ("profiles", "features"):
            if not isinstance(hello.get(name), list):
                raise self._lost("malformed-reply", f"the reply to hello has no list `{name}`")
        self.hello = hello

    @staticmethod
    def _listen(process: subprocess.Popen[bytes], lines: queue.Queue[bytes | None]) -> None:
        assert process.stdout is not None
        while line := process.stdout.readline(MAX_REPLY):
            lines.put(line)
        lines.put(None)

    @staticmethod
    def _tell(process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the reply will be missing
            process.stdin.write(data)
            process.stdin.flush()

    def _exchange(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, **request}
        process = self._process
        assert process is not None
        # It may hang before it has read all of a request that no pipe holds: the time is for both.
        data = json.dumps(request).encode() + b"\n"
        self._teller = threading.Thread(target=self._tell, args=(process, data), daemon=True)
        deadline = time.monotonic() + timeout
        self._teller.start()
        try:
            line = self._lines.get(timeout=timeout)
            if line is not None:
                self._teller.join(max(0.0, deadline - time.monotonic()))
                if self._teller.is_alive():
                    raise queue.Empty
        except queue.Empty:
            raise self._lost("timeout", f"no reply within {timeout:g} seconds") from None
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            raise self._lost("crash", f"the adapter ended ({_status(process.returncode)}) without a reply")
        try:
            reply = json.loads(line)
            self._check(reply)
        except (ValueError, TypeError) as error:
            raise self._lost(
                "malformed-reply", f"{error}: {line[:200].decode(errors='replace').strip()}"
            ) from None
        return dict(reply)

    def _check(self, reply: object) -> None:
        if not isinstance(reply, dict):
            raise TypeError("the reply is no object")
        if reply.get("id") != self._number:
            raise ValueError(f"the reply's id is {reply.get('id')!r} instead of {self._number}")
        result = reply.get("result")
        if result not in ("ok", "error", "skip"):
            raise ValueError(f"`result` is {result!r}")
        if result == "error" and reply.get("class") not in CLASSES:
            raise ValueError(f"`class` is {reply.get('class')!r}, which SPEC 17 does not have")
        if result == "error" and not isinstance(reply.get("code"), str | None):
            raise ValueError("`code` is neither a string nor null")
        if result == "skip" and not isinstance(reply.get("reason"), str):
            raise ValueError("`skip` without a `reason`")

    def _lost(self, kind: str, message: str) -> AdapterError:
        self._kill()
        self._stderr.seek(0)
        tail = self._stderr.read()[-1500:].decode(errors="replace").strip()
        return AdapterError(kind, f"{message}; stderr: {tail}" if tail else message)

    def _kill(self) -> None:
        """End the process, and those that it started, if they still run; close what led to it."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
        self._teller.join(2)
        if (
            not self._teller.is_alive()
        ):  # else a process outside its group holds the pipe, and closing would wait
            with contextlib.suppress(OSError):
                process.stdin.close()
        self._listener.join(2)
        process.stdout.close()


def _status(code: int | None) -> str:
    if code is None:
        return "its output is closed"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


# -- cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A case as it lies in its directory."""

    directory: Path
    members: Members
    expect: Members
    store: Path

    @property
    def id(self) -> str:
        """Its id: the path below `cases/`."""
        return str(self.members["id"])

    @contextlib.contextmanager
    def laid_out(self) -> Iterator[str]:
        """A fresh copy of its store, as an absolute path; and its files outside, while they are needed."""
        with tempfile.TemporaryDirectory(prefix="deltaformat-case-") as place:
            target = Path(place).resolve() / "store"
            if self.store.is_dir():
                shutil.copytree(self.store, target)
                for key in self._packed():
                    packed = target / f"{key}.gz"
                    (target / key).write_bytes(gzip.decompress(packed.read_bytes()))
                    packed.unlink()
            with contextlib.ExitStack() as stack:
                if "file-url" in self.members["features"]:
                    stack.enter_context(_alone())
                for path, source in self.members.get("place", {}).items():
                    stack.enter_context(_placed(Path(path), self.directory / source))
                yield str(target)

    def _packed(self) -> Sequence[str]:
        owner = json.loads((self.store.parent / "case.json").read_bytes())
        return list(owner.get("gzip", []))


class PlaceError(Exception):
    """A file outside of stores cannot be put where a case needs it."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Places outside of stores are the same in every run here: of a user's, one at a time uses them."""
    if fcntl is None:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"deltaformat-conformance-{os.getuid()}.lock"
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PlaceError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it, whatever becomes of this process
        except OSError as error:
            raise PlaceError(f"{path} cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _placed(path: Path, source: Path) -> Iterator[None]:
    """A file outside the store, for the time of a case; directories below `/tmp` are the suite's alone."""
    directories = [parent for parent in reversed(path.parents) if len(parent.parts) > 2]
    try:
        for directory in directories:
            _own_directory(directory)
        path.write_bytes(source.read_bytes())
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            for directory in reversed(directories):
                directory.rmdir()


def _own_directory(path: Path) -> None:
    """Make it where it is not; refuse to use one that others could change."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise PlaceError(f"{path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
        raise PlaceError(f"{path} is somebody else's, or no directory")


@contextlib.contextmanager
def found_cases(directory: Path) -> Iterator[Path]:
    """A directory of cases; installed packages have them in an archive of its name."""
    archive = directory.with_name(f"{directory.name}.tar.xz")
    if directory.exists() or not archive.exists():
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="deltaformat-cases-") as place:
        with tarfile.open(archive) as packed:
            packed.extractall(place, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        yield Path(place).resolve() / directory.name


def load_cases(directory: Path) -> list[Case]:
    """All cases below a directory, by id."""
    cases = []
    for path in sorted(directory.rglob("case.json")):
        members = json.loads(path.read_bytes())
        expect = json.loads((path.parent / "expect.json").read_bytes())
        owner = directory / members["store"] if "store" in members else path.parent
        cases.append(Case(path.parent, members, expect, owner / "store"))
    return sorted(cases, key=lambda case: case.id)


def _tree(place: str) -> dict[str, str]:
    root = Path(place)
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


# -- judging -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case came to.

    Attributes:
        status: passed, failed, warning or left-out.
        reason: One word, where it did not pass.
        message: What is wrong, in a sentence.
    """

    case: Case
    status: str
    reason: str = ""
    message: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


def difference(expected: object, found: object, place: str = "") -> str | None:
    """The first difference of what was found from what was expected, in words; None if there is none."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name, value in expected.items():
            inner = f"{place}.{name}" if place else name
            if name not in found:
                return f"{inner} is missing"
            if text := difference(value, found[name], inner):
                return text
        return None
    if isinstance(expected, list) and isinstance(found, list):
        for number, (left, right) in enumerate(zip(expected, found, strict=False)):
            if text := difference(left, right, f"{place}[{number}]"):
                return text
        if len(expected) != len(found):
            return f"{place} has {len(found)} entries instead of {len(expected)}"
        return None
    if type(expected) is not type(found) or expected != found:
        return f"{place} is {_short(found)} instead of {_short(expected)}"
    return None


def compare(expect: Members, reply: Members, *, strict: bool = False) -> tuple[str, str, str]:
    """Judge a reply: status, reason, message."""
    if reply["result"] == "skip":
        return "failed", "skip", f"skipped ({reply['reason']}), though its profile is claimed"
    if "ok" in expect:
        if reply["result"] == "error":
            told = f"{reply['class']} {reply.get('code')}: {reply.get('message', '')}"
            return "failed", "rejected", f"must be accepted; was refused as {told}"
        text = difference(expect["ok"], reply)
        return ("failed", "wrong-value", f"accepted, but {text}") if text else ("passed", "", "")
    wanted = expect["error"]
    if reply["result"] == "ok":
        return "failed", "accepted", f"must be refused as {wanted['class']} {wanted['code']}; was accepted"
    if reply["class"] != wanted["class"]:
        told = f"{reply['class']} {reply.get('code')} ({reply.get('message', '')})"
        return (
            "failed",
            "wrong-class",
            f"must be refused as {wanted['class']} {wanted['code']}; was as {told}",
        )
    if "held" in wanted and (text := difference({"held": wanted["held"]}, reply)):
        return (
            "failed",
            "wrong-value",
            f"after the failure the version read before is no more what it was: {text}",
        )
    if reply.get("code") != wanted["code"]:
        text = f"the code is {reply.get('code')} instead of {wanted['code']}"
        return ("failed" if strict else "warning"), "other-code", text
    return "passed", "", ""


def run_case(
    case: Case, adapter: Adapter, judges: Sequence[Adapter] = (), *, strict: bool = False
) -> Outcome:
    """Run one case."""
    start = time.monotonic()

    def outcome(status: str, reason: str = "", message: str = "") -> Outcome:
        if status == "failed" and case.members["level"] == "should":
            status = "warning"
        return Outcome(case, status, reason, message, time.monotonic() - start)

    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(case.laid_out())
        except PlaceError as error:
            return outcome("left-out", "place", str(error))
        before = _tree(store)
        try:
            reply = adapter.ask(case.members["op"], store=store, **case.members["args"])
        except AdapterError as error:
            return outcome("failed", error.kind, str(error))
        status, reason, message = compare(case.expect, reply, strict=strict)
        if status in ("passed", "warning") and case.members["op"] != "write" and _tree(store) != before:
            return outcome("failed", "store-changed", "a reader changed files of the store")
        if status == "passed" and case.members["op"] == "write":
            text = check_written(Path(store))
            if text:
                return outcome("failed", "bad-store", f"the store that was written is wrong: {text}")
            for judge in [adapter, *judges]:
                for asked in case.members["judge"]:
                    try:
                        found = judge.ask(asked["op"], store=store, **asked["args"])
                    except AdapterError as error:
                        return outcome("failed", error.kind, f"while the store was read: {error}")
                    status, reason, message = compare(asked["expect"], found, strict=strict)
                    if status == "failed":
                        who = judge.hello["implementation"]
                        text = f"{who} reads the store that was written ({_short(asked['args'])}): {message}"
                        return outcome(status, f"judged-{reason}", text)
        return outcome(status, reason, message)


# -- what can be said of a written store without reading its content -----------------------------------------

_CLAIM, _HASH = r"[0-9]{20}", r"[0-9a-f]{64}"
_KEYS = re.compile(
    rf"deltaformat\.json|log/{_CLAIM}\.json|hints/tail\.json|hints/probe-[0-9a-f]{{32}}"
    rf"|manifests/{_CLAIM}/({_HASH})\.arrow\.zst|packs/{_CLAIM}/({_HASH})\.safetensors"
    rf"|packs/external/({_HASH})|files/{_CLAIM}/({_HASH})"
)


class _UnreadableError(Exception):
    """An object of a written store that is not what it must be, in a way that no rule here names."""


@contextlib.contextmanager
def _looking_at(key: str) -> Iterator[None]:
    """Whatever a writer has left under a key: what cannot be made sense of is its fault, not the runner's."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        text = f"{key} is not what SPEC.md says of it: {type(error).__name__}: {_short(str(error))}"
        raise _UnreadableError(text) from error


def check_written(store: Path) -> str | None:
    """The first rule that a writer's store breaks, of those that need no look into manifests."""
    try:
        return _check_objects(store)
    except _UnreadableError as error:
        return str(error)


def _check_objects(store: Path) -> str | None:
    if not (store / "deltaformat.json").is_file():
        return "there is no deltaformat.json"
    for path in sorted(store.rglob("*")):
        key = path.relative_to(store).as_posix()
        if not path.is_file():
            continue
        match = _KEYS.fullmatch(key)
        if match is None:
            return f"{key} is no key of SPEC 6 (DF-KEY-03)"
        stated = next((group for group in match.groups() if group), None)
        if stated and hashlib.sha256(path.read_bytes()).hexdigest() != stated:
            return f"{key} does not have its SHA-256 (DF-KEY-02)"
        if key.startswith("packs/"):
            with _looking_at(key):
                text = _check_pack(path.read_bytes())
            if text:
                return f"{key}: {text}"
    for path in [store / "deltaformat.json", *sorted((store / "log").glob("*"))]:
        if text := _check_sealed(path.read_bytes()):
            return f"{path.name}: {text} (DF-JSN-03)"
    paths = sorted((store / "log").glob("*"))
    hint = store / "hints" / "tail.json"
    with _looking_at("hints/tail.json"):
        if hint.is_file() and json.loads(hint.read_bytes())["seq"] >= len(paths):
            return "hints/tail.json names a record that is not there (DF-LOG-10)"
    return _check_log(paths, store)


def _check_sealed(data: bytes) -> str | None:
    match = re.fullmatch(rb'(.*),"check":"([0-9a-f]{64})"\}', data, re.DOTALL)
    if match is None:
        return "it does not end with `check`"
    return None if hashlib.sha256(match[1]).hexdigest().encode() == match[2] else "`check` is wrong"


def _check_pack(data: bytes) -> str | None:
    """DF-PCK-01: what safetensors asks of a file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        if entry["data_offsets"][0] != end:
            return "its tensors do not tile the data (DF-PCK-01)"
        end = entry["data_offsets"][1]
    if length % 8 or 8 + length + end != len(data):
        return "its header is not padded to 8 bytes, or its data has another length (DF-PCK-01)"
    return None


def _check_log(paths: Sequence[Path], store: Path) -> str | None:
    prev: str | None = None
    heads: dict[str, Any] = {}
    commits: dict[int, Any] = {}
    last: dict[str, int | None] = {"tag": None, "retire": None}
    packs: dict[str, int] = {}
    for seq, path in enumerate(paths):
        with _looking_at(f"log/{path.name}"):
            if path.name != f"{seq:020}.json":
                return f"log/{path.name} stands where record {seq} must be (SPEC 12.1)"
            record = json.loads(path.read_bytes())
            where = f"record {seq} ({record['kind']})"
            if record["seq"] != seq or record["prev"] != prev:
                return f"{where} has a wrong seq or prev (DF-LOG-02)"
            heads = _heads_after(record, heads, commits)
            links = last["tag"], last["retire"]
            if record["heads"] != heads or (record["last_tag"], record["last_retire"]) != links:
                return f"{where}: heads, last_tag or last_retire are not what SPEC 12.2 gives"
            if record["kind"] == "commit":
                if text := _check_commit(record, commits, packs, store):
                    return f"{where}: {text}"
                commits[seq] = record
            if record["kind"] in last:
                last[record["kind"]] = seq
            prev = hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def _check_commit(
    record: Members, commits: Mapping[int, Members], packs: dict[str, int], store: Path
) -> str | None:
    parent = commits.get(record["parent"])
    ancestors = [] if parent is None else _ancestors(record["parent"], commits)
    if record["depth"] != (parent["depth"] + 1 if parent else 0) or record["ancestors"] != ancestors:
        return "depth or ancestors are wrong (DF-LOG-08)"
    for entry in [*record["manifests"], *record["objects_added"]]:
        path_of = store / entry["key"]
        if not path_of.is_file() or path_of.stat().st_size != entry["size"]:
            return f"{entry['key']} is missing or has another size (DF-CMT-01)"
        if int(entry["key"].split("/")[1]) != record["claim"]:
            return f"{entry['key']} is not of its claim"
        if entry["key"].startswith("packs/"):
            made = packs.setdefault(entry["key"].rpartition("/")[2], record["seq"])
            if made != record["seq"]:
                return f"{entry['key']} has the bytes of a pack of record {made} (DF-WR-03)"
    return None


def _heads_after(record: Members, heads: Members, commits: Mapping[int, Members]) -> dict[str, Any]:
    """The branches after a record (SPEC 12.2)."""
    after = dict(heads)
    branch = record.get("branch")
    if record["kind"] == "claim":
        head = dict(heads.get(branch, {"seq": None, "step": None, "epoch": 0}))
        if record["resume_from"] is not None:
            head |= {"seq": record["resume_from"], "step": commits[record["resume_from"]]["step"]}
        after[branch] = {**head, "epoch": head["epoch"] + 1, "claim": record["seq"]}
    elif record["kind"] == "commit":
        after[branch] = {**heads[branch], "seq": record["seq"], "step": record["step"]}
    elif record["kind"] == "fork":
        after[branch] = {"seq": record["source"], "step": record["step"], "epoch": 0, "claim": None}
    elif record["kind"] == "drop":
        del after[branch]
    return after


def _ancestors(parent: int, commits: Mapping[int, Members]) -> list[list[int]]:
    lineage = [parent]
    while (above := commits[lineage[-1]]["parent"]) is not None:
        lineage.append(above)
    depth = len(lineage)
    wanted = {(depth - 1) >> i << i for i in range(depth.bit_length() + 1)}
    entries = [[commits[seq]["depth"], seq, commits[seq]["step"]] for seq in lineage]
    return [entry for entry in entries if entry[0] in wanted]


# -- the report ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """All outcomes of a run.

    Attributes:
        whole: Whether all cases were there to be run; some of them show nothing that could be claimed.
    """

    implementation: str
    claimed: Sequence[str]
    version: str
    whole: bool = True
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[Outcome]:
        """Those that failed."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    def claims(self) -> list[str]:
        """A line per profile: what may be claimed; cases that were left out are told."""
        lines = []
        for profile in PROFILES if self.whole else ():
            of = [o for o in self.outcomes if o.case.members["profile"] == profile]
            left = sum(o.status == "left-out" for o in of)
            if len(of) > left:
                good = sum(o.status not in ("failed", "left-out") for o in of)
                text = f"deltaformat 1.0 {profile}, suite {self.version}, {good}/{len(of) - left}"
                lines.append(f"{text}, {left} left out" if left else text)
        return lines

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "implementation": self.implementation,
            "suite": self.version,
            "claims": self.claims(),
            "failed": len(self.failed),
            "cases": [
                {
                    "id": o.case.id,
                    "status": o.status,
                    "reason": o.reason,
                    "message": o.message,
                    "seconds": round(o.seconds, 4),
                }
                for o in self.outcomes
            ],
        }

    def as_junit(self) -> bytes:
        """JUnit XML: a suite per profile."""
        root = ElementTree.Element("testsuites", name="deltaformat conformance")
        for profile in PROFILES:
            of = [o for o in self.outcomes if o.case.members["profile"] == profile]
            counts = {"tests": len(of), "failures": sum(o.status == "failed" for o in of), "errors": 0}
            counts["skipped"] = sum(o.status == "left-out" for o in of)
            attributes = {name: str(count) for name, count in counts.items()}
            suite = ElementTree.SubElement(root, "testsuite", name=profile, **attributes)
            suite.set("time", f"{sum(o.seconds for o in of):.3f}")
            for o in of:
                area, _, name = o.case.id.rpartition("/")
                case = ElementTree.SubElement(suite, "testcase", classname=area.replace("/", "."), name=name)
                case.set("time", f"{o.seconds:.3f}")
                if o.status == "failed":
                    entry = ElementTree.SubElement(case, "failure", type=o.reason, message=_xml(o.message))
                    entry.text = _xml(advice(o))
                elif o.status == "left-out":
                    ElementTree.SubElement(case, "skipped", message=_xml(o.message))
                elif o.status == "warning":
                    ElementTree.SubElement(case, "system-out").text = _xml(f"warning: {o.message}")
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def advice(outcome: Outcome) -> str:
    """What to read, and how to try this case alone."""
    case = outcome.case
    lines = [f"  what it shows: {case.members['title']}"]
    if case.members["requirements"]:
        lines.append(f"  read in SPEC.md: {', '.join(case.members['requirements'])}")
    if "derived_from" in case.members:
        lines.append(f"  it is {case.members['derived_from']} but for one fault: {case.members['mutation']}")
    lines.append(f"  its files: {case.directory}; try it alone: --filter '={case.id}'")
    return "\n".join(lines)


# -- the program ---------------------------------------------------------------------------------------------


def chosen(cases: Sequence[Case], filters: Sequence[str]) -> list[Case]:
    """The cases that a filter names: `=ID`, or a part of the id begins with it; all without a filter."""

    def named(case: Case, text: str) -> bool:
        return case.id == text[1:] if text.startswith("=") else f"/{text}" in f"/{case.id}"

    return [case for case in cases if not filters or any(named(case, text) for text in filters)]


def run(
    cases: Sequence[Case],
    adapter: Adapter,
    *,
    version: str,
    profiles: Sequence[str] = (),
    judges: Sequence[Adapter] = (),
    strict: bool = False,
    whole: bool = True,
    each: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Run cases, which are `whole` the suite; `each` hears of every outcome as it comes.

    Raises:
        AdapterError: the adapter does not even say hello.
    """
    for one in (adapter, *judges):
        one.start()
    claimed = [
        p
        for p in PROFILES
        if p in adapter.hello["profiles"]
        or (p, True) == ("reader-core", "reader-full" in adapter.hello["profiles"])
    ]
    report = Report(adapter.hello["implementation"], claimed, version, whole)
    lost = 0
    for case in cases:
        profile = case.members["profile"]
        lacking = sorted(set(case.members["features"]) - set(adapter.hello["features"]))
        if profiles and profile not in profiles:
            continue
        if profile not in (profiles or claimed):
            outcome = Outcome(case, "left-out", "profile", f"the adapter does not claim {profile}")
        elif lacking:
            outcome = Outcome(case, "left-out", "feature", f"the adapter lacks {', '.join(lacking)}")
        elif lost >= MAX_LOST:
            outcome = Outcome(case, "failed", "not-run", f"not tried, after {lost} time-outs")
        else:
            outcome = run_case(case, adapter, judges, strict=strict)
            lost += outcome.reason == "timeout"
        report.outcomes.append(outcome)
        each(outcome)
    return report


def parse(argv: Sequence[str] | None, prog: str | None, default: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Run the conformance cases of deltaformat against an implementation."
    )
    shown = shlex.join(default) if default else "the reference, if `deltaformat` is installed"
    parser.add_argument("--adapter", metavar="CMD", help=f"the adapter's command (default: {shown})")
    parser.add_argument(
        "--judge",
        metavar="CMD",
        action="append",
        default=[],
        help="another adapter that reads what the writer wrote; may be repeated",
    )
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        action="append",
        default=[],
        help="only cases of this profile, claimed or not; may be repeated",
    )
    parser.add_argument(
        "--filter",
        metavar="TEXT",
        action="append",
        default=[],
        help="only cases with a part of their id that begins with TEXT, or =ID; may be repeated",
    )
    parser.add_argument(
        "--cases",
        metavar="DIR",
        type=Path,
        default=HERE / "cases",
        help="where the cases are (default: beside this file)",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=30.0, help="for one reply (default: 30)"
    )
    parser.add_argument("--strict", action="store_true", help="another code of the right class fails")
    parser.add_argument("--list", action="store_true", help="print the cases and run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--junit", metavar="FILE", type=Path, help="also write a JUnit report")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, *, prog: str | None = None, default: Sequence[str] = ()) -> int:
    """Run the suite; return the exit code. `default` is the adapter's command where none is given."""
    try:
        options = parse(argv, prog, default)
    except SystemExit as request:
        return int(request.code or 0)
    with found_cases(options.cases) as directory:
        return _run(options, directory, default)


def _no_claim(report: Report) -> str:
    return "no claim: " + ("no case was run" if report.whole else "--filter chose some of the cases")


def _run(options: argparse.Namespace, directory: Path, default: Sequence[str]) -> int:
    cases = chosen(load_cases(directory), options.filter)
    if not cases:
        print(f"no cases below {options.cases} that match", file=sys.stderr)
        return 2
    if options.list:
        for case in cases:
            print(f"{case.id}: {case.members['title']}")
        return 0
    reference = [sys.executable, str(HERE / "adapters" / "deltaformat_reference.py")]
    command = shlex.split(options.adapter) if options.adapter else list(default) or reference
    adapter = Adapter(command, timeout=options.timeout)
    judges = [Adapter(shlex.split(text), timeout=options.timeout) for text in options.judge]
    version = (HERE / "VERSION").read_text().strip()

    def each(outcome: Outcome) -> None:
        if options.json:
            return
        if outcome.status == "failed":
            print(
                f"FAIL {outcome.case.id}: {outcome.reason}: {outcome.message}\n{advice(outcome)}", flush=True
            )
        elif outcome.status == "warning":
            print(f"warning {outcome.case.id}: {outcome.message}", flush=True)

    start = time.monotonic()
    try:
        report = run(
            cases,
            adapter,
            version=version,
            profiles=options.profile,
            judges=judges,
            strict=options.strict,
            whole=not options.filter,
            each=each,
        )
    except AdapterError as error:
        print(f"{shlex.join(command)}: {error}", file=sys.stderr)
        print(
            "the adapter must answer `hello`, see PROTOCOL.md, section 3; --adapter says what to run",
            file=sys.stderr,
        )
        return 2
    finally:
        for one in (adapter, *judges):
            one.close()
    if options.junit:
        options.junit.write_bytes(report.as_junit())
    if options.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        left_out = [o for o in report.outcomes if o.status == "left-out"]
        for reason in sorted({o.message for o in left_out}):
            print(f"left out: {sum(o.message == reason for o in left_out)} cases: {reason}")
        count, seconds = len(report.outcomes) - len(left_out), time.monotonic() - start
        print(f"{report.implementation}: {count} cases in {seconds:.1f} s, {len(report.failed)} failed")
        print("\n".join(report.claims() or [_no_claim(report)]))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
