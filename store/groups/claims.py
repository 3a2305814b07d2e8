"""The fence of each queue of this shard: which member may commit a group's offsets, as a function of the log.

A member claims a queue under the number of its grant, before it reads the queue. A higher number ends every lower one.
The shard that stores the queue decides alone, so no clock and no other shard matters: a member that was replaced and
does not know it yet is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .members import CLAIM


class Claim(NamedTuple):
    """Who has a queue for a group."""

    #: of the grant. It never falls
    number: int
    #: member id; empty: no member, since an operator took the queue away
    member_id: str

    @property
    def is_lock(self) -> bool:
        """Whether a client of RocketMQ has locked the queue. That ends without a word of the client, too."""
        return self.member_id.startswith(LOCK_PREFIX)

    @property
    def client(self) -> str:
        """The id of the client of RocketMQ that has locked the queue; empty: none has."""
        return self.member_id[len(LOCK_PREFIX) :] if self.is_lock else ""


class Commit(NamedTuple):
    """The offset at which a group goes on with a queue, under the number of a grant."""

    number: int
    offset: int
    #: it may be lower than the committed one
    is_seek: bool = False


#: begins the member id of a client of RocketMQ that has locked a queue. Ids of members are hexadecimal digits
LOCK_PREFIX = "rocketmq:"
#: no member has ever had the queue
UNCLAIMED = Claim(0, "")
#: deleted groups whose numbers are remembered, the newest ones
ENDED_MAX = 10_000


class ClaimTable:
    """Claims by group, topic and queue. Not thread-safe: the put lock guards it."""

    #: the kinds of records that it applies
    kinds: tuple[str, ...] = (CLAIM,)

    def __init__(self) -> None:
        #: whether the lock that a client of RocketMQ has of a queue is over: group, topic, queue. A leader sets its own
        self.is_lock_over: Callable[[str, str, int], bool] = _is_never_over
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        #: (group, topic) -> queue -> claim
        self.claims: dict[tuple[str, str], dict[int, Claim]] = {}
        #: (group, topic) -> when the newest of these claims was given or released, as its record says, ms since 1970;
        #: not of all
        self.times_ms: dict[tuple[str, str], int] = {}
        #: deleted group -> the number of its end, the newest one last. A member of it that still runs is refused, also
        #: in a group of the same name
        self.ended: dict[str, int] = {}

    def apply(self, kind: str, value: Mapping[str, Any]) -> None:
        """Account for one record. Raises: ValueError, LookupError or TypeError for a malformed one."""
        if "ended" in value:
            self._end(str(value["group"]), int(value["ended"]))
            return
        key = str(value["group"]), str(value["topic"])
        claims = self.claims.setdefault(key, {})
        for member_id, (queues, numbers) in value["claims"].items():
            for queue_id, number in zip(queues, numbers, strict=True):
                claims[int(queue_id)] = Claim(int(number), member_id)
        at_ms = int(value.get("at", 0))
        if at_ms > self.times_ms.get(key, 0):
            self.times_ms[key] = at_ms

    def _end(self, group: str, number: int) -> None:
        """Forget the claims of a deleted group. None of their numbers is valid again."""
        number = max(number, self.ended.pop(group, 0))
        for key in [key for key in self.claims if key[0] == group]:
            number = max([number, *(claim.number for claim in self.claims.pop(key).values())])
            self.times_ms.pop(key, None)
        self.ended[group] = number
        if len(self.ended) > ENDED_MAX:
            del self.ended[next(iter(self.ended))]

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The whole state as records: applied to an empty table, they make this one."""
        for group, number in self.ended.items():
            yield CLAIM, ended_value(group, number)
        for (group, topic), claims in self.claims.items():
            yield CLAIM, claim_value(group, topic, claims, self.times_ms.get((group, topic)))

    def claim_of(self, group: str, topic: str, queue_id: int) -> Claim:
        """Who has a queue."""
        claim = self.claims.get((group, topic), {}).get(queue_id)
        if claim is None:
            return Claim(self.ended[group], "") if group in self.ended else UNCLAIMED
        return claim

    def plan(
        self, group: str, topic: str, member_id: str, wanted: Mapping[int, int]
    ) -> tuple[dict[int, Claim], dict[int, Claim]]:
        """Decide on the claims of a member.

        Args: `wanted`: queue -> number of its grant.
        Returns: the new claims, which the log needs before they count; and for each queue that is refused, the claim
        that stands. All others are the member's already: a repeated request gets its first answer.
        """
        new, refused = {}, {}
        for queue_id, number in wanted.items():
            known = self.claim_of(group, topic, queue_id)
            if number > known.number:
                new[queue_id] = Claim(number, member_id)
            elif known != (number, member_id):
                refused[queue_id] = known
        return new, refused

    def plan_release(
        self, group: str, topic: str, member_id: str, numbers: Mapping[int, int]
    ) -> dict[int, Claim]:
        """The claims of a member that end, which the log needs: a number that was released is never valid again."""
        return {
            queue_id: Claim(number, "")
            for queue_id, number in numbers.items()
            if self.claim_of(group, topic, queue_id) == (number, member_id)
        }

    def plan_commit(
        self, group: str, topic: str, wanted: Mapping[int, Commit], committed: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[int, Claim]]:
        """Decide on the commits of a member.

        Args: `committed`: queue -> the offset that the group has.
        Returns: the offsets that the log needs before they count; and for each queue that is refused, the claim that
        stands. All others are committed already, up to this offset or a higher one.
        """
        new, refused = {}, {}
        for queue_id, commit in wanted.items():
            claim = self.claim_of(group, topic, queue_id)
            if claim.number != commit.number or not claim.member_id:
                refused[queue_id] = claim
            elif commit.is_seek or commit.offset > committed.get(queue_id, -1):
                new[queue_id] = commit.offset
        return new, refused

    def plan_reset(
        self, group: str, topic: str, queues: Iterable[int], number: int
    ) -> tuple[dict[int, Claim], dict[int, Claim]]:
        """Take queues away from their members for an operator, who sets their offsets.

        Args: `number`: a new one of the group's coordinator.
        Returns: the claims, without a member, which the log needs; and for each queue that a member has under a higher
        number, the claim that stands.
        """
        new, refused = {}, {}
        for queue_id in queues:
            known = self.claim_of(group, topic, queue_id)
            if known.number > number or (known.number == number and known.member_id):
                refused[queue_id] = known
            else:
                new[queue_id] = Claim(number, "")
        return new, refused

    def of_group(self, group: str) -> dict[tuple[str, int], Claim]:
        """(topic, queue) -> claim, of all queues of this shard that a group has claimed."""
        return {
            (topic, queue_id): claim
            for (name, topic), claims in self.claims.items()
            if name == group
            for queue_id, claim in claims.items()
        }

    def held(self, group: str, topic: str, queues: Mapping[int, object]) -> dict[int, Claim]:
        """Those of these queues that a member has, or a client of RocketMQ whose lock is not over: a commit without a
        number is refused there.
        """
        claims = {each: self.claim_of(group, topic, each) for each in queues}
        return {
            queue_id: claim
            for queue_id, claim in claims.items()
            if claim.member_id and not (claim.is_lock and self.is_lock_over(group, topic, queue_id))
        }


def _is_never_over(group: str, topic: str, queue_id: int) -> bool:
    return False


def lock_member(client: str) -> str:
    """The member id of a client of RocketMQ that locks queues. Args: `client`: its client id."""
    return LOCK_PREFIX + client


def ended_value(group: str, number: int) -> dict[str, Any]:
    """The value of a CLAIM record that says that a group was deleted. Args: `number`: of its end."""
    return {"group": group, "ended": number}


def claim_value(
    group: str, topic: str, claims: Mapping[int, Claim], at_ms: int | None = None
) -> dict[str, Any]:
    """The value of a CLAIM record: for each member columns of queue ids and numbers.

    Args: `at_ms`: now, ms since 1970; None: not known, and the group is kept for ever.
    """
    columns: dict[str, list[list[int]]] = {}
    for queue_id, claim in claims.items():
        queues, numbers = columns.setdefault(claim.member_id, [[], []])
        queues.append(queue_id)
        numbers.append(claim.number)
    value = {"group": group, "topic": topic, "claims": columns}
    return {**value, "at": at_ms} if at_ms else value
