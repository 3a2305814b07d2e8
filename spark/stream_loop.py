"""Reads topics as a stream of batches, where Spark has no Python source of streams: Spark 3.5."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raymq.client.arguments import check_number

from .batch_sink import QUERY_ID, RUN_ID
from .offsets import Offsets
from .query_checkpoint import QueryCheckpoint
from .queue_lookup import QueueLookup
from .source import RangeFrames
from .source_options import SourceOptions, takes_options
from .stream_progress import StreamProgress

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

logger = logging.getLogger("raymq")


@takes_options("stream")
def stream(
    spark: Any,
    cluster: ClusterHandle,
    topic: str | None = None,
    *,
    foreachBatch: Callable[[object, int], object],  # noqa: N803 (Spark's names)
    checkpointLocation: str,  # noqa: N803
    availableNow: bool = False,  # noqa: N803
    interval_s: float = 1.0,
    stop: threading.Event | None = None,
    schema: str | object | None = None,
    **options: object,
) -> int:
    """Read topics in batches, and call a function with each, until all is read or `stop` is set.

    It does what a query of `readStream.format("raymq")` with `foreachBatch` does on Spark 4, with the same options,
    columns and checkpoint, so that Spark 4 can go on where it stopped. The call blocks: run it in a thread for several
    streams.

    Example:
        With a SparkSession `spark` and a `cluster`:

        ```python
        import tempfile
        from raymq.spark import stream, stream_sink

        cluster.create_topic("orders", queues=2)
        cluster.create_topic("big-orders", queues=2)
        to_big_orders = stream_sink(cluster, topic="big-orders")

        def keep_big(frame, batch_id):
            to_big_orders(frame.filter("length(value) > 100").select("key", "value"), batch_id)

        with tempfile.TemporaryDirectory() as checkpoint:
            where = {"checkpointLocation": checkpoint, "startingOffsets": "earliest"}
            print(stream(spark, cluster, "orders", foreachBatch=keep_big, availableNow=True, **where))
        ```

    Args:
        spark: the SparkSession.
        cluster: the cluster to read from.
        topic: an existing topic: the option `subscribe`. None (default): as of `read`.
        foreachBatch: called with a DataFrame and the number of the batch, in this thread. `stream_sink` makes one that
            writes to a topic.
        checkpointLocation: a directory of any file system that Spark knows, for this stream alone.
        availableNow: True ends the call when all that was there at its start is read; False (default): it goes on.
        interval_s: seconds (default 1) between two looks for new messages while there are none.
        stop: ends the call after the batch that is under way; None (default): only an error or `availableNow` does.
        schema: the columns to read, as of `read`.
        options: the options of a stream of `format("raymq")`, such as `startingOffsets` (default "latest") and
            `maxOffsetsPerTrigger`, without those that say where the cluster is.

    Guarantees:
        Every message is in one batch. A batch whose function has returned comes no more. One that was interrupted comes
        again with the same number and the same messages, so that a function that ignores a number it knows, as
        `stream_sink` does, stores each row exactly once.

    Returns: how many batches were complete in this call.

    Raises:
        Rejected: an unknown topic, column or option, or another driver uses the checkpoint.
        OffsetOutOfRange: messages expired before they were read, with `failOnDataLoss`.
        Corrupt: a file of the checkpoint is damaged.
        Unavailable: the cluster does not answer. The same call goes on.
        What the function raises.
    """
    check_number("interval_s", interval_s, 0, whole=False)
    checked = SourceOptions.of_cluster(topic, options)
    checked.stream_position()
    frames = RangeFrames(spark, cluster, checked, schema)
    progress = StreamProgress(QueueLookup(cluster, checked.subscription), checked)
    checkpoint = QueryCheckpoint(spark, checkpointLocation)
    # As in a query of Spark: a sink names its write by the id, and knows a second write of a batch by the run.
    ids = {QUERY_ID: checkpoint.query_id(), RUN_ID: uuid.uuid4().hex}

    def run(batch_id: int, start: Offsets, end: Offsets) -> None:
        context = spark.sparkContext
        before = {name: context.getLocalProperty(name) for name in ids}
        try:
            for name, value in ids.items():
                context.setLocalProperty(name, value)
            foreachBatch(frames.frame(progress.ranges(start, end)), batch_id)
        finally:
            for name, value in before.items():
                context.setLocalProperty(name, value)
        checkpoint.commit(batch_id)

    return _Loop(checkpoint, progress, checked, run).run(
        available_now=availableNow, interval_s=interval_s, stop=stop or threading.Event()
    )


class _Loop:
    """The batches of one run. One thread."""

    def __init__(
        self,
        checkpoint: QueryCheckpoint,
        progress: StreamProgress,
        options: SourceOptions,
        run: Callable[[int, Offsets, Offsets], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._limit = options.max_offsets_per_trigger
        self._run = run

    def run(self, *, available_now: bool, interval_s: float, stop: threading.Event) -> int:
        """Run batches until the end. Returns: how many."""
        if available_now:
            self._progress.stop_at_present_ends()
        last = self._checkpoint.last_batch()
        start = self._progress.initial() if last is None else self._checkpoint.offsets(last)
        complete = 0
        if last is not None and self._checkpoint.last_commit() != last:
            logger.info("the stream repeats batch %d, which was interrupted", last)
            self._run(last, self._begin_of(last), start)
            complete += 1

        while not stop.is_set():
            end = self._progress.latest(start, self._limit)
            if last is not None and end == start:
                if available_now:
                    break
                stop.wait(interval_s)
                continue
            # The first batch runs even if it is empty: its end keeps the beginning.
            last = 0 if last is None else last + 1
            self._checkpoint.begin(last, end)
            self._run(last, start, end)
            start = end
            complete += 1
        return complete

    def _begin_of(self, batch_id: int) -> Offsets:
        return self._checkpoint.offsets(batch_id - 1) if batch_id else self._progress.initial()
