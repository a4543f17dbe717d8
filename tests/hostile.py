"""Stores that an adversary has made: every hash and link is right, one thing is meant to do harm.

Run as a program it opens them all under a cap on memory and prints, as JSON, what became of each, and the
peak.
"""

import json
import sys
from functools import cache
from pathlib import Path

import pyarrow as pa
import zstandard
from forge import (
    add_pack,
    last_commit,
    members_of,
    replace_content,
    replace_manifest,
    rewrite,
    rewrite_manifest,
    sealed,
)
from mapmaker import frame
from tinystore import BLOCK, DictStorage, weights

import deltaformat as df
from deltaformat.encodings.streams import write_varint
from deltaformat.errors import DeltaFormatError
from deltaformat.keys import DESCRIPTOR, TAIL_HINT, record_key

__all__ = ["CASES", "HARMLESS", "base", "open_and_read"]


@cache
def base():
    """Three steps of a few tensors, and a sidecar file."""
    storage = DictStorage()
    names = ("w", "noise", "step")
    with df.create(storage, block_bytes=BLOCK).writer() as writer:
        for step in range(3):
            tensors = {name: weights(step)[name] for name in names}
            writer.commit(step=step, tensors=tensors, files={"config.json": b"{}"}, metadata={"note": 1})
    return storage


def open_and_read(storage):
    """All that a reader may do with the newest version, and with the oldest."""
    store = df.open(storage)
    with store.version() as version:
        version.state_dict()
        version.get_slice("w")[0:2]
        for path in version.files():
            version.read_file(path)
        with store.version(step=1) as parent:
            version.follow(parent, parent.state_dict())
    with store.version(step=0) as version:
        version.state_dict()
    store.log()


CASES = {}  # name -> (error class, code, what makes it)
HARMLESS = {}  # name -> what makes it: a reader must take these as if nothing were


def case(error_class, code):
    def register(make):
        CASES[make.__name__] = (error_class, code, make)
        return make

    return register


def harmless(make):
    HARMLESS[make.__name__] = make
    return make


def manifest_case(error_class, code, name, change, **options):
    """A case in which the newest commit's manifest is altered by `change(columns, metadata)`."""

    def make(storage):
        rewrite_manifest(storage, last_commit(storage), change, **options)

    CASES[name] = (error_class, code, make)


def record_case(error_class, code, name, change):
    """A case in which the newest commit's record is altered by `change(members)`, which returns its new
    members.
    """
    CASES[name] = (error_class, code, lambda storage: rewrite(storage, last_commit(storage), change))


def payload_case(error_class, code, name, payload, *, encoding, base=None):
    """A case in which the first block of `w` in the newest version is read from a hostile payload."""

    def make(storage):
        (entry,) = [add_pack(storage, payload)]

        def change(columns, metadata):
            row, metadata["packs"] = columns["name"].index("w"), [*metadata["packs"], entry]
            drop = columns["depth"][row][0]
            pack = len(metadata["packs"]) - 1
            chain = {"pack": [pack], "gap": [0], "length": [len(payload)], "encoding": [encoding]}
            if base is not None:  # a zero block to begin with
                start = {"pack": [pack + 1], "gap": [0], "length": [3], "encoding": [1]}
                metadata["packs"].append(add_pack(storage, base))
                chain = {name: start[name] + chain[name] for name in chain}
            for name, values in chain.items():
                columns[name][row] = values + columns[name][row][drop:]
            columns["depth"][row][0] = len(chain["pack"])
            columns["fresh"][row][0] = 255

        # The chains of other blocks begin where they did: the first pieces of each pack may not move.
        rewrite_manifest(storage, last_commit(storage), shifted(change))

    CASES[name] = (error_class, code, make)


