"""What several operations need: the record and the Ray of a cluster, replicas that are made again and awaited."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raymq.client import replica_status
from raymq.cluster.deploy import actor_set, node_labels, ray_host
from raymq.cluster.deploy.ray_host import Progress, RayTarget
from raymq.cluster.record import cluster_record
from raymq.cluster.record.cluster_record import ClusterRecord, store_config
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.record.placement import check_label
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

logger = logging.getLogger("raymq")

#: how long all of it may take, if the caller names no time
REPLACE_TIMEOUT_S = 600.0
#: how long an election is awaited: several times what one takes
ELECTION_WAIT_MS = 20_000
#: between two looks at the new replica
_STEP_MS = 200

#: what a replica says of itself: a row of `replica_status.statuses`
Row = dict[str, Any]


def running_ray(record: ClusterRecord, paths: ClusterPaths, files: Files) -> RayTarget:
    """The Ray that the cluster runs in. Raises: Unavailable."""
    running = ray_host.running_target(paths, files)
    if running is None:
        again = f"raymq start {shlex.quote(str(paths.data_dir))}"
        message = f"the Ray of cluster {record.name!r} does not run: {again}"
        raise Unavailable(message, path=paths.data_dir)
    return running


def load_local(paths: ClusterPaths, files: Files) -> ClusterRecord:
    """The record in a data directory. Raises: Rejected without one; Corrupt."""
    record = cluster_record.load_record(paths, files)
    if record is None:
        raise Rejected(f"{paths.data_dir} has no cluster.json", field="target")
    return record


def local_paths(cluster: ClusterHandle) -> ClusterPaths:
    """The data directory. Raises: Rejected on another machine."""
    if cluster.data_dir is None:
        raise Rejected(
            f"cluster {cluster.name!r} is not on this machine: run this on the machine that has its data directory",
            field="data_dir",
        )
    return ClusterPaths(cluster.data_dir)


def check_placed(record: ClusterRecord, shard: int, replica: int, node: str) -> None:
    """Raises: Rejected for a node that must not have this replica."""
    if record.placement is None:
        message = "all replicas of this cluster are on one machine: leave the node out"
        raise Rejected(message, field="node", found=node)
    check_label(node)
    others = [each for number, each in enumerate(record.placement[shard]) if number != replica]
    if node in others:
        raise Rejected(
            f"node {node} has replica {record.placement[shard].index(node)} of shard {shard}, and two on one node are "
            "lost together: name another node",
            field="node",
            limit=f"none of {', '.join(others)}",
            found=node,
        )


def await_leader(
    look: Callable[[], list[Row]], clock: Clock, *, wait_ms: int = ELECTION_WAIT_MS
) -> list[Row]:
    """What the replicas say once one of them leads, or after a while: the lost one may have led until now."""
    deadline_ms = clock.monotonic_ms() + wait_ms
    while True:
        rows = look()
        if replica_status.leader_of(rows) is not None or clock.monotonic_ms() >= deadline_ms:
            return rows
        clock.sleep_ms(_STEP_MS)


def check_compacted(cluster: ClusterHandle, rows: Sequence[Row]) -> None:
    """Raises: Rejected if the new replica could not get messages that the leader has in compacted queues only.

    A new replica gets the leader's log, and makes compacted queues of it.
    """
    shard = rows[0]["shard"]
    leader = replica_status.leader_of(list(rows))
    start = next(row["min_offset"] for row in rows if row["replica"] == leader)
    if not start:
        return
    topics = cluster.call(shard, "topics", {})
    compacted = sorted(name for name, facts in topics.items() if facts.get("compacted"))
    if compacted:
        raise Rejected(
            f"the log of shard {shard} begins at {start}: older messages of the compacted topics {compacted} are in "
            "the leader's compacted queues only, and a new replica gets nothing but the log. Bring the disk of the old "
            "replica back, or delete these topics",
            field="replica",
            limit=0,
            found=start,
        )


def check_node(ray: Any, record: ClusterRecord, shard: int, replica: int, node: str | None) -> None:
    """Raises: Rejected when the node of the new replica is not there."""
    where = node or actor_set.node_of(record, shard, replica)
    if where is None:
        return
    found = node_labels.present(ray)
    if where not in found:
        raise Rejected(
            f"no node of this Ray has the label {node_labels.NODE_LABEL}={where}: start Ray there with this label, or "
            f"name another node. There are: {', '.join(sorted(found)) or 'none with such a label'}",
            field="node",
            limit=", ".join(sorted(found)),
            found=where,
        )
    node_labels.check_nodes(ray, [where], first=False)


class Replacement:
    """The actors of one replica, made again."""

    def __init__(
        self,
        ray: Any,
        cluster: ClusterHandle,
        paths: ClusterPaths,
        record: ClusterRecord,
        clock: Clock,
        deadline_ms: int,
    ) -> None:
        self._ray = ray
        self._cluster = cluster
        self._paths = paths
        self._record = record
        self._clock = clock
        self._deadline_ms = deadline_ms

    def run(
        self,
        shard: int,
        replica: int,
        report: Progress,
        *,
        what: str = "a new, empty replica starts",
    ) -> None:
        """Make the actors of the replica, and let all replicas know where it listens."""
        record, cluster, clock = self._record, self._cluster, self._clock
        name = f"shard {shard} replica {replica}"
        made = self._make(shard, replica)
        node = actor_set.node_of(record, shard, replica)
        report(f"{name}: {what}" + ("" if node is None else f" on node {node}"))
        self._await_running(made, report)
        known = {
            each: dict(rows) for each, rows in replica_status.replica_endpoints(cluster).items()
        }
        cluster.endpoints = actor_set.publish_endpoints(
            self._ray, record, cluster.endpoints, known, clock
        )

    def _make(self, shard: int, replica: int) -> actor_set.Member:
        """Make the actors of the replica. Returns: its CommitLog."""
        record, cluster = self._record, self._cluster
        options = asdict(store_config(record))
        specs = [
            spec
            for spec in actor_set.specs(record, self._paths, cluster.token, options, cluster.ca)
            if (spec["shard"], spec["replica"]) == (shard, replica)
        ]
        members, _ = actor_set.create(self._ray, record, specs, timeout_s=self._left_s())
        return next(member for member in members if member.role == "commit_log")

    def _await_running(self, member: actor_set.Member, report: Progress) -> None:
        """Wait until the new CommitLog serves. Raises: Unavailable."""
        shown = None
        while (state := actor_set.state_of(self._ray, member, self._clock))["state"] != "RUNNING":
            line = f"shard {member.shard} replica {member.replica}: {state['state']} ({state['error'] or 'recovering'})"
            if line != shown:
                report(line)
                shown = line
            if self._left_s() <= 0:
                raise Unavailable(
                    f"{line}. It keeps trying: see `raymq shard describe {member.shard}`",
                    field="replica",
                    shard=member.shard,
                )
            self._clock.sleep_ms(_STEP_MS)

    def _left_s(self) -> float:
        return max(0.0, (self._deadline_ms - self._clock.monotonic_ms()) / 1000)


def await_complete(
    cluster: ClusterHandle,
    shard: int,
    replica: int,
    report: Progress,
    clock: Clock,
    deadline_ms: int,
) -> None:
    """Wait until the new replica has all that the leader has now, and counts. Raises: Unavailable.

    All is in its queues then, too: it can lead at once, without readers that wait for the dispatch of a whole log.
    """
    target, shown = 0, None
    while True:
        rows = replica_status.statuses(cluster, shard)
        # Only what is confirmed is dispatched.
        target = target or max((int(row["confirmed"]) for row in rows if row["mode"]), default=0)
        row = next(each for each in rows if each["replica"] == replica)
        has_all = row["mode"] and min(row["synced"], row["dispatched"]) >= target
        if has_all and row["is_complete"]:
            report(f"shard {shard} replica {replica}: complete")
            return

        have = row["synced"] if row["mode"] else 0
        line = f"shard {shard} replica {replica}: {have} of {target} bytes, not complete"
        if line != shown:
            report(line)
            shown = line
        if clock.monotonic_ms() > deadline_ms:
            silent = [each["replica"] for each in rows if not each["mode"]]
            hint = f"; replicas that do not answer: {silent}" if silent else ""
            raise Unavailable(
                f"{line}{hint}. It goes on by itself: see `raymq shard describe {shard}`. Every other replica of the "
                "shard must answer once before it is complete",
                field="replica",
                shard=shard,
            )
        clock.sleep_ms(_STEP_MS)
