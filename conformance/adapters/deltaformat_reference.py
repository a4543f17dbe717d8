#!/usr/bin/env python3
"""The adapter of the reference implementation: an example of what PROTOCOL.md asks for.

It needs `deltaformat` to be importable; without the extra `blake3` it claims reader-core alone. Environment
variables choose its other configurations: DELTAFORMAT_NATIVE=0 NumPy alone, DELTAFORMAT_ADAPTER_THREADS the
number of decoding threads, DELTAFORMAT_ADAPTER_SINGLY=1 to read tensor by tensor.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import deltaformat as df
from deltaformat.dtypes import get_dtype
from deltaformat.errors import DeltaFormatError
from deltaformat.selection import select as select_blocks
from deltaformat.tensors import to_host

THREADS = int(os.environ.get("DELTAFORMAT_ADAPTER_THREADS", "2"))
SINGLY = os.environ.get("DELTAFORMAT_ADAPTER_SINGLY") == "1"


class NotRefusedError(Exception):
    """A step of a script that should have been refused."""


class ReadFailedError(Exception):
    """A `follow` that failed after `from` had been read."""

    def __init__(self, error: DeltaFormatError, held: Mapping[str, df.TensorBytes]) -> None:
        super().__init__(str(error))
        self.error, self.held = error, held


def sha256(data: Any) -> str:
    """hex(SHA-256) of anything that is bytes."""
    return hashlib.sha256(data).hexdigest()


def by_bytes(names: Iterable[str]) -> list[str]:
    """Sorted as UTF-8 byte strings."""
    return sorted(names, key=str.encode)


def open_store(request: Mapping[str, Any]) -> df.Store:
    """The store of a request."""
    return df.open(request["store"], allow_external=request.get("allow", ()), threads=THREADS)


def open_version(store: df.Store, at: Mapping[str, Any]) -> df.Version:
    """The version that an `at` names."""
    return store.version(**at)


def describe(
    version: df.Version, tensors: Mapping[str, df.TensorBytes] | None, files: bool
) -> dict[str, Any]:
    """The reply of `read`; of `open` where `tensors` is None."""
    rows = []
    for name in by_bytes(version.keys() if tensors is None else tensors):
        info = version.info(name)
        row: dict[str, Any] = {
            "name": name,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "nbytes": info.nbytes,
        }
        if tensors is not None:
            row["sha256"] = sha256(tensors[name].data)
        rows.append(row)
    found = []
    for path in by_bytes(version.files()) if files else []:
        entry: dict[str, Any] = {"path": path, "size": version.files()[path].size}
        if tensors is not None:
            entry["sha256"] = sha256(version.read_file(path))
        found.append(entry)
    return {"seq": version.seq, "step": version.step, "root": version.root, "tensors": rows, "files": found}


def read(request: Mapping[str, Any]) -> dict[str, Any]:
    """A version, whole or some tensors of it."""
    chosen = request["select"]
    with open_version(open_store(request), request["at"]) as version:
        names = version.keys() if chosen is None else chosen
        tensors = {n: version.get_bytes(n) for n in names} if SINGLY else version.get_many(names)
        return describe(version, tensors, files=chosen is None)


def open_only(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a version has, without its content."""
    with open_version(open_store(request), request["at"]) as version:
        return describe(version, None, files=True)


