"""SPEC 11.2 and 13: following by `fresh`, re-based chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.cases_reading import FULL, at, record_of
from vectors.content import NOT_FRESH, External, Tensor
from vectors.faults import CORRUPT, MANIFEST, MISSING
from vectors.payloads import PLANES, PLANES_DELTA, RAW, SPARSE, planes, sparse
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import change, noise

__all__ = ["add"]


def add(suite: Suite) -> None:
    """All of them."""
    _follow(suite)
    _rebased(suite)


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
    key = record_of(gone, 2)["manifests"][0]["key"]
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
        MANIFEST,
        "DF-MAN-08",
        held=held_0,
    )
    suite.invalid(
        "follow/fresh-without-counterpart",
        one,
        "`fresh` is 0 for a tensor that the parent does not have",
        rows(fresh=lambda r: [*r[:2], [0]]),
        MANIFEST,
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
        MANIFEST,
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
    # Step 3: the prefix raw + 1 + 2 becomes raw + one piece that squashes both; only the last piece is fresh.
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
