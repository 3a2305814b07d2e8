"""Topics with a schema, values of several columns, and checkpoints of raymq.spark.stream, on Spark 4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import raymq
from raymq.spark import from_value, read, stream, stream_sink, to_value, write
from raymq.store.base.errors import Rejected
from tests.support.served_shard import ServedShard
from tests.support.typed_frames import (
    SCHEMA,
    check_names,
    check_round_trip,
    check_value_types,
    typed_frame,
)

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def cluster(shard: ServedShard) -> Iterator[raymq.Cluster]:
    """A handle that tasks may take along."""
    url = f"raymq://{shard.endpoints[0]}"
    with raymq.connect(url, token=shard.cluster.token) as connected:
        yield connected


def test_rows_of_a_schema_round_trip_through_the_format(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("typed", queues=2, schema=SCHEMA)
    frame = typed_frame(spark)
    frame.write.format("raymq").mode("append").options(**options, topic="typed").save()
    found = spark.read.format("raymq").options(**options, subscribe="typed").load()
    assert found.columns[:3] == ["key", "id", "flag"]
    assert "value" not in found.columns
    check_round_trip(frame, found.select(*frame.columns))

    # A schema of the reader takes any of these columns, and the bytes.
    chosen = spark.read.schema("offset bigint, id bigint, value binary").format("raymq")
    rows = chosen.options(**options, subscribe="typed").load().collect()
    assert all(json.loads(bytes(row["value"]))["id"] == row["id"] for row in rows)


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("select 1L as id, 'red' as colour", "unknown column 'colour'.*add_column"),
        ("select 1 as id", "column id has type int, expected bigint; cast it"),
        ("select true as flag", "column id is missing"),
        ("select 'x' as value", "unknown column 'value'"),
        ("select cast(null as bigint) as id, true as flag", "column id is null"),
    ],
)
def test_rows_that_do_not_fit_the_schema_are_refused_with_the_columns_name(
    spark: Any, shard: ServedShard, options: dict[str, str], sql: str, text: str
) -> None:
    shard.cluster.create_topic("typed-strict", queues=1, schema=SCHEMA)
    writer = spark.sql(sql).write.format("raymq").mode("append")
    with pytest.raises(Exception, match=text):
        writer.options(**options, topic="typed-strict").save()
    assert shard.cluster.describe_topic("typed-strict")["messages"] == 0


def test_null_values_round_trip_where_the_topic_allows_them(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("nullable", queues=1, allow_null_values=True)
    frame = spark.sql("select 'a' as key, cast(null as string) as value union all select 'b', ''")
    frame.write.format("raymq").mode("append").options(**options, topic="nullable").save()
    found = spark.read.format("raymq").options(**options, subscribe="nullable").load()
    rows = found.select("key", "value").orderBy("key").collect()
    assert [(bytes(row["key"]), row["value"]) for row in rows] == [(b"a", None), (b"b", b"")]


@pytest.mark.parametrize("codec", ["json", "arrow-ipc"])
def test_columns_become_one_value_and_come_back(spark: Any, codec: Any) -> None:
    check_value_types(spark, codec)
    check_names(spark, codec)


def test_a_stream_reads_the_columns_of_a_schema(
    spark: Any, cluster: raymq.Cluster, options: dict[str, str], tmp_path: Path
) -> None:
    cluster.create_topic("typed-stream", queues=2, schema=pa.schema([("id", pa.int64())]))
    write(spark.sql("select id from range(50)"), cluster, topic="typed-stream")
    frame = spark.readStream.format("raymq").options(
        **options, subscribe="typed-stream", startingOffsets="earliest"
    )
    writer = frame.load().select("id").writeStream.format("parquet")
    writer = writer.option("path", str(tmp_path / "out"))
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination(60)
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(row["id"] for row in rows) == list(range(50))


def test_spark_4_goes_on_with_the_checkpoint_of_a_stream_of_35_and_the_other_way_round(
    spark: Any, cluster: raymq.Cluster, options: dict[str, str], put: Any, tmp_path: Path
) -> None:
    put("handed-over", 0, *(b"%d" % number for number in range(10)), queues=2)
    place = tmp_path / "checkpoint"
    seen: list[bytes] = []

    def keep(frame: Any, batch_id: int) -> None:
        seen.extend(bytes(row["value"]) for row in frame.select("value").collect())

    def run_ours() -> int:
        return stream(
            spark,
            cluster,
            "handed-over",
            foreachBatch=keep,
            checkpointLocation=str(place),
            availableNow=True,
            startingOffsets="earliest",
            maxOffsetsPerTrigger=6,
        )

    def run_spark() -> None:
        given = {"subscribe": "handed-over", "startingOffsets": "earliest"}
        frame = spark.readStream.format("raymq").options(**options, **given).load()
        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(place))
        writer.trigger(availableNow=True).start().awaitTermination(60)

    assert run_ours() == 2
    put("handed-over", 1, b"10", b"11", queues=2)
    run_spark()
    assert sorted(map(int, seen)) == [*range(12)]
    # Both have written batches of this checkpoint, in the same form.
    texts = [(place / "offsets" / str(number)).read_text().splitlines() for number in range(3)]
    assert [json.loads(texts[number][-1]) for number in range(3)] == [
        {"handed-over": {"0": 6, "1": 0}},
        {"handed-over": {"0": 10, "1": 0}},
        {"handed-over": {"0": 10, "1": 2}},
    ]
    assert [(len(text), text[0]) for text in texts] == [(3, "v1")] * 3
    put("handed-over", 0, b"12", queues=2)
    assert run_ours() == 1
    assert sorted(map(int, seen)) == [*range(13)]


def test_the_functions_of_35_work_with_spark_4(spark: Any, cluster: raymq.Cluster) -> None:
    cluster.create_topic("functions", queues=2)
    rows = to_value(spark.sql("select id, id * 2 as twice, 'k' as key from range(20)"))
    assert write(rows, cluster, topic="functions", writeId="f").rows == 20
    stream_sink(cluster, topic="functions", query="q")(rows.limit(1), 0)
    back = from_value(read(spark, cluster, "functions"), "id bigint, twice bigint")
    assert back.filter("twice = id * 2").count() == 21
    with pytest.raises(Rejected, match="the DataFrame has a column 'key' already"):
        from_value(back.withColumn("value", back["key"]), "key string")


def test_a_second_sink_of_a_query_to_its_topic_needs_a_name_of_its_own(
    spark: Any, cluster: raymq.Cluster, tmp_path: Path
) -> None:
    cluster.create_topic("sinks", queues=1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "0.txt").write_text("\n".join(map(str, range(20))))
    evens = stream_sink(cluster, topic="sinks")

    def run(odds: Any) -> None:
        def split(frame: Any, batch_id: int) -> None:
            evens(frame.where("value % 2 = 0"), batch_id)
            odds(frame.where("value % 2 = 1"), batch_id)

        frame = spark.readStream.schema("value string").text(str(tmp_path / "source"))
        writer = frame.writeStream.foreachBatch(split).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.start().awaitTermination(60)

    with pytest.raises(Exception, match="written before by another sink, with other rows"):
        run(stream_sink(cluster, topic="sinks"))
    run(stream_sink(cluster, topic="sinks", query="odds"))
    found = read(spark, cluster, "sinks").selectExpr("cast(cast(value as string) as int)").collect()
    assert sorted(row[0] for row in found) == list(range(20))
