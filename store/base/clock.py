"""The only module that reads clocks.

Stamps are the times that records carry and delay levels count in. A wall clock may be set back. Store times never go
back: they continue from the last one, a sixteenth slower, until the wall clock has caught up. So a delay that begins at
a store time is never early and at most a sixteenth late, however the wall clock jumps.
"""

from __future__ import annotations

import ctypes
import threading
import time

#: prctl(2): the argument in nanoseconds is how much later than asked the kernel may wake this thread
_SET_TIMER_SLACK = 29

#: the share of elapsed time by which store times grow while they are ahead of the wall clock
_RATE = 15 / 16


class Clock:
    """Wall time for timestamps, monotonic time for timeouts. Tests replace it."""

    def now_ms(self) -> int:
        """Wall clock, ms since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Monotonic clock, ms. All processes of one boot share it."""
        return time.monotonic_ns() // 1_000_000

    def monotonic(self) -> float:
        """Monotonic clock, seconds."""
        return time.monotonic()

    def sleep_ms(self, ms: float) -> None:
        """Sleep for `ms` milliseconds."""
        time.sleep(ms / 1000)

    def nap(self, seconds: float) -> None:
        """Sleep for less than a millisecond. `sleep_ms` may take 50 us longer, the kernel's default timer slack."""
        if not _precise.is_set:
            ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1))
            _precise.is_set = True
        time.sleep(seconds)


class _Precise(threading.local):
    """Whether the timer slack of a thread is set."""

    is_set = False


_precise = _Precise()


class StoreTimeClock:
    """The stamps of one store. Callers: any thread; those that append hold the put lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: the last answer, and the monotonic clock then
        self._last = (float("-inf"), 0)

    def now_ms(self, at_least_ms: int, monotonic_ms: int) -> int:
        """The store time of the next record, ms since 1970. Args: `at_least_ms`: the newest stamp in the log."""
        last, then_ms = self._last
        going = last + (monotonic_ms - then_ms) * _RATE
        stamp = max(self._clock.now_ms(), at_least_ms)
        self._last = (going if going > stamp else stamp, monotonic_ms)
        return int(going) if going > stamp else stamp

    def ahead_ms(self, at_least_ms: int) -> int:
        """How far stamps are ahead of the wall clock."""
        wall_ms = self._clock.now_ms()
        return max(0, self.now_ms(at_least_ms, self._clock.monotonic_ms()) - wall_ms)
