"""Delay levels: when they are delivered, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from raymq.store.base.errors import Rejected
from raymq.store.base.format import SCHEDULE_TOPIC, SYS_BORN_HOST_V6, pack_host
from raymq.store.delay.delay_service import level_offsets
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.records.properties import encode
from raymq.store.records.record import SmallBatch
from raymq.store.records.requests import PutRequest
from raymq.store.services.stored_message import read
from tests.support.batches import batch
from tests.support.delays import LEVELS_MS, START_MS, DelayWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[DelayWorld]:
    made = DelayWorld(tmp_path)
    yield made
    made.store.abandon()


def test_each_level_is_delivered_at_its_time_and_the_next_time_is_returned(world):
    for level in range(1, len(LEVELS_MS) + 1):
        world.send(b"%d" % level, level=level, queue=level % 2)
    world.confirm()
    assert world.run() == START_MS + 1_000
    for level, delay_ms in enumerate(LEVELS_MS, start=1):
        world.clock.jump_wall(START_MS + delay_ms - 1 - world.clock.now_ms())
        world.step()
        assert len(world.arrived()) == level - 1
        world.clock.advance(1)
        world.run()
    world.check({b"%d" % level for level in range(1, len(LEVELS_MS) + 1)})
    assert level_offsets(world.store) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_the_tags_code_of_a_waiting_message_is_its_time_also_when_it_is_read_back(world):
    for level in (1, 4):
        world.send(b"x%d" % level, level=level)
    world.confirm()
    for level in (1, 4):
        unit = world.store.consume_queues.get(SCHEDULE_TOPIC, level - 1).read(0, 1)[0]
        assert unit["tags_code"] == START_MS + LEVELS_MS[level - 1]
    world.close()
    for directory in (world.root / "consumequeue").iterdir():
        for queue in directory.iterdir():
            for file in queue.iterdir():
                file.unlink()
    (world.root / "abort").write_bytes(b"1")
    world.open()
    unit = world.store.consume_queues.get(SCHEDULE_TOPIC, 3).read(0, 1)[0]
    assert unit["tags_code"] == START_MS + 60_000


def test_a_delivered_message_keeps_its_properties_text_and_its_tag(world):
    properties = {"TAGS": "red", "DELAY": "1", "note": "n"}
    world.put(InnerMessage("t", 1, b"x", properties))
    world.confirm()
    world.run_out()
    (arrived,) = world.arrived()
    assert list(arrived.properties.items()) == [
        *properties.items(),
        ("REAL_TOPIC", "t"),
        ("REAL_QID", "1"),
    ]
    code = world.store.consume_queues.get("t", 1).read(0, 1)[0]["tags_code"]
    assert code == 112785  # Java's "red".hashCode()


def test_after_the_clock_went_back_a_level_waits_as_long_as_it_says(world):
    world.clock.jump_wall(3_600_000)
    world.send(b"x", level=2)
    world.confirm()
    world.clock.jump_wall(-3_600_000)
    world.clock.advance(4_900)
    world.run()
    # Stored an hour ahead. RocketMQ would deliver it now, but it is neither due at once nor in an hour.
    assert world.arrived() == []
    world.clock.advance(500)
    world.run()
    assert [each.body for each in world.arrived()] == [b"x"]


def test_prepared_messages_and_unreadable_ones_are_left_out_and_counted(world):
    for properties in (
        {"DELAY": "1"},
        {"DELAY": "1", "REAL_TOPIC": "RMQ_SYS_TRANS_HALF_TOPIC", "REAL_QID": "0"},
        {"DELAY": "1", "REAL_TOPIC": "t", "REAL_QID": "x"},
        {"DELAY": "1", "REAL_TOPIC": "t", "REAL_QID": "0"},
    ):
        world.store.put_inner([InnerMessage(SCHEDULE_TOPIC, 0, b"x", properties)])
    world.confirm()
    world.run_out()
    assert len(world.arrived()) == 1
    assert world.delays.levels.skipped == 3
    assert level_offsets(world.store) == {1: 4}


def test_many_are_delivered_in_groups_in_their_order(world):
    for number in range(300):
        world.send(b"%03d" % number, level=1, queue=number % 2)
    world.confirm()
    world.clock.advance(1_000)
    before = world.store.queue_range("rmq_sys_raymq", 0)[1]
    world.run(limit=50)
    assert [each.body for each in world.arrived() if each.queue == 0] == [
        b"%03d" % number for number in range(0, 300, 2)
    ]
    bundles = world.store.queue_range("rmq_sys_raymq", 0)[1] - before
    assert 2 < bundles < 60


def test_progress_beyond_the_queue_is_taken_back_to_its_end(world):
    world.send(b"a", level=1)
    world.store.put_inner([], progress=ServiceProgress("delay", {"1": 40}))
    world.confirm()
    world.clock.advance(2_000)
    world.run()
    world.send(b"b", level=1)
    world.confirm()
    world.run_out()
    assert [each.body for each in world.arrived()] == [b"b"]


@pytest.mark.parametrize("ends_in_order", [False, True])
def test_messages_of_a_level_that_a_start_dropped_come_after_the_last_delay_at_the_latest(
    world, ends_in_order
):
    world.send(b"due sooner", level=4)
    world.clock.advance(57_000)
    world.send(b"due later", level=4)
    world.confirm()
    world.config = replace(world.config, message_delay_level="1s 5s")
    (world.restart if ends_in_order else world.kill)()

    assert world.delays.active
    assert world.delays.needed_from() == position_of(world, level=4)
    # The second one would wait longer than any level says. It is due at once, after the first one.
    assert world.run() == START_MS + 60_000
    world.clock.advance(3_000)
    world.run()
    assert [each.body for each in world.arrived()] == [b"due sooner", b"due later"]
    assert level_offsets(world.store) == {4: 2}
    assert world.delays.needed_from() is None


def position_of(world: DelayWorld, *, level: int) -> int:
    """The physical offset of the first message of a level."""
    return int(world.store.consume_queues.get(SCHEDULE_TOPIC, level - 1).read(0, 1)["position"][0])


# --- columns of producers --------------------------------------------------------------------------

GOOD = {"DELAY": "2", "REAL_TOPIC": "t", "REAL_QID": "1"}


def put_columns(
    world: DelayWorld, *rows: dict[str, str], level: int = 2, sequence: int = 0
) -> None:
    """Put rows with these properties to a level's queue, as a producer does."""
    parts = [batch([b"%d" % at], properties=encode(each)) for at, each in enumerate(rows, sequence)]
    columns = pa.concat_batches(parts)
    world.store.put(
        PutRequest(SCHEDULE_TOPIC, level - 1, columns, 77, 0, sequence, "quorum"),
    )


