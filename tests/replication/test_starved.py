"""Replicas whose messages and processes are late, as on a machine that is short of CPU: elections take their time.

RAYMQ_SIMULATED_STEPS in the environment multiplies the number of simulated runs.
"""

from __future__ import annotations

import random

import pytest

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.delays import CallTimeout, SlowestDelay
from raymq.replication.election_events import ElectionState
from raymq.replication.election_limits import ElectionLimits
from tests.replication.simulate import mutants
from tests.replication.simulate.starved import run_starved
from tests.replication.simulate.store import Broken
from tests.replication.test_election import Replica, follower, leader
from tests.support import tier

LIMITS = ElectionLimits()
RUNS = {3: 6, 5: 3}
FACTOR = tier.share("RAYMQ_SIMULATED_STEPS", quick=0.2)
#: how late each message comes
LATE_MS = 3_000


def hear_late_heartbeats(replica: Replica, count: int) -> None:
    for number in range(count):
        replica.now_ms += LIMITS.heartbeat_ms + LATE_MS
        replica.hear(0, wire.CheckLeader(2 + number))


def waits_ms(replica: Replica) -> int:
    """How long a follower waits for the next heartbeat before it asks for votes."""
    replica.effects.clear()
    begun_ms = replica.now_ms
    while not replica.had(r.SendElection):
        replica.tick(50)
    return replica.now_ms - begun_ms


@pytest.mark.parametrize("members", RUNS)
def test_replicas_that_are_seconds_late_keep_their_leader_and_replace_one_that_ends(members: int):
    changes, failover_ms = run_starved(
        range(round(RUNS[members] * FACTOR)), members=members, loads=4
    )
    print(f"{members} replicas: the longest failover takes {failover_ms} ms")
    assert changes == 0
    assert failover_ms > 0


@pytest.mark.thorough
def test_late_replicas_find_a_machine_whose_times_do_not_follow():
    def is_found(seed: int) -> bool:
        try:
            return run_starved(range(seed, seed + 1), members=3, loads=4, machine=fixed)[0] > 0
        except Broken:
            return True

    fixed = mutants.KeepsItsTimes
    assert any(is_found(seed) for seed in range(20))


def test_a_follower_of_a_leader_that_is_heard_late_waits_longer():
    replica = follower()
    assert waits_ms(replica) == LIMITS.election_ms

    replica = follower()
    hear_late_heartbeats(replica, 5)
    assert waits_ms(replica) > 2 * LATE_MS


def test_a_follower_that_hears_a_late_leader_refuses_its_vote_for_longer():
    replica = follower()
    hear_late_heartbeats(replica, 5)
    replica.now_ms += LATE_MS
    replica.hear(2, wire.PreVote(1, 9, 1_000))
    (answer,) = replica.sent(wire.PreVoteReply)
    assert not answer.message.granted


def test_one_long_silence_of_a_leader_counts_as_a_short_one():
    # As after a cut that was mended.
    replica = follower()
    replica.now_ms += 600_000
    replica.hear(0, wire.CheckLeader(2))
    assert waits_ms(replica) <= LIMITS.election_ms + 2 * LIMITS.delay_step_ms


