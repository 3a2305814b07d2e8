"""Opening what a log's directory holds, in the order that lets any later start finish what this one began."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from pathlib import Path

from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, StoreDamaged
from raymq.store.base.files import Files, SyncFailed
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.control_files.abort_lock import AbortFile, StoreLock, refuse_foreign_directory
from raymq.store.log.control_files.checkpoint import Checkpoint
from raymq.store.log.control_files.marks import Marks
from raymq.store.log.control_files.meta import CHAIN_BEGIN, TRUNCATING, Meta
from raymq.store.log.segments.log_files import open_log_files

from .chain import Chain
from .log_pool import LogPool


class LogParts:
    """The open parts of a log: lock, notes, marks, chain, checkpoint, files and pool.

    Args: `identity`: what `raymq/meta` shall say of the replica, beside the ids of the store and of the boot.
    Raises: Unavailable if another process has the store open, StoreDamaged if it is poisoned or damaged, SyncFailed.
    Nothing stays open then.
    """

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        *,
        files: Files,
        clock: Clock,
        identity: Mapping[str, object] | None,
    ) -> None:
        self._root = root
        self._config = config
        self._files = files

        files.make_dirs_durable(root)
        refuse_foreign_directory(root, files=files)
        lock = StoreLock(root, files=files)
        lock.acquire()
        #: closes all open parts, in the opposite order
        self._opened = contextlib.ExitStack()
        self._opened.callback(lock.release)

        try:
            self._open_notes()
            self._open_records()
            self._finish_truncation()
            self._open_pool(clock, identity or {})
            self.abort.create()
        except BaseException:
            self._opened.close()
            raise

    def _open_notes(self) -> None:
        """Open what says how the run before ended."""
        root, files = self._root, self._files
        side = root / "raymq"
        fresh = not files.exists(root / "commitlog")
        for name in ("raymq", "raymq/chain", "commitlog", "consumequeue"):
            files.make_dirs(root / name)

        # A process that was killed before it synced a directory left names that only the page cache has. These names
        # must survive a power loss, because the bytes under them are adopted here and acknowledged later.
        for directory in (root, side, side / "chain"):
            files.sync_dir(directory)

        self.abort = AbortFile(root, files=files)
        #: the run before did not end in order
        self.crashed = self.abort.exists()
        self.meta = Meta.open(side / "meta", files=files)
        self._opened.callback(self.meta.close)
        #: RayMQ wrote this store; False: Apache RocketMQ did (glossary: foreign store)
        self.is_own_store = fresh or self.meta.get("store_id") is not None
        #: no start of RayMQ has opened it before
        self.is_new = self.meta.get("boot_id") is None

        self._boot_id = files.boot_id()
        #: the machine has not lost its memory since the run before
        self.same_boot = self.meta.get("boot_id") == self._boot_id
        if self.meta.get("poisoned"):
            raise StoreDamaged(
                f"{root} is poisoned: an earlier fdatasync failed ({self.meta.get('poisoned')}). Its unsynced "
                "bytes cannot be trusted; rebuild this replica from its peer, or run `raymq store verify`.",
                path=str(root),
                rule="poisoned",
            )

    def _open_records(self) -> None:
        """Open the log's files, their chain and their marks."""
        files, opened = self._files, self._opened
        side = self._root / "raymq"
        self.marks = Marks.open(side / "marks", files=files)
        opened.callback(self.marks.close)
        self.chain = Chain(side / "chain", self._config.segment_size_bytes, files=files)
        opened.callback(self.chain.close)
        self.checkpoint = Checkpoint.open(self._root / "checkpoint", files=files)
        opened.callback(self.checkpoint.close)

        self.segments = open_log_files(self._root, self._config, files=files)
        opened.callback(self.segments.close)
        self.segments.load()
        self._sync_last_file()
        chain_begin = self.meta.get(CHAIN_BEGIN)
        if not self.segments.files:
            # The log is empty, and begins anywhere.
            return
        if chain_begin is not None and self.segments.min_offset == chain_begin[0]:
            self.chain.begin_at(*chain_begin)
        # Finish a deletion that a crash interrupted.
        self.chain.delete_before(self.segments.min_offset)

    def _sync_last_file(self) -> None:
        """Make the length of the last file durable: a process that was killed while it made the file may not have.

        Once it has bytes, a shorter file would be damage. Raises: SyncFailed; the next start refuses the store then,
        because another sync would prove nothing.
        """
        if not self.segments.files:
            return
        try:
            self.segments.files[-1].sync()
        except SyncFailed as error:
            with contextlib.suppress(OSError, RayMQError):
                self.meta.update({"poisoned": str(error)})
            raise

    def _finish_truncation(self) -> None:
        """Finish a truncation that an earlier process began."""
        truncating_to = self.meta.get(TRUNCATING)
        if truncating_to is not None:
            self.marks.lower(truncating_to)
            self.segments.truncate_to(truncating_to)
            self.chain.load()
            self.chain.truncate_to(truncating_to)
            self.chain.sync()

    def _open_pool(self, clock: Clock, identity: Mapping[str, object]) -> None:
        """Find the transient pool of the run before."""
        store_id = self.meta.get("store_id") or uuid.uuid4().hex
        #: what this start notes in `raymq/meta` once it has recovered the log
        self.identity = {"store_id": store_id, "boot_id": self._boot_id, **identity}
        self.pool = LogPool(self._root, self._config, self.segments, files=self._files, clock=clock)
        self._opened.callback(self.pool.close)
        if not self.pool.find_old(self.meta, store_id, same_boot=self.same_boot):
            # The pool has gone with the machine, or with a container's /dev/shm. Bytes that only the pool had are lost
            # as in a power loss, although the page cache is intact.
            self.same_boot = False

    def close(self) -> None:
        """Close all parts and release the lock. A second call does nothing."""
        self._opened.close()
