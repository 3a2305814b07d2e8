"""Deletion of old commit log files, and of files derived from them, by age, disk use or demand.

`run_once` is one pass. The host of the store calls it every `clean_resource_interval_ms`. A pass never deletes the file
that is written, nor anything above the confirmed or the synced end. It deletes only below a file that begins with a
complete snapshot of the state, because state = snapshot + tail. The order: consume queues forget the messages (readers
get OffsetOutOfRange). The files are deleted one by one, oldest first, each durably. Then their chain, consume queue
files and derived stores are deleted. After a crash between two steps the store opens, and the next pass continues.
Source: DefaultMessageStore.CleanCommitLogService, CleanConsumeQueueService, RocketMQ 5.3.3. A file's age comes from the
store time of the first message after it. The file's own time stamp changes with a copy or a restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from raymq.store.base import format as fmt
from raymq.store.base.failpoints import fail_point
from raymq.store.base.running_flags import DISK_FULL, LOGIC_DISK_FULL, RunningFlags
from raymq.store.log.recovery.snapshot_head import read_head
from raymq.store.log.segments.mapped_file import MappedFile

from .believed_clock import BelievedClock
from .commit_log import CommitLog

logger = logging.getLogger("raymq.store")

#: passes after `delete_now` that work at any hour (manualDeleteFileSeveralTimes)
MANUAL_PASSES = 20
#: a disk is not full if it has room for this many commit log files
FREE_FILES = 8
#: most deletable ends that wait until the log is synced and confirmed
WAITING_ENDS_MAX = 8

#: each returns the physical offset from which it still needs records; None: it needs none
RetentionFloors = tuple[Callable[[], int | None], ...]


class Derived(Protocol):
    """A store made from the log, such as the index: one of `MessageStore.derived`."""

    def delete_expired(self, min_physical_offset: int) -> object:
        """Delete the files that have only records below this offset."""


class LogUser(Protocol):
    """The parts of a store that follow its log (`MessageStore.retention`)."""

    def advance_deletable_end(self) -> int:
        """Make derived files durable, if there are any. Returns: the end at or above which no record may be deleted."""

    def forget_before(self, start: int) -> None:
        """Make records below `start` out of range for readers. Nothing is deleted yet."""

    def delete_derived(self, start: int) -> None:
        """Delete chain, queue files and indexes of records below `start`, the log's start."""


