"""Manifests as Arrow files (SPEC 11.1): the only module that calls pyarrow, and not before it is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaformat.arrow_guard import check_arrow_file
from deltaformat.errors import DeltaFormatError, ErrorCode, LimitError, MalformedError

__all__ = ["METADATA_ENTRY", "SCHEMA", "Lists", "check_metadata", "read_arrow", "write_arrow"]

METADATA_ENTRY = b"deltaformat"

SCHEMA: Mapping[str, str] = {
    "name": "utf8",
    "dtype": "utf8",
    "shape": "list<int64>",
    "digest": "list<fixed_size_binary[D]>",
    "fresh": "list<uint8>",
    "depth": "list<uint8>",
    "pack": "list<uint32>",
    "gap": "list<int64>",
    "length": "list<uint32>",
    "encoding": "list<uint8>",
}
"""Columns and their types, in the words of SPEC's table."""

_TEXT = ("name", "dtype")


@dataclass(frozen=True, slots=True)
class Lists:
    """A column of lists: how many values each row has, and all values; digests have shape (values, D)."""

    counts: npt.NDArray[np.int64]
    values: npt.NDArray[Any]


def write_arrow(
    text: Mapping[str, tuple[str, ...]], lists: Mapping[str, Lists], metadata: bytes
) -> memoryview:
    """Write one record batch as an Arrow file: no dictionaries, no compression, nothing nullable (DF-MAN-01).

    Args:
        text: The columns `name` and `dtype`.
        lists: The other columns of `SCHEMA`.
        metadata: Value of the schema's custom metadata entry.
    """
    import pyarrow as pa

    arrays = {name: pa.array(text[name], pa.utf8()) for name in _TEXT}
    for name, column in lists.items():
        kind = _type(SCHEMA[name], column.values.shape[-1])
        values = np.ascontiguousarray(column.values)
        child = pa.Array.from_buffers(kind.value_type, len(values), [None, pa.py_buffer(values)], 0)
        offsets = np.zeros(len(column.counts) + 1, np.int32)
        np.cumsum(column.counts, out=offsets[1:])
        buffers = [None, pa.py_buffer(offsets)]
        arrays[name] = pa.Array.from_buffers(kind, len(column.counts), buffers, 0, 0, [child])
    fields = [pa.field(name, arrays[name].type, nullable=False) for name in SCHEMA]
    schema = pa.schema(fields, metadata={METADATA_ENTRY: metadata})
    batch = pa.RecordBatch.from_arrays([arrays[name] for name in SCHEMA], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def read_arrow(
    data: bytes, *, digest_bytes: int, max_rows: int, where: str = ""
) -> tuple[dict[str, list[str]], dict[str, Lists]]:
    """Read a file that `check_metadata` has let pass; unknown columns are left alone (DF-MAN-01).

    Args:
        data: The whole file. The arrays returned are views of it.
        digest_bytes: D of the schema.
        max_rows: Refuse more rows than these, before an object is made for each.
        where: What an error should name.

    Returns:
        The columns `name` and `dtype`, and the columns of lists.

    Raises:
        LimitError: There are more rows than `max_rows`.
        MalformedError: It is not valid Arrow; or a column is missing, doubled, of another type or has nulls.
    """
    import pyarrow as pa

    with _arrow_errors(pa, where):
        buffer = pa.py_buffer(data)
        schema = pa.ipc.open_file(buffer).schema
        indices = [schema.get_all_field_indices(name) for name in SCHEMA]
        for name, found in zip(SCHEMA, indices, strict=True):
            if len(found) != 1:
                raise _invalid(f"column `{name}` is missing or doubled (DF-MAN-01)", where)
            wanted = _type(SCHEMA[name], digest_bytes)
            kind = schema.field(found[0]).type
            if not _same_type(kind, wanted):
                raise _invalid(
                    f"column `{name}` is {str(kind)[:80]} instead of {wanted} (DF-MAN-01)",
                    where,
                )
        options = pa.ipc.IpcReadOptions(
            included_fields=[found[0] for found in indices], use_threads=False, ensure_native_endian=False
        )
        batch = pa.ipc.open_file(buffer, options=options).get_batch(0)
        if batch.num_rows > max_rows:
            raise LimitError(
                ErrorCode.LIMIT_EXCEEDED, f"{batch.num_rows} tensors exceed {max_rows}", where=where
            )
        columns = {name: batch.column(name) for name in SCHEMA}
        for name, column in columns.items():
            column.validate(full=True)
            if len(column) != batch.num_rows or column.null_count:
                raise _invalid(f"column `{name}` has nulls (DF-MAN-01)", where)
        text = {name: columns[name].to_pylist() for name in _TEXT}
        return text, {name: _lists(columns[name], name, where) for name in SCHEMA if name not in _TEXT}


def check_metadata(data: bytes, *, where: str = "") -> bytes:
    """Guard a file before anything else reads it, and return the metadata entry of SPEC 11.3.

    Raises:
        MalformedError: The guard refuses it, or the entry is missing (manifest-invalid).
        LimitError: Its schema is too large.
    """
    value = check_arrow_file(memoryview(data), where=where).get(METADATA_ENTRY)
    if value is None:
        raise _invalid("the schema's metadata has no entry `deltaformat` (SPEC 11.3)", where)
    return value


def _lists(column: Any, name: str, where: str) -> Lists:
    # Without rows the buffer of offsets may be empty, too.
    offsets = column.offsets.to_numpy().astype(np.int64) if len(column) else np.zeros(1, np.int64)
    start, end = int(offsets[0]), int(offsets[-1])
    child = column.values.slice(start, end - start)
    if child.null_count:
        raise _invalid(f"column `{name}` has nulls in its lists (DF-MAN-01)", where)
    if name == "digest":
        width = child.type.byte_width
        values = np.frombuffer(child.buffers()[1] or b"", np.uint8)
        values = values[child.offset * width : (child.offset + len(child)) * width].reshape(-1, width)
    else:
        values = child.to_numpy(zero_copy_only=True)
    return Lists(np.diff(offsets), values)


def _type(words: str, digest_bytes: int) -> Any:
    import pyarrow as pa

    match = re.fullmatch(r"list<(.*)>", words)
    if match is None:
        return pa.utf8()
    return pa.list_(pa.binary(digest_bytes) if "[D]" in words else pa.type_for_alias(match[1]))


def _same_type(found: Any, wanted: Any) -> bool:
    """Nullability and the names of list children are free (DF-MAN-01)."""
    import pyarrow as pa

    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found) and found.value_type.equals(wanted.value_type))
    return bool(found.equals(wanted))


@contextmanager
def _arrow_errors(pa: Any, where: str) -> Iterator[None]:
    try:
        yield
    except DeltaFormatError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _invalid(f"it is not valid Arrow: {str(error)[:200]}", where) from None


def _invalid(message: str, where: str) -> MalformedError:
    return MalformedError(ErrorCode.MANIFEST_INVALID, message, where=where)
