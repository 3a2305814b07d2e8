"""Writes of format("raymq") on Spark 4: every row once or none, also of plans that change and of streams."""

from __future__ import annotations

import contextlib
import inspect
import re
import shutil
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext

import raymq.spark
from raymq.cluster.bench.dataset_load import DatasetPlan, run
from raymq.cluster.bench.spark_engine import Spark4Engine
from raymq.store.base.format import STAGED_TOPIC
from raymq.store.records.requests import FetchRequest, FetchSlice
from tests.support.served_shard import ServedShard
from tests.support.waiting import until

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def messages(shard: ServedShard, topic: str) -> list[Any]:
    count = shard.cluster.describe_topic(topic)["messages"]
    found: list[Any] = []
    with shard.cluster.consumer(topic, start="earliest") as consumer:
        while len(found) < count:
            found += consumer.poll(timeout=20)
    return found


def values(shard: ServedShard, topic: str) -> list[int]:
    return sorted(int(each.body) for each in messages(shard, topic))


def numbers(spark: Any, count: int, parts: int = 3) -> Any:
    return spark.range(0, count, 1, parts).selectExpr("cast(id as string) as value")


def write(frame: Any, options: dict[str, str], **given: str) -> None:
    frame.write.format("raymq").mode("append").options(**options, **given).save()


