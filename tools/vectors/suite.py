"""The cases: what is asked of a store, what must come, and how both lie in files."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vectors.primitives import DTYPES
from vectors.store import Store

__all__ = ["Case", "Suite"]

_GZIP_FROM = 2 << 10
MAIN: Mapping[str, Any] = {"branch": "main"}


@dataclass(slots=True)
class Case:
    """One case; see conformance/PROTOCOL.md for what its members mean."""

    id: str
    title: str
    requirements: Sequence[str]
    op: str
    args: Mapping[str, Any]
    expect: Mapping[str, Any]
    objects: Mapping[str, bytes]
    profile: str = "reader-core"
    level: str = "must"
    features: Sequence[str] = ()
    flags: Sequence[str] = ()
    derived_from: str | None = None
    mutation: str | None = None
    store: str | None = None
    place: Mapping[str, bytes] = field(default_factory=dict)
    judge: Sequence[Mapping[str, Any]] = ()


class Suite:
    """All cases by id."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self._stores: dict[str, Store] = {}

    def add(self, case: Case) -> Case:
        """Take a case in; its id is new."""
        assert case.id not in self.cases, f"{case.id} is there twice"
        self.cases[case.id] = case
        return case

    def valid(
        self,
        name: str,
        title: str,
        store: Store | str,
        *requirements: str,
        op: str = "read",
        at: Mapping[str, Any] = MAIN,
        expect: Mapping[str, Any] | None = None,
        error: tuple[str, str] | None = None,
        select: Sequence[str] | None = None,
        allow: Sequence[str] = (),
        tensor: str = "",
        ranges: Sequence[Sequence[int]] = (),
        start: Mapping[str, Any] | None = None,
        **members: Any,
    ) -> str:
        """A case on a valid store: `store` is a new one, or the id of the case that has it.

        What must come follows from the store's content, unless it is given. `error` is for requests that a
        sound store has no answer to.
        """
        id_ = f"valid/{name}"
        shared = store if isinstance(store, str) else None
        built = self._stores[store] if isinstance(store, str) else store
        self._stores[id_] = built
        args: dict[str, Any] = {} if op == "state" else {"at": dict(at)}
        found: Mapping[str, Any] = {}
        if op == "read":
            args["select"] = select
            found = expect or ({} if error else built.expected(at, select))
        elif op == "open":
            found = expect or ({} if error else built.expected(at, content=False))
        elif op == "slice":
            args |= {"tensor": tensor, "ranges": [list(pair) for pair in ranges]}
            if not error:
                bits = DTYPES[built.find(at).version.tensors[tensor].dtype][0]
                found = expect or built.sliced(at, tensor, ranges, bits)
        elif op == "follow":
            args = {"from": dict(start or {}), **args}
            found = expect or ({} if error else built.expected(at))
        elif op == "state":
            found = expect or built.state()
        if op != "state":
            args["allow"] = list(allow)
        expected: Mapping[str, Any] = {"ok": found}
        if error:
            expected = {"error": {"class": error[0], "code": error[1]}}
        _all_hooks_used(id_, built)
        objects = {} if shared else built.objects
        self.add(Case(id_, title, requirements, op, args, expected, objects, store=shared, **members))
        return id_

    def invalid(
        self,
        name: str,
        of: str,
        mutation: str,
        store: Store | Mapping[str, bytes],
        error: tuple[str, str],
        *requirements: str,
        held: Sequence[Mapping[str, Any]] | None = None,
        **changes: Any,
    ) -> str:
        """A case one fault away from the valid case `of`, with its operation unless `changes` say more."""
        base = self.cases[of]
        args = {**base.args, **changes.pop("args", {})}
        if isinstance(store, Store):
            _all_hooks_used(name, store)
            store = store.objects
        expected: dict[str, Any] = {"class": error[0], "code": error[1]}
        if held is not None:
            expected["held"] = list(held)
        members: dict[str, Any] = {
            "op": base.op,
            "profile": base.profile,
            "features": base.features,
            "flags": base.flags,
            "place": base.place,
            "title": mutation,
        } | changes
        case = Case(
            id=f"invalid/{name}",
            requirements=requirements,
            args=args,
            expect={"error": expected},
            objects=dict(store),
            derived_from=of,
            mutation=mutation,
            **members,
        )
        same = next(
            (c for c in self.cases.values() if c.store is None and c.objects and c.objects == case.objects),
            None,
        )
        if same is not None:
            case.objects, case.store = {}, same.id
        self.add(case)
        return case.id

    def files(self) -> dict[str, bytes]:
        """All files below `cases/`, by path."""
        found: dict[str, bytes] = {}
        for case in self.cases.values():
            packed = sorted(key for key, data in case.objects.items() if len(data) >= _GZIP_FROM)
            for key, data in case.objects.items():
                if key in packed:
                    found[f"{case.id}/store/{key}.gz"] = gzip.compress(data, 9, mtime=0)
                else:
                    found[f"{case.id}/store/{key}"] = data
            place = {}
            for number, (path, data) in enumerate(case.place.items()):
                place[path] = f"external/{number}"
                found[f"{case.id}/external/{number}"] = data
            members: dict[str, Any] = {
                "id": case.id,
                "title": case.title,
                "level": case.level,
                "profile": case.profile,
                "spec": "1.0",
                "features": list(case.features),
                "requirements": list(case.requirements),
                "op": case.op,
                "args": dict(case.args),
                "flags": list(case.flags),
            }
            if case.derived_from:
                members |= {"derived_from": case.derived_from, "mutation": case.mutation}
            if case.store:
                members["store"] = case.store
            if packed:
                members["gzip"] = packed
            if place:
                members["place"] = place
            if case.judge:
                members["judge"] = list(case.judge)
            found[f"{case.id}/case.json"] = _json(members)
            found[f"{case.id}/expect.json"] = _json(case.expect)
        return found

    def write(self, directory: Path) -> None:
        """Replace `directory` by these cases, in one move."""
        new, old = directory.with_name(".cases-new"), directory.with_name(".cases-old")
        for path in (new, old):
            shutil.rmtree(path, ignore_errors=True)
        for name, data in self.files().items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
        shutil.rmtree(old, ignore_errors=True)


def _json(members: Mapping[str, object]) -> bytes:
    """A line per member."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in members.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _all_hooks_used(name: str, store: Store) -> None:
    unused = set(store.hooks) - store.used_hooks
    assert not unused, f"{name}: hooks that were never called: {sorted(unused)}"
