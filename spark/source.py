"""Reads a topic as a DataFrame with the Kafka connector's columns and option names.

The driver resolves every offset, and tasks read fixed ranges: a retried task reads the same rows. Workers speak Flight
and never import Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raymq.cluster.arguments import check_choice
from raymq.cluster.consume.consumer_config import READ_FROM, ReadFrom
from raymq.cluster.consume.queue_ranges import QueueRange, read_queue_range, split_ranges
from raymq.store.base.errors import OffsetOutOfRange, Rejected

from .columns import columns, spark_schema

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: the columns of the frame: those of the Kafka connector, and two more
_NAMES = (
    *("key", "value", "topic", "partition", "offset", "timestamp", "timestampType"),
    *("tag", "shard"),
)


def read(
    spark: Any,
    cluster: Cluster,
    topic: str,
    *,
    startingOffsets: str | dict[int, int] = "earliest",  # noqa: N803 (Kafka's names)
    endingOffsets: str | dict[int, int] = "latest",  # noqa: N803
    minPartitions: int | None = None,  # noqa: N803
    read_from: ReadFrom = "leader",
) -> Any:
    """Read a topic as a DataFrame with the columns of Spark's Kafka connector, and `tag` and `shard`.

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
        topic: an existing topic.
        startingOffsets: the first offset of each queue: "earliest" (default), "latest", {queue_id: offset}, or that
            mapping as JSON. Queues that a mapping leaves out begin at their earliest offset.
        endingOffsets: the offset before which each queue ends, given like `startingOffsets`; "latest" by default.
        minPartitions: split large queues into at least this many tasks altogether; None (default) means one task per
            queue. Each task costs a connection to its shard.
        read_from: "leader" (default) reads each shard from its leader. "nearest" reads from a replica on the task's
            machine, of these rather from a follower, else from any follower, else from the leader. The offsets are
            those of the leader in any case.

    Guarantees:
        Every message in the ranges is returned once, after its CRC was checked.

    Raises:
        Rejected: an unknown topic, a malformed offset or another `read_from`.
        OffsetOutOfRange: an offset is outside its queue.
        Unavailable: the cluster does not answer.
    """
    check_choice("read_from", read_from, READ_FROM)
    queues = cluster.describe_topic(topic)["queues"]
    begin = _offsets("startingOffsets", startingOffsets)
    end = _offsets("endingOffsets", endingOffsets)

    ranges: list[QueueRange] = []
    for queue in queues:
        queue_id, low, high = queue["queue_id"], queue["min_offset"], queue["max_offset"]
        first = _resolve("startingOffsets", begin, queue_id, low, high)
        last = _resolve("endingOffsets", end, queue_id, low, high)
        if last > first:
            ranges.append(QueueRange(topic, queue_id, queue["shard"], first, last))

    ranges = split_ranges(ranges, minPartitions or 1)
    plan = spark.createDataFrame(
        ranges or [QueueRange(topic, 0, 0, 0, 0)],
        "topic string, queue_id int, shard int, first bigint, last bigint",
    ).repartitionByRange(max(1, len(ranges)), "queue_id", "first")
    return plan.mapInArrow(_task(cluster, read_from), spark_schema(_NAMES))


def _offsets(option: str, value: str | dict[int, int]) -> str | dict[int, int]:
    if isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
    if isinstance(value, dict):
        return {int(queue_id): int(offset) for queue_id, offset in value.items()}
    if value not in ("earliest", "latest"):
        message = f"{option}={value!r}: use 'earliest', 'latest' or {{queue_id: offset}}"
        raise Rejected(message, field=option, limit="earliest|latest|{queue_id: offset}")
    return value


def _resolve(option: str, value: str | dict[int, int], queue_id: int, low: int, high: int) -> int:
    if value == "earliest":
        return low
    if value == "latest":
        return high
    default = low if option == "startingOffsets" else high
    offset = value.get(queue_id, default) if isinstance(value, dict) else default
    if not low <= offset <= high:
        message = f"{option}: queue {queue_id} holds offsets {low} to {high}, not {offset}"
        raise OffsetOutOfRange(message, min=low, max=high, offset=offset, queue_id=queue_id)
    return offset


def _task(cluster: Cluster, read_from: ReadFrom) -> Any:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                wanted = QueueRange(**row)
                for records in read_queue_range(cluster, wanted, read_from=read_from):
                    yield columns(records, wanted.shard, _NAMES)

    return work
