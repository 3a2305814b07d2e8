"""Locks of queues as consumers in order take them, over a real shard."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.actors.leader.lock_times import LockTimes
from raymq.doors.rocketmq import consumer_offsets
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from tests.doors.rocketmq.test_messages import send
from tests.support.clock import ManualClock
from tests.support.remoting_client import RemotingClient
from tests.support.roles import leader_of
from tests.support.served_shard import ServedCluster, ServedShard


def beat(client: RemotingClient, client_id: str, group: str, model: str = "CLUSTERING") -> None:
    """Be a consumer of a group."""
    consumer = {"groupName": group, "messageModel": model, "subscriptionDataSet": []}
    body = json.dumps({"clientID": client_id, "consumerDataSet": [consumer]}).encode()
    assert client.call(RequestCode.HEART_BEAT, {}, body).code == ResponseCode.SUCCESS


def lock_body(client_id: str, group: str, queues: list[tuple[str, str, int]]) -> bytes:
    """What the Java client sends. Args: `queues`: topic, broker and number of each."""
    found = [
        {"brokerName": broker, "queueId": number, "topic": topic}
        for topic, broker, number in queues
    ]
    fields = {
        "clientId": client_id,
        "consumerGroup": group,
        "mqSet": found,
        "onlyThisBroker": False,
    }
    return json.dumps(fields).encode()


def lock(client: RemotingClient, client_id: str, topic: str, *queues: int, group: str = "") -> Any:
    """Returns: the numbers of the queues that the client has now."""
    body = lock_body(client_id, group or f"g{topic}", [(topic, "raymq-0", each) for each in queues])
    found = client.call(RequestCode.LOCK_BATCH_MQ, {}, body)
    assert found.code == ResponseCode.SUCCESS, found.remark
    fields = json.loads(bytes(found.body))
    assert list(fields) == ["lockOKMQSet"]
    for each in fields["lockOKMQSet"]:
        assert each == {"brokerName": "raymq-0", "queueId": each["queueId"], "topic": topic}
    return sorted(each["queueId"] for each in fields["lockOKMQSet"])


def unlock(client: RemotingClient, client_id: str, topic: str, *queues: int) -> None:
    body = lock_body(client_id, f"g{topic}", [(topic, "raymq-0", each) for each in queues])
    assert client.call(RequestCode.UNLOCK_BATCH_MQ, {}, body).code == ResponseCode.SUCCESS


def commit(client: RemotingClient, topic: str, offset: int, queue: int = 0) -> Any:
    fields = {"consumerGroup": f"g{topic}", "topic": topic, "queueId": queue}
    return client.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**fields, "commitOffset": offset})


def committed(client: RemotingClient, topic: str, queue: int = 0) -> int:
    fields = {"consumerGroup": f"g{topic}", "topic": topic, "queueId": queue}
    return int(client.call(RequestCode.QUERY_CONSUMER_OFFSET, fields).fields["offset"])


@pytest.fixture
def other(server: RocketMQServer) -> Iterator[RemotingClient]:
    with RemotingClient(server.addresses[0]) as connected:
        yield connected


@pytest.fixture
def clock(shard: ServedShard) -> ManualClock:
    """Says when locks end."""
    found = ManualClock()
    leader_of(shard.host).claims._locks = LockTimes(found)
    return found


def test_a_queue_is_locked_for_one_client_at_a_time(
    client: RemotingClient, other: RemotingClient, topic: str
) -> None:
    assert lock(client, "a", topic, 0) == [0]
    assert lock(other, "b", topic, 0, 1) == [1]
    assert lock(client, "a", topic, 0, 1) == [0]
    # Another group has locks of its own.
    assert lock(other, "b", topic, 0, 1, group="another") == [0, 1]
    unlock(other, "b", topic, 0)
    assert lock(other, "b", topic, 0) == []
    unlock(client, "a", topic, 0, 1)
    assert lock(other, "b", topic, 0, 1) == [0, 1]


def test_the_offset_that_a_client_commits_before_it_unlocks_is_where_the_next_one_begins(
    client: RemotingClient,
    other: RemotingClient,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_offsets, "COMMIT_AFTER_S", 0.5)
    for _ in range(3):
        send(client, topic, b"x")
    beat(client, "a", f"g{topic}")
    beat(other, "b", f"g{topic}")
    assert lock(client, "a", topic, 0) == [0]
    # As the Java client does: both without an answer, and the offset first.
    fields = {"consumerGroup": f"g{topic}", "topic": topic, "queueId": 0, "commitOffset": 2}
    client.send(RequestCode.UPDATE_CONSUMER_OFFSET, fields, one_way=True)
    body = lock_body("a", f"g{topic}", [(topic, "raymq-0", 0)])
    client.send(RequestCode.UNLOCK_BATCH_MQ, {}, body, one_way=True)
    while lock(other, "b", topic, 0) != [0]:
        threading.Event().wait(0.02)
    assert committed(other, topic) == 2


def test_a_commit_names_the_client_of_its_connection(
    client: RemotingClient, other: RemotingClient, topic: str, clock: ManualClock
) -> None:
    for _ in range(5):
        send(client, topic, b"x")
    beat(client, "a", f"g{topic}")
    beat(other, "b", f"g{topic}")
    assert lock(client, "a", topic, 0) == [0]
    assert commit(client, topic, 1).code == ResponseCode.SUCCESS
    refused = commit(other, topic, 4)
    assert refused.code == ResponseCode.MESSAGE_ILLEGAL
    assert "client a has queue 0" in str(refused.remark)
    # A queue without a lock takes the commits of each client.
    assert commit(other, topic, 0, queue=1).code == ResponseCode.SUCCESS

    clock.advance(60_000)
    assert lock(other, "b", topic, 0) == [0]
    assert commit(other, topic, 3).code == ResponseCode.SUCCESS
    assert "client b has queue 0" in str(commit(client, topic, 2).remark)
    assert committed(client, topic) == 3


def test_commits_of_two_clients_at_once_are_decided_each_by_itself(
    client: RemotingClient, other: RemotingClient, topic: str
) -> None:
    for _ in range(5):
        send(client, topic, b"x")
    beat(client, "a", f"g{topic}")
    beat(other, "b", f"g{topic}")
    assert lock(client, "a", topic, 0) == [0]
    fields = {"consumerGroup": f"g{topic}", "topic": topic, "queueId": 0}
    for turn in range(1, 6):
        mine = client.send(RequestCode.UPDATE_CONSUMER_OFFSET, {**fields, "commitOffset": turn})
        theirs = other.send(RequestCode.UPDATE_CONSUMER_OFFSET, {**fields, "commitOffset": 0})
        assert client.answer(mine).code == ResponseCode.SUCCESS
        assert other.answer(theirs).code == ResponseCode.MESSAGE_ILLEGAL
    assert committed(client, topic) == 5


def test_locks_of_an_earlier_server_and_leader_are_still_there(
    client: RemotingClient, shard: ServedShard, topic: str
) -> None:
    assert lock(client, "a", topic, 0) == [0]
    with (
        RocketMQServer(shard.cluster, access="open") as second,
        RemotingClient(second.addresses[0]) as other,
    ):
        assert lock(other, "b", topic, 0) == []
        assert lock(other, "a", topic, 0) == [0]


def test_a_queue_that_does_not_exist_is_not_locked(client: RemotingClient, topic: str) -> None:
    wanted = [(topic, "raymq-0", 0), (topic, "raymq-0", 9), ("none", "raymq-0", 0)]
    for queues, locked in ((wanted, [0]), ([], [])):
        found = client.call(RequestCode.LOCK_BATCH_MQ, {}, lock_body("a", "g", queues))
        names = json.loads(bytes(found.body))["lockOKMQSet"]
        assert [each["queueId"] for each in names] == locked


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"clientId":"c","mqSet":[]}',
        b'{"clientId":"c","consumerGroup":"g","mqSet":[{"topic":"t"}]}',
        b'{"clientId":"c","consumerGroup":"g","mqSet":3}',
    ],
)
def test_a_body_that_cannot_be_read_is_refused(client: RemotingClient, body: bytes) -> None:
    for code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
        assert client.call(code, {}, body).code == ResponseCode.SYSTEM_ERROR


def test_locks_of_two_shards_and_topics_are_taken_by_one_request(tmp_path) -> None:
    with ServedCluster(tmp_path) as served:
        topics = ["first", "second"]
        for topic in topics:
            served.cluster.create_topic(topic, queues=4)
        with (
            RocketMQServer(served.cluster, access="open") as server,
            RemotingClient(server.addresses[0]) as client,
        ):
            queues = [
                (topic, f"raymq-{shard}", number)
                for topic in topics
                for shard in (0, 1)
                for number in (0, 1)
            ]
            for client_id, count in (("a", 8), ("b", 0), ("a", 8)):
                body = lock_body(client_id, "g", queues)
                found = client.call(RequestCode.LOCK_BATCH_MQ, {}, body)
                names = json.loads(bytes(found.body))["lockOKMQSet"]
                got = {(each["topic"], each["brokerName"], each["queueId"]) for each in names}
                assert got == (set(queues) if count else set())
