"""What runs in other processes in test_mirror.py and test_sync.py: no pytest here."""

import time
from functools import cache

import ml_dtypes
import numpy as np

import deltaformat as df
from deltaformat.blocks import name_bytes
from deltaformat.digests import digest_blocks, get_digest, tensor_leaf, version_root
from deltaformat.tensors import to_host

BLOCK = 4096


TENSORS = 12


@cache
def _bits(step):
    rng = np.random.default_rng(step)
    if step == 0:
        values = rng.standard_normal((TENSORS, 64, 256), np.float32) * 0.02
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    bits = _bits(step - 1).copy()
    bits.reshape(-1)[rng.integers(0, bits.size, 300 * TENSORS)] += 1
    return bits


def trained(step):
    """The weights of a step: enough that to write them takes a while, changed in every block."""
    state = {}
    for number, bits in enumerate(_bits(step).copy()):
        state[f"layers.{number}.weight"] = bits.view(ml_dtypes.bfloat16)
    state["step"] = np.array(step, np.int64)
    return state


def live_for():
    """Live weights of no version."""
    return {name: np.zeros_like(tensor) for name, tensor in trained(0).items()}


def make_store(path, steps):
    """A store in a directory with so many steps."""
    store = df.create(path, block_bytes=BLOCK)
    with store.writer(policy=df.Policy(max_chain=4)) as writer:
        for step in range(steps):
            writer.commit(step=step, tensors=trained(step), files={"config.json": b'{"step": %d}' % step})
    return store


def root_of(state, store):
    """The root that these bytes give."""
    algorithm = get_digest(store.digest)
    leaves = []
    for name, tensor in state.items():
        host = to_host(name, tensor)
        digests = digest_blocks(host.data, store.block_bytes, algorithm)
        leaves.append((name_bytes(name), tensor_leaf(name, host.dtype, host.shape, digests)))
    return version_root(store.digest, store.block_bytes, leaves)


def follow_until(path, mirror, whole):
    """Follow a mirror until the last step; with `whole`, read everything in place each time.

    Returns:
        The steps seen, and how many of them did not have their root.
    """
    store = df.open(path)
    seen, wrong = [], 0
    live = live_for()
    follower = store.follower(mirror=mirror, framework="np")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and 11 not in seen:
        if whole:
            follower.close()
            follower = store.follower(mirror=mirror, framework="np")
        staged = follower.stage()
        if staged is None:
            continue
        staged.apply_to(live)
        staged.commit()
        seen.append(staged.step)
        wrong += root_of(live, store) != staged.root
    follower.close()
    return seen, wrong
