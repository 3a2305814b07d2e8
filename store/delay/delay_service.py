"""Delivery of waiting messages: delay levels and timers together, driven by the host of a store.

A message of a delay level is delivered once its level's time is over, exactly once, across crashes too.

The messages of a level wait in one queue of the schedule topic, in the order in which they are due. Each bundle of
deliveries is appended together with how far its level came.
Source: ScheduleMessageService, RocketMQ 5.3.3, which keeps the position in a file written every ten seconds. After a
crash it delivers later messages again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from raymq.store.base.arrays import leading
from raymq.store.base.failpoints import fail_point
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC
from raymq.store.config.delay_levels import LEVELS_SERVICE
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.put.service_host import ServiceHost
from raymq.store.queues.consume_queue import BLANK_SIZE, ConsumeQueue, QueueUnits

from .delay_hook import DelayHook
from .delayed_record import SLICE_ROWS, DelayRun, by_queue, fitting, waiting_rows
from .timer_store import TimerMessageStore

#: messages delivered by one call, about
RUN_MESSAGES = 8192


class LevelSlice(NamedTuple):
    """Result of one bundle of a level."""

    #: messages delivered or skipped
    delivered: int
    next_offset: int
    #: when the next message is due; None: none waits
    due_ms: int | None


def level_offsets(store: ServiceHost) -> dict[int, int]:
    """Level -> offset of its queue in the schedule topic that is delivered next: delayOffset.json's offsetTable."""
    # A copy: any thread asks, while deliveries add levels.
    table = dict(store.state.progress.get(LEVELS_SERVICE, {}))
    return {int(level): offset for level, offset in table.items()}


def used_levels(store: ServiceHost) -> list[int]:
    """The levels that have a queue, the shortest first. The configured list may have been longer when they got it."""
    return [queue_id + 1 for queue_id in store.consume_queues.queue_ids(SCHEDULE_TOPIC)]


class ScheduleMessageService:
    """The delay levels of one shard. Callers: one thread."""

    def __init__(self, store: ServiceHost) -> None:
        self._store = store
        self.levels_ms = store.config.delay_levels_ms
        #: messages that name no queue they could be delivered to, or that the log has deleted
        self.skipped = 0

    def deliver_due(self, now_ms: int, *, limit: int) -> DelayRun:
        """Deliver due messages, at most about `limit`, the shortest level first.

        A delay begins at the message's store time, which may be ahead of the wall clock (StoreTimeClock).
        Raises: StorageFull, Unavailable, OSError. The next call delivers the rest.
        """
        ahead_ms = self._store.store_times.ahead_ms(self._store.state.store_time_ms)
        now_ms += ahead_ms

        count = 0
        next_due_ms: int | None = None
        offsets = level_offsets(self._store)
        for level in used_levels(self._store):
            queue = self._store.consume_queues.get(SCHEDULE_TOPIC, level - 1)
            offset = self._corrected(level, offsets.get(level, 0), queue)
            due_ms: int | None = now_ms
            while due_ms is not None and due_ms <= now_ms and count < limit:
                found = self._deliver_slice(level, queue, offset, now_ms)
                count += found.delivered
                offset, due_ms = found.next_offset, found.due_ms
            if due_ms is not None:
                next_due_ms = due_ms if next_due_ms is None else min(next_due_ms, due_ms)

        return DelayRun(count, None if next_due_ms is None else next_due_ms - ahead_ms)

    def _corrected(self, level: int, offset: int, queue: ConsumeQueue) -> int:
        """An offset inside the queue. After a start the queue may be shorter than in the log: then there is nothing to
        do."""
        stored = self._store.state.next_offsets.get((SCHEDULE_TOPIC, level - 1), 0)
        known = max(queue.max_offset, stored)
        if offset > known:
            # A foreign store's file gave an offset above the end. Later puts must not count as delivered.
            self._put_with_progress(level, known, [])
        return min(max(offset, queue.min_offset), known)

    def _put_with_progress(self, level: int, offset: int, messages: list[InnerMessage]) -> None:
        progress = ServiceProgress(LEVELS_SERVICE, {str(level): offset})
        self._store.put_inner(messages, progress=progress)

    def _deliver_slice(
        self, level: int, queue: ConsumeQueue, offset: int, now_ms: int
    ) -> LevelSlice:
        """Deliver one bundle of a level."""
        if offset >= queue.max_offset:
            return LevelSlice(0, offset, None)

        units = queue.read(offset, SLICE_ROWS)
        due_count = self._due_count(level, units, now_ms)
        if not due_count:
            return LevelSlice(0, offset, int(units["tags_code"][0]))

        is_blank = units["size"] == BLANK_SIZE
        sizes = np.where(is_blank, 0, units["size"])[:due_count].astype(np.int64)
        count = fitting(sizes, self._store.config.bundle_bytes_max)
        positions = units["position"][:count].astype(np.int64)
        is_stored = ~is_blank[:count] & (positions >= self._store.log.start)

        found, _ = waiting_rows(self._store.log, positions[is_stored], sizes[:count][is_stored])
        delivered = [each.delivered() for each in found]
        messages = [message for message in delivered if message is not None]
        self.skipped += int((~is_blank[:count]).sum()) - len(messages)

        next_offset = offset + count
        self._put_with_progress(level, next_offset, by_queue(messages))
        fail_point("delay.bundle_appended")

        due_ms: int | None = now_ms
        if next_offset >= queue.max_offset:
            due_ms = None
        elif due_count == count < len(units):
            due_ms = int(units["tags_code"][count])
        return LevelSlice(count, next_offset, due_ms)

    def _due_count(self, level: int, units: QueueUnits, now_ms: int) -> int:
        """How many of the first units are due."""
        deliver_ms = units["tags_code"].astype(np.int64)
        # Levels above the last count as the last, as in a put.
        delay_ms = self.levels_ms[min(level, len(self.levels_ms)) - 1]
        # No store time is in the future: the level's delay was configured longer when the record was stored.
        is_too_far = deliver_ms > now_ms + delay_ms
        is_due = (deliver_ms <= now_ms) | is_too_far | (units["size"] == BLANK_SIZE)
        return leading(is_due)


