"""Operations on consumer groups: heartbeats at their coordinator, claims of queues at the shard that stores them."""

from __future__ import annotations

import zlib

from raymq.actors.api import call_arguments
from raymq.actors.api.group_arguments import (
    TEXT_CHARS_MAX,
    check_beats,
    check_foreign_groups,
    check_member,
    check_queues,
    check_reset,
)
from raymq.actors.api.operations import flag, integer, integers, operation, optional, text, unnamed
from raymq.actors.leader.group_progress import GroupProgress
from raymq.store.base.errors import RayMQError, to_wire
from raymq.store.base.format import check_group_name
from raymq.store.groups.claims import Claim
from raymq.store.groups.foreign_members import ForeignClient
from raymq.store.groups.heartbeat import Beat, pack_answer
from raymq.store.state.topics import QUEUES_MAX

from .scope import LeaderScope, check_commit, check_queue, created_shards, shard_of, topic_of


def find_coordinator(leader: LeaderScope, group: str) -> dict[str, object]:
    """Find the shard that coordinates a group. Shard 0 knows it. It stays the same when shards are added."""
    check_group_name(group)
    leader.await_check()
    return {"shard": _coordinator(group, created_shards(leader))}


def _coordinator(group: str, shards: int) -> int:
    """The shard that coordinates a group. Args: `shards`: as many as the cluster had when it was created."""
    return zlib.crc32(group.encode()) % shards


def group_beat(leader: LeaderScope, beats: list[tuple[str, Beat]]) -> dict[str, object]:
    """Take heartbeats of members. Returns: for each its assignment, or why the member is refused."""
    answers = leader.groups.beat(beats)
    return {
        "answers": [
            {"error": to_wire(each)} if isinstance(each, RayMQError) else pack_answer(each)
            for each in answers
        ]
    }


def claim_queues(
    leader: LeaderScope, group: str, topic: str, member: str, numbers: dict[int, int]
) -> dict[str, object]:
    """Let a member of a group read queues of this shard, under the numbers of its grants.

    Returns: the committed offsets of the group, and the queues that a newer claim has.
    """
    leader.check_serving()
    check_group_name(group)
    info = topic_of(leader, topic)
    for queue_id in numbers:
        check_queue(leader, info, queue_id)
    offsets, refused = leader.claims.claim(group, topic, member, numbers)
    return {
        "offsets": {str(queue_id): offset for queue_id, offset in offsets.items()},
        "fenced": fenced_queues(refused),
    }


def release_claims(
    leader: LeaderScope, group: str, topic: str, member: str, numbers: dict[int, int]
) -> dict[str, object]:
    """End the claims of a member that leaves its group."""
    leader.check_serving()
    check_group_name(group)
    leader.claims.release(group, topic, member, numbers)
    return {}


def lock_queues(
    leader: LeaderScope,
    group: str,
    topic: str,
    client: str,
    queues: list[int],
    number: int | None = None,
) -> dict[str, object]:
    """Let a client of RocketMQ have queues of this shard alone, or renew that.

    Args: `number`: of `take_group_number`. Without one, queues that are free are only named, as "free".
    Returns: the queues that the client has now, as "locked", and the free ones. Those of other clients are neither.
    """
    leader.check_serving()
    check_group_name(group)
    info = topic_of(leader, topic)
    for queue_id in queues:
        check_queue(leader, info, queue_id)
    locked, free = leader.claims.lock(group, topic, client, queues, number)
    return {"locked": locked, "free": free}


def unlock_queues(
    leader: LeaderScope, group: str, topic: str, client: str, queues: list[int]
) -> dict[str, object]:
    """Let others have queues of this shard that a client of RocketMQ has locked."""
    leader.check_serving()
    check_group_name(group)
    leader.claims.unlock(group, topic, client, queues)
    return {}


