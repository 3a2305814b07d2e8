"""`ClusterHandle`: what clients and operations need of a cluster: where its shards are, its token, and their calls."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raymq.actors.protocol.tls import parse_url
from raymq.replication.quorum import can_fail_over
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.config.delay_levels import DEFAULT_LEVEL_COUNT
from raymq.store.state.topics import SYSTEM_PREFIX

from . import forks
from .arguments import clean_token
from .transport.ask import moved
from .unclosed import warn_unclosed

if TYPE_CHECKING:
    from typing_extensions import Self

    from .transport.connection import Connection, Transport
    from .transport.leader_route import Resolver
    from .transport.routes import Routes

CALL_TIMEOUT_S = 30.0
#: a shard without an answer for this long is shown as UNREACHABLE
STATUS_TIMEOUT_S = 2.0


@dataclass(kw_only=True, eq=False, repr=False)
class ClusterHandle:
    """Where the shards of a running cluster are, and the calls of them. Threads may share it, and it pickles.

    Programs have a `raymq.Cluster`, which is one.
    """

    #: the name given at the first start
    name: str
    #: 32 hexadecimal digits, fixed at the first start
    cluster_id: str
    #: number of shards
    shards: int
    token: str
    #: shard -> last known host:port (with TLS tls://host:port) of its leader
    endpoints: dict[int, str]
    #: looks up changed endpoints; None: the shards themselves are asked
    resolver: Resolver | None = None
    #: the data directory; None on other machines
    data_dir: str | None = None
    #: the address of Ray, as `ray.init(address=...)` takes it, if known
    ray_address: str | None = None
    #: PEM certificates that must have signed the shards' certificates; None: see `flight_client.ShardConnection`
    ca: bytes | None = None
    #: shard -> node label of each replica, the leader's first; None: all on one machine
    placement: tuple[tuple[str, ...], ...] | None = None
    #: how shards are reached: "flight", or "ray" for programs that can reach only Ray's port
    transport: Transport = "flight"
    #: copies of each shard. With more than two any of them may lead
    replicas: int = 1
    #: how many delay levels the shards have
    delay_levels: int = DEFAULT_LEVEL_COUNT
    #: shard -> replica -> its last known host:port, to find the leaders when they have changed
    replica_endpoints: dict[int, dict[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.endpoints = dict(self.endpoints)
        self.replica_endpoints = dict(self.replica_endpoints)
        self._forks = forks.count
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        #: the routes of this handle's calls, if the leaders may change: they keep what was learned about them
        self._followed: Routes | None = None

    def __repr__(self) -> str:
        return f"<Cluster {self.name!r} {self.cluster_id[:8]} shards={self.shards}>"

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        for own in ("_lock", "_connections", "_followed", "_forks"):
            del state[own]
        return state

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        ClusterHandle.__post_init__(self)

    @classmethod
    def bootstrap(cls, url: str, *, token: str | None, ca: bytes | None = None) -> Self:
        """Connect to the cluster of the shard at raymq://host:port or, with TLS, raymq+tls://host:port.

        Raises: Rejected (no token, bad URL, a certificate that `ca` did not sign), Unavailable.
        """
        endpoint = parse_url(url)
        if endpoint is None:
            raise Rejected(
                f"{url!r}: use raymq://host:port or raymq+tls://host:port", field="target"
            )
        token = clean_token("token", token)
        if not token:
            raise Rejected(
                f"{url} needs the cluster's token: pass token=..., or set RAYMQ_TOKEN, to the content of the file "
                "`token` in the data directory",
                field="token",
            )
        from raymq.client.transport.flight_client import ShardConnection

        with closing(ShardConnection(endpoint, token, ca=ca)) as first:
            facts = first.call("describe", {}, timeout=CALL_TIMEOUT_S)
            routes = first.call("routes", {}, timeout=CALL_TIMEOUT_S)
            shard, replicas = int(facts["shard"]), int(facts.get("replicas", 1))
            leader, others = {"replica": 0, "endpoint": None}, {}
            if can_fail_over(replicas):
                leader = first.call("leader", {}, timeout=CALL_TIMEOUT_S)
                others = first.call("replicas", {}, timeout=CALL_TIMEOUT_S)

        endpoints = {int(each): str(routes[each]) for each in routes}
        if facts.get("replica", 0) == leader["replica"]:
            endpoints[shard] = endpoint
        elif leader["endpoint"] is not None:
            endpoints[shard] = str(leader["endpoint"])
        return cls(
            name=str(facts["name"]),
            cluster_id=str(facts["cluster_id"]),
            shards=int(facts["shards"]),
            token=token,
            endpoints=endpoints,
            ca=ca,
            replicas=replicas,
            delay_levels=int(facts.get("delay_levels", DEFAULT_LEVEL_COUNT)),
            replica_endpoints={
                int(each): {int(replica): str(there) for replica, there in found.items()}
                for each, found in others.items()
            },
        )

    def topics(self) -> dict[str, dict[str, Any]]:
        """Every topic except RayMQ's internal ones, as {name: {"queues": count, "shards": [...]}}.

        A compacted topic has "compacted": True as well. A topic that got queues later has "former_queues": the
        numbers of queues that it had before. A topic with a schema has "schema": its columns, each as {"name", "type",
        "nullable"}. One that allows null values has "allow_null_values": True.
        """
        if can_fail_over(self.replicas):
            # A former leader answers, too. It may lack the newest topics, or have lost its disk.
            self._find(range(self.shards))
        found = self.call(None, "topics", {})
        named = [shard for facts in found.values() for shard in facts["shards"]]
        self.learn_shards(1 + max(named, default=-1))
        return {
            name: facts
            for name, facts in sorted(found.items())
            if not name.startswith(SYSTEM_PREFIX)
        }

    def describe_topic(self, name: str) -> dict[str, Any]:
        """The queues of a topic, each holding the offsets [min_offset, max_offset), and its number of messages.

        Returns: {"topic", "queues": [{"queue_id", "shard", "min_offset", "max_offset"}...], "messages"}, and
        "compacted", "schema" and "allow_null_values" of those topics for which `topics` has them.
        Raises: Rejected when the topic does not exist.
        """
        topics = self.topics()
        if name not in topics:
            raise Rejected(
                f"topic {name!r} does not exist; create it: raymq topic create {shlex.quote(name)}",
                field="topic",
                limit=", ".join(topics) or "no topics",
            )

        shards = topics[name]["shards"]
        queues = []
        for shard in sorted(set(shards)):
            ranges = self.call(shard, "queue_ranges", {"topic": name})
            for queue, (low, high) in ranges.items():
                # A shard answers for its own queues only, also for those that `add_queues` does not show yet.
                is_shown = int(queue) < topics[name]["queues"]
                if is_shown and shards[int(queue) % len(shards)] == shard:
                    facts = {"queue_id": int(queue), "shard": shard}
                    queues.append({**facts, "min_offset": low, "max_offset": high})

        queues.sort(key=lambda facts: facts["queue_id"])
        options = ("compacted", "schema", "allow_null_values")
        return {
            "topic": name,
            **{option: topics[name][option] for option in options if option in topics[name]},
            "queues": queues,
            "messages": sum(facts["max_offset"] - facts["min_offset"] for facts in queues),
        }

    def close(self) -> None:
        """Close this handle's connections. The cluster continues, and the handle stays usable.

        In a forked child it does nothing, because the connections are the parent's.
        """
        if self._is_inherited:
            return
        with self._lock:
            connections, self._connections = self._connections, {}
            followed = self._followed
        for connection in connections.values():
            connection.close()
        if followed is not None:
            followed.close()

    def __del__(self) -> None:
        # None: the program ends, and Python has cleared this module.
        if self.__dict__.get("_connections") and forks is not None and not self._is_inherited:
            advice = "use it in a with block, or call close()"
            warn_unclosed(self, f"Cluster {self.name!r}", advice)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child, and the handle was made in its parent."""
        return forks.count != self._forks

    def call(
        self,
        shard: int | None,
        op: str,
        args: Mapping[str, object],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Call one administrative operation of one shard; None asks all shards and returns the first answer.

        A call whose connection fails is repeated once, at the endpoint that is known then: every operation may be
        repeated. With more than two replicas the call follows the leader for up to `timeout_s`.

        Raises:
            RayMQError: the shard's error.
            Unavailable: nothing listens there.
            DeliveryUnknown: no answer comes within `timeout_s`.
        """
        if can_fail_over(self.replicas):
            return self._call_leader(shard, op, args, timeout_s)
        try:
            return self._call_once(shard, op, args, timeout_s)
        except RayMQError as error:
            if not moved(error):
                raise
            if shard is not None:
                self._drop(shard)
            self._find(range(self.shards))
            if can_fail_over(self.replicas):
                # The shards have got further replicas (`set_replicas`).
                return self._call_leader(shard, op, args, timeout_s)
            return self._call_once(shard, op, args, timeout_s)

    def _call_leader(
        self, shard: int | None, op: str, args: Mapping[str, object], timeout_s: float
    ) -> dict[str, object]:
        """Call an operation of a shard whose leader may change. None: of the first shard that answers."""
        routes = self._routes()
        try:
            if shard is None:
                return routes.first(op, args, timeout_s)
            return routes.call(shard, op, args, timeout_s)
        finally:
            self._keep(routes)

    def _call_once(
        self, shard: int | None, op: str, args: Mapping[str, object], timeout_s: float
    ) -> dict[str, object]:
        """One try, at the known endpoints. Connections to single shards stay open until `close`."""
        routes = self._routes()
        if shard is None:
            return routes.first(op, args, timeout_s)
        with self._lock:
            connection = self._connections.get(shard)
            if connection is None:
                connection = self._connections[shard] = routes.connect(shard)
        return connection.call(op, args, timeout=timeout_s)

    def refresh(self) -> dict[int, str]:
        """Look the shards' endpoints up again, through the resolver or any shard that answers.

        Shards that were added since are found, too.
        Returns: shard -> host:port. Never raises: a shard that does not answer keeps its last endpoint.
        """
        self._find(range(self.shards))
        for _, answer in self._routes().ask(range(self.shards), "describe", {}, STATUS_TIMEOUT_S):
            if not isinstance(answer, RayMQError):
                self.learn_shards(shards_of(answer))
                break
        return dict(self.endpoints)

    def learn_shards(self, count: int) -> range:
        """Take note that the cluster has so many shards. Returns: those that this handle did not know."""
        added = range(self.shards, count)
        if added:
            routes = self._routes()
            routes.learn_shards(added)
            self._keep(routes)
            self.shards = count
        return added

    def _find(self, shards: Iterable[int]) -> set[int]:
        """Look up the leaders of these shards, if they may change, else the endpoints of all.

        Returns: the shards of which an endpoint is new.
        """
        routes = self._routes()
        known = dict(routes.endpoints)
        if routes.fails_over:
            routes.find_leaders(shards)
        else:
            routes.refresh()
        self._keep(routes)
        return {shard for shard, there in routes.endpoints.items() if known.get(shard) != there}

    def _routes(self) -> Routes:
        # Imported on use: start and stop need no Arrow.
        from raymq.client.transport.routes import Routes

        if not can_fail_over(self.replicas):
            return Routes.of(self)
        with self._lock:
            if self._followed is None:
                self._followed = Routes.of(self, keeps_connections=True)
            return self._followed

    def _keep(self, routes: Routes) -> None:
        """Keep what was learned about the shards, for the clients that this handle makes, and for its copies."""
        self.replicas = max(self.replicas, routes.replicas)
        # With transport="ray" the shards are reached by the names of their actors, which never change.
        if self.transport != "ray":
            self.endpoints.update(routes.endpoints)
            self.replica_endpoints.update(routes.replica_endpoints)

    def _drop(self, shard: int) -> None:
        with self._lock:
            connection = self._connections.pop(shard, None)
        if connection is not None:
            connection.close()


def shards_of(answer: dict[str, Any] | RayMQError) -> int:
    """How many shards the cluster has, as one of them says; 0: it does not say."""
    return 0 if isinstance(answer, RayMQError) else int(answer.get("shards", 0))
