"""The consume queue, a cache: 20 bytes per message, from queue offset to physical offset.

Source: ConsumeQueue, RocketMQ 5.3.3.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import numpy as np

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Structs, leading
from raymq.store.base.errors import Corrupt, require
from raymq.store.base.files import Files

from .queue_files import OpenFiles, QueueFile, QueueFiles

QueueUnits = Structs

#: size of a blank unit, which has no message. Its position and its tags code are 0
BLANK_SIZE = 0x7FFFFFFF
_BLANK_UNIT = fmt.QUEUE_UNIT.pack(0, BLANK_SIZE, 0)
#: tags code of a unit for an offset whose message is missing. On disk the unit points at the queue's next message:
#: RocketMQ takes such a code for an address in `consumequeue_ext`, and serves that message twice. At a blank unit it
#: would leave out all messages in the rest of a log file. `read` gives a blank unit instead.
MISSING_CODE = -(1 << 31) - 2
#: last files that are checked at the start after an orderly stop
CLEAN_FILES = 3
#: units read at a time while searching for the end, and units of the first read, which is enough for most queues
SCAN_UNITS, SCAN_UNITS_FIRST = 8192, 200


def may_be_queue(topic: str, queue_id: int) -> bool:
    """Whether a store can have a queue of this name: damaged records may name others."""
    return (
        bool(topic) and topic not in (".", "..") and not set(topic) & set("/\0") and queue_id >= 0
    )


def queue_directory(root: Path, topic: str, queue_id: int) -> Path:
    """The directory of a queue's units, which is below the store's root for any topic in a record.

    Raises: Corrupt for a topic or queue that would be elsewhere, or that no start would find.
    """
    if not may_be_queue(topic, queue_id):
        raise Corrupt(
            f"a record names queue {queue_id} of topic {topic!r}, which is not a directory of a store",
            path=str(root),
            rule="topic and queue of a record",
            expected="a topic's name, a queue from 0 on",
            found=f"{topic!r}, {queue_id}",
        )
    return root / "consumequeue" / topic / str(queue_id)


def queue_directories(base: Path, files: Files) -> list[tuple[str, int, Path]]:
    """Topic, queue id and directory of every queue in a directory of topics, `consumequeue` for example.

    Source: ConsumeQueueStore#loadConsumeQueues, which does not look at other files and names either.
    """
    found = []
    for topic in sub_directories(base, files):
        for name in sub_directories(base / topic, files):
            if name.isdecimal() and name == str(int(name)):
                found.append((topic, int(name), base / topic / name))
    return sorted(found)


def sub_directories(directory: Path, files: Files) -> list[str]:
    """The names of the directories in a directory; none if it is not one."""
    if not files.is_dir(directory):
        return []
    return [name for name in files.list(directory) if files.is_dir(directory / name)]


class ConsumeQueue:
    """One queue of one topic. Callers: one thread appends and truncates, one syncs, any may read.

    Invariant: units [min_offset, max_offset) are written. `max_offset` moves after the bytes.
    """

    def __init__(
        self,
        directory: Path,
        file_size: int,
        *,
        files: Files,
        writable: bool = True,
        opened: OpenFiles | None = None,
    ) -> None:
        """Args: `opened`: shared by the store's queues; None: this queue has its own."""
        self.directory = directory
        self._file_units = file_size // fmt.QUEUE_UNIT_BYTES
        opened = OpenFiles(files) if opened is None else opened
        self._queue = QueueFiles(directory, file_size, opened=opened, writable=writable)
        self._writable = writable

        #: oldest readable queue offset
        self.min_offset = 0
        #: next queue offset
        self.max_offset = 0
        #: end of the last record that has a unit; -1: none
        self.max_physical_offset = -1
        #: units from here on may be unsynced
        self._dirty_from = 0
        #: zeros after the last unit may be unsynced too
        self._zeros_unsynced = False

    def load(self) -> None:
        """Find the files. Raises: Corrupt for a wrong name or length or a gap."""
        self._queue.load()

    def note_unsynced(self) -> None:
        """Note that an earlier process wrote here. It is unknown which of its bytes are on disk."""
        self._dirty_from = 0
        self._queue.note_unsynced()

    def recover(
        self, *, after_crash: bool = True, sound_below: int = 0, erases: bool = True
    ) -> None:
        """Find the first unit and the end of the units.

        After a crash every file is checked that may hold units of records at or above `sound_below` (physical).
        Otherwise only the last three files are checked. Args: `erases`: `erase_after_end` is called, too.
        Source: ConsumeQueue#recover, which always checks three and erases nothing.
        """
        files = self._queue.files
        if not files:
            return

        first = files[0].start // fmt.QUEUE_UNIT_BYTES
        end = first
        for file in self._files_to_check(sound_below) if after_crash else files[-CLEAN_FILES:]:
            count = self._count_valid(file)
            end = file.start // fmt.QUEUE_UNIT_BYTES + count
            if count < self._file_units:
                break

        self.min_offset = self._after_blanks(first, end)
        self._set_end(self._without_blank_tail(max(end, self.min_offset)))
        # Units that a start finds count as synced, unless `note_unsynced` is called.
        self._dirty_from = self.max_offset

        if erases:
            self.erase_after_end()

    def erase_after_end(self) -> None:
        """Erase the bytes after the last unit.

        Pages reach the disk in any order, and these bytes would become units once the hole before them is filled.
        RocketMQ takes those that follow the last unit for a message.
        """
        if self._writable and self._queue.files and self._has_data_after_end():
            self._truncate_to(self.max_offset)

    def drop_end(self, is_record: Callable[[int, int], bool]) -> None:
        """Forget the last units that point at no record, without a write. Args: `is_record`: of a position and size."""
        end = self.max_offset
        while end > self.min_offset:
            before, unit = 0, self._span(max(self.min_offset, end - 2), end)
            if len(unit) > 1 and not _is_blank(unit[:1])[0]:
                before = int(unit["position"][0]) + int(unit["size"][0])
            position, size = int(unit["position"][-1]), int(unit["size"][-1])
            if position >= before and is_record(position, size):
                break
            end = self._without_blank_tail(end - 1)
        if end < self.max_offset:
            self._set_end(end)

    def cut(self, queue_offset: int) -> None:
        """Drop the units from an offset on, and zero their bytes. Below the first unit: all units.

        Durable: after the next `sync`.
        """
        end = max(queue_offset, self._queue.min_offset // fmt.QUEUE_UNIT_BYTES)
        if end >= self.max_offset:
            return
        self.min_offset = min(self.min_offset, end)
        self._truncate_to(end)
        self._set_end(self._without_blank_tail(end))

    def resume(self, end: int, below: int) -> bool:
        """Continue from the known end of this queue: after the unit of its last record below a physical offset.

        Units that a killed process wrote after it are dispatched again, to the same offsets. If that unit is not there,
        the queue ends after the last one before it that is. Returns: whether it ends where it should.
        Raises: Corrupt if its file is not there.
        """
        first = self._queue.min_offset // fmt.QUEUE_UNIT_BYTES
        if not self._queue.files or first > end:
            raise Corrupt(
                f"queue {self.directory} does not end at offset {end}, where its last message was dispatched; restart "
                "the store, which then rebuilds its consume queues",
                path=str(self.directory),
                offset=end,
                rule="a queue ends where it was dispatched to",
                expected=end,
            )

        self.min_offset = self._after_blanks(first, end)
        sound = self._end_of_sound(end, below)
        self._set_end(sound)
        self._dirty_from = sound
        self.erase_after_end()
        return sound == end

    def _end_of_sound(self, end: int, below: int) -> int:
        """The offset after the last unit below `end` that may be of a record below a physical offset."""
        count = 1
        while end > self.min_offset:
            low = max(self.min_offset, end - count)
            sound = _points(self._span(low, end), below)
            if sound.any():
                return low + int(np.flatnonzero(sound)[-1]) + 1
            end, count = low, SCAN_UNITS
        return end

    def has_unit(self, position: int, size: int) -> bool:
        """Whether there is a unit of this position and size."""
        found = bisect_left(
            range(self.min_offset, self.max_offset),
            position,
            key=lambda offset: int(self._span(offset, offset + 1)["position"][0]),
        )
        # Positions ascend. A damaged unit may say any, so the neighbours are looked at, too.
        low = max(self.min_offset, self.min_offset + found - SCAN_UNITS_FIRST)
        units = self._span(low, min(self.max_offset, low + 2 * SCAN_UNITS_FIRST))
        return bool(((units["position"] == position) & (units["size"] == size)).any())

    def around(self, queue_offset: int) -> tuple[int | None, int | None]:
        """Where the records of the units before and after an offset end and begin; None: none is near."""
        before = self._span(max(self.min_offset, queue_offset - SCAN_UNITS), queue_offset)
        after = self._span(queue_offset + 1, min(self.max_offset, queue_offset + SCAN_UNITS))
        rows_before, rows_after = (np.flatnonzero(_points(units)) for units in (before, after))
        end = begin = None
        if len(rows_before):
            unit = before[rows_before[-1]]
            end = int(unit["position"]) + int(unit["size"])
        if len(rows_after):
            begin = int(after["position"][rows_after[0]])
        return end, begin

    def _files_to_check(self, sound_below: int) -> list[QueueFile]:
        """The files that may have unsound units: those from the last file with a sound first unit on."""
        files = self._queue.files
        for index in range(len(files) - 1, 0, -1):
            unit = self._units(files[index], 0, 1)[0]
            if unit["size"] > 0 and 0 <= unit["position"] < sound_below and not _is_blank(unit):
                return files[index:]
        return files

    def _count_valid(self, file: QueueFile) -> int:
        low, count = 0, SCAN_UNITS_FIRST
        while low < self._file_units:
            part = self._units(file, low, count)
            valid = (part["size"] > 0) & (part["position"] >= 0)
            if not valid.all():
                return low + leading(valid)
            low, count = low + len(part), SCAN_UNITS
        return low

    def _after_blanks(self, first: int, end: int) -> int:
        """The offset of the first unit of [first, end) that is not blank; the end without one."""
        low, count = first, SCAN_UNITS_FIRST
        while low < end:
            blank = _is_blank(self._span(low, min(low + count, end)))
            if not blank.all():
                return low + leading(blank)
            low, count = low + len(blank), SCAN_UNITS
        return low

    def _without_blank_tail(self, end: int) -> int:
        """Drop blanks at the end. Blanks fill the gap before a unit, and a crash may come before that unit is
        written."""
        count = SCAN_UNITS_FIRST
        while end > self.min_offset:
            blank = _is_blank(self._span(max(self.min_offset, end - count), end))
            end -= leading(blank[::-1])
            if not blank.all():
                break
            count = SCAN_UNITS
        return end

    def _has_data_after_end(self) -> bool:
        """Whether there are files, or bytes that are not zero, after the end."""
        files, at = self._queue.files, self.max_offset * fmt.QUEUE_UNIT_BYTES
        if files[-1].start > at or (files[-1].start == at and (len(files) > 1 or not at)):
            return True
        file = self._queue.find(at)
        return file is not None and file.data_after(at - file.start) is not None

    def _truncate_to(self, end: int) -> None:
        self._zeros_unsynced = True
        self._queue.truncate_to(end * fmt.QUEUE_UNIT_BYTES)

    def _set_end(self, end: int) -> None:
        self.max_offset = end
        self._dirty_from = min(self._dirty_from, end)
        self.max_physical_offset = -1
        if end > self.min_offset:
            last = self._span(end - 1, end)[0]
            self.max_physical_offset = int(last["position"]) + int(last["size"])

    def jumps_to(self, queue_offset: int) -> bool:
        """Whether an offset is a file or more after the last unit: `append` refuses it."""
        return bool(self._queue.files) and queue_offset - self.max_offset >= self._file_units

    def append(self, queue_offset: int, units: bytes) -> None:
        """Write the packed units of consecutive messages, the first of which has `queue_offset`.

        Units written before are left out, so dispatching again is harmless. A gap in the queue offsets, of foreign
        stores or by damage, gets units that say so. Raises: StorageFull, Corrupt for a gap of more than a file.
        Source: ConsumeQueue#putMessagePositionInfo, which would shift all offsets after a gap.
        """
        count, rest = divmod(len(units), fmt.QUEUE_UNIT_BYTES)
        require(not rest, "units are whole", found=len(units))

        skip = 0
        if units and fmt.QUEUE_UNIT.unpack_from(units)[0] < self.max_physical_offset:
            found = np.frombuffer(units, dtype=fmt.QUEUE_UNIT_DTYPE)
            ends = found["position"].astype(np.int64) + found["size"]
            skip = int(np.searchsorted(ends, self.max_physical_offset, side="right"))
        if self._queue.files:
            skip = max(skip, self.max_offset - queue_offset)
        if skip >= count:
            return

        offset = queue_offset + skip
        if not self._queue.files:
            self._queue.create_next(offset * fmt.QUEUE_UNIT_BYTES)
            # The first file is blank up to its first unit, as RocketMQ makes it.
            self.min_offset = offset
            self.max_offset = self._queue.min_offset // fmt.QUEUE_UNIT_BYTES

        gap = offset - self.max_offset
        if gap >= self._file_units:
            raise Corrupt(
                f"queue {self.directory} jumps from offset {self.max_offset} to {offset}",
                path=str(self.directory),
                offset=self.max_offset,
                rule="queue offsets have no gap of a file or more",
                expected=self.max_offset,
                found=offset,
            )

        self._dirty_from = min(self._dirty_from, self.max_offset)
        units = units[skip * fmt.QUEUE_UNIT_BYTES :]
        filling = _BLANK_UNIT
        if gap and self.min_offset < self.max_offset:
            following, size, _ = fmt.QUEUE_UNIT.unpack_from(units)
            filling = fmt.QUEUE_UNIT.pack(following, size, MISSING_CODE)
        self._write(self.max_offset, filling * gap + units)
        if self.min_offset == self.max_offset:
            # There was no unit, and a start finds the first one after the blanks.
            self.min_offset = offset
        position, size, _ = fmt.QUEUE_UNIT.unpack_from(units, len(units) - fmt.QUEUE_UNIT_BYTES)
        self.max_physical_offset = position + size
        self.max_offset = offset + count - skip

    def replace(self, queue_offset: int, units: bytes) -> bool:
        """Write the units of messages from `queue_offset` on again, as far as they have units and these are others.

        Callers: after damage of their records was mended. Returns: whether there were others.
        """
        low = max(queue_offset, self.min_offset)
        high = min(queue_offset + len(units) // fmt.QUEUE_UNIT_BYTES, self.max_offset)
        if low >= high:
            return False
        first, last = low - queue_offset, high - queue_offset
        wanted = units[first * fmt.QUEUE_UNIT_BYTES : last * fmt.QUEUE_UNIT_BYTES]
        if self._span(low, high).tobytes() == wanted:
            return False

        self._write(low, wanted)
        self._dirty_from = min(self._dirty_from, low)
        if high == self.max_offset:
            position, size, _ = fmt.QUEUE_UNIT.unpack_from(
                wanted, len(wanted) - fmt.QUEUE_UNIT_BYTES
            )
            self.max_physical_offset = position + size
        return True

    def begin_at(self, queue_offset: int) -> bool:
        """Make a queue without units continue at an offset. Returns: False, with no change, if it has units.

        It may have the file for that offset already, without the blanks before it: a power loss takes them.
        """
        first = queue_offset // self._file_units * self._file_units
        if not self._queue.files:
            self._queue.create_next(queue_offset * fmt.QUEUE_UNIT_BYTES)
        elif self.max_offset > self._queue.min_offset // fmt.QUEUE_UNIT_BYTES or (
            self._queue.min_offset != first * fmt.QUEUE_UNIT_BYTES
        ):
            return False
        self._dirty_from = min(self._dirty_from, first)
        self._write(first, _BLANK_UNIT * (queue_offset - first))
        self.min_offset = self.max_offset = queue_offset
        return True

    def _write(self, offset: int, units: bytes) -> None:
        data = memoryview(units)
        at = offset * fmt.QUEUE_UNIT_BYTES
        while data:
            file = self._queue.find(at) or self._queue.create_next()
            room = file.start + file.size - at
            file.pwrite(data[:room], at - file.start)
            at += len(data[:room])
            data = data[room:]

    def read(self, queue_offset: int, count: int) -> QueueUnits:
        """Units [queue_offset, queue_offset + count), cut at `max_offset`.

        Returns: QUEUE_UNIT_DTYPE. Units of BLANK_SIZE have no message. Raises: Corrupt for unreadable bytes.
        """
        units = self._span(queue_offset, min(queue_offset + count, self.max_offset))
        missing = units["tags_code"] == MISSING_CODE
        if missing.any():
            units = units.copy()
            units[missing] = (0, BLANK_SIZE, 0)
        return units

    def read_packed(self, queue_offset: int, count: int) -> bytes:
        """The bytes of `read`'s units, or of those in the first file. Raises: Corrupt for unreadable bytes."""
        file = self._queue.find(queue_offset * fmt.QUEUE_UNIT_BYTES)
        count = min(count, self.max_offset - queue_offset)
        if file is None or count <= 0:
            return b""
        low = queue_offset - file.start // fmt.QUEUE_UNIT_BYTES
        with contextlib.suppress(FileNotFoundError):
            return self._packed_units(file, low, count)
        # The file has been deleted.
        return b""

    def _span(self, start: int, stop: int) -> QueueUnits:
        found = []
        while start < stop:
            file = self._queue.find(start * fmt.QUEUE_UNIT_BYTES)
            if file is None:
                break
            try:
                part = self._units(file, start - file.start // fmt.QUEUE_UNIT_BYTES, stop - start)
            except FileNotFoundError:
                # The file has been deleted.
                break
            found.append(part)
            start += len(part)

        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, dtype=fmt.QUEUE_UNIT_DTYPE)

    def _units(self, file: QueueFile, low: int, count: int) -> QueueUnits:
        """Units of a file from its `low`-th on, at most `count`."""
        return np.frombuffer(self._packed_units(file, low, count), dtype=fmt.QUEUE_UNIT_DTYPE)

    def _packed_units(self, file: QueueFile, low: int, count: int) -> bytes:
        count = min(count, self._file_units - low)
        return file.pread(count * fmt.QUEUE_UNIT_BYTES, low * fmt.QUEUE_UNIT_BYTES)

    def truncate(self, physical_offset: int) -> None:
        """Drop the units of records that end above `physical_offset`, and zero their bytes.

        Durable: after the next `sync`. A power loss may bring the units back. But then the boot is another one, after
        which nothing above the queues' synced end is believed. Source: ConsumeQueue#truncateDirtyLogicFiles, which
        zeroes nothing.
        """
        if self.max_physical_offset <= physical_offset:
            return

        end = self.min_offset
        for file in reversed(self._queue.files):
            first = file.start // fmt.QUEUE_UNIT_BYTES
            low = max(self.min_offset, first)
            units = self._span(low, min(self.max_offset, first + self._file_units))
            kept = ~_is_blank(units) & (
                units["position"].astype(np.int64) + units["size"] <= physical_offset
            )
            if kept.any():
                end = low + int(np.flatnonzero(kept)[-1]) + 1
                break

        self._truncate_to(end)
        self._set_end(end)

    def correct_min_offset(self, min_physical: int) -> None:
        """Begin at the first unit at or above `min_physical`. Callers: after log files were deleted.

        Without such a unit the queue becomes empty and keeps its next offset.
        Source: ConsumeQueue#correctMinOffset.
        """
        # Units appended from here on are of present records.
        low, end = self.min_offset, self.max_offset
        count = SCAN_UNITS_FIRST
        while low < end:
            file = self._queue.find(low * fmt.QUEUE_UNIT_BYTES)
            stop = (
                end if file is None else min(end, (file.start + file.size) // fmt.QUEUE_UNIT_BYTES)
            )
            last = self._span(stop - 1, stop)
            if len(last) and last["position"][0] < min_physical:
                # All units of this file are below it, but for blank ones.
                low = stop
                continue

            units = self._span(low, min(low + count, stop))
            alive = (units["position"] >= min_physical) & ~_is_blank(units)
            if alive.any():
                self.min_offset = low + int(alive.argmax())
                return
            low, count = low + max(1, len(units)), SCAN_UNITS

        self.min_offset = end

    def delete_expired(self) -> None:
        """Delete the files whose units are all below `min_offset`, but never the last file.

        Durable: at return. Source: MappedFileQueue#deleteExpiredFileByOffset.
        """
        end = self.min_offset * fmt.QUEUE_UNIT_BYTES
        while len(self._queue.files) > 1 and self._queue.files[1].start <= end:
            self._queue.delete_first()

    @property
    def dirty(self) -> bool:
        """Whether something was written since the last sync."""
        return self._dirty_from < self.max_offset or self._zeros_unsynced

    def start_writeback(self) -> None:
        """Ask the kernel to begin writing dirty pages. Callers: before many syncs."""
        for file in self._dirty_files(self.max_offset):
            file.start_writeback()

    def _dirty_files(self, end: int) -> list[QueueFile]:
        """The files with unsynced units below queue offset `end`."""
        start, stop = self._dirty_from, end
        if self._zeros_unsynced:
            # They begin at the end.
            stop += 1
        if start >= stop:
            return []
        return self._queue.overlapping(start * fmt.QUEUE_UNIT_BYTES, stop * fmt.QUEUE_UNIT_BYTES)

    def sync(self) -> None:
        """fdatasync the units written since the last sync. `OpenFiles.sync_names` syncs names. Raises: OSError."""
        # Read the end once: units that are appended from here on are for the next sync, in whichever file they are.
        end = self.max_offset
        files = self._dirty_files(end)
        dirty_from, zeros_unsynced = self._dirty_from, self._zeros_unsynced
        self._dirty_from, self._zeros_unsynced = end, False
        try:
            for file in files:
                file.sync()
        except OSError:
            self._dirty_from = min(self._dirty_from, dirty_from)
            self._zeros_unsynced |= zeros_unsynced
            raise

    def locate(self, queue_offset: int) -> tuple[Path, int]:
        """The file that holds a unit, and the unit's position in the file. Without such a file: the directory."""
        at = queue_offset * fmt.QUEUE_UNIT_BYTES
        file = self._queue.find(at)
        return (self.directory, at) if file is None else (file.path, at - file.start)

    def bytes_after_end(self) -> int | None:
        """The queue offset after the last unit if non-zero bytes follow it; otherwise None."""
        if not self._queue.files or not self._has_data_after_end():
            return None
        return self.max_offset

    def close(self) -> None:
        """Close every file."""
        self._queue.close()


def _is_blank(units: QueueUnits) -> Bools:
    """A mask of the units without a message of their own."""
    blank = (units["position"] == 0) & (units["size"] == BLANK_SIZE)
    return np.asarray(blank | (units["tags_code"] == MISSING_CODE), dtype=np.bool_)


def _points(units: QueueUnits, below: int = 1 << 62) -> Bools:
    """A mask of the units that may point at a record of their own, which ends at or below `below`."""
    positions, sizes = units["position"].astype(np.int64), units["size"].astype(np.int64)
    good = (positions >= 0) & (sizes >= fmt.RECORD_MIN_BYTES) & ~_is_blank(units)
    return np.asarray(good & (positions <= below - sizes), dtype=np.bool_)
