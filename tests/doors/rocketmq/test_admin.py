"""What RocketMQ's tools ask and do: topics, brokers, groups, and messages by key and by id."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from functools import partial
from typing import Any, cast

import pyarrow as pa
import pytest

from raymq.doors.rocketmq import shards
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.command import RemotingCommand
from raymq.doors.rocketmq.json_dialect import JsonKey, read_json, write_json
from raymq.doors.rocketmq.processors import ADMIN, CALL
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.doors.rocketmq.stored_record import read_record
from raymq.store.base import format as fmt
from raymq.store.records.requests import FetchRequest, FetchSlice
from tests.support.remoting_client import RemotingClient, records_of
from tests.support.remoting_requests import beat, bodies, pull, send
from tests.support.served_shard import ServedCluster, ServedShard
from tests.support.waiting import until

#: numbers that `clusterList` parses
NUMBERS = (
    "msgPutTotalYesterdayMorning",
    "msgPutTotalTodayMorning",
    "msgGetTotalYesterdayMorning",
    "msgGetTotalTodayMorning",
    "msgGetTotalTodayNow",
    "sendThreadPoolQueueSize",
    "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueSize",
    "pullThreadPoolQueueHeadWaitTimeMills",
    "pageCacheLockTimeMills",
    "commitLogDiskRatio",
    "timerReadBehind",
    "timerOffsetBehind",
    "timerCongestNum",
    "timerEnqueueTps",
    "timerDequeueTps",
)


def asked(client: RemotingClient, code: RequestCode, json: object = None, **fields: object) -> Any:
    """The body of the answer to a request of tools. Args: `json`: the body of the request."""
    body = b"" if json is None else write_json(json, standard=True)
    found = client.call(code, fields, body)
    assert found.code == ResponseCode.SUCCESS, found.remark
    return read_json(found.body) if found.body else None


def message_id_of(record: bytes) -> str:
    """The id that RocketMQ's clients make of a record with IPv4 hosts."""
    (offset,) = struct.unpack_from(">q", record, fmt.PHYSICAL_OFFSET_AT)
    host = record[fmt.STORE_TIME_AT + 8 : fmt.STORE_TIME_AT + 16]
    return f"{host.hex()}{offset:016x}".upper()


def by_queue(table: dict[Any, Any]) -> dict[int, Any]:
    """Queue id -> value, of a table whose keys are queues."""
    return {dict(JsonKey(key))["queueId"]: value for key, value in table.items()}


# --- topics ---------------------------------------------------------------------------------------


def test_topics_are_made_listed_and_deleted(client: RemotingClient, shard: ServedShard) -> None:
    fields = {
        "topic": "made",
        "defaultTopic": "TBW102",
        "readQueueNums": 3,
        "writeQueueNums": 3,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "order": False,
    }
    # Tools ask each broker, and may ask again.
    for _ in range(2):
        asked(client, RequestCode.UPDATE_AND_CREATE_TOPIC, **fields)
    assert shard.cluster.topics()["made"]["queues"] == 3
    names = asked(client, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)["topicList"]
    assert "made" in names
    for cluster, expected in (("served", names), ("another", [])):
        found = asked(client, RequestCode.GET_TOPICS_BY_CLUSTER, cluster=cluster)
        assert found["topicList"] == expected
    configs = asked(client, RequestCode.GET_ALL_TOPIC_CONFIG)["topicConfigTable"]
    assert (configs["made"]["readQueueNums"], configs["made"]["perm"]) == (3, 6)

    more = {**fields, "readQueueNums": 5, "writeQueueNums": 5}
    asked(client, RequestCode.UPDATE_AND_CREATE_TOPIC, **more)
    assert shard.cluster.topics()["made"]["queues"] == 5
    # Queues cannot be taken away.
    fewer = client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
    assert fewer.code == ResponseCode.SYSTEM_ERROR
    assert "has 5 queues" in (fewer.remark or "")
    # Kinds of topics that do not exist here are refused.
    attributes = {**more, "attributes": "+queue.type=BatchCQ"}
    refused = client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, attributes)
    assert "queue.type" in (refused.remark or "")
    attributes = {**fields, "topic": "compacted", "attributes": "+cleanup.policy=COMPACTION"}
    asked(client, RequestCode.UPDATE_AND_CREATE_TOPIC, **attributes)
    assert shard.cluster.topics()["compacted"]["compacted"]
    read_only = client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, {**fields, "perm": 4})
    assert "perm 6" in (read_only.remark or "")

    for _ in range(2):
        asked(client, RequestCode.DELETE_TOPIC_IN_BROKER, topic="made")
        asked(client, RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="made")
    assert "made" not in shard.cluster.topics()
    gone = client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "made"})
    assert gone.code == ResponseCode.TOPIC_NOT_EXIST


