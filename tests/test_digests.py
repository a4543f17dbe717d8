"""Digests against known answers, the root against its preimage."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest

from deltaformat.blocks import Bytes
from deltaformat.digests import (
    DIGEST_SIZES,
    Root,
    digest_blocks,
    get_digest,
    parse_root,
    tensor_leaf,
    version_root,
)
from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError

# From the publications of XXH3 and BLAKE3.
KNOWN = {
    "xxh3-128": {
        b"": "99aa06d3014798d86001c324468d497f",
        b"a": "a96faf705af16834e6c632b61e964e1f",
        b"abc": "06b05ab6733a618578af5f94892f3950",
    },
    "blake3-256": {
        b"": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
        b"abc": "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85",
    },
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str) -> None:
    """DF-DIG-01: the digests are those of SPEC 7, in canonical byte order."""
    algorithm = get_digest(name)
    assert algorithm.name == name
    assert algorithm.size == DIGEST_SIZES[name]
    for data, digest in KNOWN[name].items():
        for buffer in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
            assert algorithm(buffer).hex() == digest
    assert repr(algorithm) == f"DigestAlgorithm(name='{name}', size={algorithm.size})"


def test_unknown_digest() -> None:
    """DF-DSC-02: an unknown digest name is UNSUPPORTED."""
    with pytest.raises(UnsupportedError) as caught:
        get_digest("sha-256", where="deltaformat.json")
    assert caught.value.code is ErrorCode.DIGEST_UNKNOWN
    assert caught.value.where == "deltaformat.json"


def test_blake3_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(UnsupportedError, match=r"pip install deltaformat\[blake3\]") as caught:
        get_digest("blake3-256")
    assert caught.value.code is ErrorCode.DIGEST_UNKNOWN


@pytest.mark.parametrize("name", DIGEST_SIZES)
@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 1000])
def test_digest_blocks(name: str, nbytes: int) -> None:
    algorithm = get_digest(name)
    data = np.arange(nbytes, dtype=np.uint16).astype(np.uint8)
    digests = digest_blocks(data, 256, algorithm)
    assert digests.shape == (-(-nbytes // 256), algorithm.size)
    for index, row in enumerate(digests):
        assert row.tobytes() == algorithm(data.tobytes()[256 * index : 256 * (index + 1)])


def test_leaf_and_root_preimages() -> None:
    """DF-DIG-03, with every byte of the preimages written out."""
    digests = np.arange(32, dtype=np.uint8).reshape(2, 16)
    leaf = hashlib.sha256(
        b"deltaformat/1 tensor\x00"
        b"\x02\x00\x00\x00\xc3\xa9"  # e acute
        b"\x04BF16"
        b"\x02\x03\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00"
        b"\x02\x00\x00\x00\x00\x00\x00\x00" + bytes(range(32))
    ).digest()
    assert tensor_leaf("\u00e9", "BF16", (3, 256), digests) == leaf
    # A column slice is not contiguous; its bytes count, not its memory.
    wide = np.zeros((2, 20), np.uint8)
    wide[:, :16] = digests
    assert tensor_leaf("\u00e9", "BF16", (3, 256), wide[:, :16]) == leaf

    empty: Bytes = np.empty((0, 16), np.uint8)
    scalar = hashlib.sha256(
        b"deltaformat/1 tensor\x00\x00\x00\x00\x00\x02U8\x00\x00\x00\x00\x00\x00\x00\x00\x00"
    ).digest()
    assert tensor_leaf("", "U8", (), empty) == scalar

    digits = hashlib.sha256(
        b"deltaformat/1 root\x00"
        b"\x08xxh3-128"
        b"\x00\x01\x00\x00\x00\x00\x00\x00"
        b"\x02\x00\x00\x00\x00\x00\x00\x00" + scalar + leaf
    ).hexdigest()
    expected = f"df1:xxh3-128:256:{digits}"
    assert version_root("xxh3-128", 256, [("\u00e9".encode(), leaf), (b"", scalar)]) == expected
    assert version_root("xxh3-128", 256, iter([(b"", scalar), ("\u00e9".encode(), leaf)])) == expected

    nothing = hashlib.sha256(
        b"deltaformat/1 root\x00\x0ablake3-256\x00\x00\x10\x00\x00\x00\x00\x00" + bytes(8)
    ).hexdigest()
    assert version_root("blake3-256", 1 << 20, []) == f"df1:blake3-256:1048576:{nothing}"


def test_names_are_ordered_as_bytes() -> None:
    """DF-DIG-03: UTF-8 order, which is not that of UTF-16 or of any language."""
    names = ["\uffff", "\U00010000", "Z", "a", "\u00e9"]
    leaves = {name: hashlib.sha256(name.encode()).digest() for name in names}
    given = [(name.encode(), leaf) for name, leaf in leaves.items()]
    ordered = b"".join(leaves[name] for name in ("Z", "a", "\u00e9", "\uffff", "\U00010000"))
    head = b"deltaformat/1 root\x00\x08xxh3-128" + (256).to_bytes(8, "little") + (5).to_bytes(8, "little")
    assert version_root("xxh3-128", 256, given).endswith(hashlib.sha256(head + ordered).hexdigest())


def test_leaf_covers_everything() -> None:
    """DF-DIG-03: name, dtype, shape and digests, each on its own."""
    digests = np.zeros((1, 16), np.uint8)
    leaves = [
        tensor_leaf("a", "U8", (4,), digests),
        tensor_leaf("b", "U8", (4,), digests),
        tensor_leaf("a", "I8", (4,), digests),
        tensor_leaf("a", "U8", (2, 2), digests),
        tensor_leaf("a", "U8", (4,), digests + 1),
    ]
    assert len(set(leaves)) == 5
    with pytest.raises(MalformedError):
        tensor_leaf("\ud800", "U8", (4,), digests)


def test_parse_root() -> None:
    text = "df1:blake3-256:1048576:" + "0123456789abcdef" * 4
    root = parse_root(text)
    assert root == Root("blake3-256", 1048576, "0123456789abcdef" * 4)
    assert str(root) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "df1:xxh3-128:256:" + "0" * 63,
        "df1:xxh3-128:256:" + "0" * 65,
        "df1:xxh3-128:256:" + "A" * 64,
        "df1:xxh3-128:0256:" + "0" * 64,
        "df1:xxh3-128:255:" + "0" * 64,
        "df1:xxh3-128:134217728:" + "0" * 64,
        "df1:xxh3-128:" + "9" * 5000 + ":" + "0" * 64,
        "df1:xxh3-128:\u0662\u0665\u0666:" + "0" * 64,
        "df2:xxh3-128:256:" + "0" * 64,
        " df1:xxh3-128:256:" + "0" * 64,
        "df1:xxh3-128:256:" + "0" * 64 + "\n",
    ],
)
def test_not_a_root(text: str) -> None:
    """DF-DSC-01 holds for the block size of a root, too."""
    with pytest.raises(MalformedError) as caught:
        parse_root(text, where="root")
    assert caught.value.code is ErrorCode.VALUE_INVALID
    assert len(str(caught.value)) < 400


def test_root_of_an_unknown_digest() -> None:
    """DF-DSC-02"""
    with pytest.raises(UnsupportedError, match="sha-256"):
        parse_root("df1:sha-256:256:" + "0" * 64)