def shifted(change):
    """Let `change` work on absolute offsets instead of gaps."""

    def wrapped(columns, metadata):
        ends = {}
        for row, packs in enumerate(columns["pack"]):
            for i, pack in enumerate(packs):
                columns["gap"][row][i] += ends.get(pack, 0)
                ends[pack] = columns["gap"][row][i] + columns["length"][row][i]
        change(columns, metadata)
        ends = {}
        for row, packs in enumerate(columns["pack"]):
            for i, pack in enumerate(packs):
                offset = columns["gap"][row][i]
                columns["gap"][row][i] -= ends.get(pack, 0)
                ends[pack] = offset + columns["length"][row][i]

    return wrapped


# -- bombs ---------------------------------------------------------------------------------------------------

GIB = 1 << 30


@cache
def bomb(size):
    """One zstd frame of `size` zero bytes, which says so."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    chunk = bytes(1 << 24)
    parts = [compressor.compress(chunk[: size - start]) for start in range(0, size, len(chunk))]
    return b"".join([*parts, compressor.flush()])


@case("LIMIT", "limit-exceeded")
def manifest_bomb_that_is_announced(storage):
    replace_manifest(storage, last_commit(storage), bomb(64 << 20), 4 * GIB)


@case("MALFORMED", "manifest-invalid")
def manifest_bomb_that_is_not_announced(storage):
    replace_manifest(storage, last_commit(storage), bomb(2 * GIB), 5_000)


@case("MALFORMED", "manifest-invalid")
def manifest_frame_without_a_content_size(storage):
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    replace_manifest(storage, last_commit(storage), compressor.compress(bytes(64 << 20)), 5_000)


@case("CORRUPT", "frame-corrupt")
def manifest_frame_that_says_too_little(storage):
    """Its header states 5,000 bytes, its blocks hold 512 MiB."""
    data = bomb(512 << 20)
    parameters = zstandard.get_frame_parameters(data)
    blocks = data[zstandard.frame_header_size(data) :]
    assert parameters.content_size == 512 << 20
    header = (
        b"\x28\xb5\x2f\xfd" + bytes([0b0100_0000, 0x88]) + (5_000 - 256).to_bytes(2, "little")
    )  # a window of 128 MiB
    replace_manifest(storage, last_commit(storage), header + blocks, 5_000)


@case("MALFORMED", "manifest-invalid")
def manifest_of_two_frames(storage):
    content = bytes(1000)
    replace_manifest(storage, last_commit(storage), frame(content) + frame(content), 1000)


@case("MALFORMED", "manifest-invalid")
def manifest_in_a_skippable_frame(storage):
    replace_manifest(storage, last_commit(storage), b"\x50\x2a\x4d\x18\x08\x00\x00\x00" + bytes(8), 8)


@case("MALFORMED", "manifest-invalid")
def manifest_of_zeros(storage):
    replace_content(storage, last_commit(storage), bytes(10_000))


def stream_of(data):
    return write_varint(len(data)) + data


payload_case(
    "MALFORMED", "payload-invalid", "payload_bomb", b"\1" + stream_of(bomb(32 << 20)) + b"\1\0", encoding=1
)
payload_case(
    "MALFORMED",
    "payload-invalid",
    "payload_with_a_window_of_2_gib",
    # A frame for 128 bytes, as one must be here, whose header asks for a window of 2 GiB.
    b"\1"
    + stream_of(b"\x28\xb5\x2f\xfd" + bytes([0b0100_0000, 21 << 3]) + b"\0\0" + bytes([1, 0, 0]))
    + b"\1\0",
    encoding=1,
)
payload_case(
    "CORRUPT",
    "frame-corrupt",
    "payload_frame_that_says_too_little",
    b"\1"
    + stream_of(b"\x28\xb5\x2f\xfd\x20\x80" + bomb(32 << 20)[zstandard.frame_header_size(bomb(32 << 20)) :])
    + b"\1\0",
    encoding=1,
)
payload_case("MALFORMED", "manifest-invalid", "piece_longer_than_any", bytes(2 * BLOCK + 4_097), encoding=1)
payload_case("MALFORMED", "payload-invalid", "payload_shorter_than_it_says", b"\0\0" + bytes(100), encoding=1)
payload_case("MALFORMED", "payload-invalid", "payload_longer_than_it_says", b"\0\1\0\0", encoding=1)
payload_case("UNSUPPORTED", "encoding-unknown", "payload_with_a_reserved_bit", b"\x04\1\0", encoding=1)
payload_case("MALFORMED", "payload-invalid", "raw_payload_of_another_length", bytes(255), encoding=0)
payload_case("CORRUPT", "digest-mismatch", "raw_payload_with_other_bytes", bytes(256), encoding=0)
ZEROS = b"\0\1\0"  # planes of one byte: 256 times 0
payload_case(
    "MALFORMED",
    "payload-invalid",
    "sparse_with_2_to_the_32_changes",
    b"\1" + write_varint(2**32 - 1) + b"\0\1\0\1\0\1\0\1\0",
    encoding=3,
    base=ZEROS,
)
payload_case(
    "MALFORMED",
    "payload-invalid",
    "sparse_with_many_changes_in_many_strata",
    b"\x0d" + b"\3\0\2\0\1\0" + 4 * write_varint(2**32 - 1) + b"\0\0\0\0\1\0\1\0\1\0\1\0",
    encoding=3,
    base=ZEROS,
)
payload_case(
    "MALFORMED",
    "payload-invalid",
    "sparse_with_a_rank_beyond_the_block",
    b"\1\1\0\0\xfe\0\0\0\0\0\0",
    encoding=3,
    base=ZEROS,
)
payload_case(
    "MALFORMED",
    "payload-invalid",
    "sparse_with_k_27",
    b"\1\1\x1b\0\0\0\0\0\0\0\0\0\0\0\0\0",
    encoding=3,
    base=ZEROS,
)
payload_case(
    "MALFORMED", "payload-invalid", "varint_without_end", b"\1" + b"\xff" * 40, encoding=3, base=ZEROS
)


# -- manifests -----------------------------------------------------------------------------------------------


def set_first(column, value):
    """A change of the first entry of a column's first row."""

    def change(columns, _):
        columns[column][0] = [value, *columns[column][0][1:]]

    return change