class LastingFloor:
    """A deletable end that holds after a power loss, and for another leader. Callers: one thread."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        #: (log's end, deletable end) of calls. A deletable end holds as soon as the log is synced and confirmed up to
        #: its log's end
        self._earlier: list[tuple[int, int]] = []
        #: what those calls asked
        self._floors: RetentionFloors = ()

    def advance(self, deletable: int, floors: RetentionFloors) -> int:
        """Note the deletable end that `floors` say now. Returns: the newest one that holds; the log's start if none
        does."""
        if floors != self._floors:
            # Another replica led meanwhile, or leads now: the deliveries of those calls may be cut off.
            self._earlier, self._floors = [], floors

        log = self._log
        self._earlier.append((log.end, deletable))
        kept_end = min(log.synced, log.confirmed)
        lasting = [each for each in self._earlier if each[0] <= kept_end]
        waiting = [each for each in self._earlier if each[0] > kept_end]
        # The oldest ones hold first: newer ones would replace each other while a follower is slow.
        self._earlier = [*lasting[-1:], *waiting][:WAITING_ENDS_MAX]
        return lasting[-1][1] if lasting else log.start


class CleanService:
    """One store's deletions. Callers: one thread; `delete_now`: any."""

    def __init__(
        self, log: CommitLog, store: LogUser, *, flags: RunningFlags, reserved_hours_min: float = 0
    ) -> None:
        """Args: `reserved_hours_min`: the retention if `file_reserved_hours` is less."""
        self._reserved_hours_min = reserved_hours_min
        self._log = log
        self._store = store
        self._config = log.config
        self._files = log.files
        self._clock = log.clock
        self._believed_clock = BelievedClock(log)
        self._flags = flags

        self._manual_passes = 0
        #: derived files are deleted up to here
        self._derived_start = -1
        #: commit log files deleted since the store was opened
        self.deleted = 0
        #: disk use in percent at the last pass: of the emptiest commit log disk, and of the consume queues' disk
        self.log_ratio = 0.0
        self.queue_ratio = 0.0

    def delete_now(self) -> None:
        """Delete expired files at any hour, in the next passes. Source: TRIGGER_DELETE_FILES (27)."""
        self._manual_passes = MANUAL_PASSES

    def run_once(self) -> int:
        """One pass. Returns: how many commit log files it deleted, at most `delete_file_batch_max`.

        Raises: OSError. The next pass continues where this one stopped.
        """
        # Every pass looks at the clocks, whether or not it may delete. Otherwise the first look may be after a jump.
        now_ms = self._believed_clock.now_ms()
        at_once = self._measure_disks() and self._config.clean_file_forcibly
        full = max(self.log_ratio, self.queue_ratio) > self._config.disk_max_used_space_ratio
        deleted = 0
        if full or at_once or self._manual_passes or self._is_delete_hour():
            self._manual_passes = max(0, self._manual_passes - 1)
            deleted = self._delete_log(now_ms, at_once=at_once)

        start = self._log.start
        if start != self._derived_start:
            self._store.forget_before(start)
            self._store.delete_derived(start)
            self._derived_start = start
        return deleted

    def _is_delete_hour(self) -> bool:
        hour = datetime.fromtimestamp(self._clock.now_ms() / 1000).hour
        return hour in map(int, self._config.delete_when.split(";"))

    def _measure_disks(self) -> bool:
        """Measure how full the disks are, and set or clear the flags. Returns: whether to delete at once.

        Source: CleanCommitLogService#isSpaceToDelete: of several directories the emptiest counts. Directories that are
        too full get no new files.
        """
        config, segments = self._config, self._log.segments
        ratios = {path: self._files.used_ratio(path) for path in segments.write_to}
        segments.full = frozenset(
            path for path, ratio in ratios.items() if ratio > config.disk_space_clean_forcibly_ratio
        )
        self.log_ratio = min(ratios.values())
        self.queue_ratio = self._files.used_ratio(self._log.root / "consumequeue")
        self._set_disk_flag(DISK_FULL, self.log_ratio, list(ratios))
        self._set_disk_flag(LOGIC_DISK_FULL, self.queue_ratio, [self._log.root / "consumequeue"])
        return max(self.log_ratio, self.queue_ratio) > config.disk_space_clean_forcibly_ratio

    def _set_disk_flag(self, flag: int, ratio: float, paths: list[Path]) -> None:
        """Set the flag of full disks, or clear it, and log a change."""
        limit = self._config.disk_space_warning_level_ratio
        where = ", ".join(map(str, paths))
        # RocketMQ refuses by the ratio alone. But a tenth of a large disk is room for days.
        room = FREE_FILES * self._config.segment_size_bytes
        if ratio > limit and max(map(self._files.free_bytes, paths)) < room:
            if self._flags.set(flag):
                logger.error("%s: %.0f %% full, above %d %%: puts are refused", where, ratio, limit)
        elif self._flags.clear(flag):
            logger.warning("%s: %.0f %% full: puts are taken again", where, ratio)

    def _delete_log(self, now_ms: int, *, at_once: bool) -> int:
        """Delete the commit log files of this pass, oldest first. Returns: how many."""
        start = self._new_start(now_ms, at_once=at_once)
        if start <= self._log.start:
            return 0

        self._store.forget_before(start)
        deleted = 0
        # A store that was closed meanwhile has no files.
        while self._log.segments.files and self._log.start < start:
            if deleted:
                self._clock.sleep_ms(self._config.delete_files_interval_ms)
            self._log.delete_first()
            self.deleted += 1
            deleted += 1

        report = logger.warning if at_once else logger.info
        report(
            "%d commit log files deleted%s; the log begins at %d",
            deleted,
            ", expired or not, because the disk is nearly full" if at_once else "",
            start,
        )
        fail_point("clean.after_segments")
        return deleted

    def _new_start(self, now_ms: int, *, at_once: bool) -> int:
        """The offset up to which this pass may delete."""
        limit = min(self._log.confirmed, self._log.synced)
        files = [file for file in self._log.segments.files[1:] if file.start < limit]
        new_start = self._log.start
        if at_once and files:
            new_start = files[-1].start
        elif files:
            new_start = self._expired_end(files, now_ms)
        most = self._config.delete_file_batch_max
        if len(files) > most:
            new_start = min(new_start, files[most - 1].start)
        if new_start == self._log.start:
            return new_start
        limit = min(limit, self._store.advance_deletable_end())
        return min(new_start, self._newest_snapshot(limit))

    def _expired_end(self, files: list[MappedFile], now_ms: int) -> int:
        """The start of the last file before which everything expired; the log's start if nothing did.

        Everything before a file was stored before its first message. Stamps in the future were made when the clock was
        ahead. Their age counts up to the newest stamp, because stamps never fall.
        """
        reserved_hours = max(self._config.file_reserved_hours, self._reserved_hours_min)
        reserved_ms = int(reserved_hours * 3_600_000)
        newest_ms = first_store_time(files[-1])

        expired_end = self._log.start
        for file in files:
            stamp_ms = first_store_time(file)
            is_future = stamp_ms > now_ms
            reference_ms = newest_ms if is_future else now_ms
            if stamp_ms <= reference_ms - reserved_ms:
                expired_end = file.start
            elif not is_future:
                # This file is younger than the limit, and so are all later files.
                break

        return expired_end

    def _newest_snapshot(self, limit: int) -> int:
        """Start of the newest file whose snapshot is complete below `limit`; else the log's start.

        A start that walks from an older file reads this snapshot on its way, and has the whole state from there on.
        """
        for file in reversed(self._log.segments.files):
            if file.start < limit:
                complete_at, _ = read_head(file)
                if complete_at is not None and complete_at <= limit:
                    return file.start
        return self._log.start

    def as_status(self) -> dict[str, Any]:
        """For status displays: JSON-able."""
        return {
            "deleted_files": self.deleted,
            "disk_used_ratio": round(self.log_ratio, 1),
            "queue_disk_used_ratio": round(self.queue_ratio, 1),
        }


def first_store_time(file: MappedFile) -> int:
    """When the first message of a commit log file was stored, ms."""
    return fmt.store_time_ms(file.read(0, min(file.size, fmt.STORE_TIME_END_MAX)))
