"""The only module that reads clocks."""

from __future__ import annotations

import time


class Clock:
    """Wall time for timestamps, monotonic time for timeouts. Tests replace it."""

    def now_ms(self) -> int:
        """Wall clock, ms since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Monotonic clock, ms; comparable among the processes of one boot."""
        return time.monotonic_ns() // 1_000_000

    def monotonic(self) -> float:
        """Monotonic clock, seconds."""
        return time.monotonic()

    def sleep_ms(self, ms: float) -> None:
        """Sleep."""
        time.sleep(ms / 1000)
