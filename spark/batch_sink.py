"""Writes the batches of a stream by `foreachBatch`: each is a staged write, named by its query and its number."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import Rejected

from .sink import commit_staged

if TYPE_CHECKING:
    import pyarrow.flight as flight
    from pyspark.sql import DataFrame

    from raymq.client.handle import ClusterHandle

#: the property of Spark's threads with the id of their query, which its checkpoint keeps
QUERY_ID = "sql.streaming.queryId"
#: the property with the id of a run of a query, which each start makes anew. Threads of `raymq.spark.stream` have it
RUN_ID = "raymq.streaming.runId"
#: the same id in the name of Spark's thread of a query. Its job group has it, too, which programs set to their own
_RUN_IN_NAME = re.compile(r"runId = ([0-9a-f-]{36})")
#: a property of threads that Spark's thread of a query has started
_JOB_GROUP = "spark.jobGroup.id"


def stream_sink(
    cluster: ClusterHandle, *, topic: str | None = None, query: str | None = None
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
            that write to the same cluster each need a name of their own, which stays across restarts, and so do the
            sinks of two queries. A second write of a batch with other rows is refused. With a new checkpoint batches
            begin at 0 again, so a name that was used before would drop them.

    Guarantees:
        When a batch is complete, a majority of the replicas has every row of it once.

    Raises:
        From the function, and so from the query: Rejected for columns that do not fit, for a thread without the id of
        a query if `query` is missing, and for a batch that has been written before in this run with other rows, by
        this sink or another one; Unavailable if the cluster does not answer, and then the batch may be repeated.
    """
    sink = object()

    def write_batch(frame: DataFrame, batch_id: int) -> None:
        context = frame.sparkSession.sparkContext
        query_id = context.getLocalProperty(QUERY_ID)
        name = query or query_id
        if not name:
            message = "the thread of this batch has no id of a query; give the sink a name: query="
            raise Rejected(message, field="query", limit="a name that stays across restarts")
        write_id = f"{name}/{batch_id}"
        run = _run_of(context)
        if run is None or not query_id:
            # A program without queries calls the sink in any order, and repeats what it likes.
            commit_staged(frame, cluster, topic, write_id, is_batch=True)
            return

        with _batches.writing((cluster.cluster_id, name), query_id, run, batch_id, sink) as batch:
            done = commit_staged(
                frame, cluster, topic, write_id, is_batch=True, batch=(name, batch_id)
            )
            if not done.has_same_rows:
                by = batch.other_writer(sink)
                if by:
                    raise _written_before(write_id, by)

    return write_batch


def _run_of(context: flight.ServerCallContext) -> str | None:
    """The id of the run of a query whose thread this is; None: it is none's."""
    own: str | None = context.getLocalProperty(RUN_ID)
    if own:
        return own
    thread = context._jvm.java.lang.Thread.currentThread().getName()
    found = _RUN_IN_NAME.search(thread)
    group: str | None = context.getLocalProperty(_JOB_GROUP)
    return found[1] if found else group


@dataclass
class _Batch:
    """A batch that a sink writes."""

    query_id: str
    run: str
    batch_id: int
    sink: object
    #: another query has written batches under the same name
    has_other_query: bool = False
    calls_under_way: int = 0
    is_complete: bool = False

    def other_writer(self, sink: object) -> str | None:
        """Who has written other rows of this batch, when a sink has found some; None: an earlier run has."""
        if self.sink is not sink:
            return "another sink"
        if self.is_complete or self.calls_under_way > 1:
            return "this sink"
        return "another query" if self.has_other_query else None


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
        self, name: tuple[str, str], query_id: str, run: str, batch_id: int, sink: object
    ) -> Iterator[_Batch]:
        """Write a batch, or try that again. Args: `name`: the cluster and the first part of the write's name."""
        with self._lock:
            batch = self._newest.get(name)
            if batch is None or (batch.run, batch.batch_id) != (run, batch_id):
                has_other = batch is not None and (
                    batch.has_other_query or batch.query_id != query_id
                )
                batch = _Batch(query_id, run, batch_id, sink, has_other)
                self._newest[name] = batch
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
        f"batch {write_id} has been written before by {by}, with other rows: these rows are not stored. Give each sink "
        "of a query, and each query, a name that stays across restarts: query=. A function that is tried again needs "
        "the same rows: cache the frame, or start the query again",
        field="query",
        limit="a name for each sink of a query",
    )
