"""The commit of a staged write: whatever ends where, each row of the first decision is published once and no other."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest

from raymq.client.staged.write_commit import (
    CommitEffect,
    CommitEvent,
    Decide,
    Decided,
    PartPublished,
    StagedPart,
    StagedRows,
    WriteCommit,
    WriteDecision,
)
from raymq.store.records.staged_range import StagedRange

#: queues of a write, and rows for each
QUEUES = (0, 1)
ROWS = 2
CRASHES = 3


def decision_of(attempt: int) -> WriteDecision:
    """The rows of one attempt: the same rows as those of others, staged elsewhere."""
    parts = tuple(
        StagedPart("t", queue, queue, (StagedRange(attempt, 10 * attempt, 10 * attempt + 1, ROWS),))
        for queue in QUEUES
    )
    return WriteDecision("w", StagedRows(parts, fingerprint=7, staged_ms=attempt))


@dataclass
class Cluster:
    """What the shards keep: the first decision, and the rows in each queue."""

    first: WriteDecision | None = None
    #: queue -> attempt that staged each of its rows
    rows: dict[int, list[int]] = field(default_factory=lambda: {queue: [] for queue in QUEUES})

    def perform(self, effect: CommitEffect) -> CommitEvent:
        """One call: a publication gets one row further."""
        if isinstance(effect, Decide):
            self.first = self.first or effect.decision
            return Decided(self.first)
        part = effect.part
        published = self.rows[part.queue_id]
        if len(published) < part.rows:
            published.append(part.ranges[0].producer_id)
        is_complete = len(published) == part.rows
        return PartPublished(effect.decision, part, len(published), is_complete)

    def check(self) -> None:
        """Every row is of the first decision."""
        for published in self.rows.values():
            assert len(published) <= ROWS
            if published:
                assert self.first is not None
                attempt = self.first.staged.parts[0].ranges[0].producer_id
                assert set(published) == {attempt}

    @property
    def is_whole(self) -> bool:
        return all(len(published) == ROWS for published in self.rows.values())


@dataclass
class Committer:
    machine: WriteCommit
    #: effects that are not performed yet
    effects: list[CommitEffect]

    @classmethod
    def begun(cls, attempt: int) -> Committer:
        machine = WriteCommit(decision_of(attempt))
        return cls(machine, machine.begin())


def explore(
    cluster: Cluster, committers: dict[int, Committer], crashes: int, seen: set[str]
) -> int:
    """Every order of calls and crashes from here on. Returns: how many ends there are."""
    state = repr((cluster.first and cluster.first.staged.staged_ms, cluster.rows, crashes)) + repr(
        [
            (number, each.machine.decision is not None, sorted(map(repr, each.effects)))
            for number, each in sorted(committers.items())
        ]
    )
    if state in seen:
        return 0
    seen.add(state)

    ends = 0
    for number, committer in committers.items():
        for index in range(len(committer.effects)):
            for is_answered in (True, False) if crashes else (True,):
                world, others = copy.deepcopy((cluster, committers))
                current = others[number]
                event = world.perform(current.effects.pop(index))
                world.check()
                if is_answered:
                    current.effects += current.machine.step(event)
                    if current.machine.is_done:
                        assert world.is_whole
                    ends += explore(world, others, crashes, seen)
                else:
                    # It ends before the answer. Another process commits the same write.
                    del others[number]
                    attempt = 3 + crashes
                    others[attempt] = Committer.begun(attempt)
                    ends += explore(world, others, crashes - 1, seen)
    if not any(each.effects for each in committers.values()):
        assert all(each.machine.is_done for each in committers.values())
        assert cluster.is_whole
        return 1
    return ends


def test_two_committers_and_their_successors_publish_the_rows_of_the_first_decision() -> None:
    seen: set[str] = set()
    committers = {number: Committer.begun(number) for number in (1, 2)}
    assert explore(Cluster(), committers, CRASHES, seen) > 0
    assert len(seen) > 1000


def test_a_committer_that_ignores_the_first_decision_is_found() -> None:
    class Stubborn(WriteCommit):
        def step(self, event: CommitEvent) -> list[CommitEffect]:
            if isinstance(event, Decided):
                event = Decided(self._own)
            return super().step(event)

    committers = {}
    for number in (1, 2):
        machine = Stubborn(decision_of(number))
        committers[number] = Committer(machine, machine.begin())
    with pytest.raises(AssertionError):
        explore(Cluster(), committers, 0, set())


def test_a_commit_of_other_rows_completes_the_first_one_and_knows_that_they_differ() -> None:
    first = decision_of(1)
    other = first._replace(staged=first.staged._replace(fingerprint=8))
    machine = WriteCommit(other)
    machine.begin()
    publications = machine.step(Decided(first))
    assert [each.part for each in publications] == list(first.staged.parts)  # type: ignore[union-attr]
    for part in first.staged.parts:
        machine.step(PartPublished(first, part, ROWS, True))
    assert machine.is_done
    assert not machine.has_same_rows


def test_a_write_without_rows_is_done_when_it_is_decided() -> None:
    empty = WriteDecision("w", StagedRows((), 0, 1))
    machine = WriteCommit(empty)
    assert machine.begin() == [Decide(empty)]
    assert machine.step(Decided(WriteDecision.from_json(empty.to_json()))) == []
    assert machine.is_done


def test_the_rows_of_tasks_are_joined_in_their_order() -> None:
    first, second = decision_of(1).staged, decision_of(2).staged
    joined = StagedRows.joined([first, second])
    assert joined.rows == first.rows + second.rows
    assert [each.producer_id for each in joined.parts[0].ranges] == [1, 2]
    assert joined.fingerprint == 14
    assert joined.staged_ms == 1
    decision = WriteDecision("w", joined)
    assert WriteDecision.from_json(decision.to_json()) == decision
