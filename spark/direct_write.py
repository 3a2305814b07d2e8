"""Sends the rows of a task to their queues at once, as a producer that each attempt of the task repeats.

Producer id = hash(topic, write id, partition, number of queues), and its epoch is a number that shard 0 gives each
attempt. At its begin an attempt fences the earlier ones on all shards, and learns which rows they have stored.
Sequence = the row's place among its partition's rows of one queue. The attempt compares its rows with those that are
stored, and stores the others. So it needs the same rows in the same order as the attempts before.
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

from raymq.client.messages.queue_split import numbered, start_of
from raymq.client.messages.row_numbers import renumbered
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.queue_sequence import BatchReceipt
from raymq.client.produce.send_future import BatchFuture
from raymq.client.staged.committer import DECIDING_SHARD
from raymq.client.staged.write_commit import StagedRows, WriteDecision
from raymq.client.transport.away import while_away
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Fenced, Rejected
from raymq.store.config.promise import Acks

from .sink_columns import SinkTopic, by_queue
from .stored_rows import StoredRows, check_same, other_rows
from .task_batches import without_empty

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


#: partitions beyond those of a write whose rows of an earlier run are looked for: tasks begin in about the order of
#: their partitions, and those without rows do not begin as producers
PARTITIONS_LOOKED_FOR = 4096
#: producers that one call asks for
PRODUCERS_OF_A_CALL = 4096
_SAME_PARTITIONS = (
    "Use the same number of partitions: repartition or coalesce, or the same spark.default.parallelism for files and "
    "ranges. A new write with delivery='staged', for a stream with a new checkpoint, may be repeated with any number"
)


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

    def keep_partitions(self, cluster: ClusterHandle, partitions: int) -> None:
        """Keep the number of partitions of this write durably, or compare it with that of the first run.

        Each partition is a producer of its own. With another number of them rows would be in other partitions, and
        stored twice. Shard 0 keeps the number as a decision, of which the first one counts.
        Raises: Rejected for another number than that of the first run.
        """
        name = f"{self.topic}/{self.write_id}/partitions"
        own = WriteDecision(name, StagedRows((), 0, Clock().now_ms())).to_json()
        decision = {**own, "partitions": partitions}
        arguments = {"decision": decision}
        counted = while_away(lambda: cluster.call(DECIDING_SHARD, "decide_write", arguments))
        first = counted["decision"].get("partitions")
        if first != partitions:
            raise Rejected(
                f"write {self.write_id} to {self.topic} had {first} partitions at its first run, and has {partitions} "
                f"now: with another number rows are stored twice. {_SAME_PARTITIONS}",
                field="writeId",
                limit=first,
                found=partitions,
            )

    def check_other_partitions(self, cluster: ClusterHandle, partitions: int) -> None:
        """Look for rows of partitions that an earlier run had and this one, which has so many, has not.

        Raises: Rejected naming the first such partition; Unavailable.
        """
        numbers = {
            producer_id: partition
            for partition in range(partitions, partitions + PARTITIONS_LOOKED_FOR)
            for producer_id in self._producer_ids(partition)
        }
        for producer_id in _known(cluster, list(numbers)):
            partition = numbers[producer_id]
            # Nothing comes later from there: this fences an attempt that goes on.
            rows = sum(_begin(self, cluster, partition).stored.values())
            if rows:
                raise Rejected(
                    f"write {self.write_id} to {self.topic} has {partitions} partitions now, and had more at an "
                    f"earlier run: its partition {partition}, for example, has {rows} rows. Rows may be stored twice "
                    f"already. {_SAME_PARTITIONS}",
                    field="writeId",
                    limit="the same number of partitions",
                    found=partitions,
                )

    def _producer_ids(self, partition: int) -> list[int]:
        """The producer ids that the attempts of a partition may have."""
        queues = (*self.facts.get("former_queues", ()), self.facts["queues"])
        return [producer_id_of(self.topic, self.write_id, partition, int(each)) for each in queues]

    def send(
        self, cluster: ClusterHandle, partition: int, batches: Iterable[pa.RecordBatch]
    ) -> list[QueueReceipt]:
        """Send the rows of one task. Returns: a receipt for each queue, when all rows are stored.

        A task without rows only looks whether an earlier attempt had some.
        Raises: Rejected for a value that the topic does not take, or when an earlier attempt has stored other rows;
        Fenced if another attempt began later; Unavailable.
        """
        try:
            return self._send(cluster, partition, batches)
        except Fenced as error:
            raise Fenced(
                f"another attempt of partition {partition} of write {self.write_id} to {self.topic}, or the same write "
                f"in another program, has begun later and goes on: {error}",
                **error.fields,
            ) from error

    def _send(
        self, cluster: ClusterHandle, partition: int, batches: Iterable[pa.RecordBatch]
    ) -> list[QueueReceipt]:
        filled = without_empty(iter(batches))
        if filled is None:
            self._check_no_rows(cluster, partition)
            return []

        attempt = _begin(self, cluster, partition)
        target = SinkTopic.of(self.topic, self.facts)._replace(queues=attempt.queues)
        sender = BatchSender(
            Routes.of(cluster),
            producer_id=attempt.producer_id,
            epoch=attempt.epoch,
            acks=self.acks,
        )

        with closing(sender):
            task = _Task(self, cluster, partition, attempt, sender)
            for row, batch in numbered(filled, partition):
                parts = by_queue(
                    batch,
                    {self.topic: target},
                    topic=self.topic,
                    first_row=row,
                    of=f"of partition {partition}",
                    start=start_of(row, partition),
                )
                for _, queue_id, rows in parts:
                    task.write(queue_id, rows)
            return task.finish()

    def _check_no_rows(self, cluster: ClusterHandle, partition: int) -> None:
        """Raises: Rejected if an earlier attempt of the partition, which has no rows now, has stored some."""
        if self.verify and _known(cluster, self._producer_ids(partition)):
            _check_excess(self, _begin(self, cluster, partition), {})


def _known(cluster: ClusterHandle, producer_ids: list[int]) -> list[int]:
    """Those of these producers that have begun, on whatever shard: shard 0 gives all of them their epochs."""
    found: list[int] = []
    for first in range(0, len(producer_ids), PRODUCERS_OF_A_CALL):
        arguments = {"producer_ids": producer_ids[first : first + PRODUCERS_OF_A_CALL]}
        found += while_away(partial(cluster.call, 0, "known_producers", arguments))["producer_ids"]
    return found


class _Attempt(NamedTuple):
    """The producer of one attempt of a task."""

    producer_id: int
    epoch: int
    #: the number of queues that the rows of the task are spread over
    queues: int
    #: queue -> how many rows earlier attempts have stored
    stored: dict[int, int]


def _begin(write: DirectWrite, cluster: ClusterHandle, partition: int) -> _Attempt:
    """Begin an attempt. A repeated task uses the number of queues that the topic had at the first attempt.

    With another number rows would go to other queues, and their shards would take them for new ones. Shard 0 knows
    all attempts, however many shards were added meanwhile.
    """
    facts = write.facts
    queues = int(facts["queues"])
    for former in map(int, facts.get("former_queues", ())):
        if _known(cluster, [producer_id_of(write.topic, write.write_id, partition, former)]):
            queues = former
            break

    producer_id = producer_id_of(write.topic, write.write_id, partition, queues)
    # Repeated after an answer that was lost, it only gives a higher epoch.
    begun = while_away(lambda: cluster.call(0, "init_producer", {"producer_id": producer_id}))
    epoch = int(begun["epoch"])

    stored: dict[int, int] = {}
    arguments = {"producer_id": producer_id, "epoch": epoch, "topic": write.topic}
    for shard in sorted(set(facts["shards"])):
        fenced = while_away(partial(cluster.call, shard, "fence_producer", arguments))
        stored.update({int(queue): rows for queue, rows in fenced["sequences"].items()})
    return _Attempt(producer_id, epoch, queues, stored)


def producer_id_of(topic: str, write_id: str, partition: int, queues: int) -> int:
    """The producer id of one partition of a write to so many queues of a topic: 64 bits of a hash."""
    text = f"{topic}/{write_id}/{partition}/{queues}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class _Task:
    """The rows of one attempt. Each queue gets them in their order."""

    def __init__(
        self,
        write: DirectWrite,
        cluster: ClusterHandle,
        partition: int,
        attempt: _Attempt,
        sender: BatchSender,
    ) -> None:
        self._write = write
        self._cluster = cluster
        self._partition = partition
        self._attempt = attempt
        self._sender = sender
        #: queue -> the sequence of its next row
        self._sequences: dict[int, int] = {}
        #: batches of new rows without a receipt yet
        self._under_way: deque[tuple[int, BatchFuture]] = deque()
        self._receipts: dict[int, QueueReceipt] = {}

    def write(self, queue_id: int, rows: pa.RecordBatch) -> None:
        """Compare the rows that are stored, and send the others. Raises: the first failure, also of earlier rows."""
        first = self._sequences.get(queue_id, 0)
        self._sequences[queue_id] = first + rows.num_rows
        repeated = self._attempt.stored.get(queue_id, 0) - first
        if repeated > 0:
            # No later row is sent before these are compared.
            self._repeat(queue_id, first, rows.slice(0, repeated))
            rows = rows.slice(repeated)
        if rows.num_rows:
            receipt = self._sender.send(self._write.topic, queue_id, rows)
            self._under_way.append((queue_id, receipt))
        while self._under_way and self._under_way[0][1].done():
            self._complete()

    def _repeat(self, queue_id: int, first_sequence: int, rows: pa.RecordBatch) -> None:
        receipt = self._stored(queue_id, self._sender.send(self._write.topic, queue_id, rows))
        if self._write.verify:
            where = (receipt.topic, queue_id, receipt.shard)
            offsets = (receipt.first_offset, receipt.last_offset)
            check_same(
                self._cluster,
                rows,
                StoredRows(self._attempt.producer_id, *where, first_sequence, *offsets),
            )
        self._add(queue_id, receipt, duplicates=receipt.duplicates)

    def _complete(self) -> None:
        queue_id, receipt = self._under_way.popleft()
        stored = self._stored(queue_id, receipt)
        # Rows that count as duplicates here were sent twice by this attempt.
        self._add(queue_id, stored, duplicates=0)

    def _stored(self, queue_id: int, receipt: BatchFuture) -> BatchReceipt:
        """The receipt of a batch. Raises: as the shard; a row that it refuses counts in the batch."""
        try:
            return receipt.result()
        except Rejected as error:
            if error.fields.get("row") is None:
                raise
            of = f"of a batch of partition {self._partition} for queue {queue_id}"
            raise renumbered(error, error.fields["row"], of) from None

    def _add(self, queue_id: int, stored: BatchReceipt, *, duplicates: int) -> None:
        where = (self._partition, queue_id, stored.shard)
        own = self._receipts.get(queue_id) or QueueReceipt(*where, 0, 0, stored.first_offset, -1)
        self._receipts[queue_id] = replace(
            own,
            rows=own.rows + stored.count,
            duplicates=own.duplicates + duplicates,
            last_offset=stored.last_offset,
        )

    def finish(self) -> list[QueueReceipt]:
        """Wait for the receipts. Raises: the first failure; Rejected if an earlier attempt has stored more rows."""
        while self._under_way:
            self._complete()
        if self._write.verify:
            _check_excess(self._write, self._attempt, self._sequences)
        return list(self._receipts.values())


def _check_excess(write: DirectWrite, attempt: _Attempt, own_rows: Mapping[int, int]) -> None:
    """Raises: Rejected if earlier attempts have stored more rows than this one has. Args: `own_rows`: of each queue."""
    for queue_id, rows in attempt.stored.items():
        own = own_rows.get(queue_id, 0)
        if rows > own:
            raise other_rows(
                f"{rows} rows in queue {queue_id} of {write.topic}, of which this attempt has {own}"
            )
