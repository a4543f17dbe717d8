"""What `commit` promises: what is refused, what is kept, what it tells (SPEC 12.5, 14)."""

import itertools
import json
import os
import threading

import numpy as np
import pytest
from watching import Faulty, Recorder
from writertools import BLOCK, bf16, check_follow, kinds, make, memory, put_keys, reads, state, trained

import deltaformat as df
from deltaformat import Policy, Progress
from deltaformat.errors import (
    ConflictError,
    ErrorCode,
    InconsistentError,
    LimitError,
    MalformedError,
    MissingError,
    StoreError,
    UnsafeError,
)
from deltaformat.keys import claim_of, parse_key

# -- sets of names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["vanishes", "appears", "renamed"])
def test_another_set_of_names_must_be_allowed(change):
    """DF-CMT-07: the error names a tensor; nothing reaches the log; what is allowed is stored exactly."""
    store, first = make(), state(0)
    second = dict(first)
    if change != "appears":
        second.pop("w1")
    if change != "vanishes":
        second["new"] = first["w1"]
    with store.writer() as writer:
        writer.commit(step=0, tensors=first)
        with pytest.raises(InconsistentError, match="new" if change == "appears" else "w1") as caught:
            writer.commit(step=1, tensors=second)
        assert caught.value.code is ErrorCode.SET_CHANGED
        assert kinds(store) == ["commit", "claim"]
        info = writer.commit(step=1, tensors=second, allow_set_change=True)
        assert info.tensors == len(second)
        reads(store.version(), second)
        reads(store.version(step=0), first)
        with pytest.raises(InconsistentError):
            writer.commit(step=2, tensors=first)


def test_a_stream_cut_short_deletes_nothing():
    """DF-CMT-07: a generator that ends early, and one that fails; the next commit is right and sees all
    changes.
    """
    store, first = make(), state(1)
    second = trained(first)

    def cut(error):
        yield from itertools.islice(second.items(), 2)
        if error is not None:
            raise error

    with store.writer(policy=Policy(pack_bytes=1000)) as writer:
        writer.commit(step=0, tensors=first)
        threads = threading.active_count()
        with pytest.raises(InconsistentError) as caught:
            writer.commit(step=1, tensors=cut(None))
        assert caught.value.code is ErrorCode.SET_CHANGED
        with pytest.raises(OSError, match="disk"):
            writer.commit(step=1, tensors=cut(OSError("disk")))
        with pytest.raises(KeyboardInterrupt):
            writer.commit(step=1, tensors=cut(KeyboardInterrupt()))
        assert threading.active_count() == threads
        info = writer.commit(step=1, tensors=second)
        assert info.changed_blocks > 0
    reads(store.version(), second)
    check_follow(store, 0, 1, second)


def test_a_name_given_twice_is_refused():
    store, first = make(), state(2)
    with store.writer() as writer:
        with pytest.raises(InconsistentError, match="twice"):
            writer.commit(step=0, tensors=[*first.items(), ("w1", first["w2"])])
        writer.commit(step=0, tensors=first)
    reads(store.version(), first)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"w": [1.0, 2.0]}, MalformedError),
        ({"w": np.array(["text"])}, df.errors.UnsupportedError),
        ({"\ud800": np.ones(3)}, MalformedError),
        ({3: np.ones(3)}, MalformedError),
        ({"a" * 65536: np.ones(3)}, MalformedError),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused_at_once(tensors, error):
    """DF-BLK-03, DF-DTY-01: whole, and in a background commit before it returns."""
    store = make()
    with store.writer() as writer:
        for block in (True, False):
            with pytest.raises(error):
                writer.commit(step=0, tensors=tensors, block=block)
        writer.commit(step=0, tensors={"w": np.ones(3)})
    assert kinds(store) == ["commit", "claim"]


# -- steps ---------------------------------------------------------------------------------------------------


def test_steps_must_rise():
    """DF-CMT-05: a lower step is told at once, the head's own with other weights too, and nothing is
    written.
    """
    store, first = make(), state(3)
    with store.writer() as writer:
        writer.commit(step=5, tensors=first)
        for step in (0, 4, 5):
            with pytest.raises(InconsistentError, match="step") as caught:
                writer.commit(step=step, tensors=trained(first))
            assert caught.value.code is ErrorCode.STEP_NOT_ABOVE_HEAD
        assert kinds(store) == ["commit", "claim"]
        writer.commit(step=2**53 - 1, tensors=first)
    assert store.version(step=2**53 - 1).step == 2**53 - 1


