"""A leader whose Replication has ended lets another one lead; a candidate without one waits for those that have one."""

from __future__ import annotations

import pytest

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election_events import Ballot, ElectionState
from raymq.replication.election_limits import ElectionLimits
from raymq.replication.wire import ReplicaProcess
from tests.replication.test_election import Replica, follower, leader, process, win

LIMITS = ElectionLimits()


def lose_streams(replica: Replica, *, answers: dict[int, bool], ms: int) -> None:
    """Its Replication ends, and time passes. Args: `answers`: replica -> whether it could stream, in each check."""
    replica.log = replica.log._replace(can_stream=False)
    for _ in range(0, ms, LIMITS.heartbeat_ms):
        for other, can_stream in answers.items():
            number = replica.machine.check_number
            replica.hear(other, wire.CheckLeaderReply(number, True, can_stream))
        replica.tick(LIMITS.heartbeat_ms)


def leaderless(**options) -> Replica:
    """Replica 1, which heard replica 0 lead, and hears no heartbeat any more."""
    replica = follower(**options)
    replica.now_ms += LIMITS.election_ms
    replica.effects = []
    return replica


def led(**ends: int) -> Replica:
    """Replica 0 leads, and the others hold its log up to these ends."""
    replica = leader()
    replica.tick(LIMITS.heartbeat_ms)
    for name, end in ends.items():
        replica.step(r.FollowerHeard(int(name[1:]), replica.machine.epoch, end, True))
    replica.effects = []
    return replica


def test_a_leader_whose_replication_has_ended_lets_the_best_replica_that_has_one_lead() -> None:
    replica = led(r1=110, r2=119)
    epoch = replica.machine.epoch
    lose_streams(replica, answers={1: True, 2: True}, ms=3 * LIMITS.streams_lost_ms)
    assert replica.machine.state is ElectionState.FOLLOWER
    (down,) = replica.had(r.StepDown)
    assert "Replication" in down.reason
    assert replica.sent(wire.TakeOver) == [
        r.SendElection(ReplicaProcess(2, 0), epoch, wire.TakeOver())
    ]


def test_a_leader_stays_if_no_majority_would_vote_for_the_replica_that_could_stream() -> None:
    # Replica 1 is away, and this log is longer than that of replica 2.
    replica = led(r2=119)
    lose_streams(replica, answers={2: True}, ms=4 * LIMITS.streams_lost_ms)
    assert replica.machine.leads
    replica.step(r.FollowerHeard(2, replica.machine.epoch, 120, True))
    lose_streams(replica, answers={2: True}, ms=LIMITS.streams_lost_ms)
    assert not replica.machine.leads


def test_leaderships_without_streams_in_a_row_last_twice_as_long() -> None:
    replica = led(r1=120, r2=120)
    waits = []
    for _ in range(3):
        replica.log = replica.log._replace(can_stream=False)
        began_ms = replica.now_ms
        while replica.machine.leads:
            lose_streams(replica, answers={1: True, 2: True}, ms=LIMITS.heartbeat_ms)
        waits.append(replica.now_ms - began_ms)
        win(replica)
        replica.log = replica.log._replace(can_stream=False)
    assert waits[2] > 1.5 * waits[1] > waits[0]


def test_a_leader_stays_while_no_other_replica_could_stream() -> None:
    replica = led(r1=120, r2=120)
    lose_streams(replica, answers={1: False, 2: False}, ms=4 * LIMITS.streams_lost_ms)
    assert replica.machine.leads
    lose_streams(replica, answers={1: False, 2: True}, ms=LIMITS.streams_lost_ms)
    assert not replica.machine.leads
    assert [each.addressee.id for each in replica.sent(wire.TakeOver)] == [2]


def test_a_replication_that_returns_in_time_changes_nothing() -> None:
    replica = led(r1=120, r2=120)
    for _ in range(5):
        lose_streams(replica, answers={1: True, 2: True}, ms=LIMITS.heartbeat_ms)
        replica.log = replica.log._replace(can_stream=True)
        replica.tick(LIMITS.heartbeat_ms)
    assert replica.machine.leads


