"""Machines with one rule of docs/design.md removed. Random runs, the search or a schedule must catch each of them.

Some rules have no machine here, because others cover them:

- A vote for any process of its candidate: a lost disk asks for votes in an unused epoch alone (R14). Without both rules
  it is `VotesAgainForAnEpoch`.
- An epoch that is heard and not made durable: votes and the log's last record keep the epochs that matter.
- Answers to an earlier PreVote or AskEpoch: the votes that follow decide.
- An added replica that counts before all do (ADR 0021): it is not complete then (R14).
- The parts of R17 beside the one here: random runs find them too rarely. `tests/replication/test_generations.py` has
  them.
"""

from __future__ import annotations

from collections.abc import Sequence

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import ElectionState
from raymq.replication.log_receiver import LogReceiver, LogView
from raymq.replication.quorum import (
    confirmed_end,
    majority,
    published_end,
    sees_all_confirmed,
)
from raymq.replication.wire import Ack, ReplicaProcess

from .search import Bounds
from .store import Message, ReplicaStore
from .world import World


class VotesWithoutComparingLogs(ElectionMachine):
    """Rule R3: a candidate whose log lacks records of the voter gets no vote."""

    def _answer_vote(
        self, sender: ReplicaProcess, epoch: int, message: wire.RequestVote, *, is_new: bool
    ) -> None:
        super()._answer_vote(sender, epoch, wire.RequestVote(1 << 60, 0), is_new=is_new)


class VotesTwiceInAnEpoch(ElectionMachine):
    """Rule R3: one vote an epoch."""

    def _answer_vote(
        self, sender: ReplicaProcess, epoch: int, message: wire.RequestVote, *, is_new: bool
    ) -> None:
        super()._answer_vote(sender, epoch, message, is_new=epoch == self.epoch)


class KeepsItsTimes(ElectionMachine):
    """Rules R5 and R16: times follow how late messages come."""

    def __init__(self, me: ReplicaProcess, members, ballot: r.Ballot, **options) -> None:
        super().__init__(me, members, ballot, **options)
        self._patience.slowest_ms = lambda now_ms: 0


class ForgetsItsVote(ElectionMachine):
    """Rules R2 and R3: an epoch and a vote are on disk before an answer relies on them."""

    def _adopt_epoch(self, epoch: int, voted_for: ReplicaProcess | None) -> None:
        super()._adopt_epoch(epoch, voted_for)
        self._effects = [each for each in self._effects if not isinstance(each, r.Persist)]


class VotesForAnyProcess(ElectionMachine):
    """Rule R3: a vote is for one process of a candidate."""

    def _answer_vote(
        self, sender: ReplicaProcess, epoch: int, message: wire.RequestVote, *, is_new: bool
    ) -> None:
        voted_for = self.ballot.voted_for
        is_same = epoch == self.epoch and voted_for is not None and voted_for.id == sender.id
        super()._answer_vote(sender, epoch, message, is_new=is_new or is_same)


class CountsVotesOfEarlierEpochs(ElectionMachine):
    """Rule R3: a vote counts in its own epoch."""

    def _receive(self, event: r.Received) -> None:
        if isinstance(event.message, wire.VoteReply) and event.epoch < self.epoch:
            event = event._replace(epoch=self.epoch)
        super()._receive(event)


class AdmitsOldLeaders(ElectionMachine):
    """Rule R4: log bytes of a lower epoch than that of the ballot are refused."""

    def admits(self, leader: ReplicaProcess, epoch: int) -> bool:
        return self.state is not ElectionState.LEADER


class FollowsOldLeaders(ElectionMachine):
    """Rules R4 and R15: a heartbeat of an older epoch is refused."""

    def _receive(self, event: r.Received) -> None:
        message, old = event.message, event.epoch < self.epoch
        if isinstance(message, wire.CheckLeader) and old and self._is_for_me(event):
            self._follow(event.sender)
            reply = wire.CheckLeaderReply(message.number, self.ballot.is_complete)
            self._effects.append(r.SendElection(event.sender, event.epoch, reply))
        else:
            super()._receive(event)


