"""Reads of one queue: from offsets to confirmed records."""

from __future__ import annotations

from array import array

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s, leading
from raymq.store.base.errors import Corrupt, OffsetOutOfRange
from raymq.store.base.rules import MISSING_RULE, UNIT_RECORD_RULE
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.record_reads import Records
from raymq.store.log.segments.read_together import LARGE_BYTES
from raymq.store.log.segments.segment_paths import segment_start_of
from raymq.store.records import record
from raymq.store.records.requests import FetchSlice
from raymq.store.state.shard_state import ShardState

from .consume_queue import BLANK_SIZE, MISSING_CODE, ConsumeQueue, QueueUnits
from .consume_queues import ConsumeQueues
from .message_filter import LookLimit, MessageFilter, matching

#: consume queue units read first; more if their records are short
UNITS_FIRST = 1024
#: units that one read with a filter looks at
FILTERED_UNITS = 16_384
#: without arrays each record costs 0.5 us, and an answer 15 us instead of 75
FEW_RECORDS = 64
#: copies of less than this cost less than another read
NEIGHBOURS_MIN_BYTES = 256 << 10
_NO_RECORDS = pa.array([], pa.binary())


class QueueReader:
    """Reads confirmed records through the consume queues. Callers: any thread."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues, state: ShardState) -> None:
        self._log = log
        self._queues = queues
        self._state = state
        self._file_size = log.config.segment_size_bytes

    def fetch(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_bytes: int,
        max_records: int,
        wanted: MessageFilter | None = None,
        look: LookLimit | None = None,
    ) -> FetchSlice:
        """Read records of one queue from `offset`, at least one if there is one, never above the confirmed end.

        Args: `wanted`: only these. Then there may be no record, and `next_offset` is where the next read goes on: no
        message before it is wanted that is not returned. `look`: how far such a read looks; None: FILTERED_UNITS.
        Returns: raw RocketMQ records as one binary column, without a copy if they are neighbours. If most of them
        are neighbours, only the first group of neighbours is returned. The caller checks each record (`first_fault`).
        Raises: OffsetOutOfRange below the queue's first offset, or above its last one in the log. Corrupt for a damaged
        consume queue, and for unreadable bytes.
        """
        low, high = self._queues.range(topic, queue_id)
        if high < offset <= self._state.next_offsets.get((topic, queue_id), 0):
            # The log has the message: after a restart the queue grows up to there again, with followers once that is
            # confirmed.
            high = offset
        if offset < low or offset > high:
            raise out_of_range(topic, queue_id, offset, low, high)

        count = min(max_records, high - offset)
        if count <= 0:
            return FetchSlice(queue_id, offset, offset, low, high, _NO_RECORDS, None)

        queue = self._queues.get(topic, queue_id)
        if queue.max_offset < high:
            # It was opened now, and has lost units. They are made again.
            return self.fetch(
                topic,
                queue_id,
                offset,
                max_bytes=max_bytes,
                max_records=max_records,
                wanted=wanted,
                look=look,
            )
        if count <= FEW_RECORDS and wanted is None:
            few = self._few_neighbours(queue, offset, count, max_bytes)
            if few is not None:
                records, following = few
                return FetchSlice(queue_id, offset, following, low, high, records, None)

        if wanted is None:
            units = self._units_for(queue, offset, count, max_bytes)
        else:
            look = look or LookLimit(FILTERED_UNITS, lambda: False)
            units = queue.read(offset, min(high - offset, look.units))
        if not len(units):
            # The message was deleted after the range was read.
            raise out_of_range(topic, queue_id, offset, *self._queues.range(topic, queue_id))

        has_record = units["size"] != BLANK_SIZE
        if not has_record[0]:
            raise missing_message(topic, queue_id, offset)
        units = units[: leading(has_record)]

        try:
            if wanted is None or look is None:
                found = self._first_records(topic, queue_id, offset, units, max_bytes)
                looked = len(found)
            else:
                found, looked = self._wanted_records(
                    topic, queue_id, offset, units, wanted, max_bytes, max_records, look
                )
        except OffsetOutOfRange as error:
            raise out_of_range(
                topic, queue_id, offset, *self._queues.range(topic, queue_id)
            ) from error
        return FetchSlice(queue_id, offset, offset + looked, low, high, found, None)

    def _few_neighbours(
        self, queue: ConsumeQueue, offset: int, count: int, max_bytes: int
    ) -> tuple[pa.Array, int] | None:
        """`fetch` of the few messages that a waiting reader gets: neighbours in one file. The fixed cost is a fifth.

        Returns: the records and the offset after them; None: they are other records, large, damaged or deleted.
        """
        begin = end = 0
        edges = [0]
        units = queue.read_packed(offset, count)
        if len(units) < count * fmt.QUEUE_UNIT_BYTES:
            return None
        for position, size, tags_code in fmt.QUEUE_UNIT.iter_unpack(units):
            if len(edges) == 1:
                begin = end = position
            if position != end or size < fmt.RECORD_MIN_BYTES or size == BLANK_SIZE:
                return None
            if tags_code == MISSING_CODE:
                return None
            if edges[-1] + size > max_bytes and len(edges) > 1:
                break
            end += size
            edges.append(end - begin)
        in_one_file = begin >= 0 and end <= self._file_start(begin) + self._file_size
        if not in_one_file or end - begin >= LARGE_BYTES:
            # Many bytes are read into memory of Arrow, whose pages are used again.
            return None

        try:
            data = self._log.reads.raw(begin, end)
        except (Corrupt, OffsetOutOfRange):
            return None
        offsets = pa.py_buffer(array("i", edges))
        rows = len(edges) - 1
        records = pa.Array.from_buffers(pa.binary(), rows, [None, offsets, pa.py_buffer(data)])
        return records, offset + rows

    @staticmethod
    def _units_for(queue: ConsumeQueue, offset: int, count: int, max_bytes: int) -> QueueUnits:
        """Units from `offset` on: `count` units, or as many as have more than `max_bytes` of records."""
        look = min(count, UNITS_FIRST)
        units = queue.read(offset, look)
        while look < count and units["size"].sum(dtype=np.int64) <= max_bytes:
            look = min(count, 4 * look)
            units = queue.read(offset, look)
        return units

    def _first_records(
        self, topic: str, queue_id: int, offset: int, units: QueueUnits, max_bytes: int
    ) -> pa.Array:
        """The first records that are read together: in one file, of at most `max_bytes`."""
        positions, sizes = self._in_one_file(units)
        within_bytes = max(1, int(sizes.cumsum().searchsorted(max_bytes, side="right")))
        count = _neighbours(positions[:within_bytes], sizes[:within_bytes])
        positions, sizes = positions[:count], sizes[:count]

        count = self._count_sound(topic, queue_id, offset, positions, sizes)
        found = self._read_records(positions[:count], sizes[:count])
        return record.select(found.data, found.starts, found.sizes)

    def _wanted_records(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        units: QueueUnits,
        wanted: MessageFilter,
        max_bytes: int,
        max_records: int,
        look: LookLimit,
    ) -> tuple[pa.Array, int]:
        """The first records that a filter wants, in one file, and how many units were looked at."""
        positions, sizes = self._in_one_file(units)
        count = self._count_sound(topic, queue_id, offset, positions, sizes)
        positions, sizes = positions[:count], sizes[:count]

        def properties(rows: Int64s) -> pa.Array:
            return self._log.reads.properties(positions[rows], sizes[rows])

        codes = units["tags_code"].astype(np.int64)
        while True:
            every = np.ones(len(positions), dtype=np.bool_)
            try:
                mask = matching(
                    wanted,
                    codes[: len(every)],
                    every,
                    properties,
                    max_records,
                    is_over=look.is_over,
                )
                break
            except Corrupt as error:
                # Those before the damaged record are read without it. The next read reports it.
                self._log.reads.note_damage(error)
                bad = int(error.fields["offset"])
                count = int((positions + sizes).searchsorted(bad, side="right"))
                if not count:
                    raise
                positions, sizes = positions[:count], sizes[:count]

        rows = np.flatnonzero(mask)
        within_bytes = int(sizes[rows].cumsum().searchsorted(max_bytes, side="right"))
        most = min(max_records, max(1, within_bytes))
        looked = int(rows[most]) if len(rows) > most else len(mask)
        rows = rows[:most]
        if not len(rows):
            return _NO_RECORDS, looked

        found = self._read_records(positions[rows], sizes[rows])
        if len(found.starts) < len(rows):
            looked = int(rows[len(found.starts)])
        return record.select(found.data, found.starts, found.sizes), looked

    def _in_one_file(self, units: QueueUnits) -> tuple[Int64s, Int64s]:
        """Positions and sizes of the first units' records that are in the file of the first one."""
        positions = units["position"].astype(np.int64)
        file_end = self._file_start(int(positions[0])) + self._file_size
        count = leading(positions < file_end)
        return positions[:count], units["size"][:count].astype(np.int64)

    def _file_start(self, position: int) -> int:
        """Start of the file that has a record."""
        return segment_start_of(position, self._file_size)

    def _read_records(self, positions: Int64s, sizes: Int64s) -> Records:
        """Read records. Those after a bad sector are left out. Raises: Corrupt if the first record has it."""
        try:
            return self._log.reads.records(positions, sizes, check=False)
        except Corrupt as error:
            self._log.reads.note_damage(error)
            bad = int(error.fields["offset"])
            count = int((positions + sizes).searchsorted(bad, side="right"))
            if not count:
                raise
            return self._log.reads.records(positions[:count], sizes[:count], check=False)

    def check(self, topic: str, queue_id: int, offset: int) -> None:
        """Check the message at an offset. Raises: Corrupt if it is missing, damaged or unreadable."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return
        units = queue.read(offset, 1)
        if len(units) and int(units["size"][0]) == BLANK_SIZE:
            raise missing_message(topic, queue_id, offset)
        self._log.reads.records(units["position"].astype(np.int64), units["size"].astype(np.int64))

    def _count_sound(
        self, topic: str, queue_id: int, offset: int, positions: Int64s, sizes: Int64s
    ) -> int:
        """How many of the first units may point at records: a consume queue is a cache without a checksum.

        Raises: Corrupt if the first one points at no record.
        """
        starts = positions - self._file_start(int(positions[0]))
        ends = starts + sizes
        good = (starts >= 0) & (sizes >= fmt.RECORD_MIN_BYTES) & (ends <= self._file_size)
        good[1:] &= starts[1:] >= ends[:-1]
        if not good[0]:
            raise Corrupt(
                f"unit {offset} of queue {queue_id} of {topic} points at no record; stop the store and "
                "delete its directory consumequeue, which the next start builds again",
                path=f"consumequeue/{topic}/{queue_id}",
                offset=offset,
                rule=UNIT_RECORD_RULE,
                found=(int(starts[0]), int(sizes[0])),
            )
        return leading(good)


def _neighbours(positions: Int64s, sizes: Int64s) -> int:
    """The number of records to return: the first group of neighbours, if it is long and has most of their bytes.

    Neighbours are copied once, from the file. Other records are copied twice, which costs more than the rest of a read.
    """
    ends = positions + sizes
    apart = positions[1:] != ends[:-1]
    if apart.any():
        first = int(apart.argmax()) + 1
        group_bytes = int(ends[first - 1] - positions[0])
        if group_bytes >= NEIGHBOURS_MIN_BYTES and 2 * group_bytes >= int(sizes.sum()):
            return first
    return len(positions)


def missing_message(topic: str, queue_id: int, offset: int) -> Corrupt:
    """The error of a read at an offset below the queue's end for which the log has no message."""
    return Corrupt(
        f"the log has no message {offset} of queue {queue_id} of {topic}: a record is damaged or missing; `raymq store "
        "verify` says more; seek() after it to continue",
        path=f"consumequeue/{topic}/{queue_id}",
        topic=topic,
        queue_id=queue_id,
        offset=offset,
        rule=MISSING_RULE,
    )


def out_of_range(topic: str, queue_id: int, offset: int, low: int, high: int) -> OffsetOutOfRange:
    """The error of a read at an offset that a queue does not hold."""
    return OffsetOutOfRange(
        f"queue {queue_id} of {topic} holds offsets {low} to {high}, not {offset}; seek() to choose",
        min=low,
        max=high,
        offset=offset,
        queue_id=queue_id,
    )
