"""The decisions on consumer groups: join, release, assignment, session, removal. A state machine without I/O.

A *step* of a group takes the heartbeats of some of its members. It plans the records that the log needs, and changes
nothing of the groups itself: the records do, once they are appended. The answers rest on these records, so they leave
when the records are confirmed. An answer that rests on no new record waits for a check that this replica still leads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raymq.store.base.errors import Fenced, InstanceReplaced, RayMQError, Rejected
from raymq.store.state.topics import QueueKey

from .foreign_members import ForeignMembers
from .group_table import GroupTable
from .heartbeat import Beat, BeatAnswer, JoinRequest
from .members import (
    FORMER_MAX,
    GROUP,
    MEMBER,
    TOPICS_MAX,
    Filter,
    Group,
    GroupFacts,
    MemberFacts,
    MemberState,
    TopicSubscription,
    group_value,
    matches,
    members_values,
    shared_topic,
)
from .target import AssignmentCandidate, target

#: members of a group
MEMBERS_MAX = 2_000
#: groups that one shard coordinates
GROUPS_MAX = 10_000
#: heartbeats in one session timeout
BEATS_IN_SESSION = 5
#: the longest time between two heartbeats: how soon a member hears that it has to release a queue
BEAT_INTERVAL_MS_MAX = 3_000
#: the longest time between two searches for sessions that are over
LOOK_AGAIN_MS_MAX = 60_000
#: a member that waits for a queue asks again after so long
WAITING_INTERVAL_MS = 300


@dataclass(slots=True)
class Session:
    """What a coordinator knows of a living member. No record has it: a new coordinator starts every session again."""

    #: the member may be removed then
    deadline_ms: int
    #: when the newest heartbeat came
    beat_ms: int
    #: the newest version that it has applied
    applied: int = 0
    #: the oldest version that leaves out a queue which it has not released; 0: there is none
    revoked_by: int = 0
    #: since when
    revoked_ms: int = 0
    #: another member has a queue that it shall have
    is_waiting: bool = False

    def note_revoked(self, member: MemberState, now_ms: int) -> None:
        """Note since when the member has kept the queue that it has kept for longest."""
        oldest = min(member.revoking.values(), default=0)
        if self.applied < oldest:
            # It has not heard of that yet. A silent member is removed when its session is over.
            oldest = 0
        if oldest != self.revoked_by:
            self.revoked_by, self.revoked_ms = oldest, now_ms

    def is_late(self, member: MemberState, now_ms: int) -> bool:
        """Whether it keeps a queue for too long. Its heartbeats count no more then, so that its session ends."""
        return bool(self.revoked_by) and now_ms - self.revoked_ms >= member.facts.revoke_timeout_ms


class _Target(NamedTuple):
    """Who shall have each queue of a group, as of the last change of its members, subscriptions or topics."""

    owners: Mapping[QueueKey, str]
    #: member id -> number of its queues
    shares: Mapping[str, int]


@dataclass(slots=True)
class LiveGroup:
    """What a coordinator knows of a group. No record has it: a new coordinator begins with nothing."""

    #: by member id
    sessions: dict[str, Session] = field(default_factory=dict)
    #: no session ends before; 0: not all members may have one
    look_ms: int = 0
    #: the topics for which its queues were assigned
    topics: Mapping[str, int] | None = None
    #: kept while queues have to be released. Until then no other queue moves
    target: _Target | None = None
    #: queue -> number: grants below it shall be released, and the queue granted again. A member of which a new
    #: coordinator does not know that hears of it with its next commit
    withdrawn: dict[QueueKey, int] = field(default_factory=dict)


class GroupStep(NamedTuple):
    """The plan of one step of a group."""

    name: str
    beats: Sequence[Beat]
    #: kind and value of each record to append, in this order
    records: list[tuple[str, dict[str, Any]]]
    #: index of a heartbeat -> why it is refused
    refused: dict[int, RayMQError]


class Coordinator:
    """Decides for all groups of a shard while this replica leads. Callers: one thread, with the put lock."""

    def __init__(self, table: GroupTable) -> None:
        self._table = table
        #: by name
        self._live: dict[str, LiveGroup] = {}
        #: no session ends before
        self._look_again_ms = 0
        #: clients of other protocols in these groups
        self.foreign = ForeignMembers()

    def step(
        self, name: str, beats: Sequence[Beat], topics: Mapping[str, int], now_ms: int
    ) -> GroupStep:
        """Plan a step of a group, which also removes members whose session is over.

        Args: `topics`: topic -> number of its queues. The caller makes a new mapping whenever one changes. `now_ms`:
        monotonic, the time of this call; heartbeats that came earlier only get a longer session.
        """
        draft = _Draft(self._table, name)
        live = self._live.setdefault(name, LiveGroup())
        refused: dict[int, RayMQError] = {}
        for index, beat in enumerate(beats):
            try:
                self._take(draft, live, beat, topics, now_ms)
            except RayMQError as error:
                refused[index] = error

        _remove_expired(draft, live, now_ms)
        if draft.is_changed or live.topics is not topics:
            _assign(draft, live, topics)
            live.topics = topics
        if not draft.members:
            self.forget(name)
        return GroupStep(name, beats, draft.records(), refused)

    def assign_again(self, name: str) -> None:
        """Look at all of a group with its next step: not all records of the last one are in the log."""
        live = self._live.get(name)
        if live is not None:
            live.look_ms, live.topics, live.target = 0, None, None

    def forget(self, name: str) -> None:
        """Forget what no record has of a group that has no member any more."""
        self._live.pop(name, None)

    def holders(self, name: str, keys: Iterable[QueueKey]) -> dict[QueueKey, str]:
        """The member ids of those of these queues of which a member has a grant."""
        group = self._table.groups.get(name, Group())
        owners = {key: each for each, member in group.members.items() for key in member.grants}
        return {key: owners[key] for key in keys if key in owners}

    def withdraw(self, name: str, keys: Iterable[QueueKey], number: int) -> None:
        """Let members give up queues that they have under a lower number than this one, with the next step. Then the
        queues are granted again.
        """
        live = self._live.setdefault(name, LiveGroup())
        live.withdrawn.update(dict.fromkeys(keys, number))
        self.assign_again(name)

    def answers(self, step: GroupStep) -> list[BeatAnswer | RayMQError]:
        """The answer to each heartbeat of a step whose records were appended."""
        group = self._table.groups.get(step.name, Group())
        sessions = self.sessions(step.name)
        answers: list[BeatAnswer | RayMQError] = []
        for index, beat in enumerate(step.beats):
            member = group.members.get(beat.member_id)
            refusal = step.refused.get(index)
            if refusal is not None:
                answers.append(refusal)
            elif beat.is_leaving:
                answers.append(BeatAnswer(0, {}, 0, 0))
            elif member is None:
                answers.append(_not_a_member(step.name, beat.member_id))
            else:
                session = sessions.get(beat.member_id)
                is_waiting = session is not None and session.is_waiting
                answers.append(_answer(member, beat, is_waiting, group.facts.is_paused))
        return answers

    def due(self, now_ms: int) -> list[str]:
        """The groups with a member to remove, and at first those of which this coordinator has no session yet.

        Cost: nothing before the time at which the first session may end. Heartbeats only move that further.
        """
        if now_ms < self._look_again_ms:
            return []
        found = []
        earliest_ms = now_ms + LOOK_AGAIN_MS_MAX
        for name, group in self._table.groups.items():
            sessions = self.sessions(name)
            ends_ms = min(
                (
                    sessions[each].deadline_ms if each in sessions else now_ms
                    for each in group.members
                ),
                default=earliest_ms,
            )
            earliest_ms = min(earliest_ms, ends_ms)
            if ends_ms <= now_ms:
                found.append(name)
        self._look_again_ms = earliest_ms
        return found

    def describe(self, name: str, now_ms: int) -> dict[str, Any]:
        """What a group consists of now, for people: its kind, its members, its clients of other protocols, and the
        member that has each queue.
        """
        group = self._table.groups.get(name, Group())
        sessions = self.sessions(name)
        members, queues = [], []

        for member_id, member in sorted(group.members.items()):
            session = sessions.get(member_id)
            members.append(
                {
                    "member": member_id,
                    "client": member.facts.client,
                    "instance_id": member.facts.instance_id,
                    "topics": list(member.facts.subscription.topics),
                    "pattern": member.facts.subscription.pattern,
                    "session_timeout_ms": member.facts.session_timeout_ms,
                    "version": member.version,
                    "applied": 0 if session is None else session.applied,
                    "silent_ms": None if session is None else now_ms - session.beat_ms,
                    "state": _state(member),
                }
            )

            queues += [
                {
                    "topic": topic,
                    "queue_id": queue_id,
                    "member": member_id,
                    "number": number,
                    "revoking": (topic, queue_id) in member.revoking,
                }
                for (topic, queue_id), number in sorted(member.grants.items())
            ]
        filters = {
            topic: list(each[1:]) for topic, each in group.facts.filters.items() if each.kind
        }
        clients = [
            {"protocol": protocol, **each._asdict()}
            for protocol, each in self.foreign.clients(name, now_ms)
        ]
        return {
            "kind": group.facts.kind,
            "paused": group.facts.is_paused,
            "filters": filters,
            "topics": sorted(name for name in group.facts.filters if "*" not in name),
            "members": members,
            "clients": clients,
            "queues": queues,
        }

    def sessions(self, name: str) -> Mapping[str, Session]:
        """The sessions of a group's members, by member id."""
        return self.live(name).sessions

    def live(self, name: str) -> LiveGroup:
        """What this coordinator knows of a group beside its records."""
        return self._live.get(name) or LiveGroup()

    # --- heartbeats -------------------------------------------------------------------------------

    def _take(
        self,
        draft: _Draft,
        live: LiveGroup,
        beat: Beat,
        topics: Mapping[str, int],
        now_ms: int,
    ) -> None:
        """Account for one heartbeat. Raises: Fenced, Rejected."""
        if beat.is_leaving:
            _remove(draft, beat.member_id)
            return
        member = draft.members.get(beat.member_id)
        if member is None:
            if beat.version or beat.join is None or beat.member_id in draft.former:
                raise _not_a_member(draft.name, beat.member_id)
            if not draft.members:
                # While there are members, it is those clients that are refused.
                self.foreign.check_join(draft.name, now_ms)
            member = _join(draft, beat.member_id, beat.join, topics)
        elif beat.join is not None and beat.join.facts != member.facts:
            _note_join(draft, beat.member_id, beat.join, topics, draft.next_number())
            member = draft.change(beat.member_id, member._replace(facts=beat.join.facts))

        deadline_ms = now_ms + member.facts.session_timeout_ms
        session = live.sessions.setdefault(beat.member_id, Session(deadline_ms, now_ms))
        self._look_again_ms = min(self._look_again_ms, session.deadline_ms)
        live.look_ms = min(live.look_ms, session.deadline_ms)
        session.beat_ms = now_ms
        session.applied = max(session.applied, beat.version)
        if beat.keeps_place and not member.is_away:
            draft.change(beat.member_id, member._replace(is_away=True))
        _release(draft, beat)
        member = draft.members[beat.member_id]
        session.note_revoked(member, now_ms)
        if session.is_late(member, now_ms):
            raise _keeps_a_queue(draft.name, beat.member_id, member)
        if not member.is_replaced and not member.is_away:
            session.deadline_ms = max(session.deadline_ms, deadline_ms)


