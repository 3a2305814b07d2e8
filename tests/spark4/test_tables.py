"""Tables, views, save modes and output modes of format("raymq"): what Spark allows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.served_shard import ServedShard

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NO_TABLE = "Spark gives the options of a saved table to no read and no write of it"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def as_sql(options: dict[str, str], **more: str) -> str:
    return ", ".join(f"`{name}` '{value}'" for name, value in {**options, **more}.items())


def stored(shard: ServedShard, topic: str) -> int:
    return int(shard.cluster.describe_topic(topic)["messages"])


def test_a_table_without_columns_is_refused_when_it_is_made(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("tabled", queues=1)
    given = as_sql(options, subscribe="tabled")
    with pytest.raises(Exception, match=f"{NO_TABLE}: use CREATE TEMPORARY VIEW"):
        spark.sql(f"create table tabled using raymq options ({given})")
    with pytest.raises(Exception, match=NO_TABLE):
        spark.catalog.createTable("tabled", source="raymq", **options, subscribe="tabled")
    assert not spark.catalog.tableExists("tabled")


def test_a_table_with_columns_needs_its_options_in_each_query(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("columns", queues=1)
    given = as_sql(options, topic="columns")
    # Spark asks no source when it makes one.
    spark.sql(f"create table columns (value binary) using raymq options ({given})")
    try:
        row = "values (cast('x' as binary))"
        for query in ("select * from columns", f"insert into columns {row}"):
            with pytest.raises(Exception, match=NO_TABLE):
                spark.sql(query).collect()
        with pytest.raises(Exception, match=NO_TABLE):
            spark.table("columns").count()

        spark.sql(f"insert into columns with ({given}) {row}")
        found = f"select value from columns with ({as_sql(options, subscribe='columns')})"
        assert [bytes(row["value"]) for row in spark.sql(found).collect()] == [b"x"]
        reader = spark.read.options(**options, subscribe="columns")
        assert reader.table("columns").count() == 1
    finally:
        spark.sql("drop table columns")


def test_temporary_views_read_and_take_rows(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("viewed", queues=1)
    make = "create or replace temporary view"
    spark.sql(f"{make} out (value binary) using raymq options ({as_sql(options, topic='viewed')})")
    spark.sql(f"{make} back using raymq options ({as_sql(options, subscribe='viewed')})")
    spark.sql("insert into out values (cast('x' as binary)), (cast('y' as binary))")
    found = spark.sql("select cast(value as string) as value from back order by value").collect()
    assert [row["value"] for row in found] == ["x", "y"]
    assert spark.table("back").count() == 2


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("overwrite", "a topic cannot be overwritten; use mode"),
        ("errorifexists", "cannot be written in the .ErrorIfExists. mode"),
        ("ignore", "cannot be written in the .Ignore. mode"),
    ],
)
def test_rows_are_only_appended(
    spark: Any, shard: ServedShard, options: dict[str, str], mode: str, words: str
) -> None:
    shard.cluster.create_topic("modes", queues=1)
    writer = spark.sql("select 'x' as value").write.format("raymq")
    with pytest.raises(Exception, match=words):
        writer.mode(mode).options(**options, topic="modes").save()
    assert stored(shard, "modes") == 0


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("update", "raymq does not support Update mode"),
        ("complete", "a topic cannot be overwritten; use .*outputMode"),
    ],
)
def test_a_stream_only_appends(
    spark: Any, shard: ServedShard, options: dict[str, str], tmp_path: Path, mode: str, words: str
) -> None:
    shard.cluster.create_topic("outputs", queues=1)
    frame = spark.readStream.format("raymq").options(**options, subscribe="outputs").load()
    counts = frame.groupBy("tag").count().selectExpr("cast(count as string) as value")
    writer = counts.writeStream.format("raymq").outputMode(mode)
    writer = writer.options(**options, topic="outputs")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(Exception, match=words):
        query.trigger(availableNow=True).start().awaitTermination(60)
    assert stored(shard, "outputs") == 0
