"""Gives each shard of a running cluster of one replica further replicas.

First the new replicas get the log, as followers that do not count: the shard confirms alone what it stores, as before.
When they lag little, all replicas count. The new ones are not complete until the leader has said up to where they need
its log, and no replica that is not complete can be elected without the first one (rules R13 to R15 of docs/design.md).
So the log of the first replica decides, whichever processes have the new options already.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raymq.client import replica_status
from raymq.cluster.controller import controller_actor
from raymq.cluster.deploy import actor_set, ray_host
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.deploy.resolve import save_endpoints
from raymq.cluster.record import cluster_record
from raymq.cluster.record.cluster_record import REPLICAS, ClusterRecord
from raymq.cluster.record.paths import ClusterPaths, directory_lock
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files

from .context import (
    REPLACE_TIMEOUT_S,
    Replacement,
    Row,
    await_complete,
    await_leader,
    check_compacted,
    check_node,
    load_local,
    local_paths,
    running_ray,
)

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

logger = logging.getLogger("raymq")

#: how many replicas a shard can get
_POSSIBLE = REPLICAS[1:]
#: a new replica may lack so much when it begins to count: it is there within a second
LAG_BYTES = 16 * 1024**2
#: how long the processes of one replica may take to end
_CLOSE_TIMEOUT_S = 30.0
#: how long one may take to answer before it is taken for one that hangs
_ANSWER_WAIT_MS = 20_000
#: between two looks at the new replicas
_STEP_MS = 200


def set_replicas(
    cluster: ClusterHandle,
    replicas: int,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = REPLACE_TIMEOUT_S,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> None:
    """Give each shard so many replicas, as `Cluster.set_replicas` promises.

    Durable: each of the two steps in cluster.json, before any process is made for it.
    """
    clock, files, report = clock or Clock(), Files(), progress or logger.info
    deadline_ms = clock.monotonic_ms() + int(timeout_s * 1000)
    paths = local_paths(cluster)

    with directory_lock(paths, files):
        record = load_local(paths, files)
        check_number(record, replicas)

        with ray_host.session(running_ray(record, paths, files), timeout_s) as ray:
            if record.has_one_replica:
                record = _begin(ray, cluster, record, replicas, nodes, clock)
                cluster_record.save_record(paths, record, files)
            _check_nodes(record, nodes)
            growth = _Growth(ray, cluster, paths, record, clock, deadline_ms, report)

            if record.added_replicas:
                for shard in range(record.shards):
                    growth.restart(shard)
                for shard in range(record.shards):
                    growth.await_copies(shard)
                record = replace(record, added_replicas=0)
                cluster_record.save_record(paths, record, files)
                growth = _Growth(ray, cluster, paths, record, clock, deadline_ms, report)

            for shard in range(record.shards):
                growth.restart(shard)
                growth.await_all(shard)
            controller_actor.make(ray, record, paths, clock=clock, warn=report)

        cluster.replicas, cluster.placement = record.replicas, record.placement
        if record.placement is not None:
            save_endpoints(paths, cluster.endpoints, files)


def check_number(record: ClusterRecord, replicas: int) -> None:
    """Raises: Rejected for a number that cannot be, or that this cluster cannot get; Unavailable for now."""
    if replicas not in _POSSIBLE:
        raise Rejected(
            f"replicas={replicas!r}: a shard can get {', '.join(map(str, _POSSIBLE))} replicas",
            field="replicas",
            limit=_POSSIBLE,
            found=replicas,
        )
    if record.joined_shards is not None:
        raise Unavailable(
            "the addition of shards was interrupted: complete it first, by `raymq start` or `raymq shard add`",
            field="shards",
        )
    if record.replicas != replicas and not record.has_one_replica:
        raise Rejected(
            f"each shard has {record.replicas} replicas, and only a cluster of one replica can get others",
            field="replicas",
            limit=record.replicas,
            found=replicas,
        )


def _check_nodes(record: ClusterRecord, nodes: Sequence[str] | None) -> None:
    """Raises: Rejected if an earlier call has placed the new replicas elsewhere."""
    if nodes is not None and tuple(nodes) != record.nodes:
        raise Rejected(
            f"the new replicas were placed on {record.nodes} by an earlier call: leave nodes out to complete it",
            field="nodes",
            limit=record.nodes,
            found=list(nodes),
        )


def _begin(
    ray: Any,
    cluster: ClusterHandle,
    record: ClusterRecord,
    replicas: int,
    nodes: Sequence[str] | None,
    clock: Clock,
) -> ClusterRecord:
    """The record with the new replicas. Raises: Rejected, or Unavailable for a shard that does not run."""
    from raymq.cluster.deploy.start_checks import check_addresses

    new = record.with_added_replicas(replicas, nodes)
    check_addresses(ray, new, first=False)
    for shard in range(record.shards):
        rows = replica_status.statuses(cluster, shard)
        for row in rows:
            if row["state"] != "RUNNING":
                raise Unavailable(
                    f"shard {shard} is {row['state']} ({row['error']}): repair it first",
                    field="shard",
                    shard=shard,
                )
        check_compacted(cluster, rows)
        for replica in range(1, replicas):
            check_node(ray, new, shard, replica, None)
    return new


class _Growth:
    """The replicas of all shards, made as a record says."""

    def __init__(
        self,
        ray: Any,
        cluster: ClusterHandle,
        paths: ClusterPaths,
        record: ClusterRecord,
        clock: Clock,
        deadline_ms: int,
        report: Progress,
    ) -> None:
        self._ray = ray
        self._cluster = cluster
        self._record = record
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._report = report
        self._made = Replacement(ray, cluster, paths, record, clock, deadline_ms)

    def restart(self, shard: int) -> None:
        """Make each replica that has not the options of the record, or is not there. The first one comes last.

        Its followers wait for it then, so that sends wait for one start only.
        """
        for replica in reversed(range(self._record.replicas)):
            if self._is_made(shard, replica):
                continue
            if self._is_known(shard, replica):
                self._report(f"shard {shard} replica {replica}: ending")
                actor_set.close_replica(
                    self._ray,
                    self._record,
                    shard,
                    replica,
                    clock=self._clock,
                    timeout_s=_CLOSE_TIMEOUT_S,
                )
            self._made.run(shard, replica, self._report, what="it starts")

    def await_copies(self, shard: int) -> None:
        """Wait until the new replicas have nearly everything. Raises: Unavailable."""
        shown = None
        while True:
            rows = replica_status.statuses(self._cluster, shard)
            line = f"shard {shard}: {'; '.join(map(self._copied, rows))}"
            if line != shown:
                self._report(line)
                shown = line
            if self._lag_bytes(rows) <= LAG_BYTES:
                return
            if self._clock.monotonic_ms() > self._deadline_ms:
                raise Unavailable(
                    f"{line}. The copy goes on by itself: repeat the command to wait again",
                    field="replicas",
                    shard=shard,
                )
            self._clock.sleep_ms(_STEP_MS)

    def await_all(self, shard: int) -> None:
        """Wait until a replica leads and all count. Raises: Unavailable."""
        await_leader(
            partial(replica_status.statuses, self._cluster, shard),
            self._clock,
            wait_ms=max(0, self._deadline_ms - self._clock.monotonic_ms()),
        )
        for replica in range(self._record.replicas):
            await_complete(
                self._cluster, shard, replica, self._report, self._clock, self._deadline_ms
            )

    def _is_known(self, shard: int, replica: int) -> bool:
        key = (shard, replica, "commit_log")
        return bool(actor_set.find(self._ray, self._record.name, [key]))

    def _is_made(self, shard: int, replica: int) -> bool:
        """Whether a replica runs with the options of the record. One that is there has some time to answer."""
        until_ms = self._clock.monotonic_ms() + _ANSWER_WAIT_MS
        while True:
            rows = replica_status.statuses(self._cluster, shard)
            row: Row = next((each for each in rows if each["replica"] == replica), {})
            if row.get("state") == "RUNNING":
                break
            is_late = self._clock.monotonic_ms() >= until_ms
            if is_late or not self._is_known(shard, replica):
                return False
            self._clock.sleep_ms(_STEP_MS)
        made = (tuple(row["voters"]), row["replicas"])
        wanted = (self._record.voters, self._record.replicas)
        return made == wanted

    @staticmethod
    def _copied(row: Row) -> str:
        what = f"{row['synced']} bytes" if row["mode"] else row["state"]
        return f"replica {row['replica']} {what}"

    def _lag_bytes(self, rows: Sequence[Row]) -> float:
        """What the slowest replica lacks, in its log or its queues. One that does not answer lacks everything."""
        if len(rows) < self._record.replicas or not all(row["mode"] for row in rows):
            return math.inf
        end = max(int(row["confirmed"]) for row in rows)
        return end - min(int(min(row["synced"], row["dispatched"])) for row in rows)
