"""A heartbeat of a group's member and its answer: what they say, and their form as JSON.

Both hold whole states, never changes. So one that is lost, that comes twice or late does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raymq.store.state.topics import QueueKey

from .members import MemberFacts, TopicSubscription, grants_value, read_grants

#: earlier ids that a process names when it joins again, the newest last
REPLACES_MAX = 8


class JoinRequest(NamedTuple):
    """What a member says with its first heartbeat, and when its subscription changes."""

    facts: MemberFacts
    #: stream or workers
    kind: str = "stream"
    #: kind and expression of the filter of all its topics; both empty: all messages
    filter_kind: str = ""
    expression: str = ""
    #: it was a member, and was removed: a newer process of its instance keeps its place
    is_again: bool = False
    #: earlier member ids of this process, at most `REPLACES_MAX`. They may still be members, and are no newer process
    #: of its instance
    replaces: tuple[str, ...] = ()


class Beat(NamedTuple):
    """A heartbeat: join, liveness, release and question for the assignment. It holds the member's whole state."""

    member_id: str
    #: the newest assignment that the member has applied; 0: none yet
    version: int = 0
    #: the queues that it has, with their numbers; None: those of that assignment
    owned: Mapping[QueueKey, int] | None = None
    join: JoinRequest | None = None
    #: it has dropped everything
    is_leaving: bool = False
    #: it has stopped reading, and its queues shall wait for the next process of its instance
    keeps_place: bool = False


class BeatAnswer(NamedTuple):
    """The answer to a heartbeat."""

    #: of the member's assignment
    version: int
    #: the queues that it shall have, with their numbers; None: it has applied that version
    assignment: Mapping[QueueKey, int] | None
    #: when to send the next heartbeat
    interval_ms: int
    #: for how long the answer lets the member believe to have its queues, counted from the heartbeat; 0: for no longer
    #: than it does
    session_timeout_ms: int
    #: a newer process of its instance has joined: it releases its queues and ends
    is_replaced: bool = False
    #: an operator has paused the group: its members keep their queues, and return nothing
    is_paused: bool = False


def pack_beat(group: str, beat: Beat) -> dict[str, Any]:
    """A heartbeat as JSON takes it. What says nothing is left out."""
    fields: dict[str, Any] = {"group": group, "member": beat.member_id}
    if beat.version:
        fields["version"] = beat.version
    if beat.owned is not None:
        fields["owned"] = grants_value(beat.owned)
    if beat.join is not None:
        facts = beat.join.facts
        fields["join"] = {
            "topics": list(facts.subscription.topics),
            "pattern": facts.subscription.pattern,
            "instance": facts.instance_id,
            "client": facts.client,
            "session_ms": facts.session_timeout_ms,
            "revoke_ms": facts.revoke_timeout_ms,
            "kind": beat.join.kind,
            "filter": [beat.join.filter_kind, beat.join.expression],
            "again": beat.join.is_again,
        }
        if beat.join.replaces:
            fields["join"]["replaces"] = list(beat.join.replaces)

    if beat.is_leaving:
        fields["leaving"] = True
    if beat.keeps_place:
        fields["keeps_place"] = True
    return fields


def unpack_beat(fields: Mapping[str, Any]) -> Beat:
    """The inverse of `pack_beat`, for fields that were checked. The group is not in it."""
    join, owned = fields.get("join"), fields.get("owned")
    if join is not None:
        facts = MemberFacts(
            TopicSubscription(tuple(sorted(set(join["topics"]))), join["pattern"]),
            join["instance"],
            join["client"],
            join["session_ms"],
            join["revoke_ms"],
        )
        filter_kind, expression = join["filter"]
        replaces = tuple(join.get("replaces", ()))
        join = JoinRequest(facts, join["kind"], filter_kind, expression, join["again"], replaces)

    return Beat(
        fields["member"],
        fields.get("version", 0),
        None if owned is None else read_grants(owned),
        join,
        fields.get("leaving", False),
        fields.get("keeps_place", False),
    )


def pack_answer(answer: BeatAnswer) -> dict[str, Any]:
    """An answer as JSON takes it."""
    fields: dict[str, Any] = {
        "version": answer.version,
        "interval_ms": answer.interval_ms,
        "session_ms": answer.session_timeout_ms,
    }
    if answer.assignment is not None:
        fields["assignment"] = grants_value(answer.assignment)
    if answer.is_replaced:
        fields["replaced"] = True
    if answer.is_paused:
        fields["paused"] = True
    return fields


def unpack_answer(fields: Mapping[str, Any]) -> BeatAnswer:
    """The inverse of `pack_answer`."""
    assignment = fields.get("assignment")
    return BeatAnswer(
        int(fields["version"]),
        None if assignment is None else read_grants(assignment),
        int(fields["interval_ms"]),
        int(fields["session_ms"]),
        bool(fields.get("replaced")),
        bool(fields.get("paused")),
    )
