"""A shard of three replicas in memory, served by real Flight in this process, whose leader tests choose."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from raymq.actors.api.shard_api import PutTicket
from raymq.actors.server.flight.flight_server import Server, serve
from raymq.client.transport.routes import Routes
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import (
    DeliveryUnknown,
    NotLeading,
    RayMQError,
    ReplicaBehind,
    Unavailable,
)
from raymq.store.base.status import PutStatus
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend, FakeQueue, answer_put
from tests.support.fake_groups import FakeGroups
from tests.support.tcp_proxy import TcpProxy

#: operations that every replica answers
ANSWERED_BY_ALL = ("routes", "leader", "replicas", "describe", "status", "topics")


class Replica(FakeBackend):
    """One replica: the leader, or one that refuses and says who leads, as far as it knows."""

    def __init__(self, shard: MovingShard, number: int) -> None:
        super().__init__()
        self.number = number
        self.leads = False
        #: the leader and its epoch, as this replica knows
        self.leader: int | None = None
        self.epoch = 0
        #: operations that arrived
        self.asked: list[str] = []
        #: puts and reads that were refused because this replica does not lead
        self.refused = 0
        #: fetches that were answered
        self.answered = 0
        #: whether it serves reads while it follows
        self.serves_reads = False
        self._replicas = shard
        self._waiting: list[PutTicket] = []

    # --- what tests do ----------------------------------------------------------------------------

    def hear(self, leader: int | None, epoch: int) -> None:
        """Learn who leads."""
        with self._changed:
            self.leader, self.epoch = leader, epoch
            self.leads = leader == self.number
            self._changed.notify_all()

    def step_down(self) -> None:
        """Lead no more: waiting puts are unknown, later ones are refused."""
        self.hear(None, self.epoch)
        self.take_held()
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            if not ticket.done:
                unknown = DeliveryUnknown("the epoch is over", status="SERVICE_NOT_AVAILABLE")
                answer_put(ticket, unknown)

    def take_over(self, log: FakeBackend, epoch: int) -> None:
        """Lead, with the messages of another replica."""
        self.copy(log)
        self.hear(self.number, epoch)

    def copy(self, log: FakeBackend) -> None:
        """Have the messages of another replica, as a follower that has caught up."""
        with self._changed:
            self.state, self.queues = copy.deepcopy((log.state, log.queues))
            self.groups = FakeGroups(self.state, self.clock, log.groups)
            self.halves = copy.deepcopy(log.halves)
            self._position = log._position
            self._changed.notify_all()

    def kept(self) -> FakeBackend:
        """A copy of the log as it is now."""
        with self._changed:
            log = FakeBackend()
            log.state, log.queues = copy.deepcopy((self.state, self.queues))
            log.groups = FakeGroups(log.state, log.clock, self.groups)
            log.halves = copy.deepcopy(self.halves)
            log._position = self._position
            return log

    # --- ShardBackend -----------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        facts = {"replica": self.number, "replicas": len(self._replicas.replicas), "shards": 1}
        return {**super().identity(), **facts, "mode": "leader" if self.leads else "follower"}

    def _put_one(self, request: PutRequest, notify: Callable[[], None] | None) -> PutTicket:
        self._check_leads()
        ticket = super()._put_one(request, notify)
        if not ticket.done:
            self._waiting.append(ticket)
        return ticket

    def put(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        with self._changed:
            return super().put(requests, notify, producer_waits=producer_waits)

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        with self._changed:
            if not self.leads and request.seen_epoch is not None and self.serves_reads:
                self._check_seen(request, request.seen_epoch)
            else:
                self._check_leads()
            epoch = 0 if request.seen_epoch is None else self.epoch
            found = [part._replace(epoch=epoch) for part in super().fetch(request)]
            if not found and self._lags(request):
                raise Unavailable("what its leader has is not here", field="replica")
            self.answered += 1
            self._changed.notify_all()
            return found

    def _lags(self, request: FetchRequest) -> bool:
        """Whether the leader has more. A real follower learns it from the leader, a second later at most."""
        keys = [(request.topic, queue_id) for queue_id in request.offsets]
        return any(
            other.queues.get(key, FakeQueue()).max_offset
            > self.queues.get(key, FakeQueue()).max_offset
            for other in self._replicas.replicas
            for key in keys
            if other.leads
        )

    def _check_seen(self, request: FetchRequest, seen_epoch: int) -> None:
        """As actors/follower/reads.py."""
        if seen_epoch > self.epoch:
            raise ReplicaBehind("another epoch")
        for queue_id, offset in request.offsets.items():
            entry = self.queues.get((request.topic, queue_id), FakeQueue())
            if offset > entry.max_offset:
                raise ReplicaBehind("not yet")
            if offset < entry.min_offset:
                raise Unavailable("deleted here", field="replica")

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self.asked.append(op)
            if op not in ANSWERED_BY_ALL:
                self._check_leads()
            self._changed.notify_all()
        if op == "leader":
            there = None if self.leader is None else self._replicas.endpoints[self.leader]
            return {"replica": self.leader, "epoch": self.epoch, "endpoint": there}
        if op == "replicas":
            known = self._replicas.endpoints
            return {"0": {str(number): endpoint for number, endpoint in known.items()}}
        if op == "describe":
            return {**self.identity(), "name": "fake"}
        return super().call(op, args)

    def _check_leads(self) -> None:
        if self.leads:
            return
        self.refused += 1
        self._changed.notify_all()
        raise NotLeading(
            "this replica does not lead",
            field="leader",
            status=PutStatus.SERVICE_NOT_AVAILABLE.value,
            endpoint=None if self.leader is None else self._replicas.endpoints[self.leader],
            epoch=self.epoch,
        )


class MovingShard:
    """The replicas, each with its Flight server and a proxy in front of it. Replica 0 leads in epoch 1."""

    def __init__(self, replicas: int = 3) -> None:
        self.replicas: list[Replica] = []
        self.endpoints: dict[int, str] = {}
        self.servers: list[Server] = []
        self.proxies: list[TcpProxy] = []
        for number in range(replicas):
            replica = Replica(self, number)
            server = serve(replica, host="127.0.0.1", port=0, token=TOKEN)
            proxy = TcpProxy(server.port)
            self.replicas.append(replica)
            self.servers.append(server)
            self.proxies.append(proxy)
            self.endpoints[number] = f"127.0.0.1:{proxy.port}"
        self.elect(0, 1)

    def create(self, topic: str, queues: int = 1) -> None:
        """Make a topic on all replicas."""
        for replica in self.replicas:
            replica.create(topic, queues)

    def elect(self, leader: int, epoch: int, *, of: FakeBackend | None = None) -> Replica:
        """Let a replica lead, with the log `of` another one. Those that run hear of it."""
        found = self.replicas[leader]
        found.take_over(of or found, epoch)
        for replica in self.replicas:
            if replica is not found and not replica.leads:
                replica.hear(leader, epoch)
        for replica in self.replicas:
            replica.routes = {"0": self.endpoints[leader]}
        return found

    def kill(self, number: int) -> None:
        """End a replica: nothing listens at its endpoint any more."""
        self.proxies[number].close()

    def stop(self, number: int) -> None:
        """Stop a replica like SIGSTOP: its connections stay open, and nothing is answered."""
        self.proxies[number].freeze()

    def cluster(self, **options: Any) -> Cluster:
        """A handle that knows all replicas, and replica 0 as the leader."""
        known = {"replica_endpoints": {0: dict(self.endpoints)}, "replicas": len(self.replicas)}
        return Cluster(
            name="fake",
            cluster_id=CLUSTER_ID,
            shards=1,
            token=TOKEN,
            endpoints={0: self.endpoints[0]},
            **{**known, **options},
        )

    def routes(self, **options: Any) -> Routes:
        """Routes of such a handle."""
        return Routes.of(self.cluster(**options))

    def close(self) -> None:
        """Stop all."""
        for replica in self.replicas:
            replica.release()
        for proxy in self.proxies:
            proxy.close()
        for server in self.servers:
            server.close()
