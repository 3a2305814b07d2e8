"""Operations on topics and their queues."""

from __future__ import annotations

from raymq.actors.api import call_arguments
from raymq.actors.api.operations import (
    Argument,
    flag,
    integer,
    integers,
    operation,
    optional,
    unnamed,
)
from raymq.store.base.errors import TopicDeleted, TopicOnOtherShards
from raymq.store.records.requests import AppendedRows
from raymq.store.state.features import DELETED_TOPICS_LEVEL
from raymq.store.state.topics import QUEUES_MAX, unknown_topic

from .scope import LeaderScope, joined_shards, known_shards, shard_of, topic_of


def create_topic(
    leader: LeaderScope,
    name: str,
    queues: int,
    shards: list[int],
    attributes: dict[str, str] | None = None,
    on_all: bool = False,
    former_queues: list[int] | None = None,
    hidden_queues: int = 0,
    generation: int | None = None,
) -> dict[str, object]:
    """Create a topic.

    Args: `on_all`: a new one must be on all shards. `former_queues`, `hidden_queues`: of a topic that has got
    queues on other shards. `generation`: how often topics of this name were deleted elsewhere: this shard first does
    what it has missed. Raises: Rejected naming the shards, for a caller that is older; TopicDeleted for one that began
    before the name was deleted here.
    """
    leader.check_serving()
    here = leader.store.state.generation(name)
    if generation is not None and generation < here:
        raise TopicDeleted(
            f"topic {name} was deleted while it was created; create it again",
            field="topic",
            limit=here,
            found=generation,
        )
    if generation:
        _delete(leader, name, generation)
    joined = list(range(joined_shards(leader)))
    if on_all and name not in leader.store.state.topics and shards != joined:
        raise TopicOnOtherShards(
            f"a new topic is on the shards {joined} now",
            field="shards",
            limit=joined,
            shards=joined,
            found=call_arguments.shown(shards),
        )

    appended = leader.store.topics.create(
        name,
        queues,
        call_arguments.check_shards(shards, known_shards(leader)),
        attributes,
        former_queues=_below(former_queues or [], queues),
        hidden_queues=call_arguments.check_integer("hidden_queues", hidden_queues, 0, queues - 1),
    )
    created = _await_topic(leader, name, appended)
    answer: dict[str, object] = {"created": created, "shards": joined_shards(leader)}
    generation = leader.store.state.generation(name)
    return {**answer, "generation": generation} if generation else answer


def delete_topic(leader: LeaderScope, name: str, generation: int = 0) -> dict[str, object]:
    """Delete a topic on this shard, with the offsets of all groups.

    Args: `generation`: how often topics of this name were deleted on the shard that was asked first; 0: this is the
    first one, and deletes the topic that exists. Returns: also that number.
    """
    leader.check_serving()
    topics = leader.store.state.topics
    if not generation and name not in topics and leader.store.state.generation(name):
        # Repeated, perhaps for the other shards.
        appended = None
    else:
        appended = _delete(leader, name, generation or None)
    deleted = _await_topic(leader, name, appended)
    return {
        "deleted": deleted,
        "generation": leader.store.state.generation(name),
        "shards": joined_shards(leader),
    }


def _delete(leader: LeaderScope, name: str, generation: int | None) -> AppendedRows | None:
    if generation is None and name not in leader.store.state.topics:
        # Before the level, which older versions cannot read.
        raise unknown_topic(name)
    leader.store.note_feature_level(DELETED_TOPICS_LEVEL)
    return leader.store.topics.delete(name, generation)


def add_queues(
    leader: LeaderScope,
    name: str,
    queues: int,
    shards: list[int],
    are_hidden: bool,
    former_queues: list[int] | None = None,
    hidden_queues: int | None = None,
) -> dict[str, object]:
    """Give a topic more queues: first hidden ones on all shards, then shown ones.

    Args: `former_queues`, `hidden_queues`: of other shards, for one that has missed an addition.
    """
    leader.check_serving()
    copied = None
    if former_queues is not None and hidden_queues is not None:
        call_arguments.check_integer("hidden_queues", hidden_queues, 0, queues - 1)
        copied = _below(former_queues, queues), hidden_queues

    appended = leader.store.topics.add_queues(
        name,
        queues,
        call_arguments.check_shards(shards, known_shards(leader)),
        are_hidden=are_hidden,
        copied=copied,
    )
    return {"added": _await_topic(leader, name, appended), "shards": joined_shards(leader)}


def set_schema(leader: LeaderScope, name: str, schema: str) -> dict[str, object]:
    """Give a topic a schema that has more columns than the present one."""
    leader.check_serving()
    appended = leader.store.topics.set_schema(name, schema)
    return {"changed": _await_topic(leader, name, appended), "shards": joined_shards(leader)}


def _below(former_queues: list[int], queues: int) -> tuple[int, ...]:
    """Former numbers of queues of a topic that has `queues` now. Raises: Rejected."""
    return tuple(
        call_arguments.check_integer("former_queues", each, 1, queues) for each in former_queues
    )


def _await_topic(leader: LeaderScope, name: str, appended: AppendedRows | None) -> bool:
    """Wait until the record of a topic is confirmed. Returns: whether it is new.

    The caller reads how many shards have joined after that: `note_shards` has returned this topic, or its number is in
    the answer.
    """
    # The record of a topic that exists may still wait for its flush, or for a follower that is away.
    end = leader.store.topics.end_of(name)
    leader.await_promise(appended or AppendedRows.up_to(end))
    return appended is not None


def queue_ranges(leader: LeaderScope, topic: str) -> dict[str, object]:
    """The first offset of each queue of this shard, and the offset after its last one."""
    info = topic_of(leader, topic)
    leader.await_check()
    leader.await_dispatch()
    shard = shard_of(leader)
    return {
        str(queue_id): list(leader.store.queue_range(topic, queue_id))
        for queue_id in range(info.queues)
        if info.shard_of(queue_id) == shard
    }


_NAME = Argument(call_arguments.check_name, field="topic")
_QUEUES = integer(1, QUEUES_MAX)
_SHARDS = unnamed(lambda value: call_arguments.check_shards(value, call_arguments.SHARDS_MAX))
_FORMER_QUEUES = optional(integers(_QUEUES, most=QUEUES_MAX))

OPERATIONS = {
    "create_topic": operation(
        create_topic,
        name=_NAME,
        queues=_QUEUES,
        shards=_SHARDS,
        attributes=optional(unnamed(call_arguments.check_attributes)),
        on_all=Argument(flag, is_optional=True),
        former_queues=_FORMER_QUEUES,
        hidden_queues=Argument(integer(0, QUEUES_MAX), is_optional=True),
        generation=Argument(integer(), is_optional=True),
    ),
    "delete_topic": operation(
        delete_topic, name=_NAME, generation=Argument(integer(), is_optional=True)
    ),
    "add_queues": operation(
        add_queues,
        name=_NAME,
        queues=_QUEUES,
        shards=_SHARDS,
        are_hidden=flag,
        former_queues=_FORMER_QUEUES,
        hidden_queues=optional(integer(0, QUEUES_MAX)),
    ),
    "set_schema": operation(set_schema, name=_NAME, schema=call_arguments.check_name),
    "queue_ranges": operation(queue_ranges, topic=call_arguments.check_name),
}
