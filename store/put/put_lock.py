"""The put lock. It measures how long it is held, so that a store whose disk stalls refuses puts instead of queueing
them.

Source: CommitLog#putMessageLock and beginTimeInLock, RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
import threading

from raymq.store.base.clock import Clock
from raymq.store.base.slow_calls import SLOW_S, SlowCalls

logger = logging.getLogger("raymq.store.put")

#: a longer hold comes from a clock that jumped, not from a busy disk
BUSY_MAX_MS = 10_000_000


class PutLock:
    """Orders puts. Not re-entrant."""

    def __init__(self, clock: Clock) -> None:
        #: hot paths use it in a `with` and set `begin_ms` themselves: __enter__ and __exit__ cost more than the rest of
        #: the lock
        self.thread_lock = threading.Lock()
        self._clock = clock
        self._now_ms = clock.monotonic_ms
        self.slow_waits = SlowCalls("a wait for the put lock", logger, clock)
        #: monotonic time at which the holder acquired the lock; 0: it is free
        self.begin_ms = 0

    def begin_wait(self) -> float:
        """When a wait for `thread_lock` begins, seconds; 0.0 if it is free."""
        return self._clock.monotonic() if self.thread_lock.locked() else 0.0

    def waited_s(self, began_s: float) -> float:
        """How long the holder has waited. Args: `began_s`: of `begin_wait`."""
        return self._clock.monotonic() - began_s if began_s else 0.0

    def note_wait(self, waited_s: float, messages: int) -> None:
        """Count a wait if it was slow. Callers: after the lock was released, because it may write a line."""
        if waited_s > SLOW_S:
            self.slow_waits.note(waited_s, f"{messages} message(s)")

    def __enter__(self) -> None:
        self.thread_lock.acquire()
        self.begin_ms = self._now_ms()

    def __exit__(self, *failure: object) -> None:
        self.begin_ms = 0
        self.thread_lock.release()

    def held_ms(self) -> int:
        """The time for which the lock has been held; 0 if it is free. Callers: any thread."""
        begin = self.begin_ms
        return self._now_ms() - begin if begin else 0

    def busy(self, limit_ms: int) -> bool:
        """Whether the holder has had the lock for longer than `limit_ms`.

        Reads no clock while the lock is free. Source: DefaultMessageStore#isOSPageCacheBusy.
        """
        return bool(self.begin_ms) and limit_ms < self.held_ms() < BUSY_MAX_MS
