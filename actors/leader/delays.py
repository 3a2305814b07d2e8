"""Delivers the delayed messages of a leader (delay levels and timers), on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.store.base.errors import Bug, RayMQError, Unavailable
from raymq.store.delay.delay_service import DelayService
from raymq.store.delay.timer_cancel import CancelledTimer
from raymq.store.records.requests import AppendedRows

#: messages delivered before their promise is awaited: a slow disk slows deliveries down, as it does producers
RUN_MESSAGES = 2048
#: how often to check while messages are delayed: the wall clock may be set
CHECK_S = 1.0
#: after a failure (ScheduleMessageService.DELAY_FOR_A_PERIOD)
RETRY_S = 10.0
#: how long a cancellation waits until the timers are loaded, and how often it looks
LOADING_WAIT_MS, LOADING_PAUSE_MS = 5_000, 50
#: how failures are reported
PART = "delayed delivery"


class Delays:
    """Delivers delayed messages when they are due. Threads: `run` has its own, which sleeps while no message is due."""

    def __init__(self, parts: ReplicaParts, await_promise: Callable[[AppendedRows], None]) -> None:
        store = parts.store
        self._store = store
        self._clock = parts.clock
        self._check_serving = parts.serving.check
        self._failures = parts.failures
        self._await_promise = await_promise
        self._service = DelayService(store)
        self._wake = threading.Event()
        #: `reput.delayed` at the last wakeup
        self._last_delayed = -1
        self._stopping = False
        self._run_lock = threading.Lock()

    def note_dispatch(self) -> None:
        """Messages were dispatched: wake up, if some are delayed. Callers: the dispatching thread."""
        delayed = self._store.reput.delayed
        if delayed != self._last_delayed:
            self._last_delayed = delayed
            self._wake.set()

    def run(self) -> None:
        """Deliver until `stop`."""
        wait_s: float | None = 0.0
        while not self._stopping:
            self._wake.wait(wait_s)
            self._wake.clear()
            try:
                wait_s = self._step()
                self._failures.clear(PART)
            except Bug:
                raise
            except (RayMQError, OSError) as error:
                if not self._stopping:
                    self._failures.note(PART, error)
                wait_s = RETRY_S

    def _step(self) -> float | None:
        """Deliver what is due. Returns: seconds until the next step; None: wait for a message to be delayed."""
        with self._run_lock:
            if self._stopping:
                return 0.0
            self._check_serving()
            now_ms = self._clock.now_ms()
            ran = self._service.run_once(now_ms, limit=RUN_MESSAGES)
        if ran.messages:
            self._await_promise(AppendedRows.up_to(self._store.log.end))
        if ran.next_due_ms is None:
            # One more step after deliveries, which completes the timers' files.
            return CHECK_S if ran.messages else None
        return min(CHECK_S, max(0.0, (ran.next_due_ms - self._clock.now_ms()) / 1000))

    def cancel(self, offset: int) -> CancelledTimer:
        """Cancel a timer between two deliveries: `TimerMessageStore.cancel`. Waits while the timers are being loaded.

        Raises: Unavailable when that takes longer than LOADING_WAIT_MS; otherwise as there.
        """
        until_ms = self._clock.monotonic_ms() + LOADING_WAIT_MS
        while True:
            with self._run_lock:
                self._check_serving()
                found = self._service.timers.cancel(offset, self._clock.now_ms())
            if found is not None:
                return found
            if self._stopping or self._clock.monotonic_ms() >= until_ms:
                fault = "the timers are being loaded, or this one is not confirmed; ask again"
                raise Unavailable(fault, field="timers")
            self._clock.sleep_ms(LOADING_PAUSE_MS)

    def stop(self) -> None:
        """End `run`."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Complete the timers' files, after the last sync of the log. Raises: StorageFull, OSError."""
        with self._run_lock:
            self._service.timers.close(self._clock.now_ms())

    def abandon(self) -> None:
        """Release the timers' files as a crash would."""
        with self._run_lock:
            self._service.leave()
            self._failures.clear(PART)
            self._service.timers.abandon()
