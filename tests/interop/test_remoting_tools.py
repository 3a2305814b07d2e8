"""RocketMQ's own tools, unmodified, in front of two shards: what they print is compared with facts of the stores."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.store.base.errors import Rejected
from tests.support.oracle import JAVA_OPTIONS, SOURCES, Program
from tests.support.served_shard import ServedCluster
from tests.support.waiting import until

pytestmark = pytest.mark.thorough

TOPIC, GROUP = "orders", "billing"
#: where tools write the bodies of messages that they show
BODY_PATH = re.compile(r"Message Body Path: +(\S+)")


class Tools:
    """One process of Java that runs RocketMQ's tools."""

    def __init__(self, program: Program, home: Path, name_server: str, token: str) -> None:
        (home / "conf").mkdir(parents=True)
        credentials = f"accessKey: raymq\nsecretKey: {token}\n"
        (home / "conf" / "tools.yml").write_text(credentials, encoding="utf-8")
        self._process = subprocess.Popen(
            [
                program.java,
                *JAVA_OPTIONS,
                f"-Duser.home={home}",
                f"-Drocketmq.home.dir={home}",
                f"-Drocketmq.namesrv.addr={name_server}",
                f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
                f"-Draymq.secret={token}",
                *("-cp", program.class_path, "AdminTools", name_server),
            ],
            # A command writes what a consumer says into a file here.
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: object) -> Any:
        """One line, and what is found. Raises: AssertionError with what Java says."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        found = json.loads(process.stdout.readline())
        assert "failed" not in found, f"{words}: {found['failed']}"
        return found.get("found")

    def mqadmin(self, *commands: str) -> list[str]:
        """What commands print, which run at the same time. Raises: AssertionError for an exception."""
        found = self.ask("mqadmin", *(each.split() for each in commands))
        for command, answer in zip(commands, found, strict=True):
            for path in BODY_PATH.findall(answer["out"]):
                Path(path).unlink(missing_ok=True)
            assert "Exception" not in answer["out"], f"{command}: {answer['out']}"
        return [answer["out"] for answer in found]

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def served(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("tools")
    with (
        ServedCluster(place / "stores") as wide,
        RocketMQServer(wide.cluster) as server,
        contextlib.closing(
            Tools(program, place / "home", f"127.0.0.1:{server.listen(0)}", wide.cluster.token)
        ) as tools,
    ):
        brokers = [str(server.addresses[shard]) for shard in range(2)]
        for shard, each in enumerate(wide.shards):
            # Ids of messages name the server: with them tools dial it.
            each.host.set_store_host("127.0.0.1", server.addresses[shard].port)
        yield SimpleNamespace(tools=tools, cluster=wide.cluster, brokers=brokers)


def pause() -> None:
    """Wait for what happens elsewhere."""
    threading.Event().wait(0.05)


def rows(text: str) -> list[list[str]]:
    """The words of the lines of a table, without its title."""
    return [line.split() for line in text.splitlines() if line.strip() and line[0] not in "#\n"]


def fact(text: str, name: str) -> str:
    """The value of a line `name: value`."""
    found = re.search(rf"^{re.escape(name)} *: *(.*?)\s*$", text, re.MULTILINE)
    assert found, f"no {name} in {text}"
    return found[1]


def _committed(cluster: Any, group: str, topic: str) -> int:
    """The offsets of a group, all together."""
    asked = {"group": group, "topic": topic}
    return sum(sum(cluster.call(shard, "offsets", asked).values()) for shard in range(2))


def ends(served: Any, topic: str = TOPIC) -> dict[tuple[str, int], int]:
    """(broker, number there) -> the end of a queue, as the stores have it."""
    queues = served.cluster.describe_topic(topic)["queues"]
    return {
        (f"raymq-{each['shard']}", each["queue_id"] // 2): each["max_offset"] for each in queues
    }


def test_the_commands_of_mqadmin_show_and_change_what_the_stores_have(served: Any) -> None:
    tools, cluster, (first, second) = served.tools, served.cluster, served.brokers
    (made,) = tools.mqadmin(f"updateTopic -c served -t {TOPIC} -r 2 -w 2 -o true")
    assert made.count("success.") == 2
    assert cluster.topics()[TOPIC] == {"queues": 4, "shards": [0, 1]}

    sent, anywhere = tools.mqadmin(
        f"sendMessage -t {TOPIC} -p chosen -k key -c tag -b raymq-1 -i 1",
        f"sendMessage -t {TOPIC} -p somewhere -k key",
    )
    assert rows(sent)[0][:3] == ["raymq-1", "1", "SEND_OK"]
    broker, number, status, _ = rows(anywhere)[0]
    assert status == "SEND_OK"
    place = ("raymq-1", 1)
    assert ends(served)[place] >= 1
    assert sum(ends(served).values()) == 2
    assert ends(served)[broker, int(number)] >= 1

    listed, topics, route, status_of, cluster_list, totals, broker_status = tools.mqadmin(
        "topicList",
        "topicList -c",
        f"topicRoute -t {TOPIC} -l",
        f"topicStatus -t {TOPIC}",
        "clusterList",
        "clusterList -m",
        f"brokerStatus -b {second}",
    )
    assert set(listed.split()) >= {TOPIC}
    assert [row for row in rows(topics) if row[1] == TOPIC] == [["served", TOPIC]]
    routes = [row for row in rows(route) if row[0] == "served"]
    assert routes == [
        ["served", f"raymq-{shard}", f"{{0={address}}}", "2", "2", "6"]
        for shard, address in enumerate((first, second))
    ]
    shown = {
        (row[0], int(row[1])): int(row[3]) for row in rows(status_of) if row[0].startswith("raymq-")
    }
    assert shown == ends(served)
    brokers = [(row[0], row[1], row[3], row[-1]) for row in rows(cluster_list)]
    assert brokers == [
        ("served", "raymq-0", first, "true"),
        ("served", "raymq-1", second, "true"),
    ]
    puts = {row[1]: int(row[4]) for row in rows(totals)}
    assert sum(puts.values()) == 2
    counted = cluster.call(1, "status", {})["store_stats"]["puts"]
    assert puts["raymq-1"] == counted == int(fact(broker_status, "msgPutTotalTodayNow"))
    assert fact(broker_status, "brokerVersionDesc").startswith("RayMQ_")

    tools.ask("consume", TOPIC, GROUP, "one")
    until(lambda: set(tools.ask("received")) == {"chosen", "somewhere"}, pause)
    until(lambda: _committed(cluster, GROUP, TOPIC) == 2, lambda: tools.ask("received"))
    groups, progress, who_reads, connected, running = tools.mqadmin(
        "consumerProgress",
        f"consumerProgress -g {GROUP}",
        f"consumerProgress -g {GROUP} -t {TOPIC} -s true",
        f"consumerConnection -g {GROUP}",
        f"consumerStatus -g {GROUP}",
    )
    (row,) = [row for row in rows(groups) if row[0] == GROUP]
    assert (row[1], row[3:]) == ("1", ["PUSH", "CLUSTERING", "0", "0"])
    offsets = {
        (row[1], int(row[2])): (int(row[3]), int(row[4]))
        for row in rows(progress)
        if row[0] == TOPIC
    }
    assert offsets == {queue: (end, end) for queue, end in ends(served).items()}
    assert fact(progress, "Consume Diff Total") == "0"
    # The last column but four is the client, as it says itself.
    assert "N/A" not in {row[5] for row in rows(who_reads) if row[0] == TOPIC}
    assert "@one" in connected
    assert "JAVA" in connected
    assert [row for row in rows(connected) if row[0] == TOPIC] == [[TOPIC, "*"]]
    assert fact(connected, "MessageModel") == "CLUSTERING"
    assert "@one" in running
    assert "Rebalance OK" in running


def test_the_commands_of_mqadmin_find_messages(served: Any) -> None:
    tools = served.tools
    tools.mqadmin("updateTopic -c served -t found -r 2 -w 2")
    sent, _ = tools.mqadmin(
        "sendMessage -t found -p the-body -k thekey -c tag -b raymq-1 -i 1",
        "sendMessage -t found -p other -k otherkey",
    )
    client_id = rows(sent)[0][3]
    by_key, by_client_id, by_offset, printed = tools.mqadmin(
        "queryMsgByKey -t found -k thekey",
        f"queryMsgByUniqueKey -t found -i {client_id}",
        "queryMsgByOffset -t found -b raymq-1 -i 1 -o 0 -f UTF-8",
        "printMsg -t found",
    )
    # Newer tools print another column.
    assert [row[:3] for row in rows(by_key)] == [[client_id, "1", "0"]]
    for shown in (by_client_id, by_offset):
        assert (fact(shown, "Topic"), fact(shown, "Keys")) == ("found", "[thekey]")
        assert (fact(shown, "Queue ID"), fact(shown, "Queue Offset")) == ("1", "0")
        assert fact(shown, "Store Host") == served.brokers[1]
    assert fact(by_offset, "Message Body") == "the-body"
    assert sorted(re.findall(r"BODY: (\S+)", printed)) == ["other", "the-body"]

    # The id with the place in the log, and the one of the client.
    offset_id = fact(by_offset, "OffsetID")
    for shown in tools.mqadmin(
        f"queryMsgById -t found -i {offset_id} -f UTF-8",
        f"queryMsgById -t found -i {client_id} -f UTF-8",
    ):
        assert (fact(shown, "OffsetID"), fact(shown, "Message Body")) == (offset_id, "the-body")
    at = {"physical_offset": int(offset_id[16:], 16)}
    place = served.cluster.call(1, "place_of_record", at)
    assert place == {"topic": "found", "queue_id": 3, "offset": 0}


def test_the_commands_of_mqadmin_reset_offsets_and_delete(served: Any) -> None:
    tools, cluster, (_, second) = served.tools, served.cluster, served.brokers
    tools.mqadmin("updateTopic -c served -t gone -r 2 -w 2")
    tools.mqadmin(*["sendMessage -t gone -p body -b raymq-1 -i 1"] * 2)

    def offset() -> int:
        found = cluster.call(1, "offsets", {"group": "idle", "topic": "gone"})
        return int(found["3"])

    for to, expected in (("now", 2), ("0", 0)):
        (reset,) = tools.mqadmin(f"resetOffsetByTime -g idle -t gone -s {to}")
        assert ["raymq-1", "1", str(expected)] in rows(reset)
        assert offset() == expected
    (reset,) = tools.mqadmin(f"resetOffsetByTime -g idle -t gone -s 0 -b {second} -q 1 -o 1")
    assert "reset consumer offset to 1" in reset
    assert offset() == 1

    # One after the other: commands of one call run at the same time.
    (made,) = tools.mqadmin("updateSubGroup -c served -g idle")
    (shown,) = tools.mqadmin("getConsumerConfig -g idle")
    assert made.count("success.") == 2
    assert shown.count("idle") == 2
    (deleted,) = tools.mqadmin("deleteSubGroup -c served -g idle -r true")
    assert deleted.count("success") == 2
    assert "idle" not in cluster.groups()
    (deleted,) = tools.mqadmin("deleteTopic -c served -t gone")
    assert deleted.count("success") == 2
    assert not {"gone", "%RETRY%idle"} & cluster.topics().keys()


def test_consumers_that_run_go_on_where_raymq_has_set_their_group(served: Any) -> None:
    tools, cluster, name = served.tools, served.cluster, "setback"
    cluster.create_topic(name, queues=2)
    with cluster.producer() as producer:
        for number in range(10):
            producer.send(name, b"%s-%d" % (name.encode(), number), queue_id=number % 2).result(30)
    tools.ask("consume", name, name, f"{name}-consumer")

    def received() -> list[int]:
        # It also lets consumers commit where they are.
        return [count for body, count in tools.ask("received").items() if body.startswith(name)]

    until(lambda: received() == [1] * 10, pause)
    until(lambda: len(cluster.describe_group(name)["clients"]) == 1, pause)
    with pytest.raises(Rejected, match="1 client"):
        cluster.reset_group(name, 2)
    cluster.reset_group(name, 2, force=True)
    until(lambda: sorted(received()) == [1] * 4 + [2] * 6, pause)
    until(lambda: _committed(cluster, name, name) == 10, pause)


def test_the_calls_of_the_dashboard_show_and_change_what_the_stores_have(served: Any) -> None:
    tools, cluster, brokers = served.tools, served.cluster, served.brokers
    first, second = brokers

    def call(name: str, *words: object) -> Any:
        return tools.ask("dashboard", name, *map(str, words))

    def queue(topic: str, shard: int, number: int) -> str:
        return f"{topic}/raymq-{shard}/{number}"

    # The pages of the cluster, and of topics.
    shown = call("brokers")
    assert shown["clusters"] == {"served": ["raymq-0", "raymq-1"]}
    assert shown["addresses"] == {"raymq-0": first, "raymq-1": second}
    for broker in brokers:
        call("createTopic", broker, "viewed")
    assert cluster.topics()["viewed"]["queues"] == 4
    assert set(call("topics")) == set(cluster.topics())
    assert call("systemTopics") == []
    assert call("clustersOfTopic", "viewed") == ["served"]
    for broker in brokers:
        assert call("topicConfigs", broker)["viewed"] == 2
        assert call("topicConfig", broker, "viewed") == {"viewed": 2}
    assert call("route", "viewed") == 2
    tools.mqadmin(
        "sendMessage -t viewed -p one -k first -b raymq-1 -i 1",
        "sendMessage -t viewed -p two -k second -b raymq-0 -i 0",
    )
    stats = call("topicStats", "viewed")
    assert {each: values[:2] for each, values in stats.items()} == {
        queue("viewed", 0, 0): [0, 1],
        queue("viewed", 0, 1): [0, 0],
        queue("viewed", 1, 0): [0, 0],
        queue("viewed", 1, 1): [0, 1],
    }
    assert call("earliest", "viewed", "raymq-1", 1) == stats[queue("viewed", 1, 1)][2]
    assert call("earliest", "viewed", "raymq-1", 0) == -1
    runtime = call("runtime", second)
    assert (
        int(runtime["msgPutTotalTodayNow"]) == cluster.call(1, "status", {})["store_stats"]["puts"]
    )
    assert len(runtime["getTotalTps"].split()) == 3
    assert call("brokerConfig", second)["brokerName"] == "raymq-1"

    # The page of messages.
    assert call("byKey", "viewed", "first") == ["one"]
    assert sorted(call("byTopic", "viewed")) == ["one", "two"]
    (by_offset,) = tools.mqadmin("queryMsgByOffset -t viewed -b raymq-1 -i 1 -o 0")
    message_id = fact(by_offset, "OffsetID")
    assert call("byId", "viewed", message_id) == "one"

    # The page of consumers.
    tools.ask("consume", "viewed", "watched", "watcher")
    until(lambda: {"one", "two"} <= set(tools.ask("received")), pause)
    until(lambda: _committed(cluster, "watched", "viewed") == 2, lambda: tools.ask("received"))
    for broker in brokers:
        assert "watched" in call("groups", broker)
        assert call("groupConfig", broker, "watched") == 16
    assert "watched" in call("groupsOfTopic", "viewed")
    assert "viewed" in call("topicsOfGroup", "watched")
    everything = {
        queue("viewed", shard, number): [end, end]
        for (shard, number), end in {(0, 0): 1, (0, 1): 0, (1, 0): 0, (1, 1): 1}.items()
    }
    assert call("consumeStats", "watched", "viewed") == everything
    assert everything.items() <= call("consumeStats", "watched").items()
    of_broker = call("consumeStatsOfBroker", second, "watched")
    assert of_broker[queue("viewed", 1, 1)] == [1, 1]
    assert queue("viewed", 0, 0) not in of_broker
    connected = call("connections", "watched")
    (client,) = connected.pop("clients")
    client_id = client.removesuffix(" JAVA")
    assert client_id.endswith("@watcher")
    assert connected == {
        "from": "CONSUME_FROM_FIRST_OFFSET",
        "model": "CLUSTERING",
        "topics": ["%RETRY%watched", "viewed"],
        "type": "CONSUME_PASSIVELY",
    }
    running = call("runningInfo", "watched", client_id, "true")
    assert set(everything) <= set(running["queues"])
    assert (running["type"], running["hasThreads"]) == ("CONSUME_PASSIVELY", True)
    status = call("consumeStatus", "viewed", "watched")
    assert status[client_id][queue("viewed", 1, 1)] == 1
    assert call("track", "viewed", message_id) == {"watched": "CONSUMED"}
    assert call("consumeDirectly", "watched", client_id, "viewed", message_id) == "CR_SUCCESS"
    producers = call("producers", "CLIENT_INNER_PRODUCER", "viewed")
    assert f"{client_id} JAVA" in producers

    # Changes.
    reset = call("reset", "viewed", "elsewhere", -1)
    assert reset == {each: end for each, (end, _) in everything.items()}
    assert _committed(cluster, "elsewhere", "viewed") == 2
    for broker in brokers:
        call("createGroup", broker, "elsewhere")
    for broker in brokers:
        call("deleteGroup", broker, "elsewhere")
        call("deleteTopic", broker, "%RETRY%elsewhere")
    assert "elsewhere" not in cluster.groups()
    assert "elsewhere" not in call("groups", first)
