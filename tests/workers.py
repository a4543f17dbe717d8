"""What runs in other processes in test_concurrency.py, started by "spawn": no pytest here."""

import random
import time

from tinystore import weights

import deltaformat as df
from deltaformat.errors import ConflictError, ErrorCode

POLICY = df.Policy(max_chain=4)


def compete(directory, name, commits, barrier):
    """Commit so many times to main, taking it again whenever another has taken it.

    Returns:
        (seq, step) of each commit acknowledged; of every conflict, whether its code is right and what
        it says.
    """
    store, rng = df.open(directory), random.Random(name)
    acknowledged, conflicts = [], []
    barrier.wait()
    while len(acknowledged) < commits:
        with store.writer(policy=POLICY) as writer:
            try:
                for _ in range(rng.randint(2, 20)):
                    head = store.branches()["main"].step
                    step = 0 if head is None else head + 1
                    info = writer.commit(
                        step=step, tensors=weights(step), metadata={"of": name, "n": len(acknowledged)}
                    )
                    assert info.created
                    acknowledged.append((info.seq, step))
                    if len(acknowledged) == commits:
                        break
            except ConflictError as error:
                conflicts.append((error.code is ErrorCode.BRANCH_HELD, str(error)))
                time.sleep(0.02 + rng.random() * 0.15)
    return acknowledged, conflicts


def write_branch(directory, branch, commits, barrier):
    """Commit so many steps to a branch of its own; returns seqs."""
    store = df.open(directory)
    seed = sum(branch.encode())
    with store.writer(branch, policy=POLICY) as writer:
        barrier.wait()
        return [writer.commit(step=step, tensors=weights(step, seed)).seq for step in range(commits)]


def stage_share(directory, ticket, step, number, of):
    """Stage every so-manieth tensor of a step; `shared` is everybody's."""
    stager = df.open(directory).stager(ticket, policy=POLICY)
    tensors = weights(step)
    names = [name for i, name in enumerate(sorted(tensors)) if i % of == number or name == "frozen"]
    return stager.stage(step=step, tensors={name: tensors[name] for name in names}).to_bytes()
