"""A broker of RocketMQ boots on a shard that RocketMQ's clients have fed through RayMQ, and RayMQ goes on after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray

import raymq
from raymq.client.group_facts import committed_offsets
from raymq.cluster.deploy import owned_ray
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.stop import stop
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from raymq.store.tools.inspect import check
from tests.interop.test_real_broker import (
    GROUP,
    QUEUES,
    SIZES,
    TOPIC,
    Place,
    await_config,
    bodies_of,
)
from tests.support.oracle import JAVA_OPTIONS, SOURCES, Line, Program, RocketMQ, copy
from tests.support.ports import free_port
from tests.support.ray_environment import ray_environment
from tests.support.waiting import until

pytestmark = pytest.mark.thorough

#: of each kind: sync, async, one-way, in a batch; and one large message, which the client compresses
COUNT = 40
MESSAGES = 4 * COUNT + 1


class JavaClient:
    """Runs scenarios of RocketMQ's client against a cluster."""

    def __init__(self, program: Program, home: Path, port: int) -> None:
        self._program = program
        self._home = home
        self.port = port

    def run(self, cluster: raymq.Cluster, scenario: str, *words: object) -> dict[str, Any]:
        """The line of a scenario."""
        done = subprocess.run(
            [
                self._program.java,
                *JAVA_OPTIONS,
                f"-Duser.home={self._home}",
                f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
                f"-Draymq.secret={cluster.token}",
                *("-cp", self._program.class_path, "ClientScenarios"),
                *(scenario, f"127.0.0.1:{self.port}", TOPIC, *map(str, words)),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    def send(self, cluster: raymq.Cluster) -> None:
        """Send in each way. All of it is acknowledged, but for the one-way messages."""
        sent = self.run(cluster, "send", COUNT)
        assert sent["sync"] == {"SEND_OK": COUNT}
        assert (sent["async_answered"], sent["async_failed"]) == (True, 0)
        assert (sent["batch"], sent["large"]) == ("SEND_OK", "SEND_OK")


class Fed(NamedTuple):
    """A shard, and what must be found in it."""

    data: Path
    #: after an orderly stop
    stopped: Path
    #: as it was while it ran
    crashed: Path
    receipts: dict[Place, bytes]
    #: the offsets that the Java consumer has committed, by queue
    offsets: dict[int, int]

    @property
    def left(self) -> dict[Place, bytes]:
        """The messages that the group has not read."""
        return {
            place: body
            for place, body in self.receipts.items()
            if place[1] >= self.offsets[place[0]]
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("fed")
    with ray_environment(made):
        try:
            yield made
        finally:
            ray.shutdown()
            owned_ray.stop_owned(ClusterPaths(made / "data"), files=Files(), clock=Clock())


@pytest.fixture(scope="module")
def client(program: Program, place: Path) -> JavaClient:
    return JavaClient(program, place, free_port())


def read_all(cluster: raymq.Cluster) -> dict[Place, bytes]:
    """Each message of the topic."""
    queues = cluster.describe_topic(TOPIC)["queues"]
    count = sum(each["max_offset"] for each in queues)
    found: dict[Place, bytes] = {}
    with cluster.consumer(TOPIC, start="earliest") as consumer:
        until(
            lambda: len(found) >= count,
            lambda: found.update(
                ((each.queue_id, each.offset), each.body) for each in consumer.poll(100, 1)
            ),
        )
    return found


def feed(cluster: raymq.Cluster, client: JavaClient) -> dict[int, int]:
    """Send and consume with Java, kill the leader, and send again. Returns: the offsets that Java has committed."""
    cluster.create_topic(TOPIC, queues=QUEUES)
    cluster.create_topic("ready", queues=1)
    client.send(cluster)
    read = client.run(cluster, "push", MESSAGES, GROUP, "*")
    assert (read["all"], read["distinct"]) == (True, MESSAGES)
    offsets: dict[int, int] = {}
    # The client commits without waiting for an answer when it ends.
    until(
        lambda: sum(offsets.values()) == MESSAGES,
        lambda: offsets.update(committed_offsets(cluster, GROUP, TOPIC)),
    )

    leader = int(cluster.status()["shards"][0]["pid"])
    os.kill(leader, signal.SIGKILL)
    with cluster.producer() as producer:
        producer.send("ready", b"").result(120)
    assert int(cluster.status()["shards"][0]["pid"]) != leader
    client.send(cluster)
    return offsets


@pytest.fixture(scope="module")
def fed(rocketmq: RocketMQ, place: Path, client: JavaClient) -> Fed:
    data = place / "data"
    shard = ClusterPaths(data).replica(0, 0)
    with raymq.start(
        data,
        name="fed",
        ephemeral=True,
        segment_size_bytes=SIZES["segment"],
        rocketmq=client.port,
    ) as cluster:
        offsets = feed(cluster, client)
        receipts = read_all(cluster)
        await_config(shard, offsets)
        copy(shard, place / "crashed")
    assert stop(data).clean
    assert len(receipts) == 2 * MESSAGES
    return Fed(data, shard, place / "crashed", receipts, offsets)


@pytest.fixture(scope="module")
def served(rocketmq: RocketMQ, fed: Fed) -> dict[Path, list[Line]]:
    """What clients of a broker consume of each shard. Both brokers run at the same time."""
    assert not (fed.stopped / "abort").exists()
    assert (fed.crashed / "abort").exists()
    pull: list[Line] = [{"topic": TOPIC, "count": len(fed.receipts)}]
    push: list[Line] = [{"group": GROUP, "topic": TOPIC, "count": len(fed.left)}]
    with ThreadPoolExecutor(2) as threads:
        runs = {
            shard: threads.submit(rocketmq.resized(**SIZES).broker, shard, pull=pull, push=push)
            for shard in (fed.stopped, fed.crashed)
        }
        return {shard: run.result() for shard, run in runs.items()}


@pytest.mark.parametrize("which", ["stopped", "crashed"])
def test_a_broker_serves_all_that_its_clients_have_sent_to_raymq(
    served: dict[Path, list[Line]], fed: Fed, which: str
) -> None:
    shard: Path = getattr(fed, which)
    assert len(fed.left) == MESSAGES
    assert bodies_of(served[shard], "pulled", TOPIC) == fed.receipts
    assert bodies_of(served[shard], "pushed", TOPIC) == fed.left
    assert check(shard).faults == []


def test_raymq_and_its_java_clients_go_on_after_the_broker(
    served: dict[Path, list[Line]], fed: Fed, client: JavaClient
) -> None:
    with raymq.start(fed.data, ephemeral=True, rocketmq=client.port) as cluster:
        assert read_all(cluster) == fed.receipts
        # Those of the broker's consumer, which ends as soon as it has got all, and may commit less.
        offsets = committed_offsets(cluster, GROUP, TOPIC)
        assert all(offset >= fed.offsets[queue] for queue, offset in offsets.items())
        client.send(cluster)
        left = 3 * MESSAGES - sum(offsets.values())
        read = client.run(cluster, "push", left, GROUP, "*")
        assert (read["all"], read["received"]) == (True, left)
        pause = threading.Event()
        until(
            lambda: sum(committed_offsets(cluster, GROUP, TOPIC).values()) == 3 * MESSAGES,
            lambda: pause.wait(0.05),
        )
    assert stop(fed.data).clean
