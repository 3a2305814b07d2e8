"""One replica of a shard in this process: its host, with the classes of both roles."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from raymq.actors.follower.follower import Follower
from raymq.actors.follower.log_port import FollowerLogPort
from raymq.actors.follower.session import FollowerSession
from raymq.actors.leader.leader import Leader
from raymq.actors.leader.put_acks import PutCounters
from raymq.actors.shared.latency import LatencyCounter
from raymq.actors.supervise.replica_host import ReplicaHost, RoleClasses
from raymq.store.config.store_config import StoreConfig


def open_replica(root: Path, config: StoreConfig, **options: Any) -> ReplicaHost:
    """Open, recover and serve the store in `root`. `options`: those of `ReplicaHost`, but for `classes`.

    Raises: as `MessageStore.open`, with nothing left open.
    """
    ports: dict[int, FollowerLogPort] = {}

    def port_of(host: ReplicaHost) -> FollowerLogPort:
        return ports.setdefault(id(host), FollowerLogPort(host))

    def streams(host: ReplicaHost) -> FollowerSession:
        port = port_of(host)
        session = FollowerSession(
            port,
            host.identity(),
            host.elections,
            leader_id=host.sole_candidate,
        )
        port.frame_epoch = lambda: session.epoch
        port.acknowledge_synced = session.acknowledge_synced
        # A replica that lacks messages of compacted queues never counts, and never leads (ADR 0016).
        host.elections.matched = lambda: (0, 0) if host.store.lacks_compacted else session.matched()
        return session

    classes = RoleClasses(
        leader=partial(Leader, counters=PutCounters(), latency=LatencyCounter()),
        follower=lambda host: Follower(host, port_of(host)),
        streams=streams,
    )
    return ReplicaHost(root, config, classes=classes, **options)
