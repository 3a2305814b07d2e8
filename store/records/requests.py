"""Requests to a shard and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from raymq.store.base.arrays import Int32s
from raymq.store.base.errors import RayMQError
from raymq.store.config.promise import Acks

from .small_batch import SmallBatch

#: (topic, queue id)
_QueueKey: TypeAlias = tuple[str, int]


class PutRequest(NamedTuple):
    """One batch of one queue: columns of record.PUT_SCHEMA, or a few rows."""

    topic: str
    queue_id: int
    batch: pa.RecordBatch | SmallBatch
    #: None: not idempotent, no stamp in the records
    producer_id: int | None
    epoch: int
    #: sequence of the batch's first row, per producer and queue
    first_sequence: int
    acks: Acks
    #: the shard has checked the rows before, when they were staged. Only `staged_rows.publish` says so: no message of
    #: the network has this field
    was_staged: bool = False
    #: of the bodies, if the shard has their records already; None: they are computed. No message of the network has
    #: this field either
    body_crcs: Int32s | None = None
    #: (IP, port) of the producer, as the connection shows it; None: not known, the records name the store host
    born_host: tuple[str, int] | None = None
    #: the sequences before the first one may never come: the rows begin a batch of a stream (`StreamBatch`), or are its
    #: decision. No message of the network has this field either
    may_skip: bool = False


class AppendedRows(NamedTuple):
    """The place of appended rows, which are not synced yet."""

    #: queue offset of the batch's first row; -1 if it is a duplicate that the log has deleted
    first_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    #: leading rows that were stored before
    duplicates: int
    store_time_ms: int
    #: physical offset of the first new record; -1 without one
    physical_offset: int
    #: end of the last record: the promise is kept once it is kept for everything below this
    end_offset: int
    #: queue offset of the batch's last row; -1 as above. Duplicates that were stored in several batches may have other
    #: rows between them: then the two offsets differ by more than `count` - 1
    last_offset: int = -1
    #: False: every row says WAIT=false, so the answer waits neither for the flush nor for replicas
    wait_store_ok: bool = True

    @classmethod
    def up_to(cls, end_offset: int) -> AppendedRows:
        """No rows of its own: its promise is kept once it is kept for all records below `end_offset`."""
        return cls(
            first_offset=-1,
            count=0,
            duplicates=0,
            store_time_ms=0,
            physical_offset=-1,
            end_offset=end_offset,
        )


class PutOutcome(NamedTuple):
    """The answer to a producer."""

    first_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    duplicates: int
    store_time_ms: int
    #: of the first new record; -1 without one
    physical_offset: int
    last_offset: int = -1
    #: end of the last record; -1 when it is not known
    end_offset: int = -1

    @classmethod
    def of(cls, appended: AppendedRows) -> PutOutcome:
        """The answer for rows that were appended. The first five fields of both are the same."""
        # Runs once for each put: the class's own `__new__` would cost one more call.
        return tuple.__new__(cls, (*appended[:5], appended.last_offset, appended.end_offset))


class MessageSelector(NamedTuple):
    """What a reader wants of a topic. Source: MessageSelector of RocketMQ's clients."""

    #: TAG or SQL92
    kind: str
    #: of the kind: `TagA || TagB`, `amount > 10 AND region = 'eu'`
    expression: str


class FetchRequest(NamedTuple):
    """A read of some queues of a topic, or of several. It waits up to `wait_ms` if none has a message."""

    topic: str
    #: queue -> offset to read from
    offsets: dict[int, int]
    max_bytes: int
    max_records: int
    wait_ms: int
    #: the newest epoch that the reader has seen, 0: none. Then any replica may answer, if it has heard that epoch and
    #: has the messages before the offsets. None: only the leader answers
    seen_epoch: int | None = None
    #: only these messages; None: all
    wanted: MessageSelector | None = None
    #: further topics: their queues -> offsets
    others: dict[str, dict[int, int]] | None = None
    #: topic -> how often one of its name had been deleted when the reader began, if that ever happened
    generations: dict[str, int] | None = None

    def generation(self, topic: str) -> int:
        """How often a topic of this name had been deleted when the reader began."""
        return 0 if self.generations is None else self.generations.get(topic, 0)

    def by_topic(self) -> list[tuple[str, dict[int, int]]]:
        """Each topic with its queues -> offsets."""
        first = [(self.topic, self.offsets)]
        return [*first, *self.others.items()] if self.others else first

    def queues(self) -> dict[_QueueKey, int]:
        """(topic, queue) -> offset, of all topics, in the order of the request."""
        return {
            (topic, queue_id): offset
            for topic, offsets in self.by_topic()
            for queue_id, offset in offsets.items()
        }

    def key_of(self, part: FetchSlice) -> _QueueKey:
        """The queue of an answer."""
        return part.topic or self.topic, part.queue_id

    def move(self, ends: Mapping[_QueueKey, int]) -> FetchRequest:
        """The same read from other offsets of some of its queues."""
        moved = {
            topic: {queue: ends.get((topic, queue), offset) for queue, offset in offsets.items()}
            for topic, offsets in self.by_topic()
        }
        offsets = moved.pop(self.topic)
        return self._replace(offsets=offsets, others=moved or None)


class FetchSlice(NamedTuple):
    """Records [first_offset, next_offset) of one queue, which holds [min_offset, max_offset).

    There may be fewer records than offsets, and none: nothing else between the two is there and wanted. The reader goes
    on at `next_offset`.
    """

    queue_id: int
    first_offset: int
    next_offset: int
    min_offset: int
    max_offset: int
    #: raw RocketMQ records, a binary column
    records: pa.Array | None
    error: RayMQError | None
    #: of the leader that confirmed the records; 0 for a reader that asked only the leader
    epoch: int = 0
    #: empty: the first one of the request
    topic: str = ""
