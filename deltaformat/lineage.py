"""Which versions lie between two commits, and what they change: the maps that catching up needs (SPEC 13).

Where that cannot be told (another lineage, a collected version, too many for the walk or the memory budget),
every block is read anew.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaformat.catchup import compose, unread, untouched
from deltaformat.context import Context, load_map
from deltaformat.errors import ErrorCode, MalformedError, MissingError
from deltaformat.fields import check_step
from deltaformat.records import Commit
from deltaformat.versionmap import VersionMap

__all__ = ["MAX_HOPS", "Held", "catch_up", "check_choice", "find_commit"]

MAX_HOPS = 64
"""Versions to walk at most; beyond, what they change comes to as much as the weights."""

CONCURRENT_MAPS = 8

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A version whose content, or a part of it, is at hand.

    Attributes:
        commit: Its record.
        version: Its whole map.
        usable: Per block of that, whether its content is at hand and has its digest.
    """

    commit: Commit
    version: VersionMap
    usable: Mask


def catch_up(
    context: Context, held: Held | None, commit: Commit, whole: VersionMap, target: VersionMap
) -> VersionMap:
    """Make the map of `target` as if its parent were what is held (see `compose`).

    Args:
        context: The store.
        held: What is at hand.
        commit: The commit to go to.
        whole: Its map.
        target: That, or some of its tensors.

    Raises:
        CorruptError, MalformedError, InconsistentError, StoreError: as for opening a version; one between.
    """
    if held is None or not held.usable.any():
        return unread(target)
    paths = _paths(context, held.commit, commit)
    if paths is None:
        return unread(target)
    down, up = paths
    block_bytes = context.descriptor.block_bytes
    try:
        between = [*down[1:-1], *(up if len(down) > 1 else up[1:])]
        found = _load_maps(context, [entry for entry in between if entry.seq != commit.seq])
        if found is None:
            return unread(target)
        found[commit.seq] = whole
        maps = [found[entry.seq] for entry in up[1:]]
        if len(down) == 1:
            base, usable = held.version, held.usable
        else:
            base = found[up[0].seq]
            passed = [found[entry.seq] for entry in down[1:-1]]
            origin, at = untouched(base, [*passed, held.version], block_bytes=block_bytes)
            usable = np.zeros(base.block_count, np.bool_)
            usable[origin[held.usable[at]]] = True
    except MissingError:  # collected: what it changed is not known any more
        return unread(target)
    if len(maps) == 1 and target is whole and usable.all():
        return target
    return compose(target, maps, base, usable, block_bytes=block_bytes)


def _load_maps(context: Context, commits: list[Commit]) -> dict[int, VersionMap] | None:
    """Maps by seq, several fetched at a time; None where they would take more than the memory budget."""
    nbytes = sum(ref.content_size for entry in commits for ref in entry.manifests)
    if len(commits) > 1 and nbytes > context.rebuilder.memory_budget:
        return None
    if len(commits) < 2:
        return {entry.seq: load_map(context, entry) for entry in commits}
    with ThreadPoolExecutor(CONCURRENT_MAPS) as pool:
        maps = list(pool.map(lambda entry: load_map(context, entry), commits))
    return {entry.seq: version for entry, version in zip(commits, maps, strict=True)}


def _paths(context: Context, start: Commit, target: Commit) -> tuple[list[Commit], list[Commit]] | None:
    """From the nearest common ancestor to `start`, and to `target`, ends included; None without one."""
    down, up = [start], [target]
    while down[-1].seq != up[-1].seq:
        if len(down) + len(up) > MAX_HOPS + 2:
            return None
        longer = (
            down
            if down[-1].depth > up[-1].depth or (down[-1].depth == up[-1].depth and down[-1].seq > up[-1].seq)
            else up
        )
        parent = _parent(context, longer[-1])
        if parent is None:
            return None
        longer.append(parent)
    return down[::-1], up[::-1]


def _parent(context: Context, commit: Commit) -> Commit | None:
    if commit.parent is None or commit.parent >= commit.seq:
        return None
    record = context.log.record(commit.parent)
    return record if isinstance(record, Commit) else None


def check_choice(step: int | None, seq: int | None) -> tuple[int | None, int | None]:
    """Check what a user asks for: a step, a seq, or neither.

    Raises:
        MalformedError: Both, or what is no step or seq.
    """
    if step is not None and seq is not None:
        raise MalformedError(ErrorCode.INPUT_INVALID, "give one of step and seq", where="version")
    return None if step is None else check_step(step), None if seq is None else check_step(seq)


def find_commit(
    context: Context, branch: str, *, step: int | None, seq: int | None, above: int | None
) -> Commit | None:
    """Find the commit to go to.

    Args:
        context: The store.
        branch: The branch.
        step: A step of its lineage.
        seq: A commit's number, of any branch.
        above: Without `step` and `seq`, the newest is wanted only if its seq is above this.

    Returns:
        The commit; None where the newest is not above.

    Raises:
        MissingError: No such branch (branch-missing), step or seq (version-missing).
    """
    log = context.log
    if seq is not None:
        return log.judged(seq)
    heads = log.tail().heads
    head = heads.get(branch)
    if head is None:
        known = ", ".join(sorted(heads)[:10]) or "none yet"
        raise MissingError(ErrorCode.BRANCH_MISSING, f"no branch {branch!r}; there are: {known}", where="log")
    if step is not None:
        return log.find_step(head, step)
    if head.seq is None or (above is not None and head.seq <= above):
        return None
    return log.judged(head.seq)
