"""Gives a cluster that runs servers for clients of other systems, and takes them away again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from raymq.actors.ray.actor_spec import RocketMQAccess
from raymq.client.arguments import check_choice
from raymq.cluster.deploy import actor_end, actor_set, door_set
from raymq.cluster.deploy.actor_states import DOOR_ROLES
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.record.cluster_record import ROCKETMQ_PORT, check_rocketmq
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable

from .context import OperationCall

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: how long the servers may take, if the caller names no time
DOOR_TIMEOUT_S = 60.0


def enable_door(
    cluster: ClusterHandle,
    protocol: str,
    *,
    port: int | None = None,
    access: RocketMQAccess | None = None,
    timeout_s: float = DOOR_TIMEOUT_S,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> None:
    """See `Cluster.enable_door`."""
    check_choice("protocol", protocol, DOOR_ROLES)
    operation = OperationCall(cluster, timeout_s=timeout_s, progress=progress, clock=clock)

    with operation.locked():
        record = operation.record
        new = replace(
            record,
            rocketmq_port=port or record.rocketmq_port or ROCKETMQ_PORT,
            rocketmq_access=access or record.rocketmq_access,
        )
        check_rocketmq(new)

        with operation.session():
            door_set.check(operation.ray, new, before=record)
            actor_set.check_running(operation.ray, new)
            operation.save(new)
            if new.door_options != record.door_options:
                # Servers that run keep their options.
                actor_end.end_doors(operation.ray, record, clock=operation.clock)

            operation.converge(lambda shard, replica, role: role in DOOR_ROLES)
            operation.make_controller()
            works = door_set.await_doors(
                operation.ray,
                new,
                clock=operation.clock,
                timeout_s=operation.left_s,
                progress=operation.report,
                warn=operation.warn,
            )
    if not works:
        raise Unavailable(
            f"not every server for {protocol} clients works after {timeout_s:.0f} s: they go on trying, see "
            "`raymq door list`",
            field="protocol",
        )


def disable_door(
    cluster: ClusterHandle,
    protocol: str,
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> None:
    """See `Cluster.disable_door`."""
    check_choice("protocol", protocol, DOOR_ROLES)
    operation = OperationCall(cluster, timeout_s=DOOR_TIMEOUT_S, progress=progress, clock=clock)
    with operation.locked():
        record = operation.record
        with operation.session():
            operation.save(replace(record, rocketmq_port=None))
            operation.make_controller()
            actor_end.end_doors(operation.ray, record, clock=operation.clock, for_good=True)
    operation.report(f"no server for {protocol} clients any more")
