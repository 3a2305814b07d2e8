"""A shard whose followers are real: a leader and two followers, each with its store and its Flight server.

The test plays Replication. No satellite runs: with flush="async" a message is confirmed without one.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from raymq.actors.follower.follower import Follower as FollowerRole
from raymq.actors.replica import open_replica
from raymq.actors.server.flight.flight_server import serve
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.cluster.cluster import Cluster
from raymq.replication.wire import (
    AppendEntries,
    FrameHeader,
    Hello,
    ReplicaMessage,
    ReplicaProcess,
    cluster_key,
    encode,
)
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import ChainReader
from tests.support.batches import put_one, request
from tests.support.known_addresses import KnownAddresses
from tests.support.roles import leader_of
from tests.support.tcp_proxy import TcpProxy

CLUSTER_ID, TOKEN = "f0" * 16, "t0ken"
CONFIG = StoreConfig(segment_size_bytes=1 << 20, flush="async", scrub_bytes_per_s=0)
#: between two frames of a stream
BEAT_S = 0.02
#: of a follower's dispatch. Every test waits for followers: the half second of a cluster would be most of its time
LINGER_S = 0.02


class Follower:
    """A follower, and the stream that the test feeds it from the leader's log."""

    def __init__(
        self, root: Path, number: int, leader: ReplicaHost, addresses: KnownAddresses
    ) -> None:
        with mock.patch.object(FollowerRole, "dispatch_linger_s", LINGER_S):
            self.host = open_replica(
                root,
                CONFIG,
                identity={
                    "cluster_id": CLUSTER_ID,
                    "shard": 0,
                    "name": "followed",
                    "shards": 1,
                    "replica": number,
                    "replicas": 3,
                    "incarnation": 1,
                },
                roles=(),
                members=range(3),
                candidates=(0,),
                addresses=addresses,
            )
        self._leader = leader
        self._number = number
        self._chain = ChainReader(
            leader.root / "raymq" / "chain", CONFIG.segment_size_bytes, files=leader.options.files
        )
        self._end = self._value = 0
        #: heartbeats name the confirmed end, but the log bytes stay away
        self.lags = threading.Event()
        #: nothing comes from the leader
        self.is_cut = threading.Event()
        self._ended = threading.Event()
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, daemon=True),
            threading.Thread(target=self._feed, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        self.host.streams.run(iter(self._frames.get, None), lambda frame, body: None)

    def _feed(self) -> None:
        self._send(Hello(0, 0), incarnation=0)
        while not self._ended.wait(BEAT_S):
            if not self.is_cut.is_set():
                self._send_next()

    def _send_next(self) -> None:
        log = self._leader.log
        confirmed = log.confirmed
        units = () if self.lags.is_set() else tuple(self._chain.read_from(self._end, 1 << 18))
        body = log.reads.raw(units[0].start, units[-1].end) if units else None
        self._send(AppendEntries(self._end, self._value, confirmed, units), body)
        if units:
            self._end, self._value = units[-1].end, units[-1].value

    def _send(self, message: ReplicaMessage, body: Any = None, *, incarnation: int = 1) -> None:
        epoch = self._leader.elections.epoch
        header = FrameHeader(
            cluster_key(CLUSTER_ID),
            0,
            ReplicaProcess(0, 1),
            ReplicaProcess(self._number, incarnation),
            epoch,
            1,
        )
        self._frames.put((encode(header, message), body))

    def close(self) -> None:
        """End the stream and the process."""
        self._ended.set()
        self._threads[1].join(10)
        self._frames.put(None)
        self._threads[0].join(10)
        self._chain.close()
        self.host.close(0.0)


class FollowedShard:
    """Shard 0 with topic t of one queue: replica 0 leads, 1 and 2 follow. A proxy is in front of each."""

    def __init__(self, root: Path) -> None:
        identity = {"cluster_id": CLUSTER_ID, "shard": 0, "shards": 1, "name": "followed"}
        self.endpoints: dict[int, str] = {}
        addresses = KnownAddresses(self.endpoints)
        self.leader = open_replica(
            root / "0",
            CONFIG,
            identity={**identity, "replica": 0, "replicas": 3, "incarnation": 1},
            roles=(),
            addresses=addresses,
        )
        self.leader.call("create_topic", {"name": "t", "queues": 1, "shards": [0]})
        self.followers = {
            number: Follower(root / str(number), number, self.leader, addresses)
            for number in (1, 2)
        }

        hosts = [self.leader, *(each.host for each in self.followers.values())]
        self._servers = [serve(host, host="127.0.0.1", port=0, token=TOKEN) for host in hosts]
        self.proxies = [TcpProxy(server.port) for server in self._servers]
        self.endpoints.update(
            {number: f"127.0.0.1:{proxy.port}" for number, proxy in enumerate(self.proxies)}
        )
        #: replica -> fetches that it was asked
        self.fetches = dict.fromkeys(range(3), 0)
        for number, host in enumerate(hosts):
            replicas = {str(each): endpoint for each, endpoint in self.endpoints.items()}
            host.addresses.set_routes({}, {"0": replicas})
            self._count_fetches(number, host)

        self.cluster = Cluster(
            name="followed",
            cluster_id=CLUSTER_ID,
            shards=1,
            token=TOKEN,
            endpoints={0: self.endpoints[0]},
            replicas=3,
            replica_endpoints={0: dict(self.endpoints)},
        )

    def _count_fetches(self, number: int, host: ReplicaHost) -> None:
        fetch = host.fetch

        def count(wanted: Any) -> Any:
            self.fetches[number] += 1
            return fetch(wanted)

        host.fetch = count  # type: ignore[method-assign]

    def put(self, *bodies: bytes) -> None:
        """Store messages at the leader, and wait until its readers see them."""
        put_one(self.leader, request(list(bodies))).wait(30)
        leader_of(self.leader).await_dispatch()

    def end_of(self, number: int) -> int:
        """The end of the queue at a replica."""
        host = self.leader if number == 0 else self.followers[number].host
        return host.store.queue_range("t", 0)[1]

    def close(self) -> None:
        """Stop all."""
        self.cluster.close()
        for proxy in self.proxies:
            proxy.close()
        for server in self._servers:
            server.close()
        for follower in self.followers.values():
            follower.close()
        self.leader.close()
