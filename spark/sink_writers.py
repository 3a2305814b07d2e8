"""The writers of Spark 4's data source: tasks stage their rows, and the driver commits them. Needs PySpark 4."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from raymq.cluster.staged.committer import Committer
from raymq.cluster.staged.staged_writer import StagedWriter
from raymq.cluster.staged.write_commit import StagedRows
from raymq.cluster.transport.away import while_away
from raymq.cluster.transport.routes import Routes
from raymq.store.base.errors import Bug, RayMQError, Rejected, require

from .queue_lookup import connect
from .sink_columns import by_queue, check_columns, targets
from .sink_options import SinkOptions


@dataclass
class StagedMessage(WriterCommitMessage):
    """What one task attempt has staged, as JSON, and the query that it belongs to."""

    staged: str
    #: None: the write is not a batch of a stream
    query_id: str | None


class _RowStager:
    """Stages the rows of a task, and commits those of all tasks."""

    def __init__(self, options: SinkOptions, columns: Sequence[tuple[str, str]]) -> None:
        """Look the topics up, so that a wrong one or a wrong column fails before any task runs.

        Args: `columns`: name and type of each column. Raises: Rejected; Unavailable.
        """
        self._options = options
        with closing(connect(options)) as cluster:
            self._targets = targets(while_away(cluster.topics), options.topic)
        topic = options.topic
        values = None if topic is None else self._targets[topic].values
        check_columns(columns, topic=topic, values=values)

    def stage(self, batches: Iterator[pa.RecordBatch], query_id: str | None) -> StagedMessage:
        """Stage rows, in a task. Raises: RayMQError, without traces, which Spark prints before the text."""
        options = self._options
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            # Most tasks of a filtered plan may be empty. None of them connects.
            return StagedMessage(json.dumps(StagedRows((), 0, 0).to_json()), query_id)

        try:
            with (
                closing(connect(options)) as cluster,
                StagedWriter(Routes.of(cluster)) as writer,
            ):
                for turn, batch in enumerate(chain([first], batches)):
                    parts = by_queue(batch, self._targets, topic=options.topic, turn=turn)
                    for topic, queue_id, rows in parts:
                        writer.write(topic, queue_id, rows)
                staged = writer.finish()
        except Bug:
            raise
        except RayMQError as error:
            raise error.with_traceback(None) from None
        return StagedMessage(json.dumps(staged.to_json()), query_id)

    def commit(
        self,
        write_id: str,
        messages: list[WriterCommitMessage | None],
        *,
        takes_other_rows: bool = False,
    ) -> None:
        """Publish the rows of all tasks, on the driver: `Committer.commit`."""
        staged = StagedRows.joined(
            StagedRows.from_json(json.loads(each.staged))
            for each in messages
            if isinstance(each, StagedMessage)
        )
        with closing(connect(self._options)) as cluster:
            Committer(Routes.of(cluster)).commit(
                write_id, staged, takes_other_rows=takes_other_rows
            )


class BatchWriter(DataSourceArrowWriter):
    """Writes a batch: every row once. Readers see no row before the commit."""

    def __init__(self, options: SinkOptions, columns: Sequence[tuple[str, str]]) -> None:
        self._stager = _RowStager(options, columns)
        self._write_id = options.write_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        return self._stager.stage(iterator, None)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the rows of all tasks."""
        self._stager.commit(self._write_id, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave what is staged: it belongs to no write, and expires."""


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
        self._stager = _RowStager(options, columns)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        context: Any = TaskContext.get()
        require(context is not None, "a stream writes in tasks")
        return self._stager.stage(iterator, context.getLocalProperty("sql.streaming.queryId"))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Publish the rows of all tasks. Spark may commit a batch again after a crash."""
        queries = {each.query_id for each in messages if isinstance(each, StagedMessage)}
        if not queries:
            # A batch without any task has no row.
            return
        (query_id,) = queries
        # A plan with rand() gives other rows in a repeated batch. Those of the first run are stored.
        self._stager.commit(f"{query_id}/{batchId}", messages, takes_other_rows=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Leave what is staged: it belongs to no write, and expires."""
