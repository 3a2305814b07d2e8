"""What a worker asks of a shard, and the answers. They have columns of offsets, and no object for each message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.state.topics import QueueKey

from .entries import SettleOutcome
from .offsets import OffsetColumn

#: a request without a session is never recognised as repeated
NO_SESSION = b""


class LeaseRequest(NamedTuple):
    """A worker asks for messages."""

    session: bytes
    #: of the session; a repeated request has the same number, and gets the same lease
    request: int
    #: messages at most
    max_records: int
    #: None: that of the group
    lease_ms: int | None = None


class Offer(NamedTuple):
    """What of a queue may be leased. The caller has looked at these messages: their filter, size and key.

    Between that and the decision other requests may have come: only what may still be leased counts.
    """

    key: QueueKey
    #: offsets that were leased before, of `LeaseMachine.due`
    due: OffsetColumn
    #: the offsets from `first` to before `stop` were never leased
    first: int
    stop: int
    #: which of these match the group's filter; None: all
    matches: npt.NDArray[np.bool_] | None = None
    #: the slot of each one's key (key_order.slots_of); needed in the order of keys
    slots: npt.NDArray[np.uint16] | None = None
    #: how often each was delivered under another offset; None: never. Of a retry topic
    attempts: npt.NDArray[np.uint16] | None = None


class Leased(NamedTuple):
    """The part of a lease in one queue."""

    key: QueueKey
    offsets: OffsetColumn
    #: how often each was delivered, with this time
    attempts: npt.NDArray[np.uint16]


class LeaseAnswer(NamedTuple):
    """The answer to a `LeaseRequest`."""

    request: int
    #: 0: there is no message for the worker
    number: int
    #: the worker holds the messages for so long, counted from the sending of its request, less a tenth
    lease_ms: int
    parts: Sequence[Leased]
    #: why the group leases nothing; empty: it does
    paused: str = ""


class SettleItem(NamedTuple):
    """What a worker says of messages of one lease and queue."""

    #: of the lease
    number: int
    key: QueueKey
    offsets: OffsetColumn
    #: ACKED, NACKED, REJECTED, RETURNED (never worked on: its attempt does not count)
    verdict: SettleOutcome
    #: of NACKED; None: by the number of attempts
    delay_ms: int | None = None


class SettleRequest(NamedTuple):
    """A worker settles messages. One request of a session is under way at a time."""

    session: bytes
    #: of the session; a repeated request has the same number, and gets the same answer
    settle: int
    items: Sequence[SettleItem]


class RefusedOffsets(NamedTuple):
    """Offsets that were not settled: another lease has them, or they are settled."""

    number: int
    key: QueueKey
    offsets: OffsetColumn


class SettleAnswer(NamedTuple):
    """The answer to a `SettleRequest`: all but these are settled."""

    settle: int
    refused: Sequence[RefusedOffsets]


class ExtendAnswer(NamedTuple):
    """The answer to a request for more time."""

    #: lease -> for how long its worker holds it, counted from the sending of the request, less a tenth. Leases that are
    #: not in it were not renewed
    granted_ms: Mapping[int, int]


class Destination(NamedTuple):
    """Where a dead letter goes back to."""

    key: QueueKey
    #: how often topics of that name were deleted by then
    generation: int


class Copy(NamedTuple):
    """A message to copy, in the same append group as the record that settles it."""

    key: QueueKey
    offset: int
    #: DEAD: to the dead letters. MOVED: to the retry topic. ACKED: to its destination
    outcome: SettleOutcome
    #: deliveries so far
    attempts: int
    #: for people
    reason: str
    #: of MOVED
    delay_ms: int = 0
    #: the session that had it last
    holder: bytes = NO_SESSION
    #: of a dead letter that goes back
    destination: Destination | None = None


def copy_to(key: QueueKey, offset: int, destination: Destination) -> Copy:
    """The copy of a dead letter that goes back. Its attempts begin again."""
    return Copy(key, offset, SettleOutcome.ACKED, 0, "", destination=destination)


def offsets_of(values: Any) -> OffsetColumn:
    """A column of offsets from any integers. They are sorted, and repeated ones are taken once."""
    return np.unique(np.asarray(values, dtype=np.int64))
