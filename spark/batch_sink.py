"""Writes the batches of a stream by `foreachBatch`: each is a staged write, named by its query and its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import Rejected

from .sink import write_staged

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: the property of Spark's threads with the id of their query, which its checkpoint keeps
QUERY_ID = "sql.streaming.queryId"


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
            second is refused if its topic is another, and its rows are dropped as repeated ones if it is the same. With
            a new checkpoint batches begin at 0 again, so a name that was used before would drop them, too.

    Guarantees:
        When a batch is complete, a majority of the replicas has every row of it once.

    Raises:
        From the function, and so from the query: Rejected for columns that do not fit, for a thread without the id of
        a query if `query` is missing, and for a batch whose name a sink to another topic has used; Unavailable if the
        cluster does not answer, and then the batch may be repeated.
    """

    def write_batch(frame: Any, batch_id: int) -> None:
        name = query or frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
        if not name:
            message = "the thread of this batch has no id of a query; give the sink a name: query="
            raise Rejected(message, field="query", limit="a name that stays across restarts")
        write_staged(frame, cluster, topic, f"{name}/{batch_id}", is_batch=True)

    return write_batch
