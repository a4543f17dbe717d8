"""Commands that make, check and tend a store: init, verify, fork, tag, gc."""

from __future__ import annotations

import argparse
from collections import Counter
from datetime import timedelta
from typing import Any

import deltaformat as df
from deltaformat.blocks import DEFAULT_BLOCK_BYTES
from deltaformat.cli.options import (
    Commands,
    add_allow_external,
    add_branch,
    add_step,
    block_size,
    hours,
    natural,
    positive,
)
from deltaformat.cli.output import Column, Console, human, plain, table
from deltaformat.digests import DIGEST_SIZES

__all__ = ["register", "register_init"]

MAX_LISTED = 50
"""Lines of a long list that are printed; JSON has all of it."""
MAX_FINDINGS = 1000


def register_init(commands: Commands) -> None:
    """Declare `init`."""
    parser = commands.add("init", _init, help="make a new, empty store", example="deltaformat init run/")
    parser.add_argument("store", metavar="STORE", help="a directory or URL that holds no store yet")
    parser.add_argument(
        "--block-bytes",
        type=block_size,
        default=DEFAULT_BLOCK_BYTES,
        metavar="N",
        help="block size, a power of two (default: 1MiB; 4MiB is better above 200 billion parameters)",
    )
    parser.add_argument(
        "--digest",
        choices=sorted(DIGEST_SIZES),
        default="xxh3-128",
        help="block digest: xxh3-128 (default) finds accidents, blake3-256 finds malice too",
    )


