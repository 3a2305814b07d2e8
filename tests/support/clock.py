"""A clock that moves only when a test says so."""

from __future__ import annotations

from raymq.store.base.clock import Clock


class ManualClock(Clock):
    """Wall and monotonic time in one: `advance` moves both, `sleep_ms` calls it."""

    def __init__(self, now_ms: int = 1_700_000_000_000, monotonic_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms
        #: every sleep asked for, ms
        self.slept: list[float] = []

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def monotonic(self) -> float:
        return self._monotonic_ms / 1000

    def sleep_ms(self, ms: float) -> None:
        self.slept.append(ms)
        self.advance(ms)

    def nap(self, seconds: float) -> None:
        self.sleep_ms(seconds * 1000)

    def advance(self, ms: float) -> None:
        """Let time pass."""
        self._now_ms += int(ms)
        self._monotonic_ms += int(ms)

    def jump_wall(self, ms: int) -> None:
        """Set the wall clock forward or back, as an operator or NTP does."""
        self._now_ms += ms
