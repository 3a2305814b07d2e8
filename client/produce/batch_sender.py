"""Sends Arrow batches to the shards of their queues, idempotently, in order and within one byte limit.

`Producer`, the Spark sink and `Queue` are built on `BatchSender`. The module does not import Ray.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from typing_extensions import Unpack

from raymq.client import forks
from raymq.client.arguments import wait_s
from raymq.client.client_thread import ClientThread
from raymq.client.transport.chained_future import wake_callers
from raymq.client.transport.routes import Routes
from raymq.client.transport.topic_routes import TopicRoute
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.base.format import SCHEDULE_TOPIC, STAGED_TOPIC, TIMER_TOPIC
from raymq.store.config.promise import Acks
from raymq.store.records import producer_stamp
from raymq.store.records.record import PUT_SCHEMA, SmallBatch, batch_bytes, check_put
from raymq.store.records.small_batch import put_schema

from .byte_limiter import ByteLimiter
from .callbacks import Callbacks, raise_interrupt
from .producer_config import ProducerConfig, ProducerOptions, closed_error
from .queue_sequence import BatchReceipt, QueueSequence, UnknownBatch, new_producer_id
from .send_future import BatchFuture, SendFailure
from .send_window import InFlightBatch
from .shard_sender import ShardSender

if TYPE_CHECKING:
    from .half_future import HalfFuture
    from .half_message import HalfMessage

logger = logging.getLogger("raymq.producer")

#: system topics that each shard has for itself: instead of a queue callers name the shard,
#: and of the topic of the delay levels what `waiting_queue` gives
SHARD_TOPICS = (TIMER_TOPIC, STAGED_TOPIC, SCHEDULE_TOPIC)
#: more than the delay levels of a shard
_LEVELS_MAX = 1 << 16

#: between two look-ups of a topic whose shards do not answer
LOOK_UP_PAUSE_S = 0.1

#: how often streams are checked for silence: a blocked read has no timeout of its own
CHECK_S = 1.0

#: failures that no caller has seen are remembered up to this number
FAILURES_MAX = 1000

#: the size of bodies is limited by the server
_ANY_SIZE = 2**31 - 1


class BatchSender:
    """Sends batches of PUT_SCHEMA. Threads: any; rows of one queue keep the order of the calls.

    Args: `producer_id`, `epoch`: identify the producer for idempotence. If a restart with the same id sends the same
    rows of each queue in the same order, nothing is stored twice. The default is a random id.

    The options are those of `Producer`, but `linger_ms`, `batch_bytes`, `codec` and `max_message_bytes` have no effect
    here. Beyond `buffer_bytes`, `send` blocks for up to `max_block_ms`. The first look-up of a topic waits as long.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        producer_id: int | None = None,
        epoch: int = 0,
        on_answered: Callable[[ShardSender], None] = lambda _: None,
        clock: Clock | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        """Raises: Rejected for a wrong option, or a producer id or epoch that no record can carry."""
        self._on_answered = on_answered
        self.config = ProducerConfig(**options)
        producer_stamp.check(producer_stamp.Stamp(producer_id or 0, epoch, 0), 1)
        self._routes = routes
        self._own_id = producer_id is None
        self._producer_id = new_producer_id() if producer_id is None else producer_id
        self._epoch = epoch
        self._clock = clock or Clock()

        #: the bytes of all batches without an answer
        self.limiter = ByteLimiter(self.config.buffer_bytes, self.config.max_block_ms)
        self._unanswered: set[BatchFuture | HalfFuture] = set()
        self._failures: deque[SendFailure] = deque(maxlen=FAILURES_MAX)
        self._statistics = SendStatistics()
        self._forks = forks.count
        #: those of its futures
        self.callbacks = Callbacks()

        self._lock = threading.Lock()
        self._queues: dict[tuple[str, int], tuple[QueueSequence, ShardSender]] = {}
        self._shard_senders: dict[int, ShardSender] = {}
        #: (topic, queue, shard, producer id, epoch) -> sequence of the batches resent for that producer
        self._resends: dict[tuple[str, int, int, int, int], QueueSequence] = {}
        self._closed = threading.Event()
        self._look_ups_stopped = threading.Event()
        self._watcher: threading.Thread | None = None

    # --- topics -----------------------------------------------------------------------------------

    def topic(self, name: str) -> TopicRoute:
        """A topic's queues. The first call asks a shard, for up to `max_block_ms` while none answers.

        Raises: Rejected when the topic does not exist or this BatchSender is closed; Unavailable.
        """
        route = self._routes.topics.cached(name)
        if route is not None:
            return route
        until_ms = self._clock.monotonic_ms() + self.config.max_block_ms
        while True:
            try:
                return self._ask_for(name, follow_s=0)
            except Unavailable:
                if self._clock.monotonic_ms() >= until_ms:
                    raise
            if self._look_ups_stopped.wait(LOOK_UP_PAUSE_S):
                raise closed_error()

    def _ask_for(self, name: str, *, follow_s: float | None = None) -> TopicRoute:
        """Look a topic up once. A shard that does not answer has stored nothing of the send that needs the topic.

        Args: `follow_s`: see `TopicRoutes.find`.
        Raises: Rejected; Unavailable.
        """
        try:
            return self._routes.topics.find(name, follow_s=follow_s)
        except RayMQError as error:
            if not error.retriable:
                raise
            raise Unavailable(
                f"topic {name!r} could not be looked up; nothing was sent: {error}"
            ) from error

    def stop_look_ups(self) -> None:
        """Fail every look-up that waits for a shard, from now on."""
        self._look_ups_stopped.set()

    # --- sending ----------------------------------------------------------------------------------

    def send(self, topic: str, queue_id: int, batch: pa.RecordBatch | SmallBatch) -> BatchFuture:
        """Send one batch of one queue.

        Returns: a future of the receipt. It fails with DeliveryUnknown when the batch may be stored.
        Raises: Rejected for a batch that cannot be stored; Unavailable when the buffer stays full for `max_block_ms`.
        In both cases nothing was sent.
        """
        self.check_process()
        checked = checked_put(topic, batch)
        size = batch_bytes(checked, is_checked=True)
        future = BatchFuture(checked.num_rows, size, self._clock.monotonic())
        self.limiter.acquire(size)
        with self.limiter.released_on_error(size):
            queue, shard_sender = self._queue(topic, queue_id)
            self._deliver(
                shard_sender, InFlightBatch(queue, checked, size, self.config.acks, future)
            )
        shard_sender.write_ready()
        return future

    def enqueue(
        self,
        topic: str,
        queue_id: int,
        batch: pa.RecordBatch | SmallBatch,
        *,
        acks: Acks | None = None,
        future: BatchFuture,
        is_separable: bool = False,
    ) -> ShardSender:
        """Like `send`, but never blocks: nothing is written before `write_ready` of the returned shard sender.

        For callers that keep order with a lock of their own, which they must not hold while writing.

        Args: `acks`: of this batch, by default those of the options. `future`: the caller has acquired its `size` of
        the limiter, and releases that when this raises. `is_separable`: see `InFlightBatch`.
        """
        self.check_process()
        checked = checked_put(topic, batch)
        queue, shard_sender = self._queue(topic, queue_id)
        size = batch_bytes(checked, is_checked=True)
        under_way = InFlightBatch(queue, checked, size, acks or self.config.acks, future)
        under_way.is_separable = is_separable
        self._deliver(shard_sender, under_way)
        return shard_sender

    def _deliver(self, shard_sender: ShardSender, batch: InFlightBatch) -> None:
        """Give a batch to its shard sender. If that raises, the shard sender has taken nothing."""
        # Counted before the shard sender takes the batch, because another thread may write the batch at once.
        self._unanswered.add(batch.future)
        try:
            shard_sender.add(batch)
        except BaseException:
            self._unanswered.discard(batch.future)
            raise

    def enqueue_again(self, lost: UnknownBatch, future: BatchFuture) -> ShardSender:
        """Like `enqueue`, of a batch that a shard sender gave up: the shard recognises it if it is stored."""
        self.check_process()
        key = (lost.topic, lost.queue_id, lost.shard, lost.producer_id, lost.epoch)
        with self._lock:
            shard_sender = self._shard_sender(lost.shard)
            queue = self._resends.get(key)
            if queue is None:
                queue = QueueSequence(
                    lost.topic, lost.queue_id, lost.producer_id, lost.epoch, False, resends=True
                )
                self._resends[key] = queue
        batch = InFlightBatch(queue, lost.batch, lost.size, lost.acks, future)
        batch.sequence, batch.uncertain = lost.sequence, True
        self._deliver(shard_sender, batch)
        return shard_sender

    def complete(self, future: BatchFuture, outcome: BatchReceipt | RayMQError) -> None:
        """Account for a batch with its outcome and wake its callers. A second call for one changes nothing."""
        self._set_outcome(future, outcome)
        wake_callers([future])
        raise_interrupt()

    def _set_outcome(self, future: BatchFuture, outcome: BatchReceipt | RayMQError) -> None:
        """`complete`, but the caller wakes the future's callers."""
        if not future.done():
            failed = isinstance(outcome, RayMQError)
            self._statistics.add(future, self._clock.monotonic(), failed=failed)
            if isinstance(outcome, RayMQError):
                # Noted before its callers wake, because one of them marks the failure as seen. Otherwise
                # `raise_failure` looks for it.
                future.failure = SendFailure(outcome, future.rows)
                self._failures.append(future.failure)
            size, future.size = future.size, 0
            self.limiter.release(size)
            self.callbacks.run(partial(future.finish, outcome))
        self._unanswered.discard(future)

    def expect(self, future: HalfFuture) -> None:
        """Count a half message as sent. Its bytes are acquired. Raises: Rejected after `close`."""
        with self._lock:
            if self._closed.is_set():
                raise closed_error()
            self._unanswered.add(future)

    def settle(self, future: HalfFuture, outcome: HalfMessage | RayMQError) -> None:
        """Account for a half message with its outcome and wake its callers. A second call changes nothing."""
        with self._lock:
            size, future.size = future.size, 0
        if size:
            if isinstance(outcome, RayMQError):
                future.failure = SendFailure(outcome, 1)
                self._failures.append(future.failure)
            self.limiter.release(size)
            self.callbacks.run(partial(future.finish, outcome))
        self._unanswered.discard(future)

    def _note_refused(self, future: BatchFuture, rows: tuple[int, ...], error: RayMQError) -> None:
        """Account for messages that the shard refused alone. A second call for one changes nothing."""
        known = future.refused or {}
        failures = {row: SendFailure(error, 1) for row in rows if row not in known}
        future.refuse(failures)
        self._failures.extend(failures.values())
        self._statistics.add_refused(len(failures))

    def shard_sender_of(self, topic: str, queue_id: int) -> ShardSender | None:
        """The shard sender of a queue; None: nothing was sent to the shard."""
        found = self._queues.get((topic, queue_id))
        if found is not None:
            return found[1]
        if topic in SHARD_TOPICS:
            return self._shard_senders.get(shard_place(topic, queue_id)[0])
        route = self._routes.topics.cached(topic)
        return None if route is None else self._shard_senders.get(route.shard_of(queue_id))

    def _queue(self, topic: str, queue_id: int) -> tuple[QueueSequence, ShardSender]:
        found = self._queues.get((topic, queue_id))
        if found is not None:
            return found
        shard = self._shard_of(topic, queue_id)
        with self._lock:
            found = self._queues.get((topic, queue_id))
            if found is None:
                # The wire takes no other integers, such as numpy's.
                number = shard_place(topic, queue_id)[1] if topic in SHARD_TOPICS else int(queue_id)
                queue = QueueSequence(topic, number, self._producer_id, self._epoch, self._own_id)
                found = self._queues[topic, queue_id] = (queue, self._shard_sender(shard))
            return found

    def _shard_of(self, topic: str, queue_id: int) -> int:
        if topic in SHARD_TOPICS:
            return shard_place(topic, queue_id)[0]
        return self._ask_for(topic).shard_of(queue_id)

    def _shard_sender(self, shard: int) -> ShardSender:
        """The sender of one shard, made at the first use. Needs the lock. Raises: Rejected after `close`."""
        if self._closed.is_set():
            raise closed_error()

        shard_sender = self._shard_senders.get(shard)
        if shard_sender is None:
            shard_sender = self._shard_senders[shard] = ShardSender(
                self._routes,
                shard,
                self.config,
                on_outcome=self._set_outcome,
                on_refused=self._note_refused,
                on_answered=self._on_answered,
                callbacks=self.callbacks,
                clock=self._clock,
            )

        if self._watcher is None:
            self._watcher = ClientThread(self._watch, "raymq-sender-watch")
            self._watcher.start()
        return shard_sender

    def _watch(self) -> None:
        while not self._closed.wait(CHECK_S):
            for check in [self._routes.topics.look_for_queues, *self._checks()]:
                try:
                    check()
                except BaseException:
                    # Without this thread no send to a silent shard would ever fail.
                    logger.exception("a check of the streams")

    def _checks(self) -> list[Callable[[], None]]:
        return [shard_sender.check for shard_sender in list(self._shard_senders.values())]

    def statistics(self) -> dict[str, int | float]:
        """See `Producer.statistics`; without the batches that are open."""
        return {
            **self._statistics.read(),
            "under_way_batches": len(self._unanswered),
            "buffered_bytes": self.limiter.used,
        }

    # --- end --------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raises: Rejected in a forked child, where the connections and threads do not exist."""
        # `in_own_process`, without a call for each message
        if forks.count != self._forks:
            raise Rejected(
                "this producer was made before a fork; make one in a process that is started by spawn or "
                "forkserver",
                field="fork",
            )

    def flush(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds until everything sent so far has an outcome.

        Raises: TimeoutError when the time is up; the batches are still under way. Rejected in a done callback.
        """
        self.check_process()
        self.callbacks.check_may_wait("flush()")
        unanswered: list[Future[Any]] = list(self._unanswered)
        _, late = wait(unanswered, wait_s(timeout))
        if late:
            raise TimeoutError(
                f"{len(late)} batches are not answered within {timeout} s; they are still under way: flush again"
            )

    def raise_failure(self) -> None:
        """Raise the first failure that no caller has seen. The others of that time then count as seen."""
        unseen = [failure for failure in list(self._failures) if not failure.observed]
        self._failures.clear()
        for failure in unseen:
            failure.observed = True
        if unseen:
            raise unseen[0].error

    def count_unreceipted(self) -> int:
        """Messages without an outcome, and those whose failure no caller has seen."""
        failed = sum(each.rows for each in list(self._failures) if not each.observed)
        return failed + sum(future.rows for future in list(self._unanswered))

    @property
    def in_own_process(self) -> bool:
        """Whether this is not a forked child."""
        # None: the program ends, and Python has cleared this module.
        return forks is not None and forks.count == self._forks

    @property
    def in_use(self) -> bool:
        """Whether there is anything to close."""
        return bool(self._shard_senders) and not self._closed.is_set()

    def close(self) -> None:
        """Close at once. Unacknowledged batches fail. Call `flush` before."""
        if not self.in_own_process:
            return
        self._look_ups_stopped.set()
        self._closed.set()
        with self._lock:
            shard_senders = list(self._shard_senders.values())
        for shard_sender in shard_senders:
            shard_sender.close()
        if self._watcher is not None and self._routes.transport == "ray":
            # A process that leaves Ray during a call of this thread would die.
            self._watcher.join()
        raise_interrupt()


def waiting_queue(shard: int, delay_level: int) -> tuple[str, int]:
    """Topic and queue id, as `BatchSender` takes them, of a message that waits in a shard.

    Args: `delay_level`: 0: it waits for a time.
    """
    if delay_level:
        return SCHEDULE_TOPIC, shard * _LEVELS_MAX + delay_level - 1
    return TIMER_TOPIC, shard


def shard_place(topic: str, queue_id: int) -> tuple[int, int]:
    """The shard, and the queue id there, of a queue of SHARD_TOPICS."""
    return divmod(queue_id, _LEVELS_MAX) if topic == SCHEDULE_TOPIC else (queue_id, 0)


def checked_put(topic: str, batch: pa.RecordBatch | SmallBatch) -> pa.RecordBatch | SmallBatch:
    """The form in which a batch is sent. Raises: Rejected."""
    small = check_put(topic, batch, max_message_bytes=_ANY_SIZE)
    if not batch.num_rows:
        raise Rejected("the batch has no rows", field="batch", limit="at least 1 row")
    if small is not None:
        return small
    if isinstance(batch, SmallBatch):
        # Too large to be sent as bytes.
        return batch.to_batch()
    if not batch.schema.equals(PUT_SCHEMA):
        # Names and types were checked; nullability and metadata must be the stream's.
        return pa.RecordBatch.from_arrays(batch.columns, schema=put_schema(batch.schema.names))
    return batch


class SendStatistics:
    """Sums over answered batches. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches = 0
        self._messages = 0
        self._failed_messages = 0
        self._bytes = 0
        self._queue_s = 0.0
        self._ack_s = 0.0

    def add(self, batch: BatchFuture, now_s: float, *, failed: bool) -> None:
        """Count a batch that was answered at `now_s`, seconds of the monotonic clock."""
        with self._lock:
            self._batches += 1
            self._messages += batch.rows
            self._failed_messages += batch.rows if failed else 0
            self._bytes += batch.size
            self._queue_s += batch.closed_s - batch.begun_s
            self._ack_s += now_s - batch.closed_s

    def add_refused(self, messages: int) -> None:
        """Count messages that failed alone. Their batch is counted without them."""
        with self._lock:
            self._messages += messages
            self._failed_messages += messages

    def read(self) -> dict[str, int | float]:
        """Counters and means; see `Producer.statistics`."""
        with self._lock:
            batches = max(self._batches, 1)
            return {
                "messages": self._messages,
                "failed_messages": self._failed_messages,
                "batches": self._batches,
                "bytes": self._bytes,
                "batch_messages_mean": self._messages / batches,
                "batch_bytes_mean": self._bytes / batches,
                "queue_ms_mean": 1000 * self._queue_s / batches,
                "ack_ms_mean": 1000 * self._ack_s / batches,
            }
