"""The figures of `bench`, by matplotlib."""

from __future__ import annotations

from typing import Any

__all__ = ["draw"]

_OURS, _THEIRS = "#1f5fa8", "#b8b8b8"


def draw(document: dict[str, Any], path: str) -> None:
    """Draw a run, or a comparison of chain lengths, into a file whose ending says its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    if "rebase" in document:
        _draw_rebase(document["rebase"], figure)
    else:
        left, right = figure.subplots(1, 2)
        coding = next(coding for coding in document["inputs"] if coding["key"] == document["main"])
        _draw_sizes(coding, left)
        _draw_links(document["links"], right)
    figure.savefig(path, dpi=150)


def _draw_sizes(coding: dict[str, Any], axes: Any) -> None:
    """Bytes a changed weight of all that send changes, with the bounds as lines."""
    rows = [row for row in coding["rows"] if row["threads"] == 1 and (row["per_change"] or 1e9) < 20]
    rows.sort(key=lambda row: -row["per_change"])
    colours = [_OURS if row["ours"] else _THEIRS for row in rows]
    bars = axes.barh([row["name"] for row in rows], [row["per_change"] for row in rows], color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    for (model, bound), style in zip(coding["bounds"].items(), (":", "--", "-"), strict=False):
        axes.axvline(bound, color="#c0392b", linestyle=style, linewidth=1, label=f"entropy: {model}")
    if coding["bounds"]:
        axes.legend(loc="upper right", fontsize=8)
    axes.set_xlabel("bytes a changed weight")
    axes.set_title(f"{coding['title']}\n{coding['density']:.2%} changed", fontsize=10)


def _draw_links(links: list[dict[str, Any]], axes: Any) -> None:
    """Seconds from end to end over the speed of the link."""
    for row in links:
        ours = row["name"].startswith("deltaformat")
        x, y = [float(link) for link in row["seconds"]], list(row["seconds"].values())
        axes.plot(x, y, "o-" if ours else "s--", linewidth=2 if ours else 1, markersize=4, label=row["name"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("link, Gbit/s")
    axes.set_ylabel("seconds: encode + transfer + decode")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1))
    axes.grid(alpha=0.3)


def _draw_rebase(rows: list[dict[str, Any]], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    names = [row["policy"] for row in rows]
    own = [row["own_bytes"] / 1e6 for row in rows]
    left.bar(names, own, color=_OURS, label="steps' own pieces")
    left.bar(names, [row["rebase_bytes"] / 1e6 for row in rows], bottom=own, color=_THEIRS, label="re-bases")
    left.set_ylabel("MB uploaded")
    left.legend()
    right.bar(names, [row["cold_max"] / row["nbytes"] for row in rows], color=_THEIRS, label="at most")
    right.bar(names, [row["cold_mean"] / row["nbytes"] for row in rows], color=_OURS, label="mean")
    right.set_ylabel("a cold start, of a raw state")
    right.legend()