@pytest.mark.parametrize("count", [1, 100])
def test_columns_of_a_level_are_delivered_once_after_its_delay(world, count):
    world.store.topics.create("t", 2, [0])
    put_columns(world, *[GOOD] * count)
    put_columns(world, *[GOOD] * count)
    world.confirm()
    unit = world.store.consume_queues.get(SCHEDULE_TOPIC, 1).read(0, 1)[0]
    assert unit["tags_code"] == START_MS + LEVELS_MS[1]
    assert world.run() == START_MS + LEVELS_MS[1]
    world.kill()
    world.run_out()
    arrived = world.arrived()
    assert [(each.body, each.queue) for each in arrived] == [(b"%d" % at, 1) for at in range(count)]
    assert min(each.store_time_ms for each in arrived) >= START_MS + LEVELS_MS[1]
    assert arrived[0].properties == GOOD


def test_a_moved_row_of_columns_keeps_its_flags_and_its_born_host(world):
    world.store.topics.create("t", 2, [0])
    host = pack_host("2001:db8::1", 7)
    row = SmallBatch([b"x"], ["red"], [encode(GOOD)], [5], [9], [0x301], [host])
    world.store.put(PutRequest(SCHEDULE_TOPIC, 1, row, 77, 0, 0, "quorum"))
    world.confirm()
    world.run_out()
    (stored,) = read(world.store, "t", 1, 0, max_records=1)[0]
    assert (stored.flag, stored.sys_flag, stored.born_time_ms) == (9, 0x301 | SYS_BORN_HOST_V6, 5)
    assert pack_host(*stored.born_host) == host


@pytest.mark.parametrize(
    ("change", "level", "field"),
    [
        ({}, 5, "delay_level"),
        ({"DELAY": "3"}, 2, "properties"),
        ({"DELAY": "-2"}, 2, "properties"),
        ({"DELAY": None}, 2, "properties"),
        ({"REAL_TOPIC": None}, 2, "properties"),
        ({"REAL_QID": "x"}, 2, "properties"),
        ({"REAL_QID": "2"}, 2, "queue_id"),
        ({"REAL_TOPIC": "u"}, 2, "topic"),
    ],
)
def test_columns_of_a_level_that_could_not_be_delivered_are_refused_whole(
    world, change, level, field
):
    world.store.topics.create("t", 2, [0])
    wrong = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    end = world.store.log.end
    with pytest.raises(Rejected) as caught:
        put_columns(world, *[GOOD if change else wrong, wrong], level=level)
    assert caught.value.field == field
    assert caught.value.fields.get("row") == (1 if change else None)
    assert world.store.log.end == end


def test_a_level_that_is_named_twice_is_refused(world):
    world.store.topics.create("t", 2, [0])
    text = encode(GOOD) + encode({"DELAY": "1"})
    row = batch([b"x"], properties=text)
    with pytest.raises(Rejected):
        world.store.put(PutRequest(SCHEDULE_TOPIC, 1, row, None, 0, 0, "quorum"))
