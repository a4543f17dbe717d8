"""The block cache: right or not at all, bounded, shared, and never in the way."""

import multiprocessing
import os
import stat
import threading

import pytest

from deltaformat.blockcache import BlockCache
from deltaformat.digests import get_digest
from deltaformat.errors import MalformedError, UnsafeError

UUID = "0123456789abcdef" * 2
DIGEST = get_digest("xxh3-128")


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        self.now += 1
        return self.now


def make(directory, max_bytes=1 << 20, uuid=UUID, digest=DIGEST, clock=None):
    return BlockCache(directory, max_bytes, store_uuid=uuid, digest=digest, clock=clock or Clock())


def block(number, size=1000):
    return number.to_bytes(4, "little") * (size // 4)


def entries(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_what_is_put_is_got(tmp_path):
    cache = make(tmp_path / "not" / "there yet")
    data = block(1)
    assert cache.get(DIGEST(data), len(data)) is None
    for given in (data, bytearray(data), memoryview(data)):
        cache.put(DIGEST(data), given)
        assert cache.get(DIGEST(data), len(data)) == data
    assert len(entries(tmp_path)) == 1
    assert make(tmp_path / "not" / "there yet").get(DIGEST(data), len(data)) == data


def test_stores_and_digests_are_kept_apart(tmp_path):
    data = block(1)
    make(tmp_path).put(DIGEST(data), data)
    assert make(tmp_path, uuid="f" * 32).get(DIGEST(data), len(data)) is None
    blake3 = get_digest("blake3-256")
    assert make(tmp_path, digest=blake3).get(blake3(data), len(data)) is None
    make(tmp_path, digest=blake3).put(blake3(data), data)
    assert make(tmp_path, digest=blake3).get(blake3(data), len(data)) == data


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "empty", "other"])
def test_a_wrong_entry_is_a_miss_and_goes(tmp_path, damage):
    """DF-DIG-01: no byte is returned whose digest was not checked."""
    cache = make(tmp_path)
    data = block(7)
    cache.put(DIGEST(data), data)
    (path,) = entries(tmp_path)
    path.write_bytes(
        {
            "cut": data[:-1],
            "longer": data + b"x",
            "flipped": bytes([data[0] ^ 1]) + data[1:],
            "empty": b"",
            "other": block(8),
        }[damage]
    )
    assert cache.get(DIGEST(data), len(data)) is None
    assert entries(tmp_path) == []
    cache.put(DIGEST(data), data)
    assert cache.get(DIGEST(data), len(data)) == data


def test_another_length_is_a_miss(tmp_path):
    cache = make(tmp_path)
    data = block(7)
    cache.put(DIGEST(data), data)
    assert cache.get(DIGEST(data), len(data) + 4) is None


def test_the_least_recently_used_go_first(tmp_path):
    clock = Clock()
    cache = make(tmp_path, 10_000, clock=clock)
    blocks = [block(i) for i in range(12)]
    for data in blocks[:10]:
        cache.put(DIGEST(data), data)
    assert len(entries(tmp_path)) == 10
    assert cache.get(DIGEST(blocks[0]), 1000) == blocks[0]
    for data in blocks[10:]:
        cache.put(DIGEST(data), data)
    left = [i for i, data in enumerate(blocks) if cache.get(DIGEST(data), 1000)]
    assert 0 in left
    assert {10, 11} <= set(left)
    assert 1 not in left
    assert sum(path.stat().st_size for path in entries(tmp_path)) <= 10_000


def test_the_bound_holds_at_every_moment(tmp_path):
    cache = make(tmp_path, 5_000)
    for i in range(60):
        data = block(i, 400 + 16 * i)
        cache.put(DIGEST(data), data)
        assert sum(path.stat().st_size for path in entries(tmp_path)) <= 5_000
    assert cache.get(DIGEST(data), len(data)) == data


def test_what_does_not_fit_is_not_kept(tmp_path):
    cache = make(tmp_path, 999)
    cache.put(DIGEST(block(1)), block(1))
    assert entries(tmp_path) == []
    make(tmp_path, 0).put(DIGEST(block(1)), block(1))
    assert entries(tmp_path) == []