class DelayHost(ServiceHost, Protocol):
    """The store of a `DelayService`."""

    delay_hook: DelayHook


class DelayService:
    """Delivers waiting messages. Callers: one thread."""

    def __init__(self, store: DelayHost) -> None:
        self._store = store
        self.levels = ScheduleMessageService(store)
        self.timers = TimerMessageStore(store)
        store.delay_hook.waiting = self.timers.waiting
        store.retention_floors.append(self.needed_from)

    def leave(self) -> None:
        """Keep no records any more: another replica delivers from now on."""
        floors = self._store.retention_floors
        if self.needed_from in floors:
            floors.remove(self.needed_from)

    @property
    def active(self) -> bool:
        """Whether any message has ever been delayed here."""
        return self.timers.active or bool(used_levels(self._store))

    def run_once(self, now_ms: int, *, limit: int = RUN_MESSAGES) -> DelayRun:
        """Deliver due messages, at most about `limit`. If there are more, the next call is due at once.

        Durable: after the flush service's sync. Raises: StorageFull, Unavailable, OSError. Call again later.
        """
        levels = self.levels.deliver_due(now_ms, limit=limit)
        timers = self.timers.run(now_ms, limit=max(1, limit - levels.messages))
        times_ms = [run.next_due_ms for run in (levels, timers) if run.next_due_ms is not None]
        return DelayRun(levels.messages + timers.messages, min(times_ms, default=None))

    def needed_from(self) -> int | None:
        """The physical offset from which on records may still wait here; None: none waits. Deletion stops there."""
        done = level_offsets(self._store)
        waiting_from = [(TIMER_TOPIC, 0, self.timers.first_waiting_offset())]
        for level in used_levels(self._store):
            waiting_from.append((SCHEDULE_TOPIC, level - 1, done.get(level, 0)))
        positions: list[int] = []
        for topic, queue_id, offset in waiting_from:
            queue = self._store.consume_queues.find(topic, queue_id)
            if queue is not None:
                positions += queue.read(max(offset, queue.min_offset), 1)["position"].tolist()
        return min(positions, default=None)
