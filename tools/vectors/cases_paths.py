"""SPEC 6, 11 and 11.3: sidecar paths, several parts, keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vectors.arrowfile import Column
from vectors.cases_manifest import Hooks, one_step
from vectors.faults import VALUE
from vectors.primitives import sha256
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import noise

__all__ = ["add"]

ONE = "valid/manifest/one-step"


def add(suite: Suite) -> None:
    """All of them."""
    _paths(suite, ONE)
    _parts(suite)
    _keys(suite, ONE)


def _paths(suite: Suite, base: str) -> None:
    unsafe = ("UNSAFE", "path-unsafe")

    def fault(name: str, mutation: str, path: str) -> None:
        def change_(meta: dict[str, Any]) -> dict[str, Any]:
            return meta | {"files": [meta["files"][0] | {"path": path}, *meta["files"][1:]]}

        suite.invalid(
            f"manifest/path-{name}",
            base,
            mutation,
            one_step({"meta:1": change_}),
            unsafe,
            "DF-MAN-10",
            "DF-SEC-01",
        )

    for name, path in (
        ("parent", "../x"),
        ("parent-inside", "a/../x"),
        ("dot", "./x"),
        ("absolute", "/x"),
        ("empty", ""),
        ("empty-segment", "a//x"),
        ("slash-at-end", "a/"),
        ("backslash", "a\\x"),
        ("colon", "C:x"),
        ("nul", "a\0x"),
        ("line-break", "a\nx"),
        ("delete", "a\x7fx"),
        ("c1-control", "a\x85x"),
    ):
        fault(name, f"a sidecar path is {path!a}", path)
    fault("too-long", "a sidecar path of 1,025 bytes", "x" * 1023 + "\u00e9")
    fault("twice", "two sidecar files have one path", "tokenizer/vocab.txt")
    longest = Store()
    longest.claim()
    names = {
        "x" * 1022 + "\u00e9": b"1",
        "a b/...": b"2",
        "\u00e9": b"3",
        "e\u0301": b"4",
        "CON": b"5",
        "..a/b..": b"6",
        "\U0001f600": b"7",
        "\uffff": b"8",
    }
    longest.commit(longest.keyframe({"w": ("U8", [1], b"x")}, files=names))
    suite.valid(
        "manifest/paths",
        "sidecar paths that are safe: 1,024 bytes, dots that are no segments, any script",
        longest,
        "DF-MAN-10",
        flags=["must-accept", "files"],
    )

    def tampered(
        name: str, mutation: str, change_: Callable[[bytes], bytes | None], error: tuple[str, str]
    ) -> None:
        objects = dict(one_step({}).objects)
        key = f"files/{0:020}/{sha256(b'a b')}"
        data = change_(objects.pop(key))
        if data is not None:
            objects[key] = data
        suite.invalid(f"manifest/file-{name}", base, mutation, objects, error, "DF-KEY-02")

    tampered("changed", "a byte of a sidecar file is another", lambda d: b"a c", ("CORRUPT", "hash-mismatch"))
    tampered("cut", "a sidecar file lacks a byte", lambda d: b"a ", ("CORRUPT", "size-mismatch"))
    tampered("longer", "a sidecar file has a byte more", lambda d: b"a b ", ("CORRUPT", "size-mismatch"))
    tampered("missing", "a sidecar file is not there", lambda d: None, ("MISSING", "object-missing"))


def _parts(suite: Suite) -> None:
    tensors = {name: ("U8", [40], noise(40, number)) for number, name in enumerate(["a", "b", "c", "d"])}

    def parts(
        groups: Sequence[Sequence[str]], hooks: Hooks | None = None, files: Mapping[str, bytes] | None = None
    ) -> Store:
        store = Store(hooks=hooks)
        store.claim()
        store.commit(store.keyframe(tensors, files=files or {"x": b"1"}), parts=groups)
        return store

    base = suite.valid(
        "parts/two",
        "two parts, whose names interleave",
        parts([["c", "a"], ["d", "b"]]),
        "DF-MAN-05",
        "DF-DIG-03",
        flags=["parts"],
    )
    suite.valid(
        "parts/four",
        "four parts of one tensor",
        parts([["d"], ["c"], ["b"], ["a"]]),
        "DF-MAN-05",
        flags=["parts"],
    )
    suite.valid(
        "parts/one-empty",
        "a part without rows beside one with all",
        parts([["a", "b", "c", "d"], []]),
        "DF-MAN-05",
        flags=["parts", "must-accept"],
    )

    def rename(text: str) -> Callable[[list[Column]], list[Column]]:
        return lambda cols: [cols[0].with_rows([text, *cols[0].rows[1:]]), *cols[1:]]

    suite.invalid(
        "parts/name-in-both",
        base,
        "a name occurs in both parts",
        parts([["c", "a"], ["d", "b"]], {"columns:1.1": rename("a")}),
        ("INCONSISTENT", "parts-disagree"),
        "DF-MAN-05",
    )
    suite.invalid(
        "parts/path-in-both",
        base,
        "a sidecar path occurs in both parts",
        parts(
            [["c", "a"], ["d", "b"]],
            {
                "meta:1.1": lambda m: (
                    m | {"files": [{"path": "x", "key": f"files/{0:020}/{sha256(b'1')}", "size": 1}]}
                )
            },
        ),
        ("UNSAFE", "path-unsafe"),
        "DF-MAN-10",
    )
    suite.invalid(
        "parts/second-of-other-parent",
        base,
        "the second part names a parent",
        parts([["c", "a"], ["d", "b"]], {"meta:1.1": lambda m: m | {"parent": 0}}),
        ("INCONSISTENT", "parts-disagree"),
        "DF-MAN-09",
    )
    missing = parts([["c", "a"], ["d", "b"]])
    second = [k for k in missing.objects if k.startswith("manifests/")][-1]
    del missing.objects[second]
    suite.invalid(
        "parts/second-missing",
        base,
        "the second part is not there",
        missing.objects,
        ("MISSING", "object-missing"),
        "DF-STO-04",
    )
    left_out = parts([["c", "a"], ["d", "b"]], {"record:1": lambda m: m | {"manifests": m["manifests"][:1]}})
    suite.invalid(
        "parts/second-left-out",
        base,
        "the record names the first part only: the root is of all tensors",
        left_out,
        ("INCONSISTENT", "root-mismatch"),
        "DF-DIG-04",
    )


def _more_packs(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda meta: meta | {"packs": [*meta["packs"], {"key": key, "size": 1}]}


def _keys(suite: Suite, base: str) -> None:
    """DF-KEY-01, in the pack table, the files and the record."""
    good = f"packs/{0:020}/{'ab' * 32}.safetensors"
    for name, key in (
        ("outside", "../" + good),
        ("absolute", "/" + good),
        ("capitals", good.replace("ab", "AB")),
        ("short-claim", good.replace(f"{0:020}", f"{0:019}")),
        ("long-hash", good.replace("ab" * 32, "ab" * 33)),
        ("no-extension", good[:-12]),
        ("line-break", good + "\n"),
        ("other-digits", good.replace("0", "\u0660", 1)),
        ("empty", ""),
    ):
        suite.invalid(
            f"keys/pack-{name}",
            base,
            f"the pack table has the key {key!a}",
            one_step({"meta:1": _more_packs(key)}),
            VALUE,
            "DF-KEY-01",
            "DF-SEC-01",
        )
    suite.invalid(
        "keys/manifest-outside",
        base,
        "the record's manifest key leads out of the store",
        one_step(
            {
                "record:1": lambda m: (
                    m | {"manifests": [m["manifests"][0] | {"key": "../" + m["manifests"][0]["key"]}]}
                )
            }
        ),
        VALUE,
        "DF-KEY-01",
        "DF-SEC-01",
    )
    suite.invalid(
        "keys/file-outside",
        base,
        "a file's key leads out of the store",
        one_step({"meta:1": lambda m: m | {"files": [m["files"][0] | {"key": "files/../x"}]}}),
        VALUE,
        "DF-KEY-01",
        "DF-SEC-01",
    )