def slice_(request: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a tensor."""
    with open_version(open_store(request), request["at"]) as version:
        name = request["tensor"]
        info = version.info(name)
        key = tuple(slice(start, stop) for start, stop in request["ranges"])
        selection = select_blocks(
            info.shape, get_dtype(info.dtype), key, block_bytes=version._block_bytes, where=name
        )
        data = version._read_slice(name, selection)
        shape = list(selection.shape)
        return {"dtype": info.dtype, "shape": shape, "nbytes": data.nbytes, "sha256": sha256(data)}


def follow(request: Mapping[str, Any]) -> dict[str, Any]:
    """From one version to another."""
    store = open_store(request)
    with open_version(store, request["from"]) as previous:
        held = previous.get_many(previous.keys())
        try:
            with open_version(store, request["at"]) as version:
                followed = version.follow(previous, held)
                tensors = {
                    name: df.TensorBytes(
                        version.info(name).dtype, version.info(name).shape, to_host(name, a).data
                    )
                    for name, a in followed.items()
                }
                return describe(version, tensors, files=True)
        except DeltaFormatError as error:
            raise ReadFailedError(error, held) from error


def newest(store: df.Store) -> int:
    """The newest record's number; -1 where there is none."""
    return store._context.log.tail().seq


def hello(request: Mapping[str, Any]) -> dict[str, Any]:
    """Who this is."""
    name, profiles = f"deltaformat {df.__version__}", ["reader-core", "reader-full", "writer"]
    if importlib.util.find_spec("blake3") is None:  # its digest is part of the other profiles
        name, profiles = f"{name} without deltaformat[blake3]", ["reader-core"]
    return {"implementation": name, "profiles": profiles, "features": ["file-url"]}


def state(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the log says."""
    store = open_store(request)
    branches = {
        name: {"seq": head.seq, "step": head.step, "epoch": head.epoch}
        for name, head in store.branches().items()
    }
    seq = newest(store)
    return {"newest": None if seq < 0 else seq, "branches": branches, "tags": store.tags()}


def write(request: Mapping[str, Any]) -> dict[str, Any]:
    """Make a store by a script."""
    script = Script(request["store"])
    try:
        return {"seqs": [script.run(number, step) for number, step in enumerate(request["script"])]}
    finally:
        script.close()


class Script:
    """A `write` script under way."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._store: df.Store | None = None
        self._writers: dict[str, df.Writer] = {}

    def run(self, number: int, step: Mapping[str, Any]) -> int | None:
        """One step; its seq."""
        expected = step.get("expect")
        try:
            seq: int | None = getattr(self, step["do"])(step)
        except DeltaFormatError as error:
            if error.code.error_class != expected:
                raise
            return None
        if expected is not None:
            raise NotRefusedError(f"step {number} ({step['do']}) was not refused as {expected}")
        return seq

    def close(self) -> None:
        """Let go of every branch."""
        for writer in self._writers.values():
            writer.close()

    @property
    def store(self) -> df.Store:
        """The store, once it has been made."""
        assert self._store is not None, "the script begins with `create`"
        return self._store

    def create(self, step: Mapping[str, Any]) -> None:
        """Make the store."""
        self._store = df.create(self._path, digest=step["digest"], block_bytes=step["block_bytes"])

    def claim(self, step: Mapping[str, Any]) -> int:
        """A writer takes a branch."""
        writer = self.store.writer(step["branch"], resume_from=step["resume_from"])
        self._writers[step["writer"]] = writer
        return writer.ticket.claim

    def commit(self, step: Mapping[str, Any]) -> int:
        """A writer commits."""
        tensors = {
            t["name"]: df.TensorBytes(t["dtype"], t["shape"], base64.b64decode(t["data"], validate=True))
            for t in step["tensors"]
        }
        info = self._writers[step["writer"]].commit(
            step=step["step"],
            tensors=tensors,
            files={f["path"]: base64.b64decode(f["data"], validate=True) for f in step["files"]},
            metadata=step["metadata"],
            allow_set_change=step["allow_set_change"],
        )
        return info.seq

    def fork(self, step: Mapping[str, Any]) -> int:
        """A branch begins."""
        self.store.fork(step["branch"], branch=step["source"], step=step["step"])
        return newest(self.store)

    def tag(self, step: Mapping[str, Any]) -> int:
        """A tag is set."""
        self.store.tag(step["name"], branch=step["branch"], step=step["step"])
        return newest(self.store)

    def untag(self, step: Mapping[str, Any]) -> int:
        """A tag is removed."""
        self.store.delete_tag(step["name"])
        return newest(self.store)

    def drop(self, step: Mapping[str, Any]) -> int:
        """A branch ends."""
        self.store.drop(step["branch"])
        return newest(self.store)


OPERATIONS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "hello": hello,
    "read": read,
    "open": open_only,
    "slice": slice_,
    "follow": follow,
    "state": state,
    "write": write,
}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to a request. The library's errors are answers; any other exception is a bug."""
    operation = OPERATIONS.get(request["op"])
    reply: dict[str, Any] = {"id": request["id"]}
    if operation is None:
        return reply | {"result": "skip", "reason": f"unknown operation {request['op']}"}
    try:
        return reply | {"result": "ok"} | operation(request)
    except DeltaFormatError as error:
        return reply | refusal(error)
    except ReadFailedError as failed:
        held = [{"name": name, "sha256": sha256(failed.held[name].data)} for name in by_bytes(failed.held)]
        return reply | refusal(failed.error) | {"held": held}
    except NotRefusedError as error:
        return reply | {"result": "error", "class": "NOT-REFUSED", "code": None, "message": str(error)}


def refusal(error: DeltaFormatError) -> dict[str, Any]:
    """An error reply."""
    return {
        "result": "error",
        "class": error.code.error_class,
        "code": error.code.value,
        "message": str(error),
    }


def main() -> None:
    """Answer requests until there are none."""
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
