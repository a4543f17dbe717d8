"""SPEC 9.3: sparse payloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.faults import PAYLOAD, UNKNOWN
from vectors.payloads import RAW, SPARSE, Sparse, pack, sparse
from vectors.primitives import varint
from vectors.suite import Suite
from vectors.weights import change, noise, steps, two

__all__ = ["add"]


def add(suite: Suite) -> None:
    """All of them."""
    _sparse(suite)
    _sparse_faults(suite)


_T2 = [0x3F00, 0x3000, 0x0100]


# BF16-like: signs, zeros, magnitudes in every stratum, and ties at every threshold.
_OLD2 = pack(
    [
        0x3F80,
        0xBF80,
        0x3F00,
        0xBF00,
        0x3EFF,
        0x3000,
        0xB000,
        0x2FFF,
        0x0100,
        0x8100,
        0x00FF,
        0x0000,
        0x8000,
        0x7FC1,
        0xFF80,
        0x3C00,
        0x0001,
        0x4000,
        0x3800,
        0x8001,
        0x2000,
        0x1000,
        0x0200,
        0x0050,
    ],
    2,
)


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
        "three thresholds, ties at each (they are in the outer stratum), k of 0, 1 and 2, both signs",
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
            f"width {width}, thresholds {most:#x} (the largest), {thresholds[1]:#x} and 1 (the smallest)",
            two(old, new, SPARSE, sparse(old, new, width, thresholds, {0: 0, 1: 2, 2: 1}), width=width),
            *ids,
            flags=["sparse"],
        )
        extreme = pack([0, 5, 2 ** (8 * width - 1), most], width)
        moved = change(extreme, width, {0: -(most + 1), 1: most, 2: -(most + 1), 3: -most})
        valid(
            f"sparse/extreme-differences-{8 * width}-bit",
            f"width {width}: the most negative difference, which has one form, and the largest one",
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
        error: tuple[str, str] = PAYLOAD,
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
            f"sparse/{name}", single, mutation, two(old, new, SPARSE, payload, width=2), PAYLOAD, *ids
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
            PAYLOAD,
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
        PAYLOAD,
        "DF-ENC-15",
    )
    lacking = sparse(old, new, 1)
    lacking.escapes = lacking.escapes[:4]
    suite.invalid(
        "sparse/escape-missing",
        escapes,
        "one escape for two quotients of 255",
        two(old, new, SPARSE, lacking, width=1, block_bytes=2048),
        PAYLOAD,
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
        PAYLOAD,
        "DF-ENC-07",
    )
