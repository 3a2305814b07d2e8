"""What the values of a topic are: bytes or the rows of its schema, and whether they may be null.

A null value is a record with an empty body, which deletes its key from a compacted topic, and the property `_N`. So
it differs from an empty value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.errors import Corrupt, Rejected
from raymq.store.records.binary_columns import null_where
from raymq.store.records.property_columns import PropertyColumns

from .fields import NULL_VALUE
from .json_rows import NotOfSchema, decode_rows, encode_rows, has_times_outside
from .message import NULL_PROPERTY
from .topic_schema import fits, from_json


class TopicValues(NamedTuple):
    """The values of a topic."""

    topic: str
    #: None: bytes
    schema: pa.Schema | None = None
    allow_null: bool = False

    @classmethod
    def of(cls, topic: str, facts: Mapping[str, object]) -> TopicValues:
        """Of an answer of `Cluster.topics`."""
        columns = facts.get("schema")
        schema = None if columns is None else from_json(json.dumps(columns))
        return cls(topic, schema, bool(facts.get("allow_null_values")))

    @property
    def names(self) -> list[str]:
        """The columns of the schema, without one `value`."""
        return ["value"] if self.schema is None else list(self.schema.names)

    def check_names(self, given: Sequence[str], others: Sequence[str]) -> None:
        """Check the columns of rows that are to be written. Args: `others`: those that are not part of the value.

        Raises: Rejected naming the first unknown column, or one that is missing.
        """
        schema = self.schema
        if schema is None:
            return
        known = [*schema.names, *others]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise Rejected(
                f"unknown column {unknown[0]!r}: topic {self.topic} has the columns {', '.join(schema.names)} beside "
                f"{', '.join(others)}; drop it, or add it to the topic with `add_column`",
                field=unknown[0],
                limit=", ".join(known),
                found=unknown[0],
            )
        for field in schema:
            if field.name not in given and not field.nullable:
                message = (
                    f"column {field.name} is missing, which topic {self.topic} needs in each row"
                )
                raise Rejected(message, field=field.name, limit=str(field.type))

    def encode(self, rows: pa.RecordBatch | pa.Table, numbers: Int64s | None = None) -> pa.Array:
        """The bodies of rows with the schema's columns; null for a null value. Other columns are passed over.

        Args: `numbers`: those of the rows in errors, by default their places.
        Raises: Rejected naming the column that does not fit.
        """
        schema = self.schema
        if schema is None:
            raise TypeError("the values of the topic are bytes")
        columns = [_column(rows, field) for field in schema]
        is_null = np.zeros(rows.num_rows, dtype=np.bool_)
        if self.allow_null:
            nulls = [each.is_null().to_numpy(zero_copy_only=False) for each in columns]
            is_null = np.logical_and.reduce(nulls)

        for field, column in zip(schema, columns, strict=True):
            if field.nullable or not column.null_count:
                continue
            lacks = column.is_null().to_numpy(zero_copy_only=False) & ~is_null
            if lacks.any():
                row = _number(lacks, numbers)
                message = f"row {row}: column {field.name} is null, which the schema of topic {self.topic} forbids"
                raise Rejected(message, field=field.name, limit="not null", row=row)

        for field, column in zip(schema, columns, strict=True):
            if has_times_outside(column):
                message = (
                    f"column {field.name} has a date or time outside of the years 1 to 9999 (UTC), which JSON cannot "
                    "hold; use null for such a value"
                )
                raise Rejected(message, field=field.name, limit="0001-01-01 to 9999-12-31")

        bodies = encode_rows(columns, schema)
        return bodies if not is_null.any() else null_where(pa.array(is_null), bodies)

    def decode(
        self, bodies: pa.Array, offsets: pa.Array, *, names: Sequence[str]
    ) -> list[pa.Array]:
        """The named columns of bodies. Args: `offsets`: of the rows, for errors.

        Raises: Corrupt for the first body that is not a row of the schema.
        """
        if self.schema is None:
            raise TypeError("the values of the topic are bytes")
        wanted = pa.schema([self.schema.field(name) for name in names])
        try:
            return decode_rows(bodies, wanted)
        except NotOfSchema as error:
            offset = offsets[error.row].as_py()
            raise Corrupt(
                f"topic {self.topic}: the body at offset {offset} is not a row of the topic's schema ({error}); a "
                "program that does not know the schema wrote it. `Consumer.poll` returns its bytes",
                topic=self.topic,
                offset=offset,
                rule="bodies are rows of the topic's schema",
            ) from None

    def check_body(self, body: bytes, *, is_null: bool) -> None:
        """Check the body of a single message. Raises: Rejected for one that is not a row of the schema, or null."""
        if is_null:
            self.stored(pa.nulls(1, pa.binary()))
        if is_null or self.schema is None:
            return
        try:
            columns = decode_rows(pa.array([body], pa.binary()), self.schema)
        except NotOfSchema as error:
            raise Rejected(
                f"the body is not a row of the schema of topic {self.topic}: {error}; send a JSON object of the "
                "columns, or rows by send_batch",
                field="body",
                limit=", ".join(self.schema.names),
            ) from None
        for field, column in zip(self.schema, columns, strict=True):
            if column.null_count and not field.nullable:
                message = (
                    f"column {field.name} is null, which the schema of topic {self.topic} forbids"
                )
                raise Rejected(message, field=field.name, limit="not null")

    def stored(
        self, values: pa.Array, numbers: Int64s | None = None
    ) -> tuple[pa.Array, pa.Array | None]:
        """The bodies of binary values, and the properties of the null ones; None if there is none.

        Args: `numbers`: as of `encode`.
        Raises: Rejected for a null value that the topic does not allow.
        """
        if not values.null_count:
            return values, None
        is_null = values.is_null()
        if not self.allow_null:
            row = _number(is_null.to_numpy(zero_copy_only=False), numbers)
            raise Rejected(
                f"row {row}: value is null, which topic {self.topic} does not allow; leave such rows out, or create "
                "the topic with allow_null_values=True",
                field="value",
                limit="not null",
                row=row,
            )
        return values.fill_null(b""), null_where(
            values.is_valid(), pa.repeat(pa.scalar(NULL_PROPERTY, pa.binary()), len(values))
        )


def _number(mask: Bools, numbers: Int64s | None) -> int:
    """The number of the first row of a mask."""
    place = int(np.argmax(mask))
    return place if numbers is None else int(numbers[place])


def _column(rows: pa.RecordBatch | pa.Table, field: pa.Field) -> pa.Array:
    """A column of the schema's type. Raises: Rejected naming it."""
    if field.name not in rows.schema.names:
        if not field.nullable:
            message = f"column {field.name} is missing, which the schema needs in each row"
            raise Rejected(message, field=field.name, limit=str(field.type))
        return pa.nulls(rows.num_rows, field.type)

    column = rows.column(field.name)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    advice = f"column {field.name} has the type {column.type}, the schema {field.type}; cast it"
    if not fits(column.type, field.type):
        raise Rejected(advice, field=field.name, limit=str(field.type), found=str(column.type))
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        message = f"column {field.name} has a value that is no {field.type}: {error}"
        raise Rejected(message, field=field.name, limit=str(field.type)) from None


def with_nulls(bodies: pa.Array, properties: PropertyColumns) -> pa.Array:
    """Bodies as values: null for those of null values."""
    marks = properties.value(NULL_VALUE)
    if marks.null_count == len(marks):
        return bodies
    is_null = pc.and_(pc.equal(pc.binary_length(bodies), 0), marks.is_valid())
    return null_where(is_null, bodies)
