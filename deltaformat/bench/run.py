"""The whole benchmark: what is measured in which profile, and the ratios that it must show."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deltaformat as df
from deltaformat.bench.codecs import MODES, ON_ONE_THREAD, Absent, Blocks, Codec, Mode, bits, load_peers
from deltaformat.bench.coding import CodecRow, Coding, measure_coding
from deltaformat.bench.inputs import Input, Trace, derive, read_traces, synthetic_trace, trace_input
from deltaformat.bench.memory import measure_memory
from deltaformat.bench.parts import measure_parts, measure_planes
from deltaformat.bench.shapes import SHAPES, measure_log, measure_manifest, measure_many
from deltaformat.bench.stores import StoreRow, measure_stores
from deltaformat.blocks import byte_view
from deltaformat.encodings import native

__all__ = ["FULL", "LINKS", "QUICK", "XOR", "Profile", "link_times", "run"]

XOR = "XOR + zstd-1"
"""The peer that ratios are given against."""
OWN_THREADS = "moonclip"
"""The peer that takes as many threads as it likes."""
LINKS = (0.1, 1.0, 10.0, 100.0)
"""Links to compute end-to-end times for, in Gbit/s."""
CHAIN = 16


@dataclass(frozen=True, slots=True)
class Profile:
    """How much is measured.

    Attributes:
        name: `quick` or `full`.
        megabytes: Size of the tiled input, in 10^6 bytes.
        rounds: Steps.
        weights: Of a synthetic trace.
        many: Numbers of small tensors.
        commits: Length of a log.
        shapes: How many of `SHAPES`.
        growth_steps: Steps over which memory is looked at.
        all_on_two: Whether all peers are measured on two threads, too; otherwise XOR + zstd-1 alone is.
    """

    name: str
    megabytes: int
    rounds: int
    weights: int
    many: tuple[int, ...]
    commits: int
    shapes: int
    growth_steps: int
    all_on_two: bool


QUICK = Profile("quick", 48, 3, 4_000_000, (1_000, 4_000), 50, 1, 10, all_on_two=False)
FULL = Profile("full", 1000, 3, 22_700_000, (10_000, 100_000), 500, 2, 50, all_on_two=True)


def run(
    profile: Profile, *, trace: str | None, peers: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure everything, and give the document that tables and plots are made of.

    Args:
        profile: How much.
        trace: A store, or a directory of stores; None makes synthetic traces.
        peers: The package with the peers; None leaves them out.
        report: Told what is being done.

    Raises:
        LossyError: Something was not lossless.
        DeltaFormatError, ValueError: The trace cannot be read.
        ImportError: The peers cannot be loaded.
    """
    started = time.perf_counter()
    report("reading the traces" if trace else "making synthetic traces")
    traces = _traces(profile, trace)
    codings: list[Coding] = []
    stores: dict[str, list[StoreRow]] = {}
    parts: dict[str, dict[str, dict[str, float]]] = {}
    planes: dict[str, float] = {}
    lengths: dict[str, list[int]] = {}
    main = f"llm/{traces[0].key}"
    for number, given_trace in enumerate(traces):
        inputs = [trace_input(given_trace)]
        derived = derive(given_trace, profile.megabytes)
        # The other inputs say nothing new of a second trace.
        inputs += derived.values() if number == 0 else [derived["llm"]]
        for given in inputs:
            widely = given.key == main
            codings.append(_code(given, profile, peers, widely=widely, report=report))
            modes = _usable(MODES) if widely else _usable(ON_ONE_THREAD)[:1]
            stores[given.key] = []
            # One thread and two in turn; all at once would take a state's memory each.
            for name in dict.fromkeys(mode.name for mode in modes):
                pair = [mode for mode in modes if mode.name == name]
                stores[given.key] += _stores(given, pair, profile, peers, report)
        if number == 0:
            llm = derived["llm"]
            parts[llm.key] = {
                mode.name: measure_parts(llm, mode, rounds=profile.rounds, report=report)
                for mode in _usable(ON_ONE_THREAD)
            }
            planes = measure_planes(llm, megabytes=min(256, profile.megabytes), rounds=profile.rounds)
            lengths = {kind: _piece_lengths(derived[kind]) for kind in ("llm", "sparse")}
    report("manifests of large models")
    manifests = [
        measure_manifest(shape, lengths["sparse" if shape.sparse else "llm"], chain=CHAIN)
        for shape in SHAPES[: profile.shapes]
    ]
    report("many tensors, and a long log")
    many = [measure_many(count) for count in profile.many]
    log = measure_log(profile.commits)
    report("memory")
    memory = measure_memory(min(256, profile.megabytes), profile.growth_steps)
    found = next(coding for coding in codings if coding.key == main)
    return {
        "deltaformat": df.__version__,
        "profile": asdict(profile),
        "seconds": time.perf_counter() - started,
        "machine": _machine(),
        "peers": None if peers is None else str(peers.name),
        "real": traces[0].real,
        "main": main,
        "inputs": [asdict(coding) | {"density": coding.density} for coding in codings],
        "stores": {key: [asdict(row) for row in rows] for key, rows in stores.items()},
        "parts": parts,
        "planes": planes,
        "manifests": [asdict(cost) | {"ratio": cost.ratio} for cost in manifests],
        "many": many,
        "log": log,
        "memory": memory,
        "ratios": _ratios(codings, stores, manifests[0].ratio, planes, memory, main),
        "links": link_times(found.rows, stores[main]),
    }


def _traces(profile: Profile, place: str | None) -> list[Trace]:
    if place is not None:
        return read_traces(place, profile.rounds)
    return [synthetic_trace(profile.weights, profile.rounds, lr=lr) for lr in (3e-6, 1e-6)]


