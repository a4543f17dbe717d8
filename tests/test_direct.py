"""Raw blocks of a local store are read to where they go: the same bytes, the same errors, fewer copies."""

import os

import numpy as np
import pytest
from watching import Wrapper
from writertools import bf16, raw, reads

import deltaformat as df
from deltaformat import rebuild
from deltaformat.errors import CorruptError, ErrorCode, MissingError
from deltaformat.localstorage import LocalStorage
from deltaformat.storage import ReadsInto

BLOCK = 64 << 10


class Counting(LocalStorage):
    """Counts what goes either way."""

    def __init__(self, path, **options):
        super().__init__(path, **options)
        self.direct, self.fetched = 0, 0

    def read_into(self, key, start, out):
        self.direct += out.size
        super().read_into(key, start, out)

    def get_ranges(self, key, ranges):
        self.fetched += sum(length for _, length in ranges)
        return super().get_ranges(key, ranges)


def states():
    rng = np.random.default_rng(5)
    first = {"a": bf16(rng, 300, 500), "b": bf16(rng, 7), "c": bf16(rng, 128, 256)}
    second = {name: array.copy() for name, array in first.items()}
    second["a"].view(np.uint16)[::3, ::40] += np.uint16(1)
    return first, second


@pytest.fixture
def store(tmp_path):
    first, second = states()
    storage = Counting(str(tmp_path / "store"), create=True)
    made = df.create(storage, block_bytes=BLOCK)
    with made.writer() as writer:
        writer.commit(step=0, tensors=first)
        writer.commit(step=1, tensors=second)
    storage.direct = storage.fetched = 0
    return storage


@pytest.mark.parametrize("threads", [1, 3])
def test_raw_blocks_are_not_copied_twice(store, threads):
    for step, expected in enumerate(states()):
        store.direct = store.fetched = 0
        with df.open(store, threads=threads).version(step=step) as version:
            reads(version, expected)
        # Whole blocks, each once; the short last block of `a`, tensor `b` and the changes are fetched.
        assert store.direct == sum(array.nbytes // BLOCK * BLOCK for array in expected.values())
        assert 0 < store.fetched < 3 * BLOCK


def test_a_follower_reads_new_blocks_so(store):
    first, second = states()
    opened = df.open(store)
    with opened.writer() as writer:
        second["d"] = bf16(np.random.default_rng(6), 256, 256)
        writer.commit(step=2, tensors=second, allow_set_change=True)
    store.direct = 0
    with opened.version(step=1) as before, opened.version(step=2) as after:
        state = after.follow(before, before.state_dict())
    assert raw(state) == raw(second)
    assert store.direct == second["d"].nbytes + sum(a.nbytes // BLOCK * BLOCK for a in first.values())


def test_other_storages_need_not(store):
    wrapped = Wrapper(store)
    assert isinstance(store, ReadsInto)
    assert not isinstance(wrapped, ReadsInto)
    with df.open(wrapped).version(step=1) as version:
        reads(version, states()[1])
    assert store.direct == 0


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_damage_is_told(store, tmp_path, damage, monkeypatch):
    """As it is where ranges are fetched."""
    with df.open(store).version(step=0) as version:
        piece = version.map.piece_start[version.map.block_start[version.map.row("a")]]
        path = tmp_path / "store" / version.map.packs[version.map.pack[piece]].key
        at = int(version.map.offset[piece])
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[at + 5] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[: at + BLOCK - 1] if damage == "cut" else data)

    def outcome():
        with pytest.raises((CorruptError, MissingError)) as told, df.open(store).version(step=0) as version:
            version.get_slice("a")[0:1]
        return type(told.value), told.value.code

    told = outcome()
    assert store.direct == BLOCK
    assert store.fetched == 0
    monkeypatch.setattr(rebuild, "DIRECT_BYTES", 1 << 40)
    assert told == outcome()
    assert (
        told[1]
        is {
            "bit": ErrorCode.DIGEST_MISMATCH,
            "cut": ErrorCode.SIZE_MISMATCH,
            "gone": ErrorCode.OBJECT_MISSING,
        }[damage]
    )


def test_ranges_that_are_not_there(store):
    with df.open(store).version(step=0) as version:
        ref = version.map.packs[0]
    out = np.zeros(100, np.uint8)
    store.read_into(ref.key, 8, out)
    with open(os.path.join(store.url, ref.key), "rb") as file:
        assert file.read(108)[8:] == out.tobytes()
    for start, code in ((ref.size - 99, ErrorCode.SIZE_MISMATCH), (ref.size + 7, ErrorCode.SIZE_MISMATCH)):
        with pytest.raises(CorruptError) as told:
            store.read_into(ref.key, start, out)
        assert told.value.code is code
