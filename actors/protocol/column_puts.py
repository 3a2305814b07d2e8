"""A put of Arrow columns, as metadata and a batch, for every protocol. Few rows travel by small_puts.py instead.

A stream has one schema, PUT_SCHEMA. A put that has columns of MORE_SCHEMA says so in its metadata:

metadata  the JSON of actors/api/puts.py; or _MORE, the size of the JSON in 4 bytes, the JSON with "more", the names of
          these columns, blanks up to a multiple of 8 bytes, and the columns as Arrow writes a batch
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from raymq.store.base.errors import Rejected
from raymq.store.records.record import MORE_SCHEMA, PUT_SCHEMA
from raymq.store.records.small_batch import more_columns

from . import flight_messages

#: begins the metadata of a put that has more columns; neither JSON, nor small puts, nor GOAWAY begin so
_MORE = bytes([2])
_SIZE = struct.Struct("<BI")
_ALIGN = 8


def pack_put(meta: Mapping[str, object], batch: pa.RecordBatch) -> tuple[bytes, pa.RecordBatch]:
    """A put as a message: its metadata, and its columns of PUT_SCHEMA."""
    more = more_columns(batch)
    if not more:
        return flight_messages.pack(meta), batch

    text = flight_messages.pack({**meta, "more": list(more)})
    begin = _SIZE.size + len(text)
    columns = pa.record_batch(list(more.values()), schema=_more_schema(list(more))).serialize()
    head = _SIZE.pack(_MORE[0], len(text)) + text
    plain = pa.RecordBatch.from_arrays(batch.columns[: len(PUT_SCHEMA)], schema=PUT_SCHEMA)
    return b"".join((head.ljust(begin + -begin % _ALIGN), columns)), plain


def unpack_meta(metadata: bytes) -> tuple[dict[str, Any], bytes]:
    """The metadata of a message of `pack_put`, and the bytes of its further columns. Raises: ValueError."""
    if metadata[:1] != _MORE:
        return flight_messages.unpack(metadata), b""
    if len(metadata) < _SIZE.size:
        raise ValueError("the metadata end before their size")
    stop = _SIZE.size + _SIZE.unpack_from(metadata)[1]
    return flight_messages.unpack(metadata[_SIZE.size : stop]), metadata[stop + -stop % _ALIGN :]


def unpack_columns(
    meta: Mapping[str, object], batch: pa.RecordBatch | pa.Buffer | None, rest: bytes
) -> pa.RecordBatch:
    """All columns of a message of `pack_put`.

    Args: `meta`, `rest`: of `unpack_meta`. `batch`: its columns of PUT_SCHEMA, perhaps still as Arrow writes them.
    Raises: Rejected, ValueError.
    """
    if batch is None:
        raise Rejected("the message has no rows", field="batch", limit="a record batch")
    if not isinstance(batch, pa.RecordBatch):
        batch = _read(batch, PUT_SCHEMA)
    if "more" not in meta:
        return batch
    schema = _more_schema(meta["more"])
    more = _read(pa.py_buffer(rest), schema)
    if more.num_rows != batch.num_rows:
        raise ValueError(f"{more.num_rows} rows of {schema.names}, {batch.num_rows} of the others")
    columns = [*batch.columns, *more.columns]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*batch.schema, *schema]))


def _read(data: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    try:
        return pa.ipc.read_record_batch(data, schema)
    except (pa.ArrowException, EOFError, OSError) as error:
        raise ValueError(f"no batch of {schema.names}: {error}") from error


def _more_schema(names: object) -> pa.Schema:
    """The columns of MORE_SCHEMA that are named. Raises: Rejected for another name or order."""
    found = [name for name in MORE_SCHEMA.names if isinstance(names, list) and name in names]
    if found != names or not found:
        raise Rejected(
            f"the put names the columns {names!r}; it may have some of {MORE_SCHEMA.names}, in this order",
            field="more",
            limit=", ".join(MORE_SCHEMA.names),
            found=names,
        )
    return pa.schema([MORE_SCHEMA.field(name) for name in found])
