"""What this process holds: leases, and the parts of them that wait for the program."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.client.transport.chained_future import ChainedFuture
from raymq.store.base.errors import RayMQError
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.offsets import OffsetColumn
from raymq.store.groups.leases.requests import SettleItem
from raymq.store.state.topics import QueueKey

#: a worker believes to hold a lease for this part of its length, counted from the sending of its call. The shard counts
#: the whole from the receipt. So clocks may run at rates that differ by a tenth
BELIEF_PERCENT = 90


class LeaseOwner(Protocol):
    """What settles and renews the messages of one shard: `ShardSession`."""

    shard: int

    def settle(
        self, items: Sequence[SettleItem], lease: HeldLease, *, is_awaited: bool = False
    ) -> ChainedFuture[None]:
        """Settle messages of a lease. The future ends when that is durable.

        Args: `is_awaited`: the caller calls `result_of` next. Raises: Rejected after the end.
        """

    def result_of(self, future: ChainedFuture[None]) -> Future[None] | None:
        """What a settlement returns: None, when it is durable; the future, if settlements are pipelined.

        Raises: Fenced, Unavailable.
        """

    def arguments(self) -> Mapping[str, Any]:
        """What names the session to the shard: its group, its id and its options."""

    def note_settled(self, lease: HeldLease, count: int) -> None:
        """Messages of a lease were settled by another call than `settle`."""

    def extend(self, lease: HeldLease, key: QueueKey, offset: int, lease_ms: int) -> None:
        """Give one message more time. Raises: Fenced; as `Routes.call`."""

    def now_ms(self) -> int:
        """The time by which leases end."""


@dataclass(eq=False)
class HeldLease:
    """A lease of this process."""

    number: int
    owner: LeaseOwner
    #: until then it is believed to be held
    until_ms: int
    #: messages that are not settled
    left: int
    #: messages with a time of their own
    own_until_ms: dict[tuple[QueueKey, int], int] = field(default_factory=dict)
    #: the shard has not renewed it
    is_lost: bool = False

    def until_of(self, key: QueueKey, offset: int) -> int:
        """Until when a message is believed to be held."""
        own_ms = self.own_until_ms.get((key, offset)) if self.own_until_ms else None
        if own_ms is not None:
            return own_ms
        return 0 if self.is_lost else self.until_ms


@dataclass(eq=False)
class HeldPart:
    """Messages of one queue that came with one lease. The program gets them from `at` on."""

    lease: HeldLease
    key: QueueKey
    records: pa.Array
    offsets: OffsetColumn
    #: deliveries of each, with this one
    attempts: npt.NDArray[np.int64]
    at: int = 0
    #: `LeasedMessage` objects, made when the program takes the first one alone
    messages: list[Any] | None = None

    def __post_init__(self) -> None:
        #: which messages the program has settled. Only the thread that settles a message writes its place
        self.is_settled = np.zeros(len(self.offsets), np.bool_)

    def split(self, count: int) -> HeldPart:
        """The first messages that wait, as a part of their own."""
        begin, self.at = self.at, self.at + count
        rows = slice(begin, self.at)
        records = self.records.slice(begin, count)
        return HeldPart(self.lease, self.key, records, self.offsets[rows], self.attempts[rows])

    @property
    def count(self) -> int:
        """How many messages wait for the program."""
        return len(self.offsets) - self.at

    def give_back(self) -> None:
        """Let others have what waits for the program. Best effort: the lease may be over."""
        left = self.offsets[self.at :]
        item = SettleItem(self.lease.number, self.key, left, SettleOutcome.RETURNED)
        with contextlib.suppress(RayMQError):
            self.lease.owner.settle([item], self.lease)


@dataclass(frozen=True, eq=False)
class HeldAcks:
    """Messages of a part that a transaction settles. They count as settled from now on, until `give_back`."""

    part: HeldPart
    #: of the part
    rows: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        self.part.is_settled[self.rows] = True

    @property
    def owner(self) -> LeaseOwner:
        """Where the messages are settled."""
        return self.part.lease.owner

    @property
    def item(self) -> SettleItem:
        """The settlement."""
        part = self.part
        return SettleItem(part.lease.number, part.key, part.offsets[self.rows], SettleOutcome.ACKED)

    def note_settled(self) -> None:
        """The transaction is committed."""
        self.owner.note_settled(self.part.lease, len(self.rows))

    def give_back(self) -> None:
        """The transaction is not committed: the program may settle them otherwise."""
        self.part.is_settled[self.rows] = False
