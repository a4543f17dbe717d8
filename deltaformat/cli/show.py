"""The command `show`: one version's tensors, and where its bytes are."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import numpy.typing as npt

import deltaformat as df
from deltaformat.cli.options import Commands, add_allow_external, natural
from deltaformat.cli.output import Column, Console, escape, human, percent, plain, table
from deltaformat.columns import prefix_sums
from deltaformat.encodings import Encoding
from deltaformat.packs import ExternalRef, PackEntry
from deltaformat.versionmap import VersionMap

__all__ = ["register"]

_MAX_METADATA = 500
_PACK_BITS = 41
"""Offsets stay below: an object has at most 2^40 bytes, and a table 2^20 packs."""


def register(commands: Commands) -> None:
    """Declare `show`."""
    parser = commands.add(
        "show",
        _show,
        help="describe a version: tensors, sizes, chains, and where its bytes are",
        example="deltaformat show run/ --step 100",
    )
    parser.add_argument("store", metavar="STORE")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=natural, metavar="N", help="the step (default: the branch's newest)")
    which.add_argument("--tag", metavar="NAME", help="the version that this tag names")
    which.add_argument("--seq", type=natural, metavar="N", help="the commit of this number")
    parser.add_argument("--branch", default="main", metavar="B", help="the branch of --step (default: main)")
    add_allow_external(parser)


def _show(options: argparse.Namespace, console: Console) -> int:
    store = df.open(options.store, allow_external=tuple(options.allow_external))
    with store.version(options.step, branch=options.branch, tag=options.tag, seq=options.seq) as version:
        document = _describe(version)
    document = {"store": store.url} | document
    console.document(document)
    if not console.json:
        console.say(_render(document))
    return 0


def _describe(version: df.Version) -> dict[str, Any]:
    commit, layout = version.commit, version.map
    tensors = _tensors(layout)
    distinct = np.unique(layout.pack.astype(np.int64) << _PACK_BITS | layout.offset, return_index=True)[1]
    depth = layout.depth
    return {
        "step": version.step,
        "seq": version.seq,
        "branch": version.branch,
        "time": commit.time,
        "parent": commit.parent,
        "root": version.root,
        "metadata": version.metadata,
        "nbytes": int(layout.tensor_bytes.sum()),
        "stored_bytes": int(layout.length[distinct].sum()),
        "manifest_bytes": sum(ref.size for ref in commit.manifests),
        "blocks": layout.block_count,
        "pieces": len(layout.length),
        "chain": {
            "min": int(depth.min(initial=64)) if depth.size else 0,
            "mean": float(depth.mean()) if depth.size else 0.0,
            "max": int(depth.max(initial=0)),
        },
        "encodings": _encodings(layout, distinct),
        "packs": _packs(layout, distinct),
        "files": [{"path": ref.path, "size": ref.size} for ref in layout.files],
        "tensors": tensors,
    }


def _tensors(layout: VersionMap) -> list[dict[str, Any]]:
    """What each tensor is and takes; columns first, so that 100,000 tensors are no more than a list."""
    starts = layout.block_start
    blocks = np.diff(starts)
    stored = np.diff(prefix_sums(layout.length)[layout.piece_start[starts]])
    pieces = np.diff(layout.piece_start[starts])
    low, high = np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.int64)
    filled = np.flatnonzero(blocks)
    if filled.size:
        low[filled] = np.minimum.reduceat(layout.depth, starts[filled])
        high[filled] = np.maximum.reduceat(layout.depth, starts[filled])
    columns = (blocks.tolist(), stored.tolist(), pieces.tolist(), low.tolist(), high.tolist())
    return [
        {
            "name": name,
            "dtype": dtype,
            "shape": list(shape),
            "nbytes": nbytes,
            "stored_bytes": size,
            "blocks": count,
            "chain": {"min": least, "mean": total / count if count else 0.0, "max": most},
        }
        for name, dtype, shape, nbytes, count, size, total, least, most in zip(
            layout.names, layout.dtypes, layout.shapes, layout.tensor_bytes.tolist(), *columns, strict=True
        )
    ]


def _encodings(layout: VersionMap, distinct: npt.NDArray[np.intp]) -> list[dict[str, Any]]:
    codes, lengths = layout.encoding[distinct], layout.length[distinct]
    return [
        {
            "encoding": Encoding(code).name.lower().replace("_", "-"),
            "pieces": int((codes == code).sum()),
            "stored_bytes": int(lengths[codes == code].sum()),
        }
        for code in np.unique(codes).tolist()
    ]


def _packs(layout: VersionMap, distinct: npt.NDArray[np.intp]) -> list[dict[str, Any]]:
    packs, lengths = layout.pack[distinct], layout.length[distinct]
    used = np.bincount(packs, weights=lengths, minlength=len(layout.packs)).tolist()
    pieces = np.bincount(packs, minlength=len(layout.packs)).tolist()
    return [
        _place(ref) | {"size": ref.size, "used_bytes": int(size), "pieces": count}
        for ref, size, count in zip(layout.packs, used, pieces, strict=True)
    ]


def _place(ref: PackEntry) -> dict[str, Any]:
    return {"url": ref.url, "sha256": ref.sha256} if isinstance(ref, ExternalRef) else {"key": ref.key}


def _render(document: dict[str, Any]) -> list[str]:
    chain, parent = document["chain"], document["parent"]
    size, stored, manifest = (human(document[key]) for key in ("nbytes", "stored_bytes", "manifest_bytes"))
    commit = f"commit {document['seq']}, {plain(document['time'])}"
    lines = [
        f"step      {document['step']} of {document['branch']} ({commit})",
        f"root      {document['root']}",
        f"parent    {'none' if parent is None else f'commit {parent}'}",
        f"tensors   {len(document['tensors']):,}, {size} in {document['blocks']:,} blocks",
        f"stored    {stored} in {document['pieces']:,} pieces of {len(document['packs']):,} packs, "
        f"manifest {manifest}",
        f"chains    {chain['min']} to {chain['max']} pieces, {chain['mean']:.1f} on average",
    ]
    if document["metadata"]:
        text = json.dumps(document["metadata"])
        lines.append(f"metadata  {text if len(text) <= _MAX_METADATA else text[:_MAX_METADATA] + '...'}")
    lines += _section(
        [Column("encoding", left=True), Column("pieces"), Column("stored"), Column("share")],
        [
            [
                entry["encoding"],
                f"{entry['pieces']:,}",
                human(entry["stored_bytes"]),
                percent(entry["stored_bytes"], document["stored_bytes"]),
            ]
            for entry in document["encodings"]
        ],
    )
    lines += _section(
        [Column("pack", left=True), Column("size"), Column("used"), Column("pieces")],
        [
            [
                plain(entry.get("key") or entry["url"]),
                human(entry["size"]),
                percent(entry["used_bytes"], entry["size"]),
                f"{entry['pieces']:,}",
            ]
            for entry in document["packs"]
        ],
    )
    lines += _section(
        [Column("file", left=True), Column("size")],
        [[escape(entry["path"]), human(entry["size"])] for entry in document["files"]],
    )
    lines += _section(
        [
            *(Column(heading, left=True) for heading in ("tensor", "dtype", "shape")),
            *map(Column, ("size", "stored", "blocks", "chain")),
        ],
        [
            [
                escape(entry["name"]),
                entry["dtype"],
                "[" + ", ".join(map(str, entry["shape"])) + "]",
                human(entry["nbytes"]),
                human(entry["stored_bytes"]),
                f"{entry['blocks']:,}",
                "{min}/{mean:.1f}/{max}".format(**entry["chain"]),
            ]
            for entry in document["tensors"]
        ],
    )
    return lines


def _section(columns: list[Column], rows: list[list[str]]) -> list[str]:
    return ["", *table(columns, rows)] if rows else []
