"""The Ray actors: thin wrappers around plain classes.

No constructor recovers or blocks, because an exception in `__init__` on a restart ends a Ray actor for good. The state
is STARTING until a thread has locked and recovered the replica, which it retries.

Every actor gets one dict of plain values, the spec, because Ray gives it to each restart of the actor, too.
`cluster/deploy/actor_set.py` makes it, and a test compares its fields with this table:

    cluster, cluster_id, shards, version   name and id of the cluster, its shards, RayMQ's version at its start
    shard, replica, node                   which replica; its node label, None: all replicas are on one machine
    generation, generations                how often an operator has replaced the replica; by id, each of the shard
    least_epoch                            no process of the shard serves an epoch below
    role                                   "commit_log" or a satellite's role
    candidates, voters                     the replicas that may lead; those that count, others only get the log
    satellites                             roles of the replica's satellites
    replicas, flush, options               copies of each shard, flush mode; the other fields of StoreConfig
    token, tls, ca, insecure, host         access: see security.md; `host` is the address on which shards listen
    placement, ephemeral                   node labels of all replicas; whether the directory may be a volatile one
    formed, joining                        whether the shard has served once; whether it was added and may lack topics
    data_dir, cluster_dir                  directory of the replica; directory of the cluster
    rocketmq_port, rocketmq_access         of the servers for RocketMQ's clients
    peers                                  replica -> [directory, actor name] of the shard's other replicas
    prepare                                "module:name" of a function in cluster/, which actors/ must not import
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from raymq.actors.shared.time_slice import shorten_time_slice
from raymq.replication.incarnation import GENERATION_SHIFT, make_incarnation
from raymq.replication.quorum import can_fail_over, can_spare
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, NotServing, RayMQError, StoreDamaged, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig

from .actor_spec import ActorSpec, Credentials, ReadyRow
from .damaged_store import begin_again
from .peer_calls import EndpointQuestions, NotedCalls
from .process_setup import keep_freed_memory, keep_pandas_out, set_log_level
from .replica_files import (
    PeerAddresses,
    ShardAddresses,
    endpoint_of,
    generation_of,
    old_port,
    read_door,
    read_json,
    read_last_end,
    resolve_ip,
    write_endpoint,
    write_json,
    write_last_end,
    write_leadership,
)

if TYPE_CHECKING:
    from raymq.actors.satellites.service import Service
    from raymq.actors.server.flight.flight_server import Server
    from raymq.actors.server.ray.ray_methods import RayMethods
    from raymq.actors.supervise.replica_host import ReplicaHost

    from .replica_transport import ReplicaTransport

logger = logging.getLogger("raymq")

#: between two attempts to lock and recover a replica
RETRY_S = 0.25
RETRY_MAX_S = 5.0
#: pause between the log line of a process that cannot continue and its exit
END_PAUSE_S = 1.0
EXIT_GAVE_UP = 71
#: how long a satellite whose CommitLog closed stays. `stop` ends it meanwhile. If it ended earlier, Ray would start
#: another one
LINGER_MS = 10_000
#: a satellite whose service loop died
EXIT_LOOP_DIED = 70
#: how often a call of an actor by itself is looked at until it has begun
LOST_CALL_S = 1.0
#: how long a replica waits for Ray to say where another one listens
PEER_TIMEOUT_S = 2.0


def start_thread(target: Callable[..., None], *args: object) -> None:
    """Begin an actor's work in a thread, so that its constructor returns.

    The thread and all that it starts have short time slices, where the kernel has them.
    """

    def run() -> None:
        shorten_time_slice()
        set_log_level(os.environ)
        target(*args)

    try:
        threading.Thread(target=run, name="raymq-start", daemon=True).start()
    except RuntimeError:
        # An exception in the constructor would end the actor for good. After an exit Ray starts it again.
        logger.exception("no thread could be started")
        os._exit(EXIT_GAVE_UP)


def _load(path: str) -> Any:
    """Import the object named "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class CommitLogActor:
    """Hosts one replica's CommitLog role."""

    def __init__(self, spec: ActorSpec) -> None:
        self._spec = spec
        #: these three are None while starting
        self._host: ReplicaHost | None = None
        self._server: Server | None = None
        self._methods: RayMethods | None = None
        self._endpoint: str | None = None
        self._error: str | None = None
        self._is_damaged = False
        #: its damaged store was moved aside
        self._has_begun_again = False
        #: its damaged store may be moved aside, once the other replicas can spare it
        self._may_begin_again = False
        #: why and when a process of this replica gave up last; None: none did
        self._last_end: dict[str, Any] | None = None
        self._addresses = _addresses(spec)
        self._questions = _questions(spec, self._addresses)

        self._closing = threading.Event()
        self._incarnation = make_incarnation(spec["generation"], secrets.randbits(GENERATION_SHIFT))

        # The default of 5 ms makes the ack thread wait that long for a busy reader thread.
        sys.setswitchinterval(0.0005)
        keep_freed_memory()
        start_thread(self._start)

    def _start(self) -> None:
        """Open the replica, however often that must be tried, then report its metrics until `close`."""
        wait_s = RETRY_S
        while not self._closing.is_set():
            try:
                self._open()
                self._error = None
                # Objects that live as long as the process are left out of every full collection.
                gc.collect()
                gc.freeze()
                break
            except Exception as error:
                # Any error, not only RayMQError: the actor must stay up to report it.
                self._may_begin_again = self._is_mendable(error)
                self._error = f"{type(error).__name__}: {error}"
                self._is_damaged = isinstance(error, Corrupt)
                logger.warning("replica %s: %s", self._spec["data_dir"], self._error)
                if self._begin_again(error):
                    continue
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_MAX_S)

        self._report_metrics()

    def _begin_again(self, error: Exception) -> bool:
        """Move a damaged store aside, if the other replicas can spare it. Returns: whether it was moved."""
        spec = self._spec
        if not self._is_mendable(error):
            return False
        try:
            if not can_spare(len(spec["voters"]), self._ask_others()):
                return False
            aside = begin_again(Path(spec["data_dir"]), files=Files(), clock=Clock())
        except (RayMQError, OSError) as failure:
            # It is tried again: a start waits on.
            logger.warning("the damaged store cannot be moved aside: %s", failure)
            return False
        if aside is None:
            self._may_begin_again = False
            return False
        self._has_begun_again = True
        write_last_end(Path(spec["data_dir"]), f"{self._error}; the damaged store is now {aside}")
        return True

    def _is_mendable(self, error: Exception) -> bool:
        """Whether the other replicas have what a damaged store lacks, so that this one may begin again."""
        voters = self._spec["voters"]
        is_counted = can_fail_over(len(voters)) and self._spec["replica"] in voters
        # Other causes are mistakes, and a copy mends none.
        return is_counted and isinstance(error, StoreDamaged)

    def _ask_others(self) -> list[tuple[bool, bool]]:
        """Of each other voter that answers: whether it leads, and whether it is complete."""
        answers = []
        for replica in self._spec["voters"]:
            if replica == self._spec["replica"]:
                continue
            with contextlib.suppress(RayMQError, OSError):
                with contextlib.closing(self._connect_peer(replica)) as calls:
                    status = calls.status(PEER_TIMEOUT_S)
                leads = status["mode"] == "leader" and bool(status["writable"])
                answers.append((leads, bool(status["is_complete"])))
        return answers

    def _open(self) -> None:
        """Recover the replica and serve it. Raises: any error, with nothing left open."""
        keep_pandas_out()
        from raymq.actors.server.flight.flight_server import serve
        from raymq.actors.server.ray.ray_methods import RayMethods

        spec = self._spec
        root = Path(spec["data_dir"])
        restarted = _was_restarted()
        address = _load(spec["prepare"])(spec, restarted=restarted)
        self._last_end = read_last_end(root)
        is_first = not restarted and not spec["formed"] and not spec["generation"]
        is_first = is_first and not self._has_begun_again
        store_ip = resolve_ip(address.advertised)
        port = old_port(root, address.bind)
        # What RocketMQ's clients dial to look a message up by its id. An actor of an older version has no such field.
        door = read_door(root, "rocketmq") if spec.get("rocketmq_port") else None
        host = self._make_host(root, is_first=is_first, store_host=door or (store_ip, port))

        with contextlib.ExitStack() as undo:
            undo.callback(host.close, 0.0)
            host.addresses.set_routes(
                read_json(root, "routes") or {}, read_json(root, "replicas") or {}
            )
            server = serve(
                host,
                host=address.bind,
                port=port,
                token=spec["token"],
                tls=spec["tls"],
                # No put comes before the records can name the port.
                on_bound=lambda port: host.set_store_host(*(door or (store_ip, port))),
            )
            undo.callback(server.close)

            write_endpoint(root, address.advertised, server.port, tls=spec["tls"])
            self._endpoint = endpoint_of(address.advertised, server.port, tls=spec["tls"])
            self._methods = RayMethods(host)
            self._server = server
            self._host = host
            undo.pop_all()

    def _make_host(self, root: Path, *, is_first: bool, store_host: tuple[str, int]) -> ReplicaHost:
        """The host of the spec, which recovers the replica.

        Args: `is_first`: no start of it was complete before, and it takes the place of no other replica. `store_host`:
        what records name that are written before the replica serves clients.
        """
        from raymq.actors.replica import open_replica
        from raymq.actors.shared.control_block import COMMIT_REAL_TIME

        spec = self._spec
        # As in RocketMQ, a follower has no pool: the bytes that it acknowledges are in its files.
        config = replace(
            _config(spec),
            transient_pool=COMMIT_REAL_TIME in spec["satellites"],
            store_host=store_host,
        )

        identity = {
            **_facts(
                spec,
                *("cluster_id", "shard", "shards", "replica", "replicas", "voters", "generation"),
                *("flush", "version", "joining"),
            ),
            "name": spec["cluster"],
            "delay_levels": len(config.delay_levels_ms),
            "incarnation": self._incarnation,
            "pid": os.getpid(),
        }

        return open_replica(
            root,
            config,
            identity=identity,
            roles=spec["satellites"],
            members=spec["voters"],
            candidates=spec["candidates"],
            connect_peer=self._connect_peer,
            addresses=ShardAddresses(self._addresses, spec["replica"], lambda: self._endpoint),
            # Without elections a replica that has lost its disk cannot rejoin: the leader copies its log to it.
            is_new_complete=is_first or not can_fail_over(spec["replicas"]),
            generations=spec["generations"],
            least_epoch=spec["least_epoch"],
            note_leadership=lambda epoch: write_leadership(root, epoch),
            end_process=lambda reason: _exit_soon(root, reason),
        )

    def _connect_peer(self, replica: int) -> NotedCalls:
        """Connect to another replica, for elections and for damaged bytes. Raises: Unavailable."""
        spec = self._spec
        found = self._addresses.find(replica) or self._questions.ask(replica, PEER_TIMEOUT_S)
        if found is None:
            raise Unavailable(
                f"the address of replica {replica} is not known yet", field="endpoint"
            )
        endpoint = found

        def note_failure() -> None:
            self._addresses.note_failure(replica, endpoint)
            self._questions.begin(replica)

        return NotedCalls(
            _transport(spec).replica_calls(endpoint, self._sender),
            # An address at which the replica answers is as good as its own word.
            note_answer=lambda: self._addresses.note(replica, endpoint, is_own=True),
            note_failure=note_failure,
        )

    def _sender(self) -> dict[str, object]:
        """What this replica says of itself in each message of elections."""
        replica, endpoints = self._spec["replica"], self._addresses.known()
        if self._endpoint is not None:
            endpoints[str(replica)] = self._endpoint
        return {"replica": replica, "endpoints": endpoints}

    def _report_metrics(self) -> None:
        """Run until `close`. A follower has no metrics of its own."""
        from raymq.actors.leader.metrics import Collector, ray_instrument

        host = self._host
        if host is not None:
            tags = {"cluster": self._spec["cluster"], "shard": str(self._spec["shard"])}
            collector = Collector(host.metrics, ray_instrument, tags=tags)
            collector.run(self._closing)

    def ready(self) -> ReadyRow:
        """What this replica says of itself while a cluster is started or changed."""
        host = self._host
        if host is None:
            return {
                "state": "STARTING",
                "endpoint": None,
                "error": self._error,
                "is_damaged": self._is_damaged,
                "may_begin_again": self._may_begin_again,
                "mode": None,
                "epoch": 0,
                "missing_roles": [],
                "pid": os.getpid(),
            }

        return {
            "state": host.report.state,
            "endpoint": self.endpoint(),
            "error": host.report.cause,
            "mode": host.roles.mode,
            "epoch": host.elections.epoch,
            "missing_roles": host.supervisor.missing_roles(),
            "pid": os.getpid(),
            "is_complete": host.elections.is_complete,
            "confirmed": host.log.confirmed,
        }

    def endpoint(self) -> str | None:
        """host:port of the Flight server, with TLS tls://host:port, or None while starting."""
        return self._endpoint

    def status(self) -> dict[str, Any]:
        """The host's status, or why there is none yet."""
        if self._host is None:
            return {
                **_facts(self._spec, "cluster_id", "shard", "replica"),
                "mode": None,
                "state": "STARTING",
                "error": self._error,
                "pid": os.getpid(),
                "endpoint": None,
                "supervisor": {},
            }
        return {**self._host.status(), "endpoint": self.endpoint(), "last_end": self._last_end}

    # --- protocol/ray_calls.py: each in its group of GROUP_OF -------------------------------------

    def open_stream(self, *args: Any) -> Any:
        """See `RayMethods.open_stream`."""
        return _serving(self).open_stream(*args)

    def append(self, *args: Any) -> Any:
        """See `RayMethods.append`."""
        return (self._methods or _serving(self)).append(*args)

    def read(self, *args: Any) -> Any:
        """See `RayMethods.read`."""
        return _serving(self).read(*args)

    def lease(self, *args: Any) -> Any:
        """See `RayMethods.lease`."""
        return _serving(self).lease(*args)

    def call(self, *args: Any) -> Any:
        """See `RayMethods.call`."""
        return _serving(self).call(*args)

    def credentials(self) -> Credentials:
        """Token, addresses and cluster id for a client. Programs inside of Ray are trusted."""
        spec = self._spec
        return {
            "cluster_id": spec["cluster_id"],
            # Shards may have been added since.
            "shards": spec["shards"] if self._host is None else self._host.identity()["shards"],
            "replicas": spec["replicas"],
            "token": spec["token"],
            "ca": spec["ca"],
            "placement": spec["placement"],
            "delay_levels": len(_config(spec).delay_levels_ms),
        }

    def set_routes(self, routes: dict[str, str], replicas: dict[str, dict[str, str]]) -> None:
        """Set the endpoints of all leaders, and of all replicas, so that each replica can route a client to others."""
        root = Path(self._spec["data_dir"])
        write_json(root, "routes", routes)
        write_json(root, "replicas", replicas)
        for replica, endpoint in replicas.get(str(self._spec["shard"]), {}).items():
            self._addresses.note(int(replica), endpoint, is_own=False)
        if self._host is not None:
            self._host.addresses.set_routes(routes, replicas)

    def close(self, timeout_s: float = 10.0) -> None:
        """Shut down in order. The caller kills the actor afterwards."""
        self._closing.set()
        if self._server is not None:
            self._server.close()
        if self._host is not None:
            self._host.close(timeout_s)


