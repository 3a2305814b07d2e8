"""Recovers a shard that has lost a majority of its replicas for good. Messages that were confirmed may be lost.

Each lost replica gets an empty successor, as in `replace_replica`, without the check that all confirmed messages are
elsewhere. All replicas answer then, so that they elect the one with the most of the log (rules R3 and R14 of
docs/design.md): a survivor. The new epoch is far above any that the lost replicas can have heard, and what comes back
of them is of an old generation. What was given up is written to cluster.json first, and to the log of the shard.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from raymq.replication.quorum import may_lead
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files

from . import cluster_record, replica_status
from .cluster_record import ClusterRecord
from .deploy import actor_set, ray_host
from .deploy.ray_host import Progress
from .deploy.resolve import save_endpoints
from .paths import directory_lock
from .replace_replica import (
    REPLACE_TIMEOUT_S,
    Replacement,
    Row,
    await_complete,
    await_leader,
    check_node,
    check_placed,
    local_paths,
    running_ray,
)
from .transport.routes import Routes

if TYPE_CHECKING:
    from .cluster import Cluster

logger = logging.getLogger("raymq")

#: how long replicas that do not answer are looked at: a process that was killed is back by then
RESTART_WAIT_MS = 5_000
#: how far the new epoch is above those that survivors have heard: more elections than any cluster sees
EPOCHS_SKIPPED = 1_000_000


@dataclass(frozen=True)
class RecoveryPlan:
    """What is left of a shard."""

    shard: int
    #: the replicas that answer: `replica`, `epoch`, `appended`, `confirmed`, `is_complete`
    survivors: tuple[dict[str, Any], ...]
    #: those that do not
    lost: tuple[int, ...]

    def lines(self) -> list[str]:
        """The plan as text."""
        survivors = [
            f"survivor {row['replica']}: log of {row['appended']} bytes, confirmed {row['confirmed']}, epoch "
            f"{row['epoch']}, {'complete' if row['is_complete'] else 'not complete: it has lost bytes before'}"
            for row in self.survivors
        ]
        return [
            f"shard {self.shard}: DATA-LOSS-POSSIBLE. Replicas {list(self.lost)} are given up for good. Confirmed "
            "messages that only they have are lost, and their offsets are given to other messages",
            *survivors,
        ]

    def facts(self, at_ms: int) -> dict[str, Any]:
        """The plan as it is written down. Args: `at_ms`: wall clock."""
        return {
            "at_ms": at_ms,
            "shard": self.shard,
            "lost": list(self.lost),
            "survivors": [dict(row) for row in self.survivors],
        }


def plan_recovery(record: ClusterRecord, rows: Sequence[Row]) -> RecoveryPlan:
    """What a recovery would give up. Args: `rows`: of all replicas of one shard.

    Raises: Rejected if nothing has to be given up, or nothing could be recovered.
    """
    shard = rows[0]["shard"]
    survivors = [row for row in rows if row["state"] == "RUNNING"]
    lost = [row["replica"] for row in rows if row not in survivors]
    leader = replica_status.leader_of(list(rows))
    if leader is not None:
        raise _needless(shard, f"replica {leader} leads it; give its lost replicas up one by one")
    if not lost:
        raise _needless(shard, "all of its replicas answer: see `raymq shard describe`")
    answers = {row["replica"]: row["is_complete"] for row in survivors}
    if may_lead(record.replicas, answers):
        raise _needless(
            shard,
            f"the replicas {list(answers)} have every confirmed message between them, and can elect",
        )
    if len(record.candidates) == 1:
        raise Rejected(
            f"only replica {record.candidates[0]} may lead shard {shard}: bring its disk back, or restore a copy "
            "(docs/operating/backup.md)",
            field="shard",
            limit="three or five replicas",
            found=record.replicas,
        )
    if not survivors:
        raise Rejected(
            f"no replica of shard {shard} answers, so that nothing could be recovered: see `raymq status`",
            field="shard",
            limit=1,
            found=0,
        )

    names = ("replica", "epoch", "appended", "confirmed", "is_complete")
    kept = tuple({name: row[name] for name in names} for row in survivors)
    return RecoveryPlan(shard, kept, tuple(lost))


def _needless(shard: int, why: str) -> Rejected:
    return Rejected(
        f"shard {shard} needs no unclean recovery: {why}",
        field="shard",
        limit="a shard that has lost a majority of its replicas",
    )


def find_plan(cluster: Cluster, shard: int, clock: Clock | None = None) -> RecoveryPlan:
    """`plan_recovery` of a running cluster. An election that is under way is awaited. Raises: Rejected, Unavailable."""
    paths, files = local_paths(cluster), Files()
    record = _load(cluster, files)
    running_ray(record, paths, files)
    return plan_recovery(record, _look(cluster, shard, clock or Clock()))


def _look(cluster: Cluster, shard: int, clock: Clock) -> list[Row]:
    """What the replicas say, after a while in which a process may have started again."""
    look = partial(replica_status.statuses, cluster, shard)
    return await_leader(look, clock, wait_ms=RESTART_WAIT_MS)


def recover_shard(
    cluster: Cluster,
    shard: int,
    *,
    nodes: Mapping[int, str] | None = None,
    timeout_s: float = REPLACE_TIMEOUT_S,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> RecoveryPlan:
    """Give up the replicas of a shard that do not answer, and wait until their empty successors are complete.

    Args: `nodes`: lost replica -> the node of its successor, where that is another one. `progress`: called with one
    line of text at a time; None logs the lines.

    Durable: what is given up and the new placement in cluster.json, after the lost replicas' processes have ended and
    before any is made.
    Raises: Rejected with nothing changed. Unavailable when the cluster does not run, or the shard is not whole in time.
    It goes on by itself.
    """
    clock, files, report = clock or Clock(), Files(), progress or logger.info
    deadline_ms = clock.monotonic_ms() + int(timeout_s * 1000)
    paths, nodes = local_paths(cluster), nodes or {}

    with directory_lock(paths, files):
        record = _load(cluster, files)
        target = running_ray(record, paths, files)
        rows = _look(cluster, shard, clock)
        if replica_status.leader_of(rows) is not None:
            # An earlier call may have ended before it wrote into the log.
            _write_into_log(cluster, record, shard)
        plan = plan_recovery(record, rows)
        _check_nodes(record, plan, nodes)

        with ray_host.session(target, timeout_s) as ray:
            for replica in plan.lost:
                check_node(ray, record, shard, replica, nodes.get(replica))
            for replica in plan.lost:
                report(f"shard {shard} replica {replica}: ending what is left of its processes")
                actor_set.end_replica(ray, record, shard, replica, clock=clock)

            epoch = max(row["epoch"] for row in plan.survivors) + EPOCHS_SKIPPED
            new = record.with_recovery(shard, plan.facts(clock.now_ms()), epoch)
            for replica in plan.lost:
                new = new.with_new_replica(shard, replica, nodes.get(replica))
            cluster_record.save_record(paths, new, files)
            made = Replacement(ray, cluster, paths, new, clock, deadline_ms)
            for replica in plan.lost:
                made.run(shard, replica, report)
        cluster.placement = new.placement
        if new.placement is not None:
            save_endpoints(paths, cluster.endpoints, files)

    _await_new_leader(cluster, shard, report, clock, deadline_ms)
    _write_into_log(cluster, new, shard)
    for replica in plan.lost:
        await_complete(cluster, shard, replica, report, clock, deadline_ms)
    return plan


def _load(cluster: Cluster, files: Files) -> ClusterRecord:
    paths = local_paths(cluster)
    record = cluster_record.load_record(paths, files)
    if record is None:
        raise Rejected(f"{paths.data_dir} has no cluster.json", field="target")
    return record


def _check_nodes(record: ClusterRecord, plan: RecoveryPlan, nodes: Mapping[int, str]) -> None:
    """Raises: Rejected for a node that must not have a replica, and for a replica that is not lost."""
    for replica, node in nodes.items():
        if replica not in plan.lost:
            raise Rejected(
                f"replica {replica} is not lost; those that are: {list(plan.lost)}",
                field="node",
                limit=list(plan.lost),
                found=replica,
            )
        check_placed(record, plan.shard, replica, node)


def _await_new_leader(
    cluster: Cluster, shard: int, report: Progress, clock: Clock, deadline_ms: int
) -> None:
    """Wait until a survivor leads. Raises: Unavailable."""
    while True:
        rows = await_leader(partial(replica_status.statuses, cluster, shard), clock)
        leader = replica_status.leader_of(rows)
        if leader is not None:
            report(f"shard {shard}: replica {leader} leads")
            return
        if clock.monotonic_ms() > deadline_ms:
            raise Unavailable(
                f"no replica leads shard {shard} yet. Every replica must answer: see `raymq shard describe {shard}`",
                field="leader",
                shard=shard,
            )


def _write_into_log(cluster: Cluster, record: ClusterRecord, shard: int) -> None:
    """Write what was given up into the shard's log, from which all replicas and clients know it."""
    for facts in record.unclean_recoveries:
        if facts["shard"] == shard:
            Routes.of(cluster).call(shard, "note_unclean_recovery", {"facts": facts})
