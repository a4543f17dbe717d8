"""Write a checkpoint directory in the layout of Hugging Face: complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deltaformat.dtypes import get_dtype, tensor_nbytes
from deltaformat.durable import sync_directory, sync_file
from deltaformat.errors import (
    ConflictError,
    ErrorCode,
    InconsistentError,
    MalformedError,
    MissingError,
    UnsafeError,
    UnsupportedError,
)
from deltaformat.packs import METADATA, safetensors_header
from deltaformat.paths import check_sidecar_path
from deltaformat.tensors import HostTensor, TensorSpec, check_name

__all__ = [
    "INDEX_SUFFIX",
    "MAX_SHARD_BYTES",
    "SINGLE_FILE",
    "WEIGHTS_SUFFIX",
    "check_files",
    "is_weights",
    "lay_out_checkpoint",
    "write_checkpoint",
]

SINGLE_FILE = "model.safetensors"
WEIGHTS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
"""The size at which Hugging Face's own tools begin a new shard."""

# Loaders refuse headers above 100 MB. What an entry has beside its name stays below this.
_MAX_HEADER_BYTES = 90_000_000
_ENTRY_BYTES = 1_024
_OURS = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors|model\.safetensors\.index\.json", re.IGNORECASE)
# A name that this file system does not take: too long, not encodable, or there in another case.
_UNNAMEABLE = frozenset(
    (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.ENOENT)
)


@dataclass(frozen=True, slots=True)
class _Shard:
    file: str
    head: bytes
    size: int


@dataclass(frozen=True, slots=True)
class _Place:
    spec: TensorSpec
    shard: _Shard
    offset: int