class ConfirmsEarlierEpochs(ElectionMachine):
    """Rules R6 and R11: records of earlier epochs are confirmed only together with the EPOCH record."""

    def _confirm(self) -> None:
        if self.state is ElectionState.LEADER:
            ends = {**self._leadership.durable_ends, self.me.id: self._log.durable}
            end = confirmed_end(len(self._members), ends)
            if end > self.confirmed:
                self.confirmed = end


class CountsIncompleteFollowers(ElectionMachine):
    """Rule R14: a replica that is not complete does not count for a confirmed end."""

    def _hear_follower(self, event: r.FollowerHeard) -> None:
        super()._hear_follower(event._replace(is_complete=True))


class CountsIncompleteVotes(ElectionMachine):
    """Rule R14: votes of replicas that are not complete count only together with those of all."""

    def _elects(self, votes: dict[int, bool]) -> bool:
        return super()._elects(dict.fromkeys(votes, True))


class IncompleteUsesItsOwnEpoch(ElectionMachine):
    """Rule R14: a candidate that is not complete asks all for their epochs first."""

    def _after_epochs(self) -> None:
        if not self.ballot.is_complete:
            self._ask_votes(self.epoch + 1)


class ForgetsIncomplete(ElectionMachine):
    """Rule R13: a replica that lost data says so until it has caught up."""

    def __init__(self, me: ReplicaProcess, members, ballot: r.Ballot, **options) -> None:
        super().__init__(me, members, ballot._replace(is_complete=True), **options)


class JoinsWithoutAFreshRound(ElectionMachine):
    """Rule R15: a leader names the end to reach after a check that began later."""

    def _after_check(self) -> None:
        for join in self._leadership.joins:
            self._send(join.sender, wire.JoinReply(join.nonce, self._log.end))
        self._leadership.joins = []


class CountsEarlierHeartbeats(ElectionMachine):
    """Rule R15: only a check that began after the question counts, and no heartbeat before it."""

    def _led_newest_epoch(self, after: int) -> bool:
        return super()._led_newest_epoch(0)


class JoinsAfterAMajority(ElectionMachine):
    """Rule R15: all replicas answer the check, because one of them may be a candidate with a forgotten vote."""

    def _led_newest_epoch(self, after: int) -> bool:
        answers = {
            member: is_complete
            for member, (number, is_complete) in self._leadership.answers.items()
            if number > after
        }
        answers[self.me.id] = self.ballot.is_complete
        members = len(self._members)
        return len(answers) >= majority(members) and sees_all_confirmed(members, answers)


class JoinsByAnEarlierMatch(ElectionMachine):
    """Rule R15: the log equals that of the leader that named the end, not that of the leader before."""

    def _join(self) -> None:
        self._log = self._log._replace(matched_epoch=self.epoch)
        super()._join()


class NeverStepsDown(ElectionMachine):
    """Rules R2 and R16: a leader that hears a higher epoch, or no majority, steps down."""

    def _step_down(self, reason: str) -> None:
        if self.state is not ElectionState.LEADER:
            super()._step_down(reason)


class LeadsOnAfterAFailedSync(ElectionMachine):
    """Rule R16: a leader whose sync failed steps down. A later sync that succeeds proves nothing."""

    def step(self, event: r.ElectionEvent, now_ms: int, log: r.LogFacts) -> list[r.ElectionEffect]:
        return [] if isinstance(event, r.OwnSyncFailed) else super().step(event, now_ms, log)


class StaysCompleteAfterAFailedSync(ElectionMachine):
    """Rule R13: a log that lacks what it reported as durable is not complete."""

    def _fail_sync(self, event: r.OwnSyncFailed) -> None:
        super()._fail_sync(r.OwnSyncFailed())


class CopiesNothing(ElectionMachine):
    """Rule R16: a replica copies what it lacks from one that cannot lead. Without it only the votes are left."""

    def may_copy(self, offered: tuple[int, int], own: tuple[int, int]) -> bool:
        return False


class CopiesOverANewerLog(ElectionMachine):
    """Rule R16: nothing is copied any more once the log here has something that the offered one lacks."""

    def may_copy(self, offered: tuple[int, int], own: tuple[int, int]) -> bool:
        return super().may_copy((1 << 60, 0), own)


