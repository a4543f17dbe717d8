"""SPEC 13: what is asked for by seq, and stores without records."""

from __future__ import annotations

from typing import Any

from vectors.cases_void import prepared
from vectors.faults import MISSING_VERSION
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import put, without

__all__ = ["add"]


def add(suite: Suite) -> None:
    """All of them."""
    _newest_broken(suite)
    _no_commit(suite)
    suite.valid(
        "log/no-records-state",
        "a store that has a descriptor and no record is valid: it has no newest record",
        "valid/log/no-records",
        "DF-LOG-09",
        op="state",
        flags=["log", "must-accept"],
    )
    suite.valid(
        "log/no-records-by-seq",
        "record 0 of a store that has none",
        "valid/log/no-records",
        "DF-ERR-01",
        at={"seq": 0},
        error=MISSING_VERSION,
        flags=["log"],
    )


def _newest_broken(suite: Suite) -> None:
    """DF-RD-04: the newest record cannot be read; it says nothing about record 2."""
    for name, title, hooks in (
        ("cut", "is cut short", {"bytes:5": lambda d: d[:-1]}),
        ("changed", "has another byte", {"bytes:5": lambda d: d.replace(b"example", b"exbmple")}),
        ("empty", "is empty", {"bytes:5": lambda d: b""}),
        ("of-unknown-kind", "is of an unknown kind", {"record:5": put(kind="merge")}),
        ("with-feature", "requires an unknown feature", {"record:5": put(requires=["time-travel"])}),
        ("without-heads", "lacks `heads`", {"record:5": without("heads")}),
        ("of-other-prev", "has the `prev` of another log", {"record:5": put(prev="ab" * 32)}),
        ("misplaced", "says that it is record 4", {"record:5": put(seq=4)}),
    ):
        id_ = suite.valid(
            f"by-seq/newest-{name}",
            f"a commit by its seq, where the newest record {title}",
            prepared(hooks),
            "DF-RD-04",
            at={"seq": 2},
            flags=["log", "must-accept"],
        )
        if name == "cut":
            suite.valid(
                "by-seq/newest-cut-opened",
                "the same, opened only",
                id_,
                "DF-RD-04",
                op="open",
                at={"seq": 1},
                flags=["log", "must-accept"],
            )
            suite.invalid(
                "log/newest-cut-by-branch",
                id_,
                "the head of a branch needs the newest record, which is cut short",
                prepared(hooks),
                ("MALFORMED", "json-invalid"),
                "DF-LOG-06",
                args={"at": {"branch": "main"}},
            )


def _no_commit(suite: Suite) -> None:
    """A record that is no commit, valid or void, is a version that is missing."""

    def look(name: str, title: str, store: Store | str, seq: int) -> None:
        suite.valid(
            f"by-seq/{name}", title, store, "DF-RD-04", at={"seq": seq}, error=MISSING_VERSION, flags=["log"]
        )

    def void(kind: str, **members: Any) -> Store:
        store = prepared()
        store.record(kind, False, **members)
        return store

    look("fork", "a seq that is a fork's", prepared(), 3)
    dropped = prepared()
    dropped.drop("side")
    look("drop", "a seq that is a drop's", dropped, 6)
    look("retire", "a seq that is a retirement's", "valid/retired/state", 4)
    look("void-tag", "a seq that is a void tag's", void("tag", name="x", target=0), 6)
    look("void-drop", "a seq that is a void drop's", void("drop", branch="nobody"), 6)
