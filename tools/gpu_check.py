"""Check this package on a GPU, then measure it: one command, under five minutes.

    python tools/gpu_check.py [--sizes 1 8] [--json result.json]
    python tools/gpu_check.py --small [--engine triton]      # no GPU: the same steps on a few kilobytes

First everything is compared with the CPU: digests of both algorithms, changes, patches, whole commits and a
follower. Then rates, as medians, each beside the device's ceilings in the same run: a copy, and a read that
does nothing else. Rates of hashing are bytes of the state; of comparing, bytes of both versions. What is
wrong makes the exit status 1; what cannot be done here is said and skipped. With --engine triton and no GPU,
set TRITON_INTERPRET=1. For commits and followers pyarrow, zstandard and obstore must be installed, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import deltaformat as df
from deltaformat.digests import digest_blocks, get_digest
from deltaformat.dtypes import get_dtype
from deltaformat.encodings import encode_block
from deltaformat.gpu import BlockDiff, apply, diff, hash_blocks
from deltaformat.gpu.applying import apply_to
from deltaformat.gpu.diffing import Pairs, Window, count_changes
from deltaformat.gpu.engines import Engine, choose_engine
from deltaformat.gpu.hashing import digests_of
from deltaformat.gpu.table import BlockTable, flat_views
from deltaformat.gpu.transfer import traffic
from deltaformat.torchtensors import describe

GIGABYTE = 10**9
LENGTHS = [
    1,
    2,
    3,
    4,
    8,
    9,
    16,
    17,
    128,
    129,
    240,
    241,
    255,
    256,
    257,
    1023,
    1024,
    1025,
    2049,
    3000,
    4096,
    5001,
]
EXPECTED = {"hash xxh3-128": 2500.0, "hash blake3-256": 1000.0, "diff": 1200.0}
"""GB/s on an H200."""

State = dict[str, Any]


class Report:
    """What was found: checks, rates and facts.

    Args:
        limit: Seconds after which nothing new is begun.
    """

    def __init__(self, limit: float) -> None:
        self.checks: list[dict[str, Any]] = []
        self.rates: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._until = time.monotonic() + limit

    def check(self, name: str, function: Callable[[], object]) -> None:
        """Run a check: False or an exception is a failure, a string says why it was skipped."""
        started = time.monotonic()
        if started > self._until:
            found: object = "out of time"
        else:
            try:
                found = function()
            except ImportError as error:
                found = f"{error}"
            except Exception as error:  # one check that breaks must not hide what the others say
                found = str(error) if "pip install" in str(error) else False
                if found is False:
                    traceback.print_exc()
        result = "skipped" if isinstance(found, str) else "failed" if found is False else "passed"
        seconds = time.monotonic() - started
        self.checks.append({"check": name, "result": result, "why": found if result == "skipped" else None})
        print(
            f"{result:8} {name} ({seconds:.1f} s){': ' + str(found) if result == 'skipped' else ''}",
            flush=True,
        )

    def rate(self, size: int, what: str, nbytes: float, seconds: float, **facts: Any) -> None:
        """Note a rate in GB/s."""
        self.rates.append(
            {"bytes": size, "what": what, "GB/s": nbytes / seconds / 1e9, "ms": seconds * 1e3, **facts}
        )

    @property
    def out_of_time(self) -> bool:
        """Whether nothing new should be begun."""
        return time.monotonic() > self._until

    def table(self) -> str:
        """Rates as text."""
        lines = [f"{'state':>8}  {'what':34} {'GB/s':>9} {'ms':>10}  of the read ceiling"]
        ceilings = {r["bytes"]: r["GB/s"] for r in self.rates if r["what"] == "read (ceiling)"}
        for rate in self.rates:
            share = rate["GB/s"] / ceilings[rate["bytes"]] if rate["bytes"] in ceilings else 0.0
            least = EXPECTED.get(rate["what"])
            note = f"  expected on an H200: {least:.0f}" if least is not None else ""
            extra = "".join(f"  {k}={v}" for k, v in rate.items() if k not in ("bytes", "what", "GB/s", "ms"))
            lines.append(
                f"{rate['bytes'] / 1e9:6.3g} GB  {rate['what']:34} {rate['GB/s']:9.1f} {rate['ms']:10.3f}"
                f"  {share:5.2f}{note}{extra}"
            )
        return "\n".join(lines)


class Bench:
    """The device, and how time is taken on it."""

    def __init__(self, torch: Any, device: str, engine: Engine, rounds: int) -> None:
        self.torch = torch
        self.device = torch.device(device)
        self.engine: Engine = engine
        self.rounds = rounds

    def wait(self) -> None:
        """Let the device finish."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], object], *, calls: int = 1) -> float:
        """Median time of a call until the device is done, after one that warms up.

        With several calls in a row the host prepares the next while the device works, and that alone counts.
        """
        function()
        self.wait()
        calls = calls if self.device.type == "cuda" else 1
        found = []
        for _ in range(self.rounds):
            if self.device.type == "cuda":
                start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(calls):
                    function()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) / 1e3 / calls)
            else:
                started = time.perf_counter()
                function()
                found.append(time.perf_counter() - started)
        return float(statistics.median(found))

    def octets(self, count: int, seed: int) -> Any:
        """Random bytes on the device."""
        generator = self.torch.Generator(device=self.device).manual_seed(seed)
        return self.torch.randint(
            0, 256, (count,), dtype=self.torch.uint8, device=self.device, generator=generator
        )

    def versions(self, nbytes: int, tensor_bytes: int) -> tuple[State, State]:
        """A bf16 state and the next, of fp32 masters that step as under AdamW at lr 3e-6: 0.7 % change."""
        old, new = {}, {}
        generator = self.torch.Generator(device=self.device).manual_seed(1)
        for number in range(max(1, nbytes // tensor_bytes)):
            shape = (tensor_bytes // 2,)
            master = self.torch.randn(shape, device=self.device, generator=generator) * 0.02
            old[f"w{number}"] = master.to(self.torch.bfloat16)
            master += self.torch.randn(shape, device=self.device, generator=generator) * (3e-6 / 18)
            new[f"w{number}"] = master.to(self.torch.bfloat16)
        return old, new


def bits(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's bytes on the host."""
    import torch

    found: np.ndarray[Any, np.dtype[np.uint8]] = (
        tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    )
    return found


# -- against the CPU ----------------------------------------------------------------------------------------


def check_hash(bench: Bench, algorithm: str, engine: Engine, block_bytes: int) -> bool:
    """Digests of a ragged set against the CPU's library."""
    tensors = [bench.octets(length, length) for length in [*LENGTHS, 2 * block_bytes, 3 * block_bytes + 17]]
    tensors.append(bench.octets(2000, 3)[1:1500])  # not aligned
    found = hash_blocks(tensors, block_bytes=block_bytes, algorithm=algorithm, engine=engine)
    function = get_digest(algorithm)
    expected = [digest_blocks(bits(tensor), block_bytes, function) for tensor in tensors]
    return np.array_equal(found, np.concatenate(expected))


def check_diff(bench: Bench, dtype: Any, engine: Engine, block_bytes: int) -> bool:
    """Changes against NumPy; applied they give the new version, undone the old."""
    width = dtype.itemsize
    old = [
        bench.octets(width * count, count).view(dtype) for count in (1, 33, 700, 5 * block_bytes // width + 9)
    ]
    new = [tensor.clone() for tensor in old]
    for number, tensor in enumerate(new):
        tensor.view(bench.torch.uint8)[:: 97 + number] += 1
    new[2].view(bench.torch.uint8)[:400] += 3  # dense
    found = list(diff(new, old, block_bytes=block_bytes, engine=engine))
    seen = 0
    for change in found:
        start = change.block * block_bytes
        x, y = (
            bits(tensors[change.tensor])[start : start + block_bytes].view(f"<u{width}")
            for tensors in (new, old)
        )
        places = np.flatnonzero(x != y)
        seen += len(places)
        if change.changes is None:
            if change.content is None or not np.array_equal(change.content, x.view(np.uint8)):
                return False
        elif not np.array_equal(change.changes.positions, places) or not np.array_equal(
            change.changes.differences, (x - y)[places]
        ):
            return False
    total = sum(
        int(np.count_nonzero(bits(a).view(f"<u{width}") != bits(b).view(f"<u{width}")))
        for a, b in zip(new, old, strict=True)
    )
    if seen != total:
        return False
    apply(old, found, block_bytes=block_bytes, engine=engine)
    return all(np.array_equal(bits(a), bits(b)) for a, b in zip(new, old, strict=True))


def check_far(bench: Bench, engine: Engine) -> bool | str:
    """Beyond 2^31 elements of one tensor."""
    if bench.device.type != "cuda":
        return "needs a GPU's memory"
    size, block = (1 << 32) + (1 << 20) + 300, 1 << 20
    old = bench.torch.zeros(size, dtype=bench.torch.uint8, device=bench.device)
    new = old.clone()
    places = [5, (1 << 31) - 1, (1 << 31) + 7, size - 1]
    new[places] = 200
    found = [
        (change.block * block + int(place))
        for change in diff(new, old, block_bytes=block, engine=engine)
        if change.changes is not None
        for place in change.changes.positions
    ]
    digests = hash_blocks(new, block_bytes=block, engine=engine)
    function = get_digest("xxh3-128")
    ends = all(
        digests[index].tobytes() == function(bits(new[index * block : (index + 1) * block]))
        for index in (0, 2047, 2048, 4096, 4097)
    )
    apply(old, list(diff(new, old, block_bytes=block, engine=engine)), block_bytes=block, engine=engine)
    return found == places and ends and bool(bench.torch.equal(old, new))


def check_commits(bench: Bench, engine: Engine, kept: bool, small: bool) -> bool:
    """Commits from the device are those from the host, and live states that follow get their bits."""
    live_module = importlib.import_module("deltaformat.torch")
    block_bytes = 4096 if small else 1 << 20
    old, new = bench.versions(1 << 15 if small else 64 << 20, 1 << 13 if small else 8 << 20)
    extra = {
        "f8": bench.octets(3000, 4).view(bench.torch.float8_e4m3fn).reshape(60, 50),
        "odd": bench.octets(3001, 5),
        "transposed": bench.octets(4000, 6).view(bench.torch.float32).reshape(40, 25).T,
    }
    states = [old | extra, new | extra, new | extra | {"odd": bench.octets(3001, 7)}]
    stores = []
    for device in ("off", engine):
        store = df.create(
            f"memory://gpu-check-{device}-{kept}-{time.monotonic_ns()}", block_bytes=block_bytes
        )
        with store.writer(policy=df.Policy(device=device, device_baseline=kept)) as writer:
            for step, state in enumerate(states):
                writer.commit(step=step, tensors=state)
        stores.append(store)
    host, here = stores
    tensors = {name: tensor.contiguous().clone() for name, tensor in states[0].items()}
    live = live_module.Live(here.version(step=0), tensors, engine=engine)
    served = {name: bench.torch.zeros_like(tensor) for name, tensor in tensors.items()}
    follower = here.follower(device=engine)
    for step, state in enumerate(states):
        version = here.version(step=step, framework="pt")
        if (
            version.root != host.version(step=step).root
            or version.verify(state, engine=engine) != version.root
        ):
            return False
        if not np.array_equal(version.map.length, host.version(step=step).map.length):
            return False
        read = version.state_dict()
        if not all(np.array_equal(bits(read[name]), bits(state[name])) for name in state):
            return False
        if step and live.advance(version) != version.root:
            return False
        staged = follower.stage(step=step)
        if staged is not None:
            staged.apply_to(served)
            staged.commit()
        for found in (tensors, served):
            if not all(np.array_equal(bits(found[name]), bits(state[name])) for name in state):
                return False
    return True


# -- rates --------------------------------------------------------------------------------------------------


def measure(bench: Bench, report: Report, nbytes: int, tensor_bytes: int, block_bytes: int) -> None:
    """All rates for one size."""
    old, new = bench.versions(nbytes, tensor_bytes)
    size = sum(tensor.numel() * 2 for tensor in new.values())
    measure_kernels(bench, report, old, new, size, block_bytes)
    for kept in (True, False):
        if report.out_of_time:
            print("out of time: no more commits are measured")
            return
        measure_commit(bench, report, old, new, size, block_bytes, kept=kept)


def measure_kernels(
    bench: Bench, report: Report, old: State, new: State, size: int, block_bytes: int
) -> None:
    """The ceilings, and what each step takes by itself."""
    torch, engine = bench.torch, bench.engine
    views, before = flat_views(new.values()), flat_views(old.values())
    words = [view.view(torch.int64) for view in views]
    into = torch.empty_like(words[0])
    report.rate(
        size,
        "copy (ceiling; read and written)",
        2 * size,
        bench.seconds(lambda: [into.copy_(w) for w in words]),
    )
    floats = [word.view(torch.float32) for word in words]
    reads = [lambda: [word.max() for word in words], lambda: [word.sum() for word in floats]]
    report.rate(size, "read (ceiling)", size, min(bench.seconds(read, calls=3) for read in reads))
    host = torch.empty(views[0].shape, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    down = bench.seconds(lambda: host.copy_(views[0], non_blocking=True), calls=3)
    up = bench.seconds(lambda: into.view(torch.uint8).copy_(host, non_blocking=True), calls=3)
    report.rate(size, "device to host (ceiling)", host.numel(), down)
    report.rate(size, "host to device (ceiling)", host.numel(), up)
    table = BlockTable.of(views, block_bytes)
    for algorithm in ("xxh3-128", "blake3-256"):
        hashed = partial(digests_of, table, algorithm, engine=engine)
        report.rate(size, f"hash {algorithm}", size, bench.seconds(hashed, calls=5))
        tensors = list(new.values())
        called = partial(hash_blocks, tensors, block_bytes=block_bytes, algorithm=algorithm, engine=engine)
        report.rate(size, f"hash {algorithm}, as called", size, bench.seconds(called))
    widths = np.array([get_dtype(describe(tensor)[0]).width for tensor in new.values()], np.int64)
    pairs = Pairs(table, BlockTable.of(before, block_bytes), widths)
    counted = count_changes(pairs, engine=engine)
    counts = counted.blocks.cpu().numpy()
    count_seconds = bench.seconds(lambda: count_changes(pairs, engine=engine), calls=5)
    report.rate(size, "diff: count", 2 * size, count_seconds)
    window = Window(pairs, counts, counted.tiles, engine=engine)
    found = list(window.take())
    collect = bench.seconds(lambda: Window(pairs, counts, counted.tiles, engine=engine))
    report.rate(size, "diff: collect, and cross to the host", 2 * size, collect)
    changed = int(counts.sum())
    report.rate(size, "diff", 2 * size, count_seconds + collect, changed=f"{200 * changed / size:.3f} %")
    changes = [block_diff(table, block, *rest) for block, *rest in found]
    measure_encoding(report, size, table, before, found)

    def there_and_back() -> None:
        apply_to(BlockTable.of(before, block_bytes), changes, engine=engine)
        apply_to(BlockTable.of(before, block_bytes), changes, engine=engine, undo=True)

    apply_seconds = bench.seconds(there_and_back) / 2
    report.rate(
        size, "apply, from the host", size, apply_seconds, changes_per_s=f"{changed / apply_seconds:.3g}"
    )


def measure_encoding(
    report: Report, size: int, table: BlockTable, before: list[Any], found: list[Any]
) -> None:
    """What a writer's host does with positions and differences: make each new block, and encode it."""
    bf16, threads = get_dtype("BF16"), 8
    some = [(block, changes) for block, changes, _ in found if changes is not None][:1024]
    bases = []
    for block, _ in some:
        start, length = int(table.start[block]), int(table.length[block])
        bases.append(bits(before[int(table.tensor[block])][start : start + length]))

    def encode(work: tuple[Any, np.ndarray[Any, np.dtype[np.uint8]]]) -> int:
        (_, changes), base = work
        new = base.copy()
        changes.apply(new)
        return len(encode_block(new, base, bf16, positions=changes.positions)[1])

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        encoded = sum(pool.map(encode, zip(some, bases, strict=True)))
        seconds = time.perf_counter() - started
    total = sum(base.size for base in bases)
    changed = max(1, sum(len(changes.positions) for _, changes in some))
    report.rate(
        size, f"encode, {threads} threads of the host", total, seconds,
        of=f"{total / 1e6:.4g} MB", bytes_a_change=f"{encoded / changed:.3f}",
    )  # fmt: skip


def block_diff(table: BlockTable, block: int, changes: Any, content: Any) -> BlockDiff:
    """A block of a window, as `apply` takes it."""
    number = int(table.tensor[block])
    return BlockDiff(number, block - int(table.first[number]), changes, content)


def measure_commit(
    bench: Bench, report: Report, old: State, new: State, size: int, block_bytes: int, *, kept: bool
) -> None:
    """A whole commit of the next version, to memory; and where its time goes."""
    try:
        importlib.import_module("pyarrow")
        store = df.create(f"memory://gpu-check-{size}-{kept}-{time.monotonic_ns()}", block_bytes=block_bytes)
    except ImportError as error:
        print(f"skipped: commits ({error})")
        return
    device: Any = bench.engine
    policy = df.Policy(device=device, device_baseline=kept, threads=8)
    with store.writer(policy=policy) as writer:
        writer.commit(step=0, tensors=old)
        before = traffic.snapshot()
        infos, seconds = [], []
        for step, state in enumerate((new, old, new), 1):
            bench.wait()
            started = time.perf_counter()
            infos.append(writer.commit(step=step, tensors=state))
            seconds.append(time.perf_counter() - started)
        crossed = traffic.snapshot() - before
    median = statistics.median(seconds)
    info = infos[seconds.index(median)]
    per_commit = {
        f"{way} {cargo}": f"{count / 3e6:.1f} MB" for (way, cargo), count in crossed.items() if way != "host"
    }
    report.rate(
        size, f"commit, {'kept on device' if kept else 'kept on host'}", size, median,
        encode_ms=f"{info.timings['encode'] * 1e3:.1f}", **per_commit,
    )  # fmt: skip


# -- the command --------------------------------------------------------------------------------------------


def check_all(bench: Bench, report: Report, engine: Engine, block_bytes: int, *, small: bool) -> None:
    """Compare everything that one engine does with the CPU."""
    for algorithm in ("xxh3-128", "blake3-256"):
        for size in dict.fromkeys([256, block_bytes]):
            name = f"{algorithm} of {size}-byte blocks, {engine}"
            report.check(name, partial(check_hash, bench, algorithm, engine, size))
    torch = bench.torch
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64]
    for kind in kinds[:1] if small and engine == "triton" else kinds:  # the interpreter takes its time
        report.check(f"changes of {kind}, {engine}", partial(check_diff, bench, kind, engine, block_bytes))
    report.check(f"beyond 2^31 elements, {engine}", partial(check_far, bench, engine))
    for kept in (True, False):
        name = f"commits and a follower, kept on {'device' if kept else 'host'}, {engine}"
        report.check(name, partial(check_commits, bench, engine, kept, small))


def main(arguments: list[str] | None = None) -> int:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 8], help="GB of bf16 (default 1 8)")
    parser.add_argument("--small", action="store_true", help="a few kilobytes, also without a GPU")
    parser.add_argument("--engine", choices=["auto", "torch", "triton"], default="auto")
    parser.add_argument("--device", help="a torch device (default: cuda, or cpu with --small)")
    parser.add_argument("--limit", type=float, default=270, help="seconds after which nothing new is begun")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    torch: Any = importlib.import_module("torch")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu" if options.small else "")
    if not device:
        print("error: no CUDA device is here; --small runs the same steps on the CPU", file=sys.stderr)
        return 2
    engine: Engine = options.engine if options.engine != "auto" or device != "cpu" else "torch"
    bench = Bench(torch, device, engine, 1 if options.small else 5)
    report = Report(options.limit)
    serving = choose_engine(engine, bench.device)
    on = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "CPU"
    report.facts = {
        "device": on,
        "engine": serving,
        "torch": torch.__version__,
        "deltaformat": df.__version__,
    }
    print(", ".join(f"{name}: {value}" for name, value in report.facts.items()))

    both = bench.device.type == "cuda" and serving == "triton"
    engines: list[Engine] = ["triton", "torch"] if both else [serving]
    block_bytes = 1024 if options.small else 1 << 16
    for chosen in engines:
        check_all(bench, report, chosen, block_bytes, small=options.small)
    sizes = [1 << 15] if options.small else [round(size * GIGABYTE) for size in options.sizes]
    for size in sizes:
        if report.out_of_time:
            print(f"out of time: {size / 1e9:g} GB is not measured")
            break
        small = options.small
        try:
            measure(bench, report, size, 1 << 13 if small else 64 << 20, 4096 if small else 1 << 20)
        except Exception:  # what was measured before is told all the same
            traceback.print_exc()
            report.checks.append({"check": f"rates of {size} bytes", "result": "failed", "why": None})
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    print(report.table())
    if options.json is not None:
        result = {"facts": report.facts, "checks": report.checks, "rates": report.rates}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = [check["check"] for check in report.checks if check["result"] == "failed"]
    print(f"{len(failed)} of {len(report.checks)} checks failed{': ' if failed else ''}{'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
