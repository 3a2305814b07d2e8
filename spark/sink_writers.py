"""The writers of Spark 4's data source. Needs PySpark 4.

Spark moves the writer of a batch by pickle to tasks, and to a process that commits. That one imports nothing for a
direct write without a name, whose rows are in their queues: the rest of a writer stays pickled until it is needed.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from raymq.store.base.errors import Rejected

from .task_message import TaskMessage

if TYPE_CHECKING:
    import pyarrow as pa

    from .row_writer import RowWriter
    from .sink_options import SinkOptions


QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


class _Pickled:
    """A `RowWriter` that is unpickled where it is used."""

    def __init__(self, options: SinkOptions, columns: Sequence[tuple[str, str]]) -> None:
        """Raises: as `RowWriter`."""
        from .row_writer import RowWriter

        writer = RowWriter(options, columns)
        self.is_direct = writer.is_direct
        self._bytes = pickle.dumps(writer)

    def writer(self) -> RowWriter:
        """The writer itself."""
        found: RowWriter = pickle.loads(self._bytes)
        return found


class BatchWriter(DataSourceArrowWriter):
    """Writes a batch: every row once. Readers see no row of a staged write before its commit."""

    def __init__(self, options: SinkOptions, columns: Sequence[tuple[str, str]]) -> None:
        self._rows = _Pickled(options, columns)
        self._write_id = options.write_id or uuid.uuid4().hex
        self._is_named = options.write_id is not None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        return self._rows.writer().write(iterator, write_id=self._write_id, query_id=None)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the rows of all tasks. Those of a direct write are in their queues."""
        if not self._rows.is_direct:
            self._rows.writer().commit(self._write_id, messages)
        elif self._is_named:
            self._rows.writer().check_partitions(self._write_id, len(messages), is_kept=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave what is there: staged rows belong to no write and expire, those of a direct write stay."""


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream. Its query and the number of the batch name a write."""

    def __init__(self, options: SinkOptions, columns: Sequence[tuple[str, str]]) -> None:
        """Raises: also Rejected for the name of a write."""
        if options.write_id is not None:
            raise Rejected(
                "writeId is for batches: query and number of the batch name each write of a stream",
                field="writeId",
                limit="absent",
            )
        self._rows = _Pickled(options, columns)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        from .task_batches import task_context

        context = task_context()
        query_id = context.getLocalProperty(QUERY_ID)
        write_id = f"{query_id}/{context.getLocalProperty(BATCH_ID)}"
        return self._rows.writer().write(iterator, write_id=write_id, query_id=query_id)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Publish the rows of all tasks. Spark may commit a batch again after a crash."""
        queries = {each.query_id for each in messages if isinstance(each, TaskMessage)}
        if not queries:
            # A batch without any task has no row.
            return
        (query_id,) = queries
        write_id = f"{query_id}/{batchId}"
        if self._rows.is_direct:
            # Each batch would cost a record of the number of its partitions. The producers of a larger one are enough.
            self._rows.writer().check_partitions(write_id, len(messages), is_kept=False)
            return
        # A plan with rand() gives other rows in a repeated batch. Those of the first run are stored.
        batch = (str(query_id), batchId)
        self._rows.writer().commit(write_id, messages, takes_other_rows=True, batch=batch)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Leave what is there: staged rows belong to no write and expire, those of a direct write stay."""