def write_checkpoint(
    directory: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, HostTensor]],
    files: Mapping[str, Callable[[], bytes]] | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[str, ...]:
    """Write tensors and sidecar files to a new directory, one tensor in memory at a time.

    Everything is written beside the directory and takes its name at the end; after an error nothing is left.

    Args:
        directory: Where; it must not exist, or be empty.
        specs: All tensors that will come; shards are filled in this order.
        tensors: The tensors, each once, in any order (that of `specs` is fastest).
        files: Sidecar path -> what returns its bytes.
        max_shard_bytes: Begin a new shard rather than go beyond; a larger tensor has a shard of its own.
        progress: Called with tensor bytes written so far, and their total.

    Returns:
        The paths written, relative to the directory.

    Raises:
        ConflictError: The directory exists and has something in it.
        UnsafeError: A sidecar path that leaves the directory, or takes the place of weights (DF-MAN-10).
        UnsupportedError: A name that safetensors cannot hold.
        MissingError: The stream ended early.
        InconsistentError: The stream has a tensor that `specs` has not, or has otherwise, or a second time.
        MalformedError: Arguments that cannot be meant.
    """
    files = files or {}
    check_files(files)
    shards, places = _lay_out(specs, max_shard_bytes)
    target = Path(directory).resolve()
    _check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name[:64]}.{secrets.token_hex(8)}.partial"
    temporary.mkdir()
    try:
        written = _write_files(temporary, files)
        _write_shards(temporary, shards, places, tensors, progress)
        written += [shard.file for shard in shards]
        if len(shards) > 1:
            written.append(_write_index(temporary, places))
        for path in {temporary, *(temporary / name for name in files for name in _parents(name))}:
            sync_directory(path)
        _take_name(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(target.parent)
    return tuple(sorted(written))


def lay_out_checkpoint(
    directory: Path, specs: Sequence[TensorSpec], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[str]:
    """Make the weight files, and index, of a checkpoint whose tensors are filled in later.

    Args:
        directory: Where; it has no such files yet.
        specs: The tensors.
        max_shard_bytes: As for `write_checkpoint`.

    Returns:
        The files' names.

    Raises:
        UnsupportedError, MalformedError: As for `write_checkpoint`.
    """
    shards, places = _lay_out(specs, max_shard_bytes)
    for shard in shards:
        with (directory / shard.file).open("xb") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is told here, and not by a signal later
                os.posix_fallocate(file.fileno(), 0, shard.size)
            file.write(shard.head)
            file.truncate(shard.size)
            _sync(file)
    names = [shard.file for shard in shards]
    return [*names, _write_index(directory, places)] if len(shards) > 1 else names


def is_weights(name: str) -> bool:
    """Whether a file of that name, at the top of a checkpoint, is one of those that are written here."""
    return _OURS.fullmatch(name) is not None


def check_files(files: Iterable[str]) -> None:
    """Refuse sidecar paths with which no checkpoint directory could be written.

    Raises:
        UnsafeError: one leaves the directory, takes the place of weights, or needs a directory where another
            is a file (DF-MAN-10).
    """
    files = frozenset(files)
    for path in files:
        check_sidecar_path(path)
        if _OURS.fullmatch(path.split("/")[0]):
            raise _unsafe(path, "would take the place of the weights")
        for parent in _parents(path):
            if parent in files:
                raise _unsafe(path, f"needs a directory where {parent[:100]!a} is a file")


def _unsafe(path: str, problem: str) -> UnsafeError:
    return UnsafeError(ErrorCode.PATH_UNSAFE, f"sidecar path {path[:100]!a} {problem}")


def _parents(path: str) -> list[str]:
    segments = path.split("/")
    return ["/".join(segments[:i]) for i in range(1, len(segments))]


def _check_target(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir() or any(target.iterdir()):
        problem = "it exists and is not an empty directory; give a new one"
        raise ConflictError(ErrorCode.ALREADY_EXISTS, problem, where=str(target))
    if os.path.ismount(target):
        problem = "a mount point cannot be replaced; give a directory in it"
        raise MalformedError(ErrorCode.INPUT_INVALID, problem, where=str(target))


def _lay_out(specs: Sequence[TensorSpec], max_shard_bytes: int) -> tuple[list[_Shard], dict[str, _Place]]:
    """Divide the tensors among shards, and say where each goes."""
    if max_shard_bytes < 1:
        raise MalformedError(ErrorCode.INPUT_INVALID, "it must be positive", where="max_shard_bytes")
    groups: list[list[TensorSpec]] = [[]]
    data = header = 0
    seen: set[str] = set()
    for spec in specs:
        if spec.name == METADATA:
            raise UnsupportedError(
                ErrorCode.NOT_SUPPORTED,
                f"safetensors keeps the name {METADATA} for itself; read this tensor with get_tensor",
                where=f"tensor {METADATA}",
            )
        if check_name(spec.name) in seen:
            raise MalformedError(ErrorCode.INPUT_INVALID, f"tensor {spec.name[:100]!a} is listed twice")
        seen.add(spec.name)
        nbytes = _nbytes(spec)
        entry = len(json.dumps(spec.name, ensure_ascii=False).encode()) + _ENTRY_BYTES
        if groups[-1] and (data + nbytes > max_shard_bytes or header + entry > _MAX_HEADER_BYTES):
            groups.append([])
            data = header = 0
        groups[-1].append(spec)
        data += nbytes
        header += entry
    shards: list[_Shard] = []
    places: dict[str, _Place] = {}
    for number, group in enumerate(groups, 1):
        # The widest first: then every tensor is aligned to its elements.
        group.sort(key=lambda spec: -get_dtype(spec.dtype).bits)
        head = safetensors_header(
            [(spec.name, spec.dtype, spec.shape, _nbytes(spec)) for spec in group], {"format": "pt"}
        )
        file = SINGLE_FILE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}{WEIGHTS_SUFFIX}"
        shard = _Shard(file, head, len(head) + sum(map(_nbytes, group)))
        shards.append(shard)
        offset = len(head)
        for spec in group:
            places[spec.name] = _Place(spec, shard, offset)
            offset += _nbytes(spec)
    return shards, places


def _nbytes(spec: TensorSpec) -> int:
    return tensor_nbytes(get_dtype(spec.dtype), spec.shape)


def _write_files(directory: Path, files: Mapping[str, Callable[[], bytes]]) -> list[str]:
    for path, read in files.items():
        content = read()
        try:
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(content)
                _sync(file)
        except OSError as error:
            if error.errno not in _UNNAMEABLE:
                raise
            raise _unsafe(path, f"cannot be a file here ({error.strerror})") from error
    return list(files)


def _write_shards(
    directory: Path,
    shards: Sequence[_Shard],
    places: Mapping[str, _Place],
    tensors: Iterable[tuple[str, HostTensor]],
    progress: Callable[[int, int], object] | None,
) -> None:
    for shard in shards:
        with (directory / shard.file).open("xb") as file:
            file.write(shard.head)
            file.truncate(shard.size)
    total = sum(shard.size - len(shard.head) for shard in shards)
    done = 0
    pending = dict(places)
    with contextlib.ExitStack() as opened:
        current: tuple[_Shard, BinaryIO] | None = None
        for name, tensor in tensors:
            place = _expected(name, tensor, pending)
            if current is None or current[0] is not place.shard:
                opened.close()
                current = place.shard, opened.enter_context((directory / place.shard.file).open("r+b"))
            current[1].seek(place.offset)
            current[1].write(tensor.data.data)
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
    if pending:
        raise MissingError(
            ErrorCode.TENSOR_MISSING,
            f"{len(pending)} tensors did not come, {next(iter(pending))[:100]!a} among them",
        )
    for shard in shards:
        with (directory / shard.file).open("r+b") as file:
            _sync(file)


def _expected(name: str, tensor: HostTensor, pending: dict[str, _Place]) -> _Place:
    place = pending.pop(name, None)
    where = f"tensor {name[:100]!a}"
    if place is None:
        raise InconsistentError(ErrorCode.PARTS_DISAGREE, "it was not announced, or came twice", where=where)
    announced = place.spec.dtype, tuple(place.spec.shape)
    if (tensor.dtype, tensor.shape) != announced:
        raise InconsistentError(
            ErrorCode.PARTS_DISAGREE,
            f"{tensor.dtype} {list(tensor.shape)} came; {announced[0]} {list(announced[1])} was announced",
            where=where,
        )
    return place


def _write_index(directory: Path, places: Mapping[str, _Place]) -> str:
    index = {
        "metadata": {"total_size": sum(_nbytes(place.spec) for place in places.values())},
        "weight_map": {name: places[name].shard.file for name in sorted(places)},
    }
    file = "model" + INDEX_SUFFIX
    with (directory / file).open("xb") as stream:
        stream.write(json.dumps(index, indent=2).encode() + b"\n")
        _sync(stream)
    return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    sync_file(file.fileno())


def _take_name(temporary: Path, target: Path) -> None:
    try:
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        problem = "something was put there in the meantime; give a new one"
        raise ConflictError(ErrorCode.ALREADY_EXISTS, problem, where=str(target)) from error
