"""SPEC 12.5 and 14: scripts for writers. What readers must find follows from the scripts' bytes."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from vectors.content import NOT_FRESH, Tensor, Version
from vectors.payloads import RAW, pack
from vectors.primitives import DTYPES
from vectors.store import Store
from vectors.suite import Case, Suite
from vectors.weights import change, noise

__all__ = ["add"]

Content = Mapping[str, tuple[str, Sequence[int], bytes]]


class Script:
    """A script under construction, with a store of the same content beside it to compute what comes."""

    def __init__(self, digest: str = "xxh3-128", block_bytes: int = 256) -> None:
        self.books = Store(digest=digest, block_bytes=block_bytes)
        self.steps: list[dict[str, Any]] = []
        self.seqs: list[int | None] = []
        self.judge: list[dict[str, Any]] = []
        self._claims: dict[str, str] = {}
        self._add(None, do="create", digest=digest, block_bytes=block_bytes)

    def _add(self, seq: int | None, **step: Any) -> None:
        self.steps.append(step)
        self.seqs.append(seq)

    def refuse(self, expect: str, **step: Any) -> None:
        """A step that must be refused."""
        self._add(None, **step, expect=expect)

    def claim(self, branch: str = "main", writer: str = "w", resume_from: int | None = None) -> None:
        """A writer takes a branch."""
        target = None
        if resume_from is not None:
            target = self.books.find({"branch": branch, "step": resume_from}).seq
        self._claims[writer] = branch
        seq = self.books.claim(branch, target)
        self._add(seq, do="claim", writer=writer, branch=branch, resume_from=resume_from)

    def commit_step(
        self,
        step: int,
        tensors: Content,
        files: Mapping[str, bytes] | None = None,
        writer: str = "w",
        **members: Any,
    ) -> dict[str, Any]:
        """The step of a script, for one that is refused or has been made."""
        return {
            "do": "commit",
            "writer": writer,
            "step": step,
            "tensors": [
                {"name": n, "dtype": d, "shape": list(s), "data": base64.b64encode(b).decode()}
                for n, (d, s, b) in tensors.items()
            ],
            "files": [{"path": p, "data": base64.b64encode(b).decode()} for p, b in (files or {}).items()],
            "allow_set_change": False,
            "metadata": {},
            **members,
        }

    def commit(
        self,
        step: int,
        tensors: Content,
        files: Mapping[str, bytes] | None = None,
        writer: str = "w",
        look: bool = True,
        **members: Any,
    ) -> int:
        """A commit; readers must find it."""
        branch = self._claims[writer]
        version = Version(files={path: (0, data) for path, data in (files or {}).items()})
        for name, (dtype, shape, data) in tensors.items():
            size = self.books.block_bytes
            # Books only: nobody reads how these are stored.
            chains = [[self.books.pack().put(data[i : i + size], RAW)] for i in range(0, len(data), size)]
            version.tensors[name] = Tensor(dtype, shape, data, chains, [NOT_FRESH] * len(chains))
        seq = self.books.commit(version, branch, step)
        self._add(seq, **self.commit_step(step, tensors, files, writer, **members))
        if look:
            self.look("read", at={"branch": branch, "step": step})
        return seq

    def again(
        self,
        seq: int,
        step: int,
        tensors: Content,
        files: Mapping[str, bytes] | None = None,
        writer: str = "w",
    ) -> None:
        """A commit of what is there already."""
        self._add(seq, **self.commit_step(step, tensors, files, writer))

    def fork(self, branch: str, source: str, step: int) -> None:
        """A branch begins."""
        seq = self.books.fork(branch, self.books.find({"branch": source, "step": step}).seq)
        self._add(seq, do="fork", branch=branch, source=source, step=step)

    def tag(self, name: str, branch: str, step: int) -> None:
        """A tag is set."""
        seq = self.books.tag(name, self.books.find({"branch": branch, "step": step}).seq)
        self._add(seq, do="tag", name=name, branch=branch, step=step)

    def untag(self, name: str) -> None:
        """A tag is removed."""
        self._add(self.books.tag(name, None), do="untag", name=name)

    def drop(self, branch: str) -> None:
        """A branch ends."""
        self._add(self.books.drop(branch), do="drop", branch=branch)

    def look(self, op: str, *, error: tuple[str, str] | None = None, **args: Any) -> None:
        """What a reader must find at the end; `state` is looked at anyway."""
        if op == "read":
            args = {"select": None, "allow": [], **args}
            found = {} if error else self.books.expected(args["at"])
        elif op == "follow":
            args = {"from": args.pop("start"), "allow": [], **args}
            found = self.books.expected(args["at"])
        else:
            found = self.books.state()
        expect = {"error": {"class": error[0], "code": error[1]}} if error else {"ok": found}
        self.judge.append({"op": op, "args": args, "expect": expect})


def at(step: int, branch: str = "main") -> dict[str, Any]:
    """A step of a branch."""
    return {"branch": branch, "step": step}


def add(suite: Suite) -> None:
    """All of them."""

    def case(name: str, title: str, script: Script, *requirements: str) -> None:
        script.look("state")
        suite.add(
            Case(
                id=f"write/{name}",
                title=title,
                requirements=requirements,
                op="write",
                args={"script": script.steps},
                expect={"ok": {"seqs": script.seqs}},
                objects={},
                profile="writer",
                judge=script.judge,
                flags=["write"],
            )
        )

    _commits(case)
    _content(case)
    _refusals(case)
    _branches(case)


def _commits(case: Any) -> None:
    s = Script()
    s.claim()
    w, b = noise(1500, 1), noise(40, 2)
    s.commit(0, {"w": ("BF16", [30, 25], w), "b": ("F32", [10], b)})
    for step in (1, 2, 5):
        w = change(w, 2, {step: 1, 100 * step: -1, 700 + step: 2})
        s.commit(step, {"w": ("BF16", [30, 25], w), "b": ("F32", [10], b)})
    s.look("follow", start=at(0), at=at(1))
    s.look("follow", start=at(2), at=at(5))
    s.look("follow", start=at(0), at=at(5))
    case(
        "commits",
        "a first version and three with few changes; steps need not be next to each other",
        s,
        "DF-STO-01",
        "DF-CMT-01",
        "DF-CMT-08",
        "DF-LOG-08",
        "DF-LOG-10",
        "DF-MAN-08",
        "DF-RD-02",
        "DF-PCK-01",
        "DF-JSN-03",
    )

    s = Script()
    s.claim()
    w = noise(200, 3)
    for step in range(75):
        if step:
            w = change(w, 2, {step: step, (7 * step) % 100: -1})
        s.commit(step, {"w": ("BF16", [100], w)}, look=step in (0, 15, 16, 17, 40, 63, 64, 65, 74))
    s.look("follow", start=at(15), at=at(16))
    s.look("follow", start=at(63), at=at(64))
    case(
        "long-run",
        "seventy-five steps that all change one block: chains stay readable, every step is found",
        s,
        "DF-WR-02",
        "DF-LOG-08",
        "DF-MAN-08",
    )

    s = Script()
    s.claim()
    a, b = noise(600, 4), noise(600, 5)
    for step, data in enumerate((a, b, a, a, b)):
        s.commit(step, {"w": ("U8", [600], data)})
    case(
        "back-and-forth",
        "content that returns: roots are equal, no pack of an older commit is made again",
        s,
        "DF-DIG-03",
        "DF-WR-03",
        "DF-CMT-08",
    )

    s = Script()
    s.claim()
    experts = [noise(300, 10 + number) for number in range(4)]
    for step, order in enumerate(((0, 1, 2, 3), (3, 2, 1, 0), (0, 0, 1, 2))):
        s.commit(
            step, {f"expert.{number}": ("U8", [300], experts[which]) for number, which in enumerate(order)}
        )
    case(
        "permuted", "tensors that exchange their content, and two of one content", s, "DF-DIG-02", "DF-CMT-06"
    )

    s = Script(digest="blake3-256", block_bytes=1024)
    s.claim()
    w = noise(5000, 6)
    s.commit(0, {"w": ("F32", [1250], w)})
    s.commit(1, {"w": ("F32", [1250], change(w, 4, {0: 1, 1249: -1, 256: 3}))})
    case("blake3-256", "a store of blake3-256 digests and blocks of 1,024 bytes", s, "DF-DIG-01", "DF-DIG-03")


def _content(case: Any) -> None:
    s = Script()
    s.claim()
    first = {
        d.lower(): (d, [4, 4], noise(2 * bits, number))
        for number, (d, (bits, _)) in enumerate(DTYPES.items())
    }
    s.commit(0, first)
    second = {
        n: (d, shape, bytes([data[0] ^ 0x80]) + data[1:-1] + bytes([data[-1] ^ 1]))
        for n, (d, shape, data) in first.items()
    }
    s.commit(1, second)
    case("every-dtype", "every dtype; in the next step one bit at each end", s, "DF-DTY-03", "DF-BLK-01")

    s = Script()
    s.claim()
    old = pack([0x7FC1, 0xFFC1, 0x7F81, 0x8000, 0x0000, 0x7F80, 0x3F80, 0x0001], 2)
    new = pack([0x7FC2, 0xFFC1, 0xFF81, 0x0000, 0x8000, 0x7F80, 0xBF80, 0x8001], 2)
    s.commit(0, {"w": ("BF16", [8], old), "t": ("BOOL", [4], bytes([0, 1, 2, 255]))})
    s.commit(1, {"w": ("BF16", [8], new), "t": ("BOOL", [4], bytes([0, 255, 2, 1]))})
    case(
        "bits",
        "changes that only bits show: NaN payloads, signs of zeros, BOOL bytes beyond 1",
        s,
        "DF-DTY-03",
    )

    s = Script()
    s.claim()
    names = [
        "",
        "a/b",
        "../x",
        "a\0b",
        "\u00e9",
        "e\u0301",
        "__metadata__",
        "deltaformat.payload",
        "\U0001f600",
        "\uffff",
        "x" * 3000,
        " ",
    ]
    tensors = {name: ("U8", [3], noise(3, number)) for number, name in enumerate(names)}
    s.commit(0, tensors)
    s.commit(1, tensors | {"__metadata__": ("U8", [3], b"new"), "": ("U8", [3], b"too")})
    case("names", "names are data", s, "DF-KEY-03", "DF-BLK-03", "DF-PCK-01", "DF-PCK-02")

    s = Script()
    s.claim()
    s.commit(
        0,
        {
            "e": ("F32", [0, 4], b""),
            "s": ("F64", [], noise(8, 7)),
            "one": ("U8", [1], b"x"),
            "r": ("I16", [1] * 32, b"ab"),
        },
    )
    s.commit(
        1,
        {
            "e": ("F32", [0, 4], b""),
            "s": ("F64", [], noise(8, 8)),
            "one": ("U8", [1], b"x"),
            "r": ("I16", [1] * 32, b"ab"),
        },
    )
    case("shapes", "tensors without elements, of rank 0 and of rank 32", s, "DF-BLK-02", "DF-MAN-06")

    s = Script()
    s.claim()
    s.commit(0, {})
    s.commit(1, {})
    case("no-tensors", "versions without tensors", s, "DF-DIG-03")

    s = Script()
    s.claim()
    w = noise(960, 9)
    s.commit(0, {"w": ("F32", [240], w)})
    s.commit(1, {"w": ("BF16", [20, 24], w)})
    s.commit(2, {"w": ("BF16", [21, 24], change(w, 2, {5: 1}) + noise(48, 10))})
    s.commit(3, {"w": ("U8", [100], w[:100])})
    s.commit(4, {"w": ("U8", [0], b"")})
    s.commit(5, {"w": ("F64", [120], w)})
    s.look("follow", start=at(1), at=at(2))
    s.look("follow", start=at(2), at=at(3))
    case(
        "re-typed",
        "a tensor that changes dtype and shape, grows, shrinks, vanishes and returns",
        s,
        "DF-MAN-08",
        "DF-RD-02",
        "DF-DTY-03",
    )

    s = Script()
    s.claim()
    w = noise(6_400, 11)
    s.commit(0, {"w": ("BF16", [40, 80], w)})
    w = change(w, 2, {number * 128 + 5: 1 for number in range(0, 25, 2)})
    s.commit(1, {"w": ("BF16", [40, 80], w)})
    s.commit(2, {"w": ("BF16", [40, 80], change(w, 2, dict.fromkeys(range(3200), 1)))})
    s.commit(3, {"w": ("BF16", [40, 80], noise(6_400, 12))})
    s.commit(4, {"w": ("BF16", [40, 80], bytes(6_400))})
    for step in range(4):
        s.look("follow", start=at(step), at=at(step + 1))
    case(
        "many-blocks",
        "twenty-five blocks: half of them change, then every element, then all bits, then all is zero",
        s,
        "DF-RD-02",
        "DF-BLK-02",
    )

    s = Script()
    s.claim()
    one = ("U8", [2], b"ab")
    s.commit(0, {"w": one}, {"config.json": b"{}", "tokenizer/vocab.txt": b"a\nb", "empty": b""})
    s.commit(1, {"w": ("U8", [2], b"ac")}, {"config.json": b"{}", "tokenizer/vocab.txt": b"a\nc"})
    s.commit(2, {"w": ("U8", [2], b"ad")}, {"\u00e9.txt": b"{}", "config.json": b"{}"})
    for path in ("../x", "/x", "a//b", "a\\b", "c:d", "", ".", "x" * 1025):
        s.refuse("UNSAFE", **s.commit_step(3, {"w": one}, {path: b"1"}))
    s.refuse("UNSAFE", **s.commit_step(3, {"w": one}, {"a": b"1", "a/b": b"2"}))
    s.commit(3, {"w": one}, {"a/b": b"2", "a/c": b"2"})
    case(
        "files",
        "sidecar files that stay, change, go and share content; paths that must be refused",
        s,
        "DF-MAN-10",
        "DF-CMT-08",
        "DF-SEC-01",
    )


def _refusals(case: Any) -> None:
    s = Script()
    s.refuse("CONFLICT", do="create", digest="xxh3-128", block_bytes=512)
    s.claim()
    s.commit(0, {"w": ("U8", [2], b"ab")})
    case("create-twice", "a store that exists is not made again", s, "DF-DSC-03")

    for name, title, member, error, ids in (
        (
            "block-size",
            "a block size that is no power of two",
            {"block_bytes": 300},
            "MALFORMED",
            ["DF-DSC-01"],
        ),
        ("block-size-small", "a block size of 128", {"block_bytes": 128}, "MALFORMED", ["DF-DSC-01"]),
        ("digest", "a digest that SPEC.md does not have", {"digest": "md5"}, "UNSUPPORTED", ["DF-DSC-02"]),
    ):
        s = Script()
        create = s.steps.pop()
        s.seqs.pop()
        s.refuse(error, **(create | member))
        s._add(None, **create)
        s.claim()
        s.commit(0, {"w": ("U8", [2], b"ab")})
        case(f"create-with-bad-{name}", f"{title} is refused; then the store is made", s, *ids)

    s = Script()
    s.claim()
    s.commit(5, {"w": ("U8", [2], b"ab"), "v": ("U8", [1], b"x")})
    s.refuse("INCONSISTENT", **s.commit_step(6, {"w": ("U8", [2], b"ac")}))
    s.refuse(
        "INCONSISTENT",
        **s.commit_step(6, {"w": ("U8", [2], b"ac"), "v": ("U8", [1], b"x"), "u": ("U8", [1], b"x")}),
    )
    s.refuse("INCONSISTENT", **s.commit_step(6, {}))
    s.commit(6, {"w": ("U8", [2], b"ac"), "u": ("U8", [1], b"y")}, allow_set_change=True)
    s.commit(7, {"w": ("U8", [2], b"ad"), "u": ("U8", [1], b"y")})
    case(
        "names-change",
        "names that come or go are refused, and made where the user allows it",
        s,
        "DF-CMT-07",
        "DF-WR-01",
    )

    s = Script()
    s.claim()
    one = {"w": ("U8", [2], b"ab")}
    two = {"w": ("U8", [2], b"ac")}
    seq = s.commit(5, one)
    s.refuse("INCONSISTENT", **s.commit_step(4, two))
    s.refuse("INCONSISTENT", **s.commit_step(5, two))
    s.again(seq, 5, one)
    s.commit(2**53 - 1, two)
    s.refuse("INCONSISTENT", **s.commit_step(6, one))
    s.refuse("MALFORMED", **s.commit_step(2**53, one))
    s.refuse("MALFORMED", **s.commit_step(-1, one))
    case(
        "steps",
        "a step that does not rise is refused; the head's own step with the same content is there already",
        s,
        "DF-CMT-05",
        "DF-JSN-01",
    )

    s = Script()
    s.claim()
    s.commit(0, one)
    for tensors, error in (
        ({"w": ("U8", [3], b"ab")}, "MALFORMED"),
        ({"w": ("F8", [2], b"ab")}, "UNSUPPORTED"),
        ({"w": ("F4", [3], b"ab")}, "MALFORMED"),
        ({"w": ("U8", [-2], b"ab")}, "MALFORMED"),
        ({"x" * 65536: ("U8", [2], b"ab")}, "MALFORMED"),
    ):
        s.refuse(error, **s.commit_step(1, tensors))
    s.commit(1, two)
    case(
        "bad-tensors",
        "tensors that cannot be: bytes that do not fit, an unknown dtype, half a byte, a name too long",
        s,
        "DF-DTY-02",
        "DF-BLK-03",
        "DF-WR-01",
    )

    s = Script()
    for branch in ("", "-x", "a b", "x" * 129, "\u00e9", "/x"):
        s.refuse("MALFORMED", do="claim", writer="w", branch=branch, resume_from=None)
    s.claim("A.b/c_d-1")
    s.commit(0, one)
    s.refuse("MALFORMED", do="tag", name="no spaces", branch="A.b/c_d-1", step=0)
    s.tag("v1.0/final", "A.b/c_d-1", 0)
    case("branch-names", "names of branches and tags that SPEC.md does not allow", s, "DF-LOG-01")


def _branches(case: Any) -> None:
    def version(number: int) -> dict[str, tuple[str, list[int], bytes]]:
        return {"w": ("U8", [300], change(noise(300, 20), 1, {number: 1}))}

    s = Script()
    s.claim(writer="first")
    s.commit(0, version(0), writer="first")
    s.claim(writer="second")
    s.refuse("CONFLICT", **s.commit_step(1, version(1), writer="first"))
    s.commit(1, version(2), writer="second")
    s.refuse("CONFLICT", **s.commit_step(2, version(3), writer="first"))
    s.commit(2, version(4), writer="second")
    case(
        "fencing",
        "a second writer takes the branch: the first one is fenced, also later",
        s,
        "DF-CMT-04",
        "DF-LOG-05",
        "DF-CMT-02",
    )

    s = Script()
    s.claim()
    for step in range(4):
        s.commit(step, version(step), look=step < 2)
    s.claim(writer="again", resume_from=1)
    s.refuse("CONFLICT", **s.commit_step(4, version(4)))
    s.commit(2, version(9), writer="again")
    s.commit(7, version(10), writer="again")
    s.look("read", at=at(3), error=("MISSING", "version-missing"))
    s.look("read", at={"seq": 4})
    s.look("follow", start=at(1), at=at(2))
    s.refuse("MISSING", do="claim", writer="never", branch="main", resume_from=3)
    case(
        "rewind",
        "a writer resumes from an earlier step; later ones stay readable by seq",
        s,
        "DF-LOG-07",
        "DF-LOG-08",
        "DF-CMT-06",
    )

    s = Script()
    s.claim(writer="main")
    for step in range(3):
        s.commit(step, version(step), writer="main")
    s.fork("try", "main", 1)
    s.refuse("CONFLICT", do="fork", branch="try", source="main", step=2)
    s.refuse("MISSING", do="fork", branch="other", source="main", step=9)
    s.refuse("MISSING", do="fork", branch="other", source="nobody", step=1)
    s.claim("try", writer="side")
    s.commit(2, version(8), writer="side")
    s.commit(3, version(3), writer="main")
    s.commit(3, version(9), writer="side")
    s.look("read", at=at(0, "try"))
    s.look("follow", start=at(1), at=at(2, "try"))
    s.tag("best", "try", 2)
    s.look("read", at={"tag": "best"})
    s.refuse("CONFLICT", do="tag", name="best", branch="main", step=0)
    s.refuse("MISSING", do="untag", name="worst")
    s.tag("worst", "main", 0)
    s.untag("worst")
    s.look("read", at={"tag": "worst"}, error=("MISSING", "tag-missing"))
    s.refuse("MISSING", do="drop", branch="nobody")
    s.fork("gone", "main", 0)
    s.drop("gone")
    s.look("read", at={"branch": "gone"}, error=("MISSING", "branch-missing"))
    case(
        "branches-and-tags",
        "forks, tags and drops, and those that must be refused",
        s,
        "DF-LOG-12",
        "DF-LOG-05",
        "DF-LOG-01",
    )

    s = Script()
    s.claim(writer="one")
    s.claim("other", writer="two")
    for step in range(3):
        s.commit(step, version(step), writer="one")
        s.commit(step, version(step + 5), writer="two")
    case("two-branches", "two writers on two branches take turns", s, "DF-CMT-02", "DF-LOG-05", "DF-CMT-06")

    s = Script()
    s.claim()
    s.commit(
        0,
        version(0),
        metadata={"loss": 0.25, "nested": {"list": [1, None, True, "\u00e9"], "": {}}, "big": 2**53 - 1},
    )
    s.commit(1, version(1), metadata={"x" * 100: "y" * 1_000})
    case("metadata", "metadata of any JSON", s, "DF-JSN-01")
