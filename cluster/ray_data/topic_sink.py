"""Writes a dataset of Ray Data to a topic, each row once: write tasks stage rows, and the driver commits them."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from ray.data import Datasink
from ray.data.block import BlockAccessor

from raymq.client.messages.queue_split import numbered, start_of
from raymq.client.messages.topic_values import TopicValues
from raymq.client.messages.write_columns import SinkTopic, by_queue
from raymq.client.staged.committer import CommitResult, Committer
from raymq.client.staged.staged_writer import StagedWriter
from raymq.client.staged.write_commit import StagedRows
from raymq.client.transport.away import while_away
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import Rejected

from .sink_columns import check_columns

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster


class _TaskReturn(NamedTuple):
    """What a write task returns to the driver."""

    write_uuid: str
    staged: dict[str, Any]


class TopicSink(Datasink[_TaskReturn]):
    """A topic as the sink of `Dataset.write_datasink`: every row is stored exactly once.

    Write tasks stage their rows on the shards, where no reader sees them. When all tasks have ended, the driver
    commits the rows of the attempts that Ray Data counts. So a retried task stores no row twice, and a write that
    fails before its commit leaves nothing that readers see.

    Example:
        With a `cluster`, in a process that is connected to Ray:

        ```python
        import ray
        from raymq.data import TopicSink

        cluster.create_topic("squares", queues=2)
        rows = ray.data.range(1000).map(lambda row: {"key": str(row["id"] % 10), "value": str(row["id"] ** 2)})
        sink = TopicSink(cluster, "squares", write_id="squares-1")
        rows.write_datasink(sink)
        print(sink.result.rows)
        ```

    Args:
        cluster: the cluster to write to. Its transport must be Flight.
        topic: an existing topic.
        write_id: the name of this write, one for all topics. A write of the same rows under the same name, even by
            another program, stores nothing more, and completes a commit that ended in the middle. None (default): Ray
            Data's id of the write, so that a commit that ended in the middle cannot be completed.

    The dataset has the column `value` (binary or string), which becomes the body. If the topic has a schema, its
    columns take the place of `value`. Optional columns are `key`, which chooses the queue, `partition`, the queue id
    itself, `tag`, `headers`, `properties`, `index_keys`, and `deliver_at`, when readers get the row. Each row is
    written twice.

    Guarantees:
        When `write_datasink` returns, a majority of the replicas has every row once, as durably as the cluster's flush
        mode promises. `result` then has the number of rows.

    Raises:
        Rejected: the topic does not exist, or the cluster's transport is not Flight. From `write_datasink`, as the
            cause of Ray Data's error: a column is missing, unknown or of another type, a value is null that must not
            be, or an earlier write of the same name had other rows.
        Unavailable: the cluster does not answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        *,
        write_id: str | None = None,
    ) -> None:
        check_transport(cluster)
        facts = while_away(cluster.topics).get(topic)
        if facts is None:
            raise Rejected(
                f"topic {topic!r} does not exist; create it: raymq topic create {shlex.quote(topic)}",
                field="topic",
                limit="an existing topic",
            )
        self._cluster = cluster
        self._topic = topic
        self._target = SinkTopic.of(topic, facts)
        self._write_id = write_id
        #: the committed write; None before
        self.result: CommitResult | None = None

    def write(self, blocks: Iterable[object], ctx: Any) -> _TaskReturn:
        """Stage the rows of one task. Callers: Ray Data."""
        with StagedWriter(Routes.of(self._cluster)) as writer:
            found = {self._topic: self._target}
            batches = _batches(blocks, self._target.values)
            for row, batch in numbered(batches, ctx.task_idx):
                parts = by_queue(
                    batch,
                    found,
                    topic=self._topic,
                    first_row=row,
                    takes_later=True,
                    of=f"of task {ctx.task_idx}",
                    start=start_of(row, ctx.task_idx),
                )
                for part in parts:
                    writer.write(*part)
            staged = writer.finish()
        return _TaskReturn(str(ctx.kwargs.get("write_uuid") or ""), staged.to_json())

    def on_write_complete(self, write_result: Any) -> None:
        """Commit the rows of all tasks. Callers: Ray Data, on the driver."""
        returns = [_TaskReturn(*each) for each in write_result.write_returns]
        named = [each.write_uuid for each in returns if each.write_uuid]
        write_id = self._write_id or (named[0] if named else uuid.uuid4().hex)
        staged = StagedRows.joined(StagedRows.from_json(each.staged) for each in returns)
        self.result = Committer(Routes.of(self._cluster)).commit(write_id, staged)

    def get_name(self) -> str:
        """The name that Ray Data shows."""
        return f"RayMQ({self._topic})"


def check_transport(cluster: Cluster) -> None:
    """Refuse a cluster that tasks cannot reach by Flight. Raises: Rejected."""
    if cluster.transport != "flight":
        raise Rejected(
            f"the cluster's transport is {cluster.transport!r}; tasks of Ray Data need Flight: connect to the cluster "
            "without transport",
            field="transport",
            limit="flight",
        )


def _batches(blocks: Iterable[object], values: TopicValues) -> Iterator[pa.RecordBatch]:
    """The rows of blocks. Raises: Rejected for columns that the topic does not take."""
    for block in blocks:
        table = BlockAccessor.for_block(block).to_arrow()
        if table.num_rows:
            check_columns(table.schema, values)
            yield from table.to_batches()
