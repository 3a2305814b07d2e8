"""Offsets by time, against two real shards: which message is the first at a time or later, or the last before it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

import raymq
from raymq.client.times import EARLIEST_MS, check_time
from raymq.cluster.cluster import Cluster
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from tests.support.served_shard import ServedCluster
from tests.support.waiting import until

QUEUES, ROUNDS = 3, 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ServedCluster(tmp_path_factory.mktemp("times")) as made:
        yield made.cluster


def later_ms(time_ms: int) -> int:
    """Wait until the clock shows a later time. Returns: it."""
    clock = Clock()
    until(lambda: clock.now_ms() > time_ms, lambda: clock.sleep_ms(1))
    return clock.now_ms()


@pytest.fixture(scope="module")
def times(cluster: Cluster) -> dict[int, list[int]]:
    """The store times of each queue of topic t, which all differ. Queue 2 is empty."""
    cluster.create_topic("t", queues=QUEUES)
    found: dict[int, list[int]] = {queue: [] for queue in range(QUEUES)}
    with cluster.producer() as producer:
        for _ in range(ROUNDS):
            for queue in (0, 1):
                receipt = producer.send("t", b"x", queue_id=queue).result(30)
                found[queue].append(receipt.store_time_ms)
                later_ms(receipt.store_time_ms)
    return found


def test_first_is_the_first_message_at_a_time_or_later_and_last_the_last_one_before_it(
    cluster: Cluster, times: dict[int, list[int]]
) -> None:
    moments = [each + step for queue in (0, 1) for each in times[queue] for step in (-1, 0, 1)]
    for moment in moments:
        first = cluster.offsets_for_times("t", moment)
        last = cluster.offsets_for_times("t", moment, "last")
        for queue, stored in times.items():
            assert first[queue] == sum(each < moment for each in stored)
            assert last[queue] == max(0, sum(each <= moment for each in stored) - 1)


def test_each_queue_may_have_a_time_of_its_own_and_only_these_are_answered(
    cluster: Cluster, times: dict[int, list[int]]
) -> None:
    wanted = {np.int64(1): times[1][2], 0: raymq.at_ms(times[0][3])}
    assert cluster.offsets_for_times("t", wanted) == {1: 2, 0: 3}
    assert cluster.offsets_for_times("t", {}) == {}
    with pytest.raises(Rejected, match="queues 0 to 2"):
        cluster.offsets_for_times("t", {3: times[0][0]})


def test_a_topic_that_does_not_exist_and_a_wrong_boundary_are_refused(cluster: Cluster) -> None:
    with pytest.raises(Rejected, match="does not exist"):
        cluster.offsets_for_times("none", raymq.at_ms(EARLIEST_MS))
    with pytest.raises(Rejected, match="'first' or 'last'"):
        cluster.offsets_for_times("t", EARLIEST_MS, "lower")  # type: ignore[arg-type]


def test_a_consumer_starts_at_a_time_and_seeks_to_one(
    cluster: Cluster, times: dict[int, list[int]]
) -> None:
    with cluster.consumer("t", start=raymq.at_ms(times[0][1])) as consumer:
        assert consumer.positions() == {0: 1, 1: 1, 2: 0}
        assert consumer.seek_time(times[1][3]) == consumer.positions() == {0: 4, 1: 3, 2: 0}
        found = []
        while len(found) < 3:
            found += consumer.poll(timeout=20)
        assert sorted((each.queue_id, each.offset) for each in found) == [(0, 4), (1, 3), (1, 4)]
        consumer.seek_time(datetime.now(timezone.utc) + timedelta(days=1))
        assert consumer.positions() == {0: ROUNDS, 1: ROUNDS, 2: 0}


def test_a_group_goes_on_where_it_was_and_begins_other_queues_at_the_time(
    cluster: Cluster, times: dict[int, list[int]]
) -> None:
    with cluster.consumer("t", group="g", start="earliest") as consumer:
        consumer.commit({0: 2})
    with cluster.consumer("t", group="g", start=raymq.at_ms(times[1][4])) as consumer:
        assert consumer.positions() == {0: 2, 1: 4, 2: 0}


def test_a_member_of_a_group_that_goes_back_in_time_commits_the_earlier_offsets(
    cluster: Cluster, times: dict[int, list[int]]
) -> None:
    with cluster.consumer("t", group="back", start="earliest") as consumer:
        while consumer.positions() != {0: ROUNDS, 1: ROUNDS, 2: 0}:
            consumer.poll(timeout=20)
        consumer.commit()
        consumer.seek_time(times[0][2])
        consumer.commit()
        assert consumer.committed() == {0: 2, 1: 2, 2: 0}
    with cluster.consumer("t", group="back") as consumer:
        assert consumer.positions() == {0: 2, 1: 2, 2: 0}


def test_the_consumer_for_asyncio_starts_and_seeks_as_well(
    cluster: Cluster, times: dict[int, list[int]]
) -> None:
    async def run() -> None:
        start = raymq.at_ms(times[0][2])
        async with cluster.async_consumer("t", start=start, queues=[0]) as consumer:
            assert consumer.positions() == {0: 2}
            assert await consumer.seek_time(times[0][4]) == {0: 4}
            (message,) = await consumer.poll(timeout=20)
            assert message.offset == 4

    asyncio.run(run())


def test_of_a_compacted_topic_only_messages_that_are_left_count(cluster: Cluster) -> None:
    cluster.create_topic("c", queues=1, compacted=True)
    with cluster.producer() as producer:
        receipt = producer.send("c", b"1", index_keys=("a",)).result(30)
        later_ms(receipt.store_time_ms)
        second = producer.send("c", b"2", index_keys=("a",)).result(30)
    assert cluster.offsets_for_times("c", receipt.store_time_ms) == {0: 0}
    assert cluster.offsets_for_times("c", receipt.store_time_ms + 1) == {0: 1}
    assert cluster.offsets_for_times("c", second.store_time_ms, "last") == {0: 1}
    assert cluster.offsets_for_times("c", second.store_time_ms + 1) == {0: 2}


@pytest.mark.parametrize(
    "time",
    [
        datetime(2026, 1, 1),  # noqa: DTZ001
        datetime(2000, 1, 1, tzinfo=timezone.utc),
        1_790_000_000,
        0,
        -1,
        2**63,
        1.79e12,
        True,
        None,
        "2026-01-01",
    ],
)
def test_other_types_and_times_before_2001_are_refused_everywhere(
    cluster: Cluster, times: dict[int, list[int]], time: Any
) -> None:
    with cluster.consumer("t", start="latest") as consumer:
        before = consumer.positions()
        with pytest.raises(Rejected) as refused:
            consumer.seek_time(time)
        assert refused.value.field == "time"
        assert consumer.positions() == before
    with pytest.raises(Rejected) as refused:
        cluster.offsets_for_times("t", time)
    assert refused.value.field == "times"
    if isinstance(time, datetime):
        with pytest.raises(Rejected) as refused:
            cluster.consumer("t", start=time)
        assert refused.value.field == "start"


def test_times_are_exact_to_the_millisecond_in_every_zone() -> None:
    time_ms = 1_790_000_000_123
    tokyo = timezone(timedelta(hours=9))
    assert check_time("t", raymq.at_ms(time_ms)) == time_ms
    assert check_time("t", raymq.at_ms(time_ms).astimezone(tokyo)) == time_ms
    assert check_time("t", raymq.at_ms(time_ms) + timedelta(microseconds=999)) == time_ms
    assert check_time("t", np.int64(time_ms)) == time_ms
    assert raymq.at_ms(time_ms).isoformat() == "2026-09-21T14:13:20.123000+00:00"