def test_rows_of_a_shuffled_plan_with_rand_are_stored_once(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("shuffled", queues=3)
    frame = numbers(spark, 2000).orderBy("value").selectExpr("value", "rand() as r")
    frame = frame.orderBy("r").drop("r").repartition(4)
    write(frame, options, topic="shuffled", writeId="once")
    assert values(shard, "shuffled") == list(range(2000))
    # The same rows in another order, under the same name.
    write(numbers(spark, 2000), options, topic="shuffled", writeId="once")
    assert values(shard, "shuffled") == list(range(2000))
    with pytest.raises(Exception, match="was committed before with 2000 other rows"):
        write(numbers(spark, 3), options, topic="shuffled", writeId="once")


def test_a_direct_write_again_stores_nothing_and_refuses_rows_that_have_changed(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("direct", queues=3)
    given = {"topic": "direct", "writeId": "once", "delivery": "direct"}
    for _ in range(2):
        write(numbers(spark, 2000), options, **given)
    # A write is not complete in itself: the rows of its first tasks are there when a later one fails.
    more = spark.range(0, 2000, 1, 3).selectExpr(
        "if(id = 1999, raise_error('no'), cast(id as string)) as value"
    )
    with pytest.raises(Exception, match="no"):
        write(more, options, **given)
    assert values(shard, "direct") == list(range(2000))

    # Rows without a key are spread: the tasks begin at different queues.
    described = shard.cluster.describe_topic("direct")["queues"]
    assert all(each["max_offset"] > 600 for each in described)

    changed = numbers(spark, 2000).selectExpr("concat(value, rand()) as value")
    with pytest.raises(Exception, match="has stored another row at offset [0-9]+ of queue"):
        write(changed, options, **given)
    write(changed, options, **given, verify="false")
    assert values(shard, "direct") == list(range(2000))


@pytest.mark.parametrize("parts", [2, 4])
def test_a_direct_write_again_with_another_number_of_partitions_is_noticed(
    spark: Any, shard: ServedShard, options: dict[str, str], parts: int
) -> None:
    topic = f"parts-{parts}"
    shard.cluster.create_topic(topic, queues=1)
    given = {"topic": topic, "writeId": "once", "delivery": "direct", "verify": "false"}
    write(numbers(spark, 30), options, **given)
    with pytest.raises(Exception, match=f"write once to {topic} .*has {parts}"):
        write(numbers(spark, 30, parts), options, **given)


def test_a_repeated_batch_of_a_direct_stream_with_fewer_partitions_is_noticed(
    spark: Any, shard: ServedShard, options: dict[str, str], tmp_path: Path
) -> None:
    shard.cluster.create_topic("fewer-of-stream", queues=1)
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    (source / "0.txt").write_text("\n".join(map(str, range(20))))

    def run(parts: int, verify: str) -> None:
        frame = spark.readStream.schema("value string").text(str(source)).repartition(parts)
        writer = frame.writeStream.format("raymq").trigger(availableNow=True)
        given = {"topic": "fewer-of-stream", "delivery": "direct", "verify": verify}
        writer = writer.options(**options, **given, checkpointLocation=str(checkpoint))
        writer.start().awaitTermination(90)

    run(2, "true")
    # As after a crash before the batch was noted as complete.
    for noted in (checkpoint / "commits").glob("*0*"):
        noted.unlink()
    with pytest.raises(Exception, match="has 1 partitions now, and had more at an earlier run"):
        run(1, "false")


def test_a_direct_write_after_one_that_failed_notices_the_rows_of_partitions_that_it_lacks(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("fewer", queues=1)
    given = {"topic": "fewer", "writeId": "once", "delivery": "direct"}
    # The last task fails when the others have stored their rows.
    fails = "if(id = 29, raise_error('no'), cast(id as string)) as value"
    with pytest.raises(Exception, match="no"):
        write(spark.range(0, 30, 1, 3).selectExpr(fails), options, **given)
    with pytest.raises(Exception, match="has 1 partitions now.*partition 1, for example"):
        write(numbers(spark, 30, 1), options, **given)


def test_a_task_of_a_direct_write_that_has_no_rows_now_notices_those_of_before(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("emptied", queues=1)
    given = {"topic": "emptied", "writeId": "once", "delivery": "direct"}
    write(numbers(spark, 30), options, **given)
    with pytest.raises(Exception, match="stored 10 rows in queue 0 of emptied"):
        write(numbers(spark, 30).where("value < 20"), options, **given)


def test_rows_have_keys_tags_and_headers_and_name_their_topic(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    for topic in ("red", "blue"):
        shard.cluster.create_topic(topic, queues=2)
    frame = spark.sql(
        """
        select 'a' as value, 'k' as key, 'red' as topic, 'x' as tag, cast(null as int) as partition,
            array(struct('h' as key, cast('1' as binary) as value)) as headers, map('p', 'q') as properties
        union all
        select 'b', null, 'blue', null, 1, null, null
        """
    )
    write(frame, options)
    (red,) = messages(shard, "red")
    assert (red.body, red.key, red.tag) == (b"a", b"k", "x")
    assert red.properties == {"h": "1", "p": "q"}
    (blue,) = messages(shard, "blue")
    assert (blue.body, blue.key, blue.tag, blue.queue_id) == (b"b", None, None, 1)
    assert blue.properties == {}


def test_rows_for_later_come_once_and_say_when_they_were_to_come(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("later", queues=2)
    frame = spark.range(0, 6, 1, 2).selectExpr(
        "cast(id as string) as value",
        "if(id % 2 = 0, timestamp '2001-09-09 01:46:40.123456 UTC', null) as deliver_at",
    )
    for _ in range(2):
        write(frame, options, topic="later", writeId="later-1")
    found: list[Any] = []
    with shard.cluster.consumer("later", start="earliest") as consumer:
        while len(found) < 6:
            found += consumer.poll(timeout=20)
    assert sorted(int(each.body) for each in found) == list(range(6))

    reader = spark.read.format("raymq").options(**options, subscribe="later").load()
    times = reader.selectExpr("cast(value as string) as value", "unix_millis(deliver_at) as at")
    shown = {row["value"]: row["at"] for row in times.collect()}
    # A part of a millisecond is rounded up.
    assert shown == {str(n): None if n % 2 else 1_000_000_000_124 for n in range(6)}

    late = frame.selectExpr("value", "now() + interval 4 days as deliver_at")
    with pytest.raises(Exception, match="to be delivered in .* timers reach"):
        write(late, options, topic="later")


def test_a_write_that_fails_leaves_nothing_that_readers_see(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("failed", queues=2)
    frame = spark.range(0, 1000, 1, 2).selectExpr(
        "case when id = 999 then raise_error('no') else cast(id as string) end as value"
    )
    with pytest.raises(Exception, match="no"):
        write(frame, options, topic="failed")
    assert values(shard, "failed") == []


@pytest.mark.parametrize("delivery", ["staged", "direct"])
def test_a_write_whose_job_is_cancelled_may_be_repeated(
    spark: Any, shard: ServedShard, options: dict[str, str], tmp_path: Path, delivery: str
) -> None:
    topic, begun = f"cancelled-{delivery}", tmp_path / "begun"
    shard.cluster.create_topic(topic, queues=2)
    given = {"topic": topic, "writeId": topic, "delivery": delivery}

    def blocks(batches: Any) -> Any:
        yield from batches
        # The task has written some rows, and is killed here.
        if TaskContext.get().partitionId() == 1:
            begun.touch()
            threading.Event().wait(120)

    def cancel() -> None:
        until(begun.exists, lambda: threading.Event().wait(0.05))
        spark.sparkContext.cancelAllJobs()

    frame = numbers(spark, 30_000, 2)
    blocking = frame.mapInArrow(blocks, frame.schema)
    with ThreadPoolExecutor(1) as pool:
        cancelled = pool.submit(cancel)
        with pytest.raises(Exception, match="(?i)cancel"):
            write(blocking, options, **given)
        cancelled.result()
    if delivery == "staged":
        assert values(shard, topic) == []
    write(frame, options, **given)
    assert values(shard, topic) == list(range(30_000))


@pytest.mark.parametrize(
    ("sql", "given", "text"),
    [
        ("select 'x' as key", {"topic": "refused"}, "`value` .binary or string. is needed"),
        ("select 'x' as value, 1 as colour", {"topic": "refused"}, "unknown column 'colour'"),
        ("select 1 as value", {"topic": "refused"}, "column value has type int, expected binary"),
        ("select 'x' as value", {}, "no topic is given"),
        ("select 'x' as value", {"topic": "missing"}, "topic 'missing' does not exist"),
        ("select 'x' as value, 'missing' as topic", {}, "has the topic 'missing'"),
        ("select 'x' as value", {"topic": "refused", "delay": "1"}, "unknown option 'delay'"),
        ("select 'x' as value", {"topic": "refused", "writeId": ""}, "option writeId is empty"),
        ("select cast(null as string) as value", {"topic": "refused"}, "row 0"),
        ("select 'x' as value, 7 as partition", {"topic": "refused"}, "partition 7 is outside"),
        (
            "select 'x' as value, now() as deliver_at",
            {"topic": "refused", "delivery": "direct"},
            "column deliver_at are written with delivery='staged'",
        ),
        (
            "select 'x' as value, 'refused' as topic",
            {"delivery": "direct"},
            "needs the option topic",
        ),
        ("select 'x' as value", {"topic": "refused", "delivery": "fast"}, "delivery.*direct"),
        ("select 'x' as value", {"topic": "refused", "verify": "false"}, "verify is for delivery"),
    ],
)
def test_a_wrong_write_is_refused_with_the_name_of_what_is_wrong(
    spark: Any,
    shard: ServedShard,
    options: dict[str, str],
    sql: str,
    given: dict[str, str],
    text: str,
) -> None:
    shard.cluster.create_topic("refused", queues=2)
    with pytest.raises(Exception, match=text):
        write(spark.sql(sql), options, **given)
    assert messages(shard, "refused") == []


def test_a_topic_is_not_overwritten(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("kept", queues=1)
    writer = numbers(spark, 1).write.format("raymq").mode("overwrite")
    with pytest.raises(Exception, match="cannot be overwritten"):
        writer.options(**options, topic="kept").save()


@pytest.mark.parametrize("delivery", ["staged", "direct"])
def test_a_stream_from_topic_to_topic_stores_each_row_once_however_often_it_restarts(
    spark: Any,
    shard: ServedShard,
    options: dict[str, str],
    put: Any,
    tmp_path: Path,
    delivery: str,
) -> None:
    checkpoint = tmp_path / "checkpoint"
    originals, copies = f"originals-{delivery}", f"copies-{delivery}"
    shard.cluster.create_topic(copies, queues=3)

    def run() -> None:
        frame = spark.readStream.format("raymq").options(
            **options, subscribe=originals, startingOffsets="earliest"
        )
        frame = frame.load().selectExpr("value", "key")
        writer = frame.writeStream.format("raymq").options(
            **options, topic=copies, delivery=delivery
        )
        writer = writer.option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination(60)
        finally:
            query.stop()

    put(originals, 0, *(b"%d" % row for row in range(10)), queues=2)
    run()
    put(originals, 1, *(b"%d" % row for row in range(10, 30)), queues=2)
    run()
    assert values(shard, copies) == list(range(30))

    # As if the driver had ended after the batch was published, and before Spark knew: the batch is repeated.
    newest = max((checkpoint / "commits").iterdir(), key=lambda each: each.name)
    newest.unlink()
    for each in (checkpoint / "commits").glob(f".{newest.name}*"):
        each.unlink()
    put(originals, 0, b"30", queues=2)
    run()
    run()
    assert values(shard, copies) == list(range(31))
    shutil.rmtree(checkpoint)


@pytest.mark.parametrize("delivery", ["staged", "direct"])
def test_two_queries_of_one_stream_store_the_rows_of_both_in_one_topic(
    spark: Any, shard: ServedShard, options: dict[str, str], tmp_path: Path, delivery: str
) -> None:
    topic = f"both-{delivery}"
    shard.cluster.create_topic(topic, queues=1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "0.txt").write_text("\n".join(map(str, range(20))))
    lines = spark.readStream.schema("value string").text(str(tmp_path / "source"))
    for part in range(2):
        writer = lines.where(f"value % 2 = {part}").writeStream.format("raymq")
        writer = writer.options(**options, topic=topic, delivery=delivery)
        writer = writer.option("checkpointLocation", str(tmp_path / f"checkpoint-{part}"))
        writer.trigger(availableNow=True).start().awaitTermination(60)
    assert values(shard, topic) == list(range(20))


def test_a_stream_takes_no_name_of_a_write(
    spark: Any, shard: ServedShard, options: dict[str, str], put: Any, tmp_path: Path
) -> None:
    put("source", 0, b"1")
    frame = spark.readStream.format("raymq").options(**options, subscribe="source").load()
    writer = frame.selectExpr("value").writeStream.format("raymq")
    writer = writer.options(**options, topic="source", writeId="w")
    with pytest.raises(Exception, match="writeId is for batches"):
        writer.option("checkpointLocation", str(tmp_path)).start().awaitTermination(60)


@pytest.mark.parametrize(("delivery", "staged_rows"), [("staged", 500), ("direct", 0)])
def test_a_load_test_finds_each_row_once(
    spark: Any, shard: ServedShard, delivery: Any, staged_rows: int
) -> None:
    def staged() -> int:
        return int(shard.host.store.state.next_offsets.get((STAGED_TOPIC, 0), 0))

    before, topic = staged(), f"load-{delivery}"
    plan = DatasetPlan(
        mode="spark", topic=topic, messages=500, size=100, tasks=2, delivery=delivery
    )
    assert run(shard.cluster, plan, Spark4Engine(spark, shard.cluster), lambda _: None).sound
    assert shard.cluster.describe_topic(topic)["messages"] == 500
    assert staged() - before == staged_rows


def test_the_example_of_the_options_runs(spark: Any, shard: ServedShard) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(raymq.spark.options), re.DOTALL)
    exec(textwrap.dedent(code), {"spark": spark, "cluster": shard.cluster})


def test_filters_of_a_query_choose_what_is_read(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("filtered", queues=2)
    rows = numbers(spark, 200).selectExpr(
        "value",
        "if(cast(value as int) % 2 = 0, 'even', 'odd') as tag",
        "cast(cast(value as int) % 2 as int) as partition",
        "array(concat('id-', value)) as index_keys",
    )
    write(rows, options, topic="filtered")
    keys = {each.body: each.index_keys for each in messages(shard, "filtered")}
    assert keys[b"7"] == ("id-7",)

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        reader = spark.read.format("raymq").options(**options, subscribe="filtered")
        frame = reader.option("pushDownPredicate", "true").load()
        plain = frame.count()
        few = frame.where("tag = 'odd' and offset >= 90 and topic = 'filtered'")
        # Spark would make a task for each queue and each filter, if the source did not leave ranges out.
        assert few.where("partition = 1").rdd.getNumPartitions() == 1
        assert sorted(int(bytes(row["value"])) for row in few.collect()) == list(range(181, 200, 2))
        assert frame.where("timestamp > now() + interval 1 hour").count() == 0
        assert (plain, frame.where("partition = 0").count()) == (200, 100)

        with sent_records(shard) as sent:
            assert frame.where("tag = 'odd'").select("offset").count() == 100
        # The shard leaves the others out.
        assert sum(sent) == 100
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")

    with sent_records(shard) as sent:
        given = {**options, "subscribe": "filtered"}
        odd = spark.read.format("raymq").options(**given, tags="odd || none").load()
        assert odd.count() == 100
        wanted = "TAGS = 'even' AND KEYS IN ('id-8', 'id-9')"
        found = spark.read.format("raymq").options(**given, sql=wanted).load()
        assert [bytes(row["value"]) for row in found.collect()] == [b"8"]
    assert sum(sent) == 101


@contextlib.contextmanager
def sent_records(shard: ServedShard) -> Iterator[list[int]]:
    """Notes how many records the shard sends with each answer."""
    sent: list[int] = []
    fetch = shard.host.fetch

    def counted(request: FetchRequest) -> list[FetchSlice]:
        found = fetch(request)
        sent.extend(0 if part.records is None else len(part.records) for part in found)
        return found

    shard.host.fetch = counted  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        del shard.host.fetch  # type: ignore[method-assign]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Asia/Kolkata"])
def test_filters_on_time_choose_the_same_rows_in_every_time_zone(
    spark: Any, shard: ServedShard, options: dict[str, str], zone: str
) -> None:
    topic = f"zoned-{zone.replace('/', '-')}"
    shard.cluster.create_topic(topic, queues=2)
    for first in range(0, 40, 10):
        rows = numbers(spark, 40).where(f"value between {first} and {first + 9}")
        write(rows, options, topic=topic)
    reader = spark.read.format("raymq").options(**options, subscribe=topic)
    plain = reader.load()
    pushed = reader.option("pushDownPredicate", "true").load()

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        middle = "cast(percentile_approx(timestamp, 0.5) as string) as at"
        (row,) = plain.selectExpr(middle).collect()
        for sign in ("<", "<=", "=", ">=", ">"):
            condition = f"timestamp {sign} '{row['at']}'"
            found = [
                sorted(int(bytes(each["value"])) for each in frame.where(condition).collect())
                for frame in (plain, pushed)
            ]
            assert found[0] == found[1], condition
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
