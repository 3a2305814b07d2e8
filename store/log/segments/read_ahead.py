"""Reads pages of the log's file into memory ahead of the log's end, so that no append waits for their allocation.

A write to a page that is not in memory allocates it. A virtual machine gets the page from its host, which takes up to 3
ms per MiB, under the put lock. If another thread reads it ahead, that costs half of it, and the append 0.2 ms. Nothing
is written. `FileAllocator`, which writes zeros ahead, is for disks that gain from it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from raymq.store.base.errors import RayMQError
from raymq.store.base.files import Files

from .mapped_file import MappedFile
from .mapped_file_queue import MappedFileQueue

#: pages are kept in memory this far ahead of the log's end
WINDOW_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
#: how often to check the log's end: while it rests, while it moves
IDLE_WAIT_S, BUSY_WAIT_S = 0.05, 0.005


class ReadAhead:
    """Reads pages of the last file before the writer needs them. Callers: one thread, while the writer appends."""

    def __init__(self, segments: MappedFileQueue, tail: Callable[[], int], *, files: Files) -> None:
        self._segments = segments
        self._tail = tail
        self._files = files
        #: everything from the log's end to here was read ahead
        self._done = 0
        #: nothing is read before the log grows: a store that is only read needs no reading ahead
        self._first_tail = tail()
        self._file: MappedFile | None = None
        self._fd = -1

    def step(self) -> bool:
        """Read one chunk ahead. Returns: whether there may be more at once."""
        tail = self._tail()
        if tail == self._first_tail:
            return False

        at = max(self._done, tail)
        file = self._segments.find(at)
        if file is None or at >= tail + WINDOW_BYTES:
            return False

        if file is not self._file:
            self.close()
            self._fd = self._files.open_file(file.path, writable=False)
            self._file = file

        length = min(CHUNK_BYTES, file.start + file.size - at)
        self._files.read_ahead(self._fd, at - file.start, length)
        self._done = at + length
        return True

    def run(self, stopping: Callable[[], bool], wake: threading.Event) -> None:
        """Work until `stopping` returns True: the body of a thread. `wake` ends a pause."""
        try:
            while not stopping():
                moved = False
                # The file may be deleted or unreadable. Reading ahead is a hint: the writer gets the error itself.
                with contextlib.suppress(OSError, RayMQError):
                    while not stopping() and self.step():
                        moved = True
                wake.wait(BUSY_WAIT_S if moved else IDLE_WAIT_S)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd, self._file = -1, None
