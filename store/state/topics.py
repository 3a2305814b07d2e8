"""Names of topics, and the checks of a topic that a user creates or puts to."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace

from raymq.store.base import format as fmt
from raymq.store.base.errors import (
    Rejected,
    TopicDeleted,
    TopicMissing,
    TopicOnOtherShards,
    TopicWithOtherQueues,
    Unavailable,
)
from raymq.store.base.format import DLQ_PREFIX, RETRY_PREFIX

from .shard_state import CLEANUP_POLICY, COMPACTION, DELETE, ShardState, TopicInfo
from .topic_schema import ALLOWED, NULL_VALUES, SCHEMA, check_schema, extends

#: the first part of the names of internal topics, both RocketMQ's (TopicValidator.SYSTEM_TOPIC_PREFIX) and RayMQ's
SYSTEM_PREFIX = "rmq_sys_"
QUEUES_MAX = 65_536
#: deliveries before a message goes to the dead letter queue (SubscriptionGroupConfig.retryMaxTimes)
RETRY_MAX_TIMES = 16

#: the first part of the names of groups that put dead letters back
REDRIVE_PREFIX = "%REDRIVE%"

#: topic attributes with one of few values
_ATTRIBUTES = (
    (CLEANUP_POLICY, COMPACTION),
    (CLEANUP_POLICY, DELETE),
    (NULL_VALUES, ALLOWED),
)

#: topic and queue id
QueueKey = tuple[str, int]


def retry_topic(group: str) -> str:
    """The topic of a group's messages that are delivered again."""
    return RETRY_PREFIX + group


def redrive_group(group: str) -> str:
    """The group that leases a group's dead letters, to put them back."""
    return REDRIVE_PREFIX + group


def dlq_topic(group: str) -> str:
    """The topic of messages that a group could not handle."""
    return DLQ_PREFIX + group


def check_new_topic(
    name: str,
    queues: int,
    shards: tuple[int, ...],
    known: Mapping[str, TopicInfo],
    attributes: Mapping[str, str] | None = None,
) -> TopicInfo | None:
    """The topic to create; None if the same topic exists already.

    Raises: Rejected for a bad name, number or attribute, or if it exists with other attributes; TopicWithOtherQueues
    and TopicOnOtherShards if it exists with those.
    """
    fmt.check_topic_name(name)
    refuse_system_topic(name)

    # The type must be int exactly: True and 1.5 come from mistakes.
    if type(queues) is not int or not 1 <= queues <= QUEUES_MAX:
        fault = f"{queues!r} queues: a topic has 1 to {QUEUES_MAX}"
        raise Rejected(fault, field="queues", limit=f"1..{QUEUES_MAX}")

    info = TopicInfo(name, queues, shards, _checked_attributes(attributes or {}))
    have = known.get(name)
    if have is not None:
        # A program that creates its topics whenever it starts need not know that one has more queues or columns by now.
        grown = replace(info, attributes=have.attributes) if _has_grown(info, have) else info
        if replace(have, former_queues=(), hidden_queues=0) == grown:
            return None
        if queues in have.former_queues and have.attributes == grown.attributes:
            return None
        raise _difference(have, info, grown)

    return info


def _difference(have: TopicInfo, info: TopicInfo, grown: TopicInfo) -> Rejected:
    """The refusal of a topic that exists otherwise. Args: `grown`: the new one with all columns of the present one."""
    fault = (
        f"topic {have.name} exists with {have.queues} queues on shards {list(have.shards)} and "
        f"{dict(have.attributes) or 'no'} attributes, which stay: use it as it is, or another name"
    )
    if have.queues != info.queues:
        queues = have.queues
        return TopicWithOtherQueues(fault, field="queues", limit=queues, queues=queues)
    if have.attributes == grown.attributes:
        shards = list(have.shards)
        return TopicOnOtherShards(fault, field="shards", limit=shards, shards=shards)
    if have.schema == info.schema:
        return Rejected(fault, field="attributes", limit=have.attributes)
    advice = "" if have.schema is None else "; `add_column` adds a column"
    return Rejected(fault + advice, field="schema", limit=have.schema)


def _has_grown(info: TopicInfo, have: TopicInfo) -> bool:
    """Whether a topic has the schema of `info` and more columns, and is else the same."""
    if info.schema is None or have.schema is None:
        return False
    others = [
        {key: value for key, value in each.attributes if key != SCHEMA} for each in (info, have)
    ]
    return others[0] == others[1] and extends(json.loads(have.schema), json.loads(info.schema))


def check_new_schema(name: str, text: str, known: Mapping[str, TopicInfo]) -> TopicInfo | None:
    """The topic with another schema; None if it has that already.

    Raises: Rejected unless the schema is the present one with more nullable columns at its end.
    """
    have = known.get(name)
    if have is None:
        fault = f"topic {name} does not exist; create it with its schema"
        raise Rejected(fault, field="topic", limit="an existing topic")
    if have.schema is None:
        fault = f"topic {name} has no schema, and gets none: its messages may be anything. Create another topic"
        raise Rejected(fault, field="schema", limit="a topic with a schema")

    new, old = check_schema(text), json.loads(have.schema)
    if new == old:
        return None
    if not extends(new, old):
        raise Rejected(
            f"the schema of topic {name} may only get nullable columns at its end; its columns are "
            f"{[each['name'] for each in old]}, not {[each['name'] for each in new]}",
            field="schema",
            limit=old,
        )
    return replace(have, attributes=tuple(sorted({**dict(have.attributes), SCHEMA: text}.items())))


