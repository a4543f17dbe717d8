"""Stores in buckets: a real S3 server runs every test of storages; then credentials, failures, the web."""

import itertools
import json
import os
import secrets
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import azurite
import numpy as np
import pytest
from faultproxy import FaultProxy, Faults, QuietServer
from radosgw import free_port, signed_request
from storagetools import KEY, PACK
from tinystore import BLOCK, content, truth, weights

import deltaformat as df
from deltaformat import buckets
from deltaformat.errors import (
    CommitUnknown,
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    MalformedError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.keys import record_key
from deltaformat.retrying import Retry
from deltaformat.storage import NotStoredError, Storage, open_storage, probe
from deltaformat.testing import StorageTests

numbers = itertools.count()


def fresh(bucket: str = "tests") -> str:
    return f"s3://{bucket}/{secrets.token_hex(4)}-{next(numbers)}"


class TestRealS3(StorageTests):
    @pytest.fixture
    def storage(self, s3_server) -> Storage:
        self.secrets = (s3_server.access_key, s3_server.secret_key)
        return open_storage(fresh(), options=s3_server.options())


class TestFaultyS3(StorageTests):
    """The same where a tenth of requests and a fifth of replies are lost, and all else goes wrong, too."""

    many_objects = 50

    @pytest.fixture
    def storage(self, s3_server, monkeypatch):
        monkeypatch.setattr(buckets, "Retry", partial(Retry, first=0.01, longest=0.2, busy=0.01))
        faults = Faults(
            lost_request=0.1, lost_reply=0.2, unavailable=0.05, too_many=0.05, no_range=0.05, truncated=0.05
        )
        whole = partial(whole_object, s3_server)
        with FaultProxy(s3_server.endpoint, faults, seed=next(numbers), whole=whole) as proxy:
            yield open_storage(fresh(), options=s3_server.options(endpoint=proxy.endpoint, timeout="2"))

    # A reply that was lost is told as "exists": who cares reads back, as records are (DF-CMT-02).
    test_create = test_a_miss_is_not_remembered = test_one_of_many_creates_wins = test_buffers = None


@pytest.fixture(scope="module")
def azure():
    """Options of an emulated Azure with the container `tests`."""
    reason = azurite.why_not()
    if reason is not None:
        pytest.skip(reason)
    with azurite.running("tests") as options:
        yield options


class TestAzure(StorageTests):
    @pytest.fixture
    def storage(self, azure) -> Storage:
        return open_storage(f"az://{fresh().partition('://')[2]}", options=azure)


def whole_object(server, path: str) -> bytes:
    return signed_request(server, "GET", path)[1]


# -- credentials ---------------------------------------------------------------------------------------------


@pytest.fixture
def shared_store(s3_server):
    """A store with two steps in a bucket of its own, that others may read; its URL."""
    bucket = f"b{secrets.token_hex(6)}"
    assert signed_request(s3_server, "PUT", f"/{bucket}")[0] == 200
    url = f"s3://{bucket}/run"
    store = df.create(url, block_bytes=BLOCK, storage_options=s3_server.options())
    with store.writer() as writer:
        for step in range(2):
            writer.commit(step=step, tensors=weights(step))
    return url


def allow(server, url: str, *actions: str) -> None:
    bucket = url.split("/")[2]
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": ["arn:aws:iam:::user/reader"]},
        "Action": list(actions),
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]}).encode()
    assert signed_request(server, "PUT", f"/{bucket}", query="policy=", body=policy)[0] in (200, 204)


