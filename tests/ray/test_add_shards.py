"""Shards are added to a cluster on two nodes under load, also after an interruption, and everything stays."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.cluster.deploy import actor_set
from raymq.cluster.record.cluster_record import load_record, save_record
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files
from tests.support.ray_nodes import RayNodes, ray_nodes
from tests.support.replicated_shard import pause
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.thorough]

OLD, WIDE = "old", "wide"


class World:
    """A cluster on the nodes a and b. It begins with one shard, on a."""

    def __init__(self, nodes: RayNodes, data_dir: Path) -> None:
        self.nodes = nodes
        self.paths = ClusterPaths(data_dir)
        #: topic -> the messages that are there
        self.sent: dict[str, set[bytes]] = {OLD: set(), WIDE: set()}
        self.cluster = self.start(insecure=True, nodes=["a", "b"], segment_size_bytes=1 << 20)
        self.cluster.create_topic(OLD, queues=2)
        #: a handle from before any shard was added
        self.early: raymq.Cluster = pickle.loads(pickle.dumps(self.cluster))

    def start(self, **options: Any) -> raymq.Cluster:
        """`raymq.start`, on these nodes."""
        options = {"timeout_s": 60, **options}
        return raymq.start(
            self.paths.data_dir, address=self.nodes.address, ephemeral=True, shards=1, **options
        )

    def send(self, cluster: raymq.Cluster, topic: str) -> None:
        """A message to each queue."""
        with cluster.producer() as producer:
            for queue in cluster.describe_topic(topic)["queues"]:
                body = b"message %d" % len(self.sent[topic])
                producer.send(topic, body, queue_id=queue["queue_id"]).result(30)
                self.sent[topic].add(body)

    def read(self, cluster: raymq.Cluster, topic: str) -> set[bytes]:
        """Every message."""
        found: set[bytes] = set()
        with cluster.consumer(topic, start="earliest") as consumer:
            until(
                lambda: len(found) >= len(self.sent[topic]),
                lambda: found.update(message.body for message in consumer.poll(timeout=1.0)),
            )
        return found

    def record(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.paths.cluster.read_text())
        return facts

    def check_same_topics(self) -> None:
        """Every shard knows the same topics, with the same queues on the same shards."""
        shards = range(self.cluster.shards)
        first, *others = [self.cluster.call(shard, "topics", {}) for shard in shards]
        assert all(other == first for other in others)


class Traffic:
    """Sends to the old topic and makes topics, each in a thread of its own, while a block runs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sends = 0
        self.topics: list[str] = []
        self.errors: list[BaseException] = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=[body])
            for body in (self._send, self._make_topics)
        ]

    def _run(self, body: Any) -> None:
        try:
            body()
        except BaseException as error:
            self.errors.append(error)

    def _send(self) -> None:
        with self.world.early.producer(delivery_timeout_ms=20_000) as producer:
            while not self._ended.is_set():
                body = b"load %d" % self.sends
                producer.send(OLD, body).result(20)
                self.world.sent[OLD].add(body)
                self.sends += 1

    def _make_topics(self) -> None:
        # Its own copy: it learns of the new shard from the answers.
        handle: raymq.Cluster = pickle.loads(pickle.dumps(self.world.early))
        with handle:
            while not self._ended.is_set():
                name = f"made-{len(self.topics)}"
                assert handle.create_topic(name, queues=3)
                self.topics.append(name)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    place = Path(tempfile.mkdtemp(prefix="rqs", dir="/tmp"))
    try:
        with ray_nodes(["a", "b"]) as nodes:
            world = World(nodes, place / "data")
            yield world
            world.early.close()
            world.cluster.stop()
    finally:
        shutil.rmtree(place)


def test_an_addition_that_cannot_be_is_refused_and_nothing_is_changed(world: World) -> None:
    before = world.record()
    with pytest.raises(Rejected, match="no node of this Ray has the label raymq-node=z"):
        world.cluster.add_shards(nodes=["a", "z"])
    with pytest.raises(Rejected, match="shards"):
        world.cluster.add_shards(256)
    assert world.record() == before


