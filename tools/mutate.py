#!/usr/bin/env python3
"""Changes valid stores at random and compares what two readers make of each.

    python tools/mutate.py --count 2000
    python tools/mutate.py --adapter 'python a.py' --adapter 'node b.js' --seconds 60
    python tools/mutate.py --seed 7 --only 1234 --keep /tmp/one    one again, its store kept

Both must accept or both refuse, and read the same bytes. Every disagreement, crash and time-out is printed
with what makes it again; exit code 1 if there was any. Another class is printed, too: of several broken
rules any may be told (DF-ERR-01), so look whether there are several. What SPEC.md leaves to a reader (damage
inside of zstd blocks, flatbuffers that break their own rules, contradictions in the log that not every reader
meets) is counted apart. Most changes are below hashes that are
made anew, so that they reach the code behind the checks; where a changed payload still decodes, its block
gets a new digest.

Without --adapter the reference is compared with itself in another configuration: NumPy instead of kernels,
one thread, tensor by tensor.
"""

from __future__ import annotations

import argparse
import gzip
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard

from deltaformat.cli.conformance import load_runner, suite_directory
from deltaformat.encodings import decode_piece
from deltaformat.errors import DeltaFormatError
from vectors.mutations import can_be_mutated, mutate

__all__ = ["main"]

SUITE = suite_directory()
runner: Any = load_runner()
MAX_STORE = 100_000
Outcome = tuple[str, Any]


def decode(encoding: int, payload: bytes, base: bytes) -> bytes | None:
    """A payload on a base; None where it is refused."""
    block = np.frombuffer(base, np.uint8).copy()
    try:
        decode_piece(encoding, payload, block)
    except (DeltaFormatError, ValueError):
        return None
    return block.tobytes()


def bases(filters: Sequence[str]) -> list[Any]:
    """Cases whose stores are changed: valid ones, small, and of nothing outside."""
    cases = runner.chosen(runner.load_cases(SUITE / "cases"), filters)
    return [
        case
        for case in cases
        if case.id.startswith("valid/")
        and "ok" in case.expect
        and not {"store", "features"} & {k for k, v in case.members.items() if v}
        and sum(map(len, objects_of(case.store).values())) < MAX_STORE
        and can_be_mutated(objects_of(case.store))
    ]


def ask(adapter: Any, case: Any, store: Path) -> Outcome:
    """What an adapter makes of a store: its outcome, comparable."""
    try:
        reply = adapter.ask(case.members["op"], store=str(store), **case.members["args"])
    except runner.AdapterError as error:
        return error.kind, str(error)
    if reply["result"] == "error":
        return "error", {"class": reply["class"], "code": reply.get("code"), "held": reply.get("held")}
    reply.pop("id")
    return reply.pop("result"), reply


def lay_out(objects: Mapping[str, bytes], place: Path) -> None:
    """Objects as files."""
    for key, data in objects.items():
        path = place / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def objects_of(store: Path) -> dict[str, bytes]:
    """A store's objects, unpacked where they lie gzipped."""
    found = {p.relative_to(store).as_posix(): p.read_bytes() for p in store.rglob("*") if p.is_file()}
    return {
        key.removesuffix(".gz"): gzip.decompress(data) if key.endswith(".gz") else data
        for key, data in found.items()
    }


def try_one(
    case: Any, rng: Random, adapters: Sequence[Any], keep: Path | None
) -> tuple[str, dict[str, bytes], list[Outcome]]:
    """Change a case's store once and ask everybody: what was changed, the store, and the outcomes."""
    objects, words = mutate(objects_of(case.store), rng, decode)
    with tempfile.TemporaryDirectory(prefix="deltaformat-mutant-") as place:
        store = Path(place).resolve() / "store"
        lay_out(objects, store)
        if keep is not None:
            shutil.copytree(store, keep, dirs_exist_ok=True)
        return words, objects, [ask(adapter, case, store) for adapter in adapters]


def verdict(words: str, objects: Mapping[str, bytes], outcomes: Sequence[Outcome]) -> str:
    """What two outcomes come to.

    Args:
        words: What was changed.
        objects: The changed store.
        outcomes: Both.

    Returns:
        `agree`, `class` where both refuse with another class, `free` where SPEC.md leaves it to a reader, or
        `disagree`.
    """
    (one, first), (other, second) = outcomes
    if one not in ("ok", "error") or other not in ("ok", "error"):
        return "disagree"
    if one != other:
        return "free" if _left_to_readers(words, objects, first if one == "error" else second) else "disagree"
    if one == "ok":
        return "agree" if first == second else "disagree"
    if first["held"] != second["held"] and None not in (first["held"], second["held"]):
        return "disagree"
    return "agree" if first["class"] == second["class"] else "class"