def _serving(actor: CommitLogActor) -> RayMethods:
    """The actor's RayMethods. Not one of its methods, because Ray wraps those. Raises: Unavailable while it starts."""
    if actor._methods is None:
        raise NotServing(f"the shard is starting: {actor._error or 'recovering'}", field="shard")
    return actor._methods


class SatelliteActor:
    """Hosts a satellite's service. If the service ends by itself, the process ends.

    No other process calls it. CommitLog reaches it by the control block, and `stop` kills it after its CommitLog.
    """

    def __init__(self, spec: ActorSpec) -> None:
        """Make and run the service in a thread: an exception in an actor's constructor would end it for good."""
        self._spec = spec
        #: set when the main thread is in `occupy_main_thread`
        self._is_occupied = threading.Event()
        start_thread(_run_or_exit, self._make_for_store)
        _call_self("occupy_main_thread", self._is_occupied)

    def occupy_main_thread(self) -> None:
        """Return never, so that Ray's main thread sleeps.

        Between calls Ray wakes the main thread of every actor each 10 ms, which is most of the CPU that an idle
        satellite takes. The service does not depend on this call.
        """
        self._is_occupied.set()
        threading.Event().wait()

    def _make_for_store(self) -> Service:
        """The service, once CommitLog has moved the directory of a replaced replica aside."""
        root = Path(self._spec["data_dir"])
        while generation_of(root) < self._spec["generation"]:
            time.sleep(RETRY_S)
        return self._make()

    def _make(self) -> Service:
        """The service of this role."""
        raise NotImplementedError


