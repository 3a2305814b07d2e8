"""Transactions as a client of RocketMQ makes them, over a real shard."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from raymq.doors.rocketmq import transaction_check
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.command import RemotingCommand
from raymq.doors.rocketmq.message_batch import encode_batch
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.store.base import format as fmt
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.producer_stamp import STAMP_NAME
from raymq.store.records.properties import decode
from tests.doors.rocketmq.test_messages import bodies, pull, send_fields
from tests.support.remoting_client import RemotingClient, records_of
from tests.support.served_shard import ServedCluster, ServedShard

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0


@pytest.fixture(scope="module")
def server(shard: ServedShard) -> Iterator[RocketMQServer]:
    # Half messages that are due at once are asked for at once.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction_check, "ASK_S", 0.1)
        with RocketMQServer(shard.cluster, access="open") as running:
            yield running


@pytest.fixture
def group(topic: str) -> str:
    """A producer group of this test."""
    return f"p{topic}"


def prepare(
    client: RemotingClient, topic: str, body: bytes = b"half", broker: str = "", **more: object
) -> dict[str, str]:
    """Send a half message. Returns: the fields of the answer."""
    names = {"TRAN_MSG": "true", "PGROUP": f"p{topic}", "UNIQ_KEY": f"u{topic}", **more}
    fields = send_fields(topic, **names) | {"f": 4} | ({"n": broker} if broker else {})
    found = client.call(RequestCode.SEND_MESSAGE_V2, fields, body)
    assert found.code == ResponseCode.SUCCESS, found.remark
    return found.fields


def end_fields(half: dict[str, str], group: str, decision: int, **more: object) -> dict[str, Any]:
    """What a client makes of the answer to its half message."""
    return {
        "producerGroup": group,
        "tranStateTableOffset": half["queueOffset"],
        "commitLogOffset": int(half["msgId"][16:], 16),
        "commitOrRollback": decision,
        "fromTransactionCheck": False,
        "msgId": half["transactionId"],
        "transactionId": half["transactionId"],
        "bname": "raymq-0",
        **more,
    }


def end(client: RemotingClient, half: dict[str, str], group: str, decision: int) -> RemotingCommand:
    """End a half message, and wait for the answer, which no client of RocketMQ does."""
    return client.call(RequestCode.END_TRANSACTION, end_fields(half, group, decision))


def beat(client: RemotingClient, group: str) -> None:
    """Be a producer of the group."""
    body = b'{"clientID":"%s","producerDataSet":[{"groupName":"%s"}]}' % (
        str(client.socket.getsockname()).encode(),
        group.encode(),
    )
    assert client.call(RequestCode.HEART_BEAT, {}, body).code == ResponseCode.SUCCESS


def seen(client: RemotingClient, topic: str) -> list[bytes]:
    """The bodies that consumers of queue 0 get."""
    return bodies(records_of(pull(client, topic, 0).body))


def checked(client: RemotingClient) -> RemotingCommand:
    """The next question of the server."""
    if client.pushed:
        return client.pushed.pop(0)
    found = client.next()
    assert found.code == RequestCode.CHECK_TRANSACTION_STATE
    assert found.is_one_way
    return found


def answer_check(client: RemotingClient, asked: RemotingCommand, group: str, decision: int) -> None:
    """Answer a question as a client does: one-way, with what the question has said."""
    fields = {
        "producerGroup": group,
        "commitOrRollback": decision,
        "fromTransactionCheck": True,
        **{name: asked.fields[name] for name in ("tranStateTableOffset", "commitLogOffset")},
        **{name: asked.fields[name] for name in ("msgId", "transactionId", "bname")},
    }
    client.send(RequestCode.END_TRANSACTION, fields, one_way=True)


def wait_seen(client: RemotingClient, topic: str, wanted: list[bytes]) -> None:
    pause = threading.Event()
    for _ in range(200):
        if seen(client, topic) == wanted:
            return
        pause.wait(0.05)
    raise AssertionError(seen(client, topic))


# --- sends and ends -------------------------------------------------------------------------------


def test_a_half_message_is_seen_when_it_is_committed(
    client: RemotingClient, server: RocketMQServer, topic: str, group: str
) -> None:
    more = {"WAIT": "true", STAMP_NAME: "of another message"}
    half = prepare(client, topic, TAGS="paid", KEYS="k1", colour="red", **more)
    assert (half["queueId"], half["transactionId"]) == ("0", f"u{topic}")
    assert half["MSG_REGION"] == "DefaultRegion"
    assert int(half["msgId"][8:16], 16) == server.addresses[0].port
    assert seen(client, topic) == []
    assert end(client, half, group, COMMIT).code == ResponseCode.SUCCESS
    (record,) = records_of(pull(client, topic, 0).body)
    (row,) = decode_records(pa.array([record], pa.binary())).to_pylist()
    properties = decode(row["properties"])
    assert (row["body"], row["flag"], row["queue_id"]) == (b"half", 7, 0)
    assert (properties["TAGS"], properties["KEYS"], properties["colour"]) == ("paid", "k1", "red")
    assert properties.keys().isdisjoint(more)
    assert row["born_time_ms"] == 1_700_000_000_000
    assert row["born_host"] == "{}:{}".format(*client.socket.getsockname())
    assert row["prepared_transaction_offset"] == int(half["msgId"][16:], 16)
    assert row["sys_flag"] & fmt.SYS_TRANSACTION_MASK == fmt.SYS_COMMITTED


def test_a_commit_that_is_repeated_delivers_once_and_a_rollback_after_it_nothing(
    client: RemotingClient, topic: str, group: str
) -> None:
    half = prepare(client, topic)
    for _ in range(2):
        assert end(client, half, group, COMMIT).code == ResponseCode.SUCCESS
    refused = end(client, half, group, ROLLBACK)
    assert refused.code == ResponseCode.MESSAGE_ILLEGAL
    assert "resolved as COMMIT" in refused.remark
    assert seen(client, topic) == [b"half"]


def test_a_half_message_that_is_rolled_back_is_never_seen(
    client: RemotingClient, topic: str, group: str
) -> None:
    half = prepare(client, topic)
    assert end(client, half, group, ROLLBACK).code == ResponseCode.SUCCESS
    assert "resolved as ROLLBACK" in end(client, half, group, COMMIT).remark
    assert seen(client, topic) == []


def test_a_request_that_is_repeated_is_one_half_message(
    client: RemotingClient, topic: str, group: str
) -> None:
    first = prepare(client, topic)
    assert prepare(client, topic) == first
    end(client, first, group, COMMIT)
    assert seen(client, topic) == [b"half"]


def test_a_half_message_is_ended_by_its_own_group_and_place(
    client: RemotingClient, topic: str, group: str
) -> None:
    half = prepare(client, topic)
    assert f"producer group '{group}', not 'others'" in end(client, half, "others", COMMIT).remark
    moved = end_fields(half, group, COMMIT, commitLogOffset=1)
    assert "another one is meant" in client.call(RequestCode.END_TRANSACTION, moved).remark
    assert seen(client, topic) == []


def test_a_pull_that_waits_gets_a_message_as_soon_as_it_is_committed(
    client: RemotingClient, server: RocketMQServer, topic: str, group: str
) -> None:
    half = prepare(client, topic)
    with RemotingClient(server.addresses[0]) as reader:
        beat(reader, "readers")
        fields = {
            "consumerGroup": "readers",
            "topic": topic,
            "queueId": 0,
            "queueOffset": 0,
            "maxMsgNums": 32,
            "sysFlag": 2 | 4,
            "suspendTimeoutMillis": 15_000,
            "subscription": "*",
        }
        opaque = reader.send(RequestCode.PULL_MESSAGE, fields)
        client.send(RequestCode.END_TRANSACTION, end_fields(half, group, COMMIT), one_way=True)
        assert bodies(records_of(reader.answer(opaque).body)) == [b"half"]


def test_a_committed_message_that_a_consumer_sends_back_is_seen_again(
    client: RemotingClient, topic: str
) -> None:
    fields = send_fields(topic, TRAN_MSG="true", DELAY=1) | {"j": 1, "f": 4}
    found = client.call(RequestCode.SEND_MESSAGE_V2, fields, b"again")
    assert found.code == ResponseCode.SUCCESS, found.remark
    wait_seen(client, topic, [b"again"])


def test_half_messages_are_not_sent_in_batches(client: RemotingClient, topic: str) -> None:
    packed = encode_batch([0, 0], [b"a", b"b"], [b"", b"TRAN_MSG\x01true\x02"])
    found = client.call(RequestCode.SEND_BATCH_MESSAGE, send_fields(topic) | {"m": True}, packed)
    assert found.code == ResponseCode.MESSAGE_ILLEGAL
    assert "send them alone" in found.remark


def test_properties_that_only_look_like_a_half_message_are_none(
    client: RemotingClient, topic: str
) -> None:
    for text in ("TRAN_MSG\x01false\x02", "NO_TRAN_MSG\x01true\x02"):
        found = client.call(RequestCode.SEND_MESSAGE_V2, send_fields(topic) | {"i": text}, b"x")
        assert found.code == ResponseCode.SUCCESS, found.remark
    assert seen(client, topic) == [b"x", b"x"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tranStateTableOffset": 1 << 40}, "does not exist"),
        ({"tranStateTableOffset": "x"}, "must be a number"),
        ({"producerGroup": "no group!"}, "no group!"),
        ({"bname": "elsewhere"}, "is not one of this cluster"),
    ],
    ids=["offset", "number", "group", "broker"],
)
def test_an_end_of_no_half_message_is_refused(
    client: RemotingClient, topic: str, group: str, changes: dict[str, object], says: str
) -> None:
    half = prepare(client, topic)
    fields = end_fields(half, group, COMMIT, **changes)
    found = client.call(RequestCode.END_TRANSACTION, fields)
    assert found.code != ResponseCode.SUCCESS
    assert says in found.remark


# --- checks ---------------------------------------------------------------------------------------


def test_a_producer_is_asked_about_a_half_message_and_ends_it(
    client: RemotingClient, server: RocketMQServer, topic: str, group: str
) -> None:
    beat(client, group)
    more = {"CHECK_IMMUNITY_TIME_IN_SECONDS": 0, "TAGS": "paid"}
    half = prepare(client, topic, **more)
    client.send(RequestCode.END_TRANSACTION, end_fields(half, group, UNKNOWN), one_way=True)
    asked = checked(client)
    assert asked.fields == {
        "topic": topic,
        "tranStateTableOffset": half["queueOffset"],
        "commitLogOffset": str(int(half["msgId"][16:], 16)),
        "msgId": f"u{topic}",
        "transactionId": f"u{topic}",
        "offsetMsgId": half["msgId"],
        "bname": "raymq-0",
    }
    (row,) = decode_records(pa.array([bytes(asked.body)], pa.binary())).to_pylist()
    assert (row["topic"], row["queue_id"], row["body"]) == (topic, 0, b"half")
    assert row["queue_offset"] == int(half["queueOffset"])
    (size,) = struct.unpack_from(">i", asked.body)
    assert size == len(asked.body)
    properties = decode(row["properties"])
    assert (properties["PGROUP"], properties["UNIQ_KEY"]) == (group, f"u{topic}")
    assert (properties["TAGS"], properties["TRAN_MSG"]) == ("paid", "true")

    answer_check(client, asked, group, COMMIT)
    wait_seen(client, topic, [b"half"])


def test_any_producer_of_the_group_may_be_asked_and_answer(
    client: RemotingClient, server: RocketMQServer, topic: str, group: str
) -> None:
    half = prepare(client, topic, CHECK_IMMUNITY_TIME_IN_SECONDS=0)
    client.close()
    with RemotingClient(server.addresses[0]) as other:
        beat(other, group)
        asked = checked(other)
        assert asked.fields["tranStateTableOffset"] == half["queueOffset"]
        answer_check(other, asked, group, ROLLBACK)
        pause = threading.Event()
        for _ in range(200):
            if "resolved as ROLLBACK" in (end(other, half, group, COMMIT).remark or ""):
                break
            pause.wait(0.02)
        assert seen(other, topic) == []


def test_two_servers_ask_about_a_half_message_once(
    client: RemotingClient, shard: ServedShard, topic: str, group: str
) -> None:
    with (
        RocketMQServer(shard.cluster, access="open") as second,
        RemotingClient(second.addresses[0]) as other,
    ):
        beat(client, group)
        beat(other, group)
        keys = [f"{topic}-{number}" for number in range(6)]
        for key in keys:
            prepare(client, topic, UNIQ_KEY=key, CHECK_IMMUNITY_TIME_IN_SECONDS=0)

        def asked() -> list[str]:
            for each in (client, other):
                each.call(RequestCode.HEART_BEAT, {}, b'{"clientID":"c"}')
            return sorted(
                found.fields["msgId"] for each in (client, other) for found in each.pushed
            )

        pause = threading.Event()
        for _ in range(1_500):
            if len(asked()) >= len(keys):
                break
            pause.wait(0.02)
        assert asked() == keys


def test_a_producer_that_has_left_is_not_asked(
    client: RemotingClient, topic: str, group: str
) -> None:
    beat(client, group)
    leave = {"clientID": str(client.socket.getsockname()), "producerGroup": group}
    assert client.call(RequestCode.UNREGISTER_CLIENT, leave).code == ResponseCode.SUCCESS
    prepare(client, topic, CHECK_IMMUNITY_TIME_IN_SECONDS=0)
    threading.Event().wait(0.5)
    beat(client, group)
    # Now it is.
    assert checked(client).fields["msgId"] == f"u{topic}"


def test_a_half_message_of_each_shard_is_asked_for_at_its_own_port(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_check, "ASK_S", 0.1)
    with ServedCluster(tmp_path) as cluster:
        cluster.cluster.create_topic("t", queues=2)
        with (
            RocketMQServer(cluster.cluster, access="open") as server,
            RemotingClient(server.addresses[0]) as first,
            RemotingClient(server.addresses[1]) as second,
        ):
            clients = (first, second)
            for client in clients:
                # One producer has a connection to each shard.
                body = b'{"clientID":"c","producerDataSet":[{"groupName":"pt"}]}'
                client.call(RequestCode.HEART_BEAT, {}, body)
            for shard, client in enumerate(clients):
                # Each broker has a queue 0.
                half = prepare(
                    first if shard else second,
                    "t",
                    b"on %d" % shard,
                    broker=f"raymq-{shard}",
                    UNIQ_KEY=f"u{shard}",
                    CHECK_IMMUNITY_TIME_IN_SECONDS=0,
                )
                assert (half["queueId"], half["queueOffset"]) == ("0", "0")
                asked = checked(client)
                assert (asked.fields["bname"], asked.fields["msgId"]) == (
                    f"raymq-{shard}",
                    f"u{shard}",
                )
                (row,) = decode_records(pa.array([bytes(asked.body)], pa.binary())).to_pylist()
                assert (row["queue_id"], row["body"]) == (0, b"on %d" % shard)
                answer_check(first, asked, "pt", COMMIT)
                wait_seen(client, "t", [b"on %d" % shard])
