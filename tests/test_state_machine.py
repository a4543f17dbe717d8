# ruff: noqa: PT017 - an operation may succeed or fail: the model says which was right
"""Whatever is done to a store, in any order, every version that it keeps comes back bit for bit.

A model of a dozen lines of Python says what must be there; hypothesis looks for an order of operations
after which it is not.
The profiles `ci` and `nightly` are in conftest.py.
"""

from datetime import timedelta

import hypothesis.strategies as st
import numpy as np
from bitstates import Bits, check, check_all, flip, random_bits, spec_root
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tinystore import BLOCK, DictStorage
from watching import Faulty, not_stored

import deltaformat as df
from deltaformat import Part, Policy
from deltaformat.errors import ConflictError, ErrorCode, InconsistentError, MissingError, StoreError

BRANCHES = ("main", "a", "b/c")
TAGS = ("best", "v1.0")
DTYPES = ("BF16", "F32", "U8", "F8_E4M3", "F64", "BOOL", "F4")
seeds = st.integers(0, 1 << 16)
positions = st.integers(0, 30)


class Commit:
    """What the model knows of a commit."""

    def __init__(self, seq, step, parent, state):
        self.seq, self.step, self.parent, self.state = seq, step, parent, state
        self.live = True


class Stores(RuleBasedStateMachine):
    @initialize(digest=st.sampled_from(["xxh3-128", "blake3-256"]), policy=st.data())
    def begin(self, digest, policy):
        self.storage = DictStorage()
        self.faulty = Faulty(self.storage)
        self.digest = digest
        self.policy = Policy(
            max_chain=policy.draw(st.integers(2, 6)),
            keyframe=policy.draw(st.sampled_from(["planes", "raw"])),
            strata=policy.draw(st.booleans()),
            pack_bytes=policy.draw(st.sampled_from([1, 600, 1 << 20])),
            threads=1,
        )
        self.store = df.create(self.faulty, block_bytes=BLOCK, digest=digest)
        self.storage.put(f"packs/external/{'0' * 64}", b"a base")
        self.reader = df.open(self.storage)  # long-lived: it follows the log
        self.commits = {}
        self.heads = {}  # branch -> seq of its head, or None
        self.tags = {}
        self.writers = {}
        self.fenced = []

    # -- the model ------------------------------------------------------------------------------------------

    def lineage(self, seq):
        while seq is not None:
            yield self.commits[seq]
            seq = self.commits[seq].parent

    def head(self, branch):
        seq = self.heads.get(branch)
        return None if seq is None else self.commits[seq]

    def pick(self, branch, position):
        """A commit of a branch's lineage."""
        found = list(self.lineage(self.heads[branch]))
        return found[position % len(found)]

    def changed(self, branch, seed):
        """The next state of a branch: bits change, tensors come, go, swap, and take another form."""
        rng = np.random.default_rng(seed)
        head = self.head(branch)
        state = dict(head.state) if head is not None else {}
        for name in list(state):
            if rng.random() < 0.6:
                state[name] = flip(rng, state[name], int(rng.integers(1, 30)))
        what = int(rng.integers(0, 8))
        if what == 0 or not state:
            for _ in range(2):
                dtype = str(rng.choice(DTYPES))
                shape = (int(rng.integers(0, 12)), int(rng.integers(1, 9)) * 2)
                state[f"t{int(rng.integers(0, 6))}"] = random_bits(rng, dtype, shape)
        elif what == 1:
            del state[str(rng.choice(list(state)))]
        elif what == 2:
            names = list(state)
            first, second = (str(rng.choice(names)) for _ in range(2))
            state[first], state[second] = state[second], state[first]
        elif what == 3:
            name = str(rng.choice(list(state)))
            state[name] = Bits("U8", (len(state[name].raw),), state[name].raw)
        elif what == 4:
            name = str(rng.choice(list(state)))
            rows = Bits("U8", (len(state[name].raw) + 300,), state[name].raw + rng.bytes(300))
            state[name] = rows if len(rows.raw) < 2000 else Bits("U8", (10,), rows.raw[:10])
        elif what == 5:
            state["tied"] = state[str(rng.choice(list(state)))]
        return state

    def writer(self, branch):
        if branch not in self.writers:
            self.writers[branch] = self.store.writer(branch, policy=self.policy)
            self.heads.setdefault(branch, None)
        return self.writers[branch]

    def committed(self, branch, info, step, state):
        assert info.created
        assert info.root == spec_root(state, BLOCK, self.digest)
        self.commits[info.seq] = Commit(info.seq, step, self.heads[branch], state)
        self.heads[branch] = info.seq

    def next_step(self, branch, above):
        head = self.head(branch)
        return above if head is None else head.step + above

    def given(self, state):
        return {name: tensor.numpy() for name, tensor in state.items()}

    # -- writing --------------------------------------------------------------------------------------------

    @rule(branch=st.sampled_from(BRANCHES), seed=seeds, above=st.integers(1, 3), block=st.booleans())
    def commit(self, branch, seed, above, block):
        writer, step = self.writer(branch), self.next_step(branch, above)
        state = self.changed(branch, seed)
        info = writer.commit(step=step, tensors=self.given(state), allow_set_change=True, block=block)
        self.committed(branch, info if block else info.result(), step, state)

    @rule(branch=st.sampled_from(BRANCHES), seed=seeds, above=st.integers(1, 3), elsewhere=st.booleans())
    def commit_parts(self, branch, seed, above, elsewhere):
        """Two ranks and a rest; one tensor may be in two of them."""
        writer, step = self.writer(branch), self.next_step(branch, above)
        state = self.changed(branch, seed)
        items = list(self.given(state).items())
        stager = writer
        if elsewhere:
            stager = df.open(self.storage).stager(str(writer.ticket), policy=self.policy)
        parts = [
            stager.stage(step=step, tensors=dict(items[0::3])),
            Part.from_bytes(writer.stage(step=step, tensors=dict(items[1::3] + items[:1])).to_bytes()),
        ]
        info = writer.commit(step=step, tensors=items[2::3], parts=parts, allow_set_change=True)
        self.committed(branch, info, step, state)

    @rule(branch=st.sampled_from(BRANCHES), seed=seeds, nth=st.integers(0, 12))
    def commit_that_fails(self, branch, seed, nth):
        """DF-WR-01: the n-th operation of a commit fails; nothing has moved."""
        writer, step = self.writer(branch), self.next_step(branch, 1)
        state, left = self.changed(branch, seed), [nth]

        def fault(operation, key):
            if key.startswith("hints/"):
                return None
            left[0] -= 1
            return not_stored(key) if left[0] < 0 else None

        self.faulty.fault = fault
        try:
            info = writer.commit(step=step, tensors=self.given(state), allow_set_change=True)
        except StoreError:
            pass
        else:
            self.committed(branch, info, step, state)
        finally:
            self.faulty.fault = self.faulty.none

    @rule(branch=st.sampled_from(BRANCHES), seed=seeds)
    def commit_that_is_refused(self, branch, seed):
        """DF-CMT-05, DF-CMT-07."""
        head = self.head(branch)
        if head is None:
            return
        writer = self.writer(branch)
        again = writer.commit(step=head.step, tensors=self.given(head.state))
        assert (again.created, again.seq) == (False, head.seq)
        other = head.state | {"new": random_bits(np.random.default_rng(seed), "U8", (5,))}
        for step, tensors in ((head.step + 1, other), (head.step - 1, head.state)):
            if step < 0:
                continue
            try:
                writer.commit(step=step, tensors=self.given(tensors))
            except InconsistentError as error:
                wanted = ErrorCode.SET_CHANGED if step > head.step else ErrorCode.STEP_NOT_ABOVE_HEAD
                assert error.code is wanted or "new" in head.state
            else:
                assert "new" in head.state
                seq = self.store.branches()[branch].seq
                self.commits[seq] = Commit(seq, step, head.seq, tensors)
                self.heads[branch] = seq
                return

    @precondition(lambda self: any(self.heads.values()))
    @rule(data=st.data(), position=positions)
    def rewind(self, data, position):
        """DF-LOG-07, DF-CMT-04."""
        branch = data.draw(st.sampled_from([name for name, seq in self.heads.items() if seq is not None]))
        target = self.pick(branch, position)
        try:
            writer = self.store.writer(branch, resume_from=target.step, policy=self.policy)
        except MissingError as error:
            assert error.code is ErrorCode.VERSION_RETIRED
            assert not target.live
            return
        assert target.live
        if branch in self.writers:
            self.fenced.append(self.writers.pop(branch))
        self.writers[branch] = writer
        self.heads[branch] = target.seq

    @precondition(lambda self: self.fenced)
    @rule()
    def use_a_fenced_writer(self):
        writer = self.fenced.pop()
        try:
            writer.commit(step=1 << 40, tensors={}, allow_set_change=True)
        except ConflictError as error:
            assert error.code is ErrorCode.BRANCH_HELD
        else:
            raise AssertionError("a fenced writer has committed")
        writer.close()

    @rule()
    def reopen(self):
        for writer in self.writers.values():
            writer.close()
        self.writers.clear()
        self.store = df.open(self.faulty)

    # -- branches and tags ----------------------------------------------------------------------------------

    @precondition(lambda self: any(self.heads.values()))
    @rule(data=st.data(), new=st.sampled_from(BRANCHES), position=positions)
    def fork(self, data, new, position):
        branch = data.draw(st.sampled_from([name for name, seq in self.heads.items() if seq is not None]))
        source = self.pick(branch, position)
        try:
            self.store.fork(new, branch=branch, step=source.step)
        except ConflictError as error:
            assert error.code is ErrorCode.ALREADY_EXISTS
            assert new in self.heads
        except MissingError as error:
            assert error.code is ErrorCode.VERSION_RETIRED
            assert not source.live
        else:
            assert source.live
            assert new not in self.heads
            self.heads[new] = source.seq

    @precondition(lambda self: any(self.heads.values()))
    @rule(data=st.data(), name=st.sampled_from(TAGS), position=positions)
    def tag(self, data, name, position):
        branch = data.draw(st.sampled_from([name for name, seq in self.heads.items() if seq is not None]))
        target = self.pick(branch, position)
        try:
            self.store.tag(name, branch=branch, step=target.step)
        except ConflictError as error:
            assert error.code is ErrorCode.ALREADY_EXISTS
            assert name in self.tags
        except MissingError as error:
            assert error.code is ErrorCode.VERSION_RETIRED
            assert not target.live
        else:
            assert target.live
            assert name not in self.tags
            self.tags[name] = target.seq

    @rule(name=st.sampled_from(TAGS))
    def delete_tag(self, name):
        try:
            self.store.delete_tag(name)
        except MissingError as error:
            assert error.code is ErrorCode.TAG_MISSING
            assert name not in self.tags
        else:
            del self.tags[name]

    @precondition(lambda self: len(self.heads) > 1)
    @rule(data=st.data())
    def drop(self, data):
        branch = data.draw(st.sampled_from(sorted(self.heads)))
        self.store.drop(branch)
        del self.heads[branch]
        if branch in self.writers:
            self.fenced.append(self.writers.pop(branch))

    # -- collecting -----------------------------------------------------------------------------------------

    @rule(keep_last=st.integers(1, 3), keep_every=st.sampled_from([None, 2, 5]), twice=st.booleans())
    def gc(self, keep_last, keep_every, twice):
        """DF-GC-01 to DF-GC-05: what is kept stays whole, what is retired goes once its grace is over."""
        kept = set(self.tags.values())
        for seq in self.heads.values():
            for position, commit in enumerate(self.lineage(seq)):
                if position < keep_last or (keep_every is not None and commit.step % keep_every == 0):
                    kept.add(commit.seq)
        doomed = {seq for seq, commit in self.commits.items() if commit.live and seq not in kept}
        before = dict(self.storage.objects)
        dry = self.store.gc(keep_last=keep_last, keep_every=keep_every)
        assert {seq for _, _, seq in dry.retired} == doomed
        assert {key for key in self.storage.objects if not key.startswith("hints/")} == {
            key for key in before if not key.startswith("hints/")
        }
        for _ in range(1 + twice):
            report = self.store.gc(
                keep_last=keep_last, keep_every=keep_every, grace=timedelta(hours=1), dry_run=False
            )
            assert {seq for _, _, seq in report.retired} == doomed
            for seq in doomed:
                self.commits[seq].live = False
            doomed = set()
            self.storage.advance(hours=2)
        deleted = {key.partition("/")[0] for key in before.keys() - self.storage.objects.keys()}
        assert deleted <= {"manifests", "packs", "files", "hints"}
        assert f"packs/external/{'0' * 64}" in self.storage.objects  # DF-GC-04

    # -- reading --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.commits)
    @rule(data=st.data(), fresh=st.booleans())
    def read_by_seq(self, data, fresh):
        commit = data.draw(st.sampled_from(sorted(self.commits.values(), key=lambda commit: commit.seq)))
        self.read(commit, lambda store: store.version(seq=commit.seq), fresh)

    @precondition(lambda self: any(self.heads.values()))
    @rule(data=st.data(), position=positions, fresh=st.booleans())
    def read_by_step(self, data, position, fresh):
        branch = data.draw(st.sampled_from([name for name, seq in self.heads.items() if seq is not None]))
        commit = self.pick(branch, position)
        self.read(commit, lambda store: store.version(step=commit.step, branch=branch), fresh)
        steps = {commit.step for commit in self.lineage(self.heads[branch])}
        for step in {
            commit.step + 1,
            max(steps) + 1,
        } - steps:  # also where a commit that was superseded had it
            try:
                self.reader.version(step=step, branch=branch)
            except MissingError as error:
                assert error.code is ErrorCode.VERSION_MISSING
            else:
                raise AssertionError(f"step {step} is no step of {branch}")

    @precondition(lambda self: self.tags)
    @rule(data=st.data(), fresh=st.booleans())
    def read_by_tag(self, data, fresh):
        tag = data.draw(st.sampled_from(sorted(self.tags)))
        self.read(self.commits[self.tags[tag]], lambda store: store.version(tag=tag), fresh)

    def read(self, commit, find, fresh):
        store = df.open(self.storage) if fresh else self.reader
        try:
            version = find(store)
            assert (version.seq, version.step, version.parent) == (commit.seq, commit.step, commit.parent)
            check(version, commit.state)
        except MissingError as error:
            assert error.code is ErrorCode.VERSION_RETIRED
            assert not commit.live
            return
        for name, tensor in commit.state.items():
            rows = tensor.shape[0]
            if rows and tensor.dtype != "F4":
                size = len(tensor.raw) // rows
                part = Bits(
                    tensor.dtype, (rows - rows // 2, *tensor.shape[1:]), tensor.raw[rows // 2 * size :]
                )
                assert part.same_bits(version.get_slice(name)[rows // 2 :])
        parent = self.commits.get(commit.parent)
        if parent is not None and parent.live and commit.live:
            previous = store.version(seq=parent.seq)
            check_all(version.follow(previous, previous.state_dict()), commit.state)

    # -- always ---------------------------------------------------------------------------------------------

    @invariant()
    def branches_and_tags(self):
        if not hasattr(self, "heads"):
            return
        for store in (self.store, self.reader):
            assert {name: head.seq for name, head in store.branches().items()} == self.heads
            assert store.tags() == self.tags

    @rule()
    def verify(self):
        assert self.reader.verify(all=True).findings == []

    def teardown(self):
        if not hasattr(self, "heads"):
            return
        for writer in [*self.writers.values(), *self.fenced]:
            writer.close()
        store = df.open(self.storage)
        report = store.verify(all=True)
        assert report.findings == []
        assert report.versions == sum(commit.live for commit in self.commits.values())
        for commit in self.commits.values():
            if commit.live:
                check(store.version(seq=commit.seq), commit.state)


TestStores = Stores.TestCase