def _usable(modes: Sequence[Mode]) -> list[Mode]:
    """Without kernels NumPy serves; then what would be measured twice is left out."""
    return [mode for mode in modes if native.kernels is not None or not mode.kernels]


def _code(
    given: Input, profile: Profile, peers: Path | None, *, widely: bool, report: Callable[[str], None]
) -> Coding:
    modes = _usable(MODES if widely else ON_ONE_THREAD)
    others: list[tuple[int, Codec | Absent]] = []
    if peers is not None:
        others += [(1, peer) for peer in load_peers(peers, 1)]
        if widely:
            wanted = {row.name for _, row in others} - {OWN_THREADS} if profile.all_on_two else {XOR}
            others += [
                (2, peer)
                for peer in load_peers(peers, 2)
                if peer.name in wanted and not isinstance(peer, Absent)  # told once
            ]
    return measure_coding(given, modes=modes, peers=others, rounds=profile.rounds, report=report)


def _stores(
    given: Input, modes: Sequence[Mode], profile: Profile, peers: Path | None, report: Callable[[str], None]
) -> list[StoreRow]:
    loaded = [[] if peers is None else load_peers(peers, mode.threads) for mode in modes]
    codecs = [[peer for peer in found if not isinstance(peer, Absent)] for found in loaded]
    xors = [next((peer for peer in found if peer.name == XOR), None) for found in codecs]
    try:
        pairs = list(zip(modes, xors, strict=True))
        return measure_stores(given, pairs, rounds=profile.rounds, report=report)
    finally:
        for found in codecs:
            for peer in found:
                peer.close()


def _piece_lengths(given: Input) -> list[int]:
    """Bytes of the pieces of a step's whole blocks."""
    state = given.make(0)
    codec = Blocks(_usable(MODES)[0], state)
    payload = codec.encode(bits(state), bits(given.make(1)))
    return [byte_view(piece).nbytes - 1 for piece in payload.values()]


def _machine() -> dict[str, Any]:
    return {
        "engine": native.engine(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def _ratios(
    codings: Sequence[Coding],
    stores: dict[str, list[StoreRow]],
    manifest: float,
    planes: dict[str, float],
    memory: dict[str, float] | None,
    main: str,
) -> list[dict[str, Any]]:
    """What must be shown: input, name, value and unit; one thread unless the name says otherwise."""
    ratios: list[dict[str, Any]] = []

    def add(key: str, name: str, value: float | None, unit: str = "") -> None:
        if value is not None:
            ratios.append({"input": key, "name": name, "value": value, "unit": unit})

    for coding in codings:
        whole = stores[coding.key][0]
        add(coding.key, f"all objects per changed weight ({whole.mode})", whole.per_change, "B")
        xor = next((row for row in coding.rows if row.name == XOR and row.threads == 1), None)
        if xor is None or not xor.encode_s or not xor.apply_s:
            continue
        for row in coding.rows:
            if row.ours and row.threads == 1 and row.encode_s and row.apply_s:
                add(coding.key, f"{row.name}: encode / {XOR}", row.encode_s / xor.encode_s)
                add(coding.key, f"{row.name}: decode + apply / {XOR}", row.apply_s / xor.apply_s)
    for store in stores[main]:
        label = f"{store.mode}, {store.threads} thread{'s' if store.threads > 1 else ''}"
        if store.peer_encode_s and store.peer_apply_s:
            for what, name, peer_s in (
                ("commit", "encoding", store.peer_encode_s),
                ("follow", "decoding", store.peer_apply_s),
                ("cold read", "encoding", store.peer_encode_s),
            ):
                add(main, f"{label}: whole {what} / {name} of {XOR}", store.seconds[what] / peer_s)
    for one in stores[main]:
        for two in stores[main]:
            if one.mode == two.mode and (one.threads, two.threads) == (1, 2):
                for what in ("commit", "follow", "cold read"):
                    speed = one.seconds[what] / two.seconds[what]
                    add(main, f"{one.mode}: {what}, speed of two threads / one", speed)
    add(main, "full bf16 blocks in planes / raw", planes["ratio"])
    add(main, "full bf16 blocks in planes, decoding", planes["decode GB/s"], "GB/s")
    add("7B", f"manifest at chain {CHAIN} / that step's delta", manifest)
    if memory is not None:
        add("synthetic", "writer's peak / state", memory["writer"] / memory["state"])
        add("synthetic", "growth of memory after the 5th step", memory["growth"] / 1e6, "MB")
    return ratios


def link_times(rows: Sequence[CodecRow], stores: Sequence[StoreRow]) -> list[dict[str, Any]]:
    """End-to-end seconds of a step over each of `LINKS`: encode, transfer, decode, one after the other.

    For ours also of the whole: commit, all objects, follow.
    """
    found = []

    def add(name: str, nbytes: float, before: float, after: float) -> None:
        seconds = {f"{link:g}": before + nbytes * 8 / (link * 1e9) + after for link in LINKS}
        found.append(
            {"name": name, "bytes": nbytes, "encode_s": before, "apply_s": after, "seconds": seconds}
        )

    for row in rows:
        if row.threads == 1 and row.nbytes is not None and row.encode_s and row.apply_s:
            add(row.name, row.nbytes, row.encode_s, row.apply_s)
    for store in stores:
        if store.threads == 1:
            name = f"deltaformat ({store.mode}), whole commit and follow"
            add(name, store.per_change * store.changed, store.seconds["commit"], store.seconds["follow"])
    return found
