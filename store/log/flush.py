"""The logic of GroupCommit and FlushRealTime: when to sync which bytes. It starts no thread.

Source: CommitLog.GroupCommitService and CommitLog.FlushRealTimeService, RocketMQ 5.3.3. Where
RocketMQ advances its flushed position over a failed sync, or retries it, RayMQ latches the failure: the page cache
marks failed pages clean, so a second sync would "succeed" over lost bytes (PostgreSQL's fsync bug of 2018). Imports
neither pyarrow nor numpy.
"""

from __future__ import annotations

import errno as errno_codes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raymq.store.clock import Clock
from raymq.store.errors import Unavailable
from raymq.store.failpoints import fail_point
from raymq.store.files import Files

from .segment_paths import find_segment

PAGE_BYTES = 4096
#: FlushRealTimeService flushes the rest this often at a stop
SHUTDOWN_FLUSHES_MAX = 10


class FlushFailed(Unavailable):
    """A sync failed; the store must stop. Fields: offset, errno."""

    retriable = False

    @property
    def errno(self) -> int:
        """The kernel's error number."""
        return int(self.fields["errno"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.message, self.fields)


def _rebuild(message: str, fields: dict[str, Any]) -> FlushFailed:
    return FlushFailed(message, **fields)


class SegmentSyncer:
    """Syncs commit log files by path, through its own descriptors."""

    def __init__(self, commitlog_dir: str | Path, segment_size_bytes: int, files: Files) -> None:
        self._dir = Path(commitlog_dir)
        self._size = segment_size_bytes
        self._files = files
        #: by the starts of their files, oldest first
        self._fds: dict[int, int] = {}
        self._failed: FlushFailed | None = None
        #: fdatasync calls so far
        self.syncs = 0

    def sync(self, start: int, stop: int) -> None:
        """fdatasync, oldest first, every file that overlaps [start, stop).

        Raises: FlushFailed; from then on always, without touching the disk again. OSError, Unavailable when a file
        cannot be opened: nothing of it was synced, and the next call tries again.
        """
        if self._failed is not None:
            raise self._failed
        if start >= stop:
            return
        first = start - start % self._size
        while self._fds and (oldest := next(iter(self._fds))) < first:
            self._files.close(self._fds.pop(oldest))
        for segment in range(first, stop, self._size):
            fd = self._open(segment)
            try:
                self._files.sync_data(fd)
            except OSError as error:
                raise self._latch(segment, error) from error
            self.syncs += 1

    def _open(self, segment: int) -> int:
        """An error here is not a failed sync: descriptors or memory may be free again soon. A missing file is one."""
        fd = self._fds.get(segment)
        if fd is None:
            try:
                path = find_segment(self._dir, segment, files=self._files)
                fd = self._fds[segment] = self._files.open_file(path)
            except FileNotFoundError as error:
                raise self._latch(segment, error) from error
        return fd

    def _latch(self, segment: int, error: OSError) -> FlushFailed:
        self._failed = FlushFailed(
            f"fdatasync of commit log file {segment:020d} failed: {error}; the store stops writing",
            offset=segment,
            errno=error.errno or errno_codes.EIO,
        )
        return self._failed

    def segment_of(self, offset: int) -> int:
        """Start of the file that holds `offset`."""
        return offset - offset % self._size

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self._fds.values():
            self._files.close(fd)
        self._fds.clear()


def _ignore(_offset: int) -> None:
    return


class _Flusher:
    def __init__(
        self,
        syncer: SegmentSyncer,
        *,
        flushed: int = 0,
        on_sync_started: Callable[[int], None] = _ignore,
        on_flushed: Callable[[int], None] = _ignore,
    ) -> None:
        self._syncer = syncer
        self._on_sync_started = on_sync_started
        self._on_flushed = on_flushed
        #: everything below is on disk
        self.flushed = flushed

    def _flush(self, appended: int) -> int:
        if appended > self.flushed:
            self._on_sync_started(appended)
            fail_point("flush.before_sync")
            self._syncer.sync(self.flushed, appended)
            fail_point("flush.after_sync_before_report")
            self.flushed = appended
            self._on_flushed(appended)
        return self.flushed


class GroupCommit(_Flusher):
    """One sync for every put that waits: the sync is the clock.

    RocketMQ's two lists of requests, which it swaps at each round, are watermarks here: a round syncs
    what was appended when it began, and later puts wait for the next. The combiner decides which put was late.
    """

    def commit(self, appended: int) -> int:
        """Sync all that was appended. Returns: flushed. Raises: FlushFailed."""
        return self._flush(appended)


class FlushRealTime(_Flusher):
    """Sync in the background: when enough pages are dirty, thoroughly every now and then."""

    def __init__(
        self,
        syncer: SegmentSyncer,
        clock: Clock,
        *,
        interval_ms: int,
        least_pages: int,
        thorough_interval_ms: int,
        flushed: int = 0,
        on_sync_started: Callable[[int], None] = _ignore,
        on_flushed: Callable[[int], None] = _ignore,
    ) -> None:
        super().__init__(
            syncer, flushed=flushed, on_sync_started=on_sync_started, on_flushed=on_flushed
        )
        self._clock = clock
        self._interval_ms = interval_ms
        self._least_pages = least_pages
        self._thorough_interval_ms = thorough_interval_ms
        now = clock.monotonic_ms()
        self._last_flush_ms = now
        self._last_thorough_ms = now

    def wait_ms(self) -> int:
        """Until the next flush is due."""
        return max(0, self._last_flush_ms + self._interval_ms - self._clock.monotonic_ms())

    def flush_if_due(self, appended: int) -> int:
        """Flush when the interval is over and the page rule or the thorough interval says so.

        Source: FlushRealTimeService#run and DefaultMappedFile#isAbleToFlush. Returns: flushed.
        """
        now = self._clock.monotonic_ms()
        if now - self._last_flush_ms < self._interval_ms:
            return self.flushed
        self._last_flush_ms = now
        least = self._least_pages
        if self._syncer.segment_of(appended) > self._syncer.segment_of(self.flushed):
            # The flushed position's file is full: it is flushed whatever the page rule says.
            least = 0
        if now - self._last_thorough_ms >= self._thorough_interval_ms:
            self._last_thorough_ms = now
            least = 0
        dirty = appended // PAGE_BYTES - self.flushed // PAGE_BYTES
        if appended > self.flushed and dirty >= least:
            return self._flush(appended)
        return self.flushed

    def shutdown(self, appended: int) -> int:
        """Flush the rest, in up to ten tries as RocketMQ does."""
        for _ in range(SHUTDOWN_FLUSHES_MAX):
            if self._flush(appended) >= appended:
                break
        return self.flushed
