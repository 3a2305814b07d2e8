"""`Cluster`: the handle on a running cluster, from which everything else is made."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import raymq
from raymq.actors.protocol.tls import is_refused_certificate, parse_url
from raymq.client import forks
from raymq.client.arguments import clean_token, plain_int, takes_options_of
from raymq.client.consume.consumer_config import ConsumerConfig, ConsumerOptions
from raymq.client.produce.producer_config import ProducerConfig, ProducerOptions
from raymq.client.topics.new_topic import create_everywhere
from raymq.client.transport.ask import may_lead_no_more, moved
from raymq.client.unclosed import warn_unclosed
from raymq.replication.quorum import can_fail_over
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected
from raymq.store.base.files import Files
from raymq.store.state.shard_state import CLEANUP_POLICY, COMPACTION
from raymq.store.state.topic_schema import ALLOWED, NULL_VALUES, SCHEMA
from raymq.store.state.topics import SYSTEM_PREFIX

from .paths import ClusterPaths

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Unpack

    from raymq.client.transport.connection import Connection, Transport
    from raymq.client.transport.routes import Resolver, Routes

    from .deploy.ray_host import Progress
    from .drain_node import DrainReport
    from .recover_shard import RecoveryPlan
    from .start import StopReport

_CALL_TIMEOUT_S = 30.0
#: a shard without an answer for this long is shown as UNREACHABLE
STATUS_TIMEOUT_S = 2.0

#: states of a shard that does not answer
_ABSENT = {"DOWN", "UNREACHABLE"}


@dataclass(kw_only=True, eq=False, repr=False)
class Cluster:
    """A running cluster. `raymq.start` and `raymq.connect` return it. Programs do not call the constructor.

    A Cluster makes producers and consumers, and administers topics. Threads may share it. It pickles into Ray tasks and
    other processes, together with the cluster's token: treat a pickled handle as a password. As a context manager it
    closes its connections, and stops the cluster only if the `start` that returned this handle started it. A forked
    child leaves both to its parent.

    Example:
        ```python
        import raymq

        with raymq.start("raymq-data") as cluster:
            cluster.create_topic("orders", queues=4)
            print(cluster.status()["state"], list(cluster.topics()))
        ```

    Raises:
        Rejected: a wrong argument. Nothing was done.
        Unavailable: a shard does not answer. Nothing was done, and the same call may succeed later.
        DeliveryUnknown: a shard did not answer within 30 s. The same call completes the operation.
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
    stop_on_exit: InitVar[bool] = False
    #: PEM certificates that must have signed the shards' certificates; None: see `flight_client.ShardConnection`
    ca: bytes | None = None
    #: shard -> node label of each replica, the leader's first; None: all on one machine
    placement: tuple[tuple[str, ...], ...] | None = None
    #: how shards are reached: "flight", or "ray" for programs that can reach only Ray's port
    transport: Transport = "flight"
    #: copies of each shard. With more than two any of them may lead
    replicas: int = 1
    #: shard -> replica -> its last known host:port, to find the leaders when they have changed
    replica_endpoints: dict[int, dict[int, str]] = field(default_factory=dict)

    def __post_init__(self, stop_on_exit: bool) -> None:
        self.endpoints = dict(self.endpoints)
        self.replica_endpoints = dict(self.replica_endpoints)
        self._stop_on_exit = stop_on_exit
        self._forks = forks.count
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        #: the routes of this handle's calls, if the leaders may change: they keep what was learned about them
        self._followed: Routes | None = None

    def __repr__(self) -> str:
        return f"<Cluster {self.name!r} {self.cluster_id[:8]} shards={self.shards}>"

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for own in ("_lock", "_connections", "_stop_on_exit", "_followed", "_forks"):
            del state[own]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A copy in another process did not start the cluster.
        self.__post_init__(stop_on_exit=False)

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
        token = clean_token("token", token)
        if not token:
            raise Rejected(
                f"{url} needs the cluster's token: pass token=..., or set RAYMQ_TOKEN, to the content of the file "
                "`token` in the data directory",
                field="token",
            )
        from raymq.client.transport.flight_client import ShardConnection

        with closing(ShardConnection(endpoint, token, ca=ca)) as first:
            facts = first.call("describe", {}, timeout=_CALL_TIMEOUT_S)
            routes = first.call("routes", {}, timeout=_CALL_TIMEOUT_S)
            shard, replicas = int(facts["shard"]), int(facts.get("replicas", 1))
            leader, others = {"replica": 0, "endpoint": None}, {}
            if can_fail_over(replicas):
                leader = first.call("leader", {}, timeout=_CALL_TIMEOUT_S)
                others = first.call("replicas", {}, timeout=_CALL_TIMEOUT_S)

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
            replica_endpoints={
                int(each): {int(replica): str(there) for replica, there in found.items()}
                for each, found in others.items()
            },
        )

    def describe(self) -> dict[str, Any]:
        """The cluster's name, id, shards, replicas, flush, version, endpoints, data directory and Ray address."""
        facts = self.call(None, "describe", {})
        self.learn_shards(int(facts.get("shards", 0)))
        return {
            "name": self.name,
            "cluster_id": self.cluster_id,
            "shards": self.shards,
            "replicas": facts.get("replicas"),
            "flush": facts.get("flush"),
            "version": facts.get("version"),
            "endpoints": {str(shard): self.endpoints[shard] for shard in sorted(self.endpoints)},
            "data_dir": self.data_dir,
            "ray_address": self.ray_address,
        }

    def status(self) -> dict[str, Any]:
        """The state, positions, counters and roles of each shard, or why it does not answer.

        All shards are asked at the same time. A shard that refuses the connection is "DOWN". A shard without an answer
        for 2 s, such as a stopped process, is "UNREACHABLE". The cluster's `state` is "RUNNING" when every shard is
        RUNNING, "DOWN" when no shard answers, else "DEGRADED". Never raises for a shard that does not answer.
        """
        found = self._ask_status(range(self.shards))
        elsewhere = {shard for shard, answer in found.items() if self._may_lead_elsewhere(answer)}
        if elsewhere:
            new = self._find(elsewhere)
            # A silent replica is not waited for again, unless another one leads.
            silent = {each for each in elsewhere if isinstance(found[each], DeliveryUnknown)}
            found |= self._ask_status(elsewhere - silent | elsewhere & new)

        added = self.learn_shards(max((_shards_of(answer) for answer in found.values()), default=0))
        if added:
            found |= self._ask_status(added)

        shards = [
            {**_facts(shard, answer), "endpoint": self.endpoints.get(shard)}
            for shard, answer in sorted(found.items())
        ]
        if self.placement is not None:
            self._add_nodes(shards, self.placement)

        return {
            "name": self.name,
            "cluster_id": self.cluster_id,
            "state": _state_of({facts.get("state") for facts in shards}),
            "shards": shards,
            "data_dir": self.data_dir,
            "ray_address": self.ray_address,
        }

    def _may_lead_elsewhere(self, answer: dict[str, Any] | RayMQError) -> bool:
        """Whether an answer to `status` may not be that of the shard's leader."""
        if not isinstance(answer, RayMQError):
            return answer.get("mode") == "follower"
        if not can_fail_over(self.replicas):
            return moved(answer)
        return may_lead_no_more(answer) or is_refused_certificate(answer)

    def _ask_status(self, shards: Iterable[int]) -> dict[int, dict[str, Any] | RayMQError]:
        """The status of each shard, or its error."""
        return dict(self._routes().ask(shards, "status", {}, STATUS_TIMEOUT_S))

    def _add_nodes(
        self, shards: list[dict[str, Any]], placement: tuple[tuple[str, ...], ...]
    ) -> None:
        """Add `nodes` to each shard, and to a shard in trouble which of its nodes are `away`."""
        missing: list[str] = []
        if self.ray_address is not None and any(map(_in_trouble, shards)):
            from .deploy.placement import away

            missing = away(self.ray_address, (node for nodes in placement for node in nodes))
        for facts in shards:
            # A handle on another machine does not know the nodes of shards that were added.
            nodes = placement[facts["shard"]] if facts["shard"] < len(placement) else ()
            facts["nodes"] = list(nodes)
            facts["away"] = []
            if _in_trouble(facts):
                facts["away"] = [node for node in nodes if node in missing]
            if facts["away"]:
                facts["error"] = _cause_of_absence(facts["away"], facts.get("error"))

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

    def create_topic(
        self,
        name: str,
        *,
        queues: int = 4,
        compacted: bool = False,
        schema: pa.Schema | None = None,
        allow_null_values: bool = False,
    ) -> bool:
        """Create a topic whose queues are spread over all shards.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                print(cluster.create_topic("orders", queues=4))
            ```

        Args:
            name: at most 127 characters of `a-zA-Z0-9_%|-`.
            queues: number of queues (default 4). Messages are ordered within a queue. Each queue has its own files
                on the disk of its shard.
            compacted: keep the latest message of each index key. Every message then needs index keys.
            schema: the columns of the messages' values; None (default): values are bytes. Each value is stored as one
                JSON object. Reads give the columns instead of bytes, and writes that do not fit are refused. Only
                columns may be not nullable, not what is nested in them.
            allow_null_values: whether a value may be null (default: no), which is not an empty value. In a compacted
                topic it deletes its key. With a schema, a row of nothing but nulls is a null value.

        Returns: False if the topic exists with the same queues and options. One that is older than some of the shards
        stays on those that it has, and one that has got more queues or columns since keeps these.
        Durable: on every shard, at return.

        Raises:
            Rejected: a bad name or count, a column that a schema cannot have, or the topic exists with another number
                of queues, schema, `compacted` or `allow_null_values`.
            Unavailable: a shard does not answer. The same call completes the creation.
            DeliveryUnknown: a shard did not make the topic durable within 15 s. The same call completes the creation.
        """
        spread = list(range(self.shards))
        arguments: dict[str, Any] = {"name": name, "queues": plain_int(queues), "shards": spread}
        attributes = {CLEANUP_POLICY: COMPACTION} if compacted else {}
        if schema is not None:
            from raymq.client.messages.topic_schema import to_json

            attributes[SCHEMA] = to_json(schema)
        if allow_null_values:
            attributes[NULL_VALUES] = ALLOWED
        if attributes:
            arguments["attributes"] = attributes
        return create_everywhere(self, arguments, on_all=True)

    def add_queues(self, topic: str, queues: int, *, break_key_order: bool = False) -> bool:
        """Give a topic more queues, spread over all shards, while producers and consumers go on.

        Producers use the new queues within 30 s. Consumers that read the whole topic read them within 30 s, from their
        first message. The messages of the present queues stay where they are.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("events", queues=2)
                cluster.add_queues("events", 8)
                print(cluster.topics()["events"]["queues"])
            ```

        Args:
            topic: name of a topic that is not compacted, and that no `Queue` uses.
            queues: number of queues afterwards, at least the present one.
            break_key_order: a key belongs to the queue `hash % queues`, so that new messages of most keys go to another
                queue than the old ones, and may be read before them. False (default) refuses that for a topic that
                has had messages. Also needed if its messages have no keys: nothing remembers whether they have.

        Returns: False if the topic has so many queues already.
        Durable: on every shard, at return.

        Raises:
            Rejected: the topic does not exist, has more queues or messages, or cannot get queues.
            Unavailable: a shard does not answer. The same call completes the operation.
            DeliveryUnknown: a shard did not make the change durable within 15 s. The same call completes it.
        """
        from raymq.client.topics.add_queues import add_queues

        return add_queues(self, topic, plain_int(queues), break_key_order=break_key_order)

    def add_column(self, topic: str, column: pa.Field) -> bool:
        """Give a topic's schema one more nullable column, while producers and consumers go on.

        It is the one change that a schema allows. Messages that are stored already have null in it. Producers take it
        within 30 s. Consumers and reads that are made later give it.

        Example:
            ```python
            import pyarrow as pa
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("bills", schema=pa.schema([("id", pa.int64())]))
                cluster.add_column("bills", pa.field("note", pa.string()))
                print([column["name"] for column in cluster.topics()["bills"]["schema"]])
            ```

        Args:
            topic: a topic with a schema.
            column: its name, and a type that a schema can have.

        Returns: False if the topic has that column already.
        Durable: on every shard, at return.

        Raises:
            Rejected: the topic has no schema, or has a column of that name and another type.
            Unavailable: a shard does not answer. The same call completes the operation.
            DeliveryUnknown: a shard did not make the change durable within 15 s. The same call completes it.
        """
        from raymq.client.topics.add_column import add_column

        return add_column(self, topic, column)

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

    @takes_options_of(ProducerConfig)
    def producer(self, **options: Unpack[ProducerOptions]) -> raymq.Producer:
        """A Producer of this cluster. `raymq.Producer` describes the options."""
        return raymq.Producer(self, **options)

    @takes_options_of(ConsumerConfig)
    def consumer(self, topic: str, **options: Unpack[ConsumerOptions]) -> raymq.Consumer:
        """A Consumer of one topic. `raymq.Consumer` describes the options."""
        return raymq.Consumer(self, topic, **options)

    @takes_options_of(ProducerConfig)
    def async_producer(self, **options: Unpack[ProducerOptions]) -> raymq.AsyncProducer:
        """An AsyncProducer of this cluster. `raymq.AsyncProducer` describes the options."""
        return raymq.AsyncProducer(self, **options)

    @takes_options_of(ConsumerConfig)
    def async_consumer(self, topic: str, **options: Unpack[ConsumerOptions]) -> raymq.AsyncConsumer:
        """An AsyncConsumer of one topic, with the options of `raymq.Consumer`."""
        return raymq.AsyncConsumer(self, topic, **options)

    def move_leader(self, shard: int, replica: int) -> None:
        """Let another replica lead a shard, and wait until it does. Sends wait for less than a second.

        Raises: Rejected when it cannot lead; Unavailable when it does not lead within 15 s.
        """
        from .replica_status import move_leader

        clock = Clock()
        move_leader(self, shard, replica, pause=lambda seconds: clock.sleep_ms(seconds * 1000))

    def replace_replica(
        self,
        shard: int,
        replica: int,
        *,
        node: str | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        """Give the place of a lost replica to a new, empty one, and wait until that one has everything.

        What is left of the old directory is moved aside where the new one is made, and never deleted.

        Args:
            shard: number of the shard, from 0.
            replica: number of the replica, from 0. It must not lead the shard now.
            node: the label of the node for the new replica, which must have no other replica of this shard. None
                (default): the node of the old one.
            timeout_s: seconds until the new replica must be complete; 600 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Durable: the new placement, after the processes of the old replica have ended.

        Raises:
            Rejected: it leads, is the only one that may lead, or may have the last copy of confirmed messages; or the
                node cannot have it. Nothing was changed.
            Unavailable: the cluster does not run, or the new replica is not complete in time. It goes on by itself.
        """
        from .replace_replica import replace_replica

        replace_replica(self, shard, replica, node=node, timeout_s=timeout_s, progress=progress)

    def set_replicas(
        self,
        replicas: Literal[2, 3, 5],
        *,
        nodes: Sequence[str] | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        """Give each shard of a cluster of one replica further ones, while producers and consumers go on.

        The new replicas get the log first, and count when they have it. Each shard restarts its process twice: sends
        wait for some seconds then. A call that ended early is completed by the same call, and one for a cluster that
        has so many replicas changes nothing.

        Args:
            replicas: copies of each shard from now on: 2, 3 or 5. From then on a send waits for a majority of disks.
            nodes: labels of the nodes that have replicas then, the present ones among them. None (default): the nodes
                of the first start. Only for a cluster that was started with `nodes`; any other one stays on its
                machine, and so outlives the loss of processes and damage of files, not the loss of the machine.
            timeout_s: seconds until all new replicas must count; 600 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Durable: the number and placement of replicas, before any process of them is made.

        Raises:
            Rejected: the cluster has another number of several replicas, or the number or a node cannot be. Nothing
                was changed.
            Unavailable: the cluster does not run, or the new replicas have not everything in time. They go on copying.
        """
        from .set_replicas import set_replicas

        set_replicas(self, replicas, nodes=nodes, timeout_s=timeout_s, progress=progress)

    def plan_recovery(self, shard: int, *, nodes: Mapping[int, str] | None = None) -> RecoveryPlan:
        """What `recover_shard` would give up. Nothing is changed.

        Args:
            shard: number of the shard, from 0.
            nodes: as of `recover_shard`, to check them.

        Raises:
            Rejected: the shard has enough replicas, or nothing could be recovered, or a node cannot have a replica.
            Unavailable: the cluster does not run.
        """
        from .recover_shard import find_plan

        return find_plan(self, shard, nodes=nodes)

    def recover_shard(
        self,
        plan: RecoveryPlan,
        *,
        accept_loss: bool,
        nodes: Mapping[int, str] | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        """Go on without a majority of a shard's replicas. Messages whose receipts were given may be lost.

        The lost replicas get empty successors, and one of the survivors leads. The old directories are moved aside
        where successors are made. The decision is written to the shard's log, to `cluster.json` and to
        `raymq shard describe`.

        Args:
            plan: of `plan_recovery`. No other replica is given up.
            accept_loss: must be True: confirmed messages that only the lost replicas have are gone, and their offsets
                are given to other messages.
            nodes: lost replica -> label of the node of its successor; one that is not named stays on its node.
            timeout_s: seconds until all successors must be complete; 600 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Durable: what is given up and the new placement, before any successor is made.

        Raises:
            Rejected: `accept_loss` is not True, the shard has enough replicas, nothing could be recovered, or the plan
                is not true any more. Nothing was changed.
            Unavailable: the cluster does not run, or the successors are not complete in time. They go on by themselves.
        """
        from .recover_shard import recover_shard

        if accept_loss is not True:
            raise Rejected(
                "an unclean recovery may lose confirmed messages: read the plan, and pass accept_loss=True",
                field="accept_loss",
                limit=True,
                found=accept_loss,
            )
        recover_shard(self, plan, nodes=nodes, timeout_s=timeout_s, progress=progress)

    def rolling_restart(
        self, *, replica_timeout_s: float = 120.0, progress: Progress | None = None
    ) -> None:
        """Restart every process, one replica after the other, while producers and consumers go on.

        Each replica is complete again before the next one ends. Leaders hand over first: sends wait for less than a
        second then. Afterwards other replicas lead than before.

        Args:
            replica_timeout_s: seconds that one replica may take to end, to start and to catch up; 120 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Raises:
            Rejected: with one or two replicas a shard would be away. Nothing was changed.
            Unavailable: a replica is away or not complete; or the cluster does not run. Repeat the call when the
                shards have all of their replicas.
        """
        from .rolling_restart import rolling_restart

        rolling_restart(self, replica_timeout_s=replica_timeout_s, progress=progress)

    def add_shards(
        self,
        count: int = 1,
        *,
        nodes: Sequence[str] | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> list[int]:
        """Add shards while the others go on, and wait until they take new topics.

        Topics that exist stay where they are. Every topic that is created from now on is on the new shards, too.
        Other handles learn of them when they look up such a topic, and by `refresh` and `status`. After an interruption
        the same call, or `raymq.start`, completes the addition.

        Example:
            ```python
            import raymq

            with raymq.connect("raymq-data") as cluster:
                print(cluster.add_shards(), cluster.shards)
            ```

        Args:
            count: how many (default 1). The cluster may have 256 altogether.
            nodes: labels of the nodes over which all shards would be spread, in order: a new shard is where it would
                be then. None (default): those of the first start that are there, and those that have replicas now.
            timeout_s: seconds until the new shards must serve; 600 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Returns: the numbers of the new shards.
        Durable: the new number and placement, before any process of a new shard is made.

        Raises:
            Rejected: too many shards, nodes that cannot have them, or an interrupted addition of another number.
                Nothing was changed.
            StorageFull: shared memory has no room for the transient pools. Nothing was changed.
            Unavailable: the cluster or one of its shards does not run, or a new one does not serve in time. The same
                call completes the addition.
        """
        from .add_shards import add_shards

        return add_shards(self, count, nodes=nodes, timeout_s=timeout_s, progress=progress)

    def drain_node(
        self, node: str, *, timeout_s: float = 120.0, progress: Progress | None = None
    ) -> DrainReport:
        """Let other nodes lead every shard that a node leads, and wait until it leads nothing.

        The node leads again only after another loss of a leader, a start of the cluster, or `move_leader`.

        Args:
            node: the label of the node.
            timeout_s: seconds until it must lead nothing; 120 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Raises:
            Rejected: the node has no replica, or leads a shard that no other replica can lead. Nothing was done.
            Unavailable: it still leads a shard at the end of the time.
        """
        from .drain_node import drain_node

        return drain_node(self, node, timeout_s=timeout_s, progress=progress)

    def stop(self, *, timeout_s: float = 60.0) -> StopReport:
        """Stop the cluster and close this handle. Data stays. `timeout_s` bounds the orderly end of all actors.

        Raises: Rejected on a machine without the data directory; Unavailable if a process cannot be ended.
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
        """Close this handle's connections. The cluster continues, and the handle stays usable.

        In a forked child it does nothing, because the connections are the parent's.
        """
        if self._is_inherited:
            return
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def __del__(self) -> None:
        if self.__dict__.get("_connections") and not self._is_inherited:
            advice = "use it in a with block, or call close()"
            warn_unclosed(self, f"Cluster {self.name!r}", advice)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._stop_on_exit and not self._is_inherited:
            self.stop()
        else:
            self.close()

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child, and the handle was made in its parent."""
        return forks.count != self._forks

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
        self, shard: int | None, op: str, args: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Call an operation of a shard whose leader may change. None: of the first shard that answers."""
        routes = self._routes()
        try:
            if shard is None:
                return routes.first(op, args, timeout_s)
            return routes.call(shard, op, args, timeout_s)
        finally:
            self._keep(routes)

    def _call_once(
        self, shard: int | None, op: str, args: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
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
                self.learn_shards(_shards_of(answer))
                break
        return dict(self.endpoints)

    def learn_shards(self, count: int) -> range:
        """Take note that the cluster has so many shards. Returns: those that this handle did not know."""
        added = range(self.shards, count)
        if added:
            routes = self._routes()
            routes.learn_shards(added)
            self._keep(routes)
            self._learn_placement()
            self.shards = count
        return added

    def _learn_placement(self) -> None:
        """Read the nodes of shards that were added, where the data directory is."""
        from .cluster_record import load_record

        if self.data_dir is not None and self.placement is not None:
            record = load_record(ClusterPaths(self.data_dir), Files())
            if record is not None and record.cluster_id == self.cluster_id:
                self.placement = record.placement

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
                self._followed = Routes.of(self)
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


def _shards_of(answer: dict[str, Any] | RayMQError) -> int:
    """How many shards the cluster has, as one of them says; 0: it does not say."""
    return 0 if isinstance(answer, RayMQError) else int(answer.get("shards", 0))


def _state_of(shard_states: set[Any]) -> str:
    """The state of a cluster."""
    if shard_states == {"RUNNING"}:
        return "RUNNING"
    return "DOWN" if shard_states <= _ABSENT else "DEGRADED"


def _in_trouble(facts: dict[str, Any]) -> bool:
    """Whether a lost node may be the cause of a shard's state."""
    return facts["state"] in _ABSENT or _follower_lags(facts)


def _cause_of_absence(away: list[str], error: str | None) -> str:
    """What is wrong with a shard of lost nodes, and with it the shard's own error."""
    from .deploy.placement import describe_away

    cause = "; ".join(map(describe_away, away))
    return f"{cause} ({error})" if error else cause


def _follower_lags(facts: dict[str, Any]) -> bool:
    """Whether a shard has stored bytes that its followers have not confirmed."""
    has_followers = "replication" in facts.get("supervisor", {}).get("roles", {})
    return has_followers and bool(facts.get("appended", 0) > facts.get("confirmed", 0))


def _facts(shard: int, answer: dict[str, Any] | RayMQError) -> dict[str, Any]:
    """The `status` entry for a shard with this answer."""
    if not isinstance(answer, RayMQError):
        return answer
    state = "UNREACHABLE" if isinstance(answer, DeliveryUnknown) else "DOWN"
    return {"shard": shard, "state": state, "error": str(answer)}
