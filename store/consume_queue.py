"""The consume queue: 20 bytes a message, from queue offset to place in the commit log. A cache of log[0, C).

Source: ConsumeQueue, RocketMQ 5.3.3 (reference 6.1-6.4).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import format as fmt
from .files import Files
from .mapped_file import MappedFile
from .mapped_file_queue import MappedFileQueue

Int64s = npt.NDArray[np.int64]

#: what stands before a queue's first unit in its first file
_PRE_BLANK_SIZE = 0x7FFFFFFF


class ConsumeQueue:
    """One queue of one topic. One appender; any may read."""

    def __init__(
        self, directory: Path, file_size: int, *, files: Files, writable: bool = True
    ) -> None:
        self.directory = directory
        self._file_size = file_size
        self._queue = MappedFileQueue(directory, file_size, files=files, writable=writable)
        #: oldest readable queue offset
        self.min_offset = 0
        #: next queue offset
        self.max_offset = 0
        #: end of the last record that has a unit; -1: none
        self.max_physical_offset = -1
        self._dirty_from = 0

    def load(self) -> None:
        """Open the files. Raises: Corrupt for a wrong name or length."""
        self._queue.load()

    def recover(self) -> None:
        """Find the first and the last valid unit. Source: ConsumeQueue#recover."""
        if not self._queue.files:
            return
        self.min_offset = self._queue.min_offset // fmt.UNIT_BYTES
        end = self.min_offset
        for file in self._queue.files:
            units = self._units(file)
            valid = (units["size"] > 0) & (units["position"] >= 0)
            count = len(units) if valid.all() else int(np.argmin(valid))
            end = file.start // fmt.UNIT_BYTES + count
            if count < len(units):
                break
        first = self._units(self._queue.files[0])
        blank = (first["position"] == 0) & (first["size"] == _PRE_BLANK_SIZE)
        skip = len(first) if blank.all() else int(np.argmin(blank))
        self.min_offset = min(self.min_offset + skip, end)
        self._set_end(end)

    def _set_end(self, end: int) -> None:
        self.max_offset = max(end, self.min_offset)
        self._dirty_from = self.max_offset
        if self.max_offset > self.min_offset:
            last = self.read(self.max_offset - 1, 1)[0]
            self.max_physical_offset = int(last["position"]) + int(last["size"])
        else:
            self.max_physical_offset = -1

    def _units(self, file: MappedFile) -> npt.NDArray[Any]:
        return np.frombuffer(file.read_view(), dtype=fmt.UNIT_DTYPE, count=self._file_size // 20)

    def append(
        self, queue_offset: int, positions: Int64s, sizes: Int64s, tags_codes: Int64s
    ) -> None:
        """Write the units of consecutive messages; what was written before is left out.

        Source: ConsumeQueue#putMessagePositionInfo, the idempotence rule of reference 6.2.
        """
        skip = int(np.searchsorted(positions + sizes, self.max_physical_offset, side="right"))
        skip = max(skip, self.max_offset - queue_offset if self.max_physical_offset >= 0 else 0)
        if skip >= len(positions):
            return
        units = np.empty(len(positions) - skip, dtype=fmt.UNIT_DTYPE)
        units["position"] = positions[skip:]
        units["size"] = sizes[skip:]
        units["tags_code"] = tags_codes[skip:]
        offset = queue_offset + skip
        if not self._queue.files:
            self._start(offset)
        self._write(offset, units)
        self.max_physical_offset = int(positions[-1] + sizes[-1])
        self.max_offset = offset + len(units)

    def _start(self, offset: int) -> None:
        """The first file; a queue that does not begin at 0 is filled up to its first unit."""
        file = self._queue.create_next(offset * fmt.UNIT_BYTES)
        before = offset - file.start // fmt.UNIT_BYTES
        if before:
            filler = np.zeros(before, dtype=fmt.UNIT_DTYPE)
            filler["size"] = _PRE_BLANK_SIZE
            file.pwrite(filler.tobytes(), 0)
        self.min_offset = offset

    def _write(self, offset: int, units: npt.NDArray[Any]) -> None:
        data = memoryview(units.view(np.uint8))
        at = offset * fmt.UNIT_BYTES
        while data:
            file = self._queue.find(at)
            if file is None:
                file = self._queue.create_next()
                continue
            room = file.start + file.size - at
            file.pwrite(data[:room], at - file.start)
            at += min(room, len(data))
            data = data[room:]

    def read(self, queue_offset: int, count: int) -> npt.NDArray[Any]:
        """Units [queue_offset, queue_offset + count) as far as one file has them at least; UNIT_DTYPE."""
        found = []
        end = queue_offset + count
        while queue_offset < end:
            file = self._queue.find(queue_offset * fmt.UNIT_BYTES)
            if file is None:
                break
            low = queue_offset - file.start // fmt.UNIT_BYTES
            part = self._units(file)[low : low + end - queue_offset]
            found.append(part)
            queue_offset += len(part)
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, dtype=fmt.UNIT_DTYPE)

    def truncate(self, physical_offset: int) -> None:
        """Drop the units of records that end above `physical_offset`, and zero what stood there."""
        if self.max_physical_offset <= physical_offset:
            return
        units = self.read(self.min_offset, self.max_offset - self.min_offset)
        keep = int(np.searchsorted(units["position"] + units["size"], physical_offset, side="right"))
        end = self.min_offset + keep
        self._queue.truncate_to(end * fmt.UNIT_BYTES)
        self._set_end(end)

    def correct_min_offset(self, min_physical: int) -> None:
        """After commit log files were deleted: the queue begins at the first record that is left."""
        units = self.read(self.min_offset, self.max_offset - self.min_offset)
        self.min_offset += int(np.searchsorted(units["position"], min_physical))

    def sync(self) -> None:
        """fdatasync what was written since the last sync."""
        self._queue.sync_range(
            self._dirty_from * fmt.UNIT_BYTES, max(self.max_offset, 1) * fmt.UNIT_BYTES
        )
        self._dirty_from = self.max_offset

    def close(self) -> None:
        """Close every file."""
        self._queue.close()
