"""Stores in buckets of the Hugging Face Hub: its unmodified client against a loopback server."""

import itertools
import os
import secrets
import time
from functools import partial

import pytest
from hubserver import TOKEN, HubServer
from storagetools import KEY, PACK
from tinystore import BLOCK, content, truth, weights

import deltaformat as df
from deltaformat import hubstorage
from deltaformat.errors import (
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    MalformedError,
    MissingError,
    StoreError,
    UnsupportedError,
)
from deltaformat.examine import examine
from deltaformat.hubclient import asked_to_wait
from deltaformat.keys import record_key
from deltaformat.retrying import Retry
from deltaformat.storage import Storage, open_storage
from deltaformat.testing import StorageTests

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
pytest.importorskip("hf_xet", reason="hf_xet is not installed")

numbers = itertools.count()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_XET_CACHE", str(tmp_path_factory.mktemp("xet")))
        server.state.buckets["me/tests"] = {}
        yield server


def options(hub, **more):
    return {"endpoint": hub.endpoint, "token": TOKEN, "retry_seconds": "5", **more}


def fresh():
    return f"hf://buckets/me/tests/{secrets.token_hex(4)}-{next(numbers)}"


class TestHubBucket(StorageTests):
    exclusive_create = False
    many_objects = 60

    @pytest.fixture
    def storage(self, hub, monkeypatch) -> Storage:
        monkeypatch.setattr(hubstorage, "_DELETE_AT_ONCE", 25)
        return open_storage(fresh(), options=options(hub))


class TestLimitedHub(StorageTests):
    """The same where the Hub answers every fourth request for a file with 429."""

    exclusive_create = False
    many_objects = 60

    @pytest.fixture
    def storage(self, hub, monkeypatch):
        monkeypatch.setattr(hubstorage, "Retry", partial(Retry, first=0.01, longest=0.1))
        hub.state.limited = 0.25
        yield open_storage(fresh(), options=options(hub, retry_seconds="30"))
        hub.state.limited = 0.0


def told(call, error: type[DeltaFormatError] = StoreError) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert TOKEN not in text
    assert "secret" not in text
    return text


def test_one_writer_only(hub):
    """DF-STO-02: the Hub's own API has no *create*, so a writer must be the single one, and is told so."""
    url = fresh()
    store = df.create(url, block_bytes=BLOCK, storage_options=options(hub))
    with pytest.raises(StoreError, match="single") as caught:
        store.writer()
    assert caught.value.code is ErrorCode.CREATE_UNSAFE
    assert store.log() == []
    with store.writer(single_writer=True) as writer:
        for step in range(3):
            writer.commit(step=step, tensors=weights(step))
    assert content(df.open(url, storage_options=options(hub)).version().state_dict()) == truth(2)
    assert store.log()[-1].single_writer
    found = examine(open_storage(url, options=options(hub)))
    assert "by a single writer only" in found.verdict
    assert [check.name for check in found.checks if not check.ok] == ["create-if-absent"]


def test_the_token_goes_to_the_hub_and_nowhere_else(hub, monkeypatch):
    """DF-SEC-02, DF-EXT-02: what the Hub redirects to gets no token; errors and reprs show none."""
    url = fresh()
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # as its users have it
    given = {"endpoint": hub.endpoint, "retry_seconds": "2"}
    store = df.create(url, block_bytes=BLOCK, storage_options=given)
    with store.writer(single_writer=True) as writer:
        writer.commit(step=0, tensors=weights(0))
    del hub.state.requests[:]
    assert content(df.open(url, storage_options=given).version().state_dict()) == truth(0)
    asked = [token for _, path, token in hub.state.requests if path.startswith("/buckets/")]
    redirected = [token for _, path, token in hub.state.requests if path.startswith("/xet/")]
    assert set(asked) == {f"Bearer {TOKEN}"}
    assert redirected
    assert set(redirected) == {None}
    assert TOKEN not in repr(store) + repr(open_storage(url, options=given))


