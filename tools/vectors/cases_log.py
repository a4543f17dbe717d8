"""SPEC 12: records, states, void records, lineages, hints; opening by branch, step, seq and tag."""

from __future__ import annotations

from typing import Any

from vectors.content import Version
from vectors.faults import MISSING_VERSION
from vectors.payloads import SPARSE, sparse
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import change, noise

__all__ = ["add"]

W = noise(40, 51)


def add(suite: Suite) -> None:
    """All of them."""
    _history(suite)
    _lineage(suite)
    _hints(suite)
    _retired(suite)


def child_version(store: Store, version: Version, position: int) -> Version:
    """The next version: one element has changed."""
    version = version.next()
    old = version.tensors["w"].data
    new = change(old, 2, {position % 20: 1})
    claim = store.heads["main"]["claim"]
    version.apply(
        "w", 0, store.pack(claim, nonce=f"{store.seq}").put(bytes(sparse(old, new, 2)), SPARSE), new
    )
    return version


def base_version(store: Store) -> Version:
    return store.keyframe({"w": ("BF16", [20], W)})


def _history(suite: Suite) -> None:
    """A log with a record of every kind."""
    store = Store()
    store.claim()  # 0
    versions = [base_version(store)]
    store.commit(versions[0], step=10)  # 1
    for step in (12, 15):  # 2, 3
        versions.append(child_version(store, versions[-1], step))
        store.commit(versions[-1], step=step)
    store.tag("best/so-far", 2)  # 4
    store.fork("try.1", 2)  # 5
    store.claim("try.1")  # 6
    side = versions[1].next()
    old = side.tensors["w"].data
    new = change(old, 2, {7: -9})
    side.apply("w", 0, store.pack(6).put(bytes(sparse(old, new, 2)), SPARSE), new)
    store.commit(side, branch="try.1", step=13)  # 7
    store.claim("main", resume_from=2)  # 8
    back = child_version(store, versions[1], 3)
    store.commit(back, step=14)  # 9
    store.tag("worst", 3)  # 10
    store.tag("worst", None)  # 11
    store.tag("best/so-far", 9)  # 12: a writer must not, but it is valid
    store.fork("gone", 1)  # 13
    store.drop("gone")  # 14
    store.claim("empty-yet")  # 15
    store.hint()
    id_ = suite.valid(
        "log/every-kind",
        "claims, commits, forks, tags, a rewind, a dropped branch: the state after all",
        store,
        "DF-LOG-01",
        "DF-LOG-04",
        "DF-LOG-12",
        op="state",
        flags=["log"],
    )

    def look(
        name: str, title: str, *ids: str, at: dict[str, Any], error: tuple[str, str] | None = None
    ) -> None:
        suite.valid(f"log/{name}", title, id_, *ids, at=at, error=error, flags=["log"])

    main = {"branch": "main"}
    look("head", "the head of `main`, after the rewind", "DF-LOG-07", at=main)
    look("head-of-fork", "the head of the branch `try.1`", "DF-LOG-06", at={"branch": "try.1"})
    look(
        "step-before-fork",
        "a step that `try.1` has from `main`",
        "DF-LOG-08",
        at={"branch": "try.1", "step": 10},
    )
    look(
        "fork-point",
        "the commit at which `try.1` was forked, by its step",
        "DF-LOG-08",
        at={"branch": "try.1", "step": 12},
    )
    look(
        "superseded-by-seq",
        "a commit above the rewind's target stays readable by seq",
        "DF-LOG-07",
        at={"seq": 3},
    )
    look(
        "superseded-by-step",
        "a search by step does not find it",
        "DF-LOG-07",
        at=main | {"step": 15},
        error=MISSING_VERSION,
    )
    look(
        "step-of-other-branch",
        "a step that only another branch has",
        "DF-LOG-08",
        at=main | {"step": 13},
        error=MISSING_VERSION,
    )
    look(
        "step-between",
        "a step between two commits",
        "DF-LOG-08",
        at=main | {"step": 11},
        error=MISSING_VERSION,
    )
    look("step-below", "a step below the first", "DF-LOG-08", at=main | {"step": 0}, error=MISSING_VERSION)
    look(
        "step-above",
        "a step above the head",
        "DF-LOG-08",
        at=main | {"step": 2**53 - 1},
        error=MISSING_VERSION,
    )
    look(
        "tag",
        "a tag that has moved: the newest record of its name counts",
        "DF-LOG-12",
        at={"tag": "best/so-far"},
    )
    look(
        "tag-removed",
        "a tag that has been removed",
        "DF-LOG-12",
        at={"tag": "worst"},
        error=("MISSING", "tag-missing"),
    )
    look(
        "tag-unknown",
        "a tag that never was",
        "DF-ERR-01",
        at={"tag": "best"},
        error=("MISSING", "tag-missing"),
    )
    look(
        "branch-dropped",
        "a branch that was dropped",
        "DF-LOG-04",
        at={"branch": "gone"},
        error=("MISSING", "branch-missing"),
    )
    look(
        "branch-unknown",
        "a branch that never was",
        "DF-ERR-01",
        at={"branch": "Main"},
        error=("MISSING", "branch-missing"),
    )
    look(
        "branch-empty",
        "a branch without a commit",
        "DF-ERR-01",
        at={"branch": "empty-yet"},
        error=MISSING_VERSION,
    )
    look("seq-of-a-claim", "a seq that is a claim's", "DF-ERR-01", at={"seq": 0}, error=MISSING_VERSION)
    look("seq-of-a-tag", "a seq that is a tag's", "DF-ERR-01", at={"seq": 4}, error=MISSING_VERSION)
    look("seq-beyond", "a seq behind the newest record", "DF-ERR-01", at={"seq": 16}, error=MISSING_VERSION)
    look("seq-far-beyond", "the largest seq", "DF-ERR-01", at={"seq": 2**53 - 1}, error=MISSING_VERSION)
    suite.valid(
        "log/tensor-unknown",
        "a tensor that the version does not have",
        id_,
        "DF-ERR-01",
        select=["w", "v"],
        error=("MISSING", "tensor-missing"),
    )
    suite.valid("log/no-tensors-selected", "an empty selection", id_, "DF-RD-01", select=[])

    only = Store()
    suite.valid(
        "log/no-records",
        "a store that has a descriptor and no record",
        only,
        "DF-LOG-09",
        error=("MISSING", "branch-missing"),
    )
    nothing = suite.valid(
        "log/no-store",
        "a directory without a descriptor",
        _without_descriptor(),
        "DF-STO-04",
        error=("MISSING", "store-missing"),
    )
    del nothing


