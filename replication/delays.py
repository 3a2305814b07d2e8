"""How late the messages of living processes come, and how long others wait for them."""

from __future__ import annotations

import math


class SlowestDelay:
    """A maximum of delays that is forgotten by and by: half of it in each `halving_ms`.

    One delay raises it to twice its value and `step_ms` at most. A cut of minutes that heals therefore counts as one
    short delay, and a starved machine, whose delays are many, soon counts with its longest.
    """

    def __init__(self, *, most_ms: int, halving_ms: int, step_ms: int) -> None:
        """Args: `most_ms`: no value is above it."""
        self._most_ms = most_ms
        self._halving_ms = halving_ms
        self._step_ms = step_ms
        self._noted = 0.0
        self._noted_at_ms = 0

    def note(self, delay_ms: int, now_ms: int) -> None:
        """Take one delay."""
        known = self._at(now_ms)
        if delay_ms > known:
            self._noted = min(delay_ms, 2 * known + self._step_ms, self._most_ms)
            self._noted_at_ms = now_ms

    def value_ms(self, now_ms: int) -> int:
        """The slowest delay, as far as it is remembered."""
        return int(self._at(now_ms))

    def _at(self, now_ms: int) -> float:
        age_ms = now_ms - self._noted_at_ms
        return self._noted * math.pow(0.5, age_ms / self._halving_ms)


class CallTimeout:
    """How long a call of another replica waits for its answer: twice as long after each one that came too late."""

    def __init__(self, *, least_ms: int, most_ms: int) -> None:
        self._least_ms = least_ms
        self._most_ms = most_ms
        self.value_ms = least_ms

    def note_answer(self, took_ms: int) -> None:
        """Take a call that was answered in time: four times as long is enough for the next one."""
        self.value_ms = min(self.value_ms, max(self._least_ms, 4 * took_ms))

    def note_failure(self, took_ms: int) -> None:
        """Take a call that failed. One that failed at once found nothing that listens, and waits no longer."""
        if took_ms >= self.value_ms:
            self.value_ms = min(2 * self.value_ms, self._most_ms)