def note_foreign_members(
    leader: LeaderScope, protocol: str, server: str, groups: dict[str, list[ForeignClient]]
) -> dict[str, object]:
    """Take in which clients of another protocol consume in groups that this shard coordinates. It holds for 30 s.

    Args: `server`: which one says so. `groups`: group -> its clients; none: there are none any more.
    Returns: those of these groups that have members, each with some of their programs; and offsets that operators have
    set, which the server shall say to its clients. It gets the same ones for 30 s.
    """
    leader.check_serving()
    with_members, resets = leader.groups.note_foreign(protocol, server, groups)
    shown = [
        {
            "group": each.group,
            "number": each.number,
            "offsets": {
                topic: {str(queue_id): offset for queue_id, offset in own.items()}
                for topic, own in each.offsets.items()
            },
            "clients": list(each.clients),
        }
        for each in resets
    ]
    return {"with_members": with_members, "resets": shown}


def notify_reset(
    leader: LeaderScope, group: str, number: int, offsets: dict[str, dict[int, int]]
) -> dict[str, object]:
    """Notify clients of other protocols in a group that its offsets were set.

    Args: `number`: of `take_group_number`. Returns: their ids. They hear with the next word of their servers.
    """
    leader.check_serving()
    check_group_name(group)
    return {"clients": leader.groups.notify_reset(group, number, offsets)}


def queue_locks(leader: LeaderScope, group: str, topic: str) -> dict[str, object]:
    """Find the queues of this shard that clients of RocketMQ have locked, each with the client and the age in ms.

    The age counts from when the lock was renewed last, or from when this leader began.
    """
    check_group_name(group)
    topic_of(leader, topic)
    found = leader.claims.locked(group, topic)
    return {str(queue_id): list(each) for queue_id, each in found.items()}


def groups(leader: LeaderScope) -> dict[str, object]:
    """Find the groups that this shard coordinates, each with its number of members, and those with offsets here.

    The clients of other protocols are counted by themselves.
    """
    leader.await_check()
    with_offsets = {group for group, _ in list(leader.store.state.offsets)}
    # A file of RocketMQ may have paused a group that another shard coordinates.
    shard, shards = shard_of(leader), created_shards(leader)
    members = {
        group: count
        for group, count in leader.groups.names().items()
        if _coordinator(group, shards) == shard
    }
    return {
        "coordinated": members,
        "clients": leader.groups.foreign_counts(),
        "paused": [group for group in leader.groups.paused() if group in members],
        "with_offsets": sorted(with_offsets),
        "workers": sorted(leader.store.leases.groups),
        "paused_workers": leader.leases.paused(),
    }


def describe_group(leader: LeaderScope, group: str) -> dict[str, object]:
    """Describe a group that this shard coordinates: its members, and the owner of each queue."""
    check_group_name(group)
    return leader.groups.describe(group)


def group_topics(leader: LeaderScope, group: str) -> dict[str, object]:
    """Find the topics of which a group has offsets on this shard."""
    check_group_name(group)
    leader.await_check()
    found = sorted(topic for name, topic in list(leader.store.state.offsets) if name == group)
    return {"topics": found}


def lag_ages(leader: LeaderScope, group: str, topic: str) -> dict[str, object]:
    """The age in ms of the oldest message that a group has not committed, of each queue that has one."""
    check_group_name(group)
    topic_of(leader, topic)
    leader.await_check()
    leader.await_dispatch()
    offsets = leader.store.state.confirmed_offsets(group, topic, leader.visible_end)
    ages = GroupProgress(leader.store).ages_ms(topic, offsets)
    return {str(queue_id): age for queue_id, age in ages.items()}


def take_group_number(
    leader: LeaderScope, group: str, queues: list[tuple[str, int]], force: bool
) -> dict[str, object]:
    """Begin to reset offsets of a group that this shard coordinates.

    Args: `force`: also of queues that members have. Returns: the number under which each shard does it.
    """
    leader.check_serving()
    check_group_name(group)
    return {"number": leader.groups.take_number(group, queues, is_forced=force)}


def reset_offsets(
    leader: LeaderScope, group: str, topic: str, offsets: dict[int, int], number: int
) -> dict[str, object]:
    """Set offsets of a group on queues of this shard. Later commits of the members that had them are refused.

    Returns: the queues that a member has under a higher number. Of these nothing is stored.
    """
    leader.check_serving()
    check_group_name(group)
    info = topic_of(leader, topic)
    check_commit(leader, info, offsets)
    return {"fenced": fenced_queues(leader.claims.reset(group, topic, offsets, number))}


