"""GroupCommit and FlushRealTime as a process: the loop around the logic of store/log/flush.py.

A plain class: a Ray actor runs `run` in a thread, tests run it in a spawned process. One service serves one grant
(satellite.py). When its loop ends the process ends, and its host starts the next.
Imports neither Ray nor pyarrow: a flusher is small and quick to start.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import Rejected
from raymq.store.files import Files
from raymq.store.log.flush import FlushFailed, FlushRealTime, GroupCommit, SegmentSyncer

from .satellite import HEARTBEAT_PERIOD_MS, IDLE_WAIT_MS, GrantStatus, Satellite

#: a wait right after work: a lost wakeup delays by this (RocketMQ's waitForRunning(10))
BUSY_WAIT_MS = 10

#: `stop` was called
EXIT_STOPPED = 0
#: CommitLog closed in order; the next process waits for its return
EXIT_STOPPED_BY_COMMIT_LOG = 80
#: the grant was revoked, or another CommitLog began
EXIT_FENCED = 81
#: a sync failed; the failure is published
EXIT_SYNC_FAILED = 82
#: the loop raised: a bug, or the disk refused another call than a sync
EXIT_BUG = 83

#: how a service ends -> its process's exit code
EXIT_CODES = {
    GrantStatus.LEAVING: EXIT_STOPPED,
    GrantStatus.STOPPED: EXIT_STOPPED_BY_COMMIT_LOG,
    GrantStatus.FENCED: EXIT_FENCED,
}


class FlushService:
    """A flusher for one grant. Callers: `run` or `serve` by one thread; `stop` by any."""

    def __init__(
        self,
        replica_dir: str | Path,
        role: str,
        config: StoreConfig,
        *,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        """Args: role: "group_commit" or "flush_real_time"."""
        if role not in ("group_commit", "flush_real_time"):
            raise Rejected(
                f"{role!r} is not a flusher", field="role", limit="group_commit|flush_real_time"
            )
        files = files or Files()
        self._role = role
        self._config = config
        self._clock = clock or Clock()
        self._satellite = Satellite(replica_dir, role, clock=self._clock, files=files)
        self._syncer = SegmentSyncer(f"{replica_dir}/commitlog", config.segment_size_bytes, files)

    def run(self) -> None:
        """Serve, then end the process, whatever else runs in it. Returns: only after `stop`."""
        run_and_exit(self.serve)

    def serve(self) -> int:
        """Wait for the grant and flush under it. Returns: an EXIT_* code, when the grant is over."""
        satellite = self._satellite
        try:
            status = satellite.await_grant()
            if status is GrantStatus.GRANTED:
                serve = self._group_commit if self._role == "group_commit" else self._real_time
                status = serve()
            return EXIT_CODES[status]
        except FlushFailed as failure:
            satellite.publish_failure(failure.errno)
            return EXIT_SYNC_FAILED
        finally:
            self._syncer.close()
            satellite.close()

    def stop(self) -> None:
        """End the service soon, in order. Callers: any thread."""
        self._satellite.stop()

    def _group_commit(self) -> GrantStatus:
        """Source: GroupCommitService#run; the wait is adaptive so that an idle shard costs next to nothing."""
        satellite = self._satellite
        timer = satellite.sync_timer()
        commit = GroupCommit(
            self._syncer,
            flushed=satellite.base,
            on_sync_started=timer.sync_started,
            on_flushed=timer.synced,
        )
        wait_ms = BUSY_WAIT_MS
        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            synced = commit.flushed
            if self._commit_once(commit):
                wait_ms = BUSY_WAIT_MS
            elif not satellite.wait(wait_ms):
                wait_ms = min(wait_ms * 2, IDLE_WAIT_MS)
            else:
                wait_ms = BUSY_WAIT_MS
                satellite.appends.await_announced(synced)
                # Before the grant is checked again, which would delay the put. If the grant has been revoked, what is
                # published now counts for nothing.
                self._commit_once(commit)
            if commit.flushed > synced:
                satellite.appends.poll_next(commit.flushed)
        if status is not GrantStatus.FENCED:
            self._commit_once(commit)
        return status

    def _real_time(self) -> GrantStatus:
        """Source: FlushRealTimeService#run with flushCommitLogTimed: a period, not a wakeup."""
        satellite = self._satellite
        timer = satellite.sync_timer()
        flusher = FlushRealTime(
            self._syncer,
            self._clock,
            interval_ms=self._config.flush_interval_ms,
            least_pages=self._config.flush_least_pages,
            thorough_interval_ms=self._config.flush_thorough_interval_ms,
            flushed=satellite.base,
            on_sync_started=timer.sync_started,
            on_flushed=timer.synced,
        )
        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            satellite.wait(min(flusher.wait_ms(), HEARTBEAT_PERIOD_MS))
            with satellite.blocking_call:
                flusher.flush_if_due(satellite.committed)
            satellite.publish_count(self._syncer.syncs)
        if status is not GrantStatus.FENCED:
            with satellite.blocking_call:
                flusher.shutdown(satellite.committed)
            satellite.publish_count(self._syncer.syncs)
        return status

    def _commit_once(self, commit: GroupCommit) -> bool:
        """Sync once for every put whose bytes are in the files. Returns: whether there was anything to sync."""
        satellite = self._satellite
        committed = satellite.committed
        if committed <= commit.flushed:
            return False
        with satellite.blocking_call:
            commit.commit(committed)
        satellite.publish_count(self._syncer.syncs)
        return True


def run_and_exit(serve: Callable[[], int]) -> None:
    """Run a satellite's service and end the process with its EXIT_* code. Returns: only when it was stopped."""
    code = EXIT_BUG
    try:
        code = serve()
    except Exception:
        # The host of this thread would only log it, and continue without its service.
        traceback.print_exc()
        sys.stderr.flush()
    if code != EXIT_STOPPED:
        os._exit(code)
