"""Batches messages per queue and sends each batch when it is full, lingered long enough, or waited for.

`Producer`, `AsyncProducer` and `Queue` are made of it: it has what they need beyond the public methods of `Producer`.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import Unpack

from raymq.cluster.cluster import Cluster
from raymq.cluster.messages.columns import put_batch
from raymq.cluster.messages.partitioner import queue_of, queues_of
from raymq.cluster.transport.routes import Routes
from raymq.cluster.unclosed import warn_unclosed
from raymq.store.clock import Clock
from raymq.store.errors import RayMQError, Rejected
from raymq.store.format import TIMER_TOPIC
from raymq.store.promise import Acks
from raymq.store.record import BATCH_BYTES_MAX, PUT_SCHEMA, Row
from raymq.store.records.binary_columns import binary_array

from .batch_sender import BatchSender
from .message_encoder import MESSAGE_BYTES, EncodedMessage, MessageEncoder, waiting_properties
from .producer_config import MIB, ProducerOptions, closed_error
from .send_future import BatchFuture, SendFuture
from .shard_sender import ShardSender

#: how long a batch that cannot be written yet is kept open before the next check
STALLED_S = 0.005
#: rows of `send_batch` are sent in batches of about this size
COLUMNS_BYTES = 4 * MIB


@dataclass(eq=False, slots=True)
class OpenBatch:
    """A batch that takes messages. It is closed when it is full, lingered long enough, or waited for."""

    #: topic and queue
    where: tuple[str, int]
    acks: Acks
    #: when its first message came, seconds of the monotonic clock
    begun: float
    #: when its linger time is over, on the same clock; 0: a flush was requested
    due: float
    batcher: MessageBatcher
    bodies: list[bytes] = field(default_factory=list)
    tags: list[str | None] = field(default_factory=list)
    properties: list[bytes | None] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    #: bytes of the byte limit
    size: int = 0
    #: no message is added any more
    closed: bool = False
    future: BatchFuture = field(default_factory=BatchFuture)

    def __post_init__(self) -> None:
        self.future.open_batch = self

    def close(self, now: float) -> None:
        """Take no more messages; `encode` comes next."""
        future = self.future
        self.closed = True
        future.rows, future.size = len(self.bodies), self.size
        future.begun, future.closed = self.begun, now

    def encode(self) -> pa.RecordBatch | Row:
        """The messages as columns; they are dropped here. A single small message is a Row.

        Raises: Rejected for a value that its column cannot hold.
        """
        bodies, tags, properties, born = self.bodies, self.tags, self.properties, self.born
        self.bodies, self.tags, self.properties, self.born = [], [], [], []
        # Its futures need the batcher no more, nor what it keeps alive.
        self.future.open_batch = None
        if len(bodies) == 1 and self.size <= BATCH_BYTES_MAX:
            return Row(bodies[0], tags[0], properties[0], born[0])
        _, tag, encoded, time = PUT_SCHEMA.types
        try:
            columns = [
                binary_array(bodies),
                _column(tags, tag),
                _column(properties, encoded),
                _column(born, time),
            ]
        except (TypeError, ValueError) as error:
            # Only this batch fails: the thread that closes it may serve others.
            raise Rejected(
                f"a message cannot be sent as it is: {error}", field="batch", limit="bytes and text"
            ) from error
        return pa.RecordBatch.from_arrays(columns, schema=PUT_SCHEMA)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """A column that is often the same in all rows, which is faster to build."""
    first, rows = values[0], len(values)
    if first != values[-1] or values.count(first) != rows:
        return pa.array(values, kind)
    return pa.nulls(rows, kind) if first is None else pa.repeat(pa.scalar(first, kind), rows)


class MessageBatcher:
    """The open batches of a producer and its linger thread. Threads: any."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        owner: str = "Producer",
        future_type: type[SendFuture] = SendFuture,
        clock: Clock | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        """Args: `owner` is the class that a warning about an unclosed producer names."""
        self._owner = owner
        self._future_type = future_type
        self._clock = clock or Clock()
        self.sender = BatchSender(Routes.of(cluster), clock=self._clock, **options)
        self.config = self.sender.config
        self.encoder = MessageEncoder(self.config, self._clock)
        self.limiter = self.sender.limiter
        self._linger_s = self.config.linger_ms / 1000
        #: guards everything below
        self._changed = threading.Condition()
        self._open: dict[tuple[str, int], OpenBatch] = {}
        #: open batches, and some that are closed already, by the end of their linger time
        self._due: deque[OpenBatch] = deque()
        #: topic -> queue of messages without a key; moves on with every batch
        self._sticky: dict[str, int] = {}
        #: what the linger thread must write to, beside what is due
        self._to_pump: set[ShardSender] = set()
        self.closed = False
        self._linger_state = _LingerState()
        self._linger_thread: threading.Thread | None = None
        #: when that thread wakes by itself, seconds of the monotonic clock; 0: it is awake
        self._linger_wakes = math.inf

    # --- messages -------------------------------------------------------------------------------

    def send(self, message: EncodedMessage) -> SendFuture:
        """Send a message. Raises: as `Producer.send`."""
        self._acquire(message.size)
        future, ready = self.add(message)
        if ready is not None:
            ready.pump()
        return future

    def _acquire(self, size: int) -> None:
        """Wait until `size` bytes fit into the buffer. Raises: Unavailable after `max_block_ms`."""
        if not self.limiter.acquire_nowait(size):
            # Batches that linger have to be sent, or no bytes would ever be answered.
            self.flush_open(keep_stalled=True)
            self.limiter.acquire(size)

    def add(
        self, message: EncodedMessage, *, may_block: bool = True
    ) -> tuple[SendFuture, ShardSender | None]:
        """Add a message, whose bytes are acquired, to its batch.

        Args: without `may_block` the linger thread writes what is full.
        Returns: the message's future; the sender that the caller must pump.
        Raises: as `Producer.send`; the bytes are released.
        """
        try:
            return self._add(message, may_block)
        except BaseException:
            self.limiter.release(message.size)
            raise

    def _add(
        self, message: EncodedMessage, may_block: bool
    ) -> tuple[SendFuture, ShardSender | None]:
        self.sender.check_process()
        topic, queue_id = message.topic, message.queue_id
        route = self.sender.topic(topic)
        if queue_id is not None:
            route.shard_of(queue_id)
        elif message.key is not None:
            queue_id = queue_of(message.key, route.queues)
        now_ms = self._clock.now_ms()
        with self._changed:
            self._check_open()
            if queue_id is None:
                queue_id = self._sticky_queue(topic, route.queues)
            where, properties = (topic, queue_id), message.properties
            if message.later is not None:
                # The queue's shard keeps it until then: one sequence per shard, since its timers are one queue.
                where = (TIMER_TOPIC, route.shard_of(queue_id))
                properties = waiting_properties(topic, queue_id, message.properties, message.later)
            batch, ready = self._batch_for(where, message.acks)
            batch.bodies.append(message.body)
            batch.tags.append(message.tag)
            batch.properties.append(properties)
            batch.born.append(now_ms)
            batch.size += message.size
            future = self._future_type(batch.future, len(batch.bodies) - 1)
            if not self._linger_s or batch.size >= self.config.batch_bytes:
                if may_block:
                    ready = self._close_batch(batch) or ready
                else:
                    self._request_flush(batch)
            if ready is not None and not may_block:
                self._to_pump.add(ready)
                self._wake_linger()
        return future, ready

    def add_bodies(
        self,
        topic: str,
        bodies: list[bytes],
        body_bytes: int,
        properties: bytes | None,
        *,
        queue_id: int,
    ) -> None:
        """Add bodies, together no larger than a batch, to the open batch of a queue.

        Args: `body_bytes` of all of them; `properties`, encoded, of each. They have no futures: `sender.raise_failure`
        raises their failures. Raises: as `Producer.send`.
        """
        self.sender.check_process()
        self.sender.topic(topic).shard_of(queue_id)
        rows = len(bodies)
        size = body_bytes + rows * (MESSAGE_BYTES + (0 if properties is None else len(properties)))
        self._acquire(size)
        now_ms = self._clock.now_ms()
        with self.limiter.released_on_error(size), self._changed:
            self._check_open()
            batch, ready = self._batch_for((topic, queue_id), self.config.acks)
            batch.bodies += bodies
            batch.tags += [None] * rows
            batch.properties += [properties] * rows
            batch.born += [now_ms] * rows
            batch.size += size
            if not self._linger_s or batch.size >= self.config.batch_bytes:
                ready = self._close_batch(batch) or ready
        if ready is not None:
            ready.pump()

    def _check_open(self) -> None:
        if self.closed:
            raise closed_error()

    def _sticky_queue(self, topic: str, queues: int) -> int:
        chosen = self._sticky.get(topic)
        if chosen is None:
            chosen = self._sticky[topic] = random.randrange(queues)
        return chosen

    # --- columns and resends --------------------------------------------------------------------

    def add_columns(
        self, topic: str, data: pa.RecordBatch | pa.Table, queue_id: int | None
    ) -> list[BatchFuture]:
        """See `Producer.send_batch`."""
        self.sender.check_process()
        route = self.sender.topic(topic)
        batch, keys = put_batch(data, now_ms=self._clock.now_ms())
        if not batch.num_rows:
            return []
        self.flush_open()
        if queue_id is not None or keys is None:
            with self._changed:
                if queue_id is None:
                    queue_id = self._sticky_queue(topic, route.queues)
                    self._sticky[topic] = (queue_id + 1) % route.queues
            return self._send_columns(topic, queue_id, batch)
        futures: list[BatchFuture] = []
        chosen = queues_of(keys, route.queues)
        for number in np.unique(chosen).tolist():
            rows = pa.array(np.flatnonzero(chosen == number))
            futures += self._send_columns(topic, number, batch.take(rows))
        return futures

    def _send_columns(self, topic: str, queue_id: int, batch: pa.RecordBatch) -> list[BatchFuture]:
        futures: list[BatchFuture] = []
        step = max(1, COLUMNS_BYTES * batch.num_rows // max(batch.nbytes, 1))
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            future = self._closed_future(part.num_rows, part.nbytes)
            with self.limiter.released_on_error(future.size), self._changed:
                self._check_open()
                sender = self.sender.enqueue(topic, queue_id, part, future=future)
            sender.pump()
            futures.append(future)
        return futures

    def resend(self, sent: BatchFuture) -> BatchFuture:
        """See `Producer.resend`. Returns: the receipt of the batch that is sent again."""
        with self._changed:
            while (resent := sent.resent) is not None:
                sent = resent
                if not sent.done() or sent.exception() is None:
                    return sent
        lost = sent.unknown
        if lost is None:
            raise Rejected(
                "only a message whose future raised DeliveryUnknown can be sent again with its sequence",
                field="sent",
                limit="DeliveryUnknown",
            )
        future = self._closed_future(lost.batch.num_rows, lost.size)
        with self.limiter.released_on_error(future.size), self._changed:
            self._check_open()
            sender = self.sender.enqueue_again(lost, future)
            sent.resent = future
        sender.pump()
        return future

    def _closed_future(self, rows: int, size: int) -> BatchFuture:
        """The receipt of a batch that takes no more messages; its bytes are acquired."""
        future = BatchFuture(rows, size, self._clock.monotonic())
        future.owner = self
        self._acquire(size)
        return future

    # --- open batches ---------------------------------------------------------------------------

    def _batch_for(
        self, where: tuple[str, int], acks: Acks
    ) -> tuple[OpenBatch, ShardSender | None]:
        """The open batch of a queue, and the sender to pump if another batch was closed for it. Needs the lock."""
        batch, ready = self._open.get(where), None
        if batch is not None:
            if batch.acks == acks:
                return batch, None
            # Messages with other acks go first, because order holds over both.
            ready = self._close_batch(batch)
        now = self._clock.monotonic()
        batch = OpenBatch(where, acks, now, now + self._linger_s, self)
        self._open[where] = batch
        if self._linger_s:
            self._due.append(batch)
            if self._linger_wakes > batch.due:
                self._wake_linger()
        return batch, ready

    def _close_batch(self, batch: OpenBatch) -> ShardSender | None:
        """Encode a batch and queue it at its shard's sender, which the caller must pump.

        Needs the lock, so that batches keep their order.
        """
        if batch.closed:
            return None
        batch.close(self._clock.monotonic())
        batch.future.owner = self
        topic, queue_id = batch.where
        del self._open[batch.where]
        if self._sticky.get(topic) == queue_id:
            self._sticky[topic] = (queue_id + 1) % self.sender.topic(topic).queues
        try:
            return self.sender.enqueue(
                topic, queue_id, batch.encode(), acks=batch.acks, future=batch.future
            )
        except RayMQError as error:
            self.sender.complete(batch.future, error)
            return None

    def flush_now(self, batch: OpenBatch) -> None:
        """Close and write a batch on the calling thread, which blocks on its receipt."""
        with self._changed:
            sender = self._close_batch(batch)
        if sender is not None:
            sender.pump()

    def request_flush(self, batch: OpenBatch) -> None:
        """Have the linger thread close and write a batch, for a caller that must not block."""
        with self._changed:
            self._request_flush(batch)

    def request_flush_open(self) -> None:
        """Have the linger thread close and write all open batches."""
        with self._changed:
            for batch in list(self._open.values()):
                self._request_flush(batch)

    def _request_flush(self, batch: OpenBatch) -> None:
        if not batch.closed and batch.due:
            batch.due = 0.0
            self._due.appendleft(batch)
            self._wake_linger()

    def flush_open(self, *, keep_stalled: bool = False) -> None:
        """Close and write all open batches.

        Args: with `keep_stalled`, batches that cannot be written yet are left to the linger thread.
        """
        senders: set[ShardSender | None] = set()
        now = self._clock.monotonic()
        with self._changed:
            for batch in list(self._open.values()):
                if not keep_stalled or not self.sender.stalled(*batch.where):
                    senders.add(self._close_batch(batch))
                elif batch.due > now + STALLED_S:
                    batch.due = now
                    self._due.appendleft(batch)
                    self._wake_linger()
        _pump(senders)

    # --- the linger thread ----------------------------------------------------------------------

    def _wake_linger(self) -> None:
        """Needs the lock."""
        self._linger_state.batcher = self
        if self._linger_thread is None:
            self._linger_thread = threading.Thread(
                target=_linger,
                args=(self._linger_state, self._changed),
                name="raymq-linger",
                daemon=True,
            )
            self._linger_thread.start()
        else:
            self._changed.notify_all()

    def _keep_open(self, batch: OpenBatch, now: float) -> bool:
        """Whether a batch whose linger time is over should stay open and collect more messages.

        A batch that cannot be written yet would only wait in the shard's queue. Kept open, it goes out as one larger
        batch. It is closed all the same once a caller waits for its receipt, or after `delivery_timeout_ms`. That
        timeout starts when a batch is closed, so an open batch would never expire.
        """
        expired = now - batch.begun >= self.config.delivery_timeout_ms / 1000
        if batch.closed or not batch.due or expired:
            return False
        return self.sender.stalled(*batch.where)

    def _close_due(self, was_busy: bool) -> tuple[set[ShardSender], float | None]:
        """Close the batches whose linger time is over. Needs the lock.

        Returns: the senders to pump. Without any, the seconds to wait; None: until a message comes. A thread that
        `was_busy` waits for the linger time instead, so that the next messages need not wake it.
        """
        senders = self._to_pump.copy()
        self._to_pump.clear()
        now = self._clock.monotonic()
        kept: list[OpenBatch] = []
        while self._due and (self._due[0].closed or self._due[0].due <= now):
            was_busy = True
            batch = self._due.popleft()
            if self._keep_open(batch, now):
                batch.due = now + STALLED_S
                kept.append(batch)
            elif (sender := self._close_batch(batch)) is not None:
                senders.add(sender)
        self._due.extendleft(reversed(kept))
        wait_s = self._linger_s if was_busy else None
        if self._due:
            wait_s = self._due[0].due - now
        if senders:
            self._linger_wakes = 0.0
        else:
            self._linger_wakes = math.inf if wait_s is None else now + wait_s
        return senders, wait_s

    # --- end ------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int | float]:
        """See `Producer.statistics`."""
        with self._changed:
            return {**self.sender.statistics(), "open_batches": len(self._open)}

    def flush(self, timeout: float | None = None) -> None:
        """Like `Producer.flush`, but failures are not raised. Raises: TimeoutError."""
        self.sender.check_process()
        self.flush_open()
        self.sender.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Like `Producer.close`, but failures are not raised."""
        with self._changed:
            if self.closed:
                return
        try:
            with contextlib.suppress(TimeoutError):
                self.flush(timeout)
        finally:
            with self._changed:
                self._end()
                # Messages sent after the flush fail when the sender is closed.
                for batch in list(self._open.values()):
                    self._close_batch(batch)
            self.sender.close()

    def _end(self) -> None:
        """Take no more messages, and end the linger thread. Needs the lock."""
        self.closed = self._linger_state.ended = True
        self._changed.notify_all()

    def __del__(self) -> None:
        # Only an idle batcher is collected: batches without an outcome refer to it.
        if self.__dict__.get("closed", True) or not self.sender.in_own_process:
            return
        in_use = self.sender.in_use
        if not sys.is_finalizing():
            with self._changed:
                self._end()
            if in_use:
                # Closing waits for threads, and the garbage collector runs on any thread.
                threading.Thread(target=self.sender.close, daemon=True).start()
        if in_use:
            advice = "use it in a with block, or call close(), which raises what was not stored"
            warn_unclosed(self, self._owner, advice)


@dataclass
class _LingerState:
    """The batcher of the linger thread. The thread does not keep an idle batcher alive."""

    #: None while nothing is open
    batcher: MessageBatcher | None = None
    ended: bool = False


def _linger(state: _LingerState, changed: threading.Condition) -> None:
    """Send the batches whose linger time is over."""
    was_busy = False
    while True:
        with changed:
            batcher = state.batcher
            if state.ended:
                state.batcher = None
                return
            if batcher is None:
                changed.wait()
                continue
            senders, wait_s = batcher._close_due(was_busy)
            was_busy = bool(senders)
            if not senders:
                if wait_s is None:
                    # Perhaps the last reference: then `__del__` runs here.
                    state.batcher = batcher = None
                else:
                    changed.wait(wait_s)
                continue
        _pump(senders)


def _pump(senders: Iterable[ShardSender | None]) -> None:
    for sender in senders:
        if sender is not None:
            sender.pump()
