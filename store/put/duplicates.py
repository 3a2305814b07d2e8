"""Finds the stored row that a producer sends again, when the state no longer has its offset.

Sequences and queue offsets of one producer grow together. A row between two runs that the state still has is therefore
found by bisection over the consume queue, reading the stamps of records. A row that is not dispatched yet is found by a
walk over the end of the log. No lock is held, and each read is small, because the ack path waits for the interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int64s, Structs, leading
from raymq.store.base.errors import Corrupt, OffsetOutOfRange
from raymq.store.log.commit_log import CommitLog
from raymq.store.queues.consume_queue import BLANK_SIZE, ConsumeQueue
from raymq.store.records import record
from raymq.store.records.producer_stamp import STAMP_BYTES, read_column
from raymq.store.records.record_walk import Layout, gather, layout
from raymq.store.state.producer_table import UNKNOWN_OFFSET, FoundRun, ProducerQueue

#: records that one slice looks at: the first slice at a new place, the smallest one, the largest one
SLICE_ROWS, SLICE_ROWS_MIN, SLICE_ROWS_MAX = 32, 4, 2048
#: the same in bytes, if there is more than one record
SLICE_BYTES_MAX = 2 << 20
#: a slice that takes less time makes the next one larger, and a slice that takes more makes it smaller. Cold pages cost
#: 100 times as much
SLICE_MS_LOW, SLICE_MS_HIGH = 0.25, 1.0

_STAMP = np.dtype(f"V{STAMP_BYTES}")
_INT = np.dtype(">i4")
_LONG = np.dtype(">i8")


class OwnRows(NamedTuple):
    """Rows of one producer in one queue, ascending."""

    offsets: Int64s
    sequences: Int64s
    #: physical
    ends: Int64s


class DuplicateSearch:
    """Finds the queue offset of one stored row. For one use by one thread."""

    def __init__(self, log: CommitLog, topic: str, queue_id: int, producer_id: int) -> None:
        self._log = log
        self._topic = np.frombuffer(topic.encode(), dtype=np.uint8)
        self._queue_id = queue_id
        self._producer_id = np.uint64(producer_id)
        self._slice_rows = SLICE_ROWS
        self._slice_began_s = 0.0

    def find(
        self, sequence: int, entry: ProducerQueue, queue: ConsumeQueue | None, dispatched: int
    ) -> int:
        """The queue offset of the row with this sequence; UNKNOWN_OFFSET when the log has deleted it,
        or damage hides it.

        Args: `dispatched`, read before the queue: rows that are not in its units are in the log after it.
        Raises: Unavailable when the store is being closed.
        """
        hint = entry.found
        low, high = entry.span_of(sequence)
        if high - low <= 1:
            return low if low < high else UNKNOWN_OFFSET

        found, units_end = None, 0
        try:
            if queue is not None:
                units_end = queue.max_offset
                found = self._in_units(
                    queue, max(low, queue.min_offset), min(high, units_end), sequence
                )
            if found is None and high > units_end:
                at = max(dispatched, self._log.start)
                if hint is not None and hint.first_sequence <= sequence:
                    at = max(at, hint.end)
                found = self._in_log(at, self._log.committed, sequence)
        except Corrupt:
            # The row is stored, but its unit or record cannot be read.
            return UNKNOWN_OFFSET

        if found is None:
            return UNKNOWN_OFFSET
        entry.found = found
        return found.first_offset

    def _in_units(self, queue: ConsumeQueue, low: int, high: int, sequence: int) -> FoundRun | None:
        """Bisect units [low, high). Rows of other producers in between cost time, at most once each."""
        # The search begins at the low end: rows are sent again in order.
        at = low
        while low < high:
            own = self._next_own(queue, at, high)
            if own is None:
                high = at
            else:
                found = _run_at(own, sequence)
                if found is not None:
                    return found

                below = int(np.searchsorted(own.sequences, sequence))
                if below < len(own.offsets):
                    ahead = int(own.sequences[below]) - sequence
                    high = min(high, int(own.offsets[below]) - ahead + 1)
                if below:
                    distance = sequence - int(own.sequences[below - 1])
                    low = max(low, int(own.offsets[below - 1]) + distance)
                else:
                    high = min(high, at)
            at = (low + high) // 2
        return None

    def _next_own(self, queue: ConsumeQueue, at: int, high: int) -> OwnRows | None:
        """The producer's rows in the first slice from unit `at` on that has any."""
        self._slice_rows = min(self._slice_rows, SLICE_ROWS)
        while at < high:
            self._slice_began_s = self._log.clock.monotonic()
            units = queue.read(at, min(self._slice_rows, high - at))
            if not len(units):
                return None
            sizes = np.where(units["size"] == BLANK_SIZE, 0, units["size"]).astype(np.int64)
            units = units[: max(1, int(sizes.cumsum().searchsorted(SLICE_BYTES_MAX, side="right")))]
            rows = self._own_rows_of_units(at, units)
            self._adapt_slice_rows()
            if len(rows.offsets):
                return rows
            at += len(units)
        return None

    def _own_rows_of_units(self, first_offset: int, units: Structs) -> OwnRows:
        """The producer's rows among the records of units, the first of which has queue offset `first_offset`."""
        positions = units["position"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        size = self._log.config.segment_size_bytes
        # The log may have deleted the first of these records, and a blank unit has none.
        rows = np.flatnonzero(
            (positions >= self._log.start)
            & (sizes >= fmt.RECORD_MIN_BYTES)
            & (positions % size + sizes <= size)
        )

        try:
            found = self._log.reads.records(positions[rows], sizes[rows], check=False)
        except OffsetOutOfRange:
            return self._own_rows_of_units(first_offset, units)

        is_own, sequences, _ = self._stamps(found.data, found.starts, found.sizes)
        own_rows = rows[is_own]
        ends = positions[own_rows] + sizes[own_rows]
        return OwnRows(first_offset + own_rows, sequences[is_own], ends)

    def _in_log(self, position: int, end: int, sequence: int) -> FoundRun | None:
        """Walk log[position, end), which begins at a record."""
        while position < end:
            self._slice_began_s = self._log.clock.monotonic()
            view, base, walk = self._log.reads.walk(
                position, end, check_crc=False, limit=self._slice_rows
            )
            if len(walk.positions):
                own = self._own_rows_of_walk(view, base, walk)
                found = _run_at(own, sequence)
                if found is not None or (own.sequences > sequence).any():
                    return found
            self._adapt_slice_rows()
            begun_at, position = position, self._log.reads.next_walk_start(position, walk)
            if position == begun_at:
                return None
        return None

    def _own_rows_of_walk(self, view: memoryview, base: int, walk: record.Walk) -> OwnRows:
        """The producer's rows of the queue among walked records."""
        starts = walk.positions - base
        is_own, sequences, parts = self._stamps(view, starts, walk.sizes)
        is_own &= gather(view, starts + fmt.QUEUE_ID_AT, _INT) == self._queue_id
        is_own &= parts.topic_end - parts.topic_start == len(self._topic)
        rows = np.flatnonzero(is_own)
        if len(rows):
            topic = np.dtype(f"V{len(self._topic)}")
            names = gather(view, parts.topic_start[rows], topic).view(np.uint8)
            rows = rows[(names.reshape(len(rows), -1) == self._topic).all(axis=1)]
        offsets = gather(view, starts[rows] + fmt.QUEUE_OFFSET_AT, _LONG).astype(np.int64)
        return OwnRows(offsets, sequences[rows], walk.positions[rows] + walk.sizes[rows])

    def _stamps(
        self, view: memoryview, starts: Int64s, sizes: Int64s
    ) -> tuple[Bools, Int64s, Layout]:
        """Which of these records are the producer's, all their sequences and their parts."""
        parts, good = layout(view, starts, sizes)
        good &= parts.properties_end - parts.properties_start >= STAMP_BYTES
        at = np.where(good, parts.properties_start, 0)
        stamps = gather(view, at, _STAMP).view(np.uint8).reshape(len(at), STAMP_BYTES)
        valid, producer_ids, _, sequences = read_column(stamps)
        return good & valid & (producer_ids == self._producer_id), sequences, parts

    def _adapt_slice_rows(self) -> None:
        """Make the next slice larger or smaller, by the time that this one took."""
        took_ms = (self._log.clock.monotonic() - self._slice_began_s) * 1000
        if took_ms > SLICE_MS_HIGH:
            self._slice_rows = max(SLICE_ROWS_MIN, self._slice_rows // 2)
        elif took_ms < SLICE_MS_LOW:
            self._slice_rows = min(SLICE_ROWS_MAX, self._slice_rows * 2)


def _run_at(own: OwnRows, sequence: int) -> FoundRun | None:
    """The row with this sequence and the rows that follow it without a gap."""
    row = int(np.searchsorted(own.sequences, sequence))
    if row == len(own.sequences) or own.sequences[row] != sequence:
        return None
    together = (np.diff(own.offsets[row:]) == 1) & (np.diff(own.sequences[row:]) == 1)
    count = 1 + leading(together)
    return FoundRun(sequence, count, int(own.offsets[row]), int(own.ends[row + count - 1]))
