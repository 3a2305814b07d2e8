"""The peers of `benchmarks.spark`: RayMQ, Spark's connector for Kafka, and a source of ready rows.

Each peer writes a frame to a topic, reads a topic to nothing, streams all that a topic has to nothing, and copies a
topic to another one by a stream. A stream has a new checkpoint each time and ends at the present ends.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import raymq

PARTITIONS = 4
#: what users set for throughput
TUNED_PRODUCER = {"kafka.batch.size": "1000000", "kafka.linger.ms": "5"}
TUNED_CONSUMER = {"kafka.max.partition.fetch.bytes": str(4 << 20)}
COLUMNS = ("key", "value", "offset")


def frame(spark: Any, rows: int) -> Any:
    """Rows of about 210 bytes, which cost Spark little to make."""
    from pyspark.sql import functions as f

    number = f.col("id").cast("string")
    return spark.range(0, rows, 1, PARTITIONS).select(
        f.concat(f.lit("key-"), (f.col("id") % 1000).cast("string")).alias("key"),
        f.rpad(number, 200, "x").alias("value"),
    )


def has_spark_4(spark: Any) -> bool:
    """Whether this Spark has Python data sources."""
    return not spark.version.startswith("3.")


class Peer(Protocol):
    """What is compared."""

    def write(self, rows: Any, topic: str) -> None:
        """Write a frame to a topic."""

    def read(self, spark: Any, topic: str) -> Any:
        """A topic as a frame."""

    def stream(self, spark: Any, topic: str) -> None:
        """Stream what a topic has to nothing."""

    def copy(self, spark: Any, topic: str, to: str) -> None:
        """Stream what a topic has to another topic."""


def consume(found: Any) -> None:
    """Read a frame to nothing."""
    found.select(*COLUMNS).write.format("noop").mode("overwrite").save()


class Kafka:
    """Spark's own connector."""

    def __init__(self, address: str, *, tuned: bool) -> None:
        """Args: `tuned`: with what users set for throughput, or with the defaults."""
        server = {"kafka.bootstrap.servers": address}
        self._producer = {**server, **(TUNED_PRODUCER if tuned else {})}
        self._consumer = {**server, **(TUNED_CONSUMER if tuned else {})}

    def _source(self, topic: str) -> dict[str, str]:
        return {**self._consumer, "subscribe": topic, "startingOffsets": "earliest"}

    def write(self, rows: Any, topic: str) -> None:
        """Write a frame to a topic."""
        rows.write.format("kafka").options(**self._producer, topic=topic).save()

    def read(self, spark: Any, topic: str) -> Any:
        """A topic as a frame."""
        return spark.read.format("kafka").options(**self._source(topic)).load()

    def stream(self, spark: Any, topic: str) -> None:
        """Stream what a topic has to nothing."""
        found = spark.readStream.format("kafka").options(**self._source(topic)).load()
        _run_query(found.select(*COLUMNS), "noop", {})

    def copy(self, spark: Any, topic: str, to: str) -> None:
        """Stream what a topic has to another topic."""
        found = spark.readStream.format("kafka").options(**self._source(topic)).load()
        _run_query(found.select("key", "value"), "kafka", {**self._producer, "topic": to})


class RayMQ:
    """The format of Spark 4."""

    def __init__(self, options: Mapping[str, str], delivery: str) -> None:
        """Args: `options`: of `raymq.spark.options`. `delivery`: of its writes."""
        self._options = options
        self._delivery = delivery

    def _source(self, topic: str) -> dict[str, str]:
        return {**self._options, "subscribe": topic, "startingOffsets": "earliest"}

    def _sink(self, topic: str) -> dict[str, str]:
        return {**self._options, "topic": topic, "delivery": self._delivery}

    def write(self, rows: Any, topic: str) -> None:
        """Write a frame to a topic."""
        rows.write.format("raymq").mode("append").options(**self._sink(topic)).save()

    def read(self, spark: Any, topic: str) -> Any:
        """A topic as a frame."""
        return spark.read.format("raymq").options(**self._source(topic)).load()

    def stream(self, spark: Any, topic: str) -> None:
        """Stream what a topic has to nothing."""
        found = spark.readStream.format("raymq").options(**self._source(topic)).load()
        _run_query(found.select(*COLUMNS), "noop", {})

    def copy(self, spark: Any, topic: str, to: str) -> None:
        """Stream what a topic has to another topic."""
        found = spark.readStream.format("raymq").options(**self._source(topic)).load()
        _run_query(found.select("key", "value"), "raymq", self._sink(to))


class RayMQOnSpark3:
    """The functions of raymq.spark, for Spark 3.5, which has no Python data sources."""

    def __init__(self, cluster: raymq.Cluster, delivery: Any) -> None:
        """Args: `delivery`: of its writes."""
        self._cluster = cluster
        self._delivery = delivery

    def write(self, rows: Any, topic: str) -> None:
        """Write a frame to a topic."""
        from raymq.spark import write

        write_id = uuid.uuid4().hex
        write(rows, self._cluster, topic=topic, writeId=write_id, delivery=self._delivery)

    def read(self, spark: Any, topic: str) -> Any:
        """A topic as a frame."""
        from raymq.spark import read

        return read(spark, self._cluster, topic)

    def stream(self, spark: Any, topic: str) -> None:
        """Stream what a topic has to nothing."""
        self._run(spark, topic, lambda found, _: consume(found))

    def copy(self, spark: Any, topic: str, to: str) -> None:
        """Stream what a topic has to another topic, by staged writes."""
        from raymq.spark import stream_sink

        sink = stream_sink(self._cluster, topic=to)
        self._run(spark, topic, lambda found, batch: sink(found.select("key", "value"), batch))

    def _run(self, spark: Any, topic: str, work: Any) -> None:
        from raymq.spark import stream

        with tempfile.TemporaryDirectory() as checkpoint:
            stream(
                *(spark, self._cluster, topic),
                foreachBatch=work,
                checkpointLocation=checkpoint,
                availableNow=True,
                startingOffsets="earliest",
            )


class Ready:
    """Rows that are there already, and rows that are dropped, by a Python data source of Spark 4."""

    def __init__(self, rows: int) -> None:
        self._rows = str(rows)

    def write(self, rows: Any, topic: str) -> None:
        """Drop a frame."""
        _register(rows.sparkSession)
        rows.write.format("ready").mode("append").options(rows=self._rows).save()

    def read(self, spark: Any, topic: str) -> Any:
        """The rows as a frame."""
        _register(spark)
        return spark.read.format("ready").options(rows=self._rows).load()

    def stream(self, spark: Any, topic: str) -> None:
        """Stream the rows to nothing."""
        _register(spark)
        found = spark.readStream.format("ready").options(rows=self._rows).load()
        _run_query(found.select(*COLUMNS), "noop", {})

    def copy(self, spark: Any, topic: str, to: str) -> None:
        """Stream the rows to where they are dropped."""
        _register(spark)
        found = spark.readStream.format("ready").options(rows=self._rows).load()
        _run_query(found.select("key", "value"), "ready", {"rows": self._rows})


def _register(spark: Any) -> None:
    from benchmarks.ready_source import ReadySource

    spark.dataSource.register(ReadySource)


def _run_query(found: Any, sink: str, options: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as checkpoint:
        options = {**options, "checkpointLocation": checkpoint}
        writer = found.writeStream.format(sink).options(**options).trigger(availableNow=True)
        query = writer.start()
        query.awaitTermination()
