"""What is stored where: bounded chains, re-bases, packs that are checkpoint files, external bases (SPEC
10, 11.2).
"""

import hashlib
import itertools

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from forge import members_of, rewrite_manifest
from tinystore import DictStorage
from watching import Recorder
from writertools import bf16, check_follow, make, memory, raw, reads, state, trained

import deltaformat as df
from deltaformat import Policy
from deltaformat.checkpoint import open_checkpoint
from deltaformat.errors import (
    CorruptError,
    ErrorCode,
    MalformedError,
    MissingError,
    UnsafeError,
)
from deltaformat.packs import parse_safetensors

# -- chains and packs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_chain", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("strata", [False, True])
def test_chains_are_bounded(max_chain, strata):
    """DF-WR-02, DF-MAN-08: prefixes are replaced, `fresh` stays 1, and followers fetch no re-base bytes."""
    watched = Recorder(memory())
    rng = np.random.default_rng(27)
    store, states = make(watched), [{f"w{i}": bf16(rng, 8 + i, 10) for i in range(5)}]
    infos = []
    steps = min(3 * max_chain, 72)
    with store.writer(policy=Policy(max_chain=max_chain, strata=strata)) as writer:
        for step in range(steps):
            infos.append(writer.commit(step=step, tensors=states[-1]))
            states.append(trained(states[-1], step, changes=2))
    store = df.open(watched)
    step_packs, rebase_packs, rebased = set(), set(), set()
    versions = [store.version(step=step) for step in range(steps)]
    for step, version in enumerate(versions):
        assert version.map.depth.max() <= max_chain
        changed = version.map.fresh != 0
        assert (version.map.fresh[changed] == (1 if step else 255)).all()
        keys = [ref.key for ref in version.map.packs]
        new = {ref.key for ref in version.commit.objects_added}
        last = version.map.piece_start[1:] - 1
        step_packs |= {keys[pack] for pack in version.map.pack[last[changed]]}
        prefixes = np.ones(len(version.map.pack), bool)
        prefixes[last] = False
        rebased_now = {keys[pack] for pack in version.map.pack[prefixes]} & new
        rebase_packs |= rebased_now
        if rebased_now:
            rebased.add(step)
        assert bool(rebased_now) == bool(infos[step].rebase_bytes)
    assert rebase_packs
    assert not step_packs & rebase_packs  # packs of their own
    if max_chain >= 16:
        assert len(rebased) > 2  # staggered over steps
    tensors = versions[0].state_dict()
    for step in range(1, steps):
        watched.clear()
        tensors = versions[step].follow(versions[step - 1], tensors)
        assert raw(tensors) == raw(states[step])
        fetched = watched.of("get_ranges")
        assert not {call.key for call in fetched} & rebase_packs
        assert sum(call.nbytes for call in fetched) == infos[step].payload_bytes
    for step in range(0, steps, 5):
        reads(store.version(step=step), states[step])


def test_a_smaller_bound_holds_from_the_next_change_on():
    """DF-WR-02: a writer with another policy takes over a branch with long chains."""
    store, tensors = make(), state(28, 1)
    for max_chain in (64, 4, 2, 16):
        with store.writer(policy=Policy(max_chain=max_chain)) as writer:
            for _ in range(8):
                tensors = trained(tensors, len(store.log()), changes=200)
                writer.commit(step=len(store.log()), tensors=tensors)
            version = store.version()
            assert version.map.depth[version.map.fresh != 0].max() <= max_chain
            reads(version, tensors)


@pytest.mark.parametrize(
    "options", [{"max_chain": 1}, {"max_chain": 65}, {"keyframe": "zip"}, {"pack_bytes": 0}, {"threads": 0}]
)
def test_a_policy_that_cannot_be_meant(options):
    """DF-WR-02."""
    with pytest.raises(MalformedError, match=next(iter(options))):
        Policy(**options)


