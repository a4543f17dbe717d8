"""What is fetched, request by request: readers read what they need, followers what is new, writers what they
must.
"""

import os
import time
import tracemalloc

import numpy as np
from tinystore import BLOCK, DictStorage, content, truth, weights
from watching import Recorder

import deltaformat as df
from deltaformat.encodings import Encoding, encode_planes
from deltaformat.history import State, ancestors_for
from deltaformat.judge import draft
from deltaformat.keys import DESCRIPTOR, TAIL_HINT, manifest_key, pack_key, parse_key, record_key
from deltaformat.log import Log
from deltaformat.manifest import encode_part
from deltaformat.packs import PackBuilder, PackRef
from deltaformat.records import (
    Claim,
    Commit,
    ManifestRef,
    ObjectRef,
    encode_record,
    parse_descriptor,
    record_hash,
)
from deltaformat.versionmap import NOT_FRESH, VersionMapBuilder, object_changes

MIB = 1 << 20


def commit_map(storage, version, packs):
    """Commit a map that no writer made: what it says of the tensors is what it is."""
    descriptor = parse_descriptor(storage.objects[DESCRIPTOR])
    for key, data in packs.items():
        storage.put(key, data)
    data, content_size = encode_part(
        version, parent=None, digest=descriptor.digest, block_bytes=descriptor.block_bytes
    )
    log = Log(storage)
    claim = log.append(Claim, lambda _: {"branch": "main", "epoch": 1, "host": "h", "pid": 1}).record
    key = manifest_key(claim.seq, record_hash(data))
    storage.put(key, data)
    added, _ = object_changes(version, None)
    log.append(
        Commit,
        lambda _: {
            "branch": "main",
            "claim": claim.seq,
            "step": 0,
            "parent": None,
            "depth": 0,
            "ancestors": (),
            "root": version.root(descriptor.digest, descriptor.block_bytes),
            "manifests": (ManifestRef(key, len(data), content_size),),
            "objects_added": tuple(ObjectRef(*ref) for ref in added),
        },
    )
    log.write_hint(force=True)


