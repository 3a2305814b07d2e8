"""Gives the place of a lost replica to a new, empty one, which then gets everything from the leader of its shard.

The new replica has the next generation. What is left of the old one, on whatever machine, is not heard any more by the
others when the new one is complete (rule R17 of docs/design.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raymq.client import replica_status
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.replication.quorum import majority
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable

from .context import (
    REPLACE_TIMEOUT_S,
    OperationCall,
    Row,
    check_compacted,
    check_node,
    check_placed,
)

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


def replace_replica(
    cluster: ClusterHandle,
    shard: int,
    replica: int,
    *,
    node: str | None = None,
    timeout_s: float = REPLACE_TIMEOUT_S,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> None:
    """Give a replica's place to a new, empty one, as `Cluster.replace_replica` promises.

    Durable: the new placement in cluster.json, after the old actors have ended and before any is made.
    """
    operation = OperationCall(cluster, timeout_s=timeout_s, progress=progress, clock=clock)

    with operation.locked():
        record = operation.record
        check_place(record, shard, replica, node)
        rows = operation.await_leader(shard)
        check_replaceable(record, rows, replica)
        check_compacted(cluster, rows)

        with operation.session():
            check_node(operation.ray, record, shard, replica, node)
            # Before the record: one that does not end stays what it is, at later starts too.
            operation.end(shard, replica, what="the processes of the old replica")
            operation.save(record.with_new_replica(shard, replica, node))
            operation.make(shard, replica)
        operation.update_handle()

    operation.await_complete(shard, replica)


def check_place(record: ClusterRecord, shard: int, replica: int, node: str | None) -> None:
    """Raises: Rejected for a shard, replica or node that cannot be, and for a replica that nothing could fill."""
    if not 0 <= shard < record.shards:
        raise Rejected(
            f"shard {shard} does not exist; the cluster has 0 to {record.shards - 1}",
            field="shard",
            limit=record.shards - 1,
            found=shard,
        )
    if replica not in range(record.replicas):
        raise Rejected(
            f"replica {replica} does not exist; each shard has 0 to {record.replicas - 1}",
            field="replica",
            limit=record.replicas - 1,
            found=replica,
        )

    if record.candidates == (replica,):
        raise Rejected(
            f"shard {shard} is led by this replica only, so that a new one could get its messages from none: restore a "
            "copy of the directory (docs/operating/backup.md)",
            field="replica",
            limit="a replica that follows",
            found=replica,
        )
    if node is not None:
        check_placed(record, shard, replica, node)


def check_replaceable(record: ClusterRecord, rows: Sequence[Row], replica: int) -> None:
    """Raises: Rejected for a replica that leads, or without which confirmed messages may be lost; Unavailable."""
    shard = rows[0]["shard"]
    leader = replica_status.leader_of(list(rows))
    if leader == replica:
        raise Rejected(
            f"replica {replica} leads shard {shard}: let another one lead first: raymq shard move-leader {shard} "
            "--to REPLICA",
            field="replica",
            limit="a replica that follows",
            found=replica,
        )

    row = next(row for row in rows if row["replica"] == replica)
    complete = [
        row["replica"]
        for row in rows
        if row["replica"] != replica and row["state"] == "RUNNING" and row["is_complete"]
    ]
    # So many have a record that a majority had, without this one.
    needed = record.replicas - majority(record.replicas) + 1
    # One that says itself that it is not complete proves nothing, and its votes decide nothing (rule R14).
    if len(complete) < needed and row.get("is_complete") is not False:
        raise Rejected(
            f"replica {replica} may have the last copy of confirmed messages: of the other replicas of shard {shard} "
            f"{needed} must be complete and answer, and those that are: {complete or 'none'}",
            field="replica",
            limit=needed,
            found=len(complete),
        )

    if leader is None:
        message = f"no replica leads shard {shard} now, so that a new one could get its messages from none"
        raise Unavailable(message, field="leader", shard=shard)
