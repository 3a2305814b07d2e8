"""The chain units around a place, read from the chain's files.

The chain of a running log has one appender. A reader opens the files itself, and sees units that are complete.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from raymq.store.base.files import Files
from raymq.store.log.chain import CHAIN_UNIT_BYTES, ChainUnit, unpack_units
from raymq.store.log.segments.segment_paths import file_name, segment_start_of

from .fitting import ChainWindow

#: units read at a time
_READ_UNITS = 4096


def read_window(
    directory: Path, segment_size_bytes: int, start: int, stop: int, *, files: Files
) -> ChainWindow:
    """The units that overlap [start, stop), a range of one segment, and their neighbours. Args: `directory`: the chain.

    Raises: FileNotFoundError if the chain has no file for that segment.
    """
    segment_start = segment_start_of(start, segment_size_bytes)
    path = directory / file_name(segment_start)
    found = _units_around(path, start, stop, files=files)

    units = [unit for unit in found if unit.start < stop and start < unit.end]
    before = next((unit for unit in reversed(found) if unit.end <= start), None)
    after = next((unit for unit in found if unit.start >= stop), None)

    if before is None and segment_start:
        path = directory / file_name(segment_start - segment_size_bytes)
        before = _unit_of(path, -1, files=files)
    if after is None:
        path = directory / file_name(segment_start + segment_size_bytes)
        after = _unit_of(path, 0, files=files)
    return ChainWindow(before, units, after)


def read_units(path: Path, *, files: Files) -> list[ChainUnit]:
    """All units of one file of the chain; none if the file does not exist."""
    if not files.exists(path):
        return []
    return unpack_units(files.read_file(path))


def _units_around(path: Path, start: int, stop: int, *, files: Files) -> list[ChainUnit]:
    """Units of a file, from the one before the unit that holds `start` to the one after that which ends at `stop`."""
    with files.opened(path, writable=False) as fd:
        count = files.size(fd) // CHAIN_UNIT_BYTES

        def start_of(index: int) -> int:
            data = files.pread(fd, CHAIN_UNIT_BYTES, index * CHAIN_UNIT_BYTES)
            return unpack_units(data)[0].start

        first = max(0, bisect_right(range(count), start, key=start_of) - 2)
        found: list[ChainUnit] = []
        for low in range(first, count, _READ_UNITS):
            size = CHAIN_UNIT_BYTES * min(_READ_UNITS, count - low)
            found += unpack_units(files.pread(fd, size, low * CHAIN_UNIT_BYTES))
            if found[-1].start >= stop:
                break
        return found


def _unit_of(path: Path, index: int, *, files: Files) -> ChainUnit | None:
    """The first (0) or the last (-1) unit of a file; None without one."""
    if not files.exists(path):
        return None
    with files.opened(path, writable=False) as fd:
        count = files.size(fd) // CHAIN_UNIT_BYTES
        if not count:
            return None
        position = index % count * CHAIN_UNIT_BYTES
        return unpack_units(files.pread(fd, CHAIN_UNIT_BYTES, position))[0]
