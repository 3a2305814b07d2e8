"""What a task of Spark 4 reads: a range of a queue, and the handle of its cluster. Needs PySpark 4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from raymq.cluster.consume.queue_ranges import QueueRange, read_queue_range
from raymq.store.base.errors import Bug, RayMQError

from .columns import columns
from .offsets import report_loss
from .source_options import SourceOptions

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster


class RangePartition(InputPartition):
    """A range of one queue, and how it is read. The handle has the shards' addresses of when the batch was planned."""

    def __init__(self, cluster: Cluster, wanted: QueueRange, options: SourceOptions) -> None:
        super().__init__(wanted)
        self.cluster = cluster
        self.read_from = options.read_from
        self.fail_on_data_loss = options.fail_on_data_loss


def read_partition(partition: InputPartition, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read the range of a task. Raises: RayMQError."""
    if not isinstance(partition, RangePartition):
        # Spark makes a partition of its own for a batch without any.
        return
    try:
        for records in read_queue_range(
            partition.cluster,
            partition.value,
            read_from=partition.read_from,
            on_loss=partial(report_loss, fail=partition.fail_on_data_loss),
        ):
            yield columns(records, partition.value.shard, names)
    except Bug:
        raise
    except RayMQError as error:
        # Spark prints the traces of an error and of its causes before the text. The text says it all.
        raise error.with_traceback(None) from None
