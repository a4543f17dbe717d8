"""Damage: whatever happens to the bytes of a store, a reader gives the truth or a DeltaFormatError, and
`verify` tells.
"""

import itertools
import json
import os
import random
import secrets
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from forge import append, decompressed, last_commit, members_of, replace_content, rewrite, sealed
from hostile import CASES, HARMLESS, base, open_and_read
from tinystore import BLOCK, DictStorage, content, weights
from watching import Recorder

import deltaformat as df
from deltaformat.errors import DeltaFormatError, ErrorCode, InconsistentError, MissingError
from deltaformat.keys import DESCRIPTOR, TAIL_HINT, parse_key, record_key
from deltaformat.records import Retire

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
    """Some 10 KB: steps with a re-base, a file, a tag, a fork and a hint; the same keys in every process."""
    numbers = itertools.count()
    with patch.object(secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}"):
        return build()


def build():
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


# -- what a reader does --------------------------------------------------------------------------------------


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
    "newest": newest,
    **{f"step {step}": of_step(step) for step in STEPS},
    "tag": tagged,
    "branch": of_branch,
    "slices": slices,
    "follow": followed,
    "file": sidecar,
    "log": history,
}


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
    """DF-DIG-01, DF-KEY-02, DF-JSN-03, DF-LOG-09: every byte of every object, with bits turned over."""
    original, names, rng = small().objects[key], readers_of(key), random.Random(key)
    for position in range(len(original)):
        for pattern in PATTERNS if NIGHTLY else [rng.choice(PATTERNS)]:
            data = bytearray(original)
            data[position] ^= pattern
            storage, where = damaged(key, bytes(data)), (key, position, pattern)
            failed = (
                check_damaged(storage, names if NIGHTLY else [rng.choice(names)], where=where)
                if names
                else False
            )
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
    for data in [
        *(original[:length] for length in lengths),
        original + b"\0",
        original + b"\n",
        original * 2,
    ]:
        storage, where = damaged(key, data), (key, len(data))
        failed = check_damaged(
            storage, names if NIGHTLY else rng.sample(names, min(2, len(names))), where=where
        )
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
            assert (
                result[0] <= 3
            )  # a reader may have found an earlier end of the log: then what was the truth there
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
    """DF-LOG-02, DF-KEY-02: one object's bytes under the key of another of its kind: an older record, another
    step's pack.
    """
    storage = damaged(key, small().objects[other])
    failed = check_damaged(storage, readers_of(key), where=(key, other))
    assert failed or not readers_of(key) or kind_of(key).value == "pack"
    check_told(storage, where=(key, other))


def test_doubled():
    """DF-LOG-02: a record once more at the log's end is refused; other objects under new keys are nobody's
    business.
    """
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


# -- every hash in order, and something wrong ----------------------------------------------------------------


def check_hostile(storage, names=("newest", "step 1", "slices", "follow", "log"), *, where):
    """Weights that are returned are some step's, and nothing but a DeltaFormatError is raised."""
    for name in names:
        result = attempt(storage, name)
        if not isinstance(result, DeltaFormatError) and name in ("newest", "step 1", "follow"):
            assert result[1] in [truth(step) for step in STEPS], (where, name)
    if hash(where) % 8 == 0:
        with suppress(DeltaFormatError):
            df.open(storage).verify()


