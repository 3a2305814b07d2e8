"""Operations on half messages: prepare, commit or roll back, and ask which ones their producers must be asked about."""

from __future__ import annotations

from base64 import b64encode

from raymq.actors.api.call_arguments import check_name, wrong_value
from raymq.actors.api.operations import choice, integer, operation, optional
from raymq.store.base import format as fmt
from raymq.store.base.errors import Rejected
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records.requests import AppendedRows
from raymq.store.services.half_messages import HalfEnd, HalfMessages

from . import message_arguments
from .message_arguments import check_as_put
from .scope import LeaderScope, check_queue, topic_of

#: producer groups of one call
GROUPS_MAX = 1_000
#: half messages of one answer
HALVES_MAX = 256


def prepare_half(
    leader: LeaderScope,
    topic: str,
    queue_id: int,
    group: str,
    body: bytes,
    properties: dict[str, str],
    born_time_ms: int,
    flag: int | None = None,
    sys_flag: int | None = None,
    born_host: tuple[str, int] | None = None,
) -> dict[str, object]:
    """Store a message that consumers see when it is committed.

    Args: `group`: the producer group. `body`: in base64. `sys_flag`: the bits that a sender sets. `born_host`: address
    and port; without it the shard's own. A request with the UNIQ_KEY of an open half message of the group is that
    request again.
    Returns: the offset of the half message, its place in the log, and its names.
    """
    fmt.check_group_name(group)
    check_queue(leader, topic_of(leader, topic), queue_id)
    check_as_put(leader, topic, body, properties)
    message = InnerMessage(
        topic,
        queue_id,
        body,
        properties,
        flag=flag or 0,
        sys_flag=sys_flag or 0,
        born_time_ms=born_time_ms,
        born_host=born_host,
    )

    half = _halves(leader).prepare(message, group)
    leader.await_promise(AppendedRows.up_to(half.end_offset))
    host, port = leader.store.log.store_host
    return {
        "offset": half.offset,
        "physical_offset": half.physical_offset,
        "transaction_id": half.transaction_id,
        "message_id": fmt.offset_message_id(host, port, half.physical_offset),
        "topic": half.topic,
        "queue_id": half.queue_id,
        "is_repeated": half.is_repeated,
    }


def end_half(
    leader: LeaderScope,
    offset: int,
    group: str,
    decision: str,
    physical_offset: int | None = None,
) -> dict[str, object]:
    """Commit or roll back a half message, once.

    Args: `group`: the producer group that has prepared it. `decision`: with "unknown" it stays as it is.
    `physical_offset`: if given, where its record must be.
    Returns: what counts, whether an earlier call has decided so, and the queue into which this call has put the
    message. Raises: Rejected if the other decision counts.
    """
    halves = _halves(leader)
    # The half message may be confirmed, and not dispatched yet.
    leader.await_dispatch()

    try:
        ended = halves.end(offset, group, HalfEnd(decision), physical_offset=physical_offset)
    except Rejected:
        _await_state(leader)
        raise
    if decision == HalfEnd.UNKNOWN.value:
        _await_state(leader)
    else:
        leader.await_promise(AppendedRows.up_to(ended.end_offset))

    return {
        "outcome": ended.resolution.name.lower(),
        "is_repeated": ended.is_repeated,
        "topic": ended.topic,
        "queue_id": ended.queue_id,
    }


def halves_to_check(leader: LeaderScope, groups: list[str], max_records: int) -> dict[str, object]:
    """Half messages whose producers must be asked: the caller asks a producer of the group, and then ends them.

    Each is handed to one caller, and again after 30 s if it is still open. After 15 times it is discarded.
    Returns: of each its offset, how often it was handed out, and its record in base64; and in how many ms the next one
    is due.
    """
    for group in groups:
        fmt.check_group_name(group)
    halves = _halves(leader)
    # One that is confirmed and not dispatched could not be read.
    leader.await_dispatch()
    handed = halves.hand_out(groups, max_records)
    if handed.has_put:
        _await_all(leader)
    found = [
        {"offset": half.offset, "checks": half.checks, "record": b64encode(half.record).decode()}
        for half in handed.halves
    ]
    return {"halves": found, "next_ms": handed.next_ms}


def _halves(leader: LeaderScope) -> HalfMessages:
    leader.check_serving()
    return leader.transactions.loaded()


def _await_state(leader: LeaderScope) -> None:
    """Wait until all that this leader knows is confirmed, and it is known that no newer one knows more."""
    leader.await_check()
    _await_all(leader)


def _await_all(leader: LeaderScope) -> None:
    leader.await_promise(AppendedRows.up_to(leader.store.log.end))


# --- arguments ------------------------------------------------------------------------------------


def _groups(field: str, value: object) -> list[str]:
    if type(value) is not list or not 1 <= len(value) <= GROUPS_MAX:
        advice = f"give a list of 1 to {GROUPS_MAX} producer groups"
        raise wrong_value(field, value, advice, GROUPS_MAX)
    return [check_name(field, each) for each in value]


OPERATIONS = {
    "prepare_half": operation(
        prepare_half,
        topic=check_name,
        queue_id=integer(),
        group=check_name,
        body=message_arguments.check_body,
        properties=message_arguments.check_properties,
        born_time_ms=integer(),
        flag=optional(integer(-(2**31), 2**31 - 1)),
        sys_flag=optional(message_arguments.check_sys_flag),
        born_host=optional(message_arguments.check_host),
    ),
    "end_half": operation(
        end_half,
        offset=integer(),
        group=check_name,
        decision=choice(*(each.value for each in HalfEnd)),
        physical_offset=optional(integer()),
    ),
    "halves_to_check": operation(
        halves_to_check, groups=_groups, max_records=integer(1, HALVES_MAX)
    ),
}
