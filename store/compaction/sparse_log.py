"""The files of one compacted queue: records in one directory, units in another, a pair of files for each range.

Records are those of the commit log with another physical offset: their position in these files. Queue offsets ascend
with gaps.
Source: CompactionLog.TopicPartitionLog, SparseConsumeQueue, RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s, leading
from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.base.rules import COMPACTION_PAIR_RULE
from raymq.store.log.segments.mapped_file import MappedFile, not_yet_made
from raymq.store.log.segments.read_together import read_together
from raymq.store.log.segments.segment_paths import file_name, offset_names
from raymq.store.queues.message_filter import MessageFilter, matching
from raymq.store.records import record, rows
from raymq.store.records.binary_columns import value_bytes, value_offsets
from raymq.store.records.record_walk import MAGICS, first_fault

from .units import COMPACTED_UNIT_BYTES, COMPACTED_UNIT_DTYPE, COMPACTING, end_unit, is_record_unit

logger = logging.getLogger("raymq.store")

_LONG_BYTES = np.arange(8)
#: columns of records from which units are made again
_COLUMNS = ("queue_offset", "store_time_ms", "properties")
#: units read at a time while their end is looked for
SCAN_UNITS = 8192
UNIT_RULE = "no record where its unit says"


class SegmentPair:
    """A log file and the file of its units; both are named after the offset of the log file's first byte."""

    def __init__(self, start: int, log: MappedFile, queue: MappedFile) -> None:
        self.start = start
        self.log = log
        self.queue = queue
        #: bytes of records in the log file
        self.log_bytes = 0
        #: units in the queue file
        self.count = 0
        #: nothing is appended any more
        self.sealed = False

    def units(self, low: int = 0, high: int | None = None) -> Any:
        """Units [low, high), all by default, COMPACTED_UNIT_DTYPE. Raises: Corrupt for unreadable bytes."""
        high = self.count if high is None else min(high, self.count)
        data = self.queue.read(low * COMPACTED_UNIT_BYTES, max(low, high) * COMPACTED_UNIT_BYTES)
        return np.frombuffer(data, dtype=COMPACTED_UNIT_DTYPE)

    def offset_at(self, number: int) -> int:
        """The queue offset of a unit; a negative number counts from the end.

        Raises: Corrupt for a unit of no record: a search that believed its offset would leave out messages.
        """
        number += self.count if number < 0 else 0
        unit = self.units(number, number + 1)
        if not is_record_unit(unit)[0]:
            self.mend_units()
            unit = self.units(number, number + 1)
        if not len(unit) or not is_record_unit(unit)[0]:
            raise self._damaged_unit(number)
        return int(unit["offset"][0])

    def _damaged_unit(self, number: int) -> Corrupt:
        at = number * COMPACTED_UNIT_BYTES
        return Corrupt(
            f"{self.queue.path} at {at}: the unit is damaged, and so is its record; `raymq store verify` says more",
            path=str(self.queue.path),
            offset=at,
            rule=UNIT_RULE,
        )

    def mend_units(self) -> None:
        """Write the units of the records again that the log file has one after the other, if they differ."""
        view = memoryview(self.log.read(0, self.log.size))
        walk = record.walk(view, self.start)
        if not len(walk.positions):
            return

        made: Any = np.zeros(len(walk.positions), dtype=COMPACTED_UNIT_DTYPE)
        batch = record.decode(view, walk.positions - self.start, walk.sizes, columns=_COLUMNS)
        made["position"], made["size"] = walk.positions, walk.sizes
        made["tags_code"] = rows.tags_codes("", batch)
        made["store_time_ms"] = batch.column("store_time_ms").to_numpy()
        made["offset"] = batch.column("queue_offset").to_numpy()
        made["count"], made["compacted"] = 1, -1

        data = made.tobytes()[: self.queue.size // COMPACTED_UNIT_BYTES * COMPACTED_UNIT_BYTES]
        if self.queue.read(0, len(data)) != data:
            logger.error("%s: damaged units are made again from the records", self.queue.path)
            self.queue.pwrite(data, 0)
            self.queue.sync()
            self.find_end()

    def lacks_units(self) -> bool:
        """Whether a record follows that of the last unit: a unit is damaged, or a crash came before it was written."""
        at = self.log_bytes
        return at + fmt.BLANK_BYTES <= self.log.size and self.log.read(at + 4, at + 8) in MAGICS

    def records_of(self, units: npt.NDArray[Any]) -> tuple[memoryview, Int64s]:
        """A buffer with the records of these units, and the start of each record in it.

        Raises: Corrupt for the first damaged or unreadable record.
        """
        starts = units["position"].astype(np.int64) - self.start
        sizes = units["size"].astype(np.int64)
        if not len(starts):
            return memoryview(b""), starts

        ends = starts + sizes
        good = (starts >= 0) & (sizes >= fmt.RECORD_MIN_BYTES) & (ends <= self.log.size)
        good[1:] &= starts[1:] >= ends[:-1]
        row = leading(good)

        data, heads = memoryview(b""), starts[:0]
        if row:
            data, heads = read_together(self.log.read, self.log.read_into, starts[:row], ends[:row])

        fault = first_fault(data, heads, sizes[:row], starts[:row] + self.start)
        if fault is None and row == len(good):
            return data, heads

        row, rule = (row, UNIT_RULE) if fault is None else fault
        raise Corrupt(
            f"{self.log.path} at {int(starts[row])}: the record is damaged ({rule}); `raymq store verify` says more",
            path=str(self.log.path),
            offset=int(starts[row]),
            rule=rule,
        )

    def find_end(self) -> None:
        """Count the valid units. The last one gives the bytes of the log."""
        room = self.queue.size // COMPACTED_UNIT_BYTES
        self.count = 0
        while self.count < room:
            low, self.count = self.count, min(room, self.count + SCAN_UNITS)
            units = self.units(low)
            valid = leading(is_record_unit(units))
            if valid < len(units):
                self.count = low + valid
                break
        self.set_unit_count(self.count)

    def set_unit_count(self, count: int) -> None:
        """Keep only the first `count` units, and the bytes of their records."""
        self.count, self.log_bytes = count, 0
        if count:
            last = self.units(count - 1)[0]
            self.log_bytes = int(last["position"]) + int(last["size"]) - self.start

    def close(self) -> None:
        """Close both files."""
        self.log.close()
        self.queue.close()

    def sync(self) -> None:
        """fdatasync both: records before units. Raises: OSError."""
        self.log.sync()
        self.queue.sync()


class CompactedSlice(NamedTuple):
    """Records of one compacted queue that were read together."""

    #: the records byte for byte, a binary array
    records: pa.Array
    #: `units.COMPACTED_UNIT_DTYPE`
    units: npt.NDArray[Any]
    #: queue offset up to which the queue was looked at; without a filter that after the last record
    next_offset: int

    def only(self, wanted: MessageFilter, most: int) -> CompactedSlice:
        """The records that a filter wants, and no more than `most` of them."""
        codes, every = self.units["tags_code"].astype(np.int64), np.ones(len(self.units), np.bool_)
        matches = np.flatnonzero(matching(wanted, codes, every, self._properties, most))
        next_offset = self.next_offset
        if len(matches) > most:
            next_offset = int(self.units["offset"][matches[most]])
            matches = matches[:most]
        return CompactedSlice(
            self.records.take(pa.array(matches)), self.units[matches], next_offset
        )

    def _properties(self, chosen: Int64s) -> pa.Array:
        """The properties strings of the records in some rows."""
        starts = value_offsets(self.records).astype(np.int64)
        sizes = np.diff(starts)
        data = value_bytes(self.records).data
        return record.decode(data, starts[chosen], sizes[chosen], columns=("properties",)).column(0)


class SparseEnd(NamedTuple):
    """How far a compacted queue's records go: the last file, and the bytes in it. Without a file both are 0."""

    file_start: int
    log_bytes: int


class SparseLog:
    """Append, find, cut. Callers: `files_lock` guards all but sealed files. Readers hold it while they read."""

    def __init__(
        self, log: Path, queue: Path, file_bytes: int, queue_file_bytes: int, *, files: Files
    ) -> None:
        #: the directories of the records and of the units
        self.directories = (log, queue)
        self._sizes = (file_bytes, queue_file_bytes // COMPACTED_UNIT_BYTES * COMPACTED_UNIT_BYTES)
        self.files_lock = threading.RLock()
        self._files = files
        self.pairs: list[SegmentPair] = []

    def compacting(self) -> SparseLog:
        """A new log of the same file sizes, in the sub-directories `compacting`."""
        log, queue = (directory / COMPACTING for directory in self.directories)
        return SparseLog(log, queue, *self._sizes, files=self._files)

    @property
    def next_offset(self) -> int:
        """The queue offset after the last message here; 0 without one."""
        for pair in reversed(self.pairs):
            if pair.count:
                return pair.offset_at(-1) + 1
        return 0

    @property
    def end(self) -> SparseEnd:
        """The end of the last record."""
        if not self.pairs:
            return SparseEnd(0, 0)
        return SparseEnd(self.pairs[-1].start, self.pairs[-1].log_bytes)

    def load(self) -> None:
        """Open the files. If a crash interrupted the creation of the last pair, delete that pair: it is unused.

        Raises: Corrupt if another file has no partner.
        """
        names, queue_names = (
            set(offset_names(directory, files=self._files)) for directory in self.directories
        )

        last = max(names | queue_names, default=None)
        if last is not None and self._is_unfinished(last, names & queue_names):
            for directory in self.directories:
                self._files.unlink(directory / last)
            names.discard(last)
            queue_names.discard(last)

        odd = sorted(names ^ queue_names)
        if odd:
            log, queue = (directory / odd[0] for directory in self.directories)
            raise Corrupt(
                f"{log} and {queue} belong together; one is missing",
                path=str(log),
                rule=COMPACTION_PAIR_RULE,
            )

        self.pairs += [self._open(int(name)) for name in sorted(names)]
        for pair in self.pairs:
            pair.find_end()
            if pair.lacks_units():
                pair.mend_units()
            pair.sealed = pair is not self.pairs[-1] or self._is_sealed(pair)

    def _is_unfinished(self, name: str, pairs: set[str]) -> bool:
        """Whether a crash came while this pair was made: a file is missing, or is too short and empty."""
        return name not in pairs or any(
            not_yet_made(directory / name, size, files=self._files)
            for directory, size in zip(self.directories, self._sizes, strict=True)
        )

    def _open(self, start: int) -> SegmentPair:
        log, queue = (
            MappedFile.open(directory / file_name(start), start, size, files=self._files)
            for directory, size in zip(self.directories, self._sizes, strict=True)
        )
        return SegmentPair(start, log, queue)

    def _is_sealed(self, pair: SegmentPair) -> bool:
        at = pair.log_bytes
        if at + fmt.BLANK_BYTES > pair.log.size:
            return False
        return pair.log.read(at + 4, at + 8) == fmt.MAGIC_BLANK.to_bytes(4, "big")

    # --- appending --------------------------------------------------------------------------------

    def append(self, view: memoryview, starts: Int64s, units: npt.NDArray[Any]) -> None:
        """Append records, in as many files as they need, by ascending queue offset.

        Args: `starts`: start of each record in `view`. `units`: COMPACTED_UNIT_DTYPE, with any positions.
        Raises: StorageFull, OSError. `cut` removes a half-written record.
        """
        low, count = 0, len(units)
        while low < count:
            if not self.pairs or self.pairs[-1].sealed:
                self._create_next()
            pair = self.pairs[-1]
            stop = low + self._fitting(pair, units["size"][low:].astype(np.int64))
            if stop > low:
                self._write(pair, view, starts[low:stop], units[low:stop])
                low = stop
            if low < count:
                self.seal()

    def _fitting(self, pair: SegmentPair, sizes: Int64s) -> int:
        """The number of records that still fit. A blank record and an end unit must fit after them."""
        room = pair.log.size - pair.log_bytes - fmt.BLANK_BYTES
        units = pair.queue.size // COMPACTED_UNIT_BYTES - 1 - pair.count
        fits = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
        if not fits and not pair.count:
            raise Corrupt(
                f"a record of {int(sizes[0])} bytes fits no file of {self.directories[0]}",
                path=str(self.directories[0]),
                rule="a record fits a compaction log file",
            )
        return max(0, min(fits, units))

    def _write(
        self, pair: SegmentPair, view: memoryview, starts: Int64s, units: npt.NDArray[Any]
    ) -> None:
        """Write records and their units to the end of a pair. The records get their physical offsets in this log."""
        records = record.select(view, starts, units["size"])
        edges = value_offsets(records).astype(np.int64)
        data = value_bytes(records)[edges[0] : edges[-1]].copy()
        data_starts = edges[:-1] - edges[0]
        positions = pair.start + pair.log_bytes + data_starts
        field_bytes = (data_starts + fmt.PHYSICAL_OFFSET_AT)[:, None] + _LONG_BYTES
        data[field_bytes] = positions.astype(">i8").view(np.uint8).reshape(-1, 8)

        written = units.copy()
        written["position"] = positions
        written["count"] = 1
        written["compacted"] = -1
        written["reserved"] = 0

        pair.log.pwrite(data.data, pair.log_bytes)
        pair.queue.pwrite(written.tobytes(), pair.count * COMPACTED_UNIT_BYTES)
        pair.log_bytes += len(data)
        pair.count += len(units)

    def seal(self) -> None:
        """End the last file: an end unit, a blank record, a sync. Durable: at return."""
        pair = self.pairs[-1]
        if pair.sealed:
            return
        left = pair.log.size - pair.log_bytes
        pair.log.pwrite(record.blank(left), pair.log_bytes)
        pair.queue.pwrite(end_unit(), pair.count * COMPACTED_UNIT_BYTES)
        pair.sync()
        pair.sealed = True

    def _create_next(self) -> None:
        """Make and open the next pair. Durable: both names."""
        last = self.pairs[-1] if self.pairs else None
        start = 0 if last is None else last.start + last.log.size
        for directory, size in zip(self.directories, self._sizes, strict=True):
            self._files.make_dirs(directory)
            # Sparse, as RocketMQ makes them: a topic has many queues, and most hold little.
            with self._files.opened(directory / file_name(start), create=True) as fd:
                self._files.truncate(fd, size)
                self._files.sync(fd)
            self._files.sync_dir(directory)
        self.pairs.append(self._open(start))

    def sync(self) -> None:
        """fdatasync the last pair; sealed ones are synced. Raises: OSError."""
        if self.pairs and not self.pairs[-1].sealed:
            self.pairs[-1].sync()

    # --- cutting and replacing --------------------------------------------------------------------

    def truncate(self, end: SparseEnd, next_offset: int, *, keep_below: int = 0) -> None:
        """Drop records after `end`, or from queue offset `next_offset` on, and zero them.

        Args: `keep_below`: records below this queue offset stay wherever `end` is.
        Durable: at return.
        """
        physical_end = end.file_start + end.log_bytes
        while self.pairs:
            pair = self.pairs[-1]
            units = pair.units()
            keep = units["position"].astype(np.int64) + units["size"] <= physical_end
            keep |= units["offset"] < keep_below
            keep &= units["offset"] < next_offset
            count = leading(keep)

            if count == 0 and pair.start > end.file_start:
                self._remove(self.pairs.pop())
                continue
            if count == pair.count and pair.sealed:
                return

            pair.set_unit_count(count)
            pair.log.clear(pair.log_bytes)
            pair.queue.clear(count * COMPACTED_UNIT_BYTES)
            pair.sync()
            pair.sealed = False

            if count or len(self.pairs) == 1:
                return
            self._remove(self.pairs.pop())

    def _remove(self, pair: SegmentPair) -> None:
        pair.log.destroy()
        pair.queue.destroy()
        for directory in self.directories:
            self._files.sync_dir(directory)

    def replace(self, old: list[SegmentPair], names: list[str]) -> None:
        """Open the files of these names, which have replaced the oldest ones. Later ones stay.

        Callers: with `files_lock`. Readers keep records that they read from the old files.
        """
        stays = self.pairs[len(old) :]
        for pair in old:
            pair.close()
        self.pairs = [self._open(int(name)) for name in sorted(names)]
        for pair in self.pairs:
            pair.find_end()
            pair.sealed = True
        self.pairs += stays

    # --- reading ----------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int | None:
        """The first queue offset that is here; None when there is none."""
        with self.files_lock:
            return next((p.offset_at(0) for p in self.pairs if p.count), None)

    def read(self, offset: int, max_bytes: int, max_records: int) -> CompactedSlice | None:
        """Records from the first queue offset at or above `offset` on, at least one; None when there is none.

        Raises: Corrupt if the first of them is damaged. Those before a damaged one are read without it.
        """
        with self.files_lock:
            for pair in self.pairs:
                if not pair.count or pair.offset_at(-1) < offset:
                    continue
                low = bisect_left(range(pair.count), offset, key=pair.offset_at)
                units = pair.units(low, low + max_records)
                total = np.cumsum(units["size"].astype(np.int64))
                fits = max(1, int(np.searchsorted(total, max_bytes, side="right")))
                return self._slice_before_damage(pair, units[:fits])
        return None

    def _slice_before_damage(self, pair: SegmentPair, units: npt.NDArray[Any]) -> CompactedSlice:
        while True:
            try:
                records = record.select(*pair.records_of(units), units["size"])
                return CompactedSlice(records, units, int(units["offset"][-1]) + 1)
            except Corrupt:
                if len(units) == 1:
                    raise
                units = units[: len(units) // 2]

    def close(self) -> None:
        """Close every file."""
        for pair in self.pairs:
            pair.close()
        self.pairs = []
