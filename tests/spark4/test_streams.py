"""Streams of format("raymq") on Spark 4: every message once, whenever the query is stopped and started again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from raymq.spark.stream_reader import HAS_ADMISSION_CONTROL
from tests.support.served_shard import ServedShard
from tests.support.spark_query import Query

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Put = Callable[..., None]


def numbers(letter: str, count: int, start: int = 0) -> list[bytes]:
    return [f"{letter}{number:04}".encode() for number in range(start, start + count)]


def sizes(query: Any) -> list[int]:
    """The messages of each batch that had any."""
    return [rows for each in query.recentProgress if (rows := each["numInputRows"])]


@pytest.mark.skipif(not HAS_ADMISSION_CONTROL, reason="Spark before 4.2 limits no Python source")
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
    (source,) = first.lastProgress["sources"]
    assert json.loads(source["latestOffset"]) == {"limited": {"0": 30, "1": 6}}

    put("limited", 1, *numbers("b", 5, start=6), queues=2)
    assert sizes(query.run(**given)) == [5]
    assert query.bodies() == numbers("a", 30) + numbers("b", 11)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"subscribe": "t", "endingOffsets": "latest"}, "endingOffsets is for batches"),
        ({"subscribe": "t", "failOnDataLoss": "maybe"}, "failOnDataLoss is 'maybe'"),
        ({"subscribe": "nowhere"}, "topic 'nowhere' does not exist"),
    ],
)
def test_wrong_options_end_the_query_in_one_line(query: Query, given: Any, words: str) -> None:
    from pyspark.errors import StreamingQueryException

    with pytest.raises(StreamingQueryException) as refused:
        query.run(**given)
    lines = [line for line in str(refused.value).splitlines() if words in line]
    assert lines
    assert all("Rejected: " in line for line in lines)
    assert "UnboundLocalError" not in str(refused.value)


def test_a_first_batch_that_was_not_committed_loses_nothing(put: Put, query: Query) -> None:
    put("anchored", 0, b"old")
    query.run(subscribe="anchored")
    assert query.offsets(0) == {"anchored": {"0": 1}}

    # As if the driver had ended before the sink and then the query committed the batch.
    shutil.rmtree(query.output)
    shutil.rmtree(query.checkpoint / "commits")
    put("anchored", 0, *numbers("n", 3))
    query.run(subscribe="anchored")
    assert query.bodies() == numbers("n", 3)


def test_available_now_reads_what_is_there_in_batches_and_ends(put: Put, query: Query) -> None:
    put("present-1", 0, *numbers("p", 9))
    limit = {"maxOffsetsPerTrigger": "4"} if HAS_ADMISSION_CONTROL else {}
    given = {"subscribePattern": "present-.*", "startingOffsets": "earliest", **limit}
    now = {"availableNow": True}
    assert sizes(query.run(trigger=now, **given)) == ([4, 4, 1] if limit else [9])
    put("present-2", 0, *numbers("q", 2))
    assert sizes(query.run(trigger=now, **given)) == [2]
    assert query.bodies() == numbers("p", 9) + numbers("q", 2)


@pytest.mark.parametrize("given", [{"tags": "odd || none"}, {"sql": "TAGS = 'odd'"}], ids=str)
def test_a_stream_with_a_filter_goes_on_after_what_it_does_not_want(
    shard: ServedShard, query: Query, given: dict[str, str]
) -> None:
    topic = f"filtered-by-{next(iter(given))}"
    shard.cluster.create_topic(topic, queues=1)
    with shard.cluster.producer() as producer:
        for number in range(9):
            producer.send(topic, b"%d" % number, tag="odd" if number % 2 else "even")
    query.run(subscribe=topic, startingOffsets="earliest", **given)
    assert query.bodies() == [b"1", b"3", b"5", b"7"]
    assert query.offsets(0) == {topic: {"0": 9}}
