"""What runs in other processes in the tests of buckets, started by "spawn": writers that race, followers that
check every bit.
"""

import random
import time
from functools import partial

import numpy as np
from tinystore import content, truth, weights

import deltaformat as df
from deltaformat import buckets
from deltaformat.errors import CommitUnknown, ConflictError, StoreError
from deltaformat.retrying import Retry

POLICY = df.Policy(max_chain=4)
SEEDS = {"main": 0, "left": 1, "middle": 2, "right": 3}
"""The weights of a branch's steps follow from its seed and the step."""


def hasten():
    """Pause a tenth as long between tries as users' programs do: everything is a loopback away here."""
    buckets.Retry = partial(Retry, first=0.01, longest=0.3, busy=0.01)


def race(url, options, own, commits, barrier):
    """Commit so many times: to a branch of its own, and now and then to main, which all take from each other.

    Returns:
        (seq, branch, step) of each commit acknowledged, (branch, step) of those whose outcome stayed unknown,
        and how many conflicts were told.
    """
    hasten()
    rng = random.Random(own)
    store = df.open(url, storage_options=options)
    acknowledged, unknown, conflicts = [], [], 0
    barrier.wait()
    while len(acknowledged) < commits:
        branch = "main" if rng.random() < 0.4 else own
        try:
            with store.writer(branch, policy=POLICY) as writer:
                head = store.branches()[branch].step
                step = 0 if head is None else head + 1
                for _ in range(rng.randint(1, 8)):
                    try:
                        info = writer.commit(
                            step=step, tensors=weights(step, SEEDS[branch]), metadata={"of": own}
                        )
                    except CommitUnknown:
                        unknown.append((branch, step))
                        break
                    assert info.created, (branch, step)
                    acknowledged.append((info.seq, branch, step))
                    step += 1
                    if len(acknowledged) == commits:
                        break
        except ConflictError:
            assert branch == "main", "nobody else writes to a branch of one's own"
            conflicts += 1
            time.sleep(0.02 + rng.random() * 0.1)
        except CommitUnknown:
            continue  # of the claim: take it again
        except StoreError as error:
            if "the store failed" not in error.message:
                raise
    return acknowledged, unknown, conflicts


def follow(url, options, branch, mirror, last, barrier):
    """Follow a branch to step `last`, through a mirror of one's own or one that is shared; every version is
    compared bit by bit.

    Returns:
        The steps that were seen, in order.
    """
    hasten()
    store = df.open(url, storage_options=options)
    seen = []
    live = {name: np.zeros_like(np.array(tensor)) for name, tensor in weights(0, SEEDS[branch]).items()}
    with store.follower(branch=branch, mirror=mirror, framework="np") as follower:
        barrier.wait()
        while not seen or seen[-1] < last():
            try:
                staged = follower.stage()
            except df.errors.MissingError:
                staged = None  # nothing there yet
            except StoreError as error:
                if "the store failed" not in error.message:
                    raise
                continue
            if staged is None:
                time.sleep(0.02)
                continue
            staged.apply_to(live)
            assert content(live) == truth(staged.step, SEEDS[branch]), f"step {staged.step} differs"
            staged.commit()
            seen.append(staged.step)
    return seen


def follow_until(url, options, branch, mirror, last, done, barrier):
    """`follow`, until the event `done` is set and the head it leaves is reached."""

    def wanted():
        return last.value if done.is_set() else 1 << 60

    return follow(url, options, branch, mirror, wanted, barrier)
