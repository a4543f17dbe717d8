"""Which engine serves on a device: Triton's kernels, or torch's own operations, which are the reference."""

from __future__ import annotations

import importlib
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError

__all__ = ["ENGINES", "Engine", "choose_engine", "current", "load_torch", "load_triton", "on_device"]

Engine: TypeAlias = Literal["auto", "torch", "triton"]
ENGINES = ("auto", "torch", "triton")
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


def choose_engine(engine: str, device: Any) -> Literal["torch", "triton"]:
    """Tell which engine works for tensors on `device`.

    Args:
        engine: `auto` takes Triton on CUDA devices where it is installed, and torch everywhere else; `triton`
            on the CPU works under Triton's interpreter (TRITON_INTERPRET=1), for tests.
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
    if engine == "auto":
        served = device.type == "cuda" and not _without_triton()
        return "triton" if served else "torch"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            'Triton\'s kernels run on CUDA devices only; use engine="torch" here',
            where=str(device),
        )
    load_triton("xxh3_triton")  # says what to install
    return "triton"


def current(device: Any) -> AbstractContextManager[object]:
    """Make `device` the one that Triton launches on: it takes the current one, whatever it is given."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[object] = load_torch().cuda.device(device)
    return context


def on_device(tensor: Any) -> bool:
    """Whether a torch tensor is in a device's memory rather than the host's."""
    return bool(tensor.device.type not in ("cpu", "meta"))
