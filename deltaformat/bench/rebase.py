"""How long chains may be: what a run of many steps costs under several policies, step by step.

All policies take the same states in lockstep, each into a store of its own in memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

import deltaformat as df
from deltaformat.bench.codecs import State, bits, same_bits
from deltaformat.bench.coding import LossyError
from deltaformat.bench.stores import in_memory
from deltaformat.bench.synthetic import SyntheticTraining
from deltaformat.plan import plan_fresh

__all__ = ["RebaseRow", "chain_policies", "measure_rebase", "synthetic_states", "trace_states"]

BUDGET = 64 << 20  # of a batch, as a reader has by default


@dataclass(frozen=True, slots=True)
class RebaseRow:
    """What a policy cost over a run.

    Attributes:
        policy: Its name.
        steps: Steps after the first commit.
        nbytes: Raw bytes of a state.
        first_bytes: Bytes of the first commit.
        uploaded: Bytes of all objects of all later commits: also what they add to storage while nothing is
            collected.
        own_bytes: Of those, the steps' own pieces.
        rebase_bytes: And those that replaced beginnings of chains.
        held_bytes: Objects that the newest version uses: what stays if all others are collected.
        cold_mean, cold_max: Bytes that a cold start at each step fetches: manifest and all pieces.
        follow_mean: Bytes that a follower fetches of packs a step.
        follow_ratio_max: Those over the step's own pieces, at most: above 1 where gaps are fetched along.
        manifest_mean, manifest_max: Bytes of a manifest.
        commit_s: Median seconds of a commit.
    """

    policy: str
    steps: int
    nbytes: int
    first_bytes: int
    uploaded: int
    own_bytes: int
    rebase_bytes: int
    held_bytes: int
    cold_mean: float
    cold_max: int
    follow_mean: float
    follow_ratio_max: float
    manifest_mean: float
    manifest_max: int
    commit_s: float


def chain_policies(lengths: tuple[int, ...] = (4, 8, 16, 32, 64)) -> dict[str, df.Policy]:
    """The default policy with each chain length, and the two that have names of their own."""
    chains = {f"chain {length}": df.Policy(max_chain=length, threads=1) for length in lengths}
    return chains | {"smallest": df.Policy.smallest(threads=1), "lightest": df.Policy.lightest(threads=1)}


def synthetic_states(weights: int, steps: int, *, lr: float = 3e-6) -> Iterator[State]:
    """The states of a synthetic training, from the first on."""
    training = SyntheticTraining(weights, lr=lr)
    yield training.state()
    for _ in range(steps):
        training.step()
        yield training.state()


def trace_states(place: str, steps: int) -> Iterator[State]:
    """The states of a trace's store, oldest first, at most `steps` + 1."""
    store = df.open(place)
    with store.version() as newest:
        branch = newest.branch
    commits = [record for record in reversed(store.log(branch)) if record.kind == "commit"]
    for record in commits[: steps + 1]:
        with store.version(seq=record.seq) as version:
            yield version.state_dict()


def measure_rebase(
    states: Iterator[State],
    policies: Mapping[str, df.Policy],
    *,
    block_bytes: int,
    report: Callable[[str], None],
) -> list[RebaseRow]:
    """Commit every state under every policy.

    Args:
        states: The run, from its first state on.
        policies: By name.
        block_bytes: Of the stores; small ones make many blocks, so that staggering shows.
        report: Told how far it is.

    Raises:
        LossyError: The newest version is not the last state.
    """
    runs = [_Run(name, policy, block_bytes) for name, policy in policies.items()]
    state: State = {}
    try:
        for step, given in enumerate(states):
            state = given
            report(f"re-basing: step {step}")
            for run in runs:
                run.commit(step, state)
        rows = [run.row() for run in runs]
        for run in runs:
            if not same_bits(bits(run.store.version().state_dict()), bits(state)):
                raise LossyError("what was read is not what was committed")
        return rows
    finally:
        for run in runs:
            run.writer.close()


class _Run:
    """One policy's store and what was seen of it."""

    def __init__(self, name: str, policy: df.Policy, block_bytes: int) -> None:
        self.name = name
        self.block_bytes = block_bytes
        self.store = df.create(in_memory(), block_bytes=block_bytes)
        self.writer = self.store.writer(policy=policy)
        self.infos: list[df.CommitInfo] = []
        self.cold: list[int] = []
        self.followed: list[int] = []

    def commit(self, step: int, state: State) -> None:
        info = self.writer.commit(step=step, tensors=state)
        self.infos.append(info)
        layout = self.store.version(seq=info.seq).map
        # Blocks may share pieces, and those are fetched once.
        pieces = np.unique(np.stack([layout.pack.astype(np.int64), layout.offset, layout.length]), axis=1)
        self.cold.append(int(pieces[2].sum()) + info.manifest_bytes)
        fresh = plan_fresh(layout, block_bytes=self.block_bytes, budget=BUDGET)
        self.followed.append(sum(batch.fetched for batch in fresh))

    def row(self) -> RebaseRow:
        first, *later = self.infos
        steps = list(zip(later, self.followed[1:], strict=True))
        held = self.store.version().map.objects()
        return RebaseRow(
            policy=self.name,
            steps=len(later),
            nbytes=first.nbytes,
            first_bytes=first.bytes_written,
            uploaded=sum(info.bytes_written for info in later),
            own_bytes=sum(info.payload_bytes for info in later),
            rebase_bytes=sum(info.rebase_bytes for info in later),
            held_bytes=sum(held.values()) + later[-1].manifest_bytes,
            cold_mean=statistics.mean(self.cold),
            cold_max=max(self.cold),
            follow_mean=statistics.mean(self.followed[1:]),
            follow_ratio_max=max(fetched / max(1, info.payload_bytes) for info, fetched in steps),
            manifest_mean=statistics.mean(info.manifest_bytes for info in later),
            manifest_max=max(info.manifest_bytes for info in later),
            commit_s=statistics.median(info.timings["total"] for info in later),
        )
