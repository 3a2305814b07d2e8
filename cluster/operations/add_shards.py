"""Adds shards to a cluster that runs. The others go on meanwhile.

Each step is repeated safely, so that the same call, or the next start, completes an addition that was interrupted:

    1. cluster.json has the new shards, and says that their stores are new (`formed_shards`) and that they lack topics
       (`joined_shards`).
    2. Their actors are made, and elect. Such a shard answers no question about all shards: it is *joining*.
    3. cluster.json says that their stores exist: from now on a missing one is a lost one. No client has used one yet.
    4. Every replica learns where they listen.
    5. Every shard notes in its log that topics may be on them, and they get every topic, and the options of the stores
       that were set while the cluster ran.
    6. Every old shard notes in its log that they count: from now on each answer to `create_topic` says so, and its
       caller creates the topic on them, too. They get the topics that were created until then.
    7. They note it in their own logs, and are joining no more. cluster.json says so.

A topic that is created at the same time is in a shard's log before the note of step 6, and is copied, or after it, and
its caller knows. The notes are in the logs because an actor keeps the number of its start, also when Ray restarts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raymq.client import replica_status
from raymq.client.topics.new_topic import repeat_unknown
from raymq.client.transport.routes import Routes
from raymq.cluster.deploy import actor_set, node_labels
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.deploy.resolve import save_endpoints
from raymq.cluster.record import cluster_record
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.cluster.record.disk_room import check_room
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files

from .context import OperationCall, Row
from .set_config import missing_options, operator_name

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: how long the new shards may take to serve, if the caller names no time
ADD_TIMEOUT_S = 600.0

#: topic -> queues, shards, attributes
Topics = dict[str, dict[str, Any]]


def add_shards(
    cluster: ClusterHandle,
    count: int = 1,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = ADD_TIMEOUT_S,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> list[int]:
    """Add shards, or complete an addition that was interrupted, as `Cluster.add_shards` promises."""
    from raymq.cluster.deploy.start_checks import check_addresses, check_pools

    operation = OperationCall(cluster, timeout_s=timeout_s, progress=progress, clock=clock)

    with operation.locked():
        record = operation.record
        with operation.session():
            ray, report = operation.ray, operation.report
            new = plan_shards(record, count, nodes, present=sorted(node_labels.present(ray)))
            added = list(range(new.joined, new.shards))
            check_led(record, operation.statuses())
            if new.placement is not None:
                node_labels.check_nodes(ray, _nodes_of(new, added), first=True)
            check_addresses(ray, new, first=False)
            check_pools(operation.paths, new, operation.files)

            interrupted = record.joined_shards is not None
            if not interrupted:
                check_room(operation.paths, new, operation.files, before=record)
            report(f"{'completing' if interrupted else 'adding'} the shard(s) {added}")
            operation.save(new)
            members = operation.converge(lambda shard, *_: shard in added)
            actor_set.await_leaders(
                ray,
                [member for member in members if member.role == "commit_log"],
                clock=operation.clock,
                timeout_s=operation.left_s,
                progress=report,
                warn=report,
            )
            operation.save(new.now_formed())
            operation.publish_endpoints()
        # The handle learns the placement when the shards count.
        if new.placement is not None:
            save_endpoints(operation.paths, cluster.endpoints, operation.files)
        join(cluster, operation.record, operation.files, report, clock=operation.clock)

    return added


# --- what is refused ------------------------------------------------------------------------------


def plan_shards(
    record: ClusterRecord, count: int, nodes: Sequence[str] | None, *, present: Sequence[str]
) -> ClusterRecord:
    """The record with the new shards. Args: `present`: labels of the nodes that are there.

    Raises: Rejected for a number or nodes that cannot be; Unavailable before the end of the first start.
    """
    if record.joined_shards is not None:
        _check_same(record, count, nodes)
        return record
    if record.added_replicas:
        raise Unavailable(
            "the shards are getting further replicas: complete that first, by `raymq shard set-replicas "
            f"{record.replicas}`",
            field="replicas",
        )
    if record.now_formed() != record:
        raise Unavailable(
            "the start of this cluster has not ended: run `raymq start` first", field="formed"
        )
    if nodes is None and record.placement is not None:
        nodes = default_nodes(record, present)
    return record.with_more_shards(count, nodes)


def default_nodes(record: ClusterRecord, present: Sequence[str]) -> list[str]:
    """The nodes of the first start, and those that have replicas now: without those that are away."""
    now = [node for row in record.placement or () for node in row]
    known = dict.fromkeys([*(record.nodes or ()), *now])
    return [node for node in known if node in present]


def _check_same(record: ClusterRecord, count: int, nodes: Sequence[str] | None) -> None:
    """Raises: Rejected if an addition that was interrupted is another one."""
    added = list(range(record.joined, record.shards))
    if count != len(added):
        raise Rejected(
            f"the addition of the shard(s) {added} was interrupted: complete it first, with count={len(added)} or "
            "`raymq start`",
            field="count",
            limit=len(added),
            found=count,
        )
    placed = _nodes_of(record, added)
    if nodes is not None and set(placed) - set(nodes):
        raise Rejected(
            f"the addition of the shard(s) {added} was interrupted, and they are placed on {placed}: complete it "
            "without naming nodes",
            field="nodes",
            limit=placed,
            found=list(nodes),
        )


def _nodes_of(record: ClusterRecord, shards: Sequence[int]) -> list[str]:
    """The nodes of these shards' replicas, each once."""
    rows = record.placement or ()
    return sorted({node for shard in shards if shard < len(rows) for node in rows[shard]})


