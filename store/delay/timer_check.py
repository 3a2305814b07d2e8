"""RocketMQ's `config/timercheck`: 4096 bytes, seven big-endian longs.

Second read next in ms, end of the synced timer log, next offset of the timer topic, the same of the master; then a
data version: state version, time in ms, counter. Source: TimerCheckpoint, RocketMQ 5.3.3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from raymq.store.files import Files

FILE_BYTES = 4096
#: state version that RayMQ writes: RocketMQ puts its own there with the first second that it has read
OURS = int.from_bytes(b"RayMQ", "big")
_LONGS = struct.Struct(">7q")


class TimerCheck(NamedTuple):
    """How far the timer's files are complete on disk."""

    read_time_ms: int
    log_end: int
    queue_offset: int
    master_queue_offset: int
    state_version: int = 0
    version_time_ms: int = 0
    counter: int = 0

    @property
    def foreign(self) -> bool:
        """Whether RocketMQ wrote it."""
        return self.state_version != OURS


def read_check(path: Path, *, files: Files) -> TimerCheck | None:
    """The file's content; None when it is missing or too short."""
    if not files.exists(path):
        return None
    fd = files.open_file(path, writable=False)
    try:
        data = files.pread(fd, _LONGS.size, 0)
    finally:
        files.close(fd)
    return TimerCheck(*_LONGS.unpack(data)) if len(data) == _LONGS.size else None


def write_check(path: Path, check: TimerCheck, *, files: Files) -> None:
    """Write the file. Durable: all of it, or the old content. Raises: StorageFull, OSError."""
    files.make_dirs(path.parent)
    files.write_file_atomic(path, _LONGS.pack(*check).ljust(FILE_BYTES, b"\0"))


def remove_check(path: Path, *, files: Files) -> None:
    """The timer's files are not to be trusted. Durable."""
    if files.exists(path):
        files.unlink(path)
        files.sync_dir(path.parent)
