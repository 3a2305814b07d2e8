"""The chain: one fixed-size unit per append unit, covering whole records.

40 bytes, big-endian: start, end, epoch (int64 each), CRC-32C of log bytes [start, end), chain value before this unit, 8
bytes zero. The chain value after a unit is the CRC-32C of its first 28 bytes continued from the value before. The chain
is a cache, with one file per commit log segment, of the same name. A missing file is rebuilt from the log.
"""

from __future__ import annotations

import contextlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import ChainDamaged, RayMQError, Rejected, require
from raymq.store.base.files import Files
from raymq.store.log.segments.segment_paths import file_name, offset_names, segment_start_of

_UNIT = struct.Struct(">qqqIIq")
_CHAINED = struct.Struct(">qqqI")
CHAIN_UNIT_BYTES = _UNIT.size
#: units read at a time by a follower of the chain
_READ_UNITS = 4096


class ChainUnit(NamedTuple):
    """One append unit: log bytes [start, end)."""

    start: int
    end: int
    epoch: int
    crc: int
    #: chain value before this unit
    previous: int

    def pack(self) -> bytes:
        """The unit's 40 bytes."""
        return _UNIT.pack(self.start, self.end, self.epoch, self.crc, self.previous, 0)

    @property
    def value(self) -> int:
        """Chain value after this unit."""
        return crc32c(_CHAINED.pack(self.start, self.end, self.epoch, self.crc), self.previous)

    def follows(self, last: ChainUnit | None, segment_start: int, size: int) -> bool:
        """Whether the unit continues `last`, and lies inside the log file [segment_start, segment_start + size)."""
        if not segment_start <= self.start < self.end <= segment_start + size:
            return False
        return last is None or (self.start == last.end and self.previous == last.value)


def unpack_units(data: bytes | memoryview) -> list[ChainUnit]:
    """The whole units of some bytes. A torn unit at the end is left out."""
    whole = len(data) - len(data) % CHAIN_UNIT_BYTES
    return [ChainUnit(*item[:5]) for item in _UNIT.iter_unpack(data[:whole])]


def check_units(units: list[ChainUnit], data: memoryview) -> None:
    """Check that `data`, which begins with the first unit, has the units' CRCs. Raises: ChainDamaged."""
    base = units[0].start
    for unit in units:
        if crc32c(data[unit.start - base : unit.end - base]) != unit.crc:
            fault = f"bytes [{unit.start}, {unit.end}) arrived damaged"
            raise ChainDamaged(fault, offset=unit.start, rule="chain crc")


