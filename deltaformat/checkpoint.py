"""Checkpoints as files: a safetensors file or a Hugging Face directory, mapped and read lazily.

A directory may come from anywhere. What it names is read only where it lies in the directory itself: a link
or an index entry that leads out could carry a private file into a store. The one way out is that of the
Hugging Face cache, whose snapshots are links into the `blobs` of the same repository.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltaformat.errors import (
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    MissingError,
    UnsafeError,
)
from deltaformat.export import INDEX_SUFFIX, SINGLE_FILE, WEIGHTS_SUFFIX
from deltaformat.ijson import parse_object
from deltaformat.packs import SafetensorsEntry, parse_safetensors
from deltaformat.paths import check_sidecar_path
from deltaformat.tensors import HostTensor, TensorSpec, check_name

__all__ = ["Checkpoint", "TensorLocation", "open_checkpoint", "read_index"]

_MAX_INDEX_BYTES = 1 << 28
_MAX_ENTRIES = 10_000
_MAX_DEPTH = 16
_SHOWN = 3
# Weights, optimizer states and exports of other frameworks: never sidecars, whatever their size.
_FOREIGN = re.compile(
    r"\.(bin|ckpt|distcp|engine|gguf|ggml|h5|keras|mlmodel|msgpack|nemo|onnx|onnx_data|ot|pb|pdparams|pickle|pkl"
    r"|pt|pt2|pte|pth|tflite|torchscript|index\.json)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor's canonical bytes lie: `nbytes` from `offset` of `file`."""

    file: Path
    offset: int
    nbytes: int


class Checkpoint(Mapping[str, HostTensor]):
    """The tensors of a checkpoint by name, in the order of their bytes, and its sidecar files.

    A tensor's data is a view of the mapped file: nothing is read before it is looked at, nothing is copied,
    and it stays valid for as long as it is referred to. The files must not be changed meanwhile.

    Attributes:
        path: What was opened.
        files: The weight files, in order.
        notes: What lies beside them and is not part of the checkpoint, one sentence each.
    """

    def __init__(
        self,
        path: Path,
        files: tuple[Path, ...],
        entries: Mapping[str, tuple[int, SafetensorsEntry]],
        maps: tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], ...],
        sidecars: Mapping[str, Path],
        notes: tuple[str, ...],
    ) -> None:
        self.path = path
        self.files = files
        self.notes = notes
        self._entries = entries
        self._maps = maps
        self._sidecars = sidecars

    def __getitem__(self, name: str) -> HostTensor:
        file, entry = self._entry(name)
        return HostTensor(entry.dtype, entry.shape, self._maps[file][entry.start : entry.end])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def specs(self) -> list[TensorSpec]:
        """Name, dtype and shape of every tensor, in order."""
        return [TensorSpec(name, entry.dtype, entry.shape) for name, (_, entry) in self._entries.items()]

    def location(self, name: str) -> TensorLocation:
        """Where the bytes of tensor `name` are, for a store that refers to them instead of copying them."""
        file, entry = self._entry(name)
        return TensorLocation(self.files[file], entry.start, entry.end - entry.start)

    def sidecars(self) -> dict[str, Path]:
        """The other files of a directory: path in the checkpoint (always with `/`) -> file."""
        return dict(self._sidecars)

    def _entry(self, name: str) -> tuple[int, SafetensorsEntry]:
        try:
            return self._entries[name]
        except KeyError:
            raise MissingError(
                ErrorCode.TENSOR_MISSING, f"no tensor {name[:100]!a} in this checkpoint", where=str(self.path)
            ) from None


def open_checkpoint(path: str | os.PathLike[str], *, follow_links: bool = False) -> Checkpoint:
    """Open a safetensors file, an index file, or a directory in the layout of Hugging Face.

    In a directory `model.safetensors` or the index of that name decides; without them the only index, or the
    only safetensors file, at the top. All headers are read and checked now, tensors when they are looked at.

    Args:
        path: The file or directory.
        follow_links: Also read what symbolic links to files outside the directory lead to. Only for
            directories whose links are your own.

    Raises:
        MissingError: The path, a shard, or a tensor that the index names is not there.
        InconsistentError: Index and shards, or two choices of weights, contradict each other.
        UnsafeError: An index entry, a link or a sidecar's name that leads out of the directory.
        MalformedError: A broken index or safetensors file.
        UnsupportedError: A dtype outside SPEC 8.1.
        LimitError: More, or larger, files than a checkpoint has.
    """
    path = Path(path)
    if path.is_dir():
        return _Directory(path, follow_links).open()
    if path.name.endswith(INDEX_SUFFIX):
        return _Directory(path.parent, follow_links).open(index=path)
    return _load(path, (path,), None, {}, ())


