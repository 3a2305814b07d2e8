"""The sequence numbers of one producer in one queue, and the receipt of a stored batch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from raymq.store.base.errors import DeliveryUnknown, RayMQError
from raymq.store.base.status import PutStatus
from raymq.store.records.record import SmallBatch


class BatchReceipt(NamedTuple):
    """A stored batch: its rows have the offsets from `first_offset` to `last_offset`.

    The first `duplicates` rows were stored by an earlier try; their offsets may have gaps. An offset is -1 when its
    row was stored so long ago that the shard has deleted it.
    """

    topic: str
    queue_id: int
    shard: int
    first_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    duplicates: int
    store_time_ms: int
    last_offset: int
    #: of the first new record in the log of the shard, and the end of the last one; -1 when they are not known
    physical_offset: int = -1
    end_offset: int = -1

    def offset(self, row: int) -> int:
        """The queue offset of a row; -1 when it is not known.

        If duplicates have gaps between them, only the offsets of the first and the last row are known.
        """
        contiguous = self.last_offset - self.first_offset == self.count - 1
        if self.first_offset >= 0 and (row == 0 or contiguous):
            return self.first_offset + row
        rows_after = self.count - 1 - row
        known = row >= self.duplicates or rows_after == 0
        return self.last_offset - rows_after if self.last_offset >= 0 and known else -1


class UnknownBatch(NamedTuple):
    """A batch whose outcome is unknown, with all that a resend with the same sequence numbers needs."""

    topic: str
    queue_id: int
    shard: int
    producer_id: int
    epoch: int
    #: sequence number of the first row
    sequence: int
    batch: pa.RecordBatch | SmallBatch
    size: int
    acks: str


@dataclass(eq=False)
class QueueSequence:
    """The sequence numbers of one producer in one queue."""

    topic: str
    queue_id: int
    producer_id: int
    epoch: int
    #: the producer made up its id, so it may take a new one; False: the caller gave the id
    own_id: bool
    #: sequence of the next row
    next_sequence: int = 0
    #: (sequence, rows) of batches that are certainly not stored: later sequences move down by these rows, unless the
    #: batches are resends
    unstored: list[tuple[int, int]] = field(default_factory=list)
    #: a batch was not stored since `close_up`: the shard refuses later batches because of the gap
    reordered: bool = False
    #: why the sender does not know which rows the shard has stored
    unknown_reason: str | None = None
    #: why no batch can be sent any more
    fence_error: RayMQError | None = None
    #: for batches that `resend` sends, each with the sequence of its first try
    resends: bool = False

    def unstored_before(self, sequence: int) -> int:
        """By how many rows a sequence moves down, because these are certainly not stored."""
        return 0 if self.resends else sum(rows for start, rows in self.unstored if start < sequence)

    def lacks_before(self, sequence: int) -> bool:
        """Whether rows before a sequence are certainly not stored. The shard has refused all rows after such a gap."""
        return any(start < sequence for start, _ in self.unstored)

    def begin_again(self) -> None:
        """Begin a sequence of a new producer id, which starts at 0."""
        self.producer_id = new_producer_id()
        self.next_sequence = 0
        self.unstored.clear()

    def close_up(self) -> None:
        """Close the sequence gaps that unstored batches left. Waiting batches have been moved down already."""
        self.reordered = False
        if self.resends:
            self.unknown_reason = None
            return
        self.next_sequence -= sum(rows for _, rows in self.unstored)
        self.unstored.clear()
        if self.unknown_reason is None:
            return
        if self.own_id:
            # Rows stored under the old id cannot be repeated by the new one.
            self.begin_again()
        else:
            self.fence_error = DeliveryUnknown(
                f"queue {self.queue_id} of {self.topic}: {self.unknown_reason}; start again with the same "
                "producer id and the same rows",
                status=PutStatus.UNKNOWN_ERROR.value,
            )
        self.unknown_reason = None


def new_producer_id() -> int:
    """A random 64-bit id: unique without asking a shard."""
    return secrets.randbits(64)
