"""Replicas that were added to a shard of one: until it counts them, none of them leads, and its log decides."""

from __future__ import annotations

import random

import pytest

from raymq.replication import election_events as r
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import Ballot, ElectionState, LogFacts
from raymq.replication.wire import ReplicaProcess

TICK_MS = 20


class Growth:
    """Three processes, of which the first may count itself alone, and a network that delivers in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.end = 100
        self.processes = {
            0: self.process(0, 10, [0]),
            1: self.process(1, 11, [0, 1, 2], is_complete=False),
            2: self.process(2, 12, [0, 1, 2], is_complete=False),
        }
        self.under_way: list[tuple[ReplicaProcess, r.SendElection]] = []

    def process(
        self, replica: int, incarnation: int, members: list[int], *, is_complete: bool = True
    ) -> ElectionMachine:
        ballot = Ballot(epoch=1, is_complete=is_complete)
        candidates = [0] if len(members) == 1 else members
        me = ReplicaProcess(replica, incarnation)
        return ElectionMachine(
            me, members, ballot, candidates=candidates, is_preferred=replica == 0
        )

    def count_all(self) -> None:
        """The first process starts anew, and counts all three."""
        ballot = self.processes[0].ballot
        self.processes[0] = self.process(0, 20, [0, 1, 2])
        self.processes[0].ballot = ballot

    def log_of(self, replica: int) -> LogFacts:
        """All have the log of the first one, whose streams they hear. Only its own epoch matches."""
        first = self.processes[0]
        leads = first.state is ElectionState.LEADER
        matched = (self.end, first.epoch) if replica and leads else (0, 0)
        return LogFacts(1, self.end, self.end, *matched)

    def step(self, replica: int, event: r.ElectionEvent) -> None:
        machine = self.processes[replica]
        for effect in machine.step(event, self.now_ms, self.log_of(replica)):
            if isinstance(effect, r.SendElection):
                self.under_way.append((machine.me, effect))
            elif isinstance(effect, r.BeginEpoch):
                self.step(replica, r.EpochBegun(machine.epoch, self.end))

    def run(self, seconds: int) -> None:
        """Tick all, stream the log of the first one, and deliver most messages, in any order."""
        for _ in range(seconds * 1000 // TICK_MS):
            self.now_ms += TICK_MS
            first = self.processes[0]
            for replica in self.processes:
                self.step(replica, r.ElectionTick(self.rng.random()))
                if replica and first.leads:
                    self.step(replica, r.LeaderHeard(first.me, first.epoch))
                    if replica in first._members:
                        found = self.processes[replica].ballot.is_complete
                        self.step(0, r.FollowerHeard(replica, first.epoch, self.end, found))

            self.rng.shuffle(self.under_way)
            arrived, self.under_way = self.under_way, []
            for sender, effect in arrived:
                if self.rng.random() < 0.9:
                    event = r.Received(sender, effect.addressee, effect.epoch, effect.message)
                    self.step(effect.addressee.id, event)
            self.check()

    def check(self) -> None:
        """No other process leads, and none counts as complete, while the first one counts itself alone."""
        if len(self.processes[0]._members) == 1:
            for replica in (1, 2):
                assert self.processes[replica].state is not ElectionState.LEADER
                assert not self.processes[replica].ballot.is_complete
            assert self.processes[0].leads


@pytest.mark.parametrize("seed", range(10))
def test_added_replicas_lead_only_after_the_first_one_counts_them(seed: int):
    growth = Growth(seed)
    growth.run(20)
    assert growth.processes[0].confirmed == growth.end

    growth.count_all()
    # Another one may lead first. Only the first one streams its log here, so that such a leadership ends after 10 s,
    # and the one after it takes twice as long.
    growth.run(60)
    machines = growth.processes.values()
    assert [machine.leads for machine in machines].count(True) == 1
    assert all(machine.ballot.is_complete for machine in machines)


@pytest.mark.parametrize("seed", range(10))
def test_without_the_first_one_added_replicas_elect_nobody(seed: int):
    growth = Growth(seed)
    growth.run(1)
    # Its machine is lost before it counted them.
    growth.processes[0].step = lambda *_: []
    growth.run(20)
