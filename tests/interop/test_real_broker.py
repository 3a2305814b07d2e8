"""A broker of RocketMQ boots on a shard that was fed on Ray, and its own clients consume all of it."""

from __future__ import annotations

import base64
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray

import raymq
from raymq.client.produce.send_future import SendFuture
from raymq.cluster.deploy import owned_ray
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.stop import stop
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.config_files import fastjson
from raymq.store.engine.message_store import MessageStore
from raymq.store.tools.inspect import check
from tests.support.oracle import Line, RocketMQ, copy
from tests.support.ray_environment import ray_environment
from tests.support.waiting import until

pytestmark = pytest.mark.thorough

TOPIC, LATEST, GROUP, TAG = "orders", "latest", "billing", "TagA"
QUEUES, MESSAGES, KEYS = 4, 600, 20
SIZES = {
    # RocketMQ's own, but for the log.
    "segment": 4 << 20,
    "queue": 6_000_000,
    "slots": 5_000_000,
    "entries": 20_000_000,
}

#: queue, offset
Place = tuple[int, int]


class Fed(NamedTuple):
    """A shard, and what must be found in it."""

    #: after an orderly stop
    stopped: Path
    #: as it was while it ran
    crashed: Path
    #: body of each receipt
    receipts: dict[Place, bytes]
    #: the offsets from which the group goes on, by queue
    offsets: dict[int, int]
    #: key and body of the messages of the compacted topic
    latest: dict[str, bytes]

    @property
    def left(self) -> dict[Place, bytes]:
        """The messages that the group has not read."""
        return {
            place: body
            for place, body in self.receipts.items()
            if place[1] >= self.offsets[place[0]]
        }


