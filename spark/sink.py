"""Writes a DataFrame to a topic, each row exactly once, even when tasks are retried.

Direct    A task sends its rows to their queues (`direct_write`). The rows of a partition must have the same order in
          each attempt: a plan that cannot promise that is refused.
Staged    A task stages its rows under a producer id of its own, and the driver commits those of the attempts that
          Spark counts (`raymq.client.staged`). Any plan will do. Each row is written twice.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raymq.client.arguments import check_choice
from raymq.client.messages.queue_split import numbered, start_of
from raymq.client.staged.committer import CommitResult, Committer
from raymq.client.staged.staged_writer import StagedWriter
from raymq.client.staged.write_commit import StagedRows
from raymq.client.transport.away import while_away
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import Rejected
from raymq.store.config.promise import Acks

from .direct_write import DirectWrite, QueueReceipt
from .row_order import check_row_order
from .sink_columns import SinkTopic, by_queue, check_columns, check_direct, targets
from .sink_options import DELIVERIES, Delivery
from .task_batches import Batches, map_in_arrow, partition_of_task, without_empty
from .task_errors import collect, partitions_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from raymq.client.handle import ClusterHandle

#: the rows that a task returns, for Spark and for Arrow
_RECEIPT_FIELDS = [field.name for field in fields(QueueReceipt)]
RECEIPT_SCHEMA = ", ".join(f"{name} bigint" for name in _RECEIPT_FIELDS)
_RECEIPT = pa.schema([(name, pa.int64()) for name in _RECEIPT_FIELDS])


@dataclass(frozen=True)
class WriteResult:
    """The result of a write: every row is stored exactly once."""

    #: None: each row named its own
    topic: str | None
    write_id: str
    #: rows of the DataFrame
    rows: int
    #: rows that an earlier attempt or run had stored; of a staged write all, if an earlier commit of its name counts
    duplicates: int
    #: of delivery="direct": where the rows are
    receipts: tuple[QueueReceipt, ...] = ()


def write(
    df: Any,
    cluster: ClusterHandle,
    *,
    topic: str | None = None,
    writeId: str | None = None,  # noqa: N803 (the name of the option of Spark 4)
    sort_by: Sequence[str] | None = None,
    acks: Acks = "quorum",
    delivery: Delivery = "direct",
    verify: bool = True,
) -> WriteResult:
    """Write a DataFrame to a topic and return when every row is stored exactly once.

    Spark's tasks send their rows to the shards by Arrow Flight. A retried task, or the same write repeated, stores no
    row twice. Column `value` (binary or string) becomes the body. If the topic has a schema, its columns take the place
    of `value`. Optional columns are `key`, which chooses the queue, `tag`, `partition`, the queue id itself, `headers`,
    `properties`, `index_keys` and, of a staged write, `deliver_at`.

    Example:
        With a SparkSession `spark` and a `cluster`:

        ```python
        from raymq.spark import write

        cluster.create_topic("visits", queues=2)
        frame = spark.createDataFrame([("alice", "home"), ("bob", "cart")], "key string, value string")
        first = write(frame, cluster, topic="visits", writeId="day-1")
        again = write(frame, cluster, topic="visits", writeId="day-1")
        print(first.rows, again.duplicates)
        ```

    Args:
        df: the DataFrame. With delivery="direct" its plan must be deterministic, and its partitions must have their
            rows in a fixed order.
        cluster: the cluster to write to.
        topic: an existing topic. None (default): the column `topic` names that of each row, with delivery="staged".
        writeId: the name of this write. Repeated with the same rows under the same name, even by another program, it
            stores only rows that are missing. It uses the queues that the topic had at its first run, and with
            delivery="direct" it needs the number of partitions of that run. None (default) makes a new name.
        sort_by: columns that order the rows of each partition without ties, for plans with a shuffle, a sort or a
            window. The caller vouches that there are no ties, and that each attempt has the same rows. Costs a sort.
        acks: "quorum" (default) or "leader", as for `raymq.Producer`. A staged write is always "quorum", and a task of
            a direct one needs a quorum to begin.
        delivery: "direct" (default) sends rows to their queues at once, and readers see them while the write runs.
            "staged" takes any plan, also one with rand() or a shuffle. Tasks stage rows that no reader sees, and the
            shards publish them when all tasks have ended. It writes each row twice. Rows that are staged and not
            committed are deleted with their commit log files. A `writeId` is then one name for all topics.
        verify: with delivery="direct": compare rows that an earlier attempt, or an earlier write of the same name, has
            stored with those of this one (default True). It costs a read of these rows, and nothing where there are
            none. False takes them for the same.

    Guarantees:
        At return every row is stored once, as durably as `acks` and the cluster's flush mode promise. If a staged write
        ends in the middle of its commit, the same write again completes it, from the rows of the first commit. That
        holds for a plan that gives other rows each time, too: the error comes when the first rows are published.

    Raises:
        Rejected: columns are missing or wrong, or the plan is not deterministic. An earlier write of the same name had
            other rows, or another number of partitions. From a task: a value that the topic does not take, or a queue
            out of range.
        Unavailable: the cluster does not answer.

    An error of a task comes after the last of Spark's tries. Spark's own error, with its traces, is its cause.
    """
    check_choice("delivery", delivery, DELIVERIES)
    write_id = writeId or uuid.uuid4().hex
    topics = while_away(cluster.topics)
    found = _checked_targets(df, topics, topic)
    if delivery == "staged":
        done = commit_staged(df, cluster, topic, write_id, found)
        return WriteResult(topic, write_id, done.rows, done.rows if done.is_repeated else 0)
    check_direct(df.columns)
    if topic is None:
        message = (
            "rows that name their topics are written with delivery='staged'; set it, or give topic="
        )
        raise Rejected(message, field="topic", limit="a topic, or delivery='staged'")

    if sort_by:
        df = df.sortWithinPartitions(*sort_by)
    direct = DirectWrite(topic, write_id, topics[topic], acks, verify)
    sent = map_in_arrow(df, _task(cluster, direct), RECEIPT_SCHEMA)
    _refuse_random(df)
    if not sort_by:
        # The plan of the rows that are sent: some operators, as limit(), have another plan at the end of a frame.
        check_row_order(sent._jdf.queryExecution().executedPlan())
    if writeId:
        direct.keep_partitions(cluster, partitions_of(sent))

    rows = collect(sent)
    receipts = tuple(QueueReceipt(*row) for row in rows)
    return WriteResult(
        topic,
        write_id,
        sum(each.rows for each in receipts),
        sum(each.duplicates for each in receipts),
        receipts,
    )


def _checked_targets(
    df: Any, topics: dict[str, dict[str, object]], topic: str | None
) -> dict[str, SinkTopic]:
    """The topics of a write. Raises: Rejected for an unknown topic, or a column that does not fit."""
    found = targets(topics, topic)
    values = None if topic is None else found[topic].values
    check_columns(df.dtypes, topic=topic, values=values)
    return found


def commit_staged(
    df: object,
    cluster: ClusterHandle,
    topic: str | None,
    write_id: str,
    found: dict[str, SinkTopic] | None = None,
    *,
    is_batch: bool = False,
    batch: tuple[str, int] | None = None,
) -> CommitResult:
    """Let the tasks stage their rows, and commit what the attempts that ended have staged.

    Args: `found`: the topics, if they are checked already. `is_batch`: the write is a batch of a stream, which may have
    other rows when it is repeated, and must go to the same topic. `batch`: as of `Committer.commit`, for batches that
    come in order.
    """
    if found is None:
        found = _checked_targets(df, while_away(cluster.topics), topic)
    task = _staging_task(cluster, topic, found)
    texts = [json.loads(row[0]) for row in collect(map_in_arrow(df, task, "staged string"))]
    staged = StagedRows.joined(map(StagedRows.from_json, texts))
    committer = Committer(Routes.of(cluster))
    sink_topic = (topic or "") if is_batch else None
    return committer.commit(
        write_id, staged, takes_other_rows=is_batch, topic=sink_topic, batch=batch
    )


def _staging_task(
    cluster: ClusterHandle, topic: str | None, found: dict[str, SinkTopic]
) -> Callable[[Batches], Batches]:
    def work(batches: Batches) -> Batches:
        filled = without_empty(batches)
        if filled is None:
            return
        with StagedWriter(Routes.of(cluster)) as writer:
            partition = partition_of_task()
            for row, batch in numbered(filled, partition):
                parts = by_queue(
                    batch,
                    found,
                    topic=topic,
                    first_row=row,
                    takes_later=True,
                    of=f"of partition {partition}",
                    start=start_of(row, partition),
                )
                for part in parts:
                    writer.write(*part)
            staged = writer.finish()
        yield pa.record_batch([pa.array([json.dumps(staged.to_json())])], names=["staged"])

    return work


def _refuse_random(df: DataFrame) -> None:
    """Refuse a plan whose retried tasks would see other rows. Raises: Rejected."""
    if not df._jdf.queryExecution().analyzed().deterministic():
        message = (
            "the DataFrame's plan is not deterministic (rand(), uuid(), monotonically_increasing_id()...): a retried "
            "task would write other rows. Use delivery='staged'."
        )
        raise Rejected(message, field="plan", limit="deterministic")


def _task(cluster: ClusterHandle, direct: DirectWrite) -> Callable[[Batches], Batches]:
    def work(batches: Batches) -> Batches:
        receipts = direct.send(cluster, partition_of_task(), batches)
        if receipts:
            yield pa.RecordBatch.from_pylist([asdict(each) for each in receipts], schema=_RECEIPT)

    return work
