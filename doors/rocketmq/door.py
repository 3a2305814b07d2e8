"""The server beside one replica: it serves RocketMQ's clients, and says where it listens.

Every server reaches every shard, so its death touches no put, and a client that dials the server of a former leader is
served. Three times while its word holds, a server says to the replicas of its shard where it listens. It asks the
shards where all servers are, and tries to take the port for name server requests, which one server of a machine has at
a time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import ssl
import threading
from contextlib import closing
from typing import Any, NamedTuple, Protocol

from raymq.actors.protocol.tls import TLS_PREFIX, is_loopback, url_of
from raymq.client.handle import ClusterHandle, shards_of
from raymq.client.transport.flight_client import ShardConnection
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Unavailable

from .access import Access
from .rocketmq_server import RocketMQServer
from .topology import BrokerAddress, BrokerTable

logger = logging.getLogger("raymq.rocketmq")

PROTOCOL = "rocketmq"
#: between two rounds of announcements
ROUND_S = 10.0
#: between two tries to begin, and to take the port of the node while another server has it
RETRY_S = 0.5
#: how long a replica may take to answer
CALL_TIMEOUT_S = 2.0
#: how long a server that begins waits for word of the servers of other shards: routes without them hide queues
OTHERS_S = 5.0


class DoorOptions(NamedTuple):
    """Which replica a server is beside, and how it listens."""

    cluster_id: str
    shard: int
    replica: int
    token: str
    #: certificate authority of the shards, PEM; None: without TLS
    ca: bytes | None
    #: the address to listen on, and the IP address that clients dial
    bind: str
    advertised: str
    #: the port of the node for name server requests
    port: int
    access: Access
    #: clients may connect without TLS from other machines
    insecure: bool
    tls: ssl.SSLContext | None = None


class ReplicaPlace(Protocol):
    """What a server finds beside it: the directory of its replica."""

    def endpoint(self) -> str | None:
        """Where the replica listens; None: it has not begun."""

    def kept_port(self) -> int:
        """The port that the server of this replica had before; 0: none."""

    def keep_port(self, host: str, port: int) -> None:
        """Note where the server listens."""

    def forget_port(self) -> None:
        """Note that the server has ended for good."""


class RocketMQDoor:
    """Serves until `close`. Callers: `run` by one thread, the others by any."""

    def __init__(self, options: DoorOptions, place: ReplicaPlace) -> None:
        self._options = options
        self._place = place
        self._brokers = BrokerTable()
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._server: RocketMQServer | None = None
        self._has_node_port = False
        #: and it has said so
        self._is_node_port_known = False
        self._error: str | None = None
        #: why the port of the node could not be taken
        self._node_port_error: str | None = None

    def run(self) -> None:
        """Serve. Whatever fails is tried again."""
        try:
            while not self._closing.is_set():
                try:
                    self._serve()
                except Exception as error:
                    # Any error: the process stays to report it.
                    text = f"{type(error).__name__}: {error}"
                    if text != self._error:
                        logger.warning("the server for RocketMQ's clients: %s", text)
                    self._error = text
                    self._closing.wait(RETRY_S)
        finally:
            self._ended.set()

    def close(self, timeout_s: float, *, for_good: bool = False) -> None:
        """Send clients away, and end. Args: `for_good`: the next start of the cluster has no such server."""
        self._closing.set()
        self._ended.wait(timeout_s)
        if for_good:
            self._place.forget_port()

    def status(self) -> dict[str, Any]:
        """What this server says of itself: `state` STARTING or RUNNING, its addresses, and what keeps it from work."""
        server, options = self._server, self._options
        address = None if server is None else str(server.addresses[options.shard])
        return {
            "state": "STARTING" if server is None else "RUNNING",
            "address": address,
            "node_port": options.port if self._is_node_port_known else None,
            "node_port_error": self._node_port_error,
            "connections": 0 if server is None else server.connections,
            "error": self._error,
            "pid": os.getpid(),
        }

    def counts(self) -> tuple[dict[int, int], dict[int, int], int]:
        """Requests by code, refusals by response code, and open connections."""
        server = self._server
        if server is None:
            return {}, {}, 0
        return dict(server.counts.requests), dict(server.counts.refusals), server.connections

    # --- serving ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Begin, and serve until `close`. Raises: any error of the beginning."""
        options = self._options
        endpoint = self._place.endpoint()
        if endpoint is None:
            raise Unavailable("its replica has not said where it listens", field="endpoint")
        with closing(self._connect(endpoint)) as handle:
            server = self._listen(handle)
            address = server.addresses[options.shard]
            with server:
                self._place.keep_port(*address)
                self._announce(handle, address)
                self._wait_for_others(handle)
                self._server, self._error = server, None
                try:
                    self._go_on(handle, server, address)
                finally:
                    self._server, self._has_node_port = None, False
                    self._announce(handle, None)

    def _connect(self, endpoint: str) -> ClusterHandle:
        """A handle on the cluster. Raises: RayMQError while the replica does not answer."""
        options = self._options
        handle = ClusterHandle.bootstrap(url_of(endpoint), token=options.token, ca=options.ca)
        if options.shard in handle.endpoints:
            return handle
        # It does not know any shard by which the others could be found.
        handle.close()
        raise Unavailable(f"shard {options.shard} has no leader yet", field="leader")

    def _listen(self, handle: ClusterHandle) -> RocketMQServer:
        """A server at the port of before, or at another one if that is taken."""
        options, kept = self._options, self._place.kept_port()
        # Where traffic must be encrypted, it is: a signature hides no message.
        takes_plain = options.tls is None or options.insecure or is_loopback(options.bind)
        for port in (kept, 0) if kept else (0,):
            try:
                return RocketMQServer(
                    handle,
                    host=options.bind,
                    advertised=options.advertised,
                    shard_ports={options.shard: port},
                    brokers=self._brokers,
                    access=options.access,
                    tls=options.tls,
                    takes_plain=takes_plain,
                )
            except OSError as error:
                if not port or error.errno != errno.EADDRINUSE:
                    raise
        raise Unavailable("no port is free", field="port")

    def _wait_for_others(self, handle: ClusterHandle) -> None:
        """Until a server of each shard is known, or for a while."""
        for _ in range(int(OTHERS_S / RETRY_S)):
            self._learn(handle)
            if len(self._brokers.shards()) >= handle.shards or self._closing.wait(RETRY_S):
                return

    def _go_on(self, handle: ClusterHandle, server: RocketMQServer, address: BrokerAddress) -> None:
        clock = Clock()
        next_s = clock.monotonic() + ROUND_S
        while not self._closing.is_set():
            is_new = self._take_node_port(server)
            if is_new or clock.monotonic() >= next_s:
                self._announce(handle, address)
                self._learn(handle)
                next_s = clock.monotonic() + ROUND_S
            self._closing.wait(ROUND_S if self._has_node_port else RETRY_S)

    def _take_node_port(self, server: RocketMQServer) -> bool:
        """Take the port for name server requests, unless another server of this machine has it. Returns: took it."""
        if self._has_node_port:
            return False
        try:
            server.listen(self._options.port)
        except OSError as error:
            self._node_port_error = str(error)
            return False
        self._has_node_port, self._node_port_error = True, None
        return True

    # --- addresses --------------------------------------------------------------------------------

    def _announce(self, handle: ClusterHandle, address: BrokerAddress | None) -> None:
        """Say to the replicas of the shard where this server listens. Those that do not answer hear it later.

        Args: `address`: None: nowhere any more.
        """
        options = self._options
        own = self._place.endpoint()
        known = handle.replica_endpoints.get(options.shard, {}).values()
        found = {own, handle.endpoints.get(options.shard), *known, *self._replicas(own)} - {None}
        arguments: dict[str, object] = {"protocol": PROTOCOL, "replica": options.replica}
        if address is not None:
            arguments |= {"address": list(address), "pid": os.getpid()}
            if self._has_node_port:
                arguments["node_port"] = options.port
        for endpoint in sorted(str(each) for each in found):
            with contextlib.suppress(RayMQError), closing(self._connection(endpoint)) as connection:
                connection.call("set_door", arguments, timeout=CALL_TIMEOUT_S)
        self._is_node_port_known = "node_port" in arguments

    def _replicas(self, own: str | None) -> set[str]:
        """Where the replicas of the shard listen, as the one beside this server knows.

        Each start of a replica changes that, and one that has led before answers the handle as well as the leader.
        """
        if own is None:
            return set()
        with contextlib.suppress(RayMQError), closing(self._connection(own)) as connection:
            found = connection.call("replicas", {}, timeout=CALL_TIMEOUT_S)
            return {str(each) for each in found.get(str(self._options.shard), {}).values()}
        return set()

    def _connection(self, endpoint: str) -> ShardConnection:
        options = self._options
        ca = options.ca if endpoint.startswith(TLS_PREFIX) else None
        return ShardConnection(
            endpoint, options.token, options.cluster_id, shard=options.shard, ca=ca
        )

    def _learn(self, handle: ClusterHandle) -> None:
        """Ask each shard where its servers are. Never raises for one that does not answer."""
        with contextlib.suppress(RayMQError):
            facts = handle.call(self._options.shard, "describe", {}, timeout_s=CALL_TIMEOUT_S)
            handle.learn_shards(shards_of(facts))
            if len(handle.endpoints) < handle.shards:
                handle.refresh()
        for shard in range(handle.shards):
            with contextlib.suppress(RayMQError):
                found = handle.call(shard, "doors", {}, timeout_s=CALL_TIMEOUT_S)
                servers = {
                    int(replica): BrokerAddress(*facts["address"])
                    for replica, facts in found["doors"].get(PROTOCOL, {}).items()
                }
                self._brokers.note(shard, found["leader"], servers)
