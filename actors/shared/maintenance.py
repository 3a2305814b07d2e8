"""The maintenance loop of a replica: statistics and upkeep every second, deletion of old files every few seconds.

Source: StoreStatsService#run and DefaultMessageStore#cleanFilesPeriodically, RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from raymq.store.base.clock import Clock

logger = logging.getLogger("raymq.commit_log")

STEP_S = 1.0
#: pause between the start and the first pass
FIRST_PASS_MS = 60_000


class Cleaner(Protocol):
    """`store.log.clean.CleanService`, which imports numpy."""

    def run_once(self) -> object:
        """Delete the files that may be deleted, once."""

    def delete_now(self) -> None:
        """Delete expired files at any hour for a while."""


class Maintenance:
    """The jobs of the loop. Threads: `run` is one of its own."""

    def __init__(
        self,
        cleaner: Cleaner,
        *,
        clock: Clock,
        interval_ms: int,
        sample: Callable[[int], None] | None = None,
        upkeep: Callable[[], None] | None = None,
    ) -> None:
        """Args: `sample`: gets the monotonic time in ms. `upkeep`: an exception of it ends `run`."""
        #: another one takes its place when the role of the replica changes
        self.cleaner = cleaner
        self._clock = clock
        self._interval_ms = interval_ms
        self._sample = sample
        self._upkeep = upkeep
        self._next_pass_ms = clock.monotonic_ms() + FIRST_PASS_MS
        self._wake = threading.Event()
        #: why the last pass stopped, for status, or None after the next one that did not
        self.last_error: str | None = None

    def step(self) -> None:
        """Sample statistics, run the upkeep, and delete files when the next pass is due."""
        now_ms = self._clock.monotonic_ms()
        if self._sample is not None:
            self._sample(now_ms)
        if self._upkeep is not None:
            self._upkeep()
        if now_ms < self._next_pass_ms:
            return

        self._next_pass_ms = now_ms + self._interval_ms
        try:
            self.cleaner.run_once()
        except Exception as error:
            # Old files that stay do no harm yet. The next pass tries again.
            logger.warning("old files could not be deleted: %s", error)
            self.last_error = str(error)
        else:
            self.last_error = None

    def delete_now(self) -> None:
        """Begin a pass at once, and delete expired files at any hour for a while."""
        self.cleaner.delete_now()
        self._next_pass_ms = 0
        self._wake.set()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Iterate until `stopping`."""
        while not stopping():
            self.step()
            self._wake.wait(STEP_S)
            self._wake.clear()

    def wake(self) -> None:
        """Check at once whether to stop."""
        self._wake.set()
