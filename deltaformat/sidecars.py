"""Sidecar files of a version: config.json, a tokenizer, anything small that must travel with the weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from deltaformat.errors import ErrorCode, LimitError, MalformedError
from deltaformat.export import check_files
from deltaformat.keys import file_key
from deltaformat.localstorage import open_regular
from deltaformat.packs import FileRef
from deltaformat.storage import Storage

__all__ = ["Files", "UploadedFiles", "check_sources", "upload_files"]

MAX_FILE_BYTES = 1 << 30
"""A sidecar file is held in memory whole; a larger one was hardly meant."""

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
        MalformedError: a local file that cannot be read (input-invalid).
        LimitError: one of more than `MAX_FILE_BYTES`.
        StoreError: the store failed.
    """
    known = {(ref.key.rpartition("/")[2], ref.size): ref.key for ref in parent}
    refs: dict[str, FileRef] = {}
    objects = nbytes = 0
    for path, source in sorted(files.items()):
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


def check_sources(files: Files) -> None:
    """Refuse files that cannot be a version's sidecars, before any work is done.

    Raises:
        UnsafeError: a path that no directory could have (path-unsafe).
        MalformedError: a source that is neither bytes nor the path of a file (input-invalid).
    """
    if not isinstance(files, Mapping) or not all(isinstance(path, str) for path in files):
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            "give a mapping: path in the version -> local path or bytes",
            where="files",
        )
    check_files(files)
    for path, source in files.items():
        if isinstance(source, bytes):
            continue
        if not isinstance(source, str | PathLike) or not Path(source).is_file():
            raise MalformedError(
                ErrorCode.INPUT_INVALID,
                f"{source!r} is neither bytes nor a file's path",
                where=f"file {path}",
            )


def _read(path: str, source: str | PathLike[str]) -> bytes:
    try:
        with open(source, "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise LimitError(
                    ErrorCode.LIMIT_EXCEEDED,
                    f"{str(source)!r} has {size} bytes, above the {MAX_FILE_BYTES} of a sidecar file; "
                    "store weights as tensors",
                    where=f"file {path}",
                )
            return file.read()
    except OSError as error:
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"cannot read {str(source)!r} ({error.strerror}); give a readable file or bytes",
            where=f"file {path}",
        ) from error
