"""Sends and pulls as a client of RocketMQ makes them, over a real shard."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.doors.rocketmq import connection
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.store.base import format as fmt
from raymq.store.records import properties
from tests.support.remoting_client import VERSION_4_9_3, RemotingClient, records_of
from tests.support.remoting_requests import (
    COMMIT,
    SUBSCRIPTION,
    SUSPEND,
    beat,
    bodies,
    pull,
    pull_fields,
    send,
    send_fields,
)
from tests.support.served_shard import ServedShard

# --- sends ----------------------------------------------------------------------------------------


def test_a_message_is_stored_as_it_was_sent(
    client: RemotingClient, shard: ServedShard, topic: str
) -> None:
    found = send(client, topic, b"hello", TAGS="paid", KEYS="k1 k2", colour="red")
    assert (found["queueId"], found["queueOffset"]) == ("0", "0")
    assert (found["transactionId"], found["MSG_REGION"]) == ("u1", "DefaultRegion")
    with shard.cluster.consumer(topic, start="earliest") as consumer:
        (message,) = consumer.poll(10, timeout=20)
    assert (message.body, message.tag, message.index_keys) == (b"hello", "paid", ("k1", "k2"))
    assert (message.properties, message.flag) == ({"colour": "red"}, 7)
    assert message.born_time_ms == 1_700_000_000_000
    assert message.born_host == "{}:{}".format(*client.socket.getsockname())


def test_the_id_of_an_answer_is_where_the_record_lies(
    client: RemotingClient, server: RocketMQServer, topic: str
) -> None:
    send(client, topic, b"first")
    ids = [send(client, topic, b"x" * size)["msgId"] for size in (1, 2)]
    records = records_of(pull(client, topic, 1).body)
    places = [struct.unpack_from(">q", each, fmt.PHYSICAL_OFFSET_AT)[0] for each in records]
    assert [int(each[16:], 16) for each in ids] == places
    host = ids[0][:16]
    assert bytes.fromhex(host[:8]) == b"\x7f\x00\x00\x01"
    assert int(host[8:], 16) == server.addresses[0].port


def test_a_send_to_any_queue_goes_to_one_of_the_broker(client: RemotingClient, topic: str) -> None:
    queues = {
        client.call(RequestCode.SEND_MESSAGE_V2, send_fields(topic, -1), b"x").fields["queueId"]
        for _ in range(40)
    }
    assert queues == {"0", "1"}


def test_a_batch_gets_consecutive_offsets_and_an_id_for_each_message(
    client: RemotingClient, topic: str
) -> None:
    packed = b""
    for number in range(3):
        body, text = b"m%d" % number, b"TAGS\x01t%d\x02" % number
        size = 20 + len(body) + 2 + len(text)
        packed += struct.pack(">iiiii", size, 0, 0, number, len(body)) + body
        packed += struct.pack(">h", len(text)) + text
    found = client.call(RequestCode.SEND_BATCH_MESSAGE, send_fields(topic) | {"m": True}, packed)
    assert found.code == ResponseCode.SUCCESS
    assert found.fields["queueOffset"] == "0"
    assert len(set(found.fields["msgId"].split(","))) == 3
    records = records_of(pull(client, topic, 0).body)
    assert bodies(records) == [b"m0", b"m1", b"m2"]


def test_many_sends_at_once_are_answered_each_with_its_own_offset(
    client: RemotingClient, topic: str
) -> None:
    opaques = [
        client.send(RequestCode.SEND_MESSAGE_V2, send_fields(topic), b"%d" % number)
        for number in range(300)
    ]
    offsets = [int(client.answer(opaque).fields["queueOffset"]) for opaque in opaques]
    assert sorted(offsets) == [*range(300)]
    found: list[bytes] = []
    while len(found) < 300:
        found += bodies(records_of(pull(client, topic, len(found), maxMsgNums=1_000).body))
    assert [found[offset] for offset in offsets] == [b"%d" % number for number in range(300)]


def test_delayed_messages_come_later_and_the_others_at_once(
    client: RemotingClient, topic: str
) -> None:
    delays = [{"DELAY": 1}, {"TIMER_DELAY_SEC": 1}, {"TIMER_DELAY_MS": 300}]
    for number, delay in enumerate(delays):
        found = send(client, topic, b"%d" % number, **delay)
        assert found["queueId"] == "0"
    send(client, topic, b"past", TIMER_DELIVER_MS=1_600_000_000_000)
    assert bodies(records_of(pull(client, topic, 0).body)) == [b"past"]
    late: list[bytes] = []
    while len(late) < 3:
        flags = {"sysFlag": SUBSCRIPTION | SUSPEND}
        late += bodies(records_of(pull(client, topic, 1 + len(late), **flags).body))
    assert sorted(late) == [b"0", b"1", b"2"]


def test_a_message_that_is_sent_back_comes_again_in_the_retry_topic_of_its_group(
    client: RemotingClient, topic: str
) -> None:
    group = f"g{topic}"
    beat(client, "c1", group)
    found = send(client, topic, b"again", TAGS="paid")
    (record,) = records_of(pull(client, topic, 0).body)
    (at,) = struct.unpack_from(">q", record, fmt.PHYSICAL_OFFSET_AT)
    back = {
        "offset": at,
        "group": group,
        "delayLevel": 1,
        "originMsgId": found["msgId"],
        "originTopic": topic,
        "unitMode": False,
        "maxReconsumeTimes": 16,
    }
    answer = client.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    flags = {"sysFlag": SUBSCRIPTION | SUSPEND, "consumerGroup": group}
    retry = records_of(pull(client, f"%RETRY%{group}", 0, **flags).body)
    assert bodies(retry) == [b"again"]
    nowhere = client.call(RequestCode.CONSUMER_SEND_MSG_BACK, back | {"offset": at + 1})
    assert nowhere.code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"b": "unknown"}, ResponseCode.TOPIC_NOT_EXIST, "topic create unknown"),
        ({"e": 5}, ResponseCode.SYSTEM_ERROR, "queueId 5"),
        ({"e": "x"}, ResponseCode.SYSTEM_ERROR, "'queueId' must be a number"),
        ({"n": "broker-a"}, ResponseCode.SYSTEM_ERROR, "'broker-a' is not one of this cluster"),
        ({"f": 128}, ResponseCode.MESSAGE_ILLEGAL, "send it as a batch"),
        ({"h": 2**40}, ResponseCode.MESSAGE_ILLEGAL, "it has 32 bits"),
        ({"n": "raymq-99"}, ResponseCode.SYSTEM_ERROR, "raymq-99"),
        ({"f": 4}, ResponseCode.MESSAGE_ILLEGAL, "TRAN_MSG=true"),
        ({"i": "DELAY\x01" + "x" * 40_000 + "\x02"}, ResponseCode.MESSAGE_ILLEGAL, "32767"),
    ],
    ids=[
        "topic",
        "queue",
        "number",
        "broker",
        "inner batch",
        "flag",
        "shard",
        "half",
        "properties",
    ],
)
def test_a_send_that_cannot_be_stored_says_why(
    client: RemotingClient, topic: str, changes, code: ResponseCode, says: str
) -> None:
    found = client.call(RequestCode.SEND_MESSAGE_V2, send_fields(topic) | changes, b"x")
    assert found.code == code
    assert says in (found.remark or "")


def test_a_bad_message_among_many_fails_alone(client: RemotingClient, topic: str) -> None:
    bad = send_fields(topic, long="y" * 40_000)
    opaques = [
        client.send(RequestCode.SEND_MESSAGE_V2, bad if number == 5 else send_fields(topic), b"x")
        for number in range(10)
    ]
    codes = [client.answer(opaque).code for opaque in opaques]
    assert codes.count(ResponseCode.SUCCESS) == 9
    assert codes[5] == ResponseCode.MESSAGE_ILLEGAL


# --- pulls ----------------------------------------------------------------------------------------


def test_a_pull_waits_for_a_message_and_is_answered_when_it_comes(
    client: RemotingClient, server: RocketMQServer, topic: str
) -> None:
    flags = {"sysFlag": SUBSCRIPTION | SUSPEND}
    opaque = client.send(RequestCode.PULL_MESSAGE, pull_fields(topic, 0, **flags))
    with RemotingClient(server.addresses[0]) as other:
        send(other, topic, b"late")
    assert bodies(records_of(client.answer(opaque).body)) == [b"late"]


def test_a_message_of_another_client_ends_a_pull_as_well(
    client: RemotingClient, shard: ServedShard, topic: str
) -> None:
    flags = {"sysFlag": SUBSCRIPTION | SUSPEND}
    opaque = client.send(RequestCode.PULL_MESSAGE, pull_fields(topic, 0, **flags))
    with shard.cluster.producer() as producer:
        producer.send(topic, b"ours", queue_id=0).result()
    assert bodies(records_of(client.answer(opaque).body)) == [b"ours"]


def test_a_pull_of_an_empty_queue_is_answered_after_its_time(
    client: RemotingClient, topic: str
) -> None:
    for more in ({}, {"sysFlag": SUBSCRIPTION | SUSPEND, "suspendTimeoutMillis": 50}):
        found = pull(client, topic, 0, **more)
        assert found.code == ResponseCode.PULL_NOT_FOUND
        assert found.fields == {
            "nextBeginOffset": "0",
            "minOffset": "0",
            "maxOffset": "0",
            "suggestWhichBrokerId": "0",
        }


def test_a_pull_beyond_the_end_says_where_to_go_on(client: RemotingClient, topic: str) -> None:
    send(client, topic, b"x")
    found = pull(client, topic, 50)
    assert found.code == ResponseCode.PULL_OFFSET_MOVED
    assert found.fields["nextBeginOffset"] == "1"


def test_a_filtered_stretch_moves_the_client_on(client: RemotingClient, topic: str) -> None:
    for number in range(5):
        send(client, topic, b"x", TAGS="other", number=number)
    found = pull(client, topic, 1, subscription="wanted")
    assert found.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert found.fields["nextBeginOffset"] == "5"
    send(client, topic, b"y", TAGS="wanted")
    assert bodies(records_of(pull(client, topic, 1, subscription="wanted").body)) == [b"y"]


def test_a_pull_without_its_filter_takes_that_of_the_heartbeat(
    client: RemotingClient, topic: str
) -> None:
    group = f"g-{topic}"
    plain = {"sysFlag": 0, "subscription": "", "consumerGroup": group}
    assert pull(client, topic, 0, **plain).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    subscription = {"topic": topic, "subString": "b", "expressionType": "TAG", "subVersion": 5}
    consumer = {"groupName": group, "subscriptionDataSet": [subscription]}
    beat = {"clientID": "c1", "producerDataSet": [], "consumerDataSet": [consumer]}
    assert client.call(RequestCode.HEART_BEAT, {}, json.dumps(beat).encode()).code == 0
    newer = pull(client, topic, 0, **plain, subVersion=6)
    assert newer.code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    send(client, topic, b"1", TAGS="a")
    send(client, topic, b"2", TAGS="b")
    assert bodies(records_of(pull(client, topic, 0, **plain, subVersion=5).body)) == [b"2"]


def test_the_body_of_a_pull_is_what_the_log_has(
    client: RemotingClient, shard: ServedShard, topic: str
) -> None:
    found = send(client, topic, b"hello", TAGS="paid")
    at = int(found["msgId"][16:], 16)
    body = bytes(pull(client, topic, 0).body)
    (segment,) = [each for each in shard.root.glob("commitlog/*") if int(each.name) == 0]
    assert segment.read_bytes()[at : at + len(body)] == body
    (text,) = [body[-length:] for length in (struct.unpack_from(">h", body, _properties_at(body)))]
    assert properties.decode(text)["TAGS"] == "paid"


def _properties_at(record: bytes) -> int:
    """Where the length of the properties is."""
    (size,) = struct.unpack_from(">i", record, fmt.BODY_LENGTH_AT)
    at = fmt.HEADER_BYTES + size
    return at + 1 + record[at]


def test_a_client_that_takes_its_answers_slowly_gets_no_further_messages_until_it_does(
    client: RemotingClient, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, topic, b"x")
    # As if the client had bytes to take all the time.
    monkeypatch.setattr(connection, "UNSENT_BYTES_MAX", -1)
    waiting = client.send(RequestCode.PULL_MESSAGE, pull_fields(topic, 0))
    queue = {"topic": topic, "queueId": 0}
    for _ in range(20):
        client.call(RequestCode.GET_MAX_OFFSET, queue)
    assert not client.has_answer(waiting)
    monkeypatch.undo()
    assert bodies(records_of(client.answer(waiting).body)) == [b"x"]


# --- offsets --------------------------------------------------------------------------------------


def test_an_offset_that_was_committed_is_found_and_shared_with_our_consumers(
    client: RemotingClient, shard: ServedShard, topic: str
) -> None:
    queue = {"consumerGroup": "shared", "topic": topic, "queueId": 0}
    for number in range(4):
        send(client, topic, b"%d" % number)
    found = client.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**queue, "commitOffset": 3})
    assert found.code == ResponseCode.SUCCESS
    found = client.call(RequestCode.QUERY_CONSUMER_OFFSET, queue)
    assert found.fields["offset"] == "3"
    with shard.cluster.consumer(topic, group="shared", start="earliest") as consumer:
        assert [each.body for each in consumer.poll(10, timeout=20)] == [b"3"]


def test_a_group_without_an_offset_begins_where_rocketmq_lets_it(
    client: RemotingClient, topic: str
) -> None:
    queue = {"consumerGroup": "new", "topic": topic, "queueId": 0}
    assert client.call(RequestCode.QUERY_CONSUMER_OFFSET, queue).fields["offset"] == "0"
    strict = {**queue, "setZeroIfNotFound": "false"}
    found = client.call(RequestCode.QUERY_CONSUMER_OFFSET, strict)
    assert found.code == ResponseCode.QUERY_NOT_FOUND


def test_a_commit_in_a_pull_is_stored(client: RemotingClient, topic: str) -> None:
    send(client, topic, b"x")
    send(client, topic, b"y")
    pull(client, topic, 1, sysFlag=SUBSCRIPTION | COMMIT, commitOffset=1, consumerGroup="pulling")
    queue = {"consumerGroup": "pulling", "topic": topic, "queueId": 0}
    assert client.call(RequestCode.QUERY_CONSUMER_OFFSET, queue).fields["offset"] == "1"


def test_the_ends_of_a_queue_and_its_offsets_by_time(client: RemotingClient, topic: str) -> None:
    queue = {"topic": topic, "queueId": 1}
    for _ in range(3):
        send(client, topic, b"x", queue=1)
    assert client.call(RequestCode.GET_MAX_OFFSET, queue).fields["offset"] == "3"
    assert client.call(RequestCode.GET_MIN_OFFSET, queue).fields["offset"] == "0"
    for time_ms, offset in ((1_000, "0"), (4_000_000_000_000, "3")):
        asked = {**queue, "timestamp": time_ms}
        found = client.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, asked)
        assert found.fields["offset"] == offset


# --- several shards -------------------------------------------------------------------------------


@pytest.fixture
def two_shards(tmp_path) -> Iterator[RocketMQServer]:
    with (
        ServedShard(tmp_path / "s0", shard=0, shards=2) as first,
        ServedShard(tmp_path / "s1", shard=1, shards=2) as second,
    ):
        for each in (first, second):
            each.start_flusher()
        endpoints = {**first.endpoints, **second.endpoints}
        for each in (first, second):
            each.host.addresses.set_routes({str(s): there for s, there in endpoints.items()})
        cluster = first.cluster
        cluster.shards, cluster.endpoints, cluster.resolver = 2, endpoints, lambda: endpoints
        cluster.create_topic("t", queues=5)
        with RocketMQServer(cluster, access="open") as server:
            yield server


def test_queues_are_numbered_for_each_broker_and_older_clients_find_the_number_in_the_record(
    two_shards: RocketMQServer,
) -> None:
    with RemotingClient(two_shards.addresses[1]) as client:
        for number in range(2):
            found = send(client, "t", b"m%d" % number, queue=number)
            assert found["queueId"] == str(number)
        newer = records_of(pull(client, "t", 0, 1).body)
        assert bodies(newer) == [b"m1"]
        assert struct.unpack_from(">i", newer[0], fmt.QUEUE_ID_AT) == (3,)
        assert client.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 2}).code == 1
    with RemotingClient(two_shards.addresses[1], version=VERSION_4_9_3) as older:
        (record,) = records_of(pull(older, "t", 0, 1).body)
        assert struct.unpack_from(">i", record, fmt.QUEUE_ID_AT) == (1,)
        assert bodies([record]) == [b"m1"]


def test_a_route_has_each_shard_as_a_broker_in_the_json_of_the_clients_version(
    two_shards: RocketMQServer,
) -> None:
    first, second = two_shards.addresses[0], two_shards.addresses[1]
    with RemotingClient(f"127.0.0.1:{two_shards.listen(0)}") as client:
        found = client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
        route = json.loads(bytes(found.body))
    assert [each["brokerName"] for each in route["queueDatas"]] == ["raymq-0", "raymq-1"]
    assert [each["readQueueNums"] for each in route["queueDatas"]] == [3, 2]
    addresses = [each["brokerAddrs"] for each in route["brokerDatas"]]
    assert addresses == [{"0": str(first)}, {"0": str(second)}]

    with RemotingClient(f"127.0.0.1:{two_shards.listen(0)}", version=VERSION_4_9_3) as older:
        found = older.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
        assert f'"brokerAddrs":{{0:"{first}"}}'.encode() in bytes(found.body)
        asked = {"topic": "t", "acceptStandardJsonOnly": "true"}
        found = older.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, asked)
        assert f'"brokerAddrs":{{"0":"{first}"}}'.encode() in bytes(found.body)
        unknown = older.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "none"})
        assert unknown.code == ResponseCode.TOPIC_NOT_EXIST


# --- groups ---------------------------------------------------------------------------------------


def _members(client: RemotingClient, group: str) -> list[str]:
    found = client.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    return [] if found.code else json.loads(bytes(found.body))["consumerIdList"]


def test_members_hear_of_each_other_and_of_those_that_go(
    client: RemotingClient, server: RocketMQServer
) -> None:
    group = "hearing"
    assert _members(client, group) == []
    beat(client, "a", group)
    with RemotingClient(server.addresses[0]) as other:
        beat(other, "b", group)
        assert _members(client, group) == ["a", "b"]
        changed = other.next()
        assert changed.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        assert changed.is_one_way
        assert changed.fields == {"consumerGroup": group}
    while _members(client, group) != ["a"]:
        threading.Event().wait(0.01)
    gone = {"clientID": "a", "consumerGroup": group, "producerGroup": "p"}
    assert client.call(RequestCode.UNREGISTER_CLIENT, gone).code == ResponseCode.SUCCESS
    assert _members(client, group) == []


def test_an_sql_expression_is_checked_before_a_consumer_starts(client: RemotingClient) -> None:
    def check(expression: str) -> Any:
        data = {"topic": "t", "subString": expression, "expressionType": "SQL92"}
        body = json.dumps({"group": "g", "subscriptionData": data}).encode()
        return client.call(RequestCode.CHECK_CLIENT_CONFIG, {}, body)

    assert check("a > 5").code == ResponseCode.SUCCESS
    refused = check("a >")
    assert refused.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"clientID":"c","consumerDataSet":3}'])
def test_a_heartbeat_that_cannot_be_read_is_refused(client: RemotingClient, body: bytes) -> None:
    assert client.call(RequestCode.HEART_BEAT, {}, body).code == ResponseCode.SYSTEM_ERROR
