"""Columns of a DataFrame as one value, and back: JSON, made and read by Spark's JVM, or Arrow IPC, by its workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa

from raymq.client.arguments import check_choice
from raymq.client.messages.codecs import ArrowIpcCodec
from raymq.client.messages.row_numbers import renumbered
from raymq.client.messages.topic_schema import SPARK_TYPES, from_json, spark_type, to_json
from raymq.store.base.errors import Rejected

from .sink_columns import COLUMNS
from .task_batches import map_in_arrow, partition_of_task

ValueCodec = Literal["json", "arrow-ipc"]
CODECS = ("json", "arrow-ipc")

#: as raymq.client.messages.json_rows writes times
_WRITE = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "dateFormat": "yyyy-MM-dd",
    "ignoreNullFields": "true",
}
_READ = {"timeZone": "UTC", "mode": "FAILFAST", "dateFormat": "yyyy-MM-dd"}

_ALLOWED = f"{', '.join(SPARK_TYPES)}, decimal, and struct, array and map<string, ...> of these"


def to_value(frame: Any, *columns: str, codec: ValueCodec = "json") -> Any:
    """Make one column `value` of several columns of a DataFrame. The others stay.

    Example:
        With a SparkSession `spark`:

        ```python
        from raymq.spark import from_value, to_value

        orders = spark.sql("select 'alice' as key, 7 as id, named_struct('city', 'Bonn') as address")
        values = to_value(orders, "id", "address")
        values.show(truncate=False)
        from_value(values, "id int, address struct<city: string>").show()
        ```

    Args:
        frame: the DataFrame.
        columns: names of the columns that become the value. None of them (default): all but those that a write takes
            beside the value, such as `key` and `tag`.
        codec: "json" (default): one JSON object, made by Spark's JVM, in which a null column is left out; binary is
            base64, times have microseconds. "arrow-ipc": an Arrow IPC stream of one row, which has its schema with it.
            That costs about 12 us and 300 bytes more a row.

    Returns: a DataFrame with the column `value`: string, or binary of "arrow-ipc".

    Raises: Rejected: an unknown column or codec, or a column of a type that the codec does not keep, such as a map
    whose keys are not strings.
    """
    from pyspark.sql import functions

    check_choice("codec", codec, CODECS)
    names = list(columns) or [name for name in frame.columns if name not in COLUMNS]
    kinds = {field.name: field.dataType for field in frame.schema.fields}
    if not names:
        message = f"no column of {frame.columns} is left for the value; name some"
        raise Rejected(message, field="columns", limit="1 or more")
    for name in names:
        if name not in kinds:
            message = f"unknown column {name!r}; the DataFrame has {', '.join(kinds)}"
            raise Rejected(message, field=name, limit=", ".join(kinds), found=name)
        _arrow_type(name, kinds[name])
    kept = [name for name in frame.columns if name not in names]
    if "value" in kept:
        message = "the DataFrame has a column `value` that is not part of the new one; rename it, or name it, too"
        raise Rejected(message, field="value", limit="absent")

    row = functions.struct(*map(_quoted, names))
    if codec == "json":
        value = functions.to_json(row, _WRITE)
        return frame.select(*map(_quoted, kept), value.alias("value"))
    schema = _struct([frame.schema[name] for name in kept]).add("value", "binary")
    chosen = frame.select(*map(_quoted, [*kept, *names]))
    return map_in_arrow(chosen, _ipc_encoder(kept, names), schema)


def from_value(frame: Any, schema: Any, *, codec: ValueCodec = "json") -> Any:
    """Make columns of the column `value` of a DataFrame: the inverse of `to_value`.

    A null value becomes a row of nulls, and so does a column that a JSON value does not have.

    Example:
        With a SparkSession `spark` and a `cluster`:

        ```python
        from raymq.spark import from_value, read

        cluster.create_topic("clicks", queues=2)
        clicks = from_value(read(spark, cluster, "clicks"), "page string, at timestamp")
        print(clicks.select("key", "page", "at").count())
        ```

    Args:
        frame: a DataFrame with `value`, such as one of `read`.
        schema: the columns: a schema string of Spark, a StructType, or a `pa.Schema`.
        codec: "json" (default) or "arrow-ipc", as of `to_value`.

    Returns: a DataFrame with these columns in the place of `value`.

    Raises: Rejected: no column `value`, an unknown codec, a type that the codec does not keep, or a column that the
    DataFrame has already. A value that is not one of the schema fails the Spark job.
    """
    from pyspark.sql import functions

    check_choice("codec", codec, CODECS)
    wanted = _struct_type(schema)
    if "value" not in frame.columns:
        message = f"the DataFrame has columns {frame.columns}; `value` is needed"
        raise Rejected(message, field="value", limit="a column `value`")
    others = [name for name in frame.columns if name != "value"]
    for field in wanted.fields:
        if field.name in others:
            message = (
                f"the DataFrame has a column {field.name!r} already; drop or rename one of them"
            )
            raise Rejected(message, field=field.name, limit="absent")
    kinds = [(each.name, _arrow_type(each.name, each.dataType)) for each in wanted.fields]

    if codec == "json":
        value = functions.from_json(functions.col("value").cast("string"), wanted, _READ)
        parsed = frame.withColumn("value", value)
        found = [functions.col("value").getField(name).alias(name) for name in wanted.names]
        places = [[_quoted(name)] if name != "value" else found for name in frame.columns]
        return parsed.select(*[column for some in places for column in some])
    order = [[name] if name != "value" else wanted.names for name in frame.columns]
    names = [name for some in order for name in some]
    fields = {field.name: field for field in [*frame.schema.fields, *_nullable(wanted).fields]}
    made = _struct([fields[name] for name in names])
    return map_in_arrow(frame, _ipc_decoder(names, pa.schema(kinds)), made)


def _quoted(name: str) -> Any:
    from pyspark.sql import functions

    return functions.col("`" + name.replace("`", "``") + "`")


def _struct(fields: list[Any]) -> Any:
    from pyspark.sql.types import StructType

    return StructType(fields)


def _nullable(schema: Any) -> Any:
    """The same columns, each of which may be null, as `from_json` makes them."""
    from pyspark.sql.types import StructField

    return _struct([StructField(each.name, each.dataType, True) for each in schema.fields])


def _struct_type(schema: object) -> Any:
    """A schema as a StructType. Raises: Rejected."""
    from pyspark.sql.types import StructType, _parse_datatype_string

    if isinstance(schema, pa.Schema):
        checked = from_json(to_json(schema))
        schema = ", ".join(
            f"`{field.name}` {spark_type(field.type, quoted=True)}" for field in checked
        )
    if isinstance(schema, str):
        schema = _parse_datatype_string(schema)
    if not isinstance(schema, StructType) or not schema.fields:
        message = f"schema is {schema!r}; give columns, such as 'id bigint, note string'"
        raise Rejected(message, field="schema", limit="a schema string, StructType or pa.Schema")
    return schema


def _arrow_type(place: str, kind: Any) -> pa.DataType:
    """The type in Arrow of a column. Raises: Rejected naming one that cannot become a value and come back."""
    from pyspark.sql.types import ArrayType, DecimalType, MapType, StringType, StructType

    if isinstance(kind, StructType):
        inner = [(each.name, _arrow_type(f"{place}.{each.name}", each.dataType)) for each in kind]
        return pa.struct(inner)
    if isinstance(kind, ArrayType):
        return pa.list_(pa.field("element", _arrow_type(f"{place}.element", kind.elementType)))
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        return pa.map_(pa.string(), _arrow_type(f"{place}.value", kind.valueType))
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)

    name = kind.simpleString()
    if name not in SPARK_TYPES:
        message = f"column {place} has the type {name}, which a value does not keep; cast it to one of {_ALLOWED}"
        raise Rejected(message, field=place, limit=_ALLOWED, found=name)
    return SPARK_TYPES[name]


# --- Arrow IPC ------------------------------------------------------------------------------------


def _ipc_encoder(kept: list[str], names: list[str]) -> Any:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        codec = ArrowIpcCodec()
        for batch in batches:
            rows = batch.select(names)
            values = pa.array(
                [codec.encode(rows.slice(at, 1)) for at in range(rows.num_rows)], pa.binary()
            )
            columns = [*batch.select(kept).columns, values]
            yield pa.record_batch(columns, names=[*kept, "value"])

    return work


def _ipc_decoder(names: list[str], schema: pa.Schema) -> Any:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        codec = ArrowIpcCodec()
        first_row = 0
        for batch in batches:
            try:
                found = _ipc_rows(codec, batch.column("value"), schema)
            except Rejected as error:
                of = f"of partition {partition_of_task()}"
                raise renumbered(error, first_row + error.fields["row"], of) from None
            first_row += batch.num_rows
            columns = [
                found.column(name).combine_chunks()
                if name in found.schema.names
                else batch.column(name)
                for name in names
            ]
            yield pa.record_batch(columns, names=names)

    return work


def _ipc_rows(codec: ArrowIpcCodec, values: pa.Array, schema: pa.Schema) -> pa.Table:
    """The rows of Arrow IPC streams. Raises: Rejected for one that has other columns."""
    tables: list[pa.Table] = []
    null_row = pa.table([pa.nulls(1, field.type) for field in schema], schema=schema)
    for row, body in enumerate(values.to_pylist()):
        if body is None:
            tables.append(null_row)
            continue
        try:
            table = codec.decode(body)
            if table.num_rows != 1:
                raise ValueError(f"it has {table.num_rows} rows")
            tables.append(table.select(schema.names).cast(schema))
        except (KeyError, ValueError) as error:
            message = f"row {row}: the value is not one row of the schema as Arrow IPC: {error}"
            raise Rejected(message, field="value", limit=str(schema), row=row) from None
    return pa.concat_tables(tables) if tables else schema.empty_table()