def set_row(column, value):
    def change(columns, _):
        columns[column][0] = value

    return change


def chain_of(depth):
    """Give the first block that many pieces, as many as the columns then say."""

    def change(columns, _):
        grow = depth - columns["depth"][0][0]
        columns["depth"][0][0], columns["fresh"][0][0] = depth, 255
        for name, value in (("pack", 0), ("gap", 0), ("length", 1), ("encoding", 3)):
            at = columns["depth"][0][0] - grow
            columns[name][0][at:at] = [value] * grow

    return change


for wrong_gap in (-1, -(2**63), 2**63 - 1, 2**40, 2**62):
    manifest_case("MALFORMED", "manifest-invalid", f"gap_{wrong_gap}", set_first("gap", wrong_gap))
for wrong_length in (0, 2**32 - 1):
    manifest_case(
        "MALFORMED", "manifest-invalid", f"length_{wrong_length}", set_first("length", wrong_length)
    )
manifest_case("MALFORMED", "manifest-invalid", "pack_outside_the_table", set_first("pack", 2**32 - 1))
manifest_case("UNSUPPORTED", "encoding-unknown", "encoding_4", set_first("encoding", 4))
manifest_case("MALFORMED", "payload-invalid", "chain_without_a_keyframe", set_first("encoding", 3))
for wrong_depth in (65, 128, 255):
    manifest_case("MALFORMED", "manifest-invalid", f"chain_of_{wrong_depth}_pieces", chain_of(wrong_depth))
