"""Writes a snapshot of the shard's state at the start of each segment, and in between in large ones."""

from __future__ import annotations

import logging

from raymq.store.base.failpoints import fail_point
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.recovery.snapshot_head import read_head, snapshot_starts
from raymq.store.state.shard_state import SNAPSHOT, ShardState

from .inner_message import EncodedInner
from .put_lock import PutLock
from .service_records import ServiceRecords

logger = logging.getLogger("raymq.store")

#: at most one in this many bytes of the log belongs to a snapshot
SNAPSHOT_SHARE = 64


class SnapshotWriter:
    """The snapshots of one log. Callers: with the put lock, but for `begin_log`."""

    def __init__(
        self, log: CommitLog, state: ShardState, *, put_lock: PutLock, records: ServiceRecords
    ) -> None:
        self._log = log
        self._config = log.config
        self._state = state
        self._lock = put_lock
        self._records = records

        #: start of the newest segment that needs no snapshot any more
        self.segment = -1
        #: the end of the log from which on the next snapshot is due
        self._due = 0

    def begin_segment(self) -> None:
        """Write a snapshot of the state at the start of each segment, before anything else.

        A large segment gets further snapshots, so that recovery reads little however full the segment is.
        """
        self._begin_with_snapshot()
        log = self._log
        if log.end >= self._due:
            parts, needed = self._encode_snapshot()
            # Else the next segment, which is near, begins with one.
            if needed <= min(self._config.snapshot_bytes_max, log.room()):
                self._append_snapshot(parts, needed)
            else:
                self._due = log.end + self._config.snapshot_interval_bytes

    def _begin_with_snapshot(self) -> None:
        """Write a snapshot at the start of the segment, unless it begins with one.

        After a snapshot that a crash or a full disk broke off, a whole one follows. If the whole snapshot does not fit,
        the segment ends. A state too large for a file is left out, so that recovery begins earlier.
        """
        log, size = self._log, self._config.segment_size_bytes
        # Every put comes here, so the start of the segment is computed without a call of segment_start_of.
        while self.segment != log.end - log.end % size:
            parts, needed = self._encode_snapshot()
            if needed <= self._config.snapshot_bytes_max:
                log.ensure_room(needed)
                if log.room() < needed:
                    log.seal(log.epoch)
                    continue
                self._append_snapshot(parts, needed)
            else:
                logger.warning(
                    "commit log file %d begins without a snapshot: the state of the shard takes %d bytes, the limit is "
                    "%d (3/8 of segment_size_bytes). Until a snapshot fits again, no newer file is deleted and "
                    "recovery reads from an older one. Use fewer queues, producers or groups, or a store "
                    "with larger files",
                    log.end - log.end % size,
                    needed,
                    self._config.snapshot_bytes_max,
                )

            self.segment = log.end - log.end % size

    def begin_log(self) -> None:
        """Begin an empty log with its first file and snapshot."""
        with self._lock:
            self.begin_segment()

    def begin_next_file(self) -> None:
        """End the file that is written, and begin the next one with a snapshot. Raises: as `CommitLog.ensure_room`."""
        log = self._log
        log.ensure_room(log.room() + 1)
        log.seal(log.epoch)
        self._begin_with_snapshot()

    def find_newest(self) -> None:
        """Find the newest snapshots of the log, so that the next one is written when it is due."""
        # What this writer knows may have been cut since: another replica wrote the log.
        self.segment, self._due = -1, 0
        log = self._log
        tail = log.segments.find(log.end)
        if tail is not None:
            complete_at, parts_end = read_head(tail)
            if complete_at is not None or parts_end < log.end:
                self.segment = tail.start
        newest = next(snapshot_starts(log, log.end), None)
        if newest is not None:
            self._due = newest + self._config.snapshot_interval_bytes

    def _encode_snapshot(self) -> tuple[list[EncodedInner], int]:
        """The state as records to append, and their bytes."""
        part_bytes_max = min(1 << 20, self._config.segment_size_bytes // 8)
        parts = [
            self._records.encode_state_record(SNAPSHOT, body)
            for body in self._state.snapshot(part_bytes_max)
        ]
        return parts, sum(part.size for part in parts)

    def _append_snapshot(self, parts: list[EncodedInner], nbytes: int) -> None:
        start = self._log.end
        store_time_ms = self._records.next_store_time_ms()
        for part in parts:
            self._records.append([part], store_time_ms)
        self._log.marks.note_snapshot(start)
        # A large state is written less often: snapshots stay a small part of the log.
        interval = max(self._config.snapshot_interval_bytes, SNAPSHOT_SHARE * nbytes)
        self._due = self._log.end + interval
        fail_point("log.after_snapshot")

    def make_room(self, nbytes: int, *, with_due: bool = True) -> None:
        """Let records of so many bytes follow each other in one file.

        Args: `with_due`: a further snapshot of the segment comes before them if it is due.
        """
        if with_due:
            self.begin_segment()
        else:
            self._begin_with_snapshot()
        self._log.ensure_room(nbytes)
        if self._log.room() < nbytes:
            self._log.seal(self._log.epoch)
            self._begin_with_snapshot()
