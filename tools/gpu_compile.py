"""Compile the kernels for a GPU that need not be there, and say what they need of it.

    python tools/gpu_compile.py [--capability 90] [--json]

Registers and spills are ptxas's words; loads from global memory are counted in the PTX by their width.
Triton's wheel has the compiler and ptxas.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from deltaformat.gpu import blake3_triton, diff_triton, xxh3_triton

_HASHED = {"addresses": "*i64", "lengths": "*i64", "constants": "*i64", "digests": "*u8"}
_CHUNKS = {
    "addresses": "*i64", "lengths": "*i64", "counters": "*i64", "alone": "*i64", "values": "*i32",
    "count": "i64", "chunks": "i32",
}  # fmt: skip
_PARENTS = {
    "children": "*i32", "lefts": "*i64", "roots": "*i64", "values": "*i32", "count": "i64", "root": "i32"
}  # fmt: skip
_COUNTED = {"news": "*i64", "olds": "*i64", "elements": "*i64", "counts": "*i32", "tiles": "i32"}
_COMPACTED = {
    "news": "*i64", "olds": "*i64", "elements": "*i64", "counts": "*i32", "ends": "*i64", "positions": "*i32",
    "differences": "*i16", "tiles": "i32",
}  # fmt: skip
_APPLIED = {"addresses": "*i64", "starts": "*i64", "positions": "*i32", "differences": "*i16"}
_THREADS, _TILE = blake3_triton.THREADS, diff_triton.TILE

KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "xxh3": (xxh3_triton.xxh3_kernel, _HASHED, {}, 1),
    "blake3 chunks": (
        blake3_triton.chunk_kernel, _CHUNKS, {"STEPS": 16, "EQUAL": True, "THREADS": _THREADS}, 4,
    ),
    "blake3 chunks, ragged": (
        blake3_triton.chunk_kernel, _CHUNKS, {"STEPS": 16, "EQUAL": False, "THREADS": _THREADS}, 4,
    ),
    "blake3 parents": (
        blake3_triton.parent_kernel, _PARENTS, {"INDEXED": False, "THREADS": _THREADS}, 4,
    ),
    "count": (diff_triton.count_kernel, _COUNTED, {"TYPE": tl.int16, "TILE": _TILE}, 4),
    "compact": (
        diff_triton.compact_kernel, _COMPACTED,
        {"TYPE": tl.int16, "TILE": _TILE}, diff_triton.WARPS,
    ),
    "apply": (
        diff_triton.apply_kernel, _APPLIED,
        {"TYPE": tl.int16, "UNDO": False, "CHANGES": diff_triton.CHANGES}, diff_triton.WARPS,
    ),
}  # fmt: skip
"""Name -> kernel, types of arguments, constants, warps."""


def compiled(name: str, capability: int) -> dict[str, Any]:
    """Compile one kernel.

    Returns:
        Registers a thread; bytes spilled; bytes of shared memory; and how many loads from global memory there
        are of each width in bytes.
    """
    kernel, types, constants, warps = KERNELS[name]
    signature = types | dict.fromkeys(constants, "constexpr")
    options = {"num_warps": warps, "sanitize_overflow": False}
    result = triton.compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32), options=options
    )
    ptx = result.asm["ptx"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "kernel.ptx")
        file.write_text(ptx)
        target = f"sm_{capability}{'a' if capability >= 90 else ''}"
        said = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={target}", str(file), "-o", os.devnull],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
    loads: Counter[int] = Counter()
    for vector, bits in re.findall(r"ld\.global(?:\.v(\d))?\.[a-z](\d+)", ptx):
        loads[int(vector or 1) * int(bits) // 8] += 1
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[-1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "shared": int(result.metadata.shared),
        "loads": {str(width): count for width, count in sorted(loads.items())},
    }


def main(arguments: list[str] | None = None) -> int:
    """Compile all of them."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--capability", type=int, default=90, help="compute capability times 10 (default 90)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = {name: compiled(name, options.capability) for name in KERNELS}
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"sm_{options.capability}              registers  spilled  shared  loads of so many bytes")
    for name, facts in found.items():
        loads = ", ".join(f"{count} x {width}" for width, count in facts["loads"].items())
        print(f"{name:22} {facts['registers']:6} {facts['spilled']:8} {facts['shared']:7}  {loads}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
