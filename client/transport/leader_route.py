"""Where the leader of a shard is, and what a handle on a cluster knows of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from .connection import Transport

Resolver = Callable[[], Mapping[int, str]]


class LeaderRoute(NamedTuple):
    """Where a shard's leader is, as far as is known."""

    #: host:port, or the name of the actor
    endpoint: str
    #: 0: not known
    epoch: int = 0


class RoutedCluster(Protocol):
    """What routes take from a handle on a cluster: see `ClusterHandle`."""

    name: str
    cluster_id: str
    shards: int
    token: str
    endpoints: dict[int, str]
    resolver: Resolver | None
    ca: bytes | None
    transport: Transport
    replicas: int
    replica_endpoints: dict[int, dict[int, str]]