@pytest.mark.parametrize("step", [-1, 2**53, True, 1.0, "1", None])
def test_what_is_no_step_is_refused(step):
    with make().writer() as writer, pytest.raises(MalformedError):
        writer.commit(step=step, tensors={})


def test_the_same_step_and_weights_again():
    """DF-CMT-05: the existing commit is the answer, and the log has nothing new; also for a writer that
    came later.
    """
    watched = Recorder(memory())
    store, first = make(watched), state(4)
    with store.writer() as writer:
        created = writer.commit(step=3, tensors=first, metadata={"a": 1})
        watched.clear()
        again = writer.commit(step=3, tensors=first)
        assert not put_keys(watched)
        by_part = writer.commit(step=3, parts=[writer.stage(step=3, tensors=first)])
    with store.writer() as writer:
        later = writer.commit(step=3, tensors=first)
    assert created.created
    for info in (again, by_part, later):
        assert (info.created, info.seq, info.root, info.step) == (False, created.seq, created.root, 3)
        assert (info.payload_bytes, info.bytes_written) == (0, 0)
    assert kinds(store) == ["claim", "commit", "claim"]
    assert store.version().metadata == {"a": 1}


def test_an_empty_step_is_a_step():
    """A step that changes nothing is a version of its own; one that failed is none."""
    store, first = make(), state(5)
    with store.writer() as writer:
        infos = [writer.commit(step=step, tensors=first) for step in range(3)]
    assert [info.created for info in infos] == [True] * 3
    assert infos[2].pack_bytes == 0
    assert [record.step for record in store.log() if record.kind == "commit"] == [2, 1, 0]


# -- rewinds and reopening -----------------------------------------------------------------------------------


def test_resume_from_an_earlier_step():
    """DF-LOG-07: later commits stay readable by seq, and no search by step finds them."""
    store, states = make(), [state(6)]
    for step in range(5):
        states.append(trained(states[-1], step))
    with store.writer() as writer:
        seqs = [writer.commit(step=10 * step, tensors=states[step]).seq for step in range(5)]
    other = trained(states[2], 99)
    with store.writer(resume_from=20) as writer:
        assert store.branches()["main"].step == 20
        reads(store.version(), states[2])
        info = writer.commit(step=30, tensors=other)
        assert info.created
        assert info.payload_bytes < 4 * 40
        assert store.version().parent == seqs[2]
    for seq, step in ((seqs[3], 3), (seqs[4], 4)):
        reads(store.version(seq=seq), states[step])
    reads(store.version(step=30), other)
    with pytest.raises(MissingError) as caught:
        store.version(step=40)
    assert caught.value.code is ErrorCode.VERSION_MISSING
    assert store.verify(all=True).findings == []


def test_resume_from_what_is_not_there():
    store, first = make(), state(7)
    with pytest.raises(MissingError) as caught:
        store.writer(resume_from=0)
    assert caught.value.code is ErrorCode.BRANCH_MISSING
    with store.writer() as writer:
        writer.commit(step=0, tensors=first)
        writer.commit(step=2, tensors=first)
        with pytest.raises(MissingError) as caught:
            store.writer(resume_from=1)
        assert caught.value.code is ErrorCode.VERSION_MISSING
        assert "claim" not in kinds(store)[:-1]  # no claim was made, so this writer goes on
        writer.commit(step=3, tensors=first)
    with store.writer(resume_from=3) as writer:  # the head itself
        assert not writer.commit(step=3, tensors=first).created


