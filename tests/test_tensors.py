"""Tensors to canonical bytes and back: every dtype, every layout, bit for bit."""

import json
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from deltaformat import tensors
from deltaformat.dtypes import DTYPES
from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError
from deltaformat.tensors import HostTensor, TensorBytes, check_name, from_host, snapshot, to_host

NUMPY = {
    "BOOL": np.bool_,
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
SHAPE = (6, 4, 10)
# Applied to an array and to the array of its elements' numbers: the second says what the first must give.
LAYOUTS = {
    "as is": lambda a: a,
    "transposed": lambda a: a.T if isinstance(a, np.ndarray) else a.permute(2, 1, 0),
    "strided": lambda a: a[::2, 1::3],
    "one column": lambda a: a[:, :, 3],
    "expanded": lambda a: (
        np.broadcast_to(a[:, :1], SHAPE) if isinstance(a, np.ndarray) else a[:, :1].expand(SHAPE)
    ),
    "scalar": lambda a: a[2, 3, 4],
    "0-d": lambda a: a[2, 3, 4].reshape(()),
    "no rows": lambda a: a[:0],
    "no columns": lambda a: a[:, :, :0],
    "rank 5": lambda a: a.reshape(1, 6, 2, 2, 10),
}


def patterns(dtype, count, seed=0):
    """Random bits after what is special: zeros of both signs, NaNs with payloads, all ones, infinities."""
    size = DTYPES[dtype].bits // 8
    special = [0, 1 << (8 * size - 1), (1 << 8 * size) - 1, 1, (1 << (8 * size - 1)) - 1]
    if size == 2:
        special += [0x7F81, 0xFFC1, 0x7C01, 0xFE01, 0x7F80]
    if size == 4:
        special += [0x7F800001, 0xFFC00001, 0x7FC12345, 0x7F800000]
    if size == 8:
        special += [0x7FF0000000000001, 0xFFF8000000000001, 0x7F800001FFC00001]
    data = np.random.default_rng(seed).bytes(size * count)
    front = b"".join(value.to_bytes(size, "little") for value in special)
    return front + data[len(front) :]


def by_number(data, size, numbers):
    return b"".join(data[i * size : (i + 1) * size] for i in np.asarray(numbers).reshape(-1).tolist())


def raw(array_or_tensor):
    """Bytes of a contiguous result, taken by the framework itself."""
    if isinstance(array_or_tensor, torch.Tensor):
        return array_or_tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return array_or_tensor.tobytes()


def refused(error, code, tensor, name="layer.w"):
    with pytest.raises(error) as caught:
        to_host(name, tensor)
    assert caught.value.code is code
    assert name in caught.value.where
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_layouts(dtype, layout):
    """DF-BLK-01, DF-DTY-03: C order, little-endian, every bit kept; DF-BLK-03: rank 0 has one element."""
    data = patterns(dtype, 240)
    if dtype == "BOOL" and layout in ("scalar", "0-d"):
        data = bytes(byte & 1 for byte in data)  # NumPy makes a scalar's byte 0 or 1 before anyone sees it
    numbers = LAYOUTS[layout](np.arange(240).reshape(SHAPE))
    array = LAYOUTS[layout](np.frombuffer(data, np.uint8).view(NUMPY[dtype]).reshape(SHAPE))
    host = to_host("w", array)
    assert (host.dtype, host.shape) == (dtype, numbers.shape)
    assert host.data.tobytes() == by_number(data, DTYPES[dtype].bits // 8, numbers)
    back = from_host(host)
    assert (back.dtype, back.shape) == (np.dtype(NUMPY[dtype]), numbers.shape)
    assert raw(back) == host.data.tobytes()


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_fortran_order_and_big_endian(dtype):
    """DF-BLK-01."""
    data = patterns(dtype, 240)
    array = np.frombuffer(data, np.uint8).view(NUMPY[dtype]).reshape(SHAPE)
    assert to_host("w", np.asfortranarray(array)).data.tobytes() == data
    assert to_host("w", array[::-1, :, ::-1][::-1, :, ::-1]).data.tobytes() == data
    size = 4 if dtype == "C64" else DTYPES[dtype].bits // 8
    swapped = (
        np.frombuffer(data, f"<u{size}").astype(f">u{size}").view(np.dtype(NUMPY[dtype]).newbyteorder(">"))
    )
    big = swapped.reshape(SHAPE)
    assert to_host("w", big).data.tobytes() == data
    assert to_host("w", np.asfortranarray(big)).data.tobytes() == data
    assert raw(from_host(to_host("w", big.T))) == raw(array.T)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TORCH)
def test_torch_layouts(dtype, layout):
    """DF-BLK-01, DF-DTY-03."""
    data = patterns(dtype, 240, seed=1)
    numbers = LAYOUTS[layout](torch.arange(240).reshape(SHAPE))
    tensor = LAYOUTS[layout](
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(TORCH[dtype]).reshape(SHAPE)
    )
    host = to_host("w", tensor)
    assert (host.dtype, host.shape) == (dtype, tuple(numbers.shape))
    assert host.data.tobytes() == by_number(data, DTYPES[dtype].bits // 8, numbers)
    for given in (host, snapshot(host)):
        back = from_host(given, "pt")
        assert (back.dtype, back.shape) == (TORCH[dtype], numbers.shape)
        assert raw(back) == host.data.tobytes()


def test_every_dtype_has_a_way_in():
    """DF-DTY-01: the table is covered: arrays, tensors, or bytes."""
    assert (
        set(NUMPY) | {"F4", "F6_E2M3", "F6_E3M2"} == set(DTYPES) == set(TORCH) | {"F4", "F6_E2M3", "F6_E3M2"}
    )
    for dtype in DTYPES.values():
        shape = (3, 8)
        data = np.random.default_rng(3).bytes(24 * dtype.bits // 8)
        host = to_host("w", TensorBytes(dtype.name, shape, data))
        assert (host.dtype, host.shape, host.data.tobytes()) == (dtype.name, shape, data)
        assert to_host("w", host) is host


def test_contiguous_input_is_not_copied_and_not_writable():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = torch.arange(12.0).reshape(3, 4)
    for given, address in ((array, array.ctypes.data), (tensor, tensor.data_ptr())):
        host = to_host("w", given)
        assert host.data.ctypes.data == address
        assert not host.data.flags.writeable
        own = snapshot(host)
        assert own.data.ctypes.data != address
        given[0, 0] = 7
        assert host.data[3] != 0
        assert own.data[3] == 0


def test_results_share_memory_where_they_can():
    data = np.arange(16, dtype=np.uint8)
    host = HostTensor("F32", (4,), data)
    assert from_host(host).ctypes.data == data.ctypes.data
    assert from_host(host, "pt").data_ptr() == data.ctypes.data
    data.flags.writeable = False
    assert from_host(host, "pt").data_ptr() != data.ctypes.data
    unaligned = HostTensor("F32", (3,), np.arange(16, dtype=np.uint8)[1:13])
    assert from_host(unaligned, "pt").data_ptr() % 4 == 0
    assert raw(from_host(unaligned)) == unaligned.data.tobytes()


@pytest.mark.parametrize("dtype", ["BOOL"])
def test_bool_bytes_other_than_0_and_1_are_kept(dtype):
    """DF-DTY-03: also where they are copied into another order."""
    data = bytes(range(240))
    array = np.frombuffer(data, np.uint8).view(np.bool_).reshape(24, 10)
    assert to_host("w", array).data.tobytes() == data
    assert to_host("w", array.T).data.tobytes() == by_number(data, 1, np.arange(240).reshape(24, 10).T)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch.bool).reshape(24, 10)
    assert to_host("w", tensor.t()).data.tobytes() == by_number(data, 1, np.arange(240).reshape(24, 10).T)
    host = HostTensor(dtype, (24, 10), np.frombuffer(data, np.uint8))
    assert raw(from_host(host)) == raw(from_host(host, "pt")) == data


def test_f4_of_numpy_is_packed_low_nibble_first():
    """DF-DTY-02: the shape counts elements; DF-BLK-01."""
    codes = np.arange(16, dtype=np.uint8).reshape(2, 8)
    host = to_host("w", codes.view(ml_dtypes.float4_e2m1fn))
    assert (host.dtype, host.shape) == ("F4", (2, 8))
    assert host.data.tobytes().hex() == "1032547698badcfe"
    assert from_host(host).dtype == ml_dtypes.float4_e2m1fn
    assert from_host(host).view(np.uint8).tolist() == codes.tolist()
    turned = to_host("w", codes.view(ml_dtypes.float4_e2m1fn).T)
    assert turned.data.tobytes().hex() == "8091a2b3c4d5e6f7"
    assert to_host("w", (codes | 0xA0).view(ml_dtypes.float4_e2m1fn)).data.tobytes() == host.data.tobytes()
    assert to_host("w", codes[:, :0].view(ml_dtypes.float4_e2m1fn)).shape == (2, 0)
    assert to_host("w", codes[:, :3].view(ml_dtypes.float4_e2m1fn)).data.size == 3
    refused(MalformedError, ErrorCode.INPUT_INVALID, codes[:1, :3].view(ml_dtypes.float4_e2m1fn))
    refused(MalformedError, ErrorCode.INPUT_INVALID, codes[0, 0].view(ml_dtypes.float4_e2m1fn))


def test_f4_of_torch_has_twice_the_elements():
    """DF-DTY-02."""
    data = bytes(range(24))
    pairs = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2)
    host = to_host("w", pairs)
    assert (host.dtype, host.shape, host.data.tobytes()) == ("F4", (4, 12), data)
    back = from_host(host, "pt")
    assert (back.dtype, tuple(back.shape), raw(back)) == (torch.float4_e2m1fn_x2, (4, 6), data)
    turned = to_host("w", pairs.t())
    assert (turned.shape, turned.data.tobytes()) == (
        (6, 8),
        by_number(data, 1, np.arange(24).reshape(4, 6).T),
    )
    assert from_host(host).view(np.uint8)[0, :4].tolist() == [0, 0, 1, 0]
    refused(UnsupportedError, ErrorCode.NOT_SUPPORTED, pairs[0, 0])
    with pytest.raises(UnsupportedError, match="last axis"):
        from_host(HostTensor("F4", (2, 3), np.zeros(3, np.uint8)), "pt")


@pytest.mark.parametrize("seed", range(3))
def test_conjugated_and_negated_views(seed):
    """DF-DTY-03: resolving them flips sign bits and nothing else, also of NaNs."""
    data = patterns("C64", 24, seed)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch.complex64).reshape(4, 6)
    words = np.frombuffer(data, "<u4").reshape(4, 6, 2)
    conjugate = words ^ np.array([0, 1 << 31], np.uint32)
    assert to_host("w", tensor.conj()).data.tobytes() == conjugate.tobytes()
    assert to_host("w", tensor.conj().t()).data.tobytes() == conjugate.transpose(1, 0, 2).tobytes()
    assert to_host("w", tensor.conj().conj()).data.tobytes() == data
    negated = tensor.conj().imag
    assert negated.is_neg()
    assert to_host("w", negated).data.tobytes() == conjugate[..., 1].tobytes()
    assert to_host("w", torch._neg_view(tensor)).data.tobytes() == (words ^ np.uint32(1 << 31)).tobytes()
    both = torch._neg_view(tensor).conj()
    assert both.is_conj()
    assert both.is_neg()
    assert to_host("w", both).data.tobytes() == (words ^ np.array([1 << 31, 0], np.uint32)).tobytes()
    assert to_host("w", tensor[0, 0].conj()).data.tobytes() == conjugate[0, 0].tobytes()
    assert to_host("w", tensor[:0].conj()).data.size == 0
    finite = torch.randn(3, 5, dtype=torch.complex64)
    assert to_host("w", finite.conj()).data.tobytes() == raw(finite.conj().resolve_conj())


