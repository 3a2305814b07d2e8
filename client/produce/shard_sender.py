"""Delivers batches to one shard over one put stream, in order, so that each is stored once.

Rules     `SendWindow` decides which batches are written and resent, and the outcome of each batch.
Threads   Any thread may call `add` and `write_ready`. One receiver thread connects and reads acks, unless a caller that
          is blocked on a receipt reads them itself (`read_while_waiting`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial

from raymq.actors.protocol.small_puts import SmallPut
from raymq.client.client_thread import ClientThread, join_at_close
from raymq.client.transport.chained_future import wake_callers
from raymq.client.transport.connection import Connection, PutStream
from raymq.client.transport.leader_route import LeaderRoute
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, RayMQError, Unavailable
from raymq.store.records.record import SmallBatch

from .callbacks import Callbacks, raise_interrupt
from .producer_config import ProducerConfig
from .queue_sequence import BatchReceipt
from .read_turn import ReadTurn
from .send_future import BatchFuture
from .send_window import Complete, Effects, InFlightBatch, RowsRefused, SendWindow, WarnResend

logger = logging.getLogger("raymq.producer")

#: with a shorter timeout a caller does not read: a blocked read cannot be timed out
CALLER_TIMEOUT_MIN_S = 5.0
#: from a fault of the receiver thread itself to its next try
FAULT_PAUSE_MS = 100


class ShardSender:
    """Sends batches to one shard: the threads and the stream of a SendWindow."""

    def __init__(
        self,
        routes: Routes,
        shard: int,
        config: ProducerConfig,
        *,
        on_outcome: Callable[[BatchFuture, BatchReceipt | RayMQError], None],
        on_refused: Callable[[BatchFuture, tuple[int, ...], RayMQError], None],
        on_answered: Callable[[ShardSender], None],
        callbacks: Callbacks,
        clock: Clock,
    ) -> None:
        """Args: `on_outcome`: sets the outcome of a future, outside the lock. It may be called twice for one.

        `on_refused`: notes rows that fail while the batch is sent again. It may be called twice for one, too.
        `on_answered` is called after outcomes, outside the lock: `answered_up_to` may have moved. `callbacks`: those of
        the futures, which `on_outcome` runs.
        """
        self._routes = routes
        self._shard = shard
        self._config = config
        self._on_outcome = on_outcome
        self._on_refused = on_refused
        self._on_answered = on_answered
        self.callbacks = callbacks
        self._clock = clock

        #: guards everything below; used directly, because a condition's `with` costs two more calls
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._window = SendWindow(shard, config, fails_over=routes.fails_over)
        self._turn = ReadTurn(self._lock)
        #: the stream that is written to; None as soon as a write failed
        self._stream: PutStream | None = None
        #: the stream whose acks are read, and its route
        self._receiving: PutStream | None = None
        self._route = LeaderRoute("")
        self._writing = False

        self._thread = ClientThread(self._run, f"raymq-sender-{shard}")
        self._thread.start()

    # --- writing ----------------------------------------------------------------------------------

    def add(self, batch: InFlightBatch) -> None:
        """Take a batch; `write_ready` writes it. See `SendWindow.add`."""
        with self._lock:
            self._window.add(batch, self._clock.monotonic_ms())
            batch.future.shard_sender = self
            if self._stream is None:
                self._changed.notify_all()

    @property
    def last_number(self) -> int:
        """Number of the batch that was added last."""
        return self._window.last_number

    @property
    def answered_up_to(self) -> int:
        """See `SendWindow.answered_up_to`."""
        return self._window.answered_up_to

    @property
    def stalled(self) -> bool:
        """Whether a batch waits until bytes are acknowledged."""
        with self._lock:
            return self._window.stalled

    def write_ready(self) -> None:
        """Write the batches that may be written now, unless another thread writes: then that thread writes them."""
        with self._lock:
            if self._writing:
                return
            self._writing = True

        stream: PutStream | None = None
        try:
            while True:
                with self._lock:
                    stream = self._stream
                    batches = self._window.next_writes(self._clock.monotonic_ms())
                    if not batches or stream is None:
                        self._writing = False
                        self._changed.notify_all()
                        return
                self._write(stream, batches)
        except BaseException as error:
            with self._lock:
                self._writing = False
                if self._stream is stream:
                    # The receiver thread meets the same error, and connects again.
                    self._disconnect()
                self._changed.notify_all()

            if not isinstance(error, RayMQError):
                # Ctrl-C: perhaps the batch was not written, and would never be answered.
                if stream is not None:
                    stream.abort()
                raise

    def _write(self, stream: PutStream, batches: list[InFlightBatch]) -> None:
        small: list[SmallPut] = []
        for batch in batches:
            queue = batch.queue
            meta = {
                "id": batch.number,
                "topic": queue.topic,
                "queue": queue.queue_id,
                "pid": queue.producer_id,
                "epoch": queue.epoch,
                "seq": batch.sequence,
                "acks": batch.acks,
                "read": self._window.last_acked,
            }
            if isinstance(batch.data, SmallBatch):
                small.append((meta, batch.data))
            else:
                stream.send(meta, batch.data)

        if small:
            stream.send_small(small)

    def _disconnect(self) -> None:
        """Write no more. Needs the lock."""
        self._stream = None
        self._window.disconnected()

    # --- the receiver thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._window.closed:
            try:
                self._deliver()
            except BaseException:
                # Without this thread no batch would be answered, and none would fail when its time is up.
                logger.exception("shard %d: the delivery of batches", self._shard)
                with self._lock:
                    self._wait_unless_closed(FAULT_PAUSE_MS)

    def _deliver(self) -> None:
        """Connect, write and read acks, again and again, until this sender is closed."""
        while self._wait_for_batches():
            connection: Connection | None = None
            stream: PutStream | None = None

            try:
                connection, self._route = self._routes.connect_leader(self._shard)
                stream = connection.put_stream()
                if not self._open(stream):
                    return
                self.write_ready()
                self._receive(stream)
            except RayMQError as error:
                if connection is not None:
                    self._routes.heed(self._shard, self._route, error)
                self._broke(error)
            except BaseException as error:
                logger.exception("shard %d: the stream of puts broke", self._shard)
                self._broke(Bug(f"shard {self._shard}: {error!r}"))
            finally:
                self._detach(stream, connection)

    def _wait_for_batches(self) -> bool:
        """Wait until there is something to send and the pause after failures is over. Returns: not closed."""
        window = self._window
        with self._lock:
            if not self._routes.knows_next(self._shard):
                self._wait_unless_closed(window.reconnect_pause_ms())
            self._changed.wait_for(lambda: window.waiting or window.closed)
            if window.closed:
                return False
            failed = window.failures > 0
        if failed:
            self._routes.refresh()
        return True

    def _wait_unless_closed(self, pause_ms: int) -> None:
        """Pause, or until this sender is closed. Needs the lock, and releases it while waiting."""
        if pause_ms:
            self._changed.wait_for(lambda: self._window.closed, pause_ms / 1000)

    def _open(self, stream: PutStream) -> bool:
        """Wait until the shard has taken the stream. Returns: not closed. Raises: RayMQError."""
        with self._lock:
            if self._window.closed:
                return False
            self._receiving = stream
            # The shard's silence counts from here.
            self._window.progress_ms = self._clock.monotonic_ms()
        # A batch written before the shard took the stream may be unknown, although no server was there to store it.
        stream.opened()
        with self._lock:
            self._stream = stream
            self._window.connected(stream.stream_limit_bytes)
        return True

    def _receive(self, stream: PutStream) -> None:
        """Read acks until the shard is elsewhere. Raises: RayMQError when the stream broke."""
        while True:
            self._park(stream)
            with self._lock:
                drained = self._window.drained
            if not drained:
                drained = self._read_acks(stream)
            if drained and not self._resume():
                return
            self.write_ready()

    def _read_acks(self, stream: PutStream) -> bool:
        """Read one message of acks. Returns: whether a drain has ended."""
        acks = stream.receive()
        effects: Effects = []
        try:
            with self._lock:
                now_ms = self._clock.monotonic_ms()
                self._window.received(now_ms, stream.stream_limit_bytes)
                for ack in acks:
                    self._window.ack(ack, now_ms, effects)
                return self._window.drained
        finally:
            self._perform(effects)
            raise_interrupt()

    def _resume(self) -> bool:
        """All acks of a drain are in: resume. Returns: whether on the same stream."""
        effects: Effects = []
        with self._lock:
            refusal = self._window.moved_refusal
            if refusal is not None:
                self._routes.heed(self._shard, self._route, refusal)
            self._wait_unless_closed(self._window.begin_resume())
            reconnect = self._window.resume(self._clock.monotonic_ms(), effects)
        self._perform(effects)
        return not reconnect

    def _broke(self, error: RayMQError) -> None:
        effects: Effects = []
        with self._lock:
            self._stream = None
            self._window.broke(error, self._clock.monotonic_ms(), effects)
        self._perform(effects)

    def _detach(self, stream: PutStream | None, connection: Connection | None) -> None:
        """Close the stream when no other thread uses it any more."""
        with self._lock:
            self._disconnect()
            self._receiving = None
        if stream is not None:
            stream.abort()
            with self._lock:
                # A thread that writes or reads now fails at once, and leaves.
                self._changed.wait_for(lambda: not self._writing and not self._turn.caller_reading)
                self._turn.reset()
            stream.close()
        if connection is not None:
            connection.close()

    # --- reading by callers -----------------------------------------------------------------------

    def _park(self, stream: PutStream) -> None:
        """Leave the stream to callers that block on their receipts, while one batch at a time is sent.

        Raises: the error of a caller's read.
        """
        with self._lock:
            if self._turn.wanted and len(self._window.unacked) <= 1 and not self._must_read(stream):
                self._turn.park(self._oldest_unacked, lambda: self._must_read(stream))

    def _oldest_unacked(self) -> int | None:
        """The number of the oldest unacknowledged batch. Needs the lock."""
        unacked = self._window.unacked
        return unacked[0].number if unacked else None

    def _must_read(self, stream: PutStream) -> bool:
        """Whether the receiver thread may not leave the stream to callers. Needs the lock."""
        window = self._window
        if window.closed or window.draining or self._stream is not stream:
            return True
        # The callers of a gathered batch are blocked already, on other threads than the one that wrote it.
        return bool(window.unacked) and window.unacked[0].future.gathered

    def read_while_waiting(self, future: BatchFuture, timeout: float | None) -> float | None:
        """Read acks on the caller's thread until `future` is done.

        A caller that blocks on a receipt anyway reads the ack itself (`ReadTurn` says why). The call does nothing while
        the receiver thread or another caller reads.

        Args: `timeout`: seconds; None waits without limit. Below CALLER_TIMEOUT_MIN_S the receiver thread keeps the
        stream, because a blocked read cannot be timed out.
        Returns: the seconds of `timeout` that are left.
        """
        if timeout is not None and timeout < CALLER_TIMEOUT_MIN_S:
            return timeout

        began_ms = self._clock.monotonic_ms()
        end_ms = math.inf if timeout is None else began_ms + timeout * 1000
        stream = self._begin_reading(began_ms)
        if stream is None:
            return timeout

        error: RayMQError | None = None
        try:
            while not future.done() and self._clock.monotonic_ms() < end_ms:
                if self._read_acks(stream):
                    break
                if self._window.waiting:
                    self.write_ready()
        except RayMQError as broken:
            error = broken
        except BaseException:
            # Ctrl-C: acks that were read may be lost with it, so that every batch must be sent again.
            error = Unavailable("the caller that read the acks was interrupted", shard=self._shard)
            raise
        finally:
            self._end_reading(error)

        if timeout is None:
            return None
        return max(0.0, timeout - (self._clock.monotonic_ms() - began_ms) / 1000)

    def _begin_reading(self, now_ms: int) -> PutStream | None:
        """The stream, if it is this caller's turn to read."""
        with self._lock:
            self._turn.wanted = True
            stream, window = self._stream, self._window
            if stream is None or not window.unacked or window.draining:
                return None
            return stream if self._turn.begin(now_ms) else None

    def _end_reading(self, error: RayMQError | None) -> None:
        with self._lock:
            window = self._window
            unpark = bool(window.unacked or window.waiting) or window.draining or window.closed
            self._turn.end(error, unpark=unpark)
            if unpark or error is not None:
                self._changed.notify_all()

    # --- effects, time and end --------------------------------------------------------------------

    def _perform(self, effects: Effects) -> None:
        """Perform the window's effects, outside the lock: callbacks of futures may send again."""
        try:
            self._perform_each(effects)
        except BaseException:
            # Ctrl-C: the other batches must get their outcomes, too.
            self._perform_each(effects)
            raise
        finally:
            # A thread that waits must not keep the batches alive, nor the objects that their callbacks refer to.
            if effects:
                effects.clear()
                self._on_answered(self)

    def _perform_each(self, effects: Effects) -> None:
        finished = [effect.batch.future for effect in effects if isinstance(effect, Complete)]
        for effect in effects:
            if isinstance(effect, Complete):
                self._on_outcome(effect.batch.future, effect.outcome)
            elif isinstance(effect, RowsRefused):
                self._on_refused(effect.batch.future, effect.rows, effect.error)
            else:
                self._warn(effect)
        wake_callers(finished)

    def _warn(self, effect: WarnResend) -> None:
        queue = effect.batch.queue
        logger.warning(
            "shard %d answered %s for queue %d of %s: the batch is sent again, with the same sequence, for up to %d ms",
            self._shard,
            effect.error.status,
            queue.queue_id,
            queue.topic,
            self._config.delivery_timeout_ms,
        )

    def check(self) -> None:
        """Break a stream that has been silent for too long. Called about every second.

        If the leader may change, the other replicas are asked much earlier whether it has.
        """
        with self._lock:
            stream, route, window = self._receiving, self._route, self._window
            if stream is None or not (window.unacked or window.waiting):
                return
            now_ms = self._clock.monotonic_ms()
            caller_read_too_long = self._turn.is_too_long(now_ms, window.progress_ms)
            if caller_read_too_long or window.is_late(now_ms):
                stream.abort()
                return
            silent = window.is_silent(now_ms)

        if silent and self._routes.fails_over:
            self._routes.ask_who_leads(self._shard, route, partial(self._leave, stream))

    def _leave(self, stream: PutStream) -> None:
        """Break a stream, unless it is closed already: another replica leads."""
        with self._lock:
            if self._receiving is stream:
                stream.abort()

    def close(self) -> None:
        """End the stream and the thread. Batches without an ack fail: as unknown, if they were written."""
        effects: Effects = []
        with self._lock:
            if self._window.closed:
                return
            self._window.close(effects)
            self._stream = None
            self._changed.notify_all()
            if self._receiving is not None:
                self._receiving.abort()
        self._perform(effects)
        if threading.get_ident() not in (self._turn.caller, self._thread.ident):
            # A callback may close, on the thread that reads. Then the receiver thread waits for that one.
            join_at_close(self._thread, self._routes.transport)
