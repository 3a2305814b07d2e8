"""A replica of three that is lost for good gets an empty successor, on one machine and on another node."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import raymq
from raymq.client import replica_status
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected
from raymq.store.tools.inspect import verify
from tests.support.ray_nodes import RayNodes, ray_nodes
from tests.support.replicated_shard import pause
from tests.support.waiting import until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]

LABELS = ["a", "b", "c", "d"]
TOPIC = "t"


class World:
    """A shard of three replicas on the nodes a, b and c. The node d is spare."""

    def __init__(self, nodes: RayNodes, data_dir: Path) -> None:
        self.nodes = nodes
        self.paths = ClusterPaths(data_dir)
        #: the messages that are there
        self.sent: list[bytes] = []
        #: how many were deleted before them
        self.deleted = 0
        self.cluster = raymq.start(
            data_dir,
            address=nodes.address,
            ephemeral=True,
            insecure=True,
            replicas=3,
            nodes=LABELS[:3],
            segment_size_bytes=1 << 20,
            file_reserved_hours=0,
        )
        self.cluster.create_topic(TOPIC, queues=1)

    def send(self, topic: str = TOPIC, body: bytes = b"") -> None:
        """A message that a majority has."""
        body = body or b"message %d" % len(self.sent)
        with self.cluster.producer(acks="quorum", delivery_timeout_ms=60_000) as producer:
            producer.send(topic, body).result(60)
        if topic == TOPIC:
            self.sent.append(body)

    def delete_old_files(self) -> None:
        """Fill two files with messages, and let the leader delete what is not in the last ones."""
        for number in range(40):
            self.send(body=b"%d" % number * 40_000)
        self.cluster.call(0, "delete_expired_files", {})
        until(lambda: self.cluster.call(0, "status", {})["min_offset"] > 0, pause)
        low = self.range(TOPIC)[0]
        self.sent = self.sent[low - self.deleted :]
        self.deleted = low

    def range(self, topic: str) -> tuple[int, int]:
        """The offsets of the topic's only queue."""
        (queue,) = self.cluster.describe_topic(topic)["queues"]
        return queue["min_offset"], queue["max_offset"]

    def read(self) -> list[bytes]:
        """Every message that no replica has deleted: each deletes its old files at its own time."""
        found: list[bytes] = []
        low, high = self.range(TOPIC)
        with self.cluster.consumer(TOPIC, start="earliest") as consumer:
            until(
                lambda: len(found) >= high - low,
                lambda: found.extend(message.body for message in consumer.poll(timeout=1.0)),
            )
        return found[self.deleted - low :]

    def rows(self) -> dict[int, dict]:
        return {row["replica"]: row for row in replica_status.statuses(self.cluster, 0)}

    def leader(self) -> int:
        """The replica that leads, once one does."""
        found: list[int] = []

        def look() -> None:
            leader = replica_status.leader_of(list(self.rows().values()))
            found[:] = [] if leader is None else [leader]

        until(lambda: bool(found), look)
        return found[0]

    def follower(self) -> int:
        leader = self.leader()
        return next(each for each in (2, 1, 0) if each != leader)

    def record(self) -> dict:
        return json.loads(self.paths.cluster.read_text())

    def moved_aside(self, replica: int) -> list[Path]:
        return sorted((self.paths.root / "shard-0").glob(f"replaced-*-replica-{replica}"))


@contextlib.contextmanager
def started_world(labels: list[str]) -> Iterator[World]:
    """The shard on a Ray with these nodes."""
    place = Path(tempfile.mkdtemp(prefix="rqr", dir="/tmp"))
    try:
        with ray_nodes(labels) as nodes:
            world = World(nodes, place / "data")
            yield world
            world.cluster.stop()
    finally:
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with started_world(LABELS) as world:
        yield world


def test_what_must_not_be_replaced_is_refused_and_nothing_is_changed(world: World) -> None:
    world.send()
    before, leader = world.record(), world.leader()
    with pytest.raises(Rejected, match="move-leader"):
        world.cluster.replace_replica(0, leader)
    with pytest.raises(Rejected, match="no node of this Ray has the label raymq-node=z"):
        world.cluster.replace_replica(0, world.follower(), node="z")
    assert world.record() == before
    world.send()


def test_a_replica_gets_an_empty_directory_on_its_node_and_the_old_one_is_kept(
    world: World,
) -> None:
    replica = world.follower()
    before = world.rows()[replica]
    lines: list[str] = []
    world.cluster.replace_replica(0, replica, progress=lines.append, timeout_s=90)
    after = world.rows()[replica]
    assert after["pid"] != before["pid"]
    assert after["is_complete"]
    assert after["generation"] == 1
    assert lines[-1] == f"shard 0 replica {replica}: complete"
    (aside,) = world.moved_aside(replica)
    assert verify(aside) == []
    world.send()
    assert world.read() == world.sent


def test_a_replica_whose_node_is_gone_gets_a_successor_on_another_node(world: World) -> None:
    replica = world.follower()
    node = world.record()["placement"][0][replica]
    world.nodes.remove(node)
    shutil.rmtree(world.paths.replica(0, replica))
    world.send()
    with pytest.raises(Rejected, match=f"raymq-node={node}"):
        world.cluster.replace_replica(0, replica)
    world.cluster.replace_replica(0, replica, node="d", timeout_s=90)
    assert world.record()["placement"][0][replica] == "d"
    assert world.cluster.placement == tuple(map(tuple, world.record()["placement"]))
    assert world.rows()[replica]["is_complete"]
    # It counts: with it as the leader everything is still there.
    world.cluster.move_leader(0, replica)
    world.send()
    assert world.read() == world.sent


def test_a_new_replica_follows_a_log_whose_oldest_files_are_deleted(world: World) -> None:
    world.cluster.create_topic("early", queues=1)
    for _ in range(3):
        world.send("early")
    world.delete_old_files()
    assert world.range("early") == (3, 3)
    replica = world.follower()
    world.cluster.replace_replica(0, replica, timeout_s=90)
    world.cluster.move_leader(0, replica)
    world.send()
    assert world.read() == world.sent
    # None of its messages is in the log of the new replica.
    assert world.range("early") == (3, 3)
    world.send("early")
    assert world.range("early") == (3, 4)


def test_a_drained_node_leads_nothing_and_writes_go_on(world: World) -> None:
    node = world.record()["placement"][0][world.leader()]
    report = world.cluster.drain_node(node)
    assert world.record()["placement"][0][world.leader()] != node
    assert list(report.moved) == [0]
    assert len(report.followers) == 1
    world.send()
    # Nothing is left to do.
    assert world.cluster.drain_node(node).moved == {}


def test_the_cluster_resumes_with_the_new_placement(world: World) -> None:
    assert world.cluster.stop().clean
    world.cluster = raymq.start(world.paths.data_dir, address=world.nodes.address)
    assert all(row["is_complete"] for row in world.rows().values())
    world.send()
    assert world.read() == world.sent
