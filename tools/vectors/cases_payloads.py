"""SPEC 9: encodings, streams, payloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.content import NOT_FRESH, Tensor, Version
from vectors.faults import FRAME, PAYLOAD, UNKNOWN
from vectors.frames import compressed
from vectors.payloads import PLANES, PLANES_DELTA, RAW, SPARSE, planes, sparse, stream
from vectors.primitives import MAGIC, frame, varint
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import DTYPE_OF, change, noise, steps, two

__all__ = ["add"]


def add(suite: Suite) -> None:
    """All of them."""
    _planes(suite)
    _streams(suite)
    _chains(suite)


def _planes(suite: Suite) -> None:
    for width in (1, 2, 4, 8):
        mixed = noise(width, 5) * (96 // width) if width > 1 else bytes(96)
        content = noise(64 * width, width)[: 128 // width * width]
        suite.valid(
            f"planes/keyframe-{8 * width}-bit",
            f"a `planes` keyframe of width {width}, streams stored",
            steps(
                [(PLANES, planes(content, width), content)],
                dtype=DTYPE_OF[width],
                shape=[len(content) // width],
            ),
            "DF-ENC-05",
            "DF-ENC-07",
            flags=["planes"],
        )
        suite.valid(
            f"planes/constant-and-frame-{8 * width}-bit",
            f"`planes` of width {width} with constant streams, the last one a zstd frame",
            steps(
                [(PLANES, planes(mixed, width, forms=["constant"] * (width - 1) + ["frame"]), mixed)],
                dtype=DTYPE_OF[width],
                shape=[len(mixed) // width],
            ),
            "DF-ENC-09",
            flags=["planes", "streams"],
        )
        new = change(content, width, {0: 1, 1: -1, len(content) // width - 1: 2 ** (8 * width - 1)})
        suite.valid(
            f"planes/delta-{8 * width}-bit",
            f"a `planes-delta` of width {width} that wraps around: differences 1, -1 and 2^{8 * width - 1}",
            two(content, new, PLANES_DELTA, planes(new, width, base=content), width=width),
            "DF-ENC-02",
            flags=["planes"],
        )
    old = noise(96, 3)
    content = noise(96, 4)
    delta = planes(content, 2, base=old)
    base = "valid/planes/delta-16-bit"
    for bit in (2, 7):
        suite.invalid(
            f"planes/reserved-bit-{bit}",
            base,
            f"bit {bit} of the payload's first byte is set",
            two(old, content, PLANES_DELTA, bytes([delta[0] | 1 << bit]) + delta[1:], width=2),
            UNKNOWN,
            "DF-ENC-06",
        )
    suite.invalid(
        "planes/left-over",
        base,
        "one byte follows the last stream",
        two(old, content, PLANES_DELTA, delta + b"\0", width=2),
        PAYLOAD,
        "DF-ENC-05",
    )
    suite.invalid(
        "planes/cut",
        base,
        "the last stream lacks its last byte",
        two(old, content, PLANES_DELTA, delta[:-1], width=2),
        PAYLOAD,
        "DF-ENC-05",
    )
    odd = noise(5, 6)
    suite.invalid(
        "planes/width-does-not-divide",
        "valid/planes/keyframe-16-bit",
        "a block of 5 bytes with a payload of width 2",
        steps([(PLANES, planes(odd[:4], 2), odd)], dtype="U8", shape=[5]),
        PAYLOAD,
        "DF-ENC-07",
    )


def _streams(suite: Suite) -> None:
    content = bytes(range(200)) + bytes(56)

    def store(form: Callable[[bytes], bytes]) -> Store:
        return steps([(PLANES, b"\0" + form(content), content)], dtype="U8", shape=[256])

    def framed(**options: Any) -> Callable[[bytes], bytes]:
        def form(content: bytes) -> bytes:
            data = frame(content, **options)
            return varint(len(data)) + data

        return form

    base = suite.valid(
        "streams/frame", "a stream of one zstd frame", store(framed()), "DF-ENC-09", flags=["streams"]
    )
    accepted: list[tuple[str, str, Callable[[bytes], bytes]]] = [
        ("content-size-in-8-bytes", "a frame that states its content size in 8 bytes", framed(size_bytes=8)),
        ("content-size-in-4-bytes", "a frame that states its content size in 4 bytes", framed(size_bytes=4)),
        ("window", "a frame with a window of its own (1 KiB) instead of a single segment", framed(window=0)),
        ("window-128-mib", "a window of 128 MiB, the largest", framed(window=17 << 3)),
        ("dictionary-id-0", "a dictionary id of 0 is none", framed(dictionary=b"\0")),
        (
            "dictionary-id-0-in-4-bytes",
            "a dictionary id of 0 in four bytes is none",
            framed(dictionary=bytes(4)),
        ),
        (
            "several-blocks",
            "a frame of a raw block, an empty one and a run",
            framed(
                blocks=(200 << 3).to_bytes(3, "little")
                + content[:200]
                + bytes(3)
                + (56 << 3 | 3).to_bytes(3, "little")
                + b"\0"
            ),
        ),
    ]
    for name, title, form in accepted:
        suite.valid(f"streams/{name}", title, store(form), "DF-ENC-09", flags=["streams", "must-accept"])
    checked = frame(content, checksum=bytes.fromhex(_CHECKSUM))
    suite.valid(
        "streams/checksum",
        "a frame with a right checksum",
        store(lambda _: varint(len(checked)) + checked),
        "DF-ENC-09",
        flags=["streams", "must-accept"],
    )

    _compressed(suite)

    def fault(
        name: str,
        mutation: str,
        form: Callable[[bytes], bytes],
        *,
        error: tuple[str, str] = PAYLOAD,
        ids: tuple[str, ...] = ("DF-ENC-09",),
    ) -> None:
        suite.invalid(f"streams/{name}", base, mutation, store(form), error, *ids)

    def sized(data: bytes) -> Callable[[bytes], bytes]:
        return lambda _: varint(len(data)) + data

    good = frame(content)
    fault("no-content-size", "the frame states no content size", framed(size_bytes=0, window=0))
    fault("content-size-too-small", "the frame states and holds one byte less", sized(frame(content[:-1])))
    fault("content-size-too-large", "the frame states and holds one byte more", sized(frame(content + b"\0")))
    fault(
        "content-size-of-4-gib",
        "the frame states 2^32 - 1 bytes",
        framed(size=2**32 - 1, size_bytes=4),
        ids=("DF-ENC-09", "DF-LIM-02"),
    )
    fault("dictionary", "the frame names dictionary 7", framed(dictionary=b"\7"))
    fault("window-too-large", "the frame states a window of 144 MiB", framed(window=17 << 3 | 1))
    fault(
        "window-of-3-tib",
        "the frame states the largest window there is",
        framed(window=0xFF),
        ids=("DF-ENC-09", "DF-LIM-02"),
    )
    fault("reserved-bit", "the reserved bit of the frame's header is set", framed(reserved=8))
    fault(
        "skippable-frame",
        "a skippable frame before the frame",
        sized(bytes.fromhex("502a4d1801000000ff") + good),
    )
    fault("two-frames", "a second, empty frame follows", sized(good + frame(b"")))
    fault("byte-after-frame", "a byte follows the frame, inside the stream", sized(good + b"\0"))
    fault("no-magic", "the frame does not begin with the magic number", sized(b"\x29" + good[1:]))
    fault("header-cut", "the stream ends in the middle of the frame's header", sized(MAGIC + good[4:5]))
    fault("magic-cut", "the stream is three bytes of the magic number", sized(MAGIC[:3]))
    fault(
        "stream-longer-than-payload",
        "the stream's header says more bytes than follow",
        lambda _: varint(len(good) + 1) + good,
        ids=("DF-ENC-05",),
    )
    fault("frame-cut", "the frame lacks its last byte", sized(good[:-1]), error=FRAME)
    fault("no-blocks", "the frame ends after its header", sized(good[:7]), error=FRAME)
    fault(
        "block-type-reserved",
        "a block of the reserved type",
        framed(blocks=(1 << 3 | 7).to_bytes(3, "little") + b"\0"),
        error=FRAME,
    )
    fault(
        "blocks-too-short",
        "the blocks hold one byte less than stated",
        framed(blocks=(255 << 3 | 1).to_bytes(3, "little") + content[:255]),
        error=FRAME,
    )
    fault(
        "blocks-too-long",
        "the blocks hold one byte more than stated",
        framed(window=0, size_bytes=4, blocks=(257 << 3 | 1).to_bytes(3, "little") + content + b"\0"),
        error=FRAME,
    )
    wrong = bytes([checked[-4] ^ 1]) + checked[-3:]
    fault("checksum-wrong", "the frame's checksum is wrong", sized(checked[:-4] + wrong), error=FRAME)
    fault("constant-cut", "a constant stream without its byte", lambda _: b"\1", ids=("DF-ENC-05",))
    fault("stored-cut", "a stored stream lacks its last byte", lambda c: b"\0" + c[:-1], ids=("DF-ENC-05",))
    fault(
        "header-not-shortest",
        "the stream's header 0 is written in two bytes",
        lambda c: b"\x80\0" + c,
        ids=("DF-ENC-01",),
    )
    run = framed(size=256, blocks=((1 << 20) << 3 | 3).to_bytes(3, "little") + b"a")
    fault(
        "bomb",
        "a run of 1 MiB in a frame that states 256 bytes",
        run,
        error=FRAME,
        ids=("DF-ENC-09", "DF-LIM-02"),
    )
    doubled = stream(content) + b""
    fault(
        "absent-stream-with-header",
        "a second stream where the width has one",
        lambda c: doubled + b"\0",
        ids=("DF-ENC-05", "DF-ENC-08"),
    )


# XXH64 of the content of `_streams`, its low four bytes, little-endian (RFC 8878).
_CHECKSUM = "6e33f69c"


def _compressed(suite: Suite) -> None:
    """Blocks that an encoder compressed: literals by Huffman, sequences, repeats."""
    few = bytes(b"aabacadaeb"[byte % 10] for byte in noise(1500, 41))
    runs = b"".join(bytes([byte]) * (byte % 40) for byte in noise(200, 42))[:1500].ljust(1500, b"z")
    content = bytes(byte for pair in zip(few, runs, strict=True) for byte in pair)
    for name, title, level, checksum in (
        ("compressed-3", "streams compressed at level 3", 3, False),
        ("compressed-19", "streams compressed at level 19", 19, False),
        ("compressed-checksum", "streams compressed at level 1, with checksums", 1, True),
    ):

        def form(data: bytes, level: int = level, checksum: bool = checksum) -> bytes:
            made = compressed(data, level, checksum=checksum)
            return varint(len(made)) + made

        payload = planes(content, 2, forms=[form, form])
        store = steps([(PLANES, payload, content)], dtype="BF16", shape=[1500], block_bytes=4096)
        suite.valid(f"streams/{name}", title, store, "DF-ENC-09", flags=["streams"])
    new = change(content, 2, {number: number % 7 - 3 or 1 for number in range(0, 1500, 3)})
    payload_fields = sparse(content, new, 2, [0x6000, 0x1000], 1)

    def small(data: bytes) -> bytes:
        made = compressed(data, 9)
        return varint(len(made)) + made

    payload_fields.forms = dict.fromkeys(("quotients", "lows", "signs", "plane0", "plane1"), small)
    suite.valid(
        "sparse/compressed",
        "five hundred changes, every stream compressed",
        two(content, new, SPARSE, payload_fields, width=2, block_bytes=4096),
        "DF-ENC-09",
        flags=["sparse", "streams"],
    )


def _chains(suite: Suite) -> None:
    contents = [noise(48, 20)]
    for number in range(3):
        contents.append(change(contents[-1], 2, {number: 1, 5: -1, 9 + number: 300}))
    a, b, c, d = contents

    def chain(codes: dict[int, int] | None = None, payloads: dict[int, bytes] | None = None) -> Store:
        pieces = [
            (PLANES, planes(a, 2), a),
            (SPARSE, bytes(sparse(a, b, 2, [0x4000])), b),
            (PLANES_DELTA, planes(c, 2, base=b), c),
            (SPARSE, bytes(sparse(c, d, 4)), d),
        ]
        for number, code in (codes or {}).items():
            pieces[number] = (code, *pieces[number][1:])
        for number, payload in (payloads or {}).items():
            pieces[number] = (pieces[number][0], payload, pieces[number][2])
        return steps(pieces, dtype="BF16", shape=[4, 6])

    base = suite.valid(
        "chains/mixed",
        "planes, sparse, planes-delta, and sparse of another width: each on the result of those before",
        chain(),
        "DF-ENC-02",
        "DF-ENC-07",
        "DF-MAN-04",
        flags=["chain"],
    )
    for step in range(3):
        suite.valid(
            f"chains/mixed-step-{step}",
            f"the same store at step {step}",
            base,
            "DF-LOG-08",
            at={"branch": "main", "step": step},
            flags=["chain"],
        )
    suite.invalid(
        "chains/base-needed-first",
        base,
        "the first piece of the chain is `sparse`",
        steps([(SPARSE, bytes(sparse(a, b, 2)), a)], dtype="BF16", shape=[24]),
        PAYLOAD,
        "DF-ENC-02",
    )
    suite.invalid(
        "chains/raw-on-top",
        base,
        "a later piece of the chain is `raw`",
        chain({2: RAW}, {2: c}),
        PAYLOAD,
        "DF-ENC-02",
    )
    suite.invalid(
        "chains/planes-on-top",
        base,
        "a later piece of the chain is `planes`",
        chain({2: PLANES}, {2: planes(c, 2)}),
        PAYLOAD,
        "DF-ENC-02",
    )
    for code in (4, 255):
        suite.invalid(
            f"chains/encoding-{code}",
            base,
            f"a piece has the encoding {code}",
            chain({3: code}),
            UNKNOWN,
            "DF-ENC-03",
        )
    suite.invalid(
        "chains/wrong-content",
        base,
        "a piece in the middle changes another element: every payload is right, the block is not",
        chain(payloads={1: bytes(sparse(a, change(a, 2, {1: 1}), 2, [0x4000]))}),
        ("CORRUPT", "digest-mismatch"),
        "DF-DIG-01",
    )
    two_raw = steps([(RAW, a, a)], dtype="BF16", shape=[24])
    raw = suite.valid("chains/raw", "a raw keyframe", two_raw, "DF-ENC-04", flags=["raw"])
    suite.invalid(
        "chains/raw-short",
        raw,
        "a raw piece one byte shorter than its block",
        _raw(a[:-1], a),
        PAYLOAD,
        "DF-ENC-04",
    )
    suite.invalid(
        "chains/raw-long",
        raw,
        "a raw piece one byte longer than its block",
        _raw(a + b"\0", a),
        PAYLOAD,
        "DF-ENC-04",
    )
    suite.invalid(
        "chains/raw-wrong",
        raw,
        "a raw piece whose last bit is wrong",
        _raw(a[:-1] + bytes([a[-1] ^ 1]), a),
        ("CORRUPT", "digest-mismatch"),
        "DF-DIG-01",
    )

    long = Store()
    long.claim()
    version = Version()
    content = bytes(8)
    pack_ = long.pack()
    version.tensors["w"] = Tensor("U8", [8], content, [[pack_.put(content, RAW)]], [NOT_FRESH])
    for number in range(63):
        new = change(content, 1, {number % 8: 1})
        version.apply("w", 0, pack_.put(bytes(sparse(content, new, 1)), SPARSE), new)
        content = new
    long.commit(version)
    sixty_four = suite.valid(
        "chains/64-pieces",
        "a chain of 64 pieces, the most there may be",
        long,
        "DF-LIM-01",
        "DF-MAN-04",
        flags=["chain", "limit"],
    )
    over = Store()
    over.claim()
    pack_ = over.pack()
    version, content = Version(), bytes(8)
    version.tensors["w"] = Tensor("U8", [8], content, [[pack_.put(content, RAW)]], [NOT_FRESH])
    for number in range(64):
        new = change(content, 1, {number % 8: 1})
        version.apply("w", 0, pack_.put(bytes(sparse(content, new, 1)), SPARSE), new)
        content = new
    over.commit(version)
    suite.invalid(
        "chains/65-pieces",
        sixty_four,
        "a chain of 65 pieces",
        over,
        ("MALFORMED", "manifest-invalid"),
        "DF-MAN-04",
        "DF-LIM-01",
    )


def _raw(payload: bytes, content: bytes) -> Store:
    return steps([(RAW, payload, content)], dtype="BF16", shape=[24])
