"""What a RocketMQ sender may set: flag, sysFlag, born host, delay level and WAIT, from the send to the reader."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.messages.columns import message_batch
from raymq.client.messages.message import Message
from raymq.client.messages.received import ReceivedMessage, received_messages
from raymq.client.produce.batch_sender import waiting_queue
from raymq.client.produce.producer import Producer
from raymq.store.base.errors import PropertiesTooLong, Rejected
from raymq.store.base.format import PROPERTIES_MAX_BYTES, SCHEDULE_TOPIC
from raymq.store.config.delay_levels import DEFAULT_LEVEL_COUNT
from raymq.store.records.producer_stamp import STAMP_BYTES
from raymq.store.records.properties import decode
from raymq.store.records.record import SmallBatch, wait_store_ok
from tests.support.fake_backend import FakeBackend, FakeCluster, decode_all

Make = Callable[..., Producer]

#: longer than any test: only what ends the linger time sends
FOREVER_MS = 3_600_000
V4, V6 = "192.0.2.1:5000", "[2001:db8:0:0:0:0:0:1]:5001"
#: of the fake shard, whose records have no host of a connection
STORE = "127.0.0.1:10911"


def read(backend: FakeBackend, topic: str = "t", queue_id: int = 0) -> list[ReceivedMessage]:
    return received_messages(0, pa.array(backend.queues[topic, queue_id].records, pa.binary()))


def head(message: ReceivedMessage) -> tuple[int, int, str | None]:
    return message.flag, message.sys_flag, message.born_host


@pytest.mark.parametrize("rows", [3, 200])
def test_a_message_keeps_its_flags_and_its_born_host_and_others_of_its_batch_have_none(
    make: Make, backend: FakeBackend, rows: int
) -> None:
    messages = [Message(topic="t", body=b"%d" % number) for number in range(1, rows)]
    messages[1] = replace(messages[1], flag=1 << 30, born_host="[2001:db8::1]:5001")
    with make(linger_ms=FOREVER_MS) as producer:
        producer.send("t", b"0", queue_id=0, flag=-7, sys_flag=0x301, born_host=V4)
        producer.flush(10)
        producer.send_many(messages, queue_id=0)
    _, together = backend.puts
    assert isinstance(together.batch, SmallBatch) == (rows == 3)
    found = read(backend)
    assert [each.body for each in found] == [b"%d" % number for number in range(rows)]
    assert [head(each) for each in found[:3]] == [
        (-7, 0x301, V4),
        (0, 0, STORE),
        (1 << 30, 0, V6),
    ]
    assert {head(each) for each in found[3:]} <= {(0, 0, STORE)}
    assert head(pickle.loads(pickle.dumps(found[2]))) == (1 << 30, 0, V6)


def test_a_batch_without_them_has_no_further_columns(make: Make, backend: FakeBackend) -> None:
    with make() as producer:
        producer.send("t", b"x", queue_id=0, flag=0, sys_flag=0, born_host=None)
        producer.send("t", b"y" * 200_000, queue_id=0).result(10)
    small, large = (put.batch for put in backend.puts)
    assert isinstance(small, SmallBatch)
    assert small.more == ()
    assert isinstance(large, pa.RecordBatch)
    assert large.num_columns == 4


def test_columns_of_send_batch_come_back_as_columns_of_poll_batch(
    make: Make, backend: FakeBackend
) -> None:
    given = {
        "message_flag": pa.array([1, None, -1], pa.int64()),
        "sys_flag": pa.array([0x2, None, 0x101], pa.int32()),
        "born_host": pa.array([V4, None, "[2001:db8::1]:5001"]),
    }
    with make() as producer:
        producer.send_batch("t", pa.table({"body": [b"a", b"b", b"c"], **given}), queue_id=0)
    records = pa.array(backend.queues["t", 0].records, pa.binary())
    found = message_batch(0, records).select(list(given)).to_pydict()
    assert found == {
        "message_flag": [1, 0, -1],
        "sys_flag": [0x2, 0, 0x101],
        "born_host": [V4, STORE, V6],
    }


@pytest.mark.parametrize(
    ("change", "field", "row"),
    [
        ({"message_flag": pa.array([1, 1 << 31])}, "message_flag", None),
        ({"message_flag": pa.array(["one", "two"])}, "message_flag", None),
        ({"sys_flag": pa.array([1, 0x8], pa.int32())}, "sys_flag", 1),
        ({"born_host": pa.array([V4, "localhost:1"])}, "born_host", 1),
        ({"born_host": pa.array([bytes(8), bytes(7)])}, "born_host", 1),
    ],
)
def test_a_column_with_a_value_that_no_sender_sets_is_refused(
    make: Make, backend: FakeBackend, change: dict[str, Any], field: str, row: int | None
) -> None:
    with make() as producer, pytest.raises(Rejected) as refused:
        producer.send_batch("t", pa.table({"body": [b"a", b"b"], **change}), queue_id=0)
    assert (refused.value.field, refused.value.fields.get("row")) == (field, row)
    assert backend.puts == []


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"flag": 1 << 31}, "flag"),
        ({"flag": "1"}, "flag"),
        ({"flag": True}, "flag"),
        ({"sys_flag": 0x4}, "sys_flag"),
        ({"sys_flag": 0x10}, "sys_flag"),
        ({"sys_flag": 0x400}, "sys_flag"),
        ({"sys_flag": -1}, "sys_flag"),
        ({"born_host": "localhost:1"}, "born_host"),
        ({"born_host": "192.0.2.1"}, "born_host"),
        ({"born_host": "192.0.2.1:65536"}, "born_host"),
        ({"born_host": ("192.0.2.1", 1)}, "born_host"),
        ({"delay_level": -1}, "delay_level"),
        ({"delay_level": 1.5}, "delay_level"),
        ({"delay_level": 1, "deliver_at_ms": 10**12}, "delay_level"),
        ({"wait_store_ok": False, "acks": "quorum"}, "acks"),
        ({"wait_store_ok": None}, "wait_store_ok"),
        ({"wait_store_ok": 0}, "wait_store_ok"),
        ({"flag": ""}, "flag"),
        ({"delay_level": ""}, "delay_level"),
    ],
)
def test_a_send_with_a_value_that_no_sender_sets_is_refused_at_once(
    make: Make, backend: FakeBackend, given: dict[str, Any], field: str
) -> None:
    with make() as producer, pytest.raises(Rejected) as refused:
        producer.send("t", b"x", **given)
    assert refused.value.field == field
    assert refused.value.found is not None
    assert refused.value.limit is not None
    assert backend.puts == []


@pytest.mark.parametrize("given", [{"wait_store_ok": False}, {"delay_level": 1}, {"body": None}])
def test_properties_that_only_its_tag_makes_too_long_are_refused_before_others_share_its_batch(
    make: Make, given: dict[str, Any]
) -> None:
    properties = {"p": "v" * (PROPERTIES_MAX_BYTES - STAMP_BYTES - 3 - 100 - len("TAGS") - 2)}
    message = Message(topic="t", body=b"x", tag="g" * 100, properties=properties)
    with make(linger_ms=FOREVER_MS) as producer:
        producer.send(message, queue_id=0)
        before = producer.send("t", b"before", queue_id=1)
        with pytest.raises(PropertiesTooLong):
            producer.send(replace(message, **given), queue_id=1)
    assert before.result(10).offset == 0


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(8), pa.null()])
def test_host_fields_of_any_binary_type_are_taken_and_so_is_a_column_without_values(
    make: Make, backend: FakeBackend, kind: pa.DataType
) -> None:
    host = None if pa.types.is_null(kind) else bytes([192, 0, 2, 1, 0, 0, 0x13, 0x88])
    table = pa.table({"body": [b"a", b"b"], "born_host": pa.array([host, None], kind)})
    with make() as producer:
        producer.send_batch("t", table, queue_id=0)
    hosts = [message.born_host for message in read(backend)]
    assert hosts == [STORE if host is None else V4, STORE]


def test_a_message_of_a_level_waits_in_the_levels_queue_of_its_shard(
    make: Make, backend: FakeBackend
) -> None:
    with make(linger_ms=FOREVER_MS) as producer:
        futures = [
            producer.send(Message(topic="t", body=b"%d" % level, delay_level=level), queue_id=3)
            for level in (1, 3, 3, 99)
        ]
    places = [(future.result(10).topic, future.result(10).queue_id) for future in futures]
    assert places == [(SCHEDULE_TOPIC, level - 1) for level in (1, 3, 3, DEFAULT_LEVEL_COUNT)]
    records = backend.queues[SCHEDULE_TOPIC, 2].records
    properties = [decode(each) for each in decode_all(records).column("properties").to_pylist()]
    assert [each.pop("_P") != "" for each in properties] == [True, True]
    assert properties == [{"DELAY": "3", "REAL_TOPIC": "t", "REAL_QID": "3"}] * 2


@pytest.mark.parametrize("levels", [2, 30])
def test_the_highest_level_is_that_of_the_cluster(
    cluster: FakeCluster, make: Make, levels: int
) -> None:
    cluster.delay_levels = levels
    encoder = make()._batcher.encoder
    assert [encoder.encode("t", b"x", delay_level=each).delay_level for each in (1, 2, 99)] == [
        1,
        2,
        levels,
    ]


def test_each_level_of_each_shard_has_a_queue_of_its_own() -> None:
    places = {waiting_queue(shard, level) for shard in range(5) for level in range(19)}
    assert len(places) == 5 * 19


def test_a_receipt_comes_early_only_if_every_message_of_the_batch_says_so(
    make: Make, backend: FakeBackend
) -> None:
    message = Message(topic="t", body=b"x", wait_store_ok=False)
    with make(linger_ms=FOREVER_MS) as producer:
        producer.send_many([message, message], queue_id=0)
        producer.flush(10)
        producer.send_many([message, Message(topic="t", body=b"y")], queue_id=0)
    assert [wait_store_ok(put.batch) for put in backend.puts] == [False, True]


def test_a_message_that_is_read_and_sent_again_is_one_of_its_new_sender(
    make: Make, backend: FakeBackend
) -> None:
    with make(linger_ms=FOREVER_MS) as producer:
        sent = Message(
            topic="t", body=b"x", flag=3, sys_flag=0x101, born_host=V6, wait_store_ok=False
        )
        producer.send(sent, queue_id=0)
        producer.flush(10)
        (found,) = read(backend)
        producer.send(found, queue_id=1)
    (again,) = read(backend, "t", 1)
    assert head(again) == (3, 0x101, STORE)
    assert [wait_store_ok(put.batch) for put in backend.puts] == [False, True]