def withdraw_queues(
    leader: LeaderScope, group: str, queues: list[tuple[str, int]], number: int
) -> dict[str, object]:
    """End a reset: members give these queues up, if they have them under a lower number, and get them again."""
    leader.check_serving()
    check_group_name(group)
    leader.groups.withdraw(group, queues, number)
    return {}


def pause_group(leader: LeaderScope, group: str, paused: bool) -> dict[str, object]:
    """Let the members of a group that this shard coordinates get no messages, or get them again."""
    leader.check_serving()
    check_group_name(group)
    leader.groups.pause(group, is_paused=paused)
    return {}


def end_group(leader: LeaderScope, group: str) -> dict[str, object]:
    """Delete a group that this shard coordinates. Returns: the number of its end, and whether it existed."""
    leader.check_serving()
    check_group_name(group)
    number, existed = leader.groups.end(group)
    return {"number": number, "existed": existed}


def forget_offsets(leader: LeaderScope, group: str, number: int) -> dict[str, object]:
    """Delete what this shard has of a group that its coordinator has ended. Returns: the topics."""
    leader.check_serving()
    check_group_name(group)
    return {"topics": leader.claims.forget_offsets(group, number)}


def fenced_queues(refused: dict[int, Claim]) -> dict[str, list[object]]:
    """queue -> number and member of the claim that stands."""
    return {str(queue_id): [claim.number, claim.member_id] for queue_id, claim in refused.items()}


_CLAIMS = {
    "group": call_arguments.check_name,
    "topic": call_arguments.check_name,
    "member": unnamed(check_member),
    "numbers": lambda field, value: call_arguments.check_offsets(value, 1),
}

_LOCKS = {
    "group": call_arguments.check_name,
    "topic": call_arguments.check_name,
    "client": text(TEXT_CHARS_MAX),
    "queues": integers(integer(0, QUEUES_MAX - 1), most=QUEUES_MAX),
}

OPERATIONS = {
    "find_coordinator": operation(find_coordinator, group=call_arguments.check_name),
    "groups": operation(groups),
    "describe_group": operation(describe_group, group=call_arguments.check_name),
    "group_topics": operation(group_topics, group=call_arguments.check_name),
    "lag_ages": operation(
        lag_ages, group=call_arguments.check_name, topic=call_arguments.check_name
    ),
    "group_beat": operation(group_beat, beats=unnamed(check_beats)),
    "claim_queues": operation(claim_queues, **_CLAIMS),
    "release_claims": operation(release_claims, **_CLAIMS),
    "lock_queues": operation(lock_queues, **_LOCKS, number=optional(integer(1))),
    "unlock_queues": operation(unlock_queues, **_LOCKS),
    "note_foreign_members": operation(
        note_foreign_members,
        protocol=text(TEXT_CHARS_MAX),
        server=text(TEXT_CHARS_MAX),
        groups=unnamed(check_foreign_groups),
    ),
    "notify_reset": operation(
        notify_reset,
        group=call_arguments.check_name,
        number=integer(1),
        offsets=unnamed(check_reset),
    ),
    "queue_locks": operation(
        queue_locks, group=call_arguments.check_name, topic=call_arguments.check_name
    ),
    "take_group_number": operation(
        take_group_number,
        group=call_arguments.check_name,
        queues=unnamed(check_queues),
        force=flag,
    ),
    "reset_offsets": operation(
        reset_offsets,
        group=call_arguments.check_name,
        topic=call_arguments.check_name,
        offsets=unnamed(call_arguments.check_offsets),
        number=integer(1),
    ),
    "withdraw_queues": operation(
        withdraw_queues,
        group=call_arguments.check_name,
        queues=unnamed(check_queues),
        number=integer(1),
    ),
    "pause_group": operation(pause_group, group=call_arguments.check_name, paused=flag),
    "end_group": operation(end_group, group=call_arguments.check_name),
    "forget_offsets": operation(forget_offsets, group=call_arguments.check_name, number=integer(1)),
}
