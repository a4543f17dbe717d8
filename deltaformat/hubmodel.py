"""Model repositories of the Hugging Face Hub as checkpoints to import: fetched into the Hub's own cache."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deltaformat.checkpoint import read_index
from deltaformat.errors import DeltaFormatError, ErrorCode, MalformedError, StoreError
from deltaformat.export import INDEX_SUFFIX, SINGLE_FILE, WEIGHTS_SUFFIX
from deltaformat.external import HUB_NAME
from deltaformat.hubclient import HubClient

__all__ = ["FetchedModel", "fetch_model", "is_model_url"]

_MODEL = re.compile(rf"hf://({HUB_NAME}/{HUB_NAME})(?:@([A-Za-z0-9._/-]{{1,200}}))?/?")
_INDEX: Final = SINGLE_FILE.removesuffix(WEIGHTS_SUFFIX) + INDEX_SUFFIX
_BESIDE: Final = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".md", ".py")  # as sidecar files
_OTHERS: Final = "original/"  # the same weights in another framework's layout


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model's files in the Hub's cache.

    Attributes:
        path: The directory.
        url: Where it is from, with the revision pinned: `hf://NAMESPACE/NAME@<40 hex digits>`.
        left_out: Files of the model that were not fetched.
    """

    path: Path
    url: str
    left_out: tuple[str, ...]


def is_model_url(source: str) -> bool:
    """Whether `source` is `hf://NAMESPACE/NAME[@REVISION]`."""
    return source.startswith("hf://")


def fetch_model(url: str) -> FetchedModel:
    """Fetch a model's weights and small files, all of one commit.

    Where there is the usual index and no single file, the weights are the files that it names: some models
    have the same again in other files. Else they are all files of weights.

    Args:
        url: `hf://NAMESPACE/NAME`, at its newest commit, or `hf://NAMESPACE/NAME@REVISION`.

    Raises:
        MalformedError: another URL, or an index that is none.
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

    def fetch(names: Iterable[str]) -> Path:
        patterns = [glob.escape(name) for name in names]
        found = client.pursue(
            url,
            lambda: client.api.snapshot_download(repository, revision=info.sha, allow_patterns=patterns),
        )
        return Path(found)

    try:
        info: Any = client.pursue(url, lambda: client.api.model_info(repository, revision=revision))
        if not re.fullmatch(r"[0-9a-f]{40}", info.sha or ""):
            raise StoreError(ErrorCode.STORE_FAILED, "the Hub names no commit for it", where=url)
        names = {sibling.rfilename for sibling in info.siblings or ()}
        wanted = {
            name
            for name in names
            if name.endswith((WEIGHTS_SUFFIX, *_BESIDE)) and not name.startswith(_OTHERS)
        }
        if _INDEX in names and SINGLE_FILE not in names:
            shards = set(read_index(fetch([_INDEX]) / _INDEX).values())
            wanted = {name for name in wanted if name in shards or not name.endswith(WEIGHTS_SUFFIX)}
        directory = fetch(sorted(wanted))
    except DeltaFormatError as error:
        if isinstance(error, KeyError):  # of a model, not of an object
            raise StoreError(
                ErrorCode.STORE_FAILED, "the Hub has no such model or revision", where=url
            ) from None
        raise
    left_out = tuple(sorted(names - wanted - {".gitattributes"}))
    return FetchedModel(directory, f"hf://{repository}@{info.sha}", left_out)
