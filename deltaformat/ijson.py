"""I-JSON objects: strict parsing, compact writing, and the `check` member (SPEC 6.1)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from deltaformat.errors import CorruptError, ErrorCode, LimitError, MalformedError

__all__ = ["MAX_DEPTH", "MAX_INTEGER", "check_user_value", "dump", "open_sealed", "parse_object", "seal"]

MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON implementation keeps exactly."""

MAX_DEPTH = 32
"""How deep objects and arrays may nest; the object itself is at depth 1."""

# All but brackets; strings, closed or not, as a whole. Possessive: hostile text, too, takes linear time.
_NO_BRACKETS = re.compile(r'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+"?)++', re.DOTALL)
_LONG_INTEGER = re.compile(r"[0-9]{310}")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SEAL = re.compile(rb',"check":"([0-9a-f]{64})"\}')
_SEAL_BYTES = 76


MAX_CONTAINERS = 1 << 18
"""Objects and arrays in a descriptor or record (DF-LIM-01)."""


def parse_object(
    data: bytes, *, where: str, limit: int, max_containers: int = MAX_CONTAINERS
) -> dict[str, Any]:
    """Parse one I-JSON object.

    Args:
        data: The bytes as stored.
        where: The key they come from, for messages.
        limit: The largest size allowed; checked first.
        max_containers: Objects and arrays allowed in it: two characters of text become dozens of bytes.

    Returns:
        The members. Numbers are `int` where written without fraction and exponent, else finite `float`.

    Raises:
        LimitError: More bytes than `limit`, or more objects and arrays than `max_containers`.
        MalformedError: Not I-JSON, not an object, or nested too deeply (DF-JSN-01).
    """
    if len(data) > limit:  # DF-LIM-02: before any memory is taken for its content
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED, f"has {len(data)} bytes, at most {limit} are allowed", where=where
        )
    if data.startswith(b"\xef\xbb\xbf"):
        raise _invalid("begins with a byte order mark", where)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"is not valid UTF-8 at byte {error.start}", where) from None
    brackets = _NO_BRACKETS.sub("", text)
    if brackets.count("{") + brackets.count("[") > max_containers:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED, f"holds more than {max_containers} objects and arrays", where=where
        )
    _check_depth(brackets, where)  # DF-JSN-01: before a recursive parser sees it
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_members,
            parse_int=_parse_long_integer if _LONG_INTEGER.search(text) else None,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
    except ValueError as error:  # JSONDecodeError is one
        raise _invalid(f"is not I-JSON: {error}", where) from None
    if not isinstance(value, dict):
        raise _invalid("is not a JSON object", where)
    if _ESCAPED_SURROGATE.search(text) and _has_surrogate(value):
        raise _invalid("holds a lone surrogate", where)
    return value


def dump(members: Mapping[str, Any]) -> bytes:
    """Write an object compactly, in the order of its members.

    Raises:
        MalformedError: A value that I-JSON cannot hold.
    """
    try:
        text = json.dumps(members, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError, NaN, cycles
        raise MalformedError(ErrorCode.INPUT_INVALID, f"cannot be written as I-JSON: {error}") from None


def seal(members: Mapping[str, Any]) -> bytes:
    """Write an object that ends with the member `check` (DF-JSN-03)."""
    body = dump({name: value for name, value in members.items() if name != "check"})[:-1]
    return body + b',"check":"%s"}' % hashlib.sha256(body).hexdigest().encode("ascii")


def open_sealed(data: bytes, *, where: str, limit: int) -> dict[str, Any]:
    """Check the `check` member of a descriptor or record, then parse it (DF-JSN-03).

    Raises:
        LimitError: More bytes than `limit`, or more objects and arrays than `max_containers`.
        MalformedError: No `check` member in the prescribed form, or not I-JSON.
        CorruptError: The digits are not the hash of the bytes before.
    """
    if len(data) > limit:
        raise LimitError(
            ErrorCode.LIMIT_EXCEEDED, f"has {len(data)} bytes, at most {limit} are allowed", where=where
        )
    match = _SEAL.fullmatch(data, max(0, len(data) - _SEAL_BYTES))
    if match is None:
        raise _invalid("does not end with the member `check`; it may have been cut short", where)
    if hashlib.sha256(data[: match.start()]).hexdigest().encode("ascii") != match[1]:
        raise CorruptError(
            ErrorCode.HASH_MISMATCH, "has been changed since it was written: `check` differs", where=where
        )
    return parse_object(data, where=where, limit=limit)


def check_user_value(value: object, *, where: str, depth: int = MAX_DEPTH - 1) -> None:
    """Refuse what would not come back exactly as a member of an object: call it on a user's metadata.

    Args:
        value: What the user gave.
        where: The argument's name, for messages.
        depth: How deep objects and arrays may nest.

    Raises:
        MalformedError: A key that is no string, a number that JSON implementations do not keep, a lone
            surrogate, another type, or nesting too deep.
    """
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if _has_surrogate(value):
            raise _input("a string holds a lone surrogate", where)
    elif isinstance(value, int):
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise _input("an integer is outside ±(2^53 - 1); give it as a string", where)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _input("a number is not finite; leave it out or give it as a string", where)
    elif isinstance(value, dict | list | tuple):
        if depth == 0:
            raise _input(f"objects and arrays nest deeper than {MAX_DEPTH - 1}", where)
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise _input(f"a key is {type(key).__name__}, not a string", where)
                check_user_value(key, where=where)
            value = list(value.values())
        for item in value:
            check_user_value(item, where=where, depth=depth - 1)
    else:
        raise _input(f"a value of type {type(value).__name__} is not JSON", where)


def _check_depth(brackets: str, where: str) -> None:
    depth = 0
    for bracket in brackets:
        if bracket in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _invalid(f"nests deeper than {MAX_DEPTH}", where)
        else:
            depth -= 1


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member name occurs twice")
    return members


def _parse_long_integer(digits: str) -> int:
    # Beyond every double; and to convert one of millions of digits takes quadratic time.
    if len(digits) >= 310:
        raise ValueError("a number is too large")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _has_surrogate(value: object) -> bool:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return True
        return False
    if isinstance(value, dict):
        return any(_has_surrogate(key) or _has_surrogate(item) for key, item in value.items())
    if isinstance(value, list):
        return any(_has_surrogate(item) for item in value)
    return False


def _invalid(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.JSON_INVALID, message, where=where)


def _input(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.INPUT_INVALID, message, where=where)
