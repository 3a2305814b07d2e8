"""What a task of Spark 4 reads: a range of a queue, and the handle of its cluster. Needs PySpark 4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from raymq.client.consume.queue_ranges import QueueRange
from raymq.client.messages.topic_values import TopicValues

from .pushed_filters import tag_selector
from .range_columns import HowToRead, read_columns
from .source_options import SourceOptions

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


class RangePartition(InputPartition):
    """A range of one queue, and how it is read. The handle has the shards' addresses of when the batch was planned."""

    def __init__(
        self,
        cluster: ClusterHandle,
        wanted: QueueRange,
        options: SourceOptions,
        values: TopicValues,
        tags: tuple[str, ...] | None = None,
    ) -> None:
        """Args: `tags`: of the rows that the query needs; None: all."""
        super().__init__(wanted)
        self.cluster = cluster
        self.how = HowToRead(
            options.read_from,
            options.fail_on_data_loss,
            values,
            tags,
            options.selector or tag_selector(tags),
        )


def read_partition(partition: InputPartition, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read the range of a task. Raises: RayMQError."""
    if not isinstance(partition, RangePartition):
        # Spark makes a partition of its own for a batch without any.
        return
    yield from read_columns(partition.cluster, partition.value, names, partition.how)