class Chain:
    """The chain of one replica. Callers: one appender. Readers in other processes use `ChainReader`."""

    def __init__(
        self, directory: Path, segment_size_bytes: int, *, files: Files, writable: bool = True
    ) -> None:
        self.directory = directory
        self._size = segment_size_bytes
        self._files = files
        self._writable = writable
        self._fds: dict[int, int] = {}
        #: start of a segment -> bytes used in its file
        self._used: dict[int, int] = {}
        self.last: ChainUnit | None = None
        #: where the first unit begins, and the value before it, while there is none
        self._begin = (0, 0)
        #: the unit whose value was computed last, and that value
        self._last_value: tuple[ChainUnit | None, int] = (None, 0)

    @property
    def value(self) -> int:
        """Chain value at the end."""
        if self.last is None:
            return self._begin[1]
        unit, value = self._last_value
        if unit is not self.last:
            value = self.last.value
            self._last_value = (self.last, value)
        return value

    def begin_at(self, offset: int, value: int) -> None:
        """Let the first unit of an empty chain begin at an offset. Args: `value`: the chain value there.

        Durable: nothing. The first unit says where the chain begins.
        """
        require(self.last is None, "only an empty chain begins elsewhere", end=self.end)
        self._begin = (offset, value)

    def load(self, verify_from: int = 0) -> None:
        """Check every unit that ends above `verify_from`. Of older files only the first and the last unit are read.

        A unit that does not follow the one before ends the chain there. Units after that end are cut off: a reader
        in another process must never see them.
        """
        self.close()
        self._used.clear()
        self.last = None
        broken = False
        for name in offset_names(self.directory, files=self._files):
            segment_start = int(name)
            count = self._files.size(self._fd(segment_start)) // CHAIN_UNIT_BYTES
            good = 0 if broken else self._load_file(segment_start, count, verify_from)
            broken = broken or good < count
            self._used[segment_start] = good * CHAIN_UNIT_BYTES
            self._cut_file(segment_start)

    def _load_file(self, segment_start: int, count: int, verify_from: int) -> int:
        """Load a file's units. Returns: how many of the leading ones are valid. Sets `last` to the last of these."""
        begin = self._first_above(segment_start, count, verify_from)
        if begin:
            first, final = self._unit(segment_start, 0), self._unit(segment_start, begin - 1)
            inside = final.start < final.end <= segment_start + self._size
            if not inside or not first.follows(self.last, segment_start, self._size):
                begin = 0
            else:
                self.last = final
        good = begin
        for unit in self._read_units(segment_start, begin, count):
            if not unit.follows(self.last, segment_start, self._size):
                break
            self.last, good = unit, good + 1
        return good

    def _cut_file(self, segment_start: int) -> None:
        """Bring a file's length to the units that count."""
        fd = self._fd(segment_start)
        if self._writable and self._files.size(fd) > self._used[segment_start]:
            self._files.truncate(fd, self._used[segment_start])

    def _read_units(self, segment_start: int, begin: int, end: int) -> Iterator[ChainUnit]:
        """Units [begin, end) of a file."""
        for low in range(begin, end, _READ_UNITS):
            yield from self._units(segment_start, low, min(end - low, _READ_UNITS))

    def _unit(self, segment_start: int, index: int) -> ChainUnit:
        return self._units(segment_start, index, 1)[0]

    def _units(self, segment_start: int, begin: int, count: int) -> list[ChainUnit]:
        nbytes, position = count * CHAIN_UNIT_BYTES, begin * CHAIN_UNIT_BYTES
        return unpack_units(self._files.pread(self._fd(segment_start), nbytes, position))

    def _first_above(self, segment_start: int, count: int, offset: int) -> int:
        """Index of the first of a file's `count` units that ends above an offset."""
        if offset <= segment_start:
            return 0
        return bisect_right(range(count), offset, key=lambda at: self._unit(segment_start, at).end)

    def _fd(self, segment_start: int) -> int:
        fd = self._fds.get(segment_start)
        if fd is None:
            path = self.directory / file_name(segment_start)
            fd = self._files.open_file(path, create=self._writable, writable=self._writable)
            self._fds[segment_start] = fd
        return fd

    def append(self, units: Sequence[ChainUnit]) -> None:
        """Append units of one log file. Raises: Rejected, with none appended, if one does not follow the one before."""
        value, end = self.value, None if self.last is None else self.last.end
        for unit in units:
            if unit.previous != value or (end is not None and unit.start != end):
                raise Rejected(
                    f"chain unit [{unit.start}, {unit.end}) does not follow the chain", field="unit"
                )
            value, end = unit.value, unit.end

        segment_start = segment_start_of(units[0].start, self._size)
        if segment_start not in self._used:
            self._retire_before(segment_start - self._size)
        used = self._used.get(segment_start, 0)
        packed = b"".join([unit.pack() for unit in units])
        fd = self._fd(segment_start)
        try:
            self._files.pwrite(fd, packed, used)
        except (OSError, RayMQError):
            # Whole units may be there: no reader may find them after later ones.
            with contextlib.suppress(OSError, RayMQError):
                self._files.truncate(fd, used)
            raise
        self._used[segment_start] = used + len(packed)
        self.last = units[-1]
        self._last_value = (units[-1], value)

    def _retire_before(self, segment_start: int) -> None:
        """Sync and close the files of older segments: nothing is written there any more."""
        old = [start for start in self._fds if start < segment_start]
        for start in old:
            if self._writable:
                self._files.sync(self._fds[start])
            self._files.close(self._fds.pop(start))
        if old and self._writable:
            self._files.sync_dir(self.directory)

    @property
    def start(self) -> int:
        """Start of the first unit, or the offset at which it will begin."""
        starts = [start for start, used in self._used.items() if used]
        return self._unit(min(starts), 0).start if starts else self._begin[0]

    @property
    def end(self) -> int:
        """End of the last unit, or the offset at which the first one will begin."""
        return self._begin[0] if self.last is None else self.last.end

    def unit_at(self, offset: int) -> ChainUnit | None:
        """The unit that holds the byte at `offset`; None if no unit does."""
        segment_start = segment_start_of(offset, self._size)
        count = self._used.get(segment_start, 0) // CHAIN_UNIT_BYTES
        index = self._first_above(segment_start, count, offset) if count else 0
        unit = self._unit(segment_start, index) if index < count else None
        return unit if unit is not None and unit.start <= offset else None

    def delete_before(self, segment_start: int) -> None:
        """Delete the files of older segments, whose log is deleted.

        Durable: nothing. After a crash the next start deletes the rest. Callers: any thread, while another one appends.
        """
        for name in offset_names(self.directory, files=self._files):
            if int(name) < segment_start:
                self._used.pop(int(name), None)
                fd = self._fds.pop(int(name), None)
                if fd is not None:
                    self._files.close(fd)
                self._files.unlink(self.directory / name)

    def units(self, start: int, stop: int) -> list[ChainUnit]:
        """Units with start <= unit.start < stop, in order."""
        return list(self.iter_units(start, stop))

    def iter_units(self, start: int, stop: int) -> Iterator[ChainUnit]:
        """`units`, read on demand."""
        for segment_start in sorted(self._used):
            if segment_start + self._size > start and segment_start < stop:
                count = self._used[segment_start] // CHAIN_UNIT_BYTES
                begin = self._first_above(segment_start, count, start)
                for unit in self._read_units(segment_start, begin, count):
                    if unit.start >= stop:
                        return
                    if unit.start >= start:
                        yield unit

    def value_at(self, offset: int) -> int | None:
        """The chain value after the unit that ends at `offset`; None if no unit ends there."""
        if self.last is not None and self.last.end == offset:
            return self.last.value
        if offset == 0:
            return 0
        if self.last is None and offset == self._begin[0]:
            return self._begin[1]
        # The log may begin here.
        first = self.unit_at(offset)
        if first is not None and first.start == offset == self.start:
            return first.previous
        unit = self.unit_at(offset - 1)
        return None if unit is None or unit.end != offset else unit.value

    def truncate_to(self, offset: int) -> None:
        """Drop every unit that ends above `offset`."""
        self.last = None
        for segment_start in sorted(self._used, reverse=True):
            count = self._used[segment_start] // CHAIN_UNIT_BYTES
            kept = self._first_above(segment_start, count, offset)
            self._used[segment_start] = kept * CHAIN_UNIT_BYTES
            self._cut_file(segment_start)
            if kept:
                self.last = self._unit(segment_start, kept - 1)
                return

    def sync(self) -> None:
        """fsync every open file and the directory.

        Durable: the whole chain, since older files were synced when they were closed.
        """
        for fd in self._fds.values():
            self._files.sync(fd)
        self._files.sync_dir(self.directory)

    def close(self) -> None:
        """Close every file."""
        for fd in self._fds.values():
            self._files.close(fd)
        self._fds.clear()


