"""The producer of messages: collects them per queue and sends batches (design D10, D11)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raymq.store.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable

from .batch_sender import BatchSender
from .message import Message, Receipt, encode_properties, put_batch
from .partitioner import queue_of
from .routes import Routes
from .shard_sender import BatchReceipt

if TYPE_CHECKING:
    from .cluster import Cluster


DELIVERY_TIMEOUT_MS = 120_000


class SendFuture:
    """The answer to one send: `.result(timeout)`, or awaited."""

    def __init__(self) -> None:
        self._future: Future[Receipt] = Future()

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt.

        Args: timeout, seconds; None waits for the delivery timeout. Raises: DeliveryUnknown when the time is up
        (the message may still be stored), or what the send failed with.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeoutError:
            raise DeliveryUnknown(
                f"no receipt within {timeout} s; the send goes on, ask again", status="UNKNOWN_ERROR"
            ) from None

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(future)` when it is done, in another thread."""
        self._future.add_done_callback(callback)

    def __await__(self) -> Generator[Any, None, Receipt]:
        import asyncio

        return asyncio.wrap_future(self._future).__await__()

    def _set(self, outcome: Receipt | BaseException) -> None:
        if isinstance(outcome, Receipt):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)


@dataclass
class _Collected:
    """Messages of one queue that wait for their batch."""

    bodies: list[bytes] = field(default_factory=list)
    tags: list[str | None] = field(default_factory=list)
    properties: list[bytes] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    futures: list[SendFuture] = field(default_factory=list)
    bytes: int = 0
    since: float = 0.0


