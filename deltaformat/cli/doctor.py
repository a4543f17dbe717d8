"""The command `doctor`: what serves on this machine; what a place can do for a store."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

import deltaformat as df
from deltaformat.cli.options import Commands
from deltaformat.cli.output import Column, Console, plain, table
from deltaformat.encodings import native
from deltaformat.examine import examine
from deltaformat.storage import open_storage

__all__ = ["register"]

LIBRARIES = ("numpy", "ml_dtypes", "pyarrow", "zstandard", "xxhash", "obstore", "tqdm")
OPTIONAL = ("torch", "triton", "blake3", "huggingface_hub")


def register(commands: Commands) -> None:
    """Declare `doctor`."""
    parser = commands.add(
        "doctor",
        _doctor,
        help="say what serves on this machine, or what a directory or bucket can do for a store",
        example="deltaformat doctor s3://bucket/run",
    )
    parser.add_argument(
        "store",
        metavar="STORE",
        nargs="?",
        help="try every operation that a store needs there, on probe objects that are deleted again; exits"
        " with 0 if a store can be read there, and says whether it can be written",
    )


def _doctor(options: argparse.Namespace, console: Console) -> int:
    if options.store is not None:
        return _examine(options.store, console)
    kernels = native.kernels
    available = [] if kernels is None else kernels.levels()
    versions = {name: _version(name) for name in (*LIBRARIES, *OPTIONAL)}
    console.document(
        {
            "deltaformat": df.__version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": platform.machine(),
            "engine": "numpy" if kernels is None else "native",
            "level": None if kernels is None else kernels.level(),
            "levels": available,
            "why_not_native": native.why_not or None,
            "libraries": versions,
        }
    )
    if kernels is not None:
        engine = f"native kernels, {kernels.level()} (this CPU has: {', '.join(available)})"
    else:
        engine = f"NumPy; no native kernels: {plain(native.why_not)}"
    rows = [
        ["deltaformat", df.__version__],
        ["python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"],
        ["engine", engine],
        *([name, version or "not installed"] for name, version in versions.items()),
    ]
    console.say(table([Column("what", left=True), Column("which", left=True)], rows))
    return 0


def _examine(place: str, console: Console) -> int:
    """Try out a place; 0 if a store can be read there: what else it can do is said."""
    storage = open_storage(place)
    found = examine(storage)
    console.document(
        {
            "store": storage.url,
            "verdict": found.verdict,
            "reading": found.can("reading"),
            "writing": found.can("reading") and found.can("writing"),
            "single_writer": found.can("reading") and found.single_writer,
            "collecting": found.can("reading") and found.single_writer and found.can("collecting"),
            "checks": [
                {"name": check.name, "ok": check.ok, "detail": check.detail, "needed_for": check.needed_for}
                for check in found.checks
            ],
        }
    )
    rows = [
        [check.name, "yes" if check.ok else "NO", check.needed_for, plain(check.detail)]
        for check in found.checks
    ]
    headings = ("check", "ok", "needed for", "found")
    console.say(table([Column(heading, left=True) for heading in headings], rows))
    console.say(f"{plain(storage.url)}: {found.verdict}")
    return 0 if found.can("reading") else 1


def _version(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
