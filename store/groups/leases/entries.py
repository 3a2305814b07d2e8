"""What the records LEASE and SETTLE say: one record has entries of one group, applied in their order.

Every entry says what happens to which offsets, never why it may: limits, filters and times were looked at before.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from raymq.store.state.topics import QueueKey

from .offsets import OffsetColumn


class SettleOutcome(IntEnum):
    """What becomes of an offset that was leased."""

    #: settled: its worker has done it
    ACKED = 1
    #: waits for its delay, then it is leased again
    NACKED = 2
    #: waits, and the attempt does not count
    RETURNED = 3
    #: a worker says that it can never be done; the record has DEAD
    REJECTED = 4
    #: settled, with a copy among the dead letters if the group has them
    DEAD = 5
    #: settled, with a copy in the retry topic
    MOVED = 6
    #: nothing: the lease does not hold it, or an earlier message of its key is not settled
    REFUSED = 7


#: in place of a delay: the offset was rejected, and waits only until it is copied to the dead letters
TO_BURY_MS = (1 << 32) - 1
#: settle an offset for ever
SETTLING = (SettleOutcome.ACKED, SettleOutcome.DEAD, SettleOutcome.MOVED)


class LeasedPart(NamedTuple):
    """The part of a lease in one queue. Its offsets ascend."""

    key: QueueKey
    taken: OffsetColumn
    #: settled, since they do not match the group's filter
    filtered: OffsetColumn
    #: leased later, since an earlier message of their key is not settled
    passed: OffsetColumn
    #: deliveries before, of all that are taken or passed for the first time; empty: none
    before: OffsetColumn


class LeaseEntry(NamedTuple):
    """A session gets offsets."""

    #: 0: there is no lease: offsets are filtered
    number: int
    session: bytes
    request: int
    lease_ms: int
    parts: Sequence[LeasedPart]


class Settled(NamedTuple):
    """What becomes of offsets of one queue."""

    outcome: SettleOutcome
    #: of their lease; 0: any, their time is over
    number: int
    key: QueueKey
    #: of NACKED; `TO_BURY_MS`: it is not delivered again
    delay_ms: int
    offsets: OffsetColumn


class SettleEntry(NamedTuple):
    """A session has settled offsets; without a session the shard has."""

    session: bytes
    settle: int
    groups: Sequence[Settled]


class ResetEntry(NamedTuple):
    """A queue begins at an offset: for the first time, or again. Its leases end."""

    key: QueueKey
    #: -1: the group has nothing of the queue any more
    offset: int


class TrimEntry(NamedTuple):
    """All offsets of a queue below this one are settled, because their messages are deleted."""

    key: QueueKey
    min_offset: int


class LengthEntry(NamedTuple):
    """A lease has another length: a new leader gives it so long."""

    number: int
    lease_ms: int


class ForgetEntry(NamedTuple):
    """Sessions that hold nothing are forgotten."""

    sessions: Sequence[bytes]


class EndEntry(NamedTuple):
    """The group is deleted on this shard."""


class TimeEntry(NamedTuple):
    """The group was used. Records of the first versions have none."""

    #: when the record was written, ms since 1970
    at_ms: int


class PauseEntry(NamedTuple):
    """The group leases nothing on this shard any longer, or does so again. Also of snapshots."""

    #: for people; empty: it goes on, and its dead letters are counted from 0
    reason: str


# --- of snapshots ---------------------------------------------------------------------------------


class NumberEntry(NamedTuple):
    """The highest number of a lease that the shard has given."""

    number: int


class HeldEntry(NamedTuple):
    """A lease that is not settled."""

    number: int
    session: bytes
    lease_ms: int


class SessionEntry(NamedTuple):
    """A session: its newest requests, and what the newest settling one was refused."""

    session: bytes
    request: int
    number: int
    settle: int
    refused: Sequence[Settled]


class QueueEntry(NamedTuple):
    """How the offsets from `first` to before `stop` of a queue stand. The entries of a queue follow each other."""

    key: QueueKey
    low: int
    first: int
    stop: int
    settled: OffsetColumn
    #: of each other offset: the number of its lease; 0: it waits
    numbers: OffsetColumn
    attempts: OffsetColumn
    #: of those that wait; of leased ones 0
    delays_ms: OffsetColumn


Entry = (
    LeaseEntry
    | SettleEntry
    | ResetEntry
    | TrimEntry
    | LengthEntry
    | ForgetEntry
    | EndEntry
    | TimeEntry
    | PauseEntry
    | NumberEntry
    | HeldEntry
    | SessionEntry
    | QueueEntry
)


def waited_ms(delay_ms: int) -> int:
    """How long an offset with this delay waits."""
    return 0 if delay_ms == TO_BURY_MS else delay_ms


def keys_of(entry: Entry) -> list[QueueKey]:
    """The queues that an entry may change."""
    match entry:
        case LeaseEntry():
            return [part.key for part in entry.parts]
        case SettleEntry():
            return [group.key for group in entry.groups]
        case ResetEntry() | TrimEntry() | QueueEntry():
            return [entry.key]
    return []
