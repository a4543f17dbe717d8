"""SPEC 10.2: external objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.cases_reading import FULL
from vectors.content import NOT_FRESH, External, Tensor
from vectors.faults import CORRUPT, MANIFEST, MISSING
from vectors.primitives import sha256
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import noise

__all__ = ["DATA", "REFUSED", "ZONE", "add", "external_store"]


def add(suite: Suite) -> None:
    """All of them."""
    _external(suite)


ZONE = "/tmp/deltaformat-conformance-7f3a"
DATA = noise(700, 95)
REFUSED = ("UNSAFE", "external-refused")


def external_store(url: str, *, copy: bytes | None = None, hooks: Any = None) -> Store:
    """A version of `own`, in a pack, and `w`, in an external object of the bytes DATA."""
    made = Store(hooks=hooks)
    made.claim()
    external = External(url, DATA)
    version = made.keyframe({"own": ("U8", [4], b"abcd")})
    pieces = [[external.piece(start, min(256, 700 - start))] for start in (100, 356, 612)]
    version.tensors["w"] = Tensor("U8", [600], DATA[100:], pieces, [NOT_FRESH] * 3)
    made.commit(version)
    if copy is not None:
        made.objects[f"packs/external/{sha256(DATA)}"] = copy
    return made


def _external(suite: Suite) -> None:
    data, store, refused = DATA, external_store, REFUSED
    base = suite.valid(
        "external/refused-with-copy",
        "a URL that is not allowed; the store has a copy of the object",
        store("https://models.example/a/base.safetensors", copy=data),
        "DF-EXT-01",
        "DF-EXT-03",
        profile=FULL,
        flags=["external"],
    )
    suite.invalid(
        "external/refused",
        base,
        "there is no copy",
        store("https://models.example/a/base.safetensors"),
        refused,
        "DF-EXT-01",
        "DF-SEC-01",
    )
    suite.valid(
        "external/other-tensor",
        "a tensor that needs no external object",
        store("https://models.example/a/base.safetensors"),
        "DF-RD-01",
        "DF-EXT-01",
        select=["own"],
        profile=FULL,
        flags=["external", "lazy"],
    )
    revision = "0123456789abcdef0123456789abcdef01234567"
    for name, url in (
        ("http", "http://models.example/base"),
        ("file", "file:///etc/passwd"),
        ("hf-branch", "hf://org/model@main/model.safetensors"),
        ("hf-short-revision", f"hf://org/model@{revision[:39]}/model.safetensors"),
        ("hf-capitals", f"hf://org/model@{revision.upper()}/model.safetensors"),
        ("hf-no-revision", "hf://org/model/model.safetensors"),
        ("hf-dot-dot", f"hf://org/model@{revision}/a/../b"),
        ("hf-empty-segment", f"hf://org/model@{revision}/a//b"),
        ("hf-no-path", f"hf://org/model@{revision}/"),
        ("hf-query", f"hf://org/model@{revision}/a?b"),
        ("hf-fragment", f"hf://org/model@{revision}/a#b"),
        ("hf-percent", f"hf://org/model@{revision}/a%2fb"),
        ("hf-backslash", f"hf://org/model@{revision}/a\\b"),
        ("hf-control", f"hf://org/model@{revision}/a\nb"),
        ("hf-delete", f"hf://org/model@{revision}/a\x7fb"),
        ("hf-c1-control", f"hf://org/model@{revision}/a\x85b"),
        ("hf-namespace", f"hf://-org/model@{revision}/a"),
        ("hf-long-name", f"hf://org/{'m' * 97}@{revision}/a"),
        ("hf-too-long", f"hf://org/model@{revision}/" + "a" * 4096),
        ("hf-userinfo", f"hf://user:secret@org/model@{revision}/a"),
        ("empty", ""),
        ("relative", "base.safetensors"),
    ):
        suite.invalid(
            f"external/{name}",
            base,
            f"the URL is {url[:60]!a}, and there is no copy",
            store(url),
            refused,
            "DF-EXT-01",
            "DF-SEC-01",
        )
    for name, allow in (
        ("prefix-inside-host", ["https://models"]),
        ("prefix-inside-segment", ["https://models.example/a/base"]),
        ("prefix-of-other-host", ["https://models.example.org/"]),
        ("prefix-of-other-case", ["https://models.example/A/"]),
        ("prefix-empty", [""]),
        ("prefix-longer", ["https://models.example/a/base.safetensors/"]),
    ):
        suite.invalid(
            f"external/{name}",
            base,
            f"there is no copy, and the user allows {allow[0]!r} only",
            store("https://models.example/a/base.safetensors"),
            refused,
            "DF-EXT-01",
            args={"allow": allow},
        )
    suite.invalid(
        "external/copy-damaged",
        base,
        "the copy has a wrong bit",
        store("https://models.example/a/base.safetensors", copy=data[:-1] + bytes([data[-1] ^ 1])),
        CORRUPT,
        "DF-DIG-01",
        "DF-EXT-03",
    )
    suite.invalid(
        "external/copy-cut",
        base,
        "the copy is cut",
        store("https://models.example/a/base.safetensors", copy=data[:600]),
        ("CORRUPT", "size-mismatch"),
        "DF-EXT-03",
    )

    suite.invalid(
        "external/size-beyond-1-tib",
        base,
        "the entry states a size of 2^40 + 1",
        external_store(
            "https://models.example/a/base.safetensors",
            copy=data,
            hooks={
                "meta:1": lambda m: (
                    m | {"packs": [p | {"size": 2**40 + 1} if "url" in p else p for p in m["packs"]]}
                )
            },
        ),
        ("LIMIT", "limit-exceeded"),
        "DF-LIM-01",
        "DF-LIM-02",
    )

    def with_entry(change_: Callable[[dict[str, Any]], Any]) -> Store:
        return store(
            "https://models.example/a/base.safetensors",
            copy=data,
            hooks={"meta:1": lambda m: m | {"packs": [change_(p) if "url" in p else p for p in m["packs"]]}},
        )

    value = ("MALFORMED", "value-invalid")
    suite.invalid(
        "external/no-sha256",
        base,
        "the entry has no sha256",
        with_entry(lambda p: {k: v for k, v in p.items() if k != "sha256"}),
        ("MALFORMED", "json-invalid"),
        "DF-KEY-01",
        "DF-JSN-01",
    )
    suite.invalid(
        "external/sha256-capitals",
        base,
        "the entry's sha256 has capitals",
        with_entry(lambda p: p | {"sha256": "AB" * 32}),
        value,
        "DF-KEY-01",
    )
    suite.invalid(
        "external/key-and-url",
        base,
        "the entry has a key, too",
        with_entry(lambda p: p | {"key": f"packs/{0:020}/{'ab' * 32}.safetensors"}),
        value,
        "DF-MAN-11",
    )
    suite.invalid(
        "external/piece-beyond",
        base,
        "the entry states a size that its pieces exceed",
        with_entry(lambda p: p | {"size": 699}),
        MANIFEST,
        "DF-MAN-03",
    )

    # With file: URLs, where an adapter can read them.
    url = f"file://{ZONE}/a%20base.bin"
    path = f"{ZONE}/a base.bin"
    allowed: dict[str, Any] = {
        "allow": [f"file://{ZONE}/"],
        "profile": FULL,
        "features": ["file-url"],
        "flags": ["external"],
    }
    read = suite.valid(
        "external/file",
        "an allowed file: URL, its path percent-encoded",
        store(url),
        "DF-EXT-01",
        "DF-PCK-03",
        place={path: data},
        **allowed,
    )
    exact = {**allowed, "allow": [url]}
    suite.valid(
        "external/file-allowed-whole",
        "a prefix that is the whole URL",
        store(url),
        "DF-EXT-01",
        place={path: data},
        **exact,
    )
    suite.valid(
        "external/file-gone-with-copy",
        "the file is not there; the store has a copy",
        store(url, copy=data),
        "DF-EXT-03",
        **allowed,
    )
    suite.valid(
        "external/file-replaced-with-copy",
        "the file has another size; the store has a copy",
        store(url, copy=data),
        "DF-EXT-03",
        place={path: data + b"x"},
        **allowed,
    )
    suite.valid(
        "external/file-damaged-with-copy",
        "the file has its size and other bytes, which blocks' digests show; the store has a copy",
        store(url, copy=data),
        "DF-EXT-03",
        "DF-DIG-01",
        place={path: bytes(700)},
        **allowed,
    )
    suite.invalid(
        "external/file-gone", read, "the file is not there", store(url), MISSING, "DF-EXT-03", place={}
    )
    suite.invalid(
        "external/file-replaced",
        read,
        "the file has another size",
        store(url),
        ("CORRUPT", "size-mismatch"),
        "DF-LIM-02",
        place={path: data + b"x"},
    )
    suite.invalid(
        "external/file-damaged",
        read,
        "a bit of the file is another",
        store(url),
        CORRUPT,
        "DF-DIG-01",
        place={path: data[:300] + bytes([data[300] ^ 1]) + data[301:]},
    )
    suite.invalid(
        "external/file-not-allowed",
        read,
        "the user allows another directory",
        store(url),
        refused,
        "DF-EXT-01",
        "DF-SEC-01",
        args={"allow": [f"file://{ZONE}/b/"]},
    )
    suite.invalid(
        "external/file-dot-dot",
        read,
        "the URL leads out of the allowed directory",
        store(f"file://{ZONE}/b/../a%20base.bin"),
        refused,
        "DF-EXT-01",
        "DF-SEC-01",
        args={"allow": [f"file://{ZONE}/b/"]},
    )
