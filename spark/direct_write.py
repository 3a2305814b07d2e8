"""Sends the rows of a task to their queues at once, as a producer that each attempt of the task repeats.

Producer id = hash(write id, partition), and its epoch is a number that shard 0 gives each attempt: a later attempt
fences an earlier one. Sequence = the row's place among its partition's rows of one queue. So a retried task stores the
rows that are missing, if its rows come in the same order as before. Those that are there are compared.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from raymq.cluster.produce.batch_sender import BatchSender
from raymq.cluster.produce.queue_sequence import BatchReceipt
from raymq.cluster.produce.send_future import BatchFuture
from raymq.cluster.transport.away import while_away
from raymq.cluster.transport.routes import Routes
from raymq.store.config.promise import Acks

from .sink_columns import SinkTopic, by_queue
from .stored_rows import StoredRows, check_same

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster


@dataclass(frozen=True)
class QueueReceipt:
    """The rows that one task wrote to one queue."""

    partition: int
    queue_id: int
    shard: int
    rows: int
    #: rows that an earlier attempt or run had stored
    duplicates: int
    first_offset: int
    last_offset: int


class DirectWrite(NamedTuple):
    """What all tasks of a direct write share. It goes to them by pickle."""

    topic: str
    write_id: str
    #: the topic, as `Cluster.topics` describes it
    facts: Mapping[str, Any]
    acks: Acks
    #: whether rows that an earlier attempt or run has stored are compared
    verify: bool

    def send(
        self, cluster: Cluster, partition: int, batches: Iterable[pa.RecordBatch]
    ) -> list[QueueReceipt]:
        """Send the rows of one task, which is not empty. Returns: a receipt for each queue, when all rows are stored.

        Raises: Rejected for a value that the topic does not take, or when an earlier attempt has stored other rows;
        Fenced if another attempt began later; Unavailable.
        """
        producer = _begin(cluster, self.write_id, partition, self.facts)
        target = SinkTopic.of(self.topic, self.facts)._replace(queues=producer.queues)
        sender = BatchSender(
            Routes.of(cluster),
            producer_id=producer.producer_id,
            epoch=producer.epoch,
            acks=self.acks,
        )
        task = _Task(self, cluster, partition, producer.producer_id)
        with closing(sender):
            for turn, batch in enumerate(batches, partition):
                parts = by_queue(batch, {self.topic: target}, topic=self.topic, turn=turn)
                for _, queue_id, rows in parts:
                    task.sent(queue_id, rows, sender.send(self.topic, queue_id, rows))
            return task.finish()


class _Producer(NamedTuple):
    """The producer of one attempt of a task."""

    producer_id: int
    epoch: int
    #: the number of queues that the rows of the task are spread over
    queues: int


def _begin(cluster: Cluster, write_id: str, partition: int, facts: Mapping[str, Any]) -> _Producer:
    """Begin an attempt. A repeated task uses the number of queues that the topic had at the first attempt.

    With another number rows would go to other queues, and their shards would take them for new ones. Shard 0 knows
    all attempts, however many shards were added meanwhile.
    """
    queues = int(facts["queues"])
    for former in facts.get("former_queues", ()):
        arguments = {"producer_id": producer_id_of(write_id, partition, former)}
        known = while_away(partial(cluster.call, 0, "producer_epoch", arguments))
        if known["epoch"] is not None:
            queues = int(former)
            break
    producer_id = producer_id_of(write_id, partition, queues)
    arguments = {"producer_id": producer_id}
    begun = while_away(lambda: cluster.call(0, "init_producer", arguments))
    return _Producer(producer_id, int(begun["epoch"]), queues)


def producer_id_of(write_id: str, partition: int, queues: int) -> int:
    """The producer id of one partition of a write to so many queues: 64 bits of a hash."""
    text = f"{write_id}/{partition}/{queues}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class _SentRows(NamedTuple):
    """A batch without a receipt yet."""

    queue_id: int
    #: the sequence of its first row
    first_sequence: int
    rows: pa.RecordBatch
    receipt: BatchFuture


class _Task:
    """The batches of one task on their way, in their order, and the receipts of those before."""

    def __init__(
        self, write: DirectWrite, cluster: Cluster, partition: int, producer_id: int
    ) -> None:
        self._write = write
        self._cluster = cluster
        self._partition = partition
        self._producer_id = producer_id
        self._under_way: deque[_SentRows] = deque()
        #: queue -> the sequence of its next row
        self._sequences: dict[int, int] = {}
        self._receipts: dict[int, QueueReceipt] = {}

    def sent(self, queue_id: int, rows: pa.RecordBatch, receipt: BatchFuture) -> None:
        """Take a batch that was sent. Batches whose receipts have come are let go. Raises: the first failure."""
        first = self._sequences.get(queue_id, 0)
        self._sequences[queue_id] = first + rows.num_rows
        self._under_way.append(_SentRows(queue_id, first, rows, receipt))
        while self._under_way and self._under_way[0].receipt.done():
            self._complete(self._under_way.popleft())

    def finish(self) -> list[QueueReceipt]:
        """Wait for the receipts. Raises: the first failure."""
        while self._under_way:
            self._complete(self._under_way.popleft())
        return list(self._receipts.values())

    def _complete(self, sent: _SentRows) -> None:
        stored: BatchReceipt = sent.receipt.result()
        if stored.duplicates and self._write.verify:
            repeated = StoredRows(
                self._producer_id,
                stored.topic,
                stored.queue_id,
                stored.shard,
                sent.first_sequence,
                stored.first_offset,
                stored.last_offset,
            )
            check_same(self._cluster, sent.rows.slice(0, stored.duplicates), repeated)

        empty = QueueReceipt(
            self._partition, sent.queue_id, stored.shard, 0, 0, stored.first_offset, -1
        )
        have = self._receipts.get(sent.queue_id, empty)
        self._receipts[sent.queue_id] = replace(
            have,
            rows=have.rows + stored.count,
            duplicates=have.duplicates + stored.duplicates,
            last_offset=stored.last_offset,
        )
