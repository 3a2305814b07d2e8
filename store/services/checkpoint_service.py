"""Keeps the files besides the log current, so that a crash leaves little work for the next start, and for RocketMQ.

RocketMQ begins the recovery of a crashed store at the file that `checkpoint` names, and takes topics and offsets from
`config/` alone. Both are written while the store runs, by a slow thread and never as part of a put.
Source: DefaultMessageStore.FlushConsumeQueueService, StoreCheckpoint, BrokerController#initializeBrokerScheduledTasks,
RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from raymq.store.base.errors import Corrupt, RayMQError
from raymq.store.base.files import NOT_TRIED
from raymq.store.config_files import config_json
from raymq.store.put.service_host import ServiceHost

logger = logging.getLogger("raymq.store")

#: bounds of the time between two syncs of the consume queues, and between two writes of the configuration
PAUSE_MIN_MS, PAUSE_MAX_MS = 5_000, 60_000
#: the pause is so many times the duration of the last run, within these bounds
SHARE = 100
#: most ends of the log whose store time is kept. If there are more, every second one is dropped
STORE_TIMES_MAX = 256


class _StoreTimeAt(NamedTuple):
    """All records below `end` were stored at `store_time_ms` or earlier."""

    end: int
    store_time_ms: int


class _WaitingTables(NamedTuple):
    """Tables to write as soon as the log is synced up to `end`."""

    end: int
    tables: config_json.Tables


class CheckpointService:
    """Writes checkpoint and configuration files. Callers: one thread calls `run_once` about every second."""

    def __init__(self, store: ServiceHost) -> None:
        self._store = store
        self._clock = store.clock
        now_ms = self._clock.monotonic_ms()
        self._next_sync_ms = self._next_config_ms = now_ms + PAUSE_MIN_MS
        #: ascending
        self._store_times: list[_StoreTimeAt] = []
        self._waiting_tables: _WaitingTables | None = None
        #: the content of the configuration files
        self._known_files: dict[str, tuple[config_json.Table, int]] = {}
        #: the tables of the last check
        self._last_tables: config_json.Tables | None = None
        #: why something failed in the last call, for status
        self.last_error: str | None = None

    def run_once(self) -> None:
        """Run each job whose interval has passed. Failures are tried again, but for a failed fsync.

        Raises: OSError, Unavailable if a sync of a consume queue failed: only the next start writes the queues again.
        """
        self._note_time()
        self.last_error = None

        began_ms = self._clock.monotonic_ms()
        if began_ms >= self._next_sync_ms:
            try:
                self._store.sync_queues()
            except Corrupt as error:
                # The next start rebuilds that queue.
                self._fail(error)
            except OSError as error:
                if error.errno not in NOT_TRIED:
                    raise
                self._fail(error)
            self._next_sync_ms = self._next_run_ms(began_ms)

        try:
            self._write_checkpoint()
            self._write_config()
        except (OSError, RayMQError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.warning(
            "checkpoint, consume queues or configuration could not be written: %s", error
        )
        self.last_error = str(error)

    def _next_run_ms(self, began_ms: int) -> int:
        """The time of the next run of a job that began then and ends now."""
        now_ms = self._clock.monotonic_ms()
        return now_ms + min(max(SHARE * (now_ms - began_ms), PAUSE_MIN_MS), PAUSE_MAX_MS)

    # --- checkpoint -------------------------------------------------------------------------------

    def _note_time(self) -> None:
        """Note the store time of the log's present end."""
        # The time is read before the end: a record that is appended meanwhile has a later time.
        time_ms = self._store.state.store_time_ms
        end = self._store.log.end
        if not self._store_times or end > self._store_times[-1].end:
            self._store_times.append(_StoreTimeAt(end, time_ms))
            if len(self._store_times) > STORE_TIMES_MAX:
                del self._store_times[1::2]

    def _time_below(self, offset: int) -> int:
        """A store time up to which all records end at or below an offset; 0: none is known."""
        times_ms = (mark.store_time_ms for mark in self._store_times if mark.end <= offset)
        return max(times_ms, default=0)

    def _write_checkpoint(self) -> None:
        """Write the store times of synced bytes: RocketMQ assumes that all earlier messages are complete."""
        log = self._store.log
        checkpoint, queues_synced_end = log.checkpoint, log.marks.queues_synced_end
        physic_ms = max(checkpoint.physic_ms, self._time_below(log.synced))
        logics_ms = max(checkpoint.logics_ms, self._time_below(queues_synced_end))
        if (physic_ms, logics_ms) != (checkpoint.physic_ms, checkpoint.logics_ms):
            checkpoint.physic_ms, checkpoint.logics_ms = physic_ms, logics_ms
            checkpoint.write()

        # The newest time that is on disk in both stays: the next checkpoint may still need it.
        certain_end = min(log.synced, queues_synced_end)
        certain = sum(mark.end <= certain_end for mark in self._store_times)
        del self._store_times[: max(0, certain - 1)]

    # --- configuration ----------------------------------------------------------------------------

    def _write_config(self) -> None:
        """Write the configuration after a change, once the log has that change on disk."""
        store, began_ms = self._store, self._clock.monotonic_ms()
        if self._waiting_tables is None and began_ms >= self._next_config_ms:
            tables = config_json.tables_of(store)
            if tables != self._last_tables:
                # The end is read after the tables: their records are below it.
                self._waiting_tables = _WaitingTables(store.log.end, tables)
                self._last_tables = tables
            self._next_config_ms = self._next_run_ms(began_ms)

        waiting = self._waiting_tables
        certain_end = min(store.log.synced, store.log.confirmed)
        if waiting is not None and waiting.end <= certain_end:
            config_json.write_back(store, waiting.tables, known=self._known_files)
            self._waiting_tables = None
            self._next_config_ms = self._next_run_ms(began_ms)
