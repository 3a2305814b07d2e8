"""The present role of a replica in this process, as what it is."""

from __future__ import annotations

from raymq.actors.follower.log_port import FollowerLogPort
from raymq.actors.follower.session import FollowerSession
from raymq.actors.leader.leader import Leader
from raymq.actors.supervise.replica_host import ReplicaHost


def leader_of(host: ReplicaHost) -> Leader:
    """The leader's part of a replica that leads."""
    assert isinstance(host.role, Leader)
    return host.role


def log_of(host: ReplicaHost) -> FollowerLogPort:
    """The log of a replica that follows, as its leader's streams write it."""
    assert isinstance(host.streams, FollowerSession)
    assert isinstance(host.streams._log, FollowerLogPort)
    return host.streams._log
