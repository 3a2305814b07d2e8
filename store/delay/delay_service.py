"""Delay levels and timers together: what a host drives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .delay_levels import SCHEDULE_TOPIC
from .delay_schedule import ScheduleMessageService
from .timer_store import TimerMessageStore

if TYPE_CHECKING:
    from raymq.store.message_store import MessageStore

#: messages delivered by one call, about
RUN_MESSAGES = 8192


class DelayRun(NamedTuple):
    """What one call of `DelayService.run_once` did."""

    messages: int
    #: when to call again, ms; None: nothing waits
    next_due_ms: int | None


class DelayService:
    """Delivers what waited. Callers: one thread."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.levels = ScheduleMessageService(store)
        self.timers = TimerMessageStore(store)
        store.delay_hook.waiting = self.timers.waiting

    @property
    def active(self) -> bool:
        """Whether anything ever waited here."""
        queues = self._store.consume_queues
        levels = range(len(self._store.config.delay_levels_ms))
        return self.timers.active or any(queues.find(SCHEDULE_TOPIC, q) for q in levels)

    def run_once(self, now_ms: int, *, limit: int = RUN_MESSAGES) -> DelayRun:
        """Deliver what is due, at most about `limit` messages; more: the next call is due at once.

        Durable: nothing; the flush service syncs. Raises: StorageFull, Unavailable, OSError; call again later.
        """
        levels = self.levels.deliver_due(now_ms, limit=limit)
        count, timer_due = self.timers.run(now_ms, limit=max(1, limit - levels.messages))
        dues = [due for due in (levels.next_due_ms, timer_due) if due is not None]
        return DelayRun(levels.messages + count, min(dues, default=None))

    def close(self, now_ms: int) -> None:
        """Complete the timers' files on disk. Raises: StorageFull, OSError."""
        self.timers.close(now_ms)
