"""Batches of format("raymq"), read by Spark 4 from a real shard."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from raymq.spark.columns import BY_NAME, COLUMNS
from tests.support.damaged_store import flip
from tests.support.served_shard import ServedShard

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Put = Callable[..., None]


def bodies(frame: Any) -> list[bytes]:
    return sorted(bytes(row["value"]) for row in frame.select("value").collect())


def test_a_frame_has_kafkas_columns_and_those_of_raymq(
    spark: Any, put: Put, options: dict[str, str]
) -> None:
    properties = {"colour": "red", "size": "9"}
    put("rich", 0, b"espresso", key=b"alice", tag="bar", properties=properties, index_keys=("k1",))
    put("rich", 0, b"plain")
    frame = spark.read.format("raymq").options(**options, subscribe="rich")
    frame = frame.option("includeHeaders", "true").load()
    assert [(name, kind) for name, kind in frame.dtypes] == [
        (name, column.spark) for name, column in COLUMNS.items() if name not in BY_NAME
    ]

    first, second = frame.orderBy("offset").collect()
    assert (bytes(first["key"]), bytes(first["value"])) == (b"alice", b"espresso")
    assert (first["topic"], first["partition"], first["offset"]) == ("rich", 0, 0)
    assert abs(first["timestamp"].timestamp() - time.time()) < 86_400
    assert (first["timestampType"], first["tag"], first["shard"]) == (1, "bar", 0)
    headers = {header["key"]: bytes(header["value"]) for header in first["headers"]}
    assert headers == {"colour": b"red", "size": b"9"}
    assert (first["properties"], first["index_keys"]) == (properties, ["k1"])
    assert (second["key"], second["headers"], second["tag"]) == (None, None, None)
    assert (second["properties"], second["index_keys"], second["deliver_at"]) == (None, None, None)


def test_topics_offsets_times_and_columns_are_chosen(
    spark: Any, put: Put, options: dict[str, str]
) -> None:
    put("some-a", 0, b"a0", b"a1", b"a2", queues=2)
    put("some-a", 1, b"a3", queues=2)
    put("some-b", 0, b"b0")

    def load(schema: str | None = None, **given: str) -> Any:
        reader = spark.read.format("raymq").options(**options, **given)
        return (reader if schema is None else reader.schema(schema)).load()

    assert bodies(load(subscribe="some-a,some-b")) == [b"a0", b"a1", b"a2", b"a3", b"b0"]
    assert bodies(load(assign='{"some-a": [1], "some-b": [0]}')) == [b"a3", b"b0"]
    frame = load(
        schema="offset bigint, value binary",
        subscribePattern="some-a",
        startingOffsets='{"some-a": {"0": 1, "1": -2}}',
        endingOffsets='{"some-a": {"0": 2, "1": -1}}',
        minPartitions="2",
    )
    assert frame.columns == ["offset", "value"]
    assert frame.rdd.getNumPartitions() == 2
    assert bodies(frame) == [b"a1", b"a3"]

    # The store time of the second message is where a read by time begins.
    times = load(subscribe="some-a").where("partition = 0 and offset = 1")
    (row,) = times.selectExpr("unix_millis(timestamp) as ms").collect()
    found = bodies(load(assign='{"some-a": [0]}', startingTimestamp=str(row["ms"])))
    assert found[-1] == b"a2"
    assert b"a1" in found
    assert load(assign='{"some-b": [0]}', endingTimestamp="1").count() == 0


@pytest.mark.parametrize(
    ("given", "schema", "words"),
    [
        ({"subscribe": "t", "colour": "red"}, None, "unknown option 'colour'"),
        ({}, None, "exactly one of subscribe, subscribePattern and assign"),
        ({"subscribe": "t", "startingOffsets": "latest"}, None, "use earliest or an offset"),
        ({"subscribe": "nowhere"}, None, "topic 'nowhere' does not exist"),
        ({"subscribe": "t"}, "colour string", "unknown column 'colour'"),
    ],
)
def test_wrong_options_and_columns_are_refused_in_one_line(
    spark: Any, put: Put, options: dict[str, str], given: Any, schema: str | None, words: str
) -> None:
    from pyspark.errors import PySparkException

    reader = spark.read.format("raymq").options(**options, **given)
    with pytest.raises(PySparkException) as refused:
        (reader if schema is None else reader.schema(schema)).load().count()
    (line,) = [line for line in str(refused.value).splitlines() if words in line]
    assert "Rejected: " in line


def test_a_task_that_fails_says_what_the_shard_said(
    spark: Any, shard: ServedShard, put: Put, options: dict[str, str]
) -> None:
    from pyspark.errors import PySparkException

    put("damaged", 0, b"whole", b"to be damaged")
    for path in (shard.root / "commitlog").iterdir():
        at = path.read_bytes().find(b"to be damaged")
        if at >= 0:
            flip(path, at)

    frame = spark.read.format("raymq").options(**options, subscribe="damaged").load()
    with pytest.raises(PySparkException) as failed:
        frame.count()
    # PySpark 4.1.0 begins with an empty line.
    lines = str(failed.value).lstrip().splitlines()
    (place,) = [number for number, line in enumerate(lines) if "Corrupt: " in line]
    assert "damaged (bad body CRC)" in lines[place]
    # Before it are Spark's own line, the word "Traceback", and the two frames of its last raise.
    assert place <= 6
