"""Sends batches exactly once: sequences, order, and the same again after every kind of failure (design D7).

One lane a shard: a put stream with a sender (whoever calls `send`) and a receiver thread. When a stream breaks, or a
shard says "not now" or "unknown", the receiver connects anew and sends everything unanswered again, in order, with
the same sequences; the shard recognises what it stored.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from raymq.store.errors import (
    DeliveryUnknown,
    Fenced,
    RayMQError,
    Rejected,
    Unavailable,
    from_wire,
)
from raymq.store.record import check_put

from .flight_client import PutStream, ShardConnection

if TYPE_CHECKING:
    from .cluster import Cluster

#: between two attempts to reach a shard
RETRY_S = 0.1
#: Kafka's delivery.timeout.ms
DELIVERY_TIMEOUT_MS = 120_000
IN_FLIGHT_BYTES_MAX = 64 << 20
BODY_BYTES_MAX = 4 << 20


class BatchReceipt(NamedTuple):
    """The promise for this batch was kept."""

    topic: str
    shard: int
    queue_id: int
    first_offset: int
    count: int
    #: leading rows that were stored by an earlier send
    duplicates: int
    store_time_ms: int


@dataclass
class Unanswered:
    """A batch under way."""

    topic: str
    queue_id: int
    sequence: int
    batch: pa.RecordBatch
    future: Future[BatchReceipt]
    deadline: float
    number: int = 0
    #: it was written to a stream at least once, so it may be stored
    sent: bool = False


class BatchSender:
    """Idempotent sender of PUT_SCHEMA batches. Threads may share it; it neither pickles nor survives a fork."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        producer_id: int | None = None,
        epoch: int = 0,
        acks: str = "quorum",
        delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS,
        in_flight_bytes: int = IN_FLIGHT_BYTES_MAX,
    ) -> None:
        if acks not in ("quorum", "leader"):
            raise Rejected(f"acks is {acks!r}; use 'quorum' or 'leader'", field="acks", limit="quorum|leader")
        self.cluster = cluster
        self.producer_id = secrets.randbits(64) if producer_id is None else producer_id
        self.epoch = epoch
        self.acks = acks
        self.delivery_timeout_s = delivery_timeout_ms / 1000
        self.in_flight_bytes = in_flight_bytes
        self._pid = os.getpid()
        self._lanes: dict[int, _Lane] = {}
        self._lock = threading.Lock()
        self._topics: dict[str, dict[str, Any]] = {}

    def topic(self, name: str) -> dict[str, Any]:
        """{"queues", "shards"} of a topic. Raises: Rejected when there is none."""
        facts = self._topics.get(name)
        if facts is None:
            self._topics = self.cluster.topics()
            facts = self._topics.get(name)
        if facts is None:
            from raymq.store.format import check_topic_name

            check_topic_name(name)
            raise Rejected(
                f"topic {name!r} does not exist; create it: raymq topic create {name}",
                field="topic",
                limit="an existing topic",
            )
        return facts

    def shard_of(self, topic: str, queue_id: int) -> int:
        """The shard that stores a queue. Raises: Rejected for a queue that does not exist."""
        facts = self.topic(topic)
        if not 0 <= queue_id < facts["queues"]:
            raise Rejected(
                f"queue {queue_id} of topic {topic} does not exist; it has queues 0 to {facts['queues'] - 1}",
                field="queue_id",
                limit=facts["queues"] - 1,
            )
        shards = facts["shards"]
        return int(shards[queue_id % len(shards)])

    def send(self, topic: str, queue_id: int, batch: pa.RecordBatch) -> Future[BatchReceipt]:
        """Send one batch of one queue; blocks while too many bytes are unanswered.

        Raises: Rejected at once for a batch that can never be stored; nothing was sent then.
        """
        if os.getpid() != self._pid:
            raise Rejected(
                "this producer was made before a fork; make one in this process", field="process", limit="one process"
            )
        check_put(topic, batch, max_message_bytes=BODY_BYTES_MAX)
        shard = self.shard_of(topic, queue_id)
        with self._lock:
            lane = self._lanes.get(shard)
            if lane is None:
                lane = self._lanes[shard] = _Lane(self, shard)
        return lane.send(topic, queue_id, batch)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything sent is answered. Returns: False when the time was up first."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        return all(lane.wait_empty(end) for lane in list(self._lanes.values()))

    def close(self) -> None:
        """Give up what is unanswered and close the streams; call `flush` before."""
        for lane in list(self._lanes.values()):
            lane.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "producers do not pickle: pickle the Cluster and make the producer where it is used"
        )


