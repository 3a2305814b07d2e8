"""A replica that was replaced is not heard any more by those that know of its successor: R17 of docs/design.md."""

from __future__ import annotations

import pytest

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import Ballot, ElectionState, LogFacts
from raymq.replication.incarnation import generation_of, make_incarnation
from raymq.replication.log_sender import Connected, FrameReceived, LogSender, Phase
from raymq.replication.wire import FrameHeader, ReplicaProcess
from tests.support.mirror_world import MemoryLog

#: processes of replica 2 before and after it was replaced
OLD, NEW = ReplicaProcess(2, 12), ReplicaProcess(2, make_incarnation(1, 12))
LOG = LogFacts(last_epoch=5, end=100, durable=100)


class Replica:
    """The machine of replica 1, in epoch 5, and its effects since the last look."""

    def __init__(self, members: int = 3, generations: tuple[int, ...] = ()) -> None:
        ballot = Ballot(5, generations=generations)
        self.machine = ElectionMachine(ReplicaProcess(1, 11), range(members), ballot)
        self.now_ms = 0
        self.effects: list[r.ElectionEffect] = []
        self.tick(0)

    def step(self, event: r.ElectionEvent) -> None:
        self.effects += self.machine.step(event, self.now_ms, LOG)

    def tick(self, ms: int) -> None:
        self.now_ms += ms
        self.step(r.ElectionTick(0.0))

    def hear(self, sender: ReplicaProcess, message: wire.Election, epoch: int = 5) -> None:
        self.step(r.Received(sender, self.machine.me, epoch, message))

    def look(self) -> list[r.ElectionEffect]:
        effects, self.effects = self.effects, []
        return effects

    def stand(self, voter: ReplicaProcess) -> ElectionState:
        """Hear no leader, and let another process grant every vote. Returns: the state after that."""
        self.tick(10_000)
        self.hear(voter, wire.PreVoteReply(self.machine._question, True, True))
        self.hear(voter, wire.VoteReply(True, True), epoch=self.machine.epoch)
        return self.machine.state


def test_the_generation_is_a_part_of_the_incarnation():
    assert generation_of(make_incarnation(3, 2**48 - 1)) == 3
    assert NEW.generation == 1
    assert OLD.generation == 0


def test_the_vote_of_a_replaced_replica_elects_nothing():
    replica = Replica()
    replica.hear(ReplicaProcess(0, 10), wire.CheckLeader(1, (0, 0, 1)))
    assert replica.stand(OLD) is ElectionState.PRE_CANDIDATE
    assert replica.stand(NEW) is ElectionState.LEADER
    # Before anything names its successor, it is a replica as any other.
    assert Replica().stand(OLD) is ElectionState.LEADER


def test_a_check_is_answered_after_the_generations_that_it_names_are_on_disk():
    replica = Replica()
    replica.look()
    replica.hear(ReplicaProcess(0, 10), wire.CheckLeader(1, (0, 0, 1)))
    noted, answer = (
        each for each in replica.look() if isinstance(each, (r.Persist, r.SendElection))
    )
    assert noted == r.Persist(Ballot(5, generations=(0, 0, 1)))
    assert isinstance(answer, r.SendElection)
    assert isinstance(answer.message, wire.CheckLeaderReply)


@pytest.mark.parametrize(
    "message",
    [
        wire.PreVote(1, 9, 900),
        wire.RequestVote(9, 900),
        wire.AskEpoch(1),
        wire.CheckLeader(1),
        wire.TakeOver(),
    ],
)
def test_no_question_of_a_replaced_replica_is_answered_or_raises_the_epoch(message: wire.Election):
    replica = Replica(generations=(0, 0, 1))
    replica.look()
    replica.hear(OLD, message, epoch=9)
    assert replica.look() == []
    assert replica.machine.epoch == 5
    assert replica.machine.leader is None


def test_the_log_stream_of_a_replaced_replica_is_not_admitted():
    replica = Replica(generations=(0, 0, 1))
    replica.step(r.LeaderHeard(OLD, 6))
    assert not replica.machine.admits(OLD, 6)
    assert replica.machine.epoch == 5
    replica.step(r.LeaderHeard(NEW, 6))
    assert replica.machine.admits(NEW, 6)
    assert not replica.machine.admits(OLD, 6)


