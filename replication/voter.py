"""One process of a replica as the others see it: its ballot, its votes, the leader that it follows, and its joins.

`ElectionMachine` adds what a candidate and a leader do. All here is safety: what a replica has promised, and to
whom. The rules R2 to R17 are in docs/design.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from . import wire
from .election_events import (
    ANSWERS,
    Ballot,
    ElectionEffect,
    ElectionState,
    LeaderHeard,
    LeaderLost,
    LogFacts,
    OwnSyncFailed,
    Persist,
    Received,
    SendElection,
    StepDown,
)
from .election_limits import MOST_SPREAD_DOUBLINGS, ElectionLimits
from .patience import Patience
from .quorum import majority, may_lead
from .wire import (
    CheckLeader,
    CheckLeaderReply,
    Join,
    PreVote,
    PreVoteReply,
    ReplicaProcess,
    RequestVote,
    VoteReply,
)


class Voter(ABC):
    """What every replica does, whether it may lead or not. Effects collect in `_effects` until the step ends."""

    def __init__(
        self,
        me: ReplicaProcess,
        members: Sequence[int],
        ballot: Ballot,
        *,
        candidates: Sequence[int] | None,
        limits: ElectionLimits,
    ) -> None:
        """Args: as of `ElectionMachine`."""
        self.me = me
        self.ballot = ballot
        self.state = ElectionState.FOLLOWER
        #: the leader of the epoch of the ballot, as far as it is known; its id counts
        self.leader: ReplicaProcess | None = None

        self._members = tuple(members)
        self._others = tuple(member for member in members if member != me.id)
        self._electable = tuple(members if candidates is None else candidates)
        self._may_be_candidate = me.id in self._electable
        self._is_sole = self._electable == (me.id,)
        self._limits = limits
        self._patience = Patience(limits)
        #: candidacies in a row after which no leader was heard
        self._candidacies = 0

        self._now_ms = 0
        self._effects: list[ElectionEffect] = []
        self._log = LogFacts(0, 0, 0)
        self._chance = 0.0
        #: when an election begins, or the present one is tried again; None: not known before the first tick
        self._election_ms: int | None = None
        self._leader_heard_ms: int | None = None
        #: the process and the epoch of that heartbeat
        self._heard_leader: tuple[ReplicaProcess, int] | None = None
        #: this process has led or heard a leader
        self._has_seen_leader = False
        #: when this replica first said no to a candidate that it cannot call, since it heard a leader; None: it has not
        self._refusing_since_ms: int | None = None
        #: nonce of the join under way, 0 without one; when it was sent; the end that it must reach
        self._nonce = self._last_nonce = 0
        self._join_sent_ms = 0
        self._join_target: int | None = None

    @abstractmethod
    def _begin_election(self) -> None:
        """Ask whether the others would vote."""

    @abstractmethod
    def _ask_votes(self, epoch: int) -> None:
        """Become a candidate in an epoch."""

    @property
    def epoch(self) -> int:
        """The highest epoch that this replica has heard: it serves none below."""
        return self.ballot.epoch

    def admits(self, leader: ReplicaProcess, epoch: int) -> bool:
        """Whether a frame of log bytes may be taken. Callers: after `step(LeaderHeard)` and its effects."""
        return self._is_follower_of(leader.id, epoch) and not self.is_replaced(leader)

    def follows(self, leader: ReplicaProcess, epoch: int) -> bool:
        """Whether `step(LeaderHeard)` would change nothing, as for nearly every frame."""
        is_known = self._is_follower_of(leader.id, epoch) and self.leader == leader
        return is_known and self.ballot.is_complete and not self.is_replaced(leader)

    # --- generations ------------------------------------------------------------------------------

    def is_replaced(self, process: ReplicaProcess) -> bool:
        """Whether an operator gave the place of this process's replica to a newer one (R17)."""
        return process.incarnation > 0 and process.generation < self.ballot.generation(process.id)

    def _learn(self, process: ReplicaProcess) -> None:
        """Take nothing more from older generations of this process's replica (R17)."""
        if process.generation > 0:
            self._learn_all((*[0] * process.id, process.generation))

    def _learn_all(self, generations: tuple[int, ...]) -> None:
        """Take nothing more from generations older than these (R17)."""
        newest = self.ballot.with_generations(generations)
        if newest == self.ballot:
            return
        self.ballot = newest
        self._effects.append(Persist(self.ballot))
        if self.is_replaced(self.me):
            self._step_down("an operator has replaced this replica")
        elif self.state is ElectionState.LEADER:
            # The log streams of this epoch may count what the replaced replica acknowledges. Those of the next one
            # do not.
            self._ask_votes(self.epoch + 1)

    # --- epochs -----------------------------------------------------------------------------------

    def _adopt_epoch(self, epoch: int, voted_for: ReplicaProcess | None) -> None:
        """Serve no epoch below this one any more."""
        self.ballot = self.ballot._replace(epoch=epoch, voted_for=voted_for)
        self._effects.append(Persist(self.ballot))
        self.leader = None
        self._nonce, self._join_target = 0, None

    def _observe(self, epoch: int) -> None:
        """Follow a higher epoch, whichever message it came with."""
        if epoch > self.epoch:
            self._step_down(f"replica of epoch {epoch} heard")
            self._adopt_epoch(epoch, None)

    def _fail_sync(self, event: OwnSyncFailed) -> None:
        """Lead no more, and vote: without the votes of such replicas a sound one might have no majority (R16)."""
        self._may_be_candidate = False
        self._step_down("a sync of the log failed")
        if self.ballot.is_complete and not event.is_complete:
            self.ballot = self.ballot._replace(is_complete=False)
            self._effects.append(Persist(self.ballot))

    def _step_down(self, reason: str) -> None:
        """End a leadership or a candidacy (R16)."""
        if self.state is ElectionState.LEADER:
            self._effects.append(StepDown(reason))
            self.leader = None
        if self.state is not ElectionState.FOLLOWER:
            self.state = ElectionState.FOLLOWER
            self._await_leader()

    def _await_leader(self, times: int = 1) -> None:
        """Begin an election later, unless a leader is heard before."""
        patience_ms = self._patience.election_ms(self._now_ms)
        spread_ms = patience_ms << min(self._candidacies, MOST_SPREAD_DOUBLINGS)
        self._election_ms = self._now_ms + times * int(patience_ms + spread_ms * self._chance)

    def _is_leader_of(self, epoch: int) -> bool:
        """Whether this process was elected in that epoch, and still leads."""
        return self.state is ElectionState.LEADER and epoch == self.epoch

    def _elects(self, votes: dict[int, bool]) -> bool:
        """Whether these votes make a leader: `quorum.may_lead`."""
        return may_lead(len(self._members), votes, sole=self._is_sole)

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, addressee: ReplicaProcess, message: wire.Election) -> None:
        """Send one message under this replica's epoch."""
        self._effects.append(SendElection(addressee, self.epoch, message))

    def _ask_others(self, message: wire.Election) -> None:
        """Ask each other replica, whichever process it has now."""
        for member in self._others:
            self._send(ReplicaProcess(member, 0), message)

    def _is_for_me(self, event: Received) -> bool:
        """Whether a message of another member is for this process.

        An answer belongs to the process that asked, because an earlier one may have asked for another candidacy. A
        question may name no incarnation.
        """
        addressee = event.addressee
        if event.sender.id not in self._others or addressee.id != self.me.id:
            return False
        if self.is_replaced(event.sender) or self.is_replaced(self.me):
            return False
        if addressee.incarnation == 0:
            return not isinstance(event.message, ANSWERS)
        return addressee.incarnation == self.me.incarnation

    def _answer_check(self, sender: ReplicaProcess, message: CheckLeader) -> None:
        """Follow the leader, unless it has heard that this replica was replaced."""
        # Before the answer, which says that this replica takes nothing from older ones.
        self._learn_all(message.generations)
        if self.is_replaced(self.me):
            return
        self._hear_heartbeat(sender)
        log, is_complete = self._log, self.ballot.is_complete
        uncallable = tuple(sorted(log.uncallable))
        answer = CheckLeaderReply(message.number, is_complete, log.can_stream, uncallable)
        self._send(sender, answer)

    # --- votes ------------------------------------------------------------------------------------

    def _answer_pre_vote(self, sender: ReplicaProcess, epoch: int, message: PreVote) -> None:
        """Say whether this replica would vote. One that hears a leader says no, and one that could lead better (R5)."""
        recency = message.last_epoch, message.end
        granted = (
            not self._is_led()
            and epoch >= self.epoch
            and recency >= self._log.recency
            and (message.can_stream or not self._could_lead_instead(recency))
            and not self._refuses_uncallable(sender.id, recency)
        )
        is_complete = self.ballot.is_complete
        offers_log = is_complete and recency < self._log.recency
        offered = self._log.offered if offers_log else (0, 0)
        self._send(sender, PreVoteReply(message.number, granted, is_complete, *offered))

    @property
    def _may_take_over(self) -> bool:
        """Whether this replica may ask for votes at once when the leader asks it to."""
        return self._may_be_candidate and self.ballot.is_complete and self._log.can_stream

    def _could_lead_instead(self, recency: tuple[int, int]) -> bool:
        """Whether this replica could lead, and stream its log, in the place of a candidate with that log.

        Not before it has seen a leader: when all replicas start, one is preferred, whose Replication may come later.
        """
        return self._has_seen_leader and self._could_lead(recency)

    def _could_lead(self, recency: tuple[int, int]) -> bool:
        """Whether this replica could lead, and stream its log, and that log is at least as recent."""
        log = self._log
        return self._may_take_over and log.is_writable and log.recency >= recency

    def _refuses_uncallable(self, candidate: int, recency: tuple[int, int]) -> bool:
        """Whether this replica cannot call a candidate, and could lead in its place, because it can call enough (R5).

        Clients could not call that candidate either. A shard without a leader is worse: so not for long.
        """
        uncallable = self._log.uncallable
        if candidate not in uncallable or not self._could_lead(recency):
            return False
        if len(self._members) - len(uncallable) < majority(len(self._members)):
            return False
        if self._refusing_since_ms is None:
            self._refusing_since_ms = self._now_ms
        return self._now_ms - self._refusing_since_ms <= self._limits.refuse_uncallable_ms

    def _is_led(self) -> bool:
        """Whether this replica leads, or hears a leader."""
        heard_ms = self._leader_heard_ms
        return self.state is ElectionState.LEADER or (
            heard_ms is not None
            and self._now_ms - heard_ms < self._patience.election_ms(self._now_ms)
        )

    def _answer_vote(
        self, sender: ReplicaProcess, epoch: int, message: RequestVote, *, is_new: bool
    ) -> None:
        """Vote once in an epoch, for a log at least as recent as this one (R3).

        Args: `is_new`: the request brought the epoch here, so that no vote was given in it.
        """
        may_vote = is_new or (epoch == self.epoch and self.ballot.voted_for == sender)
        granted = may_vote and (message.last_epoch, message.end) >= self._log.recency

        if granted and self.ballot.voted_for != sender:
            self._adopt_epoch(epoch, sender)
        if granted:
            self._await_leader()

        self._send(sender, VoteReply(granted, self.ballot.is_complete))

    def may_copy(self, offered: tuple[int, int], own: tuple[int, int]) -> bool:
        """Whether bytes of the log of a replica that cannot lead may be copied, which this log lacks (R16).

        Its records are of epochs that this replica has heard, because the offer came with the ballot's epoch.
        Args: `offered`, `own`: the recency of both logs. Callers: while nothing else changes the log. A later epoch
        must refuse what is written.
        """
        is_looking = self.state in (ElectionState.FOLLOWER, ElectionState.PRE_CANDIDATE)
        return is_looking and self.leader is None and own < offered

    # --- the follower -----------------------------------------------------------------------------

    def _hear_leader(self, event: LeaderHeard) -> None:
        """Follow the leader of the newest epoch. An older one learns of the newer epoch by the refusal.

        The process that streams the log outlives the one that leads. So the election is not put off.
        """
        if self.is_replaced(event.leader):
            return
        self._observe(event.epoch)
        self._learn(event.leader)
        if event.epoch == self.epoch:
            self._follow(event.leader)

    def _hear_heartbeat(self, leader: ReplicaProcess) -> None:
        """Follow the leader of the present epoch, whose process lives: there is nothing to elect for now."""
        self._measure_heartbeat(leader, self.epoch)
        self._leader_heard_ms, self._heard_leader = self._now_ms, (leader, self.epoch)
        self._has_seen_leader = True
        self._candidacies = 0
        self._refusing_since_ms = None
        self._await_leader()
        self._follow(leader)

    def _measure_heartbeat(self, leader: ReplicaProcess, epoch: int) -> None:
        """Note for how long a leader was not heard, whose heartbeat has just come: before its epoch is over, or after.

        One of another epoch, which the same process leads, ends no silence of this one.
        """
        if self._leader_heard_ms is not None and (leader, epoch) == self._heard_leader:
            self._patience.measure_gap(self._now_ms - self._leader_heard_ms, self._now_ms)

    def _lose_leader(self, event: LeaderLost) -> None:
        """Ask for votes without waiting for the heartbeats of a process that has ended.

        The followers take turns: two that asked at the same time would share the votes.
        """
        if not self._is_follower_of(event.leader, event.epoch):
            return
        self._leader_heard_ms = None
        turn = [member for member in self._members if member != event.leader].index(self.me.id)
        self._election_ms = self._now_ms + turn * self._limits.turn_ms
        if turn == 0 and self._may_be_candidate:
            self._begin_election()

    def _is_follower_of(self, leader: int, epoch: int) -> bool:
        """Whether that replica leads the present epoch, as far as this one, which follows, knows."""
        return (
            self.state is ElectionState.FOLLOWER
            and epoch == self.epoch
            and self.leader is not None
            and self.leader.id == leader
            and not self.is_replaced(self.me)
        )

    def _follow(self, leader: ReplicaProcess) -> None:
        """Note who leads the present epoch."""
        if self.state is ElectionState.LEADER:
            return
        self.state = ElectionState.FOLLOWER
        self.leader = leader
        if not self.ballot.is_complete:
            self._join()

    def _join(self) -> None:
        """Become complete: ask the leader for an end, and reach it (R15)."""
        target, log = self._join_target, self._log
        # Heartbeats name a new leader while the log is still compared with that of the leader before.
        matched = log.matched if log.matched_epoch == self.epoch else 0
        if target is not None and self.leader is not None and matched >= target:
            if log.durable >= target:
                self.ballot = self.ballot._replace(is_complete=True)
                self._effects.append(Persist(self.ballot))
                self._nonce, self._join_target = 0, None
            return

        is_due = self._now_ms - self._join_sent_ms >= self._limits.retry_ms
        if target is None and self.leader is not None and (not self._nonce or is_due):
            if not self._nonce:
                self._nonce = self._last_nonce = self._last_nonce + 1
            self._join_sent_ms = self._now_ms
            self._send(ReplicaProcess(self.leader.id, 0), Join(self._nonce))