def told(call, error: type[DeltaFormatError] = StoreError) -> str:
    """The one line of the error that a call ends with."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 900
    return text


def test_read_only_credentials_read(s3_server, shared_store):
    """DF-STO-03: who may get and list reads everything, and is told so where it would write."""
    allow(s3_server, shared_store, "s3:GetObject", "s3:ListBucket")
    options = s3_server.options(reader=True)
    store = df.open(shared_store, storage_options=options)
    for step in range(2):
        assert content(store.version(step=step).state_dict()) == truth(step)
    before = store.version(step=0)
    assert content(store.version(step=1).follow(before, before.state_dict())) == truth(1)
    assert store.verify(all=True).findings == []
    started = time.monotonic()
    with pytest.raises(NotStoredError, match="access denied"):
        store.writer()
    assert "access denied" in told(lambda: store.tag("best", step=0))
    assert "access denied" in told(lambda: store.gc(keep_last=1, dry_run=False))
    assert time.monotonic() - started < 10  # what does not pass is not tried again
    assert "best" not in df.open(shared_store, storage_options=s3_server.options()).tags()


def test_who_may_not_list_is_told_so(s3_server, shared_store):
    """DF-STO-04: without the right to list, S3 tells absence as "forbidden": that is no absence."""
    allow(s3_server, shared_store, "s3:GetObject")
    store = df.open(shared_store, storage_options=s3_server.options(reader=True))
    assert "list the bucket" in told(lambda: store.version())


def test_wrong_credentials_and_places(s3_server, shared_store):
    """DF-STO-04, DF-SEC-02: one clear error each, at once, and no secret in it."""
    good = s3_server.options()
    wrong = {**good, "secret_access_key": "SECRETSECRETSECRET"}
    started = time.monotonic()
    for options in (wrong, {**good, "access_key_id": "nobody"}, s3_server.options(reader=True)):
        for call in (df.open, df.create):
            assert "access denied" in told(partial(call, shared_store, storage_options=options))
    for call in (df.open, df.create):
        text = told(partial(call, "s3://nosuchbucket/run", storage_options=good))
        assert "no such bucket" in text
    storage = open_storage("s3://nosuchbucket/run", options=good)
    for call in (
        lambda: storage.put(PACK, b"x"),
        lambda: storage.create(KEY, b"x"),
        lambda: list(storage.list("log/")),
        lambda: storage.get_ranges(PACK, [(0, 1)]),
        lambda: storage.delete([KEY]),
    ):
        assert "no such bucket" in told(call)
    assert "no store here" in told(lambda: df.open(f"{shared_store}x", storage_options=good), MissingError)
    assert time.monotonic() - started < 20
    shown = repr(open_storage(shared_store, options=wrong)) + repr(
        df.open(shared_store, storage_options=good)
    )
    assert "SECRET" not in shown
    assert good["secret_access_key"] not in shown


def test_credentials_of_a_profile(s3_server, shared_store, tmp_path, monkeypatch):
    """Credentials as users of S3 expect them: the environment, then a profile, which has its own region and
    endpoint, too.
    """
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    good = s3_server.options()
    keys, settings = tmp_path / "credentials", tmp_path / "config"
    keys.write_text(
        f"[train]\naws_access_key_id = {good['access_key_id']}\n"
        f"aws_secret_access_key = {good['secret_access_key']}\n"
        "[fetched]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = train\n"
    )
    settings.write_text(f"[profile train]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    monkeypatch.setenv("AWS_PROFILE", "train")
    assert content(df.open(shared_store).version().state_dict()) == truth(1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")  # the environment comes first
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    assert "access denied" in told(lambda: df.open(shared_store))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "gone")
    assert "no AWS profile 'gone'" in told(lambda: df.open(shared_store))
    monkeypatch.setenv("AWS_PROFILE", "fetched")
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    assert "pip install boto3" in told(lambda: df.open(shared_store))
    keys.write_text("SECRET no section\n")
    text = told(lambda: df.open(shared_store))
    assert "cannot be read" in text
    assert "SECRET" not in text
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (
        ("AWS_ENDPOINT_URL", s3_server.endpoint),
        ("AWS_ACCESS_KEY_ID", good["access_key_id"]),
        ("AWS_SECRET_ACCESS_KEY", good["secret_access_key"]),
    ):
        monkeypatch.setenv(name, value)
    assert df.open(shared_store).version().step == 1


def test_without_a_home(monkeypatch):
    """A user without a home directory has no profiles; that is no failure."""

    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert open_storage("s3://bucket/run").url == "s3://bucket/run"
    monkeypatch.setenv("AWS_PROFILE", "train")
    assert "no AWS profile 'train'" in told(lambda: open_storage("s3://bucket/run"))


class Refusing(BaseHTTPRequestHandler):
    """Answers everything with `status` and `body`."""

    status, body = 400, b""

    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.status)
        self.send_header("etag", '"x"')
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_PUT = do_HEAD = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format, *arguments):
        pass


@contextmanager
def serving(handler):
    """A server on loopback; its URL."""
    with QuietServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, "<Code>ExpiredToken</Code><Message>It has expired.</Message><Token-0>SECRET</Token-0>",
         "400 Bad Request: ExpiredToken: It has expired."),
        (403, "<AWSAccessKeyId>SECRET</AWSAccessKeyId><Code>InvalidAccessKeyId</Code>", "InvalidAccessKeyId"),
        (400, "<Code>SECRET of another kind</Code><StringToSign>SECRET</StringToSign>", "400 Bad Request"),
        (400, None, "400 Bad Request"),
    ],
)  # fmt: skip
def test_a_reply_is_not_repeated(status, body, words):
    """DF-SEC-02: of a refusal's body its code and message are shown, and nothing else of it."""
    whole = '{"token": "SECRET"}' if body is None else f'<?xml version="1.0"?><Error>{body}</Error>'
    handler = type("Handler", (Refusing,), {"status": status, "body": whole.encode()})
    with serving(handler) as endpoint:
        options = {"endpoint": endpoint, "access_key_id": "a", "secret_access_key": "b"}
        storage = open_storage("s3://b/x", options={**options, "retry_seconds": "0.2"})
        for call in (
            lambda: storage.get(KEY),
            lambda: storage.put(KEY, b""),
            lambda: list(storage.list("log/")),
        ):
            text = told(call)
            assert words in text
            assert "SECRET" not in text


