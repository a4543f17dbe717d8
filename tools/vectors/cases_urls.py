"""SPEC 10.2: which URLs a prefix allows, when a refusal is told, and which of two errors."""

from __future__ import annotations

from typing import Any

from vectors.cases_external import DATA, REFUSED, ZONE, external_store
from vectors.cases_reading import FULL
from vectors.faults import CORRUPT
from vectors.suite import Suite

__all__ = ["add"]

READ = "valid/external/file"
FILE: dict[str, Any] = {"profile": FULL, "features": ["file-url"], "flags": ["external"]}


def add(suite: Suite) -> None:
    """All of them."""
    _told_late(suite)
    _prefixes(suite)
    _lengths(suite)
    _two_errors(suite)


def _told_late(suite: Suite) -> None:
    """A URL that is not allowed is no fault of the version."""
    store = external_store("https://models.example/a/base.safetensors")
    id_ = suite.valid(
        "external/refused-opened",
        "a version opens though the URL of an object is not allowed, and there is no copy",
        store,
        "DF-EXT-01",
        "DF-RD-01",
        op="open",
        profile=FULL,
        flags=["external", "lazy"],
    )
    suite.valid(
        "external/refused-own-slice",
        "a slice of a tensor that is in a pack",
        id_,
        "DF-EXT-01",
        op="slice",
        tensor="own",
        ranges=[[1, 3]],
        profile=FULL,
        flags=["external", "lazy"],
    )
    suite.valid(
        "external/refused-empty-slice",
        "no row of the tensor that is in the object",
        id_,
        "DF-EXT-01",
        op="slice",
        tensor="w",
        ranges=[[5, 5]],
        profile=FULL,
        flags=["external", "lazy"],
    )
    suite.invalid(
        "external/refused-slice",
        id_,
        "a row of that tensor is asked for",
        store,
        REFUSED,
        "DF-EXT-01",
        op="slice",
        args={"tensor": "w", "ranges": [[599, 600]]},
    )
    suite.valid(
        "external/too-long-opened",
        "a version opens though the URL of an object has 4,097 characters",
        external_store("https://models.example/" + "a" * 4074),
        "DF-EXT-01",
        "DF-RD-01",
        op="open",
        profile=FULL,
        flags=["external", "lazy"],
    )


def _prefixes(suite: Suite) -> None:
    for name, title, allow in (
        ("without-slash", "a prefix that ends just before a `/`", f"file://{ZONE}"),
        ("of-two-segments", "a prefix of more than one segment", f"file://{ZONE}/a"),
    ):
        suite.valid(
            f"external/prefix-{name}",
            title,
            external_store(f"file://{ZONE}/a/b.bin"),
            "DF-EXT-01",
            allow=[allow],
            place={f"{ZONE}/a/b.bin": DATA},
            **FILE,
        )
    suite.valid(
        "external/prefix-then-dots",
        "behind the prefix come segments of dots that are neither `.` nor `..`",
        external_store(f"file://{ZONE}/.../..a/.b"),
        "DF-EXT-01",
        allow=[f"file://{ZONE}"],
        place={f"{ZONE}/.../..a/.b": DATA},
        **FILE,
    )
    path = f"{ZONE}/a base.bin"
    for name, tail, slash in (
        ("dot-dot", "/b/../a%20base.bin", True),
        ("dot-dot-no-slash", "/b/../a%20base.bin", False),
        ("encoded", "/b/%2e%2e/a%20base.bin", True),
        ("encoded-no-slash", "/b/%2e%2e/a%20base.bin", False),
        ("encoded-capitals", "/b/%2E%2E/a%20base.bin", True),
        ("half-encoded", "/b/.%2e/a%20base.bin", True),
        ("other-half-encoded", "/b/%2e./a%20base.bin", True),
        ("dot", "/./a%20base.bin", True),
        ("dot-encoded", "/%2e/a%20base.bin", True),
        ("at-the-end", "/a%20base.bin/..", True),
        ("first", "/../a%20base.bin", False),
    ):
        suite.invalid(
            f"external/behind-prefix-{name}",
            READ,
            f"behind the allowed prefix, which ends {'with' if slash else 'before'} a slash, comes {tail}",
            external_store(f"file://{ZONE}{tail}"),
            REFUSED,
            "DF-EXT-01",
            "DF-SEC-01",
            args={"allow": [f"file://{ZONE}" + "/" * slash]},
            place={path: DATA},
        )
    for name, url in (
        ("https-dot-dot", "https://models.example/a/../b"),
        ("https-encoded", "https://models.example/a/%2E%2e/b"),
    ):
        suite.invalid(
            f"external/behind-prefix-{name}",
            "valid/external/refused-with-copy",
            f"an allowed prefix and then dots: {url}; there is no copy",
            external_store(url),
            REFUSED,
            "DF-EXT-01",
            "DF-SEC-01",
            args={"allow": ["https://models.example/a/"]},
        )
    suite.invalid(
        "external/prefix-inside-file-name",
        READ,
        "the user allows what the file's name begins with",
        external_store(f"file://{ZONE}/a%20base.bin"),
        REFUSED,
        "DF-EXT-01",
        args={"allow": [f"file://{ZONE}/a"]},
        place={path: DATA},
    )


