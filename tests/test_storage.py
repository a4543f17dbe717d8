"""Storages: one set of tests for all of them, then what each has of its own, then the probe."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storagetools import KEY, PACK, code_of, listed

from deltaformat.errors import CorruptError, ErrorCode, LimitError, MalformedError, MissingError, StoreError
from deltaformat.keys import DESCRIPTOR, TAIL_HINT, pack_key, record_key
from deltaformat.localstorage import LocalStorage
from deltaformat.storage import NotStoredError, ObstoreStorage, Storage, chunks_of, open_storage, redact


@pytest.fixture(params=["local", "memory", "obstore-local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(str(tmp_path))
    if request.param == "memory":
        return open_storage(f"memory://{tmp_path}")
    from obstore.store import LocalStore

    return ObstoreStorage(LocalStore(str(tmp_path)), "test")


# -- every storage ------------------------------------------------------------------------------------------


def test_put_get_head(storage: Storage) -> None:
    """Section 5: get, put, head."""
    assert isinstance(storage, Storage)
    before = datetime.now(UTC) - timedelta(seconds=5)
    storage.put(TAIL_HINT, b"first")
    storage.put(TAIL_HINT, b"second!")
    assert storage.get(TAIL_HINT) == b"second!"
    assert type(storage.get(TAIL_HINT)) is bytes
    info = storage.head(TAIL_HINT)
    assert (info.key, info.size) == (TAIL_HINT, 7)
    assert before < info.modified < datetime.now(UTC) + timedelta(seconds=5)


@pytest.mark.parametrize("size", [0, 1, 100_000, 9 << 20])
def test_sizes(storage: Storage, size: int) -> None:
    """Section 5: what is put is what is got; in one buffer or many, of whatever buffer type."""
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    whole = data.tobytes()
    half = size // 2
    storage.put(PACK, whole)
    assert storage.get(PACK) == whole
    for chunks in (
        data,
        memoryview(whole),
        bytearray(whole),
        [whole],
        [data[:half], memoryview(whole)[half:]],
        (b"", data),
    ):
        storage.put(PACK, chunks)
        assert storage.get(PACK) == whole
    assert storage.create(KEY, [data[:half], b"", data[half:]])
    assert storage.get(KEY) == whole
    storage.put(KEY, [])
    assert storage.get(KEY) == b""


def test_create(storage: Storage) -> None:
    """Section 5: create stores if there is nothing, and changes nothing otherwise (DF-STO-01)."""
    assert storage.create(KEY, b"first") is True
    assert storage.create(KEY, b"second") is False
    assert storage.get(KEY) == b"first"


def test_missing(storage: Storage) -> None:
    """DF-STO-04: absence is told as absence."""
    for call in (
        lambda: storage.get(KEY),
        lambda: storage.get_ranges(KEY, [(0, 1)]),
        lambda: storage.head(KEY),
    ):
        assert code_of(call, MissingError) is ErrorCode.OBJECT_MISSING


def test_ranges(storage: Storage) -> None:
    """Section 5: get range. Far apart, touching, overlapping, in any order, many."""
    data = bytes(range(256)) * 4096
    storage.put(PACK, data)
    ranges = [(1_000_000, 10), (0, 1), (1, 9), (5, 10), (len(data) - 1, 1), (0, len(data))]
    ranges += [(start, 3) for start in range(0, len(data) - 3, 1021)]
    found = storage.get_ranges(PACK, ranges)
    assert [bytes(buffer) for buffer in found] == [data[start : start + length] for start, length in ranges]
    assert np.frombuffer(found[0], np.uint8).tolist() == list(data[1_000_000:1_000_010])
    assert list(storage.get_ranges(PACK, [])) == []


@pytest.mark.parametrize("wanted", [(9, 2), (10, 1), (11, 5), (0, 11), (0, 1 << 50), (1 << 50, 1)])
def test_ranges_beyond_the_end(storage: Storage, wanted: tuple[int, int]) -> None:
    """DF-LIM-02, DF-STO-04: an object that is too short is corrupt, not absent; no memory is taken for it."""
    storage.put(PACK, b"0123456789")
    if wanted[1] == 1 << 50 and not isinstance(storage, LocalStorage):
        pytest.skip("the client's own affair")
    code = code_of(lambda: storage.get_ranges(PACK, [(0, 1), wanted]), CorruptError)
    assert code is ErrorCode.SIZE_MISMATCH


@pytest.mark.parametrize("wanted", [(0, 0), (-1, 1), (0, -1)])
def test_ranges_that_cannot_be_meant(storage: Storage, wanted: tuple[int, int]) -> None:
    storage.put(PACK, b"0123456789")
    assert code_of(lambda: storage.get_ranges(PACK, [wanted]), MalformedError) is ErrorCode.INPUT_INVALID


def test_limit(storage: Storage) -> None:
    """DF-LIM-02: an object that is larger than allowed is not read."""
    storage.put(KEY, b"x" * 100)
    assert len(storage.get(KEY, limit=100)) == 100
    assert code_of(lambda: storage.get(KEY, limit=99), LimitError) is ErrorCode.LIMIT_EXCEEDED


def test_list(storage: Storage) -> None:
    """Section 5: list by prefix, with sizes and times; 1, 10 and 100 are not confused."""
    for seq in (1, 10, 100):
        storage.put(record_key(seq), b"x" * seq)
    storage.put(DESCRIPTOR, b"{}")
    storage.put(PACK, b"pack")
    logs = [record_key(1), record_key(10), record_key(100)]
    assert listed(storage, "log/") == logs
    assert listed(storage, PACK.rpartition("/")[0] + "/") == [PACK]
    assert listed(storage) == sorted([*logs, DESCRIPTOR, PACK])
    assert listed(storage, "files/") == []
    sizes = {info.key: info.size for info in storage.list("log/")}
    assert list(sizes.values()) == [1, 10, 100] or sizes == dict(zip(logs, (1, 10, 100), strict=True))
    assert all(info.modified.tzinfo is not None for info in storage.list(""))
    for prefix in ("log", "log/0", "/", "../", "log//", "log/../", "Log/"):
        with pytest.raises(MalformedError):
            list(storage.list(prefix))


def test_delete(storage: Storage) -> None:
    """Section 5: delete; what is not there is ignored, wherever it stands in the list."""
    for seq in (1, 2, 3):
        storage.put(record_key(seq), b"")
    storage.delete([])
    storage.delete([record_key(9), record_key(1), record_key(8), record_key(2)])
    storage.delete([record_key(1)])
    assert listed(storage) == [record_key(3)]


@pytest.mark.parametrize(
    "key",
    ["", "../x", "/etc/passwd", "log/../../x", "a", "log/1.json", "log\\x", "log/\0", KEY + "#1", "x" * 5000],
)
def test_only_keys_of_the_grammar(storage: Storage, key: str, tmp_path: Path) -> None:
    """DF-KEY-01, DF-SEC-01: no other key reaches the store, let alone a place outside it."""
    calls: list[Callable[[], object]] = [
        lambda: storage.get(key),
        lambda: storage.get_ranges(key, [(0, 1)]),
        lambda: storage.put(key, b""),
        lambda: storage.create(key, b""),
        lambda: storage.head(key),
        lambda: storage.delete([KEY, key]),
    ]
    storage.put(KEY, b"")
    for call in calls:
        with pytest.raises(MalformedError):
            call()
    assert storage.get(KEY) == b""


def test_one_of_many_creates_wins(storage: Storage) -> None:
    """DF-STO-02's ground: of threads that create one key at once, one succeeds, and its bytes are there."""
    for seq in range(10):
        barrier = threading.Barrier(8)

        def attempt(number: int, seq: int = seq, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return storage.create(record_key(seq), b"%d" % number * 1000)

        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(attempt, range(8)))
        assert created.count(True) == 1
        assert storage.get(record_key(seq)) == b"%d" % created.index(True) * 1000