class _Directory:
    """What lies in a checkpoint's directory, and the rule which of it may be read."""

    def __init__(self, path: Path, follow_links: bool) -> None:
        self._path = path
        self._root = path.resolve()
        self._follow_links = follow_links
        self._weights: dict[str, Path] = {}
        self._indexes: dict[str, Path] = {}
        self._sidecars: dict[str, Path] = {}
        self._notes: list[str] = []
        self._seen = 0

    def open(self, index: Path | None = None) -> Checkpoint:
        """Open what `index`, or the directory itself, says the weights are."""
        self._scan(self._path, "", 0)
        chosen = index or self._choose()
        expected = None
        if chosen.name.endswith(INDEX_SUFFIX):
            names = read_index(chosen)
            shards = sorted(set(names.values()))
            number = {shard: i for i, shard in enumerate(shards)}
            expected = {name: number[shard] for name, shard in names.items()}
            files = tuple(self._readable(self._path / shard) for shard in shards)
            if index is None and SINGLE_FILE in self._weights and SINGLE_FILE not in shards:
                raise self._ambiguous([SINGLE_FILE, chosen.name])
        else:
            files = (chosen,)
        used = {*files, chosen}
        for name in sorted(self._weights.keys() | self._indexes.keys()):
            if self._path / name not in used:
                self._notes.append(f"{_shown(name)} is not imported: {chosen.name} does not name it")
        return _load(self._path, files, expected, self._sidecars, tuple(self._notes))

    def _choose(self) -> Path:
        usual = SINGLE_FILE.removesuffix(WEIGHTS_SUFFIX) + INDEX_SUFFIX
        if usual in self._indexes:
            return self._readable(self._indexes[usual])
        if SINGLE_FILE in self._weights:
            return self._readable(self._weights[SINGLE_FILE])
        for candidates in (self._indexes, self._weights):
            at_top = [name for name in candidates if "/" not in name]
            if len(at_top) > 1:
                raise self._ambiguous(at_top)
            if at_top:
                return self._readable(candidates[at_top[0]])
        problem = f"there is no {SINGLE_FILE} and no index; give a checkpoint's directory, or a file"
        raise MissingError(ErrorCode.FILE_MISSING, problem, where=str(self._path))

    def _ambiguous(self, names: list[str]) -> InconsistentError:
        problem = f"several could be the weights: {_listed(names)}; open the one that is meant"
        return InconsistentError(ErrorCode.PARTS_DISAGREE, problem, where=str(self._path))

    def _scan(self, directory: Path, prefix: str, depth: int) -> None:
        try:
            with os.scandir(directory) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError as error:
            problem = f"it cannot be read ({error.strerror})"
            raise MalformedError(ErrorCode.INPUT_INVALID, problem, where=str(directory)) from error
        self._seen += len(entries)
        if depth > _MAX_DEPTH or self._seen > _MAX_ENTRIES:
            problem = (
                f"more than {_MAX_ENTRIES} files, or directories {_MAX_DEPTH} deep; "
                "give a directory that holds nothing but a checkpoint"
            )
            raise LimitError(ErrorCode.LIMIT_EXCEEDED, problem, where=str(directory))
        for entry in entries:
            name, path = f"{prefix}{entry.name}", directory / entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                self._scan(path, f"{name}/", depth + 1)
            elif path.is_dir():
                self._notes.append(f"{_shown(name)} is not imported: it is a link to a directory")
            else:
                self._classify(name, path)

    def _classify(self, name: str, path: Path) -> None:
        if name.endswith(WEIGHTS_SUFFIX):
            self._weights[name] = path
        elif name.endswith(INDEX_SUFFIX):
            self._indexes[name] = path
        elif _FOREIGN.search(name):
            self._notes.append(f"{_shown(name)} is not imported: it is another framework's")
        elif not stat.S_ISREG(self._readable(path).stat().st_mode):
            self._notes.append(f"{_shown(name)} is not imported: it is no regular file")
        else:
            self._sidecars[check_sidecar_path(name, where=str(self._path))] = path

    def _readable(self, path: Path) -> Path:
        """Return `path` if it is there and, links followed, in the directory (DF-SEC-01)."""
        target = _resolve(path)
        if not self._follow_links and not self._holds(target):
            raise UnsafeError(
                ErrorCode.PATH_UNSAFE,
                f"it is a link that leaves the directory, to {target}; put the file itself there",
                where=str(path),
            )
        return path

    def _holds(self, target: Path) -> bool:
        if target.is_relative_to(self._root):
            # A visible name for a hidden file would get around that hidden files stay out.
            return not any(part.startswith(".") for part in target.relative_to(self._root).parts)
        repository = self._root.parent.parent
        blobs = repository / "blobs"
        return self._root.parent.name == "snapshots" and target.parent == blobs and blobs.resolve() == blobs


