"""What the tests of the command line share: running it, what holds for every run, and a store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import deltaformat as df
from deltaformat.cli import main

HOSTILE = "a\x1b[31m\n\u202eb\\"
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Run = Callable[..., Ran]


def check(ran: Ran) -> Ran:
    """What holds for every run: an error is one line on stderr, and nothing printed steers a terminal."""
    assert "Traceback" not in ran.out + ran.err
    assert "[internal]" not in ran.err
    if ran.err:
        assert ran.code != 0
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1
        assert ran.err.endswith("\n")
    for line in (ran.out + ran.err).split("\n"):
        assert line.isprintable(), line
    return ran


def state(seed: int, changes: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    wide = draw.standard_normal((64, 40)).astype(np.float32).astype(BF16)
    bits = wide.view(np.uint16)
    bits[np.arange(changes), 3] ^= 1
    return {
        HOSTILE: np.arange(6, dtype=np.int32).reshape(2, 3),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float64(1.5),
        "wide": wide,
    }


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """What runs a command line in this process and checks what holds for all."""

    def run(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return check(Ran(code, captured.out, captured.err))

    return run


def make_store(path: Path) -> Path:
    """A store with steps 0, 1 and 2 of `main`, whose weights differ in 0, 5 and 9 places from step 0."""
    store = df.create(path, block_bytes=256)
    with store.writer() as writer:
        for step, changes in enumerate((0, 5, 9)):
            writer.commit(
                step=step,
                tensors=state(1, changes),
                files={"config.json": b"{}"},
                metadata={"loss": 0.5, "s": step},
            )
    return path
