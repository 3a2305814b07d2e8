"""Operations on leases of messages: settlements, and more time. Messages are leased by a stream, see api/leases.py."""

from __future__ import annotations

from raymq.actors.api import call_arguments
from raymq.actors.api.leases import (
    check_items,
    check_message,
    check_numbers,
    check_options,
    check_session,
    pack_refused,
)
from raymq.actors.api.operations import flag, integer, operation, optional
from raymq.actors.leader.lease_options import SharedOptions
from raymq.store.base.errors import Rejected
from raymq.store.base.format import check_group_name
from raymq.store.groups.leases.options import LEASE_MS, LeaseOptions
from raymq.store.groups.leases.pauses import OPERATOR
from raymq.store.groups.leases.requests import SettleItem, SettleRequest
from raymq.store.records.requests import MessageSelector
from raymq.store.state.topics import QueueKey

from .scope import LeaderScope


def settle(
    leader: LeaderScope,
    group: str,
    session: bytes,
    settle: int,
    items: list[SettleItem],
    options: LeaseOptions | None = None,
    wanted: MessageSelector | None = None,
) -> dict[str, object]:
    """Settle leased messages. One call of a session is under way at a time.

    Args: `settle`: number of the call, which a repeated one has, too. It gets the same answer. `options`, `wanted`: of
    the session's requests: a new leader may not know them yet.
    Returns: what was refused, since its lease does not hold it any more.
    """
    check_group_name(group)
    request = SettleRequest(session, settle, items)
    answer = leader.leases.settle(group, request, _shared(options, wanted))
    return {"refused": pack_refused(answer.refused)}


def extend_leases(
    leader: LeaderScope,
    group: str,
    session: bytes,
    lease_ms: int | None = None,
    message: tuple[int, QueueKey, int] | None = None,
    leases: list[int] | None = None,
    options: LeaseOptions | None = None,
    wanted: MessageSelector | None = None,
) -> dict[str, object]:
    """Give leases of a session more time, or one message of a lease.

    Args: `lease_ms`: from now on; without it the length of each lease. Needed with `message`. `leases`: without it all
    of the session. `options`, `wanted`: as of `settle`.
    Returns: for how long the worker has each lease. Those that are missing are lost.
    """
    check_group_name(group)
    shared = _shared(options, wanted)
    if message is None:
        answer = leader.leases.extend(group, session, lease_ms, shared, leases)
    elif lease_ms is None:
        raise Rejected("a message gets a time: give lease_ms", field="lease_ms", limit="ms")
    else:
        answer = leader.leases.extend_message(group, session, message, lease_ms, shared)
    return {"granted_ms": {str(number): left_ms for number, left_ms in answer.granted_ms.items()}}


def group_leases(leader: LeaderScope, group: str) -> dict[str, object]:
    """How a group of workers stands in the queues of this shard: low mark, first offset that was never leased, messages
    that are leased, and those that wait for their next delivery; and why it leases nothing here.
    """
    check_group_name(group)
    found: dict[str, dict[str, list[int]]] = {}
    for (topic, queue_id), each in leader.leases.describe(group).items():
        found.setdefault(topic, {})[str(queue_id)] = list(each)
    paused = leader.leases.paused().get(group, "")
    return {"queues": found, "paused": paused}


def release_leases(leader: LeaderScope, group: str, topic: str | None = None) -> dict[str, object]:
    """Take what workers of a group have back: others get it at once, and the attempts count.

    Args: `topic`: messages of this topic; without it all. Returns: how many they were.
    """
    check_group_name(group)
    return {"released": leader.leases.release(group, topic)}


def pause_leases(leader: LeaderScope, group: str, paused: bool) -> dict[str, object]:
    """Let a group of workers lease nothing on this shard, or let it go on. What is leased may be settled."""
    check_group_name(group)
    leader.leases.pause(group, OPERATOR if paused else "")
    return {}


def _shared(options: LeaseOptions | None, wanted: MessageSelector | None) -> SharedOptions | None:
    return None if options is None else SharedOptions(options, wanted)


_SESSION = {"group": call_arguments.check_name, "session": check_session}
_SHARED = {
    "options": optional(check_options),
    "wanted": optional(lambda field, value: call_arguments.check_selector(value)),
}

OPERATIONS = {
    "settle": operation(settle, **_SESSION, settle=integer(1), items=check_items, **_SHARED),
    "extend_leases": operation(
        extend_leases,
        **_SESSION,
        lease_ms=optional(integer(*LEASE_MS)),
        message=optional(check_message),
        leases=optional(check_numbers),
        **_SHARED,
    ),
    "release_leases": operation(
        release_leases,
        group=call_arguments.check_name,
        topic=optional(call_arguments.check_name),
    ),
    "pause_leases": operation(pause_leases, group=call_arguments.check_name, paused=flag),
    "group_leases": operation(group_leases, group=call_arguments.check_name),
}
