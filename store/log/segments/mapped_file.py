"""One fixed-size file of a mapped file queue: written by pwrite, read through a map.

Source: DefaultMappedFile, RocketMQ 5.3.3. RocketMQ writes into the map. RayMQ uses pwrite: it is two to three times
faster, and a full disk is an error instead of SIGBUS.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from raymq.store.base.errors import Corrupt, Unavailable
from raymq.store.base.files import ZERO_CHUNK_BYTES, Files, SyncFailed, only_zeros
from raymq.store.base.rules import FILE_LENGTH_RULE
from raymq.store.log.flush import FlushFailed


class MappedFile:
    """A file whose name is the offset of its first byte.

    The descriptor is opened before the first byte is stored and kept: it is the witness of write-back errors.
    Callers: one writer; any thread may read, sync and prewrite meanwhile.
    """

    def __init__(self, path: Path, start: int, size: int, fd: int, *, files: Files) -> None:
        self.path = path
        #: offset of the first byte
        self.start = start
        #: length, bytes
        self.size = size
        #: position up to which blocks were written once, so that syncs need no extent conversion
        self.prewritten = 0

        self._fd = fd
        self._files = files
        self._view: memoryview | None = None

        #: guards `prewritten` between the writer and a prewrite
        self._prewritten_lock = threading.Lock()
        #: held while the descriptor is used or closed, so that no thread uses a number that was given to another file
        self._fd_lock = threading.Lock()
        #: guards the next two, and changes of `_patches`; held for no system call
        self._reads_lock = threading.Lock()
        #: reads under way
        self._reading = 0
        #: descriptors that were released during reads: the last read closes them
        self._left_fds: list[int] = []
        #: (position, bytes) that are read instead of damaged ones on the disk. In order; replaced, never changed
        self._patches: tuple[tuple[int, bytes], ...] = ()

    @classmethod
    def create(cls, path: Path, start: int, size: int, *, files: Files) -> MappedFile:
        """Create the file at full size with all its blocks reserved.

        Durable: the file and its name. Raises: StorageFull, and then leaves no file.
        """
        with files.created(path) as fd:
            files.allocate(fd, size)
            files.sync(fd)
            # The next attempt makes the name again: a second sync of this one would prove nothing.
            files.sync_dir(path.parent)
        return cls(path, start, size, fd, files=files)

    @classmethod
    def open(
        cls, path: Path, start: int, size: int, *, files: Files, writable: bool = True
    ) -> MappedFile:
        """Open an existing file. Raises: Corrupt if its length is not `size`."""
        fd = files.open_file(path, writable=writable)
        found = files.size(fd)
        if found != size:
            files.close(fd)
            raise wrong_length(path, start, found, size)

        file = cls(path, start, size, fd, files=files)
        file.prewritten = size
        return file

    def pwrite(self, data: Any, position: int) -> None:
        """Write `data` at a position inside the file. Raises: StorageFull, OSError."""
        end = position + len(data)
        if end > self.prewritten:
            self.claim(end)
        self._files.pwrite(self._fd, data, position)

    def claim(self, end: int) -> None:
        """Claim positions below `end`, before bytes are stored there, here or by CommitRealTime.

        A prewrite under way may be about to zero them.
        """
        if end > self.prewritten:
            with self._prewritten_lock:
                self.prewritten = max(self.prewritten, end)

    def read(self, position: int, stop: int) -> bytes:
        """The bytes [position, stop) of the file, a copy.

        Raises: Corrupt naming the first unreadable byte, Unavailable if the file was deleted.
        """
        if self._patches:
            patched = bytearray(stop - position)
            self.read_into(memoryview(patched), position)
            return bytes(patched)
        # A read that succeeds makes no further call: queries make thousands of small reads.
        with self._reads_lock:
            fd = self._fd
            if fd < 0:
                raise self._gone()
            self._reading += 1
        try:
            return self._files.read_range(fd, position, stop, path=self.path, base=self.start)
        finally:
            with self._reads_lock:
                self._reading -= 1
                is_left = bool(self._left_fds)
            if is_left:
                self._close_left()

    def read_each(self, positions: Sequence[int], nbytes: int) -> bytes:
        """`read` of `nbytes` bytes at each position, in one piece. Bytes after the file's end are zeros."""
        if self._patches:
            ends = [min(position + nbytes, self.size) for position in positions]
            parts = map(self.read, positions, ends)
            return b"".join(part.ljust(nbytes, b"\0") for part in parts)
        fd = self._begin_reading()
        try:
            return self._files.read_each(
                fd, self.read_view(), positions, nbytes, path=self.path, base=self.start
            )
        finally:
            self._end_reading()

    def read_into(self, target: memoryview, position: int) -> None:
        """`read` into given memory."""
        for start, data in self._patches:
            stop = position + len(target)
            if start < stop and position < start + len(data):
                if position < start:
                    self._read_disk_into(target[: start - position], position)
                    target, position = target[start - position :], start
                patch = memoryview(data)[position - start :][: len(target)]
                target[: len(patch)] = patch
                target, position = target[len(patch) :], position + len(patch)
        if len(target):
            self._read_disk_into(target, position)

    def _read_disk_into(self, target: memoryview, position: int) -> None:
        fd = self._begin_reading()
        try:
            self._files.read_into(fd, target, position, path=self.path, base=self.start)
        finally:
            self._end_reading()

    def _begin_reading(self) -> int:
        with self._reads_lock:
            if self._fd < 0:
                raise self._gone()
            self._reading += 1
            return self._fd

    def _end_reading(self) -> None:
        with self._reads_lock:
            self._reading -= 1
        self._close_left()

    def _close_left(self) -> None:
        """Close the descriptors that were released during reads, after the last read."""
        with self._reads_lock:
            left: list[int] = []
            if not self._reading:
                left, self._left_fds = self._left_fds, []
        for fd in left:
            self._files.close(fd)

    def _gone(self) -> Unavailable:
        return Unavailable(f"{self.path} was closed or deleted meanwhile", path=str(self.path))

    def _release_fd(self, next_fd: int = -1) -> None:
        """Close the descriptor, or leave it to the last read that is under way. Callers: with `_fd_lock`.

        Args: `next_fd`: the descriptor of reads that begin from now on.
        """
        with self._reads_lock:
            fd, self._fd = self._fd, next_fd
            if self._reading:
                self._left_fds.append(fd)
                return
        if fd >= 0:
            self._files.close(fd)

    def read_view(self) -> memoryview:
        """A view of the whole file, read-only, made at first use and kept. A bad sector under it kills the process.

        Callers: to keep the tail's pages in memory, and to gather records. Other reads use `read`.
        Raises: Unavailable if the file was deleted.
        """
        with self._fd_lock:
            if self._fd < 0:
                raise self._gone()
            if self._view is None:
                self._view = self._files.map_read(self._fd, self.size, gathered=True)
            return self._view

    def sync(self) -> None:
        """fdatasync through the witness descriptor. After a delete nothing happens. Raises: SyncFailed."""
        with self._fd_lock:
            if self._fd >= 0:
                try:
                    self._files.sync_data(self._fd)
                except SyncFailed:
                    raise
                except OSError as error:
                    raise SyncFailed(error.errno, f"fdatasync: {error.strerror}") from error

    def clear(self, start: int) -> None:
        """Make every byte from position `start` on zero.

        Only chunks with another byte are written: the rest of a fresh 1 GiB file costs no GiB of writes.
        """
        for begin, end in self._files.data_ranges(self._fd, start, self.size):
            while begin < end:
                stop = min(begin - begin % ZERO_CHUNK_BYTES + ZERO_CHUNK_BYTES, end)
                chunk = self._files.pread(self._fd, stop - begin, begin)
                if not only_zeros(chunk):
                    self._files.zero(self._fd, begin, stop)
                begin = stop

    def prewrite(self, position: int) -> None:
        """Write zeros from `prewritten` up to `position` and sync them.

        Callers: one thread, while the writer appends.
        Raises: FlushFailed after a failed sync: records appended during it may be lost. OSError or StorageFull for any
        other call.

        Invariant: only bytes at or above `prewritten` are zeroed, and the writer raises it before it stores. This call
        opens a descriptor of its own. The kernel reports a write-back error once to each open descriptor, and the
        witness must see it too. A descriptor that is opened later sees nothing.
        """
        stop = min(position, self.size)
        with self._fd_lock:
            if self._fd < 0:
                return
            fd = self._files.open_file(self.path)

        try:
            with self._prewritten_lock:
                if stop > self.prewritten:
                    self._files.zero(fd, self.prewritten, stop)
                    self.prewritten = stop
            try:
                self._files.sync_data(fd)
            except OSError as error:
                raise FlushFailed(
                    f"fdatasync of {self.path} after a prewrite failed: {error}; the store stops writing",
                    offset=self.start,
                    errno=error.errno or errno.EIO,
                ) from error
        finally:
            self._files.close(fd)

    def close(self) -> None:
        """Close the descriptor and release the map. A reader's slice of it stays valid."""
        with self._fd_lock:
            if self._fd < 0:
                return
            if self._view is not None:
                # The view is not released: a thread that gathers may be about to slice it.
                self._files.release_when_unread(self._view)
                self._view = None
            self._release_fd()

    def lock_memory(self) -> None:
        """Keep the file's pages in memory. Raises: OSError if that is not permitted, Unavailable after a delete."""
        self._files.lock_memory(self.read_view())

    def unlock_memory(self) -> None:
        """Undo `lock_memory`. Harmless without one."""
        with self._fd_lock:
            if self._view is not None and self._fd >= 0:
                self._files.unlock_memory(self._view)

    def patch(self, position: int, data: bytes) -> None:
        """Read these bytes from memory from now on: the disk has damaged ones. Positions must not overlap."""
        with self._reads_lock:
            self._patches = tuple(sorted((*self._patches, (position, data))))

    @property
    def patched_bytes(self) -> int:
        """Bytes that are read from memory."""
        return sum(len(data) for _, data in self._patches)

    def replace(self, copy: Path, still_patched: Collection[int]) -> None:
        """Let a complete and synced copy have the name of this file. Reads under way end on the old file.

        Durable: the name. Args: `still_patched`: positions of patches that stay. Callers: `MappedFileQueue.replace`.
        """
        fd = self._files.open_file(copy)
        try:
            self._files.rename(copy, self.path)
        except BaseException:
            self._files.close(fd)
            raise

        with self._fd_lock:
            if self._view is not None:
                self._files.release_when_unread(self._view)
                self._view = None
            self._release_fd(fd)
            with self._reads_lock:
                self._patches = tuple(each for each in self._patches if each[0] in still_patched)
        self._files.sync_dir(self.path.parent)

    def retire(self) -> Callable[[], bool]:
        """Close the descriptor, but leave the map to readers that still use it: its pages outlive the name.

        Returns: a function that says whether the last reader is gone. Callers: after the file was taken from its queue.
        """
        with self._fd_lock:
            if self._fd >= 0:
                self._release_fd()
            unmapped = None if self._view is None else self._files.release_when_unread(self._view)
            # The returned function keeps this object, which must not keep the map.
            self._view = None

        def is_unused() -> bool:
            return not self._reading and (unmapped is None or unmapped())

        return is_unused

    def destroy(self) -> None:
        """Close and delete. Durable: after an fsync of the directory."""
        self.close()
        self._files.unlink(self.path)


#: what to do about a file that only a copy can give back
COPY_ADVICE = (
    "copy the file again from where it is whole, a backup for example; if all files have another size, open the store "
    "with that size"
)


def wrong_length(
    path: Path, start: int, found: int, expected: int, *, advice: str = COPY_ADVICE
) -> Corrupt:
    """The error about a file of another length than all files of its directory have."""
    return Corrupt(
        f"{path} has {found} bytes, and files of this directory have {expected}; {advice}",
        path=str(path),
        offset=start,
        rule=FILE_LENGTH_RULE,
        expected=expected,
        found=found,
    )


def not_yet_made(path: Path, file_size: int, *, files: Files) -> bool:
    """Whether a crash interrupted the creation of this file: it is too short and has only zeros."""
    with files.opened(path, writable=False) as fd:
        size = files.size(fd)
        return size < file_size and all(
            only_zeros(files.pread(fd, ZERO_CHUNK_BYTES, position))
            for position in range(0, size, ZERO_CHUNK_BYTES)
        )
