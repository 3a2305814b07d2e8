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
import json
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import raymq
from benchmarks import floors, kafka, machine_load
from benchmarks.floors import Line, at_least
from benchmarks.machine_load import load
from benchmarks.put import ROUNDS, Rounds

PARTS = ("sink", "source", "data")
QUEUES = 4
#: a row has a key of some bytes and a value of so many
VALUE_BYTES = 200
CORES = 2
#: topic of Kafka -> its options
KAFKA_TOPICS = {"kafka": {}, "kafka_synced": {"flush.messages": "1"}}
#: what a consumer and Ray Data read: 1 KiB, as the other benchmarks
BODY = 1024


class SparkBench:
    """Rows, the two peers, and the rounds' figures."""

    def __init__(
        self, spark: Any, cluster: raymq.Cluster, broker: kafka.Broker, rounds: Rounds, rows: int
    ) -> None:
        self.spark = spark
        self.cluster = cluster
        self.broker = broker
        self.rounds = rounds
        self.rows = rows

    def frame(self, rows: int) -> Any:
        """Rows that cost Spark little to make."""
        from pyspark.sql import functions as f

        number = f.col("id").cast("string")
        return self.spark.range(0, rows, 1, QUEUES).select(
            f.concat(f.lit("key-"), (f.col("id") % 1000).cast("string")).alias("key"),
            f.rpad(number, VALUE_BYTES, "x").alias("value"),
        )

    def create_topics(self, prefix: str) -> None:
        """Create the topics of a part on both peers."""
        self.cluster.create_topic(f"{prefix}-raymq", queues=QUEUES)
        for name, options in KAFKA_TOPICS.items():
            self.broker.create_topic(f"{prefix}-{name}", QUEUES, options)

    def write_kafka(self, topic: str, rows: int) -> None:
        """Write by Spark's Kafka connector with its defaults."""
        options = {"kafka.bootstrap.servers": self.broker.address, "topic": topic}
        self.frame(rows).write.format("kafka").options(**options).save()

    def write_raymq(self, topic: str, rows: int, delivery: str) -> None:
        """Write by raymq.spark."""
        from raymq.spark import write

        done = write(
            self.frame(rows),
            self.cluster,
            topic=topic,
            writeId=uuid.uuid4().hex,
            delivery=delivery,  # type: ignore[arg-type]
        )
        if done.rows != rows:
            raise SystemExit(f"{done.rows} of {rows} rows were written")

    def sinks(self) -> dict[str, Callable[[int], None]]:
        """Figure -> writes so many rows."""
        return {
            "kafka_sink": lambda rows: self.write_kafka("sink-kafka", rows),
            "kafka_synced_sink": lambda rows: self.write_kafka("sink-kafka_synced", rows),
            "direct_sink": lambda rows: self.write_raymq("sink-raymq", rows, "direct"),
            "staged_sink": lambda rows: self.write_raymq("sink-raymq", rows, "staged"),
        }

    def read_kafka(self) -> None:
        """Read a whole topic by Spark's Kafka connector."""
        options = {"kafka.bootstrap.servers": self.broker.address, "subscribe": "source-kafka"}
        options |= {"startingOffsets": "earliest"}
        self._consume(self.spark.read.format("kafka").options(**options).load())

    def read_raymq(self) -> None:
        """Read a whole topic by raymq.spark."""
        from raymq.spark import read

        self._consume(read(self.spark, self.cluster, "source-raymq"))

    def _consume(self, frame: Any) -> None:
        rows = frame.select("key", "value", "offset")
        rows.write.format("noop").mode("overwrite").save()

    def measure(self, name: str, rows: int, action: Callable[[], None]) -> None:
        """Note the rows a second of an action."""
        begin = time.perf_counter()
        action()
        rate = self.rounds.note(name, rows / (time.perf_counter() - begin))
        print(f"    {name}: {rate:,.0f} rows/s", file=sys.stderr, flush=True)

    def run_sinks(self) -> None:
        """All rounds of the sinks."""
        self.create_topics("sink")
        for write in self.sinks().values():
            write(self.rows // 8)
        for number in range(ROUNDS):
            print(f"  sinks, round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            for name, write in self.sinks().items():
                self.measure(name, self.rows, lambda write=write: write(self.rows))  # type: ignore[misc]

    def run_sources(self) -> None:
        """All rounds of the sources."""
        self.create_topics("source")
        rows = 2 * self.rows
        self.write_kafka("source-kafka", rows)
        self.write_raymq("source-raymq", rows, "direct")
        sources = {"kafka_source": self.read_kafka, "raymq_source": self.read_raymq}
        for read in sources.values():
            read()
        for number in range(ROUNDS):
            print(f"  sources, round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            for name, read in sources.items():
                self.measure(name, rows, read)


def run_spark(
    directory: Path, rounds: Rounds, rows: int, parts: Sequence[str], *, busy: bool
) -> None:
    """Sinks and sources of Spark."""
    from raymq.spark.session import local_session

    jars = kafka.class_path("connector", directory)
    spark = local_session(
        "benchmark",
        master=f"local[{CORES}]",
        configs={"spark.jars": jars.replace(":", ","), "spark.driver.memory": "2g"},
    )
    data = directory / "spark"
    shutil.rmtree(data, ignore_errors=True)
    with (
        kafka.broker(directory / "kafka") as broker,
        raymq.start(data, name="bench-spark") as cluster,
        load(busy),
    ):
        bench = SparkBench(spark, cluster, broker, rounds, rows)
        if "sink" in parts:
            bench.run_sinks()
        if "source" in parts:
            bench.run_sources()
    spark.stop()
    shutil.rmtree(data, ignore_errors=True)


# --- Ray Data -------------------------------------------------------------------------------------


def run_data(directory: Path, rounds: Rounds, rows: int, *, busy: bool) -> None:
    """A topic read by Ray Data and by a plain consumer."""
    import ray

    from benchmarks.put import batch_of

    data = directory / "data"
    shutil.rmtree(data, ignore_errors=True)
    with raymq.start(data, name="bench-data") as cluster, load(busy):
        cluster.create_topic("backlog", queues=QUEUES)
        batch = batch_of(900, BODY).select(["body"])
        count = -(-rows // 900)
        with cluster.producer() as producer:
            for number in range(count):
                producer.send_batch("backlog", batch, queue_id=number % QUEUES)
        messages = count * 900

        ray.init(cluster.ray_address, namespace="benchmark", log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        for number in range(ROUNDS + 1):
            for name, read in (("consumer", read_by_consumer), ("ray_data", read_by_ray_data)):
                begin = time.perf_counter()
                read(cluster, messages)
                rate = messages * BODY / 1e6 / (time.perf_counter() - begin)
                if number:
                    rounds.note(f"{name}_MB_s", rate)
                    print(f"    {name}: {rate:,.0f} MB/s", file=sys.stderr, flush=True)
        ray.shutdown()
    shutil.rmtree(data, ignore_errors=True)


def read_by_consumer(cluster: raymq.Cluster, messages: int) -> None:
    """Read all messages as Arrow batches, in this process."""
    with cluster.consumer("backlog", start="earliest") as consumer:
        read = 0
        while read < messages:
            read += consumer.poll_batch(timeout=10).num_rows


def read_by_ray_data(cluster: raymq.Cluster, messages: int) -> None:
    """Read all messages as a dataset, whose batches come to this process."""
    from raymq.data import read_topic

    read = 0
    for batch in read_topic(cluster, "backlog").iter_batches(
        batch_size=None, batch_format="pyarrow"
    ):
        read += batch.num_rows
    if read != messages:
        raise SystemExit(f"{read} of {messages} messages were read")


# --- the table ------------------------------------------------------------------------------------

#: figure -> (its name in the table, its peers with the floors of the ratios)
SINKS = {
    "direct_sink": (
        "sink, direct, synced",
        (("kafka_synced_sink", "Kafka with flush.messages=1", 1.2), ("kafka_sink", "Kafka", 0.8)),
    ),
    "staged_sink": ("sink, staged, synced", (("direct_sink", "direct", 0.4),)),
}
SOURCES = {"raymq_source": ("source", (("kafka_source", "Kafka", 1.3),))}
DATA = {"ray_data_MB_s": ("Ray Data read", (("consumer_MB_s", "a consumer", 0.5),))}
PEERS = {
    "kafka_sink": "Kafka's sink, not synced",
    "kafka_synced_sink": "Kafka's sink, flush.messages=1",
    "kafka_source": "Kafka's source",
    "consumer_MB_s": "a consumer's poll_batch",
}


def table(rounds: Rounds) -> list[Line]:
    """The figures, with their peers and floors."""
    have = rounds.all()

    def figure(name: str) -> str:
        return f"{rounds.median(name):,.0f} {'MB/s' if name.endswith('MB_s') else 'rows/s'}"

    lines = [
        Line(text, figure(name), remark="peer") for name, text in PEERS.items() if name in have
    ]
    for name, (what, peers) in (SINKS | SOURCES | DATA).items():
        for peer, text, bound in peers:
            if name in have:
                ratio = rounds.ratio(name, peer)
                lines.append(
                    Line(what, figure(name), f"{ratio:.2f} x {text}", at_least(bound), ratio)
                )
    return lines


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    machine_load.option(parser)
    floors.options(parser)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)

    rounds = Rounds()
    rows = 100_000 if options.quick else 400_000
    parts = [options.only] if options.only else PARTS
    if {"sink", "source"} & set(parts):
        run_spark(options.directory, rounds, rows, parts, busy=options.busy)
    if "data" in parts:
        run_data(options.directory, rounds, rows, busy=options.busy)
    if options.json:
        options.json.write_text(json.dumps(rounds.all(), indent=1))
    title = machine_load.BUSY_TITLE if options.busy else ""
    sys.exit(floors.report(table(rounds), check=options.check, title=title))


if __name__ == "__main__":
    main()
