"""Reads from the nearest replica: a real leader and real followers, over real Flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.consume.consumer import Consumer
from tests.support.followed_shard import FollowedShard
from tests.support.waiting import until


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[FollowedShard]:
    made = FollowedShard(tmp_path)
    yield made
    made.close()


@pytest.fixture
def make(shard: FollowedShard) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def consumer(**options: Any) -> Consumer:
        wanted = {"start": "earliest", "read_from": "nearest", **options}
        made.append(Consumer(shard.cluster, "t", **wanted))
        return made[-1]

    yield consumer
    for each in made:
        each.close()


def bodies(start: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def pause() -> None:
    threading.Event().wait(0.01)


def wait_for_followers(shard: FollowedShard, end: int, *numbers: int) -> None:
    for number in numbers or (1, 2):
        until(lambda each=number: shard.end_of(each) >= end, pause)


def read(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    until(lambda: len(found) >= count, lambda: found.extend(m.body for m in consumer.poll(100, 5)))
    return found


def test_a_consumer_reads_from_followers_and_only_one_that_says_so_does(
    shard: FollowedShard, make: Callable[..., Consumer]
) -> None:
    shard.put(*bodies(0, 10))
    wait_for_followers(shard, 10)
    consumer = make()
    assert read(consumer, 10) == bodies(0, 10)
    shard.put(*bodies(10, 5))
    assert read(consumer, 5) == bodies(10, 5)
    assert shard.fetches[0] == 0

    asked = dict(shard.fetches)
    consumer.close()
    assert read(make(read_from="leader"), 15) == bodies(0, 15)
    assert shard.fetches[0] > 0
    assert [shard.fetches[n] - asked[n] for n in (1, 2)] == [0, 0]
