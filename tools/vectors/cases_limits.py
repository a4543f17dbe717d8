"""SPEC 16: limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.arrowfile import Column
from vectors.cases_json import log_of_one, metadata
from vectors.content import NOT_FRESH, Tensor, Version
from vectors.faults import LIMIT
from vectors.payloads import PLANES_DELTA, RAW, planes
from vectors.primitives import dump
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import change, noise

__all__ = ["add"]


def _padded(total: int, name: bytes = b"pad") -> Callable[[dict[str, Any]], bytes]:
    """The object with an unknown member that makes it `total` bytes long, `check` included."""

    def change_(members: dict[str, Any]) -> bytes:
        data = dump(members)[:-1] + b',"' + name + b'":"'
        return data + b" " * (total - len(data) - 2 - 75) + b'"}'

    return change_


def add(suite: Suite) -> None:
    """All of them."""
    descriptor = suite.valid(
        "limits/descriptor-64-kib",
        "a descriptor of 65,536 bytes, the most it may have",
        log_of_one({"descriptor": _padded(65536)}),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/descriptor-one-more",
        descriptor,
        "a descriptor of 65,537 bytes",
        log_of_one({"descriptor": _padded(65537)}),
        LIMIT,
        "DF-LIM-01",
        "DF-LIM-02",
    )
    record = suite.valid(
        "limits/record-16-mib",
        "a record of 16 MiB, the most it may have",
        log_of_one({"record:1": _padded(16 << 20)}),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/record-one-more",
        record,
        "a record of 16 MiB and one byte",
        log_of_one({"record:1": _padded((16 << 20) + 1)}),
        LIMIT,
        "DF-LIM-01",
        "DF-LIM-02",
    )

    def containers(total: int) -> Store:
        # Beside those in `metadata.a`: the record, heads, main, requires, ancestors, manifests and its entry,
        # objects_added and its entry, objects_dropped, metadata, and the array itself.
        return log_of_one({"record:1": metadata(b"[" + b",".join([b"[]"] * (total - 12)) + b"]")})

    many = suite.valid(
        "limits/objects-131072",
        "a record of 131,072 objects and arrays",
        containers(131_072),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/objects-262145",
        many,
        "a record of 262,145 objects and arrays",
        containers(262_145),
        LIMIT,
        "DF-LIM-01",
        "DF-LIM-02",
    )

    suite.valid(
        "limits/objects-262144",
        "a record of 262,144 objects and arrays: a version's own lower limit hides no branch",
        containers(262_144),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    suite.valid(
        "limits/brackets-in-a-string",
        "a record with a string of 300,000 brackets, which are no objects and arrays",
        log_of_one({"record:1": metadata(b'"' + b"[" * 300_000 + b'"')}),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    _part_metadata(suite)

    def manifests(count: int, **members: int) -> Callable[[dict[str, Any]], Any]:
        entry = {"size": 100, "content_size": 100} | members
        return lambda m: (
            m
            | {
                "manifests": [
                    {"key": f"manifests/{0:020}/{number:064x}.arrow.zst"} | entry for number in range(count)
                ]
            }
        )

    plain = "valid/json/plain"
    many = suite.valid(
        "limits/manifests-4096",
        "a record that names 4,096 manifest parts; the log's state does not need them",
        log_of_one({"record:1": manifests(4096)}),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/manifests-4097",
        many,
        "4,097 manifest parts",
        log_of_one({"record:1": manifests(4097)}),
        LIMIT,
        "DF-LIM-01",
    )
    suite.invalid(
        "limits/content-5-gib",
        plain,
        "five manifest parts of 1 GiB each, 5 GiB in all",
        log_of_one({"record:1": manifests(5, content_size=1 << 30)}),
        LIMIT,
        "DF-LIM-01",
        "DF-LIM-02",
        op="open",
        args={"at": {"branch": "main"}, "allow": []},
    )

    def branches(count: int) -> Callable[[dict[str, Any]], Any]:
        head = {"seq": None, "step": None, "epoch": 0, "claim": None}
        return lambda m: m | {"heads": {**m["heads"], **{f"b{number}": head for number in range(count - 1)}}}

    suite.valid(
        "limits/branches-10000",
        "10,000 branches in `heads`, which this void commit says there are",
        log_of_one({"record:1": branches(10_000)}),
        "DF-LIM-01",
        op="state",
        expect={"newest": 1, "branches": {"main": {"seq": None, "step": None, "epoch": 1}}, "tags": {}},
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/branches-10001",
        plain,
        "10,001 branches in `heads`",
        log_of_one({"record:1": branches(10_001)}),
        LIMIT,
        "DF-LIM-01",
    )

    heavy = Store()
    heavy.claim()
    pack = heavy.pack()
    content = noise(256, 97)
    chain = [pack.put(content, RAW)]
    for number in range(63):
        new = change(content, 1, {number: 1, 255 - number: -2})
        chain.append(pack.put(planes(new, 1, base=content), PLANES_DELTA))
        content = new
    heavy.commit(Version({"w": Tensor("U8", [256], content, [chain], [NOT_FRESH])}))
    suite.valid(
        "limits/block-memory",
        "a block whose content and pieces take 65 times the block size",
        heavy,
        "DF-LIM-01",
        flags=["limit", "must-accept"],
    )

    def columns(fields: int) -> Store:
        def hook(made: list[Column]) -> list[Column]:
            # Ten columns, eight of them lists: eighteen fields.
            return made + [Column(f"c{number}", "uint8", [0]) for number in range(fields - 18)]

        store = Store(hooks={"columns:1": hook})
        store.claim()
        store.commit(store.keyframe({"w": ("U8", [4], noise(4))}))
        return store

    wide = suite.valid(
        "limits/columns-1024",
        "a manifest of 1,024 fields, nested ones counted",
        columns(1024),
        "DF-LIM-01",
        "DF-MAN-01",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/columns-4097", wide, "a manifest of 4,097 fields", columns(4097), LIMIT, "DF-LIM-01"
    )


def _part_metadata(suite: Suite) -> None:
    """Objects and arrays in the metadata of a part."""

    def part(note: Callable[[int], bytes]) -> Store:
        """A part whose metadata has an unknown member, of the objects and arrays that the rest has."""

        def hook(meta: dict[str, Any]) -> bytes:
            data = dump(meta)
            return data[:-1] + b',"note":' + note(data.count(b"{") + data.count(b"[")) + b"}"

        store = Store(hooks={"meta:1": hook})
        store.claim()
        store.commit(store.keyframe({"w": ("U8", [4], noise(4))}))
        return store

    def containers(total: int) -> Store:
        return part(lambda others: b"[" + b",".join([b"[]"] * (total - others - 1)) + b"]")

    most = suite.valid(
        "limits/part-objects-262144",
        "262,144 objects and arrays in the metadata of a part",
        containers(262_144),
        "DF-LIM-01",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/part-objects-4194305",
        most,
        "4,194,305 objects and arrays in the metadata of a part",
        containers(4_194_305),
        LIMIT,
        "DF-LIM-01",
        "DF-LIM-02",
    )
    suite.valid(
        "limits/part-brackets-in-a-string",
        "metadata of a part with a string of 5,000,000 brackets, which are no objects and arrays",
        part(lambda others: b'"' + b"{" * 5_000_000 + b'"'),
        "DF-LIM-01",
        flags=["limit", "must-accept"],
    )
