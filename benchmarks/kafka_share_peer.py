"""A share group of Kafka as a peer of workers: its own load test reads and acknowledges batches of a topic."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks import kafka

#: the first one whose share groups are no preview
VERSION = "4.2.0"
#: the state of a share group has one copy here, and each append is synced, as a shard of RayMQ does it
OPTIONS = """
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
log.flush.interval.messages=1
"""
TOPIC, GROUP = "jobs", "workers"


def is_installed() -> bool:
    """Whether Java and Maven are there."""
    return all(map(shutil.which, ("java", "mvn")))


def rate(directory: Path, count: int, *, threads: int, batch: int, body_bytes: int) -> float:
    """Messages a second that so many consumers of a share group read and acknowledge."""
    with kafka.broker(directory, version=VERSION, options=OPTIONS) as broker:
        server = ("--bootstrap-server", broker.address)
        broker.create_topic(TOPIC, threads, {})
        entity = ("--alter", "--entity-type", "groups", "--entity-name", GROUP)
        earliest = ("--add-config", "share.auto.offset.reset=earliest")
        broker.run("kafka.admin.ConfigCommand", *server, *entity, *earliest)
        producer = (f"bootstrap.servers={broker.address}", "batch.size=100000", "linger.ms=5")
        sizes = ("--num-records", str(count), "--record-size", str(body_bytes))
        words = ("--topic", TOPIC, *sizes, "--throughput", "-1", "--producer-props", *producer)
        broker.run("org.apache.kafka.tools.ProducerPerformance", *words)

        config = directory / "share.properties"
        config.write_text(f"max.poll.records={batch}\n")
        words = ("--topic", TOPIC, "--group", GROUP, "--num-records", str(count))
        words += ("--threads", str(threads), "--command-config", str(config))
        words += ("--timeout", "90000")
        printed = broker.run("org.apache.kafka.tools.ShareConsumerPerformance", *server, *words)

    # start, end, MB, MB a second, messages a second, messages, milliseconds
    last = printed.splitlines()[-1].split(",")
    if int(last[5]) < count:
        raise ValueError(f"{last[5]} messages of {count}")
    return float(last[4])
