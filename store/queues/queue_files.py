"""The files of one consume queue: sparse, opened at first use, few of them open at a time.

Source: MappedFileQueue and DefaultMappedFile, RocketMQ 5.3.3, which map each file from the start of the store on and
keep its descriptor. Here pread reads them, so that a bad sector is an error and never a signal. pwrite writes them, so
that a full disk is an error too.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from raymq.store.base.errors import Corrupt, require
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import ZERO_CHUNK_BYTES, Data, Files, only_zeros
from raymq.store.log.segments.mapped_file import wrong_length
from raymq.store.log.segments.mapped_file_queue import (
    check_contiguous,
    check_name,
    is_other_directory,
)
from raymq.store.log.segments.segment_paths import file_name

T = TypeVar("T")

#: files of consume queues that a store has open at a time, one descriptor each
OPEN_FILES_MAX = 256


#: what to do about damage of a cache
REBUILD_ADVICE = "stop the store and delete the queue's directory; the next start rebuilds it"


class OpenFiles:
    """The consume queue files of a store that have a descriptor, and the directories that have unsynced names.

    Callers: any thread.
    """

    def __init__(self, files: Files, *, limit: int = OPEN_FILES_MAX) -> None:
        self.files = files
        self._limit = limit
        self._lock = threading.Lock()
        #: open files, the least recently used first
        self._open: OrderedDict[QueueFile, None] = OrderedDict()
        #: directories with names that no sync has made durable
        self._unsynced: dict[Path, None] = {}

    def note_used(self, file: QueueFile) -> None:
        """Note a use of a file: it stays open. Over the limit the least recently used file is closed."""
        try:
            # This is one bytecode of the interpreter, so it needs no lock.
            self._open.move_to_end(file)
            return
        except KeyError:
            pass
        with self._lock:
            self._open[file] = None
            if len(self._open) <= self._limit:
                return
            oldest, _ = self._open.popitem(last=False)
        oldest.release_fd()

    def note_closed(self, file: QueueFile) -> None:
        """Drop a closed file from the list."""
        with self._lock:
            self._open.pop(file, None)

    @property
    def count(self) -> int:
        """How many files have a descriptor."""
        return len(self._open)

    def note_unsynced(self, directory: Path) -> None:
        """Remember that a name was made in a directory."""
        with self._lock:
            self._unsynced[directory] = None

    def sync_names(self, directories: Iterable[Path] | None = None) -> None:
        """fsync the directories with noted names, these or all. Durable: those names. Raises: OSError."""
        for directory in list(self._unsynced) if directories is None else directories:
            with self._lock:
                noted = directory in self._unsynced
                self._unsynced.pop(directory, None)
            try:
                if noted and self.files.is_dir(directory):
                    self.files.sync_dir(directory)
            except OSError:
                self.note_unsynced(directory)
                raise


@dataclass(eq=False)
class QueueFile:
    """One file. Callers: one writer; any thread may read and sync meanwhile."""

    path: Path
    #: offset of the first byte
    start: int
    #: length, bytes
    size: int
    _opened: OpenFiles
    _writable: bool
    _fd: int = -1
    #: the file has no name any more, or its queue is closed
    _ended: bool = False
    #: held while the descriptor is used, so that its number cannot be given to another file
    _fd_lock: threading.Lock = field(default_factory=threading.Lock)

    def create(self) -> None:
        """Make the file, without blocks. Durable: nothing. Raises: StorageFull, OSError."""
        files = self._opened.files
        with self._fd_lock:
            with files.created(self.path) as fd:
                files.truncate(fd, self.size)
            self._fd = fd
        self._opened.note_used(self)

    def _use(self, work: Callable[[int], T]) -> T:
        """Call `work` with the file's descriptor. Raises: FileNotFoundError after a delete."""
        with self._fd_lock:
            if self._fd < 0:
                if self._ended:
                    raise FileNotFoundError(errno.ENOENT, "closed or deleted", str(self.path))
                self._fd = self._opened.files.open_file(self.path, writable=self._writable)
            found = work(self._fd)
        self._opened.note_used(self)
        return found

    def pread(self, nbytes: int, position: int) -> bytes:
        """Read at a position inside the file. Raises: Corrupt for unreadable bytes, or if the file is too short."""
        try:
            data = self._use(lambda fd: self._opened.files.pread(fd, nbytes, position))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            fault = f"cannot be read at {position}: {error.strerror}"
            raise self._damaged(fault, position) from error
        if len(data) < min(nbytes, self.size - position):
            raise self._damaged(f"ends at {position + len(data)}, not at {self.size}", position)
        return data

    def _damaged(self, reason: str, position: int) -> Corrupt:
        return Corrupt(
            f"{self.path} {reason}; {REBUILD_ADVICE}",
            path=str(self.path),
            offset=self.start + position,
            rule="consume queue files can be read",
        )

    def pwrite(self, data: Data, position: int) -> None:
        """Write at a position inside the file. Raises: StorageFull, OSError."""
        self._use(lambda fd: self._opened.files.pwrite(fd, data, position))

    def data_after(self, position: int) -> int | None:
        """The first chunk from `position` on with a byte that is not zero; None without one. Holes are not read."""
        files = self._opened.files
        for begin, end in self._use(lambda fd: files.data_ranges(fd, position, self.size)):
            while begin < end:
                chunk = self.pread(min(end - begin, ZERO_CHUNK_BYTES), begin)
                if not only_zeros(chunk):
                    return begin
                begin += len(chunk)
        return None

    def clear(self, position: int) -> None:
        """Make every byte from a position on zero. Zeros are not written again."""
        while (found := self.data_after(position)) is not None:
            stop = min(found + ZERO_CHUNK_BYTES, self.size)
            self.pwrite(bytes(stop - found), found)
            position = stop

    def start_writeback(self) -> None:
        """Let the kernel begin to write dirty pages, so that the syncs of many files wait for one journal."""
        self._use(lambda fd: self._opened.files.drop_cached(fd, 0, 0))

    def sync(self) -> None:
        """fdatasync. After a delete nothing happens. Raises: OSError."""
        try:
            self._use(self._opened.files.sync_data)
        except FileNotFoundError:
            if not self._ended:
                raise

    def release_fd(self) -> None:
        """Close the descriptor. The next use opens another one."""
        with self._fd_lock:
            if self._fd >= 0:
                self._opened.files.close(self._fd)
                self._fd = -1

    def end(self) -> None:
        """Close the descriptor for good."""
        self._ended = True
        self._opened.note_closed(self)
        self.release_fd()