def test_parameters_gradients_and_subclasses():
    linear = torch.nn.Linear(3, 2)
    state = {"weight": linear.weight, "bias": linear.bias}
    for name, parameter in state.items():
        assert to_host(name, parameter).data.tobytes() == raw(parameter.detach())
    assert to_host("w", linear.weight * 2).shape == (2, 3)

    class Named(torch.Tensor):
        """A subclass that is plain memory."""

    assert to_host("w", torch.arange(6.0).as_subclass(Named)).data.tobytes() == raw(torch.arange(6.0))
    with torch.inference_mode():
        assert to_host("w", torch.ones(2)).data.tobytes() == raw(torch.ones(2))


def test_names_of_numpys_c_types():
    """`long long` and `long` are two types of the same bits."""
    for code, dtype in (("q", "I64"), ("Q", "U64"), ("b", "I8"), ("B", "U8"), ("h", "I16"), ("I", "U32")):
        assert to_host("w", np.arange(3).astype(np.dtype(code))).dtype == dtype
    assert to_host("w", np.float32(1.5)).shape == ()
    assert to_host("w", ml_dtypes.bfloat16(1.5)).data.tobytes() == b"\xc0\x3f"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, np.complex128),
        np.zeros(2, np.longdouble),
        np.zeros(2, np.clongdouble),
        np.array([object()]),
        np.array(["a"]),
        np.array([b"a"]),
        np.array(["a"], np.dtypes.StringDType()),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "m8[s]"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, "V2"),
        np.zeros(2, ml_dtypes.int4),
        np.zeros(2, ml_dtypes.float8_e4m3b11fnuz),
        np.zeros(4, ml_dtypes.float6_e2m3fn),
    ],
    ids=lambda array: str(array.dtype),
)
def test_numpy_dtypes_that_are_refused(array):
    """DF-DTY-01: the error names tensor and dtype, and says what to do."""
    message = refused(UnsupportedError, ErrorCode.DTYPE_UNKNOWN, array)
    assert str(array.dtype) in message
    assert "layer.w" in message


