"""Gives each shard of a running cluster of one replica further replicas.

First the new replicas get the log, as followers that do not count: the shard confirms alone what it stores, as before.
When they lag little, all replicas count. The new ones are not complete until the leader has said up to where they need
its log, and no replica that is not complete can be elected without the first one (rules R13 to R15 of docs/design.md).
So the log of the first replica decides, whichever processes have the new options already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raymq.cluster.deploy import actor_states
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.record.cluster_record import REPLICAS, ClusterRecord
from raymq.cluster.record.disk_room import check_room
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable

from .context import (
    REPLACE_TIMEOUT_S,
    OperationCall,
    Row,
    check_compacted,
    check_node,
)

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

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
    operation = OperationCall(cluster, timeout_s=timeout_s, progress=progress, clock=clock)

    with operation.locked():
        check_number(operation.record, replicas)

        with operation.session():
            if operation.record.has_one_replica:
                operation.save(_begin(operation, replicas, nodes))
            _check_nodes(operation.record, nodes)
            growth = _Growth(operation)
            shards = range(operation.record.shards)

            if operation.record.added_replicas:
                for shard in shards:
                    growth.restart(shard)
                for shard in shards:
                    growth.await_copies(shard)
                operation.save(replace(operation.record, added_replicas=0))

            for shard in shards:
                growth.restart(shard)
                growth.await_all(shard)
            operation.make_controller()

        operation.update_handle()


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


def _begin(operation: OperationCall, replicas: int, nodes: Sequence[str] | None) -> ClusterRecord:
    """The record with the new replicas. Raises: Rejected, StorageFull, or Unavailable for a shard that does not run."""
    from raymq.cluster.deploy.start_checks import check_addresses

    new = operation.record.with_added_replicas(replicas, nodes)
    check_addresses(operation.ray, new, first=False)
    check_room(operation.paths, new, operation.files, before=operation.record)
    for shard in range(new.shards):
        rows = operation.statuses(shard)
        for row in rows:
            if row["state"] != "RUNNING":
                raise Unavailable(
                    f"shard {shard} is {row['state']} ({row['error']}): repair it first",
                    field="shard",
                    shard=shard,
                )
        check_compacted(operation.cluster, rows)
        for replica in range(1, replicas):
            check_node(operation.ray, new, shard, replica, None)
    return new


class _Growth:
    """The replicas of all shards, made as the record says."""

    def __init__(self, operation: OperationCall) -> None:
        self._operation = operation

    def restart(self, shard: int) -> None:
        """Make each replica that is missing, or that lacks the options of the record. The first one comes last.

        Its followers wait for it then, so that sends wait for one start only.
        """
        for replica in reversed(range(self._operation.record.replicas)):
            if self._is_made(shard, replica):
                continue
            if self._is_known(shard, replica):
                self._operation.close(shard, replica, timeout_s=_CLOSE_TIMEOUT_S)
            self._operation.make(shard, replica, what="it starts")

    def await_copies(self, shard: int) -> None:
        """Wait until the new replicas have nearly everything. Raises: Unavailable."""
        shown = None
        while True:
            rows = self._operation.statuses(shard)
            line = f"shard {shard}: {'; '.join(map(self._copied, rows))}"
            if line != shown:
                self._operation.report(line)
                shown = line
            if self._lag_bytes(rows) <= LAG_BYTES:
                return
            if self._operation.is_late:
                raise Unavailable(
                    f"{line}. The copy goes on by itself: repeat the command to wait again",
                    field="replicas",
                    shard=shard,
                )
            self._operation.clock.sleep_ms(_STEP_MS)

    def await_all(self, shard: int) -> None:
        """Wait until a replica leads and all count. Raises: Unavailable."""
        self._operation.await_leader(shard, wait_ms=int(self._operation.left_s * 1000))
        for replica in range(self._operation.record.replicas):
            self._operation.await_complete(shard, replica)

    def _is_known(self, shard: int, replica: int) -> bool:
        key = (shard, replica, "commit_log")
        return bool(actor_states.find(self._operation.ray, self._operation.record.name, [key]))

    def _is_made(self, shard: int, replica: int) -> bool:
        """Whether a replica runs with the options of the record. One that is there has some time to answer."""
        until_ms = self._operation.clock.monotonic_ms() + _ANSWER_WAIT_MS
        while True:
            rows = self._operation.statuses(shard)
            row: Row = next((each for each in rows if each["replica"] == replica), {})
            if row.get("state") == "RUNNING":
                break
            is_late = self._operation.clock.monotonic_ms() >= until_ms
            if is_late or not self._is_known(shard, replica):
                return False
            self._operation.clock.sleep_ms(_STEP_MS)
        made = (tuple(row["voters"]), row["replicas"])
        wanted = (self._operation.record.voters, self._operation.record.replicas)
        return made == wanted

    @staticmethod
    def _copied(row: Row) -> str:
        what = f"{row['synced']} bytes" if row["mode"] else row["state"]
        return f"replica {row['replica']} {what}"

    def _lag_bytes(self, rows: Sequence[Row]) -> float:
        """What the slowest replica lacks, in its log or its queues. One that does not answer lacks everything."""
        if len(rows) < self._operation.record.replicas or not all(row["mode"] for row in rows):
            return math.inf
        end = max(int(row["confirmed"]) for row in rows)
        return end - min(int(min(row["synced"], row["dispatched"])) for row in rows)
