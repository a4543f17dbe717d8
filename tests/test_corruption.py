"""Damage: whatever happens to the bytes of a store, a reader gives the truth or a DeltaFormatError, and `verify` tells."""

import itertools
import json
import os
import random
from functools import cache

import numpy as np
import pytest
from forge import decompressed, last_commit, members_of, replace_content, rewrite, sealed
from tinystore import BLOCK, DictStorage, content, weights
from watching import Recorder

import deltaformat as df
from deltaformat.errors import DeltaFormatError, ErrorCode, InconsistentError
from deltaformat.keys import DESCRIPTOR, TAIL_HINT, parse_key, record_key

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
PATTERNS = (0x01, 0x80, 0xFF, 0x20, 0x55)
NAMES = ("w", "noise", "step")
STEPS = range(4)


def tensors(step, seed=0):  # 340 numbers in 7 blocks
    found = {name: weights(step, seed)[name] for name in NAMES}
    return found | {"noise": found["noise"][:20]}


@cache
def truth(step):
    return content(tensors(step))


@cache
def small():
    """Some 10 KB: four steps with a re-base, a file, a tag, a fork and a hint."""
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    with store.writer(policy=df.Policy(max_chain=2)) as writer:
        for step in STEPS:
            writer.commit(step=step, tensors=tensors(step), files={"config.json": b'{"a": %d}' % (step // 2)})
            if step == 1:
                store.tag("best", step=1)
                store.fork("exp", step=1)
    version = store.version()
    assert version.map.depth.max() == 2
    assert set(version.map.encoding) >= {0, 1, 3}
    assert TAIL_HINT in storage.objects
    return storage


# -- what a reader does ----------------------------------------------------------------------------------------


def newest(store):
    with store.version() as version:
        return version.step, content(version.state_dict())


def of_step(step):
    def read(store):
        with store.version(step=step) as version:
            return version.step, content(version.state_dict())

    return read


def tagged(store):
    with store.version(tag="best") as version:
        return version.step, content(version.state_dict())


def of_branch(store):
    with store.version(branch="exp") as version:
        return version.step, content(version.state_dict())


def slices(store):
    with store.version() as version:
        w = version.get_slice("w")
        return version.step, content({"rows": w[10:20], "column": w[:, 3], "one": w[39, 15]})


def followed(store):
    with store.version(step=2) as before, store.version(step=3) as version:
        return version.step, content(version.follow(before, tensors(2)))


def sidecar(store):
    with store.version() as version:
        return version.step, version.read_file("config.json")


def history(store):
    return 3, [(record.seq, record.kind) for record in store.log()]


ACTIONS = {
    "newest": newest, **{f"step {step}": of_step(step) for step in STEPS}, "tag": tagged, "branch": of_branch,
    "slices": slices, "follow": followed, "file": sidecar, "log": history,
}  # fmt: skip


@cache
def answers():
    """What each action must return, and the keys that it reads."""
    found = {}
    for name, action in ACTIONS.items():
        recorder = Recorder(small())
        found[name] = action(df.open(recorder)), {call.key for call in recorder.calls}
    w = tensors(3)["w"]
    assert found["newest"][0] == (3, truth(3)) == found["follow"][0]
    assert [found[f"step {step}"][0] for step in STEPS] == [(step, truth(step)) for step in STEPS]
    assert found["tag"][0] == found["branch"][0] == (1, truth(1))
    assert found["slices"][0] == (3, content({"rows": w[10:20], "column": w[:, 3].copy(), "one": w[39, 15]}))
    assert found["file"][0] == (3, b'{"a": 1}')
    return found


def readers_of(key):
    return [name for name, (_, keys) in answers().items() if key in keys]


def attempt(storage, name):
    """What an action gives: its answer, or the error. Whatever else it raises fails the test."""
    try:
        return ACTIONS[name](df.open(storage))
    except DeltaFormatError as error:
        return error


def check_damaged(storage, names, *, where):
    """Every action answers with the truth or a DeltaFormatError. Returns whether one failed."""
    failed = False
    for name in names:
        result = attempt(storage, name)
        if isinstance(result, DeltaFormatError):
            failed = True
        else:
            assert result == answers()[name][0], (where, name)
    return failed


def check_told(storage, *, where):
    """`verify` reports the damage, if the store can be opened at all."""
    try:
        report = df.open(storage).verify(all=True)
    except DeltaFormatError:
        return
    assert report.findings, where


def damaged(key, data):
    storage = small().copy()
    if data is None:
        del storage.objects[key]
    else:
        storage.objects[key] = data
    return storage


KEYS = sorted(small().objects)
SAME_KIND = [(a, b) for a, b in itertools.permutations(KEYS, 2) if parse_key(a).kind == parse_key(b).kind]


def short(key):
    return key if len(key) < 40 else f"{key.split('/')[0]} {KEYS.index(key)}"


@pytest.mark.parametrize("key", KEYS, ids=short)
def test_flipped(key):
    """DF-DIG-01, DF-KEY-02, DF-JSN-03, DF-LOG-09: every byte of every object, some of its bits turned over."""
    original, names, rng = small().objects[key], readers_of(key), random.Random(key)
    for position in range(len(original)):
        for pattern in PATTERNS if NIGHTLY else [rng.choice(PATTERNS)]:
            data = bytearray(original)
            data[position] ^= pattern
            storage, where = damaged(key, bytes(data)), (key, position, pattern)
            failed = check_damaged(storage, names if NIGHTLY else [rng.choice(names)], where=where) if names else False
            if key == TAIL_HINT:
                assert not failed
            elif NIGHTLY or rng.random() < 0.04:
                check_told(storage, where=where)


@pytest.mark.parametrize("key", KEYS, ids=short)
def test_cut_and_extended(key):
    """DF-KEY-02, DF-JSN-03, DF-LOG-09, DF-STO-04: every object cut at every length, made longer, doubled."""
    original, names, rng = small().objects[key], readers_of(key), random.Random(key)
    lengths = range(len(original))
    if not NIGHTLY:
        lengths = sorted({0, 1, len(original) - 1, *rng.sample(lengths, min(len(lengths), 60))})
    for data in [*(original[:length] for length in lengths), original + b"\0", original + b"\n", original * 2]:
        storage, where = damaged(key, data), (key, len(data))
        failed = check_damaged(storage, names if NIGHTLY else rng.sample(names, min(2, len(names))), where=where)
        if key == TAIL_HINT:
            assert not failed
        elif NIGHTLY or rng.random() < 0.04:
            check_told(storage, where=where)


@pytest.mark.parametrize("hint", [True, False], ids=["hint", "no hint"])
@pytest.mark.parametrize("key", KEYS, ids=short)
def test_deleted(key, hint):
    """DF-STO-04, DF-LOG-09: an object that is gone; of the log's end only, nobody can tell."""
    storage = damaged(key, None)
    if not hint:
        storage.objects.pop(TAIL_HINT, None)
    parsed = parse_key(key)
    last = record_key(parsed.seq + 1) not in small().objects if parsed.seq is not None else False
    failed = False
    for name in ACTIONS:
        result = attempt(storage, name)
        if isinstance(result, DeltaFormatError):
            failed = True
        elif parsed.seq is not None and name in ("newest", "log", "slices", "file", "branch"):
            assert result[0] <= 3  # a reader may have found an earlier end of the log: then what was the truth there
            if name == "newest":
                assert result[1] == truth(result[0])
        else:
            assert result == answers()[name][0], name
    if key == TAIL_HINT:
        assert not failed
    elif not last:
        check_told(storage, where=key)


def kind_of(key):
    return parse_key(key).kind


@pytest.mark.parametrize(("key", "other"), SAME_KIND, ids=short)
def test_swapped(key, other):
    """DF-LOG-02, DF-KEY-02: one object's bytes under the key of another of its kind: an older record, another step's pack."""
    storage = damaged(key, small().objects[other])
    failed = check_damaged(storage, readers_of(key), where=(key, other))
    assert failed or not readers_of(key) or kind_of(key).value == "pack"
    check_told(storage, where=(key, other))


def test_doubled():
    """DF-LOG-02: a record once more at the log's end is refused; other objects under new keys are nobody's business."""
    end = max(int(key[4:24]) for key in KEYS if key.startswith("log/")) + 1
    for seq in range(end):
        storage = damaged(record_key(end), small().objects[record_key(seq)])
        assert attempt(storage, "newest").code in (ErrorCode.RECORD_MISPLACED, ErrorCode.CHAIN_BROKEN)
        check_damaged(storage, ACTIONS, where=seq)
        check_told(storage, where=seq)
    storage = small().copy()
    for key in KEYS:
        if parse_key(key).claim is not None:
            storage.objects[key.replace("0" * 20, f"{end:020}")] = storage.objects[key]
    assert not check_damaged(storage, ACTIONS, where="new keys")
    assert df.open(storage).verify(all=True).findings == []


def test_another_stores_descriptor():
    """DF-DIG-04, DF-MAN-09: a descriptor with another block size or digest fails what is read under it."""
    for options in ({"block_bytes": 512}, {"digest": "blake3-256"}):
        other = DictStorage()
        df.create(other, **{"block_bytes": BLOCK, **options})
        storage = damaged(DESCRIPTOR, other.objects[DESCRIPTOR])
        for name in ("newest", "tag", "slices"):
            assert isinstance(attempt(storage, name), DeltaFormatError)
        check_told(storage, where=options)


# -- every hash in order, and something wrong --------------------------------------------------------------------


def check_hostile(storage, names=("newest", "step 1", "slices", "follow", "log"), *, where):
    """Weights that are returned are some step's, and nothing but a DeltaFormatError is raised."""
    for name in names:
        result = attempt(storage, name)
        if not isinstance(result, DeltaFormatError) and name in ("newest", "step 1", "follow"):
            assert result[1] in [truth(step) for step in STEPS], (where, name)
    try:
        df.open(storage).verify()
    except DeltaFormatError:
        pass


def test_flips_in_a_manifest_with_all_hashes_in_order():
    """DF-DIG-04, DF-MAN-01, DF-MAN-03, DF-MAN-04, DF-SEC-01: every byte of an Arrow file, under a record that vouches for it."""
    seq = last_commit(small())
    original, rng = decompressed(small(), seq), random.Random(1)
    for position in range(len(original)):
        for pattern in PATTERNS if NIGHTLY else [rng.choice(PATTERNS)]:
            data = bytearray(original)
            data[position] ^= pattern
            storage = small().copy()
            replace_content(storage, seq, bytes(data))
            names = ("newest", "slices", "follow") if NIGHTLY else [rng.choice(["newest", "slices", "follow"])]
            check_hostile(storage, names, where=(position, pattern))


@pytest.mark.parametrize("step", [1, 3])
def test_bytes_of_a_record_with_all_hashes_in_order(step):
    """DF-JSN-01, DF-LOG-02, DF-SEC-01: every byte of a commit record turned into another, sealed and linked again."""
    seq = next(seq for seq in range(99) if members_of(small(), seq).get("step") == step)
    body = small().objects[record_key(seq)][:-76] + b"}"
    rng = random.Random(step)
    for position in range(len(body)):
        for byte in rng.sample(list(b'0159"{}[],:.eE-\\ux\x00\xff'), 8 if NIGHTLY else 1):
            storage = small().copy()
            text = body[:position] + bytes([byte]) + body[position + 1 :]
            rewrite_text(storage, seq, text)
            names = list(ACTIONS) if NIGHTLY else rng.sample(["newest", "step 1", "slices", "follow", "log"], 2)
            check_hostile(storage, names, where=(position, byte))


def rewrite_text(storage, seq, text):
    """Replace a record by text that need not be JSON; later records are linked to it."""
    rewrite(storage, seq, lambda _: text)


VALUES = [None, True, -1, 0, 1, 2**53 - 1, 2**53, 10**400, 0.5, 1e308, "", "x", "\0", "é" * 500, [], [[]], [0], [None], {}, {"": {}}]


def paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from paths(inner, (*path, name))


def with_value(value, path, new):
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = with_value(changed[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize("kind", ["claim", "commit", "tag", "fork"])
def test_values_of_a_record_with_all_hashes_in_order(kind):
    """DF-JSN-01, DF-KEY-01, DF-SEC-01: every member of a record, at any depth, replaced by values of every type."""
    seqs = [seq for seq in range(7) if members_of(small(), seq)["kind"] == kind]
    members, rng = members_of(small(), seqs[-1]), random.Random(kind)
    for path in paths({name: value for name, value in members.items() if name != "check"}):
        if path:
            for value in VALUES if NIGHTLY else rng.sample(VALUES, 6):
                storage = small().copy()
                rewrite(storage, seqs[-1], lambda record, p=path, v=value: with_value(record, p, v))
                check_hostile(storage, ["newest", "step 1", "log"], where=(path, value))


def test_values_of_a_manifest_with_all_hashes_in_order():
    """DF-MAN-09, DF-MAN-10, DF-KEY-01, DF-SEC-01: the same for a manifest's metadata."""
    seq = last_commit(small())
    original = decompressed(small(), seq)
    text = json.dumps(metadata_of(original), ensure_ascii=False, separators=(",", ":")).encode()
    assert text in original
    for path in paths(metadata_of(original)):
        for value in VALUES if NIGHTLY else random.Random(str(path)).sample(VALUES, 6):
            changed = json.dumps(with_value(metadata_of(original), path, value), ensure_ascii=False).encode()
            storage = small().copy()
            replace_content(storage, seq, with_metadata(original, changed))
            check_hostile(storage, ["newest", "follow"], where=(path, value))


def metadata_of(file):
    import pyarrow as pa

    return json.loads(pa.ipc.open_file(pa.BufferReader(file)).schema.metadata[b"deltaformat"])


def with_metadata(file, text):
    import pyarrow as pa

    table = pa.ipc.open_file(pa.BufferReader(file)).read_all().replace_schema_metadata({b"deltaformat": text})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_values_of_the_descriptor_with_its_check_in_order():
    """DF-DSC-01, DF-DSC-02: every member of the descriptor replaced by values of every type."""
    members = json.loads(small().objects[DESCRIPTOR])
    for name, value in itertools.product(members, VALUES):
        storage = small().copy()
        storage.objects[DESCRIPTOR] = sealed(members | {name: value})
        check_hostile(storage, ["newest"], where=(name, value))
