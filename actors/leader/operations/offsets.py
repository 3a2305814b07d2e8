"""Operations on the offsets of consumer groups, and on messages that a group sends back."""

from __future__ import annotations

from raymq.actors.api import call_arguments
from raymq.actors.api.group_arguments import check_clients
from raymq.actors.api.operations import integer, integers, operation, optional, unnamed
from raymq.store.base.format import check_group_name
from raymq.store.groups.claims import Commit
from raymq.store.services.retry import send_back as put_back
from raymq.store.state.topics import QUEUES_MAX, RETRY_MAX_TIMES

from .groups import fenced_queues
from .scope import LeaderScope, check_commit, check_queue, shard_of, topic_of


def commit_offsets(
    leader: LeaderScope,
    group: str,
    topic: str,
    offsets: dict[int, int],
    numbers: dict[int, int] | None = None,
    seeks: list[int] | None = None,
    clients: dict[int, str | None] | None = None,
) -> dict[str, object]:
    """Store the offsets at which a group goes on.

    Args: `numbers`: of a member, those of its grants. Without them no member may have any of the queues. `seeks`: the
    queues whose offset may be lower than before. `clients`: queue -> the client of RocketMQ that commits, which may
    have locked it, or None: an operator.
    Returns: with `numbers` or `clients`, the queues that another claim has, as "fenced". The offsets of the others are
    stored.
    """
    leader.check_serving()
    check_group_name(group)
    info = topic_of(leader, topic)
    check_commit(leader, info, offsets)
    if numbers is None:
        refused = leader.claims.commit_unclaimed(group, topic, offsets, clients)
        return {} if clients is None else {"fenced": fenced_queues(refused)}

    commits = {
        queue_id: Commit(numbers.get(queue_id, 0), offset, queue_id in (seeks or ()))
        for queue_id, offset in offsets.items()
    }
    return {"fenced": fenced_queues(leader.claims.commit(group, topic, commits))}


def offsets(leader: LeaderScope, group: str, topic: str) -> dict[str, object]:
    """The offsets at which a group goes on."""
    topic_of(leader, topic)
    # Another replica may lead already, and have newer commits.
    leader.await_check()
    # After a failover, commits that the leader before acknowledged may not be confirmed here yet.
    leader.await_dispatch()
    table = leader.store.state.confirmed_offsets(group, topic, leader.visible_end)
    return {str(queue_id): offset for queue_id, offset in table.items()}


def send_back(
    leader: LeaderScope,
    group: str,
    topic: str,
    queue_id: int,
    offset: int,
    delay_level: int,
    max_reconsume_times: int | None = None,
) -> dict[str, object]:
    """Let a group get a message again later. Returns: the topic in which it will be.

    Args: `max_reconsume_times`: after so many times it goes to the dead letter topic (16).
    """
    leader.check_serving()
    check_queue(leader, topic_of(leader, topic), queue_id)
    target, appended = put_back(
        leader.store,
        group,
        topic,
        queue_id,
        offset,
        delay_level=delay_level,
        most=RETRY_MAX_TIMES if max_reconsume_times is None else max_reconsume_times,
        shard=shard_of(leader),
    )
    leader.await_promise(appended)
    return {"topic": target}


_OF_GROUP = {"group": call_arguments.check_name, "topic": call_arguments.check_name}

OPERATIONS = {
    "commit_offsets": operation(
        commit_offsets,
        **_OF_GROUP,
        offsets=unnamed(call_arguments.check_offsets),
        numbers=optional(lambda field, value: call_arguments.check_offsets(value, 1)),
        seeks=optional(integers(integer(), most=QUEUES_MAX)),
        clients=optional(unnamed(check_clients)),
    ),
    "offsets": operation(offsets, **_OF_GROUP),
    "send_back": operation(
        send_back,
        **_OF_GROUP,
        queue_id=integer(),
        offset=integer(),
        delay_level=integer(-(2**31), 2**31 - 1),
        max_reconsume_times=optional(integer(0, 2**31 - 1)),
    ),
}
