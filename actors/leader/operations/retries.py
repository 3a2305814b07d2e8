"""The operation for a message that a client of RocketMQ puts into the retry topic of its group by itself."""

from __future__ import annotations

from raymq.actors.api.call_arguments import check_name
from raymq.actors.api.operations import integer, operation, optional
from raymq.store.base.format import check_group_name
from raymq.store.put.inner_message import InnerMessage
from raymq.store.services.retry import put_retry as put_again
from raymq.store.state.topics import RETRY_MAX_TIMES

from . import message_arguments
from .message_arguments import check_as_put
from .scope import LeaderScope, shard_of


def put_retry(
    leader: LeaderScope,
    group: str,
    body: bytes,
    properties: dict[str, str],
    born_time_ms: int,
    reconsume_times: int,
    max_reconsume_times: int | None = None,
    flag: int | None = None,
    sys_flag: int | None = None,
    born_host: tuple[str, int] | None = None,
) -> dict[str, object]:
    """Let a group get a message again that it could not handle, after the delay level of its properties.

    A call that is repeated because its outcome was unknown may deliver the message twice.
    Args: `body`: in base64. `reconsume_times`: how often the group has got it before. `max_reconsume_times`: if that is
    more (16), or while clients of RocketMQ have locked queues of the group to consume in order, it goes to the dead
    letter topic of the group.
    Returns: the topic in which it will be, where the record is now, and the message's id.
    """
    leader.check_serving()
    check_group_name(group)
    message = InnerMessage(
        "",
        0,
        body,
        properties,
        flag=flag or 0,
        sys_flag=sys_flag or 0,
        born_time_ms=born_time_ms,
        born_host=born_host,
        reconsume_times=reconsume_times,
    )

    most = RETRY_MAX_TIMES if max_reconsume_times is None else max_reconsume_times
    check_as_put(leader, "retry", body, properties)
    is_ordered = leader.claims.has_locks(group)
    shard = shard_of(leader)
    target, appended = put_again(
        leader.store, group, message, most, is_ordered=is_ordered, shard=shard
    )
    leader.await_promise(appended)
    return {
        "topic": target,
        "offset": appended.first_offset,
        "physical_offset": appended.physical_offset,
    }


OPERATIONS = {
    "put_retry": operation(
        put_retry,
        group=check_name,
        body=message_arguments.check_body,
        properties=message_arguments.check_properties,
        born_time_ms=integer(),
        reconsume_times=integer(0, 2**31 - 1),
        max_reconsume_times=optional(integer(0, 2**31 - 1)),
        flag=optional(integer(-(2**31), 2**31 - 1)),
        sys_flag=optional(message_arguments.check_sys_flag),
        born_host=optional(message_arguments.check_host),
    ),
}
