"""Calls that take longer than half a second: each is counted, and a line now and then says how long they take.

Source: RocketMQ 5.3.3 writes a line for each put, hold of the put lock and flush of more than 500 ms. A disk that
stalls makes every one of them slow, so that here one line stands for those of LOG_PERIOD_S.
"""

from __future__ import annotations

import logging
import math
import threading

from .clock import Clock

#: a longer call is slow
SLOW_S = 0.5
#: from one line to the next one about calls of the same kind
LOG_PERIOD_S = 10.0


class SlowCalls:
    """Those of one kind. Callers: any thread, and only about slow calls, so that a quick one costs one comparison."""

    def __init__(self, what: str, logger: logging.Logger, clock: Clock) -> None:
        """Args: `what`: one call in the words of a line, such as "a put"."""
        self._what = what
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_s = -math.inf
        #: those since the last line
        self._more = 0
        self._longest_s = 0.0
        #: all so far
        self.count = 0

    def note(self, took_s: float, facts: str) -> None:
        """Count a call that took longer than SLOW_S, and write of it. Args: `facts`: what it was about."""
        self.add()
        self.write(took_s, facts)

    def add(self) -> None:
        """Count a call. Callers: those that hold a lock, and call `write` without it."""
        with self._lock:
            self.count += 1

    def write(self, took_s: float, facts: str) -> None:
        """Write a line of a call that was counted, or leave it to the next one. A disk that hangs delays the caller."""
        with self._lock:
            now_s = self._clock.monotonic()
            if now_s - self._logged_s < LOG_PERIOD_S:
                self._more += 1
                self._longest_s = max(self._longest_s, took_s)
                return
            more = ""
            if self._more:
                more = f"; since the last such line {self._more} more, of up to {self._longest_s * 1000:.0f} ms"
            self._logged_s, self._more, self._longest_s = now_s, 0, 0.0
        self._logger.warning("%s took %.0f ms: %s%s", self._what, took_s * 1000, facts, more)
