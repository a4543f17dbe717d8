"""The kernels as a compiler makes them for a GPU that is not here (compute capability 9.0)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "gpu_compile.py"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """What the tool says, from a process in which the interpreter does not take the compiler's place."""
    pytest.importorskip("triton")
    if sys.platform != "linux":
        pytest.skip("Triton's wheel has the assembler on Linux")
    cache = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(TOOL), "--json"],
        check=True, capture_output=True, text=True, timeout=300, env=os.environ | {"TRITON_CACHE_DIR": cache},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_nothing_spills(kernels):
    """A spill is memory traffic in kernels whose limit is memory."""
    assert {name: facts["spilled"] for name, facts in kernels.items()} == dict.fromkeys(kernels, 0)


@pytest.mark.parametrize(
    ("name", "most", "warps"),
    [
        ("xxh3", 96, 1), ("blake3 chunks", 64, 4), ("blake3 chunks, ragged", 64, 4),
        ("blake3 parents", 64, 4), ("count", 64, 4), ("compact", 85, 8), ("apply", 64, 8),
    ],
)  # fmt: skip
def test_registers_leave_room(kernels, name, most, warps):
    """So many registers that at least 20 warps share a multiprocessor: fewer do not hide memory's latency."""
    registers = kernels[name]["registers"]
    assert registers <= most
    assert 65536 // (32 * warps * -(-registers // 8) * 8) * warps >= 20


@pytest.mark.parametrize(
    ("name", "least"),
    [("xxh3", 10), ("blake3 chunks", 4), ("blake3 parents", 4), ("count", 4), ("compact", 2)],
)
def test_content_is_loaded_16_bytes_at_a_time(kernels, name, least):
    assert kernels[name]["loads"].get("16", 0) >= least
