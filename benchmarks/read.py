"""What does a catch-up read cost? `python -m benchmarks.read [--quick] [--check] [--only PART] [--json FILE]`

A consumer reads a backlog of 1 KiB messages from its first offset, as Arrow batches and as objects. The client compares
each record with its CRC. The price of that is measured by turns: a read with the comparison, a read without it. A plain
read of the same log files is the limit. The peer is Kafka's own Java consumer, as its `ConsumerPerformance` drives it,
on as many messages of 1 KiB in one partition; `--only crc` leaves it out. Kafka needs Java 17, and Maven, which has it.

Each figure is a median of the rounds, a ratio the median of the rounds' ratios. The comparison may cost 15 %. The floor
leaves two hundredths for the noise of shared machines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import raymq
from benchmarks import kafka
from benchmarks.floors import at_least
from benchmarks.limits import BODY, sent, started
from benchmarks.rounds import Rounds, Row, in_turn, run, tell
from raymq.client.consume import shard_reader
from tests.support import oracle

ROUNDS = 7
BATCH_ROWS = 900
PARTS = ("crc", "kafka")
TOPIC = "backlog"


def poll_batches(consumer: raymq.Consumer) -> int:
    """Read the next batch."""
    return consumer.poll_batch(timeout=10).num_rows


def poll_objects(consumer: raymq.Consumer) -> int:
    """Read messages, and look at their bodies."""
    messages = consumer.poll(max_records=500, timeout=10)
    for message in messages:
        len(message.body)
    return len(messages)


def read_rate(
    cluster: raymq.Cluster,
    messages: int,
    poll: Callable[[raymq.Consumer], int],
    topic: str = TOPIC,
) -> float:
    """Messages a second."""
    with cluster.consumer(topic, start="earliest") as consumer:
        # The first answer opens the stream.
        read = first = poll(consumer)
        begin = time.perf_counter()
        while read < messages:
            read += poll(consumer)
        return (read - first) / (time.perf_counter() - begin)


def file_rate(directory: Path, messages: int) -> float:
    """Messages a second that a plain read of the log files passes."""
    (root,) = directory.glob("**/commitlog")
    left = messages * BODY
    begin = time.perf_counter()
    for path in sorted(root.iterdir()):
        with path.open("rb", buffering=0) as file:
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                left -= len(piece)
    return messages / (time.perf_counter() - begin)


def java_rate(broker: kafka.Broker, messages: int) -> float:
    """Messages a second of a Java consumer, without the time in which it joins its group."""
    words = ["--bootstrap-server", broker.address, "--topic", TOPIC, "--timeout", "60000"]
    words += ["--messages", str(messages), "--hide-header"]
    printed = broker.run("org.apache.kafka.tools.ConsumerPerformance", *words)
    return float(printed.splitlines()[-1].split(",")[-1])


def fill_kafka(broker: kafka.Broker, messages: int) -> None:
    """Put as many messages into a topic of one partition."""
    broker.create_topic(TOPIC, 1, {})
    words = ["--topic", TOPIC, "--num-records", str(messages), "--record-size", str(BODY)]
    words += ["--throughput", "-1", "--producer-props", f"bootstrap.servers={broker.address}"]
    broker.run("org.apache.kafka.tools.ProducerPerformance", *words, "batch.size=131072")


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """The parts that are wanted."""
    if "crc" in options.only:
        measure_crcs(options, rounds)
    if "kafka" in options.only:
        try:
            measure_kafka(options, rounds)
        except oracle.Missing as error:
            tell(f"without Kafka: {error}")


def measure_kafka(options: argparse.Namespace, rounds: Rounds) -> None:
    """A read by `poll_batch` and one by Kafka's consumer in each round, long enough for Java's compiler."""
    count = 400 if options.quick else 1500
    messages = count * BATCH_ROWS
    with (
        kafka.broker(options.directory / "kafka") as broker,
        started(options.directory, "read") as cluster,
    ):
        cluster.create_topic(TOPIC, queues=1)
        sent(cluster, count, 0, api="columns", topic=TOPIC, batch=BATCH_ROWS, in_flight=16)
        fill_kafka(broker, messages)
        read_rate(cluster, messages, poll_batches)
        for _ in in_turn(ROUNDS):
            rounds.note("kafka_msg_s", java_rate(broker, messages))
            rounds.note("beside_kafka_msg_s", read_rate(cluster, messages, poll_batches))


def measure_crcs(options: argparse.Namespace, rounds: Rounds) -> None:
    """Each round has each figure once, with the comparison of CRCs and without."""
    count = 100 if options.quick else 400
    messages = count * BATCH_ROWS
    with started(options.directory, "read") as cluster:
        cluster.create_topic(TOPIC, queues=1)
        sent(cluster, count, 0, api="columns", topic=TOPIC, batch=BATCH_ROWS, in_flight=count)
        read_rate(cluster, messages, poll_batches)
        for _ in in_turn(ROUNDS):
            rounds.note("file_msg_s", file_rate(options.directory / "read", messages))
            for name, poll in (("batches", poll_batches), ("objects", poll_objects)):
                rounds.note(f"{name}_msg_s", read_rate(cluster, messages, poll))
                with patch.object(shard_reader, "verify_slices", lambda found, *_: found):
                    rounds.note(f"{name}_unchecked_msg_s", read_rate(cluster, messages, poll))


FILE = "file_msg_s"
ROWS = [Row("plain read of the files", FILE, remark="limit")]
for kind in ("batches", "objects"):
    what, name, unchecked = f"read of {kind}", f"{kind}_msg_s", f"{kind}_unchecked_msg_s"
    ROWS.append(Row(what, name, FILE, "the plain read"))
    ROWS.append(Row(f"{what}, CRCs compared", name, unchecked, "without", at_least(0.83)))

ROWS.append(Row("Kafka's Java consumer", "kafka_msg_s", remark="peer"))
kafkas = ("beside_kafka_msg_s", "kafka_msg_s", "Kafka's Java consumer")
ROWS.append(Row("read of batches", *kafkas, at_least(1.2)))

if __name__ == "__main__":
    run(__doc__, measure, ROWS, parts=PARTS)
