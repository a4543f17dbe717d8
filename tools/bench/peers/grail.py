"""PULSE's codec in grail: gaps in 8 and 16 bits and values, in one zstd frame of level 1.

Layout (its format 3.1): u32 length of a JSON header, the header, then per tensor: row gaps, column gaps,
values. Positions are (row, column); a row gap counts from the row of the change before, a column gap too
where the row is the same, and from 0 otherwise. Gaps are u8 (rows) and u16 (columns) where all of a tensor's
fit, int32 otherwise.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaformat.bench.codecs import Bits, Payload
from peers.tensorwise import Array, Bytes, Tensorwise

__all__ = ["Grail"]

DELTA = "delta"


class Grail(Tensorwise):
    """Gaps + values + zstd-1."""

    name = "gaps + zstd-1"
    note = "PULSE/grail: u8 and u16 gaps, values"

    def encode(self, old: Bits, new: Bits) -> dict[str, bytes]:
        """One frame for all tensors that changed."""

        def one(name: str) -> tuple[dict[str, Any], list[Bytes]] | None:
            array = new[name]
            positions = self.differ(old[name], array)
            if not positions.size:
                return None
            rows, columns = np.divmod(positions, _columns(array))
            row_gaps = np.diff(rows, prepend=0)
            column_gaps = np.diff(columns, prepend=0)
            np.copyto(column_gaps, columns, where=row_gaps != 0)
            parts: list[npt.NDArray[Any]] = [
                row_gaps.astype(_fitting(row_gaps, np.uint8, np.uint16)),
                column_gaps.astype(_fitting(column_gaps, np.uint16)),
                array.reshape(-1)[positions],
            ]
            about = {
                "name": name,
                "shape": list(array.shape),
                "num_nonzero": int(positions.size),
                "dtypes": [part.dtype.str for part in parts],
            }
            return about, [part.view(np.uint8) for part in parts]

        made = [made for made in self.map(one, list(new)) if made is not None]
        if not made:
            return {}
        header = json.dumps({"version": 31, "tensors": [about for about, _ in made]}).encode()
        head = np.frombuffer(len(header).to_bytes(4, "little") + header, np.uint8)
        chunks = [head, *(part for _, parts in made for part in parts)]
        content = np.concatenate(chunks, out=self.buffer(sum(chunk.size for chunk in chunks)))
        return {DELTA: self.compress(content)}

    def apply(self, payload: Payload, target: Bits) -> None:
        """Write the new elements in place."""
        if DELTA not in payload:
            return
        content = self.decompress(payload[DELTA])
        start = 4 + int.from_bytes(content[:4].tobytes(), "little")
        works = []
        for about in json.loads(content[4:start].tobytes())["tensors"]:
            parts = []
            for dtype in map(np.dtype, about["dtypes"]):
                end = start + about["num_nonzero"] * dtype.itemsize
                parts.append(np.frombuffer(content[start:end].data, dtype))
                start = end
            works.append((about["name"], parts))

        def one(work: tuple[str, list[npt.NDArray[Any]]]) -> None:
            array, (row_gaps, column_gaps, values) = target[work[0]], work[1]
            # A running sum over columns that begins anew at each row: less what it had before the row.
            sums = np.cumsum(column_gaps, dtype=np.int64)
            begins = np.flatnonzero(row_gaps)
            begins = begins if begins.size and not begins[0] else np.append(0, begins)
            before = sums[begins] - column_gaps[begins]
            sums -= np.repeat(before, np.diff(begins, append=sums.size))
            sums += np.cumsum(row_gaps, dtype=np.int64) * _columns(array)
            array.reshape(-1)[sums] = values

        self.map(one, works)


def _columns(array: Array) -> int:
    return max(1, array.size // array.shape[0]) if array.ndim > 1 and array.shape[0] else 1


def _fitting(gaps: npt.NDArray[Any], *dtypes: type[np.unsignedinteger[Any]]) -> npt.DTypeLike:
    if dtypes[0] is np.uint8:  # rows have no form of 16 bits
        dtypes = dtypes[:1]
    most = int(gaps.max())
    return next((dtype for dtype in dtypes if most <= np.iinfo(dtype).max), np.int32)