# -- URLs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3://key:SECRET@bucket/x", "s3://bucket/x?token=SECRET", "s3://bucket/../x", "s3://bucket//x",
        "s3://bucket/./x", "s3://bucket/x#SECRET", "s3://b\nucket/x", "s3://bucket/x%2fSECRET", "gs://SECRET@b",
        "http://", "https://me:SECRET@host/x", "https://host/x?sig=SECRET", "https://host:port/SECRET",
    ],
)  # fmt: skip
def test_urls_that_cannot_be_meant(url):
    """DF-SEC-02: refused before anything is sent; credentials are not repeated."""
    assert "SECRET" not in told(lambda: open_storage(url), MalformedError)


def test_options_that_cannot_be_meant(tmp_path):
    for url, options in (
        ("s3://b/x", {"nonsense": "SECRET"}),
        ("s3://b/x", {"timeout": "SECRET"}),
        ("s3://b/x", {"retry_seconds": "-1"}),
        ("https://host/x", {"region": "SECRET"}),
        (str(tmp_path), {"region": "SECRET"}),
        ("memory://x", {"region": "SECRET"}),
        ("s3://b/x", 7),
    ):
        assert "SECRET" not in told(
            lambda url=url, options=options: open_storage(url, options=options), MalformedError
        )


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/x", {"endpoint": ""}), ("s3://b/x", {"endpoint_url": ""}),
        ("s3://b/x", {"aws_endpoint": ""}), ("s3://b/x", {"AWS_ENDPOINT_URL_S3": ""}),
        ("s3://b/x", {"aws_endpoint_url": "", "aws_region": "eu-west-1", "aws_token": "t"}),
        ("az://b/x", {"azure_endpoint": "", "azure_storage_account_name": "a"}),
        ("az://b/x", {"endpoint": "", "account_name": "a", "azure_storage_access_key": "aGk="}),
        ("gs://b/x", {"google_base_url": "", "skip_signature": "true"}),
    ],
)  # fmt: skip
def test_options_by_all_their_names(url, options, monkeypatch):
    """obstore has several names for one option: each serves, and an endpoint by http:// is meant so."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_")):
            monkeypatch.delenv(name)
    handler = type("Handler", (Refusing,), {"status": 403, "body": b"<Code>AskedHere</Code>"})
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"} if url.startswith("s3") else {}
    keys |= {"skip_signature": "true"} if url.startswith("az") and len(options) < 3 else {}
    with serving(handler) as endpoint:
        given = {**keys, **{name: value or endpoint for name, value in options.items()}}
        assert "AskedHere" in told(lambda: open_storage(url, options=given).get(KEY))
    twice = {"aws_region": "SECRET", "region": "SECRET"}
    text = told(lambda: open_storage("s3://b/x", options=twice), MalformedError)
    assert "second time" in text
    assert "SECRET" not in text


def test_every_cloud_by_its_url(monkeypatch):
    """gs:// and az:// are opened by the same client; nothing is sent before it is asked for."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in told(lambda: open_storage("az://container/run"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    for url in ("az://container/run", "gs://bucket/run/", "s3://bucket", "https://host/run/"):
        assert open_storage(url).url == url.rstrip("/")
        assert isinstance(open_storage(url), Storage)


# -- failures ------------------------------------------------------------------------------------------------


