"""Recovers a shard that has lost a majority of its replicas for good. Messages that were confirmed may be lost.

Each lost replica gets an empty successor, as in `replace_replica`, without the check that all confirmed messages are
elsewhere. All replicas answer then, so that they elect the one with the most of the log (rules R3 and R14 of
docs/design.md): a survivor. The new epoch is far above any that the lost replicas can have heard, and what comes back
of them is of an old generation. What was given up is written to cluster.json first, and to the log of the shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raymq.client import replica_status
from raymq.client.transport.routes import Routes
from raymq.cluster.deploy import actor_states
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.replication.quorum import may_lead
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable

from .context import (
    REPLACE_TIMEOUT_S,
    OperationCall,
    Row,
    check_node,
    check_placed,
)

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: how long replicas that do not answer are looked at: a process that was killed is back by then
RESTART_WAIT_MS = 5_000
#: how far the new epoch is above those that survivors have heard: more elections than any cluster sees
EPOCHS_SKIPPED = 1_000_000

#: of a row of `replica_status.statuses`
_KEPT_FACTS = ("replica", "epoch", "appended", "confirmed", "is_complete")
_LOST_FACTS = ("replica", "node", "error")


@dataclass(frozen=True)
class RecoveryPlan:
    """What is left of a shard."""

    shard: int
    #: the replicas that answer: `replica`, `epoch`, `appended`, `confirmed`, `is_complete`
    survivors: tuple[dict[str, Any], ...]
    #: those that are given up: `replica`, `node`, `error`
    lost: tuple[dict[str, Any], ...]

    @property
    def lost_replicas(self) -> list[int]:
        """The numbers of the replicas that are given up."""
        return [int(row["replica"]) for row in self.lost]

    def lines(self) -> list[str]:
        """The plan as text."""
        survivors = [
            f"survivor {row['replica']}: log of {row['appended']} bytes, confirmed {row['confirmed']}, epoch "
            f"{row['epoch']}, {'complete' if row['is_complete'] else 'not complete: it has lost bytes before'}"
            for row in self.survivors
        ]
        lost = [
            f"lost {row['replica']}{'' if row['node'] is None else ' on node ' + row['node']}: {row['error']}"
            for row in self.lost
        ]
        return [
            f"shard {self.shard}: DATA-LOSS-POSSIBLE. Replicas {self.lost_replicas} are given up for good. Confirmed "
            "messages that only they have are lost, and their offsets are given to other messages",
            *survivors,
            *lost,
            "Make sure that the machines of the lost replicas are off: cut off from here, they may still give receipts",
        ]

    def facts(self, at_ms: int) -> dict[str, object]:
        """The plan as it is written down. Args: `at_ms`: wall clock."""
        return {
            "at_ms": at_ms,
            "shard": self.shard,
            "lost": self.lost_replicas,
            "survivors": [dict(row) for row in self.survivors],
        }


def plan_recovery(
    record: ClusterRecord, rows: Sequence[Row], nodes: Mapping[int, str] | None = None
) -> RecoveryPlan:
    """What a recovery would give up. Args: `rows`: of all replicas of one shard. `nodes`: as of `recover_shard`.

    Raises: Rejected if nothing has to be given up, or nothing could be recovered.
    """
    shard = rows[0]["shard"]
    leader = replica_status.leader_of(list(rows))
    if leader is not None:
        raise _needless(shard, f"replica {leader} leads it; give its lost replicas up one by one")

    survivors = [row for row in rows if row["state"] == "RUNNING"]
    stopped = [row for row in rows if row["state"] not in ("RUNNING", "DOWN")]
    if stopped:
        raise _needless(
            shard,
            f"replica {stopped[0]['replica']} is there, and {stopped[0]['state']} ({stopped[0]['error']}): repair it, "
            "or end its processes",
        )
    lost = [row for row in rows if row["state"] == "DOWN"]
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

    plan = RecoveryPlan(
        shard,
        tuple({name: row[name] for name in _KEPT_FACTS} for row in survivors),
        tuple({name: row.get(name) for name in _LOST_FACTS} for row in lost),
    )
    _check_nodes(record, plan, nodes or {})
    return plan


def _needless(shard: int, why: str) -> Rejected:
    return Rejected(
        f"shard {shard} needs no unclean recovery: {why}",
        field="shard",
        limit="a shard that has lost a majority of its replicas",
    )


def _check_nodes(record: ClusterRecord, plan: RecoveryPlan, nodes: Mapping[int, str]) -> None:
    """Raises: Rejected for a node that must not have a replica, and for a replica that is not lost."""
    for replica, node in nodes.items():
        if replica not in plan.lost_replicas:
            raise Rejected(
                f"replica {replica} is not lost; those that are: {plan.lost_replicas}",
                field="node",
                limit=plan.lost_replicas,
                found=replica,
            )
        check_placed(record, plan.shard, replica, node)
        # No two successors on one node.
        record = record.with_new_replica(plan.shard, replica, node)


def find_plan(
    cluster: ClusterHandle,
    shard: int,
    *,
    nodes: Mapping[int, str] | None = None,
    clock: Clock | None = None,
) -> RecoveryPlan:
    """Find what a recovery would give up, as `Cluster.plan_recovery` promises.

    If an earlier recovery ended before it wrote into the log of the shard, that is done first.
    """
    operation = OperationCall(cluster, timeout_s=REPLACE_TIMEOUT_S, progress=None, clock=clock)
    operation.load()
    with operation.session():
        rows = _look(operation, shard)
    if replica_status.leader_of(rows) is not None:
        _write_into_log(operation, shard)
    return plan_recovery(operation.record, rows, nodes)


def _look(operation: OperationCall, shard: int) -> list[Row]:
    """What the replicas say. A process that is starting answers only through Ray, and may recover for minutes."""
    ray, record = operation.ray, operation.record
    rows = operation.await_leader(shard, wait_ms=RESTART_WAIT_MS)
    if replica_status.leader_of(rows) is not None:
        return rows

    for row in rows:
        if row["state"] == "DOWN":
            key = (shard, row["replica"], "commit_log")
            for member in actor_states.find(ray, record.name, [key]):
                node = actor_states.node_of(record, shard, row["replica"])
                found = actor_states.state_of(ray, replace(member, node=node), operation.clock)
                if found["state"] == "RUNNING":
                    row.update(state="UNREACHABLE", error="only Ray reaches it")
                elif found["state"] in ("STARTING", "READ_ONLY"):
                    row.update(state=found["state"], error=found["error"])
    return rows


def recover_shard(
    cluster: ClusterHandle,
    plan: RecoveryPlan,
    *,
    nodes: Mapping[int, str] | None = None,
    timeout_s: float = REPLACE_TIMEOUT_S,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> None:
    """Give up the lost replicas of a shard, as `Cluster.recover_shard` promises.

    Durable: what is given up and the new placement in cluster.json, after the lost replicas' processes have ended and
    before any is made.
    """
    operation = OperationCall(cluster, timeout_s=timeout_s, progress=progress, clock=clock)
    nodes, shard = nodes or {}, plan.shard

    with operation.locked():
        record = operation.record
        with operation.session():
            rows = _look(operation, shard)
            found = plan_recovery(record, rows, nodes)
            _check_same(plan, found)
            for replica in found.lost_replicas:
                check_node(operation.ray, record, shard, replica, nodes.get(replica))

            for replica in found.lost_replicas:
                operation.end(shard, replica, what="what is left of its processes")
            facts = _facts(record, found, rows, operation.clock)
            new = record.with_recovery(shard, facts, _new_epoch(found))
            for replica in found.lost_replicas:
                new = new.with_new_replica(shard, replica, nodes.get(replica))
            operation.save(new)

            for replica in found.lost_replicas:
                operation.make(shard, replica)
        operation.update_handle()

    _await_new_leader(operation, shard)
    _write_into_log(operation, shard)
    for replica in found.lost_replicas:
        operation.await_complete(shard, replica)


def _check_same(accepted: RecoveryPlan, found: RecoveryPlan) -> None:
    """Raises: Rejected if a replica was lost that the operator has not given up."""
    more = sorted(set(found.lost_replicas) - set(accepted.lost_replicas))
    if more:
        raise Rejected(
            f"replicas {more} of shard {found.shard} have stopped to answer since the plan was made; nothing was "
            "changed: make another plan",
            field="plan",
            limit=accepted.lost_replicas,
            found=found.lost_replicas,
        )


def _new_epoch(plan: RecoveryPlan) -> int:
    return int(max(row["epoch"] for row in plan.survivors)) + EPOCHS_SKIPPED


def _facts(
    record: ClusterRecord, plan: RecoveryPlan, rows: Sequence[Row], clock: Clock
) -> dict[str, object]:
    """What is written down. An earlier recovery that reached no log of a survivor is part of this one."""
    noted = {each["at_ms"] for row in rows for each in row.get("unclean_recoveries") or ()}
    begun = [
        each
        for each in record.unclean_recoveries
        if each["shard"] == plan.shard and each["at_ms"] not in noted
    ]
    if not begun:
        return plan.facts(clock.now_ms())
    lost = sorted({*begun[-1]["lost"], *plan.lost_replicas})
    return {**begun[-1], "lost": lost}


def _await_new_leader(operation: OperationCall, shard: int) -> None:
    """Wait until a survivor leads. Raises: Unavailable."""
    while True:
        leader = replica_status.leader_of(operation.await_leader(shard))
        if leader is not None:
            operation.report(f"shard {shard}: replica {leader} leads")
            return
        if operation.is_late:
            raise Unavailable(
                f"no replica leads shard {shard} yet. Every replica must answer: see `raymq shard describe {shard}`",
                field="leader",
                shard=shard,
            )


def _write_into_log(operation: OperationCall, shard: int) -> None:
    """Write what was given up into the shard's log, from which all replicas and clients know it."""
    for facts in operation.record.unclean_recoveries:
        if facts["shard"] == shard:
            Routes.of(operation.cluster).call(shard, "note_unclean_recovery", {"facts": facts})
