"""The batch reader of Spark 4's data source. Needs PySpark 4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from .batch_plan import NO_FILTERS, plan_batch
from .columns import check_columns
from .partition_reader import RangePartition, read_partition
from .pushed_filters import PushedFilters
from .queue_lookup import QueueLookup, connect, values_of
from .source_options import SourceOptions


class BatchReader(DataSourceReader):
    """Reads fixed ranges of queues. The driver plans them once for each evaluation of the DataFrame."""

    def __init__(self, options: SourceOptions, wanted: Sequence[tuple[str, str]]) -> None:
        """Args: `wanted`: name and type of each column.

        Raises: Rejected for columns that a topic does not have, or options that a batch does not have; Unavailable.
        """
        options.batch_positions()
        self._options = options
        with closing(connect(options)) as cluster:
            self._values = values_of(cluster, options.subscription)
        self._names = check_columns(wanted, self._values)
        self._filters = NO_FILTERS

    def partitions(self) -> list[RangePartition]:
        """The range of each task. Raises: RayMQError."""
        with closing(connect(self._options)) as cluster:
            lookup = QueueLookup(cluster, self._options.subscription)
            ranges = plan_batch(lookup, self._options, self._filters)
        tags = self._filters.tags
        return [RangePartition(cluster, each, self._options, self._values, tags) for each in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range, in a task."""
        return read_partition(partition, self._names)


class FilteringReader(BatchReader):
    """Lets the filters of the query choose what is read. Spark allows it only where its configuration says so."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 (Spark's name)
        """Keep the filters of which a read makes use. Returns: all of them, which Spark evaluates again."""
        self._filters = PushedFilters.of(filters)
        return filters
