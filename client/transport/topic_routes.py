"""The topics of a cluster as clients know them: their queues, where these are, and how their messages are typed."""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from raymq.client.arguments import check_number
from raymq.client.messages.topic_values import TopicValues
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    DeliveryUnknown,
    RayMQError,
    Rejected,
    TopicMissing,
    Unavailable,
)
from raymq.store.base.format import check_topic_name
from raymq.store.state.topics import refuse_system_topic

from .ask import LEADER_TIMEOUT_S, in_thread
from .flight_client import CALL_TIMEOUT_S

logger = logging.getLogger("raymq")

#: how often clients look whether their topics have got more queues
TOPICS_AGE_S = 30.0


class TopicRoute(NamedTuple):
    """A topic: queue q lives on shard `shards[q % len(shards)]`."""

    name: str
    queues: int
    shards: tuple[int, ...]
    #: queues at its creation: the others were added later
    first_queues: int = 0
    values: TopicValues = TopicValues("")
    #: how often topics of this name were deleted before
    generation: int = 0
    is_compacted: bool = False

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

    def is_older_than(self, other: TopicRoute) -> bool:
        """Whether the other one has more queues or columns, or was made after this one had been deleted."""
        if self.generation != other.generation:
            return self.generation < other.generation
        columns = len(self.values.names), len(other.values.names)
        return self.queues < other.queues or columns[0] < columns[1]

    def queues_of(self, shard: int) -> list[int]:
        """The ids of the queues that a shard stores."""
        return [queue_id for queue_id in range(self.queues) if self.shard_of(queue_id) == shard]


def _topic_route(name: str, facts: dict[str, Any]) -> TopicRoute:
    """The route of a topic, of an answer of operation `topics`."""
    queues = int(facts["queues"])
    first = int((facts.get("former_queues") or [queues])[0])
    values, generation = TopicValues.of(name, facts), int(facts.get("generation", 0))
    is_compacted = bool(facts.get("compacted"))
    return TopicRoute(name, queues, tuple(facts["shards"]), first, values, generation, is_compacted)


