"""What `start`, `stop` and operations have in common, and what is refused by several operations."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from raymq.client import replica_status
from raymq.cluster.controller import controller_actor
from raymq.cluster.deploy import actor_end, actor_set, actor_states, node_labels, ray_host
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.deploy.resolve import save_endpoints
from raymq.cluster.record import cluster_record
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.cluster.record.paths import ClusterPaths, directory_lock
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


def check_node(
    ray: object, record: ClusterRecord, shard: int, replica: int, node: str | None
) -> None:
    """Raises: Rejected when the node of the new replica is not there."""
    where = node or actor_states.node_of(record, shard, replica)
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


class DirectoryCall:
    """One call that works on a data directory: its record, its deadline, and its progress."""

    #: of cluster.json
    record: ClusterRecord

    def __init__(
        self,
        find_paths: Callable[[], ClusterPaths],
        *,
        timeout_s: float,
        progress: Progress | None,
        clock: Clock | None = None,
    ) -> None:
        self._find_paths = find_paths
        self.clock = clock or Clock()
        self.files = Files()
        #: each takes a line of progress
        self.report = progress or logger.info
        self.warn = progress or logger.warning
        self.set_deadline(timeout_s)

    @property
    def paths(self) -> ClusterPaths:
        """The data directory. Raises: Rejected on another machine."""
        return self._find_paths()

    def save(self, record: ClusterRecord) -> None:
        """Write a new record. Durable: at return."""
        cluster_record.save_record(self.paths, record, self.files)
        self.record = record

    # --- time -------------------------------------------------------------------------------------

    def set_deadline(self, timeout_s: float) -> None:
        """Give the call so many seconds from now on."""
        self.timeout_s = timeout_s
        self._deadline_ms = self.clock.monotonic_ms() + int(timeout_s * 1000)

    def extend_deadline(self, at_least_s: float) -> None:
        """Leave the call at least so many seconds from now on."""
        least_ms = self.clock.monotonic_ms() + int(at_least_s * 1000)
        self._deadline_ms = max(self._deadline_ms, least_ms)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, (self._deadline_ms - self.clock.monotonic_ms()) / 1000)

    @property
    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return self.clock.monotonic_ms() > self._deadline_ms


class OperationCall(DirectoryCall):
    """One call of an operation: the cluster's record under its lock, the Ray, the deadline, and the progress.

    `record` is known inside `locked`.
    """

    #: the module ray, inside `session`
    ray: Any

    def __init__(
        self,
        cluster: ClusterHandle,
        *,
        timeout_s: float,
        progress: Progress | None,
        clock: Clock | None = None,
    ) -> None:
        find_paths = partial(local_paths, cluster)
        super().__init__(find_paths, timeout_s=timeout_s, progress=progress, clock=clock)
        self.cluster = cluster

    # --- the cluster and its record ---------------------------------------------------------------

    def load(self) -> None:
        """Read the record. Raises: Rejected without one; Corrupt."""
        record = cluster_record.load_record(self.paths, self.files)
        if record is None:
            raise Rejected(f"{self.paths.data_dir} has no cluster.json", field="target")
        self.record = record

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from the data directory. Raises: Unavailable while another one works on it."""
        with directory_lock(self.paths, self.files):
            self.load()
            yield

    @contextmanager
    def session(self) -> Iterator[None]:
        """Connect to the Ray that the cluster runs in. Raises: Unavailable."""
        running = ray_host.running_target(self.paths, self.files)
        if running is None:
            again = f"raymq start {shlex.quote(str(self.paths.data_dir))}"
            message = f"the Ray of cluster {self.record.name!r} does not run: {again}"
            raise Unavailable(message, path=self.paths.data_dir)
        with ray_host.session(running, self.timeout_s) as self.ray:
            yield

    def update_handle(self) -> None:
        """Let the caller's handle, and later ones, know the replicas of the record."""
        self.cluster.replicas, self.cluster.placement = self.record.replicas, self.record.placement
        if self.record.placement is not None:
            save_endpoints(self.paths, self.cluster.endpoints, self.files)

    # --- what replicas say ------------------------------------------------------------------------

    def statuses(self, shard: int | None = None) -> list[Row]:
        """What the replicas of a shard say; None: of all shards."""
        return replica_status.statuses(self.cluster, shard)

    def await_leader(self, shard: int, *, wait_ms: int = ELECTION_WAIT_MS) -> list[Row]:
        """What the replicas of a shard say once one of them leads, or after a while."""
        return await_leader(partial(self.statuses, shard), self.clock, wait_ms=wait_ms)

    def move_leader(self, shard: int, replica: int) -> None:
        """Let a replica lead. Raises: Rejected, Unavailable, DeliveryUnknown."""
        replica_status.move_leader(
            self.cluster, shard, replica, pause=lambda seconds: self.clock.sleep_ms(seconds * 1000)
        )

    def await_complete(self, shard: int, replica: int) -> None:
        """Wait until a new replica has all that the leader has now, and counts. Raises: Unavailable.

        All is in its queues then, too: it can lead at once, without readers that wait for the dispatch of a whole log.
        """
        target, shown = 0, None
        while True:
            rows = self.statuses(shard)
            # Only what is confirmed is dispatched.
            target = target or max(
                (int(row["confirmed"]) for row in rows if row["mode"]), default=0
            )
            row = next(each for each in rows if each["replica"] == replica)
            has_all = row["mode"] and min(row["synced"], row["dispatched"]) >= target
            if has_all and row["is_complete"]:
                self.report(f"shard {shard} replica {replica}: complete")
                return

            have = row["synced"] if row["mode"] else 0
            line = f"shard {shard} replica {replica}: {have} of {target} bytes, not complete"
            if line != shown:
                self.report(line)
                shown = line
            if self.is_late:
                silent = [each["replica"] for each in rows if not each["mode"]]
                hint = f"; replicas that do not answer: {silent}" if silent else ""
                raise Unavailable(
                    f"{line}{hint}. It goes on by itself: see `raymq shard describe {shard}`. Every other replica of "
                    "the shard must answer once before it is complete",
                    field="replica",
                    shard=shard,
                )
            self.clock.sleep_ms(_STEP_MS)

    # --- replicas ---------------------------------------------------------------------------------

    def make(self, shard: int, replica: int, *, what: str = "a new, empty replica starts") -> None:
        """Make the actors of a replica as the record says, and let all replicas know where it listens.

        Raises: Unavailable when it does not serve in time.
        """
        (commit_log,) = (
            member
            for member in self.converge(lambda *key: key[:2] == (shard, replica))
            if member.role == "commit_log"
        )
        node = actor_states.node_of(self.record, shard, replica)
        name = f"shard {shard} replica {replica}"
        self.report(f"{name}: {what}" + ("" if node is None else f" on node {node}"))
        self._await_running(commit_log)
        self.publish_endpoints()

    def close(self, shard: int, replica: int, *, timeout_s: float) -> None:
        """Close the actors of a replica in order, and end them. Raises: Unavailable."""
        self.report(f"shard {shard} replica {replica}: ending")
        actor_end.close_replica(
            self.ray, self.record, shard, replica, clock=self.clock, timeout_s=timeout_s
        )

    def end(self, shard: int, replica: int, *, what: str) -> None:
        """End the actors of a lost replica without an orderly close. Raises: Unavailable."""
        self.report(f"shard {shard} replica {replica}: ending {what}")
        actor_end.end_replica(self.ray, self.record, shard, replica, clock=self.clock)

    def make_controller(self) -> None:
        """Make the controller as the record says, in place of the one that runs."""
        controller_actor.make(self.ray, self.record, self.paths, clock=self.clock, warn=self.report)

    def converge(self, wanted: Callable[[int, int, str], bool]) -> list[actor_states.Member]:
        """Make the actors that the record says and that do not run. Args: `wanted`: of shard, replica and role."""
        cluster = self.cluster
        members, _ = actor_set.converge(
            self.ray,
            self.record,
            self.paths,
            cluster.token,
            cluster.ca,
            wanted=wanted,
            timeout_s=self.left_s,
        )
        return members

    def publish_endpoints(self) -> None:
        """Let every replica, and the handle, know where all replicas listen."""
        self.cluster.endpoints = actor_set.publish_endpoints(
            self.ray,
            self.record,
            self.cluster.endpoints,
            replica_status.replica_endpoints(self.cluster),
            self.clock,
        )

    def _await_running(self, member: actor_states.Member) -> None:
        """Wait until the new CommitLog serves. Raises: Unavailable."""
        shown = None
        while (state := actor_states.state_of(self.ray, member, self.clock))["state"] != "RUNNING":
            line = f"shard {member.shard} replica {member.replica}: {state['state']} ({state['error'] or 'recovering'})"
            if line != shown:
                self.report(line)
                shown = line
            if self.left_s <= 0:
                raise Unavailable(
                    f"{line}. It keeps trying: see `raymq shard describe {member.shard}`",
                    field="replica",
                    shard=member.shard,
                )
            self.clock.sleep_ms(_STEP_MS)
