"""Single steps of elections: what one machine sends and decides, message by message."""

from __future__ import annotations

import pytest

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import Ballot, ElectionState, LogFacts
from raymq.replication.election_limits import ElectionLimits
from raymq.replication.wire import ReplicaProcess

LIMITS = ElectionLimits()
LOG = LogFacts(last_epoch=1, end=100, durable=100)


def process(replica: int) -> ReplicaProcess:
    return ReplicaProcess(replica, 10 + replica)


class Replica:
    """One machine, its clock, and what it has sent since the last look."""

    def __init__(self, me: int = 0, members: int = 3, ballot: Ballot | None = None, **options):
        self.machine = ElectionMachine(
            process(me), range(members), ballot or Ballot(epoch=1), **options
        )
        self.now_ms = 0
        self.log = LOG
        self.effects: list[r.ElectionEffect] = []
        self.step(r.ElectionTick(0.0))

    def step(self, event: r.ElectionEvent) -> None:
        self.effects += self.machine.step(event, self.now_ms, self.log)

    def tick(self, ms: int) -> None:
        self.now_ms += ms
        self.step(r.ElectionTick(0.0))

    def hear(self, sender: int, message: wire.Election, epoch: int | None = None) -> None:
        """Take a message, of this machine's epoch if none is given."""
        epoch = self.machine.epoch if epoch is None else epoch
        self.step(r.Received(process(sender), self.machine.me, epoch, message))

    def sent(self, kind: type[wire.Election]) -> list[r.SendElection]:
        """The messages of one kind since the last call, which forgets all effects."""
        effects, self.effects = self.effects, []
        return [
            each
            for each in effects
            if isinstance(each, r.SendElection) and isinstance(each.message, kind)
        ]

    def had(self, kind: type[r.ElectionEffect]) -> list[r.ElectionEffect]:
        return [each for each in self.effects if isinstance(each, kind)]

    def checks(self) -> list[int]:
        """Numbers of the checks sent, once for each check."""
        return sorted({each.message.number for each in self.sent(wire.CheckLeader)})


def follower(**options) -> Replica:
    """Replica 1, which hears replica 0 lead epoch 5."""
    replica = Replica(1, **options)
    replica.hear(0, wire.CheckLeader(1), epoch=5)
    return replica


def leader(members: int = 3, *, begun: bool = True, **options) -> Replica:
    """Replica 0, which leads the epoch after its ballot's by the votes of all."""
    replica = Replica(0, members, **options)
    win(replica, begun=begun)
    return replica


def win(replica: Replica, *, begun: bool = True) -> None:
    """All others vote for this replica."""
    machine = replica.machine
    replica.tick(4 * LIMITS.election_ms)
    for other in machine._others:
        replica.hear(other, wire.PreVoteReply(machine._question, True, True))
    for other in machine._others:
        replica.hear(other, wire.VoteReply(True, True))
    assert machine.state is ElectionState.LEADER
    if begun:
        replica.log = LogFacts(machine.epoch, end=120, durable=120)
        replica.step(r.EpochBegun(machine.epoch, 120))


# --- heartbeats -----------------------------------------------------------------------------------


def test_a_leader_sends_heartbeats_from_its_election_on():
    replica = leader(begun=False)
    assert [each.addressee.id for each in replica.sent(wire.CheckLeader)] == [1, 2]
    for _ in range(3):
        replica.tick(LIMITS.heartbeat_ms - 1)
        assert not replica.sent(wire.CheckLeader)
        replica.tick(1)
        assert [each.addressee.id for each in replica.sent(wire.CheckLeader)] == [1, 2]


def test_each_heartbeat_is_a_new_check():
    replica = leader()
    numbers = replica.checks()
    for _ in range(3):
        replica.tick(LIMITS.heartbeat_ms)
        numbers += replica.checks()
    assert numbers == [1, 2, 3, 4]


def test_a_replica_alone_sends_nothing():
    replica = leader(1)
    for _ in range(100):
        replica.tick(LIMITS.heartbeat_ms)
    assert replica.machine.leads
    assert not replica.had(r.SendElection)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_sole_candidate_that_needs_no_other_begins_at_once(is_complete: bool):
    replica = Replica(0, 1, Ballot(1, is_complete=is_complete))
    assert replica.had(r.BeginEpoch) == [r.BeginEpoch(2)]