def test_a_server_that_ignores_the_condition_is_refused(s3_server):
    """DF-STO-02: it would let two writers make one record; a single writer may use it."""
    url = fresh()

    def overwrite(path: str, body: bytes) -> None:
        assert signed_request(s3_server, "PUT", path, body=body)[0] == 200

    with FaultProxy(s3_server.endpoint, overwrite=overwrite) as proxy:
        options = s3_server.options(endpoint=proxy.endpoint)
        store = df.create(url, block_bytes=BLOCK, storage_options=options)
        with pytest.raises(StoreError, match="created again") as caught:
            store.writer()
        assert caught.value.code is ErrorCode.CREATE_UNSAFE
        assert store.log() == []
        with store.writer(single_writer=True) as writer:
            for step in range(3):
                writer.commit(step=step, tensors=weights(step))
        assert store.log()[-1].single_writer
    assert content(df.open(url, storage_options=s3_server.options()).version().state_dict()) == truth(2)


@pytest.mark.parametrize("arrives", ["before the next writer", "after it", "never"])
def test_a_commit_whose_outcome_nobody_knew(s3_server, arrives):
    """DF-CMT-02, DF-CMT-03: its writer writes no more; the next one finds it or takes its place."""
    url = fresh()
    faults = Faults(lost_request=1.0) if arrives == "never" else Faults(late=1.0, late_seconds=1.5)
    with FaultProxy(
        s3_server.endpoint, only=lambda method, path: method == "PUT" and "/log/" in path
    ) as proxy:
        options = s3_server.options(endpoint=proxy.endpoint, retry_seconds="0.2", timeout="0.3")
        store = df.create(url, block_bytes=BLOCK, storage_options=options)
        store._context.log._retry = Retry(seconds=0.2)
        writer = store.writer()
        writer.commit(step=0, tensors=weights(0))
        proxy.faults = faults
        for _ in range(2):
            with pytest.raises(CommitUnknown):
                writer.commit(step=1, tensors=weights(1))
        proxy.faults = Faults()
        if arrives == "before the next writer":
            proxy.settle()
        store = df.open(url, storage_options=s3_server.options())
        with store.writer() as following:
            proxy.settle()
            info = following.commit(step=1, tensors=weights(1))
            assert info.created is (arrives != "before the next writer")
            following.commit(step=2, tensors=weights(2))
        with pytest.raises(CommitUnknown):
            writer.commit(step=2, tensors=weights(2))
        writer.close()
    assert [record.step for record in store.log() if record.kind == "commit"] == [2, 1, 0]
    assert df.open(url, storage_options=s3_server.options()).verify(all=True).findings == []


@pytest.mark.parametrize("lost", [1, 3])
def test_a_commit_whose_reply_is_lost_is_no_conflict(s3_server, lost):
    """DF-CMT-02: the client asks again and is told that the record exists: it is its own."""
    url, left = fresh(), [0]

    def only(method: str, path: str) -> bool:
        if method == "PUT" and "/log/" in path and left[0]:
            left[0] -= 1
            return True
        return False

    with FaultProxy(s3_server.endpoint, Faults(lost_reply=1.0), only=only) as proxy:
        options = s3_server.options(endpoint=proxy.endpoint)
        store = df.create(url, block_bytes=BLOCK, storage_options=options)
        with store.writer() as writer:
            for step in range(3):
                left[0] = lost
                assert writer.commit(step=step, tensors=weights(step)).created
                assert left == [0]
        assert proxy.counts["lost_reply"] >= 3 * lost
    assert [record.step for record in store.log() if record.kind == "commit"] == [2, 1, 0]


def test_an_outage_is_told(s3_server):
    """DF-STO-04: a server that is down, or answers 503 and 500, is an error in the time asked for."""
    url = fresh()
    df.create(url, block_bytes=BLOCK, storage_options=s3_server.options())
    faults = Faults(unavailable=1.0)
    with FaultProxy(s3_server.endpoint, faults) as proxy:
        options = s3_server.options(endpoint=proxy.endpoint, retry_seconds="0.2")
        storage = open_storage(url, options=options)
        for call in (
            lambda: df.open(url, storage_options=options),
            lambda: storage.get(KEY),
            lambda: storage.get_ranges(PACK, [(0, 1)]),
            lambda: storage.head(KEY),
            lambda: storage.put(PACK, b"x"),
            lambda: list(storage.list("log/")),
            lambda: storage.delete([KEY]),
            lambda: probe(storage),
        ):
            started = time.monotonic()
            assert "503" in told(call)
            assert time.monotonic() - started < 5
        with pytest.raises(StoreError) as caught:
            storage.create(KEY, b"x")
        assert not isinstance(caught.value, NotStoredError)  # DF-CMT-03: nobody knows
        proxy.faults = Faults(no_range=0.0)
        assert df.open(url, storage_options=options).log() == []
    nobody = s3_server.options(endpoint=f"http://127.0.0.1:{free_port()}", retry_seconds="0.5")
    assert "the store failed" in told(lambda: df.open(url, storage_options=nobody))


