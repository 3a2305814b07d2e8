"""Indexes records below the confirmed end: recent ones from memory, the rest from the log.

Source: CommitLogDispatcherBuildIndex, RocketMQ 5.3.3. There a failure stops all writes. Here the index is a cache that
may lag and catches up later: puts and consume queues never wait for it.
"""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int32s, Int64s, UInt32s
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, StorageFull
from raymq.store.log.commit_log import CommitLog
from raymq.store.records import record
from raymq.store.records.keys import Keyed, KeyedUnit, keyed_column, keys_of

from .index_keys import hash_keys, key_hash, topic_hash
from .index_service import IndexService

logger = logging.getLogger(__name__)

#: records of the log that are searched at a time: about 2 ms
SLICE_RECORDS = 2048
#: keyed records that are indexed at a time
BATCH_RECORDS = 8192
#: bytes of their properties
BATCH_BYTES = 4 << 20
#: keyed records that are indexed one by one
FEW_RECORDS = 2
RETRY_MS = 1000

_COLUMNS = ("topic", "store_time_ms", "sys_flag", "properties")


class IndexBuilder:
    """Puts records into the index. Callers: the thread that dispatches."""

    def __init__(self, log: CommitLog, service: IndexService) -> None:
        self._log = log
        self._service = service
        self._clock = log.clock
        self._units: list[KeyedUnit] = []
        self._records = 0
        self._bytes = 0
        #: everything below this is indexed or in `_units`
        self._added_end = service.indexed
        self._retry_at_ms = 0
        #: the failure that makes the index lag; None without one
        self._last_error: OSError | StorageFull | Corrupt | None = None

    def behind(self, dispatched: int) -> bool:
        """Whether records below `dispatched` can be indexed at once."""
        return self._service.indexed < dispatched and self._may_try()

    def _may_try(self) -> bool:
        return self._last_error is None or self._clock.monotonic_ms() >= self._retry_at_ms

    def add(self, start: int, end: int, unit: KeyedUnit | None) -> None:
        """Keep records [start, end), just dispatched, to index them together. Args: `unit`: None if they have no
        keys."""
        if start != self._added_end:
            # The index lags: these records are read from the log later.
            return
        self._added_end = end
        if unit is not None:
            self._units.append(unit)
            self._records += len(unit.positions)
            self._bytes += len(unit.keyed.data)

    def add_from_log(self, start: int, end: int) -> None:
        """Index records [start, end), which were just dispatched from the log, unless the index lags already.

        The blank record at the end of a file is such a record. Without this call the index would lag after each file,
        and would read all later records from the log until dispatch is idle.
        """
        if start == self._added_end:
            self.run(end)

    def run(self, upto: int) -> None:
        """Index the added records. If the index lags, index a slice of the log below `upto`."""
        if not self._may_try():
            return

        try:
            if self._added_end > self._service.indexed:
                self._index_added()
            if self._service.indexed < upto:
                self._from_log(upto)
        except OffsetOutOfRange:
            # The records were deleted after the log's start was read: the next call begins later.
            pass
        except (OSError, StorageFull, Corrupt) as error:
            self._forget_units()
            self._retry_at_ms = self._clock.monotonic_ms() + RETRY_MS
            if self._last_error is None:
                logger.warning("the index falls behind: %s", error)
            self._last_error = error
        else:
            self._last_error = None

        self._added_end = self._service.indexed

    def check_again(self, start: int, stop: int) -> None:
        """Index all records from `start` on again if entries of the mended records [start, stop) are missing.

        Entries are in the order of the log, so that none can be put between others.
        """
        stop = min(stop, self._service.indexed)
        try:
            keys, at = 0, start
            while at < stop:
                view, base, walk = self._log.reads.walk(
                    at,
                    stop,
                    check_crc=False,
                    check_position=False,
                    limit=SLICE_RECORDS,
                    mends=False,
                )
                batch = record.decode(view, walk.positions - base, walk.sizes, columns=_COLUMNS)
                found = _hashes_of(batch, walk.positions)
                keys += 0 if found is None else len(found[0])
                following = self._log.reads.next_walk_start(at, walk)
                if following == at:
                    break
                at = following

            if self._service.entries_between(start, stop) < keys:
                self._forget_units()
                self._service.forget_from(start)
                self._added_end = self._service.indexed
        except (OffsetOutOfRange, Corrupt) as error:
            logger.warning("mended records are not indexed: %s", error)

    @property
    def full(self) -> bool:
        """Whether enough records wait to be indexed together."""
        return self._records >= BATCH_RECORDS or self._bytes >= BATCH_BYTES

    def due(self, dispatched: int) -> bool:
        """Whether to index now: enough records wait, or some below `dispatched` are in the log only."""
        return self.full or self._added_end < dispatched

    def _forget_units(self) -> None:
        self._units = []
        self._records = self._bytes = 0

    def _index_added(self) -> None:
        units, records = self._units, self._records
        self._forget_units()
        if not units:
            self._service.indexed = self._added_end
            return

        if records <= FEW_RECORDS:
            self._index_few(units)
            return

        counts = [len(unit.positions) for unit in units]
        topics: UInt32s | int = topic_hash(units[0].topic)
        if any(unit.topic != units[0].topic for unit in units):
            hashes = np.array([topic_hash(unit.topic) for unit in units], dtype=np.uint32)
            topics = np.repeat(hashes, counts)
        times = np.array([unit.store_time_ms for unit in units], dtype=np.int64)

        data = [unit.keyed.data for unit in units]
        begins = np.cumsum([0, *map(len, data)])[:-1]
        ends = [unit.keyed.offsets[1:] + begin for unit, begin in zip(units, begins, strict=True)]
        keyed = Keyed(b"".join(data), np.concatenate(([0], *ends)))

        positions = np.concatenate([unit.positions for unit in units])
        self._index(topics, keyed, positions, np.repeat(times, counts), self._added_end)

    def _index_few(self, units: list[KeyedUnit]) -> None:
        """Index a few records one by one, which costs a tenth of the arrays."""
        hashes: list[int] = []
        positions: list[int] = []
        times: list[int] = []

        for unit in units:
            for row, position in enumerate(unit.positions.tolist()):
                for key in keys_of(unit.keyed.rows(row, row + 1).data):
                    hashes.append(key_hash(unit.topic, key))
                    positions.append(position)
                    times.append(unit.store_time_ms)

        self._service.append(
            np.array(hashes, dtype=np.int32),
            np.array(positions, dtype=np.int64),
            np.array(times, dtype=np.int64),
            upto=self._added_end,
        )

    def _index(
        self, topic_hashes: UInt32s | int, keyed: Keyed, positions: Int64s, times: Int64s, upto: int
    ) -> None:
        found = hash_keys(topic_hashes, keyed)
        rows = found.rows
        self._service.append(found.values, positions.take(rows), times.take(rows), upto=upto)

    def _from_log(self, upto: int) -> None:
        # Deleted records need no index.
        at = max(self._service.indexed, self._log.start)
        view, base, walk = self._log.reads.walk(
            at, upto, check_crc=False, check_position=False, limit=SLICE_RECORDS
        )
        end = self._log.reads.next_walk_start(at, walk)
        if end == at and walk.reason is not record.WalkStop.STOPPED:
            end = self._log.reads.next_record_after(at, upto)
            self._log.reads.note_damage(self._log.reads.damage(at, walk.reason.value))
        if len(walk.positions):
            batch = record.decode(view, walk.positions - base, walk.sizes, columns=_COLUMNS)
            if self._index_batch(batch, walk.positions, end):
                return
        self._service.indexed = max(at, end)

    def _index_batch(self, batch: pa.RecordBatch, positions: Int64s, end: int) -> bool:
        found = _hashes_of(batch, positions)
        if found is None:
            return False
        self._service.append(*found, upto=end)
        return True


def _hashes_of(batch: pa.RecordBatch, positions: Int64s) -> tuple[Int32s, Int64s, Int64s] | None:
    """Hash, physical offset and store time of each key of some records; None without any."""
    kinds = batch.column("sys_flag").to_numpy() & fmt.SYS_TRANSACTION_MASK
    if (kinds == fmt.SYS_ROLLBACK).any():
        kept = kinds != fmt.SYS_ROLLBACK
        batch, positions = batch.filter(kept), positions[kept]
    keyed = keyed_column(batch.column("properties"))
    if keyed is None:
        return None

    topics = batch.column("topic").dictionary_encode()
    table = np.array([topic_hash(name) for name in topics.dictionary.to_pylist()], np.uint32)
    topic_hashes = table[topics.indices.to_numpy()]
    times_ms = batch.column("store_time_ms").to_numpy()
    rows, values = hash_keys(topic_hashes, keyed)
    return values, positions.take(rows), times_ms.take(rows)
