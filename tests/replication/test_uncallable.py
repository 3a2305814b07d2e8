"""A replica whose server no majority can call leads only while no other one could. Its own calls reach the others."""

from __future__ import annotations

import pytest

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import Ballot, ElectionState
from raymq.replication.election_limits import ElectionLimits
from tests.replication.simulate.schedules import Script
from tests.replication.test_election import Replica, follower, leader, process, win

LIMITS = ElectionLimits()


def led(members: int = 3, **options) -> Replica:
    """Replica 0 leads, and the others have its log."""
    replica = leader(members, **options)
    replica.tick(LIMITS.heartbeat_ms)
    acknowledge(replica)
    replica.effects = []
    return replica


def acknowledge(replica: Replica) -> None:
    for other in replica.machine._others:
        event = r.FollowerHeard(other, replica.machine.epoch, replica.log.durable, True)
        replica.step(event)


def answer(replica: Replica, uncallable: dict[int, tuple[int, ...]], ms: int) -> None:
    """Time passes. Args: `uncallable`: replica -> those that it cannot call, as its answers to checks say."""
    for _ in range(0, ms, LIMITS.heartbeat_ms):
        for other, found in uncallable.items():
            number = replica.machine.check_number
            replica.hear(other, wire.CheckLeaderReply(number, True, True, found))
        acknowledge(replica)
        replica.tick(LIMITS.heartbeat_ms)


def leaderless(uncallable: set[int], **options) -> Replica:
    """Replica 1, which heard replica 0 lead, hears no heartbeat any more, and cannot call some others."""
    replica = follower(**options)
    replica.log = replica.log._replace(uncallable=frozenset(uncallable))
    replica.now_ms += LIMITS.election_ms
    replica.effects = []
    return replica


def asked(voter: Replica, candidate: int = 2) -> bool:
    """Whether the voter would vote for a candidate with the same log."""
    voter.hear(candidate, wire.PreVote(1, 1, 100, True))
    (reply,) = voter.sent(wire.PreVoteReply)
    assert isinstance(reply.message, wire.PreVoteReply)
    return reply.message.granted


# --- leaders --------------------------------------------------------------------------------------


def test_a_leader_that_no_majority_can_call_hands_over_to_one_that_it_can_call() -> None:
    replica = led()
    answer(replica, {1: (0,), 2: (0,)}, ms=LIMITS.uncalled_ms - LIMITS.heartbeat_ms)
    assert not replica.had(r.StopPuts)
    answer(replica, {1: (0,), 2: (0,)}, ms=2 * LIMITS.heartbeat_ms)
    (stop,) = replica.had(r.StopPuts)
    assert isinstance(stop, r.StopPuts)
    assert "certificate" in stop.reason
    assert {each.addressee.id for each in replica.sent(wire.TakeOver)} == {1}


@pytest.mark.parametrize(
    ("members", "uncallable"),
    [
        (3, {1: (), 2: (0,)}),
        (3, {2: (0,)}),
        (5, {1: (0,), 2: (0,), 3: (), 4: ()}),
        # No other is better off: none can call another one, or its votes would not reach it.
        (3, {1: (0, 2), 2: (0, 1)}),
        (5, {1: (0, 3, 4), 2: (0, 1, 3), 3: (0, 1, 2), 4: (0, 1, 2)}),
    ],
)
def test_a_leader_stays_while_a_majority_can_call_it_or_no_other_could_lead(
    members: int, uncallable: dict[int, tuple[int, ...]]
) -> None:
    replica = led(members)
    for _ in range(8):
        answer(replica, uncallable, ms=LIMITS.uncalled_ms)
    assert replica.machine.leads
    assert not replica.had(r.StopPuts)


def test_a_leader_that_none_can_call_hands_over_to_no_other_such_replica() -> None:
    replica = led(5)
    replica.log = replica.log._replace(uncallable=frozenset({1}))
    found = {1: (0,), 2: (0, 1), 3: (0, 1), 4: (0,)}
    answer(replica, found, ms=2 * LIMITS.uncalled_ms)
    assert {each.addressee.id for each in replica.sent(wire.TakeOver)} == {2}


