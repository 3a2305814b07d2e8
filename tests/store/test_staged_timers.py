"""Staged rows with a delivery time: a decided write is completed, whatever has changed since they were staged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.format import STAGED_TOPIC, TIMER_TOPIC
from raymq.store.delay.delay_hook import CLOCKS_DIFFER_MS
from raymq.store.records.properties import encode
from raymq.store.records.requests import PutRequest
from raymq.store.records.staged_range import StagedRange, target_properties
from raymq.store.services.staged_rows import publish
from tests.support.batches import batch
from tests.support.delays import CONFIG, START_MS, DelayWorld

#: the second in which rows are due, and those of the longest delay
SOON_MS = START_MS + 3_000
LAST_MS = START_MS + CONFIG.timer_max_delay_s * 1000 + CLOCKS_DIFFER_MS - 1_000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[DelayWorld]:
    config = replace(CONFIG, timer_congest_num_each_slot=2)
    made = DelayWorld(tmp_path, config=config)
    made.store.topics.create("t", 2, [0])
    yield made
    made.store.abandon()


def properties(out_ms: int) -> bytes:
    return encode({"TIMER_OUT_MS": str(out_ms), "REAL_TOPIC": "t", "REAL_QID": "1"})


def stage(world: DelayWorld, *bodies: bytes, out_ms: int = SOON_MS) -> StagedRange:
    """Stage rows as a task of its own."""
    producer_id = world.store.queue_range(STAGED_TOPIC, 0)[1]
    rows = batch(list(bodies), properties=target_properties(TIMER_TOPIC, 0) + properties(out_ms))
    put = world.store.put(PutRequest(STAGED_TOPIC, 0, rows, producer_id, 0, 0, "quorum"))
    world.confirm()
    return StagedRange(producer_id, put.first_offset, put.last_offset, len(bodies))


def publish_all(world: DelayWorld, staged: StagedRange) -> None:
    found = publish(
        world.store,
        TIMER_TOPIC,
        0,
        producer_id=1_000 + staged.producer_id,
        ranges=[staged],
        is_over=lambda: False,
    )
    assert found.is_complete
    world.confirm()
    world.step()


def put(world: DelayWorld, out_ms: int) -> None:
    """Put a row to the timers as a producer does."""
    rows = batch([b"other"], properties=properties(out_ms))
    world.store.put(PutRequest(TIMER_TOPIC, 0, rows, 77, 0, 0, "quorum"))


def bodies_when_all_is_delivered(world: DelayWorld) -> list[bytes]:
    world.run_out()
    return [each.body for each in world.arrived()]


def test_rows_for_a_second_that_became_full_are_published(world: DelayWorld) -> None:
    first, second = stage(world, b"a", b"b"), stage(world, b"c", b"d")
    publish_all(world, first)
    with pytest.raises(Unavailable, match="2 messages wait"):
        put(world, SOON_MS)
    with pytest.raises(Unavailable, match="2 messages wait"):
        stage(world, b"e")
    publish_all(world, second)
    assert bodies_when_all_is_delivered(world) == [b"a", b"b", b"c", b"d"]


def test_rows_are_published_and_delivered_if_timers_were_switched_off_since(
    world: DelayWorld,
) -> None:
    published, staged = stage(world, b"a"), stage(world, b"b")
    publish_all(world, published)
    world.config = replace(world.config, timer_wheel_enabled=False)
    world.restart()
    with pytest.raises(Rejected, match="timers are switched off"):
        put(world, SOON_MS)
    with pytest.raises(Rejected, match="timers are switched off"):
        stage(world, b"c")
    publish_all(world, staged)
    assert bodies_when_all_is_delivered(world) == [b"a", b"b"]
    assert world.clock.now_ms() < SOON_MS + 3_000


def test_rows_are_published_by_a_leader_whose_clock_is_far_behind(world: DelayWorld) -> None:
    with pytest.raises(Rejected, match="timers reach"):
        stage(world, b"x", out_ms=LAST_MS + 1)
    staged = stage(world, b"a", out_ms=LAST_MS)
    world.clock.jump_wall(-3_600_000)
    with pytest.raises(Rejected, match="timers reach"):
        put(world, LAST_MS)
    publish_all(world, staged)
    assert bodies_when_all_is_delivered(world) == [b"a"]
    (message,) = world.arrived()
    assert message.store_time_ms >= LAST_MS + 1_000
