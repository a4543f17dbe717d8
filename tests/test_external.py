"""Which URLs a reader follows: one grammar, and what its user has allowed."""

import pytest

from deltaformat.errors import ErrorCode, UnsafeError
from deltaformat.external import HubFile, check_external_url, parse_hub_url

REVISION = "0123456789abcdef0123456789abcdef01234567"
GOOD = f"hf://org/model.v1@{REVISION}/a b/model-00001-of-00002.safetensors"


def test_a_hub_file_at_a_commit_is_allowed():
    """SPEC 10.2, DF-EXT-01."""
    check_external_url(GOOD)
    expected = HubFile("org/model.v1", REVISION, "a b/model-00001-of-00002.safetensors")
    assert parse_hub_url(GOOD) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data",
        "https://huggingface.co/org/model/resolve/main/x",
        "s3://bucket/key",
        "HF" + GOOD[2:],
        GOOD.replace(REVISION, "main"),
        GOOD.replace(REVISION, REVISION[:-1]),
        GOOD.replace(REVISION, REVISION.upper()),
        GOOD.replace("org/", ""),
        GOOD.replace("org/", "a/b/"),
        GOOD.replace("org/", "../"),
        GOOD.replace("org/", "user:password@org/"),
        GOOD.replace("a b/", "../"),
        GOOD.replace("a b/", "./"),
        GOOD.replace("a b/", "/"),
        GOOD.replace("a b/", "%2e%2e/"),
        GOOD + "/",
        GOOD + "?x=1",
        GOOD + "#x",
        GOOD + "\n",
        GOOD + "\0",
        GOOD + "\x7f",
        GOOD + "\x85",
        GOOD.replace("a b/", "a\\b/"),
        GOOD + "x" * 5_000,
        f"hf://org/model@{REVISION}",
        f"hf://org/model@{REVISION}/",
        f"hf://datasets/org/model@{REVISION}/x",
    ],
)
def test_every_other_url_is_refused(url):
    """DF-EXT-01: refused as UNSAFE, since a manifest may come from an adversary."""
    assert parse_hub_url(url) is None
    with pytest.raises(UnsafeError) as caught:
        check_external_url(url, where="part")
    assert caught.value.code is ErrorCode.EXTERNAL_REFUSED
    assert caught.value.where == "part"


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("https://a.example/models/x", "https://a.example/models/"),
        ("https://a.example/models/x", "https://a.example/models"),
        ("https://a.example/models/x", "https://a.example"),
        ("https://a.example/x", "https://a.example/x"),
        ("file:///models/a/b", "file:///models/"),
        ("file:///models/..a/b..", "file:///models/"),
    ],
)
def test_a_prefix_allows_what_is_below_it(url, prefix):
    """DF-EXT-01: unless its user has allowed a prefix of it explicitly."""
    check_external_url(url, ["s3://other/", prefix])


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("https://a.example.evil.org/x", "https://a.example"),
        ("https://a.example@evil.org/x", "https://a.example"),
        ("https://a.example:8/x", "https://a.example"),
        ("https://a.example/models-private/x", "https://a.example/models"),
        ("https://a.example/models/../x", "https://a.example/models"),
        ("https://a.example/models/%2e%2E/x", "https://a.example/models/"),
        ("https://a.example/models/.%2e%2fx", "https://a.example/models/"),
        ("https://a.example/models/..\\x", "https://a.example/models/"),
        ("https://a.example/models/x\r\nHost: b", "https://a.example/models/"),
        ("https://a.example/models/" + "x" * 5_000, "https://a.example/models/"),
        ("https://a.example/x", ""),
    ],
)
def test_a_prefix_allows_nothing_beside_it(url, prefix):
    """DF-EXT-01: no look-alike host, no neighbour of the same beginning, no way up."""
    with pytest.raises(UnsafeError):
        check_external_url(url, [prefix])


def test_the_error_shows_no_secret():
    """DF-SEC-02: a URL's user, password and query are not repeated."""
    with pytest.raises(UnsafeError) as caught:
        check_external_url("https://user:hunter2@a.example/x?sig=hunter3#hunter4")
    assert "hunter" not in str(caught.value)
    assert "https://a.example/x" in str(caught.value)
