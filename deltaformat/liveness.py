"""Which objects commits use: the fold of `objects_added` and `objects_dropped` (SPEC 12.6). No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deltaformat.history import History

__all__ = ["ObjectUse", "object_uses"]


@dataclass(frozen=True, slots=True)
class ObjectUse:
    """What the log says of an object that a valid commit names.

    Attributes:
        size: Its size, as stated.
        live: Whether a live commit uses it, or a branch's head, live or not: others may go on from there.
        retired_by: Where none does: the newest `retire` record of a commit that used it, from which its grace
            counts (DF-GC-02).
    """

    size: int
    live: bool
    retired_by: int | None


@dataclass(slots=True)
class _Event:
    """An object is added or dropped by the commit at `start`, for it and its descendants up to `end`."""

    start: int
    end: int
    added: bool
    holes: list[tuple[int, int]] = field(default_factory=list)

    def ranges(self) -> Iterable[tuple[int, int]]:
        """The descendants for which no later event decides."""
        start = self.start
        for first, last in self.holes:
            if start < first:
                yield start, first
            start = last
        if start < self.end:
            yield start, self.end


class _Tour:
    """The commits, each directly followed by all its descendants: so "descendants of" is a range."""

    def __init__(self, history: History) -> None:
        children: dict[int | None, list[int]] = {}
        for commit in history.commits.values():
            children.setdefault(commit.parent, []).append(commit.seq)
        self.start: dict[int, int] = {}
        self.end: dict[int, int] = {}
        order: list[int] = []
        stack = [(seq, False) for seq in reversed(children.get(None, []))]
        while stack:
            seq, left = stack.pop()
            if left:
                self.end[seq] = len(order)
                continue
            self.start[seq] = len(order)
            order.append(seq)
            stack.append((seq, True))
            stack.extend((child, False) for child in reversed(children.get(seq, [])))
        using = history.live | {head.seq for head in history.state.heads.values()}
        self._live = [0]
        for seq in order:
            self._live.append(self._live[-1] + (seq in using))
        # Level k holds the newest `retire` of every 2^k neighbours.
        self._retired = [[history.retired.get(seq, -1) for seq in order]]
        width = 1
        while 2 * width <= len(order):
            row = self._retired[-1]
            self._retired.append([max(row[i], row[i + width]) for i in range(len(row) - width)])
            width *= 2

    def live(self, start: int, end: int) -> int:
        """How many commits of a range are live, or a branch's head."""
        return self._live[end] - self._live[start]

    def retired_by(self, start: int, end: int) -> int:
        """The newest `retire` record of a range's commits."""
        level = (end - start).bit_length() - 1
        row = self._retired[level]
        return max(row[start], row[end - (1 << level)])


def object_uses(history: History) -> dict[str, ObjectUse]:
    """Every object that a valid commit names, by key.

    A commit uses its manifests. It uses any other object if the nearest commit that mentions it, itself or
    an ancestor, has added it. (An object that one commit both adds and drops is used: a collector must err on
    that side.)
    """
    tour = _Tour(history)
    sizes: dict[str, int] = {}
    events: dict[str, list[_Event]] = {}
    uses: dict[str, ObjectUse] = {}
    for commit in history.commits.values():
        start, end = tour.start[commit.seq], tour.end[commit.seq]
        mentioned = {ref.key: False for ref in commit.objects_dropped}
        mentioned.update((ref.key, True) for ref in commit.objects_added)
        for key, added in mentioned.items():
            events.setdefault(key, []).append(_Event(start, end, added))
        sizes.update((ref.key, ref.size) for ref in (*commit.objects_dropped, *commit.objects_added))
        for manifest in commit.manifests:
            sizes[manifest.key] = manifest.size
            events.setdefault(manifest.key, []).append(_Event(start, start + 1, True))
    for key, of_object in events.items():
        ranges = _used(of_object)
        live = any(tour.live(*found) for found in ranges)
        newest = max((tour.retired_by(*found) for found in ranges), default=-1)
        uses[key] = ObjectUse(sizes[key], live, None if live or newest < 0 else newest)
    return uses


def _used(events: list[_Event]) -> list[tuple[int, int]]:
    """The ranges of commits that use an object."""
    events.sort(key=lambda event: event.start)
    open_events: list[_Event] = []
    for event in events:
        while open_events and open_events[-1].end <= event.start:
            open_events.pop()
        if open_events:
            open_events[-1].holes.append((event.start, event.end))
        open_events.append(event)
    return [found for event in events if event.added for found in event.ranges()]
