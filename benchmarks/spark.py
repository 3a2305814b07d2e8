"""Spark and Ray Data: how fast are sinks and sources?

    python -m benchmarks.spark [--quick] [--check] [--busy] [--only PART] [--json FILE]

One Spark 3.5 of two cores writes the same rows to RayMQ and to Apache Kafka 4 through Spark's own Kafka connector, and
reads them back. Kafka has two topics: one with its default options, where a row is acknowledged before it is on the
disk, and one with `flush.messages=1`, which syncs each produced batch as RayMQ does. Each topic has four queues.
`--only data` reads a topic by Ray Data and by a plain consumer.

Each figure is a median of three rounds, which measure all of them by turns. A ratio is the median of the rounds'
ratios. `--busy` runs a process that computes on each core at the same time; floors are the same, since the peers share
that machine. Needs the extra `spark`, Java 17 and Maven, which fetches Kafka and the connector.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import raymq
from benchmarks import kafka
from benchmarks.floors import at_least
from benchmarks.limits import call_ms, sent, started
from benchmarks.read import BATCH_ROWS, TOPIC, poll_batches, read_rate
from benchmarks.rounds import Rounds, Row, in_turn, run, tell

PARTS = ("sink", "source", "data")
QUEUES = 4
#: topic of Kafka -> its options
KAFKA_TOPICS = {"kafka": {}, "kafka_synced": {"flush.messages": "1"}}


class SparkBench(NamedTuple):
    """The two peers, and the rounds' figures."""

    spark: Any
    cluster: raymq.Cluster
    #: options of Spark's Kafka connector
    kafka: dict[str, str]
    rounds: Rounds
    rows: int

    def frame(self, rows: int) -> Any:
        """Rows of about 210 bytes, which cost Spark little to make."""
        from pyspark.sql import functions as f

        number = f.col("id").cast("string")
        return self.spark.range(0, rows, 1, QUEUES).select(
            f.concat(f.lit("key-"), (f.col("id") % 1000).cast("string")).alias("key"),
            f.rpad(number, 200, "x").alias("value"),
        )

    def write_kafka(self, topic: str, rows: int) -> None:
        """Write by Spark's Kafka connector with its defaults."""
        self.frame(rows).write.format("kafka").options(**self.kafka, topic=topic).save()

    def write_raymq(self, topic: str, delivery: Any, rows: int) -> None:
        """Write by raymq.spark."""
        from raymq.spark import write

        frame, write_id = self.frame(rows), uuid.uuid4().hex
        done = write(frame, self.cluster, topic=topic, writeId=write_id, delivery=delivery)
        if done.rows != rows:
            raise SystemExit(f"{done.rows} of {rows} rows were written")

    def read_kafka(self, _: int) -> None:
        """Read a whole topic by Spark's Kafka connector."""
        options = {**self.kafka, "subscribe": "source-kafka", "startingOffsets": "earliest"}
        self._consume(self.spark.read.format("kafka").options(**options).load())

    def read_raymq(self, _: int) -> None:
        """Read a whole topic by raymq.spark."""
        from raymq.spark import read

        self._consume(read(self.spark, self.cluster, "source-raymq"))

    def _consume(self, frame: Any) -> None:
        rows = frame.select("key", "value", "offset")
        rows.write.format("noop").mode("overwrite").save()

    def run_sinks(self) -> None:
        """All rounds of the sinks."""
        sinks = {
            "kafka_sink": partial(self.write_kafka, "sink-kafka"),
            "kafka_synced_sink": partial(self.write_kafka, "sink-kafka_synced"),
            "direct_sink": partial(self.write_raymq, "sink-raymq", "direct"),
            "staged_sink": partial(self.write_raymq, "sink-raymq", "staged"),
        }
        for write in sinks.values():
            write(self.rows // 8)
        note_rates(self.rounds, sinks, self.rows)

    def run_sources(self) -> None:
        """All rounds of the sources."""
        rows = 2 * self.rows
        self.write_kafka("source-kafka", rows)
        self.write_raymq("source-raymq", "direct", rows)
        sources = {"kafka_source": self.read_kafka, "raymq_source": self.read_raymq}
        for read in sources.values():
            read(rows)
        note_rates(self.rounds, sources, rows)


def note_rates(rounds: Rounds, actions: dict[str, Callable[[int], None]], rows: int) -> None:
    """In each round, note the rate of every action."""
    for _ in in_turn():
        for name, action in actions.items():
            ms = call_ms(partial(action, rows), 1)
            rate = rounds.note(f"{name}_rows_s", 1000 * rows / ms)
            tell(f"  {name}: {rate:,.0f} rows/s")


def run_spark(options: argparse.Namespace, rounds: Rounds, rows: int) -> None:
    """Sinks and sources of Spark."""
    from raymq.spark.session import local_session

    jars = kafka.class_path("connector", options.directory)
    spark = local_session(
        "benchmark",
        master="local[2]",
        configs={"spark.jars": jars.replace(":", ","), "spark.driver.memory": "2g"},
    )
    with (
        kafka.broker(options.directory / "kafka") as broker,
        started(options.directory, "spark") as cluster,
    ):
        for part in ("sink", "source"):
            cluster.create_topic(f"{part}-raymq", queues=QUEUES)
            for name, given in KAFKA_TOPICS.items():
                broker.create_topic(f"{part}-{name}", QUEUES, given)
        server = {"kafka.bootstrap.servers": broker.address}
        bench = SparkBench(spark, cluster, server, rounds, rows)
        if "sink" in options.only:
            bench.run_sinks()
        if "source" in options.only:
            bench.run_sources()
    spark.stop()


# --- Ray Data -------------------------------------------------------------------------------------


def run_data(options: argparse.Namespace, rounds: Rounds, rows: int) -> None:
    """A topic read by Ray Data and by a plain consumer."""
    import ray

    count = -(-rows // BATCH_ROWS)
    with started(options.directory, "data") as cluster:
        cluster.create_topic(TOPIC, queues=QUEUES)
        topic = {"topic": TOPIC, "queues": QUEUES, "api": "columns"}
        sent(cluster, count, 0, **topic, batch=BATCH_ROWS, in_flight=count)

        ray.init(cluster.ray_address, namespace="benchmark", log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        readers = {
            "consumer": lambda rows: read_rate(cluster, rows, poll_batches),
            "ray_data": partial(read_by_ray_data, cluster),
        }
        for read in readers.values():
            read(count * BATCH_ROWS)
        note_rates(rounds, readers, count * BATCH_ROWS)
        ray.shutdown()


def read_by_ray_data(cluster: raymq.Cluster, messages: int) -> None:
    """Read all messages as a dataset, whose batches come to this process."""
    from raymq.data import read_topic

    found = read_topic(cluster, TOPIC)
    read = sum(
        each.num_rows for each in found.iter_batches(batch_size=None, batch_format="pyarrow")
    )
    if read != messages:
        raise SystemExit(f"{read} of {messages} messages were read")


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """The parts that are wanted."""
    rows = 100_000 if options.quick else 400_000
    if {"sink", "source"} & set(options.only):
        run_spark(options, rounds, rows)
    if "data" in options.only:
        run_data(options, rounds, rows)


KAFKA, SYNCED, DIRECT = "kafka_sink_rows_s", "kafka_synced_sink_rows_s", "direct_sink_rows_s"
SOURCE, CONSUMER = "kafka_source_rows_s", "consumer_rows_s"
ROWS = [
    Row("Kafka's sink, not synced", KAFKA, remark="peer"),
    Row("Kafka's sink, flush.messages=1", SYNCED, remark="peer"),
    Row("Kafka's source", SOURCE, remark="peer"),
    Row("a consumer's poll_batch", CONSUMER, remark="peer"),
    Row("sink, direct, synced", DIRECT, SYNCED, "Kafka with flush.messages=1", at_least(1.2)),
    Row("sink, direct, synced", DIRECT, KAFKA, "Kafka", at_least(0.8)),
    Row("sink, staged, synced", "staged_sink_rows_s", DIRECT, "direct", at_least(0.4)),
    Row("source", "raymq_source_rows_s", SOURCE, "Kafka", at_least(1.3)),
    Row("Ray Data read", "ray_data_rows_s", CONSUMER, "a consumer", at_least(0.5)),
]

if __name__ == "__main__":
    run(__doc__, measure, ROWS, parts=PARTS)