def test_reopening_reads_back_only_what_it_needs():
    """DF-WR-01: unchanged weights are known by their digests; only blocks that changed are read, and
    counted.
    """
    watched = Recorder(memory())
    store, first = make(watched), state(8)
    with store.writer() as writer:
        writer.commit(step=0, tensors=first)
    watched.clear()
    with df.open(watched).writer() as writer:
        info = writer.commit(step=1, tensors=first)
        assert (info.read_bytes, info.changed_blocks) == (0, 0)
        assert watched.of("get_ranges") == []
        second = dict(first)
        second["w2"] = trained({"w2": first["w2"]}, changes=1)["w2"]
    with df.open(watched).writer() as writer:
        info = writer.commit(step=2, tensors=second)
        (changed,) = np.flatnonzero(store.version().map.fresh) % 4
        assert (info.changed_blocks, info.read_bytes) == (1, min(BLOCK, 960 - BLOCK * changed))
        watched.clear()
        third = trained(second)
        info = writer.commit(step=3, tensors=third)  # now everything is held
        assert info.read_bytes == 0
        assert watched.of("get_ranges") == []
    for step, expected in enumerate((first, first, second, third)):
        reads(store.version(step=step), expected)
    check_follow(store, 1, 2, second)


# -- files and metadata --------------------------------------------------------------------------------------


def test_sidecar_files(tmp_path):
    """DF-MAN-10: None keeps the parent's, {} removes them, a mapping replaces them; content is written
    once.
    """
    watched = Recorder(memory())
    store, first = make(watched), state(9)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"tokens")
    expected = [
        {"config.json": b"{}", "a/b/tokenizer.json": b"tokens", "again": b"{}", "empty": b""},
        {"config.json": b"{}", "a/b/tokenizer.json": b"tokens", "again": b"{}", "empty": b""},
        {"config.json": b"{ }", "moved": b"tokens"},
        {},
        {},
    ]
    written = []
    with store.writer() as writer:
        for step, files in enumerate(
            [{**expected[0], "a/b/tokenizer.json": path}, None, expected[2], {}, None]
        ):
            watched.clear()
            info = writer.commit(step=step, tensors=first, files=files)
            written.append((len(put_keys(watched, "files/")), info.file_bytes))
    assert written == [(3, 8), (0, 0), (1, 3), (0, 0), (0, 0)]
    for step, files in enumerate(expected):
        version = df.open(watched).version(step=step)
        assert {path: version.read_file(path) for path in version.files()} == files
        assert {path: ref.size for path, ref in version.files().items()} == {
            p: len(c) for p, c in files.items()
        }
    with pytest.raises(MissingError) as caught:
        version.read_file("config.json")
    assert caught.value.code is ErrorCode.FILE_MISSING
    assert store.verify(all=True).findings == []


def test_what_is_no_sidecar_file_is_refused(tmp_path):
    """DF-LIM-02, DF-SEC-01: neither a disk's worth of nothing nor a pipe is read."""
    with make().writer() as writer:
        huge, pipe = tmp_path / "huge", tmp_path / "pipe"
        with huge.open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(LimitError, match="of a sidecar file"):
            writer.commit(step=0, tensors={}, files={"a": huge})
        os.mkfifo(pipe)
        with pytest.raises(MalformedError, match="neither bytes nor"):
            writer.commit(step=0, tensors={}, files={"a": pipe})


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a//b", "a/./b", "", "a\0", "c:\\x", "a/..", "x" * 2000]
)
def test_unsafe_sidecar_paths_are_refused(path):
    """DF-MAN-10, DF-SEC-01."""
    store = make()
    with store.writer() as writer:
        with pytest.raises(UnsafeError):
            writer.commit(step=0, tensors={}, files={path: b""})
        with pytest.raises(MalformedError, match=r"missing\.json"):
            writer.commit(step=0, tensors={}, files={"a": "/nowhere/missing.json"})
        writer.commit(step=0, tensors={}, files={"a": b""})
    assert list(store.version().files()) == ["a"]


def test_metadata():
    """DF-JSN-01: what I-JSON holds comes back; anything else is refused before the commit."""
    metadata = {"loss": 0.1, "n": 2**53 - 1, "é\u2028": ["\U0001f600", None, True, {"": []}], "big": 1e300}
    store = make()
    with store.writer() as writer:
        writer.commit(step=0, tensors={}, metadata=metadata)
        writer.commit(step=1, tensors={})
        deep = {}
        for _ in range(40):
            deep = {"deep": deep}
        for wrong in (
            {"nan": float("nan")},
            {"big": 10**400},
            {"text": "\ud800"},
            {"bytes": b""},
            {"much": "x" * (1 << 20)},
            deep,
        ):
            with pytest.raises(MalformedError, match="metadata"):
                writer.commit(step=2, tensors={}, metadata=wrong)
        assert writer.commit(step=2, tensors={}, metadata={"step": 2}).created
    assert [store.version(step=step).metadata for step in range(3)] == [metadata, {}, {"step": 2}]
    store.version(step=0).metadata["loss"] = 1
    assert store.version(step=0).metadata == metadata


