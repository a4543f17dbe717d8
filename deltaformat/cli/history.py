"""The command `log`: what happened to a store, newest first."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import deltaformat as df
from deltaformat.cli.options import Commands, UsageError, add_branch, positive
from deltaformat.cli.output import MAX_NAME, Column, Console, human, plain, table
from deltaformat.errors import ErrorCode, MissingError
from deltaformat.records import Claim, Commit, Drop, Fork, Record, Retire, Tag

__all__ = ["register"]

DEFAULT_LIMIT = 20
_COLUMNS = (
    Column("seq"),
    Column("kind", left=True),
    Column("branch", left=True),
    Column("step"),
    Column("time", left=True),
    Column("added"),
    Column("", left=True),
)


def register(commands: Commands) -> None:
    """Declare `log`."""
    parser = commands.add(
        "log",
        _log,
        help="list what happened, newest first",
        example="deltaformat log run/ --branch main --limit 5",
    )
    parser.add_argument("store", metavar="STORE")
    add_branch(parser, default=None)
    parser.add_argument(
        "--limit", type=positive, metavar="N", help=f"how many records to list (default: {DEFAULT_LIMIT})"
    )
    parser.add_argument("--all", action="store_true", help="list every record")


def _log(options: argparse.Namespace, console: Console) -> int:
    if options.all and options.limit is not None:
        raise UsageError("--all and --limit exclude each other; see deltaformat log --help")
    limit = None if options.all else options.limit or DEFAULT_LIMIT
    store = df.open(options.store)
    heads, tags = store.branches(), store.tags()
    # One more tells whether there is more.
    records = store.log(options.branch, None if limit is None else limit + 1)
    if options.branch is not None and options.branch not in heads and not records:
        raise MissingError(
            ErrorCode.BRANCH_MISSING,
            f"no branch {options.branch!r}; there are: {', '.join(sorted(heads)) or 'none yet'}",
            where=store.url,
        )
    more = limit is not None and len(records) > limit
    records = records[:limit]

    notes: dict[int, list[str]] = defaultdict(list)
    for branch, head in heads.items():
        if head.seq is not None:
            notes[head.seq].append(f"head of {branch}")
    for name, seq in tags.items():
        notes[seq].append(f"tag {name}")
    rows = [_row(record, notes.get(record.seq, [])) for record in records]
    console.say(table(_COLUMNS, rows) if rows else "no records")
    if more:
        console.say("... and older records; --all lists them")
    console.document(
        {
            "store": store.url,
            "heads": {
                name: {"seq": head.seq, "step": head.step, "epoch": head.epoch, "claim": head.claim}
                for name, head in heads.items()
            },
            "tags": dict(tags),
            "records": [_document(record) for record in records],
            "more": more,
        }
    )
    return 0


def bytes_added(commit: Commit) -> int:
    """Bytes of the objects that a commit made necessary: packs, sidecar files and manifests."""
    return sum(ref.size for ref in commit.objects_added) + sum(ref.size for ref in commit.manifests)


def _row(record: Record, notes: list[str]) -> list[str]:
    added = human(bytes_added(record)) if isinstance(record, Commit) else ""
    step = f"{record.step}" if isinstance(record, Commit | Fork) else ""
    branch = getattr(record, "branch", "")
    note = "; ".join(filter(None, [_describe(record), *notes]))
    return [
        str(record.seq),
        record.kind,
        plain(branch),
        step,
        plain(record.time[:MAX_NAME]),
        added,
        plain(note),
    ]


def _describe(record: Record) -> str:
    match record:
        case Claim():
            parts = [f"epoch {record.epoch}, held by {record.host[:MAX_NAME]} pid {record.pid}"]
            if record.resume_from is not None:
                parts.append(f"back to commit {record.resume_from}")
            if record.single_writer:
                parts.append("single writer")
            return ", ".join(parts)
        case Fork():
            return f"from commit {record.source}"
        case Tag():
            return (
                f"tag {record.name} removed"
                if record.target is None
                else f"tag {record.name}: commit {record.target}"
            )
        case Drop():
            return "branch ends"
        case Retire():
            return f"{len(record.commits)} versions retired"
    return ""


def _document(record: Record) -> dict[str, Any]:
    document: dict[str, Any] = {"seq": record.seq, "kind": record.kind, "time": record.time}
    match record:
        case Claim():
            names = ["branch", "epoch", "host", "pid", "resume_from", "single_writer"]
        case Commit():
            names = ["branch", "step", "claim", "parent", "depth", "root"]
            document["bytes_added"] = bytes_added(record)
            document["metadata"] = dict(record.metadata)
        case Fork():
            names = ["branch", "source", "step"]
        case Tag():
            names = ["name", "target"]
        case Drop():
            names = ["branch"]
        case Retire():
            names = []
            document["commits"] = list(record.commits)
        case _:
            names = []
    return document | {name: getattr(record, name) for name in names}
