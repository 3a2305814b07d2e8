"""Restarts every process of a cluster while its shards take messages: after a change of what they load, for example.

One replica after the other ends in order and starts again. The next one ends only when this one is complete, so that a
majority runs at all times. A shard's leader comes last, after it has handed over. Over several nodes it leads again at
the end, so that the leaders stay spread. The controller comes last of all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raymq.client import replica_status
from raymq.cluster.controller import controller_actor
from raymq.cluster.deploy import actor_set, ray_host
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.cluster.record.paths import directory_lock
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, Rejected, Unavailable
from raymq.store.base.files import Files

from .context import Replacement, Row, await_complete, load_local, local_paths, running_ray

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

logger = logging.getLogger("raymq")

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
    clock, files, report = clock or Clock(), Files(), progress or logger.info
    paths = local_paths(cluster)

    with directory_lock(paths, files):
        record = load_local(paths, files)
        check_can_restart(record)
        rows = replica_status.statuses(cluster)
        check_whole(rows)
        with ray_host.session(running_ray(record, paths, files)) as ray:
            for shard in range(record.joined):
                for replica in _order(replica_status.statuses(cluster, shard)):
                    check_whole(replica_status.statuses(cluster, shard))
                    _hand_over(cluster, shard, replica, report, clock)
                    deadline_ms = clock.monotonic_ms() + int(replica_timeout_s * 1000)
                    report(f"shard {shard} replica {replica}: ending")
                    actor_set.close_replica(
                        ray, record, shard, replica, clock=clock, timeout_s=replica_timeout_s / 2
                    )
                    made = Replacement(ray, cluster, paths, record, clock, deadline_ms)
                    made.run(shard, replica, report, what="it starts again")
                    await_complete(cluster, shard, replica, report, clock, deadline_ms)
            for shard, replica in to_give_back(record, rows).items():
                _give_back(cluster, shard, replica, report, clock)
            controller_actor.make(ray, record, paths, clock=clock, warn=report)


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
        and actor_set.node_of(record, shard, replica) not in record.drained_nodes
    }


def _give_back(cluster: Any, shard: int, replica: int, report: Progress, clock: Clock) -> None:
    """Let a replica lead again. All have restarted by now: another leader is no failure."""
    report(f"shard {shard}: replica {replica} leads again")
    try:
        replica_status.move_leader(
            cluster, shard, replica, pause=lambda seconds: clock.sleep_ms(1000 * seconds)
        )
    except (Rejected, Unavailable, DeliveryUnknown) as error:
        report(f"shard {shard}: {error.message}")


def _order(rows: Sequence[Row]) -> list[int]:
    """The replicas of a shard, its leader last."""
    leader = replica_status.leader_of(list(rows))
    return sorted((int(row["replica"]) for row in rows), key=lambda each: (each == leader, each))


def _hand_over(cluster: Any, shard: int, replica: int, report: Progress, clock: Clock) -> None:
    """Let another replica lead, if this one does."""
    rows = replica_status.statuses(cluster, shard)
    if replica_status.leader_of(rows) != replica:
        return
    successor = next(int(row["replica"]) for row in rows if row["replica"] != replica)
    report(f"shard {shard}: replica {replica} hands over to replica {successor}")
    replica_status.move_leader(
        cluster, shard, successor, pause=lambda seconds: clock.sleep_ms(1000 * seconds)
    )
