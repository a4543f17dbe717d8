"""Builds logs, record by record, with pure code only: valid ones and others."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from deltaformat.errors import ConflictError, InconsistentError, MissingError
from deltaformat.history import History, State, ancestors_for, draft
from deltaformat.judge import propose
from deltaformat.keys import manifest_key, pack_key, record_key
from deltaformat.records import (
    Claim,
    Commit,
    Drop,
    Fork,
    ManifestRef,
    ObjectRef,
    Record,
    Retire,
    Tag,
    encode_record,
    record_hash,
)
from deltaformat.storage import Storage

R = TypeVar("R", bound=Record)

TIME = "2026-01-02T03:04:05Z"


def sha(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def nonce(text: object) -> str:
    return sha(text)[:32]


def root(text: object) -> str:
    return f"df1:xxh3-128:1048576:{sha(text)}"


def manifest(claim: int, text: object) -> ManifestRef:
    return ManifestRef(manifest_key(claim, sha(text)), 100, 400)


def pack(claim: int, text: object) -> ObjectRef:
    return ObjectRef(pack_key(claim, sha(text)), 1000)


class LogMaker:
    """A log that grows. `history` is the fold of what was added."""

    def __init__(self) -> None:
        self.history = History()
        self.datas: list[bytes] = []

    @property
    def state(self) -> State:
        return self.history.state

    def draft(self, kind: type[R], **members: Any) -> R:
        """The record that a writer would make."""
        return draft(kind, self.state, self.history, nonce=nonce(len(self.datas)), time=TIME, **members)

    def add_careless(self, kind: type[R], **members: Any) -> R:
        """Add a valid record that a writer must not make (DF-LOG-12)."""
        with pytest.raises((ConflictError, InconsistentError, MissingError)):
            self.draft(kind, **members)
        text = nonce(len(self.datas))
        record = self.add(propose(kind, self.state, self.history, nonce=text, time=TIME, **members))
        assert record.seq not in self.history.void
        return record

    def add(self, record: R) -> R:
        """Add a record as it is; it may be void."""
        data = encode_record(record)
        self.datas.append(data)
        self.history.apply(record, record_hash(data))
        return record

    def add_void(self, record: R) -> R:
        """Add a record that must turn out void."""
        self.add(record)
        assert record.seq in self.history.void
        return record

    def void_commit(self, branch: str = "main") -> Commit:
        """A commit under a claim that the branch never had."""
        head = self.state.heads.get(branch)
        record = self.draft_commit(branch) if head and head.claim is not None else self._any_commit(branch)
        return self.add_void(replace(record, claim=9_999, manifests=(manifest(9_999, len(self.datas)),)))

    def _any_commit(self, branch: str) -> Commit:
        return Commit(
            seq=self.state.seq + 1, prev=self.state.hash, nonce=nonce(len(self.datas)), time=TIME,
            heads=self.state.heads, last_tag=self.state.last_tag, last_retire=self.state.last_retire,
            branch=branch, claim=0, step=1, parent=None, depth=0, ancestors=(), root=root(1),
            manifests=(manifest(0, 1),),
        )  # fmt: skip

    def claim(self, branch: str = "main", resume_from: int | None = None, **members: Any) -> Claim:
        head = self.state.heads.get(branch)
        return self.add(
            self.draft(
                Claim, branch=branch, epoch=1 if head is None else head.epoch + 1, host="host", pid=7,
                resume_from=resume_from, **members,
            )
        )  # fmt: skip

    def draft_commit(self, branch: str = "main", step: int | None = None, **members: Any) -> Commit:
        head = self.state.heads[branch]
        parent = None if head.seq is None else self.history.commits[head.seq]
        claim = -1 if head.claim is None else head.claim
        if step is None:
            step = 0 if parent is None else parent.step + 1
        members = {
            "root": root(step),
            "manifests": (manifest(max(claim, 0), len(self.datas)),),
            "parent": head.seq,
            "depth": 0 if parent is None else parent.depth + 1,
            "ancestors": () if parent is None else ancestors_for(parent),
            **members,
        }
        return self.draft(Commit, branch=branch, claim=claim, step=step, **members)

    def commit(self, branch: str = "main", step: int | None = None, **members: Any) -> Commit:
        return self.add(self.draft_commit(branch, step, **members))

    def fork(self, branch: str, source: int) -> Fork:
        step = self.history.commits[source].step
        return self.add(self.draft(Fork, branch=branch, source=source, step=step))

    def tag(self, name: str, target: int | None) -> Tag:
        return self.add(self.draft(Tag, name=name, target=target))

    def drop(self, branch: str) -> Drop:
        return self.add(self.draft(Drop, branch=branch))

    def retire(self, *commits: int) -> Retire:
        return self.add(self.draft(Retire, commits=commits))

    def store(self, storage: Storage, *, start: int = 0) -> None:
        """Put the records into a storage."""
        for seq in range(start, len(self.datas)):
            storage.put(record_key(seq), self.datas[seq])
