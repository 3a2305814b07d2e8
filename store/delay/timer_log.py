"""RocketMQ's timer log, a cache: 52 bytes per waiting timer. Each unit names the unit before it in its second.

A unit (all numbers big-endian)::

      0  4  size             52
      4  8  previous         position of the unit before it in the same second, -1: none
     12  4  magic            1 default, 2 roll, 4 delete
     16  8  enqueue_time_ms
     24  4  delay_ms         the second it waits for - enqueue_time_ms
     28  8  position         of the record in the commit log
     36  4  record_size
     40  4  topic_hash       Java's hash of the real topic
     44  8  reserved         0

A unit leaves at least 16 bytes of its file for a blank: int rest of the file, long 0, int MAGIC_BLANK.
Source: TimerLog, RocketMQ 5.3.3.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s, Structs
from raymq.store.base.errors import require
from raymq.store.base.files import Files
from raymq.store.log.segments.mapped_file import MappedFile
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue

TimerUnits = Structs

TIMER_UNIT_DTYPE = np.dtype(
    [
        ("size", ">i4"),
        ("previous", ">i8"),
        ("magic", ">i4"),
        ("enqueue_time_ms", ">i8"),
        ("delay_ms", ">i4"),
        ("position", ">i8"),
        ("record_size", ">i4"),
        ("topic_hash", ">i4"),
        ("reserved", ">i8"),
    ]
)
TIMER_UNIT_BYTES = TIMER_UNIT_DTYPE.itemsize
#: bytes kept free at the end of a file
BLANK_BYTES = 16
#: `previous` of a second's first unit
NONE = -1

_BLANK = struct.Struct(">iqI")
_PREVIOUS = struct.Struct(">q")
require(TIMER_UNIT_BYTES == 52, "a timer log unit has 52 bytes", found=TIMER_UNIT_BYTES)
require(_BLANK.size == BLANK_BYTES, "a timer log blank has 16 bytes", found=_BLANK.size)

#: bytes read at a time while units are followed backwards
CHAIN_BYTES = 64 << 10


class TimerLog:
    """The units of a store's timers, in the order of the timer topic. Callers: one thread."""

    def __init__(self, directory: Path, file_size: int, *, files: Files) -> None:
        self._files = files
        self._queue = MappedFileQueue(directory, file_size, files=files)
        self._file_size = file_size
        #: units of a whole file
        self._file_units = (file_size - BLANK_BYTES) // TIMER_UNIT_BYTES
        #: position of the next unit, if it fits its file
        self.end = 0
        self._synced = 0

    def load(self, end: int) -> None:
        """Open the files and cut the units after `end`. Durable: the cut. Raises: Corrupt."""
        self._queue.load()
        self._queue.truncate_to(end)
        self.end = self._synced = end

    def holds(self, end: int) -> bool:
        """Whether the files reach up to `end`."""
        return not end or self._queue.find(end - 1) is not None

    def next_positions(self, count: int) -> Int64s:
        """The positions that the next `count` units get."""
        number, inside = divmod(self.end, self._file_size)
        first = number * self._file_units + (inside + TIMER_UNIT_BYTES - 1) // TIMER_UNIT_BYTES
        if inside // TIMER_UNIT_BYTES >= self._file_units:
            first = (number + 1) * self._file_units
        ordinals = np.arange(first, first + count, dtype=np.int64)
        files, rows = np.divmod(ordinals, self._file_units)
        positions: Int64s = files * self._file_size + rows * TIMER_UNIT_BYTES
        return positions

    def append(self, units: TimerUnits) -> None:
        """Write units at the positions that `next_positions` returned for them. Raises: StorageFull, OSError."""
        data = memoryview(units.tobytes())
        while data:
            inside = self.end % self._file_size
            if inside // TIMER_UNIT_BYTES >= self._file_units:
                self._blank(inside)
                inside = 0
            file = self._queue.find(self.end) or self._queue.create_next(self.end)
            room = (self._file_units - inside // TIMER_UNIT_BYTES) * TIMER_UNIT_BYTES
            file.pwrite(data[:room], inside)
            self.end += len(data[:room])
            data = data[room:]

    def _blank(self, inside: int) -> None:
        file = self._queue.find(self.end)
        left = self._file_size - inside
        if file is not None:
            file.pwrite(_BLANK.pack(left, 0, fmt.MAGIC_BLANK), inside)
        self.end += left

    def drop(self, until_ms: int) -> None:
        """Delete the files that have only units enqueued before `until_ms`. Durable.

        RocketMQ keeps them as long as the commit log has their records.
        """
        files = self._queue.files
        while len(files) > 1 and self._first(files[1]) < until_ms:
            oldest, self._queue.files = files[0], files[1:]
            oldest.destroy()
            self._files.sync_dir(self._queue.directory)
            files = self._queue.files

    def sync(self) -> None:
        """fdatasync the units written since the last sync. Raises: OSError."""
        if self._synced < self.end:
            self._queue.sync_range(self._synced, self.end)
            self._synced = self.end

    def chain(self, last: int) -> TimerUnits:
        """The units of a second in their order, from the position of the last one.

        Raises: Corrupt for unreadable bytes. The next load rebuilds the log.
        """
        found: list[bytes] = []
        low, view = 0, memoryview(b"")
        while last != NONE:
            if not low <= last <= low + len(view) - TIMER_UNIT_BYTES:
                file = self._queue.find(last)
                if file is None:
                    break
                # Each unit names one before it.
                stop = last - file.start + TIMER_UNIT_BYTES
                low = max(0, stop - CHAIN_BYTES)
                view = memoryview(file.read(low, stop))
                low += file.start

            unit = view[last - low : last - low + TIMER_UNIT_BYTES]
            found.append(bytes(unit))
            last = _PREVIOUS.unpack_from(unit, 4)[0]

        found.reverse()
        return np.frombuffer(b"".join(found), dtype=TIMER_UNIT_DTYPE)

    def units(self, since_ms: int) -> tuple[Int64s, TimerUnits]:
        """Positions and units of all files that may have units enqueued at or after `since_ms`."""
        positions: list[Int64s] = [np.empty(0, dtype=np.int64)]
        found: list[TimerUnits] = [np.empty(0, dtype=TIMER_UNIT_DTYPE)]
        files = self._queue.files
        for index, file in enumerate(files):
            after = files[index + 1] if index + 1 < len(files) else None
            if after is not None and self._first(after) < since_ms:
                continue
            count = min(self._file_units, (self.end - file.start) // TIMER_UNIT_BYTES)
            if count > 0:
                found.append(
                    np.frombuffer(file.read(0, count * TIMER_UNIT_BYTES), dtype=TIMER_UNIT_DTYPE)
                )
                positions.append(file.start + np.arange(count, dtype=np.int64) * TIMER_UNIT_BYTES)
        return np.concatenate(positions), np.concatenate(found)

    def _first(self, file: MappedFile) -> int:
        head = file.read(0, TIMER_UNIT_BYTES)
        return int(np.frombuffer(head, dtype=TIMER_UNIT_DTYPE, count=1)["enqueue_time_ms"][0])

    def close(self) -> None:
        """Close every file."""
        self._queue.close()
