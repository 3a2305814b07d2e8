"""Writes the batches of a stream by `foreachBatch`: each is a staged write, named by its query and its number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import Rejected

from .sink import commit_staged

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: the property of Spark's threads with the id of their query, which its checkpoint keeps
QUERY_ID = "sql.streaming.queryId"
#: the property with the id of a run of a query, which each start makes anew: Spark's threads have it as their job group
RUN_IDS = ("raymq.streaming.runId", "spark.jobGroup.id")


def stream_sink(
    cluster: Cluster, *, topic: str | None = None, query: str | None = None
) -> Callable[[Any, int], None]:
    """A function for `foreachBatch` that writes each batch of a stream to a topic, each row exactly once.

    A batch is a staged write: readers see no row before it is committed. Its name is the query's id, which the
    checkpoint keeps, and the number of the batch. So a batch that Spark repeats after a crash is stored once, and the
    rows of its first run count, also if the plan has rand().

    Example:
        With a SparkSession `spark` and a `cluster`:

        ```python
        import tempfile
        from raymq.spark import stream_sink

        cluster.create_topic("ticks", queues=2)
        ticks = spark.readStream.format("rate").load().selectExpr("cast(value as string) as value")
        writer = ticks.writeStream.foreachBatch(stream_sink(cluster, topic="ticks"))
        with tempfile.TemporaryDirectory() as checkpoint:
            query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
            query.awaitTermination(60)
            query.stop()
        ```

    Args:
        cluster: the cluster to write to. The driver must keep it open while the query runs.
        topic: an existing topic. None (default): the column `topic` names that of each row. The columns are those of
            `write`.
        query: the first part of the names of the writes; None (default): the id of the query. Two sinks of one query
            that write to the same cluster each need a name of their own, which stays across restarts. Without one the
            second is refused, and so is a second write of a batch with other rows by the same sink. With a new
            checkpoint batches begin at 0 again, so a name that was used before would drop them.

    Guarantees:
        When a batch is complete, a majority of the replicas has every row of it once.

    Raises:
        From the function, and so from the query: Rejected for columns that do not fit, for a thread without the id of
        a query if `query` is missing, and for a batch whose name another sink, or an earlier write of this run with
        other rows, has used; Unavailable if the cluster does not answer, and then the batch may be repeated.
    """
    sink = object()

    def write_batch(frame: Any, batch_id: int) -> None:
        context = frame.sparkSession.sparkContext
        query_id = context.getLocalProperty(QUERY_ID)
        name = query or query_id
        if not name:
            message = "the thread of this batch has no id of a query; give the sink a name: query="
            raise Rejected(message, field="query", limit="a name that stays across restarts")
        write_id = f"{name}/{batch_id}"
        run = next(filter(None, map(context.getLocalProperty, RUN_IDS)), None)
        if run is None or not query_id:
            # A program without queries calls the sink, and repeats what it likes.
            commit_staged(frame, cluster, topic, write_id, is_batch=True)
            return

        query_key = (cluster.cluster_id, name)
        with _batches.writing(query_key, run, batch_id, sink, topic) as batch:
            done = commit_staged(frame, cluster, topic, write_id, is_batch=True)
            if not done.has_same_rows and batch.is_written:
                raise _written_before(write_id, "this sink, with other rows")

    return write_batch


@dataclass
class _Batch:
    """A batch that a sink writes."""

    run: str
    batch_id: int
    sink: object
    #: None: each row names its own
    topic: str | None
    calls_under_way: int = 0
    is_complete: bool = False

    @property
    def is_written(self) -> bool:
        """Whether another call of this run has written it, or does so now."""
        return self.is_complete or self.calls_under_way > 1


class _Batches:
    """The newest batch of each query that sinks of this process write. A run of a query writes a batch by one sink.

    Two sinks would give their writes one name, and the rows of the second one would count as repeated ones. Only a
    later run may repeat a batch with other rows. All sinks of a run are in one process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], _Batch] = {}

    @contextmanager
    def writing(
        self, query: tuple[str, str], run: str, batch_id: int, sink: object, topic: str | None
    ) -> Iterator[_Batch]:
        """Write a batch, or try that again.

        Args: `query`: the cluster and the first part of the write's name.
        Raises: Rejected if another sink has written this batch in this run, or does so now.
        """
        with self._lock:
            batch = self._newest.get(query)
            if batch is None or (batch.run, batch.batch_id) != (run, batch_id):
                batch = self._newest[query] = _Batch(run, batch_id, sink, topic)
            if batch.sink is not sink:
                is_same = batch.topic == topic
                by = "another sink to its topic" if is_same else "a sink to another topic"
                raise _written_before(f"{query[1]}/{batch_id}", by)
            batch.calls_under_way += 1

        is_complete = False
        try:
            yield batch
            is_complete = True
        finally:
            with self._lock:
                batch.is_complete |= is_complete
                batch.calls_under_way -= 1


_batches = _Batches()


def _written_before(write_id: str, by: str) -> Rejected:
    return Rejected(
        f"batch {write_id} has been written before in this run of its query, by {by}: these rows are not stored. Give "
        "each sink of a query a name that stays across restarts, query=, and write a batch once by each sink",
        field="query",
        limit="a name for each sink of a query",
    )