def test_sends_and_new_topics_go_on_while_a_shard_is_added(world: World) -> None:
    world.cluster.create_topic("latest", queues=2, compacted=True)
    (before,) = world.cluster.status()["shards"]
    with Traffic(world) as traffic:
        until(lambda: traffic.sends > 5 and len(traffic.topics) > 2, pause)
        sends = traffic.sends
        assert world.cluster.add_shards() == [1]
        assert traffic.sends > sends
        made = len(traffic.topics)
        until(lambda: len(traffic.topics) > made + 1, pause)
    assert traffic.errors == []

    old, new = world.cluster.status()["shards"]
    assert (old["pid"], old["recovery"]) == (before["pid"], before["recovery"])
    assert (new["nodes"], world.record()["placement"]) == (["b"], [["a"], ["b"]])
    world.check_same_topics()
    topics = world.cluster.topics()
    assert set(traffic.topics) < set(topics)
    assert topics[OLD] == {"queues": 2, "shards": [0]}
    assert topics["latest"] == {"queues": 2, "shards": [0], "compacted": True}
    assert topics[traffic.topics[-1]] == {"queues": 3, "shards": [0, 1]}
    # A creation that is repeated by a program finds its topic.
    assert not world.cluster.create_topic(OLD, queues=2)


def test_a_handle_from_before_uses_the_new_shard_and_is_told_of_it(world: World) -> None:
    assert world.early.shards == 1
    world.cluster.create_topic(WIDE, queues=4)
    world.send(world.early, WIDE)
    assert world.read(world.early, WIDE) == world.sent[WIDE]
    spread = [queue["shard"] for queue in world.early.describe_topic(WIDE)["queues"]]
    assert spread == [0, 1, 0, 1]
    assert world.early.shards == 2
    world.send(world.early, OLD)
    assert world.read(world.cluster, OLD) == world.sent[OLD]


def test_an_interrupted_addition_is_completed_by_the_same_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(actor_set, "create", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.cluster.add_shards()
    assert (world.record()["shards"], world.record()["joined_shards"]) == (3, 2)
    # Until then nothing counts the new shard.
    with raymq.connect(world.paths.data_dir) as handle:
        assert (handle.shards, handle.status()["state"]) == (2, "RUNNING")
        handle.create_topic("between", queues=4)
        assert handle.topics()["between"]["shards"] == [0, 1]

    with pytest.raises(Rejected, match="complete it first, with count=1"):
        world.cluster.add_shards(2)
    assert world.cluster.add_shards() == [2]
    assert world.record()["joined_shards"] is None
    world.check_same_topics()


def test_an_interrupted_addition_is_completed_by_the_next_start(world: World) -> None:
    record = load_record(world.paths, Files())
    assert record is not None
    save_record(world.paths, record.with_more_shards(1), Files())
    world.cluster.close()
    world.cluster = world.start()
    assert world.cluster.shards == 4
    assert world.record()["joined_shards"] is None
    assert not world.cluster.create_topic("between", queues=4)
    world.check_same_topics()


def test_a_restart_keeps_everything_and_takes_no_lost_store_for_a_new_one(world: World) -> None:
    assert world.cluster.stop().clean
    store = world.paths.replica(1, 0)
    aside = store.with_name("aside")
    store.rename(aside)
    missed: list[str] = []

    def put_back(line: str) -> None:
        """Bring the store of the added shard back when the start has missed it. Its actor then finds it."""
        if "node b has no store" in line and not missed:
            missed.append(line)
            shutil.rmtree(store, ignore_errors=True)
            aside.rename(store)

    world.cluster = world.start(progress=put_back)
    assert missed
    assert world.cluster.shards == 4
    world.check_same_topics()
    for topic in (OLD, WIDE):
        world.send(world.cluster, topic)
        assert world.read(world.cluster, topic) == world.sent[topic]
