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

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from . import wire
from .delays import SlowestDelay
from .quorum import confirmed_end, majority, may_lead, sees_all_confirmed
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


@dataclass(frozen=True, kw_only=True)
class ElectionLimits:
    """Times of elections. No promise depends on any of them.

    Where a machine is short of CPU, messages come late and processes still live. So those times that end a leadership
    or a candidacy grow with the slowest delay that was measured lately.
    """

    #: a follower that hears no leader for this long, and up to as long again, asks for votes. Both grow by twice the
    #: slowest delay, and the second part doubles with each candidacy in a row
    election_ms: int = 1_000
    #: between two checks of a leader, which are its heartbeats too; `retry_ms` during a hand-over, if that is less
    heartbeat_ms: int = 400
    #: a leader that no majority answers for this long, and three times the slowest delay, steps down
    majority_silence_ms: int = 2_000
    #: a leader whose log streams reach no majority for this long, and three times the slowest delay, lets another
    #: replica lead. Each such leadership that follows another in a row lasts twice as long, because no other one may
    #: be able to lead
    stream_silence_ms: int = 10_000
    #: a leader whose process for log streams has ended this long ago lets a replica lead whose process runs. Each such
    #: leadership that follows another one in a row lasts twice as long
    streams_lost_ms: int = 800
    #: the same of a leader for which that process never ran: all replicas may have just started
    streams_missing_ms: int = 3_000
    #: a leader that no majority can call for this long hands over to a replica that one can call. Each such leadership
    #: that follows another one in a row lasts twice as long
    uncalled_ms: int = 3_000
    #: for how long a replica says no to candidates that it cannot call, without hearing a leader
    refuse_uncallable_ms: int = 5_000
    #: between two followers that ask for votes because the leader's process has ended
    turn_ms: int = 100
    #: between two questions that were not answered
    retry_ms: int = 200
    #: a leader whose own disk stores nothing for this long, although there is something to store, lets another replica
    #: lead. Each such leadership that follows another one in a row lasts twice as long, because the disks of the other
    #: replicas may be no better
    disk_stall_ms: int = 3_000
    #: a leader's own disk is late while it lacks what a majority of the replicas stored this long ago without it. The
    #: slowest delay is added
    disk_lag_ms: int = 200
    #: a leader whose own disk was late for so much longer than it was in time lets another replica lead
    disk_late_ms: int = 3_000
    #: how long a leader waits for the replica that takes over; twice the slowest delay is added
    hand_over_ms: int = 1_000
    #: no delay counts with more: a cut can be longer
    delay_most_ms: int = 5_000
    #: a delay counts half after this time, a quarter after as long again
    delay_halving_ms: int = 30_000
    #: one delay raises the slowest one to twice its value and this at most
    delay_step_ms: int = 500


#: of `stream_silence_ms` and `disk_stall_ms`: ten seconds become ten minutes
MOST_DOUBLINGS = 6
#: of the spread of candidacies
MOST_SPREAD_DOUBLINGS = 3
#: questions whose answers may still come
ASKED_MAX = 16


class Ballot(NamedTuple):
    """The part of a replica's state that must be on disk before an answer relies on it."""

    #: the highest epoch that this replica has heard; it serves none below
    epoch: int = 0
    #: the candidate that got this replica's vote in that epoch
    voted_for: ReplicaProcess | None = None
    #: the log has everything that this replica ever reported as durable
    is_complete: bool = True
    #: by replica id: the newest generation heard of; 0 for those after the last
    generations: tuple[int, ...] = ()

    def generation(self, replica: int) -> int:
        """The newest generation of a replica that was heard of."""
        return self.generations[replica] if replica < len(self.generations) else 0

    def with_epoch(self, least: int) -> Ballot:
        """The ballot with at least this epoch, in which no vote was given."""
        return self if self.epoch >= least else self._replace(epoch=least, voted_for=None)

    def with_generations(self, found: Sequence[int]) -> Ballot:
        """The ballot with the newer ones of its generations and these."""
        known = self.generations
        pairs = zip_longest(known, found, fillvalue=0)
        return self._replace(generations=tuple(max(pair) for pair in pairs))