def check_led(record: ClusterRecord, rows: Sequence[Row]) -> None:
    """Raises: Unavailable if a shard has no leader: it could not note that the cluster has more shards."""
    for shard in range(record.joined):
        if replica_status.leader_of([row for row in rows if row["shard"] == shard]) is None:
            raise Unavailable(
                f"no replica leads shard {shard} now. Every shard must answer: see `raymq shard list`",
                field="leader",
                shard=shard,
            )


# --- what is done ---------------------------------------------------------------------------------


def join(
    cluster: ClusterHandle,
    record: ClusterRecord,
    files: Files,
    report: Progress,
    *,
    clock: Clock | None = None,
) -> None:
    """Let shards that serve know every topic, and count them: steps 5 to 7.

    Durable: on all shards and in cluster.json, at return. Raises: Unavailable, DeliveryUnknown.
    """
    calls = _Calls(cluster, record, clock or Clock())
    old, added = range(record.joined), range(record.joined, record.shards)
    topics = {shard: calls.note(shard, record.joined) for shard in (*old, *added)}
    calls.copy(topics)
    calls.copy_options(added)
    topics |= {shard: calls.note(shard, record.shards) for shard in old}
    calls.copy(topics)
    calls.copy_options(added)
    for shard in added:
        calls.note(shard, record.shards)

    done = replace(record, joined_shards=None)
    cluster_record.save_record(ClusterPaths(str(cluster.data_dir)), done, files)
    cluster.learn_shards(record.shards)
    report(
        f"shard(s) {list(added)}: {len(topics[record.joined])} topic(s); new topics are on them, too"
    )


def _progress(facts: dict[str, Any]) -> tuple[int, int]:
    """How far an addition of queues is on a shard: more queues, then those that are shown."""
    return int(facts["queues"]), -int(facts["hidden_queues"])


class _Calls:
    """Operations of shards, some of which the handle does not count yet."""

    def __init__(self, cluster: ClusterHandle, record: ClusterRecord, clock: Clock) -> None:
        self._routes = Routes.of(cluster)
        self._routes.learn_shards(range(record.shards))
        self._shards = record.shards
        self._clock = clock

    def note(self, shard: int, joined: int) -> Topics:
        """Let a shard note how many are joined. Returns: its topics."""
        arguments = {"known": self._shards, "joined": joined}
        topics: Topics = self._call(shard, "note_shards", arguments)["topics"]
        return topics

    def copy(self, topics: dict[int, Topics]) -> None:
        """Create each topic where it is missing, and note it there. Args: `topics`: shard -> those that it has.

        A creation that was interrupted may have left a topic on some of the old shards.
        """
        # The first shard is the first to know a topic. More queues than it knows may have been added since.
        everything: Topics = {}
        for shard in sorted(topics):
            for name, facts in topics[shard].items():
                known = everything.setdefault(name, facts)
                if _progress(facts) > _progress(known):
                    everything[name] = facts
        for shard, have in topics.items():
            for name, facts in everything.items():
                if name not in have:
                    arguments = {key: value for key, value in facts.items() if value}
                    self._call(shard, "create_topic", {"name": name, **arguments})
                elif _progress(have[name]) < _progress(facts):
                    arguments = {
                        key: facts[key] for key in facts if key not in ("attributes", "generation")
                    }
                    arguments["are_hidden"] = bool(facts["hidden_queues"])
                    self._call(shard, "add_queues", {"name": name, **arguments})
                have[name] = facts

    def copy_options(self, added: Iterable[int]) -> None:
        """Set the options of the stores on new shards as the first shard has them."""
        for shard in added:
            # Again until they agree: an operator may set another value at the same time. The first shard is asked
            # last, because that is where each change begins.
            while True:
                target = self._call(shard, "config", {})["options"]
                source = self._call(0, "config", {})["options"]
                values = missing_options(source, target)
                if not values:
                    break
                self._call(shard, "set_config", {"values": values, "by": operator_name()})

    def _call(self, shard: int, op: str, arguments: Mapping[str, object]) -> dict[str, Any]:
        answer, _ = repeat_unknown(lambda: self._routes.call(shard, op, arguments), self._clock)
        return answer
