"""Model repositories of the Hugging Face Hub as checkpoints to import: fetched into the Hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from deltaformat.errors import DeltaFormatError, ErrorCode, MalformedError, StoreError
from deltaformat.external import HUB_NAME
from deltaformat.hubclient import HubClient

__all__ = ["fetch_model", "is_model_url"]

_MODEL = re.compile(rf"hf://({HUB_NAME}/{HUB_NAME})(?:@([A-Za-z0-9._/-]{{1,200}}))?/?")
_WANTED: Final = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.md",
)


def is_model_url(source: str) -> bool:
    """Whether `source` is `hf://NAMESPACE/NAME[@REVISION]`."""
    return source.startswith("hf://")


def fetch_model(url: str) -> tuple[Path, str]:
    """Fetch a model's weights and small files, all of one commit.

    Args:
        url: `hf://NAMESPACE/NAME`, at its newest commit, or `hf://NAMESPACE/NAME@REVISION`.

    Returns:
        The directory, and the URL with the revision pinned: `hf://NAMESPACE/NAME@<40 hex digits>`.

    Raises:
        MalformedError: another URL.
        UnsupportedError: huggingface_hub is not installed.
        StoreError: the Hub failed, denied access, or has no such model.
    """
    match = _MODEL.fullmatch(url)
    if match is None or match[1].startswith("buckets/"):
        raise MalformedError(
            ErrorCode.INPUT_INVALID, "a model's URL is hf://NAMESPACE/NAME@REVISION", where="source"
        )
    repository, revision = match[1], match[2]
    client = HubClient()
    try:
        info: Any = client.pursue(url, lambda: client.api.model_info(repository, revision=revision))
        if not re.fullmatch(r"[0-9a-f]{40}", info.sha or ""):
            raise StoreError(ErrorCode.STORE_FAILED, "the Hub names no commit for it", where=url)
        directory = client.pursue(
            url,
            lambda: client.api.snapshot_download(
                repository, revision=info.sha, allow_patterns=list(_WANTED), ignore_patterns=["original/*"]
            ),
        )
    except DeltaFormatError as error:
        if isinstance(error, KeyError):  # of a model, not of an object
            raise StoreError(
                ErrorCode.STORE_FAILED, "the Hub has no such model or revision", where=url
            ) from None
        raise
    return Path(directory), f"hf://{repository}@{info.sha}"
