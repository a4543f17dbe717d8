"""Which URLs a pack table may name (SPEC 10.2): the grammar, without any access."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deltaformat.errors import ErrorCode, UnsafeError

__all__ = ["HUB_NAME", "HubFile", "check_external_url", "parse_hub_url"]

_MAX_URL = 4_096
HUB_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"  # of a namespace, a bucket or a repository on the Hub
_HUB = re.compile(rf"hf://({HUB_NAME})/({HUB_NAME})@([0-9a-f]{{40}})/([^\x00-\x1f\x7f-\x9f\\?#%]+)")
_ODD = re.compile(r"[\x00-\x20\x7f-\U0010ffff\\\[\]]|%00")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a Hugging Face model repository at a commit."""

    repository: str
    revision: str
    path: str


def parse_hub_url(url: str) -> HubFile | None:
    """Read `hf://<namespace>/<repository>@<40 hex digits>/<path>`; None if `url` is anything else."""
    match = _HUB.fullmatch(url) if len(url) <= _MAX_URL else None
    if match is None or any(segment in ("", ".", "..") for segment in match[4].split("/")):
        return None
    return HubFile(f"{match[1]}/{match[2]}", match[3], match[4])


def check_external_url(url: str, allowed_prefixes: Sequence[str] = (), *, where: str = "") -> None:
    """Refuse an external object's URL that is no Hub file at a commit and not allowed (DF-EXT-01).

    Args:
        url: From a manifest, so from anyone.
        allowed_prefixes: URLs that the user has allowed, with all below them. One ends where a path segment
            ends: `https://a.example` does not allow `https://a.example.org/x`.
        where: What an error should name.

    Raises:
        UnsafeError: It is neither (external-refused).
    """
    if parse_hub_url(url) is not None or any(_below(url, prefix) for prefix in allowed_prefixes):
        return
    shown = re.sub(
        r"//[^/]*@(?=[^/]*)|[?#].*",
        lambda match: "//" if match[0][0] == "/" else "",
        url[:200],
        flags=re.DOTALL,
    )
    raise UnsafeError(
        ErrorCode.EXTERNAL_REFUSED,
        f"{shown!a} is not a Hugging Face file at a commit; allow its prefix if you trust it",
        where=where,
    )


def _below(url: str, prefix: str) -> bool:
    if not prefix or not url.startswith(prefix) or len(url) > _MAX_URL or _ODD.search(url):
        return False
    rest = url[len(prefix) :]
    if rest and not prefix.endswith("/") and not rest.startswith("/"):
        return False
    segments = re.split(r"/|%2f|%5c", rest, flags=re.IGNORECASE)
    return not any(re.sub("%2e", ".", segment, flags=re.IGNORECASE) in (".", "..") for segment in segments)
