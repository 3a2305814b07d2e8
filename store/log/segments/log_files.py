"""The files of a commit log: their directories and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Unavailable
from raymq.store.base.files import Files
from raymq.store.base.rules import FILE_OF_OFFSET_RULE
from raymq.store.config.store_config import StoreConfig

from .mapped_file import MappedFile
from .mapped_file_queue import MappedFileQueue
from .segment_paths import note_directories, other_directories
from .spare_files import SpareFiles

_Read = TypeVar("_Read")


def open_log_files(root: Path, config: StoreConfig, *, files: Files) -> MappedFileQueue:
    """The segments of a store's commit log, not loaded, in all their directories.

    Durable: the names of all files, whichever process made or removed them. Deletes the spare files of earlier
    processes.
    """
    names = (*config.commit_log_paths, *config.read_only_commit_log_paths)
    directories = [Path(name).absolute() for name in names]
    note_directories(root, directories, files=files)
    write_to = directories[: len(config.commit_log_paths)]
    for path in write_to:
        files.make_dirs_durable(path)

    others = other_directories(root, files=files)
    for path in dict.fromkeys((root / "commitlog", *write_to, *others)):
        if files.is_dir(path):
            files.sync_dir(path)

    segments = MappedFileQueue(
        root / "commitlog",
        config.segment_size_bytes,
        files=files,
        write_to=write_to,
        read_from=others,
    )

    spares = root / "raymq" / "spare"
    if config.recycle_commit_log_files or files.exists(spares):
        found = SpareFiles(spares, config.segment_size_bytes, files=files)
        segments.spares = found if config.recycle_commit_log_files else None

    return segments


def read_of(segments: MappedFileQueue, start: int, stop: int, end: int) -> bytes:
    """Log bytes [start, stop), which lie in one file. Args: `end`: the log's end. For many bytes: `read_into`.

    Raises: OffsetOutOfRange for deleted bytes, Corrupt for missing or unreadable bytes.
    """
    return _in_file(segments, start, end, lambda file, at: file.read(at, at + stop - start))


def read_into(segments: MappedFileQueue, target: memoryview, start: int, end: int) -> None:
    """`read_of` into given memory."""
    _in_file(segments, start, end, lambda file, at: file.read_into(target, at))


def _in_file(
    segments: MappedFileQueue, start: int, end: int, use: Callable[[MappedFile, int], _Read]
) -> _Read:
    """Call `use` with the file that holds `start`, and the position in it. Raises: as `read_of`."""
    file = segments.find(start)
    if file is not None:
        try:
            return use(file, start - file.start)
        except Unavailable:
            if start >= segments.min_offset:
                raise
    raise _missing(segments, start, end)


def read_each(segments: MappedFileQueue, offsets: Sequence[int], nbytes: int, end: int) -> bytes:
    """`read_of` of `nbytes` bytes at each offset, in one piece. Bytes after a file's end and deleted bytes are zeros.

    This is quickest if the offsets of one file follow each other.
    """
    found: list[bytes] = []
    done = 0
    while done < len(offsets):
        file = segments.find(offsets[done])
        count = 1
        try:
            if file is None:
                raise _missing(segments, offsets[done], end)
            in_file = _first_within(offsets[done:], file.start, file.start + file.size)
            found.append(file.read_each([offset - file.start for offset in in_file], nbytes))
            count = len(in_file)
        except (OffsetOutOfRange, Unavailable):
            # The file was deleted: before the search for it, or during the read.
            if offsets[done] >= segments.min_offset:
                raise
            found.append(bytes(nbytes))
        done += count

    return found[0] if len(found) == 1 else b"".join(found)


def _first_within(offsets: Sequence[int], low: int, high: int) -> Sequence[int]:
    """The first of the offsets, as long as they are in [low, high)."""
    if low <= min(offsets) and max(offsets) < high:
        return offsets
    return offsets[: next(row for row, at in enumerate(offsets) if not low <= at < high)]


def _missing(segments: MappedFileQueue, start: int, end: int) -> OffsetOutOfRange | Corrupt:
    if 0 <= start < segments.min_offset:
        fault = f"the log begins at {segments.min_offset}; the bytes at {start} were deleted"
        return OffsetOutOfRange(fault, min=segments.min_offset, max=end, offset=start)
    fault = f"no commit log file holds offset {start}"
    return Corrupt(fault, path=str(segments.directory), offset=start, rule=FILE_OF_OFFSET_RULE)
