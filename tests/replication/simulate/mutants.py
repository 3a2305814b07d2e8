"""Machines with one rule of docs/design.md removed. The simulation or the exhaustive search must catch each of them."""

from __future__ import annotations

from raymq.replication import election as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine, ElectionState
from raymq.replication.log_receiver import LogReceiver, LogView
from raymq.replication.quorum import confirmed_end
from raymq.replication.wire import Ack, ReplicaProcess

from .search import Bounds


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


class ForgetsItsVote(ElectionMachine):
    """Rule R3: a vote is on disk before its answer is sent."""

    def _adopt_epoch(self, epoch: int, voted_for: ReplicaProcess | None) -> None:
        super()._adopt_epoch(epoch, voted_for)
        self._effects = [each for each in self._effects if not isinstance(each, r.Persist)]


class AdmitsOldLeaders(ElectionMachine):
    """Rule R4: log bytes of a lower epoch than that of the ballot are refused."""

    def admits(self, leader: ReplicaProcess, epoch: int) -> bool:
        return self.state is not ElectionState.LEADER


class ConfirmsEarlierEpochs(ElectionMachine):
    """Rule R11: records of earlier epochs are confirmed only together with the EPOCH record."""

    def _confirm(self) -> None:
        if self.state is ElectionState.LEADER:
            ends = {**self._leadership.durable_ends, self.me.id: self._log.durable}
            end = confirmed_end(len(self._members), ends)
            if end > self.confirmed:
                self.confirmed = end
                self._effects.append(r.Confirm(end))


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


class TakesAnswersToEarlierProcesses(ElectionMachine):
    """Rule R1: an answer belongs to the process that asked."""

    def _receive(self, event: r.Received) -> None:
        super()._receive(event._replace(addressee=self.me))


class LeadsWithoutAMajority(ElectionMachine):
    """Rule R5: a majority elects."""

    def _elects(self, votes: dict[int, bool]) -> bool:
        return len(votes) >= len(self._members) // 2


class AcksBeforeTheSync(LogReceiver):
    """Rule R10: a follower acknowledges what is durable."""

    def acknowledge(self, log: LogView, *, is_complete: bool = True) -> Ack:
        return (
            super().acknowledge(log, is_complete=is_complete)._replace(durable_end=self.matched_end)
        )


class ReusesAnEpoch(TakesAnswersToEarlierProcesses, IncompleteUsesItsOwnEpoch):
    """Rules R1 and R14 together: each alone keeps an epoch from having two leaders."""


#: random runs find these within some hundred seeds
FOUND_BY_CHAOS: tuple[type[ElectionMachine], ...] = (
    VotesWithoutComparingLogs,
    VotesTwiceInAnEpoch,
    ForgetsItsVote,
    CountsIncompleteVotes,
    ForgetsIncomplete,
    LeadsWithoutAMajority,
)

#: the search finds these within seconds
BOUNDS: dict[type[ElectionMachine], Bounds] = {
    AdmitsOldLeaders: Bounds(restarts=0, records=0),
    ConfirmsEarlierEpochs: Bounds(restarts=0, losses=0, records=2),
    CountsIncompleteFollowers: Bounds(restarts=0, records=0),
    JoinsWithoutAFreshRound: Bounds(restarts=0, records=0),
    ReusesAnEpoch: Bounds(restarts=0, records=0, holds=(wire.VoteReply,), led=False),
}
