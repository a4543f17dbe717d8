"""Storages: one set of tests for all of them, then what each has of its own, then the probe."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from storagetools import KEY, PACK, code_of
from wrappers import Wrapper

from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    MalformedError,
    StoreError,
)
from deltaformat.localstorage import LocalStorage
from deltaformat.objectstorage import ObstoreStorage
from deltaformat.redaction import redact
from deltaformat.retrying import Pauses, Retry
from deltaformat.singlewriter import SingleWriterStorage
from deltaformat.storage import NotStoredError, ObjectInfo, Storage, chunks_of, open_storage
from deltaformat.testing import StorageTests


class TestLocal(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(str(tmp_path))

    def test_no_memory_for_claimed_lengths(self, storage: Storage) -> None:
        """DF-LIM-02: an object is measured before memory is taken."""
        storage.put(PACK, b"0123456789")
        for wanted in ((0, 1 << 50), (9, 1 << 50)):
            code = code_of(lambda wanted=wanted: storage.get_ranges(PACK, [wanted]), CorruptError)
            assert code is ErrorCode.SIZE_MISMATCH


class TestMemory(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(f"memory://{tmp_path}")


class TestObstoreLocal(StorageTests):
    """Another of obstore's stores, without our directory's guarantees."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        from obstore.store import LocalStore

        return ObstoreStorage(LocalStore(str(tmp_path)), "test")


class TestSingleWriter(StorageTests):
    """DF-STO-02: a storage whose *create* looks before it puts, for its one writer."""

    exclusive_create = False

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return SingleWriterStorage(open_storage(f"memory://{tmp_path}"))


class OnePage(Wrapper):
    """Tells of the first page of a listing, and deletes the first few."""

    def __init__(self, inner: Storage, listed: int, deleted: int) -> None:
        super().__init__(inner)
        self.listed, self.deleted = listed, deleted

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return itertools.islice(self.inner.list(prefix), self.listed)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys[: self.deleted])


class Telling(Wrapper):
    @property
    def url(self) -> str:
        return "s3://key:secret@bucket/x"


@pytest.mark.parametrize("broken", [(1000, 2000), (2000, 4), (2000, 1000)])
def test_a_storage_of_one_page_is_found_out(broken: tuple[int, int]) -> None:
    storage = open_storage(f"memory://page-{broken[0]}-{broken[1]}")
    with pytest.raises(AssertionError):
        StorageTests().test_many_objects(OnePage(storage, *broken))


def test_a_storage_that_tells_is_found_out() -> None:
    with pytest.raises(AssertionError):
        StorageTests().test_what_is_shown(Telling(open_storage("memory://telling")))


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


def test_a_race_without_a_winner_is_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """DF-CMT-02: S3's 409 says to try again; Azure's, and every 412, that the object exists."""
    import obstore
    from obstore.exceptions import AlreadyExistsError
    from obstore.store import MemoryStore

    text = (
        "Object at location x already exists: Server returned non-2xx status code: {}: <Error><Code>{}</Code>"
    )
    racing = AlreadyExistsError(text.format("409 Conflict", "ConditionalRequestConflict"))
    answers: list[Exception] = [racing, racing]
    puts: list[object] = []

    def put(*args: object, **kwargs: object) -> None:
        puts.append(args)
        if answers:
            raise answers.pop()

    pauses: list[float] = []
    storage = ObstoreStorage(MemoryStore(), "memory://x", retry=Retry(sleep=pauses.append))
    monkeypatch.setattr(obstore, "put", put)
    assert storage.create(KEY, b"") is True
    assert (len(puts), len(pauses)) == (3, 2)
    for status, code in (
        ("409 Conflict", "BlobAlreadyExists"),
        ("412 Precondition Failed", "PreconditionFailed"),
    ):
        answers.append(AlreadyExistsError(text.format(status, code)))
        assert storage.create(KEY, b"") is False
    answers.append(racing)
    hurried = ObstoreStorage(MemoryStore(), "memory://x", retry=Retry(seconds=0))
    assert code_of(lambda: hurried.create(KEY, b""), StoreError) is ErrorCode.STORE_FAILED


def test_pauses() -> None:
    """Time runs from the first try; some tries are made all the same, unless the server asks for too long."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    retry = Retry(seconds=30, again=2, clock=lambda: now[0], sleep=sleep, jitter=lambda: 1.0)
    pauses = Pauses(retry)
    for expected in (True, True, False):
        now[0] += 31
        assert pauses.wait() is expected
    now[0] = 0.0
    pauses = Pauses(retry)
    while pauses.wait():
        pass
    assert 25 < now[0] <= 30
    now[0] = 0.0
    assert not Pauses(retry).wait(31)
    assert not Pauses(Retry(seconds=0, again=2)).wait()


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
    shown = redact(
        "error at https://me:pw@h/x?X-Amz-Signature=1&b=2 (retry), s3://a:b@c@d/e, hf://o/m@rev/x?y"
    )
    assert shown == "error at https://h/x?… (retry), s3://d/e, hf://o/m@rev/x?…"
    for text in ("", "why? a@b", "weights/a?b@c"):
        assert redact(text) == text
    error = StoreError(ErrorCode.STORE_FAILED, "at https://me:pw@h/", where="https://me:pw@h/x?sig=pw")
    assert "pw" not in f"{error} {error!r} {error.where} {error.args}"
