"""Finding messages: by key, by message id, by physical offset, by time.

Source: DefaultMessageStore#queryMessage, #lookMessageByOffset, #getOffsetInQueueByTime, RocketMQ 5.3.3.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, RayMQError, Rejected
from raymq.store.base.rules import READABLE_RULE
from raymq.store.log.commit_log import CommitLog
from raymq.store.queues.consume_queue import BLANK_SIZE, ConsumeQueue
from raymq.store.queues.consume_queues import ConsumeQueues
from raymq.store.records import record
from raymq.store.records.record_decode import decode_column

from .index_service import IndexService
from .key_search import TIME_MAX_MS, KeyHits, KeySearch
from .query_keys import KeyQuery, check_query

#: bytes read for one record. A larger record is read once more, whole
FIRST_READ_BYTES_BY_OFFSET = 8 << 10


class Boundary(Enum):
    """The offset that a time is mapped to."""

    #: the first message stored at that time or later
    LOWER = "lower"
    #: the last message stored at that time or earlier
    UPPER = "upper"


class QueryResult(NamedTuple):
    """Messages found by key."""

    #: the messages, of RECORD_SCHEMA, in the order of the log
    records: pa.RecordBatch
    #: store time (ms) and physical offset of the newest record that is indexed; 0 without one
    index_last_time_ms: int
    index_last_offset: int


class Query:
    """Finds confirmed messages by key, message id, physical offset or time. Callers: any thread."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues, index: IndexService) -> None:
        self._log = log
        self._queues = queues
        self._index = index
        self._one_key = KeySearch(log, index)

    # --- by key -----------------------------------------------------------------------------------

    def by_key(
        self,
        topic: str,
        key: str,
        *,
        max_num: int = 64,
        begin_ms: int = 0,
        end_ms: int = TIME_MAX_MS,
        exact: bool = False,
    ) -> QueryResult:
        """The newest messages of a topic with a key or unique key, stored in [begin_ms, end_ms].

        Args: `max_num`: at most `config.max_msgs_num_batch` are returned. `exact`: without it messages of other keys
        and topics with the same hash are returned too, as by RocketMQ's broker. RocketMQ's clients filter them out.
        Raises: Rejected for a bad number, topic or key.
        Source: DefaultMessageStore#queryMessage. Times are compared exactly. RocketMQ knows the second only.
        """
        hits = self.by_keys(
            topic, [key], max_num=max_num, begin_ms=begin_ms, end_ms=end_ms, exact=exact
        )
        return QueryResult(decode_column(hits.records), *self._index.last)

    def by_keys(
        self,
        topic: str,
        keys: Sequence[str],
        *,
        max_num: int = 64,
        begin_ms: int = 0,
        end_ms: int = TIME_MAX_MS,
        exact: bool = False,
    ) -> KeyHits:
        """The newest messages of each of many keys, found together. Args and errors: as for `by_key`."""
        check_query(topic, keys, max_num)
        limit = min(max_num, self._log.config.max_msgs_num_batch)
        span = (begin_ms, end_ms)
        if len(keys) == 1:
            return self._one_key.find(topic, keys[0], limit, span, exact=exact)
        return KeyQuery(self._log, self._index, topic, span, exact).find(keys, limit)

    # --- by offset --------------------------------------------------------------------------------

    def by_offset(self, offset: int) -> pa.RecordBatch:
        """The record that begins at a physical offset, a batch of one.

        Raises: OffsetOutOfRange if the log holds no confirmed bytes at it, Rejected if no record begins there, Corrupt
        if the record's body is damaged.
        Source: DefaultMessageStore#lookMessageByOffset, which takes any bytes for a record.
        """
        log = self._log
        low, high = log.start, log.confirmed
        if not low <= offset < high:
            raise OffsetOutOfRange(
                f"the log holds offsets {low} to {high}, not {offset}: the message was deleted, or is of another shard",
                min=low,
                max=high,
                offset=offset,
            )

        view, base, walk = log.reads.walk(offset, high, limit=1, nbytes=FIRST_READ_BYTES_BY_OFFSET)
        if walk.reason is record.WalkStop.UNREADABLE:
            raise log.reads.damage(offset, READABLE_RULE)
        if walk.reason is record.WalkStop.BAD_CRC:
            fault = f"the body of the record at offset {offset} is damaged: its CRC differs"
            raise Corrupt(fault, path=str(log.root / "commitlog"), offset=offset, rule="body CRC")

        batch = record.decode(view, walk.positions - base, walk.sizes)
        if not batch.num_rows or self._is_inside_another(batch):
            raise Rejected(
                f"no record begins at offset {offset}; message ids come from receipts and queries",
                field="offset",
                limit="the start of a record",
            )
        return batch

    def _is_inside_another(self, batch: pa.RecordBatch) -> bool:
        """Whether these bytes only look like a record: a body may hold anything."""
        row = {
            name: batch.column(name)[0].as_py()
            for name in ("topic", "queue_id", "queue_offset", "physical_offset")
        }
        queue = self._queues.find(row["topic"], row["queue_id"])
        if queue is None or not queue.min_offset <= row["queue_offset"] < queue.max_offset:
            return False
        if (batch.column("sys_flag")[0].as_py() & fmt.SYS_TRANSACTION_MASK) in fmt.SYS_UNQUEUED:
            return False
        units = queue.read(row["queue_offset"], 1)
        return len(units) == 1 and int(units["position"][0]) != row["physical_offset"]

    def by_id(self, message_id: str) -> pa.RecordBatch:
        """The record that an offset message id names, a batch of one.

        Raises: Rejected for a malformed id or one of another store. Otherwise as `by_offset`.
        Source: MessageDecoder#decodeMessageId.
        """
        host, offset = fmt.parse_message_id(message_id)
        batch = self.by_offset(offset)
        stored = batch.column("store_host")[0].as_py()
        if stored != host:
            raise Rejected(
                f"message id {message_id} was given by {host}; the record at its offset was stored by {stored}",
                field="message_id",
                limit=stored,
            )
        return batch

    # --- by time ----------------------------------------------------------------------------------

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """The queue offset that a store time is mapped to.

        Returns: for LOWER the first message at or after the time, or the next offset if there is none. For UPPER the
        last message at or before it, or the oldest offset if there is none. 0 for a queue that does not exist.
        Source: ConsumeQueue#getOffsetInQueueByTime, which returns offsets of deleted messages for times before them.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return 0
        times = _StoreTimes(self._log, queue)
        if boundary is Boundary.LOWER:
            return times.low + bisect_left(times.offsets, time_ms, key=times.at)
        return max(times.low, times.low + bisect_right(times.offsets, time_ms, key=times.at) - 1)

    def oldest_of(self, topic: str, offsets: Mapping[int, int]) -> int | None:
        """The oldest of the messages at these offsets of queues of a topic: its place in the log.

        Args: `offsets`: queue -> offset. One without a message is left out. Returns: None: no offset has a message. The
        log has messages in the order of their store times, so that no record is read.
        """
        places = []
        for queue_id, offset in offsets.items():
            queue = self._queues.find(topic, queue_id)
            if queue is not None and offset < queue.max_offset:
                units = queue.read(max(offset, queue.min_offset), 1)
                places += [int(each["position"]) for each in units if each["size"] != BLANK_SIZE]
        return min(places, default=None)

    def store_time_at(self, place: int) -> int | None:
        """Store time (ms) of the record at a place of the log; None: it is not there any more."""
        try:
            return _store_time(self._log, place)
        except (RayMQError, OSError):
            # Others report a disk that does not answer.
            return None

    def earliest_store_time(self, topic: str, queue_id: int) -> int | None:
        """Store time (ms) of a queue's oldest message; None without one.

        Source: DefaultMessageStore#getEarliestMessageTime(topic, queueId).
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None or queue.min_offset >= queue.max_offset:
            return None
        return _StoreTimes(self._log, queue).at(queue.min_offset)

    def earliest_store_time_of_all(self) -> int | None:
        """Store time (ms) of the oldest record of the log; None without one."""
        log = self._log
        return _store_time(log, log.start) if log.start < log.confirmed else None


class _StoreTimes:
    """Store times of a queue's messages, read from the log on demand."""

    def __init__(self, log: CommitLog, queue: ConsumeQueue) -> None:
        self._log = log
        self._queue = queue
        self.low = queue.min_offset
        self.offsets = range(self.low, queue.max_offset)

    def at(self, offset: int) -> int:
        """The store time of a message; -1 for a deleted one. For a gap it is that of the next message."""
        while offset < self.offsets.stop:
            units = self._queue.read(offset, 1 + (1 << 12))
            with_record = np.flatnonzero(units["size"] != BLANK_SIZE)
            if len(with_record):
                try:
                    return _store_time(self._log, int(units["position"][with_record[0]]))
                except OffsetOutOfRange:
                    return -1
            offset += max(1, len(units))
        return TIME_MAX_MS


def _store_time(log: CommitLog, position: int) -> int:
    return fmt.store_time_ms(log.reads.raw(position, position + fmt.STORE_TIME_END_MAX))
