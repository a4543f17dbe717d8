"""SPEC 7 and 8.2: names, digests, roots."""

from __future__ import annotations

from typing import Any

from vectors.faults import CORRUPT
from vectors.payloads import SPARSE, sparse
from vectors.store import Store
from vectors.suite import Suite
from vectors.weights import change, noise

__all__ = ["add"]


def add(suite: Suite) -> None:
    """All of them."""
    _names(suite)
    _digests(suite)


def _names(suite: Suite) -> None:
    names = [
        "",
        "a",
        "A",
        "a/b",
        "../../etc/passwd",
        "/absolute",
        "C:\\x",
        "con",
        "a\0b",
        "line\nbreak",
        "\u00e9",
        "e\u0301",
        "__metadata__",
        "deltaformat.payload",
        "\U0001f600",
        "\uffff",
        "\uf8ff",
        "\u2028",
        "\x7f",
        " ",
        "x" * 4000,
        "\ufeffbom",
        "\ufffe",
        "\ufdd0",
        "\U0010ffff",
        "constructor",
        "__proto__",
    ]
    store = Store()
    store.claim()
    store.commit(store.keyframe({name: ("U8", [2], noise(2, number)) for number, name in enumerate(names)}))
    base = suite.valid(
        "names/any",
        "names are data: empty, paths, controls, two forms of one letter, 4,000 characters, special names",
        store,
        "DF-BLK-03",
        "DF-KEY-03",
        "DF-PCK-03",
        flags=["names", "must-accept"],
    )
    order = Store()
    order.claim()
    tricky = ["\U0001f600", "\uffff", "\ue000", "z", "\U00010000", "\ud7ff", "zz", "Z"]
    order.commit(order.keyframe({name: ("U8", [1], noise(1, number)) for number, name in enumerate(tricky)}))
    suite.valid(
        "names/utf-16-order",
        "names whose order as UTF-8 bytes differs from that of UTF-16 units: the root needs the former",
        order,
        "DF-DIG-03",
        "DF-BLK-03",
        flags=["names"],
    )
    longest = Store()
    longest.claim()
    longest.commit(longest.keyframe({"\u00e9" + "x" * 65533: ("U8", [1], b"\1")}))
    suite.valid(
        "names/longest", "a name of 65,535 bytes, the longest", longest, "DF-BLK-03", flags=["names", "limit"]
    )

    def renamed(name: str, mutation: str, text: bytes, error: tuple[str, str], *ids: str) -> None:
        made = Store(
            hooks={"columns:1": lambda cols: [cols[0].with_rows([text, *cols[0].rows[1:]]), *cols[1:]]}
        )
        made.claim()
        made.commit(made.keyframe({"w": ("U8", [2], b"\1\2"), "z": ("U8", [1], b"\3")}))
        suite.invalid(f"names/{name}", base, mutation, made, error, *ids)

    manifest = ("MALFORMED", "manifest-invalid")
    renamed("too-long", "a name of 65,536 bytes", b"x" * 65536, ("MALFORMED", "value-invalid"), "DF-BLK-03")
    renamed("not-utf-8", "a name that is not UTF-8", b"w\xff", manifest, "DF-BLK-03")
    renamed("surrogate", "a name with an encoded surrogate", b"\xed\xa0\x80", manifest, "DF-BLK-03")
    renamed("overlong", "a name with an overlong form of `/`", b"\xc0\xaf", manifest, "DF-BLK-03")
    renamed("twice", "a name that occurs twice", b"z", ("INCONSISTENT", "parts-disagree"), "DF-MAN-05")


def _digests(suite: Suite) -> None:
    def blake(hooks: Any = None, content: bytes | None = None) -> Store:
        store = Store(digest="blake3-256", hooks=hooks)
        store.claim()
        old = noise(600, 1)
        version = store.keyframe({"w": ("BF16", [300], old), "e": ("F32", [0], b"")})
        store.commit(version)
        version = version.next()
        new = change(old[256:512], 2, {5: 1})
        version.apply("w", 1, store.pack().put(bytes(sparse(old[256:512], new, 2)), SPARSE), content or new)
        store.commit(version)
        return store

    base = suite.valid(
        "digests/blake3-256",
        "a store of blake3-256 digests",
        blake(),
        "DF-DIG-01",
        "DF-DIG-03",
        profile="reader-full",
        flags=["blake3"],
    )
    suite.invalid(
        "digests/blake3-wrong",
        base,
        "a block does not have its blake3-256 digest",
        blake(content=noise(256, 2)),
        CORRUPT,
        "DF-DIG-01",
    )
    suite.invalid(
        "digests/unknown",
        base,
        "the descriptor names the digest `md5`",
        blake({"descriptor": lambda m: m | {"digest": "md5"}}),
        ("UNSUPPORTED", "digest-unknown"),
        "DF-DSC-02",
    )

    def rooted(change_: Any) -> Store:
        store = Store(hooks={"record:1": lambda m: m | {"root": change_(m["root"])}})
        store.claim()
        store.commit(store.keyframe({"w": ("U8", [300], noise(300, 1))}))
        return store

    whole = suite.valid(
        "digests/xxh3-128", "a store of xxh3-128 digests", rooted(lambda root: root), "DF-DIG-03", "DF-DIG-04"
    )
    for name, mutation, change_ in (
        ("root-wrong", "a digit of the root is another", lambda r: r[:-1] + ("0" if r[-1] != "0" else "1")),
        ("root-of-other-digest", "the root says blake3-256", lambda r: r.replace("xxh3-128", "blake3-256")),
        (
            "root-of-other-block-size",
            "the root says blocks of 512 bytes",
            lambda r: r.replace(":256:", ":512:"),
        ),
    ):
        suite.invalid(
            f"digests/{name}",
            whole,
            mutation,
            rooted(change_),
            ("INCONSISTENT", "root-mismatch"),
            "DF-DIG-04",
        )
    suite.invalid(
        "digests/root-in-capitals",
        whole,
        "the root's digits are capitals",
        rooted(lambda r: r[:17] + r[17:].upper()),
        ("MALFORMED", "value-invalid"),
        "DF-DIG-04",
        "DF-JSN-01",
    )
    wrong = Store()
    wrong.claim()
    version = wrong.keyframe({"w": ("U8", [300], noise(300, 1))})
    wrong.commit(version)
    (pack_key,) = [key for key in wrong.objects if key.startswith("packs/")]
    flipped = bytearray(wrong.objects[pack_key])
    flipped[-1] ^= 1
    wrong.objects[pack_key] = bytes(flipped)
    suite.invalid(
        "digests/bit-flip-in-pack", whole, "one bit of a pack is another", wrong, CORRUPT, "DF-DIG-01"
    )
    cut = Store()
    cut.claim()
    cut.commit(cut.keyframe({"w": ("U8", [300], noise(300, 1))}))
    cut.objects[pack_key] = cut.objects[pack_key][:-1]
    suite.invalid(
        "digests/pack-cut",
        whole,
        "a pack lacks its last byte",
        cut,
        ("CORRUPT", "size-mismatch"),
        "DF-KEY-02",
        "DF-PCK-04",
    )
    gone = Store()
    gone.claim()
    gone.commit(gone.keyframe({"w": ("U8", [300], noise(300, 1))}))
    del gone.objects[pack_key]
    suite.invalid(
        "digests/pack-missing",
        whole,
        "the pack is not there",
        gone,
        ("MISSING", "object-missing"),
        "DF-RD-03",
    )
