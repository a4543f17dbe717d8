"""SPEC 10.2, 11.2 and 13: slices, laziness, following by `fresh`, re-based chains, external objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vectors.payloads import PLANES, PLANES_DELTA, RAW, SPARSE, planes, sparse
from vectors.primitives import sha256
from vectors.store import NOT_FRESH, External, Store, Tensor, Version
from vectors.suite import Suite
from vectors.weights import change, noise

__all__ = ["add"]

FULL = "reader-full"
MAIN = {"branch": "main"}
CORRUPT = ("CORRUPT", "digest-mismatch")
MISSING = ("MISSING", "object-missing")
INVALID = ("MALFORMED", "manifest-invalid")


def at(step: int) -> dict[str, Any]:
    """A step of `main`."""
    return {"branch": "main", "step": step}


def add(suite: Suite) -> None:
    """All of them."""
    _slices(suite)
    _lazy(suite)
    _follow(suite)
    _rebased(suite)
    _external(suite)


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
            "a bit of the block is another, outside the rows: its digest is checked before any byte is returned",
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
    gone = [e["key"] for seq in (first, first + 1) for e in _record(deep, seq)["manifests"]]
    for key in gone:
        del deep.objects[key]
    suite.valid(
        "lazy/older-manifests-missing",
        "the manifests of older steps are missing: one manifest is complete by itself",
        deep,
        "DF-RD-01",
        flags=["lazy"],
    )


def _record(store: Store, seq: int) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(store.objects[f"log/{seq:020}.json"])
    return found


def _follow(suite: Suite) -> None:
    first, second, third = noise(600, 81), noise(100, 82), noise(60, 83)

    def store(hooks: Any = None, payload: Callable[[bytes, bytes], bytes] | None = None) -> Store:
        made = Store(hooks=hooks)
        made.claim()  # 0
        version = made.keyframe(
            {"w": ("BF16", [300], first), "b": ("F32", [25], second), "gone": ("U8", [60], third)},
            files={"a.json": b"1"},
        )
        made.commit(version, step=0)  # 1
        version = version.next()
        pack = made.pack(nonce="1")
        old = first[256:512]
        new = change(old, 2, {1: 1, 90: -4})
        make = payload or (lambda old, new: bytes(sparse(old, new, 2, [0x4000])))
        version.apply("w", 1, pack.put(make(old, new), SPARSE), new)
        del version.tensors["gone"]
        version.tensors["new"] = Tensor("U8", [60], third, [[pack.put(third, RAW)]], [NOT_FRESH])
        # Bytes at the same place under another dtype and shape.
        version.tensors["b"].dtype, version.tensors["b"].shape = "BF16", [5, 10]
        version.files = {"a.json": (0, b"1"), "b.json": (0, b"22")}
        made.commit(version, step=1)  # 2
        version = version.next()
        newer = planes(change(new, 2, {5: 5}), 2, base=new)
        version.apply("w", 1, made.pack(nonce="2").put(newer, PLANES_DELTA), change(new, 2, {5: 5}))
        fresh = noise(256, 84)
        version.replace("w", 0, [made.pack(nonce="3").put(planes(fresh, 2), PLANES)], fresh)
        made.commit(version, step=2)  # 3
        return made

    base = suite.valid(
        "follow/whole",
        "three steps: changes, a new chain, tensors that come, go and change their dtype",
        store(),
        "DF-RD-02",
        profile=FULL,
        flags=["follow"],
    )

    def follow(
        name: str, title: str, start: dict[str, Any], to: dict[str, Any], made: Store | str = base, *ids: str
    ) -> str:
        return suite.valid(
            f"follow/{name}",
            title,
            made,
            *(ids or ("DF-RD-02",)),
            op="follow",
            start=start,
            at=to,
            profile=FULL,
            flags=["follow"],
        )

    one = follow("one-step", "from step 0 to step 1: one fresh piece, one new tensor", at(0), at(1))
    follow("next-step", "from step 1 to step 2: a fresh piece, and a block that is read cold", at(1), at(2))
    follow("two-steps", "from step 0 to step 2", at(0), at(2))
    follow("backwards", "from step 2 to step 0: nothing can be followed", at(2), at(0))
    follow("nowhere", "from a step to itself", at(1), at(1))

    # The pieces that a follower does not need may be gone; `from` is still readable through a copy of its own.
    def key_of(made: Store, seq: int, name: str, block: int, piece: int) -> str:
        pack = made.commits[seq].version.tensors[name].chains[block][piece].pack
        assert not isinstance(pack, External)
        return pack.key

    def damaged(flip: int) -> dict[str, bytes]:
        made = store()
        key = key_of(made, 3, "w", 0, 0) if flip == 2 else key_of(made, 2, "w", 1, 1)
        data = bytearray(made.objects[key])
        data[-1] ^= 1
        made.objects[key] = bytes(data)
        return made.objects

    held_0 = store().held(at(0))
    held_1 = store().held(at(1))
    suite.invalid(
        "follow/new-tensor-damaged",
        one,
        "the new tensor's raw piece has a wrong bit: what was held stays as it was",
        damaged(1),
        CORRUPT,
        "DF-RD-03",
        "DF-DIG-01",
        held=held_0,
    )
    suite.invalid(
        "follow/cold-block-damaged",
        "valid/follow/next-step",
        "a bit of the block that is read cold is wrong",
        damaged(2),
        CORRUPT,
        "DF-RD-03",
        held=held_1,
    )
    wrong = store(payload=lambda old, new: bytes(sparse(old, change(old, 2, {1: 1, 90: -5}), 2, [0x4000])))
    suite.invalid(
        "follow/wrong-difference",
        one,
        "the fresh piece gives another element: the digest of the result is checked",
        wrong,
        CORRUPT,
        "DF-RD-02",
        "DF-RD-03",
        held=held_0,
    )
    reserved = store(payload=lambda old, new: b"\xff" + bytes(sparse(old, new, 2, [0x4000]))[1:])
    suite.invalid(
        "follow/payload-reserved-bit",
        one,
        "a reserved bit of the fresh piece is set",
        reserved,
        ("UNSUPPORTED", "encoding-unknown"),
        "DF-RD-03",
        "DF-ENC-06",
        held=held_0,
    )
    suite.invalid(
        "follow/no-such-step",
        one,
        "the version to go to is not there",
        store().objects,
        ("MISSING", "version-missing"),
        "DF-RD-03",
        held=held_0,
        args={"at": at(9)},
    )
    gone = store()
    del gone.objects[key_of(gone, 2, "w", 1, 1)]
    suite.invalid(
        "follow/fresh-piece-missing",
        one,
        "the pack of the fresh piece is missing",
        gone.objects,
        MISSING,
        "DF-RD-03",
        held=held_0,
    )
    gone = store()
    key = _record(gone, 2)["manifests"][0]["key"]
    del gone.objects[key]
    suite.invalid(
        "follow/manifest-missing",
        one,
        "the manifest of the version to go to is missing",
        gone.objects,
        MISSING,
        "DF-RD-03",
        held=held_0,
    )

    def rows(**changes: Callable[[list[Any]], list[Any]]) -> Store:
        return store(
            {
                "columns:2": lambda cols: [
                    c.with_rows(changes[c.name](list(c.rows))) if c.name in changes else c for c in cols
                ]
            }
        )

    # Rows at step 1: w, b, new.
    suite.invalid(
        "follow/fresh-0-but-changed",
        one,
        "`fresh` is 0 for a block that changed",
        rows(fresh=lambda r: [[0, 0, 0], *r[1:]]),
        INVALID,
        "DF-MAN-08",
        held=held_0,
    )
    suite.invalid(
        "follow/fresh-without-counterpart",
        one,
        "`fresh` is 0 for a tensor that the parent does not have",
        rows(fresh=lambda r: [*r[:2], [0]]),
        INVALID,
        "DF-MAN-08",
        held=held_0,
    )

    shrunk = Store()
    shrunk.claim()
    version = shrunk.keyframe({"w": ("U8", [200], first[:200])})
    shrunk.commit(version)
    version = version.next()
    version.tensors["w"] = Tensor(
        "U8", [100], first[:100], [[shrunk.pack(nonce="x").put(first[:100], RAW)]], [NOT_FRESH]
    )
    shrunk.commit(version)
    ok = follow(
        "shorter-block",
        "a block that became shorter: `fresh` is 255",
        at(0),
        at(1),
        shrunk,
        "DF-MAN-08",
        "DF-RD-02",
    )
    other = Store(
        hooks={"columns:2": lambda cols: [c.with_rows([[0]]) if c.name == "fresh" else c for c in cols]}
    )
    other.claim()
    version = other.keyframe({"w": ("U8", [200], first[:200])})
    other.commit(version)
    version = version.next()
    version.tensors["w"] = Tensor(
        "U8", [100], first[:100], [[other.pack(nonce="x").put(first[:100], RAW)]], [NOT_FRESH]
    )
    other.commit(version)
    suite.invalid(
        "follow/fresh-across-lengths",
        ok,
        "`fresh` is 0 for a block whose length differs from the parent's",
        other,
        INVALID,
        "DF-MAN-08",
        held=shrunk.held(at(0)),
    )

    forked = Store()
    forked.claim()  # 0
    version = forked.keyframe({"w": ("U8", [40], noise(40, 85))})
    forked.commit(version, step=0)  # 1
    forked.fork("side", 1)  # 2
    forked.claim("side")  # 3
    side = version.next()
    old = side.tensors["w"].data
    new = change(old, 1, {3: 1})
    side.apply("w", 0, forked.pack(3).put(bytes(sparse(old, new, 1)), SPARSE), new)
    forked.commit(side, branch="side", step=1)  # 4
    follow(
        "over-a-fork",
        "from a commit to its child on another branch",
        {"branch": "main"},
        {"branch": "side"},
        forked,
    )
    rewound = Store()
    rewound.claim()
    version = rewound.keyframe({"w": ("U8", [40], noise(40, 86))})
    rewound.commit(version, step=0)  # 1
    for step in (1, 2):
        old = version.tensors["w"].data
        new = change(old, 1, {step: 1})
        version = version.next()
        version.apply("w", 0, rewound.pack(nonce=str(step)).put(bytes(sparse(old, new, 1)), SPARSE), new)
        rewound.commit(version, step=step)  # 2, 3
    rewound.claim("main", resume_from=2)  # 4
    version = rewound.commits[2].version.next()
    old = version.tensors["w"].data
    new = change(old, 1, {9: -1})
    version.apply("w", 0, rewound.pack(4).put(bytes(sparse(old, new, 1)), SPARSE), new)
    rewound.commit(version, step=2)  # 5
    follow(
        "over-a-rewind",
        "from a superseded commit to the one that took its step",
        {"seq": 3},
        {"branch": "main"},
        rewound,
        "DF-RD-02",
        "DF-LOG-07",
    )


def _rebased(suite: Suite) -> None:
    store = Store()
    store.claim()
    zero = noise(200, 91)
    version = store.keyframe({"w": ("BF16", [100], zero)})
    store.commit(version, step=0)
    contents = [zero]
    deltas = []
    for step in (1, 2):
        old = contents[-1]
        new = change(old, 2, {step: 1, 50: -step})
        contents.append(new)
        version = version.next()
        deltas.append(store.pack(nonce=f"{step}").put(bytes(sparse(old, new, 2)), SPARSE))
        version.apply("w", 0, deltas[-1], new)
        store.commit(version, step=step)
    # Step 3: the prefix raw + 1 + 2 becomes raw + one piece that squashes both; only the delta to step 3 is fresh.
    new = change(contents[-1], 2, {70: 9})
    version = version.next()
    squashed = store.pack(nonce="squashed").put(bytes(sparse(zero, contents[-1], 2)), SPARSE)
    top = store.pack(nonce="3").put(bytes(sparse(contents[-1], new, 2)), SPARSE)
    version.replace("w", 0, [version.tensors["w"].chains[0][0], squashed, top], new, fresh=1)
    store.commit(version, step=3)
    contents.append(new)
    # Step 4: unchanged, but its chain is another: a new keyframe alone.
    version = version.next()
    keyframe = store.pack(nonce="4").put(planes(new, 2), PLANES)
    version.replace("w", 0, [keyframe], new, fresh=0)
    store.commit(version, step=4)
    base = suite.valid(
        "rebase/whole",
        "a chain whose prefix was squashed, then replaced by a keyframe without a change",
        store,
        "DF-MAN-08",
        "DF-RD-02",
        "DF-CMT-08",
        flags=["chain", "rebase"],
    )
    suite.valid(
        "rebase/step-3",
        "the step with the squashed prefix",
        base,
        "DF-MAN-08",
        at=at(3),
        flags=["chain", "rebase"],
    )

    def without(piece: Any) -> Store:
        made = Store()
        made.__dict__.update(store.__dict__)
        made.objects = {k: v for k, v in store.objects.items() if k != piece.pack.key}
        return made

    follow = suite.valid(
        "rebase/follower-needs-no-squashed-piece",
        "from step 2 to step 3, although the squashed piece's pack is missing",
        without(squashed),
        "DF-RD-02",
        "DF-MAN-08",
        op="follow",
        start=at(2),
        at=at(3),
        profile=FULL,
        flags=["follow", "rebase", "lazy"],
    )
    suite.valid(
        "rebase/cold-reader-needs-it",
        "the same store, read cold",
        follow,
        "DF-RD-02",
        at=at(3),
        error=MISSING,
        profile=FULL,
        flags=["rebase", "lazy"],
    )
    suite.valid(
        "rebase/follower-needs-no-keyframe",
        "from step 3 to step 4, although the new keyframe's pack is missing: `fresh` is 0",
        without(keyframe),
        "DF-RD-02",
        op="follow",
        start=at(3),
        at=at(4),
        profile=FULL,
        flags=["follow", "rebase", "lazy"],
    )

    several = Store()
    several.claim()
    version = several.keyframe({"w": ("BF16", [100], zero)})
    several.commit(version, step=0)
    version = version.next()
    middle = change(zero, 2, {0: 5})
    end = change(middle, 2, {0: -2, 9: 1})
    pack = several.pack(nonce="two")
    version.apply("w", 0, pack.put(bytes(sparse(zero, middle, 2)), SPARSE), middle)
    version.apply("w", 0, pack.put(bytes(sparse(middle, end, 2)), SPARSE), end)
    several.commit(version, step=1)
    suite.valid(
        "rebase/two-fresh-pieces",
        "two fresh pieces, applied in order",
        several,
        "DF-RD-02",
        op="follow",
        start=at(0),
        at=at(1),
        profile=FULL,
        flags=["follow"],
    )


ZONE = "/tmp/deltaformat-conformance-7f3a"
"""Where cases put files outside of stores. Only the suite makes it, and it takes it away."""


def _external(suite: Suite) -> None:
    data = noise(700, 95)

    def store(
        url: str, *, copy: bytes | None = None, encoding: int = RAW, hooks: Any = None, content: bytes = data
    ) -> Store:
        made = Store(hooks=hooks)
        made.claim()
        external = External(url, data)
        version = made.keyframe({"own": ("U8", [4], b"abcd")})
        pieces = [[external.piece(start, min(256, 700 - start), encoding)] for start in range(100, 700, 256)]
        pieces[-1] = [external.piece(612, 88, encoding)]
        version.tensors["w"] = Tensor("U8", [600], content[100:700], pieces, [NOT_FRESH] * 3)
        made.commit(version)
        if copy is not None:
            made.objects[f"packs/external/{sha256(data)}"] = copy
        return made

    refused = ("UNSAFE", "external-refused")
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
        INVALID,
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
