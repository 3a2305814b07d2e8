"""A fetch brings the messages of several pulls of a queue that is read from far behind its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pyarrow as pa
import pytest

from raymq.doors.rocketmq.queue_read_ahead import AHEAD, KEPT_BYTES_MAX, KEPT_S, QueueReadAhead
from raymq.store.base import format as fmt
from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector

PULL = 10
BYTES = 100


def record(offset: int, size: int = BYTES) -> bytes:
    head = bytes(fmt.QUEUE_OFFSET_AT) + offset.to_bytes(8, "big")
    return head + bytes(size - len(head))


def wish(
    offset: int,
    *,
    queue_id: int = 0,
    wanted: MessageSelector | None = None,
    max_bytes: int = BYTES * PULL,
) -> FetchRequest:
    return FetchRequest("t", {queue_id: offset}, max_bytes, PULL, 0, wanted=wanted)


class Loop:
    """A clock, and what it will call."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, _: float, call: Callable[[], None]) -> None:
        self.timers.append(call)


class Shard:
    """Queues with messages at some of the offsets up to an end."""

    def __init__(self, offsets: range, *, end: int | None = None, size: int = BYTES) -> None:
        self.offsets = offsets
        self.end = offsets.stop if end is None else end
        self.size = size
        self.fetches: list[FetchRequest] = []
        self.error: RayMQError | None = None
        self.loop = Loop()
        self.ahead = QueueReadAhead(self.fetch, cast(asyncio.AbstractEventLoop, self.loop))

    async def fetch(self, request: FetchRequest) -> FetchSlice | None:
        self.fetches.append(request)
        if self.error is not None:
            raise self.error
        ((queue_id, offset),) = request.offsets.items()
        if offset >= self.end:
            return None
        most = min(request.max_records, max(1, request.max_bytes // self.size))
        found = [each for each in self.offsets if each >= offset]
        next_offset = found[most] if len(found) > most else self.end
        records = pa.array([record(each, self.size) for each in found[:most]], pa.binary())
        return FetchSlice(queue_id, offset, next_offset, 0, self.end, records, None)

    def pull(self, offset: int, **options: object) -> tuple[list[int], int]:
        """The offsets of the messages that a pull gets, and where the next one begins."""
        part = asyncio.run(self.ahead.read(wish(offset, **options)))  # type: ignore[arg-type]
        if part is None or part.records is None:
            return [], offset
        at = slice(fmt.QUEUE_OFFSET_AT, fmt.QUEUE_OFFSET_AT + 8)
        return [int.from_bytes(each[at], "big") for each in part.records.to_pylist()], (
            part.next_offset
        )


def test_a_reader_that_is_behind_is_fetched_several_pulls_at_a_time() -> None:
    shard = Shard(range(1_000))
    got, offset = shard.pull(0)
    while len(got) < 200:
        more, offset = shard.pull(offset)
        assert len(more) == PULL
        got += more
    assert got == list(range(200))
    assert [next(iter(each.offsets.values())) for each in shard.fetches] == [0, 10, 90, 170]
    assert {each.max_records for each in shard.fetches[1:]} == {AHEAD * PULL}


def test_a_reader_at_the_end_of_its_queue_is_fetched_for_alone() -> None:
    shard = Shard(range(5))
    assert shard.pull(0) == ([0, 1, 2, 3, 4], 5)
    assert shard.pull(5) == ([], 5)
    assert [each.max_records for each in shard.fetches] == [PULL, PULL]


def test_the_last_pull_goes_on_where_the_fetch_ended() -> None:
    """Offsets without a wanted message are passed over."""
    shard = Shard(range(0, 30, 2), end=40)
    offset, got = 0, []
    while offset < 40:
        more, offset = shard.pull(offset)
        got += more
    assert got == list(range(0, 30, 2))
    assert len(shard.fetches) == 2


def test_a_pull_from_another_offset_is_fetched() -> None:
    shard = Shard(range(1_000))
    for offset in (0, PULL):
        shard.pull(offset)
    assert shard.pull(500) == (list(range(500, 510)), 510)
    assert shard.fetches[-1].max_records == PULL


def test_pulls_with_another_filter_and_of_another_queue_are_fetched_apart() -> None:
    shard = Shard(range(1_000))
    for offset in (0, PULL):
        shard.pull(offset)
    shard.pull(2 * PULL, wanted=MessageSelector("TAG", "a"))
    shard.pull(2 * PULL, queue_id=1)
    assert len(shard.fetches) == 4
    shard.pull(2 * PULL)
    assert len(shard.fetches) == 4


def test_the_bytes_of_each_pull_are_limited() -> None:
    """Those of the fetch are more."""
    shard = Shard(range(1_000))
    for offset in (0, PULL):
        shard.pull(offset)
    shard.pull(2 * PULL, max_bytes=BYTES * 3 + 1)
    assert shard.pull(23, max_bytes=BYTES * 3 - 1) == ([23, 24], 25)
    assert shard.pull(25, max_bytes=1) == ([25], 26)
    assert len(shard.fetches) == 2


def test_what_was_kept_for_too_long_is_fetched_again() -> None:
    shard = Shard(range(1_000))
    for offset in (0, PULL):
        shard.pull(offset)
    shard.loop.now_s += KEPT_S + 0.1
    assert shard.pull(2 * PULL) == (list(range(20, 30)), 30)
    assert len(shard.fetches) == 3


def test_what_is_not_asked_for_is_dropped_in_time() -> None:
    shard = Shard(range(1_000))
    for offset in (0, PULL):
        shard.pull(offset)
    (timer,) = shard.loop.timers
    shard.loop.now_s += KEPT_S + 0.1
    timer()
    assert not shard.ahead.kept_bytes
    assert len(shard.loop.timers) == 1


def test_after_an_error_nothing_kept_is_handed_out() -> None:
    """Perhaps another replica leads, which has other messages at those offsets."""
    shard = Shard(range(1_000))
    for offset in (0, PULL):
        shard.pull(offset)
    shard.error = Unavailable("no leader")
    with pytest.raises(Unavailable):
        shard.pull(0, queue_id=1)
    shard.error = None
    count = len(shard.fetches)
    shard.pull(2 * PULL)
    assert len(shard.fetches) == count + 1


def test_the_kept_bytes_of_all_queues_are_limited() -> None:
    size = 20 << 10
    shard = Shard(range(100), size=size)
    most = 0
    for queue_id in range(200):
        for offset in (0, PULL):
            got, _ = shard.pull(offset, queue_id=queue_id, max_bytes=PULL * size)
            assert len(got) == PULL
        most = max(most, shard.ahead.kept_bytes)
    assert KEPT_BYTES_MAX / 2 < most <= KEPT_BYTES_MAX


def test_a_changed_topic_is_fetched_again() -> None:
    shard = Shard(range(1_000))
    for offset in (0, PULL):
        shard.pull(offset)
    shard.ahead.forget_topic("other")
    assert shard.ahead.kept_bytes
    shard.ahead.forget_topic("t")
    assert not shard.ahead.kept_bytes
    shard.pull(2 * PULL)
    assert len(shard.fetches) == 3