manifest_case("MALFORMED", "manifest-invalid", "chain_of_no_piece", set_first("depth", 0))
manifest_case("MALFORMED", "manifest-invalid", "fresh_beyond_the_chain", set_first("fresh", 200))
manifest_case("MALFORMED", "manifest-invalid", "shape_negative", set_row("shape", [-1, 4]))
manifest_case("MALFORMED", "manifest-invalid", "shape_overflows", set_row("shape", [2**62, 2**62, 4]))
manifest_case("MALFORMED", "manifest-invalid", "shape_larger_than_its_blocks", set_row("shape", [2**40]))
manifest_case("MALFORMED", "manifest-invalid", "shape_of_rank_33", set_row("shape", [1] * 33))
manifest_case("UNSUPPORTED", "dtype-unknown", "dtype_unknown", set_row("dtype", "BF17"))
manifest_case(
    "MALFORMED",
    "manifest-invalid",
    "dtype_that_leaves_bits",
    lambda c, _: (set_row("dtype", "F4")(c, _), set_row("shape", [3])(c, _)),
)
manifest_case(
    "INCONSISTENT", "parts-disagree", "name_twice", lambda c, _: c.update(name=["w"] * len(c["name"]))
)
manifest_case(
    "INCONSISTENT", "root-mismatch", "names_changed_about", lambda c, _: c.update(name=c["name"][::-1])
)
manifest_case("INCONSISTENT", "root-mismatch", "digest_of_other_bytes", set_first("digest", bytes(16)))
manifest_case("INCONSISTENT", "parts-disagree", "of_another_parent", lambda _, m: m.update(parent=0))
manifest_case(
    "INCONSISTENT", "parts-disagree", "of_another_block_size", lambda _, m: m.update(block_bytes=512)
)
manifest_case(
    "UNSUPPORTED", "feature-unknown", "manifest_requires", lambda _, m: m.update(requires=["x-new"])
)
manifest_case(
    "UNSUPPORTED", "format-unknown", "manifest_format", lambda _, m: m.update(format="deltaformat-manifest/2")
)
manifest_case("MALFORMED", "manifest-invalid", "column_missing", lambda c, _: c.pop("gap"))
manifest_case(
    "MALFORMED",
    "manifest-invalid",
    "column_of_another_type",
    lambda c, _: c.update(gap=pa.array(c["gap"], pa.list_(pa.int32()))),
)
manifest_case(
    "MALFORMED",
    "manifest-invalid",
    "column_with_nulls",
    lambda c, _: c.update(fresh=pa.array([None, *c["fresh"][1:]], pa.list_(pa.uint8()))),
)
for wrong_path in ("../x", "/etc/passwd", "a/../../x", "a//b", "", ".", "C:x", "a\\b", "a\0b", "x" * 1025):
    manifest_case(
        "UNSAFE",
        "path-unsafe",
        f"sidecar {wrong_path[:20]!a}",
        lambda _, m, path=wrong_path: m["files"][0].update(path=path),
    )
for wrong_key in (
    "../secret",
    "packs/external/" + "0" * 64,
    "log/" + "0" * 20 + ".json",
    "files/x",
    "packs/" + "0" * 20 + "/" + "G" * 64 + ".safetensors",
):
    manifest_case(
        "MALFORMED",
        "value-invalid",
        f"pack_key {wrong_key[:20]}",
        lambda _, m, key=wrong_key: m["packs"][0].update(key=key),
    )
for wrong_url in (
    "file:///etc/passwd",
    "http://169.254.169.254/",
    "hf://a/b@main/x",
    "hf://a/b@" + "0" * 40 + "/../x",
):
    manifest_case(
        "UNSAFE",
        "external-refused",
        f"external {wrong_url}",
        lambda _, m, url=wrong_url: m["packs"].__setitem__(
            0, {"url": url, "size": m["packs"][0]["size"], "sha256": "0" * 64}
        ),
    )


# -- records -------------------------------------------------------------------------------------------------


@case("LIMIT", "limit-exceeded")
def record_of_17_mib(storage):
    rewrite(storage, last_commit(storage), lambda record: record["metadata"].update(big="x" * (17 << 20)))


@case("LIMIT", "limit-exceeded")
def record_of_15_mib_of_brackets(storage):
    body = storage.objects[record_key(last_commit(storage))][:-76].removesuffix(b"}")
    rewrite(storage, last_commit(storage), lambda _: body + b',"deep":' + b"[" * (15 << 20) + b"}")