def test_what_others_do_to_a_topic_is_in_the_routes_soon(
    client: RemotingClient, shard: ServedShard, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "LOOK_AGAIN_S", 0.0)

    def route() -> RemotingCommand:
        return client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})

    def queues() -> int:
        found = route()
        return int(read_json(found.body)["queueDatas"][0]["readQueueNums"])

    assert queues() == 2
    shard.cluster.add_queues(topic, 5, break_key_order=True)
    until(lambda: queues() == 5, lambda: threading.Event().wait(0.01))
    shard.cluster.delete_topic(topic)
    gone = ResponseCode.TOPIC_NOT_EXIST
    until(lambda: route().code == gone, lambda: threading.Event().wait(0.01))
    # Another topic of the name has queues of its own.
    shard.cluster.create_topic(topic, queues=3)
    until(lambda: route().code != gone, lambda: threading.Event().wait(0.01))
    assert queues() == 3


def test_the_statistics_of_a_topic_name_the_ends_of_its_queues_and_the_last_store_time(
    client: RemotingClient, topic: str
) -> None:
    for _ in range(3):
        send(client, topic, b"x", queue=1)
    found = asked(client, RequestCode.GET_TOPIC_STATS_INFO, topic=topic)
    queues = by_queue(found["offsetTable"])
    assert queues[0] == {"lastUpdateTimestamp": 0, "maxOffset": 0, "minOffset": 0}
    assert (queues[1]["minOffset"], queues[1]["maxOffset"]) == (0, 3)
    assert queues[1]["lastUpdateTimestamp"] > 1_700_000_000_000


# --- brokers --------------------------------------------------------------------------------------


def test_each_shard_is_a_broker_with_its_address_and_the_facts_that_tools_read(
    client: RemotingClient, server: RocketMQServer, topic: str
) -> None:
    found = asked(client, RequestCode.GET_BROKER_CLUSTER_INFO)
    assert found["clusterAddrTable"] == {"served": ["raymq-0"]}
    addresses = found["brokerAddrTable"]["raymq-0"]["brokerAddrs"]
    assert addresses == {"0": str(server.addresses[0])}

    table = asked(client, RequestCode.GET_BROKER_RUNTIME_INFO)["table"]
    before = int(table["msgPutTotalTodayNow"])
    for name in ("putTps", "getTransferredTps", "getTransferedTps", "getTotalTps"):
        assert all(float(each) >= 0 for each in table[name].split())
        assert len(table[name].split()) == 3
    for name in NUMBERS:
        assert float(table[name]) >= 0
    assert (table["brokerActive"], table["brokerVersion"]) == ("true", "479")
    send(client, topic, b"one more")
    table = asked(client, RequestCode.GET_BROKER_RUNTIME_INFO)["table"]
    assert int(table["msgPutTotalTodayNow"]) == before + 1

    options = bytes(client.call(RequestCode.GET_BROKER_CONFIG, {}).body).decode()
    shown = dict(line.split("=", 1) for line in options.splitlines())
    assert (shown["brokerName"], shown["brokerClusterName"]) == ("raymq-0", "served")
    assert shown["message_index"] == "true"
    assert f"{shown['brokerIP1']}:{shown['listenPort']}" == str(server.addresses[0])


