"""Reads topics as a DataFrame, with the columns and options of `format("raymq")`, on Spark 3.5 as on Spark 4.

The driver resolves every offset, and tasks read fixed ranges: a retried task reads the same rows. Workers speak Flight
and never import Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raymq.client.consume.queue_ranges import QueueRange
from raymq.client.messages.topic_values import TopicValues

from .batch_plan import plan_batch
from .columns import check_columns, default_names, spark_schema
from .queue_lookup import QueueLookup, values_of
from .range_columns import HowToRead, read_columns
from .source_options import SourceOptions, takes_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from raymq.client.handle import ClusterHandle


@takes_options("batch")
def read(
    spark: SparkSession,
    cluster: ClusterHandle,
    topic: str | None = None,
    *,
    schema: str | Any | None = None,
    **options: Any,
) -> Any:
    """Read topics as a DataFrame with the columns and options of `format("raymq")`.

    They are those of Kafka's connector. If one topic is read that has a schema, its columns take the place of `value`.
    The offsets are fixed by this call: every evaluation of the DataFrame reads the same messages. Each task reads a
    range of one queue, by Arrow Flight, from the queue's shard.

    Example:
        With a SparkSession `spark` and a `cluster`:

        ```python
        from raymq.spark import read

        cluster.create_topic("visits", queues=2)
        frame = read(spark, cluster, "visits", startingOffsets="earliest", minPartitions=4)
        print(frame.select("partition", "offset", "key").count())
        ```

    Args:
        spark: the SparkSession.
        cluster: the cluster to read from.
        topic: an existing topic: the option `subscribe`. None (default): `subscribe`, `subscribePattern` or `assign`
            says what is read.
        schema: the columns to read, such as "offset bigint, value binary"; None (default): all. Fewer cost less. Of a
            topic with a schema, `value` gives the bytes.
        subscribe: topics, separated by commas, in the place of `topic`.
        subscribePattern: a regular expression that the whole name of each topic matches.
        assign: queues of topics, such as {"visits": [0, 1]}, or that as JSON, as wherever a dict is taken.
        startingOffsets: "earliest" (default), or an offset of each queue, such as {"visits": {"0": 23, "1": -2}}: -2 is
            earliest.
        startingOffsetsByTimestamp: a time in ms since 1970 of each queue: the first message stored then or later.
        startingTimestamp: one such time for all queues.
        startingOffsetsByTimestampStrategy: "error" (default) or "latest", for a queue without a message from then on.
        endingOffsets: "latest" (default), or the offset before which each queue ends; -1 is latest.
        endingOffsetsByTimestamp: a time of each queue: messages stored then or later are left out.
        endingTimestamp: one such time for all queues.
        minPartitions: splits large queues into about so many tasks altogether; default: one task for each queue. Each
            task costs a connection to its shard.
        failOnDataLoss: for messages that expired before they were read: fail (True, the default), or warn and read on.
        includeHeaders: adds the column `headers` (default: no).
        tags: only messages with one of these tags, as in "new || paid" (default: all). The shards look at the others,
            and send nothing of them.
        sql: only messages for whose properties this SQL92 expression is true, such as "price > 5 AND region IN
            ('eu')" (default: all). Either `tags` or `sql`.
        readFrom: "leader" (default), or "nearest": each task reads a replica near it. The offsets are the leader's.

    Guarantees:
        Every message in the ranges is returned once, after its CRC was checked, if `tags` or `sql` wants it.

    Raises:
        Rejected: an unknown topic, column or option, or a malformed value. For a wrong `tags` or `sql` it has the
            position of the fault.
        OffsetOutOfRange: an offset is outside its queue.
        Unavailable: the cluster does not answer.
    """
    checked = SourceOptions.of_cluster(topic, options)
    checked.batch_positions()
    frames = RangeFrames(spark, cluster, checked, schema)
    return frames.frame(plan_batch(QueueLookup(cluster, checked.subscription), checked))


class RangeFrames:
    """Makes DataFrames of ranges of queues."""

    def __init__(
        self, spark: Any, cluster: ClusterHandle, options: SourceOptions, schema: str | Any | None
    ) -> None:
        """Raises: Rejected for columns that the topic does not have."""
        self._spark = spark
        self._cluster = cluster
        values = values_of(cluster, options.subscription)
        self._how = HowToRead(
            options.read_from, options.fail_on_data_loss, values, selector=options.selector
        )
        self._names = _names(schema, values, has_headers=options.include_headers)

    def frame(self, ranges: Sequence[QueueRange]) -> object:
        """A DataFrame of these ranges, each of which is a task."""
        # One number for each task: that needs no shuffle.
        numbers = self._spark.range(0, len(ranges), 1, max(1, len(ranges)))
        task = _task(self._cluster, tuple(ranges), self._names, self._how)
        return numbers.mapInArrow(task, spark_schema(self._names, self._how.values))


def _names(schema: Any, values: TopicValues, *, has_headers: bool) -> tuple[str, ...]:
    if schema is None:
        return default_names(values, has_headers=has_headers)
    if isinstance(schema, str):
        from pyspark.sql.types import _parse_datatype_string

        schema = _parse_datatype_string(schema)
    wanted = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    return check_columns(wanted, values)


def _task(
    cluster: ClusterHandle, ranges: tuple[QueueRange, ...], names: tuple[str, ...], how: HowToRead
) -> object:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from read_columns(cluster, ranges[number], names, how)

    return work