class Breaking(Refusing):
    """Hangs up after `seconds`, or says that it is `busy`; the first `times` tries."""

    seconds, busy, times = 0.0, False, 99

    def do_GET(self):
        self.asked.append(time.monotonic())
        if len(self.asked) > self.times:
            super().do_GET()
        elif self.busy:
            self.send_error(503)
        else:
            time.sleep(self.seconds)
            self.close_connection = True

    do_PUT = do_GET  # noqa: N815


@pytest.mark.parametrize("size", [1, 2 << 20])
def test_a_long_request_is_tried_again(size):
    """What takes longer than retry_seconds before it breaks off is tried twice more, small or large."""
    handler = type("Handler", (Breaking,), {"asked": [], "seconds": 0.4, "times": 2, "status": 200})
    with serving(handler) as endpoint:
        options = {"endpoint": endpoint, "access_key_id": "a", "secret_access_key": "b"}
        storage = open_storage("s3://b/x", options={**options, "retry_seconds": "0.3"})
        storage.put(PACK, b"x" * size)
        assert len(handler.asked) == 3


@pytest.mark.parametrize("large", [False, True])
def test_who_is_busy_is_not_pressed(large):
    """After 503 the server has a second before it is asked again."""
    handler = type("Handler", (Breaking,), {"asked": [], "busy": True, "times": 1, "status": 200})
    with serving(handler) as endpoint:
        options = {"endpoint": endpoint, "access_key_id": "a", "secret_access_key": "b"}
        open_storage("s3://b/x", options=options).put(PACK, b"x" * (2 << 20 if large else 1))
    first, second = handler.asked
    assert second - first >= 0.99


def test_a_listing_that_breaks_off_is_no_short_listing(s3_server):
    """DF-STO-04: it goes on where it broke off, or is an error; what came is never taken for all there is."""
    url = fresh()
    with FaultProxy(s3_server.endpoint) as proxy:
        options = s3_server.options(endpoint=proxy.endpoint, retry_seconds="0.3")
        store = df.create(url, block_bytes=BLOCK, storage_options=options)
        with store.writer() as writer:
            for step in range(3):
                writer.commit(step=step, tensors=weights(step))
        whole = {info.key for info in open_storage(url, options=options).list("")}
        proxy.faults = Faults(truncated=1.0)
        storage = open_storage(url, options=options)
        assert "the store failed" in told(lambda: list(storage.list("packs/")))
        listing = iter(storage.list(""))
        proxy.faults = Faults(truncated=0.5)
        assert {info.key for info in listing} == whole


def test_a_large_object_goes_in_parts(s3_server, monkeypatch):
    """What is too large for one request is uploaded in parts; all of it arrives."""
    from deltaformat import objectstorage

    monkeypatch.setattr(objectstorage, "_SINGLE_PUT_BYTES", 1 << 20)
    data = os.urandom(1 << 20) * 17
    with FaultProxy(s3_server.endpoint) as proxy:
        storage = open_storage(fresh(), options=s3_server.options(endpoint=proxy.endpoint))
        storage.put(PACK, [data[: 5 << 20], data[5 << 20 :]])
        assert [passed.method for passed in proxy.passed()] == ["POST", "PUT", "PUT", "POST"]
        assert storage.get(PACK) == data
        assert bytes(storage.get_ranges(PACK, [(16 << 20, 10)])[0]) == data[16 << 20 :][:10]