def test_a_commit_needs_something_to_commit():
    with make().writer() as writer, pytest.raises(MalformedError, match="tensors"):
        writer.commit(step=0)


# -- claims --------------------------------------------------------------------------------------------------


def test_a_fenced_writer_says_who_holds_the_branch():
    """DF-CMT-04."""
    store, first = make(), state(17)
    with store.writer() as old:
        old.commit(step=0, tensors=first)
        with store.writer() as new:
            claim = store.log()[0]
            for attempt in (
                lambda: old.commit(step=1, tensors=first),
                lambda: old.stage(step=1, tensors=first),
            ):
                with pytest.raises(
                    ConflictError, match=f"held by host {claim.host}, pid {claim.pid}"
                ) as caught:
                    attempt()
                assert caught.value.code is ErrorCode.BRANCH_HELD
            new.commit(step=1, tensors=first)
            with store.writer("other") as beside:
                beside.commit(step=0, tensors={})
            new.commit(step=2, tensors=first)
            store.drop("main")
            with pytest.raises(ConflictError, match="dropped"):
                new.commit(step=3, tensors=first)


def test_objects_are_durable_before_they_are_named():
    """DF-CMT-01, DF-CMT-06, DF-STO-01: packs and files, then the manifest, then the record; all under its
    claim.
    """
    watched = Recorder(memory())
    store, first = make(watched), state(18)
    with store.writer("a") as writer:
        writer.commit(step=0, tensors=first)
    with store.writer("b", policy=Policy(pack_bytes=1000)) as writer:
        watched.clear()
        writer.commit(step=0, tensors=first, files={"f": b"1"})
        order = [parse_key(key).kind.name for key in map(str, put_keys(watched))]
        writes = [call for call in watched.calls if call.operation in ("put", "create")]
    kinds_in_order = [call.key.partition("/")[0] for call in writes if not call.key.startswith("hints/")]
    assert sorted(set(kinds_in_order)) == ["files", "log", "manifests", "packs"]
    last = {kind: len(kinds_in_order) - 1 - kinds_in_order[::-1].index(kind) for kind in set(kinds_in_order)}
    assert max(last["packs"], last["files"]) < last["manifests"] < last["log"] == len(kinds_in_order) - 1
    assert len(order) == len(writes)
    record = store.log()[0]
    named = {ref.key for ref in (*record.manifests, *record.objects_added)}
    assert named == {call.key for call in writes if not call.key.startswith(("hints/", "log/"))}
    assert {claim_of(key) for key in named} == {record.claim}
    created = [call.key for call in watched.of("create")]
    assert created == [f"log/{record.seq:020}.json"]


class NoCreate(Faulty):
    """A storage that ignores the condition of *create*."""

    def create(self, key, data):
        self.inner.put(key, data)
        return True


def test_a_storage_without_create(tmp_path):
    """DF-STO-02: refused, unless the user promises to be the only writer, which the claim states."""
    inner = memory()
    make(inner)
    store = df.open(NoCreate(inner))
    with pytest.raises(StoreError) as caught:
        store.writer()
    assert caught.value.code is ErrorCode.CREATE_UNSAFE
    assert store.log() == []
    with store.writer(single_writer=True) as writer:
        writer.commit(step=0, tensors=state(19))
        writer.commit(step=1, tensors=state(20))
    assert store.log()[-1].single_writer
    reads(df.open(inner).version(), state(20))


# -- what a commit tells -------------------------------------------------------------------------------------


