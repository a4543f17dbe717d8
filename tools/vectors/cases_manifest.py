"""SPEC 10.1 and 11: pieces, manifests, their metadata, several parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vectors.arrowfile import Column
from vectors.payloads import SPARSE, sparse
from vectors.primitives import dump, frame, sha256
from vectors.store import External, Store, Tensor, Version
from vectors.suite import Suite
from vectors.weights import change, noise

__all__ = ["add"]

INVALID = ("MALFORMED", "manifest-invalid")
VALUE = ("MALFORMED", "value-invalid")
JSON = ("MALFORMED", "json-invalid")
Hooks = Mapping[str, Callable[[Any], Any]]


def add(suite: Suite) -> None:
    """All of them."""
    base = suite.valid(
        "manifest/two-steps",
        "two tensors, two files, two steps: what faults are put into",
        _two_steps({}),
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
        _one_step({}),
        "DF-MAN-01",
        "DF-MAN-02",
        "DF-MAN-03",
        "DF-KEY-02",
    )
    _accepted(suite)
    _arrow(suite, one)
    _frames(suite, one)
    _metadata(suite, one)
    _parents(suite, base)
    _pieces(suite, base)
    _paths(suite, one)
    _parts(suite)
    _keys(suite, one)


W, B = noise(600, 31), noise(20, 32)


def _two_steps(hooks: Hooks, mutate: Callable[[Version], None] | None = None) -> Store:
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


def _one_step(hooks: Hooks) -> Store:
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


def _columns(change_: Callable[[dict[str, Column]], Any], seq: int = 1) -> Hooks:
    """A hook that changes the columns of record `seq`, by name."""

    def hook(columns: list[Column]) -> list[Column]:
        by_name = {column.name: column for column in columns}
        changed = change_(by_name)
        return list((by_name if changed is None else changed).values())

    return {f"columns:{seq}": hook}


def _rows(**changes: Callable[[list[Any]], list[Any]]) -> Hooks:
    def change_(columns: dict[str, Column]) -> None:
        for name, function in changes.items():
            columns[name] = columns[name].with_rows(function(list(columns[name].rows)))

    return _columns(change_, seq=2)


def _options(**options: Any) -> Hooks:
    return {"arrow:1": lambda made: made | options}


def _accepted(suite: Suite) -> None:
    def accept(name: str, title: str, hooks: Hooks, *ids: str) -> None:
        suite.valid(f"manifest/{name}", title, _one_step(hooks), *ids, flags=["must-accept", "manifest"])

    accept(
        "columns-reversed",
        "columns in the opposite order: they are found by name",
        _columns(lambda c: dict(reversed(c.items()))),
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
        _columns(more),
        "DF-MAN-01",
    )

    def flags(columns: dict[str, Column]) -> None:
        for column in columns.values():
            column.nullable, column.child = False, "element"

    accept(
        "flags-and-child-names",
        "columns are not nullable, and list children have another name",
        _columns(flags),
        "DF-MAN-01",
    )

    def validity(columns: dict[str, Column]) -> None:
        columns["fresh"].validity = columns["name"].validity = b"\3"

    accept(
        "validity-without-nulls",
        "two columns have validity bitmaps in which every bit is set",
        _columns(validity),
        "DF-MAN-01",
    )
    accept("aligned-to-64", "buffers begin at multiples of 64 bytes", _options(align=64), "DF-MAN-01")
    accept(
        "frame-with-window",
        "a frame with a window of its own",
        {"frame:1": lambda c: frame(c, window=5 << 3)},
        "DF-MAN-02",
    )
    accept("frame-with-checksum", "a frame with a checksum", {"frame:1": _checked}, "DF-MAN-02")
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


def _checked(content: bytes) -> bytes:
    import xxhash

    return frame(content, checksum=(xxhash.xxh64_intdigest(content) & 0xFFFFFFFF).to_bytes(4, "little"))


def _more_members(meta: dict[str, Any]) -> dict[str, Any]:
    meta["note"] = {"deep": [1.5, None, True]}
    for entry in (*meta["packs"], *meta["files"]):
        entry["note"] = "x"
    return meta


def _arrow(suite: Suite, base: str) -> None:
    def fault(name: str, mutation: str, hooks: Hooks, error: tuple[str, str] = INVALID, *ids: str) -> None:
        suite.invalid(f"manifest/{name}", base, mutation, _one_step(hooks), error, *(ids or ("DF-MAN-01",)))

    for name in ("name", "dtype", "shape", "digest", "fresh", "depth", "pack", "gap", "length", "encoding"):
        fault(
            f"no-{name}",
            f"the column `{name}` is missing",
            _columns(lambda c, name=name: {k: v for k, v in c.items() if k != name}),
        )
    fault("column-twice", "the column `fresh` stands twice", _columns(lambda c: {**c, "again": c["fresh"]}))
    for name, kind in (
        ("shape", "list:int32"), ("fresh", "list:int8"), ("depth", "list:uint16"), ("pack", "list:int32"),
        ("gap", "list:int32"), ("length", "list:uint64"), ("encoding", "list:uint32"), ("name", "large:utf8"), ("depth", "large:list:uint8"),
    ):  # fmt: skip
        if name == "fresh":
            rows = _columns(lambda c: c.update(fresh=Column("fresh", "list:int8", [[-1, -1, -1], [-1]])))
        else:
            rows = _columns(
                lambda c, name=name, kind=kind: c.update({name: Column(name, kind, c[name].rows)})
            )
        fault(
            f"{name}-is-{kind.replace(':', '-')}",
            f"the column `{name}` is of type {kind.replace(':', ' of ')}",
            rows,
        )
    fault(
        "digest-of-32-bytes",
        "digests of 32 bytes in a store of xxh3-128",
        _columns(
            lambda c: c.update(
                digest=Column("digest", "list:fixed:32", [[d * 2 for d in row] for row in c["digest"].rows])
            )
        ),
    )
    fault("null", "a null in the column `fresh`", _columns(lambda c: setattr(c["fresh"], "validity", b"\1")))
    fault(
        "null-name", "a null in the column `name`", _columns(lambda c: setattr(c["name"], "validity", b"\2"))
    )
    fault(
        "dictionary-column",
        "the column `dtype` is dictionary-encoded",
        _columns(lambda c: setattr(c["dtype"], "dictionary", True)),
    )
    fault(
        "field-metadata",
        "a field has custom metadata: an extension type",
        _columns(lambda c: setattr(c["dtype"], "metadata", {b"ARROW:extension:name": b"x"})),
    )
    fault("two-batches", "two record batches", _options(batches=2))
    fault("no-batch", "no record batch", _options(batches=0))
    fault("dictionary-batch", "the footer lists a dictionary", _options(dictionary_blocks=True))
    fault("compressed-buffers", "the batch says that its buffers are compressed", _options(compression=True))
    fault("big-endian", "the schema says big-endian", _options(big_endian=True))
    fault("metadata-version-4", "metadata version V4", _options(version=3))
    fault("footer-version-4", "the footer says V4", _options(footer_version=3))
    fault("message-metadata", "the batch's message has custom metadata", _options(message_metadata=True))
    fault("footer-metadata", "the footer has custom metadata", _options(footer_metadata=True))
    fault("overlapping-buffers", "two buffers share their bytes", _options(overlap=True))
    fault("row-count", "the batch states one row more than its columns have", _options(rows=3))
    fault("no-entry", "the schema has no custom metadata", _options(metadata=[]))
    fault(
        "entry-twice",
        "the schema has the entry `deltaformat` twice",
        {"arrow:1": lambda o: o | {"metadata": o["metadata"] * 2}},
    )
    fault("not-arrow", "a manifest of 100 zeros", {"content:1": lambda c: bytes(100)})
    fault("empty", "a manifest of no bytes", {"content:1": lambda c: b""})
    fault("cut", "the Arrow file lacks its last 8 bytes", {"content:1": lambda c: c[:-8]})
    fault(
        "stream-format",
        "an Arrow stream instead of a file: no footer",
        {"content:1": lambda c: c[8 : c.index(b"\xff\xff\xff\xff\0\0\0\0") + 8]},
    )
    fault(
        "footer-length",
        "the footer's length leads beyond the file",
        {"content:1": lambda c: c[:-10] + b"\xff\xff\xff\x7f" + c[-6:]},
    )


def _frames(suite: Suite, base: str) -> None:
    def fault(name: str, mutation: str, hooks: Hooks, error: tuple[str, str], *ids: str) -> None:
        suite.invalid(f"manifest/{name}", base, mutation, _one_step(hooks), error, *(ids or ("DF-MAN-02",)))

    fault(
        "content-size-too-small",
        "the record states a content size one byte too small",
        {"content-size:1": lambda n: n - 1},
        INVALID,
    )
    fault(
        "content-size-too-large",
        "the record states a content size one byte too large",
        {"content-size:1": lambda n: n + 1},
        INVALID,
    )
    fault(
        "frame-without-size",
        "the frame states no content size",
        {"frame:1": lambda c: frame(c, size_bytes=0, window=5 << 3)},
        INVALID,
    )
    fault(
        "frame-dictionary",
        "the frame names dictionary 1",
        {"frame:1": lambda c: frame(c, dictionary=b"\1")},
        INVALID,
    )
    fault(
        "frame-window",
        "the frame states a window of 144 MiB",
        {"frame:1": lambda c: frame(c, window=17 << 3 | 1)},
        INVALID,
        "DF-MAN-02",
        "DF-LIM-02",
    )
    fault("frame-twice", "a second frame follows", {"frame:1": lambda c: frame(c) + frame(b"")}, INVALID)
    fault(
        "frame-skippable",
        "a skippable frame stands before",
        {"frame:1": lambda c: bytes.fromhex("502a4d1800000000") + frame(c)},
        INVALID,
    )
    fault("frame-then-byte", "a byte follows the frame", {"frame:1": lambda c: frame(c) + b"\0"}, INVALID)
    fault("not-zstd", "the Arrow file is not compressed", {"frame:1": lambda c: c}, INVALID)
    fault(
        "frame-cut",
        "the frame lacks its last byte",
        {"frame:1": lambda c: frame(c)[:-1]},
        ("CORRUPT", "frame-corrupt"),
    )
    fault(
        "frame-checksum",
        "the frame's checksum is wrong",
        {"frame:1": lambda c: frame(c, checksum=bytes(4))},
        ("CORRUPT", "frame-corrupt"),
    )

    def tampered(change_: Callable[[bytes], bytes]) -> dict[str, bytes]:
        objects = dict(_one_step({}).objects)
        (key,) = (k for k in objects if k.startswith("manifests/"))
        objects[key] = change_(objects[key])
        return objects

    for name, mutation, change_, code in (
        (
            "byte-changed",
            "a byte of the manifest's frame is another",
            lambda d: d[:200] + bytes([d[200] ^ 1]) + d[201:],
            "hash-mismatch",
        ),
        ("object-cut", "the manifest's object lacks its last byte", lambda d: d[:-1], "size-mismatch"),
        ("object-longer", "a byte follows in the manifest's object", lambda d: d + b"\0", "size-mismatch"),
        ("object-empty", "the manifest's object is empty", lambda d: b"", "size-mismatch"),
    ):
        suite.invalid(
            f"manifest/{name}", base, mutation, tampered(change_), ("CORRUPT", code), "DF-KEY-02", "DF-MAN-02"
        )
    objects = dict(_one_step({}).objects)
    for key in [k for k in objects if k.startswith("manifests/")]:
        del objects[key]
    suite.invalid(
        "manifest/object-missing",
        base,
        "the manifest is not there",
        objects,
        ("MISSING", "object-missing"),
        "DF-STO-04",
    )


def _metadata(suite: Suite, base: str) -> None:
    def fault(
        name: str, mutation: str, change_: Callable[[dict[str, Any]], Any], error: tuple[str, str], *ids: str
    ) -> None:
        suite.invalid(f"manifest/{name}", base, mutation, _one_step({"meta:1": change_}), error, *ids)

    def put(**members: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda meta: meta | members

    def without(name: str) -> Callable[[dict[str, Any]], Any]:
        return lambda meta: {k: v for k, v in meta.items() if k != name}

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
        INVALID,
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
        made = _two_steps({"meta:2": lambda m, parent=parent: m | {"parent": parent}})
        suite.invalid(
            f"manifest/{name}", base, mutation, made, ("INCONSISTENT", "parts-disagree"), "DF-MAN-09"
        )


def _pieces(suite: Suite, base: str) -> None:
    def fault(name: str, mutation: str, hooks: Hooks, error: tuple[str, str] = INVALID, *ids: str) -> None:
        suite.invalid(f"manifest/{name}", base, mutation, _two_steps(hooks), error, *(ids or ("DF-MAN-03",)))

    # Pieces of `w` at step 1: block 0 raw and sparse, block 1 raw, block 2 raw; then `b`.
    def at(number: int, value: Any) -> Callable[[list[Any]], list[Any]]:
        return lambda rows: [
            [
                value(v) if i == number and callable(value) else value if i == number else v
                for i, v in enumerate(rows[0])
            ],
            *rows[1:],
        ]

    fault("negative-offset", "a gap leads before the beginning of the pack", _rows(gap=at(0, -1)))
    fault(
        "beyond-pack",
        "the last piece of a pack ends one byte behind it",
        _rows(gap=lambda rows: [*rows[:1], [rows[1][0] + 1]]),
    )
    fault("gap-wraps", "a gap of 2^63 - 1", _rows(gap=at(2, 2**63 - 1)))
    fault("gap-most-negative", "a gap of -2^63", _rows(gap=at(2, -(2**63))))
    fault("pack-index", "a piece names a pack that the table does not have", _rows(pack=at(0, 2)))
    fault("pack-index-large", "a piece names pack 2^32 - 1", _rows(pack=at(0, 2**32 - 1)))
    fault("length-zero", "a piece of no bytes", _rows(length=at(1, 0)), INVALID, "DF-PCK-04")
    fault(
        "length-beyond-bound",
        "a piece longer than twice its block and 4,096, in a pack that is long enough",
        {
            **_rows(length=at(1, 2 * 256 + 4097), gap=at(1, 0)),
            "meta:2": lambda m: m | {"packs": [m["packs"][0], m["packs"][1] | {"size": 1 << 20}]},
        },
        INVALID,
        "DF-PCK-04",
    )
    fault(
        "length-4-gib",
        "a piece of 2^32 - 1 bytes",
        _rows(length=at(1, 2**32 - 1)),
        INVALID,
        "DF-PCK-04",
        "DF-LIM-02",
    )
    fault(
        "fresh-is-depth", "`fresh` equals the depth of the chain", _rows(fresh=at(0, 2)), INVALID, "DF-MAN-07"
    )
    fault("fresh-254", "`fresh` is 254", _rows(fresh=at(1, 254)), INVALID, "DF-MAN-07")
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
        INVALID,
        "DF-MAN-07",
    )


def _paths(suite: Suite, base: str) -> None:
    unsafe = ("UNSAFE", "path-unsafe")

    def fault(name: str, mutation: str, path: str) -> None:
        def change_(meta: dict[str, Any]) -> dict[str, Any]:
            return meta | {"files": [meta["files"][0] | {"path": path}, *meta["files"][1:]]}

        suite.invalid(
            f"manifest/path-{name}",
            base,
            mutation,
            _one_step({"meta:1": change_}),
            unsafe,
            "DF-MAN-10",
            "DF-SEC-01",
        )

    for name, path in (
        ("parent", "../x"), ("parent-inside", "a/../x"), ("dot", "./x"), ("absolute", "/x"), ("empty", ""), ("empty-segment", "a//x"),
        ("slash-at-end", "a/"), ("backslash", "a\\x"), ("colon", "C:x"), ("nul", "a\0x"), ("line-break", "a\nx"), ("delete", "a\x7fx"), ("c1-control", "a\x85x"),
    ):  # fmt: skip
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
        objects = dict(_one_step({}).objects)
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


def _keys(suite: Suite, base: str) -> None:
    """DF-KEY-01, in the pack table, the files and the record."""
    good = f"packs/{0:020}/{'ab' * 32}.safetensors"
    for name, key in (
        ("outside", "../" + good), ("absolute", "/" + good), ("capitals", good.replace("ab", "AB")), ("short-claim", good.replace(f"{0:020}", f"{0:019}")),
        ("long-hash", good.replace("ab" * 32, "ab" * 33)), ("no-extension", good[:-12]), ("line-break", good + "\n"), ("other-digits", good.replace("0", "\u0660", 1)), ("empty", ""),
    ):  # fmt: skip
        suite.invalid(
            f"keys/pack-{name}",
            base,
            f"the pack table has the key {key!a}",
            _one_step({"meta:1": lambda m, key=key: m | {"packs": [*m["packs"], {"key": key, "size": 1}]}}),
            VALUE,
            "DF-KEY-01",
            "DF-SEC-01",
        )
    suite.invalid(
        "keys/manifest-outside",
        base,
        "the record's manifest key leads out of the store",
        _one_step(
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
        _one_step({"meta:1": lambda m: m | {"files": [m["files"][0] | {"key": "files/../x"}]}}),
        VALUE,
        "DF-KEY-01",
        "DF-SEC-01",
    )