def test_flips_in_a_manifest_with_all_hashes_in_order():
    """DF-DIG-04, DF-MAN-01, DF-MAN-03, DF-MAN-04, DF-SEC-01: every byte of an Arrow file, under a record that
    vouches for it.
    """
    seq = last_commit(small())
    original, rng = decompressed(small(), seq), random.Random(1)
    positions = range(len(original))
    for position in positions if NIGHTLY else rng.sample(positions, len(positions) // 5):
        for pattern in rng.sample(PATTERNS, 2 if NIGHTLY else 1):
            data = bytearray(original)
            data[position] ^= pattern
            storage = small().copy()
            replace_content(storage, seq, bytes(data))
            names = (
                ("newest", "slices", "follow") if NIGHTLY else [rng.choice(["newest", "slices", "follow"])]
            )
            check_hostile(storage, names, where=(position, pattern))


@pytest.mark.parametrize("step", [1, 3])
def test_bytes_of_a_record_with_all_hashes_in_order(step):
    """DF-JSN-01, DF-LOG-02, DF-SEC-01: every byte of a commit record turned into another, sealed and linked
    again.
    """
    seq = next(seq for seq in range(99) if members_of(small(), seq).get("step") == step)
    body = small().objects[record_key(seq)][:-76] + b"}"
    rng = random.Random(step)
    for position in range(len(body)):
        for byte in rng.sample(list(b'0159"{}[],:.eE-\\ux\x00\xff'), 8 if NIGHTLY else 1):
            storage = small().copy()
            text = body[:position] + bytes([byte]) + body[position + 1 :]
            rewrite_text(storage, seq, text)
            names = (
                list(ACTIONS) if NIGHTLY else rng.sample(["newest", "step 1", "slices", "follow", "log"], 2)
            )
            check_hostile(storage, names, where=(position, byte))


def rewrite_text(storage, seq, text):
    """Replace a record by text that need not be JSON; later records are linked to it."""
    rewrite(storage, seq, lambda _: text)


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**53 - 1,
    2**53,
    10**400,
    0.5,
    1e308,
    "",
    "x",
    "\0",
    "é" * 500,
    [],
    [[]],
    [0],
    [None],
    {},
    {"": {}},
]


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
    """DF-JSN-01, DF-KEY-01, DF-SEC-01: every member of a record, at any depth, replaced by values of every
    type.
    """
    seqs = [seq for seq in range(7) if members_of(small(), seq)["kind"] == kind]
    members, rng = members_of(small(), seqs[-1]), random.Random(kind)
    for path in paths({name: value for name, value in members.items() if name != "check"}):
        if path:
            for value in VALUES if NIGHTLY else rng.sample(VALUES, 6):
                storage = small().copy()
                rewrite(storage, seqs[-1], lambda record, p=path, v=value: with_value(record, p, v))
                check_hostile(storage, ["newest", "step 1", "log"], where=(path, str(value)))


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
            check_hostile(storage, ["newest", "follow"], where=(path, str(value)))


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
        check_hostile(storage, ["newest"], where=(name, str(value)))


@pytest.mark.parametrize("name", CASES)
def test_hostile(name):
    """DF-SEC-01, DF-LIM-01, DF-LIM-02, DF-ENC-02, DF-ENC-03, DF-ENC-09, DF-MAN-02, DF-MAN-04, DF-VER-01,
    DF-ERR-01: refused, with its class and code.
    """
    error_class, code, make = CASES[name]
    storage = base().copy()
    make(storage)
    with pytest.raises(DeltaFormatError) as caught:
        open_and_read(storage)
    assert (caught.value.error_class, caught.value.code.value) == (error_class, code), caught.value
    if code == "feature-unknown":
        assert "x-new" in str(caught.value)
    check_told(storage, where=name)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(name):
    """DF-JSN-01, DF-JSN-02, DF-LIM-01, DF-LOG-09, DF-MAN-01, DF-VER-02: a reader takes these as if nothing
    were.
    """
    storage = base().copy()
    HARMLESS[name](storage)
    open_and_read(storage)
    version = df.open(storage).version()
    assert version.step == 2
    assert content(version.state_dict()) == content({n: weights(2)[n] for n in ("w", "noise", "step")})
    assert df.open(storage).verify(all=True).findings == []
    with df.open(storage).writer() as writer:
        writer.commit(step=3, tensors=tensors(3))
    assert df.open(storage).version().step == 3