def test_refusals(hub, monkeypatch):
    """DF-STO-04: each failure is told in one line, and none as absence."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    url = fresh()
    good = options(hub)
    df.create(url, block_bytes=BLOCK, storage_options=good)
    started = time.monotonic()
    nobody = options(hub, token="hf_nobodynobodynobody")
    assert "access denied" in told(lambda: df.open(url, storage_options=nobody))
    assert "access denied" in told(lambda: df.create(url, storage_options=nobody))
    elsewhere = open_storage("hf://buckets/me/nothing/x", options=good)
    for call in (
        lambda: elsewhere.get(KEY),
        lambda: elsewhere.get_ranges(PACK, [(0, 1)]),
        lambda: elsewhere.head(KEY),
        lambda: elsewhere.put(KEY, b"x"),
        lambda: elsewhere.delete([KEY]),
        lambda: list(elsewhere.list("log/")),
    ):
        assert "no such bucket" in told(call)
    assert "no store here" in told(lambda: df.open(fresh(), storage_options=good), MissingError)
    assert time.monotonic() - started < 20
    down = options(hub, endpoint="http://127.0.0.1:9", retry_seconds="0.3")
    assert "the Hub failed" in told(lambda: df.open(url, storage_options=down))
    hub.state.limited = 1.0
    try:
        limited = options(hub, retry_seconds="0.3")
        for call in (df.open, df.create):
            assert "429" in told(partial(call, url, storage_options=limited))
    finally:
        hub.state.limited = 0.0


def test_ranges_ask_the_hub_once(hub):
    """The Hub limits how often files may be resolved: ranges of one object share one answer."""
    storage = open_storage(fresh(), options=options(hub))
    data = os.urandom(100_000)
    storage.put(PACK, data)
    hub.state.counts.clear()
    ranges = [(start, 10) for start in range(0, 90_000, 1000)]
    assert [bytes(found) for found in storage.get_ranges(PACK, ranges)] == [
        data[s : s + n] for s, n in ranges
    ]
    assert (hub.state.counts["resolve"], hub.state.counts["content"]) == (1, len(ranges))


def test_the_hint_is_never_an_old_one(hub):
    """What is overwritten is asked for anew each time."""
    storage = open_storage(fresh(), options=options(hub))
    for number in range(3):
        storage.put("hints/tail.json", b"%d" % number)
        assert storage.get("hints/tail.json") == b"%d" % number


def test_retry_after_is_honoured(hub):
    """A server that says when to come again is not asked before, nor is one that says too late."""
    storage = open_storage(fresh(), options=options(hub))
    storage.put(KEY, b"x")
    pauses: list[float] = []
    clock = itertools.count(0.0, 0.01)
    client = storage._client
    hub.state.limited, hub.state.retry_after = 1.0, "7"

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            hub.state.limited = 0.0

    client._retry = Retry(seconds=20, sleep=sleep, clock=lambda: next(clock))
    try:
        assert storage.get(KEY) == b"x"
        assert pauses == [7.0, 7.0]
        hub.state.limited, hub.state.retry_after = 1.0, "21"
        assert "429" in told(lambda: storage.get(KEY))
        assert len(pauses) == 2
        hub.state.retry_after, hub.state.reset = None, 9  # the Hub's own headers
        pauses.clear()
        assert storage.get(KEY) == b"x"
        assert pauses == [9.0, 9.0]
    finally:
        hub.state.limited, hub.state.retry_after, hub.state.reset = 0.0, "0", 0


def test_how_long_to_wait():
    """Retry-After is a number or a date; else the Hub's own header tells; what cannot be meant is nothing."""
    date = "Mon, 30 Nov 2026 10:00:00 GMT"
    for headers, seconds in (
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "Mon, 30 Nov 2026 10:01:30 GMT", "date": date}, 90.0),
        ({"retry-after": "Mon, 30 Nov 2026 09:00:00 GMT", "date": date}, 0.0),
        ({"retry-after": "Thu, 01 Jan 2015 00:00:00 GMT"}, 0.0),
        ({"retry-after": "Mon, 30 Nov 2026 10:01:30 -0000", "date": date}, 0.0),
        ({"retry-after": "soon", "ratelimit": '"api";r=0;t=5'}, 5.0),
        ({"ratelimit": '"api";r=3;t=5'}, 0.0),
        ({}, 0.0),
    ):
        assert asked_to_wait(headers) == seconds


def test_urls_and_options():
    """DF-SEC-02: what cannot be meant is refused, without repeating it."""
    for url in (
        "hf://buckets/me", "hf://buckets/me/", "hf://me/model", "hf://buckets/me/b/../c", "hf://buckets/me/b//c",
        "hf://SECRET@buckets/me/b", "hf://buckets/me/b?token=SECRET", "hf://buckets/m e/b", "hf://datasets/a/b",
    ):  # fmt: skip
        assert "SECRET" not in told(lambda url=url: open_storage(url), MalformedError)
    for given in (
        {"region": "SECRET"}, {"timeout": "SECRET"}, {"retry_seconds": "x"}, {"timeout": None},
        {"timeout": "inf"}, {"retry_seconds": "-3"}, {"retry_seconds": "nan"}, {"timeout": "0"},
    ):  # fmt: skip
        text = told(lambda given=given: open_storage("hf://buckets/me/b", options=given), MalformedError)
        assert "SECRET" not in text
    assert open_storage("hf://buckets/me/b/").url == "hf://buckets/me/b"


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert "deltaformat[hf]" in told(lambda: open_storage("hf://buckets/me/b"), UnsupportedError)


@pytest.mark.skipif(
    not (os.environ.get("HF_TOKEN") and os.environ.get("DELTAFORMAT_TEST_HF_BUCKET")),
    reason="needs HF_TOKEN and DELTAFORMAT_TEST_HF_BUCKET=namespace/name, a bucket for tests",
)
def test_the_live_hub():  # pragma: no cover - only where there is a token
    """The same on the real Hub."""
    bucket = os.environ["DELTAFORMAT_TEST_HF_BUCKET"]
    storage = open_storage(f"hf://buckets/{bucket}/deltaformat-test-{secrets.token_hex(6)}")
    try:
        with pytest.raises(MissingError):
            storage.get(record_key(0))
        store = df.create(storage, block_bytes=BLOCK)
        with store.writer(single_writer=True) as writer:
            for step in range(2):
                writer.commit(step=step, tensors=weights(step))
        before = store.version(step=0)
        assert content(store.version(step=1).follow(before, before.state_dict())) == truth(1)
        with pytest.raises(CorruptError):
            storage.get_ranges(record_key(0), [(0, 1 << 20)])
    finally:
        storage.delete([info.key for info in storage.list("")])
