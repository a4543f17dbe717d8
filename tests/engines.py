"""What can serve the sparse codec here: NumPy, and the kernels for each instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deltaformat.encodings import native

KERNELS, WHY_NOT = native.load()
LEVELS = KERNELS.levels() if KERNELS is not None else []


@contextmanager
def served_by(engine: str) -> Iterator[None]:
    """Let this engine serve: `numpy`, or an instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        if engine == "numpy":
            patch.setattr(native, "kernels", None)
            yield
            return
        assert KERNELS is not None
        before = KERNELS.level()
        patch.setattr(native, "kernels", KERNELS)
        KERNELS.level(engine)
        try:
            yield
        finally:
            KERNELS.level(before)
