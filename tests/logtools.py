"""What the tests of the log share: storages, logs whose time is the test's, members of records."""

import itertools
from collections.abc import Callable
from typing import Any

from logmaker import LogMaker, manifest, root

from deltaformat.errors import MissingError
from deltaformat.history import State, ancestors_for
from deltaformat.keys import TAIL_HINT, record_key
from deltaformat.log import Log, Retry
from deltaformat.objectstorage import ObstoreStorage
from deltaformat.records import Record, parse_record
from deltaformat.storage import Storage

_numbers = itertools.count()


def memory() -> Storage:
    from obstore.store import MemoryStore

    return ObstoreStorage(MemoryStore(), f"memory://log-{next(_numbers)}")


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def retry(self, **changes: Any) -> Retry:
        return Retry(**{"sleep": self.sleep, "clock": self, "jitter": lambda: 1.0, **changes})


def new_log(storage: Storage, clock: Clock | None = None, **changes: Any) -> Log:
    clock = clock or Clock()
    return Log(storage, retry=clock.retry(**changes), clock=clock)


def stored(maker: LogMaker) -> Storage:
    storage = memory()
    maker.store(storage)
    return storage


def set_hint(storage: Storage, data: bytes | int) -> None:
    storage.put(TAIL_HINT, data if isinstance(data, bytes) else b'{"seq":%d}' % data)


def claim_members(branch: str = "main", **changes: Any) -> Callable[[State], dict[str, Any]]:
    def members(state: State) -> dict[str, Any]:
        head = state.heads.get(branch)
        epoch = 1 if head is None else head.epoch + 1
        return {"branch": branch, "epoch": epoch, "host": "host", "pid": 7} | changes

    return members


def commit_members(
    log: Log, claim: int, branch: str = "main", *, step: int | None = None, **changes: Any
) -> Callable[[State], dict[str, Any]]:
    def members(state: State) -> dict[str, Any]:
        head = state.heads[branch]
        parent = None if head.seq is None else log.judged(head.seq)
        return {
            "branch": branch, "claim": claim, "step": (head.step or 0) + 1 if step is None else step,
            "parent": head.seq, "depth": 0 if parent is None else parent.depth + 1,
            "ancestors": () if parent is None else ancestors_for(parent), "root": root(step),
            "manifests": (manifest(claim, step),),
        } | changes  # fmt: skip

    return members


def records_in(storage: Storage) -> list[Record]:
    found = []
    for seq in itertools.count():
        try:
            found.append(parse_record(storage.get(record_key(seq)), seq=seq))
        except MissingError:
            return found
    raise AssertionError


def branched() -> LogMaker:
    """A log with a bit of everything.

    0 claim, 1 to 3 commits 10 20 30, 4 claim that rewinds to 20, 5 commit 25, 6 fork `b` of 20, 7 claim of b,
    8 commit 21 of b, 9 tag `good` of 25, 10 tag `old` of 10, 11 `good` removed, 12 commit 30 retired.
    """
    maker = LogMaker()
    maker.claim()
    for step in (10, 20, 30):
        maker.commit(step=step)
    maker.claim(resume_from=2)
    maker.commit(step=25)
    maker.fork("b", 2)
    maker.claim("b")
    maker.commit("b", step=21)
    maker.tag("good", 5)
    maker.tag("old", 1)
    maker.tag("good", None)
    maker.retire(3)
    return maker
