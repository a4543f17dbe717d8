"""Small stores, states that change as in training, and what a version must read back as."""

import itertools

import ml_dtypes
import numpy as np

import deltaformat as df
from deltaformat.storage import open_storage

BLOCK = 256
numbers = itertools.count()


def memory():
    return open_storage(f"memory://writer-{next(numbers)}", create=True)


def make(storage=None, **options):
    return df.create(storage or memory(), block_bytes=BLOCK, **options)


def bf16(rng, *shape):
    return rng.integers(0, 1 << 16, shape, np.uint16).view(ml_dtypes.bfloat16)


def state(seed, tensors=4):
    rng = np.random.default_rng(seed)
    return {f"w{i}": bf16(rng, 24, 20) for i in range(tensors)}


def trained(tensors, seed=0, changes=3):
    """The tensors after a step that changes a few weights of each."""
    rng = np.random.default_rng(seed)
    after = {}
    for name, array in tensors.items():
        words = array.view(np.uint16).copy()
        words.reshape(-1)[rng.integers(0, words.size, changes)] += 1
        after[name] = words.view(array.dtype)
    return after


def raw(tensors):
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in tensors.items()}


def reads(version, expected):
    assert raw(version.state_dict()) == raw(expected)


def kinds(store):
    return [record.kind for record in store.log()]


def put_keys(watched, prefix=""):
    return [call.key for operation in ("put", "create") for call in watched.of(operation, prefix)]


def check_follow(store, before, step, expected):
    previous = store.version(step=before)
    assert raw(store.version(step=step).follow(previous, previous.state_dict())) == raw(expected)