def feed(cluster: raymq.Cluster) -> tuple[dict[Place, bytes], dict[int, int], dict[str, bytes]]:
    """Send, kill the leader on the way, read some of it as a group."""
    cluster.create_topic(TOPIC, queues=QUEUES)
    cluster.create_topic(LATEST, queues=1, compacted=True)
    # One is empty.
    bodies = [b"%d" % number * (number % 7) for number in range(MESSAGES)]
    leader = int(cluster.status()["shards"][0]["pid"])
    with cluster.producer() as producer:
        futures: list[SendFuture] = []
        for number, body in enumerate(bodies):
            if number == MESSAGES // 2:
                futures[number // 2].result(60)
                os.kill(leader, signal.SIGKILL)
            keys = (f"k{number}",)
            futures.append(
                producer.send(TOPIC, body, tag=TAG, index_keys=keys, queue_id=number % QUEUES)
            )
        found = [future.result(120) for future in futures]
        latest = {f"k{number}": b"latest %d" % number for number in range(KEYS)}
        for key, body in latest.items():
            producer.send(LATEST, body, index_keys=(key,)).result(60)
    assert int(cluster.status()["shards"][0]["pid"]) != leader
    receipts = {
        (each.queue_id, each.offset): body for each, body in zip(found, bodies, strict=True)
    }
    offsets: dict[int, int] = {}
    with cluster.consumer(TOPIC, group=GROUP, start="earliest") as consumer:
        read = 0
        # Some of each queue: in one without an offset RocketMQ's group would begin at the end.
        while len(offsets) < QUEUES or read < MESSAGES // 3:
            for message in consumer.poll(max_records=50, timeout=30):
                offsets[message.queue_id] = message.offset + 1
                assert message.body == receipts[message.queue_id, message.offset]
                read += 1
        consumer.commit()
    return receipts, offsets, latest


def await_config(shard: Path, offsets: dict[int, int]) -> None:
    """Wait until the running shard has written what RocketMQ reads of a store that crashes now."""
    file = shard / "config" / "consumerOffset.json"

    def written() -> bool:
        found = fastjson.loads(file.read_text())["offsetTable"] if file.exists() else {}
        have = found.get(f"{TOPIC}@{GROUP}", {})
        return {int(queue): offset for queue, offset in have.items()} == offsets

    until(written, lambda: threading.Event().wait(0.1))
    assert any((shard / "checkpoint").read_bytes()[:24])


@pytest.fixture(scope="module")
def fed(rocketmq: RocketMQ, tmp_path_factory: pytest.TempPathFactory) -> Fed:
    place = tmp_path_factory.mktemp("broker")
    data = place / "data"
    paths = ClusterPaths(data)
    with ray_environment(place):
        try:
            cluster = raymq.start(
                data, name="interop", ephemeral=True, segment_size_bytes=SIZES["segment"]
            )
            with cluster:
                found = feed(cluster)
                await_config(paths.replica(0, 0), found[1])
                copy(paths.replica(0, 0), place / "crashed")
            assert stop(data).clean
        finally:
            ray.shutdown()
            owned_ray.stop_owned(paths, files=Files(), clock=Clock())
    return Fed(paths.replica(0, 0), place / "crashed", *found)


def bodies_of(lines: list[Line], kind: str, topic: str) -> dict[Place, bytes]:
    """The messages of a client, by place. RocketMQ's client makes null of an empty body."""
    found: dict[Place, bytes] = {}
    for line in lines:
        if (line["kind"], line["topic"]) == (kind, topic):
            place = (line["queueId"], line["offset"])
            assert place not in found
            assert line["body"] != ""
            found[place] = base64.b64decode(line["body"] or "")
    return found


class Served(NamedTuple):
    """The messages that the clients of a broker on a shard consume."""

    #: whether the shard was marked as not closed before
    unclean: bool
    lines: Future[list[Line]]


@pytest.fixture(scope="module")
def served(rocketmq: RocketMQ, fed: Fed) -> Iterator[dict[Path, Served]]:
    """By shard. Both brokers run at the same time: most of theirs is waiting."""
    pull: list[dict[str, Any]] = [{"topic": TOPIC, "count": len(fed.receipts)}]
    pull.append({"topic": LATEST, "count": len(fed.latest)})
    push = [{"group": GROUP, "topic": TOPIC, "count": len(fed.left)}]
    with ThreadPoolExecutor(2) as threads:
        yield {
            shard: Served(
                (shard / "abort").exists(),
                threads.submit(rocketmq.resized(**SIZES).broker, shard, pull=pull, push=push),
            )
            for shard in (fed.stopped, fed.crashed)
        }


def check_consumed(served: Served, fed: Fed, shard: Path) -> None:
    """All of a shard comes through a broker, and RayMQ goes on at the broker's last offsets."""
    left = fed.left
    assert 0 < len(left) < len(fed.receipts)
    lines = served.lines.result()
    assert bodies_of(lines, "pulled", TOPIC) == fed.receipts
    assert {line["tags"] for line in lines if line["topic"] == TOPIC} == {TAG}
    assert bodies_of(lines, "pushed", TOPIC) == left
    latest = {
        line["keys"]: base64.b64decode(line["body"]) for line in lines if line["topic"] == LATEST
    }
    assert latest == fed.latest

    assert check(shard).faults == []
    store = MessageStore.open(shard, config=StoreConfig(segment_size_bytes=SIZES["segment"]))
    ends = {queue: store.queue_range(TOPIC, queue)[1] for queue in range(QUEUES)}
    assert store.state.offsets[GROUP, TOPIC] == ends
    store.close()
    assert check(shard).faults == []


def test_a_broker_serves_all_of_a_shard_that_was_stopped_in_order(
    served: dict[Path, Served], fed: Fed
) -> None:
    assert not served[fed.stopped].unclean
    check_consumed(served[fed.stopped], fed, fed.stopped)


def test_a_broker_serves_all_of_a_shard_that_crashed(served: dict[Path, Served], fed: Fed) -> None:
    assert served[fed.crashed].unclean
    check_consumed(served[fed.crashed], fed, fed.crashed)