class IgnoresAdvice(ElectionMachine):
    """A leader that some advice of `LeaderHealth` does not reach. Derived classes say which."""

    ignored_advice: tuple[str, ...] = ()

    def __init__(self, me: ReplicaProcess, members, ballot: r.Ballot, **options) -> None:
        super().__init__(me, members, ballot, **options)
        for watch in self.ignored_advice:
            setattr(self._health, watch, lambda view, **_: None)


class LeadsOnWithSilentStreams(IgnoresAdvice):
    """Rule R16: a leader whose log streams are silent for long lets another replica lead."""

    ignored_advice = ("watch_silence",)


class LeadsOnWithAStalledDisk(IgnoresAdvice):
    """Rule R16: a leader whose disk stores nothing for long lets another replica lead."""

    ignored_advice = ("watch_lateness", "watch_stall")


class LeadsOnUncalled(IgnoresAdvice):
    """Rule R16: a leader that no majority can call lets another replica lead."""

    ignored_advice = ("watch_calls",)


class TakesAnswersToEarlierProcesses(ElectionMachine):
    """Rule R1: an answer belongs to the process that asked. A part of `ReusesAnEpoch`."""

    def _receive(self, event: r.Received) -> None:
        super()._receive(event._replace(addressee=self.me))


class LeadsWithoutAMajority(ElectionMachine):
    """Rule R5: a majority elects."""

    def _elects(self, votes: dict[int, bool]) -> bool:
        return len(votes) >= len(self._members) // 2


class HearsReplacedReplicas(ElectionMachine):
    """Rule R17: a process of a replaced replica is not heard."""

    def is_replaced(self, process: ReplicaProcess) -> bool:
        return False


class CompleteBeforeItsSync(ElectionMachine):
    """Rule R14: a replica that all replicas elected is complete when its log is durable."""

    def _after_votes(self) -> None:
        super()._after_votes()
        if self.state is ElectionState.LEADER and not self.ballot.is_complete:
            self.ballot = self.ballot._replace(is_complete=True)
            self._effects.append(r.Persist(self.ballot))


class AcksBeforeTheSync(LogReceiver):
    """Rule R10: a follower acknowledges what is durable."""

    def acknowledge(self, log: LogView, *, is_complete: bool = True) -> Ack:
        return (
            super().acknowledge(log, is_complete=is_complete)._replace(durable_end=self.matched_end)
        )


def published_without_own_sync(
    epoch_end: int, own_durable: int, follower_ends: Sequence[int]
) -> int:
    """Rule R11: the leader is one of the majority, with what is durable on its own disk."""
    return published_end(epoch_end, max(own_durable, *follower_ends), follower_ends)


def published_before_the_epoch_record(
    epoch_end: int, own_durable: int, follower_ends: Sequence[int]
) -> int:
    """Rule R6: before the EPOCH record is on a majority nothing is confirmed."""
    return published_end(0, own_durable, follower_ends)


class StoresRepeatedPuts(ReplicaStore):
    """Rule R7: a leader recognises a sequence that its log has."""

    def known(self, producer: int) -> list[Message]:
        return []

    def admits(self, sequence: int, known: list[Message]) -> bool:
        return True


class AdmitsGaps(ReplicaStore):
    """Rule R7: a leader refuses a sequence before it has the one before that."""

    def admits(self, sequence: int, known: list[Message]) -> bool:
        return True


class ForgetsProducersBeforeItsEpoch(ReplicaStore):
    """Rule R7: a new leader knows the sequences of its whole log."""

    begun_end = 0

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self.begun_end = len(self.log.data)

    def known(self, producer: int) -> list[Message]:
        return [each for each in super().known(producer) if each.start >= self.begun_end]


class LeadsWithTheConfirmedState(ReplicaStore):
    """Rule R7: a new leader knows the messages after those that it has dispatched, too."""

    def recover(self) -> None:
        self.state.cut(self.log.confirmed_end)
        self.cut_queues(len(self.log.data))

    def begin_epoch(self) -> None:
        return


class RemembersWhatWasCut(ReplicaStore):
    """Rules R7 and R9: a cut takes sequences and queue offsets back."""

    def forget_cut(self, end: int) -> None:
        self.state.end = min(self.state.end, end)