def test_hostile_memory():
    """DF-SEC-01, DF-LIM-02: none of them takes more than 192 MiB; bombs expand to GiBs, and 15 MiB of JSON
    are allowed for.
    """
    command = [sys.executable, str(Path(__file__).with_name("hostile.py")), "1024"]
    environment = os.environ | {"PYTHONPATH": str(Path(df.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    told = json.loads(done.stdout)
    expected = {name: error_class for name, (error_class, _, _) in CASES.items()} | dict.fromkeys(
        HARMLESS, "ok"
    )
    assert told["found"] == expected
    assert told["peak_mib"] < 192


# -- void records --------------------------------------------------------------------------------------------


def stale_commit(storage, claim, **members):
    """Append what a writer would that does not see that its claim is fenced: a commit under `claim` upon
    main's head.
    """
    seq = max(int(key[4:24]) for key in storage.objects if key.startswith("log/"))
    heads = members_of(storage, seq)["heads"]
    head = heads["main"]
    parent = members_of(storage, head["seq"])
    ancestors = [[parent["depth"], parent["seq"], parent["step"]]]
    for entry in parent["ancestors"]:
        if entry[0] == 0 or (entry[0] & -entry[0]) > (ancestors[-1][0] & -ancestors[-1][0] or 1 << 60):
            ancestors.append(entry)
    members = {
        "branch": "main",
        "claim": claim,
        "step": head["step"] + 1,
        "parent": head["seq"],
        "depth": parent["depth"] + 1,
        "ancestors": ancestors,
        "root": parent["root"],
        "manifests": parent["manifests"],
        "objects_added": [],
        "objects_dropped": [],
        "metadata": {},
        **members,
    }
    heads = heads | {"main": head | {"seq": seq + 1, "step": members["step"]}}
    return append(storage, kind="commit", **{"heads": heads, **members})


def fenced():
    """Two writers: the first, of claim 0, has been fenced by the second, of claim 3, which has committed step
    2.
    """
    storage = DictStorage()
    store = df.create(storage, block_bytes=BLOCK)
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors(0))
        writer.commit(step=1, tensors=tensors(1))
    with store.writer() as writer:
        writer.commit(step=2, tensors=tensors(2))
    return storage


VOID = {
    "fenced claim": {"claim": 0},
    "no claim": {"claim": 77},
    "another parent": {"claim": 3, "parent": 2, "manifests": None},
    "step not above": {"claim": 3, "step": 2, "manifests": None},
    "wrong depth": {"claim": 3, "depth": 7, "manifests": None},
    "wrong ancestors": {"claim": 3, "ancestors": [[0, 1, 0]] * 10_000, "manifests": None},
    "no such branch": {"claim": 3, "branch": "exp", "manifests": None},
    "objects of another claim": {"claim": 3},
}


@pytest.mark.parametrize("where", ["tail", "middle"])
@pytest.mark.parametrize("kind", VOID)
def test_void_commits(kind, where):
    """DF-LOG-04, DF-LOG-06: ignored wherever it is, refused by seq, reported by `verify`; lazily and by full
    fold readers agree.
    """
    storage = fenced()
    newest = members_of(storage, 4)
    members = {name: value for name, value in VOID[kind].items() if name != "manifests"}
    members |= (
        {"manifests": newest["manifests"]}
        if "manifests" in VOID[kind]
        else {"manifests": members_of(storage, 1)["manifests"]}
    )
    void = stale_commit(storage, **members)
    if where == "middle":
        with df.open(storage).writer() as writer:  # who goes on is not misled
            writer.commit(step=3, tensors=tensors(3))
            writer.commit(step=4, tensors=tensors(4))
    last = 4 if where == "middle" else 2
    for fold in (False, True):
        store = df.open(storage)
        if fold:
            store._context.log.history()
        assert store.branches()["main"].step == last
        for step in range(last + 1):
            assert content(store.version(step=step).state_dict()) == content(tensors(step))
        assert void not in [record.seq for record in store.log()]
        with pytest.raises(InconsistentError) as caught:
            store.version(seq=void)
        assert caught.value.code is ErrorCode.RECORD_VOID
    (finding,) = df.open(storage).verify(all=True).findings
    assert (finding.where, finding.code) == (record_key(void), "record-void")


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "tag", "name": "best", "target": 0},
        {"kind": "tag", "name": "best", "target": 99},
        {"kind": "fork", "branch": "exp", "source": 0, "step": 0},
        {"kind": "fork", "branch": "exp", "source": 1, "step": 7},
        {"kind": "drop", "branch": "exp"},
        {"kind": "retire", "commits": []},
        {"kind": "retire", "commits": [4]},
        {"kind": "retire", "commits": [2, 1]},
        {"kind": "retire", "commits": [0]},
        {
            "kind": "claim",
            "branch": "main",
            "epoch": 9,
            "host": "h",
            "pid": 1,
            "resume_from": None,
            "single_writer": False,
        },
        {
            "kind": "claim",
            "branch": "main",
            "epoch": 3,
            "host": "h",
            "pid": 1,
            "resume_from": 0,
            "single_writer": False,
        },
    ],
)
def test_other_void_records(record):
    """DF-LOG-04: tags, forks, drops, retirements and claims whose preconditions fail change nothing."""
    storage = fenced()
    before = df.open(storage)
    void = append(storage, **record)
    for fold in (False, True):
        store = df.open(storage)
        if fold:
            store._context.log.history()
        assert (store.branches(), store.tags(), store._context.log.retired()) == (
            before.branches(),
            {},
            set(),
        )
        assert content(store.version().state_dict()) == content(tensors(2))
        assert store.log()[0].seq == void - 1
    (finding,) = df.open(storage).verify(all=True).findings
    assert (finding.where, finding.code) == (record_key(void), "record-void")
    with df.open(storage).writer() as writer:
        writer.commit(step=3, tensors=tensors(3))
    df.open(storage).tag("best", step=3)
    assert df.open(storage).tags() == {"best": writer._parent.seq}


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "tag", "name": "none", "target": None},
        {"kind": "tag", "name": "best", "target": 1},
        {"kind": "fork", "branch": "exp", "source": 1, "step": 0},
        {"kind": "retire", "commits": [2]},
        {
            "kind": "claim",
            "branch": "main",
            "epoch": 3,
            "host": "h",
            "pid": 1,
            "resume_from": 1,
            "single_writer": False,
        },
    ],
    ids=lambda record: record["kind"],
)
def test_records_that_only_history_forbids(record):
    """DF-LOG-06, DF-LOG-12: after a record that a writer must not make for what lies further back, honest
    writers and all readers still agree.
    """
    storage = fenced()
    store = df.open(storage)
    store.tag("good", step=1)
    store._context.log.append(Retire, lambda _: {"commits": (1,)})
    heads = members_of(storage, 6)["heads"]
    if record["kind"] == "fork":
        heads["exp"] = {"seq": 1, "step": 0, "epoch": 0, "claim": None}
    elif record["kind"] == "claim":
        heads["main"] = {"seq": 1, "step": 0, "epoch": 3, "claim": 7}
    append(storage, heads=heads, **record)
    with df.open(storage).writer() as writer:
        seq = writer.commit(step=3, tensors=tensors(3)).seq
    check_agreement(storage, seq)
    for _ in range(2):  # DF-GC-02: a head's objects stay, also where it was retired
        df.open(storage).gc(keep_last=1, grace=timedelta(0), dry_run=False)
        storage.advance(hours=1)
    check_agreement(storage, seq)
    if record.get("target"):  # DF-GC-05
        with pytest.raises(MissingError) as caught:
            df.open(storage).version(tag="best")
        assert caught.value.code is ErrorCode.VERSION_RETIRED
    if record["kind"] == "fork":
        assert content(df.open(storage).version(branch="exp").state_dict()) == content(tensors(0))
        with df.open(storage).writer("exp") as writer:
            seq = writer.commit(step=4, tensors=tensors(3)).seq
        check_agreement(storage, seq)


def check_agreement(storage, seq):
    """All readers see the same, and commit `seq` as step 3."""
    lazy, folded = df.open(storage), df.open(storage)
    assert folded.verify(all=True).findings == []
    assert (lazy.branches(), lazy.tags()) == (folded.branches(), folded.tags())
    history = folded._context.log.history()
    assert (lazy.tags(), lazy._context.log.retired()) == (history.tags, set(history.retired))
    assert content(lazy.version(seq=seq).state_dict()) == content(tensors(3))
