"""The commit log: the bytes of one replica, their chain and their marks.

The log treats records as opaque bytes, and only recovery walks their boundaries.

A leader appends records that `message_store` encodes, and a follower appends units as they arrive. Recovery, truncation
and the order "data, chain, mark" are the same for both.
"""

from __future__ import annotations

import errno
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.checksum import crc32c, crc32c_padded
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    Corrupt,
    RayMQError,
    Rejected,
    Unavailable,
    broken,
    require,
)
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files, SyncFailed
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import Ends
from raymq.store.config.running_config import RunningConfig
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.control_files.meta import (
    ADOPTING,
    CHAIN_BEGIN,
    POWER_LOST,
    QUEUES_DOUBTFUL,
    TRUNCATING,
)
from raymq.store.log.recovery.log_scan import Scan
from raymq.store.log.segments.mapped_file import MappedFile
from raymq.store.log.segments.mapped_file_queue import FileAllocator
from raymq.store.log.segments.segment_paths import segment_start_of
from raymq.store.records import record

from .chain import ChainUnit, check_units
from .chain_maker import ChainMaker
from .log_health import LogHealth
from .log_parts import LogParts
from .log_reads import LogReads
from .unit_bounds import RecordStarts

logger = logging.getLogger("raymq.store")

#: bytes written again at a time
REWRITE_BYTES = 1 << 20


