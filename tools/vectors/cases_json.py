"""SPEC 6.1, 6.2 and 16: JSON, `check`, the descriptor, limits of both and of records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.content import NOT_FRESH, Tensor, Version
from vectors.faults import JSON, LIMIT, VALUE
from vectors.payloads import PLANES_DELTA, RAW, planes
from vectors.primitives import dump
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import change, noise, put, without

__all__ = ["add"]


def add(suite: Suite) -> None:
    """All of them."""
    _descriptor(suite)
    _records(suite)
    _limits(suite)


def _store(hooks: Any = None, metadata: Any = None) -> Store:
    """A claim and a commit; the commit's objects are left out."""
    store = Store(hooks=hooks)
    store.claim()
    store.commit(
        store.keyframe({"w": ("U8", [4], b"abcd")}), step=3, metadata={} if metadata is None else metadata
    )
    store.objects = {k: v for k, v in store.objects.items() if k.startswith(("log/", "deltaformat"))}
    return store


def _descriptor(suite: Suite) -> None:
    base = suite.valid(
        "descriptor/plain",
        "a descriptor as it is usually written",
        _store(),
        "DF-DSC-01",
        "DF-DSC-02",
        op="state",
        flags=["descriptor"],
    )

    def accept(name: str, title: str, change_: Callable[[dict[str, Any]], Any]) -> None:
        suite.valid(
            f"descriptor/{name}",
            title,
            _store({"descriptor": change_}),
            "DF-JSN-02",
            op="state",
            flags=["descriptor", "must-accept"],
        )

    accept(
        "unknown-members",
        "members that SPEC.md does not know",
        lambda m: m | {"note": {"nested": [1.5e300, None, "\U0001f600"]}, "Format": 1},
    )
    accept(
        "other-order",
        "members in the opposite order, white space between them",
        lambda m: dump(dict(reversed(m.items()))).replace(b",", b",\r\n\t ").replace(b":256", b" : 256"),
    )
    accept(
        "escapes",
        "names and values written with escapes",
        lambda m: (
            dump(m)
            .replace(b'"format"', b'"\\u0066orm\\u0061t"')
            .replace(b"deltaformat/1", b"deltaformat\\/1")
        ),
    )
    accept("time-odd", "a `time` that is no time: it is informative", lambda m: m | {"time": "soon"})

    def fault(
        name: str, mutation: str, change_: Callable[[dict[str, Any]], Any], error: tuple[str, str], *ids: str
    ) -> None:
        suite.invalid(f"descriptor/{name}", base, mutation, _store({"descriptor": change_}), error, *ids)

    for name in ("format", "uuid", "digest", "block_bytes", "log", "requires", "time"):
        fault(
            f"without-{name.replace('_', '-')}",
            f"`{name}` is missing",
            without(name),
            JSON,
            "DF-JSN-01",
        )
    fault(
        "format-2",
        "the format is `deltaformat/2`",
        put(format="deltaformat/2"),
        ("UNSUPPORTED", "format-unknown"),
        "DF-DSC-02",
    )
    fault(
        "format-2-and-nothing-else",
        "another format, and no other member: format is checked first",
        lambda m: {"format": "deltaformat/2"},
        ("UNSUPPORTED", "format-unknown"),
        "DF-DSC-02",
        "DF-VER-01",
    )
    fault(
        "requires-unknown",
        "`requires` names a feature that nobody knows",
        put(requires=["lossy"]),
        ("UNSUPPORTED", "feature-unknown"),
        "DF-VER-01",
    )
    fault(
        "log-grammar",
        "`log` is `log/{seq}.json`",
        put(log="log/{seq}.json"),
        ("UNSUPPORTED", "format-unknown"),
        "DF-DSC-02",
    )
    fault(
        "digest-unknown",
        "the digest is `sha-256`",
        put(digest="sha-256"),
        ("UNSUPPORTED", "digest-unknown"),
        "DF-DSC-02",
    )
    for size, words in (
        (128, "128"),
        (255, "255"),
        (257, "257"),
        (384, "384"),
        (0, "0"),
        (2**27, "128 MiB"),
        (2**52, "2^52"),
    ):
        fault(f"block-bytes-{size}", f"`block_bytes` is {words}", put(block_bytes=size), VALUE, "DF-DSC-01")
    fault("block-bytes-negative", "`block_bytes` is -256", put(block_bytes=-256), VALUE, "DF-DSC-01")
    fault("block-bytes-text", "`block_bytes` is a string", put(block_bytes="256"), JSON, "DF-JSN-01")
    fault("uuid-short", "`uuid` has 31 digits", put(uuid="0" * 31), VALUE, "DF-JSN-01")
    fault("uuid-capitals", "`uuid` has capitals", put(uuid="ABCDEF" + "0" * 26), VALUE, "DF-JSN-01")
    fault("requires-a-number", "`requires` holds a number", put(requires=[1]), JSON, "DF-JSN-01")


