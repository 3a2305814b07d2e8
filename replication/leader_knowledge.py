"""What a leader knows of its epoch, and of the replicas that follow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .quorum import majority
from .wire import ReplicaProcess


class WaitingJoin(NamedTuple):
    """A join that waits for a check that began after it."""

    sender: ReplicaProcess
    nonce: int
    #: number of the last check before the join came
    after: int


@dataclass
class LeaderKnowledge:
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
    joins: list[WaitingJoin] = field(default_factory=list)
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

    def majority_heard_ms(self, members: int, me: int) -> int:
        """Since when a majority has answered the replica `me`, which leads; 0: none has in this leadership."""
        heard_ms, needed = self.heard_ms, majority(members) - 1
        others = sorted((heard_ms[each] for each in heard_ms if each != me), reverse=True)
        return others[needed - 1] if 0 < needed <= len(others) else 0