def test_what_a_commit_tells():
    """Counts of bytes are those of the objects that were written."""
    watched = Recorder(memory())
    store, tensors = make(watched), state(33)
    sizes = {}

    def written():
        after = {info.key: info.size for info in watched.inner.list("") if not info.key.startswith("hints/")}
        new = {key: size for key, size in after.items() if key not in sizes}
        sizes.update(after)
        return new

    with store.writer() as writer:
        written()
        for step in range(4):
            info = writer.commit(step=step, tensors=tensors, files={"f": b"content"} if step == 0 else None)
            new = written()
            by_kind = {
                kind: sum(size for key, size in new.items() if key.startswith(kind))
                for kind in ("packs/", "manifests/", "log/", "files/")
            }
            assert info.pack_bytes == by_kind["packs/"]
            assert info.manifest_bytes == by_kind["manifests/"]
            assert info.record_bytes == by_kind["log/"]
            assert info.file_bytes == by_kind["files/"]
            assert info.bytes_written == sum(new.values())
            assert info.packs == sum(key.startswith("packs/") for key in new)
            assert (info.tensors, info.blocks, info.nbytes) == (4, 16, 4 * 960)
            assert (info.branch, info.step, info.created) == ("main", step, True)
            assert info.root == store.version().root
            assert set(info.timings) == {
                "stage", "encode", "files", "manifest", "record", "collect", "total",
            }  # fmt: skip
            assert all(seconds >= 0 for seconds in info.timings.values())
            phases = [info.timings[phase] for phase in info.timings.keys() - {"encode", "total"}]
            assert sum(phases) <= info.timings["total"] + 1e-6
            assert info.payload_bytes <= info.pack_bytes
            json.dumps(dict(info.timings))
            tensors = trained(tensors, step)


def test_progress():
    """Bytes rise to the total in each phase; a stream has no total; what the callback raises ends the
    commit.
    """
    told = []
    tensors = state(34)
    store = make()
    with store.writer(progress=told.append, policy=Policy(pack_bytes=1000)) as writer:
        info = writer.commit(step=0, tensors=tensors)
        assert all(isinstance(progress, Progress) for progress in told)
        stage = [progress for progress in told if progress.phase == "stage"]
        upload = [progress for progress in told if progress.phase == "upload"]
        assert {progress.phase for progress in told} == {"stage", "upload"}
        assert [p.done for p in stage] == sorted({p.done for p in stage})
        assert (stage[-1].done, stage[-1].total) == (info.nbytes, info.nbytes)
        assert max(p.done for p in upload) == info.pack_bytes
        assert len(upload) == info.packs
        told.clear()
        writer.commit(step=1, tensors=iter(tensors.items()))
        assert {p.total for p in told} == {None}
        assert told[-1].done == info.nbytes


def test_what_vanished_is_forgotten():
    """Memory: one host copy of the state, whatever came and went, and whatever failed."""
    store, first = make(), state(40)
    with store.writer() as writer:
        for step in range(6):
            tensors = {f"{name}.{step}": array for name, array in trained(first, step).items()}
            with pytest.raises(InconsistentError):
                writer.commit(step=step, tensors=[*tensors.items(), *list(tensors.items())[:1]])
            info = writer.commit(step=step, tensors=tensors, allow_set_change=True)
            assert writer._baseline.nbytes == info.nbytes


def test_a_progress_callback_that_raises():
    def cancel(progress):
        raise InterruptedError

    store, tensors = make(), state(35)
    with store.writer(progress=cancel) as writer, pytest.raises(InterruptedError):
        writer.commit(step=0, tensors=tensors)
    assert kinds(store) == ["claim"]
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
    reads(store.version(), tensors)


@pytest.mark.parametrize("grown", [0, 1, 20, -20])
def test_what_is_held_is_what_was_staged(grown):
    """Also where only changes are taken over, and where a tensor had another size before."""
    rng = np.random.default_rng(3)
    before = {"w": bf16(rng, 100, 20), "v": bf16(rng, 9, 64)}
    after = trained(before, changes=2)
    rows = np.concatenate([after["w"], bf16(rng, 20, 20)])[: 100 + grown]
    states = [before, after | {"w": rows}]
    states += [trained(states[-1], seed, changes=3) for seed in (1, 2)]
    store = make()
    with store.writer() as writer:
        for step, tensors in enumerate(states):
            writer.commit(step=step, tensors=tensors)
            for name, array in tensors.items():
                held = writer._baseline.get(name)
                assert held.data.tobytes() == array.tobytes()
                assert held.valid.all()
    for step, tensors in enumerate(states):
        reads(store.version(step=step), tensors)
