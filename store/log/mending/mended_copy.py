"""The new file of a segment with damaged bytes: a copy with the sound bytes, which takes the name of the old file.

The old file is never changed. Maps and descriptors of the old file stay valid until their readers are done.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt, RayMQError, Unavailable
from raymq.store.base.failpoints import fail_point
from raymq.store.log.chain import ChainUnit
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.segments.mapped_file import MappedFile
from raymq.store.log.segments.segment_paths import file_name

from .chain_window import read_units

#: bytes that no unit covers are copied in pieces of this size
_COPY_BYTES = 1 << 20
#: so much is written between two syncs of the copy
_SYNC_BYTES = 2 << 20
#: most bytes a second that are copied: a file of 1 GiB takes 20 s
COPY_BYTES_PER_S = 50 << 20


def copy_directory(root: Path, segment: Path) -> Path:
    """Where the copy of a segment is written: on the same disk, but not among the segments."""
    if segment.parent == root / "commitlog":
        return root / "raymq" / "mending"
    return segment.parent.with_name(segment.parent.name + ".mending")


def delete_unfinished(log: CommitLog) -> None:
    """Delete copies that an earlier process did not finish. A disk that refuses that changes nothing."""
    files = log.files
    segments = {file.path.parent: file.path for file in log.segments.files}
    for segment in segments.values():
        directory = copy_directory(log.root, segment)
        for name in files.list(directory):
            files.unlink(directory / name)


def replace_by_copy(
    log: CommitLog,
    file: MappedFile,
    mend: Callable[[int], bool],
    *,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[tuple[int, int]] | None:
    """Replace a full file of the log by a copy in which every unit is compared with the chain.

    The copy is written and synced in small pieces with pauses, so that the flush service's syncs never wait long.

    Args: `mend`: as `LogMender.mend`. Returns: the ranges [start, stop) whose bytes are not proved to be sound; None:
    the file was deleted, or the process is ending, and nothing has changed.
    Durable: the copy and its name. Raises: Corrupt for bytes that neither the disk nor another replica has, and
    StorageFull, OSError. The old file stays then.
    """
    files = log.files
    directory = copy_directory(log.root, file.path)
    files.make_dirs(directory)
    target = directory / file.path.name

    with files.created(target) as fd:
        files.allocate(fd, file.size)
        writer = _PacedWriter(log, fd, is_stopping)
        unsound = _write_copy(log, file, mend, writer)
        files.sync(fd)
    files.close(fd)
    fail_point("mend.copied")

    if is_stopping():
        files.unlink(target)
        return None
    try:
        still_patched = {start - file.start for start, _ in unsound}
        return unsound if log.segments.replace(file, target, still_patched) else None
    except (OSError, RayMQError):
        files.unlink(target)
        raise


class _PacedWriter:
    """Writes a copy at `COPY_BYTES_PER_S`, and syncs it piece by piece."""

    def __init__(self, log: CommitLog, fd: int, is_stopping: Callable[[], bool]) -> None:
        self._log = log
        self._fd = fd
        self._is_stopping = is_stopping
        self._unsynced = 0

    def write(self, data: bytes, offset: int) -> None:
        """Write a piece. Raises: Unavailable when the process is ending; StorageFull, OSError."""
        if self._is_stopping():
            raise Unavailable("the replica is stopping", field="store")
        self._log.files.pwrite(self._fd, data, offset)
        self._unsynced += len(data)
        if self._unsynced >= _SYNC_BYTES:
            self._log.files.sync_data(self._fd)
            self._log.clock.sleep_ms(1000 * self._unsynced / COPY_BYTES_PER_S)
            self._unsynced = 0


def _write_copy(
    log: CommitLog, file: MappedFile, mend: Callable[[int], bool], writer: _PacedWriter
) -> list[tuple[int, int]]:
    unsound: list[tuple[int, int]] = []
    end = file.start + file.size
    position = file.start

    for unit in read_units(log.chain.directory / file_name(file.start), files=log.files):
        if unit.start != position or not position < unit.end <= end:
            break
        data = _unit_bytes(file, unit, mend)
        if crc32c(data) != unit.crc:
            unsound.append((unit.start, unit.end))
        writer.write(data, position - file.start)
        position = unit.end

    if position < end:
        unsound.append((position, end))
    while position < end:
        stop = min(position + _COPY_BYTES, end)
        data = file.read(position - file.start, stop - file.start)
        writer.write(data, position - file.start)
        position = stop
    return unsound


def _unit_bytes(file: MappedFile, unit: ChainUnit, mend: Callable[[int], bool]) -> bytes:
    """The bytes of a unit: sound ones, if this replica or another one has them. Raises: Corrupt for unreadable ones."""
    start, stop = unit.start - file.start, unit.end - file.start
    try:
        data = file.read(start, stop)
        if crc32c(data) == unit.crc:
            return data
    except Corrupt:
        if not mend(unit.start):
            raise
        return file.read(start, stop)
    return file.read(start, stop) if mend(unit.start) else data