def test_many_threads(storage: Storage) -> None:
    """A storage may be used by several threads at once."""

    def work(number: int) -> None:
        key = pack_key(number % 4, f"{number:064x}")
        storage.put(key, b"%d" % number * 100)
        assert storage.get(key) == b"%d" % number * 100
        (found,) = storage.get_ranges(key, [(1, 5)])
        assert bytes(found) == (b"%d" % number * 100)[1:6]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(100)))
    assert len(listed(storage, "packs/")) == 100


def test_chunks() -> None:
    assert chunks_of(b"ab") == [b"ab"]
    assert chunks_of((b"a", b"b")) == (b"a", b"b")


# -- memory and other stores of obstore ---------------------------------------------------------------------


def test_memory_by_name() -> None:
    """One store of a name per process."""
    first = open_storage("memory://test_memory_by_name", create=True)
    assert open_storage("memory://test_memory_by_name") is first
    assert open_storage("memory://test_memory_by_name/other") is not first
    assert first.url == "memory://test_memory_by_name"
    assert repr(first) == "ObstoreStorage('memory://test_memory_by_name')"
    for url in ("memory://", "memory://a b", "memory://é"):
        with pytest.raises(MalformedError):
            open_storage(url)


class Broken:
    """Stands in for the module obstore: every call raises the same error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise self.error


def obstore_errors() -> list[Exception]:
    from obstore.exceptions import GenericError, PermissionDeniedError, UnauthenticatedError

    url = "https://user:SECRET@host.example/bucket/key?sig=SECRET&x=1"
    return [
        GenericError(f"Generic S3 error: error sending request for url ({url})\n\nDebug source:\nSECRET"),
        GenericError("Generic S3 error: timed out"),
        PermissionDeniedError(f"denied: {url}"),
        UnauthenticatedError("who are you?"),
        ValueError("nonsense"),
        PermissionError(13, "Permission denied"),
        OSError(5, "Input/output error"),
        GenericError(""),
    ]


@pytest.mark.parametrize("error", obstore_errors(), ids=lambda error: type(error).__name__)
def test_errors_of_obstore(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """DF-STO-04, DF-SEC-02: whatever goes wrong is no absence, and no credentials are told."""
    import obstore
    from obstore.store import MemoryStore

    storage = ObstoreStorage(MemoryStore(), "memory://x")
    for name in ("get", "get_ranges", "put", "head", "list", "delete"):
        monkeypatch.setattr(obstore, name, Broken(error))
    calls: list[Callable[[], object]] = [
        lambda: storage.get(KEY),
        lambda: storage.get_ranges(KEY, [(0, 1)]),
        lambda: storage.put(KEY, b""),
        lambda: storage.create(KEY, b""),
        lambda: storage.head(KEY),
        lambda: list(storage.list("log/")),
        lambda: storage.delete([KEY]),
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.code is ErrorCode.STORE_FAILED
        assert not isinstance(caught.value, NotStoredError)
        assert "SECRET" not in str(caught.value)
        assert caught.value.where in (KEY, "log/")
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_put_that_is_told_of_an_existing_object(monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import AlreadyExistsError
    from obstore.store import MemoryStore

    storage = ObstoreStorage(MemoryStore(), "memory://x")
    monkeypatch.setattr(obstore, "put", Broken(AlreadyExistsError("exists")))
    assert storage.create(KEY, b"") is False
    assert code_of(lambda: storage.put(KEY, b""), StoreError) is ErrorCode.STORE_FAILED


def test_short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """DF-LIM-02: what came back is measured."""
    import obstore
    from obstore.store import MemoryStore

    storage = ObstoreStorage(MemoryStore(), "memory://x")
    monkeypatch.setattr(obstore, "get_ranges", lambda *args, **kwargs: [b"abc", b"abcd"])
    with pytest.raises(CorruptError):
        storage.get_ranges(KEY, [(0, 3), (5, 3)])


def test_redact() -> None:
    """DF-SEC-02."""
    assert (
        redact("error at https://me:pw@h/x?X-Amz-Signature=1&b=2 (retry)\nsecond line")
        == "error at https://h/x?… (retry)"
    )
    assert redact("") == redact(" \n ") == ""
    assert len(redact("x" * 5000)) == 500
