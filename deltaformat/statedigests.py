"""Digests and root of a state wherever its tensors are: on a device they are computed there (SPEC 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltaformat.blocks import Bytes, block_count, name_bytes
from deltaformat.digests import digest_blocks, get_digest, tensor_leaf, version_root
from deltaformat.errors import CorruptError, DeltaFormatError, ErrorCode, InconsistentError
from deltaformat.gpu.engines import Engine, on_device
from deltaformat.gpu.hashing import hash_blocks
from deltaformat.tensors import check_name, to_host
from deltaformat.torchtensors import describe, is_torch
from deltaformat.versionmap import VersionMap

__all__ = ["TensorDigests", "check_described", "check_state", "digest_state", "root_of"]

_SHOWN = 200


@dataclass(frozen=True, slots=True, eq=False)
class TensorDigests:
    """What identifies a tensor: dtype name, logical shape, and digests, one row per block."""

    dtype: str
    shape: tuple[int, ...]
    digests: Bytes


def digest_state(
    tensors: Mapping[str, Any], *, block_bytes: int, digest: str, engine: Engine = "auto"
) -> dict[str, TensorDigests]:
    """Digest the blocks of every tensor of a state.

    Args:
        tensors: Name to tensor, of any framework and device.
        block_bytes: The block size.
        digest: Name of the digest.
        engine: `auto` hashes tensors on a device there, and others on the host; another hashes torch tensors
            of the host by that engine, too.

    Raises:
        UnsupportedError, MalformedError: A tensor or name that cannot be stored, or an engine that cannot
            serve.
    """
    algorithm = get_digest(digest, where="digest")
    remote = [
        name
        for name, tensor in tensors.items()
        if is_torch(tensor) and (engine != "auto" or on_device(tensor))
    ]
    described = {name: _describe(name, tensors[name]) for name in remote}
    rows = hash_blocks(
        [tensors[name] for name in remote], block_bytes=block_bytes, algorithm=digest, engine=engine
    ) if remote else np.empty((0, algorithm.size), np.uint8)  # fmt: skip
    found: dict[str, TensorDigests] = {}
    done = 0
    for name, tensor in tensors.items():
        if name in described:
            count = block_count(tensor.numel() * tensor.element_size(), block_bytes)
            found[name] = TensorDigests(*described[name], rows[done : done + count])
            done += count
        else:
            host = to_host(name, tensor)
            digests = digest_blocks(host.data, block_bytes, algorithm)
            found[name] = TensorDigests(host.dtype, host.shape, digests)
    return found


def _describe(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    check_name(name)
    try:
        return describe(tensor)
    except DeltaFormatError as error:
        raise type(error)(error.code, error.message, where=f"tensor {name[:_SHOWN]!a}") from None


def root_of(state: Mapping[str, TensorDigests], *, block_bytes: int, digest: str) -> str:
    """The printed root of a state (SPEC 7.1)."""
    leaves = (
        (name_bytes(name), tensor_leaf(name, found.dtype, found.shape, found.digests))
        for name, found in state.items()
    )
    return version_root(digest, block_bytes, leaves)


def check_described(state: Mapping[str, TensorDigests], version: VersionMap) -> None:
    """Compare a state's names, dtypes and shapes with a version's.

    Raises:
        InconsistentError: They differ (parts-disagree).
    """
    lacks = sorted(version.index.keys() - state.keys())
    more = sorted(state.keys() - version.index.keys())
    if lacks or more:
        parts = [(lacks, "lacks"), (more, "has besides")]
        said = [f"{verb} {_some(names)}" for names, verb in parts if names]
        raise InconsistentError(
            ErrorCode.PARTS_DISAGREE,
            f"the state {' and '.join(said)}; pass exactly the version's tensors",
            where="state",
        )
    for name, found in state.items():
        row = version.index[name]
        dtype, shape = version.dtypes[row], version.shapes[row]
        if (found.dtype, found.shape) != (dtype, shape):
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE,
                f"{found.dtype} of shape {list(found.shape)}, where the version has {dtype} of shape"
                f" {list(shape)}",
                where=f"tensor {name[:_SHOWN]!a}",
            )


def check_state(state: Mapping[str, TensorDigests], version: VersionMap) -> None:
    """Compare a state with a version: names, dtypes, shapes, and the digest of every block.

    Raises:
        InconsistentError: Names, a dtype or a shape differ (parts-disagree).
        CorruptError: A block differs (digest-mismatch); it names the first one and counts all.
    """
    check_described(state, version)
    differing: list[tuple[str, int]] = []
    count = 0
    for name, found in state.items():
        row = version.index[name]
        expected = version.digest[version.block_start[row] : version.block_start[row + 1]]
        bad = np.flatnonzero((found.digests != expected).any(axis=1))
        count += bad.size
        if bad.size and not differing:
            differing.append((name, int(bad[0])))
    if differing:
        name, block = differing[0]
        others = f" ({count} blocks do)" if count > 1 else ""
        raise CorruptError(
            ErrorCode.DIGEST_MISMATCH,
            f"the block differs from the version's{others}; the state is not this version",
            where=f"tensor {name[:_SHOWN]!a}, block {block}",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0][:_SHOWN]!a}{more}"
