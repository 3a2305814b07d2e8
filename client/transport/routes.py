"""Addresses of shards, and topics. Both are looked up again after a connection breaks. No Ray.

With more than two replicas the leader of a shard may change at any time, without notice. A route is therefore a hint:
an endpoint, and the epoch in which the replica there leads. A higher epoch wins. After a failure the leader is looked
for:

    1. The refusal of a replica that does not lead names the leader that this replica knows.
    2. All known replicas of the shard are asked at the same time who leads (operation `leader`).
    3. If none of them answers, the resolver or the other shards say where the leader was last.

A search that finds no newer leader is repeated after a short pause, until the time of the caller is up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from raymq.replication.quorum import can_fail_over
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    DeliveryUnknown,
    NotLeading,
    RayMQError,
    Unavailable,
    UntrustedReplica,
    UntrustedServer,
)
from raymq.store.base.status import PutStatus

from .actor_names import actor_name
from .ask import (
    LEADER_TIMEOUT_S,
    SILENT_MS,
    ask,
    first,
    in_thread,
    leads_no_more,
    may_lead_no_more,
    search_pauses,
)
from .connection import (
    Connection,
    FetchStream,
    FetchWatch,
    FollowedFetchStream,
    LeaseStream,
    Transport,
    open_connection,
)
from .flight_client import CALL_TIMEOUT_S
from .kept_connections import KeptConnections
from .leader_route import LeaderRoute, Resolver, RoutedCluster
from .topic_routes import TopicRoutes

if TYPE_CHECKING:
    from .flight_client import ShardConnection
    from .ray_connection import RayShardConnection

logger = logging.getLogger("raymq")

#: a lookup must not delay the tries of other endpoints for long
LOOKUP_TIMEOUT_S = 5.0
#: a new stream asks for the endpoints of all replicas if they were asked for longer ago
REPLICAS_AGE_S = 30.0


def _actor_names(cluster: str, shard: int, replicas: int) -> dict[int, str]:
    """Replica -> the name of its actor."""
    return {each: actor_name(cluster, shard, each, "commit_log") for each in range(replicas)}


@dataclass(eq=False, repr=False)
class Routes:
    """shard -> endpoint of its leader, and the topics. Threads: any."""

    #: shard -> last known host:port of its leader, or the name of its actor
    endpoints: dict[int, str]
    token: str
    cluster_id: str | None = None
    resolver: Resolver | None = None
    ca: bytes | None = None
    transport: Transport = "flight"
    #: copies of each shard
    replicas: int = 1
    #: shard -> replica -> its last known host:port, or the name of its actor
    replica_endpoints: dict[int, dict[int, str]] = field(default_factory=dict)
    #: with transport="ray": the name of the cluster, a part of the names of its actors
    cluster_name: str = ""
    #: connections for calls stay open until `close`. Otherwise each call opens one
    keeps_connections: bool = False

    def __post_init__(self) -> None:
        self.endpoints = dict(self.endpoints)
        self.replica_endpoints = dict(self.replica_endpoints)
        self.topics = TopicRoutes(self)
        #: guards the fields above and these
        self._lock = threading.Lock()
        #: shard -> epoch of the leader at its endpoint, if it is known
        self._epochs: dict[int, int] = {}
        #: shard -> its route when a try failed last, until a try succeeds
        self._failed: dict[int, LeaderRoute] = {}
        #: when the endpoints of all replicas were asked for last
        self._asked_s = -math.inf
        #: shard -> the unclean recoveries that a warning was logged for
        self._recoveries: dict[int, int] = {}
        self._clock = Clock()
        self._watch = FetchWatch()
        self._kept: KeptConnections | None = None
        if self.keeps_connections and self.transport == "flight":
            self._kept = KeptConnections(self._connect_by_flight, self._clock)

    @classmethod
    def of(cls, cluster: RoutedCluster, *, keeps_connections: bool = False) -> Routes:
        """The routes of a cluster handle. Args: `keeps_connections`: for callers that close them."""
        endpoints, resolver = cluster.endpoints, cluster.resolver
        replica_endpoints = cluster.replica_endpoints
        if cluster.transport == "ray":
            replica_endpoints = {
                shard: _actor_names(cluster.name, shard, cluster.replicas)
                for shard in range(cluster.shards)
            }
            endpoints = {shard: names[0] for shard, names in replica_endpoints.items()}
            # The actors' names stay, wherever the actors run.
            resolver = dict

        return cls(
            endpoints,
            cluster.token,
            cluster_id=cluster.cluster_id,
            resolver=resolver,
            ca=cluster.ca,
            transport=cluster.transport,
            replicas=cluster.replicas,
            replica_endpoints=replica_endpoints,
            cluster_name=cluster.name if cluster.transport == "ray" else "",
            keeps_connections=keeps_connections,
        )

    @property
    def fails_over(self) -> bool:
        """Whether the leader of a shard may change. Of two replicas only replica 0 leads."""
        return can_fail_over(self.replicas)

    # --- connections ------------------------------------------------------------------------------

    def connect(self, shard: int) -> Connection:
        """A connection to the last known address of a shard. Raises: Unavailable when none is known."""
        return self._connect_to(shard, self._endpoint(shard))

    def _endpoint(self, shard: int) -> str:
        with self._lock:
            endpoint = self.endpoints.get(shard)
        if endpoint is None:
            raise Unavailable(f"shard {shard} does not serve yet; see `raymq status`", shard=shard)
        return endpoint

    def _connect_by_flight(self, shard: int, endpoint: str) -> ShardConnection:
        return cast("ShardConnection", self._connect_to(shard, endpoint))

    def _connect_to(self, shard: int, endpoint: str) -> Connection:
        return open_connection(
            self.transport,
            endpoint,
            token=self.token,
            cluster_id=self.cluster_id,
            shard=shard,
            ca=self.ca,
        )

    def connect_leader(self, shard: int) -> tuple[Connection, LeaderRoute]:
        """A connection for a stream to the leader of a shard, and its route.

        If the leader may change, it is looked for after a failure, and has answered on the new connection: a stream to
        a stopped process could neither be opened nor left for long.
        Raises: Unavailable when no replica leads, as far as is known: the caller pauses, and tries again.
        """
        if not self.fails_over:
            connection = self.connect(shard)
            return connection, LeaderRoute(connection.endpoint)

        with self._lock:
            failed = shard in self._failed
        if failed and not self.knows_next(shard):
            self.find_leaders([shard])

        tried = self.route(shard)
        try:
            connection = self.connect(shard)
            try:
                return connection, self._confirm(shard, tried, connection)
            except BaseException:
                connection.close()
                raise
        except RayMQError as found:
            error = self._judged([shard], found)
            self.heed(shard, tried, error)
            if error is not found:
                raise error from error.__cause__
            if isinstance(error, Unavailable) or not may_lead_no_more(error):
                raise
            message = f"shard {shard}: {tried.endpoint} does not answer: {error}"
            raise Unavailable(message, shard=shard) from error

    def _confirm(self, shard: int, tried: LeaderRoute, connection: Connection) -> LeaderRoute:
        """The route of a replica that says that it leads a shard. Raises: Unavailable when it does not."""
        answer = connection.call("leader", {}, timeout=LEADER_TIMEOUT_S)
        named = self._note_answer(shard, answer)
        if named is None or named.endpoint != connection.endpoint:
            raise NotLeading(
                f"shard {shard}: the replica at {connection.endpoint} does not lead",
                field="leader",
                shard=shard,
            )

        if self.transport == "flight" and self._clock.monotonic() - self._asked_s > REPLICAS_AGE_S:
            # A stream can do without this answer.
            with contextlib.suppress(RayMQError):
                self._asked_s = self._clock.monotonic()
                self._note_replicas(connection.call("replicas", {}, timeout=LEADER_TIMEOUT_S))
        with self._lock:
            self._failed.pop(shard, None)
        return LeaderRoute(named.endpoint, max(named.epoch, tried.epoch))

    def fetch_stream(self, shard: int) -> LeaseStream:
        """A stream for reads and leases. Closing it closes its connection. Raises: Unavailable."""
        connection, route = self.connect_leader(shard)
        try:
            # A connection that is closed here stays open until its stream is closed.
            with closing(connection):
                stream = connection.fetch_stream()
        except RayMQError as error:
            self.heed(shard, route, error)
            raise

        if self.transport == "ray" and not self.fails_over:
            # Each of its calls has a time limit, and a question would have none.
            return stream
        ask = self.ask_who_leads if self.fails_over else self._ask_whether_it_answers
        return FollowedFetchStream(
            stream,
            self._watch,
            on_failure=partial(self.heed, shard, route),
            ask_who_leads=partial(ask, shard, route),
        )

    def _ask_whether_it_answers(
        self, shard: int, route: LeaderRoute, on_silent: Callable[[], None]
    ) -> None:
        """Ask a shard that only one replica can lead for anything, without waiting.

        Calls `on_silent`, on another thread, if no answer comes within LEADER_TIMEOUT_S. A shard that answers only
        takes long for its fetch, and is not left.
        """

        def take(done: Future[dict[str, object]]) -> None:
            error = done.exception()
            if isinstance(error, Unavailable | DeliveryUnknown):
                on_silent()

        asked = self.begin(shard, route.endpoint, "leader", {}, LEADER_TIMEOUT_S)
        asked.add_done_callback(take)

    def replica_stream(self, shard: int, endpoint: str, silent_ms: int) -> FetchStream:
        """A stream for reads from one replica. It breaks when an answer is late by `silent_ms`.

        Raises: RayMQError, after LEADER_TIMEOUT_S if the replica does not answer.
        """
        with closing(self._connect_to(shard, endpoint)) as connection:
            # A stream to a stopped process could neither be opened nor left for long.
            answer = connection.call("leader", {}, timeout=LEADER_TIMEOUT_S)
            if self.fails_over:
                self._note_answer(shard, answer)
            stream = connection.fetch_stream()
        return FollowedFetchStream(
            stream,
            self._watch,
            on_failure=lambda error: None,
            # The reader goes to another replica, even if this one is the leader still.
            ask_who_leads=lambda leave: leave(),
            silent_ms=silent_ms,
        )

    def known_shards(self) -> list[int]:
        """The shards with an endpoint."""
        with self._lock:
            return sorted(self.endpoints)

    def refresh(self) -> None:
        """Look up all endpoints again, through the resolver or any shard that answers.

        Never raises: shards that do not answer keep their last known endpoints. If leaders may change, `connect_leader`
        and `call` look for them instead.
        """
        if self.fails_over:
            return
        found = self._look_up(LOOKUP_TIMEOUT_S)
        with self._lock:
            self.endpoints.update(found)
        self._learn_size()

    def _learn_size(self) -> None:
        """Ask whether the shards have got further replicas, so that another one may lead. Never raises."""
        with self._lock:
            shards = sorted(self.endpoints)
        with contextlib.suppress(RayMQError):
            facts = first(self.ask(shards, "describe", {}, LEADER_TIMEOUT_S))
            replicas = int(facts.get("replicas", 1))
            if replicas <= self.replicas:
                return
            if self.transport == "ray":
                self.replica_endpoints = {
                    shard: _actor_names(self.cluster_name, shard, replicas) for shard in shards
                }
            else:
                self._note_replicas(first(self.ask(shards, "replicas", {}, LEADER_TIMEOUT_S)))
            self.replicas = replicas

    def _look_up(self, timeout_s: float) -> Mapping[int, str]:
        """The endpoints of leaders, possibly outdated, as the resolver or the first shard that answers says."""
        try:
            if self.resolver is not None:
                return self.resolver()
            with self._lock:
                shards = sorted(self.endpoints)
            answer = first(self.ask(shards, "routes", {}, timeout_s)) if shards else {}
        except Exception as error:
            # The threads that send and fetch look endpoints up, and try again: none of them may end by this.
            logger.debug("the endpoints of the leaders were not found: %r", error)
            return {}
        return {int(key): str(endpoint) for key, endpoint in answer.items()}

    def learn_shards(self, shards: Iterable[int]) -> None:
        """Look for those of these shards of which no endpoint is known: they were added later. Never raises."""
        with self._lock:
            known = sorted(self.endpoints)
        missing = set(shards) - set(known)
        if not missing:
            return

        if self.transport == "ray":
            found = {each: _actor_names(self.cluster_name, each, self.replicas) for each in missing}
            with self._lock:
                self.replica_endpoints.update(found)
                self.endpoints.update({each: names[0] for each, names in found.items()})
            return

        self._note_missing(missing, self._look_up(LOOKUP_TIMEOUT_S))
        if not missing <= self.endpoints.keys():
            # A replica that was away when the shards were added does not know them.
            for _, answer in self.ask(known, "routes", {}, LOOKUP_TIMEOUT_S):
                if not isinstance(answer, RayMQError):
                    self._note_missing(missing, {int(each): answer[each] for each in answer})

        if self.fails_over:
            self.learn_replicas()
            self.find_leaders(missing)

    def _note_missing(self, missing: Iterable[int], found: Mapping[int, str]) -> None:
        with self._lock:
            for shard in missing:
                if shard in found:
                    self.endpoints.setdefault(shard, str(found[shard]))

    # --- who leads --------------------------------------------------------------------------------

    def route(self, shard: int) -> LeaderRoute:
        """The last known route to the leader of a shard; its endpoint is empty when none is known."""
        with self._lock:
            return LeaderRoute(self.endpoints.get(shard, ""), self._epochs.get(shard, 0))

    def note(self, shard: int, route: LeaderRoute) -> None:
        """Take a hint, if its epoch is higher than the known one: an older hint never replaces a newer one."""
        with self._lock:
            known = LeaderRoute(self.endpoints.get(shard, ""), self._epochs.get(shard, 0))
            failed = self._failed.get(shard)
            # A leader is where another replica knows it, if it is not where it was known here.
            is_elsewhere = (
                route.epoch == known.epoch
                and failed is not None
                and failed.endpoint == known.endpoint
            )
            if route.epoch > known.epoch or is_elsewhere:
                self.endpoints[shard], self._epochs[shard] = route

    def heed(self, shard: int, tried: LeaderRoute, error: RayMQError) -> None:
        """Note that a try at a route failed, and the leader that a refusal names."""
        if not self.fails_over or not may_lead_no_more(error):
            return
        # The refusal has the address of the leader's Flight server, not the name of its actor.
        if isinstance(error, NotLeading) and self.transport == "flight":
            named, epoch = error.fields.get("endpoint"), error.fields.get("epoch")
            if isinstance(named, str) and isinstance(epoch, int):
                self.note(shard, LeaderRoute(named, epoch))
        with self._lock:
            self._failed[shard] = tried

    def _judged(self, shards: Iterable[int], error: RayMQError) -> RayMQError:
        """The error of a try at the leader of one of these shards. Unavailable if another replica may soon lead.

        A replica whose certificate is refused is away, if another one is accepted: it hands over. If none is accepted,
        this client has the wrong authority, or all certificates have expired, and no retry helps.
        """
        if not self.fails_over or not isinstance(error, UntrustedServer):
            return error
        asked = [(shard, endpoint) for shard in shards for endpoint in self._candidates(shard)]
        _, answered = self._ask_replicas(asked)
        if not answered:
            return error
        away = UntrustedReplica(error.message, field="certificate")
        away.__cause__ = error
        return away

    def knows_next(self, shard: int) -> bool:
        """Whether a newer leader than that of the last failed try is known: the next try needs no pause."""
        with self._lock:
            failed = self._failed.get(shard)
            return failed is not None and self._epochs.get(shard, 0) > failed.epoch

    def find_leaders(self, shards: Iterable[int]) -> set[int]:
        """Ask all known replicas of these shards, at the same time, who leads. Never raises.

        Returns: the shards whose leader has answered.
        """
        wanted = set(shards)
        asked = [(shard, endpoint) for shard in wanted for endpoint in self._candidates(shard)]
        led, answered = self._ask_replicas(asked)

        if answered != wanted:
            found = self._look_up(LEADER_TIMEOUT_S)
            more = [(shard, found[shard]) for shard in wanted - answered if shard in found]
            led |= self._ask_replicas([each for each in more if each not in asked])[0]
        return led

    def _candidates(self, shard: int) -> list[str]:
        """The known endpoints of a shard's replicas, the leader's first."""
        with self._lock:
            known = [self.endpoints.get(shard, ""), *self.replica_endpoints.get(shard, {}).values()]
        return [endpoint for endpoint in dict.fromkeys(known) if endpoint]

    def _ask_replicas(self, asked: Sequence[tuple[int, str]]) -> tuple[set[int], set[int]]:
        """Ask replicas, given as (shard, endpoint), who leads, until the leader of each shard has answered.

        Returns: the shards whose leader has answered, and those of which any replica has.
        """

        def begin(number: int) -> Future[dict[str, Any]]:
            return self.begin(*asked[number], "leader", {}, LEADER_TIMEOUT_S)

        led: set[int] = set()
        answered: set[int] = set()
        for number, answer in ask(range(len(asked)), begin, timeout_s=LEADER_TIMEOUT_S):
            if isinstance(answer, RayMQError):
                continue
            shard, endpoint = asked[number]
            answered.add(shard)
            named = self._note_answer(shard, answer)
            if named is not None and named.endpoint == endpoint == self.route(shard).endpoint:
                led.add(shard)
            if all(each in led for each, _ in asked):
                # A replica that hangs need not be waited for.
                break

        return led, answered

    def _note_answer(self, shard: int, answer: dict[str, Any]) -> LeaderRoute | None:
        """Take the answer of operation `leader` as a hint. Returns: the leader that it names."""
        replica, endpoint = answer["replica"], answer["endpoint"]
        self._warn_of_loss(shard, int(answer.get("unclean_recoveries", 0)))
        if self.transport == "ray" or endpoint is None:
            with self._lock:
                endpoint = self.replica_endpoints.get(shard, {}).get(replica)
        if endpoint is None:
            return None
        route = LeaderRoute(str(endpoint), int(answer["epoch"]))
        self.note(shard, route)
        return route

    def _warn_of_loss(self, shard: int, recoveries: int) -> None:
        """Warn once if a majority of the shard's replicas was lost."""
        if recoveries > self._recoveries.get(shard, 0):
            self._recoveries[shard] = recoveries
            logger.warning(
                "shard %d: DATA-LOSS-POSSIBLE: a majority of its replicas was lost, %d time(s) so far; messages with "
                "receipts may be missing (raymq shard describe %d)",
                shard,
                recoveries,
                shard,
            )

    def ask_who_leads(self, shard: int, route: LeaderRoute, on_moved: Callable[[], None]) -> None:
        """Ask a shard's replicas who leads, without waiting.

        Calls `on_moved`, on any thread, if a replica elsewhere leads in a higher epoch than that of `route`.
        """

        def take(done: Future[dict[str, object]]) -> None:
            if done.exception() is None:
                self._note_answer(shard, done.result())
                if self._leads_elsewhere(shard, route):
                    on_moved()

        for endpoint in self._candidates(shard):
            # An actor that is gone cannot be asked.
            with contextlib.suppress(RayMQError):
                asked = self.begin(shard, endpoint, "leader", {}, LEADER_TIMEOUT_S)
                asked.add_done_callback(take)

    def _leads_elsewhere(self, shard: int, route: LeaderRoute) -> bool:
        known = self.route(shard)
        return known.epoch > route.epoch and known.endpoint != route.endpoint

    def _note_replicas(self, answer: dict[str, Any]) -> None:
        """Keep the answer of operation `replicas`."""
        found = {
            int(shard): {int(replica): str(endpoint) for replica, endpoint in replicas.items()}
            for shard, replicas in answer.items()
        }
        with self._lock:
            self.replica_endpoints.update(found)

    def replicas_of(self, shard: int) -> dict[int, str]:
        """Replica -> its last known endpoint."""
        with self._lock:
            return dict(self.replica_endpoints.get(shard, {}))

    def learn_replicas(self, age_s: float = math.inf) -> None:
        """Ask for the endpoints of all replicas, unless they were asked for within `age_s`. Never raises.

        The leader may be away later, so they are asked for early.
        """
        if self.transport == "ray" or self._clock.monotonic() - self._asked_s < age_s:
            return
        self._asked_s = self._clock.monotonic()
        with self._lock:
            shards = sorted(self.endpoints)
        with contextlib.suppress(RayMQError):
            self._note_replicas(first(self.ask(shards, "replicas", {}, LEADER_TIMEOUT_S)))

    # --- calls ------------------------------------------------------------------------------------

    def call(
        self,
        shard: int,
        op: str,
        args: Mapping[str, object],
        timeout_s: float = CALL_TIMEOUT_S,
        *,
        on_failed: Callable[[RayMQError], None] = lambda error: None,
    ) -> dict[str, Any]:
        """Call an operation that may be repeated, and try again once after a new lookup.

        If the leader may change, the call follows it for up to `timeout_s`.

        Args: `on_failed`: gets the error of each try but the last one.
        Raises: the shard's error; Unavailable when the shard does not answer.
        """
        if self.fails_over:
            return self._call_leader(shard, op, args, timeout_s, on_failed)
        try:
            return self.call_once(shard, op, args, timeout_s)
        except Unavailable as error:
            on_failed(error)
            self.refresh()
            return self.call_once(shard, op, args, timeout_s)

    def _call_leader(
        self,
        shard: int,
        op: str,
        args: Mapping[str, object],
        timeout_s: float,
        on_failed: Callable[[RayMQError], None],
    ) -> dict[str, object]:
        """Call an operation at the leader of a shard, whichever replica that is by then."""
        deadline_s = self._clock.monotonic() + timeout_s
        pauses = search_pauses()
        #: the leader that has refused the call, for a reason that another leader need not have
        refused: LeaderRoute | None = None

        while True:
            tried = self.route(shard)
            try:
                answer = self._call_at(shard, tried, op, args, deadline_s)
            except RayMQError as found:
                error = self._judged([shard], found)
                self.heed(shard, tried, error)
                left_s = deadline_s - self._clock.monotonic()
                if left_s <= 0 or not may_lead_no_more(error):
                    raise error from error.__cause__
                on_failed(error)
                if self.knows_next(shard):
                    continue

                self._clock.sleep_ms(min(next(pauses), 1000 * left_s))
                led = shard in self.find_leaders([shard])
                if led and not leads_no_more(error) and not self.knows_next(shard):
                    if isinstance(error, DeliveryUnknown) or refused == tried:
                        raise error from error.__cause__
                    refused = tried
                continue

            with self._lock:
                self._failed.pop(shard, None)
            self.learn_replicas()
            return answer

    def _call_at(
        self, shard: int, tried: LeaderRoute, op: str, args: Mapping[str, object], deadline_s: float
    ) -> dict[str, object]:
        """One try, which is given up when another replica leads meanwhile: its answer may never come.

        Raises: the shard's error; Unavailable; DeliveryUnknown when the time is up.
        """
        if not tried.endpoint:
            raise Unavailable(f"shard {shard} does not serve yet; see `raymq status`", shard=shard)
        left_s = max(0.1, deadline_s - self._clock.monotonic())
        answer = self.begin(shard, tried.endpoint, op, args, left_s)

        while True:
            left_s = deadline_s - self._clock.monotonic()
            # The call itself ends at the deadline, with the better error.
            with contextlib.suppress(FutureTimeoutError):
                return answer.result(max(0.0, min(SILENT_MS / 1000, left_s + 1)))
            if left_s <= -1:
                why = f"shard {shard} did not answer {op!r} in time; it may or may not have run"
                raise DeliveryUnknown(why, status=PutStatus.UNKNOWN_ERROR.value, shard=shard)
            self.find_leaders([shard])
            if self._leads_elsewhere(shard, tried):
                why = f"shard {shard}: {tried.endpoint} does not answer, and another replica leads"
                raise Unavailable(why, shard=shard)

    def first(self, op: str, args: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """The answer of the first shard that answers.

        If leaders may change, they are looked for until one answers. Only for operations that are answered at once.
        Raises: Unavailable when no shard is known; as `ask.first`.
        """
        with self._lock:
            shards = sorted(self.endpoints)
        if not shards:
            raise Unavailable("no shard is known")
        if not self.fails_over:
            return first(self.ask(shards, op, args, timeout_s))

        deadline_s = self._clock.monotonic() + timeout_s
        pauses = search_pauses()
        while True:
            try:
                answer = first(self.ask(shards, op, args, SILENT_MS / 1000))
            except RayMQError as found:
                error = self._judged(shards, found)
                if not may_lead_no_more(error):
                    raise
                self.find_leaders(shards)
                left_s = deadline_s - self._clock.monotonic()
                if left_s <= 0:
                    raise error from error.__cause__
                self._clock.sleep_ms(min(next(pauses), 1000 * left_s))
                continue

            self.learn_replicas()
            return answer

    def first_replica(
        self, op: str, args: Mapping[str, object], timeout_s: float
    ) -> dict[str, Any]:
        """The answer of the first replica of any shard that answers, whether one leads or not.

        Raises: as `first`.
        """
        with self._lock:
            shards = sorted(self.endpoints)
        asked = [(shard, endpoint) for shard in shards for endpoint in self._candidates(shard)]
        if not asked:
            raise Unavailable("no shard is known")

        def begin(number: int) -> Future[dict[str, Any]]:
            return self.begin(*asked[number], op, args, timeout_s)

        answers = ask(range(len(asked)), begin, timeout_s=timeout_s)
        return first(answers)

    def ask(
        self, shards: Iterable[int], op: str, args: Mapping[str, object], timeout_s: float
    ) -> Iterator[tuple[int, dict[str, Any] | RayMQError]]:
        """Call an operation of all these shards at the same time. Yields: (shard, answer or error), like `ask.ask`."""

        def begin(shard: int) -> Future[dict[str, Any]]:
            if self.transport == "ray":
                # Ray answers futures without a thread of ours.
                return cast("RayShardConnection", self.connect(shard)).begin(op, args)
            call = partial(self.call_once, shard, op, args, timeout_s)
            return in_thread(call, f"raymq-ask-{shard}")

        return ask(shards, begin, timeout_s=timeout_s)

    def begin(
        self, shard: int, endpoint: str, op: str, args: Mapping[str, object], timeout_s: float
    ) -> Future[dict[str, Any]]:
        """Begin a call of one replica. Raises: Unavailable when its actor is gone."""
        if self.transport == "ray":
            connection = cast("RayShardConnection", self._connect_to(shard, endpoint))
            return connection.begin(op, args)

        def call() -> dict[str, Any]:
            return self._call_endpoint(shard, endpoint, op, args, timeout_s)

        return in_thread(call, f"raymq-ask-{shard}")

    def call_once(
        self, shard: int, op: str, args: Mapping[str, object], timeout_s: float
    ) -> dict[str, object]:
        """One try, at the last known address of a shard. Raises: as `ShardConnection.call`."""
        return self._call_endpoint(shard, self._endpoint(shard), op, args, timeout_s)

    def _call_endpoint(
        self, shard: int, endpoint: str, op: str, args: Mapping[str, object], timeout_s: float
    ) -> dict[str, Any]:
        if self._kept is not None:
            return self._kept.call(shard, endpoint, op, args, timeout_s)
        # Of its own: a thread that no caller waits for any more leaves none open.
        with closing(self._connect_to(shard, endpoint)) as connection:
            return connection.call(op, args, timeout=timeout_s)

    def close(self) -> None:
        """Close the connections for calls. A later call opens one of its own."""
        if self._kept is not None:
            self._kept.close()
