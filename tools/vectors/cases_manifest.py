"""SPEC 10.1 and 11: pieces, manifests, their metadata, several parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vectors.arrowfile import Column
from vectors.content import External, Tensor, Version
from vectors.faults import JSON, MANIFEST, VALUE
from vectors.frames import compressed
from vectors.payloads import SPARSE, sparse
from vectors.primitives import dump, frame, sha256
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import change, noise, put, without

__all__ = ["add"]

Hooks = Mapping[str, Callable[[Any], Any]]


def add(suite: Suite) -> None:
    """All of them."""
    base = suite.valid(
        "manifest/two-steps",
        "two tensors, two files, two steps: what faults are put into",
        two_steps({}),
        "DF-MAN-01",
        "DF-MAN-02",
        "DF-MAN-03",
        "DF-MAN-07",
        "DF-MAN-09",
        "DF-KEY-02",
    )
    one = suite.valid(
        "manifest/one-step",
        "the same tensors and files in one step: what most faults are put into",
        one_step({}),
        "DF-MAN-01",
        "DF-MAN-02",
        "DF-MAN-03",
        "DF-KEY-02",
    )
    _accepted(suite)
    _metadata(suite, one)
    _parents(suite, base)
    _pieces(suite, base)


W, B = noise(600, 31), noise(20, 32)


def two_steps(hooks: Hooks, mutate: Callable[[Version], None] | None = None) -> Store:
    """Faults go into record 2, which is step 1."""
    store = Store(hooks=hooks)
    store.claim()
    version = store.keyframe(
        {"w": ("BF16", [300], W), "b": ("F32", [5], B)},
        files={"config.json": b"{}", "tokenizer/vocab.txt": b"a b"},
    )
    store.commit(version)
    version = version.next()
    new = change(W[:256], 2, {4: 1, 100: -3})
    version.apply("w", 0, store.pack().put(bytes(sparse(W[:256], new, 2)), SPARSE), new)
    if mutate is not None:
        mutate(version)
    store.commit(version)
    return store


def one_step(hooks: Hooks) -> Store:
    """Faults go into record 1, the only commit."""
    store = Store(hooks=hooks)
    store.claim()
    store.commit(
        store.keyframe(
            {"w": ("BF16", [300], W), "b": ("F32", [5], B)},
            files={"config.json": b"{}", "tokenizer/vocab.txt": b"a b"},
        )
    )
    return store


def columns_hook(change_: Callable[[dict[str, Column]], Any], seq: int = 1) -> Hooks:
    """A hook that changes the columns of record `seq`, by name."""

    def hook(columns: list[Column]) -> list[Column]:
        by_name = {column.name: column for column in columns}
        changed = change_(by_name)
        return list((by_name if changed is None else changed).values())

    return {f"columns:{seq}": hook}


def rows_hook(**changes: Callable[[list[Any]], list[Any]]) -> Hooks:
    def change_(columns: dict[str, Column]) -> None:
        for name, function in changes.items():
            columns[name] = columns[name].with_rows(function(list(columns[name].rows)))

    return columns_hook(change_, seq=2)


def _accepted(suite: Suite) -> None:
    def accept(name: str, title: str, hooks: Hooks, *ids: str) -> None:
        suite.valid(f"manifest/{name}", title, one_step(hooks), *ids, flags=["must-accept", "manifest"])

    accept(
        "columns-reversed",
        "columns in the opposite order: they are found by name",
        columns_hook(lambda c: dict(reversed(c.items()))),
        "DF-MAN-01",
    )

    def more(columns: dict[str, Column]) -> None:
        columns["note"] = Column("note", "utf8", ["x", "y"])
        columns["sizes"] = Column("sizes", "list:int32", [[1, 2], []])
        columns["big"] = Column("big", "large:utf8", ["", "z"])
        columns["holes"] = Column("holes", "uint16", [1, 2], validity=b"\1")

    accept(
        "unknown-columns",
        "columns that SPEC.md does not know, of other types, one with a null",
        columns_hook(more),
        "DF-MAN-01",
    )

    def flags(columns: dict[str, Column]) -> None:
        for column in columns.values():
            column.nullable, column.child = False, "element"

    accept(
        "flags-and-child-names",
        "columns are not nullable, and list children have another name",
        columns_hook(flags),
        "DF-MAN-01",
    )

    def validity(columns: dict[str, Column]) -> None:
        columns["fresh"].validity = columns["name"].validity = b"\3"

    accept(
        "validity-without-nulls",
        "two columns have validity bitmaps in which every bit is set",
        columns_hook(validity),
        "DF-MAN-01",
    )
    accept(
        "empty-buffers-at-0",
        "buffers without bytes all begin at 0, inside another",
        {"arrow:1": put(empty_at=0)},
        "DF-MAN-01",
    )
    accept("aligned-to-64", "buffers begin at multiples of 64 bytes", {"arrow:1": put(align=64)}, "DF-MAN-01")
    accept(
        "frame-compressed",
        "a frame whose blocks are compressed, with a checksum",
        {"frame:1": lambda c: compressed(c, 5, checksum=True)},
        "DF-MAN-02",
    )
    accept(
        "frame-with-window",
        "a frame with a window of its own",
        {"frame:1": lambda c: frame(c, window=5 << 3)},
        "DF-MAN-02",
    )
    accept("frame-with-checksum", "a frame with a checksum", {"frame:1": checked_frame}, "DF-MAN-02")
    accept(
        "frame-size-in-8-bytes",
        "a frame that states its content size in eight bytes",
        {"frame:1": lambda c: frame(c, size_bytes=8)},
        "DF-MAN-02",
    )
    accept(
        "unknown-members",
        "members of the metadata, its packs and files that SPEC.md does not know",
        {"meta:1": _more_members},
        "DF-JSN-02",
    )
    accept(
        "metadata-with-spaces",
        "metadata with white space and escapes",
        {"meta:1": lambda m: dump(m).replace(b",", b" ,\n\t").replace(b'"digest"', b'"\\u0064igest"')},
        "DF-MAN-01",
        "DF-JSN-01",
    )
    unused = {"key": f"packs/{0:020}/{'ab' * 32}.safetensors", "size": 1}
    accept(
        "unused-pack",
        "the pack table names a pack that no piece uses, and that is not there",
        {"meta:1": lambda m: m | {"packs": [*m["packs"], unused]}},
        "DF-RD-01",
    )

    shared = Store()
    shared.claim()
    content = noise(256, 33)
    version = shared.keyframe({"a": ("U8", [256], content)})
    chain = version.tensors["a"].chains[0]
    version.tensors["b"] = Tensor("BF16", [128], content, [list(chain)], [255])
    version.tensors["c"] = Tensor("U8", [2, 256], content * 2, [list(chain), list(chain)], [255, 255])
    shared.commit(version)
    suite.valid(
        "manifest/shared-pieces",
        "four blocks with one content share a piece: gaps are negative",
        shared,
        "DF-MAN-03",
        "DF-DIG-02",
        flags=["must-accept", "manifest"],
    )

    whole = Store()
    whole.claim()
    base = External("https://models.example/base.bin", noise(300, 34))
    version = whole.keyframe({"a": ("U8", [4], b"abcd")})
    version.tensors["e"] = Tensor("U8", [100], base.data[50:150], [[base.piece(50, 100)]], [255])
    whole.commit(version)
    whole.objects[f"packs/external/{sha256(base.data)}"] = base.data
    suite.valid(
        "manifest/pack-and-external",
        "one part with a pack and an external object, refused, of which there is a copy",
        whole,
        "DF-EXT-03",
        flags=["external"],
    )


def checked_frame(content: bytes) -> bytes:
    import xxhash

    return frame(content, checksum=(xxhash.xxh64_intdigest(content) & 0xFFFFFFFF).to_bytes(4, "little"))


def _more_members(meta: dict[str, Any]) -> dict[str, Any]:
    meta["note"] = {"deep": [1.5, None, True]}
    for entry in (*meta["packs"], *meta["files"]):
        entry["note"] = "x"
    return meta


def _metadata(suite: Suite, base: str) -> None:
    def fault(
        name: str, mutation: str, change_: Callable[[dict[str, Any]], Any], error: tuple[str, str], *ids: str
    ) -> None:
        suite.invalid(f"manifest/{name}", base, mutation, one_step({"meta:1": change_}), error, *ids)

    inconsistent = ("INCONSISTENT", "parts-disagree")
    fault(
        "format-2",
        "the format is `deltaformat-manifest/2`",
        put(format="deltaformat-manifest/2"),
        ("UNSUPPORTED", "format-unknown"),
        "DF-VER-01",
    )
    fault(
        "requires",
        "`requires` names a feature that nobody knows",
        put(requires=["quantum-blocks"]),
        ("UNSUPPORTED", "feature-unknown"),
        "DF-VER-01",
    )
    fault(
        "requires-no-name",
        "`requires` holds a string that is no feature's name: unknown all the same",
        put(requires=["Quantum Blocks"]),
        ("UNSUPPORTED", "feature-unknown"),
        "DF-VER-01",
    )
    # Grammar comes before any comparison: these are not INCONSISTENT.
    for name, value in (("parent", -1), ("block_bytes", -256)):
        fault(
            f"{name.replace('_', '-')}-negative",
            f"`{name}` is {value}",
            put(**{name: value}),
            VALUE,
            "DF-MAN-09",
        )
    fault("parent-beyond", "`parent` is 2^53", put(parent=2**53), JSON, "DF-MAN-09")
    fault("parent-text", '`parent` is "0"', put(parent="0"), JSON, "DF-MAN-09")
    fault(
        "file-size-beyond-1-tib",
        "a sidecar file's size is 2^40 + 1",
        lambda m: m | {"files": [m["files"][0] | {"size": 2**40 + 1}, *m["files"][1:]]},
        ("LIMIT", "limit-exceeded"),
        "DF-LIM-01",
        "DF-LIM-02",
    )
    fault(
        "format-2-and-nothing-else",
        "another format, and no other member: format is checked first",
        lambda m: {"format": "deltaformat-manifest/2"},
        ("UNSUPPORTED", "format-unknown"),
        "DF-VER-01",
    )
    fault(
        "other-digest",
        "`digest` is not the descriptor's",
        put(digest="blake3-256"),
        inconsistent,
        "DF-MAN-09",
    )
    fault(
        "other-block-size",
        "`block_bytes` is not the descriptor's",
        put(block_bytes=512),
        inconsistent,
        "DF-MAN-09",
    )
    for name in ("format", "digest", "block_bytes", "parent", "packs", "files", "requires"):
        fault(f"metadata-without-{name}", f"the metadata lacks `{name}`", without(name), JSON, "DF-JSN-01")
    fault("packs-an-object", "`packs` is an object", put(packs={}), JSON, "DF-JSN-01")
    fault(
        "pack-size-text",
        "a pack's size is a string",
        lambda m: m | {"packs": [m["packs"][0] | {"size": "600"}, *m["packs"][1:]]},
        JSON,
        "DF-JSN-01",
    )
    fault(
        "pack-size-negative",
        "a pack's size is -1",
        lambda m: m | {"packs": [m["packs"][0] | {"size": -1}, *m["packs"][1:]]},
        VALUE,
        "DF-JSN-01",
    )
    fault(
        "pack-size-beyond-1-tib",
        "a pack's size is 2^40 + 1",
        lambda m: m | {"packs": [m["packs"][0] | {"size": 2**40 + 1}, *m["packs"][1:]]},
        ("LIMIT", "limit-exceeded"),
        "DF-LIM-01",
        "DF-LIM-02",
    )
    fault(
        "pack-twice",
        "two entries name one pack",
        lambda m: m | {"packs": [*m["packs"], m["packs"][0]]},
        MANIFEST,
        "DF-MAN-11",
    )
    fault(
        "pack-is-a-file",
        "an entry of `packs` has the key of a sidecar file",
        lambda m: m | {"packs": [*m["packs"], {"key": m["files"][0]["key"], "size": 2}]},
        VALUE,
        "DF-MAN-11",
    )
    fault(
        "pack-is-a-copy",
        "an entry of `packs` has the key of an external copy",
        lambda m: m | {"packs": [*m["packs"], {"key": "packs/external/" + "ab" * 32, "size": 2}]},
        VALUE,
        "DF-MAN-11",
    )
    fault(
        "file-is-a-pack",
        "an entry of `files` has the key of a pack",
        lambda m: m | {"files": [m["files"][0] | {"key": m["packs"][0]["key"]}]},
        VALUE,
        "DF-MAN-11",
    )
    fault(
        "metadata-not-utf-8",
        "the metadata is not UTF-8",
        lambda m: dump(m).replace(b"config", b"c\xffnfig"),
        JSON,
        "DF-JSN-01",
    )
    fault(
        "metadata-member-twice",
        "the metadata has a member twice",
        lambda m: dump(m)[:-1] + b',"requires":[]}',
        JSON,
        "DF-JSN-01",
    )
    fault("metadata-cut", "the metadata's JSON is cut", lambda m: dump(m)[:-1], JSON, "DF-JSN-01")
    fault(
        "metadata-fraction",
        "`block_bytes` is written as 256.0",
        lambda m: dump(m).replace(b":256,", b":256.0,"),
        JSON,
        "DF-JSN-01",
    )


def _parents(suite: Suite, base: str) -> None:
    for name, mutation, parent in (
        ("other-parent", "`parent` is not the record's", 0),
        ("null-parent", "`parent` is null, the record's is not", None),
    ):
        made = two_steps({"meta:2": put(parent=parent)})
        suite.invalid(
            f"manifest/{name}", base, mutation, made, ("INCONSISTENT", "parts-disagree"), "DF-MAN-09"
        )


def _pieces(suite: Suite, base: str) -> None:
    def fault(name: str, mutation: str, hooks: Hooks, error: tuple[str, str] = MANIFEST, *ids: str) -> None:
        suite.invalid(f"manifest/{name}", base, mutation, two_steps(hooks), error, *(ids or ("DF-MAN-03",)))

    # Pieces of `w` at step 1: block 0 raw and sparse, block 1 raw, block 2 raw; then `b`.
    def at(number: int, value: Any) -> Callable[[list[Any]], list[Any]]:
        return lambda rows: [
            [
                value(v) if i == number and callable(value) else value if i == number else v
                for i, v in enumerate(rows[0])
            ],
            *rows[1:],
        ]

    fault("negative-offset", "a gap leads before the beginning of the pack", rows_hook(gap=at(0, -1)))
    fault(
        "beyond-pack",
        "the last piece of a pack ends one byte behind it",
        rows_hook(gap=lambda rows: [*rows[:1], [rows[1][0] + 1]]),
    )
    fault("gap-wraps", "a gap of 2^63 - 1", rows_hook(gap=at(2, 2**63 - 1)))
    fault("gap-most-negative", "a gap of -2^63", rows_hook(gap=at(2, -(2**63))))
    fault("pack-index", "a piece names a pack that the table does not have", rows_hook(pack=at(0, 2)))
    fault("pack-index-large", "a piece names pack 2^32 - 1", rows_hook(pack=at(0, 2**32 - 1)))
    fault("length-zero", "a piece of no bytes", rows_hook(length=at(1, 0)), MANIFEST, "DF-PCK-04")
    fault(
        "length-beyond-bound",
        "a piece longer than twice its block and 4,096, in a pack that is long enough",
        {
            **rows_hook(length=at(1, 2 * 256 + 4097), gap=at(1, 0)),
            "meta:2": lambda m: m | {"packs": [m["packs"][0], m["packs"][1] | {"size": 1 << 20}]},
        },
        MANIFEST,
        "DF-PCK-04",
    )
    fault(
        "length-4-gib",
        "a piece of 2^32 - 1 bytes",
        rows_hook(length=at(1, 2**32 - 1)),
        MANIFEST,
        "DF-PCK-04",
        "DF-LIM-02",
    )
    fault(
        "fresh-is-depth",
        "`fresh` equals the depth of the chain",
        rows_hook(fresh=at(0, 2)),
        MANIFEST,
        "DF-MAN-07",
    )
    fault("fresh-254", "`fresh` is 254", rows_hook(fresh=at(1, 254)), MANIFEST, "DF-MAN-07")
    first = Store(
        hooks={"columns:1": lambda cols: [c.with_rows([[0]]) if c.name == "fresh" else c for c in cols]}
    )
    first.claim()
    first.commit(first.keyframe({"w": ("U8", [4], b"abcd")}))
    alone = Store()
    alone.claim()
    alone.commit(alone.keyframe({"w": ("U8", [4], b"abcd")}))
    plain = suite.valid("manifest/no-parent", "a first commit: every `fresh` is 255", alone, "DF-MAN-07")
    suite.invalid(
        "manifest/fresh-without-parent",
        plain,
        "`fresh` is 0 in a version without a parent",
        first,
        MANIFEST,
        "DF-MAN-07",
    )
