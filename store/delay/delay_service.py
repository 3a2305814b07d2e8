"""Delay levels and timers together, driven by the host of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from raymq.store.format import SCHEDULE_TOPIC, TIMER_TOPIC

from .delay_schedule import ScheduleMessageService, level_offsets
from .timer_store import TimerMessageStore

if TYPE_CHECKING:
    from raymq.store.message_store import MessageStore

#: messages delivered by one call, about
RUN_MESSAGES = 8192


class DelayRun(NamedTuple):
    """The result of one call of `DelayService.run_once`."""

    messages: int
    #: when to call again, ms; None: nothing waits
    next_due_ms: int | None


class DelayService:
    """Delivers waiting messages. Callers: one thread."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.levels = ScheduleMessageService(store)
        self.timers = TimerMessageStore(store)
        store.delay_hook.waiting = self.timers.waiting
        store.holds.append(self.holds_from)

    @property
    def active(self) -> bool:
        """Whether any message has ever been delayed here."""
        queues = self._store.consume_queues
        levels = range(len(self._store.config.delay_levels_ms))
        return self.timers.active or any(queues.find(SCHEDULE_TOPIC, q) for q in levels)

    def run_once(self, now_ms: int, *, limit: int = RUN_MESSAGES) -> DelayRun:
        """Deliver due messages, at most about `limit`; more: the next call is due at once.

        Durable: nothing; the flush service syncs. Raises: StorageFull, Unavailable, OSError; call again later.
        """
        levels = self.levels.deliver_due(now_ms, limit=limit)
        count, timer_due = self.timers.run(now_ms, limit=max(1, limit - levels.messages))
        dues = [due for due in (levels.next_due_ms, timer_due) if due is not None]
        return DelayRun(levels.messages + count, min(dues, default=None))

    def holds_from(self) -> int | None:
        """The physical offset from which on records may still wait here; None: none waits. Deletion stops there."""
        store = self._store
        found = [store.consume_queues.find(TIMER_TOPIC, 0)]
        offsets = [0]
        if found[0] is not None:
            offsets[0] = self.timers.holds_from()
        done = level_offsets(store)
        for level in range(1, len(store.config.delay_levels_ms) + 1):
            found.append(store.consume_queues.find(SCHEDULE_TOPIC, level - 1))
            offsets.append(done.get(level, 0))
        positions = []
        for queue, offset in zip(found, offsets, strict=True):
            if queue is not None:
                units = queue.read(max(offset, queue.min_offset), 1)
                positions += [int(each) for each in units["position"]]
        return min(positions, default=None)

    def close(self, now_ms: int) -> None:
        """Complete the timers' files on disk. Raises: StorageFull, OSError."""
        self.timers.close(now_ms)

    def abandon(self) -> None:
        """Release the files as a crash would."""
        self.timers.abandon()
