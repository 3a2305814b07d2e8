"""How Replication reads the leader's log: by pread, and compared with the chain before it is sent."""

from __future__ import annotations

import threading
from pathlib import Path

from raymq.replication.wire import AppendEntries, ReplicaMessage
from raymq.store.base.errors import Corrupt, require
from raymq.store.base.files import Files
from raymq.store.log.chain import check_units
from raymq.store.log.segments.segment_paths import find_segment, first_offset, segment_start_of


class LogReader:
    """Reads the log's files. Callers: any thread.

    No lock is held during a read, because a bad sector can delay it for seconds. A descriptor therefore belongs to the
    thread that reads with it. Meanwhile another thread opens the same file again.
    """

    def __init__(
        self, directory: Path, segment_size_bytes: int, *, files: Files, open_max: int = 2
    ) -> None:
        """Args: `open_max`: segments kept open."""
        self._directory = directory
        self._open_max = open_max
        self._size = segment_size_bytes
        self._files = files
        #: range and bytes of the last body: followers that keep up ask for the same
        self._last: tuple[tuple[int, int], memoryview] | None = None
        #: guards the two below
        self._lock = threading.Lock()
        self._closed = False
        #: start of a segment -> its path and a descriptor with which no thread reads at present
        self._open: dict[int, tuple[Path, int]] = {}

    def start(self) -> int:
        """The first offset stored, or 0 in an empty log."""
        return first_offset(self._directory, files=self._files)

    def read(self, start: int, stop: int, message: ReplicaMessage) -> memoryview | None:
        """The body of a frame: log bytes [start, stop), which lie in one segment, or None for none.

        Raises: Corrupt when the bytes differ from those of the message's units, or the disk cannot read them.
        """
        if start == stop:
            return None

        last = self._last
        if last is not None and last[0] == (start, stop):
            return last[1]

        segment_start = segment_start_of(start, self._size)
        is_inside = stop <= segment_start + self._size
        require(is_inside, "a body lies in one segment", start=start, stop=stop)
        path, fd = self._take(segment_start)
        try:
            found = self._files.read_range(
                fd, start - segment_start, stop - segment_start, path=path, base=segment_start
            )
            data = memoryview(found)
            if isinstance(message, AppendEntries):
                _check_body(message, data, path)
        except BaseException:
            # A repair replaces a damaged file: the next read opens it again.
            self._files.close(fd)
            raise
        self._give_back(segment_start, path, fd)

        self._last = ((start, stop), data)
        return data

    def close(self) -> None:
        """Close every segment. A read under way closes its own."""
        with self._lock:
            self._closed = True
            while self._open:
                self._files.close(self._open.popitem()[1][1])
        self._last = None

    def _take(self, segment_start: int) -> tuple[Path, int]:
        """The path of a segment, and a descriptor for the calling thread alone."""
        with self._lock:
            found = self._open.pop(segment_start, None)
        if found is not None:
            return found
        path = find_segment(self._directory, segment_start, files=self._files)
        return path, self._files.open_file(path, writable=False)

    def _give_back(self, segment_start: int, path: Path, fd: int) -> None:
        """Keep a descriptor for the next read, unless there is one already."""
        with self._lock:
            if self._closed or segment_start in self._open:
                self._files.close(fd)
                return
            self._open[segment_start] = path, fd
            while len(self._open) > self._open_max:
                self._files.close(self._open.pop(next(iter(self._open)))[1])


def _check_body(message: AppendEntries, data: memoryview, path: Path) -> None:
    """Raises: Corrupt when the bytes differ from those of the message's units."""
    try:
        check_units(list(message.units), data)
    except Corrupt as error:
        raise type(error)(
            f"{path} at {error.offset}: the bytes are not those that were stored (the CRC of their chain "
            "unit differs); they and all later bytes are not replicated. Run `raymq store verify`.",
            **{**error.fields, "path": str(path)},
        ) from error
