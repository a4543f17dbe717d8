"""SPEC 7 and 8: the worked store, dtypes, blocks, names, digests, roots."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vectors.faults import CORRUPT
from vectors.payloads import RAW, SPARSE, pack, sparse
from vectors.primitives import DTYPES
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import change, noise, steps

__all__ = ["add"]

SPEC = Path(__file__).resolve().parent.parent.parent / "SPEC.md"


def add(suite: Suite) -> None:
    """All of them."""
    _worked_store(suite)
    _dtypes(suite)
    _blocks(suite)


def worked_objects() -> dict[str, bytes]:
    """The objects that SPEC.md shows in appendix A."""
    text = SPEC.read_text(encoding="utf-8")
    body = text[text.index("<!-- worked-store -->") :]
    objects = {}
    for key, size, shown in re.findall(r"^`([^`\n]+)`, (\d+) bytes\n\n```\n(.*?)\n```$", body, re.M | re.S):
        data = shown.encode() if shown.startswith("{") else bytes.fromhex(shown)
        assert len(data) == int(size), key
        objects[key] = data
    return objects


def _worked_store(suite: Suite) -> None:
    b = bytes.fromhex("0000003f000000bf")
    ws = [bytes.fromhex("803f80bf00000080c17f003c"), bytes.fromhex("803f81bf00000080c17ffe3b")]
    # The store's own books, for roots and hashes: the objects are SPEC.md's.
    books = Store()
    books.claim()
    version = books.keyframe(
        {"w": ("BF16", [2, 3], ws[0]), "b": ("F32", [2], b)}, files={"config.json": b"{}"}
    )
    books.commit(version)
    version = version.next()
    version.tensors["w"].data = ws[1]
    books.commit(version)
    books.objects = worked_objects()
    ids = (
        "DF-KEY-02",
        "DF-JSN-03",
        "DF-DIG-01",
        "DF-DIG-03",
        "DF-BLK-01",
        "DF-ENC-08",
        "DF-ENC-17",
        "DF-MAN-03",
        "DF-LOG-08",
    )
    title = "the store of SPEC.md, appendix A: raw keyframe, sparse step, sidecar file, tail hint"
    id_ = suite.valid("worked-store", title, books, *ids)
    suite.valid(
        "worked-store-step-0", "the same store at step 0", id_, *ids, at={"branch": "main", "step": 0}
    )


def _dtypes(suite: Suite) -> None:
    store = Store()
    store.claim()
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    for number, (dtype, (bits, _)) in enumerate(DTYPES.items()):
        shape = [2, 4] if bits != 6 else [4, 4]
        size = 8 * shape[0] // 2 * bits // 8
        tensors[dtype.lower()] = (dtype, shape, noise(size if bits != 6 else 12, number))
    tensors["bool"] = ("BOOL", [2, 4], bytes([0, 1, 2, 255, 128, 0, 1, 3]))
    store.commit(store.keyframe(tensors))
    base = suite.valid(
        "dtypes/all",
        "a tensor of every dtype; a BOOL byte that is neither 0 nor 1 stays as it is",
        store,
        "DF-DTY-01",
        "DF-DTY-02",
        "DF-DTY-03",
        "DF-BLK-01",
        flags=["dtype"],
    )
    for dtype in DTYPES:
        suite.valid(
            f"dtypes/{dtype.lower()}",
            f"a {dtype} tensor",
            base,
            "DF-DTY-01",
            "DF-BLK-01",
            select=[dtype.lower()],
            flags=["dtype"],
        )

    def retyped(name: str, dtype: str) -> Store:
        content = noise(24, 3)
        return steps(
            [(RAW, content, content)],
            dtype=dtype,
            shape=[24 * 8 // (DTYPES[dtype][0] if dtype in DTYPES else 8)],
        )

    suite.invalid(
        "dtypes/unknown",
        "valid/chains/raw",
        "the dtype is `F8_E3M4`, which SPEC 8.1 does not have",
        retyped("w", "F8_E3M4"),
        ("UNSUPPORTED", "dtype-unknown"),
        "DF-DTY-01",
    )
    suite.invalid(
        "dtypes/lower-case",
        "valid/chains/raw",
        "the dtype is `bf16`: names are case-sensitive",
        retyped("w", "bf16"),
        ("UNSUPPORTED", "dtype-unknown"),
        "DF-DTY-01",
    )
    content = noise(12, 3)
    suite.invalid(
        "dtypes/half-a-byte",
        base,
        "an F4 tensor of 23 elements: its bits fill no whole number of bytes",
        steps([(RAW, content, content)], dtype="F4", shape=[23]),
        ("MALFORMED", "manifest-invalid"),
        "DF-DTY-02",
    )
    suite.invalid(
        "dtypes/six-bits",
        base,
        "an F6_E2M3 tensor of 15 elements",
        steps([(RAW, content, content)], dtype="F6_E2M3", shape=[15]),
        ("MALFORMED", "manifest-invalid"),
        "DF-DTY-02",
    )

    # The same bytes under another dtype and shape: the chain goes on, the root changes.
    store = Store()
    store.claim()
    old = noise(48, 4)
    version = store.keyframe({"w": ("F32", [12], old)})
    store.commit(version)
    version = version.next()
    version.tensors["w"].dtype, version.tensors["w"].shape = "BF16", [4, 6]
    store.commit(version)
    version = version.next()
    version.tensors["w"].dtype, version.tensors["w"].shape = "U8", [48]
    new = change(old, 2, {3: 1, 20: -5})
    version.apply("w", 0, store.pack().put(bytes(sparse(old, new, 2, [0x4000])), SPARSE), new)
    store.commit(version)
    base = suite.valid(
        "dtypes/re-typed",
        "F32, then BF16, then U8 over the same chain; a payload states its own width (here 2 under U8)",
        store,
        "DF-ENC-07",
        "DF-MAN-08",
        "DF-DIG-03",
        flags=["dtype", "must-accept"],
    )
    suite.valid(
        "dtypes/re-typed-step-1",
        "the same store at step 1",
        base,
        "DF-MAN-08",
        "DF-DIG-03",
        at={"branch": "main", "step": 1},
        flags=["dtype"],
    )
    suite.valid(
        "dtypes/re-typed-follow",
        "from step 1 to step 2 by the fresh piece",
        base,
        "DF-RD-02",
        op="follow",
        start={"branch": "main", "step": 1},
        profile="reader-full",
        flags=["dtype", "follow"],
    )

    nans = pack([0x7FC1, 0xFFC1, 0x7F81, 0x8000, 0x0000, 0x7F80], 2)
    new = pack([0x7FC2, 0xFFC1, 0xFF81, 0x0000, 0x8000, 0x7F80], 2)
    suite.valid(
        "dtypes/nan-payloads",
        "NaN payloads, signalling NaNs and signed zeros change by their bits",
        steps([(RAW, nans, nans), (SPARSE, bytes(sparse(nans, new, 2)), new)], dtype="BF16", shape=[6]),
        "DF-DTY-03",
        flags=["dtype", "must-accept"],
    )


def _blocks(suite: Suite) -> None:
    store = Store()
    store.claim()
    tensors: dict[str, tuple[str, list[int], bytes]] = {
        "one block": ("U8", [256], noise(256, 1)),
        "one byte more": ("U8", [257], noise(257, 2)),
        "one byte less": ("U8", [255], noise(255, 3)),
        "three blocks": ("F32", [3, 64], noise(768, 4)),
        "scalar": ("F64", [], noise(8, 5)),
        "empty": ("BF16", [0, 4], b""),
        "empty too": ("F32", [4, 0, 7], b""),
        "ones": ("I16", [1, 1, 1], noise(2, 6)),
        "rank 32": ("U8", [1] * 31 + [2], noise(2, 7)),
    }
    store.commit(store.keyframe(tensors))
    base = suite.valid(
        "blocks/sizes",
        "tensors of one block, a byte more, a byte less; rank 0, rank 32, no elements",
        store,
        "DF-BLK-01",
        "DF-BLK-02",
        "DF-BLK-03",
        "DF-MAN-06",
        "DF-LIM-01",
        flags=["must-accept", "limit"],
    )

    def with_rows(name: str, mutation: str, error: tuple[str, str], *ids: str, **columns: Any) -> None:
        made = Store(
            hooks={
                "columns:1": lambda cols: [
                    c.with_rows(columns[c.name](c.rows)) if c.name in columns else c for c in cols
                ]
            }
        )
        made.claim()
        made.commit(made.keyframe(tensors))
        suite.invalid(f"blocks/{name}", base, mutation, made, error, *ids)

    manifest = ("MALFORMED", "manifest-invalid")
    with_rows(
        "one-digest-too-few",
        "a tensor of two blocks has one digest",
        manifest,
        "DF-BLK-02",
        "DF-MAN-04",
        digest=lambda rows: [rows[0], rows[1][:1], *rows[2:]],
    )
    with_rows(
        "one-digest-too-many",
        "a tensor of one block has two digests",
        manifest,
        "DF-BLK-02",
        "DF-MAN-04",
        digest=lambda rows: [rows[0] * 2, *rows[1:]],
    )
    with_rows(
        "empty-with-a-block",
        "a tensor without elements has a digest",
        manifest,
        "DF-BLK-02",
        digest=lambda rows: [*rows[:5], [bytes(16)], *rows[6:]],
    )
    with_rows(
        "fresh-too-short",
        "`fresh` lacks an entry",
        manifest,
        "DF-MAN-04",
        fresh=lambda rows: [rows[0], rows[1][:1], *rows[2:]],
    )
    with_rows(
        "depth-too-short",
        "`depth` lacks an entry",
        manifest,
        "DF-MAN-04",
        depth=lambda rows: [rows[0], rows[1][:1], *rows[2:]],
    )
    with_rows(
        "depth-zero",
        "a block has a depth of 0",
        manifest,
        "DF-MAN-04",
        depth=lambda rows: [[0], [2, 1], *rows[2:]],
    )
    for column in ("pack", "gap", "length", "encoding"):
        with_rows(
            f"{column}-too-short",
            f"`{column}` lacks an entry",
            manifest,
            "DF-MAN-04",
            **{column: lambda rows: [rows[0], rows[1][:1], *rows[2:]]},
        )
    with_rows(
        "negative-dimension", "a dimension of -1", manifest, "DF-MAN-06", shape=lambda rows: [[-1], *rows[1:]]
    )
    with_rows(
        "two-negative-dimensions",
        "dimensions -16 and -16: their product is right",
        manifest,
        "DF-MAN-06",
        shape=lambda rows: [[-16, -16], *rows[1:]],
    )
    with_rows(
        "rank-33",
        "a tensor of rank 33",
        manifest,
        "DF-MAN-06",
        "DF-LIM-01",
        shape=lambda rows: [*rows[:8], [1] * 32 + [2]],
    )
    with_rows(
        "too-large",
        "dimensions 2^27 and 2^26 of a byte: 2^53 bytes",
        manifest,
        "DF-MAN-06",
        shape=lambda rows: [[2**27, 2**26], *rows[1:]],
    )
    with_rows(
        "empty-too-large",
        "dimensions 0, 2^40 and 2^40: counting 0 as 1, more than 2^53 - 1 bytes",
        manifest,
        "DF-MAN-06",
        shape=lambda rows: [*rows[:5], [0, 2**40, 2**40], *rows[6:]],
    )
    with_rows(
        "product-wraps",
        "dimensions 2^32, 2^32 and 256: their product is 0 modulo 2^64",
        manifest,
        "DF-MAN-06",
        shape=lambda rows: [[2**32, 2**32, 256], *rows[1:]],
    )

    # Each digest is of the block's own bytes: two blocks that change places have right digests elsewhere.
    swapped = Store()
    swapped.claim()
    version = swapped.keyframe(tensors)
    chains = version.tensors["three blocks"].chains
    chains[0], chains[1] = chains[1], chains[0]
    swapped.commit(version)
    suite.invalid(
        "blocks/swapped", base, "the chains of two blocks have changed places", swapped, CORRUPT, "DF-DIG-01"
    )

    store = Store(block_bytes=1024)
    store.claim()
    store.commit(store.keyframe({"w": ("F32", [300], noise(1200, 9))}))
    suite.valid("blocks/block-size-1024", "a store of blocks of 1,024 bytes", store, "DF-DSC-01", "DF-BLK-02")
    store = Store(block_bytes=64 << 20)
    store.claim()
    store.commit(store.keyframe({"w": ("F32", [300], noise(1200, 9))}))
    suite.valid(
        "blocks/block-size-64-mib",
        "a store of blocks of 64 MiB, the largest",
        store,
        "DF-DSC-01",
        flags=["limit", "must-accept"],
    )
    nothing = Store()
    nothing.claim()
    nothing.commit(nothing.keyframe({}))
    suite.valid(
        "blocks/no-tensors",
        "a version without tensors: its root is over none",
        nothing,
        "DF-DIG-03",
        flags=["must-accept"],
    )
