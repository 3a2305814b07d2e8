"""The logic of CommitRealTime: when to move which pool bytes into the log's files. It starts no thread.

Source: CommitLog.CommitRealTimeService and DefaultMappedFile#commit, RocketMQ 5.3.3. Writing the same bytes again is
harmless, so a failed write is tried again from the last published position. Imports neither pyarrow nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from raymq.store.clock import Clock
from raymq.store.failpoints import fail_point
from raymq.store.files import Files

from .flush import PAGE_BYTES
from .segment_paths import find_segment
from .transient_pool import PoolReader


class SegmentWriter:
    """Writes commit log files by path, through its own descriptors."""

    def __init__(self, commitlog_dir: str | Path, segment_size_bytes: int, files: Files) -> None:
        self._dir = Path(commitlog_dir)
        self._size = segment_size_bytes
        self._files = files
        self._fds: dict[int, int] = {}

    def write(self, offset: int, data: Any) -> None:
        """pwrite bytes that lie in one file. Raises: StorageFull, OSError."""
        segment = self.segment_of(offset)
        fd = self._fds.get(segment)
        if fd is None:
            # The log only grows: older files are full.
            self.close()
            path = find_segment(self._dir, segment, files=self._files)
            fd = self._fds[segment] = self._files.open_file(path)
        self._files.pwrite(fd, data, offset - segment)

    def segment_of(self, offset: int) -> int:
        """Start of the file that holds `offset`."""
        return offset - offset % self._size

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self._fds.values():
            self._files.close(fd)
        self._fds.clear()


class CommitRealTime:
    """Commits at once for puts that wait, else by interval and page rule."""

    def __init__(
        self,
        pool: PoolReader,
        writer: SegmentWriter,
        clock: Clock,
        *,
        committed: int,
        on_committed: Callable[[int], None],
        interval_ms: int,
        least_pages: int,
        thorough_interval_ms: int,
        slice_bytes: int | None = None,
    ) -> None:
        """Args: slice_bytes: this many waiting bytes are committed whatever the page rule says."""
        self._pool = pool
        self._writer = writer
        self._clock = clock
        self._on_committed = on_committed
        self._interval_ms = interval_ms
        self._least_pages = least_pages
        self._thorough_interval_ms = thorough_interval_ms
        self._slice_bytes = pool.size_bytes // 2 if slice_bytes is None else slice_bytes
        self._looked_ms = self._committed_ms = clock.monotonic_ms()
        #: everything below is in the files
        self.committed = committed
        #: commits of at least one byte so far
        self.commits = 0

    def wait_ms(self) -> int:
        """Time until the next look is due without a wakeup."""
        return max(0, self._looked_ms + self._interval_ms - self._clock.monotonic_ms())

    def commit(self, appended: int) -> int:
        """Write [committed, appended) into the files, then report. Returns: committed. Raises: StorageFull, OSError."""
        if appended > self.committed:
            fail_point("commit.before_write")
            for offset, data in self._pool.pieces(self.committed, appended):
                self._writer.write(offset, data)
            fail_point("commit.after_write_before_report")
            self.committed = appended
            self.commits += 1
            self._committed_ms = self._clock.monotonic_ms()
            self._on_committed(appended)
        return self.committed

    def commit_if_due(self, appended: int) -> int:
        """Commit when the page rule, a full slice or the thorough interval says so.

        Source: CommitRealTimeService#run and DefaultMappedFile#isAbleToCommit. Returns: committed.
        """
        now = self._looked_ms = self._clock.monotonic_ms()
        pages = appended // PAGE_BYTES - self.committed // PAGE_BYTES
        if now - self._committed_ms >= self._thorough_interval_ms:
            self._committed_ms = now
            return self.commit(appended)
        segment_of = self._writer.segment_of
        # The committed position's file is full: it is committed whatever the page rule says.
        full = segment_of(appended) > segment_of(self.committed)
        if pages >= self._least_pages or full or appended - self.committed >= self._slice_bytes:
            return self.commit(appended)
        return self.committed
