"""Convert columns of messages to the batches that a shard takes, and raw records of a fetch to columns."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import pyarrow as pa

from raymq.store.base.errors import Rejected
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.properties import TAGS
from raymq.store.records.property_columns import PropertyColumns
from raymq.store.records.small_batch import PUT_SCHEMA, put_schema

from .compressed_body import inflate_column
from .fields import FIELDS, message_schema, sent_columns
from .keys import as_binary, key_properties, keys_of
from .property_rows import encode_rows, joined_properties
from .record_head import more_arrays
from .topic_values import TopicValues, with_nulls

#: columns of `Consumer.poll_batch`, whose `body` is null for a null value. `properties` are encoded as in the log:
#: `raymq.store.decode_properties` reads one
MESSAGE_SCHEMA = message_schema()

#: columns of a put that are not part of the value
_COLUMNS = sent_columns()
_OTHERS = tuple(name for name in _COLUMNS if name != "body")
#: column of MESSAGE_SCHEMA -> those of RECORD_SCHEMA that it is made of
_STORED_AS = {each.column_name: each.column.made_of for each in FIELDS if each.column is not None}


def put_batch(
    data: pa.RecordBatch | pa.Table, *, now_ms: int, values: TopicValues | None = None
) -> tuple[pa.RecordBatch, object]:
    """Convert columns of messages to PUT_SCHEMA.

    Args: `data`: the columns `body` (binary or string), and optionally `key` (binary or string), `tag` (string),
    `properties` (encoded, or map<string, string>), `born_time_ms` (int64), `message_flag` and `sys_flag` (int32), and
    `born_host` (string, or host fields). `now_ms`: the default of `born_time_ms`.
    `values`: of a topic; with a schema its columns take the place of `body`.
    Returns: the batch, and its keys as a binary column or None.
    Raises: Rejected naming a column that is missing, unknown or of another type, or a null value.
    """
    values = values or TopicValues("")
    names = data.schema.names
    rows = data.num_rows
    if values.schema is None:
        _check_names(names)
        body = as_binary(data.column("body"), "body")
    else:
        values.check_names(names, _OTHERS)
        body = values.encode(data)
    body, null_properties = values.stored(body)
    keys = as_binary(data.column("key"), "key") if "key" in names else None

    tag = pa.nulls(rows, pa.string())
    if "tag" in names:
        tag = as_binary(data.column("tag"), "tag").cast(pa.string())

    properties = pa.nulls(rows, pa.binary())
    if "properties" in names:
        properties = _encoded(data.column("properties"))
    for more in (null_properties, None if keys is None else key_properties(keys)):
        if more is not None:
            properties = joined_properties(more, properties)

    born = pa.array(np.full(rows, now_ms, dtype=np.int64))
    if "born_time_ms" in names:
        born = data.column("born_time_ms").cast(pa.int64())
        born = born.combine_chunks() if isinstance(born, pa.ChunkedArray) else born

    more = more_arrays(data, names)
    columns = [body, tag, properties, born, *more.values()]
    return pa.RecordBatch.from_arrays(
        columns, schema=put_schema(more) if more else PUT_SCHEMA
    ), keys


def _check_names(names: list[str]) -> None:
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown or "body" not in names:
        raise Rejected(
            f"the columns are {names}: `body` is required, {', '.join(_OTHERS)} are optional, and other columns are "
            "refused",
            field=unknown[0] if unknown else "body",
            limit=", ".join(_COLUMNS),
        )


def _encoded(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not pa.types.is_map(column.type):
        return as_binary(column, "properties")
    return encode_rows({"properties": column})


class FetchedRows:
    """Raw records of a fetch, as columns of MESSAGE_SCHEMA. The properties of all rows are parsed once.

    Args: `columns`: those that are asked for, `properties` if these are. Others are not decoded.
    """

    def __init__(
        self, shard: int, records: pa.Array, *, columns: Iterable[str] = MESSAGE_SCHEMA.names
    ) -> None:
        self.num_rows = len(records)
        self._shard = shard
        stored = [each for name in columns for each in _STORED_AS.get(name, (name,))]
        self._decoded = decode_records(records, columns=tuple(stored))

    @cached_property
    def properties(self) -> PropertyColumns:
        """The properties of all rows."""
        return PropertyColumns(self._decoded.column("properties"))

    @cached_property
    def _sent(self) -> tuple[pa.Array, pa.Array]:
        """The body and the sysFlag of all rows, as their senders' programs have given them."""
        return inflate_column(self._decoded.column("body"), self._decoded.column("sys_flag"))

    def column(self, name: str) -> pa.Array:
        """A column of MESSAGE_SCHEMA."""
        if name == "shard":
            return pa.array(np.full(self.num_rows, self._shard, dtype=np.int32))
        if name == "key":
            return keys_of(self.properties)
        if name == "tag":
            return self.properties.value(TAGS).cast(pa.string())
        if name == "sys_flag":
            return self._sent[1]
        if name == "body":
            return with_nulls(self._sent[0], self.properties)
        # One that a record has as it is.
        return self._decoded.column(_STORED_AS[name][0])


def message_batch(shard: int, records: pa.Array) -> pa.RecordBatch:
    """Convert raw records of a fetch to MESSAGE_SCHEMA."""
    rows = FetchedRows(shard, records)
    found = [rows.column(name) for name in MESSAGE_SCHEMA.names]
    return pa.RecordBatch.from_arrays(found, schema=MESSAGE_SCHEMA)


def value_batch(rows: pa.RecordBatch, values: TopicValues) -> pa.RecordBatch:
    """MESSAGE_SCHEMA with the columns of the topic's schema in the place of `body`. Raises: Corrupt."""
    if values.schema is None:
        return rows
    decoded = values.decode(rows.column("body"), rows.column("offset"), names=values.schema.names)
    columns = {name: rows.column(name) for name in rows.schema.names if name != "body"}
    columns |= dict(zip(values.schema.names, decoded, strict=True))
    schema = value_schema(values)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def value_schema(values: TopicValues) -> pa.Schema:
    """The schema of `value_batch`: a row of before a column was added has no value of it."""
    fields: list[pa.Field] = []
    for field in MESSAGE_SCHEMA:
        if field.name != "body" or values.schema is None:
            fields.append(field)
        else:
            fields += [each.with_nullable(True) for each in values.schema]
    return pa.schema(fields)
