"""The worked store of SPEC.md, appendix A.

Builds it and prints it into SPEC.md, from which tools/gen_vectors.py takes the first conformance case.

    python tools/worked_store.py            compare SPEC.md with what is built here
    python tools/worked_store.py --write    bring SPEC.md up to date; then run tools/gen_vectors.py --write

Payloads and packs are written by hand, byte by byte, from SPEC.md; the library's writer has no part in them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from deltaformat.ijson import dump, seal
from deltaformat.manifest import encode_part
from deltaformat.packs import FileRef, PackRef
from deltaformat.versionmap import NOT_FRESH, VersionMap, VersionMapBuilder

__all__ = ["STEPS", "Encode", "build", "build_maps", "parse", "render"]

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "SPEC.md"
BEGIN, END = "<!-- worked-store -->\n", "<!-- end -->"

BLOCK_BYTES = 256
CLAIM = f"{0:020}"
TIME = "2026-01-01T00:00:00Z"

Encode = Callable[[VersionMap, int | None], tuple[bytes, int]]
"""Makes a manifest part of a map and its parent's seq: the frame and its content size."""


def u16(*values: int) -> bytes:
    """Little-endian 16-bit integers."""
    return b"".join(value.to_bytes(2, "little") for value in values)


# -- the weights: two tensors; from step 0 to step 1 two elements of the first change ------------------------

W0 = u16(0x3F80, 0xBF80, 0x0000, 0x8000, 0x7FC1, 0x3C00)  # 1, -1, 0, -0, a NaN, 0.0078125
W1 = u16(0x3F80, 0xBF81, 0x0000, 0x8000, 0x7FC1, 0x3BFE)
B0 = bytes.fromhex("0000003f000000bf")  # 0.5, -0.5
STEPS: Sequence[Mapping[str, tuple[str, tuple[int, ...], bytes]]] = (
    {"w": ("BF16", (2, 3), W0), "b": ("F32", (2,), B0)},
    {"w": ("BF16", (2, 3), W1), "b": ("F32", (2,), B0)},
)
CONFIG = b"{}"

# SPEC 9.3. Threshold 0x3e00: stratum 0 = positions 0, 1, 4; stratum 1 = positions 2, 3, 5.
# Position 1 has rank 1 and d = 1; position 5 has rank 2 and d = -2.
PAYLOAD = bytes.fromhex(
    "05"  # w = 2, one threshold
    "003e"  # t_1
    "0101"  # c_0 = c_1 = 1
    "0001"  # k_0 = 0, k_1 = 1
    "00 0101"  # quotients, stored: 1 >> 0 and 2 >> 1
    "00 00"  # low bits, stored: stratum 0 has none, stratum 1 has the bit 0
    "00 02"  # signs, stored: bit 1 is set
    "00 0001"  # magnitudes, plane 0, stored: |1| - 1 and |-2| - 1
    "01 00"  # magnitudes, plane 1, constant
)


PAYLOAD_PARTS = (
    ("bytes", "meaning"),
    ("---", "---"),
    ("`05`", "w = 2, m = 1"),
    ("`003e`", "t_1 = 0x3e00"),
    ("`01 01`", "c_0, c_1"),
    ("`00 01`", "k_0, k_1"),
    ("`00 0101`", "quotients: stored; 1 >> 0, 2 >> 1"),
    ("`00 00`", "low bits: stored; none of stratum 0, 0 of stratum 1"),
    ("`00 02`", "signs: stored; +, -"),
    ("`00 0001`", "magnitudes, plane 0: stored; 0, 1"),
    ("`01 00`", "magnitudes, plane 1: constant 0"),
)


