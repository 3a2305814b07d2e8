"""Messages that clients put into the retry topic of their group by themselves, over a real shard."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from raymq.client.topics.retry_topics import create_retry_topic
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.store.base import format as fmt
from raymq.store.queues.raw_records import decode_records
from tests.doors.rocketmq.test_locks import lock
from tests.support.remoting_client import RemotingClient, records_of
from tests.support.remoting_requests import bodies, pull, send_fields
from tests.support.served_shard import ServedShard

WAITS = {"sysFlag": 0x4 | 0x2}


@pytest.fixture
def group(shard: ServedShard, topic: str) -> str:
    name = f"g{topic}"
    # A heartbeat makes it a little later.
    create_retry_topic(shard.cluster, f"%RETRY%{name}")
    return name


def send_retry(client: RemotingClient, group: str, times: int, most: int, **more: str) -> None:
    fields = send_fields(f"%RETRY%{group}", RETRY_TOPIC="orders", **more)
    found = client.call(RequestCode.SEND_MESSAGE_V2, fields | {"j": times, "l": most}, b"again")
    assert found.code == ResponseCode.SUCCESS, found.remark


def reconsume_times(record: bytes) -> int:
    (row,) = decode_records(pa.array([record], pa.binary())).to_pylist()
    return int(row["reconsume_times"])


def test_the_group_gets_it_again_and_knows_how_often_it_has_had_it(
    client: RemotingClient, group: str
) -> None:
    send_retry(client, group, 3, 16)
    (record,) = records_of(pull(client, f"%RETRY%{group}", 0, consumerGroup=group, **WAITS).body)
    assert bodies([record]) == [b"again"]
    assert reconsume_times(record) == 3


def test_a_delay_level_lets_it_wait(client: RemotingClient, group: str) -> None:
    send_retry(client, group, 1, 16, DELAY="1")
    found = pull(client, f"%RETRY%{group}", 0, consumerGroup=group, sysFlag=0x4)
    assert found.code == ResponseCode.PULL_NOT_FOUND
    (record,) = records_of(pull(client, f"%RETRY%{group}", 0, consumerGroup=group, **WAITS).body)
    assert reconsume_times(record) == 1


def test_one_that_failed_as_often_as_its_consumer_allows_is_a_dead_letter(
    client: RemotingClient, group: str
) -> None:
    # Its fourth retry is one that its consumer still allows.
    send_retry(client, group, 4, 4)
    (record,) = records_of(pull(client, f"%RETRY%{group}", 0, consumerGroup=group, **WAITS).body)
    assert reconsume_times(record) == 4
    send_retry(client, group, 5, 4, DELAY="3")
    (record,) = records_of(pull(client, f"%DLQ%{group}", 0, consumerGroup=group, **WAITS).body)
    assert bodies([record]) == [b"again"]
    assert reconsume_times(record) == 5


def test_what_a_consumer_in_order_cannot_handle_is_a_dead_letter_at_once(
    client: RemotingClient, group: str, topic: str
) -> None:
    assert lock(client, "a", topic, 0, group=group) == [0]
    send_retry(client, group, 1, 4, DELAY="3")
    (record,) = records_of(pull(client, f"%DLQ%{group}", 0, consumerGroup=group, **WAITS).body)
    assert bodies([record]) == [b"again"]


def test_a_consumer_that_sends_back_names_its_own_limit(client: RemotingClient, topic, group):
    found = client.call(RequestCode.SEND_MESSAGE_V2, send_fields(topic), b"poison")
    assert found.code == ResponseCode.SUCCESS
    (record,) = records_of(pull(client, topic, 0).body)
    (at,) = struct.unpack_from(">q", record, fmt.PHYSICAL_OFFSET_AT)
    back = {"offset": at, "group": group, "delayLevel": 0, "maxReconsumeTimes": 0}
    elsewhere = client.call(RequestCode.CONSUMER_SEND_MSG_BACK, back | {"bname": "raymq-99"})
    assert "the cluster has the shards 0 to 0, not 99" in (elsewhere.remark or "")
    answer = client.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    dead = records_of(pull(client, f"%DLQ%{group}", 0, consumerGroup=group, **WAITS).body)
    assert bodies(dead) == [b"poison"]