class _Wrapper(torch.Tensor):
    """As quantised and distributed tensors are: a handle, not memory."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.zeros(3, 3).to_sparse(), "to_dense"),
        (lambda: torch.zeros(3, device="meta"), "load the weights"),
        (lambda: torch.nn.LazyLinear(3).weight, "run the module"),
        (
            lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            "values()",
        ),
        (lambda: _Wrapper(), "_Wrapper"),
        (lambda: np.ma.masked_array([1, 2], [0, 1]), "filled"),
    ],
)
def test_kinds_that_are_refused(make, advice):
    assert advice in refused(UnsupportedError, ErrorCode.NOT_SUPPORTED, make())


@pytest.mark.filterwarnings("ignore")
def test_old_kinds_that_are_refused():
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert "unbind" in refused(UnsupportedError, ErrorCode.NOT_SUPPORTED, nested)
    quantised = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    assert "int_repr" in refused(UnsupportedError, ErrorCode.NOT_SUPPORTED, quantised)
    assert "to_dense" in refused(UnsupportedError, ErrorCode.NOT_SUPPORTED, torch.eye(3).to_sparse_csr())


def test_distributed_tensors_are_refused():
    class DTensor(_Wrapper):
        """Stands for torch's, which needs a process group."""

    assert "full_tensor" in refused(UnsupportedError, ErrorCode.NOT_SUPPORTED, DTensor())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.bits8])