def test_the_bound_is_over_all_stores_and_processes(tmp_path):
    first, second = make(tmp_path, 16_000), make(tmp_path, 16_000, uuid="f" * 32)
    for i in range(40):
        first.put(DIGEST(block(i)), block(i))
        second.put(DIGEST(block(i)), block(i))
    assert sum(path.stat().st_size for path in entries(tmp_path)) <= 16_000 + 2 * 1_000


def test_only_its_own_files_are_deleted(tmp_path):
    clock = Clock()
    cache = make(tmp_path, 2_000, clock=clock)
    cache.put(DIGEST(block(0)), block(0))
    (entry,) = entries(tmp_path)
    foreign = [
        tmp_path / "notes.txt",
        entry.parent / "notes.txt",
        entry.parent / ".secret",
        tmp_path / ".x.tmp",
    ]
    old, fresh = entry.parent / f".{'a' * 32}.tmp", entry.parent / f".{'b' * 32}.tmp"
    for path in (*foreign, old, fresh):
        path.write_bytes(bytes(5_000))
        os.utime(path, (1, 1))
    os.utime(fresh, (clock.now, clock.now))
    for i in range(1, 9):
        cache.put(DIGEST(block(i)), block(i))
    assert all(path.exists() for path in (*foreign, fresh))
    assert not old.exists()
    assert not entry.exists()


def test_errors_of_the_disk_are_misses(tmp_path, monkeypatch):
    data = block(1)
    blocked = tmp_path / "a file"
    blocked.write_text("")
    cache = make(blocked)
    cache.put(DIGEST(data), data)
    assert cache.get(DIGEST(data), len(data)) is None

    cache = make(tmp_path / "cache")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    cache.put(DIGEST(data), data)
    assert entries(tmp_path / "cache") == []
    monkeypatch.undo()
    cache.put(DIGEST(data), data)
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError("read only")))
    assert cache.get(DIGEST(data), len(data)) == data
    monkeypatch.setattr(os, "lstat", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    make(tmp_path / "cache").put(DIGEST(block(2)), block(2))


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    cache = make(tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.put(DIGEST(block(1)), block(1))
    assert entries(tmp_path) == []


def test_arguments():
    with pytest.raises(MalformedError, match="max_bytes"):
        make("x", -1)
    with pytest.raises(MalformedError, match="uuid"):
        make("x", uuid="../../etc")


def hammer(cache):
    for i in 3 * list(range(20)):
        data = block(i)
        found = cache.get(DIGEST(data), len(data))
        assert found is None or found == data
        cache.put(DIGEST(data), data)


def hammer_in_process(directory):
    hammer(BlockCache(directory, 8_000, store_uuid=UUID, digest=get_digest("xxh3-128")))


def test_threads_and_processes(tmp_path):
    cache = make(tmp_path, 8_000)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=hammer_in_process, args=(tmp_path,)) for _ in range(2)]
    threads = [threading.Thread(target=hammer, args=(cache,)) for _ in range(3)]
    for worker in (*processes, *threads):
        worker.start()
    for worker in (*processes, *threads):
        worker.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert all(len(path.read_bytes()) == 1_000 for path in entries(tmp_path))
    assert sum(path.stat().st_size for path in entries(tmp_path)) <= 8_000 + 3 * 1_000


@pytest.mark.skipif(os.name != "posix", reason="rights are told apart on POSIX")
def test_a_cache_that_others_may_write_in_is_refused(tmp_path):
    """DF-SEC-01: what they put there could have the digest that is asked for."""
    data = os.urandom(100)
    make(tmp_path).put(DIGEST(data), data)
    (root,) = tmp_path.iterdir()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o770)
    with pytest.raises(UnsafeError, match="others could write there") as caught:
        make(tmp_path)
    assert str(root) in caught.value.where
    root.chmod(0o755)
    assert make(tmp_path).get(DIGEST(data), 100) == data
    root.rename(tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError):
        make(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_in_an_entrys_place_is_a_miss(tmp_path):
    data = os.urandom(100)
    cache = make(tmp_path)
    cache.put(DIGEST(data), data)
    (path,) = entries(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert cache.get(DIGEST(data), 100) is None


def test_a_directory_that_cannot_be(tmp_path):
    with pytest.raises(MalformedError, match="cannot be a cache's directory"):
        make(str(tmp_path) + "/a\0b")