def test_leaderships_in_a_row_that_none_could_call_last_twice_as_long() -> None:
    replica = led()
    waits = []
    for _ in range(3):
        began_ms = replica.now_ms
        while not replica.had(r.StopPuts) and replica.now_ms - began_ms < 60_000:
            answer(replica, {1: (0,), 2: (0,)}, ms=LIMITS.heartbeat_ms)
        waits.append(replica.now_ms - began_ms)
        replica.hear(1, wire.NewerEpoch(), epoch=replica.machine.epoch + 1)
        assert not replica.machine.leads
        win(replica)
        replica.effects = []
    assert waits[2] > 1.5 * waits[1] > 2 * waits[0]
    answer(replica, {1: (), 2: (0,)}, ms=LIMITS.heartbeat_ms)
    assert replica.machine._health.uncalled_leaderships == 0


def test_the_word_of_a_replica_that_is_silent_does_not_count() -> None:
    replica = led()
    answer(replica, {1: (0,), 2: (0,)}, ms=LIMITS.heartbeat_ms)
    answer(replica, {1: ()}, ms=LIMITS.majority_silence_ms + LIMITS.uncalled_ms)
    assert not replica.had(r.StopPuts)


@pytest.mark.parametrize("members", [1, 2])
def test_a_sole_candidate_leads_on_although_none_can_call_it(members: int) -> None:
    replica = Replica(0, members, candidates=(0,))
    replica.step(r.EpochBegun(replica.machine.epoch, 120))
    answer(replica, dict.fromkeys(range(1, members), (0,)), ms=4 * LIMITS.uncalled_ms)
    assert replica.machine.leads
    assert not replica.had(r.StopPuts)


def test_a_hand_over_goes_to_no_replica_that_no_majority_can_call() -> None:
    replica = led()
    assert replica.machine.best_successor() == 1
    replica.log = replica.log._replace(uncallable=frozenset({1}))
    answer(replica, {1: (), 2: ()}, ms=LIMITS.heartbeat_ms)
    assert replica.machine.best_successor() == 1
    answer(replica, {1: (), 2: (1,)}, ms=LIMITS.heartbeat_ms)
    assert replica.machine.best_successor() == 2


def test_a_leader_takes_puts_on_when_asked_to_hand_over_to_a_replica_that_it_cannot_call() -> None:
    replica = led()
    for _ in range(0, 2 * LIMITS.majority_silence_ms, LIMITS.heartbeat_ms):
        replica.tick(LIMITS.heartbeat_ms)
        replica.step(r.FollowerHeard(2, replica.machine.epoch, replica.log.durable, True))
    replica.log = replica.log._replace(uncallable=frozenset({1, 2}))
    replica.effects = []
    replica.step(r.HandOver(1))
    assert not replica.effects
    # Its log stream is open.
    replica.step(r.HandOver(2))
    assert replica.had(r.StopPuts)


def test_a_leader_that_none_can_call_steps_down_if_the_others_do_not_get_the_rest_of_its_log() -> (
    None
):
    replica = led()
    replica.log = replica.log._replace(end=200)
    answer(replica, {1: (0,), 2: (0,)}, ms=LIMITS.uncalled_ms + 2 * LIMITS.hand_over_ms)
    assert replica.had(r.ResumePuts)
    assert not replica.sent(wire.TakeOver)
    answer(replica, {1: (0,), 2: (0,)}, ms=2 * LIMITS.uncalled_ms)
    (down,) = replica.had(r.StepDown)
    assert isinstance(down, r.StepDown)
    assert "certificate" in down.reason
    assert [each.addressee.id for each in replica.sent(wire.TakeOver)] == [1]


def test_a_leader_that_can_open_no_connection_hands_over_by_those_that_are_open() -> None:
    replica = led()
    replica.log = replica.log._replace(uncallable=frozenset({1, 2}))
    answer(replica, {1: (0,), 2: (0,)}, ms=2 * LIMITS.uncalled_ms)
    assert {each.addressee.id for each in replica.sent(wire.TakeOver)} == {1}


def test_a_follower_says_which_replicas_it_cannot_call() -> None:
    replica = follower()
    replica.sent(wire.CheckLeaderReply)
    replica.log = replica.log._replace(uncallable=frozenset({2, 0}))
    replica.hear(0, wire.CheckLeader(2))
    assert replica.sent(wire.CheckLeaderReply) == [
        r.SendElection(process(0), 5, wire.CheckLeaderReply(2, True, True, (0, 2)))
    ]


# --- candidates -----------------------------------------------------------------------------------