def _left_to_readers(words: str, objects: Mapping[str, bytes], refusal: Mapping[str, Any]) -> bool:
    """Whether a store with this fault may be read, and refused with this error as well."""
    code, in_frame = refusal["code"], words == "bytes of a manifest's frame"
    if code == "frame-corrupt":  # DF-ENC-09: zstd libraries differ on damage inside of blocks
        return in_frame or words.startswith("payload of ")
    if code == "manifest-invalid":  # DF-MAN-01: flatbuffers that break their own rules
        return (in_frame or words == "bytes of an Arrow file") and any(
            _breaks_flatbuffers(data) for key, data in objects.items() if key.startswith("manifests/")
        )
    if code == "record-void":  # DF-LOG-06: a contradiction that not every reader meets
        return words.startswith("record ") and ("last_tag" in words or "last_retire" in words)
    return False


def _breaks_flatbuffers(data: bytes) -> bool:
    """Whether Arrow's own library finds a manifest's flatbuffers, and not what they say, to be wrong."""
    try:
        content = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        pa.ipc.open_file(pa.BufferReader(content)).read_all()
    except (pa.ArrowException, OSError, zstandard.ZstdError) as error:
        return "flatbuffer" in str(error)
    return False


def default_adapters() -> list[str]:
    """The reference twice."""
    reference = shlex.join([sys.executable, str(SUITE / "adapters" / "deltaformat_reference.py")])
    other = "DELTAFORMAT_NATIVE=0 DELTAFORMAT_ADAPTER_THREADS=1 DELTAFORMAT_ADAPTER_SINGLY=1"
    return [reference, f"env {other} {reference}"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare two readers on stores that are changed at random.")
    parser.add_argument("--adapter", action="append", metavar="CMD", help="twice: what to compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="stores to try (default: 1000)")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--only", type=int, metavar="N", help="only the Nth store of this seed")
    parser.add_argument("--filter", action="append", default=[], help="only stores of these cases")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with --only: where to put the store")
    parser.add_argument("--strict", action="store_true", help="another class is a disagreement, too")
    parser.add_argument("--timeout", type=float, default=30.0)
    options = parser.parse_args(argv)
    options.adapter = options.adapter or default_adapters()
    if len(options.adapter) != 2:
        parser.error("give --adapter twice, or not at all")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Try; return the exit code."""
    options = parse(argv)
    cases = bases(options.filter)
    if not cases:
        print("no valid, small case matches", file=sys.stderr)
        return 2
    adapters = [runner.Adapter(shlex.split(text), timeout=options.timeout) for text in options.adapter]
    numbers = [options.only] if options.only is not None else range(options.count)
    counts: Counter[str] = Counter()
    judgements: Counter[str] = Counter()
    tried = 0
    start = time.monotonic()
    try:
        for number in numbers:
            if options.seconds and time.monotonic() - start > options.seconds:
                break
            rng = Random(f"{options.seed}:{number}")
            case = rng.choice(cases)
            words, objects, outcomes = try_one(case, rng, adapters, options.keep)
            tried += 1
            result, found = outcomes[0]
            counts[found["class"] if result == "error" else result] += 1
            judged = verdict(words, objects, outcomes)
            judgements[judged] += 1
            if judged in ("disagree", "class"):
                shown = [
                    f"  {text}\n    {o[0]}: {str(o[1])[:600]}"
                    for text, o in zip(options.adapter, outcomes, strict=True)
                ]
                again = f"--seed {options.seed} --only {number}"
                again += "".join(f" --filter {shlex.quote(text)}" for text in options.filter)
                print(f"{judged.upper()} {case.id}: {words}; again: {again}", *shown, sep="\n", flush=True)
    finally:
        for adapter in adapters:
            adapter.close()
    outcome = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    seconds = time.monotonic() - start
    print(
        f"{tried} stores of {len(cases)} cases in {seconds:.0f} s: {outcome};"
        f" {judgements['disagree']} disagreements, {judgements['class']} times another class,"
        f" {judgements['free']} times what SPEC.md leaves open"
    )
    return 1 if judgements["disagree"] or (options.strict and judgements["class"]) else 0


if __name__ == "__main__":
    sys.exit(main())