class ShardRoutes(Protocol):
    """What topics are looked up by: `Routes`."""

    transport: Any

    @property
    def fails_over(self) -> bool:
        """Whether another replica may lead than before."""

    def known_shards(self) -> list[int]:
        """The shards with an endpoint."""

    def first(self, op: str, args: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """The first answer of a shard."""

    def ask(
        self, shards: Iterable[int], op: str, args: Mapping[str, object], timeout_s: float
    ) -> Iterator[tuple[int, Any]]:
        """The answers of shards."""

    def call(
        self, shard: int, op: str, args: Mapping[str, object], timeout_s: float
    ) -> dict[str, Any]:
        """An answer of a shard's leader."""

    def refresh(self) -> None:
        """Look the endpoints up again."""

    def learn_shards(self, shards: Iterable[int]) -> None:
        """Look up shards that are new."""

    def find_leaders(self, shards: Iterable[int]) -> set[int]:
        """Ask the replicas who leads."""


class TopicRoutes:
    """The topics. Threads: any."""

    def __init__(self, routes: ShardRoutes) -> None:
        self._routes = routes
        self._clock = Clock()
        #: guards the fields below
        self._lock = threading.Lock()
        self._topics: dict[str, TopicRoute] = {}
        #: topics whose schema this version does not know
        self._unusable: dict[str, Rejected] = {}
        #: when all topics were asked for last
        self._asked_s = -math.inf

    def cached(self, name: str) -> TopicRoute | None:
        """A topic's queues, if they were looked up before."""
        return self._topics.get(name)

    def look_again(self, names: Iterable[str]) -> None:
        """Ask for topics that are known: they may have been deleted and made again. Never raises for a silent shard."""
        if any(name in self._topics for name in names):
            # The first shard is the first one that deletes a topic, and makes it again.
            with contextlib.suppress(Unavailable, DeliveryUnknown):
                found = self._routes.call(0, "topics", {}, CALL_TIMEOUT_S)
                self.forget(name for name in names if name not in found)
                self.note(found)

    def forget(self, names: Iterable[str]) -> None:
        """Look topics up again when they are needed next: they were deleted."""
        with self._lock:
            gone = set(names)
            self._topics = {name: route for name, route in self._topics.items() if name not in gone}

    def generations(self, names: Iterable[str]) -> dict[str, int] | None:
        """Topic -> how often it was deleted before, of those of which that is so; None: of none."""
        routes = (self._topics.get(name) for name in names)
        found = {route.name: route.generation for route in routes if route and route.generation}
        return found or None

    def known(self) -> list[TopicRoute]:
        """The topics that were looked up before."""
        return list(self._topics.values())

    def matching(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """The names of topics, ascending, as the cluster has them now. Raises: Unavailable."""
        # The first shard is the first one that makes a topic, and that deletes it.
        found = self._routes.call(0, "topics", {}, CALL_TIMEOUT_S)
        self.forget(self._topics.keys() - found.keys())
        self.note(found)
        return sorted(name for name in found if name in self._topics and is_wanted(name))

    def find(self, name: str, *, follow_s: float | None = None) -> TopicRoute:
        """A topic's queues.

        Args: `follow_s`: how long leaders are looked for, if they may change; None: as long as a call may take.
        Raises: Rejected for an unknown topic; Unavailable.
        """
        route = self._topics.get(name)
        if route is not None:
            return route

        if self._routes.fails_over:
            self.note(
                self._routes.first("topics", {}, CALL_TIMEOUT_S if follow_s is None else follow_s)
            )
            if name not in self._topics:
                self._ask_leaders()
        else:
            try:
                found = self._routes.first("topics", {}, CALL_TIMEOUT_S)
            except Unavailable:
                self._routes.refresh()
                found = self._routes.first("topics", {}, CALL_TIMEOUT_S)
            self.note(found)
        route = self._topics.get(name)

        if route is None and name in self._unusable:
            raise self._unusable[name]
        if route is None:
            check_topic_name(name)
            refuse_system_topic(name)
            raise TopicMissing(
                f"topic {name!r} does not exist; create it first: "
                f"cluster.create_topic({name!r}) or `raymq topic create {shlex.quote(name)}`",
                field="topic",
                limit="an existing topic",
            )

        return route

    def note(self, found: dict[str, Any]) -> None:
        """Learn topics. Args: `found`: an answer of operation `topics`."""
        routes, unusable = {}, {}
        for name, facts in found.items():
            try:
                routes[name] = _topic_route(name, facts)
            except Rejected as error:
                # A newer client made the topic. The others are as usable as before.
                unusable[name] = error
        self._routes.learn_shards(shard for route in routes.values() for shard in route.shards)
        with self._lock:
            self._asked_s = self._clock.monotonic()
            # What is known stays: a shard or a follower may not have heard of a topic or of what was added to it yet.
            for name, known in self._topics.items():
                if name not in routes or routes[name].is_older_than(known):
                    routes[name] = known
            self._topics = routes
            self._unusable = unusable

    def look_for_queues(self, on_looked: Callable[[], None] = lambda: None) -> None:
        """Learn which topics have got more queues, if that was not asked for within TOPICS_AGE_S. Never raises.

        It does so in a thread, unless Ray carries the calls: a process that leaves Ray during a call dies, and no close
        waits for the thread. Args: `on_looked`: called afterwards. Callers: a thread that `close` waits for.
        """
        with self._lock:
            now_s = self._clock.monotonic()
            if now_s - self._asked_s < TOPICS_AGE_S:
                return
            self._asked_s = now_s

        def look() -> None:
            try:
                self.note(self._routes.first("topics", {}, LEADER_TIMEOUT_S))
                on_looked()
            except RayMQError:
                # A failure is met again, and reported, by those who send or read.
                return
            except Exception:
                logger.exception("queues that were added to topics could not be looked for")

        if self._routes.transport == "ray":
            look()
        else:
            in_thread(look, "raymq-topics")

    def _ask_leaders(self) -> None:
        """Learn the topics that a follower, which answered first, does not know yet."""
        shards = self._routes.known_shards()
        self._routes.find_leaders(shards)
        for _, answer in self._routes.ask(shards, "topics", {}, LEADER_TIMEOUT_S):
            if not isinstance(answer, RayMQError):
                self.note(answer)
