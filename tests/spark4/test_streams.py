"""Streams of format("raymq") on Spark 4: every message once, whenever the query is stopped and started again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_shard import ServedShard

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Put = Callable[..., None]
SCHEMA = "topic string, partition int, offset bigint, value binary"


class Query:
    """A query that writes a topic to files."""

    def __init__(self, spark: Any, place: Path, options: dict[str, str]) -> None:
        self._spark = spark
        self._options = options
        self._output = place / "output"
        self.checkpoint = place / "checkpoint"

    def run(self, *, trigger: dict[str, Any] | None = None, **given: str) -> Any:
        """Start it, let it read all that is there, and stop it. Returns: the stopped query."""
        reader = self._spark.readStream.format("raymq").schema(SCHEMA)
        frame = reader.options(**self._options, **given).load()
        writer = frame.writeStream.format("parquet").option("path", str(self._output))
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        query = (writer if trigger is None else writer.trigger(**trigger)).start()
        try:
            if trigger is None:
                query.processAllAvailable()
            else:
                query.awaitTermination(60)
        finally:
            query.stop()
        return query

    def bodies(self) -> list[bytes]:
        """What it wrote, sorted."""
        rows = self._spark.read.schema(SCHEMA).parquet(str(self._output)).collect()
        return sorted(bytes(row["value"]) for row in rows)

    def offsets(self, batch: int) -> Any:
        """The end of a batch, as Spark keeps it."""
        lines = (self.checkpoint / "offsets" / str(batch)).read_text().splitlines()
        return json.loads(lines[-1])


@pytest.fixture
def query(spark: Any, place: Path, options: dict[str, str]) -> Query:
    return Query(spark, place, options)


def numbers(letter: str, count: int, start: int = 0) -> list[bytes]:
    return [f"{letter}{number:04}".encode() for number in range(start, start + count)]


def sizes(query: Any) -> list[int]:
    """The messages of each batch that had any."""
    return [rows for each in query.recentProgress if (rows := each["numInputRows"])]


def test_a_stream_with_a_limit_is_stopped_and_goes_on_from_its_checkpoint(
    put: Put, query: Query
) -> None:
    put("limited", 0, *numbers("a", 30), queues=2)
    put("limited", 1, *numbers("b", 6), queues=2)
    given = {
        "subscribe": "limited",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "12",
    }
    first = query.run(**given)
    assert sizes(first) == [12, 12, 12]
    assert query.offsets(0) == {"limited": {"0": 10, "1": 2}}
    assert first.lastProgress["sources"][0]["latestOffset"] == {"limited": {"0": 30, "1": 6}}

    put("limited", 1, *numbers("b", 5, start=6), queues=2)
    assert sizes(query.run(**given)) == [5]
    assert query.bodies() == numbers("a", 30) + numbers("b", 11)


def test_a_first_batch_that_was_not_committed_loses_nothing(put: Put, query: Query) -> None:
    put("anchored", 0, b"old")
    query.run(subscribe="anchored")
    assert query.offsets(0) == {"anchored": {"0": 1}}

    # As if the driver had ended before it committed the batch.
    shutil.rmtree(query.checkpoint / "commits")
    put("anchored", 0, *numbers("n", 3))
    query.run(subscribe="anchored")
    assert query.bodies() == numbers("n", 3)


def test_available_now_reads_what_is_there_in_batches_and_ends(put: Put, query: Query) -> None:
    put("present-1", 0, *numbers("p", 9))
    given = {
        "subscribePattern": "present-.*",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "4",
    }
    now = {"availableNow": True}
    assert sizes(query.run(trigger=now, **given)) == [4, 4, 1]
    put("present-2", 0, *numbers("q", 2))
    assert sizes(query.run(trigger=now, **given)) == [2]
    assert query.bodies() == numbers("p", 9) + numbers("q", 2)


def test_expired_messages_end_a_stream_or_are_passed_over(
    shard: ServedShard, put: Put, query: Query
) -> None:
    from pyspark.errors import StreamingQueryException

    large = [body * 4_000 for body in numbers("e", 40)]
    put("expiring", 0, large[0])
    query.run(subscribe="expiring", startingOffsets="earliest")
    put("expiring", 0, *large[1:])
    shard.cluster.call(0, "delete_expired_files", {})
    (held,) = shard.cluster.describe_topic("expiring")["queues"]
    assert 1 < held["min_offset"] < 40

    with pytest.raises(StreamingQueryException) as ended:
        query.run(subscribe="expiring")
    assert f"the messages of the offsets 1 to {held['min_offset'] - 1} expired" in str(ended.value)
    assert "failOnDataLoss=false reads on without them" in str(ended.value)
    query.run(subscribe="expiring", failOnDataLoss="false")
    assert query.bodies() == [large[0], *large[held["min_offset"] :]]
