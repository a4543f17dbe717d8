"""The tables of `bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deltaformat.cli.output import Column, human, plain, table

__all__ = ["rebase", "render"]

_LEFT = {"coder", "input", "ratio", "what", "model", "policy", "end to end"}


def render(document: dict[str, Any]) -> list[str]:
    """All tables of a run, as lines."""
    profile, machine = document["profile"], document["machine"]
    lines = [
        f"deltaformat {document['deltaformat']}, {machine['engine']}; Python {machine['python']},"
        f" {machine['cpus']} CPUs; profile {profile['name']}; medians of {profile['rounds']} steps, in turn;"
        f" {document['seconds']:.0f} s in all",
    ]
    if document["peers"] is None:
        lines.append("without peers: they lie in the repository, in tools/bench/peers")
    for coding in document["inputs"]:
        lines += ["", *_coding(coding)]
    lines += ["", "whole commits and reads, in a synced directory; seconds", *_stores(document)]
    lines += ["", "parts of a step, one thread; milliseconds", *_parts(document["parts"])]
    lines += ["", f"seconds from end to end over a link, {document['main']}, one thread", *_links(document)]
    lines += ["", "manifests at full chains, and logs", *_shapes(document)]
    lines += ["", "ratios, one thread unless said", *_ratios(document["ratios"])]
    return lines


def rebase(document: dict[str, Any]) -> list[str]:
    """The table of chain lengths."""
    rows = document["rebase"]
    first = rows[0]
    title = (
        f"{first['steps']} steps of {human(first['nbytes'])}, {plain(str(document['source']))},"
        f" blocks of {document['block_bytes'] >> 10} KiB"
    )
    headings = (
        "policy", "uploaded", "own", "re-based", "newest holds", "cold mean", "cold max", "/ state",
        "follow mean", "max / own", "manifest", "max", "commit ms",
    )  # fmt: skip
    cells = [
        [
            row["policy"], human(row["uploaded"]), human(row["own_bytes"]), human(row["rebase_bytes"]),
            human(row["held_bytes"]), human(row["cold_mean"]), human(row["cold_max"]),
            f"{row['cold_max'] / row['nbytes']:.3f}", human(row["follow_mean"]),
            f"{row['follow_ratio_max']:.3f}", human(row["manifest_mean"]),
            human(row["manifest_max"]), f"{row['commit_s'] * 1e3:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return [title, *_table(headings, cells)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return table([Column(heading, left=heading in _LEFT) for heading in headings], rows)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed(nbytes: float, seconds: float | None) -> str:
    return "-" if not seconds else f"{nbytes / seconds / 1e9:.2f}"


def _coding(coding: dict[str, Any]) -> list[str]:
    title = (
        f"{plain(coding['title'])}: {coding['tensors']} tensors, {human(coding['nbytes'])},"
        f" {coding['density']:.3%} changed a step"
    )
    xor = next((row for row in coding["rows"] if not row["ours"] and row["encode_s"]), None)
    rows = []
    for row in sorted(coding["rows"], key=lambda row: (row["threads"], not row["ours"])):
        cells = [plain(row["name"]), str(row["threads"])]
        if row["absent"] is not None:
            rows.append([f"{cells[0]}: {plain(row['absent'])}", cells[1], *[""] * 6])
            continue
        rows.append([
            *cells, human(row["nbytes"]), _number(row["per_change"]),
            _speed(coding["nbytes"], row["encode_s"]), _speed(coding["nbytes"], row["apply_s"]),
            *(_number(xor and row[what] / xor[what], 2) for what in ("encode_s", "apply_s")),
        ])  # fmt: skip
    for model, bound in coding["bounds"].items():
        rows.append([f"entropy: {model}", "", human(bound * coding["changed"]), _number(bound), *[""] * 4])
    if not coding["bounds"]:
        rows.append(["entropy: says nothing where every change is another", *[""] * 7])
    headings = (
        "coder",
        "threads",
        "bytes",
        "B a change",
        "enc GB/s",
        "apply GB/s",
        "enc / XOR",
        "apply / XOR",
    )
    return [title, *_table(headings, rows)]


def _stores(document: dict[str, Any]) -> list[str]:
    names = ("first commit", "commit", "follow", "cold read", "open", "one row")
    rows = []
    for key, stores in document["stores"].items():
        for store in stores:
            seconds = store["seconds"]
            rows.append([
                plain(key), plain(store["mode"]), str(store["threads"]), _number(store["per_change"]),
                _number(store["payload_per_change"]), _number(store["full_ratio"]),
                *(f"{seconds[name]:.4f}" for name in names),
                *(f"{seconds[f'commit: {name}']:.4f}" for name in ("encode", "manifest", "record")),
                _number(store["peer_encode_s"], 4), _number(store["peer_apply_s"], 4),
            ])  # fmt: skip
    headings = (
        "what", "mode", "threads", "B a change", "payload", "full / raw", *names,
        "of commit: encode", "manifest", "record", "XOR encode", "XOR apply",
    )  # fmt: skip
    return _table(headings, rows)


def _parts(parts: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    rows, names = [], list[str]()
    for key, modes in parts.items():
        for mode, seconds in modes.items():
            names = list(seconds)
            rows.append(
                [f"{plain(key)}, {plain(mode)}", *(f"{value * 1e3:.2f}" for value in seconds.values())]
            )
    return _table(("what", *names), rows)


def _links(document: dict[str, Any]) -> list[str]:
    links = document["links"]
    if not links:
        return ["nothing was measured"]
    headings = ("end to end", "bytes", "encode", "apply", *(f"{link} Gbit/s" for link in links[0]["seconds"]))
    rows = [
        [
            plain(row["name"]), human(row["bytes"]), _number(row["encode_s"]), _number(row["apply_s"]),
            *(_number(value) for value in row["seconds"].values()),
        ]
        for row in links
    ]  # fmt: skip
    return _table(headings, rows)


def _shapes(document: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            cost["shape"], f"{cost['tensors']:,}", human(cost["nbytes"]), f"{cost['blocks']:,}",
            f"{cost['pieces']:,}", human(cost["delta_bytes"]), human(cost["manifest_bytes"]),
            f"{cost['ratio']:.3%}", *(_number(cost[f"{what}_s"]) for what in ("encode", "decode", "root")),
        ]
        for cost in document["manifests"]
    ]  # fmt: skip
    headings = (
        "model", "tensors", "weights", "blocks", "pieces", "a step", "manifest", "of the step",
        "write s", "parse s", "root s",
    )  # fmt: skip
    yield from _table(headings, rows)
    for many in document["many"]:
        count = many["tensors"]
        each = ", ".join(
            f"{name} {many[name]:.3f} s ({many[name] / count * 1e6:.0f} ms a 1000)"
            for name in ("first commit", "next commit", "open")
        )
        yield f"{count:,} small tensors: {each}"
    log = document["log"]
    yield (
        f"a log of {log['commits']:,} commits: a record {log['record bytes']:.0f} B, a commit"
        f" {log['commit'] * 1e3:.2f} ms, opening the newest {log['open newest'] * 1e3:.2f} ms,"
        f" step 1 {log['open step 1'] * 1e3:.2f} ms"
    )
    memory = document["memory"]
    if memory is None:
        yield "memory: not measured; it needs Linux's /proc"
    else:
        peaks = ", ".join(f"{name} {human(memory[name])}" for name in ("writer", "cold read", "follow"))
        yield f"memory above a state of {human(memory['state'])}: {peaks}"


def _ratios(ratios: list[dict[str, Any]]) -> list[str]:
    rows = [[plain(row["input"]), plain(row["name"]), f"{row['value']:.3f}", row["unit"]] for row in ratios]
    return _table(("input", "ratio", "value", ""), rows)
