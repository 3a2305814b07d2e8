"""A shard with its server for RocketMQ's clients, without Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from tests.support.remoting_client import RemotingClient
from tests.support.served_shard import ServedShard


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("shard") / "store") as served:
        served.start_flusher()
        yield served


@pytest.fixture(scope="module")
def server(shard: ServedShard) -> Iterator[RocketMQServer]:
    with RocketMQServer(shard.cluster, access="open") as running:
        yield running


@pytest.fixture
def client(server: RocketMQServer) -> Iterator[RemotingClient]:
    with RemotingClient(server.addresses[0]) as connected:
        yield connected


@pytest.fixture
def topic(shard: ServedShard, request: pytest.FixtureRequest) -> str:
    """A topic of this test, with two queues."""
    name = "t" + str(abs(hash(request.node.nodeid)))
    shard.cluster.create_topic(name, queues=2)
    return name
