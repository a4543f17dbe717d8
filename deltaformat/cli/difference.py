"""The command `diff`: which weights differ between two steps, bit for bit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

import deltaformat as df
from deltaformat.cli.options import Commands, add_allow_external, add_branch, natural
from deltaformat.cli.output import Column, Console, escape, human, percent, table
from deltaformat.dtypes import get_dtype
from deltaformat.stager import Progress

__all__ = ["register"]

READ_BYTES = 32 << 20
"""How much of a tensor is compared at a time; twice that is in memory."""

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How a tensor differs.

    Attributes:
        name: Its name.
        status: `same`, `changed`, `replaced` (another dtype or shape), `added` or `removed`.
        dtype: Its dtype in B, or in A if it was removed.
        elements: Number of its weights.
        nbytes: Their bytes.
        changed: Weights whose bits differ; all where there is nothing to compare them with.
        density: `changed` over `elements`.
    """

    name: str
    status: str
    dtype: str
    elements: int
    nbytes: int
    changed: int
    density: float


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
        total, done, changes = int(new.map.tensor_bytes.sum()), 0, []
        for name in sorted({*old.keys(), *new.keys()}, key=str.encode):
            changes.append(_compare(old, new, name, store.block_bytes))
            done += changes[-1].nbytes if name in new else 0
            progress(Progress("compare", done, total))
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


def _compare(old: df.Version, new: df.Version, name: str, block_bytes: int) -> TensorChange:
    info = new.info(name) if name in new else old.info(name)
    elements = math.prod(info.shape)
    if name not in old or name not in new:
        return _change(name, "added" if name in new else "removed", info, elements, elements)
    before = old.info(name)
    if (before.dtype, before.shape) != (info.dtype, info.shape):
        return _change(name, "replaced", info, elements, elements)
    suspect = ~_known_equal(old, new, name)
    changed = 0
    if suspect.any():
        bits = get_dtype(info.dtype).bits
        changed = sum(
            count_differences(first, second, bits)
            for first, second in _pieces(old, new, name, info, suspect, block_bytes)
        )
    return _change(name, "changed" if changed else "same", info, elements, changed)


def _change(name: str, status: str, info: df.TensorInfo, elements: int, changed: int) -> TensorChange:
    return TensorChange(
        name, status, info.dtype, elements, info.nbytes, changed, changed / elements if elements else 0.0
    )


def count_differences(first: Bytes, second: Bytes, bits: int) -> int:
    """Count the elements of `bits` bits whose bits differ between two equally long runs of bytes."""
    if bits % 8:  # elements share bytes
        different: Bytes = np.unpackbits(first ^ second, bitorder="little")
        return int(different.reshape(-1, bits).any(axis=1).sum())
    unsigned = np.dtype(f"u{bits // 8}")
    return int(np.count_nonzero(first.view(unsigned) != second.view(unsigned)))


def _known_equal(old: df.Version, new: df.Version, name: str) -> Flags:
    """Which blocks are equal without a look at their bytes.

    Equal digests tell that only between a version and its parent (DF-DIG-02). The same pieces of the same
    packs, which never change, tell it for any two versions.
    """
    before, after = old.map.blocks(old.map.index[name]), new.map.blocks(new.map.index[name])
    if new.parent == old.seq or old.parent == new.seq or new.seq == old.seq:
        same: Flags = (old.map.digest[before] == new.map.digest[after]).all(axis=1)
        return same
    equal: Flags = old.map.depth[before] == new.map.depth[after]
    for block in np.flatnonzero(equal).tolist():
        equal[block] = _chain(old, before.start + block) == _chain(new, after.start + block)
    return equal


def _chain(version: df.Version, block: int) -> list[tuple[object, ...]]:
    layout = version.map
    pieces = slice(int(layout.piece_start[block]), int(layout.piece_start[block + 1]))
    return [
        (layout.packs[pack], offset, length, encoding)
        for pack, offset, length, encoding in zip(
            layout.pack[pieces].tolist(),
            layout.offset[pieces].tolist(),
            layout.length[pieces].tolist(),
            layout.encoding[pieces].tolist(),
            strict=True,
        )
    ]


def _pieces(
    old: df.Version, new: df.Version, name: str, info: df.TensorInfo, suspect: Flags, block_bytes: int
) -> Iterator[tuple[Bytes, Bytes]]:
    """The bytes of both sides, a bounded run of rows at a time, without rows that are known to be equal."""
    if info.nbytes <= READ_BYTES or not info.shape or get_dtype(info.dtype).bits % 8:
        yield _raw(old.get_bytes(name).data), _raw(new.get_bytes(name).data)
        return
    row_bytes = info.nbytes // info.shape[0]
    step = max(1, READ_BYTES // row_bytes)
    slices = old.get_slice(name), new.get_slice(name)
    for start in range(0, info.shape[0], step):
        stop = min(start + step, info.shape[0])
        if suspect[start * row_bytes // block_bytes : -(-stop * row_bytes // block_bytes)].any():
            yield _raw(slices[0][start:stop]), _raw(slices[1][start:stop])


def _raw(data: object) -> Bytes:
    return np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)
