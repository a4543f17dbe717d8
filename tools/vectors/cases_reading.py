"""SPEC 10.2, 11.2 and 13: slices, laziness, following by `fresh`, re-based chains, external objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vectors.content import NOT_FRESH, Tensor, Version
from vectors.faults import CORRUPT, MISSING
from vectors.payloads import RAW, SPARSE, sparse
from vectors.primitives import sha256
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import change, noise

__all__ = ["add"]

FULL = "reader-full"
MAIN = {"branch": "main"}


def at(step: int) -> dict[str, Any]:
    """A step of `main`."""
    return {"branch": "main", "step": step}


def add(suite: Suite) -> None:
    """All of them."""
    _slices(suite)
    _lazy(suite)


def _slices(suite: Suite) -> None:
    store = Store()
    store.claim()
    tensors: dict[str, tuple[str, list[int], bytes]] = {
        "m": ("BF16", [40, 24], noise(1920, 61)),
        "cube": ("U8", [5, 6, 7], noise(210, 62)),
        "v": ("F64", [100], noise(800, 63)),
        "s": ("I32", [], noise(4, 64)),
        "e": ("F32", [3, 0], b""),
        "f4": ("F4", [8, 16], noise(64, 65)),
        "c": ("C64", [3, 3], noise(72, 66)),
    }
    version = store.keyframe(tensors)
    store.commit(version)
    version = version.next()
    old = tensors["m"][2][256:512]
    new = change(old, 2, {0: 1, 50: 7, 127: -1})
    version.apply("m", 1, store.pack().put(bytes(sparse(old, new, 2, [0x4000])), SPARSE), new)
    store.commit(version)
    base = suite.valid(
        "slices/whole",
        "the store that is sliced, read whole",
        store,
        "DF-RD-01",
        profile=FULL,
        flags=["slice"],
    )

    def part(name: str, title: str, tensor: str, *ranges: list[int], **members: Any) -> None:
        suite.valid(
            f"slices/{name}",
            title,
            base,
            "DF-RD-01",
            op="slice",
            tensor=tensor,
            ranges=ranges,
            profile=FULL,
            flags=["slice"],
            **members,
        )

    part("rows", "some rows: they begin and end inside blocks", "m", [7, 13], [0, 24])
    part("first-row", "the first row", "m", [0, 1], [0, 24])
    part("last-row", "the last row, in the short last block", "m", [39, 40], [0, 24])
    part("columns", "some columns of all rows", "m", [0, 40], [5, 9])
    part("middle", "a part of some rows", "m", [3, 30], [23, 24])
    part("one-element", "one element", "m", [10, 11], [2, 3])
    part("all", "all of it", "m", [0, 40], [0, 24])
    part("no-rows", "no row", "m", [5, 5], [0, 24])
    part("no-columns", "no column of some rows", "m", [5, 9], [24, 24])
    part("cube", "a part of each of three axes", "cube", [1, 4], [2, 5], [3, 6])
    part("cube-middle-axis", "the middle axis of three", "cube", [0, 5], [2, 3], [0, 7])
    part("vector", "a range that goes over a block's end", "v", [31, 33])
    part("scalar", "a tensor of rank 0: no ranges", "s")
    part("empty", "a tensor without elements", "e", [1, 3], [0, 0])
    part("complex", "complex elements", "c", [1, 3], [0, 2])
    part("step-0", "some rows of an older step", "m", [7, 13], [0, 24], at=at(0))
    data = tensors["f4"][2]
    suite.valid(
        "slices/sub-byte-rows",
        "rows of an F4 tensor: whole bytes",
        base,
        "DF-RD-01",
        "DF-BLK-01",
        op="slice",
        tensor="f4",
        ranges=[[2, 5], [0, 16]],
        profile=FULL,
        flags=["slice"],
        expect={"dtype": "F4", "shape": [3, 16], "nbytes": 24, "sha256": sha256(data[16:40])},
    )
    suite.valid(
        "slices/no-such-tensor",
        "a slice of a tensor that is not there",
        base,
        "DF-ERR-01",
        op="slice",
        tensor="x",
        ranges=[[0, 1]],
        profile=FULL,
        error=("MISSING", "tensor-missing"),
        flags=["slice"],
    )

    broken = dict(store.objects)
    key = next(k for k in broken if k.startswith("packs/") and broken[k].find(tensors["m"][2][512:768]) > 0)
    place = broken[key].find(tensors["m"][2][512:768])
    damaged = bytearray(broken[key])
    damaged[place + 10] ^= 4
    broken[key] = bytes(damaged)
    for name, mutation, ranges in (
        ("block-damaged", "a bit of the block that holds the rows is another", [[12, 14], [0, 24]]),
        (
            "block-damaged-elsewhere",
            "a bit of the block is another, outside the rows: the whole block is checked first",
            [[11, 12], [0, 24]],
        ),
    ):
        suite.invalid(
            f"slices/{name}",
            "valid/slices/rows",
            mutation,
            broken,
            CORRUPT,
            "DF-DIG-01",
            args={"ranges": ranges},
        )


def _lazy(suite: Suite) -> None:
    """Stores in which what is not needed is missing or damaged."""
    store = Store()
    store.claim()
    version = Version()
    contents = {"a": noise(700, 71), "b": noise(300, 72)}
    packs: dict[tuple[str, int], str] = {}
    for name, data in contents.items():
        chains = []
        for number in range(0, len(data), 256):
            pack = store.pack(nonce=f"{name}{number}")
            chains.append([pack.put(data[number : number + 256], RAW)])
            packs[name, number // 256] = pack.key
        version.tensors[name] = Tensor("U8", [len(data) // 10, 10], data, chains, [NOT_FRESH] * len(chains))
    version.files["notes.txt"] = (0, b"some notes")
    store.commit(version)
    base = suite.valid(
        "lazy/whole",
        "a pack per block, and a file: the store from which things are taken away",
        store,
        "DF-RD-01",
        profile=FULL,
        flags=["lazy"],
    )

    def without(*keys: str, damage: bool = False) -> dict[str, bytes]:
        objects = dict(store.objects)
        for key in keys:
            if damage:
                objects[key] = bytes(len(objects[key]))
            else:
                del objects[key]
        return objects

    def lazy(name: str, title: str, objects: Mapping[str, bytes], **members: Any) -> None:
        made = Store()
        made.__dict__.update(store.__dict__)
        made.objects = dict(objects)
        suite.valid(f"lazy/{name}", title, made, "DF-RD-01", profile=FULL, flags=["lazy"], **members)

    every = list(packs.values())
    file = next(k for k in store.objects if k.startswith("files/"))
    lazy(
        "open-without-blocks",
        "every pack and file is missing: opening needs none",
        without(*every, file),
        op="open",
    )
    lazy(
        "open-with-damaged-blocks",
        "every pack and file is damaged",
        without(*every, file, damage=True),
        op="open",
    )
    lazy(
        "one-tensor",
        "the packs of the other tensor and the file are missing",
        without(packs["b", 0], packs["b", 1], file),
        select=["a"],
    )
    lazy(
        "rows-of-first-block",
        "only the first block's pack is there",
        without(packs["a", 1], packs["a", 2], packs["b", 0], packs["b", 1]),
        op="slice",
        tensor="a",
        ranges=[[3, 20], [0, 10]],
    )
    lazy(
        "rows-of-last-block",
        "only the last block's pack is there",
        without(packs["a", 0], packs["a", 1]),
        op="slice",
        tensor="a",
        ranges=[[60, 70], [0, 10]],
    )
    lazy(
        "rows-of-two-blocks",
        "the rows are in two blocks; the pack of the third is damaged",
        without(packs["a", 2], damage=True),
        op="slice",
        tensor="a",
        ranges=[[20, 30], [0, 10]],
    )
    lazy(
        "no-rows",
        "an empty range needs no block",
        without(*every),
        op="slice",
        tensor="a",
        ranges=[[5, 5], [0, 10]],
    )
    suite.invalid(
        "lazy/needed-block-missing",
        base,
        "the pack of a block in the middle is missing",
        without(packs["a", 1]),
        MISSING,
        "DF-RD-01",
    )
    suite.invalid(
        "lazy/needed-rows-missing",
        "valid/lazy/rows-of-two-blocks",
        "the pack of one of the two blocks is missing",
        without(packs["a", 1]),
        MISSING,
        "DF-RD-01",
    )

    deep = Store()
    deep.claim()
    data = noise(40, 73)
    version = deep.keyframe({"w": ("BF16", [20], data)})
    deep.commit(version, step=0)
    for step in (1, 2):
        version = version.next()
        new = change(data, 2, {step: 1})
        version.apply("w", 0, deep.pack(nonce=str(step)).put(bytes(sparse(data, new, 2)), SPARSE), new)
        data = new
        deep.commit(version, step=step)
    first = deep.commits[1].seq
    gone = [e["key"] for seq in (first, first + 1) for e in record_of(deep, seq)["manifests"]]
    for key in gone:
        del deep.objects[key]
    suite.valid(
        "lazy/older-manifests-missing",
        "the manifests of older steps are missing: one manifest is complete by itself",
        deep,
        "DF-RD-01",
        flags=["lazy"],
    )


def record_of(store: Store, seq: int) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(store.objects[f"log/{seq:020}.json"])
    return found


"""Where cases put files outside of stores. Only the suite makes it, and it takes it away."""
