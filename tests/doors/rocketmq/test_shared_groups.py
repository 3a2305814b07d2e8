"""Groups of both kinds of client: RocketMQ's over the remoting protocol, and RayMQ's own consumers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from raymq.doors.rocketmq import shared_groups
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from tests.cluster.test_query_commands import Shell
from tests.doors.rocketmq.test_locks import beat, commit, committed, lock, lock_body
from tests.doors.rocketmq.test_messages import bodies, pull, send
from tests.support.remoting_client import RemotingClient, records_of
from tests.support.served_shard import ServedShard
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server(shard: ServedShard) -> Iterator[RocketMQServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_groups, "REFUSED_ROUND_S", 0.1)
        with RocketMQServer(shard.cluster, access="open") as running:
            yield running


@pytest.fixture
def group(topic: str) -> str:
    return f"g{topic}"


def leave(client: RemotingClient, client_id: str, group: str) -> None:
    fields = {"clientID": client_id, "consumerGroup": group, "producerGroup": ""}
    assert client.call(RequestCode.UNREGISTER_CLIENT, fields).code == ResponseCode.SUCCESS


def read(
    client: RemotingClient, topic: str, group: str, offset: int, queue: int = 0
) -> list[bytes]:
    """What a pull gets."""
    found = pull(client, topic, offset, queue, consumerGroup=group, suspendTimeoutMillis=0)
    assert found.code == ResponseCode.SUCCESS, found.remark
    return bodies(records_of(found.body))


def pause() -> None:
    threading.Event().wait(0.02)


def test_a_consumer_of_raymq_goes_on_where_one_of_rocketmq_has_stopped(
    client: RemotingClient, shard: ServedShard, topic: str, group: str
) -> None:
    for number in range(6):
        send(client, topic, b"%d" % number)
    beat(client, "10.0.0.1@7", group)
    assert read(client, topic, group, 0)[0] == b"0"
    with pytest.raises(Rejected) as refused:
        shard.cluster.consumer(topic, group=group, start="earliest").poll(timeout=20)
    assert "clients of RocketMQ consume in group" in str(refused.value)
    assert "10.0.0.1@7" in str(refused.value)
    # Without a group, or with queues=, it may always read.
    for more in ({}, {"group": group, "queues": [0]}):
        with shard.cluster.consumer(topic, start="earliest", **more) as reader:
            assert len(reader.poll(6, timeout=20)) == 6

    assert commit(client, topic, 4).code == ResponseCode.SUCCESS
    leave(client, "10.0.0.1@7", group)
    found: list[bytes] = []

    def join() -> None:
        try:
            with shard.cluster.consumer(topic, group=group, start="earliest") as consumer:
                found.extend(each.body for each in consumer.poll(6, timeout=20))
        except Rejected:
            pause()

    until(lambda: bool(found), join)
    assert found == [b"4", b"5"]


def test_a_consumer_of_rocketmq_goes_on_where_one_of_raymq_has_stopped(
    client: RemotingClient, shard: ServedShard, topic: str, group: str
) -> None:
    for number in range(6):
        send(client, topic, b"%d" % number)
    with shard.cluster.consumer(topic, group=group, start="earliest") as consumer:
        assert len(consumer.poll(2, timeout=20)) == 2
        consumer.commit()
        beat(client, "a", group)
        refused = pull(client, topic, 0, consumerGroup=group)
        assert refused.code == ResponseCode.NO_PERMISSION
        assert f"group {group} has consumers of RayMQ, such as" in str(refused.remark)
        # It does not begin at an offset that is old when it may read.
        queue = {"consumerGroup": group, "topic": topic, "queueId": 0}
        asked = client.call(RequestCode.QUERY_CONSUMER_OFFSET, queue)
        assert asked.code == ResponseCode.NO_PERMISSION
        locks = lock_body("a", group, [(topic, "raymq-0", 0)])
        refused = client.call(RequestCode.LOCK_BATCH_MQ, {}, locks)
        assert refused.code == ResponseCode.NO_PERMISSION
        # Another consumer of RayMQ may join those that are there.
        with shard.cluster.consumer(topic, group=group, start="earliest") as second:
            second.poll(timeout=0.5)
        consumer.poll(2, timeout=20)
        consumer.commit()

    client.pushed.clear()
    until(lambda: pull(client, topic, 4, consumerGroup=group).code == 0, pause)
    assert committed(client, topic) == 4
    assert read(client, topic, group, 4) == [b"4", b"5"]
    # It was asked to look for queues again.
    assert RequestCode.NOTIFY_CONSUMER_IDS_CHANGED in [each.code for each in client.pushed]


def test_a_pull_that_waits_is_refused_as_soon_as_the_group_has_members(
    client: RemotingClient, server: RocketMQServer, shard: ServedShard, topic: str, group: str
) -> None:
    with RemotingClient(server.addresses[0]) as waiting:
        beat(client, "a", group)
        leave(client, "a", group)
        with shard.cluster.consumer(topic, group=group, start="earliest") as consumer:
            flags = {"sysFlag": 6, "consumerGroup": group}
            # No heartbeat of this client has come yet.
            asked = waiting.send(
                RequestCode.PULL_MESSAGE,
                {
                    "topic": topic,
                    "queueId": 0,
                    "queueOffset": 0,
                    "maxMsgNums": 32,
                    "commitOffset": 0,
                    "suspendTimeoutMillis": 15_000,
                    "subscription": "*",
                    "subVersion": 0,
                    **flags,
                },
            )
            consumer.poll(timeout=0.5)
            beat(waiting, "b", group)
            found = waiting.answer(asked)
            assert found.code == ResponseCode.NO_PERMISSION


def test_broadcasting_consumers_and_strangers_are_not_members(
    client: RemotingClient, server: RocketMQServer, shard: ServedShard, topic: str, group: str
) -> None:
    send(client, topic, b"x")
    beat(client, "a", group, "BROADCASTING")
    with shard.cluster.consumer(topic, group=group, start="earliest") as consumer:
        assert len(consumer.poll(timeout=20)) == 1
        assert read(client, topic, group, 0) == [b"x"]
        with RemotingClient(server.addresses[0]) as tool:
            assert read(tool, topic, group, 0) == [b"x"]


def test_operators_see_the_clients_of_a_group_and_their_locks(
    client: RemotingClient, shard: ServedShard, topic: str, group: str
) -> None:
    began_ms = Clock().now_ms()
    beat(client, "10.0.0.1@7", group)
    assert lock(client, "10.0.0.1@7", topic, 1, group=group) == [1]
    send(client, topic, b"x", 1)
    assert commit(client, topic, 1, 1).code == ResponseCode.SUCCESS
    until(lambda: group in shard.cluster.groups(), pause)
    assert shard.cluster.groups()[group] == {
        "kind": "manual",
        "members": 0,
        "clients": 1,
        "state": "active",
    }
    facts = shard.cluster.describe_group(group)
    (shown,) = facts["clients"]
    host, port = client.socket.getsockname()
    assert began_ms <= shown.pop("since_ms") <= Clock().now_ms()
    assert shown == {
        "protocol": "RocketMQ",
        "client": "10.0.0.1@7",
        "address": f"{host}:{port}",
        "language": "PYTHON",
        "version": "5.3.3",
    }
    assert [each["locked_by"] for each in facts["queues"]] == [None, "10.0.0.1@7"]
    assert facts["queues"][0]["lock_age_s"] is None
    assert 0 <= facts["queues"][1]["lock_age_s"] < 60

    shell = Shell(shard.cluster)
    assert shell.run("group", "describe", group) == 0, shell.err
    lines = shell.stdout.getvalue().decode().splitlines()
    assert lines[1].startswith(
        f"  client 10.0.0.1@7 of RocketMQ at {host}:{port}: PYTHON 5.3.3, since 20"
    )
    assert f"queue 1 of {topic}: locked by 10.0.0.1@7, renewed 0 s ago, committed 1" in lines[3]
    shell = Shell(shard.cluster)
    assert shell.run("group", "list") == 0, shell.err
    listed = shell.stdout.getvalue().decode().splitlines()
    assert f"{group}\tmanual\tactive\t0 members\t1 clients of RocketMQ" in listed
    assert shell.run("group", "reset", group, "--to", "earliest") == 2
    assert "10.0.0.1@7 at" in shell.err


def test_offsets_of_a_group_with_clients_are_set_by_force_and_they_hear_of_it(
    client: RemotingClient,
    server: RocketMQServer,
    shard: ServedShard,
    topic: str,
    group: str,
) -> None:
    for _ in range(4):
        send(client, topic, b"x")
    with RemotingClient(server.addresses[0]) as other:
        beat(client, "a", group)
        beat(other, "b", group)
        assert lock(client, "a", topic, 0, group=group) == [0]
        assert commit(client, topic, 3).code == ResponseCode.SUCCESS
        until(lambda: shard.cluster.groups()[group]["clients"] == 2, pause)
        with pytest.raises(Rejected) as refused:
            shard.cluster.reset_group(group, 1, queue_ids=[0], topic=topic)
        assert "2 client(s) of RocketMQ consume in group" in str(refused.value)
        assert "a at 127.0.0.1:" in str(refused.value)
        assert "--force" in str(refused.value)
        assert committed(client, topic) == 3

        shell = Shell(shard.cluster)
        words = ("--to", "1", "--topic", topic, "--queue-id", "0", "--force")
        assert shell.run("group", "reset", group, *words) == 0, shell.err
        assert shell.stdout.getvalue().decode().splitlines() == [
            "topic\tqueue\tfrom\tto",
            f"{topic}\t0\t3\t1",
            f"{group}: reset",
            "clients of RocketMQ that are notified within 10 s: 2",
        ]
        assert committed(client, topic) == 1
        # With the next word of their server.
        beat(other, "c", group)
        for each in (client, other):
            pushed = each.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
            assert (pushed.fields["group"], pushed.fields["topic"]) == (group, topic)
            assert b'"queueId":0' in bytes(pushed.body)
            assert bytes(pushed.body).endswith(b":1}}")
        # The lock is free again.
        assert lock(other, "b", topic, 0, group=group) == [0]
        other.call(9_999, {})
        again = [each.code for each in (*client.pushed, *other.pushed)]
        assert RequestCode.RESET_CONSUMER_CLIENT_OFFSET not in again


def test_ids_that_no_client_should_have_keep_no_other_group_from_being_said(
    client: RemotingClient, server: RocketMQServer, shard: ServedShard, topic: str, group: str
) -> None:
    with RemotingClient(server.addresses[0]) as odd, RemotingClient(server.addresses[0]) as long:
        beat(odd, "", group)
        beat(long, "x" * 3_000, group)
        beat(client, "a", f"{group}-too")
        until(lambda: {group, f"{group}-too"} <= shard.cluster.groups().keys(), pause)
        shown = [each["client"] for each in shard.cluster.describe_group(group)["clients"]]
        assert shown == ["?", "x" * 255]


@pytest.mark.parametrize("limit", ["CALL_CLIENTS_MAX", "FOREIGN_GROUPS_MAX"])
def test_clients_of_more_groups_than_one_call_names_are_said_by_several(
    server: RocketMQServer,
    shard: ServedShard,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    monkeypatch.setattr(shared_groups, limit, 2)
    monkeypatch.setattr(shared_groups, "GATHER_S", 0.2)
    names = [f"{group}-{number}" for number in range(5)]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RemotingClient(server.addresses[0])) for _ in range(3)]
        for number, client in enumerate(clients):
            for name in names:
                beat(client, f"c{number}", name)
        until(
            lambda: (
                [shard.cluster.groups().get(each, {}).get("clients") for each in names] == [3] * 5
            ),
            pause,
        )


def test_a_connection_that_ends_makes_room_for_members(
    client: RemotingClient, server: RocketMQServer, shard: ServedShard, topic: str, group: str
) -> None:
    with RemotingClient(server.addresses[0]) as other:
        beat(other, "a", group)
        read_first = pull(other, topic, 0, consumerGroup=group, suspendTimeoutMillis=0)
        assert read_first.code == ResponseCode.PULL_NOT_FOUND
    joined: list[bool] = []

    def join() -> None:
        try:
            with shard.cluster.consumer(topic, group=group, start="latest") as consumer:
                consumer.poll(timeout=0.2)
                joined.append(True)
        except Rejected:
            pause()

    until(lambda: bool(joined), join)
