"""One shard's put stream, kept alive: order, sequences, resends and truth about failures (D7, D11).

Batches go out in order, many in flight. When the stream breaks, everything unanswered goes again in
the same order with the same sequences, so that nothing is lost or stored twice. When one batch is
refused or must be tried again, nothing more is written until all answers are in (*draining*); then
the order is restored and writing goes on. That is rare, so it may be slow.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from concurrent.futures import InvalidStateError
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raymq.cluster.transport.connection import Connection, PutStream
from raymq.cluster.transport.routes import Routes
from raymq.store.clock import Clock
from raymq.store.errors import (
    Bug,
    DeliveryUnknown,
    Fenced,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
    from_wire,
)
from raymq.store.record import Row

from .queue_sequence import AnswerFuture, BatchReceipt, QueueSequence, UnknownBatch, closed_error

log = logging.getLogger("raymq.producer")

#: batches unanswered at most; their bytes are limited too
IN_FLIGHT_BATCHES_MAX = 1024
#: a receiving thread that is not needed looks this often whether it is, ever less often while others read (each look
#: costs their puts a switch), and is back at the stream after so long
PARK_TICK_S = 0.002
PARK_TICK_MAX_S = 0.016
PARK_S = 0.05
#: who waits for less long does not read the stream himself: a read has no timeout
HELP_TIMEOUT_S = 5.0
#: a read by somebody who waits is broken off after this time, so that he can be interrupted; then nobody tries for
#: so long
HELP_MS_MAX = 1_000
HELP_PAUSE_MS = 60_000
BACKOFF_MS = 20
BACKOFF_MS_MAX = 1000
#: a shard may find room by itself for so long; then a batch that it refuses as StorageFull fails
STORAGE_FULL_MS = 2_000
#: a sender warns of answers that its caller does not see at most once in so long
WARN_PAUSE_MS = 60_000

#: why a server is another one than expected: its port was reused, the shard is elsewhere
_MOVED = ("cluster_id", "shard")


class BatchFuture(AnswerFuture):
    """The receipt of a batch. Who waits with `result` may read the stream himself meanwhile."""

    def __init__(self, sender: ShardSender) -> None:
        super().__init__()
        self._sender = sender

    def result(self, timeout: float | None = None) -> BatchReceipt:
        """As Future.result; seconds."""
        return super().result(self.help(timeout))

    def help(self, timeout: float | None) -> float | None:
        """Read answers until this one is there, if nobody else does. Returns: what is left of `timeout`."""
        return timeout if self.done() else self._sender.help(self, timeout)


@dataclass(eq=False)
class Outgoing:
    """A batch on its way."""

    number: int
    lane: QueueSequence
    batch: pa.RecordBatch | Row
    size: int
    sequence: int
    acks: str
    deadline_ms: int
    future: BatchFuture
    #: an earlier try may have stored it
    uncertain: bool = False
    #: what the shard answered when it did not know
    unknown: DeliveryUnknown | None = None
    #: the shard's last answer, when it had no room
    full: StorageFull | None = None
    #: since when every answer to this batch was `full`
    full_since_ms: int | None = None


Done = list[tuple[Outgoing, BatchReceipt | RayMQError]]


class ShardSender:
    """Sends batches to one shard. Any thread may `add` and `pump`; one of its own receives.

    Where one batch at a time is sent and waited for, who waits reads its answer: to be woken by the receiving thread
    costs half as much again as the exchange. That thread then stands by (*parked*).
    """

    def __init__(
        self,
        routes: Routes,
        shard: int,
        *,
        in_flight_bytes: int,
        delivery_timeout_ms: int,
        request_timeout_ms: int,
        clock: Clock,
    ) -> None:
        self._routes = routes
        self._shard = shard
        self._in_flight_bytes_max = in_flight_bytes
        self._delivery_timeout_ms = delivery_timeout_ms
        self._request_timeout_ms = request_timeout_ms
        self._clock = clock
        #: guards everything below; taken itself, because a condition's `with` is two calls more
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: for the receiving thread while it stands by: most changes are nothing to it
        self._unpark = threading.Condition(self._lock)
        self._waiting: deque[Outgoing] = deque()
        #: written to the stream, in order, not answered
        self._unacked: deque[Outgoing] = deque()
        #: answered with an error that may pass
        self._retry: list[Outgoing] = []
        #: lanes of which a batch was refused since order was restored last
        self._touched: set[QueueSequence] = set()
        #: None as soon as a write failed
        self._stream: PutStream | None = None
        #: whose answers are read
        self._receiving: PutStream | None = None
        self._writing = False
        self._draining = False
        self._moved = False
        self._in_flight = 0
        self._number = 0
        #: the batch that was answered last
        self._read = 0
        #: tries in a row that brought no success
        self._failures = 0
        self._progress_ms = 0
        #: somebody waited for an answer that the receiving thread read
        self._waited_for = False
        #: the receiving thread does not read just now
        self._parked = False
        #: somebody else does, for whom it must go on when he ends with an error or leaves something to read
        self._helping = False
        self._help_error: RayMQError | None = None
        #: which thread
        self._helper = 0
        self._help_began_ms = self._help_not_before_ms = 0
        self._helped = 0
        self._last_error: RayMQError = Unavailable("not connected yet")
        self._quiet_until_ms = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"raymq-sender-{shard}", daemon=True)
        self._thread.start()

    # --- sending --------------------------------------------------------------------------------

    def add(
        self,
        lane: QueueSequence,
        batch: pa.RecordBatch | Row,
        size: int,
        acks: str,
        sequence: int | None = None,
    ) -> BatchFuture:
        """Take a batch and give it its sequence; `pump` writes it.

        Args: `sequence` of a batch that is sent again, in a lane of such ones.
        Raises: what ended the lane; Rejected when the sender is closed.
        """
        future = BatchFuture(self)
        with self._lock:
            if self._closing:
                raise closed_error()
            if lane.dead is not None:
                raise lane.dead
            self._number += 1
            deadline = self._clock.monotonic_ms() + self._delivery_timeout_ms
            first = lane.next_sequence if sequence is None else sequence
            out = Outgoing(self._number, lane, batch, size, first, acks, deadline, future)
            self._waiting.append(out)
            if sequence is None:
                lane.next_sequence += batch.num_rows
            else:
                out.uncertain = True
            if self._stream is None:
                self._changed.notify_all()
        return future

    @property
    def stalled(self) -> bool:
        """Whether something waits to be written until more is answered."""
        with self._changed:
            if not self._waiting or not self._unacked:
                return False
            return self._in_flight + self._waiting[0].size > self._window_bytes()

    def _window_bytes(self) -> int:
        """Bytes that may be unanswered: the option's, and no more than the shard told. Needs the lock."""
        told = None if self._stream is None else self._stream.window_bytes
        own = self._in_flight_bytes_max
        return own if told is None or told > own else told

    def pump(self) -> None:
        """Write what may be written now; a thread that finds another writing leaves it the work."""
        with self._lock:
            if self._writing:
                return
            self._writing = True
        stream: PutStream | None = None
        try:
            while True:
                with self._lock:
                    out = self._next()
                    stream = self._stream
                    if out is None or stream is None:
                        self._writing = False
                        self._changed.notify_all()
                        return
                lane = out.lane
                meta = {
                    "id": out.number,
                    "topic": lane.topic,
                    "queue": lane.queue_id,
                    "pid": lane.producer_id,
                    "epoch": lane.epoch,
                    "seq": out.sequence,
                    "acks": out.acks,
                    "read": self._read,
                }
                stream.send(meta, out.batch)
        except BaseException as error:
            # The receiving thread learns why, from the same stream, and connects again.
            with self._lock:
                self._writing = False
                if self._stream is stream:
                    self._stream = None
                self._changed.notify_all()
            if not isinstance(error, RayMQError):
                # Ctrl-C: perhaps it was not written, and nothing would ever answer it.
                if stream is not None:
                    stream.abort()
                raise

    def _next(self) -> Outgoing | None:
        """The next batch to write, now counted as unanswered. Needs the lock."""
        if self._stream is None or self._draining or not self._waiting:
            return None
        size = self._waiting[0].size
        if self._unacked:
            if self._in_flight + size > self._window_bytes():
                return None
            if len(self._unacked) >= IN_FLIGHT_BATCHES_MAX:
                return None
        else:
            self._progress_ms = self._clock.monotonic_ms()
        out = self._waiting.popleft()
        self._unacked.append(out)
        self._in_flight += size
        return out

    # --- the receiving thread -------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            connection: Connection | None = None
            stream: PutStream | None = None
            try:
                connection = self._routes.connect(self._shard)
                stream = connection.put_stream()
                with self._lock:
                    if self._closing:
                        return
                    self._receiving = stream
                    self._progress_ms = self._clock.monotonic_ms()
                # Nothing is written to a server that was not there: it is certainly not stored.
                stream.opened()
                with self._lock:
                    self._stream = stream
                self.pump()
                self._receive(stream)
            except RayMQError as error:
                self._note_break(error)
            finally:
                self._detach(stream, connection)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to send and its back-off is over; False: closed."""
        done: Done = []
        with self._lock:
            self._settle(done)
        _complete(done)
        with self._lock:
            if self._failures and self._waiting:
                self._changed.wait_for(lambda: self._closing, self._backoff_ms() / 1000)
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if self._closing:
                return False
            failures = self._failures
        if failures:
            self._routes.refresh()
        return True

    def _backoff_ms(self) -> int:
        # The first try after a break comes at once: a server that restarted is back already.
        return min(BACKOFF_MS << min(self._failures - 1, 10), BACKOFF_MS_MAX)

    def _receive(self, stream: PutStream) -> None:
        """Take answers until the stream breaks (raises) or must be left."""
        while True:
            self._park(stream)
            with self._lock:
                drained = self._draining and not self._unacked
            if not drained:
                drained = self._read_one(stream)
            if drained and not self._after_drain():
                return
            self.pump()

    def _read_one(self, stream: PutStream) -> bool:
        """Read one message of answers. Returns: whether it was the last one of a drain."""
        acks = stream.receive()
        done: Done = []
        try:
            with self._lock:
                self._progress_ms = self._clock.monotonic_ms()
                for ack in acks:
                    self._take(ack, done)
                return self._draining and not self._unacked
        finally:
            _complete(done)

    def _park(self, stream: PutStream) -> None:
        """Leave the stream to those who wait for their answers, while there are any.

        Who sent the one batch that is under way may be about to wait for it; if not, it is read a little later.
        Raises: what ended the read of one of them.
        """
        with self._lock:
            if not self._waited_for or len(self._unacked) > 1 or self._draining:
                return
            self._waited_for = False
            self._parked = True
            helped, tick_s, idle_s, unread = self._helped, PARK_TICK_S, 0.0, 0
            try:
                # There is one reader at a time, also while it is closed.
                while self._helping or (not self._closing and idle_s < PARK_S):
                    self._unpark.wait(tick_s)
                    if self._help_error is not None:
                        error, self._help_error = self._help_error, None
                        raise error
                    if self._helping:
                        tick_s = min(2 * tick_s, PARK_TICK_MAX_S)
                        continue
                    if self._draining or self._stream is not stream:
                        break
                    if self._unacked:
                        if unread == self._unacked[0].number:
                            break
                        unread, tick_s = self._unacked[0].number, PARK_TICK_S
                    idle_s = idle_s + tick_s if helped == self._helped else 0.0
                    helped = self._helped
            finally:
                self._parked = False

    def help(self, future: BatchFuture, timeout: float | None) -> float | None:
        """Read answers in the thread that waits for `future`. Returns: what is left of `timeout` (seconds)."""
        if timeout is not None and timeout < HELP_TIMEOUT_S:
            return timeout
        with self._lock:
            self._waited_for = True
            stream = self._stream
            began = self._clock.monotonic_ms()
            if not self._parked or self._helping or stream is None or not self._unacked:
                return timeout
            if self._draining or began < self._help_not_before_ms:
                return timeout
            self._helping = True
            self._helper = threading.get_ident()
            self._help_began_ms = began
        end_ms = math.inf if timeout is None else began + timeout * 1000
        error: RayMQError | None = None
        try:
            while not future.done() and self._clock.monotonic_ms() < end_ms:
                if self._read_one(stream):
                    break
                if self._waiting:
                    self.pump()
        except RayMQError as broken:
            error = broken
        except BaseException:
            # Ctrl-C: what was read may be gone with it, so that everything unanswered must be asked again.
            error = Unavailable("who read the answers was interrupted", shard=self._shard)
            raise
        finally:
            with self._lock:
                self._helping = False
                self._helper = 0
                self._helped += 1
                self._help_error = error
                if self._unacked or self._waiting or self._draining or error or self._closing:
                    self._unpark.notify()
                    self._changed.notify_all()
        if timeout is None:
            return None
        return max(0.0, timeout - (self._clock.monotonic_ms() - began) / 1000)

    def _take(self, ack: dict[str, Any], done: Done) -> None:
        if not self._unacked or self._unacked[0].number != ack["id"]:
            raise Unavailable(f"shard {self._shard} answered out of order", shard=self._shard)
        out = self._unacked[0]
        lane = out.lane
        if "error" not in ack:
            self._failures = 0
            receipt = BatchReceipt(
                lane.topic,
                lane.queue_id,
                self._shard,
                ack["first_offset"],
                ack["count"],
                ack["duplicates"],
                ack["store_time_ms"],
                ack["last_offset"],
            )
            done.append((out, receipt))
        else:
            self._draining = True
            self._refused(out, from_wire(ack["error"]), done)
        # Last: who helps may be interrupted anywhere, and rather hears twice of a batch than never.
        self._unacked.popleft()
        self._read = out.number
        self._in_flight -= out.size

    def _refused(self, out: Outgoing, error: RayMQError, done: Done) -> None:
        lane = out.lane
        gap = isinstance(error, Rejected) and error.fields.get("field") == "sequence"
        full_since_ms = out.full_since_ms
        out.full = out.full_since_ms = None
        if error.retriable or (gap and lane.disturbed):
            if error.retriable:
                self._last_error = error
                self._moved = self._moved or isinstance(error, Unavailable)
            if isinstance(error, DeliveryUnknown):
                out.uncertain, out.unknown = True, error
                self._warn(out, error)
            elif isinstance(error, StorageFull):
                out.full = error
                now = self._clock.monotonic_ms()
                out.full_since_ms = now if full_since_ms is None else full_since_ms
            self._retry.append(out)
        elif isinstance(error, Fenced):
            lane.dead = error
            self._retry.append(out)
        elif gap or out.uncertain or isinstance(error, Bug):
            # A shard that does not know what it did may have stored it.
            out.uncertain = out.uncertain or isinstance(error, Bug)
            lane.broken = error.message
            if gap and lane.resends:
                lane.broken += "; resend the messages before it first"
            self._retry.append(out)
        else:
            done.append((out, error))
            lane.holes.append((out.sequence, out.batch.num_rows))
        lane.disturbed = True
        self._touched.add(lane)

    def _warn(self, out: Outgoing, error: DeliveryUnknown) -> None:
        """A caller that waits for a receipt sees nothing of it yet. Needs the lock."""
        now = self._clock.monotonic_ms()
        if now < self._quiet_until_ms:
            return
        self._quiet_until_ms = now + WARN_PAUSE_MS
        log.warning(
            "shard %d answered %s for queue %d of %s: the batch is sent again, with the same sequence, for up to %d ms",
            self._shard,
            error.status,
            out.lane.queue_id,
            out.lane.topic,
            self._delivery_timeout_ms,
        )

    def _after_drain(self) -> bool:
        """All answers are in: restore order and go on. False: on a new connection."""
        done: Done = []
        with self._lock:
            moved, self._moved = self._moved, False
            if self._retry:
                self._failures += 1
            if not moved and self._retry:
                self._changed.wait_for(lambda: self._closing, self._backoff_ms() / 1000)
            if not moved:
                self._settle(done)
        _complete(done)
        return not moved

    def _note_break(self, error: RayMQError) -> None:
        """The stream broke: what it carried may be stored."""
        done: Done = []
        with self._lock:
            self._last_error = error
            self._failures += 1
            # Nobody writes to it from here on: what is written later would not count as uncertain.
            self._stream = None
            for out in self._unacked:
                out.uncertain = True
            if isinstance(error, Rejected) and error.fields.get("field") not in _MOVED:
                # A wrong token stays wrong.
                done = self._give_up(error)
                # Whoever is told sends again, perhaps at once.
                self._settle(done)
                self._failures = 0
        _complete(done)

    def _give_up(self, error: Rejected) -> Done:
        """The shard does not let us in: everything unanswered fails. Needs the lock; `_settle` comes next.

        What an earlier stream carried may be stored: the refusal came too late for it.
        """
        done: Done = []
        for out in [*self._retry, *self._unacked, *self._waiting]:
            lane = out.lane
            self._touched.add(lane)
            if out.uncertain:
                lane.broken = lane.broken or error.message
                done.append((out, self._unknown(out, error.message)))
            else:
                lane.holes.append((out.sequence, out.batch.num_rows))
                done.append((out, error))
        self._retry, self._unacked, self._waiting = [], deque(), deque()
        self._in_flight = 0
        return done

    def _detach(self, stream: PutStream | None, connection: Connection | None) -> None:
        with self._lock:
            self._stream = self._receiving = None
        if stream is not None:
            stream.abort()
            with self._lock:
                # A thread that writes now fails at once, and leaves.
                self._changed.wait_for(lambda: not self._writing and not self._helping)
                self._help_error = None
            stream.close()
        if connection is not None:
            connection.close()

    # --- settling -------------------------------------------------------------------------------

    def _settle(self, done: Done) -> None:
        """Nothing is in flight: put everything unanswered back in order. Needs the lock.

        What is too old fails; sequences close up over what was certainly not stored.
        """
        outs = sorted([*self._retry, *self._unacked, *self._waiting], key=lambda out: out.number)
        self._retry, self._unacked, self._waiting = [], deque(), deque()
        self._in_flight = 0
        self._draining = False
        now = self._clock.monotonic_ms()
        lanes = {out.lane for out in outs} | self._touched
        self._touched = set()
        for out in outs:
            if now >= out.deadline_ms and out.uncertain and out.lane.broken is None:
                out.lane.broken = f"a batch was not acknowledged in time: {self._last_error}"
        absent: set[QueueSequence] = set()
        for out in outs:
            if out.lane in absent:
                # The shard refuses a gap, so no earlier try can have stored what comes after it.
                out.uncertain = False
            error = self._verdict(out, now)
            if error is None:
                self._waiting.append(out)
            else:
                done.append((out, error))
                if not out.uncertain:
                    absent.add(out.lane)
                    if not (out.lane.own_id or out.lane.resends):
                        # Rows that moved down would have other numbers when all is sent again with this id.
                        out.lane.dead = out.lane.dead or error
                if out.lane.broken is None:
                    out.lane.holes.append((out.sequence, out.batch.num_rows))
        for out in self._waiting:
            out.sequence -= out.lane.rows_below(out.sequence)
        for lane in lanes:
            lane.renew()

    def _verdict(self, out: Outgoing, now: int) -> RayMQError | None:
        """Why a batch fails now; None: it is tried again."""
        lane = out.lane
        if lane.dead is not None:
            return lane.dead
        late = now >= out.deadline_ms
        if out.full is not None and not out.uncertain:
            since = out.full_since_ms
            if late or (since is not None and now - since >= STORAGE_FULL_MS):
                return out.full
        if lane.broken is None and not late:
            return None
        why = lane.broken or (
            f"not delivered within {self._delivery_timeout_ms} ms: {self._last_error}"
        )
        if out.uncertain:
            return self._unknown(out, why)
        why = f"queue {lane.queue_id} of {lane.topic}: nothing of the batch was stored: {why}"
        if self._closing:
            return Rejected(why, field="producer", limit="open")
        return Unavailable(why, shard=self._shard)

    def _unknown(self, out: Outgoing, why: str) -> DeliveryUnknown:
        """What a batch fails with that may be stored. Its future gets what a resend needs."""
        lane, answer = out.lane, out.unknown
        out.future.unknown = UnknownBatch(
            lane.topic,
            lane.queue_id,
            self._shard,
            lane.producer_id,
            lane.epoch,
            out.sequence - lane.rows_below(out.sequence),
            out.batch,
            out.size,
            out.acks,
        )
        told = "" if answer is None else f" (the shard answered {answer.status})"
        return DeliveryUnknown(
            f"queue {lane.queue_id} of {lane.topic}: the batch may or may not be stored{told}: {why}",
            status="UNKNOWN_ERROR" if answer is None else answer.status,
            append=None if answer is None else answer.fields.get("append"),
            topic=lane.topic,
            queue_id=lane.queue_id,
            shard=self._shard,
        )

    # --- time and end ---------------------------------------------------------------------------

    def check(self) -> None:
        """Break a stream whose server says nothing for too long. Called about every second."""
        with self._lock:
            stream = self._receiving
            if stream is None or not (self._unacked or self._waiting):
                return
            now = self._clock.monotonic_ms()
            silent = now - self._progress_ms >= self._request_timeout_ms
            if self._helping and now - max(self._help_began_ms, self._progress_ms) >= HELP_MS_MAX:
                self._help_not_before_ms = now + HELP_PAUSE_MS
                silent = True
            if silent or now >= (self._unacked or self._waiting)[0].deadline_ms:
                stream.abort()

    def close(self) -> None:
        """End the stream and the thread; what is not answered fails, truthfully."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            rest = [*self._retry, *self._unacked, *self._waiting]
            for out in self._unacked:
                out.uncertain = True
            for out in rest:
                out.lane.broken = out.lane.broken or "the producer was closed"
            done: Done = [
                (out, error) for out in rest if (error := self._verdict(out, 0)) is not None
            ]
            self._retry, self._unacked, self._waiting = [], deque(), deque()
            stream = self._receiving
            self._stream = None
            self._changed.notify_all()
            if stream is not None:
                stream.abort()
        _complete(done)
        if threading.get_ident() not in (self._helper, self._thread.ident):
            # A callback may close: it is called by who reads, for whom the thread waits.
            self._thread.join()


def _complete(done: Done) -> None:
    """Tell the futures, outside the lock: their callbacks may send again."""
    try:
        _tell(done)
    except BaseException:
        # Ctrl-C: the others are told all the same.
        _tell(done)
        raise
    # A thread that waits must not keep them, nor what their callbacks refer to.
    done.clear()


def _tell(done: Done) -> None:
    for out, result in done:
        try:
            if isinstance(result, RayMQError):
                out.future.set_exception(result)
            else:
                out.future.set_result(result)
        except InvalidStateError:
            # It was told before, or cancelled.
            continue
