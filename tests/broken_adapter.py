"""The reference's adapter with one thing wrong: `python broken_adapter.py KIND`.

It is a process of its own, as adapters are; KIND says what is wrong.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deltaformat.rebuild import Rebuilder

PATH = Path(__file__).resolve().parent.parent / "conformance" / "adapters" / "deltaformat_reference.py"
spec = importlib.util.spec_from_file_location("deltaformat_reference", PATH)
assert spec is not None
assert spec.loader is not None
reference = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = reference
spec.loader.exec_module(reference)

Reply = dict[str, Any]
Request = Mapping[str, Any]
GOOD_HELLO = reference.answer({"id": 0, "op": "hello"})
ACCEPTED: Reply = {"result": "ok", "seq": 1, "step": 0, "root": "df1:x", "tensors": [], "files": []}
REFUSED: Reply = {"result": "error", "class": "MALFORMED", "code": "value-invalid", "message": "no"}


def right(request: Request) -> Reply:
    reply: Reply = reference.answer(request)
    return reply


def accepts_everything(request: Request) -> Reply:
    """It never refuses: what it cannot read it makes up."""
    reply = right(request)
    return reply if reply["result"] == "ok" else {"id": request["id"], **ACCEPTED}


def rejects_everything(request: Request) -> Reply:
    return {"id": request["id"], **REFUSED}


def ignores_digests(request: Request) -> Reply:
    Rebuilder._check = lambda *arguments: None  # type: ignore[method-assign,assignment]
    return right(request)


def reads_eagerly(request: Request) -> Reply:
    """It reads the whole version before it looks at what was asked for."""
    if request["op"] in ("open", "slice", "read"):
        whole = right({**request, "op": "read", "select": None})
        if whole["result"] == "error":
            return whole
    return right(request)


def follows_by_reading(request: Request) -> Reply:
    """It has no use for `fresh`."""
    if request["op"] == "follow":
        return right({**request, "op": "read", "select": None})
    return right(request)


def loses_what_it_held(request: Request) -> Reply:
    """A failed `follow` leaves a tensor half changed."""
    reply = right(request)
    for entry in reply.get("held", [])[:1]:
        entry["sha256"] = "0" * 64
    return reply


def trusts_heads(request: Request) -> Reply:
    """It takes the newest record's `heads` without judging the record."""
    if request["op"] != "state":
        return right(request)
    log = sorted((Path(request["store"]) / "log").glob("*.json"))
    heads = json.loads(log[-1].read_bytes())["heads"]
    branches = {
        name: {"seq": head["seq"], "step": head["step"], "epoch": head["epoch"]}
        for name, head in heads.items()
    }
    return right(request) | {"result": "ok", "branches": branches}


def crashes(request: Request) -> Reply:
    print("a bug", file=sys.stderr, flush=True)
    os._exit(3)


def hangs(request: Request) -> Reply:
    time.sleep(600)
    raise AssertionError


def reads_nothing_more(request: Request) -> Reply:
    """As `hangs`, but it has stopped to read before the request is sent; see `main`."""
    raise AssertionError


def says_nothing_useful(request: Request) -> Reply:
    print("Traceback (most recent call last):", flush=True)
    return right(request)


def answers_another_request(request: Request) -> Reply:
    return right(request) | {"id": request["id"] + 1}


def invents_classes(request: Request) -> Reply:
    reply = right(request)
    return reply | {"class": "BROKEN"} if reply["result"] == "error" else reply


def skips(request: Request) -> Reply:
    return {"id": request["id"], "result": "skip", "reason": "not done yet"}


def changes_the_store(request: Request) -> Reply:
    reply = right(request)
    (Path(request["store"]) / "cache.tmp").write_bytes(b"x")
    return reply


def sorts_as_utf_16(request: Request) -> Reply:
    reply = right(request)
    reply.get("tensors", []).sort(key=lambda t: t["name"].encode("utf-16-be"))
    return reply


def gives_no_codes(request: Request) -> Reply:
    reply = right(request)
    return reply | {"code": None} if reply["result"] == "error" else reply


def writes_beside_keys(request: Request) -> Reply:
    reply = right(request)
    if request["op"] == "write":
        (Path(request["store"]) / "w.bin").write_bytes(b"x")
    return reply


def writes_a_record_of_no_kind(request: Request) -> Reply:
    """What it writes is sealed, and says nothing."""
    reply = right(request)
    if request["op"] == "write":
        newest = max((Path(request["store"]) / "log").iterdir())
        body = b'{"seq":0'
        newest.write_bytes(body + b',"check":"' + hashlib.sha256(body).hexdigest().encode() + b'"}')
    return reply


def writes_packs_of_anything(request: Request) -> Reply:
    """Packs that have their hash, but no header."""
    reply = right(request)
    if request["op"] == "write":
        for path in list((Path(request["store"]) / "packs").rglob("*.safetensors")):
            data = (8).to_bytes(8, "little") + b"no JSON."
            path.with_name(f"{hashlib.sha256(data).hexdigest()}.safetensors").write_bytes(data)
    return reply


def writes_a_hint_of_anything(request: Request) -> Reply:
    reply = right(request)
    if request["op"] == "write":
        hints = Path(request["store"]) / "hints"
        hints.mkdir(exist_ok=True)
        (hints / "tail.json").write_bytes(b"[" * 100_000)
    return reply


def refuses_nothing(request: Request) -> Reply:
    """A writer that takes what it must refuse for done."""
    if request["op"] == "write":
        script = [step for step in request["script"] if "expect" not in step]
        reply = right({**request, "script": script})
        if len(script) == len(request["script"]):
            return reply
        error = {"result": "error", "class": "NOT-REFUSED", "code": None, "message": "was made"}
        return {"id": request["id"], **error}
    return right(request)


def loses_a_tensor(request: Request) -> Reply:
    """A writer whose commits lack their last tensor."""
    if request["op"] == "write":
        for step in request["script"]:
            step.get("tensors", [])[-1:] = []
    return right(request)


def knows_no_feature(request: Request) -> Reply:
    return right(request)


def claims_too_little(request: Request) -> Reply:
    return right(request)


KINDS: dict[str, Callable[[Request], Reply]] = {
    name: value
    for name, value in globals().items()
    if callable(value) and getattr(value, "__module__", "") == __name__ and not name[0].isupper()
}


def main() -> None:
    kind = KINDS[sys.argv[1]]
    started = False
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if (request["op"] == "hello") == started:
            raise ValueError("PROTOCOL.md: hello is the first request, once for each start")
        if request["op"] == "hello":
            started = True
            reply = {**GOOD_HELLO, "id": request["id"]}
            if kind is claims_too_little:
                reply["profiles"] = ["reader-core"]
            if kind is knows_no_feature:
                reply["features"] = []
        else:
            reply = kind(request)
        print(json.dumps(reply), flush=True)
        if kind is reads_nothing_more:
            time.sleep(600)


if __name__ == "__main__":
    main()