class QueueFiles:
    """Files named by 20-digit start offsets, contiguous, all of `file_size` bytes.

    Invariant: the name of a file is durable before the next file is made, so no power loss leaves a gap.
    """

    def __init__(
        self, directory: Path, file_size: int, *, opened: OpenFiles, writable: bool = True
    ) -> None:
        self.directory = directory
        self.file_size = file_size
        self._opened = opened
        self._files = opened.files
        self._writable = writable
        #: held by growth and cuts
        self._growth_lock = threading.Lock()
        #: ascending by start, contiguous. The list is replaced, never changed: readers look files up in the list they
        #: took
        self.files: list[QueueFile] = []

    def load(self) -> None:
        """Find the files.

        A file that is shorter and has only zeros was never finished. It is deleted with the files after it, which a
        power loss may leave. Raises: Corrupt for a name that is not an offset, a wrong length, a gap.
        """
        self.close()
        found: list[QueueFile] = []
        unfinished: list[Path] = []
        for name in self._files.list(self.directory):
            path = self.directory / name
            if is_other_directory(path, files=self._files):
                continue
            check_name(path)
            length = self._files.size_of(path)
            if unfinished or (length < self.file_size and not any(self._files.read_file(path))):
                unfinished.append(path)
            else:
                found.append(self._checked(path, length, found))

        for path in reversed(unfinished if self._writable else []):
            self._files.unlink(path)
            # Files are removed one by one, newest first. After a crash the rest begins with an unfinished file again.
            self._files.sync_dir(self.directory)

        self.files = found

    def _checked(self, path: Path, length: int, before: list[QueueFile]) -> QueueFile:
        start = check_contiguous(path, before[-1].start if before else None, self.file_size)
        if length != self.file_size:
            raise wrong_length(path, start, length, self.file_size, advice=REBUILD_ADVICE)
        return QueueFile(path, start, self.file_size, self._opened, self._writable)

    @property
    def min_offset(self) -> int:
        """Start of the oldest file; 0 if there is none."""
        return self.files[0].start if self.files else 0

    def find(self, offset: int) -> QueueFile | None:
        """The file that holds `offset`; None if no file does."""
        files = self.files
        if not files:
            return None
        index = (offset - files[0].start) // self.file_size
        return files[index] if 0 <= index < len(files) else None

    def create_next(self, start: int | None = None) -> QueueFile:
        """Create the next file, or the first one at `start` (rounded down).

        Durable: only the name of the file before. Raises: StorageFull, OSError.
        """
        with self._growth_lock:
            if self.files:
                self._opened.sync_names(self._named_in())
                start = self.files[-1].start + self.file_size
            else:
                start = (start or 0) - (start or 0) % self.file_size
                self._make_directory()
            path = self.directory / file_name(start)
            file = QueueFile(path, start, self.file_size, self._opened, self._writable)
            file.create()
            self._opened.note_unsynced(self.directory)
            self.files = [*self.files, file]
            return file

    def _named_in(self) -> tuple[Path, Path, Path]:
        """The directories that name the files, the queue and its topic."""
        return self.directory, self.directory.parent, self.directory.parent.parent

    def _make_directory(self) -> None:
        """Make the queue's directory and its topic's. Durable: nothing."""
        missing = []
        for step in (self.directory, *self.directory.parents):
            if self._files.is_dir(step):
                break
            missing.append(step)
        for step in reversed(missing):
            self._files.make_dir(step)
            self._opened.note_unsynced(step.parent)

    def delete_first(self) -> None:
        """Delete the oldest file. There must be another one.

        Durable: at return, so that no crash leaves a younger file deleted and an older one not.
        """
        with self._growth_lock:
            require(len(self.files) > 1, "the last file stays", files=len(self.files))
            first = self.files[0]
            # If one of these fails, the file stays in the list, and is unlinked again before any younger one.
            self._files.unlink(first.path)
            fail_point("files.unlinked")
            self._files.sync_dir(self.directory)
            self.files = self.files[1:]
            first.end()

    def truncate_to(self, offset: int) -> None:
        """Cut at `offset`: later files are destroyed, the rest of its file is made zero.

        Durable: that later files are gone. The oldest file stays even if it begins at `offset` or above, because its
        name has the queue's next offset. Only at 0 it goes, too: RocketMQ takes the zeros at the begin of a file for a
        message (ConsumeQueue#truncateDirtyLogicFiles).
        """
        with self._growth_lock:
            while len(self.files) > (offset > 0) and self.files[-1].start >= offset:
                last, self.files = self.files[-1], self.files[:-1]
                last.end()
                self._files.unlink(last.path)
                # Names are removed one by one. If two were lost in the wrong order, the next start would find a gap.
                self._files.sync_dir(self.directory)
            for file in self.files[-1:]:
                if file.start + self.file_size > offset:
                    file.clear(max(offset - file.start, 0))

    def overlapping(self, start: int, stop: int) -> list[QueueFile]:
        """The files that have a byte of [start, stop), oldest first."""
        return [
            file for file in self.files if file.start < stop and file.start + self.file_size > start
        ]

    def note_unsynced(self) -> None:
        """Note that the names of these files, of the queue and of its topic may not be durable."""
        for directory in self._named_in():
            self._opened.note_unsynced(directory)

    def close(self) -> None:
        """Close every file."""
        files, self.files = self.files, []
        for file in files:
            file.end()