class ChainReader:
    """Follows another process's chain as it grows."""

    def __init__(self, directory: Path, segment_size_bytes: int, *, files: Files) -> None:
        self._directory = directory
        self._size = segment_size_bytes
        self._files = files
        self._segment_start = -1
        self._fd = -1
        self._position = 0
        self._next = -1

    def read_from(self, offset: int, max_bytes: int) -> list[ChainUnit]:
        """Units from the one that starts at `offset` on: as many as fit `max_bytes`, but at least one.

        Returns: an empty list if no unit starts there yet.
        """
        # After an error below the position in the file is unknown: the next call seeks.
        expected, self._next = self._next, -1
        if offset != expected:
            self._seek(offset)

        found: list[ChainUnit] = []
        total = 0
        while total < max_bytes:
            segment_start = segment_start_of(offset, self._size)
            if segment_start != self._segment_start and not self._open(segment_start):
                break
            data = self._files.pread(self._fd, CHAIN_UNIT_BYTES * _READ_UNITS, self._position)
            units = unpack_units(data)
            if not units or units[0].start != offset:
                break

            for unit in units:
                if unit.start != offset or (found and total + unit.end - unit.start > max_bytes):
                    self._next = offset
                    return found
                found.append(unit)
                total += unit.end - unit.start
                self._position += CHAIN_UNIT_BYTES
                offset = unit.end
                if segment_start_of(offset, self._size) != self._segment_start:
                    # A frame never spans two files: its bytes are read in one piece.
                    self._next = offset
                    return found

        self._next = offset
        return found

    def _open(self, segment_start: int) -> bool:
        path = self._directory / file_name(segment_start)
        if not self._files.exists(path):
            return False
        self.close()
        self._fd = self._files.open_file(path, writable=False)
        self._segment_start, self._position = segment_start, 0
        return True

    def _seek(self, offset: int) -> None:
        """Find the unit that starts at `offset` by bisection over its file."""
        if not self._open(segment_start_of(offset, self._size)):
            return
        units = range(self._files.size(self._fd) // CHAIN_UNIT_BYTES)
        self._position = CHAIN_UNIT_BYTES * bisect_left(units, offset, key=self._start_of)

    def _start_of(self, index: int) -> int:
        """Start of a unit of the open file."""
        data = self._files.pread(self._fd, CHAIN_UNIT_BYTES, index * CHAIN_UNIT_BYTES)
        return unpack_units(data)[0].start

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = self._segment_start = self._next = -1
