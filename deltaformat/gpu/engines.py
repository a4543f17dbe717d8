"""Which engine serves on a device: Triton's kernels, or torch's own operations, which are the reference."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

from deltaformat.errors import ErrorCode, LimitError, MalformedError, UnsupportedError
from deltaformat.torchtensors import is_torch

__all__ = [
    "ENGINES",
    "DeviceChoice",
    "Engine",
    "check_device_choice",
    "choose_engine",
    "current",
    "load_torch",
    "load_triton",
    "on_device",
    "signed_integer",
    "stays_on_device",
]

Engine: TypeAlias = Literal["auto", "torch", "triton"]
ENGINES = ("auto", "torch", "triton")
DeviceChoice: TypeAlias = Literal["auto", "off", "torch", "triton"]
_OLDEST = (3, 6)  # before, its interpreter or compiler lacks what the kernels use


def load_torch() -> Any:
    """Import torch.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            f"work on a device needs torch, which cannot be imported ({error}); pip install deltaformat[gpu]",
        ) from error


def signed_integer(width: int) -> Any:
    """Return the integer of `width` bytes as which torch compares and adds elements: bits, wrapping."""
    torch = load_torch()
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]


def load_triton(module: str) -> Any:
    """Import a module of kernels, and Triton with it.

    Args:
        module: Its name in this package.

    Raises:
        UnsupportedError: Triton is not installed, or too old.
    """
    why_not = _without_triton()
    if why_not:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            f'engine="triton" needs Triton {_OLDEST[0]}.{_OLDEST[1]} or newer ({why_not});'
            ' pip install deltaformat[gpu], or use engine="torch"',
        )
    return importlib.import_module(f"deltaformat.gpu.{module}")


def _without_triton() -> str:
    """Why Triton does not serve; nothing if it does."""
    try:
        version = str(importlib.import_module("triton").__version__)
    except ImportError as error:
        return f"it cannot be imported: {error}"
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return "" if found >= _OLDEST else f"this is {version}"


def _has_compiler() -> bool:
    """Whether Triton finds the C compiler with which it makes what launches a kernel."""
    return bool(os.environ.get("CC")) or any(map(shutil.which, ("cc", "gcc", "clang")))


def choose_engine(engine: str, device: Any) -> Literal["torch", "triton"]:
    """Tell which engine works for tensors on `device`.

    Args:
        engine: `auto` takes Triton on CUDA devices where it is installed and finds a C compiler, and torch
            everywhere else; `triton` on the CPU works under Triton's interpreter (TRITON_INTERPRET=1), for
            tests.
        device: A torch.device.

    Raises:
        MalformedError: There is no such engine.
        UnsupportedError: It cannot work there.
    """
    if engine not in ENGINES:
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"engine is one of {', '.join(map(repr, ENGINES))}, not {engine!r}",
            where="engine",
        )
    if sys.byteorder == "big":
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED, "work on a device needs a little-endian machine", where=str(device)
        )
    if engine == "torch":
        return "torch"
    # The interpreter reads addresses as the host's, so it is for the host's tensors alone.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    possible = interpreted != (device.type == "cuda")
    if engine == "auto":
        served = device.type == "cuda" and possible and _has_compiler() and not _without_triton()
        return "triton" if served else "torch"
    if not possible:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            "Triton's kernels run on CUDA devices, and in its interpreter (TRITON_INTERPRET=1) on the CPU"
            ' only; use engine="torch" here',
            where=str(device),
        )
    load_triton("xxh3_triton")  # says what to install
    return "triton"


@contextmanager
def current(device: Any) -> Iterator[None]:
    """Make `device` the one that Triton launches on: it takes the current one, whatever it is given.

    Raises:
        LimitError: Memory of the device ran out.
    """
    torch = load_torch()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        try:
            yield
        except torch.OutOfMemoryError as error:
            said = str(error).partition("\n")[0][:200]
            raise LimitError(
                ErrorCode.LIMIT_EXCEEDED,
                f"the device has not enough memory left ({said}); free some, give fewer tensors at a time, or"
                ' let a writer do without it: Policy(device_baseline=False), or device="off"',
                where=str(device),
            ) from error


def on_device(tensor: Any) -> bool:
    """Whether a torch tensor is in a device's memory rather than the host's."""
    return bool(tensor.device.type not in ("cpu", "meta"))


def check_device_choice(choice: str, *, where: str) -> None:
    """Refuse what is no choice of what works on tensors where they are.

    Raises:
        MalformedError: input-invalid.
    """
    if choice not in (*ENGINES, "off"):
        raise MalformedError(
            ErrorCode.INPUT_INVALID,
            f"device is 'auto', 'off', 'torch' or 'triton', not {choice!r}",
            where=where,
        )


def stays_on_device(tensor: object, choice: DeviceChoice) -> bool:
    """Whether a tensor is worked on where it is: with `auto` those on a device, with an engine's name all."""
    if choice == "off" or not is_torch(tensor):
        return False
    return choice != "auto" or on_device(tensor)