class FlushActor(SatelliteActor):
    """Hosts GroupCommit or FlushRealTime. Imports neither pyarrow nor Flight."""

    def _make(self) -> Service:
        from raymq.actors.satellites.flush_service import FlushService

        spec = self._spec
        return FlushService(spec["data_dir"], spec["role"], _config(spec))


class CommitActor(SatelliteActor):
    """Hosts CommitRealTime. Imports neither pyarrow nor Flight."""

    def _make(self) -> Service:
        from raymq.actors.satellites.commit_service import CommitService
        from raymq.store.config.promise import awaits_commit

        spec = self._spec
        eager = awaits_commit(spec["flush"], has_followers=bool(spec["peers"]))
        return CommitService(spec["data_dir"], _config(spec), eager=eager)


class ReplicationActor(SatelliteActor):
    """Hosts the Replication role of a leader whose shard has followers."""

    def __init__(self, spec: ActorSpec) -> None:
        self._addresses = _addresses(spec)
        self._questions = _questions(spec, self._addresses)
        super().__init__(spec)

    def _make(self) -> Service:
        from raymq.actors.satellites.replicator import Replicator

        keep_freed_memory()
        spec = self._spec
        return Replicator(
            spec["data_dir"],
            _config(spec),
            cluster_id=spec["cluster_id"],
            shard=spec["shard"],
            replica=spec["replica"],
            followers=tuple(spec["peers"]),
            voters=spec["voters"],
            transport=_transport(spec),
            peer_endpoint=self._peer_endpoint,
        )

    def _peer_endpoint(self, replica: int) -> str | None:
        """The endpoint at which a replica listens now, or None while unknown. Callers: a connecting thread."""
        if len(self._spec["candidates"]) == 1:
            # Without elections no replica names its address.
            asked = self._questions.ask(replica, PEER_TIMEOUT_S)
            return asked or self._addresses.find(replica)

        known = self._addresses.find(replica)
        if known is None:
            return self._questions.ask(replica, PEER_TIMEOUT_S)
        # The next attempt reads the answer, if this address is out of date.
        self._questions.begin(replica)
        return known


