"""What a consumer group and its members are, and the values of their records.

A record holds a whole value, never a change: applied twice, it changes nothing. The values are JSON objects, so that
`raymq store dump` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from raymq.store.state.topics import QueueKey, is_system_topic

#: kind of the record that describes a group: its kind, filters, options; or that it is deleted
GROUP = "GROUP"
#: kind of the record of one step of a group: the whole value of each member that changed, and the members that left
MEMBER = "MEMBER"
#: kind of the record that gives queues of this shard to a member
CLAIM = "CLAIM"
#: kind that transactions will need. Nothing writes it yet
RESERVED_KINDS = ("PEND",)

#: ids of former members that a group remembers
FORMER_MAX = 64

#: about how many bytes one record has at most, unless a single member needs more: files of the log may be small. A
#: step with more has several records: each holds whole members, so that a crash between them leaves a state in which
#: the step goes on
RECORD_BYTES_MAX = 100_000
#: of a member without topics and grants, and of a grant
_MEMBER_BYTES, _GRANT_BYTES = 130, 15


#: topics of a member
TOPICS_MAX = 1_000


class TopicSubscription(NamedTuple):
    """What a member wants to read."""

    #: names of topics, ascending, without repetition. Empty with a pattern
    topics: tuple[str, ...] = ()
    #: a pattern of names with `*`; empty: the names count
    pattern: str = ""


def matches(topic: str, pattern: str) -> bool:
    """Whether a topic is one of a pattern's. Topics of messages that were sent back must be named with their `%`."""
    if is_system_topic(topic) or (topic.startswith("%") and not pattern.startswith("%")):
        return False
    return _fits(topic, _parts(pattern))


def shared_topic(one: TopicSubscription, other: TopicSubscription) -> str | None:
    """A topic that both read, or a pattern whose topics both may read once they exist; None: there can be none."""
    if one.pattern and other.pattern:
        return one.pattern if _may_meet(one.pattern, other.pattern) else None
    for named, pattern in ((one.topics, other.pattern), (other.topics, one.pattern)):
        if pattern:
            return next((name for name in named if matches(name, pattern)), None)
    return min(set(one.topics) & set(other.topics), default=None)


def _may_meet(one: str, other: str) -> bool:
    """Whether a name can match both patterns. Their middle parts can follow each other, so that only the ends count."""
    if "*" not in one:
        return matches(one, other)
    if "*" not in other:
        return matches(other, one)
    if one.startswith("%") != other.startswith("%"):
        return False
    starts = sorted((_parts(one)[0], _parts(other)[0]), key=len)
    ends = sorted((_parts(one)[-1], _parts(other)[-1]), key=len)
    return starts[1].startswith(starts[0]) and ends[1].endswith(ends[0])


def _fits(topic: str, parts: Sequence[str]) -> bool:
    """Whether a name has these parts in this order, the first at its start and the last at its end.

    Each part is taken where it comes first. So the cost is linear: a regular expression would try all places, and a
    hostile pattern takes years then.
    """
    first, *between = parts
    if not between:
        return topic == first

    last = between.pop()
    at, end = len(first), len(topic) - len(last)
    if at > end or not topic.startswith(first) or not topic.endswith(last):
        return False
    for part in between:
        found = topic.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


@lru_cache(maxsize=256)
def _parts(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.split("*"))


class MemberFacts(NamedTuple):
    """What a member says of itself when it joins."""

    subscription: TopicSubscription
    #: a name that outlives the process; empty: it has none (KIP-345, static membership)
    instance_id: str = ""
    #: where it runs, for people
    client: str = ""
    #: without a heartbeat for so long, the member may be removed
    session_timeout_ms: int = 15_000
    #: how long it may keep a queue that it shall release. Its heartbeats count no more then, so that its session ends
    revoke_timeout_ms: int = 10_000


class MemberState(NamedTuple):
    """The whole value of a member. Its mappings are replaced and never changed."""

    facts: MemberFacts
    #: the number of its newest assignment
    version: int
    #: queue -> the number of its grant
    grants: Mapping[QueueKey, int] = {}
    #: queue that it has to release -> the first version that leaves it out
    revoking: Mapping[QueueKey, int] = {}
    #: the instance has a newer process: this one gets nothing, and its session is not renewed
    is_replaced: bool = False
    #: it has stopped reading, and its place is kept until its session ends
    is_away: bool = False

    def assignment(self) -> dict[QueueKey, int]:
        """The queues that it shall have, with their numbers."""
        return {key: number for key, number in self.grants.items() if key not in self.revoking}


class Filter(NamedTuple):
    """Which messages of a topic the members of a group get. All members have the same filter."""

    #: a filter with a higher number is newer
    number: int
    #: TAG, SQL92; empty: all messages
    kind: str = ""
    expression: str = ""


class GroupFacts(NamedTuple):
    """What all members of a group have in common."""

    #: stream: each queue is read by one member. Workers share the messages of a queue
    kind: str = "stream"
    #: topic, or pattern of topics -> filter. Topics without an entry have no member yet, or only one with a pattern
    filters: Mapping[str, Filter] = {}
    #: its members get no messages until it is resumed
    is_paused: bool = False


