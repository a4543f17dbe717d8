"""SPEC 12.2: void records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.cases_log import base_version, only_log
from vectors.faults import VOID
from vectors.store import Store
from vectors.suite import Suite

__all__ = ["add", "prepared"]


def add(suite: Suite) -> None:
    """All of them."""
    _void(suite)


def prepared(hooks: Any = None) -> Store:
    """Six records: a claim, two commits, a fork, a tag, a claim of the fork."""
    store = Store(hooks=hooks)
    store.claim()  # 0
    version = base_version(store)
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
        prepared(),
        "DF-LOG-04",
        op="state",
        flags=["log"],
    )
    del base

    def void(name: str, title: str, make: Callable[[Store], None], *ids: str, whole: bool = False) -> str:
        store = prepared()
        make(store)
        assert store.seq == 6, name
        if not whole:
            only_log(store)
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
                "claim",
                False,
                head(store, branch, epoch=epoch, claim=6, **after),
                branch=branch,
                epoch=epoch,
                host="example",
                pid=1,
                resume_from=resume_from,
                single_writer=False,
            )

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

    store = prepared()
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

    store = prepared()
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

    store = prepared()
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