def _remove_expired(draft: _Draft, live: LiveGroup, now_ms: int) -> None:
    """Remove members whose session is over. A member without a session gets a whole one.

    Cost: nothing before the time at which the first session may end, as long as members only send heartbeats.
    """
    sessions = live.sessions
    for member_id in draft.gone():
        sessions.pop(member_id, None)
    if now_ms < live.look_ms and len(sessions) == len(draft.members):
        return

    for member_id in [each for each in sessions if each not in draft.members]:
        del sessions[member_id]
    live.look_ms = now_ms + LOOK_AGAIN_MS_MAX
    for member_id, member in list(draft.members.items()):
        session = sessions.get(member_id)
        if session is None:
            deadline_ms = now_ms + member.facts.session_timeout_ms
            session = sessions[member_id] = Session(deadline_ms, now_ms)
        if now_ms >= session.deadline_ms:
            _remove(draft, member_id)
            del sessions[member_id]
        else:
            live.look_ms = min(live.look_ms, session.deadline_ms)


def _state(member: MemberState) -> str:
    """How a member is, in one word."""
    if member.is_replaced:
        return "replaced"
    return "away" if member.is_away else "releasing" if member.revoking else "stable"


def _not_a_member(name: str, member_id: str) -> Fenced:
    return Fenced(
        f"member {member_id} is not in group {name}: its session ended, or it has left. Join again under a new id",
        group=name,
        member=member_id,
    )


