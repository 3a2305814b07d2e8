"""The logic of CommitRealTime: when to write which pool bytes into the log's files. It starts no thread.

Source: CommitLog.CommitRealTimeService and DefaultMappedFile#commit, RocketMQ 5.3.3. Writing the same bytes again is
harmless, so a failed write is repeated from the last published position. This module imports neither pyarrow nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from raymq.store.base.clock import Clock
from raymq.store.base.failpoints import fail_point
from raymq.store.config.store_config import StoreConfig

from .flush import PAGE_BYTES, SegmentFiles
from .transient_pool import PoolReader


class SegmentWriter(SegmentFiles):
    """Writes commit log files."""

    def write(self, offset: int, data: object) -> None:
        """pwrite bytes that lie in one file. Raises: StorageFull, OSError."""
        segment_start = self.segment_start_of(offset)
        self._close_before(segment_start)
        self._files.pwrite(self._open(segment_start), data, offset - segment_start)


@dataclass(eq=False)
class CommitRealTime:
    """Commits at once for puts that wait, otherwise by interval and page rule."""

    pool: PoolReader
    writer: SegmentWriter
    clock: Clock
    #: only its `commit_*` options and `transient_pool_slice_bytes` are used
    config: StoreConfig
    _: KW_ONLY
    #: everything below this is in the files
    committed: int
    on_committed: Callable[[int], None]

    def __post_init__(self) -> None:
        self._checked_ms = self._committed_ms = self.clock.monotonic_ms()
        #: commits of at least one byte so far
        self.commits = 0

    def wait_ms(self) -> int:
        """Time until the next check is due without a wakeup."""
        return max(0, self._checked_ms + self.config.commit_interval_ms - self.clock.monotonic_ms())

    def commit(self, appended: int) -> int:
        """Write [committed, appended) into the files, then report. Returns: committed. Raises: StorageFull, OSError."""
        if appended > self.committed:
            fail_point("commit.before_write")
            for offset, data in self.pool.pieces(self.committed, appended):
                self.writer.write(offset, data)
            fail_point("commit.after_write_before_report")
            self.committed = appended
            self.commits += 1
            self._committed_ms = self.clock.monotonic_ms()
            self.on_committed(appended)
        return self.committed

    def commit_if_due(self, appended: int) -> int:
        """Commit if the page rule, a full slice or the thorough interval asks for it.

        Source: CommitRealTimeService#run and DefaultMappedFile#isAbleToCommit. Returns: committed.
        """
        now_ms = self._checked_ms = self.clock.monotonic_ms()
        pages = appended // PAGE_BYTES - self.committed // PAGE_BYTES
        if now_ms - self._committed_ms >= self.config.commit_thorough_interval_ms:
            self._committed_ms = now_ms
            return self.commit(appended)
        segment_start_of = self.writer.segment_start_of
        # A full file is committed whatever the page rule says.
        file_full = segment_start_of(appended) > segment_start_of(self.committed)
        slice_full = appended - self.committed >= self.config.transient_pool_slice_bytes
        if pages >= self.config.commit_least_pages or file_full or slice_full:
            return self.commit(appended)
        return self.committed
