"""Dispatches records below the confirmed end into the consume queues and the index.

Source: DefaultMessageStore.ReputMessageService, RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np

from raymq.store.base import format as fmt
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC
from raymq.store.base.running_flags import BLOCKS_DISPATCH, WRITE_LOGICS_QUEUE_ERROR, RunningFlags
from raymq.store.log.commit_log import CommitLog
from raymq.store.records import record, rows
from raymq.store.records.keys import Keyed, KeyedUnit
from raymq.store.state.topics import QueueKey

from .consume_queue import ConsumeQueue, may_be_queue
from .consume_queues import ConsumeQueues
from .unit_places import OFFSET_MAX, OtherPlaces, placed

logger = logging.getLogger("raymq.store")

#: most appended units that are kept in memory for dispatch. If there are more, dispatch reads all of them from the log
PENDING_MAX = 2048
#: most of them that are dispatched together
UNITS_MAX = 64
#: how long dispatch waits at damage that another replica may mend
MEND_WAIT_MS = 10_000
#: longest time for which dispatch holds the interpreter
SLICE_MS = 2.0
#: most bytes of the log that a read walks to make one unit again
MADE_AGAIN_BYTES = 64 << 20
_DELAY_TOPICS = (SCHEDULE_TOPIC, TIMER_TOPIC)


class _Again(NamedTuple):
    """Records [start, stop) whose units are compared, and written again if they are others."""

    start: int
    stop: int
    #: where mended bytes begin, whose keys the index may lack; None: only units were lost
    mended_from: int | None


class UndispatchedUnit(NamedTuple):
    """Appended records, neighbours in the log and in one queue, that are not confirmed yet."""

    start: int
    end: int
    topic: str
    queue_id: int
    first_offset: int
    #: their units for the consume queue
    queue_units: bytes
    store_time_ms: int
    #: the records' properties, if one of them has a key
    keyed: Keyed | None


class Indexer(Protocol):
    """What gets the dispatched records for the index: `IndexBuilder`."""

    @property
    def full(self) -> bool:
        """Whether `run` should come now."""

    def add(self, start: int, end: int, unit: KeyedUnit | None) -> None:
        """Take the keyed records of a unit."""

    def add_from_log(self, start: int, end: int) -> None:
        """Take records that are in the log alone."""

    def due(self, dispatched: int) -> bool:
        """Whether enough has come for a `run`."""

    def behind(self, dispatched: int) -> bool:
        """Whether records below `dispatched` can be indexed at once."""

    def run(self, upto: int) -> None:
        """Index records below `upto`."""

    def check_again(self, start: int, stop: int) -> None:
        """Index all records from `start` on again if entries of mended ones are missing."""


class ReputService:
    """Moves the dispatched end of a store. Callers: one thread; `remember`: with the put lock.

    Source: ReputMessageService.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        *,
        put_lock: AbstractContextManager[None],
        flags: RunningFlags,
    ) -> None:
        self._log = log
        self._queues = queues
        self._clock = log.clock
        self._put_lock = put_lock
        self._flags = flags

        self._pending: deque[UndispatchedUnit] = deque()
        #: everything below this is in the consume queues
        self.dispatched = 0
        #: called with each run of records that is read from the log, before it is dispatched; a retry calls it again
        self.on_run: Callable[[memoryview, int, rows.RowRun], None] | None = None
        #: None: records are not indexed
        self.index: Indexer | None = None
        #: grows with each message that waits for a delay level or a timer
        self.delayed = 0
        #: queues that got units since `take_changed_queues` was called last
        self._changed_queues: set[QueueKey] = set()
        #: damaged ranges below the confirmed end that were skipped, [start, stop)
        self._skipped_ranges: list[tuple[int, int]] = []
        #: records that recovery found in other places than they name
        self.other_places: OtherPlaces = {}
        #: records whose units are written again, and the lock of those who do it at once
        self._again: deque[_Again] = deque()
        self._again_lock = threading.Lock()
        #: the last damage that was met, and when (ms)
        self._damage_met = (-1, 0)

    def remember(self, unit: UndispatchedUnit) -> None:
        """Remember records that were just appended, so that dispatch need not read them from the log."""
        if len(self._pending) >= PENDING_MAX:
            # Dispatch lags, because a replica is away. It will read these units from the log.
            self._pending.clear()
        self._pending.append(unit)

    def forget_appended(self) -> None:
        """Dispatch reads everything from the log. Callers: with the put lock."""
        self._pending.clear()

    def take_changed_queues(self) -> set[QueueKey]:
        """The queues that got units since the last call."""
        changed, self._changed_queues = self._changed_queues, set()
        return changed

    def concerned(self, queues: Collection[QueueKey], confirmed: int) -> set[QueueKey] | None:
        """Those of `queues` that have records to dispatch up to `confirmed`; None: the records are in the log only."""
        found: set[QueueKey] = set()
        with self._put_lock:
            if not self._pending or self._pending[0].start > self.dispatched:
                return None if self.dispatched < confirmed else found
            for unit in self._pending:
                if unit.end > confirmed or len(found) == len(queues):
                    break
                key = (unit.topic, unit.queue_id)
                if unit.start >= self.dispatched and key in queues:
                    found.add(key)
        return found

    def run(self, confirmed: int) -> int:
        """Dispatch up to `confirmed`, for at most about 2 ms. Returns: the dispatched end.

        A call without records to dispatch indexes earlier records. If the index lags, every call does.
        Raises: StorageFull, OSError. Call again. After an OSError puts are refused until a dispatch succeeds (in
        RocketMQ until a restart, but only after 30 tries).
        """
        failed = self._flags.bits & WRITE_LOGICS_QUEUE_ERROR
        if self._blocked:
            return self.dispatched

        before = self.dispatched
        try:
            if self.units_behind:
                self._write_slice_again()
            self._run(confirmed)
        except OSError:
            self._flags.set(WRITE_LOGICS_QUEUE_ERROR)
            raise

        if failed and self.dispatched > before:
            self._flags.clear(WRITE_LOGICS_QUEUE_ERROR)

        # Indexing many records costs little more than a few, so records wait as long as dispatch finds more.
        index, idle = self.index, self.dispatched == before
        if index is not None and (idle or index.due(self.dispatched)):
            index.run(self.dispatched)
        return self.dispatched

    def _run(self, confirmed: int) -> None:
        deadline_s = self._clock.monotonic() + SLICE_MS / 1000
        while self.dispatched < confirmed:
            units, remembered_from = self._next_units(confirmed)
            if units:
                self._append_remembered(units)
            elif remembered_from > self.dispatched:
                start = self.dispatched
                if not self._from_log(min(confirmed, remembered_from)):
                    break
                if self.index is not None:
                    self.index.add_from_log(start, self.dispatched)
            else:
                break

            if self._clock.monotonic() > deadline_s:
                break

    def _next_units(self, confirmed: int) -> tuple[list[UndispatchedUnit], int]:
        """The confirmed units that are remembered from the dispatched end on, and where remembered units begin."""
        units: list[UndispatchedUnit] = []
        end = self.dispatched
        with self._put_lock:
            while self._pending and self._pending[0].start < end:
                self._pending.popleft()
            for unit in self._pending:
                if unit.start != end or unit.end > confirmed or len(units) == UNITS_MAX:
                    break
                units.append(unit)
                end = unit.end
            return units, self._pending[0].start if self._pending else confirmed

    def _append_remembered(self, units: list[UndispatchedUnit]) -> None:
        """Dispatch neighbours in the log: one write for those of one queue that follow each other.

        Queues are written in the order of the log. A start that has no mark takes the last record that any queue knows
        for the dispatched end.
        """
        for key, group in groupby(units, lambda unit: (unit.topic, unit.queue_id)):
            run = list(group)
            self._append(key, run[0].first_offset, b"".join([unit.queue_units for unit in run]))
        self.dispatched = units[-1].end

        if self.index is not None:
            for unit in units:
                self._index(self.index, unit)

    def _append(self, key: QueueKey, first_offset: int, queue_units: bytes) -> None:
        """Append the units of neighbouring messages of one queue, and note that the queue changed."""
        queue = self._queues.get(*key)
        if self._skipped_ranges:
            position = fmt.QUEUE_UNIT.unpack_from(queue_units)[0]
            self._point_into_damage(queue, first_offset, position)
        queue.append(first_offset, queue_units)
        self._changed_queues.add(key)
        if key[0] in _DELAY_TOPICS:
            self.delayed += 1

    def _index(self, index: Indexer, unit: UndispatchedUnit) -> None:
        keyed = None
        if unit.keyed is not None:
            found = np.frombuffer(unit.queue_units, dtype=fmt.QUEUE_UNIT_DTYPE)
            positions = found["position"].astype(np.int64)
            keyed = KeyedUnit(unit.topic, positions, unit.store_time_ms, unit.keyed)
        index.add(unit.start, unit.end, keyed)
        if index.full:
            index.run(unit.end)

    @property
    def index_behind(self) -> bool:
        """Whether there are records to index now; False while a flag stops `run`."""
        if self.index is None or self._blocked:
            return False
        return self.index.behind(self.dispatched)

    @property
    def _blocked(self) -> bool:
        return bool(self._flags.bits & BLOCKS_DISPATCH & ~WRITE_LOGICS_QUEUE_ERROR)

    def _from_log(self, upto: int) -> bool:
        """Dispatch a slice that is read from the log. Returns: False without one."""
        at = self.dispatched
        view, base, walk = self._log.reads.walk(
            at,
            upto,
            check_crc=False,
            # Recovery checked these records. In a foreign store it does not check their physical offsets.
            check_position=False,
            limit=rows.DECODED_ROWS_MAX,
            # An election waits until dispatch stands still.
            mends=False,
        )

        for key, first_offset, units in self._units_of(view, base, walk, is_first=True):
            self._append(key, first_offset, units)

        self.dispatched = self._log.reads.next_walk_start(at, walk)
        if self.dispatched == at and walk.reason is not record.WalkStop.STOPPED:
            if walk.reason is record.WalkStop.SHORT and self._comes_later(at, upto):
                return False
            if self._may_be_mended(at):
                return False
            self._pass_over(at, upto, walk.reason.value)
        return True

    def _units_of(
        self, view: memoryview, base: int, walk: record.Walk, *, is_first: bool = False
    ) -> Iterator[tuple[QueueKey, int, bytes]]:
        """Queue, first offset and packed units of each run of a walk. Args: `is_first`: `on_run` is called."""
        levels_ms = self._log.config.delay_levels_ms
        runs = rows.runs(
            view, base, walk.positions, walk.sizes, columns=rows.RUN_COLUMNS, hashes_tags=True
        )
        if self.other_places:
            runs = placed(runs, self.other_places)
        for run in runs:
            # Another thread may end the following meanwhile.
            on_run = self.on_run if is_first else None
            if on_run is not None:
                on_run(view, base, run)
            if self._has_place(run):
                codes = rows.tags_codes(run.topic, run.batch, levels_ms, hashes=run.tag_hashes)
                units = fmt.pack_queue_units(run.positions, run.sizes, codes)
                yield (run.topic, run.queue_id), run.first_offset, units

    def _has_place(self, run: rows.RowRun) -> bool:
        """Whether a queue can have these records. Others are damaged, and passed over.

        Source: ConsumeQueue#putMessagePositionInfo, which gives a record that jumps the next offset.
        """
        fault = None
        if not may_be_queue(run.topic, run.queue_id) or not 0 <= run.first_offset < OFFSET_MAX:
            fault = "no queue has its topic, queue and offset"
        else:
            queue = self._queues.get(run.topic, run.queue_id)
            if queue.jumps_to(run.first_offset):
                fault = f"its queue offset {run.first_offset} is a file after {queue.max_offset}"
        if fault is not None:
            self._log.reads.note_damage(self._log.reads.damage(int(run.positions[0]), fault))
        return fault is None

    def _comes_later(self, at: int, upto: int) -> bool:
        """Whether the record that spans the confirmed end may be whole after its end is confirmed."""
        end = self._log.end
        return upto < end and at + int.from_bytes(self._log.reads.raw(at, at + 4), "big") <= end

    def _may_be_mended(self, at: int) -> bool:
        """Whether another replica may soon give the damaged bytes at an offset: one that is starting, for example."""
        if self._log.reads.mend is None:
            return False
        self._log.reads.mend_later(at)
        now_ms = self._clock.monotonic_ms()
        if self._damage_met[0] != at:
            self._damage_met = (at, now_ms)
        return now_ms - self._damage_met[1] < MEND_WAIT_MS

    def _pass_over(self, at: int, upto: int, fault: str) -> None:
        """Continue after damage below the confirmed end, so that the whole records after it can be read."""
        self._log.reads.note_damage(self._log.reads.damage(at, fault))
        self.dispatched = self._log.reads.next_record_after(at, upto)
        self._skipped_ranges.append((at, self.dispatched))

    # --- units that are written again -------------------------------------------------------------

    @property
    def units_behind(self) -> bool:
        """Whether units are to be written again; False while a flag stops `run`."""
        return bool(self._again or self._log.reads.mended) and not self._blocked

    def write_again(self, start: int, stop: int) -> None:
        """Let dispatch compare the units of the records [start, stop), and write those that are missing or others.

        Callers: any thread.
        """
        self._again.append(_Again(start, stop, None))

    def _write_slice_again(self) -> None:
        """Write the units of some records again: of damage that was mended, or those that a queue has lost.

        A start between the damage and its end does not know what was passed over. So all units of a mended range are
        compared.
        """
        mended = self._log.reads.mended
        while mended:
            start, stop = mended.popleft()
            self._again.append(_Again(start, stop, start))
        if not self._again:
            return

        again = self._again[0]
        at, stop = max(again.start, self._log.start), min(again.stop, self.dispatched)
        following = at
        if at < stop:
            view, base, walk = self._log.reads.walk(
                at, stop, check_crc=False, check_position=False, mends=False
            )
            for key, first_offset, units in self._units_of(view, base, walk):
                queue = self._queues.get(*key)
                if queue.replace(first_offset, units):
                    self._changed_queues.add(key)
                if first_offset <= queue.max_offset:
                    # No later message of this queue came yet.
                    self._append(key, first_offset, units)
            following = self._log.reads.next_walk_start(at, walk)
            if following == at:
                following = self._log.reads.next_record_after(at, stop)

        if at < following < stop:
            self._again[0] = again._replace(start=following)
            return
        self._end_again(again)

    def _end_again(self, again: _Again) -> None:
        self._again.popleft()
        if again.mended_from is None:
            return
        start, stop = again.mended_from, again.stop
        self._skipped_ranges = [
            each for each in self._skipped_ranges if each[1] <= start or each[0] >= stop
        ]
        if self.index is not None:
            self.index.check_again(max(start, self._log.start), stop)

    def make_again(self, topic: str, queue_id: int, offset: int) -> bool:
        """Write the unit of a message again, from the records between its neighbours. Returns: whether it was another.

        Callers: any thread, after a read at that offset has failed.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return False
        before, after = queue.around(offset)
        at = self._log.start if before is None else before
        stop = self.dispatched if after is None else after
        if not self._log.start <= at < stop <= self.dispatched or stop - at > MADE_AGAIN_BYTES:
            return False

        changed = False
        with self._again_lock:
            while at < stop:
                view, base, walk = self._log.reads.walk(
                    at, stop, check_crc=False, check_position=False, mends=False
                )
                for key, first_offset, units in self._units_of(view, base, walk):
                    if key == (topic, queue_id):
                        changed |= queue.replace(first_offset, units)
                following = self._log.reads.next_walk_start(at, walk)
                if following == at:
                    break
                at = following

        if changed:
            logger.error(
                "a damaged unit of %s was made again at offset %d", queue.directory, offset
            )
        return changed

    def _point_into_damage(self, queue: ConsumeQueue, upto: int, position: int) -> None:
        """Append units for a queue's damaged messages below offset `upto`. The units point into the damage.

        Reads of these offsets therefore raise Corrupt, whereas a gap would be skipped silently.

        Args: `position`: of the next message.
        """
        for start, stop in self._skipped_ranges:
            missing = upto - queue.max_offset
            count = min(missing, (stop - start) // fmt.RECORD_MIN_BYTES)
            if count > 0 and 0 <= queue.max_physical_offset <= start and stop <= position:
                positions = start + fmt.RECORD_MIN_BYTES * np.arange(count, dtype=np.int64)
                units = fmt.pack_queue_units(positions, fmt.RECORD_MIN_BYTES, 0)
                queue.append(queue.max_offset, units)