class _Lane:
    """One shard: what is unanswered, and the stream it goes through.

    Invariant: `_unanswered` is in sending order; `_stream` is None while nobody may write.
    """

    def __init__(self, sender: BatchSender, shard: int) -> None:
        self._sender = sender
        self._shard = shard
        self._changed = threading.Condition()
        self._unanswered: OrderedDict[int, Unanswered] = OrderedDict()
        self._bytes = 0
        self._number = 0
        self._sequences: dict[tuple[str, int], int] = {}
        self._stream: PutStream | None = None
        self._connection: ShardConnection | None = None
        self._closed = False
        self._failed: RayMQError | None = None
        self._last_error: RayMQError | None = None
        threading.Thread(target=self._run, name=f"raymq-acks-{shard}", daemon=True).start()
        threading.Thread(target=self._watch, name=f"raymq-deadlines-{shard}", daemon=True).start()

    def send(self, topic: str, queue_id: int, batch: pa.RecordBatch) -> Future[BatchReceipt]:
        future: Future[BatchReceipt] = Future()
        with self._changed:
            limit = self._sender.in_flight_bytes
            self._changed.wait_for(
                lambda: self._bytes == 0 or self._bytes + batch.nbytes <= limit or self._stopped
            )
            if self._failed is not None:
                raise self._failed
            if self._closed:
                raise Rejected("the producer is closed", field="producer", limit="open")
            key = (topic, queue_id)
            sequence = self._sequences.get(key, 0)
            self._sequences[key] = sequence + batch.num_rows
            deadline = time.monotonic() + self._sender.delivery_timeout_s
            item = Unanswered(topic, queue_id, sequence, batch, future, deadline)
            self._bytes += batch.nbytes
            self._enqueue(item)
            if self._stream is not None:
                self._write(item)
            self._changed.notify_all()
        return future

    @property
    def _stopped(self) -> bool:
        return self._closed or self._failed is not None

    def _enqueue(self, item: Unanswered) -> None:
        self._number += 1
        item.number = self._number
        self._unanswered[item.number] = item

    def _write(self, item: Unanswered) -> None:
        """Write to the stream; a broken one is left to the receiver, which hears of it too."""
        stream = self._stream
        if stream is None:
            return
        meta = {
            "id": item.number,
            "topic": item.topic,
            "queue": item.queue_id,
            "pid": self._sender.producer_id,
            "epoch": self._sender.epoch,
            "seq": item.sequence,
            "acks": self._sender.acks,
        }
        item.sent = True
        try:
            stream.send(meta, item.batch)
        except RayMQError as error:
            self._last_error = error
            self._stream = None
            stream.close()

    # --- the receiver ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unanswered or self._stopped)
                if self._stopped:
                    return
            stream = self._connect()
            if stream is None:
                time.sleep(RETRY_S)
                continue
            again = self._receive(stream)
            with self._changed:
                self._stream = None
            stream.close()
            if again:
                time.sleep(RETRY_S)

    def _connect(self) -> PutStream | None:
        cluster = self._sender.cluster
        try:
            if self._last_error is not None:
                cluster.refresh()
            endpoint = cluster.endpoints.get(self._shard)
            if endpoint is None:
                cluster.refresh()
                raise Unavailable(f"shard {self._shard} is not known yet", shard=self._shard)
            if self._connection is None or self._last_error is not None:
                if self._connection is not None:
                    self._connection.close()
                self._connection = ShardConnection(
                    endpoint, cluster.token, cluster_id=cluster.cluster_id, shard=self._shard
                )
            stream = self._connection.put_stream()
        except RayMQError as error:
            self._last_error = error
            if isinstance(error, Rejected) and error.fields.get("field") == "token":
                self._fail_all(error)
            return None
        with self._changed:
            self._stream = stream
            for item in list(self._unanswered.values()):
                if self._stream is None:
                    return None
                self._write(item)
        return stream

    def _receive(self, stream: PutStream) -> bool:
        """Handle acks until the stream ends. Returns: whether to wait before the next attempt."""
        while True:
            try:
                acks = stream.receive()
            except RayMQError as error:
                if isinstance(error, Rejected):
                    self._fail_all(error)
                self._last_error = error
                return True
            self._last_error = None
            for ack in acks:
                if "error" not in ack:
                    self._done(ack)
                elif not self._refused(ack["id"], from_wire(ack["error"])):
                    return True

    def _done(self, ack: dict[str, Any]) -> None:
        with self._changed:
            item = self._unanswered.pop(ack["id"], None)
            if item is None:
                return
            self._bytes -= item.batch.nbytes
            self._changed.notify_all()
        item.future.set_result(
            BatchReceipt(
                item.topic,
                self._shard,
                item.queue_id,
                ack["first_offset"],
                ack["count"],
                ack["duplicates"],
                ack["store_time_ms"],
            )
        )

    def _refused(self, number: int, error: RayMQError) -> bool:
        """Returns: False when the stream must be made anew and everything sent again."""
        if error.retriable:
            self._last_error = error
            return False
        if isinstance(error, Fenced):
            self._fail_all(error)
            return True
        with self._changed:
            item = self._unanswered.pop(number, None)
            if item is None:
                return True
            self._bytes -= item.batch.nbytes
            self._renumber(item)
            self._changed.notify_all()
        item.future.set_exception(error)
        return True

    def _renumber(self, refused: Unanswered) -> None:
        """Nothing of a refused batch was stored: what follows it in its queue takes over its sequences."""
        key = (refused.topic, refused.queue_id)
        sequence = refused.sequence
        for item in [i for i in self._unanswered.values() if (i.topic, i.queue_id) == key]:
            if item.sequence < sequence:
                continue
            # A new number: the answer to the old sequence, a gap by now, is not this one's.
            del self._unanswered[item.number]
            item.sequence = sequence
            sequence += item.batch.num_rows
            self._enqueue(item)
            self._write(item)
        self._sequences[key] = sequence

    # --- giving up ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopped:
            time.sleep(0.2)
            now = time.monotonic()
            with self._changed:
                head = next(iter(self._unanswered.values()), None)
                late = head is not None and now > head.deadline
            if late:
                why = self._last_error or "no answer"
                self._fail_all(
                    DeliveryUnknown(
                        f"not acknowledged within {self._sender.delivery_timeout_s:g} s ({why}): the message may or "
                        "may not be stored",
                        status="UNKNOWN_ERROR",
                    )
                )

    def _fail_all(self, error: RayMQError) -> None:
        """What follows an unknown batch cannot keep its order: the lane ends."""
        with self._changed:
            self._failed = error
            items = list(self._unanswered.values())
            self._unanswered.clear()
            self._bytes = 0
            stream, self._stream = self._stream, None
            self._changed.notify_all()
        if stream is not None:
            stream.close()
        for item in items:
            if item.sent or not isinstance(error, DeliveryUnknown):
                item.future.set_exception(error)
            else:
                item.future.set_exception(
                    Unavailable(f"never sent: {self._last_error or error}", shard=self._shard)
                )

    def wait_empty(self, end: float | None) -> bool:
        with self._changed:
            left = None if end is None else max(0.0, end - time.monotonic())
            return self._changed.wait_for(lambda: not self._unanswered, left)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            stream, self._stream = self._stream, None
            items = list(self._unanswered.values())
            self._unanswered.clear()
            self._changed.notify_all()
        if stream is not None:
            stream.close()
        if self._connection is not None:
            self._connection.close()
        for item in items:
            item.future.set_exception(
                DeliveryUnknown("the producer was closed before the answer", status="UNKNOWN_ERROR")
            )