def test_a_raw_keyframe_is_a_checkpoint_file():
    """DF-PCK-01, DF-PCK-02: any safetensors library reads its tensors by name; names with a meaning go to
    the payload.
    """
    rng = np.random.default_rng(29)
    tensors = {
        "bf16": bf16(rng, 50, 30),
        "f8": rng.integers(0, 256, (7, 9), np.uint8).view(ml_dtypes.float8_e4m3fn),
        "f64": rng.standard_normal((8, 40)),
        "bool": rng.random(99) < 0.5,
        "scalar": np.float32(3.5),
        "short": rng.integers(-5, 5, (3, 1), np.int16),
    }
    special = {"deltaformat.payload": bf16(rng, 3, 3), "__metadata__": bf16(rng, 40, 40)}
    nothing = {"empty": np.zeros((0, 4), np.float32)}
    storage = memory()
    store = make(storage)
    with store.writer(policy=Policy(keyframe="raw")) as writer:
        writer.commit(step=0, tensors=tensors | special | nothing)
    version = store.version()
    (pack,) = version.map.packs
    data = storage.get(pack.key)
    found = dict(safetensors.deserialize(data))
    payload = found.pop("deltaformat.payload")
    assert payload["dtype"] == "U8"
    assert bytes(payload["data"]) in {
        first.tobytes() + second.tobytes() for first, second in itertools.permutations(special.values())
    }
    assert sorted(found) == sorted(tensors)
    for name, array in tensors.items():
        info = version.info(name)
        assert (found[name]["dtype"], tuple(found[name]["shape"])) == (info.dtype, info.shape)
        assert bytes(found[name]["data"]) == array.tobytes()
    for entry in parse_safetensors(data, len(data)).tensors.values():  # aligned for tools that map it
        if entry.dtype != "U8":
            width = {"F64": 8, "F32": 4, "BF16": 2, "I16": 2}.get(entry.dtype, 1)
            assert entry.start % width == 0
    assert set(version.map.encoding) == {0}
    reads(version, tensors | special | nothing)


def test_every_pack_is_a_safetensors_file():
    """DF-PCK-01: packs of payloads too, whatever lies in them."""
    storage = memory()
    store, tensors = make(storage), state(30)
    with store.writer(policy=Policy(max_chain=3, pack_bytes=700)) as writer:
        for step in range(8):
            writer.commit(step=step, tensors=tensors)
            tensors = trained(tensors, step)
    packs = [info.key for info in storage.list("packs/")]
    assert len(packs) > 10
    for key in packs:
        safetensors.deserialize(storage.get(key))


def test_the_header_of_a_pack_is_not_looked_at():
    """DF-PCK-03: manifests say where pieces are; a header that is damaged is for `verify` to find."""
    storage = memory()
    store, tensors = make(storage), state(41)
    with store.writer() as writer:
        writer.commit(step=0, tensors=tensors)
    (pack,) = store.version().map.packs
    data = storage.get(pack.key)
    start = 8 + int.from_bytes(data[:8], "little")
    storage.put(pack.key, b"\xff" * start + data[start:])
    reads(df.open(storage).version(), tensors)
    assert [finding.code for finding in store.verify().findings] == ["hash-mismatch"]


def test_packs_are_bounded():
    """SPEC 14: a pack is closed before it would grow beyond its limit; a tensor may lie in several."""
    limit = 2000
    storage = memory()
    store = make(storage)
    rng = np.random.default_rng(31)
    tensors = {f"w{i}": bf16(rng, 15, 30) for i in range(9)} | {"large": bf16(rng, 200, 20)}
    for keyframe in ("planes", "raw"):
        with store.writer(keyframe, policy=Policy(keyframe=keyframe, pack_bytes=limit)) as writer:
            info = writer.commit(step=0, tensors=tensors)
        version = store.version(branch=keyframe)
        assert info.packs == len(version.map.packs) >= info.nbytes // limit
        for ref in version.map.packs:
            header = int.from_bytes(storage.get(ref.key)[:8], "little")
            assert ref.size - header - 8 <= limit
        reads(version, tensors)
    assert store.verify(all=True).findings == []


def test_equal_payloads_lie_in_unlike_packs():
    """DF-WR-03, DF-MAN-03: no pack's key repeats, and each piece finds its own offset."""
    rng = np.random.default_rng(32)
    words = {name: rng.integers(0, 1 << 15, (8, 16), np.uint16) for name in ("a", "b", "c")}
    store = make()
    states = []
    with store.writer(policy=Policy(pack_bytes=1)) as writer:
        for step in range(6):
            states.append({name: array.view(np.float16).copy() for name, array in words.items()})
            writer.commit(step=step, tensors=states[-1])
            for array in words.values():
                array[3, 3] += 1  # the same difference at the same place: the same payload
    packs = store.version().map.packs
    assert len({pack.key for pack in packs}) == len(packs) >= 3 + 3
    for step, expected in enumerate(states):
        reads(store.version(step=step), expected)
        if step:
            check_follow(store, step - 1, step, expected)
    assert store.verify(all=True).findings == []


# -- external bases ------------------------------------------------------------------------------------------


def base_file(path, tensors):
    """An ordinary safetensors file."""
    safetensors.numpy.save_file(tensors, path)
    return path.read_bytes()


