"""Storages: one set of tests for all of them, then what each has of its own, then the probe."""

import contextlib
import errno
import gc
import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wrappers import Counting, Flaky, Killed, LostReply, StopAt, Wrapper

from deltaformat.errors import (
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    LimitError,
    MalformedError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.keys import DESCRIPTOR, TAIL_HINT, pack_key, probe_key, record_key
from deltaformat.localstorage import LocalStorage
from deltaformat.storage import NotStoredError, ObstoreStorage, Storage, chunks_of, open_storage, probe, redact

KEY = record_key(1)
PACK = pack_key(0, "ab" * 32)
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")


@pytest.fixture(params=["local", "memory", "obstore-local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(str(tmp_path))
    if request.param == "memory":
        return open_storage(f"memory://{tmp_path}")
    from obstore.store import LocalStore

    return ObstoreStorage(LocalStore(str(tmp_path)), "test")


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path))


def code_of(call: Callable[[], object], error: type[DeltaFormatError]) -> ErrorCode:
    with pytest.raises(error) as caught:
        call()
    assert caught.value.where
    return caught.value.code


def listed(storage: Storage, prefix: str = "") -> list[str]:
    return sorted(info.key for info in storage.list(prefix))


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
    for chunks in (data, memoryview(whole), bytearray(whole), [whole], [data[:half], memoryview(whole)[half:]], (b"", data)):
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
    "key", ["", "../x", "/etc/passwd", "log/../../x", "a", "log/1.json", "log\\x", "log/\0", KEY + "#1", "x" * 5000]
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
    assert redact("error at https://me:pw@h/x?X-Amz-Signature=1&b=2 (retry)\nsecond line") == "error at https://h/x?… (retry)"
    assert redact("") == redact(" \n ") == ""
    assert len(redact("x" * 5000)) == 500


# -- directories --------------------------------------------------------------------------------------------


def test_open_directories(tmp_path: Path) -> None:
    """A path, a PathLike, a file URL; made on request only."""
    place = tmp_path / "a b" / "run#1"
    for url in (str(place), place, place.as_uri()):
        assert code_of(lambda url=url: open_storage(url), MissingError) is ErrorCode.STORE_MISSING
    storage = open_storage(place, create=True)
    storage.put(KEY, b"x")
    for url in (str(place), place, place.as_uri(), place.as_uri().replace("file://", "FILE://localhost"), storage):
        opened = open_storage(url)
        assert opened.get(KEY) == b"x"
        assert opened.url == str(place)
    assert open_storage(storage) is storage
    assert str(place) in repr(storage)
    (tmp_path / "file").write_bytes(b"")
    for create in (False, True):
        code = code_of(lambda create=create: open_storage(tmp_path / "file", create=create), StoreError)
        assert code is ErrorCode.STORE_FAILED
        code = code_of(lambda: open_storage(tmp_path / "file" / "below", create=True), StoreError)
        assert code is ErrorCode.STORE_FAILED


def test_relative_paths_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("run", create=True)
    monkeypatch.chdir("/")
    storage.put(KEY, b"x")
    assert (tmp_path / "run" / KEY).read_bytes() == b"x"


@pytest.mark.parametrize("url", ["file://host/x", "file://", "file:///x?a=1", "file:///x#a"])
def test_file_urls_that_cannot_be_meant(url: str) -> None:
    assert code_of(lambda: open_storage(url), MalformedError) is ErrorCode.INPUT_INVALID


@pytest.mark.parametrize("url", ["s3://key:SECRET@bucket/x?token=SECRET", "hf://buckets/a/b", "https://SECRET@h"])
def test_unknown_schemes(url: str) -> None:
    """DF-SEC-02: what is supported is named, the URL's rest is not."""
    with pytest.raises(UnsupportedError, match=r"file:// or memory://") as caught:
        open_storage(url)
    assert caught.value.code is ErrorCode.NOT_SUPPORTED
    assert url.partition("://")[0] in str(caught.value)
    assert "SECRET" not in str(caught.value)


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


class Trace:
    """Notes calls of os in order, and what the directory held at each."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.paths: dict[int, str] = {}
        opened, fsync, link, replace_ = os.open, os.fsync, os.link, os.replace

        def note_fsync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.calls.append("sync " + re.sub(r"#\d+$", "#", os.path.relpath(path, root)))
            fsync(descriptor)

        def note_link(source: str, target: str) -> None:
            self.calls.append("link " + os.path.relpath(target, root))
            link(source, target)

        def note_replace(source: str, target: str) -> None:
            self.calls.append("replace " + os.path.relpath(target, root))
            replace_(source, target)

        assert opened
        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(os, "link", note_link)
        monkeypatch.setattr(os, "replace", note_replace)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_durable_before_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DF-CMT-01: new directories from the root down, the file, the link or rename, the directory; in this order."""
    storage = LocalStorage(str(tmp_path))
    trace = Trace(tmp_path, monkeypatch)
    storage.create(KEY, b"x")
    assert trace.calls == ["sync .", f"sync {KEY}#", f"link {KEY}", "sync log"]
    trace.calls.clear()
    storage.put(PACK, b"x")
    directory = PACK.rpartition("/")[0]
    assert trace.calls == [
        "sync .", "sync packs", f"sync {PACK}#", f"replace {PACK}", f"sync {directory}",
    ]  # fmt: skip
    trace.calls.clear()
    storage.create(PACK, b"y")  # refused, and yet what is there is made durable
    assert trace.calls == [f"sync {PACK}#", f"link {PACK}", f"sync {directory}"]
    trace.calls.clear()
    # Another process cannot know who made the directories, nor whether that was synced.
    LocalStorage(str(tmp_path)).create(record_key(2), b"x")
    assert trace.calls[:1] == ["sync ."]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_new_root_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DF-CMT-01: so are the directories above the store that had to be made."""
    trace = Trace(tmp_path, monkeypatch)
    LocalStorage(str(tmp_path / "a" / "b"), create=True)
    assert sorted(trace.calls) == ["sync .", "sync a"]


FAILURES = {
    "write": (errno.ENOSPC, NotStoredError),
    "fsync": (errno.EIO, NotStoredError),
    "mkdir": (errno.EACCES, NotStoredError),
    "link": (errno.ENOSPC, NotStoredError),
    "link without hard links": (errno.EPERM, NotStoredError),
    "link over a network": (errno.EIO, StoreError),
    "replace": (errno.EACCES, StoreError),
    "directory": (errno.EIO, StoreError),
}


class FullFile:
    """A file on a full disk."""

    def __init__(self, file: Any, number: int) -> None:
        self.file = file
        self.number = number

    def __enter__(self) -> "FullFile":
        return self

    def __exit__(self, *args: object) -> None:
        self.file.close()

    def write(self, chunk: Any) -> int:
        self.file.write(memoryview(chunk)[:3])
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("what", FAILURES)
def test_failing_writes(local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A full disk, a refusal: one clear error that says whether something was stored, and nothing left behind."""
    number, kind = FAILURES[what]
    operation = what.split()[0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    if operation == "write":
        real = open
        monkeypatch.setattr(
            "builtins.open", lambda path, mode, **more: FullFile(real(path, mode, **more), number) if "x" in mode else real(path, mode, **more)
        )
    elif operation == "directory":
        monkeypatch.setattr("deltaformat.localstorage._sync_directory", fail)
        local._durable.update({str(tmp_path / "log")})
        (tmp_path / "log").mkdir()
    else:
        monkeypatch.setattr(os, operation, fail)
    if operation != "replace":
        with pytest.raises(StoreError) as caught:
            local.create(KEY, [b"some", b"bytes"])
        assert type(caught.value) is kind
        assert caught.value.code is ErrorCode.STORE_FAILED
        assert caught.value.where == KEY
        assert os.strerror(number) in caught.value.message
        assert ("hard links" in caught.value.message) == ("hard" in what)
    if operation != "link":
        with pytest.raises(StoreError, match=re.escape(os.strerror(number))):
            local.put(KEY, b"bytes")
    monkeypatch.undo()
    assert names(tmp_path) <= {KEY}
    assert (KEY in names(tmp_path)) == (operation == "directory")
    local.put(KEY, b"later")
    assert local.get(KEY) == b"later"


@posix
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may do everything")
def test_no_permission(local: LocalStorage, tmp_path: Path) -> None:
    """DF-STO-04: what may not be read is not absent."""
    local.put(KEY, b"x")
    (tmp_path / KEY).chmod(0)
    assert code_of(lambda: local.get(KEY), StoreError) is ErrorCode.STORE_FAILED
    (tmp_path / "log").chmod(0)
    for call in (lambda: local.get(KEY), lambda: local.head(KEY), lambda: list(local.list("log/"))):
        assert code_of(call, StoreError) is ErrorCode.STORE_FAILED
    assert code_of(lambda: local.put(KEY, b""), NotStoredError) is ErrorCode.STORE_FAILED
    (tmp_path / "log").chmod(stat.S_IRWXU)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_failing_reads(local: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """DF-STO-04: any other failure is not taken for absence."""
    local.put(KEY, b"x")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("builtins.open", fail)
    for name in ("stat", "scandir", "unlink", "walk"):
        monkeypatch.setattr(os, name, fail)
    calls: list[Callable[[], object]] = [
        lambda: local.get(KEY),
        lambda: local.get_ranges(KEY, [(0, 1)]),
        lambda: local.head(KEY),
        lambda: list(local.list("log/")),
        lambda: list(local.list("")),
        lambda: local.delete([KEY]),
        lambda: local.remove_leftovers(older_than=0),
    ]
    codes = [code_of(call, StoreError) for call in calls]
    monkeypatch.undo()
    assert set(codes) == {ErrorCode.STORE_FAILED}


def test_a_store_that_is_gone(tmp_path: Path) -> None:
    """DF-STO-04: where the whole directory is gone (unmounted, say), its objects are not absent."""
    storage = LocalStorage(str(tmp_path / "store"), create=True)
    storage.put(KEY, b"x")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    calls: list[Callable[[], object]] = [
        lambda: storage.get(KEY),
        lambda: storage.get_ranges(KEY, [(0, 1)]),
        lambda: storage.head(KEY),
        lambda: list(storage.list("")),
        lambda: storage.delete([KEY]),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="is gone"):
            call()
    with pytest.raises(NotStoredError):
        storage.put(KEY, b"")


def test_directories_where_objects_should_be(local: LocalStorage, tmp_path: Path) -> None:
    """DF-STO-04: something else at a key is a failure."""
    (tmp_path / KEY).mkdir(parents=True)
    for call in (lambda: local.get(KEY), lambda: local.delete([KEY]), lambda: local.put(KEY, b"")):
        assert code_of(call, StoreError) is ErrorCode.STORE_FAILED


def test_an_object_that_shrinks_while_read(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put(KEY, b"0123456789")
    monkeypatch.setattr("deltaformat.localstorage._read", lambda file, length: file.read(length - 1))
    monkeypatch.setattr("deltaformat.localstorage._read_into", lambda file, data, start: data.size - 1)
    for call in (lambda: local.get(KEY), lambda: local.get_ranges(KEY, [(0, 5)])):
        assert code_of(call, CorruptError) is ErrorCode.SIZE_MISMATCH


class Dribble:
    """A file whose reads are short, as those of more than 2 GiB are."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, length: int) -> bytes:
        found, self.data = self.data[: min(length, 3)], self.data[min(length, 3) :]
        return found

    def seek(self, start: int) -> None:
        self.data = self.data[start:]

    def readinto(self, buffer: memoryview) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


@pytest.mark.parametrize(("length", "found"), [(2, b"01"), (7, b"0123456"), (10, b"0123456789"), (12, b"0123456789")])
def test_short_reads(length: int, found: bytes) -> None:
    from deltaformat.localstorage import _read, _read_into

    assert _read(Dribble(b"0123456789"), length) == found  # type: ignore[arg-type]
    data = np.zeros(length, np.uint8)
    assert _read_into(Dribble(b"__0123456789"), data, 2) == len(found)  # type: ignore[arg-type]
    assert data.tobytes()[: len(found)] == found


def test_leftovers(local: LocalStorage, tmp_path: Path) -> None:
    """Files that a killed process left behind: not listed, in nobody's way, and removed when old enough."""
    local.put(PACK, b"x")
    leftover = tmp_path / f"{PACK}#123"
    leftover.write_bytes(b"half")
    assert listed(local) == [PACK]
    assert local.remove_leftovers(older_than=3600) == 0
    assert local.remove_leftovers(older_than=-60) == 1
    assert names(tmp_path) == {PACK}


def test_strangers_in_the_directory(local: LocalStorage, tmp_path: Path) -> None:
    """Files and directories that are not a store's do no harm."""
    local.put(KEY, b"x")
    (tmp_path / "log" / "README").write_bytes(b"")
    (tmp_path / "My Notes").mkdir()
    (tmp_path / "My Notes" / "a").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "log" / "dangling").symlink_to(tmp_path / "nowhere")
    found = listed(local)
    assert KEY in found
    assert "log/README" in found
    assert not any("Notes" in key or "loop/" in key for key in found)


def test_list_while_others_delete(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for seq in (1, 2):
        local.put(record_key(seq), b"x")
    entries = local.list("log/")
    assert next(entries).key == record_key(1)
    local.delete([record_key(2)])
    real = os.scandir

    class Gone:
        name = "00000000000000000002.json"

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            return False

        def stat(self) -> os.stat_result:
            raise FileNotFoundError

    monkeypatch.setattr(os, "scandir", lambda path: [*real(path), Gone()])
    assert [info.key for info in local.list("log/")] == [record_key(1)]

    class Unreadable(Gone):
        def stat(self) -> os.stat_result:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", lambda path: [*real(path), Unreadable()])
    with pytest.raises(StoreError):
        list(local.list("log/"))


def test_no_descriptors_are_left_open(local: LocalStorage) -> None:
    """Every file is closed, also where an error ends its use."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        local.put(KEY, b"0123456789")
        local.get_ranges(KEY, [(0, 1), (2, 3)])
        for call in (
            lambda: local.get(KEY, limit=1),
            lambda: local.get_ranges(KEY, [(0, 99)]),
            lambda: list(local.list("")),
            lambda: local.create(KEY, b"x"),
        ):
            with contextlib.suppress(DeltaFormatError):
                call()
        gc.collect()


@posix
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_may_use_it(local: LocalStorage) -> None:
    """A directory's storage has no threads: data loaders that fork may read from it."""
    local.put(KEY, b"0123456789")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        child = os.fork()
    if child == 0:  # pragma: no cover - another process
        code = 1
        with contextlib.suppress(BaseException):
            fine = bytes(local.get_ranges(KEY, [(2, 3)])[0]) == b"234" and local.create(record_key(2), b"child")
            code = 0 if fine else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert local.get(record_key(2)) == b"child"


# -- the probe ----------------------------------------------------------------------------------------------


def test_probe(storage: Storage) -> None:
    """DF-STO-02: a sound store passes, and nothing stays."""
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