def test_a_leader_that_hears_a_successor_begins_the_next_epoch_and_then_names_it_in_its_checks():
    replica = Replica()
    replica.stand(ReplicaProcess(0, 10))
    led = replica.machine.epoch
    replica.look()
    replica.hear(NEW, wire.AskEpoch(1), epoch=0)
    # Its log streams may have counted what the replaced replica holds.
    effects = replica.look()
    assert any(isinstance(each, r.StepDown) for each in effects)
    assert replica.machine.epoch == led + 1
    replica.hear(ReplicaProcess(0, 10), wire.VoteReply(True, True), epoch=led + 1)
    checks = [
        each.message
        for each in replica.look()
        if isinstance(each, r.SendElection) and isinstance(each.message, wire.CheckLeader)
    ]
    assert {check.generations for check in checks} == {(0, 0, 1)}

    # The same generation once more changes nothing.
    replica.hear(NEW, wire.Join(1), epoch=led + 1)
    assert replica.machine.epoch == led + 1


def test_a_leader_makes_a_successor_complete_only_after_all_others_know_it():
    replica = Replica(members=5)
    others = {each: ReplicaProcess(each, 10 + each) for each in (0, 3, 4)}
    replica.tick(10_000)
    for process in others.values():
        replica.hear(process, wire.PreVoteReply(replica.machine._question, True, True))
    for process in others.values():
        replica.hear(process, wire.VoteReply(True, True), epoch=6)
    replica.step(r.EpochBegun(6, 100))
    replica.hear(NEW, wire.AskEpoch(1), epoch=0)
    for process in others.values():
        replica.hear(process, wire.VoteReply(True, True), epoch=7)
    replica.step(r.EpochBegun(7, 100))
    replica.hear(NEW, wire.Join(1), epoch=7)

    def answer(process: ReplicaProcess) -> list[r.ElectionEffect]:
        number = replica.machine._leadership.check_number
        replica.hear(process, wire.CheckLeaderReply(number, process != NEW), epoch=7)
        effects = [each for each in replica.look() if isinstance(each, r.SendElection)]
        return [each for each in effects if isinstance(each.message, wire.JoinReply)]

    replica.look()
    assert [answer(each) for each in (others[0], others[3], NEW)] == [[], [], []]
    # The answer of the replaced one is none.
    assert answer(OLD) == []
    assert len(answer(others[4])) == 1


def test_a_replica_that_hears_of_its_successor_is_silent_and_asks_for_no_votes():
    successor = make_incarnation(1, 11)
    replica = Replica()
    assert replica.stand(ReplicaProcess(0, 10)) is ElectionState.LEADER
    replica.look()
    replica.hear(ReplicaProcess(0, 10), wire.CheckLeader(1, (0, generation_of(successor))), epoch=9)
    effects = replica.look()
    assert any(isinstance(each, r.StepDown) for each in effects)
    assert not any(isinstance(each, r.SendElection) for each in effects)

    replica.tick(60_000)
    replica.hear(ReplicaProcess(0, 10), wire.RequestVote(9, 900), epoch=10)
    assert replica.look() == []
    replica.step(r.LeaderHeard(ReplicaProcess(0, 10), 9))
    assert not replica.machine.admits(ReplicaProcess(0, 10), 9)


def test_a_ballot_takes_the_newer_one_of_each_generation():
    ballot = Ballot(5, generations=(0, 2))
    assert ballot.with_generations((1, 1, 3)).generations == (1, 2, 3)
    assert ballot.with_generations(()) == ballot


@pytest.mark.parametrize(("generation", "is_heard"), [(0, True), (1, False)])
def test_a_leaders_stream_takes_no_answer_of_a_replaced_follower(generation: int, is_heard: bool):
    cluster, me = wire.cluster_key("c"), ReplicaProcess(0, 10)
    log = MemoryLog()
    sender = LogSender(
        cluster=cluster,
        shard=0,
        me=me,
        follower_id=2,
        chain=log,
        segment_size_bytes=1 << 20,
        epoch=5,
        generation=generation,
    )
    sender.step(Connected(), 0)
    sender.step(Connected(), 0)
    reply = wire.HelloReply(0, 0, 0, -1, 0)
    header = FrameHeader(cluster, 0, OLD, me, 5, 1)
    sender.step(FrameReceived(header, reply), 1)
    assert (sender.phase is not Phase.GREETING) == is_heard
