"""Timers: messages with an individual delivery time, each delivered exactly once, even across crashes.

They wait in the timer topic. Each bundle of deliveries is appended together with how far they came (`TimerProgress`).
So the log alone says which messages were delivered. Wheel and timer log only find due messages, in order of (second
due, offset in the timer topic). Source: TimerMessageStore, RocketMQ 5.3.3. It delivers again after a crash, drops after
three failed puts, and loses messages that are due in a stop of more than seven days.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from raymq.store.base.arrays import Int32s, Int64s
from raymq.store.base.failpoints import fail_point
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.config.delay_levels import TIMERS_SERVICE
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.properties import decode, encode

from . import timer_rule
from .delayed_record import SLICE_ROWS, DelayRun, WaitingMessage, by_queue, fitting, waiting_rows
from .timer_cache import TimerCache, TimerCheckpoint
from .timer_cancel import CancelledTimer, UnloadedCancellation, delete_key, find_timer
from .timer_import import imported_progress, pending_rolls
from .timer_topic import TimerRows, TimerTopic

ENQUEUE_PROPERTY, DEQUEUE_PROPERTY = "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS"

#: slices of SLICE_ROWS records that one call loads at most
SLICES_LOADED_MAX = 16
#: how often the files are completed on disk, while anything moves (timerFlushIntervalMs)
SYNC_INTERVAL_MS = 1000
#: how often to check while the log has not reached its former end, or the end that the timers need
WAIT_MS = 100

_TIMER_PROPERTIES = re.compile(
    rb"(?:(?<=\x02)|\A)TIMER_(?:ENQUEUE_MS|DEQUEUE_MS|ROLL_TIMES)\x01[^\x02]*\x02?"
)


class DueRows(NamedTuple):
    """Records of the timer topic whose second is over."""

    positions: Int64s
    sizes: Int64s
    magic: Int32s | Int64s
    enqueue_ms: Int64s

    def select(self, kept: Any) -> DueRows:
        """Some of the records, by a mask, row numbers or a slice."""
        return DueRows(*(column[kept] for column in self))


@dataclass
class DueSecond:
    """A second whose timers are being delivered."""

    time_ms: int
    rows: DueRows
    #: keys of cancelled messages: real topic + "+" + unique key
    cancelled: frozenset[str]
    next_row: int = 0


class TimerMessageStore:
    """The timers of one shard. Callers: one thread; `waiting` and `first_waiting_offset`: any."""

    def __init__(self, store: ServiceHost) -> None:
        self._store = store
        self._log = store.log
        self._topic = TimerTopic(store.log, store.consume_queues)
        self._cache = TimerCache(store.log)

        self._progress = timer_rule.TimerProgress()
        self._ready = False
        self._second: DueSecond | None = None
        #: offset after the records that the log had at the first call: all of them are dispatched before a delivery,
        #: because cancellations may be among them
        self._first_end: int | None = None
        self._unloaded: list[UnloadedCancellation] = []
        #: the log must be synced up to here before the files may count as complete
        self._needed_end = 0
        self._dirty = False
        self._next_sync_ms = 0
        #: the next record of the topic is for a second that the wheel has no room for yet
        self._blocked = False
        #: messages that name no queue they could be delivered to, or that the log has deleted
        self.skipped = 0

    @property
    def active(self) -> bool:
        """Whether there ever was a timer here."""
        return self._topic.end > 0

    def waiting(self, time_ms: int) -> int:
        """How many timers are known to wait for a second."""
        return self._cache.wheel.waiting(time_ms)

    def first_waiting_offset(self) -> int:
        """Offset of the timer topic from which on records may still wait. Callers: any thread."""
        end = self._topic.end
        known = self._ready and self._progress.next_offset >= end
        first_ms = self._cache.wheel.first_ms()
        # `_ready` is read twice: while another thread loads the wheel, the wheel lacks records.
        if known and self._ready:
            # Every record was added: the wheel knows those that wait, however long ago the last delivery was.
            return end if first_ms is None else self._topic.first_that_may_wait(first_ms)
        progress = timer_rule.TimerProgress.of(self._store.state.progress.get(TIMERS_SERVICE, {}))
        return self._topic.first_that_may_wait(progress.second_ms) if progress.second_ms else 0

    def run(self, now_ms: int, *, limit: int) -> DelayRun:
        """Load new records of the topic and deliver due messages, at most about `limit`.

        Raises: StorageFull, Unavailable, OSError. The next call delivers the rest.
        """
        if not self.active:
            return DelayRun(0, None)
        try:
            if not self._ready and not self._prepare():
                return DelayRun(0, now_ms + WAIT_MS)
            return self._run(now_ms, limit)
        except BaseException:
            # The files may hold part of this step, so they are loaded again as after a crash.
            self._ready = False
            raise

    def _run(self, now_ms: int, limit: int) -> DelayRun:
        """`run` after the start. If the clock was set back, deliveries continue from the new time."""
        this_second_ms = now_ms - now_ms % timer_rule.PRECISION_MS
        if this_second_ms < self._progress.second_ms:
            self._append([], self._progress.clock_set_back(this_second_ms))
            self._second = None

        count = self._load_records(now_ms, limit)
        has_more = self._progress.next_offset < self._topic.end
        until_ms = self._held_from(this_second_ms)
        # All records are loaded before a second is delivered, so that confirmed cancellations take effect.
        if not has_more or (self._blocked and self._has_due(until_ms)):
            count += self._deliver(now_ms, until_ms, limit - count)

        self._sync_if_due(now_ms)
        if until_ms < this_second_ms:
            # A cancellation is not confirmed yet.
            return DelayRun(count, now_ms + (0 if count else WAIT_MS))
        if has_more or self._has_due(this_second_ms):
            return DelayRun(count, now_ms)

        if this_second_ms > self._progress.second_ms:
            self._progress = self._progress.at_time(this_second_ms)
        return DelayRun(count, self._next_due_ms(now_ms))

    def _held_from(self, this_second_ms: int) -> int:
        """The second from which on nothing is delivered now: this one, or that of a cancellation not loaded yet."""
        loaded = self._progress.next_offset
        self._unloaded = [each for each in self._unloaded if each.offset >= loaded]
        return min([this_second_ms, *(each.second_ms for each in self._unloaded)])

    def cancel(self, offset: int, now_ms: int) -> CancelledTimer | None:
        """Cancel the timer whose record is at an offset of the timer topic, unless its second is over.

        Callers: the one thread, or another one while that does not run.
        Returns: None as long as the timers are being loaded, or this one is not confirmed.
        Raises: Rejected if no timer with a unique key is there; Corrupt; Unavailable, StorageFull, OSError.
        """
        stored = self._store.state.next_offsets.get((TIMER_TOPIC, 0), 0)
        if self._topic.end <= offset < stored:
            return None
        timer = find_timer(self._log, self._topic, offset)
        if not self._ready and not self._prepare():
            return None

        second_ms = timer.second_ms
        if not self._may_cancel(second_ms, now_ms):
            return CancelledTimer(timer.unique_key, None)

        (appended,) = self._store.put_inner([timer.cancellation(now_ms)])
        self._unloaded.append(UnloadedCancellation(appended.first_offset, second_ms))
        return CancelledTimer(timer.unique_key, appended)

    def _may_cancel(self, second_ms: int, now_ms: int) -> bool:
        """Whether certainly nothing of a second was delivered, and nothing will be before the next call of `run`."""
        progress = self._progress
        begun = progress.second_ms + (1 if progress.second_offset else 0)
        if second_ms < max(now_ms - now_ms % timer_rule.PRECISION_MS, begun):
            return False
        # Before the clock was set back.
        return all(second_ms > old.second_ms for old in progress.past)

    def _has_due(self, this_second_ms: int) -> bool:
        """Whether a timer waits for a second that is over."""
        first_ms = self._cache.wheel.first_ms()
        return first_ms is not None and first_ms < this_second_ms

    def _next_due_ms(self, now_ms: int) -> int | None:
        """When to call `run` again after all that is due was delivered; None: nothing waits."""
        first_ms = self._cache.wheel.first_ms()
        due_ms = None if first_ms is None else first_ms + timer_rule.PRECISION_MS
        if self._store.state.next_offsets.get((TIMER_TOPIC, 0), 0) > self._progress.next_offset:
            # A roll or a put is not confirmed yet.
            retry_ms = now_ms + WAIT_MS
            due_ms = retry_ms if due_ms is None else min(due_ms, retry_ms)
        return due_ms

    # --- the start --------------------------------------------------------------------------------

    def _prepare(self) -> bool:
        """Begin where the log says that the deliveries stopped.

        Returns: False until dispatch has reached that offset again.
        """
        if not self._take_over_foreign():
            return False

        self._second = None
        if self._first_end is None:
            self._first_end = self._store.state.next_offsets.get((TIMER_TOPIC, 0), 0)
        if self._topic.end < self._first_end:
            return False
        values = self._store.state.progress[TIMERS_SERVICE]
        progress = timer_rule.TimerProgress.of(values)
        if self._topic.end < progress.next_offset:
            return False
        if values.get("foreign") and not self._replace_foreign_files():
            return False

        checkpoint = self._cache.read_checkpoint()
        if checkpoint is not None and checkpoint.queue_offset > self._topic.end:
            if checkpoint.queue_offset == self._rocketmq_read_end(checkpoint):
                return False
            # The log lost the records that the files belong to.
            checkpoint = None

        self._load(checkpoint, progress)
        self._ready = True
        return True

    def _take_over_foreign(self) -> bool:
        """Import the progress in RocketMQ's files if RocketMQ wrote them last.

        Returns: False until dispatch has reached it.
        """
        values = self._store.state.progress.get(TIMERS_SERVICE)
        checkpoint = self._cache.read_checkpoint()
        is_known = values is not None and (
            checkpoint is None or not checkpoint.foreign or bool(values.get("foreign"))
        )
        if is_known:
            return True
        before = timer_rule.TimerProgress.of(values or {})
        if self._topic.end < max(before.next_offset, self._rocketmq_read_end(checkpoint)):
            return False
        self._import(checkpoint, before)
        return True

    def _replace_foreign_files(self) -> bool:
        """Begin new files after an import. Returns: False until the import is on disk."""
        if self._log.synced < self._needed_end:
            return False
        self._cache.reset()
        self._store.put_inner([], progress=ServiceProgress(TIMERS_SERVICE, {"foreign": None}))
        return True

    def _load(self, checkpoint: TimerCheckpoint | None, progress: timer_rule.TimerProgress) -> None:
        """Load the wheel from the files that `checkpoint` describes, and add the records that they lack."""
        if self._cache.load(checkpoint, progress.second_ms) and checkpoint is not None:
            offset = checkpoint.queue_offset
        elif progress.imported:
            # Store times of a foreign store may fall.
            offset = 0
        else:
            offset = min(progress.next_offset, self._topic.first_that_may_wait(progress.second_ms))

        self._progress = progress
        while offset < progress.next_offset:
            rows = self._topic.read(offset, min(SLICE_ROWS, progress.next_offset - offset))
            # Rolls below the import were put again by the import.
            is_roll = rows.due.magic & timer_rule.MAGIC_ROLL != 0
            self._add(rows.select(~is_roll | (rows.offsets >= progress.imported)))
            offset = max(rows.next_offset, offset + 1)

        self._progress = replace(progress, next_offset=max(offset, progress.next_offset))

    def _rocketmq_read_end(self, checkpoint: TimerCheckpoint | None) -> int:
        """The end of the part of the topic that RocketMQ had read. An import waits until dispatch has reached it."""
        following = self._store.state.next_offsets.get((TIMER_TOPIC, 0), 0)
        return 0 if checkpoint is None else min(checkpoint.queue_offset, following)

    def _import(self, checkpoint: TimerCheckpoint | None, before: timer_rule.TimerProgress) -> None:
        """Continue where RocketMQ's files, if there are any, say that it stopped.

        RocketMQ began with RayMQ's files, and delivered from them the records below `before.next_offset`.
        """
        progress = before
        messages: list[InnerMessage] = []
        if checkpoint is not None:
            progress = imported_progress(checkpoint, before, self._topic.end)
            messages = pending_rolls(self._log, self._topic, before, progress)
        values = {**progress.values(), "foreign": None if checkpoint is None else True}
        self._store.put_inner(by_queue(messages), progress=ServiceProgress(TIMERS_SERVICE, values))
        self._needed_end = self._log.end

    # --- from the topic into the wheel ------------------------------------------------------------

    def _load_records(self, now_ms: int, limit: int) -> int:
        """Put confirmed records of the topic into the wheel. Deliver those that come too late for it."""
        count = 0
        self._blocked = False
        for _ in range(SLICES_LOADED_MAX):
            if self._progress.next_offset >= self._topic.end or count >= limit:
                break
            rows = self._topic.read(self._progress.next_offset, SLICE_ROWS)
            first_ms = self._cache.wheel.first_ms()
            if first_ms is None or first_ms < now_ms - now_ms % timer_rule.PRECISION_MS:
                rows = self._rows_within_wheel(rows)
            if self._blocked and not len(rows.offsets):
                break
            count += self._add_and_deliver_late(rows, now_ms)
        return count

    def _rows_within_wheel(self, rows: TimerRows) -> TimerRows:
        """The first rows whose seconds lie within the wheel. After a long stop some wait until others are delivered."""
        if not len(rows.offsets) or self._cache.takes(rows.due.slot_ms):
            return rows
        for count in range(1, len(rows.offsets) + 1):
            if not self._cache.takes(rows.due.slot_ms[:count]):
                self._blocked = True
                within = rows.select(slice(count - 1))
                return within._replace(next_offset=int(rows.offsets[count - 1]))
        return rows

    def _add_and_deliver_late(self, rows: TimerRows, now_ms: int) -> int:
        """Put rows into the wheel. Deliver those of seconds that are over, in their order, bundle by bundle."""
        late = np.flatnonzero(rows.due.slot_ms < self._progress.second_ms)
        # A timer and its cancellation are rolled together, and may both be late after that.
        due = DueRows(rows.positions, rows.sizes, rows.due.magic, rows.due.enqueue_ms)
        cancelled = self._cancelled(due.select(late))

        done = count = 0
        while len(late):
            fit = fitting(rows.sizes[late], self._log.config.bundle_bytes_max)
            stop = int(late[fit - 1]) + 1
            offset = int(rows.offsets[stop - 1]) + 1

            messages, _ = self._messages(due.select(late[:fit]), cancelled, now_ms)
            progress = replace(self._progress, next_offset=offset)
            if messages:
                self._append(messages, progress)
            self._add(rows.select(slice(done, stop)))
            self._progress = progress
            count += fit
            late, done = late[fit:], stop

        self._add(rows.select(slice(done, None)))
        next_offset = max(rows.next_offset, self._progress.next_offset)
        self._progress = replace(self._progress, next_offset=next_offset)
        return count

    def _add(self, rows: TimerRows) -> None:
        """Put rows into the wheel. A second that is being delivered begins again if it gets a row."""
        if not len(rows.offsets):
            return
        self._cache.add(rows.due, rows.positions, rows.sizes, self._progress.second_ms)
        self._needed_end = max(self._needed_end, int(rows.positions[-1] + rows.sizes[-1]))
        self._dirty = True
        second = self._second
        if second is not None and bool((rows.due.slot_ms == second.time_ms).any()):
            self._second = None

    # --- delivery ---------------------------------------------------------------------------------

    def _deliver(self, now_ms: int, this_second_ms: int, limit: int) -> int:
        """Deliver the seconds that are over, bundle by bundle. Returns: how many messages."""
        count = 0
        while count < limit:
            second_ms = self._cache.wheel.first_ms()
            if second_ms is None or second_ms >= this_second_ms:
                break
            if second_ms > self._progress.second_ms:
                self._progress = self._progress.at_time(second_ms)
            if self._second is None or self._second.time_ms != second_ms:
                self._second = self._begin_second(second_ms)
            count += self._deliver_bundle(self._second, now_ms)
        return count

    def _begin_second(self, time_ms: int) -> DueSecond:
        """The records of a second that are not delivered yet, and the cancellations among them."""
        units = self._cache.units_of(time_ms)
        positions = units["position"].astype(np.int64)
        is_stored = positions >= self._log.start
        self.skipped += len(positions) - int(is_stored.sum())

        is_waiting = is_stored
        progress = self._progress
        if is_stored.any() and (progress.second_offset or progress.past):
            offsets = np.full(len(positions), -1, dtype=np.int64)
            offsets[is_stored] = self._topic.offsets_of(positions[is_stored])
            is_waiting = is_stored & progress.waits(time_ms, offsets)

        columns = ("position", "record_size", "magic", "enqueue_time_ms")
        rows = DueRows(*(units[name][is_waiting].astype(np.int64) for name in columns))
        return DueSecond(time_ms, rows, self._cancelled(rows))

    def _cancelled(self, rows: DueRows) -> frozenset[str]:
        """The keys that the cancellations among these records name."""
        is_delete = rows.magic & timer_rule.MAGIC_DELETE != 0
        is_due = rows.magic & timer_rule.MAGIC_ROLL == 0
        chosen = rows.select(is_delete & is_due)
        found, _ = waiting_rows(self._log, chosen.positions, chosen.sizes)
        return frozenset(decode(each.properties).get(timer_rule.DELETE_KEY, "") for each in found)

    def _deliver_bundle(self, second: DueSecond, now_ms: int) -> int:
        """Deliver one bundle of messages together with the progress. The last bundle ends the second."""
        low = second.next_row
        high = low
        messages: list[InnerMessage] = []
        offset = 0
        count = len(second.rows.positions)

        if low < count:
            high = low + fitting(second.rows.sizes[low:], self._log.config.bundle_bytes_max)
            rows = second.rows.select(slice(low, high))
            messages, offset = self._messages(rows, second.cancelled, now_ms)

        is_last_bundle = high == count
        if is_last_bundle:
            progress = self._progress.at_time(second.time_ms + timer_rule.PRECISION_MS)
        else:
            progress = replace(self._progress, second_offset=offset + 1)

        if messages:
            self._append(messages, progress)
        self._progress = progress
        second.next_row = high

        if is_last_bundle:
            self._cache.wheel.drop_first()
            self._second = None
        self._dirty = True
        return high - low

    def _messages(
        self, due: DueRows, cancelled: frozenset[str], now_ms: int
    ) -> tuple[list[InnerMessage], int]:
        """The messages to put for these records, and the offset of the last of them."""
        messages: list[InnerMessage] = []
        found, rows = waiting_rows(self._log, due.positions, due.sizes)
        self.skipped += len(due.positions) - len(rows)
        kinds, times_ms = due.magic[rows].tolist(), due.enqueue_ms[rows].tolist()

        for each, kind, enqueued in zip(found, kinds, times_ms, strict=True):
            times = encode({ENQUEUE_PROPERTY: str(enqueued), DEQUEUE_PROPERTY: str(now_ms)})
            if kind & timer_rule.MAGIC_ROLL:
                messages.append(_rolled(each, times))
                continue
            if kind & timer_rule.MAGIC_DELETE or (
                cancelled and delete_key(decode(each.properties)) in cancelled
            ):
                continue

            if timer_rule.ROLL_TIMES.encode() in each.properties:
                each = each._replace(properties=_TIMER_PROPERTIES.sub(_only_rolls, each.properties))
            message = each.delivered(times)
            if message is None:
                self.skipped += 1
            else:
                messages.append(message)

        return messages, found[-1].queue_offset if found else self._progress.second_offset - 1

    def _append(self, messages: list[InnerMessage], progress: timer_rule.TimerProgress) -> None:
        self._store.put_inner(
            by_queue(messages), progress=ServiceProgress(TIMERS_SERVICE, progress.values())
        )
        fail_point("delay.bundle_appended")
        self._progress = progress
        self._needed_end = max(self._needed_end, self._log.end)

    # --- the files --------------------------------------------------------------------------------

    def _sync_if_due(self, now_ms: int) -> None:
        too_early = 0 <= self._next_sync_ms - now_ms <= SYNC_INTERVAL_MS
        if self._dirty and not too_early and self._sync(now_ms):
            self._next_sync_ms = now_ms + SYNC_INTERVAL_MS

    def _sync(self, now_ms: int) -> bool:
        if self._log.synced < self._needed_end:
            return False
        self._cache.sync(self._progress.second_ms, self._progress.next_offset, now_ms)
        self._dirty = False
        return True

    def close(self, now_ms: int) -> None:
        """Complete the files on disk and close them. The next start, or RocketMQ, continues from them."""
        try:
            if self._ready:
                self._sync(now_ms)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the files as a crash would."""
        self._ready = False
        self._cache.close()


def _rolled(found: WaitingMessage, times: bytes) -> InnerMessage:
    """The message for another turn in the timer topic."""
    turns = decode(found.properties).get(timer_rule.ROLL_TIMES, "0")
    turn = int(turns) + 1 if turns.isdecimal() else 1
    bare = found._replace(properties=_TIMER_PROPERTIES.sub(b"", found.properties))
    text = bare.with_text(times + encode({timer_rule.ROLL_TIMES: str(turn)}))
    return found.moved(TIMER_TOPIC, 0, text)


def _only_rolls(found: re.Match[bytes]) -> bytes:
    return found[0] if found[0].startswith(timer_rule.ROLL_TIMES.encode()) else b""
