"""Digests that are computed on a device: both engines against the CPU's libraries.

The Triton engine runs in Triton's interpreter here. Every kind of length is met, but few programs: a program
takes the interpreter about a millisecond for each round of 1 KiB.
"""

import sys

import blake3
import numpy as np
import pytest
import torch
import xxhash
from bitstates import BITS, UNFRAMED, Bits
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.digests import digest_blocks, get_digest
from deltaformat.errors import LimitError, MalformedError, UnsupportedError
from deltaformat.gpu import blake3_torch, hash_blocks, hashing, table, xxh3_short
from deltaformat.gpu.engines import choose_engine
from deltaformat.gpu.transfer import traffic
from deltaformat.tensors import to_host

LIBRARIES = {
    "xxh3-128": lambda data: xxhash.xxh3_128_digest(data),
    "blake3-256": lambda data: blake3.blake3(data).digest(),
}
LENGTHS = [
    0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 159, 160, 161, 191,
    192, 223, 224, 239, 240, 241, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 1087, 1088, 1089,
]  # fmt: skip


def octets(seed, count):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def expected(arrays, block_bytes, algorithm):
    """What the CPU's libraries say, block by block."""
    function = LIBRARIES[algorithm]
    found = [
        function(array[start : start + block_bytes].tobytes())
        for array in arrays
        for start in range(0, array.size, block_bytes)
    ]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 16 if algorithm == "xxh3-128" else 32)


