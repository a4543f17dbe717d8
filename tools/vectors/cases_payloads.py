"""SPEC 9: encodings, streams, payloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.payloads import PLANES, PLANES_DELTA, RAW, SPARSE, Sparse, pack, planes, sparse, stream
from vectors.primitives import MAGIC, frame, varint
from vectors.store import NOT_FRESH, Store, Tensor, Version
from vectors.suite import Suite
from vectors.weights import DTYPE_OF, change, noise, steps, two

__all__ = ["add"]

MALFORMED = ("MALFORMED", "payload-invalid")
UNKNOWN = ("UNSUPPORTED", "encoding-unknown")
FRAME = ("CORRUPT", "frame-corrupt")


def add(suite: Suite) -> None:
    """All of them."""
    _planes(suite)
    _sparse(suite)
    _sparse_faults(suite)
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
        MALFORMED,
        "DF-ENC-05",
    )
    suite.invalid(
        "planes/cut",
        base,
        "the last stream lacks its last byte",
        two(old, content, PLANES_DELTA, delta[:-1], width=2),
        MALFORMED,
        "DF-ENC-05",
    )
    odd = noise(5, 6)
    suite.invalid(
        "planes/width-does-not-divide",
        "valid/planes/keyframe-16-bit",
        "a block of 5 bytes with a payload of width 2",
        steps([(PLANES, planes(odd[:4], 2), odd)], dtype="U8", shape=[5]),
        MALFORMED,
        "DF-ENC-07",
    )


_T2 = [0x3F00, 0x3000, 0x0100]
# BF16-like: signs, zeros, magnitudes in every stratum, and ties at every threshold.
_OLD2 = pack(
    [
        0x3F80, 0xBF80, 0x3F00, 0xBF00, 0x3EFF, 0x3000, 0xB000, 0x2FFF, 0x0100, 0x8100, 0x00FF, 0x0000,
        0x8000, 0x7FC1, 0xFF80, 0x3C00, 0x0001, 0x4000, 0x3800, 0x8001, 0x2000, 0x1000, 0x0200, 0x0050,
    ],
    2,
)  # fmt: skip
_CHANGES2 = {0: 1, 2: -1, 3: 2, 4: 300, 5: -2, 7: 1, 8: 1, 10: -1, 11: 5, 12: -7, 14: 1, 19: 3, 23: -3}
_NEW2 = change(_OLD2, 2, _CHANGES2)


def _strata(mutate: Callable[[Sparse], Any] | None = None) -> Sparse:
    payload = sparse(_OLD2, _NEW2, 2, _T2, {0: 1, 1: 0, 2: 1, 3: 2})
    if mutate is not None:
        changed = mutate(payload)
        return payload if changed is None else changed
    return payload


def _sparse(suite: Suite) -> None:
    valid = suite.valid
    ids = ("DF-ENC-05", "DF-ENC-10", "DF-ENC-15", "DF-ENC-17")
    valid(
        "sparse/strata",
        "three thresholds, ties at each (a magnitude equal to a threshold is in the outer stratum), k of 0, 1 and 2, both signs",
        two(_OLD2, _NEW2, SPARSE, _strata(), width=2),
        *ids,
        flags=["sparse"],
    )
    for width in (1, 2, 4, 8):
        old = noise(240, 10 + width)
        n = 240 // width
        new = change(old, width, {0: 1, 3: -1, 7: 5, n // 2: -300 if width > 1 else -3, n - 1: 1})
        valid(
            f"sparse/plain-{8 * width}-bit",
            f"width {width}, no thresholds: ranks are positions; the first and the last element change",
            two(old, new, SPARSE, sparse(old, new, width), width=width),
            *ids,
            flags=["sparse"],
        )
        most = 2 ** (8 * width - 1) - 1
        thresholds = [most, most // 3, 1]
        valid(
            f"sparse/strata-{8 * width}-bit",
            f"width {width}, thresholds {thresholds[0]:#x} (the largest there is), {thresholds[1]:#x} and 1 (the smallest)",
            two(old, new, SPARSE, sparse(old, new, width, thresholds, {0: 0, 1: 2, 2: 1}), width=width),
            *ids,
            flags=["sparse"],
        )
        extreme = pack([0, 5, 2 ** (8 * width - 1), most], width)
        moved = change(extreme, width, {0: -(most + 1), 1: most, 2: -(most + 1), 3: -most})
        valid(
            f"sparse/extreme-differences-{8 * width}-bit",
            f"width {width}: the most negative difference has one form, negative; and the largest positive one",
            two(extreme, moved, SPARSE, sparse(extreme, moved, width), width=width),
            "DF-ENC-16",
            flags=["sparse"],
        )
    fifteen = [0x7000 - 0x700 * i for i in range(15)]
    valid(
        "sparse/fifteen-thresholds",
        "fifteen thresholds, some strata without changes, some without a position",
        two(_OLD2, _NEW2, SPARSE, sparse(_OLD2, _NEW2, 2, fifteen, 1), width=2),
        *ids,
        flags=["sparse"],
    )
    empty = [0x7FFF, 0x7FFE, 0x7FFD, 0x0001]
    valid(
        "sparse/empty-strata",
        "strata without a position (between adjacent thresholds), and without a change",
        two(
            _OLD2,
            change(_OLD2, 2, {11: 1}),
            SPARSE,
            sparse(_OLD2, change(_OLD2, 2, {11: 1}), 2, empty),
            width=2,
        ),
        *ids,
        flags=["sparse"],
    )
    every = change(_OLD2, 2, dict.fromkeys(range(24), 1))
    valid(
        "sparse/every-element",
        "all elements change: c = n",
        two(_OLD2, every, SPARSE, sparse(_OLD2, every, 2, [0x3000]), width=2),
        "DF-ENC-11",
        flags=["sparse", "limit"],
    )
    high_k = change(_OLD2, 2, {5: 1, 20: -1})
    valid(
        "sparse/k-26",
        "k = 26, the largest: low bits of 26 bits each, quotients 0",
        two(_OLD2, high_k, SPARSE, sparse(_OLD2, high_k, 2, ks=26), width=2),
        "DF-ENC-12",
        flags=["sparse", "limit"],
    )
    long_old = noise(2048, 7)
    for name, ranks, title in (
        ("escape-255", {255: 1}, "a gap of 255 at k = 0 is an escape of 255, the smallest there is"),
        ("escape-254", {254: 1}, "a gap of 254 at k = 0 is a quotient byte of 254: no escape"),
        ("escapes", {3: 1, 700: -1, 702: 2, 1999: 9}, "two escapes among ordinary quotients"),
    ):
        new = change(long_old, 1, ranks)
        valid(
            f"sparse/{name}",
            title,
            two(long_old, new, SPARSE, sparse(long_old, new, 1), width=1, block_bytes=2048),
            "DF-ENC-13",
            flags=["sparse"],
        )
    new = change(long_old, 1, {2047: 1})
    valid(
        "sparse/escape-with-k",
        "a quotient of 255 at k = 3: the escape counts eights, low bits follow",
        two(long_old, new, SPARSE, sparse(long_old, new, 1, ks=3), width=1, block_bytes=2048),
        "DF-ENC-13",
        flags=["sparse"],
    )
    forms = _strata()
    forms.forms = dict.fromkeys(("quotients", "lows", "signs", "plane0", "plane1"), "frame")
    valid(
        "sparse/streams-in-frames",
        "every stream is a zstd frame",
        two(_OLD2, _NEW2, SPARSE, forms, width=2),
        "DF-ENC-09",
        flags=["sparse", "streams"],
    )
    ones = change(_OLD2, 2, dict.fromkeys(range(0, 24, 2), 1))
    constant = sparse(_OLD2, ones, 2, ks=0)
    constant.quotients = bytes(constant.quotients)
    constant.forms = {"signs": "constant", "plane0": "constant", "plane1": "constant"}
    constant.signs = bytes(2)
    valid(
        "sparse/constant-streams",
        "streams of equal bytes are constant streams, also of one byte",
        two(_OLD2, ones, SPARSE, constant, width=2),
        "DF-ENC-08",
        flags=["sparse", "streams"],
    )
    same_sign = pack([0x8000, 0x0000, 0x80FF, 0x00FF], 2)
    moved = change(same_sign, 2, {0: 1, 1: 1, 2: 1, 3: 1})
    valid(
        "sparse/sign-is-not-magnitude",
        "magnitudes leave out the highest bit: 0x8000 and 0 are in the same stratum",
        two(same_sign, moved, SPARSE, sparse(same_sign, moved, 2, [0x0080]), width=2),
        *ids,
        flags=["sparse"],
    )


def _sparse_faults(suite: Suite) -> None:
    base = "valid/sparse/strata"

    def fault(
        name: str,
        mutation: str,
        mutate: Callable[[Sparse], Any],
        *ids: str,
        error: tuple[str, str] = MALFORMED,
    ) -> None:
        payload = _strata(mutate)
        suite.invalid(
            f"sparse/{name}", base, mutation, two(_OLD2, _NEW2, SPARSE, payload, width=2), error, *ids
        )

    def put(**values: Any) -> Callable[[Sparse], None]:
        def mutate(payload: Sparse) -> None:
            for name, value in values.items():
                setattr(payload, name, value)

        return mutate

    plain = _strata()
    for bit in (6, 7):
        fault(
            f"reserved-bit-{bit}",
            f"bit {bit} of the first byte is set",
            put(header=plain.header | 1 << bit),
            "DF-ENC-06",
            error=UNKNOWN,
        )
    fault(
        "thresholds-rise",
        "the second and the third threshold change places",
        put(thresholds=[0x3F00, 0x0100, 0x3000]),
        "DF-ENC-10",
    )
    fault(
        "thresholds-equal", "two thresholds are equal", put(thresholds=[0x3F00, 0x0100, 0x0100]), "DF-ENC-10"
    )
    fault(
        "threshold-above-m",
        "the first threshold is M + 1",
        put(thresholds=[0x8000, 0x3000, 0x0100]),
        "DF-ENC-10",
    )
    fault("threshold-zero", "the last threshold is 0", put(thresholds=[0x3F00, 0x3000, 0]), "DF-ENC-10")
    fault("k-27", "a k of 27", put(ks=[27, *plain.ks[1:]]), "DF-ENC-12")
    fault(
        "padding-of-signs",
        "a padding bit of the signs is set",
        put(signs=plain.signs[:-1] + bytes([plain.signs[-1] | 0x80])),
        "DF-ENC-14",
    )
    fault(
        "padding-of-low-bits",
        "a padding bit of the last stratum's low bits is set",
        put(lows=plain.lows[:-1] + bytes([plain.lows[-1] | 0x80])),
        "DF-ENC-14",
    )
    fault(
        "rank-beyond-stratum",
        "the first gap leads beyond the population of stratum 0",
        put(quotients=b"\x64" + plain.quotients[1:]),
        "DF-ENC-15",
    )
    last = plain.quotients[:-1] + bytes([plain.quotients[-1] + 2])
    fault(
        "rank-beyond-last-stratum",
        "the last gap leads beyond the population of the last stratum",
        put(quotients=last),
        "DF-ENC-15",
    )
    fault("left-over", "one byte follows the last stream", put(tail=b"\0"), "DF-ENC-05")
    fault("cut", "the last byte is missing", lambda p: bytes(p)[:-1], "DF-ENC-05")
    fault("only-a-header", "nothing follows the first byte", lambda p: bytes(p)[:1], "DF-ENC-05")
    counts = b"".join(map(varint, plain.counts))
    fault(
        "varint-not-shortest",
        "c_0 is written with one byte too many",
        put(count_bytes=bytes([counts[0] | 0x80, 0]) + counts[1:]),
        "DF-ENC-01",
    )
    fault(
        "varint-too-long",
        "c_0 is written in six bytes",
        put(count_bytes=bytes([counts[0] | 0x80]) + b"\x80\x80\x80\x80\0" + counts[1:]),
        "DF-ENC-01",
    )
    fault(
        "varint-beyond-32-bits",
        "c_0 is 2^32",
        put(count_bytes=b"\x80\x80\x80\x80\x10" + counts[1:]),
        "DF-ENC-01",
    )
    fault(
        "varint-cut",
        "the payload ends in the middle of c_0",
        lambda p: bytes(p)[:7] + b"\x80",
        "DF-ENC-01",
        "DF-ENC-05",
    )

    one = change(_OLD2, 2, {1: 1})
    single = "valid/sparse/plain-16-bit"

    def other(
        name: str, mutation: str, payload: Sparse, *ids: str, new: bytes = one, old: bytes = _OLD2
    ) -> None:
        suite.invalid(
            f"sparse/{name}", single, mutation, two(old, new, SPARSE, payload, width=2), MALFORMED, *ids
        )

    nothing = Sparse(1, 2, [], [0], [], b"", b"", b"", b"", [b"", b""])
    other("no-change", "c = 0: a payload that changes nothing", nothing, "DF-ENC-11", new=_OLD2)
    many = sparse(_OLD2, change(_OLD2, 2, dict.fromkeys(range(24), 1)), 2)
    many.counts, many.quotients = [25], many.quotients + b"\0"
    many.signs, many.magnitudes = bytes(4), [plane + b"\0" for plane in many.magnitudes]
    other("more-changes-than-elements", "c = n + 1", many, "DF-ENC-11")
    huge = sparse(_OLD2, one, 2)
    huge.counts = [2**32 - 1]
    other(
        "four-billion-changes",
        "c = 2^32 - 1 in a payload of a few bytes: refused before memory is taken for it",
        huge,
        "DF-ENC-11",
        "DF-LIM-02",
    )
    big = sparse(_OLD2, one, 2)
    big.magnitudes, big.signs = [b"\xff", b"\x7f"], b"\0"
    other(
        "magnitude-m-positive",
        "|d| - 1 = M with sign 0: the most negative difference in its second form",
        big,
        "DF-ENC-16",
    )
    big = sparse(_OLD2, one, 2)
    big.magnitudes, big.signs = [b"\0", b"\x80"], b"\1"
    other("magnitude-above-m", "|d| - 1 = M + 1", big, "DF-ENC-16")

    escapes = "valid/sparse/escapes"
    old = noise(2048, 7)
    new = change(old, 1, {3: 1, 700: -1, 702: 2, 1999: 9})
    for name, mutation, value in (
        ("escape-below-255", "an escape of 254", (254).to_bytes(4, "little")),
        ("escape-of-0", "an escape of 0", bytes(4)),
        ("escape-of-four-billion", "an escape of 2^32 - 1", b"\xff" * 4),
    ):
        payload = sparse(old, new, 1)
        payload.escapes = value + payload.escapes[4:]
        suite.invalid(
            f"sparse/{name}",
            escapes,
            mutation,
            two(old, new, SPARSE, payload, width=1, block_bytes=2048),
            MALFORMED,
            "DF-ENC-13" if "four" not in name else "DF-ENC-15",
        )
    wide = sparse(old, new, 1)
    wide.escapes = (2**32 - 1).to_bytes(4, "little") + wide.escapes[4:]
    wide.ks, wide.lows = [26], bytes(13)
    suite.invalid(
        "sparse/gap-beyond-64-bits",
        escapes,
        "escapes of 2^32 - 1 at k = 26: sums of gaps do not wrap around",
        two(old, new, SPARSE, wide, width=1, block_bytes=2048),
        MALFORMED,
        "DF-ENC-15",
    )
    lacking = sparse(old, new, 1)
    lacking.escapes = lacking.escapes[:4]
    suite.invalid(
        "sparse/escape-missing",
        escapes,
        "one escape for two quotients of 255",
        two(old, new, SPARSE, lacking, width=1, block_bytes=2048),
        MALFORMED,
        "DF-ENC-05",
    )
    odd, odd_new = noise(5, 6), change(noise(5, 6), 1, {0: 1})
    suite.invalid(
        "sparse/width-does-not-divide",
        single,
        "a block of 5 bytes with a payload of width 2",
        steps(
            [(RAW, odd, odd), (SPARSE, bytes(sparse(odd[:4], odd_new[:4], 2)), odd_new)],
            dtype="U8",
            shape=[5],
        ),
        MALFORMED,
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

    def fault(
        name: str,
        mutation: str,
        form: Callable[[bytes], bytes],
        *,
        error: tuple[str, str] = MALFORMED,
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
        MALFORMED,
        "DF-ENC-02",
    )
    suite.invalid(
        "chains/raw-on-top",
        base,
        "a later piece of the chain is `raw`",
        chain({2: RAW}, {2: c}),
        MALFORMED,
        "DF-ENC-02",
    )
    suite.invalid(
        "chains/planes-on-top",
        base,
        "a later piece of the chain is `planes`",
        chain({2: PLANES}, {2: planes(c, 2)}),
        MALFORMED,
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
        MALFORMED,
        "DF-ENC-04",
    )
    suite.invalid(
        "chains/raw-long",
        raw,
        "a raw piece one byte longer than its block",
        _raw(a + b"\0", a),
        MALFORMED,
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
