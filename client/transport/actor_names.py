"""The names of a cluster's actors in Ray, by which clients and operators find them."""

from __future__ import annotations

import re

#: of all actors
NAMESPACE = "raymq"


def actor_name(cluster: str, shard: int, replica: int, role: str) -> str:
    """The Ray name, in namespace "raymq", of one role's actor."""
    return f"raymq:{cluster}:shard-{shard}:replica-{replica}:{role}"


def replica_of_actor(name: str, cluster: str, role: str) -> tuple[int, int] | None:
    """Shard and replica of an actor of this role; None: the name is not that of one."""
    found = re.fullmatch(rf"raymq:{re.escape(cluster)}:shard-(\d+):replica-(\d+):{role}", name)
    return None if found is None else (int(found[1]), int(found[2]))


def coordinator_name(cluster: str, queue: str) -> str:
    """The Ray name, in namespace "raymq", of the coordinator of a durable queue."""
    return f"raymq:{cluster}:queue:{queue}"


def controller_name(cluster: str) -> str:
    """The Ray name, in namespace "raymq", of the controller of a cluster."""
    return f"raymq:{cluster}:controller"
