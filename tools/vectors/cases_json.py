"""SPEC 6.1 and 6.2: JSON, `check`, the descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.faults import JSON, VALUE
from vectors.primitives import dump
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import put, without

__all__ = ["add", "log_of_one", "metadata"]


def add(suite: Suite) -> None:
    """All of them."""
    _descriptor(suite)
    _records(suite)


def log_of_one(hooks: Any = None) -> Store:
    """A claim and a commit; the commit's objects are left out."""
    store = Store(hooks=hooks)
    store.claim()
    store.commit(store.keyframe({"w": ("U8", [4], b"abcd")}), step=3)
    store.objects = {k: v for k, v in store.objects.items() if k.startswith(("log/", "deltaformat"))}
    return store


def _descriptor(suite: Suite) -> None:
    base = suite.valid(
        "descriptor/plain",
        "a descriptor as it is usually written",
        log_of_one(),
        "DF-DSC-01",
        "DF-DSC-02",
        op="state",
        flags=["descriptor"],
    )

    def accept(name: str, title: str, change_: Callable[[dict[str, Any]], Any]) -> None:
        suite.valid(
            f"descriptor/{name}",
            title,
            log_of_one({"descriptor": change_}),
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
    accept(
        "noncharacters",
        "noncharacters in an unknown member's name and value",
        lambda m: m | {"note\ufffe": "\ufdd0\uffff\U0001fffe\U0010ffff"},
    )
    accept("time-odd", "a `time` that is no time: it is informative", lambda m: m | {"time": "soon"})

    def fault(
        name: str, mutation: str, change_: Callable[[dict[str, Any]], Any], error: tuple[str, str], *ids: str
    ) -> None:
        suite.invalid(f"descriptor/{name}", base, mutation, log_of_one({"descriptor": change_}), error, *ids)

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
        "requires-no-name",
        "`requires` holds a string that is no feature's name: unknown all the same",
        put(requires=["Lossy Blocks"]),
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
            log_of_one({"record:1": change_}),
            *(ids or ("DF-JSN-01",)),
            op="state",
            flags=["json", "must-accept"],
        )

    base = accept("plain", "a commit as it is usually written", lambda m: m)
    accept(
        "metadata-numbers",
        "numbers in `metadata`: fractions, exponents, integers beyond 2^53, -0, near the end of binary64",
        metadata(
            b"[1.5,-0.0,-0,1e300,1E-300,1.7976931348623157e308,9007199254740993,123456789012345678901234567890,5e-324,1e-400]"
        ),
    )
    accept(
        "metadata-strings",
        "strings in `metadata`: pairs of surrogates, controls as escapes, a name that is empty",
        metadata(b'{"":"\\ud83d\\ude00\\u0000\\u2028","\xf0\x9f\x98\x80":"\\"\\\\\\/\\b\\f\\n\\r\\t"}'),
    )
    accept(
        "noncharacters",
        "noncharacters in `metadata`: as they are, escaped, in names",
        metadata(
            '{"\ufdd0":"\ufffe\uffff\U0001ffff\U0010fffe","\\uFFFE":"\\ufdef\\uffff\\ud83f\\udffe"}'.encode()
        ),
    )
    accept(
        "depth-32",
        "`metadata` nests to a depth of 32, counted from the record",
        metadata(b'{"a":' + b"[" * 30 + b"]" * 30 + b"}"),
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
        metadata(b'{"a":{"a":1},"b":{"a":1}}'),
    )

    def fault(
        name: str,
        mutation: str,
        change_: Callable[[dict[str, Any]], Any],
        *ids: str,
        error: tuple[str, str] = JSON,
    ) -> None:
        suite.invalid(
            f"json/{name}", base, mutation, log_of_one({"record:1": change_}), error, *(ids or ("DF-JSN-01",))
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
    fault("duplicate-in-metadata", "a member of `metadata` stands twice", metadata(b'{"a":1,"a":2}'))
    fault("duplicate-deep", "a member deep in `metadata` stands twice", metadata(b'{"a":[{"b":1,"b":1}]}'))
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
    fault("lone-surrogate-escaped", "an escaped lone surrogate in `metadata`", metadata(b'{"a":"\\ud800"}'))
    fault(
        "low-surrogate-first",
        "an escaped pair of surrogates the wrong way round",
        metadata(b'{"a":"\\ude00\\ud83d"}'),
    )
    fault("surrogate-in-name", "an escaped lone surrogate in a member's name", metadata(b'{"\\udfff":1}'))
    fault("surrogate-encoded", "a surrogate encoded in UTF-8", metadata(b'{"a":"\xed\xa0\x80"}'))
    fault("not-utf-8", "a byte that is not UTF-8", metadata(b'{"a":"\xff"}'))
    fault("overlong", "an overlong form of a character", metadata(b'{"a":"\xc0\xaf"}'))
    fault("byte-order-mark", "a byte order mark at the beginning", lambda m: b"\xef\xbb\xbf" + dump(m))
    fault("utf-16", "UTF-16 instead of UTF-8", lambda m: dump(m).decode().encode("utf-16-le"))
    fault("depth-33", "`metadata` nests to a depth of 33", metadata(b'{"a":' + b"[" * 31 + b"]" * 31 + b"}"))
    fault(
        "depth-100000",
        "`metadata` nests to a depth of 100,000",
        metadata(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "DF-JSN-01",
        "DF-SEC-01",
    )
    fault("beyond-binary64", "1e400 in `metadata`", metadata(b'{"a":1e400}'))
    fault(
        "integer-beyond-binary64",
        "an integer of 400 digits in `metadata`",
        metadata(b'{"a":' + b"9" * 400 + b"}"),
    )
    fault("nan", "NaN in `metadata`", metadata(b'{"a":NaN}'))
    fault("infinity", "-Infinity in `metadata`", metadata(b'{"a":-Infinity}'))
    fault("leading-zero", "a number with a leading zero", metadata(b'{"a":01}'))
    fault("plus", "a number with a plus sign", metadata(b'{"a":+1}'))
    fault("bare-point", "a number that ends in a point", metadata(b'{"a":1.}'))
    fault("comment", "a comment", metadata(b'{"a":1/* */}'))
    fault("comma-at-end", "a comma behind the last entry of an array", metadata(b'{"a":[1,]}'))
    fault("single-quotes", "a string in single quotes", metadata(b"{'a':1}"))
    fault("control-in-string", "a line break inside a string", metadata(b'{"a":"x\ny"}'))
    fault("escape-unknown", "the escape \\x", metadata(b'{"a":"\\x41"}'))
    fault("white-space-unicode", "a no-break space between members", metadata(b'{"a":\xc2\xa01}'))
    fault("two-values", "a second object before `check`'s", lambda m: dump(m) + b"{}")
    fault("unclosed", "`metadata` is not closed", metadata(b'{"a":[1}'))

    def sealed(name: str, mutation: str, change_: Callable[[bytes], bytes], error: tuple[str, str]) -> None:
        suite.invalid(f"json/{name}", base, mutation, log_of_one({"bytes:1": change_}), error, "DF-JSN-03")

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
        (
            "format-byte-changed",
            "a bit of the descriptor's `format` is another: the ending is checked before the format",
            lambda d: d.replace(b"deltaformat/1", b"deltaformat/3"),
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
            log_of_one({"descriptor-bytes": change_}),
            error,
            "DF-JSN-03",
        )


def metadata(value: bytes) -> Callable[[dict[str, Any]], bytes]:
    """A hook that gives a record this `metadata`, or this as its member `a`."""

    def change_(members: dict[str, Any]) -> bytes:
        data = dump(members)
        assert data.endswith(b'"metadata":{}}')
        inner = value if value.startswith((b"{",)) else b'{"a":' + value + b"}"
        return data[:-3] + inner + b"}"

    return change_
