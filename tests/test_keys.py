"""Keys: the grammar, and that nothing else passes."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.errors import CorruptError, ErrorCode, MalformedError
from deltaformat.keys import (
    DESCRIPTOR,
    TAIL_HINT,
    KeyKind,
    ParsedKey,
    check_object,
    claim_of,
    external_key,
    file_key,
    manifest_key,
    pack_key,
    parse_key,
    probe_key,
    record_key,
)

SHA = "0123456789abcdef" * 4

KEYS = {
    DESCRIPTOR: ParsedKey("deltaformat.json", KeyKind.DESCRIPTOR),
    TAIL_HINT: ParsedKey("hints/tail.json", KeyKind.TAIL_HINT),
    record_key(12): ParsedKey("log/00000000000000000012.json", KeyKind.RECORD, seq=12),
    manifest_key(3, SHA): ParsedKey(
        f"manifests/00000000000000000003/{SHA}.arrow.zst", KeyKind.MANIFEST, claim=3, sha256=SHA
    ),
    pack_key(4, SHA): ParsedKey(
        f"packs/00000000000000000004/{SHA}.safetensors", KeyKind.PACK, claim=4, sha256=SHA
    ),
    file_key(5, SHA): ParsedKey(f"files/00000000000000000005/{SHA}", KeyKind.FILE, claim=5, sha256=SHA),
    external_key(SHA): ParsedKey(f"packs/external/{SHA}", KeyKind.EXTERNAL, sha256=SHA),
    probe_key("0f" * 16): ParsedKey("hints/probe-" + "0f" * 16, KeyKind.PROBE),
}


@pytest.mark.parametrize("key", KEYS)
def test_made_and_parsed(key: str) -> None:
    """Section 6: what is made is what is parsed, part by part."""
    assert parse_key(key) == KEYS[key]
    assert claim_of(key) == KEYS[key].claim


@pytest.mark.parametrize(
    "key",
    [
        "",
        "deltaformat.json/",
        "deltaformatXjson",
        "/deltaformat.json",
        "./deltaformat.json",
        "log/12.json",
        "log/000000000000000000012.json",
        "log/0000000000000000000.json",
        "log/0000000000000000001a.json",
        "log/\u06600000000000000000012.json",
        "log/00000000000000000012.json\n",
        "log/../deltaformat.json",
        f"manifests/00000000000000000003/{SHA}.arrow",
        f"manifests/{SHA}.arrow.zst",
        f"packs/00000000000000000004/{SHA.upper()}.safetensors",
        f"packs/00000000000000000004/{SHA[:-1]}.safetensors",
        f"packs/00000000000000000004/{SHA}.safetensors#1",
        f"packs/00000000000000000004/../00000000000000000004/{SHA}.safetensors",
        f"packs//00000000000000000004/{SHA}.safetensors",
        f"packs\\00000000000000000004\\{SHA}.safetensors",
        f"packs/external/{SHA}.safetensors",
        f"files/external/{SHA}",
        f"files/00000000000000000005/{SHA}0",
        "hints/probe-" + "0F" * 16,
        "hints/tail.json ",
        "hints/other.json",
    ],
)
def test_not_a_key(key: str) -> None:
    """DF-KEY-01: the grammar holds in full."""
    with pytest.raises(MalformedError) as caught:
        parse_key(key, where="place")
    assert caught.value.code is ErrorCode.VALUE_INVALID
    assert caught.value.where == "place"


@given(st.text())
def test_names_cannot_become_keys(name: str) -> None:
    """DF-KEY-03: there is no way to make a key of a name."""
    for make in (external_key, probe_key, lambda text: pack_key(0, text), lambda text: manifest_key(0, text)):
        with pytest.raises(MalformedError):
            make(name)


@pytest.mark.parametrize("number", [-1, 10**20])
def test_numbers_that_do_not_fit(number: int) -> None:
    """DF-KEY-01: exactly 20 digits."""
    with pytest.raises(MalformedError):
        record_key(number)
    with pytest.raises(MalformedError):
        pack_key(number, SHA)


def test_whole_objects_are_checked() -> None:
    """DF-KEY-02: size first, then the hash in the key."""
    data = b"content"
    key = pack_key(1, hashlib.sha256(data).hexdigest())
    check_object(key, data, size=7)
    with pytest.raises(CorruptError) as caught:
        check_object(key, b"contents", size=7)
    assert caught.value.code is ErrorCode.SIZE_MISMATCH
    with pytest.raises(CorruptError) as caught:
        check_object(key, data, size=8)
    assert caught.value.code is ErrorCode.SIZE_MISMATCH
    with pytest.raises(CorruptError) as caught:
        check_object(key, b"Content", size=7)
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    with pytest.raises(MalformedError):
        check_object(record_key(0), data, size=7)
