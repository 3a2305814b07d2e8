"""Schedules of several replicas that random runs find too rarely, step by step in the simulator's world."""

from __future__ import annotations

import random
from collections.abc import Callable

from raymq.replication import election as r
from raymq.replication import wire
from raymq.replication.election import ElectionState
from tests.replication.simulate.world import Node, Packet, World


class Schedule:
    """A world whose packets move only among the replicas that a test lets run."""

    def __init__(self, members: int) -> None:
        self.world = World(members, random.Random(7))
        self.nodes = self.world.nodes

    def run(self, ms: int, *replicas: int) -> None:
        """Time passes for these replicas. Packets of others are lost."""
        nodes = [self.nodes[replica] for replica in replicas] or self.nodes
        for _ in range(ms // 50):
            self.world.now += 50
            for node in nodes:
                self.world.tick_node(node)
            for _ in range(5):
                self.exchange(nodes)
                for node in nodes:
                    self.world.sync(node)

    def exchange(self, nodes: list[Node]) -> None:
        """Deliver what is under way among these replicas, and lose the rest."""
        ids = {node.id for node in nodes}
        for packet in self.take(lambda _: True):
            if {packet.source, packet.target} <= ids:
                self.world.deliver(packet)

    def take(self, wanted: Callable[[Packet], bool]) -> list[Packet]:
        """Take packets out of the network."""
        taken = [packet for packet in self.world.network if wanted(packet)]
        self.world.network[:] = [packet for packet in self.world.network if not wanted(packet)]
        return taken

    def take_messages(self, kind: type[wire.Election], *, source: int, target: int) -> list[Packet]:
        return self.take(
            lambda packet: (
                (packet.source, packet.target) == (source, target)
                and isinstance(packet.event, r.Received)
                and isinstance(packet.event.message, kind)
            )
        )

    def deliver(self, packets: list[Packet]) -> None:
        for packet in packets:
            self.world.deliver(packet)

    def state(self, replica: int) -> ElectionState:
        machine = self.nodes[replica].replica
        assert machine is not None
        return machine.state


def test_a_vote_given_before_the_disk_was_lost_makes_no_leader_without_confirmed_records():
    schedule = Schedule(5)
    world, nodes = schedule.world, schedule.nodes
    schedule.run(5_000)
    (leading,) = [node for node in nodes if node.replica and node.replica.leads]
    lost, third, voter, candidate = [node for node in nodes if node is not leading]
    ids = [node.id for node in (leading, lost, third, voter)]
    assert leading.log.confirmed_end == len(leading.log.data)

    # The candidate hears no leader for a while, and its election is the first that is due. It gets one vote, whose
    # answer takes long, and so does its next request.
    world.now += 1_500
    assert candidate.replica is not None
    candidate.replica._election_ms = world.now
    world.step(candidate, r.ElectionTick(0.0))
    schedule.take(lambda packet: packet.target not in (candidate.id, lost.id, voter.id))
    for node in (lost, voter):
        schedule.deliver(schedule.take_messages(wire.PreVote, source=candidate.id, target=node.id))
        schedule.deliver(
            schedule.take_messages(wire.PreVoteReply, source=node.id, target=candidate.id)
        )
    assert schedule.state(candidate.id) is ElectionState.CANDIDATE
    schedule.deliver(schedule.take_messages(wire.RequestVote, source=candidate.id, target=lost.id))
    given = schedule.take_messages(wire.VoteReply, source=lost.id, target=candidate.id)
    request = schedule.take_messages(wire.RequestVote, source=candidate.id, target=voter.id)
    assert given
    assert request

    # The disk of the replica that voted is lost, and that replica finds the leader of the epoch before.
    world.lose_disk(lost)
    world.start(lost)
    schedule.run(500, *ids)
    # It cannot be complete while its forgotten vote may count.
    assert leading.replica is not None
    assert leading.replica.leads
    assert not lost.ballot.is_complete

    # If it were, this record would be confirmed without the candidate and its second voter.
    world.put(leading)
    schedule.run(500, leading.id, lost.id, third.id)
    schedule.deliver(request)
    schedule.deliver(schedule.take_messages(wire.VoteReply, source=voter.id, target=candidate.id))
    schedule.deliver(given)
    assert schedule.state(candidate.id) is ElectionState.LEADER

    schedule.run(5_000)
    assert all(node.ballot.is_complete for node in nodes)
