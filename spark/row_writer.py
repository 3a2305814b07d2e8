"""Writes the rows of a task of Spark 4, and commits those of all tasks. Needs PySpark 4.

Tasks stage their rows, and the driver commits them. With delivery=direct tasks send their rows to the queues at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa

from raymq.client.messages.queue_split import numbered, start_of
from raymq.client.staged.committer import Committer
from raymq.client.staged.staged_writer import StagedWriter
from raymq.client.staged.write_commit import StagedRows
from raymq.client.transport.away import while_away
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import Bug, RayMQError, require

from .direct_write import DirectWrite
from .queue_lookup import connect
from .sink_columns import by_queue, check_columns, check_direct, targets
from .sink_options import SinkOptions
from .task_batches import partition_of_task, without_empty
from .task_message import TaskMessage

if TYPE_CHECKING:
    from pyspark.sql.datasource import WriterCommitMessage

    from raymq.client.handle import ClusterHandle


class RowWriter:
    """Writes the rows of a task, and commits those of all tasks."""

    def __init__(self, options: SinkOptions, columns: Sequence[tuple[str, str]]) -> None:
        """Look the topics up, so that a wrong one or a wrong column fails before any task runs.

        Args: `columns`: name and type of each column. Raises: Rejected; Unavailable.
        """
        self._options = options
        with closing(connect(options)) as cluster:
            topics = while_away(cluster.topics)
        self._targets = targets(topics, options.topic)
        topic = options.topic
        #: None: a staged write. Each task sets the name of the write
        self._direct: DirectWrite | None = None
        if options.delivery == "direct":
            require(topic is not None, "a direct write has one topic")
            check_direct([name for name, _ in columns])
            facts = topics[str(topic)]
            self._direct = DirectWrite(str(topic), "", facts, "quorum", options.verify)
        values = None if topic is None else self._targets[topic].values
        check_columns(columns, topic=topic, values=values)

    def write(
        self,
        batches: Iterator[pa.RecordBatch],
        *,
        write_id: str,
        query_id: str | None,
    ) -> TaskMessage:
        """Write rows, in a task. Raises: RayMQError, without traces, which Spark prints before the text.

        Args: `write_id`: of a direct write.
        """
        filled = without_empty(batches)
        if filled is None and not (self._direct and self._direct.verify):
            return TaskMessage(None, query_id)
        try:
            with closing(connect(self._options)) as cluster:
                if self._direct is None:
                    return TaskMessage(self._stage(cluster, filled or ()), query_id)
                direct = self._direct._replace(write_id=write_id)
                direct.send(cluster, partition_of_task(), filled or ())
                return TaskMessage(None, query_id)
        except Bug:
            raise
        except RayMQError as error:
            raise error.with_traceback(None) from None

    def _stage(self, cluster: ClusterHandle, batches: Iterable[pa.RecordBatch]) -> str:
        with StagedWriter(Routes.of(cluster)) as writer:
            partition = partition_of_task()
            for row, batch in numbered(batches, partition):
                parts = by_queue(
                    batch,
                    self._targets,
                    topic=self._options.topic,
                    first_row=row,
                    takes_later=True,
                    of=f"of partition {partition}",
                    start=start_of(row, partition),
                )
                for topic, queue_id, rows in parts:
                    writer.write(topic, queue_id, rows)
            return json.dumps(writer.finish().to_json())

    @property
    def is_direct(self) -> bool:
        """Whether tasks send their rows to the queues at once."""
        return self._direct is not None

    def commit(
        self,
        write_id: str,
        messages: list[WriterCommitMessage | None],
        *,
        takes_other_rows: bool = False,
        batch: tuple[str, int] | None = None,
    ) -> None:
        """Publish the rows of all tasks, on the driver: `Committer.commit`."""
        require(self._direct is None, "rows of a direct write are in their queues")
        texts = [each.staged for each in messages if isinstance(each, TaskMessage)]
        staged = StagedRows.joined(StagedRows.from_json(json.loads(each)) for each in texts if each)
        with closing(connect(self._options)) as cluster:
            Committer(Routes.of(cluster)).commit(
                write_id, staged, takes_other_rows=takes_other_rows, batch=batch
            )

    def check_partitions(self, write_id: str, partitions: int, *, is_kept: bool) -> None:
        """Compare the number of partitions of a direct write with that of earlier runs.

        Spark says it only now, when all tasks have ended. So rows may be stored twice already.
        Args: `is_kept`: keep the number for later runs, which costs a record.
        Raises: Rejected for another number.
        """
        require(self._direct is not None, "tasks stage their rows")
        direct = self._direct._replace(write_id=write_id)  # type: ignore[union-attr]
        with closing(connect(self._options)) as cluster:
            direct.check_other_partitions(cluster, partitions)
            if is_kept:
                direct.keep_partitions(cluster, partitions)
