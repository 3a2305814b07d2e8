"""The stored form of a message that names a level or a time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC
from raymq.store.config.delay_levels import DEFAULT_LEVELS_MS, parse_levels
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_hook import transform
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records.properties import encode
from tests.support.clock import ManualClock

NOW = 1_700_000_000_250
CONFIG = StoreConfig()


def put(
    properties: dict[str, str], *, sys_flag: int = 0, config: StoreConfig = CONFIG
) -> InnerMessage:
    return transform(InnerMessage("t", 3, b"x", properties, sys_flag=sys_flag), NOW, config)


def refused(properties: dict[str, str], *, config: StoreConfig = CONFIG) -> str:
    with pytest.raises(Rejected) as caught:
        put(properties, config=config)
    return str(caught.value.status)


def test_the_level_string_is_read_as_rocketmq_reads_it():
    assert len(DEFAULT_LEVELS_MS) == 18
    assert DEFAULT_LEVELS_MS[0] == 1_000
    assert DEFAULT_LEVELS_MS[-1] == 7_200_000
    assert parse_levels("2s 3m 4h 5d") == (2_000, 180_000, 14_400_000, 432_000_000)


@pytest.mark.parametrize("text", ["", "1", "1s 5x", "s", "1s,5s"])
def test_a_level_string_that_says_no_delays_is_refused(text):
    with pytest.raises(Rejected, match="message_delay_level"):
        StoreConfig(message_delay_level=text)


@pytest.mark.parametrize(("asked", "level"), [("1", 1), ("18", 18), ("19", 18), ("4000", 18)])
def test_a_level_goes_to_its_queue_of_the_schedule_topic(asked, level):
    found = put({"TAGS": "a", "DELAY": asked})
    assert (found.topic, found.queue_id) == (SCHEDULE_TOPIC, level - 1)
    assert found.properties == {
        "TAGS": "a",
        "DELAY": str(level),
        "REAL_TOPIC": "t",
        "REAL_QID": "3",
    }


@pytest.mark.parametrize(
    "properties", [{}, {"DELAY": "0"}, {"DELAY": "-1"}, {"DELAY": "x"}, {"TIMER_OUT_MS": "5"}]
)
def test_what_names_no_delay_stays_as_it_is(properties):
    assert put(properties) == InnerMessage("t", 3, b"x", properties)


def test_a_level_wins_over_a_time_and_takes_its_properties_away():
    found = put(
        {"DELAY": "1", "TIMER_DELAY_SEC": "5", "TIMER_DELAY_MS": "5", "TIMER_DELIVER_MS": "5"}
    )
    assert found.topic == SCHEDULE_TOPIC
    assert not [name for name in found.properties if name.startswith("TIMER_")]


@pytest.mark.parametrize("sys_flag", [0x4, 0xC])
def test_prepared_and_rolled_back_messages_are_not_delayed(sys_flag):
    assert put({"DELAY": "1"}, sys_flag=sys_flag).topic == "t"


@pytest.mark.parametrize(
    ("properties", "out_ms"),
    [
        ({"TIMER_DELIVER_MS": str(NOW + 5_000)}, 1_700_000_005_000),
        # A full second is the end of the second before.
        ({"TIMER_DELIVER_MS": "1700000005000"}, 1_700_000_004_000),
        ({"TIMER_DELAY_MS": "1"}, 1_700_000_000_000),
        ({"TIMER_DELAY_MS": "750"}, 1_700_000_000_000),
        ({"TIMER_DELAY_MS": "751"}, 1_700_000_001_000),
        (
            {"TIMER_DELAY_SEC": "10", "TIMER_DELAY_MS": "1", "TIMER_DELIVER_MS": "9"},
            1_700_000_010_000,
        ),
        ({"TIMER_DELAY_MS": "2000", "TIMER_DELIVER_MS": "9"}, 1_700_000_002_000),
    ],
)
def test_a_time_goes_to_the_timer_topic_with_the_second_whose_end_it_waits_for(properties, out_ms):
    found = put(properties)
    assert (found.topic, found.queue_id) == (TIMER_TOPIC, 0)
    assert found.properties == {
        **properties,
        "TIMER_OUT_MS": str(out_ms),
        "REAL_TOPIC": "t",
        "REAL_QID": "3",
    }


def test_a_time_that_is_over_is_put_into_the_real_queue_at_once():
    assert put({"TIMER_DELIVER_MS": str(NOW)}).topic == "t"


@pytest.mark.parametrize(
    ("properties", "status"),
    [
        ({"TIMER_DELAY_SEC": "259201"}, "WHEEL_TIMER_MSG_ILLEGAL"),
        ({"TIMER_DELIVER_MS": "soon"}, "WHEEL_TIMER_MSG_ILLEGAL"),
        ({"TIMER_DELIVER_MS": "9" * 20}, "WHEEL_TIMER_MSG_ILLEGAL"),
        ({"TIMER_DELIVER_MS": str(NOW), "TIMER_DEL_UNIQKEY": "k"}, "WHEEL_TIMER_MSG_ILLEGAL"),
    ],
)
def test_a_delay_that_cannot_be_kept_is_refused_with_rocketmqs_status(properties, status):
    assert refused(properties) == status


def test_the_furthest_time_is_accepted():
    assert put({"TIMER_DELAY_SEC": "259200"}).topic == TIMER_TOPIC


def test_timers_that_are_switched_off_are_refused_and_levels_go_on():
    off = StoreConfig(timer_wheel_enabled=False)
    assert refused({"TIMER_DELAY_SEC": "5"}, config=off) == "WHEEL_TIMER_NOT_ENABLE"
    assert put({"DELAY": "1"}, config=off).topic == SCHEDULE_TOPIC


def test_a_second_for_which_as_many_wait_as_may_takes_no_more():
    config = StoreConfig(timer_congest_num_each_slot=2)
    message = InnerMessage("t", 3, b"x", {"TIMER_DELAY_MS": "5000"})
    waiting = {1_700_000_005_000: 1}
    assert transform(message, NOW, config, waiting=lambda ms: waiting[ms]).topic == TIMER_TOPIC
    waiting[1_700_000_005_000] = 2
    with pytest.raises(Unavailable) as caught:
        transform(message, NOW, config, waiting=lambda ms: waiting[ms])
    assert caught.value.status == "WHEEL_TIMER_FLOW_CONTROL"


def test_a_message_whose_delivery_could_not_be_appended_is_refused_when_it_is_put():
    config = StoreConfig(segment_size_bytes=64 * 1024)
    small = InnerMessage("t", 3, bytes(14_000), {"DELAY": "1"})
    assert transform(small, NOW, config).topic == SCHEDULE_TOPIC
    with pytest.raises(Rejected) as caught:
        transform(replace(small, body=bytes(16_000)), NOW, config)
    assert (caught.value.status, caught.value.field) == ("MESSAGE_ILLEGAL", "record")


def test_properties_that_are_encoded_already_are_read():
    message = InnerMessage("t", 3, b"x", properties_text=encode({"DELAY": "2", "A": "b"}))
    found = transform(message, NOW, CONFIG)
    assert (found.topic, found.queue_id, found.properties_text) == (SCHEDULE_TOPIC, 1, None)
    assert found.properties["A"] == "b"


def test_the_stores_door_delays_and_answers_with_rocketmqs_statuses(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    config = StoreConfig(segment_size_bytes=256 * 1024, timer_congest_num_each_slot=1)
    with closing(EmbeddedStore(tmp_path, config=config, clock=clock)) as store:
        answers = [
            store.put_message(InnerMessage("t", 0, body, properties)).status.value
            for body, properties in (
                (b"level", {"DELAY": "1"}),
                (b"timer", {"TIMER_DELAY_SEC": "4"}),
                (b"late", {"TIMER_DELIVER_MS": "5"}),
                (b"far", {"TIMER_DELAY_SEC": "999999"}),
            )
        ]
        assert answers == ["PUT_OK", "PUT_OK", "PUT_OK", "WHEEL_TIMER_MSG_ILLEGAL"]
        assert store.deliver_due() == NOW + 1_000
        again = store.put_message(InnerMessage("t", 0, b"again", {"TIMER_DELAY_SEC": "4"}))
        assert again.status.value == "WHEEL_TIMER_FLOW_CONTROL"
        clock.advance(6_000)
        assert store.deliver_due() is None
        assert store.store.queue_range("t", 0) == (0, 3)
