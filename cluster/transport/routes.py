"""Addresses of shards, and topics. Both are looked up again after a connection breaks. No Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from raymq.cluster.arguments import check_number
from raymq.cluster.paths import actor_name
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.base.format import check_topic_name
from raymq.store.state.topics import refuse_system_topic

from .ask import ask, first, in_thread
from .connection import Connection, FetchStream, Transport, open_connection
from .flight_client import CALL_TIMEOUT_S

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

    from .ray_connection import RayShardConnection

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


@dataclass(eq=False, repr=False)
class Routes:
    """shard -> endpoint, and the topics. Threads: any."""

    #: shard -> last known host:port, or the name of its actor
    endpoints: dict[int, str]
    token: str
    cluster_id: str | None = None
    resolver: Resolver | None = None
    ca: bytes | None = None
    transport: Transport = "flight"

    def __post_init__(self) -> None:
        self.endpoints = dict(self.endpoints)
        self._topics: dict[str, TopicRoute] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, cluster: Cluster) -> Routes:
        """The routes of a cluster handle."""
        endpoints, resolver = cluster.endpoints, cluster.resolver
        if cluster.transport == "ray":
            shards = range(cluster.shards)
            endpoints = {each: actor_name(cluster.name, each, 0, "commit_log") for each in shards}
            # The actor's name stays, wherever the actor runs.
            resolver = dict
        return cls(
            endpoints,
            cluster.token,
            cluster_id=cluster.cluster_id,
            resolver=resolver,
            ca=cluster.ca,
            transport=cluster.transport,
        )

    def connect(self, shard: int) -> Connection:
        """A connection to the last known address of a shard. Raises: Unavailable when none is known."""
        with self._lock:
            endpoint = self.endpoints.get(shard)
        if endpoint is None:
            raise Unavailable(f"shard {shard} does not serve yet; see `raymq status`", shard=shard)
        return open_connection(
            self.transport,
            endpoint,
            token=self.token,
            cluster_id=self.cluster_id,
            shard=shard,
            ca=self.ca,
        )

    def fetch_stream(self, shard: int) -> FetchStream:
        """A stream for reads. Closing it closes its connection. Raises: Unavailable."""
        # A connection that is closed here stays open until its stream is closed.
        with closing(self.connect(shard)) as connection:
            return connection.fetch_stream()

    def refresh(self) -> None:
        """Look up all endpoints again, through the resolver or any shard that answers.

        Never raises: shards that do not answer keep their last known endpoints.
        """
        try:
            if self.resolver is not None:
                found = self.resolver()
            else:
                answer = self.first("routes", {}, LOOKUP_TIMEOUT_S)
                found = {int(key): str(endpoint) for key, endpoint in answer.items()}
        except RayMQError:
            return
        with self._lock:
            self.endpoints.update(found)

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call an operation that may be repeated, and try again once after a new lookup.

        Raises: the shard's error; Unavailable when the shard does not answer.
        """
        try:
            return self.call_once(shard, op, args, CALL_TIMEOUT_S)
        except Unavailable:
            self.refresh()
            return self.call_once(shard, op, args, CALL_TIMEOUT_S)

    def cached_topic(self, name: str) -> TopicRoute | None:
        """A topic's queues, if they were looked up before."""
        return self._topics.get(name)

    def topic(self, name: str) -> TopicRoute:
        """A topic's queues. Raises: Rejected for an unknown topic; Unavailable."""
        route = self._topics.get(name)
        if route is not None:
            return route

        try:
            found = self.first("topics", {}, CALL_TIMEOUT_S)
        except Unavailable:
            self.refresh()
            found = self.first("topics", {}, CALL_TIMEOUT_S)

        with self._lock:
            # Known topics stay: a shard that missed a topic's creation does not know it yet.
            self._topics = self._topics | {
                each: TopicRoute(each, int(facts["queues"]), tuple(facts["shards"]))
                for each, facts in found.items()
            }
            route = self._topics.get(name)

        if route is None:
            check_topic_name(name)
            refuse_system_topic(name)
            raise Rejected(
                f"topic {name!r} does not exist; create it first: "
                f"cluster.create_topic({name!r}) or `raymq topic create {name}`",
                field="topic",
                limit="an existing topic",
            )

        return route

    def first(self, op: str, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of the first shard that answers. Raises: Unavailable when no shard is known; as `ask.first`."""
        with self._lock:
            shards = sorted(self.endpoints)
        if not shards:
            raise Unavailable("no shard is known")

        return first(self.ask(shards, op, args, timeout_s))

    def ask(
        self, shards: Iterable[int], op: str, args: dict[str, Any], timeout_s: float
    ) -> Iterator[tuple[int, dict[str, Any] | RayMQError]]:
        """Call an operation of all these shards at the same time. Yields: (shard, answer or error), like `ask.ask`."""

        def begin(shard: int) -> Future[dict[str, Any]]:
            if self.transport == "ray":
                # Ray answers futures without a thread of ours.
                return cast("RayShardConnection", self.connect(shard)).begin(op, args)
            call = partial(self.call_once, shard, op, args, timeout_s)
            return in_thread(call, f"raymq-ask-{shard}")

        return ask(shards, begin, timeout_s=timeout_s)

    def call_once(
        self, shard: int, op: str, args: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """One try, over a connection of its own: a thread that no caller waits for any more leaves none open."""
        with closing(self.connect(shard)) as connection:
            return connection.call(op, args, timeout=timeout_s)