def test_a_leader_that_has_just_started_waits_longer_for_its_replication() -> None:
    replica = Replica(0)
    replica.log = replica.log._replace(can_stream=False)
    replica.tick(4 * LIMITS.election_ms)
    replica.hear(1, wire.PreVoteReply(replica.machine._question, True, True))
    replica.hear(1, wire.VoteReply(True, True))
    replica.step(r.EpochBegun(replica.machine.epoch, 120))
    lose_streams(replica, answers={1: True, 2: False}, ms=2 * LIMITS.streams_lost_ms)
    assert replica.machine.leads
    lose_streams(replica, answers={1: True, 2: False}, ms=LIMITS.streams_missing_ms)
    assert not replica.machine.leads


@pytest.mark.parametrize("members", [1, 2])
def test_a_sole_candidate_leads_on_without_replication(members: int) -> None:
    replica = Replica(0, members, candidates=(0,))
    replica.step(r.EpochBegun(replica.machine.epoch, 120))
    lose_streams(replica, answers={}, ms=4 * LIMITS.streams_missing_ms)
    assert replica.machine.state is ElectionState.LEADER


@pytest.mark.parametrize(
    ("candidate_streams", "voter_streams"), [(True, True), (False, True), (False, False)]
)
def test_a_candidate_that_could_not_stream_gets_no_vote_of_one_that_could(
    candidate_streams: bool, voter_streams: bool
) -> None:
    voter = leaderless()
    voter.log = voter.log._replace(can_stream=voter_streams)
    voter.hear(0, wire.PreVote(1, 1, 100, candidate_streams))
    granted = candidate_streams or not voter_streams
    assert [each.message.granted for each in voter.sent(wire.PreVoteReply)] == [granted]


@pytest.mark.parametrize("fault", ["shorter log", "not complete", "disk"])
def test_a_voter_that_could_not_lead_votes_for_a_candidate_that_could_not_stream(
    fault: str,
) -> None:
    voter = leaderless(ballot=Ballot(1, is_complete=fault != "not complete"))
    if fault == "shorter log":
        voter.log = voter.log._replace(end=90, durable=90)
    if fault == "disk":
        voter.log = voter.log._replace(is_writable=False)
    voter.hear(0, wire.PreVote(1, 1, 100, False))
    assert [each.message.granted for each in voter.sent(wire.PreVoteReply)] == [True]


def test_when_all_replicas_start_the_preferred_one_leads_although_its_replication_comes_later():
    voter = Replica(1)
    voter.hear(0, wire.PreVote(1, 1, 100, False))
    assert [each.message.granted for each in voter.sent(wire.PreVoteReply)] == [True]


def test_a_replica_that_could_not_stream_does_not_take_over() -> None:
    for can_stream in (True, False):
        replica = follower()
        replica.log = replica.log._replace(can_stream=can_stream)
        replica.hear(0, wire.TakeOver())
        is_candidate = replica.machine.state is ElectionState.CANDIDATE
        assert is_candidate is can_stream


def test_a_hand_over_goes_to_no_replica_that_could_not_stream() -> None:
    replica = led(r1=110, r2=119)
    assert replica.machine.best_successor() == 2
    replica.hear(2, wire.CheckLeaderReply(replica.machine.check_number, True, False))
    assert replica.machine.best_successor() == 1


def test_a_follower_says_whether_it_could_stream() -> None:
    replica = follower()
    replica.sent(wire.CheckLeaderReply)
    replica.log = replica.log._replace(can_stream=False)
    replica.hear(0, wire.CheckLeader(2))
    assert replica.sent(wire.CheckLeaderReply) == [
        r.SendElection(process(0), 5, wire.CheckLeaderReply(2, True, False))
    ]
