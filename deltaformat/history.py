"""The whole log, folded: valid commits, live ones, tags, claims, void records (SPEC 12.2, 12.6). No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from deltaformat.judge import (
    EMPTY,
    State,
    Void,
    WriterKnowledge,
    ancestors_for,
    draft,
    toward_depth,
    toward_step,
    transition,
)
from deltaformat.records import Claim, Commit, Record, Retire, Tag

__all__ = ["EMPTY", "History", "State", "Void", "ancestors_for", "draft", "transition"]


class History(WriterKnowledge):
    """The fold of all records from 0 on: apply them in order.

    Attributes:
        state: The state after the newest.
        commits: The valid commits, by seq; retired ones too.
        live: seqs of the live commits.
        retired: seq of the newest `retire` record of each commit that is not live any more.
        tags: seq of the commit that each tag names.
        claims: The branch of each valid claim, by the claim's seq.
        void: The void records, by seq.
    """

    def __init__(self) -> None:
        self.state = EMPTY
        self.commits: dict[int, Commit] = {}
        self.live: set[int] = set()
        self.retired: dict[int, int] = {}
        self.tags: dict[str, int] = {}
        self.claims: dict[int, str] = {}
        self.void: dict[int, Void] = {}
        self._tagged: Counter[int] = Counter()

    def copy(self) -> History:
        """A history of its own, with the same content."""
        other = History()
        other.state = self.state
        other.commits = self.commits.copy()
        other.live = self.live.copy()
        other.retired = self.retired.copy()
        other.tags = self.tags.copy()
        other.claims = self.claims.copy()
        other.void = self.void.copy()
        other._tagged = self._tagged.copy()
        return other

    def apply(self, record: Record, record_hash: str) -> State | Void:
        """Take in the next record.

        Raises:
            InconsistentError: It is not the next record.
            CorruptError: Its `prev` is not the hash of the record before it (DF-LOG-02).
        """
        result = transition(self.state, record, record_hash, self)
        if isinstance(result, Void):
            self.void[record.seq] = result
            self.state = result.state
            return result
        self.state = result
        if isinstance(record, Commit):
            self.commits[record.seq] = record
            self.live.add(record.seq)
        elif isinstance(record, Claim):
            self.claims[record.seq] = record.branch
        elif isinstance(record, Tag):
            before = self.tags.pop(record.name, None)  # DF-LOG-12: or there is none, whatever a writer wrote
            if before is not None:
                self._tagged[before] -= 1
            if record.target is not None:
                self.tags[record.name] = record.target
                self._tagged[record.target] += 1
        elif isinstance(record, Retire):
            self.live.difference_update(record.commits)
            self.retired.update(dict.fromkeys(record.commits, record.seq))
        return result

    def commit(self, seq: int) -> Commit | None:
        """The valid commit of that number."""
        return self.commits.get(seq)

    def judged(self, seq: int) -> Commit | None:
        """The valid commit of that number."""
        return self.commits.get(seq)

    def is_live(self, seq: int) -> bool:
        """Whether that record is a live commit."""
        return seq in self.live

    def is_retired(self, seq: int) -> bool:
        """Whether that commit is not live any more."""
        return seq in self.retired

    def in_lineage(self, seq: int, head: int) -> bool:
        """Whether commit `seq` is `head` or an ancestor of it."""
        commit, wanted = self.commits.get(head), self.commits.get(seq)
        if commit is None or wanted is None:
            return False
        while commit.seq > seq and (entry := toward_depth(commit, wanted.depth)) is not None:
            commit = self.commits[entry[1]]
        return commit.seq == seq

    def has_tag(self, name: str) -> bool:
        """Whether a tag of that name exists."""
        return name in self.tags

    def is_tagged(self, seq: int) -> bool:
        """Whether a tag names that commit."""
        return self._tagged[seq] > 0

    def lineage(self, seq: int) -> Iterator[Commit]:
        """Commit `seq`, its parent, its parent's parent, and so on."""
        commit = self.commits.get(seq)
        while commit is not None:
            yield commit
            commit = None if commit.parent is None else self.commits[commit.parent]

    def find_step(self, seq: int, step: int) -> Commit | None:
        """The commit of `step` in the lineage of commit `seq`."""
        commit = self.commits[seq]
        while commit.step > step and (entry := toward_step(commit, step)) is not None:
            commit = self.commits[entry[1]]
        return commit if commit.step == step else None

    def is_fenced(self, claim: int) -> bool:
        """Whether nobody can commit under `claim` any more (DF-GC-03).

        That is so where its branch has a newer claim, or was dropped. What is no valid claim is not fenced.
        """
        branch = self.claims.get(claim)
        if branch is None:
            return False
        head = self.state.heads.get(branch)
        return head is None or head.claim != claim