def test_settings_that_a_name_server_keeps_are_answered_politely(client: RemotingClient) -> None:
    order = {"namespace": "ORDER_TOPIC_CONFIG", "key": "t"}
    assert client.call(RequestCode.GET_KV_CONFIG, order).code == ResponseCode.QUERY_NOT_FOUND
    listed = client.call(RequestCode.GET_KVLIST_BY_NAMESPACE, order)
    assert listed.code == ResponseCode.QUERY_NOT_FOUND
    # `updateTopic -o true` says which queues an ordered topic has, as the route does.
    asked(client, RequestCode.PUT_KV_CONFIG, **order, value="raymq-0:2")
    # Tools delete it together with the topic.
    asked(client, RequestCode.DELETE_KV_CONFIG, **order)
    other = client.call(RequestCode.PUT_KV_CONFIG, {**order, "namespace": "n", "value": "v"})
    assert other.code == ResponseCode.SYSTEM_ERROR

    broker = {"brokerName": "raymq-0"}
    wiped = client.call(RequestCode.WIPE_WRITE_PERM_OF_BROKER, broker)
    assert wiped.fields == {"wipeTopicCount": "0"}
    added = client.call(RequestCode.ADD_WRITE_PERM_OF_BROKER, broker)
    assert added.fields == {"addTopicCount": "0"}
    assert client.call(RequestCode.QUERY_DATA_VERSION, {}).fields == {"changed": "false"}
    stats = {"statsName": "TOPIC_PUT_NUMS", "statsKey": "t"}
    missing = client.call(RequestCode.VIEW_BROKER_STATS_DATA, stats)
    assert missing.code == ResponseCode.SYSTEM_ERROR
    assert "TOPIC_PUT_NUMS" in (missing.remark or "")


def test_what_is_left_out_names_the_page_that_says_so(client: RemotingClient) -> None:
    for code in (RequestCode.UPDATE_BROKER_CONFIG, RequestCode.RECALL_MESSAGE):
        found = client.call(code, {})
        assert found.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        assert "docs/guides/from-rocketmq.md" in (found.remark or "")


def test_slow_calls_of_tools_leave_room_for_those_of_clients(shard: ServedShard) -> None:
    async def call_while_tools_wait() -> int:
        clients = shards.Shards(shard.cluster, asyncio.get_running_loop())
        tools, answered = clients.for_tools(), threading.Event()
        waiting = [asyncio.ensure_future(tools.in_thread(answered.wait)) for _ in range(64)]
        found = await asyncio.wait_for(clients.in_thread(lambda: 7), 20)
        answered.set()
        await asyncio.gather(*waiting)
        clients.close()
        return found

    assert asyncio.run(call_while_tools_wait()) == 7


def test_the_table_says_what_runs_the_requests_of_tools(server: RocketMQServer) -> None:
    rows = {entry.code: entry.executor.name for entry in server.table}
    assert rows[RequestCode.GET_CONSUME_STATS] == "admin"
    assert rows[RequestCode.QUERY_MESSAGE] == "admin"
    assert rows[RequestCode.GET_CONSUMER_CONNECTION_LIST] == "memory"
    assert rows[RequestCode.GET_CONSUMER_RUNNING_INFO] == "relay"
    assert rows[RequestCode.PULL_MESSAGE] == "pull"
    assert ADMIN.requests_max < CALL.requests_max


# --- groups ---------------------------------------------------------------------------------------


