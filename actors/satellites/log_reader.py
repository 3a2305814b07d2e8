"""How Replication reads the leader's log: by pread, and compared with the chain before it is sent."""

from __future__ import annotations

from pathlib import Path

from raymq.replication.wire import AppendEntries, ReplicaMessage
from raymq.store.base.errors import Corrupt, require
from raymq.store.base.files import Files
from raymq.store.log.chain import check_units
from raymq.store.log.segments.segment_paths import find_segment, first_offset, segment_start_of


class LogReader:
    """Reads the log's files. Callers: one thread at a time; `start` by any."""

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
        #: start of a segment -> its path and descriptor
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

        if self._last is not None and self._last[0] == (start, stop):
            return self._last[1]

        segment_start = segment_start_of(start, self._size)
        is_inside = stop <= segment_start + self._size
        require(is_inside, "a body lies in one segment", start=start, stop=stop)
        path, fd = self._descriptor(segment_start)
        try:
            found = self._files.read_range(
                fd, start - segment_start, stop - segment_start, path=path, base=segment_start
            )
        except Corrupt:
            # A repair replaces the file: the next read opens it again.
            self._close(segment_start)
            raise
        data = memoryview(found)

        if isinstance(message, AppendEntries):
            try:
                check_units(list(message.units), data)
            except Corrupt as error:
                self._close(segment_start)
                raise Corrupt(
                    f"{path} at {error.offset}: the bytes are not those that were stored (the CRC of their chain "
                    "unit differs); they and all later bytes are not replicated. Run `raymq store verify`.",
                    **{**error.fields, "path": str(path)},
                ) from error

        self._last = ((start, stop), data)
        return data

    def close(self) -> None:
        """Close every segment."""
        self._last = None
        while self._open:
            self._files.close(self._open.popitem()[1][1])

    def _close(self, segment_start: int) -> None:
        self._files.close(self._open.pop(segment_start)[1])

    def _descriptor(self, segment_start: int) -> tuple[Path, int]:
        found = self._open.get(segment_start)
        if found is None:
            path = find_segment(self._directory, segment_start, files=self._files)
            found = self._open[segment_start] = path, self._files.open_file(path, writable=False)
            while len(self._open) > self._open_max:
                self._files.close(self._open.pop(next(iter(self._open)))[1])
        return found
