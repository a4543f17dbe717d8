"""The descriptor and the records: exact bytes, what is refused and with which error, what is kept."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logmaker import TIME, nonce, root, sha

from deltaformat.errors import (
    CorruptError,
    DeltaFormatError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    UnsupportedError,
)
from deltaformat.ijson import MAX_INTEGER, seal
from deltaformat.keys import external_key, file_key, manifest_key, pack_key, record_key
from deltaformat.records import (
    MAX_BRANCHES,
    MAX_MANIFESTS,
    MAX_RECORD_BYTES,
    Claim,
    Commit,
    Descriptor,
    Drop,
    Fork,
    Head,
    ManifestRef,
    ObjectRef,
    Record,
    Retire,
    Tag,
    check_name,
    encode_descriptor,
    encode_record,
    parse_descriptor,
    parse_record,
    record_hash,
)

SHA = sha(0)


def sealed(members: dict[str, Any]) -> bytes:
    """An object by hand, with `json` and hashlib only."""
    body = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
    return body + b',"check":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


DESCRIPTOR: dict[str, Any] = {
    "format": "deltaformat/1",
    "uuid": "0123456789abcdef" * 2,
    "digest": "xxh3-128",
    "block_bytes": 1048576,
    "log": "log/{seq:020}.json",
    "requires": [],
    "time": TIME,
}

COMMON: dict[str, Any] = {
    "seq": 5,
    "prev": SHA,
    "nonce": nonce(5),
    "time": TIME,
    "heads": {
        "main": {"seq": 4, "step": 40, "epoch": 1, "claim": 0},
        "a/b": {"seq": None, "step": None, "epoch": 0, "claim": None},
    },
    "last_tag": 2,
    "last_retire": None,
    "requires": [],
}  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    "claim": {
        "branch": "main", "epoch": 2, "host": "a host", "pid": 7, "resume_from": 3, "single_writer": False,
    },
    "commit": {
        "branch": "main", "claim": 0, "step": 40, "parent": 4, "depth": 3,
        "ancestors": [[2, 4, 30], [0, 1, 10]], "root": root(40),
        "manifests": [{"key": manifest_key(0, SHA), "size": 9, "content_size": 99}],
        "objects_added": [{"key": pack_key(0, SHA), "size": 8}, {"key": file_key(0, SHA), "size": 0}],
        "objects_dropped": [{"key": pack_key(1, SHA), "size": 7}],
        "metadata": {"loss": 0.5, "é": [None, 12345678901234567890]},
    },
    "fork": {"branch": "new", "source": 4, "step": 40},
    "tag": {"name": "best", "target": 4},
    "drop": {"branch": "main"},
    "retire": {"commits": [1, 2]},
}  # fmt: skip


def members_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {"kind": kind, **COMMON, **KINDS[kind], **changes}


def parse(kind: str, **changes: Any) -> Record:
    return parse_record(sealed(members_of(kind, **changes)), seq=5)


def refused(call: Callable[[], object], error: type[DeltaFormatError], code: ErrorCode) -> DeltaFormatError:
    with pytest.raises(error) as caught:
        call()
    assert caught.value.code is code
    assert caught.value.where.startswith(("log/00000000000000000005.json", "deltaformat.json"))
    return caught.value


# -- descriptor ---------------------------------------------------------------------------------------------


def test_descriptor() -> None:
    """Section 6.2: the bytes, both ways."""
    descriptor = Descriptor(
        uuid=DESCRIPTOR["uuid"], digest="xxh3-128", block_bytes=1048576, time=TIME, requires=(), extra={}
    )
    assert encode_descriptor(descriptor) == sealed(DESCRIPTOR)
    parsed = parse_descriptor(sealed(DESCRIPTOR))
    assert (parsed.uuid, parsed.digest, parsed.block_bytes) == (descriptor.uuid, "xxh3-128", 1048576)
    assert encode_descriptor(parsed) == sealed(DESCRIPTOR)


def test_descriptor_keeps_unknown_members() -> None:
    """DF-JSN-02, DF-VER-02: ignored, and written again."""
    data = sealed({"x": [1.5, None], **DESCRIPTOR})
    again = json.loads(encode_descriptor(parse_descriptor(data)))
    assert again["x"] == [1.5, None]
    assert parse_descriptor(data).extra == {"x": [1.5, None]}


@pytest.mark.parametrize("name", [*DESCRIPTOR, "check"])
def test_descriptor_without_a_member(name: str) -> None:
    """DF-JSN-01."""
    members = {key: value for key, value in DESCRIPTOR.items() if key != name}
    data = sealed(members) if name != "check" else json.dumps(members).encode()
    refused(lambda: parse_descriptor(data), MalformedError, ErrorCode.JSON_INVALID)


@pytest.mark.parametrize("size", [256, 1 << 12, 1 << 26])
def test_block_bytes(size: int) -> None:
    """DF-DSC-01."""
    assert parse_descriptor(sealed({**DESCRIPTOR, "block_bytes": size})).block_bytes == size


@pytest.mark.parametrize("size", [0, -256, 1, 128, 255, 257, 3 << 10, 1 << 27])
def test_impossible_block_bytes(size: int) -> None:
    """DF-DSC-01."""
    data = sealed({**DESCRIPTOR, "block_bytes": size})
    refused(lambda: parse_descriptor(data), MalformedError, ErrorCode.VALUE_INVALID)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"format": "deltaformat/2"}, ErrorCode.FORMAT_UNKNOWN),
        ({"format": "deltaformat/2", "requires": 5}, ErrorCode.FORMAT_UNKNOWN),
        ({"log": "log/{seq}.json"}, ErrorCode.FORMAT_UNKNOWN),
        ({"digest": "md5"}, ErrorCode.DIGEST_UNKNOWN),
        ({"digest": "XXH3-128"}, ErrorCode.DIGEST_UNKNOWN),
        ({"requires": ["new"]}, ErrorCode.FEATURE_UNKNOWN),
        ({"requires": ["No"]}, ErrorCode.FEATURE_UNKNOWN),
        ({"requires": ["new"], "block_bytes": "large"}, ErrorCode.FEATURE_UNKNOWN),
    ],
)
def test_unsupported_descriptors(changes: dict[str, Any], code: ErrorCode) -> None:
    """DF-DSC-02, DF-VER-01: a newer store is told from a broken one, whatever else it changes."""
    refused(lambda: parse_descriptor(sealed({**DESCRIPTOR, **changes})), UnsupportedError, code)


@pytest.mark.parametrize("changes", [{"uuid": "0" * 31}, {"uuid": "A" * 32}])
def test_malformed_descriptors(changes: dict[str, Any]) -> None:
    data = sealed({**DESCRIPTOR, **changes})
    refused(lambda: parse_descriptor(data), MalformedError, ErrorCode.VALUE_INVALID)


def test_descriptor_limits() -> None:
    """DF-LIM-01: 64 KiB are read, more are not. DF-JSN-03: a changed one is corrupt."""
    empty = len(sealed({**DESCRIPTOR, "x": ""}))
    assert parse_descriptor(sealed({**DESCRIPTOR, "x": "a" * (65536 - empty)}))
    data = sealed({**DESCRIPTOR, "x": "a" * (65537 - empty)})
    refused(lambda: parse_descriptor(data), LimitError, ErrorCode.LIMIT_EXCEEDED)
    changed = sealed(DESCRIPTOR).replace(b"1048576", b"2097152")
    refused(lambda: parse_descriptor(changed), CorruptError, ErrorCode.HASH_MISMATCH)


# -- records ------------------------------------------------------------------------------------------------

HEADS = {"main": Head(4, 40, 1, 0), "a/b": Head(None, None, 0, None)}
BASE: dict[str, Any] = {
    "seq": 5, "prev": SHA, "nonce": nonce(5), "time": TIME, "heads": HEADS, "last_tag": 2,
    "last_retire": None,
}  # fmt: skip

RECORDS: dict[str, Record] = {
    "claim": Claim(**BASE, branch="main", epoch=2, host="a host", pid=7, resume_from=3, single_writer=False),
    "commit": Commit(
        **BASE, branch="main", claim=0, step=40, parent=4, depth=3, ancestors=((2, 4, 30), (0, 1, 10)),
        root=root(40), manifests=(ManifestRef(manifest_key(0, SHA), 9, 99),),
        objects_added=(ObjectRef(pack_key(0, SHA), 8), ObjectRef(file_key(0, SHA), 0)),
        objects_dropped=(ObjectRef(pack_key(1, SHA), 7),),
        metadata={"loss": 0.5, "é": [None, 12345678901234567890]},
    ),
    "fork": Fork(**BASE, branch="new", source=4, step=40),
    "tag": Tag(**BASE, name="best", target=4),
    "drop": Drop(**BASE, branch="main"),
    "retire": Retire(**BASE, commits=(1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_records(kind: str) -> None:
    """Section 12.1: the bytes of every kind, both ways."""
    data = sealed(members_of(kind))
    assert parse_record(data, seq=5) == RECORDS[kind]
    assert encode_record(RECORDS[kind]) == data
    assert record_hash(data) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_records_keep_unknown_members(kind: str) -> None:
    """DF-JSN-02, DF-VER-02: at every level, ignored and written again."""
    members = members_of(kind, x=1.5, y={"z": []})
    members["heads"]["main"] |= {"colour": "red"}
    for name in ("manifests", "objects_added", "objects_dropped"):
        for entry in members.get(name, ()):
            entry["etag"] = name
    record = parse_record(sealed(members), seq=5)
    assert json.loads(encode_record(record)) | {"check": 0} == members | {"check": 0}
    assert replace(record, extra={}) == RECORDS[kind]
    for entry in (
        members.get("manifests", []) + members.get("objects_added", []) + members.get("objects_dropped", [])
    ):
        del entry["etag"]
    del members["heads"]["main"]["colour"]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in [*members_of(kind), "check"]]
)
def test_records_without_a_member(kind: str, name: str) -> None:
    """DF-JSN-01."""
    members = members_of(kind)
    members.pop(name, None)
    data = sealed(members) if name != "check" else json.dumps(members).encode()
    refused(lambda: parse_record(data, seq=5), MalformedError, ErrorCode.JSON_INVALID)


WRONG_TYPES: list[Any] = [True, 1.5, "text", [1.5], {"a": 1}, [[1]], [{}]]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_members_of_other_types(kind: str, data: st.DataObject) -> None:
    """DF-JSN-01: whatever a member is replaced by, it is parsed as such or refused by an error of ours."""
    members = members_of(kind)
    name = data.draw(st.sampled_from(sorted(members)))
    members[name] = data.draw(st.sampled_from(WRONG_TYPES) | st.integers() | st.none() | st.text(max_size=5))
    try:
        record = parse_record(sealed(members), seq=5)
    except (MalformedError, UnsupportedError, CorruptError, InconsistentError, LimitError):
        return
    assert json.loads(encode_record(record))[name] == members[name]


VALUES: list[tuple[str, dict[str, Any]]] = [
    ("tag", {"nonce": "0" * 31}),
    ("tag", {"nonce": "A" * 32}),
    ("tag", {"prev": "0" * 63}),
    ("tag", {"prev": "text"}),
    ("tag", {"last_tag": -1}),
    ("tag", {"last_retire": -1}),
    ("tag", {"target": -1}),
    ("tag", {"name": ""}),
    ("tag", {"name": ".hidden"}),
    ("tag", {"name": "a" * 129}),
    ("tag", {"name": "a b"}),
    ("tag", {"name": "é"}),
    ("tag", {"name": "a\n"}),
    ("claim", {"branch": "-a"}),
    ("claim", {"epoch": -1}),
    ("claim", {"resume_from": -1}),
    ("fork", {"branch": "/a"}),
    ("fork", {"source": -1}),
    ("fork", {"step": -1}),
    ("drop", {"branch": "a*"}),
    ("retire", {"commits": [1, -2]}),
    ("drop", {"heads": {"": {"seq": 4, "step": 40, "epoch": 1, "claim": 0}}}),
    ("drop", {"heads": {"a": {"seq": -4, "step": 40, "epoch": 1, "claim": 0}}}),
    ("drop", {"heads": {"a": {"seq": 4, "step": -1, "epoch": 1, "claim": 0}}}),
    ("drop", {"heads": {"a": {"seq": 4, "step": 40, "epoch": -1, "claim": 0}}}),
    ("drop", {"heads": {"a": {"seq": 4, "step": 40, "epoch": 1, "claim": -1}}}),
    ("commit", {"branch": "a\0"}),
    ("commit", {"claim": -1}),
    ("commit", {"step": -1}),
    ("commit", {"parent": -1}),
    ("commit", {"depth": -1}),
    ("commit", {"ancestors": [[2, 4]]}),
    ("commit", {"ancestors": [[2, 4, 30, 1]]}),
    ("commit", {"ancestors": [[2, 4, -30]]}),
    ("commit", {"ancestors": [[2, 4, True]]}),
    ("commit", {"ancestors": [[2, 4, 1.0]]}),
    ("commit", {"ancestors": [[2, 4, MAX_INTEGER + 1]]}),
    ("commit", {"root": "df1:xxh3-128:1048576:" + "0" * 63}),
    ("commit", {"manifests": []}),
    ("commit", {"manifests": [{"key": pack_key(0, SHA), "size": 1, "content_size": 1}]}),
    ("commit", {"manifests": [{"key": "../" + manifest_key(0, SHA), "size": 1, "content_size": 1}]}),
    ("commit", {"manifests": [{"key": manifest_key(0, SHA), "size": -1, "content_size": 1}]}),
    ("commit", {"manifests": [{"key": manifest_key(0, SHA), "size": 1, "content_size": -1}]}),
    ("commit", {"objects_added": [{"key": manifest_key(0, SHA), "size": 1}]}),
    ("commit", {"objects_added": [{"key": external_key(SHA), "size": 1}]}),
    ("commit", {"objects_added": [{"key": "packs/x", "size": 1}]}),
    ("commit", {"objects_dropped": [{"key": record_key(0), "size": 1}]}),
    ("commit", {"objects_dropped": [{"key": pack_key(0, SHA), "size": -1}]}),
]


@pytest.mark.parametrize(("kind", "changes"), VALUES, ids=lambda value: str(value)[:60])
def test_malformed_values(kind: str, changes: dict[str, Any]) -> None:
    """DF-LOG-01, DF-LOG-11, DF-KEY-01, and the ranges of section 12.1."""
    refused(lambda: parse(kind, **changes), MalformedError, ErrorCode.VALUE_INVALID)


TYPES: list[tuple[str, dict[str, Any]]] = [
    ("drop", {"heads": {"a": 5}}),
    ("drop", {"heads": {"a": {"seq": 4, "step": 40, "epoch": 1}}}),
    ("drop", {"heads": {"a": {"seq": 4, "step": 40, "epoch": None, "claim": 0}}}),
    ("commit", {"manifests": [{"key": manifest_key(0, SHA), "size": 1}]}),
    ("commit", {"objects_added": [{"key": pack_key(0, SHA), "size": 1.0}]}),
    ("commit", {"objects_added": [{"size": 1}]}),
    ("commit", {"step": MAX_INTEGER + 1}),
    ("commit", {"step": 1.0}),
    ("retire", {"commits": [1, None]}),
]


@pytest.mark.parametrize(("kind", "changes"), TYPES, ids=lambda value: str(value)[:60])
def test_malformed_parts(kind: str, changes: dict[str, Any]) -> None:
    """DF-JSN-01, within heads and references."""
    refused(lambda: parse(kind, **changes), MalformedError, ErrorCode.JSON_INVALID)


def test_metadata_is_the_users() -> None:
    """DF-JSN-01: inside `metadata` any finite number is accepted."""
    metadata = {"a": 1.5, "b": 1e300, "c": MAX_INTEGER + 2, "kind": None, "check": "x"}
    record = parse("commit", metadata=metadata)
    assert isinstance(record, Commit)
    assert record.metadata == metadata


def test_unknown_kinds_and_features() -> None:
    """DF-LOG-03, DF-VER-01: a newer record is told from a broken one."""
    newer = {**COMMON, "kind": "merge"}
    refused(lambda: parse_record(sealed(newer), seq=5), UnsupportedError, ErrorCode.FORMAT_UNKNOWN)
    error = refused(lambda: parse("commit", requires=["new-1"]), UnsupportedError, ErrorCode.FEATURE_UNKNOWN)
    assert "'new-1'" in error.message
    refused(lambda: parse("tag", requires=["No"]), UnsupportedError, ErrorCode.FEATURE_UNKNOWN)
    newest = {"requires": ["new-1"], "kind": 7}
    refused(lambda: parse_record(sealed(newest), seq=5), UnsupportedError, ErrorCode.FEATURE_UNKNOWN)


def test_misplaced_and_cut_off_records() -> None:
    """DF-LOG-02: at another key; with or without `prev` where it must be otherwise."""
    data = sealed(members_of("tag", seq=6))
    refused(lambda: parse_record(data, seq=5), InconsistentError, ErrorCode.RECORD_MISPLACED)
    refused(lambda: parse("tag", prev=None), CorruptError, ErrorCode.CHAIN_BROKEN)
    with pytest.raises(CorruptError) as caught:
        parse_record(sealed(members_of("tag", seq=0)), seq=0)
    assert caught.value.code is ErrorCode.CHAIN_BROKEN
    assert parse_record(sealed(members_of("tag", seq=0, prev=None)), seq=0).prev is None


def test_a_changed_record_is_corrupt() -> None:
    """DF-JSN-03."""
    data = sealed(members_of("tag")).replace(b'"target":4', b'"target":3')
    refused(lambda: parse_record(data, seq=5), CorruptError, ErrorCode.HASH_MISMATCH)


def test_record_limits() -> None:
    """DF-LIM-01, DF-LIM-02: what must be accepted is, what is beyond the second number is not."""
    empty = len(sealed(members_of("drop", x="")))
    data = sealed(members_of("drop", x="a" * (MAX_RECORD_BYTES - empty)))
    assert parse_record(data, seq=5).extra
    refused(lambda: parse_record(data + b" ", seq=5), LimitError, ErrorCode.LIMIT_EXCEEDED)

    part = {"key": manifest_key(0, SHA), "size": 1, "content_size": 1}
    parts = [part | {"key": manifest_key(0, f"{number:064x}")} for number in range(MAX_MANIFESTS)]
    record = parse("commit", manifests=parts)
    assert isinstance(record, Commit)
    assert len(record.manifests) == MAX_MANIFESTS
    refused(lambda: parse("commit", manifests=[*parts, part]), LimitError, ErrorCode.LIMIT_EXCEEDED)
    refused(lambda: parse("commit", manifests=[part] * 2), MalformedError, ErrorCode.VALUE_INVALID)
    for sizes in ({"content_size": (1 << 30) + 1}, {"size": (1 << 40) + 1}):
        refused(
            lambda sizes=sizes: parse("commit", manifests=[part | sizes]),
            LimitError,
            ErrorCode.LIMIT_EXCEEDED,
        )
    assert parse("commit", manifests=[part | {"content_size": 1 << 30}])
    assert parse("commit", objects_added=[{"key": pack_key(0, SHA), "size": 16 << 30}])

    head = {"seq": None, "step": None, "epoch": 0, "claim": None}
    many = parse("drop", heads={f"b{i}": head for i in range(MAX_BRANCHES)})
    assert len(many.heads) == MAX_BRANCHES
    heads = {f"b{i}": head for i in range(MAX_BRANCHES + 1)}
    refused(lambda: parse("drop", heads=heads), LimitError, ErrorCode.LIMIT_EXCEEDED)
    too_many = replace(
        many, heads=dict.fromkeys((f"b{i}" for i in range(MAX_BRANCHES + 1)), Head(None, None, 0, None))
    )
    refused(lambda: encode_record(too_many), LimitError, ErrorCode.LIMIT_EXCEEDED)
    too_large = replace(many, extra={"x": "a" * MAX_RECORD_BYTES})
    refused(lambda: encode_record(too_large), LimitError, ErrorCode.LIMIT_EXCEEDED)


def test_names() -> None:
    """DF-LOG-01."""
    for name in ("a", "0", "A.b_c/d-e", "a" * 128, "a/../b", "a//"):
        assert check_name(name) == name
        assert parse("tag", name=name)
    with pytest.raises(MalformedError, match="no branch name"):
        check_name("a" * 129)


def test_seal_is_the_same_as_by_hand() -> None:
    """DF-JSN-03."""
    assert seal(members_of("commit")) == sealed(members_of("commit"))
