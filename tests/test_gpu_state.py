"""Roots and checks of states where they are (DF-DIG-01, DF-DIG-03)."""

import ml_dtypes
import numpy as np
import pytest
import torch
from writertools import BLOCK, make, state, trained

import deltaformat.torch
from deltaformat.errors import CorruptError, InconsistentError, MalformedError, UnsupportedError
from deltaformat.gpu.transfer import traffic


def as_torch(tensors):
    return {
        name: torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        for name, array in tensors.items()
    }


@pytest.fixture(params=["xxh3-128", "blake3-256"])
def committed(request):
    store, tensors = make(digest=request.param), state(1)
    tensors |= {"none": np.empty((0, 3), np.float32), "scalar": np.array(3.5, np.float64)}
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
    return store.version(step=0), tensors, request.param


def test_the_root_of_a_state(committed):
    """The same weights have the same root, whoever computes it."""
    version, tensors, digest = committed
    given = {
        name: array if array.dtype != ml_dtypes.bfloat16 else as_torch({name: array})[name]
        for name, array in tensors.items()
    }
    for engine in ("auto", "torch"):
        found = deltaformat.torch.root(given, block_bytes=BLOCK, digest=digest, engine=engine)
        assert found == version.root
        assert version.verify(given, engine=engine) == version.root


def test_only_digests_cross():
    store, tensors = make(), state(2, tensors=30)
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
    version = store.version(step=0)
    before = traffic.snapshot()
    assert version.verify(as_torch(tensors), engine="torch") == version.root
    crossed = traffic.snapshot() - before
    assert crossed == {("down", "digests"): 16 * version.map.block_count, ("host", "waits"): 1}


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_what_differs_is_named(engine):
    store, tensors = make(), state(3)
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
    version = store.version(step=0)
    given = as_torch(tensors)
    given["w2"].view(torch.int16).reshape(-1)[200] ^= 1
    with pytest.raises(CorruptError, match=r"w2.*block 1") as caught:
        version.verify(given, engine=engine)
    assert "blocks" not in str(caught.value)
    given["w2"].view(torch.int16).reshape(-1)[5] ^= 1
    with pytest.raises(CorruptError, match=r"2 blocks do"):
        version.verify(given, engine=engine)


def test_sets_dtypes_and_shapes():
    store, tensors = make(), state(4)
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
    version, given = store.version(step=0), as_torch(tensors)
    with pytest.raises(InconsistentError, match=r"lacks 'w0' and has besides 'more'"):
        version.verify({name: t for name, t in given.items() if name != "w0"} | {"more": given["w1"]})
    with pytest.raises(InconsistentError, match=r"lacks 'w0' and 1 more"):
        version.verify({name: given[name] for name in ("w2", "w3")})
    with pytest.raises(InconsistentError, match=r"w1.*F16 of shape \[24, 20\].*BF16"):
        version.verify(given | {"w1": given["w1"].view(torch.float16)})
    with pytest.raises(InconsistentError, match=r"BF16 of shape \[480\].*BF16 of shape \[24, 20\]"):
        version.verify(given | {"w1": given["w1"].reshape(-1)})


def test_another_version_is_not_this_one():
    store, tensors = make(), state(5)
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
        writer.commit(step=1, tensors=trained(tensors))
    with pytest.raises(CorruptError, match="not this version"):
        store.version(step=0).verify(as_torch(trained(tensors)))
    assert store.version(step=1).verify(as_torch(trained(tensors)), engine="torch")


def test_refusals():
    tensor = torch.zeros(3)
    with pytest.raises(MalformedError, match="block_bytes"):
        deltaformat.torch.root({"w": tensor}, block_bytes=5)
    with pytest.raises(UnsupportedError, match="digest"):
        deltaformat.torch.root({"w": tensor}, digest="md5")
    with pytest.raises(UnsupportedError, match=r"'w'.*meta"):
        deltaformat.torch.root({"w": torch.empty(3, device="meta")})
    with pytest.raises(UnsupportedError, match=r"'w'.*dense"):
        deltaformat.torch.root({"w": torch.eye(3).to_sparse()}, engine="torch")
    with pytest.raises(MalformedError, match="no tensor"):
        deltaformat.torch.root({"w": "text"})