def test_torch_dtypes_that_are_refused(dtype):
    """DF-DTY-01."""
    tensor = (
        torch.zeros(8, dtype=torch.uint8).view(dtype) if dtype is torch.bits8 else torch.zeros(2).to(dtype)
    )
    assert str(dtype) in refused(UnsupportedError, ErrorCode.DTYPE_UNKNOWN, tensor)


@pytest.mark.parametrize("value", [1.5, [1, 2], None, "text", b"bytes", {"a": 1}])
def test_what_is_no_tensor(value):
    assert "TensorBytes" in refused(MalformedError, ErrorCode.INPUT_INVALID, value)


def test_tensor_bytes_that_do_not_fit():
    """DF-DTY-01, DF-DTY-02."""
    assert "U4" in refused(UnsupportedError, ErrorCode.DTYPE_UNKNOWN, TensorBytes("U4", (2,), b"1"))
    refused(MalformedError, ErrorCode.INPUT_INVALID, TensorBytes("F32", (2,), b"1234567"))
    refused(MalformedError, ErrorCode.INPUT_INVALID, TensorBytes("F32", (1.0,), b"1234"))
    refused(MalformedError, ErrorCode.INPUT_INVALID, TensorBytes("F32", (1,), "text"))
    refused(MalformedError, ErrorCode.INPUT_INVALID, TensorBytes("F32", (1,), np.zeros(8, np.uint8)[::2]))
    refused(MalformedError, ErrorCode.VALUE_INVALID, TensorBytes("F4", (3,), b"12"))
    refused(MalformedError, ErrorCode.VALUE_INVALID, TensorBytes("U8", (-1,), b""))
    refused(MalformedError, ErrorCode.VALUE_INVALID, TensorBytes("F6_E2M3", (), b""))


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\x02\x03\x04",
        bytearray(b"\x01\x02\x03\x04"),
        memoryview(b"\x01\x02\x03\x04"),
        np.array([0x04030201], "<i4"),
    ],
)
def test_tensor_bytes_of_any_buffer(data):
    assert to_host("w", TensorBytes("F32", (1,), data)).data.tobytes() == b"\x01\x02\x03\x04"
    assert to_host("w", TensorBytes("F32", [0, 4], b"")).shape == (0, 4)


def test_host_tensors_check_themselves():
    """DF-DTY-02."""
    for data in (
        np.zeros(4, np.int8),
        np.zeros((2, 2), np.uint8),
        np.zeros(8, np.uint8)[::2],
        np.zeros(5, np.uint8),
    ):
        with pytest.raises(MalformedError):
            HostTensor("F32", (1,), data)
    assert HostTensor("F4", (2, 4), np.zeros(4, np.uint8)).nbytes == 4


@pytest.mark.parametrize(
    "name", ["", "/", "..", "a\0b", "__metadata__", "\u00e9", "e\u0301", "x" * 65_535, "\U0001f600" * 4_000]
)
def test_names_that_are_names(name):
    """DF-BLK-03, DF-KEY-03: a name is data; forms of Unicode are told apart."""
    assert check_name(name) is name
    assert to_host(name, np.zeros(1)).shape == (1,)


