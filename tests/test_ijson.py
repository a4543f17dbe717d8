"""I-JSON: what is refused, what is kept, and the `check` member."""

import hashlib
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.errors import CorruptError, ErrorCode, LimitError, MalformedError, UnsupportedError
from deltaformat.fields import check_natural, check_requires, check_text, split_members
from deltaformat.ijson import MAX_INTEGER, check_user_value, dump, open_sealed, parse_object, seal

LIMIT = 1 << 16


def parse(text: str | bytes) -> dict[str, Any]:
    data = text.encode() if isinstance(text, str) else text
    return parse_object(data, where="object", limit=LIMIT)


ACCEPTED = {
    "empty": ("{}", {}),
    "white space around it": (" \t\r\n{ } \n", {}),
    "escapes": (r'{"a":"\u0041\n\/"}', {"a": "A\n/"}),
    "a pair of escaped surrogates": (r'{"a":"\ud83d\ude00"}', {"a": "😀"}),
    "such a pair beside others": (r'{"a":["\ud83d\ude00",1]}', {"a": ["😀", 1]}),
    "NUL in a string": (r'{"a\u0000":1}', {"a\0": 1}),
    "the largest integers": (f'{{"a":{MAX_INTEGER},"b":-{MAX_INTEGER}}}',
                             {"a": MAX_INTEGER, "b": -MAX_INTEGER}),
    "numbers that nobody asks to be integers": ('{"a":1.5e3,"b":-0.0,"c":9007199254740993}',
                                                {"a": 1500.0, "b": -0.0, "c": 9007199254740993}),
    "brackets in strings": ('{"a":"' + "[" * 100 + '","b":"\\"' + "{" * 100 + '"}',
                            {"a": "[" * 100, "b": '"' + "{" * 100}),
    "many digits in a string": ('{"a":"' + "9" * 400 + '","b":-12,"c":' + "9" * 309 + "}",
                                {"a": "9" * 400, "b": -12, "c": 10**309 - 1}),
    "32 levels": ('{"a":' + "[" * 31 + "]" * 31 + "}", None),
    "many brackets side by side": ('{"a":[' + ",".join(["[]"] * 1000) + "]}", None),
    "names that differ in normalisation only": ('{"é":1,"e\u0301":2}', {"é": 1, "e\u0301": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    """DF-JSN-01: these are I-JSON objects."""
    text, expected = ACCEPTED[name]
    value = parse(text)
    assert expected is None or value == expected


REFUSED = {
    "nothing": b"",
    "an array": b"[]",
    "a string": b'"a"',
    "null": b"null",
    "two objects": b"{}{}",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a":1}'.encode("utf-16-le"),
    "an invalid byte": b'{"a":"\xff"}',
    "an overlong form": b'{"a":"\xc0\x80"}',
    "a surrogate in UTF-8": b'{"a":"\xed\xa0\x80"}',
    "a name twice": b'{"a":1,"a":1}',
    "a name twice, once escaped": b'{"a":1,"\\u0061":2}',
    "a name twice further in": b'{"b":[{"a":1,"a":2}]}',
    "a lone high surrogate": rb'{"a":"\ud800"}',
    "a lone low surrogate": rb'{"a":"\uDFFF"}',
    "surrogates in the wrong order": rb'{"a":"\ude00\ud83d"}',
    "a lone surrogate in a name": rb'{"\ud800":1}',
    "a lone surrogate further in": rb'{"a":[{"b":["\ud800"]}]}',
    "33 levels": b'{"a":' + b"[" * 32 + b"]" * 32 + b"}",
    "33 levels of objects": b'{"a":' * 33 + b"1" + b"}" * 33,
    "many levels": b'{"a":' + b"[" * 60_000,
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":[-Infinity]}',
    "a number beyond every double": b'{"a":1e400}',
    "an integer beyond every double": b'{"a":' + b"9" * 400 + b"}",
    "an integer of 50,000 digits": b'{"a":' + b"9" * 50_000 + b"}",
    "a leading zero": b'{"a":01}',
    "a leading plus": b'{"a":+1}',
    "hex": b'{"a":0x10}',
    "a bare fraction": b'{"a":.5}',
    "a trailing comma": b'{"a":1,}',
    "a comment": b'{"a":1}//',
    "single quotes": b"{'a':1}",
    "a control character": b'{"a":"\n"}',
    "cut short": b'{"a":"bc',
    "a string that never ends": b'{"a":"' + b'\\"[' * 1000,
    "digits that are not ASCII": '{"a":\u0661}'.encode(),
    "white space that is not JSON's": b'{"a":\x0b1}',
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """DF-JSN-01."""
    with pytest.raises(MalformedError) as caught:
        parse(REFUSED[name])
    assert caught.value.code is ErrorCode.JSON_INVALID
    assert caught.value.where == "object"


def test_size_is_checked_first() -> None:
    """DF-LIM-02: nothing is parsed of an object that is too large."""
    for check in (parse_object, open_sealed):
        with pytest.raises(LimitError):
            check(b"\xff" * 101, where="", limit=100)
    assert parse_object(b"{}" + b" " * 98, where="", limit=100) == {}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
json_objects = st.dictionaries(st.text(), json_values, max_size=5)


@given(json_objects)
def test_round_trip(value: dict[str, Any]) -> None:
    """What a user may give comes back, of the same types."""
    check_user_value(value, where="metadata")
    again = parse(dump(value))
    assert again == value
    assert repr(again) == repr(value)


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\u0d8aeE1-.tn ', max_size=200).map(str.encode))
def test_any_bytes(data: bytes) -> None:
    """Whatever comes in: a dict, as `json` reads it, or MalformedError."""
    try:
        value = parse(data)
    except MalformedError:
        return
    assert value == json.loads(data)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "\ud800", b"bytes", {"a": {1, 2}}, CYCLE, {"a": object()}],
    ids=["nan", "inf", "surrogate", "bytes", "set", "cycle", "object"],
)
def test_dump_refuses(value: Any) -> None:
    """DF-JSN-01: what cannot be I-JSON is not written."""
    with pytest.raises(MalformedError) as caught:
        dump({"a": value})
    assert caught.value.code is ErrorCode.INPUT_INVALID
    with pytest.raises(MalformedError):
        check_user_value({"a": value}, where="metadata")


@pytest.mark.parametrize(
    "value",
    [{1: 2}, {"a": {None: 1}}, MAX_INTEGER + 1, -MAX_INTEGER - 1, {"\udfff": 1}, ["\ud800"], 1 << 70],
)
def test_user_values_that_would_change(value: Any) -> None:
    """What `json` would write, but readers would not get back as it was (DF-JSN-01)."""
    with pytest.raises(MalformedError) as caught:
        check_user_value(value, where="metadata")
    assert caught.value.code is ErrorCode.INPUT_INVALID
    assert caught.value.where == "metadata"


def test_user_values_nest_to_the_limit() -> None:
    """DF-JSN-01: a member's value may have 31 levels below the object."""
    value: Any = 1
    for _ in range(31):
        value = [value]
    check_user_value(value, where="")
    assert parse(dump({"metadata": value}))
    with pytest.raises(MalformedError):
        check_user_value({"a": value}, where="")
    check_user_value((1, None, True, "a", 0.5), where="")


def test_seal() -> None:
    """DF-JSN-03: the bytes, by hand."""
    body = b'{"a":"\xc3\xa9","b":[1]'
    sealed = body + b',"check":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
    assert seal({"a": "é", "b": [1]}) == sealed
    assert seal({"a": "é", "check": "old", "b": [1]}) == sealed
    assert open_sealed(sealed, where="", limit=LIMIT) == json.loads(sealed)


def test_every_flipped_bit_is_noticed() -> None:
    """DF-JSN-03: accidents in a sealed object are always refused."""
    sealed = seal({"a": "text", "b": [1, 2]})
    body = len(sealed) - 76
    for position in range(len(sealed)):
        for bit in range(8):
            broken = bytearray(sealed)
            broken[position] ^= 1 << bit
            with pytest.raises((CorruptError, MalformedError)) as caught:
                open_sealed(bytes(broken), where="object", limit=LIMIT)
            if position < body:
                assert caught.value.code is ErrorCode.HASH_MISMATCH
            assert caught.value.where == "object"


def test_truncation_at_every_byte() -> None:
    """DF-JSN-03: an object cut short has no `check` where it must be."""
    sealed = seal({"a": "text", "b": [1, 2]})
    for end in range(len(sealed)):
        with pytest.raises(MalformedError) as caught:
            open_sealed(sealed[:end], where="", limit=LIMIT)
        assert caught.value.code is ErrorCode.JSON_INVALID


@pytest.mark.parametrize("change", ["newline", "space", "upper case", "not last", "twice"])
def test_other_forms_of_check(change: str) -> None:
    """DF-JSN-03: `check` has one form and one place."""
    sealed = seal({"a": 1})
    body, digits = sealed[:-76], sealed[-66:-2]
    if change == "newline":
        data = sealed + b"\n"
    elif change == "space":
        data = body + b', "check":"' + digits + b'"}'
    elif change == "upper case":
        data = body + b',"check":"' + digits.upper() + b'"}'
    elif change == "not last":
        data = b'{"check":"' + digits + b'","a":1}'
    else:
        body = b'{"check":"x"'
        data = body + b',"check":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
    with pytest.raises(MalformedError):
        open_sealed(data, where="", limit=LIMIT)


TYPES: dict[str, tuple[list[Any], list[Any]]] = {
    "string": (["", "a"], [None, 1, ["a"], {}]),
    "string or null": (["", None], [1, False]),
    "integer": (
        [0, -1, MAX_INTEGER, -MAX_INTEGER],
        [None, True, 1.0, "1", MAX_INTEGER + 1, -MAX_INTEGER - 1],
    ),
    "integer or null": ([0, None], [False, 0.0, MAX_INTEGER + 1]),
    "boolean": ([True, False], [0, 1, None]),
    "object": ([{}, {"a": 1}], [[], None, "{}"]),
    "array of string": ([[], ["a", ""]], [None, "a", ["a", None], {}]),
    "array of integer": ([[], [1, 2]], [[1.0], [True], [MAX_INTEGER + 1], 1]),
    "array of object": ([[], [{}]], [{}, [[]], [None]]),
    "array of array": ([[], [[1], []]], [[1], {}, [{}]]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_members(kind: str) -> None:
    """DF-JSN-01: a member of another type is refused, an integer with a fraction or out of range too."""
    good, bad = TYPES[kind]
    for value in good:
        assert split_members({"a": value}, {"a": kind}, where="") == ({"a": value}, {})
    for value in bad:
        with pytest.raises(MalformedError, match="`a` must be") as caught:
            split_members({"a": value}, {"a": kind}, where="object")
        assert caught.value.code is ErrorCode.JSON_INVALID


def test_missing_and_unknown_members() -> None:
    """DF-JSN-01, DF-JSN-02: what is missing is refused, what is unknown is set aside."""
    tables = {"a": "integer"}, {"b": "string"}
    known, extra = split_members({"x": [1.5], "a": 1, "b": "b"}, *tables, where="")
    assert known == {"a": 1, "b": "b"}
    assert extra == {"x": [1.5]}
    with pytest.raises(MalformedError, match="lacks the member `b`"):
        split_members({"a": 1}, *tables, where="")


def test_integers_as_written() -> None:
    """DF-JSN-01: 1.0 and 1e0 are no integers, -0 is 0."""
    for text, fine in (("1", True), ("-0", True), ("1.0", False), ("1e0", False), ("1E2", False)):
        members = parse(f'{{"a":{text}}}')
        if fine:
            split_members(members, {"a": "integer"}, where="")
        else:
            with pytest.raises(MalformedError):
                split_members(members, {"a": "integer"}, where="")


def test_brackets_in_strings_are_no_containers() -> None:
    """DF-LIM-01: what is counted are objects and arrays."""
    data = b'{"a":"' + b"[" * 50 + b'\\"{","b":[[],{}]}'
    assert parse_object(data, where="", limit=LIMIT, max_containers=4)["b"] == [[], {}]
    with pytest.raises(LimitError, match="objects and arrays"):
        parse_object(data, where="", limit=LIMIT, max_containers=3)


def test_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    """DF-VER-01: an unknown feature is refused and named, as is a string outside the grammar."""
    assert check_requires([], where="") == ()
    monkeypatch.setattr("deltaformat.fields.KNOWN_FEATURES", frozenset({"known"}))
    assert check_requires(["known", "known"], where="") == ("known", "known")
    with pytest.raises(UnsupportedError, match=r"'shiny-2\.0'") as caught:
        check_requires(["known", "shiny-2.0"], where="")
    assert caught.value.code is ErrorCode.FEATURE_UNKNOWN
    for name in ("", "Shiny", "-a", "a b", "a" * 65, "é", "a\n", "a" * 64):
        with pytest.raises(UnsupportedError, match=re.escape(repr(name[:80]))) as caught:
            check_requires(["known", name], where="")
        assert caught.value.code is ErrorCode.FEATURE_UNKNOWN


def test_value_checks() -> None:
    import re

    check_text(re.compile("a+"), "aa", "x", "")
    check_natural(None, "x", "")
    check_natural(0, "x", "")
    with pytest.raises(MalformedError, match="`x` is negative"):
        check_natural(-1, "x", "")
    with pytest.raises(MalformedError, match="`x` is 'aab'"):
        check_text(re.compile("a+"), "aab", "x", "")
