"""The columns of a read: their types in Spark and in Arrow, and how raw records of a fetch become these columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.client.messages.columns import FetchedRows
from raymq.client.messages.fields import INDEX_KEYS
from raymq.client.messages.topic_schema import quoted_name, spark_type
from raymq.client.messages.topic_values import TopicValues
from raymq.client.messages.user_properties import (
    as_mask,
    as_text,
    list_offsets,
    split_texts,
    user_properties,
)
from raymq.store.base.errors import Rejected


class ColumnType(NamedTuple):
    """The type of a column, as Spark and as Arrow write it."""

    spark: str
    arrow: pa.DataType


_TEXT = ColumnType("string", pa.string())
_BYTES = ColumnType("binary", pa.binary())
_INT = ColumnType("int", pa.int32())
_LONG = ColumnType("bigint", pa.int64())
_TIME = ColumnType("timestamp", pa.timestamp("us", tz="UTC"))
_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])

#: column -> its type. The first seven are those of the Kafka connector, and so is `headers`
COLUMNS = {
    "key": _BYTES,
    "value": _BYTES,
    "topic": _TEXT,
    "partition": _INT,
    "offset": _LONG,
    "timestamp": _TIME,
    "timestampType": _INT,
    "headers": ColumnType(
        "array<struct<key:string,value:binary>>", pa.list_(pa.field("element", _HEADER))
    ),
    "tag": _TEXT,
    "properties": ColumnType("map<string,string>", pa.map_(pa.string(), pa.string())),
    "index_keys": ColumnType("array<string>", pa.list_(pa.field("element", pa.string()))),
    "deliver_at": _TIME,
    "shard": _INT,
    "message_flag": _INT,
    "sys_flag": _INT,
    "born_host": _TEXT,
}
#: those that only a read has which names them: they are RocketMQ's
BY_NAME = ("message_flag", "sys_flag", "born_host")

#: Kafka's code for "log append time"
_LOG_APPEND_TIME = 1
_DELIVERY_TIME = "TIMER_DELIVER_MS"
_MILLISECONDS = r"^(?P<v>[0-9]{1,15})$"


#: values that are bytes
_BYTES_ALONE = TopicValues("")


def default_names(values: TopicValues, *, has_headers: bool) -> tuple[str, ...]:
    """The columns of a read that names none. A schema's columns take the place of `value`."""
    found: list[str] = []
    for name in COLUMNS:
        if name == "value":
            found += values.names
        elif name == "headers":
            found += [name] * has_headers
        elif name not in BY_NAME:
            found.append(name)
    return tuple(found)


def _kinds(values: TopicValues) -> dict[str, ColumnType]:
    own = {} if values.schema is None else {each.name: each.type for each in values.schema}
    return COLUMNS | {name: ColumnType(spark_type(kind), kind) for name, kind in own.items()}


def spark_schema(names: Sequence[str], values: TopicValues = _BYTES_ALONE) -> str:
    """The columns as a schema string of Spark."""
    found = {name: f"{name} {kind.spark}" for name, kind in COLUMNS.items()}
    for field in values.schema or ():
        found[field.name] = f"{quoted_name(field.name)} {spark_type(field.type, quoted=True)}"
    return ", ".join(found[name] for name in names)


def check_columns(
    wanted: Sequence[tuple[str, str]], values: TopicValues = _BYTES_ALONE
) -> tuple[str, ...]:
    """Check a schema that a user gave.

    Args: `wanted`: name and type of each column, the type as Spark's `simpleString` writes it. `values`: of the topic.
    Returns: the names. Raises: Rejected naming a column that no message has, or one of another type.
    """
    kinds = _kinds(values)
    for name, kind in wanted:
        column = kinds.get(name)
        if column is None:
            message = f"unknown column {name!r} in the schema; a topic has {', '.join(kinds)}"
            raise Rejected(message, field=name, limit=", ".join(kinds), found=name)
        if kind != column.spark:
            message = f"column {name} has type {kind} in the schema; declare it as {column.spark}"
            raise Rejected(message, field=name, limit=column.spark, found=kind)
    return tuple(name for name, _ in wanted)