class Producer:
    """Sends messages. Threads may share it; it neither pickles nor survives a fork.

    As a context manager it flushes at the end and raises the first failure of a send that nobody asked about.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        acks: str = "quorum",
        linger_ms: float = 5,
        batch_bytes: int = 1 << 20,
        buffer_bytes: int = 64 << 20,
        max_block_ms: int = 60_000,
        delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS,
    ) -> None:
        """Args: linger_ms, how long a message waits for company; max_block_ms, how long a full buffer blocks."""
        self._sender = BatchSender(
            Routes.of(cluster), acks=acks, delivery_timeout_ms=delivery_timeout_ms, buffer_bytes=buffer_bytes
        )
        self._linger_s = linger_ms / 1000
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._max_block_s = max_block_ms / 1000
        self._lock = threading.Condition()
        #: keeps batches of one queue in the order their messages were collected
        self._ship_lock = threading.Lock()
        self._open: dict[tuple[str, int], _Collected] = {}
        self._buffered = 0
        self._sticky: dict[str, int] = {}
        self._closed = False
        self._first_failure: RayMQError | None = None
        self._lingering = threading.Thread(target=self._linger, name="raymq-linger", daemon=True)
        self._lingering.start()

    def send(
        self,
        topic: str | Message,
        body: bytes | None = None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        queue_id: int | None = None,
    ) -> SendFuture:
        """Send one message; a future tells its receipt.

        Without a key and a queue it joins the current batch of its topic. Raises: Rejected at once for a message that
        can never be stored; Unavailable when the buffer stayed full for max_block_ms.
        """
        if isinstance(topic, Message):
            message = topic
            _refuse_delay(message.deliver_at_ms)
            topic, body, key, tag = message.topic, message.body, message.key, message.tag
            index_keys, properties = message.index_keys, dict(message.properties)
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise Rejected(
                f"the body is {type(body).__name__}, expected bytes; encode it first", field="body", limit="bytes"
            )
        body = bytes(body)
        encoded = encode_properties(key, index_keys, properties)
        size = len(body) + len(encoded) + 128
        _check_one(topic, body, tag, encoded)
        future = SendFuture()
        with self._lock:
            self._wait_room(size)
            where = (topic, self._queue(topic, key, queue_id))
            self._sender.topic(topic).shard_of(where[1])
            collected = self._open.get(where)
            if collected is None:
                collected = self._open[where] = _Collected(since=time.monotonic())
                self._lock.notify_all()
            collected.bodies.append(body)
            collected.tags.append(tag)
            collected.properties.append(encoded)
            collected.born.append(time.time_ns() // 1_000_000)
            collected.futures.append(future)
            collected.bytes += size
            self._buffered += size
            full = self._linger_s <= 0 or collected.bytes >= self._batch_bytes
        if full:
            self._ship(lambda found: found == where)
        return future

    def _wait_room(self, size: int) -> None:
        room = self._lock.wait_for(
            lambda: self._closed or not self._buffered or self._buffered + size <= self._buffer_bytes,
            self._max_block_s,
        )
        if self._closed:
            raise Rejected("the producer is closed", field="producer", limit="open")
        if not room:
            raise Unavailable(
                f"the buffer of {self._buffer_bytes} bytes stayed full for {self._max_block_s:g} s; nothing was sent",
                field="buffer_bytes",
                limit=self._buffer_bytes,
            )

    def _queue(self, topic: str, key: bytes | None, queue_id: int | None) -> int:
        queues = self._sender.topic(topic).queues
        if queue_id is not None:
            return queue_id
        if key is not None:
            return queue_of(key, queues)
        return self._sticky.setdefault(topic, 0) % int(queues)

    # --- shipping -------------------------------------------------------------------------------------------------

    def _ship(self, which: Callable[[tuple[str, int]], bool]) -> None:
        with self._ship_lock:
            with self._lock:
                ready = [(w, self._open.pop(w)) for w in list(self._open) if which(w)]
                for (topic, _), _collected in ready:
                    # The next messages without a key go to the next queue.
                    self._sticky[topic] = self._sticky.get(topic, 0) + 1
            for where, collected in ready:
                self._send(where, collected)

    def _send(self, where: tuple[str, int], collected: _Collected) -> None:
        try:
            batch = put_batch(
                collected.bodies,
                tags=collected.tags,
                properties=collected.properties,
                born_time_ms=collected.born,
            )
            answer = self._sender.send(*where, batch)
        except RayMQError as error:
            self._answered(collected, error)
            return
        answer.add_done_callback(lambda done: self._answered(collected, done))

    def _answered(self, collected: _Collected, answer: Future[BatchReceipt] | RayMQError) -> None:
        error = answer if isinstance(answer, RayMQError) else answer.exception()
        with self._lock:
            self._buffered -= collected.bytes
            if isinstance(error, RayMQError) and self._first_failure is None:
                self._first_failure = error
            self._lock.notify_all()
        if error is not None or isinstance(answer, RayMQError):
            for future in collected.futures:
                future._set(error or Unavailable("no answer"))
            return
        receipt = answer.result()
        known = receipt.first_offset >= 0
        for index, future in enumerate(collected.futures):
            offset = receipt.first_offset + index if known else -1
            future._set(
                Receipt(receipt.topic, receipt.shard, receipt.queue_id, offset, receipt.store_time_ms)
            )

    def _linger(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._open or self._closed)
                if self._closed and not self._open:
                    return
                first = min(c.since for c in self._open.values())
                left = first + self._linger_s - time.monotonic()
                if left > 0 and not self._closed:
                    self._lock.wait(left)
                now = time.monotonic()
                due = {
                    where
                    for where, c in self._open.items()
                    if self._closed or c.since + self._linger_s <= now
                }
            self._ship(lambda where, due=due: where in due)  # type: ignore[misc]

    # --- end ------------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Send what waits and wait until everything is answered. Raises: DeliveryUnknown when the time is up."""
        self._ship(lambda _where: True)
        self._sender.flush(timeout)

    def close(self) -> None:
        """Flush, then close. Failed sends tell it through their futures."""
        if not self._closed:
            self.flush()
            with self._lock:
                self._closed = True
                self._lock.notify_all()
            self._lingering.join()
            self._sender.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        self.close()
        if kind is None and self._first_failure is not None:
            raise self._first_failure

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "producers do not pickle: pickle the Cluster and make the producer where it is used"
        )


def _refuse_delay(deliver_at_ms: int | None) -> None:
    if deliver_at_ms is not None:
        raise Rejected(
            "deliver_at_ms: delayed delivery is not available in this version", field="deliver_at_ms", limit="None"
        )


def _check_one(topic: str, body: bytes, tag: str | None, encoded: bytes) -> None:
    """A message is refused alone, before it can spoil the batch it would join."""
    from raymq.store.record import check_put

    check_put(
        topic, put_batch([body], tags=[tag], properties=[encoded]), max_message_bytes=4 << 20
    )
