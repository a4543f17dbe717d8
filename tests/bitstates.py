"""Tensors made from their canonical bytes, in any framework and memory layout, and what a reader must
give for them.

What is expected comes from the bytes, never from what the library returned.
"""

import hashlib
import struct

import ml_dtypes
import numpy as np
import torch
import xxhash

from deltaformat import TensorBytes

NUMPY = {
    "BOOL": np.bool_,
    "F4": ml_dtypes.float4_e2m1fn,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}
TORCH = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
UNFRAMED = ("F6_E2M3", "F6_E3M2")
BITS = (
    {name: 8 * np.dtype(kind).itemsize for name, kind in NUMPY.items()}
    | {"F4": 4}
    | dict.fromkeys(UNFRAMED, 6)
)
LAYOUTS = ("plain", "fortran", "strided", "reversed", "big-endian")
_TORCH_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Bits:
    """A tensor: dtype name, logical shape, canonical bytes."""

    def __init__(self, dtype, shape, raw):
        self.dtype, self.shape, self.raw = dtype, tuple(shape), bytes(raw)
        assert len(self.raw) == nbytes(dtype, shape)

    def __eq__(self, other):
        return (self.dtype, self.shape, self.raw) == (other.dtype, other.shape, other.raw)

    def __repr__(self):
        return f"Bits({self.dtype}, {self.shape}, {self.raw[:16].hex()}...)"

    @property
    def given(self):
        return TensorBytes(self.dtype, self.shape, self.raw)

    def numpy(self, layout="plain"):
        """The tensor as an array whose elements lie in memory as `layout` says; made from integers only."""
        if self.dtype == "F4":
            codes = np.repeat(np.frombuffer(self.raw, np.uint8), 2)
            codes[0::2] &= 15
            codes[1::2] >>= 4
        else:
            codes = np.frombuffer(self.raw, f"<u{BITS[self.dtype] // 8}")
        codes = arrange(codes.reshape(self.shape), layout, np.empty)
        kind = np.dtype(NUMPY[self.dtype])
        if layout == "big-endian" and kind.isbuiltin == 1 and self.dtype != "C64":
            return codes.byteswap().view(kind.newbyteorder(">"))
        return codes.view(kind)

    def torch(self, layout="plain"):
        """The same, as a torch tensor."""
        size = 1 if self.dtype == "F4" else BITS[self.dtype] // 8
        shape = (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape
        if not self.raw:
            return torch.empty(shape, dtype=TORCH[self.dtype])
        codes = torch.frombuffer(bytearray(self.raw), dtype=_TORCH_INTEGERS[size]).reshape(shape)
        codes = arrange(codes, layout, lambda wanted, _: torch.empty(wanted, dtype=codes.dtype))
        return codes.view(TORCH[self.dtype])

    def same_bits(self, tensor):
        """Whether a framework's tensor has this dtype, shape and these bits."""
        if isinstance(tensor, torch.Tensor):
            packed = self.dtype == "F4"
            shape = (*self.shape[:-1], self.shape[-1] // 2) if packed else self.shape
            if tensor.dtype != TORCH[self.dtype] or tuple(tensor.shape) != shape:
                return False
            if not self.raw:
                return True
            return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == self.raw
        if tensor.dtype != np.dtype(NUMPY[self.dtype]) or tensor.shape != self.shape:
            return False
        codes = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        if self.dtype == "F4":
            codes = codes[0::2] | codes[1::2] << 4
        return codes.tobytes() == self.raw


def arrange(plain, layout, empty):
    """A copy of `plain` with the same elements, laid out otherwise."""
    if layout == "strided" and len(plain.shape):
        wide = empty((plain.shape[0] * 2 + 1, *plain.shape[1:]), getattr(plain, "dtype", None))
        wide[1::2] = plain
        return wide[1::2]
    if layout == "reversed" and isinstance(plain, np.ndarray) and plain.ndim:
        return np.ascontiguousarray(plain[::-1])[::-1]
    if layout == "fortran" and len(plain.shape) > 1:
        axes = tuple(reversed(range(len(plain.shape))))
        if isinstance(plain, np.ndarray):
            return np.ascontiguousarray(plain.transpose(axes)).transpose(axes)
        return plain.permute(axes).contiguous().permute(axes)
    return plain.copy() if isinstance(plain, np.ndarray) else plain.clone()


def nbytes(dtype, shape):
    bits = BITS[dtype] * int(np.prod(shape, dtype=object))
    assert bits % 8 == 0
    return bits // 8


def random_bits(rng, dtype, shape):
    return Bits(dtype, shape, rng.bytes(nbytes(dtype, shape)))


def flip(rng, tensor, count=3):
    """The tensor with some bytes changed."""
    data = np.frombuffer(tensor.raw, np.uint8).copy()
    if data.size:
        data[rng.integers(0, data.size, count)] ^= rng.integers(1, 256, count).astype(np.uint8)
    return Bits(tensor.dtype, tensor.shape, data.tobytes())


def check(version, state):
    """Everything that `version` gives must be `state`, tensor by tensor."""
    assert sorted(version.keys()) == sorted(state)
    for name, tensor in state.items():
        found = version.get_bytes(name)
        assert (found.dtype, tuple(found.shape)) == (tensor.dtype, tensor.shape), name
        assert bytes(found.data) == tensor.raw, name
        info = version.info(name)
        assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tensor.shape, len(tensor.raw))


def check_all(tensors, state):
    """A state dict must be `state`."""
    assert set(tensors) == set(state)
    for name, tensor in state.items():
        assert tensor.same_bits(tensors[name]), name


def spec_root(state, block_bytes, digest="xxh3-128"):
    """The root as SPEC 7.1 has it, from canonical bytes alone (DF-DIG-03)."""
    import blake3

    hashed = xxhash.xxh3_128_digest if digest == "xxh3-128" else lambda data: blake3.blake3(data).digest()
    leaves = []
    for name, tensor in sorted((name.encode(), tensor) for name, tensor in state.items()):
        leaf = b"deltaformat/1 tensor\0" + struct.pack("<I", len(name)) + name
        leaf += bytes([len(tensor.dtype)]) + tensor.dtype.encode()
        leaf += bytes([len(tensor.shape)]) + b"".join(struct.pack("<Q", dim) for dim in tensor.shape)
        blocks = [tensor.raw[at : at + block_bytes] for at in range(0, len(tensor.raw), block_bytes)]
        leaf += struct.pack("<Q", len(blocks)) + b"".join(map(hashed, blocks))
        leaves.append(hashlib.sha256(leaf).digest())
    root = b"deltaformat/1 root\0" + bytes([len(digest)]) + digest.encode()
    root += struct.pack("<QQ", block_bytes, len(leaves)) + b"".join(leaves)
    return f"df1:{digest}:{block_bytes}:{hashlib.sha256(root).hexdigest()}"
