"""Decides when GroupCommit and FlushRealTime sync which bytes. The module starts no thread.

Source: CommitLog.GroupCommitService and CommitLog.FlushRealTimeService, RocketMQ 5.3.3. RocketMQ advances its flushed
position over a failed sync, or retries the sync. RayMQ latches the failure, because the page cache marks failed pages
clean. A second sync would therefore "succeed" over lost bytes (PostgreSQL's fsync bug of 2018). This module imports
neither pyarrow nor numpy.
"""

from __future__ import annotations

import errno as errno_codes
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.segments.segment_paths import file_name, find_segment, segment_start_of

#: a page of the kernel's page cache
PAGE_BYTES = 4096


class FlushFailed(Unavailable):
    """A sync failed, and the store must stop. Fields: offset, errno."""

    retriable = False

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.message, self.fields)


def _rebuild(message: str, fields: Mapping[str, object]) -> FlushFailed:
    return FlushFailed(message, **fields)


class SegmentFiles:
    """Commit log files by path, through descriptors of their own."""

    def __init__(self, commitlog_dir: str | Path, segment_size_bytes: int, files: Files) -> None:
        self._dir = Path(commitlog_dir)
        self._size = segment_size_bytes
        self._files = files
        #: start of a file -> its descriptor, oldest first
        self._fds: dict[int, int] = {}

    def segment_start_of(self, offset: int) -> int:
        """Start of the file that holds `offset`."""
        return segment_start_of(offset, self._size)

    def _open(self, segment_start: int) -> int:
        fd = self._fds.get(segment_start)
        if fd is None:
            path = find_segment(self._dir, segment_start, files=self._files)
            fd = self._fds[segment_start] = self._files.open_file(path)
        return fd

    def _close_before(self, segment_start: int) -> None:
        """Close older files: the log only grows."""
        while self._fds and (oldest := next(iter(self._fds))) < segment_start:
            self._files.close(self._fds.pop(oldest))

    def close(self) -> None:
        """Close the descriptors."""
        while self._fds:
            self._files.close(self._fds.popitem()[1])


class SegmentSyncer(SegmentFiles):
    """Syncs commit log files."""

    def __init__(self, commitlog_dir: str | Path, segment_size_bytes: int, files: Files) -> None:
        super().__init__(commitlog_dir, segment_size_bytes, files)
        self._sync_error: FlushFailed | None = None
        #: fdatasync calls so far
        self.syncs = 0

    def sync(self, start: int, stop: int) -> None:
        """fdatasync, oldest first, every file that overlaps [start, stop).

        Raises: FlushFailed after a failed sync. Every later call raises it at once, without touching the disk. OSError,
        Unavailable if a file cannot be opened: nothing of it was synced, and the next call tries again.
        """
        if self._sync_error is not None:
            raise self._sync_error
        if start >= stop:
            return

        first = self.segment_start_of(start)
        self._close_before(first)
        for segment_start in range(first, stop, self._size):
            try:
                fd = self._open(segment_start)
            except FileNotFoundError as error:
                # Other errors are not failed syncs: descriptors or memory may be free again soon.
                raise self._latch(segment_start, error) from error
            try:
                self._files.sync_data(fd)
            except OSError as error:
                raise self._latch(segment_start, error) from error
            self.syncs += 1

    def _latch(self, segment_start: int, error: OSError) -> FlushFailed:
        self._sync_error = FlushFailed(
            f"fdatasync of commit log file {file_name(segment_start)} failed: {error}; the store stops writing",
            offset=segment_start,
            errno=error.errno or errno_codes.EIO,
        )
        return self._sync_error


@dataclass(eq=False)
class _Flusher:
    """Syncs the log up to an end, and reports before and after."""

    syncer: SegmentSyncer
    _: KW_ONLY
    #: everything below this is on disk
    synced: int = 0
    on_sync_started: Callable[[int], None] = lambda _: None
    on_synced: Callable[[int], None] = lambda _: None

    def flush(self, end: int) -> int:
        """Sync all bytes below `end`. Returns: synced. Raises: FlushFailed."""
        if end > self.synced:
            self.on_sync_started(end)
            fail_point("flush.before_sync")
            self.syncer.sync(self.synced, end)
            fail_point("flush.after_sync_before_report")
            self.synced = end
            self.on_synced(end)
        return self.synced


class GroupCommit(_Flusher):
    """One sync for all puts that wait. Each sync starts when the previous one ends.

    RocketMQ's two lists of requests, which it swaps at each round, are watermarks here. A round syncs the bytes that
    were appended before it began, and later puts wait for the next. The combiner decides which put was late.
    """


@dataclass(eq=False)
class FlushRealTime(_Flusher):
    """Sync in the background.

    Every `flush_interval_ms` if `flush_least_pages` are dirty, every `flush_thorough_interval_ms` in any case. Without
    `flush_commit_log_timed` also when a put or a commit wakes the caller, if so many pages are dirty.
    """

    clock: Clock
    #: only its `flush_*` options are used
    config: StoreConfig = field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        self._last_flush_ms = self._last_thorough_ms = self.clock.monotonic_ms()

    def wait_ms(self) -> int:
        """Time until the next flush is due."""
        due_ms = self._last_flush_ms + self.config.flush_interval_ms
        return max(0, due_ms - self.clock.monotonic_ms())

    def flush_if_due(self, end: int, *, woken: bool = False) -> int:
        """Sync all bytes below `end` if the interval is over and the page rule or the thorough interval asks for it.

        Args: `woken`: a put or a commit has ended the wait, which counts as the interval unless flushes are timed.
        Source: FlushRealTimeService#run and DefaultMappedFile#isAbleToFlush. Returns: synced.
        """
        now_ms, config = self.clock.monotonic_ms(), self.config
        is_due = woken and not config.flush_commit_log_timed
        if not is_due and now_ms - self._last_flush_ms < config.flush_interval_ms:
            return self.synced

        self._last_flush_ms = now_ms
        least = config.flush_least_pages
        if self.syncer.segment_start_of(end) > self.syncer.segment_start_of(self.synced):
            # A full file is synced whatever the page rule says.
            least = 0
        if now_ms - self._last_thorough_ms >= config.flush_thorough_interval_ms:
            self._last_thorough_ms = now_ms
            least = 0

        dirty = end // PAGE_BYTES - self.synced // PAGE_BYTES
        if end > self.synced and dirty >= least:
            return self.flush(end)
        return self.synced
