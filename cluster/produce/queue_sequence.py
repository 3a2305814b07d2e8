"""The sequences of one producer in one queue, and what is told of its stored batches (D7)."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from raymq.store.errors import DeliveryUnknown, RayMQError, Rejected
from raymq.store.record import Row


class BatchReceipt(NamedTuple):
    """A stored batch: its rows have the offsets from `first_offset` to `last_offset`.

    `duplicates` leading rows were stored by an earlier try; they need not be neighbours. An offset is
    -1 when its row was stored so long ago that the shard's log has it no more.
    """

    topic: str
    queue_id: int
    shard: int
    first_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    duplicates: int
    store_time_ms: int
    last_offset: int

    def offset(self, row: int) -> int:
        """The queue offset of a row; -1 when it is not known.

        Of duplicates that do not stand together only the first and the last row's is known.
        """
        if self.first_offset >= 0 and (
            row == 0 or self.last_offset - self.first_offset == self.count - 1
        ):
            return self.first_offset + row
        behind = self.count - 1 - row
        new = row >= self.duplicates
        return self.last_offset - behind if self.last_offset >= 0 and (new or not behind) else -1


class UnknownBatch(NamedTuple):
    """A batch whose outcome is unknown, with all that a resend with the same sequence needs."""

    topic: str
    queue_id: int
    shard: int
    producer_id: int
    epoch: int
    #: of the first row
    sequence: int
    batch: pa.RecordBatch | Row
    size: int
    acks: str


class AnswerFuture(Future[BatchReceipt]):
    """The receipt of a batch."""

    #: set when the producer gave up without an answer: what `resend` takes
    unknown: UnknownBatch | None = None

    def result(self, timeout: float | None = None) -> BatchReceipt:
        """Wait up to `timeout` seconds. Raises: what the batch failed with; TimeoutError: the send goes on."""
        try:
            return super().result(timeout)
        except FutureTimeoutError:
            # In Python 3.10 that is another class.
            raise TimeoutError("no receipt yet; the send goes on, ask again") from None


def closed_error() -> Rejected:
    """What every call of a closed producer raises: no retry can succeed."""
    return Rejected("the producer is closed; make another one", field="producer", limit="open")


@dataclass(eq=False)
class QueueSequence:
    """The sequences of one producer in one queue."""

    topic: str
    queue_id: int
    producer_id: int
    epoch: int
    #: the id was made here, so a new one may take its place
    own_id: bool
    #: sequence of the next row
    next_sequence: int = 0
    #: (sequence, rows) of batches that were certainly not stored: later ones move down
    holes: list[tuple[int, int]] = field(default_factory=list)
    #: a batch was not stored since the last restart: gaps behind it are expected
    disturbed: bool = False
    #: why nobody can tell any more what the queue has of this producer
    broken: str | None = None
    #: nothing can be sent any more
    dead: RayMQError | None = None
    #: batches that are sent again, long after others: each has its sequence already
    resends: bool = False

    def rows_below(self, sequence: int) -> int:
        """Rows that were certainly not stored before a sequence."""
        return sum(rows for start, rows in self.holes if start < sequence)

    def renew(self) -> None:
        """Make it ready to go on."""
        if self.resends:
            self.disturbed, self.broken = False, None
            return
        self.next_sequence -= sum(rows for _, rows in self.holes)
        self.holes.clear()
        self.disturbed = False
        if self.broken is not None:
            if self.own_id:
                # A new producer starts at 0; whatever the old one left behind cannot be repeated by it.
                self.producer_id = new_producer_id()
                self.next_sequence = 0
            else:
                self.dead = DeliveryUnknown(
                    f"queue {self.queue_id} of {self.topic}: {self.broken}; start again with the same "
                    "producer id and the same rows",
                    status="UNKNOWN_ERROR",
                )
            self.broken = None


def new_producer_id() -> int:
    """A random 64-bit id: nobody hands them out, so nobody must be asked."""
    return secrets.randbits(64)
