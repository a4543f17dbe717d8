"""SPEC 12: records, states, void records, lineages, hints; opening by branch, step, seq and tag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.payloads import SPARSE, sparse
from vectors.store import Store, Version
from vectors.suite import Suite
from vectors.weights import change, noise

__all__ = ["add"]

MISSING_VERSION = ("MISSING", "version-missing")
VOID = ("INCONSISTENT", "record-void")
VALUE = ("MALFORMED", "value-invalid")
JSON = ("MALFORMED", "json-invalid")
W = noise(40, 51)


def add(suite: Suite) -> None:
    """All of them."""
    _history(suite)
    _lineage(suite)
    _hints(suite)
    _void(suite)
    _retired(suite)
    _faults(suite)


def _child(store: Store, version: Version, position: int) -> Version:
    """The next version: one element has changed."""
    version = version.next()
    old = version.tensors["w"].data
    new = change(old, 2, {position % 20: 1})
    claim = store.heads["main"]["claim"]
    version.apply(
        "w", 0, store.pack(claim, nonce=f"{store.seq}").put(bytes(sparse(old, new, 2)), SPARSE), new
    )
    return version


def _base(store: Store) -> Version:
    return store.keyframe({"w": ("BF16", [20], W)})


def _history(suite: Suite) -> None:
    """A log with a record of every kind."""
    store = Store()
    store.claim()  # 0
    versions = [_base(store)]
    store.commit(versions[0], step=10)  # 1
    for step in (12, 15):  # 2, 3
        versions.append(_child(store, versions[-1], step))
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
    back = _child(store, versions[1], 3)
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
    store.commit(_base(store))
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
        for entry in _manifests(store, seq)
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


def _manifests(store: Store, seq: int) -> list[dict[str, Any]]:
    import json

    found: list[dict[str, Any]] = json.loads(store.objects[f"log/{seq:020}.json"])["manifests"]
    return found


def _hints(suite: Suite) -> None:
    def store(hint: bytes | None) -> Store:
        made = Store()
        made.claim()
        version = _base(made)
        for step in range(4):
            made.commit(version, step=step)
            version = version.next()
        _only_log(made)
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


def _prepared(hooks: Any = None) -> Store:
    """Six records: a claim, two commits, a fork, a tag, a claim of the fork."""
    store = Store(hooks=hooks)
    store.claim()  # 0
    version = _base(store)
    store.commit(version, step=5)  # 1
    store.commit(version.next(), step=7)  # 2
    store.fork("side", 1)  # 3
    store.tag("t", 1)  # 4
    store.claim("side")  # 5
    return store


def _void(suite: Suite) -> None:
    base = suite.valid(
        "void/none",
        "the log that void records are added to",
        _prepared(),
        "DF-LOG-04",
        op="state",
        flags=["log"],
    )
    del base

    def void(name: str, title: str, make: Callable[[Store], None], *ids: str, whole: bool = False) -> str:
        store = _prepared()
        make(store)
        assert store.seq == 6, name
        if not whole:
            _only_log(store)
        return suite.valid(
            f"void/{name}",
            f"void, as the newest record: {title}",
            store,
            "DF-LOG-04",
            "DF-LOG-06",
            *ids,
            op="state",
            flags=["log", "void"],
        )

    def head(store: Store, branch: str, **members: Any) -> dict[str, Any]:
        before = store.heads.get(branch, {"seq": None, "step": None, "epoch": 0, "claim": None})
        return {**store.heads, branch: {**before, **members}}

    def commit(**changes: Any) -> Callable[[Store], None]:
        def make(store: Store) -> None:
            version = store.commits[2].version.next()
            members = store.commit_members(version, "main", 9) | changes
            branch = members["branch"]
            store.record("commit", False, head(store, branch, seq=6, step=members["step"]), **members)

        return make

    def claim(
        branch: str, epoch: int, resume_from: int | None = None, **after: Any
    ) -> Callable[[Store], None]:
        def make(store: Store) -> None:
            store.record(
                "claim", False, head(store, branch, epoch=epoch, claim=6, **after), branch=branch, epoch=epoch,
                host="example", pid=1, resume_from=resume_from, single_writer=False,
            )  # fmt: skip

        return make

    stale = void(
        "commit-of-other-claim",
        "a commit under another claim than the branch's",
        commit(claim=5),
        "DF-CMT-04",
        whole=True,
    )
    suite.valid(
        "void/commit-by-branch",
        "with it as the newest record, `main` is where it was",
        stale,
        "DF-LOG-04",
        at={"branch": "main"},
        flags=["log", "void"],
    )
    suite.valid(
        "void/commit-by-seq",
        "a void commit that is asked for by its seq",
        stale,
        "DF-LOG-04",
        at={"seq": 6},
        error=VOID,
        flags=["log", "void"],
    )
    void("commit-of-no-branch", "a commit to a branch that does not exist", commit(branch="nobody"))
    void("commit-at-head-step", "a commit at the head's own step", commit(step=7), "DF-CMT-05")
    void("commit-below-head", "a commit below the head's step", commit(step=6), "DF-CMT-05")
    void(
        "commit-of-other-parent",
        "a commit whose parent is not the head",
        commit(parent=1, depth=1, ancestors=[[0, 1, 5]]),
    )
    void(
        "commit-without-parent",
        "a commit without a parent to a branch that has a head",
        commit(parent=None, depth=0, ancestors=[]),
    )
    void("commit-depth", "a commit whose depth is one too large", commit(depth=3), "DF-LOG-08")
    void(
        "commit-ancestors-short",
        "a commit whose `ancestors` lack the last entry",
        commit(ancestors=[[1, 2, 7]]),
        "DF-LOG-08",
    )
    void(
        "commit-ancestors-order",
        "a commit whose `ancestors` are farthest first",
        commit(ancestors=[[0, 1, 5], [1, 2, 7]]),
        "DF-LOG-08",
    )
    void(
        "commit-ancestors-step",
        "a commit whose `ancestors` have a wrong step",
        commit(ancestors=[[1, 2, 7], [0, 1, 4]]),
        "DF-LOG-08",
    )
    foreign = [{"key": f"packs/{5:020}/{'ab' * 32}.safetensors", "size": 9}]
    void(
        "commit-adds-of-other-claim",
        "a commit that adds a pack of another claim",
        commit(objects_added=foreign),
        "DF-CMT-06",
    )

    def other_manifest(store: Store) -> None:
        version = store.commits[2].version.next()
        members = store.commit_members(version, "main", 9)
        entry = members["manifests"][0]
        moved = entry["key"].replace(f"{0:020}", f"{5:020}")
        store.objects[moved] = store.objects.pop(entry["key"])
        members["manifests"] = [entry | {"key": moved}]
        store.record("commit", False, head(store, "main", seq=6, step=9), **members)

    void(
        "commit-manifest-of-other-claim",
        "a commit whose manifest has another claim in its key",
        other_manifest,
    )

    def wrong_heads(store: Store) -> None:
        members = store.commit_members(store.commits[2].version.next(), "main", 9)
        store.record("commit", False, store.heads, **members)

    void("commit-heads", "a commit that leaves `heads` as they were", wrong_heads)

    def dropped_heads(store: Store) -> None:
        members = store.commit_members(store.commits[2].version.next(), "main", 9)
        after = head(store, "main", seq=6, step=9)
        del after["side"]
        store.record("commit", False, after, **members)

    void("commit-heads-lack-a-branch", "a commit whose `heads` lack another branch", dropped_heads)

    def last_tag(store: Store) -> None:
        store.last_tag = None
        commit()(store)
        store.last_tag = 4

    void("commit-last-tag", "a commit whose `last_tag` is null, though there is a tag record", last_tag)
    void("claim-epoch-same", "a claim that does not raise the epoch", claim("main", 1), "DF-LOG-05")
    void("claim-epoch-skips", "a claim that raises the epoch by two", claim("main", 3))
    void("claim-new-branch-epoch-2", "a claim of a new branch with epoch 2", claim("fresh", 2))
    void(
        "claim-resumes-superseding",
        "a claim that resumes a branch from a commit outside its lineage",
        claim("side", 2, 2, seq=2, step=7),
    )
    void(
        "claim-resumes-from-claim",
        "a claim that resumes from a record which is no commit",
        claim("main", 2, 0, seq=0, step=0),
    )
    void("claim-resumes-from-itself", "a claim that resumes from itself", claim("main", 2, 6, seq=6, step=7))
    void("claim-resumes-heads", "a claim that resumes and does not say so in `heads`", claim("main", 2, 1))

    def fork(branch: str, source: int, step: int) -> Callable[[Store], None]:
        return lambda store: (
            store.record(
                "fork",
                False,
                {**store.heads, branch: {"seq": source, "step": step, "epoch": 0, "claim": None}},
                branch=branch,
                source=source,
                step=step,
            ),
            None,
        )[1]

    void("fork-exists", "a fork of a name that exists", fork("side", 2, 7))
    void("fork-of-no-commit", "a fork from a record that is no commit", fork("more", 0, 5))
    void("fork-step", "a fork with another step than the commit's", fork("more", 2, 5))
    void("fork-of-future", "a fork from a later seq", fork("more", 9, 5))
    void(
        "tag-of-no-commit",
        "a tag of a record that is no commit",
        lambda s: (s.record("tag", False, name="u", target=3), None)[1],
    )
    void(
        "drop-of-no-branch",
        "a drop of a branch that does not exist",
        lambda s: (s.record("drop", False, branch="nobody"), None)[1],
    )
    void(
        "retire-of-head",
        "a retirement of a branch's head",
        lambda s: (s.record("retire", False, commits=[1]), None)[1],
    )
    void(
        "retire-of-nothing",
        "a retirement of no commit",
        lambda s: (s.record("retire", False, commits=[]), None)[1],
    )
    void(
        "retire-falls",
        "a retirement whose seqs do not rise",
        lambda s: (s.record("retire", False, commits=[2, 1]), None)[1],
    )

    store = _prepared()
    commit(claim=5)(store)  # 6, void
    store.commit(
        store.commits[2].version.next(), step=9
    )  # 7: its `heads` do not follow from the void record's
    store.tag("u", 7)
    id_ = suite.valid(
        "void/before-a-valid-one",
        "a void commit with valid records behind it",
        store,
        "DF-LOG-04",
        "DF-LOG-06",
        op="state",
        flags=["log", "void"],
    )
    suite.valid(
        "void/before-a-valid-one-by-branch",
        "the head of `main` there",
        id_,
        "DF-LOG-04",
        "DF-LOG-06",
        at={"branch": "main"},
        flags=["log", "void"],
    )
    suite.valid(
        "void/before-a-valid-one-by-seq",
        "the void commit itself, by its seq",
        id_,
        "DF-LOG-04",
        at={"seq": 6},
        error=VOID,
        flags=["log", "void"],
    )
    suite.valid(
        "void/before-a-valid-one-by-tag",
        "a tag behind it",
        id_,
        "DF-LOG-06",
        at={"tag": "u"},
        flags=["log", "void"],
    )

    store = _prepared()
    commit(claim=5)(store)  # 6, void
    store.commit(store.commits[2].version.next(), step=9)  # 7: right after a void record, the newest
    suite.valid(
        "void/just-before-the-newest",
        "the newest record is valid, the one before it void: all records must be read",
        store,
        "DF-LOG-06",
        op="state",
        flags=["log", "void"],
    )
    store = Store()
    store.record(
        "commit",
        False,
        {"main": {"seq": 0, "step": 0, "epoch": 1, "claim": 0}},
        branch="main",
        claim=0,
        step=0,
        parent=None,
        depth=0,
        ancestors=[],
        root="df1:xxh3-128:256:" + "0" * 64,
        manifests=[{"key": f"manifests/{0:020}/{'0' * 64}.arrow.zst", "size": 1, "content_size": 1}],
        objects_added=[],
        objects_dropped=[],
        metadata={},
    )
    suite.valid(
        "void/record-0",
        "record 0 is a commit: void, and the only record",
        store,
        "DF-LOG-04",
        op="state",
        flags=["log", "void"],
    )

    store = _prepared()
    commit(claim=5)(store)
    store.record("tag", False, name="v", target=6)  # 7: of a void commit
    store.claim("main")  # 8
    suite.valid(
        "void/tag-of-void-commit",
        "a tag of a void commit is void, so two void records stand in a row; a valid claim follows",
        store,
        "DF-LOG-04",
        "DF-LOG-06",
        op="state",
        level="should",
        flags=["log", "void"],
    )


def _retired(suite: Suite) -> None:
    def store() -> Store:
        made = Store()
        made.claim()  # 0
        version = _base(made)
        made.commit(version, step=0)  # 1
        for step in (1, 2):  # 2, 3
            version = _child(made, version, step)
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
    for entry in _manifests(collected, 2):
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


def _faults(suite: Suite) -> None:
    base = "valid/void/none"
    newest = "record:5"  # the claim of the branch `side`

    def fault(
        name: str,
        mutation: str,
        change_: Callable[[dict[str, Any]], Any],
        error: tuple[str, str],
        *ids: str,
        record: str = newest,
    ) -> None:
        suite.invalid(
            f"log/{name}",
            base,
            mutation,
            _only_log(_prepared({record: change_})),
            error,
            *(ids or ("DF-JSN-01",)),
        )

    def put(**members: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda record: record | members

    fault(
        "kind-unknown",
        "the newest record is of the kind `merge`",
        put(kind="merge"),
        ("UNSUPPORTED", "format-unknown"),
        "DF-LOG-03",
    )
    fault(
        "requires-unknown",
        "the newest record requires a feature that nobody knows",
        put(requires=["time-travel"]),
        ("UNSUPPORTED", "feature-unknown"),
        "DF-VER-01",
    )
    fault(
        "requires-before-kind",
        "it is of an unknown kind and requires an unknown feature: the feature is named",
        put(kind="merge", requires=["time-travel"]),
        ("UNSUPPORTED", "feature-unknown"),
        "DF-VER-01",
    )
    fault(
        "seq-of-another",
        "the newest record says that it is record 4",
        put(seq=4),
        ("INCONSISTENT", "record-misplaced"),
        "DF-LOG-02",
    )
    fault(
        "prev-of-another",
        "`prev` of the newest record is another hash",
        put(prev="ab" * 32),
        ("CORRUPT", "chain-broken"),
        "DF-LOG-02",
    )
    fault(
        "prev-null",
        "`prev` of the newest record is null",
        put(prev=None),
        ("CORRUPT", "chain-broken"),
        "DF-LOG-02",
    )
    for name in (
        "kind",
        "seq",
        "prev",
        "nonce",
        "time",
        "heads",
        "last_tag",
        "last_retire",
        "requires",
        "branch",
        "epoch",
        "host",
        "pid",
        "resume_from",
        "single_writer",
    ):
        fault(
            f"without-{name.replace('_', '-')}",
            f"the newest record lacks `{name}`",
            lambda r, name=name: {k: v for k, v in r.items() if k != name},
            JSON,
        )
    for name, value, words in (
        ("epoch", "2", "a string"), ("epoch", True, "true"), ("epoch", None, "null"), ("pid", [], "an array"), ("host", 5, "a number"), ("heads", [], "an array"),
        ("single_writer", 0, "0"), ("requires", "x", "a string"), ("branch", None, "null"), ("time", 7, "a number"),
    ):  # fmt: skip
        fault(
            f"{name.replace('_', '-')}-is-{words.replace(' ', '-')}",
            f"`{name}` is {words}",
            put(**{name: value}),
            JSON,
        )
    fault("epoch-negative", "`epoch` is -1", put(epoch=-1), VALUE)
    for name, branch in (
        ("empty", ""),
        ("dash-first", "-x"),
        ("space", "a b"),
        ("too-long", "x" * 129),
        ("not-ascii", "\u00e9"),
        ("line-break", "x\n"),
    ):
        fault(f"branch-{name}", f"the branch is {branch[:9]!a}", put(branch=branch), VALUE, "DF-LOG-01")
    fault(
        "branch-in-heads",
        "a branch in `heads` is named `..`",
        lambda r: r | {"heads": r["heads"] | {"..": r["heads"]["main"]}},
        VALUE,
        "DF-LOG-01",
    )
    fault("nonce-short", "the nonce has 31 digits", put(nonce="0" * 31), VALUE)
    fault(
        "head-without-epoch",
        "a head lacks `epoch`",
        lambda r: r | {"heads": {"main": {"seq": 2, "step": 7, "claim": 0}}},
        JSON,
    )

    one = suite.valid(
        "log/one-commit",
        "a claim and a commit, as objects of the log alone",
        _log_only({}),
        "DF-LOG-11",
        op="state",
        flags=["log"],
    )

    def commit(
        name: str, mutation: str, change_: Callable[[dict[str, Any]], Any], error: tuple[str, str], *ids: str
    ) -> None:
        suite.invalid(
            f"log/commit-{name}",
            one,
            mutation,
            _log_only({"record:1": change_}),
            error,
            *(ids or ("DF-LOG-11",)),
        )

    for name in (
        "claim",
        "step",
        "parent",
        "depth",
        "ancestors",
        "root",
        "manifests",
        "objects_added",
        "objects_dropped",
        "metadata",
    ):
        commit(
            f"without-{name.replace('_', '-')}",
            f"the commit lacks `{name}`",
            lambda r, name=name: {k: v for k, v in r.items() if k != name},
            JSON,
            "DF-JSN-01",
        )
    commit("no-manifests", "`manifests` is empty", put(manifests=[]), VALUE)
    commit(
        "manifest-twice",
        "`manifests` has an entry twice",
        lambda r: r | {"manifests": r["manifests"] * 2},
        VALUE,
    )
    commit(
        "manifest-is-a-pack",
        "a manifest's key is one of a pack",
        lambda r: r | {"manifests": [r["manifests"][0] | {"key": r["objects_added"][0]["key"]}]},
        VALUE,
    )
    commit(
        "adds-a-manifest",
        "`objects_added` has a manifest's key",
        lambda r: r | {"objects_added": [{"key": r["manifests"][0]["key"], "size": 1}]},
        VALUE,
    )
    commit(
        "adds-a-copy",
        "`objects_added` has the key of an external copy",
        put(objects_added=[{"key": "packs/external/" + "ab" * 32, "size": 1}]),
        VALUE,
    )
    commit(
        "drops-a-hint",
        "`objects_dropped` has the key of the hint",
        put(objects_dropped=[{"key": "hints/tail.json", "size": 1}]),
        VALUE,
    )
    commit(
        "key-outside",
        "`objects_added` has a key that leads out of the store",
        put(objects_added=[{"key": "packs/../../x", "size": 1}]),
        VALUE,
        "DF-KEY-01",
        "DF-SEC-01",
    )
    commit("step-negative", "the step is -1", put(step=-1), VALUE, "DF-JSN-01")
    commit("step-too-large", "the step is 2^53", put(step=2**53), JSON, "DF-JSN-01")
    commit("root-short", "the root lacks a digit", lambda r: r | {"root": r["root"][:-1]}, VALUE, "DF-DIG-04")
    commit("metadata-an-array", "`metadata` is an array", put(metadata=[]), JSON, "DF-JSN-01")
    commit("ancestors-flat", "`ancestors` is an array of numbers", put(ancestors=[1]), JSON, "DF-JSN-01")
    commit(
        "content-size-beyond-1-gib",
        "a manifest's content size is 2^30 + 1",
        lambda r: r | {"manifests": [r["manifests"][0] | {"content_size": 2**30 + 1}]},
        ("LIMIT", "limit-exceeded"),
        "DF-LIM-01",
        "DF-LIM-02",
    )

    for place in ("objects_added", "manifests"):
        commit(
            f"{place.replace('_', '-')}-beyond-1-tib",
            f"an entry of `{place}` has a size of 2^40 + 1",
            lambda r, place=place: r | {place: [r[place][0] | {"size": 2**40 + 1}]},
            ("LIMIT", "limit-exceeded"),
            "DF-LIM-01",
            "DF-LIM-02",
        )

    for name, title, changes in (
        ("time-odd", "a `time` that is no time", {"time": "yesterday"}),
        ("time-empty", "an empty `time`", {"time": ""}),
        (
            "unknown-members",
            "members that SPEC.md does not know, also in heads",
            {"note": {"a": [1.5, None]}, "Seq": 4},
        ),
        ("pid-negative", "a negative pid", {"pid": -1}),
        ("host-any", "a host with any characters", {"host": '\u0000\u2028\U0001f600\\"'}),
    ):
        suite.valid(
            f"log/{name}",
            title,
            _only_log(_prepared({newest: put(**changes)})),
            "DF-JSN-02",
            "DF-LOG-11",
            op="state",
            flags=["log", "must-accept"],
        )


def _log_only(hooks: Any) -> Store:
    store = Store(hooks=hooks)
    store.claim()
    store.commit(_base(store), step=5)
    return _only_log(store)


def _only_log(store: Store) -> Store:
    """Without what the log refers to: enough where only its state is asked for."""
    store.objects = {k: v for k, v in store.objects.items() if k.startswith(("log/", "deltaformat"))}
    return store