@pytest.fixture(params=["torch", "triton"])
def engine(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def rows_of(arrays, width):
    rows = np.zeros((len(arrays), width), np.uint8)
    for row, array in zip(rows, arrays, strict=True):
        row[: array.size] = array
    return torch.from_numpy(rows), np.array([array.size for array in arrays])


# -- against the libraries ----------------------------------------------------------------------------------


def test_every_short_length():
    """XXH3 has six ways up to 240 bytes; each length goes through all and takes one."""
    arrays = [octets(length, length) for length in range(241)]
    rows, lengths = rows_of(arrays, xxh3_short.ROW_BYTES)
    found = xxh3_short.hash_short(rows, torch.from_numpy(lengths)).numpy()
    assert [digest.tobytes() for digest in found] == [xxhash.xxh3_128_digest(a.tobytes()) for a in arrays]


def test_nothing_has_a_digest():
    """No block is empty, but a digest of nothing exists, and the kernels' code gives it."""
    rows, lengths = rows_of([octets(0, 0)], 1024)
    assert blake3_torch.hash_ragged(rows, torch.from_numpy(lengths), lengths).numpy().tobytes() == (
        blake3.blake3(b"").digest()
    )


@pytest.mark.parametrize("block_bytes", [256, 512, 1024, 4096])
@pytest.mark.parametrize("algorithm", LIBRARIES)
def test_every_kind_of_length_in_torch(algorithm, block_bytes):
    lengths = [*LENGTHS, *(block_bytes * k + d for k in (1, 2, 3) for d in (-1, 0, 1))]
    arrays = [octets(length, length) for length in lengths]
    found = hash_blocks(
        [torch.from_numpy(array) for array in arrays], block_bytes=block_bytes, algorithm=algorithm,
        engine="torch",
    )  # fmt: skip
    assert np.array_equal(found, expected(arrays, block_bytes, algorithm))


@pytest.mark.parametrize(
    ("algorithm", "block_bytes", "lengths"),
    [
        ("xxh3-128", 256, LENGTHS),
        ("xxh3-128", 8192, [241, 1024, 1025, 2049, 4097, 8191, 8192, 3 * 8192 + 5, 5 * 1024 + 64]),
        ("blake3-256", 256, [0, 1, 63, 64, 65, 255, 256, 257, 513]),
        ("blake3-256", 4096, [1, 64, 1023, 1024, 1025, 2048, 3072, 3100, 4095, 4096, 8192 + 1024, 3 * 4096]),
    ],
)
def test_every_kind_of_length_in_triton(algorithm, block_bytes, lengths):
    pytest.importorskip("triton")
    arrays = [octets(length, length) for length in lengths]
    found = hash_blocks(
        [torch.from_numpy(array) for array in arrays], block_bytes=block_bytes, algorithm=algorithm,
        engine="triton",
    )  # fmt: skip
    assert np.array_equal(found, expected(arrays, block_bytes, algorithm))


@given(
    lengths=st.lists(st.integers(0, 9000), max_size=6),
    algorithm=st.sampled_from(sorted(LIBRARIES)),
    block_bytes=st.sampled_from([256, 1024, 2048]),
    seed=st.integers(0, 2**32 - 1),
)
def test_ragged_sets(lengths, algorithm, block_bytes, seed):
    arrays = [octets([seed, number], length) for number, length in enumerate(lengths)]
    found = hash_blocks(
        [torch.from_numpy(array) for array in arrays], block_bytes=block_bytes, algorithm=algorithm,
        engine="torch",
    )  # fmt: skip
    assert np.array_equal(found, expected(arrays, block_bytes, algorithm))


def test_extreme_words(engine):
    """Carries of the 128-bit products: words of all ones and all zeros."""
    arrays = [np.full(2048 + 77, 255, np.uint8), np.zeros(2048 + 77, np.uint8), np.full(100, 255, np.uint8)]
    arrays.append(np.tile(np.array([255] * 8 + [0] * 8, np.uint8), 200))
    found = hash_blocks([torch.from_numpy(array) for array in arrays], block_bytes=2048, engine=engine)
    assert np.array_equal(found, expected(arrays, 2048, "xxh3-128"))


# -- of tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(set(BITS) - set(UNFRAMED)))
@pytest.mark.parametrize("layout", ["plain", "fortran", "strided"])
def test_every_dtype_and_layout(dtype, layout):
    """What is hashed on a device are the canonical bytes, as the CPU takes them."""
    count = 24 * 30 * BITS[dtype] // 8
    bits = Bits(dtype, (24, 30), octets(count, count))
    if dtype == "BOOL":
        bits = Bits(dtype, (24, 30), octets(1, count) & 1)
    tensor = bits.torch(layout)
    found = hash_blocks(tensor, block_bytes=256, engine="torch")
    assert np.array_equal(found, expected([np.frombuffer(bits.raw, np.uint8)], 256, "xxh3-128"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_flags_are_bits(dtype):
    """Views that only say that they are conjugated or negated."""
    plain = torch.randn(40, 13, dtype=dtype, generator=torch.Generator().manual_seed(3))
    views = [torch._neg_view(plain)]
    if dtype.is_complex:
        views += [plain.conj(), torch._neg_view(plain.conj())]
    for view in views:
        host = to_host("w", view).data
        assert np.array_equal(
            hash_blocks(view, block_bytes=256), digest_blocks(host, 256, get_digest("xxh3-128"))
        )


def test_unaligned_views(engine):
    """Slices of a fused buffer begin anywhere; kernels load 16 bytes at a time."""
    fused = torch.from_numpy(octets(9, 3000))
    views = [fused[1:700], fused[3:1027], fused[702:]]
    found = hash_blocks(views, block_bytes=512, engine=engine)
    assert np.array_equal(found, expected([view.numpy() for view in views], 512, "xxh3-128"))


def test_only_digests_cross():
    tensors = [torch.from_numpy(octets(n, 5000 + n)) for n in range(20)]
    before = traffic.snapshot()
    digests = hash_blocks(tensors, block_bytes=1024)
    crossed = traffic.snapshot() - before
    assert crossed == {("down", "digests"): digests.nbytes, ("host", "waits"): 1}


def test_batches_bound_the_copies(monkeypatch):
    monkeypatch.setattr(table, "COPIED_BYTES", 2000)
    tensors = [torch.from_numpy(octets(n, 1600)).view(40, 40).T for n in range(3)]
    plain = [torch.from_numpy(octets(n, 1600)) for n in range(3)]
    assert table.batches([*tensors, *plain]) == [[0], [1], [2, 3, 4, 5]]
    mixed = [plain[0], torch.empty(3, device="meta"), plain[1], torch.empty(3, device="meta")]
    assert table.batches(mixed) == [[0, 2], [1, 3]]
    found = hash_blocks([*tensors, *plain], block_bytes=256)
    flat = [tensor.contiguous().reshape(-1).numpy() for tensor in tensors] + [t.numpy() for t in plain]
    assert np.array_equal(found, expected(flat, 256, "xxh3-128"))


def test_slabs(monkeypatch):
    monkeypatch.setattr(hashing, "SLAB_BYTES", 1024)
    arrays = [octets(n, 900 * n) for n in range(8)]
    for algorithm in LIBRARIES:
        found = hash_blocks([torch.from_numpy(a) for a in arrays], block_bytes=256, algorithm=algorithm)
        assert np.array_equal(found, expected(arrays, 256, algorithm))


def test_places_beyond_32_bits():
    """The arithmetic of a tensor of 2^34 bytes and more, without its memory."""
    sizes = [2**34 + 5, 0, 7, 2**33]
    tensor, start, length, first = table.block_places(sizes, 1 << 26)
    assert first.tolist() == [0, 257, 257, 258, 258 + 128]
    assert start.dtype == np.int64
    assert start[256] == 2**34
    assert length[256] == 5
    assert int(start.max()) == 2**34
    assert tensor[[0, 256, 257, 258]].tolist() == [0, 0, 2, 3]
    assert length.sum() == sum(sizes)


def test_levels_of_a_tree():
    """Pairs are joined, odd ones carried up, and the last pair of a block is its root."""
    plan = blake3_torch.levels(np.array([1, 2, 3, 5]))
    lefts, odd, order, root = plan[0]
    assert lefts.tolist() == [1, 3, 6, 8]
    assert odd.tolist() == [0, 5, 10]
    assert order.tolist() == [4, 0, 1, 5, 2, 3, 6]
    assert root.tolist() == [1, 0, 0, 0]
    assert [level[3].tolist() for level in plan[1:]] == [[1, 0], [1]]


# -- what cannot be -----------------------------------------------------------------------------------------


def test_refusals():
    tensor = torch.zeros(300, dtype=torch.uint8)
    with pytest.raises(MalformedError, match="block_bytes"):
        hash_blocks(tensor, block_bytes=300)
    with pytest.raises(UnsupportedError, match="xxh3-128, blake3-256"):
        hash_blocks(tensor, block_bytes=256, algorithm="md5")
    with pytest.raises(MalformedError, match="'auto', 'torch', 'triton'"):
        hash_blocks(tensor, block_bytes=256, engine="cuda")
    with pytest.raises(MalformedError, match="no torch tensor"):
        hash_blocks([tensor, np.zeros(3)], block_bytes=256)
    with pytest.raises(UnsupportedError, match="meta tensor"):
        hash_blocks(torch.empty(3, device="meta"), block_bytes=256)
    with pytest.raises(UnsupportedError, match="dense"):
        hash_blocks(torch.eye(3).to_sparse(), block_bytes=256)
    assert hash_blocks([], block_bytes=256).shape == (0, 16)


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedError, match=r"pip install deltaformat\[gpu\]"):
        hash_blocks(torch.zeros(3), block_bytes=256, engine="triton")
    assert len(hash_blocks(torch.zeros(3), block_bytes=256)) == 1


def test_an_old_triton_does_not_serve(monkeypatch):
    """On a device `auto` leaves it aside; who asks for it is told."""
    triton = pytest.importorskip("triton")
    cuda = torch.device("cuda")
    monkeypatch.setenv("CC", "cc")
    assert choose_engine("auto", cuda) == "torch"  # here kernels are interpreted
    monkeypatch.delenv("TRITON_INTERPRET")
    assert choose_engine("auto", cuda) == "triton"
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    assert choose_engine("auto", cuda) == "torch"
    with pytest.raises(UnsupportedError, match=r"3\.6 or newer \(this is 3\.2\.0\)"):
        choose_engine("triton", cuda)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_engine("auto", cuda) == "torch"


def test_without_a_compiler(monkeypatch):
    """Triton makes a launcher in C for each kernel; a slim container has no compiler."""
    pytest.importorskip("triton")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("PATH", "/nowhere")
    assert choose_engine("auto", torch.device("cuda")) == "torch"


def test_memory_that_runs_out(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nMore lines")

    monkeypatch.setattr(hashing.xxh3_torch, "hash_equal", full)
    with pytest.raises(LimitError, match=r"Tried to allocate 3 GiB\.\); free some"):
        hash_blocks(torch.zeros(300), block_bytes=256)


def test_without_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UnsupportedError, match="run on CUDA devices, and in its interpreter"):
        hash_blocks(torch.zeros(3), block_bytes=256, engine="triton")


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"pip install deltaformat\[gpu\]"):
        hash_blocks([], block_bytes=256)
