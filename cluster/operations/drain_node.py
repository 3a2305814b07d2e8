"""Lets other nodes lead every shard that a node leads, so that the node can be taken away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raymq.client import replica_status
from raymq.cluster.deploy.ray_host import Progress
from raymq.replication.quorum import can_fail_over
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, Rejected, Unavailable

from .context import OperationCall

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: how long all hand-overs may take, if the caller names no time
DRAIN_TIMEOUT_S = 120.0
#: between two looks at who leads
_STEP_MS = 200


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    """What `drain_node` did."""

    node: str
    #: shard -> the replica that leads it instead
    moved: dict[int, int]
    #: (shard, replica) of what stays on the node, all of them followers
    followers: list[tuple[int, int]]


def drain_node(
    cluster: ClusterHandle,
    node: str,
    *,
    timeout_s: float = DRAIN_TIMEOUT_S,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> DrainReport:
    """Hand over each leadership of a node, as `Cluster.drain_node` promises.

    A replica that handed over asks for votes again only when the new leader is lost. The note in `cluster.json` keeps
    the controller from giving a leadership back.
    """
    operation = OperationCall(cluster, timeout_s=timeout_s, progress=progress, clock=clock)
    here = replicas_on(cluster, node)
    try:
        _note_drained(operation, node)
    except Unavailable:
        # A command that takes long has the data directory.
        operation.report(
            f"node {node}: the drain is not noted, because another command is working on the data directory"
        )
    moved: dict[int, int] = {}
    tries = 0
    shown: set[int] = set()

    fails_over = can_fail_over(cluster.replicas)
    while led := _led(operation.statuses(), here, fails_over=fails_over):
        _check_can_move(cluster, node, led)
        if operation.is_late:
            raise Unavailable(
                f"after {timeout_s:g} s node {node} still leads shard(s) {_shards(led)}: no other replica took over. "
                "See `raymq shard list`",
                field="node",
                found=node,
            )

        for shard, successors in led.items():
            if not successors:
                if shard not in shown:
                    operation.report(
                        f"shard {shard}: waiting for a complete replica on another node"
                    )
                shown.add(shard)
                continue
            # Another one with each try: a replica that runs may be unable to take over.
            successor = successors[tries % len(successors)]
            if _hand_over(operation, shard, successor):
                moved[shard] = successor
        tries += 1
        operation.clock.sleep_ms(_STEP_MS)

    return DrainReport(node=node, moved=moved, followers=here)


def _note_drained(operation: OperationCall, node: str) -> None:
    """Keep the controller from giving a leadership back to the node. A program elsewhere cannot."""
    if operation.cluster.data_dir is None or not operation.files.exists(operation.paths.cluster):
        return
    with operation.locked():
        record = operation.record
        if node not in record.drained_nodes:
            operation.save(replace(record, drained_nodes=(*record.drained_nodes, node)))


def replicas_on(cluster: ClusterHandle, node: str) -> list[tuple[int, int]]:
    """(shard, replica) of all that a node has. Raises: Rejected when it has none."""
    if cluster.placement is None:
        raise Rejected(
            "no node can be drained: this cluster is on one machine, or this program does not know its nodes. Run the "
            "command on the machine of the data directory",
            field="node",
            found=node,
        )
    found = [
        (shard, replica)
        for shard, nodes in enumerate(cluster.placement)
        for replica, each in enumerate(nodes)
        if each == node
    ]

    if not found:
        known = sorted({each for nodes in cluster.placement for each in nodes})
        raise Rejected(
            f"node {node} has no replica of this cluster; those that have some: {', '.join(known)}",
            field="node",
            limit=", ".join(known),
            found=node,
        )
    return found


def _led(
    rows: list[dict[str, Any]], here: list[tuple[int, int]], *, fails_over: bool
) -> dict[int, list[int]]:
    """Shard -> the replicas that can lead it instead, of the shards that a node leads. The most recent log first.

    Args: `fails_over`: any replica may lead. A shard without a leader counts then, because this node's may be the next.
    """
    found = {}
    for shard, replica in here:
        mine = [row for row in rows if row["shard"] == shard]
        leader = replica_status.leader_of(mine)
        if leader != replica and not (leader is None and fails_over):
            continue
        others = [
            row
            for row in mine
            if row["replica"] != replica and row["state"] == "RUNNING" and row["is_complete"]
        ]
        others.sort(key=lambda row: -int(row["synced"]))
        found[shard] = [int(row["replica"]) for row in others]
    return found


def _check_can_move(cluster: ClusterHandle, node: str, led: dict[int, list[int]]) -> None:
    """Raises: Rejected when no other replica may ever lead the shards."""
    if not can_fail_over(cluster.replicas):
        raise Rejected(
            f"node {node} leads shard(s) {_shards(led)}, and of {cluster.replicas} replica(s) no other one can lead: "
            "the shards are away while the node is",
            field="node",
            found=node,
        )


def _hand_over(operation: OperationCall, shard: int, successor: int) -> bool:
    """Let a replica lead. Returns: whether it does."""
    try:
        operation.move_leader(shard, successor)
    except (Rejected, Unavailable, DeliveryUnknown) as error:
        # The successor may lead already, or have ended meanwhile: the next look says.
        operation.report(f"shard {shard}: {error.message}")
        return False
    operation.report(f"shard {shard}: replica {successor} leads")
    return True


def _shards(led: dict[int, list[int]]) -> str:
    return ", ".join(map(str, led))
