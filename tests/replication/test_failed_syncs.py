"""A replica of which a sync has failed leads no more and stores nothing. It votes, and gives what it had synced."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import ElectionState
from tests.replication.simulate import mutants
from tests.replication.simulate.schedules import Script
from tests.replication.simulate.store import Broken
from tests.replication.simulate.world import CopyStep, Node
from tests.replication.test_election import follower, leader


def fail(script: Script, node: Node) -> None:
    """A sync fails, and its processes run on."""
    log = node.log
    is_kept = log.synced_end >= log.durable()
    node.failed_end = log.synced_end
    script.world.step(node, r.OwnSyncFailed(is_complete=is_kept))


def run_and_put(script: Script) -> Node:
    """Returns: the leader, whose message all replicas have."""
    script.run(5_000)
    script.world.put(script.leader())
    script.run(1_000)
    assert script.world.acks
    return script.leader()


def test_the_third_replica_leads_after_the_syncs_of_two_failed_one_after_the_other():
    script = Script(3, ElectionMachine)
    first = run_and_put(script)
    fail(script, first)
    script.run(8_000)
    second = script.leader()
    assert second is not first
    fail(script, second)
    script.run(8_000)
    third = script.leader()
    assert third not in (first, second)

    # No other one could lead, although its log streams reach no majority.
    elections = script.world.elections
    script.run(300_000)
    assert script.leader() is third
    assert script.world.elections == elections


def test_writes_go_on_once_one_of_both_begins_again():
    script = Script(3, ElectionMachine)
    first = run_and_put(script)
    fail(script, first)
    script.run(8_000)
    second = script.leader()
    fail(script, second)
    script.run(8_000)

    script.world.lose_disk(first)
    script.world.start(first)
    script.run(8_000)
    assert first.replica is not None
    assert first.replica.ballot.is_complete
    confirmations = script.world.confirmations
    script.world.put(script.leader())
    script.run(1_000)
    assert script.world.confirmations > confirmations


class Lagging:
    """The syncs of two replicas of three have failed, and the third one lacks what both had confirmed."""

    def __init__(
        self,
        machine: type[ElectionMachine] = ElectionMachine,
        *,
        puts: int = 1,
        flush: str = "sync",
    ) -> None:
        self.script = Script(3, machine, flush=flush)
        self.world = self.script.world
        self.first = run_and_put(self.script)
        self.lagging, self.other = [node for node in self.script.nodes if node is not self.first]
        for _ in range(puts):
            self.world.put(self.first)
            self.script.run(100, self.first.id, self.other.id)
        self.confirmed = len(self.world.confirmed)
        assert len(self.lagging.log.data) < self.confirmed

    def fail_both(self) -> None:
        for node in (self.first, self.other):
            fail(self.script, node)


def test_a_replica_whose_sync_failed_votes_for_no_log_that_lacks_what_it_had_synced():
    shard = Lagging(mutants.CopiesNothing)
    shard.fail_both()
    shard.script.run(60_000)
    assert shard.script.state(shard.lagging.id) is not ElectionState.LEADER


@pytest.mark.parametrize("puts", [1, 40], ids=["one record", "several segments"])
def test_the_third_replica_copies_what_it_lacks_from_those_that_cannot_lead_and_leads(puts: int):
    shard = Lagging(puts=puts)
    shard.fail_both()
    shard.script.run(10_000)
    assert shard.script.leader() is shard.lagging
    assert shard.lagging.log.equals(shard.world.confirmed)
    assert len(shard.lagging.log.data) > shard.confirmed


def test_a_record_that_only_an_earlier_leader_had_gives_way_to_the_copied_ones():
    shard = Lagging()
    script, world = shard.script, shard.world
    # The lagging replica leads, and no other one gets what it is sent.
    script.run(10_000)
    world.step(shard.first, r.HandOver(shard.lagging.id))
    script.run(2_000)
    assert script.leader() is shard.lagging
    world.put(shard.lagging)
    end = len(shard.lagging.log.data)
    private = bytes(shard.lagging.log.data)
    world.network.clear()
    script.run(10_000, shard.first.id, shard.other.id)
    world.put(next(node for node in (shard.first, shard.other) if node.takes_puts))
    script.run(500, shard.first.id, shard.other.id)
    shard.fail_both()

    script.run(60_000)
    assert script.leader() is shard.lagging
    assert shard.lagging.log.equals(world.confirmed)
    assert bytes(shard.lagging.log.data[:end]) != private


def test_of_a_log_that_lacks_what_was_reported_as_durable_nothing_is_copied():
    shard = Lagging(flush="async")
    for node in (shard.first, shard.other):
        # What was written was reported.
        node.log.synced_end -= 1
    shard.fail_both()
    shard.script.run(60_000)
    assert shard.script.state(shard.lagging.id) is not ElectionState.LEADER
    assert len(shard.lagging.log.data) < shard.confirmed


@pytest.mark.parametrize("machine", [ElectionMachine, mutants.CopiesOverANewerLog])
def test_a_copy_that_comes_late_replaces_nothing_that_a_later_leader_has_confirmed(
    machine: type[ElectionMachine],
):
    script = Script(5, machine)
    world = script.world
    first = run_and_put(script)
    lagging, failed, *others = [node for node in script.nodes if node is not first]
    # One replica syncs more than all the others, and no leader confirms it.
    world.put(first)
    script.run(100, first.id, failed.id)
    fail(script, failed)
    world.stop(first)
    while not any(isinstance(each.event, CopyStep) for each in world.network):
        world.now += 50
        world.tick_node(lagging)
        packets, world.network[:] = list(world.network), []
        script.deliver(
            each for each in packets if {each.source, each.target} <= {failed.id, lagging.id}
        )
    late = [each for each in world.network if isinstance(each.event, CopyStep)]
    world.network.clear()

    # Meanwhile a leader without these bytes is elected, and the others confirm its records.
    ids = [lagging.id, *(node.id for node in others)]
    world.step(others[0], r.ElectionTick(0.0))
    script.run(20_000, *ids)
    leader = script.leader()
    for _ in range(3):
        world.put(leader)
        script.run(200, *ids)
    confirmed = len(world.confirmed)
    assert lagging.log.confirmed_end > 0

    # The answers come once this replica, which follows, hears no leader.
    script.run(20_000, lagging.id)
    world.network[:] = late

    def answer() -> None:
        for _ in range(20):
            packets, world.network[:] = list(world.network), []
            script.deliver(each for each in packets if isinstance(each.event, CopyStep))

    if machine is ElectionMachine:
        answer()
        assert len(lagging.log.data) >= confirmed
        assert lagging.log.equals(world.confirmed)
    else:
        with pytest.raises(Broken, match="below this follower's confirmed offset"):
            answer()


def test_only_a_replica_that_cannot_lead_offers_its_log_and_only_to_one_that_lacks_some_of_it():
    def asked(voter: Any, end: int) -> wire.PreVoteReply:
        voter.effects.clear()
        voter.hear(2, wire.PreVote(1, 1, end))
        (reply,) = voter.sent(wire.PreVoteReply)
        return reply.message

    sound = follower()
    assert asked(sound, 0)[3:] == (0, 0)
    failed = follower()
    failed.step(r.OwnSyncFailed())
    # Of which epoch its last byte is may not be known.
    assert asked(failed, 0)[3:] == (0, 0)
    failed.log = failed.log._replace(offered=(1, 120))
    assert asked(failed, 0)[3:] == (1, 120)
    assert asked(failed, 1 << 40)[3:] == (0, 0)
    incomplete = follower()
    incomplete.step(r.OwnSyncFailed(is_complete=False))
    incomplete.log = incomplete.log._replace(offered=(1, 120))
    assert asked(incomplete, 0)[3:] == (0, 0)


@pytest.mark.parametrize("machine", [ElectionMachine, mutants.StaysCompleteAfterAFailedSync])
def test_with_async_flush_a_failed_sync_may_have_lost_what_was_acknowledged(
    machine: type[ElectionMachine],
):
    script = Script(3, machine, flush="async")
    first = run_and_put(script)
    failed, lagging = [node for node in script.nodes if node is not first]
    acks = script.world.acks
    script.world.put(first)
    for _ in range(20):
        # Nothing is synced, and one replica is cut off.
        script.world.now += 50
        for node in (first, failed):
            script.world.tick_node(node)
        packets, script.world.network[:] = list(script.world.network), []
        script.deliver(each for each in packets if lagging.id not in (each.source, each.target))
    assert script.world.acks > acks
    fail(script, failed)
    script.world.stop(first)

    if machine is ElectionMachine:
        script.run(30_000, failed.id, lagging.id)
        assert script.state(lagging.id) is not ElectionState.LEADER
    else:
        with pytest.raises(Broken, match="lacks confirmed bytes"):
            script.run(30_000, failed.id, lagging.id)


def test_a_replica_whose_sync_failed_says_whom_it_cannot_call():
    script = Script(3, ElectionMachine)
    first = run_and_put(script)
    sound, other = [node for node in script.nodes if node is not first]
    fail(script, other)
    script.world.close_server(first, range(3))
    script.run(60_000)
    assert script.leader() is sound


def test_a_replica_whose_sync_failed_asks_for_no_votes_when_the_leader_asks_it_to():
    replica = follower()
    replica.step(r.OwnSyncFailed())
    replica.effects.clear()
    replica.hear(0, wire.TakeOver(), epoch=5)
    assert not replica.sent(wire.RequestVote)
    assert replica.machine.state is ElectionState.FOLLOWER


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_failed_sync_of_what_was_reported_as_durable_makes_a_replica_incomplete_on_disk(
    is_complete: bool,
):
    replica = leader()
    replica.effects.clear()
    replica.step(r.OwnSyncFailed(is_complete=is_complete))
    persisted = [each.ballot.is_complete for each in replica.had(r.Persist)]
    assert persisted == ([] if is_complete else [False])
    assert replica.had(r.StepDown)
