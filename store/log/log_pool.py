"""The log's side of the transient pool: waiting for room, committing, and recovering the pool at a start.

The pool itself is `transient_pool.py`. Without a pool nothing here is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, Unavailable
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files
from raymq.store.base.rules import FILE_OF_OFFSET_RULE
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.control_files.meta import Meta
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue

from .transient_pool import NAME_FILE, TransientPool, remove_pools

#: how often an append checks for room in the pool while it waits
POOL_POLL_MS = 1


class LogPool:
    """The transient pool of one log, if there is one. Callers: the log's one appender."""

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        segments: MappedFileQueue,
        *,
        files: Files,
        clock: Clock,
    ) -> None:
        self._root = root
        self._config = config
        self._segments = segments
        self._files = files
        self._clock = clock
        #: the pool for appends; None: they go into the files
        self.active: TransientPool | None = None
        #: called while an append waits for room. Without CommitRealTime the log commits itself
        self.on_full: Callable[[], None] | None = None
        self._old: TransientPool | None = None
        self._store_id = ""
        #: since when there is no room and nothing was committed, monotonic ms
        self._stalled_ms: int | None = None

    # --- from start to stop -----------------------------------------------------------------------

    def find_old(self, meta: Meta, store_id: str, *, same_boot: bool) -> bool:
        """Look for the pool of the earlier process.

        Returns: False if that pool is gone, and the bytes that only it had.
        """
        self._store_id = store_id
        name = meta.get("pool")
        if name is not None and same_boot:
            self._old = TransientPool.attach(self._root, name, store_id, files=self._files)
        return name is None or self._old is not None

    def restore(self, appended: int) -> None:
        """Complete the files from the old pool. Callers: before recovery, after the old CommitRealTime ended."""
        pool, self._old = self._old, None
        if pool is None:
            return
        self._copy(pool, appended)
        fail_point("pool.restored")
        config = self._config
        sizes = (config.transient_pool_bytes, config.segment_size_bytes)
        if config.transient_pool and pool.fits(*sizes):
            self.active = pool
        else:
            # The pool stays until its bytes are known to be in the files: a start that dies earlier does this again.
            pool.close()

    def open(self, end: int) -> str | None:
        """Open a pool for the recovered log. Returns: its name. Raises: StorageFull, with the numbers."""
        config = self._config
        if not config.transient_pool:
            return None
        if self.active is None:
            self.active = TransientPool.create(
                self._root,
                self._store_id,
                config.transient_pool_bytes,
                config.segment_size_bytes,
                files=self._files,
            )
        self.active.reset(end)
        return self.active.name

    def remove(self) -> None:
        """Remove every pool of this store. Callers: after a note that all of their bytes are in the files."""
        remove_pools(self._root, self._store_id, files=self._files)

    def may_exist(self, name: str | None) -> bool:
        """Whether there may be a pool of an earlier process, whose name was noted as `name`."""
        return bool(name) or self._files.exists(self._root / NAME_FILE)

    def close(self) -> None:
        """Unmap the pool, which stays."""
        for pool in (self.active, self._old):
            if pool is not None:
                pool.close()
        self.active = self._old = None

    # --- room -------------------------------------------------------------------------------------

    def publish(self, incarnation: int) -> None:
        """Let the CommitRealTime that this incarnation of CommitLog will grant find the pool."""
        if self.active is not None:
            self.active.publish(self._root, incarnation)

    def commit(self, end: int) -> None:
        """Write the bytes that are only in the pool into the files. Raises: StorageFull, OSError.

        Callers: while no CommitRealTime is granted, or after the last append. A CommitRealTime in the middle of its
        work would find other bytes in the space that this call frees.
        """
        if self.active is not None:
            self._copy(self.active, end)
            self.active.committed = end

    def await_committed(self, pool: TransientPool, offset: int, end: int) -> None:
        """Wait until everything below `offset` is committed, while CommitRealTime makes progress.

        Raises: Unavailable if it has not moved for the sync flush timeout. Nothing was stored then.
        """
        while pool.committed < offset:
            before = pool.committed
            if self._stalled_ms is None:
                self._stalled_ms = self._clock.monotonic_ms()
            if self.on_full is None:
                self.commit(end)
            else:
                self.on_full()
            if pool.committed >= offset:
                break

            now_ms = self._clock.monotonic_ms()
            if pool.committed > before:
                self._stalled_ms = now_ms
            elif now_ms - self._stalled_ms >= self._config.sync_flush_timeout_ms:
                raise Unavailable(
                    f"the transient pool ({pool.size_bytes} bytes) is full and CommitRealTime is at "
                    f"{pool.committed} of {end} for {now_ms - self._stalled_ms} ms: look at its role in `raymq "
                    "status`, and retry",
                    field="transient_pool",
                    limit=pool.size_bytes,
                )
            self._clock.sleep_ms(POOL_POLL_MS)

        self._stalled_ms = None

    def _copy(self, pool: TransientPool, stop: int) -> None:
        """Write the uncommitted bytes of a pool below `stop` into the files."""
        for offset, data in pool.pieces(pool.committed, stop):
            file = self._segments.find(offset)
            if file is None:
                raise Corrupt(
                    f"no commit log file takes offset {offset}, which the transient pool holds",
                    path=str(self._root / "commitlog"),
                    offset=offset,
                    rule=FILE_OF_OFFSET_RULE,
                )
            file.pwrite(data, offset - file.start)
