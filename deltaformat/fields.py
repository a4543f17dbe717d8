"""The members of every JSON object: the tables of SPEC 6.2, 11.3 and 12.1 as data, and how they are checked.

A test compares these tables with those in SPEC.md.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError
from deltaformat.ijson import MAX_INTEGER

__all__ = [
    "CLAIM",
    "COMMIT",
    "DESCRIPTOR",
    "DROP",
    "FORK",
    "HEAD",
    "HEX_32",
    "HEX_64",
    "KINDS",
    "KNOWN_FEATURES",
    "MANIFEST",
    "RECORD",
    "RETIRE",
    "TABLES",
    "TAG",
    "Fields",
    "check_natural",
    "check_requires",
    "check_step",
    "check_text",
    "is_natural",
    "split_members",
]

Fields = Mapping[str, str]
"""Member names and their types, in the words of SPEC's tables."""

DESCRIPTOR: Final[Fields] = {
    "format": "string",
    "uuid": "string",
    "digest": "string",
    "block_bytes": "integer",
    "log": "string",
    "requires": "array of string",
    "time": "string",
    "check": "string",
}

RECORD: Final[Fields] = {
    "kind": "string",
    "seq": "integer",
    "prev": "string or null",
    "nonce": "string",
    "time": "string",
    "heads": "object",
    "last_tag": "integer or null",
    "last_retire": "integer or null",
    "requires": "array of string",
    "check": "string",
}

HEAD: Final[Fields] = {
    "seq": "integer or null",
    "step": "integer or null",
    "epoch": "integer",
    "claim": "integer or null",
}

CLAIM: Final[Fields] = {
    "branch": "string",
    "epoch": "integer",
    "host": "string",
    "pid": "integer",
    "resume_from": "integer or null",
    "single_writer": "boolean",
}

COMMIT: Final[Fields] = {
    "branch": "string",
    "claim": "integer",
    "step": "integer",
    "parent": "integer or null",
    "depth": "integer",
    "ancestors": "array of array",
    "root": "string",
    "manifests": "array of object",
    "objects_added": "array of object",
    "objects_dropped": "array of object",
    "metadata": "object",
}

FORK: Final[Fields] = {"branch": "string", "source": "integer", "step": "integer"}

TAG: Final[Fields] = {"name": "string", "target": "integer or null"}

DROP: Final[Fields] = {"branch": "string"}

RETIRE: Final[Fields] = {"commits": "array of integer"}

MANIFEST: Final[Fields] = {
    "format": "string",
    "digest": "string",
    "block_bytes": "integer",
    "parent": "integer or null",
    "packs": "array of object",
    "files": "array of object",
    "requires": "array of string",
}

KINDS: Final[Mapping[str, Fields]] = {
    "claim": CLAIM,
    "commit": COMMIT,
    "fork": FORK,
    "tag": TAG,
    "drop": DROP,
    "retire": RETIRE,
}
"""The members that each kind of record has beside those of RECORD."""

TABLES: Final[Mapping[str, Fields]] = {
    "descriptor": DESCRIPTOR,
    "record": RECORD,
    "head": HEAD,
    "manifest": MANIFEST,
    **KINDS,
}
"""Every table, by its name in SPEC.md."""

KNOWN_FEATURES: frozenset[str] = frozenset()
"""The features of `requires` that this implementation knows: version 1.0 defines none (SPEC 15)."""

HEX_32: Final = re.compile(r"[0-9a-f]{32}")
HEX_64: Final = re.compile(r"[0-9a-f]{64}")


def is_natural(value: object) -> bool:
    """Whether `value` is an integer from 0 to 2^53 - 1."""
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _is_integer(value: object) -> bool:
    return type(value) is int and -MAX_INTEGER <= value <= MAX_INTEGER


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _array_of(test: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _or_null(test: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or test(value)


_TESTS: Final[Mapping[str, Callable[[object], bool]]] = {
    "string": _is_string,
    "string or null": _or_null(_is_string),
    "integer": _is_integer,
    "integer or null": _or_null(_is_integer),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array of string": _array_of(_is_string),
    "array of integer": _array_of(_is_integer),
    "array of object": _array_of(lambda value: isinstance(value, dict)),
    "array of array": _array_of(lambda value: isinstance(value, list)),
}


def split_members(
    members: Mapping[str, Any], *tables: Fields, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check presence and type of the members that `tables` name.

    Args:
        members: A parsed object.
        *tables: Tables of this module; what any of them names must be there.
        where: The object's key and place, for messages.

    Returns:
        The members that the tables name, and the others, which are ignored but kept (DF-JSN-02, DF-VER-02).

    Raises:
        MalformedError: A member is missing or has another type (DF-JSN-01).
    """
    known: dict[str, Any] = {}
    for table in tables:
        for name, kind in table.items():
            if name not in members:
                raise MalformedError(
                    ErrorCode.JSON_INVALID, f"lacks the member `{name}` ({kind})", where=where
                )
            if not _TESTS[kind](members[name]):
                raise MalformedError(
                    ErrorCode.JSON_INVALID,
                    f"`{name}` must be {kind} (integers within ±(2^53 - 1))",
                    where=where,
                )
            known[name] = members[name]
    return known, {name: value for name, value in members.items() if name not in known}


def check_requires(requires: Iterable[str], *, where: str) -> tuple[str, ...]:
    """Refuse features that this implementation does not know (DF-VER-01).

    Raises:
        UnsupportedError: An unknown feature, or no feature name at all; the message names it.
    """
    names = tuple(requires)
    for name in names:
        if name not in KNOWN_FEATURES:
            raise UnsupportedError(
                ErrorCode.FEATURE_UNKNOWN,
                f"needs the feature {name[:80]!r}, which this version does not know; a newer deltaformat may",
                where=where,
            )
    return names


def check_text(pattern: re.Pattern[str], value: str, name: str, where: str) -> None:
    """Refuse a string that does not match a grammar in full.

    Raises:
        MalformedError: value-invalid.
    """
    if pattern.fullmatch(value) is None:
        raise MalformedError(
            ErrorCode.VALUE_INVALID, f"`{name}` is {value[:80]!r}, not {pattern.pattern}", where=where
        )


def check_natural(value: int | None, name: str, where: str) -> None:
    """Refuse a negative number.

    Raises:
        MalformedError: value-invalid.
    """
    if value is not None and value < 0:
        raise MalformedError(ErrorCode.VALUE_INVALID, f"`{name}` is negative", where=where)


def check_step(step: object) -> int:
    """Return a step as an integer, NumPy's too.

    Raises:
        MalformedError: input-invalid.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]  # told below
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_INTEGER:
        raise MalformedError(
            ErrorCode.INPUT_INVALID, f"a step is an integer from 0 to 2^53 - 1, not {step!r}", where="step"
        )
    return number
