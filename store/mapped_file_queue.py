"""A directory of equal files that together are one growing sequence of bytes.

Source: MappedFileQueue and AllocateMappedFileService, RocketMQ 5.3.3 (reference sections 2.3, 2.5).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from .errors import Corrupt, StorageFull
from .files import Files
from .mapped_file import MappedFile

#: zeros written ahead at a time: small, so that the flush service's sync never waits long behind them
PREWRITE_CHUNK_BYTES = 2 << 20


class MappedFileQueue:
    """Files named by 20-digit start offsets, contiguous, all of `file_size` bytes."""

    def __init__(
        self, directory: Path, file_size: int, *, files: Files, writable: bool = True
    ) -> None:
        self.directory = directory
        self.file_size = file_size
        self._fs = files
        self._writable = writable
        self._grow = threading.Lock()
        #: ascending by start
        self.files: list[MappedFile] = []

    def load(self) -> None:
        """Open what is there.

        A zero-length last file is deleted, as RocketMQ does. Raises: Corrupt for a name that is no offset, a wrong
        length, a gap.
        """
        names = self._fs.list(self.directory)
        for name in names:
            if len(name) != 20 or not name.isdigit():
                raise Corrupt(
                    f"{self.directory / name} does not belong here: files are named by a 20-digit offset",
                    path=str(self.directory / name),
                    rule="file name",
                )
        if names and self._writable and self._length(names[-1]) == 0:
            self._fs.unlink(self.directory / names.pop())
        expected: int | None = None
        for name in names:
            start = int(name)
            if expected is not None and start != expected:
                raise Corrupt(
                    f"{self.directory} has a gap: {name} follows, {expected:020d} was expected",
                    path=str(self.directory / name),
                    offset=start,
                    rule="files are contiguous",
                )
            path = self.directory / name
            self.files.append(
                MappedFile.open(
                    path, start, self.file_size, files=self._fs, writable=self._writable
                )
            )
            expected = start + self.file_size

    def _length(self, name: str) -> int:
        fd = self._fs.open_file(self.directory / name, writable=False)
        try:
            return self._fs.size(fd)
        finally:
            self._fs.close(fd)

    @property
    def min_offset(self) -> int:
        """Start of the oldest file; 0 when there is none."""
        return self.files[0].start if self.files else 0

    def last(self) -> MappedFile | None:
        """The newest file."""
        return self.files[-1] if self.files else None

    def find(self, offset: int) -> MappedFile | None:
        """The file that holds `offset`, None outside."""
        files = self.files
        if not files:
            return None
        index = (offset - files[0].start) // self.file_size
        return files[index] if 0 <= index < len(files) else None

    def create_next(self, start: int | None = None) -> MappedFile:
        """Create the next file, or the first one at `start` (rounded down). Raises: StorageFull."""
        with self._grow:
            return self._create(start)

    def _create(self, start: int | None) -> MappedFile:
        if self.files:
            start = self.files[-1].start + self.file_size
        else:
            start = (start or 0) - (start or 0) % self.file_size
            self._fs.make_dirs(self.directory)
        file = MappedFile.create(
            self.directory / f"{start:020d}", start, self.file_size, files=self._fs
        )
        self.files.append(file)
        return file

    def create_until(self, stop: int) -> None:
        """Create files until they reach at least offset `stop`. Raises: StorageFull."""
        with self._grow:
            while not self.files or self.files[-1].start + self.file_size < stop:
                self._create(None)

    def truncate_to(self, offset: int) -> None:
        """Cut at `offset`: later files are destroyed, the rest of its file is zeroed and synced.

        RocketMQ only moves positions back, and old records behind the cut come alive again (reference 8.2).
        """
        with self._grow:
            while self.files and self.files[-1].start >= offset and len(self.files) > 1:
                self.files.pop().destroy()
            self._fs.sync_dir(self.directory)
            file = self.find(offset)
            if file is not None:
                file.zero(offset - file.start, self.file_size)
                file.sync()

    def sync_range(self, start: int, stop: int) -> None:
        """fdatasync every file that overlaps [start, stop), oldest first. Raises: OSError."""
        for file in list(self.files):
            if file.start < stop and file.start + self.file_size > start:
                file.sync()

    def drop_before(self, offset: int) -> None:
        """Delete files that end at or below `offset`."""
        with self._grow:
            while self.files and self.files[0].start + self.file_size <= offset:
                self.files.pop(0).destroy()

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            file.close()
        self.files = []


class AllocateAhead:
    """Prepares the next file and pre-writes zeros ahead of the tail, in paced chunks.

    Pre-written blocks sync up to eight times faster than merely reserved ones. A full disk is no error here: the
    append that needs the room meets it.
    """

    def __init__(
        self, queue: MappedFileQueue, tail: Callable[[], int], *, window_bytes: int
    ) -> None:
        self._queue = queue
        self._tail = tail
        self._window = min(window_bytes, queue.file_size)
        self._wake = threading.Event()
        #: the last failure, for status
        self.full: StorageFull | None = None

    def step(self) -> bool:
        """Do one small piece of work. Returns: whether there may be more at once."""
        files = self._queue.files
        tail = self._tail()
        if not files:
            return False
        try:
            want = tail + self._window
            for file in list(files):
                position = min(want - file.start, file.size)
                if file.start + file.size > tail and file.prewritten < position:
                    file.prewrite(min(file.prewritten + PREWRITE_CHUNK_BYTES, position))
                    self.full = None
                    return True
            if files[-1].start + self._queue.file_size < want:
                self._queue.create_next()
                self.full = None
                return True
        except StorageFull as error:
            self.full = error
        return False

    def wait(self, seconds: float) -> None:
        """Wait for the next look at the tail."""
        self._wake.wait(seconds)
        self._wake.clear()

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()
