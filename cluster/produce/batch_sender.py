"""The columnar, idempotent sender: batches in, receipts out, in order (design D7, D11).

What Producer and the Spark sink are made of. It imports no Ray.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, wait
from typing import Any, NoReturn

import pyarrow as pa

from raymq.cluster.arguments import check_choice
from raymq.cluster.transport.routes import Routes, TopicRoute
from raymq.store.clock import Clock
from raymq.store.errors import RayMQError, Rejected, Unavailable
from raymq.store.format import TIMER_TOPIC
from raymq.store.promise import ACKS, Acks
from raymq.store.record import PUT_SCHEMA, Row, batch_bytes, check_put
from raymq.store.records import producer_stamp

from .byte_limiter import ByteLimiter
from .queue_sequence import BatchReceipt, QueueSequence, UnknownBatch, closed_error, new_producer_id
from .shard_sender import BatchFuture, ShardSender

MIB = 1 << 20

#: what a shard is sent before it answers: below what a server takes unanswered, so that it always reads on. With 4 MiB
#: the sync waits for batches, more than 16 only fill buffers.
IN_FLIGHT_BYTES = 16 * MIB

#: a topic whose shards do not answer is looked up again after so long
LOOK_UP_PAUSE_S = 0.1

#: bodies are limited by the server, whose limit may be any
_ANY_SIZE = 2**31 - 1


def still_under_way(batches: int, timeout: float | None) -> TimeoutError:
    """What a flush raises when its time is up."""
    return TimeoutError(
        f"{batches} batches are not answered within {timeout} s; they are still under way: flush again"
    )


def check_acks(acks: str) -> None:
    """Raises: Rejected for anything that promises nothing known."""
    check_choice("acks", acks, ACKS)


class BatchSender:
    """Sends batches of PUT_SCHEMA. Threads: any; rows of one queue keep the order of the calls.

    Args: `producer_id` and `epoch` identify the producer for idempotence: the same id, and for
    every queue the same rows in the same order from the first on, store nothing twice. Without an
    id a random one is used. `buffer_bytes` are the unanswered bytes beyond which `send` blocks, up
    to `max_block_ms`; the first look-up of a topic waits as long. A batch that is not acknowledged in
    `delivery_timeout_ms` fails; a server that is silent for `request_timeout_ms` is left and asked again.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        producer_id: int | None = None,
        epoch: int = 0,
        acks: Acks = "quorum",
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        buffer_bytes: int = 64 * MIB,
        max_block_ms: int = 60_000,
        delivery_timeout_ms: int = 120_000,
        request_timeout_ms: int = 30_000,
        clock: Clock | None = None,
    ) -> None:
        """Raises: Rejected for a producer id or epoch that no record can carry."""
        check_acks(acks)
        producer_stamp.check(producer_stamp.Stamp(producer_id or 0, epoch, 0), 1)
        self._routes = routes
        self._own_id = producer_id is None
        self._producer_id = new_producer_id() if producer_id is None else producer_id
        self._epoch = epoch
        self._acks = acks
        self._clock = clock or Clock()
        self._limits = {
            "in_flight_bytes": in_flight_bytes,
            "delivery_timeout_ms": delivery_timeout_ms,
            "request_timeout_ms": request_timeout_ms,
        }
        self._room = ByteLimiter(buffer_bytes, max_block_ms)
        self._max_block_ms = max_block_ms
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, int], tuple[QueueSequence, ShardSender]] = {}
        self._senders: dict[int, ShardSender] = {}
        #: (topic, queue, shard, producer id, epoch) -> what is sent again of that producer
        self._resends: dict[tuple[str, int, int, int, int], QueueSequence] = {}
        self._unfinished: set[Future[BatchReceipt]] = set()
        self._closed = threading.Event()
        self._ending = threading.Event()
        self._watcher: threading.Thread | None = None

    def __reduce__(self) -> NoReturn:
        raise Rejected(
            "a sender has open connections and does not pickle: pickle the Cluster (or its URL and "
            "token) and make the sender where it is used",
            field="pickle",
        )

    def topic(self, name: str) -> TopicRoute:
        """A topic's queues. The first time a shard is asked, for up to `max_block_ms` while none answers.

        Raises: Rejected when there is none, or the sender is closed; Unavailable.
        """
        route = self._routes.known(name)
        return self._look_up(name) if route is None else route

    def _look_up(self, name: str) -> TopicRoute:
        until_ms = self._clock.monotonic_ms() + self._max_block_ms
        while True:
            try:
                return self._ask_for(name)
            except Unavailable:
                if self._clock.monotonic_ms() >= until_ms:
                    raise
            if self._ending.wait(LOOK_UP_PAUSE_S):
                raise closed_error()

    def _ask_for(self, name: str) -> TopicRoute:
        """One look-up. A shard that does not answer it has stored nothing of the send that needs it.

        Raises: Rejected; Unavailable.
        """
        try:
            return self._routes.topic(name)
        except RayMQError as error:
            if not error.retriable:
                raise
            raise Unavailable(
                f"topic {name!r} could not be looked up; nothing was sent: {error}"
            ) from error

    def stop_look_ups(self) -> None:
        """A look-up that waits for a shard fails from now on."""
        self._ending.set()

    def send(self, topic: str, queue_id: int, batch: pa.RecordBatch | Row) -> BatchFuture:
        """Send one batch of one queue, or a row of it.

        Returns: a future of the receipt; it fails as design D11 says.
        Raises: Rejected for a batch that cannot be stored (nothing was sent); Unavailable when the
        buffer stays full for `max_block_ms`.
        """
        self.check_process()
        checked = _checked(topic, batch)
        size = batch_bytes(checked)
        self._room.take(size)
        try:
            future, sender = self._add(topic, queue_id, checked, size, self._acks)
        except BaseException:
            self._room.give(size)
            raise

        def answered(future: Future[BatchReceipt]) -> None:
            self._unfinished.discard(future)
            self._room.give(size)

        future.add_done_callback(answered)
        sender.pump()
        return future

    def enqueue(
        self, topic: str, queue_id: int, batch: pa.RecordBatch | Row, *, acks: Acks | None = None
    ) -> tuple[BatchFuture, ShardSender]:
        """As `send`, but never blocks: nothing is written before the returned sender's `pump`.

        Args: `acks` of this batch; None: the sender's.

        For callers that count their bytes themselves, and that keep order with a lock of their own
        which they must not hold while writing.
        """
        self.check_process()
        checked = _checked(topic, batch)
        future, sender = self._add(
            topic, queue_id, checked, batch_bytes(checked), acks or self._acks
        )
        future.add_done_callback(self._unfinished.discard)
        return future, sender

    def enqueue_again(self, lost: UnknownBatch) -> tuple[BatchFuture, ShardSender]:
        """As `enqueue`, of a batch that a sender gave up: the shard recognises it, if it was stored."""
        self.check_process()
        key = (lost.topic, lost.queue_id, lost.shard, lost.producer_id, lost.epoch)
        with self._lock:
            sender = self._sender(lost.shard)
            lane = self._resends.get(key)
            if lane is None:
                lane = QueueSequence(
                    lost.topic, lost.queue_id, lost.producer_id, lost.epoch, False, resends=True
                )
                self._resends[key] = lane
        future = sender.add(lane, lost.batch, lost.size, lost.acks, lost.sequence)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future, sender

    def _add(
        self, topic: str, queue_id: int, batch: pa.RecordBatch | Row, size: int, acks: Acks
    ) -> tuple[BatchFuture, ShardSender]:
        """What both have in common; the caller takes the future out of `_unfinished` when it is done."""
        lane, sender = self._lane(topic, queue_id)
        future = sender.add(lane, batch, size, acks)
        self._unfinished.add(future)
        return future, sender

    def stalled(self, topic: str, queue_id: int) -> bool:
        """Whether a batch that is sent now would not be written before others are answered."""
        found = self._lanes.get((topic, queue_id))
        return found is not None and found[1].stalled

    def _lane(self, topic: str, queue_id: int) -> tuple[QueueSequence, ShardSender]:
        found = self._lanes.get((topic, queue_id))
        if found is not None:
            return found
        if topic == TIMER_TOPIC:
            # Every shard has its own; here the queue's number is the shard's.
            shard, number = queue_id, 0
        else:
            shard, number = self._ask_for(topic).shard_of(queue_id), queue_id
        with self._lock:
            found = self._lanes.get((topic, queue_id))
            if found is None:
                lane = QueueSequence(topic, number, self._producer_id, self._epoch, self._own_id)
                found = self._lanes[topic, queue_id] = (lane, self._sender(shard))
            return found

    def _sender(self, shard: int) -> ShardSender:
        if self._closed.is_set():
            raise closed_error()
        sender = self._senders.get(shard)
        if sender is None:
            limits: dict[str, Any] = self._limits
            sender = ShardSender(self._routes, shard, clock=self._clock, **limits)
            self._senders[shard] = sender
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="raymq-sender-watch", daemon=True
            )
            self._watcher.start()
        return sender

    def _watch(self) -> None:
        # A blocked read has no timeout of its own.
        while not self._closed.wait(1.0):
            for sender in list(self._senders.values()):
                sender.check()

    def check_process(self) -> None:
        """Raises: Rejected in a forked child, where the connections and threads do not exist."""
        if not self.in_own_process:
            raise Rejected(
                "this producer was made before a fork; make one in the child process",
                field="fork",
            )

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is answered, one way or the other; seconds.

        Raises: TimeoutError when the time is up; the batches are still under way.
        """
        self.check_process()
        _, late = wait(list(self._unfinished), timeout)
        if late:
            raise still_under_way(len(late), timeout)

    @property
    def in_own_process(self) -> bool:
        """Whether this is not a forked child."""
        return os.getpid() == self._process

    @property
    def in_use(self) -> bool:
        """Whether there is anything to close."""
        return bool(self._senders) and not self._closed.is_set()

    def close(self) -> None:
        """End at once: what is not answered fails. Call `flush` before."""
        if not self.in_own_process:
            return
        self._ending.set()
        self._closed.set()
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.close()

    def __enter__(self) -> BatchSender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()


def _checked(topic: str, batch: pa.RecordBatch | Row) -> pa.RecordBatch | Row:
    """What is sent of a batch: a single small row goes as such. Raises: Rejected."""
    row = check_put(topic, batch, max_message_bytes=_ANY_SIZE)
    if row is not None:
        return row
    if not batch.num_rows:
        raise Rejected("the batch has no rows", field="batch", limit="at least 1 row")
    if isinstance(batch, Row):
        # Too large for what a row is good for.
        return batch.to_batch()
    if not batch.schema.equals(PUT_SCHEMA):
        # Names and types were checked; nullability and metadata must be the stream's.
        return pa.RecordBatch.from_arrays(batch.columns, schema=PUT_SCHEMA)
    return batch
