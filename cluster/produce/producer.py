"""The producer of messages: collects them a queue, sends batches (design D10, D11)."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np
import pyarrow as pa

from raymq.cluster.messages.codecs import CONTENT_TYPE, codec
from raymq.cluster.messages.columns import put_batch
from raymq.cluster.messages.message import Message, property_bytes
from raymq.cluster.messages.partitioner import queue_of, queues_of
from raymq.cluster.messages.timer_message import REAL_BYTES, timer_properties, waiting_properties
from raymq.cluster.transport.routes import Routes
from raymq.cluster.unclosed import warn_unclosed
from raymq.store.clock import Clock
from raymq.store.errors import RayMQError, Rejected
from raymq.store.format import TIMER_TOPIC
from raymq.store.promise import Acks
from raymq.store.record import BATCH_BYTES_MAX, PUT_SCHEMA, Row
from raymq.store.records.binary_columns import binary_array

from .batch_sender import MIB, BatchSender, check_acks, still_under_way
from .byte_limiter import ByteLimiter
from .producer_config import ProducerConfig
from .queue_sequence import BatchReceipt, closed_error
from .send_future import Failure, Pending, PendingFuture, SendFuture
from .send_statistics import SendStatistics
from .shard_sender import BatchFuture, ShardSender

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: what a message takes beside body and properties: counted so that empty bodies fill buffers too
MESSAGE_BYTES = 128
#: a batch that would stand in line behind others waits so long for company, again and again
STALLED_S = 0.005
#: rows of `send_batch` go in batches of about this size
COLUMNS_BYTES = 4 * MIB
#: how long the end of a with block waits for receipts when the block has failed
FAILED_EXIT_S = 2.0


class EncodedMessage(NamedTuple):
    """One message, checked and encoded, before it has a place in a batch."""

    topic: str
    queue_id: int | None
    key: bytes | None
    body: bytes
    tag: str | None
    properties: bytes | None
    #: what it takes of the buffer
    size: int
    acks: Acks
    #: of one that is to be delivered later: what says when
    later: bytes | None = None


class Producer:
    """Sends messages. Threads may share it; order holds per queue, in the order of the calls.

    It neither pickles nor survives a fork: pickle the Cluster instead. As a context manager it flushes at
    the end and raises the first failure that no caller has seen. After an exception in the block it waits
    at most FAILED_EXIT_S for receipts; what is not answered then may or may not be stored.

    A batch without a receipt is sent again with the same sequence numbers, so that it is stored once, until
    `delivery_timeout_ms` is over. Then its futures raise DeliveryUnknown if it may be stored, else Unavailable.
    The `status` of DeliveryUnknown is the shard's last one (FLUSH_SLAVE_TIMEOUT: the follower is away), or
    UNKNOWN_ERROR when the shard gave none. `resend` goes on from there. StorageFull comes within seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig | None = None,
        *,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        """Args: `options` are the fields of ProducerConfig."""
        self.config = replace(config or ProducerConfig(), **options)
        self._clock = clock or Clock()
        self._codec = codec(self.config.codec)
        self._sender = BatchSender(
            Routes.of(cluster),
            acks=self.config.acks,
            in_flight_bytes=self.config.in_flight_bytes,
            max_block_ms=self.config.max_block_ms,
            delivery_timeout_ms=self.config.delivery_timeout_ms,
            request_timeout_ms=self.config.request_timeout_ms,
            clock=self._clock,
        )
        #: what `collect` returns
        self.future_type = SendFuture
        #: what a program calls it
        self.name = type(self).__name__
        self._room = ByteLimiter(self.config.buffer_bytes, self.config.max_block_ms)
        self._linger_s = self.config.linger_ms / 1000
        #: guards everything below
        self._changed = threading.Condition()
        self._open: dict[tuple[str, int], Pending] = {}
        self._statistics = SendStatistics()
        #: open batches and some that are sealed already, by the end of their linger time
        self._due: deque[Pending] = deque()
        #: topic -> queue of messages without a key; moves on with every batch
        self._sticky: dict[str, int] = {}
        #: sealed and not answered
        self._under_way: set[Pending] = set()
        self._failed: deque[Failure] = deque(maxlen=1000)
        #: what the linger thread must write to, beside what is due
        self._to_pump: set[ShardSender] = set()
        self._closed = False
        self._linger_state = _LingerState()
        self._linger_thread: threading.Thread | None = None
        #: when it wakes by itself, on the monotonic clock; 0: it is awake
        self._linger_wakes = math.inf

    def __reduce__(self) -> NoReturn:
        raise Rejected(
            "a producer has open connections and does not pickle: pickle the Cluster and call "
            "cluster.producer() where it is used",
            field="pickle",
        )

    # --- sending --------------------------------------------------------------------------------

    def send(
        self,
        topic: str | Message,
        body: Any = None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        deliver_at_ms: int | None = None,
        queue_id: int | None = None,
        acks: Acks | None = None,
    ) -> SendFuture:
        """Send one message: a Message, or a topic and what the codec makes a body of.

        The queue is `queue_id`, else that of the key; without either, messages fill a batch of one
        queue, then of the next. `acks` of this message, by default the producer's; a batch has one
        kind, so changing it with every message costs the batches.
        `deliver_at_ms`, ms since 1970, at most three days ahead: readers of the queue get the message in
        the second after it, at a new offset, once; the receipt tells that it is kept until then, and
        names the topic and offset where. Several of one queue come in the order of their times.
        Returns: at once, with a future of the receipt; the first send to a topic looks it up.
        Raises: Rejected for what cannot be stored, or when the producer is closed; Unavailable when, for
        `max_block_ms`, the buffer stays full or no shard answers the look-up.
        """
        out = self.encode(
            topic,
            body,
            key=key,
            tag=tag,
            index_keys=index_keys,
            properties=properties,
            deliver_at_ms=deliver_at_ms,
            queue_id=queue_id,
            acks=acks,
        )
        self._take_room(out.size)
        future, ready = self.collect(out)
        if ready is not None:
            ready.pump()
        return future

    def encode(
        self,
        topic: str | Message,
        body: Any = None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        deliver_at_ms: int | None = None,
        queue_id: int | None = None,
        acks: Acks | None = None,
    ) -> EncodedMessage:
        """The first half of `send`, which never blocks. Raises: Rejected for what cannot be stored."""
        if isinstance(topic, Message):
            message = topic
            topic, body, key, tag = message.topic, message.body, message.key, message.tag
            index_keys, properties = message.index_keys, message.properties
            deliver_at_ms = message.deliver_at_ms
        elif self._codec.name != "bytes":
            body = self._codec.encode(body)
            properties = {**(properties or {}), CONTENT_TYPE: self._codec.name}
        if not isinstance(body, bytes):
            body = codec("bytes").encode(body)
        if len(body) > self.config.max_message_bytes:
            raise self._too_large(len(body))
        if acks is not None:
            check_acks(acks)
        encoded = property_bytes(key, tag, index_keys, properties)
        later = None
        if deliver_at_ms is not None:
            later = timer_properties(deliver_at_ms, self._clock.now_ms())
        size = len(body) + MESSAGE_BYTES + (0 if encoded is None else len(encoded))
        size += 0 if later is None else len(later) + len(topic) + REAL_BYTES
        acks = acks or self.config.acks
        return EncodedMessage(topic, queue_id, key, body, tag, encoded, size, acks, later)

    def check_bodies(self, bodies: list[bytes]) -> int:
        """Returns: bytes of all of them. Raises: Rejected when one is too large."""
        sizes = list(map(len, bodies))
        largest = max(sizes)
        if largest > self.config.max_message_bytes:
            raise self._too_large(largest)
        return sum(sizes)

    def _too_large(self, size: int) -> Rejected:
        return Rejected(
            f"the body has {size} bytes, the limit is {self.config.max_message_bytes}: "
            "split it, compress it, or raise max_message_bytes here and in the cluster",
            field="body",
            limit=self.config.max_message_bytes,
        )

    def collect(
        self, out: EncodedMessage, *, may_block: bool = True
    ) -> tuple[SendFuture, ShardSender | None]:
        """The second half of `send`: put a message, for which there is room, into its batch.

        Returns: its future; who must pump what is full now. Without `may_block` nobody must: the
        linger thread does it. Raises: as `send`; the room is given back.
        """
        try:
            return self._collect(out, may_block)
        except BaseException:
            self._room.give(out.size)
            raise

    def _collect(
        self, out: EncodedMessage, may_block: bool
    ) -> tuple[SendFuture, ShardSender | None]:
        self._sender.check_process()
        topic, queue_id = out.topic, out.queue_id
        route = self._sender.topic(topic)
        if queue_id is not None:
            route.shard_of(queue_id)
        elif out.key is not None:
            queue_id = queue_of(out.key, route.queues)
        now = self._clock.now_ms()
        with self._changed:
            self._check_open()
            if queue_id is None:
                queue_id = self._sticky_queue(topic, route.queues)
            where, properties = (topic, queue_id), out.properties
            if out.later is not None:
                # The queue's shard keeps it until then. One lane a shard: its timers are all in one queue.
                where = (TIMER_TOPIC, route.shard_of(queue_id))
                properties = waiting_properties(topic, queue_id, out.properties, out.later)
            pending, ready = self._open_batch(where, out.acks)
            pending.bodies.append(out.body)
            pending.tags.append(out.tag)
            pending.properties.append(properties)
            pending.born.append(now)
            pending.size += out.size
            future = self.future_type(pending, len(pending.bodies) - 1)
            if not self._linger_s or pending.size >= self.config.batch_bytes:
                if may_block:
                    ready = self._seal(pending) or ready
                else:
                    self._ship_soon(pending)
            if ready is not None and not may_block:
                self._to_pump.add(ready)
                self._wake_linger()
        return future, ready

    def send_together(
        self,
        topic: str,
        bodies: list[bytes],
        body_bytes: int,
        properties: bytes | None,
        *,
        queue_id: int,
    ) -> None:
        """Add bodies, together no larger than a batch, to the open batch of a queue: columns that linger.

        Args: `body_bytes` of all of them; `properties`, encoded, of each. Nobody gets their receipts: `flush` and
        `raise_failure` tell failures. Raises: as `send`.
        """
        self._sender.check_process()
        self._sender.topic(topic).shard_of(queue_id)
        rows = len(bodies)
        each = MESSAGE_BYTES + (0 if properties is None else len(properties))
        size = body_bytes + rows * each
        self._take_room(size)
        now = self._clock.now_ms()
        try:
            with self._changed:
                self._check_open()
                pending, ready = self._open_batch((topic, queue_id), self.config.acks)
                pending.bodies += bodies
                pending.tags += [None] * rows
                pending.properties += [properties] * rows
                pending.born += [now] * rows
                pending.size += size
                if not self._linger_s or pending.size >= self.config.batch_bytes:
                    ready = self._seal(pending) or ready
        except BaseException:
            self._room.give(size)
            raise
        if ready is not None:
            ready.pump()

    def _sticky_queue(self, topic: str, queues: int) -> int:
        chosen = self._sticky.get(topic)
        if chosen is None:
            chosen = self._sticky[topic] = random.randrange(queues)
        return chosen

    def _open_batch(self, where: tuple[str, int], acks: Acks) -> tuple[Pending, ShardSender | None]:
        """The batch that takes the queue's next message, and who must pump one that ends here. Needs the lock."""
        pending = self._open.get(where)
        if pending is None:
            return self._begin(where, acks), None
        if pending.acks == acks:
            return pending, None
        # The earlier ones first: order holds over both kinds.
        ready = self._seal(pending)
        return self._begin(where, acks), ready

    def _begin(self, where: tuple[str, int], acks: Acks) -> Pending:
        now = self._clock.monotonic()
        pending = Pending(where, acks, now, now + self._linger_s, self._hurry, self.hurry_soon)
        self._open[where] = pending
        if self._linger_s:
            self._due.append(pending)
            if self._linger_wakes > pending.due:
                self._wake_linger()
        return pending

    def _wake_linger(self) -> None:
        """Needs the lock."""
        self._linger_state.producer = self
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

    def _ship_soon(self, pending: Pending) -> None:
        """The linger thread sends it now. Needs the lock."""
        if not pending.sealed and pending.due:
            pending.due = 0.0
            self._due.appendleft(pending)
            self._wake_linger()

    def hurry_soon(self, pending: Pending) -> None:
        """Somebody who must not block waits for this batch."""
        with self._changed:
            self._ship_soon(pending)

    def ship_open_soon(self) -> None:
        """As `flush`, but only asks for it."""
        with self._changed:
            for pending in list(self._open.values()):
                self._ship_soon(pending)

    def look_up(self, topic: str) -> None:
        """Make the topic's route known, so that `collect` asks nobody. Raises: Rejected; Unavailable."""
        self._sender.topic(topic)

    def on_room(self, call: Callable[[], None]) -> None:
        """Call it, from any thread, whenever there is more room."""
        self._room.on_free = call

    def take_nowait(self, out: EncodedMessage) -> bool:
        """Take room for a message; False: there is none now."""
        return self._room.take_nowait(out.size)

    def _take_room(self, size: int) -> None:
        if self._room.take_nowait(size):
            return
        # What lingers must go, or nothing would ever make room.
        self._ship_open(but_stalled=True)
        self._room.take(size)

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error()

    # --- sending again --------------------------------------------------------------------------

    def resend(self, sent: SendFuture) -> SendFuture:
        """Send a message again whose future raised DeliveryUnknown, with the same sequence number.

        A shard that has stored it answers with its receipt (`duplicate`), else it is stored now, after what
        was sent meanwhile. The messages of one batch go together; a second call for one of them sends
        nothing. Messages of one queue are sent again in the order of their sends, because the shard
        refuses gaps. Any producer of the same cluster may do it, also when the first one is closed.
        Returns: a future of the receipt. It may raise DeliveryUnknown once more.
        Raises: Rejected for a message that is under way, stored, or certainly not stored: `send` that one.
        """
        return self.future_type(self._again(sent._pending.future), sent._row)

    def resend_batch(self, sent: Future[BatchReceipt]) -> Future[BatchReceipt]:
        """As `resend`, for a future of `send_batch`."""
        if not isinstance(sent, PendingFuture):
            raise Rejected(
                "this is not a future of send_batch", field="sent", limit="a future of send_batch"
            )
        return self._again(sent).future

    def _again(self, sent: PendingFuture) -> Pending:
        with self._changed:
            while (later := sent.again) is not None:
                sent = later.future
                if not sent.done() or sent.exception() is None:
                    return later
        lost = sent.unknown
        if lost is None:
            raise Rejected(
                "only a message whose future raised DeliveryUnknown can be sent again with its sequence",
                field="sent",
                limit="DeliveryUnknown",
            )
        self._take_room(lost.size)
        now = self._clock.monotonic()
        where = (lost.topic, lost.queue_id)
        acks = cast(Acks, lost.acks)
        pending = Pending(where, acks, now, 0.0, self._hurry, self.hurry_soon)
        pending.sealed, pending.size = True, lost.size
        pending.rows, pending.sealed_at = lost.batch.num_rows, now
        with self._changed:
            try:
                self._check_open()
                future, sender = self._sender.enqueue_again(lost)
            except BaseException:
                self._room.give(lost.size)
                raise
            self._under_way.add(pending)
            sent.again = pending
        pending.sent = future
        future.add_done_callback(partial(self._finish, pending))
        sender.pump()
        return pending

    # --- batches --------------------------------------------------------------------------------

    def _seal(self, pending: Pending) -> ShardSender | None:
        """Make the batch and queue it. Needs the lock, so that batches keep their order."""
        if pending.sealed:
            return None
        pending.sealed = True
        topic, queue_id = pending.where
        del self._open[pending.where]
        if self._sticky.get(topic) == queue_id:
            self._sticky[topic] = (queue_id + 1) % self._sender.topic(topic).queues
        pending.rows, pending.sealed_at = len(pending.bodies), self._clock.monotonic()
        self._under_way.add(pending)
        try:
            batch = _batch(pending)
            future, sender = self._sender.enqueue(topic, queue_id, batch, acks=pending.acks)
        except RayMQError as error:
            self._finish(pending, error)
            return None
        finally:
            pending.bodies, pending.tags, pending.properties, pending.born = [], [], [], []
        pending.sent = future
        future.add_done_callback(partial(self._finish, pending))
        return sender

    def _finish(self, pending: Pending, outcome: Future[BatchReceipt] | RayMQError) -> None:
        error = outcome if isinstance(outcome, RayMQError) else outcome.exception()
        self._statistics.note(pending, self._clock.monotonic(), failed=error is not None)
        if isinstance(outcome, BatchFuture):
            pending.future.unknown = outcome.unknown
        if error is not None:
            pending.future.failure = Failure(error)
            self._failed.append(pending.future.failure)
            pending.future.set_exception(error)
        elif isinstance(outcome, Future):
            pending.future.set_result(outcome.result())
        pending.sent = None
        self._under_way.discard(pending)
        self._room.give(pending.size)

    def _hurry(self, pending: Pending) -> None:
        """Somebody waits for this batch."""
        with self._changed:
            sender = self._seal(pending)
        if sender is not None:
            sender.pump()

    def _ship_open(self, *, but_stalled: bool = False) -> None:
        """Send what lingers; `but_stalled`: leave what cannot be written yet to the linger thread."""
        senders: set[ShardSender | None] = set()
        now = self._clock.monotonic()
        with self._changed:
            for pending in list(self._open.values()):
                if not but_stalled or not self._sender.stalled(*pending.where):
                    senders.add(self._seal(pending))
                elif pending.due > now + STALLED_S:
                    pending.due = now
                    self._due.appendleft(pending)
                    self._wake_linger()
        _pump(senders)

    def _may_grow(self, pending: Pending) -> bool:
        """Whether a batch would only stand in line, and nobody asks for it: then it takes company meanwhile.

        For as long as its delivery may take, which begins when it is made.
        """
        asked = pending.sealed or not pending.due
        late = self._clock.monotonic() - pending.begun >= self.config.delivery_timeout_ms / 1000
        return not (asked or late) and self._sender.stalled(*pending.where)

    def _take_due(self, busy: bool) -> tuple[set[ShardSender], float | None]:
        """Seal what has waited long enough, unless it would only stand in line. Needs the lock.

        Returns: the senders to pump; if there is none, how long to wait in seconds, None: until a message comes.
        While messages come (`busy`) that is the linger time, so that none of them has to wake the thread.
        """
        senders = self._to_pump.copy()
        self._to_pump.clear()
        now = self._clock.monotonic()
        stalled: list[Pending] = []
        while self._due and (self._due[0].sealed or self._due[0].due <= now):
            busy = True
            pending = self._due.popleft()
            if self._may_grow(pending):
                pending.due = now + STALLED_S
                stalled.append(pending)
            elif (sender := self._seal(pending)) is not None:
                senders.add(sender)
        self._due.extendleft(reversed(stalled))
        wait_s = self._linger_s if busy else None
        if self._due:
            wait_s = self._due[0].due - now
        self._linger_wakes = math.inf if wait_s is None else now + wait_s
        return senders, wait_s

    # --- columns --------------------------------------------------------------------------------

    def send_batch(
        self, topic: str, data: pa.RecordBatch | pa.Table, *, queue_id: int | None = None
    ) -> list[Future[BatchReceipt]]:
        """Send columns of messages, without an object a message.

        Args: `data` has the column `body` and may have `key`, `tag`, `properties` and
        `born_time_ms` (see columns.put_batch). Rows go to `queue_id`, else to the queue of their
        key; without keys all go to one queue.
        Returns: a future a batch; rows of one queue keep their order, also behind earlier sends.
        Raises: Rejected naming the column; Unavailable when the buffer stays full.
        """
        self._sender.check_process()
        route = self._sender.topic(topic)
        batch, keys = put_batch(data, now_ms=self._clock.now_ms())
        if not batch.num_rows:
            return []
        self._ship_open()
        if queue_id is not None or keys is None:
            with self._changed:
                if queue_id is None:
                    queue_id = self._sticky_queue(topic, route.queues)
                    self._sticky[topic] = (queue_id + 1) % route.queues
            return self._send_rows(topic, queue_id, batch)
        futures: list[Future[BatchReceipt]] = []
        chosen = queues_of(keys, route.queues)
        for queue in np.unique(chosen).tolist():
            rows = pa.array(np.flatnonzero(chosen == queue))
            futures += self._send_rows(topic, queue, batch.take(rows))
        return futures

    def _send_rows(
        self, topic: str, queue_id: int, batch: pa.RecordBatch
    ) -> list[Future[BatchReceipt]]:
        futures: list[Future[BatchReceipt]] = []
        step = max(1, COLUMNS_BYTES * batch.num_rows // max(batch.nbytes, 1))
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            size = part.nbytes
            self._take_room(size)
            now = self._clock.monotonic()
            acks = self.config.acks
            pending = Pending((topic, queue_id), acks, now, 0.0, self._hurry, self.hurry_soon)
            pending.sealed, pending.size = True, size
            pending.rows, pending.sealed_at = part.num_rows, now
            with self._changed:
                try:
                    self._check_open()
                    future, sender = self._sender.enqueue(topic, queue_id, part)
                except BaseException:
                    self._room.give(size)
                    raise
            self._under_way.add(pending)
            future.add_done_callback(partial(self._finish, pending))
            sender.pump()
            futures.append(pending.future)
        return futures

    def statistics(self) -> dict[str, int | float]:
        """What was sent so far and how it was batched.

        `messages`, `batches`, `bytes` (bodies, properties and what is counted for each message) are those
        that are answered, `failed_messages` of them not with a receipt. `batch_messages_mean`,
        `batch_bytes_mean`; `queue_ms_mean`: from a batch's first message until it is made;
        `ack_ms_mean`: from there to the answer. Of now: `open_batches`, `under_way_batches`,
        `buffered_bytes`.
        """
        with self._changed:
            now = {"open_batches": len(self._open), "under_way_batches": len(self._under_way)}
        return {**self._statistics.read(), **now, "buffered_bytes": self._room.used}

    # --- end ------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Send what lingers and wait until every send so far is answered; seconds.

        Raises: the first failure that no caller has seen; TimeoutError when the time is up.
        """
        self.await_answers(timeout)
        self.raise_failure()

    def await_answers(self, timeout: float | None = None) -> None:
        """As `flush`, but failures are not raised. Raises: TimeoutError."""
        self._sender.check_process()
        self._ship_open()
        _, late = wait([pending.future for pending in list(self._under_way)], timeout)
        if late:
            raise still_under_way(len(late), timeout)

    def raise_failure(self) -> None:
        """Raise the first failure that no caller has seen; the others of that time then count as seen."""
        failed = [failure for failure in list(self._failed) if not failure.observed]
        self._failed.clear()
        for failure in failed:
            failure.observed = True
        for failure in failed[:1]:
            raise failure.error

    def close(self, timeout: float | None = None) -> None:
        """Flush for up to `timeout` seconds, then close; twice does nothing. What has no receipt then fails.

        Raises: the first failure that no caller has seen; it is closed all the same.
        """
        if not self._closed:
            self.end(timeout)
            self.raise_failure()

    def end(self, timeout: float | None = None) -> None:
        """As `close`, but failures are not raised."""
        with self._changed:
            if self._closed:
                return
        try:
            with contextlib.suppress(TimeoutError):
                self.await_answers(timeout)
        finally:
            with self._changed:
                self._closed = self._linger_state.ended = True
                # What came behind the flush is told by the end of its sender.
                for pending in list(self._open.values()):
                    self._seal(pending)
                self._changed.notify_all()
            self._sender.close()

    def stop_look_ups(self) -> None:
        """A look-up that waits for a shard fails: the producer is about to close."""
        self._sender.stop_look_ups()

    def __del__(self) -> None:
        # Only of an idle one: what is open or under way refers to it.
        if self.__dict__.get("_closed", True) or not self._sender.in_own_process:
            return
        in_use = self._sender.in_use
        if not sys.is_finalizing():
            with self._changed:
                self._closed = True
                self._linger_state.ended = True
                self._changed.notify_all()
            if in_use:
                # Not here: it waits for threads, and the collector runs anywhere.
                threading.Thread(target=self._sender.close, daemon=True).start()
        if in_use:
            advice = "use it in a with block, or call close(), which raises what was not stored"
            warn_unclosed(self, self.name, advice)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close(None if kind is None else FAILED_EXIT_S)
        except RayMQError:
            # A failure of the block itself must not be hidden by one that came of it.
            if kind is None:
                raise


class _LingerState:
    """What the linger thread works for. An idle producer is not kept alive by its thread."""

    def __init__(self) -> None:
        #: None while nothing is open
        self.producer: Producer | None = None
        self.ended = False


def _linger(state: _LingerState, changed: threading.Condition) -> None:
    """Send what has waited long enough."""
    busy = False
    while True:
        with changed:
            producer = state.producer
            if state.ended:
                state.producer = None
                return
            if producer is None:
                changed.wait()
                continue
            senders, wait_s = producer._take_due(busy)
            busy = bool(senders)
            if not senders:
                if wait_s is None:
                    # Perhaps the last reference: then `__del__` runs here.
                    state.producer = producer = None
                else:
                    changed.wait(wait_s)
                continue
            producer._linger_wakes = 0.0
        _pump(senders)


def _batch(pending: Pending) -> pa.RecordBatch | Row:
    """Raises: Rejected for a value that is none of its column's; whoever seals a batch serves others as well."""
    bodies, tags, properties, born = pending.bodies, pending.tags, pending.properties, pending.born
    if len(bodies) == 1 and pending.size <= BATCH_BYTES_MAX:
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
        raise Rejected(
            f"a message cannot be sent as it is: {error}", field="batch", limit="bytes and text"
        ) from error
    return pa.RecordBatch.from_arrays(columns, schema=PUT_SCHEMA)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """All but the bodies is the same in most batches, as a rule: one look does for all rows."""
    first, rows = values[0], len(values)
    if first != values[-1] or values.count(first) != rows:
        return pa.array(values, kind)
    return pa.nulls(rows, kind) if first is None else pa.repeat(pa.scalar(first, kind), rows)


def _pump(senders: Iterable[ShardSender | None]) -> None:
    for sender in senders:
        if sender is not None:
            sender.pump()