def _without_descriptor() -> Store:
    store = Store()
    store.claim()
    store.commit(base_version(store))
    del store.objects["deltaformat.json"]
    return store


def _lineage(suite: Suite) -> None:
    store = Store()
    store.claim()
    version = store.keyframe({"w": ("U8", [1], b"\0")})
    for depth in range(19):
        store.commit(version, step=3 * depth)
        version = version.next()
    store.objects = {k: v for k, v in store.objects.items() if not k.startswith("manifests/")} | {
        entry["key"]: store.objects[entry["key"]]
        for seq in (1, 2, 5, 8, 9, 14, 19)
        for entry in manifests_of(store, seq)
    }
    id_ = suite.valid(
        "lineage/head",
        "nineteen commits; only some of their manifests are there",
        store,
        "DF-LOG-08",
        "DF-RD-01",
        flags=["log", "lazy"],
    )
    for step in (0, 3, 12, 21, 24, 39):
        suite.valid(
            f"lineage/step-{step}",
            f"step {step} of nineteen commits, each three steps apart",
            id_,
            "DF-LOG-08",
            at={"branch": "main", "step": step},
            flags=["log"],
        )
    suite.valid(
        "lineage/step-20",
        "a step that is between two commits",
        id_,
        "DF-LOG-08",
        at={"branch": "main", "step": 20},
        error=MISSING_VERSION,
        flags=["log"],
    )


