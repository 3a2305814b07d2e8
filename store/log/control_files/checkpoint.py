"""RocketMQ's `checkpoint` file: 4096 bytes, five big-endian longs.

Source: StoreCheckpoint, RocketMQ 5.3.3.
"""

from __future__ import annotations

import struct
from pathlib import Path

from raymq.store.base.files import Files

FILE_BYTES = 4096
_LONGS = struct.Struct(">5q")


class Checkpoint:
    """Store times up to which the log and its derived files are known to be on disk."""

    def __init__(self, fd: int, values: tuple[int, ...], files: Files) -> None:
        self._fd = fd
        self._files = files
        #: Store times up to which the commit log and the consume queues are flushed, and the end time of the last full
        #: index file.
        self.physic_ms, self.logics_ms, self.index_ms = values[:3]
        self.master_flushed_offset, self.confirm_offset = values[3:]

    @classmethod
    def open(cls, path: Path, *, files: Files) -> Checkpoint:
        """Open or create."""
        fd = files.open_file(path, create=True)
        if files.size(fd) < FILE_BYTES:
            files.truncate(fd, FILE_BYTES)
            files.sync(fd)
            files.sync_dir(path.parent)
        data = files.pread(fd, _LONGS.size, 0)
        return cls(fd, _LONGS.unpack(data.ljust(_LONGS.size, b"\0")), files)

    def write(self) -> None:
        """Write. Durable: nothing. An older content is as good: it only promises less."""
        times = (self.physic_ms, self.logics_ms, self.index_ms)
        data = _LONGS.pack(*times, self.master_flushed_offset, self.confirm_offset)
        self._files.pwrite(self._fd, data, 0)

    def sync(self) -> None:
        """Write and fdatasync."""
        self.write()
        self._files.sync_data(self._fd)

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._fd)
