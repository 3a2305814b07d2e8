"""What an operator sees of consumer groups: which there are, who reads what, and how far they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import Rejected
from raymq.store.base.format import check_group_name
from raymq.store.groups.leases.pauses import pause_text
from raymq.store.state.topics import REDRIVE_PREFIX

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


def list_groups(cluster: ClusterHandle) -> dict[str, dict[str, Any]]:
    """See `Cluster.groups`."""
    found: dict[str, dict[str, Any]] = {}
    paused: set[str] = set()
    #: of workers: why they get nothing, on one shard or more
    reasons: dict[str, str] = {}
    #: of other protocols
    clients: dict[str, int] = {}
    for shard in range(cluster.shards):
        answer = cluster.call(shard, "groups", {})
        for name, members in answer["coordinated"].items():
            found[name] = {"kind": "stream", "members": members}
        paused.update(answer.get("paused", ()))
        clients.update(answer["clients"])
        reasons.update(answer.get("paused_workers", {}))
        workers = answer.get("workers", ())
        for name in (*answer["with_offsets"], *workers):
            if name.startswith(REDRIVE_PREFIX):
                continue
            kind = "workers" if name in workers else "manual"
            found.setdefault(name, {"kind": kind, "members": 0})
    for name in clients:
        found.setdefault(name, {"kind": "manual", "members": 0})

    for name, facts in found.items():
        facts["clients"] = clients.get(name, 0)
        is_active = facts["members"] or facts["clients"]
        facts["state"] = "paused" if name in paused else "active" if is_active else "empty"
        if name in reasons:
            facts["state"] = pause_text(reasons[name])
    return dict(sorted(found.items()))


def describe_group(cluster: ClusterHandle, name: str) -> dict[str, Any]:
    """See `Cluster.describe_group`."""
    coordinator = coordinator_of(cluster, name)
    facts = cluster.call(coordinator, "describe_group", {"group": name})
    topics = set(facts.pop("topics")) | topics_with_offsets(cluster, name)
    pauses = _pauses(cluster, name)
    if not topics and not facts["members"] and not facts["clients"] and not pauses:
        raise no_group(name)

    owners = {(each["topic"], each["queue_id"]): each for each in facts["queues"]}
    queues = [
        queue
        for topic in sorted(topics & cluster.topics().keys())
        for queue in _queues(cluster, name, topic, owners)
    ]
    if any(queue["leased"] is not None for queue in queues) and not facts["members"]:
        facts["kind"] = "workers"
    lag = sum(queue["lag"] or 0 for queue in queues)
    lag_s = max((queue["lag_s"] or 0.0 for queue in queues), default=0.0)
    facts |= {"queues": queues, "lag": lag, "lag_s": lag_s, "pauses": pauses}
    facts["paused"] = bool(facts["paused"] or pauses)
    return {"group": name, "coordinator": coordinator, **facts}


def _pauses(cluster: ClusterHandle, name: str) -> list[dict[str, Any]]:
    """The shards on which the workers of a group get nothing, and why."""
    found = []
    for shard in range(cluster.shards):
        reason = cluster.call(shard, "group_leases", {"group": name}).get("paused")
        if reason:
            found.append({"shard": shard, "reason": reason})
    return found


def coordinator_of(cluster: ClusterHandle, name: str) -> int:
    """The shard that coordinates a group. Raises: Rejected for a bad name."""
    check_group_name(name)
    return int(cluster.call(0, "find_coordinator", {"group": name})["shard"])


def topics_with_offsets(cluster: ClusterHandle, name: str) -> set[str]:
    """The topics of which a group has offsets."""
    return {
        topic
        for shard in range(cluster.shards)
        for topic in cluster.call(shard, "group_topics", {"group": name})["topics"]
    }


def committed_offsets(cluster: ClusterHandle, name: str, topic: str) -> dict[int, int]:
    """queue_id -> next offset of a group, of an existing topic."""
    found: dict[str, int] = {}
    for shard in sorted(set(cluster.topics()[topic]["shards"])):
        found |= cluster.call(shard, "offsets", {"group": name, "topic": topic})
    return {int(queue_id): int(offset) for queue_id, offset in found.items()}


def no_group(name: str) -> Rejected:
    """The error of a group that does not exist."""
    return Rejected(
        f"group {name!r} does not exist: no consumer has joined it or committed an offset. `raymq group list` shows "
        "those that do",
        field="group",
        limit="an existing group",
        found=name,
    )


def _queues(
    cluster: ClusterHandle,
    name: str,
    topic: str,
    owners: dict[tuple[str, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The queues of a topic, each with its owner and how far the group is."""
    described = cluster.describe_topic(topic)["queues"]
    committed: dict[str, int] = {}
    ages_ms: dict[str, int] = {}
    locks: dict[str, list[Any]] = {}
    leases: dict[str, list[int]] = {}
    for shard in sorted({queue["shard"] for queue in described}):
        asked = {"group": name, "topic": topic}
        committed |= cluster.call(shard, "offsets", asked)
        ages_ms |= cluster.call(shard, "lag_ages", asked)
        locks |= cluster.call(shard, "queue_locks", asked)
        leased = cluster.call(shard, "group_leases", {"group": name})["queues"]
        leases |= leased.get(topic, {})

    found = []
    for queue in described:
        queue_id = queue["queue_id"]
        offset = committed.get(str(queue_id))
        age_ms = ages_ms.get(str(queue_id), 0)
        owner = owners.get((topic, queue_id), {})
        locked_by, lock_ms = locks.get(str(queue_id), (None, None))
        _, following, held, waiting = leases.get(str(queue_id), (None, None, None, None))
        found.append(
            {
                "topic": topic,
                "queue_id": queue_id,
                "shard": queue["shard"],
                "member": owner.get("member"),
                "number": owner.get("number"),
                "revoking": owner.get("revoking", False),
                "locked_by": locked_by,
                "lock_age_s": None if lock_ms is None else lock_ms / 1000,
                "leased": held,
                "waiting": waiting,
                "next": following,
                "committed": offset,
                "max_offset": queue["max_offset"],
                "lag": None if offset is None else queue["max_offset"] - offset,
                "lag_s": None if offset is None else age_ms / 1000,
            }
        )
    return found
