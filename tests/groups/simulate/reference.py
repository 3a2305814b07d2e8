"""The rules of consumer groups, written down a second time: what the machines that ship are compared with.

Short and slow, and nothing is shared but the form of the records. One group, one topic, one filter. Which queues a
member keeps and gets is free: the model takes that from the records, and checks that it is balanced and that no queue
moves without need. Everything else it knows before: members, numbers, what must be released, each answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raymq.store.groups.heartbeat import Beat
from raymq.store.state.topics import QueueKey

#: ids of removed members with an instance that are not taken again
REMEMBERED = 64


class Differs(AssertionError):
    """The machine that ships and the model do not agree."""


def expect(holds: bool, *what: object) -> None:
    """Raises: Differs unless it holds."""
    if not holds:
        raise Differs(*what)


class Place(NamedTuple):
    """One member, as the log has it."""

    version: int
    #: queue -> number, of all that no other member may have
    held: dict[QueueKey, int]
    #: queue that it must give back -> the version that said so first
    owed: dict[QueueKey, int]
    instance: str
    is_replaced: bool
    is_away: bool = False

    @property
    def heard(self) -> dict[QueueKey, int]:
        """What an answer gives it."""
        return {queue: number for queue, number in self.held.items() if queue not in self.owed}


@dataclass
class Life:
    """What only the leader knows of a member."""

    ends_ms: int
    applied: int = 0
    #: the version of the oldest debt that it knows of, and since when; 0: none
    debt: int = 0
    debt_ms: int = 0


@dataclass
class Recorded:
    """A group as a function of its records."""

    number: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)

    def take(self, kind: str, value: Mapping[str, Any]) -> None:
        """Account for one record."""
        if value["number"] > self.number:
            self.number = value["number"]
        if kind != "MEMBER":
            return
        for name, said in value.get("members", {}).items():
            self.places[name] = Place(
                said["version"],
                _queues(said.get("grants", {})),
                _queues(said.get("revoking", {})),
                said.get("instance", ""),
                said.get("replaced", False),
                said.get("away", False),
            )
        for name in value.get("gone", []):
            self.places.pop(name, None)
        if "former" in value:
            self.removed = value["former"]

    def copy(self) -> Recorded:
        """One that goes on alone. Places are replaced and never changed."""
        return Recorded(self.number, dict(self.places), list(self.removed))


def _queues(columns: Mapping[str, list[list[int]]]) -> dict[QueueKey, int]:
    found = {}
    for topic in columns:
        ids, numbers = columns[topic]
        for index, queue_id in enumerate(ids):
            found[topic, queue_id] = numbers[index]
    return found


class Reference:
    """A coordinator that decides by itself, and is shown the records of the one that ships."""

    def __init__(self, queues: Iterable[QueueKey], session_ms: int, revoke_ms: int) -> None:
        self._queues = set(queues)
        self._session_ms, self._revoke_ms = session_ms, revoke_ms
        self.now = Recorded()
        self.lives: dict[str, Life] = {}
        #: what the step before the assignment must have led to
        self._draft = Recorded()
        #: a member -> the queues of a process of its instance that this step removes
        self._inherited: dict[str, set[QueueKey]] = {}
        #: members have come or gone in this step
        self._is_new = True
        #: how many queues each member shall have, until all have been released that others shall have
        self._moving: dict[str, int] | None = None
        #: the step has a record
        self._is_recorded = False
        self._refused: set[int] = set()
        self._beats: list[Beat] = []

    def is_due(self, now_ms: int) -> bool:
        """Whether a session is over, or a member has none."""
        return any(
            name not in self.lives or self.lives[name].ends_ms <= now_ms for name in self.now.places
        )

    def restart(self, records: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Another replica leads: it has these records, and every session begins again."""
        self.now, self.lives, self._moving = Recorded(), {}, None
        for kind, value in records:
            self.now.take(kind, value)

    # --- a step -----------------------------------------------------------------------------------

    def begin(self, beats: list[Beat], now_ms: int) -> None:
        """Decide on heartbeats. The records of the step follow (`take`), then `end`."""
        self._draft, self._beats = self.now.copy(), beats
        self._is_new = self._is_recorded = False
        self._inherited = {}
        self._refused = {at for at, beat in enumerate(beats) if not self._hears(beat, now_ms)}
        draft = self._draft
        for name in list(draft.places):
            life = self.lives.setdefault(name, Life(now_ms + self._session_ms))
            if life.ends_ms <= now_ms:
                self._remove(name)
        self.lives = {name: life for name, life in self.lives.items() if name in draft.places}

    def take(self, kind: str, value: Mapping[str, Any]) -> None:
        """Account for one record of the step."""
        self._is_recorded = True
        self.now.take(kind, value)

    def _hears(self, beat: Beat, now_ms: int) -> bool:
        """Whether a heartbeat is not refused."""
        name, draft = beat.member_id, self._draft
        if beat.is_leaving:
            self._remove(name)
            return True
        if name not in draft.places:
            if beat.version != 0 or beat.join is None or name in draft.removed:
                return False
            self._join(name, beat.join.facts.instance_id)

        life = self.lives.setdefault(name, Life(now_ms + self._session_ms))
        life.applied = max(life.applied, beat.version)
        if beat.keeps_place and not draft.places[name].is_away:
            draft.places[name] = draft.places[name]._replace(is_away=True)
            self._is_new = True
        self._give_back(name, beat)
        self._looks_at_debts(name, life, now_ms)
        if life.debt and now_ms >= life.debt_ms + self._revoke_ms:
            return False
        if not (draft.places[name].is_replaced or draft.places[name].is_away):
            life.ends_ms = max(life.ends_ms, now_ms + self._session_ms)
        return True

    def _join(self, name: str, instance: str) -> None:
        draft = self._draft
        for other, place in list(draft.places.items()):
            if not instance or place.instance != instance:
                continue
            if place.is_away and not place.is_replaced:
                self._inherited[name] = set(place.held)
                self._remove(other)
            else:
                draft.places[other] = place._replace(is_replaced=True)
        self._is_new = True
        draft.number += 1
        draft.places[name] = Place(draft.number, {}, {}, instance, False)

    def _give_back(self, name: str, beat: Beat) -> None:
        """End what a member had to release and has released, and what it could not claim."""
        place = self._draft.places[name]
        # Without a word of them it has those of the assignment, and none of those to release.
        has = place.held.keys() - place.owed.keys() if beat.owned is None else beat.owned.keys()
        ended = set()
        for queue in place.held:
            # Under an older number, too, it goes on reading.
            if queue in has:
                continue
            has_heard = queue in place.owed and beat.version >= place.owed[queue]
            if has_heard or (beat.version == place.version and not beat.keeps_place):
                ended.add(queue)
        held = {queue: number for queue, number in place.held.items() if queue not in ended}
        owed = {queue: version for queue, version in place.owed.items() if queue not in ended}
        self._draft.places[name] = place._replace(held=held, owed=owed)

    def _looks_at_debts(self, name: str, life: Life, now_ms: int) -> None:
        oldest = min(self._draft.places[name].owed.values(), default=0)
        debt = oldest if oldest <= life.applied else 0
        if debt != life.debt:
            life.debt, life.debt_ms = debt, now_ms

    def _remove(self, name: str) -> None:
        place = self._draft.places.pop(name, None)
        self._is_new |= place is not None
        if place is not None and place.is_replaced:
            for heir, other in self._draft.places.items():
                if other.instance == place.instance and not other.is_replaced:
                    self._inherited.setdefault(heir, set()).update(place.held)
        if place is not None and place.instance:
            self._draft.removed = [*self._draft.removed, name][-REMEMBERED:]

    def end(self) -> None:
        """Compare the step with what must have come of it. Raises: Differs."""
        draft, found = self._draft, self.now
        expect(found.places.keys() == draft.places.keys(), "members", found.places, draft.places)
        expect(found.removed == draft.removed, "former members", found.removed, draft.removed)
        goes_on = self._moving is not None and not self._is_new
        quotas = self._moving if self._moving is not None and goes_on else self._quotas()
        free = self._queues - {queue for place in draft.places.values() for queue in place.held}
        number = draft.number
        for name in sorted(draft.places):
            before, after = draft.places[name], found.places[name]
            kept = {queue for queue in before.held if queue in after.heard}
            got = after.held.keys() - before.held.keys()
            quota = quotas.get(name, 0)
            lost = before.held.keys() - kept
            if goes_on:
                expect(lost == before.owed.keys(), "a queue moved while others do", name)
            else:
                expect(len(kept) == min(len(before.held), quota), "moved without need", name)
            due = self._inherited.get(name, set()) if name in quotas else set()
            is_kept = len(got & due) == min(len(due), quota - len(kept))
            expect(is_kept, "the queues of its instance", name, due, got)
            expect(got <= free, "a queue has two owners", name, got - free)
            expect(len(kept) + len(got) <= quota, "more than its share", name, after)
            free -= got

            is_same = not got and lost == before.owed.keys()
            version = before.version if is_same else number + 1
            if not is_same:
                number += 1 + len(got)
            given = sorted(after.held[queue] for queue in got)
            expect(given == [*range(version + 1, version + 1 + len(got))], "numbers", name, after)
            wanted = before._replace(
                version=version,
                held={**before.held, **{queue: after.held[queue] for queue in got}},
                owed={queue: before.owed.get(queue, version) for queue in lost},
            )
            expect(after == wanted, "a member", name, after, wanted)
        expect(not free or not quotas, "queues without an owner", free)
        # Without a record no number was given: of a member that joins and leaves in one step.
        is_right = found.number == number or not self._is_recorded
        expect(is_right, "the highest number", found.number, number)
        if not goes_on:
            is_moving = any(place.owed for place in found.places.values())
            self._moving = quotas if is_moving else None

    def _quotas(self) -> dict[str, int]:
        """How many queues each member shall have. One that has more to keep gets one more."""
        places = self._draft.places
        wants = {name: len(each.held) for name, each in places.items() if not each.is_replaced}
        for place in places.values():
            for heir in wants:
                if place.is_replaced and places[heir].instance == place.instance:
                    wants[heir] += len(place.held)
        if not wants:
            return {}
        for heir in wants:
            wants[heir] += len(self._inherited.get(heir, ()))

        least, more = divmod(len(self._queues), len(wants))
        first = sorted(wants, key=lambda name: (-wants[name], name))[:more]
        larger = [name for name in first if wants[name] > least]
        larger += [name for name in sorted(wants) if name not in larger][: more - len(larger)]
        return {name: least + (name in larger) for name in wants}

    def answer(self, at: int) -> tuple[int, dict[QueueKey, int], bool] | None:
        """The answer to a heartbeat of the step: version, queues, whether it is replaced; None: refused."""
        beat = self._beats[at]
        if beat.is_leaving:
            return 0, {}, False
        place = self.now.places.get(beat.member_id)
        if at in self._refused or place is None:
            return None
        return place.version, place.heard, place.is_replaced


class ReferenceShard:
    """The fence of each queue, and the offsets."""

    def __init__(self) -> None:
        #: queue -> number and member
        self.claims: dict[int, tuple[int, str]] = {}
        self.offsets: dict[int, int] = {}

    def take(self, kind: str, value: Mapping[str, Any]) -> None:
        """Account for one record."""
        if kind == "CLAIM":
            for member, (queues, numbers) in value["claims"].items():
                for queue, number in zip(queues, numbers, strict=True):
                    self.claims[queue] = number, member
        else:
            self.offsets.update(dict(value["offsets"]))

    def claim(self, queue: int, number: int, member: str) -> int | None:
        """Claim a queue. Returns: where to begin; None: refused."""
        standing = self.claims.get(queue, (0, ""))
        if number > standing[0]:
            self.claims[queue] = number, member
        elif standing != (number, member):
            return None
        return self.offsets.get(queue, 0)

    def commit(self, queue: int, number: int, offset: int) -> int | None:
        """Commit an offset. Returns: it; None: refused."""
        if self.claims.get(queue, (0, ""))[0] != number:
            return None
        # A lower one is a late copy, which is answered again and changes nothing.
        if offset > self.offsets.get(queue, -1):
            self.offsets[queue] = offset
        return offset
