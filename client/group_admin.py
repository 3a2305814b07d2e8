"""What an operator does with consumer groups: set their offsets, pause, resume and delete them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeGuard

from raymq.client.arguments import plain_int
from raymq.store.base.errors import OffsetOutOfRange, Rejected, Unavailable
from raymq.store.base.format import RETRY_PREFIX
from raymq.store.groups.foreign_members import CLIENTS_SHOWN_MAX

from .consume.offsets_by_time import offsets_for_times
from .group_facts import committed_offsets, coordinator_of, no_group, topics_with_offsets

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: a position that begins with it is that of another group
LIKE = "group:"
#: how often a reset is tried again for queues that members have claimed meanwhile
RESET_TRIES = 5


def reset_group(
    cluster: ClusterHandle,
    name: str,
    to: str | int | datetime,
    *,
    topic: str | None,
    queue_ids: Iterable[int] | None,
    dry_run: bool,
    force: bool,
) -> list[dict[str, Any]]:
    """See `Cluster.reset_group`."""
    coordinator = coordinator_of(cluster, name)
    if queue_ids is not None and topic is None:
        raise Rejected("queue_ids need a topic", field="topic", limit="a topic with queue_ids")
    rows: list[dict[str, Any]] = []
    read = to.removeprefix(LIKE) if _is_like(to) else name
    for each in _topics(cluster, read) if topic is None else [topic]:
        rows += _plan(cluster, name, each, to, queue_ids)
    if rows and not dry_run:
        _reset(cluster, name, coordinator, rows, force=force)
    return rows


def _is_like(to: object) -> TypeGuard[str]:
    return isinstance(to, str) and to.startswith(LIKE)


def _topics(cluster: ClusterHandle, name: str) -> list[str]:
    """The topics that a group reads, without that of its retries. Raises: Rejected when there is none."""
    facts = cluster.call(coordinator_of(cluster, name), "describe_group", {"group": name})
    read = set(facts["topics"]) | topics_with_offsets(cluster, name)
    found = sorted(each for each in read & cluster.topics().keys() if not _is_retry(each))
    if not found:
        raise no_group(name)
    return found


def _is_retry(topic: str) -> bool:
    return topic.startswith(RETRY_PREFIX)


def _plan(
    cluster: ClusterHandle,
    name: str,
    topic: str,
    to: str | int | datetime,
    queue_ids: Iterable[int] | None,
) -> list[dict[str, Any]]:
    """The rows of one topic: topic, queue_id, from, to. Raises: Rejected, OffsetOutOfRange."""
    queues = {queue["queue_id"]: queue for queue in cluster.describe_topic(topic)["queues"]}
    wanted = (
        sorted(queues) if queue_ids is None else sorted({plain_int(each) for each in queue_ids})
    )
    for queue_id in wanted:
        if queue_id not in queues:
            raise Rejected(
                f"{topic} has no queue {queue_id!r}: it has {len(queues)}, from 0",
                field="queue_ids",
                limit=len(queues) - 1,
                found=queue_id,
            )

    before = committed_offsets(cluster, name, topic)
    target = _offsets(cluster, topic, to, {each: queues[each] for each in wanted})
    return [
        {"topic": topic, "queue_id": each, "from": before.get(each), "to": target[each]}
        for each in wanted
        if each in target
    ]


def _offsets(
    cluster: ClusterHandle,
    topic: str,
    to: str | int | datetime,
    queues: Mapping[int, Mapping[str, int]],
) -> dict[int, int]:
    """Where each queue shall begin, if that is known. Raises: Rejected, OffsetOutOfRange."""
    if to in ("earliest", "latest"):
        end = "min_offset" if to == "earliest" else "max_offset"
        return {queue_id: int(queue[end]) for queue_id, queue in queues.items()}
    if _is_like(to):
        # What has expired since, neither group can read.
        found = committed_offsets(cluster, to.removeprefix(LIKE), topic)
        return {
            queue_id: max(found[queue_id], int(queue["min_offset"]))
            for queue_id, queue in queues.items()
            if queue_id in found
        }
    if isinstance(to, datetime):
        return offsets_for_times(cluster, topic, dict.fromkeys(queues, to), "first")
    if isinstance(to, str):
        raise Rejected(
            f"to is {to!r}; give 'earliest', 'latest', 'group:NAME', an offset, or a datetime",
            field="to",
            limit="earliest, latest, group:NAME, an offset or a datetime",
            found=to,
        )

    offset = plain_int(to)
    for queue_id, queue in queues.items():
        if not queue["min_offset"] <= offset <= queue["max_offset"]:
            limit = f"{queue['min_offset']}..{queue['max_offset']}"
            raise OffsetOutOfRange(
                f"queue {queue_id} of {topic} holds {limit}, not {offset}: name the queues for which it is meant "
                "(queue_ids). Nothing was changed",
                min=queue["min_offset"],
                max=queue["max_offset"],
                offset=offset,
                queue_id=queue_id,
                field="to",
                limit=limit,
            )
    return dict.fromkeys(queues, offset)


def _reset(
    cluster: ClusterHandle,
    name: str,
    coordinator: int,
    rows: list[dict[str, Any]],
    *,
    force: bool,
) -> None:
    """Store the offsets of all rows. A number of the coordinator fences the members that have the queues before."""
    left = {(row["topic"], row["queue_id"]): int(row["to"]) for row in rows}
    all_offsets: dict[str, dict[str, int]] = {}
    for (topic, queue_id), offset in left.items():
        all_offsets.setdefault(topic, {})[str(queue_id)] = offset
    clients = cluster.call(coordinator, "describe_group", {"group": name})["clients"]
    if clients and not force:
        raise _is_consumed(name, clients)

    for _ in range(RESET_TRIES):
        queues: dict[str, list[int]] = {}
        for topic, queue_id in left:
            queues.setdefault(topic, []).append(queue_id)
        asked: dict[str, object] = {"group": name, "queues": queues}
        number = int(
            cluster.call(coordinator, "take_group_number", {**asked, "force": force})["number"]
        )

        left = _reset_shards(cluster, name, left, number)
        # Its members hear now that they have to claim the queues again, and not with their next commit.
        cluster.call(coordinator, "withdraw_queues", {**asked, "number": number})
        if not left:
            if clients:
                # They would go on, and commit where they are.
                noted = {"group": name, "number": number, "offsets": all_offsets}
                cluster.call(coordinator, "notify_reset", noted)
            return
    (topic, queue_id), *_ = left
    raise Unavailable(
        f"members of group {name} claim queues as often as they are taken away, such as queue {queue_id} of {topic}: "
        "the others are reset. Repeat the call",
        field="group",
    )


def _is_consumed(name: str, clients: list[dict[str, Any]]) -> Rejected:
    """The error for a group in which clients of another protocol consume: it names some."""
    found = [f"{each['client']} at {each['address']}" for each in clients[:CLIENTS_SHOWN_MAX]]
    more = f" and {len(clients) - len(found)} more" if len(clients) > len(found) else ""
    return Rejected(
        f"{len(clients)} client(s) of {clients[0]['protocol']} consume in group {name}: {', '.join(found)}{more}. Stop "
        "them, or let them go on at the new offsets with force (--force)",
        field="force",
        limit="a group without clients",
        found=[each["client"] for each in clients[:CLIENTS_SHOWN_MAX]],
    )


def _reset_shards(
    cluster: ClusterHandle, name: str, offsets: Mapping[tuple[str, int], int], number: int
) -> dict[tuple[str, int], int]:
    """Set offsets at the shards of their queues. Returns: those of queues that a member has claimed meanwhile."""
    topics = cluster.topics()
    calls: dict[tuple[int, str], dict[str, int]] = {}
    for (topic, queue_id), offset in offsets.items():
        shards = topics[topic]["shards"]
        calls.setdefault((shards[queue_id % len(shards)], topic), {})[str(queue_id)] = offset

    left: dict[tuple[str, int], int] = {}
    for (shard, topic), own in sorted(calls.items()):
        arguments = {"group": name, "topic": topic, "offsets": own, "number": number}
        fenced = cluster.call(shard, "reset_offsets", arguments)["fenced"]
        left |= {(topic, int(each)): own[each] for each in fenced}
    return left


def pause_group(cluster: ClusterHandle, name: str, *, paused: bool) -> None:
    """See `Cluster.pause_group` and `Cluster.resume_group`."""
    coordinator = coordinator_of(cluster, name)
    arguments = {"group": name, "paused": paused}
    has_members = name in cluster.call(coordinator, "groups", {})["coordinated"]
    if has_members:
        cluster.call(coordinator, "pause_group", arguments)

    answers = [cluster.call(shard, "groups", {}) for shard in range(cluster.shards)]
    if any(name in each.get("workers", ()) for each in answers):
        for shard in range(cluster.shards):
            cluster.call(shard, "pause_leases", arguments)
    elif not has_members:
        # It says why.
        cluster.call(coordinator, "pause_group", arguments)


def delete_group(cluster: ClusterHandle, name: str) -> list[str]:
    """See `Cluster.delete_group`."""
    ended = cluster.call(coordinator_of(cluster, name), "end_group", {"group": name})
    if not ended["existed"] and not topics_with_offsets(cluster, name):
        raise no_group(name)
    topics: set[str] = set()
    for shard in range(cluster.shards):
        arguments = {"group": name, "number": ended["number"]}
        topics |= set(cluster.call(shard, "forget_offsets", arguments)["topics"])
    return sorted(topics)


def release_leases(cluster: ClusterHandle, name: str, *, topic: str | None = None) -> int:
    """See `Cluster.release_leases`."""
    arguments = {"group": name} if topic is None else {"group": name, "topic": topic}
    return sum(
        int(cluster.call(shard, "release_leases", arguments)["released"])
        for shard in range(cluster.shards)
    )
