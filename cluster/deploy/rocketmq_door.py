"""The Ray actor of a server for RocketMQ's clients, beside a replica. The server itself is in `doors/rocketmq`.

It needs no lease: its death touches no put, and Ray starts it again.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

from raymq.actors.leader.metrics import Collector, Metric, MetricValues, ray_instrument
from raymq.actors.protocol import tls
from raymq.actors.ray.actor_classes import start_thread
from raymq.actors.ray.actor_spec import ActorSpec
from raymq.actors.ray.process_setup import keep_freed_memory
from raymq.actors.ray.replica_files import (
    forget_door,
    read_door,
    read_endpoint,
    resolve_ip,
    write_door,
)
from raymq.doors.rocketmq.door import PROTOCOL, DoorOptions, RocketMQDoor
from raymq.store.base.files import Files

from .prepare_replica import address_of

logger = logging.getLogger("raymq.rocketmq")

#: between two tries to find the own address and certificates
RETRY_S = 5.0
_COMMON = ("cluster", "shard", "replica")
ROCKETMQ_METRICS = (
    Metric(
        "raymq_rocketmq_connections",
        "gauge",
        "Open connections of RocketMQ's clients.",
        (),
        _COMMON,
    ),
    Metric(
        "raymq_rocketmq_requests_total",
        "counter",
        "Requests of RocketMQ's clients, by request code; -1: not supported.",
        ("code",),
        _COMMON,
    ),
    Metric(
        "raymq_rocketmq_refusals_total",
        "counter",
        "Requests that were not answered with SUCCESS or the like, by response code.",
        ("code",),
        _COMMON,
    ),
)


class _Place:
    """The directory of the replica, as `ReplicaPlace`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def endpoint(self) -> str | None:
        return read_endpoint(self._root)

    def kept_port(self) -> int:
        kept = read_door(self._root, PROTOCOL)
        return 0 if kept is None else kept[1]

    def keep_port(self, host: str, port: int) -> None:
        write_door(self._root, PROTOCOL, host, port)

    def forget_port(self) -> None:
        forget_door(self._root, PROTOCOL)


class RocketMQDoorActor:
    """Hosts the server of one replica."""

    def __init__(self, spec: ActorSpec) -> None:
        self._spec = spec
        self._door: RocketMQDoor | None = None
        self._error: str | None = None
        self._closing = threading.Event()
        # The default of 5 ms makes the event loop wait that long for a thread that reads answers of a shard.
        sys.setswitchinterval(0.0005)
        keep_freed_memory()
        start_thread(self._run)

    def _run(self) -> None:
        """Serve until `close`, and report metrics."""
        options = None
        while options is None:
            try:
                options = _options(self._spec)
            except Exception as error:
                # A name that cannot be resolved now, or certificates that are missing.
                self._error = f"{type(error).__name__}: {error}"
                logger.warning("the server for RocketMQ's clients: %s", self._error)
                if self._closing.wait(RETRY_S):
                    return
        door = self._door = RocketMQDoor(options, _Place(Path(self._spec["data_dir"])))
        start_thread(self._report_metrics, door)
        door.run()

    def _report_metrics(self, door: RocketMQDoor) -> None:
        spec = self._spec
        tags = {
            "cluster": spec["cluster"],
            "shard": str(spec["shard"]),
            "replica": str(spec["replica"]),
        }
        collector = Collector(
            lambda: _metrics(door), ray_instrument, tags=tags, metrics=ROCKETMQ_METRICS
        )
        collector.run(self._closing)

    def status(self) -> dict[str, Any]:
        """See `RocketMQDoor.status`."""
        door = self._door
        if door is None:
            return {"state": "STARTING", "address": None, "error": self._error, "pid": os.getpid()}
        return door.status()

    def close(self, timeout_s: float, *, for_good: bool = False) -> None:
        """See `RocketMQDoor.close`."""
        self._closing.set()
        if self._door is not None:
            self._door.close(timeout_s, for_good=for_good)


def _metrics(door: RocketMQDoor) -> MetricValues:
    requests, refusals, connections = door.counts()
    return {
        "raymq_rocketmq_connections": connections,
        "raymq_rocketmq_requests_total": {(str(code),): count for code, count in requests.items()},
        "raymq_rocketmq_refusals_total": {(str(code),): count for code, count in refusals.items()},
    }


def _options(spec: ActorSpec) -> DoorOptions:
    """The options of a server. Raises: Rejected for certificates or an address that cannot be used."""
    address = address_of(spec)
    return DoorOptions(
        spec["cluster_id"],
        spec["shard"],
        spec["replica"],
        spec["token"],
        None if spec["ca"] is None else spec["ca"].encode(),
        bind=address.bind,
        advertised=resolve_ip(address.advertised),
        port=spec["rocketmq_port"] or 0,
        access=spec["rocketmq_access"],
        insecure=spec["insecure"],
        tls=_server_context() if spec["tls"] else None,
    )


def _server_context() -> ssl.SSLContext:
    """The certificate of this node, as of its shards."""
    # It says what is wrong with the variables and their files.
    tls.server_identity(os.environ, Files())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(os.environ[tls.SERVER_CERT], os.environ[tls.SERVER_KEY])
    return context
