"""Which engine serves on a device: Triton's kernels, or torch's own operations, which are the reference."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

from deltaformat.errors import ErrorCode, MalformedError, UnsupportedError

__all__ = ["ENGINES", "Engine", "choose_engine", "current", "load_torch", "load_triton", "on_device"]

Engine: TypeAlias = Literal["auto", "torch", "triton"]
ENGINES = ("auto", "torch", "triton")


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
        UnsupportedError: Triton is not installed.
    """
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise UnsupportedError(
            ErrorCode.NOT_SUPPORTED,
            f'engine="triton" needs Triton, which cannot be imported ({error}); pip install deltaformat[gpu],'
            ' or use engine="torch"',
        ) from error
    return importlib.import_module(f"deltaformat.gpu.{module}")


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
        served = device.type == "cuda" and importlib.util.find_spec("triton") is not None
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
