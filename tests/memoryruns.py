"""What test_memory.py measures, each in a process of its own: `python memoryruns.py RUN DIRECTORY` prints
JSON.
"""

import gc
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil

import deltaformat as df

MB = 10**6
TENSORS = 15
ELEMENTS = 10 * MB  # of bf16: 20 MB a tensor, 300 MB in all


def tile():
    """20 MB that compress like weights: random mantissas and signs, few exponents."""
    rng = np.random.default_rng(0)
    bits = np.frombuffer(rng.bytes(2 * ELEMENTS), np.uint16) & 0x80FF
    return bits | (0x3C00 - (rng.integers(0, 9, ELEMENTS, np.uint8).astype(np.uint16) << 7))


def stream(base, step):
    """The tensors of a step, one at a time and in one buffer: 1 % of the elements have moved since the step
    before.
    """
    buffer = np.empty_like(base)
    for number in range(TENSORS):
        np.bitwise_xor(base, np.uint16(number), out=buffer)
        for moved in range(1, step + 1):
            buffer[(moved * 37 + number) % 100 :: 100] += np.uint16(1)
        yield f"layer.{number}.weight", buffer.view(ml_dtypes.bfloat16)


def rss():
    return psutil.Process().memory_info().rss


def peak():
    """The most this program had. (`getrusage` counts in what its parent had when it started this process.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def warm_up():
    """Import what the first commit would import, and let pools and threads come to be."""
    with df.create("memory://warm", block_bytes=1 << 16).writer() as writer:
        for step in range(2):
            writer.commit(step=step, tensors={"x": np.arange(100_000) + step})
    df.open("memory://warm").version().state_dict()
    gc.collect()


def streamed(directory):
    """Four commits of a stream, two by a writer that has to read back what it needs."""
    base = tile()
    with df.create(directory).writer() as writer:
        start = rss()
        peaks = []
        for step in range(3):
            writer.commit(step=step, tensors=stream(base, step))
            peaks.append(peak() - start)
    writer = None
    gc.collect()
    with df.open(directory).writer() as writer:
        info = writer.commit(step=3, tensors=stream(base, 3))
        peaks.append(peak() - start)
    assert info.read_bytes > 250 * MB
    return {"peaks": peaks}


def dense(base, step, count):
    """A state in which every element moves at every step."""
    buffer = np.empty_like(base)
    for number in range(count):
        np.bitwise_xor(base, np.uint16(number), out=buffer)
        for shift in range(1, step + 1):
            buffer += (base >> shift) & 3
        yield f"layer.{number}.weight", buffer.view(ml_dtypes.bfloat16)


def rebased(directory):
    """Chains that are full: every commit reads all blocks back and replaces their chains. 160 MB."""
    base, count = tile(), 8
    with df.create(directory).writer(policy=df.Policy(max_chain=2)) as writer:
        writer.commit(step=0, tensors=dense(base, 0, count))
        start = rss() - count * 2 * ELEMENTS  # the baseline is there already
        peaks = []
        for step in range(1, 4):
            info = writer.commit(step=step, tensors=dense(base, step, count))
            peaks.append(peak() - start)
    assert info.rebase_bytes > 50 * MB
    return {"peaks": peaks}


def mapping_in_background(directory):
    """`block=False`: one more copy while the commit is in flight."""
    base = tile()
    state = {name: tensor.copy() for name, tensor in stream(base, 0)}
    start = rss()
    peaks = []
    with df.create(directory).writer() as writer:
        for step in range(2):
            for tensor in state.values():
                tensor.view(np.uint16)[step::100] += np.uint16(1)
            future = writer.commit(step=step, tensors=state, block=False)
            for tensor in state.values():
                tensor.view(np.uint16)[:100] += np.uint16(
                    1
                )  # after it has returned, the caller's memory is the caller's
            future.result()
            peaks.append(peak() - start)
    return {"peaks": peaks}


def reading(directory):
    """A state is read whole, under a budget of 64 MiB."""
    base = tile()
    with df.create(directory).writer() as writer:
        writer.commit(step=0, tensors=stream(base, 0))
        writer.commit(step=1, tensors=stream(base, 1))
    return {}


def reading_measured(directory):
    """The second half of `reading`, in a process that has not written."""
    start = rss()
    with df.open(directory, memory_budget=64 << 20).version() as version:
        state = version.state_dict()
        most = peak() - start
    first = next(stream(tile(), 1))[1]
    assert np.array_equal(state["layer.0.weight"].view(np.uint16), first.view(np.uint16))
    return {"peaks": [most]}


def many(directory):
    """Fifty commits of a small state."""
    rng = np.random.default_rng(1)
    state = {f"w{i}": rng.integers(0, 1 << 16, 500_000, np.uint16) for i in range(4)}
    sizes = []
    with df.create(directory, block_bytes=1 << 16).writer(policy=df.Policy(max_chain=4)) as writer:
        for step in range(50):
            for tensor in state.values():
                tensor[rng.integers(0, tensor.size, 2_000)] += np.uint16(1)
            writer.commit(step=step, tensors=state)
            gc.collect()
            sizes.append(rss())
    return {"growth": max(sizes[5:]) - sizes[5], "late": sizes[-1] - sizes[25]}


def hashing(_):
    """Torch hashes 64 tensors, none a whole block, on the CPU: the peak above the tensors themselves."""
    import torch

    from deltaformat.gpu import hash_blocks

    size = 1 << 20
    tensors = [torch.ones(size - 16, dtype=torch.uint8) for _ in range(64)]
    hash_blocks(tensors[0], block_bytes=size, engine="torch")
    start = rss()
    peaks = []
    for algorithm in ("xxh3-128", "blake3-256"):
        hash_blocks(tensors, block_bytes=size, algorithm=algorithm, engine="torch")
        peaks.append(peak() - start)
    return {"peaks": peaks}


RUNS = {
    run.__name__: run
    for run in (streamed, rebased, mapping_in_background, reading, reading_measured, many, hashing)
}

if __name__ == "__main__":
    warm_up()
    print(json.dumps(RUNS[sys.argv[1]](sys.argv[2])))
