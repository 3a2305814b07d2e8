"""Consumer groups under random faults while an operator resets, pauses and resumes. See `test_simulation.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raymq.store.groups import coordinator
from raymq.store.groups.claims import claim_value
from raymq.store.groups.coordinator import LiveGroup
from raymq.store.groups.members import CLAIM, group_value
from raymq.store.groups.members import GROUP as GROUP_RECORD
from raymq.store.state.topics import QueueKey
from tests.groups.simulate import walks
from tests.groups.simulate.world import FAULTS, GROUP, TOPIC, Bounds, Broken, Event, Message, World
from tests.support import tier

RUNS = 600
STEPS = 400
FACTOR = tier.share("RAYMQ_SIMULATED_STEPS", quick=0.05)
LONG = Bounds(ticks=30, faults=(*FAULTS, ("reset", 4), ("pause", 4)))
WORLDS = {
    "two members, two queues": LONG,
    "three members, four queues": Bounds(**{**vars(LONG), "processes": 3, "queues": 4}),
    "two processes of one instance": Bounds(**{**vars(LONG), "static": True}),
}


class OperatedWorld(World):
    """A world with an operator. A reset sets the committed offset, or the next one: what is below counts as read."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        #: number of a reset -> how many records must be confirmed before it goes on, and the queues that are left
        self.resets: dict[int, tuple[int, list[QueueKey]]] = {}

    def reset(self) -> None:
        """The operator takes a number."""
        self.left["reset"] -= 1
        number = self.table.number + 1
        self.table.apply(GROUP_RECORD, self.log.append(GROUP_RECORD, {"number": number}))
        self.resets[number] = len(self.log.records), list(self.keys)

    def reset_queue(self, number: int, key: QueueKey) -> None:
        """The shard of a queue takes the queue away, and sets its offset."""
        self.resets[number][1].remove(key)
        new, _ = self.claims.plan_reset(GROUP, TOPIC, [key[1]], number)
        if new:
            value = self.shard_log.append(CLAIM, claim_value(GROUP, TOPIC, new))
            self.claims.apply(CLAIM, value)
            offset = min(self.offsets.get(key[1], 0) + number % 2, self.bounds.messages)
            self.delivered[key] |= set(range(offset))
            self.offsets |= self._store_offsets({key[1]: offset})

    def withdraw(self, number: int) -> None:
        """The coordinator lets members claim the queues again."""
        del self.resets[number]
        if GROUP in self.table.groups:
            self.coordinator.withdraw(GROUP, self.keys, number)
            self._step([], [])

    def pause(self) -> None:
        """The operator pauses the group, or resumes it."""
        self.left["pause"] -= 1
        self._set_paused(not self.table.groups[GROUP].facts.is_paused)

    def _set_paused(self, is_paused: bool) -> None:
        facts = self.table.groups[GROUP].facts._replace(is_paused=is_paused)
        value = group_value(GROUP, facts, self.table.number)
        self.table.apply(GROUP_RECORD, self.log.append(GROUP_RECORD, value))
        self.coordinator.assign_again(GROUP)
        self._step([], [])

    def crash(self, end: int, *, with_snapshot: bool = False) -> None:
        super().crash(end, with_snapshot=with_snapshot)
        self.resets = {number: each for number, each in self.resets.items() if each[0] <= end}

    def _take_answer(self, message: Message) -> None:
        super()._take_answer(message)
        process = self.processes[message.process]
        is_refused = message.kind == "committed" and message.offset is None
        if is_refused and process.member.member_id == message.member_id:
            # A coordinator that crashed after the reset knows of no withdrawal.
            process.member.lost(message.key, message.number)

    def events(self) -> list[Event]:
        found = super().events()
        for kind in ("reset", "pause"):
            if self.left.get(kind) and (kind == "reset" or GROUP in self.table.groups):
                found.append(Event(1, kind))
        for number, (records, queues) in self.resets.items():
            if self.log.confirmed >= records:
                found += [Event(3, "reset_queue", (number, key)) for key in queues]
                found += [] if queues else [Event(3, "withdraw", (number,))]
        return found

    def heal(self, choose: Callable[[list[Event]], Event]) -> None:
        if GROUP in self.table.groups:
            self._set_paused(False)
        super().heal(choose)


