"""Reads pages of the log's file into memory ahead of the tail, so that no append waits for their allocation.

A write to a page that is not in memory allocates it. In a virtual machine, which gets the page from its host, that
takes up to 3 ms per MiB, under the put lock. Read ahead by another thread it costs half of that, and the append 0.2 ms.
Nothing is written. `AllocateAhead`, which writes zeros ahead, is for disks that gain from it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from raymq.store.errors import RayMQError
from raymq.store.files import Files

from .mapped_file import MappedFile
from .mapped_file_queue import MappedFileQueue

#: pages are kept in memory this far ahead of the tail
WINDOW_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
#: how often to look at the tail: while it rests, while it moves
IDLE_WAIT_S, BUSY_WAIT_S = 0.05, 0.005


class ReadAhead:
    """Callers: one thread beside the writer."""

    def __init__(self, segments: MappedFileQueue, tail: Callable[[], int], *, files: Files) -> None:
        self._segments = segments
        self._tail = tail
        self._files = files
        #: everything from the tail to here was asked for
        self._done = 0
        #: nothing is asked for before the tail moves: a store that is only read needs none of it
        self._first_tail = tail()
        self._file: MappedFile | None = None
        self._fd = -1

    def step(self) -> bool:
        """Ask for one chunk. Returns: whether there may be more at once."""
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
        """Work until `stop`: the body of a thread. `wake` ends a pause."""
        try:
            while not stopping():
                moved = False
                # A file that was deleted or cannot be read. Reading ahead is a hint: the writer meets the error itself.
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
