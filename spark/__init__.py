"""PySpark: write a DataFrame to a topic, each row once, and read a topic as a DataFrame.

Spark's workers speak Arrow Flight to the shards and never import Ray.

Example:
    With a SparkSession `spark` (`raydp_session` makes one on Ray) and a `cluster`:

    ```python
    from raymq.spark import read, write

    cluster.create_topic("readings", queues=2)
    frame = spark.createDataFrame([("sensor-1", "20.5"), ("sensor-2", "21.0")], "key string, value string")
    print(write(frame, cluster, topic="readings", writeId="day-1").rows)
    print(read(spark, cluster, "readings").count())
    ```
"""

# The modules:
# session           Spark sessions: on Ray by RayDP, or in this process
# java              finds the Java that Spark would use
# sink              writes a DataFrame to a topic, each row once
# direct_write      sends the rows of a task to their queues at once
# row_order         whether a plan gives its rows in a fixed order
# stored_rows       compares rows with those that an earlier attempt has stored
# task_batches      the batches that a task of a write gets
# task_errors       the error of RayMQ that ended a task
# batch_sink        the same for the batches of a stream, by foreachBatch
# source            reads topics as a DataFrame
# stream_loop       reads topics in batches, with a checkpoint
# query_checkpoint  the files of a checkpoint, as Spark writes them
# values            columns as one value, and back
# columns           the columns of a read, and raw records as these columns
# range_columns     what a task reads, as these columns
#
# Shared with format("raymq") of Spark 4. Of these data_source, task_message, and all *_reader and *_writer(s) need
# PySpark 4:
# data_source       the data source, which `pyspark_raymq` shows to Spark
# batch_reader      the reader of a batch
# stream_reader     the reader of a stream
# partition_reader  what a task reads
# sink_writers      the writers of a batch and of a stream
# row_writer        writes the rows of a task, and commits those of all tasks
# source_options    the options of a read: one table, and the check of every value
# task_message      what a task of a write tells the driver
# sink_options      the options of a write
# sink_columns      the columns of a write, and its rows by topic and queue
# offsets           offsets as Kafka's connector writes them, and the share of each queue in a batch
# cluster_options   a cluster handle as options
# format_lookup     lets Spark find the format in other threads and environments
# queue_lookup      the queues of the options, as the cluster knows them
# pushed_filters    the filters of a query that choose what is read
# batch_plan        the ranges of a batch
# stream_progress   the offsets and ranges of a stream

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq._lazy import lazy_names

if TYPE_CHECKING:
    from raymq.cluster.spark_on_ray.standalone_session import standalone_session

    from .batch_sink import stream_sink
    from .cluster_options import options
    from .direct_write import QueueReceipt
    from .format_lookup import use_format
    from .session import raydp_session, use_java
    from .sink import WriteResult, write
    from .source import read
    from .stream_loop import stream
    from .values import from_value, to_value

__all__ = [
    "QueueReceipt",
    "WriteResult",
    "from_value",
    "options",
    "raydp_session",
    "read",
    "standalone_session",
    "stream",
    "stream_sink",
    "to_value",
    "use_format",
    "use_java",
    "write",
]

__getattr__ = lazy_names(
    __name__,
    {
        "QueueReceipt": "raymq.spark.direct_write",
        "WriteResult": "raymq.spark.sink",
        "options": "raymq.spark.cluster_options",
        "from_value": "raymq.spark.values",
        "raydp_session": "raymq.spark.session",
        "read": "raymq.spark.source",
        "standalone_session": "raymq.cluster.spark_on_ray.standalone_session",
        "stream": "raymq.spark.stream_loop",
        "stream_sink": "raymq.spark.batch_sink",
        "to_value": "raymq.spark.values",
        "use_format": "raymq.spark.format_lookup",
        "use_java": "raymq.spark.session",
        "write": "raymq.spark.sink",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
