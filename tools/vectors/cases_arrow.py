"""SPEC 11.1: Arrow files and their frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.arrowfile import Column
from vectors.cases_manifest import Hooks, columns_hook, one_step
from vectors.faults import MANIFEST
from vectors.primitives import frame
from vectors.store import COLUMNS
from vectors.suite import Suite
from vectors.weights import put, without

__all__ = ["add"]

ONE = "valid/manifest/one-step"


def add(suite: Suite) -> None:
    """All of them."""
    _accepted(suite)
    _arrow(suite, ONE)
    _frames(suite, ONE)


def _options(**options: Any) -> Hooks:
    return {"arrow:1": lambda made: made | options}


def _arrow(suite: Suite, base: str) -> None:
    def fault(name: str, mutation: str, hooks: Hooks, error: tuple[str, str] = MANIFEST, *ids: str) -> None:
        suite.invalid(f"manifest/{name}", base, mutation, one_step(hooks), error, *(ids or ("DF-MAN-01",)))

    for name in ("name", "dtype", "shape", "digest", "fresh", "depth", "pack", "gap", "length", "encoding"):
        fault(
            f"no-{name}",
            f"the column `{name}` is missing",
            columns_hook(without(name)),
        )
    fault(
        "column-twice", "the column `fresh` stands twice", columns_hook(lambda c: {**c, "again": c["fresh"]})
    )
    for name, kind in (
        ("shape", "list:int32"),
        ("fresh", "list:int8"),
        ("depth", "list:uint16"),
        ("pack", "list:int32"),
        ("gap", "list:int32"),
        ("length", "list:uint64"),
        ("encoding", "list:uint32"),
        ("name", "large:utf8"),
        ("depth", "large:list:uint8"),
    ):
        if name == "fresh":
            rows = columns_hook(lambda c: c.update(fresh=Column("fresh", "list:int8", [[-1, -1, -1], [-1]])))
        else:
            rows = columns_hook(_retyped(name, kind))
        fault(
            f"{name}-is-{kind.replace(':', '-')}",
            f"the column `{name}` is of type {kind.replace(':', ' of ')}",
            rows,
        )
    fault(
        "digest-of-32-bytes",
        "digests of 32 bytes in a store of xxh3-128",
        columns_hook(
            lambda c: c.update(
                digest=Column("digest", "list:fixed:32", [[d * 2 for d in row] for row in c["digest"].rows])
            )
        ),
    )
    fault(
        "null", "a null in the column `fresh`", columns_hook(lambda c: setattr(c["fresh"], "validity", b"\1"))
    )
    fault(
        "null-name",
        "a null in the column `name`",
        columns_hook(lambda c: setattr(c["name"], "validity", b"\2")),
    )
    fault(
        "dictionary-column",
        "the column `dtype` is dictionary-encoded",
        columns_hook(lambda c: setattr(c["dtype"], "dictionary", True)),
    )
    fault(
        "field-metadata",
        "a field has custom metadata: an extension type",
        columns_hook(lambda c: setattr(c["dtype"], "metadata", {b"ARROW:extension:name": b"x"})),
    )
    fault(
        "child-metadata",
        "the entries of a list column have custom metadata",
        columns_hook(lambda c: setattr(c["shape"], "child_metadata", {b"key": b"value"})),
    )
    _unknown_columns(fault)
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
    fault(
        "buffer-beyond-body",
        "buffers without bytes begin behind the body",
        _options(empty_at=1 << 20),
    )
    fault("row-count", "the batch states one row more than its columns have", _options(rows=3))
    fault("no-entry", "the schema has no custom metadata", _options(metadata=[]))
    fault(
        "entry-twice",
        "the schema has the entry `deltaformat` twice",
        {"arrow:1": lambda o: o | {"metadata": o["metadata"] * 2}},
    )
    fault(
        "entry-in-first-schema-only",
        "the schema of the first message has the entry `deltaformat`, the footer's has not",
        {"arrow:1": lambda o: o | {"metadata": [], "first_metadata": o["metadata"]}},
    )
    fault(
        "column-in-first-schema-only",
        "the schema of the first message has the column `fresh`, the footer's calls it `frish`",
        {
            **columns_hook(lambda c: setattr(c["fresh"], "name", "frish")),
            "arrow:1": put(first_columns=_columns()),
        },
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


def _unknown_columns(fault: Callable[[str, str, Hooks], None]) -> None:
    """What no column may have, in columns that SPEC.md does not know."""

    def column(**members: Any) -> Hooks:
        def more(columns: dict[str, Column]) -> None:
            columns["note"] = Column("note", "utf8", ["x", "y"], **members)
            if "child_metadata" in members:
                columns["note"] = Column("note", "list:uint8", [[1], []], **members)

        return columns_hook(more)

    pair = {b"key": b"value"}
    fault("unknown-column-metadata", "an unknown column has custom metadata", column(metadata=pair))
    fault(
        "unknown-column-child-metadata",
        "the entries of an unknown list column have custom metadata",
        column(child_metadata=pair),
    )
    fault("unknown-column-dictionary", "an unknown column is dictionary-encoded", column(dictionary=True))


def _columns(prefix: str = "") -> list[Column]:
    """For a schema: names and types without rows."""
    return [Column(prefix + name, kind, []) for name, kind in COLUMNS.items()]


def _accepted(suite: Suite) -> None:
    def accept(name: str, title: str, hooks: Hooks) -> None:
        suite.valid(
            f"manifest/{name}", title, one_step(hooks), "DF-MAN-01", flags=["must-accept", "manifest"]
        )

    accept(
        "other-entries",
        "the schema's custom metadata has other entries beside `deltaformat`",
        {
            "arrow:1": lambda o: (
                o | {"metadata": [(b"pandas", b"{}"), *o["metadata"], (b"", b"\xff"), (b"Deltaformat", b"")]}
            )
        },
    )
    accept(
        "first-schema-without-entry",
        "the schema of the first message lacks the entry `deltaformat`; the footer's counts",
        {"arrow:1": put(first_metadata=[])},
    )
    accept(
        "first-schema-of-other-names",
        "the schema of the first message names the columns otherwise; the footer's counts",
        {"arrow:1": put(first_columns=_columns("c-"))},
    )


def _retyped(name: str, kind: str) -> Callable[[dict[str, Column]], None]:
    return lambda columns: columns.update({name: Column(name, kind, columns[name].rows)})


def _frames(suite: Suite, base: str) -> None:
    def fault(name: str, mutation: str, hooks: Hooks, error: tuple[str, str], *ids: str) -> None:
        suite.invalid(f"manifest/{name}", base, mutation, one_step(hooks), error, *(ids or ("DF-MAN-02",)))

    fault(
        "content-size-too-small",
        "the record states a content size one byte too small",
        {"content-size:1": lambda n: n - 1},
        MANIFEST,
    )
    fault(
        "content-size-too-large",
        "the record states a content size one byte too large",
        {"content-size:1": lambda n: n + 1},
        MANIFEST,
    )
    fault(
        "frame-without-size",
        "the frame states no content size",
        {"frame:1": lambda c: frame(c, size_bytes=0, window=5 << 3)},
        MANIFEST,
    )
    fault(
        "frame-dictionary",
        "the frame names dictionary 1",
        {"frame:1": lambda c: frame(c, dictionary=b"\1")},
        MANIFEST,
    )
    fault(
        "frame-window",
        "the frame states a window of 144 MiB",
        {"frame:1": lambda c: frame(c, window=17 << 3 | 1)},
        MANIFEST,
        "DF-MAN-02",
        "DF-LIM-02",
    )
    fault("frame-twice", "a second frame follows", {"frame:1": lambda c: frame(c) + frame(b"")}, MANIFEST)
    fault(
        "frame-skippable",
        "a skippable frame stands before",
        {"frame:1": lambda c: bytes.fromhex("502a4d1800000000") + frame(c)},
        MANIFEST,
    )
    fault("frame-then-byte", "a byte follows the frame", {"frame:1": lambda c: frame(c) + b"\0"}, MANIFEST)
    fault("not-zstd", "the Arrow file is not compressed", {"frame:1": lambda c: c}, MANIFEST)
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
        objects = dict(one_step({}).objects)
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
    objects = dict(one_step({}).objects)
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
