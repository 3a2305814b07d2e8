"""What the election machine takes and returns: facts of a replica, events and effects."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from . import wire
from .wire import CheckLeaderReply, EpochReply, JoinReply, PreVoteReply, ReplicaProcess, VoteReply


class ElectionState(Enum):
    """The present part of a replica."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre_candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


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
    Persist | SendElection | BeginEpoch | StepDown | StopPuts | ResumePuts | CopyLog
)
