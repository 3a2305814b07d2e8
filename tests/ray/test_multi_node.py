"""A mirrored cluster over three nodes: where its actors are, and what happens when a node goes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import raymq
from raymq.client.transport.actor_names import actor_name
from raymq.client.transport.flight_client import ShardConnection
from raymq.cluster.deploy.ray_host import RayTarget, session
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected, Unavailable
from tests.support.ray_nodes import RayNodes, ray_nodes
from tests.support.waiting import until

pytestmark = pytest.mark.thorough

LABELS = ["a", "b", "c"]
SHARDS = 2
TOPIC = "t"


class World:
    """The nodes and the cluster on them."""

    def __init__(self, nodes: RayNodes, data_dir: Path) -> None:
        self.nodes = nodes
        self.paths = ClusterPaths(data_dir)
        self.sent: list[bytes] = []
        self.reported: list[str] = []

    def start(self, **options: object) -> raymq.Cluster:
        """`raymq.start`, with its progress lines."""
        self.reported = []
        return raymq.start(
            self.paths.data_dir,
            address=self.nodes.address,
            ephemeral=True,
            progress=self.reported.append,
            **options,  # type: ignore[arg-type]
        )

    def send(self, cluster: raymq.Cluster, count: int = SHARDS) -> None:
        """Messages that both replicas of their shards have; one of `count` to each queue."""
        with cluster.producer(acks="quorum", delivery_timeout_ms=60_000) as producer:
            for number in range(count):
                body = b"message %d" % len(self.sent)
                producer.send(TOPIC, body, queue_id=number).result(60)
                self.sent.append(body)

    def read(self, cluster: raymq.Cluster) -> list[bytes]:
        """Every message."""
        found: list[bytes] = []
        with cluster.consumer(TOPIC, start="earliest") as consumer:
            until(
                lambda: len(found) >= len(self.sent),
                lambda: found.extend(message.body for message in consumer.poll(timeout=1.0)),
            )
        return found

    def whereabouts(self) -> dict[tuple[int, int, str], str]:
        """(shard, replica, role) -> the label of the node on which Ray runs the actor."""
        with session(RayTarget(address=self.nodes.address)) as ray:
            labels = {node["NodeID"]: node["Labels"].get("raymq-node") for node in ray.nodes()}
            actors = {
                facts["Name"]: labels[facts["Address"]["NodeID"]]
                for facts in ray._private.state.actors().values()
                if facts["State"] == "ALIVE"
            }
        return {
            (shard, replica, role): actors[name]
            for shard in range(SHARDS)
            for replica in (0, 1)
            for role in ("commit_log", "group_commit", "replication")
            if (name := actor_name("default", shard, replica, role)) in actors
        }


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    place = Path(tempfile.mkdtemp(prefix="rqd", dir="/tmp"))
    try:
        with ray_nodes(LABELS) as nodes:
            yield World(nodes, place / "data")
    finally:
        shutil.rmtree(place)


def test_a_label_that_no_node_has_is_refused_before_anything_is_started(world: World) -> None:
    with pytest.raises(Rejected, match="no node of this Ray has the label raymq-node=z") as caught:
        world.start(nodes=["a", "z"])
    assert caught.value.limit == "a, b, c"
    assert not world.paths.cluster.exists()


def test_nodes_that_others_reach_need_tls_or_a_word(world: World) -> None:
    with pytest.raises(Rejected, match="not encrypted.*RAY_USE_TLS=1"):
        world.start(nodes=LABELS)
    assert not world.paths.cluster.exists()


def test_leaders_are_spread_and_followers_are_elsewhere_with_all_their_roles(world: World) -> None:
    cluster = world.start(
        shards=SHARDS,
        replicas=2,
        nodes=LABELS,
        segment_size_bytes=1 << 20,
        insecure=True,
    )
    assert [
        line for line in world.reported if line.startswith("WARNING: any machine on the network")
    ]
    placement = json.loads(world.paths.cluster.read_text())["placement"]
    assert placement == [["a", "b"], ["b", "c"]]
    cluster.create_topic(TOPIC, queues=SHARDS)
    world.send(cluster)
    # Every role had a part in that.
    found = world.whereabouts()
    assert len(found) == SHARDS * 5
    for (shard, replica, _role), node in found.items():
        assert node == placement[shard][replica]
    assert sorted(world.read(cluster)) == sorted(world.sent)
    cluster.close()


def test_writes_come_back_after_kill_9_of_a_followers_commit_log(world: World) -> None:
    cluster = raymq.connect(world.paths.data_dir)
    endpoint_file = world.paths.replica(0, 1) / "raymq" / "endpoint"
    facts = json.loads(endpoint_file.read_text())
    connection = ShardConnection(
        f"{facts['host']}:{facts['port']}", cluster.token, cluster.cluster_id, 0
    )
    with contextlib.closing(connection):
        os.kill(int(connection.call("status")["pid"]), signal.SIGKILL)
    world.send(cluster)
    assert sorted(world.read(cluster)) == sorted(world.sent)
    cluster.close()


@pytest.mark.timeout(150)
def test_a_node_that_is_away_is_reported_and_comes_back_with_its_disk(world: World) -> None:
    cluster = raymq.connect(world.paths.data_dir)
    world.nodes.remove("b")
    wait = threading.Event()
    status: dict[str, object] = {}

    def look() -> None:
        status.update(cluster.status())
        wait.wait(0.2)

    until(lambda: status.get("state") == "DEGRADED", look)
    runs, down = status["shards"]  # type: ignore[misc]
    assert down["nodes"] == ["b", "c"]
    assert down["away"] == ["b"]
    assert "node b is away" in down["error"]
    assert "--labels raymq-node=b" in down["error"]
    # The other one only misses its follower.
    assert runs["state"] == "RUNNING"
    with pytest.raises(Unavailable, match="shard 1 replica 0: PENDING .node b is away"):
        world.start(timeout_s=2)
    assert any(line.startswith("shard 0 replica 1: PENDING (node b is") for line in world.reported)
    # A follower whose disk is new gets everything from its leader again.
    shutil.rmtree(world.paths.replica(0, 1))
    world.nodes.add("b")
    again = world.start()
    assert "shard 1 replica 0: RUNNING" in world.reported
    world.send(again)
    assert sorted(world.read(again)) == sorted(world.sent)
    assert again.status()["state"] == "RUNNING"
    again.close()
    cluster.close()


@pytest.mark.timeout(150)
def test_a_stopped_cluster_resumes_where_its_disks_are_and_is_not_moved(world: World) -> None:
    before = world.whereabouts()
    report = raymq.connect(world.paths.data_dir).stop()
    assert report.clean, report
    with pytest.raises(Rejected, match="nodes="):
        world.start(nodes=["c", "b", "a"])
    cluster = world.start()
    assert sorted(world.read(cluster)) == sorted(world.sent)
    world.send(cluster)
    assert world.whereabouts() == before
    cluster.close()


@pytest.mark.timeout(150)
def test_the_follower_of_two_gets_a_successor_on_another_node(world: World) -> None:
    with raymq.connect(world.paths.data_dir) as cluster:
        with pytest.raises(Rejected, match="led by this replica only"):
            cluster.replace_replica(0, 0)
        with pytest.raises(Rejected, match="no other one can lead"):
            cluster.drain_node("a")
        cluster.replace_replica(0, 1, node="c", timeout_s=90)
        world.send(cluster)
        assert sorted(world.read(cluster)) == sorted(world.sent)
    assert {node for (shard, replica, _), node in world.whereabouts().items() if shard == 0} == {
        "a",
        "c",
    }
