"""Columns of messages for later, as producers send them: checked whole, delivered as any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.config.store_config import StoreConfig
from raymq.store.records.properties import encode
from raymq.store.records.record import SmallBatch
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch
from tests.support.delays import CONFIG, START_MS, DelayWorld, Sent
from tests.support.producer_tables import entries_of

GOOD = {"TIMER_OUT_MS": str(START_MS + 3_000), "REAL_TOPIC": "t", "REAL_QID": "1"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[DelayWorld]:
    made = DelayWorld(tmp_path)
    made.store.topics.create("t", 2, [0])
    made.confirm()
    yield made
    made.store.abandon()


def put(world: DelayWorld, properties: dict[str, str] | None, rows: int = 1, **fields: int) -> None:
    text = None if properties is None else encode(properties)
    bodies: list[bytes | None] = [b"%d" % row for row in range(rows)]
    sequence = fields.get("sequence", 0)
    values = batch(bodies, tag="x", properties=text)
    world.store.put(
        PutRequest(TIMER_TOPIC, fields.get("queue", 0), values, 77, 0, sequence, "quorum")
    )


def test_a_batch_is_delivered_once_without_its_producers_stamp(world):
    put(world, GOOD, rows=100)
    put(world, GOOD, rows=100)
    world.confirm()
    world.run_out()
    world.sent = {each.body: Sent(each.body, 1, START_MS + 4_000, 0) for each in world.arrived()}
    world.check({b"%d" % row for row in range(100)})
    assert {"_P" in each.properties for each in world.arrived()} == {False}
    world.kill()
    # The rows of its queue are no rows of the producer: its next sequence is that of the timer topic.
    assert set(entries_of(world.store.state.producers)) == {(77, TIMER_TOPIC, 0)}
    put(world, GOOD, rows=1, sequence=100)
    world.confirm()
    world.run_out()
    assert len(world.arrived()) == 101


def test_columns_for_a_second_that_too_many_wait_for_are_refused(tmp_path: Path) -> None:
    world = DelayWorld(tmp_path, config=replace(CONFIG, timer_congest_num_each_slot=5))
    world.store.topics.create("t", 2, [0])
    put(world, GOOD, rows=5)
    world.confirm()
    world.run()
    with pytest.raises(Unavailable, match="5 messages wait") as refused:
        put(world, GOOD, sequence=5)
    assert refused.value.fields["status"] == "WHEEL_TIMER_FLOW_CONTROL"
    put(world, {**GOOD, "TIMER_OUT_MS": str(START_MS + 4_000)}, sequence=5)


def test_a_row_that_goes_alone_is_checked_and_delivered_too(world):
    row = SmallBatch([b"x"], [None], [encode(GOOD)], [START_MS])
    world.store.put(PutRequest(TIMER_TOPIC, 0, row, 5, 0, 0, "quorum"))
    world.confirm()
    world.run_out()
    assert [(each.body, each.queue) for each in world.arrived()] == [(b"x", 1)]


WRONG = pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"TIMER_OUT_MS": None}, "properties"),
        ({"TIMER_OUT_MS": "soon"}, "properties"),
        ({"REAL_TOPIC": None}, "properties"),
        ({"REAL_QID": None}, "properties"),
        ({"REAL_QID": "-1"}, "properties"),
        ({"TIMER_ROLL_TIMES": "1"}, "properties"),
        ({"TIMER_DEL_UNIQKEY": "t+k"}, "properties"),
        ({"REAL_QID": "2"}, "queue_id"),
        ({"REAL_TOPIC": "u"}, "topic"),
        ({"REAL_TOPIC": "rmq_sys_raymq"}, "topic"),
        ({"TIMER_OUT_MS": str(START_MS + 4 * 86_400_000)}, "deliver_at_ms"),
    ],
)


@WRONG
def test_a_batch_that_could_not_be_delivered_is_refused_whole(world, change, field):
    properties = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    end = world.store.log.end
    with pytest.raises(Rejected) as caught:
        put(world, properties, rows=3)
    assert caught.value.field == field
    assert world.store.log.end == end


@WRONG
def test_the_refusal_of_a_batch_names_its_wrong_row(world, change, field):
    wrong = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    rows = pa.concat_batches(
        [batch([b"x"], properties=encode(each)) for each in (GOOD, GOOD, wrong, GOOD)]
    )
    with pytest.raises(Rejected) as caught:
        world.store.put(PutRequest(TIMER_TOPIC, 0, rows, 77, 0, 0, "quorum"))
    assert (caught.value.field, caught.value.row) == (field, 2)


def test_a_property_that_occurs_twice_is_refused(world):
    text = encode(GOOD) + encode({"REAL_TOPIC": "rmq_sys_raymq"})
    with pytest.raises(Rejected):
        world.store.put(
            PutRequest(TIMER_TOPIC, 0, batch([b"x"], properties=text), None, 0, 0, "quorum")
        )


def test_a_record_that_fits_no_group_is_refused(world):
    row = SmallBatch([bytes(1_990)], [None], [encode({**GOOD, "pad": "p" * 5_000})], [START_MS])
    with pytest.raises(Rejected, match="waits for its delivery may have"):
        world.store.put(PutRequest(TIMER_TOPIC, 0, row, None, 0, 0, "quorum"))


def test_another_queue_and_switched_off_timers_are_refused(world, tmp_path):
    with pytest.raises(Rejected):
        put(world, GOOD, queue=1)
    off = StoreConfig(**{**vars(CONFIG), "timer_wheel_enabled": False})
    other = DelayWorld(tmp_path / "off", config=off)
    with pytest.raises(Rejected) as caught:
        put(other, GOOD)
    assert caught.value.status == "WHEEL_TIMER_NOT_ENABLE"
