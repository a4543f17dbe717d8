"""What following costs: seconds and bytes of each phase, and how far behind a follower was."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["FollowMetrics", "FollowPhase", "FollowStatus", "Meter"]


@dataclass(frozen=True, slots=True)
class FollowPhase:
    """One phase of following a version.

    Attributes:
        seconds: Time spent in it. Fetching, decoding and verifying overlap, and several blocks are decoded at
            a time: those are sums over threads.
        nbytes: Bytes that it went over.
    """

    seconds: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class FollowMetrics:
    """What it took to go from one version to another.

    Attributes:
        version: `seq:root` of the version that was gone to.
        seq: Its seq.
        step: Its step.
        previous_seq: Where it started from; None from nothing.
        lag_steps: Steps between the two; 0 from nothing or where steps went back.
        lag_seconds: From the version's commit, by its writer's clock, until it was staged; at least 0.
        find: Reading the log and manifests; bytes of manifests.
        fetch: Reading pieces; their bytes, with gaps that were read along.
        decode: Bytes of the blocks that were rebuilt.
        verify: Bytes that were checked against digests.
        apply: Writing to state dicts and to the mirror; bytes written.
        changed: Elements whose bits changed, those of tensors that are new included.
        elements: Elements of all tensors that are followed.
    """

    version: str
    seq: int
    step: int
    previous_seq: int | None
    lag_steps: int
    lag_seconds: float
    find: FollowPhase
    fetch: FollowPhase
    decode: FollowPhase
    verify: FollowPhase
    apply: FollowPhase
    changed: int
    elements: int

    @property
    def density(self) -> float:
        """The share of elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class FollowStatus:
    """What a follower holds.

    Attributes:
        branch: The branch.
        leading: Whether it reads the store itself; otherwise another process of this host does.
        version: `seq:root` of the version that this process took last; None before the first.
        seq: Its seq.
        step: Its step.
        mirror_seq: Seq of the version in the mirror.
        mirror_bytes: Bytes of its tensors.
        failures: Attempts of `stage` that have failed since one succeeded.
        error: The last of these failures.
    """

    branch: str
    leading: bool
    version: str | None
    seq: int | None
    step: int | None
    mirror_seq: int | None
    mirror_bytes: int
    failures: int
    error: str | None


class Meter:
    """Adds up seconds and bytes by phase; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases: dict[str, FollowPhase] = {}

    def add(self, phase: str, seconds: float, nbytes: int) -> None:
        """Add to a phase."""
        with self._lock:
            before = self._phases.get(phase, FollowPhase())
            self._phases[phase] = FollowPhase(before.seconds + seconds, before.nbytes + nbytes)

    def phase(self, name: str) -> FollowPhase:
        """What was added so far."""
        with self._lock:
            return self._phases.get(name, FollowPhase())
