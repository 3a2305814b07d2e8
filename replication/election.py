"""Elections, fencing and confirmation of one replica of a shard: a pure machine.

The protocol is Raft's, with byte offsets as indexes and epochs as terms. A replica persists the highest epoch that it
has heard, and its vote. No clock, file, socket or random number is inside: `step(event, now_ms, log)` takes an event
and the facts of the log, and returns effects that the host performs in order. Safety needs no time.

    FOLLOWER --no leader heard--> PRE_CANDIDATE --enough would vote--> CANDIDATE --elected--> LEADER
       ^                               |                                   |                    |
       +---- a leader or a higher epoch; no majority heard; silent log streams; a failed sync --+

A leader sends heartbeats to all others. Each asks whether the epoch is still the newest, and so is a check. The leader
begins its epoch with an EPOCH record at its log's end. It confirms nothing before a majority holds that record durably,
because records of earlier epochs are not safe by their number of copies alone.

A replica that is not complete (see `quorum`) votes, and its answers say so. It leads only if all replicas vote for it,
and is complete once its EPOCH record is durable. As a follower it becomes complete when its log equals the leader's up
to an end that the leader named after a check that began later and that all answered: otherwise the epoch of the leader
may be over, or end by a vote that the replica has forgotten.

A replica that an operator replaced has a new *generation*. Each replica keeps the newest one that it heard of, and
takes nothing from a process of an older one. A check names them, so that all others know the new generation before the
new replica is complete. The rules R2 to R17 are in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import wire
from .election_events import (
    Ballot,
    BeginEpoch,
    CheckAsked,
    CopyLog,
    ElectionEffect,
    ElectionEvent,
    ElectionState,
    ElectionTick,
    EpochBegun,
    FollowerHeard,
    HandOver,
    LeaderHeard,
    LeaderLost,
    LogFacts,
    OwnSyncFailed,
    Persist,
    Received,
    ResumePuts,
    StopPuts,
)
from .election_limits import ElectionLimits
from .leader_health import Advice, LeaderHealth, LeaderView
from .leader_knowledge import LeaderKnowledge, WaitingJoin
from .quorum import confirmed_end, sees_all_confirmed
from .voter import Voter
from .wire import (
    AskEpoch,
    CheckLeader,
    CheckLeaderReply,
    EpochReply,
    Join,
    JoinReply,
    PreVote,
    PreVoteReply,
    ReplicaProcess,
    RequestVote,
    TakeOver,
    VoteReply,
)


class ElectionMachine(Voter):
    """One process of a replica. Callers: one at a time, under the lock that also orders appends and truncations."""

    def __init__(
        self,
        me: ReplicaProcess,
        members: Sequence[int],
        ballot: Ballot,
        *,
        candidates: Sequence[int] | None = None,
        limits: ElectionLimits | None = None,
        is_preferred: bool = False,
    ) -> None:
        """Args: `members`: ids of all replicas, this one included. `candidates`: those that may lead (default: all).

        `is_preferred`: this replica asks for votes as soon as it starts, unless another one leads by then.
        """
        limits = limits or ElectionLimits()
        super().__init__(me, members, ballot, candidates=candidates, limits=limits)
        #: the confirmed end, as far as this process led it
        self.confirmed = 0
        #: the replicas that were not complete when they elected this process, this replica included
        self.incomplete_voters: tuple[int, ...] = ()
        self._is_preferred = is_preferred
        #: number of the last question to all others
        self._question = 0
        #: answers to the present question: replica -> complete
        self._answers: dict[int, bool] = {}
        self._highest_epoch = 0
        self._leadership = LeaderKnowledge()
        self._health = LeaderHealth(me.id, self._members, self._electable, limits)
        #: of the own log at the last tick
        self._durable_end = 0

    @property
    def leads(self) -> bool:
        """Whether this process may append: it was elected in this epoch, and its EPOCH record is in the log."""
        return self.state is ElectionState.LEADER and self._leadership.begun_end is not None

    @property
    def check_number(self) -> int:
        """Number of the last check of this leadership."""
        return self._leadership.check_number

    def led_at(self, check: int) -> bool:
        """Whether no later epoch was led when that check of this leadership began, as its answers prove (R18).

        A later leader was elected by replicas of which at least one is among these, and would have refused. Callers:
        any thread.
        """
        return self._elects(self._answered_since(check))

    def step(self, event: ElectionEvent, now_ms: int, log: LogFacts) -> list[ElectionEffect]:
        """Take one event. Returns: the effects to perform, in order."""
        self._now_ms, self._effects, self._log = now_ms, [], log

        if isinstance(event, Received):
            self._receive(event)
        elif isinstance(event, ElectionTick):
            self._chance = event.chance
            self._tick()
        elif isinstance(event, LeaderHeard):
            self._hear_leader(event)
        elif isinstance(event, LeaderLost):
            self._lose_leader(event)
        elif isinstance(event, FollowerHeard):
            self._hear_follower(event)
        elif isinstance(event, EpochBegun):
            if self.state is ElectionState.LEADER and event.epoch == self.epoch:
                self._leadership.begun_end = event.end
        elif isinstance(event, OwnSyncFailed):
            self._fail_sync(event)
        elif isinstance(event, HandOver):
            self._begin_hand_over(event.to, "an operator asked for it")
        elif isinstance(event, CheckAsked) and self.state is ElectionState.LEADER:
            self._begin_check()
            # As with each heartbeat, of which this check takes the place.
            self._hand_over()

        self._confirm()
        return self._effects

    @property
    def bears_stall(self) -> bool:
        """Whether the last leadership ended by a stalled disk: those of the other replicas may be no better."""
        return self._health.stalled_leaderships > 0

    def best_successor(self) -> int | None:
        """See `LeaderHealth.best_successor`. Callers: any thread."""
        return self._health.best_successor(self._view())

    def _view(self) -> LeaderView:
        """What `LeaderHealth` sees of this leader."""
        return LeaderView(
            self._now_ms,
            self._log,
            self._leadership,
            self.leads,
            self._patience.slowest_ms(self._now_ms),
            self._patience.silence_ms(self._now_ms),
        )

    def wait_ms(self, now_ms: int) -> int:
        """How long `step` may stay uncalled without an event."""
        limits = self._limits
        if self.is_replaced(self.me):
            return limits.election_ms
        if self.state is ElectionState.LEADER:
            due_ms = self._leadership.checked_ms + self._check_ms
        elif not self.ballot.is_complete:
            # At any time it may hear of a leader that it can join, or its log may reach the end that it needs.
            return limits.retry_ms
        elif self._may_be_candidate:
            due_ms = self._election_ms or 0
        else:
            return limits.election_ms
        return max(0, due_ms - now_ms)

    def _receive(self, event: Received) -> None:
        """Take a message: first its epoch (R2), then its contents."""
        if not self._is_for_me(event):
            return

        self._patience.measure_answer(event, self._now_ms)
        sender, _, epoch, message = event
        # A question before an election raises no epoch.
        raises_epoch = not isinstance(message, (PreVote, AskEpoch, EpochReply))
        is_new = raises_epoch and epoch > self.epoch
        if raises_epoch:
            self._observe(epoch)
        self._learn(sender)

        if isinstance(message, PreVote):
            self._answer_pre_vote(sender, epoch, message)
        elif isinstance(message, AskEpoch):
            if not self._is_led():
                self._send(sender, EpochReply(message.number, self.ballot.is_complete))
        elif isinstance(message, EpochReply):
            self._take_epoch(sender, epoch, message)
        elif isinstance(message, RequestVote):
            self._answer_vote(sender, epoch, message, is_new=is_new)
        elif isinstance(message, PreVoteReply):
            # Its question has a number, and raised no epoch: the other replica may not have heard of this one.
            self._take_pre_vote(sender, message)
        elif epoch == self.epoch:
            self._receive_in_epoch(sender, message)
        elif isinstance(message, CheckLeader):
            self._measure_heartbeat(sender, epoch)
            self._send(sender, wire.NewerEpoch())

    def _receive_in_epoch(self, sender: ReplicaProcess, message: wire.Election) -> None:
        """Take a message of this replica's epoch."""
        if isinstance(message, VoteReply):
            self._take_vote(sender, message)
        elif isinstance(message, CheckLeader):
            self._answer_check(sender, message)
        elif isinstance(message, CheckLeaderReply):
            self._take_check(sender, message)
        elif isinstance(message, Join):
            self._take_join(sender, message)
        elif isinstance(message, JoinReply) and 0 < message.nonce == self._nonce:
            self._join_target = message.target
        elif isinstance(message, TakeOver) and self._may_take_over:
            self._ask_votes(self.epoch + 1)

    def _tick(self) -> None:
        """Do what is due: a leader's checks, a join, an election."""
        if self.is_replaced(self.me):
            return
        if self._election_ms is None:
            self._await_leader()
            if self._is_sole or self._is_preferred:
                # A replica that hears a leader refuses its vote, so that nothing is lost by asking.
                self._election_ms = self._now_ms

        has_advanced = self._log.durable > self._durable_end
        self._durable_end = self._log.durable
        if self.state is ElectionState.LEADER:
            self._tick_leader(has_advanced=has_advanced)
            return

        if has_advanced and self._log.is_writable:
            self._health.note_stored()
        if not self.ballot.is_complete:
            self._join()
        if self._now_ms >= (self._election_ms or 0) and self._may_be_candidate:
            self._begin_election()

    # --- the candidate ----------------------------------------------------------------------------

    def _begin_election(self) -> None:
        """Ask whether the others would vote, or, after a loss of data, for their epochs (R5)."""
        self._await_leader()
        self.state = ElectionState.PRE_CANDIDATE
        self.leader = None

        self._question += 1
        self._patience.note_asked(PreVote, self._question, self._now_ms)
        self._answers = {self.me.id: self.ballot.is_complete}
        if not self.ballot.is_complete:
            # Its own ballot may have been lost. Only all replicas together know the epochs that are used up.
            self._highest_epoch = self.epoch
            self._ask_others(AskEpoch(self._question))
            self._after_epochs()
        else:
            self._ask_others(
                PreVote(self._question, *self._log.recency, can_stream=self._log.can_stream)
            )
            self._after_pre_votes()

    def _take_pre_vote(self, sender: ReplicaProcess, message: PreVoteReply) -> None:
        """Count one answer to the present question, or copy the log that it offers."""
        if self.state is not ElectionState.PRE_CANDIDATE or message.number != self._question:
            return
        if message.granted:
            self._answers[sender.id] = message.is_complete
            self._after_pre_votes()
        elif message.end > 0 and self.ballot.is_complete:
            self._effects.append(CopyLog(sender, message.last_epoch, message.end))

    def _after_pre_votes(self) -> None:
        """Ask for votes once enough replicas would vote."""
        if self.ballot.is_complete and self._elects(self._answers):
            self._ask_votes(self.epoch + 1)

    def _take_epoch(self, sender: ReplicaProcess, epoch: int, message: EpochReply) -> None:
        """Count one answer to the present question, and its epoch."""
        if self.state is ElectionState.PRE_CANDIDATE and message.number == self._question:
            self._answers[sender.id] = message.is_complete
            self._highest_epoch = max(self._highest_epoch, epoch)
            self._after_epochs()

    def _after_epochs(self) -> None:
        """Ask for votes in an unused epoch once every replica has named its own."""
        if not self.ballot.is_complete and len(self._answers) == len(self._members):
            self._ask_votes(self._highest_epoch + 1)

    def _ask_votes(self, epoch: int) -> None:
        """Become a candidate in that epoch. Its own vote is durable first (R3)."""
        self._step_down("an election begins")
        self._adopt_epoch(epoch, self.me)
        self._await_leader()
        self._candidacies += 1
        self._patience.note_asked(RequestVote, epoch, self._now_ms)

        self.state = ElectionState.CANDIDATE
        self._answers = {self.me.id: self.ballot.is_complete}
        self._ask_others(RequestVote(*self._log.recency))
        self._after_votes()

    def _take_vote(self, sender: ReplicaProcess, message: VoteReply) -> None:
        """Count one vote."""
        if self.state is ElectionState.CANDIDATE and message.granted:
            self._answers[sender.id] = message.is_complete
            self._after_votes()

    def _after_votes(self) -> None:
        """Lead once enough replicas voted (R6)."""
        if not self._elects(self._answers):
            return

        self.state = ElectionState.LEADER
        self.leader = self.me
        self._has_seen_leader = True
        self._heard_leader, self._candidacies = None, 0
        heard_ms = dict.fromkeys(self._answers, self._now_ms)
        self._leadership = LeaderKnowledge(
            since_ms=self._now_ms,
            heard_ms=heard_ms,
            stored_ms=self._now_ms,
            could_stream_ms=self._now_ms,
            called_ms=self._now_ms,
        )
        self._refusing_since_ms = None
        self.incomplete_voters = tuple(
            replica for replica, is_complete in self._answers.items() if not is_complete
        )
        self._begin_check()
        self._effects.append(BeginEpoch(self.epoch))

    # --- the leader -------------------------------------------------------------------------------

    def _tick_leader(self, *, has_advanced: bool) -> None:
        """Step down without a majority, or as advised (R16); send a heartbeat; end a hand-over that failed.

        Args: `has_advanced`: more of the log is durable than before.
        """
        leadership, silence_ms = self._leadership, self._patience.silence_ms(self._now_ms)
        if self._health.misses_majority(leadership.heard_ms, silence_ms, self._now_ms):
            self._step_down(f"no majority was heard for {silence_ms} ms")
            return
        if not self._heed_health(has_advanced=has_advanced):
            return

        if leadership.hand_over_to is not None and self._now_ms >= leadership.hand_over_until_ms:
            self._effects.append(ResumePuts(f"replica {leadership.hand_over_to} did not take over"))
            leadership.hand_over_to = None

        if self._now_ms - leadership.checked_ms >= self._check_ms:
            self._begin_check()
            self._hand_over()

    def _heed_health(self, *, has_advanced: bool) -> bool:
        """Let another replica lead if that is better for clients (R16). Returns: whether this one still leads.

        Args: as of `_tick_leader`.
        """
        health = self._health
        watches: tuple[Callable[[LeaderView], Advice | None], ...] = (
            health.watch_silence,
            health.watch_streams,
            health.watch_calls,
            lambda view: health.watch_lateness(view, has_advanced=has_advanced),
            lambda view: health.watch_stall(view, has_advanced=has_advanced),
        )
        for watch in watches:
            advice = watch(self._view())
            if advice is not None:
                self._follow_advice(advice)
            if self.state is not ElectionState.LEADER:
                return False
        return True

    def _follow_advice(self, advice: Advice) -> None:
        """Hand over, or step down so that others have the first try."""
        successor = advice.successor
        if successor is not None and advice.hands_over:
            self._begin_hand_over(successor, advice.reason)
            return
        if successor is not None:
            self._send(ReplicaProcess(successor, 0), TakeOver())
        self._step_down(advice.reason)
        self._await_leader(times=2)

    @property
    def _check_ms(self) -> int:
        """The time from a check to the next one. Each also repeats the request to take over."""
        limits = self._limits
        if self._leadership.hand_over_to is None:
            return limits.heartbeat_ms
        return min(limits.heartbeat_ms, limits.retry_ms)

    def _hear(self, replica: int) -> None:
        """Note an answer to this leader, and for how long no majority had answered, if one has now."""
        known, members, me = self._leadership, len(self._members), self.me.id
        before_ms = known.majority_heard_ms(members, me)
        known.heard_ms[replica] = self._now_ms
        after_ms = known.majority_heard_ms(members, me)
        if 0 < before_ms < after_ms:
            self._patience.measure_gap(after_ms - before_ms, self._now_ms)

    def _hear_follower(self, event: FollowerHeard) -> None:
        """Count what a follower holds durably, if it is complete (R11, R14)."""
        if not self._is_leader_of(event.epoch):
            return

        leadership = self._leadership
        leadership.heard_ms[event.follower] = leadership.streamed_ms[event.follower] = self._now_ms
        self._health.note_streams(leadership)
        if event.is_complete:
            known = leadership.durable_ends.get(event.follower, 0)
            leadership.durable_ends[event.follower] = max(known, event.durable_end)
        self._hand_over()

    def _confirm(self) -> None:
        """Raise the confirmed end to what enough complete replicas hold, the EPOCH record included (R6, R11)."""
        begun_end = self._leadership.begun_end
        if self.state is not ElectionState.LEADER or begun_end is None:
            return

        if not self.ballot.is_complete and self._log.durable >= begun_end:
            # Every replica voted, and no log was ahead of this one: it has all that was ever confirmed. Before that is
            # durable, a power loss may take it away.
            self.ballot = self.ballot._replace(is_complete=True)
            self._effects.append(Persist(self.ballot))

        ends = {**self._leadership.durable_ends, self.me.id: self._log.durable}
        end = confirmed_end(len(self._members), ends)
        if end >= begun_end and end > self.confirmed:
            self.confirmed = end

    # --- checks -----------------------------------------------------------------------------------

    def _begin_check(self) -> None:
        """Ask all whether this is still the newest epoch. Each also learns from the question who leads it."""
        self._leadership.check_number += 1
        self._leadership.checked_ms = self._now_ms
        self._ask_others(CheckLeader(self._leadership.check_number, self.ballot.generations))
        self._after_check()

    def _take_check(self, sender: ReplicaProcess, message: CheckLeaderReply) -> None:
        """Count one answer to a check, present or past: a slow answer is one, too."""
        if self.state is not ElectionState.LEADER:
            return

        leadership = self._leadership
        self._hear(sender.id)
        if message.number > leadership.answers.get(sender.id, (0, False))[0]:
            leadership.answers[sender.id] = message.number, message.is_complete
            leadership.uncallable[sender.id] = frozenset(message.uncallable)
            if message.can_stream:
                leadership.not_streaming.discard(sender.id)
            else:
                leadership.not_streaming.add(sender.id)
            self._after_check()

    def _take_join(self, sender: ReplicaProcess, message: Join) -> None:
        """Let a replica wait for the next check. One that comes during a check waits for the check after it (R15)."""
        if self.state is not ElectionState.LEADER or self._leadership.begun_end is None:
            return

        leadership = self._leadership
        waiting = [each for each in leadership.joins if each.sender.id == sender.id]
        if (sender, message.nonce) in [each[:2] for each in waiting]:
            # A repeated question. The answers since the first one count.
            return
        for each in waiting:
            leadership.joins.remove(each)
        leadership.joins.append(WaitingJoin(sender, message.nonce, leadership.check_number))
        self._begin_check()

    def _after_check(self) -> None:
        """Name the log's end to each that waits, once all replicas said that this epoch is the newest (R15)."""
        leadership = self._leadership
        for join in list(leadership.joins):
            if self._led_newest_epoch(join.after):
                leadership.joins.remove(join)
                self._send(join.sender, JoinReply(join.nonce, self._log.end))

    def _led_newest_epoch(self, after: int) -> bool:
        """Whether answers to checks after that one prove that no later epoch can use what a joining replica forgot.

        A candidate of a later epoch may have got its vote, and have no majority yet. Only an answer of that candidate
        itself shows that its candidacy is over. A sole candidate has no others.
        """
        answers = self._answered_since(after + 1)
        if self._is_sole:
            return sees_all_confirmed(len(self._members), answers)
        return len(answers) == len(self._members)

    def _answered_since(self, check: int) -> dict[int, bool]:
        """The replicas that answered a check or a later one, this one included, and whether each is complete."""
        # Other threads may ask, while this one takes an answer.
        known = list(self._leadership.answers.items())
        answers = {
            member: is_complete for member, (number, is_complete) in known if number >= check
        }
        answers[self.me.id] = self.ballot.is_complete
        return answers

    # --- hand-over --------------------------------------------------------------------------------

    def _begin_hand_over(self, to: int, reason: str) -> None:
        """Take no more puts, and wait until the successor's log has all of this one (R16)."""
        if not self.leads or to not in self._others:
            return
        leadership = self._leadership
        streamed_ms = leadership.streamed_ms.get(to, leadership.since_ms)
        is_silent = self._now_ms - streamed_ms > self._patience.silence_ms(self._now_ms)
        if to in self._log.uncallable and is_silent:
            # The successor would neither get the rest of the log nor be asked to take over. A connection that is open
            # already does both.
            return

        leadership.hand_over_to = to
        wait_ms = self._limits.hand_over_ms + 2 * self._patience.slowest_ms(self._now_ms)
        leadership.hand_over_until_ms = self._now_ms + wait_ms
        self._effects.append(StopPuts(f"replica {to} shall lead: {reason}"))
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the successor ask for votes as soon as its log has all of this one. Lost requests are repeated."""
        to = self._leadership.hand_over_to
        if to is not None and self._leadership.durable_ends.get(to, 0) >= self._log.end:
            self._send(ReplicaProcess(to, 0), TakeOver())
