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
    for name, value in (("epoch", 2**53), ("last_tag", -1), ("pid", 2**53), ("pid", -(2**53))):
        fault(
            f"{name.replace('_', '-')}-{'beyond' if value > 0 else 'below'}",
            f"`{name}` is {value}",
            put(**{name: value}),
            VALUE if value == -1 else JSON,
        )
    # Grammar comes before any comparison: these are not INCONSISTENT.
    fault("seq-negative", "the newest record says that it is record -1", put(seq=-1), VALUE, "DF-LOG-02")
    fault("seq-text", 'the newest record says that it is record "5"', put(seq="5"), JSON, "DF-LOG-02")
    fault("seq-beyond", "the newest record says that it is record 2^53", put(seq=2**53), JSON, "DF-LOG-02")
    fault(
        "seq-negative-in-heads",
        "the seq of a head is -1",
        lambda r: r | {"heads": r["heads"] | {"main": r["heads"]["main"] | {"seq": -1}}},
        VALUE,
    )
    for name, feature, words in (
        ("space", "Time Travel", "with capitals and a space"),
        ("empty", "", "that is empty"),
        ("long", "x" * 65, "of 65 characters"),
        ("path", "../x", "that is a path"),
    ):
        fault(
            f"requires-{name}",
            f"the newest record requires a feature {words}: outside the grammar, so unknown",
            put(requires=[feature]),
            ("UNSUPPORTED", "feature-unknown"),
            "DF-VER-01",
        )
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
    _roots(suite, commit)
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

    commit(
        "objects-dropped-beyond-1-tib",
        "an entry of `objects_dropped` has a size of 2^40 + 1",
        put(objects_dropped=[_dropped(2**40 + 1)]),
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

    _accepted_commits(suite)
    _first_record(suite)
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


def _dropped(size: int) -> dict[str, Any]:
    return {"key": f"packs/{0:020}/{'ab' * 32}.safetensors", "size": size}


def _roots(suite: Suite, commit: Callable[..., None]) -> None:
    """SPEC 7.1: the printed form, which is judged where a record is read."""

    def root(of: str, by: str) -> Callable[[dict[str, Any]], Any]:
        return lambda r: r | {"root": r["root"].replace(of, by, 1)}

    for name, words, of, by in (
        ("df2", "begins with df2", "df1:", "df2:"),
        ("block-size-odd", "states blocks of 257 bytes", ":256:", ":257:"),
        ("block-size-small", "states blocks of 128 bytes", ":256:", ":128:"),
        ("block-size-large", "states blocks of 128 MiB", ":256:", f":{2**27}:"),
        ("block-size-huge", "states a block size of 400 digits", ":256:", f":{'1' * 400}:"),
        ("block-size-0256", "states a block size with a leading zero", ":256:", ":0256:"),
        ("block-size-empty", "states no block size", ":256:", "::"),
        ("digest-capitals", "has capitals in its digest's name", "xxh3", "XXH3"),
        ("digest-dot", "has a dot in its digest's name", "xxh3-128", "xxh.3-128"),
        ("digest-empty", "has no digest's name", "xxh3-128", ""),
        ("digest-long", "has a digest's name of 256 characters", "xxh3-128", "x" * 256),
        ("line-break", "has a line break before it", "df1", "\ndf1"),
    ):
        commit(f"root-{name}", f"the root {words}", root(of, by), VALUE, "DF-DIG-04")
    for name, by in (("unknown", "md5"), ("long", "x" * 255), ("dash", "-")):
        commit(
            f"root-digest-{name}" if name != "long" else "root-digest-of-255",
            f"the root's digest is {by[:8]!r}, {len(by)} characters: of the form, and unknown",
            root("xxh3-128", by),
            ("UNSUPPORTED", "digest-unknown"),
            "DF-DIG-04",
            "DF-DSC-02",
        )
    suite.valid(
        "log/root-of-others",
        "a root of another digest and block size: compared only when its version is opened",
        _one_commit({"record:1": lambda r: r | {"root": f"df1:blake3-256:{2**26}:{'ab' * 32}"}}),
        "DF-DIG-04",
        op="state",
        flags=["log", "must-accept"],
    )


def _accepted_commits(suite: Suite) -> None:
    """Commits that look odd; their state is asked for."""
    for name, title, change_ in (
        (
            "commit-of-1-tib",
            "an added and a dropped object of 2^40 bytes, the most there may be",
            lambda r: _oversized("objects_added", 2**40)(r) | {"objects_dropped": [_dropped(2**40)]},
        ),
        (
            "commit-adds-and-drops",
            "an object is both added and dropped",
            lambda r: r | {"objects_dropped": r["objects_added"]},
        ),
    ):
        suite.valid(
            f"log/{name}",
            title,
            _one_commit({"record:1": change_}),
            "DF-LOG-11",
            "DF-LIM-01",
            op="state",
            flags=["log", "must-accept"],
        )


def _first_record(suite: Suite) -> None:
    """`prev` of record 0."""

    def store(hooks: Any = None) -> Store:
        made = Store(hooks=hooks)
        made.claim()
        return made

    one = suite.valid(
        "log/one-claim",
        "a claim and nothing else",
        store(),
        "DF-LOG-02",
        op="state",
        flags=["log"],
    )
    suite.invalid(
        "log/first-with-prev",
        one,
        "`prev` of record 0 is a hash",
        store({"record:0": put(prev="ab" * 32)}),
        ("CORRUPT", "chain-broken"),
        "DF-LOG-02",
    )


def _oversized(place: str, size: int = 2**40 + 1) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record | {place: [record[place][0] | {"size": size}]}


def _one_commit(hooks: Any) -> Store:
    store = Store(hooks=hooks)
    store.claim()
    store.commit(base_version(store), step=5)
    return only_log(store)
