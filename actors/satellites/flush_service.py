"""GroupCommit and FlushRealTime as a process: the loop around the logic of store/log/flush.py.

A plain class; a Ray actor runs `run` in a thread, tests run it in a spawned process. When the loop ends the
process ends: one life serves one grant (satellite.py), and whoever hosts it starts the next.
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

from .satellite import HEART_PERIOD_MS, IDLE_WAIT_MS, Satellite, Standing

#: a wait right after work: a lost wakeup delays by this (RocketMQ's waitForRunning(10))
BUSY_WAIT_MS = 10

#: `stop` was called
EXIT_STOPPED = 0
#: CommitLog closed in order; the next life waits for its return
EXIT_STOPPED_BY_COMMIT_LOG = 80
#: the grant was taken back, or another CommitLog began
EXIT_FENCED = 81
#: a sync failed; CommitLog has been told
EXIT_SYNC_FAILED = 82
#: the loop raised: a bug, or the disk refused something else than a sync
EXIT_BUG = 83


class FlushService:
    """One life of a flusher. Callers: `run` or `serve` by one thread; `stop` by any."""

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
        """Serve, and end the process with the life, whatever else runs in it. Returns: only after `stop`."""
        end_with(self.serve)

    def serve(self) -> int:
        """One life: wait for the grant, flush under it. Returns: an EXIT_* code, when it is over."""
        satellite = self._satellite
        try:
            standing = satellite.run_until_granted()
            if standing is Standing.GRANTED:
                serve = self._group_commit if self._role == "group_commit" else self._real_time
                standing = serve()
            return EXIT_CODES[standing]
        except FlushFailed as failure:
            satellite.publish_failure(failure.errno)
            return EXIT_SYNC_FAILED
        finally:
            self._syncer.close()
            satellite.close()

    def stop(self) -> None:
        """End the life soon, in order. Callers: any thread."""
        self._satellite.stop()

    def _group_commit(self) -> Standing:
        """Source: GroupCommitService#run; the wait is adaptive so that an idle shard costs next to nothing."""
        satellite = self._satellite
        timer = satellite.sync_timer()
        commit = GroupCommit(
            self._syncer,
            flushed=satellite.base,
            on_sync_started=timer.sync_started,
            on_flushed=timer.flushed,
        )
        wait_ms = BUSY_WAIT_MS
        while (standing := satellite.standing()) is Standing.GRANTED:
            flushed = commit.flushed
            if self._commit_once(commit):
                wait_ms = BUSY_WAIT_MS
            elif not satellite.wait(wait_ms):
                wait_ms = min(wait_ms * 2, IDLE_WAIT_MS)
            else:
                wait_ms = BUSY_WAIT_MS
                satellite.await_append(flushed)
                # Who waits for this sync waits for all that comes before it. A grant that ended since was looked at
                # last counts for nothing, here as in `_commit_once` itself.
                self._commit_once(commit)
            if commit.flushed > flushed:
                satellite.poll_append(commit.flushed)
        if standing is not Standing.FENCED:
            self._commit_once(commit)
        return standing

    def _real_time(self) -> Standing:
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
            on_flushed=timer.flushed,
        )
        while (standing := satellite.standing()) is Standing.GRANTED:
            satellite.wait(min(flusher.wait_ms(), HEART_PERIOD_MS))
            with satellite.long_call:
                flusher.flush_if_due(satellite.committed)
            satellite.publish_count(self._syncer.syncs)
        if standing is not Standing.FENCED:
            with satellite.long_call:
                flusher.shutdown(satellite.committed)
            satellite.publish_count(self._syncer.syncs)
        return standing

    def _commit_once(self, commit: GroupCommit) -> bool:
        """Sync once for every put whose bytes are in the files. Returns: whether there was anything to do."""
        satellite = self._satellite
        committed = satellite.committed
        if committed <= commit.flushed:
            return False
        with satellite.long_call:
            commit.commit(committed)
        satellite.publish_count(self._syncer.syncs)
        return True


def end_with(serve: Callable[[], int]) -> None:
    """Live one life of a satellite and end the process with its EXIT_* code. Returns: only when it was stopped."""
    code = EXIT_BUG
    try:
        code = serve()
    except Exception:
        # The host of this thread would only log it, and then limp on without its service.
        traceback.print_exc()
        sys.stderr.flush()
    if code != EXIT_STOPPED:
        os._exit(code)


#: how a life ends, as its process tells
EXIT_CODES = {
    Standing.LEAVING: EXIT_STOPPED,
    Standing.STOPPED: EXIT_STOPPED_BY_COMMIT_LOG,
    Standing.FENCED: EXIT_FENCED,
}
