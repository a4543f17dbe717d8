"""Sidecar files of a version: config.json, a tokenizer, anything small that must travel with the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from deltaformat.errors import ErrorCode, MalformedError
from deltaformat.keys import file_key
from deltaformat.packs import FileRef
from deltaformat.paths import check_sidecar_path
from deltaformat.storage import Storage

__all__ = ["Files", "UploadedFiles", "upload_files"]

Files = Mapping[str, "str | PathLike[str] | bytes"]


@dataclass(frozen=True, slots=True)
class UploadedFiles:
    """A version's file table, and what had to be written for it."""

    refs: tuple[FileRef, ...]
    objects: int
    nbytes: int


def upload_files(storage: Storage, files: Files, *, claim: int, parent: tuple[FileRef, ...]) -> UploadedFiles:
    """Make files durable under `claim`; content that the parent version has is not written again.

    Args:
        storage: Where to.
        files: Path in the version -> a local path, or the content itself as bytes.
        claim: seq of the writer's claim.
        parent: The parent version's file table.

    Raises:
        UnsafeError: a path that could leave a directory (path-unsafe).
        MalformedError: a local file that cannot be read (input-invalid).
        StoreError: the store failed.
    """
    known = {(ref.key.rpartition("/")[2], ref.size): ref.key for ref in parent}
    refs: dict[str, FileRef] = {}
    objects = nbytes = 0
    for path, source in sorted(files.items()):
        check_sidecar_path(path)
        content = source if isinstance(source, bytes) else _read(path, source)
        sha256 = hashlib.sha256(content).hexdigest()
        key = known.get((sha256, len(content)))
        if key is None:
            key = file_key(claim, sha256)
            storage.put(key, content)
            known[sha256, len(content)] = key
            objects += 1
            nbytes += len(content)
        refs[path] = FileRef(path, key, len(content))
    return UploadedFiles(tuple(refs.values()), objects, nbytes)


def _read(path: str, source: str | PathLike[str]) -> bytes:
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"cannot read {str(source)!r} ({error.strerror}); give a readable file or bytes",
            where=f"file {path}",
        ) from error