class LogFacts(NamedTuple):
    """The log at the time of a step."""

    #: epoch of the last record
    last_epoch: int
    #: end of the last record
    end: int
    #: end of what is durable
    durable: int
    #: of a follower: the log equals that of a leader up to here, and the epoch of that leader
    matched: int = 0
    matched_epoch: int = 0
    #: the disk takes appends, as far as the last one has shown
    is_writable: bool = True
    #: the process runs that sends the log to the other replicas: Replication
    can_stream: bool = True
    #: the other replicas whose servers this one cannot call: nothing listens there, or their certificate is refused. It
    #: may still hear them, because they call it
    uncallable: frozenset[int] = frozenset()
    #: of a log of which a sync has failed: epoch and end of what others may copy; (0, 0): nothing
    offered: tuple[int, int] = (0, 0)

    @property
    def recency(self) -> tuple[int, int]:
        """Of two logs, the one with the larger value has all confirmed records of the other."""
        return self.last_epoch, self.end


#: messages that answer a question of one process
ANSWERS = (PreVoteReply, VoteReply, EpochReply, CheckLeaderReply, JoinReply)


# --- events ---------------------------------------------------------------------------------------


class Received(NamedTuple):
    """A message of another replica."""

    sender: ReplicaProcess
    addressee: ReplicaProcess
    #: the epoch of the sender's ballot
    epoch: int
    message: wire.Election


class LeaderHeard(NamedTuple):
    """A frame of a log stream came from the leader of an epoch. `admits` says whether to take it.

    The leader's id counts: an epoch has one leader, whose log streams may come from another of its processes.
    """

    leader: ReplicaProcess
    epoch: int


class LeaderLost(NamedTuple):
    """The process that led an epoch has ended, as its Replication says. A false word costs an election, no promise."""

    leader: int
    epoch: int


class FollowerHeard(NamedTuple):
    """A follower's log equals this leader's, durably, up to `durable_end`."""

    follower: int
    epoch: int
    durable_end: int
    is_complete: bool


class EpochBegun(NamedTuple):
    """The EPOCH record is in the log, and ends here."""

    epoch: int
    end: int


class ElectionTick(NamedTuple):
    """Time has passed. `chance`: a random number in [0, 1), new for each tick."""

    chance: float


class OwnSyncFailed(NamedTuple):
    """A sync of the own log failed: this replica stores nothing more, and answers what others ask."""

    #: the log still has everything that was ever reported as durable
    is_complete: bool = True


class HandOver(NamedTuple):
    """Let another replica lead."""

    to: int


class CheckAsked(NamedTuple):
    """A reader waits for a check that begins now. `led_at` says when it is answered."""


ElectionEvent: TypeAlias = (
    Received
    | LeaderHeard
    | LeaderLost
    | FollowerHeard
    | EpochBegun
    | ElectionTick
    | OwnSyncFailed
    | HandOver
    | CheckAsked
)


# --- effects --------------------------------------------------------------------------------------


class Persist(NamedTuple):
    """Write the ballot and sync it, before any later effect."""

    ballot: Ballot


class SendElection(NamedTuple):
    """Send a message to a replica. `incarnation` 0: to whichever process it has."""

    addressee: ReplicaProcess
    epoch: int
    message: wire.Election


class BeginEpoch(NamedTuple):
    """This replica leads: append the EPOCH record, report `EpochBegun`, and stream the log to the others."""

    epoch: int


class StepDown(NamedTuple):
    """This replica does not lead any more: take no puts. What is not confirmed is unknown."""

    reason: str


class Confirm(NamedTuple):
    """Everything below `end` is confirmed."""

    end: int


class StopPuts(NamedTuple):
    """A hand-over is under way: take no puts until `ResumePuts` or `StepDown`."""

    reason: str


class ResumePuts(NamedTuple):
    """The hand-over came to nothing."""

    reason: str


class CopyLog(NamedTuple):
    """Copy the rest of the log of a replica that cannot lead (`log_copy`), as long as `may_copy` allows it."""

    source: ReplicaProcess
    #: of the last record that it gives
    last_epoch: int
    #: of what it gives
    end: int

    @property
    def recency(self) -> tuple[int, int]:
        """See `LogFacts.recency`."""
        return self.last_epoch, self.end