def commit_base(store, path):
    """Commit a version whose bytes all stay in a file."""
    with store.writer() as writer:
        part = writer.stage_external(step=0, checkpoint=open_checkpoint(path))
        info = writer.commit(step=0, parts=[part])
    assert (info.packs, info.payload_bytes) == (0, 0)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_external_base(tmp_path):
    """DF-EXT-01, DF-EXT-03: refused by default, read where its prefix is allowed, mended by one copy in
    the store.
    """
    tensors = {name: array.view(np.uint16) for name, array in state(36).items()}
    path = tmp_path / "bases" / "base.safetensors"
    path.parent.mkdir()
    data = base_file(path, tensors)
    inner = memory()
    with make(inner).writer() as writer, pytest.raises(UnsafeError):  # nobody could read it here
        writer.stage_external(step=0, checkpoint=open_checkpoint(path))
    allowed = df.open(inner, allow_external=[path.parent.as_uri() + "/"])
    sha256 = commit_base(allowed, path)
    assert list(inner.list("packs/")) == []  # nothing was uploaded
    watched = Recorder(inner)
    reads(df.open(watched, allow_external=[path.parent.as_uri()]).version(), tensors)
    assert watched.of("get_ranges") == []  # DF-EXT-02: not by the client with credentials
    assert allowed.verify(all=True).findings == []
    for refusing in (df.open(inner), df.open(inner, allow_external=[(tmp_path / "base").as_uri()])):
        version = refusing.version()  # the manifest is in the store
        with pytest.raises(UnsafeError, match="allow its prefix") as caught:
            version.get_tensor("w0")
        assert caught.value.code is ErrorCode.EXTERNAL_REFUSED
        assert refusing.verify(all=True).findings != []

    second = trained(tensors, 1)
    with allowed.writer() as writer:  # the bytes outside are a base as any other
        info = writer.commit(step=1, tensors=second)
        assert info.payload_bytes < 4 * 40
        assert info.read_bytes > 0
        third = trained(second, 2)
        writer.commit(step=2, tensors=third)
    check_follow(allowed, 0, 1, second)
    reads(allowed.version(step=1), second)
    version = df.open(inner).version(step=2)
    assert raw(version.follow(allowed.version(step=1), second)) == raw(third)  # a follower needs no base

    path.write_bytes(data + b" ")
    with pytest.raises(CorruptError) as caught:
        allowed.version(step=0).state_dict()
    assert caught.value.code is ErrorCode.SIZE_MISMATCH
    flipped = bytearray(data)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CorruptError) as caught:
        allowed.version(step=0).state_dict()
    assert caught.value.code is ErrorCode.DIGEST_MISMATCH
    path.unlink()
    with pytest.raises(MissingError) as caught:
        allowed.version(step=0).state_dict()
    assert caught.value.code is ErrorCode.OBJECT_MISSING
    inner.put(f"packs/external/{sha256}", data)
    for store in (allowed, df.open(inner)):
        for step, expected in enumerate((tensors, second, third)):
            reads(store.version(step=step), expected)
        assert store.verify(all=True).findings == []


def test_an_external_base_that_changed_is_mended_by_a_copy(tmp_path):
    """DF-EXT-03: "does not verify" is as good as gone."""
    tensors = {name: array.view(np.uint16) for name, array in state(37).items()}
    path = tmp_path / "base.safetensors"
    data = base_file(path, tensors)
    inner = memory()
    make(inner)
    store = df.open(inner, allow_external=[tmp_path.as_uri()])
    sha256 = commit_base(store, path)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    inner.put(f"packs/external/{sha256}", data)
    reads(store.version(), tensors)


def test_a_difference_in_an_external_object_that_changed_is_mended_by_a_copy(tmp_path):
    """DF-EXT-03, DF-RD-03: what was applied to the parent's block is undone before the copy is tried."""
    inner = DictStorage()
    first = {"w": bf16(np.random.default_rng(38), 40, 50)}
    second = trained(first, 3)
    with make(inner).writer() as writer:
        for step, tensors in enumerate((first, second)):
            info = writer.commit(step=step, tensors=tensors)
    (added,) = members_of(inner, info.seq)["objects_added"]
    data, path = inner.objects.pop(added["key"]), tmp_path / "differences"
    sha256 = hashlib.sha256(data).hexdigest()

    def outside(columns, metadata):
        entry = {"url": path.as_uri(), "size": len(data), "sha256": sha256}
        metadata["packs"] = [entry if old == added else old for old in metadata["packs"]]

    rewrite_manifest(inner, info.seq, outside, objects_added=[])
    path.write_bytes(data)
    store = df.open(inner, allow_external=[path.as_uri()])
    check_follow(store, 0, 1, second)
    path.write_bytes(data[:-64] + bytes(byte ^ 1 for byte in data[-64:]))
    before = raw(first)
    with pytest.raises((CorruptError, MalformedError)):
        store.version(step=1).follow(store.version(step=0), first)
    assert raw(first) == before
    with store.follower() as follower:
        follower.stage(step=0).commit()
        with pytest.raises((CorruptError, MalformedError)):
            follower.stage(step=1)
        inner.put(f"packs/external/{sha256}", data)
        staged = follower.stage(step=1)
        live = {name: array.copy() for name, array in first.items()}
        staged.apply_to(live)
        staged.commit()
        assert raw(live) == raw(second)
    check_follow(store, 0, 1, second)
