"""CommitRealTime as a process: the loop around the logic of store/log/commit.py.

A plain class like `FlushService`, with the same life: one grant, then its process ends. Imports neither Ray nor
pyarrow. A full disk is waited for: the bytes stay in the pool, puts wait, and time out as unknown. Any other write that
fails ends the life: the next one begins where this one has published, and writes the same bytes again: no harm.
"""

from __future__ import annotations

import logging
from pathlib import Path

from raymq.actors.shared.control_block import COMMIT_REAL_TIME
from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import StorageFull, Unavailable
from raymq.store.files import Files
from raymq.store.log.commit import CommitRealTime, SegmentWriter
from raymq.store.log.transient_pool import PoolReader

from .flush_service import BUSY_WAIT_MS, EXIT_CODES, EXIT_FENCED, end_with
from .satellite import HEART_PERIOD_MS, IDLE_WAIT_MS, Satellite, Standing

log = logging.getLogger("raymq.commit_real_time")

#: from one look at a full disk to the next
FULL_WAIT_MS = 500


class CommitService:
    """One life of CommitRealTime. Callers: `run` or `serve` by one thread; `stop` by any."""

    def __init__(
        self,
        replica_dir: str | Path,
        config: StoreConfig,
        *,
        eager: bool,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        """Args: eager: puts wait for the commit, so each wakeup commits."""
        self._replica_dir = replica_dir
        self._config = config
        self._eager = eager
        self._files = files or Files()
        self._clock = clock or Clock()
        self._satellite = Satellite(
            replica_dir, COMMIT_REAL_TIME, clock=self._clock, files=self._files
        )
        self._writer = SegmentWriter(
            f"{replica_dir}/commitlog", config.segment_size_bytes, self._files
        )

    def run(self) -> None:
        """Serve, and end the process with the life, whatever else runs in it. Returns: only after `stop`."""
        end_with(self.serve)

    def serve(self) -> int:
        """One life: wait for the grant, commit under it. Returns: an EXIT_* code, when it is over."""
        satellite = self._satellite
        try:
            standing = satellite.run_until_granted()
            if standing is not Standing.GRANTED:
                return EXIT_CODES[standing]
            try:
                pool = PoolReader.open(
                    self._replica_dir, satellite.commit_log_incarnation, files=self._files
                )
            except Unavailable:
                # The CommitLog that granted this life has gone since.
                return EXIT_FENCED
            try:
                return EXIT_CODES[self._serve(pool)]
            finally:
                pool.close()
        finally:
            self._writer.close()
            satellite.close()

    def stop(self) -> None:
        """End the life soon, in order. Callers: any thread."""
        self._satellite.stop()

    def _serve(self, pool: PoolReader) -> Standing:
        satellite = self._satellite
        commit = CommitRealTime(
            pool,
            self._writer,
            self._clock,
            committed=satellite.base,
            on_committed=satellite.publish_position,
            interval_ms=self._config.commit_interval_ms,
            least_pages=self._config.commit_least_pages,
            thorough_interval_ms=self._config.commit_thorough_interval_ms,
            slice_bytes=self._config.transient_pool_slice_bytes,
        )
        standing = self._commit_at_bells(commit) if self._eager else self._commit_timed(commit)
        if standing is not Standing.FENCED:
            with satellite.long_call:
                commit.commit(satellite.appended)
        return standing

    def _commit_at_bells(self, commit: CommitRealTime) -> Standing:
        """As GroupCommit waits: the put's wakeup, or a look whose pause grows while nothing happens."""
        satellite = self._satellite
        wait_ms = BUSY_WAIT_MS
        while (standing := satellite.standing()) is Standing.GRANTED:
            if self._commit(commit, at_once=True):
                wait_ms = BUSY_WAIT_MS
            elif not satellite.wait(wait_ms):
                wait_ms = min(wait_ms * 2, IDLE_WAIT_MS)
            else:
                satellite.await_append(commit.committed)
        return standing

    def _commit_timed(self, commit: CommitRealTime) -> Standing:
        """Source: CommitRealTimeService#run; a wakeup tells of as many pages as the page rule wants."""
        satellite = self._satellite
        while (standing := satellite.standing()) is Standing.GRANTED:
            satellite.wait(min(commit.wait_ms(), HEART_PERIOD_MS))
            self._commit(commit, at_once=False)
        return standing

    def _commit(self, commit: CommitRealTime, *, at_once: bool) -> bool:
        """Returns: whether anything was committed."""
        satellite = self._satellite
        before, appended = commit.committed, satellite.appended
        if appended <= before:
            commit.commit_if_due(before)
            return False
        try:
            with satellite.long_call:
                committed = commit.commit(appended) if at_once else commit.commit_if_due(appended)
        except StorageFull as error:
            log.error("what is in the transient pool waits for room on the disk: %s", error)
            satellite.pause(FULL_WAIT_MS)
            return False
        satellite.publish_count(commit.commits)
        return committed > before