ElectionEffect: TypeAlias = (
    Persist | SendElection | BeginEpoch | StepDown | Confirm | StopPuts | ResumePuts | CopyLog
)


class ElectionState(Enum):
    """The present part of a replica."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre_candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class _WaitingJoin(NamedTuple):
    """A join that waits for a check that began after it."""

    sender: ReplicaProcess
    nonce: int
    #: number of the last check before the join came
    after: int


@dataclass
class _Leadership:
    """What a leader knows of its epoch."""

    #: when the election was won
    since_ms: int = 0
    #: end of the EPOCH record; None: it is not in the log yet
    begun_end: int | None = None
    #: follower -> durable and matched end
    durable_ends: dict[int, int] = field(default_factory=dict)
    #: replica -> when its last answer came, ms
    heard_ms: dict[int, int] = field(default_factory=dict)
    #: follower -> when its last ack came over its log stream, ms
    streamed_ms: dict[int, int] = field(default_factory=dict)
    #: number of the last check whether this is still the newest epoch, and when it began
    check_number: int = 0
    checked_ms: int = 0
    #: replica -> the newest check that it has answered, and whether it is complete
    answers: dict[int, tuple[int, bool]] = field(default_factory=dict)
    #: the replicas that could not stream, as their last answers to checks say
    not_streaming: set[int] = field(default_factory=set)
    #: when the own process for log streams ran last, and whether it has in this leadership
    could_stream_ms: int = 0
    has_streamed: bool = False
    #: replica -> the replicas that it cannot call, as its last answer to a check says
    uncallable: dict[int, frozenset[int]] = field(default_factory=dict)
    #: when a majority could call this replica last, as far as it knows
    called_ms: int = 0
    #: it has tried to hand over since
    has_tried_uncalled: bool = False
    joins: list[_WaitingJoin] = field(default_factory=list)
    #: when the own disk last had stored everything, or more than before
    stored_ms: int = 0
    #: an end that a majority of the replicas had stored without this one, and when that was first seen
    majority_end: int = 0
    majority_end_ms: int = 0
    #: for how much longer the own disk was late than in time, up to the last look at it
    late_ms: int = 0
    watched_ms: int = 0
    hand_over_to: int | None = None
    hand_over_until_ms: int = 0


class ElectionMachine:
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
        self.me = me
        self.ballot = ballot
        self.state = ElectionState.FOLLOWER
        #: the leader of the epoch of the ballot, as far as it is known; its id counts
        self.leader: ReplicaProcess | None = None
        #: the confirmed end, as far as this process led it
        self.confirmed = 0
        #: the replicas that were not complete when they elected this process, this replica included
        self.incomplete_voters: tuple[int, ...] = ()

        self._members = tuple(members)
        self._others = tuple(member for member in members if member != me.id)
        electable = tuple(members if candidates is None else candidates)
        self._electable = electable
        self._may_be_candidate = me.id in electable
        self._is_sole = electable == (me.id,)
        self._is_preferred = is_preferred
        self._limits = limits or ElectionLimits()

        limits = self._limits
        self._delay = SlowestDelay(
            most_ms=limits.delay_most_ms,
            halving_ms=limits.delay_halving_ms,
            step_ms=limits.delay_step_ms,
        )
        #: (kind of a question, its number or epoch) -> when it was asked
        self._asked_ms: dict[tuple[type, int], int] = {}
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
        #: number of the last question to all others
        self._question = 0
        #: answers to the present question: replica -> complete
        self._answers: dict[int, bool] = {}
        self._highest_epoch = 0
        self._leadership = _Leadership()
        #: leaderships in a row that ended because the log streams were silent
        self._silent_leaderships = 0
        #: leaderships in a row that ended because the own process for log streams did not run
        self._mute_leaderships = 0
        #: leaderships in a row that were handed over because no majority could call this replica
        self._uncalled_leaderships = 0
        #: when this replica first said no to a candidate that it cannot call, since it heard a leader; None: it has not
        self._refusing_since_ms: int | None = None
        #: leaderships in a row that ended because the own disk stalled
        self._stalled_leaderships = 0
        #: of the own log at the last tick
        self._durable_end = 0
        #: nonce of the join under way, 0 without one; when it was sent; the end that it must reach
        self._nonce = self._last_nonce = 0
        self._join_sent_ms = 0
        self._join_target: int | None = None

    @property
    def epoch(self) -> int:
        """The highest epoch that this replica has heard: it serves none below."""
        return self.ballot.epoch

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

    def admits(self, leader: ReplicaProcess, epoch: int) -> bool:
        """Whether a frame of log bytes may be taken. Callers: after `step(LeaderHeard)` and its effects."""
        return self._is_follower_of(leader.id, epoch) and not self.is_replaced(leader)

    def follows(self, leader: ReplicaProcess, epoch: int) -> bool:
        """Whether `step(LeaderHeard)` would change nothing, as for nearly every frame."""
        is_known = self._is_follower_of(leader.id, epoch) and self.leader == leader
        return is_known and self.ballot.is_complete and not self.is_replaced(leader)

    @property
    def bears_stall(self) -> bool:
        """Whether the last leadership ended by a stalled disk: those of the other replicas may be no better."""
        return self._stalled_leaderships > 0

    def best_successor(self, *, is_called: bool = False) -> int | None:
        """The candidate with the most of this leader's log among those whose log streams are alive; None: none.

        Of several, the next one by number: if the disk of one that took over is no better, all get their turn.
        Args: `is_called`: only one that a majority can call, as their answers say. Callers: any thread.
        """
        leadership, count = self._leadership, max(self._members) + 1
        ends = [
            (end, -((replica - self.me.id) % count), replica)
            for replica, end in list(leadership.durable_ends.items())
            if replica in self._electable
            and replica not in leadership.not_streaming
            and self._now_ms - leadership.streamed_ms[replica] <= self._silence_ms
            and (self._could_be_called(replica) if is_called else self._may_be_called(replica))
        ]
        return max(ends)[2] if ends else None

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
        patience_ms = self._patience_ms
        spread_ms = patience_ms << min(self._candidacies, MOST_SPREAD_DOUBLINGS)
        self._election_ms = self._now_ms + times * int(patience_ms + spread_ms * self._chance)

    # --- delays -----------------------------------------------------------------------------------

    @property
    def _slowest_ms(self) -> int:
        """The slowest delay of a message, or of this process, that was measured lately."""
        return self._delay.value_ms(self._now_ms)

    @property
    def _patience_ms(self) -> int:
        """A leader that is not heard for so long may have ended."""
        return self._limits.election_ms + 2 * self._slowest_ms

    @property
    def _silence_ms(self) -> int:
        """A leader whom no majority answers for so long may be cut off."""
        return self._limits.majority_silence_ms + 3 * self._slowest_ms

    def _note_asked(self, kind: type, number: int) -> None:
        """Note when a question was asked: the delay of its answers shows how long a candidacy must wait."""
        self._asked_ms[kind, number] = self._now_ms
        if len(self._asked_ms) > ASKED_MAX:
            del self._asked_ms[next(iter(self._asked_ms))]

    def _measure_answer(self, event: Received) -> None:
        """Note how long an answer took, that to an earlier question too."""
        message, asked_ms = event.message, None
        if isinstance(message, (PreVoteReply, EpochReply)):
            asked_ms = self._asked_ms.get((PreVote, message.number))
        elif isinstance(message, VoteReply):
            asked_ms = self._asked_ms.get((RequestVote, event.epoch))
        if asked_ms is not None:
            self._delay.note(self._now_ms - asked_ms, self._now_ms)

    def _measure_heartbeat(self, leader: ReplicaProcess, epoch: int) -> None:
        """Note for how long a leader was not heard, whose heartbeat has just come: before its epoch is over, or after.

        One of another epoch, which the same process leads, ends no silence of this one.
        """
        if self._leader_heard_ms is not None and (leader, epoch) == self._heard_leader:
            gap_ms = self._now_ms - self._leader_heard_ms
            self._delay.note(gap_ms - self._limits.heartbeat_ms, self._now_ms)

    def _hear(self, replica: int) -> None:
        """Note an answer to this leader, and for how long no majority had answered, if one has now."""
        heard_ms, before_ms = self._leadership.heard_ms, self._majority_heard_ms()
        heard_ms[replica] = self._now_ms
        if 0 < before_ms < self._majority_heard_ms():
            gap_ms = self._majority_heard_ms() - before_ms
            self._delay.note(gap_ms - self._limits.heartbeat_ms, self._now_ms)

    def _majority_heard_ms(self) -> int:
        """Since when a majority has answered, this replica included; 0: none has in this leadership."""
        heard_ms, needed = self._leadership.heard_ms, majority(len(self._members)) - 1
        others = sorted((heard_ms[each] for each in heard_ms if each != self.me.id), reverse=True)
        return others[needed - 1] if 0 < needed <= len(others) else 0

    def _send(self, addressee: ReplicaProcess, message: wire.Election) -> None:
        """Send one message under this replica's epoch."""
        self._effects.append(SendElection(addressee, self.epoch, message))

    def _ask_others(self, message: wire.Election) -> None:
        """Ask each other replica, whichever process it has now."""
        for member in self._others:
            self._send(ReplicaProcess(member, 0), message)

    # --- messages ---------------------------------------------------------------------------------

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

    def _receive(self, event: Received) -> None:
        """Take a message: first its epoch (R2), then its contents."""
        if not self._is_for_me(event):
            return

        self._measure_answer(event)
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

    def _is_leader_of(self, epoch: int) -> bool:
        """Whether this process was elected in that epoch, and still leads."""
        return self.state is ElectionState.LEADER and epoch == self.epoch

    # --- elections --------------------------------------------------------------------------------

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
            self._stalled_leaderships = 0
        if not self.ballot.is_complete:
            self._join()
        if self._now_ms >= (self._election_ms or 0) and self._may_be_candidate:
            self._begin_election()

    def _begin_election(self) -> None:
        """Ask whether the others would vote, or, after a loss of data, for their epochs (R5)."""
        self._await_leader()
        self.state = ElectionState.PRE_CANDIDATE
        self.leader = None

        self._question += 1
        self._note_asked(PreVote, self._question)
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
            heard_ms is not None and self._now_ms - heard_ms < self._patience_ms
        )

    def _take_pre_vote(self, sender: ReplicaProcess, message: PreVoteReply) -> None:
        """Count one answer to the present question, or copy the log that it offers."""
        if self.state is not ElectionState.PRE_CANDIDATE or message.number != self._question:
            return
        if message.granted:
            self._answers[sender.id] = message.is_complete
            self._after_pre_votes()
        elif message.end > 0 and self.ballot.is_complete:
            self._effects.append(CopyLog(sender, message.last_epoch, message.end))

    def may_copy(self, offered: tuple[int, int], own: tuple[int, int]) -> bool:
        """Whether bytes of the log of a replica that cannot lead may be copied, which this log lacks (R16).

        Its records are of epochs that this replica has heard, because the offer came with the ballot's epoch.
        Args: `offered`, `own`: the recency of both logs. Callers: while nothing else changes the log. A later epoch
        must refuse what is written.
        """
        is_looking = self.state in (ElectionState.FOLLOWER, ElectionState.PRE_CANDIDATE)
        return is_looking and self.leader is None and own < offered

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
        self._note_asked(RequestVote, epoch)

        self.state = ElectionState.CANDIDATE
        self._answers = {self.me.id: self.ballot.is_complete}
        self._ask_others(RequestVote(*self._log.recency))
        self._after_votes()

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

    def _take_vote(self, sender: ReplicaProcess, message: VoteReply) -> None:
        """Count one vote."""
        if self.state is ElectionState.CANDIDATE and message.granted:
            self._answers[sender.id] = message.is_complete
            self._after_votes()

    def _elects(self, votes: dict[int, bool]) -> bool:
        """Whether these votes make a leader: `quorum.may_lead`."""
        return may_lead(len(self._members), votes, sole=self._is_sole)

    def _after_votes(self) -> None:
        """Lead once enough replicas voted (R6)."""
        if not self._elects(self._answers):
            return

        self.state = ElectionState.LEADER
        self.leader = self.me
        self._has_seen_leader = True
        self._heard_leader, self._candidacies = None, 0
        heard_ms = dict.fromkeys(self._answers, self._now_ms)
        self._leadership = _Leadership(
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

    # --- the leader -------------------------------------------------------------------------------

    def _tick_leader(self, *, has_advanced: bool) -> None:
        """Step down without a majority, or for a stalled disk (R16); send a heartbeat; end a hand-over that failed.

        Args: as of `_watch_disk`.
        """
        leadership, limits = self._leadership, self._limits
        if self._misses_majority(leadership.heard_ms, self._silence_ms):
            self._step_down(f"no majority was heard for {self._silence_ms} ms")
            return
        silence_ms = limits.stream_silence_ms << min(self._silent_leaderships, MOST_DOUBLINGS)
        silence_ms += 3 * self._slowest_ms
        is_old = self._now_ms - leadership.since_ms > silence_ms
        is_silent = self._misses_majority(leadership.streamed_ms, silence_ms)
        if is_old and is_silent and self._streaming_replicas():
            self._silent_leaderships += 1
            successor = self._streaming_successor()
            if successor is not None:
                # Its own times may be longer than those of this replica, which would lead again before.
                self._send(ReplicaProcess(successor, 0), TakeOver())
            self._step_down(
                f"the log streams reached no majority for {silence_ms} ms, although a majority "
                "answers: is the Replication process of the leader running?"
            )
            # Another replica has the first try.
            self._await_leader(times=2)
            return

        self._watch_streams()
        if self.state is ElectionState.LEADER:
            self._watch_calls()
        if self.state is ElectionState.LEADER:
            self._watch_disk(has_advanced=has_advanced)
        if self.state is not ElectionState.LEADER:
            return

        if leadership.hand_over_to is not None and self._now_ms >= leadership.hand_over_until_ms:
            self._effects.append(ResumePuts(f"replica {leadership.hand_over_to} did not take over"))
            leadership.hand_over_to = None

        if self._now_ms - leadership.checked_ms >= self._check_ms:
            self._begin_check()
            self._hand_over()

    @property
    def _check_ms(self) -> int:
        """The time from a check to the next one. Each also repeats the request to take over."""
        limits = self._limits
        if self._leadership.hand_over_to is None:
            return limits.heartbeat_ms
        return min(limits.heartbeat_ms, limits.retry_ms)

    def _watch_streams(self) -> None:
        """Let another replica lead when the own process for log streams has ended, and that of another one runs (R16).

        What the successor's log lacks cannot reach it. So this is no hand-over: puts under way are unknown.
        """
        leadership, limits = self._leadership, self._limits
        if self._log.can_stream:
            leadership.could_stream_ms, leadership.has_streamed = self._now_ms, True
            self._mute_leaderships = 0
            return
        limit_ms = limits.streams_lost_ms if leadership.has_streamed else limits.streams_missing_ms
        limit_ms <<= min(self._mute_leaderships, MOST_DOUBLINGS)
        if self._is_sole or self._now_ms - leadership.could_stream_ms <= limit_ms:
            return
        successor = self._streaming_successor()
        if successor is None:
            return

        self._mute_leaderships += 1
        self._send(ReplicaProcess(successor, 0), TakeOver())
        self._step_down(
            f"its Replication process does not run for {limit_ms} ms, and that of replica {successor} does"
        )
        # Others have the first try.
        self._await_leader(times=2)

    def _streaming_replicas(self) -> dict[int, int]:
        """The replicas that answer and could lead, and stream their logs -> the durable end of each."""
        leadership = self._leadership
        return {
            replica: leadership.durable_ends.get(replica, 0)
            for replica, (_, is_complete) in leadership.answers.items()
            if is_complete
            and replica in self._electable
            and replica not in leadership.not_streaming
            and self._now_ms - leadership.heard_ms[replica] <= self._silence_ms
        }

    def _streaming_successor(self, *, is_called: bool = False) -> int | None:
        """The replica with the most of this log that could stream, if enough would vote for it.

        Args: `is_called`: as of `best_successor`.
        """
        leadership = self._leadership
        can_be_called = self._could_be_called if is_called else self._may_be_called
        able = [
            (end, -replica)
            for replica, end in self._streaming_replicas().items()
            if can_be_called(replica)
        ]
        if not able:
            return None
        most, number = max(able)
        voters = [
            leadership.durable_ends.get(replica, 0) <= most
            for replica, (_, is_complete) in leadership.answers.items()
            if is_complete and self._now_ms - leadership.heard_ms[replica] <= self._silence_ms
        ]
        enough = majority(len(self._members))
        return -number if sum(voters) + (most >= self._log.end) >= enough else None

    def _watch_calls(self) -> None:
        """Let another replica lead when no majority can call this one, and one can call that other (R16).

        This leader calls the others, so that they answer it and store its log. Its clients have to call it.
        """
        leadership, limits = self._leadership, self._limits
        if self._may_be_called(self.me.id):
            leadership.called_ms, leadership.has_tried_uncalled = self._now_ms, False
            if len(self._callers(self.me.id)) >= majority(len(self._members)):
                self._uncalled_leaderships = 0
            return
        limit_ms = limits.uncalled_ms << min(self._uncalled_leaderships, MOST_DOUBLINGS)
        is_due = self._now_ms - leadership.called_ms > limit_ms
        if self._is_sole or not is_due or not self.leads or leadership.hand_over_to is not None:
            return
        successor = self.best_successor(is_called=True)
        if leadership.has_tried_uncalled and successor is not None:
            # What its log lacks did not reach it in time, and may never do.
            successor = self._streaming_successor(is_called=True)
        if successor is None:
            return

        self._uncalled_leaderships += 1
        leadership.called_ms = self._now_ms
        reason = (
            f"no majority could call this replica for {limit_ms} ms, and one can call replica {successor}: does the "
            "server here listen, and is its certificate in order?"
        )
        if not leadership.has_tried_uncalled:
            leadership.has_tried_uncalled = True
            self._begin_hand_over(successor, reason)
            return
        self._send(ReplicaProcess(successor, 0), TakeOver())
        self._step_down(reason)
        # Others have the first try.
        self._await_leader(times=2)

    def _may_be_called(self, replica: int) -> bool:
        """Whether a majority may be able to call a replica: not so many others say that they cannot."""
        deniers = [each for each, found in self._known_uncallable().items() if replica in found]
        return len(self._members) - len(deniers) >= majority(len(self._members))

    def _could_be_called(self, replica: int) -> bool:
        """Whether a majority says that it can call a replica, and that one can call a majority, which may elect it."""
        known = self._known_uncallable()
        voters = {replica} | (known.keys() - known.get(replica, frozenset()))
        return min(len(self._callers(replica)), len(voters)) >= majority(len(self._members))

    def _callers(self, replica: int) -> set[int]:
        """The replicas that do not say that they cannot call a replica, that one included."""
        known = self._known_uncallable()
        return {replica, *(each for each, found in known.items() if replica not in found)}

    def _known_uncallable(self) -> dict[int, frozenset[int]]:
        """For this leader, and each replica that answered it lately: those that it cannot call. Callers: any thread."""
        leadership = self._leadership
        found = {
            replica: uncallable
            for replica, uncallable in list(leadership.uncallable.items())
            if self._now_ms - leadership.heard_ms[replica] <= self._silence_ms
        }
        found[self.me.id] = self._log.uncallable
        return found

    def _watch_disk(self, *, has_advanced: bool) -> None:
        """Let another replica lead when the own disk has stored nothing for long, or is slower than others (R16).

        A leader without its EPOCH record has no follower yet, and steps down. Another one hands over: nothing is cut.
        Args: `has_advanced`: more of the log is durable than before.
        """
        self._measure_lateness(has_advanced=has_advanced)
        if self._leadership.late_ms > self._limits.disk_late_ms:
            self._leadership.late_ms = 0
            self._hand_over_to_best(
                f"a majority stores what this disk stores more than {self._disk_lag_ms} ms later"
            )

        leadership, log = self._leadership, self._log
        stall_ms = self._limits.disk_stall_ms << min(self._stalled_leaderships, MOST_DOUBLINGS)
        if log.is_writable and (has_advanced or log.durable >= log.end):
            leadership.stored_ms = self._now_ms
            if self._now_ms - leadership.since_ms > stall_ms:
                self._stalled_leaderships = 0
            return
        if self._is_sole or self._now_ms - leadership.stored_ms <= stall_ms:
            return

        leadership.stored_ms = self._now_ms
        if leadership.begun_end is None:
            self._stalled_leaderships += 1
            self._step_down(f"the disk took no EPOCH record for {stall_ms} ms")
            # Another replica has the first try.
            self._await_leader(times=2)
            return
        if self._hand_over_to_best(f"the disk stored nothing for {stall_ms} ms"):
            self._stalled_leaderships += 1

    @property
    def _disk_lag_ms(self) -> int:
        """How late a disk may be in comparison. Where processes run late, their syncs do."""
        return self._limits.disk_lag_ms + self._slowest_ms

    def _measure_lateness(self, *, has_advanced: bool) -> None:
        """Compare the own disk with those of a majority without it. Where all share one slow disk, none is late."""
        leadership, log, limits = self._leadership, self._log, self._limits
        # After a pause of this process not all of the time counts.
        passed_ms = min(self._now_ms - leadership.watched_ms, limits.heartbeat_ms)
        leadership.watched_ms = self._now_ms

        if log.durable >= leadership.majority_end:
            ends = sorted(leadership.durable_ends.values(), reverse=True)
            enough = majority(len(self._members))
            leadership.majority_end = ends[enough - 1] if len(ends) >= enough else 0
            leadership.majority_end_ms = self._now_ms

        is_behind = log.durable < leadership.majority_end
        if is_behind and self._now_ms - leadership.majority_end_ms > self._disk_lag_ms:
            leadership.late_ms += passed_ms
        elif has_advanced or log.durable < log.end:
            leadership.late_ms = max(0, leadership.late_ms - passed_ms)

    def _misses_majority(self, last_ms: dict[int, int], silence_ms: int) -> bool:
        """Whether no majority was heard for so long. A sole candidate stays, because no other can lead.

        Args: `last_ms`: replica -> when it was heard last.
        """
        heard = [member for member, at_ms in last_ms.items() if self._now_ms - at_ms <= silence_ms]
        return len({self.me.id, *heard}) < majority(len(self._members)) and not self._is_sole

    def _hear_follower(self, event: FollowerHeard) -> None:
        """Count what a follower holds durably, if it is complete (R11, R14)."""
        if not self._is_leader_of(event.epoch):
            return

        leadership = self._leadership
        leadership.heard_ms[event.follower] = leadership.streamed_ms[event.follower] = self._now_ms
        if 1 + len(leadership.streamed_ms) >= majority(len(self._members)):
            self._silent_leaderships = 0
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
            self._effects.append(Confirm(end))

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
        leadership.joins.append(_WaitingJoin(sender, message.nonce, leadership.check_number))
        self._begin_check()

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
        is_silent = self._now_ms - streamed_ms > self._silence_ms
        if to in self._log.uncallable and is_silent:
            # The successor would neither get the rest of the log nor be asked to take over. A connection that is open
            # already does both.
            return

        leadership.hand_over_to = to
        wait_ms = self._limits.hand_over_ms + 2 * self._slowest_ms
        leadership.hand_over_until_ms = self._now_ms + wait_ms
        self._effects.append(StopPuts(f"replica {to} shall lead: {reason}"))
        self._hand_over()

    def _hand_over_to_best(self, reason: str) -> bool:
        """Begin to hand over to the best successor. Returns: whether there is one."""
        successor = self.best_successor()
        if successor is None:
            return False
        self._begin_hand_over(successor, reason)
        return True

    def _hand_over(self) -> None:
        """Let the successor ask for votes as soon as its log has all of this one. Lost requests are repeated."""
        to = self._leadership.hand_over_to
        if to is not None and self._leadership.durable_ends.get(to, 0) >= self._log.end:
            self._send(ReplicaProcess(to, 0), TakeOver())
