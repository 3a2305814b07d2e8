"""Consumer send-back: the schedule of retries, and its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.delay.delay_service import DelayService
from raymq.store.delay.delayed_record import BUNDLE_RESERVE_BYTES
from raymq.store.put.inner_message import InnerMessage
from raymq.store.services.retry import send_back
from raymq.store.services.stored_message import StoredMessage, read
from raymq.store.state.topics import dlq_topic, retry_topic
from tests.support.engine import Engine


@pytest.fixture
def engine(tmp_path: Path):
    made = Engine(tmp_path)
    yield made
    made.store.close()


def put(engine: Engine, topic: str = "t", **fields: int) -> int:
    message = InnerMessage(topic, 0, b"work", {"TAGS": "a", "_P": "A" * 20}, **fields)
    (appended,) = engine.store.put_inner([message])
    engine.confirm()
    return appended.first_offset


def newest(engine: Engine, topic: str, queue_id: int) -> StoredMessage:
    engine.confirm()
    return read(engine.store, topic, queue_id, 0, max_records=100)[0][-1]


@pytest.mark.parametrize("times", range(16))
def test_each_retry_takes_the_next_level_of_the_schedule(engine: Engine, times: int) -> None:
    offset = put(engine, reconsume_times=times)
    send_back(engine.store, "g", "t", 0, offset)
    level = min(3 + times, 18)
    found = newest(engine, SCHEDULE_TOPIC, level - 1)
    assert (found.body, found.reconsume_times) == (b"work", times + 1)
    assert found.properties["REAL_TOPIC"] == retry_topic("g") == "%RETRY%g"
    assert (found.properties["DELAY"], found.properties["RETRY_TOPIC"]) == (str(level), "t")
    assert len(found.properties["ORIGIN_MESSAGE_ID"]) == 32
    assert "_P" not in found.properties
    assert engine.store.state.topics["%RETRY%g"].queues == 1


@pytest.mark.parametrize(("times", "level"), [(16, 0), (0, -1)])
def test_at_last_or_at_once_a_message_goes_to_the_dead_letter_queue(
    engine: Engine, times: int, level: int
) -> None:
    offset = put(engine, reconsume_times=times)
    send_back(engine.store, "g", "t", 0, offset, delay_level=level)
    found = newest(engine, dlq_topic("g"), 0)
    assert (found.topic, found.body, found.reconsume_times) == ("%DLQ%g", b"work", times + 1)


def test_where_a_message_came_from_first_is_kept(engine: Engine) -> None:
    first = put(engine)
    send_back(engine.store, "g", "t", 0, first, delay_level=-1)
    origin = newest(engine, "%DLQ%g", 0)
    send_back(engine.store, "h", "%DLQ%g", 0, 0, delay_level=-1)
    again = newest(engine, "%DLQ%h", 0)
    assert again.properties["RETRY_TOPIC"] == "t"
    assert again.properties["ORIGIN_MESSAGE_ID"] == origin.properties["ORIGIN_MESSAGE_ID"]


def test_a_message_larger_than_a_group_of_deliveries_comes_again_and_so_does_the_next(
    engine: Engine,
) -> None:
    config = engine.store.config
    bodies = [b"l" * (config.bundle_bytes_max + 1000), b"small"]
    for body in bodies:
        (appended,) = engine.store.put_inner([InnerMessage("t", 0, body)])
        engine.confirm()
        send_back(engine.store, "g", "t", 0, appended.first_offset)
    engine.confirm()
    engine.clock.advance(10_000)
    delays = DelayService(engine.store)
    for _ in bodies:
        delays.run_once(engine.clock.now_ms())
        engine.confirm()
    assert [each.body for each in engine.read("%RETRY%g", 0)] == bodies


def test_a_message_that_could_not_be_delivered_again_is_refused_when_it_is_sent_back(
    engine: Engine,
) -> None:
    largest = engine.store.config.record_bytes_max
    (appended,) = engine.store.put_inner([InnerMessage("t", 0, b"l" * (largest - 700))])
    engine.confirm()
    with pytest.raises(Rejected, match="sent back the message makes a record of") as refused:
        send_back(engine.store, "g", "t", 0, appended.first_offset)
    assert (refused.value.field, refused.value.limit) == ("record", largest - BUNDLE_RESERVE_BYTES)


def test_what_is_not_there_cannot_be_sent_back(engine: Engine) -> None:
    with pytest.raises(Rejected, match="no message at 9"):
        send_back(engine.store, "g", "t", 0, 9)
    put(engine)
    with pytest.raises(Rejected, match="topic name"):
        send_back(engine.store, "bad name", "t", 0, 0)
    engine.store.topics.create("%RETRY%far", 1, [5])
    with pytest.raises(Rejected, match="no queue on shard 0"):
        send_back(engine.store, "far", "t", 0, 0)
