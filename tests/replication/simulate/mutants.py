"""Machines with one rule of docs/design.md removed. The simulation or the exhaustive search must catch each of them."""

from __future__ import annotations

from raymq.replication import replica as r
from raymq.replication import wire
from raymq.replication.mirror_follower import LogView, MirrorFollower
from raymq.replication.quorum import confirmed_end
from raymq.replication.replica import Replica, Role
from raymq.replication.wire import Ack, ReplicaProcess

from .search import Bounds


class VotesWithoutComparingLogs(Replica):
    """Rule R3: a candidate whose log lacks records of the voter gets no vote."""

    def _answer_vote(
        self, sender: ReplicaProcess, epoch: int, message: wire.Vote, *, is_new: bool
    ) -> None:
        super()._answer_vote(sender, epoch, wire.Vote(1 << 60, 0), is_new=is_new)


class VotesTwiceInAnEpoch(Replica):
    """Rule R3: one vote an epoch."""

    def _answer_vote(
        self, sender: ReplicaProcess, epoch: int, message: wire.Vote, *, is_new: bool
    ) -> None:
        super()._answer_vote(sender, epoch, message, is_new=epoch == self.epoch)


class ForgetsItsVote(Replica):
    """Rule R3: a vote is on disk before its answer is sent."""

    def _promise(self, epoch: int, voted_for: ReplicaProcess | None) -> None:
        super()._promise(epoch, voted_for)
        self._effects = [each for each in self._effects if not isinstance(each, r.Persist)]


class AdmitsOldLeaders(Replica):
    """Rule R4: log bytes of a lower epoch than the promised one are refused."""

    def admits(self, leader: ReplicaProcess, epoch: int) -> bool:
        return self.role is not Role.LEADER


class ConfirmsEarlierEpochs(Replica):
    """Rule R11: records of earlier epochs are confirmed only together with the EPOCH record."""

    def _confirm(self) -> None:
        if self.role is Role.LEADER:
            ends = {**self._leadership.durable_ends, self.me.id: self._log.durable}
            end = confirmed_end(len(self._members), ends)
            if end > self.confirmed:
                self.confirmed = end
                self._effects.append(r.Confirm(end))


class CountsUncleanFollowers(Replica):
    """Rule R14: a replica that is not clean does not count for a confirmed end."""

    def _hear_follower(self, event: r.FollowerHeard) -> None:
        super()._hear_follower(event._replace(is_clean=True))


class CountsUncleanVotes(Replica):
    """Rule R14: votes of replicas that are not clean count only together with those of all."""

    def _elects(self, votes: dict[int, bool]) -> bool:
        return super()._elects(dict.fromkeys(votes, True))


class UncleanUsesItsOwnEpoch(Replica):
    """Rule R14: a candidate that is not clean asks all for their epochs first."""

    def _after_promises(self) -> None:
        if not self.ballot.is_clean:
            self._ask_votes(self.epoch + 1)


class ForgetsUnclean(Replica):
    """Rule R13: a replica that lost data says so until it has caught up."""

    def __init__(self, me: ReplicaProcess, members, ballot: r.Ballot, **options) -> None:
        super().__init__(me, members, ballot._replace(is_clean=True), **options)


class JoinsWithoutAFreshRound(Replica):
    """Rule R15: a leader names the end to reach after a fresh round of answers."""

    def _after_check(self) -> None:
        for sender, nonce in self._leadership.joins:
            self._send(sender, wire.JoinReply(nonce, self._log.end))
        self._leadership.joins = []


class TakesAnswersToEarlierProcesses(Replica):
    """Rule R1: an answer belongs to the process that asked."""

    def _receive(self, event: r.Received) -> None:
        super()._receive(event._replace(addressee=self.me))


class LeadsWithoutAMajority(Replica):
    """Rule R5: a majority elects."""

    def _elects(self, votes: dict[int, bool]) -> bool:
        return len(votes) >= len(self._members) // 2


class AcksBeforeTheSync(MirrorFollower):
    """Rule R10: a follower acknowledges what is durable."""

    def acknowledge(self, log: LogView, *, is_clean: bool = True) -> Ack:
        return super().acknowledge(log, is_clean=is_clean)._replace(durable_end=self.matched_end)


class ReusesAnEpoch(TakesAnswersToEarlierProcesses, UncleanUsesItsOwnEpoch):
    """Rules R1 and R14 together: each alone keeps an epoch from having two leaders."""


#: random runs find these within some hundred seeds
FOUND_BY_CHAOS: tuple[type[Replica], ...] = (
    VotesWithoutComparingLogs,
    VotesTwiceInAnEpoch,
    ForgetsItsVote,
    CountsUncleanVotes,
    ForgetsUnclean,
    LeadsWithoutAMajority,
)

#: the search finds these within seconds
BOUNDS: dict[type[Replica], Bounds] = {
    AdmitsOldLeaders: Bounds(restarts=0, records=0),
    ConfirmsEarlierEpochs: Bounds(restarts=0, losses=0, records=2),
    CountsUncleanFollowers: Bounds(restarts=0, records=0),
    JoinsWithoutAFreshRound: Bounds(restarts=0, records=0),
    ReusesAnEpoch: Bounds(restarts=0, records=0, holds=True, led=False),
}
