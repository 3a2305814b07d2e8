"""A consumer reads the true bytes of a message that rotted on the leader's disk: real replicas with real Flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.actors.ray.replica_transport import ReplicaTransport
from raymq.actors.server.flight.flight_server import Server, serve
from raymq.client.consume.consumer import Consumer
from raymq.client.messages.received import received_messages
from raymq.client.transport.flight_client import ShardConnection
from raymq.store.base.errors import Corrupt, Rejected, Unavailable
from raymq.store.records.requests import FetchRequest
from tests.support.mended_shard import BODIES, MendedShard

CLUSTER_ID, TOKEN = "c" * 32, "t0ken"
ROTTEN = 20


class World:
    """Two replicas, each with its server."""

    def __init__(self, root: Path) -> None:
        self.servers: dict[int, Server] = {}
        self.shard = MendedShard(root, connect=self._connect)
        for replica, host in self.shard.hosts.items():
            self.servers[replica] = serve(host, host="127.0.0.1", port=0, token=TOKEN)
        self.shard.leader.addresses.set_routes({"0": self.endpoint(0)})
        self.cluster: Any = SimpleNamespace(
            transport="flight",
            endpoints={0: self.endpoint(0)},
            token=TOKEN,
            cluster_id=CLUSTER_ID,
            resolver=None,
            ca=None,
            shards=1,
            replicas=1,
            delay_levels=18,
            replica_endpoints={},
        )

    def endpoint(self, replica: int) -> str:
        server = self.servers.get(replica)
        if server is None:
            raise Unavailable("not known yet")
        return f"127.0.0.1:{server.port}"

    def _connect(self, replica: int) -> Any:
        transport = ReplicaTransport(TOKEN, cluster_id=CLUSTER_ID, shard=0)
        return transport.replica_calls(self.endpoint(replica), dict)

    def consume(self) -> list[bytes]:
        with Consumer(self.cluster, "t", start="earliest") as consumer:
            found: list[bytes] = []
            while len(found) < len(BODIES):
                messages = consumer.poll(100, 10)
                assert messages, "no message within 10 s"
                found += [message.body for message in messages]
            return found

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        self.shard.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_consumer_gets_the_true_bytes_of_a_message_that_rotted_on_the_leader(
    world: World,
) -> None:
    world.shard.rot(0, ROTTEN)
    assert world.consume() == BODIES


def test_a_consumer_gets_an_error_for_a_message_that_rotted_on_both_replicas(world: World) -> None:
    world.shard.rot(0, ROTTEN)
    world.shard.rot(1, ROTTEN)
    with pytest.raises(Corrupt, match="shard 0"):
        world.consume()


def test_the_place_of_a_message_that_rotted_on_the_leader_is_found_in_its_mended_bytes(
    world: World,
) -> None:
    leader = world.shard.leader
    (found,) = leader.fetch(FetchRequest("t", {0: ROTTEN}, 1, 1, 0))
    (message,) = received_messages(0, found.records)
    world.shard.rot(0, ROTTEN)
    assert leader.call("place_of_message", {"message_id": message.message_id}) == {
        "topic": "t",
        "queue_id": 0,
        "offset": ROTTEN,
    }
    assert leader.store.damage == []
    assert world.consume() == BODIES


def test_the_place_of_a_message_that_rotted_on_both_replicas_is_not_said(world: World) -> None:
    leader = world.shard.leader
    (found,) = leader.fetch(FetchRequest("t", {0: ROTTEN}, 1, 1, 0))
    (message,) = received_messages(0, found.records)
    world.shard.rot(0, ROTTEN)
    world.shard.rot(1, ROTTEN)
    with pytest.raises(Corrupt):
        leader.call("place_of_message", {"message_id": message.message_id})
    assert len(leader.store.damage) == 1


def test_log_bytes_are_given_to_a_caller_with_the_token_only(world: World) -> None:
    unit = world.shard.unit_of(ROTTEN)
    arguments = {"start": unit.start, "stop": unit.end}
    for token, is_good in ((TOKEN, True), ("another", False)):
        connection = ShardConnection(world.endpoint(1), token, CLUSTER_ID, 0)
        try:
            if is_good:
                assert connection.call("log_units", arguments)["start"] == unit.start
            else:
                with pytest.raises(Rejected, match="token"):
                    connection.call("log_units", arguments)
        finally:
            connection.close()