class StampsItsOwnTime(ReplicaStore):
    """Rule R7: a store time is not before the last one in the log, whatever the leader's clock says."""

    def next_store_time_ms(self, clock_ms: int) -> int:
        return clock_ms


class AcknowledgesWhatItAppended(ReplicaStore):
    """Rule R12: a put is acknowledged when its message is confirmed."""

    def acknowledged_end(self) -> int:
        return len(self.log.data)


class DispatchesWhatItAppended(ReplicaStore):
    """Consume queues have confirmed messages only, because none is taken out again."""

    def dispatch_end(self) -> int:
        return len(self.log.data)


class KeepsUnitsAfterTheLog(ReplicaStore):
    """After a power loss the consume queues end where the log does."""

    def cut_queues(self, end: int) -> None:
        self.dispatched = min(self.dispatched, end)


class HearsUnknownReplicas(ElectionMachine):
    """A replica answers none that it does not count, such as a new one whose options are newer (ADR 0021)."""

    def _is_for_me(self, event: r.Received) -> bool:
        others = self._others
        self._others = tuple({*others, event.sender.id} - {self.me.id})
        is_for_me = super()._is_for_me(event)
        self._others = others
        return is_for_me


class AddsCompleteReplicas(World):
    """Rule R13: an added replica is not complete before it has the log of the others (ADR 0021)."""

    def add_replicas(self, replicas: int) -> None:
        super().add_replicas(replicas)
        for node in self.nodes[1:]:
            node.ballot = node.ballot._replace(is_complete=True)


class VotesAgainForAnEpoch(VotesForAnyProcess, IncompleteUsesItsOwnEpoch):
    """Rules R3 and R14 together: each alone keeps a lost disk from leading its epoch again."""


class ReusesAnEpoch(TakesAnswersToEarlierProcesses, IncompleteUsesItsOwnEpoch):
    """Rules R1 and R14 together: each alone keeps an epoch from having two leaders."""


#: random runs of so many replicas find these within some hundred seeds
FOUND_BY_CHAOS: dict[type[ElectionMachine], int] = {
    VotesWithoutComparingLogs: 3,
    VotesTwiceInAnEpoch: 3,
    ForgetsItsVote: 3,
    CountsIncompleteVotes: 3,
    ForgetsIncomplete: 3,
    LeadsWithoutAMajority: 3,
    NeverStepsDown: 3,
    LeadsOnAfterAFailedSync: 1,
    LeadsOnWithSilentStreams: 3,
    LeadsOnWithAStalledDisk: 3,
    LeadsOnUncalled: 3,
}

#: random runs of so many replicas find these within some hundred seeds, if replicas are replaced and still run
FOUND_WHEN_REPLACED: dict[type[ElectionMachine], int] = {
    HearsReplacedReplicas: 3,
}

#: random runs of a shard of one replica that gets two more find these within some ten seeds
FOUND_WHEN_GROWN: tuple[tuple[str, type], ...] = (
    ("machine", HearsUnknownReplicas),
    ("world", AddsCompleteReplicas),
)

#: random runs of three replicas find these stores within some ten seeds
STORES: tuple[type[ReplicaStore], ...] = (
    StoresRepeatedPuts,
    AdmitsGaps,
    ForgetsProducersBeforeItsEpoch,
    LeadsWithTheConfirmedState,
    RemembersWhatWasCut,
    StampsItsOwnTime,
    AcknowledgesWhatItAppended,
    DispatchesWhatItAppended,
    KeepsUnitsAfterTheLog,
)

#: the search finds these within seconds
BOUNDS: dict[type[ElectionMachine], Bounds] = {
    AdmitsOldLeaders: Bounds(restarts=0, records=0),
    ConfirmsEarlierEpochs: Bounds(restarts=0, losses=0, records=2),
    CountsIncompleteFollowers: Bounds(restarts=0, records=0),
    JoinsWithoutAFreshRound: Bounds(restarts=0, records=0),
    FollowsOldLeaders: Bounds(restarts=0, records=0),
    CountsEarlierHeartbeats: Bounds(restarts=0, records=0),
    VotesAgainForAnEpoch: Bounds(restarts=0, records=0, led=False),
    ReusesAnEpoch: Bounds(restarts=0, records=0, holds=(wire.VoteReply,), led=False),
}
