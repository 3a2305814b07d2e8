"""One replica of a shard in this process: its host, with the classes of both roles."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from raymq.actors.api.operations import merge
from raymq.actors.follower.follower import Follower
from raymq.actors.follower.log_port import FollowerLogPort
from raymq.actors.follower.session import FollowerSession
from raymq.actors.leader.leader import Leader
from raymq.actors.leader.operations.table import OPERATIONS as LEADER_OPERATIONS
from raymq.actors.leader.put_acks import PutCounters
from raymq.actors.shared.latency import LatencyCounter
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.actors.supervise.replica_operations import OPERATIONS as REPLICA_OPERATIONS
from raymq.actors.supervise.replica_options import ReplicaOptions
from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.actors.supervise.roles import RoleClasses
from raymq.store.config.store_config import StoreConfig

#: all operations of a shard: those of any replica, and those of its leader
OPERATIONS = merge(REPLICA_OPERATIONS, LEADER_OPERATIONS)


def open_replica(root: Path, config: StoreConfig, **options: Any) -> ReplicaHost:
    """Open, recover and serve the store in `root`.

    Args: `options`: those of `ReplicaOptions`. One that is None has its default.
    Raises: as `MessageStore.open`, with nothing left open.
    """
    following = _Following()
    classes = RoleClasses(
        leader=partial(Leader, counters=PutCounters(), latency=LatencyCounter()),
        follower=lambda parts: Follower(parts, following.port(parts)),
        streams=following.streams,
    )
    given = {name: value for name, value in options.items() if value is not None}
    return ReplicaHost(root, config, classes=classes, options=ReplicaOptions(**given))


class _Following:
    """What a replica needs to follow. Its streams and its role share the port to the log."""

    def __init__(self) -> None:
        self._port: FollowerLogPort | None = None

    def port(self, parts: ReplicaParts) -> FollowerLogPort:
        """The one port of this replica."""
        self._port = self._port or FollowerLogPort(parts)
        return self._port

    def streams(self, parts: ReplicaParts) -> FollowerSession:
        """What serves the streams of leaders."""
        port = self.port(parts)
        session = FollowerSession(
            port,
            parts.identity.facts(),
            parts.elections,
            leader_id=parts.options.sole_candidate,
        )
        port.frame_epoch = lambda: session.epoch
        port.acknowledge_synced = session.acknowledge_synced
        return session