def check_more_queues(
    name: str,
    queues: int,
    shards: tuple[int, ...],
    known: Mapping[str, TopicInfo],
    *,
    are_hidden: bool,
) -> TopicInfo | None:
    """The topic with more queues; None if it is so already.

    Args: `shards`: as in TopicInfo, for all queues. `are_hidden`: clients do not hear of the added queues yet.
    Raises: Rejected for a topic that cannot get them, and if an old queue would be on another shard.
    """
    have = known.get(name)
    if have is None:
        fault = f"topic {name} does not exist; create it with as many queues as it needs"
        raise Rejected(fault, field="topic", limit="an existing topic")
    refuse_system_topic(name)
    if have.compacted:
        raise Rejected(
            f"topic {name} is compacted: the last message of a key that moved to an added queue would stay in the old "
            "one, too. Copy the topic to another one with more queues",
            field="topic",
            limit="a topic that is not compacted",
        )
    if not have.queues <= queues <= QUEUES_MAX:
        raise Rejected(
            f"topic {name} has {have.queues} queues, {have.hidden_queues} of them not shown to clients yet: name that "
            f"number, or a greater one up to {QUEUES_MAX}",
            field="queues",
            limit=f"{have.queues}..{QUEUES_MAX}",
            found=queues,
        )

    found = replace(have, queues=queues, shards=shards)
    moved = [each for each in range(have.queues) if found.shard_of(each) != have.shard_of(each)]
    if moved:
        raise Rejected(
            f"queue {moved[0]} of topic {name} would move from shard {have.shard_of(moved[0])} to shard "
            f"{found.shard_of(moved[0])}: queues stay where they are",
            field="shards",
            limit=list(have.shards),
        )
    visible = have.queues - have.hidden_queues
    former = have.former_queues
    if queues > visible and visible not in former:
        former = (*former, visible)
    hidden = queues - visible if are_hidden else 0
    found = replace(found, former_queues=former, hidden_queues=hidden)
    return None if found == have else found


def _checked_attributes(attributes: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    for name, value in attributes.items():
        if name == SCHEMA:
            check_schema(value)
        elif (name, value) not in _ATTRIBUTES:
            allowed = ", ".join(f"{key}={text}" for key, text in _ATTRIBUTES)
            raise Rejected(
                f"topic attribute {name}={value} is not known; there are {allowed} and {SCHEMA}",
                field="attributes",
                limit=allowed,
                found=f"{name}={value}",
            )
    return tuple(sorted(attributes.items()))


def check_target(topic: str, queue_id: int, known: Mapping[str, TopicInfo]) -> None:
    """Refuse a put to a queue that does not exist, or to a topic that is not for users. Raises: Rejected."""
    info = known.get(topic)
    if info is None:
        refuse_system_topic(topic)
        fmt.check_topic_name(topic)
        raise unknown_topic(topic)
    if not 0 <= queue_id < info.queues:
        raise Rejected(
            f"queue {queue_id} of topic {topic} does not exist; it has queues 0 to {info.queues - 1}",
            field="queue_id",
            limit=info.queues - 1,
        )


def unknown_topic(topic: str) -> TopicMissing:
    """The refusal of a topic that does not exist."""
    fault = (
        f"topic {topic} does not exist; create it first (`raymq topic create {shlex.quote(topic)}`)"
    )
    return TopicMissing(fault, field="topic", limit="an existing topic")


def deleted_topic_error(state: ShardState, topic: str, generation: int) -> TopicDeleted | None:
    """Why a reader of a topic gets nothing: its topic was deleted. None: it was not.

    Args: `generation`: how often topics of this name had been deleted when the reader began.
    Raises: Unavailable if the last deletion is not known here yet.
    """
    here = state.generation(topic)
    if generation > here:
        raise Unavailable(
            f"this shard does not know yet that topic {topic} was deleted and made again; ask again",
            field="topic",
            limit=here,
            found=generation,
        )
    if generation == here and (not here or topic in state.topics):
        return None
    again = ", and another one of its name was made" if topic in state.topics else ""
    fault = f"topic {topic} was deleted{again}: make another consumer to read what there is now"
    return TopicDeleted(fault, field="topic", limit="a topic that exists", found=topic)


def is_system_topic(name: str) -> bool:
    """Whether a topic is not for users: a broker makes it itself, with as many queues as it wants."""
    is_reserved = name in fmt.SYSTEM_TOPICS and name != fmt.TRACE_TOPIC
    return is_reserved or name.startswith(SYSTEM_PREFIX)


def refuse_system_topic(name: str) -> None:
    """Refuse a topic that is not for users. Raises: Rejected."""
    if is_system_topic(name):
        fault = f"topic {name} is a system topic; choose another name"
        raise Rejected(fault, field="topic", limit="not a system topic")