class CommitLog:
    """One replica's log.

    Invariant: synced <= committed <= end and confirmed <= committed; with flush=sync also confirmed <= synced. Bytes
    below confirmed never change. One appender at a time: callers hold their put lock. With the transient pool, bytes
    above committed are in the pool only. Without it committed is the end.
    """

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        *,
        files: Files,
        clock: Clock,
        identity: Mapping[str, object] | None = None,
    ) -> None:
        config = RunningConfig.of(config)
        self.root = root
        #: the options, some of which change while the store is open
        self.config = config
        self.files = files
        self.clock = clock

        #: IP and port that new records carry as store host. A replica that clients reach sets its own
        self.store_host = config.store_host
        #: called after each `append`, before the put is accounted for; must not raise
        self.on_appended: Callable[[], None] = lambda: None
        #: how often the log was cut or begun elsewhere, and the lock under which that and the note of a sync are made
        self._cuts = 0
        self._cuts_lock = threading.Lock()
        self._closed = False

        self._parts = parts = LogParts(root, config, files=files, clock=clock, identity=identity)
        self.meta = parts.meta
        self.marks = parts.marks
        self.chain = parts.chain
        self.checkpoint = parts.checkpoint
        self.segments = parts.segments
        self.pool = parts.pool
        #: the run before did not end in order
        self.crashed = parts.crashed
        #: RayMQ wrote this store; False: Apache RocketMQ did (glossary: foreign store)
        self.is_own_store = parts.is_own_store
        #: nothing that was written before this start may have gone with the machine's memory
        self.same_boot = parts.same_boot

        #: everything is stored below this physical offset
        self.end = 0
        #: of the units that this replica appends
        self.epoch = 0
        #: bytes of a leader of an epoch below this one are refused: this replica has promised that to a newer one
        self.epoch_floor = 0
        #: reads bytes and records, and knows the damage that reads have met
        self.reads = LogReads(
            self.segments, end=lambda: self.end, check_positions=self.is_own_store
        )
        #: makes units that the chain lacks, and knows the epochs of those that it may lose
        self.chain_maker = ChainMaker(self.chain, self.marks, self.reads, config)
        #: says whether the log takes appends
        self.health = LogHealth(self.meta, end=lambda: self.end)
        #: prepares the next file and writes zeros ahead of the end; the host runs it in a thread
        self.allocator = FileAllocator(
            self.segments,
            lambda: self.end,
            clock=clock,
            window_bytes=config.prewrite_window_bytes,
            warm=config.warm_mapped_file,
            on_sync_failed=self.health.fail_prewrite,
        )
        self.health.on_sync_failed = self.allocator.break_off
        #: what the recovery of this start found; None: there was none yet
        self.recovered: Scan | None = None

    # --- positions --------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """The first physical offset stored."""
        return self.segments.min_offset

    @property
    def end_max(self) -> int:
        """The end of the last file: nothing is stored at or above it, whatever recovery may find."""
        files = self.segments.files
        return files[-1].start + self.config.segment_size_bytes if files else 0

    @property
    def committed(self) -> int:
        """Everything below this is in the files. Bytes above are in the transient pool only."""
        pool = self.pool.active
        return self.end if pool is None else pool.committed

    @property
    def ends(self) -> Ends:
        """All four ends, as far as this log knows them."""
        marks = self.marks
        return Ends(
            appended=self.end,
            committed=self.committed,
            synced=marks.synced_end,
            # Of the replicas the log knows only the confirmed end, which is never above their ends.
            replicated=marks.confirmed_end,
        )

    @property
    def synced(self) -> int:
        """Everything below this is on disk, as far as it was proved."""
        return self.marks.synced_end

    @property
    def confirmed(self) -> int:
        """The confirmed end: everything below may be read and dispatched."""
        return self.marks.confirmed_end

    @property
    def is_empty(self) -> bool:
        """Whether the log has no byte, wherever it begins."""
        return self.end <= self.start

    @property
    def last_epoch(self) -> int:
        """The epoch of the last record; 0 for an empty log."""
        return self.chain_maker.last_epoch(self.end)

    def room(self) -> int:
        """Bytes left for records in the current file, without its blank's 8 bytes; negative: no file yet."""
        if self.end >= self.end_max:
            return -1
        size = self.config.segment_size_bytes
        return size - (self.end - self.start) % size - fmt.BLANK_BYTES

    def _file_end(self, offset: int) -> int:
        """End of the file that holds `offset`."""
        size = self.config.segment_size_bytes
        return segment_start_of(offset, size) + size

    def _current(self) -> MappedFile:
        file = self.segments.find(self.end)
        if file is None:
            raise broken("the tail has a file", end=self.end)
        return file

    # --- appending --------------------------------------------------------------------------------

    def ensure_room(self, total_bytes: int) -> None:
        """Allocate the files that a batch of `total_bytes` needs, so that a full disk refuses before any append.

        Raises: StorageFull, Unavailable with CREATE_MAPPED_FILE_FAILED, with nothing stored.
        """
        self._check_writable()
        size = self.config.segment_size_bytes
        if self.room() >= total_bytes:
            return
        # A snapshot leaves 5/8 of a file (see `snapshot_bytes_max`). The end of a file wastes less than the largest
        # record, half a file.
        needed = 1 + (total_bytes - max(self.room(), 0)) // (size // 4)
        used = (self.end + size - 1) // size * size
        while self.end_max < used + needed * size:
            self._next_file()

    def _next_file(self) -> None:
        """Take the next file. Raises: StorageFull, Unavailable with CREATE_MAPPED_FILE_FAILED."""
        self.allocator.next_file(self.config.allocate_timeout_ms)

    def _begin_file_at_end(self) -> None:
        """Take the next file if the log's end is in none. Raises: as `_next_file`."""
        if self.end >= self.end_max:
            self._next_file()

    def check_epoch(self, epoch: int) -> None:
        """Check that a leader's epoch is not over. Callers: with the put lock. Raises: Unavailable."""
        if epoch < self.epoch_floor:
            raise Unavailable(
                f"epoch {epoch} of this replica's leader is over: epoch {self.epoch_floor} was heard; "
                "nothing was stored",
                field="epoch",
                limit=self.epoch_floor,
                status=PutStatus.SERVICE_NOT_AVAILABLE.value,
            )

    def append(self, data: pa.Buffer | bytes, epoch: int) -> int:
        """Append one unit of records to the current file. Returns: its physical offset.

        Durable: after the flush service's sync. Order: bytes, chain, mark. The caller publishes the end afterwards.
        """
        if self.health.poisoned is not None or self._closed or epoch < self.epoch_floor:
            self._check_writable()
            self.check_epoch(epoch)
        length, room = len(data), self.room()
        if length > room:
            raise broken("a unit fits its file", length=length, room=room)
        fail_point("log.before_store")
        start = self.end
        unit = ChainUnit(start, start + length, epoch, crc32c(data), self.chain.value)
        self._append_unit(data, unit)
        fail_point("log.after_store")
        self.on_appended()
        return start

    def _append_unit(self, data: pa.Buffer | bytes | memoryview, unit: ChainUnit) -> None:
        self._write_bytes(data)
        self._append_chain_units([unit], len(data))
        self.end = unit.end
        self.marks.appended_end = unit.end

    def _write_bytes(self, data: pa.Buffer | bytes | memoryview) -> None:
        """pwrite at the end of the log. After a failed write the bytes are zeros again.

        Without the zeros a shorter append could end where a record of the refused batch begins, and readers would see
        that record. In the pool the bytes stay: nothing above the end is ever committed.
        """
        file = self._current()
        position = self.end - file.start
        pool = self.pool.active
        if pool is not None:
            self.pool.await_committed(pool, self.end + len(data) - pool.size_bytes, self.end)
            file.claim(position + len(data))
            pool.write(self.end, data)
            fail_point("pool.stored")
            return
        try:
            file.pwrite(data, position)
        except (OSError, RayMQError):
            self.health.zero(file, position, len(data))
            raise

    def _append_chain_units(self, units: Sequence[ChainUnit], stored_bytes: int) -> None:
        """Append the chain units of the bytes that were just stored. If that fails, the bytes are zeroed again."""
        try:
            self.chain.append(units)
        except (OSError, RayMQError):
            if self.pool.active is None:
                file = self._current()
                self.health.zero(file, units[0].start - file.start, stored_bytes)
            raise

    def seal(self, epoch: int) -> None:
        """End the current file with a blank record and move to the next one."""
        self._check_writable()
        if not self.segments.files:
            self._next_file()
            return

        start, left = self.end, self._file_end(self.end) - self.end
        blank = record.blank(left)
        pool = self.pool.active
        if pool is not None:
            self.pool.await_committed(pool, pool.hole_end, start)

        self._write_bytes(blank)
        unit = ChainUnit(start, start + left, epoch, crc32c_padded(blank, left), self.chain.value)
        self._append_chain_units([unit], len(blank))
        if pool is not None and left > len(blank):
            pool.note_hole(start + len(blank))

        self.end = start + left
        self.marks.appended_end = self.end
        fail_point("log.roll")
        self._begin_file_at_end()

    def append_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Append replicated units verbatim. Args: `data`: their bytes, contiguous from this log's end.

        Raises: Corrupt if bytes do not match their unit, Rejected if the units do not continue this log.
        """
        self._check_writable()
        base = units[0].start
        check_units(units, data)
        at = 0
        while at < len(units):
            first = units[at]
            if first.start != self.end or first.previous != self.chain.value:
                raise self._does_not_continue(first)
            self._begin_file_at_end()
            # All units of one file cost one write of bytes and one of the chain. At least one is tried.
            stop = bisect_right(units, self._file_end(self.end), lo=at + 1, key=attrgetter("end"))
            part = units[at:stop]
            stored = data[first.start - base : part[-1].end - base]
            self._write_bytes(stored)
            self._append_chain_units(part, len(stored))
            self.end = self.marks.appended_end = part[-1].end
            at = stop

    def adopt_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Replace this log's chain units from `units[0].start` with the leader's, and write the missing bytes.

        The bytes that this log has are the same: the caller compared them. Raises: as `append_units`.
        """
        self._check_writable()
        base = units[0].start
        check_units(units, data)
        if base > self.end:
            raise self._does_not_continue(units[0])
        if base < self.synced:
            # A power loss may take the end of a unit. Of its bytes the marks alone say which were synced before.
            self.marks.sync()

        self.chain_maker.note_epochs_from(base, self.end)
        self.chain.truncate_to(base)
        try:
            for unit in units:
                if unit.end > self.end:
                    self._begin_file_at_end()
                    self._write_bytes(data[self.end - base : unit.end - base])
                    self.end = unit.end
                self.chain.append([unit])
                self.marks.appended_end = self.end
        finally:
            self.complete_chain()

    def begin_at(self, start: int, chain_value: int) -> None:
        """Let the empty log begin at the start of a file, as the log of a leader that has deleted its oldest files.

        Args: `chain_value`: the leader's chain value at `start`. Durable: at return. After a crash before that the log
        is empty, wherever it begins. Raises: StorageFull.
        """
        self._check_writable()
        require(self.is_empty, "only an empty log begins elsewhere", start=self.start, end=self.end)
        require(start % self.config.segment_size_bytes == 0, "a log begins with a file", at=start)
        # Without any file the log would end at 0, and no mark may say more then.
        self._lower_marks(0)
        self.marks.sync()
        # The chain is a cache: of the value before its first unit only this note is left after a power loss.
        self.meta.update({CHAIN_BEGIN: [start, chain_value]})
        self.segments.begin_at(start)
        self.chain.begin_at(start, chain_value)
        self.end = start

    def _lower_marks(self, offset: int) -> None:
        """Lower the marks to `offset`. A sync that has begun before notes nothing afterwards."""
        with self._cuts_lock:
            self._cuts += 1
            self.marks.lower(offset)

    def _does_not_continue(self, unit: ChainUnit) -> Rejected:
        return Rejected(
            f"unit [{unit.start}, {unit.end}) does not continue the log, which ends at {self.end}",
            field="prev_end",
            limit=self.end,
        )

    def same_until(self, units: list[ChainUnit], data: memoryview) -> int:
        """The first offset at which this log's bytes differ from those of another replica's units, or the lower end of
        both.

        Raises: Corrupt if `data` does not have the CRCs of its units: then it proves nothing.
        """
        check_units(units, data)
        position = base = units[0].start
        stop = min(units[-1].end, self.end)
        while position < stop:
            upto = min(stop, self._file_end(position))
            mine = np.frombuffer(self.reads.raw(position, upto), dtype=np.uint8)
            theirs = np.frombuffer(data[position - base : upto - base], dtype=np.uint8)
            different = mine != theirs
            if different.any():
                return position + int(np.argmax(different))
            position = upto
        return stop

    def note_synced(self, offset: int) -> None:
        """A flush service proved everything below `offset` synced. After a failed sync nothing more is proved."""
        if offset > self.marks.synced_end and not self.health.sync_failed:
            self.marks.synced_end = min(offset, self.committed)

    def note_confirmed(self, offset: int) -> bool:
        """Raise the confirmed end to `offset`. It never falls. Returns: whether it has moved."""
        before = self.marks.confirmed_end
        if offset > before:
            self.marks.confirmed_end = min(offset, self.committed)
            return self.marks.confirmed_end > before
        return False

    def sync(self) -> int:
        """fdatasync [synced, committed) through the witness descriptors. Returns: the synced end.

        Raises: OSError after a failed sync: the replica is poisoned and must stop. Every later call raises at once,
        without touching the disk.
        """
        if self.health.sync_failed:
            raise OSError(errno.EIO, f"an earlier sync failed: {self.health.poisoned}")
        cuts, end = self._cuts, self.committed
        try:
            self.segments.sync_range(min(self.synced, end), end)
        except OSError as error:
            self.health.poison(f"fdatasync: {error}")
            raise
        with self._cuts_lock:
            # After a cut meanwhile other bytes may be below `end`, which no sync has written.
            if cuts == self._cuts:
                self.note_synced(end)
        return self.synced

    def rewrite(self, start: int) -> None:
        """Rewrite the bytes from `start` (or the synced end) so that their pages are dirty again.

        Needed after a flusher died during a sync. If that sync failed, its error is lost, and the kernel counts the
        pages as clean, so that the next sync would not write them.
        """
        position = max(start, self.synced, self.start)
        while position < self.end:
            stop = min(self.end, self._file_end(position), position + REWRITE_BYTES)
            data = self.reads.raw(position, stop)
            file = self.segments.find(position)
            if file is not None:
                file.pwrite(data, position - file.start)
            position = stop

    def _check_writable(self) -> None:
        """Raises: Unavailable. Callers: those that write the log, with the put lock held."""
        if self.health.may_take_back and not self._closed:
            self.health.take_back()
        self.health.check()
        if self._closed:
            raise Unavailable(
                "the store is closed", field="store", status=PutStatus.SERVICE_NOT_AVAILABLE.value
            )

    # --- deletion ---------------------------------------------------------------------------------

    def delete_first(self) -> None:
        """Delete the oldest file of the log. Views of it stay readable.

        Durable: at return. Callers: `clean.CleanService`, which knows the files that may be deleted.
        """
        first = self.segments.files[0]
        require(
            first.start + first.size <= min(self.confirmed, self.synced),
            "only confirmed and synced bytes are deleted",
            start=first.start,
            confirmed=self.confirmed,
            synced=self.synced,
        )
        self.segments.delete_first()

    # --- the transient pool -----------------------------------------------------------------------

    def note_committed(self, offset: int) -> None:
        """CommitRealTime has published `offset`: bytes below are in the files, and their room in the pool is free."""
        pool = self.pool.active
        if pool is not None and offset > pool.committed:
            pool.committed = min(offset, self.end)

    def commit_pool(self) -> None:
        """Move everything in the pool into the log's files: `LogPool.commit`."""
        self.pool.commit(self.end)

    # --- truncation and recovery ------------------------------------------------------------------

    def truncate(self, offset: int) -> None:
        """Cut the log at `offset`: zero the rest of its file, delete later files, and sync.

        Raises: Corrupt below the confirmed end: confirmed bytes never change.
        Callers: while no CommitRealTime is granted.
        """
        if offset < self.confirmed:
            raise Corrupt(
                f"the log cannot be cut at {offset}, below its confirmed end {self.confirmed}",
                offset=offset,
                rule="never below the confirmed end",
            )

        self.commit_pool()
        try:
            # The next start finishes a cut that a crash interrupted: a half-finished cut looks like damage.
            self.meta.update({TRUNCATING: offset})
            self._lower_marks(offset)
            self.segments.truncate_to(offset)
            fail_point("log.cut_after_zero")
            self.chain_maker.note_epochs_from(offset, self.end)
            self.chain_maker.epoch_starts.truncate(offset)
            self.chain.truncate_to(offset)
            # After a crash the units of the cut bytes must not be there: other bytes replace those bytes.
            self.chain.sync()
            self.meta.update({TRUNCATING: None})

            self.end = offset
            if self.pool.active is not None:
                self.pool.active.reset(offset)
            self.complete_chain()
            self.epoch = self.last_epoch
        except SyncFailed as error:
            self.health.poison(f"a cut at {offset} did not finish: {error}")
            raise
        except (OSError, RayMQError) as error:
            # The disk may be full, for example. The next start cuts here again. Until then nothing may be appended and
            # acknowledged.
            self.health.poisoned = f"a cut at {offset} did not finish: {error}"
            raise

    def complete_chain(self, starts: RecordStarts | None = None) -> None:
        """Make units for log bytes that have none: `ChainMaker.complete`."""
        self.chain_maker.complete(self.start, self.end, starts)

    def finish_recovery(self, found: Scan) -> None:
        """Note this boot, whose marks are valid from here on. A recovery that fails earlier can be repeated."""
        meta, parts = self.meta, self._parts
        left_pool = self.pool.may_exist(meta.get("pool"))
        pool_name = self.pool.open(self.end)
        boot = {"format": 1, "clean": False, "pool": pool_name}
        ended = dict.fromkeys((TRUNCATING, QUEUES_DOUBTFUL, ADOPTING))
        # The flush mode is that of the run before: it decides what the loss of power may have taken.
        was_synced = meta.get("clean") or meta.get("flush") == "sync"
        kept = self.same_boot or parts.is_new or was_synced
        # In one update with the boot id: a start that ends early must not hide the loss from the next one.
        lost = {} if kept else {POWER_LOST: True}
        meta.update({**boot, **ended, **lost, "flush": self.config.flush, **parts.identity})
        if left_pool and pool_name is None:
            self.pool.remove()
        self.recovered = found

    def close(self, *, clean: bool) -> None:
        """Sync, write the checkpoint, release the lock. `clean`: derived files are complete, remove `abort`."""
        if self._closed:
            return

        self._closed = True
        try:
            if self.health.poisoned is None and self.recovered is not None:
                self.commit_pool()
                self.sync()
                self.chain.sync()
                if self.pool.active is not None:
                    self.meta.update({"pool": None})
                    self.pool.remove()
                if clean and self.confirmed >= self.end:
                    self.meta.update({"clean": True})
                    self._parts.abort.remove()
        finally:
            self._parts.close()

    def abandon(self) -> None:
        """Release every file as a crash would, without a sync or a note. `abort` stays."""
        self._closed = True
        self._parts.close()