def _records(suite: Suite) -> None:
    def accept(name: str, title: str, change_: Callable[[dict[str, Any]], Any], *ids: str) -> str:
        return suite.valid(
            f"json/{name}",
            title,
            _store({"record:1": change_}),
            *(ids or ("DF-JSN-01",)),
            op="state",
            flags=["json", "must-accept"],
        )

    base = accept("plain", "a commit as it is usually written", lambda m: m)
    accept(
        "metadata-numbers",
        "numbers in `metadata`: fractions, exponents, integers beyond 2^53, -0, near the end of binary64",
        _metadata(
            b"[1.5,-0.0,-0,1e300,1E-300,1.7976931348623157e308,9007199254740993,123456789012345678901234567890,5e-324,1e-400]"
        ),
    )
    accept(
        "metadata-strings",
        "strings in `metadata`: pairs of surrogates, controls as escapes, a name that is empty",
        _metadata(b'{"":"\\ud83d\\ude00\\u0000\\u2028","\xf0\x9f\x98\x80":"\\"\\\\\\/\\b\\f\\n\\r\\t"}'),
    )
    accept(
        "depth-32",
        "`metadata` nests to a depth of 32, counted from the record",
        _metadata(b'{"a":' + b"[" * 30 + b"]" * 30 + b"}"),
    )
    accept(
        "minus-zero",
        "the step is written as -0",
        lambda m: (
            dump(m | {"step": 3})
            .replace(b'"parent":null', b'"parent":null')
            .replace(b'"depth":0', b'"depth":-0')
        ),
    )
    accept(
        "white-space",
        "white space wherever JSON allows it",
        lambda m: b"\n {" + dump(m)[1:-1].replace(b",", b" ,\t") + b"}",
    )
    accept(
        "duplicate-in-different-objects",
        "one name in several objects is no duplicate",
        _metadata(b'{"a":{"a":1},"b":{"a":1}}'),
    )

    def fault(
        name: str,
        mutation: str,
        change_: Callable[[dict[str, Any]], Any],
        *ids: str,
        error: tuple[str, str] = JSON,
    ) -> None:
        suite.invalid(
            f"json/{name}", base, mutation, _store({"record:1": change_}), error, *(ids or ("DF-JSN-01",))
        )

    def text(old: bytes, new: bytes) -> Callable[[dict[str, Any]], Any]:
        def change_(members: dict[str, Any]) -> bytes:
            data = dump(members)
            assert data.count(old) >= 1, old
            return data.replace(old, new, 1)

        return change_

    fault("duplicate", "a member stands twice, with one value", text(b'{"kind"', b'{"depth":0,"kind"'))
    fault(
        "duplicate-escaped",
        "a member stands twice, once with an escape",
        text(b'{"kind"', b'{"\\u0064epth":0,"kind"'),
    )
    fault("duplicate-in-metadata", "a member of `metadata` stands twice", _metadata(b'{"a":1,"a":2}'))
    fault("duplicate-deep", "a member deep in `metadata` stands twice", _metadata(b'{"a":[{"b":1,"b":1}]}'))
    fault("fraction", "the depth is written as 0.0", text(b'"depth":0', b'"depth":0.0'))
    fault("exponent", "the step is written as 3e0", text(b'"step":3,"parent"', b'"step":3e0,"parent"'))
    fault(
        "integer-beyond", "the step is 2^53", text(b'"step":3,"parent"', b'"step":9007199254740992,"parent"')
    )
    fault(
        "integer-huge",
        "the step has 400 digits",
        text(b'"step":3,"parent"', b'"step":' + b"9" * 400 + b',"parent"'),
    )
    fault("lone-surrogate-escaped", "an escaped lone surrogate in `metadata`", _metadata(b'{"a":"\\ud800"}'))
    fault(
        "low-surrogate-first",
        "an escaped pair of surrogates the wrong way round",
        _metadata(b'{"a":"\\ude00\\ud83d"}'),
    )
    fault("surrogate-in-name", "an escaped lone surrogate in a member's name", _metadata(b'{"\\udfff":1}'))
    fault("surrogate-encoded", "a surrogate encoded in UTF-8", _metadata(b'{"a":"\xed\xa0\x80"}'))
    fault("not-utf-8", "a byte that is not UTF-8", _metadata(b'{"a":"\xff"}'))
    fault("overlong", "an overlong form of a character", _metadata(b'{"a":"\xc0\xaf"}'))
    fault("byte-order-mark", "a byte order mark at the beginning", lambda m: b"\xef\xbb\xbf" + dump(m))
    fault("utf-16", "UTF-16 instead of UTF-8", lambda m: dump(m).decode().encode("utf-16-le"))
    fault("depth-33", "`metadata` nests to a depth of 33", _metadata(b'{"a":' + b"[" * 31 + b"]" * 31 + b"}"))
    fault(
        "depth-100000",
        "`metadata` nests to a depth of 100,000",
        _metadata(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "DF-JSN-01",
        "DF-SEC-01",
    )
    fault("beyond-binary64", "1e400 in `metadata`", _metadata(b'{"a":1e400}'))
    fault(
        "integer-beyond-binary64",
        "an integer of 400 digits in `metadata`",
        _metadata(b'{"a":' + b"9" * 400 + b"}"),
    )
    fault("nan", "NaN in `metadata`", _metadata(b'{"a":NaN}'))
    fault("infinity", "-Infinity in `metadata`", _metadata(b'{"a":-Infinity}'))
    fault("leading-zero", "a number with a leading zero", _metadata(b'{"a":01}'))
    fault("plus", "a number with a plus sign", _metadata(b'{"a":+1}'))
    fault("bare-point", "a number that ends in a point", _metadata(b'{"a":1.}'))
    fault("comment", "a comment", _metadata(b'{"a":1/* */}'))
    fault("comma-at-end", "a comma behind the last entry of an array", _metadata(b'{"a":[1,]}'))
    fault("single-quotes", "a string in single quotes", _metadata(b"{'a':1}"))
    fault("control-in-string", "a line break inside a string", _metadata(b'{"a":"x\ny"}'))
    fault("escape-unknown", "the escape \\x", _metadata(b'{"a":"\\x41"}'))
    fault("white-space-unicode", "a no-break space between members", _metadata(b'{"a":\xc2\xa01}'))
    fault("two-values", "a second object before `check`'s", lambda m: dump(m) + b"{}")
    fault("unclosed", "`metadata` is not closed", _metadata(b'{"a":[1}'))

    def sealed(name: str, mutation: str, change_: Callable[[bytes], bytes], error: tuple[str, str]) -> None:
        suite.invalid(f"json/{name}", base, mutation, _store({"bytes:1": change_}), error, "DF-JSN-03")

    malformed = JSON
    sealed(
        "check-wrong",
        "a digit of `check` is another",
        lambda d: d[:-3] + (b"0" if d[-3:-2] != b"0" else b"1") + d[-2:],
        ("CORRUPT", "hash-mismatch"),
    )
    sealed(
        "byte-changed",
        "a character of the host is another",
        lambda d: d.replace(b"2026-01-01", b"2026-01-02"),
        ("CORRUPT", "hash-mismatch"),
    )
    sealed("check-missing", "`check` is missing", lambda d: d[:-76] + b"}", malformed)
    sealed(
        "check-in-capitals",
        "the digits of `check` are capitals",
        lambda d: d[:-66] + d[-66:-2].upper() + d[-2:],
        malformed,
    )
    sealed("check-short", "`check` lacks a digit", lambda d: d[:-3] + d[-2:], malformed)
    sealed("check-with-space", "a space before `check`", lambda d: d[:-75] + b" " + d[-75:], malformed)
    sealed("check-then-line-break", "a line break follows the object", lambda d: d + b"\n", malformed)
    sealed("check-then-member", "a member follows `check`", lambda d: d[:-1] + b',"z":1}', malformed)
    sealed("cut", "the record lacks its last byte", lambda d: d[:-1], malformed)
    sealed("empty", "the record is empty", lambda d: b"", malformed)
    sealed("zeros", "the record is all zeros, as a crash may leave it", lambda d: bytes(len(d)), malformed)
    for name, mutation, change_, error in (
        (
            "check-wrong",
            "a digit of the descriptor's `check` is another",
            lambda d: d[:-3] + (b"0" if d[-3:-2] != b"0" else b"1") + d[-2:],
            ("CORRUPT", "hash-mismatch"),
        ),
        ("check-missing", "the descriptor has no `check`", lambda d: d[:-76] + b"}", malformed),
        ("empty", "the descriptor is empty", lambda d: b"", malformed),
        ("an-array", "the descriptor is an array", lambda d: b"[" + d + b"]", malformed),
        ("cut", "the descriptor lacks its last byte", lambda d: d[:-1], malformed),
    ):
        suite.invalid(
            f"descriptor/{name}",
            "valid/descriptor/plain",
            mutation,
            _store({"descriptor-bytes": change_}),
            error,
            "DF-JSN-03",
        )


def _metadata(value: bytes) -> Callable[[dict[str, Any]], bytes]:
    def change_(members: dict[str, Any]) -> bytes:
        data = dump(members)
        assert data.endswith(b'"metadata":{}}')
        inner = value if value.startswith((b"{",)) else b'{"a":' + value + b"}"
        return data[:-3] + inner + b"}"

    return change_


def _padded(total: int, name: bytes = b"pad") -> Callable[[dict[str, Any]], bytes]:
    """The object with an unknown member that makes it `total` bytes long, `check` included."""

    def change_(members: dict[str, Any]) -> bytes:
        data = dump(members)[:-1] + b',"' + name + b'":"'
        return data + b" " * (total - len(data) - 2 - 75) + b'"}'

    return change_


def _limits(suite: Suite) -> None:
    descriptor = suite.valid(
        "limits/descriptor-64-kib",
        "a descriptor of 65,536 bytes, the most it may have",
        _store({"descriptor": _padded(65536)}),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/descriptor-one-more",
        descriptor,
        "a descriptor of 65,537 bytes",
        _store({"descriptor": _padded(65537)}),
        LIMIT,
        "DF-LIM-01",
        "DF-LIM-02",
    )
    record = suite.valid(
        "limits/record-16-mib",
        "a record of 16 MiB, the most it may have",
        _store({"record:1": _padded(16 << 20)}),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/record-one-more",
        record,
        "a record of 16 MiB and one byte",
        _store({"record:1": _padded((16 << 20) + 1)}),
        LIMIT,
        "DF-LIM-01",
        "DF-LIM-02",
    )

    def containers(total: int) -> Store:
        # Beside those in `metadata.a`: the record, heads, main, requires, ancestors, manifests and its entry,
        # objects_added and its entry, objects_dropped, metadata, and the array itself.
        return _store({"record:1": _metadata(b"[" + b",".join([b"[]"] * (total - 12)) + b"]")})

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
        _store({"record:1": manifests(4096)}),
        "DF-LIM-01",
        op="state",
        flags=["limit", "must-accept"],
    )
    suite.invalid(
        "limits/manifests-4097",
        many,
        "4,097 manifest parts",
        _store({"record:1": manifests(4097)}),
        LIMIT,
        "DF-LIM-01",
    )
    suite.invalid(
        "limits/content-5-gib",
        plain,
        "five manifest parts of 1 GiB each, 5 GiB in all",
        _store({"record:1": manifests(5, content_size=1 << 30)}),
        LIMIT,
        "DF-LIM-01",
        "DF-LIM-02",
        op="open",
        args={"at": {"branch": "main"}, "allow": []},
    )

    def branches(count: int) -> Callable[[dict[str, Any]], Any]:
        head = {"seq": None, "step": None, "epoch": 0, "claim": None}
        return lambda m: m | {"heads": {**m["heads"], **{f"b{number}": head for number in range(count - 1)}}}

    suite.invalid(
        "limits/branches-10001",
        plain,
        "10,001 branches in `heads`",
        _store({"record:1": branches(10_001)}),
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
        from vectors.arrowfile import Column

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