class Group(NamedTuple):
    """The whole value of a group. Its mappings are replaced and never changed."""

    facts: GroupFacts = GroupFacts()
    #: member id -> member
    members: Mapping[str, MemberState] = {}
    #: ids of members with an instance that were removed, the newest last. A late copy of their join is refused, because
    #: it would replace the instance's newer process
    former: tuple[str, ...] = ()
    #: when its newest record was written, as far as the wall clock was believed then; 0: not known
    changed_ms: int = 0


# --- values of records ----------------------------------------------------------------------------


def group_value(name: str, facts: GroupFacts | None, number: int) -> dict[str, Any]:
    """The value of a GROUP record.

    Args: `facts`: None: the group is deleted. `number`: the highest number that was given so far.
    """
    value: dict[str, Any] = {"group": name, "number": number}
    if facts is None:
        return {**value, "deleted": True}
    filters = {topic: list(each) for topic, each in sorted(facts.filters.items())}
    return {**value, "kind": facts.kind, "filters": filters, "paused": facts.is_paused}


def dated(value: dict[str, Any], at_ms: int) -> dict[str, Any]:
    """The value of a GROUP or MEMBER record with the time at which it was written, which says how old a group is."""
    return {**value, "at": at_ms} if at_ms else value


def read_group(value: Mapping[str, Any]) -> GroupFacts | None:
    """The inverse of `group_value`."""
    if value.get("deleted"):
        return None
    filters = {topic: Filter(*each) for topic, each in value["filters"].items()}
    return GroupFacts(value["kind"], filters, bool(value["paused"]))


def members_values(
    name: str,
    members: Mapping[str, MemberState],
    gone: Iterable[str],
    number: int,
    former: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The values of the MEMBER records of one step of a group, in the order of the log.

    Args: `members`: those that changed, by id. `gone`: ids of those that left. `number`: the highest number that was
    given so far. `former`: as of `Group`; None: as before.
    """
    value: dict[str, Any] = {"group": name, "number": number}
    if former is not None:
        value["former"] = list(former)
    left = sorted(gone)
    if left:
        value["gone"] = left

    packed: dict[str, Any] = {}
    packed_bytes = 0
    for member_id, member in members.items():
        size = _size(member)
        if packed and packed_bytes + size > RECORD_BYTES_MAX:
            yield {**value, "members": packed}
            value, packed, packed_bytes = {"group": name, "number": number}, {}, 0
        packed[member_id] = _member(member)
        packed_bytes += size
    yield {**value, "members": packed} if packed else value


def _size(member: MemberState) -> int:
    """About how many bytes a member takes in a record."""
    facts = member.facts
    names = sum(len(topic) + 3 for topic in facts.subscription.topics)
    texts = len(facts.subscription.pattern) + len(facts.instance_id) + len(facts.client)
    grants = len(member.grants) + len(member.revoking)
    return _MEMBER_BYTES + names + texts + grants * _GRANT_BYTES


def _member(member: MemberState) -> dict[str, Any]:
    facts = member.facts
    value: dict[str, Any] = {
        "version": member.version,
        "topics": list(facts.subscription.topics),
        "session_ms": facts.session_timeout_ms,
        "revoke_ms": facts.revoke_timeout_ms,
    }
    texts = {
        "pattern": facts.subscription.pattern,
        "instance": facts.instance_id,
        "client": facts.client,
    }
    value |= {name: text for name, text in texts.items() if text}

    flags = {"replaced": member.is_replaced, "away": member.is_away}
    value |= {name: True for name, is_set in flags.items() if is_set}
    if member.grants:
        value["grants"] = grants_value(member.grants)
    if member.revoking:
        value["revoking"] = grants_value(member.revoking)
    return value


def read_members(value: Mapping[str, Any]) -> tuple[dict[str, MemberState], list[str]]:
    """The inverse of `members_values`. Returns: the members that changed, and the ids of those that left."""
    members = {
        member_id: _read_member(each) for member_id, each in value.get("members", {}).items()
    }
    return members, list(value.get("gone", ()))


def _read_member(value: Mapping[str, Any]) -> MemberState:
    facts = MemberFacts(
        TopicSubscription(tuple(value["topics"]), value.get("pattern", "")),
        value.get("instance", ""),
        value.get("client", ""),
        int(value["session_ms"]),
        int(value["revoke_ms"]),
    )
    return MemberState(
        facts,
        int(value["version"]),
        read_grants(value.get("grants", {})),
        read_grants(value.get("revoking", {})),
        bool(value.get("replaced")),
        bool(value.get("away")),
    )


def grants_value(numbers: Mapping[QueueKey, int]) -> dict[str, list[list[int]]]:
    """Numbers of queues as columns: topic -> [queue ids, numbers]."""
    columns: dict[str, list[list[int]]] = {}
    for (topic, queue_id), number in numbers.items():
        queues, found = columns.setdefault(topic, [[], []])
        queues.append(queue_id)
        found.append(number)
    return columns


def read_grants(columns: Mapping[str, list[list[int]]]) -> dict[QueueKey, int]:
    """The inverse of `grants_value`. Raises: ValueError for columns of unequal length."""
    return {
        (topic, int(queue_id)): int(number)
        for topic, (queues, numbers) in columns.items()
        for queue_id, number in zip(queues, numbers, strict=True)
    }
