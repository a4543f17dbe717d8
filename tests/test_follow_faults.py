"""Followers and synced directories after the rarer accidents: collected versions, full disks, forks, slow
readers."""

import os
from datetime import timedelta

import numpy as np
import pytest
from tinystore import BLOCK, DictStorage, content, truth, weights

import deltaformat as df

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX locks")


def arrays(seed=0):
    return {name: np.array(tensor) for name, tensor in weights(0, seed).items()}


def take(follower, live, **options):
    staged = follower.stage(**options)
    staged.apply_to(live)
    staged.commit()
    return staged


def committed(store, steps, **options):
    with store.writer(**options) as writer:
        return [writer.commit(step=step, tensors=weights(step)) for step in steps]


def collect(storage, store):
    for _ in range(2):
        storage.advance(hours=1)
        store.gc(keep_last=1, grace=timedelta(0), dry_run=False)


@pytest.mark.parametrize("restarted", [True, False])
def test_a_version_that_was_rewound_and_collected(tmp_path, restarted):
    """A new process goes to the branch's head, though its seq is lower: nothing else is there. One that has
    that version live stays where it is."""
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    committed(store, range(4))
    mirror = f"file:{tmp_path / 'm'}"
    live = arrays()
    follower = store.follower(mirror=mirror, framework="np")
    assert take(follower, live).step == 3
    with store.writer(resume_from=1):
        pass
    collect(storage, store)
    if restarted:
        follower.close()
        follower, live = store.follower(mirror=mirror, framework="np"), arrays(3)
        assert take(follower, live).step == 1
        assert content(live) == truth(1)
    assert follower.stage() is None
    committed(store, [2])
    assert take(follower, live).step == 2
    assert content(live) == truth(2)
    follower.close()
