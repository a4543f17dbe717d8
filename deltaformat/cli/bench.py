"""The command `bench`: what a step costs in bytes and time, beside peers and entropy bounds."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deltaformat.cli import bench_tables
from deltaformat.cli.options import CommandError, Commands, positive
from deltaformat.cli.output import Console, plain

__all__ = ["register"]

FORMATS = (".png", ".svg")


def register(commands: Commands) -> None:
    """Declare `bench`."""
    parser = commands.add(
        "bench",
        _bench,
        help="measure what a step costs in bytes and time, beside peers where they are at hand",
        example="deltaformat bench --quick --json bench.json",
        json_file=True,
    )
    parser.add_argument("--quick", action="store_true", help="under a minute; the whole takes up to 15")
    parser.add_argument(
        "--trace",
        metavar="DIR",
        help="a store of a real training, or a directory of such (default: synthetic weights)",
    )
    parser.add_argument(
        "--mb", type=positive, metavar="N", help="size of the tiled input (default: 1000; quick: 48)"
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help="steps to measure (default: 3)")
    parser.add_argument(
        "--peers",
        metavar="DIR",
        help="the peers (default: tools/bench/peers beside the package, if it is there)",
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw a .png or .svg; needs matplotlib")
    parser.add_argument(
        "--rebase", action="store_true", help="measure chain lengths over many steps instead of all else"
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="steps of --rebase (default: 200; quick: 24)"
    )
    parser.add_argument(
        "--chains",
        type=_chains,
        default=(4, 8, 16, 32, 64),
        metavar="N,N",
        help="of --rebase, beside Policy.smallest and .lightest (default: 4,8,16,32,64)",
    )


def _bench(options: argparse.Namespace, console: Console) -> int:
    # What cannot be written in the end is told before the work.
    if isinstance(options.json, str):
        console.json = False
        _check_place(options.json)
    if options.plot is not None:
        _check_place(options.plot)
        if Path(options.plot).suffix.lower() not in FORMATS:
            raise CommandError("plot-format", f"--plot takes a file that ends with {' or '.join(FORMATS)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError("not-installed", "--plot needs matplotlib: pip install 'deltaformat[bench]'")
    document = _rebase(options) if options.rebase else _run(options)
    console.say(bench_tables.rebase(document) if options.rebase else bench_tables.render(document))
    console.document(document)
    if isinstance(options.json, str):
        Path(options.json).write_text(
            json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
    if options.plot is not None:
        from deltaformat.cli import bench_plot

        bench_plot.draw(document, options.plot)
    return 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    from deltaformat.bench.codecs import find_peers
    from deltaformat.bench.run import FULL, QUICK, run

    profile = QUICK if options.quick else FULL
    profile = replace(
        profile, megabytes=options.mb or profile.megabytes, rounds=options.rounds or profile.rounds
    )
    peers = find_peers() if options.peers is None else Path(options.peers)
    if peers is None:
        _tell("no peers: tools/bench/peers is not beside the package; name it with --peers")
    document: dict[str, Any] = _guarded(lambda: run(profile, trace=options.trace, peers=peers, report=_tell))
    return document


def _rebase(options: argparse.Namespace) -> dict[str, Any]:
    from deltaformat.bench.rebase import chain_policies, measure_rebase, synthetic_states, trace_states

    steps = options.steps or (24 if options.quick else 200)
    weights = 2_000_000 if options.quick else 8_000_000
    states = synthetic_states(weights, steps) if options.trace is None else trace_states(options.trace, steps)
    policies = chain_policies(options.chains)
    rows = _guarded(lambda: measure_rebase(states, policies, block_bytes=1 << 18, report=_tell))
    source = "synthetic" if options.trace is None else options.trace
    return {"source": source, "block_bytes": 1 << 18, "rebase": [asdict(row) for row in rows]}


def _guarded(measure: Callable[[], Any]) -> Any:
    """What may be wrong with what was given, as one line."""
    from deltaformat.bench.coding import LossyError

    try:
        return measure()
    except LossyError as error:
        raise CommandError("not-lossless", str(error)) from error
    except ValueError as error:
        if type(error) is not ValueError:  # errors of the format are told as such
            raise
        raise CommandError("trace", str(error)) from error
    except ImportError as error:
        raise CommandError("peers", f"--peers: {error}") from error
    finally:
        _tell("")


def _tell(text: str) -> None:
    """Say on stderr what is being done: one line that is replaced on a terminal, a line each elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{plain(text)[:120]}")
    elif text:
        sys.stderr.write(f"{plain(text)}\n")
    sys.stderr.flush()


def _check_place(path: str) -> None:
    if not Path(path).resolve().parent.is_dir():
        raise CommandError("no-directory", f"{plain(path)}: there is no such directory to write to")


def _chains(text: str) -> tuple[int, ...]:
    """Chain lengths: integers with commas."""
    found = tuple(positive(part) for part in text.split(","))
    if not all(2 <= length <= 64 for length in found):
        raise argparse.ArgumentTypeError("chains have 2 to 64 pieces")
    return found