def test_the_progress_of_a_group_is_shown_by_queue(client: RemotingClient, topic: str) -> None:
    for _ in range(3):
        send(client, topic, b"x")
    queue = {"consumerGroup": "progress", "topic": topic, "queueId": 0}
    client.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**queue, "commitOffset": 2})
    for named in (topic, ""):
        found = asked(client, RequestCode.GET_CONSUME_STATS, consumerGroup="progress", topic=named)
        queues = by_queue(found["offsetTable"])
        assert (queues[0]["brokerOffset"], queues[0]["consumerOffset"]) == (3, 2)
        assert queues[0]["lastTimestamp"] > 1_700_000_000_000
        assert (queues[1]["brokerOffset"], queues[1]["consumerOffset"]) == (0, 0)
        assert queues[1]["lastTimestamp"] == 0
    found = asked(client, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic=topic)
    assert "progress" in found["groupList"]
    found = asked(client, RequestCode.QUERY_TOPICS_BY_CONSUMER, group="progress")
    assert found["topicList"] == [topic]
    # Tools would show that it lags by 0: they find the brokers of a group by its retry topic.
    found = asked(client, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert "progress" not in found["subscriptionGroupTable"]
    beat(client, "c1", "progress", topic)
    found = asked(client, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert found["subscriptionGroupTable"]["progress"]["retryMaxTimes"] == 16


def test_the_clients_of_a_group_are_listed_while_they_are_connected(
    client: RemotingClient, topic: str
) -> None:
    group = f"g{topic}"
    missing = client.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group})
    assert missing.code == ResponseCode.CONSUMER_NOT_ONLINE
    beat(client, "c1", group, topic)
    found = asked(client, RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup=group)
    assert [each["clientId"] for each in found["connectionSet"]] == ["c1"]
    assert found["subscriptionTable"][topic]["subString"] == "*"
    assert (found["consumeType"], found["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
    found = asked(client, RequestCode.GET_PRODUCER_CONNECTION_LIST, producerGroup="p")
    assert "c1" in {each["clientId"] for each in found["connectionSet"]}
    (producer,) = asked(client, RequestCode.GET_ALL_PRODUCER_INFO)["data"]["p"]
    assert (producer["clientId"], producer["language"]) == ("c1", "PYTHON")
    assert producer["lastUpdateTimestamp"] > 1_700_000_000_000
    found = asked(client, RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, group=group, topic=topic)
    assert found["subscriptionData"]["subString"] == "*"


def test_groups_are_made_listed_and_deleted(client: RemotingClient, topic: str) -> None:
    group = f"made{topic}"

    def make(**more: object) -> RemotingCommand:
        body = json.dumps({"groupName": group, "retryMaxTimes": 16, **more}).encode()
        return client.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)

    def names() -> set[str]:
        found = asked(client, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
        return set(found["subscriptionGroupTable"])

    missing = client.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": group})
    assert missing.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    # What cannot be kept is refused.
    assert "retryMaxTimes" in (make(retryMaxTimes=3).remark or "")
    assert "consumeEnable" in (make(consumeEnable=False).remark or "")
    assert group not in names()
    for _ in range(2):
        assert make().code == ResponseCode.SUCCESS
    assert group in names()
    assert asked(client, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, group=group)["consumeEnable"]

    queue = {"consumerGroup": group, "topic": topic, "queueId": 0}
    client.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**queue, "commitOffset": 0})
    # Without the offsets nothing is deleted. `deleteSubGroup` deletes the topics itself.
    for clean in (False, True, True):
        asked(client, RequestCode.DELETE_SUBSCRIPTIONGROUP, groupName=group, cleanOffset=clean)
        found = asked(client, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic=topic)
        assert (group in found["groupList"]) is not clean
    for name in (f"%RETRY%{group}", f"%DLQ%{group}"):
        asked(client, RequestCode.DELETE_TOPIC_IN_BROKER, topic=name)
    assert group not in names()


# --- what tools ask the clients -------------------------------------------------------------------


