"""Checks, encodes, numbers and appends puts, the last two under the put lock.

Source: CommitLog#asyncPutMessage, #asyncPutMessages, RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import (
    Bug,
    DeliveryUnknown,
    NotServing,
    RayMQError,
    Rejected,
    Unavailable,
    require,
)
from raymq.store.base.running_flags import BLOCKS_PUTS, FENCED, RunningFlags
from raymq.store.base.status import PutStatus
from raymq.store.log.commit_log import CommitLog
from raymq.store.queues.consume_queues import ConsumeQueues
from raymq.store.queues.reput_service import ReputService
from raymq.store.records import record
from raymq.store.records.key_check import check_keys
from raymq.store.records.producer_stamp import Stamp
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.state.producer_table import UNKNOWN_OFFSET
from raymq.store.state.shard_state import ShardState
from raymq.store.state.topics import check_target

from .duplicates import DuplicateSearch
from .put_errors import check_record_size
from .put_hooks import PutHook, TopicGuard, after_batch, before_batch
from .put_lock import PutLock
from .service_records import ServiceRecords
from .small_unit import CheckedPut, EncodedRows, SmallUnit
from .snapshot_writer import SnapshotWriter
from .stats import StoreStats

logger = logging.getLogger("raymq.store")


class PutPath:
    """Checks and appends puts. Callers: any thread; the put lock orders them."""

    def __init__(
        self,
        log: CommitLog,
        state: ShardState,
        *,
        queues: ConsumeQueues,
        reput: ReputService,
        put_lock: PutLock,
        flags: RunningFlags,
        stats: StoreStats,
        hooks: list[PutHook],
        guards: dict[str, TopicGuard],
        records: ServiceRecords,
        snapshots: SnapshotWriter,
    ) -> None:
        """Args: `hooks`, `guards`: those of `MessageStore`, which may add some later."""
        self._log = log
        self._config = log.config
        self._clock = log.clock
        self._state = state
        self._queues = queues
        self._reput = reput
        self._lock = put_lock
        self._flags = flags
        self._stats = stats
        self._hooks = hooks
        self._guards = guards
        self._records = records
        self._snapshots = snapshots
        self._record_bytes_max = log.config.record_bytes_max

        self.closed = False
        #: another replica writes the log. Set without the lock, it stops every append that comes after
        self.follows = False

    def put(self, request: PutRequest) -> AppendedRows:
        """Check and append one batch of one queue."""
        return self.append(self.check(request))

    def check(self, request: PutRequest) -> CheckedPut:
        """The part of a put that needs no lock: check the whole batch and encode it.

        Raises: Rejected, Unavailable, StorageFull; nothing was stored. If Rejected names a row, no earlier try of the
        batch was stored either, so that its producer may send the other rows under its sequences.
        """
        try:
            if self.closed or self.follows or self._flags.bits or self._lock.begin_ms:
                self.check_serving()
            return self._check(before_batch(self._hooks, request))
        except RayMQError as error:
            self._stats.note_failed()
            after_batch(self._hooks, request, None)
            if "row" in error.fields and self._is_stored(request):
                # Other limits applied at that time.
                del error.fields["row"]
            raise

    def _is_stored(self, request: PutRequest) -> bool:
        """Whether the first row of a batch is stored, by an earlier try."""
        producer_id = request.producer_id
        if producer_id is None:
            return False
        queue = self._state.producers.get((producer_id, request.topic, request.queue_id))
        return queue is not None and queue.next_sequence > request.first_sequence

    def check_serving(self) -> None:
        """Refuse a put if the store takes none now.

        Raises: Unavailable, SERVICE_NOT_AVAILABLE: the store is closed, another replica writes its log, or a running
        flag forbids puts. Unavailable, OS_PAGE_CACHE_BUSY: an append is taking too long. StorageFull: the flag is that
        of a full disk.
        Source: HookUtils#checkBeforePutMessage. A busy page cache refuses puts so that they do not pile up.
        """
        self.check_open()
        busy_ms = self._config.os_page_cache_busy_timeout_ms
        if self._lock.begin_ms and self._lock.busy(busy_ms):
            raise Unavailable(
                f"an append is under way for {self._lock.held_ms()} ms, the limit is {busy_ms} "
                "(os_page_cache_busy_timeout_ms): the disk does not keep up. Nothing was stored; retry later",
                field="disk",
                limit=busy_ms,
                status=PutStatus.OS_PAGE_CACHE_BUSY.value,
            )

    def check_open(self) -> None:
        if self.closed:
            raise Unavailable(
                "the store is closed", field="store", status=PutStatus.SERVICE_NOT_AVAILABLE.value
            )
        self.check_leads()
        if self._flags.bits & BLOCKS_PUTS:
            self._flags.check_writable()

    def check_leads(self) -> None:
        """Refuse an append unless this replica leads. Raises: Unavailable.

        Callers: each append, with the put lock: `check` may have come before the end of the epoch.
        """
        if self._flags.bits & FENCED:
            self._flags.check_writable()
        self.check_writes_log()

    def check_writes_log(self) -> None:
        """Refuse an append while another replica writes the log. Raises: Unavailable."""
        if self.follows:
            raise NotServing(
                "the store takes no puts at present (another replica writes its log)",
                field="flags",
                status=PutStatus.SERVICE_NOT_AVAILABLE.value,
            )

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
        encoded = record.encode_batch(
            request.topic,
            request.queue_id,
            request.batch,
            stamp=stamp,
            store_host=self._log.store_host,
            born_host=request.born_host,
            small=small,
            crcs=request.body_crcs,
        )

        limit = self._record_bytes_max if guard is None else guard.record_bytes_max
        check_record_size(self._config, *encoded.largest, limit=limit)
        wait_ok = record.wait_store_ok(small or request.batch)
        # The offsets of duplicates are searched here, because no other put waits for it.
        return CheckedPut(request, encoded, self._originals(request), wait_ok)

    def has_guard(self, topic: str) -> bool:
        """Whether a topic of the store itself takes rows that its guard has checked."""
        return topic in self._guards

    def note_outcome(self, checked: CheckedPut, appended: AppendedRows | None) -> None:
        """Report what has become of a checked batch that another part of the store appends; None: nothing."""
        if appended is None:
            self._stats.note_failed()
        after_batch(self._hooks, checked.request, appended)

    def append(self, checked: CheckedPut) -> AppendedRows:
        """Append a checked batch. The ack is the caller's: nothing is synced at return.

        Raises: Rejected for a gap in the sequences, Fenced, StorageFull, Unavailable, OSError; nothing was stored.
        DeliveryUnknown when the first rows are stored and the next ones could not be: `append` names the stored ones.
        Source: CommitLog#asyncPutMessages; the order of the steps is RocketMQ's.
        """
        lock = self._lock
        began_s, waited_s = lock.begin_wait(), 0.0
        try:
            with lock.thread_lock:
                waited_s = lock.waited_s(began_s)
                lock.begin_ms = self._clock.monotonic_ms()
                try:
                    appended = self._append_unstored(checked)
                except (RayMQError, OSError):
                    self._stats.note_failed()
                    after_batch(self._hooks, checked.request, None)
                    raise
                finally:
                    lock.begin_ms = 0
        finally:
            lock.note_wait(waited_s, checked.encoded.count)
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
        began_s, waited_s = lock.begin_wait(), 0.0
        try:
            with lock.thread_lock:
                waited_s = lock.waited_s(began_s)
                lock.begin_ms = self._clock.monotonic_ms()
                try:
                    results = self._append_each(puts)
                finally:
                    lock.begin_ms = 0
        finally:
            lock.note_wait(waited_s, sum(put.encoded.count for put in puts) if waited_s else 0)

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
        unit: SmallUnit | None = None
        for number, checked in enumerate(puts):
            if unit is not None and not unit.takes(checked):
                self._append_small_unit(unit, results)
                unit = None

            end = self._log.end
            try:
                if unit is None or not unit.staged:
                    unit = self._begin_small_unit()
                results.append(self._add_small(unit, number, checked))
            except (RayMQError, OSError) as error:
                results.append(error)
            except Exception as error:
                if self._log.end != end:
                    raise
                # Nothing of this batch is stored, and the other batches must not suffer for it.
                logger.exception("put")
                results.append(Bug(f"put: {error!r}"))
        if unit is not None:
            self._append_small_unit(unit, results)
        return results

    def _begin_small_unit(self) -> SmallUnit:
        """An empty unit at the end of the log. Raises: as `append`."""
        self.check_leads()
        self._snapshots.begin_segment()
        return SmallUnit(
            self._log.end,
            bytes_max=min(self._log.room(), self._config.append_unit_bytes),
            store_time_ms=self._records.next_store_time_ms(),
        )

    def _add_small(self, unit: SmallUnit, number: int, checked: CheckedPut) -> AppendedRows:
        """Add a batch to a unit that takes it. A batch that cannot be in one is appended at once.

        Returns: the answer. It holds once `_append_small_unit` has appended the unit.
        Raises: as `append`.
        """
        request, encoded = checked.request, checked.encoded
        if not unit.has_room(encoded):
            return self._append_unstored(checked)

        stored_rows, answer = self._admit(request, encoded.count)
        if answer is not None:
            return answer

        queue_key = (request.topic, request.queue_id)
        offset = unit.next_offsets.get(queue_key)
        if offset is None:
            offset = self._state.next_offsets.get(queue_key, 0)
        data = encoded.records(
            stored_rows,
            encoded.count,
            queue_offset=offset,
            physical_offset=unit.end,
            store_time_ms=unit.store_time_ms,
        )
        return unit.add(number, checked, stored_rows, offset, data)

    def _append_small_unit(
        self, unit: SmallUnit, results: list[AppendedRows | RayMQError | OSError]
    ) -> None:
        """Append the unit. If that fails, its batches get the error."""
        if not unit.staged:
            return
        try:
            self._log.append(b"".join(unit.parts), self._log.epoch)
        except (RayMQError, OSError) as error:
            for staged in unit.staged:
                results[staged.number] = error
            return

        held_ms = self._clock.monotonic_ms() - self._lock.begin_ms
        for staged in unit.staged:
            request, encoded = staged.checked.request, staged.checked.encoded
            stored_rows, count = staged.stored_rows, encoded.count
            self._records.note_rows(encoded, request, stored_rows, count, staged.appended)
            self._stats.note_put(
                request.topic, count - stored_rows, encoded.bytes_from(stored_rows), held_ms
            )

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
        self.check_leads()
        request, encoded = checked.request, checked.encoded
        count = encoded.count
        stored_rows, appended = self._admit(request, count)
        if appended is not None:
            return appended

        appended = self._append_in_units(encoded, request, stored_rows)
        held_ms = self._clock.monotonic_ms() - self._lock.begin_ms
        self._stats.note_put(
            request.topic, count - stored_rows, encoded.bytes_from(stored_rows), held_ms
        )
        last_offset = appended.first_offset + count - stored_rows - 1
        return appended._replace(count=count, duplicates=stored_rows, last_offset=last_offset)

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
            may_skip=request.may_skip,
        )

        stored_rows = admission.duplicates
        if stored_rows:
            self._state.raise_epoch(request.producer_id, request.epoch)
        if stored_rows < count:
            return stored_rows, None
        return stored_rows, AppendedRows(
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
        dispatched = self._reput.dispatched
        queue = self._queues.find(request.topic, request.queue_id)
        search = DuplicateSearch(self._log, request.topic, request.queue_id, request.producer_id)
        first_offset = search.find(first, entry, queue, dispatched)
        return first_offset, search.find(last, entry, queue, dispatched)

    def _append_in_units(
        self, encoded: EncodedRows, request: PutRequest, stored_rows: int
    ) -> AppendedRows:
        """Append rows from `stored_rows` on, cut into append units."""
        log = self._log
        self._snapshots.begin_segment()
        store_time_ms = self._records.next_store_time_ms()
        one_unit = min(log.room(), self._config.append_unit_bytes)
        if isinstance(encoded, record.EncodedSmallBatch) and encoded.size <= one_unit:
            return self._append_unit(encoded, request, stored_rows, encoded.count, store_time_ms)

        ends = np.cumsum(encoded.sizes)
        log.ensure_room(int(ends[-1]) - (int(ends[stored_rows - 1]) if stored_rows else 0))
        row, count = stored_rows, len(encoded.sizes)
        first: AppendedRows | None = None
        try:
            while row < count:
                stop = self._unit_stop(ends, row)
                if stop == row:
                    log.seal(log.epoch)
                    self._snapshots.begin_segment()
                    # The snapshot has a stamp of its own, and stamps never go back.
                    store_time_ms = self._records.next_store_time_ms()
                    continue
                appended = self._append_unit(encoded, request, row, stop, store_time_ms)
                first = first or appended
                row = stop
        except (OSError, RayMQError) as error:
            if first is None:
                raise
            stored = first._replace(count=row - stored_rows, end_offset=log.end)
            raise DeliveryUnknown(
                f"rows {stored_rows} to {row - 1} of {count} are stored, the others are not: {error}; a retry with the "
                "same sequence is safe",
                status=PutStatus.UNKNOWN_ERROR.value,
                append=stored._asdict(),
            ) from error

        require(
            first is not None, "a batch has a row that is new", stored_rows=stored_rows, count=count
        )
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
        self, encoded: EncodedRows, request: PutRequest, row: int, stop: int, store_time_ms: int
    ) -> AppendedRows:
        """Append rows [row, stop), which fit the current file."""
        log = self._log
        # Looked up for each unit: the snapshot of a new segment takes offsets of the internal queue.
        offset = self._state.next_offsets.get((request.topic, request.queue_id), 0)
        data = encoded.records(
            row, stop, queue_offset=offset, physical_offset=log.end, store_time_ms=store_time_ms
        )
        start = log.append(data, log.epoch)
        appended = AppendedRows(
            first_offset=offset,
            count=stop - row,
            duplicates=0,
            store_time_ms=store_time_ms,
            physical_offset=start,
            end_offset=log.end,
        )
        self._records.note_rows(encoded, request, row, stop, appended)
        return appended
