"""Tests for a `Storage` of your own: subclass `StorageTests` in a test module and run pytest.

::

    import pytest
    from deltaformat.testing import StorageTests

    class TestMyStorage(StorageTests):
        @pytest.fixture
        def storage(self):
            return MyStorage("bucket", prefix=fresh_prefix())  # empty, for each test

Needs pytest. A storage that passes serves everything that deltaformat does: SPEC 5 is what is tested.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

import deltaformat as df
from deltaformat.errors import (
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    LimitError,
    MalformedError,
    MissingError,
    StoreError,
)
from deltaformat.keys import DESCRIPTOR, TAIL_HINT, pack_key, record_key
from deltaformat.redaction import redact
from deltaformat.storage import Data, ReadsInto, Storage, probe

__all__ = ["StorageTests"]

_RECORD = record_key(1)
_PACK = pack_key(0, "ab" * 32)
_NO_KEYS = (
    "", "../x", "/etc/passwd", "log/../../x", "a", "log/1.json", "log\\x", "log/\0", f"{_RECORD}#1",
    "x" * 5000,
)  # fmt: skip


class StorageTests:
    """What every storage must do. Override the fixture `storage`, and the attributes where they do not fit.

    Attributes:
        exclusive_create: Whether *create* is one atomic operation of the store. Where it is not, the tests
            expect that the probe refuses it (DF-STO-02), and that a single writer can use it.
        clock_skew: How far the store's clock may be from this machine's.
        many_objects: How many objects are stored, listed and deleted at once: more than the store lists or
            deletes with one request.
        secrets: The credentials in use, which must not be shown (DF-SEC-02).
    """

    exclusive_create = True
    clock_skew = timedelta(seconds=5)
    many_objects = 1100
    secrets: Sequence[str] = ()

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        """An empty storage of its own for each test."""
        raise NotImplementedError("override the fixture `storage`")

    # -- objects ---------------------------------------------------------------------------------------------

    def test_put_get_head(self, storage: Storage) -> None:
        """Section 5: get, put, head; *put* replaces what is there."""
        assert isinstance(storage, Storage)
        before = datetime.now(UTC) - self.clock_skew
        storage.put(TAIL_HINT, b"first")
        storage.put(TAIL_HINT, b"second!")
        assert storage.get(TAIL_HINT) == b"second!"
        assert type(storage.get(TAIL_HINT)) is bytes
        info = storage.head(TAIL_HINT)
        assert (info.key, info.size) == (TAIL_HINT, 7)
        assert before < info.modified < datetime.now(UTC) + self.clock_skew

    def test_what_is_shown(self, storage: Storage) -> None:
        """DF-SEC-02: no credentials are in the URL, nor in how the storage shows itself."""
        assert isinstance(storage.url, str)
        assert storage.url
        for shown in (storage.url, repr(storage), str(storage)):
            assert redact(shown) == shown
            assert not any(secret in shown for secret in self.secrets)

    @pytest.mark.parametrize("size", [0, 1, 100_000, 9 << 20])
    def test_sizes(self, storage: Storage, size: int) -> None:
        """Section 5: what is put is what is got."""
        whole = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
        storage.put(_PACK, whole)
        assert storage.get(_PACK) == whole
        assert storage.head(_PACK).size == size

    def test_buffers(self, storage: Storage) -> None:
        """Section 5: data is one buffer or many, of whatever buffer type."""
        data = np.random.default_rng(0).integers(0, 256, 100_001, np.uint8)
        whole, half = data.tobytes(), data.size // 2
        kinds: tuple[Data, ...] = (
            data,
            memoryview(whole),
            bytearray(whole),
            [whole],
            [data[:half], memoryview(whole)[half:]],
            (b"", data),
        )
        for number, chunks in enumerate(kinds):
            key = pack_key(number, "cd" * 32)
            storage.put(key, chunks)
            assert storage.get(key) == whole
        assert storage.create(_RECORD, [data[:half], b"", data[half:]])
        assert storage.get(_RECORD) == whole
        storage.put(record_key(2), [])
        assert storage.get(record_key(2)) == b""

    def test_create(self, storage: Storage) -> None:
        """Section 5: *create* stores if there is nothing, and changes nothing otherwise (DF-STO-01)."""
        assert storage.create(_RECORD, b"first") is True
        assert storage.create(_RECORD, b"second") is False
        assert storage.get(_RECORD) == b"first"

    def test_read_into(self, storage: Storage) -> None:
        """`ReadsInto`, where it has that: a range to where it is wanted, all of it or an error."""
        if not isinstance(storage, ReadsInto):
            pytest.skip("it reads no ranges in place")
        data = np.random.default_rng(0).integers(0, 256, 100_001, np.uint8)
        storage.put(_PACK, data)
        for start, length in ((0, 100_001), (0, 1), (100_000, 1), (4097, 50_000)):
            out = np.zeros(length + 2, np.uint8)
            storage.read_into(_PACK, start, out[1:-1])
            assert np.array_equal(out[1:-1], data[start : start + length])
            assert (out[0], out[-1]) == (0, 0)
        room = np.zeros(10, np.uint8)
        for start in (99_992, 100_001, 1 << 40):
            into = partial(storage.read_into, _PACK, start, room)
            assert _code(into, CorruptError) is ErrorCode.SIZE_MISMATCH
        absent = partial(storage.read_into, _RECORD, 0, room)
        assert _code(absent, MissingError) is ErrorCode.OBJECT_MISSING
        with pytest.raises(MalformedError):
            storage.read_into("../x", 0, room)

    def test_missing(self, storage: Storage) -> None:
        """DF-STO-04: absence is told as absence."""
        for call in (
            lambda: storage.get(_RECORD),
            lambda: storage.get_ranges(_RECORD, [(0, 1)]),
            lambda: storage.head(_RECORD),
        ):
            assert _code(call, MissingError) is ErrorCode.OBJECT_MISSING

    def test_a_miss_is_not_remembered(self, storage: Storage) -> None:
        """DF-STO-02's ground: what was missing is there once it is created."""
        for seq in range(3):
            with pytest.raises(MissingError):
                storage.get(record_key(seq))
            assert storage.create(record_key(seq), b"%d" % seq)
            assert storage.get(record_key(seq)) == b"%d" % seq
            assert storage.head(record_key(seq)).size == 1

    def test_ranges(self, storage: Storage) -> None:
        """Section 5: get range. Far apart, touching, overlapping, in any order, many."""
        data = bytes(range(256)) * 4096
        storage.put(_PACK, data)
        ranges = [(1_000_000, 10), (0, 1), (1, 9), (5, 10), (len(data) - 1, 1), (0, len(data))]
        ranges += [(start, 3) for start in range(0, len(data) - 3, 8191)]
        found = storage.get_ranges(_PACK, ranges)
        assert [bytes(buffer) for buffer in found] == [
            data[start : start + length] for start, length in ranges
        ]
        assert np.frombuffer(found[0], np.uint8).tolist() == list(data[1_000_000:1_000_010])
        assert list(storage.get_ranges(_PACK, [])) == []

    @pytest.mark.parametrize("wanted", [(9, 2), (10, 1), (11, 5), (0, 11), (1 << 50, 1)])
    def test_ranges_beyond_the_end(self, storage: Storage, wanted: tuple[int, int]) -> None:
        """DF-LIM-02, DF-STO-04: an object that is too short is corrupt, not absent."""
        storage.put(_PACK, b"0123456789")
        code = _code(lambda: storage.get_ranges(_PACK, [(0, 1), wanted]), CorruptError)
        assert code is ErrorCode.SIZE_MISMATCH

    @pytest.mark.parametrize("wanted", [(0, 0), (-1, 1), (0, -1)])
    def test_ranges_that_cannot_be_meant(self, storage: Storage, wanted: tuple[int, int]) -> None:
        """Section 5: a range has a start and a length of at least 1."""
        storage.put(_PACK, b"0123456789")
        assert _code(lambda: storage.get_ranges(_PACK, [wanted]), MalformedError) is ErrorCode.INPUT_INVALID

    def test_limit(self, storage: Storage) -> None:
        """DF-LIM-02: an object that is larger than allowed is not read."""
        storage.put(_RECORD, b"x" * 100)
        assert len(storage.get(_RECORD, limit=100)) == 100
        assert _code(lambda: storage.get(_RECORD, limit=99), LimitError) is ErrorCode.LIMIT_EXCEEDED

    def test_list(self, storage: Storage) -> None:
        """Section 5: list by prefix, with sizes and times; 1, 10 and 100 are not confused."""
        for seq in (1, 10, 100):
            storage.put(record_key(seq), b"x" * seq)
        storage.put(DESCRIPTOR, b"{}")
        storage.put(_PACK, b"pack")
        logs = [record_key(1), record_key(10), record_key(100)]
        assert _listed(storage, "log/") == logs
        assert _listed(storage, _PACK.rpartition("/")[0] + "/") == [_PACK]
        assert _listed(storage) == sorted([*logs, DESCRIPTOR, _PACK])
        assert _listed(storage, "files/") == []
        assert {info.key: info.size for info in storage.list("log/")} == dict(
            zip(logs, (1, 10, 100), strict=True)
        )
        assert all(info.modified.tzinfo is not None for info in storage.list(""))
        for prefix in ("log", "log/0", "/", "../", "log//", "log/../", "Log/"):
            with pytest.raises(MalformedError):
                list(storage.list(prefix))

    def test_delete(self, storage: Storage) -> None:
        """Section 5: delete; what is not there is ignored, wherever it stands in the list."""
        for seq in (1, 2, 3):
            storage.put(record_key(seq), b"%d" % seq)
        storage.delete([])
        storage.delete([record_key(9), record_key(1), record_key(8), record_key(2)])
        storage.delete([record_key(1)])
        assert _listed(storage) == [record_key(3)]

    def test_many_objects(self, storage: Storage) -> None:
        """Section 5: a listing tells of all objects, and all keys are deleted, however many there are."""
        keys = [record_key(seq) for seq in range(self.many_objects)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: storage.put(key, b"x"), keys))
        storage.put(_PACK, b"stays")
        assert _listed(storage, "log/") == keys
        storage.delete(keys)
        assert _listed(storage) == [_PACK]

    @pytest.mark.parametrize("key", _NO_KEYS)
    def test_only_keys_of_the_grammar(self, storage: Storage, key: str) -> None:
        """DF-KEY-01, DF-SEC-01: no other key reaches the store, let alone a place outside it."""
        calls: list[Callable[[], object]] = [
            lambda: storage.get(key),
            lambda: storage.get_ranges(key, [(0, 1)]),
            lambda: storage.put(key, b""),
            lambda: storage.create(key, b""),
            lambda: storage.head(key),
            lambda: storage.delete([_RECORD, key]),
        ]
        storage.put(_RECORD, b"x")
        for call in calls:
            with pytest.raises(MalformedError):
                call()
        assert storage.get(_RECORD) == b"x"

    # -- several at once -------------------------------------------------------------------------------------

    def test_one_of_many_creates_wins(self, storage: Storage) -> None:
        """DF-STO-02's ground: of threads that create a key at once, one succeeds; its bytes are there."""
        if not self.exclusive_create:
            pytest.skip("its *create* is not exclusive, and the probe says so")
        for seq in range(10):
            barrier = threading.Barrier(8)

            def attempt(number: int, seq: int = seq, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait()
                return storage.create(record_key(seq), b"%d" % number * 1000)

            with ThreadPoolExecutor(8) as pool:
                created = list(pool.map(attempt, range(8)))
            assert created.count(True) == 1
            assert storage.get(record_key(seq)) == b"%d" % created.index(True) * 1000

    def test_many_threads(self, storage: Storage) -> None:
        """A storage may be used by several threads at once."""

        def work(number: int) -> None:
            key = pack_key(number % 4, f"{number:064x}")
            storage.put(key, b"%d" % number * 100)
            assert storage.get(key) == b"%d" % number * 100
            (found,) = storage.get_ranges(key, [(1, 5)])
            assert bytes(found) == (b"%d" % number * 100)[1:6]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(40)))
        assert len(_listed(storage, "packs/")) == 40

    # -- stores ----------------------------------------------------------------------------------------------

    def test_probe(self, storage: Storage) -> None:
        """DF-STO-02: the probe tells whether *create* can be trusted, and leaves nothing."""
        if self.exclusive_create:
            probe(storage)
        else:
            with pytest.raises(StoreError) as caught:
                probe(storage)
            assert caught.value.code is ErrorCode.CREATE_UNSAFE
        assert _listed(storage) == []

    def test_a_store(self, storage: Storage) -> None:
        """Sections 12 to 14: commits, versions, slices, following, branches, tags, collecting, verifying."""
        store = df.create(storage, block_bytes=256)
        with store.writer(single_writer=not self.exclusive_create) as writer:
            for step in range(4):
                writer.commit(step=step, tensors=_weights(step), files={"n.txt": b"%d" % step})
        store.tag("first", step=0)
        store.fork("other", step=1)
        store = df.open(storage)
        for step in range(4):
            with store.version(step=step) as version:
                _same(version.state_dict(), _weights(step))
                assert version.read_file("n.txt") == b"%d" % step
                assert np.array_equal(version.get_slice("w")[3:5], _weights(step)["w"][3:5])
        before = store.version(step=2)
        _same(store.version(step=3).follow(before, before.state_dict()), _weights(3))
        with store.writer(single_writer=not self.exclusive_create) as writer:
            writer.commit(step=4, tensors=_weights(4))
        deadline = time.monotonic() + 30
        report = store.gc(keep_last=1, grace=timedelta(0), dry_run=False)
        while [key for key, _ in report.waiting if not key.startswith("files/")]:  # times may be in seconds
            assert time.monotonic() < deadline
            time.sleep(0.2)
            report = store.gc(keep_last=1, grace=timedelta(0), dry_run=False)
        assert report.kept["main"] == [4, 1, 0]
        for tag, step in (("first", 0), (None, 4)):
            _same(store.version(tag=tag).state_dict(), _weights(step))
        assert _code(lambda: store.version(step=2).state_dict(), MissingError) is ErrorCode.VERSION_RETIRED
        assert store.verify(all=True).findings == []

    def test_no_store(self, storage: Storage) -> None:
        """DF-DSC-03: no store, then one; a second is refused."""
        assert _code(lambda: df.open(storage), MissingError) is ErrorCode.STORE_MISSING
        made = df.create(storage, block_bytes=256)
        assert df.open(storage).uuid == made.uuid == df.create(storage, exist_ok=True).uuid
        assert _code(lambda: df.create(storage), df.errors.ConflictError) is ErrorCode.ALREADY_EXISTS


def _weights(step: int) -> dict[str, npt.NDArray[np.uint16]]:
    rng = np.random.default_rng(7)
    tensors = {"w": rng.integers(0, 1 << 16, (24, 40), np.uint16), "frozen": np.arange(300, dtype=np.uint16)}
    for number in range(step):
        tensors["w"].reshape(-1)[np.random.default_rng(number).integers(0, 960, 9)] += 1
    return tensors


def _same(found: object, expected: dict[str, npt.NDArray[np.uint16]]) -> None:
    assert isinstance(found, dict)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes()


def _code(call: Callable[[], object], error: type[DeltaFormatError]) -> ErrorCode:
    """The code of the error that a call must end with."""
    with pytest.raises(error) as caught:
        call()
    assert caught.value.where
    return caught.value.code


def _listed(storage: Storage, prefix: str = "") -> list[str]:
    return sorted(info.key for info in storage.list(prefix))