def manifests_of(store: Store, seq: int) -> list[dict[str, Any]]:
    import json

    found: list[dict[str, Any]] = json.loads(store.objects[f"log/{seq:020}.json"])["manifests"]
    return found


def _hints(suite: Suite) -> None:
    def store(hint: bytes | None) -> Store:
        made = Store()
        made.claim()
        version = base_version(made)
        for step in range(4):
            made.commit(version, step=step)
            version = version.next()
        only_log(made)
        if hint is not None:
            made.hint(hint)
        return made

    for name, title, hint in (
        ("none", "no hint", None),
        ("right", "a right hint", b'{"seq":4}'),
        ("stale", "a hint that is behind", b'{"seq":1}'),
        ("false", "a hint that names a record which does not exist", b'{"seq":5}'),
        ("far", "a hint that names the largest seq there is", b'{"seq":9007199254740991}'),
        ("too-large", "a hint beyond 2^53 - 1", b'{"seq":9007199254740992}'),
        ("negative", "a hint of -1", b'{"seq":-1}'),
        ("text", "a hint whose seq is a string", b'{"seq":"4"}'),
        ("fraction", "a hint of 4.0", b'{"seq":4.0}'),
        ("no-member", "a hint without `seq`", b"{}"),
        ("not-json", "a hint that is no JSON", b'{"seq":4'),
        ("empty", "a hint of no bytes", b""),
        ("member-twice", "a hint that has `seq` twice", b'{"seq":4,"seq":3}'),
        ("zeros", "a hint of zeros, as a crash may leave it", bytes(9)),
        ("large", "a hint of 65,537 bytes, more than it may have", b'{"seq":4}' + b" " * 65528),
        ("unknown-member", "a right hint with an unknown member", b'{"seq":4,"note":[]}'),
    ):
        suite.valid(
            f"hint/{name}",
            title,
            store(hint),
            "DF-LOG-09",
            "DF-JSN-02",
            op="state",
            flags=["log", "hint", "must-accept"],
        )


def _retired(suite: Suite) -> None:
    def store() -> Store:
        made = Store()
        made.claim()  # 0
        version = base_version(made)
        made.commit(version, step=0)  # 1
        for step in (1, 2):  # 2, 3
            version = child_version(made, version, step)
            made.commit(version, step=step)
        made.retire(2)  # 4
        return made

    id_ = suite.valid(
        "retired/state",
        "a retired commit: the branch is as it was",
        store(),
        "DF-LOG-12",
        op="state",
        flags=["log"],
    )
    suite.valid("retired/head", "the head is readable", id_, "DF-GC-05", at={"branch": "main"}, flags=["log"])
    collected = store()
    for entry in manifests_of(collected, 2):
        del collected.objects[entry["key"]]
    gone = suite.valid(
        "retired/collected",
        "a retired commit whose manifest has been collected",
        collected,
        "DF-GC-05",
        at={"branch": "main", "step": 1},
        error=("MISSING", "version-retired"),
        flags=["log"],
    )
    suite.valid(
        "retired/collected-by-seq",
        "the same by its seq",
        gone,
        "DF-GC-05",
        at={"seq": 2},
        error=("MISSING", "version-retired"),
        flags=["log"],
    )
    suite.valid(
        "retired/child-of-collected",
        "its child is readable",
        gone,
        "DF-GC-02",
        "DF-LOG-08",
        at={"branch": "main", "step": 2},
        flags=["log"],
    )
    suite.valid(
        "retired/before-collected",
        "the step before it is found through its record",
        gone,
        "DF-GC-04",
        "DF-LOG-08",
        at={"branch": "main", "step": 0},
        flags=["log"],
    )
    forked = store()
    forked.fork("again", 2)  # valid, though a writer must not
    suite.valid(
        "retired/forked",
        "a fork of a retired commit: valid, though a writer must not make it",
        forked,
        "DF-LOG-12",
        op="state",
        flags=["log"],
    )


def only_log(store: Store) -> Store:
    """Without what the log refers to: enough where only its state is asked for."""
    store.objects = {k: v for k, v in store.objects.items() if k.startswith(("log/", "deltaformat"))}
    return store