def test_what_a_step_costs(s3_server):
    """A commit is its packs and four requests at most, a follower's step its packs and three."""
    url = fresh()
    with FaultProxy(s3_server.endpoint) as proxy:
        options = s3_server.options(endpoint=proxy.endpoint)
        store = df.create(url, block_bytes=BLOCK, storage_options=options)
        live = {name: np.zeros_like(np.array(tensor)) for name, tensor in weights(0).items()}
        with (
            store.writer(policy=df.Policy(max_chain=64)) as writer,
            df.open(url, storage_options=options).follower(framework="np") as follower,
        ):
            writer.commit(step=0, tensors=weights(0))
            take(follower, live)
            for step in range(1, 12):
                proxy.passed()
                writer.commit(step=step, tensors=weights(step))
                commit = proxy.passed()
                packs = [p for p in commit if p.method == "PUT" and "/packs/" in p.path]
                assert packs
                replaced = [p for p in commit if p.method == "GET" and "/packs/" in p.path]  # of long chains
                assert len(commit) - len(replaced) <= len(packs) + 4, commit
                take(follower, live)
                assert content(live) == truth(step)
                follow = proxy.passed()
                read = [p for p in follow if p.method == "GET" and "/packs/" in p.path]
                assert len(follow) <= len(read) + 3, follow
                assert sum(p.received for p in read) <= sum(p.sent for p in packs)
                assert {p.method for p in follow} == {"GET"}
                assert not [p for p in commit + follow if "list-type" in p.path]


def take(follower, live):
    staged = follower.stage()
    staged.apply_to(live)
    staged.commit()


# -- collecting ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_collection_races_a_writer_and_a_reader(s3_server):
    """DF-GC-02, DF-GC-03, DF-GC-05: old blocks are used by every later step; a reader in the middle of a
    version ends it, or is told that it was collected.
    """
    url, options = fresh(), s3_server.options()
    store = df.create(url, block_bytes=BLOCK, storage_options=options)
    policy, stop, outcomes = df.Policy(max_chain=3), threading.Event(), set()

    def collect():
        own = df.open(url, storage_options=options)
        while not stop.is_set():
            own.gc(keep_last=2, grace=timedelta(0), dry_run=False)

    def read():
        own = df.open(url, storage_options=options)
        while not stop.is_set():
            version = own.version()
            try:
                for name in list(version.keys()):
                    time.sleep(0.01)
                    assert content({name: version.get_tensor(name)})[name] == truth(version.step)[name]
                outcomes.add("read")
            except MissingError as error:
                outcomes.add(error.code.value)

    failures = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            failures.append(error)
            raise

    with store.writer(policy=policy) as writer:
        writer.commit(step=0, tensors=weights(0))
        threads = [threading.Thread(target=guarded, args=(work,)) for work in (collect, read, read)]
        for thread in threads:
            thread.start()
        try:
            for step in range(1, 60):
                writer.commit(step=step, tensors=weights(step), files={"n.txt": b"%d" % (step % 3)})
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert failures == []
    assert "read" in outcomes
    assert outcomes <= {"read", "version-retired"}
    store = df.open(url, storage_options=options)
    assert content(store.version().state_dict()) == truth(59)
    assert store.verify(all=True).findings == []
    assert len(store.log()) > 70  # it was collected in between


# -- the web -------------------------------------------------------------------------------------------------


class Ranges(SimpleHTTPRequestHandler):
    """A web server that knows ranges, as those do that serve large files."""

    def log_message(self, *args):
        """Nothing is printed."""

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        wanted = self.headers.get("range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(data) - 1) + 1, len(data))
            if start >= len(data):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("content-range", f"bytes {start}-{end - 1}/{len(data)}")
            data = data[start:end]
        else:
            self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.send_header("last-modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        self.wfile.write(data)
        return None


@pytest.fixture
def web(tmp_path):
    """A web server's URL; it serves `tmp_path`."""
    server = QuietServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_store_on_a_web_server(web, tmp_path):
    """DF-STO-03: get and get range are all that reading needs; writing is refused in words."""
    with df.create(tmp_path / "run", block_bytes=BLOCK).writer() as writer:
        for step in range(3):
            writer.commit(step=step, tensors=weights(step), files={"n.txt": b"%d" % step})
    store = df.open(f"{web}/run")
    for step in range(3):
        with store.version(step=step) as version:
            assert content(version.state_dict()) == truth(step)
            assert version.read_file("n.txt") == b"%d" % step
    assert store.verify(all=True).findings == []
    assert store.url == f"{web}/run"
    storage = open_storage(f"{web}/run")
    assert storage.head(record_key(0)).size == len(storage.get(record_key(0)))
    for call in (
        store.writer,
        lambda: df.create(f"{web}/new"),
        lambda: store.gc(keep_last=1, dry_run=False),
        lambda: storage.delete([KEY]),
        lambda: storage.put(KEY, b""),
        lambda: list(storage.list("")),
    ):
        assert "read-only" in told(call, UnsupportedError)
    assert "no store here" in told(lambda: df.open(f"{web}/other"), MissingError)
    with pytest.raises(CorruptError):
        storage.get_ranges(record_key(0), [(0, 1 << 20)])
