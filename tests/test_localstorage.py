"""Stores in directories: durable, whole or not at all, and clear about what failed."""

import contextlib
import errno
import gc
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storagetools import KEY, PACK, code_of, listed, posix

from deltaformat.errors import (
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    MalformedError,
    MissingError,
    StoreError,
    UnsafeError,
    UnsupportedError,
)
from deltaformat.keys import record_key
from deltaformat.localstorage import LocalStorage
from deltaformat.storage import NotStoredError, open_storage


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path))


def test_open_directories(tmp_path: Path) -> None:
    """A path, a PathLike, a file URL; made on request only."""
    place = tmp_path / "a b" / "run#1"
    for url in (str(place), place, place.as_uri()):
        assert code_of(lambda url=url: open_storage(url), MissingError) is ErrorCode.STORE_MISSING
    storage = open_storage(place, create=True)
    storage.put(KEY, b"x")
    for url in (
        str(place),
        place,
        place.as_uri(),
        place.as_uri().replace("file://", "FILE://localhost"),
        storage,
    ):
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


@pytest.mark.parametrize("url", ["ftp://key:SECRET@host/x?token=SECRET", "S4://SECRET@h"])
def test_unknown_schemes(url: str) -> None:
    """DF-SEC-02: what is supported is named, the URL's rest is not."""
    with pytest.raises(UnsupportedError, match=r"file://, memory://, s3://") as caught:
        open_storage(url)
    assert caught.value.code is ErrorCode.NOT_SUPPORTED
    assert url.partition("://")[0].lower() in str(caught.value)
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
    """DF-CMT-01: new directories from the root down, the file, its name, the directory; in this order."""
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
def test_failing_writes(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A full disk, a refusal: one error that says whether something was stored, and nothing left behind."""
    number, kind = FAILURES[what]
    operation = what.split()[0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    if operation == "write":
        real = open
        monkeypatch.setattr(
            "builtins.open",
            lambda path, mode, **more: (
                FullFile(real(path, mode, **more), number) if "x" in mode else real(path, mode, **more)
            ),
        )
    elif operation == "directory":
        monkeypatch.setattr("deltaformat.localstorage.sync_directory", fail)
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


@pytest.mark.parametrize(
    ("length", "found"), [(2, b"01"), (7, b"0123456"), (10, b"0123456789"), (12, b"0123456789")]
)
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
            fine = bytes(local.get_ranges(KEY, [(2, 3)])[0]) == b"234" and local.create(
                record_key(2), b"child"
            )
            code = 0 if fine else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert local.get(record_key(2)) == b"child"


def test_a_pipe_in_an_objects_place_is_not_waited_for(tmp_path: Path) -> None:
    """DF-SEC-01: no object makes a reader run without end."""
    storage = LocalStorage(str(tmp_path))
    key = record_key(0)
    (tmp_path / "log").mkdir()
    os.mkfifo(tmp_path / key)
    for read in (lambda: storage.get(key), lambda: storage.get_ranges(key, [(0, 1)])):
        with pytest.raises(StoreError, match="regular"):
            read()


def test_what_is_no_path_is_refused() -> None:
    for path in ("a\0b", "a\ud800b"):
        with pytest.raises(MalformedError):
            LocalStorage(path, create=True)


def test_links_in_the_place_of_directories_are_not_written_through(tmp_path: Path) -> None:
    """DF-STO-05, DF-SEC-01: a link in the store cannot make others write, or delete, elsewhere."""
    outside, root = tmp_path / "outside", tmp_path / "store"
    (outside / "x").mkdir(parents=True)
    root.mkdir()
    storage = LocalStorage(str(root))
    pack = Path(PACK)
    for link, target, key in (
        (root / "log", outside, KEY),
        (root / "packs", outside, PACK),
        (root / pack.parent, outside / "x", PACK),
    ):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target, target_is_directory=True)
        victim = target / Path(key).relative_to(link.relative_to(root))
        victim.parent.mkdir(parents=True, exist_ok=True)
        victim.write_bytes(b"precious")
        for call in (
            lambda key=key: storage.put(key, b"x"),
            lambda key=key: storage.create(key, b"x"),
            lambda key=key: storage.delete([key]),
        ):
            assert code_of(call, UnsafeError) is ErrorCode.PATH_UNSAFE
        assert victim.read_bytes() == b"precious"
        assert {path.name for path in victim.parent.iterdir() if path.is_file()} == {victim.name}
        link.unlink()
    linked = tmp_path / "linked"
    linked.symlink_to(root, target_is_directory=True)  # the store itself may lie behind a link
    storage = LocalStorage(str(linked))
    storage.put(PACK, b"x")
    storage.delete([PACK])
    assert not (root / PACK).exists()


def test_leftovers_are_those_of_objects_alone(tmp_path: Path) -> None:
    """What anybody else has put there stays, however old it is and however it is called."""
    storage = LocalStorage(str(tmp_path))
    storage.put(KEY, b"x")
    ours = [f"{KEY}#1", f"{PACK}#23", "deltaformat.json#4", "now#5"]
    others = [
        "notes#1",
        "log/notes#2",
        "log/00000000000000000001.json#x",
        "issue #7",
        "a/b/c#1",
        f"{KEY}#1#2",
    ]
    for name in (*ours, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert storage.remove_leftovers(older_than=-60) == len(ours)
    assert not any((tmp_path / name).exists() for name in ours)
    assert all((tmp_path / name).exists() for name in others)


@posix
def test_a_full_disk(tmp_path: Path) -> None:
    """DF-CMT-01: what does not fit is an error that says so, nothing is stored, and no half of it stays."""
    import resource

    storage = LocalStorage(str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        for call in (
            lambda: storage.put(PACK, bytes(200_000)),
            lambda: storage.create(KEY, bytes(200_000)),
            lambda: storage.put(PACK, [bytes(90_000), bytes(90_000)]),
        ):
            with pytest.raises(NotStoredError, match="cannot write it"):
                call()
        storage.put(PACK, bytes(90_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == {PACK}
    assert storage.get(PACK) == bytes(90_000)
