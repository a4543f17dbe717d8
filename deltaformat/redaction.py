"""What no error shows: credentials that URLs hold (DF-SEC-02)."""

from __future__ import annotations

import re

__all__ = ["redact"]

_USERINFO = re.compile(r"(?<=://)[^/\s?#]*@")
_QUERY = re.compile(r"(://[^\s?\"')>]*)\?[^\s\"')>]+")


def redact(text: str) -> str:
    """A text without the user information and queries of URLs in it: they may hold credentials."""
    return _QUERY.sub(r"\1?…", _USERINFO.sub("", text)) if "://" in text else text