def safetensors(header: Mapping[str, object], data: bytes) -> bytes:
    """A safetensors file."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


PACK_0 = safetensors(
    {
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
    },
    B0 + W0,
)
PACK_1 = safetensors(
    {"deltaformat.payload": {"dtype": "U8", "shape": [len(PAYLOAD)], "data_offsets": [0, len(PAYLOAD)]}},
    PAYLOAD,
)


def sha256(data: bytes) -> str:
    """Lowercase hex."""
    return hashlib.sha256(data).hexdigest()


def pack_ref(pack: bytes) -> PackRef:
    """How a pack table names a pack."""
    return PackRef(f"packs/{CLAIM}/{sha256(pack)}.safetensors", len(pack))


CONFIG_REF = FileRef("config.json", f"files/{CLAIM}/{sha256(CONFIG)}", len(CONFIG))


def build_maps() -> list[VersionMap]:
    """The maps of both steps."""
    data_0, data_1 = len(PACK_0) - 20, len(PACK_1) - len(PAYLOAD)
    chains: list[dict[str, tuple[int, list[tuple[int, int, int, int]]]]] = [
        {
            "w": (NOT_FRESH, [(0, data_0 + 8, 12, 0)]),
            "b": (NOT_FRESH, [(0, data_0, 8, 0)]),
        },
        {
            "w": (1, [(0, data_0 + 8, 12, 0), (1, data_1, len(PAYLOAD), 3)]),
            "b": (0, [(0, data_0, 8, 0)]),
        },
    ]
    maps = []
    for tensors, step in zip(STEPS, chains, strict=True):
        builder = VersionMapBuilder(digest_bytes=16, packs=[pack_ref(PACK_0), pack_ref(PACK_1)])
        for name, (dtype, shape, content) in tensors.items():
            fresh, pieces = step[name]
            columns = np.array(pieces, np.int64).T
            builder.add_tensor(
                name,
                dtype,
                shape,
                digests=np.frombuffer(xxhash.xxh3_128_digest(content), np.uint8).reshape(1, 16),
                fresh=np.array([fresh], np.uint8),
                depth=np.array([len(pieces)], np.uint8),
                pack=columns[0],
                offset=columns[1],
                length=columns[2],
                encoding=columns[3],
            )
        finished = builder.finish()
        maps.append(replace(finished, files=(CONFIG_REF,)))
    return maps


def root(step: int) -> str:
    """The root of a step (SPEC 7.1)."""
    leaves = []
    for name, (dtype, shape, content) in sorted(STEPS[step].items()):
        leaf = b"deltaformat/1 tensor\0" + len(name).to_bytes(4, "little") + name.encode()
        leaf += bytes([len(dtype)]) + dtype.encode() + bytes([len(shape)])
        leaf += b"".join(dim.to_bytes(8, "little") for dim in shape)
        leaf += (1).to_bytes(8, "little") + xxhash.xxh3_128_digest(content)
        leaves.append(hashlib.sha256(leaf).digest())
    head = b"deltaformat/1 root\0" + bytes([8]) + b"xxh3-128" + BLOCK_BYTES.to_bytes(8, "little")
    return f"df1:xxh3-128:{BLOCK_BYTES}:" + sha256(
        head + len(leaves).to_bytes(8, "little") + b"".join(leaves)
    )


def encode(version: VersionMap, parent: int | None) -> tuple[bytes, int]:
    """A manifest part as the library writes it."""
    return encode_part(version, parent=parent, digest="xxh3-128", block_bytes=BLOCK_BYTES)


def build(encode: Encode = encode) -> dict[str, bytes]:
    """The whole store: key -> bytes.

    `encode` may give other bytes of the same manifests: Arrow and zstd are not canonical.
    """
    objects = {
        "deltaformat.json": seal(
            {
                "format": "deltaformat/1",
                "uuid": "0123456789abcdef0123456789abcdef",
                "digest": "xxh3-128",
                "block_bytes": BLOCK_BYTES,
                "log": "log/{seq:020}.json",
                "requires": [],
                "time": TIME,
            }
        )
    }
    prev: str | None = None

    def record(seq: int, kind: str, head_step: int | None, **members: object) -> None:
        nonlocal prev
        head = {"seq": None if head_step is None else seq, "step": head_step, "epoch": 1, "claim": 0}
        common = {
            "kind": kind,
            "seq": seq,
            "prev": prev,
            "nonce": f"{seq:032x}",
            "time": TIME,
            "heads": {"main": head},
            "last_tag": None,
            "last_retire": None,
            "requires": [],
        }
        data = seal({**common, **members})
        objects[f"log/{seq:020}.json"] = data
        prev = sha256(data)

    record(
        0, "claim", None, branch="main", epoch=1, host="example", pid=1, resume_from=None, single_writer=False
    )
    packs = (PACK_0, PACK_1)
    for step, version in enumerate(build_maps()):
        seq, parent = step + 1, step if step else None
        frame, content_size = encode(version, parent)
        manifest = f"manifests/{CLAIM}/{sha256(frame)}.arrow.zst"
        pack = pack_ref(packs[step])
        added = [{"key": pack.key, "size": pack.size}]
        objects[pack.key] = packs[step]
        if step == 0:
            objects[CONFIG_REF.key] = CONFIG
            added.insert(0, {"key": CONFIG_REF.key, "size": CONFIG_REF.size})
        objects[manifest] = frame
        record(
            seq,
            "commit",
            step,
            branch="main",
            claim=0,
            step=step,
            parent=parent,
            depth=step,
            ancestors=[[0, 1, 0]] if step else [],
            root=root(step),
            manifests=[{"key": manifest, "size": len(frame), "content_size": content_size}],
            objects_added=added,
            objects_dropped=[],
            metadata={"note": "the worked store"} if step else {},
        )
    objects["hints/tail.json"] = dump({"seq": 2})
    return objects


# -- as text -------------------------------------------------------------------------------------------------


def render(objects: Mapping[str, bytes]) -> str:
    """The appendix's body: JSON as text, everything else in hex, 32 bytes a line."""
    parts = [
        "Block size 256, one branch, two steps. Step 0 holds `w` (BF16, [2, 3]) and `b` (F32, [2]) raw, in a"
        " pack that is an ordinary safetensors file; step 1 changes two elements of `w`:\n",
        f"- `w` at step 0: `{W0.hex()}`, at step 1: `{W1.hex()}`; `b` at both: `{B0.hex()}`.",
        f"- The roots are `{root(0)}` and `{root(1)}`.",
        "- The `sparse` payload of step 1: width 2, one threshold 0x3e00, which splits the positions into"
        " stratum 0 = {0, 1, 4} and stratum 1 = {2, 3, 5};\n  position 1 (rank 1) changes by 1, position 5"
        " (rank 2) by -2:\n",
        "\n".join(f"| {part} | {meaning} |" for part, meaning in PAYLOAD_PARTS) + "\n",
        "The objects, whole (JSON without a line break at its end). Manifests are Arrow IPC in zstd: other"
        " bytes may say the same.\n",
    ]
    for key, data in objects.items():
        if key.endswith(".json") or data == CONFIG:
            body = data.decode()
        else:
            text = data.hex()
            body = "\n".join(text[i : i + 64] for i in range(0, len(text), 64))
        parts.append(f"`{key}`, {len(data)} bytes\n\n```\n{body}\n```\n")
    return "\n".join(parts)


def parse(spec: str) -> dict[str, bytes]:
    """The objects that SPEC.md shows."""
    body = spec[spec.index(BEGIN) : spec.index(END, spec.index(BEGIN))]
    objects = {}
    for key, size, text in re.findall(
        r"^`([^`\n]+)`, (\d+) bytes\n\n```\n(.*?)\n```$", body, re.MULTILINE | re.DOTALL
    ):
        data = text.encode() if text.startswith("{") else bytes.fromhex(text)
        assert len(data) == int(size), key
        objects[key] = data
    return objects


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description="The worked store of SPEC.md, appendix A.")
    parser.add_argument("--write", action="store_true", help="bring SPEC.md up to date")
    options = parser.parse_args(argv)
    spec = SPEC.read_text()
    if not options.write:
        differing = [key for key, data in build().items() if parse(spec).get(key) != data]
        print("\n".join(f"differs: {key}" for key in differing) or "SPEC.md shows this store")
        return 1 if differing else 0
    objects = build()
    start = spec.index(BEGIN) + len(BEGIN)
    SPEC.write_text(spec[:start] + render(objects) + spec[spec.index(END, start) :])
    return 0


if __name__ == "__main__":
    sys.exit(main())
