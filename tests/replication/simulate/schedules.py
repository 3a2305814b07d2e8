"""Schedules that random runs find too rarely, step by step. Each breaks an invariant of a machine without one rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import ElectionState

from .mutants import (
    CompleteBeforeItsSync,
    CountsVotesOfEarlierEpochs,
    JoinsAfterAMajority,
    JoinsByAnEarlierMatch,
)
from .search import State
from .world import Node, Packet, World


class Script:
    """A world whose packets move only when the schedule says so."""

    def __init__(
        self, members: int, machine: type[ElectionMachine], *, flush: str = "sync"
    ) -> None:
        self.world = World(members, random.Random(7), machine=machine, flush=flush)
        self.nodes = self.world.nodes
        # The first tick sets the timers.
        for node in self.nodes:
            self.world.tick_node(node)

    def run(self, ms: int, *replicas: int) -> None:
        """Time passes for these replicas, or for all, and they exchange packets. All other packets are lost."""
        running = [self.nodes[replica] for replica in replicas] or self.nodes
        ids = {node.id for node in running}
        for _ in range(ms // 50):
            self.world.now += 50
            for node in running:
                self.world.tick_node(node)
            for _ in range(5):
                packets, self.world.network[:] = list(self.world.network), []
                self.deliver(each for each in packets if {each.source, each.target} <= ids)
                for node in running:
                    self.world.sync(node)

    def take(self, kind: type[wire.Election], source: int, target: int) -> list[Packet]:
        """Take the messages of one kind, on their way from one replica to another, out of the network."""
        wanted = [
            packet
            for packet in self.world.network
            if (packet.source, packet.target) == (source, target)
            and isinstance(packet.event, r.Received)
            and isinstance(packet.event.message, kind)
        ]
        self.world.network[:] = [each for each in self.world.network if each not in wanted]
        assert wanted
        return wanted

    def deliver(self, packets: Iterable[Packet]) -> None:
        for packet in packets:
            self.world.deliver(packet)

    def ask(self, candidate: int, *voters: int, after_ms: int = 2_500) -> None:
        """A replica hears no leader and becomes a candidate, because these others would vote."""
        self.world.now += after_ms
        self.world.step(self.nodes[candidate], r.ElectionTick(0.0))
        for voter in voters:
            self.deliver(self.take(wire.PreVote, candidate, voter))
            self.deliver(self.take(wire.PreVoteReply, voter, candidate))
        assert self.state(candidate) is ElectionState.CANDIDATE

    def state(self, replica: int) -> ElectionState:
        machine = self.nodes[replica].replica
        assert machine is not None
        return machine.state

    def leader(self) -> Node:
        (leader,) = [each for each in self.nodes if each.replica and each.replica.leads]
        return leader


def vote_of_an_earlier_epoch(machine: type[ElectionMachine]) -> Script:
    """A vote arrives when its candidate asks for votes in a later epoch, in which the voter votes for itself."""
    script = Script(3, machine)
    script.ask(0, 1)
    script.deliver(script.take(wire.RequestVote, 0, 1))
    late = script.take(wire.VoteReply, 1, 0)
    script.ask(0, 1)

    script.ask(1, 2)
    script.deliver(script.take(wire.RequestVote, 1, 2))
    script.deliver(script.take(wire.VoteReply, 2, 1))
    assert script.state(1) is ElectionState.LEADER
    script.deliver(late)
    return script


def vote_of_a_lost_disk(machine: type[ElectionMachine]) -> Script:
    """A vote is counted after its voter lost its disk, and found the leader of the epoch before."""
    script = Script(5, machine)
    world = script.world
    script.run(5_000)
    leader = script.leader()
    lost, third, voter, candidate = [each.id for each in script.nodes if each is not leader]

    # The candidate misses a heartbeat, which came late, and asks just before the next one.
    world.now += 1_500
    world.step(leader, r.ElectionTick(0.0))
    for other in (lost, third, voter):
        script.deliver(script.take(wire.CheckLeader, leader.id, other))
        script.deliver(script.take(wire.CheckLeaderReply, other, leader.id))
    # The answer of the candidate's first voter takes long, and so does the request to the second.
    script.ask(candidate, lost, voter, after_ms=2_200)
    script.deliver(script.take(wire.RequestVote, candidate, lost))
    given = script.take(wire.VoteReply, lost, candidate)
    request = script.take(wire.RequestVote, candidate, voter)

    world.lose_disk(script.nodes[lost])
    world.start(script.nodes[lost])
    script.run(500, leader.id, lost, third, voter)
    assert leader.replica is not None
    assert leader.replica.leads

    # If the replica that lost its disk were complete, this record would be confirmed without the second voter.
    world.put(leader)
    script.run(500, leader.id, lost, third)
    script.deliver(request)
    script.deliver(script.take(wire.VoteReply, voter, candidate))
    script.deliver(given)
    assert script.state(candidate) is ElectionState.LEADER
    return script


def match_with_an_earlier_leader(machine: type[ElectionMachine]) -> State:
    """A replica lost its disk, and its log equals that of a leader whose epoch is over when a newer one is heard."""
    state = State(machine)
    state.elect(0, (1, 2))
    state.stream(0, 1, ())
    state.stream(0, 2, ())
    for _ in range(3):
        state.put(0)

    # The next leader confirms a record that only the replica without its disk has seen.
    state.elect(2, (1,))
    state.stream(2, 1, ())
    assert state.confirmed == (1, 2)
    state.lose_disk(1)
    state.stream(0, 1, ())
    # The older log is longer than the end that the newer leader names.
    for _ in range(2):
        state.beat(2, (0, 1))
    state.elect(0, (1,))
    return state


def power_loss_of_an_elected_replica(machine: type[ElectionMachine]) -> Script:
    """A replica without its disk gets the log and is elected by all. The power fails before it has synced anything."""
    script = Script(3, machine)
    world = script.world
    script.run(5_000)
    leader = script.leader()
    lost, third = [each for each in script.nodes if each is not leader]
    world.put(leader)
    script.run(500, leader.id, lost.id)
    confirmed = len(world.confirmed)
    assert confirmed == len(leader.log.data) > len(third.log.data)

    world.lose_disk(lost)
    lost.is_disk_stalled = True
    world.start(lost)
    script.run(1_000, leader.id, lost.id)
    assert len(lost.log.data) == confirmed
    # Its leader has ended, and no other replica asks for votes meanwhile. Its log reaches none.
    world.stop(leader)
    world.start(leader)
    world.now += 2_000
    world.tick_node(lost)
    while script.state(lost.id) is not ElectionState.LEADER:
        packets, world.network[:] = list(world.network), []
        assert packets
        script.deliver(packets)
    world.network.clear()

    world.rng = KeepsNothing(7)
    world.lose_power(lost)
    world.stop(leader)
    lost.is_disk_stalled = False
    world.start(lost)
    script.run(10_000, lost.id, third.id)
    return script


class KeepsNothing(random.Random):
    """A power loss takes everything that was not synced."""

    def randint(self, a: int, b: int) -> int:
        return a


SCHEDULES: dict[type[ElectionMachine], Callable[[type[ElectionMachine]], Script | State]] = {
    CountsVotesOfEarlierEpochs: vote_of_an_earlier_epoch,
    JoinsAfterAMajority: vote_of_a_lost_disk,
    JoinsByAnEarlierMatch: match_with_an_earlier_leader,
    CompleteBeforeItsSync: power_loss_of_an_elected_replica,
}
