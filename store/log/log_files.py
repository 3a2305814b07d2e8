"""The files of a commit log: where they are, and their bytes beside those of another replica."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raymq.store.config import StoreConfig
from raymq.store.errors import Corrupt, OffsetOutOfRange, Unavailable
from raymq.store.files import Files

from .chain import ChainUnit, check_units
from .mapped_file_queue import MappedFileQueue
from .segment_paths import note_directories, other_directories
from .spare_files import SpareFiles


def open_log_files(root: Path, config: StoreConfig, *, files: Files) -> MappedFileQueue:
    """The queue of a store's commit log files, not loaded, in all the directories that they are in.

    Durable: the names of all files, whichever process made or removed them. Deletes the spare files of earlier
    processes.
    """
    directories = [
        Path(name).absolute()
        for name in (*config.commit_log_paths, *config.read_only_commit_log_paths)
    ]
    note_directories(root, directories, files=files)
    write_to = directories[: len(config.commit_log_paths)]
    for path in write_to:
        files.settle_dirs(path)
    others = other_directories(root, files=files)
    for path in dict.fromkeys((root / "commitlog", *write_to, *others)):
        if files.is_dir(path):
            files.sync_dir(path)
    queue = MappedFileQueue(
        root / "commitlog",
        config.segment_size_bytes,
        files=files,
        write_to=write_to,
        read_from=others,
    )
    spares = root / "raymq" / "spare"
    if config.recycle_commit_log_files or files.exists(spares):
        found = SpareFiles(spares, config.segment_size_bytes, files=files)
        queue.spares = found if config.recycle_commit_log_files else None
    return queue


def same_until(queue: MappedFileQueue, end: int, units: list[ChainUnit], data: memoryview) -> int:
    """Where a log's bytes first differ from the units' bytes, or the end of the shorter of both.

    Raises: Corrupt when `data` does not have the CRCs of its units: then it proves nothing.
    """
    check_units(units, data)
    position = base = units[0].start
    stop = min(units[-1].end, end)
    while position < stop:
        upto = min(stop, position - position % queue.file_size + queue.file_size)
        mine = np.frombuffer(read_of(queue, position, upto, end), dtype=np.uint8)
        theirs = np.frombuffer(data[position - base : upto - base], dtype=np.uint8)
        different = mine != theirs
        if different.any():
            return position + int(np.argmax(different))
        position = upto
    return stop


def read_of(queue: MappedFileQueue, start: int, stop: int, end: int) -> bytes:
    """Log bytes [start, stop), which lie in one file; `end` is the log's. For many: `read_into`.

    Raises: OffsetOutOfRange for deleted bytes; Corrupt for bytes that are missing, or that the disk cannot read.
    """
    file = queue.find(start)
    if file is not None:
        try:
            return file.read(start - file.start, stop - file.start)
        except Unavailable:
            if start >= queue.min_offset:
                raise
    raise _missing(queue, start, end)


def read_into(queue: MappedFileQueue, target: memoryview, start: int, end: int) -> None:
    """`read_of` into memory that is there."""
    file = queue.find(start)
    if file is not None:
        try:
            return file.read_into(target, start - file.start)
        except Unavailable:
            if start >= queue.min_offset:
                raise
    raise _missing(queue, start, end)


def read_each(queue: MappedFileQueue, places: Sequence[int], nbytes: int, end: int) -> list[bytes]:
    """`read_of` at each place: `nbytes` bytes, or fewer at the end of its file; none where they were deleted.

    Quickest where places of one file follow each other.
    """
    found: list[bytes] = []
    while len(found) < len(places):
        first = len(found)
        file = queue.find(places[first])
        try:
            if file is None:
                raise _missing(queue, places[first], end)
            low, high = file.start, file.start + file.size
            same = places[first:]
            if min(same) < low or max(same) >= high:
                apart = (row for row, place in enumerate(same) if not low <= place < high)
                same = same[: next(apart)]
            found += file.read_each([place - low for place in same], nbytes)
        except Unavailable:
            if places[first] >= queue.min_offset:
                raise
            found.append(b"")
        except OffsetOutOfRange:
            found.append(b"")
    return found


def _missing(queue: MappedFileQueue, start: int, end: int) -> OffsetOutOfRange | Corrupt:
    if 0 <= start < queue.min_offset:
        return OffsetOutOfRange(
            f"the log begins at {queue.min_offset}; what stood at {start} was deleted",
            min=queue.min_offset,
            max=end,
            offset=start,
        )
    return Corrupt(
        f"no commit log file holds offset {start}",
        path=str(queue.directory),
        offset=start,
        rule="offset has a file",
    )


def rewrite(queue: MappedFileQueue, position: int, end: int) -> None:
    """Write bytes [position, end) of a log again. Raises: OSError, StorageFull."""
    while position < end:
        base = position - position % queue.file_size
        stop = min(end, base + queue.file_size, position + (1 << 20))
        data = read_of(queue, position, stop, end)
        file = queue.find(position)
        if file is not None:
            file.pwrite(data, position - base)
        position = stop
