"""Checks, encodes, numbers and appends puts, the last two under the put lock.

Source: CommitLog#asyncPutMessage, #asyncPutMessages, RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raymq.store.base.arrays import Int64s
from raymq.store.base.clock import StoreTimeClock
from raymq.store.base.errors import Bug, DeliveryUnknown, RayMQError, Rejected, Unavailable, require
from raymq.store.base.failpoints import fail_point
from raymq.store.base.running_flags import BLOCKS_PUTS
from raymq.store.base.status import PutStatus
from raymq.store.queues.reput_service import UndispatchedUnit
from raymq.store.records import record
from raymq.store.records.key_check import check_keys
from raymq.store.records.keys import keyed_rows
from raymq.store.records.producer_stamp import Stamp
from raymq.store.records.properties import TAGS
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.rows import tags_code_of
from raymq.store.state import shard_state as state
from raymq.store.state.producer_table import UNKNOWN_OFFSET
from raymq.store.state.topics import check_target

from .duplicates import DuplicateSearch
from .inner_message import (
    GroupRange,
    InnerMessage,
    PreparedInner,
    PreparedProgress,
    ServiceProgress,
)
from .put_hooks import after_batch, before_batch
from .small_unit import CheckedPut, Prepared, SmallUnit

if TYPE_CHECKING:
    from raymq.store.engine.message_store import MessageStore

logger = logging.getLogger("raymq.store")

#: at most one in this many bytes of the log belongs to a snapshot
SNAPSHOT_SHARE = 64


class PutPath:
    """Checks and appends puts. Callers: any thread; the put lock orders them."""

    def __init__(self, store: MessageStore) -> None:
        log = store.log
        self._log = log
        self._config = log.config
        self._clock = log.clock
        #: store times of records
        self.store_times = StoreTimeClock(log.clock)
        self._state = store.state
        self._queues = store.consume_queues
        self._dispatch = store.reput
        self._lock = store.put_lock
        self._flags = store.flags
        self._stats = store.stats
        self._hooks = store.hooks
        self._guards = store.topic_guards
        self._busy_ms = log.config.os_page_cache_busy_timeout_ms
        self._record_bytes_max = log.config.record_bytes_max

        self.epoch = 0
        self.closed = False
        #: start of the newest segment that needs no snapshot any more
        self.snapshot_segment = -1
        #: the end of the log from which on the next snapshot is due
        self._snapshot_due = 0
        #: the newest group of messages, see `put_inner`
        self.group = GroupRange(0, 0)

    def put(self, request: PutRequest) -> AppendedRows:
        """Check and append one batch of one queue."""
        return self.append(self.check(request))

    def check(self, request: PutRequest) -> CheckedPut:
        """The part of a put that needs no lock: check the whole batch and encode it.

        Raises: Rejected, Unavailable, StorageFull; nothing was stored.
        """
        try:
            if self.closed or self._flags.bits or self._lock.begin_ms:
                self.check_serving()
            return self._check(before_batch(self._hooks, request))
        except RayMQError:
            self._stats.note_failed()
            after_batch(self._hooks, request, None)
            raise

    def check_serving(self) -> None:
        """Refuse a put if the store takes none now.

        Raises: Unavailable, SERVICE_NOT_AVAILABLE: the store is closed or a running flag forbids puts. Unavailable,
        OS_PAGE_CACHE_BUSY: an append is taking too long. StorageFull: the flag is that of a full disk.
        Source: HookUtils#checkBeforePutMessage. A busy page cache refuses puts so that they do not pile up.
        """
        self._check_open()
        if self._lock.begin_ms and self._lock.busy(self._busy_ms):
            raise Unavailable(
                f"an append is under way for {self._lock.held_ms()} ms, the limit is {self._busy_ms} "
                "(os_page_cache_busy_timeout_ms): the disk does not keep up. Nothing was stored; retry later",
                field="disk",
                limit=self._busy_ms,
                status=PutStatus.OS_PAGE_CACHE_BUSY.value,
            )

    def _check_open(self) -> None:
        if self.closed:
            raise Unavailable(
                "the store is closed", field="store", status=PutStatus.SERVICE_NOT_AVAILABLE.value
            )
        if self._flags.bits & BLOCKS_PUTS:
            self._flags.check_writable()

    def _check(self, request: PutRequest) -> CheckedPut:
        guard = self._guards.get(request.topic)
        if guard is None:
            check_target(request.topic, request.queue_id, self._state.topics)

        small = record.check_put(
            request.topic, request.batch, max_message_bytes=self._config.max_message_bytes
        )

        if not request.batch.num_rows:
            raise Rejected("the batch has no rows", field="batch", limit="at least 1 row")
        if guard is not None:
            guard.check_batch(request, self._state.topics)
        elif self._state.topics[request.topic].compacted:
            check_keys(request.topic, request.batch)

        stamp = None
        if request.producer_id is not None:
            stamp = Stamp(request.producer_id, request.epoch, request.first_sequence)
        prepared = record.prepare(
            request.topic,
            request.queue_id,
            request.batch,
            stamp=stamp,
            store_host=self._config.store_host,
            small=small,
        )

        limit = self._record_bytes_max if guard is None else guard.record_bytes_max
        self._check_size(*prepared.largest, limit)
        wait_ok = record.wait_store_ok(small or request.batch)
        # The offsets of duplicates are searched here, because no other put waits for it.
        return CheckedPut(request, prepared, self._originals(request), wait_ok)

    def append(self, checked: CheckedPut) -> AppendedRows:
        """Append a checked batch. The ack is the caller's: nothing is synced at return.

        Raises: Rejected for a gap in the sequences, Fenced, StorageFull, Unavailable, OSError; nothing was stored.
        DeliveryUnknown when the first rows are stored and the next ones could not be: `append` names the stored ones.
        Source: CommitLog#asyncPutMessages; the order of the steps is RocketMQ's.
        """
        lock = self._lock
        with lock.thread_lock:
            lock.begin_ms = self._clock.monotonic_ms()
            try:
                appended = self._append_unstored(checked)
            except (RayMQError, OSError):
                self._stats.note_failed()
                after_batch(self._hooks, checked.request, None)
                raise
            finally:
                lock.begin_ms = 0
        appended = self._with_original_offsets(checked, appended)
        after_batch(self._hooks, checked.request, appended)
        return appended

    def append_many(self, puts: Sequence[CheckedPut]) -> list[AppendedRows | RayMQError | OSError]:
        """`append` of several batches, in their order. Small ones that follow each other become one append unit.

        Returns: the answer of each, or the error that `append` would raise; the others are not affected.
        """
        if len(puts) == 1:
            try:
                return [self.append(puts[0])]
            except (RayMQError, OSError) as error:
                return [error]

        lock = self._lock
        with lock.thread_lock:
            lock.begin_ms = self._clock.monotonic_ms()
            try:
                results = self._append_each(puts)
            finally:
                lock.begin_ms = 0

        for number, checked in enumerate(puts):
            result = results[number]
            if isinstance(result, AppendedRows):
                results[number] = result = self._with_original_offsets(checked, result)
                after_batch(self._hooks, checked.request, result)
            else:
                self._stats.note_failed()
                after_batch(self._hooks, checked.request, None)
        return results

    def _append_each(self, puts: Sequence[CheckedPut]) -> list[AppendedRows | RayMQError | OSError]:
        """The answer or the error of each batch. Needs the put lock."""
        results: list[AppendedRows | RayMQError | OSError] = []
        unit = SmallUnit()
        for number, checked in enumerate(puts):
            if not unit.takes(checked):
                self._append_small_unit(unit, results)
                unit = SmallUnit()
            end = self._log.end
            try:
                results.append(self._add_small(unit, number, checked))
            except (RayMQError, OSError) as error:
                results.append(error)
            except Exception as error:
                if self._log.end != end:
                    raise
                # Nothing of this batch is stored, and the other batches must not suffer for it.
                logger.exception("put")
                results.append(Bug(f"put: {error!r}"))
        self._append_small_unit(unit, results)
        return results

    def _add_small(self, unit: SmallUnit, number: int, checked: CheckedPut) -> AppendedRows:
        """Add a batch to a unit that takes it. A batch that cannot be in one is appended at once.

        Returns: the answer. It holds once `_append_small_unit` has appended the unit.
        Raises: as `append`.
        """
        request, prepared = checked.request, checked.prepared
        if not unit.staged:
            self._begin_segment()
            unit.begin(
                self._log.end,
                bytes_max=min(self._log.room(), self._config.append_unit_bytes),
                store_time_ms=self._next_store_time_ms(),
            )
        if not unit.has_room(prepared):
            return self._append_unstored(checked)

        skip, stored = self._admit(request, prepared.count)
        if stored is not None:
            return stored

        queue_key = (request.topic, request.queue_id)
        offset = unit.next_offsets.get(queue_key)
        if offset is None:
            offset = self._state.next_offsets.get(queue_key, 0)
        data = prepared.encode(
            skip,
            prepared.count,
            queue_offset=offset,
            physical_offset=unit.end,
            store_time_ms=unit.store_time_ms,
        )
        return unit.add(number, checked, skip, offset, data)

    def _append_small_unit(
        self, unit: SmallUnit, results: list[AppendedRows | RayMQError | OSError]
    ) -> None:
        """Append the unit. If that fails, its batches get the error."""
        if not unit.staged:
            return
        try:
            self._log.append(b"".join(unit.parts), self.epoch)
        except (RayMQError, OSError) as error:
            for staged in unit.staged:
                results[staged.number] = error
            return

        held_ms = self._clock.monotonic_ms() - self._lock.begin_ms
        for staged in unit.staged:
            request, prepared = staged.checked.request, staged.checked.prepared
            skip, count = staged.skip, prepared.count
            self._note_appended(prepared, request, skip, count, staged.appended)
            self._stats.note_put(request.topic, count - skip, prepared.bytes_from(skip), held_ms)

    def _with_original_offsets(self, checked: CheckedPut, appended: AppendedRows) -> AppendedRows:
        """The answer, with the offsets of rows that were stored before."""
        if not checked.wait_store_ok:
            appended = appended._replace(wait_store_ok=False)
        if not appended.duplicates:
            return appended

        first, last = checked.originals
        if first == UNKNOWN_OFFSET or (last == UNKNOWN_OFFSET and appended.last_offset < 0):
            # The row became a duplicate after the check, or the log has deleted it.
            first, last = self._originals(checked.request)
        return appended._replace(
            first_offset=first,
            last_offset=last if appended.last_offset < 0 else appended.last_offset,
        )

    def _append_unstored(self, checked: CheckedPut) -> AppendedRows:
        """Append the rows that are not stored yet."""
        request, prepared = checked.request, checked.prepared
        count = prepared.count
        skip, appended = self._admit(request, count)
        if appended is not None:
            return appended

        appended = self._append_in_units(prepared, request, skip)
        held_ms = self._clock.monotonic_ms() - self._lock.begin_ms
        self._stats.note_put(request.topic, count - skip, prepared.bytes_from(skip), held_ms)
        last_offset = appended.first_offset + count - skip - 1
        return appended._replace(count=count, duplicates=skip, last_offset=last_offset)

    def _admit(self, request: PutRequest, count: int) -> tuple[int, AppendedRows | None]:
        """How many leading rows are stored already; the answer if all are. Raises: as `ShardState.admit`."""
        if request.producer_id is None:
            return 0, None

        admission = self._state.admit(
            request.producer_id,
            request.epoch,
            request.topic,
            request.queue_id,
            request.first_sequence,
            count,
        )

        skip = admission.duplicates
        if skip:
            self._state.raise_epoch(request.producer_id, request.epoch)
        if skip < count:
            return skip, None
        return skip, AppendedRows(
            first_offset=admission.first_offset,
            count=count,
            duplicates=count,
            store_time_ms=self._state.store_time_ms,
            physical_offset=-1,
            end_offset=admission.end_offset,
        )

    def _originals(self, request: PutRequest) -> tuple[int, int]:
        """The queue offsets of the batch's first and last rows; UNKNOWN_OFFSET for a row that is new or deleted.

        Callers: any thread, without the put lock.
        """
        if request.producer_id is None:
            return UNKNOWN_OFFSET, UNKNOWN_OFFSET
        entry = self._state.producers.get((request.producer_id, request.topic, request.queue_id))
        first = request.first_sequence
        if entry is None or first >= entry.next_sequence:
            return UNKNOWN_OFFSET, UNKNOWN_OFFSET
        last = first + request.batch.num_rows - 1
        dispatched = self._dispatch.dispatched
        queue = self._queues.find(request.topic, request.queue_id)
        search = DuplicateSearch(self._log, request.topic, request.queue_id, request.producer_id)
        first_offset = search.find(first, entry, queue, dispatched)
        return first_offset, search.find(last, entry, queue, dispatched)

    def _check_size(self, row: int, nbytes: int, limit: int) -> None:
        if nbytes > limit:
            pool = self._config.transient_pool_bytes if self._config.transient_pool else 0
            through = f" and a transient pool of {pool} bytes" if pool else ""
            raise Rejected(
                f"row {row} makes a record of {nbytes} bytes; with commit log files of "
                f"{self._config.segment_size_bytes} bytes{through} a record may have {limit}",
                field="record",
                limit=limit,
                row=row,
            )

    def _append_in_units(self, prepared: Prepared, request: PutRequest, skip: int) -> AppendedRows:
        """Append rows from `skip` on, cut into append units."""
        log = self._log
        self._begin_segment()
        store_time_ms = self.store_times.now_ms(self._state.store_time_ms, self._lock.begin_ms)
        one_unit = min(log.room(), self._config.append_unit_bytes)
        if isinstance(prepared, record.PreparedSmallBatch) and prepared.size <= one_unit:
            return self._append_unit(prepared, request, skip, prepared.count, store_time_ms)

        ends = np.cumsum(prepared.sizes)
        log.ensure_room(int(ends[-1]) - (int(ends[skip - 1]) if skip else 0))
        row, count = skip, len(prepared.sizes)
        first: AppendedRows | None = None
        try:
            while row < count:
                stop = self._unit_stop(ends, row)
                if stop == row:
                    log.seal(self.epoch)
                    self._begin_segment()
                    continue
                appended = self._append_unit(prepared, request, row, stop, store_time_ms)
                first = first or appended
                row = stop
        except (OSError, RayMQError) as error:
            if first is None:
                raise
            stored = first._replace(count=row - skip, end_offset=log.end)
            raise DeliveryUnknown(
                f"rows {skip} to {row - 1} of {count} are stored, the others are not: {error}; a retry with the "
                "same sequence is safe",
                status=PutStatus.UNKNOWN_ERROR.value,
                append=stored._asdict(),
            ) from error

        require(first is not None, "a batch has a row that is new", skip=skip, count=count)
        return first._replace(count=count, end_offset=log.end)  # type: ignore[union-attr]

    def _unit_stop(self, ends: Int64s, row: int) -> int:
        """The row after the last one of an append unit that begins with `row`; `row`: the file has no room for it."""
        room = self._log.room()
        done = int(ends[row - 1]) if row else 0
        limit = min(room, self._config.append_unit_bytes)
        stop = int(np.searchsorted(ends, done + limit, side="right")) if limit > 0 else row
        if stop > row or int(ends[row]) - done > room:
            return max(stop, row)
        # A record larger than a unit goes alone.
        return row + 1

    def _append_unit(
        self, prepared: Prepared, request: PutRequest, row: int, stop: int, store_time_ms: int
    ) -> AppendedRows:
        """Append rows [row, stop), which fit the current file."""
        log = self._log
        # Looked up for each unit: the snapshot of a new segment takes offsets of the internal queue.
        offset = self._state.next_offsets.get((request.topic, request.queue_id), 0)
        data = prepared.encode(
            row, stop, queue_offset=offset, physical_offset=log.end, store_time_ms=store_time_ms
        )
        start = log.append(data, self.epoch)
        appended = AppendedRows(
            first_offset=offset,
            count=stop - row,
            duplicates=0,
            store_time_ms=store_time_ms,
            physical_offset=start,
            end_offset=log.end,
        )
        self._note_appended(prepared, request, row, stop, appended)
        return appended

    def _note_appended(
        self, prepared: Prepared, request: PutRequest, row: int, stop: int, appended: AppendedRows
    ) -> None:
        """Account for rows [row, stop), which are in the log now."""
        offset, start, end = appended.first_offset, appended.physical_offset, appended.end_offset
        store_time_ms = appended.store_time_ms
        sizes = prepared.sizes[row:stop]
        if len(sizes) > 1:
            physical_starts = start + np.cumsum(sizes) - sizes
        else:
            physical_starts = np.array([start])
        self._dispatch.remember(
            UndispatchedUnit(
                start=start,
                end=end,
                topic=request.topic,
                queue_id=request.queue_id,
                first_offset=offset,
                positions=physical_starts,
                sizes=sizes,
                tags_codes=prepared.tags_codes[row:stop],
                store_time_ms=store_time_ms,
                keyed=None if prepared.keyed is None else prepared.keyed.rows(row, stop),
            )
        )

        self._state.apply_rows(
            request.topic,
            request.queue_id,
            offset,
            stop - row,
            end,
            store_time_ms,
            producer_id=request.producer_id,
            epoch=request.epoch,
            first_sequence=request.first_sequence + row,
        )

    def begin_log(self) -> None:
        """Begin an empty log with its first file and snapshot."""
        with self._lock:
            self._begin_segment()

    def _begin_segment(self) -> None:
        """Write a snapshot of the state at the start of each segment, before anything else.

        After a snapshot that a crash or a full disk broke off, a whole one follows. If the whole snapshot does not fit,
        the segment ends. A state too large for a file is left out, so that recovery begins earlier. A large segment
        gets further snapshots, so that recovery reads little however full the segment is.
        """
        log, size = self._log, self._config.segment_size_bytes
        # Every put comes here, so the start of the segment is computed without a call of segment_start_of.
        while self.snapshot_segment != log.end - log.end % size:
            parts, needed = self._prepare_snapshot()
            if needed <= self._config.snapshot_bytes_max:
                log.ensure_room(needed)
                if log.room() < needed:
                    log.seal(self.epoch)
                    continue
                self._append_snapshot(parts, needed)
            else:
                logger.warning(
                    "commit log file %d begins without a snapshot: the state of the shard takes %d bytes, the limit is "
                    "%d (3/8 of segment_size_bytes). Until a snapshot fits again, no newer file is deleted and "
                    "recovery reads from an older one. Use fewer queues, producers or groups, or a store "
                    "with larger files",
                    log.end - log.end % size,
                    needed,
                    self._config.snapshot_bytes_max,
                )
            self.snapshot_segment = log.end - log.end % size

        if log.end >= self._snapshot_due:
            parts, needed = self._prepare_snapshot()
            # Else the next segment, which is near, begins with one.
            if needed <= min(self._config.snapshot_bytes_max, log.room()):
                self._append_snapshot(parts, needed)
            else:
                self._snapshot_due = log.end + self._config.snapshot_interval_bytes

    def note_snapshot(self, start: int) -> None:
        """Recovery found the newest snapshot at `start`."""
        self._snapshot_due = start + self._config.snapshot_interval_bytes

    def _prepare_snapshot(self) -> tuple[list[PreparedInner], int]:
        """The state as records to append, and their bytes."""
        part_bytes_max = min(1 << 20, self._config.segment_size_bytes // 8)
        parts = [
            self._prepare_state_record(state.SNAPSHOT, body)
            for body in self._state.snapshot(part_bytes_max)
        ]
        return parts, sum(part.size for part in parts)

    def _append_snapshot(self, parts: list[PreparedInner], nbytes: int) -> None:
        start = self._log.end
        store_time_ms = self._next_store_time_ms()
        for part in parts:
            self._append_service_records([part], store_time_ms)
        self._log.marks.note_snapshot(start)
        # A large state is written less often: snapshots stay a small part of the log.
        interval = max(self._config.snapshot_interval_bytes, SNAPSHOT_SHARE * nbytes)
        self._snapshot_due = self._log.end + interval
        fail_point("log.after_snapshot")

    def _next_store_time_ms(self) -> int:
        """The store time of the next records."""
        return self.store_times.now_ms(self._state.store_time_ms, self._lock.begin_ms)

    def _prepare_state_record(self, kind: str, body: bytes) -> PreparedInner:
        """One record of the internal topic, ready to be appended."""
        now_ms = self._clock.now_ms()
        message = InnerMessage(
            state.INTERNAL_TOPIC, state.INTERNAL_QUEUE, body, {TAGS: kind}, born_time_ms=now_ms
        )
        prepared = PreparedInner(message, store_host=self._config.store_host)
        self._check_size(0, prepared.size, self._record_bytes_max)
        return prepared

    def put_state_record(self, kind: str, body: bytes) -> AppendedRows:
        """Append one record of the internal topic and apply it to the state."""
        with self._lock:
            return self._append_state_record(kind, body)

    def init_producer(self, producer_id: int) -> tuple[int, AppendedRows]:
        """The next epoch of a producer id, and its record.

        The lock is held throughout: the limit may drop entries that puts extend, and no two calls may get the same
        epoch.
        Raises: Rejected if the shard already remembers as many producers as it may. Nothing was stored.
        """
        with self._lock:
            epoch = self._state.next_epoch(producer_id)
            return epoch, self._append_state_record(
                state.PRODUCER, state.producer_body(producer_id, epoch)
            )

    def _append_state_record(self, kind: str, body: bytes) -> AppendedRows:
        prepared = self._prepare_state_record(kind, body)
        self._make_room(prepared.size)
        (appended,) = self._append_service_records([prepared], self._next_store_time_ms())
        self._state.apply_state_record(kind, body)
        return appended

    def put_inner(
        self, messages: Sequence[InnerMessage], *, progress: ServiceProgress | None = None
    ) -> list[AppendedRows]:
        """Append messages of the store's own services, in order. Returns: one `AppendedRows` per message.

        With `progress`, the messages and the progress are stored together or not at all, across crashes too. Several
        messages need a progress. They should stay below `config.group_bytes_max`, because other puts wait for them.

        Durable: nothing; the flush service syncs.
        Raises: Rejected when the messages are too large (`config.record_bytes_max`); as `append`. Nothing was stored.
        """
        require(progress is not None or len(messages) == 1, "a group has a progress")
        return self._append_inner(messages, progress, self._config.record_bytes_max)

    def put_inner_unit(
        self, messages: Sequence[InnerMessage], *, record_bytes_max: int
    ) -> list[AppendedRows]:
        """Append messages that follow each other in one file. Returns: one `AppendedRows` per message.

        A crash may leave the first ones only. Durable, Raises: as `put_inner`; also Rejected for a record of more
        than `record_bytes_max` bytes.
        """
        config = self._config
        limit = config.record_bytes_max if len(messages) == 1 else config.group_bytes_max
        return self._append_inner(messages, None, limit, record_bytes_max)

    def _append_inner(
        self,
        messages: Sequence[InnerMessage],
        progress: ServiceProgress | None,
        limit: int,
        record_bytes_max: int | None = None,
    ) -> list[AppendedRows]:
        """Append messages of the store's services as one unit. Returns: one `AppendedRows` per message.

        Args: `limit`: most bytes of all records. Raises: Rejected beyond a limit; as `append`. Nothing was stored then.
        """
        self._check_open()
        host = self._config.store_host
        prepared = [PreparedInner(message, store_host=host) for message in messages]
        head = None
        if progress is not None:
            head = PreparedProgress(progress, now_ms=self._clock.now_ms(), store_host=host)

        largest = max((each.size for each in prepared), default=0)
        if record_bytes_max is not None and largest > record_bytes_max:
            raise Rejected(
                f"a record has {largest} bytes, the limit is {record_bytes_max}: less body or fewer properties",
                field="record",
                limit=record_bytes_max,
            )

        total = sum(each.size for each in prepared) + (0 if head is None else head.size)
        if total > limit:
            raise Rejected(
                f"{len(messages)} messages make {total} bytes of records; those appended together may have {limit}",
                field="record",
                limit=limit,
            )

        with self._lock:
            return self._append_inner_unit(head, prepared, total)

    def _append_inner_unit(
        self, head: PreparedProgress | None, prepared: list[PreparedInner], total: int
    ) -> list[AppendedRows]:
        """Append records of `total` bytes, after the progress that they belong to. Needs the put lock."""
        self._make_room(total)
        records = list(prepared)
        body = b""
        if head is not None:
            first, body = head.ending_at(self._log.end + total)
            records.insert(0, first)

        appended = self._append_service_records(records, self._next_store_time_ms())
        if head is not None:
            self.group = GroupRange(appended[0].physical_offset, self._log.end)
            self._state.apply_state_record(state.PROGRESS, body)
            del appended[0]

        held_ms = self._clock.monotonic_ms() - self._lock.begin_ms
        for each in prepared:
            self._stats.note_put(each.topic, 1, each.size, held_ms)
        return appended

    def _make_room(self, nbytes: int) -> None:
        """Let records of so many bytes follow each other in one file."""
        self._begin_segment()
        self._log.ensure_room(nbytes)
        if self._log.room() < nbytes:
            self._log.seal(self.epoch)
            self._begin_segment()

    def _append_service_records(
        self, records: list[PreparedInner], store_time_ms: int
    ) -> list[AppendedRows]:
        """Append records as one unit. The current file has room for them."""
        log, next_offsets = self._log, self._state.next_offsets
        at = log.end
        end = at + sum(each.size for each in records)

        appended, parts = [], []
        offsets: dict[tuple[str, int], int] = {}
        for each in records:
            key = (each.topic, each.queue_id)
            offset = offsets.get(key, next_offsets.get(key, 0))
            parts.append(
                each.encode(queue_offset=offset, physical_offset=at, store_time_ms=store_time_ms)
            )
            if each.queued:
                offsets[key] = offset + 1
            appended.append(
                AppendedRows(
                    first_offset=offset,
                    count=1,
                    duplicates=0,
                    store_time_ms=store_time_ms,
                    physical_offset=at,
                    end_offset=end,
                    last_offset=offset,
                )
            )
            at += each.size

        log.append(b"".join(parts), self.epoch)
        self._note_service_records(records, appended)
        return appended

    def _note_service_records(
        self, stored: list[PreparedInner], appended: list[AppendedRows]
    ) -> None:
        """Account for messages that are in the log now: neighbours of one queue together."""
        keys = [(each.topic, each.queue_id, each.queued) for each in stored]
        first = 0
        for row in range(1, len(keys) + 1):
            if row < len(keys) and keys[row] == keys[first]:
                continue
            if stored[first].queued:
                self._note_run(stored[first:row], appended[first:row])
            first = row

    def _note_run(self, stored: list[PreparedInner], appended: list[AppendedRows]) -> None:
        first, last = appended[0], appended[-1]
        topic, queue_id = stored[0].topic, stored[0].queue_id
        levels = self._config.delay_levels_ms
        codes = [
            tags_code_of(topic, each.properties, first.store_time_ms, levels) for each in stored
        ]

        self._dispatch.remember(
            UndispatchedUnit(
                start=first.physical_offset,
                end=last.physical_offset + stored[-1].size,
                topic=topic,
                queue_id=queue_id,
                first_offset=first.first_offset,
                positions=np.array([each.physical_offset for each in appended], dtype=np.int64),
                sizes=np.array([each.size for each in stored], dtype=np.int64),
                tags_codes=np.array(codes, dtype=np.int64),
                store_time_ms=first.store_time_ms,
                keyed=keyed_rows([each.properties for each in stored]),
            )
        )

        self._state.apply_rows(
            topic, queue_id, first.first_offset, len(stored), first.end_offset, first.store_time_ms
        )
