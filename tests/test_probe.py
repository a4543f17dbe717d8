"""The probe: each way in which create-if-absent is not what it must be. And the storages around storages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from storagetools import KEY, PACK, listed
from wrappers import Counting, Flaky, Killed, LostReply, StopAt, Wrapper

import deltaformat as df
from deltaformat.errors import ConflictError, ErrorCode, LimitError, MissingError, StoreError
from deltaformat.keys import DESCRIPTOR, TAIL_HINT, probe_key, record_key
from deltaformat.localstorage import LocalStorage
from deltaformat.storage import Storage, open_storage, probe

# -- the probe ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["local", "memory"])
def test_probe(place: str, tmp_path: Path) -> None:
    """DF-STO-02: a sound store passes, and nothing stays."""
    storage = LocalStorage(str(tmp_path)) if place == "local" else open_storage("memory://probe")
    counting = Counting(storage)
    probe(counting)
    assert [request.operation for request in counting.requests] == [
        "get", "create", "get", "create", "get", "delete",
    ]  # fmt: skip
    assert listed(storage) == []
    assert len({request.key for request in counting.requests}) == 1


class Overwriting(Wrapper):
    """Ignores the condition, as several S3 servers do."""

    def create(self, key: str, data: Any) -> bool:
        self.inner.put(key, data)
        return True


class OverwritingWhileRefusing(Wrapper):
    """Says no, and does it all the same."""

    def create(self, key: str, data: Any) -> bool:
        created = self.inner.create(key, data)
        self.inner.put(key, data)
        return created


class CachedMiss(Wrapper):
    """Remembers that a key was not there."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.missed: set[str] = set()

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        if key in self.missed:
            raise MissingError(ErrorCode.OBJECT_MISSING, "cached", where=key)
        try:
            return self.inner.get(key, limit=limit)
        except MissingError:
            self.missed.add(key)
            raise


class Same(Wrapper):
    """Has the same object at every key."""

    answer = b"<html>not found</html>"

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self.answer


class Huge(Same):
    def get(self, key: str, *, limit: int | None = None) -> bytes:
        raise LimitError(ErrorCode.LIMIT_EXCEEDED, "too large", where=key)


class Swallowing(Wrapper):
    """Takes everything and keeps other bytes."""

    def create(self, key: str, data: Any) -> bool:
        return self.inner.create(key, b"other")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Overwriting, "created again"),
        (OverwritingWhileRefusing, "was changed although"),
        (CachedMiss, "cached miss"),
        (Same, "not missing"),
        (Huge, "not missing"),
        (Swallowing, "other bytes"),
    ],
)
def test_probe_refuses(broken: type[Wrapper], words: str) -> None:
    """DF-STO-02: each way in which create-if-absent is not what it must be."""
    storage = open_storage(f"memory://probe-{broken.__name__}")
    with pytest.raises(StoreError, match=words) as caught:
        probe(broken(storage))
    assert caught.value.code is ErrorCode.CREATE_UNSAFE
    assert "single writer" in caught.value.message
    assert listed(storage) == []


@pytest.mark.parametrize("broken", [Overwriting, OverwritingWhileRefusing])
def test_a_store_is_not_replaced(broken: type[Wrapper]) -> None:
    """DF-DSC-03: the descriptor of a store stands, also where the server ignores the condition."""
    storage = broken(open_storage(f"memory://stands-{broken.__name__}"))
    made = df.create(storage, block_bytes=256)
    before = storage.get(DESCRIPTOR)
    again = df.create(storage, block_bytes=4096, digest="blake3-256", exist_ok=True)
    assert (again.uuid, storage.get(DESCRIPTOR)) == (made.uuid, before)
    with pytest.raises(ConflictError) as caught:
        df.create(storage, block_bytes=4096)
    assert caught.value.code is ErrorCode.ALREADY_EXISTS
    assert storage.get(DESCRIPTOR) == before


def test_probe_with_a_lost_reply() -> None:
    """DF-STO-02: a client that repeats a lost request and is told of its own object is sound."""
    storage = open_storage("memory://probe-lost")
    probe(LostReply(storage, choose=lambda key: True, exists=True))
    assert listed(storage) == []


def test_probe_of_a_failing_store() -> None:
    """DF-STO-04: a failure is no verdict. Deleting is not required."""
    storage = open_storage("memory://probe-failing")
    for number in range(5):
        with pytest.raises(StoreError) as caught:
            probe(Flaky(storage, lambda operation, key, before, number=number: before == number))
        assert caught.value.code is ErrorCode.STORE_FAILED
    probe(Flaky(storage, lambda operation, key, before: operation == "delete"))


# -- the wrappers that other tests use ----------------------------------------------------------------------


def test_counting() -> None:
    counting = Counting(open_storage("memory://counting"))
    counting.put(PACK, [b"ab", b"c"])
    counting.get(PACK)
    counting.get_ranges(PACK, [(0, 1), (1, 1)])
    counting.create(KEY, b"12345")
    with pytest.raises(MissingError):
        counting.get(TAIL_HINT)
    counting.head(KEY)
    assert len(list(counting.list("log/"))) == 1
    counting.delete([KEY])
    assert counting.count() == 8
    assert counting.count("get") == 2
    assert counting.count("get", "get_ranges", prefix="packs/") == 2
    assert counting.nbytes("get") == 3
    assert counting.nbytes("put", "create") == 8
    assert counting.nbytes(prefix="packs/") == 3 + 3 + 2
    assert counting.by_operation()["list"] == 1
    assert counting.keys("head", "create") == [KEY, KEY]
    assert counting.url == "memory://counting"
    counting.reset()
    assert counting.count() == 0
    assert isinstance(counting, Storage)


@pytest.mark.parametrize("executed", [False, True])
def test_stop_at(executed: bool) -> None:
    storage = open_storage(f"memory://stop-{executed}")
    stopping = StopAt(storage, 2, executed=executed)
    stopping.put(record_key(1), b"")
    stopping.get(record_key(1))
    for seq in (2, 3):
        with pytest.raises(Killed):
            stopping.put(record_key(seq), b"")
    with pytest.raises(Killed):
        stopping.get(record_key(1))
    assert listed(storage) == [record_key(1), record_key(2)][: 1 + executed]
    free = StopAt(storage, None)
    free.put(record_key(5), b"")
    assert free.seen == 1


def test_lost_reply_and_flaky() -> None:
    storage = open_storage("memory://lost")
    lost = LostReply(storage)
    with pytest.raises(StoreError):
        lost.create(KEY, b"x")
    assert storage.get(KEY) == b"x"
    assert lost.create(KEY, b"x") is False
    assert lost.create(probe_key("0" * 32), b"x") is True
    flaky = Flaky(storage, 0.5, seed=1)
    outcomes = []
    for _ in range(100):
        try:
            outcomes.append(flaky.get(KEY))
        except StoreError:
            outcomes.append(None)
    assert 20 < outcomes.count(None) < 80
    assert flaky.failed == outcomes.count(None)
    iterator: Iterator[Any] = Flaky(storage, 0.0).list("")
    assert len(list(iterator)) == 2