def register(commands: Commands) -> None:
    """Declare `verify`, `fork`, `tag` and `gc`."""
    parser = commands.add(
        "verify",
        _verify,
        help="check a version, or everything, and report what is damaged",
        example="deltaformat verify run/ --all",
    )
    parser.add_argument("store", metavar="STORE")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=natural, metavar="N", help="the step (default: the branch's newest)")
    which.add_argument("--all", action="store_true", help="the whole log and every live version")
    add_branch(parser)
    add_allow_external(parser)

    parser = commands.add(
        "fork",
        _fork,
        help="start a new branch at a step",
        example="deltaformat fork run/ experiment --step 100",
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("new", metavar="NEW", help="the new branch's name")
    add_step(parser, help="the step it starts at")
    add_branch(parser)

    parser = commands.add(
        "tag",
        _tag,
        help="name a version, which also keeps it from being collected",
        example="deltaformat tag run/ best --step 100",
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("name", metavar="NAME", help="the tag")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=natural, metavar="N", help="the step to name")
    what.add_argument("--delete", action="store_true", help="remove the tag; the version stays")
    add_branch(parser)

    parser = commands.add(
        "gc",
        _gc,
        help="delete versions that are no longer wanted; a dry run unless --yes is given",
        example="deltaformat gc run/ --keep-last 10 --keep-every 100 --yes",
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument(
        "--keep-last",
        type=positive,
        required=True,
        metavar="N",
        help="keep the newest N versions of every branch",
    )
    parser.add_argument("--keep-every", type=positive, metavar="K", help="also keep steps that K divides")
    parser.add_argument(
        "--grace",
        type=hours,
        default=24.0,
        metavar="HOURS",
        help="leave readers this long before bytes are deleted (default: 24)",
    )
    parser.add_argument("--yes", action="store_true", help="do it")


def _init(options: argparse.Namespace, console: Console) -> int:
    store = df.create(options.store, block_bytes=options.block_bytes, digest=options.digest)
    console.say(
        f"made an empty store at {plain(store.url)} (blocks of {_binary(store.block_bytes)}, {store.digest})"
    )
    console.document(
        {"store": store.url, "uuid": store.uuid, "digest": store.digest, "block_bytes": store.block_bytes}
    )
    return 0


def _binary(block_bytes: int) -> str:
    """A power of two in binary units."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if block_bytes >= size:
            return f"{block_bytes // size} {unit}"
    return f"{block_bytes} B"


def _verify(options: argparse.Namespace, console: Console) -> int:
    store = df.open(options.store, allow_external=tuple(options.allow_external))
    with console.bars() as progress:
        report = store.verify(options.step, branch=options.branch, all=options.all, progress=progress)
    findings = [
        {"where": finding.where, "code": _code(finding.code), "message": finding.message}
        for finding in report.findings
    ]
    counts = _counts(report)
    for finding in findings[:MAX_FINDINGS]:
        where = f"{plain(finding['where'])}: " if finding["where"] else ""
        console.say(f"{where}{plain(finding['message'])} [{finding['code']}]")
    if len(findings) > MAX_FINDINGS:
        console.say(f"... and {len(findings) - MAX_FINDINGS} more; --json lists all")
    looked = ", ".join(
        human(count) if name == "nbytes" else f"{count:,} {name}" for name, count in counts.items()
    )
    verdict = (
        "no finding" if not findings else "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    )
    console.say(f"{verdict}; checked {looked}" if looked else verdict)
    console.document({"store": store.url, "ok": not findings, "findings": findings, "checked": counts})
    return 1 if findings else 0


def _code(code: Any) -> str:
    """A finding's code as it is printed."""
    return str(getattr(code, "value", code))


def _counts(report: Any) -> dict[str, int]:
    """A report's counts: all its integer fields."""
    names = getattr(type(report), "__dataclass_fields__", {})
    values = {name: getattr(report, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def _fork(options: argparse.Namespace, console: Console) -> int:
    store = df.open(options.store)
    store.fork(options.new, branch=options.branch, step=options.step)
    head = store.branches()[options.new]
    console.say(f"branch {options.new} starts at step {options.step} of {options.branch} (commit {head.seq})")
    console.document(
        {
            "store": store.url,
            "branch": options.new,
            "source": options.branch,
            "step": options.step,
            "seq": head.seq,
        }
    )
    return 0


def _tag(options: argparse.Namespace, console: Console) -> int:
    store = df.open(options.store)
    if options.delete:
        store.delete_tag(options.name)
        console.say(f"removed tag {options.name}")
        console.document({"store": store.url, "tag": options.name, "seq": None, "deleted": True})
        return 0
    store.tag(options.name, branch=options.branch, step=options.step)
    seq = store.tags()[options.name]
    console.say(f"tag {options.name} names step {options.step} of {options.branch} (commit {seq})")
    console.document({"store": store.url, "tag": options.name, "seq": seq, "deleted": False})
    return 0


def _gc(options: argparse.Namespace, console: Console) -> int:
    store = df.open(options.store)
    with console.bars() as progress:
        report = store.gc(
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            grace=timedelta(hours=options.grace),
            dry_run=not options.yes,
            progress=progress,
        )
    waiting_bytes = sum(size for _, size in report.waiting)
    if report.retired:
        rows = [[branch, f"{step:,}", f"{seq:,}"] for branch, step, seq in report.retired]
        columns = [Column("branch", left=True), Column("step"), Column("seq")]
        console.say(f"{'would retire' if report.dry_run else 'retired'} {len(rows):,} versions:")
        console.say(f"  {line}" for line in table(columns, rows[:MAX_LISTED]))
        if len(rows) > MAX_LISTED:
            console.say(f"  ... and {len(rows) - MAX_LISTED:,} more; --json lists all")
    kept = ", ".join(f"{len(steps):,} of {branch}" for branch, steps in report.kept.items())
    verb = "would delete" if report.dry_run else "deleted"
    console.say(
        [
            f"kept versions: {kept or 'none'} ({human(report.live_bytes)})",
            f"{verb} {_objects(report.deleted)} ({human(report.deleted_bytes)}): {_kinds(report.deleted)}",
            f"{_objects(report.waiting)} ({human(waiting_bytes)}) "
            f"{'would go' if report.dry_run else 'go'} with a run after the grace of {options.grace:g} h",
        ]
    )
    if report.dry_run:
        console.say("nothing was changed; --yes does it")
    console.document(
        {
            "store": store.url,
            "dry_run": report.dry_run,
            "kept": report.kept,
            "retired": [{"branch": branch, "step": step, "seq": seq} for branch, step, seq in report.retired],
            "deleted": [{"key": key, "size": size} for key, size in report.deleted],
            "deleted_bytes": report.deleted_bytes,
            "waiting": [{"key": key, "size": size} for key, size in report.waiting],
            "waiting_bytes": waiting_bytes,
            "live_bytes": report.live_bytes,
        }
    )
    return 0


def _objects(objects: list[tuple[str, int]]) -> str:
    return f"{len(objects):,} object{'' if len(objects) == 1 else 's'}"


def _kinds(objects: list[tuple[str, int]]) -> str:
    counts = Counter(key.partition("/")[0] for key, _ in objects)
    return ", ".join(f"{count:,} in {kind}/" for kind, count in sorted(counts.items())) or "none"
