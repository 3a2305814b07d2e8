"""A Python data source of Spark 4 that does nothing itself: what Spark costs. Needs PySpark 4."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

PARTITIONS, BATCH_ROWS = 4, 10_000
KEY, VALUE = b"key-0", b"x" * 200


class ReadySource(DataSource):
    """`rows` equal rows, as a batch or as a stream. Rows that are written are dropped."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return "ready"

    def schema(self) -> str:
        """The columns that the benchmark reads of a topic."""
        return "key binary, value binary, offset bigint"

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of a batch."""
        return ReadyReader(int(self.options["rows"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """The reader of a stream."""
        return ReadyStreamReader(int(self.options["rows"]))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """A writer that looks at no row."""
        return ReadyWriter()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 (Spark's name)
        """The same for a stream."""
        return ReadyStreamWriter()


@cache
def _batch() -> pa.RecordBatch:
    columns = [[KEY] * BATCH_ROWS, [VALUE] * BATCH_ROWS, list(range(BATCH_ROWS))]
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("offset", pa.int64())])
    return pa.record_batch(columns, schema=schema)


def _rows(count: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, count, BATCH_ROWS):
        yield _batch().slice(0, min(BATCH_ROWS, count - start))


class ReadyReader(DataSourceReader):
    """A batch."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> list[InputPartition]:
        """Equal shares."""
        return [InputPartition(self._rows // PARTITIONS) for _ in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One share."""
        return _rows(partition.value)


class ReadyWriter(DataSourceArrowWriter):
    """Takes rows, and drops them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take the batches of a task."""
        return _drop(iterator)


class ReadyStreamWriter(DataSourceStreamArrowWriter):
    """The same for a stream."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take the batches of a task."""
        return _drop(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Nothing is kept."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Nothing is kept."""


def _drop(batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    for _ in batches:
        pass
    return WriterCommitMessage()


class ReadyStreamReader(DataSourceStreamReader):
    """A stream with all rows in its first batch."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 (Spark's name)
        """The begin."""
        return {"rows": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # noqa: N802 (Spark's name)
        """The end."""
        return {"rows": self._rows}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Equal shares."""
        rows = (end["rows"] - start["rows"]) // PARTITIONS
        return [InputPartition(rows) for _ in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One share."""
        return _rows(partition.value)
