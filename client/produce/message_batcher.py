"""Batches messages per queue, and sends each batch as soon as Nagle's rule allows.

A message is sent at once when nothing is under way to its shard. Later messages are gathered in a batch until the shard
has answered all batches that were under way when it began (Nagle's rule). A batch that is full or has lingered long
enough is sent earlier.

`Producer`, `AsyncProducer` and `Queue` are built on `MessageBatcher`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from typing_extensions import Unpack

from raymq.client import forks
from raymq.client.arguments import wait_s
from raymq.client.client_thread import ClientThread
from raymq.client.handle import ClusterHandle
from raymq.client.messages.columns import put_batch
from raymq.client.messages.partitioner import queue_of, queues_of
from raymq.client.messages.queue_split import pieces
from raymq.client.transport.routes import Routes
from raymq.client.transport.topic_routes import TopicRoute
from raymq.client.unclosed import flush_at_exit, warn_unclosed
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, DeliveryUnknown, RayMQError, Rejected
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import Acks

from .batch_sender import BatchSender, checked_put, waiting_queue
from .callbacks import Callbacks
from .linger import LingerQueue
from .message_encoder import MESSAGE_BYTES, EncodedMessage, MessageEncoder, waiting_properties
from .open_batch import OpenBatch
from .producer_config import MIB, ProducerOptions, closed_error
from .send_future import BatchFuture, SendFuture
from .shard_sender import ShardSender

#: rows of `send_batch` are sent in batches of about this size
COLUMNS_BYTES = 4 * MIB


#: the route of a message's topic, and the message's queue; None: any queue
Target: TypeAlias = tuple[TopicRoute, int | None]


class MessageBatcher:
    """The open batches of a producer and its linger thread. Threads: any."""

    def __init__(
        self,
        cluster: ClusterHandle,
        *,
        owner: str = "Producer",
        future_type: type[SendFuture] = SendFuture,
        clock: Clock | None = None,
        flushes_at_exit: bool = True,
        **options: Unpack[ProducerOptions],
    ) -> None:
        """Args: `owner`: the class that a warning about an unclosed producer names.

        `flushes_at_exit`: whether the end of the program waits for receipts; False: the owner sees to that.
        """
        # pyarrow looks for pandas when it makes its first value. At the end of a program, when lingering messages are
        # sent, pandas cannot be imported any more.
        pa.scalar(None)
        self.owner = owner
        self._future_type = future_type
        self._clock = clock or Clock()
        batcher = weakref.ref(self)

        def on_answered(shard_sender: ShardSender) -> None:
            # The shard sender's thread must not keep an idle batcher alive.
            if (alive := batcher()) is not None:
                alive._send_answered(shard_sender)

        routes = Routes.of(cluster)
        self.batch_sender = BatchSender(
            routes, on_answered=on_answered, clock=self._clock, **options
        )
        self._cached_topic = routes.topics.cached
        self._forks = forks.count
        self.config = self.batch_sender.config
        self._batch_bytes = self.config.batch_bytes
        self.encoder = MessageEncoder(self.config, self._clock, delay_levels=cluster.delay_levels)
        self.limiter = self.batch_sender.limiter
        self._linger_s = self.config.linger_ms / 1000
        #: how long a batch stays open at most: without a linger time until its messages would have failed
        self._open_s = self._linger_s or self.config.delivery_timeout_ms / 1000
        #: guards everything below; used directly, because a condition's `with` costs two more calls
        self._lock = threading.RLock()
        self._open: dict[tuple[str, int], OpenBatch] = {}
        #: topic -> queue of messages without a key; moves on with every batch
        self._sticky: dict[str, int] = {}
        #: topic -> queue of the next message without a key that is delivered later
        self._next_delayed: dict[str, int] = {}
        self._linger = LingerQueue(
            threading.Condition(self._lock),
            self._clock,
            linger_s=self._linger_s,
            delivery_timeout_s=self.config.delivery_timeout_ms / 1000,
        )
        self.closed = False
        if flushes_at_exit:
            flush_at_exit(self)

    # --- messages ---------------------------------------------------------------------------------

    def send(self, message: EncodedMessage) -> SendFuture:
        """Send a message. Raises: as `Producer.send`."""
        if not self.limiter.acquire_nowait(message.size):
            self.acquire(message.size)
        future, to_write = self.add(message)
        if to_write is not None:
            to_write.write_ready()
        return future

    def send_many(self, messages: Sequence[EncodedMessage]) -> list[SendFuture]:
        """Send messages together. Raises: as `Producer.send_many`."""
        # Before any is sent: an unknown topic or queue refuses all.
        targets = self.targets(messages)
        futures: list[SendFuture] = []
        for part in self.parts_of(messages):
            try:
                self.acquire(sum(message.size for message in messages[part]))
                added, to_write = self.add_many(messages[part], targets[part])
            except RayMQError as error:
                if not futures:
                    raise
                # The caller needs the futures of those that are sent. None is sent after one that failed.
                return futures + [self._failed(error) for _ in messages[part.start :]]
            futures += added
            _write_ready(to_write)
        return futures

    def parts_of(self, messages: Sequence[EncodedMessage]) -> Iterator[slice]:
        """Cut messages into parts of about `batch_bytes`, so that no part needs more of the buffer at once."""
        start = size = 0
        for stop, message in enumerate(messages, 1):
            size += message.size
            if size >= self.config.batch_bytes or stop == len(messages):
                yield slice(start, stop)
                start, size = stop, 0

    def acquire(self, size: int) -> None:
        """Wait until `size` bytes fit into the buffer. Raises: Unavailable after `max_block_ms`."""
        if not self.limiter.acquire_nowait(size):
            # Open batches have to be sent, or no bytes would ever be answered.
            self.flush_open(keep_stalled=True)
            self.limiter.acquire(size)

    def add(
        self, message: EncodedMessage, *, may_block: bool = True
    ) -> tuple[SendFuture, ShardSender | None]:
        """Add a message, whose bytes are acquired, to its batch.

        Args: `may_block`: False leaves the writing to the linger thread.
        Returns: the message's future; the shard sender that must write now.
        Raises: as `Producer.send`; the bytes are released.
        """
        try:
            route, queue_id = self._target(message)
            now_ms = self._clock.now_ms()

            with self._lock:
                batch, to_write = self._append(message, route, queue_id, now_ms)
                future = self._future_type(batch.future, len(batch.bodies) - 1)
                # `may_be_sent`, without a call for each message
                sender = batch.shard_sender
                if (
                    sender is None
                    or sender.answered_up_to >= batch.send_after_number
                    or batch.size >= self._batch_bytes
                ):
                    to_write = self._close_or_request(batch, may_block) or to_write
                if to_write is not None and not may_block:
                    self._linger.write([to_write])

            return future, to_write
        except BaseException:
            self.limiter.release(message.size)
            raise

    def targets(self, messages: Sequence[EncodedMessage]) -> list[Target]:
        """Where each message goes. Raises: Rejected, Unavailable: as `Producer.send_many`."""
        return [self._target(message) for message in messages]

    def add_many(
        self,
        messages: Sequence[EncodedMessage],
        targets: Sequence[Target],
        *,
        may_block: bool = True,
    ) -> tuple[list[SendFuture], set[ShardSender | None]]:
        """`add` of messages that are sent together: their batches are closed after the last of them, or when full."""
        now_ms, batch_bytes = self._clock.now_ms(), self._batch_bytes
        futures: list[SendFuture] = []
        to_write: set[ShardSender | None] = set()
        batches: dict[OpenBatch, None] = {}
        # Bytes of messages that are in no batch.
        left = sum(message.size for message in messages)

        try:
            with self._lock:
                for message, (route, queue_id) in zip(messages, targets, strict=True):
                    batch, closed_before = self._append(message, route, queue_id, now_ms)
                    left -= message.size
                    futures.append(self._future_type(batch.future, len(batch.bodies) - 1))
                    batches[batch] = None
                    to_write.add(closed_before)
                    if batch.size >= batch_bytes:
                        to_write.add(self._close_or_request(batch, may_block))

                for batch in batches:
                    if batch.may_be_sent:
                        to_write.add(self._close_or_request(batch, may_block))
                to_write.discard(None)
                if to_write and not may_block:
                    self._linger.write(filter(None, to_write))
        except BaseException:
            self.limiter.release(left)
            raise

        return futures, to_write

    def _target(self, message: EncodedMessage) -> Target:
        """Where a message goes. The first look-up of a topic blocks.

        Raises: Rejected for an unknown topic or queue, and in a forked child; Unavailable.
        """
        # Most of `check_process` and `BatchSender.topic`, without these calls for each message.
        if forks.count != self._forks:
            self.batch_sender.check_process()
        queue_id = message.queue_id
        route = self._cached_topic(message.topic) or self.batch_sender.topic(message.topic)
        if message.is_null or route.values.schema is not None:
            route.values.check_body(message.body, is_null=message.is_null)
        if queue_id is not None:
            route.shard_of(queue_id)
        elif message.key is not None:
            queue_id = queue_of(message.key, route.queues)
        if message.later is not None:
            # Properties that are too long with the longest queue id are refused here, before any message is added.
            waiting_properties(message, route.queues - 1, message.later)
        return route, queue_id

    def _append(
        self, message: EncodedMessage, route: TopicRoute, queue_id: int | None, now_ms: int
    ) -> tuple[OpenBatch, ShardSender | None]:
        """Append a message to the batch of its queue. Needs the lock. Returns: as `_batch_for`.

        Raises: Rejected after `close`.
        """
        if self.closed:
            raise closed_error()
        topic, properties = message.topic, message.properties
        if queue_id is None and message.later is not None:
            # These wait in the batches of another topic, so that no end of a batch moves on to the next queue.
            queue_id = self._next_delayed.get(topic, random.randrange(route.queues))
            self._next_delayed[topic] = (queue_id + 1) % route.queues
        elif queue_id is None:
            # `_sticky_queue` and `_batch_for`, without a call for each message
            queue_id = self._sticky.get(topic)
            if queue_id is None:
                queue_id = self._sticky_queue(topic, route.queues)
        queue_key = (topic, queue_id)
        if message.later is not None:
            # The queue's shard keeps it until then: one sequence per shard, since its timers are one queue, and so is
            # each of its delay levels.
            queue_key = waiting_queue(route.shard_of(queue_id), message.delay_level)
            properties = waiting_properties(message, queue_id, message.later)

        batch, to_write = self._open.get(queue_key), None
        if batch is None or batch.acks != message.acks:
            batch, to_write = self._batch_for(queue_key, message.acks)
        batch.bodies.append(message.body)
        batch.tags.append(message.tag)
        batch.properties.append(properties)
        if message.head is not None:
            batch.heads[len(batch.born)] = message.head
        batch.born.append(now_ms)
        batch.size += message.size
        return batch, to_write

    def _failed(self, error: RayMQError) -> SendFuture:
        """The future of a message that was not sent."""
        return self._future_type(self._failed_batch(error, 1), 0)

    def _failed_batch(self, error: RayMQError, rows: int) -> BatchFuture:
        """The future of a batch that was not sent and holds no bytes of the limit."""
        future = BatchFuture(rows, 0, self._clock.monotonic())
        self.batch_sender.complete(future, error)
        return future

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

        Args: `body_bytes`: of all messages. `properties`: encoded, of each. They have no futures:
        `batch_sender.raise_failure` raises their failures. Raises: as `Producer.send`.
        """
        self.batch_sender.check_process()
        self.batch_sender.topic(topic).shard_of(queue_id)

        rows = len(bodies)
        size = body_bytes + rows * (MESSAGE_BYTES + (0 if properties is None else len(properties)))
        self.acquire(size)
        now_ms = self._clock.now_ms()
        with self.limiter.released_on_error(size), self._lock:
            self._check_open()
            batch, to_write = self._batch_for((topic, queue_id), self.config.acks)
            batch.bodies += bodies
            batch.tags += [None] * rows
            batch.properties += [properties] * rows
            batch.born += [now_ms] * rows
            batch.size += size
            if batch.size >= self.config.batch_bytes or batch.may_be_sent:
                to_write = self.close_batch(batch) or to_write

        if to_write is not None:
            to_write.write_ready()

    def _check_open(self) -> None:
        if self.closed:
            raise closed_error()

    def _sticky_queue(self, topic: str, queues: int) -> int:
        chosen = self._sticky.get(topic)
        if chosen is None:
            chosen = self._sticky[topic] = random.randrange(queues)
        return chosen

    # --- columns and resends ----------------------------------------------------------------------

    def add_columns(
        self, topic: str, data: pa.RecordBatch | pa.Table, queue_id: int | None
    ) -> list[BatchFuture]:
        """See `Producer.send_batch`."""
        self.batch_sender.check_process()
        route = self.batch_sender.topic(topic)
        batch, keys = put_batch(data, now_ms=self._clock.now_ms(), values=route.values)
        if not batch.num_rows:
            return []

        self.flush_open()
        if queue_id is not None or keys is None:
            with self._lock:
                if queue_id is None:
                    queue_id = self._sticky_queue(topic, route.queues)
                    self._sticky[topic] = (queue_id + 1) % route.queues
            parts = [(queue_id, part) for part in pieces(batch, COLUMNS_BYTES)]
        else:
            chosen = queues_of(keys, route.queues)
            parts = [
                (number, part)
                for number in np.unique(chosen).tolist()
                for part in pieces(
                    batch.take(pa.array(np.flatnonzero(chosen == number))), COLUMNS_BYTES
                )
            ]
        if len(parts) > 1:
            # Before any part is sent: a row that cannot be stored refuses all, and is named by its number here.
            checked_put(topic, batch)
        return self._send_parts(topic, parts)

    def _send_parts(self, topic: str, parts: list[tuple[int, pa.RecordBatch]]) -> list[BatchFuture]:
        """Send parts of columns, each with its queue. Raises: as `Producer.send_batch`; then none of them is sent."""
        futures: list[BatchFuture] = []
        for queue_id, part in parts:
            try:
                futures.append(self._send_part(topic, queue_id, part))
            except RayMQError as error:
                if not futures:
                    raise
                # The caller needs the futures of those that are sent. None is sent after one that failed.
                for _, left in parts[len(futures) :]:
                    futures.append(self._failed_batch(error, left.num_rows))
                break
        return futures

    def _send_part(self, topic: str, queue_id: int, part: pa.RecordBatch) -> BatchFuture:
        future = self._closed_future(part.num_rows, part.nbytes)
        with self.limiter.released_on_error(future.size), self._lock:
            self._check_open()
            shard_sender = self.batch_sender.enqueue(topic, queue_id, part, future=future)
        shard_sender.write_ready()
        return future

    def resend(self, sent: BatchFuture, row: int | None = None) -> BatchFuture:
        """See `Producer.resend`. Returns: the receipt of the batch that is sent again.

        Args: `row`: of the message, if it was sent alone.
        """
        if row in (sent.refused or ()):
            raise Rejected(
                "the shard refused this message, and nothing of it is stored: send it, once it is right",
                field="sent",
                limit="DeliveryUnknown",
            )
        with self._lock:
            while (resent := sent.resent) is not None:
                sent = resent
                if not sent.done() or sent.exception() is None:
                    return sent

        lost = sent.unknown_batch
        if lost is None:
            raise Rejected(
                "only a message whose future raised DeliveryUnknown can be sent again with its sequence",
                field="sent",
                limit="DeliveryUnknown",
            )

        future = self._closed_future(lost.batch.num_rows, lost.size)
        future.refused = sent.refused
        with self.limiter.released_on_error(future.size), self._lock:
            self._check_open()
            shard_sender = self.batch_sender.enqueue_again(lost, future)
            sent.resent = future
        shard_sender.write_ready()
        return future

    def _closed_future(self, rows: int, size: int) -> BatchFuture:
        """The receipt of a batch that takes no more messages; its bytes are acquired."""
        future = BatchFuture(rows, size, self._clock.monotonic())
        future.owner = self
        self.acquire(size)
        return future

    # --- open batches -----------------------------------------------------------------------------

    def _batch_for(
        self, queue_key: tuple[str, int], acks: Acks
    ) -> tuple[OpenBatch, ShardSender | None]:
        """The open batch of a queue. Needs the lock.

        Returns: the batch; the shard sender that must write now, if another batch was closed for it.
        """
        batch, to_write = self._open.get(queue_key), None
        if batch is not None:
            if batch.acks == acks:
                return batch, None
            # Messages with other acks go first, because order holds over both.
            to_write = self.close_batch(batch)

        now_s = self._clock.monotonic()
        shard_sender = self.batch_sender.shard_sender_of(*queue_key)
        send_after_number = 0 if shard_sender is None else shard_sender.last_number
        batch = OpenBatch(
            queue_key=queue_key,
            acks=acks,
            begun_s=now_s,
            due_s=now_s + self._open_s,
            batcher=self,
            shard_sender=shard_sender,
            send_after_number=send_after_number,
        )
        self._open[queue_key] = batch
        self._linger.add(batch)
        return batch, to_write

    def close_batch(self, batch: OpenBatch) -> ShardSender | None:
        """Encode a batch and queue it at its shard sender, which must write now.

        Needs the lock, so that batches keep their order.
        """
        if batch.closed:
            return None

        batch.close(self._clock.monotonic())
        batch.future.owner = self
        topic, queue_id = batch.queue_key
        del self._open[batch.queue_key]
        if self._sticky.get(topic) == queue_id:
            self._sticky[topic] = (queue_id + 1) % self.batch_sender.topic(topic).queues

        try:
            return self.batch_sender.enqueue(
                topic,
                queue_id,
                batch.encode(),
                acks=batch.acks,
                future=batch.future,
                is_separable=True,
            )
        except Exception as error:
            # The batch is not open any more, so no later call would answer its messages.
            fault = error if isinstance(error, RayMQError) else Bug(f"a batch: {error!r}")
            self.batch_sender.complete(batch.future, fault)
            return None
        except BaseException as error:
            # Ctrl-C: the shard sender may have the batch.
            why = (
                f"{type(error).__name__} came while the batch was sent; it may or may not be stored"
            )
            unknown = DeliveryUnknown(why, status=PutStatus.UNKNOWN_ERROR.value)
            self.batch_sender.complete(batch.future, unknown)
            raise

    def _close_or_request(self, batch: OpenBatch, may_block: bool) -> ShardSender | None:
        """Close a batch, or have the linger thread close it. Needs the lock. Returns: as `close_batch`.

        A full batch is closed here in any case: until that thread runs, it would take more messages.
        """
        if may_block or batch.size >= self.config.batch_bytes:
            return self.close_batch(batch)
        self._linger.request(batch)
        return None

    @property
    def callbacks(self) -> Callbacks:
        """The done callbacks of this producer."""
        return self.batch_sender.callbacks

    def write_for_caller(self, batch: OpenBatch) -> None:
        """Write a batch on the calling thread, which blocks on its receipt, unless the batch must wait for others."""
        with self._lock:
            shard_sender = self.close_batch(batch) if batch.may_be_sent else None
        if shard_sender is not None:
            shard_sender.write_ready()

    def request_write_for_caller(self, batch: OpenBatch) -> None:
        """Have the linger thread do the same, for a caller that must not block."""
        with self._lock:
            if batch.may_be_sent:
                self._linger.request(batch)

    def _send_answered(self, shard_sender: ShardSender) -> None:
        """Write the batches that were gathered while others were under way. Callers: the thread that reads acks."""
        if not self._open:
            return
        with self._lock:
            for batch in list(self._open.values()):
                if batch.shard_sender is shard_sender and batch.may_be_sent:
                    batch.future.gathered = True
                    self.close_batch(batch)
        shard_sender.write_ready()

    def request_flush_open(self) -> None:
        """Have the linger thread close and write all open batches."""
        with self._lock:
            for batch in list(self._open.values()):
                self._linger.request(batch)

    def flush_open(self, *, keep_stalled: bool = False) -> None:
        """Close and write all open batches.

        Args: `keep_stalled`: batches that cannot be written yet are left to the linger thread.
        """
        shard_senders: set[ShardSender | None] = set()
        now_s = self._clock.monotonic()
        with self._lock:
            for batch in list(self._open.values()):
                if not keep_stalled or not batch.is_stalled:
                    shard_senders.add(self.close_batch(batch))
                else:
                    self._linger.check_soon(batch, now_s)
        _write_ready(shard_senders)

    # --- end --------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int | float]:
        """See `Producer.statistics`."""
        with self._lock:
            return {**self.batch_sender.statistics(), "open_batches": len(self._open)}

    def flush(self, timeout: float | None = None) -> None:
        """Like `Producer.flush`, but failures are not raised. Raises: TimeoutError."""
        self.batch_sender.check_process()
        self.flush_open()
        self.batch_sender.flush(timeout)

    def count_unreceipted(self) -> int:
        """Messages without a receipt whose failure no caller has seen; 0 after `close`, and in a forked child."""
        if self.closed or not self.batch_sender.in_own_process:
            return 0
        with self._lock:
            still_open = sum(len(batch.bodies) for batch in self._open.values())
        return still_open + self.batch_sender.count_unreceipted()

    def close(self, timeout: float | None = None) -> None:
        """Like `Producer.close`, but failures are not raised."""
        timeout = wait_s(timeout)
        if not self.batch_sender.in_own_process:
            return
        with self._lock:
            if self.closed:
                return
        try:
            # A done callback would wait for its own thread. What is under way fails then, as with Kafka.
            if not self.batch_sender.callbacks.are_running:
                with contextlib.suppress(TimeoutError):
                    self.flush(timeout)
        finally:
            with self._lock:
                self._stop_taking()
                # Messages sent after the flush fail when the batch sender is closed.
                for batch in list(self._open.values()):
                    self.close_batch(batch)
            self.batch_sender.close()

    def _stop_taking(self) -> None:
        """Take no more messages, and end the linger thread. Needs the lock."""
        self.closed = True
        self._linger.end()

    def __del__(self) -> None:
        # Only an idle batcher is collected: batches without an outcome refer to it.
        if self.__dict__.get("closed", True) or not self.batch_sender.in_own_process:
            return
        in_use = self.batch_sender.in_use
        if not sys.is_finalizing():
            with self._lock:
                self._stop_taking()
            if in_use:
                # Closing waits for threads, and the garbage collector runs on any thread. None starts once the program
                # ends (from Python 3.12 on), or at the limit of threads. Then the program's end closes.
                with contextlib.suppress(RuntimeError):
                    ClientThread(self.batch_sender.close, "raymq-producer-close").start()
        if in_use:
            advice = "use it in a with block, or call close(), which raises what was not stored"
            warn_unclosed(self, self.owner, advice)


def _write_ready(shard_senders: Iterable[ShardSender | None]) -> None:
    for shard_sender in shard_senders:
        if shard_sender is not None:
            shard_sender.write_ready()
