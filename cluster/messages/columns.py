"""Convert columns of messages to the batches that a shard takes, and raw records of a fetch to columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.errors import Rejected
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.properties import TAGS
from raymq.store.records.properties import encode as encode_properties
from raymq.store.records.property_columns import PropertyColumns
from raymq.store.records.record import PUT_SCHEMA

from .keys import as_binary, key_properties, keys_of
from .message import SYSTEM_PROPERTIES

#: columns of `Consumer.poll_batch`. `properties` are encoded as in the log: `raymq.store.decode_properties` reads one
MESSAGE_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("queue_id", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("store_time_ms", pa.int64(), nullable=False),
        pa.field("born_time_ms", pa.int64(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("tag", pa.string()),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("properties", pa.binary(), nullable=False),
        pa.field("store_host", pa.string(), nullable=False),
        pa.field("physical_offset", pa.int64(), nullable=False),
    ]
)

_COLUMNS = ("body", "key", "tag", "properties", "born_time_ms")
#: column of MESSAGE_SCHEMA -> the one of RECORD_SCHEMA that it is made of, where their names differ
_STORED_AS = {"offset": "queue_offset", "key": "properties", "tag": "properties"}


def put_batch(data: pa.RecordBatch | pa.Table, *, now_ms: int) -> tuple[pa.RecordBatch, Any]:
    """Convert columns of messages to PUT_SCHEMA.

    Args: `data`: the columns `body` (binary or string), and optionally `key` (binary or string), `tag` (string),
    `properties` (encoded, or map<string, string>) and `born_time_ms` (int64). `now_ms`: the default of `born_time_ms`.
    Returns: the batch, and its keys as a binary column or None.
    Raises: Rejected naming a column that is missing, unknown or of another type.
    """
    names = data.schema.names
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown or "body" not in names:
        raise Rejected(
            f"the columns are {names}: `body` is required; key, tag, properties and born_time_ms are optional; "
            "other columns are refused",
            field=unknown[0] if unknown else "body",
            limit=", ".join(_COLUMNS),
        )

    rows = data.num_rows
    body = as_binary(data.column("body"), "body")
    keys = as_binary(data.column("key"), "key") if "key" in names else None

    tag = pa.nulls(rows, pa.string())
    if "tag" in names:
        tag = as_binary(data.column("tag"), "tag").cast(pa.string())

    properties = pa.nulls(rows, pa.binary())
    if "properties" in names:
        properties = _encoded(data.column("properties"))
    if keys is not None:
        properties = joined_properties(key_properties(keys), properties)

    born = pa.array(np.full(rows, now_ms, dtype=np.int64))
    if "born_time_ms" in names:
        born = data.column("born_time_ms").cast(pa.int64())
        born = born.combine_chunks() if isinstance(born, pa.ChunkedArray) else born

    return pa.RecordBatch.from_arrays([body, tag, properties, born], schema=PUT_SCHEMA), keys


def _encoded(column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not pa.types.is_map(column.type):
        return as_binary(column, "properties")

    found: list[bytes | None] = []
    for row, pairs in enumerate(column.to_pylist()):
        for name, _ in pairs or ():
            if name in SYSTEM_PROPERTIES:
                raise Rejected(
                    f"row {row}: property {name} belongs to the system; choose another name",
                    field="properties",
                    limit="not a system property",
                    row=row,
                )
        found.append(encode_properties(dict(pairs)) if pairs else None)

    return pa.array(found, pa.binary())


def joined_properties(left: pa.Array, right: pa.Array) -> pa.Array:
    """Join two columns of encoded properties row by row; null if both are null."""
    joined = pc.binary_join_element_wise(
        left, right, b"", null_handling="replace", null_replacement=b""
    )
    empty = pc.and_(left.is_null(), right.is_null())
    return pc.if_else(empty, pa.scalar(None, pa.binary()), joined)


def message_batch(
    shard: int, records: pa.Array, *, columns: Sequence[str] = tuple(MESSAGE_SCHEMA.names)
) -> pa.RecordBatch:
    """Convert raw records of a fetch to MESSAGE_SCHEMA, or to the named columns of it."""
    wanted = tuple(_STORED_AS.get(name, name) for name in columns)
    decoded = decode_records(records, columns=wanted)
    made: dict[str, pa.Array] = {}
    if "shard" in columns:
        made["shard"] = pa.array(np.full(len(records), shard, dtype=np.int32))
    if "key" in columns or "tag" in columns:
        properties = PropertyColumns(decoded.column("properties"))
        made["key"] = keys_of(properties)
        made["tag"] = properties.value(TAGS).cast(pa.string())

    found = [
        made[name] if name in made else decoded.column(_STORED_AS.get(name, name))
        for name in columns
    ]
    schema = pa.schema([MESSAGE_SCHEMA.field(name) for name in columns])
    return pa.RecordBatch.from_arrays(found, schema=schema)
