"""RocketMQ's Java client of 4.9, in front of a shard; alone, and in one group with a client of 5.3."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.doors.rocketmq.codes import RequestCode
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from tests.support.oracle import JAVA_OPTIONS, SOURCES, Missing, Program, prepare_older
from tests.support.served_shard import ServedShard
from tests.support.waiting import until

pytestmark = pytest.mark.thorough

COUNT = 40


@pytest.fixture(scope="module")
def older(pytestconfig: pytest.Config, program: Program) -> Program:
    """The client of 4.9. The other one could be fetched, so this one may only be missing without a registry."""
    cache: Any = getattr(pytestconfig, "cache", None)
    try:
        return prepare_older(Path(cache.mkdir("oracle")))
    except Missing as error:
        if os.environ.get("RAYMQ_INTEROP") == "required":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("older") / "store") as served:
        served.start_flusher()
        yield served


class Clients:
    """Starts scenarios of clients."""

    def __init__(self, shard: ServedShard, home: Path, name_server: str) -> None:
        self._shard, self._home, self._name_server = shard, home, name_server

    def start(
        self, program: Program, scenario: str, topic: str, *words: object, header: str = "JSON"
    ) -> subprocess.Popen[str]:
        """A process of Java. Args: `header`: how it writes headers."""
        return subprocess.Popen(
            [
                program.java,
                *JAVA_OPTIONS,
                f"-Duser.home={self._home}",
                f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
                f"-Draymq.secret={self._shard.cluster.token}",
                f"-Drocketmq.serialize.type={header}",
                *("-cp", program.class_path, "ClientScenarios", scenario),
                *(self._name_server, topic, *map(str, words)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: Any, **options: Any) -> dict[str, Any]:
        """As `start`. Returns: its line, when it has ended."""
        return line(self.start(*words, **options))


def line(client: subprocess.Popen[str]) -> dict[str, Any]:
    """End the input of a client. Returns: the line that it prints."""
    try:
        said, _ = client.communicate(timeout=120)
    finally:
        client.kill()
        client.wait()
    assert client.returncode == 0, said[-3000:]
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def server(shard: ServedShard) -> Iterator[RocketMQServer]:
    with RocketMQServer(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module")
def clients(shard: ServedShard, server: RocketMQServer, tmp_path_factory) -> Clients:
    home = tmp_path_factory.mktemp("home")
    return Clients(shard, home, f"127.0.0.1:{server.listen(0)}")


@pytest.mark.parametrize("header", ["JSON", "ROCKETMQ"])
def test_the_client_of_4_9_sends_reads_by_tag_and_sends_back(
    clients: Clients, older: Program, shard: ServedShard, header: str
) -> None:
    topic, messages = f"older_{header}", 4 * COUNT + 1
    shard.cluster.create_topic(topic, queues=4)
    sent = clients.run(older, "send", topic, COUNT, header=header)
    assert sent == {
        "async_answered": True,
        "async_failed": 0,
        "batch": "SEND_OK",
        "batch_ids": COUNT,
        "has_unique_id": True,
        "large": "SEND_OK",
        "offset_id_length": 32,
        "queue": "raymq-0",
        "sync": {"SEND_OK": COUNT},
    }
    read = clients.run(older, "push", topic, messages, f"push_{header}", "*", header=header)
    assert (read["received"], read["distinct"]) == (messages, messages)
    assert read["queues"] == [f"raymq-0/{number}" for number in range(4)]
    assert read["bytes"]["large"] == 200_000
    by_tag = clients.run(older, "push", topic, COUNT, f"tags_{header}", "async", header=header)
    assert (by_tag["received"], list(by_tag["bytes"])) == (COUNT, ["async"])
    group = f"back_{header}"
    back = clients.run(older, "back", topic, COUNT, group, header=header)
    assert back == {"all": True, "times": {f"0 of {topic}": COUNT, f"1 of {topic}": COUNT}}


def test_clients_of_4_9_and_5_3_share_the_queues_of_a_group(
    clients: Clients, older: Program, program: Program, shard: ServedShard, server: RocketMQServer
) -> None:
    shard.cluster.create_topic("shared", queues=4)
    readers = [
        clients.start(program, "share", "shared", 0, "sharing"),
        clients.start(older, "share", "shared", 0, "sharing", header="ROCKETMQ"),
    ]
    try:
        # Each asks for the members of the group whenever it shares the queues.
        asked = server.counts.requests
        until(
            lambda: asked[RequestCode.GET_CONSUMER_LIST_BY_GROUP] >= 4,
            lambda: threading.Event().wait(0.1),
        )
        threading.Event().wait(2.0)
        for sender in (older, program):
            clients.run(sender, "send", "shared", COUNT)
        threading.Event().wait(1.0)
        shares = [line(each) for each in readers]
    finally:
        for each in readers:
            each.kill()
            each.wait()
    assert sum(sum(each.values()) for each in shares) == 2 * (4 * COUNT + 1)
    assert not shares[0].keys() & shares[1].keys()
    assert [len(each) for each in shares] == [2, 2]