def test_answers_to_heartbeats_keep_a_leader_whose_log_streams_are_silent():
    replica = leader()
    for _ in range(20):
        replica.tick(LIMITS.heartbeat_ms)
        replica.hear(2, wire.CheckLeaderReply(replica.checks()[-1], True))
    assert replica.machine.leads


def test_a_slow_answer_keeps_a_leader_too():
    replica = leader()
    for _ in range(20):
        replica.tick(LIMITS.heartbeat_ms)
        # Four heartbeats have been sent meanwhile.
        replica.hear(2, wire.CheckLeaderReply(max(1, replica.checks()[0] - 4), True))
    assert replica.machine.leads


def test_a_leader_that_hears_no_majority_steps_down():
    replica = leader()
    for _ in range(LIMITS.majority_silence_ms // LIMITS.heartbeat_ms + 1):
        replica.tick(LIMITS.heartbeat_ms)
    (down,) = replica.had(r.StepDown)
    assert "no majority" in down.reason
    assert replica.machine.leader is None


def test_a_follower_that_hears_heartbeats_begins_no_election():
    replica = follower()
    replica.effects.clear()
    for number in range(2, 50):
        replica.tick(LIMITS.heartbeat_ms)
        replica.hear(0, wire.CheckLeader(number))
        assert replica.sent(wire.CheckLeaderReply) == [
            r.SendElection(process(0), 5, wire.CheckLeaderReply(number, True))
        ]
    assert replica.machine.state is ElectionState.FOLLOWER
    assert replica.machine.leader == process(0)

    replica.hear(2, wire.PreVote(1, 9, 999))
    (reply,) = replica.sent(wire.PreVoteReply)
    assert not reply.message.granted


def test_a_follower_that_hears_a_leader_names_its_epoch_to_no_candidate():
    replica = follower()
    replica.hear(2, wire.AskEpoch(1))
    assert not replica.sent(wire.EpochReply)
    replica.tick(LIMITS.election_ms)
    replica.hear(2, wire.AskEpoch(2))
    assert replica.sent(wire.EpochReply) == [
        r.SendElection(process(2), 5, wire.EpochReply(2, True))
    ]


def test_a_candidate_follows_the_leader_of_its_epoch():
    replica = follower()
    replica.tick(2 * LIMITS.election_ms)
    assert replica.machine.state is ElectionState.PRE_CANDIDATE
    replica.hear(0, wire.CheckLeader(9))
    assert replica.machine.state is ElectionState.FOLLOWER

    replica.tick(2 * LIMITS.election_ms)
    (_, question) = (each.message.number for each in replica.sent(wire.PreVote)[-2:])
    replica.hear(2, wire.PreVoteReply(question, True, True))
    assert replica.machine.state is ElectionState.CANDIDATE
    assert replica.machine.epoch == 6
    replica.hear(2, wire.CheckLeader(1), epoch=6)
    assert replica.machine.state is ElectionState.FOLLOWER
    assert replica.machine.leader == process(2)

    # A vote that comes late does not make a leader of a follower.
    replica.hear(0, wire.VoteReply(True, True))
    assert replica.machine.state is ElectionState.FOLLOWER


def test_a_candidate_counts_pre_votes_of_replicas_that_have_not_heard_its_epoch():
    replica = Replica(0, ballot=Ballot(epoch=9))
    replica.tick(2 * LIMITS.election_ms)
    replica.hear(2, wire.PreVoteReply(1, True, True), epoch=3)
    assert [each.epoch for each in replica.sent(wire.RequestVote)] == [10, 10]


def test_a_heartbeat_of_an_older_epoch_is_answered_with_the_newer_one():
    replica = follower()
    replica.sent(wire.CheckLeaderReply)
    replica.hear(2, wire.CheckLeader(7), epoch=4)
    assert replica.effects == [r.SendElection(process(2), 5, wire.NewerEpoch())]
    assert replica.machine.leader == process(0)


def test_log_bytes_of_another_process_of_the_leader_are_admitted_in_its_epoch_alone():
    replica = follower()
    stream = ReplicaProcess(0, 777)
    replica.step(r.LeaderHeard(stream, 5))
    assert replica.machine.admits(stream, 5)
    replica.step(r.LeaderHeard(stream, 4))
    assert not replica.machine.admits(stream, 4)
    assert not replica.machine.admits(process(2), 5)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_frame_of_the_leader_that_is_followed_takes_no_step(is_complete: bool):
    replica = follower(ballot=Ballot(epoch=1, is_complete=is_complete))
    machine = replica.machine
    assert machine.follows(process(0), 5) is is_complete
    before = machine.ballot, machine.leader, machine.state, machine.wait_ms(replica.now_ms)
    replica.effects.clear()
    replica.step(r.LeaderHeard(process(0), 5))
    if is_complete:
        assert replica.effects == []
        assert before == (
            machine.ballot,
            machine.leader,
            machine.state,
            machine.wait_ms(replica.now_ms),
        )


@pytest.mark.parametrize(
    ("stream", "epoch"),
    [(ReplicaProcess(0, 777), 5), (process(2), 5), (process(0), 4), (process(0), 6)],
)
def test_frames_of_any_other_process_or_epoch_take_a_step(stream: ReplicaProcess, epoch: int):
    assert not follower().machine.follows(stream, epoch)


def test_frames_of_a_leader_that_was_replaced_take_a_step():
    replica = follower()
    replica.hear(2, wire.CheckLeader(7, (1,)), epoch=5)
    assert replica.machine.is_replaced(process(0))
    assert not replica.machine.follows(process(0), 5)


# --- the time of the next step --------------------------------------------------------------------


def test_a_leader_needs_no_step_before_its_next_heartbeat():
    replica = leader()
    replica.tick(LIMITS.heartbeat_ms - 10)
    assert replica.machine.wait_ms(replica.now_ms) == 10
    replica.tick(10)
    assert replica.machine.wait_ms(replica.now_ms) == LIMITS.heartbeat_ms


def test_a_follower_needs_no_step_before_it_would_ask_for_votes():
    replica = follower()
    replica.tick(100)
    assert replica.machine.wait_ms(replica.now_ms) == LIMITS.election_ms - 100
    replica.tick(LIMITS.election_ms - 100)
    assert replica.sent(wire.PreVote)
    assert replica.machine.wait_ms(replica.now_ms) == LIMITS.election_ms


def test_a_replica_that_joins_needs_a_step_when_its_question_is_due_again():
    replica = follower(ballot=Ballot(5, is_complete=False))
    for _ in range(2):
        assert replica.machine.wait_ms(replica.now_ms) == LIMITS.retry_ms
        replica.tick(LIMITS.election_ms // 2)


@pytest.mark.parametrize(
    "options", [{"candidates": (0, 2)}, {"ballot": Ballot(5, generations=(0, 1))}]
)
def test_a_replica_that_may_not_lead_or_was_replaced_has_nothing_to_wait_for(options: dict):
    replica = follower(**options)
    replica.tick(2 * LIMITS.election_ms)
    assert replica.machine.wait_ms(replica.now_ms) == LIMITS.election_ms


@pytest.mark.parametrize(("heartbeat_ms", "step_ms"), [(60, 60), (400, 200)])
def test_a_hand_over_makes_heartbeats_more_frequent_and_never_less(heartbeat_ms: int, step_ms: int):
    replica = leader(limits=ElectionLimits(heartbeat_ms=heartbeat_ms, retry_ms=200))
    replica.tick(replica.machine.wait_ms(replica.now_ms))
    replica.step(r.FollowerHeard(1, 2, 120, is_complete=True))
    replica.step(r.HandOver(1))
    replica.sent(wire.CheckLeader)
    assert replica.machine.wait_ms(replica.now_ms) == step_ms
    replica.tick(step_ms)
    assert replica.sent(wire.CheckLeader)


# --- checks that a reader waits for ---------------------------------------------------------------


@pytest.mark.parametrize("members", [3, 5])
def test_a_check_proves_a_leadership_when_it_is_answered_by_as_many_as_elect(members: int):
    replica = leader(members)
    before = replica.machine.check_number
    replica.checks()
    replica.step(r.CheckAsked())
    check = replica.machine.check_number
    assert replica.checks() == [check] == [before + 1]

    needed = members // 2
    for other in range(1, members):
        # Asked before the reader came.
        replica.hear(other, wire.CheckLeaderReply(before, True))
        assert not replica.machine.led_at(check)
    for other in range(1, needed + 1):
        assert not replica.machine.led_at(check)
        replica.hear(other, wire.CheckLeaderReply(check, True))
    assert replica.machine.led_at(check)
    assert not replica.machine.led_at(check + 1)


def test_a_replica_that_may_have_forgotten_its_vote_proves_no_leadership():
    replica = leader()
    replica.step(r.CheckAsked())
    check = replica.machine.check_number
    replica.hear(1, wire.CheckLeaderReply(check, False))
    assert not replica.machine.led_at(check)
    # The answer to a later check counts as well.
    replica.hear(2, wire.CheckLeaderReply(check + 1, True))
    assert replica.machine.led_at(check)


def test_only_a_leader_checks_for_readers():
    replica = follower()
    replica.effects.clear()
    replica.step(r.CheckAsked())
    assert replica.effects == []


def test_checks_for_readers_repeat_the_request_to_take_over():
    replica = leader()
    replica.step(r.FollowerHeard(1, 2, 120, is_complete=True))
    replica.step(r.HandOver(1))
    assert replica.sent(wire.TakeOver)
    replica.step(r.CheckAsked())
    assert replica.sent(wire.TakeOver)


# --- the end of the leader's process --------------------------------------------------------------


@pytest.mark.parametrize(("me", "turn"), [(1, 0), (2, 1), (4, 3)])
def test_followers_of_a_leader_whose_process_has_ended_ask_for_votes_in_turn(me: int, turn: int):
    replica = Replica(me, 5)
    replica.hear(0, wire.CheckLeader(1), epoch=5)
    replica.sent(wire.PreVote)
    replica.step(r.LeaderLost(0, 5))
    if turn:
        replica.tick(turn * LIMITS.turn_ms - 1)
        assert not replica.had(r.SendElection)
        replica.tick(1)
    assert len(replica.sent(wire.PreVote)) == 4

    # It hears no leader any more, and lets another one have its turn.
    replica.hear(3, wire.PreVote(1, 1, 100), epoch=5)
    (reply,) = replica.sent(wire.PreVoteReply)
    assert reply.message.granted


@pytest.mark.parametrize("ended", [r.LeaderLost(0, 4), r.LeaderLost(2, 5)])
def test_the_end_of_another_process_than_the_present_leaders_changes_nothing(ended: r.LeaderLost):
    replica = follower()
    replica.sent(wire.PreVote)
    replica.step(ended)
    replica.tick(LIMITS.election_ms - 1)
    assert not replica.had(r.SendElection)


def test_a_replica_that_may_not_lead_asks_for_no_votes_when_the_leader_has_ended():
    replica = follower(candidates=(0, 2))
    replica.sent(wire.PreVote)
    replica.step(r.LeaderLost(0, 5))
    assert not replica.had(r.SendElection)


# --- silent log streams ---------------------------------------------------------------------------


def lead_on(replica: Replica, ms: int, *, streams: tuple[int, ...] = ()) -> None:
    """All replicas answer the heartbeats for so long, and these ones over their log streams too."""
    for _ in range(ms // LIMITS.heartbeat_ms):
        replica.tick(LIMITS.heartbeat_ms)
        check = wire.CheckLeaderReply(replica.machine._leadership.check_number, True)
        for other in replica.machine._others:
            replica.hear(other, check)
            if other in streams:
                heard = r.FollowerHeard(other, replica.machine.epoch, 0, other % 2 == 0)
                replica.step(heard)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_leader_whose_log_streams_are_silent_for_long_lets_another_lead(members: int):
    replica = leader(members)
    lead_on(replica, LIMITS.stream_silence_ms)
    assert replica.machine.leads
    lead_on(replica, LIMITS.heartbeat_ms)
    (down,) = replica.had(r.StepDown)
    assert "reached no majority for 10000 ms" in down.reason

    # It waits for twice as long as the others before it asks.
    replica.effects.clear()
    replica.tick(2 * LIMITS.election_ms - 1)
    assert not replica.had(r.SendElection)
    replica.tick(1)
    assert len(replica.sent(wire.PreVote)) == members - 1


@pytest.mark.parametrize(("members", "streams"), [(2, (1,)), (3, (1,)), (3, (2,)), (5, (3, 4))])
def test_a_leader_whose_log_streams_reach_a_majority_stays(members: int, streams: tuple[int, ...]):
    replica = leader(members)
    lead_on(replica, 3 * LIMITS.stream_silence_ms, streams=streams)
    assert replica.machine.leads


def test_a_leader_whose_log_streams_are_silent_asks_its_successor_whose_own_wait_may_be_longer():
    replica = leader(5)
    replica.effects.clear()
    lead_on(replica, 2 * LIMITS.stream_silence_ms)
    assert replica.had(r.StepDown)
    assert [each.addressee.id for each in replica.sent(wire.TakeOver)] == [1]


def test_a_leader_that_no_other_can_replace_is_silent_for_twice_as_long_the_next_time():
    replica = leader(2)
    for silence_ms in (10_000, 20_000, 40_000):
        lead_on(replica, silence_ms)
        assert replica.machine.leads
        lead_on(replica, LIMITS.heartbeat_ms)
        assert f"{silence_ms} ms" in replica.had(r.StepDown)[-1].reason
        win(replica)
    lead_on(replica, LIMITS.heartbeat_ms, streams=(1,))
    lead_on(replica, LIMITS.stream_silence_ms + LIMITS.heartbeat_ms)
    assert "10000 ms" in replica.had(r.StepDown)[-1].reason


def test_one_log_stream_of_five_is_no_majority():
    replica = leader(5)
    lead_on(replica, LIMITS.stream_silence_ms + LIMITS.heartbeat_ms, streams=(3,))
    assert replica.had(r.StepDown)


def test_a_leader_that_cannot_begin_its_epoch_lets_another_lead():
    replica = leader(begun=False)
    lead_on(replica, LIMITS.stream_silence_ms + LIMITS.heartbeat_ms)
    assert replica.had(r.StepDown)


def test_a_replica_that_alone_may_lead_stays_the_leader():
    replica = leader(candidates=(0,))
    for _ in range(100):
        replica.tick(LIMITS.heartbeat_ms)
    assert replica.machine.state is ElectionState.LEADER


# --- joins ----------------------------------------------------------------------------------------


def test_a_match_with_the_log_of_an_earlier_leader_makes_no_replica_complete():
    joiner = follower(ballot=Ballot(5, is_complete=False))
    joiner.log = LogFacts(5, end=200, durable=200, matched=200, matched_epoch=5)
    joiner.hear(2, wire.CheckLeader(1), epoch=6)
    (join,) = joiner.sent(wire.Join)[-1:]
    joiner.hear(2, wire.JoinReply(join.message.nonce, 200))
    joiner.tick(1)
    assert not joiner.machine.ballot.is_complete

    joiner.log = LogFacts(6, end=200, durable=200, matched=200, matched_epoch=6)
    joiner.tick(1)
    assert joiner.machine.ballot.is_complete


def test_a_join_counts_only_answers_to_checks_that_began_after_it():
    replica = leader()
    replica.tick(LIMITS.heartbeat_ms)
    earlier = replica.checks()[-1]
    replica.hear(2, wire.Join(1))
    (present,) = replica.checks()
    for other in (1, 2):
        replica.hear(other, wire.CheckLeaderReply(earlier, other == 1))
    assert not replica.sent(wire.JoinReply)
    for other in (1, 2):
        replica.hear(other, wire.CheckLeaderReply(present, other == 1))
    assert replica.sent(wire.JoinReply) == [r.SendElection(process(2), 2, wire.JoinReply(1, 120))]


def test_a_second_join_during_a_check_waits_for_the_next_one():
    replica = leader()
    replica.sent(wire.CheckLeader)
    replica.hear(1, wire.Join(1))
    (first,) = replica.checks()
    replica.hear(2, wire.Join(1))
    (second,) = replica.checks()
    assert second > first
    for other in (1, 2):
        replica.hear(other, wire.CheckLeaderReply(first, False))
    assert [each.addressee.id for each in replica.sent(wire.JoinReply)] == [1]
    for other in (1, 2):
        replica.hear(other, wire.CheckLeaderReply(second, False))
    assert [each.addressee.id for each in replica.sent(wire.JoinReply)] == [2]


def test_a_join_ends_although_answers_take_longer_than_the_time_between_heartbeats():
    joiner = follower(ballot=Ballot(5, is_complete=False))
    led = leader(ballot=Ballot(4))
    joins, checks = joiner.sent(wire.Join), led.checks()
    for _ in range(3):
        for replica in (joiner, led):
            replica.tick(LIMITS.heartbeat_ms)
        joiner.hear(0, wire.CheckLeader(1))
        # Join and check are both repeated before an answer comes.
        joins += joiner.sent(wire.Join)
        led.hear(1, joins[-1].message)
        checks += led.checks()

    for other in (1, 2):
        led.hear(other, wire.CheckLeaderReply(checks[-3], other == 2))
    (reply,) = led.sent(wire.JoinReply)
    joiner.hear(0, reply.message)
    joiner.tick(LIMITS.heartbeat_ms)
    # It knows the end that it must reach, and asks no more.
    assert not joiner.sent(wire.Join)


# --- a disk that stalls ---------------------------------------------------------------------------


STALLED = [LogFacts(2, end=130, durable=120), LogFacts(2, end=120, durable=120, is_writable=False)]


def lead_on_with(replica: Replica, ms: int, ends: dict[int, int]) -> None:
    """Lead while all others answer and some of them acknowledge. Args: `ends`: follower -> its durable end."""
    for _ in range(ms // LIMITS.heartbeat_ms):
        for follower, end in ends.items():
            replica.step(r.FollowerHeard(follower, replica.machine.epoch, end, is_complete=True))
        lead_on(replica, LIMITS.heartbeat_ms)


@pytest.mark.parametrize("facts", STALLED, ids=["no sync ends", "no append is taken"])
def test_a_leader_whose_disk_stalls_hands_over_to_the_follower_with_the_most_of_its_log(
    facts: LogFacts,
):
    replica = leader(5)
    lead_on(replica, LIMITS.heartbeat_ms)
    replica.effects.clear()
    replica.log = facts
    lead_on_with(replica, LIMITS.disk_stall_ms, {1: 110, 2: 119, 3: facts.end})
    assert not replica.had(r.StopPuts)
    lead_on_with(replica, LIMITS.heartbeat_ms, {1: 110, 2: 119, 3: facts.end})
    assert len(replica.had(r.StopPuts)) == 1
    assert {each.addressee.id for each in replica.sent(wire.TakeOver)} == {3}


@pytest.mark.parametrize(("me", "successor"), [(0, 1), (1, 2), (2, 3), (3, 0)])
def test_replicas_with_equal_logs_and_stalled_disks_take_turns(me: int, successor: int):
    replica = Replica(me, 4)
    win(replica)
    for other in replica.machine._others:
        replica.step(r.FollowerHeard(other, replica.machine.epoch, 120, is_complete=True))
    assert replica.machine.best_successor() == successor


def test_a_full_disk_that_stores_the_records_of_another_leader_is_full_all_the_same():
    replica = leader(5)
    lead_on(replica, LIMITS.heartbeat_ms)
    replica.log = replica.log._replace(is_writable=False)
    lead_on_with(replica, LIMITS.disk_stall_ms + LIMITS.heartbeat_ms, {1: 120})
    assert replica.machine.bears_stall
    replica.hear(1, wire.RequestVote(2, 120), epoch=replica.machine.epoch + 1)
    replica.log = replica.log._replace(end=140, durable=140)
    replica.tick(LIMITS.heartbeat_ms)
    assert replica.machine.bears_stall
    replica.log = replica.log._replace(end=160, durable=160, is_writable=True)
    replica.tick(LIMITS.heartbeat_ms)
    assert not replica.machine.bears_stall


def test_a_leader_whose_disk_stalls_stays_without_a_follower_that_may_lead():
    replica = leader(candidates=(0, 2))
    replica.log = STALLED[0]
    lead_on_with(replica, 2 * LIMITS.disk_stall_ms, {1: 130})
    assert replica.machine.leads
    assert not replica.had(r.StopPuts)


@pytest.mark.parametrize(
    ("options", "asked"),
    [({}, {1}), ({"candidates": (0, 2)}, {2})],
)
def test_a_leader_whose_disk_takes_no_epoch_record_steps_down_and_asks_the_next_to_take_over(
    options, asked: set[int]
):
    replica = leader(begun=False, **options)
    replica.log = replica.log._replace(is_writable=False)
    lead_on(replica, LIMITS.disk_stall_ms + LIMITS.heartbeat_ms)
    (down,) = replica.had(r.StepDown)
    assert "took no EPOCH record" in down.reason
    # It may wait longer for a leader than this one, which would be elected again and again.
    assert {each.addressee.id for each in replica.sent(wire.TakeOver)} == asked


def test_a_leader_whose_disk_takes_no_epoch_record_steps_down_without_a_replica_to_ask():
    replica = leader(begun=False)
    replica.log = replica.log._replace(is_writable=False, uncallable=frozenset({1, 2}))
    for check in range(1, 9):
        for other in (1, 2):
            uncallable = tuple({0, 1, 2} - {other})
            replica.hear(other, wire.CheckLeaderReply(check, True, True, uncallable))
        replica.tick(LIMITS.heartbeat_ms)
    assert replica.had(r.StepDown)
    assert not replica.sent(wire.TakeOver)


def test_a_disk_that_stalls_in_each_leadership_is_borne_for_twice_as_long_until_it_stores():
    replica = leader()
    lead_on(replica, LIMITS.heartbeat_ms)
    for stall_ms in (3_000, 6_000, 12_000):
        end = replica.log.end + 1
        replica.log = replica.log._replace(end=end)
        lead_on_with(replica, stall_ms, {1: end})
        assert not replica.had(r.StopPuts)
        lead_on_with(replica, LIMITS.heartbeat_ms, {1: end})
        assert replica.had(r.StopPuts)
        replica.hear(1, wire.RequestVote(9, end), epoch=replica.machine.epoch + 1)
        win(replica, begun=False)
        replica.step(r.EpochBegun(replica.machine.epoch, end))
        replica.effects.clear()

    replica.log = replica.log._replace(durable=end)
    lead_on(replica, LIMITS.heartbeat_ms)
    end += 1
    replica.log = replica.log._replace(end=end)
    lead_on_with(replica, 12_000, {1: end})
    assert not replica.had(r.StopPuts)
    lead_on_with(replica, 12_000 + LIMITS.heartbeat_ms, {1: end})
    assert replica.had(r.StopPuts)

    # A disk that stored as a follower's counts as sound again.
    replica.hear(1, wire.RequestVote(9, end), epoch=replica.machine.epoch + 1)
    replica.log = replica.log._replace(durable=end)
    replica.tick(LIMITS.heartbeat_ms)
    win(replica, begun=False)
    replica.step(r.EpochBegun(replica.machine.epoch, end))
    replica.effects.clear()
    replica.log = replica.log._replace(end=end + 1)
    lead_on_with(replica, LIMITS.disk_stall_ms + 2 * LIMITS.heartbeat_ms, {1: end + 1})
    assert replica.had(r.StopPuts)


# --- a disk that is slow --------------------------------------------------------------------------


def lead_late(replica: Replica, ms: int, ends: dict[int, int]) -> None:
    """Lead for a time in which the own disk stores something again and again, but never what others have."""
    for _ in range(ms // LIMITS.heartbeat_ms):
        replica.log = replica.log._replace(durable=replica.log.durable + 1)
        lead_on_with(replica, LIMITS.heartbeat_ms, ends)


def late_leader(members: int = 3) -> Replica:
    """A leader with much in its log that is not durable yet."""
    replica = leader(members)
    replica.log = replica.log._replace(end=1_000)
    return replica


def test_a_leader_hands_over_when_a_majority_stores_everything_sooner():
    replica = late_leader()
    lead_late(replica, LIMITS.disk_late_ms, {1: 1_000, 2: 900})
    assert not replica.had(r.StopPuts)
    lead_late(replica, 2 * LIMITS.heartbeat_ms, {1: 1_000, 2: 900})
    (stopped,) = replica.had(r.StopPuts)
    assert "200 ms later" in stopped.reason
    assert {each.addressee.id for each in replica.sent(wire.TakeOver)} == {1}


@pytest.mark.parametrize("ends", [{1: 1_000}, {1: 1_000, 2: 100}, {1: 110, 2: 110}])
def test_a_leader_with_a_slow_disk_stays_unless_a_majority_without_it_is_quicker(
    ends: dict[int, int],
):
    replica = late_leader()
    lead_late(replica, 5 * LIMITS.disk_late_ms, ends)
    assert not replica.had(r.StopPuts)


def test_of_five_replicas_three_others_must_be_quicker():
    replica = late_leader(5)
    lead_late(replica, 3 * LIMITS.disk_late_ms, {1: 1_000, 2: 1_000, 3: 110})
    assert not replica.had(r.StopPuts)
    lead_late(replica, 2 * LIMITS.disk_late_ms, {4: 1_000})
    assert replica.had(r.StopPuts)


def test_a_leader_whose_disk_is_in_time_as_often_as_late_stays():
    replica = late_leader()
    half_ms = LIMITS.disk_late_ms // 2
    for _ in range(5):
        end = replica.log.end
        lead_late(replica, half_ms, {1: end, 2: end})
        # It has caught up, and more is under way.
        replica.log = replica.log._replace(end=end + 1_000, durable=end)
        lead_on_with(replica, half_ms + 2 * LIMITS.heartbeat_ms, {})
    assert not replica.had(r.StopPuts)


# --- hand-over ------------------------------------------------------------------------------------


def handing_over() -> Replica:
    """A leader that hands over to replica 1, whose log has all of its own."""
    replica = leader()
    replica.step(r.FollowerHeard(1, 2, 120, is_complete=True))
    replica.effects.clear()
    replica.step(r.HandOver(1))
    return replica


def test_a_leader_takes_no_puts_and_asks_once_the_successor_has_all():
    replica = leader()
    replica.step(r.FollowerHeard(1, 2, 119, is_complete=True))
    replica.step(r.HandOver(1))
    assert replica.had(r.StopPuts)
    assert not replica.sent(wire.TakeOver)
    replica.step(r.FollowerHeard(1, 2, 120, is_complete=True))
    assert replica.sent(wire.TakeOver) == [r.SendElection(ReplicaProcess(1, 0), 2, wire.TakeOver())]


def test_a_lost_request_to_take_over_is_repeated_until_the_leader_gives_up():
    replica = handing_over()
    asked = len(replica.sent(wire.TakeOver))
    for _ in range(4):
        replica.tick(replica.machine.wait_ms(replica.now_ms))
        assert not replica.had(r.ResumePuts)
        asked += len(replica.sent(wire.TakeOver))
    assert asked == 5

    replica.tick(LIMITS.retry_ms)
    assert replica.had(r.ResumePuts) == [r.ResumePuts("replica 1 did not take over")]
    assert not replica.sent(wire.TakeOver)
    replica.tick(LIMITS.heartbeat_ms)
    assert not replica.had(r.ResumePuts)
    assert not replica.sent(wire.TakeOver)
    assert replica.machine.leads


def test_the_successor_asks_for_votes_at_once_and_once():
    replica = follower()
    replica.effects.clear()
    for _ in range(3):
        replica.hear(0, wire.TakeOver(), epoch=5)
    votes = replica.sent(wire.RequestVote)
    assert [(each.addressee.id, each.epoch) for each in votes] == [(0, 6), (2, 6)]


def test_a_leader_that_handed_over_steps_down_and_resumes_no_puts_when_the_successor_fails():
    replica = handing_over()
    # The successor asks, and its log lacks a record: it gets no vote.
    replica.hear(1, wire.RequestVote(2, 119), epoch=3)
    assert len(replica.had(r.StepDown)) == 1
    (reply,) = replica.sent(wire.VoteReply)
    assert not reply.message.granted
    for _ in range(10):
        replica.tick(LIMITS.heartbeat_ms)
    assert not replica.had(r.ResumePuts)

    # It takes puts again only as the leader of a new epoch.
    replica.effects.clear()
    win(replica)
    assert replica.had(r.BeginEpoch) == [r.BeginEpoch(replica.machine.epoch)]
    replica.tick(LIMITS.heartbeat_ms)
    assert not replica.sent(wire.TakeOver)
    assert not replica.had(r.ResumePuts)


@pytest.mark.parametrize("options", [{"candidates": (0, 2)}, {"ballot": Ballot(5, None, False)}])
def test_a_replica_that_may_not_lead_does_not_take_over(options: dict):
    replica = follower(**options)
    replica.hear(0, wire.TakeOver())
    assert not replica.sent(wire.RequestVote)


def test_an_elected_replica_is_complete_once_its_epoch_record_is_durable():
    replica = Replica(ballot=Ballot(epoch=1, is_complete=False))
    # What it got from the leader before is not synced yet.
    replica.log = LOG._replace(durable=0)
    replica.tick(5_000)
    for voter in (1, 2):
        replica.hear(voter, wire.EpochReply(replica.machine._question, True))
    for voter in (1, 2):
        replica.hear(voter, wire.VoteReply(True, True))
    assert replica.machine.state is ElectionState.LEADER

    replica.log = LOG._replace(last_epoch=2, end=110, durable=100)
    replica.step(r.EpochBegun(replica.machine.epoch, 110))
    assert replica.machine.leads
    assert not replica.machine.ballot.is_complete

    replica.log = replica.log._replace(durable=110)
    replica.effects = []
    replica.tick(1)
    assert replica.machine.ballot.is_complete
    assert r.Persist(replica.machine.ballot) in replica.effects
