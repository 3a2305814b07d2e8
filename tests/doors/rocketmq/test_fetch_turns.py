"""Reads of several pulls are one fetch, and each gets its own part or error."""

from __future__ import annotations

import asyncio

import pytest

from raymq.doors.rocketmq.fetch_turns import QUEUES_MAX, FetchTurns
from raymq.store.base.errors import Bug, RayMQError, Unavailable
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector


def wish(queue_id: int, topic: str = "t", *, wanted: MessageSelector | None = None) -> FetchRequest:
    return FetchRequest(topic, {queue_id: 7}, 100, 10, 0, wanted=wanted)


def part_of(queue_id: int) -> FetchSlice:
    return FetchSlice(queue_id, 7, 8, 0, 9, None, None)


class Shard:
    """Answers fetches, and notes them."""

    def __init__(self, *queues: int, error: Exception | None = None) -> None:
        self.queues = queues
        self.error = error
        self.fetches: list[FetchRequest] = []

    async def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        self.fetches.append(request)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return [part_of(each) for each in request.offsets if each in self.queues]


def read_all(shard: Shard, *wishes: FetchRequest) -> list[FetchSlice | BaseException | None]:
    async def run() -> list[FetchSlice | BaseException | None]:
        turns = FetchTurns(shard.fetch, asyncio.get_running_loop())
        return await asyncio.gather(*map(turns.read, wishes), return_exceptions=True)

    return asyncio.run(run())


def test_a_queue_that_a_fetch_did_not_reach_is_read_alone() -> None:
    shard = Shard(0)
    assert read_all(shard, wish(0), wish(1)) == [part_of(0), None]
    assert [list(each.offsets) for each in shard.fetches] == [[0, 1], [1]]


def test_queues_of_one_topic_are_one_fetch_with_the_bytes_of_all() -> None:
    shard = Shard(0, 2)
    assert read_all(shard, wish(0), wish(1), wish(2)) == [part_of(0), None, part_of(2)]
    fetch = shard.fetches[0]
    assert fetch.offsets == {0: 7, 1: 7, 2: 7}
    assert (fetch.max_bytes, fetch.max_records) == (300, 10)


def test_what_is_not_alike_is_fetched_apart() -> None:
    shard = Shard(0, 1)
    filtered = wish(1, wanted=MessageSelector("TAG", "a"))
    found = read_all(shard, wish(0), filtered, wish(0, "other"))
    assert found == [part_of(0), part_of(1), part_of(0)]
    assert len(shard.fetches) == 3


def test_two_pulls_of_one_queue_get_the_same() -> None:
    shard = Shard(0)
    assert read_all(shard, wish(0), wish(0)) == [part_of(0), part_of(0)]
    assert len(shard.fetches) == 1


def test_two_pulls_of_one_queue_from_two_offsets_are_fetched_beside_each_other() -> None:
    shard = Shard(0)
    later = wish(0)._replace(offsets={0: 9})
    assert read_all(shard, wish(0), later) == [part_of(0), part_of(0)]
    assert [each.offsets for each in shard.fetches] == [{0: 7}, {0: 9}]


@pytest.mark.parametrize("wait_ms", [0, 50])
def test_reads_with_a_filter_of_queues_that_have_nothing_end(wait_ms: int) -> None:
    """Such a fetch may have ended before it looked at a queue, so each of them is looked at once more, alone."""
    shard = Shard()
    wishes = [
        wish(queue_id, wanted=MessageSelector("TAG", "a"))._replace(wait_ms=wait_ms)
        for queue_id in range(3)
    ]
    assert read_all(shard, *wishes) == [None, None, None]
    assert [list(each.offsets) for each in shard.fetches] == [[0, 1, 2], [0], [1], [2]]


def test_a_read_of_an_idle_queue_waits_for_two_fetches_at_most() -> None:
    shard = Shard(1)

    async def run() -> None:
        turns = FetchTurns(shard.fetch, asyncio.get_running_loop())
        idle = asyncio.ensure_future(turns.read(wish(0)))
        while not idle.done():
            await turns.read(wish(1))
        assert await idle is None

    asyncio.run(run())
    assert sum(0 in each.offsets for each in shard.fetches) == 2


def test_what_nothing_waits_for_is_not_fetched() -> None:
    shard = Shard(0)

    async def run() -> None:
        turns = FetchTurns(shard.fetch, asyncio.get_running_loop())
        left = asyncio.ensure_future(turns.read(wish(1)))
        await asyncio.sleep(0)
        left.cancel()
        await turns.read(wish(0, "other"))

    asyncio.run(run())
    assert [each.topic for each in shard.fetches] == ["other"]


def test_a_fetch_has_a_limit() -> None:
    shard = Shard(*range(QUEUES_MAX + 1))
    read_all(shard, *map(wish, range(QUEUES_MAX + 1)))
    assert [len(each.offsets) for each in shard.fetches] == [QUEUES_MAX, 1]


def test_fetches_that_are_under_way_end_with_the_server() -> None:
    async def run() -> bool:
        began, never = asyncio.Event(), asyncio.Event()

        async def fetch(request: FetchRequest) -> list[FetchSlice]:
            began.set()
            await never.wait()
            return []

        turns = FetchTurns(fetch, asyncio.get_running_loop())
        pull = asyncio.ensure_future(turns.read(wish(0)))
        await began.wait()
        pull.cancel()
        await turns.stop()
        # The task of this function alone is left.
        return len(asyncio.all_tasks()) == 1

    assert asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "kind"), [(Unavailable("away"), Unavailable), (ValueError("x"), Bug)]
)
def test_an_error_reaches_each_pull(error: Exception, kind: type[RayMQError]) -> None:
    found = read_all(Shard(error=error), wish(0), wish(1))
    assert [type(each) for each in found] == [kind, kind]


def test_the_reads_that_come_during_a_fetch_are_the_next_one() -> None:
    shard = Shard(0, 1, 2)

    async def run() -> None:
        turns = FetchTurns(shard.fetch, asyncio.get_running_loop())
        first = asyncio.ensure_future(turns.read(wish(0)))
        while not shard.fetches:
            await asyncio.sleep(0)
        await asyncio.gather(first, turns.read(wish(1)), turns.read(wish(2)))

    asyncio.run(run())
    assert [list(each.offsets) for each in shard.fetches] == [[0], [1, 2]]


def test_a_fetch_that_waits_holds_no_other_up() -> None:
    begun: list[FetchRequest] = []

    async def run() -> None:
        may_end = asyncio.Event()

        async def fetch(request: FetchRequest) -> list[FetchSlice]:
            begun.append(request)
            await may_end.wait()
            return []

        turns = FetchTurns(fetch, asyncio.get_running_loop())
        reads = [asyncio.ensure_future(turns.read(wish(0)._replace(wait_ms=50)))]
        while not begun:
            await asyncio.sleep(0)
        reads.append(asyncio.ensure_future(turns.read(wish(1)._replace(wait_ms=50))))
        while len(begun) < 2:
            await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*reads)

    asyncio.run(run())
    assert len(begun) == 2