def test_tools_ask_a_consumer_through_the_server(
    client: RemotingClient, server: RocketMQServer, topic: str
) -> None:
    group = f"g{topic}"
    consumer = {"consumerGroup": group, "clientId": "c1", "jstackEnable": "true"}
    missing = client.call(RequestCode.GET_CONSUMER_RUNNING_INFO, consumer)
    assert missing.code == ResponseCode.SYSTEM_ERROR
    assert "c1" in (missing.remark or "")

    with RemotingClient(server.addresses[0]) as other:
        beat(other, "c1", group, topic)
        opaque = client.send(RequestCode.GET_CONSUMER_RUNNING_INFO, {**consumer, "AccessKey": "k"})
        relayed = other.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
        assert relayed.fields == consumer
        other.reply(relayed, ResponseCode.SUCCESS, b'{"properties":{}}')
        assert bytes(client.answer(opaque).body) == b'{"properties":{}}'

        message_id = send(client, topic, b"handle me", queue=1)["msgId"]
        asked_for = {**consumer, "topic": topic, "msgId": message_id}
        opaque = client.send(RequestCode.CONSUME_MESSAGE_DIRECTLY, asked_for)
        relayed = other.request(RequestCode.CONSUME_MESSAGE_DIRECTLY)
        assert bodies(records_of(relayed.body)) == [b"handle me"]
        assert relayed.fields["brokerName"] == "raymq-0"
        other.reply(relayed, ResponseCode.SYSTEM_ERROR, remark="not now")
        found = client.answer(opaque)
        assert (found.code, found.remark) == (ResponseCode.SYSTEM_ERROR, "not now")

        status = {"topic": topic, "group": group, "clientAddr": ""}
        opaque = client.send(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, status)
        relayed = other.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT)
        key = '{"brokerName":"raymq-0","queueId":1,"topic":"t"}'
        body = f'{{"messageQueueTable":{{{key}:7}}}}'.encode()
        other.reply(relayed, ResponseCode.SUCCESS, body)
        table = read_json(client.answer(opaque).body)["consumerTable"]
        assert by_queue(table["c1"]) == {1: 7}
        for damaged in (b"", b"[]", b'{"messageQueueTable":{"x":1}}', b"{"):
            opaque = client.send(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, status)
            relayed = other.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT)
            other.reply(relayed, ResponseCode.SUCCESS, damaged)
            assert read_json(client.answer(opaque).body) == {"consumerTable": {}}

        # The answer cannot come any more.
        opaque = client.send(RequestCode.GET_CONSUMER_RUNNING_INFO, consumer)
        other.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    gone = client.answer(opaque)
    assert (gone.code, "has gone" in (gone.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)


def test_a_reset_sets_offsets_and_notifies_the_consumers(
    client: RemotingClient, topic: str
) -> None:
    group = f"g{topic}"
    for _ in range(4):
        send(client, topic, b"x")
    beat(client, "c1", group, topic)
    queue = {"consumerGroup": group, "topic": topic, "queueId": 0}
    client.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**queue, "commitOffset": 3})

    fields = {"topic": topic, "group": group, "timestamp": 1_000, "isForce": "true"}
    found = asked(client, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, **fields)
    assert by_queue(found["offsetTable"]) == {0: 0, 1: 0}
    assert client.call(RequestCode.QUERY_CONSUMER_OFFSET, queue).fields["offset"] == "0"
    pushed = [
        each for each in client.pushed if each.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET
    ]
    assert [each.fields["group"] for each in pushed] == [group]
    assert by_queue(read_json(pushed[0].body)["offsetTable"]) == {0: 0, 1: 0}

    # Without force a group that is before the new place stays where it is.
    fields = {"topic": topic, "group": group, "timestamp": -1, "isForce": "false"}
    found = asked(client, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, **fields)
    assert by_queue(found["offsetTable"])[0] == 0

    # One queue, to an offset: `resetOffsetByTime -b BROKER -q 0 -o 2`.
    fields = {"topic": topic, "group": group, "timestamp": 0, "queueId": 0, "offset": 2}
    found = asked(client, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, **fields)
    assert by_queue(found["offsetTable"]) == {0: 2}
    assert client.call(RequestCode.QUERY_CONSUMER_OFFSET, queue).fields["offset"] == "2"
    fields = {"topic": topic, "group": group, "timestamp": -7, "isForce": "true"}
    refused = client.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    assert refused.code == ResponseCode.SYSTEM_ERROR


