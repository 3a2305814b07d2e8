"""Restarts every process of a cluster while its shards take messages: after a change of what they load, for example.

One replica after the other ends in order and starts again. The next one ends only when this one is complete, so that a
majority runs at all times. A shard's leader comes last, after it has handed over. Over several nodes it leads again at
the end, so that the leaders stay spread. The controller comes last of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raymq.client import replica_status
from raymq.cluster.deploy import actor_states
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, Rejected, Unavailable

from .context import OperationCall, Row

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: how long a replica may take to end in order, and to start and catch up again
REPLICA_TIMEOUT_S = 120.0


def rolling_restart(
    cluster: ClusterHandle,
    *,
    replica_timeout_s: float = REPLICA_TIMEOUT_S,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> None:
    """Restart all replicas of all shards, one after the other, as `Cluster.rolling_restart` promises."""
    operation = OperationCall(cluster, timeout_s=replica_timeout_s, progress=progress, clock=clock)

    with operation.locked():
        record = operation.record
        check_can_restart(record)
        rows = operation.statuses()
        check_whole(rows)
        with operation.session():
            for shard in range(record.joined):
                for replica in _order(operation.statuses(shard)):
                    check_whole(operation.statuses(shard))
                    _hand_over(operation, shard, replica)
                    operation.set_deadline(replica_timeout_s)
                    operation.close(shard, replica, timeout_s=replica_timeout_s / 2)
                    operation.make(shard, replica, what="it starts again")
                    operation.await_complete(shard, replica)
            for shard, replica in to_give_back(record, rows).items():
                _give_back(operation, shard, replica)
            operation.make_controller()


def check_can_restart(record: ClusterRecord) -> None:
    """Raises: Rejected if a shard would be away meanwhile."""
    if len(record.candidates) == 1:
        raise Rejected(
            f"with {record.replicas} replica(s) a shard is away while one restarts: use `raymq stop` and `raymq start`",
            field="replicas",
            limit="3 or 5",
            found=record.replicas,
        )


def check_whole(rows: Sequence[Row]) -> None:
    """Raises: Unavailable unless every replica runs and is complete, and every shard has a leader."""
    for row in rows:
        if row["state"] != "RUNNING" or not row["is_complete"]:
            raise Unavailable(
                f"replica {row['replica']} of shard {row['shard']} is {row['state']}"
                f"{'' if row.get('is_complete') else ', not complete'}: without another one its shard may take no "
                "writes. See `raymq shard list`",
                field="replica",
                shard=row["shard"],
            )
    for shard in {row["shard"] for row in rows}:
        if replica_status.leader_of([row for row in rows if row["shard"] == shard]) is None:
            raise Unavailable(f"no replica leads shard {shard} now", field="leader", shard=shard)


def to_give_back(record: ClusterRecord, rows: Sequence[Row]) -> dict[int, int]:
    """Shard -> the replica that is to lead it again. Args: `rows`: of all shards, before the first replica ended.

    On one machine it makes no difference which replica leads.
    """
    if record.placement is None:
        return {}
    leaders = {
        shard: replica_status.leader_of([row for row in rows if row["shard"] == shard])
        for shard in range(record.shards)
    }
    return {
        shard: replica
        for shard, replica in leaders.items()
        if replica is not None
        and actor_states.node_of(record, shard, replica) not in record.drained_nodes
    }


def _give_back(operation: OperationCall, shard: int, replica: int) -> None:
    """Let a replica lead again. All have restarted by now: another leader is no failure."""
    operation.report(f"shard {shard}: replica {replica} leads again")
    try:
        operation.move_leader(shard, replica)
    except (Rejected, Unavailable, DeliveryUnknown) as error:
        operation.report(f"shard {shard}: {error.message}")


def _order(rows: Sequence[Row]) -> list[int]:
    """The replicas of a shard, its leader last."""
    leader = replica_status.leader_of(list(rows))
    return sorted((int(row["replica"]) for row in rows), key=lambda each: (each == leader, each))


def _hand_over(operation: OperationCall, shard: int, replica: int) -> None:
    """Let another replica lead, if this one does."""
    rows = operation.statuses(shard)
    if replica_status.leader_of(rows) != replica:
        return
    successor = next(int(row["replica"]) for row in rows if row["replica"] != replica)
    operation.report(f"shard {shard}: replica {replica} hands over to replica {successor}")
    operation.move_leader(shard, successor)
