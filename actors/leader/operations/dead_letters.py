"""Operations on dead letters: which groups have some, what they say, and the way back."""

from __future__ import annotations

from typing import Any

from raymq.actors.api import call_arguments
from raymq.actors.api.leases import check_packed_offsets, check_session
from raymq.actors.api.operations import flag, integer, operation, optional
from raymq.actors.leader.dead_letters import DeadLetters
from raymq.store.base.errors import Rejected
from raymq.store.base.format import check_group_name
from raymq.store.groups.leases.offsets import OffsetColumn
from raymq.store.groups.leases.options import COPIES_MAX
from raymq.store.records.requests import MessageSelector
from raymq.store.state.topics import dlq_topic

from .scope import LeaderScope, check_queue, topic_of

#: dead letters of one answer
RECORDS_MAX = 1_000


def dead_letter_counts(leader: LeaderScope, group: str | None = None) -> dict[str, object]:
    """How many dead letters groups have on this shard, that were not put back.

    Args: `group`: only this one; without it all that have some. Returns: of each [count, store times of the oldest and
    the newest one in ms].
    """
    if group is not None:
        check_group_name(group)
    leader.await_check()
    leader.await_dispatch()
    return {"groups": {name: list(each) for name, each in _dead(leader).counts(group).items()}}


def dead_letters(
    leader: LeaderScope,
    group: str,
    begin: dict[int, int],
    max_records: int,
    with_records: bool,
    wanted: MessageSelector | None = None,
) -> dict[str, object]:
    """Dead letters of a group on this shard, that were not put back. One call looks at a part of each queue.

    Args: `begin`: queue of %DLQ%GROUP -> from which offset on; of the others from their first. `wanted`: only these.
    Returns: what was found, each as [queue, offset, record in base64]; where to go on, and whether there is more.
    """
    check_group_name(group)
    leader.await_check()
    leader.await_dispatch()
    return _dead(leader).read(group, begin, max_records, wanted, with_records=with_records)


def redrive(
    leader: LeaderScope,
    group: str,
    session: bytes,
    settle: int,
    offsets: dict[int, OffsetColumn],
    topic: str | None = None,
    trial: bool | None = None,
) -> dict[str, object]:
    """Put dead letters back to where they came from, each with its settlement: not lost, and not twice.

    Args: `settle`: number of the session's call, which a repeated one has, too: it puts nothing back again, and gets
    the same answer. `offsets`: queue of %DLQ%GROUP -> packed offsets, at most 64 in all. `topic`: they go there
    instead. `trial`: change nothing.
    Returns: topics, how many went where; and what stays, each as [queue, offset, settled | later | refused, text].
    """
    check_group_name(group)
    info = topic_of(leader, dlq_topic(group))
    for queue_id in offsets:
        check_queue(leader, info, queue_id)
    # Of a newer leader the queues may end later.
    leader.await_check()
    leader.await_dispatch()
    done = _dead(leader).redrive(group, session, settle, offsets, topic, is_trial=bool(trial))
    return {"topics": dict(done.topics), "stays": [list(each) for each in done.stays]}


def _dead(leader: LeaderScope) -> DeadLetters:
    return leader.leases.dead_letters


def _check_places(name: str, value: Any) -> dict[int, int]:
    """Queue -> offset; there may be none. Raises: Rejected for others."""
    return {} if value == {} else call_arguments.check_offsets(value, field=name)


def _check_columns(name: str, value: Any) -> dict[int, OffsetColumn]:
    """Queue -> packed offsets. Raises: Rejected for others, and for more than one call puts back."""
    if type(value) is not dict or not 1 <= len(value) <= COPIES_MAX:
        advice = f"give packed offsets for each of 1 to {COPIES_MAX} queues"
        raise call_arguments.wrong_value(name, value, advice, COPIES_MAX)
    places = call_arguments.check_offsets(dict.fromkeys(value, 0), field=name)
    found = {
        queue_id: check_packed_offsets(name, each)
        for queue_id, each in zip(places, value.values(), strict=True)
    }
    count = sum(len(each) for each in found.values())
    if not 1 <= count <= COPIES_MAX:
        raise Rejected(
            f"{name} has {count} offsets; one call puts 1 to {COPIES_MAX} dead letters back",
            field=name,
            limit=COPIES_MAX,
            found=count,
        )
    return found


OPERATIONS = {
    "dead_letter_counts": operation(dead_letter_counts, group=optional(call_arguments.check_name)),
    "dead_letters": operation(
        dead_letters,
        group=call_arguments.check_name,
        begin=_check_places,
        max_records=integer(1, RECORDS_MAX),
        with_records=flag,
        wanted=optional(lambda field, value: call_arguments.check_selector(value)),
    ),
    "redrive": operation(
        redrive,
        group=call_arguments.check_name,
        session=check_session,
        settle=integer(1),
        offsets=_check_columns,
        topic=optional(call_arguments.check_name),
        trial=optional(flag),
    ),
}