# --- several brokers ------------------------------------------------------------------------------


def test_each_broker_answers_for_its_own_queues(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        ServedCluster(tmp_path_factory.mktemp("wide")) as wide,
        RocketMQServer(wide.cluster, access="open") as server,
        RemotingClient(server.addresses[0]) as first,
        RemotingClient(server.addresses[1]) as second,
        RemotingClient(f"127.0.0.1:{server.listen(0)}") as names,
    ):
        fields = {"topic": "wide", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
        for broker in (first, second):
            asked(broker, RequestCode.UPDATE_AND_CREATE_TOPIC, **fields)
        assert wide.cluster.topics()["wide"]["queues"] == 4
        brokers = asked(names, RequestCode.GET_BROKER_CLUSTER_INFO)
        assert brokers["clusterAddrTable"] == {"served": ["raymq-0", "raymq-1"]}
        for broker in (first, second):
            config = asked(broker, RequestCode.GET_TOPIC_CONFIG, topic="wide")
            assert config["readQueueNums"] == 2
        # The port for all brokers does not guess which one is meant.
        unnamed = names.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "wide"})
        assert unnamed.code == ResponseCode.SYSTEM_ERROR

        # Queue 1 of raymq-1 is queue 3 of the topic.
        message_id = send(second, "wide", b"on the second", queue=1, KEYS="k")["msgId"]
        assert wide.cluster.describe_topic("wide")["queues"][3]["max_offset"] == 1
        found = asked(second, RequestCode.GET_TOPIC_STATS_INFO, topic="wide")["offsetTable"]
        assert {number: each["maxOffset"] for number, each in by_queue(found).items()} == {
            0: 0,
            1: 1,
        }
        query = {
            "topic": "wide",
            "key": "k",
            "maxNum": 9,
            "beginTimestamp": 0,
            "endTimestamp": 2**62,
        }
        assert first.call(RequestCode.QUERY_MESSAGE, query).code == ResponseCode.QUERY_NOT_FOUND
        (record,) = records_of(second.call(RequestCode.QUERY_MESSAGE, query).body)
        assert struct.unpack_from(">i", record, fmt.QUEUE_ID_AT) == (1,)
        assert message_id_of(record) == message_id

        commit = {"consumerGroup": "g", "topic": "wide", "queueId": 1, "commitOffset": 1}
        second.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
        for broker, offsets in ((first, {}), (second, {0: 0, 1: 1})):
            found = asked(broker, RequestCode.GET_CONSUME_STATS, consumerGroup="g", topic="wide")
            rows = by_queue(found["offsetTable"])
            assert {number: each["consumerOffset"] for number, each in rows.items()} == offsets
            group = {"groupName": "g", "retryMaxTimes": 16}
            asked(broker, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, json=group)
            listed = asked(broker, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
            assert "g" in listed["subscriptionGroupTable"]

        for broker in (first, second):
            asked(broker, RequestCode.DELETE_SUBSCRIPTIONGROUP, groupName="g", cleanOffset=True)
            asked(broker, RequestCode.DELETE_TOPIC_IN_BROKER, topic="wide")
        assert "wide" not in wide.cluster.topics()
        assert wide.cluster.groups() == {}


def test_a_topic_that_was_made_or_deleted_on_some_shards_only_is_completed(tmp_path) -> None:
    with (
        ServedCluster(tmp_path) as wide,
        RocketMQServer(wide.cluster, access="open") as server,
        RemotingClient(server.addresses[1]) as client,
    ):
        first, second = (partial(wide.cluster.call, shard) for shard in (0, 1))
        # What is left of a request in whose middle the second shard, or the server, has ended.
        first("create_topic", {"name": "half", "queues": 4, "shards": [0, 1]})
        made = {"topic": "half", "perm": 6}
        for count in (2, 3):
            counts = {"readQueueNums": count, "writeQueueNums": count}
            asked(client, RequestCode.UPDATE_AND_CREATE_TOPIC, **made, **counts)
            for each in (first, second):
                assert each("topics", {})["half"]["queues"] == 2 * count

        first("delete_topic", {"name": "half"})
        assert "half" in second("topics", {})
        asked(client, RequestCode.DELETE_TOPIC_IN_BROKER, topic="half")
        assert "half" not in second("topics", {})
        # Another broker is asked, too.
        asked(client, RequestCode.DELETE_TOPIC_IN_BROKER, topic="half")
        asked(client, RequestCode.DELETE_TOPIC_IN_BROKER, topic="never")
        asked(
            client, RequestCode.UPDATE_AND_CREATE_TOPIC, **made, readQueueNums=1, writeQueueNums=1
        )
        assert second("topics", {})["half"]["queues"] == 2


def test_a_topic_takes_nothing_from_the_rest_of_a_deleted_one(tmp_path) -> None:
    with (
        ServedCluster(tmp_path) as wide,
        RocketMQServer(wide.cluster, access="open") as server,
        RemotingClient(server.addresses[0]) as client,
    ):
        first, second = (partial(wide.cluster.call, shard) for shard in (0, 1))
        made = {"topic": "rest", "perm": 6}
        asked(
            client, RequestCode.UPDATE_AND_CREATE_TOPIC, **made, readQueueNums=8, writeQueueNums=8
        )
        first("delete_topic", {"name": "rest"})
        asked(
            client, RequestCode.UPDATE_AND_CREATE_TOPIC, **made, readQueueNums=1, writeQueueNums=1
        )
        for each in (first, second):
            assert each("topics", {})["rest"]["queues"] == 2


# --- messages -------------------------------------------------------------------------------------


def test_messages_are_found_by_key_and_by_the_id_of_their_client(
    client: RemotingClient, topic: str
) -> None:
    for number in range(3):
        send(client, topic, b"%d" % number, KEYS=f"k{number % 2}", UNIQ_KEY=f"u{number}-{topic}")
    fields = {"topic": topic, "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 2**62}
    found = client.call(RequestCode.QUERY_MESSAGE, {**fields, "key": "k0"})
    assert sorted(bodies(records_of(found.body))) == [b"0", b"2"]
    assert int(found.fields["indexLastUpdateTimestamp"]) > 1_700_000_000_000
    unique = {**fields, "key": f"u1-{topic}", "_UNIQUE_KEY_QUERY": "true"}
    assert bodies(records_of(client.call(RequestCode.QUERY_MESSAGE, unique).body)) == [b"1"]
    missing = client.call(RequestCode.QUERY_MESSAGE, {**fields, "key": "none"})
    assert missing.code == ResponseCode.QUERY_NOT_FOUND
    # Of what tools since 5.4 ask, that which cannot be answered is refused.
    known = client.call(RequestCode.QUERY_MESSAGE, {**fields, "key": "k0", "indexType": "K"})
    assert len(records_of(known.body)) == 2
    for more in ({"indexType": "T"}, {"lastKey": "k0"}):
        refused = client.call(RequestCode.QUERY_MESSAGE, {**fields, "key": "k0", **more})
        assert refused.code == ResponseCode.SYSTEM_ERROR


def test_a_message_is_shown_by_its_place_in_the_log(client: RemotingClient, topic: str) -> None:
    send_id = send(client, topic, b"here")["msgId"]
    at = int(send_id[16:], 16)
    found = client.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": at})
    assert bodies(records_of(found.body)) == [b"here"]
    # Tools dial the store host of a record.
    assert message_id_of(bytes(found.body)) == send_id
    beside = client.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": at + 1})
    assert beside.code == ResponseCode.SYSTEM_ERROR
    assert "no message begins" in (beside.remark or "")


def test_a_message_without_an_id_of_its_client_is_found_by_its_place(
    client: RemotingClient, shard: ServedShard, topic: str
) -> None:
    with shard.cluster.producer() as producer:
        offset = producer.send(topic, b"ours", queue_id=1).result(30).offset
    stored_id = shard.cluster.message(topic, 1, offset).message_id
    shown = client.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": int(stored_id[16:], 16)})
    shown_id = message_id_of(bytes(shown.body))
    assert shown_id != stored_id
    fields = {"topic": topic, "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 2**62}
    unique = {**fields, "_UNIQUE_KEY_QUERY": "true"}
    for message_id in (stored_id, shown_id):
        found = client.call(RequestCode.QUERY_MESSAGE, {**unique, "key": message_id})
        assert found.code == ResponseCode.SUCCESS, found.remark
        # A client compares the id of what it gets.
        assert message_id_of(bytes(found.body)) == message_id
        assert bodies(records_of(found.body)) == [b"ours"]

    shard.cluster.create_topic(f"{topic}-too", queues=1)
    place, host = stored_id[16:], stored_id[:16]
    for wrong in (
        {**unique, "key": f"7F000002{host[8:]}{place}"},
        {**unique, "key": f"{host}{int(place, 16) + 1:016X}"},
        {**unique, "key": f"{host}{'F' * 16}"},
        {**unique, "key": "no id"},
        {**unique, "topic": f"{topic}-too", "key": stored_id},
        {**fields, "key": stored_id},
    ):
        assert client.call(RequestCode.QUERY_MESSAGE, wrong).code == ResponseCode.QUERY_NOT_FOUND


class ShardsThatSkip:
    """Shards of a compacted topic: a fetch gives the next record that is left."""

    def __init__(self, record: bytes) -> None:
        self._record = record

    async def fetch(self, shard: int, request: FetchRequest) -> list[FetchSlice]:
        return [FetchSlice(0, 0, 2, 0, 2, pa.array([self._record], pa.binary()), None)]


def test_another_record_is_not_taken_for_one_that_was_compacted_away(
    client: RemotingClient, topic: str
) -> None:
    for body in (b"gone", b"left"):
        send(client, topic, body)
    (left,) = records_of(pull(client, topic, 1).body)
    skipping = cast(shards.Shards, ShardsThatSkip(left))
    for offset, expected in ((0, None), (1, left)):
        assert asyncio.run(read_record(skipping, 0, topic, 0, offset)) == expected


HOSTILE = ("", "\0", "%RETRY%", "a b", "x" * 300, "-1", str(2**63), "ffff" * 8, '{"a":1}')
NAMES = (
    "topic",
    "group",
    "consumerGroup",
    "producerGroup",
    "groupName",
    "clientId",
    "clientAddr",
    "msgId",
    "key",
    "offset",
    "timestamp",
    "queueId",
    "maxNum",
    "beginTimestamp",
    "endTimestamp",
    "readQueueNums",
    "writeQueueNums",
    "attributes",
    "namespace",
    "bname",
)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"groupName":7}'])
def test_a_malformed_request_of_tools_leads_to_no_fault(
    client: RemotingClient, server: RocketMQServer, topic: str, body: bytes
) -> None:
    codes = [entry.code for entry in server.table if entry.executor.name not in ("pull", "send")]
    rows: list[dict[str, object]] = [{}, {"topic": topic, "group": "g", "consumerGroup": "g"}]
    rows += [dict.fromkeys(NAMES, text) for text in HOSTILE]
    rows += [{**dict.fromkeys(NAMES, "1"), name: text} for name in NAMES for text in HOSTILE[:4]]
    for code in codes:
        for opaque in [client.send(code, row, body) for row in rows]:
            found = client.answer(opaque)
            assert "fault of the server" not in (found.remark or ""), (code, found.remark)


def test_a_request_of_tools_without_its_fields_is_refused(client: RemotingClient) -> None:
    for code in (
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.QUERY_MESSAGE,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
    ):
        found = client.call(code, {})
        assert found.code == ResponseCode.SYSTEM_ERROR, (code, found.code)
