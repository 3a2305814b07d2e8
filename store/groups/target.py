"""Who shall have each queue: sticky and balanced. A pure function, which no record holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raymq.store.state.topics import QueueKey


class AssignmentCandidate(NamedTuple):
    """A member that may get queues."""

    #: what it subscribed to
    topics: tuple[str, ...]
    #: what it has now, the queues that it would rather keep first
    held: Sequence[QueueKey]


def target(
    candidates: Mapping[str, AssignmentCandidate], queues: Mapping[str, int]
) -> dict[QueueKey, str]:
    """The member id for each queue of a topic that a candidate subscribed to.

    The numbers of queues of two members with the same topics differ by one at most. A queue moves only where that
    needs it. Cost: O(queues + members x topics).

    Args: `candidates`: by member id. `queues`: topic -> how many queues it has; others are left out.
    """
    ids = sorted(candidates)
    assigned: dict[QueueKey, str] = {}
    load = dict.fromkeys(ids, 0)
    for members, topics in _classes(ids, candidates, queues):
        wanted = [(topic, queue_id) for topic in topics for queue_id in range(queues[topic])]
        _balance(members, wanted, candidates, assigned, load)
    return assigned


def _classes(
    ids: Sequence[str], candidates: Mapping[str, AssignmentCandidate], queues: Mapping[str, int]
) -> list[tuple[tuple[str, ...], list[str]]]:
    """The topics by the members that subscribed to them, those with the fewest members first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for member_id in ids:
        alike.setdefault(candidates[member_id].topics, []).append(member_id)

    subscribers: dict[str, list[str]] = {}
    for topics, members in alike.items():
        for topic in topics:
            if topic in queues:
                subscribers.setdefault(topic, []).extend(members)

    classes: dict[tuple[str, ...], list[str]] = {}
    for topic in sorted(subscribers):
        classes.setdefault(tuple(sorted(subscribers[topic])), []).append(topic)
    return sorted(classes.items(), key=lambda each: (len(each[0]), each[0]))


def _balance(
    members: Sequence[str],
    wanted: Sequence[QueueKey],
    candidates: Mapping[str, AssignmentCandidate],
    assigned: dict[QueueKey, str],
    load: dict[str, int],
) -> None:
    """Give the wanted queues to these members. Adds to `assigned` and `load`."""
    least, more = divmod(len(wanted), len(members))
    open_queues = dict.fromkeys(wanted, True)
    kept: dict[str, list[QueueKey]] = {}
    for member_id in members:
        # A queue that two members name is the first one's.
        own = [key for key in candidates[member_id].held if open_queues.get(key)]
        open_queues.update(dict.fromkeys(own, False))
        kept[member_id] = own

    # The members that have most keep one more than the others, then those with the least of other topics.
    by_need = sorted(members, key=lambda each: (-len(kept[each]), load[each], each))
    larger = {each for each in by_need[:more] if len(kept[each]) > least}
    rest = sorted(set(members) - larger, key=lambda each: (load[each], each))
    larger.update(rest[: more - len(larger)])

    room: deque[tuple[str, int]] = deque()
    for member_id in sorted(members, key=lambda each: (load[each], each)):
        quota = least + (member_id in larger)
        for key in kept[member_id][:quota]:
            del open_queues[key]
            assigned[key] = member_id
        load[member_id] += quota
        missing = quota - len(kept[member_id][:quota])
        if missing:
            room.append((member_id, missing))

    # In turns, so that the queues of one topic are spread.
    for key in open_queues:
        member_id, missing = room.popleft()
        assigned[key] = member_id
        if missing > 1:
            room.append((member_id, missing - 1))
