"""Whatever a writer does, and whatever fails, a follower's weights are those of a cold read, bit for bit.

A writer commits, rewinds, forks and re-bases; followers with private and shared mirrors skip, go back, roll
back, fail, end and start again. Nothing but fresh pieces is fetched, and as many bytes as the maps between
say.
"""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from bitstates import check_all, flip, random_bits
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tinystore import BLOCK, DictStorage
from watching import Faulty, Recorder, failure

import deltaformat as df
from deltaformat import Policy
from deltaformat.errors import InconsistentError, StoreError

DTYPES = ("BF16", "F32", "U8", "F8_E4M3", "F64", "F4")
seeds = st.integers(0, 1 << 16)


class Process:
    """A follower, the live weights of its process, and what the model says these are."""

    def __init__(self, storage, mirror, framework):
        self.watched = Recorder(storage)
        self.faulty = Faulty(self.watched)
        self.mirror, self.framework = mirror, framework
        self.start()

    def start(self):
        self.follower = df.open(self.faulty).follower(mirror=self.mirror, framework=self.framework)
        self.live, self.seq = {}, None


class Followers(RuleBasedStateMachine):
    @initialize(max_chain=st.integers(2, 5), strata=st.booleans(), planes=st.booleans())
    def begin(self, max_chain, strata, planes):
        self.directory = Path(tempfile.mkdtemp(prefix="deltaformat-test-"))
        self.storage = DictStorage()
        self.policy = Policy(
            max_chain=max_chain,
            strata=strata,
            keyframe="planes" if planes else "raw",
            pack_bytes=1,  # every piece in a pack of its own: what is fetched is what is meant
            threads=1,
        )
        self.store = df.create(self.storage, block_bytes=BLOCK)
        self.states, self.parents, self.steps = {}, {}, {}  # by seq
        self.head = None
        self.writer = self.store.writer(policy=self.policy)
        shared = f"file:{self.directory / 'mirror'}"
        self.processes = [
            Process(self.storage, None, "np"),
            Process(self.storage, shared, "np"),
            Process(self.storage, shared, "pt"),
        ]

    def teardown(self):
        if hasattr(self, "directory"):
            self.writer.close()
            for process in self.processes:
                process.follower.close()
            shutil.rmtree(self.directory)

    # -- writing --------------------------------------------------------------------------------------------

    @rule(seed=seeds, count=st.integers(1, 4), sets=st.integers(0, 9))
    def commit(self, seed, count, sets):
        for number in range(count):
            rng = np.random.default_rng((seed, number))
            state = dict(self.states.get(self.head, {}))
            for name in list(state):
                if rng.random() < 0.6:
                    state[name] = flip(rng, state[name], int(rng.integers(1, 12)))
            if sets == 0 or not state:
                for _ in range(2):
                    shape = (int(rng.integers(0, 12)), int(rng.integers(1, 12)) * 8)
                    state[f"t{int(rng.integers(0, 5))}"] = random_bits(rng, str(rng.choice(DTYPES)), shape)
            elif sets == 1 and len(state) > 1:
                del state[str(rng.choice(list(state)))]
            step = 0 if self.head is None else self.steps[self.head] + 1
            tensors = {name: tensor.given for name, tensor in state.items()}
            info = self.writer.commit(step=step, tensors=tensors, allow_set_change=True)
            self.states[info.seq], self.parents[info.seq], self.steps[info.seq] = state, self.head, step
            self.head = info.seq

    @precondition(lambda self: self.head is not None)
    @rule(back=st.integers(1, 4))
    def rewind(self, back):
        seq = self.head
        for _ in range(back):
            seq = self.parents[seq] if self.parents[seq] is not None else seq
        self.writer = self.store.writer(resume_from=self.steps[seq], policy=self.policy)
        self.head = seq

    # -- following ------------------------------------------------------------------------------------------

    def newest(self, process):
        """The seq that the next stage without arguments gives, or None."""
        mirror = process.follower._mirror
        mirror.refresh()
        at = None if mirror.state is None else mirror.state.seq
        if mirror.leading and self.head is not None and (at is None or self.head > at):
            return self.head
        return None if at == process.seq else at

    def apply(self, process, staged):
        """Make live weights fit, as whoever restarts a server does, and apply."""
        state = self.states[staged.seq]
        before = self.states.get(process.seq, {})
        for name, tensor in state.items():
            known = before.get(name)
            if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                fresh = random_bits(np.random.default_rng(0), tensor.dtype, tensor.shape)
                process.live[name] = fresh.numpy() if process.framework == "np" else fresh.torch()
        staged.apply_to(process.live)

    def took(self, process, staged):
        process.seq = staged.seq
        process.live = {name: process.live[name] for name in self.states[staged.seq]}

    @precondition(lambda self: self.head is not None)
    @rule(data=st.data(), which=st.integers(0, 2), commit=st.booleans())
    def follow(self, data, which, commit):
        process = self.processes[which]
        expected = self.newest(process)
        process.watched.clear()
        staged = process.follower.stage()
        assert (None if staged is None else staged.seq) == expected
        if staged is None:
            return
        if process.follower.status().leading:
            self.check_fetched(process, staged)
        before = dict(process.live)
        self.apply(process, staged)
        if commit:
            staged.commit()
            self.took(process, staged)
        else:
            staged.rollback()
            process.live = before

    @precondition(lambda self: self.head is not None)
    @rule(data=st.data(), which=st.integers(0, 2))
    def go_to(self, data, which):
        """To any version at all, back and sideways too."""
        process = self.processes[which]
        process.follower._mirror.refresh()
        if not process.follower.status().leading:
            return
        seq = data.draw(st.sampled_from(sorted(self.states)))
        process.watched.clear()
        staged = process.follower.stage(seq=seq)
        self.check_fetched(process, staged)
        self.apply(process, staged)
        staged.commit()
        self.took(process, staged)

    @precondition(lambda self: self.head is not None)
    @rule(which=st.integers(0, 2), nth=st.integers(0, 6))
    def fail(self, which, nth):
        process, left = self.processes[which], [nth]

        def fault(operation, key):
            left[0] -= 1
            return failure(key) if left[0] < 0 else None

        process.faulty.fault = fault
        try:
            staged = process.follower.stage()
            if staged is not None:
                self.apply(process, staged)
                staged.commit()
                self.took(process, staged)
        except StoreError:
            assert process.follower.status().failures
        finally:
            process.faulty.fault = process.faulty.none

    @rule(which=st.integers(0, 2))
    def restart(self, which):
        process = self.processes[which]
        process.follower.close()
        process.start()

    @precondition(lambda self: self.head is not None)
    @rule(which=st.integers(0, 2))
    def apply_to_another_version(self, which):
        """Live weights that miss a version are told, and stay as they are."""
        process = self.processes[which]
        staged = process.follower.stage()
        if staged is None:
            return
        with staged:  # which rolls it back
            self.apply_wrongly(process, staged)

    def apply_wrongly(self, process, staged):
        if staged.whole or not staged.changed:
            return
        name = staged.changed[0]
        change = staged._changes.tensors[name]
        if change.content is not None or change.blocks[0].old is None:
            return
        block = change.blocks[0]
        at = block.start + int(block.positions[0])
        other = self.states[process.seq][name]
        raw = bytearray(other.raw)
        width = block.values.itemsize
        wrong = {int(block.old[0]), int(block.values[0])}
        value = next(v for v in range(3) if v not in wrong)
        raw[at * width : (at + 1) * width] = value.to_bytes(width, "little")
        wrong = type(other)(other.dtype, other.shape, bytes(raw))
        live = dict(process.live)
        live[name] = wrong.numpy() if process.framework == "np" else wrong.torch()
        for added in staged.specs.keys() - live.keys():
            tensor = self.states[staged.seq][added]
            live[added] = tensor.numpy() if process.framework == "np" else tensor.torch()
        try:
            staged.apply_to(live)
        except InconsistentError:
            assert wrong.same_bits(live[name])
        else:
            raise AssertionError("weights of another version were taken")

    def lineage(self, seq):
        while seq is not None:
            yield seq
            seq = self.parents[seq]

    def check_fetched(self, process, staged):
        """DF-RD-02: a follower at an ancestor fetches the fresh pieces of all versions between, or a chain
        from its start where that has fewer bytes; nothing else.
        """
        mirror = process.follower._mirror
        if mirror.state is None or mirror.state.seq not in self.lineage(staged.seq):
            return
        calls = process.watched.of("get_ranges", "packs/")
        got = {(call.key, range_) for call in calls for range_ in call.argument}
        path = []
        for seq in self.lineage(staged.seq):
            if seq == mirror.state.seq:
                break
            path.append(self.store.version(seq=seq).map)
        wanted = set()
        if path:
            target = path[0]
            for name in target.names:
                for index in range(*target.blocks(target.row(name)).indices(1 << 40)[:2]):
                    number = index - int(target.block_start[target.row(name)])
                    wanted |= cheapest(path, name, number)
        assert got == wanted

    @invariant()
    def live_weights_are_right(self):
        for process in getattr(self, "processes", []):
            if process.seq is not None:
                check_all(process.live, self.states[process.seq])
                state = process.follower._mirror.state
                if process.follower.status().leading and state.seq == process.seq:
                    check_all(process.follower.state_dict(), self.states[process.seq])


def cheapest(path, name, number):
    """The pieces by which a block is reached from before `path`, newest first: walked, or cold."""

    def pieces(version, count=None):
        block = int(version.block_start[version.row(name)]) + number
        end = int(version.piece_start[block + 1])
        start = int(version.piece_start[block]) if count is None else end - count
        return {
            (version.packs[int(version.pack[p])].key, (int(version.offset[p]), int(version.length[p])))
            for p in range(start, end)
        }

    walked = set()
    for version in path:
        fresh = int(version.fresh[int(version.block_start[version.row(name)]) + number])
        if fresh == 255:
            return pieces(path[0])
        walked |= pieces(version, fresh)
    cold = pieces(path[0])

    def size(found):
        return sum(length for _, (_, length) in found)

    return walked if size(walked) <= size(cold) else cold


TestFollowers = Followers.TestCase