def _addresses(spec: ActorSpec) -> PeerAddresses:
    """Where the other replicas listen, as this one knows it."""
    directories = {replica: Path(data_dir) for replica, (data_dir, _) in spec["peers"].items()}
    return PeerAddresses(Path(spec["data_dir"]), directories, over_nodes=spec["node"] is not None)


def _questions(spec: ActorSpec, addresses: PeerAddresses) -> EndpointQuestions:
    """Questions to Ray, whose answers are kept as the replicas' own word."""
    return EndpointQuestions(
        lambda replica: _ask_ray(spec, replica),
        lambda replica, endpoint: addresses.note(replica, endpoint, is_own=True),
    )


def _ask_ray(spec: ActorSpec, replica: int) -> str | None:
    """The endpoint of a replica on another node; None: its actor does not answer.

    On one machine the endpoint files are enough.
    """
    if spec["node"] is None:
        return None
    import ray

    try:
        actor = ray.get_actor(spec["peers"][replica][1], namespace="raymq")
        found: Any = ray.get(actor.endpoint.remote(), timeout=PEER_TIMEOUT_S)
    except (ray.exceptions.RayError, ValueError) as error:
        logger.info("the actor of replica %d does not answer: %s", replica, error)
        return None
    endpoint: str | None = found
    return endpoint