def test_a_candidate_gets_no_vote_of_a_replica_that_cannot_call_it_and_could_lead() -> None:
    assert not asked(leaderless({2}))
    assert asked(leaderless({0}))


@pytest.mark.parametrize("fault", ["shorter log", "not complete", "disk", "streams", "calls"])
def test_a_replica_that_could_not_lead_votes_for_a_candidate_that_it_cannot_call(
    fault: str,
) -> None:
    ballot = Ballot(1, is_complete=fault != "not complete")
    voter = leaderless({0, 2} if fault == "calls" else {2}, ballot=ballot)
    if fault == "shorter log":
        voter.log = voter.log._replace(end=90, durable=90)
    if fault == "disk":
        voter.log = voter.log._replace(is_writable=False)
    if fault == "streams":
        voter.log = voter.log._replace(can_stream=False)
    assert asked(voter)


def test_a_candidate_that_none_can_call_gets_votes_after_some_seconds_without_a_leader() -> None:
    voter = leaderless({2})
    voter.machine._election_ms = 1 << 60
    assert not asked(voter)
    voter.now_ms += LIMITS.refuse_uncallable_ms
    assert not asked(voter)
    voter.now_ms += 1
    assert asked(voter)
    # After a leader it says no again.
    voter.hear(0, wire.CheckLeader(1), epoch=6)
    voter.now_ms += LIMITS.election_ms
    voter.machine._election_ms = 1 << 60
    voter.effects = []
    assert not asked(voter)


# --- a shard --------------------------------------------------------------------------------------


def started(members: int = 3, machine: type[ElectionMachine] = ElectionMachine) -> Script:
    script = Script(members, machine)
    script.run(5_000)
    return script


def store(script: Script) -> None:
    script.world.put(script.leader())
    script.run(1_000)
    assert script.leader().log.confirmed_end == len(script.leader().log.data)


@pytest.mark.parametrize("members", [3, 5])
def test_another_replica_leads_within_six_seconds_when_none_can_call_the_leader(
    members: int,
) -> None:
    script = started(members)
    store(script)
    former = script.leader()
    script.world.close_server(former, range(members))
    script.run(6_000)
    assert script.leader() is not former
    store(script)
    # It asks for votes without an end, and changes nothing.
    script.run(60_000)
    assert script.world.elections == 2

    script.world.closed_servers.clear()
    script.run(10_000)
    assert len({bytes(node.log.data) for node in script.nodes}) == 1
    assert script.world.elections == 2


def test_the_replica_that_none_can_call_does_not_lead_when_the_leader_dies() -> None:
    script = started(5)
    former = script.leader()
    uncallable = script.nodes[former.id - 1]
    script.world.close_server(uncallable, range(5))
    script.run(2_000)
    script.world.stop(former)
    alive = [node.id for node in script.nodes if node is not former]
    for _ in range(100):
        script.run(100, *alive)
        assert script.state(uncallable.id) is not ElectionState.LEADER
    assert script.leader()


def test_a_replica_that_none_can_call_leads_if_no_other_could() -> None:
    script = started()
    former = script.leader()
    uncallable = script.nodes[former.id - 1]
    script.world.close_server(uncallable, range(3))
    script.world.stop(former)
    alive = [node.id for node in script.nodes if node is not former]
    # The third replica cannot call it, and so gets no vote.
    script.run(10_000, *alive)
    assert script.leader() is uncallable
    elections = script.world.elections
    script.run(60_000, *alive)
    assert script.world.elections == elections
    assert script.leader() is uncallable


def test_replicas_of_which_each_can_call_only_the_next_one_have_a_leader() -> None:
    script = started()
    script.world.close_server(script.nodes[0], [1])
    script.world.close_server(script.nodes[1], [2])
    script.world.close_server(script.nodes[2], [0])
    script.world.stop(script.leader())
    for node in script.nodes:
        if not node.is_up:
            script.world.start(node)
    script.run(30_000)
    elections = script.world.elections
    assert script.leader()
    script.run(30_000)
    assert script.world.elections - elections <= 3


def test_a_leader_that_one_of_three_cannot_call_stays() -> None:
    script = started()
    former = script.leader()
    script.world.close_server(former, [script.nodes[former.id - 1].id])
    script.run(30_000)
    assert script.leader() is former
    assert script.world.elections == 1