def _resolve(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except FileNotFoundError:
        raise MissingError(ErrorCode.FILE_MISSING, "there is no such file", where=str(path)) from None
    except (OSError, RuntimeError) as error:  # a loop of links is one or the other, by Python's version
        raise MalformedError(
            ErrorCode.INPUT_INVALID, f"it cannot be read ({error})", where=str(path)
        ) from error


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, by an index.

    Raises:
        MalformedError, LimitError: It is no index.
        UnsafeError: It leads out of its directory.
    """
    data = bytes(_map(path, limit=_MAX_INDEX_BYTES))
    names = parse_object(data, where=str(path), limit=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
        raise MalformedError(
            ErrorCode.JSON_INVALID, "`weight_map` is not an object of file names", where=str(path)
        )
    for shard in set(names.values()):
        check_sidecar_path(shard, where=str(path))
    return names


def _map(path: Path, limit: int | None = None) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Map a regular file; an empty one gives an empty array."""
    try:
        # Opening a pipe would wait for a writer.
        if not stat.S_ISREG(_resolve(path).stat().st_mode):
            raise MalformedError(ErrorCode.INPUT_INVALID, "it is no regular file", where=str(path))
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if limit is not None and size > limit:
                raise LimitError(
                    ErrorCode.LIMIT_EXCEEDED,
                    f"has {size} bytes, at most {limit} are allowed",
                    where=str(path),
                )
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise MalformedError(
            ErrorCode.INPUT_INVALID, f"it cannot be read ({error.strerror})", where=str(path)
        ) from error
    return np.frombuffer(mapped, np.uint8)


def _load(
    path: Path,
    files: tuple[Path, ...],
    expected: Mapping[str, int] | None,
    sidecars: Mapping[str, Path],
    notes: tuple[str, ...],
) -> Checkpoint:
    """Read all headers; `expected` says in which file an index wants each tensor."""
    maps = tuple(_map(file) for file in files)
    headers = [
        parse_safetensors(data, data.size, where=str(file)).tensors
        for file, data in zip(files, maps, strict=True)
    ]
    if expected is not None:
        _compare(files, headers, expected)
    entries = {
        check_name(name): (i, entry) for i, header in enumerate(headers) for name, entry in header.items()
    }
    return Checkpoint(path, files, entries, maps, sidecars, notes)


def _compare(
    files: tuple[Path, ...],
    headers: list[dict[str, SafetensorsEntry]],
    expected: Mapping[str, int],
) -> None:
    missing = [name for name, file in expected.items() if name not in headers[file]]
    if missing:
        file = files[expected[missing[0]]]
        raise MissingError(
            ErrorCode.TENSOR_MISSING,
            f"the index names tensors that their shards lack: {_listed(missing)}; fetch the shards again",
            where=str(file),
        )
    for i, header in enumerate(headers):
        for name in header:
            if name not in expected:
                raise _contradiction(files[i], name, "the index does not name it; mend the index")
            if expected[name] != i:
                raise _contradiction(files[i], name, f"{files[expected[name]].name} has it too; remove one")


def _contradiction(file: Path, name: str, problem: str) -> InconsistentError:
    return InconsistentError(ErrorCode.PARTS_DISAGREE, f"tensor {_shown(name)}: {problem}", where=str(file))


def _shown(name: str) -> str:
    text = ascii(name)
    return text if len(text) <= 100 else text[:100] + "..."


def _listed(names: list[str]) -> str:
    first = [_shown(name) for _, name in zip(range(_SHOWN), names, strict=False)]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
