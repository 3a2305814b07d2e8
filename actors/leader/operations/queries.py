"""Operations that look for messages: by time."""

from __future__ import annotations

from functools import partial

from raymq.actors.api import call_arguments
from raymq.actors.api.operations import choice, operation, unnamed
from raymq.store.index.query import Boundary

from .scope import LeaderScope, check_queue, topic_of

#: what a caller says -> the boundary
BOUNDARIES = {"first": Boundary.LOWER, "last": Boundary.UPPER}


def offsets_by_time(
    leader: LeaderScope, topic: str, times: dict[int, int], boundary: str
) -> dict[str, object]:
    """The offset that a store time is mapped to, of each of these queues of this shard."""
    info = topic_of(leader, topic)
    for queue_id in times:
        check_queue(leader, info, queue_id)
    # The queues of a newer leader may end later.
    leader.await_check()
    leader.await_dispatch()
    return {
        str(queue_id): leader.store.offset_by_time(topic, queue_id, time_ms, BOUNDARIES[boundary])
        for queue_id, time_ms in times.items()
    }


OPERATIONS = {
    "offsets_by_time": operation(
        offsets_by_time,
        topic=call_arguments.check_name,
        times=unnamed(partial(call_arguments.check_offsets, field="times")),
        boundary=choice(*BOUNDARIES),
    ),
}