def _keeps_a_queue(name: str, member_id: str, member: MemberState) -> Fenced:
    topic, queue_id = next(iter(member.revoking))
    return Fenced(
        f"member {member_id} of group {name} has kept queue {queue_id} of {topic} for more than "
        f"{member.facts.revoke_timeout_ms} ms after it had to release it (revoke_timeout_s). Join again under a new id",
        group=name,
        member=member_id,
        field="revoke_timeout_s",
        limit=member.facts.revoke_timeout_ms,
    )


def _answer(member: MemberState, beat: Beat, is_waiting: bool, is_paused: bool) -> BeatAnswer:
    interval_ms = min(member.facts.session_timeout_ms // BEATS_IN_SESSION, BEAT_INTERVAL_MS_MAX)
    if is_waiting:
        interval_ms = min(interval_ms, WAITING_INTERVAL_MS)
    assignment = None if beat.version == member.version else member.assignment()
    return BeatAnswer(
        member.version,
        assignment,
        interval_ms,
        # In a paused group no belief is renewed: members go on, keep their queues, and return nothing.
        0 if is_paused else member.facts.session_timeout_ms,
        member.is_replaced,
        is_paused,
    )


def _has_applied(beat: Beat, version: int) -> bool:
    """Whether a member knew of an assignment when it sent this heartbeat. An older one says nothing of a queue that was
    granted, or revoked, since.
    """
    return beat.version >= version


def _release(draft: _Draft, beat: Beat) -> None:
    """End the grants that a member shall release and no longer has, and those that it could not claim."""
    member = draft.members[beat.member_id]
    owned = beat.owned
    released = {
        key
        for key, since in member.revoking.items()
        if _has_applied(beat, since) and (owned is None or key not in owned)
    }
    if owned is not None and _is_current(beat, member):
        # The shard of such a queue has refused its number: a new one is needed. A queue that the member has under an
        # older number, from before it was removed and came into being again, is not released yet.
        released |= member.grants.keys() - owned.keys()
    if released:
        grants = {key: each for key, each in member.grants.items() if key not in released}
        revoking = {key: each for key, each in member.revoking.items() if key not in released}
        draft.released += released
        draft.change(beat.member_id, member._replace(grants=grants, revoking=revoking))


def _is_current(beat: Beat, member: MemberState) -> bool:
    """Whether a heartbeat says what the member has of its newest assignment, which it goes on reading."""
    return beat.version == member.version and not beat.keeps_place


# --- joins ----------------------------------------------------------------------------------------


def _join(
    draft: _Draft, member_id: str, join: JoinRequest, topics: Mapping[str, int]
) -> MemberState:
    """Take a new member in. Raises: Rejected; the draft is as it was."""
    draft.check_room()
    _check_instance(draft, join)
    _note_join(draft, member_id, join, topics, draft.number + 1)

    instance_id = join.facts.instance_id
    for other_id, other in list(draft.members.items()) if instance_id else ():
        if other.facts.instance_id == instance_id and not other.is_replaced:
            if other.is_away:
                draft.inherited[member_id] = list(other.grants)
            _replace(draft, other_id)
    return draft.change(member_id, MemberState(join.facts, _next_version(draft, 0)))


def _check_instance(draft: _Draft, join: JoinRequest) -> None:
    """Raises: InstanceReplaced for a member that was removed, joins again, and has a newer process by now."""
    instance_id = join.facts.instance_id
    if not join.is_again or not instance_id:
        return
    for other_id, other in draft.members.items():
        if other_id in join.replaces:
            # Its own earlier membership, whose session has not ended yet.
            continue
        if other.facts.instance_id == instance_id and not other.is_away:
            raise InstanceReplaced(
                f"another consumer of group {draft.name} has joined with instance_id {instance_id!r}: this one is "
                "replaced",
                group=draft.name,
                field="instance_id",
                found=instance_id,
            )


def _replace(draft: _Draft, member_id: str) -> None:
    """Let a newer process of its instance take a member's place."""
    member = draft.members[member_id]
    if member.is_away:
        draft.remove(member_id)
    else:
        # Its queues wait for their release, or for the end of its session.
        draft.change(member_id, member._replace(is_replaced=True))


def _remove(draft: _Draft, member_id: str) -> None:
    """Take a member out. The newer process of its instance shall get the queues that it has not released."""
    member = draft.members.get(member_id)
    if member is not None and member.is_replaced:
        for other_id, other in draft.members.items():
            is_heir = other.facts.instance_id == member.facts.instance_id
            if is_heir and not other.is_replaced:
                draft.inherited.setdefault(other_id, []).extend(member.grants)
    draft.remove(member_id)


def _next_version(draft: _Draft, before: int) -> int:
    """The version of a member's new assignment. A membership that comes into being again must not get one that its
    process has seen before, so versions are numbers of the shard. Args: `before`: the member's version so far.
    """
    return max(draft.next_number(), before)


def _note_join(
    draft: _Draft, member_id: str, join: JoinRequest, topics: Mapping[str, int], number: int
) -> None:
    """Note what a new member or subscription brings. Args: `number`: for new filters. Raises: Rejected; the draft is
    as it was.
    """
    if draft.members and join.kind != draft.facts.kind:
        raise Rejected(
            f"group {draft.name} has members of kind {draft.facts.kind}, and this one is {join.kind}: "
            "use another group",
            field="group",
            limit=draft.facts.kind,
            found=join.kind,
        )

    own = join.filter_kind, join.expression
    known = draft.facts.filters
    if _may_differ(known, join):
        _check_filter(draft, member_id, join, topics)
    # The filter of a pattern counts for topics that are made later.
    pattern = join.facts.subscription.pattern
    wanted = (*subscribed(join.facts, topics), *([pattern] if pattern else ()))
    filters = {
        each: Filter(number, *own) for each in wanted if each not in known or known[each][1:] != own
    }
    if filters or join.kind != draft.facts.kind or draft.is_new:
        facts = draft.facts._replace(kind=join.kind, filters={**draft.facts.filters, **filters})
        draft.change_facts(facts)


def _may_differ(known: Mapping[str, Filter], join: JoinRequest) -> bool:
    """Whether a topic or pattern that a new member shares has had another filter. Cost: that of the group's filters,
    and not of its members.
    """
    own, wanted = (join.filter_kind, join.expression), join.facts.subscription
    named = frozenset(wanted.topics)
    for key, each in known.items():
        if each[1:] == own:
            continue
        if key in named:
            return True
        if "*" in key and shared_topic(TopicSubscription((), key), wanted) is not None:
            return True
        if wanted.pattern and matches(key, wanted.pattern):
            return True
    return False


def _check_filter(
    draft: _Draft, member_id: str, join: JoinRequest, topics: Mapping[str, int]
) -> None:
    """Raises: Rejected, when another member has an unequal filter and reads, or may read later, one of the topics."""
    own = join.filter_kind, join.expression
    for other_id, other in draft.members.items():
        theirs = None if other_id == member_id else _filter_of(draft, other, topics)
        if theirs is None or theirs[1:] == own:
            continue
        topic = shared_topic(other.facts.subscription, join.facts.subscription)
        if topic is not None:
            raise Rejected(
                f"group {draft.name} reads {topic} with {_shown(*theirs[1:])}, and this member wants {_shown(*own)}. "
                "All members of a group have one filter",
                field="filter",
                limit=_shown(*theirs[1:]),
                found=_shown(*own),
            )


def _filter_of(draft: _Draft, member: MemberState, topics: Mapping[str, int]) -> Filter | None:
    """The filter of all topics of a member; None: an earlier version has taken it in, and noted none."""
    filters, (names, pattern) = draft.facts.filters, member.facts.subscription
    if pattern in filters:
        return filters[pattern]
    names = names or subscribed(member.facts, topics)
    return next((filters[name] for name in names if name in filters), None)


def _shown(kind: str, expression: str) -> str:
    return f"the {kind} filter {expression!r}" if kind else "no filter"


def subscribed(facts: MemberFacts, topics: Mapping[str, int]) -> tuple[str, ...]:
    """The names of the topics that a member reads, ascending. Those of a pattern exist."""
    pattern = facts.subscription.pattern
    if not pattern:
        return facts.subscription.topics
    return tuple(sorted(name for name in topics if matches(name, pattern)))[:TOPICS_MAX]


# --- assignment -----------------------------------------------------------------------------------


def _assign(draft: _Draft, live: LiveGroup, topics: Mapping[str, int]) -> None:
    """Revoke and grant towards the target. A queue is granted only when no member has a grant of it."""
    if live.target is not None and live.topics is topics and not draft.is_reshaped:
        _grant_released(draft, live, live.target)
        return

    members = draft.members
    owners = _kept(members) if draft.facts.is_paused else _target(draft, topics)
    withdrawn = _withdrawn_grants(draft, live)
    for key in withdrawn:
        owners.pop(key, None)

    wanted: dict[str, list[QueueKey]] = {}
    for key, member_id in owners.items():
        wanted.setdefault(member_id, []).append(key)
    granted = {key for member in members.values() for key in member.grants}
    aim = _Target(owners, {member_id: len(keys) for member_id, keys in wanted.items()})

    for member_id in sorted(members):
        new = [
            key
            for key in wanted.get(member_id, ())
            if key not in members[member_id].grants and _may_grant(key, granted)
        ]
        granted.update(new)
        _assign_to(draft, live, member_id, new, aim)
    is_moving = any(member.revoking for member in draft.members.values())
    # A queue that was withdrawn is granted after its release, and one of a paused group is not.
    is_kept = is_moving and not withdrawn and not draft.facts.is_paused
    live.target = aim if is_kept else None


def _withdrawn_grants(draft: _Draft, live: LiveGroup) -> Collection[QueueKey]:
    """The queues that members have to give up before they are granted again."""
    if live.withdrawn:
        live.withdrawn = {
            key: live.withdrawn[key]
            for member in draft.members.values()
            for key, number in member.grants.items()
            if number < live.withdrawn.get(key, 0)
        }
    return live.withdrawn


def _grant_released(draft: _Draft, live: LiveGroup, aim: _Target) -> None:
    """Give released queues to the members that shall have them. The target is as before, so that no other queue moves,
    and the cost is that of these queues.
    """
    new: dict[str, list[QueueKey]] = {}
    for key in draft.released:
        # No member has a grant of it: the only one had released it.
        if key in aim.owners:
            new.setdefault(aim.owners[key], []).append(key)
    for member_id in sorted(new):
        _assign_to(draft, live, member_id, new[member_id], aim)


def _kept(members: Mapping[str, MemberState]) -> dict[QueueKey, str]:
    """The member id for each queue of a paused group: members keep what they have, and get nothing."""
    return {
        key: member_id
        for member_id, member in members.items()
        if not member.is_replaced
        for key in member.assignment()
    }


def _target(draft: _Draft, topics: Mapping[str, int]) -> dict[QueueKey, str]:
    """The member id for each queue of the topics that a member subscribed to."""
    members = draft.members
    members = draft.members
    places = _kept_places(members)
    candidates = {}
    for member_id, member in members.items():
        if not member.is_replaced:
            held = [*member.assignment(), *member.revoking, *draft.inherited.get(member_id, ())]
            for earlier in places.get(member_id, ()):
                held += members[earlier].grants
            candidates[member_id] = AssignmentCandidate(subscribed(member.facts, topics), held)
    return target(candidates, topics)


def _assign_to(
    draft: _Draft, live: LiveGroup, member_id: str, new: Sequence[QueueKey], aim: _Target
) -> None:
    """One member's part of an assignment. Args: `new`: the queues that it is granted now."""
    member = draft.members[member_id]
    revoked = {key for key in member.grants if aim.owners.get(key) != member_id}
    if member_id in live.sessions:
        has = len(member.grants) - len(revoked) + len(new)
        live.sessions[member_id].is_waiting = has < aim.shares.get(member_id, 0)
    if not new and revoked == member.revoking.keys():
        return
    version = _next_version(draft, member.version)
    revoking = {key: member.revoking.get(key, version) for key in member.grants if key in revoked}
    grants = {**member.grants, **{key: draft.next_number() for key in new}}
    draft.change(member_id, member._replace(version=version, grants=grants, revoking=revoking))


def _may_grant(key: QueueKey, granted: set[QueueKey]) -> bool:
    """Whether no member has a grant of a queue: one that has must release it first."""
    return key not in granted


def _kept_places(members: Mapping[str, MemberState]) -> dict[str, list[str]]:
    """The newest member of an instance -> its earlier ones, whose queues it shall get."""
    newest = {
        member.facts.instance_id: member_id
        for member_id, member in members.items()
        if member.facts.instance_id and not member.is_replaced
    }
    places: dict[str, list[str]] = {}
    for member_id, member in members.items():
        if member.is_replaced and member.facts.instance_id in newest:
            places.setdefault(newest[member.facts.instance_id], []).append(member_id)
    return places


class _Draft:
    """A group as a step will leave it. Cost of a step that changes nothing: that of its heartbeats."""

    def __init__(self, table: GroupTable, name: str) -> None:
        known = table.groups.get(name)
        self.name = name
        #: the log has no such group yet
        self.is_new = known is None
        self._before = known or Group()
        self.facts = self._before.facts
        #: as of `Group`
        self.former = self._before.former
        #: the highest number that was given
        self.number = table.number
        self._group_count = len(table.groups)

        #: those of the table until the first change
        self.members: Mapping[str, MemberState] = self._before.members
        self._own: dict[str, MemberState] | None = None
        #: members that may have changed, in this order
        self._touched: dict[str, None] = {}
        #: members have come or gone, or want something else
        self.is_reshaped = False
        #: queues that members have released
        self.released: list[QueueKey] = []
        #: a member -> the queues of an earlier process of its instance that is removed
        self.inherited: dict[str, list[QueueKey]] = {}

    @property
    def is_changed(self) -> bool:
        """Whether the step needs a record."""
        return self.is_new or self.facts != self._before.facts or bool(self._changed())

    def _changed(self) -> list[str]:
        """The members that differ from those of the table, without those that are gone."""
        before, now = self._before.members, self.members
        return [each for each in self._touched if before.get(each) != now.get(each)]

    def gone(self) -> list[str]:
        """The members that the table has and the step removes."""
        return [
            each
            for each in self._touched
            if each in self._before.members and each not in self.members
        ]

    def check_room(self) -> None:
        """Raises: Rejected, when a limit of members or groups is reached."""
        if self.is_new and self._group_count >= GROUPS_MAX:
            raise Rejected(
                f"the shard coordinates {self._group_count} groups; the limit is {GROUPS_MAX}: use fewer names, "
                "or delete groups (raymq group delete)",
                field="group",
                limit=GROUPS_MAX,
                found=self._group_count,
            )
        if len(self.members) >= MEMBERS_MAX:
            raise Rejected(
                f"group {self.name} has {len(self.members)} members; the limit is {MEMBERS_MAX}",
                field="member",
                limit=MEMBERS_MAX,
                found=len(self.members),
            )

    def next_number(self) -> int:
        """A number that was never given before."""
        self.number += 1
        return self.number

    def change(self, member_id: str, member: MemberState) -> MemberState:
        """Set the value of a member. Returns: it."""
        known = self.members.get(member_id)
        self.is_reshaped |= known is None or _shape(known) != _shape(member)
        self._touch(member_id)[member_id] = member
        return member

    def change_facts(self, facts: GroupFacts) -> None:
        """Set the facts of the group."""
        self.facts = facts

    def remove(self, member_id: str) -> None:
        """Take a member out, with its grants."""
        if member_id not in self.members:
            return
        self.is_reshaped = True
        member = self._touch(member_id).pop(member_id)
        if member.facts.instance_id:
            self.former = (*self.former, member_id)[-FORMER_MAX:]

    def _touch(self, member_id: str) -> dict[str, MemberState]:
        """The members, which may be changed."""
        if self._own is None:
            self.members = self._own = dict(self.members)
        self._touched[member_id] = None
        return self._own

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        """The records that turn the group of the log into this one."""
        before = self._before.members
        records: list[tuple[str, dict[str, Any]]] = []
        if (self.is_new and self.members) or self.facts != self._before.facts:
            records.append((GROUP, group_value(self.name, self.facts, self.number)))
        losing: dict[str, MemberState] = {}
        gaining: dict[str, MemberState] = {}
        for member_id in self._changed():
            member = self.members.get(member_id)
            if member is not None:
                known = before.get(member_id)
                is_gaining = known is None or not member.grants.keys() <= known.grants.keys()
                (gaining if is_gaining else losing)[member_id] = member
        # A crash may leave the first records only: a queue must not be granted to two members then.
        changed, gone = losing | gaining, self.gone()
        if changed or gone:
            former = None if self.former == self._before.former else self.former
            values = members_values(self.name, changed, gone, self.number, former)
            records += ((MEMBER, value) for value in values)
        return records


def _shape(member: MemberState) -> tuple[object, ...]:
    """What the target depends on, without the queues that a member has."""
    return member.facts, member.is_replaced, member.is_away