@pytest.mark.parametrize("name", ["\ud800", "x" * 65_536, "\u00e9" * 32_768, 7, None, b"w", "a\udc80b"])
def test_names_that_are_not(name):
    """DF-BLK-03."""
    with pytest.raises(MalformedError) as caught:
        to_host(name, np.zeros(1))
    assert len(str(caught.value)) < 400
    str(caught.value).encode()


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_dtypes_without_a_framework(dtype, framework):
    with pytest.raises(UnsupportedError, match="get_bytes") as caught:
        from_host(HostTensor(dtype, (4,), np.zeros(3, np.uint8)), framework)
    assert caught.value.code is ErrorCode.DTYPE_UNKNOWN


def test_frameworks_and_devices():
    host = to_host("w", np.arange(3.0))
    with pytest.raises(UnsupportedError, match="unknown framework"):
        from_host(host, "jax")
    with pytest.raises(UnsupportedError, match='"pt"'):
        from_host(host, "np", "cuda:0")
    assert from_host(host, "pt", torch.device("meta")).is_meta
    assert from_host(host, "np", torch.device("cpu")).tolist() == [0, 1, 2]


def test_an_older_torch(monkeypatch):
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(UnsupportedError, match=r"torch 2\.6\.0 .* came with torch 2\.7"):
        from_host(HostTensor("F8_E8M0", (1,), np.zeros(1, np.uint8)), "pt")
    with pytest.raises(UnsupportedError, match=r"came with torch 2\.8"):
        from_host(HostTensor("F4", (2,), np.zeros(1, np.uint8)), "pt")


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"pip install deltaformat\[torch\]"):
        from_host(to_host("w", np.zeros(1)), "pt")
    refused(MalformedError, ErrorCode.INPUT_INVALID, object())


def test_numpy_alone_imports_no_torch():
    program = (
        "import sys, numpy; from deltaformat.tensors import *; from_host(to_host('w', numpy.zeros(3)));"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_big_endian_hosts(monkeypatch):
    """What a big-endian machine would do with its own bytes, seen from this one: the mirror image."""
    monkeypatch.setattr(tensors.sys, "byteorder", "big")
    swapped = to_host("w", np.array([1, 2], np.uint32))
    assert swapped.data.tobytes() == struct.pack(">2I", 1, 2)
    assert raw(from_host(swapped)) == struct.pack(">2I", 1, 2)


def saved(content):
    """(dtype, shape, bytes) of each tensor of a serialised safetensors file, read by hand."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    return {n: (e["dtype"], tuple(e["shape"]), data[slice(*e["data_offsets"])]) for n, e in header.items()}


@pytest.mark.parametrize("dtype", [*TORCH, "F4"])
def test_safetensors_writes_the_same_bytes_from_torch(dtype):
    """DF-BLK-01, DF-DTY-02: the safetensors library is the witness, in both directions where it has both."""
    torch_dtype = TORCH.get(dtype, torch.float4_e2m1fn_x2)
    data = np.random.default_rng(5).bytes(24 * torch_dtype.itemsize)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype).reshape(4, 6)
    content = safetensors.torch.save({"w": tensor})
    host = to_host("w", tensor)
    assert saved(content) == {"w": (host.dtype, host.shape, host.data.tobytes())}
    if dtype in ("F4", "F8_E8M0"):
        return
    loaded = safetensors.torch.load(content)["w"]
    back = from_host(host, "pt")
    assert (loaded.dtype, loaded.shape, raw(loaded)) == (back.dtype, back.shape, raw(back))


@pytest.mark.parametrize("dtype", NUMPY)
def test_safetensors_writes_the_same_bytes_from_numpy(dtype, tmp_path):
    """DF-BLK-01."""
    array = np.frombuffer(patterns(dtype, 24), np.uint8).view(NUMPY[dtype]).reshape(4, 6)
    host = to_host("w", array)
    try:
        content = safetensors.numpy.save({"w": array})
    except (KeyError, safetensors.SafetensorError):
        pytest.skip("the library has no such NumPy dtype")
    assert saved(content) == {"w": (host.dtype, host.shape, host.data.tobytes())}


def test_a_tensor_whose_storage_is_gone_is_refused():
    """FSDP frees parameters so; what lies there then is somebody else's memory."""
    torch = pytest.importorskip("torch")
    tensor = torch.ones(300)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match="storage"):
        to_host("w", tensor)
    assert to_host("w", torch.ones(30).expand(20, 30)).shape == (20, 30)
