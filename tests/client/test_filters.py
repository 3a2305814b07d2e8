"""Consumers with `tags` or `sql` get what they want, and their position moves over everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from raymq.actors.api.call_arguments import EXPRESSION_CHARS_MAX
from raymq.actors.api.held_fetch import LOOK_MS, LOOKED_MS_MAX, LOOKED_UNITS_MAX
from raymq.client.consume import verify_crcs
from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.queue_ranges import QueueRange, read_queue_range
from raymq.client.consume.range_reader import RangeReader
from raymq.client.messages.topic_values import TopicValues
from raymq.client.transport.routes import Routes
from raymq.spark.range_columns import HowToRead, read_columns
from raymq.store.base.errors import Rejected
from raymq.store.queues import reader
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.requests import MessageSelector
from tests.support.clock import ManualClock
from tests.support.served_shard import ServedShard

COUNT = 60
TAGS = ("new", "paid", "sent")
#: options of a reader -> the numbers of the messages that it gets
CASES = [
    ({"tags": "paid"}, [n for n in range(COUNT) if n % 3 == 1]),
    ({"tags": " new||sent "}, [n for n in range(COUNT) if n % 3 != 1]),
    ({"tags": "*"}, list(range(COUNT))),
    ({"tags": "none of them"}, []),
    ({"sql": "price > 50"}, list(range(51, COUNT))),
    ({"sql": "region IN ('eu') AND TAGS = 'new'"}, [n for n in range(0, COUNT, 2) if n % 3 == 0]),
    ({"sql": "missing IS NOT NULL"}, []),
]
#: options -> the option that is at fault, the position of the fault or None, and a part of the message
WRONG = [
    ({"sql": "price >"}, "sql", 8, "the end at character 8"),
    ({"sql": "price ! 5"}, "sql", 7, "'!' at character 7"),
    ({"sql": ""}, "sql", None, "sql is empty"),
    ({"sql": 5}, "sql", None, "give text"),
    ({"sql": "a = " + "1" * EXPRESSION_CHARS_MAX}, "sql", None, "4096 are allowed"),
    ({"tags": "||"}, "tags", 1, "names no tag"),
    ({"tags": " "}, "tags", None, "tags is empty"),
    ({"tags": ["a"]}, "tags", None, "give text"),
    ({"tags": "a" * (EXPRESSION_CHARS_MAX + 1)}, "tags", None, "4097 characters"),
    ({"tags": "a", "sql": "b = 'c'"}, "tags", None, "both given"),
]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("shard")) as served:
        served.start_flusher()
        served.cluster.create_topic("orders", queues=1)
        with served.cluster.producer() as producer:
            for number in range(COUNT):
                region = "eu" if number % 2 == 0 else "us"
                producer.send(
                    "orders",
                    b"%d" % number,
                    tag=TAGS[number % 3],
                    properties={"price": str(number), "region": region},
                )
        yield served


def consumer_of(shard: ServedShard, **options: Any) -> Consumer:
    return shard.cluster.consumer("orders", start="earliest", **options)


def poll_to_the_end(consumer: Consumer) -> list[int]:
    """The numbers of all messages up to the end of the topic."""
    found: list[int] = []
    while consumer.position(0) < COUNT:
        found += [int(message.body) for message in consumer.poll(7, 0.05)]
    return found


@pytest.mark.parametrize(("options", "expected"), CASES)
def test_poll_returns_what_is_wanted_and_the_position_comes_to_the_end(
    shard: ServedShard, options: dict[str, str], expected: list[int]
) -> None:
    with consumer_of(shard, **options) as consumer:
        assert poll_to_the_end(consumer) == expected
        assert consumer.poll(10, 0) == []


@pytest.mark.parametrize(("options", "expected"), CASES)
def test_poll_batch_returns_the_same(
    shard: ServedShard, options: dict[str, str], expected: list[int]
) -> None:
    found: list[int] = []
    with consumer_of(shard, **options) as consumer:
        while consumer.position(0) < COUNT:
            found += map(int, consumer.poll_batch(7, 0.05)["body"].to_pylist())
    assert found == expected


@pytest.mark.parametrize(("options", "expected"), [each for each in CASES if each[1]])
def test_iteration_gives_the_same_and_ends_after_what_was_looked_at(
    shard: ServedShard, options: dict[str, str], expected: list[int]
) -> None:
    with consumer_of(shard, **options) as consumer:
        messages = iter(consumer)
        assert [int(next(messages).body) for _ in expected] == expected
        # Not the offset after the last message: the fetch has looked at all.
        assert consumer.position(0) == COUNT


@pytest.mark.parametrize(("options", "expected"), CASES)
def test_an_asyncio_consumer_gets_the_same(
    shard: ServedShard, options: dict[str, str], expected: list[int]
) -> None:
    async def read() -> list[int]:
        found: list[int] = []
        made = shard.cluster.async_consumer("orders", start="earliest", **options)
        async with made as consumer:
            while consumer.position(0) < COUNT:
                found += [int(message.body) for message in await consumer.poll(7, 0.05)]
        return found

    assert asyncio.run(read()) == expected


def test_a_group_goes_on_after_what_its_filter_did_not_want(shard: ServedShard) -> None:
    with consumer_of(shard, tags="none", group="g") as consumer:
        assert poll_to_the_end(consumer) == []
        consumer.commit()
        assert consumer.committed() == {0: COUNT}
    with consumer_of(shard, group="g") as consumer:
        assert consumer.poll(10, 0.05) == []


def test_part_of_a_fetch_leaves_the_position_at_the_next_wanted_message(shard: ServedShard) -> None:
    with consumer_of(shard, tags="paid") as consumer:
        assert [message.offset for message in consumer.poll(2, 5)] == [1, 4]
        assert consumer.position(0) == 7
        consumer.seek(0, 30)
        assert [message.offset for message in consumer.poll(1, 5)] == [31]


def test_the_position_moves_with_each_call_of_a_filter_that_never_matches(
    shard: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the shard, which is in this process: one look is at 4 units, and a call ends with the first.
    monkeypatch.setattr(reader, "FILTERED_UNITS", 4)
    monkeypatch.setattr("raymq.actors.api.held_fetch.LOOKED_UNITS_MAX", 4)
    seen = []
    with consumer_of(shard, sql="price > 1000") as consumer:
        while consumer.position(0) < COUNT:
            assert consumer.poll(10, 0) == []
            seen.append(consumer.position(0))
    assert set(seen) >= set(range(4, COUNT + 1, 4))


def test_the_limits_of_a_call_hold_whole_looks() -> None:
    assert LOOKED_UNITS_MAX == 65_536
    assert LOOKED_UNITS_MAX % reader.FILTERED_UNITS == 0
    assert 2 * LOOK_MS <= LOOKED_MS_MAX == 50


def test_the_members_of_a_group_have_one_filter(cluster: Any) -> None:
    def join(**wanted: str) -> Consumer:
        return Consumer(cluster, "t", group="g", start="earliest", **wanted)

    with join(tags="a || b") as first:
        with join(tags="a || b") as second:
            assert len(first.assignment()) + len(second.assignment()) <= 4
        for other in ({}, {"tags": "a"}, {"sql": "TAGS = 'a'"}):
            with pytest.raises(Rejected, match=r"TAG filter 'a \|\| b'") as caught:
                join(**other)
            assert caught.value.field == "filter"
    with join(sql="TAGS = 'a'"):
        pass


@pytest.mark.parametrize(("options", "option", "position", "words"), WRONG)
def test_a_wrong_filter_is_refused_when_a_consumer_is_made(
    cluster: Any, options: dict[str, Any], option: str, position: int | None, words: str
) -> None:
    for kind in (Consumer, AsyncConsumer):
        with pytest.raises(Rejected) as caught:
            kind(cluster, "t", start=0, **options)
        assert caught.value.field == option
        assert caught.value.fields.get("position") == position
        assert words in caught.value.message


def ranges_of(shard: ServedShard, first: int, last: int, selector: MessageSelector) -> list[int]:
    found: list[int] = []
    asked = QueueRange("orders", 0, 0, first, last)
    for records in read_queue_range(shard.cluster, asked, selector=selector):
        found += map(int, decode_records(records)["body"].to_pylist())
    return found


def test_a_range_is_read_as_far_as_it_goes_and_no_further(shard: ServedShard) -> None:
    assert ranges_of(shard, 10, 20, MessageSelector("TAG", "new")) == [12, 15, 18]
    assert ranges_of(shard, 10, 11, MessageSelector("TAG", "new")) == []
    assert ranges_of(shard, 0, COUNT, MessageSelector("SQL92", "price >= 58")) == [58, 59]


def test_tasks_of_spark_read_what_is_wanted(shard: ServedShard) -> None:
    values = TopicValues("orders")
    how = HowToRead("leader", True, values, ("paid",), MessageSelector("SQL92", "price < 9"))
    asked = QueueRange("orders", 0, 0, 0, COUNT)
    rows = [
        row
        for batch in read_columns(shard.cluster, asked, ("offset",), how)
        for row in batch.to_pylist()
    ]
    assert [row["offset"] for row in rows] == [1, 4, 7]


def test_a_range_in_which_nothing_is_wanted_does_not_time_out_while_the_shard_looks(
    shard: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FILTERED_UNITS", 1)
    monkeypatch.setattr("raymq.actors.api.held_fetch.LOOKED_UNITS_MAX", 1)
    routes, clock = Routes.of(shard.cluster), ManualClock()
    made = RangeReader(routes, "orders", 0, 0, selector=MessageSelector("TAG", "none"))
    made._clock = clock
    fetch = verify_crcs.verify_slices

    def slow(*arguments: Any) -> Any:
        clock.advance(900)
        return fetch(*arguments)

    monkeypatch.setattr("raymq.client.consume.range_reader.verify_slices", slow)
    with closing(made):
        records, following = made.fetch(0, COUNT, max_bytes=100, max_records=9, timeout_s=1)
    assert (len(records), following) == (0, COUNT)


def test_nothing_of_other_messages_is_sent(
    shard: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    fetch = shard.host.fetch

    def counted(request: Any) -> Any:
        found = fetch(request)
        sent.extend(len(part.records) for part in found)
        return found

    monkeypatch.setattr(shard.host, "fetch", counted)
    with consumer_of(shard, sql="price = 20 OR price = 40") as consumer:
        assert poll_to_the_end(consumer) == [20, 40]
    assert sum(sent) == 2