def test_a_follower_soon_waits_as_before_when_its_leader_is_in_time_again():
    replica = follower()
    hear_late_heartbeats(replica, 5)
    for number in range(6 * LIMITS.delay_halving_ms // LIMITS.heartbeat_ms):
        replica.now_ms += LIMITS.heartbeat_ms
        replica.hear(0, wire.CheckLeader(20 + number))
    assert waits_ms(replica) < LIMITS.election_ms + 200


def test_a_heartbeat_of_another_leader_ends_no_delay():
    replica = follower()
    replica.now_ms += 1_500
    replica.hear(2, wire.CheckLeader(1), epoch=6)
    assert waits_ms(replica) == LIMITS.election_ms


def test_a_leader_that_is_elected_again_was_not_late_meanwhile():
    replica = follower()
    replica.now_ms += 1_500
    replica.hear(0, wire.CheckLeader(1), epoch=6)
    assert waits_ms(replica) == LIMITS.election_ms


def test_a_heartbeat_of_an_epoch_that_is_over_shows_how_late_its_leader_is():
    replica = follower()
    replica.now_ms += 1_500
    replica.hear(2, wire.RequestVote(9, 1_000), epoch=6)
    replica.hear(0, wire.CheckLeader(2), epoch=5)
    replica.hear(2, wire.CheckLeader(1), epoch=6)
    assert waits_ms(replica) == LIMITS.election_ms + 2 * LIMITS.delay_step_ms


def test_a_leader_that_gets_late_answers_of_a_majority_stays():
    replica = leader(5)
    for gap_ms in (1_000, 1_800, 2_600, LATE_MS):
        for _ in range(0, gap_ms, 100):
            replica.tick(100)
        number = replica.machine.check_number
        for other in (1, 2):
            replica.hear(other, wire.CheckLeaderReply(number, True))
    assert replica.machine.leads


@pytest.mark.parametrize("answering", [(), (1,)])
def test_a_leader_of_five_that_hears_too_few_steps_down_in_time(answering: tuple[int, ...]):
    replica = leader(5)
    for _ in range(10):
        replica.tick(LIMITS.heartbeat_ms)
        for other in (1, 2, 3, 4):
            replica.hear(other, wire.CheckLeaderReply(replica.machine.check_number, True))
    begun_ms = replica.now_ms
    while replica.machine.leads:
        replica.tick(100)
        for other in answering:
            replica.hear(other, wire.CheckLeaderReply(replica.machine.check_number, True))
    assert replica.now_ms - begun_ms <= LIMITS.majority_silence_ms + 100


def test_late_answers_of_one_of_two_followers_tell_a_leader_nothing():
    replica = leader()
    for _ in range(20):
        replica.tick(LIMITS.heartbeat_ms)
        replica.hear(1, wire.CheckLeaderReply(replica.machine.check_number, True))
    replica.hear(2, wire.CheckLeaderReply(1, True))
    for _ in range(LIMITS.majority_silence_ms // 100 + 1):
        replica.tick(100)
    assert not replica.machine.leads


def test_an_answer_to_an_earlier_question_makes_a_candidate_wait_longer_for_the_next_one():
    replica = follower()
    for _ in range(6):
        waits_ms(replica)
        assert replica.machine.state is ElectionState.PRE_CANDIDATE
        earlier = replica.machine._question
        replica.now_ms += LIMITS.election_ms
        replica.tick(0)
        # It comes after the candidate has asked again.
        replica.hear(2, wire.PreVoteReply(earlier, True, True))
    assert waits_ms(replica) > 2 * LIMITS.election_ms


def test_the_spread_of_candidacies_doubles_with_each_one_that_no_leader_follows():
    waits = []
    replica = follower()
    for _ in range(5):
        begun_ms = replica.now_ms
        # The last tick before a candidacy draws how long it lasts.
        replica.now_ms += 60_000
        replica.step(r.ElectionTick(chance=0.999))
        replica.hear(2, wire.PreVoteReply(replica.machine._question, True, True))
        assert replica.machine.state is ElectionState.CANDIDATE
        waits.append(replica.machine.wait_ms(replica.now_ms) - LIMITS.election_ms)
        assert replica.now_ms > begun_ms
    spread_ms = LIMITS.election_ms * 0.999
    assert waits == [int(spread_ms * each) for each in (1, 2, 4, 8, 8)]


def test_a_heartbeat_ends_the_growth_of_the_spread():
    replica = follower()
    for _ in range(3):
        replica.tick(60_000)
        replica.hear(2, wire.PreVoteReply(replica.machine._question, True, True))
    replica.hear(2, wire.CheckLeader(1), epoch=replica.machine.epoch)
    replica.step(r.ElectionTick(chance=0.999))
    replica.hear(2, wire.CheckLeader(2))
    assert replica.machine.wait_ms(replica.now_ms) <= 2 * LIMITS.election_ms
    replica.tick(0)
    replica.hear(2, wire.CheckLeader(3))
    assert waits_ms(replica) == LIMITS.election_ms


def test_the_slowest_delay_is_never_above_its_limit_nor_below_what_is_left_of_it():
    rng = random.Random(7)
    delay = SlowestDelay(most_ms=5_000, halving_ms=10_000, step_ms=500)
    now_ms = 0
    for _ in range(1_000):
        now_ms += rng.randrange(2_000)
        before = delay.value_ms(now_ms)
        noted = rng.randrange(20_000)
        delay.note(noted, now_ms)
        after = delay.value_ms(now_ms)
        assert before <= after <= max(before, min(noted, 5_000, 2 * before + 502))
    assert delay.value_ms(now_ms + 10_000) in (after // 2, after // 2 + 1)


def test_a_call_waits_longer_after_those_that_were_answered_too_late_and_not_after_refused_ones():
    timeout = CallTimeout(least_ms=1_000, most_ms=8_000)
    timeout.note_failure(2)
    assert timeout.value_ms == 1_000
    for expected in (2_000, 4_000, 8_000, 8_000):
        timeout.note_failure(timeout.value_ms)
        assert timeout.value_ms == expected
    timeout.note_answer(1_500)
    assert timeout.value_ms == 6_000
    timeout.note_answer(20)
    assert timeout.value_ms == 1_000
