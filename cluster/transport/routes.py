"""Addresses of shards, and topics; looked up again after a connection breaks. No Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from raymq.cluster.arguments import check_number
from raymq.store.errors import RayMQError, Rejected, Unavailable
from raymq.store.format import SYSTEM_TOPICS, check_topic_name

from .ask import first
from .connection import Connection, FetchStream, Transport, open_connection
from .flight_client import CALL_TIMEOUT_S

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: a lookup must not delay the tries of other endpoints for long
LOOKUP_TIMEOUT_S = 5.0

Resolver = Callable[[], Mapping[int, str]]


class TopicRoute(NamedTuple):
    """A topic: queue q lives on shard `shards[q % len(shards)]`."""

    name: str
    queues: int
    shards: tuple[int, ...]

    def shard_of(self, queue_id: int) -> int:
        """The shard that stores a queue. Raises: Rejected for another number."""
        if type(queue_id) is not int:
            check_number("queue_id", queue_id, 0)
        if not 0 <= queue_id < self.queues:
            raise Rejected(
                f"topic {self.name} has the queues 0 to {self.queues - 1}, not {queue_id}",
                field="queue_id",
                limit=self.queues - 1,
            )
        return self.shards[queue_id % len(self.shards)]

    def queues_of(self, shard: int) -> list[int]:
        """The ids of the queues that a shard stores."""
        return [queue_id for queue_id in range(self.queues) if self.shard_of(queue_id) == shard]


class Routes:
    """shard -> endpoint, and the topics. Threads: any."""

    def __init__(
        self,
        endpoints: Mapping[int, str],
        token: str,
        *,
        cluster_id: str | None = None,
        resolver: Resolver | None = None,
        ca: bytes | None = None,
        transport: Transport = "flight",
    ) -> None:
        self._endpoints = dict(endpoints)
        self._token = token
        self._ca = ca
        self._transport: Transport = transport
        self._cluster_id = cluster_id
        self._resolver = resolver
        self._topics: dict[str, TopicRoute] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, cluster: Cluster) -> Routes:
        """The routes of a cluster handle."""
        if cluster.transport == "ray":
            return cls(
                cluster.actor_names(),
                cluster.token,
                cluster_id=cluster.cluster_id,
                # The actor's name stays, wherever the actor runs.
                resolver=dict,
                transport="ray",
            )
        return cls(
            cluster.endpoints,
            cluster.token,
            cluster_id=cluster.cluster_id,
            resolver=cluster.resolver,
            ca=cluster.ca,
        )

    def connect(self, shard: int) -> Connection:
        """A connection to the last known address of a shard. Raises: Unavailable when none is known."""
        with self._lock:
            endpoint = self._endpoints.get(shard)
        if endpoint is None:
            raise Unavailable(f"the address of shard {shard} is not known yet", shard=shard)
        return open_connection(
            self._transport,
            endpoint,
            token=self._token,
            cluster_id=self._cluster_id,
            shard=shard,
            ca=self._ca,
        )

    def fetch_stream(self, shard: int) -> FetchStream:
        """A stream for reads; closing it closes its connection. Raises: Unavailable."""
        # A connection that is closed here stays open until its stream is closed.
        with closing(self.connect(shard)) as connection:
            return connection.fetch_stream()

    def refresh(self) -> None:
        """Look up all endpoints again, through the resolver or any shard that answers.

        Never raises: shards that do not answer keep their last known endpoints.
        """
        if self._resolver is not None:
            try:
                found = self._resolver()
            except RayMQError:
                return
            with self._lock:
                self._endpoints.update(found)
            return

        def routes(shard: int) -> dict[str, Any]:
            return self._call(shard, "routes", {}, LOOKUP_TIMEOUT_S)

        with self._lock:
            shards = sorted(self._endpoints)
        try:
            _, answer = first(shards, routes, timeout_s=LOOKUP_TIMEOUT_S, in_turn=self._by_ray)
        except RayMQError:
            return
        with self._lock:
            self._endpoints.update({int(key): str(place) for key, place in answer.items()})

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call an operation that may be repeated; try again once after a new lookup.

        Raises: the shard's error; Unavailable when the shard does not answer.
        """
        try:
            return self._call(shard, op, args)
        except Unavailable:
            self.refresh()
            return self._call(shard, op, args)

    def known(self, name: str) -> TopicRoute | None:
        """A topic's queues, if they were looked up before."""
        return self._topics.get(name)

    def topic(self, name: str) -> TopicRoute:
        """A topic's queues. Raises: Rejected for an unknown topic; Unavailable."""
        with self._lock:
            route = self._topics.get(name)
            shards = sorted(self._endpoints)
        if route is not None:
            return route
        if not shards:
            raise Unavailable("no shard is known")
        try:
            found = self._topics_of(shards)
        except Unavailable:
            self.refresh()
            found = self._topics_of(shards)
        with self._lock:
            # Known topics stay: a shard that missed a topic's creation does not know it yet.
            self._topics = self._topics | {
                each: TopicRoute(each, int(facts["queues"]), tuple(facts["shards"]))
                for each, facts in found.items()
            }
            route = self._topics.get(name)
        if route is None:
            check_topic_name(name)
            if name in SYSTEM_TOPICS or name.startswith("rmq_sys_"):
                raise Rejected(
                    f"topic {name} is a system topic; choose another name",
                    field="topic",
                    limit="not a system topic",
                )
            raise Rejected(
                f"topic {name!r} does not exist; create it first: "
                f"cluster.create_topic({name!r}) or `raymq topic create {name}`",
                field="topic",
                limit="an existing topic",
            )
        return route

    def _topics_of(self, shards: list[int]) -> dict[str, Any]:
        """All topics, from the first shard that answers."""
        return first(
            shards,
            lambda shard: self._call(shard, "topics", {}),
            timeout_s=CALL_TIMEOUT_S,
            in_turn=self._by_ray,
        )[1]

    @property
    def _by_ray(self) -> bool:
        return self._transport == "ray"

    def _call(
        self, shard: int, op: str, args: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        connection = self.connect(shard)
        try:
            return connection.call(op, args, timeout=timeout_s)
        finally:
            connection.close()
