"""Varints and streams, byte by byte."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deltaformat.encodings.streams import Cursor, fitting_width, read_width, write_stream, write_varint
from deltaformat.errors import CorruptError, DeltaFormatError, ErrorCode, MalformedError, UnsupportedError

MAGIC = bytes.fromhex("28b52ffd")


def read(payload: bytes, expected: int) -> bytes:
    cursor = Cursor(payload)
    content = cursor.stream(expected)
    cursor.finish()
    return content.tobytes()


def framed(frame: bytes) -> bytes:
    return write_varint(len(frame)) + frame


def raw_block(content: bytes, *, last: bool = True) -> bytes:
    """RFC 8878, 3.1.1.2: a block that holds its content as it is."""
    return (len(content) << 3 | last).to_bytes(3, "little") + content


VARINTS = {
    0: "00",
    1: "01",
    127: "7f",
    128: "8001",
    300: "ac02",
    16383: "ff7f",
    16384: "808001",
    2**32 - 1: "ffffffff0f",
}


@pytest.mark.parametrize(("value", "encoded"), VARINTS.items())
def test_varints(value: int, encoded: str) -> None:
    """DF-ENC-01"""
    assert write_varint(value).hex() == encoded
    cursor = Cursor(bytes.fromhex(encoded))
    assert cursor.varint() == value
    cursor.finish()


@pytest.mark.parametrize(
    "encoded",
    [
        "8000",  # zero in two bytes
        "ff00",  # 127 in two bytes
        "80808000",
        "8080808010",  # 2^32
        "ffffffff1f",
        "ffffffff7f",
        "808080808000",  # six bytes
        "808080808001",
        "8080808080",
        "80",  # cut short
        "ffffffff",
        "",
    ],
)
def test_impossible_varints(encoded: str) -> None:
    """DF-ENC-01, DF-ENC-05"""
    with pytest.raises(MalformedError) as caught:
        Cursor(bytes.fromhex(encoded)).varint()
    assert caught.value.code is ErrorCode.PAYLOAD_INVALID


@given(st.integers(0, 2**32 - 1))
def test_varints_are_the_shortest(value: int) -> None:
    """DF-ENC-01"""
    encoded = write_varint(value)
    assert len(encoded) == max(1, -(-value.bit_length() // 7))
    assert Cursor(encoded).varint() == value


def test_stream_forms() -> None:
    """SPEC 9.1, in bytes written by hand."""
    assert read(bytes.fromhex("00 010203"), 3) == bytes([1, 2, 3])
    assert read(bytes.fromhex("01 07"), 5) == bytes([7] * 5)
    # Magic, single segment with a content size of one byte, one raw block that is the last.
    assert read(bytes.fromhex("0c 28b52ffd 20 03 190000 010203"), 3) == bytes([1, 2, 3])
    # The same with a block of one byte that repeats.
    assert read(bytes.fromhex("0a 28b52ffd 20 05 2b0000 07"), 5) == bytes([7] * 5)
    # A window descriptor, no single segment; the content size takes two bytes and 256 are added to it.
    frame = MAGIC + bytes.fromhex("40 38 2c00") + raw_block(bytes(300))
    assert read(framed(frame), 300) == bytes(300)
    # A dictionary id that is zero is none; a checksum is checked by the library.
    frame = MAGIC + bytes.fromhex("21 00 03") + raw_block(b"abc")
    assert read(framed(frame), 3) == b"abc"
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(b"abc")
    assert read(framed(frame), 3) == b"abc"


def test_empty_stream_has_no_header() -> None:
    """DF-ENC-08"""
    assert write_stream(b"") == b""
    assert read(b"", 0) == b""


def test_smallest_form_is_written() -> None:
    assert write_stream(b"\x07") == b"\x01\x07"
    assert write_stream(bytes([9] * 1000)) == b"\x01\x09"
    assert write_stream(bytes([1, 2, 3])) == b"\x00\x01\x02\x03"
    text = bytes([0] * 50 + [1] * 50)
    written = write_stream(text)
    assert len(written) < len(text)
    assert written[1:5] == MAGIC
    noise = np.random.default_rng(0).bytes(100_000)
    assert write_stream(noise) == b"\x00" + noise
    half = noise + bytes(100_000)
    assert len(write_stream(half)) < 101_000


def test_no_frame_of_a_tiny_stream_is_smaller() -> None:
    """Fewer than 18 bytes are stored without a try: not even repeats make a frame pay; 18 may."""
    compressor = zstandard.ZstdCompressor(level=19)
    for size in range(2, 18):
        for period in range(2, size + 1):
            content = (bytes(range(period)) * size)[:size]
            for tiny in (content, content[::-1], bytes(size - 1) + b"\1", b"\1" + bytes(size - 1)):
                assert len(framed(compressor.compress(tiny))) > size
                assert write_stream(tiny) == b"\0" + tiny
    assert write_stream(b"\0\1" * 9)[1:5] == MAGIC


@given(
    st.binary(min_size=1, max_size=400)
    | st.builds(lambda b, n: b * n, st.binary(min_size=1), st.integers(1, 99))
)
def test_streams_round_trip(content: bytes) -> None:
    written = write_stream(content)
    assert len(written) <= 1 + len(content)
    assert read(written, len(content)) == content


BAD_FRAMES = {
    "no frame": b"\x00\x00",
    "an empty frame's half": MAGIC[:3],
    "magic alone": MAGIC,
    "a legacy frame": bytes.fromhex("27b52ffd 20 03 190000 010203"),
    "a magicless frame": bytes.fromhex("20 03 190000 010203"),
    "a skippable frame": bytes.fromhex("502a4d18 03000000 010203"),
    "a skippable frame before": bytes.fromhex("502a4d18 00000000 28b52ffd 20 03 190000 010203"),
    "a skippable frame after": bytes.fromhex("28b52ffd 20 03 190000 010203 502a4d18 00000000"),
    "a second frame after": bytes.fromhex("28b52ffd 20 03 190000 010203 28b52ffd 20 00 010000"),
    "a byte after": bytes.fromhex("28b52ffd 20 03 190000 010203 00"),
    "an unstated size": bytes.fromhex("28b52ffd 00 38 190000 010203"),
    "a smaller size": bytes.fromhex("28b52ffd 20 02 110000 0102"),
    "a larger size": bytes.fromhex("28b52ffd 20 04 210000 01020304"),
    "a size of 2^64 - 2": bytes.fromhex("28b52ffd e0 feffffffffffffff 190000 010203"),
    "a dictionary": bytes.fromhex("28b52ffd 21 05 03 190000 010203"),
    "a window of 144 MiB": bytes.fromhex("28b52ffd 80 89 03000000 190000 010203"),
    "a window beyond the library's": bytes.fromhex("28b52ffd 80 f8 03000000 190000 010203"),
    "a reserved bit": bytes.fromhex("28b52ffd 28 03 190000 010203"),
    "a header cut short": bytes.fromhex("28b52ffd a0 0300"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_frames_that_are_malformed(name: str) -> None:
    """DF-ENC-09"""
    with pytest.raises(MalformedError) as caught:
        read(framed(BAD_FRAMES[name]), 3)
    assert caught.value.code is ErrorCode.PAYLOAD_INVALID


CORRUPT_FRAMES = {
    "cut in a block": bytes.fromhex("28b52ffd 20 03 190000 0102"),
    "cut before a block": bytes.fromhex("28b52ffd 20 03"),
    "no last block": bytes.fromhex("28b52ffd 20 03 180000 010203"),
    "a reserved block type": bytes.fromhex("28b52ffd 20 03 1f0000 010203"),
    "less than stated": bytes.fromhex("28b52ffd 20 03 110000 0102"),
    "more than stated": bytes.fromhex("28b52ffd 20 03 210000 01020304"),
    "a wrong checksum": bytes.fromhex("28b52ffd 24 03 190000 010203 00000000"),
}


@pytest.mark.parametrize("name", CORRUPT_FRAMES)
def test_frames_that_do_not_decompress(name: str) -> None:
    """DF-ENC-09"""
    with pytest.raises(CorruptError) as caught:
        read(framed(CORRUPT_FRAMES[name]), 3)
    assert caught.value.code is ErrorCode.FRAME_CORRUPT
    # The decompressor is fit for use afterwards.
    assert read(bytes.fromhex("0c 28b52ffd 20 03 190000 010203"), 3) == bytes([1, 2, 3])


def test_window_limit() -> None:
    """DF-ENC-09: exactly 128 MiB is allowed."""
    frame = bytes.fromhex("28b52ffd 80 88 03000000 190000 010203")
    assert read(framed(frame), 3) == bytes([1, 2, 3])


def test_bombs_take_no_memory() -> None:
    """DF-ENC-09: a frame is judged by its header before memory is taken, and stops where its size says."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    liar = bytearray(bomb)
    assert liar[4] >> 6 == 2  # the content size takes the four bytes before the first block
    start = 5 if liar[4] & 0x20 else 6
    liar[start : start + 4] = (1000).to_bytes(4, "little")
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            read(framed(bomb), 1000)
        with pytest.raises(CorruptError):
            read(framed(bytes(liar)), 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("payload", ["00 0102", "01", "0c 28b52ffd 20 03 190000 0102", "04 28b5", "80"])
def test_streams_cut_short(payload: str) -> None:
    """DF-ENC-05"""
    with pytest.raises(MalformedError, match="early"):
        read(bytes.fromhex(payload), 3)


def test_bytes_left_over() -> None:
    """DF-ENC-05"""
    with pytest.raises(MalformedError, match="1 bytes are left over"):
        read(bytes.fromhex("00 01020304"), 3)


def test_widths() -> None:
    """DF-ENC-06, DF-ENC-07"""
    assert [read_width(header, 2, 24) for header in range(4)] == [1, 2, 4, 8]
    assert read_width(0b111101, 6, 24) == 2
    for header, used in ((4, 2), (64, 6), (128, 6), (255, 2)):
        with pytest.raises(UnsupportedError) as caught:
            read_width(header, used, 24)
        assert caught.value.code is ErrorCode.ENCODING_UNKNOWN
    with pytest.raises(MalformedError):
        read_width(3, 2, 20)
    assert [fitting_width(size, 4) for size in (8, 9, 10, 12)] == [4, 1, 1, 4]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_payloads_come_in_any_buffer(kind: type) -> None:
    cursor = Cursor(kind(bytes.fromhex("00 010203 05")))
    assert cursor.stream(3).tolist() == [1, 2, 3]
    assert cursor.byte() == 5
    cursor.finish()
    with pytest.raises(MalformedError):
        Cursor(kind(b"")).byte()


def test_threads_have_their_own_compressors() -> None:
    contents = [np.random.default_rng(seed).integers(0, 4, 50_000, np.uint8).tobytes() for seed in range(4)]
    failures: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            try:
                intact = read(write_stream(contents[index]), 50_000) == contents[index]
            except DeltaFormatError:
                intact = False
            if not intact:
                failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
