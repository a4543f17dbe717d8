"""The command `doctor`: what serves on this machine, and with which versions."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

import deltaformat as df
from deltaformat.cli.options import Commands
from deltaformat.cli.output import Column, Console, plain, table
from deltaformat.encodings import native

__all__ = ["register"]

LIBRARIES = ("numpy", "ml_dtypes", "pyarrow", "zstandard", "xxhash", "obstore", "tqdm")
OPTIONAL = ("torch", "triton", "blake3")


def register(commands: Commands) -> None:
    """Declare `doctor`."""
    commands.add(
        "doctor",
        _doctor,
        help="say what serves here: kernels or NumPy, and library versions",
        example="deltaformat doctor",
    )


def _doctor(options: argparse.Namespace, console: Console) -> int:
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


def _version(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
