"""`doctor STORE`: the verdict on places that can do everything, some, or nothing."""

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler

import pytest
from cliruns import runner
from faultproxy import FaultProxy, QuietServer
from radosgw import signed_request
from test_probe import CachedMiss, Overwriting, Same, Swallowing

import deltaformat as df
from deltaformat.errors import StoreError
from deltaformat.examine import examine
from deltaformat.readonly import ReadOnlyStorage
from deltaformat.singlewriter import SingleWriterStorage
from deltaformat.storage import open_storage

COLLECTED = "read, written by several at once, and collected"


def check(storage, name):
    (found,) = [check for check in examine(storage).checks if check.name == name]
    return found


@pytest.fixture
def memory(request):
    return open_storage(f"memory://doctor/{abs(hash(request.node.name))}")


def test_a_sound_place(memory, tmp_path):
    """DF-STO-02 and all of section 5: nothing is left behind."""
    for storage in (memory, open_storage(tmp_path)):
        found = examine(storage)
        assert (found.verdict, [c.name for c in found.checks if not c.ok]) == (COLLECTED, [])
        assert list(storage.list("")) == []
        assert "no store here yet" in check(storage, "descriptor").detail
        df.create(storage, block_bytes=256)
        assert "blocks of 256 bytes" in check(storage, "descriptor").detail


def test_places_that_lack_something(memory):
    """Each fault is found, and named for what it is needed."""
    found = examine(Overwriting(memory))
    assert found.verdict == "read by anyone; written by a single writer only (single_writer=True)"
    assert "created again" in check(Overwriting(memory), "create-if-absent").detail
    assert examine(SingleWriterStorage(memory)).verdict == found.verdict
    assert not check(CachedMiss(memory), "create-if-absent").ok
    assert examine(Same(memory)).verdict == "no store can be read here"
    assert not check(Swallowing(memory), "create-if-absent").ok
    untried = examine(ReadOnlyStorage(memory, "it"))
    assert untried.verdict == "read, not written; whether ranges are read could not be tried"
    assert check(ReadOnlyStorage(memory, "it"), "ranges").detail.startswith("not tried")
    df.create(memory, block_bytes=256)
    assert examine(ReadOnlyStorage(memory, "it")).verdict == "read, not written"
    assert check(ReadOnlyStorage(memory, "it"), "ranges").detail == "3 ranges of the descriptor"

    class Undeletable(SingleWriterStorage):
        exclusive_create = True

        def create(self, key, data):
            return memory.create(key, data)

        def delete(self, keys):
            raise StoreError(df.errors.ErrorCode.STORE_FAILED, "access denied", where=keys[0])

    assert examine(Undeletable(memory)).verdict == "read and written, by several at once; not collected"
    assert check(Undeletable(memory), "delete").detail == "access denied [store-failed]"


class Whole(SimpleHTTPRequestHandler):
    """Python's own web server: it gives all of a file, whatever range is asked for."""

    def log_message(self, format, *arguments):
        pass


def test_a_web_server_without_ranges(tmp_path, capsys):
    """A store can be put there and never read: that is found although nothing can be written."""
    df.create(tmp_path / "run", block_bytes=256)
    with QuietServer(("127.0.0.1", 0), partial(Whole, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            done = runner(capsys)("doctor", f"http://127.0.0.1:{server.server_address[1]}/run", "--json")
        finally:
            server.shutdown()
            thread.join()
    assert (done.code, done.json["verdict"]) == (1, "no store can be read here")
    assert [check["name"] for check in done.json["checks"] if not check["ok"]] == [
        "put and read back",
        "ranges",
    ]


def test_the_command(tmp_path, capsys, s3_server, monkeypatch):
    """One screen, and JSON; a real S3 server passes, and one that ignores the condition does not."""
    run = runner(capsys)
    done = run("doctor", tmp_path)
    assert done.code == 0
    assert COLLECTED in done.out.splitlines()[-1]
    assert len(done.out.splitlines()) < 24
    for name, value in (
        ("AWS_ENDPOINT_URL", s3_server.endpoint),
        ("AWS_ACCESS_KEY_ID", s3_server.access_key),
        ("AWS_SECRET_ACCESS_KEY", s3_server.secret_key),
    ):
        monkeypatch.setenv(name, value)
    done = run("doctor", "s3://tests/doctor", "--json")
    assert done.code == 0
    assert (done.json["verdict"], done.json["writing"], done.json["collecting"]) == (COLLECTED, True, True)
    assert s3_server.secret_key not in json.dumps(done.json)
    with FaultProxy(
        s3_server.endpoint, overwrite=lambda path, body: signed_request(s3_server, "PUT", path, body=body)
    ) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        done = run("doctor", "s3://tests/doctor", "--json")
    assert (done.code, done.json["writing"], done.json["single_writer"]) == (0, False, True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    done = run("doctor", "s3://tests/doctor")
    assert done.code == 1
    assert "access denied" in done.out
    assert "no store can be read here" in done.out
    assert "no such directory" in run("doctor", tmp_path / "gone").err