@case("MALFORMED", "json-invalid")
def record_nested_33_deep(storage):
    deep = json.loads("[" * 32 + "]" * 32)
    rewrite(storage, last_commit(storage), lambda record: record.update(deep=deep))


@case("MALFORMED", "json-invalid")
def record_with_a_member_twice(storage):
    body = storage.objects[record_key(last_commit(storage))][:-76]
    rewrite(storage, last_commit(storage), lambda _: body + b',"step":1}')


@case("MALFORMED", "json-invalid")
def record_with_a_number_of_a_million_digits(storage):
    body = storage.objects[record_key(last_commit(storage))][:-76]
    rewrite(storage, last_commit(storage), lambda _: body + b',"n":' + b"9" * 1_000_000 + b"}")


@case("LIMIT", "limit-exceeded")
def record_with_10_001_branches(storage):
    head = {"seq": None, "step": None, "epoch": 0, "claim": None}
    rewrite(
        storage, last_commit(storage), lambda r: r["heads"].update({f"b{i}": head for i in range(10_001)})
    )


@case("LIMIT", "limit-exceeded")
def record_with_4_097_manifests(storage):
    rewrite(
        storage, last_commit(storage), lambda record: record.update(manifests=record["manifests"] * 4_097)
    )


@case("LIMIT", "limit-exceeded")
def descriptor_of_65_kib(storage):
    members = json.loads(storage.objects[DESCRIPTOR])
    storage.objects[DESCRIPTOR] = sealed(members | {"big": "x" * (65 << 10)})


for wrong_size in (64, 300, 128 << 20, 2**53 - 1):
    CASES[f"block_size_{wrong_size}"] = (
        "MALFORMED",
        "value-invalid",
        lambda s, size=wrong_size: s.objects.update(
            {DESCRIPTOR: sealed(json.loads(s.objects[DESCRIPTOR]) | {"block_bytes": size})}
        ),
    )


def descriptor_case(error_class, code, name, **members):
    CASES[name] = (
        error_class,
        code,
        lambda s: s.objects.update({DESCRIPTOR: sealed(json.loads(s.objects[DESCRIPTOR]) | members)}),
    )


descriptor_case("UNSUPPORTED", "feature-unknown", "descriptor_requires", requires=["x-new"])
descriptor_case("UNSUPPORTED", "format-unknown", "descriptor_format", format="deltaformat/2")
descriptor_case("UNSUPPORTED", "format-unknown", "log_grammar", log="log/{seq}.json")
descriptor_case("UNSUPPORTED", "digest-unknown", "digest_unknown", digest="md5")
record_case(
    "UNSUPPORTED", "feature-unknown", "record_requires", lambda record: record | {"requires": ["x-new"]}
)
record_case("UNSUPPORTED", "format-unknown", "record_kind", lambda record: record | {"kind": "merge"})
record_case("INCONSISTENT", "record-misplaced", "record_seq", lambda record: record | {"seq": 1})
record_case("CORRUPT", "chain-broken", "record_prev", lambda record: record | {"prev": "0" * 64})
record_case(
    "INCONSISTENT",
    "root-mismatch",
    "record_root",
    lambda r: r | {"root": r["root"][:-1] + ("0" if r["root"][-1] != "0" else "1")},
)
record_case(
    "CORRUPT",
    "size-mismatch",
    "manifest_size",
    lambda r: r | {"manifests": [r["manifests"][0] | {"size": 2**30}]},
)
record_case(
    "MALFORMED",
    "value-invalid",
    "manifest_key",
    lambda r: r | {"manifests": [r["manifests"][0] | {"key": "../x"}]},
)
record_case(
    "MALFORMED",
    "manifest-invalid",
    "manifest_content_size",
    lambda r: (
        r | {"manifests": [r["manifests"][0] | {"content_size": r["manifests"][0]["content_size"] + 1}]}
    ),
)


