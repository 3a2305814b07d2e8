"""The timer topic, read through its consume queue."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Corrupt
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.log.commit_log import CommitLog
from raymq.store.queues.consume_queue import BLANK_SIZE, ConsumeQueue
from raymq.store.queues.consume_queues import ConsumeQueues
from raymq.store.records.record_walk import gather

from .delayed_record import undamaged_batch
from .timer_rule import PRECISION_MS, ROLL_WINDOW_MS, Due, due

_NOTHING = Due(
    np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)
)


class TimerRows(NamedTuple):
    """Consecutive records of the timer topic. An offset that the log has deleted has no row."""

    offsets: Int64s
    positions: Int64s
    sizes: Int64s
    due: Due
    #: the offset after the last record
    next_offset: int

    def select(self, kept: Any) -> TimerRows:
        """Some of the records, by a mask or a slice."""
        return TimerRows(
            self.offsets[kept],
            self.positions[kept],
            self.sizes[kept],
            Due._make(column[kept] for column in self.due),
            self.next_offset,
        )


class TimerTopic:
    """Reads confirmed records. Callers: any thread."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues) -> None:
        self._log = log
        self._queues = queues

    @property
    def end(self) -> int:
        """Offset after the last confirmed record."""
        return self._queues.range(TIMER_TOPIC, 0)[1]

    def _queue(self) -> ConsumeQueue | None:
        return self._queues.find(TIMER_TOPIC, 0)

    def read(self, offset: int, count: int) -> TimerRows:
        """Records from `offset` on, at most `count`."""
        queue = self._queue()
        empty = np.empty(0, dtype=np.int64)
        if queue is None:
            return TimerRows(empty, empty, empty, _NOTHING, offset)

        offset = max(offset, queue.min_offset)
        units = queue.read(offset, count)
        offsets = np.arange(offset, offset + len(units), dtype=np.int64)
        positions = units["position"].astype(np.int64)
        sizes = units["size"].astype(np.int64)

        is_stored = (sizes != BLANK_SIZE) & (positions >= self._log.start)
        offsets = offsets[is_stored]
        positions = positions[is_stored]
        sizes = sizes[is_stored]

        following = offset + len(units)
        # Bodies are compared when they are delivered.
        batch, rows = undamaged_batch(self._log, positions, sizes, check_crc=False)
        times = due(batch) if len(rows) else _NOTHING
        return TimerRows(offsets[rows], positions[rows], sizes[rows], times, following)

    def first_that_may_wait(self, time_ms: int) -> int:
        """Offset of the first record that may be due in the second `time_ms` or later.

        Store times never fall, and no record waits for longer than the roll window.
        """
        queue = self._queue()
        if queue is None:
            return 0
        since = time_ms - ROLL_WINDOW_MS - PRECISION_MS
        low, high = queue.min_offset, queue.max_offset
        while low < high:
            middle = (low + high) // 2
            if self._store_time_ms(queue, middle) < since:
                low = middle + 1
            else:
                high = middle
        return low

    def _store_time_ms(self, queue: ConsumeQueue, offset: int) -> int:
        """The store time; 0 if the log has deleted the record."""
        unit = queue.read(offset, 1)[0]
        position = int(unit["position"])
        if int(unit["size"]) == BLANK_SIZE or position < self._log.start:
            return 0
        try:
            head = self._log.reads.raw(position, position + fmt.STORE_TIME_END_MAX)
        except Corrupt as error:
            # For this search a damaged record counts as deleted.
            self._log.reads.note_damage(error)
            return 0
        return fmt.store_time_ms(head)

    def offsets_of(self, positions: Int64s) -> Int64s:
        """The queue offsets of records at ascending positions; -1 of one that cannot be read."""
        sizes = np.full(len(positions), fmt.RECORD_MIN_BYTES, dtype=np.int64)
        found, rows = self._log.reads.undamaged_records(positions, sizes, check=False)
        offsets = np.full(len(positions), -1, dtype=np.int64)
        offsets[rows] = gather(found.data, found.starts + fmt.QUEUE_OFFSET_AT, np.dtype(">i8"))
        return offsets
