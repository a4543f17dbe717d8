"""The command `diff`: which weights differ between two steps, bit for bit."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import deltaformat as df
from deltaformat.cli.compare import TensorChange, compare
from deltaformat.cli.options import Commands, add_allow_external, add_branch, natural
from deltaformat.cli.output import Column, Console, escape, human, percent, table
from deltaformat.stager import Progress

__all__ = ["register"]


def register(commands: Commands) -> None:
    """Declare `diff`."""
    parser = commands.add(
        "diff",
        _diff,
        help="count the weights whose bits differ between two steps, tensor by tensor",
        example="deltaformat diff run/ 10 11",
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("a", metavar="A", type=natural, help="a step")
    parser.add_argument("b", metavar="B", type=natural, help="the step it is compared with")
    add_branch(parser)
    add_allow_external(parser)


def _diff(options: argparse.Namespace, console: Console) -> int:
    store = df.open(options.store, allow_external=tuple(options.allow_external))
    with (
        store.version(options.a, branch=options.branch) as old,
        store.version(options.b, branch=options.branch) as new,
        console.bars() as progress,
    ):
        total = int(new.map.tensor_bytes.sum())
        changes = compare(
            old,
            new,
            block_bytes=store.block_bytes,
            report=lambda done: progress(Progress("compare", done, total)),
        )
    shared = [change for change in changes if change.status in ("same", "changed")]
    summary = {
        "elements": sum(change.elements for change in shared),
        "changed": sum(change.changed for change in shared),
        "density": 0.0,
        "tensors": len(changes),
    } | {
        status: sum(change.status == status for change in changes)
        for status in ("same", "replaced", "added", "removed")
    }
    summary["density"] = summary["changed"] / summary["elements"] if summary["elements"] else 0.0
    summary["changed_tensors"] = sum(change.status == "changed" for change in changes)
    console.document(
        {
            "store": store.url,
            "branch": options.branch,
            "a": {"step": old.step, "seq": old.seq, "root": old.root},
            "b": {"step": new.step, "seq": new.seq, "root": new.root},
            "summary": summary,
            "tensors": [asdict(change) for change in changes],
        }
    )
    if not console.json:
        console.say(_render(changes, summary))
    return 0


def _render(changes: list[TensorChange], summary: dict[str, float]) -> list[str]:
    columns = [Column("tensor", left=True), Column("", left=True), Column("dtype", left=True)]
    columns += [Column("weights"), Column("changed"), Column("density"), Column("size")]
    rows = [
        [
            escape(change.name),
            change.status,
            change.dtype,
            f"{change.elements:,}",
            f"{change.changed:,}",
            percent(change.changed, change.elements),
            human(change.nbytes),
        ]
        for change in changes
        if change.status != "same"
    ]
    only = [f"{summary[status]} {status}" for status in ("replaced", "added", "removed") if summary[status]]
    return [
        *(table(columns, rows) if rows else []),
        f"{summary['changed']:,} of {summary['elements']:,} weights differ "
        f"({percent(int(summary['changed']), int(summary['elements']))}), "
        f"in {summary['changed_tensors']} of {summary['tensors']} tensors"
        + "".join(f"; {text}" for text in only),
    ]
