"""Writes and streams of Spark 4 at the edges: large rows, empty tasks, a checkpoint that is used again and again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from raymq.store.config.store_config import StoreConfig
from tests.support.served_shard import ServedShard

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MIB = 1024 * 1024
#: the largest body of a default shard
BODY = 4 * MIB


@pytest.fixture(scope="module")
def config() -> StoreConfig:
    """A shard that takes bodies of 4 MiB."""
    return StoreConfig(
        segment_size_bytes=32 * MIB, prewrite_window_bytes=MIB, sync_flush_timeout_ms=20_000
    )


def write(frame: Any, options: dict[str, str], topic: str) -> None:
    frame.write.format("raymq").mode("append").options(**options, topic=topic).save()


def test_a_task_of_the_largest_rows_is_written_and_read(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("large", queues=2)
    rows = spark.range(0, 6, 1, 1).selectExpr(
        f"rpad(cast(id as string), {BODY}, 'x') as value", "cast(id % 2 as int) as partition"
    )
    write(rows, options, "large")
    back = spark.read.format("raymq").options(**options, subscribe="large").load()
    found = back.selectExpr(
        "length(value) as size", "cast(rtrim('x', cast(value as string)) as int) as id"
    )
    assert sorted(map(tuple, found.collect())) == [(BODY, id) for id in range(6)]


def test_a_row_that_is_too_large_fails_the_job_with_the_limit(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("too-large", queues=1)
    rows = spark.range(1).selectExpr(f"repeat('x', {BODY} + 1) as value")
    with pytest.raises(Exception, match=str(BODY)):
        write(rows, options, "too-large")
    assert shard.cluster.describe_topic("too-large")["messages"] == 0


def test_hundreds_of_tasks_of_which_most_are_empty_write_their_rows(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("sparse", queues=3)
    write(spark.range(0, 5, 1, 200).selectExpr("cast(id as string) as value"), options, "sparse")
    assert shard.cluster.describe_topic("sparse")["messages"] == 5
    empty = spark.range(0, 5, 1, 200).where("id > 9").selectExpr("cast(id as string) as value")
    write(empty, options, "sparse")
    assert shard.cluster.describe_topic("sparse")["messages"] == 5


def test_a_checkpoint_that_is_used_again_and_a_copy_of_it_store_each_row_once(
    spark: Any, shard: ServedShard, options: dict[str, str], tmp_path: Path
) -> None:
    for topic in ("origin", "target"):
        shard.cluster.create_topic(topic, queues=2)
    sent = 0

    def run(checkpoint: Path) -> None:
        source = spark.readStream.format("raymq").options(**options, subscribe="origin")
        frame = source.option("startingOffsets", "earliest").load().selectExpr("key", "value")
        writer = frame.writeStream.format("raymq").options(**options, topic="target")
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        query.processAllAvailable()
        query.stop()

    def send(count: int) -> None:
        nonlocal sent
        with shard.cluster.producer() as producer:
            for number in range(sent, sent + count):
                producer.send("origin", b"%d" % number, key=b"%d" % number)
        sent += count

    first, copy = tmp_path / "first", tmp_path / "copy"
    for _ in range(3):
        send(3)
        run(first)
    shutil.copytree(first, copy)
    send(3)
    # The copy has the same query id, so the batch of both has the same name.
    run(copy)
    run(first)

    with shard.cluster.consumer("target", start="earliest") as consumer:
        found: list[int] = []
        while len(found) < sent:
            found += [int(each.body) for each in consumer.poll(timeout=20)]
    assert sorted(found) == list(range(sent))
    assert shard.cluster.describe_topic("target")["messages"] == sent
