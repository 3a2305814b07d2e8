"""Single schedules: the machine keeps its invariants, and a machine without the rule breaks one."""

from __future__ import annotations

import pytest

from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import CheckAsked, ElectionState, HandOver
from tests.replication.simulate.schedules import (
    SCHEDULES,
    Script,
    match_with_an_earlier_leader,
    power_loss_of_an_elected_replica,
    vote_of_a_lost_disk,
    vote_of_an_earlier_epoch,
)
from tests.replication.simulate.store import Broken


@pytest.mark.parametrize("machine", SCHEDULES)
def test_a_machine_without_the_rule_breaks_an_invariant(machine: type[ElectionMachine]):
    with pytest.raises(Broken, match=r"lacks confirmed|has the leaders"):
        SCHEDULES[machine](machine)


def heal(script: Script) -> None:
    script.run(10_000)
    assert script.leader().log.confirmed_end == len(script.leader().log.data)
    assert len({bytes(node.log.data) for node in script.nodes}) == 1
    assert all(node.ballot.is_complete for node in script.nodes)


def test_a_vote_counts_only_in_its_epoch():
    heal(vote_of_an_earlier_epoch(ElectionMachine))


def test_a_vote_given_before_the_disk_was_lost_makes_no_leader_without_confirmed_records():
    heal(vote_of_a_lost_disk(ElectionMachine))


def test_a_match_with_an_earlier_leader_makes_no_replica_complete():
    state = match_with_an_earlier_leader(ElectionMachine)
    assert not state.members[1].ballot.is_complete
    assert state.confirmed == (1, 2)


def test_an_elected_replica_that_lost_its_log_again_is_not_complete():
    script = power_loss_of_an_elected_replica(ElectionMachine)
    assert not any(node.replica and node.replica.leads for node in script.nodes)
    (down,) = [node for node in script.nodes if not node.is_up]
    script.world.start(down)
    heal(script)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_leader_stays_although_its_replication_hangs_for_some_seconds(members: int):
    script = Script(members, ElectionMachine)
    script.run(5_000)
    leader = script.leader()
    leader.is_streaming, leader.replication_hangs = False, True
    leader.stop_streams()
    script.run(8_000)
    assert script.leader() is leader
    assert script.world.elections == 1

    leader.is_streaming = True
    script.world.stream(leader)
    script.world.put(leader)
    script.run(1_000)
    assert leader.log.confirmed_end == len(leader.log.data)
    assert script.world.elections == 1


@pytest.mark.parametrize("members", [2, 3, 5])
def test_another_replica_leads_within_two_seconds_when_a_replication_has_ended(members: int):
    script = Script(members, ElectionMachine)
    script.run(5_000)
    leader = script.leader()
    leader.is_streaming = False
    leader.stop_streams()
    # Of messages that are under way, some take a while.
    script.run(2_000)
    assert script.leader() is not leader
    assert script.world.elections == 2
    heal(script)


def test_a_leader_that_alone_could_lead_stays_without_its_replication():
    script = Script(3, ElectionMachine)
    script.run(5_000)
    leader = script.leader()
    other = next(node for node in script.nodes if node is not leader)
    other.is_paused = True
    script.run(3_000)
    leader = script.leader()
    leader.is_streaming = False
    leader.stop_streams()
    elections = script.world.elections
    for _ in range(5):
        script.world.put(leader)
    script.run(9_000)
    assert script.leader() is leader
    assert script.world.elections == elections


@pytest.mark.parametrize("members", [2, 3, 5])
def test_another_replica_leads_when_a_replication_hangs_for_good(members: int):
    script = Script(members, ElectionMachine)
    script.run(5_000)
    leader = script.leader()
    leader.is_streaming, leader.replication_hangs = False, True
    leader.stop_streams()
    script.run(15_000)
    assert script.leader() is not leader
    heal(script)


@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_hand_over_takes_no_longer_than_a_heartbeat(members: int, is_lost: bool):
    script = Script(members, ElectionMachine)
    script.run(5_000)
    leader = script.leader()
    successor = script.nodes[leader.id - 1]
    script.world.step(leader, HandOver(successor.id))
    if is_lost:
        script.take(wire.TakeOver, leader.id, successor.id)
    script.world.put(leader)
    script.run(350)
    assert script.leader() is successor
    assert script.world.elections == 2
    heal(script)


@pytest.mark.parametrize("members", [3, 5])
@pytest.mark.parametrize("has_lost_disks", [False, True])
def test_a_leader_that_was_replaced_unheard_answers_no_reader(members: int, has_lost_disks: bool):
    script = Script(members, ElectionMachine)
    world = script.world
    script.run(5_000)
    old = script.leader()
    replica = old.replica
    assert replica is not None
    # It does not run, while the others elect another leader, which confirms its EPOCH record.
    others = [node for node in script.nodes if node is not old]
    script.run(5_000, *(node.id for node in others))
    assert max(world.confirmed_ends) > replica.epoch
    assert replica.state is ElectionState.LEADER

    (new,) = [node for node in others if node.replica and node.replica.leads]
    reached = [node for node in others if node is not new][: members // 2]
    if has_lost_disks:
        # These replicas have forgotten the newer epoch.
        for node in reached:
            world.lose_disk(node)
            world.start(node)
    world.network.clear()
    world.step(old, CheckAsked())
    check = replica.check_number
    for node in reached:
        script.deliver(script.take(wire.CheckLeader, old.id, node.id))
    ids = {node.id for node in reached}
    script.deliver([each for each in world.network if each.source in ids and each.target == old.id])
    assert (replica.state is ElectionState.LEADER) == has_lost_disks
    assert not replica.led_at(check)
    if has_lost_disks:
        assert len(replica._answered_since(check)) > members // 2
