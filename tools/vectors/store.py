"""Stores under construction: packs, versions and the log, with hooks at every layer for one fault at a time.

What readers must find is computed from the tensors' bytes that a case is made of, never read back.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vectors.arrowfile import Column, arrow_file
from vectors.content import NOT_FRESH, PAYLOAD, External, Members, Pack, Tensor, Version, claim_text
from vectors.payloads import RAW
from vectors.primitives import block_digest, blocks_of, dump, frame, leaf, root, seal, sha256

__all__ = ["COLUMNS", "TIME", "Hook", "Store"]

TIME = "2026-01-01T00:00:00Z"
UUID = "0123456789abcdef0123456789abcdef"

Hook = Callable[[Any], Any]


@dataclass(slots=True)
class Commit:
    """What the builder keeps of a commit."""

    seq: int
    step: int
    parent: int | None
    depth: int
    root: str
    version: Version


class Store:
    """A store that grows. `hooks` change what is made: see `_hooked` calls for their names.

    Args:
        digest: The digest's name.
        block_bytes: The block size.
        hooks: `layer` or `layer:seq` -> function of what the layer made, which returns what to take instead.
    """

    def __init__(
        self, *, digest: str = "xxh3-128", block_bytes: int = 256, hooks: Mapping[str, Hook] | None = None
    ) -> None:
        self.digest, self.block_bytes = digest, block_bytes
        self.hooks = dict(hooks or {})
        self.used_hooks: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.heads: dict[str, Members] = {}
        self.commits: dict[int, Commit] = {}
        self.tags: dict[str, int] = {}
        self.seq = -1
        self.last_tag: int | None = None
        self.last_retire: int | None = None
        self._prev: str | None = None
        members = {
            "format": "deltaformat/1",
            "uuid": UUID,
            "digest": digest,
            "block_bytes": block_bytes,
            "log": "log/{seq:020}.json",
            "requires": [],
            "time": TIME,
        }
        self.objects["deltaformat.json"] = self._hooked(
            "descriptor-bytes", seal(self._hooked("descriptor", members))
        )

    def _hooked(self, layer: str, made: Any) -> Any:
        if layer not in self.hooks:
            return made
        self.used_hooks.add(layer)
        changed = self.hooks[layer](made)
        return made if changed is None else changed

    # -- content ---------------------------------------------------------------------------------------------

    def pack(self, claim: int = 0, nonce: str | None = None) -> Pack:
        """A new pack."""
        return Pack(claim, nonce)

    def keyframe(
        self,
        tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
        *,
        files: Mapping[str, bytes] | None = None,
        claim: int = 0,
    ) -> Version:
        """A version of raw tensors, in one pack."""
        pack = self.pack(claim)
        version = Version(files={path: (claim, data) for path, data in (files or {}).items()})
        for name, (dtype, shape, data) in tensors.items():
            if data and name not in (PAYLOAD, "__metadata__"):
                pieces = pack.tensor(name, dtype, shape, data, self.block_bytes)
            else:
                pieces = [pack.put(block, RAW) for block in blocks_of(data, self.block_bytes)]
            version.tensors[name] = Tensor(
                dtype, shape, data, [[piece] for piece in pieces], [NOT_FRESH] * len(pieces)
            )
        return version

    # -- records ---------------------------------------------------------------------------------------------

    def record(self, kind: str, valid: bool = True, heads: Members | None = None, **members: Any) -> int:
        """Add a record. `heads` are those after it; by default what they were."""
        self.seq += 1
        after = self.heads if heads is None else heads
        common = {
            "kind": kind,
            "seq": self.seq,
            "prev": self._prev,
            "nonce": f"{self.seq:032x}",
            "time": TIME,
            "heads": copy.deepcopy(after),
            "last_tag": self.last_tag,
            "last_retire": self.last_retire,
            "requires": [],
        }
        made = self._hooked(f"record:{self.seq}", {**common, **members})
        data = seal(made)
        data = self._hooked(f"bytes:{self.seq}", data)
        self.objects[f"log/{self.seq:020}.json"] = data
        self._prev = sha256(data)
        if valid:
            self.heads = copy.deepcopy(after)
            if kind == "tag":
                self.last_tag = self.seq
            if kind == "retire":
                self.last_retire = self.seq
        return self.seq

    def claim(self, branch: str = "main", resume_from: int | None = None, **members: Any) -> int:
        """A valid claim."""
        head = self.heads.get(branch, {"seq": None, "step": None, "epoch": 0})
        after = {"seq": head["seq"], "step": head["step"], "epoch": head["epoch"] + 1, "claim": self.seq + 1}
        if resume_from is not None:
            after |= {"seq": resume_from, "step": self.commits[resume_from].step}
        return self.record(
            "claim",
            heads={**self.heads, branch: after},
            branch=branch,
            epoch=after["epoch"],
            host="example",
            pid=1,
            resume_from=resume_from,
            single_writer=False,
            **members,
        )

    def fork(self, branch: str, source: int) -> int:
        """A valid fork."""
        step = self.commits[source].step
        after = {"seq": source, "step": step, "epoch": 0, "claim": None}
        return self.record(
            "fork", heads={**self.heads, branch: after}, branch=branch, source=source, step=step
        )

    def tag(self, name: str, target: int | None) -> int:
        """A valid tag."""
        seq = self.record("tag", name=name, target=target)
        if target is None:
            self.tags.pop(name, None)
        else:
            self.tags[name] = target
        return seq

    def drop(self, branch: str) -> int:
        """A valid drop."""
        heads = {name: head for name, head in self.heads.items() if name != branch}
        return self.record("drop", heads=heads, branch=branch)

    def retire(self, *commits: int) -> int:
        """A valid retirement."""
        return self.record("retire", commits=list(commits))

    def lineage(self, seq: int | None) -> list[Commit]:
        """A commit and its ancestors, nearest first."""
        found = []
        while seq is not None:
            found.append(self.commits[seq])
            seq = self.commits[seq].parent
        return found

    def ancestors(self, parent: int | None) -> list[list[int]]:
        """Of a child of `parent` (SPEC 12.3)."""
        lineage = self.lineage(parent)
        depth = len(lineage)
        wanted = {(depth - 1) // 2**i * 2**i for i in range(64)} if depth else set()
        return [[c.depth, c.seq, c.step] for c in lineage if c.depth in wanted]

    def commit_members(
        self,
        version: Version,
        branch: str = "main",
        step: int | None = None,
        parts: Sequence[Sequence[str]] | None = None,
    ) -> Members:
        """The members of a valid commit; its objects are added to the store."""
        head = self.heads[branch]
        parent = head["seq"]
        claim = head["claim"]
        seq = self.seq + 1
        if step is None:
            step = 0 if parent is None else self.commits[parent].step + 1
        for tensor in version.tensors.values():
            for chain in tensor.chains:
                for piece in chain:
                    if isinstance(piece.pack, Pack):
                        self.objects[piece.pack.key] = piece.pack.data
        for file_claim, data in version.files.values():
            self.objects[f"files/{claim_text(file_claim)}/{sha256(data)}"] = data
        groups = [list(version.tensors)] if parts is None else [list(part) for part in parts]
        manifests = []
        for number, names in enumerate(groups):
            place = f"{seq}" if number == 0 else f"{seq}.{number}"
            content = self._content(version, names, parent, place, with_files=number == 0)
            content = self._hooked(f"content:{place}", content)
            maker = self.hooks.get(f"frame:{place}")
            self.used_hooks.add(f"frame:{place}")
            data = frame(content) if maker is None else maker(content)
            size = self._hooked(f"content-size:{place}", len(content))
            key = f"manifests/{claim_text(claim)}/{sha256(data)}.arrow.zst"
            self.objects[key] = data
            manifests.append({"key": key, "size": len(data), "content_size": size})
        before = {} if parent is None else self.commits[parent].version.uses()
        after = version.uses()
        return {
            "branch": branch,
            "claim": claim,
            "step": step,
            "parent": parent,
            "depth": 0 if parent is None else self.commits[parent].depth + 1,
            "ancestors": self.ancestors(parent),
            "root": self.root(version),
            "manifests": manifests,
            "objects_added": [{"key": k, "size": n} for k, n in after.items() if k not in before],
            "objects_dropped": [{"key": k, "size": n} for k, n in before.items() if k not in after],
            "metadata": {},
        }

    def commit(
        self,
        version: Version,
        branch: str = "main",
        step: int | None = None,
        parts: Sequence[Sequence[str]] | None = None,
        **changes: Any,
    ) -> int:
        """A valid commit."""
        members = self.commit_members(version, branch, step, parts) | changes
        seq = self.seq + 1
        head = {**self.heads[branch], "seq": seq, "step": members["step"]}
        self.record("commit", heads={**self.heads, branch: head}, **members)
        self.commits[seq] = Commit(
            seq, members["step"], members["parent"], members["depth"], members["root"], copy.deepcopy(version)
        )
        return seq

    def root(self, version: Version) -> str:
        """The version's root, of its bytes."""
        return root(
            self.digest,
            self.block_bytes,
            {
                name: leaf(
                    name,
                    t.dtype,
                    t.shape,
                    [block_digest(self.digest, block) for block in blocks_of(t.data, self.block_bytes)],
                )
                for name, t in version.tensors.items()
            },
        )

    def _content(
        self, version: Version, names: Sequence[str], parent: int | None, place: str, with_files: bool
    ) -> bytes:
        packs: list[Pack | External] = []
        ends: dict[int, int] = {}
        rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for name in names:
            tensor = version.tensors[name]
            pieces = [piece for chain in tensor.chains for piece in chain]
            numbers, gaps = [], []
            for piece in pieces:
                if not any(piece.pack is pack for pack in packs):
                    packs.append(piece.pack)
                number = next(i for i, pack in enumerate(packs) if pack is piece.pack)
                numbers.append(number)
                gaps.append(piece.offset - ends.get(number, 0))
                ends[number] = piece.offset + piece.length
            row = {
                "name": name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "digest": [block_digest(self.digest, b) for b in blocks_of(tensor.data, self.block_bytes)],
                "fresh": list(tensor.fresh),
                "depth": [len(chain) for chain in tensor.chains],
                "pack": numbers,
                "gap": gaps,
                "length": [piece.length for piece in pieces],
                "encoding": [piece.encoding for piece in pieces],
            }
            for column, value in row.items():
                rows[column].append(value)
        kinds = {**COLUMNS, "digest": f"list:fixed:{16 if self.digest == 'xxh3-128' else 32}"}
        columns = self._hooked(f"columns:{place}", [Column(n, kind, rows[n]) for n, kind in kinds.items()])
        files = version.files if with_files else {}
        meta: Any = {
            "format": "deltaformat-manifest/1",
            "digest": self.digest,
            "block_bytes": self.block_bytes,
            "parent": parent,
            "packs": [pack.entry for pack in packs],
            "files": [
                {"path": path, "key": f"files/{claim_text(c)}/{sha256(data)}", "size": len(data)}
                for path, (c, data) in files.items()
            ],
            "requires": [],
        }
        meta = self._hooked(f"meta:{place}", meta)
        text = meta if isinstance(meta, bytes) else dump(meta)
        options = self._hooked(f"arrow:{place}", {"metadata": [(b"deltaformat", text)]})
        return arrow_file(columns, **options)

    def hint(self, data: bytes | None = None) -> None:
        """The tail hint: by default the newest record."""
        self.objects["hints/tail.json"] = dump({"seq": self.seq}) if data is None else data

    # -- what must be read -----------------------------------------------------------------------------------

    def find(self, at: Mapping[str, Any]) -> Commit:
        """The commit of an `at`, in the builder's own books."""
        if "seq" in at:
            return self.commits[at["seq"]]
        if "tag" in at:
            return self.commits[self.tags[at["tag"]]]
        lineage = self.lineage(self.heads[at["branch"]]["seq"])
        return next(c for c in lineage if c.step == at.get("step", lineage[0].step))

    def expected(
        self, at: Mapping[str, Any], select: Sequence[str] | None = None, *, content: bool = True
    ) -> Members:
        """The reply to `read`, or to `open` without `content`."""
        commit = self.find(at)
        tensors, files = [], []
        for name in sorted(commit.version.tensors, key=str.encode):
            if select is None or name in select:
                t = commit.version.tensors[name]
                row: Members = {"name": name, "dtype": t.dtype, "shape": list(t.shape), "nbytes": len(t.data)}
                tensors.append(row | ({"sha256": sha256(t.data)} if content else {}))
        for path in sorted(commit.version.files, key=str.encode) if select is None else []:
            data = commit.version.files[path][1]
            files.append({"path": path, "size": len(data)} | ({"sha256": sha256(data)} if content else {}))
        return {
            "seq": commit.seq,
            "step": commit.step,
            "root": commit.root,
            "tensors": tensors,
            "files": files,
        }

    def held(self, at: Mapping[str, Any]) -> list[Members]:
        """Name and hash of every tensor of a version."""
        return [{"name": t["name"], "sha256": t["sha256"]} for t in self.expected(at)["tensors"]]

    def state(self) -> Members:
        """The reply to `state`."""
        branches = {
            name: {"seq": head["seq"], "step": head["step"], "epoch": head["epoch"]}
            for name, head in self.heads.items()
        }
        return {"newest": None if self.seq < 0 else self.seq, "branches": branches, "tags": dict(self.tags)}

    def sliced(self, at: Mapping[str, Any], name: str, ranges: Sequence[Sequence[int]], bits: int) -> Members:
        """The reply to `slice`, for elements of whole bytes."""
        tensor = self.find(at).version.tensors[name]
        width = bits // 8
        out = bytearray()

        def walk(axis: int, start: int) -> None:
            if axis == len(tensor.shape):
                out.extend(tensor.data[start * width : (start + 1) * width])
                return
            for index in range(*ranges[axis]):
                walk(axis + 1, start * tensor.shape[axis] + index)

        walk(0, 0)
        return {
            "dtype": tensor.dtype,
            "shape": [stop - start for start, stop in ranges],
            "nbytes": len(out),
            "sha256": hashlib.sha256(out).hexdigest(),
        }


COLUMNS = {
    "name": "utf8",
    "dtype": "utf8",
    "shape": "list:int64",
    "digest": "list:fixed:16",
    "fresh": "list:uint8",
    "depth": "list:uint8",
    "pack": "list:uint32",
    "gap": "list:int64",
    "length": "list:uint32",
    "encoding": "list:uint8",
}
