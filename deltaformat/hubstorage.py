"""Placeholder until the Hub's storage is written."""

from __future__ import annotations

from collections.abc import Mapping

from deltaformat.errors import ErrorCode, UnsupportedError
from deltaformat.storage import Storage

__all__ = ["open_hub_bucket"]


def open_hub_bucket(url: str, options: Mapping[str, str]) -> Storage:
    """Open `hf://buckets/NAMESPACE/NAME[/PREFIX]`."""
    raise UnsupportedError(ErrorCode.NOT_SUPPORTED, "cannot open hf:// URLs", where="url")
