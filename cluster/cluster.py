"""`Cluster`: the handle on a running cluster, from which everything else is made."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raymq.store.clock import Clock
from raymq.store.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable
from raymq.store.state import CLEANUP_POLICY, COMPACTION

from .paths import actor_name
from .transport.tls import parse_url
from .unclosed import warn_unclosed

if TYPE_CHECKING:
    from raymq.store.promise import Acks

    from .consume.async_consumer import AsyncConsumer
    from .consume.consumer import Consumer, Start
    from .produce.async_producer import AsyncProducer
    from .produce.producer import Producer
    from .start import StopReport
    from .transport.connection import Connection, Transport

_CALL_TIMEOUT_S = 30.0
#: how long `create_topic` waits until a topic is durable
CREATE_TIMEOUT_S = 15.0
#: pause before a creation with an unknown outcome is repeated
CREATE_PAUSE_MS = 100
#: a lookup must not delay its caller for long
LOOKUP_TIMEOUT_S = 5.0
#: a shard without an answer for this long is shown as UNREACHABLE
STATUS_TIMEOUT_S = 2.0
#: prefix of RayMQ's internal topics, which `topics` leaves out
_INTERNAL_PREFIX = "rmq_sys_"

#: states of a shard that does not answer
_ABSENT = {"DOWN", "UNREACHABLE"}

#: fields of the error by which a server says that it is another shard
_IDENTITY = ("cluster_id", "shard")

Resolver = Callable[[], dict[int, str]]


class Cluster:
    """A running cluster. `raymq.start` and `raymq.connect` return it; programs do not call the constructor.

    A Cluster makes producers and consumers, and administers topics. Threads may share it. It pickles into Ray tasks and
    other processes, together with the cluster's token: treat a pickled handle as a password. As a context manager it
    closes its connections, and stops the cluster only if the `start` that returned this handle started it.

    Example:
        ```python
        import raymq

        with raymq.start("raymq-data") as cluster:
            cluster.create_topic("orders", queues=4)
            print(cluster.status()["state"], list(cluster.topics()))
        ```

    Raises:
        Rejected: a wrong argument; nothing was done.
        Unavailable: a shard does not answer; nothing was done, and the same call may succeed later.
        DeliveryUnknown: a shard did not answer within 30 s; the same call completes what it began.
    """

    def __init__(
        self,
        *,
        name: str,
        cluster_id: str,
        shards: int,
        token: str,
        endpoints: dict[int, str],
        resolver: Resolver | None = None,
        data_dir: str | None = None,
        ray_address: str | None = None,
        stop_on_exit: bool = False,
        ca: bytes | None = None,
        placement: tuple[tuple[str, ...], ...] | None = None,
        transport: Transport = "flight",
    ) -> None:
        #: the name given at the first start
        self.name = name
        #: 32 hexadecimal digits, fixed at the first start
        self.cluster_id = cluster_id
        #: number of shards
        self.shards = shards
        #: shard -> last known host:port (with TLS tls://host:port) of its leader
        self.endpoints = dict(endpoints)
        #: looks changed endpoints up; None: the shards themselves are asked
        self.resolver = resolver
        #: the data directory; None on other machines
        self.data_dir = data_dir
        #: what `ray.init(address=...)` takes, if known
        self.ray_address = ray_address
        self.token = token
        #: PEM certificates that must have signed the shards' certificates; None: see `flight_client.ShardConnection`
        self.ca = ca
        #: shard -> node label of each replica, the leader's first; None: all on one machine
        self.placement = placement
        #: how shards are reached: "flight", or "ray" for programs that can reach only Ray's port
        self.transport: Transport = transport
        self._stop_on_exit = stop_on_exit
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        #: number of `close` calls; guarded by the lock
        self._closings = 0

    def __repr__(self) -> str:
        return f"<Cluster {self.name!r} {self.cluster_id[:8]} shards={self.shards}>"

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_lock"], state["_connections"]
        # A copy in another process did not start the cluster.
        state["_stop_on_exit"] = False
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._connections = {}

    @classmethod
    def bootstrap(cls, url: str, *, token: str | None, ca: bytes | None = None) -> Cluster:
        """Connect to the cluster of the shard at raymq://host:port or, with TLS, raymq+tls://host:port.

        Raises: Rejected (no token, bad URL, a certificate that `ca` did not sign), Unavailable.
        """
        endpoint = parse_url(url)
        if endpoint is None:
            raise Rejected(
                f"{url!r}: use raymq://host:port or raymq+tls://host:port", field="target"
            )
        if not token:
            raise Rejected(
                f"{url} needs the cluster's token: pass token=..., or set RAYMQ_TOKEN, to the content of the file "
                "`token` in the data directory",
                field="token",
            )
        from .transport.flight_client import ShardConnection

        first = ShardConnection(endpoint, token, ca=ca)
        try:
            facts = first.call("describe", {}, timeout=_CALL_TIMEOUT_S)
            routes = first.call("routes", {}, timeout=_CALL_TIMEOUT_S)
        finally:
            first.close()
        endpoints = {int(shard): str(place) for shard, place in routes.items()}
        endpoints[int(facts["shard"])] = endpoint
        return cls(
            name=str(facts["name"]),
            cluster_id=str(facts["cluster_id"]),
            shards=int(facts["shards"]),
            token=token,
            endpoints=endpoints,
            ca=ca,
        )

    def describe(self) -> dict[str, Any]:
        """The cluster's name, id, shards, replication, flush, version, endpoints, data directory and Ray address."""
        facts = self.call(None, "describe", {})
        return {
            "name": self.name,
            "cluster_id": self.cluster_id,
            "shards": self.shards,
            "replication": facts.get("replication"),
            "flush": facts.get("flush"),
            "version": facts.get("version"),
            "endpoints": {str(shard): place for shard, place in sorted(self.endpoints.items())},
            "data_dir": self.data_dir,
            "ray_address": self.ray_address,
        }

    def status(self) -> dict[str, Any]:
        """The state, positions, counters and roles of each shard, or why it does not answer.

        All shards are asked at the same time. A shard that refuses the connection is "DOWN". A shard without an answer
        for 2 s, such as a stopped process, is "UNREACHABLE". The cluster's `state` is "RUNNING" when every shard is
        RUNNING, "DOWN" when no shard answers, else "DEGRADED". Never raises for a shard that does not answer.
        """
        found: dict[int, dict[str, Any]] = {}
        moved = self._status_of(range(self.shards), found)
        for shard in moved:
            self._drop(shard)
        # Without newer endpoints the first answers stay.
        with contextlib.suppress(RayMQError):
            if moved:
                self.refresh()
                self._status_of(moved, found)
        shards = [
            {**found[shard], "endpoint": self.endpoints.get(shard)} for shard in range(self.shards)
        ]
        if self.placement is not None:
            self._add_nodes(shards, self.placement)
        states = {facts.get("state") for facts in shards}
        state = "RUNNING" if states == {"RUNNING"} else "DOWN" if states <= _ABSENT else "DEGRADED"
        return {
            "name": self.name,
            "cluster_id": self.cluster_id,
            "state": state,
            "shards": shards,
            "data_dir": self.data_dir,
            "ray_address": self.ray_address,
        }

    def _status_of(self, shards: Iterable[int], found: dict[int, dict[str, Any]]) -> list[int]:
        """Put the status of each shard into `found`. Returns: shards that may serve elsewhere now."""
        from .transport.ask import ask

        closings, moved = self._closings, []

        def status(shard: int) -> dict[str, Any]:
            return self._call_once(shard, "status", {}, STATUS_TIMEOUT_S, closings)

        answers = ask(shards, status, timeout_s=STATUS_TIMEOUT_S, in_turn=self._by_ray)
        for shard, answer in answers:
            if isinstance(answer, RayMQError):
                if _moved(answer):
                    moved.append(shard)
                silent = isinstance(answer, DeliveryUnknown)
                state = "UNREACHABLE" if silent else "DOWN"
                answer = {"shard": shard, "state": state, "error": str(answer)}
            found[shard] = answer
        return moved

    @property
    def _by_ray(self) -> bool:
        return self.transport == "ray"

    def _add_nodes(
        self, shards: list[dict[str, Any]], placement: tuple[tuple[str, ...], ...]
    ) -> None:
        """Add `nodes` to each shard, and to a shard in trouble which of its nodes are `away`."""
        troubled = [facts for facts in shards if facts["state"] in _ABSENT or _behind(facts)]
        missing: list[str] = []
        if troubled and self.ray_address is not None:
            from .deploy.placement import away, describe_away

            missing = away(self.ray_address, (node for row in placement for node in row))
        for facts, row in zip(shards, placement, strict=True):
            facts["nodes"] = list(row)
            facts["away"] = [node for node in row if node in missing] if facts in troubled else []
            if facts["away"]:
                cause = "; ".join(map(describe_away, facts["away"]))
                error = facts.get("error")
                facts["error"] = f"{cause} ({error})" if error else cause

    def topics(self) -> dict[str, dict[str, Any]]:
        """Every topic except RayMQ's internal ones, as {name: {"queues": count, "shards": [...]}}.

        A compacted topic has "compacted": True as well.
        """
        found = self.call(None, "topics", {})
        return {
            name: facts
            for name, facts in sorted(found.items())
            if not name.startswith(_INTERNAL_PREFIX)
        }

    def create_topic(self, name: str, *, queues: int = 4, compacted: bool = False) -> bool:
        """Create a topic whose queues are spread over all shards.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                print(cluster.create_topic("orders", queues=4))
            ```

        Args:
            name: at most 127 characters of `a-zA-Z0-9_%|-`.
            queues: number of queues (default 4). Messages are ordered within a queue; each queue has its own files
                on the disk of its shard.
            compacted: keep the latest message of each index key. Every message then needs index keys.

        Returns: False if the topic exists with the same queues.
        Durable: on every shard, at return.

        Raises:
            Rejected: a bad name or count, or the topic exists with another number of queues.
            Unavailable: a shard does not answer. The same call completes the creation.
            DeliveryUnknown: a shard did not make the topic durable within 15 s. The same call completes the creation.
        """
        spread = list(range(self.shards))
        arguments: dict[str, Any] = {"name": name, "queues": queues, "shards": spread}
        if compacted:
            arguments["attributes"] = {CLEANUP_POLICY: COMPACTION}
        # Every shard knows every topic: any shard can answer for all.
        made = [self._create_on(shard, arguments) for shard in spread]
        return any(made)

    def _create_on(self, shard: int, arguments: dict[str, Any]) -> bool:
        """Repeat a creation with an unknown outcome: after a start a flush service or follower may not run yet."""
        clock, unknown = Clock(), False
        until_s = clock.monotonic() + CREATE_TIMEOUT_S
        while True:
            try:
                return bool(self.call(shard, "create_topic", arguments)["created"]) or unknown
            except DeliveryUnknown:
                if clock.monotonic() >= until_s:
                    raise
                unknown = True
            clock.sleep_ms(CREATE_PAUSE_MS)

    def describe_topic(self, name: str) -> dict[str, Any]:
        """The queues of a topic, each holding the offsets [min_offset, max_offset), and its number of messages.

        Returns: {"topic", "queues": [{"queue_id", "shard", "min_offset", "max_offset"}...], "messages"}.
        Raises: Rejected when the topic does not exist.
        """
        topics = self.topics()
        if name not in topics:
            raise Rejected(
                f"topic {name!r} does not exist; create it: raymq topic create {name}",
                field="topic",
                limit=", ".join(topics) or "no topics",
            )
        shards = topics[name]["shards"]
        queues = []
        for shard in sorted(set(shards)):
            ranges = self.call(shard, "queue_ranges", {"topic": name})
            for queue, (low, high) in ranges.items():
                # A shard answers for its own queues only. The check drops any other answer.
                if shards[int(queue) % len(shards)] == shard:
                    queues.append(
                        {
                            "queue_id": int(queue),
                            "shard": shard,
                            "min_offset": low,
                            "max_offset": high,
                        }
                    )
        queues.sort(key=lambda facts: facts["queue_id"])
        return {
            "topic": name,
            "queues": queues,
            "messages": sum(facts["max_offset"] - facts["min_offset"] for facts in queues),
        }

    def producer(
        self,
        *,
        acks: Acks = "quorum",
        linger_ms: float = 5,
        batch_bytes: int = 1 << 20,
        buffer_bytes: int = 64 << 20,
        max_block_ms: int = 60_000,
        delivery_timeout_ms: int = 120_000,
        request_timeout_ms: int = 30_000,
        in_flight_bytes: int = 16 << 20,
        codec: str = "bytes",
        max_message_bytes: int = 4 << 20,
    ) -> Producer:
        """A Producer of this cluster; `raymq.Producer` describes the options."""
        from .produce.producer import Producer

        return Producer(
            self,
            acks=acks,
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            max_block_ms=max_block_ms,
            delivery_timeout_ms=delivery_timeout_ms,
            request_timeout_ms=request_timeout_ms,
            in_flight_bytes=in_flight_bytes,
            codec=codec,
            max_message_bytes=max_message_bytes,
        )

    def consumer(
        self,
        topic: str,
        *,
        group: str | None = None,
        start: Start = None,
        queues: Sequence[int] | None = None,
        fetch_bytes: int = 4 << 20,
        fetch_records: int = 10_000,
        unavailable_timeout_ms: int = 30_000,
    ) -> Consumer:
        """A `raymq.Consumer` of one topic, which explains the options."""
        from .consume.consumer import Consumer

        return Consumer(
            self,
            topic,
            group=group,
            start=start,
            queues=queues,
            fetch_bytes=fetch_bytes,
            fetch_records=fetch_records,
            unavailable_timeout_ms=unavailable_timeout_ms,
        )

    def async_producer(
        self,
        *,
        acks: Acks = "quorum",
        linger_ms: float = 5,
        batch_bytes: int = 1 << 20,
        buffer_bytes: int = 64 << 20,
        max_block_ms: int = 60_000,
        delivery_timeout_ms: int = 120_000,
        request_timeout_ms: int = 30_000,
        in_flight_bytes: int = 16 << 20,
        codec: str = "bytes",
        max_message_bytes: int = 4 << 20,
    ) -> AsyncProducer:
        """An AsyncProducer of this cluster; `raymq.AsyncProducer` describes the options."""
        from .produce.async_producer import AsyncProducer

        return AsyncProducer(
            self,
            acks=acks,
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            max_block_ms=max_block_ms,
            delivery_timeout_ms=delivery_timeout_ms,
            request_timeout_ms=request_timeout_ms,
            in_flight_bytes=in_flight_bytes,
            codec=codec,
            max_message_bytes=max_message_bytes,
        )

    def async_consumer(
        self,
        topic: str,
        *,
        group: str | None = None,
        start: Start = None,
        queues: Sequence[int] | None = None,
        fetch_bytes: int = 4 << 20,
        fetch_records: int = 10_000,
        unavailable_timeout_ms: int = 30_000,
    ) -> AsyncConsumer:
        """A `raymq.AsyncConsumer` of one topic, with the options of `raymq.Consumer`."""
        from .consume.async_consumer import AsyncConsumer

        return AsyncConsumer(
            self,
            topic,
            group=group,
            start=start,
            queues=queues,
            fetch_bytes=fetch_bytes,
            fetch_records=fetch_records,
            unavailable_timeout_ms=unavailable_timeout_ms,
        )

    def stop(self, *, timeout_s: float = 60.0) -> StopReport:
        """Stop the cluster and close this handle; data stays. `timeout_s` bounds the orderly end of all actors.

        Raises: Rejected on a machine without the data directory; Unavailable when a process cannot be ended.
        """
        from .start import stop

        self.close()
        if self.data_dir is None:
            raise Rejected(
                f"cluster {self.name!r} is not on this machine: run `raymq stop` on the machine that has its data "
                "directory",
                field="data_dir",
            )
        self._stop_on_exit = False
        return stop(self.data_dir, timeout_s=timeout_s)

    def close(self) -> None:
        """Close this handle's connections. The cluster continues, and the handle stays usable."""
        with self._lock:
            connections, self._connections = self._connections, {}
            self._closings += 1
        for connection in connections.values():
            connection.close()

    def __del__(self) -> None:
        if self.__dict__.get("_connections"):
            advice = "use it in a with block, or call close()"
            warn_unclosed(self, f"Cluster {self.name!r}", advice)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._stop_on_exit:
            self.stop()
        else:
            self.close()

    def call(
        self,
        shard: int | None,
        op: str,
        args: dict[str, Any],
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Call one administrative operation of one shard; None asks all shards and returns the first answer.

        A call whose connection fails is repeated once, at the endpoint that is known then: every operation may be
        repeated. Raises: what the shard answers; Unavailable when nothing listens there; DeliveryUnknown when no answer
        comes within `timeout_s`.
        """
        if shard is None:
            try:
                return self._call_any(op, args, timeout_s)
            except RayMQError as error:
                if not _moved(error):
                    raise
                self.refresh()
                return self._call_any(op, args, timeout_s)
        try:
            return self._call_once(shard, op, args, timeout_s)
        except RayMQError as error:
            if not _moved(error):
                raise
            self._drop(shard)
            self.refresh()
            return self._call_once(shard, op, args, timeout_s)

    def _call_any(self, op: str, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The first answer of all shards, at their known endpoints."""
        from .transport.ask import first

        closings = self._closings

        def call(shard: int) -> dict[str, Any]:
            try:
                return self._call_once(shard, op, args, timeout_s, closings)
            except RayMQError as error:
                if _moved(error):
                    self._drop(shard)
                raise

        return first(range(self.shards), call, timeout_s=timeout_s, in_turn=self._by_ray)[1]

    def refresh(self) -> dict[int, str]:
        """Look the shards' endpoints up again, through the resolver or any shard that answers.

        Returns: shard -> host:port. Never raises: a shard that does not answer keeps its last endpoint.
        """
        if self._by_ray:
            # Actor names never change.
            return dict(self.endpoints)
        if self.resolver is not None:
            self.endpoints.update(self.resolver())
            return dict(self.endpoints)
        from .transport.ask import first

        closings = self._closings

        def routes(shard: int) -> dict[str, Any]:
            try:
                return self._call_once(shard, "routes", {}, LOOKUP_TIMEOUT_S, closings)
            except RayMQError:
                self._drop(shard)
                raise

        try:
            _, found = first(sorted(self.endpoints), routes, timeout_s=LOOKUP_TIMEOUT_S)
        except RayMQError:
            return dict(self.endpoints)
        self.endpoints.update({int(key): str(place) for key, place in found.items()})
        return dict(self.endpoints)

    def _call_once(
        self,
        shard: int,
        op: str,
        args: dict[str, Any],
        timeout_s: float = _CALL_TIMEOUT_S,
        closings: int | None = None,
    ) -> dict[str, Any]:
        """One try. `closings` is given by threads that work for a caller, which may no longer wait for them.

        Such a thread must not open a connection after the handle was closed: nothing would close the connection.
        """
        with self._lock:
            if closings is not None and closings != self._closings:
                raise Unavailable("the handle was closed meanwhile", shard=shard)
            connection = self._connections.get(shard)
            if connection is None:
                connection = self._connections[shard] = self.connection(shard)
        return connection.call(op, args, timeout=timeout_s)

    def connection(self, shard: int) -> Connection:
        """A new connection to a shard at its known endpoint, which the caller closes. Raises: Unavailable."""
        # Imported on use: start and stop need no Arrow.
        from .transport.connection import open_connection

        places = self.actor_names() if self.transport == "ray" else self.endpoints
        if shard not in places:
            raise Unavailable(
                f"shard {shard} of {self.name!r} does not serve yet; see `raymq status`",
                shard=shard,
            )
        return open_connection(
            self.transport,
            places[shard],
            token=self.token,
            cluster_id=self.cluster_id,
            shard=shard,
            ca=self.ca,
        )

    def actor_names(self) -> dict[int, str]:
        """shard -> the name of its leader's actor in Ray's namespace "raymq"."""
        return {
            shard: actor_name(self.name, shard, 0, "commit_log") for shard in range(self.shards)
        }

    def _drop(self, shard: int) -> None:
        with self._lock:
            connection = self._connections.pop(shard, None)
        if connection is not None:
            connection.close()


def _behind(facts: dict[str, Any]) -> bool:
    """Whether a shard has stored what its follower has not confirmed."""
    mirrored = facts.get("replication") == "mirror"
    return mirrored and bool(facts.get("appended", 0) > facts.get("confirmed", 0))


def _moved(error: RayMQError) -> bool:
    """Whether the shard no longer answers at its last known endpoint."""
    stranger = isinstance(error, Rejected) and error.fields.get("field") in _IDENTITY
    return stranger or isinstance(error, Unavailable)