def columns(
    records: pa.Array, shard: int, names: Collection[str], values: TopicValues = _BYTES_ALONE
) -> pa.RecordBatch:
    """Raw records of a fetch as the named columns. Raises: Corrupt for a body that is not a row of the schema."""
    own = [name for name in names if name not in COLUMNS]
    needed = {_MADE_OF.get(name, name) for name in names}
    if own:
        # The offset names a damaged row.
        needed |= {"body", "offset"}
    rows = FetchedRows(shard, records, columns=needed)
    decoded: dict[str, pa.Array] = {}
    if own:
        arrays = values.decode(rows.column("body"), rows.column("offset"), names=own)
        decoded = dict(zip(own, arrays, strict=True))

    kinds = _kinds(values)
    found = [
        decoded[name] if name in decoded else _column(name, rows).cast(kinds[name].arrow)
        for name in names
    ]
    schema = pa.schema([(name, kinds[name].arrow) for name in names])
    return pa.RecordBatch.from_arrays(found, schema=schema)


def _column(name: str, rows: FetchedRows) -> pa.Array:
    make = _MADE.get(name)
    return rows.column(_MADE_OF.get(name, name)) if make is None else make(rows)


# --- columns that are not stored as such ----------------------------------------------------------


def _timestamp(rows: FetchedRows) -> pa.Array:
    return _as_time(rows.column("store_time_ms"))


def _timestamp_type(rows: FetchedRows) -> pa.Array:
    return pa.array(np.full(rows.num_rows, _LOG_APPEND_TIME, dtype=np.int32))


def _deliver_at(rows: FetchedRows) -> pa.Array:
    stored = rows.properties.value(_DELIVERY_TIME)
    if stored.null_count == len(stored):
        return pa.nulls(len(stored), _TIME.arrow)
    found = pc.struct_field(pc.extract_regex(stored, _MILLISECONDS), 0)
    return _as_time(found.cast(pa.string()).cast(pa.int64()))


def _as_time(milliseconds: pa.Array) -> pa.Array:
    return pc.multiply(milliseconds, 1000).cast(pa.timestamp("us", tz="UTC"))


def _index_keys(rows: FetchedRows) -> pa.Array:
    """The index keys: null for a message without any."""
    found = rows.properties.value(INDEX_KEYS)
    row_of_key, keys = split_texts(as_text(found), " ")

    there = pc.not_equal(keys, "")
    offsets = _null_where_empty(list_offsets(row_of_key[as_mask(there)], rows.num_rows))
    return pa.ListArray.from_arrays(offsets, keys.filter(there))


def _properties(rows: FetchedRows) -> pa.Array:
    """The user properties: null for a message without any."""
    row_of_pair, names, values = user_properties(rows.properties)
    offsets = _null_where_empty(list_offsets(row_of_pair, rows.num_rows))
    return pa.MapArray.from_arrays(offsets, names, as_text(values))


def _headers(rows: FetchedRows) -> pa.Array:
    """The user properties as Kafka's headers: null for a message without any."""
    row_of_pair, names, values = user_properties(rows.properties)
    pairs = pa.StructArray.from_arrays([names, values], ["key", "value"])

    offsets = _null_where_empty(list_offsets(row_of_pair, rows.num_rows))
    return pa.ListArray.from_arrays(offsets, pairs)


def _null_where_empty(offsets: npt.NDArray[np.int32]) -> pa.Array:
    """The offsets of lists, of which the empty ones are null. Spark reads a null faster than an empty list."""
    return pa.array(offsets, mask=np.append(np.diff(offsets) == 0, False))


#: column -> the one of MESSAGE_SCHEMA that it is or is made of, where their names differ
_MADE_OF = {
    "value": "body",
    "partition": "queue_id",
    "timestamp": "store_time_ms",
    # It is the same in all rows, whose number another column says.
    "timestampType": "offset",
    "headers": "properties",
    "index_keys": "properties",
    "deliver_at": "properties",
}
_MADE: dict[str, Callable[[FetchedRows], pa.Array]] = {
    "timestamp": _timestamp,
    "timestampType": _timestamp_type,
    "headers": _headers,
    "properties": _properties,
    "index_keys": _index_keys,
    "deliver_at": _deliver_at,
}
