"""CommitRealTime as a process: the loop around the logic of store/log/commit_real_time.py.

Imports neither Ray nor pyarrow. On a full disk it tries again: the bytes stay in the pool, puts wait, and time out as
unknown. Any other failed write ends the process. The next one begins at the committed end published last and writes the
same bytes again, which is harmless.
"""

from __future__ import annotations

import logging
from pathlib import Path

from raymq.actors.shared.control_block import COMMIT_REAL_TIME
from raymq.store.base.errors import StorageFull, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.commit_real_time import CommitRealTime, SegmentWriter
from raymq.store.log.transient_pool import PoolReader

from .satellite import HEARTBEAT_PERIOD_MS, IDLE_WAIT_MS, GrantStatus
from .service import BUSY_WAIT_MS, EXIT_CODES, EXIT_FENCED, Service

logger = logging.getLogger("raymq.commit_real_time")

#: from one try on a full disk to the next
FULL_WAIT_MS = 500


class CommitService(Service):
    """CommitRealTime for one grant."""

    def __init__(
        self,
        replica_dir: str | Path,
        config: StoreConfig,
        *,
        eager: bool,
        files: Files | None = None,
    ) -> None:
        """Args: `eager`: puts wait for the commit, so each wakeup commits."""
        super().__init__(replica_dir, COMMIT_REAL_TIME, config, files)
        self._replica_dir = replica_dir
        self._eager = eager
        self._writer = SegmentWriter(
            f"{replica_dir}/commitlog", config.segment_size_bytes, self._files
        )
        self._undo.callback(self._writer.close)

    def _work(self) -> int:
        try:
            pool = PoolReader.open(
                self._replica_dir, self._satellite.commit_log_incarnation, files=self._files
            )
        except Unavailable:
            # The CommitLog that gave this grant has ended since.
            return EXIT_FENCED
        self._undo.callback(pool.close)

        satellite = self._satellite
        commit = CommitRealTime(
            pool,
            self._writer,
            self._clock,
            self._config,
            committed=satellite.base,
            on_committed=satellite.publish_position,
        )

        status = self._commit_eagerly(commit) if self._eager else self._commit_timed(commit)
        if status is not GrantStatus.FENCED:
            with satellite.blocking_call:
                commit.commit(satellite.appended)
        return EXIT_CODES[status]

    def _commit_eagerly(self, commit: CommitRealTime) -> GrantStatus:
        """Waits as GroupCommit does: for a put's wakeup, or for a time that grows while it is idle."""
        satellite = self._satellite
        wait_ms = BUSY_WAIT_MS
        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            if self._commit(commit, at_once=True):
                wait_ms = BUSY_WAIT_MS
            elif not satellite.wait(wait_ms):
                wait_ms = min(wait_ms * 2, IDLE_WAIT_MS)
            else:
                satellite.appends.await_announced(commit.committed)
        return status

    def _commit_timed(self, commit: CommitRealTime) -> GrantStatus:
        """Commit when the interval is over, or at a wakeup, while the grant lasts.

        A wakeup means that as many pages wait as the page rule asks for. Source: CommitRealTimeService#run.
        """
        satellite = self._satellite
        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            satellite.wait(min(commit.wait_ms(), HEARTBEAT_PERIOD_MS))
            self._commit(commit, at_once=False)
        return status

    def _commit(self, commit: CommitRealTime, *, at_once: bool) -> bool:
        """Commit once. Returns: whether anything was committed."""
        satellite = self._satellite
        self._follow_options()
        satellite.wakes_flush_real_time = not self._config.flush_commit_log_timed
        before, appended = commit.committed, satellite.appended
        if appended <= before:
            commit.commit_if_due(before)
            return False
        try:
            with satellite.blocking_call:
                committed = commit.commit(appended) if at_once else commit.commit_if_due(appended)
        except StorageFull as error:
            logger.error("the transient pool waits for space on the disk: %s", error)
            satellite.pause(FULL_WAIT_MS)
            return False
        satellite.publish_count(commit.commits)
        return committed > before
