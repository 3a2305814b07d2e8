"""The stream reader of Spark 4's data source. Needs PySpark 4; `maxOffsetsPerTrigger` and `availableNow` need 4.2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from raymq.client.messages.topic_values import TopicValues
from raymq.store.base.errors import RayMQError, Rejected

from .columns import check_columns
from .offsets import Offsets, from_json, to_json
from .partition_reader import RangePartition, read_partition
from .queue_lookup import QueueLookup, connect, values_of
from .source_options import SourceOptions
from .stream_progress import StreamProgress

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    HAS_ADMISSION_CONTROL = True
except ImportError:
    # Spark 4.0 and 4.1.
    HAS_ADMISSION_CONTROL = False
    SupportsTriggerAvailableNow = object


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The offsets and ranges of a stream. One process of the driver keeps it for as long as the query runs.

    The checkpoint of the query is the truth: `commit` has nothing to do.
    """

    def __init__(self, options: Mapping[str, str], wanted: Sequence[tuple[str, str]]) -> None:
        """Args: `wanted`: name and type of each column.

        Nothing is checked yet: Spark would cover an error of this call with one of its own.
        """
        self._given = options
        self._wanted = wanted
        self._cluster: ClusterHandle | None = None
        self._values = TopicValues("")
        self._progress: StreamProgress | None = None
        #: start, end and ranges of the batch that was asked for last
        self._planned: tuple[object, object, list[RangePartition]] | None = None

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802 (Spark's names)
        """Where a query without a checkpoint begins."""
        return to_json(self._connected().initial())

    # Spark 4.2 passes both arguments because there are two parameters. Earlier ones pass none.
    def latestOffset(  # noqa: N802
        self, start: dict[str, dict[str, int]] | None = None, limit: object = None
    ) -> dict[str, dict[str, int]]:
        """The end of the batch that begins at `start`. `limit` is one of Spark's ReadLimits."""
        begin = None if start is None else from_json(start)
        return to_json(self._connected().latest(begin, getattr(limit, "max_rows", None)))

    def getDefaultReadLimit(self) -> object:  # noqa: N802
        """The limit of `maxOffsetsPerTrigger`."""
        limit = self._options().max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end at the present ends."""
        self._connected().stop_at_present_ends()

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802
        """The ends of the queues, for the progress of the query."""
        newest: Offsets | None = None if self._progress is None else self._progress.newest
        return None if newest is None else to_json(newest)

    def partitions(
        self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]
    ) -> list[RangePartition]:
        """The range of each task of a batch. Spark asks several times for each batch."""
        if self._planned is not None and self._planned[:2] == (start, end):
            return self._planned[2]
        ranges = self._connected().ranges(from_json(start), from_json(end))
        options = self._options()
        handle = self._handle()
        found = [RangePartition(handle, each, options, self._values) for each in ranges]
        self._planned = (start, end, found)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range, in a task."""
        return read_partition(partition, [name for name, _ in self._wanted])

    def commit(self, end: dict[str, dict[str, int]]) -> None:
        """Do nothing: the checkpoint has the offsets."""

    def stop(self) -> None:
        """Close the connections."""
        cluster, self._cluster, self._progress, self._planned = self._cluster, None, None, None
        if cluster is not None:
            cluster.close()

    def _options(self) -> SourceOptions:
        """The checked options. Raises: Rejected for those that a stream does not have."""
        options = SourceOptions.parse(self._given)
        options.stream_position()
        if options.max_offsets_per_trigger is not None and not HAS_ADMISSION_CONTROL:
            raise Rejected(
                "maxOffsetsPerTrigger needs Spark 4.2: earlier ones do not limit a Python source; leave it out",
                field="maxOffsetsPerTrigger",
                limit="absent before Spark 4.2",
                found=options.max_offsets_per_trigger,
            )
        return options

    def _handle(self) -> ClusterHandle:
        """The connected cluster. Raises: Rejected for wrong options or columns; Unavailable."""
        if self._cluster is None:
            options = self._options()
            cluster = connect(options)
            try:
                self._values = values_of(cluster, options.subscription)
                check_columns(self._wanted, self._values)
            except RayMQError:
                cluster.close()
                raise
            self._cluster = cluster
        return self._cluster

    def _connected(self) -> StreamProgress:
        if self._progress is None:
            options = self._options()
            lookup = QueueLookup(self._handle(), options.subscription)
            self._progress = StreamProgress(lookup, options, starts_are_known=HAS_ADMISSION_CONTROL)
        return self._progress