def gigabyte():
    """A store with one tensor of 1 GiB in 1,024 blocks, row r of 512 MiB bf16 numbers holding the bits r //
    512 (so a pack is tiny).

    A kilobyte of other payload lies between the pieces of two blocks, so that what is fetched can be told.
    """
    storage = DictStorage()
    store = df.create(storage)
    algorithm = store._context.algorithm
    builder, slots, digests = PackBuilder(), [], []
    for block in range(1024):
        data = np.full(MIB // 2, block, np.uint16).view(np.uint8)
        slots.append(builder.add(encode_planes(data, 2)))
        builder.add(os.urandom(100 << 10))
        digests.append(algorithm(data))
    pack = builder.finish()
    bytes_of = b"".join(pack.chunks)
    ref = PackRef(pack_key(0, pack.sha256()), pack.size)
    maps = VersionMapBuilder(digest_bytes=algorithm.size, packs=[ref])
    ones = np.ones(1024, np.uint8)
    maps.add_tensor(
        "big",
        "BF16",
        (524_288, 1024),
        digests=np.frombuffer(b"".join(digests), np.uint8),
        fresh=ones * NOT_FRESH,
        depth=ones,
        pack=np.zeros(1024, np.int64),
        offset=pack.offsets[slots],
        length=np.full(1024, len(encode_planes(data, 2))),
        encoding=ones * Encoding.PLANES,
    )
    commit_map(storage, maps.finish(), {ref.key: bytes_of})
    return storage, ref.key


def pieces_of(version, blocks):
    """(offset, length) of every piece of some blocks."""
    found = []
    for block in blocks:
        pieces = range(version.map.piece_start[block], version.map.piece_start[block + 1])
        found += [(int(version.map.offset[p]), int(version.map.length[p])) for p in pieces]
    return found


def ranges_read(recorder):
    return [r for call in recorder.of("get_ranges") for r in call.argument]


def test_sixteen_rows_of_a_gigabyte():
    """DF-RD-01: a slice fetches the pieces of the blocks that hold it and nothing else."""
    storage, pack = gigabyte()
    recorder = Recorder(storage)
    with df.open(recorder).version() as version:
        assert version.info("big") == df.TensorInfo("BF16", (524_288, 1024), 1 << 30, 1024)
        big = version.get_slice("big")
        for rows, blocks in [
            (slice(16), [0]),
            (slice(512 * 700 + 100, 512 * 700 + 116), [700]),
            (slice(512 * 9 - 8, 512 * 9 + 8), [8, 9]),
            (slice(-16, None), [1023]),
            (slice(524_287, 524_271, -1), [1023]),
            (slice(0, 512 * 6, 512 * 5), [0, 5]),
        ]:
            recorder.clear()
            found = big[rows]
            expected = np.arange(524_288)[rows] // 512
            assert found.shape == (len(expected), 1024)
            assert (found.view(np.uint16) == expected[:, None]).all()
            assert sorted(ranges_read(recorder)) == pieces_of(version, blocks)
            assert {call.key for call in recorder.calls} == {pack}
        recorder.clear()
        assert big[300_000, 77].view(np.uint16) == 300_000 // 512
        assert big[5:5].shape == (0, 1024)
        assert ranges_read(recorder) == pieces_of(version, [300_000 // 512])


def test_opening_reads_records_and_manifest():
    """DF-RD-01, DF-STO-03: opening a version touches the descriptor, hint, records and its manifest; readers
    never list.
    """
    storage = trained(6)
    for options in ({}, {"step": 3}, {"seq": 4}, {"tag": "best"}):
        recorder = Recorder(storage)
        version = df.open(recorder).version(**options)
        kinds = {parse_key(call.key).kind.value for call in recorder.calls}
        assert kinds <= {"descriptor", "tail hint", "record", "manifest"}
        assert {call.operation for call in recorder.calls} == {"get"}
        assert [call.key for call in recorder.of("get", "manifests/")] == [version.commit.manifests[0].key]
        recorder.clear()
        (
            version.keys(),
            version.info("w"),
            version.files(),
            version.metadata,
            version.root,
            version.get_slice("w"),
        )
        assert recorder.calls == []
        version.state_dict()
        assert {call.operation for call in recorder.calls} == {"get_ranges"}


def trained(steps, policy=df.Policy(max_chain=3), storage=None):  # noqa: B008 - it is frozen
    storage = DictStorage() if storage is None else storage
    store = df.create(storage, block_bytes=BLOCK)
    with store.writer(policy=policy) as writer:
        for step in range(steps):
            writer.commit(step=step, tensors=weights(step))
    store.tag("best", step=1)
    return storage


def test_one_tensor_of_a_version():
    """DF-RD-01: reading a tensor fetches the pieces of its blocks, and of no others."""
    recorder = Recorder(trained(5))
    with df.open(recorder).version() as version:
        for name in weights(0):
            recorder.clear()
            version.get_tensor(name)
            row = version.map.row(name)
            blocks = range(version.map.block_start[row], version.map.block_start[row + 1])
            needed = {
                (version.map.packs[version.map.pack[p]].key, int(version.map.offset[p]) + i)
                for block in blocks
                for p in range(version.map.piece_start[block], version.map.piece_start[block + 1])
                for i in range(int(version.map.length[p]))
            }
            got = {
                (call.key, offset + i)
                for call in recorder.of("get_ranges")
                for offset, length in call.argument
                for i in range(length)
            }
            assert needed <= got
            assert {key for key, _ in got} == {key for key, _ in needed}
            # Between two pieces of the same pack a gap may be read along: one request instead of two.
            assert len(got) - len(needed) <= 64 << 10


def ten_thousand():
    """A log of 10,000 commits, all of one manifest but step 1: made by pure code, as writers would."""
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    with store.writer() as writer:
        for step in range(2):
            info = writer.commit(step=step, tensors={"x": np.full(3, step, np.int32)})
    log = Log(storage)
    state, parent = log.tail(), log.judged(info.seq)

    class Parent:
        def commit(self, seq):
            return parent

        def is_live(self, seq):
            return True

    for step in range(2, 10_000):
        commit = draft(
            Commit,
            state,
            Parent(),
            nonce=f"{step:032}",
            time="2026-01-01T00:00:00Z",
            branch="main",
            claim=0,
            step=step,
            parent=parent.seq,
            depth=parent.depth + 1,
            ancestors=ancestors_for(parent),
            root=parent.root,
            manifests=parent.manifests,
        )
        data = encode_record(commit)
        storage.objects[record_key(commit.seq)] = data
        state, parent = State(commit.seq, record_hash(data), commit.heads), commit
    return storage, state.seq


def test_step_1_of_10_000():
    """DF-LOG-08, DF-LOG-09: finding an old step takes fewer than 25 requests with a hint, also a stale one,
    and few without.
    """
    storage, newest = ten_thousand()
    assert newest == 10_000
    for hint, most in [
        (newest, 24),
        (newest - 3, 24),
        (newest - 40, 36),
        (None, 45),
        (newest + 1, 45),
        (0, 45),
    ]:
        storage.objects.pop(TAIL_HINT, None)
        if hint is not None:
            storage.objects[TAIL_HINT] = b'{"seq":%d}' % hint
        recorder = Recorder(storage)
        with df.open(recorder).version(step=1) as version:
            assert version.get_tensor("x").tolist() == [1, 1, 1]
        assert {call.operation for call in recorder.calls} == {"get", "get_ranges"}
        assert len(recorder.calls) <= most, hint
    recorder.clear()
    store = df.open(recorder)
    store.branches()
    recorder.clear()
    worst = 0
    for step in (1, 2, 3, 4_095, 4_096, 5_000, 7_777, 9_998, 9_999):
        recorder.clear()
        assert store._context.log.find_step(store.branches()["main"], step).step == step
        worst = max(worst, len(recorder.calls))
    assert worst <= 16
    recorder.clear()
    assert store.branches()["main"].step == 9_999  # where nothing is new: one request
    assert len(recorder.calls) == 1


def test_requests_of_a_commit():
    """DF-CMT-01, DF-LOG-10: a commit is its packs, its manifest, a look at the log's end and a record; the
    hint at most once a second.
    """
    recorder = Recorder(DictStorage())
    with df.create(recorder, block_bytes=BLOCK).writer(policy=df.Policy(max_chain=4)) as writer:
        for step in range(12):
            time.sleep(1.1 if step == 6 else 0)
            recorder.clear()
            info = writer.commit(step=step, tensors=weights(step), files={"n.txt": b"%d" % step})
            made = [call for call in recorder.calls if call.key != TAIL_HINT]
            puts = [parse_key(call.key).kind.value for call in made if call.operation == "put"]
            assert sorted(puts) == ["file", "manifest", *["pack"] * info.packs]
            assert puts[-1] == "manifest"
            creates = [call.key for call in made if call.operation == "create"]
            assert creates == [record_key(info.seq)]
            assert [call.operation for call in made][-1] == "create"
            polls = [call.key for call in made if call.operation == "get"]
            assert set(polls) == {record_key(info.seq)}
            assert len(polls) <= 2  # before it stages, and before the record
            assert len(recorder.of("put", TAIL_HINT)) == (step in (0, 6))
            reads = recorder.of("get_ranges")
            assert (info.rebase_bytes > 0) == bool(
                reads
            )  # full chains are read to be replaced; nothing else is
            assert len(made) == info.packs + 3 + len(polls) + len(reads)
            assert info.packs <= 2
        recorder.clear()
    assert [call.key for call in recorder.calls] == [TAIL_HINT]  # the last word, on closing
    recorder.clear()


def test_requests_of_unchanged_steps():
    """DF-WR-01: a step in which nothing changed writes its manifest and record alone."""
    recorder = Recorder(DictStorage())
    with df.create(recorder, block_bytes=BLOCK).writer() as writer:
        writer.commit(step=0, tensors=weights(0))
        for step in range(1, 4):
            recorder.clear()
            info = writer.commit(step=step, tensors=weights(0))
            assert (info.packs, info.changed_blocks, info.read_bytes) == (0, 0, 0)
            assert [
                (c.operation, parse_key(c.key).kind.value) for c in recorder.calls if c.operation != "get"
            ] == [
                ("put", "manifest"),
                ("create", "record"),
            ]


def test_follower_fetches_what_is_fresh():
    """DF-RD-02, DF-MAN-07, DF-MAN-08: at the parent it fetches the fresh pieces, byte for byte, and never a
    re-base pack.
    """
    recorder = Recorder(DictStorage())
    policy = df.Policy(max_chain=3)
    store = df.create(recorder, block_bytes=BLOCK)
    follower = df.open(recorder)
    rebased = 0
    with store.writer(policy=policy) as writer:
        writer.commit(step=0, tensors=weights(0))
        current = follower.version()
        state = current.state_dict()
        for step in range(1, 10):
            info = writer.commit(step=step, tensors=weights(step))
            rebased += info.rebase_bytes > 0
            version = follower.version()
            recorder.clear()
            state = version.follow(current, state)
            assert content(state) == truth(step)
            fresh = set()
            for block in range(version.map.block_count):
                count = int(version.map.fresh[block])
                depth = int(version.map.depth[block])
                end = version.map.piece_start[block + 1]
                for piece in range(end - (depth if count == NOT_FRESH else count), end):
                    key = version.map.packs[version.map.pack[piece]].key
                    fresh.add((key, int(version.map.offset[piece]), int(version.map.length[piece])))
            got = [(call.key, *r) for call in recorder.of("get_ranges") for r in call.argument]
            assert {call.operation for call in recorder.calls} == {"get_ranges"}
            assert (
                sum(length for *_, length in got) == sum(length for *_, length in fresh) == info.payload_bytes
            )
            assert {key for key, *_ in got} == {key for key, *_ in fresh}
            assert len({key for key, *_ in got}) == 1  # the step's own pack; re-based prefixes lie in another
            current = version
    assert rebased > 3


def test_block_cache(tmp_path):
    """DF-DIG-01: what is in the cache is not fetched; it is hashed again when used, and a damaged entry is
    fetched anew.
    """
    storage = trained(4)
    cache = tmp_path / "cache"
    recorder = Recorder(storage)
    with df.open(recorder, cache=cache).version() as version:
        assert content(version.state_dict()) == truth(3)
        assert recorder.of("get_ranges")
        recorder.clear()
        assert content(version.state_dict()) == truth(3)
        assert recorder.calls == []
    with df.open(recorder, cache=cache).version() as version:  # another process, say
        recorder.clear()
        version.get_slice("w")[3:5]
        assert content(version.state_dict()) == truth(3)
        assert recorder.calls == []
    entries = [path for path in cache.rglob("*") if path.is_file()]
    assert len(entries) > 10
    for number, path in enumerate(entries):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[len(data) // 2] ^= 1
        path.write_bytes(data if number % 3 == 0 else data[:-1] if number % 3 == 1 else b"")
    with df.open(recorder, cache=cache).version() as version:
        recorder.clear()
        assert content(version.state_dict()) == truth(3)
        assert recorder.of("get_ranges")
        recorder.clear()
        assert content(version.state_dict()) == truth(3)  # they were replaced
        assert recorder.calls == []
    with df.open(recorder, cache=cache).version(
        step=2
    ) as version:  # blocks that two steps share are found, too
        recorder.clear()
        version.get_tensor("frozen")
        assert recorder.calls == []
        assert content(version.state_dict()) == truth(2)


def test_a_reader_polls_with_one_request():
    """DF-STO-03: a reader that waits for the next step asks once; then it reads what is new."""
    recorder = Recorder(DictStorage())
    store = df.create(recorder, block_bytes=BLOCK)
    reader = df.open(recorder)
    with store.writer() as writer:
        writer.commit(step=0, tensors=weights(0))
        reader.version()
        recorder.clear()
        reader.branches()
        assert [(c.operation, c.key) for c in recorder.calls] == [("get", record_key(2))]
        writer.commit(step=1, tensors=weights(1))
        recorder.clear()
        version = reader.version()
        assert [c.key for c in recorder.calls] == [
            record_key(2),
            record_key(3),
            version.commit.manifests[0].key,
        ]


def test_writer_that_reopens_reads_what_it_needs():
    """DF-WR-01: a writer that takes a branch up reads a block only where it has changed: hashes tell which
    has.
    """
    recorder = Recorder(DictStorage())
    store = df.create(recorder, block_bytes=BLOCK)
    tensors = {name: np.arange(1024, dtype=np.uint8) + i for i, name in enumerate("abcdefgh")}
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
    with df.open(recorder).writer() as writer:
        recorder.clear()
        changed = {**tensors, "c": tensors["c"] + np.uint8(1)}
        changed["f"] = tensors["f"].copy()
        changed["f"][300] += 1
        info = writer.commit(step=1, tensors=changed)
        assert info.changed_blocks == 5
        assert info.read_bytes == 5 * 256
        with df.open(recorder).version(step=0) as version:
            row_c, row_f = (int(version.map.block_start[version.map.row(name)]) for name in "cf")
            wanted = pieces_of(version, [*range(row_c, row_c + 4), row_f + 1])
        got = {o + i for call in recorder.of("get_ranges") for o, n in call.argument for i in range(n)}
        assert got >= {o + i for o, n in wanted for i in range(n)}
    assert content(df.open(recorder).version().state_dict()) == content(changed)


def test_memory_of_a_slice_is_its_own():
    """DF-LIM-02: a slice takes memory for itself and for the blocks at its edges, not for the tensor."""
    storage, _ = gigabyte()
    with df.open(storage).version() as version:
        version.get_slice("big")[0:1]
        tracemalloc.start()
        try:
            version.get_slice("big")[1000:1016]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 16 * MIB
