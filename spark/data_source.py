"""`format("raymq")` of Spark 4: its Python data source. `pyspark_raymq` lets Spark find it.

Needs PySpark 4. Spark makes these objects in several processes of the driver and of the executors, and moves them by
pickle. So they hold checked options, and each process connects by itself.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from raymq.store.base.errors import Rejected

if TYPE_CHECKING:
    from .batch_reader import BatchReader
    from .sink_writers import BatchWriter, StreamWriter
    from .stream_reader import StreamReader

# Each step of a query's plan is a process of its own, which imports this module. So a method imports what it needs.


class RaymqDataSource(DataSource):
    """Topics of RayMQ as a DataFrame, with the columns and options of Spark's Kafka connector."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return "raymq"

    def schema(self) -> str:
        """All columns, of which those of the topic's schema take the place of `value`; `headers` with `includeHeaders`.

        Raises: Rejected for wrong options; Unavailable if no shard answers.
        """
        from .columns import default_names, spark_schema
        from .queue_lookup import connect, values_of
        from .source_options import SourceOptions

        options = SourceOptions.parse(self.options)
        with closing(connect(options)) as cluster:
            values = values_of(cluster, options.subscription)
        return spark_schema(default_names(values, has_headers=options.include_headers), values)

    def reader(self, schema: StructType) -> BatchReader:
        """The reader of a batch. Raises: Rejected for wrong options or columns; Unavailable."""
        from .batch_reader import BatchReader, FilteringReader
        from .source_options import SourceOptions

        options = SourceOptions.parse(self.options)
        kind = FilteringReader if options.push_down_predicate else BatchReader
        return kind(options, _columns(schema))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 (Spark's name)
        """The reader of a stream, which checks options and columns at its first use."""
        from .stream_reader import StreamReader

        return StreamReader(dict(self.options), _columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """The writer of a batch. Raises: Rejected for wrong options or columns."""
        from .sink_options import SinkOptions
        from .sink_writers import BatchWriter

        _refuse_overwrite(overwrite)
        return BatchWriter(SinkOptions.parse(self.options), _columns(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 (Spark's name)
        """The writer of a stream. Raises: Rejected for wrong options or columns."""
        from .sink_options import SinkOptions
        from .sink_writers import StreamWriter

        _refuse_overwrite(overwrite)
        return StreamWriter(SinkOptions.parse(self.options), _columns(schema))


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise Rejected(
            'a topic cannot be overwritten; use mode("append") or outputMode("append")',
            field="mode",
            limit="append",
        )


def _columns(schema: StructType) -> list[tuple[str, str]]:
    """Name and type of each column."""
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]
