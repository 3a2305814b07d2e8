"""The rules by which the batches for one shard are written, answered and sent again. A pure state machine.

    add -> waiting -- next_writes --> unacked -- ack --> Complete
              ^                         |  |
              |<-- broke: the stream ---+  +-- ack with an error: drain
              |
              +<-- resume: all acks of a drain are in

Order     Batches are written in the order of `add`; up to IN_FLIGHT_BATCHES_MAX may be unacknowledged.
Resend    When the stream breaks, every unacknowledged batch is written again in the same order with the same sequence
          numbers. The shard recognises a sequence that it has stored, so nothing is lost or stored twice.
Drain     When the shard refuses a batch, writing stops until all acks are in. Sequence numbers are then closed up over
          the batches that were not stored, and writing resumes. This is rare and may be slow.
Late      A shard may read what a broken stream carried much later. If sequence numbers were closed up over a gap before
          such a batch, its old number would be another batch's. The queue then goes on under a new producer id.
Rows      A refusal may name rows. If the rows are messages that were sent one by one, only these fail, and the batch
          is written again without them. Each such refusal costs a drain.

The window has no thread, clock or socket. Events are method calls with the time in milliseconds. They append their
effects to the caller's list, so that an interrupted caller still has the effects decided until then.
`next_writes` is the effect *write*. It returns the batches of one message, one or several small ones, and the caller
writes them before it asks again.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from raymq.client.transport.ask import (
    SEARCH_PAUSE_MS,
    SEARCH_PAUSE_MS_MAX,
    SILENT_MS,
    leads_no_more,
    moved,
)
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import (
    Bug,
    DeliveryUnknown,
    Fenced,
    RayMQError,
    Rejected,
    SequenceGap,
    StorageFull,
    Unavailable,
    from_wire,
)
from raymq.store.base.status import PutStatus
from raymq.store.records.record import SmallBatch

from .producer_config import ProducerConfig, closed_error
from .queue_sequence import BatchReceipt, QueueSequence, UnknownBatch
from .send_future import BatchFuture

#: unacknowledged batches at most; their bytes are limited too
IN_FLIGHT_BATCHES_MAX = 1024
#: small batches that travel in one message, together
MESSAGE_BYTES_MAX = 256 << 10
#: between two tries that brought no success: doubled with each one
BACKOFF_MS = 20
BACKOFF_MS_MAX = 1000
#: how long a shard may take to free disk space before a batch that it refuses as StorageFull fails
STORAGE_FULL_MS = 2_000
#: between two warnings that a batch is sent again
WARN_PAUSE_MS = 60_000

Consequence = Literal["resend", "fenced", "unknown", "fail", "fail_rows"]


@dataclass(eq=False)
class InFlightBatch:
    """A batch until its outcome. `SendWindow.add` sets its number and deadline."""

    queue: QueueSequence
    data: pa.RecordBatch | SmallBatch
    size: int
    acks: str
    future: BatchFuture
    number: int = 0
    deadline_ms: int = 0
    #: of the first row; `add` sets it, unless the batch is sent again
    sequence: int = 0
    #: its rows are messages that were sent one by one: if the shard refuses some, the others are sent again
    is_separable: bool = False
    #: the numbers in `future` of the rows in `data`; None: all rows of `future` are there
    row_numbers: Int64s | None = None
    #: an earlier try may have stored it
    uncertain: bool = False
    #: the shard's answer when it did not know the outcome
    unknown_answer: DeliveryUnknown | None = None
    #: the shard's last answer, when it had no room
    full: StorageFull | None = None
    #: since when every answer to this batch was `full`
    full_since_ms: int | None = None

    def numbers(self) -> Int64s:
        """The number in `future` of each row in `data`."""
        return np.arange(self.data.num_rows) if self.row_numbers is None else self.row_numbers

    def note_full(self, answer: RayMQError, now_ms: int) -> None:
        """Note whether the shard answered that it has no room, and since when it does."""
        if not isinstance(answer, StorageFull):
            self.full = self.full_since_ms = None
            return
        self.full = answer
        if self.full_since_ms is None:
            self.full_since_ms = now_ms


def _consequence_of(error: RayMQError, batch: InFlightBatch) -> Consequence:
    """The consequence of a refusal.

    resend   the error may pass, or the gap before the batch closes when order is restored
    fenced   a newer producer with the queue's id exists
    unknown  the sender does not know which rows of the queue the shard has stored
    fail     the batch is not stored
    fail_rows  some rows fail, and the others are sent again
    """
    rows = _refused_rows(error, batch)
    if rows:
        # Other sequences are fixed: those of resends, and those that the caller may use again after a restart.
        separates = batch.is_separable and batch.queue.own_id and len(rows) < batch.data.num_rows
        return "fail_rows" if separates else "fail"
    gap = _is_gap(error)
    if error.retriable or (gap and batch.queue.reordered):
        return "resend"
    if isinstance(error, Fenced):
        return "fenced"
    return "unknown" if gap or batch.uncertain or isinstance(error, Bug) else "fail"


def _refused_rows(error: RayMQError, batch: InFlightBatch) -> list[int]:
    """The rows that a shard refuses, in order; empty: it names none.

    If it names one, no row of the batch is stored, by earlier tries neither (`PutPath.check`).
    """
    row = error.fields.get("row") if isinstance(error, Rejected) else None
    rows = error.fields.get("rows") or ([] if row is None else [row])
    return sorted({each for each in rows if 0 <= each < batch.data.num_rows})


def _of_messages(error: RayMQError) -> RayMQError:
    """A refusal as it concerns messages that were sent one by one: their callers know no rows."""
    fields = {name: value for name, value in error.fields.items() if name not in ("row", "rows")}
    return type(error)(re.sub(r"\brow \d+\b", "the message", error.message, count=1), **fields)


def _note_unstored(batches: list[InFlightBatch]) -> None:
    """Note which batches are certainly not stored: the shard refuses gaps, so no earlier try stored one after a gap."""
    for batch in batches:
        if batch.queue.lacks_before(batch.sequence):
            batch.uncertain = False


def _is_gap(error: RayMQError) -> bool:
    """Whether the shard lacks rows before the batch."""
    return isinstance(error, SequenceGap)


# --- effects --------------------------------------------------------------------------------------


class Complete(NamedTuple):
    """The outcome of a batch is final."""

    batch: InFlightBatch
    outcome: BatchReceipt | RayMQError


class RowsRefused(NamedTuple):
    """Some rows of a batch fail, and the batch has no outcome yet."""

    batch: InFlightBatch
    #: their numbers in the batch's future
    rows: tuple[int, ...]
    error: RayMQError


class WarnResend(NamedTuple):
    """The shard does not know the outcome, which a caller that waits for the receipt does not see yet."""

    batch: InFlightBatch
    error: DeliveryUnknown


Effects: TypeAlias = list[Complete | RowsRefused | WarnResend]


class SendWindow:
    """The batches of one shard that have no outcome yet. One thread at a time."""

    def __init__(self, shard: int, config: ProducerConfig, *, fails_over: bool = False) -> None:
        """Args: `fails_over`: another replica may lead the shard soon, so that pauses are short."""
        self._shard = shard
        self._config = config
        self._pauses_ms = (BACKOFF_MS, BACKOFF_MS_MAX)
        if fails_over:
            self._pauses_ms = (SEARCH_PAUSE_MS, SEARCH_PAUSE_MS_MAX)

        #: unacknowledged bytes that the shard allows; None: it set no limit
        self._stream_limit_bytes: int | None = None
        #: not written; in the order of `add`
        self.waiting: deque[InFlightBatch] = deque()
        #: written to the stream and not answered, in order
        self.unacked: deque[InFlightBatch] = deque()
        #: answered with an error that may pass
        self._retry: list[InFlightBatch] = []
        #: an error that may pass is among the answers of this drain
        self._refused_for_now = False
        #: queues of which a batch was refused since order was restored last
        self._queues_to_reorder: set[QueueSequence] = set()

        #: a stream takes batches
        self._writable = False
        #: nothing is written until all acks are in
        self.draining = False
        #: a refusal that says that the shard may have moved: look it up before the resend
        self.moved_refusal: Unavailable | None = None
        self._in_flight_bytes = 0
        self._number = 0
        #: number of the batch that was answered last
        self.last_acked = 0
        #: tries in a row that brought no success
        self.failures = 0
        #: when the shard answered last, or was expected to begin; the caller sets it when it opens a stream
        self.progress_ms = 0
        self._last_error: RayMQError = Unavailable("not connected yet")
        #: a resend is not warned about before this time
        self._quiet_until_ms = 0
        self.closed = False

    # --- writing ----------------------------------------------------------------------------------

    def add(self, batch: InFlightBatch, now_ms: int) -> None:
        """Take a batch and give it the next sequence numbers of its queue.

        An `uncertain` batch, which another sender gave up, keeps its own.
        Raises: Rejected when the window is closed; the error that fenced the queue.
        """
        queue = batch.queue
        if self.closed:
            raise closed_error()
        if queue.fence_error is not None:
            raise queue.fence_error
        self._number += 1
        batch.number = self._number
        batch.deadline_ms = now_ms + self._config.delivery_timeout_ms
        if not batch.uncertain:
            batch.sequence = queue.next_sequence
            queue.next_sequence += batch.data.num_rows
        self.waiting.append(batch)

    def connected(self, stream_limit_bytes: int | None) -> None:
        """The shard has taken the stream: batches may be written."""
        self._writable = True
        self._stream_limit_bytes = stream_limit_bytes

    def disconnected(self) -> None:
        """No batch may be written any more. The reason comes with `broke`."""
        self._writable = False
        self._stream_limit_bytes = None

    def next_writes(self, now_ms: int) -> list[InFlightBatch]:
        """The batches to write now in one message: one, or several small ones. None is written: an empty list.

        They count as unacknowledged from here on.
        """
        batch = self._next_write(now_ms)
        if batch is None:
            return []
        batches, size = [batch], batch.size
        while (
            self.waiting
            and isinstance(batch.data, SmallBatch)
            and isinstance(self.waiting[0].data, SmallBatch)
            and size + self.waiting[0].size <= MESSAGE_BYTES_MAX
            and (batch := self._next_write(now_ms)) is not None
        ):
            batches.append(batch)
            size += batch.size
        return batches

    def _next_write(self, now_ms: int) -> InFlightBatch | None:
        if not self._writable or self.draining or not self.waiting:
            return None
        if not self.unacked:
            self.progress_ms = now_ms
        elif self._exceeds_bytes() or len(self.unacked) >= IN_FLIGHT_BATCHES_MAX:
            return None
        batch = self.waiting.popleft()
        self.unacked.append(batch)
        self._in_flight_bytes += batch.size
        return batch

    def _exceeds_bytes(self) -> bool:
        """Whether the next batch is too much beside the unacknowledged ones. Alone it may have any size."""
        limit, allowed = self._config.in_flight_bytes, self._stream_limit_bytes
        if allowed is not None and allowed < limit:
            limit = allowed
        return self._in_flight_bytes + self.waiting[0].size > limit

    @property
    def last_number(self) -> int:
        """Number of the batch that was added last."""
        return self._number

    @property
    def answered_up_to(self) -> int:
        """Every batch up to this number has an outcome, or is sent again."""
        return self.last_acked if self.unacked or self.waiting else self._number

    @property
    def stalled(self) -> bool:
        """Whether a batch waits until bytes are acknowledged."""
        return bool(self.waiting and self.unacked) and self._exceeds_bytes()

    # --- acks -------------------------------------------------------------------------------------

    def received(self, now_ms: int, stream_limit_bytes: int | None) -> None:
        """The shard sent acks; `ack` takes each of them."""
        self.progress_ms = now_ms
        if self._writable:
            self._stream_limit_bytes = stream_limit_bytes

    def ack(self, ack: dict[str, Any], now_ms: int, effects: Effects) -> None:
        """The shard answered the oldest unacknowledged batch.

        Raises: Unavailable when it answered another one; the stream cannot be used any more.
        """
        if not self.unacked or self.unacked[0].number != ack["id"]:
            raise Unavailable(f"shard {self._shard} answered out of order", shard=self._shard)
        batch = self.unacked[0]
        if "error" in ack:
            self.draining = True
            self._refused(batch, from_wire(ack["error"]), now_ms, effects)
        else:
            self.failures = 0
            effects.append(Complete(batch, self._receipt(batch.queue, ack)))
        # Removed last, because an interrupted caller may report an outcome twice, but must not lose it.
        self.unacked.popleft()
        self.last_acked = batch.number
        self._in_flight_bytes -= batch.size

    def _receipt(self, queue: QueueSequence, ack: dict[str, Any]) -> BatchReceipt:
        return BatchReceipt(
            queue.topic,
            queue.queue_id,
            self._shard,
            ack["first_offset"],
            ack["count"],
            ack["duplicates"],
            ack["store_time_ms"],
            ack["last_offset"],
            ack.get("physical_offset", -1),
            ack.get("end_offset", -1),
        )

    def _refused(
        self, batch: InFlightBatch, error: RayMQError, now_ms: int, effects: Effects
    ) -> None:
        """Fail a refused batch or row now. A batch that is kept is sent again, or fails, when order is restored."""
        queue = batch.queue
        consequence = _consequence_of(error, batch)
        if (
            consequence in ("fail", "fail_rows")
            and batch.uncertain
            and self._retries_uncertain(queue)
        ):
            # The place of its rows depends on those before. Once these are settled, it is refused again.
            consequence = "resend"
        if consequence == "fail":
            effects.append(Complete(batch, _of_messages(error) if batch.is_separable else error))
            queue.unstored.append((batch.sequence, batch.data.num_rows))
        elif consequence == "fail_rows":
            self._take_out(batch, _refused_rows(error, batch), error, effects)
            self._retry.append(batch)
        else:
            self._retry.append(batch)

        if consequence == "fenced":
            queue.fence_error = error
        elif consequence == "unknown":
            # After a bug the shard may have stored the batch.
            batch.uncertain = batch.uncertain or isinstance(error, Bug)
            queue.unknown_reason = error.message
            if queue.resends and _is_gap(error) and not queue.lacks_before(batch.sequence):
                queue.unknown_reason += "; resend the messages before it first"
        elif error.retriable:
            self._last_error = error
            self._refused_for_now = True
            if isinstance(error, Unavailable) and (
                self.moved_refusal is None or leads_no_more(error)
            ):
                self.moved_refusal = error

        batch.note_full(error, now_ms)
        if isinstance(error, DeliveryUnknown):
            batch.uncertain = True
            batch.unknown_answer = error
            if now_ms >= self._quiet_until_ms:
                self._quiet_until_ms = now_ms + WARN_PAUSE_MS
                effects.append(WarnResend(batch, error))

        queue.reordered = True
        self._queues_to_reorder.add(queue)

    def _take_out(
        self, batch: InFlightBatch, rows: list[int], error: RayMQError, effects: Effects
    ) -> None:
        """Let some rows of a batch fail, and keep the others."""
        numbers = batch.numbers()
        kept = np.setdiff1d(np.arange(len(numbers)), rows)
        data = batch.data.take(pa.array(kept))

        # An interrupted caller reports the refusal, and the batch is refused once more.
        effects.append(RowsRefused(batch, tuple(numbers[rows].tolist()), _of_messages(error)))
        # Later rows take over the sequences of the last ones.
        batch.queue.unstored.append((batch.sequence + len(kept), len(rows)))
        batch.data, batch.row_numbers = data, numbers[kept]
        batch.uncertain = False

    def _retries_uncertain(self, queue: QueueSequence) -> bool:
        """Whether a batch of a queue is sent again that may be stored."""
        return any(batch.queue is queue and batch.uncertain for batch in self._retry)

    @property
    def drained(self) -> bool:
        """Whether all acks of a drain are in: `begin_resume` and `resume` come next."""
        return self.draining and not self.unacked

    def begin_resume(self) -> int:
        """All acks of a drain are in. Returns: milliseconds to wait before `resume`."""
        if not self._refused_for_now:
            return 0
        self.failures += 1
        # If the shard may have moved, the pause is that of `reconnect_pause_ms`.
        return 0 if self.moved_refusal is not None else self._backoff_ms()

    def resume(self, now_ms: int, effects: Effects) -> bool:
        """Put the batches to resend back into their order. Returns: whether to look the shard up again."""
        reconnect = self.moved_refusal is not None
        if reconnect:
            self.disconnected()
        self._restore_order(now_ms, effects)
        return reconnect

    # --- the stream breaks ------------------------------------------------------------------------

    def broke(self, error: RayMQError, now_ms: int, effects: Effects) -> None:
        """The stream broke, or no server took it. Batches that it carried may be stored."""
        self._last_error = error
        self.failures += 1
        self.disconnected()
        for batch in self.unacked:
            batch.uncertain = True
        if isinstance(error, Rejected) and not moved(error):
            # A wrong token stays wrong.
            self._fail_all(error, effects)
            self.failures = 0
        self._restore_order(now_ms, effects)

    def _fail_all(self, error: Rejected, effects: Effects) -> None:
        """Fail every batch: the server does not take the stream.

        An `uncertain` batch may be stored: an earlier stream has carried it.
        """
        for batch in self._take_all():
            queue = batch.queue
            self._queues_to_reorder.add(queue)
            if batch.uncertain:
                queue.unknown_reason = queue.unknown_reason or error.message
                effects.append(Complete(batch, self._delivery_unknown(batch, error.message)))
            else:
                queue.unstored.append((batch.sequence, batch.data.num_rows))
                effects.append(Complete(batch, error))

    def reconnect_pause_ms(self) -> int:
        """Milliseconds to wait before the next connection."""
        return self._backoff_ms() if self.failures and self.waiting else 0

    def _backoff_ms(self) -> int:
        least_ms, most_ms = self._pauses_ms
        return min(least_ms << min(self.failures - 1, 10), most_ms)

    def is_late(self, now_ms: int) -> bool:
        """Whether to leave the stream: the shard is silent, or a batch's time is up."""
        if not (self.unacked or self.waiting):
            return False
        oldest = (self.unacked or self.waiting)[0]
        silent = now_ms - self.progress_ms >= self._config.request_timeout_ms
        return silent or now_ms >= oldest.deadline_ms

    def is_silent(self, now_ms: int) -> bool:
        """Whether the shard has not answered for so long that another replica may lead it."""
        return bool(self.unacked or self.waiting) and now_ms - self.progress_ms >= SILENT_MS

    # --- order is restored ------------------------------------------------------------------------

    def _take_all(self) -> list[InFlightBatch]:
        """Take out all batches, in the order of `add`. None is in flight any more."""
        batches = sorted(
            [*self._retry, *self.unacked, *self.waiting], key=lambda batch: batch.number
        )
        self._retry = []
        self.unacked = deque()
        self.waiting = deque()
        self._in_flight_bytes = 0
        return batches

    def _restore_order(self, now_ms: int, effects: Effects) -> None:
        """Let all batches wait again in their order, except those that fail now.

        Batches that were certainly not stored give their sequence numbers to the batches after them.
        """
        batches = self._take_all()
        # Of each queue the last sequence that a broken stream may still deliver.
        deliverable = {batch.queue: batch.sequence for batch in batches if batch.uncertain}
        _note_unstored(batches)
        self.draining, self.moved_refusal, self._refused_for_now = False, None, False
        queues = {batch.queue for batch in batches} | self._queues_to_reorder
        self._queues_to_reorder = set()

        for batch in batches:
            # A batch that may be stored and is given up leaves its queue's end unknown.
            if (
                now_ms >= batch.deadline_ms
                and batch.uncertain
                and batch.queue.unknown_reason is None
            ):
                batch.queue.unknown_reason = (
                    f"a batch was not acknowledged in time: {self._last_error}"
                )
        self._fail_or_wait(batches, now_ms, effects)

        for queue, last_sequence in deliverable.items():
            if queue.unstored_before(last_sequence):
                self._begin_new_sequence(queue, now_ms, effects)
        for batch in self.waiting:
            batch.sequence -= batch.queue.unstored_before(batch.sequence)
        for queue in queues:
            queue.close_up()

    def _begin_new_sequence(self, queue: QueueSequence, now_ms: int, effects: Effects) -> None:
        """Let the batches of a queue wait under a new producer id: none of them is stored, as rows before are missing.

        If one of them may be stored, or the caller chose the producer id, all of them fail.
        """
        if queue.unknown_reason is not None:
            return
        waiting = [batch for batch in self.waiting if batch.queue is queue]
        first_gap = min(start for start, _ in queue.unstored)
        may_be_stored = any(batch.uncertain and batch.sequence < first_gap for batch in waiting)
        if queue.own_id and not may_be_stored:
            queue.begin_again()
            for batch in waiting:
                batch.uncertain = False
                batch.sequence = queue.next_sequence
                queue.next_sequence += batch.data.num_rows
            return
        queue.unknown_reason = (
            "a stream broke after the shard had refused a batch, and may still deliver later ones"
        )
        batches, self.waiting = list(self.waiting), deque()
        self._fail_or_wait(batches, now_ms, effects)

    def _fail_or_wait(self, batches: list[InFlightBatch], now_ms: int, effects: Effects) -> None:
        """Complete the batches that fail now. The others wait again."""
        # As in `_note_unstored`, of gaps that begin here. Resends need not come in the order of their sequences.
        queues_with_gaps: set[QueueSequence] = set()
        for batch in batches:
            if batch.queue in queues_with_gaps:
                batch.uncertain = False

            error = self._failure(batch, now_ms)
            if error is None:
                self.waiting.append(batch)
            else:
                effects.append(Complete(batch, error))
                if not (batch.uncertain or batch.queue.resends):
                    queues_with_gaps.add(batch.queue)
                self._note_failed(batch, error)

    def _note_failed(self, batch: InFlightBatch, error: RayMQError) -> None:
        """Fence the queue of a failed batch, or let later batches take its sequence numbers."""
        queue = batch.queue
        chosen_id = not (queue.own_id or queue.resends)
        if chosen_id and not batch.uncertain and queue.fence_error is None:
            # The caller chose this id and may restart with it. If later rows took the lost rows' numbers, the restart
            # would send other rows under those numbers.
            queue.fence_error = error
        if queue.unknown_reason is None and not batch.uncertain:
            queue.unstored.append((batch.sequence, batch.data.num_rows))

    def _failure(self, batch: InFlightBatch, now_ms: int) -> RayMQError | None:
        """Why a batch fails now; None: it is sent again."""
        queue = batch.queue
        if queue.fence_error is not None:
            if batch.uncertain and not isinstance(queue.fence_error, Fenced):
                return self._delivery_unknown(batch, queue.fence_error.message)
            return queue.fence_error

        late = now_ms >= batch.deadline_ms
        if batch.full is not None and not batch.uncertain:
            since_ms = batch.full_since_ms
            if late or (since_ms is not None and now_ms - since_ms >= STORAGE_FULL_MS):
                return batch.full
        if queue.unknown_reason is None and not late:
            return None

        why = queue.unknown_reason or (
            f"not delivered within {self._config.delivery_timeout_ms} ms: {self._last_error}"
        )
        if batch.uncertain:
            return self._delivery_unknown(batch, why)
        why = f"queue {queue.queue_id} of {queue.topic}: nothing of the batch was stored: {why}"
        if self.closed:
            return Rejected(why, field="producer", limit="open")
        return Unavailable(why, shard=self._shard)

    def _delivery_unknown(self, batch: InFlightBatch, why: str) -> DeliveryUnknown:
        """The error of a batch that may be stored. Its future gets the fields that a resend needs."""
        queue, answer = batch.queue, batch.unknown_answer
        batch.future.unknown_batch = UnknownBatch(
            queue.topic,
            queue.queue_id,
            self._shard,
            queue.producer_id,
            queue.epoch,
            batch.sequence - queue.unstored_before(batch.sequence),
            batch.data,
            batch.size,
            batch.acks,
        )

        answered = "" if answer is None else f" (the shard answered {answer.status})"
        return DeliveryUnknown(
            f"queue {queue.queue_id} of {queue.topic}: the batch may or may not be stored{answered}: {why}",
            status=PutStatus.UNKNOWN_ERROR.value if answer is None else answer.status,
            append=None if answer is None else answer.fields.get("append"),
            topic=queue.topic,
            queue_id=queue.queue_id,
            shard=self._shard,
        )

    def close(self, effects: Effects) -> None:
        """Fail every batch; `add` is refused from now on."""
        self.closed = True
        self.disconnected()
        for batch in self.unacked:
            batch.uncertain = True
        batches = self._take_all()
        for batch in batches:
            batch.queue.unknown_reason = batch.queue.unknown_reason or "the producer was closed"
        _note_unstored(batches)
        for batch in batches:
            error = self._failure(batch, 0)
            if error is not None:
                effects.append(Complete(batch, error))
