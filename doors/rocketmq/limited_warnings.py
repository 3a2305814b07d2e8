"""Warnings of which clients can cause any number: the first one is logged, those after it are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("raymq.rocketmq")

#: between two lines of one kind of warning
EVERY_S = 10.0


class LimitedWarnings:
    """Warnings of one kind. Callers: one thread, which calls `log_pending` regularly."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: `clock`: monotonic, seconds."""
        self._clock = clock
        self._next_s = clock()
        #: not said, and the newest of them
        self._left = 0
        self._newest = ""

    def note(self, text: str) -> None:
        """Say a warning, or count it if one was said less than `EVERY_S` ago."""
        self._left, self._newest = self._left + 1, text
        self.log_pending()

    def log_pending(self) -> None:
        """Say what was counted, if it is time."""
        now_s = self._clock()
        if not self._left or now_s < self._next_s:
            return
        if self._left == 1:
            logger.warning("%s", self._newest)
        else:
            logger.warning("%s, and %d more like it", self._newest, self._left - 1)
        self._next_s, self._left = now_s + EVERY_S, 0
