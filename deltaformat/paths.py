"""The grammar of sidecar paths (SPEC 11.3): what may become a file below a directory that a user names."""

from __future__ import annotations

import unicodedata

from deltaformat.errors import ErrorCode, UnsafeError

__all__ = ["check_sidecar_path"]

_MAX_BYTES = 1_024
_SHOWN = 100


def check_sidecar_path(path: str, *, where: str = "") -> str:
    """Return `path` if it can name a sidecar file, as it is (DF-MAN-10).

    Raises:
        UnsafeError: It could leave its directory, or mean different files on different systems.
    """
    problem = _problem(path)
    if problem:
        shown = ascii(path)
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        raise UnsafeError(
            ErrorCode.PATH_UNSAFE, f"sidecar path {shown} {problem}; give it another name", where=where
        )
    return path


def _problem(path: str) -> str:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if size > _MAX_BYTES:
        return f"has {size} bytes, more than {_MAX_BYTES}"
    for segment in path.split("/"):
        if not segment:
            return "has an empty segment"
        if segment in (".", ".."):
            return f"has the segment {segment!r}"
    for character in path:
        if character in "\\:" or unicodedata.category(character) == "Cc":
            return f"has the character {character!a}"
    return ""
