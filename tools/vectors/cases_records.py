"""SPEC 12.1: faults of records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.cases_log import base_version, only_log
from vectors.cases_void import prepared
from vectors.faults import JSON, VALUE
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import put, without

__all__ = ["add"]


def add(suite: Suite) -> None:
    """All of them."""
    _faults(suite)


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
            only_log(prepared({record: change_})),
            error,
            *(ids or ("DF-JSN-01",)),
        )

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
            without(name),
            JSON,
        )
    for name, value, words in (
        ("epoch", "2", "a string"),
        ("epoch", True, "true"),
        ("epoch", None, "null"),
        ("pid", [], "an array"),
        ("host", 5, "a number"),
        ("heads", [], "an array"),
        ("single_writer", 0, "0"),
        ("requires", "x", "a string"),
        ("branch", None, "null"),
        ("time", 7, "a number"),
    ):
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
        _one_commit({}),
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
            _one_commit({"record:1": change_}),
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
            without(name),
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
            _oversized(place),
            ("LIMIT", "limit-exceeded"),
            "DF-LIM-01",
            "DF-LIM-02",
        )

    taken = dict(_one_commit({}).objects)
    taken[f"log/{2:020}.json/x"] = b"x"
    suite.invalid(
        "log/record-is-a-directory",
        one,
        "where record 2 would be is a directory: the failure to read it is not its absence",
        taken,
        ("STORE", "store-failed"),
        "DF-STO-04",
        level="should",
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
            only_log(prepared({newest: put(**changes)})),
            "DF-JSN-02",
            "DF-LOG-11",
            op="state",
            flags=["log", "must-accept"],
        )


def _oversized(place: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record | {place: [record[place][0] | {"size": 2**40 + 1}]}


def _one_commit(hooks: Any) -> Store:
    store = Store(hooks=hooks)
    store.claim()
    store.commit(base_version(store), step=5)
    return only_log(store)