def _lengths(suite: Suite) -> None:
    """A URL has at most 4,096 characters: percent-encoding makes it that long for a path that is not."""

    def named(total: int) -> tuple[str, str]:
        """A URL of so many characters, and its path."""
        segments = ["a" * 250] * 5
        url = f"file://{ZONE}" + "".join("/" + "%61" * 250 for _ in segments)
        rest = total - len(url) - 1
        last = "b" * (rest % 3) + "c" * (rest // 3)
        url += "/" + "b" * (rest % 3) + "%63" * (rest // 3)
        assert len(url) == total
        return url, "/".join([ZONE, *segments, last])

    url, path = named(4096)
    longest = suite.valid(
        "external/longest",
        "a URL of 4,096 characters, the most it may have",
        external_store(url),
        "DF-EXT-01",
        allow=[f"file://{ZONE}/"],
        place={path: DATA},
        **{**FILE, "flags": ["external", "limit", "must-accept"]},
    )
    url, path = named(4097)
    suite.invalid(
        "external/one-longer",
        longest,
        "the URL has 4,097 characters",
        external_store(url),
        REFUSED,
        "DF-EXT-01",
        place={path: DATA},
    )
    suite.invalid(
        "external/https-too-long",
        "valid/external/refused-with-copy",
        "the URL has 4,097 characters, its prefix is allowed, and there is no copy",
        external_store("https://models.example/" + "a" * 4074),
        REFUSED,
        "DF-EXT-01",
        args={"allow": ["https://models.example/"]},
    )


def _two_errors(suite: Suite) -> None:
    """DF-EXT-03: without a copy the object's own error, with one the copy's."""
    url, path = f"file://{ZONE}/a%20base.bin", f"{ZONE}/a base.bin"
    flipped = DATA[:300] + bytes([DATA[300] ^ 1]) + DATA[301:]
    size = ("CORRUPT", "size-mismatch")
    for name, mutation, there, copy, error in (
        ("gone-copy-damaged", "the file is not there, and the copy has a wrong bit", None, flipped, CORRUPT),
        ("gone-copy-cut", "the file is not there, and the copy is cut", None, DATA[:600], size),
        ("gone-copy-empty", "the file is not there, and the copy is empty", None, b"", size),
        ("damaged-copy-damaged", "file and copy have a wrong bit", flipped, flipped, CORRUPT),
    ):
        suite.invalid(
            f"external/file-{name}",
            READ,
            mutation,
            external_store(url, copy=copy),
            error,
            "DF-EXT-03",
            "DF-DIG-01",
            place={} if there is None else {path: there},
        )
    suite.invalid(
        "external/file-is-a-directory",
        READ,
        "where the file would be is a directory, and there is no copy",
        external_store(f"file://{ZONE}/a"),
        ("STORE", "store-failed"),
        "DF-EXT-03",
        "DF-STO-04",
        level="should",
        place={f"{ZONE}/a/b": DATA},
    )
    suite.valid(
        "external/file-is-a-directory-with-copy",
        "where the file would be is a directory; the store has a copy",
        external_store(f"file://{ZONE}/a", copy=DATA),
        "DF-EXT-03",
        allow=[f"file://{ZONE}/"],
        place={f"{ZONE}/a/b": DATA},
        **FILE,
    )
