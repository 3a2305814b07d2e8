"""What a program without the token does to a replica over its replication port: nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from raymq.actors.ray.replica_transport import ReplicaCalls, replica_stream
from raymq.actors.replica import open_replica
from raymq.actors.server.flight.flight_server import Server, serve
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.client.transport.flight_client import ShardConnection
from raymq.replication.wire import (
    AppendEntries,
    FrameHeader,
    Hello,
    ReplicaMessage,
    ReplicaProcess,
    RequestVote,
    cluster_key,
    encode,
)
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.config.store_config import StoreConfig
from tests.support.waiting import until

CLUSTER_ID, TOKEN = "f1" * 16, "t0ken"
EPOCH = 9
Say = Callable[[Server, str], None]


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[ReplicaHost]:
    """Replica 1 of three. No other one answers it."""
    host = open_replica(
        tmp_path,
        StoreConfig(segment_size_bytes=1 << 20, flush="async", scrub_bytes_per_s=0),
        identity={
            "cluster_id": CLUSTER_ID,
            "shard": 0,
            "name": "strangers",
            "shards": 1,
            "replica": 1,
            "replicas": 3,
            "incarnation": 1,
        },
        roles=(),
        members=range(3),
        candidates=(0,),
    )
    yield host
    host.close(0.0)


@pytest.fixture
def server(follower: ReplicaHost) -> Iterator[Server]:
    with closing(serve(follower, host="127.0.0.1", port=0, token=TOKEN)) as made:
        yield made


def frame(message: ReplicaMessage, *, incarnation: int) -> bytes:
    """A frame of replica 0, which leads or wants to lead epoch EPOCH."""
    addressee = ReplicaProcess(1, incarnation)
    header = FrameHeader(cluster_key(CLUSTER_ID), 0, ReplicaProcess(0, 7), addressee, EPOCH, 1)
    return encode(header, message)


def connect(server: Server, token: str) -> ShardConnection:
    return ShardConnection(f"127.0.0.1:{server.port}", token, CLUSTER_ID, 0)


def greet(server: Server, token: str) -> None:
    """Say as a leader's Replication that its log is ahead, then send it. Raises: RayMQError when it is refused."""
    stream = replica_stream(connect(server, token))
    try:
        stream.send(frame(Hello(100, 0), incarnation=0))
        stream.receive()
        stream.send(frame(AppendEntries(0, 0, 0, ()), incarnation=1))
    finally:
        stream.close()


def ask_for_a_vote(server: Server, token: str) -> None:
    """Raises: RayMQError when it is refused."""
    calls = ReplicaCalls(connect(server, token), lambda: {"replica": 0, "endpoints": {}})
    with closing(calls):
        calls.elect(frame(RequestVote(8, 1_000), incarnation=1), 5.0)


@pytest.mark.parametrize("say", [greet, ask_for_a_vote])
@pytest.mark.parametrize("token", ["", "another"])
def test_a_stranger_changes_no_byte_and_no_epoch(
    follower: ReplicaHost, server: Server, token: str, say: Say
) -> None:
    before = follower.elections.epoch, follower.log.meta.get("ballot"), follower.log.end
    with pytest.raises(Rejected) as refused:
        say(server, token)
    assert refused.value.field == "token"
    assert before == (follower.elections.epoch, follower.log.meta.get("ballot"), follower.log.end)
    assert before[0] == 0


@pytest.mark.parametrize("say", [greet, ask_for_a_vote])
def test_the_same_words_with_the_token_are_heard(
    follower: ReplicaHost, server: Server, say: Say
) -> None:
    with suppress(RayMQError):
        say(server, TOKEN)
    until(lambda: follower.elections.epoch == EPOCH, lambda: threading.Event().wait(0.01))
