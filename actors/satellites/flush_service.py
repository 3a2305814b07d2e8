"""GroupCommit and FlushRealTime as a process: the loop around the logic of store/log/flush.py.

Imports neither Ray nor pyarrow: a flusher is small and quick to start.
"""

from __future__ import annotations

from pathlib import Path

from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.flush import FlushFailed, FlushRealTime, GroupCommit, SegmentSyncer

from .satellite import HEARTBEAT_PERIOD_MS, IDLE_WAIT_MS, GrantStatus
from .service import BUSY_WAIT_MS, EXIT_CODES, EXIT_SYNC_FAILED, Service


class FlushService(Service):
    """A flusher for one grant."""

    def __init__(
        self, replica_dir: str | Path, role: str, config: StoreConfig, *, files: Files | None = None
    ) -> None:
        """Args: `role`: "group_commit" or "flush_real_time"."""
        super().__init__(replica_dir, role, config, files)
        self._syncer = SegmentSyncer(
            f"{replica_dir}/commitlog", config.segment_size_bytes, self._files
        )
        self._undo.callback(self._syncer.close)

    def _work(self) -> int:
        is_group_commit = self._satellite.role == "group_commit"
        serve = self._serve_group_commit if is_group_commit else self._serve_flush_real_time
        try:
            return EXIT_CODES[serve()]
        except FlushFailed as failure:
            self._satellite.publish_failure(failure.errno)
            return EXIT_SYNC_FAILED

    def _serve_group_commit(self) -> GrantStatus:
        """Sync for waiting puts while the grant lasts. Source: GroupCommitService#run.

        The wait is adaptive, so that an idle shard costs next to nothing.
        """
        satellite = self._satellite
        group_commit = GroupCommit(
            self._syncer,
            synced=satellite.base,
            on_sync_started=satellite.publish_sync_started,
            on_synced=satellite.publish_synced,
        )

        wait_ms = BUSY_WAIT_MS
        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            if self._sync_once(group_commit):
                wait_ms = BUSY_WAIT_MS
            elif not satellite.wait(wait_ms):
                wait_ms = min(wait_ms * 2, IDLE_WAIT_MS)
            else:
                wait_ms = BUSY_WAIT_MS
                satellite.appends.await_announced(group_commit.synced)
                # Before the grant is checked again, which would delay the put. Under a revoked grant CommitLog ignores
                # the published end.
                self._sync_once(group_commit)

        if status is not GrantStatus.FENCED:
            self._sync_once(group_commit)
        return status

    def _serve_flush_real_time(self) -> GrantStatus:
        """Sync periodically while the grant lasts, and at wakeups unless flushes are timed.

        Source: FlushRealTimeService#run.
        """
        satellite = self._satellite
        flusher = FlushRealTime(
            self._syncer,
            self._clock,
            self._config,
            synced=satellite.base,
            on_sync_started=satellite.publish_sync_started,
            on_synced=satellite.publish_synced,
        )

        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            self._follow_options()
            woken = satellite.wait(min(flusher.wait_ms(), HEARTBEAT_PERIOD_MS))
            with satellite.blocking_call:
                flusher.flush_if_due(satellite.committed, woken=woken)
            satellite.publish_count(self._syncer.syncs)

        if status is not GrantStatus.FENCED:
            with satellite.blocking_call:
                flusher.flush(satellite.committed)
            satellite.publish_count(self._syncer.syncs)
        return status

    def _sync_once(self, group_commit: GroupCommit) -> bool:
        """Sync once for every put whose bytes are in the files. Returns: whether there was anything to sync."""
        satellite = self._satellite
        committed = satellite.committed
        if committed <= group_commit.synced:
            return False
        with satellite.blocking_call:
            group_commit.flush(committed)
        satellite.publish_count(self._syncer.syncs)
        return True