def ancestors_case(name, ancestors, *, agreed):
    """A case in which the middle commit lists other ancestors.

    It is void then, and with it the newest one. Unless the newest one goes by them (`agreed`): a reader that
    judges it from the one before
    takes both for valid (DF-LOG-06), and must not go astray on the way to step 0.
    """

    def make(storage):
        middle = last_commit(storage) - 1
        commit = members_of(storage, middle)
        listed = ancestors(commit)
        rewrite(storage, middle, lambda record: record.update(ancestors=listed))
        if agreed:
            own = [[commit["depth"], commit["seq"], commit["step"]], *([listed[0]] if listed else [])]
            rewrite(storage, middle + 1, lambda record: record.update(ancestors=own))

    CASES[name] = ("INCONSISTENT", "record-void", make) if agreed else ("MISSING", "version-missing", make)


for number, wrong_ancestors in enumerate(
    [
        lambda record: [[0, record["seq"], 0]],
        lambda record: [[0, record["seq"] + 1, 0]],
        lambda record: [[0, 2**53 - 1, 0]],
        lambda record: [[0, 0, 0]],
    ]
):
    ancestors_case(f"ancestors_{number}_agreed", wrong_ancestors, agreed=True)
    ancestors_case(f"ancestors_{number}", wrong_ancestors, agreed=False)
ancestors_case("ancestors_missing", lambda record: [], agreed=False)


# -- what a reader must not mind -----------------------------------------------------------------------------


@harmless
def unknown_members_everywhere(storage):
    seq = last_commit(storage)
    rewrite_manifest(
        storage,
        seq,
        lambda _, m: (m.update(x=[1]), m["packs"][0].update(x=1), m["files"][0].update(x={})),
        extra=[(pa.field("x", pa.float64()), pa.array([0.5] * 3))],
    )

    def change(record):
        record.update(x={"y": [None]})
        record["heads"]["main"]["x"] = 1
        record["manifests"][0]["x"] = "1"
        record["objects_added"][0]["x"] = 1.5

    rewrite(storage, seq, change)
    storage.objects[DESCRIPTOR] = sealed(json.loads(storage.objects[DESCRIPTOR]) | {"x": 1e300})


@harmless
def columns_in_another_order(storage):
    def change(columns, _):
        items = list(columns.items())[::-1]
        columns.clear()
        columns.update(items)

    rewrite_manifest(storage, last_commit(storage), change)


@harmless
def metadata_nested_32_deep(storage):
    deep = json.loads("[" * 30 + "0.25" + "]" * 30)
    rewrite(storage, last_commit(storage), lambda record: record["metadata"].update(deep=deep))


@harmless
def record_of_15_mib(storage):
    rewrite(storage, last_commit(storage), lambda record: record["metadata"].update(big="x" * (15 << 20)))


for number, hint in enumerate(
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b'{"seq": null}',
        b'{"seq": -1}',
        b'{"seq": true}',
        b'{"seq": 1.0}',
        b'{"seq": 0}',
        b'{"seq": 2}',
        b'{"seq": 4}',
        b'{"seq": 9007199254740991}',
        b'{"seq": 1' + b"0" * 5_000 + b"}",
        b'{"seq": "3"}',
        b"[" * 60_000,
        b'{"seq": 3}' + b" " * (17 << 20),
        b'{"seq": 3, "seq": 4}',
    ]
):
    HARMLESS[f"hint_{number}"] = lambda storage, data=hint: storage.objects.update({TAIL_HINT: data})


def run(make):
    storage = base().copy()
    make(storage)
    try:
        open_and_read(storage)
    except DeltaFormatError as error:
        return error.error_class
    return "ok"


def main():
    """Open every case under a cap of its own memory."""
    import resource

    bomb(2 * GIB), bomb(512 << 20)  # made before the cap
    open_and_read(base())
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    cap = size + (int(sys.argv[1]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {name: run(make) for name, (_, _, make) in CASES.items()}
    found |= {name: run(make) for name, make in HARMLESS.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"found": found, "peak_mib": peak / 1024}))


if __name__ == "__main__":
    main()
