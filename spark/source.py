"""Reads a topic as a DataFrame with the Kafka connector's columns and option names.

The driver resolves every offset, and tasks read fixed ranges: a retried task reads the same rows. Workers speak Flight
and never import Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raymq.cluster.arguments import check_choice
from raymq.cluster.consume.consumer_config import READ_FROM, ReadFrom
from raymq.cluster.consume.range_reader import read_range
from raymq.cluster.messages.columns import message_batch
from raymq.store.base.errors import OffsetOutOfRange, Rejected

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: column -> its type in Spark and in Arrow
_COLUMNS = {
    "key": ("binary", pa.binary()),
    "value": ("binary", pa.binary()),
    "topic": ("string", pa.string()),
    "partition": ("int", pa.int32()),
    "offset": ("bigint", pa.int64()),
    "timestamp": ("timestamp", pa.timestamp("us", tz="UTC")),
    "timestampType": ("int", pa.int32()),
    "tag": ("string", pa.string()),
    "shard": ("int", pa.int32()),
}
_SPARK = ", ".join(f"{name} {kind}" for name, (kind, _) in _COLUMNS.items())
_ARROW = pa.schema([(name, kind) for name, (_, kind) in _COLUMNS.items()])
#: Kafka's code for "log append time"
_LOG_APPEND_TIME = 1


class QueueRange(NamedTuple):
    """The messages [first, last) of one queue, which one task reads."""

    queue_id: int
    shard: int
    first: int
    last: int


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
            ranges.append(QueueRange(queue_id, queue["shard"], first, last))

    ranges = _split(ranges, minPartitions or 1)
    plan = spark.createDataFrame(
        ranges or [QueueRange(0, 0, 0, 0)], "queue_id int, shard int, first bigint, last bigint"
    ).repartitionByRange(max(1, len(ranges)), "queue_id", "first")
    return plan.mapInArrow(_task(cluster, topic, read_from), _SPARK)


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


def _split(ranges: list[QueueRange], at_least: int) -> list[QueueRange]:
    """Split large ranges, into about `at_least` altogether."""
    total = sum(whole.last - whole.first for whole in ranges)
    if not total or len(ranges) >= at_least:
        return ranges
    found: list[QueueRange] = []
    for whole in ranges:
        count = whole.last - whole.first
        parts = max(1, round(at_least * count / total))
        step = -(-count // parts)
        for first in range(whole.first, whole.last, step):
            found.append(whole._replace(first=first, last=min(first + step, whole.last)))
    return found


def _task(cluster: Cluster, topic: str, read_from: ReadFrom) -> Any:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                if row["last"] > row["first"]:
                    for records in read_range(
                        cluster,
                        topic,
                        row["queue_id"],
                        row["shard"],
                        row["first"],
                        row["last"],
                        read_from=read_from,
                    ):
                        yield columns(records, row["shard"])

    return work


def columns(records: pa.Array, shard: int) -> pa.RecordBatch:
    """Raw records as columns of the Kafka connector."""
    rows = message_batch(shard, records)
    times = pc.multiply(rows.column("store_time_ms"), 1000).cast(pa.timestamp("us", tz="UTC"))
    renamed = {
        "value": rows.column("body"),
        "partition": rows.column("queue_id"),
        "timestamp": times,
        "timestampType": pa.array([_LOG_APPEND_TIME] * rows.num_rows, pa.int32()),
    }
    found = [renamed[name] if name in renamed else rows.column(name) for name in _COLUMNS]
    return pa.record_batch(found, schema=_ARROW)
