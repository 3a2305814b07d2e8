"""Reading one queue: from offsets to records, past nothing that is not confirmed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store import format as fmt
from raymq.store import record
from raymq.store.errors import Corrupt, OffsetOutOfRange
from raymq.store.log.commit_log import CommitLog
from raymq.store.requests import FetchSlice
from raymq.store.state import ShardState

from .consume_queue import BLANK_SIZE
from .consume_queues import ConsumeQueues

Int64s = npt.NDArray[np.int64]

#: consume queue units looked at first, more where they are of short records
UNITS_FIRST = 1024
#: copies of less than this cost less than another read
NEIGHBOURS_MIN_BYTES = 256 << 10
_NO_RECORDS = pa.array([], pa.binary())


class Reader:
    """Callers: any thread."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues, state: ShardState) -> None:
        self._log = log
        self._queues = queues
        self._state = state

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The half-open range of readable offsets of a queue."""
        return self._queues.range(topic, queue_id)

    def fetch(
        self, topic: str, queue_id: int, offset: int, *, max_bytes: int, max_records: int
    ) -> FetchSlice:
        """Read records of one queue from `offset`, at least one if there is one, never past C.

        Returns: raw RocketMQ records as one binary column, zero-copy where they are neighbours; fewer than would
        fit where most of them are neighbours, and what follows stands elsewhere.
        Raises: OffsetOutOfRange below the queue's min, or above what the log holds of it. Corrupt for a
        damaged consume queue, and for bytes that the disk does not give back. Whether the records are whole, whoever
        takes them out of their bytes looks: `record.first_fault`.
        """
        low, high = self.queue_range(topic, queue_id)
        if high < offset <= self._state.next_offsets.get((topic, queue_id), 0):
            # The log has it. After a restart dispatch (in a mirror C too) may come there once more only later.
            high = offset
        if offset < low or offset > high:
            raise _out_of_range(topic, queue_id, offset, low, high)
        count = min(max_records, high - offset)
        if count <= 0:
            return FetchSlice(queue_id, offset, offset, low, high, _NO_RECORDS, None)
        queue = self._queues.get(topic, queue_id)
        look = min(count, UNITS_FIRST)
        units = queue.read(offset, look)
        while look < count and units["size"].sum(dtype=np.int64) <= max_bytes:
            look = min(count, 4 * look)
            units = queue.read(offset, look)
        if not len(units):
            # Deleted since the look at the range.
            raise _out_of_range(topic, queue_id, offset, *self.queue_range(topic, queue_id))
        # Queues of foreign stores may have gaps, filled with units that point at nothing.
        gaps = np.flatnonzero(units["size"] == BLANK_SIZE)
        if len(gaps):
            first = int(gaps[0])
            if first == 0:
                solid = np.flatnonzero(units["size"] != BLANK_SIZE)
                jump = offset + (int(solid[0]) if len(solid) else len(units))
                return FetchSlice(queue_id, offset, jump, low, high, _NO_RECORDS, None)
            units = units[:first]
        positions = units["position"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        fits = max(1, int(sizes.cumsum().searchsorted(max_bytes, side="right")))
        size = self._log.config.segment_size_bytes
        base = int(positions[0]) // size * size
        inside = positions[:fits] < base + size
        fits = fits if inside.all() else int(np.argmin(inside))
        fits = _neighbours(positions[:fits], sizes[:fits])
        positions, sizes = positions[:fits], sizes[:fits]
        self._check_units(topic, queue_id, offset, positions - base, sizes, size)
        try:
            found = self._log.records(positions, sizes, whole=False)
        except OffsetOutOfRange as error:
            raise _out_of_range(
                topic, queue_id, offset, *self.queue_range(topic, queue_id)
            ) from error
        except Corrupt as error:
            # A bad sector: what stands before it is read.
            self._log.note_damage(error)
            bad = int(error.fields["offset"])
            fits = int((positions + sizes).searchsorted(bad, side="right"))
            if not fits:
                raise
            found = self._log.records(positions[:fits], sizes[:fits], whole=False)
        records = record.select(found.data, found.starts, found.sizes)
        return FetchSlice(queue_id, offset, offset + fits, low, high, records, None)

    def check(self, topic: str, queue_id: int, offset: int) -> None:
        """Raises: Corrupt when the message at an offset is damaged, or the disk does not give it back."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return
        # Or the one behind a gap: a fetch passes over it.
        units = queue.read(offset, UNITS_FIRST)
        units = units[units["size"] != BLANK_SIZE][:1]
        self._log.records(units["position"].astype(np.int64), units["size"].astype(np.int64))

    def _check_units(
        self, topic: str, queue_id: int, offset: int, starts: Int64s, sizes: Int64s, length: int
    ) -> None:
        """Consume queues are a cache without a checksum. Raises: Corrupt for units that point at no records."""
        ends = starts + sizes
        good = (starts >= 0) & (sizes >= fmt.RECORD_MIN_BYTES) & (ends <= length)
        good[1:] &= starts[1:] >= ends[:-1]
        if not good.all():
            row = int(good.argmin())
            raise Corrupt(
                f"unit {offset + row} of queue {queue_id} of {topic} points at no record; stop the store and "
                "delete its directory consumequeue, the next start builds it anew",
                path=f"consumequeue/{topic}/{queue_id}",
                offset=offset + row,
                rule="a unit points at its record",
                found=(int(starts[row]), int(sizes[row])),
            )


def _neighbours(positions: Int64s, sizes: Int64s) -> int:
    """How many of these records to return: the first stretch of neighbours, where it is long and most of them.

    It is copied once, from the file; what stands apart is copied once more, which costs more than all else of a read.
    """
    ends = positions + sizes
    apart = positions[1:] != ends[:-1]
    if apart.any():
        first = int(apart.argmax()) + 1
        stretch = int(ends[first - 1] - positions[0])
        if stretch >= NEIGHBOURS_MIN_BYTES and 2 * stretch >= int(sizes.sum()):
            return first
    return len(positions)


def _out_of_range(topic: str, queue_id: int, offset: int, low: int, high: int) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"queue {queue_id} of {topic} holds offsets {low} to {high}, not {offset}; seek() to choose",
        min=low,
        max=high,
        offset=offset,
        queue_id=queue_id,
    )