@pytest.mark.parametrize("name", WORLDS)
def test_resets_and_pauses_keep_the_rules(name: str) -> None:
    first = 1_000_000 * list(WORLDS).index(name)
    seeds = range(first, first + round(RUNS * FACTOR))
    figures = walks.run_seeds(seeds, WORLDS[name], steps=STEPS, make=OperatedWorld)
    print(f"{name}:", dict(figures))
    for kind in ("reset", "reset_queue", "withdraw", "pause", "crash"):
        assert figures[kind] > figures["runs"] // 2, kind


def release_at_once(draft: Any, live: LiveGroup) -> frozenset[QueueKey]:
    """In place of `coordinator._withdrawn_grants`: its member may go on reading."""
    withdrawn, live.withdrawn = live.withdrawn, {}
    for member_id, member in list(draft.members.items()):
        grants = {
            key: number for key, number in member.grants.items() if number >= withdrawn.get(key, 0)
        }
        revoking = {key: each for key, each in member.revoking.items() if key in grants}
        draft.change(member_id, member._replace(grants=grants, revoking=revoking))
    return frozenset()


def test_a_reset_that_waits_for_no_release_gives_a_queue_to_two_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator, "_withdrawn_grants", release_at_once)
    with pytest.raises(Broken):
        walks.run_seeds(
            range(400), WORLDS["three members, four queues"], steps=STEPS, make=OperatedWorld
        )


def test_a_member_that_never_commits_hears_of_a_reset() -> None:
    """It gives its queues up and claims them again, by heartbeats alone."""
    made = OperatedWorld(Bounds(processes=1, faults=(("reset", 1),)))
    before = _settle(made)
    made.reset()
    made.confirm()
    (number,) = made.resets
    for key in made.keys:
        made.reset_queue(number, key)
    made.withdraw(number)
    after = _settle(made)
    assert min(after.values()) > number > max(before.values())


def _settle(made: World) -> dict[QueueKey, int]:
    """Heartbeats, claims and releases, until nothing changes. Returns: the claimed queues."""
    member = made.processes["a"].member
    for _ in range(12):
        made.beat("a")
        for event in [each for each in made.events() if each.kind in ("claim", "release")]:
            event.run(made)
        for _ in range(4):
            for message in list(made.net):
                made.deliver(message)
            made.confirm()
            made.confirm_shard()
        made.check()
    assert sorted(member.claimed) == made.keys
    return dict(member.claimed)


def test_what_a_member_has_under_an_older_number_is_not_released() -> None:
    """Its join comes once more after it was removed, so that it gets its queue again under another number."""
    made = World(Bounds(queues=1, faults=(("double", 1),)))
    (key,) = made.keys

    def deliver(kind: str) -> None:
        (message,) = [each for each in made.net if each.kind == kind]
        made.deliver(message)
        made.confirm()
        made.confirm_shard()

    made.beat("b")
    (join,) = made.net
    deliver("beat")
    deliver("answer")
    made.claim("b", key)
    deliver("claim")
    deliver("claimed")
    made.tick(3_000)
    made.expire()
    made.double(join)
    made.confirm()
    made.net.clear()

    # It hears of its new number, and has not given the queue up yet.
    made.beat("b")
    deliver("beat")
    deliver("answer")
    member = made.processes["b"].member
    assert (member.releasing.keys(), member.assigned.keys()) == ({key}, {key})
    made.beat("a")
    deliver("beat")
    deliver("answer")
    made.beat("b")
    deliver("beat")
    deliver("answer")
    made.check()
    assert made.table.groups[GROUP].members["b1"].grants == member.assigned
    assert made.processes["a"].member.assigned == {}

    made.release("b", key)
    made.claim("b", key)
    deliver("claim")
    deliver("claimed")
    assert member.claimed == member.assigned
    made.check()
