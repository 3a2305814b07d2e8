"""A replica of which a sync has failed leads no more and stores nothing more, and votes: so a sound one can lead."""

from __future__ import annotations

import pytest

from raymq.replication import election as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine, ElectionState
from tests.replication.simulate import mutants
from tests.replication.simulate.schedules import Script
from tests.replication.simulate.store import Broken
from tests.replication.simulate.world import Node
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


def test_a_replica_whose_sync_failed_votes_for_no_log_that_lacks_what_it_had_synced():
    script = Script(3, ElectionMachine)
    first = run_and_put(script)
    lagging, other = [node for node in script.nodes if node is not first]
    # What is confirmed now is not at the lagging replica.
    script.world.put(first)
    script.run(1_000, first.id, other.id)
    for node in (first, other):
        fail(script, node)
    script.run(20_000)
    assert lagging.replica is not None
    assert lagging.replica.state is not ElectionState.LEADER


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
