"""The compacted queues of one store: filled from its consume queues, compacted, and read.

Source: CompactionStore, CompactionService, CompactionLog, RocketMQ 5.3.3. RocketMQ copies each message while it
dispatches. RayMQ copies from the consume queue, a slice at a time, before a read and at intervals.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, RayMQError, StorageFull, Unavailable
from raymq.store.base.files import SyncFailed
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.log_reads import DAMAGE_MAX
from raymq.store.log.record_reads import Records
from raymq.store.queues.consume_queue import BLANK_SIZE, sub_directories
from raymq.store.queues.consume_queues import ConsumeQueues
from raymq.store.queues.message_filter import RECORDS_AT_ONCE, MessageFilter
from raymq.store.queues.reader import out_of_range
from raymq.store.records import record
from raymq.store.records.keys import key_column
from raymq.store.records.requests import FetchSlice
from raymq.store.state.shard_state import ShardState
from raymq.store.state.topics import QueueKey

from . import swap
from .compactor import write_compacted
from .sparse_log import CompactedSlice, SparseEnd, SparseLog
from .synced_ends import read_synced_ends, write_synced_ends
from .units import COMPACTED_UNIT_DTYPE, COMPACTING, DIRECTORY, LOG, directories, file_sizes

logger = logging.getLogger("raymq.store")

#: messages, and bytes of them, copied in one go
_COPIED_MAX = 4096
_COPIED_BYTES = 8 << 20
#: pause between two steps of a service's thread
_STEP_S = 5.0


class CompactionStore:
    """The compacted queues of one store: copied from its log, compacted and read.

    It changes no record of the commit log. Callers: any thread reads; one advances and compacts.
    """

    def __init__(self, log: CommitLog, queues: ConsumeQueues, state: ShardState) -> None:
        self._commit_log = log
        self._queues = queues
        self._state = state
        self._files = log.files
        self._logs: dict[QueueKey, SparseLog] = {}
        #: over `_logs`, and over the copying of each queue
        self._lock = threading.RLock()
        #: queue offset of the last compacted message of each queue
        self._compacted_offsets: dict[QueueKey, int] = {}
        #: how far each queue is noted as synced; None: the note has to be written again
        self._synced_ends: dict[QueueKey, SparseEnd] | None = {}
        self._closed = False
        #: why nothing is copied, synced or compacted before the next start; None: all of it works
        self._failure: str | None = None
        #: queue offset after the last record that was read, copied or not
        self._passed: dict[QueueKey, int] = {}
        #: file and offset -> damage of compacted queues that reads and compactions found
        self._damage: dict[tuple[str, int], Corrupt] = {}

    # --- start and stop ---------------------------------------------------------------------------

    def load(self) -> None:
        """Finish an interrupted swap, open every queue, and cut the remains of a crash.

        The commit log still has the cut records. It may delete them only after `sync_and_find_needed_from`.
        Callers: after the store's recovery.
        Raises: Corrupt if files are missing or have other sizes, or if the note of synced ends is needed and damaged.
        OSError.
        """
        root = self._commit_log.root
        if self._commit_log.crashed:
            self._sync_directories()

        swap.finish_interrupted(root, files=self._files)
        self._compacted_offsets = self._read_compacted_offsets()

        self._synced_ends = self._read_synced_ends()
        noted = self._synced_ends or {}
        base = root / DIRECTORY / LOG
        for topic in sub_directories(base, self._files):
            for name in sub_directories(base / topic, self._files):
                if name.isdigit():
                    self._load_queue(topic, int(name), noted.get((topic, int(name))))

        self._note_synced_ends({key: sparse.end for key, sparse in self._logs.items()})

    def _sync_directories(self) -> None:
        """Sync the names that a killed process made, before the commit log may delete the records. Raises: OSError."""
        waiting = [self._commit_log.root / DIRECTORY]
        while waiting:
            directory = waiting.pop()
            if self._files.is_dir(directory):
                self._files.sync_dir(directory)
                waiting += [directory / name for name in self._files.list(directory)]

    def _load_queue(self, topic: str, queue_id: int, synced: SparseEnd | None) -> None:
        """Open a compacted queue and cut what a crash may have left unsynced. Args: `synced`: its noted end."""
        swap.drop_unfinished(self._commit_log.root, topic, queue_id, files=self._files)
        sparse = self._new_log(topic, queue_id)
        sparse.load()

        end = sparse.end
        if self._commit_log.crashed:
            # A queue without a note was never synced here, or is one of RocketMQ's.
            end = synced or (SparseEnd(0, 0) if self._commit_log.is_own_store else end)

        self._logs[topic, queue_id] = sparse
        queue = self._queues.find(topic, queue_id)
        following = max(
            self._state.next_offsets.get((topic, queue_id), 0), queue.max_offset if queue else 0
        )
        # If the log lost the end of a queue, other messages will get these offsets. Records below the consume queue
        # were synced before the log deleted them. They cannot be copied again.
        deleted_below = queue.min_offset if queue else 0
        sparse.truncate(end, following or sparse.next_offset, keep_below=deleted_below)

        if following and self._compacted_offsets.get((topic, queue_id), -1) >= following:
            self._compacted_offsets[topic, queue_id] = following - 1

    def _read_compacted_offsets(self) -> dict[QueueKey, int]:
        named = swap.read_compacted_offsets(self._commit_log.root, files=self._files)
        found = {}
        for name, offset in named.items():
            topic, _, queue_id = name.rpartition("_")
            if queue_id.isdecimal():
                found[topic, int(queue_id)] = offset
        return found

    def _new_log(self, topic: str, queue_id: int) -> SparseLog:
        config = self._commit_log.config
        sizes = file_sizes(
            config.compaction_file_size_bytes, config.compaction_queue_file_size_bytes
        )
        paths = directories(self._commit_log.root, topic, queue_id)
        return SparseLog(*paths, *sizes, files=self._files)

    def close(self) -> None:
        """Sync the copied records and close every file. Raises: as `sync`."""
        try:
            if self._logs:
                self.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close every file, as a crash would."""
        with self._lock:
            self._closed = True
            for sparse in self._logs.values():
                with sparse.files_lock:
                    sparse.close()
            self._logs.clear()

    # --- failures ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _stopping_after(self, *errors: type[Exception]) -> Iterator[None]:
        """Stop copying, syncing and compacting at one of these errors. Callers: with the lock.

        No second sync proves anything. The next start goes back to what is noted as synced, and copies the rest again.
        It also finishes an exchange of files.
        """
        try:
            yield
        except errors as error:
            if self._failure is None:
                self._failure = (
                    "compacted queues are neither filled nor compacted until the next start, "
                    f"which copies again what was not synced: {error}"
                )
                logger.error("%s", self._failure)
            raise

    def _check_failure(self) -> None:
        """Callers: with the lock. Raises: Unavailable after a failed sync or exchange."""
        if self._failure is not None:
            raise Unavailable(self._failure, field="compaction")

    # --- filling ----------------------------------------------------------------------------------

    def owns(self, topic: str) -> bool:
        """Whether reads of a topic are served from here."""
        info = self._state.topics.get(topic)
        return info is not None and info.compacted

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The queue offset that is copied next."""
        sparse = self._logs.get((topic, queue_id))
        compacted = self._compacted_offsets.get((topic, queue_id), -1) + 1
        passed = self._passed.get((topic, queue_id), 0)
        return max(compacted, passed, 0 if sparse is None else sparse.next_offset)

    def advance(self, topic: str, queue_id: int) -> bool:
        """Copy a slice of records that the compacted queue lacks. Returns: whether there was any.

        Messages without KEYS, which RayMQ never stores, are left out, as RocketMQ leaves them out.
        Raises: OSError, StorageFull. After a failed sync Unavailable, if there are such records.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return False

        with self._lock:
            if self._closed:
                raise Unavailable("the store is closed", field="store")
            offset = max(self.next_offset(topic, queue_id), queue.min_offset)
            units = queue.read(offset, min(_COPIED_MAX, queue.max_offset - offset))
            if queue.max_offset <= offset or not len(units):
                return False

            self._check_failure()
            sparse = self._logs.get((topic, queue_id))
            if sparse is None:
                sparse = self._logs[topic, queue_id] = self._new_log(topic, queue_id)

            total = np.cumsum(np.where(units["size"] == BLANK_SIZE, 0, units["size"]))
            fits = max(1, int(np.searchsorted(total, _COPIED_BYTES, side="right")))
            with self._stopping_after(SyncFailed):
                self._copy(sparse, units[:fits], offset)
            # The next slice begins after this one, even if the last records of this one were not copied.
            self._passed[topic, queue_id] = offset + fits
            return True

    def _copy(self, sparse: SparseLog, units: Any, offset: int) -> None:
        """Copy the records with KEYS of a slice of units, the first of which has queue offset `offset`."""
        positions, sizes = units["position"].astype(np.int64), units["size"].astype(np.int64)
        # A blank unit is a gap: its message is missing.
        pointing = np.flatnonzero((sizes >= fmt.RECORD_MIN_BYTES) & (sizes != BLANK_SIZE))
        found, sound = self._commit_log.reads.undamaged_records(
            positions[pointing], sizes[pointing]
        )
        rows = pointing[sound]
        batch = record.decode(*found)
        has_key = key_column(batch.column("properties")).is_valid().to_numpy(zero_copy_only=False)

        copied: Any = np.zeros(len(units), dtype=COMPACTED_UNIT_DTYPE)
        copied["tags_code"] = units["tags_code"]
        copied["store_time_ms"][rows] = batch.column("store_time_ms").to_numpy()
        copied["offset"] = offset + np.arange(len(units))

        kept = np.ones(len(units), dtype=np.bool_)
        kept[rows] = has_key
        if len(rows) < len(units):
            # Damaged and missing records are copied, too: without them readers would take an older message of the same
            # key for the latest.
            found = self._read_with_damage(positions, sizes)
        copied["size"] = found.sizes

        if kept.any():
            with sparse.files_lock:
                sparse.append(found.data, found.starts[kept], copied[kept])

    def _read_with_damage(self, positions: Int64s, sizes: Int64s) -> Records:
        """The records of the commit log, damaged ones as they are. Zeros replace those that cannot be read."""
        parts = [
            self._read_one(position, size)
            for position, size in zip(positions.tolist(), sizes.tolist(), strict=True)
        ]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return Records(memoryview(b"".join(parts)), np.cumsum(lengths) - lengths, lengths)

    def _read_one(self, position: int, size: int) -> bytes:
        # A damaged unit may have a size that fits no file.
        if size <= _COPIED_BYTES:
            try:
                found = self._commit_log.reads.records(
                    np.array([position]), np.array([size]), check=False
                )
                return bytes(found.data)
            except Corrupt:
                pass
        return bytes(fmt.RECORD_MIN_BYTES)

    def queues(self) -> list[QueueKey]:
        """Topic and queue id of every compacted queue."""
        return sorted(self._logs)

    def advance_all(self) -> bool:
        """`advance` of every queue of every compaction topic, once. Returns: whether there was anything."""
        advanced = [self.advance(topic, queue_id) for topic, queue_id in self._compacted_queues()]
        return any(advanced)

    def _compacted_queues(self) -> list[QueueKey]:
        """The consume queues of compaction topics."""
        keys = self._queues.keys()
        return [(topic, queue_id) for topic, queue_id in keys if self.owns(topic)]

    def sync(self) -> None:
        """fdatasync the copied records, and note how far they go. Durable: at return.

        Raises: OSError, StorageFull. After a failed sync every later call raises Unavailable.
        """
        with self._lock, self._stopping_after(SyncFailed):
            self._check_failure()
            ends = {key: sparse.end for key, sparse in self._logs.items()}
            if ends == self._synced_ends:
                return
            for sparse in self._logs.values():
                with sparse.files_lock:
                    sparse.sync()
            self._note_synced_ends(ends)

    def _note_synced_ends(self, ends: dict[QueueKey, SparseEnd]) -> None:
        """Store how far the queues are synced, if that is new. Durable: at return."""
        if ends != self._synced_ends:
            write_synced_ends(self._commit_log.root, ends, files=self._files)
            self._synced_ends = ends

    def _read_synced_ends(self) -> dict[QueueKey, SparseEnd] | None:
        """The noted ends of all queues; None for a damaged note that is not needed. Raises: Corrupt, OSError."""
        try:
            return read_synced_ends(self._commit_log.root, files=self._files)
        except Corrupt:
            if self._commit_log.crashed:
                raise
            # An orderly stop has synced all queues.
            return None

    def sync_and_find_needed_from(self) -> int | None:
        """The physical offset from which on no record of the commit log may be deleted yet; None: any record may.

        Syncs the copied records. Callers: retention. Raises: as `sync`.
        """
        positions: list[int] = []
        # Under one lock: what a reader copies after the sync is not synced, so its records are still needed.
        with self._lock:
            self.sync()
            for key in self._compacted_queues():
                queue = self._queues.find(*key)
                if queue is not None:
                    units = queue.read(max(self.next_offset(*key), queue.min_offset), 1)
                    positions += units["position"].tolist()
        return min(positions, default=None)

    # --- compacting -------------------------------------------------------------------------------

    def compact(self, topic: str, queue_id: int, *, roll: bool = False) -> int | None:
        """Keep only the latest message of each key in a queue's sealed files. An empty body deletes its key.

        `roll` first copies the dispatched messages and ends the file that is being written, so that every dispatched
        message is compacted. Readers wait for the exchange only. Returns: the queue offset of the last compacted
        message; None when there is nothing new in sealed files.
        Raises: OSError, StorageFull, and Corrupt for a damaged message, with the old files in place. After a failed
        sync or exchange of files Unavailable.
        """
        while roll and self.advance(topic, queue_id):
            pass

        sparse = self._logs.get((topic, queue_id))
        if sparse is None:
            return None

        root, files = self._commit_log.root, self._files
        with self._lock, sparse.files_lock, self._stopping_after(SyncFailed):
            self._check_failure()
            if roll and sparse.pairs and sparse.pairs[-1].count:
                sparse.seal()
            # Sealed files are synced; after a crash nothing of them may count as unsynced.
            self.sync()
            pairs = [pair for pair in sparse.pairs if pair.sealed]

        last_offset = max((pair.offset_at(-1) for pair in pairs if pair.count), default=-1)
        if last_offset <= self._compacted_offsets.get((topic, queue_id), -1):
            return None

        swap.drop_unfinished(root, topic, queue_id, files=files)
        with self._noting_damage():
            names = write_compacted(pairs, sparse)
        for directory in sparse.directories:
            if names:
                files.sync_dir(directory / COMPACTING)

        old = [pair.log.path.name for pair in pairs]
        plan = swap.Swap(topic, queue_id, old, names, last_offset)
        with self._lock, sparse.files_lock, self._stopping_after(SyncFailed):
            if self._closed:
                raise Unavailable("the store was closed", field="store")
            self._check_failure()
            swap.commit(root, plan, files=files)
            # Only a start may finish it later: another compaction would remove the new files.
            with self._stopping_after(OSError, RayMQError):
                swap.finish(root, plan, files=files)
                self._compacted_offsets = self._read_compacted_offsets()
                # Others were sealed meanwhile if a reader copied much: they stay.
                sparse.replace(pairs, names)
                # The next file may begin at a lower offset than the last one did: the noted end must not be above it.
                # Readers may have copied more since the last sync. So this queue is synced, and the notes of others
                # stay.
                sparse.sync()
                self._note_synced_ends({**(self._synced_ends or {}), (topic, queue_id): sparse.end})
        return last_offset

    # --- reading ----------------------------------------------------------------------------------

    def fetch(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_bytes: int,
        max_records: int,
        wanted: MessageFilter | None = None,
    ) -> FetchSlice:
        """Read a compacted queue from `offset`: the next messages that are left, with gaps in their offsets.

        Any offset from 0 to the queue's end may be asked for: superseded messages are skipped. Args: `wanted`: as of
        `QueueReader.fetch`.
        Raises: OffsetOutOfRange beyond the end.
        """
        queue = self._queues.find(topic, queue_id)
        high = 0 if queue is None else queue.max_offset
        if high < offset <= self._state.next_offsets.get((topic, queue_id), 0):
            high = offset
        if not 0 <= offset <= high:
            raise out_of_range(topic, queue_id, offset, 0, high)
        count = max_records if wanted is None else max(max_records, RECORDS_AT_ONCE)
        found = self.read(topic, queue_id, offset, max_bytes=max_bytes, max_records=count)
        if found is not None and wanted is not None:
            found = found.only(wanted, max_records)
        if found is None:
            following = max(offset, min(self.next_offset(topic, queue_id), high))
            empty = pa.array([], pa.binary())
            return FetchSlice(queue_id, offset, following, 0, high, empty, None)
        return FetchSlice(queue_id, offset, found.next_offset, 0, high, found.records, None)

    def read(
        self, topic: str, queue_id: int, offset: int, *, max_bytes: int, max_records: int
    ) -> CompactedSlice | None:
        """The next messages that are left from `offset` on; None if none is left.

        Raises: Corrupt if the first of them is damaged. The damage is noted for status. OSError, StorageFull,
        Unavailable if none of them is copied and the next ones cannot be.
        """
        failure: Exception | None = None
        try:
            while self.advance(topic, queue_id) and self.next_offset(topic, queue_id) <= offset:
                pass
        except (OSError, StorageFull, Unavailable) as error:
            failure = error

        found = None
        sparse = self._logs.get((topic, queue_id))
        if sparse is not None:
            with self._noting_damage():
                found = sparse.read(offset, max_bytes, max_records)
        if found is None and failure is not None:
            raise failure
        return found

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """From the first message that is left to the queue's end."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return 0, 0
        sparse = self._logs.get((topic, queue_id))
        first = None if sparse is None else sparse.first_offset
        return queue.min_offset if first is None else first, queue.max_offset

    # --- damage -----------------------------------------------------------------------------------

    @property
    def damage(self) -> list[Corrupt]:
        """Damage of compacted queues that reads and compactions found since the start."""
        return list(self._damage.values())

    @contextlib.contextmanager
    def _noting_damage(self) -> Iterator[None]:
        """Remember damage for status. Each place is logged once."""
        try:
            yield
        except Corrupt as error:
            place = (str(error.fields.get("path")), int(error.fields.get("offset", -1)))
            if place not in self._damage and len(self._damage) < DAMAGE_MAX:
                self._damage[place] = error
                logger.error("%s", error)
            raise


class CompactionService:
    """Copies, syncs, and compacts at intervals. A host calls it again and again, or from a thread.

    Source: CompactionStore's schedule; compactionScheduleInternal 15 minutes.
    """

    def __init__(self, store: CompactionStore, *, interval_ms: int, now_ms: int) -> None:
        self._store = store
        self._interval_ms = interval_ms
        self._next_ms = now_ms + interval_ms
        self._wake = threading.Event()
        #: why the last step failed, for status; None after one that did not
        self.last_error: str | None = None

    def step(self, now_ms: int) -> bool:
        """Do some work: at most one slice per queue, or one compaction of all queues if that is due.

        Returns: whether there is more to do at once. Raises: OSError, StorageFull, Corrupt. The next call tries again.
        After a failed sync every call raises Unavailable.
        """
        if self._store.advance_all():
            return True

        self._store.sync()
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + self._interval_ms
            damage: Corrupt | None = None
            for topic, queue_id in self._store.queues():
                try:
                    self._store.compact(topic, queue_id)
                except Corrupt as error:
                    # The damaged queue stays as it is, and the others are compacted.
                    damage = error
            if damage is not None:
                raise damage

        return False

    def run(self, stopping: Callable[[], bool], clock: Clock) -> None:
        """Work until `stopping`: the body of a thread. After a failure it tries again."""
        while not stopping():
            try:
                more = self.step(clock.monotonic_ms())
                self.last_error = None
            except Exception as error:
                # Catch every error: if this thread ended, nothing would report that old files are no longer deleted.
                self.last_error, more = str(error), False
            if not more:
                self._wake.wait(_STEP_S)
                self._wake.clear()

    def wake(self) -> None:
        """Make the thread check `stopping` now."""
        self._wake.set()