def _transport(spec: ActorSpec) -> ReplicaTransport:
    """How this replica reaches the others of its shard. It imports Flight."""
    from .replica_transport import ReplicaTransport

    return ReplicaTransport(spec["token"], cluster_id=spec["cluster_id"], shard=spec["shard"])


def _facts(spec: ActorSpec, *names: str) -> dict[str, object]:
    values = cast(dict[str, object], spec)
    return {name: values[name] for name in names}


def _config(spec: ActorSpec) -> StoreConfig:
    """The store's options as an actor was given them."""
    return StoreConfig(flush=spec["flush"], **spec["options"])


def _exit_soon(root: Path, reason: str) -> None:
    """End a CommitLog's process that cannot continue. Ray starts the next one, which recovers.

    After a pause, so that answers under way go out, and so that a lasting cause does not restart it in a tight loop.
    """
    logger.error("this process ends and is started again: %s", reason)
    write_last_end(root, reason)
    try:
        threading.Timer(END_PAUSE_S, os._exit, (EXIT_GAVE_UP,)).start()
    except RuntimeError:
        # No thread can be started: that may be the reason.
        os._exit(EXIT_GAVE_UP)


def _run_or_exit(make: Callable[[], Service]) -> None:
    """Run services. If one cannot be made, or its loop dies, the process exits and Ray starts a new one."""
    from raymq.actors.satellites.service import serve_grants

    try:
        serve_grants(make, linger_ms=LINGER_MS)
    except BaseException:
        logger.exception("the service loop died")
        os._exit(EXIT_LOOP_DIED)


def _call_self(method: str, has_begun: threading.Event) -> None:
    """Have Ray run a method of the actor whose constructor this is, after the constructor. Outside of Ray: nothing.

    Ray may lose the call of an actor that it starts again on a busy machine. It is then called again, in a thread.
    """
    import ray

    if not ray.is_initialized():
        return

    def call(actor: Any) -> None:
        result = None
        while not has_begun.is_set():
            try:
                # The method never returns, so that a result is an error.
                if result is None or ray.wait([result], timeout=0)[0]:
                    result = getattr(actor, method).remote()
            except Exception:
                logger.exception("%s is called again", method)
                result = None
            has_begun.wait(LOST_CALL_S)

    try:
        start_thread(call, ray.get_runtime_context().current_actor)
    except Exception:
        # An exception in the constructor would end the actor for good.
        logger.exception("%s is not called", method)


def _was_restarted() -> bool:
    """Whether Ray runs this actor again, after its process or its node ended."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)
